//! AWQ: codes packed along N in an interleaved order, always with zero points.
//!
//! Source: AutoAWQ's GEMM tensors as vLLM 0.21.0 `awq_marlin.py` loads them.

use rayon::prelude::*;

use crate::formats::parts::{
    bias_table, bias_tensor, check_bits, expect_type, float_tensor, full, scale_table, sizes,
    unpacked, zero_codes, zero_table,
};
use crate::formats::words::{int_tensor, int_words, pack_rows, transpose_fields, unpack_rows};
use crate::num::dims::{GroupSize, Shape};
use crate::num::scalar::ScalarType;
use crate::num::tensor::{DType, Tensor};
use crate::weight::{Codes, Groups, Weight};
use crate::{Error, Result};

/// The storage of an AWQ matrix according to its config.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scheme {
    /// 4 or 8.
    pub bits: u32,
    /// k per scale.
    pub group_size: GroupSize,
}

/// The column, within a group of eight (four for 8 bits), of each field of a word.
pub fn column_order(bits: u32) -> &'static [usize] {
    if bits == 4 { &[0, 2, 4, 6, 1, 3, 5, 7] } else { &[0, 2, 1, 3] }
}

/// The tensors of one matrix.
#[derive(Debug, Clone, PartialEq)]
pub struct AwqTensors<'a> {
    /// `[size_k, size_n / pack]` int32.
    pub qweight: Tensor<'a>,
    /// `[groups, size_n]` f16, bf16 or f32.
    pub scales: Tensor<'a>,
    /// `[groups, size_n / pack]` int32, interleaved like `qweight`.
    pub qzeros: Tensor<'a>,
    /// `[size_n]`.
    pub bias: Option<Tensor<'a>>,
}

impl AwqTensors<'_> {
    /// The weight, of type `uint4` or `uint8` with zero points.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Dtype`]; [`Error::Value`] for scales that are not finite;
    /// [`Error::Size`] if K does not fill whole words or groups.
    pub fn unpack(self, name: &str, scheme: &Scheme) -> Result<Weight<'static>> {
        check_bits("AWQ", scheme.bits)?;
        let bits = scheme.bits;
        let pack = (32 / bits) as usize;
        let [size_k, packed_n] = sizes(&self.qweight)?;
        let shape = Shape::new(size_k, unpacked(&self.qweight, packed_n, pack)?);
        let groups = scheme.group_size.groups(shape.k())?;
        let scales = scale_table(&self.scales, Some(groups), shape.size_n)?;
        let packed = [groups, packed_n];
        self.qzeros.expect_dtype(&[DType::I32, DType::U32])?.expect_shape(&packed)?;
        let ty = if bits == 4 { ScalarType::UINT4 } else { ScalarType::UINT8 };
        let zeros = self.qzeros.elements::<u32>();
        let zeros = unpack_rows(&zeros, shape.size_n, bits, column_order(bits));
        let weight = Weight {
            name: name.to_owned(),
            ty,
            bias: bias_table(self.bias.as_ref(), shape.size_n)?,
            zeros: Some(zero_table(ty, groups, shape.size_n, zeros)?),
            codes: along_k(bits, shape, &int_words(self.qweight)?)?,
            scales,
            groups: Groups::Uniform(scheme.group_size),
            global_scale: None,
        };
        weight.validate()?;
        Ok(weight)
    }

    /// The tensors of `weight`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for types without zero points and for act-order, [`Error::Size`] if N
    /// does not fill whole words, and the errors of [`Weight::validate`].
    pub fn pack(weight: &Weight<'_>) -> Result<AwqTensors<'static>> {
        let name = &weight.name;
        expect_type("AWQ", name, weight.ty, &[ScalarType::UINT4, ScalarType::UINT8])?;
        weight.validate()?;
        if matches!(weight.groups, Groups::Indexed { .. }) {
            return Err(Error::unsupported(format!("{name}: act-order"), "AWQ has no g_idx"));
        }
        let (Shape { size_k, size_n }, bits) = (weight.shape(), weight.codes.bits());
        let (pack, groups) = (weight.codes.pack(), weight.scales.rows());
        if !size_n.is_multiple_of(pack) {
            let expected = format!("a multiple of {pack}");
            return Err(Error::size(format!("{name}: size_n"), size_n, expected));
        }
        let order = column_order(bits);
        let words = match bits {
            4 => turn_back::<8>(weight.codes.words(), size_n, order),
            _ => turn_back::<4>(weight.codes.words(), size_n, order),
        };
        let zeros = pack_rows(zero_codes(name, weight.zeros.as_ref())?, size_n, bits, order);
        Ok(AwqTensors {
            qweight: int_tensor(full(name, "qweight"), vec![size_k, size_n / pack], words)?,
            scales: float_tensor(name, "scales", &weight.scales)?,
            qzeros: int_tensor(full(name, "qzeros"), vec![groups, size_n / pack], zeros)?,
            bias: bias_tensor(name, weight.bias.as_ref())?,
        })
    }
}

/// Converts words `[size_k, size_n / pack]` packed along N to codes packed along K.
fn along_k(bits: u32, shape: Shape, words: &[u32]) -> Result<Codes<'static>> {
    let rows = shape.k().packed(bits)?.0;
    let mut out = vec![0u32; rows * shape.size_n];
    match bits {
        4 => turn::<8>(words, &mut out, shape.size_n, column_order(4)),
        _ => turn::<4>(words, &mut out, shape.size_n, column_order(8)),
    }
    Codes::from_words(bits, shape, out)
}

/// Transposes the square of fields of each `P` rows and each column of words.
fn turn<const P: usize>(words: &[u32], out: &mut [u32], size_n: usize, order: &[usize]) {
    let per_row = size_n / P;
    out.par_chunks_mut(size_n).zip(words.par_chunks(size_n)).for_each(|(line, square)| {
        for (w, group) in line.chunks_exact_mut(P).enumerate() {
            let mut fields = std::array::from_fn(|k| square[k * per_row + w]);
            transpose_fields::<P>(&mut fields);
            for (&column, field) in order.iter().zip(fields) {
                group[column] = field;
            }
        }
    });
}

/// The inverse of [`turn`].
fn turn_back<const P: usize>(words: &[u32], size_n: usize, order: &[usize]) -> Vec<u32> {
    let per_row = size_n / P;
    let mut out = vec![0u32; words.len()];
    out.par_chunks_mut(size_n).zip(words.par_chunks(size_n)).for_each(|(square, line)| {
        for (w, group) in line.chunks_exact(P).enumerate() {
            let mut fields = std::array::from_fn(|i| group[order[i]]);
            transpose_fields::<P>(&mut fields);
            for (k, field) in fields.into_iter().enumerate() {
                square[k * per_row + w] = field;
            }
        }
    });
    out
}
