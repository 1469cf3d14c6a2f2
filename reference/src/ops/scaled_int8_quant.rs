//! Quantization of activations to int8: `static_scaled_int8_quant` and `dynamic_scaled_int8_quant`, with
//! and without zero points.

use serde_json::{Value, json};

use crate::Result;
use crate::judge::compare::Rows;
use crate::moe::widen;
use crate::num::array::rows_of;
use crate::num::scalar::ScalarType;
use crate::num::tensor::{DType, Tensor};
use crate::ops::case::Case;
use crate::ops::computation::{Computation, Defined, Expected, Form, Mistake, ids, known};
use crate::ops::draw::{Rng, activation_bits, activations};
use crate::ops::schema::{CaseError, Inputs, Reader, TensorRule, finite, positive, stored};
use crate::ops::tensors::{F32, FLAGS, HALF, HALF_TYPES, I8, I32, half, input, is, output};
use crate::ops::{CaseConfig, Operation};
use crate::quantize::Int8Quantizer;

/// Config of `static_scaled_int8_quant`: one scale from the checkpoint.
pub type StaticInt8Config = Int8QuantConfig<true>;

/// Config of `dynamic_scaled_int8_quant`: a scale for each row.
pub type DynamicInt8Config = Int8QuantConfig<false>;

/// Config of an operator that quantizes activations to int8; `STATIC`: under a given scale.
///
/// in: `x` `[M, K]`; static also `scale` `[1]` and, without `symmetric`, `azp` `[1]` int32. out: `x_q`
/// `[M, K]` int8; dynamic also `x_s` `[M, 1]` and, without `symmetric`, `x_azp` `[M, 1]` int32.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Int8QuantConfig<const STATIC: bool> {
    /// Type of x.
    pub dtype: ScalarType,
    /// Rows.
    pub size_m: usize,
    /// K.
    pub size_k: usize,
    /// Whether codes have no zero point.
    pub symmetric: bool,
}

impl<const STATIC: bool> Operation for Int8QuantConfig<STATIC>
where
    Self: Into<CaseConfig>,
{
    fn keys() -> &'static [&'static str] {
        &["dtype", "size_m", "size_k", "symmetric"]
    }

    fn read(r: &Reader<'_>) -> Result<Self, CaseError> {
        Ok(Self {
            dtype: r.name("dtype", HALF_TYPES)?,
            size_m: r.count("size_m")?,
            size_k: r.size("size_k")?,
            symmetric: r.flag("symmetric", true)?,
        })
    }

    fn json(&self) -> Value {
        json!({
            "dtype": self.dtype.name(), "size_m": self.size_m, "size_k": self.size_k,
            "symmetric": self.symmetric,
        })
    }

    fn tensors(&self, _experts: usize) -> Result<Vec<TensorRule>> {
        let (m, k) = (is(self.size_m), is(self.size_k));
        let mut rules =
            vec![input("x", &[stored(self.dtype)], &[m, k]), output("x_q", I8, &[m, k])];
        match (STATIC, self.symmetric) {
            (true, true) => rules.push(input("scale", F32, &[is(1)])),
            (true, false) => {
                rules.extend([input("scale", F32, &[is(1)]), input("azp", I32, &[is(1)])]);
            }
            (false, true) => rules.push(output("x_s", F32, &[m, is(1)])),
            (false, false) => {
                rules.extend([output("x_s", F32, &[m, is(1)]), output("x_azp", I32, &[m, is(1)])]);
            }
        }
        Ok(rules)
    }

    fn check_inputs(&self, inputs: &Inputs<'_>) -> Result<()> {
        if STATIC {
            return positive(&inputs["scale"]);
        }
        finite(&inputs["x"])
    }

    /// Rows of one element, and K around the width of a vectorized load.
    fn lattice() -> Result<Vec<Self>> {
        let mut all = Vec::new();
        for dtype in HALF {
            for (size_m, size_k) in [(1, 1), (3, 16), (5, 100), (4, 257), (17, 64)] {
                all.extend(FLAGS.map(|symmetric| Self { dtype, size_m, size_k, symmetric }));
            }
        }
        Ok(all)
    }

    fn computation(&self, case: &Case<'_>) -> Result<Option<Box<dyn Defined>>> {
        Ok(Some(Box::new(Int8Quant::<STATIC>::new(case, self)?)))
    }

    fn mistakes() -> Vec<&'static str> {
        ids::<Int8Quant<STATIC>>()
    }

    fn draw_inputs(&self, case: &mut Case<'static>, rng: &mut Rng) -> Result<()> {
        let (m, k) = (self.size_m, self.size_k);
        let x = match rng.chance(1, 4) {
            // Quotients by a scale of 1, which every row has, are halves.
            true => {
                let value = |i: usize| match i % k {
                    0 => 127.0,
                    1 if !self.symmetric => -128.0,
                    _ => f32::from(rng.between(0, 480) as i16 - 240) / 2.0,
                };
                let bits = (0..m * k).map(value).map(|v| self.dtype.encode_rne(v.into()) as u16);
                Tensor::from_vec("in.x", half(self.dtype), vec![m, k], bits.collect())?
            }
            false => activations(rng, self.dtype, m, k)?,
        };
        let values = x.elements::<u16>();
        let largest = values.iter().map(|&b| widen(self.dtype, b).abs()).fold(0.0, f32::max);
        drop(values);
        case.add_input("x", x);
        if STATIC {
            // A scale that saturates, one that fits, and one under which halves occur.
            let fits = if largest > 0.0 { largest / 127.0 } else { 1.0 };
            let other = widen(self.dtype, activation_bits(rng, self.dtype)).abs();
            let scale = rng.pick(&[fits, fits / 2.0, 1.0, other]);
            case.add_input("scale", Tensor::from_vec("", DType::F32, vec![1], vec![scale])?);
            if !self.symmetric {
                let azp = rng.between(0, 255) as i32 - 128;
                case.add_input("azp", Tensor::from_vec("", DType::I32, vec![1], vec![azp])?);
            }
        }
        Ok(())
    }

    fn with_one_row(&self) -> Option<(CaseConfig, &'static [&'static str])> {
        Some((Self { size_m: 1, ..self.clone() }.into(), &["x"]))
    }
}

