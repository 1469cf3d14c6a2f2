//! The widths of the bounds of activations for every gate, from the errors that their table states.

use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_PI, FRAC_2_SQRT_PI};

use marlinspike::case::Activation;
use marlinspike::moe::activation::Definition;
use marlinspike::moe::activation::bound::Bounds;
use marlinspike::num::interval::{Bound, Interval};
use marlinspike::num::scalar::ScalarType;

/// Half an ulp of f32 at 1.
const U: f64 = 1.0 / (1u64 << 24) as f64;
/// For f64's own rounding.
const OWN: f64 = 1.0 / (1u64 << 39) as f64;
const LEAST: f64 = f32::MIN_POSITIVE as f64;

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// The exact value, the error that the table states, and the largest one that the bound may have.
type Stated = (f64, f64, f64);

/// Exponential: 2 + 1.173·|g| ulp of 2 u, of which the share e / (1 + e) remains; sum u, quotient 4 u, product u.
fn silu(g: f64) -> Stated {
    let (exact, share) = (g * sigmoid(g), sigmoid(-g));
    let relative = (4.0 + 2.346 * g.abs()) * share + 6.0;
    // One maximum for all larger gates: y / (1 + e^y) is at most 0.2785.
    let at_most = 4.0 * share + 2.346 * (g.abs() * share).max(0.2785) + 6.0;
    let size = exact.abs() * U;
    (exact, size * relative, size * at_most * 1.001)
}

/// Twice the unit in the last place of f32 below 1.
fn two_ulp(t: f64) -> f64 {
    2.0 * 2f64.powi(t.clamp(LEAST, 1.0 - U).log2().floor() as i32 - 23)
}

/// ½·g·(1 + t): 2 u of the value, and ½·g times 2 ulp of t and the argument's error.
fn cancelling(exact: f64, g: f64, t: f64, argument: f64) -> Stated {
    let error = 2.0 * U * exact.abs() + 0.5 * g.abs() * (two_ulp(t) + argument);
    // Next to a power of two, t may be taken for a number on the other side.
    let near = [t * (1.0 - 1e-12), t * (1.0 + 1e-12)].map(two_ulp);
    let (low, high) = (near[0].min(near[1]), near[0].max(near[1]));
    let most = error + 0.5 * g.abs() * (high - low);
    (exact, error - 0.5 * g.abs() * (high - low), most * 1.001)
}

fn gelu(g: f64) -> Stated {
    let z = g.abs() * FRAC_1_SQRT_2;
    let exact = 0.5 * g * libm::erfc(-g * FRAC_1_SQRT_2);
    // The argument is off by 2 u of it.
    let argument = 2.0 * U * z * FRAC_2_SQRT_PI * (-z * z).exp();
    cancelling(exact, g, libm::erf(z), argument)
}

fn gelu_tanh(g: f64) -> Stated {
    let y = FRAC_2_PI.sqrt() * (g + 0.044715 * g * g * g);
    // ½·(1 + tanh y) is a sigmoid.
    let exact = g * sigmoid(2.0 * y);
    let argument = 7.0 * U * y.abs() / y.cosh().powi(2);
    cancelling(exact, g, y.abs().tanh(), argument)
}

fn rounded(ty: ScalarType, x: f64) -> f64 {
    ty.to_f64(ty.encode_rne(x))
}

#[test]
fn widths_are_the_stated_errors_for_every_gate() {
    type Of = fn(f64) -> Stated;
    let kinds: [(Activation, Of, f64); 3] = [
        (Activation::SiluNoMul, silu, 86.9),
        // Beyond these gates erff and tanhf are ±1.
        (Activation::GeluNoMul, gelu, 7.1),
        (Activation::GeluTanhNoMul, gelu_tanh, 5.5),
    ];
    for (activation, of, last) in kinds {
        let definition = Definition::new(activation);
        for ty in [ScalarType::FLOAT16, ScalarType::BFLOAT16] {
            let mut bounds = Bounds::new(definition, ty).unwrap();
            let mut judged = 0;
            for bits in 0..=u16::MAX {
                let g = ty.to_f64(bits.into());
                if !g.is_finite() || g < -last || g > 60.0 || g.abs() < 1e-30 {
                    continue;
                }
                let (exact, least, most) = of(g);
                let found = bounds.of_bits(bits, 0).interval;
                let own = exact.abs() * OWN;
                // The result may be rounded to f32 before it is rounded to the type.
                let (least, most) =
                    ((least * 0.999 - own).max(0.0), most + 2.0 * own + LEAST + exact.abs() * U);
                let inner = [rounded(ty, exact - least), rounded(ty, exact + least)];
                let outer = [rounded(ty, exact - most), rounded(ty, exact + most)];
                assert!(
                    outer[0] <= found.lo && found.lo <= inner[0],
                    "{activation} {ty} {g}: from {:e}, expected {:e} to {:e}",
                    found.lo,
                    outer[0],
                    inner[0]
                );
                assert!(
                    inner[1] <= found.hi && found.hi <= outer[1],
                    "{activation} {ty} {g}: to {:e}, expected {:e} to {:e}",
                    found.hi,
                    inner[1],
                    outer[1]
                );
                judged += 1;
            }
            assert!(judged > 20_000, "{activation} {ty}: {judged}");
        }
    }
}

/// Zero times a number that may have overflowed, or not, is zero or NaN.
#[test]
fn a_zero_factor_of_an_uncertain_one() {
    let wide = Interval { lo: f64::NEG_INFINITY, hi: f64::INFINITY };
    let uncertain = Bound { exact: 3.0, interval: wide, nan: true };
    for (activation, gate) in [(Activation::Silu, 0.0), (Activation::Relu2, -2.0)] {
        let bounds = Bounds::new(Definition::new(activation), ScalarType::BFLOAT16).unwrap();
        let out = bounds.of_bounds(&Bound::exactly(gate), &uncertain);
        assert!(out.allows(0.0) && out.allows(f32::NAN) && !out.allows(1e-6), "{out:?}");
    }
}
