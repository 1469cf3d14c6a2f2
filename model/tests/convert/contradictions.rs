//! Files that contradict their config: every command refuses the layer by the tensor of the file.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::common::runs::{EXECUTION, run_with, settings};
use crate::common::{Format, write_model, write_tiny};
use marlinspike::container::{Container, write_container};
use marlinspike::num::dims::Shape;
use marlinspike::num::scalar::ScalarType;
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike_model::convert::settings::Settings;
use marlinspike_model::inspect;
use marlinspike_model::run::options::Options;
use marlinspike_model::run::{left_out, list, run};
use serde_json::{Value, json};
use tempfile::TempDir;

const MODULE: &str = "model.layers.0.self_attn.q_proj";
const OTHER: &str = "model.layers.1.self_attn.q_proj";

/// Every tensor of the folder, as one file without an index.
fn edit(dir: &Path, change: impl Fn(&mut Vec<Tensor<'static>>)) {
    let mut tensors = Vec::new();
    for i in 1..=2 {
        let path = dir.join(format!("model-{i:05}-of-00002.safetensors"));
        let bytes = fs::read(&path).unwrap();
        tensors
            .extend(Container::parse(&bytes).unwrap().tensors().map(|t| t.unwrap().into_owned()));
        fs::remove_file(path).unwrap();
    }
    fs::remove_file(dir.join("model.safetensors.index.json")).unwrap();
    change(&mut tensors);
    let bytes = write_container(&tensors, &BTreeMap::new(), Vec::new()).unwrap();
    fs::write(dir.join("model.safetensors"), bytes).unwrap();
}

/// Changes the config.
fn configure(dir: &Path, change: impl Fn(&mut Value)) {
    let path = dir.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut config);
    fs::write(path, config.to_string()).unwrap();
}

/// A folder with two layers, changed.
fn folder(format: Format, change: impl Fn(&mut Vec<Tensor<'static>>)) -> TempDir {
    let temp = tempfile::tempdir().unwrap();
    write_tiny(format, temp.path(), 2);
    edit(temp.path(), change);
    temp
}

fn tensor(name: &str, dtype: DType, shape: &[usize], bytes: Vec<u8>) -> Tensor<'static> {
    Tensor::new(format!("{MODULE}.{name}"), dtype, shape.to_vec(), bytes).unwrap()
}

fn words(name: &str, shape: &[usize], words: Vec<u32>) -> Tensor<'static> {
    tensor(name, DType::I32, shape, words.iter().flat_map(|w| w.to_le_bytes()).collect())
}

fn convert(model: &Path, settings: &Settings) -> Result<(), String> {
    let out = tempfile::tempdir().unwrap();
    run_with(model, &out.path().join("out"), settings, EXECUTION)
        .map(|_| ())
        .map_err(|e| e.to_string())
}

fn options(layer: Option<&str>) -> Options {
    let mut options = Options::default();
    options.layer = layer.map(str::to_owned);
    options.check = true;
    options
}

/// Every command refuses [`MODULE`] with `parts`, and takes the other layer.
fn expect_refused(dir: &Path, parts: &[&str]) {
    let has = |text: &str, what: &str| {
        for part in parts {
            assert!(text.contains(part), "{what}: {part:?} is not in {text}");
        }
    };
    let inspection = inspect(dir, &Default::default()).unwrap();
    let own = inspection.layers.iter().find(|l| l.module == MODULE);
    let reasons = match own {
        Some(layer) => {
            assert_eq!(layer.chosen, None);
            assert!(inspection.verdicts.iter().all(|v| v.taken() < inspection.layers.len()));
            layer.reasons.join("; ")
        }
        None => inspection.refused[MODULE].join("; "),
    };
    has(&reasons, "inspect");
    has(&convert(dir, &settings()).unwrap_err(), "convert");
    convert(dir, &Settings { skip_unsupported: true, ..settings() }).unwrap();
    has(&run(dir, &options(Some(MODULE))).unwrap_err().to_string(), "run --layer");
    // The first layer is the one that runs by default, refused or not.
    has(&run(dir, &options(None)).unwrap_err().to_string(), "run");
    assert!(run(dir, &options(Some(OTHER))).unwrap().is_equal());
    assert_eq!(list(dir, None).unwrap(), [OTHER]);
    let left = left_out(dir, None).unwrap();
    assert_eq!(left.len(), 1);
    assert_eq!(left[0].module, MODULE);
    has(&left[0].reasons.join("; "), "run --list");
}

