//! Adversarial matrices, scales and permutations.
//!
//! Every value of a format occurs. Whole tensors often follow one pattern (all smallest, all
//! largest, all different), since random data hides mistakes of kernels.

use crate::layers::ParallelStyle;
use crate::num::dims::{GroupSize, LogicalK, Shape};
use crate::num::scalar::ScalarType;
use crate::ops::draw::{Rng, fields};
use crate::ops::quant::{CheckpointFormat, QuantConfig};
use crate::weight::{Codes, Groups, Table, TableData, Weight};
use crate::{Result, act_order};

/// K of the whole matrix, of which a row-parallel rank holds `size_k` rows.
pub(crate) fn whole_k(quant: &QuantConfig, size_k: usize) -> usize {
    match quant.tensor_parallel {
        Some(tp) if tp.style == ParallelStyle::Row => size_k * tp.size,
        _ => size_k,
    }
}

/// A random matrix of a rank, stored as `quant` states. `whole_k` is K of the matrix that the
/// rank's `shape` is cut from; with act-order, groups refer to the whole matrix.
///
/// Scales are finite, never negative, and at least one is positive; e4m3 codes are numbers.
///
/// # Errors
/// Returns an error if K does not fill whole words or groups.
pub fn weight(
    rng: &mut Rng,
    name: &str,
    quant: &QuantConfig,
    shape: Shape,
    whole_k: usize,
) -> Result<Weight<'static>> {
    let Shape { size_k, size_n } = shape;
    let act_order = quant.has_act_order();
    let groups = quant.group_size.groups(LogicalK(if act_order { whole_k } else { size_k }))?;
    let ty = quant.weight_type;
    let zeros = match quant.has_zero_points() {
        true => {
            let max = (1u32 << ty.size_bits()) - 1;
            let codes = (0..groups * size_n).map(|_| rng.between(0, max) as u8).collect();
            Some(Table::new(ty, groups, size_n, TableData::B8(codes))?)
        }
        false => None,
    };
    let bias = match quant.has_bias {
        true => {
            let bits = (0..size_n).map(|_| bias_bits(rng, quant.dtype)).collect();
            Some(Table::new(quant.dtype, 1, size_n, TableData::B16(bits))?)
        }
        false => None,
    };
    let weight = Weight {
        name: name.to_owned(),
        ty,
        codes: codes(rng, ty, shape)?,
        scales: scales(rng, quant, groups, size_n)?,
        zeros,
        groups: match act_order {
            true => Groups::Indexed {
                g_idx: g_idx(rng, quant, size_k, whole_k, groups)?,
                group_size: quant.group_size,
            },
            false => Groups::Uniform(quant.group_size),
        },
        global_scale: quant.checkpoint_format.has_global_scale().then(|| {
            // 2^-20 to 2^4: Marlin multiplies by up to 2^119.
            let calm = rng.calmness();
            f32::from_bits(rng.between(107 - calm, 130 - calm) << 23 | rng.next_u32() >> 9)
        }),
        bias,
    };
    weight.validate()?;
    Ok(weight)
}

/// Codes of one of several patterns: random, only extremes, constant, all positions different, or
/// constant with a single exception.
fn codes(rng: &mut Rng, ty: ScalarType, shape: Shape) -> Result<Codes<'static>> {
    let bits = if ty.size_bits() <= 4 { 4 } else { 8 };
    let max = (1u32 << bits) - 1;
    let fp8 = ty == ScalarType::FLOAT8_E4M3FN;
    // Kernels disagree on e4m3's NaN codes.
    let number = |c: u32| (if fp8 && c & 0x7f == 0x7f { c ^ 1 } else { c }) as u8;
    let kind = rng.below(8);
    let (a, b) = (rng.between(0, max), rng.between(0, max));
    let at = (rng.below(shape.size_k), rng.below(shape.size_n));
    let stride = rng.next_u32() | 1;
    Codes::from_fn(bits, shape, |k, n| {
        number(match kind {
            0 => {
                let either = rng.below(2);
                // Columns of one extreme code have the largest sums.
                [0, max][if rng.is_hard() && n % 4 == 0 { n / 4 % 2 } else { either }]
            }
            1 if (k, n) == at => b,
            1 => a,
            // A multiplicative sequence: neighbours in k and in n differ.
            2 => (k as u32 * 61 + n as u32).wrapping_mul(stride) >> 13 & max,
            _ => rng.between(0, max),
        })
    })
}

/// Powers of two that hard scales leave free, so that partial sums overflow in no order: elements where they may have no
/// bound, and would leave a right kernel's output unchecked.
const SUMS: u8 = 24;

/// Number of patterns of a table of scales.
const SCALE_KINDS: usize = 7;

fn scales(rng: &mut Rng, quant: &QuantConfig, groups: usize, size_n: usize) -> Result<Table> {
    let len = groups * size_n;
    let kind = rng.below(SCALE_KINDS);
    match quant.checkpoint_format {
        CheckpointFormat::Block(format) if format.scale == ScalarType::FLOAT8_E8M0FNU => {
            // The conversion through f16 would turn a power above 2^15 into NaN; fp8 activations
            // add 6.
            let f16 = quant.dtype == ScalarType::FLOAT16;
            let max = match (f16, quant.input_dtype) {
                (true, _) => 127 + 15,
                (false, None) if rng.is_hard() => 254 - SUMS,
                (false, None) => 254,
                (false, Some(_)) => 249,
            };
            let max = calmed(rng, max, 130, 1);
            let bytes = eight_bits(rng, kind, len, max, (120, 130));
            Table::new(format.scale, groups, size_n, TableData::B8(bytes))
        }
        CheckpointFormat::Block(format) => {
            // Three bits of e4m3 are its mantissa.
            let max = calmed(rng, 0x7e, 0x60, 8);
            let bytes = eight_bits(rng, kind, len, max, (0x30, 0x60));
            Table::new(format.scale, groups, size_n, TableData::B8(bytes))
        }
        CheckpointFormat::Int(_) | CheckpointFormat::Fp8 => {
            let bits = half_scales(rng, kind, quant, len);
            Table::new(quant.dtype, groups, size_n, TableData::B16(bits))
        }
    }
}

