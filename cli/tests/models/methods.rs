//! FP8, MXFP8, MXFP4, NVFP4 and integer experts from checkpoint to layer.
//!
//! The golden checkpoints' stages were computed independently of this project
//! (`scripts/gen/ct_methods.py`); `--check` compares those of the other formats with the
//! definition.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use crate::common::runs::{golden, run as convert, settings};
use crate::common::{Converted, EXPERTS, Format, HIDDEN, INTER, write_model};
use crate::support::{run, stderr, stdout};
use marlinspike::container::{Container, write_container};
use marlinspike::layouts::CPU_E2M1;
use marlinspike::layouts::flashinfer::{ExpertBackend, ExpertLayout, PackedExperts, Projection};
use marlinspike::layouts::marlin::{Activations, WeightLayout};
use marlinspike::num::dims::Shape;
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::prepare::requantize::Requantize;
use marlinspike::w4a8::experts::kernel_names;
use marlinspike::weight::Table;
use marlinspike_model::convert::plan::Settings;
use marlinspike_model::convert::target::{experts, int4};
use marlinspike_model::load::preparation::Preparation;
use serde_json::{Value, json};

const EXPERT_LAYER: &str = "model.layers.0.mlp.experts";
const MIXTRAL_LAYER: &str = "model.layers.0.block_sparse_moe.experts";

/// The golden checkpoints with quantized activations: name, layer, and the rule for one scale of w1
/// and w3.
const LAYERS: [(&str, &str, &str); 3] = [
    ("ct-fp8-moe", MIXTRAL_LAYER, "upstream-cpu"),
    ("fp8-block-moe", EXPERT_LAYER, "upstream-cuda"),
    ("ct-nvfp4-moe", MIXTRAL_LAYER, "upstream-cuda"),
];

fn checkpoint(name: &str) -> PathBuf {
    golden("checkpoints").join(name)
}

fn write(path: &Path, tensors: &[Tensor<'_>]) -> PathBuf {
    let bytes = write_container(tensors, &BTreeMap::new(), Vec::new()).unwrap();
    fs::write(path, bytes).unwrap();
    path.to_owned()
}

/// The output of `run --json` on a model with these arguments, which must succeed.
fn report(model: &Path, arguments: &[&str]) -> Value {
    let output = run(["run".as_ref(), "--json".as_ref(), model.as_os_str()]
        .into_iter()
        .chain(arguments.iter().map(|a| a.as_ref())));
    assert_eq!((output.status.code(), stderr(&output)), (Some(0), ""), "{arguments:?}");
    serde_json::from_str(stdout(&output)).unwrap()
}

/// Expects a command to end with exit code 2 and a message with all `parts`.
fn refused(command: &str, model: &Path, arguments: &[&str], parts: &[&str]) {
    let output = run([command.as_ref(), model.as_os_str()]
        .into_iter()
        .chain(arguments.iter().map(|a| a.as_ref())));
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(parts.iter().all(|p| text.contains(p)), "{arguments:?}: {text}");
}

/// The activations and the routing of the stages' file, as an input file.
fn input_of(expected: &Container<'_>, layer: &str, path: &Path) -> PathBuf {
    let names = ["x", "topk_ids", "topk_weights"];
    let tensor = |name: &str| expected.tensor(&format!("{layer}.{name}")).unwrap().renamed(name);
    write(path, &names.map(tensor))
}

#[test]
fn stages_equal_those_computed_apart() {
    let temp = tempfile::tempdir().unwrap();
    let (input, output) = (temp.path().join("in"), temp.path().join("out"));
    for (name, layer, rule) in LAYERS {
        let bytes = fs::read(golden("expected").join(format!("{name}.safetensors"))).unwrap();
        let expected = Container::parse(&bytes).unwrap();
        input_of(&expected, layer, &input);
        let files = [input.to_str().unwrap(), output.to_str().unwrap()];
        let arguments = [
            "--requantize",
            rule,
            "--check",
            "--stages",
            "--input",
            files[0],
            "--output",
            files[1],
        ];
        let found = report(&checkpoint(name), &arguments);
        assert_eq!(found["layer"], layer);
        assert_eq!(found["check"], json!({"mismatches": 0, "first": null, "stage": "y"}));
        assert_eq!(found["sizes"]["arithmetic"], "exact");
        let bytes = fs::read(&output).unwrap();
        let stages = Container::parse(&bytes).unwrap();
        for stage in ["gate_up", "activated", "down", "y"] {
            let (a, b) =
                (stages.tensor(stage).unwrap(), expected.tensor(&format!("{layer}.{stage}")));
            let b = b.unwrap();
            assert_eq!(a.shape(), b.shape(), "{name} {stage}");
            assert_eq!(a.elements::<u16>(), b.elements::<u16>(), "{name} {stage}");
        }
    }
}

/// The same blocks under compressed-tensors' config, whose scales have another name.
#[test]
fn blocks_of_compressed_tensors_are_the_same_layer() {
    let temp = tempfile::tempdir().unwrap();
    let (from, to) = (checkpoint("fp8-block-moe"), temp.path().join("ct"));
    copy_tensors(&from, &to, |t| {
        let name = t.name().replace("weight_scale_inv", "weight_scale");
        Some(t.renamed(name))
    });
    reconfigure(&to, |config| {
        let block = json!({"num_bits": 8, "type": "float", "symmetric": true, "dynamic": false,
            "strategy": "block", "block_structure": [128, 128]});
        let group = json!({"num_bits": 8, "type": "float", "symmetric": true, "dynamic": true,
            "strategy": "group", "group_size": 128});
        config["quantization_config"] = json!({"quant_method": "compressed-tensors",
            "format": "float-quantized", "ignore": ["re:.*gate$"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": block,
                "input_activations": group}}});
    });
    for arithmetic in ["exact", "wgmma-promoted"] {
        let [a, b] = [&from, &to].map(|m| report(m, &["--arithmetic", arithmetic, "--check"]));
        assert_eq!(a["sha256"], b["sha256"]);
        assert_eq!(b["sizes"]["activations"], "fp8 dynamic per group of 128");
    }
}

