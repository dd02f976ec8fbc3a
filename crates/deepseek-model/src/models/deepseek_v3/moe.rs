//! Where the mixture of experts of DeepSeek-V2 and V3 is in their files.

use burn::tensor::{Int, Tensor};

use crate::layers::{Experts, Mlp, Moe, MoeConfig, Router};
use crate::parallel::{Cut, ExpertCut};
use crate::weights::WeightLoader;

/// Loads `{name}.gate`, `{name}.experts.E` and `{name}.shared_experts`.
pub(crate) fn load_moe(loader: &mut WeightLoader, name: &str, config: &MoeConfig) -> Moe {
    let bias = config.has_bias().then(|| {
        let name = format!("{name}.gate.e_score_correction_bias");
        loader.tensor_f32(&name, [config.n_routed_experts], Cut::Whole)
    });
    load_moe_with(loader, name, config, (bias, None))
}

/// The same, whose experts are chosen with this bias, or by this table of token ids.
pub(crate) fn load_moe_with(
    loader: &mut WeightLoader,
    name: &str,
    config: &MoeConfig,
    choice: (Option<Tensor<1>>, Option<Tensor<2, Int>>),
) -> Moe {
    let shared_width = config.moe_intermediate_size * config.n_shared_experts;
    let cut = config.expert_cut(loader.parallel().size());
    Moe {
        gate: Router::load(loader, &format!("{name}.gate"), config, cut, choice),
        experts: load_experts(loader, &format!("{name}.experts"), config, cut),
        shared_experts: Mlp::load(loader, &format!("{name}.shared_experts"), config.hidden_size, shared_width),
    }
}

/// A tensor per expert and projection.
fn load_experts(loader: &mut WeightLoader, name: &str, config: &MoeConfig, cut: ExpertCut) -> Experts {
    let (experts, hidden, width) = (config.n_routed_experts, config.hidden_size, config.moe_intermediate_size);
    let weight = |expert: usize, part: &str| format!("{name}.{expert}.{part}.weight");
    let gate_up: Vec<_> = (0..experts).flat_map(|e| [weight(e, "gate_proj"), weight(e, "up_proj")]).collect();
    let down: Vec<_> = (0..experts).map(|e| weight(e, "down_proj")).collect();
    Experts {
        gate_up_proj: loader.experts(&gate_up, [experts, 2 * width, hidden], cut.gate_up()),
        down_proj: loader.experts(&down, [experts, hidden, width], cut.down()),
        swiglu_limit: config.swiglu_limit(),
    }
}
