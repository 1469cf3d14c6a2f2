//! Quantization of activations to e4m3fn under given scales: one, or one for each row.

use serde_json::{Value, json};

use crate::Result;
use crate::judge::compare::Rows;
use crate::judge::{Declared, OutputReport, Verdict};
use crate::moe::widen;
use crate::num::element::E4m3fn;
use crate::num::scalar::ScalarType;
use crate::num::tensor::{DType, Tensor};
use crate::ops::case::Case;
use crate::ops::computation::{Computation, Defined, Expected, Form, Mistake, bitwise, ids, known};
use crate::ops::draw::{Rng, activations};
use crate::ops::schema::{CaseError, Inputs, Reader, TensorRule, positive, stored};
use crate::ops::tensors::{E4M3, F32, FLAGS, HALF, HALF_TYPES, input, is, name_of, output};
use crate::ops::{CaseConfig, Operation};

/// e4m3fn's largest number.
const MAX: f32 = 448.0;

/// How a value becomes a code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StaticFp8Rule {
    /// x · fl(1 / scale): vLLM's `static_scaled_fp8_quant`.
    ScaleInverse,
    /// x / scale.
    Quotient,
}

const RULES: &[(&str, StaticFp8Rule)] =
    &[("scale_inverse", StaticFp8Rule::ScaleInverse), ("quotient", StaticFp8Rule::Quotient)];

/// Config of `static_scaled_fp8_quant`, and of `scaled_fp8_quant` with a scale.
///
/// in: `x` `[M, K]`, `scale` `[1]` or `[M, 1]`. out: `x_q` `[M, K]` e4m3fn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StaticFp8Config {
    /// Type of x.
    pub dtype: ScalarType,
    /// Rows.
    pub size_m: usize,
    /// K.
    pub size_k: usize,
    /// Whether each row has a scale.
    pub per_token: bool,
    /// The kernel's operations; `None` accepts either.
    pub quantizer: Option<StaticFp8Rule>,
}

impl Operation for StaticFp8Config {
    fn keys() -> &'static [&'static str] {
        &["dtype", "size_m", "size_k", "per_token", "quantizer"]
    }

    fn key_meanings() -> &'static [(&'static str, &'static str)] {
        &[("per_token", "whether each row has a scale; otherwise one is for all")]
    }

    fn read(r: &Reader<'_>) -> Result<Self, CaseError> {
        Ok(Self {
            dtype: r.name("dtype", HALF_TYPES)?,
            size_m: r.count("size_m")?,
            size_k: r.size("size_k")?,
            per_token: r.flag("per_token", false)?,
            quantizer: r.optional_name("quantizer", RULES)?,
        })
    }

    fn json(&self) -> Value {
        let mut v = json!({
            "dtype": self.dtype.name(), "size_m": self.size_m, "size_k": self.size_k,
            "per_token": self.per_token,
        });
        if let Some(rule) = &self.quantizer {
            v["quantizer"] = name_of(RULES, rule).into();
        }
        v
    }

    fn tensors(&self, _experts: usize) -> Result<Vec<TensorRule>> {
        let (m, k) = (is(self.size_m), is(self.size_k));
        let scale = match self.per_token {
            true => input("scale", F32, &[m, is(1)]),
            false => input("scale", F32, &[is(1)]),
        };
        Ok(vec![input("x", &[stored(self.dtype)], &[m, k]), scale, output("x_q", E4M3, &[m, k])])
    }

    fn check_inputs(&self, inputs: &Inputs<'_>) -> Result<()> {
        positive(&inputs["scale"])
    }

    /// Rows of one element, and K around the width of a vectorized load.
    fn lattice() -> Result<Vec<Self>> {
        let mut all = Vec::new();
        for dtype in HALF {
            for (size_m, size_k) in [(1, 1), (3, 16), (5, 100), (4, 257)] {
                for per_token in FLAGS {
                    for &(_, rule) in RULES {
                        let quantizer = Some(rule);
                        all.push(Self { dtype, size_m, size_k, per_token, quantizer });
                    }
                }
            }
        }
        Ok(all)
    }

    fn computation(&self, case: &Case<'_>) -> Result<Option<Box<dyn Defined>>> {
        Ok(Some(Box::new(Quantization::new(case, self)?)))
    }

    fn mistakes() -> Vec<&'static str> {
        ids::<Quantization>()
    }

    fn draw_inputs(&self, case: &mut Case<'static>, rng: &mut Rng) -> Result<()> {
        let x = activations(rng, self.dtype, self.size_m, self.size_k)?;
        let values = x.elements::<u16>();
        let rows = if self.per_token { self.size_m } else { 1 };
        let scales = (0..rows).map(|row| {
            let of = match self.per_token {
                true => &values[row * self.size_k..][..self.size_k],
                false => &values[..],
            };
            let largest = of.iter().map(|&b| widen(self.dtype, b).abs()).fold(0.0, f32::max);
            let fits = if largest > 0.0 { largest / MAX } else { 1.0 };
            // Scales that saturate, that fit, and that leave room.
            fits * rng.pick(&[0.5, 1.0, 1.0, 3.0])
        });
        let scales: Vec<f32> = scales.collect();
        drop(values);
        case.add_input("x", x);
        let shape = if self.per_token { vec![rows, 1] } else { vec![1] };
        case.add_input("scale", Tensor::from_vec("", DType::F32, shape, scales)?);
        Ok(())
    }

    fn judge(&self, case: &Case<'_>, _declared: &Declared) -> Result<Vec<OutputReport>> {
        let quantization = Quantization::new(case, self)?;
        let reports = bitwise(case, &quantization)?;
        let is_right = |all: &[OutputReport]| all.iter().all(|r| r.verdict == Verdict::Pass);
        if self.quantizer.is_some() || is_right(&reports) {
            return Ok(reports);
        }
        let rule = StaticFp8Rule::Quotient;
        let mut others = bitwise(case, &Quantization { rule, ..quantization })?;
        if !is_right(&others) {
            return Ok(reports);
        }
        others.iter_mut().for_each(|r| r.add_note("values were divided by the scale"));
        Ok(others)
    }

    fn fixes_every_bit(&self) -> bool {
        self.quantizer.is_some()
    }

    fn with_one_row(&self) -> Option<(CaseConfig, &'static [&'static str])> {
        let inputs: &[_] = if self.per_token { &["x", "scale"] } else { &["x"] };
        Some((Self { size_m: 1, ..self.clone() }.into(), inputs))
    }
}

