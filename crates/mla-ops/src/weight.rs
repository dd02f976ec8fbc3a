//! [`Weight`] and [`StackedWeight`]: matrices of a checkpoint, in the format that they are stored in.
//!
//! Layers and the loader hold these and never look inside. An operation passes [`BackendWeight`] to its backend method; kernels
//! take it through one reader, the reference decodes it block by block. A format is a variant here, its reader and a row of the
//! tables in the kernels, its reference, and how checkpoints name and store it: `docs/extending.md`.

mod blocks;
mod dequantize;
mod module;

use burn::backend::{
    Backend, Dispatch, ExtensionType,
    tensor::{FloatTensor, IntTensor},
};
use burn::module::Param;
use burn::tensor::{DType, Device, Tensor};
#[cfg(feature = "_gpu")]
use mla_kernels::linear::WeightArg;

pub use self::blocks::{BlockFormat, WeightBlocks};
pub(crate) use self::blocks::{Blocks, Packing};
#[cfg(feature = "_gpu")]
pub(crate) use self::dequantize::cube::dequantized;
use crate::MlaError;
use crate::check::Check;
#[cfg(feature = "_gpu")]
use crate::tensors::{contiguous, matrix_stride};

/// A matrix `[out, in]` of a projection, in the format that it is stored in. Clones share memory. In a Burn module, and its record, it is
/// one parameter, or two, `codes` and `scales`.
///
/// ```
/// use burn::tensor::{DType, Device, Tensor};
/// use mla_ops::batch::index_tensor;
/// use mla_ops::{BlockFormat, Determinism, Weight, WeightBlocks, linear};
///
/// let device = Device::flex();
/// // A dense weight is a tensor.
/// let dense = Weight::from(Tensor::<2>::ones([2, 128], &device));
/// // The same in FP8: the code of 1 is 0x38, and there is a scale for 128 columns of 128 rows.
/// let blocks = WeightBlocks {
///     format: BlockFormat::Fp8,
///     codes: index_tensor(vec![0x3838_3838; 2 * 128 / 4], &device),
///     scales: index_tensor(vec![1f32.to_bits() as i32], &device),
///     block_rows: 128,
///     dtype: DType::F32,
/// };
/// let fp8 = Weight::from_blocks(blocks, [2, 128])?;
/// assert_eq!((dense.bytes(), fp8.bytes()), (1024, 260));
/// let x = Tensor::<2>::ones([1, 128], &device);
/// assert_eq!(linear(x, &fp8, Determinism::Fast)?.max().into_scalar::<f32>(), 128.0);
/// # Ok::<(), mla_ops::MlaError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Weight(Format<2>);

/// Matrices `[E, out, in]` of one shape and format: experts, or heads. Clones share memory.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use mla_ops::StackedWeight;
///
/// let experts = StackedWeight::from(Tensor::<3>::ones([8, 16, 32], &Device::flex()));
/// assert_eq!((experts.dims(), experts.format().is_dense()), ([8, 16, 32], true));
/// ```
#[derive(Debug, Clone)]
pub struct StackedWeight(Format<3>);

/// How the elements of a [`Weight`] or [`StackedWeight`] are stored: what the choice of an implementation depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WeightFormat {
    /// One number of the dtype for each element.
    Dense,
    /// Codes in blocks with a scale each.
    Blocks(BlockFormat),
}

impl WeightFormat {
    /// Whether it has one number of the dtype for each element.
    pub fn is_dense(self) -> bool {
        match self {
            Self::Dense => true,
            Self::Blocks(_) => false,
        }
    }
}

#[cfg(feature = "_gpu")]
impl From<WeightFormat> for mla_kernels::linear::WeightFormat {
    fn from(format: WeightFormat) -> Self {
        match format {
            WeightFormat::Dense => Self::Dense,
            WeightFormat::Blocks(BlockFormat::Fp8) => Self::Fp8,
            WeightFormat::Blocks(BlockFormat::Fp4) => Self::Fp4,
        }
    }
}

/// The elements, as they are stored.
#[derive(Debug, Clone)]
enum Format<const D: usize> {
    /// [`WeightFormat::Dense`].
    Dense(Param<Tensor<D>>),
    /// [`WeightFormat::Blocks`].
    Blocks(Blocks),
}

impl<const D: usize> Format<D> {
    fn kind(&self) -> WeightFormat {
        match self {
            Self::Dense(_) => WeightFormat::Dense,
            Self::Blocks(blocks) => WeightFormat::Blocks(blocks.packing.format),
        }
    }

