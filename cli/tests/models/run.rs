//! `run`: outputs for packed and original checkpoints equal the definition on columns that the
//! test reads from the checkpoint.

use crate::common;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use crate::common::runs::{run as convert, settings};
use crate::common::{EXPERTS, Format, HIDDEN, INTER, files, write_model};
use crate::support::{golden, run, stderr, stdout};
use marlinspike::case::{Activation, ActivationRounding, ScoringFunc};
use marlinspike::container::{Container, write_container};
use marlinspike::layouts::kleidi::{Columns, PackedRhs, RhsLayout};
use marlinspike::moe::router::Router;
use marlinspike::num::array::rows_of;
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::w4a8::moe::{Layer, Mode};
use marlinspike::w4a8::scalar::Scalar;
use marlinspike::w4a8::{self, Values};
use marlinspike::weight::Weight;
use marlinspike_model::convert::plan::Settings;
use marlinspike_model::convert::target::int4;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

const EXPERT_LAYER: &str = "model.layers.0.mlp.experts";
const LINEAR: &str = "model.layers.0.self_attn.o_proj";
const ROUNDING: ActivationRounding = ActivationRounding::HalfAway;
const TOKENS: usize = 5;

fn kleidi(nr: usize) -> Settings {
    let format = int4::FORMAT.with("nr", &nr.to_string()).expect("4 or 8");
    Settings { format, ..settings() }
}

