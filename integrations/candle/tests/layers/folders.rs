//! Layers of converted folders, against the same layers packed in memory from the checkpoint.

use std::fs;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Module as _, Tensor};
use half::bf16;
use marlinspike::moe::math;
use marlinspike::w4a8::Values;
use marlinspike::w4a8::linears::LinearOptions;
use marlinspike::w4a8::moe::{ExpertOptions, Mode};
use marlinspike_bench::tile::activations;
use marlinspike_candle::{Error, PackedFolder};
use marlinspike_model::convert;
use marlinspike_model::convert::settings::{Format, Options};
use marlinspike_model::convert::target::int4;
use marlinspike_model::model::routing::MoeRouting;
use marlinspike_model::model::{Model, ModelFiles, values};
use marlinspike_model::run::pack::Packer;

use crate::common::{ROUNDING, bits, lanes, pool};

const OPTIONS: LinearOptions<'static> = LinearOptions { rounding: ROUNDING, kernel: None };

/// Tiny models with int4 experts, and the place of a block in each.
const MODELS: [(&str, &str); 4] = [
    ("qwen3-moe-tiny", "model.layers.1.mlp"),
    ("mixtral-tiny", "model.layers.1.block_sparse_moe"),
    ("deepseek-v3-tiny", "model.layers.1.mlp"),
    ("deepseek-v2-tiny", "model.layers.0.mlp"),
];

fn checkpoint(name: &str) -> PathBuf {
    marlinspike_golden::find_root().unwrap().join("data/models").join(name)
}

/// A converted model in a folder of its own.
fn packed(name: &str) -> (tempfile::TempDir, PathBuf) {
    let temp = tempfile::tempdir().unwrap();
    let out = temp.path().join("packed");
    convert(&checkpoint(name), &out, &Options::new(int4::FORMAT), &()).unwrap();
    (temp, out)
}

fn drawn(rows: usize, width: usize, dtype: DType) -> Tensor {
    let x = Tensor::from_vec(activations(rows * width, 9), (rows, width), &Device::Cpu).unwrap();
    x.to_dtype(dtype).unwrap()
}

fn typed(dtype: DType, values: &[f32]) -> Values {
    match dtype {
        DType::BF16 => Values::Bf16(values.iter().map(|&v| bf16::from_f32(v).to_bits()).collect()),
        _ => Values::F32(values.to_vec()),
    }
}

fn round(dtype: DType, value: f32) -> f32 {
    if dtype == DType::BF16 { bf16::from_f32(value).to_f32() } else { value }
}

/// The block `place` of a checkpoint, row by row: router in the documented order, routing by the family's
/// rule, experts and shared expert by the scalar definition.
fn defined_block(model: &Model<'_>, place: &str, x: &[f32], dtype: DType) -> Vec<f32> {
    let packer = Packer::new(model).unwrap();
    let floats = |name: &str| values::floats(&model.tensor(name).unwrap()).unwrap();
    let module = format!("{place}.experts");
    let options = ExpertOptions { rounding: ROUNDING, mode: Mode::Extended, kernel: None };
    let layer = packer.experts(&module, options).unwrap();
    let experts = layer.num_experts();
    let routing = MoeRouting::read(model, &module, experts, false).unwrap();
    let is_f32 = model.config["model_type"].as_str().unwrap().starts_with("deepseek");
    let ty = if is_f32 { DType::F32 } else { dtype };
    let logits = lanes(x, &floats(&format!("{place}.gate.weight")));
    let logits: Vec<f32> = logits.into_iter().map(|l| round(ty, l)).collect();
    let routed = routing.route(&logits, experts).unwrap();
    let row = typed(dtype, x);
    let mut y = layer.definition(&row, routed.routed().unwrap()).unwrap().to_f32();
    let shared = format!("{place}.shared_experts");
    if !packer.modules().any(|m| m.starts_with(&shared)) {
        assert!(model.entries().all(|e| !e.name().starts_with(&shared)), "an unquantized expert");
        return y;
    }
    let product = |name: &str, x: &Values| {
        let linear = packer.linear(&format!("{shared}.{name}"), OPTIONS).unwrap();
        linear.definition(x).unwrap().to_f32()
    };
    let (gate, up) = (product("gate_proj", &row), product("up_proj", &row));
    let inner = gate.iter().zip(&up).map(|(&g, &u)| round(dtype, g / (1.0 + math::exp(-g)) * u));
    let inner: Vec<f32> = inner.collect();
    for (y, s) in y.iter_mut().zip(product("down_proj", &typed(dtype, &inner))) {
        *y = round(dtype, *y + s);
    }
    y
}

