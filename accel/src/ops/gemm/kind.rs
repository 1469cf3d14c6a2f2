//! The kinds of weights that products take: types of codes and scales, and what each demands.

use marlinspike::num::scalar::ScalarType;
use marlinspike::weight::Weight;

use super::ROW;
use crate::{
    error::AccelError,
    nvrtc::Parameter,
    parameters::{Codes, Scales},
};

/// What scales of integers are in magnitude, where several groups of even size have scales of bf16. The
/// kernel makes a weight of a code in one step if it can hold 2^129 or 2^133 times the scale as a bf16.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Magnitude {
    Any,
    /// Of 4-bit codes.
    BelowHalf,
    Below32nd,
}

impl Magnitude {
    /// Of the scales of `weights`, converted to `dtype`.
    fn of(weights: &[Weight<'_>], dtype: ScalarType, uneven: bool) -> Self {
        if dtype != ScalarType::BFLOAT16 || uneven || weights[0].scales.rows() == 1 {
            return Self::Any;
        }
        let magnitudes = weights.iter().flat_map(|weight| {
            let ty = weight.scales.ty();
            let converted = move |bits| dtype.to_f64(dtype.encode_rne(ty.to_f64(bits)));
            // A NaN is below nothing.
            let magnitude = |x: f64| if x.is_nan() { f64::INFINITY } else { x.abs() };
            weight.scales.iter_bits().map(converted).map(magnitude)
        });
        let most = magnitudes.fold(0.0, f64::max);
        match weights[0].codes.bits() {
            _ if most < 1.0 / 32.0 => Self::Below32nd,
            4 if most < 0.5 => Self::BelowHalf,
            _ => Self::Any,
        }
    }
}

/// Codes and scales of a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// `uint4b8`, scales of 16 bits.
    Uint4b8(Magnitude),
    /// `uint4` with zero points, scales of 16 bits.
    Uint4,
    /// `uint8b128`, scales of 16 bits.
    Uint8b128(Magnitude),
    /// e4m3, scales of 16 bits.
    Fp8,
    /// e4m3, scales of e8m0; `wide`: some of them above 2^7.
    Mxfp8 { wide: bool },
    /// e2m1, scales of e8m0; `wide`: some of them above 2.
    Mxfp4 { wide: bool },
    /// e2m1, scales of e4m3.
    Nvfp4,
}

/// Largest code of an e8m0 scale that the kernel takes: it holds twice the scale as a bf16.
const MOST_E8M0: u32 = 253;

/// Largest code of a scale that is not wide: the kernel holds 2^120 (e4m3) or 2^126 (e2m1) times the
/// scale as a bf16, and saves a multiplication.
const fn most_narrow(bits: u32) -> u32 {
    if bits == 8 { 254 - 120 } else { 254 - 126 }
}

impl Kind {
    const ALL: [Self; 12] = [
        Self::Uint4b8(Magnitude::Any),
        Self::Uint4b8(Magnitude::BelowHalf),
        Self::Uint4b8(Magnitude::Below32nd),
        Self::Uint4,
        Self::Uint8b128(Magnitude::Any),
        Self::Uint8b128(Magnitude::Below32nd),
        Self::Fp8,
        Self::Mxfp8 { wide: false },
        Self::Mxfp8 { wide: true },
        Self::Mxfp4 { wide: false },
        Self::Mxfp4 { wide: true },
        Self::Nvfp4,
    ];

