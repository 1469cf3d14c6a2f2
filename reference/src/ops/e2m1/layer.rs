//! A layer of MXFP4 experts whose activations are quantized to int8 in groups of 32.

use serde_json::{Value, json};

use super::activated;
use super::config::{ACTIVATIONS, E2m1MoeConfig, TYPES};
use super::plain_nan;
use super::stages::Layer;
use crate::judge::{Declared, OutputReport, Strength, Verdict};
use crate::layouts::e2m1::GROUP;
use crate::moe::activation::{Activation, Columns};
use crate::num::scalar::{ScalarType, bf16_to_f32};
use crate::num::tensor::{DType, Tensor};
use crate::ops::case::Case;
use crate::ops::computation::{Defined, bitwise, ids};
use crate::ops::draw::{ROWS, Rng, activation_bits};
use crate::ops::layer_rules::{LayerRules, Prescale, RULE_KEYS, note_layout, wrong_values};
use crate::ops::schema::{CaseError, Inputs, Reader, TensorRule, finite, rule, stored};
use crate::ops::tensors::{F32, FLAGS, I32, U8, input, is, name_of, output, whole};
use crate::ops::{CaseConfig, Operation};
use crate::w4a8::Values;
use crate::{Error, Result};

impl Operation for E2m1MoeConfig {
    fn keys() -> &'static [&'static str] {
        &[
            "dtype",
            "size_m",
            "num_experts",
            "top_k",
            "hidden_size",
            "intermediate_size",
            "has_bias",
            "activation",
            "apply_router_weight_on_input",
            RULE_KEYS[0],
            RULE_KEYS[1],
            RULE_KEYS[2],
            RULE_KEYS[3],
            RULE_KEYS[4],
        ]
    }

    fn read(r: &Reader<'_>) -> Result<Self, CaseError> {
        let activation = r.name("activation", ACTIVATIONS)?;
        let (rules, on_gate_up) = LayerRules::read(r, activation)?;
        let config = Self {
            dtype: r.name("dtype", TYPES)?,
            size_m: r.count("size_m")?,
            num_experts: r.size("num_experts")?,
            top_k: r.size("top_k")?,
            hidden_size: r.size("hidden_size")?,
            intermediate_size: r.size("intermediate_size")?,
            has_bias: r.flag("has_bias", false)?,
            activation,
            apply_router_weight_on_input: on_gate_up,
            rules,
        };
        whole(r, "hidden_size", config.hidden_size, GROUP)?;
        whole(r, "intermediate_size", config.intermediate_size, GROUP)?;
        if config.top_k > config.num_experts {
            let limit = format!("at most num_experts, {}", config.num_experts);
            return Err(r.refuse("top_k", config.top_k, limit));
        }
        Ok(config)
    }

    fn json(&self) -> Value {
        let mut v = json!({
            "dtype": self.dtype.name(), "size_m": self.size_m, "num_experts": self.num_experts,
            "top_k": self.top_k, "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size, "has_bias": self.has_bias,
            "activation": name_of(ACTIVATIONS, &self.activation),
        });
        if let Some(map) = v.as_object_mut() {
            if self.apply_router_weight_on_input {
                map.insert("apply_router_weight_on_input".to_owned(), true.into());
            }
            self.rules.add_to(map);
        }
        v
    }

    fn is_gated(&self) -> Option<bool> {
        Some(true)
    }

    fn tensors(&self, _experts: usize) -> Result<Vec<TensorRule>> {
        let (m, e, float) = (is(self.size_m), is(self.num_experts), [stored(self.dtype)]);
        let (h, i) = (self.hidden_size, self.intermediate_size);
        let mut rules = vec![
            input("x", &float, &[m, is(h)]),
            input("topk_ids", I32, &[m, is(self.top_k)]),
            input("topk_weights", F32, &[m, is(self.top_k)]),
        ];
        for (which, size_n, size_k) in self.shapes() {
            let n = is(size_n);
            rules.push(input(&format!("{which}_weight"), U8, &[e, n, is(size_k / 2)]));
            let scale = format!("in.{which}_weight_scale");
            rules.push(rule(scale, super::SCALES, &[e, n, is(size_k / GROUP)]).required(true));
            if self.has_bias {
                rules.push(input(&format!("{which}_bias"), F32, &[e, n]));
            }
        }
        let slots = is(self.slots());
        rules.push(output("gate_up", &float, &[slots, is(2 * i)]));
        rules.push(output("activated", &float, &[slots, is(i)]));
        rules.push(output("y", &float, &[m, is(h)]));
        Ok(rules)
    }

    fn check_inputs(&self, inputs: &Inputs<'_>) -> Result<()> {
        for (name, tensor) in inputs.iter().filter(|(name, _)| !name.ends_with("_weight")) {
            if !["x", "topk_ids"].contains(&name.as_str()) {
                finite(tensor)?;
            }
        }
        let ids = &inputs["topk_ids"];
        let experts = self.num_experts as i32;
        match ids.elements::<i32>().iter().position(|&id| !(-1..experts).contains(&id)) {
            None => Ok(()),
            Some(i) => {
                let at = [i / self.top_k, i % self.top_k];
                let found = ids.elements::<i32>()[i];
                let expected = format!("-1 or an expert below {experts}");
                Err(Error::value(ids.name(), &at, found, expected))
            }
        }
    }

    fn lattice() -> Result<Vec<Self>> {
        let mut all = Vec::new();
        for (_, dtype) in TYPES {
            for (_, activation) in ACTIVATIONS {
                for (num_experts, top_k, hidden_size, intermediate_size) in
                    [(1, 1, 32, 32), (4, 2, 64, 32), (3, 3, 32, 96), (8, 4, 96, 64)]
                {
                    all.extend(FLAGS.map(|has_bias| Self {
                        dtype: *dtype,
                        size_m: 1,
                        num_experts,
                        top_k,
                        hidden_size,
                        intermediate_size,
                        has_bias,
                        activation: *activation,
                        apply_router_weight_on_input: false,
                        rules: LayerRules {
                            // Without it, rows of either layout would be right.
                            gate_up_layout:
                                (*activation == Activation::SwigluOai).then_some(Columns::Halves),
                            ..LayerRules::NONE
                        },
                    }));
                }
            }
        }
        Ok(all)
    }

    fn computation(&self, case: &Case<'_>) -> Result<Option<Box<dyn Defined>>> {
        Ok(Some(Box::new(Layer::new(case, self)?)))
    }

    fn mistakes() -> Vec<&'static str> {
        ids::<Layer>()
    }

    /// Each stage is judged from the case's own preceding stage.
    fn judge(&self, case: &Case<'_>, _declared: &Declared) -> Result<Vec<OutputReport>> {
        let given = |name: &str| case.output(name).map(Values::from_tensor).transpose();
        let (gate_up, activated) = (given("gate_up")?, given("activated")?);
        let mut case = case.clone();
        for name in ["gate_up", "activated", "y"] {
            if let Some(found) = case.output(name) {
                let plain = plain_nan(found)?;
                case.add_output(name, plain);
            }
        }
        let layouts = self.rules.layouts(self.activation, Columns::Halves);
        let mut best: Option<(usize, Vec<OutputReport>)> = None;
        for (columns, prescale) in self.readings(&layouts) {
            let mut layer = Layer::new(&case, self)?.read_as(columns, prescale);
            (layer.gate_up, layer.activated) = (gate_up.clone(), activated.clone());
            let mut reports = bitwise(&case, &layer)?;
            for report in reports.iter_mut().filter(|r| r.name == "activated") {
                activated::settle(report, &case, &layer)?;
            }
            if activated.is_none() {
                reports.iter_mut().filter(|r| r.name == "y").for_each(open_exponential);
            }
            if layouts.len() > 1 {
                note_layout(&mut reports, columns);
            }
            let wrong = wrong_values(&reports);
            if best.as_ref().is_none_or(|(least, _)| wrong < *least) {
                best = Some((wrong, reports));
            }
            if wrong == 0 {
                break;
            }
        }
        Ok(best.map(|(_, reports)| reports).unwrap_or_default())
    }

    /// The exponential of `activated` is open.
    fn fixes_every_bit(&self) -> bool {
        false
    }

    fn draw_inputs(&self, case: &mut Case<'static>, rng: &mut Rng) -> Result<()> {
        let c = Self { size_m: rng.pick(&ROWS), ..self.clone() };
        case.config = c.clone().into();
        case.add_input("x", super::activations(rng, c.dtype, c.size_m, c.hidden_size)?);
        let mut ids = Vec::with_capacity(c.slots());
        for _ in 0..c.size_m {
            let mut left: Vec<i32> = (0..c.num_experts as i32).collect();
            for _ in 0..c.top_k {
                let id = left.swap_remove(rng.below(left.len()));
                ids.push(if rng.chance(1, 12) { -1 } else { id });
            }
        }
        let weights = (0..c.slots()).map(|_| rng.between(1, 1 << 16) as f32 / 65536.0).collect();
        let shape = vec![c.size_m, c.top_k];
        case.add_input("topk_ids", Tensor::from_vec("", DType::I32, shape.clone(), ids)?);
        let weights: Vec<f32> = weights;
        case.add_input("topk_weights", Tensor::from_vec("", DType::F32, shape, weights)?);
        for (which, size_n, size_k) in c.shapes() {
            let n = c.num_experts * size_n;
            let shape = |last: usize| vec![c.num_experts, size_n, last];
            let bytes = super::codes(rng, n, size_k);
            let scales = super::scales(rng, n * size_k / GROUP);
            let weight = Tensor::new("", DType::U8, shape(size_k / 2), bytes)?;
            case.add_input(&format!("{which}_weight"), weight);
            let scales = Tensor::new("", DType::U8, shape(size_k / GROUP), scales)?;
            case.add_input(&format!("{which}_weight_scale"), scales);
            if c.has_bias {
                let value = |rng: &mut Rng| bf16_to_f32(activation_bits(rng, ScalarType::BFLOAT16));
                let bias: Vec<f32> = (0..n).map(|_| value(rng)).collect();
                let shape = vec![c.num_experts, size_n];
                let bias = Tensor::from_vec("", DType::F32, shape, bias)?;
                case.add_input(&format!("{which}_bias"), bias);
            }
        }
        Ok(())
    }

    fn with_one_row(&self) -> Option<(CaseConfig, &'static [&'static str])> {
        let one = Self { size_m: 1, ..self.clone() };
        Some((one.into(), &["x", "topk_ids", "topk_weights"]))
    }
}

/// Without `activated`, `y` has the layer's bits only with the layer's exponential, which nothing states: an
/// output that no known mistake explains is not judged.
fn open_exponential(report: &mut OutputReport) {
    let is_named = report.diagnosis.as_ref().is_some_and(|d| d.strength == Strength::Explains);
    if report.verdict == Verdict::Fail && !is_named {
        let note = "the exponential of `activated` is open, and `y` has other bits than with the layer's \
                    own: add `out.activated` to the case";
        *report = OutputReport::unchecked(&report.name, report.elements, note);
    }
}

impl E2m1MoeConfig {
    /// What the case leaves open: a layout of gate and up with a rounding of router weights on x.
    fn readings(&self, layouts: &[Columns]) -> Vec<(Columns, Prescale)> {
        let prescales = if self.rules.router_weight_on_x { 2 } else { 1 };
        let all = Prescale::ALL.iter().take(prescales);
        all.flat_map(|&prescale| layouts.iter().map(move |&columns| (columns, prescale))).collect()
    }
}
