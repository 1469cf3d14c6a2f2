//! Random distortions of right outputs, by plain edits of their numbers: none is a known mistake, so each
//! gets a place and no name of a cause.

use crate::product_model::*;
use marlinspike::check::{Strength, Verdict};
use marlinspike_golden::Tier;

const CASES: [(&str, &str); 5] = [
    ("linear-f16_awq_u4_g64", "y"),
    ("linear-f16_nvfp4", "y"),
    ("linear-f16_u4b8_g128_act0", "y"),
    ("linear-bf16_mxfp8", "y"),
    ("moe-nvfp4_f16", "down"),
];

/// xorshift64*.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16
    }

    fn below(&mut self, n: usize) -> usize {
        self.next() as usize % n.max(1)
    }

    /// From -1 to 1.
    fn unit(&mut self) -> f64 {
        self.next() as f64 / 2f64.powi(47) - 1.0
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

/// An edit of the values `[rows, n]`.
type Edit = fn(&mut [f64], usize, &mut Random);

fn each(y: &mut [f64], mut change: impl FnMut(usize, f64) -> f64) {
    y.iter_mut().enumerate().for_each(|(i, y)| *y = change(i, *y));
}

/// The distortions, and the diagnoses that would be true of each besides a place.
const KINDS: [(&str, &[&str], Edit); 20] = [
    ("a fifth of the signs", &[], |y, _, r| each(y, |_, y| if r.one_in(5) { -y } else { y })),
    ("half of the signs", &[], |y, _, r| each(y, |_, y| if r.one_in(2) { -y } else { y })),
    ("absolute values", &[], |y, _, _| each(y, |_, y| y.abs())),
    ("noise of 10 %", &[], |y, _, r| each(y, |_, y| y * (1.0 + 0.1 * r.unit()))),
    ("noise of half", &[], |y, _, r| each(y, |_, y| y * (1.0 + 0.5 * r.unit()))),
    ("noise on a tenth", &[], |y, _, r| {
        each(y, |_, y| if r.one_in(10) { y * (2.0 + r.unit()) } else { y });
    }),
    ("a factor of its own for each row", &[], |y, n, r| {
        for row in y.chunks_mut(n) {
            let factor = 1.0 + 0.3 * r.unit();
            row.iter_mut().for_each(|y| *y *= factor);
        }
    }),
    ("a factor of its own for each column", &[], |y, n, r| {
        let factors: Vec<f64> = (0..n).map(|_| 1.0 + 0.3 * r.unit()).collect();
        each(y, |i, y| y * factors[i % n]);
    }),
    ("elements permuted", &[], |y, _, r| {
        for i in (1..y.len()).rev() {
            y.swap(i, r.below(i + 1));
        }
    }),
    ("elements of each row permuted", &[], |y, n, r| {
        for row in y.chunks_mut(n) {
            for i in (1..row.len()).rev() {
                row.swap(i, r.below(i + 1));
            }
        }
    }),
    ("saturated at a third", &[], |y, _, _| {
        let most = y.iter().fold(0f64, |a, y| a.max(y.abs())) / 3.0;
        each(y, |_, y| y.clamp(-most, most));
    }),
    ("powers of two", &[], |y, _, _| {
        each(y, |_, y| if y == 0.0 { y } else { y.signum() * y.abs().log2().round().exp2() });
    }),
    ("a tile shifted by one column", &[], |y, n, r| {
        let from = r.below(n / 32) * 32;
        y.chunks_mut(n).for_each(|row| row[from..from + 24].rotate_left(1));
        // The last of them is new.
        y.chunks_mut(n).for_each(|row| row[from + 23] = 3.0 * row[from + 22] + 1.0);
    }),
    ("neighbours averaged", &[], |y, n, _| {
        for row in y.chunks_mut(n) {
            (0..n - 1).for_each(|i| row[i] = (row[i] + row[i + 1]) / 2.0);
        }
    }),
    ("a constant added", &[], |y, _, r| {
        let mean = y.iter().map(|y| y.abs()).sum::<f64>() / y.len() as f64;
        let more = mean * (0.5 + 0.2 * r.unit());
        each(y, |_, y| y + more);
    }),
    ("a square wave added along k", &[], |y, n, _| {
        let mean = y.iter().map(|y| y.abs()).sum::<f64>() / y.len() as f64;
        each(y, |i, y| y + mean * if i % n / 7 % 2 == 0 { 0.4 } else { -0.4 });
    }),
    ("five elements replaced", &[], |y, _, r| {
        for _ in 0..5 {
            let at = r.below(y.len());
            y[at] = y[at] * 1.7 + 0.3;
        }
    }),
    ("rows added to the next", &[], |y, n, _| {
        for i in n..y.len() {
            y[i] += 0.5 * y[i - n];
        }
    }),
    ("square roots", &[], |y, _, _| each(y, |_, y| y.signum() * y.abs().sqrt())),
    ("a checkerboard of factors", &[], |y, n, _| {
        each(y, |i, y| y * if (i / n + i % n) % 2 == 0 { 1.2 } else { 0.9 });
    }),
];

fn distorted(count: usize, start: u64) {
    let mut random = Random(0x9e37_79b9_7f4a_7c15 ^ start);
    let mut wrong = Vec::new();
    for i in 0..count {
        let (kind, may_be, edit) = KINDS[i % KINDS.len()];
        let (case, output) = CASES[(i / KINDS.len()) % CASES.len()];
        let report = planted(case, output, |m| {
            let mut y = m.compute();
            edit(&mut y, m.n, &mut random);
            y
        });
        assert_eq!(report.verdict, Verdict::Fail, "{kind} of {case}");
        let diagnosis = report.diagnosis.unwrap_or_else(|| panic!("{kind} of {case}: no place"));
        if diagnosis.strength != Strength::Place && !may_be.contains(&&*diagnosis.id) {
            wrong.push(format!("{kind} of {case}: {} ({})", diagnosis.id, diagnosis.text));
        }
    }
    assert!(wrong.is_empty(), "{} of {count}:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn random_distortions_have_a_place_and_no_name() {
    // A quarter of a second each.
    let count = Tier::current().pick(60, 200, 1000);
    distorted(count, Tier::current().seed(1000));
}
