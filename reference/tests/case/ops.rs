//! Cases of the operations besides Marlin's: generated ones pass, and every known mistake is
//! rejected with its name.

use std::collections::{BTreeMap, BTreeSet};

use marlinspike::case::{Case, CaseConfig, Op, Reciprocal};
use marlinspike::check::{self, Verdict, check_case, mistaken};
use marlinspike::vectors::Generator;
use marlinspike_golden::Tier;

/// A case by its number, written and read back.
fn generated(generator: &Generator, index: u64) -> Vec<u8> {
    let case = generator.case(index).unwrap_or_else(|e| panic!("case {index}: {e}"));
    let bytes = case.to_bytes().unwrap();
    let read = Case::parse(&bytes).unwrap_or_else(|e| panic!("{}: {e}", case.name));
    assert_eq!(read.to_bytes().unwrap(), bytes, "{}", case.name);
    assert_eq!((&read.config, &read.outputs), (&case.config, &case.outputs), "{}", case.name);
    bytes
}

/// Every output of `count` cases passes.
fn pass(op: Op, count: u64) {
    let generator = Generator::new(op, 11).unwrap();
    for index in 0..count {
        let bytes = generated(&generator, index);
        let case = Case::parse(&bytes).unwrap();
        let report = check_case(&case).unwrap_or_else(|e| panic!("{}: {e}", case.name));
        assert_eq!(report.outputs.len(), case.outputs.len(), "{}", case.name);
        for output in &report.outputs {
            assert_eq!(output.verdict, Verdict::Pass, "{}: {output:#?}", case.name);
        }
    }
}

/// The check rejects every mistake that changes a case. Each mistake is diagnosed by its name in at
/// least one case, and there are `expected` mistakes. A plain `cargo test` tries a mistake until an output
/// has named it.
fn mistakes(op: Op, count: u64, expected: usize) {
    let generator = Generator::new(op, 12).unwrap();
    let mut named: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    let enough = Tier::current().pick(1, usize::MAX, usize::MAX);
    for index in 0..count {
        let case = generator.case(index).unwrap();
        for id in check::mistakes(op) {
            let by_name =
                named.get(id).map_or(0, |names| names.iter().filter(|n| *n == id).count());
            if by_name >= enough {
                continue;
            }
            let Some(wrong) = mistaken(&case, id).unwrap() else { continue };
            let report = check_case(&wrong).unwrap();
            let names = named.entry(id).or_default();
            let failed = report.outputs.iter().filter(|o| o.verdict == Verdict::Fail);
            let diagnoses = failed.filter_map(|o| o.diagnosis.as_ref());
            names.extend(diagnoses.map(|d| d.id.clone()));
            // A mistake in a product without a schedule may be within the bound, or equal another
            // known schedule; with a declared schedule it may not.
            let undeclared = ["bound: ", "as a known schedule gives it"];
            let bounded = |n: &Option<String>| {
                n.as_deref().is_some_and(|n| undeclared.iter().any(|u| n.contains(u)))
            };
            assert!(
                report.verdict == Verdict::Fail || report.outputs.iter().any(|o| bounded(&o.note)),
                "{op}: {id} passed in {}\n{report:#?}",
                case.name
            );
        }
    }
    for (id, names) in &named {
        assert!(names.iter().any(|n| n == id), "{op}: {id} is only ever called {names:?}");
    }
    let ids: BTreeSet<&str> = check::mistakes(op).into_iter().collect();
    assert_eq!(named.keys().copied().collect::<BTreeSet<_>>(), ids, "{op}");
    assert_eq!(ids.len(), expected, "{op}: {ids:?}");
}

macro_rules! operations {
    ($($pass:ident $wrong:ident $op:ident $cases:literal $tried:literal $mistakes:literal),+ $(,)?) => { $(
        #[test]
        #[cfg_attr(target_arch = "aarch64", ignore = "slow under qemu")]
        fn $pass() {
            pass(Op::$op, $cases);
        }

        #[test]
        #[cfg_attr(target_arch = "aarch64", ignore = "slow under qemu")]
        fn $wrong() {
            mistakes(Op::$op, $tried, $mistakes);
        }
    )+ };
}

