//! `dyn_quant_linear` with `arithmetic: any_order`: simulated kernels with other orders, roundings and
//! scales are within the bound, and kernels with a mistake are not.

use marlinspike::case::Case;
use marlinspike::check::{Verdict, check_case};
use marlinspike::num::scalar::{bf16_to_f32, f32_to_bf16_rne};
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::vectors::Rng;
use serde_json::json;

/// A case in plain numbers.
struct Given {
    size_m: usize,
    size_n: usize,
    size_k: usize,
    /// k per scale; K for channels.
    group: usize,
    is_bf16: bool,
    x: Vec<f32>,
    /// `[N, K]`.
    codes: Vec<i32>,
    /// `[N, K / group]`.
    scales: Vec<f32>,
    bias: Vec<f32>,
}

impl Given {
    fn new(size_k: usize, group: usize, is_bf16: bool, rng: &mut Rng) -> Self {
        let (size_m, size_n) = (3, 20);
        let bf16 = |x: f32| bf16_to_f32(f32_to_bf16_rne(x));
        // Off center, so that zero points are not near −1/2; one row has an outlier.
        let mut x: Vec<f32> =
            (0..size_m * size_k).map(|_| (rng.below(4001) as f32 - 1700.0) / 997.0).collect();
        x[size_k + 5] = 31.0;
        if is_bf16 {
            x.iter_mut().for_each(|x| *x = bf16(*x));
        }
        let codes = (0..size_n * size_k).map(|_| rng.below(16) as i32 - 8).collect();
        let scale = |_| bf16((rng.below(900) as f32 + 100.0) / 65536.0);
        let scales = (0..size_n * size_k / group).map(scale).collect();
        let bias = (0..size_n).map(|_| (rng.below(999) as f32 - 499.0) / 512.0).collect();
        Self { size_m, size_n, size_k, group, is_bf16, x, codes, scales, bias }
    }

    fn case(&self, y: &[f32]) -> Case<'static> {
        let (m, n, k) = (self.size_m, self.size_n, self.size_k);
        let channel = self.group == k;
        let config = json!({
            "weight_type": "int4", "dtype": if self.is_bf16 { "bfloat16" } else { "float32" },
            "group_size": if channel { -1 } else { self.group as i64 }, "has_bias": true,
            "size_m": m, "size_n": n, "size_k": k,
            "activation_rounding": if self.is_bf16 { "half_even" } else { "half_away" },
            "packing": {"mr": 4, "nr": 8, "kr": 16, "sr": 2}, "arithmetic": "any_order",
        });
        let config = config.as_object().unwrap();
        let op = marlinspike::case::Op::DynQuant;
        let config = marlinspike::case::CaseConfig::from_json(op, config).unwrap();
        let mut case = Case::new("bounded", config, "");
        let floats = |shape: Vec<usize>, values: &[f32]| match self.is_bf16 {
            true => {
                let bits = values.iter().map(|&v| f32_to_bf16_rne(v)).collect::<Vec<u16>>();
                Tensor::from_vec("", DType::BF16, shape, bits).unwrap()
            }
            false => Tensor::from_vec("", DType::F32, shape, values.to_vec()).unwrap(),
        };
        let pairs = self.codes.chunks_exact(2);
        let bytes: Vec<u8> = pairs.map(|p| ((p[0] + 8) | (p[1] + 8) << 4) as u8).collect();
        case.add_input("x", floats(vec![m, k], &self.x));
        case.add_input("weight_u4", Tensor::new("", DType::U8, vec![n, k / 2], bytes).unwrap());
        let shape = vec![n, k / self.group];
        let scales = match channel {
            true => Tensor::from_vec("", DType::F32, shape, self.scales.clone()).unwrap(),
            false => {
                let bits = self.scales.iter().map(|&s| f32_to_bf16_rne(s)).collect::<Vec<u16>>();
                Tensor::from_vec("", DType::BF16, shape, bits).unwrap()
            }
        };
        case.add_input("weight_scale", scales);
        case.add_input(
            "bias",
            Tensor::from_vec("", DType::F32, vec![n], self.bias.clone()).unwrap(),
        );
        case.add_output("y", floats(vec![m, n], y));
        case
    }

    fn verdict(&self, y: &[f32]) -> (Verdict, f64) {
        let report = check_case(&self.case(y)).unwrap();
        let y = report.outputs.iter().find(|o| o.name == "y").unwrap();
        assert!(y.note.as_deref().is_some_and(|n| n.contains("int8-per-token-any-order")), "{y:?}");
        assert_eq!(y.unbounded, 0);
        (y.verdict, y.max_error_over_bound.unwrap())
    }
}

