//! Quantization of activations for the products of a method.

use bytemuck::allocation::cast_vec;
use ndarray::{ArrayView2, Axis};

use crate::formats::blocks::BlockFormat;
use crate::moe::{half_type, to_slots};
use crate::num::array::{FloatView2, rows_of};
use crate::num::scalar::ScalarType;
use crate::quantize::{
    Fp8GroupRule, Int8Quantizer, Int8Rule, clear_broken, per_group_fp8, per_group_fp8_with,
    per_tensor_fp8, per_token_fp8, per_token_int8,
};
use crate::{Error, Result};

const E4M3: ScalarType = ScalarType::FLOAT8_E4M3FN;

/// How activations are quantized before a product.
#[derive(Debug, Clone, PartialEq)]
pub enum Quantizer {
    /// Not quantized.
    None,
    /// e4m3fn, a scale for each row ([`crate::quantize::per_token_fp8`]).
    Fp8Token,
    /// e4m3fn, one scale for all rows: a given one, or one from the largest value
    /// ([`crate::quantize::per_tensor_fp8`]). Without a given scale a row's codes depend on the
    /// batch.
    Fp8Tensor(Option<f32>),
    /// e4m3fn, a scale for each group of this many k of a row ([`crate::quantize::per_group_fp8`]).
    Fp8Group(usize),
    /// e4m3fn, a scale for each group of `size` k of a row
    /// ([`crate::quantize::per_group_fp8_with`]).
    Fp8GroupBy {
        /// k of a group.
        size: usize,
        /// The operations.
        rule: Fp8GroupRule,
        /// Whether scales are rounded up to powers of two.
        ue8m0: bool,
    },
    /// int8, with one scale for each row or for all of them, and zero points or none.
    Int8(Int8Quantizer),
    /// int8, a scale for each row ([`Int8Rule::Quotient`]) times this factor: Marlin's kernels for int8
    /// activations, whose group scales are integers under `input_global_scale`.
    Int8Factor(f32),
    /// A block format ([`BlockFormat::quantize`]).
    Block {
        /// Which.
        format: &'static BlockFormat,
        /// Of formats with a global scale: the multiplier of each expert's rows, the reciprocal of the
        /// quantizer's global scale.
        multipliers: Vec<f32>,
    },
}

impl Quantizer {
    /// Type of the codes that enter the product.
    pub fn code_type(&self, dtype: ScalarType) -> ScalarType {
        match self {
            Self::None => dtype,
            Self::Int8(_) | Self::Int8Factor(_) => ScalarType::INT8,
            Self::Block { format, .. } => format.element,
            _ => E4M3,
        }
    }

