#!/bin/bash
# Runs test programs, as many at a time as there are processors, and adds up their counts.
#
#   tests/run.sh CONFIG PROGRAM...
#
# A PROGRAM is a cmocka program, a Python script whose last line is "N passed, N failed", or a fuzz
# target: its corpus is replayed, or, with FUZZ_SECONDS set, it searches for so long.  A program that
# ends without a count, by a signal or a non-zero status counts as one failure more than it reports.
# REDUCED=1 obeys tests/slow.txt: programs that stand there are left out, or run only the tests that match
# a pattern.  A PROGRAM may have arguments in the same word ("test.py Case.test_name").  JOBS is how many
# run at a time.  Output is shown only of programs that failed; each line ends with wall and processor
# seconds.  The last line is the sum.
set -u
config=$1
shift
seconds=${TEST_SECONDS:-600} # a program may take so long
jobs=${JOBS:-$(nproc)}
# The child of a fork may start threads; libzmq is not instrumented.
export TSAN_OPTIONS="suppressions=$PWD/tests/support/tsan.supp die_after_fork=0"
passed=0 failed=0
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
trap 'kill $(jobs -p) 2>/dev/null; exit 130' INT TERM
TIMEFORMAT='%R %U %S'

run_fuzz() {
    local name=${1##*/fuzz_}
    local corpus=tests/fuzz/corpus/$name

    if [ "$config" != fuzz ]; then
        "$1" "$corpus"
    elif [ -n "${FUZZ_SECONDS:-}" ]; then
        mkdir -p "build/corpus/$name"
        "$1" -max_total_time="$FUZZ_SECONDS" -timeout=20 -rss_limit_mb=3072 -print_final_stats=1 \
            -artifact_prefix="build/corpus/crash-$name-" "build/corpus/$name" "$corpus" &&
            echo "1 passed, 0 failed"
    else
        "$1" -runs=0 -timeout=20 -rss_limit_mb=3072 "$corpus" && echo "1 passed, 0 failed"
    fi
}

run_one() {
    local words
    read -ra words <<<"$1"
    case ${words[0]} in
    *.py) timeout -k 10 "$seconds" python3 "${words[@]}" --config "$config" ;;
    */fuzz_*) run_fuzz "$1" ;;
    *) timeout -k 10 "$seconds" "${words[@]}" ;;
    esac
}

# The sums over all groups of a cmocka program, or the last "N passed, N failed".
count() {
    awk '
        /^\[  PASSED  \] [0-9]+ test/ { p += $4; seen = 1 }
        /^\[  FAILED  \] [0-9]+ test/ { f += $4; seen = 1 }
        /^[0-9]+ passed, [0-9]+ failed$/ { lp = $1; lf = $3; line = 1 }
        END { if (line) print lp, lf; else if (seen) print p + 0, f + 0 }' "$1"
}

# What REDUCED leaves of the programs, one a line.
reduced() {
    local program rule patterns pattern
    for program in "$@"; do
        rule=$(awk -v name="${program##*/test_}" -v config="$config" '
            $1 != name { next }
            $2 == "not" { if ($3 == config) left_out = 1; next }
            $2 == "in" { if ($3 == config) { sub(/^[^ ]+ in [^ ]+ ?/, ""); rule = $0; found = 1 } next }
            { sub(/^[^ ]+ ?/, ""); rule = $0; found = 1 }
            END { if (left_out || (found && rule == "")) print "none"; else print found ? rule : "all" }' tests/slow.txt)
        case $rule in
        none) continue ;;
        all) echo "$program" && continue ;;
        esac
        read -ra patterns <<<"$rule"
        for pattern in "${patterns[@]}"; do
            echo "$program --only $pattern"
        done
    done
}

programs=("$@")
if [ -n "${REDUCED:-}" ]; then
    set -f # patterns are no file names
    mapfile -t programs < <(reduced "$@")
fi
# Runs PROGRAM and leaves under NAME.* what is to be said of it and its counts.
judge() { # PROGRAM NAME
    local log=$dir/$2.log rc spent p f

    { time run_one "$1" >"$log" 2>&1; } 2>"$dir/$2.used"
    rc=$?
    spent=$(awk 'END { printf "%.1f s, %.1f s cpu", $1, $2 + $3 }' "$dir/$2.used")
    read -r p f <<<"$(count "$log")"
    p=${p:-0} f=${f:-0}
    if [ $rc -ne 0 ] && [ "$f" -eq 0 ]; then
        f=1
    elif [ $rc -eq 0 ] && [ $((p + f)) -eq 0 ] && ! grep -q 'SKIPPED' "$log"; then
        f=1
    fi
    if [ "$f" -ne 0 ]; then
        tail -n 200 "$log"
        echo "FAILED  $1: $p passed, $f failed, exit status $rc ($spent)"
    else
        echo "ok      $1: $p passed$(sed -n 's/^\[  SKIPPED \] \([0-9]*\) test.*/, \1 skipped/p' "$log") ($spent)"
    fi >"$dir/$2.text"
    echo "$p $f" >"$dir/$2.sum"
    rm "$log"
}

# Waits for one of the running programs to end, and tells of it.
collect() {
    local pid p f

    wait -n -p pid
    cat "$dir/${running[$pid]}.text"
    read -r p f <"$dir/${running[$pid]}.sum"
    passed=$((passed + p)) failed=$((failed + f))
    unset "running[$pid]"
}

declare -A running=()
for i in "${!programs[@]}"; do
    [ "${#running[@]}" -lt "$jobs" ] || collect
    judge "${programs[i]}" "$i" &
    running[$!]=$i
done
while [ "${#running[@]}" -gt 0 ]; do
    collect
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
