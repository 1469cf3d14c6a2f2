//! Quantizers compared bit for bit with upstream's functions (vLLM 0.21.0 with torch 2.11, CPU:
//! `quantize_upstream.json`) and with the quantized activations of the golden cases (H200).

use marlinspike::Error;
use marlinspike::case::Case;
use marlinspike::formats::{self, mxfp4, mxfp8};
use marlinspike::num::dims::GroupSize;
use marlinspike::num::scalar::{ScalarType, bf16_to_f32, e2m1_to_f32, e4m3fn_to_f32};
use marlinspike::quantize::{
    Int8Rule, nvfp4, per_tensor_fp8, per_token_fp8, per_token_int8, quantize_weights,
};
use marlinspike_golden::Manifest;
use serde_json::Value;

fn upstream() -> Value {
    serde_json::from_str(include_str!("quantize_upstream.json")).expect("the facts")
}

fn ints(v: &Value) -> Vec<i64> {
    v.as_array().expect("a list").iter().map(|x| x.as_i64().expect("an integer")).collect()
}

fn bytes(v: &Value) -> Vec<u8> {
    ints(v).iter().map(|&x| x as u8).collect()
}

fn f32s(v: &Value) -> Vec<f32> {
    ints(v).iter().map(|&x| f32::from_bits(x as u32)).collect()
}

/// [6, 64], from bf16; the last row begins with a block of zeros.
fn x(facts: &Value) -> Vec<f32> {
    ints(&facts["x"]).iter().map(|&b| bf16_to_f32(b as u16)).collect()
}

#[test]
fn golden_int8_activations_are_equal() {
    let golden = Manifest::load().expect("the golden manifest");
    let mut checked = 0;
    for entry in golden.cases() {
        let file = std::fs::read(golden.path(&entry.path)).expect("a golden file");
        let case = Case::parse(&file).expect("a case");
        let Some(codes) = case.inputs.get("a_q").filter(|t| t.dtype().name() == "I8") else {
            continue;
        };
        let tensor = case.input("x").expect("x");
        let ty = formats::float_type(tensor.dtype()).expect("a float");
        let x: Vec<f32> =
            tensor.elements::<u16>().iter().map(|&b| ty.to_f64(b.into()) as f32).collect();
        let made = per_token_int8(&x, tensor.shape()[1], Int8Rule::Quotient).expect("finite");
        assert_eq!(made.codes[..], codes.elements::<i8>()[..], "{}", entry.path);
        let global = case.output("input_global_scale").map_or(1.0, |g| g.elements::<f32>()[0]);
        let scales: Vec<f32> = made.scales.iter().map(|s| s * global).collect();
        let found = case.input("a_scales").expect("scales");
        assert_eq!(scales[..], found.elements::<f32>()[..], "{}", entry.path);
        // The kernel's source text gives nearly the same: codes differ by one, at halves.
        let product = per_token_int8(&x, tensor.shape()[1], Int8Rule::Product).expect("finite");
        let off = made.codes.iter().zip(&product.codes).map(|(a, b)| a.abs_diff(*b));
        assert!(off.clone().all(|d| d <= 1) && off.filter(|d| *d == 1).count() < 20);
        checked += 1;
    }
    assert!(checked >= 4, "{checked} cases with int8 activations");
}

#[test]
fn int8_halves_go_where_the_rule_says() {
    let row = [127.0, 0.5, -0.5, 1.5, -2.5];
    let codes = |rule| per_token_int8(&row, 5, rule).expect("finite").codes;
    assert_eq!(codes(Int8Rule::Product), [127, 1, -1, 2, -3]);
    let zeros = per_token_int8(&[0.0; 4], 4, Int8Rule::Product).expect("finite");
    assert_eq!((zeros.codes, zeros.scales), (vec![0; 4], vec![1e-10f32 / 127.0]));
}

#[test]
fn mxfp8_and_nvfp4_are_upstreams() {
    let facts = upstream();
    let x = x(&facts);
    let (codes, scales) = (mxfp8::FORMAT.quantize)(&x, 64, 1.0).expect("blocks");
    assert_eq!(scales, bytes(&facts["mxfp8_s"]));
    assert_eq!(codes, bytes(&facts["mxfp8_q"]));
    let global = f32::from_bits(facts["nvfp4_global"].as_i64().expect("bits") as u32);
    let (codes, scales) = nvfp4(&x, 64, global).expect("blocks");
    assert_eq!(scales, bytes(&facts["nvfp4_s"]));
    let values: Vec<f32> = codes.iter().map(|&c| e2m1_to_f32(c)).collect();
    assert_eq!(values, f32s(&facts["nvfp4_v"]));
}

