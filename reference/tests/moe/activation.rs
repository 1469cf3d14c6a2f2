//! Activations: values, special values, and bounds that no implementation of the class exceeds.

use approx::assert_abs_diff_eq;
use marlinspike::case::Activation;
use marlinspike::moe::Chain;
use marlinspike::moe::activation::bound::Bounds;
use marlinspike::moe::activation::{Columns, Definition};
use marlinspike::num::array::FloatView2;
use marlinspike::num::element::f16;
use marlinspike::num::interval::{Bound, Interval};
use marlinspike::num::scalar::{self, ScalarType};
use marlinspike::{Error, Result};
use marlinspike_golden::Tier;
use proptest::prelude::*;
use rayon::prelude::*;

const F16: ScalarType = ScalarType::FLOAT16;
const BF16: ScalarType = ScalarType::BFLOAT16;

fn value(ty: ScalarType, bits: u16) -> f32 {
    if ty == F16 { scalar::f16_to_f32(bits) } else { scalar::bf16_to_f32(bits) }
}

fn bits(ty: ScalarType, x: f32) -> u16 {
    if ty == F16 { scalar::f32_to_f16_rne(x) } else { scalar::f32_to_bf16_rne(x) }
}

fn all() -> impl Iterator<Item = (Activation, Definition)> {
    Activation::NAMED.iter().map(|&(_, a)| (a, Definition::new(a)))
}

/// The activation of bits.
fn apply(
    d: &Definition,
    x: &[u16],
    ty: ScalarType,
    size_i: usize,
    chain: Chain,
) -> Result<Vec<u16>> {
    let gate_up = FloatView2::from_rows("gate_up", ty, d.width_in(size_i), x)?;
    Ok(d.apply(gate_up, chain)?.into_bits())
}

/// One output of the definition, by way of a row of one column.
fn one(d: &Definition, ty: ScalarType, gate: u16, up: u16, chain: Chain) -> Option<u16> {
    let row: &[u16] = if d.columns == Columns::Gate { &[gate] } else { &[gate, up] };
    Some(apply(d, row, ty, 1, chain).ok()?[0])
}

/// The output of the definition for each gate with the same `up`, by way of rows of one column.
fn every_gate(d: &Definition, ty: ScalarType, up: u16, chain: Chain) -> Option<Vec<u16>> {
    let row = |gate| if d.columns == Columns::Gate { vec![gate] } else { vec![gate, up] };
    let rows: Vec<u16> = (0..=u16::MAX).flat_map(row).collect();
    apply(d, &rows, ty, 1, chain).ok()
}

/// By 40-digit arithmetic: x, GELU, GELU by tangent, SiLU, x · sigmoid(1.702 · x).
const EXACT: [[f64; 5]; 7] = [
    [
        -6.0,
        -5.9195258702261885e-09,
        -8.439646700762297e-11,
        -0.014835738939808645,
        -0.00022035352078837747,
    ],
    [
        -3.0,
        -0.0040496940948902835,
        -0.0036373920817730186,
        -0.14227761953270035,
        -0.018071308525793275,
    ],
    [-1.0, -0.15865525393145705, -0.1588080093917233, -0.2689414213699951, -0.15420423120636403],
    [-0.25, -0.10032341857926907, -0.100324649298315, -0.10945587477855047, -0.09880034977213543],
    [0.5, 0.34573123063700656, 0.34571400982514394, 0.3112296656009273, 0.3503884377562345],
    [2.0, 1.9544997361036416, 1.954597694087775, 1.7615941559557649, 1.9356586258759965],
    [5.0, 4.999998566742141, 4.999999770820381, 4.966535745378576, 4.998992983843068],
];

/// The formula of each kind for a gate of [`EXACT`].
fn formula(activation: Activation, row: &[f64; 5], up: f64) -> f64 {
    use Activation as A;
    let [x, gelu, gelu_tanh, silu, quick] = *row;
    let relu2 = if x > 0.0 { x * x } else { 0.0 };
    match activation {
        A::Silu => silu * up,
        A::Gelu => gelu * up,
        A::GeluTanh => gelu_tanh * up,
        A::Relu2 => relu2 * up,
        A::SwigluOai => quick * (up.clamp(-7.0, 7.0) + 1.0),
        A::SwigluStep => silu * up.clamp(-7.0, 7.0),
        A::SiluNoMul => silu,
        A::GeluNoMul => gelu,
        A::GeluTanhNoMul => gelu_tanh,
        A::Relu2NoMul => relu2,
        other => panic!("{other} has no formula here"),
    }
}

