#!/bin/bash
# The rules of the house that a program can check.  Called by `make lint`, which passes CFLAGS and BUILD.
# Each rule prints what breaks it; the last line is "N passed, N failed" over the rules.
# LINT="format includes" runs only the named rules.
# shellcheck disable=SC2016,SC2153  # awk programs are single-quoted; CFLAGS comes from make
set -u
passed=0 failed=0
out=$(mktemp)
trap 'rm -f "$out"' EXIT
read -ra cflags <<<"$CFLAGS"
cflags+=('-DDS4_VERSION="lint"' '-DDS4_COMMIT="lint"')

files() { git ls-files -co --exclude-standard -- "$@" | while read -r f; do [ -f "$f" ] && echo "$f"; done; }
sources() { files '*.c' '*.h' '*.cu' '*.cuh'; }
product() { sources | grep -Ev '^(tests|bench)/'; }
# grep over code without comments and strings: prints file:line: text.
code_grep() {
    local pattern=$1
    xargs -r awk -v pattern="$pattern" '
        FNR == 1 { inside = 0 }
        {
            line = $0
            gsub(/"([^"\\]|\\.)*"/, "\"\"", line)
            if (inside) { if (sub(/^.*\*\//, "", line)) inside = 0; else next }
            gsub(/\/\*([^*]|\*[^\/])*\*\//, "", line)
            if (sub(/\/\*.*$/, "", line)) inside = 1
            sub(/\/\/.*$/, "", line)
            if (line ~ pattern) print FILENAME ":" FNR ": " $0
        }'
}

# rule NAME COMMAND...: the rule holds when the command prints nothing and succeeds.
rule() {
    local name=$1
    shift
    if [ -n "${LINT:-}" ] && [[ " $LINT " != *" $name "* ]]; then
        return
    fi
    "$@" >"$out" 2>&1
    local rc=$?
    if [ $rc -eq 0 ] && [ ! -s "$out" ]; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "lint: $name"
        sed 's/^/lint:   /' "$out" | head -n 200 # at the margin: CI drops indented lines
    fi
}

format() { sources | xargs -r clang-format-14 --dry-run -Werror; }

# Which folders a folder may include, and where each library is at home.
includes() {
    sources | xargs -r awk '
        function may(from, to) {
            if (from == "tests" || from == "bench") return 1
            if (from == to || to == "common") return 1
            if (to == "proto") return from == "router" || from == "worker"
            if (to == "kernels") return from == "worker"
            return 0
        }
        function home(file, header) {
            if (file ~ /^(tests|bench)\//) return 1
            if (header ~ /^confuse/) return file == "common/config.c"
            if (header ~ /^jansson/) return file == "common/json.c"
            if (header ~ /^systemd\//) return file == "common/service.c"
            if (header ~ /^(xxhash|uthash)/) return 1
            if (header ~ /^protobuf-c|ds4\.pb-c\.h/) return file ~ /^proto\/codec/
            if (header ~ /^(cuda|cublas)/) return file ~ /^kernels\/cuda\//
            if (header ~ /^(h2o|uv)/) return file ~ /^router\/[a-z0-9_]*\.[ch]$/
            if (header ~ /^zmq/) return file ~ /^router\/bus(_auth)?\.c$/ || file == "worker/bus.c"
            if (header ~ /^utf8proc/) return file ~ /^router\/text\//
            if (header ~ /^nccl/) return file == "worker/pipe_nccl.c"
            if (header ~ /^zstd/) return file == "worker/kv_store.c"
            return 1
        }
        /^[ \t]*#[ \t]*include[ \t]*[<"]/ {
            header = $0
            sub(/^[^<"]*[<"]/, "", header)
            sub(/[>"].*$/, "", header)
            from = FILENAME
            sub(/\/.*$/, "", from)
            if (header ~ /\.\./) print FILENAME ":" FNR ": .. in an include"
            if ($0 ~ /"/ && header !~ /ds4\.pb-c\.h$/) {
                if (header !~ /^[a-z]+\/.*\.(h|cuh)$/) print FILENAME ":" FNR ": not a full path: " header
                to = header
                sub(/\/.*$/, "", to)
                if (!may(from, to)) print FILENAME ":" FNR ": " from " may not include " to
            } else if (!home(FILENAME, header)) {
                print FILENAME ":" FNR ": " header " is not at home here"
            }
        }'
}

# A header that declares nothing of its own is an umbrella.
no_umbrella() {
    sources | grep '\.h$' | while read -r h; do
        grep -Eq ';|#define DS4_[A-Z0-9_]+[ (].' "$h" || echo "$h declares nothing"
    done
}

# Bodies (*_body.h) are templates: their includer defines what they work on.
headers_alone() {
    sources | grep '\.h$' | grep -v '_body\.h$' | xargs -r -P2 -I{} gcc "${cflags[@]}" -fsyntax-only -x c {}
}

# Tables may be longer.
file_size() {
    sources | grep -v '_table\.[ch]$' | xargs -r wc -l | awk '$2 != "total" && $1 > 1000 { print $2 ": " $1 " lines" }'
}

# clang-tidy measures C functions; this measures kernels and everything else by braces in column 0.
function_size() {
    sources | xargs -r awk '
        FNR == 1 { start = 0 }
        /^{/ || (/^[a-zA-Z_].*\) *{$/) { start = FNR }
        /^}/ && start {
            limit = FILENAME ~ /\.cuh?$/ ? 150 : 100
            if (FNR - start > limit) print FILENAME ":" start ": function of " FNR - start " lines"
            start = 0
        }' | grep -v '_table\.c:' | sed '/^$/d'
    return 0
}

banned_calls() {
    sources | code_grep '(^|[^a-zA-Z0-9_.>])(strcpy|strcat|sprintf|vsprintf|strtok|atoi|atol|gets|alloca|rand|system)[ ]*\\('
    product | grep -Ev '(^|/)([a-z_]*main|fatal)\.c$' | code_grep '(^|[^a-zA-Z0-9_.>])exit[ ]*\\('
}

# Only the faults build reads the environment, and only its own variable.
no_getenv() { product | code_grep '(^|[^a-z_])(secure_)?getenv[ ]*\\(' | grep -v 'DS4_FAULT'; return 0; }

cuda_macro() { product | grep -v '^kernels/backend\.c$' | code_grep 'DS4_HAVE_CUDA'; }

no_todo() { sources | xargs -r grep -nE '\b(TODO|FIXME|XXX)\b' | grep -vE '#[0-9]+'; return 0; }

nolint_reason() { sources | xargs -r grep -nE 'NOLINT(NEXTLINE)?(\([^)]*\))? *(\*/)?$'; return 0; }

no_struct_typedef() { product | grep -v '\.cu' | code_grep 'typedef (struct|enum|union)'; }

fast_math() { files Makefile '*.cu' | xargs -r grep -nE -e '-ffast-math|--use_fast_math' | grep -v '^[^:]*:[0-9]*:.*never'; return 0; }

# Each top folder and each folder of sources below has a README of 20 to 60 lines.
readmes() {
    { echo router worker proto kernels common deploy tests bench | tr ' ' '\n'; product | grep / | sed 's|/[^/]*$||'; } |
        sort -u | while read -r d; do
            if [ ! -f "$d/README.md" ]; then
                echo "$d has no README.md"
                continue
            fi
            n=$(wc -l <"$d/README.md")
            if [ "$n" -lt 20 ] || [ "$n" -gt 60 ]; then
                echo "$d/README.md has $n lines"
            fi
        done
}

top_level() {
    git ls-files -co --exclude-standard | sed 's|/.*||' | sort -u |
        grep -Evx '\..*|Makefile|router|worker|proto|kernels|common|deploy|tests|bench|README\.md|LICENSE'
    return 0
}

router_links_no_cuda() {
    [ ! -x "$BUILD/bin/ds4-router" ] || readelf -d "$BUILD/bin/ds4-router" | grep -E 'NEEDED.*lib(cuda|cudart|cublas|nccl)'
    return 0
}

scripts() {
    local list
    list=$(files | while read -r f; do head -c 40 "$f" | grep -aqE '^#!.*\b(ba)?sh\b' && echo "$f"; done)
    # shellcheck disable=SC2086
    [ -z "$list" ] || shellcheck $list
}

# A metric that nothing writes shows 0 for ever, which reads as good news.
metrics_fed() {
    local id
    grep -oE '^ *X\([A-Z_0-9]+' common/metrics_table.h | sed 's/.*(//' | while read -r id; do
        product | grep '\.c$' | xargs grep -qw "DS4_M_$id" || echo "common/metrics_table.h: nothing writes $id"
    done
}

# A fault that no code has would make a test of it pass.
faults_placed() {
    local name
    grep -oE '^ *X\([A-Z_0-9]+' common/fault.h | sed 's/.*(//' | grep -vx NAME | while read -r name; do
        product | grep -v '^common/fault\.h$' | xargs grep -qw "DS4_FAULT_POINT($name)" ||
            echo "common/fault.h: $name is nowhere"
    done
}

# Longest files first, so that the two runs end together.
tidy() {
    local skip='^$'
    echo '#include <nccl.h>' | gcc "${cflags[@]}" -fsyntax-only -x c - 2>/dev/null || skip='pipe_nccl\.c$'
    product | grep '\.c$' | grep -v "$skip" |
        xargs -r wc -l | awk '$2 != "total"' | sort -rn | awk '{ print $2 }' |
        xargs -r -P2 -I{} sh -c 'file=$1; shift; clang-tidy-14 --quiet "$file" -- "$@" 2>/dev/null' _ {} "${cflags[@]}" |
        grep -E ' (warning|error): ' | sort -u
    return 0
}

rule format format
rule includes includes
rule umbrella no_umbrella
rule headers headers_alone
rule file-size file_size
rule function-size function_size
rule banned banned_calls
rule getenv no_getenv
rule cuda-macro cuda_macro
rule metrics metrics_fed
rule faults faults_placed
rule todo no_todo
rule nolint nolint_reason
rule typedef no_struct_typedef
rule fast-math fast_math
rule readmes readmes
rule top-level top_level
rule router-cuda router_links_no_cuda
rule shellcheck scripts
rule tidy tidy
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