/// The weights side by side, packed by the definition.
fn packed(weights: &[&Weight<'_>]) -> PackedRhs<'static> {
    let first = weights[0];
    let (size_k, group) = (first.shape().size_k, first.groups.group_size());
    let rows = group.rows(first.shape().k());
    let (mut codes, mut scales) = (Vec::new(), Vec::new());
    for w in weights {
        for n in 0..w.shape().size_n {
            codes.extend((0..size_k).map(|k| w.codes.get(k, n) as i8 - 8));
            scales.extend((0..size_k / rows).map(|g| w.scales.bits(g, n) as u16));
        }
    }
    let shape = Shape::new(size_k, codes.len() / size_k);
    let layout = RhsLayout::new(shape, group, 8).unwrap();
    let columns = Columns::group_wise(shape, rows, codes, scales, None).unwrap();
    layout.pack(&columns).unwrap()
}

/// Numbers between −2 and 2 that every float type holds.
fn numbers(seed: &str, len: usize) -> Vec<f32> {
    let mut noise = common::Noise::new(seed);
    (0..len).map(|_| (noise.next() >> 8 & 0xff) as f32 / 64.0 - 2.0).collect()
}

fn bf16(values: &[f32]) -> Vec<u16> {
    values.iter().map(|x| (x.to_bits() >> 16) as u16).collect()
}

fn write(path: &Path, tensors: &[Tensor<'_>]) -> PathBuf {
    let bytes = write_container(tensors, &BTreeMap::new(), Vec::new()).unwrap();
    fs::write(path, bytes).unwrap();
    path.to_owned()
}

fn f32s(name: &str, shape: [usize; 2], values: &[f32]) -> Tensor<'static> {
    Tensor::from_vec(name, DType::F32, shape.to_vec(), values.to_vec()).unwrap()
}

fn digest(y: &Values) -> String {
    let bytes: Vec<u8> = match y {
        Values::F32(v) => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
        Values::Bf16(v) => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
    };
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

/// The output of `run --json` with these arguments, which must succeed.
fn report<S: AsRef<std::ffi::OsStr>>(arguments: &[S]) -> Value {
    let given = arguments.iter().map(|a| a.as_ref().to_owned());
    let output = run(["run".into(), "--json".into()].into_iter().chain(given));
    assert_eq!((output.status.code(), stderr(&output)), (Some(0), ""));
    serde_json::from_str(stdout(&output)).unwrap()
}

fn dynamic_int8(model: &Path) {
    let path = model.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = json!({
        "num_bits": 8, "type": "int", "symmetric": true, "strategy": "token", "dynamic": true});
    fs::write(path, config.to_string()).unwrap();
}

#[test]
fn packed_and_original_give_the_definitions_bits() {
    let temp = tempfile::tempdir().unwrap();
    let logits = numbers("logits", TOKENS * EXPERTS);
    let values = numbers("x", TOKENS * HIDDEN);
    for (format, dynamic) in [(Format::CtPack, true), (Format::Gptq4, false)] {
        let model = temp.path().join(format!("{format:?}"));
        let weights = write_model(format, &model);
        if dynamic {
            dynamic_int8(&model);
        }
        let out = temp.path().join(format!("{format:?}-packed"));
        convert(&model, &out, &kleidi(8)).unwrap();
        let of = |e: usize, w: &str| &weights[&format!("{EXPERT_LAYER}.{e}.{w}")];
        let w13: Vec<_> =
            (0..EXPERTS).map(|e| packed(&[of(e, "gate_proj"), of(e, "up_proj")])).collect();
        let w2: Vec<_> = (0..EXPERTS).map(|e| packed(&[of(e, "down_proj")])).collect();
        let layer = Layer {
            w13: &w13,
            w2: &w2,
            num_experts: EXPERTS,
            expert_map: None,
            activation: Activation::Silu,
            rounding: ROUNDING,
            router_weight_on_input: false,
            mode: Mode::Extended,
        };
        let routing = Router::new(ScoringFunc::Softmax, 2, true)
            .route(rows_of("logits", &logits, EXPERTS).unwrap());
        let routing = routing.unwrap();
        let routed = routing.routed().unwrap();
        for x in [Values::F32(values.clone()), Values::Bf16(bf16(&values))] {
            let expected = layer.forward(&Scalar, &x, routed).unwrap();
            let tensor = match &x {
                Values::F32(v) => f32s("x", [TOKENS, HIDDEN], v),
                Values::Bf16(v) => {
                    let shape = vec![TOKENS, HIDDEN];
                    Tensor::from_vec("x", DType::BF16, shape, v.clone()).unwrap()
                }
            };
            let router_logits = f32s("router_logits", [TOKENS, EXPERTS], &logits);
            let by_logits =
                write(&temp.path().join("x.safetensors"), &[tensor.clone(), router_logits]);
            let ids =
                Tensor::from_vec("in.topk_ids", DType::I32, vec![TOKENS, 2], routed.ids().to_vec());
            let given = [
                tensor.renamed("in.x"),
                ids.unwrap(),
                f32s("in.topk_weights", [TOKENS, 2], routed.weights()),
            ];
            let by_ids = write(&temp.path().join("ids.safetensors"), &given);
            for model in [&out, &model] {
                for input in [&by_logits, &by_ids] {
                    let found = report(&[model.as_os_str(), "--input".as_ref(), input.as_os_str()]);
                    assert_eq!(found["layer"], EXPERT_LAYER);
                    assert_eq!(found["shape"], json!([TOKENS, HIDDEN]));
                    assert_eq!(found["sha256"], digest(&expected), "{format:?} {found}");
                }
            }
        }
        // A linear layer, by every kernel, and its output file.
        let x = Values::F32(numbers("o", TOKENS * INTER));
        let Values::F32(rows) = &x else { unreachable!() };
        let input = write(&temp.path().join("o.safetensors"), &[f32s("x", [TOKENS, INTER], rows)]);
        let expected = w4a8::linear(&Scalar, &x, &packed(&[&weights[LINEAR]]), ROUNDING).unwrap();
        let file = temp.path().join("y.safetensors");
        for kernel in w4a8::kernels() {
            let arguments = [
                out.to_str().unwrap(),
                "--layer",
                LINEAR,
                "--input",
                input.to_str().unwrap(),
                "--kernel",
                kernel.name(),
                "--threads",
                "1",
                "--output",
                file.to_str().unwrap(),
            ];
            let found = report(&arguments);
            assert_eq!((&found["kernel"], &found["threads"]), (&json!(kernel.name()), &json!(1)));
            assert_eq!(found["sha256"], digest(&expected));
            let bytes = fs::read(&file).unwrap();
            let y = Container::parse(&bytes).unwrap().tensor("y").unwrap().into_owned();
            assert_eq!(y.shape(), [TOKENS, HIDDEN]);
            assert_eq!(Values::from_tensor(&y).unwrap().bits(), expected.bits());
        }
    }
}

/// A seed gives the same numbers on every machine, and so the same bits.
#[test]
fn seeded_runs_are_the_same_by_every_way() {
    let temp = tempfile::tempdir().unwrap();
    let model = golden("x").parent().unwrap().parent().unwrap().join("checkpoints/ct-int-w4a8-moe");
    let out = temp.path().join("out");
    convert(&model, &out, &kleidi(4)).unwrap();
    let file = out.join("model.safetensors");
    let mut digests = Vec::new();
    for model in [&model, &out, &file] {
        for more in [&["--threads", "1", "--check"][..], &["--kernel", "portable", "--repeat", "2"]]
        {
            let mut arguments = vec![model.to_str().unwrap(), "--tokens", "9", "--seed", "7"];
            arguments.extend(more);
            let found = report(&arguments);
            assert_eq!(found["layer"], "model.layers.0.block_sparse_moe.experts");
            assert_eq!(found["dtype"], "bfloat16");
            if more.contains(&"--check") {
                assert_eq!(found["check"], json!({"mismatches": 0, "first": null}));
            }
            digests.push(found["sha256"].as_str().unwrap().to_owned());
        }
    }
    digests.dedup();
    assert_eq!(digests.len(), 1, "{digests:?}");
    let other = report(&[file.to_str().unwrap(), "--tokens", "9", "--seed", "8"]);
    assert_ne!(other["sha256"], json!(digests[0]));
    for model in [&model, &out] {
        let output = run(["run".as_ref(), model.as_os_str(), "--list".as_ref()]);
        let names: Vec<_> = stdout(&output).lines().collect();
        assert_eq!(names.len(), 5);
        assert!(names.contains(&"model.layers.0.block_sparse_moe.experts"));
    }
    let output = run(["run".as_ref(), file.as_os_str(), "--check".as_ref()]);
    assert_eq!(output.status.code(), Some(0));
    assert!(stdout(&output).contains("equal to the scalar definition"), "{}", stdout(&output));
}

/// Expects exit code 2 and a message with both parts.
fn refused(arguments: &[&str], parts: [&str; 2]) {
    let output = run(["run"].iter().chain(arguments));
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert_eq!(stdout(&output), "");
    assert!(parts.iter().all(|p| text.contains(p)), "{arguments:?}: {text}");
}

#[test]
fn what_cannot_run_is_refused_by_name() {
    let temp = tempfile::tempdir().unwrap();
    let (model, out) = (temp.path().join("model"), temp.path().join("out"));
    write_model(Format::CtPack, &model);
    convert(&model, &out, &kleidi(8)).unwrap();
    let path = |name: &str| temp.path().join(name).to_str().unwrap().to_owned();
    let (model, out) = (path("model"), path("out"));
    refused(&[&out, "--layer", "model.norm"], ["model.norm", "--list"]);
    refused(&[&out, "--kernel", "abacus"], ["abacus", "scalar"]);
    refused(&[&out, "--tokens", "0"], ["--tokens", "found 0"]);
    refused(&[&path("nothing")], ["nothing", "no such folder"]);
    refused(&[&out, "--output", &path("no/y")], ["no/y", "cannot be written"]);
    assert!(!Path::new(&path("no")).exists());

    // Weights that the path does not support.
    write_model(Format::Gptq8Channel, &temp.path().join("wide"));
    refused(&[&path("wide")], ["8 bits", "model.layers.0"]);
    refused(&[&path("wide"), "--layer", LINEAR], ["8 bits", LINEAR]);
    refused(&[&path("wide")], ["8 bits", "--arithmetic exact"]);
    let y = path("y.safetensors");
    let stages = [&model, "--layer", LINEAR, "--output", &y, "--stages"];
    refused(&stages, ["--stages", "--arithmetic exact"]);
    assert!(!Path::new(&y).exists());
    let listed = run(["run", &path("wide"), "--list"]);
    let lines: Vec<&str> = stdout(&listed).lines().collect();
    assert_eq!(lines.len(), 4, "{lines:?}");
    assert!(lines.iter().all(|l| l.starts_with("refused: model.layers.0") && l.contains("8 bits")));

    // Inputs that do not match the layer.
    let x = f32s("x", [2, HIDDEN], &numbers("x", 2 * HIDDEN));
    let logits = f32s("router_logits", [2, EXPERTS], &numbers("l", 2 * EXPERTS));
    let input = path("in.safetensors");
    let with = |tensors: &[Tensor<'_>], parts: [&str; 2]| {
        write(Path::new(&input), tensors);
        refused(&[&out, "--input", &input], parts);
    };
    with(std::slice::from_ref(&logits), ["tensor `x` is missing", "in.safetensors"]);
    with(std::slice::from_ref(&x), ["tensor `topk_ids` is missing", "router_logits"]);
    let narrow = f32s("x", [4, HIDDEN / 2], &numbers("x", 2 * HIDDEN));
    with(&[narrow, logits.clone()], ["tensor `x`", "[M, 256]"]);
    let half = Tensor::from_vec("x", DType::F16, vec![2, HIDDEN], vec![0u16; 2 * HIDDEN]).unwrap();
    with(&[half, logits], ["tensor `x`", "F16"]);
    let few = f32s("router_logits", [1, EXPERTS], &[0.0; EXPERTS]);
    with(&[x.clone(), few], ["tensor `router_logits`", "[2, 3]"]);
    let mut bad = vec![0.0; 2 * EXPERTS];
    bad[4] = f32::NAN;
    with(&[x.clone(), f32s("router_logits", [2, EXPERTS], &bad)], ["router_logits", "NaN"]);
    let ids =
        |values: Vec<i32>| Tensor::from_vec("topk_ids", DType::I32, vec![2, 1], values).unwrap();
    let weights = f32s("topk_weights", [2, 1], &[1.0; 2]);
    with(&[x, ids(vec![0, 3]), weights], ["topk_ids", "found 3"]);

    // Packed files that contradict their description.
    let packed = files(Path::new(&out)).into_iter().find(|p| p.ends_with("model.safetensors"));
    let bytes = fs::read(packed.unwrap()).unwrap();
    let changed = |from: &str, to: &str, parts: [&str; 2]| {
        let (from, to) = (from.as_bytes(), to.as_bytes());
        let mut bytes = bytes.clone();
        let at = bytes.windows(from.len()).position(|w| w == from).unwrap();
        bytes[at..][..to.len()].copy_from_slice(to);
        fs::write(path("bad.safetensors"), bytes).unwrap();
        refused(&[&path("bad.safetensors"), "--layer", EXPERT_LAYER], parts);
    };
    let experts = "__metadata__ marlinspike.w4a8.model.layers.0.mlp.experts";
    changed("\\\"top_k\\\":2", "\\\"top_k\\\":9", [experts, "found 9"]);
    changed("\\\"hidden_size\\\":256", "\\\"hidden_size\\\":128", ["w13_packed", "found shape"]);
    changed("silu\\\"", "mish\\\"", [experts, "mish"]);
    changed("w2_packed", "w2_pocked", ["w2_packed", "not in the file"]);
    fs::write(path("short.safetensors"), &bytes[..bytes.len() - 1]).unwrap();
    refused(&[&path("short.safetensors")], ["short.safetensors", "expected"]);
    // The original checkpoint's group sizes still apply.
    assert_eq!(Format::CtPack.group_size(), GroupSize::Of(64));
    refused(&[&model, "--layer", "lm_head"], ["lm_head", "--list"]);
}
