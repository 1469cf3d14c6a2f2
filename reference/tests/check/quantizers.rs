//! Quantizers by plain loops: MXFP4, static FP8, requantization to UE8M0, least scales; and the diagnoses
//! of wrong outputs.

use marlinspike::case::{Case, CaseConfig, Op};
use marlinspike::check::{CaseReport, OutputReport, Verdict, check_case};
use marlinspike::num::scalar::{bf16_to_f32, f32_to_bf16_rne};
use marlinspike::num::tensor::{DType, Tensor};
use serde_json::{Value, json};

/// The nearest of `values` by their index, ties to the even index.
fn nearest(values: &[f64], x: f64) -> u8 {
    let distance = |i: &usize| ((values[*i] - x.abs()).abs(), i % 2);
    let by = |a: &usize, b: &usize| distance(a).partial_cmp(&distance(b)).expect("numbers");
    (0..values.len()).min_by(by).expect("values") as u8
}

fn e2m1(x: f64) -> u8 {
    nearest(&[0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], x) | u8::from(x.is_sign_negative()) << 3
}

fn e4m3_value(code: u8) -> f64 {
    let (exponent, fraction) = (i32::from(code >> 3 & 15), f64::from(code & 7));
    let size = match exponent {
        0 => fraction / 512.0,
        _ => (1.0 + fraction / 8.0) * f64::from(exponent - 7).exp2(),
    };
    if code >> 7 == 1 { -size } else { size }
}

fn e4m3(x: f64) -> u8 {
    let values: Vec<f64> = (0..0x7f).map(e4m3_value).collect();
    nearest(&values, x) | u8::from(x.is_sign_negative()) << 7
}

fn bf16(x: f32) -> f32 {
    bf16_to_f32(f32_to_bf16_rne(x))
}

/// Rows of mixed sizes, with powers of two, fractions around 1.75, zeros and small values.
fn rows(m: usize, k: usize) -> Vec<f32> {
    let value = |i: usize| {
        let size = [0.001, 1.0, 300.0, 0.0, 2.0][i / 32 % 5];
        let fraction = ((i * 7919 + i / 32 * 131) % 509) as f32 / 254.5 - 1.0;
        match i % 32 {
            5 => size * [1.0, 1.75, 1.7421875, 1.5, 1.25][i / 160 % 5],
            _ => size * fraction,
        }
    };
    (0..m * k).map(value).map(bf16).collect()
}

fn bf16s(shape: Vec<usize>, values: &[f32]) -> Tensor<'static> {
    let bits = values.iter().map(|&v| f32_to_bf16_rne(v)).collect();
    Tensor::from_vec("", DType::BF16, shape, bits).expect("a tensor")
}

fn f32s(shape: Vec<usize>, values: &[f32]) -> Tensor<'static> {
    Tensor::from_vec("", DType::F32, shape, values.to_vec()).expect("a tensor")
}

fn report(
    op: Op,
    config: &Value,
    inputs: Vec<(&str, Tensor<'static>)>,
    outputs: Vec<(&str, Tensor<'static>)>,
) -> CaseReport {
    let config = CaseConfig::from_json(op, config.as_object().expect("keys")).expect("a config");
    let mut case = Case::new("quantizer", config, "anyone");
    inputs.into_iter().for_each(|(name, tensor)| case.add_input(name, tensor));
    outputs.into_iter().for_each(|(name, tensor)| case.add_output(name, tensor));
    check_case(&case).expect("a report")
}

fn output<'r>(report: &'r CaseReport, name: &str) -> &'r OutputReport {
    report.outputs.iter().find(|o| o.name == name).expect(name)
}

fn cause(report: &CaseReport, name: &str) -> Option<String> {
    output(report, name).diagnosis.as_ref().map(|d| d.id.clone())
}

/// Codes and exponents plus 127 by a rule.
fn mxfp4(x: &[f32], rule: &str) -> (Vec<u8>, Vec<u8>) {
    let (mut codes, mut scales) = (Vec::new(), Vec::new());
    for block in x.chunks_exact(32) {
        let max = block.iter().fold(0f64, |m, x| m.max(f64::from(x.abs())));
        let floor = max.max(2f64.powi(-126)).log2().floor();
        let power = floor.exp2();
        let exponent = match rule {
            "floor" => floor - 2.0,
            "even" if max / power >= 1.75 => floor - 1.0,
            "ceil" if max > power => floor - 1.0,
            "round_up" => {
                (-127..).find(|&e| max <= 6.0 * f64::from(e).exp2()).map_or(0.0, f64::from)
            }
            _ => floor - 2.0,
        };
        let exponent = exponent.max(-127.0);
        codes.extend(block.iter().map(|&x| e2m1(f64::from(x) / exponent.exp2())));
        scales.push((exponent + 127.0) as u8);
    }
    (codes.chunks(2).map(|p| p[0] | p[1] << 4).collect(), scales)
}

