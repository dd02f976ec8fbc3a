//! What a backend has to do for [`matmul`](super::matmul) where Burn's own product rounds.

use burn::backend::{Backend, backend_extension, tensor::FloatTensor};

/// [`matmul`](crate::matmul()) on backend primitives.
#[backend_extension(
    Cube: cfg(feature = "_gpu"),
    Flex: cfg(feature = "flex"),
    Fusion: cfg(all(feature = "fusion", feature = "_gpu"))
)]
pub(crate) trait MatmulBackend: Backend {
    /// In f32.
    #[fusion(dtype = lhs, shape = {
        let mut out = lhs.clone();
        let last = out.num_dims() - 1;
        out[last] = rhs[last];
        out
    })]
    fn matmul(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self>;
}

#[cfg(feature = "_gpu")]
mod cube {
    use burn::backend::cubecl::dtype_to_storage_type;
    use burn_cubecl::{CubeBackend, tensor::CubeTensor};
    use cubek::matmul::definition::{MatmulElems, MatmulGlobalElems};
    use cubek::matmul::{launch::launch_ref, multi_level};
    use cubek::std::InputBinding;

    use super::MatmulBackend;
    use crate::tensors::{empty, launched};

    impl MatmulBackend for CubeBackend {
        fn matmul(lhs: CubeTensor, rhs: CubeTensor) -> CubeTensor {
            let (out_dtype, rank) = (lhs.dtype, lhs.meta.shape().num_dims());
            let mut shape = lhs.meta.shape().clone();
            shape[rank - 1] = rhs.meta.shape()[rank - 1];
            let out = empty(&lhs, shape, out_dtype);
            let elem = dtype_to_storage_type(out_dtype);
            let input = |tensor: CubeTensor| InputBinding::new(tensor.binding(), elem);
            let mut elems = MatmulElems::from_globals(&MatmulGlobalElems { lhs: elem, rhs: elem, out: elem });
            let (client, lhs, rhs) = (out.client.clone(), input(lhs), input(rhs));
            // The kernel without matrix units, for those know no f32.
            let unit = multi_level::Strategy::SimpleUnit(Default::default()).into();
            let result = launch_ref(&unit, &client, lhs.clone(), rhs.clone(), out.clone().binding(), &mut elems);
            if result.is_err() {
                let naive = multi_level::Strategy::Naive.into();
                launched(launch_ref(&naive, &client, lhs, rhs, out.clone().binding(), &mut elems));
            }
            out
        }
    }
}

#[cfg(feature = "flex")]
impl MatmulBackend for burn::backend::Flex {
    fn matmul(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> {
        <Self as burn::backend::ops::FloatTensorOps<Self>>::float_matmul(lhs, rhs)
    }
}
