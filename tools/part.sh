#!/usr/bin/env bash
# Runs a part of the tests of programs that cargo built:
#
#     tools/part.sh K/N PROGRAM [ARGUMENT...]
#
# Of the tests that the arguments name every Nth, from the Kth on, counted from 0. PROGRAM may be several, a line each.
# Fails where a filter names no test of any of them. In the end it says how many cases the tests have left out, and why.
set -euo pipefail
part="$1"
mapfile -t programs <<< "$2"
shift 2

options=() filters=() words=("$@") exact=()
while [ $# -gt 0 ]; do
    case "$1" in
        --skip | --test-threads | --format | --color | --logfile | --shuffle-seed | -Z) options+=("$1" "$2"); shift 2 ;;
        --exact) exact=(-x); shift ;;
        -*) options+=("$1"); shift ;;
        *) filters+=("$1"); shift ;;
    esac
done

# list PROGRAM [ARGUMENT...]
list() { "$@" --list --format terse | sed -n 's/: test$//p'; }

all="$(for program in "${programs[@]}"; do list "$program" "${options[@]}"; done)"
[ -n "$all" ] || { echo "${programs[*]}: no test is left by the arguments ${options[*]}" >&2; exit 1; }
for filter in "${filters[@]}"; do
    grep -qF "${exact[@]}" -e "$filter" <<< "$all" ||
        { echo "${programs[*]}: no test is named by the filter $filter" >&2; exit 1; }
done

# A line for each case that is not run: the test, the device, the reason.
MLA_SKIPPED="$(mktemp)"
export MLA_SKIPPED
count_skipped() {
    local status=$?
    if [ -s "$MLA_SKIPPED" ]; then
        echo "skipped: $(wc -l < "$MLA_SKIPPED") cases of $(cut -f 1 "$MLA_SKIPPED" | sort -u | wc -l) tests"
        cut -f 2- "$MLA_SKIPPED" | sort | uniq -c | sort -rn | sed -n '1,20s/\t/: /p'
    fi
    rm -f "$MLA_SKIPPED"
    exit "$status"
}
trap count_skipped EXIT

for program in "${programs[@]}"; do
    if [ "$part" = 0/1 ]; then
        "$program" "${words[@]}"
        continue
    fi
    names="$(list "$program" "${words[@]}" |
        awk -v first="${part%/*}" -v step="${part#*/}" 'NR % step == (first + 1) % step')"
    # Without a name all tests would run.
    if [ -n "$names" ]; then
        xargs "$program" "${options[@]}" --exact <<< "$names"
    else
        echo "$program: none of its tests is in part $part" >&2
    fi
done
