//! [`mla_decode`]: attention of a few query tokens over the paged latent cache; [`mla_decode_project`]: and its projection.

use burn::backend::Dispatch;
use burn::tensor::{DType, Device, Int, Tensor};

use super::linear::linear_by_head;
use super::mla_plan::{MlaPlan, MlaPlanArgs, check_lengths};
use crate::backend::{DecodeSpec, MlaBackend};
use crate::check::{Check, read_i32};
use crate::path::{Path, available_paths, words};
use crate::{MlaError, Splits};

const OP: &str = "mla_decode";

/// The query of [`mla_decode`]: whole rows, or the two parts as the projections give them.
#[derive(Debug, Clone)]
pub enum MlaQuery {
    /// `[B, Sq, H, D]`.
    Whole(Tensor<4>),
    /// The absorbed latent part `[B, Sq, H, Dv]` and the rotary part `[B, Sq, H, D - Dv]`.
    Parts {
        /// The part that meets the latent.
        nope: Tensor<4>,
        /// The part that meets the rotary key.
        pe: Tensor<4>,
    },
}

/// Arguments of [`mla_decode`].
#[derive(Debug, Clone)]
pub struct MlaDecodeArgs {
    /// The query, f32, f16 or bf16.
    pub q: MlaQuery,
    /// The cache `[P, S, D]` of the query's dtype; a row is a key, its first `Dv` channels are the value.
    /// On a GPU a cache that is not contiguous is copied in every call: make it with [`new_pool`](crate::cache::new_pool).
    pub kv_cache: Tensor<3>,
    /// Page ids i32 `[B, maxP]`: token `t` of sequence `b` is row `t % S` of page `page_table[b, t / S]`. Entries past
    /// a sequence's end may hold anything.
    pub page_table: Tensor<2, Int>,
    /// Keys of each sequence i32 `[B]`, the query's own tokens included.
    pub seq_lens: Tensor<1, Int>,
}

/// Options of [`mla_decode`].
#[derive(Debug, Clone)]
pub struct MlaDecodeOptions {
    /// `Dv`: how many leading channels of a cache row are the value (512 in DeepSeek-V3).
    pub value_width: usize,
    /// The factor of the scores before the softmax.
    pub softmax_scale: f32,
    /// Query `i` of `Sq` sees the keys `j <= seq_len - Sq + i`; otherwise all keys.
    pub causal: bool,
    /// How keys are split where no plan is passed.
    pub splits: Splits,
    /// The implementation, one of [`available_paths`](crate::available_paths); none: the fastest.
    pub path: Option<Path>,
}

/// Attention over the paged latent cache (DeepSeek-V2 §2.1, in the absorbed form): one key-value head that all query
/// heads share.
///
/// Returns `out [B, Sq, H, Dv]` in the query's dtype and `lse` f32 `[B, Sq, H]`, the natural logarithm of the sum of
/// `exp(score)`. Sums are in f32. A query that may see no key gives `out = 0` and `lse = -inf`.
///
/// Cache rows past a sequence's end and page table entries past it are never read into a sum, whatever they hold.
/// `plan` is what [`mla_plan`](crate::mla_plan) gave for these `seq_lens`; without it the call plans for itself.
///
/// # Errors
/// Wrong shapes, dtypes or devices, a plan made for another problem, a path that the device does not have, or more than the
/// device can do ([`MlaError::DeviceLimit`]): nothing is launched. A page id or length that is out of range is on the device
/// and cannot be seen; [`MlaDecodeArgs::validate_device_inputs`] looks.
pub fn mla_decode(
    args: MlaDecodeArgs,
    options: &MlaDecodeOptions,
    plan: Option<&MlaPlan>,
) -> Result<(Tensor<4>, Tensor<3>), MlaError> {
    let Call { q, args, plan, spec } = Call::new(args, options, plan)?;
    let (out, lse) = <Dispatch as MlaBackend>::mla_decode(
        q.into_dispatch(),
        args.kv_cache.into_dispatch(),
        args.page_table.into_dispatch(),
        args.seq_lens.into_dispatch(),
        plan.items.into_dispatch(),
        plan.cube_ptr.into_dispatch(),
        plan.split_ptr.into_dispatch(),
        spec,
    );
    Ok((Tensor::from_dispatch(out), Tensor::from_dispatch(lse)))
}