#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "too slow under emulation")]
fn every_method_runs_and_its_definition_agrees() {
    let temp = tempfile::tempdir().unwrap();
    let marlin: &[&str] = &["exact", "canonical"];
    let fp8: &[&str] = &["exact", "canonical", "wgmma", "wgmma-promoted"];
    let made = |format: Format, activations: &'static str, names: &'static [&'static str]| {
        let model = temp.path().join(format!("{format:?}{activations}"));
        write_model(format, &model);
        (model, activations, names)
    };
    let golden = |name: &str, activations, names| (checkpoint(name), activations, names);
    for (model, activations, names) in [
        made(Format::Fp8Channel, "auto", fp8),
        made(Format::Fp8Channel, "none", marlin),
        made(Format::Fp8Block, "auto", &["exact", "wgmma-promoted"]),
        made(Format::Fp8Block, "none", marlin),
        made(Format::Mxfp8, "auto", marlin),
        made(Format::Mxfp8, "mxfp8", &["exact", "tcgen05"]),
        made(Format::Mxfp4, "auto", marlin),
        made(Format::Nvfp4, "auto", marlin),
        made(Format::Mxint4, "auto", marlin),
        made(Format::GptqActOrder, "auto", marlin),
        golden("ct-fp8-moe", "auto", fp8),
        golden("ct-fp8-moe", "none", marlin),
        golden("ct-nvfp4-moe", "none", marlin),
        golden("gpt-oss-mxfp4", "auto", marlin),
    ] {
        let mut digests = Vec::new();
        for arithmetic in names {
            let arguments = [
                "--tokens",
                "2",
                "--check",
                "--arithmetic",
                arithmetic,
                "--activations",
                activations,
            ];
            let found = report(&model, &arguments);
            let context = format!("{model:?} {activations} {arithmetic}: {found}");
            assert_eq!(found["check"]["mismatches"], 0, "{context}");
            assert_eq!(found["sizes"]["kind"], "moe", "{context}");
            assert_eq!(found["sizes"]["arithmetic"], **arithmetic, "{context}");
            digests.push(found["sha256"].clone());
        }
        // One thread gives the same bits.
        let one = [
            "--tokens",
            "2",
            "--arithmetic",
            names[0],
            "--activations",
            activations,
            "--threads",
            "1",
        ];
        assert_eq!(report(&model, &one)["sha256"], digests[0]);
        if names.contains(&"wgmma") {
            assert_ne!(digests[0], digests[2], "{model:?}: 14 bits must show");
        }
    }
}

