//! [`mla_decode`]: attention of a few query tokens over the paged latent cache.

pub(super) mod backend;
mod checks;
#[cfg(feature = "_gpu")]
pub(super) mod cube;
mod decoded;
mod problem;
#[cfg(feature = "flex")]
mod reference;

pub use self::decoded::Decoded;
pub use self::problem::MlaDecodeProblem;

use burn::tensor::{Device, Int, Tensor};

use self::backend::DecodeSpec;
use self::decoded::Planned;
use super::mla_plan::{MlaPlan, MlaPlanArgs};
use crate::cache::Pool;
use crate::{MlaError, Path, Splits};

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

impl From<Tensor<4>> for MlaQuery {
    fn from(q: Tensor<4>) -> Self {
        Self::Whole(q)
    }
}

/// Arguments of [`mla_decode`].
#[derive(Debug, Clone)]
pub struct MlaDecodeArgs {
    /// The query, f32, f16 or bf16.
    pub q: MlaQuery,
    /// The cache `[P, S, D]` of the query's dtype, dense or in FP8; a row is a key, its first `Dv` channels are the value.
    /// On a GPU a cache that is not contiguous is copied in every call: make it with [`new_pool`](crate::cache::new_pool).
    pub kv_cache: Pool,
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

impl MlaDecodeOptions {
    /// Causal attention, split and computed as is the fastest.
    pub fn new(value_width: usize, softmax_scale: f32) -> Self {
        Self { value_width, softmax_scale, causal: true, splits: Splits::Auto, path: None }
    }
}

/// Attention over the paged latent cache (DeepSeek-V2 §2.1, in the absorbed form): one key-value head that all query
/// heads share.
///
/// Nothing is launched before the result is read: by [`Decoded::materialise`], which gives `out [B, Sq, H, Dv]` in the query's
/// dtype and `lse` f32 `[B, Sq, H]`, or by [`linear_by_head`](crate::linear_by_head()), which may merge the splits in the launch of
/// its projection. Sums are in f32. A query that may see no key gives `out = 0` and `lse = -inf`.
///
/// Cache rows past a sequence's end and page table entries past it are never read into a sum, whatever they hold.
/// `plan` is what [`mla_plan`](crate::mla_plan) gave for these `seq_lens`; without it the call plans for itself. A plan for other
/// lengths is an error on the CPU; elsewhere its lengths are on the device, and [`MlaPlan::validate_device_inputs`] looks.
///
/// ```
/// use burn::tensor::{DType, Device, Distribution, Int, Tensor};
/// use mla_ops::batch::index_tensor;
/// use mla_ops::{MlaDecodeArgs, MlaDecodeOptions, mla_decode};
///
/// let device = Device::flex();
/// // A sequence of 3 tokens, in the pages 2 and 0 of 2 tokens; 4 heads, latents of 8 channels with 4 rotary ones.
/// let q = Tensor::<4>::random([1, 1, 4, 12], Distribution::Default, &device);
/// let kv_cache = Tensor::<3>::random([3, 2, 12], Distribution::Default, &device);
/// let page_table = Tensor::<2, Int>::from_data([[2, 0]], (&device, DType::I32));
/// let args = MlaDecodeArgs::new(q, kv_cache, page_table, index_tensor(vec![3], &device));
/// let (out, lse) = mla_decode(args, &MlaDecodeOptions::new(8, 0.3), None)?.materialise();
/// assert_eq!((out.dims(), lse.dims()), ([1, 1, 4, 8], [1, 1, 4]));
/// # Ok::<(), mla_ops::MlaError>(())
/// ```
///
/// # Errors
/// Wrong shapes, dtypes or devices, a plan made for another problem, a path that the device does not have, or more than the
/// device can do ([`MlaError::DeviceLimit`]): nothing is launched. A page id or length that is out of range is on the device
/// and cannot be seen; [`MlaDecodeArgs::validate_device_inputs`] looks.
pub fn mla_decode(
    args: MlaDecodeArgs,
    options: &MlaDecodeOptions,
    plan: Option<&MlaPlan>,
) -> Result<Decoded, MlaError> {
    let check = args.check_tensors()?;
    let problem = args.check_options(&check, options)?;
    if let Some(plan) = plan {
        plan.check(&check, &problem)?;
    }
    if check.sees_values() {
        let lens = args.validate_values()?;
        plan.map_or(Ok(()), |plan| plan.validate_values(&lens))?;
    }
    let plan = match plan {
        Some(plan) => {
            args.check_limits(&check, &problem, options, plan.cube_ptr.dims()[0] - 1, plan.items.dims()[0])?;
            Planned::Given(plan.clone())
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
            Planned::Own(plan, spec)
        }
    };
    let &MlaDecodeOptions { value_width, softmax_scale, causal, path, .. } = options;
    Ok(Decoded { args, plan, spec: DecodeSpec { value_width, softmax_scale, causal, path } })
}

impl MlaDecodeArgs {
    /// The fields in their order; whole query rows may be a tensor `[B, Sq, H, D]`, dense rows of the cache a tensor `[P, S, D]`.
    pub fn new(
        q: impl Into<MlaQuery>,
        kv_cache: impl Into<Pool>,
        page_table: Tensor<2, Int>,
        seq_lens: Tensor<1, Int>,
    ) -> Self {
        Self { q: q.into(), kv_cache: kv_cache.into(), page_table, seq_lens }
    }

    /// The device that the call runs on.
    pub fn device(&self) -> Device {
        self.kv_cache.device()
    }
}
