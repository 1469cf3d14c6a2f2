//! `convert`: outputs equal vLLM's and unpack to the source weights, for every format and rank.

use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::Path;

use crate::common::runs::{golden, run, settings};
use crate::common::{Converted, EXPERTS, Format, HIDDEN, INTER, files, write_model};
use marlinspike::container::Container;
use marlinspike::layouts::marlin::{
    Activations, ScaleLayout, ScalePermutation, WeightLayout, ZeroPointLayout, e4m3_scales_inverse,
};
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::ScalarType;
use marlinspike::weight::{Groups, Table, Weight};
use marlinspike_model::convert::parallel::Ranks;
use marlinspike_model::convert::plan::Settings;
use marlinspike_model::convert::settings::Format as KernelFormat;

/// Compares bit for bit with the samples' recorded tensors, which vLLM's helpers made.
#[test]
fn samples_equal_what_vllm_makes() {
    let temp = tempfile::tempdir().unwrap();
    let mut compared = 0;
    for file in files(&golden("expected")) {
        let name = file.file_stem().unwrap().to_str().unwrap().to_owned();
        // These samples record no tensors of single modules; `methods.rs` compares their stacks.
        if ["ct-int-w4a8-moe", "ct-fp8-moe", "ct-nvfp4-moe", "fp8-block-moe"]
            .contains(&name.as_str())
        {
            continue;
        }
        // Logits of whole models, which `marlinspike-generate` compares.
        if golden("models").join(&name).is_dir() {
            continue;
        }
        // The recorded tensors of this sample are float16; its config declares bfloat16.
        let half =
            ["awq", "gptq-actorder", "gptq-dynamic", "gptq-v2-8bit"].contains(&name.as_str());
        let dtype = if half { ScalarType::FLOAT16 } else { ScalarType::BFLOAT16 };
        let out = temp.path().join(&name);
        run(&golden("checkpoints").join(&name), &out, &Settings { dtype, ..settings() }).unwrap();
        let converted = Converted::read(&out);
        let bytes = fs::read(&file).unwrap();
        let expected = Container::parse(&bytes).unwrap();
        for t in expected.tensors() {
            let t = t.unwrap();
            let (module, what) = t.name().rsplit_once('.').unwrap();
            let role = match what {
                "marlin_qweight" => "weight",
                "marlin_scales" => "scales",
                "marlin_zeros" => "zeros",
                "marlin_global_scale" => "global_scale",
                "sorted_g_idx" => "g_idx",
                _ => continue,
            };
            let (layer, expert) = layer_of(module);
            let found = converted.tensor(&layer, role, expert).unwrap();
            let perm = expected.tensor(&format!("{module}.g_idx_sort_indices"));
            if let ("weight", Ok(perm)) = (role, perm) {
                // Upstream's sort is not stable: the codes must agree in checkpoint order.
                let own = converted.tensor(&layer, "g_idx_sort_indices", expert).unwrap();
                let rows = found.shape()[0] * 16;
                let shape = Shape::new(rows, found.shape()[1] / 2);
                let layout = WeightLayout::new(shape, 4, Activations::Bits16).unwrap();
                let a = layout.unpack(found.view2().unwrap(), Some(&own.elements())).unwrap();
                let b = layout.unpack(t.view2().unwrap(), Some(&perm.elements())).unwrap();
                assert_eq!(a, b, "{name} {}", t.name());
            } else {
                assert_eq!(found.shape(), t.shape(), "{name} {}", t.name());
                assert!(found.bytes() == t.bytes(), "{name} {}", t.name());
            }
            compared += 1;
        }
    }
    assert!(compared >= 28, "{compared}");
}

/// The converted layer and expert of a module's name in the recorded tensors.
fn layer_of(module: &str) -> (String, Option<usize>) {
    let parts: Vec<&str> = module.split('.').collect();
    let Some(at) = parts.iter().position(|p| *p == "experts") else {
        return (module.to_owned(), None);
    };
    let expert = parts[at + 1..].iter().find_map(|p| p.parse().ok()).unwrap();
    let down = parts[at + 1..].contains(&"down_proj");
    let stack = if down { "w2" } else { "w13" };
    (format!("{}.{stack}", parts[..=at].join(".")), Some(expert))
}

/// The expected matrix of a rank: weights side by side, the columns of each, and the rows.
struct Want<'w> {
    parts: Vec<(&'w Weight<'static>, Range<usize>)>,
    rows: Range<usize>,
}

