//! Formats of weights for 16-bit activations, and what each demands.

use marlinspike::num::scalar::ScalarType;
use marlinspike::weight::Weight;

use super::{Form, Packed, PackedScales, ScaleBound};
use crate::{
    error::AccelError,
    ops::gemm::ROW,
    parameters::{Codes, Scales},
};

/// Codes and scales that the kernels take, and values of GROUPS under them.
const FORMATS: [(Codes, Scales, &[u32]); 12] = [
    (Codes::Uint4b8, Scales::Bits16, &[0, 1, 2]),
    (Codes::Uint4b8, Scales::Bits16BelowHalf, &[1, 2]),
    (Codes::Uint4b8, Scales::Bits16Below32nd, &[1, 2]),
    (Codes::Uint4, Scales::Bits16, &[0, 1, 2]),
    (Codes::Uint8b128, Scales::Bits16, &[0, 1, 2]),
    (Codes::Uint8b128, Scales::Bits16Below32nd, &[1, 2]),
    (Codes::E4m3, Scales::Bits16, &[0, 1]),
    (Codes::E4m3, Scales::E8m0, &[2]),
    (Codes::E4m3, Scales::E8m0Wide, &[2]),
    (Codes::E2m1, Scales::E8m0, &[2]),
    (Codes::E2m1, Scales::E8m0Wide, &[2]),
    (Codes::E2m1, Scales::Ue4m3, &[4]),
];

/// Codes with groups of several sizes (act-order and a slice of k).
const UNEVEN: [Codes; 2] = [Codes::Uint4b8, Codes::Uint8b128];

/// Largest code of an e8m0 scale that the kernel takes: it holds twice the scale as a bf16.
const MOST_E8M0: u32 = 253;

/// Largest code of an e8m0 scale that is not wide: the kernel holds 2^120 (e4m3) or 2^126 (e2m1) times the scale as a
/// bf16, and saves a multiplication.
const fn most_narrow(codes: Codes) -> u32 {
    if matches!(codes, Codes::E4m3) { 254 - 120 } else { 254 - 126 }
}

/// Whether the kernels take these scales with activations of `dtype`.
fn takes(dtype: ScalarType, scales: Scales) -> bool {
    dtype == ScalarType::BFLOAT16 || matches!(scales, Scales::Bits16 | Scales::Ue4m3)
}

