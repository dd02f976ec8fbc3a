//! `sparse_mla` against the oracle, which attends to the named rows one by one.

use burn::tensor::{DType, Device, Int, Tensor};
use mla_ops::cache::RowFormat;
use mla_ops::{
    Determinism, MergeStateArgs, MlaDecodeArgs, MlaDecodeOptions, MlaQuery, Path, SparseMlaArgs, SparseMlaOptions,
    SparseMlaProblem, SparseScope, Splits, explain_path, merge_state, mla_decode, sparse_mla,
};
use rand::RngExt;
use rstest::rstest;

use crate::devices::{for_each_device, for_each_dtype, is_blackwell, is_hopper, is_slow, skip};
use crate::ops_fixture::{assert_state, bits, floats, int_values, ints, random, restrided, rng};
use crate::oracle::{State, attend};
use crate::refusals::{Kind, assert_refused, assert_values_refused, zeros};

/// Rows of a scope: pages, rows of a page, entries of a query token.
pub type Pool = [usize; 3];

#[derive(Debug, Clone)]
pub struct Case {
    /// B, Sq, H.
    pub shape: [usize; 3],
    /// D and Dv.
    pub widths: [usize; 2],
    pub pools: Vec<Pool>,
    pub lengths: bool,
    pub sink: Option<Vec<f32>>,
    pub dtype: DType,
}

impl Default for Case {
    fn default() -> Self {
        let pools = vec![[9, 16, 70]];
        Self { shape: [2, 2, 9], widths: [80, 64], pools, lengths: false, sink: None, dtype: DType::F32 }
    }
}

/// The values of a scope. Rows that nobody names are NaN.
pub struct Scope {
    pool: Pool,
    pub rows: Vec<f64>,
    pub indices: Vec<i32>,
    pub lengths: Option<Vec<i32>>,
}

impl Scope {
    fn new(case: &Case, pool: Pool, seed: u64) -> Self {
        let ([pages, page_size, most], [batch, query_len, _]) = (pool, case.shape);
        let (mut rng, tokens, slots) = (rng(seed), batch * query_len, pages * page_size);
        // A third are gaps, and some slots occur twice.
        let indices: Vec<i32> = (0..tokens * most)
            .map(|_| rng.random_range(0..slots as i32 * 3 / 2))
            .map(|slot| if slot < slots as i32 { slot } else { -1 })
            .collect();
        let lengths = case.lengths.then(|| (0..tokens).map(|token| (most * token / tokens.max(2)) as i32).collect());
        let mut scope = Self { pool, rows: vec![f64::NAN; slots * case.widths[0]], indices, lengths };
        for token in 0..tokens {
            for slot in scope.slots(token) {
                let row = random(&mut rng, case.widths[0], case.dtype);
                scope.rows[slot * case.widths[0]..][..case.widths[0]].copy_from_slice(&row);
            }
        }
        scope
    }

    /// The slots that a query token sees.
    pub fn slots(&self, token: usize) -> Vec<usize> {
        let most = self.pool[2];
        let length = self.lengths.as_ref().map_or(most, |lengths| lengths[token] as usize);
        self.indices[token * most..][..length].iter().filter(|&&slot| slot >= 0).map(|&slot| slot as usize).collect()
    }

    fn upload(&self, case: &Case, device: &Device) -> SparseScope {
        let ([pages, page_size, most], [batch, query_len, _]) = (self.pool, case.shape);
        SparseScope {
            rows: floats::<3>(&self.rows, [pages, page_size, case.widths[0]], case.dtype, device).into(),
            indices: ints(&self.indices, [batch, query_len, most], device),
            lengths: self.lengths.as_ref().map(|lengths| ints(lengths, [batch, query_len], device)),
        }
    }
}

pub struct Inputs {
    case: Case,
    pub q: Vec<f64>,
    pub scopes: Vec<Scope>,
}

impl Case {
    pub fn inputs(&self) -> Inputs {
        let q = random(&mut rng(81), self.shape.iter().product::<usize>() * self.widths[0], self.dtype);
        let scopes = (82..).zip(&self.pools).map(|(seed, &pool)| Scope::new(self, pool, seed)).collect();
        Inputs { case: self.clone(), q, scopes }
    }

