//! One quantized matrix product.

mod lattice;
mod product;
mod quantized;

use serde_json::{Value, json};

use crate::judge::{Declared, OutputReport};
use crate::moe::layer::{input_global_scale, quantize_rows};
use crate::num::dims::Shape;
use crate::num::scalar::ScalarType;
use crate::num::tensor::{DType, Tensor};
use crate::ops::Operation;
use crate::ops::axes::Axes;
use crate::ops::case::Case;
use crate::ops::draw::{ROWS, Rng, activations};
use crate::ops::quant::keys::{
    QUANT_KEYS, check_matrix, contradiction, extend, insert_some, quant_json, quant_keys,
    scale_factor, schedule_json, with_quant_keys,
};
use crate::ops::quant::stack::{Stack, add_halves, defined};
use crate::ops::quant::tensors::Matrix;
use crate::ops::quant::values::whole_k;
use crate::ops::quant::{QuantConfig, finite_scales, packed, states_factor, unordered, weight};
use crate::ops::schema::{
    CaseError, Demand, Dim, Inputs, Reader, TensorRule, not_negative, rule, stored,
};
use crate::ops::tensors::F32;
use crate::products::schedule::{Extras, Schedule, ScheduleChoice};
use crate::quantize::ActivationRule;
use crate::weight::Weight;
use crate::{Error, Result};

/// Config of `linear`.
#[derive(Debug, Clone, PartialEq)]
pub struct LinearConfig {
    /// The matrix's format.
    pub quant: QuantConfig,
    /// Rows of x.
    pub size_m: usize,
    /// Output features.
    pub size_n: usize,
    /// Input features.
    pub size_k: usize,
    /// The power of two that multiplies NVFP4 scales (bf16).
    pub scale_factor: Option<f64>,
    /// Schedule of `y`, if its bits are declared.
    pub schedule: Option<ScheduleChoice>,
    /// The rule that quantized `in.x` to `in.a_q` and `in.a_scales`; `None` accepts any known rule.
    pub quantizer: Option<ActivationRule>,
}

impl Operation for LinearConfig {
    fn keys() -> &'static [&'static str] {
        const KEYS: [&str; QUANT_KEYS.len() + 6] = with_quant_keys([
            "size_m",
            "size_n",
            "size_k",
            "scale_factor",
            "schedule",
            "quantizer",
        ]);
        &KEYS
    }

    fn read(r: &Reader<'_>) -> Result<Self, CaseError> {
        let quant = quant_keys(r)?;
        let scale_factor = scale_factor(r, "scale_factor", &quant)?;
        let config = LinearConfig {
            quant,
            size_m: r.count("size_m")?,
            size_n: r.size("size_n")?,
            size_k: r.size("size_k")?,
            scale_factor,
            schedule: r.schedule("schedule")?,
            quantizer: r.optional_name("quantizer", ActivationRule::NAMED)?,
        };
        if let (Some(rule), None) = (config.quantizer, config.quant.input_dtype) {
            let with = "input_dtype null, which quantizes no activations";
            return Err(contradiction("quantizer", rule.name(), with));
        }
        check_matrix(&config.quant, ("size_k", config.size_k), ("size_n", config.size_n))?;
        Ok(config)
    }

    /// Every legal combination of [`Operation::axes`], in an order of its own.
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
            json!({"size_m": self.size_m, "size_n": self.size_n, "size_k": self.size_k}),
        );
        insert_some(&mut v, "scale_factor", self.scale_factor);
        insert_some(&mut v, "schedule", self.schedule.as_ref().map(schedule_json));
        insert_some(&mut v, "quantizer", self.quantizer.map(ActivationRule::name));
        v
    }

    fn describe(&self) -> String {
        format!("{} k{} n{}", self.quant.describe(), self.size_k, self.size_n)
    }

    fn tensors(&self, _experts: usize) -> Result<Vec<TensorRule>> {
        let (m, n, k) = (Dim::Is(self.size_m), Dim::Is(self.size_n), Dim::Is(self.size_k));
        let half = [stored(self.quant.dtype)];
        let matrix = Matrix {
            quant: &self.quant,
            input: "in.".to_owned(),
            output: "out.".to_owned(),
            lead: Vec::new(),
            size_k: self.size_k,
            size_n: self.size_n,
        };
        let mut rules = matrix.rules()?;
        rules.push(rule("in.x", &half, &[m, k]));
        if let Some(input) = self.quant.input_dtype {
            rules.push(rule("in.a_q", &[stored(input)], &[m, k]));
            rules.push(rule("in.a_scales", F32, &[m, Dim::Is(1)]));
        }
        rules.push(rule("out.y", &half, &[m, n]));
        Ok(rules)
    }

    fn check_inputs(&self, inputs: &Inputs<'_>) -> Result<()> {
        finite_scales(&self.quant, inputs)?;
        // With x, the scales are compared with those computed from x; without it, they are used as
        // given.
        if let (Some(scales), None) = (inputs.get("a_scales"), inputs.get("x")) {
            not_negative(scales)?;
        }
        unordered(&self.quant, inputs)?;
        let both = ["a_q", "a_scales"];
        if let [Some(_), None] | [None, Some(_)] = both.map(|name| inputs.get(name)) {
            let absent = both.iter().find(|name| !inputs.contains_key(**name));
            let name = format!("in.{}", absent.unwrap_or(&both[0]));
            return Err(Error::missing(name, "the other half of the quantized activations"));
        }
        Ok(())
    }

    fn demands(&self, case: &Case<'_>) -> Result<Vec<Demand>> {
        let product = Demand::product(self.size_m, self.size_n, self.size_k);
        Ok(case.output("y").map(|_| product).into_iter().collect())
    }

    fn quant(&self) -> Option<&QuantConfig> {
        Some(&self.quant)
    }

    fn size_k(&self, _prefix: &str) -> Option<usize> {
        Some(self.size_k)
    }

    fn judge(&self, case: &Case<'_>, declared: &Declared) -> Result<Vec<OutputReport>> {
        let shape = Shape::new(self.size_k, self.size_n);
        let mut reports = packed::matrices(case, &self.quant, "", shape, self.scale_factor, None)?;
        // A comparison bit for bit is stronger than a bound.
        reports.extend(match product::by_schedule(case, self, declared)? {
            Some(report) => Some(report),
            None => product::by_bound(case, self, declared)?,
        });
        reports.extend(quantized::linear(case, self)?);
        Ok(reports)
    }

    fn add_staged_outputs(&self, case: &mut Case<'_>) -> Result<()> {
        let shape = Shape::new(self.size_k, self.size_n);
        let stack = Stack::of_case(case, &self.quant, "", shape)?;
        stack.add_outputs(case)?;
        if case.inputs.contains_key("x") {
            add_product(case, self, &stack.weights[0])?;
        }
        Ok(())
    }

    fn draw(&self, case: &mut Case<'static>, rng: &mut Rng) -> Result<()> {
        let c = Self { size_m: rng.pick(&ROWS), ..self.clone() };
        case.config = c.clone().into();
        let shape = Shape::new(c.size_k, c.size_n);
        let weights = vec![weight(rng, "weight", &c.quant, shape, whole_k(&c.quant, c.size_k))?];
        let x = activations(rng, c.quant.dtype, c.size_m, c.size_k)?;
        let stack = Stack { prefix: "", quant: &c.quant, shape, weights };
        case.add_input("x", x);
        stack.add_inputs(case)?;
        let prepared = stack.add_outputs(case)?;
        let stated = states_factor(&c.quant).then_some(f64::from(prepared.scale_factor));
        let defined = add_product(case, &c, &stack.weights[0])?;
        let schedule = defined.then_some(ScheduleChoice::Canonical);
        case.config = Self { scale_factor: stated, schedule, ..c }.into();
        Ok(())
    }
}