fn expect_taken(dir: &Path) {
    let inspection = inspect(dir, &Default::default()).unwrap();
    assert!(inspection.layers.iter().all(|l| l.reasons.is_empty()), "{:?}", inspection.layers);
    assert!(inspection.refused.is_empty());
    convert(dir, &settings()).unwrap();
    assert!(run(dir, &options(None)).unwrap().is_equal());
    assert!(left_out(dir, None).unwrap().is_empty());
}

#[test]
fn a_tensor_that_nothing_reads_refuses_its_layer_in_every_format() {
    // The small layers have fewer rows than a block of FP8; 8 bits need --arithmetic to run.
    let others = [Format::Fp8Block, Format::Gptq8Channel];
    for format in Format::ALL.into_iter().filter(|f| !others.contains(f)) {
        for name in ["pre_quant_scale", "input_quantizer._pre_quant_scale", "surprise"] {
            let temp = folder(format, |t| {
                t.push(tensor(name, DType::BF16, &[128], vec![0x3f; 256]));
            });
            expect_refused(
                temp.path(),
                &[&format!("tensor `{MODULE}.{name}`"), "does not read it"],
            );
        }
        expect_taken(folder(format, |_| ()).path());
        let cache = |t: &mut Vec<_>| t.push(tensor("k_scale", DType::F32, &[], vec![0; 4]));
        expect_taken(folder(format, cache).path());
    }
}

/// K 128 in groups of 128, N 64: one row of 8 words.
#[test]
fn zero_points_of_symmetric_codes_must_be_the_middle() {
    for (stored, value, taken) in [("gptq", 7u32, true), ("gptq", 8, false), ("gptq_v2", 8, true)] {
        let temp = folder(Format::Gptq4, |t| {
            t.retain(|t| !t.name().ends_with(".qzeros"));
            let zeros = |zero: u32| words("qzeros", &[1, 8], vec![zero * 0x1111_1111; 8]);
            t.push(zeros(value));
            let middle = if stored == "gptq" { 7 } else { 8 };
            t.push(zeros(middle).renamed(format!("{OTHER}.qzeros")));
        });
        let (bytes, middle) = (temp.path(), if stored == "gptq" { 7 } else { 8 });
        configure(bytes, |c| {
            c["quantization_config"]["checkpoint_format"] = json!(stored);
        });
        match taken {
            true => expect_taken(bytes),
            false => expect_refused(
                bytes,
                &[&format!("{MODULE}.qzeros"), &format!("point {value}"), &format!("is {middle} ")],
            ),
        }
    }
    // One field of one word, low or high in its byte.
    for (field, zero) in [(0, 5u32), (7, 9), (3, 0)] {
        let temp = folder(Format::Gptq4, |t| {
            t.retain(|t| t.name() != format!("{MODULE}.qzeros"));
            let mut row = vec![0x7777_7777u32; 8];
            row[5] = row[5] & !(15 << (4 * field)) | zero << (4 * field);
            t.push(words("qzeros", &[1, 8], row));
        });
        expect_refused(temp.path(), &[&format!("{MODULE}.qzeros"), &format!("point {zero},")]);
    }
    // compressed-tensors packs zero points with an offset.
    for (value, taken) in [(8u32, true), (7, false)] {
        let temp = folder(Format::CtPack, |t| {
            t.push(words("weight_zero_point", &[8, 2], vec![value * 0x1111_1111; 16]));
        });
        match taken {
            true => expect_taken(temp.path()),
            false => expect_refused(temp.path(), &[&format!("{MODULE}.weight_zero_point")]),
        }
    }
}