/// A change to the definition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Change {
    None,
    /// Halves are rounded away from zero.
    HalfAway,
    /// Quotients are truncated.
    Truncated,
    /// Codes wrap where they saturate.
    Wrapped,
    /// The zero point is subtracted.
    ZeroSubtracted,
    /// Codes have no zero point.
    ZeroMissing,
    /// Codes saturate at −127.
    Symmetric,
    /// The quotient and the zero point are added before they are rounded.
    RoundedOnce,
    /// The scale divides 128 codes.
    By128,
    /// The reciprocal of the scale is stored.
    Inverted,
    /// The scale of the first row is that of all rows.
    FirstRow,
}

/// Either operator.
#[derive(Debug, Clone)]
struct Int8Quant<const STATIC: bool> {
    x: Vec<f32>,
    size_m: usize,
    size_k: usize,
    quantizer: Int8Quantizer,
    change: Change,
    /// Scales of rows that a case states, by which its codes are to be judged.
    found_scales: Option<Vec<f32>>,
}

impl<const STATIC: bool> Int8Quant<STATIC> {
    fn new(case: &Case<'_>, c: &Int8QuantConfig<STATIC>) -> Result<Self> {
        let x = case.input("x")?.elements::<u16>();
        let scale = || Ok::<_, crate::Error>(case.input("scale")?.elements::<f32>()[0]);
        let quantizer = match (STATIC, c.symmetric) {
            (false, true) => Int8Quantizer::Token,
            (false, false) => Int8Quantizer::TokenAzp,
            (true, true) => Int8Quantizer::Tensor(scale()?),
            (true, false) => {
                Int8Quantizer::TensorAzp(scale()?, case.input("azp")?.elements::<i32>()[0])
            }
        };
        let x = x.iter().map(|&bits| widen(c.dtype, bits)).collect();
        Ok(Self {
            x,
            size_m: c.size_m,
            size_k: c.size_k,
            quantizer,
            change: Change::None,
            found_scales: None,
        })
    }

    /// Codes of one row under a mistake in rounding.
    fn other_codes(&self, row: &[f32], scale: f32, zero: i32) -> Vec<i8> {
        let factor = match self.quantizer {
            Int8Quantizer::Token if scale == 0.0 => 0.0,
            _ if self.found_scales.is_some() => 127.0 / (scale * 127.0),
            Int8Quantizer::Token => 127.0 / row.iter().fold(0f32, |m, v| m.max(v.abs())),
            _ => 1.0 / scale,
        };
        let code = |&v: &f32| {
            let v = match self.quantizer {
                Int8Quantizer::Tensor(scale) => v / scale,
                _ => v * factor,
            };
            let even = v.round_ties_even() as i32;
            match self.change {
                Change::HalfAway => (v.round() as i32).wrapping_add(zero).clamp(-128, 127) as i8,
                Change::Truncated => (v as i32).wrapping_add(zero).clamp(-128, 127) as i8,
                Change::Wrapped => even.wrapping_add(zero) as i8,
                Change::ZeroSubtracted => even.wrapping_sub(zero).clamp(-128, 127) as i8,
                Change::ZeroMissing => even.clamp(-128, 127) as i8,
                Change::Symmetric => even.wrapping_add(zero).clamp(-127, 127) as i8,
                Change::RoundedOnce => (v + zero as f32).round_ties_even() as i8,
                _ => even.wrapping_add(zero).clamp(-128, 127) as i8,
            }
        };
        row.iter().map(code).collect()
    }
}

