//! Products of e4m3fn operands on Hopper, promoted to f32 every 128 k, against the rule of the unit computed term by term
//! in integers: chains of four sums of 32 products, of which 13 fraction bits below the largest exponent are kept.

use marlinspike::num::array::rows_of;
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::ScalarType;
use marlinspike::products::schedule::{Extras, Fp8BlockKernel, Fp8Kernel, Schedule};
use marlinspike::vectors::Rng;
use marlinspike::weight::{Codes, Groups, Table, TableData, Weight};

/// Significand in eighths and exponent of an e4m3fn code; `None` for NaN.
fn parts(code: u8) -> Option<(i64, i32)> {
    let (field, fraction) = (i32::from(code >> 3 & 15), i64::from(code & 7));
    let magnitude = if field == 0 { fraction } else { 8 + fraction };
    let value = if code & 0x80 != 0 { -magnitude } else { magnitude };
    (code & 0x7f != 0x7f).then_some((value, field.max(1) - 7))
}

/// `value · 2^by`, truncated toward zero.
fn shifted(value: i128, by: i32) -> i128 {
    let magnitude = value.unsigned_abs();
    let moved = if by >= 0 {
        magnitude << by
    } else {
        magnitude.checked_shr(by.unsigned_abs()).unwrap_or(0)
    };
    if value < 0 { -(moved as i128) } else { moved as i128 }
}

/// One instruction: 32 products and `c`, as an integer of 14 bits times a power of two. The accumulator is kept so too:
/// it never has more bits.
fn unit(a: &[u8], b: &[u8], (c, c_unit): (i64, i32)) -> Option<(i64, i32)> {
    let mut terms = Vec::new();
    let mut largest = -133;
    for (&a, &b) in a.iter().zip(b) {
        let ((a, a_exponent), (b, b_exponent)) = (parts(a)?, parts(b)?);
        if a * b != 0 {
            largest = largest.max(a_exponent + b_exponent);
            terms.push((a * b, a_exponent + b_exponent - 6));
        }
    }
    if c != 0 {
        largest = largest.max(c.unsigned_abs().ilog2() as i32 + c_unit);
        terms.push((c, c_unit));
    }
    let kept = largest - 13;
    let sum: i128 = terms.iter().map(|&(t, unit)| shifted(i128::from(t), unit - kept)).sum();
    let bits = i128::BITS - sum.unsigned_abs().leading_zeros();
    let over = bits.saturating_sub(14) as i32;
    Some((shifted(sum, -over) as i64, kept + over))
}

/// The sum of 128 products.
fn part(a: &[u8], b: &[u8]) -> f32 {
    let chain = a.chunks(32).zip(b.chunks(32)).try_fold((0, 0), |c, (a, b)| unit(a, b, c));
    chain.map_or(f32::NAN, |(value, exponent)| (value as f64 * f64::from(exponent).exp2()) as f32)
}

struct Product {
    size_k: usize,
    /// Columns of W, rows of x.
    w: Vec<Vec<u8>>,
    x: Vec<Vec<u8>>,
    weight: Weight<'static>,
    x_scales: Vec<f32>,
}

fn product(rng: &mut Rng, size_k: usize, grouped: bool) -> Product {
    let (size_n, size_m) = (16, 6);
    let mut lines = |count: usize| -> Vec<Vec<u8>> {
        let code = |rng: &mut Rng, line: usize| match line % 5 {
            0 => rng.next_u32() as u8 & 0xbf,
            1 => rng.next_u32() as u8 & 0x87,
            2 => [0x7e, 0xfe, 0x01, 0x08][rng.below(4)],
            3 if rng.below(40) > 0 => rng.next_u32() as u8 & 0xf7,
            _ => rng.next_u32() as u8 & 0xfe,
        };
        (0..count).map(|line| (0..size_k).map(|_| code(rng, line)).collect()).collect()
    };
    let (mut w, x) = (lines(size_n), lines(size_m));
    w[7][size_k / 2] = 0xff;
    let groups = if grouped { size_k / 128 } else { 1 };
    let mut scales = |len: usize| -> Vec<f32> {
        (0..len).map(|_| (rng.below(1 << 20) + 1) as f32 * 1e-7).collect()
    };
    let (w_scales, x_scales) = (scales(groups * size_n), scales(size_m * groups));
    let bits = TableData::B32(w_scales.iter().map(|s| s.to_bits()).collect());
    let weight = Weight {
        name: "weight".into(),
        ty: ScalarType::FLOAT8_E4M3FN,
        codes: Codes::from_fn(8, Shape::new(size_k, size_n), |k, n| w[n][k]).unwrap(),
        scales: Table::new(ScalarType::FLOAT32, groups, size_n, bits).unwrap(),
        zeros: None,
        groups: Groups::Uniform(if grouped { GroupSize::Of(128) } else { GroupSize::Channel }),
        global_scale: None,
        bias: None,
    };
    Product { size_k, w, x, weight, x_scales }
}

/// bf16 bits of `schedule`, and of `promote`, which adds a part (of that row, column and group) to a total, and `finish`.
fn compare(
    p: &Product,
    schedule: &Schedule,
    promote: impl Fn(f32, f32, [usize; 3]) -> f32,
    finish: impl Fn(f32, [usize; 2]) -> f32,
) {
    let x: Vec<u32> = p.x.iter().flatten().map(|&code| code.into()).collect();
    let extras = Extras { activation_scales: Some(&p.x_scales), ..Extras::default() };
    let found = schedule.execute(rows_of("x", &x, p.size_k).unwrap(), &p.weight, extras).unwrap();
    for (m, row) in p.x.iter().enumerate() {
        for (n, column) in p.w.iter().enumerate() {
            let parts = row.chunks(128).zip(column.chunks(128)).map(|(a, b)| part(a, b));
            let total = parts.enumerate().fold(0.0, |t, (g, part)| promote(t, part, [m, n, g]));
            let y = finish(total, [m, n]);
            let wanted =
                if y.is_nan() { 0x7fff } else { ScalarType::BFLOAT16.encode_rne(y.into()) };
            assert_eq!(found[[m, n]], wanted, "K {}, row {m}, column {n}", p.size_k);
        }
    }
}

#[test]
fn products_with_channel_scales_are_promoted_every_128_k() {
    let mut rng = Rng::new(19);
    for size_k in [32, 128, 416, 1024] {
        let p = product(&mut rng, size_k, false);
        let schedule = Schedule::w8a8_fp8(Fp8Kernel::Cutlass, ScalarType::BFLOAT16, true).unwrap();
        let scale = |total: f32, [m, n]: [usize; 2]| {
            total * p.weight.scales.value(0, n) as f32 * p.x_scales[m]
        };
        compare(&p, &schedule, |total, part, _| total + part, scale);
    }
}

#[test]
fn products_with_block_scales_are_promoted_by_one_rounding() {
    let mut rng = Rng::new(23);
    for size_k in [128, 384, 1536] {
        let p = product(&mut rng, size_k, true);
        let schedule =
            Schedule::w8a8_fp8_blocks(Fp8BlockKernel::DeepGemm, ScalarType::BFLOAT16).unwrap();
        let groups = size_k / 128;
        let promote = |total: f32, part: f32, [m, n, g]: [usize; 3]| {
            let scale = p.x_scales[m * groups + g] * p.weight.scales.value(g, n) as f32;
            part.mul_add(scale, total)
        };
        compare(&p, &schedule, promote, |total, _| total);
    }
}