    /// Short name for reports.
    pub fn name(&self) -> &'static str {
        match self {
            Self::None => "16-bit",
            Self::Fp8Token => "fp8 dynamic per token",
            Self::Fp8Tensor(Some(_)) => "fp8 static per tensor",
            Self::Fp8Tensor(None) => "fp8 dynamic per tensor",
            Self::Fp8Group(_) | Self::Fp8GroupBy { ue8m0: false, .. } => "fp8 dynamic per group",
            Self::Fp8GroupBy { .. } => "fp8 dynamic per group, UE8M0 scales",
            Self::Int8(Int8Quantizer::Token | Int8Quantizer::Expert) | Self::Int8Factor(_) => {
                "int8 dynamic per token"
            }
            Self::Int8(Int8Quantizer::TokenAzp) => "int8 dynamic per token, zero points",
            Self::Int8(Int8Quantizer::Tensor(_)) => "int8 static per tensor",
            Self::Int8(Int8Quantizer::TensorAzp(..)) => "int8 static per tensor, zero point",
            Self::Block { format, .. } => format.name,
        }
    }

    /// Quantizes rows `[M, size_k]`, bits of `dtype` (float16 or bfloat16). `expert_of` has the expert
    /// of each row, which block formats with a global scale read; a row without one is quantized with the
    /// multiplier 1.
    ///
    /// Scales computed from a row with an infinity or NaN are NaN, so its products are NaN; a
    /// computed scale for all rows makes all products NaN. A static scale (`Fp8Tensor(Some(_))`) is
    /// unchanged and saturates such values as upstream does: [`crate::quantize::per_tensor_fp8`].
    ///
    /// # Errors
    /// As the functions of [`crate::quantize`]; [`Error::Shape`] if the parts differ in their rows;
    /// [`Error::Unsupported`] for f32; [`Error::Value`] for an expert without a multiplier.
    pub fn quantize<'a>(
        &self,
        x: impl Into<FloatView2<'a>>,
        expert_of: &[Option<usize>],
    ) -> Result<Activations> {
        let x = x.into();
        let (dtype, size_k) = (x.scalar_type(), x.shape()[1]);
        half_type(dtype)?;
        if size_k == 0 || x.shape()[0] != expert_of.len() {
            let expected = format!("[{}, 1 or more]", expert_of.len());
            return Err(Error::shape("activations", x.shape(), expected));
        }
        let ty = self.code_type(dtype);
        if *self == Self::None {
            let codes = x.bits_of("activations", dtype)?.iter().map(|&b| b.into()).collect();
            let scales = Scales::None;
            return Ok(Activations { ty, size_k, codes, scales, zeros: None, globals: None });
        }
        let mut values = x.widened().into_owned();
        let broken = match self {
            Self::Fp8Tensor(Some(_))
            | Self::Int8(Int8Quantizer::Tensor(_) | Int8Quantizer::TensorAzp(..)) => Vec::new(),
            _ => clear_broken(&mut values, size_k),
        };
        let (mut zeros, mut globals) = (None, None);
        let rows = || rows_of("activations", &values, size_k);
        let (codes, mut scales): (Vec<u8>, _) = match self {
            Self::None => (Vec::new(), Scales::None),
            Self::Fp8Token => {
                let (codes, scales) = per_token_fp8(rows()?, None)?.into_vecs();
                (cast_vec(codes), Scales::Row(scales))
            }
            Self::Fp8Tensor(scale) => {
                let (codes, scales) = per_tensor_fp8(rows()?, *scale)?.into_vecs();
                let scale = if broken.is_empty() { scales[0] } else { f32::NAN };
                (cast_vec(codes), Scales::Row(vec![scale; expert_of.len()]))
            }
            Self::Fp8Group(size) => {
                let (codes, values) = per_group_fp8(rows()?, *size)?.into_vecs();
                (cast_vec(codes), Scales::Group { size: *size, values })
            }
            Self::Fp8GroupBy { size, rule, ue8m0 } => {
                let (codes, values) =
                    per_group_fp8_with(rows()?, *size, *rule, *ue8m0)?.into_vecs();
                (cast_vec(codes), Scales::Group { size: *size, values })
            }
            Self::Int8Factor(factor) => {
                let (codes, scales) = per_token_int8(rows()?, Int8Rule::Quotient)?.into_vecs();
                (cast_vec(codes), Scales::Row(scales.iter().map(|s| s * factor).collect()))
            }
            Self::Int8(quantizer) => {
                let quantized = quantizer.quantize(rows()?)?;
                zeros = quantized.zeros;
                let codes = quantized.codes.into_raw_vec_and_offset().0;
                (cast_vec(codes), Scales::Row(quantized.scales))
            }
            Self::Block { format, multipliers } => {
                let (codes, scales) = if format.has_global_scale() {
                    let of_rows = row_multipliers(multipliers, expert_of)?;
                    let quantized = quantize_rows(format, rows()?, &of_rows)?;
                    globals = Some(of_rows);
                    quantized
                } else {
                    (format.quantize)(rows()?.into(), 1.0)?.into_vecs()
                };
                (
                    codes,
                    Scales::Group { size: format.block, values: decoded(format.scale, &scales) },
                )
            }
        };
        if let Scales::Row(values) | Scales::Group { values, .. } = &mut scales {
            let per_row = values.len() / expert_of.len().max(1);
            for row in broken {
                values[row * per_row..][..per_row].fill(f32::NAN);
            }
        }
        let codes = codes.into_iter().map(u32::from).collect();
        Ok(Activations { ty, size_k, codes, scales, zeros, globals })
    }
}

/// The exact values of 8-bit codes.
fn decoded(ty: ScalarType, codes: &[u8]) -> Vec<f32> {
    codes.iter().map(|&c| ty.to_f64(c.into()) as f32).collect()
}

