//! The fuzzers' corpora of this crate's doors and many mutations of them, on stable: nothing panics,
//! and every hostile file gives the error that names what is wrong with it.
#![allow(missing_docs)]

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

use marlinspike::vectors::Rng;
use marlinspike_model::fuzz;
use marlinspike_proptests::fuzz::mutate::mutate;

fn corpus(target: &str) -> BTreeMap<String, Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(target);
    let files: BTreeMap<_, _> = std::fs::read_dir(&folder)
        .unwrap_or_else(|e| panic!("{}: {e}", folder.display()))
        .map(|f| f.unwrap().path())
        .map(|p| (p.file_name().unwrap().to_str().unwrap().to_owned(), std::fs::read(p).unwrap()))
        .collect();
    assert!(files.len() > 15, "{target}: {} files", files.len());
    files
}

fn input(data: &[u8]) -> Result<(), String> {
    fuzz::input(data).map_err(|e| e.to_string())
}

fn model(data: &[u8]) -> Result<(), String> {
    let temp = tempfile::tempdir().unwrap();
    fuzz::model(data, temp.path()).map_err(|e| e.to_string())
}

type Door = fn(&[u8]) -> Result<(), String>;

/// `valid_*` is accepted; `hostile_*` gives an error with each of the words that `table` has for it,
/// and the table and the folder hold the same files.
fn replay(target: &str, door: Door, table: &[(&str, &[&str])]) {
    let mut files = corpus(target);
    for (name, words) in table {
        let name = format!("hostile_{name}");
        let data = files.remove(&name).unwrap_or_else(|| panic!("{target}/{name} is not there"));
        let error = door(&data).expect_err(&name);
        for word in *words {
            assert!(error.contains(word), "{target}/{name}: {word:?} is not in {error}");
        }
    }
    for (name, data) in &files {
        assert!(name.starts_with("valid_"), "{target}/{name} is in no table");
        door(data).unwrap_or_else(|e| panic!("{target}/{name}: {e}"));
    }
}

/// Files per target that are changed, unless a variable says more: for a longer run by hand.
fn mutations(usual: usize) -> usize {
    let given = std::env::var("MARLINSPIKE_MUTATIONS").ok();
    given.map_or(usual, |text| text.parse().expect("a number of mutations"))
}

fn hammer(target: &str, door: Door, binary: bool, count: usize) {
    let files: Vec<_> = corpus(target).into_iter().collect();
    let (start, mut accepted) = (Instant::now(), 0);
    for i in 0..count {
        let mut rng = Rng::for_case(0xd002, i as u64);
        let valid = rng.chance(2, 3);
        let seeds: Vec<_> =
            files.iter().filter(|(n, _)| !valid || n.starts_with("valid")).collect();
        let (name, seed) = rng.pick(&seeds);
        let (_, other) = &files[rng.below(files.len())];
        let other = if other.is_empty() { seed } else { other };
        let data = mutate(&mut rng, seed, other, binary);
        match std::panic::catch_unwind(|| door(&data).is_ok()) {
            Ok(ok) => accepted += usize::from(ok),
            Err(_) => panic!("{target}: mutation {i} of {name} panics"),
        }
    }
    println!("{target}: {count} mutations, {accepted} accepted, in {:.1?}", start.elapsed());
    assert!(accepted > count / 100, "{target}: only {accepted} accepted");
}

#[test]
fn input_corpus() {
    replay(
        "input",
        input,
        &[
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
        ],
    );
}

#[test]
fn model_corpus() {
    replay(
        "model",
        model,
        &[
            ("nothing", &["model.safetensors"]),
            ("no_config", &["config.json"]),
            ("no_tensors", &["model.safetensors"]),
            ("config_list", &["config.json", "an object"]),
            ("config_cut", &["config.json", "not JSON"]),
            ("config_deep", &["config.json", "recursion limit"]),
            ("shard_missing", &["b.safetensors", "does not exist"]),
            ("shard_other", &["`x`", "a.safetensors"]),
            ("shard_outside", &["`x`", "../a.safetensors"]),
            ("in_two", &["a.safetensors", "b.safetensors"]),
            ("cut", &["model.safetensors"]),
            ("scales_missing", &["scales"]),
            ("shape", &["scales", "[1, 63]"]),
        ],
    );
}

#[test]
fn input_mutations() {
    hammer("input", input, true, mutations(10_000));
}

#[test]
fn model_mutations() {
    hammer("model", model, false, mutations(600));
}
