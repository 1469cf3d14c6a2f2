//! compressed-tensors: `pack-quantized` (int32 words along K) and `int-quantized` (one int8 each).
//! Both store signed values; the packed form adds 2^(bits − 1) first.
//!
//! Source: compressed-tensors 0.20 `pack_to_int32`, vLLM 0.21.0 `compressed_tensors_wNa16.py`.

use std::borrow::Cow;

use crate::formats::integers::{IntFormat, IntNames, IntStorage, Packing};
use crate::formats::parts::{
    bias_table, bias_tensor, check_bits, expect_type, float_tensor, full, g_idx_tensor,
    groups_from, scale_columns, sizes, unpacked, zero_codes, zero_table,
};
use crate::formats::words::{
    codes_from_columns, columns_from_codes, int_tensor, int_words, pack_nibbles, pack_rows,
    plain_order, transposed, unpack_rows, words,
};
use crate::num::dims::Shape;
use crate::num::scalar::ScalarType;
use crate::num::tensor::{DType, Tensor};
use crate::weight::{Codes, Groups, Table, Weight};
use crate::{Error, Result};

/// Names of the tensors of `pack-quantized`, and of both forms in the kernel's format.
static PACKED_NAMES: IntNames = IntNames {
    weight: "weight_packed",
    scales: "weight_scale",
    zeros: "weight_zero_point",
    g_idx: "weight_g_idx",
};

/// The descriptor of `pack-quantized`.
pub static PACKED: IntFormat = IntFormat {
    name: "compressed-tensors pack-quantized",
    case_types: &[],
    names: &PACKED_NAMES,
    kernel_names: &PACKED_NAMES,
    columns_first: true,
    packing: Packing::AlongK,
    act_order: true,
    symmetric_zero: |bits| 1 << (bits - 1),
    moe_zero_points: false,
    moe_oracle: false,
    config: None,
    unpack: |t, name, storage| {
        PackedTensors {
            weight_packed: t.weight,
            weight_scale: t.scales,
            weight_zero_point: t.zeros,
            weight_shape: None,
            weight_g_idx: t.g_idx,
            bias: t.bias,
        }
        .unpack(name, storage)
    },
};

/// The descriptor of `int-quantized`.
pub static BYTES: IntFormat = IntFormat {
    name: "compressed-tensors int-quantized",
    names: &IntNames { weight: "weight", ..PACKED_NAMES },
    packing: Packing::Bytes,
    // Signed bytes hold the distance to the middle of the range.
    symmetric_zero: |_| 0,
    unpack: |t, name, storage| {
        ByteTensors {
            weight: t.weight,
            weight_scale: t.scales,
            weight_zero_point: t.zeros,
            weight_g_idx: t.g_idx,
            bias: t.bias,
        }
        .unpack(name, storage)
    },
    ..PACKED
};

/// The four types that both forms hold.
const TYPES: &[ScalarType] =
    &[ScalarType::UINT4B8, ScalarType::UINT8B128, ScalarType::UINT4, ScalarType::UINT8];

/// The tensors of one matrix of `pack-quantized`.
#[derive(Debug, Clone, PartialEq)]
pub struct PackedTensors<'a> {
    /// `[size_n, size_k / pack]` int32, packed along K.
    pub weight_packed: Tensor<'a>,
    /// `[size_n, groups]` f16, bf16 or f32.
    pub weight_scale: Tensor<'a>,
    /// `[ceil(size_n / pack), groups]` int32, packed along N. Required unless symmetric.
    pub weight_zero_point: Option<Tensor<'a>>,
    /// `[2]` int64: size_n, size_k. For a part of a rank, the shape of the part.
    pub weight_shape: Option<Tensor<'a>>,
    /// `[size_k]` int32. Required with act-order. If all entries are −1, there is no act-order.
    pub weight_g_idx: Option<Tensor<'a>>,
    /// `[size_n]`.
    pub bias: Option<Tensor<'a>>,
}

