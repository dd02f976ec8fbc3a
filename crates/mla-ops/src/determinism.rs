//! [`Determinism`]: whether a row of a result may depend on the rows that are computed with it.

use burn::tensor::Device;

use crate::MlaError;
use crate::device::has_kernels;
use crate::independent::is_flex;

/// Whether the bits of a row may depend on how many rows are computed with it.
///
/// Matrix libraries choose a kernel, and with it the order of sums, by the number of rows. A request then gets other bits in a
/// batch of eight than alone, and a greedy token may differ. (He et al., "Defeating Nondeterminism in LLM Inference", 2025.)
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use mla_ops::{Determinism, Weight, linear};
///
/// let device = Device::flex();
/// let random = |shape| Tensor::<2>::random(shape, Distribution::Default, &device);
/// let (x, weight) = (random([40, 33]), Weight::from(random([7, 33])));
/// // The bits of a row are the same alone and among others.
/// let all = linear(x.clone(), &weight, Determinism::BatchInvariant)?;
/// let alone = linear(x.narrow(0, 39, 1), &weight, Determinism::BatchInvariant)?;
/// assert_eq!(all.narrow(0, 39, 1).into_data(), alone.into_data());
/// # Ok::<(), mla_ops::MlaError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Determinism {
    /// The fastest kernel for each number of rows. On a GPU, the rows of a launch of up to 64 are independent all the same.
    #[default]
    Fast,
    /// A row depends on itself and on the weights alone, bit for bit. The CPU computes products in blocks of one size. A GPU
    /// computes them by the small-batch kernel, which reads the weights once for every 64 rows. On Hopper, products in f16 or bf16
    /// of a multiple of 32 channels to a multiple of 8 outputs are computed by that kernel for a few rows and by that for many
    /// rows otherwise, which add up the channels in the same order. Bits are those of one kind of device: another one has others.
    ///
    /// Attention is batch-invariant over tokens one by one (`query_len` 1) with [`Splits::Tokens`](crate::Splits::Tokens). With the
    /// same splits, [`Path::Sm90`](crate::Path::Sm90) has these bits for several tokens of a sequence, too, where the last of them
    /// has as many splits as the first.
    BatchInvariant,
}

impl Determinism {
    /// Whether this is [`Self::BatchInvariant`].
    pub fn is_batch_invariant(self) -> bool {
        self == Self::BatchInvariant
    }

    /// Whether the device can do this.
    ///
    /// # Errors
    /// [`MlaError::UnsupportedDevice`] for [`Self::BatchInvariant`] on a device that is neither Burn's CPU backend nor has the
    /// kernels of this project.
    pub fn check(self, device: &Device) -> Result<(), MlaError> {
        if self == Self::Fast || is_flex(device) || has_kernels(device) {
            return Ok(());
        }
        let reason = "its matrix products are chosen by other libraries, by the number of rows".into();
        Err(MlaError::UnsupportedDevice { op: "batch_invariant", device: format!("{device:?}"), reason })
    }
}
