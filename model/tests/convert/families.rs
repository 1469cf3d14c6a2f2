//! A tiny checkpoint of every family, under transformers' tensor names, through `inspect`, `convert`
//! and `run`: 16-bit experts as stored, then 4-bit integers or FP8 blocks.
//!
//! `families.json` has a row for each family: its config's keys and its tensors' shapes, `*` for
//! the expert, from models that transformers 5.23.0 saved.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use marlinspike::method::Arithmetic;
use marlinspike::moe::families::{families, family};
use marlinspike::num::scalar::{ScalarType, f32_to_bf16_rne, f32_to_e4m3fn_rne_saturating};
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike_model::convert::settings::Settings;
use marlinspike_model::convert::target::int4;
use marlinspike_model::inspect::{Options as InspectOptions, inspect};
use marlinspike_model::model::layers::Role;
use marlinspike_model::run::error::RunError;
use marlinspike_model::run::options::{Activations, Options, Source};
use marlinspike_model::run::output::{Outside, Run};
use marlinspike_model::run::run;
use serde_json::{Value, json};

use crate::blocks::save;
use crate::common::Noise;
use crate::common::runs::{run as convert, settings};

/// Features in quantized checkpoints: whole tiles of Marlin's kernels.
const SIZE: usize = 128;
const GROUP: usize = 32;

/// Families of which a part of the block is not computed; each must be an error or right.
const PARTIAL: &[&str] =
    &["ernie4_5_vl_moe", "gemma4", "gemma4_text", "inkling", "inkling2", "muse_spark", "zaya"];
/// Families whose quantized experts do not run.
const PLAIN_ONLY: &[&str] = &["jetmoe", "longcat_flash", "nemotron_h"];

struct Row {
    name: String,
    prefix: String,
    hidden: usize,
    config: Value,
    tensors: BTreeMap<String, Vec<usize>>,
    types: BTreeMap<String, String>,
}

fn rows() -> Vec<Row> {
    let all: Value = serde_json::from_str(include_str!("families.json")).unwrap();
    let of = |row: &Value| Row {
        name: row["name"].as_str().unwrap().to_owned(),
        prefix: row["prefix"].as_str().unwrap().to_owned(),
        hidden: row["hidden"].as_u64().unwrap() as usize,
        config: row["config"].clone(),
        tensors: serde_json::from_value(row["tensors"].clone()).unwrap(),
        types: serde_json::from_value(row["types"].clone()).unwrap(),
    };
    all.as_array().unwrap().iter().map(of).collect()
}

/// `len` numbers evenly spread over −size to size, as bf16 represents them.
fn random(noise: &mut Noise, len: usize, size: f32) -> Vec<f32> {
    let one = |bits: u32| ((bits & 0xffff) as f32 / 32768.0 - 1.0) * size;
    let rounded = |x: f32| f32::from_bits(u32::from(f32_to_bf16_rne(x)) << 16);
    (0..len).map(|_| rounded(one(noise.next()))).collect()
}

fn tensor(name: &str, dtype: DType, shape: &[usize], values: &[f32]) -> Tensor<'static> {
    match dtype {
        DType::F32 => Tensor::from_vec(name, dtype, shape.to_vec(), values.to_vec()),
        _ => {
            let bits: Vec<u16> = values.iter().map(|&v| f32_to_bf16_rne(v)).collect();
            Tensor::from_vec(name, DType::BF16, shape.to_vec(), bits)
        }
    }
    .unwrap()
}

