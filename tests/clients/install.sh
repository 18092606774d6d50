#!/bin/bash
# Installs the clients of check-clients into the folder $1, exactly as package-lock.json pins them.  Their
# install scripts do not run: the native programs are packages of their own.
set -eu
here=$(cd "$(dirname "$0")" && pwd)

if ! command -v npm >/dev/null; then
    echo "npm is not installed: make deps-dev" >&2
    exit 1
fi
mkdir -p "$1/bin"
cd "$1"
cp "$here/package.json" "$here/package-lock.json" .
npm ci --ignore-scripts --no-audit --no-fund --no-update-notifier --loglevel=error

# As they are called by people.
program() {
    [ -x "node_modules/$2" ] || chmod +x "node_modules/$2"
    ln -sf "../node_modules/$2" "bin/$1"
}
program opencode opencode-linux-x64/bin/opencode
program claude @anthropic-ai/claude-code-linux-x64/claude
program codex @openai/codex-linux-x64/vendor/x86_64-unknown-linux-musl/bin/codex
program pi @mariozechner/pi-coding-agent/dist/cli.js
