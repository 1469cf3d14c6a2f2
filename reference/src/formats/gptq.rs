//! GPTQ: codes packed along K, optional act-order.
//!
//! Source: AutoGPTQ's tensors as vLLM 0.21.0 `gptq_marlin.py` loads them.

use crate::formats::integers::{IntFormat, IntNames, IntStorage, IntTensors, Packing};
use crate::formats::parts::{
    bias_table, bias_tensor, check_bits, expect_type, float_tensor, full, g_idx_tensor,
    groups_from, scale_table, sizes, unpacked, zero_codes, zero_table,
};
use crate::formats::words::{int_tensor, int_words, pack_rows, plain_order, unpack_rows};
use crate::num::dims::Shape;
use crate::num::scalar::ScalarType;
use crate::num::tensor::{DType, Tensor};
use crate::weight::{Codes, Groups, Weight};
use crate::{Error, Result};

/// Names of the tensors.
pub static NAMES: IntNames =
    IntNames { weight: "qweight", scales: "scales", zeros: "qzeros", g_idx: "g_idx" };

/// The descriptor for `qzeros` that hold zero − 1.
pub static FORMAT: IntFormat = IntFormat {
    name: "gptq",
    case_types: &[ScalarType::UINT4B8, ScalarType::UINT8B128],
    names: &NAMES,
    kernel_names: &NAMES,
    columns_first: false,
    packing: Packing::AlongK,
    act_order: true,
    symmetric_zero: |bits| (1 << (bits - 1)) - 1,
    moe_zero_points: false,
    moe_oracle: true,
    config: None,
    unpack: |t, name, storage| tensors(t).unpack(name, storage, ZeroPoints::V1),
};

/// The descriptor for `qzeros` that hold the zero point itself.
pub static FORMAT_V2: IntFormat = IntFormat {
    name: "gptq_v2",
    case_types: &[],
    symmetric_zero: |bits| 1 << (bits - 1),
    unpack: |t, name, storage| tensors(t).unpack(name, storage, ZeroPoints::V2),
    ..FORMAT
};

fn tensors(t: IntTensors<'_>) -> GptqTensors<'_> {
    let IntTensors { weight: qweight, scales, zeros: qzeros, g_idx, bias } = t;
    GptqTensors { qweight, scales, qzeros, g_idx, bias }
}

/// How `qzeros` stores a zero point z (`checkpoint_format` in configs).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ZeroPoints {
    /// `gptq`: z − 1, wrapping in the field's bits.
    V1,
    /// `gptq_v2`: z.
    V2,
}

/// The tensors of one matrix.
#[derive(Debug, Clone, PartialEq)]
pub struct GptqTensors<'a> {
    /// `[size_k / pack, size_n]` int32.
    pub qweight: Tensor<'a>,
    /// `[groups, size_n]` f16, bf16 or f32.
    pub scales: Tensor<'a>,
    /// `[groups, size_n / pack]` int32. Required without `sym`. With `sym` the zero points are
    /// checked; a caller that ignores them, like upstream, passes `None`.
    pub qzeros: Option<Tensor<'a>>,
    /// `[size_k]` int32. Required with `desc_act`, unless scales are channel-wise.
    pub g_idx: Option<Tensor<'a>>,
    /// `[size_n]`.
    pub bias: Option<Tensor<'a>>,
}

