//! The sum over top-k: both chains computed by hand, and bounds that no order of f32 additions
//! exceeds.

use marlinspike::moe::Chain::{self, Canonical, Upstream};
use marlinspike::moe::sum::{bound, bounds, sum};
use marlinspike::num::array::FloatView3;
use marlinspike::num::element::{bf16, f16};
use marlinspike::num::interval::{Bound, Interval};
use marlinspike::num::scalar::{self, ScalarType};
use marlinspike::{Error, Result};
use ndarray::Array3;
use proptest::prelude::*;

const F16: ScalarType = ScalarType::FLOAT16;
const BF16: ScalarType = ScalarType::BFLOAT16;

fn value(ty: ScalarType, bits: u16) -> f32 {
    if ty == F16 { scalar::f16_to_f32(bits) } else { scalar::bf16_to_f32(bits) }
}

fn bits(ty: ScalarType, x: f32) -> u16 {
    if ty == F16 { scalar::f32_to_f16_rne(x) } else { scalar::f32_to_bf16_rne(x) }
}

fn row(ty: ScalarType, xs: &[f32]) -> Vec<u16> {
    xs.iter().map(|&x| bits(ty, x)).collect()
}

fn points(ty: ScalarType, xs: &[f32]) -> Vec<Bound> {
    row(ty, xs).iter().map(|&b| Bound::exactly(value(ty, b).into())).collect()
}

/// The sum of bits.
fn add(
    down: &[u16],
    ty: ScalarType,
    top_k: usize,
    size_n: usize,
    chain: Chain,
) -> Result<Vec<u16>> {
    let tokens = top_k.checked_mul(size_n).and_then(|n| down.len().checked_div(n)).unwrap_or(1);
    let down = FloatView3::from_bits("down", ty, [tokens, top_k, size_n], down)?;
    Ok(sum(down, chain)?.into_bits())
}

/// Experts first, tokens second: the axes may be in any order of memory.
#[test]
fn strides_do_not_matter() {
    let stored =
        Array3::from_shape_fn((3, 2, 4), |(j, t, n)| bf16::from_f32((j * 100 + t * 10 + n) as f32));
    let down = stored.view().permuted_axes([1, 0, 2]);
    let found = sum(down, Canonical).unwrap().into_array::<bf16>().unwrap();
    let copied = down.as_standard_layout().into_owned();
    assert_eq!(found, sum(copied.view(), Canonical).unwrap().into_array::<bf16>().unwrap());
    assert_eq!(found[[1, 2]], bf16::from_f32(12.0 + 112.0 + 212.0));
}

#[test]
fn upstream_rounds_each_addition_up_to_four_slots() {
    // Above 2048 f16 has even numbers only: 1 is lost in each addition, 2 is not.
    let of =
        |xs: &[f32], chain| value(F16, add(&row(F16, xs), F16, xs.len(), 1, chain).unwrap()[0]);
    assert_eq!(of(&[2048.0, 1.0, 1.0], Upstream), 2048.0);
    assert_eq!(of(&[2048.0, 1.0, 1.0], Canonical), 2050.0);
    assert_eq!(of(&[1.0, 1.0, 2048.0], Upstream), 2050.0);
    assert_eq!(of(&[2048.0, 1.0, 1.0, 1.0, 1.0], Upstream), 2052.0);
    assert_eq!(of(&[2048.0, 1.0, 1.0, 1.0], Upstream), 2048.0);
    assert_eq!(of(&[2048.0], Upstream), 2048.0);
    // A partial sum beyond f16's range stays infinite.
    assert_eq!(of(&[6e4, 6e4, -6e4], Upstream), f32::INFINITY);
    assert_eq!(of(&[6e4, 6e4, -6e4], Canonical), value(F16, bits(F16, 6e4)));
    // Two tokens, two columns: slot by slot inside a token.
    let down = row(BF16, &[1.0, 2.0, 10.0, 20.0, 3.0, 4.0, 30.0, 40.0]);
    let y = add(&down, BF16, 2, 2, Canonical).expect("two tokens");
    assert_eq!(y, row(BF16, &[11.0, 22.0, 33.0, 44.0]));
}

#[test]
fn the_bound_allows_both_types_where_upstream_has_two_and_no_more() {
    let three = bound(&points(F16, &[2048.0, 1.0, 1.0]), F16);
    assert_eq!((three.interval.lo, three.interval.hi), (2048.0, 2050.0));
    // In the 16-bit type, five terms would give 2048.
    let five = bound(&points(F16, &[2048.0, 1.0, 1.0, 1.0, 1.0]), F16);
    assert!(five.allows(2052.0) && !five.allows(2048.0) && !five.allows(2050.0));
    // A tie of two terms goes to even, exactly.
    let tie = bound(&points(F16, &[2048.0, 1.0]), F16);
    assert_eq!((tie.exact, tie.interval), (2049.0, Interval::point(2048.0)));
    assert!(tie.allows(2048.0) && !tie.allows(2050.0));
    // If f32 loses digits, the order matters: 2^30 + 2^-30 − 2^30.
    let big = 2f32.powi(30);
    let lost = bound(&points(BF16, &[big, big.recip(), -big, 0.0, 0.0]), BF16);
    assert!(lost.allows(0.0) && lost.allows(big.recip()) && !lost.allows(1e4));
}

