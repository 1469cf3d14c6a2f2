//! The parts of a block around its routed experts, by their checkpoint names: router, shared
//! expert, output bias.

use super::tensors::{EACH, ExpertsRule, MISNAMED, ROUTERS, SHARED, shared};
use crate::Result;
use crate::num::tensor::Tensor;

/// Families whose router multiplies in f32, whatever the type of the hidden states
/// (transformers 5.23.0). The others' logits have the type of the hidden states.
const F32_LOGITS: &[&str] = &[
    "axk1",
    "axk2",
    "bailing_hybrid",
    "beam",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "deepseek_v4",
    "dots1",
    "dots3_note",
    "ernie4_5_moe",
    "ernie4_5_vl_moe",
    "exaone_moe",
    "flint",
    "glm4_moe",
    "glm4_moe_lite",
    "glm4v_moe",
    "glm5_next",
    "glm_moe_dsa",
    "hy_v3",
    "hy_v4",
    "inkling",
    "kimi_k2",
    "kimi_k25",
    "kimi_linear",
    "kolibri1",
    "longcat_flash",
    "mimo_v2_flash",
    "mistral_large4",
    "muse_spark",
    "nemotron_h",
    "solar_open",
];

/// The module of the shared expert's gate, below the experts' parent.
const SHARED_GATE: &str = "shared_expert_gate";

/// Whether the router of a family multiplies in f32.
pub fn logits_are_f32(model_type: &str) -> bool {
    let known = |name: &str| F32_LOGITS.contains(&name);
    known(model_type) || model_type.strip_suffix("_text").is_some_and(known)
}

/// The tensors of a block besides its routed experts.
#[derive(Debug, Clone, PartialEq)]
pub struct Surroundings {
    /// Router `[E, H]`, zero experts included.
    pub router_weight: Option<Tensor<'static>>,
    /// Bias of the logits `[E]`.
    pub router_bias: Option<Tensor<'static>>,
    /// `[2S, H]` and `[H, S]` of the shared expert.
    pub shared: Option<[Tensor<'static>; 2]>,
    /// `[1, H]`.
    pub shared_gate: Option<Tensor<'static>>,
    /// `[H]`, added to the output.
    pub output_bias: Option<Tensor<'static>>,
}

impl Surroundings {
    /// Reads the block below `parent` (`mlp.`). `get` finds a tensor of 16 or 32 bits by its name
    /// below the layer; `rule` is that of the family's experts.
    ///
    /// # Errors
    /// [`crate::Error::Shape`] and [`crate::Error::Dtype`] naming a tensor.
    pub fn read<'t>(
        get: &dyn Fn(&str) -> Option<Tensor<'t>>,
        parent: &str,
        rule: ExpertsRule,
    ) -> Result<Self> {
        let below = |name: &str| get(&format!("{parent}{name}"));
        let find = |names: &[&str]| names.iter().find_map(|n| below(n)).map(Tensor::into_owned);
        Ok(Self {
            router_weight: find(ROUTERS),
            router_bias: find(&["router.bias"]),
            shared: shared(get, &below, rule)?,
            shared_gate: below(&format!("{SHARED_GATE}.weight")).map(Tensor::into_owned),
            output_bias: find(&["bias"]),
        })
    }

    /// Modules that may hold the router, below the layer.
    pub fn router_modules(parent: &str) -> impl Iterator<Item = String> + '_ {
        let modules = ROUTERS.iter().filter_map(|name| name.strip_suffix(".weight"));
        modules.map(move |module| format!("{parent}{module}"))
    }

    /// The module of the shared expert's gate, below the layer.
    pub fn gate_module(parent: &str) -> String {
        format!("{parent}{SHARED_GATE}")
    }

    /// Modules of gate, up and down that a shared expert of linear layers may have below the layer.
    pub fn shared_modules(parent: &str) -> impl Iterator<Item = [String; 3]> + '_ {
        let places = [parent, ""].into_iter();
        let modules = places.flat_map(|place| SHARED.iter().map(move |m| format!("{place}{m}")));
        modules.flat_map(|module| {
            let names = EACH.iter().chain([&MISNAMED]);
            names.map(|names| names.map(|n| format!("{module}{n}"))).collect::<Vec<_>>()
        })
    }
}
