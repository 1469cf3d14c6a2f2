//! Whether Marlin runs the experts of a layer, and through which entry point.

use super::linear::{inputs, platform};
use super::oracle::blocks;
use super::{
    ActivationFormat, ActivationKey, Backend, Capability, InputType, MoeActivation, MoeDeployment,
    MoeDesc, Reason, Selection, WeightKey, check_moe_marlin_supports_layer,
};
use crate::config::Scheme;
use crate::num::dims::GroupSize;

/// The reasons why a modular Marlin kernel refuses a layer, in upstream's order
/// (`is_supported_config` of `MarlinExperts` and `BatchedMarlinExperts`): all of them, not only the
/// first. Any other entry point counts as [`Backend::Marlin`].
///
/// Ungated layers, routing methods, router types and shapes are never refused.
pub fn is_supported_config(
    backend: Backend,
    weights: WeightKey,
    desc: &MoeDesc,
    device: &Capability,
) -> Vec<Reason> {
    let experts = match backend {
        Backend::BatchedMarlin => &blocks::BATCHED_MARLIN,
        _ => &blocks::MARLIN,
    };
    experts.objections(weights, ActivationKey::None, &MoeDeployment::new(*desc), device)
}

/// Chooses between `MARLIN` and `BATCHED_MARLIN` for integer weights with 16-bit activations
/// (upstream `select_wna16_moe_backend`).
///
/// Both refuse 8-bit weights. The oracle of vLLM 0.21.0 does not check the width, and the kernel
/// that it returns then fails in its constructor.
pub fn select_wna16_moe_backend(
    weights: WeightKey,
    desc: &MoeDesc,
    device: &Capability,
) -> Selection {
    Selection::among(&[Backend::Marlin, Backend::BatchedMarlin], |backend| {
        let mut reasons = is_supported_config(backend, weights, desc, device);
        if weights == WeightKey::Int8 {
            reasons.push(Reason::EightBitModular);
        }
        reasons
    })
}

/// Evaluates every Marlin entry point for the experts of a layer.
///
/// Integer weights go through the method's own call of the fused operator
/// ([`Backend::FusedMarlinMoe`]) unless adapters are attached or tokens are sorted by expert, which
/// only the modular kernels support; floating-point weights always use the modular kernels.
///
/// The shape of the layer is checked as upstream does before it selects the method: hidden size a
/// multiple of 128, intermediate size of max(64, group); the group sizes −1, 32, 64, 128 apply to
/// integers.
pub fn select_moe(scheme: &Scheme, desc: &MoeDesc, device: &Capability) -> Selection {
    let all = [Backend::FusedMarlinMoe, Backend::Marlin, Backend::BatchedMarlin];
    let Some(weights) = WeightKey::of(scheme) else {
        let reason = if scheme.is_quantized() {
            Reason::Scheme { scheme: scheme.label() }
        } else {
            Reason::Unquantized
        };
        return Selection::among(&all, |_| vec![reason.clone()]);
    };
    // Upstream's method asks for the key of 128 × 128 blocks whatever the size of the blocks is.
    let weights = match weights {
        WeightKey::Fp8OtherBlock => WeightKey::Fp8Block128,
        weights => weights,
    };
    Selection::among(&all, |backend| {
        let mut reasons = match backend {
            Backend::FusedMarlinMoe => own_call(scheme, desc, device),
            _ => is_supported_config(backend, weights, desc, device),
        };
        let modular = backend != Backend::FusedMarlinMoe;
        if modular && weights == WeightKey::Int8 {
            reasons.push(Reason::EightBitModular);
        }
        // As in upstream, the batched kernel's call has no quantized activations.
        if backend == Backend::BatchedMarlin && desc.options.input_type != InputType::SixteenBit {
            let inputs = desc.options.input_type.name();
            reasons.push(Reason::Inputs { weights: scheme.label(), inputs });
        } else {
            reasons.extend(inputs(scheme, &desc.options, device));
        }
        reasons.extend(shape(scheme, desc, device));
        reasons
    })
}

/// The reasons why the method's own call refuses a layer.
fn own_call(scheme: &Scheme, desc: &MoeDesc, device: &Capability) -> Vec<Reason> {
    let mut reasons = platform(device);
    match scheme {
        Scheme::Wna16(w) if w.symmetric() || w.checkpoint_format.moe_zero_points => {}
        other => reasons.push(Reason::Scheme { scheme: other.label() }),
    }
    if desc.activation == MoeActivation::Relu2 {
        reasons.push(Reason::Activation { activation: desc.activation.name() });
    }
    let format = desc.parallel.activation_format();
    if format != ActivationFormat::Standard {
        reasons.push(Reason::ActivationFormat { format: format.name() });
    }
    if desc.lora {
        reasons.push(Reason::Lora);
    }
    reasons
}

fn shape(scheme: &Scheme, desc: &MoeDesc, device: &Capability) -> Vec<Reason> {
    use super::MarlinRefusal;
    let (group, built_in) = match scheme {
        Scheme::Wna16(w) => (w.group_size, false),
        Scheme::Fp8(_) | Scheme::Block { .. } => (scheme.group_size(), true),
        _ => (GroupSize::Of(32), true),
    };
    check_moe_marlin_supports_layer(
        desc.hidden_size,
        desc.intermediate_size_per_partition,
        group,
        desc.apply_router_weight_on_input,
        device,
    )
    .into_iter()
    .filter(|r| !matches!(r, MarlinRefusal::Platform { .. }))
    .filter(|r| !(built_in && matches!(r, MarlinRefusal::GroupSize { .. })))
    .map(Reason::from)
    .collect()
}
