//! The error function and the hyperbolic tangent compared with fixed-point series of 256 fraction
//! bits.

use marlinspike::case::Activation;
use marlinspike::moe::activation::Definition;
use marlinspike::moe::activation::bound::Bounds;
use marlinspike::moe::math::{erf, tanh};
use marlinspike::num::scalar::{self, ScalarType};
use num_bigint::BigInt;

/// Fraction bits.
const BITS: u32 = 256;

/// The exact `x` in fixed point; `x` is at least 2^-60.
fn fixed(x: f32) -> BigInt {
    let bits = x.to_bits();
    let significand = BigInt::from(bits & 0x7f_ffff | 0x80_0000);
    let exponent = (bits >> 23 & 0xff) as i32 - 150 + BITS as i32;
    let magnitude = significand << u32::try_from(exponent).expect("above 2^-83");
    if x < 0.0 { -magnitude } else { magnitude }
}

fn times(a: &BigInt, b: &BigInt) -> BigInt {
    (a * b) >> BITS
}

fn one() -> BigInt {
    BigInt::from(1) << BITS
}

/// √π by Newton's integer square root of π = 16·atan(1/5) − 4·atan(1/239).
fn sqrt_pi() -> BigInt {
    let atan = |n: u32| {
        let (mut term, mut sum, mut k) = (one() / n, one() / n, 1u32);
        while term != BigInt::ZERO {
            term = -term / (n * n);
            sum += &term / (2 * k + 1);
            k += 1;
        }
        sum
    };
    let pi: BigInt = atan(5) * 16 - atan(239) * 4;
    (pi << BITS).sqrt()
}

/// e^x for |x| ≤ 20: the series of x/2^10, squared ten times.
fn exp_fixed(x: &BigInt) -> BigInt {
    let small = x >> 10;
    let (mut term, mut sum, mut k) = (one(), one(), 1u32);
    while term.magnitude().bits() > 1 {
        term = times(&term, &small) / k;
        sum += &term;
        k += 1;
    }
    for _ in 0..10 {
        sum = times(&sum, &sum);
    }
    sum
}

/// tanh x = 1 − 2 / (e^2x + 1).
fn tanh_fixed(x: f32) -> BigInt {
    let e = exp_fixed(&(fixed(x) * 2));
    one() - (one() << (BITS + 1)) / (e + one())
}

/// erf x = (2/√π) Σ (−1)ⁿ x^(2n+1) / (n! (2n+1)).
fn erf_fixed(x: f32, sqrt_pi: &BigInt) -> BigInt {
    let x = fixed(x);
    let square = times(&x, &x);
    let (mut power, mut sum, mut n) = (x.clone(), x, 1u32);
    while power.magnitude().bits() > 1 {
        power = -times(&power, &square) / n;
        sum += &power / (2 * n + 1);
        n += 1;
    }
    (sum << (BITS + 1)) / sqrt_pi
}

/// |found − exact| in units of the last place that f32 has at `exact`.
fn ulps(exact: &BigInt, found: f32) -> f64 {
    let error = (fixed(found) - exact).magnitude().clone();
    let top = exact.magnitude().bits() as i64 - 1;
    // 2^(top − 23) is one unit; 20 more bits keep the fraction.
    let scaled: BigInt = (BigInt::from(error) << 20u32) >> u32::try_from(top - 23).expect("normal");
    f64::from(u32::try_from(scaled).unwrap_or(u32::MAX)) / f64::from(1 << 20)
}

/// Every f16 and bf16 number in [low, high) and some f32 between, negative too.
fn inputs(low: f32, high: f32) -> impl Iterator<Item = f32> {
    let sixteen = (0..=u16::MAX).flat_map(|b| {
        [marlinspike::num::scalar::f16_to_f32(b), marlinspike::num::scalar::bf16_to_f32(b)]
    });
    let dense = (low.to_bits()..high.to_bits())
        .step_by(if cfg!(emulated) { 19_997 } else { 1999 })
        .map(f32::from_bits);
    sixteen.chain(dense).filter(move |x| (low..high).contains(&x.abs()))
}

fn worst(low: f32, high: f32, of: fn(f32) -> f32, exact: impl Fn(f32) -> BigInt) -> f64 {
    let (mut worst, mut at) = (0.0, 0.0);
    for x in inputs(low, high) {
        let error = ulps(&exact(x), of(x));
        if error > worst {
            (worst, at) = (error, x);
        }
    }
    println!("{worst} ulp at {at}");
    worst
}

