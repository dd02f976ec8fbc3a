//! Wrong arguments of `mla_decode` and `mla_plan`; how they are compared: `refusals.rs`.

use burn::tensor::{DType, Device, FloatDType, IntDType, Tensor};
use mla_ops::{
    Determinism, MlaError, MlaPlan, MlaPlanArgs, MlaQuery, PagedBatchArgs, Path, Splits, linear_by_head, mla_decode,
    mla_plan,
};
use rstest::rstest;

use crate::devices::{for_each_device, skip};
use crate::ops_fixture::{DecodeCase, ints};
use crate::refusals::Kind::{DType as WrongType, Shape, Value};
use crate::refusals::{Decode, Kind, assert_refused, assert_values_refused, paged_args, zeros};

/// A legal call, changed by `change`, is refused.
fn decode_refuses(device: &Device, kind: Kind, argument: &str, change: impl FnOnce(&mut Decode, &Device)) {
    let mut decode = Decode::new(device);
    change(&mut decode, device);
    assert_refused(decode.call(), kind, argument);
}

#[test]
fn ops_errors_mla_decode() {
    for_each_device(|device| {
        Decode::new(device).call().expect("legal before it is changed");
        Decode::parts(device, [2, 1, 3, 5], [2, 1, 3, 2]).call().expect("legal in parts");
        let refuses = |kind, argument, change: fn(&mut Decode, &Device)| decode_refuses(device, kind, argument, change);

        refuses(Value, "q", |it, device| it.args.q = MlaQuery::Whole(zeros([2, 1, 0, 7], device)));
        refuses(Shape, "kv_cache", |it, device| it.args.kv_cache = zeros::<3>([4, 4, 8], device).into());
        refuses(Value, "kv_cache", |it, device| it.args.kv_cache = zeros::<3>([4, 3, 7], device).into());
        refuses(Value, "kv_cache", |it, device| it.args.kv_cache = zeros::<3>([4, 0, 7], device).into());
        refuses(Shape, "page_table", |it, device| it.args.page_table = ints(&[0, 1, 2], [3, 1], device));
        refuses(Shape, "seq_lens", |it, device| it.args.seq_lens = ints(&[1, 1, 1], [3], device));
        refuses(WrongType, "page_table", |it, _| it.args.page_table = it.args.page_table.clone().cast(IntDType::I64));
        refuses(WrongType, "seq_lens", |it, _| it.args.seq_lens = it.args.seq_lens.clone().cast(IntDType::I64));
        refuses(Value, "value_width", |it, _| it.options.value_width = 0);
        refuses(Value, "value_width", |it, _| it.options.value_width = 8);
        refuses(Value, "softmax_scale", |it, _| it.options.softmax_scale = f32::NAN);
        refuses(Value, "softmax_scale", |it, _| it.options.softmax_scale = f32::INFINITY);
        refuses(Value, "splits", |it, _| it.options.splits = Splits::Count(0));
        refuses(Value, "splits", |it, _| it.options.splits = Splits::Tokens(0));

        let refused = |kind, argument, nope, pe| assert_refused(Decode::parts(device, nope, pe).call(), kind, argument);
        refused(Shape, "q.pe", [2, 1, 3, 5], [1, 1, 3, 2]);
        refused(Shape, "q.pe", [2, 1, 3, 5], [2, 2, 3, 2]);
        refused(Shape, "q.pe", [2, 1, 3, 5], [2, 1, 4, 2]);
        refused(Shape, "kv_cache", [2, 1, 3, 5], [2, 1, 3, 3]);
        refused(Value, "value_width", [2, 1, 3, 4], [2, 1, 3, 3]);
        refused(Shape, "page_table", [3, 1, 3, 5], [3, 1, 3, 2]);
    });
}

#[test]
fn ops_errors_linear_by_head_of_a_decode_step() {
    for_each_device(|device| {
        let call = |value_proj: Tensor<3>| {
            let Decode { args, options, plan } = Decode::new(device);
            let step = mla_decode(args, &options, plan.as_ref()).expect("legal");
            linear_by_head(step, &value_proj.into(), Determinism::Fast)
        };
        call(zeros([3, 2, 5], device)).expect("legal before it is changed");
        let refused = |kind, value_proj| assert_refused(call(value_proj), kind, "weight");
        refused(Shape, zeros([2, 2, 5], device));
        refused(Shape, zeros([3, 2, 7], device));
        refused(Value, zeros([3, 0, 5], device));
        refused(WrongType, zeros::<3>([3, 2, 5], device).cast(FloatDType::F16));
    });
}

#[test]
fn ops_errors_linear_by_head() {
    for_each_device(|device| {
        let call = |weight: Tensor<3>| linear_by_head(zeros::<3>([2, 3, 5], device), &weight.into(), Determinism::Fast);
        call(zeros([3, 2, 4], device)).expect("legal before it is changed");
        let refused = |kind, weight| assert_refused(call(weight), kind, "weight");
        refused(Shape, zeros([2, 2, 4], device));
        refused(Shape, zeros([3, 2, 6], device));
        refused(WrongType, zeros::<3>([3, 2, 4], device).cast(FloatDType::F16));
    });
}