#[test]
fn exact_values_and_results_are_the_formulas() {
    for (activation, d) in all() {
        for ty in [F16, BF16] {
            let mut bounds = Bounds::new(d, ty).expect("a definition");
            for row in &EXACT {
                for up in [1.5f32, -0.75, 8.0, -20.0] {
                    let (gate, up_bits) = (bits(ty, row[0] as f32), bits(ty, up));
                    let exact = formula(activation, row, up.into());
                    let bound = bounds.of_bits(gate, up_bits);
                    let error = (bound.exact - exact).abs();
                    assert!(error <= exact.abs() * 1e-12, "{activation}: {bound:?}, {exact:e}");
                    // In f32, ½·g·(1 + t) keeps 2^-23 of ½·g where it cancels.
                    let cancelled = row[0].abs() * f64::from(up).abs().max(1.0) * 2f64.powi(-23);
                    let out = value(ty, one(&d, ty, gate, up_bits, Chain::Canonical).expect("one"));
                    let ulp = if ty == F16 { 2f64.powi(-11) } else { 2f64.powi(-8) };
                    let error = (f64::from(out) - exact).abs();
                    let most = exact.abs() * ulp * 1.01 + cancelled + 2f64.powi(-25);
                    assert!(error <= most, "{activation} {ty} {row:?} {up}: {out:e}, {exact:e}");
                }
            }
        }
    }
}

/// Significant values of up: zeros, ones, limits, subnormal, large, infinite, NaN.
fn ups(ty: ScalarType) -> Vec<u16> {
    let finite = [0.0, 1.0, -1.0, 0.3359375, -2.546875, 6.96875, 7.0625, -9.0, 1e-5, 3e4];
    let mut ups: Vec<u16> = finite.iter().map(|&x| bits(ty, x)).collect();
    let infinity = bits(ty, f32::INFINITY);
    ups.extend([0x8000, 1, 0x8001, infinity, infinity | 0x8000, infinity - 1, 0x7fff]);
    ups
}

#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "minutes under emulation; --include-ignored runs it")]
fn both_chains_are_inside_the_bound_for_every_gate() {
    let pairs: Vec<_> = all().flat_map(|(a, d)| [(a, d, F16), (a, d, BF16)]).collect();
    pairs.into_par_iter().for_each(|(activation, d, ty)| {
        let mut bounds = Bounds::new(d, ty).expect("a definition");
        let mut steps = Vec::new();
        // A plain `cargo test` takes every third.
        for up in ups(ty).into_iter().step_by(Tier::current().pick(3, 1, 1)) {
            let chains = [Chain::Canonical, Chain::Upstream]
                .map(|chain| (chain, every_gate(&d, ty, up, chain)));
            for gate in 0..=u16::MAX {
                let bound = bounds.of_bits(gate, up);
                for (chain, outs) in &chains {
                    let Some(outs) = outs else { continue };
                    let out = outs[usize::from(gate)];
                    let ratio = bound.ratio(value(ty, out));
                    assert!(
                        ratio <= 1.0,
                        "{activation} {ty} {chain:?}: gate {} up {} gives {}, not in {bound:?}",
                        value(ty, gate),
                        value(ty, up),
                        value(ty, out),
                    );
                }
                let within = |x: f32| (1e-3..64.0).contains(&x.abs());
                if within(value(ty, gate)) && within(value(ty, up)) {
                    steps.push(values_inside(ty, bound.interval));
                }
            }
        }
        steps.sort_unstable();
        let (median, most) = (steps[steps.len() / 2], steps[steps.len() * 99 / 100]);
        println!("{activation} {ty}: {median} values allowed in the median, {most} at 99 %");
        // One value, or two if rounding may go either way; a rounded factor adds one.
        assert!(median <= 3, "{activation} {ty}: {median}");
    });
}

/// Number of the type's values in an interval.
fn values_inside(ty: ScalarType, interval: Interval) -> i32 {
    let order = |x: f64| {
        let b = bits(ty, x as f32);
        let magnitude = i32::from(b & 0x7fff);
        if b & 0x8000 == 0 { magnitude } else { -magnitude }
    };
    order(interval.hi) - order(interval.lo) + 1
}

/// A generator of small deterministic errors.
struct Errors(u64);

impl Errors {
    fn next(&mut self) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    /// `x` in f32, off by up to `ulps` of its last place (the ends most often), flushed at times.
    fn off(&mut self, x: f64, ulps: f64) -> f64 {
        if x == 0.0 {
            return x;
        }
        let share = [-1.0, 1.0, 0.0, 0.5][(self.next() % 4) as usize];
        let unit = 2f64.powi(((x.abs().max(1e-38).to_bits() >> 52) as i32 - 1023) - 23);
        let y = if x.is_finite() { (x + share * ulps * unit) as f32 } else { x as f32 };
        let flush = y.abs() < f32::MIN_POSITIVE && self.next().is_multiple_of(2);
        if flush { 0.0 } else { y.into() }
    }