impl Want<'_> {
    /// The weight and its column that column `n` comes from.
    fn at(&self, mut n: usize) -> (&Weight<'static>, usize) {
        for (w, r) in &self.parts {
            if n < r.len() {
                return (w, r.start + n);
            }
            n -= r.len();
        }
        panic!("column {n} too many")
    }
}

/// Unpacks a converted matrix and compares it bit for bit with its source weights.
fn check(
    converted: &Converted,
    layer: &str,
    expert: Option<usize>,
    format: Format,
    want: &Want<'_>,
) {
    let context = format!("{format:?} {layer} {expert:?}");
    let info = converted.layer(layer);
    let size = |key: &str| info[key].as_u64().unwrap() as usize;
    let shape = Shape::new(size("size_k"), size("size_n"));
    let n_sum = want.parts.iter().map(|p| p.1.len()).sum();
    assert_eq!(shape, Shape::new(want.rows.len(), n_sum), "{context}");
    let tensor = |role| converted.tensor(layer, role, expert);
    let first = want.parts[0].0;

    let perm = tensor("g_idx_sort_indices");
    assert_eq!(perm.is_some(), format.act_order(), "{context}");
    let perm: Option<Vec<u32>> = perm.map(|t| t.elements().to_vec());
    let bits = first.codes.bits();
    let layout = WeightLayout::new(shape, bits, Activations::Bits16).unwrap();
    let codes = layout.unpack(tensor("weight").unwrap().view2().unwrap(), perm.as_deref()).unwrap();
    for n in 0..shape.size_n {
        let (w, column) = want.at(n);
        for k in 0..shape.size_k {
            let expected = w.codes.get(want.rows.start + k, column);
            assert_eq!(codes.get(k, n), expected, "{context} code ({k}, {n})");
        }
    }
    let full = want.rows.len() == first.shape().size_k;
    let mut first_group = 0;
    match &first.groups {
        Groups::Indexed { g_idx, .. } => {
            let found: Vec<u32> = tensor("g_idx").unwrap().elements().to_vec();
            let slice = &g_idx[want.rows.clone()];
            let expected: Vec<u32> = perm.unwrap().iter().map(|&p| slice[p as usize]).collect();
            assert_eq!(found, expected, "{context} g_idx");
            assert!(found.is_sorted(), "{context}");
            assert_eq!(info["is_k_full"], full, "{context}");
        }
        Groups::Uniform(g) => {
            if let GroupSize::Of(g) = g {
                first_group = want.rows.start / g;
            }
            assert_eq!(info["is_k_full"], true, "{context}");
        }
    }

    let scales = tensor("scales").unwrap();
    let [groups, cols] = scales.dims2().unwrap();
    assert_eq!(cols, shape.size_n);
    let grouped = info["scale_permutation"] == "grouped";
    let permutation = if grouped { ScalePermutation::Grouped } else { ScalePermutation::Single };
    let ty = match format.scale_type() {
        ScalarType::FLOAT32 => ScalarType::BFLOAT16,
        ty => ty,
    };
    let layout = ScaleLayout::new(groups, cols, permutation, ty).unwrap();
    let packed = Table::from_tensor(&scales, ty).unwrap();
    let factor = info["scale_factor"].as_f64().unwrap_or(1.0) as f32;
    let table = match ty {
        ScalarType::FLOAT8_E8M0FNU => layout.with_quads().unpack(&packed).unwrap(),
        ScalarType::FLOAT8_E4M3FN => e4m3_scales_inverse(&packed, layout, factor).unwrap(),
        _ => layout.unpack(&packed).unwrap(),
    };
    // e4m3 weights: the kernel expects a factor of 2^120 in bf16 scales.
    let bias = if matches!(format, Format::Fp8Channel | Format::Fp8Block) { 120f64 } else { 0.0 };
    for n in 0..shape.size_n {
        let (w, column) = want.at(n);
        for g in 0..groups {
            let expected = w.scales.value(first_group + g, column) * bias.exp2();
            assert_eq!(table.value(g, n), expected, "{context} scale ({g}, {n})");
        }
    }
    if let Some(words) = tensor("zeros") {
        let layout = ZeroPointLayout::new(groups, cols, 4, Activations::Bits16).unwrap();
        let zeros = layout.unpack(words.view2().unwrap(), ScalarType::UINT4).unwrap();
        for n in 0..shape.size_n {
            let (w, column) = want.at(n);
            for g in 0..groups {
                let expected = w.zeros.as_ref().unwrap().bits(first_group + g, column);
                assert_eq!(zeros.bits(g, n), expected, "{context} zero ({g}, {n})");
            }
        }
    } else {
        assert!(first.zeros.is_none(), "{context}");
    }
    if let Some(global) = first.global_scale {
        let expected = global * 2f32.powi(119) / factor;
        let found = tensor("global_scale").unwrap();
        assert_eq!(found.elements::<f32>().to_vec(), [expected], "{context}");
    }
}