impl<const STATIC: bool> Computation for Int8Quant<STATIC> {
    fn outputs(&self) -> Result<Vec<Expected>> {
        let quantized = self.quantizer.quantize(rows_of("x", &self.x, self.size_k)?)?;
        let mut codes = quantized.codes.into_raw_vec_and_offset().0;
        let (mut scales, zeros) = (quantized.scales, quantized.zeros);
        if let Some(found) = &self.found_scales {
            scales.clone_from(found);
        }
        match self.change {
            Change::None if self.found_scales.is_none() => {}
            Change::By128 => scales.iter_mut().for_each(|s| *s *= 127.0 / 128.0),
            Change::Inverted => scales.iter_mut().for_each(|s| *s = 1.0 / *s),
            Change::FirstRow => {
                let first = scales[0];
                scales.fill(first);
            }
            _ => {
                let zero = |m: usize| zeros.as_ref().map_or(0, |z| z[m]);
                let rows = self.x.chunks_exact(self.size_k).enumerate();
                codes = rows.flat_map(|(m, r)| self.other_codes(r, scales[m], zero(m))).collect();
            }
        }
        let [m, k] = [self.size_m, self.size_k];
        let bits = |code: &i8| u32::from(*code as u8);
        let mut all = vec![Expected {
            name: "x_q".to_owned(),
            dtype: DType::I8,
            shape: vec![m, k],
            elements: codes.iter().map(bits).collect(),
            form: Form::lines(Rows::RowK, [k, m], 8, None),
        }];
        if matches!(self.quantizer, Int8Quantizer::Token | Int8Quantizer::TokenAzp) {
            all.push(Expected::floats("x_s", &[m, 1], &scales));
            all.extend(zeros.map(|zeros| Expected {
                name: "x_azp".to_owned(),
                dtype: DType::I32,
                shape: vec![m, 1],
                elements: zeros.iter().map(|&z| z as u32).collect(),
                form: Form::list(m, 32),
            }));
        }
        Ok(all)
    }

    /// Codes without zero points follow from the scales of their rows.
    fn following(&self, name: &str, found: &[u32]) -> Option<Self> {
        let follows = name == "x_s" && self.quantizer == Int8Quantizer::Token;
        follows.then(|| {
            let scales = found.iter().map(|&bits| f32::from_bits(bits)).collect();
            Self { found_scales: Some(scales), ..self.clone() }
        })
    }

    fn mistakes() -> Vec<Mistake<Self>> {
        let of_codes: Vec<Mistake<Self>> = known! {
            "rounding-half-away", "halves were rounded away from zero, not to even" =>
                |c| c.change = Change::HalfAway;
            "rounding-truncated", "quotients were truncated, not rounded" =>
                |c| c.change = Change::Truncated;
            "code-least-127", "codes saturate at -127, not at -128" =>
                |c| c.change = Change::Symmetric;
            "azp-subtracted", "the zero point was subtracted where it is added" =>
                |c| c.change = Change::ZeroSubtracted;
            "azp-missing", "the zero point was not added to the codes" =>
                |c| c.change = Change::ZeroMissing;
        };
        // Codes under a given scale may saturate; a computed scale is an output.
        let of_operator: Vec<Mistake<Self>> = match STATIC {
            true => known! {
                "code-wraps", "codes wrap where they saturate" => |c| c.change = Change::Wrapped;
                "azp-before-rounding", "the zero point was added before the rounding, not after it" =>
                    |c| c.change = Change::RoundedOnce;
            },
            false => known! {
                "scale-by-128", "the scale is the largest magnitude over 128, not over 127" =>
                    |c| if c.quantizer == Int8Quantizer::Token {
                        c.change = Change::By128;
                    };
                "scale-inverted", "the reciprocals of the scales were stored" =>
                    |c| c.change = Change::Inverted;
                "scale-of-first-row", "the first row's scale was stored for all rows" =>
                    |c| c.change = Change::FirstRow;
            },
        };
        of_codes.into_iter().chain(of_operator).collect()
    }
}