/// How a simulated kernel differs from the operator.
#[derive(Debug, Clone, Copy, Default)]
struct Kernel {
    half_even: bool,
    /// Codes by x / (range / 255), and that factor in the result.
    by_quotient: bool,
    descending: bool,
    /// Sums of pairs, then of pairs of pairs.
    tree: bool,
    fused: bool,
    /// The zero point is subtracted from codes, in integers.
    zero_inside: bool,
    /// Activations times weights in unsigned bytes: 128 is added to codes and corrected.
    unsigned: bool,
    /// The corrections of all groups follow the sums of all groups.
    corrections_last: bool,
    /// Subnormal activations and results are zero.
    flushes: bool,
    /// Mistakes.
    zero_off_by_one: bool,
    scale_factor: Option<f32>,
    nibbles_exchanged: bool,
    group_off_by_one: bool,
    bias_missing: bool,
    zero_missing: bool,
    truncated_codes: bool,
}

impl Kernel {
    fn run(self, c: &Given) -> Vec<f32> {
        let mut y = Vec::new();
        let flushed = |x: f32| if self.flushes && x.is_subnormal() { 0.0 } else { x };
        for x in c.x.chunks_exact(c.size_k) {
            let x: Vec<f32> = x.iter().map(|&x| flushed(x)).collect();
            let low = x.iter().fold(0f32, |a, x| a.min(*x));
            let high = x.iter().fold(0f32, |a, x| a.max(*x));
            let (mut scale, mut step) = (255.0 / (high - low), (high - low) / 255.0);
            if low == high {
                (scale, step) = (1.0, 1.0);
            }
            if !self.by_quotient {
                step = if scale == 0.0 { 0.0 } else { 1.0 / scale };
            }
            step = flushed(step);
            let zero = (-128.0 - low * scale).round_ties_even().clamp(-128.0, 127.0) as i32;
            let code = |x: &f32| {
                let scaled = if self.by_quotient { x / step } else { x * scale };
                let rounded = match (self.truncated_codes, self.half_even) {
                    (true, _) => scaled.trunc(),
                    (_, true) => scaled.round_ties_even(),
                    (_, false) => scaled.round(),
                };
                (rounded as i32).saturating_add(zero).clamp(-128, 127)
            };
            let q: Vec<i32> = x.iter().map(code).collect();
            let zero = if self.zero_missing { 0 } else { zero + i32::from(self.zero_off_by_one) };
            for n in 0..c.size_n {
                y.push(self.output(c, &q, zero, step, n));
            }
        }
        y
    }

