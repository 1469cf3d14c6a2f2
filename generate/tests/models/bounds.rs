//! Each operation is within its derived bound of float64 on the same inputs.
//!
//! u is f32's unit roundoff. A sum of K terms in 16 lanes rounds each term at most ⌈K/16⌉ + 4 times. A
//! bound on a whole model would multiply the worst cases of all layers and exclude nothing; the golden
//! tests compare whole models with a measured limit instead.

use marlinspike::num::tensor::{DType, Tensor};
use marlinspike_generate::ops::attention::{Heads, Keys};
use marlinspike_generate::ops::dense::Dense;
use marlinspike_generate::ops::norm::RmsNorm;
use marlinspike_generate::ops::rope::{Rope, rotate};

const U: f64 = 1.0 / (1u64 << 24) as f64;

/// Roundings of a term of a sum of `n` terms.
fn roundings(n: usize) -> f64 {
    (n.div_ceil(16) + 4) as f64
}

/// The relative error of `count` roundings.
fn gamma(count: f64) -> f64 {
    count * U / (1.0 - count * U)
}

/// Numbers of about `size`, some of them twenty times smaller or larger.
fn values(seed: u64, len: usize, size: f64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as f64 / (1u64 << 53) as f64
    };
    let mut value = || {
        let factor = match (next() * 20.0) as u32 {
            0 => 0.05,
            1 => 20.0,
            _ => 1.0,
        };
        ((2.0 * next() - 1.0) * size * factor) as f32
    };
    (0..len).map(|_| value()).collect()
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&x| f64::from(x)).collect()
}

/// Every error is within its bound, and no bound accepts an error of `damage` times the largest value.
fn check(what: &str, found: &[f32], expected: &[(f64, f64)], damage: f64) {
    assert_eq!(found.len(), expected.len());
    let damage = damage * expected.iter().fold(0.0f64, |m, (y, _)| m.max(y.abs()));
    let mut worst: f64 = 0.0;
    for (&y, &(exact, bound)) in found.iter().zip(expected) {
        let error = (f64::from(y) - exact).abs();
        assert!(error <= bound, "{what}: error {error:e}, bound {bound:e}");
        assert!(damage > bound, "{what}: the bound {bound:e} accepts an error of {damage:e}");
        worst = worst.max(error / bound);
    }
    println!("{what}: error up to {worst:.3} of the bound");
}

#[test]
fn products() {
    for (seed, size_k) in [(1, 64), (2, 777), (3, 2048)] {
        let (size_m, size_n) = (3, 9);
        let (x, w) = (values(seed, size_m * size_k, 1.0), values(seed + 9, size_n * size_k, 0.1));
        let tensor = Tensor::from_vec("w", DType::F32, vec![size_n, size_k], w.clone()).unwrap();
        let mut y = vec![0.0; size_m * size_n];
        Dense::new(tensor, size_n, size_k).unwrap().forward(&x, &mut y);
        let (x, w) = (wide(&x), wide(&w));
        let expected: Vec<(f64, f64)> = (0..size_m * size_n)
            .map(|i| {
                let (x, w) = (&x[i / size_n * size_k..], &w[i % size_n * size_k..]);
                let products = || (0..size_k).map(|k| x[k] * w[k]);
                let magnitude: f64 = products().map(f64::abs).sum();
                (products().sum(), gamma(roundings(size_k)) * magnitude)
            })
            .collect();
        check(&format!("product, K = {size_k}"), &y, &expected, 1e-4);
    }
}

#[test]
fn norms() {
    for (seed, size) in [(4, 32), (5, 1000), (6, 2048)] {
        let (weight, eps) = (values(seed + 9, size, 1.0), 1e-6f32);
        let mut rows = values(seed, 4 * size, 2.0);
        let x = wide(&rows);
        RmsNorm::new(weight.clone(), eps).apply(&mut rows);
        let mut expected = Vec::new();
        for row in x.chunks(size) {
            let mean = row.iter().map(|x| x * x).sum::<f64>() / size as f64;
            let factor = 1.0 / (mean + f64::from(eps)).sqrt();
            // Half of: the sum, its division, ε; then root, reciprocal and two products.
            let count = (roundings(size) + 2.0) / 2.0 + 4.0;
            let exact = row.iter().zip(&weight).map(|(x, &w)| x * factor * f64::from(w));
            // A row times w is not below f32's normal range here, but zero times anything is exact.
            expected.extend(exact.map(|y| (y, gamma(count + 1.0) * y.abs() + 1e-30)));
        }
        check(&format!("norm of {size}"), &rows, &expected, 1e-4);
    }
}

