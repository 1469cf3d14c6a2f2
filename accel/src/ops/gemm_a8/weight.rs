//! A 4-bit weight in Marlin's layout for 8-bit activations in a device's memory.

use marlinspike::layouts::marlin::{InputDtype, Options, prepare};
use marlinspike::num::dims::Shape;
use marlinspike::num::scalar::ScalarType;
use marlinspike::weight::{Groups, Weight};

use super::{Rows, row_of};
use crate::{
    device::Device,
    error::AccelError,
    memory::{Buffer, bytes, halves},
    nvrtc::Parameter,
    parameters::Codes,
};

/// The parameters that follow from a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Form {
    pub(super) is_fp8: bool,
    pub(super) is_float: bool,
    has_zero: bool,
    /// Groups in 128 k; 0: one for all k.
    pub(super) groups: u32,
}

impl Form {
    /// Of every weight under activations of `input`.
    pub(super) fn all(input: ScalarType) -> Vec<Self> {
        let is_fp8 = input == ScalarType::FLOAT8_E4M3FN;
        let mut all = Vec::new();
        for has_zero in [false, true] {
            all.extend([0, 1, 2, 4].map(|groups| Self {
                is_fp8,
                is_float: false,
                has_zero,
                groups,
            }));
        }
        if is_fp8 {
            all.push(Self { is_fp8, is_float: true, has_zero: false, groups: 4 });
        }
        all
    }

    pub(super) fn parameters(self) -> [Parameter; 3] {
        let codes = match (self.is_float, self.has_zero) {
            (true, _) => Codes::E2m1,
            (_, true) => Codes::Uint4,
            _ => Codes::Uint4b8,
        };
        [("IS_FP8", self.is_fp8.into()), ("CODES", codes as u32), ("GROUPS", self.groups)]
    }
}

/// One matrix, or a stack of experts of one shape, in Marlin's layout for 8-bit activations.
#[derive(Debug)]
pub struct MarlinWeightA8 {
    shape: Shape,
    experts: usize,
    dtype: ScalarType,
    form: Form,
    input_global_scale: f32,
    /// `[experts, K / 16, N · 2]`.
    pub(crate) qweight: Buffer<u32>,
    /// `[experts, groups, N]`, of two bytes, or one with e8m0.
    pub(crate) scales: Buffer<u8>,
    /// `[experts, groups, N / 8]`.
    pub(crate) zeros: Option<Buffer<u32>>,
    /// `[experts, N]`.
    pub(crate) bias: Option<Buffer<u16>>,
}