    fn dims(&self) -> [usize; D] {
        match self {
            Self::Dense(tensor) => tensor.dims(),
            Self::Blocks(blocks) => blocks.packing.dims(),
        }
    }

    fn dtype(&self) -> DType {
        match self {
            Self::Dense(tensor) => tensor.dtype(),
            Self::Blocks(blocks) => blocks.packing.dtype,
        }
    }

    fn device(&self) -> Device {
        match self {
            Self::Dense(tensor) => tensor.device(),
            Self::Blocks(blocks) => blocks.codes.device(),
        }
    }

    fn bytes(&self) -> u64 {
        match self {
            Self::Dense(tensor) => tensor.shape().num_elements() as u64 * tensor.dtype().size() as u64,
            Self::Blocks(blocks) => blocks.bytes(),
        }
    }

    fn dense(&self) -> Tensor<D> {
        match self {
            Self::Dense(tensor) => tensor.val(),
            Self::Blocks(blocks) => blocks.dense().reshape(self.dims()),
        }
    }

    fn check(&self, check: &Check, argument: &'static str, dtype: DType, why: &str) -> Result<(), MlaError> {
        match self {
            Self::Dense(tensor) => {
                check.float_as(argument, tensor, dtype, why)?;
                check.elements(argument, tensor)
            }
            Self::Blocks(blocks) => {
                check.on_device_of(argument, &blocks.codes)?;
                check.same_dtype(argument, blocks.packing.dtype, dtype, why)?;
                check.element_count(argument, blocks.packing.len())
            }
        }
    }

    fn into_backend(self) -> BackendWeight<Dispatch> {
        match self {
            Self::Dense(tensor) => BackendWeight::Dense(tensor.val().into_dispatch()),
            Self::Blocks(Blocks { codes, scales, packing }) => {
                BackendWeight::Blocks(codes.val().into_dispatch(), scales.val().into_dispatch(), packing)
            }
        }
    }
}

/// The same for both, which differ in rank alone.
macro_rules! weight {
    ($name:ident, $rank:literal, $shape:literal) => {
        impl $name {
            #[doc = concat!("`", $shape, "`.")]
            pub fn dims(&self) -> [usize; $rank] {
                self.0.dims()
            }

            /// How it is stored.
            pub fn format(&self) -> WeightFormat {
                self.0.kind()
            }

            /// Of the elements that it stands for: f32, f16 or bf16.
            pub fn dtype(&self) -> DType {
                self.0.dtype()
            }

            /// Where it is.
            pub fn device(&self) -> Device {
                self.0.device()
            }

            /// Its bytes on the device.
            pub fn bytes(&self) -> u64 {
                self.0.bytes()
            }

            #[doc = concat!("The elements `", $shape, "`, dequantised; of a dense weight the tensor itself.")]
            pub fn dense(&self) -> Tensor<$rank> {
                self.0.dense()
            }

            #[doc = concat!("A weight `", $shape, "` that stays as codes and scales.")]
            ///
            /// # Errors
            /// [`MlaError`] where `blocks` are not those of such a weight: their lengths, the rows of a block, dtypes, devices.
            pub fn from_blocks(blocks: WeightBlocks, dims: [usize; $rank]) -> Result<Self, MlaError> {
                let mut all = [1; 3];
                all[3 - $rank..].copy_from_slice(&dims);
                Ok(Self(Format::Blocks(Blocks::new(blocks, all)?)))
            }

            /// On the call's device, of this dtype, and no larger than kernels can address.
            pub(crate) fn check(
                &self,
                check: &Check,
                argument: &'static str,
                dtype: DType,
                why: &str,
            ) -> Result<(), MlaError> {
                self.0.check(check, argument, dtype, why)
            }

            /// As a backend takes it.
            pub(crate) fn into_backend(self) -> BackendWeight<Dispatch> {
                self.0.into_backend()
            }
        }

        /// A dense weight: any strides, f32, f16 or bf16.
        impl From<Tensor<$rank>> for $name {
            fn from(tensor: Tensor<$rank>) -> Self {
                Self(Format::Dense(module::param(tensor)))
            }
        }
    };
}

weight!(Weight, 2, "[out, in]");
weight!(StackedWeight, 3, "[E, out, in]");

impl Weight {
    /// Whether it has no elements.
    pub(crate) fn is_empty(&self) -> bool {
        self.dims().contains(&0)
    }
}