#[test]
fn rotations() {
    let (theta, dim) = (1e6, 128);
    let rope = Rope::new(theta, dim);
    for position in [0, 1, 100, 40_000] {
        let (mut table, mut row) = (vec![0.0; dim], values(7, 3 * dim, 1.0));
        let x = wide(&row);
        rope.angles(position, &mut table);
        rotate(&mut row, &table);
        let expected: Vec<(f64, f64)> = (0..3 * dim)
            .map(|i| {
                let (head, d) = (i / dim * dim, i % dim);
                let pair = d % (dim / 2);
                let exponent = (2 * pair) as f64 / dim as f64;
                // Rounded to f32 where the definition rounds: frequency and angle.
                let frequency = (1.0 / theta.powf(exponent)) as f32;
                let angle = f64::from(position as f32 * frequency);
                let (a, b) = (x[head + pair], x[head + dim / 2 + pair]);
                let (first, second) = match d < dim / 2 {
                    true => (a * angle.cos(), -b * angle.sin()),
                    false => (b * angle.cos(), a * angle.sin()),
                };
                // cos or sin, the product, the sum.
                (first + second, gamma(3.0) * (first.abs() + second.abs()))
            })
            .collect();
        check(&format!("rotation at {position}"), &row, &expected, 1e-5);
    }
}

#[test]
fn attention() {
    for (seed, n, dim) in [(11, 1, 32), (12, 70, 64), (13, 1500, 128)] {
        let query = values(seed, dim, 0.05);
        let (keys, values) = (values(seed + 1, n * dim, 0.05), values(seed + 2, n * dim, 1.0));
        let (mut scores, mut out) = (Vec::new(), vec![0.0; dim]);
        let scale = 1.0 / (dim as f32).sqrt();
        Heads {
            queries: &query,
            keys: Keys::Rows(&keys),
            values: &values,
            count: n,
            head_dim: dim,
            value_dim: dim,
            sinks: None,
            scale,
            scores: &mut scores,
            out: &mut out,
        }
        .attend();
        let (q, v) = (wide(&query), wide(&values));
        let mut exact = Vec::new();
        let mut error: f64 = 0.0;
        for key in wide(&keys).chunks(dim) {
            let terms = || q.iter().zip(key).map(|(a, b)| a * b * f64::from(scale));
            exact.push(terms().sum::<f64>());
            error = error.max(gamma(roundings(dim) + 1.0) * terms().map(f64::abs).sum::<f64>());
        }
        let max = exact.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let range = max - exact.iter().copied().fold(f64::INFINITY, f64::min) + 2.0 * error;
        // Of e^(s − max): both scores, their difference's rounding, and one unit in the last place.
        let relative = (2.0 * error + U * range).exp_m1() + 2.0 * U;
        let p: Vec<f64> = exact.iter().map(|s| (s - max).exp()).collect();
        let total: f64 = p.iter().sum();
        let expected: Vec<(f64, f64)> = (0..dim)
            .map(|d| {
                let terms = || (0..n).map(|j| p[j] * v[j * dim + d] / total);
                let magnitude: f64 = terms().map(f64::abs).sum();
                // Numerator: weights and n fused additions. Denominator: weights and its sum. A division.
                let above = (1.0 + relative) * (1.0 + gamma(n as f64)) * (1.0 + U);
                let below = (1.0 - relative) * (1.0 - gamma(roundings(n)));
                (terms().sum(), (above / below - 1.0) * magnitude)
            })
            .collect();
        check(&format!("attention to {n} keys"), &out, &expected, 1e-3);
    }
}
