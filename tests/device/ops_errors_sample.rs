//! What `sample` and `log_probs` refuse.

use burn::tensor::{DType, Int, Tensor};
use mla_ops::{SampleArgs, SampleParams, SampleRows, log_probs, sample};

use crate::devices::for_each_device;
use crate::ops_fixture::ints;
use crate::refusals::Kind::{DType as WrongDType, Shape, Value};
use crate::refusals::{assert_refused, zeros};

const GREEDY: SampleParams = SampleParams::GREEDY;

#[test]
fn ops_errors_sample() {
    let with = |change: fn(&mut SampleParams)| {
        let mut params = GREEDY;
        change(&mut params);
        params
    };
    let wrong: [(&str, SampleParams); 13] = [
        ("temperature", with(|it| it.temperature = -0.1)),
        ("temperature", with(|it| it.temperature = f32::NAN)),
        ("temperature", with(|it| it.temperature = f32::INFINITY)),
        ("top_p", with(|it| it.top_p = 0.0)),
        ("top_p", with(|it| it.top_p = 1.5)),
        ("top_p", with(|it| it.top_p = f32::NAN)),
        ("min_p", with(|it| it.min_p = -0.1)),
        ("min_p", with(|it| it.min_p = 1.1)),
        ("min_p", with(|it| it.min_p = f32::NAN)),
        ("repetition_penalty", with(|it| it.repetition_penalty = 0.0)),
        ("repetition_penalty", with(|it| it.repetition_penalty = f32::INFINITY)),
        ("repetition_penalty", with(|it| it.repetition_penalty = f32::NAN)),
        ("seen_row", with(|it| it.seen_row = Some(u32::MAX))),
    ];
    for_each_device(|device| {
        for (argument, params) in wrong {
            assert_refused(SampleRows::new(&[GREEDY, params], device), Value, argument);
        }
        let seeing = SampleParams { seen_row: Some(0), ..GREEDY };
        assert_refused(SampleRows::new(&[seeing, seeing], device), Value, "seen_row");

        let rows = |params: &[SampleParams]| SampleRows::new(params, device).expect("legal");
        let call = |shape: [usize; 2], params: &[SampleParams], seen: Option<Tensor<2, Int>>| {
            sample(SampleArgs { logits: zeros(shape, device), rows: &rows(params), seen })
        };
        assert_refused(call([1, 0], &[GREEDY], None), Value, "logits");
        assert_refused(call([2, 5], &[GREEDY], None), Shape, "rows");
        assert_refused(call([1, 5], &[seeing], None), Value, "seen");
        assert_refused(call([1, 33], &[seeing], Some(ints(&[0], [1, 1], device))), Shape, "seen");
        let wrong = Tensor::<2, Int>::zeros([1, 2], (device, DType::I64));
        assert_refused(call([1, 33], &[seeing], Some(wrong)), WrongDType, "seen");
        let shared = ints(&[0], [1, 1], device);
        let other = shared.clone();
        let error = call([1, 5], &[seeing], Some(shared)).expect_err("it is shared");
        assert!(error.to_string().contains("`seen` is shared"), "{error}");
        drop(other);
        assert_eq!(call([0, 5], &[], None).expect("legal").tokens.dims(), [0]);
    });
}

#[test]
fn ops_errors_log_probs() {
    for_each_device(|device| {
        let tokens = |n: usize| ints(&vec![0; n], [n], device);
        assert_refused(log_probs(zeros([1, 0], device), tokens(1), 1), Value, "logits");
        assert_refused(log_probs(zeros([2, 5], device), tokens(1), 1), Shape, "tokens");
        assert_refused(log_probs(zeros([2, 5], device), tokens(2), 0), Value, "top");
        let wrong = Tensor::<1, Int>::zeros([2], (device, DType::I64));
        assert_refused(log_probs(zeros([2, 5], device), wrong, 1), WrongDType, "tokens");
        let none = log_probs(zeros([0, 5], device), tokens(0), 3).expect("legal");
        assert_eq!((none.chosen.dims(), none.ids.dims(), none.values.dims()), ([0], [0, 3], [0, 3]));
    });
}