/// [`mla_decode`] and, of its `out`, [`linear_by_head`] with each head's value matrix `value_proj [H, dv, Dv]`:
/// `[B, Sq, H, dv]`. The bits are the same, but for a single token on a GPU it may be a launch less.
///
/// # Errors
/// As [`mla_decode`], and where `value_proj` has another shape, dtype or device.
pub fn mla_decode_project(
    args: MlaDecodeArgs,
    options: &MlaDecodeOptions,
    plan: Option<&MlaPlan>,
    value_proj: Tensor<3>,
) -> Result<Tensor<4>, MlaError> {
    let [batch, query_len, heads, _] = args.q.dims();
    let (rank, [_, outputs, _]) = (options.value_width, value_proj.dims());
    let check = args.q.check()?;
    check.float_as("value_proj", &value_proj, args.q.dtype(), "the dtype of `q`")?;
    let words = || format!("[H, dv, Dv] with H = {heads}, Dv = {rank}");
    check.dims("value_proj", value_proj.dims(), [Some(heads), None, Some(rank)], words)?;
    check.value("value_proj", outputs > 0, "matrices without rows", || "at least 1 row each".into())?;
    if (batch, query_len) != (1, 1) {
        let (out, _) = mla_decode(args, options, plan)?;
        let out = linear_by_head(out.reshape([batch * query_len, heads, rank]), value_proj);
        return Ok(out.reshape([batch, query_len, heads, outputs]));
    }
    let Call { q, args, plan, spec } = Call::new(args, options, plan)?;
    Ok(Tensor::from_dispatch(<Dispatch as MlaBackend>::mla_decode_project(
        q.into_dispatch(),
        args.kv_cache.into_dispatch(),
        args.page_table.into_dispatch(),
        args.seq_lens.into_dispatch(),
        plan.items.into_dispatch(),
        plan.cube_ptr.into_dispatch(),
        plan.split_ptr.into_dispatch(),
        value_proj.into_dispatch(),
        spec,
    )))
}

/// What the implementations take, checked.
struct Call {
    q: Tensor<4>,
    args: MlaDecodeArgs,
    plan: MlaPlan,
    spec: DecodeSpec,
}

impl Call {
    fn new(args: MlaDecodeArgs, options: &MlaDecodeOptions, plan: Option<&MlaPlan>) -> Result<Self, MlaError> {
        let check = args.check_tensors()?;
        let problem = args.check_options(&check, options)?;
        if let Some(plan) = plan {
            check.int("plan", &plan.items)?;
            plan.check(&problem)?;
        }
        if check.sees_values() {
            args.validate_values()?;
        }
        let plan = match plan {
            Some(plan) => {
                args.check_limits(&check, &problem, options, plan.cube_ptr.dims()[0] - 1, plan.items.dims()[0])?;
                plan.clone()
            }
            None => {
                let plan = MlaPlanArgs {
                    seq_lens: args.seq_lens.clone(),
                    query_len: problem.query_len,
                    heads: problem.heads,
                    page_size: problem.page_size,
                    max_seq_len: args.page_table.dims()[1] * problem.page_size,
                    splits: options.splits,
                };
                let spec = plan.spec()?;
                args.check_limits(&check, &problem, options, spec.cubes, spec.capacity)?;
                plan.launch(spec)
            }
        };
        let q = match args.q.clone() {
            MlaQuery::Whole(q) => q,
            MlaQuery::Parts { nope, pe } => Tensor::cat(vec![nope, pe], 3),
        };
        let &MlaDecodeOptions { value_width, softmax_scale, causal, path, .. } = options;
        Ok(Self { q, args, plan, spec: DecodeSpec { value_width, softmax_scale, causal, path } })
    }
}

