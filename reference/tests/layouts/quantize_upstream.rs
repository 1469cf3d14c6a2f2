//! Quantizers compared bit for bit with upstream's functions (vLLM 0.21.0 with torch 2.11, CPU:
//! `quantize_upstream.json`) and with the quantized activations of the golden cases (H200).

use marlinspike::Error;
use marlinspike::case::Case;
use marlinspike::formats::{self, mxfp4, mxfp8};
use marlinspike::num::array::{FloatView2, rows_of};
use marlinspike::num::dims::GroupSize;
use marlinspike::num::element::{bf16, f16};
use marlinspike::num::scalar::{ScalarType, bf16_to_f32, e2m1_to_f32, e4m3fn_to_f32};
use marlinspike::quantize::scaled_fp4;
use marlinspike::quantize::{
    Int8Rule, per_tensor_fp8, per_token_fp8, per_token_int8, quantize_weights,
};
use marlinspike_golden::Manifest;
use ndarray::{Array2, ArrayView2, array};
use serde_json::Value;

fn upstream() -> Value {
    serde_json::from_str(include_str!("../data/quantize_upstream.json")).expect("the facts")
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

/// [6, 64]; the last row begins with a block of zeros.
fn x(facts: &Value) -> Array2<bf16> {
    let bits = ints(&facts["x"]).iter().map(|&b| bf16::from_bits(b as u16)).collect();
    Array2::from_shape_vec((6, 64), bits).expect("6 rows")
}

fn widened(x: &Array2<bf16>) -> Vec<f32> {
    x.iter().map(|v| bf16_to_f32(v.to_bits())).collect()
}

fn flat<T: bytemuck::NoUninit>(values: &Array2<T>) -> &[u8] {
    bytemuck::cast_slice(values.as_slice().expect("rows"))
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
        let (shape, bits) = (tensor.dims2().expect("a matrix"), tensor.elements::<u16>());
        let x = FloatView2::from_bits("x", ty, shape, &bits).expect("a view");
        let made = per_token_int8(x, Int8Rule::Quotient).expect("finite");
        assert_eq!(
            made.codes.as_slice().expect("rows"),
            &codes.elements::<i8>()[..],
            "{}",
            entry.path
        );
        let global = case.output("input_global_scale").map_or(1.0, |g| g.elements::<f32>()[0]);
        let scales: Vec<f32> = made.scales.iter().map(|s| s * global).collect();
        let found = case.input("a_scales").expect("scales");
        assert_eq!(scales[..], found.elements::<f32>()[..], "{}", entry.path);
        // The kernel's source text gives nearly the same: codes differ by one, at halves.
        let product = per_token_int8(x, Int8Rule::Product).expect("finite");
        let off = made.codes.iter().zip(&product.codes).map(|(a, b)| a.abs_diff(*b));
        assert!(off.clone().all(|d| d <= 1) && off.filter(|d| *d == 1).count() < 20);
        checked += 1;
    }
    assert!(checked >= 4, "{checked} cases with int8 activations");
}

#[test]
fn int8_halves_go_where_the_rule_says() {
    let row = array![[127.0f32, 0.5, -0.5, 1.5, -2.5]];
    let codes = |rule| per_token_int8(row.view(), rule).expect("finite").codes;
    assert_eq!(codes(Int8Rule::Product), array![[127, 1, -1, 2, -3]]);
    let zeros = per_token_int8(Array2::from_elem((1, 4), f16::ZERO).view(), Int8Rule::Product);
    let zeros = zeros.expect("finite");
    assert_eq!((zeros.codes, zeros.scales), (array![[0; 4]], array![[1e-10f32 / 127.0]]));
}

#[test]
fn mxfp8_and_nvfp4_are_upstreams() {
    let facts = upstream();
    let x = x(&facts);
    let made = (mxfp8::FORMAT.quantize)(x.view().into(), 1.0).expect("blocks");
    assert_eq!(flat(&made.scales), bytes(&facts["mxfp8_s"]));
    assert_eq!(flat(&made.codes), bytes(&facts["mxfp8_q"]));
    let global = f32::from_bits(facts["nvfp4_global"].as_i64().expect("bits") as u32);
    let made = scaled_fp4::quantize(x.view(), global).expect("blocks");
    assert_eq!(flat(&made.scales), bytes(&facts["nvfp4_s"]));
    let values: Vec<f32> = flat(&made.codes).iter().map(|&c| e2m1_to_f32(c)).collect();
    assert_eq!(values, f32s(&facts["nvfp4_v"]));
    // The same numbers as f32, and every second column of a wider array: strides do not matter.
    let wide = x.mapv(|v| bf16_to_f32(v.to_bits()));
    assert_eq!(scaled_fp4::quantize(wide.view(), global).expect("blocks"), made);
    let spread = Array2::from_shape_fn((6, 128), |(m, k)| wide[[m, k / 2]]);
    let every_second = spread.slice(ndarray::s![.., ..;2]);
    assert_eq!(scaled_fp4::quantize(every_second, global).expect("blocks"), made);
}

