#!/usr/bin/env bash
# Runs tests of the CUDA kernels on a simulated GPU, on a machine that needs neither a GPU nor a driver:
#
#     tools/simulate.sh [--arch 75|80|90|100] [--seed N] [--adversary PARTS] [--kernels | --models] [--part K/N] TEST_FILTER...
#
# The filters are those of the device tests (`cargo test --test device`), for example ops_merge_state, and other
# arguments of a test program. --kernels: the tests of mla-kernels instead, of kernels (`portable`) and instructions.
# --adversary: launches do what hardware may do but rarely does: all, or some of lanes,waits,arrivals.
# --models: tests of deepseek-model that ask for kernels and launch none; they are not compiled (SIM_CUDA_KERNELS).
# --part: of the tests that the filters name every Nth, from the Kth on, counted from 0. A filter that names none is an error.
# MLA_FEATURES: other features than cuda to build the tests with, for a build that is there already.
# tools/sim-cuda/README.md says how to read what it prints.
set -euo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
cd "$root"

tests=(--test device) programs=device options=()
part=0/1
while [ $# -gt 0 ]; do
    case "$1" in
        --arch) export SIM_CUDA_ARCH="$2"; shift 2 ;;
        --seed) export SIM_CUDA_SEED="$2"; shift 2 ;;
        --adversary) export SIM_CUDA_ADVERSARY="$2"; shift 2 ;;
        --kernels) tests=(--lib --test portable) programs='portable\|mla_kernels'; shift ;;
        --models)
            tests=(--lib) programs=deepseek_model options=(--ignored --nocapture --test-threads 1)
            # Of a large GPU: kernels are chosen by it.
            export SIM_CUDA_KERNELS=empty SIM_CUDA_SMS="${SIM_CUDA_SMS:-132}"
            shift
            ;;
        --part) part="$2"; shift 2 ;;
        *) break ;;
    esac
done
if [ $# -eq 0 ]; then
    sed -n '2,13s/^# \?//p' "$0" >&2
    exit 2
fi

# Not exported before all is built: build scripts look at CUDA_PATH, and another one builds most of Burn anew.
toolkit="$(kernels/fetch-cuda.sh)" || { echo "no NVRTC, which compiles the kernels" >&2; exit 1; }
target="$(realpath -m "${CARGO_TARGET_DIR:-target}")"
# All packages in any case, as in CI, for all to be built with the same features. A test of sim-cuda, for its library to be built: what
# simulates is optimised in this profile too.
found="$(cargo test --quiet --workspace "${tests[@]}" --test graph \
    --features "${MLA_FEATURES:-cuda}" --locked --no-run --message-format json |
    grep -o '"executable":"[^"]*/deps/\('"$programs"'\)-[^"]*"' | cut -d '"' -f 4)"

# Under the names that programs look for. Only here: cargo's own folders are in the library path of all tests.
libraries="$target/sim-cuda"
mkdir -p "$libraries"
for library in libcuda.so libnvrtc.so; do
    ln -sf "$target/debug/deps/libsim_cuda.so" "$libraries/$library"
done
export CUDA_PATH="$toolkit"
export LD_LIBRARY_PATH="$libraries:$CUDA_PATH/lib64:$CUDA_PATH/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export MLA_REQUIRE=cuda,simulated MLA_SKIP=flex,wgpu
# The simulated driver reads PTX, and names lines of sources that it has seen compiled.
export BURN_MLA_KERNEL_CODE=ptx BURN_MLA_KERNEL_CACHE=off
# Where CubeCL finds its settings.
cd tools/sim-cuda/run
exec "$root/tools/part.sh" "$part" "$found" "${options[@]}" "$@"
