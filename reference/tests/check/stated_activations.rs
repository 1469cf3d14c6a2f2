//! Quantized activations of a `linear` case are compared with their source. Loops in this file
//! compute the rules.

use marlinspike::case::{Case, CaseConfig, Op};
use marlinspike::check::{OutputReport, Verdict, check_case};
use marlinspike::num::scalar::{bf16_to_f32, f16_to_f32, f32_to_bf16_rne, f32_to_f16_rne};
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::quantize::ActivationRule;
use marlinspike::vectors::Generator;
use marlinspike_golden::{Manifest, Tier};

fn golden(name: &str) -> Vec<u8> {
    let manifest = Manifest::load().expect("the golden manifest");
    std::fs::read(manifest.path(&format!("data/cases/{name}.safetensors"))).expect("a file")
}

fn reports(case: &Case<'_>) -> [OutputReport; 2] {
    let all = check_case(case).expect("inputs that can be used").outputs;
    ["a_q", "a_scales"].map(|name| all.iter().find(|o| o.name == name).expect(name).clone())
}

fn put(case: &mut Case<'_>, codes: Vec<u8>, scales: Vec<f32>) {
    let (ty, shape) = (case.inputs["a_q"].dtype(), case.inputs["a_q"].shape().to_vec());
    let rows = scales.len();
    case.add_input("a_q", Tensor::new("a_q", ty, shape, codes).expect("codes"));
    let scales = Tensor::from_vec("a_scales", DType::F32, vec![rows, 1], scales);
    case.add_input("a_scales", scales.expect("scales"));
}

/// x in f32, the codes, the scales.
fn stated(case: &Case<'_>) -> (Vec<f32>, Vec<u8>, Vec<f32>) {
    let x = case.input("x").expect("x");
    let wide = if x.dtype() == DType::F16 { f16_to_f32 } else { bf16_to_f32 };
    let x = x.elements::<u16>().iter().map(|&b| wide(b)).collect();
    let codes = case.input("a_q").expect("a_q").bytes().to_vec();
    (x, codes, case.input("a_scales").expect("a_scales").elements::<f32>().into_owned())
}

const INT8: [&str; 5] = [
    "linear-bf16_awq_u4_int8act_g128",
    "linear-bf16_u4b8_int8act_g64",
    "linear-f16_awq_u4_int8act_g128",
    "linear-f16_awq_u4_int8act_g32",
    "linear-f16_u4b8_int8act_g-1",
];

#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "long under emulation")]
fn recorded_activations_pass_by_one_rule() {
    for name in INT8 {
        let bytes = golden(name);
        let case = Case::parse(&bytes).expect("a case");
        for report in reports(&case) {
            assert_eq!(report.verdict, Verdict::Pass, "{name}: {report:?}");
            assert_eq!((report.equal_bits, report.mismatches), (Some(1.0), 0));
            let note = report.note.expect("a note");
            assert!(note.contains("an input of the product"), "{note}");
            assert!(note.contains("`quotient`"), "{note}");
        }
    }
}

#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "long under emulation")]
fn damaged_activations_fail() {
    for name in INT8 {
        let bytes = golden(name);
        let right = Case::parse(&bytes).expect("a case");
        let (_, codes, scales) = stated(&right);
        let judge = |codes: Vec<u8>, scales: Vec<f32>| {
            let mut case = right.clone();
            put(&mut case, codes, scales);
            let report = check_case(&case).expect("a report");
            assert_eq!(report.verdict, Verdict::Fail, "{name}");
            // Without the product too.
            case.outputs.clear();
            let report = check_case(&case).expect("a report");
            assert_eq!(report.verdict, Verdict::Fail, "{name}");
            reports(&case)
        };
        let verdicts = |r: &[OutputReport; 2]| [r[0].verdict, r[1].verdict];
        use Verdict::{Fail, Pass};
        let up = codes.iter().map(|&c| (c as i8).saturating_add(1) as u8).collect();
        assert_eq!(verdicts(&judge(up, scales.clone())), [Fail, Pass]);
        let doubled = judge(codes.clone(), scales.iter().map(|s| s * 2.0).collect());
        assert_eq!(verdicts(&doubled), [Pass, Fail]);
        assert_eq!(doubled[1].mismatches, scales.len());
        let zeros = judge(vec![0; codes.len()], vec![0.0; scales.len()]);
        assert_eq!(verdicts(&zeros), [Fail, Fail]);
        let mut one = codes.clone();
        let at = one.len() / 2 + 5;
        one[at] = one[at].wrapping_add(1);
        let one = judge(one, scales.clone());
        assert_eq!((one[0].mismatches, one[1].verdict), (1, Pass));
        let size_k = codes.len() / scales.len();
        let first = one[0].first_mismatch.as_ref().expect("a place");
        assert_eq!(first.index, [at / size_k, at % size_k]);
        assert_eq!(first.expected, format!("{:#04x}", codes[at]));
        let nan = judge(codes.clone(), vec![f32::NAN; scales.len()]);
        assert_eq!(nan[1].verdict, Fail);
        let negative = judge(codes.clone(), scales.iter().map(|s| -s).collect());
        assert_eq!(negative[1].verdict, Fail);
        let global = right.output("input_global_scale").map(|g| g.elements::<f32>()[0]);
        if let Some(global) = global {
            let without = judge(codes.clone(), scales.iter().map(|s| s / global).collect());
            let diagnosis = without[1].diagnosis.as_ref().expect("a diagnosis");
            assert_eq!(diagnosis.id, "input-global-scale-missing");
        }
    }
}