#[test]
fn linear_layers_run_as_their_method_says() {
    let linear = "model.layers.0.self_attn.o_proj";
    for (name, activations) in [
        ("ct-fp8-moe", "fp8 static per tensor"),
        ("ct-fp8-channel", "fp8 dynamic per token"),
        ("fp8-block", "fp8 dynamic per group of 128"),
        ("ct-nvfp4-moe", "nvfp4"),
        ("ct-nvfp4", "16-bit"),
        ("ct-mxfp8", "16-bit"),
        ("ct-mxfp4", "16-bit"),
    ] {
        let found =
            report(&checkpoint(name), &["--layer", linear, "--dtype", "float16", "--check"]);
        assert_eq!(found["sizes"]["kind"], "linear");
        assert_eq!(found["sizes"]["activations"], activations, "{name}");
        assert_eq!(found["dtype"], "float16");
        assert_eq!(found["check"], json!({"mismatches": 0, "first": null}), "{name}");
    }
    // `scale_fmt: ue8m0`: scales of activations are powers of two, which changes the output.
    let temp = tempfile::tempdir().unwrap();
    for (name, layer) in [("fp8-block", linear), ("fp8-block-moe", EXPERT_LAYER)] {
        let model = temp.path().join(name);
        copy_with(&checkpoint(name), &model, |config| {
            config["quantization_config"]["scale_fmt"] = "ue8m0".into();
        });
        let found = report(&model, &["--layer", layer, "--check"]);
        assert_eq!(found["sizes"]["activations"], "fp8 dynamic per group, UE8M0 scales of 128");
        assert_eq!(found["check"]["mismatches"], 0, "{name}");
        let plain = report(&checkpoint(name), &["--layer", layer]);
        assert_ne!(found["sha256"], plain["sha256"], "{name}");
    }
    // `quant_method: fp8` with one scale for a tensor, dynamic: upstream's linear layers take tokens.
    let model = temp.path().join("fp8");
    copy_with(&checkpoint("ct-fp8-moe"), &model, |config| {
        config["quantization_config"] =
            json!({"quant_method": "fp8", "activation_scheme": "dynamic"});
    });
    let found = report(&model, &["--layer", linear, "--check"]);
    assert_eq!(found["sizes"]["activations"], "fp8 dynamic per token");
    assert!(found["notes"][0].as_str().unwrap().contains("each token"));
    let found = report(&model, &["--layer", MIXTRAL_LAYER, "--check", "--arithmetic", "wgmma"]);
    assert_eq!(found["sizes"]["activations"], "fp8 dynamic per tensor");
    assert_eq!(found["check"]["mismatches"], 0);
}

/// A copy of a model of one file, with its config changed.
fn copy_with(from: &Path, to: &Path, change: impl FnOnce(&mut Value)) {
    fs::create_dir_all(to).unwrap();
    for name in ["model.safetensors", "config.json"] {
        fs::copy(from.join(name), to.join(name)).unwrap();
    }
    reconfigure(to, change);
}

/// Changes a model's config in place.
fn reconfigure(model: &Path, change: impl FnOnce(&mut Value)) {
    let path = model.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut config);
    fs::write(path, config.to_string()).unwrap();
}

