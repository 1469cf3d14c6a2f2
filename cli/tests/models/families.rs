//! Model families through `convert` and `run`: transformers' blocks with their experts in 8 bits,
//! and the models that must be rejected or labelled.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use crate::common::runs::{run as convert, settings};
use crate::common::{Format, write_model};
use crate::support::{run, stderr, stdout};
use marlinspike::container::{Container, write_container};
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike_model::convert::parallel::Ranks;
use marlinspike_model::convert::plan::Settings;
use marlinspike_model::convert::target::int4;
use serde_json::{Value, json};

/// Rows and columns of a matrix, padded with zeros to multiples of Marlin's tiles.
const PADDED: usize = 128;
const GROUP: usize = 32;

fn widen(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

fn bf16_up(x: f32) -> u16 {
    ((x.to_bits() + 0xffff) >> 16) as u16
}

/// One block of a model as transformers computed it.
struct Block {
    name: String,
    bytes: Vec<u8>,
}

/// An expert's matrices `[N, K]` and biases.
struct Expert {
    matrices: [Vec<f32>; 3],
    biases: Option<[Vec<f32>; 3]>,
}

/// Blocks with parts that quantized layers do not have: norms, projections and factors around the
/// experts, inputs besides the logits. `model/tests/convert/blocks.rs` tests what `run` says of them.
const FURTHER: &[&str] = &[
    "axk1-small",
    "deepseek_v4-hash-small",
    "ernie4_5_vl_moe-small",
    "gemma4_text-small",
    "inkling-small",
    "inkling2-small",
    "muse_spark-small",
    "nemotron_h-latent-small",
    "zaya-skip-small",
];

impl Block {
    fn all() -> Vec<Self> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../golden/data/routers");
        let mut files: Vec<PathBuf> =
            fs::read_dir(root).unwrap().map(|e| e.unwrap().path()).collect();
        files.sort();
        let read = |p: &PathBuf| Self {
            name: p.file_stem().unwrap().to_str().unwrap().to_owned(),
            bytes: fs::read(p).unwrap(),
        };
        let blocks = files.iter().map(read);
        blocks.filter(|b| !FURTHER.contains(&b.name.as_str())).collect()
    }

    fn file(&self) -> Container<'_> {
        Container::parse(&self.bytes).unwrap()
    }

    fn floats(&self, name: &str) -> (Vec<usize>, Vec<f32>) {
        let file = self.file();
        let t = file.tensor(name).unwrap();
        let values = match t.dtype() {
            DType::BF16 => t.elements::<u16>().iter().map(|&b| widen(b)).collect(),
            _ => t.elements::<f32>().into_owned(),
        };
        (t.shape().to_vec(), values)
    }

    fn has(&self, name: &str) -> bool {
        self.file().get(name).is_some()
    }

    /// The module of the block's experts below the layer, found by its tensors.
    fn parent(&self) -> String {
        let names = ["mlp", "block_sparse_moe", "feed_forward"];
        let file = self.file();
        let of = |p: &&&str| {
            file.tensors().any(|t| t.unwrap().name().starts_with(&format!("in.{p}.experts.")))
        };
        (*names.iter().find(of).unwrap()).to_owned()
    }

    fn sizes(&self) -> (usize, usize, usize) {
        let [_, hidden] = self.file().tensor("in.hidden_states").unwrap().dims2().unwrap();
        let [_, experts] = self.file().tensor("out.router_logits").unwrap().dims2().unwrap();
        let config: Value = serde_json::from_str(&self.file().metadata()["config.json"]).unwrap();
        (hidden, config["moe_intermediate_size"].as_u64().unwrap() as usize, experts)
    }

    fn expert(&self, e: usize) -> Expert {
        let (hidden, inner, _) = self.sizes();
        let parent = self.parent();
        let each = ["gate_proj", "up_proj", "down_proj"];
        let names = if self.has(&format!("in.{parent}.experts.0.w1.weight")) {
            ["w1", "w3", "w2"]
        } else {
            each
        };
        if self.has(&format!("in.{parent}.experts.0.{}.weight", names[0])) {
            let matrices =
                names.map(|n| self.floats(&format!("in.{parent}.experts.{e}.{n}.weight")).1);
            return Expert { matrices, biases: None };
        }
        // Fused [E, H, 2I] and [E, I, H]: halves; for gpt-oss, alternating columns.
        let interleaved = self.name.starts_with("gpt_oss");
        let (_, gate_up) = self.floats(&format!("in.{parent}.experts.gate_up_proj"));
        let (_, down) = self.floats(&format!("in.{parent}.experts.down_proj"));
        let column = |up: usize, i: usize| if interleaved { 2 * i + up } else { up * inner + i };
        let side = |up: usize| {
            let mut m = Vec::new();
            for i in 0..inner {
                let of = |h: usize| gate_up[(e * hidden + h) * 2 * inner + column(up, i)];
                m.extend((0..hidden).map(of));
            }
            m
        };
        let mut w2 = Vec::new();
        for h in 0..hidden {
            w2.extend((0..inner).map(|i| down[(e * inner + i) * hidden + h]));
        }
        let bias = format!("in.{parent}.experts.gate_up_proj_bias");
        let biases = self.has(&bias).then(|| {
            let (_, gate_up) = self.floats(&bias);
            let (_, down) = self.floats(&format!("in.{parent}.experts.down_proj_bias"));
            let side =
                |up: usize| (0..inner).map(|i| gate_up[e * 2 * inner + column(up, i)]).collect();
            [side(0), side(1), down[e * hidden..][..hidden].to_vec()]
        });
        Expert { matrices: [side(0), side(1), w2], biases }
    }

    /// Writes the block as a model whose experts are 8-bit integers, and the input of `run`.
    fn write(&self, dir: &Path, change: impl FnOnce(&mut Value)) {
        self.write_bits(dir, 8, change);
    }

    /// [`Block::write`] with experts of `bits` bits.
    fn write_bits(&self, dir: &Path, bits: u32, change: impl FnOnce(&mut Value)) {
        fs::create_dir_all(dir).unwrap();
        let file = self.file();
        let prefix = &file.metadata()["layer_prefix"];
        let (hidden, inner, experts) = self.sizes();
        let parent = self.parent();
        let mut tensors = Vec::new();
        for t in file.tensors() {
            let t = t.unwrap();
            let Some(name) = t.name().strip_prefix("in.") else { continue };
            let alias = ["hidden_states", "router_weight", "correction_bias"].contains(&name);
            let expert = name.starts_with(&format!("{parent}.experts."));
            let kept = !expert || name.ends_with("e_score_correction_bias");
            if !alias && kept {
                let full = format!("{prefix}{name}");
                tensors.push(padded(&t, hidden).renamed(full));
            }
        }
        let w123 = self.has(&format!("in.{parent}.experts.0.w1.weight"));
        let names = if w123 { ["w1", "w3", "w2"] } else { ["gate_proj", "up_proj", "down_proj"] };
        for e in 0..experts {
            let expert = self.expert(e);
            for (j, name) in names.iter().enumerate() {
                let (n, k) = if j == 2 { (hidden, inner) } else { (inner, hidden) };
                let module = format!("{prefix}{parent}.experts.{e}.{name}");
                tensors.extend(quantized(&module, &expert.matrices[j], (n, k), bits));
                if let Some(biases) = &expert.biases {
                    let mut bias: Vec<u16> =
                        biases[j].iter().map(|x| (x.to_bits() >> 16) as u16).collect();
                    bias.resize(PADDED, 0);
                    let name = format!("{module}.bias");
                    tensors.push(Tensor::from_vec(name, DType::BF16, vec![PADDED], bias).unwrap());
                }
            }
        }
        let bytes = write_container(&tensors, &BTreeMap::new(), Vec::new()).unwrap();
        fs::write(dir.join("model.safetensors"), bytes).unwrap();
        let mut config: Value = serde_json::from_str(&file.metadata()["config.json"]).unwrap();
        config["quantization_config"] = json!({"quant_method": "compressed-tensors",
            "format": "pack-quantized", "ignore": [], "config_groups": {"group_0": {
            "targets": ["Linear"], "input_activations": null, "weights": {"num_bits": bits,
            "type": "int", "symmetric": true, "strategy": "group", "group_size": GROUP,
            "dynamic": false}}}});
        change(&mut config);
        fs::write(dir.join("config.json"), config.to_string()).unwrap();
        let (shape, x) = self.floats("in.hidden_states");
        let mut padded = Vec::new();
        for row in x.chunks_exact(hidden) {
            padded.extend(row.iter().map(|v| (v.to_bits() >> 16) as u16));
            padded.extend(std::iter::repeat_n(0, PADDED - hidden));
        }
        let inputs = [
            Tensor::from_vec("x", DType::BF16, vec![shape[0], PADDED], padded).unwrap(),
            file.tensor("out.router_logits").unwrap().renamed("router_logits"),
        ];
        let bytes = write_container(&inputs, &BTreeMap::new(), Vec::new()).unwrap();
        fs::write(dir.join("input.st"), bytes).unwrap();
    }
}

