//! Keys, tensors and generated cases of `fused_experts_int8_w8a8`.

use serde_json::{Value, json};

use super::{Int8Moe, walk};
use crate::Result;
use crate::judge::{Declared, OutputReport};
use crate::moe::activation::Activation;
use crate::num::scalar::ScalarType;
use crate::num::tensor::{DType, Tensor};
use crate::ops::case::Case;
use crate::ops::computation::{Defined, ids};
use crate::ops::draw::{Rng, activations, any_bits, routes, small};
use crate::ops::quant::keys::at_most;
use crate::ops::quantized_moe::{self, EXPERTS};
use crate::ops::schema::{CaseError, Demand, Inputs, Reader, TensorRule, positive, stored};
use crate::ops::tensors::{
    F32, HALF, HALF_TYPES, I8, I32, input, is, name_of, optional, output, w13_size_n, whole,
};
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
    /// Activations and outputs.
    pub dtype: ScalarType,
    /// Tokens.
    pub size_m: usize,
    /// Experts of all ranks.
    pub num_experts: usize,
    /// Experts of this rank, whose weights the case has.
    pub num_local_experts: usize,
    /// Experts per token.
    pub top_k: usize,
    /// H.
    pub hidden_size: usize,
    /// I.
    pub intermediate_size: usize,
    /// Activation between the products.
    pub activation: Activation,
    /// How rows are quantized; `None` tries every known rule.
    pub quantizer: Option<ActivationRule>,
    /// k of the kernel's int32 sums, if the bits of both products are declared.
    pub block_size_k: Option<usize>,
    /// Whether router weights multiply `gate_up` instead of `down`.
    pub apply_router_weight_on_input: bool,
}

impl Int8LayerConfig {
    /// Rows of `gate_up`, `activated` and `down`.
    pub const fn rows(&self) -> usize {
        self.size_m.saturating_mul(self.top_k)
    }

    /// The declared rule, if it fixes every code.
    pub(super) fn rule(&self) -> Option<ActivationRule> {
        self.quantizer.filter(|rule| *rule != ActivationRule::ProductApproximate)
    }

    /// Prefix, N and K of both matrices.
    pub(crate) const fn matrices(&self) -> [(&'static str, usize, usize); 2] {
        let (h, i) = (self.hidden_size, self.intermediate_size);
        [("w13", w13_size_n(i, self.activation.is_gated()), h), ("w2", h, i)]
    }
}

impl Operation for Int8LayerConfig {
    fn keys() -> &'static [&'static str] {
        &[
            "dtype",
            "size_m",
            "num_experts",
            "num_local_experts",
            "top_k",
            "hidden_size",
            "intermediate_size",
            "activation",
            "quantizer",
            "block_size_k",
            "apply_router_weight_on_input",
        ]
    }

    fn read(r: &Reader<'_>) -> Result<Self, CaseError> {
        let num_experts = r.size("num_experts")?;
        let config = Self {
            dtype: r.name("dtype", HALF_TYPES)?,
            size_m: r.size("size_m")?,
            num_experts,
            num_local_experts: r.optional_size("num_local_experts")?.unwrap_or(num_experts),
            top_k: r.size("top_k")?,
            hidden_size: r.size("hidden_size")?,
            intermediate_size: r.size("intermediate_size")?,
            activation: r.name("activation", Activation::NAMED)?,
            quantizer: r.optional_name("quantizer", QUANTIZERS)?,
            block_size_k: r.optional_size("block_size_k")?,
            apply_router_weight_on_input: r.flag("apply_router_weight_on_input", false)?,
        };
        at_most("top_k", config.top_k, "num_experts", num_experts)?;
        at_most("num_local_experts", config.num_local_experts, "num_experts", num_experts)?;
        whole(r, "hidden_size", config.hidden_size, 4)?;
        whole(r, "intermediate_size", config.intermediate_size, 4)?;
        if let Some(size) = config.block_size_k {
            whole(r, "block_size_k", size, LEAST_BLOCK)?;
        }
        Ok(config)
    }

