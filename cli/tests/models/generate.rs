//! `generate`: text of the golden models, and errors that name what is wrong.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../golden/data/models").join(name)
}

fn run(model: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_marlinspike"));
    command.arg("generate").arg(model).args(args).stdin(Stdio::null()).output().unwrap()
}

fn json_of(model: &Path, args: &[&str]) -> Value {
    let output = run(model, &[args, &["--json"]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Standard error of a command that must fail.
fn refused(model: &Path, args: &[&str]) -> String {
    let output = run(model, args);
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(output.stdout.is_empty(), "an error printed text");
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// A copy of a golden model, one of whose JSON files is changed.
fn changed(name: &str, file: &str, change: impl FnOnce(&mut Value)) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(golden(name)).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
    }
    let path = folder.path().join(file);
    let mut value: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    change(&mut value);
    std::fs::write(path, value.to_string()).unwrap();
    folder
}

const PROMPT: &str = "The lighthouse keeper counts the waves: one, two, three";

/// The tokens that `scripts/gen/generate_models.py` expects after `PROMPT`.
const QWEN: [u32; 16] = [249, 239, 63, 218, 281, 90, 166, 11, 278, 21, 54, 29, 72, 78, 27, 206];

#[test]
fn tokens_are_the_expected_ones_for_any_threads_and_passes() {
    let model = golden("qwen3-moe-tiny");
    for options in [
        &["--threads", "1"][..],
        &["--threads", "2", "--pin"],
        &["--threads", "3"],
        &["--chunk", "5"],
        &["--temperature", "0"],
    ] {
        let args = [&["--prompt", PROMPT, "--max-tokens", "16"], options].concat();
        let found = json_of(&model, &args);
        assert_eq!(found["tokens"], json!(QWEN), "{options:?}");
        assert_eq!(found["stop_token"], Value::Null);
        assert!(found["tokens_per_second"].as_f64().unwrap() > 0.0);
    }
}

#[test]
fn every_architecture_generates_the_expected_tokens() {
    let models: [(&str, [u32; 16]); 3] = [
        ("deepseek-v3-tiny", [16, 16, 53, 45, 34, 6, 32, 24, 32, 32, 73, 56, 44, 31, 34, 39]),
        ("deepseek-v2-tiny", [45, 21, 27, 49, 32, 14, 14, 14, 14, 14, 14, 14, 14, 18, 65, 39]),
        ("gpt-oss-tiny", [62, 66, 60, 60, 38, 61, 24, 24, 10, 54, 31, 31, 54, 54, 54, 54]),
    ];
    for (name, tokens) in models {
        for options in [&["--threads", "1"][..], &["--threads", "3", "--chunk", "5"]] {
            let args = [&["--prompt", PROMPT, "--max-tokens", "16"], options].concat();
            assert_eq!(json_of(&golden(name), &args)["tokens"], json!(tokens), "{name}");
        }
    }
}

#[test]
fn a_converted_folder_generates_the_same_text_streamed_or_whole() {
    let (model, temp) = (golden("mixtral-tiny"), tempfile::tempdir().unwrap());
    let packed = temp.path().join("packed");
    let mut convert = Command::new(env!("CARGO_BIN_EXE_marlinspike"));
    convert.args(["convert", "--to", "kleidiai"]).arg(&model).arg(&packed);
    assert!(convert.output().unwrap().status.success());
    let args = ["--prompt", PROMPT, "--max-tokens", "20"];
    let whole = json_of(&model, &args);
    let output = run(&packed, &args);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(text.strip_suffix('\n'), whole["text"].as_str());
    let times = String::from_utf8(output.stderr).unwrap();
    assert!(times.contains("tokens/s") && times.contains("first token after"), "{times}");
}

#[test]
fn a_conversation_a_file_and_draws_are_reproducible() {
    let model = golden("qwen3-moe-tiny");
    let temp = tempfile::tempdir().unwrap();
    let file = temp.path().join("prompt.txt");
    std::fs::write(&file, PROMPT).unwrap();
    let file = file.to_str().unwrap();
    let draw = ["--temperature", "1.5", "--top-k", "50", "--top-p", "0.95", "--max-tokens", "12"];
    let with =
        |prompt: &[&str], seed: &str| json_of(&model, &[prompt, &draw, &["--seed", seed]].concat());
    let (chat, plain) = (["--chat", "--prompt", PROMPT], ["--prompt-file", file]);
    assert_eq!(with(&chat, "1")["tokens"], with(&chat, "1")["tokens"]);
    assert_ne!(with(&chat, "1")["tokens"], with(&chat, "2")["tokens"]);
    assert_ne!(with(&chat, "1")["prompt_tokens"], with(&plain, "1")["prompt_tokens"]);
    assert_eq!(with(&plain, "3")["tokens"], with(&["--prompt", PROMPT], "3")["tokens"]);
}

#[test]
fn stop_tokens_come_from_the_generation_config() {
    let folder = changed("qwen3-moe-tiny", "generation_config.json", |config| {
        config["eos_token_id"] = json!([7, QWEN[2]]);
    });
    let found = json_of(folder.path(), &["--prompt", PROMPT]);
    assert_eq!((&found["tokens"], &found["stop_token"]), (&json!(QWEN[..2]), &json!(QWEN[2])));
}

#[test]
fn bad_input_is_refused_before_any_text() {
    let config = |change: fn(&mut Value)| changed("qwen3-moe-tiny", "config.json", change);
    let prompt = ["--prompt", PROMPT];
    let other = config(|c| c["model_type"] = json!("llama"));
    let text = refused(other.path(), &prompt);
    assert!(text.contains("found llama, expected one of qwen3_moe, mixtral"), "{text}");
    let deep = config(|c| c["num_hidden_layers"] = json!(3));
    let text = refused(deep.path(), &prompt);
    assert!(text.contains("tensor `model.layers.2.") && text.contains("found none"), "{text}");
    let shallow = config(|c| c["num_hidden_layers"] = json!(1));
    let text = refused(shallow.path(), &prompt);
    assert!(text.contains("found tensors that qwen3_moe does not use"), "{text}");
    let narrow = config(|c| c["head_dim"] = json!(16));
    let text = refused(narrow.path(), &prompt);
    assert!(text.contains("model.layers.0.self_attn.q_norm") && text.contains("[16]"), "{text}");
    let short = config(|c| c["max_position_embeddings"] = json!(11));
    let text = refused(short.path(), &prompt);
    assert!(text.contains("the prompt has 12 tokens") && text.contains("at most"), "{text}");
    let model = golden("qwen3-moe-tiny");
    let text = refused(&model, &["--prompt", PROMPT, "--max-tokens", "245"]);
    assert!(text.contains("12 tokens and 245 more") && text.contains("256"), "{text}");
    let text = refused(&model, &["--prompt", ""]);
    assert!(text.contains("the prompt has no tokens"), "{text}");
    let text = refused(&model, &["--prompt", PROMPT, "--memory", "0.00001"]);
    assert!(text.contains("memory: packing") && text.contains("limit of 0.0 MB"), "{text}");
    let text = refused(&model, &["--prompt", PROMPT, "--memory", "0.0003"]);
    assert!(text.contains("memory: a KV cache for 256 tokens"), "{text}");
    let text = refused(&model, &["--prompt", PROMPT, "--temperature=-1"]);
    assert!(text.contains("temperature: found -1"), "{text}");
    let text = refused(&model, &["--prompt", PROMPT, "--top-k", "5"]);
    assert!(text.contains("--temperature"), "{text}");
    let bare = changed("qwen3-moe-tiny", "config.json", |_| {});
    std::fs::remove_file(bare.path().join("tokenizer.json")).unwrap();
    assert!(refused(bare.path(), &prompt).contains("found no tokenizer.json"));
    // Another folder than a model's is not advised to have a tokenizer.
    let text = refused(&bare.path().join("missing"), &prompt);
    assert!(text.contains("missing") && !text.contains("tokenizer"), "{text}");
    std::fs::remove_file(bare.path().join("model.safetensors")).unwrap();
    let text = refused(bare.path(), &prompt);
    assert!(text.contains("model.safetensors") && !text.contains("tokenizer"), "{text}");
}

#[test]
fn keys_of_the_wrong_form_and_missing_biases_are_refused() {
    for (key, value, expected) in [
        ("rope_scaling", json!("yarn"), "rope_scaling: found \"yarn\", expected an object"),
        ("hidden_act", json!(3), "hidden_act: found 3, expected silu"),
        (
            "attention_bias",
            json!(true),
            "tensor `model.layers.0.self_attn.q_proj.bias`: found none",
        ),
    ] {
        let folder = changed("qwen3-moe-tiny", "config.json", |config| config[key] = value);
        let text = refused(folder.path(), &["--prompt", PROMPT]);
        assert!(text.contains(expected), "{text}");
    }
}

#[cfg(unix)]
#[test]
fn a_prompt_without_end_is_refused_and_a_date_is_checked() {
    let model = golden("qwen3-moe-tiny");
    // A FIFO without a writer would be waited for.
    let temp = tempfile::tempdir().unwrap();
    let fifo = temp.path().join("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    for path in ["/dev/zero", "/", fifo.to_str().unwrap()] {
        let text = refused(&model, &["--prompt-file", path]);
        assert!(text.contains(&format!("{path}: found a folder, FIFO")), "{text}");
        assert!(text.contains("expected a regular file"), "{text}");
    }
    let text = refused(&model, &["--prompt", PROMPT, "--chat", "--date", "2026-02-30"]);
    assert!(text.contains("expected a date such as 2026-03-05"), "{text}");
    let folder = changed("qwen3-moe-tiny", "tokenizer_config.json", |config| {
        config["chat_template"] = json!("{{ strftime_now('%d') }}");
    });
    let tokens = |date: &str| {
        let args = ["--prompt", PROMPT, "--chat", "--date", date, "--max-tokens", "1"];
        json_of(folder.path(), &args)["prompt_tokens"].clone()
    };
    assert_ne!(tokens("2026-02-07"), tokens("2026-02-08"));
}
