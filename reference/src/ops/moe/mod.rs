//! A Mixture-of-Experts layer.

mod draw;
mod lattice;
mod product;
mod readings;
mod routes;
mod source;
mod walk;

pub use source::Source as LayerSource;

use serde_json::{Value, json};

use crate::Result;
use crate::judge::{Declared, OutputReport};
use crate::moe::ScoringFunc;
use crate::moe::activation::{Activation, Columns, Definition};
use crate::moe::router::Router;
use crate::num::dims::Shape;
use crate::ops::Operation;
use crate::ops::axes::Axes;
use crate::ops::case::Case;
use crate::ops::draw::Rng;
use crate::ops::layer::{SHARED, Stages};
use crate::ops::layer_rules::{LayerRules, RULE_KEYS};
use crate::ops::quant::keys::{
    QUANT_KEYS, at_most, check_matrix, extend, insert_some, quant_json, quant_keys, rank,
    scale_factor, schedule_json, with_quant_keys,
};
use crate::ops::quant::packed::matrices;
use crate::ops::quant::stack::Stack;
use crate::ops::quant::tensors::{Matrix, blocks, topk};
use crate::ops::quant::{QuantConfig, finite_scales, ranks, unordered};
use crate::ops::schema::{
    CaseError, Demand, Dim, Inputs, Reader, TensorRule, expert_map, rule, stored,
};
use crate::ops::tensors::{F32, I32};
use crate::products::schedule::ScheduleChoice;

/// Config of `moe`.
#[derive(Debug, Clone, PartialEq)]
pub struct MoeConfig {
    /// Both matrices' format.
    pub quant: QuantConfig,
    /// Tokens.
    pub size_m: usize,
    /// Experts of all ranks.
    pub num_experts: usize,
    /// Experts per token.
    pub top_k: usize,
    /// H: K of w13, N of w2.
    pub hidden_size: usize,
    /// I: K of w2; N of w13 is I for each of gate and up.
    pub intermediate_size: usize,
    /// Activation between the products.
    pub activation: Activation,
    /// Logits to scores.
    pub scoring_func: ScoringFunc,
    /// Whether the chosen weights are divided by their sum.
    pub renormalize: bool,
    /// Whether router weights multiply `gate_up` instead of `down`.
    pub apply_router_weight_on_input: bool,
    /// Tokens per block.
    pub block_size_m: usize,
    /// Expert-parallel ranks.
    pub ep_size: usize,
    /// This rank.
    pub ep_rank: usize,
    /// NVFP4's power of two for w13 (bf16).
    pub scale_factor_w13: Option<f64>,
    /// NVFP4's power of two for w2 (bf16).
    pub scale_factor_w2: Option<f64>,
    /// Schedule of `gate_up`, if its bits are declared.
    pub schedule_w13: Option<ScheduleChoice>,
    /// Schedule of `down`, if its bits are declared.
    pub schedule_w2: Option<ScheduleChoice>,
    /// Router weights on x, the layout of gate and up, the activation's parameters.
    pub rules: LayerRules,
}

/// The layout of `swigluoai` where none is stated.
pub(super) const DEFAULT_LAYOUT: Columns = Columns::Interleaved;

impl MoeConfig {
    /// N of w13: 2I for gate and up, I for an activation without up.
    pub const fn w13_size_n(&self) -> usize {
        if self.activation.is_gated() { 2 * self.intermediate_size } else { self.intermediate_size }
    }

    /// Parameters that all stages share.
    fn stages(&self) -> Stages {
        Stages {
            size_m: self.size_m,
            top_k: self.top_k,
            hidden_size: self.hidden_size,
            intermediate_size: self.intermediate_size,
            activation: self.activation,
            definition: self.definition(),
            dtype: self.quant.dtype,
            router: Some((self.router(), self.num_experts)),
        }
    }

    /// The activation; `swigluoai` has gate and up in turn unless the case states otherwise.
    pub fn definition(&self) -> Definition {
        self.rules.definition(self.activation, DEFAULT_LAYOUT)
    }

    /// Whether router weights multiply the product with w13 (`first`) or w2.
    pub(super) const fn weights_product(&self, first: bool) -> bool {
        !self.rules.router_weight_on_x && self.apply_router_weight_on_input == first
    }

    /// The layer's router.
    pub fn router(&self) -> Router<'static> {
        Router::new(self.scoring_func, self.top_k, self.renormalize)
    }
}

