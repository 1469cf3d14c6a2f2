//! W8A8-FP8 experts, prepared in upstream's order.

use marlinspike::Result;
use marlinspike::config::{ActivationScheme, Fp8Scheme, ScaleStrategy};
use marlinspike::layers::{MoeShard, ct_fp8_moe};
use marlinspike::method::Quantizer;
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::prepare::fp8::{ExpertMatrix, Fp8Experts, Fp8Options, largest_scale};
use marlinspike::quantize::Fp8GroupRule;

use super::matrices::Matrices;
use super::parts::Moe;
use crate::load;
use crate::model::Model;
use crate::model::routing::MoeRouting;
use crate::run::options::MethodOptions;

/// The quantizer of a scheme whose scales come from groups of k; `None` of other schemes.
pub(super) fn groups(activations: ActivationScheme, rule: Fp8GroupRule) -> Option<Quantizer> {
    let (size, ue8m0) = match activations {
        ActivationScheme::DynamicGroup(size) => (size, false),
        ActivationScheme::DynamicGroupUe8m0(size) => (size, true),
        _ => return None,
    };
    Some(Quantizer::Fp8GroupBy { size, rule, ue8m0 })
}

/// The layer of these experts, w13's first.
///
/// # Errors
/// As [`Fp8Experts::prepare`], and for tensors that cannot be read.
pub(super) fn experts(
    model: &Model<'_>,
    stacks: &[Matrices<'_>; 2],
    scheme: &Fp8Scheme,
    routing: MoeRouting,
    options: MethodOptions,
    notes: &mut Vec<String>,
) -> Result<Moe> {
    let [w13, w2] = stacks;
    let count = w13.experts.len();
    let shard = MoeShard::new(count, w13.size_k(), w2.size_k(), 1)?;
    // The strategies and the sizes are checked before any tensor is read.
    ct_fp8_moe(scheme, &shard)?;
    let is_static = scheme.activations == ActivationScheme::StaticTensor;
    let input = |m: &Matrices<'_>, name: &str| -> Result<Option<Tensor<'static>>> {
        if !is_static {
            return Ok(None);
        }
        let largest = m.input_scales(model)?.iter().map(|own| largest_scale(own)).collect();
        Tensor::from_vec(name, DType::F32, vec![count], largest).map(Some)
    };
    let inputs = [input(w13, "w13_input_scale")?, input(w2, "w2_input_scale")?];
    let quantizers = |scales: [Option<f32>; 2]| -> [Quantizer; 2] {
        scales.map(|scale| match scheme.activations {
            ActivationScheme::DynamicToken => Quantizer::Fp8Token,
            other => groups(other, options.group_rule).unwrap_or(Quantizer::Fp8Tensor(scale)),
        })
    };
    let one = |t: &Option<Tensor<'_>>| t.as_ref().map(|t| largest_scale(&t.elements::<f32>()));
    // Without a gate, w13 has one scale already.
    let has_gate = w13.experts.iter().all(|matrices| matrices.len() > 1);
    let Some(requantize) = options.preparation.requantize.filter(|_| has_gate) else {
        // Each shard keeps its scale.
        let [w13, w2] = [w13, w2].map(|m| m.weights(model, options.preparation));
        let quantizers = quantizers([one(&inputs[0]), one(&inputs[1])]);
        return Ok(Moe {
            w13: w13?,
            w2: w2?,
            quantizers,
            multipliers: None,
            routing,
            shared: None,
        });
    };
    let [w13_input_scale, w2_input_scale] = inputs;
    let stored = Fp8Experts {
        w13: w13.codes(model, "w13_weight")?,
        w2: w2.codes(model, "w2_weight")?,
        w13_scale: w13.scales(model, "w13_weight_scale", scheme.strategy)?,
        w2_scale: w2.scales(model, "w2_weight_scale", scheme.strategy)?,
        w13_input_scale,
        w2_input_scale,
    };
    let changed = match scheme.strategy {
        ScaleStrategy::Tensor => {
            let pairs = stored.w13_scale.elements::<f32>();
            pairs.chunks_exact(2).filter(|pair| pair[0] != pair[1]).count()
        }
        _ => 0,
    };
    notes.extend(load::requantized(w13.module, changed, count, requantize));
    let device = Fp8Options { requantize, ..Fp8Options::default() };
    let prepared = stored.prepare(scheme, &shard, device)?;
    let inputs = [&prepared.tensors.w13_input_scale, &prepared.tensors.w2_input_scale].map(one);
    Ok(Moe {
        w13: prepared.matrices(ExpertMatrix::W13)?,
        w2: prepared.matrices(ExpertMatrix::W2)?,
        quantizers: quantizers(inputs),
        multipliers: None,
        routing,
        shared: None,
    })
}