/// Codes and scale of a row by a rule, computed step by step.
fn by_rule(rule: ActivationRule, row: &[f32], f16: bool) -> (Vec<u8>, f32) {
    use ActivationRule as R;
    let max = row.iter().fold(0f32, |m, v| if v.abs() > m { v.abs() } else { m });
    let (narrow, wide) = if f16 {
        (f32_to_f16_rne as fn(f32) -> u16, f16_to_f32 as fn(u16) -> f32)
    } else {
        (f32_to_bf16_rne as fn(f32) -> u16, bf16_to_f32 as fn(u16) -> f32)
    };
    let short = |v: f32| wide(narrow(v));
    let scale = match rule {
        R::Quotient | R::Reciprocal => max * (1f32 / 127f32),
        R::SixteenBit => short(max / 127f32),
        _ => max / 127f32,
    };
    let code = |v: &f32| {
        let q = match rule {
            R::Quotient | R::QuotientExact | R::QuotientAway => v / scale,
            R::Reciprocal | R::ReciprocalExact | R::ReciprocalAway => v * (1f32 / scale),
            R::SixteenBit => short(v / scale),
            _ => v * (127f32 / max),
        };
        // To the nearest integer through f64, where q ± ½ are exact.
        let (q, sign) = (f64::from(q.abs()), q.signum() as f64);
        let below = q.floor();
        let away = matches!(rule, R::Product | R::QuotientAway | R::ReciprocalAway);
        let up = match (q - below).partial_cmp(&0.5).expect("numbers") {
            std::cmp::Ordering::Less => false,
            std::cmp::Ordering::Greater => true,
            std::cmp::Ordering::Equal => away || below % 2.0 == 1.0,
        };
        ((below + f64::from(u8::from(up))) * sign).clamp(-128.0, 127.0) as i8 as u8
    };
    (row.iter().map(code).collect(), scale)
}

/// A case with rows full of halves under every scale: largest value 127 · 2^e, others odd halves.
fn ties() -> (Case<'static>, bool) {
    let bytes = golden("linear-f16_u4b8_int8act_g-1");
    let parsed = Case::parse(&bytes).expect("a case");
    let size_k = parsed.inputs["x"].shape()[1];
    let rows = parsed.inputs["x"].shape()[0];
    let mut case = Case::new("ties", parsed.config.clone(), "");
    for (name, tensor) in &parsed.inputs {
        let (dtype, shape) = (tensor.dtype(), tensor.shape().to_vec());
        case.add_input(name, Tensor::new("", dtype, shape, tensor.bytes().to_vec()).expect("it"));
    }
    let value = |i: usize| {
        let (row, k) = (i / size_k, i % size_k);
        let magnitude = if k == 7 { 127.0 } else { ((k * 37 + row * 11) % 250) as f32 / 2.0 };
        let sign = if (k + row) % 3 == 0 { -1.0 } else { 1.0 };
        // Rows of other powers of two, and of a scale that no power divides.
        let unit = [1.0, 0.25, 0.375, 0.013, 3.3][row % 5];
        f32_to_f16_rne(sign * magnitude * unit)
    };
    let x = (0..rows * size_k).map(value).collect::<Vec<u16>>();
    let x = Tensor::from_vec("x", DType::F16, vec![rows, size_k], x).expect("x");
    case.add_input("x", x);
    (case, true)
}

