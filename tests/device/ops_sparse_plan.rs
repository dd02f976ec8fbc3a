//! `sparse_mla_plan`, and `sparse_mla` by a plan, against the oracle.

use burn::tensor::{DType, Device, Int, Tensor};
use mla_ops::{
    Determinism, ListLengths, MlaError, SparseMlaArgs, SparseMlaOptions, SparseMlaPlan, SparseMlaPlanArgs, SparseScope,
    sparse_mla, sparse_mla_parts, sparse_mla_plan,
};
use rstest::rstest;

use crate::devices::{for_each_device, for_each_dtype};
use crate::ops_fixture::{assert_state, ints};
use crate::ops_sparse_mla::{Case, Inputs, Pool};
use crate::refusals::{Kind, assert_refused, assert_values_refused};

/// What a step makes for layers with these lists.
pub fn plan_of(args: &SparseMlaArgs) -> SparseMlaPlan {
    let lists = |scope: &SparseScope| ListLengths { most: scope.indices.dims()[2], lengths: scope.lengths.clone() };
    let (first, second, [_, _, heads, _]) = (lists(&args.scope), args.second.as_ref().map(lists), args.q.dims());
    sparse_mla_plan(SparseMlaPlanArgs { first, second, heads }).expect("legal")
}

/// Long lists and short ones, one scope or two, of which one may have lists that are all as long.
#[rstest]
#[case::one_token([1, 1, 64], vec![[40, 16, 300]], [Some(vec![290]), None])]
#[case::much_longer_than_others([5, 1, 9], vec![[40, 16, 700]], [Some(vec![3, 700, 0, 64, 65]), None])]
#[case::two_tiles_of_heads([2, 2, 65], vec![[40, 16, 260]], [Some(vec![0, 260, 1, 128]), None])]
#[case::a_window_and_entries([4, 1, 16], vec![[9, 16, 128], [9, 64, 250]], [None, Some(vec![250, 0, 70, 1])])]
#[case::a_window_behind([4, 1, 16], vec![[9, 64, 250], [9, 16, 70]], [Some(vec![0, 250, 70, 1]), None])]
#[case::two_lengths([5, 1, 9], vec![[9, 16, 130], [9, 64, 200]], [Some(vec![130, 0, 64, 0, 3]), Some(vec![65, 0, 0, 200, 9])])]
#[case::two_lengths_of_127_heads([5, 1, 127], vec![[9, 16, 130], [9, 64, 200]], [Some(vec![130, 0, 64, 0, 3]), Some(vec![65, 0, 0, 200, 9])])]
#[case::nothing([3, 1, 9], vec![[9, 16, 70]], [Some(vec![0; 3]), None])]
#[case::lists_without_room([3, 1, 9], vec![[9, 16, 0], [9, 64, 70]], [Some(vec![0; 3]), Some(vec![70, 0, 1])])]
fn ops_sparse_tiles_planned(
    #[case] shape: [usize; 3],
    #[case] pools: Vec<Pool>,
    #[case] lengths: [Option<Vec<i32>>; 2],
    #[values(576, 512)] width: usize,
) {
    for_each_dtype(|device, dtype| {
        let (case, inputs) = inputs(shape, &pools, &lengths, width, dtype);
        let args = inputs.args(device);
        let args = SparseMlaArgs { plan: Some(plan_of(&args)), ..args };
        let state = sparse_mla(args, &case.options()).expect("legal");
        assert_state(&format!("{case:?} with {lengths:?} on {device:?}"), state, &inputs.expected());
    });
}

fn inputs(
    shape: [usize; 3],
    pools: &[Pool],
    lengths: &[Option<Vec<i32>>],
    width: usize,
    dtype: DType,
) -> (Case, Inputs) {
    let sink = (pools.len() > 1).then(|| (0..shape[2]).map(|head| head as f32 / 8.0 - 3.0).collect());
    let case = Case { shape, widths: [width, 512], pools: pools.to_vec(), lengths: false, sink, dtype };
    let mut inputs = case.inputs();
    inputs.scopes.iter_mut().zip(lengths).for_each(|(scope, lengths)| scope.lengths.clone_from(lengths));
    (case, inputs)
}