/// What decides which implementation runs: see [`explain_path`](crate::explain_path).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MlaDecodeProblem {
    /// Sequences (`B`).
    pub batch: usize,
    /// Query tokens of each (`Sq`).
    pub query_len: usize,
    /// Query heads (`H`).
    pub heads: usize,
    /// Channels of a cache row (`D`).
    pub key_width: usize,
    /// Channels of the value (`Dv`).
    pub value_width: usize,
    /// Tokens in a page (`S`).
    pub page_size: usize,
    /// Of query and cache.
    pub dtype: DType,
}

impl MlaQuery {
    /// Dimensions of the whole rows.
    fn dims(&self) -> [usize; 4] {
        match self {
            MlaQuery::Whole(q) => q.dims(),
            MlaQuery::Parts { nope, pe } => {
                let [batch, query_len, heads, latent] = nope.dims();
                [batch, query_len, heads, latent + pe.dims()[3]]
            }
        }
    }

    fn dtype(&self) -> DType {
        match self {
            MlaQuery::Whole(q) | MlaQuery::Parts { nope: q, .. } => q.dtype(),
        }
    }

    /// Dtypes, devices, and that the two parts belong together.
    fn check(&self) -> Result<Check, MlaError> {
        match self {
            MlaQuery::Whole(q) => {
                let check = Check::new(OP, "q", q)?;
                check.float("q", q)?;
                Ok(check)
            }
            MlaQuery::Parts { nope, pe } => {
                let check = Check::new(OP, "q.nope", nope)?;
                check.float("q.nope", nope)?;
                check.float_as("q.pe", pe, nope.dtype(), "the dtype of `q.nope`")?;
                let [batch, query_len, heads, _] = nope.dims();
                let words = || format!("[B, Sq, H, D - Dv] with B = {batch}, Sq = {query_len}, H = {heads}");
                check.dims("q.pe", pe.dims(), [Some(batch), Some(query_len), Some(heads), None], words)?;
                Ok(check)
            }
        }
    }
}

impl MlaDecodeArgs {
    /// The device that the call runs on.
    pub fn device(&self) -> Device {
        self.kv_cache.device()
    }

    /// Dtypes, devices, and that the tensors fit together.
    fn check_tensors(&self) -> Result<Check, MlaError> {
        let check = self.q.check()?;
        let [batch, _, heads, key_width] = self.q.dims();
        check.value(
            "q",
            heads > 0 && key_width > 0,
            format!("a query of {heads} heads of width {key_width}"),
            || "at least 1 head, and 1 channel".into(),
        )?;
        check.float_as("kv_cache", &self.kv_cache, self.q.dtype(), "the dtype of `q`")?;
        let words = || format!("[P, S, D] with D = {key_width}, the width of `q`");
        check.dims("kv_cache", self.kv_cache.dims(), [None, None, Some(key_width)], words)?;
        check.page_size("kv_cache page size (dimension 1)", self.kv_cache.dims()[1])?;
        check.int("page_table", &self.page_table)?;
        let words = || format!("[B, maxP] with B = {batch}");
        check.dims("page_table", self.page_table.dims(), [Some(batch), None], words)?;
        check.int("seq_lens", &self.seq_lens)?;
        check.dims("seq_lens", self.seq_lens.dims(), [Some(batch)], || format!("[B] with B = {batch}"))?;
        Ok(check)
    }