impl Operation for MoeConfig {
    fn keys() -> &'static [&'static str] {
        const KEYS: [&str; QUANT_KEYS.len() + 21] = with_quant_keys([
            "size_m",
            "num_experts",
            "top_k",
            "hidden_size",
            "intermediate_size",
            "activation",
            "scoring_func",
            "renormalize",
            "apply_router_weight_on_input",
            "block_size_m",
            "ep_size",
            "ep_rank",
            "scale_factor_w13",
            "scale_factor_w2",
            "schedule_w13",
            "schedule_w2",
            RULE_KEYS[0],
            RULE_KEYS[1],
            RULE_KEYS[2],
            RULE_KEYS[3],
            RULE_KEYS[4],
        ]);
        &KEYS
    }

    fn read(r: &Reader<'_>) -> Result<Self, CaseError> {
        let quant = quant_keys(r)?;
        let factors =
            ["scale_factor_w13", "scale_factor_w2"].map(|key| scale_factor(r, key, &quant));
        let [scale_factor_w13, scale_factor_w2] = factors;
        let (ep_size, ep_rank) = rank(r, "ep_size", "ep_rank")?;
        let activation = r.name("activation", Activation::NAMED)?;
        let (rules, on_gate_up) = LayerRules::read(r, activation)?;
        let config = MoeConfig {
            quant,
            size_m: r.count("size_m")?,
            num_experts: r.size("num_experts")?,
            top_k: r.size("top_k")?,
            hidden_size: r.size("hidden_size")?,
            intermediate_size: r.size("intermediate_size")?,
            activation,
            scoring_func: r.name("scoring_func", ScoringFunc::NAMED)?,
            renormalize: r.flag("renormalize", false)?,
            apply_router_weight_on_input: on_gate_up,
            block_size_m: r.size("block_size_m")?,
            ep_size,
            ep_rank,
            scale_factor_w13: scale_factor_w13?,
            scale_factor_w2: scale_factor_w2?,
            schedule_w13: r.schedule("schedule_w13")?,
            schedule_w2: r.schedule("schedule_w2")?,
            rules,
        };
        let (h, i) = (config.hidden_size, config.intermediate_size);
        at_most("top_k", config.top_k, "num_experts", config.num_experts)?;
        at_most("ep_size", ep_size, "num_experts", config.num_experts)?;
        check_matrix(
            &config.quant,
            ("hidden_size", h),
            ("intermediate_size", config.w13_size_n()),
        )?;
        check_matrix(&config.quant, ("intermediate_size", i), ("hidden_size", h))?;
        Ok(config)
    }

    /// A covering array of strength 3 over [`Operation::axes`].
    fn lattice() -> Result<Vec<Self>> {
        Ok(lattice::configs())
    }

    fn axes() -> Result<Option<Axes>> {
        Ok(Some(lattice::space().axes()))
    }

    fn json(&self) -> Value {
        let mut v = quant_json(&self.quant);
        extend(
            &mut v,
            json!({
                "size_m": self.size_m, "num_experts": self.num_experts, "top_k": self.top_k,
                "hidden_size": self.hidden_size, "intermediate_size": self.intermediate_size,
                "activation": self.activation.name(), "scoring_func": self.scoring_func.name(),
                "renormalize": self.renormalize,
                "apply_router_weight_on_input": self.apply_router_weight_on_input,
                "block_size_m": self.block_size_m,
                "ep_size": self.ep_size, "ep_rank": self.ep_rank,
            }),
        );
        insert_some(&mut v, "scale_factor_w13", self.scale_factor_w13);
        insert_some(&mut v, "scale_factor_w2", self.scale_factor_w2);
        insert_some(&mut v, "schedule_w13", self.schedule_w13.as_ref().map(schedule_json));
        insert_some(&mut v, "schedule_w2", self.schedule_w2.as_ref().map(schedule_json));
        if let Some(map) = v.as_object_mut() {
            self.rules.add_to(map);
        }
        v
    }

    fn describe(&self) -> String {
        let (h, i) = (self.hidden_size, self.intermediate_size);
        let quant = self.quant.describe();
        format!("{quant} h{h} i{i} e{} top{}", self.num_experts, self.top_k)
    }

    fn is_gated(&self) -> Option<bool> {
        Some(self.activation.is_gated())
    }

    fn tensors(&self, experts: usize) -> Result<Vec<TensorRule>> {
        let (h, i) = (self.hidden_size, self.intermediate_size);
        let half = [stored(self.quant.dtype)];
        let is = Dim::Is;
        // A stack without experts is a mistake, since such a rank computes nothing.
        let experts = experts.max(1);
        let matrix = |name: &str, size_k, size_n| Matrix {
            quant: &self.quant,
            input: format!("in.{name}_"),
            output: format!("out.{name}_"),
            lead: vec![is(experts)],
            size_k,
            size_n,
        };
        let mut rules = matrix("w13", h, self.w13_size_n()).rules()?;
        rules.extend(matrix("w2", i, h).rules()?);
        let rows = is(self.size_m.saturating_mul(self.top_k));
        rules.extend([
            rule("in.x", &half, &[is(self.size_m), is(h)]),
            rule("in.router_logits", F32, &[is(self.size_m), is(self.num_experts)]),
            // Without a map, the weights hold every expert.
            rule("in.expert_map", I32, &[is(self.num_experts)])
                .required(experts != self.num_experts),
            rule(format!("in.{SHARED}"), &half, &[is(self.size_m), is(h)]),
            rule("out.gate_up", &half, &[rows, is(self.w13_size_n())]),
            rule("out.activated", &half, &[rows, is(i)]),
            rule("out.down", &half, &[rows, is(h)]),
            rule("out.y", &half, &[is(self.size_m), is(h)]),
        ]);
        rules.extend(topk(is(self.size_m), self.top_k));
        rules.extend(blocks());
        Ok(rules)
    }

    fn check_inputs(&self, inputs: &Inputs<'_>) -> Result<()> {
        finite_scales(&self.quant, inputs)?;
        if let Some(map) = inputs.get("expert_map") {
            let local = inputs.get("w13_scales").or(inputs.get("w13_weight_scale"));
            expert_map(map, local.and_then(|t| t.shape().first().copied()))?;
        }
        unordered(&self.quant, inputs)?;
        ranks(self.num_experts, self.ep_size, self.ep_rank, inputs)
    }

    fn demands(&self, case: &Case<'_>) -> Result<Vec<Demand>> {
        let has = |name: &&str| case.outputs.contains_key(*name);
        let rows = self.size_m.saturating_mul(self.top_k);
        let (h, i) = (self.hidden_size, self.intermediate_size);
        let mut all = Demand::align(case, rows, self.num_experts, self.block_size_m);
        if case.inputs.contains_key("router_logits") {
            all.push(Demand::choice(self.size_m, self.num_experts, self.top_k, 1));
        }
        if ["gate_up", "activated", "down", "y"].iter().any(has) {
            all.extend(Demand::layer(rows, h, self.w13_size_n(), i));
        }
        Ok(all)
    }

    fn quant(&self) -> Option<&QuantConfig> {
        Some(&self.quant)
    }

    fn size_k(&self, prefix: &str) -> Option<usize> {
        Some(if prefix == "w13_" { self.hidden_size } else { self.intermediate_size })
    }

    fn judge(&self, case: &Case<'_>, declared: &Declared) -> Result<Vec<OutputReport>> {
        let (h, i, quant) = (self.hidden_size, self.intermediate_size, &self.quant);
        let (w13, w2) = (Shape::new(h, self.w13_size_n()), Shape::new(i, h));
        let mut reports = matrices(case, quant, "w13_", w13, self.scale_factor_w13, Some(i))?;
        reports.extend(matrices(case, quant, "w2_", w2, self.scale_factor_w2, None)?);
        reports.extend(routes::judge(case, self)?);
        reports.extend(readings::judge(case, self, declared)?);
        Ok(reports)
    }

    fn add_staged_outputs(&self, case: &mut Case<'_>) -> Result<()> {
        let (h, i, quant) = (self.hidden_size, self.intermediate_size, &self.quant);
        let w13 = Stack::of_case(case, quant, "w13_", Shape::new(h, self.w13_size_n()))?;
        let w2 = Stack::of_case(case, quant, "w2_", Shape::new(i, h))?;
        w13.add_outputs(case)?;
        w2.add_outputs(case)?;
        draw::add_stages(case, self, &w13.weights, &w2.weights).map(|_| ())
    }

    fn draw(&self, case: &mut Case<'static>, rng: &mut Rng) -> Result<()> {
        draw::case(self, case, rng)
    }
}
