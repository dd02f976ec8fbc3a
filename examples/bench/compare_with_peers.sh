#!/usr/bin/env bash
# Times the dense decode of the peers (FlashMLA, FlashInfer) and then ours on one Hopper GPU, and compares them.
#
#     examples/bench/compare_with_peers.sh PEERS OUT [BENCH]
#
# PEERS: the folder that peers/prepare.sh made. OUT: where peers.json, ours.json, comparison.md and the logs go.
# BENCH: the benchmark's program; built with cargo where it is left out. ITERS (30) is how often both time a call.
# The measurement ends within 560 s; on an H200 it takes about two minutes. Needs what peers/README.md says.
set -euo pipefail
[ $# = 2 ] || [ $# = 3 ] || { sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
peers=$1 out=$(realpath -m "$2") iters=${ITERS:-30}
mkdir -p "$out"
# Neither an old comparison nor half of one.
rm -f "$out"/{peers.json,ours.json,comparison.md}

if [ $# = 3 ]; then
    bench=("$(realpath "$3")")
else
    cargo=(--release --features cuda --example bench --manifest-path "$here/../../Cargo.toml")
    cargo build "${cargo[@]}"
    bench=(cargo run --quiet "${cargo[@]}" --)
fi

# Runs a program within so many seconds. Should it fail, what it has measured is compared.
measure() {
    local name=$1 seconds=$2 start=$SECONDS
    shift 2
    timeout -k 5 "$seconds" "$@" > "$out/$name.log" 2>&1 || echo "$name: exit status $?"
    tail -n 3 "$out/$name.log"
    echo "$name: $((SECONDS - start)) s"
}
# Inputs of the same deviation: a GPU at its power limit is faster with some numbers than with others.
measure peers 310 python3 "$peers/bench_peers.py" --only ceilings,check,dense --iters "$iters" --std 1 --limit 300 \
    --out "$out/peers.json"
measure ours 235 "${bench[@]}" --only ceilings,dense --iters "$iters" --limit 220 --out "$out/ours.json"
"${bench[@]}" --compare "$out/ours.json" "$out/peers.json" | tee "$out/comparison.md"