/// Adds `y` of a linear case and, for 8-bit activations, their codes and scales as inputs. Returns
/// whether there is a `y`.
fn add_product(case: &mut Case<'_>, c: &LinearConfig, weight: &Weight<'static>) -> Result<bool> {
    let x = case.input("x")?.elements::<u16>().into_owned();
    let (dtype, m, k) = (c.quant.dtype, c.size_m, c.size_k);
    let factor = input_global_scale(std::slice::from_ref(weight));
    let rows = quantize_rows(&x, dtype, c.quant.input_dtype, k, factor)?;
    if let (Some(input), Some(scales)) = (c.quant.input_dtype, &rows.scales) {
        let ty = if input == ScalarType::INT8 { DType::I8 } else { DType::F8E4M3 };
        let codes: Vec<u8> = rows.codes.iter().map(|&c| c as u8).collect();
        let scales = Tensor::from_vec("a_scales", DType::F32, vec![m, 1], scales.clone())?;
        for (name, made) in
            [("a_q", Tensor::new("a_q", ty, vec![m, k], codes)?), ("a_scales", scales)]
        {
            if case.inputs.get(name).is_some_and(|stated| stated.bytes() != made.bytes()) {
                let what = format!("`in.{name}`, which another rule made of `in.x`");
                return Err(Error::unsupported(what, "the reference computes `y` from `in.x`"));
            }
            case.add_input(name, made);
        }
    }
    let input = c.quant.input_dtype.unwrap_or(dtype);
    let extras = Extras { activation_scales: rows.scales.as_deref(), ..Extras::default() };
    let schedule = match &c.schedule {
        Some(choice) => choice.resolve(std::slice::from_ref(weight), dtype, input)?,
        None => Schedule::canonical(weight, dtype, input)?,
    };
    let y = schedule.execute_rows(&rows.codes, weight, extras);
    let Some(y) = defined(&c.quant, y)? else { return Ok(false) };
    let y = y.into_iter().map(|b| b as u16).collect();
    add_halves(case, "y", dtype, [m, c.size_n], y)?;
    Ok(true)
}
