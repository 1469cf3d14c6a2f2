//! e4m3fn weights in a device's memory.

use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::ScalarType;
use marlinspike::weight::{Groups, Weight};

use super::ROW;
use crate::{
    device::Device,
    error::AccelError,
    memory::{Buffer, halves},
    ops::check,
};

/// Which values share a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Fp8Scales {
    /// A column of W, a row of x.
    Channels,
    /// 128 x 128 values of W, 1 x 128 of x.
    Blocks,
}

/// How the products of 128 k join the total.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fp8Sums {
    /// By an f32 addition for each 128 k.
    Promoted,
    /// In the matrix unit, whose sums have 14 significant bits, over all of K: "fast accumulation". With scales of channels
    /// only.
    Unpromoted,
}

impl Fp8Sums {
    /// What the kernel computes.
    pub(super) const KINDS: [(Fp8Scales, Self); 3] = [
        (Fp8Scales::Channels, Self::Promoted),
        (Fp8Scales::Channels, Self::Unpromoted),
        (Fp8Scales::Blocks, Self::Promoted),
    ];
}

/// One matrix, or a stack of experts of one shape, of e4m3fn codes in the checkpoint's order `[N, K]`.
#[derive(Debug)]
pub struct Fp8Weight {
    /// `[experts, N, K]`.
    pub(super) codes: Buffer<u8>,
    /// `[experts, N]`; of blocks `[experts, N / 128, K / 128]`, N / 128 rounded up.
    pub(super) scales: Buffer<f32>,
    /// `[experts, N]`.
    pub(super) bias: Option<Buffer<u16>>,
    shape: Shape,
    experts: usize,
    dtype: ScalarType,
    scales_of: Fp8Scales,
    sums: Fp8Sums,
}

impl Fp8Weight {
    /// Columns, and k, of a block.
    pub const BLOCK: usize = 128;

