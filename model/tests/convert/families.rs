//! A tiny checkpoint of every family, under transformers' tensor names, through `inspect`, `convert`
//! and `run`: 16-bit experts as stored, then 4-bit integers or FP8 blocks.
//!
//! `families.json` has a row for each family: its config's keys and its tensors' shapes, `*` for
//! the expert, from models that transformers 5.23.0 saved. `family_outputs.json` has what transformers
//! computes from these checkpoints (`scripts/gen/family_outputs.py`).

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
use crate::quantized_blocks::{KINDS, Kind};

/// Features in quantized checkpoints: whole tiles of Marlin's kernels.
const SIZE: usize = 128;
const GROUP: usize = 32;

/// Families whose quantized blocks `quantized_blocks.rs` converts and runs: their experts are not three
/// matrices between a router and a sum.
const WITH_STAGES: &[&str] = &[
    "ernie4_5_vl_moe",
    "gemma4",
    "gemma4_text",
    "inkling",
    "inkling2",
    "jetmoe",
    "longcat_flash",
    "muse_spark",
    "nemotron_h",
    "zaya",
];

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
        let found = checked(&dir, |_| {}).unwrap_or_else(|e| panic!("{}: {e}", row.name));
        assert!(found.is_equal(), "{}: {:?} {:?}", row.name, found.check, found.routing);
        assert_eq!(found.logits.unwrap().outside, Some(Outside::default()), "{}", row.name);
        let found = inspect(&dir, &InspectOptions::default()).unwrap();
        assert_eq!(found.plain.len(), 1, "{}", row.name);
    }
}

/// Families whose rows have no outputs: `golden/data/routers` has their whole blocks (`blocks.rs`).
const IN_GOLDEN: &[&str] = &[
    "deepseek_v3",
    "ernie4_5_vl_moe",
    "glm4_moe",
    "gpt_oss",
    "llama4_text",
    "mixtral",
    "qwen3_moe",
    "zaya",
];

/// Transformers' outputs: some tokens of 16, and every eighth feature of each.
#[test]
fn every_family_gives_transformers_outputs() {
    let temp = tempfile::tempdir().unwrap();
    let outputs: BTreeMap<String, Value> =
        serde_json::from_str(include_str!("family_outputs.json")).unwrap();
    let rows = rows();
    assert!(outputs.keys().all(|name| rows.iter().any(|row| row.name == *name)));
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../golden/data/routers");
    let golden: Vec<_> = fs::read_dir(golden).unwrap().map(|e| e.unwrap().file_name()).collect();
    for row in rows {
        let Some(expected) = outputs.get(&row.name) else {
            assert!(IN_GOLDEN.contains(&&*row.name), "{}: no outputs of transformers", row.name);
            let of = |file: &std::ffi::OsString| file.to_str().unwrap().starts_with(&row.name);
            assert!(golden.iter().any(of), "{}: no golden block", row.name);
            continue;
        };
        let dir = temp.path().join(&row.name);
        row.write(&dir);
        let tokens: Vec<usize> = serde_json::from_value(expected["tokens"].clone()).unwrap();
        let y: Vec<Vec<f32>> = serde_json::from_value(expected["y"].clone()).unwrap();
        let x = random(&mut Noise::new(&format!("{} x", row.name)), 16 * row.hidden, 1.0);
        let kept: Vec<f32> =
            tokens.iter().flat_map(|t| &x[t * row.hidden..][..row.hidden]).copied().collect();
        save(&dir.join("x.st"), &[tensor("x", DType::F32, &[tokens.len(), row.hidden], &kept)]);
        let found = checked(&dir, |o| o.input = Source::File(dir.join("x.st")));
        let found = found.unwrap_or_else(|e| panic!("{}: {e}", row.name));
        assert!(found.is_equal(), "{}: {:?} {:?}", row.name, found.check, found.routing);
        let made = found.y().tensor().unwrap().elements::<f32>().into_owned();
        let made = made.chunks_exact(row.hidden).map(|y| y.iter().step_by(8).copied());
        let made: Vec<f32> = made.flatten().collect();
        let (y, size) = (y.concat(), y.concat().iter().fold(0.0f32, |m, v| m.max(v.abs())));
        assert_eq!(made.len(), y.len(), "{}", row.name);
        let apart = made.iter().zip(&y).fold(0.0f32, |m, (a, b)| m.max((a - b).abs())) / size;
        assert!(size > 0.01 && apart < 3e-6, "{}: {apart}", row.name);
    }
}

#[test]
fn every_family_converts_and_runs() {
    let temp = tempfile::tempdir().unwrap();
    let mut packed = 0;
    for (i, row) in rows().iter().enumerate() {
        let name = &row.name;
        if WITH_STAGES.contains(&&**name) {
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
    for name in WITH_STAGES {
        let row = rows.iter().find(|row| row.name == *name).expect("a checkpoint");
        let alike = |r: &Row| of(r).iter().any(|types| of(row).contains(types));
        let same = |kind: &Kind| rows.iter().any(|r| r.name == kind.family && alike(r));
        assert!(KINDS.iter().any(same), "{name}: no test converts its quantized block");
    }
}
