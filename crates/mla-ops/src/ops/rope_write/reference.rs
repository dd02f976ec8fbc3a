use burn::backend::{Flex, tensor::FloatTensor};
use burn::tensor::Tensor;

use super::backend::{BackendLatents, RopeWriteBackend};
use crate::backend::NormRopeSpec;
use crate::linear_by_head;
use crate::ops::write_latent::reference::write_latent;
use crate::reference::{IntoFlex, norm_rope, tensor};

impl RopeWriteBackend for Flex {
    fn rope_write(
        q: FloatTensor<Self>,
        latents: BackendLatents<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        rope_write(tensor(q), latents).into_flex()
    }

    fn rope_write_absorb(
        q: FloatTensor<Self>,
        latents: BackendLatents<Self>,
        weight: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (q, _, cache) = rope_write(tensor(q), latents);
        (linear_by_head(q, tensor(weight)), cache).into_flex()
    }
}

fn rope_write(q: Tensor<3>, latents: BackendLatents<Flex>) -> (Tensor<3>, Tensor<2>, Tensor<3>) {
    let BackendLatents { latent, norm_weight, cos, sin, cache, slots, norm_eps } = latents;
    let tables: [Tensor<2>; 2] = [tensor(cos), tensor(sin)];
    let [_, pairs] = tables[0].dims();
    let turn = NormRopeSpec { norm_eps: None, norm_turned: false, weighted: false, pairs, inverse: false };
    let norm = NormRopeSpec { norm_eps: Some(norm_eps), weighted: true, ..turn.clone() };
    let q = norm_rope(q, None, Some(tables.clone()), &turn);
    let latent = tensor::<Tensor<2>>(latent).unsqueeze_dim(1);
    let latent = norm_rope(latent, Some(tensor(norm_weight)), Some(tables), &norm).squeeze_dim::<2>(1);
    let cache = write_latent(tensor(cache), tensor(slots), std::slice::from_ref(&latent));
    (q, latent, cache)
}
