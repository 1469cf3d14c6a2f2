//! What a case may state about a layer besides its sizes and formats: where router weights are applied,
//! where gate and up are in a row, and the parameters of the activation.

use serde_json::{Map, Value};

use crate::judge::{OutputReport, Verdict};
use crate::moe::activation::{Activation, Columns, Definition};
use crate::moe::{narrow, widen};
use crate::num::scalar::ScalarType;
use crate::ops::schema::{CaseError, Reader};
use crate::ops::tensors::name_of;

/// The optional keys of every layer with an activation. Without them, an operation means what its
/// activation's name means to it.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct LayerRules {
    /// Where gate and up are in a row of `gate_up`.
    pub gate_up_layout: Option<Columns>,
    /// L of min(gate, L) and of up in [−L, L].
    pub swiglu_limit: Option<f32>,
    /// α of gate · σ(α · gate).
    pub swiglu_alpha: Option<f32>,
    /// β of up + β.
    pub swiglu_beta: Option<f32>,
    /// Whether router weights multiply x, whose product is rounded to the type of x, before it is
    /// quantized or multiplied; then they multiply no output.
    pub router_weight_on_x: bool,
}

/// The keys that [`LayerRules::read`] reads.
pub(in crate::ops) const RULE_KEYS: [&str; 5] =
    ["gate_up_layout", "swiglu_limit", "swiglu_alpha", "swiglu_beta", "router_weight_on"];

/// Layouts of a row of `gate_up`.
const LAYOUTS: &[(&str, Columns)] =
    &[("halves", Columns::Halves), ("interleaved", Columns::Interleaved)];

/// Values of `gate_up_layout` in generated cases.
pub(in crate::ops) const GENERATED_LAYOUTS: [(&str, Option<Columns>); 3] = [
    ("not stated", None),
    ("halves", Some(Columns::Halves)),
    ("interleaved", Some(Columns::Interleaved)),
];

/// Limit, alpha and beta of generated cases; drawn gates exceed the limit.
pub(in crate::ops) const GENERATED_PARAMETERS: [(&str, [Option<f32>; 3]); 4] = [
    ("not stated", [None, None, None]),
    ("limit 0.5", [Some(0.5), None, None]),
    ("alpha 1.25, beta 0.25", [None, Some(1.25), Some(0.25)]),
    ("all three", [Some(0.5), Some(1.25), Some(0.25)]),
];

/// What router weights multiply in generated cases: whether `gate_up`, and whether x.
pub(in crate::ops) const ROUTER_WEIGHT_ON: [(&str, (bool, bool)); 3] =
    [("down", (false, false)), ("gate_up", (true, false)), ("x", (false, true))];

/// Why generated cases do not combine some values of these keys.
pub(in crate::ops) const NO_UP: &str = "an activation without up has no layout of gate and up";
pub(in crate::ops) const NO_PARAMETER: &str =
    "gelu and relu2 have no limit, alpha or beta; swiglustep and silu_no_mul only a limit";

/// What router weights multiply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Target {
    Down,
    GateUp,
    X,
}

const TARGETS: &[(&str, Target)] =
    &[("down", Target::Down), ("gate_up", Target::GateUp), ("x", Target::X)];

/// The key that `router_weight_on` refines.
const ON_INPUT: &str = "apply_router_weight_on_input";

impl LayerRules {
    /// No key is stated.
    pub const NONE: Self = Self {
        gate_up_layout: None,
        swiglu_limit: None,
        swiglu_alpha: None,
        swiglu_beta: None,
        router_weight_on_x: false,
    };

    /// Sets limit, alpha and beta.
    pub(in crate::ops) const fn set_parameters(&mut self, [limit, alpha, beta]: [Option<f32>; 3]) {
        (self.swiglu_limit, self.swiglu_alpha, self.swiglu_beta) = (limit, alpha, beta);
    }

    /// Whether a parameter is stated that this activation does not have.
    pub(in crate::ops) const fn has_foreign_parameter(&self, activation: Activation) -> bool {
        let limit = self.swiglu_limit.is_some() && !is_limited(activation);
        let is_shaped = self.swiglu_alpha.is_some() || self.swiglu_beta.is_some();
        limit || is_shaped && !is_shifted(activation)
    }

    /// Reads the keys of a layer with this activation; the second value is whether router weights
    /// multiply `gate_up`.
    pub(in crate::ops) fn read(
        r: &Reader<'_>,
        activation: Activation,
    ) -> Result<(Self, bool), CaseError> {
        let (router_weight_on_x, on_gate_up) = Self::target(r)?;
        let gate_up_layout = r.optional_name("gate_up_layout", LAYOUTS)?;
        if let Some(layout) = gate_up_layout.filter(|_| !activation.is_gated()) {
            let expected = format!("none: `{activation}` has no up");
            return Err(r.refuse("gate_up_layout", name_of(LAYOUTS, &layout), expected));
        }
        let (limited, shifted) = (is_limited(activation), is_shifted(activation));
        let number = |key: &str, has: bool, positive: bool| {
            let Some(found) = r.number(key)? else { return Ok(None) };
            if !has {
                let expected = format!("none: `{activation}` has no such parameter");
                return Err(r.refuse(key, found, expected));
            }
            let value = found as f32;
            if !value.is_finite() || positive && value <= 0.0 {
                let sign = if positive { "positive " } else { "" };
                return Err(r.refuse(key, found, format!("a {sign}finite f32")));
            }
            Ok(Some(value))
        };
        let rules = Self {
            gate_up_layout,
            swiglu_limit: number("swiglu_limit", limited, true)?,
            swiglu_alpha: number("swiglu_alpha", shifted, true)?,
            swiglu_beta: number("swiglu_beta", shifted, false)?,
            router_weight_on_x,
        };
        Ok((rules, on_gate_up))
    }