#[test]
fn mxfp4_takes_the_nearest_code() {
    let facts = upstream();
    let x = x(&facts);
    let (codes, scales) = (mxfp4::FORMAT.quantize)(&x, 64, 1.0).expect("blocks");
    let all: Vec<f64> = (0..16).map(|c| f64::from(e2m1_to_f32(c))).collect();
    for (i, (&code, &v)) in codes.iter().zip(&x).enumerate() {
        let scale = 2f64.powi(i32::from(scales[i / 32]) - 127);
        let error = |c: f64| (c * scale - f64::from(v)).abs();
        let best = all.iter().map(|&c| error(c)).fold(f64::INFINITY, f64::min);
        assert_eq!(error(all[usize::from(code)]), best, "value {i}");
    }
    // The block maximum needs the upper binade of e2m1, 4 and 6, and no more than 8.
    for (block, &s) in x.chunks_exact(32).zip(&scales) {
        let max = block.iter().fold(0f32, |m, v| m.max(v.abs()));
        let scaled = f64::from(max) / 2f64.powi(i32::from(s) - 127);
        assert!(max == 0.0 || (4.0..8.0).contains(&scaled), "{scaled}");
    }
}

#[test]
fn groups_are_upstreams() {
    let facts = upstream();
    let w = f32s(&facts["w"]);
    for case in facts["group"].as_array().expect("cases") {
        let text = |k: &str| case[k].as_str().expect("a name");
        let ty = ScalarType::from_name(text("dtype")).expect("a type");
        let weight_type = ScalarType::from_name(text("type")).expect("a type");
        let group = match case["group_size"].as_i64() {
            Some(-1) => GroupSize::Channel,
            other => GroupSize::Of(other.expect("a size") as usize),
        };
        let narrow = |v: &f32| ty.to_f64(ty.encode_rne(f64::from(*v))) as f32;
        let w: Vec<f32> = w.iter().map(narrow).collect();
        let made = quantize_weights(&w, 8, ty, weight_type, group).expect("weights");
        assert_eq!(made.scales, f32s(&case["s"]), "{case}");
        assert_eq!(made.zeros, bytes(&case["z"]), "{case}");
        assert_eq!(made.codes, bytes(&case["q"]), "{case}");
    }
}

#[test]
fn fp8_scales_and_codes() {
    let facts = upstream();
    let x = x(&facts);
    let made = per_token_fp8(&x, 64, None).expect("rows");
    for (row, (codes, &scale)) in x.chunks(64).zip(made.codes.chunks(64).zip(&made.scales)) {
        let max = row.iter().fold(0f32, |m, v| m.max(v.abs()));
        // The quotient of two f32 in f64, rounded once more to f32, is correctly rounded.
        assert_eq!(scale, (f64::from(max) / 448.0) as f32);
        for (&code, &v) in codes.iter().zip(row) {
            let scaled = (f64::from(v) / f64::from(scale)) as f32;
            let found = e4m3fn_to_f32(code);
            let near = (0..=255u8).map(e4m3fn_to_f32).filter(|c| !c.is_nan());
            let best = near.map(|c| (c - scaled).abs()).fold(f32::INFINITY, f32::min);
            assert_eq!((found - scaled).abs(), best, "{v} / {scale}");
        }
    }
    let small = per_token_fp8(&[1e-9, 0.0], 2, None).expect("rows");
    assert_eq!(small.scales, [1.0 / (448.0 * 512.0)]);
    let limited = per_token_fp8(&[448.0, 1.0], 2, Some(224.0)).expect("rows");
    assert_eq!((limited.scales, e4m3fn_to_f32(limited.codes[0])), (vec![0.5], 448.0));
    let tensor = per_tensor_fp8(&[896.0, -7.0, 0.0], None).expect("values");
    let values: Vec<f32> = tensor.codes.iter().map(|&c| e4m3fn_to_f32(c)).collect();
    assert_eq!((tensor.scales, values), (vec![2.0], vec![448.0, -3.5, 0.0]));
    assert_eq!(per_tensor_fp8(&[0.0; 3], None).expect("zeros").codes, [0; 3]);
}

#[test]
fn refusals_name_what_is_wrong() {
    let nan = [1.0, f32::NAN];
    let e = per_token_int8(&nan, 2, Int8Rule::Product).expect_err("NaN");
    assert!(matches!(e, Error::Value { ref index, .. } if index[..] == [0, 1]), "{e}");
    assert!(matches!((mxfp8::FORMAT.quantize)(&[1.0; 48], 48, 1.0), Err(Error::Size { .. })));
    assert!(matches!(nvfp4(&[1.0; 16], 16, 0.0), Err(Error::Size { .. })));
    assert!(matches!(per_token_fp8(&[1.0; 3], 2, None), Err(Error::Shape { .. })));
    let (ty, int4) = (ScalarType::FLOAT16, ScalarType::UINT4B8);
    let odd = quantize_weights(&[0.1; 64], 1, ty, int4, GroupSize::Of(32));
    assert!(matches!(odd, Err(Error::Value { .. })), "0.1 is no f16");
    let none = quantize_weights(&[1.0; 64], 1, ty, ScalarType::FLOAT8_E4M3FN, GroupSize::Of(32));
    assert!(matches!(none, Err(Error::Unsupported { .. })));
}
