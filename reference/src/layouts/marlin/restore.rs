//! Restores the hub's weight from Marlin's format: the inverse of [`prepare`](super::prepare()) for
//! 16-bit and fp8 activations, so that a converted layer can be computed and compared.

use super::{
    InputDtype, ScaleLayout, ScalePermutation, WeightLayout, ZeroPointLayout, e4m3_scales_inverse,
};
use crate::num::dims::{GroupSize, Shape};
use crate::num::scalar::{ScalarType, float_type};
use crate::num::tensor::{DType, Tensor};
use crate::weight::{Codes, Groups, Table, TableData, Weight};
use crate::{Error, Result};

/// One matrix in the kernel's format. Shapes are those of [`Prepared`](super::Prepared), one expert's.
#[derive(Debug, Clone)]
pub struct Stored<'t> {
    /// Name for errors.
    pub name: String,
    /// Type of a code.
    pub ty: ScalarType,
    /// The model's 16-bit type.
    pub dtype: ScalarType,
    /// Activations inside the product.
    pub input_dtype: InputDtype,
    /// Shape of the matrix.
    pub shape: Shape,
    /// k per scale.
    pub group_size: GroupSize,
    /// Order of the scales' columns.
    pub permutation: ScalePermutation,
    /// int32 `[K / 16, N · 16 / pack]`.
    pub weight: Tensor<'t>,
    /// `[groups, N]`.
    pub scales: Tensor<'t>,
    /// int32 `[groups, N / pack]`.
    pub zeros: Option<Tensor<'t>>,
    /// act-order: `g_idx` sorted, and the permutation that sorts it; int32 `[K]` each.
    pub order: Option<[Tensor<'t>; 2]>,
    /// `[N]`.
    pub bias: Option<Tensor<'t>>,
    /// NVFP4: the kernel's global scale, and the factor that went from it into the block scales.
    pub global: Option<[f32; 2]>,
}