#[test]
fn blocks_of_families_have_the_checkpoints_bits() {
    for (name, place) in MODELS {
        let (temp, out) = packed(name);
        let folder = PackedFolder::open(&out).unwrap();
        let block = folder.moe_block(&format!("{place}.experts")).unwrap();
        // Layers keep the files mapped, even of a folder that was removed.
        drop((folder, temp));
        let files = ModelFiles::open(&checkpoint(name)).unwrap();
        let model = Model::new(&files).unwrap();
        assert_eq!(block.shared_expert().is_some(), name.starts_with("deepseek"), "{name}");
        let hidden = block.experts().hidden_size();
        for dtype in [DType::F32, DType::BF16] {
            let x = drawn(7, hidden, dtype);
            let rows: Vec<Vec<f32>> = x.to_dtype(DType::F32).unwrap().to_vec2().unwrap();
            let rows = rows.iter().flat_map(|row| defined_block(&model, place, row, dtype));
            let expected: Vec<u32> = rows.map(f32::to_bits).collect();
            for threads in 1..=3 {
                let y = pool(threads).install(|| block.forward(&x)).unwrap();
                assert!(bits(&y) == expected, "{name} {dtype:?}, {threads} threads");
            }
            for cut in 1..7 {
                let parts = [x.narrow(0, 0, cut).unwrap(), x.narrow(0, cut, 7 - cut).unwrap()];
                let made = parts.iter().flat_map(|part| bits(&block.forward(part).unwrap()));
                assert!(made.collect::<Vec<_>>() == expected, "{name} {dtype:?}, cut at {cut}");
            }
        }
    }
}

/// Every packed module of every model: linear layers against the checkpoint's, experts load.
#[test]
fn every_layer_loads_by_its_name() {
    for (name, _) in MODELS {
        let (_temp, out) = packed(name);
        let folder = PackedFolder::open(&out).unwrap();
        let files = ModelFiles::open(&checkpoint(name)).unwrap();
        let model = Model::new(&files).unwrap();
        let packer = Packer::new(&model).unwrap();
        let names: Vec<&str> = packer.modules().collect();
        assert_eq!(folder.modules().collect::<Vec<_>>(), names, "{name}");
        for module in names {
            if module.ends_with(".experts") {
                assert!(folder.experts(module).unwrap().num_experts() > 1);
                continue;
            }
            let linear = folder.linear(module).unwrap();
            let x = drawn(3, linear.size_k(), DType::F32);
            let own = packer.linear(module, OPTIONS).unwrap();
            let rows = Values::F32(x.flatten_all().unwrap().to_vec1().unwrap());
            let expected = own.definition(&rows).unwrap();
            assert!(bits(&linear.forward(&x).unwrap()) == expected.bits(), "{name} {module}");
        }
    }
}

/// A changed byte of the file changes the output of its layer: the weights are the file's.
#[test]
fn a_wrong_byte_of_the_file_gives_other_bits() {
    let (_temp, out) = packed("qwen3-moe-tiny");
    let module = "model.layers.0.self_attn.q_proj";
    let run = || {
        let linear = PackedFolder::open(&out).unwrap().linear(module).unwrap();
        bits(&linear.forward(&drawn(2, linear.size_k(), DType::F32)).unwrap())
    };
    let right = run();
    let path = out.join("model.safetensors");
    let at = {
        let files = ModelFiles::open(&out).unwrap();
        let model = Model::new(&files).unwrap();
        model.entry(&format!("{module}.rhs_packed")).unwrap().file_range().start as usize
    };
    let mut bytes = fs::read(&path).unwrap();
    bytes[at] ^= 0x11;
    // A new file, because the old one may still be mapped.
    fs::remove_file(&path).unwrap();
    fs::write(&path, bytes).unwrap();
    assert!(run() != right);
}