/// The largest code of a scale: `max`, or of a calm stream the `usual` one, `step` codes less for each
/// of its powers of two.
fn calmed(rng: &Rng, max: u8, usual: u8, step: u8) -> u8 {
    match rng.calmness() {
        0 => max,
        calm => max.min(usual.saturating_sub(step.saturating_mul(calm as u8)).max(2)),
    }
}

/// Scales of one byte, from 0 to `max`, mostly in `usual`.
fn eight_bits(rng: &mut Rng, kind: usize, len: usize, max: u8, usual: (u8, u8)) -> Vec<u8> {
    let between = |rng: &mut Rng, (a, b): (u8, u8)| rng.between(a.into(), b.into()) as u8;
    let usual = (usual.0.min(max), usual.1.min(max));
    let same = between(rng, usual);
    let mut bytes: Vec<u8> = (0..len)
        .map(|i| match kind {
            0 => between(rng, (0, max)),
            1 => [0, 1, max - 1, max][rng.below(4)],
            2 => same,
            3 => (i * 7 % (usize::from(max) + 1)) as u8,
            _ => between(rng, usual),
        })
        .collect();
    bytes[0] = bytes[0].max(1);
    bytes
}

/// f16 or bf16 scales that stay finite after the multiplications of the kernel's format.
fn half_scales(rng: &mut Rng, kind: usize, quant: &QuantConfig, len: usize) -> Vec<u16> {
    let (exponent, mantissa) = fields(quant.dtype);
    let headroom = match (quant.checkpoint_format, quant.dtype, quant.input_dtype) {
        (CheckpointFormat::Fp8, ScalarType::FLOAT16, _) => 8,
        (CheckpointFormat::Fp8, ..) => 120,
        (.., Some(ScalarType::FLOAT8_E4M3FN)) => 9,
        _ => 0,
    };
    // With f16 scales no partial sum overflows in f32.
    let sums =
        if rng.is_hard() && quant.dtype == ScalarType::BFLOAT16 { u32::from(SUMS) } else { 0 };
    let largest = (1 << exponent) - 2 - headroom.max(sums);
    let usual = (1u32 << (exponent - 1)) - 1;
    let full = (1 << mantissa) - 1;
    let calm = rng.calmness();
    // The usual scales are below 1, and those of a calm stream smaller by its powers of two.
    let usual = usual - calm.min(usual - 10);
    let largest: u32 = if calm == 0 { largest } else { largest.min(usual - 1) };
    let number = |e: u32, m: u32| (e << mantissa | m) as u16;
    let fraction = |rng: &mut Rng| rng.between(0, full);
    let same = number(usual - 3, fraction(rng));
    // All different, as far as the type has enough values.
    let first = number(usual - 9, 0);
    let span = usize::from(number(usual.min(largest), 0) - first);
    let mut bits: Vec<u16> = (0..len)
        .map(|i| match kind {
            0 => number(rng.between(0, largest), fraction(rng)),
            1 => [0, 1, full as u16, number(1, 0), number(largest, full)][rng.below(5)],
            2 => same,
            3 => first + (i % span) as u16,
            4 => number(0, rng.between(1, full)),
            _ => number(rng.between(usual - 9, usual - 1), fraction(rng)),
        })
        .collect();
    bits[0] = bits[0].max(1);
    bits
}

/// Any finite value of a 16-bit type: often ordinary, sometimes zero, tiny or huge.
pub(crate) fn bias_bits(rng: &mut Rng, dtype: ScalarType) -> u16 {
    let (exponent, mantissa) = fields(dtype);
    let top = (1u32 << exponent) - 2;
    let usual = (1u32 << (exponent - 1)) - 1;
    let usual = usual - rng.calmness().min(usual - 6);
    let top = if rng.calmness() == 0 { top } else { usual + 2 };
    let e = match rng.below(10) {
        0 => rng.between(0, top),
        1 => 0,
        2 => top,
        _ => rng.between(usual - 6, usual + 2),
    };
    let sign = rng.between(0, 1) << 15;
    (sign | e << mantissa | rng.between(0, (1 << mantissa) - 1)) as u16
}

/// Group of each row of a rank: full groups in random order, in order, reversed or rotated; or
/// groups of any size, including empty ones and one with every row.
fn g_idx(
    rng: &mut Rng,
    quant: &QuantConfig,
    size_k: usize,
    whole_k: usize,
    groups: usize,
) -> Result<Vec<u32>> {
    let GroupSize::Of(group_size) = quant.group_size else { return Ok(vec![0; size_k]) };
    let mut whole: Vec<u32> = (0..whole_k).map(|k| (k / group_size) as u32).collect();
    match rng.below(8) {
        0 => {}
        1 => whole.reverse(),
        2 => {
            let by = rng.below(whole_k);
            whole.rotate_left(by);
        }
        3 => {
            let owner = rng.below(groups) as u32;
            whole.fill(owner);
        }
        4 => whole.iter_mut().for_each(|g| *g = rng.below(groups) as u32),
        _ => rng.shuffle(&mut whole),
    }
    let rows = match quant.tensor_parallel {
        Some(tp) if whole_k != size_k => act_order::k_slice(whole_k, tp.size, tp.rank)?,
        _ => 0..size_k,
    };
    Ok(whole[rows].to_vec())
}
