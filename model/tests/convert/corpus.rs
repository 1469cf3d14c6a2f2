//! The fuzzers' corpora for this crate's entry points and many mutations of them, on stable Rust:
//! nothing panics, and every hostile file gives the error that names its fault.

use std::path::Path;

use marlinspike_golden::Tier;
use marlinspike_model::fuzz;
use marlinspike_proptests::fuzz::corpus::{Corpus, MutatedFormat, mutations};

const SEED: u64 = 0xd002;

fn corpus(target: &str, entry: fn(&[u8]) -> Result<(), String>) -> Corpus<String> {
    let corpora = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tools/fuzz/corpus");
    Corpus::read(&corpora, target, entry)
}

fn input(data: &[u8]) -> Result<(), String> {
    fuzz::input(data).map_err(|e| e.to_string())
}

fn model(data: &[u8]) -> Result<(), String> {
    let temp = tempfile::tempdir().unwrap();
    fuzz::model(data, temp.path()).map_err(|e| e.to_string())
}

#[test]
fn input_corpus() {
    corpus("input", input).replay_messages(&[
        ("x_missing", &["`x`"]),
        ("x_width", &["`x`", "[3, 31]", "[M, 32]"]),
        ("x_rank", &["`x`", "[96]", "[M, 32]"]),
        ("x_empty", &["`x`", "M 1 or more"]),
        ("x_dtype", &["`x`", "I32"]),
        ("no_routing", &["topk_ids", "router_logits"]),
        ("logits_shape", &["router_logits", "[4, 3]", "[3, 4]"]),
        ("logits_dtype", &["router_logits", "BF16"]),
        ("ids_rows", &["topk_ids", "[2, 3]", "[3, top_k]"]),
        ("ids_rank", &["topk_ids", "[6]"]),
        ("weights_missing", &["topk_weights"]),
        ("weights_shape", &["topk_weights", "[3, 1]", "[3, 2]"]),
        ("ids_outside", &["topk_ids", "4"]),
        ("ids_negative", &["topk_ids", "-2"]),
        ("top_k", &["topk_ids", "[3, 0]", "1 or more"]),
    ]);
}

#[test]
fn model_corpus() {
    corpus("model", model).replay_messages(&[
        ("nothing", &["model.safetensors"]),
        ("no_config", &["config.json"]),
        ("no_tensors", &["model.safetensors"]),
        ("config_list", &["config.json", "an object"]),
        ("config_cut", &["config.json", "not JSON"]),
        ("config_deep", &["config.json", "recursion limit"]),
        ("shard_missing", &["b.safetensors", "does not exist"]),
        ("shard_other", &["`x`", "a.safetensors"]),
        ("shard_outside", &["`x`", "../a.safetensors"]),
        ("cut", &["model.safetensors"]),
        ("scales_missing", &["scales"]),
        ("shape", &["scales", "[1, 63]"]),
    ]);
}

#[test]
fn input_mutations() {
    corpus("input", input).hammer(
        SEED,
        MutatedFormat::Safetensors,
        mutations(Tier::current().pick(2_000, 4_000, 12_000)),
    );
}

#[test]
fn model_mutations() {
    corpus("model", model).hammer(
        SEED,
        MutatedFormat::Text,
        mutations(Tier::current().pick(150, 300, 900)),
    );
}