/// 4-bit integers in groups along k, as compressed-tensors packs them.
fn int4(module: &str, values: &[f32], [n, k]: [usize; 2]) -> Vec<Tensor<'static>> {
    let (mut words, mut scales) = (Vec::new(), Vec::new());
    for group in values.chunks_exact(GROUP) {
        let largest = group.iter().fold(1e-6f32, |m, x| m.max(x.abs()));
        let scale = f32_to_bf16_rne(largest / 7.0);
        scales.push(scale);
        let scale = f32::from_bits(u32::from(scale) << 16);
        let code = |x: &f32| ((x / scale).round().clamp(-8.0, 7.0) + 8.0) as u32;
        let word = |w: &[f32]| w.iter().enumerate().fold(0u32, |a, (i, x)| a | code(x) << (4 * i));
        words.extend(group.chunks_exact(8).map(|w| word(w).cast_signed()));
    }
    vec![
        Tensor::from_vec(format!("{module}.weight_packed"), DType::I32, vec![n, k / 8], words),
        Tensor::from_vec(format!("{module}.weight_scale"), DType::BF16, vec![n, k / GROUP], scales),
        Tensor::from_vec(
            format!("{module}.weight_shape"),
            DType::I64,
            vec![2],
            vec![n as i64, k as i64],
        ),
    ]
    .into_iter()
    .map(Result::unwrap)
    .collect()
}

/// Codes and scale of one FP8 block. Marlin's scales have 16 bits, and so has this one.
fn fp8_block(values: &[f32]) -> (Vec<u8>, f32) {
    let scale = values.iter().fold(1e-6f32, |m, x| m.max(x.abs())) / 448.0;
    let scale = f32::from_bits(u32::from(f32_to_bf16_rne(scale)) << 16);
    (values.iter().map(|x| f32_to_e4m3fn_rne_saturating(x / scale)).collect(), scale)
}

/// FP8 in blocks of 128 × 128.
fn fp8(module: &str, values: &[f32], [n, k]: [usize; 2]) -> Vec<Tensor<'static>> {
    assert_eq!((n, k), (SIZE, SIZE));
    let (codes, scale) = fp8_block(values);
    vec![
        Tensor::from_vec(format!("{module}.weight"), DType::F8E4M3, vec![n, k], codes).unwrap(),
        Tensor::from_vec(format!("{module}.weight_scale_inv"), DType::F32, vec![1, 1], vec![scale])
            .unwrap(),
    ]
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Stored {
    Int4,
    Fp8,
}

impl Stored {
    fn config(self) -> Value {
        match self {
            Self::Int4 => json!({"quant_method": "compressed-tensors", "format": "pack-quantized",
                "ignore": [], "config_groups": {"group_0": {"targets": ["Linear"],
                "input_activations": null, "weights": {"num_bits": 4, "type": "int",
                "symmetric": true, "strategy": "group", "group_size": GROUP, "dynamic": false}}}}),
            Self::Fp8 => json!({"quant_method": "fp8", "activation_scheme": "dynamic",
                "weight_block_size": [SIZE, SIZE]}),
        }
    }

    fn quantize(self, module: &str, values: &[f32]) -> Vec<Tensor<'static>> {
        let shape = [SIZE, SIZE];
        match self {
            Self::Int4 => int4(module, values, shape),
            Self::Fp8 => fp8(module, values, shape),
        }
    }
}

impl Row {
    fn dtype(&self, name: &str) -> DType {
        if self.types.get(name).is_some_and(|ty| ty == "F32") { DType::F32 } else { DType::BF16 }
    }

    /// The family's 16-bit tensors as transformers saves them.
    fn write(&self, dir: &Path) {
        fs::create_dir_all(dir).unwrap();
        let mut noise = Noise::new(&self.name);
        let mut tensors = Vec::new();
        for (name, shape) in &self.tensors {
            let full = format!("{}{name}", self.prefix);
            let (count, shape) = match name.contains('*') {
                true => (shape[0], &shape[1..]),
                false => (1, &shape[..]),
            };
            for e in 0..count {
                let values = random(&mut noise, shape.iter().product(), 0.25);
                let full = full.replace('*', &e.to_string());
                tensors.push(tensor(&full, self.dtype(name), shape, &values));
            }
        }
        save(&dir.join("model.safetensors"), &tensors);
        fs::write(dir.join("config.json"), self.config.to_string()).unwrap();
    }

