use burn::backend::Flex;
use burn::tensor::Tensor;

use super::backend::{BackendIndexHeads, BackendLatents, BackendRopeQuery, BackendRopeWritten, RopeWriteBackend};
use crate::cache::{BackendPool, Pool};
use crate::ops::compress_kv::backend::{BackendSteps, CompressKvBackend};
use crate::ops::linear_by_head::backend::{BackendHeadRows, LinearByHeadBackend};
use crate::ops::norm_rope::BackendNorm;
use crate::ops::norm_rope::reference::{Norm, Rope, norm_rope};
use crate::ops::write_latent::reference::write_latent;
use crate::reference::{IntoFlex, tensor};

impl RopeWriteBackend for Flex {
    fn rope_write(
        query: BackendRopeQuery<Self>,
        latents: BackendLatents<Self>,
        steps: BackendSteps<Self>,
    ) -> BackendRopeWritten<Self> {
        match query {
            BackendRopeQuery::Heads { q, norm, index } => {
                let norm = match norm {
                    BackendNorm::Plain(eps) => Norm::Plain(eps),
                    BackendNorm::None | BackendNorm::Weighted(..) => Norm::None,
                };
                let tables = latents.tables();
                let index = match index {
                    BackendIndexHeads::None => BackendIndexHeads::None,
                    BackendIndexHeads::Heads(q) => {
                        let q = norm_rope(tensor(q), Norm::None, Rope::Tables(tables, false), false);
                        BackendIndexHeads::Heads(q.into_flex())
                    }
                };
                let (q, latent, cache) = rope_write(tensor(q), norm, latents);
                let ((q, latent), cache) = ((q, latent).into_flex(), BackendPool::of(cache));
                let compressed = steps.map(Self::compress_and_write);
                BackendRopeWritten::Heads { q, index, latent, cache, compressed }
            }
            BackendRopeQuery::Absorbed(q, weight, determinism) => {
                let (q, _, cache) = rope_write(tensor(q), Norm::None, latents);
                let (q, cache) = (q.into_flex(), BackendPool::of(cache));
                let q = Self::linear_by_head(BackendHeadRows::InMemory(q), weight, determinism);
                BackendRopeWritten::Absorbed { q, cache }
            }
        }
    }
}

impl BackendLatents<Flex> {
    fn tables(&self) -> [Tensor<2>; 2] {
        [&self.cos, &self.sin].map(|table| tensor(table.clone()))
    }
}

fn rope_write(q: Tensor<3>, q_norm: Norm, latents: BackendLatents<Flex>) -> (Tensor<3>, Tensor<2>, Pool) {
    let tables = latents.tables();
    let BackendLatents { latent, norm_weight, cache, slots, norm_eps, .. } = latents;
    let (latent, norm_weight) = (tensor::<Tensor<2>>(latent), tensor::<Tensor<1>>(norm_weight));
    let (q_whole, whole) = (!matches!(q_norm, Norm::None), norm_weight.dims()[0] == latent.dims()[1]);
    let q = norm_rope(q, q_norm, Rope::Tables(tables.clone(), false), q_whole);
    let norm = Norm::Weighted(norm_weight, norm_eps);
    let latent = norm_rope(latent.unsqueeze_dim(1), norm, Rope::Tables(tables, false), whole).squeeze_dim::<2>(1);
    let cache = write_latent(cache.pool(), tensor(slots), std::slice::from_ref(&latent));
    (q, latent, cache)
}