/// The tensors of one matrix of `int-quantized`.
#[derive(Debug, Clone, PartialEq)]
pub struct ByteTensors<'a> {
    /// `[size_n, size_k]` int8; 4-bit values lie in −8..=7.
    pub weight: Tensor<'a>,
    /// `[size_n, groups]` f16, bf16 or f32.
    pub weight_scale: Tensor<'a>,
    /// `[size_n, groups]` int8. Required unless symmetric.
    pub weight_zero_point: Option<Tensor<'a>>,
    /// `[size_k]` int32. Required with act-order. If all entries are −1, there is no act-order.
    pub weight_g_idx: Option<Tensor<'a>>,
    /// `[size_n]`.
    pub bias: Option<Tensor<'a>>,
}

/// Reads scales and groups, which both forms store in the same way.
fn scales_and_groups(
    name: &str,
    scheme: &IntStorage,
    shape: Shape,
    scale: &Tensor<'_>,
    g_idx: Option<&Tensor<'_>>,
) -> Result<(Table, Groups)> {
    // A file that was never ordered may still carry the index, filled with −1.
    let unset = |t: &&Tensor<'_>| {
        t.dtype() == DType::I32 && !t.is_empty() && t.elements::<i32>().iter().all(|&g| g == -1)
    };
    let g_idx = g_idx.filter(|t| !unset(t));
    let uniform = || scheme.group_size.groups(shape.k());
    match (g_idx, scheme.has_act_order()) {
        (_, false) => {
            let scales = scale_columns(scale, Some(uniform()?), shape.size_n)?;
            Ok((scales, Groups::Uniform(scheme.group_size)))
        }
        (Some(g_idx), true) => {
            let scales = scale_columns(scale, None, shape.size_n)?;
            let groups = groups_from(g_idx, shape, scales.rows(), scheme.group_size)?;
            Ok((scales, groups))
        }
        (None, true) => Err(Error::missing(full(name, "weight_g_idx"), "act-order")),
    }
}

/// The zero points of the scheme; `None` if it is symmetric.
fn zeros_of<'t, 'a>(
    name: &str,
    scheme: &IntStorage,
    zeros: Option<&'t Tensor<'a>>,
) -> Result<Option<&'t Tensor<'a>>> {
    match zeros.filter(|_| !scheme.symmetric) {
        None if !scheme.symmetric => {
            Err(Error::missing(full(name, "weight_zero_point"), "an asymmetric matrix"))
        }
        zeros => Ok(zeros),
    }
}

/// Builds and validates the weight.
fn weight_of(
    name: &str,
    scheme: &IntStorage,
    codes: Codes<'static>,
    scales: Table,
    zeros: Option<Table>,
    groups: Groups,
    bias: Option<Table>,
) -> Result<Weight<'static>> {
    let (name, ty) = (name.to_owned(), scheme.ty());
    let weight = Weight { name, ty, codes, scales, zeros, groups, global_scale: None, bias };
    weight.validate()?;
    Ok(weight)
}

