//! Products of correct kernels pass under every convention; mixtures of two conventions fail. The
//! products are naive loops in f32 or f64, as in a framework's user code.

use marlinspike::case::{Case, CaseConfig, Op};
use marlinspike::check::{Declared, OutputReport, Verdict, check_case, check_case_as};
use marlinspike::num::scalar::{ScalarType, f64_to_bf16_rne, f64_to_f16_rne};
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::products::Convention;
use marlinspike_golden::Tier;
use serde_json::json;

const F16: ScalarType = ScalarType::FLOAT16;
const BF16: ScalarType = ScalarType::BFLOAT16;
const M: usize = 8;
const N: usize = 64;

/// A linear layer of 4-bit weights, as plain numbers.
#[derive(Clone)]
struct Linear {
    dtype: ScalarType,
    size_k: usize,
    group_size: i64,
    x: Vec<f64>,
    /// q − 8, `[K, N]`.
    q: Vec<f64>,
    /// `[groups, N]`.
    scales: Vec<f64>,
    bias: Option<Vec<f64>>,
}

/// xorshift64*.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// About normal.
    fn normal(&mut self) -> f64 {
        (0..12).map(|_| (self.next() >> 11) as f64 / (1u64 << 53) as f64).sum::<f64>() - 6.0
    }
}

fn bits(ty: ScalarType, x: f64) -> u16 {
    if ty == F16 { f64_to_f16_rne(x) } else { f64_to_bf16_rne(x) }
}

fn rounded(ty: ScalarType, x: f64) -> f64 {
    ty.to_f64(bits(ty, x).into())
}

impl Linear {
    fn new(dtype: ScalarType, size_k: usize, group_size: i64, has_bias: bool, seed: u64) -> Self {
        let mut rng = Rng(0x9e37_79b9_7f4a_7c15 ^ (seed + 1));
        let groups = if group_size < 0 { 1 } else { size_k / group_size as usize };
        let x = (0..M * size_k).map(|_| rounded(dtype, rng.normal())).collect();
        let q = (0..size_k * N).map(|_| (rng.next() >> 60) as f64 - 8.0).collect();
        let scale = |r: &mut Rng| rounded(dtype, 0.004 * (0.5 + r.normal().abs()));
        let scales = (0..groups * N).map(|_| scale(&mut rng)).collect();
        let bias = has_bias.then(|| (0..N).map(|_| rounded(dtype, rng.normal())).collect());
        Self { dtype, size_k, group_size, x, q, scales, bias }
    }

    fn weight(&self, k: usize, n: usize) -> f64 {
        let group = if self.group_size < 0 { 0 } else { k / self.group_size as usize };
        self.q[k * N + n] * self.scales[group * N + n]
    }

    fn each(&self, of: impl Fn(&[f64], usize, f64) -> f64) -> Vec<u16> {
        let bias = |n: usize| self.bias.as_ref().map_or(0.0, |b| b[n]);
        let row = |m: usize| &self.x[m * self.size_k..][..self.size_k];
        let element = |i: usize| bits(self.dtype, of(row(i / N), i % N, bias(i % N)));
        (0..M * N).map(element).collect()
    }

    /// Σ x·w in f64, rounded once.
    fn exact(&self) -> Vec<u16> {
        self.each(|x, n, bias| {
            x.iter().enumerate().map(|(k, x)| x * self.weight(k, n)).sum::<f64>() + bias
        })
    }

    /// `x.float() @ w.float()` in f32, with weights from `of`.
    fn sum(x: &[f64], of: impl Fn(usize) -> f64) -> f32 {
        x.iter().enumerate().fold(0f32, |sum, (k, &x)| sum + x as f32 * of(k) as f32)
    }

    /// Weights, sum and bias in f32.
    fn float(&self) -> Vec<u16> {
        self.each(|x, n, bias| f64::from(Self::sum(x, |k| self.weight(k, n)) + bias as f32))
    }

    /// Weights rounded to 16 bits, sum and bias in f32.
    fn half_weights(&self) -> Vec<u16> {
        let weight = |k, n| rounded(self.dtype, self.weight(k, n));
        self.each(|x, n, bias| f64::from(Self::sum(x, |k| weight(k, n)) + bias as f32))
    }

    /// Weights rounded to 16 bits, the sum rounded, then the bias in 16 bits.
    fn separate_bias(&self) -> Vec<u16> {
        let weight = |k, n| rounded(self.dtype, self.weight(k, n));
        self.each(|x, n, bias| {
            rounded(self.dtype, f64::from(Self::sum(x, |k| weight(k, n)))) + bias
        })
    }

