//! Whole blocks of 16-bit experts through `run`: transformers' outputs, in every form that files
//! store experts.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use marlinspike::container::{Container, write_container};
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike_model::run::options::{Options, Source};
use marlinspike_model::run::output::{Output, Outside, Run};
use marlinspike_model::run::{list, run};

/// Blocks with parts that `run` does not compute.
const REFUSED: &[&str] = &[
    "deepseek_v4-hash-small",
    "ernie4_5_vl_moe-small",
    "gemma4_text-small",
    "inkling-small",
    "inkling2-small",
    "muse_spark-small",
    "nemotron_h-latent-small",
    "zaya-skip-small",
];
/// What it says of them.
const REASONS: [&str; 4] = [
    "which are not computed",
    "inputs of `run` have no such tensor",
    "expected gate_up and down of hidden_size",
    "expected [N, 8]",
];
/// The block whose output has a norm, which `run` leaves out with a note.
const NORMED: &str = "axk1-small";

fn name(path: &Path) -> &str {
    path.file_stem().unwrap().to_str().unwrap()
}

fn all() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../golden/data/routers");
    let mut files: Vec<PathBuf> = fs::read_dir(root).unwrap().map(|e| e.unwrap().path()).collect();
    files.sort();
    files
}

/// The blocks that `run` computes to the end.
fn golden() -> Vec<PathBuf> {
    let mut files = all();
    let skipped = |n: &str| n == NORMED || REFUSED.contains(&n);
    files.retain(|path| !skipped(name(path)));
    files
}

fn widened(t: &Tensor<'_>) -> Vec<f32> {
    match t.dtype() {
        DType::F32 => t.elements::<f32>().into_owned(),
        _ => t.elements::<u16>().iter().map(|&b| f32::from_bits(u32::from(b) << 16)).collect(),
    }
}

pub(crate) fn save(path: &Path, tensors: &[Tensor<'_>]) {
    fs::write(path, write_container(tensors, &BTreeMap::new(), Vec::new()).unwrap()).unwrap();
}

/// Writes transformers' block as a model folder with the input of `run`; `change` may replace
/// tensors by their name below the layer.
fn write(
    file: &Container<'_>,
    dir: &Path,
    change: impl Fn(&str, Tensor<'static>) -> Tensor<'static>,
) {
    fs::create_dir_all(dir).unwrap();
    let prefix = &file.metadata()["layer_prefix"];
    let mut tensors = Vec::new();
    for t in file.tensors() {
        let t = t.unwrap();
        let Some(name) = t.name().strip_prefix("in.") else { continue };
        if !["hidden_states", "router_weight", "correction_bias"].contains(&name) {
            let name = name.to_owned();
            tensors.push(change(&name, t.clone().into_owned()).renamed(format!("{prefix}{name}")));
        }
    }
    save(&dir.join("model.safetensors"), &tensors);
    fs::write(dir.join("config.json"), &file.metadata()["config.json"]).unwrap();
    let x = file.tensor("in.hidden_states").unwrap();
    let x = Tensor::from_vec("x", DType::F32, x.shape().to_vec(), widened(&x)).unwrap();
    save(&dir.join("input.st"), &[x]);
}

fn checked(dir: &Path) -> Run {
    let mut options = Options::default();
    options.input = Source::File(dir.join("input.st"));
    options.check = true;
    run(dir, &options).unwrap_or_else(|e| panic!("{}: {e}", dir.display()))
}

fn numbers(output: &Output) -> Vec<f32> {
    widened(&output.tensor().unwrap())
}

/// The largest difference in units of the largest expected value.
fn difference(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    let size = expected.iter().fold(0.0f32, |m, x| m.max(x.abs()));
    found.iter().zip(expected).fold(0.0f32, |m, (f, e)| m.max((f - e).abs())) / size
}

#[test]
fn sixteen_bit_blocks_give_transformers_outputs() {
    let temp = tempfile::tempdir().unwrap();
    let files = golden();
    assert!(files.len() >= 11);
    for path in files {
        let name = name(&path);
        let bytes = fs::read(&path).unwrap();
        let file = Container::parse(&bytes).unwrap();
        let dir = temp.path().join(name);
        write(&file, &dir, |_, t| t);
        let found = checked(&dir);
        assert!(found.is_equal(), "{name}: {found:?}");
        // The router's own weight made the logits: the file gives none.
        assert_eq!(found.logits.as_ref().unwrap().outside, Some(Outside::default()), "{name}");
        assert_eq!(list(&dir, None).unwrap(), std::slice::from_ref(&found.module), "{name}");
        let y = widened(&file.tensor("out.y").unwrap());
        assert!(difference(&numbers(found.y()), &y) < 3e-6, "{name}");
        if file.get("out.y_experts").is_some() {
            let sum = widened(&file.tensor("out.y_experts").unwrap());
            assert!(difference(&numbers(found.y_experts().unwrap()), &sum) < 3e-6, "{name}");
            assert!(difference(&numbers(found.y_experts().unwrap()), &y) > 1e-3, "{name}");
        }
    }
}

#[test]
fn blocks_with_further_parts_are_refused_by_name() {
    let temp = tempfile::tempdir().unwrap();
    for path in all() {
        let name = name(&path);
        let is_refused = REFUSED.contains(&name);
        if !is_refused && name != NORMED {
            continue;
        }
        let bytes = fs::read(&path).unwrap();
        let dir = temp.path().join(name);
        write(&Container::parse(&bytes).unwrap(), &dir, |_, t| t);
        if is_refused {
            let mut options = Options::default();
            options.input = Source::File(dir.join("input.st"));
            let text = run(&dir, &options).unwrap_err().to_string();
            assert!(REASONS.iter().any(|reason| text.contains(reason)), "{name}: {text}");
        } else {
            let note = "y is the block's output before its norm";
            assert!(checked(&dir).notes.iter().any(|n| n == note), "{name}");
        }
    }
}

#[test]
fn each_tensor_of_the_block_is_read() {
    let temp = tempfile::tempdir().unwrap();
    for path in golden() {
        let name = name(&path);
        let bytes = fs::read(&path).unwrap();
        let file = Container::parse(&bytes).unwrap();
        let expected = widened(&file.tensor("out.y").unwrap());
        let parts = [
            "gate.weight",
            "router.weight",
            "router.bias",
            "shared_expert",
            "down_proj",
            "w2.weight",
        ];
        for part in parts {
            let has = file.tensors().any(|t| t.unwrap().name().contains(part));
            if !has {
                continue;
            }
            let dir = temp.path().join(format!("{name}-{part}"));
            // One bit of an exponent: twice or half the value.
            write(&file, &dir, |tensor, t| {
                if !tensor.contains(part) {
                    return t;
                }
                let (shape, mut bits) = (t.shape().to_vec(), t.elements::<u16>().into_owned());
                bits.iter_mut().for_each(|b| *b ^= 0x80);
                Tensor::from_vec(t.name(), t.dtype(), shape, bits).unwrap()
            });
            let found = checked(&dir);
            assert!(difference(&numbers(found.y()), &expected) > 1e-3, "{name} {part}");
        }
    }
}
