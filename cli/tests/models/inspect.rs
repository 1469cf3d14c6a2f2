//! `inspect --json` on the sample checkpoints.

use std::path::Path;
use std::process::{Command, Output};

use crate::common::{Format, write_model};
use serde_json::{Value, json};

fn run(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_marlinspike")).args(args).output().unwrap()
}

fn inspect(model: &Path, more: &[&str]) -> Value {
    let mut args = vec!["inspect", model.to_str().unwrap(), "--json"];
    args.extend(more);
    let out = run(&args);
    assert_eq!(out.status.code(), Some(0), "{}", String::from_utf8_lossy(&out.stderr));
    serde_json::from_slice(&out.stdout).unwrap()
}

fn sample(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../golden/data/checkpoints").join(name)
}

#[test]
fn experts_are_one_line_per_stack() {
    let found = inspect(&sample("ct-pack-moe"), &[]);
    assert_eq!(
        found["layers"][0],
        json!({
            "module": "model.layers.0.mlp.experts.w13",
            "format": "compressed-tensors pack-quantized uint4b8",
            "weight_type": "uint4b8",
            "bits": 4,
            "group_size": 32,
            "act_order": false,
            "size_k": 128,
            "size_n": 256,
            "experts": 2,
            // Codes 2 · 2 · 128 · 128 / 2, scales 2 · 2 · 128 · 4 of two bytes.
            "bytes": 32_768 + 4_096,
            "backend": "fused_marlin_moe",
            "reasons_against": [],
        })
    );
    assert_eq!(found["totals"]["layers"], 6);
    assert_eq!(found["totals"]["for_marlin"], 6);
    assert_eq!(found["unquantized"]["in the ignore list"], json!(["model.layers.0.mlp.gate"]));
}

#[test]
fn dynamic_rules_show_in_bits_and_reasons() {
    let found = inspect(&sample("gptq-dynamic"), &[]);
    let bits = |module: &str| {
        let layers = found["layers"].as_array().unwrap();
        layers.iter().find(|l| l["module"] == module).map(|l| l["bits"].clone())
    };
    assert_eq!(bits("model.layers.0.self_attn.q_proj"), Some(json!(8)));
    assert_eq!(bits("model.layers.0.self_attn.o_proj"), Some(json!(4)));
    assert_eq!(bits("model.layers.0.mlp.down_proj"), None);
    let rule = "rule `-:.*(?<=mlp\\.)down_proj`";
    assert_eq!(found["unquantized"][rule], json!(["model.layers.0.mlp.down_proj"]));
}

#[test]
fn refusals_are_given_with_their_reasons() {
    let found = inspect(&sample("gptq-actorder"), &["--capability", "7.0"]);
    assert_eq!(found["totals"]["for_marlin"], 0);
    let reasons = found["layers"][0]["reasons_against"].as_array().unwrap();
    assert!(reasons.iter().any(|r| r.as_str().unwrap().contains("7.5")), "{reasons:?}");

    let temp = tempfile::tempdir().unwrap();
    write_model(Format::Gptq4, temp.path());
    let found = inspect(temp.path(), &["--tp-size", "3"]);
    let reasons = found["layers"][0]["reasons_against"].to_string();
    assert!(reasons.contains("not divisible by tp_size = 3"), "{reasons}");
}

#[test]
fn bad_input_has_exit_code_2_and_names_the_file() {
    let temp = tempfile::tempdir().unwrap();
    let out = run(&["inspect", temp.path().to_str().unwrap()]);
    assert_eq!(out.status.code(), Some(2));
    let text = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(text.contains("no model.safetensors"), "{text}");
    let out = run(&["inspect", sample("awq").to_str().unwrap(), "--capability", "new"]);
    assert_eq!(out.status.code(), Some(2));
}