/// A tensor with its dimensions of `hidden` features padded with zeros to [`PADDED`].
fn padded(tensor: &Tensor<'_>, hidden: usize) -> Tensor<'static> {
    let [n, k] = *tensor.shape() else { return tensor.clone().into_owned() };
    let size = |d: usize| if d == hidden { PADDED } else { d };
    let width = tensor.dtype().bytes();
    let mut bytes = vec![0u8; size(n) * size(k) * width];
    for row in 0..n {
        let own = &tensor.bytes()[row * k * width..(row + 1) * k * width];
        bytes[row * size(k) * width..][..own.len()].copy_from_slice(own);
    }
    Tensor::new(tensor.name(), tensor.dtype(), vec![size(n), size(k)], bytes).unwrap()
}

/// `[n, k]` as codes of `bits` bits in groups along k, padded with zeros.
fn quantized(
    module: &str,
    values: &[f32],
    (n, k): (usize, usize),
    bits: u32,
) -> [Tensor<'static>; 3] {
    let (half, per_word) = (1u32 << (bits - 1), 32 / bits as usize);
    let at = |r: usize, c: usize| if r < n && c < k { values[r * k + c] } else { 0.0 };
    let (mut codes, mut scales) = (Vec::new(), Vec::new());
    for r in 0..PADDED {
        for g in 0..PADDED / GROUP {
            let group: Vec<f32> = (0..GROUP).map(|i| at(r, g * GROUP + i)).collect();
            let max = group.iter().fold(1e-6f32, |m, x| m.max(x.abs()));
            let scale = bf16_up(max / (half - 1) as f32);
            scales.push(scale);
            codes.extend(group.iter().map(|x| ((x / widen(scale)).round() + half as f32) as u32));
        }
    }
    let words: Vec<i32> = codes.chunks_exact(per_word).map(|c| word(c, bits)).collect();
    let side = PADDED as i64;
    [
        Tensor::from_vec(
            format!("{module}.weight_packed"),
            DType::I32,
            vec![PADDED, PADDED / per_word],
            words,
        ),
        Tensor::from_vec(
            format!("{module}.weight_scale"),
            DType::BF16,
            vec![PADDED, PADDED / GROUP],
            scales,
        ),
        Tensor::from_vec(format!("{module}.weight_shape"), DType::I64, vec![2], vec![side, side]),
    ]
    .map(Result::unwrap)
}

/// Codes in a word, the first in the lowest bits.
fn word(codes: &[u32], bits: u32) -> i32 {
    codes.iter().rev().fold(0u32, |word, code| word.checked_shl(bits).unwrap_or(0) | code) as i32
}

/// `run --json --check` of a converted folder, and y.
fn run_block(out: &Path, model: &Path, more: &[&str]) -> (Value, Vec<f32>) {
    let y = model.join("y.st");
    let mut arguments = vec!["run", out.to_str().unwrap(), "--json", "--check", "--input"];
    let input = model.join("input.st");
    arguments.extend([input.to_str().unwrap(), "--output", y.to_str().unwrap()]);
    arguments.extend(more);
    let output = run(&arguments);
    assert_eq!((output.status.code(), stderr(&output)), (Some(0), ""), "{}", stdout(&output));
    (serde_json::from_str(stdout(&output)).unwrap(), written(&y, "y"))
}

/// A tensor of an output file, widened.
fn written(path: &Path, name: &str) -> Vec<f32> {
    let bytes = fs::read(path).unwrap();
    let file = Container::parse(&bytes).unwrap();
    let tensor = file.tensor(name).unwrap();
    tensor.elements::<u16>().iter().map(|&b| widen(b)).collect()
}

/// The error of `found`, whose rows are padded, relative to `expected`.
fn relative_error(found: &[f32], expected: &[f32], hidden: usize) -> f64 {
    let (mut error, mut size) = (0.0, 0.0);
    for (f, e) in found.chunks_exact(PADDED).zip(expected.chunks_exact(hidden)) {
        assert!(f[hidden..].iter().all(|x| *x == 0.0));
        for (f, e) in f.iter().zip(e) {
            error += f64::from(f - e).powi(2);
            size += f64::from(*e).powi(2);
        }
    }
    (error / size).sqrt()
}

#[test]
fn converted_blocks_give_transformers_outputs() {
    let temp = tempfile::tempdir().unwrap();
    let blocks = Block::all();
    assert!(blocks.len() >= 11);
    for block in &blocks {
        let (model, out) =
            (temp.path().join(&block.name), temp.path().join(format!("{}-out", block.name)));
        block.write(&model, |_| {});
        convert(&model, &out, &settings()).unwrap();
        let (report, y) = run_block(&out, &model, &[]);
        let error = relative_error(&y, &block.floats("out.y").1, block.sizes().0);
        assert!(error < 0.012, "{}: {error}", block.name);
        assert_eq!(report["routing"]["check"], json!({"ids": 0, "weights": 0, "first": null}));
        // The input has the logits; without them the router's own weight gives the same experts.
        assert_eq!(report.get("router_logits"), None);
        let shared = block.file().tensors().any(|t| t.unwrap().name().contains(".shared_expert"));
        assert_eq!(report.get("y_experts").is_some(), shared, "{}: {report}", block.name);
        let bytes = fs::read(model.join("input.st")).unwrap();
        let file = Container::parse(&bytes).unwrap();
        let x = file.tensor("x").unwrap();
        fs::write(
            model.join("input.st"),
            write_container(&[x], &BTreeMap::new(), Vec::new()).unwrap(),
        )
        .unwrap();
        let (report, y) = run_block(&out, &model, &[]);
        assert_eq!(report["router_logits"]["check"]["mismatches"], json!(0), "{}", block.name);
        let error = relative_error(&y, &block.floats("out.y").1, block.sizes().0);
        assert!(error < 0.012, "{}: {error}", block.name);
    }
}

/// Every family on the int4 path: the packed file alone routes and activates as the family does.
#[test]
fn blocks_of_four_bits_run_from_packed_files() {
    let temp = tempfile::tempdir().unwrap();
    let kleidi = Settings { format: int4::FORMAT, ..settings() };
    for block in &Block::all() {
        let (model, out) =
            (temp.path().join(&block.name), temp.path().join(format!("{}-out", block.name)));
        block.write_bits(&model, 4, |_| {});
        let output = run(["inspect", model.to_str().unwrap(), "--json"]);
        assert_eq!(output.status.code(), Some(0), "{}: {}", block.name, stderr(&output));
        convert(&model, &out, &kleidi).unwrap();
        // The file without its folder: nothing but its metadata states the routing.
        let file = temp.path().join(format!("{}.safetensors", block.name));
        fs::copy(out.join("model.safetensors"), &file).unwrap();
        let (report, packed) = run_block(&file, &model, &[]);
        assert_eq!(report["check"]["mismatches"], json!(0), "{}: {report}", block.name);
        let clean = json!({"ids": 0, "weights": 0, "first": null});
        assert_eq!(report["routing"]["check"], clean, "{}", block.name);
        // Packed when it is read: the same bits.
        let (_, unpacked) = run_block(&model, &model, &["--threads", "2"]);
        let bits = |y: &[f32]| y.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&packed), bits(&unpacked), "{}", block.name);
        // The checkpoint's method on the same weights, by the other path and its own routing.
        let (report, mut exact) = run_block(&model, &model, &["--arithmetic", "exact"]);
        if report.get("y_experts").is_some() {
            // The int4 path gives the sum over the routed experts.
            exact = written(&model.join("y.st"), "y_experts");
        }
        let error = relative_error(&packed, &exact, PADDED);
        assert!(error < 0.03, "{}: {error}", block.name);
    }
}