    /// Experts one by one, as quantized exports have them, and FP8 shared experts; the other
    /// tensors as they are. Returns the experts' module.
    fn write_quantized(&self, dir: &Path, stored: Stored) -> String {
        fs::create_dir_all(dir).unwrap();
        let mut noise = Noise::new(&self.name);
        let is_expert = |name: &str| {
            let shared = name.contains("shared") || name.contains("share_expert");
            !shared
                && (name.contains("experts.") || self.tensors[name].len() == 3)
                && !name.contains("e_score")
        };
        let (first, shape) = self.tensors.iter().find(|(n, _)| is_expert(n)).unwrap();
        let parent = match first.find("experts.") {
            Some(at) => &first[..at],
            None => &first[..first.find('.').unwrap() + 1],
        };
        let experts = match shape.len() {
            3 => shape[0],
            _ => 8,
        };
        let names = match first.contains(".w1.") || first.contains(".w2.") {
            true => ["w1", "w3", "w2"],
            false => ["gate_proj", "up_proj", "down_proj"],
        };
        let module = format!("{}{parent}experts", self.prefix);
        let mut tensors = Vec::new();
        for e in 0..experts {
            for name in names {
                let values = random(&mut noise, SIZE * SIZE, 0.25);
                tensors.extend(stored.quantize(&format!("{module}.{e}.{name}"), &values));
            }
        }
        for (name, shape) in self.tensors.iter().filter(|(n, _)| !is_expert(n)) {
            // Shared experts have 32 or 64 features, here as many as the hidden states.
            let shared = name.contains("shared") || name.contains("share_expert");
            let size = |&d: &usize| if d == self.hidden || shared && d > 1 { SIZE } else { d };
            let fused = name.ends_with("input_linear.weight");
            let mut shape: Vec<usize> = shape.iter().map(size).collect();
            if fused {
                shape[0] = 2 * SIZE;
            }
            let values = random(&mut noise, shape.iter().product(), 0.25);
            let full = format!("{}{name}", self.prefix);
            match full.strip_suffix(".weight") {
                Some(linear) if shared && stored == Stored::Fp8 && shape == [SIZE, SIZE] => {
                    tensors.extend(stored.quantize(linear, &values));
                }
                _ => tensors.push(tensor(&full, self.dtype(name), &shape, &values)),
            }
        }
        save(&dir.join("model.safetensors"), &tensors);
        let mut config = self.config.clone();
        config["dtype"] = json!("bfloat16");
        config["quantization_config"] = stored.config();
        fs::write(dir.join("config.json"), config.to_string()).unwrap();
        module
    }
}

fn checked(dir: &Path, change: impl FnOnce(&mut Options)) -> Result<Run, RunError> {
    let mut options = Options::default();
    options.input = Source::Seeded { seed: 7, tokens: 5, dtype: ScalarType::BFLOAT16 };
    options.check = true;
    change(&mut options);
    run(dir, &options)
}

#[test]
fn every_family_runs_as_stored() {
    let temp = tempfile::tempdir().unwrap();
    let rows = rows();
    assert!(rows.len() >= 70);
    for row in rows {
        let dir = temp.path().join(&row.name);
        row.write(&dir);
        match checked(&dir, |_| {}) {
            Ok(found) => {
                assert!(found.is_equal(), "{}: {:?} {:?}", row.name, found.check, found.routing);
                assert_eq!(found.logits.unwrap().outside, Some(Outside::default()), "{}", row.name);
            }
            Err(e) => assert!(PARTIAL.contains(&&*row.name), "{}: {e}", row.name),
        }
        let found = inspect(&dir, &InspectOptions::default()).unwrap();
        assert_eq!(found.plain.len(), 1, "{}", row.name);
    }
}

