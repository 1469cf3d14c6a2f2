//! Narrowing compared with exact comparisons of the target's values: at every rounding boundary of
//! every target, exhaustively from 16-bit sources, and at random.

use super::scalar_oracle::{Grid, OVERFLOWS, ROUNDINGS};
use marlinspike::num::scalar::*;
use proptest::prelude::*;
use {Overflow::*, Rounding::*};

/// `half` 2.7.1 converts f64 to f16 through f32 and returns 0x3c00: the intermediate f32 is the tie
/// 1 + 2^−11, which goes to even. The value lies above the tie.
#[test]
fn f64_to_f16_rounds_once() {
    let above_the_tie = 1.0 + f64::exp2(-11.0) + f64::exp2(-40.0);
    assert_eq!(f64_to_f16_rne(above_the_tie), 0x3c01);
    assert_eq!(f64_to_f16_rne(-above_the_tie), 0xbc01);
    assert_eq!(f32_to_f16_rne(f64_to_f32_rne(above_the_tie)), 0x3c00);
    assert_eq!(f64_to_bf16_rne(1.0 + f64::exp2(-8.0) + f64::exp2(-40.0)), 0x3f81);
}

/// Every type, rounding and overflow policy through `encode`, with f64's own neighbours.
#[test]
fn encode_at_every_boundary() {
    for grid in Grid::all() {
        let mut visited = 0;
        grid.boundaries(f64::next_down, f64::next_up, |value| {
            visited += 1;
            for rounding in ROUNDINGS {
                // The policies differ only around and beyond the largest value.
                let near_end = value.is_nan() || value.abs() >= grid.values[grid.values.len() - 1];
                let policies = if near_end { &OVERFLOWS[..] } else { &OVERFLOWS[..1] };
                for &overflow in policies {
                    assert_eq!(
                        grid.kind.encode(value, rounding, overflow),
                        grid.expected(value, rounding, overflow),
                        "{value:e} ({:#x}) to {}, {rounding:?}, {overflow:?}",
                        value.to_bits(),
                        grid.kind
                    );
                }
            }
        });
        assert!(visited >= 12 * grid.values.len());
    }
}