impl Stored<'_> {
    /// The weight that the kernel's bytes represent. Scales of e4m3 codes are f32, without the
    /// kernel's power of two; NVFP4 scales that the format flushed to zero stay zero. Several groups of
    /// scales for int8 activations are f32 of the kernel's integers; what they were before the
    /// rounding is lost, and the activations' scales have the rest, `input_global_scale`.
    ///
    /// # Errors
    /// [`Error::Dtype`], [`Error::Shape`] and [`Error::Value`] for tensors that are not in the
    /// kernel's format; [`Error::Unsupported`] for codes that no kernel for int8 activations reads.
    pub fn restore(self) -> Result<Weight<'static>> {
        let integers = matches!(self.ty, ScalarType::UINT4B8 | ScalarType::UINT4);
        if self.input_dtype == InputDtype::Int8 && !integers {
            let what = format!("{}: {} weights for int8 activations", self.name, self.ty);
            return Err(Error::unsupported(what, "Marlin has kernels for integers of 4 bits"));
        }
        let activations = self.input_dtype.activations();
        let Shape { size_k, size_n } = self.shape;
        let bits = if self.ty.size_bits() > 4 { 8 } else { 4 };
        let order = self.order.as_ref().map(|order| permutation(order, size_k)).transpose()?;
        let layout = WeightLayout::new(self.shape, bits, activations)?;
        self.weight.expect_dtype(&[DType::I32])?;
        let words = self.weight.elements::<u32>();
        let codes = layout.unpack_words(&words, order.as_ref().map(|(_, perm)| perm.as_slice()))?;
        let codes = match self.ty == ScalarType::UINT4B8 && self.input_dtype == InputDtype::Fp8 {
            // The kernel's codes are a sign and a magnitude.
            true => Codes::from_fn(4, self.shape, |k, n| match codes.get(k, n) {
                code @ 0..8 => code + 8,
                code => 15 - code,
            })?,
            false => codes,
        };
        let [groups, cols] = self.scales.dims2()?;
        if cols != size_n {
            let found = [groups, cols];
            return Err(Error::shape(self.scales.name(), &found, format!("[groups, {size_n}]")));
        }
        let zeros = match &self.zeros {
            None => None,
            Some(words) => {
                words.expect_dtype(&[DType::I32])?;
                let layout = ZeroPointLayout::new(groups, size_n, bits, activations)?;
                Some(layout.unpack_words(&words.elements::<u32>(), self.ty)?)
            }
        };
        let bias = self.bias.as_ref().map(|b| bias(b, size_n)).transpose()?;
        let (scales, global_scale) = self.scales(groups, size_n)?;
        let weight = Weight {
            name: self.name,
            ty: self.ty,
            codes,
            scales,
            zeros,
            groups: match order {
                None => Groups::Uniform(self.group_size),
                Some((g_idx, _)) => Groups::Indexed { g_idx, group_size: self.group_size },
            },
            global_scale,
            bias,
        };
        weight.validate()?;
        Ok(weight)
    }

    /// The scales in the hub's order and values, and the global multiplier.
    fn scales(&self, groups: usize, size_n: usize) -> Result<(Table, Option<f32>)> {
        let e4m3 = ScalarType::FLOAT8_E4M3FN;
        let layout = |ty| ScaleLayout::new(groups, size_n, self.permutation, ty);
        match self.scales.dtype() {
            DType::F8E8M0 | DType::U8 => {
                let ty = ScalarType::FLOAT8_E8M0FNU;
                let packed = Table::from_tensor(&self.scales, ty)?;
                let scales =
                    layout(ty)?.of_bytes(self.input_dtype.activations()).unpack(&packed)?;
                match self.input_dtype {
                    // The kernel's scales are larger by 2^6.
                    InputDtype::Fp8 => Ok((scales.map(ty, |b| b.saturating_sub(6)), None)),
                    _ => Ok((scales, None)),
                }
            }
            DType::F8E4M3 => {
                let Some([global, factor]) = self.global else {
                    let what = format!("{}: global scale", self.name);
                    return Err(Error::missing(what, "e4m3 scales of blocks"));
                };
                let packed = Table::from_tensor(&self.scales, e4m3)?;
                let scales = e4m3_scales_inverse(&packed, layout(e4m3)?, factor)?;
                let power = if self.dtype == ScalarType::FLOAT16 { -7 } else { -119 };
                let multiplier = f64::from(global) * f64::from(factor) * f64::from(power).exp2();
                Ok((scales, Some(multiplier as f32)))
            }
            dtype => {
                let Some(ty) = float_type(dtype) else {
                    return Err(Error::dtype(self.scales.name(), dtype, "a type of scales"));
                };
                let scales = layout(ty)?.unpack(&Table::from_tensor(&self.scales, ty)?)?;
                if self.input_dtype == InputDtype::Int8 && groups > 1 {
                    let real = |b: u32| f32::from((b as u16).cast_signed()).to_bits();
                    return Ok((scales.map(ScalarType::FLOAT32, real), None));
                }
                if self.input_dtype == InputDtype::Fp8 {
                    // The kernel's scales are larger by 2^9.
                    let real = |b: u32| ((ty.to_f64(b) / 512.0) as f32).to_bits();
                    return Ok((scales.map(ScalarType::FLOAT32, real), None));
                }
                if self.ty != e4m3 {
                    return Ok((scales, None));
                }
                // The kernel moves e4m3 bits into a wider float; the scale holds the rest of the
                // exponent.
                let power = if dtype == DType::F16 { -8 } else { -120 };
                let real = |b: u32| ((ty.to_f64(b) * f64::from(power).exp2()) as f32).to_bits();
                Ok((scales.map(ScalarType::FLOAT32, real), None))
            }
        }
    }
}

/// `g_idx` in the checkpoint's order of rows, and the permutation.
fn permutation(order: &[Tensor<'_>; 2], size_k: usize) -> Result<(Vec<u32>, Vec<u32>)> {
    for tensor in order {
        tensor.expect_dtype(&[DType::I32])?.expect_shape(&[size_k])?;
    }
    let [sorted, perm] = order.each_ref().map(|t| t.elements::<u32>().into_owned());
    let mut g_idx = vec![u32::MAX; size_k];
    for (i, &k) in perm.iter().enumerate() {
        match g_idx.get_mut(k as usize) {
            Some(place) if *place == u32::MAX => *place = sorted[i],
            _ => {
                let expected = format!("each row below {size_k} once");
                return Err(Error::value(order[1].name(), &[i], k, expected));
            }
        }
    }
    Ok((g_idx, perm))
}

fn bias(bias: &Tensor<'_>, size_n: usize) -> Result<Table> {
    bias.expect_shape(&[size_n])?;
    let Some(ty) = float_type(bias.dtype()) else {
        return Err(Error::dtype(bias.name(), bias.dtype(), "a floating-point type"));
    };
    let layout = ScaleLayout::bias(size_n, ty)?;
    let row = Table::new(ty, 1, size_n, TableData::B16(bias.elements::<u16>().into_owned()))?;
    layout.unpack(&row)
}
