//! `scaled_fp4_quant`: ties, scales and codes under zero scales are judged; approximate
//! reciprocals are one function, not a tolerance. Loops in this file compute the outputs.

use marlinspike::case::{Case, Fp4QuantConfig, Reciprocal};
use marlinspike::check::{CaseReport, Verdict, check_case};
use marlinspike::num::scalar::{ScalarType, bf16_to_f32, f32_to_bf16_rne};
use marlinspike::num::tensor::{DType, Tensor};

/// The numbers of e2m1 by code.
const E2M1: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// The numbers of e4m3fn that are not negative.
fn e4m3(code: u8) -> f64 {
    let (exponent, mantissa) = (i32::from(code >> 3), f64::from(code & 7));
    match exponent {
        0 => mantissa / 8.0 * 2f64.powi(-6),
        _ => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
    }
}

/// How halves are rounded.
#[derive(Clone, Copy, PartialEq)]
enum Ties {
    Even,
    Away,
}

/// The nearest of ascending numbers, the last where `v` is beyond them.
fn nearest(v: f64, numbers: impl Iterator<Item = f64>, ties: Ties) -> u8 {
    let (mut best, mut at) = (f64::INFINITY, 0);
    for (i, number) in numbers.enumerate() {
        let distance = (number - v).abs();
        let better = match ties {
            Ties::Even => distance < best || (distance == best && i % 2 == 0),
            Ties::Away => distance <= best,
        };
        if better {
            (best, at) = (distance, i as u8);
        }
    }
    at
}

/// What a quantizer does.
#[derive(Clone, Copy)]
struct Kernel<'k> {
    global: f32,
    codes: Ties,
    scales: Ties,
    /// The reciprocal of a number.
    reciprocal: &'k dyn Fn(f32) -> f32,
}

impl Kernel<'_> {
    /// Codes, one a byte, and scales of whole blocks.
    fn run(&self, x: &[f32]) -> (Vec<u8>, Vec<u8>) {
        let (mut codes, mut scales) = (Vec::new(), Vec::new());
        for block in x.chunks(16) {
            let max = block.iter().fold(0f32, |m, v| m.max(v.abs()));
            let scale = self.global * (max * (1f32 / 6f32));
            let scale = nearest(scale.into(), (0..0x7f).map(e4m3), self.scales);
            let number = e4m3(scale) as f32;
            let factor = if scale == 0 {
                0.0
            } else {
                (self.reciprocal)(number * (self.reciprocal)(self.global))
            };
            for v in block {
                let code = nearest(f64::from(v.abs() * factor), E2M1.into_iter(), self.codes);
                codes.push(code | if v.is_sign_negative() { 8 } else { 0 });
            }
            scales.push(scale);
        }
        (codes, scales)
    }
}

fn exact(x: f32) -> f32 {
    1.0 / x
}

fn kernel(global: f32) -> Kernel<'static> {
    Kernel { global, codes: Ties::Even, scales: Ties::Even, reciprocal: &exact }
}

/// Rows of 64 values; numbers of bf16.
fn case(x: &[f32], global: f32, (codes, scales): (Vec<u8>, Vec<u8>)) -> Case<'static> {
    assert!(x.iter().all(|&v| bf16_to_f32(f32_to_bf16_rne(v)) == v), "numbers of bf16");
    let rows = x.len() / 64;
    let config = Fp4QuantConfig {
        dtype: ScalarType::BFLOAT16,
        size_m: rows,
        size_k: 64,
        is_sf_swizzled_layout: false,
        reciprocal: None,
    };
    let mut case = Case::new("made here", config.into(), "anyone");
    let x = x.iter().map(|&v| f32_to_bf16_rne(v)).collect::<Vec<_>>();
    case.add_input("x", Tensor::from_vec("x", DType::BF16, vec![rows, 64], x).expect("x"));
    let global = Tensor::from_vec("", DType::F32, vec![1], vec![global]);
    case.add_input("input_global_scale", global.expect("a scale"));
    let bytes: Vec<u8> = codes.chunks(2).map(|p| p[0] | p[1] << 4).collect();
    case.add_output("x_fp4", Tensor::new("", DType::U8, vec![rows, 32], bytes).expect("codes"));
    let scales = Tensor::new("", DType::F8E4M3, vec![rows, 4], scales).expect("scales");
    case.add_output("x_scale", scales);
    case
}