/// Expects exit code 2 and a message with every part.
fn refused(arguments: &[&str], parts: &[&str]) {
    let output = run(arguments);
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{text} {}", stdout(&output));
    assert_eq!(stdout(&output), "");
    assert!(parts.iter().all(|p| text.contains(p)), "{arguments:?}: {text}");
}

#[test]
fn an_unknown_model_type_is_refused_and_can_be_stated() {
    let temp = tempfile::tempdir().unwrap();
    let block = Block::all().into_iter().find(|b| b.name == "glm4_moe-groups").unwrap();
    let path = |name: &str| temp.path().join(name).to_str().unwrap().to_owned();
    let known = temp.path().join("known");
    block.write(&known, |_| {});
    convert(&known, &temp.path().join("known-out"), &settings()).unwrap();
    let (right, _) = run_block(&temp.path().join("known-out"), &known, &[]);

    let model = temp.path().join("model");
    block.write(&model, |c| c["model_type"] = json!("glm9_moe"));
    convert(&model, &temp.path().join("out"), &settings()).unwrap();
    refused(&["run", &path("out")], &["glm9_moe", "not known", "--routing FILE"]);
    // The layer is still inspected, and the reason is stated.
    let output = run(["inspect", &path("model"), "--json"]);
    let found: Value = serde_json::from_str(stdout(&output)).unwrap();
    assert!(found["routing"][0]["error"].as_str().unwrap().contains("glm9_moe"), "{found}");

    let routing = path("routing.json");
    let state = |value: Value| fs::write(&routing, value.to_string()).unwrap();
    let rule = json!({"scoring_func": "sigmoid", "top_k": 4, "renormalize": true, "n_group": 4,
        "topk_group": 2, "correction_bias": "gate.e_score_correction_bias"});
    state(rule.clone());
    let (stated, _) = run_block(&temp.path().join("out"), &model, &["--routing", &routing]);
    // The shared expert belongs to the family, which the stated rule replaces.
    assert_eq!(stated["sha256"], right["y_experts"]["sha256"]);
    assert_eq!(stated["routing"]["source"], "--routing");
    // It also overrides a family's rule.
    let mut other = rule.clone();
    other["top_k"] = json!(2);
    state(other);
    let (changed, _) = run_block(&temp.path().join("known-out"), &known, &["--routing", &routing]);
    assert_ne!(changed["sha256"], right["sha256"]);
    assert_eq!(changed["sizes"]["top_k"], 2);
    // The error names the wrong key.
    let with = |key: &str, value: Value| {
        let mut all = rule.clone();
        all[key] = value;
        state(all);
    };
    with("scoring_fun", json!("sigmoid"));
    refused(
        &["run", &path("out"), "--routing", &routing],
        &["scoring_fun", "`scoring_func`", "routing.json"],
    );
    with("correction_bias", json!("gate.bias"));
    refused(&["run", &path("out"), "--routing", &routing], &["mlp.gate.bias", "missing"]);
    with("top_k", json!(17));
    refused(&["run", &path("out"), "--routing", &routing], &["top_k", "17", "16"]);
    refused(&["run", &path("out"), "--routing", &path("none.json")], &["none.json"]);

    // A bias that the family's rule does not have must not be ignored.
    let strange = temp.path().join("strange");
    block.write(&strange, |c| c["model_type"] = json!("qwen3_moe"));
    convert(&strange, &temp.path().join("strange-out"), &settings()).unwrap();
    refused(&["run", &path("strange-out")], &["e_score_correction_bias", "qwen3_moe"]);
    // A number of experts that differs from the files'.
    let fewer = temp.path().join("fewer");
    block.write(&fewer, |c| c["n_routed_experts"] = json!(12));
    convert(&fewer, &temp.path().join("fewer-out"), &settings()).unwrap();
    refused(&["run", &path("fewer-out")], &["found 12 experts", "16"]);
}

