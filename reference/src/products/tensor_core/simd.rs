//! The fused sum for [`LANES`] outputs at once, in loops that compilers vectorize.
//!
//! A product of two 11-bit significands is exact in f32. Multiplied by 2^(F − E) and converted to an
//! integer (toward zero) it is the aligned, truncated term. Sums of eight terms and the accumulator
//! do not overflow an i32, and their total is exact in f64. The definition in [`super::fused`] handles
//! infinities, NaN, and exponents for which this is not exact.
#![allow(unsafe_code)]

use super::add_f32;
use super::operand::ZERO_EXPONENT;
use super::terms::{LANES, Lanes, Sums, Terms};
use super::units::Accumulator;

/// The largest F whose aligned terms, below 2^(F + 2), leave room for eight in an i32.
pub(super) const MAX_FRACTION_BITS: i32 = 25;
/// Terms that an i32 adds.
const TERMS_PER_INTEGER: usize = 8;
/// E whose unit 2^(E − F) is a normal f32 for every F up to [`MAX_FRACTION_BITS`], so that no
/// result is subnormal.
const SMALLEST: i32 = -126 + MAX_FRACTION_BITS;
/// E whose products, below 2^(E + 2), are finite.
const LARGEST: i32 = 125;
/// Above every sum of a zero's exponent and another, and below those of other products.
const ALL_ZERO: i32 = ZERO_EXPONENT as i32 / 2;