#[test]
fn special_values() {
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    for ty in [F16, BF16] {
        for top_k in [1, 2, 3, 8] {
            let slots = |first: f32, last: f32| {
                let mut xs = vec![0.0; top_k];
                xs[0] = first;
                xs[top_k - 1] += last;
                xs
            };
            for chain in [Canonical, Upstream] {
                let of = |xs: &[f32]| {
                    value(ty, add(&row(ty, xs), ty, xs.len(), 1, chain).expect("one token")[0])
                };
                assert!(of(&slots(nan, 1.0)).is_nan());
                assert_eq!(of(&slots(inf, 1.0)), inf);
                assert_eq!(of(&vec![-0.0; top_k]).to_bits(), 0);
                if top_k > 1 {
                    assert!(of(&slots(inf, -inf)).is_nan());
                }
            }
            let of = |xs: &[f32]| bound(&points(ty, xs), ty);
            assert_eq!(of(&slots(nan, 1.0)).interval, Interval::EMPTY);
            assert!(of(&slots(nan, 1.0)).allows(nan) && !of(&slots(nan, 1.0)).allows(1.0));
            assert!(of(&slots(inf, 1.0)).allows(inf) && !of(&slots(inf, 1.0)).allows(1.0));
            assert!(!of(&slots(inf, 1.0)).allows(nan));
            if top_k > 1 {
                let both = of(&slots(inf, -inf));
                assert!(both.allows(nan) && !both.allows(0.0) && !both.allows(inf));
            }
            assert!(of(&vec![0.0; top_k]).allows(-0.0) && !of(&vec![0.0; top_k]).allows(1e-6));
        }
    }
}

/// Every order of five `values`, added in f32 one after the other and in pairs.
fn in_every_order(values: &mut Vec<f32>, done: usize, found: &mut Vec<f32>) {
    if done == values.len() {
        found.push(values.iter().fold(0.0, |sum, x| sum + x));
        found.push((values[0] + values[1]) + (values[2] + values[3]) + values[4]);
    }
    for i in done..values.len() {
        values.swap(done, i);
        in_every_order(values, done + 1, found);
        values.swap(done, i);
    }
}

/// Partial sums beyond the largest f32 are infinite in some orders, also where the values have few digits.
#[test]
fn sums_that_overflow_in_some_order() {
    let (a, b) = (2f32.powi(127), 1.5 * 2f32.powi(126));
    // Infinite in some order: below, above; NaN in some order.
    let cases = [
        ([a, a, -a, 0.0, 0.0], [false, true], false),
        ([-a, -a, a, 1.0, 0.0], [true, false], false),
        ([a, a, -a, -a, 0.0], [true, true], true),
        ([a, a, -a, -a, 1.0], [true, true], true),
        ([b, b, b, -b, -1.0], [false, true], false),
        ([a, -a, 1.0, 0.0, 0.0], [false, false], false),
        ([b, -b, b, -b, 2.0], [false, false], false),
    ];
    for (values, infinite, nan) in cases {
        let y = bound(&points(ScalarType::BFLOAT16, &values), ScalarType::BFLOAT16);
        let mut found = Vec::new();
        in_every_order(&mut values.to_vec(), 0, &mut found);
        let ends = [f32::NEG_INFINITY, f32::INFINITY].map(|end| found.contains(&end));
        assert_eq!((ends, found.iter().any(|x| x.is_nan())), (infinite, nan), "{values:?}");
        for x in found.into_iter().filter(|x| !x.is_nan()) {
            let x = f64::from(value(ScalarType::BFLOAT16, bits(ScalarType::BFLOAT16, x)));
            assert!(y.interval.contains(x), "{values:?}: {x} is not in {:?}", y.interval);
        }
        assert_eq!([y.interval.lo, y.interval.hi].map(f64::is_infinite), infinite, "{values:?}");
        assert_eq!(y.nan, nan, "{values:?}");
    }
}

