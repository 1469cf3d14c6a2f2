//! Activations as int8 codes with a scale for each group of 32.

use crate::w4a8::Values;
use crate::{Error, Result};

/// Activations that share a scale.
pub const GROUP: usize = 32;
/// Groups whose largest magnitude is below 2^-118 become zeros. The reciprocal of a larger one is
/// finite, and half of its scale is a normal number.
const TINY: u32 = (127 - 118) << 23;
/// Bits of infinity, the smallest magnitude that is not finite.
const INFINITE: u32 = 0x7f80_0000;

/// Rows of activations as codes.
#[derive(Debug, Clone, PartialEq)]
pub struct QuantizedGroups {
    /// K.
    pub size_k: usize,
    /// `[M, K]`.
    pub codes: Vec<i8>,
    /// Half of each group's scale, `[M, K / 32]`.
    pub half_scales: Vec<f32>,
}

/// Quantizes rows of `size_k` activations.
///
/// # Errors
/// [`Error::Size`] unless K is a positive multiple of 32; [`Error::Shape`] unless `x` is whole rows.
pub fn quantize_groups(x: &Values, size_k: usize) -> Result<QuantizedGroups> {
    if size_k == 0 || !size_k.is_multiple_of(GROUP) {
        return Err(Error::size("size_k", size_k, format!("a positive multiple of {GROUP}")));
    }
    if !x.len().is_multiple_of(size_k) {
        return Err(Error::shape("x", &[x.len()], format!("[M, {size_k}]")));
    }
    let (mut codes, mut half_scales) = (Vec::with_capacity(x.len()), Vec::new());
    for group in x.to_f32().chunks_exact(GROUP) {
        let largest = group.iter().fold(0f32, |a, x| a.max(x.abs()));
        if !group.iter().all(|x| x.is_finite()) {
            half_scales.push(f32::NAN);
            codes.extend([0; GROUP]);
        } else if largest < f32::from_bits(TINY) {
            half_scales.push(0.0);
            codes.extend([0; GROUP]);
        } else {
            half_scales.push(largest / 254.0);
            let factor = 127.0 / largest;
            codes.extend(group.iter().map(|x| (x * factor).round_ties_even() as i8));
        }
    }
    Ok(QuantizedGroups { size_k, codes, half_scales })
}

/// The codes of 32 activations as [`quantize_groups`] defines them, and half of their scale; in loops that
/// compilers vectorize.
#[inline(always)]
pub(in crate::w4a8) fn group_codes<T: Copy>(
    activations: &[T],
    value: impl Fn(T) -> f32,
    codes: &mut [u8; GROUP],
) -> f32 {
    /// Adding it rounds a number below 2^22 to an integer, in the lowest bits.
    const MAGIC: f32 = 12_582_912.0;
    let mut x = [0f32; GROUP];
    for (x, &a) in x.iter_mut().zip(activations) {
        *x = value(a);
    }
    // The bits of magnitudes have the order of their values.
    let mut largest = 0;
    for x in &x {
        largest = largest.max(x.to_bits() & 0x7fff_ffff);
    }
    let plain = (TINY..INFINITE).contains(&largest);
    let factor = if plain { 127.0 / f32::from_bits(largest) } else { 0.0 };
    for (code, x) in codes.iter_mut().zip(x) {
        let x = if plain { x } else { 0.0 };
        *code = (x * factor + MAGIC).to_bits() as u8;
    }
    match plain {
        true => f32::from_bits(largest) / 254.0,
        false if largest < TINY => 0.0,
        false => f32::NAN,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ties, the edges of the rules, and every magnitude of bf16.
    #[test]
    fn fast_codes_are_those_of_the_definition() {
        let mut rows = vec![vec![0.0f32; GROUP], vec![-0.0; GROUP]];
        let mut tie: Vec<f32> = (0..GROUP).map(|i| i as f32 - 15.5).collect();
        tie[0] = -127.0;
        rows.push(tie);
        for special in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut row = vec![1.0; GROUP];
            row[31] = special;
            rows.push(row);
        }
        for bits in (0..0x7f80u32).step_by(3) {
            let top = f32::from_bits(bits << 16 | bits & 0xffff);
            let row =
                (0..GROUP).map(|i| top * (i as f32 / 31.0) * if i & 1 == 0 { 1.0 } else { -1.0 });
            rows.push(row.collect());
        }
        for bits in [TINY - 1, TINY, TINY + 1, f32::MAX.to_bits()] {
            rows.push(vec![-f32::from_bits(bits); GROUP]);
        }
        for row in rows {
            let expected = quantize_groups(&Values::F32(row.clone()), GROUP).unwrap();
            let mut codes = [0; GROUP];
            let half = group_codes(&row, |x| x, &mut codes);
            assert_eq!(codes.map(|c| c as i8)[..], expected.codes, "{row:?}");
            assert_eq!(half.to_bits(), expected.half_scales[0].to_bits(), "{row:?}");
        }
    }

    #[test]
    fn sizes_are_checked() {
        for size_k in [0, 31, 33] {
            let error =
                quantize_groups(&Values::F32(vec![0.0; 32]), size_k).unwrap_err().to_string();
            assert!(error.contains("size_k"), "{error}");
        }
        let error = quantize_groups(&Values::F32(vec![0.0; 33]), 32).unwrap_err().to_string();
        assert!(error.contains("[M, 32]"), "{error}");
    }
}