    fn case(&self, y: Vec<u16>) -> Case<'static> {
        let (k, dtype) = (self.size_k, if self.dtype == F16 { DType::F16 } else { DType::BF16 });
        let config = json!({
            "checkpoint_format": "gptq", "weight_type": "uint4b8", "dtype": self.dtype.name(),
            "input_dtype": null, "group_size": self.group_size, "desc_act": false,
            "is_k_full": true, "has_bias": self.bias.is_some(), "size_m": M, "size_n": N,
            "size_k": k,
        });
        let halves = |name: &str, shape: &[usize], values: &[f64]| {
            let values: Vec<u16> = values.iter().map(|&v| bits(self.dtype, v)).collect();
            Tensor::from_vec(name, dtype, shape.to_vec(), values).expect("a tensor")
        };
        let word = |i: usize| {
            let code = |j: usize| (self.q[(i / N * 8 + j) * N + i % N] + 8.0) as u32;
            (0..8).fold(0u32, |word, j| word | code(j) << (4 * j)) as i32
        };
        let words = (0..k / 8 * N).map(word).collect();
        let mut tensors = vec![
            Tensor::from_vec("in.qweight", DType::I32, vec![k / 8, N], words).expect("a tensor"),
            halves("in.x", &[M, k], &self.x),
            halves("in.scales", &[self.scales.len() / N, N], &self.scales),
            Tensor::from_vec("out.y", dtype, vec![M, N], y).expect("a tensor"),
        ];
        tensors.extend(self.bias.as_ref().map(|b| halves("in.bias", &[N], b)));
        let config = config.as_object().expect("an object");
        let config = CaseConfig::from_json(Op::Linear, config).expect("a config");
        let mut case = Case::new("naive", config, "a loop in the test");
        for tensor in tensors {
            let (side, name) = tensor.name().split_once('.').expect("a side");
            let name = name.to_owned();
            match side {
                "in" => case.add_input(&name, tensor),
                _ => case.add_output(&name, tensor),
            }
        }
        case
    }
}

fn judged(case: &Case<'_>, declared: &Declared) -> OutputReport {
    let report = check_case_as(case, declared).expect("inputs that can be used");
    report.outputs.into_iter().find(|o| o.name == "y").expect("y")
}

/// 24 products; of a plain `cargo test` the 6 of bf16 whose K is 256 with a bias and 1024 without, or the reverse in
/// channels.
fn every(mut visit: impl FnMut(&str, Linear)) {
    for dtype in [F16, BF16] {
        for group_size in [-1i64, 32, 128] {
            for has_bias in [false, true] {
                for size_k in [256, 1024] {
                    let half = has_bias == (size_k == 256);
                    let left_out = dtype == F16 || half == (group_size == -1);
                    if Tier::current() == Tier::Plain && left_out {
                        continue;
                    }
                    let seed = size_k as u64 + group_size.unsigned_abs() * 7 + u64::from(has_bias);
                    let linear = Linear::new(dtype, size_k, group_size, has_bias, seed);
                    let name = format!("{dtype} group {group_size} bias {has_bias} K {size_k}");
                    visit(&name, linear);
                }
            }
        }
    }
}

/// Legitimate results pass without a note about conventions.
#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "long under emulation")]
fn legitimate_results_pass_by_default() {
    let mut passed = 0;
    every(|name, linear| {
        for (kind, y, fits) in [
            ("exact", linear.exact(), "exact"),
            ("float", linear.float(), "unrounded"),
            ("half weights", linear.half_weights(), "canonical"),
            ("separate bias", linear.separate_bias(), "stepwise"),
        ] {
            let report = judged(&linear.case(y), &Declared::default());
            assert_eq!(report.verdict, Verdict::Pass, "{name}, {kind}: {report:#?}");
            assert!(report.conventions.iter().any(|c| c == fits), "{name}, {kind}: {report:#?}");
            let power = report.power.expect("power");
            assert!(power.gaps().is_empty(), "{name}, {kind}: {power:?}");
            assert_eq!(power.rejects.half_k_missing, Some(true), "{name}, {kind}");
            assert!(power.uniform_error.expect("an error") < 0.005, "{name}, {kind}: {power:?}");
            let note = report.note.expect("a note");
            let first = format!("passes as `{}`", report.conventions[0]);
            assert!(note.contains(&first), "{name}, {kind}: {note}");
            passed += 1;
        }
    });
    assert_eq!(passed, Tier::current().pick(24, 96, 96));
}