#[cfg(feature = "flex")]
impl StackedWeight {
    /// One of the matrices.
    pub(crate) fn get(&self, index: usize) -> Weight {
        match &self.0 {
            Format::Dense(tensor) => {
                let matrix = tensor.val().narrow(0, index, 1).squeeze_dim::<2>(0);
                Weight(Format::Dense(module::param_of_call(matrix)))
            }
            Format::Blocks(blocks) => Weight(Format::Blocks(blocks.get(index))),
        }
    }
}

#[cfg(feature = "flex")]
impl Weight {
    /// Codes and scales, where it has any.
    pub(crate) fn blocks(&self) -> Option<&Blocks> {
        match &self.0 {
            Format::Dense(_) => None,
            Format::Blocks(blocks) => Some(blocks),
        }
    }
}

/// A [`Weight`] or [`StackedWeight`] as a backend takes it.
#[derive(Clone, ExtensionType)]
#[extension_type(fusion: cfg(all(feature = "fusion", feature = "_gpu")))]
pub enum BackendWeight<B: Backend> {
    /// One number of the dtype for each element.
    Dense(FloatTensor<B>),
    /// Words of codes and of scales, i32.
    Blocks(IntTensor<B>, IntTensor<B>, Packing),
}

#[cfg(feature = "flex")]
impl BackendWeight<burn::backend::Flex> {
    /// The weight again.
    pub(crate) fn weight(self) -> Weight {
        Weight(self.format())
    }

    /// The stacked weight again.
    pub(crate) fn stacked(self) -> StackedWeight {
        StackedWeight(self.format())
    }

    fn format<const D: usize>(self) -> Format<D> {
        use crate::reference::tensor;
        match self {
            Self::Dense(primitive) => Format::Dense(module::param_of_call(tensor(primitive))),
            Self::Blocks(codes, scales, packing) => Format::Blocks(Blocks::of_call([codes, scales], packing)),
        }
    }
}

#[cfg(feature = "_gpu")]
impl BackendWeight<burn_cubecl::CubeBackend> {
    /// Rows and columns, and how many matrices where they are stacked.
    pub(crate) fn dims<const D: usize>(&self) -> [usize; D] {
        match self {
            Self::Dense(tensor) => tensor.meta.shape().dims(),
            Self::Blocks(_, _, packing) => packing.dims(),
        }
    }

    /// Of the elements that it stands for.
    pub(crate) fn dtype(&self) -> DType {
        match self {
            Self::Dense(tensor) => tensor.dtype,
            Self::Blocks(_, _, packing) => packing.dtype,
        }
    }

    /// How it is stored.
    pub(crate) fn format(&self) -> WeightFormat {
        match self {
            Self::Dense(_) => WeightFormat::Dense,
            Self::Blocks(_, _, packing) => WeightFormat::Blocks(packing.format),
        }
    }

    /// Of its device.
    pub(crate) fn client(&self) -> &cubecl::client::Client {
        match self {
            Self::Dense(tensor) | Self::Blocks(tensor, ..) => &tensor.client,
        }
    }

    /// As kernels take it.
    pub(crate) fn into_arg(self) -> WeightArg {
        match self {
            Self::Dense(tensor) => WeightArg::Dense(contiguous(tensor).into_buffer_arg()),
            Self::Blocks(codes, scales, packing) => packing.arg(codes, scales),
        }
    }

    /// Stacked matrices as kernels take them, and the elements from one to the next: between the halves of a projection's
    /// matrices the other halves may lie.
    pub(crate) fn into_stack_arg(self) -> (WeightArg, usize) {
        let [_, outputs, inputs] = self.dims();
        match self {
            Self::Dense(tensor) => match matrix_stride(&tensor) {
                Some(stride) => (WeightArg::Dense(tensor.into_buffer_arg()), stride),
                None => (WeightArg::Dense(contiguous(tensor).into_buffer_arg()), outputs * inputs),
            },
            Self::Blocks(codes, scales, packing) => (packing.arg(codes, scales), outputs * inputs),
        }
    }
}

#[cfg(all(feature = "fusion", feature = "_gpu"))]
impl BackendWeightMetadata {
    /// Rows and columns, and how many matrices where they are stacked.
    pub(crate) fn dims<const D: usize>(&self) -> [usize; D] {
        match self {
            Self::Dense(spec) => spec.shape.dims(),
            Self::Blocks(_, _, packing) => packing.dims(),
        }
    }

    /// Of the elements that it stands for.
    pub(crate) fn dtype(&self) -> DType {
        match self {
            Self::Dense(spec) => spec.dtype,
            Self::Blocks(_, _, packing) => packing.dtype,
        }
    }
}