operations! {
    swizzled_scales wrong_swizzled_scales SwizzleBlockscale 150 20 5,
    mxint4 wrong_mxint4 TrtllmMxInt4 2 2 9,
    nvfp4_experts wrong_nvfp4_experts Fp4Experts 24 16 14,
    requantized wrong_requantized Fp8Requantize 36 30 10,
    fnuz wrong_fnuz NormalizeFnuz 12 12 5,
    gpt_oss wrong_gpt_oss LoadWeightsMxfp4 60 30 8,
    fp4_quantized wrong_fp4_quantized ScaledFp4Quant 60 30 5,
    fp4_products wrong_fp4_products ScaledFp4Mm 40 20 14,
    fp8_products wrong_fp8_products ScaledMm 60 50 14,
    fp8_layers wrong_fp8_layers Fp8Moe 24 32 15,
    fp8_groups wrong_fp8_groups PerTokenGroupQuant 96 48 15,
    static_fp8 wrong_static_fp8 StaticFp8Quant 32 128 9,
    mxfp4_quantized wrong_mxfp4_quantized DynamicMxfp4Quant 32 32 12,
    requantized_ue8m0 wrong_requantized_ue8m0 RequantUe8m0 12 9 5,
    mxfp4_int8 wrong_mxfp4_int8 E2m1Int8Linear 192 96 13,
    mxfp4_int8_layers wrong_mxfp4_int8_layers E2m1Int8Moe 64 48 10,
}

/// A config key with another value.
fn with_key(case: &Case<'_>, key: &str, value: serde_json::Value) -> marlinspike::Result<()> {
    let mut keys = case.config.to_json();
    assert!(keys.insert(key.to_owned(), value).is_some() || key == "logical_widths", "{key}");
    let config = marlinspike::case::CaseConfig::from_json(case.op, &keys)?;
    Case { config, ..case.clone() }.validate()
}

/// Sizes that a layout or a product does not support give an error that names the key.
#[test]
fn configs_are_refused_by_key() {
    use serde_json::json;
    for (op, key, value) in [
        (Op::SwizzleBlockscale, "sf_layout", json!("64x4")),
        (Op::SwizzleBlockscale, "scale_type", json!("float32")),
        (Op::TrtllmMxInt4, "hidden_size", json!(384)),
        (Op::Fp4Experts, "backend", json!("MARLIN")),
        (Op::Fp4Experts, "intermediate_size", json!(40)),
        (Op::Fp8Requantize, "requantize", json!("nearest")),
        (Op::NormalizeFnuz, "size_n", json!(0)),
        (Op::LoadWeightsMxfp4, "intermediate_size", json!(33)),
        (Op::LoadWeightsMxfp4, "gate_up", json!("up")),
        (Op::ScaledFp4Quant, "size_k", json!(24)),
        (Op::ScaledFp4Mm, "logical_widths", json!([7])),
        (Op::ScaledMm, "size_k", json!(33)),
        (Op::PerTokenGroupQuant, "size_k", json!(100)),
        (Op::PerTokenGroupQuant, "scale_layout", json!("column")),
        (Op::StaticFp8Quant, "per_token", json!("row")),
        (Op::DynamicMxfp4Quant, "size_k", json!(48)),
        (Op::DynamicMxfp4Quant, "scale_rounding", json!("nearest")),
        (Op::RequantUe8m0, "weight_block_size", json!([128])),
        (Op::E2m1Int8Linear, "size_k", json!(48)),
        (Op::E2m1Int8Linear, "dtype", json!("float16")),
        (Op::E2m1Int8Moe, "top_k", json!(99)),
        (Op::E2m1Int8Moe, "intermediate_size", json!(40)),
        (Op::E2m1Int8Moe, "activation", json!("gelu")),
        (Op::Fp8Moe, "top_k", json!(99)),
        (Op::Fp8Moe, "activation", json!("tanh")),
    ] {
        let case = Generator::new(op, 1).unwrap().case(0).unwrap();
        let error = with_key(&case, key, value.clone()).expect_err(key).to_string();
        assert!(error.contains(&format!("`{key}`")), "{op} {key} {value}: {error}");
        assert!(error.contains(value.to_string().trim_matches(['[', ']'])), "{error}");
    }
}