#[test]
fn experts_come_with_upstreams_kernel_and_every_refusal() {
    let temp = tempfile::tempdir().unwrap();
    write_model(Format::Fp8Block, temp.path());
    let chosen = |capability: &str| {
        let found = inspect(temp.path(), &["--capability", capability]);
        let kernels = found["moe_kernels"].as_array().unwrap().clone();
        assert_eq!(kernels.len(), 1, "one scheme");
        kernels[0].clone()
    };
    let hopper = chosen("9.0");
    assert_eq!(hopper["format"], "fp8 block 128x128");
    assert_eq!(hopper["method"], "fp8");
    assert_eq!([&hopper["backend"], &hopper["experts"]], ["TRITON", "TritonExperts"]);
    assert_eq!(chosen("8.0")["backend"], "MARLIN");
    assert_eq!(chosen("10.0")["backend"], "FLASHINFER_TRTLLM");
    let volta = chosen("7.0");
    assert_eq!(volta["backend"], Value::Null);
    assert_eq!(volta["error"], "no fp8 MoE backend supports the deployment");
    let refusals = volta["refusals"].as_array().unwrap();
    assert_eq!(refusals.len(), 13, "every class refuses");
    let marlin = refusals.iter().find(|r| r["experts"] == "MarlinExperts").unwrap();
    let reason = "kernel does not support current device CUDA 7.0, expected CUDA 7.5 or newer";
    assert_eq!(marlin["reasons"], json!([reason]));

    let out = run(&["inspect", temp.path().to_str().unwrap(), "--capability", "9.0"]);
    let text = String::from_utf8(out.stdout).unwrap();
    let line = "experts in fp8 block 128x128: vLLM 0.21.0 selects on CUDA 9.0: backend TRITON (class TritonExperts)";
    assert!(text.split_whitespace().collect::<Vec<_>>().join(" ").contains(line), "{text}");

    // MXFP4 has no such choice here.
    assert_eq!(inspect(&sample("gpt-oss-mxfp4"), &[])["moe_kernels"], json!([]));
}

fn text(model: &Path, more: &[&str]) -> String {
    let out = run(&[&["inspect", model.to_str().unwrap()], more].concat());
    assert_eq!(out.status.code(), Some(0), "{}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap()
}

/// The entry of `target`: the number of supported layers, and the refusals.
fn verdict<'v>(found: &'v Value, target: &str) -> (u64, &'v [Value]) {
    let all = found["targets"].as_array().unwrap();
    let one = all.iter().find(|t| t["target"] == target).unwrap();
    (one["takes"].as_u64().unwrap(), one["refused"].as_array().unwrap())
}

#[test]
fn w4a8_layers_are_for_the_cpu() {
    let model = sample("ct-int-w4a8-moe");
    let found = inspect(&model, &[]);
    let layers = found["layers"].as_array().unwrap().len() as u64;
    assert!(layers > 2);
    assert_eq!(verdict(&found, "kleidiai"), (layers, &[][..]));
    for other in ["marlin", "flashinfer", "deepgemm", "cuda"] {
        let (takes, refused) = verdict(&found, other);
        assert_eq!((takes, refused.len() as u64), (0, layers), "{other}");
        assert!(refused.iter().all(|r| r["reasons"][0].is_string()), "{other}");
    }
    let short = text(&model, &[]);
    assert!(short.lines().all(|line| line.chars().count() <= 80), "{short}");
    for (word, column) in
        [("no", "Marlin"), ("yes", "CPU 4-bit"), ("no", "FlashInfer"), ("no", "CUDA")]
    {
        let begins = format!("  {word:<6}{column:<12}");
        assert_eq!(short.lines().filter(|l| l.starts_with(&begins)).count(), 1, "{short}");
    }
    let text = text(&model, &["-v"]);
    let head = text.lines().find(|l| l.trim_start().starts_with("layer ")).unwrap();
    let columns = ["Marlin", "CPU 4-bit", "FlashInfer", "DeepGEMM", "CUDA"];
    let at = columns.map(|c| head.find(c).unwrap_or_else(|| panic!("{c}: {head}")));
    assert!(at.is_sorted(), "{head}");
    let row = text.lines().find(|l| l.contains(".experts.w13 ")).unwrap();
    let answers: Vec<_> = row.split_whitespace().rev().take(5).collect();
    assert_eq!(answers, ["no", "no", "no", "yes", "no"], "{row}");
    // Layers with the same reasons share a line: one for each of the others, not one for each layer.
    let refusals = text.lines().filter(|l| l.starts_with("not for Marlin:")).count();
    assert!(refusals <= 2, "{text}");
    assert!(!text.contains("not for CPU int4"), "{text}");
}