#[track_caller]
fn refused<T: std::fmt::Debug>(found: Result<T, Error>, expected: &[&str]) {
    let error = found.unwrap_err().to_string();
    for part in expected {
        assert!(error.contains(part), "found {error:?}, expected {part:?}");
    }
}

#[test]
fn other_folders_are_refused() {
    let golden = checkpoint("qwen3-moe-tiny");
    let name = golden.display().to_string();
    refused(PackedFolder::open(&golden), &[&name, "marlinspike convert --to kleidiai"]);
    refused(PackedFolder::open(golden.join("missing")), &["missing"]);
    refused(PackedFolder::open(golden.join("config.json")), &["config.json"]);

    let temp = tempfile::tempdir().unwrap();
    let out = temp.path().join("marlin");
    let awq = marlinspike_golden::find_root().unwrap().join("data/checkpoints/awq");
    convert(&awq, &out, &Options::new(Format::from_name("marlin").unwrap()), &()).unwrap();
    refused(PackedFolder::open(&out), &["marlin", "--to kleidiai"]);

    let (_temp, out) = packed("qwen3-moe-tiny");
    change_config(&out, |section| section["ep_size"] = 2.into());
    refused(PackedFolder::open(&out), &["one rank's part"]);
}

fn change_config(folder: &Path, change: impl FnOnce(&mut serde_json::Value)) {
    let path = folder.join("config.json");
    let mut config: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut config["marlinspike"]);
    fs::write(path, config.to_string()).unwrap();
}

#[test]
fn other_modules_are_refused() {
    let (_temp, out) = packed("qwen3-moe-tiny");
    let folder = PackedFolder::open(&out).unwrap();
    let experts = "model.layers.1.mlp.experts";
    refused(folder.linear("q_proj"), &["`q_proj`", "expected one of model.layers.0.", "…"]);
    refused(folder.linear(experts), &[experts, "linear"]);
    let linear = "model.layers.0.self_attn.q_proj";
    refused(folder.experts(linear), &[linear, "moe"]);
    refused(folder.moe_block(linear), &[linear, "moe"]);
}

/// Experts that `convert` copied: the error has its reasons.
#[test]
fn modules_that_were_not_converted_are_refused() {
    let (_temp, out) = packed("qwen3-moe-tiny");
    let module = "model.layers.9.mlp.experts";
    change_config(&out, |section| {
        let key = format!("{module} w13");
        section["unsupported"] = serde_json::json!({ key: ["found 8 bits, expected 4"] });
    });
    let folder = PackedFolder::open(&out).unwrap();
    let expected = [module, "copied unconverted", "found 8 bits, expected 4"];
    refused(folder.moe_block(module), &expected);
    refused(folder.linear(module), &expected);
}

/// A block whose router is missing or has another shape, and a family that has another router.
#[test]
fn blocks_that_do_not_fit_are_refused() {
    let module = "model.layers.1.mlp.experts";
    let changed = |change: &dyn Fn(&mut serde_json::Value)| {
        let (temp, out) = packed("qwen3-moe-tiny");
        let path = out.join("config.json");
        let mut config: serde_json::Value =
            serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        change(&mut config);
        fs::write(path, config.to_string()).unwrap();
        let made = PackedFolder::open(&out).unwrap().moe_block(module);
        drop(temp);
        made
    };
    assert!(changed(&|_| ()).is_ok());
    refused(changed(&|c| c["model_type"] = "unheard_of".into()), &[module, "unheard_of"]);

    let (_temp, out) = packed("qwen3-moe-tiny");
    let path = out.join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    // The header's names have one length, so one name can be replaced by another.
    let (name, other) = (b"model.layers.1.mlp.gate.weight", b"model.layers.1.mlp.gone.weight");
    let at = bytes.windows(name.len()).position(|w| w == name).unwrap();
    let mut renamed = bytes.clone();
    renamed[at..][..name.len()].copy_from_slice(other);
    fs::remove_file(&path).unwrap();
    fs::write(&path, renamed).unwrap();
    let folder = PackedFolder::open(&out).unwrap();
    assert!(folder.experts(module).is_ok());
    refused(folder.moe_block(module), &[module, "router"]);
}
