//! Whole blocks of quantized experts through `run`: stages around the experts, experts without a gate,
//! zero experts, soft caps, groups of experts by token type, tables of token ids.
//!
//! Each block is also written with the numbers that its codes represent, which the test computes, as
//! 32-bit experts: both must give the same bits. Transformers' outputs hold the 32-bit blocks
//! (`blocks.rs`); two kinds without such outputs are computed here in f64.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use marlinspike::container::Container;
use marlinspike::num::dims::Shape;
use marlinspike::num::scalar::{ScalarType, f32_to_bf16_rne};
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::weight::Weight;
use marlinspike_model::convert::parallel::Ranks;
use marlinspike_model::convert::settings::Settings;
use marlinspike_model::inspect::{Options as InspectOptions, inspect};
use marlinspike_model::run::options::{Activations, Options, Source};
use marlinspike_model::run::output::{Outside, Run};
use marlinspike_model::run::{list, run};
use serde_json::{Value, json};

use crate::blocks::save;
use crate::common::runs::{run as convert, settings};
use crate::common::{Format, Noise};

/// Features of the hidden states; whole groups of every format.
const HIDDEN: usize = 256;
/// Features inside the experts, and of experts between projections.
const INNER: usize = 128;

/// A block that `families.json` has, and what its row lacks.
pub(crate) struct Kind {
    pub(crate) family: &'static str,
    /// Whether a projection comes before the experts (`nemotron_h`), or a table of ids chooses.
    variant: &'static str,
}

pub(crate) const KINDS: [Kind; 11] = {
    const fn of(family: &'static str) -> Kind {
        Kind { family, variant: "" }
    }
    [
        of("jetmoe"),
        of("longcat_flash"),
        of("nemotron_h"),
        Kind { family: "nemotron_h", variant: "latent" },
        of("gemma4_text"),
        of("muse_spark"),
        of("zaya"),
        of("inkling"),
        of("inkling2"),
        of("ernie4_5_vl_moe"),
        Kind { family: "deepseek_v4", variant: "hash" },
    ]
};

/// A block's tensors but its experts', its config and the experts' shapes.
struct Block {
    config: Value,
    tensors: Vec<Tensor<'static>>,
    /// `experts.0`, with its matrices' names: gate (if there is one), up, down.
    experts: Vec<(String, Vec<(String, Shape)>)>,
}

fn random(noise: &mut Noise, len: usize) -> Vec<f32> {
    let one = |bits: u32| (bits & 0xffff) as f32 / 131072.0 - 0.25;
    let rounded = |x: f32| f32::from_bits(u32::from(f32_to_bf16_rne(x)) << 16);
    (0..len).map(|_| rounded(one(noise.next()))).collect()
}

fn floats(name: String, shape: Vec<usize>, values: Vec<f32>) -> Tensor<'static> {
    Tensor::from_vec(name, DType::F32, shape, values).unwrap()
}

/// Sets `key` in the config, or in its part for text.
fn set(config: &mut Value, key: &str, value: Value) {
    let text = config.get("text_config").is_some();
    let object = if text { &mut config["text_config"] } else { config };
    object[key] = value;
}

impl Kind {
    fn name(&self) -> String {
        format!("{}{}", self.family, self.variant)
    }