#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "long under emulation")]
fn every_known_rule_is_recognized_and_two_are_not_mixed() {
    let (mut case, f16) = ties();
    let (x, ..) = stated(&case);
    let size_k = case.inputs["x"].shape()[1];
    let mut different = 0;
    for &(name, rule) in ActivationRule::NAMED {
        if matches!(rule, ActivationRule::Static | ActivationRule::ProductApproximate) {
            continue;
        }
        let make = |rule| -> (Vec<Vec<u8>>, Vec<f32>) {
            x.chunks(size_k).map(|row| by_rule(rule, row, f16)).unzip()
        };
        let (codes, scales) = make(rule);
        put(&mut case, codes.concat(), scales.clone());
        let found = reports(&case);
        for report in &found {
            assert_eq!(report.verdict, Verdict::Pass, "{name}: {report:?}");
        }
        let CaseConfig::Linear(c) = &mut case.config else { panic!("a product") };
        c.quantizer = Some(rule);
        for report in reports(&case) {
            assert_eq!(report.verdict, Verdict::Pass, "{name}: {report:?}");
            let note = report.note.expect("a note");
            assert!(note.contains(&format!("the declared quantizer `{name}`")), "{note}");
        }
        // Rows of two rules that round halves apart: none explains both.
        let CaseConfig::Linear(c) = &mut case.config else { panic!("a product") };
        c.quantizer = None;
        let other = if name.ends_with("away") || name == "product" {
            ActivationRule::QuotientExact
        } else {
            ActivationRule::QuotientAway
        };
        let (mut mixed, mut mixed_scales) = (codes.clone(), scales.clone());
        let (other_codes, other_scales) = make(other);
        let half = mixed.len() / 2;
        mixed[half..].clone_from_slice(&other_codes[half..]);
        mixed_scales[half..].copy_from_slice(&other_scales[half..]);
        put(&mut case, mixed.concat(), mixed_scales);
        let mixed = reports(&case);
        assert!(mixed.iter().any(|r| r.verdict == Verdict::Fail), "{name}: {mixed:?}");
        // A strict declaration refuses what another rule explains.
        put(&mut case, codes.concat(), scales);
        let CaseConfig::Linear(c) = &mut case.config else { panic!("a product") };
        c.quantizer = Some(other);
        let strict = reports(&case);
        assert!(strict.iter().any(|r| r.verdict == Verdict::Fail), "{name}: {strict:?}");
        let CaseConfig::Linear(c) = &mut case.config else { panic!("a product") };
        c.quantizer = None;
        different += 1;
    }
    assert_eq!(different, 9);
}

#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "long under emulation")]
fn triton_has_one_factor_for_each_row() {
    let (mut case, _) = ties();
    let (x, ..) = stated(&case);
    let size_k = case.inputs["x"].shape()[1];
    let max = |row: &[f32]| row.iter().fold(0f32, |m, v| m.max(v.abs()));
    let next = |v: f32, steps: i32| f32::from_bits(v.to_bits().wrapping_add_signed(steps));
    let code = |v: f32, factor: f32| (v * factor).round().clamp(-128.0, 127.0) as i8 as u8;
    // Factors one and two units too large and too small, another for each row.
    let steps = |row: usize| [1, -2, 2, -1][row % 4];
    let mut codes = Vec::new();
    let mut scales = Vec::new();
    for (i, row) in x.chunks(size_k).enumerate() {
        let factor = next(127.0 / max(row), steps(i));
        codes.extend(row.iter().map(|&v| code(v, factor)));
        scales.push(next(max(row) / 127.0, -steps(i)));
    }
    put(&mut case, codes.clone(), scales.clone());
    for report in reports(&case) {
        assert_eq!(report.verdict, Verdict::Pass, "{report:?}");
        assert!(report.note.expect("a note").contains("`product_approximate`"));
    }
    // A row by two factors is no row of Triton's.
    let row = &x[..size_k];
    let (low, high) = (next(127.0 / max(row), -2), next(127.0 / max(row), 2));
    let halves: Vec<usize> =
        (0..size_k).filter(|&k| code(row[k], low) != code(row[k], high)).collect();
    assert!(halves.len() > 4);
    for (i, &k) in halves.iter().enumerate() {
        codes[k] = code(row[k], if i % 2 == 0 { low } else { high });
    }
    put(&mut case, codes, scales.clone());
    assert_eq!(reports(&case)[0].verdict, Verdict::Fail);
    // Three units are more than the division's error.
    let far = x.chunks(size_k).map(|row| next(max(row) / 127.0, 3)).collect();
    let right = x
        .chunks(size_k)
        .flat_map(|row| row.iter().map(|&v| code(v, 127.0 / max(row))).collect::<Vec<_>>());
    let right = right.collect();
    put(&mut case, right, far);
    assert_eq!(reports(&case)[1].verdict, Verdict::Fail);
}