/// An implementation that the device does not have for the problem; also where there is nothing to compute.
#[test]
fn ops_errors_mla_decode_path() {
    for_each_device(|device| {
        let half = if device.supports_dtype(DType::F16) { DType::F16 } else { DType::F32 };
        let tiny_pages = DecodeCase { widths: (576, 512), dtype: half, page_size: 8, ..Default::default() };
        let cases = [
            DecodeCase { widths: (7, 5), ..Default::default() },
            DecodeCase { widths: (576, 512), page_size: 64, ..Default::default() },
            DecodeCase { lens: vec![], ..tiny_pages.clone() },
            tiny_pages,
        ];
        for case in cases {
            let has = case.paths(device);
            for path in Path::ALL {
                let case = DecodeCase { path: Some(path), ..case.clone() };
                let result = mla_decode(case.inputs(52).args(device), &case.options(), None);
                if has.contains(&path) {
                    result.unwrap_or_else(|error| panic!("{error} ({case:?})")).materialise();
                    continue;
                }
                let text = result.as_ref().err().map_or(String::new(), MlaError::to_string);
                assert_refused(result, Value, "path");
                let said = [format!("`path` is {path}"), format!("{device:?}"), format!(": {}", has[0])];
                assert!(said.iter().all(|words| text.contains(words)), "{text}, which should say {said:?}");
            }
        }
    });
}

#[test]
fn ops_errors_mla_decode_values() {
    for_each_device(|device| {
        let refuses = |argument, table: [i32; 4], lens: [i32; 2]| {
            let mut decode = Decode::new(device);
            decode.args.page_table = ints(&table, [2, 2], device);
            decode.args.seq_lens = ints(&lens, [2], device);
            assert_values_refused(device, decode.args.validate_device_inputs(), || decode.call(), argument);
        };
        refuses("page_table", [0, 4, 2, 0], [5, 2]);
        refuses("page_table", [0, 1, -1, 0], [5, 2]);
        refuses("seq_lens", [0, 1, 2, 0], [-1, 2]);
        refuses("seq_lens", [0, 1, 2, 3], [8, 9]);
        let mut unused = Decode::new(device);
        unused.args.page_table = ints(&[0, 1, 2, i32::MIN], [2, 2], device);
        unused.args.validate_device_inputs().expect("an entry past the end may be anything");
    });
}

/// Asked to look at the values of tensors that do not belong together, `validate_device_inputs` says so.
#[test]
fn ops_errors_validate_refuses_wrong_shapes() {
    for_each_device(|device| {
        let mut args = Decode::new(device).args;
        args.page_table = ints(&[0, 1], [1, 2], device);
        assert_refused(args.validate_device_inputs(), Shape, "page_table");
        let args = PagedBatchArgs { page_size: 0, ..paged_args(device) };
        assert_refused(args.validate_device_inputs(), Value, "page_size");
    });
}

fn plan_args(device: &Device) -> MlaPlanArgs {
    let seq_lens = ints(&[5, 2], [2], device);
    MlaPlanArgs { seq_lens, query_len: 1, heads: 3, page_size: 4, max_seq_len: 8, splits: Splits::Auto }
}

#[test]
fn ops_errors_mla_plan() {
    for_each_device(|device| {
        let legal = || plan_args(device);
        mla_plan(legal()).expect("legal before it is changed");
        assert_refused(mla_plan(MlaPlanArgs { page_size: 3, ..legal() }), Value, "page_size");
        assert_refused(mla_plan(MlaPlanArgs { page_size: 0, ..legal() }), Value, "page_size");
        assert_refused(mla_plan(MlaPlanArgs { heads: 0, ..legal() }), Value, "heads");
        assert_refused(mla_plan(MlaPlanArgs { splits: Splits::Count(0), ..legal() }), Value, "splits");
        assert_refused(mla_plan(MlaPlanArgs { splits: Splits::Tokens(0), ..legal() }), Value, "splits");
        let seq_lens = legal().seq_lens.cast(IntDType::I64);
        assert_refused(mla_plan(MlaPlanArgs { seq_lens, ..legal() }), WrongType, "seq_lens");
        for lens in [[-1, 2], [5, 9]] {
            let args = MlaPlanArgs { seq_lens: ints(&lens, [2], device), ..legal() };
            assert_values_refused(device, args.validate_device_inputs(), || mla_plan(args.clone()), "seq_lens");
        }
    });
}