/// Fused sums of [`Sums::terms`] terms over all of `terms`, in ascending order, into the f32 bits `c`.
/// With `instruction`, the sums of that many k start from zero and `c` is added to each.
pub(super) fn float(sums: Sums, instruction: Option<usize>, terms: Terms<'_>, c: &mut Lanes) {
    #[cfg(target_arch = "x86_64")]
    {
        if has_avx512() {
            // SAFETY: the line above detected the features that the function requires.
            return unsafe { float_avx512(sums, instruction, terms, c) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the line above detected the features that the function requires.
            return unsafe { float_avx2(sums, instruction, terms, c) };
        }
    }
    float_loop(sums, instruction, terms, c);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn float_avx512(sums: Sums, instruction: Option<usize>, terms: Terms<'_>, c: &mut Lanes) {
    float_loop(sums, instruction, terms, c);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn float_avx2(sums: Sums, instruction: Option<usize>, terms: Terms<'_>, c: &mut Lanes) {
    float_loop(sums, instruction, terms, c);
}

#[cfg(target_arch = "x86_64")]
fn has_avx512() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
}

#[inline(always)]
fn float_loop(sums: Sums, instruction: Option<usize>, terms: Terms<'_>, c: &mut Lanes) {
    let Some(size_k) = instruction else { return chain(sums, terms, c) };
    for start in (0..terms.a.len()).step_by(size_k) {
        let mut part = [0; LANES];
        chain(sums, terms.part(start, size_k), &mut part);
        for (c, part) in c.iter_mut().zip(part) {
            *c = add_f32(*c, part);
        }
    }
}

#[inline(always)]
fn chain(sums: Sums, terms: Terms<'_>, c: &mut Lanes) {
    // The length of a sum is a constant in each loop, so that it is unrolled.
    match sums.terms {
        16 => chain_of::<16>(sums, terms, c),
        8 => chain_of::<8>(sums, terms, c),
        32 => chain_of::<32>(sums, terms, c),
        n => {
            for start in (0..terms.a.len()).step_by(n) {
                terms.part(start, n).defined(accumulator(sums), sums.fraction_bits, c);
            }
        }
    }
}

fn accumulator(sums: Sums) -> Accumulator {
    Accumulator::F32 { kept_bits: sums.kept_bits }
}

#[inline(always)]
fn chain_of<const N: usize>(sums: Sums, terms: Terms<'_>, c: &mut Lanes) {
    for start in (0..terms.a.len()).step_by(N) {
        let part = terms.part(start, N);
        if !sum::<N>(sums, part, c) {
            part.defined(accumulator(sums), sums.fraction_bits, c);
        }
    }
}

/// One sum. Returns false and leaves `c` unchanged if an exponent is out of range.
#[inline(always)]
fn sum<const N: usize>(sums: Sums, terms: Terms<'_>, c: &mut Lanes) -> bool {
    let (Ok(a), Ok(a_exponents), Ok(b), Ok(b_exponents)) = (
        <&[f32; N]>::try_from(terms.a),
        <&[i32; N]>::try_from(terms.a_exponents),
        <&[[f32; LANES]; N]>::try_from(terms.b),
        <&[[i32; LANES]; N]>::try_from(terms.b_exponents),
    ) else {
        return false;
    };
    let mut largest = [i32::from(ZERO_EXPONENT); LANES];
    for l in 0..LANES {
        let field = (c[l] >> 23 & 0xff) as i32;
        let exponent = field.max(1) - 127;
        largest[l] = if c[l] << 1 == 0 { largest[l] } else { exponent };
    }
    for k in 0..N {
        for l in 0..LANES {
            largest[l] = largest[l].max(a_exponents[k] + b_exponents[k][l]);
        }
    }
    let mut outside = 0;
    for e in &mut largest {
        // Where all terms are zero, so is the sum, with any E.
        let small = *e < SMALLEST && *e > ALL_ZERO;
        outside |= i32::from(small) | i32::from(*e > LARGEST);
        *e = (*e).max(SMALLEST);
    }
    if outside != 0 {
        return false;
    }
    let mut scale = [0f32; LANES];
    for l in 0..LANES {
        scale[l] = f32::from_bits(((sums.fraction_bits - largest[l] + 127) as u32) << 23);
    }
    let mut total = [0f64; LANES];
    for block in 0..N / TERMS_PER_INTEGER {
        let mut integer = [0i32; LANES];
        for k in block * TERMS_PER_INTEGER..(block + 1) * TERMS_PER_INTEGER {
            for l in 0..LANES {
                let aligned = a[k] * b[k][l] * scale[l];
                // SAFETY: the factors are finite and their exponents sum to at most E, so the
                // magnitude is below 2^2 · 2^F ≤ 2^27, which fits an i32.
                integer[l] += unsafe { aligned.to_int_unchecked::<i32>() };
            }
        }
        for l in 0..LANES {
            total[l] += f64::from(integer[l]);
        }
    }
    // Truncation to the kept bits, counted from the leading one.
    let mask = u64::MAX << (53 - sums.kept_bits);
    for l in 0..LANES {
        let aligned = f32::from_bits(c[l]) * scale[l];
        // SAFETY: c's exponent is at most E ≤ LARGEST, so it is finite, and the product's
        // magnitude is below 2 · 2^F ≤ 2^26.
        let total = total[l] + f64::from(unsafe { aligned.to_int_unchecked::<i32>() });
        // At most 24 bits are left, and 2^(E − F) is a normal number: both steps are exact, or
        // overflow to infinity as the matrix unit does.
        let kept = f64::from_bits(total.to_bits() & mask) as f32;
        let unit = f32::from_bits(((largest[l] - sums.fraction_bits + 127) as u32) << 23);
        c[l] = (kept * unit).to_bits();
    }
    true
}

/// `c[l] += Σ a[k]·b[k][l]` modulo 2^32.
pub(super) fn integer(a: &[i32], b: &[[i32; LANES]], c: &mut Lanes) {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2")]
        fn avx2(a: &[i32], b: &[[i32; LANES]], c: &mut Lanes) {
            integer_loop(a, b, c);
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the line above detected the features that the function requires.
            return unsafe { avx2(a, b, c) };
        }
    }
    integer_loop(a, b, c);
}

#[inline(always)]
fn integer_loop(a: &[i32], b: &[[i32; LANES]], c: &mut Lanes) {
    let mut total = *c;
    for (&a, b) in a.iter().zip(b) {
        for l in 0..LANES {
            total[l] = total[l].wrapping_add((a * b[l]) as u32);
        }
    }
    *c = total;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::products::tensor_core::operand::Operand;
    use crate::products::tensor_core::terms::Factor;

    /// Every version of the loop produces the bits of the definition.
    #[test]
    fn versions_agree() {
        let mut state = 1u32;
        let mut random = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state >> 8
        };
        for round in 0..200 {
            let spread = [1, 4, 20, 60][round % 4];
            // An 11-bit significand and its exponent.
            let mut factor = || {
                let exponent = (random() % spread) as i32 - spread as i32 / 2;
                let significand = (1024 + random() % 1024) as f32 / 1024.0;
                let sign = if random() % 2 == 0 { 1.0 } else { -1.0 };
                (sign * significand * (exponent as f32).exp2(), exponent)
            };
            let a: Vec<(f32, i32)> = (0..64).map(|_| factor()).collect();
            let b: Vec<[(f32, i32); LANES]> =
                (0..64).map(|_| std::array::from_fn(|_| factor())).collect();
            let (a_values, a_exponents): (Vec<f32>, Vec<i32>) = a.into_iter().unzip();
            let b_values: Vec<[f32; LANES]> = b.iter().map(|r| r.map(|f| f.0)).collect();
            let b_exponents: Vec<[i32; LANES]> = b.iter().map(|r| r.map(|f| f.1)).collect();
            let terms = Terms {
                a: &a_values,
                a_exponents: &a_exponents,
                b: &b_values,
                b_exponents: &b_exponents,
            };
            let (n, fraction_bits, kept_bits) =
                [(16, 25, 24), (8, 24, 24), (32, 13, 14), (4, 23, 24)][round / 4 % 4];
            let sums = Sums { terms: n, fraction_bits, kept_bits };
            check_versions(terms, sums, [0x4040_0001; LANES], &format!("round {round}"));
        }
    }

    /// Lanes without a term next to lanes with terms and, in some rounds, one whose exponents are too small for the
    /// vector loop. Accumulators: both zeros, a subnormal, a small and an ordinary number.
    #[test]
    fn sums_of_zeros_agree() {
        let zero = Factor::new(Operand::ZERO);
        for round in 0..64u32 {
            let factor = |k: usize, l: usize| match (l % 4, round % 4) {
                (0, _) | (_, 3) => {
                    Factor { value: if k.is_multiple_of(2) { -0.0 } else { 0.0 }, ..zero }
                }
                (1, 1) => Factor { value: -(-120f32).exp2(), exponent: -120 },
                (2, _) if k.is_multiple_of(3) => zero,
                _ => Factor { value: 1.5, exponent: 0 },
            };
            let rows: Vec<[Factor; LANES]> =
                (0..32).map(|k| std::array::from_fn(|l| factor(k, l))).collect();
            let (values, exponents): (Vec<_>, Vec<_>) =
                rows.iter().map(|r| (r.map(|f| f.value), r.map(|f| f.exponent))).unzip();
            let (a, a_exponents) = (vec![-1.25f32; 32], vec![0; 32]);
            let terms =
                Terms { a: &a, a_exponents: &a_exponents, b: &values, b_exponents: &exponents };
            let c = [0, 0x8000_0000, 1, 0x0080_0000, 0x0d00_0000, 0xbf80_0001];
            let c = std::array::from_fn(|l| c[(l + round as usize / 4) % c.len()]);
            let (n, fraction_bits, kept_bits) = [(16, 25, 24), (32, 13, 14)][round as usize % 2];
            let sums = Sums { terms: n, fraction_bits, kept_bits };
            check_versions(terms, sums, c, &format!("zeros, round {round}"));
        }
    }

    /// Every version of the loop against the definition, from the accumulators `c`.
    fn check_versions(terms: Terms<'_>, sums: Sums, c: Lanes, what: &str) {
        let mut expected = c;
        for start in (0..terms.a.len()).step_by(sums.terms) {
            let part = terms.part(start, sums.terms);
            part.defined(accumulator(sums), sums.fraction_bits, &mut expected);
        }
        let check = |name: &str, with: &dyn Fn(&mut Lanes)| {
            let mut found = c;
            with(&mut found);
            assert_eq!(found, expected, "{name}, {what}");
        };
        check("plain", &|c| float_loop(sums, None, terms, c));
        check("chosen", &|c| float(sums, None, terms, c));
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the line above detected the features that the function requires.
            check("avx2", &|c| unsafe { float_avx2(sums, None, terms, c) });
        }
    }
}
