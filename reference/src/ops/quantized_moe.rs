//! What the layers of 8-bit weights and activations share: config keys, tensors, checks of inputs,
//! outputs, known mistakes.

use serde_json::{Value, json};

use crate::Result;
use crate::judge::OutputReport;
use crate::judge::compare::Rows;
use crate::moe::Chain;
use crate::moe::activation::{Activation, Columns, Definition};
use crate::moe::layer::Layer;
use crate::moe::sum::sum_bits_with;
use crate::num::scalar::ScalarType;
use crate::num::tensor::{DType, Tensor};
use crate::ops::case::Case;
use crate::ops::computation::{Expected, Form};
use crate::ops::layer::{SHARED, Stages, shared_output};
use crate::ops::layer_rules::{LayerRules, RULE_KEYS};
use crate::ops::quant::keys::{at_most, extend, joined};
use crate::ops::schema::{
    CaseError, Demand, Dim, Inputs, Reader, TensorRule, expert_ids, expert_map, finite, stored,
};
use crate::ops::tensors::{
    F32, HALF_TYPES, I32, half, input, is, optional, output, w13_size_n, whole,
};
use crate::weight::Weight;

/// The keys that every layer of 8-bit weights and activations has.
#[derive(Debug, Clone, PartialEq)]
pub struct QuantizedLayer {
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
    /// Whether router weights multiply `gate_up` instead of `down`.
    pub apply_router_weight_on_input: bool,
    /// Router weights on x, the layout of gate and up, the activation's parameters.
    pub rules: LayerRules,
}

/// The keys that [`QuantizedLayer::read`] reads.
const LAYER_KEYS: [&str; 14] = [
    "dtype",
    "size_m",
    "num_experts",
    "num_local_experts",
    "top_k",
    "hidden_size",
    "intermediate_size",
    "activation",
    "apply_router_weight_on_input",
    RULE_KEYS[0],
    RULE_KEYS[1],
    RULE_KEYS[2],
    RULE_KEYS[3],
    RULE_KEYS[4],
];

