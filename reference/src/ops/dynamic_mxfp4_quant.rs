//! Quantization of activations to MXFP4: e2m1 codes with a UE8M0 scale for each 32 values of a row.

use serde_json::{Value, json};

use crate::Result;
use crate::judge::compare::{Elements, Rows};
use crate::judge::{Declared, OutputReport};
use crate::moe::widen;
use crate::num::array::rows_of;
use crate::num::scalar::ScalarType;
use crate::num::tensor::DType;
use crate::ops::case::Case;
use crate::ops::computation::{Computation, Defined, Expected, Form, Mistake, bitwise, ids, known};
use crate::ops::draw::{Rng, activations};
use crate::ops::schema::{CaseError, Inputs, Reader, TensorRule, finite, stored};
use crate::ops::tensors::{HALF, HALF_TYPES, input, is, output, whole};
use crate::ops::{CaseConfig, Operation};
use crate::quantize::{MxRounding, mx_by};

/// Values under one scale.
const BLOCK: usize = 32;

/// Types of the scales: bytes, or UE8M0 by name.
const SCALES: &[DType] = &[DType::U8, DType::F8E8M0];

/// Config of `dynamic_mxfp4_quant`: activations to e2m1, with a UE8M0 scale for each 32 k.
///
/// in: `x` `[M, K]`. out: `x_fp4` `[M, K / 2]` uint8, even k in the low nibble; `x_scale` `[M, K / 32]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DynamicMxfp4QuantConfig {
    /// Type of x.
    pub dtype: ScalarType,
    /// Rows.
    pub size_m: usize,
    /// Columns: a multiple of 32.
    pub size_k: usize,
    /// How a block's largest magnitude becomes its scale.
    pub scale_rounding: MxRounding,
}