/// A plan holds for the problem that it was made for.
#[test]
fn ops_errors_plan_of_another_problem() {
    for_each_device(|device| {
        let legal = || plan_args(device);
        let plans = [
            MlaPlanArgs { seq_lens: ints(&[5], [1], device), ..legal() },
            MlaPlanArgs { query_len: 2, ..legal() },
            MlaPlanArgs { heads: 4, ..legal() },
            MlaPlanArgs { page_size: 8, ..legal() },
        ];
        for args in plans {
            let plan = Some(mla_plan(args).expect("legal"));
            assert_refused(Decode { plan, ..Decode::new(device) }.call(), Value, "plan");
        }
        let plan = Some(mla_plan(legal()).expect("legal"));
        Decode { plan, ..Decode::new(device) }.call().expect("the plan of this problem");
    });
}

/// The obvious mistake: not planning again. The plan is of the right shape, and its keys are not those that are there.
#[rstest]
#[case::longer([5, 6])]
#[case::shorter([5, 1])]
#[case::of_another_sequence([2, 5])]
#[case::empty([0, 2])]
#[case::past_the_page_table([200, 2])]
fn ops_errors_plan_of_other_lengths(#[case] lens: [i32; 2], #[values(false, true)] causal: bool) {
    for_each_device(|device| {
        let plan = mla_plan(MlaPlanArgs { seq_lens: ints(&lens, [2], device), max_seq_len: 256, ..plan_args(device) });
        let plan = plan.expect("legal");
        let mut decode = Decode::new(device);
        decode.options.causal = causal;
        let validated = plan.validate_device_inputs(&decode.args.seq_lens);
        decode.plan = Some(plan.clone());
        assert_values_refused(device, validated, || decode.call(), "plan");
        plan.validate_device_inputs(&ints(&lens, [2], device)).expect("the lengths that it was made for");
        assert_refused(plan.validate_device_inputs(&ints(&[5], [1], device)), Shape, "seq_lens");
        assert_refused(
            plan.validate_device_inputs(&ints(&lens, [2], device).cast(IntDType::I64)),
            WrongType,
            "seq_lens",
        );
    });
}

/// Keys past the end are NaN, and a plan for longer sequences names them: they are not read. On the CPU it is an error.
#[rstest]
fn ops_errors_plan_for_keys_that_are_not_there(#[values(false, true)] causal: bool) {
    for_each_device(|device| {
        if *device == Device::flex() {
            skip(device, "there it is an error");
            return;
        }
        let decode = |lens: [i32; 2]| {
            let seq_lens = ints(&lens, [2], device);
            let plan = Some(mla_plan(MlaPlanArgs { seq_lens, max_seq_len: 16, ..plan_args(device) }).expect("legal"));
            let mut decode = Decode { plan, ..Decode::new(device) };
            decode.options.causal = causal;
            // Page 1 has keys 0 to 3 of sequence 0, page 0 its key 4, page 2 those of sequence 1.
            let key = |row: usize| if [4, 5, 6, 7, 0, 8, 9].contains(&row) { 0.5 } else { f32::NAN };
            let rows: Vec<f32> = (0..16).flat_map(|row| [key(row); 7]).collect();
            decode.args.kv_cache =
                Tensor::<1>::from_data(rows.as_slice(), (device, DType::F32)).reshape([4, 4, 7]).into();
            let (out, lse) = decode.call().expect("its lengths are on the device");
            [crate::ops_fixture::values(out), crate::ops_fixture::values(lse)]
        };
        assert_eq!(decode([8, 8]), decode([5, 2]), "{device:?}");
    });
}

/// The tensors of a plan are public.
#[test]
fn ops_errors_plan_with_other_tensors() {
    for_each_device(|device| {
        let refuses = |kind, argument, change: fn(&mut MlaPlan, &Device)| {
            let mut plan = mla_plan(plan_args(device)).expect("legal");
            change(&mut plan, device);
            assert_refused(Decode { plan: Some(plan), ..Decode::new(device) }.call(), kind, argument);
        };
        refuses(Shape, "plan.items", |it, device| it.items = ints(&[0; 3], [1, 3], device));
        refuses(Shape, "plan.items", |it, device| it.items = ints(&[], [0, 4], device));
        refuses(Shape, "plan.cube_ptr", |it, device| it.cube_ptr = ints(&[], [0], device));
        refuses(Shape, "plan.split_ptr", |it, device| it.split_ptr = ints(&[0], [1], device));
        refuses(WrongType, "plan.items", |it, _| it.items = it.items.clone().cast(IntDType::I64));
        refuses(WrongType, "plan.cube_ptr", |it, _| it.cube_ptr = it.cube_ptr.clone().cast(IntDType::I64));
    });
}

/// An upper bound of the lengths that no memory holds the work items of is refused.
#[rstest]
fn ops_errors_plan_of_boundless_length(#[values(Splits::Tokens(64), Splits::Count(usize::MAX))] splits: Splits) {
    for_each_device(|device| {
        let args = MlaPlanArgs { max_seq_len: usize::MAX, splits, ..plan_args(device) };
        assert_refused(mla_plan(args), Value, "max_seq_len");
    });
}
