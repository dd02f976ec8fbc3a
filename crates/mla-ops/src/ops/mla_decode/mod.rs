//! [`mla_decode`]: attention of a few query tokens over the paged latent cache; [`mla_decode_project`]: and its projection.

mod backend;
mod checks;
#[cfg(feature = "_gpu")]
mod cube;
#[cfg(feature = "flex")]
mod reference;

use burn::backend::Dispatch;
use burn::tensor::{DType, Device, Int, Tensor};

use self::backend::{BackendDecode, DecodeSpec, MlaDecodeBackend};
use super::linear_by_head::linear_by_head;
use super::mla_plan::{MlaPlan, MlaPlanArgs};
use crate::device::has_kernels;
use crate::dispatch::tensors;
use crate::path::Path;
use crate::{Determinism, MlaError, Splits};

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
    let call = checked(args, options, plan)?;
    Ok(tensors(<Dispatch as MlaDecodeBackend>::mla_decode(call)))
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
    determinism: Determinism,
) -> Result<Tensor<4>, MlaError> {
    let [batch, query_len, heads, _] = args.q.dims();
    let (rank, [_, outputs, _]) = (options.value_width, value_proj.dims());
    let check = args.q.check()?;
    check.float_as("value_proj", &value_proj, args.q.dtype(), "the dtype of `q`")?;
    let words = || format!("[H, dv, Dv] with H = {heads}, Dv = {rank}");
    check.dims("value_proj", value_proj.dims(), [Some(heads), None, Some(rank)], words)?;
    check.value("value_proj", outputs > 0, "matrices without rows", || "at least 1 row each".into())?;
    if (batch, query_len) != (1, 1) || !has_kernels(check.device()) {
        let (out, _) = mla_decode(args, options, plan)?;
        let out = linear_by_head(out.reshape([batch * query_len, heads, rank]), value_proj, determinism);
        return Ok(out.reshape([batch, query_len, heads, outputs]));
    }
    let call = checked(args, options, plan)?;
    Ok(tensors(<Dispatch as MlaDecodeBackend>::mla_decode_project(call, value_proj.into_dispatch())))
}

/// What the implementations take, checked.
fn checked(
    args: MlaDecodeArgs,
    options: &MlaDecodeOptions,
    plan: Option<&MlaPlan>,
) -> Result<BackendDecode<Dispatch>, MlaError> {
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
    let q = match args.q {
        MlaQuery::Whole(q) => q,
        MlaQuery::Parts { nope, pe } => Tensor::cat(vec![nope, pe], 3),
    };
    let &MlaDecodeOptions { value_width, softmax_scale, causal, path, .. } = options;
    Ok(BackendDecode {
        q: q.into_dispatch(),
        kv_cache: args.kv_cache.into_dispatch(),
        page_table: args.page_table.into_dispatch(),
        seq_lens: args.seq_lens.into_dispatch(),
        items: plan.items.into_dispatch(),
        cube_ptr: plan.cube_ptr.into_dispatch(),
        split_ptr: plan.split_ptr.into_dispatch(),
        spec: DecodeSpec { value_width, softmax_scale, causal, path },
    })
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

impl MlaDecodeArgs {
    /// The device that the call runs on.
    pub fn device(&self) -> Device {
        self.kv_cache.device()
    }
}