#[test]
fn groups_without_act_order_must_be_the_rows_in_order() {
    let groups = |g: &dyn Fn(u32) -> u32| {
        folder(Format::CtPack, |t| {
            t.push(words("weight_g_idx", &[128], (0..128).map(g).collect()));
        })
    };
    expect_taken(groups(&|k| k / 64).path());
    expect_taken(groups(&|_| u32::MAX).path());
    let name = format!("{MODULE}.weight_g_idx");
    expect_refused(
        groups(&|k| if k == 70 { 0 } else { k / 64 }).path(),
        &[&name, "group 0 for row 70"],
    );
    expect_refused(groups(&|k| 1 - k / 64).path(), &[&name, "group 1 for row 0"]);
}

#[test]
fn rotations_at_run_time_refuse_their_targets_alone() {
    let rotated = |location: &str, target: &str, ignore: Value| {
        let temp = folder(Format::CtPack, |_| ());
        configure(temp.path(), |c| {
            c["quantization_config"]["transform_config"] = json!({"config_groups": {"R4": {
                "type": "hadamard", "head_dim": 32,
                "apply": [{"targets": [target], "location": location, "ignore": ignore}]}}});
        });
        temp
    };
    for (location, target, ignore) in [
        ("input", "re:.*layers.0.*q_proj$", json!([])),
        ("output", MODULE, json!([])),
        ("input", "Linear", json!([OTHER, "lm_head"])),
    ] {
        let temp = rotated(location, target, ignore);
        expect_refused(temp.path(), &[MODULE, "hadamard of its", location, "config_groups.R4"]);
    }
    expect_taken(rotated("weight_input", "Linear", json!([])).path());
    expect_taken(rotated("input", "Linear", json!(["re:.*proj"])).path());
    let unknown = rotated("sideways", "Linear", json!([]));
    let error = inspect(unknown.path(), &Default::default()).unwrap_err().to_string();
    assert!(error.contains("apply[0].location") && error.contains("sideways"), "{error}");
}

#[test]
fn scales_that_a_kernel_cannot_hold_are_counted() {
    // The bits of a bf16 scale, for one column of q_proj.
    let scaled = |format, name: &'static str, bits: u16| {
        folder(format, move |tensors| {
            for t in tensors.iter_mut().filter(|t| t.name() == format!("{MODULE}.{name}")) {
                let mut bytes = t.bytes().to_vec();
                bytes[..2].copy_from_slice(&bits.to_le_bytes());
                *t =
                    Tensor::new(t.name().to_owned(), t.dtype(), t.shape().to_vec(), bytes).unwrap();
            }
        })
    };
    let half = Settings { dtype: ScalarType::FLOAT16, ..settings() };
    let allowed = Settings { allow_underflow: true, ..half.clone() };
    // 2^-40 is 0 in float16; 300 · 2^8, with the exponent bias of FP8, is infinite there.
    let tiny = scaled(Format::Gptq4, "scales", (127 - 40) << 7);
    let error = convert(tiny.path(), &half).unwrap_err();
    for part in [MODULE, "scales", "1 of 64", "become 0", "float16", "--allow-underflow"] {
        assert!(error.contains(part), "{part:?} is not in {error}");
    }
    convert(tiny.path(), &settings()).unwrap();
    convert(tiny.path(), &allowed).unwrap();
    let huge = scaled(Format::Fp8Channel, "weight_scale", 0x4396);
    for settings in [&half, &allowed] {
        let error = convert(huge.path(), settings).unwrap_err();
        assert!(error.contains("1 of 64 that become infinite"), "{error}");
    }
    // So are they in bfloat16, where the bias is 2^120.
    assert!(convert(huge.path(), &settings()).unwrap_err().contains("infinite"));
    let largest = scaled(Format::Fp8Channel, "weight_scale", 0x437f);
    convert(largest.path(), &settings()).unwrap();
    let out = tempfile::tempdir().unwrap();
    run_with(tiny.path(), &out.path().join("out"), &allowed, EXECUTION).unwrap();
    let manifest = fs::read(out.path().join("out/marlinspike-manifest.json")).unwrap();
    let manifest: Value = serde_json::from_slice(&manifest).unwrap();
    assert_eq!(manifest["options"]["allow_underflow"], true, "{manifest:#}");
}

