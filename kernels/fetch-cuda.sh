#!/usr/bin/env bash
# NVIDIA's compilers for the offline check, from PyPI (140 MB, once), and prints the folder that they are in:
#
#     CUDA_PATH=$(kernels/fetch-cuda.sh) cargo run -p mla-kernels --features offline --bin offline
#
# Where CUDA_PATH is set already, only checks that the toolkit there has what is needed. Needs python3 with pip.
set -euo pipefail

complete() {
    local file
    for file in bin/ptxas bin/nvdisasm include/cuda_runtime.h; do
        [ -e "$1/$file" ] || { echo "$1 has no $file" >&2; return 1; }
    done
    compgen -G "$1/lib*/libnvrtc.so*" > /dev/null || { echo "$1 has no libnvrtc" >&2; return 1; }
}

if [ -n "${CUDA_PATH:-}" ]; then
    complete "$CUDA_PATH"
    echo "$CUDA_PATH"
    exit
fi

# The name says which versions are inside.
requirements="$(dirname "$0")/cuda-requirements.txt"
cache="${XDG_CACHE_HOME:-$HOME/.cache}/burn-mla"
folder="$cache/cuda-13.0-$(sha256sum "$requirements" | cut -c 1-8)"
if [ ! -d "$folder" ]; then
    python3 -m pip --version > /dev/null || { echo "no python3 with pip, which fetches the CUDA compilers" >&2; exit 1; }
    # Beside it and then renamed: whoever finds the folder finds it complete.
    mkdir -p "$cache"
    partial="$(mktemp -d "$folder.XXXXXX")"
    trap 'rm -rf "$partial"' EXIT
    python3 -m pip install --quiet --no-deps --no-cache-dir --no-compile --only-binary :all: --require-hashes \
        --disable-pip-version-check --root-user-action ignore --target "$partial/toolkit" -r "$requirements" >&2
    complete "$partial/toolkit/nvidia/cu13"
    # Somebody else may have been faster.
    mv -T "$partial/toolkit" "$folder" 2> /dev/null || [ -d "$folder" ]
fi
complete "$folder/nvidia/cu13"
echo "$folder/nvidia/cu13"