    /// The kind of a stack of weights of one type, shape and group size, under activations of
    /// `dtype`. `uneven`: groups are of several sizes, for act-order and a slice of k.
    ///
    /// # Errors
    /// [`AccelError::Argument`] for other types, for groups that the kind has not, and for a code or
    /// a scale that bits moved from one float to another do not stand for.
    pub(super) fn of(
        weights: &[Weight<'_>],
        dtype: ScalarType,
        uneven: bool,
    ) -> Result<Self, AccelError> {
        let weight = &weights[0];
        let wide_scale = |bits| bits > most_narrow(weight.codes.bits());
        let magnitude = || Magnitude::of(weights, dtype, uneven);
        let any_wide = || weights.iter().any(|w| w.scales.iter_bits().any(wide_scale));
        let scales = weight.scales.ty();
        let wide = scales.size_bits() > 8;
        let kind = match (weight.ty, scales) {
            (ScalarType::UINT4B8, _) if wide && weight.zeros.is_none() => {
                Self::Uint4b8(magnitude())
            }
            (ScalarType::UINT4, _) if wide && weight.zeros.is_some() => Self::Uint4,
            (ScalarType::UINT8B128, _) if wide && weight.zeros.is_none() => {
                Self::Uint8b128(magnitude())
            }
            (ScalarType::FLOAT8_E4M3FN, _) if wide => Self::Fp8,
            (ScalarType::FLOAT8_E4M3FN, ScalarType::FLOAT8_E8M0FNU) => {
                Self::Mxfp8 { wide: any_wide() }
            }
            (ScalarType::FLOAT4_E2M1F, ScalarType::FLOAT8_E8M0FNU) => {
                Self::Mxfp4 { wide: any_wide() }
            }
            (ScalarType::FLOAT4_E2M1F, ScalarType::FLOAT8_E4M3FN) => Self::Nvfp4,
            _ => {
                let zeros = if weight.zeros.is_some() { "with" } else { "without" };
                let found = format!(
                    "{} of {}, scales of {scales}, {zeros} zero points",
                    weight.name, weight.ty
                );
                let expected = "uint4b8, uint4 with zero points, uint8b128 or float8_e4m3fn with 16-bit \
                                scales; float8_e4m3fn or float4_e2m1f with e8m0 scales; float4_e2m1f \
                                with e4m3 scales";
                return Err(ROW.refuse("weight", found, expected));
            }
        };
        if !kind.takes(dtype) {
            let found = format!("{} under {dtype}", weight.name);
            let expected = "bfloat16: float16 lacks most of e8m0's scales";
            return Err(ROW.refuse("dtype", found, expected));
        }
        let groups = weight.scales.rows();
        let group_size = weight.shape().size_k / groups.max(1);
        let (fits, expected) = match kind {
            Self::Uint4b8(_) | Self::Uint8b128(_) if uneven => (true, ""),
            _ if uneven => {
                (false, "groups of one size; of several for uint4b8 and uint8b128 alone")
            }
            Self::Uint4b8(_) | Self::Uint4 | Self::Uint8b128(_) => (
                groups == 1 || group_size == 32 || group_size.is_multiple_of(64),
                "32, a multiple of 64, or all of k",
            ),
            Self::Fp8 => {
                (groups == 1 || group_size.is_multiple_of(64), "a multiple of 64, or all of k")
            }
            Self::Mxfp8 { .. } | Self::Mxfp4 { .. } => (group_size == 32, "32"),
            Self::Nvfp4 => (group_size == 16, "16"),
        };
        if !fits {
            let found = format!("{}: {group_size}", weight.name);
            return Err(ROW.refuse("group_size", found, expected));
        }
        for other in weights {
            if let Some(global) = other.global_scale.filter(|_| kind != Self::Nvfp4) {
                let found = format!("{}: {global}", other.name);
                let expected = "none but with e4m3 scales";
                return Err(ROW.refuse("global_scale", found, expected));
            }
            // Of 16 bits and more there are several types, all converted to `dtype`.
            let ty = other.scales.ty();
            let as_first = if wide { ty.size_bits() > 8 } else { ty == scales };
            if !as_first {
                let found = format!("{}: {ty}", other.name);
                let expected = format!("{scales} as {}", weight.name);
                return Err(ROW.refuse("scales", found, expected));
            }
            kind.check(other, dtype)?;
        }
        Ok(kind)
    }

    /// Whether the kernel takes it with activations of `dtype`.
    pub(super) fn takes(self, dtype: ScalarType) -> bool {
        let is_any = match self {
            Self::Uint4b8(magnitude) | Self::Uint8b128(magnitude) => magnitude == Magnitude::Any,
            _ => !matches!(self, Self::Mxfp8 { .. } | Self::Mxfp4 { .. }),
        };
        is_any || dtype == ScalarType::BFLOAT16
    }

    /// Width of a scale in the device's memory.
    pub(super) fn scale_bits(self) -> u32 {
        if matches!(self, Self::Mxfp8 { .. } | Self::Mxfp4 { .. } | Self::Nvfp4) { 8 } else { 16 }
    }

    /// Fails at a code or a scale that bits moved from one float to another do not stand for.
    ///
    /// # Errors
    /// [`AccelError::Argument`], naming the element.
    fn check(self, weight: &Weight<'_>, dtype: ScalarType) -> Result<(), AccelError> {
        let refuse = |what, at: [usize; 2], found: String, expected: &str| {
            let found = format!("{}: {found} at {at:?}", weight.name);
            Err(ROW.refuse(what, found, expected))
        };
        if matches!(self, Self::Fp8 | Self::Mxfp8 { .. }) {
            // A byte of magnitude 0x7F carries into its sign.
            let nan = |word: u32| ((word & 0x7f7f_7f7f) + 0x0101_0101) & 0x8080_8080;
            if let Some(i) = weight.codes.words().iter().position(|&word| nan(word) != 0) {
                let byte = nan(weight.codes.words()[i]).trailing_zeros() as usize / 8;
                let size_n = weight.shape().size_n;
                let at = [i / size_n * 4 + byte, i % size_n];
                return refuse("codes", at, "NaN".into(), "finite numbers");
            }
        }
        let scales = &weight.scales;
        // What an element must satisfy, and in words.
        let (fits, expected): (&dyn Fn(u32) -> bool, _) = match self {
            Self::Uint4b8(_) | Self::Uint4 | Self::Uint8b128(_) => return Ok(()),
            Self::Mxfp8 { .. } | Self::Mxfp4 { .. } => (&|bits| bits <= MOST_E8M0, "at most 2^126"),
            Self::Nvfp4 => (&|bits| bits < 0x7f, "a positive number or zero"),
            Self::Fp8 => {
                let bias = if dtype == ScalarType::FLOAT16 { 8 } else { 120 };
                let ty = scales.ty();
                let folded = move |bits| {
                    let value = ty.to_f64(bits);
                    let folded = dtype.to_f64(dtype.encode_rne(value * 2f64.powi(bias)));
                    folded.is_finite() || !value.is_finite()
                };
                (&{ folded }, "below 256, or not finite")
            }
        };
        let found = scales.iter_bits().position(|bits| !fits(bits));
        found.map_or(Ok(()), |i| {
            let at = [i / scales.cols(), i % scales.cols()];
            refuse("scales", at, scales.value(at[0], at[1]).to_string(), expected)
        })
    }

    /// The parameters of a weight of this kind with so many groups of `group_size` k.
    pub(super) fn form(self, groups: usize, group_size: usize, uneven: bool) -> Vec<Parameter> {
        let in_stage = match (groups, group_size) {
            _ if uneven => 0,
            (1, _) => 0,
            (_, 16) => 4,
            (_, 32) => 2,
            _ => 1,
        };
        self.parameters(in_stage, uneven)
    }

    fn parameters(self, groups: u32, uneven: bool) -> Vec<Parameter> {
        let codes = match self {
            Self::Uint4b8(_) => Codes::Uint4b8,
            Self::Uint4 => Codes::Uint4,
            Self::Uint8b128(_) => Codes::Uint8b128,
            Self::Fp8 | Self::Mxfp8 { .. } => Codes::E4m3,
            Self::Mxfp4 { .. } | Self::Nvfp4 => Codes::E2m1,
        };
        let scales = match self {
            Self::Mxfp8 { wide: false } | Self::Mxfp4 { wide: false } => Scales::E8m0,
            Self::Mxfp8 { wide: true } | Self::Mxfp4 { wide: true } => Scales::E8m0Wide,
            Self::Nvfp4 => Scales::Ue4m3,
            Self::Uint4b8(magnitude) | Self::Uint8b128(magnitude) => match magnitude {
                Magnitude::Any => Scales::Bits16,
                Magnitude::BelowHalf => Scales::Bits16BelowHalf,
                Magnitude::Below32nd => Scales::Bits16Below32nd,
            },
            Self::Uint4 | Self::Fp8 => Scales::Bits16,
        };
        vec![
            ("CODES", codes as u32),
            ("SCALES", scales as u32),
            ("GROUPS", groups),
            ("HAS_G_IDX", u32::from(uneven)),
        ]
    }

    /// The parameters of every weight that a product with activations of `dtype` may have.
    pub(super) fn forms(dtype: ScalarType) -> Vec<Vec<Parameter>> {
        let taken = Self::ALL.into_iter().filter(|kind| kind.takes(dtype));
        let mut forms: Vec<_> = taken
            .flat_map(|kind| {
                kind.groups().iter().map(move |&groups| kind.parameters(groups, false))
            })
            .collect();
        let uneven = [Self::Uint4b8(Magnitude::Any), Self::Uint8b128(Magnitude::Any)];
        forms.extend(uneven.map(|kind| kind.parameters(0, true)));
        forms
    }

    /// Values of the parameter GROUPS.
    fn groups(self) -> &'static [u32] {
        match self {
            Self::Uint4b8(Magnitude::Any) | Self::Uint4 | Self::Uint8b128(Magnitude::Any) => {
                &[0, 1, 2]
            }
            Self::Uint4b8(_) | Self::Uint8b128(_) => &[1, 2],
            Self::Fp8 => &[0, 1],
            Self::Mxfp8 { .. } | Self::Mxfp4 { .. } => &[2],
            Self::Nvfp4 => &[4],
        }
    }
}

