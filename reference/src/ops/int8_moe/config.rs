//! Keys, tensors and generated cases of `fused_experts_int8_w8a8`.

use std::ops::Deref;

use serde_json::{Value, json};

use super::{Int8Moe, walk};
use crate::Result;
use crate::judge::{Declared, OutputReport};
use crate::moe::activation::Activation;
use crate::num::tensor::{DType, Tensor};
use crate::ops::axes::{Axes, Space};
use crate::ops::case::Case;
use crate::ops::computation::{Defined, ids};
use crate::ops::draw::{Rng, activations, any_bits, routes, small};
use crate::ops::expert_axes::{EXPERT_RANKS, expert_axes};
use crate::ops::layer_rules::wrong_values;
use crate::ops::quantized_moe::{QuantizedLayer, ROWS, with_layer_keys};
use crate::ops::schema::{CaseError, Demand, Inputs, Reader, TensorRule, positive};
use crate::ops::tensors::{F32, HALF, I8, input, is, name_of, whole};
use crate::ops::{CaseConfig, Operation};
use crate::products::LEAST_BLOCK;
use crate::quantize::ActivationRule;

/// The quantizers of a row to int8 with a scale that follows from it.
const QUANTIZERS: &[(&str, ActivationRule)] = &[
    ("quotient", ActivationRule::Quotient),
    ("quotient_exact", ActivationRule::QuotientExact),
    ("reciprocal", ActivationRule::Reciprocal),
    ("reciprocal_exact", ActivationRule::ReciprocalExact),
    ("product_even", ActivationRule::ProductEven),
    ("product", ActivationRule::Product),
    ("product_approximate", ActivationRule::ProductApproximate),
    ("quotient_away", ActivationRule::QuotientAway),
    ("reciprocal_away", ActivationRule::ReciprocalAway),
];

/// Config of `fused_experts_int8_w8a8`: a layer whose weights and activations are int8, with a scale for
/// each output feature and each row.
///
/// in: `x` `[M, H]`; `topk_weights`, `topk_ids` `[M, top_k]`; `w13_weight` `[L, N, H]`, `w2_weight`
/// `[L, H, I]` int8 of this rank's experts; `w13_weight_scale`, `w2_weight_scale` `[L, N, 1]`; `expert_map`
/// `[E]` where L is not E.
///
/// out: `a1q` `[M, H]` int8 with `a1q_scale` `[M, 1]`, `gate_up` `[M·top_k, N]`, `activated` `[M·top_k, I]`,
/// `a2q` and `a2q_scale` likewise of `activated`, `down` `[M·top_k, H]` (router weight applied), `y` `[M, H]`.
#[derive(Debug, Clone, PartialEq)]
pub struct Int8LayerConfig {
    /// The keys of every layer of 8-bit weights.
    pub layer: QuantizedLayer,
    /// How rows are quantized; `None` tries every known rule.
    pub quantizer: Option<ActivationRule>,
    /// k of the kernel's int32 sums, if the bits of both products are declared.
    pub block_size_k: Option<usize>,
}

impl Int8LayerConfig {
    /// The declared rule, if it fixes every code.
    pub(super) fn rule(&self) -> Option<ActivationRule> {
        self.quantizer.filter(|rule| *rule != ActivationRule::ProductApproximate)
    }
}

impl Int8LayerConfig {
    /// The rules by which rows that a case lacks may be quantized.
    fn rules(&self) -> Vec<ActivationRule> {
        let all = QUANTIZERS.iter().map(|(_, rule)| *rule);
        match self.quantizer {
            Some(ActivationRule::ProductApproximate) => vec![ActivationRule::Product],
            Some(rule) => vec![rule],
            // The layer's own kernel first.
            None => [ActivationRule::Product]
                .into_iter()
                .chain(all.filter(|rule| {
                    !matches!(rule, ActivationRule::Product | ActivationRule::ProductApproximate)
                }))
                .collect(),
        }
    }
}

/// The shared keys are read as if they were the config's own.
impl Deref for Int8LayerConfig {
    type Target = QuantizedLayer;

    fn deref(&self) -> &QuantizedLayer {
        &self.layer
    }
}