/// Invalid inputs give an error with name and place.
#[test]
fn inputs_are_refused_by_name() {
    use marlinspike::num::tensor::{DType, Tensor};
    let bad = |op: Op, name: &str, byte: &[u8]| {
        let generator = Generator::new(op, 1).unwrap();
        // The first case whose tensor has elements of this width: scales are f32 or UE8M0.
        let has = |case: &Case<'_>| {
            case.inputs.get(name).is_some_and(|t| t.dtype().bytes() == byte.len())
        };
        let mut cases = (0..20).map(|index| generator.case(index).unwrap());
        let mut case = cases.find(has).unwrap_or_else(|| panic!("{op} {name}"));
        let tensor = case.inputs[name].clone();
        let mut bytes = tensor.bytes().to_vec();
        bytes[..byte.len()].copy_from_slice(byte);
        case.add_input(
            name,
            Tensor::new("", tensor.dtype(), tensor.shape().to_vec(), bytes).unwrap(),
        );
        case.validate().expect_err(name)
    };
    let (nan, zero) = (f32::NAN.to_le_bytes(), [0; 4]);
    for (op, name, bytes) in [
        (Op::Fp4Experts, "w13_weight_scale_2", &zero[..]),
        (Op::Fp4Experts, "w2_input_scale", &nan),
        (Op::Fp8Requantize, "w13_weight_scale", &nan),
        (Op::ScaledFp4Quant, "input_global_scale", &zero),
        (Op::ScaledFp4Mm, "weight_scale", &[0x7f]),
        (Op::ScaledFp4Mm, "a_scale", &[0x80]),
        (Op::ScaledMm, "a_scales", &nan),
        (Op::Fp8Moe, "topk_ids", &[9, 0, 0, 0]),
        (Op::Fp8Moe, "w2_weight_scale", &nan),
    ] {
        let error = bad(op, name, bytes);
        assert!(matches!(&error, marlinspike::Error::Value { .. }), "{op} {name}: {error}");
        assert!(error.to_string().contains(&format!("`in.{name}`")), "{op} {name}: {error}");
    }
    let mut case = Generator::new(Op::SwizzleBlockscale, 1).unwrap().case(0).unwrap();
    case.add_input("scales", Tensor::new("", DType::U8, vec![1], vec![0]).unwrap());
    let error = case.validate().unwrap_err();
    assert!(matches!(&error, marlinspike::Error::Unknown { tensor, .. } if tensor == "in.scales"));
}

/// The check gives a verdict on arbitrary outputs.
#[test]
fn any_output_is_judged() {
    use marlinspike::num::tensor::Tensor;
    for op in [Op::ScaledFp4Quant, Op::ScaledFp4Mm, Op::ScaledMm, Op::Fp8Moe] {
        let generator = Generator::new(op, 5).unwrap();
        let bytes = [0xff, 0x7f, 0x80, 0x00, 0xfe, 0x7c];
        // A plain `cargo test` takes every third.
        for (index, byte) in (0..6).zip(bytes).step_by(Tier::current().pick(3, 1, 1)) {
            let mut case = generator.case(index).unwrap();
            for (name, tensor) in case.outputs.clone() {
                let bytes = vec![byte; tensor.bytes().len()];
                let tensor = Tensor::new("", tensor.dtype(), tensor.shape().to_vec(), bytes);
                case.add_output(&name, tensor.unwrap());
            }
            let report = check_case(&case).unwrap();
            assert_eq!(report.verdict, Verdict::Fail, "{}", case.name);
            // Each stage without the previous one.
            for name in case.outputs.keys().cloned().collect::<Vec<_>>() {
                let mut alone = case.clone();
                alone.outputs.retain(|n, _| *n == name);
                let report = check_case(&alone).unwrap();
                assert_eq!(report.outputs.len(), 1, "{}: {name}", case.name);
                assert_ne!(report.verdict, Verdict::Pass, "{}: {name}", case.name);
            }
        }
    }
}

