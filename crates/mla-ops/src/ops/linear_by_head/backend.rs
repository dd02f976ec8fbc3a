//! What a backend has to do for [`linear_by_head`](super::linear_by_head).

use burn::backend::{Backend, backend_extension, tensor::FloatTensor};

#[backend_extension(
    Cube: cfg(feature = "_gpu"),
    Flex: cfg(feature = "flex"),
    Fusion: cfg(all(feature = "fusion", feature = "_gpu"))
)]
pub(crate) trait LinearByHeadBackend: Backend {
    /// x `[N, H, d]`, weight `[H, out, in]`: `[N, H, out + d - in]`.
    #[fusion(meta = |x, weight| {
        let ([rows, heads, width], [_, outputs, inputs]) = (x.shape.dims(), weight.shape.dims());
        crate::fusion::spec([rows, heads, outputs + width - inputs], x.dtype)
    })]
    fn linear_by_head(x: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self>;
}

#[cfg(feature = "flex")]
impl LinearByHeadBackend for burn::backend::Flex {
    fn linear_by_head(x: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self> {
        use burn::tensor::Tensor;

        use crate::reference::{IntoFlex, tensor};
        let (x, weight): (Tensor<3>, Tensor<3>) = (tensor(x), tensor(weight));
        let ([_, _, width], [_, _, inputs]) = (x.dims(), weight.dims());
        let product = x.clone().narrow(2, 0, inputs).swap_dims(0, 1).matmul(weight.swap_dims(1, 2)).swap_dims(0, 1);
        Tensor::cat(vec![product, x.narrow(2, inputs, width - inputs)], 2).into_flex()
    }
}