type FromF32 = (&'static str, fn(f32) -> u32, Rounding, Overflow);
type FromF64 = (&'static str, fn(f64) -> u32, Rounding, Overflow);

macro_rules! named {
    ($($name:ident $rounding:ident $overflow:ident),* $(,)?) => {
        vec![$((stringify!($name), |x| u32::from($name(x)), $rounding, $overflow)),*]
    };
}

/// Per target: the functions from f32 and those from f64, with the policy that the name says.
fn named_functions() -> Vec<(Grid, Vec<FromF32>, Vec<FromF64>)> {
    vec![
        (
            Grid::f16(),
            named![
                f32_to_f16_rne NearestEven Infinity,
                f32_to_f16_rtz TowardZero Infinity,
                f32_to_f16_rna NearestAway Infinity,
                f32_to_f16_rne_saturating NearestEven Saturate,
            ],
            named![
                f64_to_f16_rne NearestEven Infinity,
                f64_to_f16_rtz TowardZero Infinity,
                f64_to_f16_rne_saturating NearestEven Saturate,
            ],
        ),
        (
            Grid::bf16(),
            named![
                f32_to_bf16_rne NearestEven Infinity,
                f32_to_bf16_rtz TowardZero Infinity,
                f32_to_bf16_rna NearestAway Infinity,
                f32_to_bf16_rne_saturating NearestEven Saturate,
            ],
            named![
                f64_to_bf16_rne NearestEven Infinity,
                f64_to_bf16_rtz TowardZero Infinity,
                f64_to_bf16_rne_saturating NearestEven Saturate,
            ],
        ),
        (
            Grid::e4m3fn(),
            named![
                f32_to_e4m3fn_rne_saturating NearestEven Saturate,
                f32_to_e4m3fn_rne_nan NearestEven Nan,
                f32_to_e4m3fn_rtz_saturating TowardZero Saturate,
            ],
            named![
                f64_to_e4m3fn_rne_saturating NearestEven Saturate,
                f64_to_e4m3fn_rne_nan NearestEven Nan,
            ],
        ),
        (
            Grid::e5m2(),
            named![
                f32_to_e5m2_rne_saturating NearestEven Saturate,
                f32_to_e5m2_rne_infinity NearestEven Infinity,
                f32_to_e5m2_rtz_saturating TowardZero Saturate,
            ],
            named![
                f64_to_e5m2_rne_saturating NearestEven Saturate,
                f64_to_e5m2_rne_infinity NearestEven Infinity,
            ],
        ),
        (
            Grid::e2m1(),
            named![f32_to_e2m1_rne_saturating NearestEven Saturate],
            named![f64_to_e2m1_rne_saturating NearestEven Saturate],
        ),
        (
            Grid::e8m0(),
            named![
                f32_to_e8m0_rne NearestEven Nan,
                f32_to_e8m0_rne_saturating NearestEven Saturate,
                f32_to_e8m0_floor TowardZero Nan,
                f32_to_e8m0_ceil AwayFromZero Nan,
                f32_to_e8m0_ceil_saturating AwayFromZero Saturate,
            ],
            named![
                f64_to_e8m0_rne NearestEven Nan,
                f64_to_e8m0_rne_saturating NearestEven Saturate,
                f64_to_e8m0_floor TowardZero Nan,
                f64_to_e8m0_ceil AwayFromZero Nan,
                f64_to_e8m0_ceil_saturating AwayFromZero Saturate,
            ],
        ),
    ]
}

#[test]
fn named_functions_at_every_boundary() {
    for (grid, from_f32, from_f64) in named_functions() {
        grid.boundaries(f64::next_down, f64::next_up, |value| {
            for (name, convert, rounding, overflow) in &from_f64 {
                let expected = grid.expected(value, *rounding, *overflow);
                assert_eq!(convert(value), expected, "{name}({value:e})");
            }
        });
        // All midpoints are f32s, so f32's neighbours stand in for f64's; what lies beyond f32's
        // range becomes an infinity or zero of f32, which is still a valid input.
        let below = |x: f64| f64::from((x as f32).next_down());
        let above = |x: f64| f64::from((x as f32).next_up());
        grid.boundaries(below, above, |value| {
            let single = value as f32;
            for (name, convert, rounding, overflow) in &from_f32 {
                let expected = grid.expected(single.into(), *rounding, *overflow);
                assert_eq!(convert(single), expected, "{name}({single:e})");
            }
        });
    }
}

/// All 65536 codes of f16 and of bf16 to every smaller or equal type.
#[test]
fn all_16_bit_codes() {
    type Row = (&'static str, fn(u16) -> u32, fn(u16) -> u32, Rounding, Overflow);
    macro_rules! rows {
        ($($f16:ident $bf16:ident $rounding:ident $overflow:ident),* $(,)?) => {
            [$((stringify!($f16), |x| $f16(x).into(), |x| $bf16(x).into(), $rounding, $overflow)),*]
        };
    }
    let run = |grid: Grid, rows: &[Row]| {
        for code in 0..=u16::MAX {
            let f16 = f64::from(half::f16::from_bits(code).to_f32());
            let bf16 = f64::from(half::bf16::from_bits(code).to_f32());
            for &(name, from_f16, from_bf16, rounding, overflow) in rows {
                let expected = grid.expected(f16, rounding, overflow);
                assert_eq!(from_f16(code), expected, "{name} {code:#06x} = {f16:e}");
                let expected = grid.expected(bf16, rounding, overflow);
                assert_eq!(from_bf16(code), expected, "b{name} {code:#06x} = {bf16:e}");
            }
        }
    };
    run(
        Grid::e4m3fn(),
        &rows![
            f16_to_e4m3fn_rne_saturating bf16_to_e4m3fn_rne_saturating NearestEven Saturate,
            f16_to_e4m3fn_rne_nan bf16_to_e4m3fn_rne_nan NearestEven Nan,
        ],
    );
    run(
        Grid::e5m2(),
        &rows![
            f16_to_e5m2_rne_saturating bf16_to_e5m2_rne_saturating NearestEven Saturate,
            f16_to_e5m2_rne_infinity bf16_to_e5m2_rne_infinity NearestEven Infinity,
        ],
    );
    run(
        Grid::e2m1(),
        &rows![f16_to_e2m1_rne_saturating bf16_to_e2m1_rne_saturating NearestEven Saturate],
    );
    let (f16, bf16) = (Grid::f16(), Grid::bf16());
    for code in 0..=u16::MAX {
        let value = f64::from(half::f16::from_bits(code).to_f32());
        let expect = |rounding| bf16.expected(value, rounding, Infinity);
        assert_eq!(u32::from(f16_to_bf16_rne(code)), expect(NearestEven), "{code:#06x}");
        assert_eq!(u32::from(f16_to_bf16_rtz(code)), expect(TowardZero), "{code:#06x}");
        let value = f64::from(half::bf16::from_bits(code).to_f32());
        let expect = |rounding, overflow| f16.expected(value, rounding, overflow);
        let saturated = expect(NearestEven, Saturate);
        assert_eq!(u32::from(bf16_to_f16_rne(code)), expect(NearestEven, Infinity), "{code:#06x}");
        assert_eq!(u32::from(bf16_to_f16_rtz(code)), expect(TowardZero, Infinity), "{code:#06x}");
        assert_eq!(u32::from(bf16_to_f16_rne_saturating(code)), saturated, "{code:#06x}");
    }
}

/// Widening and narrowing again gives the code back, in every type, policy and rounding.
#[test]
fn finite_codes_survive_the_round_trip() {
    for grid in Grid::all() {
        for code in 0..grid.values.len() as u32 {
            for code in [code, code | grid.sign] {
                for rounding in ROUNDINGS {
                    let value = grid.kind.to_f64(code);
                    assert_eq!(grid.kind.encode(value, rounding, Infinity), code, "{}", grid.kind);
                }
            }
        }
    }
}

/// f64 to f32 at each power of two and around, subnormals and both ends: f32's own neighbours
/// and the exact midpoint between them decide.
#[test]
fn f64_to_f32_at_boundaries() {
    let mut codes: Vec<u32> = (0..=0xfe).map(|field: u32| field << 23).collect();
    codes.extend((0..23).map(|bit| 1 << bit));
    codes.extend((0..400).map(|i: u32| i.wrapping_mul(0x9e37_79b9) % 0x7f7f_ffff));
    for code in codes.into_iter().flat_map(|c| c.saturating_sub(2)..c + 2) {
        let (a, b) = (f64::from(f32::from_bits(code)), f64::from(f32::from_bits(code + 1)));
        // The largest finite value's successor is infinity; 2^128 replaces it.
        let (next, b) = if b.is_infinite() { (2f64.powi(128), b) } else { (b, b) };
        let middle = (a + next) / 2.0;
        let even = if code % 2 == 0 { a } else { b };
        for (value, rne) in [
            (a, a),
            (a.next_up(), a),
            (middle.next_down(), a),
            (middle, even),
            (middle.next_up(), b),
            (next.next_down(), b),
        ] {
            let bits = |x: f64| (x as f32).to_bits();
            assert_eq!(f64_to_f32_rne(value).to_bits(), bits(rne), "{value:e}");
            assert_eq!(f64_to_f32_rne(-value).to_bits(), bits(-rne), "-{value:e}");
            assert_eq!(f64_to_f32_rtz(value).to_bits(), bits(a), "{value:e}");
            assert_eq!(f64_to_f32_rtz(-value).to_bits(), bits(-a), "-{value:e}");
        }
    }
    for infinity in [f64::INFINITY, f64::NEG_INFINITY] {
        assert_eq!(f64_to_f32_rne(infinity), infinity as f32);
        assert_eq!(f64_to_f32_rtz(infinity), infinity as f32);
    }
    assert_eq!(f64_to_f32_rtz(f64::MAX), f32::MAX);
    assert_eq!(f64_to_f32_rne(5e-324).to_bits(), 0);
    assert_eq!(f64_to_f32_rne(-5e-324).to_bits(), 0x8000_0000);
    assert_eq!(f64_to_f32_rne(-f64::NAN).to_bits(), 0xffc0_0000);
    assert_eq!(f64_to_f32_rtz(f64::NAN).to_bits(), 0x7fc0_0000);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 20_000, failure_persistence: None, ..Default::default() })]

    #[test]
    fn random_f32_to_16_bits(bits: u32) {
        let value = f32::from_bits(bits);
        prop_assume!(!value.is_nan());
        prop_assert_eq!(f32_to_f16_rne(value), half::f16::from_f32(value).to_bits());
        prop_assert_eq!(f32_to_bf16_rne(value), half::bf16::from_f32(value).to_bits());
    }

    #[test]
    fn random_f64_to_f32(bits: u64, scale in -160i32..140) {
        // Uniform bits are mostly out of f32's range, so also a number of a chosen size.
        let sized = f64::from_bits(bits & (u64::MAX >> 12) | 1023 << 52) * 2f64.powi(scale);
        for value in [f64::from_bits(bits), sized] {
            if value.is_nan() {
                prop_assert!(f64_to_f32_rne(value).is_nan());
            } else {
                prop_assert_eq!(f64_to_f32_rne(value).to_bits(), (value as f32).to_bits());
            }
        }
    }
}