#[test]
fn error_function_is_within_two_ulp() {
    let sqrt_pi = sqrt_pi();
    let error = worst(1e-4, 4.1, erf, |x| erf_fixed(x, &sqrt_pi));
    assert!(error < 2.0 && error > 0.5, "{error}");
}

#[test]
fn tangent_is_within_two_ulp() {
    let error = worst(1e-4, 9.5, tanh, tanh_fixed);
    assert!(error < 2.0 && error > 0.5, "{error}");
}

/// Below 1e-4 the functions are their first two terms, to 2^-50.
#[test]
fn tiny_arguments() {
    let slope = std::f64::consts::FRAC_2_SQRT_PI;
    for bits in (0..1e-4f32.to_bits()).step_by(997) {
        let x = f32::from_bits(bits);
        let wide = f64::from(x);
        let square = wide * wide;
        let unit = (wide.max(f64::from(f32::MIN_POSITIVE)).to_bits() >> 52) as i32 - 1023 - 23;
        for (found, exact) in
            [(tanh(x), wide * (1.0 - square / 3.0)), (erf(x), slope * wide * (1.0 - square / 3.0))]
        {
            let error = (f64::from(found) - exact).abs() / 2f64.powi(unit);
            assert!(error < 2.0, "{x:e}: {found:e}, {exact:e}");
        }
    }
}

#[test]
fn ends_and_signs() {
    for of in [erf, tanh] {
        assert_eq!((of(f32::INFINITY), of(f32::NEG_INFINITY), of(f32::MAX)), (1.0, -1.0, 1.0));
        assert_eq!(of(0.0).to_bits(), 0);
        assert_eq!(of(-0.0).to_bits(), (-0.0f32).to_bits());
        assert!(of(f32::NAN).is_nan());
        for bits in (0..f32::INFINITY.to_bits()).step_by(65537) {
            let x = f32::from_bits(bits);
            assert_eq!(of(-x), -of(x));
            assert!(of(x) <= 1.0);
        }
    }
    // The nearest f32 to the function is 1 from here on.
    assert_eq!((erf(3.93), tanh(9.02)), (1.0, 1.0));
    assert!(erf(3.8) < 1.0 && tanh(8.9) < 1.0);
}

/// ½·g·(1 + t) in f64 with another library's functions, each result rounded once.
#[test]
fn gelu_in_f64_is_inside_the_bound_for_every_gate() {
    let inner = |g: f64| (2.0 / std::f64::consts::PI).sqrt() * (g + 0.044715 * g * g * g);
    let kinds: [(Activation, &dyn Fn(f64) -> f64); 2] = [
        (Activation::Gelu, &|g| libm::erf(g / std::f64::consts::SQRT_2)),
        (Activation::GeluTanh, &|g| libm::tanh(inner(g))),
    ];
    type Widen = fn(u16) -> f32;
    type Round = fn(f32) -> u16;
    let types: [(ScalarType, Widen, Round); 2] = [
        (ScalarType::FLOAT16, scalar::f16_to_f32, scalar::f32_to_f16_rne),
        (ScalarType::BFLOAT16, scalar::bf16_to_f32, scalar::f32_to_bf16_rne),
    ];
    for (activation, t) in kinds {
        for (ty, value, bits) in types {
            let mut bounds = Bounds::new(Definition::new(activation), ty).expect("a definition");
            let (mut judged, mut rejected) = (0, 0);
            for up in [1.0f32, -0.3359375, 832.0] {
                for gate in (0..=u16::MAX).filter(|&gate| value(gate).is_finite()) {
                    let g = f64::from(value(gate));
                    let bound = bounds.of_bits(gate, bits(up));
                    let out = |t: f64| value(bits((0.5 * g * (1.0 + t) * f64::from(up)) as f32));
                    let right = out(t(g));
                    assert!(
                        bound.allows(right),
                        "{activation} {ty} {g:e} {up}: {right:e}, {bound:?}"
                    );
                    // t in bfloat16.
                    let coarse = scalar::bf16_to_f32(scalar::f32_to_bf16_rne(t(g) as f32));
                    rejected += u32::from(!bound.allows(out(f64::from(coarse))));
                    judged += 1;
                }
            }
            assert!(judged > 190_000 && rejected > 1000, "{activation} {ty}: {judged}, {rejected}");
        }
    }
}