impl PackedTensors<'_> {
    /// The weight.
    ///
    /// # Errors
    /// [`Error::Shape`] (also if `weight_shape` contradicts it), [`Error::Dtype`],
    /// [`Error::Missing`]; [`Error::Value`] for scales that are not finite and a group out of
    /// range; [`Error::Size`] if K does not fill whole groups.
    pub fn unpack(self, name: &str, scheme: &IntStorage) -> Result<Weight<'static>> {
        check_bits("pack-quantized", scheme.bits)?;
        let pack = (32 / scheme.bits) as usize;
        let [size_n, packed_k] = sizes(&self.weight_packed)?;
        let shape = Shape::new(unpacked(&self.weight_packed, packed_k, pack)?, size_n);
        if let Some(declared) = &self.weight_shape {
            check_declared(declared, shape)?;
        }
        let g_idx = self.weight_g_idx.as_ref();
        let (scales, groups) = scales_and_groups(name, scheme, shape, &self.weight_scale, g_idx)?;
        let zeros = match zeros_of(name, scheme, self.weight_zero_point.as_ref())? {
            None => None,
            Some(zeros) => {
                let (rows, groups) = (size_n.div_ceil(pack), scales.rows());
                zeros.expect_dtype(&[DType::I32, DType::U32])?.expect_shape(&[rows, groups])?;
                let words = transposed(&zeros.elements::<u32>(), rows, groups);
                let codes = unpack_rows(&words, size_n, scheme.bits, plain_order(scheme.bits));
                Some(zero_table(scheme.ty(), groups, size_n, codes)?)
            }
        };
        let bias = bias_table(self.bias.as_ref(), size_n)?;
        let codes = codes_from_columns(scheme.bits, shape, &int_words(self.weight_packed)?)?;
        weight_of(name, scheme, codes, scales, zeros, groups, bias)
    }

    /// The tensors of `weight`; `weight_g_idx` only with act-order.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for types that are not integers, and the errors of
    /// [`Weight::validate`].
    pub fn pack(weight: &Weight<'_>) -> Result<PackedTensors<'static>> {
        expect_type("pack-quantized", &weight.name, weight.ty, TYPES)?;
        weight.validate()?;
        let name = &weight.name;
        let (Shape { size_k, size_n }, bits) = (weight.shape(), weight.codes.bits());
        let (pack, groups) = (weight.codes.pack(), weight.scales.rows());
        let weight_zero_point = match weight.needs_zeros() {
            false => None,
            true => {
                let codes = zero_codes(name, weight.zeros.as_ref())?;
                let words = pack_rows(codes, size_n, bits, plain_order(bits));
                let rows = size_n.div_ceil(pack);
                let words = transposed(&words, groups, rows);
                Some(int_tensor(full(name, "weight_zero_point"), vec![rows, groups], words)?)
            }
        };
        let declared = vec![size_n as i64, size_k as i64];
        let shape = full(name, "weight_shape");
        Ok(PackedTensors {
            weight_packed: int_tensor(
                full(name, "weight_packed"),
                vec![size_n, size_k / pack],
                columns_from_codes(&weight.codes),
            )?,
            weight_scale: float_tensor(name, "weight_scale", &weight.scales.transposed())?,
            weight_zero_point,
            weight_shape: Some(Tensor::from_vec(shape, DType::I64, vec![2], declared)?),
            weight_g_idx: pack_g_idx(weight)?,
            bias: bias_tensor(name, weight.bias.as_ref())?,
        })
    }
}

/// Checks `weight_shape` against `weight_packed`.
fn check_declared(declared: &Tensor<'_>, shape: Shape) -> Result<()> {
    declared.expect_dtype(&[DType::I64, DType::I32])?.expect_shape(&[2])?;
    let found: Vec<i64> = match declared.dtype() {
        DType::I64 => declared.elements::<i64>().to_vec(),
        _ => declared.elements::<i32>().iter().map(|&v| v.into()).collect(),
    };
    if found == [shape.size_n as i64, shape.size_k as i64] {
        return Ok(());
    }
    let expected = format!("[{}, {}], as `weight_packed` holds", shape.size_n, shape.size_k);
    Err(Error::value(declared.name(), &[], format!("{found:?}"), expected))
}

