//! W8A8-FP8 experts: what loading does to their codes and scales, and the layer.

use serde_json::{Value, json};

use super::{
    CaseError, E4M3, F32, HALF_TYPES, I32, Inputs, Method, Reader, Result, TensorRule, input, is,
    name_of, optional, output, w13_size_n,
};
use crate::case::config::ScheduleChoice;
use crate::case::parse::{at_most, schedule_json};
use crate::case::rules::{Dim, stored};
use crate::case::values::{expert_ids, expert_map, finite, positive};
use crate::moe::activation::Activation;
use crate::prepare::requantize::{Fp8Type, Requantize};
use crate::scalar::ScalarType;

const RULES: &[(&str, Requantize)] = &[
    ("exact", Requantize::Exact),
    ("upstream_cuda", Requantize::UpstreamCuda),
    ("upstream_cpu", Requantize::UpstreamCpu),
];
const TYPES: &[(&str, Fp8Type)] =
    &[("float8_e4m3fn", Fp8Type::E4m3fn), ("float8_e4m3fnuz", Fp8Type::E4m3fnuz)];

/// Config of `process_fp8_weight_tensor_strategy_moe` and `process_fp8_input_tensor_strategy_moe`: one
/// scale for w1 and w3, and one for the activations of all experts.
///
/// in: `w13_weight` `[E, 2I, H]` FP8 codes, `w13_weight_scale` `[E, 2]`; `w13_input_scale`,
/// `w2_input_scale` `[E]` of static activations. out: `w13_weight`, `w13_weight_scale` `[E]`, the input
/// scales `[1]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequantizeConfig {
    /// Experts.
    pub num_experts: usize,
    /// H.
    pub hidden_size: usize,
    /// I: rows of w1 and of w3.
    pub intermediate_size: usize,
    /// How codes move to the other scale: `exact`, `upstream_cuda` or `upstream_cpu`.
    pub requantize: Requantize,
    /// Meaning of the codes: `float8_e4m3fn` or `float8_e4m3fnuz`.
    pub fp8_type: Fp8Type,
}

impl RequantizeConfig {
    /// The static scales of activations.
    pub(crate) const INPUT_SCALES: [&'static str; 2] = ["w13_input_scale", "w2_input_scale"];
}

impl Method for RequantizeConfig {
    fn read(r: &Reader<'_>) -> Result<Self, CaseError> {
        Ok(Self {
            num_experts: r.size("num_experts")?,
            hidden_size: r.size("hidden_size")?,
            intermediate_size: r.size("intermediate_size")?,
            requantize: r.name("requantize", RULES)?,
            fp8_type: r.optional_name("fp8_type", TYPES)?.unwrap_or_default(),
        })
    }

    fn json(&self) -> Value {
        json!({
            "num_experts": self.num_experts, "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "requantize": name_of(RULES, &self.requantize),
            "fp8_type": name_of(TYPES, &self.fp8_type),
        })
    }

    fn rules(&self) -> Result<Vec<TensorRule>> {
        let e = is(self.num_experts);
        let weight = [e, is(w13_size_n(self.intermediate_size, true)), is(self.hidden_size)];
        let mut rules = vec![
            input("w13_weight", E4M3, &weight),
            input("w13_weight_scale", F32, &[e, is(2)]),
            output("w13_weight", E4M3, &weight),
            output("w13_weight_scale", F32, &[e]),
        ];
        for name in Self::INPUT_SCALES {
            rules.extend([optional(name, F32, &[e]), output(name, F32, &[is(1)])]);
        }
        Ok(rules)
    }

    fn check(&self, inputs: &Inputs<'_>) -> Result<()> {
        inputs.values().filter(|t| t.name().ends_with("_scale")).try_for_each(positive)
    }
}

/// Config of `normalize_e4m3fn_to_e4m3fnuz`.
///
/// in: `weight` `[N, K]` e4m3fn, `weight_scale` of any shape, `input_scale` of any, where there is one.
/// out: the same names and shapes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FnuzConfig {
    /// Rows of the weight.
    pub size_n: usize,
    /// Columns of the weight.
    pub size_k: usize,
    /// Scales of the weight.
    pub num_scales: usize,
}

impl FnuzConfig {
    /// The scales.
    pub(crate) const SCALES: [&'static str; 2] = ["weight_scale", "input_scale"];
}

impl Method for FnuzConfig {
    fn read(r: &Reader<'_>) -> Result<Self, CaseError> {
        Ok(Self {
            size_n: r.size("size_n")?,
            size_k: r.size("size_k")?,
            num_scales: r.size("num_scales")?,
        })
    }

    fn json(&self) -> Value {
        json!({"size_n": self.size_n, "size_k": self.size_k, "num_scales": self.num_scales})
    }