impl Form {
    /// The form of a stack of weights of one type, shape and group size under activations of `dtype`. `uneven`: groups
    /// are of several sizes, for act-order and a slice of k.
    ///
    /// # Errors
    /// [`AccelError::Argument`] for types and groups that the kernels do not take, and for a code or a scale whose
    /// value changes when the kernel moves its bits to a 16-bit float.
    pub(in crate::ops::gemm) fn of_halves(
        weights: &[Weight<'_>],
        dtype: ScalarType,
        uneven: bool,
    ) -> Result<Self, AccelError> {
        let first = &weights[0];
        let (codes, scales) = format(weights, dtype, uneven)?;
        if !takes(dtype, scales) {
            let found = format!("{} under {dtype}", first.name);
            let expected = "bfloat16: float16 lacks most of e8m0's scales";
            return Err(ROW.refuse("dtype", found, expected));
        }
        let groups = groups(first, codes, scales, uneven)?;
        for weight in weights {
            check_types(weight, first, scales)?;
            check_codes(weight, codes)?;
            check_scales(weight, codes, scales, dtype)?;
        }
        Ok(Self { codes, scales, groups, has_g_idx: uneven })
    }

    /// The form of a weight that is packed already, by the types that its owner states.
    ///
    /// # Errors
    /// [`AccelError::Argument`] for types and groups that the kernels do not take.
    pub(in crate::ops::gemm) fn of_packed(packed: &Packed) -> Result<Self, AccelError> {
        let Packed { dtype, codes: ty, groups, .. } = *packed;
        let refuse = |found: String, expected: &str| Err(ROW.refuse("weight", found, expected));
        let codes = match ty {
            ScalarType::UINT4B8 => Codes::Uint4b8,
            ScalarType::UINT4 => Codes::Uint4,
            ScalarType::UINT8B128 => Codes::Uint8b128,
            ScalarType::FLOAT8_E4M3FN => Codes::E4m3,
            ScalarType::FLOAT4_E2M1F => Codes::E2m1,
            _ => return refuse(ty.to_string(), "codes that a product takes"),
        };
        let is_grouped = dtype == ScalarType::BFLOAT16 && groups > 1;
        let scales = match (packed.scales, codes) {
            (PackedScales::Bits16 { .. }, _) if !is_grouped => Scales::Bits16,
            (
                PackedScales::Bits16 { below: ScaleBound::Below32nd },
                Codes::Uint4b8 | Codes::Uint8b128,
            ) => Scales::Bits16Below32nd,
            (PackedScales::Bits16 { below: ScaleBound::BelowHalf }, Codes::Uint4b8) => {
                Scales::Bits16BelowHalf
            }
            (PackedScales::Bits16 { .. }, _) => Scales::Bits16,
            (PackedScales::E8m0 { is_narrow: true }, _) => Scales::E8m0,
            (PackedScales::E8m0 { is_narrow: false }, _) => Scales::E8m0Wide,
            (PackedScales::E4m3, _) => Scales::Ue4m3,
        };
        let is_known = FORMATS.iter().any(|&(c, s, _)| (c, s) == (codes, scales));
        if !is_known || !takes(dtype, scales) {
            let found = format!("{ty} with scales {:?} under {dtype}", packed.scales);
            return refuse(found, "codes and scales that a product takes");
        }
        if groups == 0 || !packed.shape.size_k.is_multiple_of(groups) {
            let expected = format!("a number that divides size_k {}", packed.shape.size_k);
            return Err(ROW.refuse("groups", groups, expected));
        }
        let groups = groups_of("weight", [packed.shape.size_k, groups], codes, scales, false)?;
        Ok(Self { codes, scales, groups, has_g_idx: false })
    }

    /// The forms of every weight that a product with activations of `dtype` may have.
    pub(in crate::ops::gemm) fn all_halves(dtype: ScalarType) -> Vec<Self> {
        let taken = FORMATS.into_iter().filter(|&(_, scales, _)| takes(dtype, scales));
        let even = taken.flat_map(|(codes, scales, groups)| {
            groups.iter().map(move |&groups| Self { codes, scales, groups, has_g_idx: false })
        });
        let uneven = |codes| Self { codes, scales: Scales::Bits16, groups: 0, has_g_idx: true };
        even.chain(UNEVEN.map(uneven)).collect()
    }
}

/// Types of the codes and scales of a stack.
fn format(
    weights: &[Weight<'_>],
    dtype: ScalarType,
    uneven: bool,
) -> Result<(Codes, Scales), AccelError> {
    let first = &weights[0];
    let codes = match (first.ty, first.zeros.is_some()) {
        (ScalarType::UINT4B8, false) => Some(Codes::Uint4b8),
        (ScalarType::UINT4, true) => Some(Codes::Uint4),
        (ScalarType::UINT8B128, false) => Some(Codes::Uint8b128),
        (ScalarType::FLOAT8_E4M3FN, _) => Some(Codes::E4m3),
        (ScalarType::FLOAT4_E2M1F, _) => Some(Codes::E2m1),
        _ => None,
    };
    let ty = first.scales.ty();
    let scales = match (codes, ty) {
        (Some(codes @ (Codes::E4m3 | Codes::E2m1)), ScalarType::FLOAT8_E8M0FNU) => {
            let wide = |bits| bits > most_narrow(codes);
            let any_wide = weights.iter().any(|weight| weight.scales.iter_bits().any(wide));
            Some(if any_wide { Scales::E8m0Wide } else { Scales::E8m0 })
        }
        (Some(Codes::E2m1), ScalarType::FLOAT8_E4M3FN) => Some(Scales::Ue4m3),
        (Some(Codes::Uint4b8 | Codes::Uint8b128), ty) if ty.size_bits() > 8 => {
            Some(magnitude(weights, dtype, uneven))
        }
        (Some(Codes::Uint4 | Codes::E4m3), ty) if ty.size_bits() > 8 => Some(Scales::Bits16),
        _ => None,
    };
    codes.zip(scales).ok_or_else(|| {
        let zeros = if first.zeros.is_some() { "with" } else { "without" };
        let found = format!("{} of {}, scales of {ty}, {zeros} zero points", first.name, first.ty);
        let expected = "uint4b8, uint4 with zero points, uint8b128 or float8_e4m3fn with 16-bit \
                        scales; float8_e4m3fn or float4_e2m1f with e8m0 scales; float4_e2m1f \
                        with e4m3 scales";
        ROW.refuse("weight", found, expected)
    })
}

/// The type of 16-bit scales of integers, by the largest magnitude where several groups of one size have scales of bf16.
/// The kernel makes a weight of a code in one step if it can hold 2^129 or 2^133 times the scale as a bf16.
fn magnitude(weights: &[Weight<'_>], dtype: ScalarType, uneven: bool) -> Scales {
    if dtype != ScalarType::BFLOAT16 || uneven || weights[0].scales.rows() == 1 {
        return Scales::Bits16;
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
        _ if most < 1.0 / 32.0 => Scales::Bits16Below32nd,
        4 if most < 0.5 => Scales::Bits16BelowHalf,
        _ => Scales::Bits16,
    }
}

/// The parameter GROUPS.
fn groups(
    weight: &Weight<'_>,
    codes: Codes,
    scales: Scales,
    uneven: bool,
) -> Result<u32, AccelError> {
    let sizes = [weight.shape().size_k, weight.scales.rows()];
    groups_of(&weight.name, sizes, codes, scales, uneven)
}

/// The parameter GROUPS of a weight with that K and number of groups; `name` is its name in errors.
fn groups_of(
    name: &str,
    [size_k, groups]: [usize; 2],
    codes: Codes,
    scales: Scales,
    uneven: bool,
) -> Result<u32, AccelError> {
    let group_size = size_k / groups.max(1);
    let (fits, expected) = match scales {
        _ if uneven => {
            let expected = "groups of one size, or of several sizes for uint4b8 and uint8b128";
            (UNEVEN.contains(&codes), expected)
        }
        Scales::E8m0 | Scales::E8m0Wide => (group_size == 32, "32"),
        Scales::Ue4m3 => (group_size == 16, "16"),
        _ if codes == Codes::E4m3 => {
            (groups == 1 || group_size.is_multiple_of(64), "a multiple of 64, or all of k")
        }
        _ => (
            groups == 1 || group_size == 32 || group_size.is_multiple_of(64),
            "32, a multiple of 64, or all of k",
        ),
    };
    if !fits {
        let found = format!("{name}: {group_size}");
        return Err(ROW.refuse("group_size", found, expected));
    }
    Ok(match (groups, group_size) {
        _ if uneven => 0,
        (1, _) => 0,
        (_, 16) => 4,
        (_, 32) => 2,
        _ => 1,
    })
}

/// Returns an error for a global scale that no kernel applies, and for scales of another type than the first matrix's.
fn check_types(weight: &Weight<'_>, first: &Weight<'_>, scales: Scales) -> Result<(), AccelError> {
    if let Some(global) = weight.global_scale.filter(|_| scales != Scales::Ue4m3) {
        let found = format!("{}: {global}", weight.name);
        return Err(ROW.refuse("global_scale", found, "none, except with e4m3 scales"));
    }
    // Of 16 bits and more there are several types, all converted to the activations'.
    let (ty, expected) = (weight.scales.ty(), first.scales.ty());
    if ty != expected && (ty.size_bits() <= 8 || expected.size_bits() <= 8) {
        let found = format!("{}: {ty}", weight.name);
        return Err(ROW.refuse("scales", found, format!("{expected} as {}", first.name)));
    }
    Ok(())
}

/// Returns an error for a code that is a NaN.
fn check_codes(weight: &Weight<'_>, codes: Codes) -> Result<(), AccelError> {
    // A byte of magnitude 0x7F carries into its sign.
    let nan = |word: u32| ((word & 0x7f7f_7f7f) + 0x0101_0101) & 0x8080_8080;
    let words = weight.codes.words();
    let found = words.iter().position(|&word| codes == Codes::E4m3 && nan(word) != 0);
    found.map_or(Ok(()), |i| {
        let byte = nan(words[i]).trailing_zeros() as usize / 8;
        let size_n = weight.shape().size_n;
        let at = [i / size_n * 4 + byte, i % size_n];
        let found = format!("{}: NaN at {at:?}", weight.name);
        Err(ROW.refuse("codes", found, "finite numbers"))
    })
}

/// Returns an error for a scale whose value changes when the kernel moves its bits to a 16-bit float.
fn check_scales(
    weight: &Weight<'_>,
    codes: Codes,
    scales: Scales,
    dtype: ScalarType,
) -> Result<(), AccelError> {
    let table = &weight.scales;
    let ty = table.ty();
    let (fits, expected): (&dyn Fn(u32) -> bool, _) = match (scales, codes) {
        (Scales::E8m0 | Scales::E8m0Wide, _) => (&|bits| bits <= MOST_E8M0, "at most 2^126"),
        (Scales::Ue4m3, _) => (&|bits| bits < 0x7f, "a positive number or zero"),
        (_, Codes::E4m3) => {
            let bias = if dtype == ScalarType::FLOAT16 { 8 } else { 120 };
            let folded = move |bits| {
                let value = ty.to_f64(bits);
                let folded = dtype.to_f64(dtype.encode_rne(value * 2f64.powi(bias)));
                folded.is_finite() || !value.is_finite()
            };
            (&{ folded }, "below 256, or not finite")
        }
        _ => return Ok(()),
    };
    let found = table.iter_bits().position(|bits| !fits(bits));
    found.map_or(Ok(()), |i| {
        let at = [i / table.cols(), i % table.cols()];
        let found = format!("{}: {} at {at:?}", weight.name, table.value(at[0], at[1]));
        Err(ROW.refuse("scales", found, expected))
    })
}

#[cfg(test)]
mod tests {
    use marlinspike::num::dims::{GroupSize, Shape};
    use marlinspike::weight::{Codes as PackedCodes, Groups, Table, TableData};

    use super::*;

    const BF16: ScalarType = ScalarType::BFLOAT16;

    fn round(value: f64) -> f64 {
        BF16.to_f64(BF16.encode_rne(value))
    }

    /// `times_code` of `one_step.cuh` rounds once: for every scale below the bound, what it multiplies and adds is exact in
    /// bf16.
    #[test]
    #[cfg_attr(
        target_arch = "aarch64",
        ignore = "millions of roundings, the same on every machine"
    )]
    fn codes_and_small_scales_make_a_weight_in_one_step() {
        for (codes, offset, below, exponent) in
            [(16, 8.0, 0.5, 129), (16, 8.0, 1.0 / 32.0, 133), (256, 128.0, 1.0 / 32.0, 133)]
        {
            // Only normal numbers reach 2^133.
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
    fn one_large_scale_decides_the_type_of_all() {
        let scales = |ty: ScalarType, dtype: ScalarType, groups: usize, scale: f64| {
            let shape = Shape::new(128, 64);
            let bits = if ty == ScalarType::UINT8B128 { 8 } else { 4 };
            let mut values = vec![dtype.encode_rne(2f64.powi(-10)) as u16; groups * 64];
            values[groups * 64 - 7] = dtype.encode_rne(scale) as u16;
            let words = vec![0; shape.len() * bits as usize / 32];
            let weight = Weight {
                name: "weight".into(),
                ty,
                codes: PackedCodes::from_words(bits, shape, words).unwrap(),
                scales: Table::new(dtype, groups, 64, TableData::B16(values)).unwrap(),
                zeros: None,
                groups: Groups::Uniform(match groups {
                    1 => GroupSize::Channel,
                    _ => GroupSize::Of(128 / groups),
                }),
                global_scale: None,
                bias: None,
            };
            let form = Form::of_halves(&[weight], dtype, false).unwrap();
            (form.codes, form.scales)
        };
        use Scales::{Bits16, Bits16Below32nd, Bits16BelowHalf};
        let (int4, int8, half) = (ScalarType::UINT4B8, ScalarType::UINT8B128, ScalarType::FLOAT16);
        // The largest bf16 below 1/32 and 1/2.
        let below = |bound: f64| bound * (1.0 - 2f64.powi(-8));
        let of = |scale| [scales(int4, BF16, 2, scale), scales(int8, BF16, 2, scale)];
        let both = |a, b| [(Codes::Uint4b8, a), (Codes::Uint8b128, b)];
        assert_eq!(of(below(1.0 / 32.0)), both(Bits16Below32nd, Bits16Below32nd));
        assert_eq!(of(-1.0 / 32.0), both(Bits16BelowHalf, Bits16));
        assert_eq!(of(-below(0.5)), both(Bits16BelowHalf, Bits16));
        assert_eq!(of(0.5), both(Bits16, Bits16));
        assert_eq!(of(f64::NAN), both(Bits16, Bits16));
        assert_eq!(of(f64::NEG_INFINITY), both(Bits16, Bits16));
        assert_eq!(scales(int4, half, 2, 0.01), (Codes::Uint4b8, Bits16));
        assert_eq!(scales(int4, BF16, 1, 0.01), (Codes::Uint4b8, Bits16));
    }
}
