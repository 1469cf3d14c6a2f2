//! Checkpoints of FP8 blocks of 128 x 128 through `inspect`, `convert` and `run`.
//!
//! Expected bytes are computed here, value by value, from the checkpoint's tensors.

use std::array;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::LazyLock;

use crate::common::{Converted, Noise};
use crate::support::{run, stderr, stdout};
use marlinspike::container::{Container, write_container};
use marlinspike::num::tensor::{DType, Tensor};
use serde_json::{Value, json};

const EXPERTS: &str = "model.layers.1.mlp.experts";
const LINEAR: &str = "model.layers.1.self_attn.kv_a_proj_with_mqa";
const HIDDEN: usize = 256;
const INTER: usize = 128;
const NUM_EXPERTS: usize = 8;

/// A matrix of FP8 blocks: codes `[N, K]` and scales `[⌈N / 128⌉, ⌈K / 128⌉]`.
#[derive(Debug, Clone)]
struct Blocks {
    size_n: usize,
    size_k: usize,
    codes: Vec<u8>,
    scales: Vec<f32>,
}

impl Blocks {
    /// Random codes without NaN. `power`: scales are powers of two.
    fn new(name: &str, size_n: usize, size_k: usize, power: bool) -> Self {
        let mut noise = Noise::new(name);
        let mut code = || (noise.next() >> 5) as u8;
        let codes = (0..size_n * size_k).map(|_| code()).collect::<Vec<_>>();
        let codes = codes.iter().map(|&c| if c & 0x7f == 0x7f { 0x2a } else { c }).collect();
        let blocks = size_n.div_ceil(128) * size_k.div_ceil(128);
        let scale = |_| {
            let mantissa = if power { 0 } else { noise.next() & 0x7f_ffff };
            f32::from_bits((116 + noise.next() % 5) << 23 | mantissa)
        };
        Self { size_n, size_k, codes, scales: (0..blocks).map(scale).collect() }
    }

    fn groups(&self) -> usize {
        self.size_k.div_ceil(128)
    }

    fn block(&self, n: usize, k: usize) -> usize {
        n / 128 * self.groups() + k / 128
    }

    /// vLLM's `requant_weight_ue8m0_inplace`, value by value.
    fn requantized(&self) -> Self {
        let mut largest = vec![0f32; self.scales.len()];
        let value = |i: usize| e4m3(self.codes[i]) as f32 * self.scales[self.block_of(i)];
        for i in 0..self.codes.len() {
            let block = self.block_of(i);
            largest[block] = largest[block].max(value(i).abs());
        }
        let scales: Vec<f32> = largest
            .iter()
            .map(|max| 2f32.powi(f64::from(max.max(1e-4) / 448.0).log2().ceil() as i32))
            .collect();
        let code = |i: usize| nearest(f64::from(value(i)) / f64::from(scales[self.block_of(i)]));
        let codes = (0..self.codes.len()).map(code).collect();
        Self { codes, scales: scales.clone(), ..*self }
    }

    fn block_of(&self, i: usize) -> usize {
        self.block(i / self.size_k, i % self.size_k)
    }

    /// `self` above `other`.
    fn above(&self, other: &Self) -> Self {
        Self {
            size_n: self.size_n + other.size_n,
            size_k: self.size_k,
            codes: [&self.codes[..], &other.codes].concat(),
            scales: [&self.scales[..], &other.scales].concat(),
        }
    }
}

/// The value of an e4m3fn code, by its definition.
fn e4m3(code: u8) -> f64 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7));
    let magnitude = match exponent {
        0 => mantissa / 8.0 * 2f64.powi(-6),
        e => (1.0 + mantissa / 8.0) * 2f64.powi(e - 7),
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

/// The e4m3fn code nearest to `x`, the even one at halves, saturating.
fn nearest(x: f64) -> u8 {
    static VALUES: LazyLock<[f64; 0x7f]> =
        LazyLock::new(|| array::from_fn(|code| e4m3(code as u8)));
    // The first value that is not below |x|, or the last; the one before it may be nearer.
    let above = VALUES.partition_point(|value| *value < x.abs()).min(0x7e);
    let distance = |code: &usize| (VALUES[*code] - x.abs()).abs();
    let near = above.saturating_sub(1)..=above;
    let best = near.min_by(|a, b| distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1))));
    best.unwrap() as u8 | if x.is_sign_negative() { 0x80 } else { 0 }
}

