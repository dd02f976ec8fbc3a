//! Where the mixture of experts of DeepSeek-V4 is in its files.

use super::config::DeepseekV4Config;
use super::schedule::MlpSpec;
use crate::layers::{Experts, Mlp, MlpNames, Moe, MoeConfig, Router};
use crate::parallel::{Cut, ExpertCut};
use crate::weights::WeightLoader;

/// Loads `{name}.gate`, `{name}.experts` and `{name}.shared_experts`.
pub(crate) fn load_moe(loader: &mut WeightLoader, name: &str, config: &DeepseekV4Config, spec: MlpSpec) -> Moe {
    let moe = config.moe();
    let names = MlpNames { gate: "w1", up: "w3", down: "w2" };
    let sizes = [moe.hidden_size, moe.moe_intermediate_size];
    let choice = match spec {
        MlpSpec::HashMoe => {
            let shape = [config.vocab_size, moe.num_experts_per_tok];
            (None, Some(loader.index_table(&format!("{name}.gate.tid2eid"), shape, moe.n_routed_experts)))
        }
        MlpSpec::Moe => {
            (Some(loader.tensor_f32(&format!("{name}.gate.bias"), [moe.n_routed_experts], Cut::Whole)), None)
        }
    };
    let (experts, cut) = load_experts(loader, &format!("{name}.experts"), &moe);
    Moe {
        gate: Router::load(loader, &format!("{name}.gate"), &moe, cut, choice),
        experts,
        shared_experts: Mlp::load_as(loader, &format!("{name}.shared_experts"), names, sizes),
    }
}

/// Published checkpoints have one tensor per expert, transformers' packed ones two for all, of which a rank has whole experts.
fn load_experts(loader: &mut WeightLoader, name: &str, config: &MoeConfig) -> (Experts, ExpertCut) {
    let (experts, hidden, width) = (config.n_routed_experts, config.hidden_size, config.moe_intermediate_size);
    let swiglu_limit = config.swiglu_limit();
    let packed = format!("{name}.gate_up_proj");
    if loader.has(&packed) {
        let gate_up_proj = loader.packed_experts(&packed, [experts, 2 * width, hidden]);
        let down_proj = loader.packed_experts(&format!("{name}.down_proj"), [experts, hidden, width]);
        return (Experts { gate_up_proj, down_proj, swiglu_limit }, ExpertCut::Whole);
    }
    let weight = |expert: usize, part: &str| format!("{name}.{expert}.{part}.weight");
    let gate_up: Vec<_> = (0..experts).flat_map(|e| [weight(e, "w1"), weight(e, "w3")]).collect();
    let down: Vec<_> = (0..experts).map(|e| weight(e, "w2")).collect();
    let cut = config.expert_cut(loader.parallel().size());
    let gate_up_proj = loader.experts(&gate_up, [experts, 2 * width, hidden], cut.gate_up());
    let down_proj = loader.experts(&down, [experts, hidden, width], cut.down());
    (Experts { gate_up_proj, down_proj, swiglu_limit }, cut)
}