#[test]
fn every_column_follows_the_format_and_the_device() {
    // Marlin, CUDA and the CPU's path support zero points.
    let awq = inspect(&sample("awq"), &[]);
    let layers = awq["layers"].as_array().unwrap().len() as u64;
    assert_eq!((verdict(&awq, "marlin").0, verdict(&awq, "cuda").0), (layers, layers));
    assert_eq!(verdict(&awq, "kleidiai").0, layers);
    // The CUDA kernels need 8.0, Marlin's upstream 7.5.
    let turing = inspect(&sample("awq"), &["--capability", "7.5"]);
    assert_eq!((verdict(&turing, "marlin").0, verdict(&turing, "cuda").0), (layers, 0));
    let reason = &verdict(&turing, "cuda").1[0]["reasons"][0];
    assert!(reason.as_str().unwrap().contains("8.0"), "{reason}");
    // FlashInfer supports experts, but no linear layer.
    let nvfp4 = inspect(&sample("ct-nvfp4-moe"), &[]);
    let (takes, refused) = verdict(&nvfp4, "flashinfer");
    let experts = nvfp4["layers"].as_array().unwrap().iter().filter(|l| l["experts"].is_u64());
    assert_eq!(takes, experts.count() as u64);
    for r in refused {
        assert_eq!(r["reasons"], json!(["found a linear layer, expected experts"]));
    }
}

#[test]
fn a_converted_folder_is_described_and_not_refused() {
    let temp = tempfile::tempdir().unwrap();
    for (name, to, layout) in [
        ("ct-pack-moe", "marlin", "Marlin"),
        ("ct-int-w4a8-moe", "kleidiai", "CPU 4-bit"),
        ("ct-nvfp4-moe", "flashinfer", "FlashInfer"),
    ] {
        let out = temp.path().join(name);
        let arguments = ["--to", to, "--skip-unsupported", "--json"];
        let model = sample(name);
        let paths = [model.to_str().unwrap(), out.to_str().unwrap()];
        let done = run(&[&["convert"], &paths[..], &arguments[..]].concat());
        assert_eq!(done.status.code(), Some(0), "{}", String::from_utf8_lossy(&done.stderr));
        let done: Value = serde_json::from_slice(&done.stdout).unwrap();

        let before = inspect(&sample(name), &[]);
        let found = inspect(&out, &[]);
        assert_eq!(found["converted"]["layout"], to);
        assert_eq!(before["converted"], Value::Null);
        assert_eq!(found["quant_method"], before["quant_method"]);
        let layers = found["layers"].as_array().unwrap();
        assert_eq!(layers.len() as u64, done["converted"].as_u64().unwrap());
        assert_eq!(verdict(&found, to), (layers.len() as u64, &[][..]));
        for layer in layers {
            let same = |l: &&Value| l["module"] == layer["module"];
            let was = before["layers"].as_array().unwrap().iter().find(same).unwrap();
            for key in ["format", "weight_type", "bits", "group_size", "act_order", "experts"] {
                assert_eq!(layer[key], was[key], "{name} {key}");
            }
            assert_eq!([&layer["size_k"], &layer["size_n"]], [&was["size_k"], &was["size_n"]]);
            assert!(layer["bytes"].as_u64().unwrap() > 0);
        }
        let text = text(&out, &[]);
        assert!(text.lines().next().unwrap().contains(&format!("converted for {to}")), "{text}");
        assert!(text.contains(layout), "{text}");
        // A section without the tensor that it names is an error that names it.
        let config = std::fs::read_to_string(out.join("config.json")).unwrap();
        let tensors = ["qweight", "weight_packed", "rhs_packed", "w13_weight"];
        let tensor = tensors.iter().find(|t| config.contains(&format!("{t}\""))).unwrap();
        let other = config.replace(&format!("{tensor}\""), "absent\"");
        std::fs::write(out.join("config.json"), other).unwrap();
        let failed = run(&["inspect", out.to_str().unwrap()]);
        assert_eq!(failed.status.code(), Some(2));
        assert!(String::from_utf8_lossy(&failed.stderr).contains("absent` is missing"));
    }
}