/// [`LAYER_KEYS`], then an operation's own.
pub(super) const fn with_layer_keys<const OWN: usize, const ALL: usize>(
    own: [&'static str; OWN],
) -> [&'static str; ALL] {
    joined(LAYER_KEYS, own)
}

/// The inputs that have a row for each token.
pub(super) const ROWS: [&str; 4] = ["x", "topk_ids", "topk_weights", SHARED];

impl QuantizedLayer {
    /// A generated layer of three tokens: its experts, those of the rank, and of a token; H and I.
    pub(super) const fn generated(
        dtype: ScalarType,
        activation: Activation,
        (num_experts, num_local_experts): (usize, usize),
        top_k: usize,
        [hidden_size, intermediate_size]: [usize; 2],
    ) -> Self {
        Self {
            dtype,
            size_m: 3,
            num_experts,
            num_local_experts,
            top_k,
            hidden_size,
            intermediate_size,
            activation,
            apply_router_weight_on_input: false,
            rules: LayerRules::NONE,
        }
    }

    /// The activation; `swigluoai` has gate and up in turn unless the case states otherwise.
    pub(super) fn definition(&self) -> Definition {
        self.rules.definition(self.activation, Columns::Interleaved)
    }

    /// The layouts of a row of `gate_up`, the default first.
    pub(super) fn layouts(&self) -> Vec<Columns> {
        self.rules.layouts(self.activation, Columns::Interleaved)
    }

    /// Rows of `gate_up` for each row of `a1q`, which has a row for each slot if router weights multiply x.
    pub(super) const fn slots_of_x(&self) -> usize {
        if self.rules.router_weight_on_x { 1 } else { self.top_k }
    }

    /// Rows of `a1q`.
    pub(super) const fn rows_of_x(&self) -> usize {
        if self.rules.router_weight_on_x { self.rows() } else { self.size_m }
    }

    /// Parameters that all stages of a judgement share.
    pub(super) fn stages(&self) -> Stages {
        Stages {
            size_m: self.size_m,
            top_k: self.top_k,
            hidden_size: self.hidden_size,
            intermediate_size: self.intermediate_size,
            activation: self.activation,
            definition: self.definition(),
            dtype: self.dtype,
            router: None,
        }
    }

    /// The output `[M, H]` of a shared expert, if the case has one.
    pub(super) fn shared(&self, case: &Case<'_>) -> Result<Option<Vec<u16>>> {
        let shared = shared_output(case, [self.size_m, self.hidden_size])?;
        Ok(shared.map(std::borrow::Cow::into_owned))
    }

    /// `y` of `down` and of a shared expert's output, by the canonical arithmetic.
    pub(super) fn sum(&self, down: &[u16], shared: Option<&[u16]>) -> Result<Vec<u16>> {
        let (top_k, cols) = (self.top_k, self.hidden_size);
        sum_bits_with((down, shared), self.dtype, top_k, cols, Chain::Canonical)
    }

    /// The layer of a rank with these weights of w13 and w2.
    pub(super) fn of_weights<'w>(
        &self,
        [w13, w2]: &'w [Vec<Weight<'static>>; 2],
        expert_map: Option<&'w [i32]>,
    ) -> Layer<'w> {
        Layer {
            w13,
            w2,
            orders: [None, None],
            num_experts: self.num_experts,
            expert_map,
            activation: self.definition(),
            dtype: self.dtype,
            input_dtype: None,
            router_weight_on_input: self.apply_router_weight_on_input,
        }
    }

    /// Reads and checks the keys.
    pub(super) fn read(r: &Reader<'_>) -> Result<Self, CaseError> {
        let num_experts = r.size("num_experts")?;
        let activation = r.name("activation", Activation::NAMED)?;
        let (rules, on_gate_up) = LayerRules::read(r, activation)?;
        let layer = Self {
            dtype: r.name("dtype", HALF_TYPES)?,
            size_m: r.count("size_m")?,
            num_experts,
            num_local_experts: r.optional_size("num_local_experts")?.unwrap_or(num_experts),
            top_k: r.size("top_k")?,
            hidden_size: r.size("hidden_size")?,
            intermediate_size: r.size("intermediate_size")?,
            activation,
            apply_router_weight_on_input: on_gate_up,
            rules,
        };
        at_most("top_k", layer.top_k, "num_experts", num_experts)?;
        at_most("num_local_experts", layer.num_local_experts, "num_experts", num_experts)?;
        whole(r, "hidden_size", layer.hidden_size, 4)?;
        whole(r, "intermediate_size", layer.intermediate_size, 4)?;
        Ok(layer)
    }

    /// The keys, the last of which `own` precedes.
    pub(super) fn json(&self, own: Value) -> Value {
        let mut v = json!({
            "dtype": self.dtype.name(), "size_m": self.size_m, "num_experts": self.num_experts,
            "num_local_experts": self.num_local_experts, "top_k": self.top_k,
            "hidden_size": self.hidden_size, "intermediate_size": self.intermediate_size,
            "activation": self.activation.name(),
        });
        extend(&mut v, own);
        v["apply_router_weight_on_input"] = self.apply_router_weight_on_input.into();
        if let Some(map) = v.as_object_mut() {
            self.rules.add_to(map);
        }
        v
    }

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

    /// Every tensor but the scales of weights. `scales` are the shapes of the scales of both quantized
    /// activations.
    pub(super) fn tensors(&self, codes: &[DType], scales: [Vec<Dim>; 2]) -> Vec<TensorRule> {
        let half = [stored(self.dtype)];
        let (m, h, i, rows) =
            (is(self.size_m), is(self.hidden_size), is(self.intermediate_size), is(self.rows()));
        let (l, topk) = (is(self.num_local_experts), [m, is(self.top_k)]);
        let absent = self.num_local_experts != self.num_experts;
        let [a1, a2] = scales;
        let mut rules = vec![
            input("x", &half, &[m, h]),
            input("topk_weights", F32, &topk),
            input("topk_ids", I32, &topk),
            optional("expert_map", I32, &[is(self.num_experts)]).required(absent),
            optional(SHARED, &half, &[m, h]),
            output("a1q", codes, &[is(self.rows_of_x()), h]),
            output("a1q_scale", F32, &a1),
            output("gate_up", &half, &[rows, is(self.w13_size_n())]),
            output("activated", &half, &[rows, i]),
            output("a2q", codes, &[rows, i]),
            output("a2q_scale", F32, &a2),
            output("down", &half, &[rows, h]),
            output("y", &half, &[m, h]),
        ];
        rules.extend(self.matrices().map(|(name, size_n, size_k)| {
            input(&format!("{name}_weight"), codes, &[l, is(size_n), is(size_k)])
        }));
        rules
    }

    /// Checks the inputs; `scales` the scales of activations.
    ///
    /// # Errors
    /// As the checks of each input.
    pub(super) fn check_inputs(
        &self,
        inputs: &Inputs<'_>,
        scales: fn(&Tensor<'_>) -> Result<()>,
    ) -> Result<()> {
        for (name, tensor) in inputs {
            match name.as_str() {
                "topk_weights" => finite(tensor)?,
                // A weight may be zero, and so may its scale; those of activations also divide.
                name if name.ends_with("_weight_scale") => finite(tensor)?,
                "topk_ids" => expert_ids(tensor, self.num_experts)?,
                "expert_map" => expert_map(tensor, Some(self.num_local_experts))?,
                name if name.ends_with("_scale") => scales(tensor)?,
                _ => {}
            }
        }
        Ok(())
    }

    /// The memory and time of a check.
    pub(super) fn demands(&self, case: &Case<'_>) -> Vec<Demand> {
        if case.outputs.is_empty() {
            return Vec::new();
        }
        Demand::layer(self.rows(), self.hidden_size, self.w13_size_n(), self.intermediate_size)
    }
}