const RULES: [&str; 4] = ["floor", "even", "ceil", "round_up"];

#[test]
fn mxfp4_by_every_rule() {
    let (m, k) = (5, 160);
    let x = rows(m, k);
    let judged = |rule: &str, codes: Vec<u8>, scales: Vec<u8>| {
        let config = json!({
            "dtype": "bfloat16", "size_m": m, "size_k": k, "scale_rounding": rule,
        });
        let inputs = vec![("x", bf16s(vec![m, k], &x))];
        let codes = Tensor::new("", DType::U8, vec![m, k / 2], codes).expect("codes");
        let scales = Tensor::new("", DType::U8, vec![m, k / 32], scales).expect("scales");
        report(Op::DynamicMxfp4Quant, &config, inputs, vec![("x_fp4", codes), ("x_scale", scales)])
    };
    let names =
        ["scale-rounding-floor", "scale-rounding-even", "scale-rounding-ceil", "scale-rounding-up"];
    for declared in RULES {
        for (made, name) in RULES.into_iter().zip(names) {
            let (codes, scales) = mxfp4(&x, made);
            let report = judged(declared, codes, scales);
            assert_eq!(report.verdict == Verdict::Pass, declared == made, "{declared} {made}");
            if declared != made {
                assert_eq!(cause(&report, "x_scale").as_deref(), Some(name));
            }
        }
    }
    // One wrong scale, by which the codes are right.
    let (_, mut scales) = mxfp4(&x, "floor");
    scales[7] += 3;
    let step = (f64::from(scales[7]) - 127.0).exp2();
    let (mut codes, _) = mxfp4(&x, "floor");
    for (i, pair) in x[7 * 32..8 * 32].chunks(2).enumerate() {
        let code = |x: f32| e2m1(f64::from(x) / step);
        codes[7 * 16 + i] = code(pair[0]) | code(pair[1]) << 4;
    }
    let report = judged("floor", codes, scales);
    assert_eq!(cause(&report, "x_fp4").as_deref(), Some("follows-other-output"));
    assert_eq!(cause(&report, "x_scale").as_deref(), Some("confined"));
}

#[test]
fn static_fp8_for_tensors_and_tokens() {
    let (m, k) = (4, 96);
    let x = rows(m, k);
    for per_token in [false, true] {
        let scales: Vec<f32> =
            (0..if per_token { m } else { 1 }).map(|i| 0.3 + 0.21 * i as f32).collect();
        let scale = |i: usize| scales[if per_token { i / k } else { 0 }];
        let codes = |code: &dyn Fn(f32, f32) -> u8| -> Vec<u8> {
            x.iter().enumerate().map(|(i, &x)| code(x, scale(i))).collect()
        };
        let judged = |codes: Vec<u8>, quantizer: Option<&str>| {
            let mut config = json!({
                "dtype": "bfloat16", "size_m": m, "size_k": k, "per_token": per_token,
            });
            if let Some(rule) = quantizer {
                config["quantizer"] = json!(rule);
            }
            let shape = if per_token { vec![m, 1] } else { vec![1] };
            let inputs = vec![("x", bf16s(vec![m, k], &x)), ("scale", f32s(shape, &scales))];
            let codes = Tensor::new("", DType::F8E4M3, vec![m, k], codes).expect("codes");
            report(Op::StaticFp8Quant, &config, inputs, vec![("x_q", codes)])
        };
        let inverse = codes(&|x, s| e4m3(f64::from(x * (1.0 / s))));
        let quotient = codes(&|x, s| e4m3(f64::from(x / s)));
        for made in [&inverse, &quotient] {
            assert_eq!(judged(made.clone(), None).verdict, Verdict::Pass);
        }
        let by_rule = |made: &Vec<u8>, rule| judged(made.clone(), Some(rule)).verdict;
        assert_eq!(by_rule(&inverse, "scale_inverse"), Verdict::Pass);
        assert_eq!(by_rule(&quotient, "quotient"), Verdict::Pass);
        let multiplied = judged(codes(&|x, s| e4m3(f64::from(x * s))), None);
        assert_eq!(cause(&multiplied, "x_q").as_deref(), Some("scale-inverted"));
        // NaN codes are called so.
        let mut broken = inverse.clone();
        broken[k..2 * k].fill(0x7f);
        let broken = judged(broken, None);
        let said = output(&broken, "x_q").diagnosis.as_ref().expect("a fact");
        assert_eq!((said.id.as_str(), said.text.contains("NaN")), ("not-finite", true));
        let everywhere = judged(vec![0x7f; m * k], None);
        let said = output(&everywhere, "x_q").diagnosis.as_ref().expect("a fact");
        assert_eq!(said.text, "NaN everywhere");
        let mut one = inverse.clone();
        (2 * k..3 * k).step_by(8).for_each(|i| one[i] ^= 1);
        let one = judged(one, None);
        let said = output(&one, "x_q").diagnosis.as_ref().expect("a place");
        assert!(said.text.contains("row 2") && said.text.contains("k 0 of every 8"), "{said:?}");
    }
}

