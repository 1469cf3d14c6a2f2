//! Requantization to one scale and to e4m3fnuz, over all 256 codes, compared with vLLM's
//! functions.
//!
//! `scripts/gen/fp8_requantize.py` made `data/fp8_requantize.json` on an H200 and on a CPU.

use marlinspike::Error;
use marlinspike::num::array::rows_mut;
use marlinspike::num::scalar::e4m3fn_to_f64;
use marlinspike::prepare::fnuz::{
    e4m3fnuz_to_f32, f32_to_e4m3fnuz_rne_saturating, normalize_codes, normalize_scale,
};
use marlinspike::prepare::fp8::largest_scale;
use marlinspike::prepare::requantize::{Fp8Type, Requantize, merge_shards};
use serde_json::Value;

fn upstream() -> Value {
    serde_json::from_str(include_str!("../data/fp8_requantize.json")).unwrap()
}

fn float(bits: &Value) -> f32 {
    f32::from_bits(u32::try_from(bits.as_u64().unwrap()).unwrap())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// Both shards of every row of `rows`, their codes under `key`.
fn compare(rows: &Value, key: &str, rule: Requantize, ty: Fp8Type) -> usize {
    let rows = rows.as_array().unwrap();
    for row in rows {
        let scales = [float(&row["w1"]), float(&row["w3"])];
        let codes = row.get(key).unwrap_or(&row["codes"]);
        for (own, expected) in scales.into_iter().zip(codes.as_array().unwrap()) {
            let found = rule.table(ty, own, largest_scale(&scales));
            assert_eq!(hex(&found), expected.as_str().unwrap(), "{rule:?} {ty:?} {scales:?} {own}");
        }
    }
    rows.len()
}

#[test]
fn all_codes_as_upstream() {
    let upstream = upstream();
    let rows = &upstream["requantized"];
    assert_eq!(compare(rows, "codes", Requantize::UpstreamCuda, Fp8Type::E4m3fn), 44);
    assert_eq!(compare(rows, "cpu", Requantize::UpstreamCpu, Fp8Type::E4m3fn), 44);
    let fnuz = &upstream["fnuz"];
    assert_eq!(compare(fnuz, "codes", Requantize::UpstreamCpu, Fp8Type::E4m3fnuz), 14);
    // The two devices differ; otherwise one rule would suffice.
    let differing = rows.as_array().unwrap().iter().filter(|row| row.get("cpu").is_some());
    assert_eq!(differing.count(), 7);
}

/// The nearest code by search over all of them, ties to the even code.
fn nearest(value: f64) -> u8 {
    let negative = value.is_sign_negative();
    let codes = if negative { 0x80..=0xfeu8 } else { 0..=0x7eu8 };
    let distance = |c: u8| (e4m3fn_to_f64(c) - value).abs();
    codes.min_by(|&a, &b| distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1)))).unwrap()
}

#[test]
fn the_exact_rule_is_the_nearest_code() {
    for row in upstream()["requantized"].as_array().unwrap() {
        let scales = [float(&row["w1"]), float(&row["w3"])];
        let largest = largest_scale(&scales);
        for own in scales {
            let found = Requantize::Exact.table(Fp8Type::E4m3fn, own, largest);
            for code in 0..=255u8 {
                let value = e4m3fn_to_f64(code) * f64::from(own) / f64::from(largest);
                let expected = if value.is_nan() { code } else { nearest(value) };
                assert_eq!(found[usize::from(code)], expected, "{code:#x} {own} {largest}");
            }
        }
    }
    // One scale for both leaves every code as it is, NaN included.
    let same = Requantize::Exact.table(Fp8Type::E4m3fn, 0.0123, 0.0123);
    assert!((0..=255u8).all(|c| same[usize::from(c)] == c));
}