fn pack_g_idx(weight: &Weight<'_>) -> Result<Option<Tensor<'static>>> {
    match &weight.groups {
        Groups::Uniform(_) => Ok(None),
        indexed => {
            let name = full(&weight.name, "weight_g_idx");
            g_idx_tensor(name, indexed, weight.shape().size_k).map(Some)
        }
    }
}

/// 2^(bits − 1), the offset that packing adds to a signed value.
fn offset(bits: u32) -> u8 {
    1 << (bits - 1)
}

/// Signed values of `bits` to codes, or the first that does not fit.
fn codes_of(tensor: &Tensor<'_>, bits: u32) -> Result<Vec<u8>> {
    tensor.expect_dtype(&[DType::I8])?;
    let values = tensor.elements::<i8>();
    if bits == 4
        && let Some(i) = values.iter().position(|v| !(-8..=7).contains(v))
    {
        let index = super::unflatten(tensor.shape(), i);
        return Err(Error::value(tensor.name(), &index, values[i], "a 4-bit value, -8 to 7"));
    }
    Ok(values.iter().map(|&v| (v as u8).wrapping_add(offset(bits))).collect())
}

impl ByteTensors<'_> {
    /// The weight.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Dtype`], [`Error::Missing`]; [`Error::Value`] for 4-bit values
    /// outside −8..=7, scales that are not finite, a group out of range; [`Error::Size`] if K does
    /// not fill whole groups or words.
    pub fn unpack(self, name: &str, scheme: &IntStorage) -> Result<Weight<'static>> {
        check_bits("int-quantized", scheme.bits)?;
        let bits = scheme.bits;
        let [size_n, size_k] = sizes(&self.weight)?;
        let shape = Shape::new(size_k, size_n);
        shape.k().packed(bits)?;
        let g_idx = self.weight_g_idx.as_ref();
        let (scales, groups) = scales_and_groups(name, scheme, shape, &self.weight_scale, g_idx)?;
        let zeros = match zeros_of(name, scheme, self.weight_zero_point.as_ref())? {
            None => None,
            Some(zeros) => {
                zeros.expect_shape(&[size_n, scales.rows()])?;
                let codes = codes_of(zeros, bits)?;
                Some(zero_table(scheme.ty(), size_n, scales.rows(), codes)?.transposed())
            }
        };
        let codes = codes_of(&self.weight, bits)?;
        let columns = match bits {
            8 => words(Cow::Owned(codes)),
            _ => Cow::Owned(pack_nibbles(&codes)),
        };
        let bias = bias_table(self.bias.as_ref(), size_n)?;
        let codes = codes_from_columns(bits, shape, &columns)?;
        weight_of(name, scheme, codes, scales, zeros, groups, bias)
    }

    /// The tensors of `weight`; `weight_g_idx` only with act-order.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for types that are not integers, and the errors of
    /// [`Weight::validate`].
    pub fn pack(weight: &Weight<'_>) -> Result<ByteTensors<'static>> {
        expect_type("int-quantized", &weight.name, weight.ty, TYPES)?;
        weight.validate()?;
        let name = &weight.name;
        let Shape { size_k, size_n } = weight.shape();
        let signed = |code: u8| code.wrapping_sub(offset(weight.codes.bits())) as i8;
        let values = values_by_column(&weight.codes, signed);
        let weight_zero_point = match weight.needs_zeros() {
            false => None,
            true => {
                let codes = zero_codes(name, weight.zeros.as_ref())?;
                let groups = weight.scales.rows();
                let at = |n: usize, g: usize| signed(codes[g * size_n + n]);
                let values: Vec<i8> =
                    (0..size_n).flat_map(|n| (0..groups).map(move |g| at(n, g))).collect();
                let (name, shape) = (full(name, "weight_zero_point"), vec![size_n, groups]);
                Some(Tensor::from_vec(name, DType::I8, shape, values)?)
            }
        };
        let shape = vec![size_n, size_k];
        Ok(ByteTensors {
            weight: Tensor::from_vec(full(name, "weight"), DType::I8, shape, values)?,
            weight_scale: float_tensor(name, "weight_scale", &weight.scales.transposed())?,
            weight_zero_point,
            weight_g_idx: pack_g_idx(weight)?,
            bias: bias_tensor(name, weight.bias.as_ref())?,
        })
    }
}

/// `[size_n, size_k]` values of the codes.
fn values_by_column(codes: &Codes<'_>, value: impl Fn(u8) -> i8) -> Vec<i8> {
    let Shape { size_k, size_n } = codes.shape();
    let mut out = Vec::with_capacity(size_k * size_n);
    for n in 0..size_n {
        out.extend((0..size_k).map(|k| value(codes.get(k, n))));
    }
    out
}