#[test]
fn blocks_are_requantized_to_powers_of_two() {
    let (n, k, block) = (10usize, 24usize, [4usize, 8]);
    let codes: Vec<u8> = (0..n * k)
        .map(|i| (i * 37 % 251) as u8)
        .map(|c| if c & 0x7f == 0x7f { 0x30 } else { c })
        .collect();
    let blocks = [n.div_ceil(block[0]), k.div_ceil(block[1])];
    let scales: Vec<f32> = (0..blocks[0] * blocks[1]).map(|i| 0.011 + 0.37 * i as f32).collect();
    let of = |i: usize| i / k / block[0] * blocks[1] + i % k / block[1];
    let values: Vec<f32> =
        codes.iter().enumerate().map(|(i, &c)| e4m3_value(c) as f32 * scales[of(i)]).collect();
    let made: Vec<f32> = (0..scales.len())
        .map(|b| {
            let inside = values.iter().enumerate().filter(|(i, _)| of(*i) == b);
            let max = inside.fold(1e-4f32, |m, (_, v)| m.max(v.abs()));
            f64::from(max / 448.0).log2().ceil().exp2() as f32
        })
        .collect();
    let right: Vec<u8> =
        values.iter().enumerate().map(|(i, &v)| e4m3(f64::from(v / made[of(i)]))).collect();
    let judged = |weight: &[u8], scale: &[f32]| {
        let config = json!({"size_n": n, "size_k": k, "weight_block_size": block});
        let e4m3 = |codes: &[u8]| {
            Tensor::new("", DType::F8E4M3, vec![n, k], codes.to_vec()).expect("codes")
        };
        let table = |scales: &[f32]| f32s(blocks.to_vec(), scales);
        report(
            Op::RequantUe8m0,
            &config,
            vec![("weight", e4m3(&codes)), ("weight_scale", table(&scales))],
            vec![("weight", e4m3(weight)), ("weight_scale", table(scale))],
        )
    };
    assert_eq!(judged(&right, &made).verdict, Verdict::Pass);
    let kept = judged(&codes, &made);
    assert_eq!(cause(&kept, "weight").as_deref(), Some("codes-not-requantized"));
    assert_eq!(output(&kept, "weight_scale").verdict, Verdict::Pass);
    let mut doubled = made.clone();
    doubled[5] *= 2.0;
    assert_eq!(judged(&right, &doubled).verdict, Verdict::Fail);
}

/// Groups to e4m3 with UE8M0 scales of at least `least`, before they are rounded up or after it.
fn groups(x: &[f32], group: usize, least: f32, after: bool) -> (Vec<u8>, Vec<f32>) {
    let (mut codes, mut scales) = (Vec::new(), Vec::new());
    for values in x.chunks_exact(group) {
        let max = values.iter().fold(0f32, |m, v| m.max(v.abs()));
        let up = |s: f32| f64::from(s).log2().ceil().exp2() as f32;
        let scale = match after {
            true => up((max / 448.0).max(1e-10)).max(least),
            false => up((max / 448.0).max(least)),
        };
        codes.extend(values.iter().map(|&v| e4m3(f64::from(v / scale))));
        scales.push(scale);
    }
    (codes, scales)
}

#[test]
fn least_scales_of_groups() {
    let (m, k, group) = (3, 160, 32);
    let mut x = rows(m, k);
    x[..group].iter_mut().for_each(|v| *v = bf16(*v * 1e-4));
    let judged = |(codes, scales): (Vec<u8>, Vec<f32>), least: Option<&str>| {
        let mut config = json!({
            "dtype": "bfloat16", "size_m": m, "size_k": k, "group_size": group, "use_ue8m0": true,
        });
        if let Some(least) = least {
            config["least_scale"] = json!(least);
        }
        let codes = Tensor::new("", DType::F8E4M3, vec![m, k], codes).expect("codes");
        let scales = f32s(vec![m, k / group], &scales);
        let inputs = vec![("x", bf16s(vec![m, k], &x))];
        report(Op::PerTokenGroupQuant, &config, inputs, vec![("x_q", codes), ("x_s", scales)])
    };
    const MIN: f32 = 1.0 / (448.0 * 512.0);
    let (own, min) = (groups(&x, group, 1e-10, false), groups(&x, group, MIN, false));
    assert_ne!(own, min);
    for (made, [without, quantizer, stated]) in
        [(&own, [true, true, false]), (&min, [true, false, true])]
    {
        let passes = |least| judged(made.clone(), least).verdict == Verdict::Pass;
        assert_eq!(passes(None), without);
        assert_eq!(passes(Some("quantizer")), quantizer);
        assert_eq!(passes(Some("1/(448*512)")), stated);
    }
    let noted = judged(min, None);
    let note = output(&noted, "x_s").note.clone().unwrap_or_default();
    assert!(note.contains("min_scaling_factor"), "{note}");
    let late = judged(groups(&x, group, MIN, true), None);
    assert_eq!(late.verdict, Verdict::Fail);
    assert_eq!(cause(&late, "x_s").as_deref(), Some("least-after-rounding"));
}