impl Operation for Int8LayerConfig {
    fn keys() -> &'static [&'static str] {
        const KEYS: [&str; 16] = with_layer_keys(["quantizer", "block_size_k"]);
        &KEYS
    }

    fn read(r: &Reader<'_>) -> Result<Self, CaseError> {
        let config = Self {
            layer: QuantizedLayer::read(r)?,
            quantizer: r.optional_name("quantizer", QUANTIZERS)?,
            block_size_k: r.optional_size("block_size_k")?,
        };
        if let Some(size) = config.block_size_k {
            whole(r, "block_size_k", size, LEAST_BLOCK)?;
        }
        Ok(config)
    }

    fn json(&self) -> Value {
        self.layer.json(json!({
            "quantizer": self.quantizer.map(|rule| name_of(QUANTIZERS, &rule)),
            "block_size_k": self.block_size_k,
        }))
    }

    fn is_gated(&self) -> Option<bool> {
        Some(self.activation.is_gated())
    }

    fn tensors(&self, _experts: usize) -> Result<Vec<TensorRule>> {
        let one = is(1);
        let scales = [vec![is(self.rows_of_x()), one], vec![is(self.rows()), one]];
        let mut rules = self.layer.tensors(I8, scales);
        for (name, size_n, _) in self.matrices() {
            let shape = [is(self.num_local_experts), is(size_n), one];
            rules.push(input(&format!("{name}_weight_scale"), F32, &shape));
        }
        Ok(rules)
    }

    fn check_inputs(&self, inputs: &Inputs<'_>) -> Result<()> {
        self.layer.check_inputs(inputs, positive)
    }

    /// A covering array of strength 3 over [`Operation::axes`].
    fn lattice() -> Result<Vec<Self>> {
        Ok(space().configs(3))
    }

    fn axes() -> Result<Option<Axes>> {
        Ok(Some(space().axes()))
    }

    fn computation(&self, case: &Case<'_>) -> Result<Option<Box<dyn Defined>>> {
        Ok(Some(Box::new(Int8Moe::new(case, self)?)))
    }

    fn mistakes() -> Vec<&'static str> {
        ids::<Int8Moe>()
    }

    fn draw_inputs(&self, case: &mut Case<'static>, rng: &mut Rng) -> Result<()> {
        let (m, h, l) = (self.size_m, self.hidden_size, self.num_local_experts);
        let x = activations(rng, self.dtype, m, h)?;
        let mut bits = x.elements::<u16>().into_owned();
        for row in bits.chunks_exact_mut(h) {
            if rng.chance(1, 3) {
                // Halves under the scale 1/64.
                let value = |i: u32| (i as f64 + 0.5) / 64.0;
                row.fill_with(|| self.dtype.encode_rne(value(rng.below(120) as u32)) as u16);
                row[0] = self.dtype.encode_rne(127.0 / 64.0) as u16;
            }
        }
        case.add_input("x", Tensor::from_vec("", x.dtype(), vec![m, h], bits)?);
        routes(case, rng, [m, self.top_k], [self.num_experts, l])?;
        for (name, size_n, size_k) in self.matrices() {
            let weight = any_bits(rng, DType::I8, vec![l, size_n, size_k])?;
            case.add_input(&format!("{name}_weight"), weight);
            case.add_input(&format!("{name}_weight_scale"), small(rng, vec![l, size_n, 1])?);
        }
        Ok(())
    }

    fn demands(&self, case: &Case<'_>) -> Result<Vec<Demand>> {
        Ok(self.layer.demands(case))
    }

    fn judge(&self, case: &Case<'_>, _declared: &Declared) -> Result<Vec<OutputReport>> {
        self.layer.each_reading(|layer, prescale| {
            let config = Self { layer, ..self.clone() };
            let mut layer = Int8Moe::reading(case, &config, prescale)?;
            let mut best: Option<(usize, Vec<OutputReport>)> = None;
            for rule in self.rules() {
                layer.rule = rule;
                let reports = walk::judge(case, &layer)?;
                let wrong = wrong_values(&reports);
                if best.as_ref().is_none_or(|(least, _)| wrong < *least) {
                    best = Some((wrong, reports));
                }
                if wrong == 0 {
                    break;
                }
            }
            Ok(best.map(|(_, reports)| reports).unwrap_or_default())
        })
    }

    fn fixes_every_bit(&self) -> bool {
        self.block_size_k.is_some() && self.rule().is_some()
    }

    fn with_one_row(&self) -> Option<(CaseConfig, &'static [&'static str])> {
        let layer = QuantizedLayer { size_m: 1, ..self.layer.clone() };
        Some((Self { layer, ..self.clone() }.into(), &ROWS))
    }
}

/// The axes of a layer; a case has three tokens.
fn space() -> Space<Int8LayerConfig> {
    let layer =
        QuantizedLayer::generated(HALF[0], Activation::Silu, EXPERT_RANKS[0].1, 1, [36, 20]);
    let base = Int8LayerConfig { layer, quantizer: None, block_size_k: None };
    // The last size has more than 1024 k, so that f32 does not have every sum.
    let sizes = [(36, 20, 32), (160, 64, 128), (1056, 12, 64)];
    let sizes = sizes.map(|(h, i, block)| (format!("{h} x {i}, sums of {block}"), (h, i, block)));
    let rules: Vec<_> = QUANTIZERS
        .iter()
        // Does not fix every code, so a case has no outputs.
        .filter(|(_, rule)| *rule != ActivationRule::ProductApproximate)
        .map(|(name, rule)| ((*name).to_owned(), *rule))
        .collect();
    expert_axes(Space::new(base, |_| {}), |c| &mut c.layer)
        .axis("hidden_size x intermediate_size", sizes, |c, &(h, i, block)| {
            (c.layer.hidden_size, c.layer.intermediate_size) = (h, i);
            c.block_size_k = Some(block);
        })
        .axis("quantizer", rules, |c, &rule| c.quantizer = Some(rule))
}