/// Padding that is not zero is diagnosed as such.
#[test]
fn padding_is_named() {
    use marlinspike::num::tensor::Tensor;
    let generator = Generator::new(Op::SwizzleBlockscale, 3).unwrap();
    let mut padded = 0;
    for index in 0..20 {
        let mut case = generator.case(index).unwrap();
        let found = case.outputs["swizzled_scale"].clone();
        let mut bytes = found.bytes().to_vec();
        // The last element is padding if the matrix does not fill its tiles.
        let last = bytes.len() - 1;
        bytes[last] ^= 0xff;
        let tensor = Tensor::new("", found.dtype(), found.shape().to_vec(), bytes).unwrap();
        case.add_output("swizzled_scale", tensor);
        let report = check_case(&case).unwrap();
        let diagnosis = report.outputs[0].diagnosis.as_ref().unwrap();
        let filled = case.inputs["scale"].len() == found.len();
        assert_eq!(diagnosis.id == "padding-not-zero", !filled, "{}: {diagnosis:?}", case.name);
        padded += usize::from(!filled);
    }
    assert!(padded > 10);
}

/// Codes of a kernel whose reciprocals are one unit off are accepted with a note; codes further off
/// are rejected.
#[test]
fn a_gpus_reciprocals_are_accepted() {
    use marlinspike::num::scalar::{ScalarType, e4m3fn_to_f32};
    use marlinspike::num::tensor::Tensor;
    let generator = Generator::new(Op::ScaledFp4Quant, 9).unwrap();
    let mut accepted = 0;
    for index in 0..60 {
        let mut case = generator.case(index).unwrap();
        if case.config.to_json()["is_sf_swizzled_layout"] == true {
            continue;
        }
        let dtype = if case.config.to_json()["dtype"] == "float16" {
            ScalarType::FLOAT16
        } else {
            ScalarType::BFLOAT16
        };
        let x = case.inputs["x"].elements::<u16>().into_owned();
        let global = case.inputs["input_global_scale"].elements::<f32>()[0];
        let scales = case.outputs["x_scale"].bytes().to_vec();
        let found = case.outputs["x_fp4"].clone();
        let code = |(i, &bits): (usize, &u16)| {
            let scale = e4m3fn_to_f32(scales[i / 16]);
            let right = found.bytes()[i / 2] >> (4 * (i % 2)) & 15;
            if scale == 0.0 {
                return right;
            }
            let argument = scale * (1.0 / global);
            let eighths = argument.to_bits() & 0xfffff == 0;
            let factor = 1.0 / argument;
            let factor = if eighths { factor } else { factor.next_up() };
            let value = dtype.to_f64(bits.into()) as f32 * factor;
            ScalarType::FLOAT4_E2M1F.encode_rne_saturating(value.into()) as u8
        };
        let codes: Vec<u8> = x.iter().enumerate().map(code).collect();
        let bytes: Vec<u8> = codes.chunks_exact(2).map(|p| p[0] | p[1] << 4).collect();
        let differs = bytes != found.bytes();
        let tensor = |bytes| Tensor::new("", found.dtype(), found.shape().to_vec(), bytes).unwrap();
        case.add_output("x_fp4", tensor(bytes.clone()));
        let CaseConfig::ScaledFp4Quant(c) = &mut case.config else { panic!() };
        c.reciprocal = Some(Reciprocal::Approximate);
        let report = check_case(&case).unwrap();
        assert_eq!(report.verdict, Verdict::Pass, "{}", case.name);
        let note = report.outputs[0].note.as_deref().unwrap_or_default();
        assert_eq!(note.contains("rcp.approx"), differs, "{note}");
        accepted += usize::from(differs);
        let Some(first) = scales.iter().position(|&s| s > 8) else { continue };
        let mut wrong = bytes;
        wrong[first * 8] ^= 0x44;
        case.add_output("x_fp4", tensor(wrong));
        assert_eq!(check_case(&case).unwrap().verdict, Verdict::Fail, "{}", case.name);
    }
    assert!(accepted > 0);
}