    fn check_options(&self, check: &Check, options: &MlaDecodeOptions) -> Result<MlaDecodeProblem, MlaError> {
        let [batch, query_len, heads, key_width] = self.q.dims();
        #[cfg(feature = "_gpu")]
        if !crate::independent::is_flex(check.device()) {
            let bytes = key_width * self.q.dtype().size();
            let most = mla_kernels::mla_decode::MAX_KEY_BYTES;
            check.value("kv_cache", bytes <= most, format!("a cache with rows of {bytes} bytes"), || {
                format!("rows of at most {most} bytes, of which two fit into the shared memory of a GPU")
            })?;
        }
        let value_width = options.value_width;
        check.value("value_width", (1..=key_width).contains(&value_width), value_width, || {
            format!("1 to {key_width}, the width of a cache row")
        })?;
        if let MlaQuery::Parts { nope, .. } = &self.q {
            let latent = nope.dims()[3];
            check.value("value_width", latent == value_width, value_width, || {
                format!("{latent}, the width of `q.nope`")
            })?;
        }
        let scale = options.softmax_scale;
        check.value("softmax_scale", scale.is_finite(), scale, || "a finite number".into())?;
        options.splits.check(check)?;
        let (page_size, dtype) = (self.kv_cache.dims()[1], self.q.dtype());
        let problem = MlaDecodeProblem { batch, query_len, heads, key_width, value_width, page_size, dtype };
        if let Some(path) = options.path {
            let available = available_paths(&problem, check.device());
            check.value("path", available.contains(&path), path, || {
                let names: Vec<String> = available.iter().map(Path::to_string).collect();
                format!("one that {:?} has for {}: {}", check.device(), words(&problem), names.join(", "))
            })?;
        }
        Ok(problem)
    }

    /// The device can do this, with a plan of these sizes.
    fn check_limits(
        &self,
        check: &Check,
        problem: &MlaDecodeProblem,
        options: &MlaDecodeOptions,
        cubes: usize,
        capacity: usize,
    ) -> Result<(), MlaError> {
        #[cfg(feature = "_gpu")]
        {
            let tables = [self.kv_cache.dims()[0], self.page_table.dims()[1]];
            crate::op_limits::decode(check, problem, tables, [cubes, capacity], options.causal, options.path)?;
        }
        let _ = (check, problem, options, cubes, capacity);
        Ok(())
    }

    /// Reads lengths and page table back and checks every entry that the call would use.
    ///
    /// # Errors
    /// [`MlaError::DeviceValue`] names the first length outside `0 ..= maxP * S` or page id outside `0 .. P`. Before that,
    /// wrong shapes and dtypes as in [`mla_decode`].
    pub fn validate_device_inputs(&self) -> Result<(), MlaError> {
        self.check_tensors()?;
        self.validate_values()
    }

    fn validate_values(&self) -> Result<(), MlaError> {
        let [pages, page_size, _] = self.kv_cache.dims();
        let [_, max_pages] = self.page_table.dims();
        let lens = read_i32(OP, "seq_lens", &self.seq_lens)?;
        check_lengths(OP, &lens, max_pages * page_size, "the capacity of `page_table`")?;
        let table = read_i32(OP, "page_table", &self.page_table)?;
        for (b, &len) in lens.iter().enumerate() {
            for p in 0..(len as usize).div_ceil(page_size) {
                let page = table[b * max_pages + p];
                if usize::try_from(page).map_or(true, |page| page >= pages) {
                    return Err(MlaError::DeviceValue {
                        op: OP,
                        argument: "page_table",
                        index: vec![b, p],
                        actual: page,
                        expected: format!("a page of the cache, 0 to {}", pages.saturating_sub(1)),
                    });
                }
            }
        }
        Ok(())
    }
}

impl MlaPlan {
    /// The plan was made for a problem of these dimensions.
    fn check(&self, problem: &MlaDecodeProblem) -> Result<(), MlaError> {
        let made_for = (self.batch, self.query_len, self.heads, self.page_size);
        let asked = (problem.batch, problem.query_len, problem.heads, problem.page_size);
        if made_for == asked {
            return Ok(());
        }
        let words = |(b, sq, h, s)| format!("B = {b}, Sq = {sq}, H = {h}, page size {s}");
        Err(MlaError::Value {
            op: OP,
            argument: "plan",
            actual: format!("a plan for {}", words(made_for)),
            expected: format!("one for {}", words(asked)),
        })
    }
}
