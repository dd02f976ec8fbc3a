use burn::backend::Flex;
use burn::tensor::Tensor;

use super::backend::{BackendLatents, BackendRopeQuery, BackendRopeWritten, RopeWriteBackend};
use crate::ops::linear_by_head::backend::{BackendHeadRows, LinearByHeadBackend};
use crate::ops::norm_rope::reference::{Norm, Rope, norm_rope};
use crate::ops::write_latent::reference::write_latent;
use crate::reference::{IntoFlex, tensor};

impl RopeWriteBackend for Flex {
    fn rope_write(query: BackendRopeQuery<Self>, latents: BackendLatents<Self>) -> BackendRopeWritten<Self> {
        match query {
            BackendRopeQuery::Heads(q) => {
                let (q, latent, cache) = rope_write(tensor(q), latents).into_flex();
                BackendRopeWritten::Heads { q, latent, cache }
            }
            BackendRopeQuery::Absorbed(q, weight, determinism) => {
                let (q, _, cache) = rope_write(tensor(q), latents).into_flex();
                let q = Self::linear_by_head(BackendHeadRows::InMemory(q), weight, determinism);
                BackendRopeWritten::Absorbed { q, cache }
            }
        }
    }
}

fn rope_write(q: Tensor<3>, latents: BackendLatents<Flex>) -> (Tensor<3>, Tensor<2>, Tensor<3>) {
    let BackendLatents { latent, norm_weight, cos, sin, cache, slots, norm_eps } = latents;
    let tables: [Tensor<2>; 2] = [tensor(cos), tensor(sin)];
    let q = norm_rope(q, Norm::None, Rope::Tables(tables.clone(), false), false);
    let latent = tensor::<Tensor<2>>(latent).unsqueeze_dim(1);
    let latent = norm_rope(latent, Norm::Weighted(tensor(norm_weight), norm_eps), Rope::Tables(tables, false), false)
        .squeeze_dim::<2>(1);
    let cache = write_latent(tensor(cache), tensor(slots), std::slice::from_ref(&latent));
    (q, latent, cache)
}
