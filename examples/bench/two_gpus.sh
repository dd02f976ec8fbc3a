#!/usr/bin/env bash
# What several GPUs are worth, on a machine with two: checks first, then times. NCCL has to be installed.
#
#     examples/bench/two_gpus.sh BENCH GENERATE [OUT]
#
# BENCH and GENERATE are the programs, built in release with `--features cuda`. V4-Flash whole needs two GPUs of 141 GB; on smaller
# ones it has fewer layers.
set -uo pipefail
bench=$1 generate=$2 out=${3:-two-gpus}
cd "$(dirname "$0")/../.."
mkdir -p "$out"
models=examples/bench/models both=cuda:0,cuda:1 failed=0
export NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}"

# The same text on one GPU, on two whose steps are launched, and on two whose steps are captured.
for demo in v3 v4; do
    text() { "$generate" --demo "$demo" --max-new-tokens 60 "$@" 2> "$out/$demo.log" || tail -5 "$out/$demo.log" >&2; }
    one=$(text --device cuda:0)
    for how in "" --no-graphs; do
        two=$(text --device "$both" $how)
        verdict=DIFFERS
        if [ -n "$one" ] && [ "$one" = "$two" ]; then verdict="the same text"; else failed=1; fi
        echo "demo $demo ${how:-captured}: $verdict"
    done
done

"$bench" --device cuda:0 --dtype bf16 --only all_reduce --out "$out/all_reduce.json" | grep all_reduce

e2e() {
    local name=$1 device=$2
    shift 2
    timeout 300 "$bench" --device "$device" --dtype bf16 --only e2e --captured --out "$out/$name.json" "$@" |
        grep -E 'e2e_decode|FAILED'
}
for device in cuda:0 "$both"; do
    gpus=$(tr , '\n' <<< "$device" | wc -l)
    e2e "v2-lite.$gpus" "$device" --random-weights "$models/deepseek-v2-lite.json" --weights dense
    e2e "v3.$gpus" "$device" --random-weights "$models/deepseek-v3.json" --layers 6 --weights stored
    e2e "v4.$gpus" "$device" --random-weights "$models/deepseek-v4-flash.json" --layers 6 --weights stored --context 4096
done
memory=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits | sort -n | head -1)
if [ "$memory" -ge 120000 ]; then
    e2e v4-whole "$both" --random-weights "$models/deepseek-v4-flash.json" --weights stored --context 4096
else
    echo "V4-Flash: 32 of its 43 layers, a GPU has $memory MiB"
    e2e v4-part "$both" --random-weights "$models/deepseek-v4-flash.json" --layers 32 --weights stored --context 4096
fi
exit "$failed"