/// Infinities of both signs in different terms give NaN.
#[test]
fn opposite_infinities_of_different_terms_may_give_nan() {
    let (up, down) = (f64::INFINITY, f64::NEG_INFINITY);
    let uncertain = |lo, hi| Bound { exact: 0.0, interval: Interval { lo, hi }, nan: false };
    let one = Bound::exactly(1.0);
    let cases = [
        ([uncertain(0.0, up), uncertain(down, 0.0), one], true),
        ([one, uncertain(down, 0.0), uncertain(0.0, up)], true),
        ([uncertain(0.0, up), uncertain(-1.0, up), one], false),
        ([uncertain(down, up), uncertain(0.0, up), one], true),
        ([uncertain(0.0, up), one, uncertain(down, up)], true),
    ];
    for (terms, nan) in cases {
        // Upstream adds three terms in 16 bits, and five in f32.
        let five = [&terms[..], &[one, one]].concat();
        for terms in [&terms[..], &five] {
            let y = bound(terms, ScalarType::BFLOAT16);
            assert_eq!(y.nan, nan, "{terms:?}");
            let ends = |end: fn(&Bound) -> f64| terms.iter().map(end).any(f64::is_infinite);
            let infinite = [ends(|t| t.interval.lo), ends(|t| t.interval.hi)];
            let found = [y.interval.lo, y.interval.hi].map(f64::is_infinite);
            assert!(found == infinite || nan && found == [true; 2], "{terms:?}: {y:?}");
        }
    }
}

#[test]
fn refusals() {
    for (top_k, size_n) in [(0, 4), (2, 0), (3, 4), (usize::MAX, 2)] {
        let refused = add(&[0; 16], F16, top_k, size_n, Canonical);
        assert!(matches!(refused, Err(Error::Shape { .. })), "{top_k} {size_n}");
    }
    let slots = Array3::from_elem((4, 0, 2), f16::ZERO);
    assert!(matches!(sum(slots.view(), Canonical), Err(Error::Shape { .. })));
    let refused = sum(Array3::<f32>::zeros((1, 2, 2)).view(), Canonical);
    assert!(matches!(refused, Err(Error::Unsupported { .. })));
    let none = Array3::from_elem((0, 0, 1), Bound::exactly(0.0));
    assert!(matches!(bounds(none.view(), F16), Err(Error::Shape { .. })));
    assert!(matches!(bounds(none.view(), ScalarType::FLOAT32), Err(Error::Unsupported { .. })));
}

/// An output's bound is that of its own slots, whatever the strides.
#[test]
fn bounds_of_tokens_and_columns() {
    let (tokens, top_k, size_n) = (2, 3, 4);
    let number = |m: usize, j: usize, n: usize| (m * 100 + j * 10 + n) as f64;
    let slot = |(m, j, n)| Bound::exactly(number(m, j, n));
    let down = Array3::from_shape_fn((tokens, top_k, size_n), slot);
    let turned = Array3::from_shape_fn((size_n, top_k, tokens), |(n, j, m)| slot((m, j, n)));
    for down in [down.view(), turned.t()] {
        let y = bounds(down, F16).unwrap();
        assert_eq!(y.dim(), (tokens, size_n));
        for ((m, n), bound) in y.indexed_iter() {
            let sum: f64 = (0..top_k).map(|j| number(m, j, n)).sum();
            assert_eq!((bound.interval.lo, bound.interval.hi), (sum, sum), "({m}, {n})");
        }
    }
}