#[cfg(test)]
mod tests {
    use marlinspike::num::dims::{GroupSize, Shape};
    use marlinspike::weight::{Codes, Groups, Table, TableData};

    use super::*;

    const BF16: ScalarType = ScalarType::BFLOAT16;

    fn round(value: f64) -> f64 {
        BF16.to_f64(BF16.encode_rne(value))
    }

    /// What `times_code` of `dequantize.cuh` stands on: for every scale below the bound what it multiplies
    /// and adds is exact in bf16, so that one rounding is left, that of the product.
    #[test]
    #[cfg_attr(
        target_arch = "aarch64",
        ignore = "millions of roundings, the same on every machine"
    )]
    fn codes_and_small_scales_make_a_weight_in_one_step() {
        for (codes, offset, below, exponent) in
            [(16, 8.0, 0.5, 129), (16, 8.0, 1.0 / 32.0, 133), (256, 128.0, 1.0 / 32.0, 133)]
        {
            // Normal numbers alone reach 2^133.
            let (half, rest) = (2f64.powi(127), 2f64.powi(exponent - 127));
            // Every magnitude, with one sign or the other.
            let signed = |bits: u32| BF16.to_f64(bits | bits << 15 & 0x8000);
            for scale in (0..=0x7fff).map(signed).filter(|s| s.abs() < below) {
                let (times, minus) = (round(round(scale * half) * rest), round(-offset * scale));
                assert_eq!((times, minus), (scale * half * rest, -offset * scale), "{scale:e}");
                for code in 0..codes {
                    let code = f64::from(code);
                    let fused = round(code / half / rest * times + minus);
                    assert_eq!(fused, round((code - offset) * scale), "{code} * {scale:e}");
                }
            }
        }
    }

    #[test]
    fn one_large_scale_decides_the_kind() {
        let kind = |ty: ScalarType, dtype: ScalarType, groups: usize, scale: f64| {
            let shape = Shape::new(128, 64);
            let bits = if ty == ScalarType::UINT8B128 { 8 } else { 4 };
            let mut scales = vec![dtype.encode_rne(2f64.powi(-10)) as u16; groups * 64];
            scales[groups * 64 - 7] = dtype.encode_rne(scale) as u16;
            let words = vec![0; shape.len() * bits as usize / 32];
            let weight = Weight {
                name: "weight".into(),
                ty,
                codes: Codes::from_words(bits, shape, words).unwrap(),
                scales: Table::new(dtype, groups, 64, TableData::B16(scales)).unwrap(),
                zeros: None,
                groups: Groups::Uniform(match groups {
                    1 => GroupSize::Channel,
                    _ => GroupSize::Of(128 / groups),
                }),
                global_scale: None,
                bias: None,
            };
            Kind::of(&[weight], dtype, false).unwrap()
        };
        use Magnitude::{Any, Below32nd, BelowHalf};
        let (int4, int8, half) = (ScalarType::UINT4B8, ScalarType::UINT8B128, ScalarType::FLOAT16);
        // The largest bf16 below 1/32 and 1/2.
        let below = |bound: f64| bound * (1.0 - 2f64.powi(-8));
        let of = |scale| [kind(int4, BF16, 2, scale), kind(int8, BF16, 2, scale)];
        let both = |a, b| [Kind::Uint4b8(a), Kind::Uint8b128(b)];
        assert_eq!(of(below(1.0 / 32.0)), both(Below32nd, Below32nd));
        assert_eq!(of(-1.0 / 32.0), both(BelowHalf, Any));
        assert_eq!(of(-below(0.5)), both(BelowHalf, Any));
        assert_eq!(of(0.5), both(Any, Any));
        assert_eq!(of(f64::NAN), both(Any, Any));
        assert_eq!(of(f64::NEG_INFINITY), both(Any, Any));
        assert_eq!(kind(int4, half, 2, 0.01), Kind::Uint4b8(Any));
        assert_eq!(kind(int4, BF16, 1, 0.01), Kind::Uint4b8(Any));
    }
}