/// The numbers of e4m3fn by the definition of the type.
fn e4m3(code: u8) -> f64 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7));
    let size = match exponent {
        0 => mantissa / 8.0 * 2f64.powi(-6),
        _ => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
    };
    if code & 0x80 != 0 { -size } else { size }
}

/// The nearest code, of two the even one.
fn nearest(v: f32) -> u8 {
    let v = f64::from(v);
    let codes = (0..0x7fu8).map(|c| if v.is_sign_negative() { c | 0x80 } else { c });
    let distance = |c: &u8| (e4m3(*c) - v).abs();
    codes
        .min_by(|a, b| distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1))))
        .expect("a code")
}

#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "long under emulation")]
fn e4m3_activations() {
    let generator = Generator::new(Op::Linear, 8).expect("the operation");
    let wanted = |c: &Case<'_>| {
        let CaseConfig::Linear(config) = &c.config else { return false };
        config.size_m >= 3 && c.inputs.get("a_q").is_some_and(|t| t.dtype() == DType::F8E4M3)
    };
    let cases = (0..).map(|i| generator.case(i).expect("a case")).filter(wanted);
    let mut reciprocal_differs = 0;
    for mut case in cases.take(Tier::current().pick(3, 6, 6)) {
        let (x, codes, scales) = stated(&case);
        let size_k = codes.len() / scales.len();
        let verdicts = |case: &Case<'_>| reports(case).map(|r| r.verdict);
        assert_eq!(verdicts(&case), [Verdict::Pass; 2], "{}", case.name);
        // max / 448, x / s, by a search over all codes.
        let max = |row: &[f32]| row.iter().fold(0f32, |m, v| m.max(v.abs()));
        let scale = |row: &[f32]| (max(row) / 448.0).max(1.0 / (448.0 * 512.0));
        let naive = |by: &dyn Fn(f32, f32) -> f32| -> Vec<u8> {
            x.chunks(size_k)
                .flat_map(|row| row.iter().map(|&v| nearest(by(v, scale(row)))).collect::<Vec<_>>())
                .collect()
        };
        let all: Vec<f32> = x.chunks(size_k).map(scale).collect();
        put(&mut case, naive(&|v, s| v / s), all.clone());
        assert_eq!(verdicts(&case), [Verdict::Pass; 2], "{}", case.name);
        let product = naive(&|v, s| v * (1.0 / s));
        reciprocal_differs += usize::from(product != codes);
        put(&mut case, product, all.clone());
        assert_eq!(verdicts(&case), [Verdict::Pass; 2], "{}", case.name);
        // Truncated codes, doubled scales, zeros.
        let down = |c: &u8| if c & 0x7f > 0 { c - 1 } else { *c };
        put(&mut case, codes.iter().map(down).collect(), scales.clone());
        assert_eq!(verdicts(&case), [Verdict::Fail, Verdict::Pass]);
        put(&mut case, codes.clone(), scales.iter().map(|s| s * 2.0).collect());
        assert_eq!(verdicts(&case), [Verdict::Pass, Verdict::Fail]);
        put(&mut case, vec![0; codes.len()], vec![0.0; scales.len()]);
        assert_eq!(verdicts(&case)[1], Verdict::Fail);
        // One stated scale for all rows is a declaration.
        let stated = all.iter().copied().fold(0f32, f32::max) * 1.7;
        let codes = x.iter().map(|&v| nearest(v / stated)).collect();
        put(&mut case, codes, vec![stated; all.len()]);
        assert_eq!(verdicts(&case)[1], Verdict::Fail);
        let CaseConfig::Linear(c) = &mut case.config else { panic!("a product") };
        c.quantizer = Some(ActivationRule::Static);
        assert_eq!(verdicts(&case), [Verdict::Pass; 2], "{}", case.name);
    }
    assert!(reciprocal_differs > 0);
}