/// f32 additions in an order that `seed` chooses: any two partial sums are joined next.
fn any_order(mut parts: Vec<f32>, mut seed: u64) -> f32 {
    while parts.len() > 1 {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let a = parts.swap_remove((seed >> 33) as usize % parts.len());
        let b = (seed >> 40) as usize % parts.len();
        parts[b] += a;
    }
    parts[0]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20_000))]

    #[test]
    fn every_order_is_inside(
        codes in prop::collection::vec(0..=u16::MAX, 1..12),
        narrow: bool,
        bf16: bool,
        seed: u64,
    ) {
        let ty = if bf16 { BF16 } else { F16 };
        // All exponents, or close ones, where sums cancel and round.
        let near = |c: &u16| if narrow { c & 0x83ff | 0x3c00 } else { *c };
        // The lowest bit of an exponent that is all ones: finite without it.
        let (ones, lowest) = if bf16 { (0x7f80, 0x80) } else { (0x7c00, 0x400) };
        let finite = |c: u16| if c & ones == ones { c & !lowest } else { c };
        let codes: Vec<u16> = codes.iter().map(near).map(finite).collect();
        let xs: Vec<f32> = codes.iter().map(|&c| value(ty, c)).collect();
        let slots: Vec<_> = xs.iter().map(|&x| Bound::exactly(x.into())).collect();
        let bound = bound(&slots, ty);
        for seed in [seed, seed ^ 0x5555_5555_5555, !seed] {
            let y = value(ty, bits(ty, any_order(xs.clone(), seed)));
            prop_assert!(bound.allows(y), "{xs:?}: {y:e}, {bound:?}");
        }
        for chain in [Canonical, Upstream] {
            let y = value(ty, add(&codes, ty, codes.len(), 1, chain).expect("one token")[0]);
            prop_assert!(bound.allows(y), "{xs:?} {chain:?}: {y:e}, {bound:?}");
        }
        if narrow && !bf16 && codes.len() > 4 {
            // f32 loses no digit: only one value is correct.
            prop_assert!(bound.interval.is_point(), "{xs:?}: {bound:?}");
        }
    }

    /// Terms inside their bounds have a sum inside its bound.
    #[test]
    fn carried_errors_stay_inside(
        terms in prop::collection::vec((0..0x7800u16, 0..30u16, 0..30u16, any::<bool>()), 1..10),
        bf16: bool,
        seed: u64,
    ) {
        let ty = if bf16 { BF16 } else { F16 };
        let sign = |negative: bool| if negative { 0x8000 } else { 0u16 };
        let slots: Vec<Bound> = terms.iter().map(|&(code, wide, _, s)| {
            let number = |c: u16| f64::from(value(ty, c | sign(s)));
            let (a, b) = (number(code), number(code + wide));
            Bound { exact: a, interval: Interval { lo: a.min(b), hi: a.max(b) }, nan: false }
        }).collect();
        let chosen: Vec<u16> =
            terms.iter().map(|&(code, wide, at, s)| (code + at % (wide + 1)) | sign(s)).collect();
        let xs: Vec<f32> = chosen.iter().map(|&c| value(ty, c)).collect();
        let slots = Array3::from_shape_vec((1, slots.len(), 1), slots).unwrap();
        let wide = bounds(slots.view(), ty).expect("one token")[[0, 0]];
        let y = value(ty, bits(ty, any_order(xs.clone(), seed)));
        prop_assert!(wide.interval.contains(y.into()), "{xs:?}: {y:e}, {wide:?}");
        let y = add(&chosen, ty, chosen.len(), 1, Upstream).expect("one token")[0];
        prop_assert!(wide.interval.contains(value(ty, y).into()), "{xs:?}: {wide:?}");
    }
}

/// Five known terms whose digits f32 may lose: u times three partial sums and the result.
#[test]
fn widths_of_sums_are_the_stated_errors() {
    const U: f64 = 1.0 / (1u64 << 24) as f64;
    let (mut state, mut judged) = (1u64, 0);
    for trial in 0..40_000 {
        let mut next = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as f64 / f64::from(1u32 << 31) * 2.0 - 1.0
        };
        let k = [5, 6, 8, 16][trial % 4];
        let large = 2f64.powi(trial as i32 % 21);
        let terms: Vec<f32> = (0..k)
            .map(|j| if j % 3 == 0 { (next() * large) as f32 } else { (next() * 1e-3) as f32 })
            .map(|x| value(BF16, bits(BF16, x)))
            .collect();
        let slots: Vec<Bound> = terms.iter().map(|&x| Bound::exactly(x.into())).collect();
        let found = bound(&slots, BF16).interval;
        // Exact in f64: 2^21 to 2^-10 with 8 digits each.
        let exact: f64 = terms.iter().map(|&x| f64::from(x)).sum();
        let size: f64 = terms.iter().map(|&x| f64::from(x.abs())).sum();
        let error = U * ((k as f64 - 2.0) * size + exact.abs());
        let end = |x: f64| BF16.to_f64(BF16.encode_rne(x));
        // The last addition's result is rounded to f32 first.
        let most = error * 1.0001
            + exact.abs() * U
            + size * 2f64.powi(-38)
            + 20.0 * f64::from(f32::MIN_POSITIVE);
        let outer = Interval { lo: end(exact - most), hi: end(exact + most) };
        assert!(outer.lo <= found.lo && found.hi <= outer.hi, "{terms:?}: {found:?}, {outer:?}");
        // A power of two that divides every term: f32 holds all sums below 2^24 of it.
        let grid = (-60..=30).rev().map(|e| 2f64.powi(e));
        let grid = { grid }.find(|g| terms.iter().all(|&x| (f64::from(x) / g).fract() == 0.0));
        let is_exact = grid.is_some_and(|g| size <= g / U);
        let error = if is_exact { 0.0 } else { error };
        let inner = Interval { lo: end(exact - error), hi: end(exact + error) };
        assert!(found.lo <= inner.lo && inner.hi <= found.hi, "{terms:?}: {found:?}, {inner:?}");
        assert!(!is_exact || found == inner, "{terms:?}: {found:?}, {inner:?}");
        judged += usize::from(!is_exact);
    }
    assert!(judged > 1000 && judged < 39_000, "{judged}");
}