/// Rows without values, as a rank or a batch may have them.
#[test]
fn no_rows_are_right() {
    for (op, config) in [
        (Op::StaticFp8Quant, json!({"dtype": "bfloat16", "size_m": 0, "size_k": 64})),
        (Op::DynamicInt8Quant, json!({"dtype": "bfloat16", "size_m": 0, "size_k": 64})),
        (Op::PerTokenGroupQuant, json!({"dtype": "bfloat16", "size_m": 0, "size_k": 128})),
        (Op::DynamicMxfp4Quant, json!({"dtype": "bfloat16", "size_m": 0, "size_k": 64})),
    ] {
        let k = config["size_k"].as_u64().expect("a size") as usize;
        let parsed =
            CaseConfig::from_json(op, config.as_object().expect("keys")).expect("a config");
        let mut case = Case::new("no rows", parsed, "anyone");
        case.add_input("x", bf16s(vec![0, k], &[]));
        case.add_input("scale", f32s(vec![1], &[1.0]));
        case.add_input("input_global_scale", f32s(vec![1], &[1.0]));
        let wanted = case.config.rules(0).expect("rules");
        case.inputs.retain(|name, _| wanted.iter().any(|r| r.name == format!("in.{name}")));
        marlinspike::check::add_outputs(&mut case).unwrap_or_else(|e| panic!("{op}: {e}"));
        let report = check_case(&case).unwrap_or_else(|e| panic!("{op}: {e}"));
        assert!(report.outputs.iter().all(|o| o.verdict == Verdict::Pass), "{op}: {report:#?}");
    }
}

#[test]
fn codes_that_saturate_early_are_named() {
    let (m, k, group) = (3, 160, 32);
    let x = rows(m, k);
    let (codes, scales) = groups(&x, group, 1e-10, false);
    let config = json!({
        "dtype": "bfloat16", "size_m": m, "size_k": k, "group_size": group, "use_ue8m0": true,
    });
    let limited = |most: u8| {
        let limit = |&c: &u8| c & 0x80 | (c & 0x7f).min(most);
        let made: Vec<u8> = codes.iter().map(limit).collect();
        let codes = Tensor::new("", DType::F8E4M3, vec![m, k], made).expect("codes");
        let scales = f32s(vec![m, k / group], &scales);
        let outputs = vec![("x_q", codes), ("x_s", scales)];
        report(Op::PerTokenGroupQuant, &config, vec![("x", bf16s(vec![m, k], &x))], outputs)
    };
    assert_eq!(limited(0x7e).verdict, Verdict::Pass);
    // 240, and the next code.
    assert_eq!(cause(&limited(0x77), "x_q").as_deref(), Some("e4m3-saturates-early"));
    let later = limited(0x78);
    assert_eq!(later.verdict, Verdict::Fail);
    assert_ne!(cause(&later, "x_q").as_deref(), Some("e4m3-saturates-early"));

    let scale = 0.25f32;
    let config = json!({"dtype": "bfloat16", "size_m": m, "size_k": k, "symmetric": true});
    let int8 = |least: f32| {
        let code = |&v: &f32| (v / scale).round_ties_even().clamp(least, 127.0) as i8;
        let codes = Tensor::from_vec("", DType::I8, vec![m, k], x.iter().map(code).collect());
        let inputs = vec![("x", bf16s(vec![m, k], &x)), ("scale", f32s(vec![1], &[scale]))];
        report(Op::StaticInt8Quant, &config, inputs, vec![("x_q", codes.expect("codes"))])
    };
    assert_eq!(int8(-128.0).verdict, Verdict::Pass);
    assert_eq!(cause(&int8(-127.0), "x_q").as_deref(), Some("code-least-127"));
    assert_ne!(cause(&int8(-126.0), "x_q").as_deref(), Some("code-least-127"));
}
