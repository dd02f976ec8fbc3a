#!/usr/bin/env bash
# Times the peers and then ours on one Hopper GPU, section by section, and compares them.
#
#     examples/bench/compare_with_peers.sh PEERS OUT [BENCH]
#
# SECTIONS ("dense ragged sparse"): dense is dense decode against FlashMLA and FlashInfer, ragged is ragged attention against
# FlashAttention-3, sparse is sparse decode (theirs over FP8 rows) and prefill against FlashMLA.
# PEERS: the folder that peers/prepare.sh made. OUT: where peers-SECTION.json, ours-SECTION.json, comparison-SECTION.md
# and the logs go; same-ragged.log has both errors on the same inputs. BENCH: the benchmark's program; built with cargo
# where it is left out. ITERS (30) is how often both time a call. The measurement ends within LIMIT (560) seconds; on an
# H200 dense takes about two minutes. Needs what peers/README.md says.
set -euo pipefail
[ $# = 2 ] || [ $# = 3 ] || { sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
peers=$1 out=$(realpath -m "$2") iters=${ITERS:-30}
read -ra sections <<< "${SECTIONS:-dense ragged sparse}"
for section in "${sections[@]}"; do
    case $section in
    dense | ragged | sparse) ;;
    *)
        echo "SECTIONS: some of dense, ragged and sparse, not $section" >&2
        exit 2
        ;;
    esac
done
mkdir -p "$out"

if [ $# = 3 ]; then
    bench=("$(realpath "$3")")
else
    cargo=(--release --features cuda --example bench --manifest-path "$here/../../Cargo.toml")
    cargo build "${cargo[@]}"
    bench=(cargo run --quiet "${cargo[@]}" --)
fi
end=$((SECONDS + ${LIMIT:-560}))

# Runs a program within so many seconds, of those that are left. Should it fail, what it has measured is compared.
measure() {
    local name=$1 seconds=$2 start=$SECONDS left=$((end - SECONDS))
    shift 2
    [ "$seconds" -le "$left" ] || seconds=$left
    [ "$seconds" -ge 40 ] || { echo "$name: no time left" && return; }
    timeout -k 5 "$seconds" "$@" --iters "$iters" --limit $((seconds - 15)) --out "$out/$name.json" \
        > "$out/$name.log" 2>&1 || echo "$name: exit status $?"
    tail -n 3 "$out/$name.log"
    echo "$name: $((SECONDS - start)) s"
}

status=0
for section in "${sections[@]}"; do
    # Neither an old comparison nor half of one.
    rm -f "$out"/{peers,ours}-"$section".json "$out/comparison-$section.md"
    # Inputs of the same deviation: a GPU at its power limit is faster with some numbers than with others.
    case $section in
    dense) measure peers-dense 310 python3 "$peers/bench_peers.py" --only ceilings,check,dense --std 1 ;;
    ragged) measure peers-ragged 180 python3 "$peers/bench_ragged.py" ;;
    sparse) measure peers-sparse 180 python3 "$peers/bench_peers.py" --only ceilings,sparse_decode,sparse_prefill --std 1 ;;
    esac
    save=()
    [ "$section" != ragged ] || save=(--save "$out/same-inputs")
    measure "ours-$section" 235 "${bench[@]}" --only "ceilings,$section" "${save[@]}"
    # Accuracy on the same inputs, while they are there.
    [ "$section" != ragged ] || python3 "$peers/bench_ragged.py" --same "$out/same-inputs" 2>&1 | tee "$out/same-ragged.log" || status=1
    rm -rf "$out/same-inputs"
    "${bench[@]}" --compare "$out/ours-$section.json" "$out/peers-$section.json" > "$out/comparison-$section.md" ||
        status=1
done
for section in "${sections[@]}"; do
    printf '\n## %s\n\n' "$section"
    cat "$out/comparison-$section.md"
done
exit $status
