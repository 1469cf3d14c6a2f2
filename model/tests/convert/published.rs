//! Forms of published checkpoints that are valid: each reads as the plain form of the same numbers.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::common::runs::{EXECUTION, run_with, settings};
use crate::common::{Converted, Format, Noise};
use marlinspike::container::write_container;
use marlinspike::num::dims::Shape;
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike_model::convert::settings::Settings;
use marlinspike_model::inspect;
use marlinspike_model::run::options::{Activations, Options};
use marlinspike_model::run::run;
use serde_json::{Value, json};

const MODULE: &str = "model.layers.0.mlp.down_proj";

fn write(dir: &Path, name: &str, tensors: &[Tensor<'static>]) {
    fs::create_dir_all(dir).unwrap();
    let bytes = write_container(tensors, &BTreeMap::new(), Vec::new()).unwrap();
    fs::write(dir.join(name), bytes).unwrap();
}

fn folder(dir: &Path, quantization: &Value, tensors: &[Tensor<'static>]) {
    write(dir, "model.safetensors", tensors);
    let config = json!({"model_type": "llama", "dtype": "bfloat16",
        "quantization_config": quantization});
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
}

/// The tensors of the converted layer.
fn converted(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let out = tempfile::tempdir().unwrap();
    run_with(dir, &out.path().join("out"), &settings(), EXECUTION).unwrap();
    let tensors = Converted::read(&out.path().join("out")).tensors;
    let own = tensors.into_iter().filter(|(name, _)| name.starts_with(MODULE));
    own.map(|(name, t)| (name, t.bytes().to_vec())).collect()
}

fn options(layer: Option<&str>) -> Options {
    let mut options = Options::default();
    options.layer = layer.map(str::to_owned);
    options.check = true;
    options
}

/// FP8 codes of a `[256, 256]` matrix, and scales of its four blocks.
fn fp8() -> (Tensor<'static>, Vec<f32>) {
    let mut noise = Noise::new("published");
    let codes: Vec<u8> = (0..256 * 256).map(|_| noise.next() as u8 & 0xbf).collect();
    let scales = (0..4).map(|i| 0.5 + i as f32).collect();
    (
        Tensor::from_vec(format!("{MODULE}.weight"), DType::F8E4M3, vec![256, 256], codes).unwrap(),
        scales,
    )
}

#[test]
fn scales_of_blocks_with_unit_axes_are_those_without() {
    let temp = tempfile::tempdir().unwrap();
    let (weight, scales) = fp8();
    let config = json!({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO", "ignore": []});
    let with = |name: &str, shape: &[usize], scales: &[f32]| {
        let (dir, scale) = (temp.path().join(name), format!("{MODULE}.weight_scale"));
        let scale = Tensor::from_vec(scale, DType::F32, shape.to_vec(), scales.to_vec()).unwrap();
        folder(&dir, &config, &[weight.clone(), scale]);
        dir
    };
    let plain = with("plain", &[2, 2], &scales);
    let unit = with("unit", &[2, 1, 2, 1], &scales);
    assert_eq!(converted(&plain), converted(&unit));
    assert!(run(&unit, &options(None)).unwrap().is_equal());
    // Other scales are another matrix, and other shapes are refused.
    let turned = with("turned", &[2, 1, 2, 1], &[scales[0], scales[2], scales[1], scales[3]]);
    assert_ne!(converted(&plain), converted(&turned));
    let odd = with("odd", &[1, 2, 1, 2], &scales);
    assert!(run(&odd, &options(None)).unwrap_err().to_string().contains("weight_scale"));
}

#[test]
fn the_index_says_which_shard_holds_a_tensor() {
    let temp = tempfile::tempdir().unwrap();
    let tensors = |seed: &str| {
        let weight = Format::CtPack.weight(MODULE, seed, Shape::new(128, 64));
        let mut weight = weight;
        let mut noise = Noise::new(seed);
        let words = (0..128 * 64 / 8).map(|_| noise.next()).collect::<Vec<u32>>();
        weight.codes =
            marlinspike::weight::Codes::from_words(4, Shape::new(128, 64), words).unwrap();
        Format::CtPack.tensors(&weight)
    };
    let (old, new) = (tensors("old"), tensors("new"));
    let config = Format::CtPack.quant_config();
    let (alone, both) = (temp.path().join("alone"), temp.path().join("both"));
    folder(&alone, &config, &new);
    folder(&both, &config, &old);
    write(&both, "overlay.safetensors", &new);
    let mut stale = Tensor::from_vec("stale.weight", DType::F32, vec![1], vec![0f32]).unwrap();
    stale = stale.renamed(format!("{MODULE}.pre_quant_scale"));
    write(&both, "unindexed.safetensors", &[stale]);
    let map: BTreeMap<String, &str> =
        new.iter().map(|t| (t.name().to_owned(), "overlay.safetensors")).collect();
    let index = |map: &BTreeMap<String, &str>| {
        let text = json!({"weight_map": map}).to_string();
        fs::write(both.join("model.safetensors.index.json"), text).unwrap();
    };
    index(&map);
    assert_eq!(converted(&both), converted(&alone));
    let mut old_codes = map.clone();
    old_codes.insert(format!("{MODULE}.weight_packed"), "model.safetensors");
    index(&old_codes);
    assert_ne!(converted(&both), converted(&alone));
}

#[test]
fn bare_numbers_of_a_config_are_read_and_written_as_they_were() {
    let temp = tempfile::tempdir().unwrap();
    let (dir, out) = (temp.path().join("model"), temp.path().join("out"));
    let weight = Format::CtPack.weight(MODULE, MODULE, Shape::new(128, 64));
    folder(&dir, &Format::CtPack.quant_config(), &Format::CtPack.tensors(&weight));
    let text = fs::read_to_string(dir.join("config.json")).unwrap();
    let text = text.replacen('{', r#"{"time_step_limit": [0.0, Infinity], "eps": NaN, "#, 1);
    fs::write(dir.join("config.json"), text).unwrap();
    assert_eq!(inspect(&dir, &Default::default()).unwrap().layers.len(), 1);
    run_with(&dir, &out, &settings(), EXECUTION).unwrap();
    let text = fs::read_to_string(out.join("config.json")).unwrap();
    let words: String = text.split_whitespace().collect();
    assert!(words.contains(r#""time_step_limit":[0.0,Infinity]"#), "{text}");
    assert!(words.contains(r#""eps":NaN"#), "{text}");
}

#[test]
fn static_scales_of_activations_have_two_names() {
    let temp = tempfile::tempdir().unwrap();
    let (weight, _) = fp8();
    let config = json!({"quant_method": "fp8", "activation_scheme": "static"});
    let with = |name: &str, value: f32| {
        let dir = temp.path().join(format!("{name}-{value}"));
        let one = |name: &str, value: f32| {
            Tensor::from_vec(format!("{MODULE}.{name}"), DType::F32, vec![], vec![value]).unwrap()
        };
        let tensors = [weight.clone(), one("weight_scale_inv", 0.25), one(name, value)];
        folder(&dir, &config, &tensors);
        let run = run(&dir, &options(None)).unwrap();
        assert!(run.is_equal());
        run.outputs.last().unwrap().bytes.clone()
    };
    assert_eq!(with("input_scale", 0.01), with("activation_scale", 0.01));
    assert_ne!(with("input_scale", 0.01), with("activation_scale", 0.001));
}

#[test]
fn a_quantized_head_is_refused_alone() {
    let temp = tempfile::tempdir().unwrap();
    let (dir, out) = (temp.path().join("model"), temp.path().join("out"));
    let mut tensors = Vec::new();
    for name in ["lm_head", MODULE] {
        let weight = Format::CtPack.weight(name, name, Shape::new(128, 64));
        tensors.extend(Format::CtPack.tensors(&weight));
    }
    folder(&dir, &Format::CtPack.quant_config(), &tensors);
    let found = inspect(&dir, &Default::default()).unwrap();
    assert_eq!(found.layers.len(), 1);
    assert!(found.refused["lm_head"][0].contains("ignore list"), "{:?}", found.refused);
    let error = run_with(&dir, &out, &settings(), EXECUTION).unwrap_err().to_string();
    assert!(error.contains("`lm_head`: its tensors are quantized"), "{error}");
    let skip = Settings { skip_unsupported: true, ..settings() };
    run_with(&dir, &out, &skip, EXECUTION).unwrap();
    let written = Converted::read(&out);
    for tensor in tensors.iter().filter(|t| t.name().starts_with("lm_head")) {
        assert_eq!(written.tensors[tensor.name()].bytes(), tensor.bytes());
    }
    assert!(run(&dir, &options(None)).unwrap().is_equal());
    let error = run(&dir, &options(Some("lm_head"))).unwrap_err().to_string();
    assert!(error.contains("lm_head"), "{error}");
}

#[test]
fn sixteen_bit_activations_take_integers_off_the_int4_path() {
    let temp = tempfile::tempdir().unwrap();
    let eight = Format::Gptq8Channel.weight(MODULE, MODULE, Shape::new(128, 64));
    folder(
        temp.path(),
        &Format::Gptq8Channel.quant_config(),
        &Format::Gptq8Channel.tensors(&eight),
    );
    let error = run(temp.path(), &options(None)).unwrap_err().to_string();
    assert!(error.contains("weights of 8 bits"), "{error}");
    let mut sixteen = options(None);
    sixteen.method.activations = Activations::SixteenBit;
    let found = run(temp.path(), &sixteen).unwrap();
    assert!(found.is_equal() && found.method.is_some());
    let four = Format::CtPack.weight(MODULE, MODULE, Shape::new(128, 64));
    folder(temp.path(), &Format::CtPack.quant_config(), &Format::CtPack.tensors(&four));
    assert!(run(temp.path(), &options(None)).unwrap().method.is_none());
    assert!(run(temp.path(), &sixteen).unwrap().method.is_some());
}

/// Writes two experts of one layer; `of` gives the tensors of a matrix.
fn experts(dir: &Path, quantization: &Value, of: &dyn Fn(&str, Shape) -> Vec<Tensor<'static>>) {
    let mut tensors = Vec::new();
    for e in 0..2 {
        for name in ["gate_proj", "up_proj", "down_proj"] {
            let module = format!("model.layers.0.mlp.experts.{e}.{name}");
            tensors.extend(of(&module, Shape::new(256, 256)));
        }
    }
    write(dir, "model.safetensors", &tensors);
    let config = json!({"model_type": "qwen3_moe", "dtype": "bfloat16", "num_experts": 2,
        "num_experts_per_tok": 1, "norm_topk_prob": true, "quantization_config": quantization});
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
}

/// The bytes of y in 16-bit activations, exactly.
fn exact(dir: &Path) -> Vec<u8> {
    let mut options = options(None);
    options.method.activations = Activations::SixteenBit;
    let run = run(dir, &options).unwrap();
    assert!(run.is_equal());
    run.outputs.last().unwrap().bytes.clone()
}

#[test]
fn asymmetric_experts_with_middle_zero_points_are_symmetric_ones() {
    let temp = tempfile::tempdir().unwrap();
    let with = |name: &str, symmetric: bool, zero: u32| {
        let dir = temp.path().join(name);
        let mut quantization = Format::CtPack.quant_config();
        quantization["config_groups"]["group_0"]["weights"]["symmetric"] = json!(symmetric);
        experts(&dir, &quantization, &|module, shape| {
            let mut tensors = Format::CtPack.tensors(&Format::CtPack.weight(module, module, shape));
            let words = vec![zero * 0x1111_1111; 256 / 8 * 256 / 64];
            let name = format!("{module}.weight_zero_point");
            let zeros = Tensor::from_vec(name, DType::I32, vec![32, 4], words).unwrap();
            tensors.extend((!symmetric).then_some(zeros));
            tensors
        });
        exact(&dir)
    };
    let symmetric = with("symmetric", true, 8);
    assert!(with("middle", false, 8) == symmetric);
    assert!(with("other", false, 7) != symmetric);
}

#[test]
fn experts_with_blocks_of_any_size_convert() {
    let temp = tempfile::tempdir().unwrap();
    for [block_n, block_k] in [[64, 128], [128, 64], [128, 128]] {
        let (dir, out) = (temp.path().join("model"), tempfile::tempdir().unwrap());
        let quantization = json!({"quant_method": "fp8", "activation_scheme": "dynamic",
            "weight_block_size": [block_n, block_k]});
        experts(&dir, &quantization, &|module, shape| {
            let mut noise = Noise::new(module);
            let codes = (0..shape.size_n * shape.size_k).map(|_| noise.next() as u8 & 0xb7);
            let codes = codes.collect::<Vec<u8>>();
            let [n, k] = [shape.size_n / block_n, shape.size_k / block_k];
            // Powers of two are scales of every type.
            let scales = (0..n * k).map(|_| 2f32.powi((noise.next() % 5) as i32 - 6)).collect();
            let weight = Tensor::from_vec(
                format!("{module}.weight"),
                DType::F8E4M3,
                vec![shape.size_n, shape.size_k],
                codes,
            );
            let name = format!("{module}.weight_scale_inv");
            let scale = Tensor::from_vec::<f32>(name, DType::F32, vec![n, k], scales);
            vec![weight.unwrap(), scale.unwrap()]
        });
        run_with(&dir, &out.path().join("out"), &settings(), EXECUTION).unwrap();
        // The files have no router: both runs have the same logits of the seed.
        assert!(exact(&out.path().join("out")) == exact(&dir), "{block_n} x {block_k}");
    }
}