    fn block(&self) -> Block {
        let all: Value = serde_json::from_str(include_str!("families.json")).unwrap();
        let row = all.as_array().unwrap().iter().find(|r| r["name"] == self.family).unwrap();
        let (prefix, hidden) = (row["prefix"].as_str().unwrap(), row["hidden"].as_u64().unwrap());
        let shapes: BTreeMap<String, Vec<usize>> =
            serde_json::from_value(row["tensors"].clone()).unwrap();
        let mut noise = Noise::new(&self.name());
        let mut config = row["config"].clone();
        set(&mut config, "hidden_size", json!(HIDDEN));
        let is_expert = |name: &str, shape: &[usize]| {
            let own = name.contains("experts.") || name.contains("_linear.");
            own && !name.contains("shared") && !name.contains("norm") && shape.len() == 3
        };
        let mut tensors = Vec::new();
        for (name, shape) in shapes.iter().filter(|(n, s)| !is_expert(n, s)) {
            if name == "token_types" || name.ends_with("gate.bias") && self.variant == "hash" {
                continue;
            }
            let size = |&d: &usize| match d {
                d if d as u64 == hidden => HIDDEN,
                48 => INNER,
                d => d,
            };
            let shape: Vec<usize> = shape.iter().map(size).collect();
            let values = random(&mut noise, shape.iter().product());
            // Norms and factors are near 1.
            let is_factor = name.contains("norm") || name.contains("scale");
            let values = values.iter().map(|v| if is_factor { 1.0 + v } else { *v }).collect();
            tensors.push(floats(format!("{prefix}{name}"), shape, values));
        }
        let mut between = HIDDEN;
        if self.family == "muse_spark" {
            set(&mut config, "moe_hidden_size", json!(INNER));
            between = INNER;
        }
        let mut add = |name: &str, shape: [usize; 2]| {
            let values = random(&mut noise, shape[0] * shape[1]);
            tensors.push(floats(format!("{prefix}{name}"), shape.to_vec(), values));
        };
        match self.variant {
            "latent" => {
                between = INNER;
                set(&mut config, "moe_latent_size", json!(INNER));
                add("mixer.fc1_latent_proj.weight", [INNER, HIDDEN]);
                add("mixer.fc2_latent_proj.weight", [HIDDEN, INNER]);
            }
            "hash" => {
                config["mlp_layer_types"] = json!(["hash_moe", "hash_moe"]);
                let ids: Vec<i32> =
                    (0..32).flat_map(|i| [0, 3, 5, 6].map(|e| (e + i) % 8)).collect();
                let name = format!("{prefix}ffn.gate.tid2eid");
                tensors.push(Tensor::from_vec(name, DType::I32, vec![32, 4], ids).unwrap());
            }
            _ => {}
        }
        let (first, shape) = shapes.iter().find(|(n, s)| is_expert(n, s)).unwrap();
        let parent = first.split("experts").next().unwrap();
        let parent = parent.strip_suffix("input_linear.weight").unwrap_or(parent);
        let names = match (self.family, first.contains(".w1.")) {
            ("nemotron_h", _) => vec!["up_proj", "down_proj"],
            (_, true) => vec!["w1", "w3", "w2"],
            (_, false) => vec!["gate_proj", "up_proj", "down_proj"],
        };
        let experts = (0..shape[0]).map(|e| {
            // ernie's experts of text are wider than those of images.
            let wide = self.family == "ernie4_5_vl_moe" && e < shape[0] / 2;
            let inner = if wide { 2 * INNER } else { INNER };
            let shape = |name: &str| match name {
                "down_proj" | "w2" => Shape::new(inner, between),
                _ => Shape::new(between, inner),
            };
            let module = format!("{prefix}{parent}experts.{e}");
            (module, names.iter().map(|n| ((*n).to_owned(), shape(n))).collect())
        });
        let experts = experts.collect();
        Block { config, tensors, experts }
    }
}

/// The numbers `[N, K]` that a weight's codes represent: (q − z) · s, times the global scale.
fn numbers(w: &Weight<'_>) -> Vec<f32> {
    let Shape { size_k, size_n } = w.shape();
    let value = |n: usize, k: usize| {
        let group = w.groups.group_of(k);
        let zero = w.zeros.as_ref().map_or(0.0, |z| f64::from(z.bits(group, n)));
        let code = w.ty.to_f64(u32::from(w.codes.get(k, n))) - zero;
        let value = code * w.scales.value(group, n) * f64::from(w.global_scale.unwrap_or(1.0));
        assert_eq!(f64::from(value as f32), value, "{}", w.name);
        value as f32
    };
    (0..size_n).flat_map(|n| (0..size_k).map(move |k| value(n, k))).collect()
}

impl Block {
    /// Writes the quantized checkpoint and its 32-bit twin; returns the experts' numbers.
    fn write(&self, format: Format, dirs: [&Path; 2]) -> BTreeMap<String, Vec<f32>> {
        let mut all = BTreeMap::new();
        let (mut quantized, mut plain) = (self.tensors.clone(), self.tensors.clone());
        for (module, matrices) in &self.experts {
            for (name, shape) in matrices {
                let name = format!("{module}.{name}");
                let part = if name.ends_with("down_proj") { "out" } else { "in" };
                let w = format.weight(&name, &format!("{module}.{part}"), *shape);
                // Normal activations in every format: codes of 8 bits are large.
                quantized.extend(format.tensors(&w));
                let values = numbers(&w);
                let shape = vec![shape.size_n, shape.size_k];
                plain.push(floats(format!("{name}.weight"), shape, values.clone()));
                all.insert(name, values);
            }
        }
        for (dir, tensors) in dirs.into_iter().zip([quantized, plain]) {
            fs::create_dir_all(dir).unwrap();
            save(&dir.join("model.safetensors"), &tensors);
            let mut config = self.config.clone();
            config["dtype"] = json!("bfloat16");
            if dir == dirs[0] {
                config["quantization_config"] = format.quant_config();
            }
            fs::write(dir.join("config.json"), config.to_string()).unwrap();
        }
        all
    }
}