    pub fn options(&self) -> SparseMlaOptions {
        // Scores at which a wrong key shows.
        let softmax_scale = 4.0 / (self.widths[0] as f32).sqrt();
        SparseMlaOptions { value_width: self.widths[1], softmax_scale, determinism: Determinism::Fast }
    }

    /// The kernel of its own that the case runs on, made for one generation of GPUs. Where there is one for DeepSeek's widths, it is it.
    pub fn own_kernel(&self, device: &Device) -> Option<Path> {
        let &Self { shape: [batch, query_len, heads], widths: [key_width, value_width], dtype, .. } = self;
        let rows = RowFormat::Dense;
        let problem =
            SparseMlaProblem { batch, query_len, heads, key_width, value_width, dtype, rows, second_rows: None };
        let made = [(is_hopper(device), Path::Sm90), (is_blackwell(device), Path::Sm100)];
        let made = made.into_iter().find_map(|(is, path)| is.then_some(path));
        let takes = dtype != DType::F32 && value_width == 512 && [512, 576].contains(&key_width);
        let path = explain_path(&problem, device).path;
        assert_eq!(made == Some(path), made.is_some() && takes, "{self:?} on {device:?}: {path}");
        made.filter(|_| takes)
    }

    fn check_on(&self, device: &Device) {
        let inputs = self.inputs();
        let state = sparse_mla(inputs.args(device), &self.options()).expect("legal");
        assert_state(&format!("{self:?} on {device:?}"), state, &inputs.expected());
    }
}

impl Inputs {
    pub fn args(&self, device: &Device) -> SparseMlaArgs {
        let [batch, query_len, heads] = self.case.shape;
        let mut scopes = self.scopes.iter().map(|scope| scope.upload(&self.case, device));
        let sink = self.case.sink.as_ref();
        SparseMlaArgs {
            q: floats(&self.q, [batch, query_len, heads, self.case.widths[0]], self.case.dtype, device),
            scope: scopes.next().expect("a scope"),
            second: scopes.next(),
            sink: sink.map(|sink| Tensor::from_data(sink.as_slice(), (device, DType::F32))),
            plan: None,
        }
    }

    pub fn expected(&self) -> State {
        let (Case { shape: [batch, query_len, heads], widths: [width, value_width], .. }, mut state) =
            (&self.case, State::default());
        let scale = f64::from(self.case.options().softmax_scale);
        for row in 0..batch * query_len * heads {
            let rows = self.scopes.iter().flat_map(|scope| {
                scope.slots(row / heads).into_iter().map(|slot| &scope.rows[slot * width..][..*width])
            });
            let rows: Vec<&[f64]> = rows.collect();
            let keys = rows.iter().map(|row| (*row, &row[..*value_width]));
            let (mut out, lse) =
                attend(&self.q[row * width..][..*width], keys, |product| scale * product, *value_width);
            if let Some(sink) = &self.case.sink {
                let share = 1.0 / (1.0 + (f64::from(sink[row % heads]) - lse).exp());
                out.iter_mut().for_each(|value| *value *= if lse == f64::NEG_INFINITY { 0.0 } else { share });
            }
            state.push((out, lse));
        }
        state
    }
}

#[rstest]
fn ops_sparse_heads_and_widths(
    #[values(1, 3, 63, 127, 128)] heads: usize,
    #[values([576, 512], [512, 512], [80, 64], [33, 7])] widths: [usize; 2],
) {
    for_each_dtype(|device, dtype| {
        if is_slow(device) && heads > 63 && widths[0] > 80 {
            skip(device, format_args!("{heads} heads of {widths:?}"));
            return;
        }
        Case { shape: [2, 1, heads], widths, dtype, ..Default::default() }.check_on(device);
    });
}

#[rstest]
fn ops_sparse_entries_and_pages(
    #[values(0, 1, 5, 64, 130, 300)] most: usize,
    #[values(1, 16, 64)] page_size: usize,
    #[values(false, true)] lengths: bool,
) {
    for_each_dtype(|device, dtype| {
        let pools = vec![[400 / page_size, page_size, most]];
        Case { shape: [3, 2, 5], pools, lengths, dtype, ..Default::default() }.check_on(device);
    });
}

