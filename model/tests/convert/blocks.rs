//! Whole blocks of 16-bit experts through `run`: transformers' outputs, in every form that files
//! store experts.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use marlinspike::container::{Container, write_container};
use marlinspike::num::scalar::ScalarType;
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike_model::model::routing::MoeRouting;
use marlinspike_model::model::{Model, ModelFiles};
use marlinspike_model::run::options::{Options, Source};
use marlinspike_model::run::output::{Output, Outside, Run};
use marlinspike_model::run::{list, run};

fn name(path: &Path) -> &str {
    path.file_stem().unwrap().to_str().unwrap()
}

/// The blocks that transformers computed.
fn golden() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../golden/data/routers");
    let mut files: Vec<PathBuf> = fs::read_dir(root).unwrap().map(|e| e.unwrap().path()).collect();
    files.sort();
    files
}

fn widened(t: &Tensor<'_>) -> Vec<f32> {
    match t.dtype() {
        DType::F32 => t.elements::<f32>().into_owned(),
        _ => t.elements::<u16>().iter().map(|&b| f32::from_bits(u32::from(b) << 16)).collect(),
    }
}

/// Inputs of a golden file that are no tensors of the checkpoint.
const NOT_IN_FILES: &[&str] =
    &["hidden_states", "router_weight", "correction_bias", "token_ids", "token_types"];

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
        if !NOT_IN_FILES.contains(&name) {
            let name = name.to_owned();
            tensors.push(change(&name, t.clone().into_owned()).renamed(format!("{prefix}{name}")));
        }
    }
    save(&dir.join("model.safetensors"), &tensors);
    fs::write(dir.join("config.json"), &file.metadata()["config.json"]).unwrap();
    let x = file.tensor("in.hidden_states").unwrap();
    let x = Tensor::from_vec("x", DType::F32, x.shape().to_vec(), widened(&x)).unwrap();
    let own = ["token_ids", "token_types"].into_iter().filter_map(|name| {
        let tensor = file.tensor(&format!("in.{name}")).ok()?;
        Some(tensor.into_owned().renamed(name))
    });
    save(&dir.join("input.st"), &[x].into_iter().chain(own).collect::<Vec<_>>());
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
    assert!(files.len() >= 20);
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
            let found = numbers(found.y_experts().unwrap());
            assert!(difference(&found, &sum) < 3e-6, "{name}");
            assert!(found.len() != y.len() || difference(&found, &y) > 1e-3, "{name}");
        }
    }
}

/// Parts of the names of tensors that change a block's output.
const PARTS: &[&str] = &[
    "gate.weight",
    "gate.weight_1",
    "gate.tid2eid",
    "gate.global_scale",
    "gate.down_proj",
    "router.weight",
    "router.bias",
    "router.proj",
    "router.scale",
    "router.per_expert_scale",
    "router_mlp.norm",
    "router_mlp.fc1.weight",
    "router_mlp.fc2.bias",
    "router_mlp.out_proj",
    "shared_expert",
    "down_proj",
    "w2.weight",
    "w13_weight",
    "post_mlp_layernorm",
    "pre_feedforward_layernorm_2",
    "post_feedforward_layernorm_2",
    "pre_expert_norm",
    "pre_expert_proj",
    "post_expert_norm",
    "post_expert_proj",
    "fc1_latent_proj",
    "fc2_latent_proj",
];

/// Twice or half of each number, by a bit of its exponent; another expert in tables of ids.
fn changed(t: &Tensor<'_>) -> Tensor<'static> {
    let (name, shape) = (t.name(), t.shape().to_vec());
    let made = match t.dtype() {
        DType::F32 => {
            let numbers = t.elements::<f32>();
            let twice = |x: &f32| f32::from_bits(x.to_bits() ^ 0x0080_0000);
            Tensor::from_vec(
                name,
                t.dtype(),
                shape,
                numbers.iter().map(twice).collect::<Vec<f32>>(),
            )
        }
        DType::I64 => {
            let ids = t.bytes().as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b));
            let other = ids.map(|id| i32::try_from(3 - id).unwrap());
            Tensor::from_vec(name, DType::I32, shape, other.collect::<Vec<i32>>())
        }
        _ => {
            let bits = t.elements::<u16>();
            let twice = bits.iter().map(|b| b ^ 0x80);
            Tensor::from_vec(name, t.dtype(), shape, twice.collect::<Vec<u16>>())
        }
    };
    made.unwrap()
}

#[test]
fn each_tensor_of_the_block_is_read() {
    let temp = tempfile::tempdir().unwrap();
    let mut read = BTreeSet::new();
    for path in golden() {
        let name = name(&path);
        let bytes = fs::read(&path).unwrap();
        let file = Container::parse(&bytes).unwrap();
        let expected = widened(&file.tensor("out.y").unwrap());
        for part in PARTS {
            let in_files = |t: &Tensor<'_>| {
                let name = t.name().strip_prefix("in.");
                name.is_some_and(|n| !NOT_IN_FILES.contains(&n) && n.contains(part))
            };
            if !file.tensors().any(|t| in_files(&t.unwrap())) {
                continue;
            }
            read.insert(*part);
            let dir = temp.path().join(format!("{name}-{part}"));
            write(&file, &dir, |tensor, t| if tensor.contains(part) { changed(&t) } else { t });
            let found = checked(&dir);
            assert!(difference(&numbers(found.y()), &expected) > 1e-3, "{name} {part}");
        }
    }
    let unread: Vec<_> = PARTS.iter().filter(|part| !read.contains(*part)).collect();
    assert!(unread.is_empty(), "no block has {unread:?}");
}