#[test]
fn mxfp4_takes_the_nearest_code() {
    let facts = upstream();
    let x = x(&facts);
    let made = (mxfp4::FORMAT.quantize)(x.view().into(), 1.0).expect("blocks");
    let (codes, scales, x) = (flat(&made.codes), flat(&made.scales), widened(&x));
    let all: Vec<f64> = (0..16).map(|c| f64::from(e2m1_to_f32(c))).collect();
    for (i, (&code, &v)) in codes.iter().zip(&x).enumerate() {
        let scale = 2f64.powi(i32::from(scales[i / 32]) - 127);
        let error = |c: f64| (c * scale - f64::from(v)).abs();
        let best = all.iter().map(|&c| error(c)).fold(f64::INFINITY, f64::min);
        assert_eq!(error(all[usize::from(code)]), best, "value {i}");
    }
    // The block maximum needs the upper binade of e2m1, 4 and 6, and no more than 8.
    for (block, &s) in x.chunks_exact(32).zip(scales) {
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
        let bits: Vec<u16> = w.iter().map(|v| ty.encode_rne(f64::from(*v)) as u16).collect();
        let w = match ty {
            ScalarType::FLOAT32 => rows_of("w", &w, 8).expect("rows").into(),
            _ => FloatView2::from_bits("w", ty, [w.len() / 8, 8], &bits).expect("a view"),
        };
        let made = quantize_weights(w, weight_type, group).expect("weights");
        assert_eq!(made.scales.as_slice().expect("rows"), f32s(&case["s"]), "{case}");
        let zeros = made.zeros.as_ref().map_or(&[][..], flat);
        assert_eq!(zeros, bytes(&case["z"]), "{case}");
        assert_eq!(flat(&made.codes), bytes(&case["q"]), "{case}");
    }
}

#[test]
fn fp8_scales_and_codes() {
    let facts = upstream();
    let x = x(&facts);
    let made = per_token_fp8(x.view(), None).expect("rows");
    let codes = flat(&made.codes).chunks(64);
    for (row, (codes, &scale)) in widened(&x).chunks(64).zip(codes.zip(&made.scales)) {
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
    let small = per_token_fp8(array![[1e-9f32, 0.0]].view(), None).expect("rows");
    assert_eq!(small.scales, array![[1.0 / (448.0 * 512.0)]]);
    let limited = per_token_fp8(array![[448.0f32, 1.0]].view(), Some(224.0)).expect("rows");
    assert_eq!((limited.scales[[0, 0]], limited.codes[[0, 0]].to_f32()), (0.5, 448.0));
    let tensor = per_tensor_fp8(array![[896.0f32], [-7.0], [0.0]].view(), None).expect("values");
    assert_eq!(tensor.scales, array![[2.0]]);
    assert_eq!(tensor.codes.mapv(|c| c.to_f32()), array![[448.0], [-3.5], [0.0]]);
    let zeros = per_tensor_fp8(array![[0.0f32, 0.0, 0.0]].view(), None).expect("zeros");
    assert_eq!(flat(&zeros.codes), [0; 3]);
}

#[test]
fn refusals_name_what_is_wrong() {
    let e = per_token_int8(array![[1.0, f32::NAN]].view(), Int8Rule::Product).expect_err("NaN");
    assert!(matches!(e, Error::Value { ref index, .. } if index[..] == [0, 1]), "{e}");
    let ones = Array2::<f32>::ones((64, 48));
    let blocks = (mxfp8::FORMAT.quantize)(ones.view().into(), 1.0);
    assert!(matches!(blocks, Err(Error::Size { .. })));
    assert!(matches!(scaled_fp4::quantize(ones.view(), 0.0), Err(Error::Size { .. })));
    let none = ArrayView2::<f32>::from_shape((2, 0), &[]).expect("no columns");
    assert!(matches!(per_token_fp8(none, None), Err(Error::Size { .. })));
    assert!(matches!(rows_of("x", &[1.0f32; 3], 2), Err(Error::Shape { .. })));
    let e4m3 = ScalarType::FLOAT8_E4M3FN;
    let refused = quantize_weights(ones.view(), e4m3, GroupSize::Of(32));
    assert!(matches!(refused, Err(Error::Unsupported { .. })));
    let odd = quantize_weights(ones.view(), ScalarType::UINT4B8, GroupSize::Of(48));
    assert!(matches!(odd, Err(Error::Size { .. })));
    let columns = quantize_weights(none, ScalarType::UINT4B8, GroupSize::Channel);
    assert!(matches!(columns, Err(Error::Size { .. })));
}
