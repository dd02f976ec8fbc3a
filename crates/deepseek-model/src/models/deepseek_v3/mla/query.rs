//! From the residual stream to queries.

use burn::module::Module;
use burn::tensor::Tensor;
use mla_ops::Determinism;

use super::INNER_NORM_EPS;
use crate::Result;
use crate::layers::{Linear, RmsNorm};
use crate::models::deepseek_v3::mla_config::MlaConfig;
use crate::parallel::Cut;
use crate::weights::WeightLoader;

/// The query projection: low-rank in V3, whole in V2-Lite.
#[derive(Module, Debug)]
pub(super) enum Query {
    LowRank(LowRankQuery),
    Whole(Linear),
}

/// By way of a query latent.
#[derive(Module, Debug)]
pub(super) struct LowRankQuery {
    q_a_proj: Linear,
    q_a_layernorm: RmsNorm,
    q_b_proj: Linear,
}

impl Query {
    pub(super) fn load(loader: &mut WeightLoader, name: &str, config: &MlaConfig) -> Self {
        let (hidden, heads) = (config.hidden_size, config.num_attention_heads);
        let width = heads * config.qk_head_dim();
        match config.q_lora_rank {
            Some(rank) => Self::LowRank(LowRankQuery {
                q_a_proj: Linear::load(loader, &format!("{name}.q_a_proj"), [rank, hidden], Cut::Whole),
                q_a_layernorm: RmsNorm::load(loader, &format!("{name}.q_a_layernorm"), rank, INNER_NORM_EPS),
                q_b_proj: Linear::load(loader, &format!("{name}.q_b_proj"), [width, rank], Cut::Heads(heads)),
            }),
            None => Self::Whole(Linear::load(loader, &format!("{name}.q_proj"), [width, hidden], Cut::Heads(heads))),
        }
    }

    /// The projection of x that it begins with.
    pub(super) fn first_projection(&self) -> &Linear {
        match self {
            Self::LowRank(query) => &query.q_a_proj,
            Self::Whole(q_proj) => q_proj,
        }
    }

    /// The query `[N, H·(dn + dr)]`, and what it was projected from: the query latent, or x itself.
    pub(super) fn forward(
        &self,
        x: Tensor<2>,
        projected: Tensor<2>,
        determinism: Determinism,
    ) -> Result<(Tensor<2>, Tensor<2>)> {
        Ok(match self {
            Self::LowRank(query) => {
                let latent = query.q_a_layernorm.apply(projected)?;
                (query.q_b_proj.forward(latent.clone(), determinism)?, latent)
            }
            Self::Whole(_) => (projected, x),
        })
    }
}