/// A copy of a model of one file, with its tensors changed.
fn copy_tensors(
    from: &Path,
    to: &Path,
    change: impl Fn(Tensor<'static>) -> Option<Tensor<'static>>,
) {
    copy_with(from, to, |_| {});
    let bytes = fs::read(from.join("model.safetensors")).unwrap();
    let file = Container::parse(&bytes).unwrap();
    let tensors: Vec<_> = file.tensors().filter_map(|t| change(t.unwrap().into_owned())).collect();
    write(&to.join("model.safetensors"), &tensors);
}

/// Expert 1 has as many columns in w1 and w3 together as the others.
#[test]
fn unlike_experts_are_named() {
    let temp = tempfile::tempdir().unwrap();
    let model = temp.path().join("model");
    let other = format!("{MIXTRAL_LAYER}.1");
    copy_tensors(&checkpoint("ct-fp8-moe"), &model, |t| {
        let [w1, w3] = ["w1", "w3"].map(|w| t.name() == format!("{other}.{w}.weight"));
        if !w1 && !w3 {
            return Some(t);
        }
        let [n, k] = t.dims2().unwrap();
        let (half, bytes) = (n * k / 2, t.bytes());
        let bytes = if w1 { bytes[..half].to_vec() } else { [bytes, &bytes[..half]].concat() };
        let shape = vec![bytes.len() / k, k];
        Some(Tensor::new(t.name(), t.dtype(), shape, bytes).unwrap())
    });
    let parts = [&*format!("`{other}.w1` is"), "experts.0.w1`", "experts must be alike"];
    refused("run", &model, &[], &parts);
}

#[test]
fn the_global_scale_of_gate_and_up_is_first_or_own_by_name() {
    let model = checkpoint("ct-nvfp4-moe");
    let first = report(&model, &["--check"]);
    let own = report(&model, &["--check", "--w13-scale", "own"]);
    assert_ne!(first["sha256"], own["sha256"]);
    for (found, rule) in [(&first, "w1's is used for both"), (&own, "each has its own")] {
        assert_eq!(found["check"]["mismatches"], 0);
        let notes = found["notes"].as_array().unwrap();
        assert_eq!(notes.len(), 2);
        // The file's values.
        let text = notes[1].as_str().unwrap();
        for part in ["at [1]", "w1 has 15207.249", "w3 has 6950.788", rule] {
            assert!(text.contains(part), "{text}");
        }
    }
    // Every backend of FlashInfer shares the activations' scale; vLLM's gives each expert its own.
    let vllm = report(&model, &["--nvfp4-backend", "VLLM_CUTLASS", "--check"]);
    assert_eq!(vllm["check"]["mismatches"], 0);
    let temp = tempfile::tempdir().unwrap();
    let out = temp.path().join("out");
    let settings = |preparation| Settings { preparation, ..settings() };
    let summary = convert(&model, &out, &settings(Preparation::UPSTREAM)).unwrap();
    assert_eq!(summary.notes.len(), 2);
    assert!(summary.notes[0].contains("w3 has 7909.517"), "{:?}", summary.notes);
    assert_eq!(Converted::read(&out).config["marlinspike"]["notes"], json!(summary.notes));
    let out = temp.path().join("own");
    let error = convert(&model, &out, &settings(Preparation::AS_STORED)).unwrap_err().to_string();
    for part in ["w1 has 15207.249", "w3 has 7909.517", "--w13-scale first"] {
        assert!(error.contains(part), "{error}");
    }
    assert!(!out.exists());
}

#[test]
fn fp8_experts_convert_as_upstream_prepares_them() {
    let temp = tempfile::tempdir().unwrap();
    let model = checkpoint("ct-fp8-moe");
    let bytes = fs::read(golden("expected").join("ct-fp8-moe.safetensors")).unwrap();
    let expected = Container::parse(&bytes).unwrap();
    let with = |name: &str, requantize| {
        let out = temp.path().join(name);
        let preparation = Preparation { requantize, ..Preparation::UPSTREAM };
        let summary = convert(&model, &out, &Settings { preparation, ..settings() }).unwrap();
        (Converted::read(&out), summary.notes)
    };
    let (converted, notes) = with("cpu", Some(Requantize::UpstreamCpu));
    assert_eq!(notes.len(), 1);
    assert!(notes[0].contains("2 of 2 experts") && notes[0].contains("upstream-cpu"), "{notes:?}");
    for stack in ["w13", "w2"] {
        for (role, name) in [("weight", "marlin_qweight"), ("scales", "marlin_scales")] {
            let layer = format!("{MIXTRAL_LAYER}.{stack}");
            let expected = expected.tensor(&format!("{MIXTRAL_LAYER}.{stack}_{name}")).unwrap();
            let found = converted.tensor(&layer, role, None).unwrap();
            assert_eq!(found.shape(), expected.shape(), "{stack} {role}");
            assert!(found.bytes() == expected.bytes(), "{stack} {role}");
        }
    }
    // Separate scales: codes as stored, two scales in a row of w13.
    let (own, notes) = with("own", None);
    assert!(notes.is_empty());
    let tensor =
        |c: &Converted, role| c.tensor(&format!("{MIXTRAL_LAYER}.w13"), role, Some(0)).unwrap();
    let distinct = |c: &Converted| {
        let mut scales = tensor(c, "scales").elements::<u16>().to_vec();
        scales.sort_unstable();
        scales.dedup();
        scales.len()
    };
    assert_eq!((distinct(&own), distinct(&converted)), (2, 1));
    assert!(tensor(&own, "weight").bytes() != tensor(&converted, "weight").bytes());
}

#[test]
fn gpt_oss_is_padded_as_upstream_pads_it() {
    let temp = tempfile::tempdir().unwrap();
    let model = checkpoint("gpt-oss-mxfp4");
    let convert_with = |name: &str, padding| {
        let out = temp.path().join(name);
        let preparation = Preparation { padding, ..Preparation::UPSTREAM };
        convert(&model, &out, &Settings { preparation, ..settings() }).unwrap();
        Converted::read(&out)
    };
    let (padded, plain) = (convert_with("padded", true), convert_with("plain", false));
    // Hidden 128 is padded to a multiple of 256; intermediate 128 is already a multiple of 128.
    for (stack, from, to) in [("w13", (128, 256), (256, 256)), ("w2", (128, 128), (128, 256))] {
        let layer = format!("{EXPERT_LAYER}.{stack}");
        let info = padded.layer(&layer);
        assert_eq!(info["padded_from"], json!({"hidden_size": 128, "intermediate_size": 128}));
        assert_eq!((&info["size_k"], &info["size_n"]), (&json!(to.0), &json!(to.1)));
        let codes = |c: &Converted, (k, n): (usize, usize), e| {
            let layout = WeightLayout::new(Shape::new(k, n), 4, Activations::Bits16).unwrap();
            let words = c.tensor(&layer, "weight", Some(e)).unwrap();
            layout.unpack(words.view2().unwrap(), None).unwrap()
        };
        for e in 0..2 {
            let (a, b) = (codes(&padded, to, e), codes(&plain, from, e));
            for n in 0..to.1 {
                for k in 0..to.0 {
                    let expected = if k < from.0 && n < from.1 { b.get(k, n) } else { 0 };
                    assert_eq!(a.get(k, n), expected, "{stack} {e} ({k}, {n})");
                }
            }
            let bias = |c: &Converted| -> Vec<u16> {
                c.tensor(&layer, "bias", Some(e)).unwrap().elements::<u16>().to_vec()
            };
            let mut sorted = [bias(&padded), bias(&plain)];
            sorted[1].resize(to.1, 0);
            sorted.iter_mut().for_each(|b| b.sort_unstable());
            assert_eq!(sorted[0], sorted[1], "the biases, and zeros");
        }
    }
    // Ranks share the intermediate size in blocks of 32: 64 each, padded to 128.
    for rank in 0..2 {
        let out = temp.path().join(format!("rank{rank}"));
        let tp = marlinspike_model::convert::parallel::Ranks { size: 2, rank };
        let own = Settings { tp, preparation: Preparation::UPSTREAM, ..settings() };
        convert(&model, &out, &own).unwrap();
        let converted = Converted::read(&out);
        let w2 = converted.layer(&format!("{EXPERT_LAYER}.w2"));
        assert_eq!((&w2["size_k"], &w2["size_n"]), (&json!(128), &json!(256)));
    }
}

/// Converts to FlashInfer's format. Returns the tensors and the file's description of the layer.
fn flashinfer(model: &Path, out: &Path, backend: &str) -> (Converted, Value) {
    let format = experts::FORMAT.with("nvfp4-backend", backend).expect("a backend");
    let preparation = Preparation::UPSTREAM;
    let own = Settings { format, preparation, skip_unsupported: true, ..settings() };
    convert(model, out, &own).unwrap();
    let bytes = fs::read(out.join("model.safetensors")).unwrap();
    let file = Container::parse(&bytes).unwrap();
    let found = &file.metadata()[&experts::key(EXPERT_LAYER)];
    (Converted::read(out), serde_json::from_str(found).unwrap())
}

/// Compares the unpacked experts of a converted stack with the weights that were written.
fn check_experts(
    converted: &Converted,
    layout: &ExpertLayout,
    stack: &str,
    weights: &BTreeMap<String, marlinspike::weight::Weight<'static>>,
) {
    let layer = format!("{EXPERT_LAYER}.{stack}");
    let tensor = |role| converted.tensor(&layer, role, None).unwrap();
    let (weight, scales) = (tensor("weight"), tensor("scales"));
    let [experts, rows, cols] = scales.dims3().unwrap();
    let ty = layout.scales().ty();
    let scales =
        Tensor::new("s", scales.dtype(), vec![experts * rows, cols], scales.bytes().to_vec());
    let packed = PackedExperts {
        experts,
        weights: weight.bytes().to_vec(),
        scales: Table::from_tensor(&scales.unwrap(), ty).unwrap(),
    };
    let projections: &[&str] =
        if stack == "w13" { &["gate_proj", "up_proj"] } else { &["down_proj"] };
    for (e, found) in layout.unpack(&packed).unwrap().iter().enumerate() {
        let parts: Vec<_> =
            projections.iter().map(|p| &weights[&format!("{EXPERT_LAYER}.{e}.{p}")]).collect();
        let width = parts[0].shape().size_n;
        for n in 0..width * parts.len() {
            let (w, column) = (parts[n / width], n % width);
            for k in 0..w.shape().size_k {
                assert_eq!(found.codes.get(k, n), w.codes.get(k, column), "{stack} {e} ({k}, {n})");
            }
            for g in 0..w.scales.rows() {
                assert_eq!(
                    found.scales.bits(g, n),
                    w.scales.bits(g, column),
                    "{stack} {e} {g} {n}"
                );
            }
        }
    }
}

#[test]
fn experts_convert_to_flashinfers_forms() {
    let temp = tempfile::tempdir().unwrap();
    let projections = [("w13", Projection::W13), ("w2", Projection::W2)];
    let model = temp.path().join("mxint4");
    let weights = write_model(Format::Mxint4, &model);
    let out = temp.path().join("mxint4-out");
    let (converted, described) = flashinfer(&model, &out, "FLASHINFER_TRTLLM");
    assert_eq!(described["layout"], "mxint4");
    assert_eq!(described["group_size"], 32);
    assert_eq!(described["w13"]["rows"], json!(["swap_halves", "interleave 1", "shuffle 32"]));
    assert_eq!(described["w2"]["block_k_bytes"], 128);
    for (stack, projection) in projections {
        let layout = ExpertLayout::mxint4(projection, HIDDEN, INTER).unwrap();
        check_experts(&converted, &layout, stack, &weights);
    }
    let shape = converted.tensors[&format!("{EXPERT_LAYER}.w13_weight_packed")].shape().to_vec();
    assert_eq!(shape, [EXPERTS, HIDDEN / 256, 2 * INTER, 128]);

    let model = temp.path().join("nvfp4");
    let weights = write_model(Format::Nvfp4, &model);
    for (name, backend) in ExpertBackend::NAMED {
        let (converted, described) = flashinfer(&model, &temp.path().join(name), name);
        assert_eq!(described["layout"], name);
        for (stack, projection) in projections {
            let layout =
                ExpertLayout::for_backend(backend, projection, HIDDEN, INTER, true).unwrap();
            check_experts(&converted, &layout, stack, &weights);
            let global = converted.tensor(&format!("{EXPERT_LAYER}.{stack}"), "global_scale", None);
            assert_eq!(global.unwrap().elements::<f32>().to_vec(), [1.0 / 64.0; EXPERTS]);
        }
    }
    // W4A4: the multipliers of the activations, shared or per expert.
    for (name, shared) in [("FLASHINFER_CUTLASS", true), ("VLLM_CUTLASS", false)] {
        let out = temp.path().join(format!("w4a4-{name}"));
        let arguments = ["--to", "flashinfer", "--nvfp4-backend", name, "--skip-unsupported"];
        let model = checkpoint("ct-nvfp4-moe");
        let paths = ["convert".as_ref(), model.as_os_str(), out.as_os_str()];
        let output = run(paths.into_iter().chain(arguments.map(|a| a.as_ref())));
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        assert!(stdout(&output).contains("w3 has 7909.517"), "{}", stdout(&output));
        let converted = Converted::read(&out);
        let scales = converted.tensor(&format!("{MIXTRAL_LAYER}.w2"), "input_scale", None).unwrap();
        let scales = scales.elements::<f32>().to_vec();
        let bytes = fs::read(model.join("model.safetensors")).unwrap();
        let file = Container::parse(&bytes).unwrap();
        let own: Vec<f32> = (0..2)
            .map(|e| {
                let name = format!("{MIXTRAL_LAYER}.{e}.w2.input_global_scale");
                1.0 / file.tensor(&name).unwrap().elements::<f32>()[0]
            })
            .collect();
        let largest = own[0].max(own[1]);
        assert_eq!(scales, if shared { vec![largest; 2] } else { own });
    }
}

/// Packing is lossless if the kernel's types represent the checkpoint's numbers.
#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "too slow under emulation")]
fn converted_layers_run_with_the_checkpoints_bits() {
    let temp = tempfile::tempdir().unwrap();
    let upstream = Settings { preparation: Preparation::UPSTREAM, ..settings() };
    let linear = "model.layers.0.self_attn.o_proj";
    for format in Format::ALL {
        let model = temp.path().join(format!("{format:?}"));
        write_model(format, &model);
        let out = temp.path().join(format!("{format:?}-out"));
        convert(&model, &out, &upstream).unwrap();
        for layer in [EXPERT_LAYER, linear] {
            let arguments = ["--layer", layer, "--arithmetic", "exact", "--tokens", "2"];
            let none = ["--activations", "none"];
            let from = report(&model, &[&arguments[..], &none].concat());
            let to = report(&out, &[&arguments[..], &["--check"]].concat());
            assert_eq!(to["sha256"], from["sha256"], "{format:?} {layer}");
            assert_eq!((&to["source"], &to["check"]["mismatches"]), (&json!("packed"), &json!(0)));
        }
    }
    let gpt_oss = checkpoint("gpt-oss-mxfp4");
    let out = temp.path().join("gpt-oss");
    convert(&gpt_oss, &out, &upstream).unwrap();
    let digest = |model: &Path, arguments: &[&str]| report(model, arguments)["sha256"].clone();
    assert_eq!(digest(&out, &[]), digest(&gpt_oss, &[]), "its padding adds nothing");
    // FlashInfer's forms, with NVFP4 activations and without.
    let nvfp4 = checkpoint("ct-nvfp4-moe");
    for name in ExpertBackend::NAMES {
        let out = temp.path().join(name);
        let format = experts::FORMAT.with("nvfp4-backend", name).expect("a backend");
        let own = Settings { format, skip_unsupported: true, ..upstream.clone() };
        convert(&nvfp4, &out, &own).unwrap();
        let packed = report(&out, &["--check"]);
        assert_eq!(packed["sizes"]["activations"], "nvfp4");
        let from = digest(&nvfp4, &["--layer", MIXTRAL_LAYER, "--nvfp4-backend", name]);
        assert_eq!(
            (&packed["sha256"], &packed["check"]["mismatches"]),
            (&from, &json!(0)),
            "{name}"
        );
    }
    let (model, out) = (temp.path().join("Mxint4"), temp.path().join("mxint4"));
    let _ = flashinfer(&model, &out, "FLASHINFER_TRTLLM");
    assert_eq!(digest(&out, &[]), digest(&model, &["--arithmetic", "exact"]));
    let output = run(["run".as_ref(), out.as_os_str(), "--list".as_ref()]);
    assert_eq!(stdout(&output), format!("{EXPERT_LAYER}\n"));

    // A rank's part is labelled, and the section must match the tensors.
    let change = |name: &str, change: &dyn Fn(&mut Value)| {
        copy_with(&out, &temp.path().join(name), |config| change(&mut config["marlinspike"]));
        temp.path().join(name)
    };
    let w13 = format!("{EXPERT_LAYER}.w13");
    let ranks = change("ranks", &|section| section["tp_size"] = json!(2));
    assert_eq!(report(&ranks, &[])["partial"]["tp_size"], 2);
    let kind = change("kind", &|section| section["layers"][&w13]["kernel_layout"] = json!("odd"));
    refused("run", &kind, &[], &["kernel_layout", "odd"]);
    let size = change("size", &|section| section["layers"][&w13]["size_n"] = json!(512));
    refused("run", &size, &[], &["packed weights"]);
    let name = change("name", &|section| {
        section["layers"][&w13]["tensors"]["scales"] = json!("nothing");
    });
    refused("run", &name, &[], &["nothing"]);
}

#[test]
fn inspect_names_the_experts_and_the_methods_kernel() {
    for (name, layer, format, kernel) in [
        ("ct-fp8-moe", MIXTRAL_LAYER, "fp8 tensor", "FLASHINFER_CUTLASS"),
        ("fp8-block-moe", EXPERT_LAYER, "fp8 block 128x128", "TRITON"),
        ("ct-nvfp4-moe", MIXTRAL_LAYER, "nvfp4 (W4A4)", "FLASHINFER_TRTLLM"),
    ] {
        let capability = if name.contains("nvfp4") { "10.0" } else { "9.0" };
        let model = checkpoint(name);
        let arguments = ["inspect".as_ref(), model.as_os_str(), "--json".as_ref()];
        let more = ["--capability".as_ref(), capability.as_ref()];
        let output = run(arguments.into_iter().chain(more));
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        let found: Value = serde_json::from_str(stdout(&output)).unwrap();
        let layers = found["layers"].as_array().unwrap();
        for stack in ["w13", "w2"] {
            let named = layers.iter().find(|l| l["module"] == format!("{layer}.{stack}")).unwrap();
            assert_eq!((&named["format"], &named["experts"]), (&json!(format), &json!(2)));
        }
        assert_eq!(found["moe_kernels"][0]["format"], format);
        assert_eq!(found["moe_kernels"][0]["backend"], kernel, "{found}");
    }
}

#[test]
fn what_a_method_cannot_run_is_refused_by_name() {
    let temp = tempfile::tempdir().unwrap();
    let to = |name: &str| temp.path().join(name);
    let fp8 = checkpoint("ct-fp8-moe");
    let expert = format!("{MIXTRAL_LAYER}.1.w2");
    // Static activations without their scale, and scales that are none.
    copy_tensors(&fp8, &to("missing"), |t| (!t.name().ends_with(".w2.input_scale")).then_some(t));
    refused("run", &to("missing"), &[], &["experts.0.w2.input_scale", "fp8 tensor"]);
    let with = |name: &str, of: String, values: Vec<f32>| {
        copy_tensors(&fp8, &to(name), |t| match t.name() == of {
            true => Tensor::from_vec(&of, DType::F32, vec![values.len()], values.clone()).ok(),
            false => Some(t),
        });
    };
    with("zero", format!("{expert}.weight_scale"), vec![0.0]);
    refused("run", &to("zero"), &[], &["w2_weight_scale", "found 0", "positive finite"]);
    with("nan", format!("{expert}.input_scale"), vec![f32::NAN]);
    refused("run", &to("nan"), &[], &[&format!("{expert}.input_scale"), "NaN"]);
    with("two", format!("{expert}.weight_scale"), vec![1.0, 2.0]);
    refused("run", &to("two"), &[], &["scale", "found shape [3]"]);
    // A strategy of activations that does not match weights with one scale.
    copy_with(&fp8, &to("token"), |config| {
        let group = &mut config["quantization_config"]["config_groups"]["group_0"];
        group["input_activations"]["strategy"] = json!("token");
        group["input_activations"]["dynamic"] = json!(true);
    });
    refused("run", &to("token"), &["--layer", MIXTRAL_LAYER], &["Tensor", "DynamicToken"]);
    // Blocks that do not divide the intermediate size.
    copy_with(&checkpoint("fp8-block-moe"), &to("block"), |config| {
        config["quantization_config"]["weight_block_size"] = json!([96, 128]);
    });
    refused("run", &to("block"), &[], &["intermediate_size_per_partition", "128", "96"]);
    // w1 and w3 of an expert share their activations.
    with("apart", format!("{MIXTRAL_LAYER}.0.w3.input_scale"), vec![0.5]);
    refused("run", &to("apart"), &[], &[".0.w3.input_scale", "found 0.5", ".0.w1"]);
    // Arithmetics and activations that do not match the weights.
    refused("run", &fp8, &["--activations", "mxfp8"], &["mxfp8 of fp8 tensor"]);
    let nvfp4 = checkpoint("ct-nvfp4-moe");
    refused("run", &nvfp4, &["--arithmetic", "wgmma"], &["experts.0.w1", "wgmma"]);
    refused("run", &nvfp4, &["--dtype", "float32"], &["float32", "float16 or bfloat16"]);
    refused("run", &nvfp4, &["--nvfp4-backend", "CUBLAS"], &["CUBLAS", "VLLM_CUTLASS"]);
    refused("run", &nvfp4, &["--layer", "model.norm"], &["model.norm", "--list"]);
    // Wrong routing in config.json.
    for (key, value) in [
        ("num_experts_per_tok", json!(3)),
        ("norm_topk_prob", json!("yes")),
        ("scoring_func", json!("argmax")),
        ("hidden_act", json!("mish")),
    ] {
        let name = format!("bad-{key}");
        copy_with(&nvfp4, &to(&name), |config| config[key] = value.clone());
        refused("run", &to(&name), &["--layer", MIXTRAL_LAYER], &[key, &value.to_string()]);
    }
    // FlashInfer's forms: integers of another group, sizes that do not fit, linear layers.
    let out = to("out");
    let arguments = [out.to_str().unwrap(), "--to", "flashinfer"];
    refused("convert", &checkpoint("ct-pack-moe"), &arguments, &["hidden_size", "256"]);
    write_model(Format::CtPack, &to("groups"));
    refused("convert", &to("groups"), &arguments, &["groups of 64", "groups of 32"]);
    refused("convert", &nvfp4, &arguments, &["o_proj", "linear layer"]);
    refused("convert", &fp8, &arguments, &["fp8 tensor", "expected nvfp4"]);
    assert!(!out.exists());
}

#[test]
fn converted_mxfp4_experts_run_with_every_kernel() {
    let temp = tempfile::tempdir().unwrap();
    let (model, out) = (checkpoint("gpt-oss-mxfp4"), temp.path().join("out"));
    let kleidi = Settings { format: int4::FORMAT, ..settings() };
    convert(&model, &out, &kleidi).unwrap();
    let mut digests = Vec::new();
    for kernel in kernel_names(&CPU_E2M1) {
        for threads in ["1", "3"] {
            let arguments = ["--check", "--tokens", "7", "--kernel", kernel, "--threads", threads];
            let found = report(&out, &arguments);
            assert_eq!(found["check"]["mismatches"], 0, "{kernel}");
            assert_eq!(
                (&found["layer"], &found["source"]),
                (&json!(EXPERT_LAYER), &json!("packed"))
            );
            let arithmetic = found["arithmetic"].as_str().unwrap();
            assert!(arithmetic.contains("quantized per group of 32"), "{arithmetic}");
            digests.push(found["sha256"].clone());
        }
    }
    digests.dedup();
    assert_eq!(digests.len(), 1);
    refused("run", &out, &["--kernel", "portable"], &["portable", "scalar"]);
    // The checkpoint itself runs by its method, with activations as they are.
    let arithmetic = report(&model, &[])["arithmetic"].as_str().unwrap().to_owned();
    assert!(!arithmetic.contains("int8"), "{arithmetic}");
    let found = stdout(&run(["inspect".as_ref(), model.as_os_str(), "--json".as_ref()])).to_owned();
    let found: Value = serde_json::from_str(&found).unwrap();
    let targets = found["targets"].as_array().unwrap();
    let cpu = targets.iter().find(|t| t["target"] == "kleidiai").unwrap();
    assert_eq!((&cpu["takes"], &cpu["refused"]), (&json!(2), &json!([])));
}