/// The multiplier of each row.
fn row_multipliers(multipliers: &[f32], expert_of: &[Option<usize>]) -> Result<Vec<f32>> {
    let of = |(row, expert): (usize, &Option<usize>)| match expert {
        None => Ok(1.0),
        Some(e) => multipliers.get(*e).copied().ok_or_else(|| {
            let expected = format!("an expert below {}", multipliers.len());
            Error::value("expert_of", &[row], e, expected)
        }),
    };
    expert_of.iter().enumerate().map(of).collect()
}

/// Codes and block scales of rows, each under the reciprocal of its multiplier.
fn quantize_rows(
    format: &BlockFormat,
    values: ArrayView2<'_, f32>,
    multipliers: &[f32],
) -> Result<(Vec<u8>, Vec<u8>)> {
    let (mut codes, mut scales) = (Vec::new(), Vec::new());
    for (row, multiplier) in values.axis_chunks_iter(Axis(0), 1).zip(multipliers) {
        let quantized = (format.quantize)(row.into(), 1.0 / multiplier)?;
        codes.extend(quantized.codes);
        scales.extend(quantized.scales);
    }
    Ok((codes, scales))
}

/// Scales of quantized rows.
#[derive(Debug, Clone, PartialEq)]
pub enum Scales {
    /// No scales: the codes are the values.
    None,
    /// `[M]`.
    Row(Vec<f32>),
    /// `[M, size_k / size]`.
    Group {
        /// k that share a scale.
        size: usize,
        /// The scales.
        values: Vec<f32>,
    },
}

/// Quantized rows.
#[derive(Debug, Clone, PartialEq)]
pub struct Activations {
    /// Type of the codes.
    pub ty: ScalarType,
    /// k of a row.
    pub size_k: usize,
    /// `[M, size_k]`, zero-extended.
    pub codes: Vec<u32>,
    /// Scales of the codes.
    pub scales: Scales,
    /// `[M]`: what is subtracted from the codes of a row of int8.
    pub zeros: Option<Vec<i32>>,
    /// `[M]`: NVFP4's multiplier of each row's sum.
    pub globals: Option<Vec<f32>>,
}

impl Activations {
    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.codes.len() / self.size_k
    }

    /// Repeats rows of tokens as rows of slots ([`to_slots`]).
    #[must_use]
    pub fn to_slots(&self, top_k: usize) -> Self {
        let each = |values: &[f32], per_row: usize| to_slots(values, per_row, top_k);
        Self {
            codes: to_slots(&self.codes, self.size_k, top_k),
            scales: match &self.scales {
                Scales::None => Scales::None,
                Scales::Row(values) => Scales::Row(each(values, 1)),
                Scales::Group { size, values } => {
                    Scales::Group { size: *size, values: each(values, self.size_k / size) }
                }
            },
            zeros: self.zeros.as_ref().map(|zeros| to_slots(zeros, 1, top_k)),
            globals: self.globals.as_ref().map(|g| each(g, 1)),
            ..*self
        }
    }

    /// Codes of row `m`.
    pub fn row(&self, m: usize) -> &[u32] {
        &self.codes[m * self.size_k..][..self.size_k]
    }

    /// The scale at (`m`, `k`); 1 without scales.
    pub fn scale(&self, m: usize, k: usize) -> f32 {
        match &self.scales {
            Scales::None => 1.0,
            Scales::Row(values) => values[m],
            Scales::Group { size, values } => values[m * (self.size_k / size) + k / size],
        }
    }

    /// The zero point of row `m`; 0 without zero points.
    pub fn zero(&self, m: usize) -> i32 {
        self.zeros.as_ref().map_or(0, |zeros| zeros[m])
    }

    /// The exact value at (`m`, `k`) without the row's global multiplier: a code, less the row's zero
    /// point, times a scale of 24 bits.
    pub fn value(&self, m: usize, k: usize) -> f64 {
        let code = self.ty.to_f64(self.codes[m * self.size_k + k]) - f64::from(self.zero(m));
        code * f64::from(self.scale(m, k))
    }
}

impl std::fmt::Display for Quantizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Fp8GroupBy { size, rule, .. } if *rule != Fp8GroupRule::Quotient => {
                let known = Fp8GroupRule::NAMED.iter().find(|(_, named)| named == rule);
                let name = known.map_or("", |(name, _)| name);
                write!(f, "{} of {size}, by {name}", self.name())
            }
            Self::Fp8Group(size) | Self::Fp8GroupBy { size, .. } => {
                write!(f, "{} of {size}", self.name())
            }
            _ => f.write_str(self.name()),
        }
    }
}
