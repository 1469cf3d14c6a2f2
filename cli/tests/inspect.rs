//! `inspect`: the program's answer about the sample checkpoints, as a machine reads it.
#![allow(missing_docs)]

#[path = "../../model/tests/common/mod.rs"]
mod common;

use std::path::Path;
use std::process::{Command, Output};

use common::{Format, write_model};
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
    let line =
        "experts in fp8 block 128x128: upstream's kernel on CUDA 9.0: TRITON (TritonExperts)";
    assert!(text.lines().any(|l| l == line), "{text}");

    // MXFP4 has no such choice here.
    assert_eq!(inspect(&sample("gpt-oss-mxfp4"), &[])["moe_kernels"], json!([]));
}