/// A model with one FP8 tensor for all experts, and with a dense layer if `dense` is set.
fn write_fused(dir: &Path, dense: bool) {
    fs::create_dir_all(dir).unwrap();
    let fp8 = |name: &str, shape: Vec<usize>| {
        let len = shape.iter().product();
        Tensor::from_vec(name, DType::F8E4M3, shape, vec![0x38u8; len]).unwrap()
    };
    let layer = "model.layers.0";
    let scale = |name: String, shape: Vec<usize>| {
        let len = shape.iter().product();
        Tensor::from_vec(name, DType::F32, shape, vec![0.5f32; len]).unwrap()
    };
    let experts = format!("{layer}.mlp.experts");
    let mut tensors = vec![
        fp8(&format!("{experts}.gate_up_proj"), vec![2, 256, 128]),
        scale(format!("{experts}.gate_up_proj_weight_scale"), vec![2]),
        fp8(&format!("{experts}.down_proj"), vec![2, 128, 128]),
        scale(format!("{experts}.down_proj_weight_scale"), vec![2]),
    ];
    if dense {
        tensors.push(fp8(&format!("{layer}.self_attn.o_proj.weight"), vec![128, 128]));
        tensors.push(scale(format!("{layer}.self_attn.o_proj.weight_scale_inv"), vec![1, 1]));
    }
    let bytes = write_container(&tensors, &BTreeMap::new(), Vec::new()).unwrap();
    fs::write(dir.join("model.safetensors"), bytes).unwrap();
    let config = json!({"model_type": "qwen3_5_moe", "dtype": "bfloat16", "num_experts_per_tok": 1,
        "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic",
        "weight_block_size": [128, 128]}});
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
}

