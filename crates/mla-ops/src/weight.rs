//! [`Weight`] and [`StackedWeight`]: matrices of a checkpoint, in the format that they are stored in.
//!
//! Layers and the loader hold these and never look inside. An operation passes [`BackendWeight`] to its backend method; kernels
//! take it through one reader, the reference dequantises it. A format is a variant here, its reader and a row of the tables in the
//! kernels, and its reference.

use burn::backend::{Backend, Dispatch, ExtensionType, tensor::FloatTensor};
use burn::tensor::{DType, Device, Tensor};
#[cfg(feature = "_gpu")]
use mla_kernels::linear::WeightArg;

use crate::MlaError;
use crate::check::Check;
#[cfg(feature = "_gpu")]
use crate::tensors::{contiguous, matrix_stride};

/// A matrix `[out, in]` of a projection, in the format that it is stored in. Clones share memory.
#[derive(Debug, Clone)]
pub struct Weight(Format<2>);

/// Matrices `[E, out, in]` of one shape and format: experts, or heads. Clones share memory.
#[derive(Debug, Clone)]
pub struct StackedWeight(Format<3>);

/// How the elements of a [`Weight`] or [`StackedWeight`] are stored: what the choice of an implementation depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WeightFormat {
    /// One number of the dtype for each element.
    Dense,
}

#[cfg(feature = "_gpu")]
impl From<WeightFormat> for mla_kernels::linear::WeightFormat {
    fn from(format: WeightFormat) -> Self {
        match format {
            WeightFormat::Dense => Self::Dense,
        }
    }
}

/// The elements, as they are stored.
#[derive(Debug, Clone)]
enum Format<const D: usize> {
    /// [`WeightFormat::Dense`].
    Dense(Tensor<D>),
}

impl<const D: usize> Format<D> {
    fn kind(&self) -> WeightFormat {
        match self {
            Self::Dense(_) => WeightFormat::Dense,
        }
    }

    fn dims(&self) -> [usize; D] {
        match self {
            Self::Dense(tensor) => tensor.dims(),
        }
    }

    fn dtype(&self) -> DType {
        match self {
            Self::Dense(tensor) => tensor.dtype(),
        }
    }

    fn device(&self) -> Device {
        match self {
            Self::Dense(tensor) => tensor.device(),
        }
    }

    fn dense(&self) -> Tensor<D> {
        match self {
            Self::Dense(tensor) => tensor.clone(),
        }
    }

    fn check(&self, check: &Check, argument: &'static str, dtype: DType, why: &str) -> Result<(), MlaError> {
        match self {
            Self::Dense(tensor) => {
                check.float_as(argument, tensor, dtype, why)?;
                check.elements(argument, tensor)
            }
        }
    }

    fn into_backend(self) -> BackendWeight<Dispatch> {
        match self {
            Self::Dense(tensor) => BackendWeight::Dense(tensor.into_dispatch()),
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

            #[doc = concat!("The elements `", $shape, "`, dequantised; of a dense weight the tensor itself.")]
            pub fn dense(&self) -> Tensor<$rank> {
                self.0.dense()
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
                Self(Format::Dense(tensor))
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
            Format::Dense(tensor) => tensor.clone().narrow(0, index, 1).squeeze_dim::<2>(0).into(),
        }
    }
}

/// A [`Weight`] or [`StackedWeight`] as a backend takes it.
#[derive(Clone, ExtensionType)]
#[extension_type(fusion: cfg(all(feature = "fusion", feature = "_gpu")))]
pub enum BackendWeight<B: Backend> {
    /// One number of the dtype for each element.
    Dense(FloatTensor<B>),
}

#[cfg(feature = "flex")]
impl BackendWeight<burn::backend::Flex> {
    /// The weight again.
    pub(crate) fn weight(self) -> Weight {
        match self {
            Self::Dense(primitive) => Weight(Format::Dense(crate::reference::tensor(primitive))),
        }
    }

    /// The stacked weight again.
    pub(crate) fn stacked(self) -> StackedWeight {
        match self {
            Self::Dense(primitive) => StackedWeight(Format::Dense(crate::reference::tensor(primitive))),
        }
    }
}

#[cfg(feature = "_gpu")]
impl BackendWeight<burn_cubecl::CubeBackend> {
    /// Rows and columns, and how many matrices where they are stacked.
    pub(crate) fn dims<const D: usize>(&self) -> [usize; D] {
        match self {
            Self::Dense(tensor) => tensor.meta.shape().dims(),
        }
    }

    /// Of the elements that it stands for.
    pub(crate) fn dtype(&self) -> DType {
        match self {
            Self::Dense(tensor) => tensor.dtype,
        }
    }

    /// How it is stored.
    pub(crate) fn format(&self) -> WeightFormat {
        match self {
            Self::Dense(_) => WeightFormat::Dense,
        }
    }

    /// As kernels take it.
    pub(crate) fn into_arg(self) -> WeightArg {
        match self {
            Self::Dense(tensor) => WeightArg::Dense(contiguous(tensor).into_buffer_arg()),
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
        }
    }
}

#[cfg(all(feature = "fusion", feature = "_gpu"))]
impl BackendWeightMetadata {
    /// Rows and columns, and how many matrices where they are stacked.
    pub(crate) fn dims<const D: usize>(&self) -> [usize; D] {
        match self {
            Self::Dense(spec) => spec.shape.dims(),
        }
    }

    /// Of the elements that it stands for.
    pub(crate) fn dtype(&self) -> DType {
        match self {
            Self::Dense(spec) => spec.dtype,
        }
    }
}