/// With --json, a failure prints an object with `error` and `help` on standard output.
#[test]
fn failures_are_json_where_json_was_asked_for() {
    let temp = tempfile::tempdir().unwrap();
    let none = temp.path().join("none");
    let (none, out) = (none.to_str().unwrap(), temp.path().join("out"));
    let (awq, out) = (sample("awq"), out.to_str().unwrap());
    let awq = awq.to_str().unwrap();
    let fp8 = sample("ct-fp8-channel");
    let fp8 = fp8.to_str().unwrap();
    for (arguments, expected) in [
        (&["convert", none, out, "--to", "marlin", "--json"][..], none),
        (&["convert", fp8, out, "--to", "kleidiai", "--json"], "expected integers of 4 bits"),
        (
            &["convert", awq, out, "--to", "kleidiai", "--nr", "4", "--tp-rank", "1", "--json"],
            "tp_rank",
        ),
        (&["convert", "--verify", none, "--json"], "marlinspike-manifest.json"),
        (&["inspect", none, "--json"], none),
        (&["run", none, "--json"], none),
        (&["run", awq, "--layer", "no.such", "--json"], "no.such"),
    ] {
        let done = run(arguments);
        assert_eq!(done.status.code(), Some(2), "{arguments:?}");
        let value: Value = serde_json::from_slice(&done.stdout).unwrap();
        let error = value["error"].as_str().unwrap();
        assert!(error.contains(expected), "{arguments:?}: {error}");
        assert!(!value["help"].as_str().unwrap().is_empty());
        assert!(String::from_utf8_lossy(&done.stderr).contains("error:"), "{arguments:?}");
        // Without --json, standard output is empty.
        let plain: Vec<_> = arguments.iter().filter(|a| **a != "--json").copied().collect();
        assert!(run(&plain).stdout.is_empty());
    }
    assert!(!Path::new(out).join("config.json").exists());
}

/// The entries of `upstream_changes` as `question: before -> after`, with their modules.
fn upstream_changes(model: &Path, more: &[&str]) -> Vec<(String, Vec<String>)> {
    let found = inspect(model, more);
    let changes = found["upstream_changes"].as_array().unwrap();
    let text = |v: &Value| v.as_str().unwrap().to_owned();
    let one = |c: &Value| {
        assert_eq!(c["vllm"], "0.33.0");
        let modules = c["modules"].as_array().unwrap().iter().map(text).collect();
        let [question, before, after] = ["question", "before", "after"].map(|key| text(&c[key]));
        (format!("{question}: {before} -> {after}"), modules)
    };
    changes.iter().map(one).collect()
}