    /// Copies `weights` to the device, for outputs of `dtype` (float16 or bfloat16). Codes are float8_e4m3fn, NaN
    /// included; K is a multiple of 32 and N of 8. Scales are float32, a 16-bit type or float8_e8m0fnu, one for each
    /// column, or for groups of 128 k, a multiple of which is K; those of 128 neighbouring columns are equal.
    ///
    /// # Errors
    /// [`AccelError::Argument`] for other weights; [`AccelError::Driver`] where the device has too little memory.
    pub fn new(
        device: &Device,
        weights: &[Weight<'_>],
        dtype: ScalarType,
    ) -> Result<Self, AccelError> {
        Self::repeated(device, weights, 1, dtype)
    }

    /// [`Self::new`] of `times` copies of `weights`, one after the other.
    pub(crate) fn repeated(
        device: &Device,
        weights: &[Weight<'_>],
        times: usize,
        dtype: ScalarType,
    ) -> Result<Self, AccelError> {
        check::is_bf16(&ROW, "dtype", dtype)?;
        let Some(first) = weights.first() else {
            return Err(ROW.refuse("weight", "no matrix", "1 or more"));
        };
        let (shape, experts) = (first.shape(), weights.len().saturating_mul(times));
        let scales_of = scales_of(first)?;
        let Shape { size_k, size_n } = shape;
        if !size_k.is_multiple_of(32) || !size_n.is_multiple_of(8) || shape.is_empty() {
            return Err(ROW.refuse("shape", shape, "K a multiple of 32, N of 8"));
        }
        let rows = size_n.checked_mul(experts).filter(|&rows| i32::try_from(rows).is_ok());
        if rows.is_none() || i32::try_from(size_k).is_err() {
            let found = format!("{shape}, {experts} matrices");
            return Err(ROW.refuse("shape", found, "K below 2^31, all N together below 2^31"));
        }
        let (mut codes, mut scales) = (Vec::with_capacity(shape.len() * weights.len()), Vec::new());
        let mut bias: Option<Vec<u16>> = first.bias.is_some().then(Vec::new);
        for weight in weights {
            validate(weight, first, scales_of, dtype)?;
            codes
                .extend((0..size_n).flat_map(|n| (0..size_k).map(move |k| weight.codes.get(k, n))));
            scales.extend(scale_values(weight, scales_of)?);
            if let (Some(all), Some(own)) = (&mut bias, &weight.bias) {
                all.extend_from_slice(halves(own));
            }
        }
        Ok(Self {
            codes: device.upload(&codes.repeat(times))?,
            scales: device.upload(&scales.repeat(times))?,
            bias: bias.map(|bias| device.upload(&bias.repeat(times))).transpose()?,
            shape,
            experts,
            dtype,
            scales_of,
            sums: Fp8Sums::Promoted,
        })
    }

    /// The weight, whose products are summed otherwise; [`Self::new`] takes [`Fp8Sums::Promoted`].
    ///
    /// # Errors
    /// [`AccelError::Argument`] for sums without promotion and scales of blocks, which the promotion applies.
    pub fn summed(self, sums: Fp8Sums) -> Result<Self, AccelError> {
        check_sums(self.scales_of, sums)?;
        Ok(Self { sums, ..self })
    }

    /// K x N of each matrix.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Number of matrices.
    pub fn experts(&self) -> usize {
        self.experts
    }

    /// Type of the outputs.
    pub fn dtype(&self) -> ScalarType {
        self.dtype
    }

    /// Which values share a scale.
    pub fn scales_of(&self) -> Fp8Scales {
        self.scales_of
    }

    /// How products are summed.
    pub fn sums(&self) -> Fp8Sums {
        self.sums
    }

    /// Bytes of codes and scales: what a product must read at least, apart from x.
    pub fn bytes(&self) -> usize {
        self.codes.len() + self.scales.len() * 4
    }

    pub(crate) fn is_on(&self, device: &Device) -> bool {
        self.codes.is_on(device)
            && self.scales.is_on(device)
            && self.bias.as_ref().is_none_or(|bias| bias.is_on(device))
    }

    /// Another copy on the device.
    pub(crate) fn copy(&self, device: &Device) -> Result<Self, AccelError> {
        Ok(Self {
            codes: device.copy(&self.codes)?,
            scales: device.copy(&self.scales)?,
            bias: self.bias.as_ref().map(|bias| device.copy(bias)).transpose()?,
            ..*self
        })
    }
}

/// Which values share a scale of that weight.
pub(super) fn scales_of(weight: &Weight<'_>) -> Result<Fp8Scales, AccelError> {
    let size_k = weight.shape().size_k;
    match &weight.groups {
        Groups::Uniform(GroupSize::Of(Fp8Weight::BLOCK))
            if size_k.is_multiple_of(Fp8Weight::BLOCK) =>
        {
            Ok(Fp8Scales::Blocks)
        }
        Groups::Uniform(_) if weight.scales.rows() == 1 => Ok(Fp8Scales::Channels),
        groups => {
            let found = format!("{groups:?} of K {size_k}");
            Err(ROW.refuse("groups", found, "one of all k, or whole groups of 128"))
        }
    }
}

/// Returns an error for sums that products with these scales do not have.
pub(super) fn check_sums(scales: Fp8Scales, sums: Fp8Sums) -> Result<(), AccelError> {
    match Fp8Sums::KINDS.contains(&(scales, sums)) {
        true => Ok(()),
        false => Err(ROW.refuse("sums", format!("{sums:?} of {scales:?}"), "promoted ones")),
    }
}

/// Returns an error unless the kernel takes `weight` in a stack whose first matrix is `first`.
fn validate(
    weight: &Weight<'_>,
    first: &Weight<'_>,
    scales: Fp8Scales,
    dtype: ScalarType,
) -> Result<(), AccelError> {
    let refuse = |what, found: String, expected: &str| Err(ROW.refuse(what, found, expected));
    weight.validate().map_err(|error| ROW.refuse("weight", error, "consistent parts"))?;
    if weight.ty != ScalarType::FLOAT8_E4M3FN {
        return refuse("weight", weight.ty.to_string(), "float8_e4m3fn");
    }
    if weight.zeros.is_some() || weight.global_scale.is_some() {
        return refuse("weight", "zero points or a global scale".into(), "neither");
    }
    let is_alike = weight.shape() == first.shape()
        && weight.bias.is_some() == first.bias.is_some()
        && scales_of(weight)? == scales;
    if !is_alike {
        return refuse("weight", weight.name.to_string(), "the first one's shape, scales and bias");
    }
    match weight.bias.as_ref().map(|bias| bias.ty()).filter(|&ty| ty != dtype) {
        None => Ok(()),
        Some(ty) => refuse("bias", ty.to_string(), "the type of the outputs"),
    }
}

/// The scales of a matrix as the kernel reads them.
fn scale_values(weight: &Weight<'_>, of: Fp8Scales) -> Result<Vec<f32>, AccelError> {
    let (scales, size_n) = (&weight.scales, weight.shape().size_n);
    // Exact: every type is no wider than float32.
    let value = |group, n| scales.value(group, n) as f32;
    if of == Fp8Scales::Channels {
        return Ok((0..size_n).map(|n| value(0, n)).collect());
    }
    let block = Fp8Weight::BLOCK;
    for group in 0..scales.rows() {
        let own = |n: usize| scales.bits(group, n) == scales.bits(group, n / block * block);
        if let Some(n) = (0..size_n).find(|&n| !own(n)) {
            let found = format!("{} for group {group}, column {n}", scales.value(group, n));
            return Err(ROW.refuse("scales", found, "one scale for each 128 columns"));
        }
    }
    let blocks = (0..size_n).step_by(block);
    Ok(blocks.flat_map(|n| (0..scales.rows()).map(move |group| value(group, n))).collect())
}
