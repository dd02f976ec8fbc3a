#!/usr/bin/env bash
# Estimates the device time of MLA decode steps (on a B200 of sparse attention, too) from the PTX of the kernels, on a machine without a GPU:
#
#     tools/estimate.sh [--gpu h200|b200]
#
# tools/ptx-sim/README.md says what the estimate is made of, kernels/src/mla_decode/sm90/README.md how good it is.
set -euo pipefail
cd "$(dirname "$0")/.."

toolkit="$(kernels/fetch-cuda.sh)" || { echo "no NVRTC, which compiles the kernels" >&2; exit 1; }
target="$(realpath -m "${CARGO_TARGET_DIR:-target}")"
# Not by cargo run: build scripts look at CUDA_PATH, and another one builds much anew.
cargo build --quiet --package mla-kernels --features offline --bin offline --locked
for kernels in mla_decode.sm mla_plan.shares merge_splits.step sparse_mla.sm100.bf16.576 sparse_mla.sm100_pair.bf16.576; do
    CUDA_PATH="$toolkit" "$target/debug/offline" --filter "$kernels" --out "$target/estimate" > /dev/null
done
exec cargo run --quiet --release --package sim-cuda --bin estimate --locked -- "$@" "$target/estimate"