    fn json(&self) -> Value {
        json!({
            "dtype": self.dtype.name(), "size_m": self.size_m, "num_experts": self.num_experts,
            "num_local_experts": self.num_local_experts, "top_k": self.top_k,
            "hidden_size": self.hidden_size, "intermediate_size": self.intermediate_size,
            "activation": self.activation.name(),
            "quantizer": self.quantizer.map(|rule| name_of(QUANTIZERS, &rule)),
            "block_size_k": self.block_size_k,
            "apply_router_weight_on_input": self.apply_router_weight_on_input,
        })
    }

    fn is_gated(&self) -> Option<bool> {
        Some(self.activation.is_gated())
    }

    fn tensors(&self, _experts: usize) -> Result<Vec<TensorRule>> {
        let half = [stored(self.dtype)];
        let (m, h, i, rows) =
            (is(self.size_m), is(self.hidden_size), is(self.intermediate_size), is(self.rows()));
        let [(_, w13_size_n, _), _] = self.matrices();
        let (l, topk, one) = (is(self.num_local_experts), [m, is(self.top_k)], is(1));
        let absent = self.num_local_experts != self.num_experts;
        let mut rules = vec![
            input("x", &half, &[m, h]),
            input("topk_weights", F32, &topk),
            input("topk_ids", I32, &topk),
            optional("expert_map", I32, &[is(self.num_experts)]).required(absent),
            output("a1q", I8, &[m, h]),
            output("a1q_scale", F32, &[m, one]),
            output("gate_up", &half, &[rows, is(w13_size_n)]),
            output("activated", &half, &[rows, i]),
            output("a2q", I8, &[rows, i]),
            output("a2q_scale", F32, &[rows, one]),
            output("down", &half, &[rows, h]),
            output("y", &half, &[m, h]),
        ];
        for (name, size_n, size_k) in self.matrices() {
            let n = is(size_n);
            rules.push(input(&format!("{name}_weight"), I8, &[l, n, is(size_k)]));
            rules.push(input(&format!("{name}_weight_scale"), F32, &[l, n, one]));
        }
        Ok(rules)
    }

    fn check_inputs(&self, inputs: &Inputs<'_>) -> Result<()> {
        let experts = [self.num_experts, self.num_local_experts];
        quantized_moe::check_inputs(inputs, experts, positive)
    }

    /// The last size has more than 1024 k, so that f32 does not have every sum.
    fn lattice() -> Result<Vec<Self>> {
        let activations = [Activation::Silu, Activation::SwigluOai, Activation::SiluNoMul];
        let mut all = Vec::new();
        for dtype in HALF {
            for activation in activations {
                for (num_experts, num_local_experts, top_k) in EXPERTS {
                    for (hidden_size, intermediate_size, block_size_k) in
                        [(36, 20, 32), (160, 64, 128), (1056, 12, 64)]
                    {
                        let sides: &[bool] = if top_k == 1 { &[false, true] } else { &[false] };
                        for &apply_router_weight_on_input in sides {
                            all.push(Self {
                                dtype,
                                size_m: 5,
                                num_experts,
                                num_local_experts,
                                top_k,
                                hidden_size,
                                intermediate_size,
                                activation,
                                quantizer: Some(ActivationRule::Product),
                                block_size_k: Some(block_size_k),
                                apply_router_weight_on_input,
                            });
                        }
                    }
                }
            }
        }
        Ok(all)
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
        Ok(match case.outputs.is_empty() {
            true => Vec::new(),
            false => {
                let [(_, w13_size_n, h), (_, _, i)] = self.matrices();
                Demand::layer(self.rows(), h, w13_size_n, i)
            }
        })
    }

    fn judge(&self, case: &Case<'_>, _declared: &Declared) -> Result<Vec<OutputReport>> {
        walk::judge(case, &Int8Moe::new(case, self)?)
    }

    fn fixes_every_bit(&self) -> bool {
        self.block_size_k.is_some() && self.rule().is_some()
    }

    fn with_one_row(&self) -> Option<(CaseConfig, &'static [&'static str])> {
        let rows = &["x", "topk_ids", "topk_weights"];
        Some((Self { size_m: 1, ..self.clone() }.into(), rows))
    }
}