fn declared(mut case: Case<'static>, rule: Reciprocal) -> Case<'static> {
    use marlinspike::case::CaseConfig;
    let CaseConfig::ScaledFp4Quant(c) = &mut case.config else { panic!("a quantizer") };
    c.reciprocal = Some(rule);
    case
}

fn judge(case: &Case<'_>) -> CaseReport {
    // Through a file, so that the keys are read back.
    let bytes = case.to_bytes().expect("a file");
    check_case(&Case::parse(&bytes).expect("a case")).expect("a report")
}

/// A number of bf16 below `limit` in magnitude.
fn draw(state: &mut u64, limit: f32) -> f32 {
    *state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
    let unit = (*state >> 40) as f32 / (1u64 << 24) as f32;
    bf16_to_f32(f32_to_bf16_rne((unit * 2.0 - 1.0) * limit))
}

/// Blocks whose scale is a power of two under `global`, full of values between two codes.
fn tied(global: f32) -> Vec<f32> {
    let between = [0.25f32, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0];
    (0..128)
        .map(|i| {
            let sign = if i % 3 == 0 { -1.0 } else { 1.0 };
            let unit = [1.0, 2.0, 0.5, 4.0][i / 16 % 4] / global;
            sign * unit * if i % 16 == 3 { 6.0 } else { between[i % 7] }
        })
        .collect()
}

#[test]
fn halves_go_to_the_even_code() {
    for global in [1.0, 64.0, 0.5] {
        let x = tied(global);
        let right = kernel(global);
        let even = right.run(&x);
        assert_eq!(judge(&case(&x, global, even.clone())).verdict, Verdict::Pass, "{global}");
        let away = Kernel { codes: Ties::Away, ..right }.run(&x);
        assert_ne!(even, away);
        for rule in [None, Some(Reciprocal::Exact), Some(Reciprocal::Approximate)] {
            let case = case(&x, global, away.clone());
            let case = rule.map_or(case.clone(), |rule| declared(case, rule));
            assert_eq!(judge(&case).verdict, Verdict::Fail, "{global} {rule:?}");
        }
        // One half of them is enough.
        let mut one = even.clone();
        let differs = (0..128).find(|&i| even.0[i] != away.0[i]).expect("a tie");
        one.0[differs] = away.0[differs];
        assert_eq!(judge(&case(&x, global, one)).verdict, Verdict::Fail, "{global}");
    }
}

/// Under a global scale whose reciprocal is rounded there are halves too.
#[test]
fn halves_that_went_away_are_named() {
    let global = 448.0;
    let mut state = 11;
    let mut x: Vec<f32> = (0..2048).map(|_| draw(&mut state, 6.0)).collect();
    x.iter_mut().step_by(16).enumerate().for_each(|(i, v)| *v = [6.0, 3.0, 1.5][i % 3]);
    let right = kernel(global);
    let even = right.run(&x);
    let away = Kernel { codes: Ties::Away, ..right }.run(&x);
    assert!((0..2048).any(|i| even.0[i] != away.0[i]));
    assert_eq!(judge(&case(&x, global, even)).verdict, Verdict::Pass);
    let report = judge(&case(&x, global, away));
    assert_eq!(report.verdict, Verdict::Fail);
    let codes = report.outputs.iter().find(|o| o.name == "x_fp4").expect("x_fp4");
    let diagnosis = codes.diagnosis.as_ref().expect("a diagnosis");
    assert_eq!(diagnosis.id, "ties-away");
}

#[test]
fn scales_round_to_even() {
    // 6.375 / 6 is half way between 1 and 1.125.
    let x: Vec<f32> = (0..64).map(|i| if i % 16 == 0 { 6.375 } else { 0.5 }).collect();
    let right = kernel(1.0);
    let (even, up) = (right.run(&x), Kernel { scales: Ties::Away, ..right }.run(&x));
    assert_eq!((even.1[0], up.1[0]), (0x38, 0x39));
    assert_eq!(judge(&case(&x, 1.0, even)).verdict, Verdict::Pass);
    for rule in [Reciprocal::Exact, Reciprocal::Approximate] {
        let case = declared(case(&x, 1.0, up.clone()), rule);
        assert_eq!(judge(&case).verdict, Verdict::Fail, "{rule:?}");
    }
    assert_eq!(judge(&case(&x, 1.0, up)).verdict, Verdict::Fail);
}

/// `exact`, or that many units from it by the mantissa of `x`; multiples of an eighth are exact.
fn stepped(x: f32, steps: impl Fn(u32) -> i32) -> f32 {
    let mantissa = x.to_bits() & 0x7f_ffff;
    let step = if mantissa & 0xf_ffff == 0 { 0 } else { steps(mantissa) };
    f32::from_bits((1.0 / x).to_bits().wrapping_add_signed(step))
}

#[test]
fn approximate_reciprocals_are_one_function() {
    // The reciprocal is 17/16: both scales below have factors that f32 rounds, under which numbers of
    // bf16 lie between two codes, so that one unit of the factor decides.
    let global = 16f32 / 17f32;
    assert_eq!(1.0 / global, 1.0625);
    let ties = [0.25f32, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0];
    let mut x = Vec::new();
    for block in 0..16 {
        let (scale, count) = if block % 2 == 0 { (1.0, 7) } else { (1.25, 2) };
        let argument = scale * 1.0625;
        x.push(6.0 * argument);
        for i in 1..16 {
            x.push(ties[i % count] * argument * if i % 3 == 0 { -1.0 } else { 1.0 });
        }
    }
    let exact = kernel(global).run(&x);
    assert_eq!(exact.1[..2], [0x38, 0x3a]);
    assert_eq!(judge(&case(&x, global, exact.clone())).verdict, Verdict::Pass);
    // Units by which the factors of the two scales are off.
    for (first, second) in [(1, 1), (-1, -1), (1, -1), (0, 1), (-1, 0)] {
        let off = |v: f32| match v == global {
            true => 1.0 / v,
            false => stepped(v, |mantissa| if mantissa < 0x20_0000 { first } else { second }),
        };
        let made = Kernel { reciprocal: &off, ..kernel(global) }.run(&x);
        assert_ne!(made.0, exact.0);
        let made = case(&x, global, made);
        assert_eq!(judge(&declared(made.clone(), Reciprocal::Approximate)).verdict, Verdict::Pass);
        assert_eq!(judge(&declared(made.clone(), Reciprocal::Exact)).verdict, Verdict::Fail);
        // Without a declaration, factors that are all too large are taken for a mistake.
        let report = judge(&made);
        let away = (first, second) == (1, 1);
        assert_eq!(report.verdict == Verdict::Fail, away, "{first} {second}");
        if away {
            let codes = report.outputs.iter().find(|o| o.name == "x_fp4").expect("x_fp4");
            assert_eq!(codes.diagnosis.as_ref().expect("a diagnosis").id, "ties-away");
            let note = codes.note.as_ref().expect("a note");
            assert!(note.contains("\"reciprocal\": \"approximate\""), "{note}");
        }
    }
    // Blocks of one scale by two factors: no function gives that, though each block is possible.
    let [low, high] = [-1, 1].map(|step| {
        let off = move |v: f32| if v == global { 1.0 / v } else { stepped(v, |_| step) };
        Kernel { reciprocal: &off, ..kernel(global) }.run(&x).0
    });
    let mut mixed = exact.clone();
    for block in 0..16 {
        let part = block * 16..block * 16 + 16;
        let from = if block / 2 % 2 == 0 { &low } else { &high };
        mixed.0[part.clone()].copy_from_slice(&from[part]);
    }
    let mixed = declared(case(&x, global, mixed), Reciprocal::Approximate);
    assert_eq!(judge(&mixed).verdict, Verdict::Fail);
}

#[test]
fn codes_under_a_zero_scale() {
    // The second and the fourth block round to a scale of zero; the fourth is all zeros.
    let x: Vec<f32> = (0..64)
        .map(|i| {
            let sign = if i % 2 == 1 { -1.0 } else { 1.0 };
            let size = [1.0, 2f32.powi(-20), 3.0, 0.0][i / 16];
            sign * size * if i % 16 == 5 { 0.0 } else { 1.0 }
        })
        .collect();
    let right = kernel(1.0).run(&x);
    assert_eq!((right.1[1], right.1[3]), (0, 0));
    assert_eq!(judge(&case(&x, 1.0, right.clone())).verdict, Verdict::Pass);
    let with = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut made = right.clone();
        change(&mut made.0);
        let made = case(&x, 1.0, made);
        let exact = judge(&declared(made.clone(), Reciprocal::Exact)).verdict;
        (judge(&made).verdict, exact)
    };
    let fail = (Verdict::Fail, Verdict::Fail);
    assert_eq!(with(&|codes| codes[18] = 3), fail);
    assert_eq!(with(&|codes| codes[50] = 1), fail);
    assert_eq!(with(&|codes| (16..32).for_each(|i| codes[i] = (i as u8 * 7) & 15)), fail);
    // A kernel whose factor becomes infinite gives ±6, and 6 for 0 · ∞; in whole blocks only.
    let infinite = |codes: &mut Vec<u8>| {
        for i in 16..32 {
            codes[i] = if x[i] == 0.0 { 7 } else { 7 | if x[i] < 0.0 { 8 } else { 0 } };
        }
    };
    assert_eq!(with(&infinite), (Verdict::Pass, Verdict::Fail));
    let mixed = |codes: &mut Vec<u8>| {
        infinite(codes);
        codes[31] = 8;
    };
    assert_eq!(with(&mixed), fail);
}
