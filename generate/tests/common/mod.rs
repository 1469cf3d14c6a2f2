//! The golden models, also as float checkpoints and as converted folders.
#![allow(dead_code, unreachable_pub)]

use std::path::{Path, PathBuf};

use marlinspike::container::{Container, write_container};
use marlinspike::num::scalar::bf16_to_f32;
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike_generate::{Cache, Decoder, Input, LogitsOf};
use marlinspike_golden::Manifest;
use marlinspike_model::convert;
use marlinspike_model::convert::settings::Options;
use marlinspike_model::convert::target::int4;
use marlinspike_model::model::{Model, ModelFiles};
use serde_json::Value;
use tempfile::TempDir;

pub const NAMES: [&str; 5] =
    ["qwen3-moe-tiny", "mixtral-tiny", "deepseek-v3-tiny", "deepseek-v2-tiny", "gpt-oss-tiny"];

/// The models whose checkpoint and converted folder meet 8-bit activations.
pub const CONVERTED: [&str; 2] = ["qwen3-moe-tiny", "mixtral-tiny"];

/// MXFP4 weights meet f32 activations in the checkpoint and 8-bit activations in a converted folder.
pub const CONVERTED_MXFP4: &str = "gpt-oss-tiny";

/// The golden model of this name.
pub fn golden(name: &str) -> PathBuf {
    let manifest = Manifest::load().unwrap();
    let model = manifest.models().iter().find(|m| m.name == name).unwrap();
    manifest.path(&model.dir)
}

/// What the producer expects of a model.
pub struct Expected {
    pub input_ids: Vec<u32>,
    pub new_tokens: Vec<u32>,
    pub logits: Vec<f32>,
    pub logits_int8: Vec<f32>,
}

impl Expected {
    pub fn read(name: &str) -> Self {
        let manifest = Manifest::load().unwrap();
        let model = manifest.models().iter().find(|m| m.name == name).unwrap();
        let bytes = std::fs::read(manifest.path(&model.expected[0].path)).unwrap();
        let file = Container::parse(&bytes).unwrap();
        let ids = |name: &str| -> Vec<u32> {
            let tensor = file.tensor(name).unwrap();
            tensor.elements::<i32>().iter().map(|&id| id as u32).collect()
        };
        let floats = |name: &str| file.tensor(name).unwrap().elements::<f32>().into_owned();
        Self {
            input_ids: ids("input_ids"),
            new_tokens: ids("new_tokens"),
            logits: floats("logits"),
            logits_int8: floats("logits_int8"),
        }
    }
}

/// `model.safetensors` of a folder as tensors.
pub fn tensors(folder: &Path) -> Vec<Tensor<'static>> {
    let bytes = std::fs::read(folder.join("model.safetensors")).unwrap();
    let file = Container::parse(&bytes).unwrap();
    file.tensors().map(|tensor| tensor.unwrap().into_owned()).collect()
}

/// A folder of these tensors with this config.
pub fn folder(tensors: &[Tensor<'_>], config: &Value) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let bytes = write_container(tensors, &Default::default(), Vec::new()).unwrap();
    std::fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    dir
}

pub fn config(folder: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(folder.join("config.json")).unwrap()).unwrap()
}

/// The weights of packed 4-bit codes in float32, unpacked one by one.
pub fn dequantized(folder: &Path) -> Vec<Tensor<'static>> {
    let all = tensors(folder);
    let find = |name: String| all.iter().find(|t| t.name() == name).unwrap();
    let mut plain = Vec::new();
    for tensor in &all {
        if let Some(module) = tensor.name().strip_suffix(".weight_packed") {
            let scales = find(format!("{module}.weight_scale"));
            let shape = find(format!("{module}.weight_shape")).elements::<i64>().into_owned();
            let (size_n, size_k) = (shape[0] as usize, shape[1] as usize);
            let (words, scales) = (tensor.elements::<u32>(), scales.elements::<u16>());
            let value = |i: usize| {
                let code = (words[i / 8] >> (4 * (i % 8))) & 15;
                (code as f32 - 8.0) * bf16_to_f32(scales[i / 32])
            };
            let values: Vec<f32> = (0..size_n * size_k).map(value).collect();
            let name = format!("{module}.weight");
            plain.push(Tensor::from_vec(name, DType::F32, vec![size_n, size_k], values).unwrap());
        } else if !tensor.name().contains(".weight_") {
            plain.push(tensor.clone());
        }
    }
    plain
}

/// The golden model with float weights, except for MXFP4, which meets float activations as it is.
pub fn float_model(name: &str) -> TempDir {
    let source = golden(name);
    let mut config = config(&source);
    config.as_object_mut().unwrap().remove("quantization_config");
    folder(&dequantized(&source), &config)
}

/// The golden model converted for the int4 path.
pub fn converted(name: &str) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("packed");
    convert(&golden(name), &out, &Options::new(int4::FORMAT), &()).unwrap();
    dir
}

/// Calls `work` with the decoder of a folder.
pub fn with_decoder<T>(folder: &Path, work: impl FnOnce(&Decoder<'_>) -> T) -> T {
    let files = ModelFiles::open(folder).unwrap();
    let model = Model::new(&files).unwrap();
    work(&Decoder::load(&model, u64::MAX).unwrap())
}

pub fn cache(decoder: &Decoder<'_>) -> Cache {
    decoder.cache(64, u64::MAX).unwrap()
}

/// Logits of all tokens, in one call.
pub fn logits(decoder: &Decoder<'_>, tokens: &[u32]) -> Vec<f32> {
    let mut cache = cache(decoder);
    decoder.forward(&mut [Input { tokens, cache: &mut cache }], LogitsOf::All).unwrap()
}

pub fn best(row: &[f32]) -> u32 {
    (0..row.len()).rev().max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap() as u32
}

pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// The largest difference, over the largest magnitude of `expected`.
pub fn difference(found: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let largest = expected.iter().fold(0.0f64, |m, &x| m.max(f64::from(x).abs()));
    let pairs = found.iter().zip(expected);
    pairs.fold(0.0f64, |m, (&a, &b)| m.max((f64::from(a) - f64::from(b)).abs())) / largest
}