#[test]
fn an_fp8_code_that_is_not_a_number_is_named_by_its_place() {
    for code in [0x7f, 0xff] {
        let temp = folder(Format::Fp8Channel, |tensors| {
            for t in tensors.iter_mut().filter(|t| t.name() == format!("{OTHER}.weight")) {
                let mut bytes = t.bytes().to_vec();
                bytes[17 * 128 + 99] = code;
                *t =
                    Tensor::new(t.name().to_owned(), t.dtype(), t.shape().to_vec(), bytes).unwrap();
            }
        });
        let place = format!("tensor `{OTHER}.weight` at [17, 99]: found NaN");
        let error = run(temp.path(), &options(Some(OTHER))).unwrap_err().to_string();
        assert!(error.contains(&place), "{error}");
        let error = convert(temp.path(), &settings()).unwrap_err();
        assert!(error.contains(&place), "{error}");
    }
}

#[test]
fn the_first_layer_of_an_unknown_family_is_its_experts() {
    let temp = tempfile::tempdir().unwrap();
    for change in [Value::Null, json!("no_such_family")] {
        write_model(Format::CtPack, temp.path());
        configure(temp.path(), |c| c["model_type"] = change.clone());
        let experts = "model.layers.0.mlp.experts";
        let error = run(temp.path(), &options(None)).unwrap_err().to_string();
        assert!(error.contains(experts), "{error}");
        let left = left_out(temp.path(), None).unwrap();
        assert_eq!(left.iter().map(|r| r.module.as_str()).collect::<Vec<_>>(), [experts]);
        assert!(!list(temp.path(), None).unwrap().contains(&experts.to_owned()));
        let linear = options(Some("model.layers.0.self_attn.k_proj"));
        assert!(run(temp.path(), &linear).unwrap().is_equal());
    }
}

#[test]
fn a_merged_layer_is_refused_with_any_of_its_parts() {
    let temp = tempfile::tempdir().unwrap();
    let parts = ["q_proj", "k_proj", "v_proj"].map(|p| format!("model.layers.0.self_attn.{p}"));
    let settings = Settings { merge_projections: true, ..settings() };
    for surprise in [false, true] {
        let mut tensors = Vec::new();
        for part in &parts {
            let weight = Format::Gptq4.weight(part, part, Shape::new(128, 64));
            tensors.extend(Format::Gptq4.tensors(&weight));
        }
        let name = format!("{}.pre_quant_scale", parts[1]);
        let scale = Tensor::from_vec(name, DType::BF16, vec![128], vec![0x3f80u16; 128]).unwrap();
        tensors.extend(surprise.then_some(scale));
        let bytes = write_container(&tensors, &BTreeMap::new(), Vec::new()).unwrap();
        fs::write(temp.path().join("model.safetensors"), bytes).unwrap();
        let config =
            json!({"dtype": "bfloat16", "quantization_config": Format::Gptq4.quant_config()});
        fs::write(temp.path().join("config.json"), config.to_string()).unwrap();
        match convert(temp.path(), &settings) {
            Ok(()) => assert!(!surprise),
            Err(error) => {
                assert!(surprise, "{error}");
                assert!(error.contains("qkv_proj"), "{error}");
                assert!(error.contains("k_proj.pre_quant_scale"), "{error}");
            }
        }
    }
}