#[rstest]
fn ops_sparse_second_scope(#[values(0, 3, 100)] first: usize, #[values(0, 3, 100)] second: usize) {
    for_each_dtype(|device, dtype| {
        for lengths in [false, true] {
            let pools = vec![[4, 32, first], [50, 4, second]];
            let sink = Some((0..9).map(|head| head as f32 / 2.0 - 2.0).collect());
            Case { pools, lengths, sink, dtype, ..Default::default() }.check_on(device);
        }
    });
}

#[rstest]
#[case([0, 1, 3])]
#[case([2, 0, 3])]
fn ops_sparse_nothing_to_do(#[case] shape: [usize; 3]) {
    for_each_dtype(|device, dtype| Case { shape, dtype, ..Default::default() }.check_on(device));
}

/// Rows that do not lie one after the other, as the second half of a larger tensor or transposed; queries and lists too.
#[test]
fn ops_sparse_strided() {
    for_each_dtype(|device, dtype| {
        let case = Case { pools: vec![[9, 16, 70], [5, 8, 33]], lengths: true, dtype, ..Default::default() };
        let inputs = case.inputs();
        let args = inputs.args(device);
        let transposed = |tensor: Tensor<3, Int>| {
            let shape = tensor.clone().swap_dims(0, 2).dims();
            ints(&int_values(tensor.swap_dims(0, 2)), shape, device).swap_dims(0, 2)
        };
        let half = |rows: Tensor<3>| {
            let [_, page_size, _] = rows.dims();
            Tensor::cat(vec![rows.clone().zeros_like(), rows], 1).narrow(1, page_size, page_size)
        };
        let second = args.second.expect("two scopes");
        let args = SparseMlaArgs {
            q: restrided(args.q, 1, 2),
            scope: SparseScope {
                rows: restrided(args.scope.rows.dense(), 0, 2).into(),
                indices: transposed(args.scope.indices),
                ..args.scope
            },
            second: Some(SparseScope { rows: half(second.rows.dense()).into(), ..second }),
            sink: None,
            plan: None,
        };
        let state = sparse_mla(args, &case.options()).expect("legal");
        assert_state(&format!("strided {dtype:?} on {device:?}"), state, &inputs.expected());
    });
}

/// A sink of -inf is none, one of +inf takes everything; the log-sum-exp never contains it.
#[test]
fn ops_sparse_sinks() {
    for_each_dtype(|device, dtype| {
        let with = |sink: Option<f32>| {
            let case = Case { sink: sink.map(|sink| vec![sink; 9]), dtype, ..Default::default() };
            sparse_mla(case.inputs().args(device), &case.options()).expect("legal")
        };
        let (out, lse) = with(None);
        let (same_out, same_lse) = with(Some(f32::NEG_INFINITY));
        assert_eq!((bits(&out), bits(&lse)), (bits(&same_out), bits(&same_lse)));
        let (no_out, same_lse) = with(Some(f32::INFINITY));
        assert_eq!(bits(&lse), bits(&same_lse));
        assert!(
            no_out
                .cast(burn::tensor::FloatDType::F32)
                .try_into_vec_as::<f32>()
                .expect("reads back")
                .iter()
                .all(|&x| x == 0.0)
        );
    });
}

/// All rows of a sequence in order are what `mla_decode` reads.
#[test]
fn ops_sparse_of_all_rows_is_dense() {
    for_each_dtype(|device, dtype| {
        let case = Case { shape: [2, 1, 9], pools: vec![[6, 16, 40]], dtype, ..Default::default() };
        let mut inputs = case.inputs();
        let table = [3, 0, 5, 1, 4, 2];
        inputs.scopes[0].rows = random(&mut rng(85), 6 * 16 * 80, dtype);
        inputs.scopes[0].indices =
            (0..2 * 40).map(|i| table[i / 40 * 3 + i % 40 / 16] * 16 + (i % 40 % 16) as i32).collect();
        let args = inputs.args(device);
        let (out, lse) = sparse_mla(args.clone(), &case.options()).expect("legal");
        let dense = MlaDecodeArgs {
            q: MlaQuery::Whole(args.q),
            kv_cache: args.scope.rows,
            page_table: ints(&table, [2, 3], device),
            seq_lens: ints(&[40, 40], [2], device),
        };
        let softmax_scale = case.options().softmax_scale;
        let options =
            MlaDecodeOptions { value_width: 64, softmax_scale, causal: false, splits: Splits::Auto, path: None };
        let (dense_out, dense_lse) = mla_decode(dense, &options, None).expect("legal").materialise();
        let list = |x: Tensor<4>| x.cast(burn::tensor::FloatDType::F32).try_into_vec_as::<f32>().expect("reads back");
        let as_state = |out: Tensor<4>, lse: Tensor<3>| State {
            out: list(out).into_iter().map(f64::from).collect(),
            lse: lse.try_into_vec_as::<f32>().expect("reads back").into_iter().map(f64::from).collect(),
        };
        assert_state("sparse and dense", (out, lse), &as_state(dense_out, dense_lse));
    });
}