/// The stated power holds: each trivial modification of a correct output fails.
#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "long under emulation")]
fn trivial_wrong_answers_fail() {
    every(|name, linear| {
        let y = linear.float();
        let value = |b: u16| linear.dtype.to_f64(b.into());
        let times = |factor: f64| -> Vec<u16> {
            y.iter().map(|&b| bits(linear.dtype, value(b) * factor)).collect()
        };
        let power = judged(&linear.case(y.clone()), &Declared::default()).power.expect("power");
        let error = power.uniform_error.expect("an error");
        let mut half = linear.clone();
        half.x.chunks_mut(linear.size_k).for_each(|row| row[..linear.size_k / 2].fill(0.0));
        let rotated = |i: usize| y[i / N * N + (i + 1) % N];
        for (wrong, y) in [
            ("zeros", vec![0; M * N]),
            ("-y", times(-1.0)),
            ("y/2", times(0.5)),
            ("rotated", (0..M * N).map(rotated).collect()),
            ("half of k", half.float()),
            ("more", times(1.0 + error * 1.001)),
            ("less", times(1.0 - error * 1.001)),
        ] {
            let report = judged(&linear.case(y), &Declared::default());
            assert_eq!(report.verdict, Verdict::Fail, "{name}, {wrong}: {report:#?}");
        }
    });
}

/// One convention has to explain every element.
#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "long under emulation")]
fn a_mixture_of_conventions_fails() {
    let linear = Linear::new(F16, 1024, 128, true, 5);
    let (a, b) = (linear.separate_bias(), linear.exact());
    for y in [&a, &b] {
        let report = judged(&linear.case(y.clone()), &Declared::default());
        assert_eq!(report.verdict, Verdict::Pass, "{report:#?}");
    }
    let mixed = (0..M * N).map(|i| if i % 2 == 0 { a[i] } else { b[i] }).collect();
    let report = judged(&linear.case(mixed), &Declared::default());
    assert_eq!(report.verdict, Verdict::Fail, "{report:#?}");
    assert!(report.conventions.is_empty(), "{report:#?}");
}

/// A convention that the caller or the case's config declares is required.
#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "long under emulation")]
fn a_declared_convention_is_strict() {
    let linear = Linear::new(F16, 1024, 128, true, 6);
    let strict = |convention| Declared { convention: Some(convention), ..Declared::default() };
    let exact = linear.case(linear.exact());
    assert_eq!(judged(&exact, &strict(Convention::Marlin)).verdict, Verdict::Fail);
    assert_eq!(judged(&exact, &strict(Convention::Unrounded)).verdict, Verdict::Pass);
    let mut stated = exact.clone();
    let CaseConfig::Linear(config) = &mut stated.config else { panic!("not linear") };
    config.quant.convention = Some(Convention::Marlin);
    assert_eq!(judged(&stated, &Declared::default()).verdict, Verdict::Fail);
    // The caller's declaration takes precedence.
    assert_eq!(judged(&stated, &strict(Convention::Unrounded)).verdict, Verdict::Pass);
    // The key is kept when the case is written.
    let bytes = stated.to_bytes().expect("a file");
    let read = Case::parse(&bytes).expect("a case");
    assert_eq!(read.config.quant().expect("matrices").convention, Some(Convention::Marlin));
}

/// Partial sums near f32's largest number have no bound: only the exact result passes.
#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "long under emulation")]
fn elements_without_a_bound_do_not_pass() {
    let mut linear = Linear::new(BF16, 256, 64, false, 7);
    linear.x.iter_mut().for_each(|x| *x = rounded(BF16, *x * 1e37));
    linear.scales.iter_mut().for_each(|s| *s = rounded(BF16, *s * 1e2));
    for wrong in [vec![0; M * N], vec![0x7fc0; M * N], vec![0x3f80; M * N]] {
        let report = judged(&linear.case(wrong), &Declared::default());
        assert_ne!(report.verdict, Verdict::Pass, "{report:#?}");
        assert!(report.unbounded > 0, "{report:#?}");
    }
    let report = judged(&linear.case(linear.exact()), &Declared::default());
    assert_eq!(report.verdict, Verdict::Pass, "{report:#?}");
    let case = linear.case(linear.exact());
    assert_eq!(check_case(&case).expect("a report").verdict, Verdict::Pass);
}
