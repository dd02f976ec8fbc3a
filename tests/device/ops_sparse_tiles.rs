//! `sparse_mla` with rows of DeepSeek's widths, in lists of several blocks: what the kernel for tensor cores divides among cubes.

use burn::tensor::{DType, Device};
use mla_ops::{Determinism, SparseMlaArgs, SparseMlaOptions, SparseScope, sparse_mla};
use rstest::rstest;

use crate::devices::{for_each_dtype, is_simulated, is_wgpu, skip};
use crate::ops_fixture::{assert_state, bits};
use crate::ops_sparse_mla::{Case, Pool};

/// Scores whose weights are spread over many rows, or nearly all on one, with the sink in between.
fn sink(heads: usize) -> Option<Vec<f32>> {
    Some((0..heads).map(|head| head as f32 / 8.0 - 3.0).collect())
}

/// The plain kernels have the other types and widths in tests of their own.
fn has_tiles(device: &Device, dtype: DType) -> bool {
    dtype != DType::F32 && !is_wgpu(device)
}

#[rstest]
#[case::splits([1, 1, 64], [576, 512], vec![[40, 16, 300]])]
#[case::two_tiles_of_heads([1, 2, 65], [576, 512], vec![[20, 16, 130]])]
#[case::more_tiles_than_cubes([5, 3, 5], [512, 512], vec![[20, 16, 65]])]
#[case::two_pools([2, 1, 16], [512, 512], vec![[9, 16, 128], [3, 64, 150]])]
#[case::two_pools_and_splits([1, 1, 16], [512, 512], vec![[9, 16, 128], [3, 64, 250]])]
#[case::two_pools_of_keys_with_a_ninth_tile([1, 3, 16], [576, 512], vec![[9, 1, 3], [3, 64, 64]])]
#[case::an_empty_first_list([2, 1, 16], [512, 512], vec![[9, 16, 0], [3, 64, 70]])]
#[case::two_lists_of_128_heads([3, 1, 128], [512, 512], vec![[9, 16, 70], [3, 64, 150]])]
#[case::two_tiles_and_splits([1, 1, 96], [576, 512], vec![[40, 16, 500]])]
#[case::three_tiles_of_heads([2, 1, 130], [576, 512], vec![[9, 16, 0], [9, 64, 200]])]
#[case::an_empty_second_list_of_127_heads([2, 1, 127], [512, 512], vec![[9, 16, 193], [3, 64, 0]])]
#[case::an_empty_second_list([2, 1, 16], [512, 512], vec![[9, 16, 70], [3, 64, 0]])]
fn ops_sparse_tiles(
    #[case] shape: [usize; 3],
    #[case] widths: [usize; 2],
    #[case] pools: Vec<Pool>,
    #[values(false, true)] lengths: bool,
) {
    for_each_dtype(|device, dtype| {
        if !has_tiles(device, dtype) {
            skip(device, format_args!("no kernel with tiles for {dtype:?}"));
            return;
        }
        let sink = (pools.len() > 1).then(|| sink(shape[2])).flatten();
        let case = Case { shape, widths, pools: pools.clone(), lengths, sink, dtype };
        case.own_kernel(device);
        let inputs = case.inputs();
        let state = sparse_mla(inputs.args(device), &case.options()).expect("legal");
        assert_state(&format!("{case:?} on {device:?}"), state, &inputs.expected());
    });
}

/// A token alone has the bits that it has beside others, where that is asked for.
#[test]
fn ops_sparse_tiles_alone_and_together() {
    for_each_dtype(|device, dtype| {
        if !has_tiles(device, dtype) {
            skip(device, format_args!("no kernel with tiles for {dtype:?}"));
            return;
        }
        let tokens = if is_simulated(device) { 3 } else { 150 };
        let pools = vec![[9, 16, 128], [3, 64, 150]];
        let case = Case { shape: [tokens, 1, 9], widths: [512, 512], pools, lengths: true, sink: sink(9), dtype };
        let args = case.inputs().args(device);
        let options = SparseMlaOptions { determinism: Determinism::BatchInvariant, ..case.options() };
        let (out, lse) = sparse_mla(args.clone(), &options).expect("legal");
        for token in [0, tokens / 2, tokens - 1] {
            let (own_out, own_lse) = sparse_mla(token_of(&args, token), &options).expect("legal");
            assert_eq!(bits(&out.clone().narrow(0, token, 1)), bits(&own_out), "{token} of {dtype:?} on {device:?}");
            assert_eq!(bits(&lse.clone().narrow(0, token, 1)), bits(&own_lse), "{token} of {dtype:?} on {device:?}");
        }
    });
}

/// The call with one sequence alone.
fn token_of(args: &SparseMlaArgs, token: usize) -> SparseMlaArgs {
    let scope = |scope: &SparseScope| SparseScope {
        rows: scope.rows.clone(),
        indices: scope.indices.clone().narrow(0, token, 1),
        lengths: scope.lengths.clone().map(|lengths| lengths.narrow(0, token, 1)),
    };
    SparseMlaArgs {
        q: args.q.clone().narrow(0, token, 1),
        scope: scope(&args.scope),
        second: args.second.as_ref().map(scope),
        sink: args.sink.clone(),
        plan: None,
    }
}
