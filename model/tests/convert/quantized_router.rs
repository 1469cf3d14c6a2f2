//! Blocks whose router or shared expert's gate is quantized: the logits are those of the numbers that
//! the codes and scales are, decoded here without the library.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::common::{Format, Noise};
use marlinspike::container::write_container;
use marlinspike::num::dims::Shape;
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike_model::run::options::Options;
use marlinspike_model::run::output::Run;
use marlinspike_model::run::run;
use serde_json::json;

const MLP: &str = "model.layers.0.mlp";
const GATES: [(&str, usize); 2] = [("gate", 4), ("shared_expert_gate", 1)];

/// How the router or the gate is stored.
#[derive(Clone, Copy, PartialEq)]
enum Stored {
    Fp8,
    /// The same numbers as f32.
    Plain,
    /// FP8 codes, though the config says that the module is not quantized.
    Unlisted,
    Absent,
}

/// The value of an e4m3 code that is not NaN.
fn e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let size = match exponent {
        0 => mantissa / 8.0 * 2f32.powi(-6),
        e => (1.0 + mantissa / 8.0) * 2f32.powi(e - 7),
    };
    if code & 0x80 == 0 { size } else { -size }
}

/// Codes and bf16 scales of a `[rows, 128]` matrix.
fn matrix(name: &str, rows: usize) -> (Vec<u8>, Vec<u16>) {
    let mut noise = Noise::new(name);
    let codes = (0..rows * 128).map(|_| (noise.next() % 0x40) as u8 | (noise.next() as u8 & 0x80));
    let codes = codes.collect();
    (codes, (0..rows).map(|_| 0x3d00 + (noise.next() % 0x100) as u16).collect())
}

/// Writes the block with its router and gate stored so.
fn write(dir: &Path, model_type: &str, stored: [Stored; 2]) {
    let mut tensors = Vec::new();
    let mut linear = |name: String, k, n| {
        let weight = Format::Fp8Channel.weight(&name, &name, Shape::new(k, n));
        tensors.extend(Format::Fp8Channel.tensors(&weight));
    };
    for part in (0..4).map(|e| format!("experts.{e}")).chain(["shared_expert".to_owned()]) {
        linear(format!("{MLP}.{part}.gate_proj"), 128, 64);
        linear(format!("{MLP}.{part}.up_proj"), 128, 64);
        linear(format!("{MLP}.{part}.down_proj"), 64, 128);
    }
    let mut ignore = vec!["lm_head".to_owned()];
    for ((gate, rows), stored) in GATES.into_iter().zip(stored) {
        let name = format!("{MLP}.{gate}");
        let (codes, scales) = matrix(gate, rows);
        let weight = format!("{name}.weight");
        if stored != Stored::Fp8 {
            ignore.push(name.clone());
        }
        if stored == Stored::Plain {
            let scale = |n: usize| f32::from_bits(u32::from(scales[n]) << 16);
            let values = codes.iter().enumerate().map(|(i, &c)| e4m3(c) * scale(i / 128));
            let values: Vec<f32> = values.collect();
            tensors.push(Tensor::from_vec(weight, DType::F32, vec![rows, 128], values).unwrap());
        } else if stored != Stored::Absent {
            let shape = vec![rows, 128];
            tensors.push(Tensor::from_vec(weight, DType::F8E4M3, shape, codes).unwrap());
            let (scale, shape) = (format!("{name}.weight_scale"), vec![rows, 1]);
            tensors.push(Tensor::from_vec(scale, DType::BF16, shape, scales).unwrap());
        }
    }
    let mut quantization = Format::Fp8Channel.quant_config();
    quantization["ignore"] = json!(ignore);
    let config = json!({"model_type": model_type, "dtype": "bfloat16", "hidden_size": 128,
        "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": true,
        "quantization_config": quantization});
    fs::create_dir_all(dir).unwrap();
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
    let bytes = write_container(&tensors, &BTreeMap::new(), Vec::new()).unwrap();
    fs::write(dir.join("model.safetensors"), bytes).unwrap();
}

/// The block's run, checked against its definition.
fn block(model_type: &str, stored: [Stored; 2]) -> Result<Run, String> {
    let temp = tempfile::tempdir().unwrap();
    write(temp.path(), model_type, stored);
    let mut options = Options::default();
    options.layer = Some(format!("{MLP}.experts"));
    options.check = true;
    run(temp.path(), &options).map_err(|e| e.to_string())
}

/// The bytes of y of a run that equals its definition.
fn y(run: &Run) -> &[u8] {
    assert!(run.is_equal());
    &run.outputs.last().unwrap().bytes
}

#[test]
fn a_quantized_router_and_gate_are_the_numbers_of_their_codes() {
    use Stored::{Fp8, Plain};
    for model_type in ["qwen3_next", "qwen2_moe", "qwen3_5_moe"] {
        let plain = block(model_type, [Plain, Plain]).unwrap();
        assert!(plain.logits.is_some());
        for stored in [[Fp8, Plain], [Plain, Fp8], [Fp8, Fp8]] {
            let found = block(model_type, stored).unwrap();
            assert!(found.logits.is_some(), "the router's logits were computed");
            assert!(y(&found) == y(&plain), "{model_type}");
        }
    }
    // The gate is more than a formality: a family without one gives another output.
    let ungated = block("mixtral", [Plain, Stored::Absent]);
    if let Ok(ungated) = ungated {
        assert!(y(&ungated) != y(&block("qwen3_next", [Plain, Plain]).unwrap()));
    }
}

#[test]
fn an_absent_or_unlisted_gate_is_refused_by_its_name() {
    use Stored::{Absent, Fp8, Plain, Unlisted};
    let gate = format!("{MLP}.shared_expert_gate.weight");
    let absent = block("qwen3_next", [Plain, Absent]).unwrap_err();
    assert!(absent.contains(&format!("`{gate}` is missing")), "{absent}");
    let unlisted = block("qwen3_next", [Fp8, Unlisted]).unwrap_err();
    assert!(unlisted.contains(&format!("`{gate}`: found F8_E4M3")), "{unlisted}");
    let router = block("qwen3_next", [Unlisted, Plain]).unwrap_err();
    assert!(router.contains(&format!("`{MLP}.gate.weight`: found F8_E4M3")), "{router}");
}