    fn output(self, c: &Given, q: &[i32], zero: i32, step: f32, n: usize) -> f32 {
        let groups = c.size_k / c.group;
        let w = |k: usize| {
            let k = if self.nibbles_exchanged { k ^ 1 } else { k };
            c.codes[n * c.size_k + k]
        };
        let scale = |g: usize| {
            let g = if self.group_off_by_one { (g + 1) % groups } else { g };
            c.scales[n * groups + g] * self.scale_factor.unwrap_or(1.0)
        };
        // A sum and a correction for each group.
        let mut terms = Vec::new();
        for g in 0..groups {
            let k = || g * c.group..(g + 1) * c.group;
            let sum = |offset: i32| k().map(|k| (q[k] + offset) * w(k)).sum::<i32>();
            let weights: i32 = k().map(w).sum();
            match (self.zero_inside, self.unsigned) {
                (true, _) => terms.push((sum(-zero) as f32, scale(g))),
                (_, true) => {
                    terms.push((sum(128) as f32, scale(g)));
                    terms.push(((-(128 + zero) * weights) as f32, scale(g)));
                }
                _ => {
                    terms.push((sum(0) as f32, scale(g)));
                    terms.push(((-zero * weights) as f32, scale(g)));
                }
            }
        }
        if self.corrections_last {
            let nth = |first: usize| terms.iter().skip(first).step_by(2);
            terms = nth(0).chain(nth(1)).copied().collect();
        }
        if self.descending {
            terms.reverse();
        }
        let total = if self.tree {
            let mut all: Vec<f32> = terms.iter().map(|(s, d)| s * d).collect();
            while all.len() > 1 {
                all = all.chunks(2).map(|p| p.iter().sum()).collect();
            }
            all[0]
        } else {
            let add = |a: f32, (s, d): &(f32, f32)| {
                if self.fused { s.mul_add(*d, a) } else { a + s * d }
            };
            terms.iter().fold(0f32, add)
        };
        let bias = if self.bias_missing { 0.0 } else { c.bias[n] };
        if self.fused { total.mul_add(step, bias) } else { total * step + bias }
    }
}

const SHAPES: [(usize, usize); 6] =
    [(64, 64), (64, 32), (256, 64), (512, 512), (1024, 128), (2048, 32)];

#[test]
fn no_kernel_of_the_class_leaves_its_bound() {
    let right = Kernel::default();
    let kernels = [
        right,
        Kernel { half_even: true, ..right },
        Kernel { by_quotient: true, ..right },
        Kernel { descending: true, fused: true, ..right },
        Kernel { tree: true, half_even: true, ..right },
        Kernel { zero_inside: true, fused: true, by_quotient: true, ..right },
        Kernel { unsigned: true, ..right },
        Kernel { unsigned: true, tree: true, descending: true, by_quotient: true, ..right },
        Kernel { corrections_last: true, ..right },
    ];
    let mut worst = 0f64;
    for seed in 0..12 {
        for (size_k, group) in SHAPES {
            for is_bf16 in [false, true] {
                let given = Given::new(size_k, group, is_bf16, &mut Rng::new(seed));
                for kernel in kernels {
                    let (verdict, ratio) = given.verdict(&kernel.run(&given));
                    assert_eq!(
                        verdict,
                        Verdict::Pass,
                        "{kernel:?} K {size_k} group {group}: {ratio}"
                    );
                    worst = worst.max(ratio);
                }
            }
        }
    }
    println!("largest error over its bound: {worst:.3}");
}

#[test]
fn kernels_with_a_mistake_leave_the_bound() {
    let right = Kernel::default();
    let wrong = [
        ("zero point off by one", Kernel { zero_off_by_one: true, ..right }),
        ("zero point missing", Kernel { zero_missing: true, ..right }),
        ("scales times 1.005", Kernel { scale_factor: Some(1.005), ..right }),
        ("nibbles exchanged", Kernel { nibbles_exchanged: true, ..right }),
        ("scale of the next group", Kernel { group_off_by_one: true, ..right }),
        ("bias missing", Kernel { bias_missing: true, ..right }),
        ("codes truncated", Kernel { truncated_codes: true, ..right }),
    ];
    for (size_k, group) in SHAPES {
        for (name, kernel) in wrong {
            if kernel.group_off_by_one && group == size_k {
                continue;
            }
            let mut least = f64::INFINITY;
            for seed in 0..4 {
                let given = Given::new(size_k, group, false, &mut Rng::new(seed));
                let (verdict, ratio) = given.verdict(&kernel.run(&given));
                assert_eq!(verdict, Verdict::Fail, "{name}, K {size_k}, group {group}: {ratio}");
                least = least.min(ratio);
            }
            println!("K {size_k:4}, group {group:4}, {name}: {least:.1}");
        }
    }
}