fn options() -> Options {
    let mut options = Options::default();
    options.input = Source::Seeded { seed: 7, tokens: 9, dtype: ScalarType::BFLOAT16 };
    options.check = true;
    options.method.activations = Activations::SixteenBit;
    options
}

fn dirs(temp: &Path, name: &str) -> [PathBuf; 2] {
    [temp.join(format!("{name}-q")), temp.join(format!("{name}-plain"))]
}

/// One block in one format; the differences between the two runs.
fn compare(temp: &Path, kind: &Kind, format: Format) -> Result<(), String> {
    let name = format!("{}-{format:?}", kind.name());
    let [quantized, plain] = dirs(temp, &name);
    kind.block().write(format, [&quantized, &plain]);
    let found = run(&quantized, &options()).map_err(|e| e.to_string())?;
    let method = found.method.as_ref().ok_or("no method")?;
    let twin = run(&plain, &options()).map_err(|e| e.to_string())?;
    inspect(&quantized, &InspectOptions::default()).map_err(|e| format!("inspect: {e}"))?;
    let stages = |run: &Run| -> Vec<(&str, String)> {
        // The 32-bit twin pads the narrow experts of images inside a row.
        let padded = kind.family == "ernie4_5_vl_moe";
        let kept = |name: &str| !(padded && matches!(name, "gate_up" | "activated"));
        let outputs = run.outputs.iter().filter(|o| kept(o.name));
        outputs.map(|o| (o.name, o.digest())).collect()
    };
    let logits = found.logits.as_ref().and_then(|l| l.outside);
    let same = [
        ("a bound", method.is_bounded, true),
        ("16 bits", method.activations == "16-bit", true),
        ("within the bound", found.is_equal(), twin.is_equal()),
        ("the twin within the bound", twin.is_equal(), true),
        ("logits", logits == Some(Outside::default()), true),
        ("its name", list(&quantized, None).ok() == Some(vec![found.module.clone()]), true),
        ("its stages", stages(&found) == stages(&twin), true),
    ];
    match same.iter().find(|(_, a, b)| a != b) {
        Some((what, ..)) => {
            let (a, b) = (stages(&found), stages(&twin));
            Err(format!("{what}: {:?} {:?} {a:?} {b:?}", found.check, twin.check))
        }
        None => Ok(()),
    }
}