/// A change to the definition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Change {
    None,
    /// Values are multiplied by the scale.
    Multiplied,
    /// Values are not scaled.
    Unscaled,
    /// Values beyond 448 become NaN.
    Overflows,
    /// Codes saturate at 240, e4m3fnuz's largest number.
    Limit240,
    /// Quotients are truncated.
    Truncated,
    /// The scale of the first row is that of all rows.
    FirstRow,
    /// The scale is rounded to x's type.
    NarrowScale,
}

/// `static_scaled_fp8_quant`.
#[derive(Debug, Clone)]
struct Quantization {
    config: StaticFp8Config,
    x: Vec<f32>,
    scales: Vec<f32>,
    rule: StaticFp8Rule,
    change: Change,
}

impl Quantization {
    fn new(case: &Case<'_>, c: &StaticFp8Config) -> Result<Self> {
        let x = case.input("x")?.elements::<u16>();
        Ok(Self {
            config: c.clone(),
            x: x.iter().map(|&bits| widen(c.dtype, bits)).collect(),
            scales: case.input("scale")?.elements::<f32>().into_owned(),
            rule: c.quantizer.unwrap_or(StaticFp8Rule::ScaleInverse),
            change: Change::None,
        })
    }

    /// NaN becomes 448, by the order of `fmin` and `fmax` in vLLM's `scaled_fp8_conversion`.
    fn code(&self, x: f32, scale: f32) -> u8 {
        let scale = match self.change {
            Change::NarrowScale => {
                let ty = self.config.dtype;
                ty.to_f64(ty.encode_rne(scale.into())) as f32
            }
            _ => scale,
        };
        let scaled = match (self.change, self.rule) {
            (Change::Multiplied, _) => x * scale,
            (Change::Unscaled, _) => x,
            // A subnormal scale has an infinite reciprocal; zeros stay zeros.
            _ if x == 0.0 => x,
            (_, StaticFp8Rule::ScaleInverse) => x * (1.0 / scale),
            (_, StaticFp8Rule::Quotient) => x / scale,
        };
        let limit = if self.change == Change::Limit240 { 240.0 } else { MAX };
        let value = if scaled.is_nan() { limit } else { scaled.clamp(-limit, limit) };
        match self.change {
            Change::Overflows => E4m3fn::from_f32_rne_nan(scaled).to_bits(),
            Change::Truncated => {
                let nearest = E4m3fn::from_f32_rne_saturating(value);
                let beyond = nearest.to_f32().abs() > value.abs();
                nearest.to_bits() - u8::from(beyond)
            }
            _ => E4m3fn::from_f32_rne_saturating(value).to_bits(),
        }
    }
}

impl Computation for Quantization {
    fn outputs(&self) -> Result<Vec<Expected>> {
        let (m, k) = (self.config.size_m, self.config.size_k);
        let first = self.change == Change::FirstRow || !self.config.per_token;
        let code = |(i, &x): (usize, &f32)| {
            u32::from(self.code(x, self.scales[if first { 0 } else { i / k }]))
        };
        Ok(vec![Expected {
            name: "x_q".to_owned(),
            dtype: DType::F8E4M3,
            shape: vec![m, k],
            elements: self.x.iter().enumerate().map(code).collect(),
            form: Form::lines(Rows::RowK, [k, m], 8, None),
        }])
    }

    fn mistakes() -> Vec<Mistake<Self>> {
        known! {
            "scale-inverted", "values were multiplied by the scale where they are divided" =>
                |c| c.change = Change::Multiplied;
            "scale-missing", "values were not divided by the scale" =>
                |c| c.change = Change::Unscaled;
            "saturation-missing", "values beyond 448 became NaN where they saturate" =>
                |c| c.change = Change::Overflows;
            "e4m3-saturates-early", "codes saturate at 240, e4m3fnuz's largest number; e4m3fn's is 448" =>
                |c| c.change = Change::Limit240;
            "rounding-truncated", "values were cut off to a code, not rounded" =>
                |c| c.change = Change::Truncated;
            "scale-of-first-row", "the first row's scale was taken for all rows" =>
                |c| c.change = Change::FirstRow;
            "scale-narrowed", "the scale was rounded to the type of the activations" =>
                |c| c.change = Change::NarrowScale;
            "codes-by-reciprocal", "values were multiplied by the rounded reciprocal of their scale" =>
                |c| c.rule = StaticFp8Rule::ScaleInverse;
            "codes-by-quotient", "values were divided by their scale" =>
                |c| c.rule = StaticFp8Rule::Quotient;
        }
    }
}
