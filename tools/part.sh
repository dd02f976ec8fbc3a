#!/usr/bin/env bash
# Runs a part of the tests of a program that cargo built:
#
#     tools/part.sh K/N PROGRAM [ARGUMENT...]
#
# Of the tests that the arguments name every Nth, from the Kth on, counted from 0.
set -euo pipefail
part="$1" program="$2"
shift 2
if [ "$part" = 0/1 ]; then
    exec "$program" "$@"
fi
names="$("$program" "$@" --list --format terse | sed -n 's/: test$//p' |
    awk -v first="${part%/*}" -v step="${part#*/}" 'NR % step == (first + 1) % step')"
# Without a name all tests would run.
[ -z "$names" ] || xargs "$program" --exact <<< "$names"