    fn flip(&mut self) -> bool {
        self.next().is_multiple_of(2)
    }
}

/// An implementation of the class with the largest errors that its functions may have, for the
/// kinds with a sigmoid.
fn careless(d: &Definition, ty: ScalarType, gate: f32, up: f32, r: &mut Errors) -> f32 {
    let g = f64::from(d.gate_limit.map_or(gate, |l| gate.min(l)));
    let alpha = f64::from(d.alpha);
    let argument = if alpha == 1.0 { -g } else { r.off(-g * alpha, 0.0) };
    let ulps = 2.0 + (1.173 * argument.abs()).floor();
    let most = if r.flip() { ulps } else { 1.0 };
    let e = r.off(argument.exp(), most);
    let sum = r.off(1.0 + e, 0.0);
    let divide = |r: &mut Errors, a: f64, b: f64| {
        if b > 2f64.powi(126) && r.flip() { 0.0 } else { r.off(a / b, 1.5) }
    };
    let f = if r.flip() {
        divide(r, g, sum)
    } else {
        let sigmoid = divide(r, 1.0, sum);
        r.off(g * sigmoid, 0.0)
    };
    let f = d.value_limit.map_or(f, |l| f.min(l.into()));
    if !d.is_gated() {
        return value(ty, bits(ty, f as f32));
    }
    let u = f64::from(d.up_limit.map_or(up, |l| up.clamp(-l, l)));
    let u = if d.up_shift == 0.0 { u } else { r.off(u + f64::from(d.up_shift), 0.0) };
    let rounded = |x: f64| f64::from(value(ty, bits(ty, x as f32)));
    let f = if r.flip() { rounded(f) } else { f };
    let u = if r.flip() { rounded(u) } else { u };
    value(ty, bits(ty, (f * u) as f32))
}

#[test]
fn the_largest_library_errors_are_inside() {
    use Activation as A;
    let mut r = Errors(7);
    let mut judged = 0;
    // Under emulation every seventh gate.
    let step = if cfg!(emulated) { 7 } else { 1 };
    for activation in [A::Silu, A::SwigluOai, A::SwigluStep, A::SiluNoMul] {
        let d = Definition::new(activation);
        for ty in [F16, BF16] {
            let mut bounds = Bounds::new(d, ty).expect("a definition");
            let gates = (0..=u16::MAX).step_by(step).filter(|&g| value(ty, g).is_finite());
            for gate in gates {
                for up in [0.7265625f32, -3.40625, 8.5, 2048.0] {
                    let up = bits(ty, up);
                    let bound = bounds.of_bits(gate, up);
                    let out = careless(&d, ty, value(ty, gate), value(ty, up), &mut r);
                    let at = value(ty, gate);
                    assert!(bound.allows(out), "{activation} {ty} {at:e}: {out:e}, {bound:?}");
                    judged += 1;
                }
            }
        }
    }
    assert!(judged > 400_000 / step);
}