/// Blocks with parts that quantized experts do not run with, the experts of a group, and the reason.
const REFUSED_QUANTIZED: &[(&str, usize, &str)] = &[
    ("deepseek_v4-hash-small", 4, "a table of token ids chooses its experts"),
    ("ernie4_5_vl_moe-small", 3, "chosen by token type"),
    ("gemma4_text-small", 4, "stages around the experts"),
    ("inkling-small", 4, "its router weights the shared experts too"),
    ("inkling2-small", 4, "its activation caps gate and up"),
    ("muse_spark-small", 4, "its experts run between projections"),
    ("nemotron_h-latent-small", 4, "its experts have no gate projection"),
    ("zaya-skip-small", 4, "its router is a network of several layers"),
];

#[test]
fn routing_of_quantized_experts_with_further_parts_is_refused_by_name() {
    let temp = tempfile::tempdir().unwrap();
    for path in golden() {
        let name = name(&path);
        let refused = REFUSED_QUANTIZED.iter().find(|(refused, ..)| *refused == name);
        let Some((_, experts, reason)) = refused.copied() else { continue };
        let bytes = fs::read(&path).unwrap();
        let dir = temp.path().join(name);
        write(&Container::parse(&bytes).unwrap(), &dir, |_, t| t);
        let module = list(&dir, None).unwrap().remove(0);
        let files = ModelFiles::open(&dir).unwrap();
        let read = |whole: bool| {
            let model = Model::new(&files).unwrap();
            let read = if whole { MoeRouting::read_whole } else { MoeRouting::read };
            read(&model, &module, experts, false)
        };
        let text = read(false).unwrap_err().to_string();
        assert!(text.contains(reason), "{name}: {text}");
        assert!(read(true).is_ok(), "{name}");
    }
}

/// The error of a block with the tensors of its input as `change` makes them.
fn error(dir: &Path, change: impl Fn(Tensor<'static>) -> Option<Tensor<'static>>) -> String {
    let bytes = fs::read(dir.join("input.st")).unwrap();
    let file = Container::parse(&bytes).unwrap();
    let tensors = file.tensors().map(|t| t.unwrap().into_owned());
    let path = dir.join("changed.st");
    save(&path, &tensors.filter_map(change).collect::<Vec<_>>());
    let mut options = Options::default();
    options.input = Source::File(path);
    run(dir, &options).unwrap_err().to_string()
}

#[test]
fn inputs_of_tokens_are_needed_and_checked() {
    let temp = tempfile::tempdir().unwrap();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../golden/data/routers");
    let blocks = [
        ("deepseek_v4-hash-small", "token_ids", 32, "model.layers.1.ffn.gate.tid2eid"),
        ("ernie4_5_vl_moe-small", "token_types", 2, "a type below 2"),
    ];
    for (name, input, limit, rule) in blocks {
        let bytes = fs::read(root.join(format!("{name}.safetensors"))).unwrap();
        let dir = temp.path().join(name);
        write(&Container::parse(&bytes).unwrap(), &dir, |_, t| t);
        let text = error(&dir, |t| (t.name() != input).then_some(t));
        assert!(text.contains(input), "{name}: {text}");
        let with = |id: i32, len: usize| {
            error(&dir, |t| match t.name() == input {
                true => Tensor::from_vec(input, DType::I32, vec![len], vec![id; len]).ok(),
                false => Some(t),
            })
        };
        for found in [limit, -1] {
            let text = with(found, 6);
            assert!(text.contains(input) && text.contains(rule), "{name}: {text}");
            assert!(text.contains(&found.to_string()), "{name}: {text}");
        }
        let text = with(0, 5);
        assert!(text.contains(input) && text.contains("[5]"), "{name}: {text}");
        // Drawn from the seed: the same for the same seed.
        let seeded = |seed| {
            let mut options = Options::default();
            let dtype = ScalarType::FLOAT32;
            options.input = Source::Seeded { seed, tokens: 9, dtype };
            options.check = true;
            let found = run(&dir, &options).unwrap();
            assert!(found.is_equal(), "{name}: {found:?}");
            numbers(found.y())
        };
        assert!(seeded(3) == seeded(3) && seeded(3) != seeded(4), "{name}");
    }
}

/// Activations whose sums overflow have no bound: such a block does not pass.
#[test]
fn values_without_a_bound_are_not_judged() {
    let temp = tempfile::tempdir().unwrap();
    let path = golden().into_iter().find(|path| name(path) == "qwen3_moe");
    let bytes = fs::read(path.unwrap()).unwrap();
    write(&Container::parse(&bytes).unwrap(), temp.path(), |_, t| t);
    assert!(checked(temp.path()).is_equal());
    let input = fs::read(temp.path().join("input.st")).unwrap();
    let x = Container::parse(&input).unwrap().tensor("x").unwrap().into_owned();
    let numbers = widened(&x);
    let most = numbers.iter().fold(0.0f32, |m, x| m.max(x.abs()));
    let large = numbers.iter().map(|x| x / most * 3e38).collect::<Vec<f32>>();
    let large = Tensor::from_vec("x", DType::F32, x.shape().to_vec(), large).unwrap();
    save(&temp.path().join("input.st"), &[large]);
    let found = checked(temp.path());
    let check = found.check.unwrap();
    assert!(check.mismatches == 0 && check.unbounded > 0, "{check:?}");
    assert!(!found.is_equal());
}