/// Names of the quantized activations of w13 and w2 and of their scales.
pub(super) const QUANTIZED: [[&str; 2]; 2] = [["a1q", "a1q_scale"], ["a2q", "a2q_scale"]];

/// Codes of rows `[_, cols]` that enter w13 (`which` 0) or w2 (1).
pub(super) fn codes(which: usize, dtype: DType, cols: usize, elements: &[u32]) -> Expected {
    let rows = elements.len() / cols;
    Expected {
        name: QUANTIZED[which][0].to_owned(),
        dtype,
        shape: vec![rows, cols],
        elements: elements.to_vec(),
        form: Form::lines(Rows::RowK, [cols, rows], 8, None),
    }
}

/// An output `[_, cols]` of the type of x.
pub(super) fn halves(name: &str, dtype: ScalarType, cols: usize, elements: Vec<u32>) -> Expected {
    let rows = elements.len() / cols;
    Expected {
        name: name.to_owned(),
        dtype: half(dtype),
        shape: vec![rows, cols],
        elements,
        form: Form::lines(Rows::List, [cols, rows], 16, None),
    }
}

/// Adds a report for each output of the case that has none: it is judged from the stage named next to
/// it, which the case lacks.
pub(super) fn report_unjudged(
    case: &Case<'_>,
    reports: &mut Vec<OutputReport>,
    before: &[(&str, &str)],
) {
    for (name, before) in before {
        if let Some(found) = case.output(name)
            && !reports.iter().any(|r| r.name == *name)
        {
            let note = format!("`{name}` is judged from {before}, which the case lacks");
            reports.push(OutputReport::unchecked(name, found.len(), &note));
        }
    }
}

/// The mistake of taking the first expert's scales for all.
pub(super) fn scales_of_first_expert(stacks: &mut [Vec<Weight<'static>>; 2]) {
    for stack in stacks {
        let first = stack[0].scales.clone();
        stack.iter_mut().for_each(|w| w.scales = first.clone());
    }
}

/// The mistake of exchanging the halves of every w13.
pub(super) fn swap_halves(w13: &mut [Weight<'static>]) {
    for weight in w13 {
        let n = weight.shape().size_n;
        let columns: Vec<usize> = (0..n).map(|i| (i + n / 2) % n).collect();
        if let Ok(swapped) = weight.gather_columns(&columns) {
            *weight = swapped;
        }
    }
}

/// The mistake of taking global ids for those of the rank's `num_local` experts; whether the case has a
/// map.
pub(super) fn ignore_map(
    map: &mut Option<Vec<i32>>,
    topk_ids: &mut [i32],
    num_local: usize,
) -> bool {
    let had_map = map.take().is_some();
    if had_map {
        topk_ids.iter_mut().for_each(|id| *id = id.rem_euclid(num_local as i32));
    }
    had_map
}