/// Rows of zeros, of one value, of subnormal numbers, and of a range that overflows; scales of groups
/// that differ so much that f32 sums over them are rounded.
fn edge_rows(given: &mut Given) {
    let k = given.size_k;
    let scales = given.scales.iter_mut().enumerate();
    scales.for_each(|(i, scale)| *scale *= 2f32.powi(-(i as i32 * 5 % 13)));
    let rows: [fn(usize) -> f32; 9] = [
        |_| 0.0,
        |i| if i % 3 == 0 { -0.0 } else { 0.0 },
        |_| 0.3,
        |_| -7.25,
        |i| f32::from_bits(i as u32 * 37 % 70_000),
        |i| f32::from_bits((i as u32 * 91 % 70_000) | ((i as u32 % 2) << 31)),
        |i| (i as f32 * 37.0 % 100.0 - 60.0) * 1e-39,
        |i| (i as f32 * 37.0 % 100.0 - 60.0) * 1e-34,
        |i| if i % 2 == 0 { 3e38 } else { -3e38 },
    ];
    given.size_m = rows.len();
    given.x = rows.iter().flat_map(|row| (0..k).map(row)).collect();
    if given.is_bf16 {
        given.x.iter_mut().for_each(|x| *x = bf16_to_f32(f32_to_bf16_rne(*x)));
    }
}

/// What the correction of the zero point leaves where it cancels the sum depends on the order.
#[test]
fn rows_without_a_range_keep_their_residue() {
    let right = Kernel::default();
    let kernels = [
        right,
        Kernel { descending: true, fused: true, ..right },
        Kernel { tree: true, half_even: true, ..right },
        Kernel { unsigned: true, ..right },
        Kernel { flushes: true, fused: true, ..right },
        Kernel { flushes: true, unsigned: true, tree: true, ..right },
        Kernel { zero_inside: true, ..right },
        Kernel { corrections_last: true, ..right },
        Kernel { corrections_last: true, descending: true, tree: true, ..right },
    ];
    let mut residues = 0;
    for (seed, (size_k, group)) in (0..).zip(SHAPES) {
        for is_bf16 in [false, true] {
            let mut given = Given::new(size_k, group, is_bf16, &mut Rng::new(seed));
            edge_rows(&mut given);
            for has_bias in [true, false] {
                if !has_bias {
                    given.bias.fill(0.0);
                }
                for kernel in kernels {
                    let y = kernel.run(&given);
                    residues += y[..20].iter().zip(&given.bias).filter(|(y, b)| y != b).count();
                    let (verdict, ratio) = given.verdict(&y);
                    assert_eq!(verdict, Verdict::Pass, "{kernel:?} K {size_k} g {group}: {ratio}");
                }
                // A failure is searched for known mistakes, which takes long.
                if is_bf16 || has_bias || size_k > 64 {
                    continue;
                }
                let wrong = |row: usize, add: f32| {
                    let mut y = right.run(&given);
                    y[row * 20 + 3] += add;
                    given.verdict(&y).0
                };
                for row in [0, 1, 4, 5, 6, 8] {
                    assert_eq!(wrong(row, 0.25), Verdict::Fail, "row {row}");
                    assert_eq!(wrong(row, f32::NAN), Verdict::Fail, "row {row}");
                }
                let missing = Kernel { zero_missing: true, ..right }.run(&given);
                assert_eq!(given.verdict(&missing).0, Verdict::Fail);
            }
        }
    }
    assert!(residues > 0, "no kernel left a residue");
}

/// Ties may go either way; the other codes may not.
#[test]
fn a_code_off_by_one_leaves_the_bound() {
    let given = Given::new(64, 32, false, &mut Rng::new(5));
    let x = &given.x[..64];
    let (low, high) = x.iter().fold((0f32, 0f32), |(a, b), &x| (a.min(x), b.max(x)));
    let scale = f64::from(255.0 / (high - low));
    let mut y = Kernel::default().run(&given);
    // Half a code is the most that a kernel may err; this activation is far from a tie.
    let far = |x: &&f32| ((f64::from(**x) * scale).fract().abs() - 0.5).abs() > 0.4;
    let k = x.iter().position(|x| far(&x)).unwrap();
    for (n, y) in y.iter_mut().take(20).enumerate() {
        let w = given.codes[n * 64 + k] as f32 * given.scales[n * 2 + k / 32];
        *y += w / scale as f32;
    }
    assert_eq!(given.verdict(&y).0, Verdict::Fail);
}