impl<'a> GptqTensors<'a> {
    /// The weight; its codes borrow the bytes of `qweight` if these are aligned.
    ///
    /// With `desc_act` any number of scale rows is valid: a row-parallel rank holds all scales of
    /// the whole matrix.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Dtype`], [`Error::Missing`]; [`Error::Value`] for scales that are
    /// not finite, a group out of range, and zero points of a symmetric matrix that are not the
    /// middle of the range; [`Error::Size`] if groups do not divide K.
    pub fn unpack(self, name: &str, scheme: &IntStorage, stored: ZeroPoints) -> Result<Weight<'a>> {
        check_bits("GPTQ", scheme.bits)?;
        let pack = (32 / scheme.bits) as usize;
        let [packed_k, size_n] = sizes(&self.qweight)?;
        let shape = Shape::new(unpacked(&self.qweight, packed_k, pack)?, size_n);
        let groups = match scheme.has_act_order() {
            true => None,
            false => Some(scheme.group_size.groups(shape.k())?),
        };
        let scales = scale_table(&self.scales, groups, size_n)?;
        let groups = match (&self.g_idx, scheme.has_act_order()) {
            (_, false) => Groups::Uniform(scheme.group_size),
            (Some(g_idx), true) => groups_from(g_idx, shape, scales.rows(), scheme.group_size)?,
            (None, true) => return Err(Error::missing(full(name, "g_idx"), "desc_act")),
        };
        let zeros = match &self.qzeros {
            Some(qzeros) => {
                let of = [scales.rows(), size_n];
                Some(unpack_zeros(qzeros, scheme.bits, stored, of)?)
            }
            None if scheme.symmetric => None,
            None => return Err(Error::missing(full(name, "qzeros"), "an asymmetric matrix")),
        };
        let zeros = match zeros {
            Some(codes) if scheme.symmetric => {
                expect_middle(self.qzeros.as_ref(), scheme.ty(), stored, size_n, &codes)?;
                None
            }
            Some(codes) => Some(zero_table(scheme.ty(), scales.rows(), size_n, codes)?),
            None => None,
        };
        let bias = bias_table(self.bias.as_ref(), size_n)?;
        let codes = Codes::from_words(scheme.bits, shape, int_words(self.qweight)?)?;
        let weight = Weight {
            name: name.to_owned(),
            ty: scheme.ty(),
            codes,
            scales,
            zeros,
            groups,
            global_scale: None,
            bias,
        };
        weight.validate()?;
        Ok(weight)
    }

    /// The tensors of `weight`, of which GPTQ can hold the integer types. `qzeros` is left out of
    /// a symmetric matrix whose N fills no whole words.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for other types, [`Error::Size`] where zero points fill no whole
    /// words, and what [`Weight::validate`] refuses.
    pub fn pack(weight: &Weight<'_>, zeros: ZeroPoints) -> Result<GptqTensors<'static>> {
        use ScalarType as T;
        let allowed = [T::UINT4B8, T::UINT8B128, T::UINT4, T::UINT8];
        expect_type("GPTQ", &weight.name, weight.ty, &allowed)?;
        weight.validate()?;
        let name = &weight.name;
        let (Shape { size_k, size_n }, bits) = (weight.shape(), weight.codes.bits());
        let (pack, groups) = (weight.codes.pack(), weight.scales.rows());
        let words = weight.codes.words().to_vec();
        let qweight = int_tensor(full(name, "qweight"), vec![size_k / pack, size_n], words)?;
        let symmetric = !weight.needs_zeros();
        let qzeros = if size_n.is_multiple_of(pack) {
            let codes = match symmetric {
                true => vec![weight.ty.bias() as u8; groups * size_n],
                false => zero_codes(name, weight.zeros.as_ref())?.to_vec(),
            };
            let mask = 0xff >> (8 - bits);
            let store = |z: u8| match zeros {
                ZeroPoints::V1 => z.wrapping_sub(1) & mask,
                ZeroPoints::V2 => z,
            };
            let stored: Vec<u8> = codes.into_iter().map(store).collect();
            let words = pack_rows(&stored, size_n, bits, plain_order(bits));
            Some(int_tensor(full(name, "qzeros"), vec![groups, size_n / pack], words)?)
        } else if symmetric {
            None
        } else {
            return Err(Error::size(
                format!("{name}: size_n"),
                size_n,
                format!("a multiple of {pack}"),
            ));
        };
        Ok(GptqTensors {
            qweight,
            scales: float_tensor(name, "scales", &weight.scales)?,
            qzeros,
            g_idx: Some(g_idx_tensor(full(name, "g_idx"), &weight.groups, size_k)?),
            bias: bias_tensor(name, weight.bias.as_ref())?,
        })
    }
}

/// Zero points `[groups, size_n]`, corrected for the version.
fn unpack_zeros(
    qzeros: &Tensor<'_>,
    bits: u32,
    stored: ZeroPoints,
    [groups, size_n]: [usize; 2],
) -> Result<Vec<u8>> {
    let pack = (32 / bits) as usize;
    if !size_n.is_multiple_of(pack) {
        return Err(Error::size("size_n", size_n, format!("a multiple of {pack}")));
    }
    qzeros.expect_dtype(&[DType::I32, DType::U32])?.expect_shape(&[groups, size_n / pack])?;
    let words = qzeros.elements::<u32>();
    let mut codes = unpack_rows(&words, size_n, bits, plain_order(bits));
    if stored == ZeroPoints::V1 {
        let mask = 0xff >> (8 - bits);
        codes.iter_mut().for_each(|z| *z = z.wrapping_add(1) & mask);
    }
    Ok(codes)
}

/// Other zero points of a symmetric matrix would dequantize to other values.
fn expect_middle(
    qzeros: Option<&Tensor<'_>>,
    ty: ScalarType,
    stored: ZeroPoints,
    size_n: usize,
    codes: &[u8],
) -> Result<()> {
    let middle = ty.bias() as u8;
    let Some(i) = codes.iter().position(|&z| z != middle) else { return Ok(()) };
    let other = match stored {
        ZeroPoints::V1 if codes.iter().all(|&z| z == middle + 1) => " (they are stored as v2)",
        ZeroPoints::V2 if codes.iter().all(|&z| z == middle - 1) => " (they are stored as v1)",
        _ => "",
    };
    let name = qzeros.map_or("qzeros", Tensor::name);
    let expected = format!("{middle}, the zero point of a symmetric matrix{other}");
    Err(Error::value(name, &[i / size_n, i % size_n], codes[i], expected))
}