/// The expected tensors of rank `tp` and `ep`.
fn check_model(
    out: &Path,
    format: Format,
    weights: &BTreeMap<String, Weight<'static>>,
    tp: Ranks,
    ep: Ranks,
) {
    let converted = Converted::read(out);
    let part = |size: usize, ranks: Ranks| {
        let one = size / ranks.size;
        one * ranks.rank..one * (ranks.rank + 1)
    };
    for (name, column) in [("q_proj", true), ("k_proj", true), ("o_proj", false)] {
        let module = format!("model.layers.0.self_attn.{name}");
        let w = &weights[&module];
        let Shape { size_k, size_n } = w.shape();
        let (rows, cols) =
            if column { (0..size_k, part(size_n, tp)) } else { (part(size_k, tp), 0..size_n) };
        check(&converted, &module, None, format, &Want { parts: vec![(w, cols)], rows });
    }
    let moe_tp = if ep.size > 1 { Ranks::ONE } else { tp };
    // Three experts on two ranks: 0 and 1, then 2.
    let experts: Vec<usize> = match (ep.size, ep.rank) {
        (1, _) => (0..EXPERTS).collect(),
        (2, 0) => vec![0, 1],
        _ => vec![2],
    };
    for (local, e) in experts.iter().enumerate() {
        let module = |p: &str| &weights[&format!("model.layers.0.mlp.experts.{e}.{p}")];
        let n = part(INTER, moe_tp);
        let parts = vec![(module("gate_proj"), n.clone()), (module("up_proj"), n)];
        let want = Want { parts, rows: 0..HIDDEN };
        check(&converted, "model.layers.0.mlp.experts.w13", Some(local), format, &want);
        let parts = vec![(module("down_proj"), 0..HIDDEN)];
        let want = Want { parts, rows: part(INTER, moe_tp) };
        check(&converted, "model.layers.0.mlp.experts.w2", Some(local), format, &want);
    }
    let w13 = converted.layer("model.layers.0.mlp.experts.w13");
    assert_eq!(w13["experts"], experts.len());
    let map = &converted.config["marlinspike"]["expert_maps"]["model.layers.0.mlp.experts"];
    match (ep.size, ep.rank) {
        (1, _) => assert!(map.is_null()),
        (_, 0) => assert_eq!(*map, serde_json::json!([0, 1, -1])),
        _ => assert_eq!(*map, serde_json::json!([-1, -1, 0])),
    }
    assert!(converted.config.get("quantization_config").is_none());
    assert!(converted.tensors.contains_key("model.norm.weight"));
    assert!(out.join("tokenizer.json").exists());
}

#[test]
fn every_format_and_rank_unpacks_to_the_original() {
    for format in Format::ALL {
        let temp = tempfile::tempdir().unwrap();
        let model = temp.path().join("model");
        let weights = write_model(format, &model);
        for (tp, ep) in [
            ((1, 0), (1, 0)),
            ((2, 0), (1, 0)),
            ((2, 1), (1, 0)),
            ((2, 1), (2, 0)),
            ((2, 0), (2, 1)),
        ] {
            let (tp, ep) = (Ranks { size: tp.0, rank: tp.1 }, Ranks { size: ep.0, rank: ep.1 });
            let out = temp.path().join(format!("out{tp:?}{ep:?}"));
            run(&model, &out, &Settings { tp, ep, ..settings() }).unwrap();
            check_model(&out, format, &weights, tp, ep);
        }
    }
}

/// A manifest's hash of the settings is made of this text: it holds names, and no help text or address,
/// which would refuse a folder to the next process.
#[test]
fn the_text_of_a_format_is_its_names() {
    let marlin = KernelFormat::from_name("marlin").unwrap();
    assert_eq!(format!("{marlin:?}"), "Format(\"marlin\", None)");
    let flashinfer = KernelFormat::from_name("flashinfer").unwrap();
    let cutlass = flashinfer.with("nvfp4-backend", "FLASHINFER_CUTLASS").unwrap();
    assert_eq!(format!("{cutlass:?}"), "Format(\"flashinfer\", Some(\"FLASHINFER_CUTLASS\"))");
    assert_ne!(format!("{flashinfer:?}"), format!("{cutlass:?}"));
}