#[test]
fn every_family_converts_and_runs() {
    let temp = tempfile::tempdir().unwrap();
    let mut packed = 0;
    for (i, row) in rows().iter().enumerate() {
        let name = &row.name;
        if PARTIAL.contains(&&**name) || PLAIN_ONLY.contains(&&**name) {
            continue;
        }
        let stored = if i % 2 == 0 { Stored::Int4 } else { Stored::Fp8 };
        let path = |of: &str| temp.path().join(format!("{name}-{of}"));
        let module = row.write_quantized(&path("model"), stored);
        let found = inspect(&path("model"), &InspectOptions::default()).unwrap();
        let w13: Vec<_> = found.layers.iter().filter(|l| l.role == Role::W13).collect();
        assert_eq!(w13.len(), 1, "{name}");
        assert_eq!(w13[0].module, format!("{module}.w13"), "{name}");
        convert(&path("model"), &path("out"), &settings())
            .unwrap_or_else(|e| panic!("{name}: {e}"));
        // Marlin's kernels keep activations in 16 bits: with those, both have the same bits.
        let source = checked(&path("model"), |o| {
            o.arithmetic = Some(Arithmetic::Exact);
            o.method.activations = Activations::SixteenBit;
        });
        let source = source.unwrap_or_else(|e| panic!("{name}: {e}"));
        let out = checked(&path("out"), |_| {}).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert!(source.is_equal() && out.is_equal(), "{name}: {:?} {:?}", source.check, out.check);
        assert_eq!(source.y().digest(), out.y().digest(), "{name}");
        assert!(source.logits.is_some() && out.logits.is_some(), "{name}");
        let shared = row.tensors.keys().any(|n| n.contains("share"));
        // One module for gate and up of the shared expert: left out with a note in 8 bits.
        let left_out = out.notes.iter().any(|n| n.contains("it does not include"));
        assert!(!left_out || name.starts_with("granitemoe") && stored == Stored::Fp8, "{name}");
        assert_eq!(out.y_experts().is_some(), shared && !left_out, "{name}");
        if let Some(sum) = out.y_experts() {
            assert_ne!(sum.digest(), out.y().digest(), "{name}");
        }
        let kleidi = Settings { format: int4::FORMAT, ..settings() };
        if stored == Stored::Int4 && convert(&path("model"), &path("packed"), &kleidi).is_ok() {
            packed += 1;
            let found = checked(&path("packed"), |_| {}).unwrap_or_else(|e| panic!("{name}: {e}"));
            assert!(found.packed && found.is_equal(), "{name}");
        }
    }
    assert!(packed >= 5, "{packed}");
}

/// The rows of the table of families whose models transformers does not implement: their code comes
/// with the checkpoints.
const WITHOUT_CHECKPOINT: &[&str] = &["bailing_moe"];

/// A row that is added to the table needs a tiny checkpoint, which the tests above then convert and
/// run: a row of `families.json`, from transformers' own model.
#[test]
fn every_row_of_the_table_has_a_checkpoint() {
    let rows = rows();
    let of = |row: &Row| {
        let parts = row.config.as_object().unwrap().values().map(|v| &v["model_type"]);
        let types = parts.chain([&row.config["model_type"]]).filter_map(Value::as_str);
        let part = row.prefix.split('.').next().unwrap().to_owned();
        let rule = |ty: &str| family(&format!("{ty}_{part}")).or_else(|| family(ty));
        types.filter_map(rule).map(|f| f.model_types).collect::<Vec<_>>()
    };
    let covered: Vec<_> = rows.iter().flat_map(of).collect();
    for row in families() {
        let name = row.model_types[0];
        let missing = !covered.contains(&row.model_types);
        let expected = WITHOUT_CHECKPOINT.contains(&name);
        assert_eq!(
            missing, expected,
            "{name}: `families.json` has no checkpoint, or it has one now"
        );
    }
    // The exceptions of the other tests name checkpoints that exist.
    for name in PARTIAL.iter().chain(PLAIN_ONLY) {
        assert!(rows.iter().any(|row| row.name == *name), "{name}");
    }
}
