//! `merge_projections`: a rank's parts side by side, as upstream's merged layers hold them.

use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::Path;

use marlinspike::container::write_container;
use marlinspike::method::Arithmetic;
use marlinspike::num::dims::Shape;
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::weight::Weight;
use marlinspike_model::convert::parallel::Ranks;
use marlinspike_model::convert::settings::Settings;
use marlinspike_model::convert::target::int4;
use marlinspike_model::run::options::Options;
use marlinspike_model::run::run as run_layer;
use serde_json::json;

use crate::common::runs::{run as convert, settings};
use crate::common::{Converted, Format, write_model};

const ATTENTION: &str = "model.layers.0.self_attn";
const MLP: &str = "model.layers.0.mlp";
const KV_HEADS: usize = 4;

/// The merged layers: name, parts, N of each.
fn merged() -> [(String, Vec<(String, usize)>); 2] {
    let part = |parent: &str, name: &str, n: usize| (format!("{parent}.{name}"), n);
    [
        (
            format!("{ATTENTION}.qkv_proj"),
            vec![
                part(ATTENTION, "q_proj", 512),
                part(ATTENTION, "k_proj", 256),
                part(ATTENTION, "v_proj", 256),
            ],
        ),
        (
            format!("{MLP}.gate_up_proj"),
            vec![part(MLP, "gate_proj", 512), part(MLP, "up_proj", 512)],
        ),
    ]
}

/// A dense layer in `format`; the weights by module.
fn write(format: Format, dir: &Path) -> BTreeMap<String, Weight<'static>> {
    fs::create_dir_all(dir).unwrap();
    let (mut weights, mut tensors) = (BTreeMap::new(), Vec::new());
    for (family, parts) in merged() {
        for (module, n) in parts {
            // One act-order for all parts of a merged layer.
            let weight = format.weight(&module, &family, Shape::new(256, n));
            tensors.extend(format.tensors(&weight));
            weights.insert(module, weight);
        }
    }
    let bytes = write_container(&tensors, &BTreeMap::new(), Vec::new()).unwrap();
    fs::write(dir.join("model.safetensors"), bytes).unwrap();
    let config = json!({"model_type": "qwen3", "dtype": "bfloat16", "num_key_value_heads": KV_HEADS,
        "quantization_config": format.quant_config()});
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
    weights
}

/// The columns of a part on a rank.
fn columns(module: &str, n: usize, tp: Ranks) -> Range<usize> {
    let heads = module.ends_with("k_proj") || module.ends_with("v_proj");
    let ranks = if heads { tp.size.min(KV_HEADS) } else { tp.size };
    let (one, rank) = (n / ranks, tp.rank * ranks / tp.size);
    one * rank..one * (rank + 1)
}