#[test]
fn what_upstream_loses() {
    // A scale below half of f16's smallest number: every code becomes zero, only on a GPU.
    let tiny = 2e-8;
    let cuda = Requantize::UpstreamCuda.table(Fp8Type::E4m3fn, tiny, tiny);
    assert!((0..0x7f).all(|c| cuda[c] == 0));
    let cpu = Requantize::UpstreamCpu.table(Fp8Type::E4m3fn, tiny, tiny);
    assert_ne!(cpu[0x7e], 0);
    // Above f16's range zeros become the largest number.
    assert_eq!(Requantize::UpstreamCuda.table(Fp8Type::E4m3fn, 7e4, 7e4)[0], 0x7e);
    assert_eq!(Requantize::Exact.table(Fp8Type::E4m3fn, 7e4, 7e4)[0], 0);
    // NaN becomes a number.
    assert_eq!(Requantize::UpstreamCuda.table(Fp8Type::E4m3fn, 1.0, 1.0)[0x7f], 0x7e);
    assert_eq!(Requantize::Exact.table(Fp8Type::E4m3fn, 1.0, 1.0)[0xff], 0xff);
}

#[test]
fn normalized_codes_and_scales() {
    let upstream = &upstream()["normalized"];
    let mut codes: Vec<u8> = (0..=255).collect();
    normalize_codes(&mut codes);
    assert_eq!(hex(&codes), upstream["codes"].as_str().unwrap());
    // PyTorch's values of float8_e4m3fnuz.
    for (code, bits) in codes.iter().zip(upstream["values"].as_array().unwrap()) {
        assert_eq!(e4m3fnuz_to_f32(*code).to_bits(), float(bits).to_bits(), "{code:#x}");
    }
    for pair in upstream["scales"].as_array().unwrap() {
        assert_eq!(normalize_scale(float(&pair[0])).to_bits(), float(&pair[1]).to_bits());
    }
    // The value is the same with the doubled scale, except NaN.
    for code in (0..=255u8).filter(|c| c & 0x7f != 0x7f) {
        let value = 2.0 * f64::from(e4m3fnuz_to_f32(codes[usize::from(code)]));
        assert_eq!(value, e4m3fn_to_f64(code), "{code:#x}");
    }
    assert!(e4m3fnuz_to_f32(0x80).is_nan());
    for code in (0..=255u8).filter(|c| c & 0x7f != 0x7f && *c != 0x80) {
        assert_eq!(f32_to_e4m3fnuz_rne_saturating(e4m3fnuz_to_f32(code)), code);
    }
    assert_eq!(f32_to_e4m3fnuz_rne_saturating(-1e-9), 0);
    assert_eq!(f32_to_e4m3fnuz_rne_saturating(f32::NEG_INFINITY), 0xfe);
}

#[test]
fn the_largest_input_scale() {
    for case in upstream()["input_scales"].as_array().unwrap() {
        let scales: Vec<f32> = case["scales"].as_array().unwrap().iter().map(float).collect();
        assert_eq!(largest_scale(&scales).to_bits(), float(&case["largest"]).to_bits());
    }
}

#[test]
fn shards_of_a_fused_matrix() {
    // Three shards of 1, 0 and 2 rows; the second row of the last has every code again.
    let all: Vec<u8> = (0..=255).collect();
    let rule = (Requantize::UpstreamCuda, Fp8Type::E4m3fn);
    let merge = |codes: &mut [u8], scales: &[f32]| {
        let rows = rows_mut("qkv_proj.weight", codes, 256)?;
        merge_shards("qkv_proj.weight_scale", rows, &[1, 0, 2], scales, rule)
    };
    let mut codes = all.repeat(3);
    assert_eq!(merge(&mut codes, &[0.1, 0.3, 0.2]), Ok(0.3));
    let table = |own| rule.0.table(rule.1, own, 0.3).to_vec();
    assert_eq!(codes, [table(0.1), table(0.2), table(0.2)].concat());
    // One scale: the file was fused, and nothing changes, NaN included.
    let mut codes = all.repeat(3);
    assert_eq!(merge(&mut codes, &[0.3]), Ok(0.3));
    assert_eq!(codes, all.repeat(3));

    for scales in [&[][..], &[1.0, 2.0]] {
        let error = merge(&mut codes, scales).unwrap_err();
        assert!(matches!(error, Error::Size { .. }), "{error}");
    }
    let error = merge(&mut codes[..512], &[1.0]).unwrap_err();
    assert!(matches!(error, Error::Size { .. }), "{error}");
    let error = merge(&mut codes[..300], &[1.0]).unwrap_err();
    assert!(matches!(error, Error::Shape { .. }), "{error}");
    let error = merge(&mut codes, &[1.0, f32::NAN, 1.0]).unwrap_err();
    assert!(matches!(&error, Error::Value { index, .. } if index == &[1]), "{error}");
}
