//! The elements that codes and scales stand for, as a tensor.

use burn::backend::{Backend, Dispatch, backend_extension, tensor::FloatTensor};
use burn::tensor::Tensor;

use super::{BackendWeight, Blocks};

/// The elements of a stack of matrices on backend primitives.
#[backend_extension(
    Cube: cfg(feature = "_gpu"),
    Flex: cfg(feature = "flex"),
    Fusion: cfg(all(feature = "fusion", feature = "_gpu"))
)]
pub(crate) trait DequantizeBackend: Backend {
    /// `[count, out, in]`, in the dtype that the weight stands for.
    #[fusion(meta = |weight| crate::fusion::spec(weight.dims::<3>(), weight.dtype()))]
    fn dequantize(#[extension_type] weight: BackendWeight<Self>) -> FloatTensor<Self>;
}

impl Blocks {
    /// The elements `[count, out, in]`.
    pub(crate) fn dense(&self) -> Tensor<3> {
        let dims = self.packing.dims;
        if dims.contains(&0) {
            return Tensor::empty(dims, (&self.codes.device(), self.packing.dtype));
        }
        let Self { codes, scales, packing } = self.clone();
        let weight = BackendWeight::Blocks(codes.val().into_dispatch(), scales.val().into_dispatch(), packing);
        Tensor::from_dispatch(Dispatch::dequantize(weight))
    }
}

#[cfg(feature = "flex")]
impl DequantizeBackend for burn::backend::Flex {
    fn dequantize(weight: BackendWeight<Self>) -> FloatTensor<Self> {
        use crate::reference::{IntoFlex, blocks};
        match weight {
            BackendWeight::Dense(elements) => elements,
            BackendWeight::Blocks(codes, scales, packing) => {
                blocks::dense(&Blocks::of_call([codes, scales], packing)).into_flex()
            }
        }
    }
}

#[cfg(feature = "_gpu")]
pub(crate) mod cube {
    use burn::backend::cubecl::dtype_to_elem_type;
    use burn_cubecl::{CubeBackend, tensor::CubeTensor};
    use mla_kernels::linear::dequantize::{DequantizeArgs, launch};

    use super::{BackendWeight, DequantizeBackend};
    use crate::tensors::empty;

    impl DequantizeBackend for CubeBackend {
        fn dequantize(weight: BackendWeight<Self>) -> CubeTensor {
            let [count, ..] = weight.dims::<3>();
            dequantized(weight, 0, count)
        }
    }

    /// The elements `[count, out, in]` of the matrices from number `first` on.
    pub(crate) fn dequantized(weight: BackendWeight<CubeBackend>, first: usize, count: usize) -> CubeTensor {
        let [_, outputs, inputs] = weight.dims();
        match weight {
            BackendWeight::Dense(elements) => elements,
            BackendWeight::Blocks(codes, scales, packing) => {
                let out = empty(&codes, [count, outputs, inputs], packing.dtype);
                let (client, elem) = (out.client.clone(), dtype_to_elem_type(packing.dtype));
                let (weight, buffer) = (packing.arg(codes, scales), out.clone().into_buffer_arg());
                launch(&client, DequantizeArgs { weight, out: buffer, first, count, outputs, inputs, elem });
                out
            }
        }
    }
}
