#!/usr/bin/env bash
# Alters a kernel in one place at a time and sees whether the simulator notices; tools/ptx-mutate/README.md says how to
# read what it prints.
#
#     tools/mutate.sh KERNEL [OPTIONS OF ptx-mutate...]
#
# KERNEL is mla_decode.sm100, mla_decode.sm90, mla_decode.mma, mla_decode.fp8, lightning_index.sm90, lightning_index.mma,
# linear.sm90, linear.streamed, linear.tiled, ragged_attention.sm90, ragged_attention.mma, vertical_slash_attention.sm90,
# vertical_slash_attention.mma, sparse_mla.sm90, sparse_mla.sm100 or sparse_mla.sm100_pair.
# Launches are recorded while device tests run on the simulated GPU, once: remove the folder for new ones.
set -euo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
cd "$root"

# With one multiprocessor a kernel of items gets one cube, which has many items.
of=() more=()
case "${1:-}" in
    mla_decode.sm100)
        arch=100 multiprocessors=4 kernel=decode_sm100 tests=ops_mutants_blackwell why=mla_decode/sm100 ;;
    mla_decode.sm90)
        arch=90 multiprocessors=1 kernel=decode_sm90_kernel tests=ops_mutants_decode why=mla_decode/sm90 ;;
    mla_decode.mma)
        arch=80 multiprocessors=1 kernel=decode_mma_kernel tests=ops_mutants_decode why=mla_decode ;;
    mla_decode.fp8)
        arch=90 multiprocessors=1 kernel=decode_fp8_kernel tests=ops_mutants_fp8_decode why=mla_decode/fp8 ;;
    lightning_index.sm90)
        arch=90 multiprocessors=1 kernel=score_sm90_kernel tests=ops_mutants_index_tiles why=lightning_index/sm90 ;;
    lightning_index.mma)
        arch=80 multiprocessors=4 kernel=score_mma_kernel tests=ops_mutants_lightning_index more=(ops_mutants_fp8_index_keys)
        why=lightning_index ;;
    linear.sm90)
        arch=90 multiprocessors=1 kernel=linear_sm90_kernel tests=ops_mutants_linear why=linear/sm90 ;;
    linear.streamed)
        arch=90 multiprocessors=1 kernel=linear_streamed_kernel tests=ops_mutants_streamed why=linear/streamed ;;
    linear.tiled)
        arch=80 multiprocessors=1 kernel=linear_tiled_kernel tests=ops_mutants_tiled why=linear/tiled ;;
    ragged_attention.sm90)
        arch=90 multiprocessors=1 kernel=ragged_sm90_kernel tests=ops_mutants_ragged why=ragged_attention/sm90 ;;
    ragged_attention.mma)
        arch=80 multiprocessors=1 kernel=ragged_mma_kernel tests=ops_mutants_ragged why=ragged_attention/mma ;;
    vertical_slash_attention.sm90)
        arch=90 multiprocessors=1 kernel=vertical_slash_sm90_kernel tests=vertical_slash_attention::mutants of=(--kernels)
        why=vertical_slash_attention/sm90 ;;
    vertical_slash_attention.mma)
        arch=80 multiprocessors=1 kernel=vertical_slash_mma_kernel tests=vertical_slash_attention::mutants of=(--kernels)
        why=vertical_slash_attention/mma ;;
    sparse_mla.sm90)
        arch=90 multiprocessors=1 kernel=sparse_sm90_kernel tests=ops_mutants_sparse why=sparse_mla/sm90 ;;
    sparse_mla.sm100)
        arch=100 multiprocessors=1 kernel=sparse_sm100_kernel tests=ops_mutants_sparse why=sparse_mla/sm100 ;;
    sparse_mla.sm100_pair)
        arch=100 multiprocessors=1 kernel=sparse_sm100_pair_kernel tests=ops_mutants_sparse why=sparse_mla/sm100/pair ;;
    *)
        sed -n '2,11s/^# \?//p' "$0" >&2
        exit 2 ;;
esac
# The tests run in another folder.
target="$(realpath -m "${CARGO_TARGET_DIR:-target}")"
traces="$target/mutants/$1"
shift

# record MULTIPROCESSORS TESTS...
record() {
    SIM_CUDA_TRACE="$traces.new/$1" SIM_CUDA_TRACE_FILTER="$kernel" SIM_CUDA_TRACE_LAUNCHES=48 \
        SIM_CUDA_TRACE_LAUNCH_MIB=16 SIM_CUDA_SMS="$1" tools/simulate.sh --arch "$arch" "${of[@]}" "${@:2}"
}

if [ ! -d "$traces" ]; then
    rm -rf "$traces.new"
    mkdir -p "$traces.new"
    # Splits are only made among several multiprocessors.
    record "$multiprocessors" "$tests" "${more[@]}" --skip ops_mutants_sparse_splits \
        --skip ops_mutants_sparse_clusters --skip ops_mutants_linear_split
    case "$tests" in
        # Blocks of a tile in several cubes.
        ops_mutants_index_tiles | ops_mutants_ragged | ops_mutants_sparse | vertical_slash_attention::mutants) record 4 "$tests" --skip "${tests}_clusters" ;;&
        ops_mutants_sparse) if [ "$arch" = 90 ]; then record 36 "${tests}_clusters"; fi ;;
        ops_mutants_linear) record 4 "${tests}_split" "${tests}_experts" ;;
        # Several cubes, of which one may have no item.
        ops_mutants_streamed) record 36 "$tests::case_2" "$tests::case_3" ;;
        # Cubes without items.
        ops_mutants_decode) if [ "$multiprocessors" = 1 ]; then record 4 "$tests::case_1" "${tests}_one_tile"; fi ;;
        ops_mutants_fp8_decode) record 4 "$tests::case_1" "$tests::case_2" ;;
    esac
    mv "$traces.new" "$traces"
fi
# By way of one of its tests: with the features of all packages, as what recorded the launches.
cargo test --quiet --workspace --test mutants --features "${MLA_FEATURES:-cuda}" --locked --no-run
exec "$target/debug/ptx-mutate" "$traces" --kernel "$kernel" --explain "kernels/src/$why/mutants.toml" "$@"