/// Scopes on their own, merged, are both scopes at once.
#[test]
fn ops_sparse_scopes_merge() {
    for_each_dtype(|device, dtype| {
        let case = Case { pools: vec![[9, 16, 70], [5, 8, 33]], dtype, ..Default::default() };
        let inputs = case.inputs();
        let args = inputs.args(device);
        let alone = |scope: &SparseScope| {
            let args = SparseMlaArgs { scope: scope.clone(), second: None, ..args.clone() };
            let (out, lse) = sparse_mla(args, &case.options()).expect("legal");
            (out.reshape([4, 9, 64]), lse.reshape([4, 9]))
        };
        let ((out_a, lse_a), (out_b, lse_b)) = (alone(&args.scope), alone(args.second.as_ref().expect("two scopes")));
        let merged = merge_state(MergeStateArgs { out_a, lse_a, out_b, lse_b }).expect("legal");
        assert_state("merged", merged, &inputs.expected());
    });
}

#[test]
fn ops_errors_sparse() {
    for_each_device(|device| {
        let case = Case::default();
        let good = || case.inputs().args(device);
        let refused = |change: &dyn Fn(&mut SparseMlaArgs), kind, argument: &str| {
            let mut args = good();
            change(&mut args);
            assert_refused(sparse_mla(args, &case.options()), kind, argument);
        };
        refused(&|args| args.q = zeros([2, 2, 0, 80], device), Kind::Value, "q");
        refused(&|args| args.q = zeros([2, 2, 9, 81], device), Kind::Shape, "scope.rows");
        refused(&|args| args.scope.rows = args.scope.rows.dense().cast(DType::F16).into(), Kind::DType, "scope.rows");
        refused(&|args| args.scope.indices = ints(&[0; 12], [3, 2, 2], device), Kind::Shape, "scope.indices");
        refused(&|args| args.scope.indices = args.scope.indices.clone().cast(DType::I64), Kind::DType, "scope.indices");
        refused(&|args| args.scope.lengths = Some(ints(&[1; 2], [2, 1], device)), Kind::Shape, "scope.lengths");
        refused(
            &|args| args.second = Some(SparseScope { rows: zeros([1, 1, 3], device).into(), ..args.scope.clone() }),
            Kind::Shape,
            "second.rows",
        );
        refused(&|args| args.sink = Some(zeros([8], device)), Kind::Shape, "sink");
        for (options, argument) in [
            (SparseMlaOptions { value_width: 81, ..case.options() }, "value_width"),
            (SparseMlaOptions { value_width: 0, ..case.options() }, "value_width"),
            (SparseMlaOptions { softmax_scale: f32::NAN, ..case.options() }, "softmax_scale"),
        ] {
            assert_refused(sparse_mla(good(), &options), Kind::Value, argument);
        }
        for (scope, argument) in [
            (SparseScope { indices: ints(&[144; 4], [2, 2, 1], device), ..good().scope }, "scope.indices"),
            (SparseScope { indices: ints(&[-2; 4], [2, 2, 1], device), ..good().scope }, "scope.indices"),
            (SparseScope { lengths: Some(ints(&[71, 0, 0, 0], [2, 2], device)), ..good().scope }, "scope.lengths"),
        ] {
            let args = SparseMlaArgs { scope, ..good() };
            let validated = args.validate_device_inputs();
            assert_values_refused(device, validated, || sparse_mla(args, &case.options()), argument);
        }
    });
}
