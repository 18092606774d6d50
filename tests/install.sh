#!/bin/bash
# Installs the named packages that are missing.  $1 is the word that makes a command root's, or "".
set -eu
sudo=$1
shift
missing=()
for package in "$@"; do
    status=$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null || true)
    [ "$status" = installed ] || missing+=("$package")
done
if [ ${#missing[@]} -eq 0 ]; then
    echo "all $# packages are installed"
    exit 0
fi
if ! command -v apt-get >/dev/null; then
    echo "this system has no apt-get: install what Debian calls ${missing[*]}"
    exit 0
fi
echo "installing: ${missing[*]}"
if [ -n "$sudo" ] && ! command -v "$sudo" >/dev/null; then
    echo "only root can install them, and there is no $sudo: run make as root" >&2
    exit 1
fi
$sudo apt-get update -q
$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${missing[@]}"