impl Operation for DynamicMxfp4QuantConfig {
    fn keys() -> &'static [&'static str] {
        &["dtype", "size_m", "size_k", "scale_rounding"]
    }

    fn key_meanings() -> &'static [(&'static str, &'static str)] {
        &[("scale_rounding", "how a block's largest magnitude becomes a power of two")]
    }

    fn read(r: &Reader<'_>) -> Result<Self, CaseError> {
        let rounding = r.optional_name("scale_rounding", MxRounding::NAMED)?;
        let config = Self {
            dtype: r.name("dtype", HALF_TYPES)?,
            size_m: r.count("size_m")?,
            size_k: r.size("size_k")?,
            scale_rounding: rounding.unwrap_or(MxRounding::Floor),
        };
        whole(r, "size_k", config.size_k, BLOCK)?;
        Ok(config)
    }

    fn json(&self) -> Value {
        json!({
            "dtype": self.dtype.name(), "size_m": self.size_m, "size_k": self.size_k,
            "scale_rounding": self.scale_rounding.name(),
        })
    }

    fn tensors(&self, _experts: usize) -> Result<Vec<TensorRule>> {
        let (m, k) = (self.size_m, self.size_k);
        Ok(vec![
            input("x", &[stored(self.dtype)], &[is(m), is(k)]),
            output("x_fp4", &[DType::U8], &[is(m), is(k / 2)]),
            output("x_scale", SCALES, &[is(m), is(k / BLOCK)]),
        ])
    }

    fn check_inputs(&self, inputs: &Inputs<'_>) -> Result<()> {
        finite(&inputs["x"])
    }

    fn lattice() -> Result<Vec<Self>> {
        let mut all = Vec::new();
        for dtype in HALF {
            for &(_, scale_rounding) in MxRounding::NAMED {
                for (size_m, size_k) in [(1, 32), (3, 96), (5, 256), (17, 64)] {
                    all.push(Self { dtype, size_m, size_k, scale_rounding });
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
        case.add_input("x", activations(rng, self.dtype, self.size_m, self.size_k)?);
        Ok(())
    }

    fn judge(&self, case: &Case<'_>, _declared: &Declared) -> Result<Vec<OutputReport>> {
        bitwise(case, &Quantization::new(case, self)?)
    }

    fn with_one_row(&self) -> Option<(CaseConfig, &'static [&'static str])> {
        Some((Self { size_m: 1, ..self.clone() }.into(), &["x"]))
    }
}

/// `dynamic_mxfp4_quant`.
#[derive(Debug, Clone)]
struct Quantization {
    config: DynamicMxfp4QuantConfig,
    x: Vec<f32>,
    /// Whether scales are computed from the largest value, not the largest magnitude.
    unsigned: bool,
    /// Added to the exponents of scales, but not of codes.
    shift: i32,
    /// Whether the first scale of a row is that of all of its blocks.
    by_row: bool,
    /// Whether values between two codes go away from zero.
    half_away: bool,
    swap: bool,
    /// Scales that a case states, by which its codes are to be judged.
    found_scales: Option<Vec<u8>>,
}

impl Quantization {
    fn new(case: &Case<'_>, c: &DynamicMxfp4QuantConfig) -> Result<Self> {
        let x = case.input("x")?.elements::<u16>();
        Ok(Self {
            config: c.clone(),
            x: x.iter().map(|&bits| widen(c.dtype, bits)).collect(),
            unsigned: false,
            shift: 0,
            by_row: false,
            half_away: false,
            swap: false,
            found_scales: None,
        })
    }

    /// Codes, one to a byte, and exponents of scales plus 127.
    fn quantized(&self) -> Result<(Vec<u8>, Vec<u8>)> {
        let (k, ty) = (self.config.size_k, ScalarType::FLOAT4_E2M1F);
        let made = |values: &[f32]| {
            let rows = rows_of("x", values, k)?;
            let (codes, scales) = mx_by(rows, ty, 2, self.config.scale_rounding)?.into_vecs();
            Ok::<_, crate::Error>((codes, scales.iter().map(|s| s.to_bits()).collect::<Vec<u8>>()))
        };
        let (codes, mut scales) = made(&self.x)?;
        if self.unsigned {
            let positive: Vec<f32> = self.x.iter().map(|x| x.max(0.0)).collect();
            scales = made(&positive)?.1;
        } else if let Some(found) = &self.found_scales {
            scales.clone_from(found);
        } else if !self.by_row && !self.half_away {
            return Ok((codes, scales));
        }
        if self.by_row {
            for row in scales.chunks_exact_mut(k / BLOCK) {
                let largest = row.iter().copied().max().unwrap_or_default();
                row.fill(largest);
            }
        }
        let code = |(i, &x): (usize, &f32)| {
            let value = f64::from(x) / (f64::from(scales[i / BLOCK]) - 127.0).exp2();
            let even = ty.encode_rne_saturating(value) as u8;
            // Just above a tie the nearest code is the one away from zero.
            let above = ty.encode_rne_saturating(value * (1.0 + 1e-9)) as u8;
            if self.half_away { above } else { even }
        };
        Ok((self.x.iter().enumerate().map(code).collect(), scales))
    }
}

impl Computation for Quantization {
    fn outputs(&self) -> Result<Vec<Expected>> {
        let (m, k) = (self.config.size_m, self.config.size_k);
        let (codes, scales) = self.quantized()?;
        let [low, high] = if self.swap { [1, 0] } else { [0, 1] };
        let byte = |pair: &[u8]| u32::from(pair[low] | pair[high] << 4);
        let shifted = |&e: &u8| (i32::from(e) + self.shift).rem_euclid(256) as u32;
        let bytes: Elements = codes.chunks_exact(2).map(byte).collect();
        Ok(vec![
            Expected {
                name: "x_fp4".to_owned(),
                dtype: DType::U8,
                shape: vec![m, k / 2],
                elements: bytes,
                form: Form::lines(Rows::RowK, [k, m], 4, None),
            },
            Expected {
                name: "x_scale".to_owned(),
                dtype: DType::U8,
                shape: vec![m, k / BLOCK],
                elements: scales.iter().map(shifted).collect(),
                form: Form::lines(Rows::RowGroup, [k / BLOCK, m], 8, None),
            },
        ])
    }

    /// Codes follow from the scales of their blocks.
    fn following(&self, name: &str, found: &[u32]) -> Option<Self> {
        let scales = || found.iter().map(|&bits| bits as u8).collect();
        (name == "x_scale").then(|| Self { found_scales: Some(scales()), ..self.clone() })
    }

    fn mistakes() -> Vec<Mistake<Self>> {
        known! {
            "scale-rounding-floor", "scales follow `floor`, not the declared rule" =>
                |c| c.config.scale_rounding = MxRounding::Floor;
            "scale-rounding-even", "scales follow `even`, not the declared rule" =>
                |c| c.config.scale_rounding = MxRounding::Even;
            "scale-rounding-ceil", "scales follow `ceil`, not the declared rule" =>
                |c| c.config.scale_rounding = MxRounding::Ceil;
            "scale-rounding-up", "scales follow `round_up`, not the declared rule" =>
                |c| c.config.scale_rounding = MxRounding::RoundUp;
            "nibble-order", "the nibbles of each byte are exchanged: even k in the high nibble" =>
                |c| c.swap = true;
            "scale-exponent-less-one", "the exponents of the stored scales are one too small" =>
                |c| c.shift = -1;
            "scale-exponent-more-one", "the exponents of the stored scales are one too large" =>
                |c| c.shift = 1;
            "scale-exponent-unbiased", "the stored exponents have no bias of 127" =>
                |c| c.shift = -127;
            "scale-of-row", "one scale was computed for a whole row" => |c| c.by_row = true;
            "absmax-without-sign", "the largest value was taken for the largest magnitude" =>
                |c| c.unsigned = true;
            "rows-of-magnitudes", "the signs were lost" =>
                |c| c.x.iter_mut().for_each(|x| *x = x.abs());
            "ties-away", "values between two codes went away from zero, not to the even code" =>
                |c| c.half_away = true;
        }
    }
}