/// Marlin's words of the codes of `parts` side by side, by the formula of the layout: in tiles of
/// 16 x 64, lane i and column block j have the rows 2 (i mod 4) + {0, 1, 8, 9} of two columns.
fn marlin_words(parts: &[(&Weight<'static>, Range<usize>)]) -> Vec<u32> {
    let bits = parts[0].0.codes.bits();
    let all: Vec<_> = parts.iter().flat_map(|(w, n)| n.clone().map(move |n| (w, n))).collect();
    let mut words = Vec::new();
    for k0 in (0..256).step_by(16) {
        for n0 in (0..all.len()).step_by(64) {
            for lane in 0..32 {
                for j in 0..4 {
                    let mut eight = [0u32; 8];
                    for (v, code) in eight.iter_mut().enumerate() {
                        let k = k0 + 2 * (lane % 4) + [0, 1, 8, 9][v % 4];
                        let (w, n) = all[n0 + 16 * j + 8 * (v / 4) + lane / 4];
                        *code = u32::from(w.codes.get(k, n));
                    }
                    let pack = |order: &[usize]| {
                        let shifted = order.iter().enumerate();
                        shifted.fold(0, |a, (p, &v)| a | eight[v] << (p as u32 * bits))
                    };
                    match bits {
                        4 => words.push(pack(&[0, 2, 4, 6, 1, 3, 5, 7])),
                        _ => words.extend([pack(&[0, 2, 1, 3]), pack(&[4, 6, 5, 7])]),
                    }
                }
            }
        }
    }
    words
}

/// The rows of two-dimensional tensors one after the other, and of one-dimensional ones their values.
fn side_by_side(parts: &[Tensor<'static>]) -> Vec<u8> {
    let rows = if parts[0].shape().len() == 1 { 1 } else { parts[0].shape()[0] };
    let mut bytes = Vec::new();
    for row in 0..rows {
        for part in parts {
            let width = part.bytes().len() / rows;
            bytes.extend_from_slice(&part.bytes()[row * width..(row + 1) * width]);
        }
    }
    bytes
}

#[test]
fn parts_of_a_rank_stand_side_by_side() {
    let temp = tempfile::tempdir().unwrap();
    for format in Format::ALL {
        let model = temp.path().join(format!("{format:?}"));
        let weights = write(format, &model);
        // FP8 blocks of 128 columns stay on one rank.
        let eight = [(8, 5)].into_iter().filter(|_| format != Format::Fp8Block);
        for (size, rank) in [(1, 0), (2, 1)].into_iter().chain(eight) {
            let tp = Ranks { size, rank };
            let settings = Settings { tp, ..settings() };
            let [own, one] = ["own", "one"].map(|s| model.join(format!("{s}{size}")));
            convert(&model, &own, &settings).unwrap();
            let summary =
                convert(&model, &one, &Settings { merge_projections: true, ..settings }).unwrap();
            assert_eq!(summary.converted, 2, "{format:?}");
            let [own, one] = [&own, &one].map(|dir| Converted::read(dir));
            for (module, parts) in merged() {
                let context = format!("{format:?} {module} {tp:?}");
                let of = |(name, n): &(String, usize)| (&weights[name], columns(name, *n, tp));
                let sources: Vec<_> = parts.iter().map(of).collect();
                let size_n: usize = sources.iter().map(|(_, n)| n.len()).sum();
                assert_eq!(one.layer(&module)["size_n"], size_n, "{context}");
                let weight = one.tensor(&module, "weight", None).unwrap();
                if !format.act_order() {
                    let found: Vec<u32> =
                        weight.elements::<i32>().iter().map(|w| w.cast_unsigned()).collect();
                    assert!(found == marlin_words(&sources), "{context}");
                }
                let roles = one.layer(&module)["tensors"].as_object().unwrap();
                assert_eq!(*roles, {
                    let mut expected =
                        own.layer(&parts[0].0)["tensors"].as_object().unwrap().clone();
                    for name in expected.values_mut() {
                        let text = name.as_str().unwrap().replace(&parts[0].0, &module);
                        *name = json!(text);
                    }
                    expected
                });
                for role in roles.keys() {
                    // Each part alone has a factor of its own.
                    if format == Format::Nvfp4 && role != "weight" {
                        continue;
                    }
                    let each: Vec<_> =
                        parts.iter().map(|(p, _)| own.tensor(p, role, None).unwrap()).collect();
                    let found = one.tensor(&module, role, None).unwrap();
                    let shared = role == "g_idx" || role == "g_idx_sort_indices";
                    let expected = match shared {
                        true => each[0].bytes().to_vec(),
                        false => side_by_side(&each),
                    };
                    assert!(found.bytes() == expected, "{context} {role}");
                }
            }
        }
    }
}

/// y of a layer, by column of each token.
fn output(dir: &Path, layer: &str, arithmetic: Option<Arithmetic>) -> Vec<Vec<[u8; 2]>> {
    let mut options = Options::default();
    options.layer = Some(layer.to_owned());
    options.arithmetic = arithmetic;
    let found = run_layer(dir, &options).unwrap();
    let y = found.y();
    let rows = y.bytes.chunks_exact(2 * y.size_n);
    rows.map(|row| row.chunks_exact(2).map(|b| [b[0], b[1]]).collect()).collect()
}

#[test]
fn a_merged_layer_runs_as_its_parts() {
    let temp = tempfile::tempdir().unwrap();
    for (format, target) in [
        (Format::Awq, settings().format),
        (Format::CtActOrder, settings().format),
        (Format::Fp8Channel, settings().format),
        (Format::Nvfp4, settings().format),
        (Format::CtPack, int4::FORMAT),
    ] {
        let model = temp.path().join(format!("{format:?}"));
        write(format, &model);
        let one = model.join("one");
        let settings = Settings { format: target, merge_projections: true, ..settings() };
        convert(&model, &one, &settings).unwrap();
        // The int4 path quantizes activations; the others add up exactly.
        let exact = (target != int4::FORMAT).then_some(Arithmetic::Exact);
        let own = model.join("own");
        convert(&model, &own, &Settings { merge_projections: false, ..settings }).unwrap();
        for (module, parts) in merged() {
            let found = output(&one, &module, exact);
            let each: Vec<_> = parts.iter().map(|(p, _)| output(&own, p, exact)).collect();
            for (token, row) in found.iter().enumerate() {
                let expected: Vec<_> = each.iter().flat_map(|y| y[token].clone()).collect();
                assert_eq!(*row, expected, "{format:?} {module} token {token}");
            }
        }
    }
}

#[test]
fn parts_that_do_not_fit_together_are_refused_by_name() {
    let temp = tempfile::tempdir().unwrap();
    let merge = Settings { merge_projections: true, ..settings() };
    let refused = |model: &Path, parts: &[&str]| {
        let out = model.with_extension("out");
        let text = convert(model, &out, &merge).unwrap_err().to_string();
        assert!(parts.iter().all(|p| text.contains(p)), "{text}");
        assert!(!out.join("config.json").exists());
    };
    // q_proj and k_proj alone.
    let two = temp.path().join("two");
    write_model(Format::Gptq4, &two);
    refused(&two, &["qkv_proj", "v_proj", "not quantized"]);
    // v_proj as 16-bit floats.
    let plain = temp.path().join("plain");
    let weights = write(Format::CtPack, &plain);
    let mut tensors: Vec<_> = weights
        .iter()
        .filter(|(name, _)| !name.ends_with("v_proj"))
        .flat_map(|(_, w)| Format::CtPack.tensors(w))
        .collect();
    let name = format!("{ATTENTION}.v_proj.weight");
    let floats = vec![0x3c00u16; 256 * 256];
    tensors.push(Tensor::from_vec(name, DType::BF16, vec![256, 256], floats).unwrap());
    let bytes = write_container(&tensors, &BTreeMap::new(), Vec::new()).unwrap();
    fs::write(plain.join("model.safetensors"), bytes).unwrap();
    refused(&plain, &["qkv_proj", "self_attn.v_proj", "not quantized"]);
    // Parts with an act-order of their own: one product has one permutation.
    let ordered = temp.path().join("ordered");
    let weights = write(Format::CtActOrder, &ordered);
    let tensors: Vec<_> = weights
        .iter()
        .flat_map(|(name, w)| {
            let own = Format::CtActOrder.weight(name, name, w.shape());
            Format::CtActOrder.tensors(&own)
        })
        .collect();
    let bytes = write_container(&tensors, &BTreeMap::new(), Vec::new()).unwrap();
    fs::write(ordered.join("model.safetensors"), bytes).unwrap();
    refused(&ordered, &["g_idx", "other groups"]);
    // Global scales that differ: the format has one.
    let global = temp.path().join("global");
    let mut weights = write(Format::Nvfp4, &global);
    let up = weights.get_mut(&format!("{MLP}.up_proj")).unwrap();
    up.global_scale = Some(1.0 / 32.0);
    let tensors: Vec<_> = weights.values().flat_map(|w| Format::Nvfp4.tensors(w)).collect();
    let bytes = write_container(&tensors, &BTreeMap::new(), Vec::new()).unwrap();
    fs::write(global.join("model.safetensors"), bytes).unwrap();
    refused(&global, &["global_scale"]);
}
