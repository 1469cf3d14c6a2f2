//! Hostile tokenizers and chat templates: each ends at a limit that is named, with the file and the key.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::support::{run, stderr, unwrapped};

/// A copy of a golden model's folder.
fn model() -> tempfile::TempDir {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../golden/data/models/qwen3-moe-tiny");
    let folder = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(golden).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
    }
    folder
}

/// Exit code and standard error of a run.
fn ended(folder: &Path, more: &[&str]) -> (Option<i32>, String) {
    let folder = folder.to_str().unwrap();
    let output = run([&["generate", folder, "--max-tokens", "40"], more].concat());
    (output.status.code(), unwrapped(stderr(&output)))
}

/// The error of a chat template.
fn of_template(template: &str) -> String {
    let folder = model();
    fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
    let (code, text) = ended(folder.path(), &["--chat", "--prompt", "hi"]);
    assert_eq!(code, Some(2), "{text}");
    assert!(text.contains("chat_template.jinja: the file: "), "{text}");
    text
}

/// The error of a changed tokenizer.
fn of_tokenizer(change: impl FnOnce(&mut Value)) -> String {
    let folder = model();
    let path = folder.path().join("tokenizer.json");
    let mut tokenizer = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut tokenizer);
    fs::write(path, tokenizer.to_string()).unwrap();
    let (code, text) = ended(folder.path(), &["--prompt", "hello a b"]);
    assert_eq!(code, Some(2), "{text}");
    text
}

const MEMORY: [&str; 3] = ["memory: found one more allocation of ", "at most 2", "bytes in all"];
const STACK: [&str; 3] =
    ["stack: found nesting that needs more than ", "expected at most ", "bytes"];
const STEPS: [&str; 2] = ["found more than ", " steps, the limit for these messages"];
const TIME: [&str; 3] = ["CPU time: found more than 2 s", "expected at most 2 s", "SECURITY.md"];

#[track_caller]
fn expect(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
}

#[test]
fn native_operations_of_templates_have_limits() {
    let nested = |depth: usize| format!("{}ns.a{}", "[".repeat(depth), "]".repeat(depth));
    let deep = nested(64);
    let deep = format!(
        "{{% set ns=namespace(a=[1]) %}}{{% for i in range(1300) %}}{{% set ns.a={deep} %}}{{% endfor %}}\
         {{{{ ns.a }}}}"
    );
    expect(&of_template(&deep), &STACK);
    let replaced = "{{ ('x'*10000).replace('x','y'*1000000)|length }}";
    // The library counts the bytes of a replacement as steps.
    expect(&of_template(replaced), &STEPS);
    let indented = "{% set ns=namespace(a=[1]) %}{% for i in range(24) %}{% set ns.a=[ns.a,ns.a] %}\
        {% endfor %}{{ ns.a|tojson(indent=99999) }}";
    let text = of_template(indented);
    assert!(text.contains(MEMORY[0]) || text.contains(TIME[0]) || text.contains("steps"), "{text}");
    // Nested lists, each twice in the next, are compared: 2^60 steps without an end.
    let compared = "{% set ns=namespace(a=[1],b=[1]) %}{% for i in range(60) %}\
        {% set ns.a=[ns.a,ns.a] %}{% set ns.b=[ns.b,ns.b] %}{% endfor %}{{ ns.a==ns.b }}";
    expect(&of_template(compared), &TIME);
    let doubled = "{% set ns=namespace(a=[1]) %}{% for i in range(60) %}{% set ns.a=ns.a+ns.a %}\
        {% endfor %}{{ ns.a|length }}";
    let text = of_template(doubled);
    assert!(text.contains(MEMORY[0]) || text.contains(TIME[0]), "{text}");
}

#[test]
fn a_template_of_the_config_is_named_by_its_key() {
    let folder = model();
    let path = folder.path().join("tokenizer_config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["chat_template"] = json!("{{ ('x'*10000).replace('x','y'*1000000)|length }}");
    fs::write(path, config.to_string()).unwrap();
    let (code, text) = ended(folder.path(), &["--chat", "--prompt", "hi"]);
    assert_eq!(code, Some(2), "{text}");
    expect(&text, &["tokenizer_config.json: chat_template: ", STEPS[1]]);
}

/// Changes a tokenizer.
type Edit = fn(&mut Value);

#[test]
fn tokenizers_that_panic_or_take_all_memory_are_bad_input_by_key() {
    let cases: [(&str, Edit, &[&str]); 6] = [
        (
            "model",
            |t| t["model"] = json!({"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": ["a b"]}),
            &["library tokenizers cannot process", "it stops with `"],
        ),
        (
            "normalizer",
            |t| t["normalizer"] = json!({"type": "Precompiled", "precompiled_charsmap": ""}),
            &["library tokenizers cannot process"],
        ),
        (
            "pre_tokenizer",
            |t| t["pre_tokenizer"] = json!({"type": "FixedLength", "length": 0}),
            &["library tokenizers cannot process"],
        ),
        (
            "decoder",
            |t| {
                let most = u64::MAX;
                let parts = ["a", "e", "o", "n", "t", "i", "s", "r"];
                let strip = |c| json!({"type": "Strip", "content": c, "start": most, "stop": most});
                let parts: Vec<_> = parts.into_iter().map(strip).collect();
                t["decoder"] = json!({"type": "Sequence", "decoders": parts});
            },
            &["library tokenizers cannot process"],
        ),
        (
            "post_processor",
            |t| {
                let single = json!({"Sequence": {"id": "A", "type_id": 0}});
                t["post_processor"] = json!({
                    "type": "TemplateProcessing", "single": vec![single; 100_000], "pair": [],
                    "special_tokens": {},
                });
            },
            &[": found ", "expected at most "],
        ),
        ("normalizer", |t| t["normalizer"] = json!({"type": "no such"}), &["not a tokenizer: "]),
    ];
    for (key, change, parts) in cases {
        let text = of_tokenizer(change);
        expect(&text, &[&format!("tokenizer.json: {key}: ")]);
        expect(&text, parts);
        assert!(!text.contains("report it") && !text.contains("internal"), "{text}");
    }
}

/// The worker is no door of its own: what it is given by anyone else is refused.
#[test]
fn the_worker_takes_requests_only() {
    let output = run(["text-worker"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(output.stdout.ends_with(env!("CARGO_PKG_VERSION").as_bytes()));
}