#[test]
fn a_newer_release_is_compared_with_the_one_that_verdicts_follow() {
    let temp = tempfile::tempdir().unwrap();
    write_model(Format::Gptq4, temp.path());
    let experts = vec!["model.layers.0.mlp.experts".to_owned()];
    // Groups of 128 in linear layers: Machete in both. Experts move to Humming.
    let hopper = [(
        "kernel: MARLIN (MarlinExperts) -> HUMMING (HummingIndexedExperts)".to_owned(),
        experts.clone(),
    )];
    assert_eq!(upstream_changes(temp.path(), &[]), hopper);
    assert_eq!(upstream_changes(temp.path(), &["--vllm", "0.33"]), hopper);
    for more in [["--vllm", "0.21"], ["--capability", "8.9"]] {
        assert!(upstream_changes(temp.path(), &more).is_empty(), "{more:?}");
    }
    let line = "in vLLM 0.33.0: model.layers.0.mlp.experts: kernel: HUMMING \
                (HummingIndexedExperts) (0.21.0: MARLIN (MarlinExperts))";
    let shown = text(temp.path(), &[]);
    assert!(shown.split_whitespace().collect::<Vec<_>>().join(" ").contains(line), "{shown}");
    assert!(!text(temp.path(), &["--vllm", "0.21.0"]).contains("in vLLM"));
    // Columns that are not whole tiles on one of four ranks are padded.
    let padded = upstream_changes(temp.path(), &["--capability", "8.0", "--tp-size", "16"]);
    let text = format!("{padded:?}");
    assert!(text.contains("32 is not a multiple of 64 -> padded with zeros to K x N = "), "{text}");

    // Act-order is refused, for each layer alike: one line.
    let ordered = upstream_changes(&sample("gptq-actorder"), &[]);
    let (change, modules) = &ordered[0];
    let expected = "act-order: rows are sorted by group -> refused: the checkpoint does not load";
    assert_eq!(change, expected);
    assert!(modules.len() > 1, "{modules:?}");
    let out = run(&["inspect", temp.path().to_str().unwrap(), "--vllm", "0.30"]);
    assert_eq!(out.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&out.stderr).contains("expected one of 0.21.0, 0.33.0"));
}

#[test]
fn ranks_that_cut_a_quantization_group_are_refused_by_name() {
    let temp = tempfile::tempdir().unwrap();
    let linear = "model.layers.0.self_attn.o_proj";
    // K = 512 over the ranks, for groups of 128 and of 64.
    for (format, to, right, wrong, group) in [
        (Format::Gptq4, "marlin", "4", "8", 128),
        (Format::Fp8Block, "marlin", "2", "8", 128),
        (Format::CtPack, "kleidiai", "8", "32", 64),
    ] {
        let model = temp.path().join(format!("{to}-{group}-{right}"));
        write_model(format, &model);
        let reasons = |ranks: &str, module: &str| {
            let found = inspect(&model, &["--tp-size", ranks]);
            let (_, refused) = verdict(&found, to);
            let of = refused.iter().find(|r| r["module"] == module);
            of.map_or(String::new(), |r| r["reasons"].to_string())
        };
        let part = 512 / wrong.parse::<usize>().unwrap();
        let expected = format!(
            "tp_size = {wrong}: a rank's part of K = {part}, of 512 in all, cuts a quantization \
             group: expected a multiple of group_size = {group}"
        );
        for module in [linear, "model.layers.0.mlp.experts.w2"] {
            let found = reasons(wrong, module);
            assert!(found.contains(&expected), "{format:?} {module}: {found}");
            let found = reasons(right, module);
            assert!(!found.contains("quantization group"), "{format:?} {module}: {found}");
        }
        let out = model.join("out");
        let [from, out] = [&model, &out].map(|p| p.to_str().unwrap());
        let failed = run(&["convert", from, out, "--to", to, "--tp-size", wrong]);
        let text = String::from_utf8_lossy(&failed.stderr).into_owned();
        assert_eq!(failed.status.code(), Some(2), "{text}");
        assert!(text.contains(linear) && text.contains(&expected), "{text}");
        assert!(!Path::new(out).join("config.json").exists());
        let done =
            run(&["convert", from, out, "--to", to, "--tp-size", right, "--skip-unsupported"]);
        assert_eq!(done.status.code(), Some(0), "{}", String::from_utf8_lossy(&done.stderr));
        let config = std::fs::read(Path::new(out).join("config.json")).unwrap();
        let config: Value = serde_json::from_slice(&config).unwrap();
        let size_k = &config["marlinspike"]["layers"][linear]["size_k"];
        assert_eq!(*size_k, 512 / right.parse::<usize>().unwrap(), "{format:?}");
    }
}