/// How the scales of a checkpoint are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stored {
    /// Any f32.
    Float32,
    /// E8M0, with `scale_fmt: ue8m0`.
    E8m0,
    /// f32 of the requantized weights, with `scale_fmt: ue8m0`.
    Requantized,
}

/// A small checkpoint in DeepSeek-V3's form: attention, a dense layer, and experts with shared ones
/// under a sigmoid router with a bias and groups.
fn deepseek(dir: &Path, stored: Stored) -> BTreeMap<String, Blocks> {
    let mut matrices = vec![
        (LINEAR.to_owned(), 192, HIDDEN),
        ("model.layers.1.self_attn.o_proj".to_owned(), HIDDEN, 128),
    ];
    let mut mlp = |prefix: String, inner| {
        matrices.push((format!("{prefix}.gate_proj"), inner, HIDDEN));
        matrices.push((format!("{prefix}.up_proj"), inner, HIDDEN));
        matrices.push((format!("{prefix}.down_proj"), HIDDEN, inner));
    };
    mlp("model.layers.0.mlp".to_owned(), 384);
    mlp("model.layers.1.mlp.shared_experts".to_owned(), INTER);
    for e in 0..NUM_EXPERTS {
        mlp(format!("{EXPERTS}.{e}"), INTER);
    }
    let (mut all, mut tensors) = (BTreeMap::new(), Vec::new());
    for (name, size_n, size_k) in matrices {
        let blocks = Blocks::new(&name, size_n, size_k, stored == Stored::E8m0);
        let blocks = if stored == Stored::Requantized { blocks.requantized() } else { blocks };
        let (weight, scale) = (format!("{name}.weight"), format!("{name}.weight_scale_inv"));
        let codes = blocks.codes.clone();
        tensors.push(Tensor::from_vec(weight, DType::F8E4M3, vec![size_n, size_k], codes));
        let shape = vec![size_n.div_ceil(128), size_k.div_ceil(128)];
        tensors.push(match stored {
            Stored::E8m0 => {
                let bytes: Vec<u8> =
                    blocks.scales.iter().map(|s| (s.to_bits() >> 23) as u8).collect();
                Tensor::from_vec(scale, DType::F8E8M0, shape, bytes)
            }
            _ => Tensor::from_vec(scale, DType::F32, shape, blocks.scales.clone()),
        });
        all.insert(name, blocks);
    }
    let bias: Vec<f32> = (0..NUM_EXPERTS).map(|e| e as f32 / 64.0).collect();
    let gate = vec![0x3c00u16; NUM_EXPERTS * HIDDEN];
    let gate_name = "model.layers.1.mlp.gate";
    let shape = vec![NUM_EXPERTS, HIDDEN];
    tensors.push(Tensor::from_vec(format!("{gate_name}.weight"), DType::BF16, shape, gate));
    let name = format!("{gate_name}.e_score_correction_bias");
    tensors.push(Tensor::from_vec(name, DType::F32, vec![NUM_EXPERTS], bias));
    let tensors: Vec<_> = tensors.into_iter().map(Result::unwrap).collect();
    let mut quantization = json!({"quant_method": "fp8", "fmt": "e4m3",
        "activation_scheme": "dynamic", "weight_block_size": [128, 128]});
    if stored != Stored::Float32 {
        quantization["scale_fmt"] = json!("ue8m0");
    }
    let config = json!({"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
        "dtype": "bfloat16", "hidden_size": HIDDEN, "intermediate_size": 384,
        "moe_intermediate_size": INTER, "n_routed_experts": NUM_EXPERTS, "n_shared_experts": 1,
        "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2, "norm_topk_prob": true,
        "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        "first_k_dense_replace": 1, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "hidden_act": "silu", "quantization_config": quantization});
    write(dir, &tensors, &config);
    all
}

fn write(dir: &Path, tensors: &[Tensor<'_>], config: &Value) {
    fs::create_dir_all(dir).unwrap();
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
    let bytes = write_container(tensors, &BTreeMap::new(), Vec::new()).unwrap();
    fs::write(dir.join("model.safetensors"), bytes).unwrap();
}

/// The JSON of a command that must succeed.
fn json_of(arguments: &[&str]) -> Value {
    let output = run(arguments);
    assert_eq!((output.status.code(), stderr(&output)), (Some(0), ""), "{arguments:?}");
    serde_json::from_str(stdout(&output)).unwrap()
}

/// Converts `model` to `out` and returns the tensors.
fn convert(model: &Path, out: &Path, arguments: &[&str]) -> Converted {
    let [model, dir] = [model, out].map(|p| p.to_str().unwrap());
    let _ = json_of(&[&["convert", "--json", model, dir, "--to"], arguments].concat());
    Converted::read(out)
}

/// A layer's output, with every bit compared with the definition.
fn ran(model: &Path, layer: &str, more: &[&str]) -> Value {
    let model = model.to_str().unwrap();
    let found = json_of(
        &[&["run", "--json", model, "--layer", layer, "--tokens", "5", "--check"], more].concat(),
    );
    assert_eq!(found["check"]["mismatches"], 0, "{found}");
    found
}

/// The digest of a layer's output.
fn digest(model: &Path, layer: &str, more: &[&str]) -> Value {
    ran(model, layer, more)["sha256"].clone()
}

#[test]
fn a_deepseek_v3_checkpoint_is_inspected_converted_and_run() {
    let temp = tempfile::tempdir().unwrap();
    for stored in [Stored::Float32, Stored::E8m0] {
        let model = temp.path().join(format!("{stored:?}"));
        let _ = deepseek(&model, stored);
        let found = json_of(&["inspect", "--json", model.to_str().unwrap()]);
        let layers = found["layers"].as_array().unwrap().len();
        assert_eq!(layers, 2 + 3 + 3 + 2, "{found}");
        let takes = |target: &str| {
            let all = found["targets"].as_array().unwrap();
            all.iter().find(|t| t["target"] == target).unwrap()["takes"].as_u64().unwrap()
        };
        assert_eq!(["marlin", "deepgemm"].map(takes), [layers as u64; 2], "{found}");
        assert_eq!(["flashinfer", "kleidiai"].map(takes), [2, 0]);
        let routing = found["routing"].to_string();
        for part in ["sigmoid", "e_score_correction_bias"] {
            assert!(routing.contains(part), "{part} is not in {routing}");
        }
        assert_eq!(found["moe_kernels"].as_array().unwrap().len(), 1, "{found}");

        let from = [EXPERTS, LINEAR].map(|layer| digest(&model, layer, &[]));
        let routed = ran(&model, EXPERTS, &[])["y_experts"]["sha256"].clone();
        for (i, arguments) in [
            &["deepgemm"][..],
            &["flashinfer", "--skip-unsupported"],
            &["flashinfer", "--skip-unsupported", "--nvfp4-backend", "FLASHINFER_CUTLASS"],
        ]
        .into_iter()
        .enumerate()
        {
            let out = temp.path().join(format!("{stored:?}-{i}"));
            let _ = convert(&model, &out, arguments);
            if arguments[0] == "deepgemm" {
                assert_eq!([EXPERTS, LINEAR].map(|layer| digest(&out, layer, &[])), from);
            } else {
                // The shared expert was copied unconverted: y is the sum over the routed experts.
                let found = ran(&out, EXPERTS, &[]);
                assert_eq!(found["sha256"], routed, "{arguments:?}");
                assert!(
                    found["notes"].to_string().contains("it does not include `shared_experts`")
                );
            }
            let found = json_of(&["inspect", "--json", out.to_str().unwrap()]);
            assert_eq!(found["converted"]["layout"], arguments[0]);
        }
        // Marlin keeps activations in 16 bits, and scales in bf16, which holds powers of two.
        let out = temp.path().join(format!("{stored:?}-marlin"));
        let _ = convert(&model, &out, &["marlin"]);
        let pair = [digest(&out, LINEAR, &[]), digest(&model, LINEAR, &["--activations", "none"])];
        assert_eq!(pair[0] == pair[1], stored == Stored::E8m0);
    }
}

/// The requantized weights of the UE8M0 forms run as a checkpoint of the same weights does.
#[test]
fn ue8m0_forms_hold_requantized_weights() {
    let temp = tempfile::tempdir().unwrap();
    let [model, requantized] = ["model", "requantized"].map(|name| temp.path().join(name));
    let matrices = deepseek(&model, Stored::Float32);
    let _ = deepseek(&requantized, Stored::Requantized);
    let expected = [EXPERTS, LINEAR].map(|layer| digest(&requantized, layer, &[]));
    assert_ne!(expected[1], digest(&model, LINEAR, &[]));
    for form in ["float32_ceil_ue8m0", "ue8m0"] {
        let out = temp.path().join(form);
        let converted = convert(&model, &out, &["deepgemm", "--scale-format", form]);
        for (layer, expected) in [EXPERTS, LINEAR].into_iter().zip(&expected) {
            assert_eq!(digest(&out, layer, &[]), *expected, "{form} {layer}");
        }
        for e in 0..NUM_EXPERTS {
            let of = |p: &str| matrices[&format!("{EXPERTS}.{e}.{p}")].requantized();
            let w13 = of("gate_proj").above(&of("up_proj"));
            deepgemm(&converted, &format!("{EXPERTS}.w13"), Some(e), &w13, form);
            deepgemm(&converted, &format!("{EXPERTS}.w2"), Some(e), &of("down_proj"), form);
        }
        deepgemm(&converted, LINEAR, None, &matrices[LINEAR].requantized(), form);
    }
    // Scales that the file has as E8M0 are kept, as upstream keeps them.
    let (model, out) = (temp.path().join("e8m0"), temp.path().join("e8m0-out"));
    let matrices = deepseek(&model, Stored::E8m0);
    let converted = convert(&model, &out, &["deepgemm", "--scale-format", "ue8m0"]);
    deepgemm(&converted, LINEAR, None, &matrices[LINEAR], "ue8m0");
    assert_eq!(digest(&out, LINEAR, &[]), digest(&model, LINEAR, &[]));
}

/// Compares a converted matrix with DeepGEMM's form of `blocks`, value by value.
fn deepgemm(converted: &Converted, layer: &str, e: Option<usize>, blocks: &Blocks, form: &str) {
    let weight = converted.tensor(layer, "weight", e).unwrap();
    assert_eq!((weight.dtype(), weight.bytes()), (DType::F8E4M3, &blocks.codes[..]), "{layer}");
    assert_eq!(weight.shape(), [blocks.size_n, blocks.size_k]);
    let scales = converted.tensor(layer, "scales", e).unwrap();
    if form != "ue8m0" {
        assert_eq!(scales.shape(), [blocks.size_n.div_ceil(128), blocks.groups()]);
        assert_eq!(scales.elements::<f32>().to_vec(), blocks.scales, "{layer}");
        return;
    }
    let words = scales.elements::<i32>();
    assert_eq!(scales.shape(), [blocks.groups().div_ceil(4), blocks.size_n.next_multiple_of(4)]);
    for n in 0..blocks.size_n {
        for group in 0..blocks.groups() {
            let word = words[group / 4 * blocks.size_n.next_multiple_of(4) + n];
            let scale = blocks.scales[blocks.block(n, group * 128)];
            let byte = word.to_le_bytes()[group % 4];
            assert_eq!(u32::from(byte), scale.to_bits() >> 23, "{layer} {n} {group}");
        }
    }
}

#[test]
fn every_byte_of_the_f32_forms_is_where_the_kernel_reads_it() {
    let temp = tempfile::tempdir().unwrap();
    let model = temp.path().join("model");
    let matrices = deepseek(&model, Stored::Float32);
    let of = |e: usize, p: &str| &matrices[&format!("{EXPERTS}.{e}.{p}")];
    let converted = convert(&model, &temp.path().join("deepgemm"), &["deepgemm"]);
    for (name, blocks) in matrices.iter().filter(|(name, _)| !name.contains(".experts.")) {
        deepgemm(&converted, name, None, blocks, "float32");
    }
    for e in 0..NUM_EXPERTS {
        let w13 = of(e, "gate_proj").above(of(e, "up_proj"));
        deepgemm(&converted, &format!("{EXPERTS}.w13"), Some(e), &w13, "float32");
        deepgemm(&converted, &format!("{EXPERTS}.w2"), Some(e), of(e, "down_proj"), "float32");
    }
    for (backend, trtllm) in [("FLASHINFER_TRTLLM", true), ("FLASHINFER_CUTLASS", false)] {
        let out = temp.path().join(backend);
        let arguments = ["flashinfer", "--skip-unsupported", "--nvfp4-backend", backend];
        let converted = convert(&model, &out, &arguments);
        for e in 0..NUM_EXPERTS {
            // Up is before gate.
            let w13 = of(e, "up_proj").above(of(e, "gate_proj"));
            for (stack, blocks) in [("w13", &w13), ("w2", of(e, "down_proj"))] {
                let layer = format!("{EXPERTS}.{stack}");
                let weight = converted.tensor(&layer, "weight", Some(e)).unwrap();
                let (size_n, size_k) = (blocks.size_n, blocks.size_k);
                let shape = match trtllm {
                    true => vec![size_k / 128, size_n, 128],
                    false => vec![size_n, size_k],
                };
                assert_eq!((weight.dtype(), weight.shape()), (DType::F8E4M3, &shape[..]));
                for (i, code) in blocks.codes.iter().enumerate() {
                    let (n, k) = (i / size_k, i % size_k);
                    // In 16 rows, the even ones move to the first half, the odd ones to the second.
                    let row = n / 16 * 16 + n % 2 * 8 + n % 16 / 2;
                    let at = match trtllm {
                        true => (k / 128 * size_n + row) * 128 + k % 128,
                        false => i,
                    };
                    assert_eq!(weight.bytes()[at], *code, "{backend} {layer} {n} {k}");
                }
                let scales = converted.tensor(&layer, "scales", Some(e)).unwrap();
                assert_eq!(scales.shape(), [size_n / 128, size_k / 128]);
                assert_eq!(scales.elements::<f32>().to_vec(), blocks.scales, "{layer}");
            }
        }
    }
}

#[test]
fn other_checkpoints_are_refused_with_the_reason() {
    let temp = tempfile::tempdir().unwrap();
    let model = temp.path().join("model");
    let _ = deepseek(&model, Stored::Float32);
    let out = temp.path().join("out");
    let refused = |model: &Path, arguments: &[&str], reason: &str| {
        let [model, out] = [model, out.as_path()].map(|p| p.to_str().unwrap());
        let output = run([&["convert", model, out, "--to"], arguments].concat());
        assert_ne!(output.status.code(), Some(0), "{arguments:?}");
        assert!(stderr(&output).contains(reason), "{reason:?} is not in {}", stderr(&output));
        assert!(!Path::new(out).join("config.json").exists());
    };
    let reason = "found VLLM_CUTLASS, expected FLASHINFER_TRTLLM or FLASHINFER_CUTLASS";
    refused(&model, &["flashinfer", "--nvfp4-backend", "VLLM_CUTLASS"], reason);
    let config = fs::read_to_string(model.join("config.json")).unwrap();
    let config: Value = serde_json::from_str(&config).unwrap();
    let reconfigured = |name: &str, change: &dyn Fn(&mut Value)| {
        let (dir, mut config) = (temp.path().join(name), config.clone());
        change(&mut config);
        fs::create_dir_all(&dir).unwrap();
        fs::copy(model.join("model.safetensors"), dir.join("model.safetensors")).unwrap();
        fs::write(dir.join("config.json"), config.to_string()).unwrap();
        dir
    };
    let small = reconfigured("small", &|config| {
        config["quantization_config"]["weight_block_size"] = json!([64, 128]);
    });
    refused(&small, &["deepgemm"], "found fp8 block 64x128, expected fp8 block 128x128");
    let sixteen = reconfigured("sixteen", &|config| {
        let block = json!({"num_bits": 8, "type": "float", "symmetric": true, "dynamic": false,
            "strategy": "block", "block_structure": [128, 128]});
        config["quantization_config"] = json!({"quant_method": "compressed-tensors",
            "format": "float-quantized", "ignore": ["re:.*gate$"], "config_groups": {
                "group_0": {"targets": ["Linear"], "weights": block, "input_activations": null}}});
    });
    refused(&sixteen, &["deepgemm"], "activations: found None");
    // A linear layer of 96 rows.
    let (narrow, blocks) = (temp.path().join("narrow"), Blocks::new("q", 96, 128, false));
    let name = "model.layers.0.self_attn.q_proj";
    let shape = vec![96, 128];
    let tensors = [
        Tensor::from_vec(format!("{name}.weight"), DType::F8E4M3, shape, blocks.codes),
        Tensor::from_vec(format!("{name}.weight_scale_inv"), DType::F32, vec![1, 1], blocks.scales),
    ];
    write(&narrow, &tensors.map(Result::unwrap), &config);
    refused(&narrow, &["deepgemm"], "size_n: found 96, expected a multiple of 64");
    // Half a block of columns for each rank.
    let ranks = ["deepgemm", "--tp-size", "2", "--tp-rank", "0"];
    refused(&model, &ranks, "do not end with a block of 128");
}

/// Activations times the identity: what is left is their quantization.
#[test]
fn groups_of_activations_are_quantized_by_the_rule() {
    let temp = tempfile::tempdir().unwrap();
    let (model, file, out) = (temp.path().join("m"), temp.path().join("x"), temp.path().join("y"));
    let name = "model.layers.0.self_attn.q_proj";
    let identity: Vec<u8> =
        (0..128 * 128).map(|i| if i / 128 == i % 128 { 0x38 } else { 0 }).collect();
    let tensors = [
        Tensor::from_vec(format!("{name}.weight"), DType::F8E4M3, vec![128, 128], identity),
        Tensor::from_vec(format!("{name}.weight_scale_inv"), DType::F32, vec![1, 1], vec![1f32]),
    ];
    let config = json!({"dtype": "bfloat16", "quantization_config": {"quant_method": "fp8",
        "activation_scheme": "dynamic", "weight_block_size": [128, 128]}});
    write(&model, &tensors.map(Result::unwrap), &config);
    let mut noise = Noise::new("x");
    let rows = 64;
    let x: Vec<u16> = (0..rows * 128).map(|_| 0x3c00 + (noise.next() % 0x300) as u16).collect();
    let x = Tensor::from_vec("x", DType::BF16, vec![rows, 128], x).unwrap();
    fs::write(
        &file,
        write_container(std::slice::from_ref(&x), &BTreeMap::new(), Vec::new()).unwrap(),
    )
    .unwrap();
    let values: Vec<f32> =
        x.elements::<u16>().iter().map(|&b| f32::from_bits(u32::from(b) << 16)).collect();
    let expected = |reciprocal: bool| -> Vec<u16> {
        let mut y = Vec::new();
        for row in values.chunks_exact(128) {
            let max = row.iter().fold(0f32, |a, b| a.max(b.abs()));
            let scale = if reciprocal { max * (1f32 / 448.0) } else { max / 448.0 };
            y.extend(row.iter().map(|&v| {
                let exact = e4m3(nearest(f64::from(v / scale))) * f64::from(scale);
                // A product of 4 and 24 bits: rounded to bf16 once, from its f64 bits.
                let bits = exact.to_bits();
                let half = (1u64 << 44) - 1 + (bits >> 45 & 1);
                let rounded = f64::from_bits((bits + half) >> 45 << 45);
                ((rounded as f32).to_bits() >> 16) as u16
            }));
        }
        y
    };
    assert_ne!(expected(false), expected(true));
    for (arguments, reciprocal) in [
        (&[][..], false),
        (&["--group-rule", "quotient"], false),
        (&["--group-rule", "reciprocal"], true),
    ] {
        let paths = [&model, &file, &out].map(|p| p.to_str().unwrap());
        let all = ["run", "--json", paths[0], "--input", paths[1], "--output", paths[2]];
        let _ = json_of(&[&all[..], arguments].concat());
        let bytes = fs::read(&out).unwrap();
        let y = Container::parse(&bytes).unwrap();
        let y = y.tensor("y").unwrap().elements::<u16>().to_vec();
        assert_eq!(y, expected(reciprocal), "{arguments:?}");
    }
}