#[test]
fn ops_sparse_planned_without_tokens() {
    for_each_device(|device| {
        let (case, inputs) = inputs([0, 2, 9], &[[20, 16, 200]], &[Some(Vec::new())], 576, DType::F32);
        let args = inputs.args(device);
        let args = SparseMlaArgs { plan: Some(plan_of(&args)), ..args };
        assert_eq!(sparse_mla(args, &case.options()).expect("legal").0.dims(), [0, 2, 9, 512]);
    });
}

/// Of lists that were longer when it was made, a GPU reads nothing behind what they have now. The CPU refuses such a plan, and a GPU
/// where it validates.
#[test]
fn ops_sparse_planned_with_longer_lists() {
    for_each_device(|device| {
        let lengths = vec![3, 0, 70];
        let (case, inputs) = inputs([3, 1, 9], &[[20, 16, 200]], &[Some(lengths)], 576, DType::F32);
        let mut args = inputs.args(device);
        let before = SparseScope { lengths: Some(ints(&[200, 64, 130], [3, 1], device)), ..args.scope.clone() };
        args.plan = Some(plan_of(&SparseMlaArgs { scope: before, ..args.clone() }));
        let validated = args.validate_device_inputs();
        assert_values_refused(device, validated, || sparse_mla(args.clone(), &case.options()), "plan");
        if *device != Device::flex() {
            let state = sparse_mla(args, &case.options()).expect("legal");
            assert_state(&format!("on {device:?}"), state, &inputs.expected());
        }
    });
}

#[test]
fn ops_errors_sparse_plan() {
    for_each_device(|device| {
        let lengths = |values: &[i32], shape| Some(ints(values, shape, device));
        let plan = |first, second, heads| sparse_mla_plan(SparseMlaPlanArgs { first, second, heads });
        let lists = |most, lengths| ListLengths { most, lengths };
        let good = || lists(70, lengths(&[70, 0, 3, 9], [2, 2]));
        assert_refused(plan(good(), None, 0), Kind::Value, "heads");
        assert_refused(plan(lists(70, None), Some(lists(9, None)), 3), Kind::Value, "first.lengths");
        assert_refused(plan(good(), Some(lists(9, lengths(&[1; 4], [4, 1]))), 3), Kind::Shape, "second.lengths");
        let long: Option<Tensor<2, Int>> = lengths(&[1; 4], [2, 2]).map(|lengths| lengths.cast(DType::I64));
        assert_refused(plan(good(), Some(lists(9, long)), 3), Kind::DType, "second.lengths");
        assert_refused(plan(lists(usize::MAX, good().lengths), None, 3), Kind::Value, "first.most");
        let half = || lists(1 << 30, good().lengths);
        assert_refused(plan(half(), Some(half()), 3), Kind::Value, "second.most");

        let (case, inputs) = inputs([2, 2, 9], &[[20, 16, 70]], &[Some(vec![70, 0, 3, 9])], 576, DType::F32);
        let with = |plan: Result<SparseMlaPlan, MlaError>| SparseMlaArgs {
            plan: Some(plan.expect("legal")),
            ..inputs.args(device)
        };
        let refused = |plan| assert_refused(sparse_mla(with(plan), &case.options()), Kind::Value, "plan");
        refused(plan(good(), None, 8));
        refused(plan(lists(70, lengths(&[70, 0], [2, 1])), None, 9));
        refused(plan(lists(128 + 1, good().lengths), None, 9));
        refused(plan(good(), Some(lists(9, None)), 9));
        let invariant = SparseMlaOptions { determinism: Determinism::BatchInvariant, ..case.options() };
        assert_refused(sparse_mla(with(plan(good(), None, 9)), &invariant), Kind::Value, "plan");
        assert_refused(sparse_mla_parts(with(plan(good(), None, 9)), &case.options()), Kind::Value, "plan");
        assert!(sparse_mla(with(plan(good(), None, 9)), &case.options()).is_ok());
    });
}
