//! [`linear_by_head`](super::linear_by_head()) as a backend extension.

use burn::backend::{Backend, ExtensionType, backend_extension, tensor::FloatTensor};

use crate::Determinism;
use crate::ops::mla_decode::backend::BackendDecode;
use crate::weight::BackendWeight;

/// [`HeadRows`](super::HeadRows) as a backend takes them.
#[derive(ExtensionType)]
#[extension_type(fusion: cfg(all(feature = "fusion", feature = "_gpu")))]
pub(crate) enum BackendHeadRows<B: Backend> {
    /// `[N, H, d]`.
    InMemory(FloatTensor<B>),
    /// What a decode step gives, as `[B Sq, H, Dv]`.
    Decoded(#[extension_type] BackendDecode<B>),
    /// Heads of one token before their inverse RoPE.
    InverseRope {
        /// `[1, heads, d]`, as `[1, H, heads / H · d]`.
        x: FloatTensor<B>,
        /// f32 `[1, dr / 2]`.
        cos: FloatTensor<B>,
        /// f32 `[1, dr / 2]`.
        sin: FloatTensor<B>,
    },
}

#[backend_extension(
    Cube: cfg(feature = "_gpu"),
    Flex: cfg(feature = "flex"),
    Fusion: cfg(all(feature = "fusion", feature = "_gpu"))
)]
pub(crate) trait LinearByHeadBackend: Backend {
    /// x `[N, H, d]`, weight `[H, out, in]`: `[N, H, out + d - in]`.
    #[fusion(meta = |x, weight, _| {
        let ([rows, heads, width], dtype) = match x {
            BackendHeadRowsMetadata::InMemory(x) => (x.shape.dims(), x.dtype),
            BackendHeadRowsMetadata::Decoded(step) => {
                let [batch, query_len, heads, _] = step.q.shape.dims();
                ([batch * query_len, heads, step.spec.value_width], step.q.dtype)
            }
            BackendHeadRowsMetadata::InverseRope { x, .. } => {
                let ([tokens, ..], [groups, _, inputs]) = (x.shape.dims::<3>(), weight.dims());
                ([tokens, groups, inputs], x.dtype)
            }
        };
        let [_, outputs, inputs] = weight.dims();
        crate::fusion::spec([rows, heads, outputs + width - inputs], dtype)
    })]
    fn linear_by_head(
        #[extension_type] x: BackendHeadRows<Self>,
        #[extension_type] weight: BackendWeight<Self>,
        determinism: Determinism,
    ) -> FloatTensor<Self>;
}

#[cfg(feature = "flex")]
mod reference {
    use burn::backend::{Flex, tensor::FloatTensor};
    use burn::tensor::Tensor;

    use super::{BackendHeadRows, BackendWeight, Determinism, LinearByHeadBackend};
    use crate::WeightFormat;
    use crate::ops::linear_by_head::head_by_head;
    use crate::ops::mla_decode::backend::MlaDecodeBackend;
    use crate::ops::norm_rope::reference::{Norm, Rope, norm_rope};
    use crate::reference::{IntoFlex, tensor};

    impl LinearByHeadBackend for Flex {
        fn linear_by_head(
            x: BackendHeadRows<Self>,
            weight: BackendWeight<Self>,
            determinism: Determinism,
        ) -> FloatTensor<Self> {
            let weight = weight.stacked();
            let [groups, _, inputs] = weight.dims();
            let x: Tensor<3> = match x {
                BackendHeadRows::InMemory(x) => tensor(x),
                BackendHeadRows::Decoded(step) => tensor::<Tensor<4>>(Self::mla_decode(step).0).flatten(0, 1),
                BackendHeadRows::InverseRope { x, cos, sin } => {
                    let rope = Rope::Tables([tensor(cos), tensor(sin)], true);
                    let x = norm_rope(tensor(x), Norm::None, rope, true);
                    let [tokens, ..] = x.dims();
                    x.reshape([tokens, groups, inputs])
                }
            };
            let [_, _, width] = x.dims();
            let read = x.clone().narrow(2, 0, inputs);
            let product = match weight.format() {
                WeightFormat::Dense => read.swap_dims(0, 1).matmul(weight.dense().swap_dims(1, 2)).swap_dims(0, 1),
                WeightFormat::Blocks(_) => head_by_head(read, &weight, determinism),
            };
            Tensor::cat(vec![product, x.narrow(2, inputs, width - inputs)], 2).into_flex()
        }
    }
}