impl MarlinWeightA8 {
    /// Packs `weights` for activations of `input` (int8 or e4m3) and outputs of `dtype` (float16 or
    /// bfloat16) and copies them to the device. Takes `uint4b8` and `uint4` with zero points, scales
    /// of 16 bits (converted to `dtype` first, as Marlin's preparation does) per channel or in groups of
    /// 32, 64 or 128 k; with e4m3 and bfloat16 also `float4_e2m1f` with e8m0 scales. K a multiple of 128, below
    /// 2^19.
    ///
    /// # Errors
    /// [`AccelError::Argument`] for a weight that the kernel or the layout refuses, and for scales
    /// that 512 times themselves (e4m3) leave their type; [`AccelError::Driver`] where the device has
    /// not so much memory.
    pub fn new(
        device: &Device,
        weights: &[Weight<'_>],
        dtype: ScalarType,
        input: ScalarType,
    ) -> Result<Self, AccelError> {
        let row = row_of(input);
        let refuse = |what, found: String, expected: &str| Err(row.refuse(what, found, expected));
        let input_dtype = match input {
            ScalarType::INT8 => InputDtype::Int8,
            ScalarType::FLOAT8_E4M3FN => InputDtype::Fp8,
            _ => return refuse("input", input.to_string(), "int8 or float8_e4m3fn"),
        };
        let Some(first) = weights.first() else {
            return refuse("weight", "no matrix".into(), "1 or more");
        };
        let shape = first.shape();
        if !shape.size_k.is_multiple_of(128) || shape.size_k >= 1 << 19 {
            return refuse("size_k", shape.size_k.to_string(), "a multiple of 128, below 2^19");
        }
        if shape.size_n > i32::MAX as usize {
            return refuse("size_n", shape.size_n.to_string(), "below 2^31");
        }
        let form = Self::form_of(first, dtype, input)?;
        for weight in weights {
            if matches!(weight.groups, Groups::Indexed { .. }) {
                let found = format!("{}: act-order", weight.name);
                return refuse("g_idx", found, "a weight without act-order");
            }
            if Self::form_of(weight, dtype, input)? != form {
                let found = format!("{}: {}, {}", weight.name, weight.ty, weight.scales.ty());
                let expected = format!("{}, {} as {}", first.ty, first.scales.ty(), first.name);
                return Err(row.refuse("weight", found, expected));
            }
            check_scales(weight, dtype, input)?;
        }
        let prepared = match prepare(weights, Options { input_dtype, ..Options::new(dtype) }) {
            Ok(prepared) => prepared,
            Err(error) => return refuse("weight", error.to_string(), "a weight that Marlin takes"),
        };
        let zeros = prepared.zeros.as_ref().map(|(_, words)| device.upload(words));
        let bias = prepared.bias.as_ref().map(|bias| device.upload(halves(bias)));
        Ok(Self {
            shape,
            experts: prepared.experts,
            dtype,
            form,
            input_global_scale: prepared.input_global_scale.unwrap_or(1.0),
            qweight: device.upload(&prepared.qweight)?,
            scales: device.upload(&bytes(&prepared.scales))?,
            zeros: zeros.transpose()?,
            bias: bias.transpose()?,
        })
    }

    fn form_of(
        weight: &Weight<'_>,
        dtype: ScalarType,
        input: ScalarType,
    ) -> Result<Form, AccelError> {
        let refuse =
            |what, found: String, expected: &str| Err(row_of(input).refuse(what, found, expected));
        let is_fp8 = input == ScalarType::FLOAT8_E4M3FN;
        let is_e8m0 = weight.scales.ty() == ScalarType::FLOAT8_E8M0FNU;
        let has_zero = weight.zeros.is_some();
        let is_float = match weight.ty {
            ScalarType::UINT4B8 if !has_zero && weight.scales.ty().size_bits() > 8 => false,
            ScalarType::UINT4 if has_zero && weight.scales.ty().size_bits() > 8 => false,
            ScalarType::FLOAT4_E2M1F if is_fp8 && is_e8m0 && !has_zero => true,
            _ => {
                let found =
                    format!("{} of {}, scales of {}", weight.name, weight.ty, weight.scales.ty());
                let expected = "uint4b8, or uint4 with zero points, with 16-bit scales; with e4m3 \
                                activations float4_e2m1f with e8m0 scales";
                return refuse("weight", found, expected);
            }
        };
        if is_float && dtype != ScalarType::BFLOAT16 {
            let found = format!("{} under {dtype}", weight.name);
            return refuse("dtype", found, "bfloat16: Marlin's preparation passes e8m0 through it");
        }
        let groups = weight.scales.rows();
        let in_stage = match weight.shape().size_k / groups.max(1) {
            _ if groups == 1 && !is_float => 0,
            128 if !is_float => 1,
            64 if !is_float => 2,
            32 => 4,
            other => {
                let expected = if is_float { "32" } else { "32, 64, 128, or all of k" };
                return refuse("group_size", format!("{}: {other}", weight.name), expected);
            }
        };
        Ok(Form { is_fp8, is_float, has_zero, groups: in_stage })
    }

    /// Shape of each matrix.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Number of matrices.
    pub fn experts(&self) -> usize {
        self.experts
    }

    /// Type of bias and outputs.
    pub fn dtype(&self) -> ScalarType {
        self.dtype
    }

    /// Type of the activations: INT8 or `FLOAT8_E4M3FN`.
    pub fn input_dtype(&self) -> ScalarType {
        if self.form.is_fp8 { ScalarType::FLOAT8_E4M3FN } else { ScalarType::INT8 }
    }

    /// What the product multiplies the scales of x with: int8 activations have integers for scales of
    /// groups, the largest of which stands for this times 4096; else 1.
    pub fn input_global_scale(&self) -> f32 {
        self.input_global_scale
    }

    /// Rows of a block of one expert, for `size_m` rows of each.
    pub fn block_size(&self, device: &Device, size_m: usize) -> usize {
        Rows::choose(device.arch(), size_m, self.form).m_tiles as usize * 8
    }

    /// Bytes of codes, scales and zero points of one matrix: what a product must read at least.
    pub fn bytes(&self) -> usize {
        let zeros = self.zeros.as_ref().map_or(0, |zeros| zeros.len() * 4);
        (self.qweight.len() * 4 + self.scales.len() + zeros) / self.experts
    }

    /// The same in other memory.
    ///
    /// # Errors
    /// [`AccelError::Driver`] where the device has not so much memory.
    pub fn copy(&self, device: &Device) -> Result<Self, AccelError> {
        let zeros = self.zeros.as_ref().map(|zeros| device.copy(zeros));
        let bias = self.bias.as_ref().map(|bias| device.copy(bias));
        Ok(Self {
            qweight: device.copy(&self.qweight)?,
            scales: device.copy(&self.scales)?,
            zeros: zeros.transpose()?,
            bias: bias.transpose()?,
            ..*self
        })
    }

    pub(super) fn form(&self) -> Form {
        self.form
    }

    pub(super) fn is_on(&self, device: &Device) -> bool {
        self.qweight.is_on(device)
    }
}

/// Fails at a scale whose form in the kernel is infinite although it is not: 16 bits times 512, e8m0
/// plus 6.
fn check_scales(
    weight: &Weight<'_>,
    dtype: ScalarType,
    input: ScalarType,
) -> Result<(), AccelError> {
    if input == ScalarType::INT8 {
        return Ok(());
    }
    let scales = &weight.scales;
    let ty = scales.ty();
    let fits = |bits: u32| {
        if ty == ScalarType::FLOAT8_E8M0FNU {
            return bits + 6 < 255;
        }
        let value = ty.to_f64(bits);
        !value.is_finite() || dtype.to_f64(dtype.encode_rne(value * 512.0)).is_finite()
    };
    let Some(i) = scales.iter_bits().position(|bits| !fits(bits)) else { return Ok(()) };
    let at = [i / scales.cols(), i % scales.cols()];
    let found = format!("{}: {} at {at:?}", weight.name, scales.value(at[0], at[1]));
    let expected = format!("512 times itself in the range of {dtype}, or 2^121 at most (e8m0)");
    Err(row_of(input).refuse("scales", found, expected))
}
