//! The bound of a norm whose inputs have errors: no implementation leaves it, and it is finite unless the
//! sum of squares may overflow.

use marlinspike::moe::block::{Near, Stage};
use marlinspike::num::scalar::ScalarType;
use marlinspike::vectors::Rng;

const N: usize = 48;

fn norm(x: &[Near], eps: f32, ty: ScalarType) -> Vec<Near> {
    let stage = Stage::RmsNorm { eps, weight: None, weight_offset: 0.0, weight_first: false };
    stage.apply(x, &|_| None, ty)
}

/// From −1 to 1.
fn unit(rng: &mut Rng) -> f64 {
    f64::from(rng.next_u32()) / f64::from(u32::MAX) * 2.0 - 1.0
}

/// An implementation in f32: squares added from `first` on, a root, a product, one rounding.
fn run(x: &[f32], eps: f32, first: usize, ty: ScalarType) -> Vec<f64> {
    let squares = x[first..].iter().chain(&x[..first]).fold(0.0f32, |s, x| s + x * x);
    let root = 1.0 / (squares / N as f32 + eps).sqrt();
    x.iter().map(|x| ty.to_f64(ty.encode_rne(f64::from(x * root)))).collect()
}

#[test]
fn no_implementation_leaves_it() {
    let mut rng = Rng::new(5);
    for ty in [ScalarType::FLOAT32, ScalarType::BFLOAT16] {
        // Errors of no, few and most of the magnitude, and above it.
        for share in [0.0, 1e-6, 0.01, 0.4, 0.99, 1.0, 3.0] {
            for (size, eps) in [(1.0, 1e-6f32), (1e-4, 1e-6), (1e15, 1e-6), (1.0, 0.0)] {
                let exact: Vec<f64> = (0..N).map(|_| size * unit(&mut rng)).collect();
                let x: Vec<Near> = exact
                    .iter()
                    .map(|&exact| Near { exact, error: share * exact.abs() + 1e-6 * size })
                    .collect();
                let bound = norm(&x, eps, ty);
                assert!(bound.iter().all(|b| b.error.is_finite()), "{share} {size} {eps}");
                for trial in 0..300 {
                    let moved = |x: &Near| {
                        let at = match trial % 3 {
                            0 => unit(&mut rng),
                            // The ends.
                            1 => unit(&mut rng).signum(),
                            _ => -x.exact.signum(),
                        };
                        // Rounding to f32 stays within the error.
                        (x.exact + 0.9 * at * x.error) as f32
                    };
                    let values: Vec<f32> = x.iter().map(moved).collect();
                    for (found, bound) in run(&values, eps, trial % N, ty).iter().zip(&bound) {
                        let interval = bound.interval();
                        assert!(
                            interval.contains(*found),
                            "{ty} {share} {size} {eps}: {found} outside of {interval:?}"
                        );
                    }
                }
            }
        }
    }
}

/// An input whose error exceeds its value leaves a bound that still rejects most numbers.
#[test]
fn a_wide_input_has_a_bound() {
    let x = vec![Near { exact: 1.0, error: 2.0 }; N];
    for bound in norm(&x, 1e-6, ScalarType::BFLOAT16) {
        assert!(bound.error < 9.0, "{bound:?}");
    }
    let x = vec![Near { exact: 1.0, error: 0.5 }; N];
    for bound in norm(&x, 1e-6, ScalarType::BFLOAT16) {
        assert!(bound.error < 2.1, "{bound:?}");
    }
}

#[test]
fn sums_that_may_overflow_have_no_bound() {
    let without = |x: &[Near], eps: f32| {
        norm(x, eps, ScalarType::FLOAT32).iter().all(|b| !b.error.is_finite())
    };
    assert!(without(&[Near::point(1e20); N], 1e-6));
    assert!(without(&[Near { exact: 0.0, error: f64::INFINITY }; N], 1e-6));
    assert!(without(&[Near::point(0.0); N], 0.0));
    let mut one = [Near::point(1.0); N];
    one[3].error = 1e20;
    assert!(without(&one, 1e-6));
}
