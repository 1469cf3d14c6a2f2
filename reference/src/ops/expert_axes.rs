//! The axes that the layers of 8-bit weights and activations share.

use super::CaseConfig;
use super::axes::{Space, named, shown};
use super::layer_rules::{
    GENERATED_LAYOUTS, GENERATED_PARAMETERS, NO_PARAMETER, NO_UP, ROUTER_WEIGHT_ON,
};
use super::quantized_moe::QuantizedLayer;
use super::tensors::HALF;
use crate::moe::activation::Activation;

/// Experts and those of the rank, of generated cases.
pub(super) const EXPERT_RANKS: [(&str, (usize, usize)); 5] = [
    ("4 of 4", (4, 4)),
    ("3 of 6", (6, 3)),
    ("8 of 8", (8, 8)),
    ("1 of 1", (1, 1)),
    ("2 of 8", (8, 2)),
];

/// The axes that every layer has. `layer` is where a config has the shared keys.
pub(super) fn expert_axes<C>(space: Space<C>, layer: fn(&mut C) -> &mut QuantizedLayer) -> Space<C>
where
    C: Clone + Into<CaseConfig> + Send + Sync + 'static,
{
    space
        .axis("dtype", shown(HALF), move |c, &ty| layer(c).dtype = ty)
        .axis("activation", named(Activation::NAMED), move |c, &a| layer(c).activation = a)
        .axis("experts", named(&EXPERT_RANKS), move |c, &(all, local)| {
            (layer(c).num_experts, layer(c).num_local_experts) = (all, local);
        })
        .axis("top_k", shown([1, 2, 3, 6]), move |c, &count| layer(c).top_k = count)
        .axis("router_weight_on", named(&ROUTER_WEIGHT_ON), move |c, &(on_gate_up, on_x)| {
            let layer = layer(c);
            layer.apply_router_weight_on_input = on_gate_up;
            layer.rules.router_weight_on_x = on_x;
        })
        .axis("gate_up_layout", named(&GENERATED_LAYOUTS), move |c, &layout| {
            layer(c).rules.gate_up_layout = layout;
        })
        .axis("swiglu parameters", named(&GENERATED_PARAMETERS), move |c, &all| {
            layer(c).rules.set_parameters(all);
        })
        .illegal(NO_UP, &["activation", "gate_up_layout"], move |c| {
            let mut c = c.clone();
            let layer = layer(&mut c);
            layer.rules.gate_up_layout.is_some() && !layer.activation.is_gated()
        })
        .illegal(NO_PARAMETER, &["activation", "swiglu parameters"], move |c| {
            let mut c = c.clone();
            let layer = layer(&mut c);
            layer.rules.has_foreign_parameter(layer.activation)
        })
        .illegal("a token has at most every expert", &["experts", "top_k"], move |c| {
            let mut c = c.clone();
            layer(&mut c).top_k > layer(&mut c).num_experts
        })
}