#[test]
fn quantized_blocks_with_stages_have_the_bits_of_their_numbers() {
    let temp = tempfile::tempdir().unwrap();
    let mut formats = Format::ALL.into_iter().cycle();
    let mut wrong = Vec::new();
    for kind in KINDS {
        for format in formats.by_ref().take(3) {
            if let Err(e) = compare(temp.path(), &kind, format) {
                wrong.push(format!("{} {format:?}: {e}", kind.name()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// f(x) of each row, in f64.
fn product(weight: &[f32], x: &[f64]) -> Vec<f64> {
    let row = |w: &[f32]| w.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum();
    weight.chunks_exact(x.len()).map(row).collect()
}

fn widened(t: &Tensor<'_>) -> Vec<f64> {
    match t.dtype() {
        DType::F32 => t.elements::<f32>().iter().map(|&x| x.into()).collect(),
        _ => {
            let value = |&b: &u16| f64::from(f32::from_bits(u32::from(b) << 16));
            t.elements::<u16>().iter().map(value).collect()
        }
    }
}

/// Blocks that transformers' outputs do not cover, by their definition: `longcat_flash` adds weight · x
/// for an id after its experts, `jetmoe` a bias to the sum; and `muse_spark`, whose experts are between
/// projections and normalized.
#[test]
fn blocks_agree_with_their_definition_in_f64() {
    let temp = tempfile::tempdir().unwrap();
    let formats = [Format::Awq, Format::Nvfp4, Format::Fp8Block];
    for (family, format) in ["longcat_flash", "jetmoe", "muse_spark"].into_iter().zip(formats) {
        let kind = Kind { family, variant: "" };
        let [quantized, plain] = dirs(temp.path(), family);
        let block = kind.block();
        let experts = block.write(format, [&quantized, &plain]);
        let tensor = |end: &str| {
            let found = block.tensors.iter().find(|t| t.name().ends_with(end));
            found.map(widened).unwrap_or_default()
        };
        let mut noise = Noise::new("tokens");
        let (tokens, top_k) = (5, 4);
        let x = random(&mut noise, tokens * HIDDEN);
        let count = block.experts.len() as i32;
        // An id after the last expert for every token of longcat.
        let zero = if family == "longcat_flash" { count + 1 } else { 3 };
        let ids: Vec<i32> = (0..tokens as i32).flat_map(|t| [t, 5, zero, (t + 1) % 3]).collect();
        let weights: Vec<f32> = (0..ids.len()).map(|i| 0.25 + 0.125 * (i % 3) as f32).collect();
        let bits: Vec<u16> = x.iter().map(|&x| f32_to_bf16_rne(x)).collect();
        let shape = vec![tokens, top_k];
        let input = temp.path().join("input.st");
        save(
            &input,
            &[
                Tensor::from_vec("x", DType::BF16, vec![tokens, HIDDEN], bits).unwrap(),
                Tensor::from_vec("topk_ids", DType::I32, shape.clone(), ids.clone()).unwrap(),
                Tensor::from_vec("topk_weights", DType::F32, shape, weights.clone()).unwrap(),
            ],
        );
        let mut options = options();
        options.input = Source::File(input);
        let found = run(&quantized, &options).unwrap();
        assert!(found.is_equal(), "{family}: {:?}", found.check);
        let found = widened(&found.y().tensor().unwrap());
        let narrow = |v: Vec<f64>| v.into_iter().map(|v| v as f32).collect::<Vec<f32>>();
        let scaled = |v: Vec<f64>, weight: &[f64]| -> Vec<f64> {
            v.iter().zip(weight).map(|(v, w)| v * (w + 1.0)).collect()
        };
        let normed = |v: Vec<f64>, eps: f64| -> Vec<f64> {
            let mean = v.iter().map(|v| v * v).sum::<f64>() / v.len() as f64;
            v.iter().map(|v| v / (mean + eps).sqrt()).collect()
        };
        let muse = family == "muse_spark";
        for t in 0..tokens {
            let own: Vec<f64> = x[t * HIDDEN..][..HIDDEN].iter().map(|&x| x.into()).collect();
            let inner = match muse {
                true => {
                    let weight = narrow(tensor("pre_expert_proj.weight"));
                    let normed = normed(product(&weight, &own), 1e-5);
                    scaled(normed, &tensor("pre_expert_norm.weight"))
                }
                false => own.clone(),
            };
            let mut y = vec![0.0; inner.len()];
            for s in t * top_k..(t + 1) * top_k {
                let output = match block.experts.get(ids[s] as usize) {
                    None => inner.clone(),
                    Some((module, _)) => {
                        let part = |name: &str| &experts[&format!("{module}.{name}")];
                        let gate = product(part("gate_proj"), &inner);
                        let up = product(part("up_proj"), &inner);
                        let silu = |(g, u): (&f64, &f64)| g / (1.0 + (-g).exp()) * u;
                        let activated: Vec<f64> = gate.iter().zip(&up).map(silu).collect();
                        let down = product(part("down_proj"), &activated);
                        match muse {
                            true => normed(scaled(down, &tensor("post_expert_norm.weight")), 1e-8),
                            false => down,
                        }
                    }
                };
                y.iter_mut().zip(output).for_each(|(y, o)| *y += f64::from(weights[s]) * o);
            }
            let y = match muse {
                true => product(&narrow(tensor("post_expert_proj.weight")), &y),
                false => y,
            };
            let bias = if family == "jetmoe" { tensor("mlp.bias") } else { vec![0.0; HIDDEN] };
            let y: Vec<f64> = y.iter().zip(&bias).map(|(y, b)| y + b).collect();
            let size = y.iter().fold(0.0f64, |m, y| m.max(y.abs()));
            let found = &found[t * HIDDEN..][..HIDDEN];
            let worst = y.iter().zip(found).fold(0.0f64, |m, (a, b)| m.max((a - b).abs()));
            assert!(worst < 0.02 * size, "{family} {t}: {worst} of {size}");
        }
    }
}

/// A changed scale changes the output, and a damaged one is an error that names it.
#[test]
fn a_changed_scale_changes_the_output() {
    let temp = tempfile::tempdir().unwrap();
    let kind = Kind { family: "nemotron_h", variant: "latent" };
    let [quantized, plain] = dirs(temp.path(), "scale");
    kind.block().write(Format::Fp8Channel, [&quantized, &plain]);
    let file = quantized.join("model.safetensors");
    let bytes = fs::read(&file).unwrap();
    let all = Container::parse(&bytes).unwrap();
    let digest = || run(&quantized, &options()).map(|run| run.y().digest());
    let whole = digest().unwrap();
    let with = |bits: u16| {
        let tensors: Vec<Tensor<'_>> = all.tensors().map(Result::unwrap).collect();
        let change = |t: &Tensor<'_>| match t.name().ends_with("up_proj.weight_scale") {
            true => {
                let mut scales = t.elements::<u16>().into_owned();
                scales[7] = if bits == 0 { scales[7] ^ 0x0080 } else { bits };
                Tensor::from_vec(t.name(), t.dtype(), t.shape().to_vec(), scales).unwrap()
            }
            false => t.clone().into_owned(),
        };
        save(&file, &tensors.iter().map(change).collect::<Vec<_>>());
        digest()
    };
    assert_ne!(with(0).unwrap(), whole);
    let error = with(0x7fc0).unwrap_err().to_string();
    assert!(error.contains("up_proj"), "{error}");
}

/// Activations that the method quantizes: bit for bit as the definition has them, and other numbers.
#[test]
fn quantized_activations_are_judged_by_the_definition() {
    let temp = tempfile::tempdir().unwrap();
    for (family, variant) in [("nemotron_h", "latent"), ("longcat_flash", ""), ("gemma4_text", "")]
    {
        let kind = Kind { family, variant };
        for format in [Format::Fp8Channel, Format::Fp8Block] {
            let [quantized, plain] = dirs(temp.path(), &format!("{}{format:?}", kind.name()));
            kind.block().write(format, [&quantized, &plain]);
            let mut own = options();
            own.method.activations = Activations::Checkpoint;
            let found = run(&quantized, &own).unwrap();
            assert!(!found.method.as_ref().unwrap().is_bounded && found.is_equal(), "{family}");
            let wide = run(&quantized, &options()).unwrap();
            assert_ne!(found.y().digest(), wide.y().digest(), "{family}");
            let [a, b] = [found, wide].map(|run| widened(&run.y().tensor().unwrap()));
            let size = b.iter().fold(0.0f64, |m, y| m.max(y.abs()));
            let worst = a.iter().zip(&b).fold(0.0f64, |m, (a, b)| m.max((a - b).abs()));
            assert!(worst < 0.2 * size, "{family} {format:?}: {worst} of {size}");
        }
    }
}

/// A converted folder runs with the same bits; one rank of it is refused.
#[test]
fn converted_blocks_with_stages_run() {
    let temp = tempfile::tempdir().unwrap();
    for (family, variant) in [("gemma4_text", ""), ("deepseek_v4", "hash"), ("muse_spark", "")] {
        let kind = Kind { family, variant };
        let [quantized, plain] = dirs(temp.path(), family);
        kind.block().write(Format::CtPack, [&quantized, &plain]);
        let out = temp.path().join(format!("{family}-marlin"));
        convert(&quantized, &out, &settings()).unwrap_or_else(|e| panic!("{family}: {e}"));
        let [a, b] = [&quantized, &out].map(|dir| run(dir, &options()).unwrap());
        assert!(b.packed && b.is_equal(), "{family}");
        assert_eq!(a.y().digest(), b.y().digest(), "{family}");
        let rank = temp.path().join(format!("{family}-rank"));
        let ep = Ranks { size: 2, rank: 1 };
        convert(&quantized, &rank, &Settings { ep, ..settings() }).unwrap();
        let error = run(&rank, &options()).unwrap_err().to_string();
        assert!(error.contains("all ranks"), "{family}: {error}");
    }
}