    fn rules(&self) -> Result<Vec<TensorRule>> {
        let (weight, scales) = ([is(self.size_n), is(self.size_k)], [is(self.num_scales)]);
        Ok(vec![
            input("weight", E4M3, &weight),
            input("weight_scale", F32, &scales),
            optional("input_scale", F32, &[is(1)]),
            output("weight", E4M3, &weight),
            output("weight_scale", F32, &scales),
            output("input_scale", F32, &[is(1)]),
        ])
    }
}

/// Config of `fused_experts_fp8_w8a8`: a layer whose weights and activations are e4m3fn.
///
/// in: `x` `[M, H]`; `topk_weights`, `topk_ids` `[M, top_k]`; `w13_weight` `[L, N, H]`, `w2_weight`
/// `[L, H, I]` e4m3fn of this rank's experts; `w13_weight_scale`, `w2_weight_scale` `[L]`, or
/// `[L, N, 1]` for `per_out_ch_quant`; `w13_input_scale`, `w2_input_scale` `[1]` unless
/// `per_act_token_quant`; `expert_map` `[E]` where L is not E.
///
/// out: `a1q` `[M, H]` e4m3fn with `a1q_scale` (`[1]`, or `[M, 1]` per token), `gate_up` `[M·top_k, N]`,
/// `activated` `[M·top_k, I]`, `a2q` and `a2q_scale` likewise of `activated`, `down` `[M·top_k, H]`
/// (router weight applied), `y` `[M, H]`.
#[derive(Debug, Clone, PartialEq)]
pub struct Fp8LayerConfig {
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
    /// Between the products.
    pub activation: Activation,
    /// Whether each row of activations has its own scale, computed from it; else one static scale.
    pub per_act_token_quant: bool,
    /// Whether each output feature has its own scale; else one for each expert.
    pub per_out_ch_quant: bool,
    /// Whether router weights multiply `gate_up` instead of `down`.
    pub apply_router_weight_on_input: bool,
    /// How `gate_up` was computed, where it is to be equal for every bit.
    pub schedule_w13: Option<ScheduleChoice>,
    /// How `down` was computed.
    pub schedule_w2: Option<ScheduleChoice>,
}

impl Fp8LayerConfig {
    /// N of w13.
    pub const fn w13_size_n(&self) -> usize {
        w13_size_n(self.intermediate_size, self.activation.is_gated())
    }

    /// Rows of `gate_up`, `activated` and `down`.
    pub const fn rows(&self) -> usize {
        self.size_m.saturating_mul(self.top_k)
    }

    /// Prefix, N and K of both matrices.
    pub(crate) const fn matrices(&self) -> [(&'static str, usize, usize); 2] {
        let (h, i) = (self.hidden_size, self.intermediate_size);
        [("w13", self.w13_size_n(), h), ("w2", h, i)]
    }
}

impl Method for Fp8LayerConfig {
    fn read(r: &Reader<'_>) -> Result<Self, CaseError> {
        super::products::scaled_mm_convention(r)?;
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
            per_act_token_quant: r.flag("per_act_token_quant", false)?,
            per_out_ch_quant: r.flag("per_out_ch_quant", false)?,
            apply_router_weight_on_input: r.flag("apply_router_weight_on_input", false)?,
            schedule_w13: r.schedule("schedule_w13")?,
            schedule_w2: r.schedule("schedule_w2")?,
        };
        at_most("top_k", config.top_k, "num_experts", num_experts)?;
        at_most("num_local_experts", config.num_local_experts, "num_experts", num_experts)?;
        super::divisible(r, "hidden_size", config.hidden_size, 4)?;
        super::divisible(r, "intermediate_size", config.intermediate_size, 4)?;
        Ok(config)
    }

    fn json(&self) -> Value {
        let mut v = json!({
            "dtype": self.dtype.name(), "size_m": self.size_m, "num_experts": self.num_experts,
            "num_local_experts": self.num_local_experts, "top_k": self.top_k,
            "hidden_size": self.hidden_size, "intermediate_size": self.intermediate_size,
            "activation": self.activation.name(),
            "per_act_token_quant": self.per_act_token_quant,
            "per_out_ch_quant": self.per_out_ch_quant,
            "apply_router_weight_on_input": self.apply_router_weight_on_input,
        });
        for (key, schedule) in
            [("schedule_w13", &self.schedule_w13), ("schedule_w2", &self.schedule_w2)]
        {
            v[key] = schedule.as_ref().map_or(Value::Null, schedule_json);
        }
        v
    }

    fn rules(&self) -> Result<Vec<TensorRule>> {
        let half = [stored(self.dtype)];
        let (m, h, i, rows) =
            (is(self.size_m), is(self.hidden_size), is(self.intermediate_size), is(self.rows()));
        let l = is(self.num_local_experts);
        let topk = [m, is(self.top_k)];
        let absent = self.num_local_experts != self.num_experts;
        let scale = |rows: Dim| -> Vec<Dim> {
            if self.per_act_token_quant { vec![rows, is(1)] } else { vec![is(1)] }
        };
        let mut rules = vec![
            input("x", &half, &[m, h]),
            input("topk_weights", F32, &topk),
            input("topk_ids", I32, &topk),
            optional("expert_map", I32, &[is(self.num_experts)]).required(absent),
            output("a1q", E4M3, &[m, h]),
            output("a1q_scale", F32, &scale(m)),
            output("gate_up", &half, &[rows, is(self.w13_size_n())]),
            output("activated", &half, &[rows, i]),
            output("a2q", E4M3, &[rows, i]),
            output("a2q_scale", F32, &scale(rows)),
            output("down", &half, &[rows, h]),
            output("y", &half, &[m, h]),
        ];
        for (name, size_n, size_k) in self.matrices() {
            rules.push(input(&format!("{name}_weight"), E4M3, &[l, is(size_n), is(size_k)]));
            let scales = if self.per_out_ch_quant { vec![l, is(size_n), is(1)] } else { vec![l] };
            rules.push(input(&format!("{name}_weight_scale"), F32, &scales));
            if !self.per_act_token_quant {
                rules.push(input(&format!("{name}_input_scale"), F32, &[is(1)]));
            }
        }
        Ok(rules)
    }

    fn check(&self, inputs: &Inputs<'_>) -> Result<()> {
        for (name, tensor) in inputs {
            match name.as_str() {
                "x" | "topk_weights" => finite(tensor)?,
                "topk_ids" => expert_ids(tensor, self.num_experts)?,
                "expert_map" => expert_map(tensor, Some(self.num_local_experts))?,
                name if name.ends_with("_scale") => positive(tensor)?,
                _ => {}
            }
        }
        Ok(())
    }
}