#[test]
fn nan_infinity_and_zero() {
    let inf = f32::INFINITY;
    for (activation, d) in all() {
        for ty in [F16, BF16] {
            let get = |gate, up, chain| {
                one(&d, ty, bits(ty, gate), bits(ty, up), chain).map(|b| value(ty, b))
            };
            let canonical = |gate, up| get(gate, up, Chain::Canonical).expect("a value");
            let mut bounds = Bounds::new(d, ty).expect("a definition");
            let mut bound = |gate: f32, up: f32| bounds.of_bits(bits(ty, gate), bits(ty, up));
            assert!(canonical(f32::NAN, 1.0).is_nan(), "{activation}");
            assert!(bound(f32::NAN, 1.0).nan);
            if d.is_gated() {
                assert!(canonical(1.0, f32::NAN).is_nan(), "{activation}");
                assert!(bound(1.0, f32::NAN).nan);
            }
            let limited = d.gate_limit.is_some() || d.value_limit.is_some();
            // Only a limit may drop a NaN.
            assert_eq!(bound(f32::NAN, 1.0).interval == Interval::EMPTY, !limited);
            assert!(!bound(f32::NAN, 1.0).allows(0.25));
            if let Some(found) = get(f32::NAN, 1.0, Chain::Upstream) {
                assert_eq!(found.is_nan(), !limited, "{activation}");
            }
            let relu = matches!(activation, Activation::Relu2 | Activation::Relu2NoMul);
            let low = canonical(-inf, 1.0);
            assert!(if relu { low == 0.0 } else { low.is_nan() }, "{activation}: {low}");
            assert_eq!(bound(-inf, 1.0).allows(0.0), relu, "{activation}");
            let high = canonical(inf, 1.0);
            assert_eq!(high.is_infinite(), !limited, "{activation}: {high}");
            assert!(bound(inf, 1.0).allows(high));
            // A finite number does not match an infinity, and vice versa.
            assert!(!bound(inf, 1.0).allows(60000.0), "{activation}");
            assert!(!bound(1.0, 1.0).allows(inf), "{activation}");
            let zero = canonical(-0.0, 1.0);
            assert!(zero == 0.0 && zero.is_sign_negative() != relu, "{activation}: {zero}");
            assert!(bound(-0.0, 1.0).allows(0.0) && !bound(-0.0, 1.0).allows(1e-6));
        }
    }
    let silu = Definition::new(Activation::Silu);
    let infinite = bits(F16, inf);
    let out = one(&silu, F16, infinite, 0, Chain::Canonical).expect("one");
    assert!(value(F16, out).is_nan());
    let bound = Bounds::new(silu, F16).expect("a definition").of_bits(infinite, 0);
    assert_eq!((bound.interval, bound.nan), (Interval::EMPTY, true));
    // 200 · 400 overflows f16 only.
    let out = one(&silu, F16, bits(F16, 200.0), bits(F16, 400.0), Chain::Canonical).expect("one");
    assert_eq!(value(F16, out), inf);
}

/// Upstream's operator rounds a limit that the type cannot represent, or does not round it.
#[test]
fn limits_between_numbers_of_the_type() {
    let d = Definition::new(Activation::Silu).with_limit(7.03);
    let mut bounds = Bounds::new(d, BF16).expect("a definition");
    let (gate, up) = (bits(BF16, 9.0), bits(BF16, -9.0));
    for chain in [Chain::Canonical, Chain::Upstream] {
        let out = value(BF16, one(&d, BF16, gate, up, chain).expect("one"));
        assert!(bounds.of_bits(gate, up).allows(out), "{chain:?}: {out}");
    }
    // 7.03 becomes 7.03125; the product is rounded from there.
    let upstream = value(BF16, one(&d, BF16, gate, up, Chain::Upstream).expect("one"));
    assert_eq!(upstream, -49.5);
}

#[test]
fn limits_and_layout() {
    let row = |ty, xs: &[f32]| xs.iter().map(|&x| bits(ty, x)).collect::<Vec<_>>();
    let oai = Definition::new(Activation::SwigluOai);
    // Gate 100 is limited to 7, whose sigmoid of 11.9 is nearly 1; up −100 to −7, plus one −6.
    let gate_up = row(F16, &[100.0, 1.0, 1.0, -100.0]);
    let out = apply(&oai, &gate_up, F16, 2, Chain::Canonical).expect("a row");
    let sigmoid = 1.0 / (1.0 + (-1.702f32).exp());
    assert_eq!(value(F16, out[0]), 14.0);
    // From 4 to 8, f16 has steps of 2^-8; half a step is lost, and a few units of f32.
    assert_abs_diff_eq!(value(F16, out[1]), -6.0 * sigmoid, epsilon = 2f32.powi(-9) + 1e-5);
    let step = Definition::new(Activation::SwigluStep);
    let out = apply(&step, &row(F16, &[100.0, -100.0]), F16, 1, Chain::Upstream).expect("a row");
    assert_eq!(value(F16, out[0]), -49.0);
    let clamped = Definition::new(Activation::Silu).with_limit(2.0);
    let out =
        apply(&clamped, &row(BF16, &[100.0, -100.0]), BF16, 1, Chain::Canonical).expect("one");
    assert_eq!(out[0], bits(BF16, -2.0 * 1.761_594_2));
    assert_eq!(oai.with_limit(3.0).gate_limit, Some(3.0));
    assert_eq!(step.with_limit(3.0).value_limit, Some(3.0));
    let lone = Definition::new(Activation::Relu2NoMul);
    assert_eq!((lone.width_in(5), oai.width_in(5)), (5, 10));
    let out = apply(&lone, &row(F16, &[3.0, -3.0]), F16, 2, Chain::Canonical).expect("a row");
    assert_eq!(out, row(F16, &[9.0, 0.0]));
}