#[test]
fn fused_experts_are_never_skipped() {
    let temp = tempfile::tempdir().unwrap();
    let path = |name: &str| temp.path().join(name).to_str().unwrap().to_owned();
    write_fused(&temp.path().join("alone"), false);
    write_fused(&temp.path().join("dense"), true);
    let experts = "model.layers.0.mlp.experts";
    for model in ["alone", "dense"] {
        for target in ["marlin", "kleidiai"] {
            let arguments = ["convert", &path(model), &path("out"), "--to", target];
            refused(&arguments, &[experts, "gate_up_proj"]);
        }
        refused(&["run", &path(model)], &[experts, "gate_up_proj", "fused"]);
        refused(&["run", &path(model), "--layer", experts], &[experts, "gate_up_proj"]);
        let output = run(["inspect", &path(model), "--json"]);
        let found: Value = serde_json::from_str(stdout(&output)).unwrap();
        assert_eq!(found["fused_experts"][0]["module"], experts);
        assert!(stdout(&run(["inspect", &path(model)])).contains("fused experts"));
    }
    // A conversion without any converted layer is an error, even if experts may be copied.
    let skip = "--skip-unsupported";
    refused(
        &["convert", &path("alone"), &path("out"), "--to", "marlin", skip],
        &["none of the modules", experts],
    );
    assert!(!Path::new(&path("out/config.json")).exists());
    let output = run(["convert", &path("dense"), &path("out"), "--to", "marlin", skip]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(stdout(&output).contains(experts));
    // The converted folder records that its experts were copied.
    refused(&["run", &path("out")], &[experts, "copied unconverted"]);
    let output = run(["run", &path("out"), "--layer", "model.layers.0.self_attn.o_proj", "--json"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    // The method quantizes activations; Marlin's format does not.
    assert!(
        stdout(&output).contains("differs from the checkpoint's method"),
        "{}",
        stdout(&output)
    );
}

#[test]
fn a_ranks_output_is_labelled() {
    let temp = tempfile::tempdir().unwrap();
    let model = temp.path().join("model");
    write_model(Format::CtPack, &model);
    let kleidi = Settings { format: int4::FORMAT, ..settings() };
    let experts = "model.layers.0.mlp.experts";
    let linear = "model.layers.0.self_attn.o_proj";
    let report = |model: &Path, layer: &str| -> Value {
        let output =
            run(["run", model.to_str().unwrap(), "--json", "--layer", layer, "--tokens", "3"]);
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        serde_json::from_str(stdout(&output)).unwrap()
    };
    let ranked = |name: &str, tp: usize, ep: usize| {
        let out = temp.path().join(name);
        let ranks = |size: usize| Ranks { size, rank: size - 1 };
        convert(&model, &out, &Settings { tp: ranks(tp), ep: ranks(ep), ..kleidi.clone() })
            .unwrap();
        out
    };
    let whole = ranked("whole", 1, 1);
    assert_eq!(report(&whole, experts)["partial"], Value::Null);
    let ep = ranked("ep", 1, 2);
    let tp = ranked("tp", 2, 1);
    // By the folder, and by the file alone in another folder.
    for (out, file) in [(&ep, "ep.safetensors"), (&tp, "tp.safetensors")] {
        fs::copy(out.join("model.safetensors"), temp.path().join(file)).unwrap();
    }
    for place in [ep.clone(), temp.path().join("ep.safetensors")] {
        let found = report(&place, experts);
        let partial = &found["partial"];
        assert_eq!((&partial["ep_rank"], &partial["ep_size"]), (&json!(1), &json!(2)), "{found}");
        assert_eq!((&partial["local_experts"], &partial["num_experts"]), (&json!(1), &json!(3)));
        assert_eq!(report(&place, linear)["partial"], Value::Null);
        let output = run(["run", place.to_str().unwrap()]);
        assert!(
            stdout(&output).contains("PARTIAL: expert-parallel rank 1 of 2"),
            "{}",
            stdout(&output)
        );
    }
    for place in [tp.clone(), temp.path().join("tp.safetensors")] {
        for layer in [experts, linear] {
            let partial = &report(&place, layer)["partial"];
            assert_eq!((&partial["tp_rank"], &partial["tp_size"]), (&json!(1), &json!(2)));
        }
        let column = "model.layers.0.self_attn.q_proj";
        assert_eq!(report(&place, linear)["partial"]["y"], "partial sum");
        assert_eq!(report(&place, column)["partial"]["y"], "columns");
        let output = run(["run", place.to_str().unwrap(), "--layer", linear]);
        assert!(
            stdout(&output).contains("PARTIAL: tensor-parallel rank 1 of 2"),
            "{}",
            stdout(&output)
        );
    }
}

#[test]
fn arithmetic_that_differs_from_the_method_is_announced() {
    let temp = tempfile::tempdir().unwrap();
    let model = temp.path().join("model");
    write_model(Format::CtPack, &model);
    let kleidi = Settings { format: int4::FORMAT, ..settings() };
    let said = |model: &Path, more: &[&str]| {
        let arguments = [&["run", model.to_str().unwrap()], more].concat();
        let text = stdout(&run(&arguments)).to_owned();
        let json = stdout(&run([&arguments[..], &["--json"]].concat())).to_owned();
        let value: Value = serde_json::from_str(&json).unwrap();
        let found = value["arithmetic"].as_str().unwrap().to_owned();
        assert!(text.contains(&format!("arithmetic: {found}")), "{text}");
        found
    };
    convert(&model, &temp.path().join("w4a16"), &kleidi).unwrap();
    for place in [&model, &temp.path().join("w4a16"), &temp.path().join("w4a16/model.safetensors")]
    {
        let found = said(place, &[]);
        assert!(found.contains("int8 activations") && found.contains("W4A16"), "{found}");
    }
    let found = said(&model, &["--arithmetic", "exact"]);
    assert!(!found.contains("int8"), "{found}");
    // A checkpoint that quantizes its activations itself.
    let config = model.join("config.json");
    let mut value: Value = serde_json::from_slice(&fs::read(&config).unwrap()).unwrap();
    value["quantization_config"]["config_groups"]["group_0"]["input_activations"] = json!({
        "num_bits": 8, "type": "int", "symmetric": true, "strategy": "token", "dynamic": true});
    fs::write(&config, value.to_string()).unwrap();
    let found = said(&model, &[]);
    assert!(found.contains("int8 activations") && !found.contains("W4A16"), "{found}");
}