    /// Whether router weights multiply x, and whether they multiply `gate_up`.
    fn target(r: &Reader<'_>) -> Result<(bool, bool), CaseError> {
        let on_input = r.flag(ON_INPUT, false)?;
        let Some(target) = r.optional_name("router_weight_on", TARGETS)? else {
            return Ok((false, on_input));
        };
        let is_stated = r.map.get(ON_INPUT).is_some_and(|value| !value.is_null());
        if is_stated && on_input == (target == Target::Down) {
            let expected = match on_input {
                true => format!("gate_up or x, since `{ON_INPUT}` is true"),
                false => format!("down, since `{ON_INPUT}` is false"),
            };
            return Err(r.refuse("router_weight_on", name_of(TARGETS, &target), expected));
        }
        Ok((target == Target::X, target == Target::GateUp))
    }

    /// Adds the stated keys.
    pub(in crate::ops) fn add_to(&self, map: &mut Map<String, Value>) {
        let mut number = |key: &str, value: Option<f32>| {
            if let Some(value) = value {
                map.insert(key.to_owned(), f64::from(value).into());
            }
        };
        number("swiglu_limit", self.swiglu_limit);
        number("swiglu_alpha", self.swiglu_alpha);
        number("swiglu_beta", self.swiglu_beta);
        if let Some(layout) = &self.gate_up_layout {
            map.insert("gate_up_layout".to_owned(), name_of(LAYOUTS, layout).into());
        }
        if self.router_weight_on_x {
            map.insert("router_weight_on".to_owned(), "x".into());
            map.insert(ON_INPUT.to_owned(), true.into());
        }
    }

    /// The layouts that a row of `gate_up` may have, the operation's `default` first. Only `swigluoai`
    /// means different layouts to different kernels.
    pub(in crate::ops) fn layouts(&self, activation: Activation, default: Columns) -> Vec<Columns> {
        match (self.gate_up_layout, activation) {
            _ if !activation.is_gated() => vec![Columns::Gate],
            (Some(stated), _) => vec![stated],
            (None, Activation::SwigluOai) => {
                let other = match default {
                    Columns::Halves => Columns::Interleaved,
                    _ => Columns::Halves,
                };
                vec![default, other]
            }
            (None, _) => vec![Columns::Halves],
        }
    }

    /// The activation with the stated parameters, of rows in the first of [`Self::layouts`].
    pub(in crate::ops) fn definition(
        &self,
        activation: Activation,
        default: Columns,
    ) -> Definition {
        let mut definition = Definition::new(activation);
        definition.columns = self.layouts(activation, default)[0];
        if let Some(limit) = self.swiglu_limit {
            definition = definition.with_limit(limit);
        }
        definition.alpha = self.swiglu_alpha.unwrap_or(definition.alpha);
        definition.up_shift = self.swiglu_beta.unwrap_or(definition.up_shift);
        definition
    }
}

/// Whether an activation may have a limit.
const fn is_limited(activation: Activation) -> bool {
    use Activation as A;
    matches!(activation, A::Silu | A::SwigluOai | A::SwigluStep | A::SiluNoMul)
}

/// Whether an activation may have alpha and beta.
const fn is_shifted(activation: Activation) -> bool {
    matches!(activation, Activation::Silu | Activation::SwigluOai)
}

/// The number of wrong values of all outputs.
pub(in crate::ops) fn wrong_values(reports: &[OutputReport]) -> usize {
    let failed = reports.iter().filter(|r| r.verdict == Verdict::Fail);
    failed.map(|r| r.mismatches.max(1)).sum()
}

/// Says on the first output that depends on it which layout was read.
pub(in crate::ops) fn note_layout(reports: &mut [OutputReport], layout: Columns) {
    let names = ["activated", "a2q", "down", "y"];
    let first = names.iter().find(|name| reports.iter().any(|r| r.name == **name));
    if let Some(report) = reports.iter_mut().find(|r| Some(&r.name.as_str()) == first) {
        report.add_note(&layout_note(layout));
        report.has_choice = true;
    }
}

/// What a note says about a layout that the case does not state.
fn layout_note(layout: Columns) -> String {
    let how = match layout {
        Columns::Interleaved => "gate and up alternate in a row (`interleaved`)",
        _ => "gate and up are the halves of a row (`halves`)",
    };
    format!("{how}; the config does not state `gate_up_layout`")
}

/// How router weights come to x: torch rounds them to the type of x first, a kernel may keep f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::ops) enum Prescale {
    RoundedWeight,
    F32Weight,
}

impl Prescale {
    pub(in crate::ops) const ALL: [Self; 2] = [Self::RoundedWeight, Self::F32Weight];

    /// A router weight as it multiplies x.
    pub(in crate::ops) fn weight(self, weight: f32, dtype: ScalarType) -> f32 {
        match (self, dtype) {
            (Self::F32Weight, _) | (_, ScalarType::FLOAT32) => weight,
            (Self::RoundedWeight, _) => widen(dtype, narrow(dtype, weight)),
        }
    }

    /// Rows of x `[M, cols]`, bits of `dtype`, times the router weight of each slot: `[M·top_k, cols]`.
    pub(in crate::ops) fn apply(
        self,
        x: &[u16],
        weights: &[f32],
        [top_k, cols]: [usize; 2],
        dtype: ScalarType,
    ) -> Vec<u16> {
        let mut out = Vec::with_capacity(weights.len() * cols);
        for (slot, &weight) in weights.iter().enumerate() {
            let weight = self.weight(weight, dtype);
            let row = &x[slot / top_k.max(1) * cols..][..cols];
            out.extend(row.iter().map(|&bits| narrow(dtype, widen(dtype, bits) * weight)));
        }
        out
    }
}