#[test]
fn refusals() {
    let d = Definition::new(Activation::Silu);
    let with = |d: Definition, ty| apply(&d, &[0; 4], ty, 2, Chain::Canonical);
    let odd = apply(&d, &[0; 6], F16, 2, Chain::Canonical);
    assert!(matches!(odd, Err(Error::Shape { .. })));
    for cols in [0, 3] {
        let gate_up = ndarray::Array2::from_elem((2, cols), f16::ZERO);
        assert!(matches!(d.apply(gate_up.view(), Chain::Canonical), Err(Error::Shape { .. })));
    }
    let single = ndarray::Array2::<f32>::zeros((2, 4));
    let refused = d.apply(single.view(), Chain::Canonical);
    assert!(matches!(refused, Err(Error::Unsupported { .. })));
    for alpha in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        assert!(matches!(with(Definition { alpha, ..d }, F16), Err(Error::Size { .. })));
    }
    for limit in [-1.0, f32::NAN, f32::INFINITY] {
        assert!(matches!(with(d.with_limit(limit), F16), Err(Error::Size { .. })));
    }
    assert!(matches!(with(Definition { up_shift: f32::NAN, ..d }, F16), Err(Error::Size { .. })));
    let gated = apply(&Definition::new(Activation::Relu2), &[0; 4], F16, 2, Chain::Upstream);
    assert!(matches!(gated, Err(Error::Unsupported { .. })));
    let shifted = Definition { up_shift: 1.0, ..Definition::new(Activation::Gelu) };
    let refused = apply(&shifted, &[0; 4], F16, 2, Chain::Upstream);
    assert!(matches!(refused, Err(Error::Unsupported { .. })));
    assert!(matches!(Bounds::new(d, ScalarType::INT8), Err(Error::Unsupported { .. })));
    assert!(matches!(d.bounds(ndarray::ArrayView2::from(&[[]; 0]), F16), Err(Error::Shape { .. })));
}

/// A rounding keeps the sign, also of numbers whose product with what they round to underflows.
#[test]
fn tiny_results_keep_their_sign() {
    let tiny = Interval::point(-1.5e-282).after_f32(0.0);
    assert!(tiny.lo < 0.0 && tiny.hi == 0.0, "{tiny:?}");
    let tiny = Interval::point(1.5e-282).after_f32(0.0);
    assert!(tiny.lo == 0.0 && tiny.hi > 0.0, "{tiny:?}");
    // gelu(-36) · 32768 is about -5e-278.
    let d = Definition::new(Activation::Gelu);
    let bound = Bounds::new(d, BF16).unwrap().of_bits(bits(BF16, -36.0), bits(BF16, 32768.0));
    assert_eq!(bound.interval.hi, 0.0, "{bound:?}");
}

fn step(bits: u16, n: i32) -> u16 {
    // Numbers of one sign order like their bits.
    (bits & 0x8000) | (i32::from(bits & 0x7fff) + n).clamp(0, 0x7bff) as u16
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    /// For all gate and up inside their bounds, the result is inside its bound; bounds of width
    /// zero give the result for bits.
    #[test]
    fn carried_errors_stay_inside(
        kind in 0..Activation::NAMED.len(),
        bf16: bool,
        gate in 0..=u16::MAX,
        up in 0..=u16::MAX,
        wide in 0..40i32,
        place in 0.0..1.0f64,
    ) {
        let (ty, d) = (if bf16 { BF16 } else { F16 }, Definition::new(Activation::NAMED[kind].1));
        prop_assume!(value(ty, gate).is_finite() && value(ty, up).is_finite());
        let number = |b| f64::from(value(ty, b));
        let around = |b: u16| {
            let (a, c) = (number(step(b, -wide)), number(step(b, wide)));
            let interval = Interval { lo: a.min(c), hi: a.max(c) };
            Bound { exact: number(b).clamp(interval.lo, interval.hi), interval, nan: false }
        };
        let mut bounds = Bounds::new(d, ty).expect("a definition");
        let carried = bounds.of_bounds(&around(gate), &around(up));
        let moved = (place * f64::from(2 * wide)) as i32 - wide;
        for (g, u) in [(step(gate, moved), step(up, -moved)), (step(gate, wide), step(up, wide))] {
            let inside = bounds.of_bits(g, u);
            for end in [inside.interval.lo, inside.interval.hi] {
                prop_assert!(
                    carried.interval.contains(end),
                    "{d:?}: {inside:?} of {} {} is not in {carried:?}", number(g), number(u)
                );
            }
        }
        let point = bounds.of_bounds(&Bound::exactly(number(gate)), &Bound::exactly(number(up)));
        prop_assert_eq!(point, bounds.of_bits(gate, up));
    }
}
