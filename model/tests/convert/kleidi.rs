//! `convert --to kleidiai`: the bytes equal the layout's definition on columns that the test reads
//! from the checkpoint; weights that the operator cannot run are rejected.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::common::runs::{EXECUTION, golden, run, run_with, settings};
use crate::common::{Converted, EXPERTS, Format, HIDDEN, INTER, files, write_model};
use marlinspike::container::Container;
use marlinspike::layouts::CPU_INT4;
use marlinspike::layouts::cpu::CpuTables;
use marlinspike::layouts::kleidi::{Columns, NR, RhsLayout};
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::w4a8::stored::{MoeDescription, OperatorRouting, StoredRouting};
use marlinspike::weight::Weight;
use marlinspike_model::convert::error::ConvertError;
use marlinspike_model::convert::execute::Execution;
use marlinspike_model::convert::parallel::Ranks;
use marlinspike_model::convert::plan::Settings;
use marlinspike_model::convert::target::int4;
use serde_json::{Value, json};

fn kleidi(nr: usize) -> Settings {
    let format = int4::FORMAT.with("nr", &nr.to_string()).expect("4 or 8");
    Settings { format, ..settings() }
}

/// Columns by their codes and bf16 scales.
#[derive(Debug, Clone, Default)]
struct Matrix {
    size_k: usize,
    /// `[N][K]`.
    codes: Vec<i8>,
    /// bf16 bits `[N][groups]`.
    scales: Vec<u16>,
}

impl Matrix {
    /// `[N, K]` int8 and `[N, groups]` bf16 of an int-quantized checkpoint.
    fn of_int8(tensors: &BTreeMap<String, Tensor<'static>>, module: &str) -> Self {
        let weight = &tensors[&format!("{module}.weight")];
        let scales = &tensors[&format!("{module}.weight_scale")];
        let codes = weight.elements::<i8>().to_vec();
        Self { size_k: weight.shape()[1], codes, scales: scales.elements::<u16>().to_vec() }
    }

    /// Rows `k` and columns `n` of the weight that a checkpoint was written from.
    fn of_weight(w: &Weight<'_>, k: std::ops::Range<usize>, n: std::ops::Range<usize>) -> Self {
        let group = w.groups.group_size().rows(w.shape().k());
        let groups = k.start / group..k.end.div_ceil(group);
        let mut codes = Vec::new();
        let mut scales = Vec::new();
        for n in n {
            codes.extend(k.clone().map(|k| w.codes.get(k, n) as i8 - 8));
            scales.extend(groups.clone().map(|g| w.scales.bits(g, n) as u16));
        }
        Self { size_k: k.len(), codes, scales }
    }

    fn all(w: &Weight<'_>) -> Self {
        Self::of_weight(w, 0..w.shape().size_k, 0..w.shape().size_n)
    }

    /// The columns of `other` after these.
    fn beside(mut self, other: Self) -> Self {
        self.codes.extend(other.codes);
        self.scales.extend(other.scales);
        self
    }

    fn size_n(&self) -> usize {
        self.codes.len() / self.size_k
    }

    /// The definition's bytes.
    fn packed(&self, nr: usize) -> Vec<u8> {
        let shape = Shape::new(self.size_k, self.size_n());
        let groups = self.scales.len() / self.size_n();
        let (group, columns) = if groups == 1 {
            let widen = |&bits: &u16| f32::from_bits(u32::from(bits) << 16);
            let scales: Vec<f32> = self.scales.iter().map(widen).collect();
            let columns = Columns::channel_wise(shape, self.codes.clone(), &scales, None);
            (GroupSize::Channel, columns)
        } else {
            let (size, scales) = (self.size_k / groups, self.scales.clone());
            let columns = Columns::group_wise(shape, size, self.codes.clone(), scales, None);
            (GroupSize::Of(size), columns)
        };
        let layout = RhsLayout::new(shape, group, nr).unwrap();
        layout.pack(&columns.unwrap()).unwrap().bytes().to_vec()
    }
}

fn read(dir: &Path) -> BTreeMap<String, Tensor<'static>> {
    let mut all = BTreeMap::new();
    for path in files(dir).into_iter().filter(|p| p.extension().is_some_and(|e| e == "safetensors"))
    {
        let bytes = fs::read(path).unwrap();
        for t in Container::parse(&bytes).unwrap().tensors() {
            let t = t.unwrap().into_owned();
            all.insert(t.name().to_owned(), t);
        }
    }
    all
}

/// The description of `module` in its file.
fn description(dir: &Path, module: &str) -> Value {
    let key = format!("marlinspike.w4a8.{module}");
    let found = files(dir).into_iter().find_map(|path| {
        let bytes = fs::read(&path).ok().filter(|_| path.extension().is_some())?;
        Container::parse(&bytes).ok()?.metadata().get(&key).cloned()
    });
    serde_json::from_str(&found.unwrap()).unwrap()
}

fn expect(tensors: &BTreeMap<String, Tensor<'static>>, name: &str, wanted: &[Matrix], nr: usize) {
    let found = &tensors[name];
    let bytes: Vec<u8> = wanted.iter().flat_map(|m| m.packed(nr)).collect();
    assert_eq!(found.dtype(), DType::U8, "{name}");
    let len = bytes.len() / wanted.len();
    let shape = if name.ends_with("rhs_packed") { vec![len] } else { vec![wanted.len(), len] };
    assert_eq!(found.shape(), shape, "{name}");
    let differs = found.bytes().iter().zip(&bytes).position(|(a, b)| a != b);
    assert_eq!(differs, None, "{name} nr {nr}");
}

#[test]
fn a_published_w4a8_model() {
    let temp = tempfile::tempdir().unwrap();
    let model = golden("checkpoints").join("ct-int-w4a8-moe");
    let given = read(&model);
    for nr in NR {
        let out = temp.path().join(format!("out{nr}"));
        let summary = run(&model, &out, &kleidi(nr)).unwrap();
        assert_eq!((summary.converted, summary.activations_quantized), (6, 0));
        let found = read(&out);
        for name in ["q_proj", "k_proj", "v_proj", "o_proj"] {
            let module = format!("model.layers.0.self_attn.{name}");
            let wanted = Matrix::of_int8(&given, &module);
            let size_n = wanted.size_n();
            expect(&found, &format!("{module}.rhs_packed"), &[wanted], nr);
            assert_eq!(
                description(&out, &module),
                json!({"version": 1, "layer": "linear", "size_k": 128, "size_n": size_n,
                    "group_size": -1, "nr": nr})
            );
        }
        let experts = "model.layers.0.block_sparse_moe.experts";
        let of = |e: usize, w: &str| Matrix::of_int8(&given, &format!("{experts}.{e}.{w}"));
        let w13 = [0, 1].map(|e| of(e, "w1").beside(of(e, "w3")));
        expect(&found, &format!("{experts}.w13_packed"), &w13, nr);
        expect(&found, &format!("{experts}.w2_packed"), &[of(0, "w2"), of(1, "w2")], nr);
        // Mixtral's config does not state renormalization; upstream renormalizes.
        assert_eq!(
            description(&out, experts),
            json!({"version": 1, "layer": "moe", "hidden_size": 128, "intermediate_size": 128,
                "num_experts": 2, "group_size": 32, "nr": nr, "top_k": 1,
                "scoring_func": "softmax", "renormalize": true, "activation": "silu",
                "apply_router_weight_on_input": false})
        );
        // The other tensors are copied, and there are no more.
        let mut copied = 0;
        for (name, tensor) in found.iter().filter(|(name, _)| !name.ends_with("_packed")) {
            assert_eq!(tensor, &given[name]);
            copied += 1;
        }
        assert_eq!((copied, found.len()), (5, 5 + 4 + 2));
        let config = Converted::read(&out).config;
        assert_eq!(config["marlinspike"]["layout"], "kleidiai");
        assert!(config.get("quantization_config").is_none());
    }
}

/// Changes config.json of a written model.
fn reconfigure(dir: &Path, change: impl FnOnce(&mut Value)) {
    let path = dir.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut config);
    fs::write(path, config.to_string()).unwrap();
}

/// Dynamic int8 activations per token in compressed-tensors' form.
fn dynamic_int8(config: &mut Value) {
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = json!({
        "num_bits": 8, "type": "int", "symmetric": true, "strategy": "token", "dynamic": true});
}

/// Compares the converted dense layers and experts with the checkpoint's source weights.
fn check(found: &BTreeMap<String, Tensor<'static>>, weights: &BTreeMap<String, Weight<'static>>) {
    for name in ["q_proj", "k_proj", "o_proj"] {
        let module = format!("model.layers.0.self_attn.{name}");
        expect(found, &format!("{module}.rhs_packed"), &[Matrix::all(&weights[&module])], 8);
    }
    let experts = "model.layers.0.mlp.experts";
    let of = |e: usize, w: &str| Matrix::all(&weights[&format!("{experts}.{e}.{w}")]);
    let w13: Vec<_> = (0..EXPERTS).map(|e| of(e, "gate_proj").beside(of(e, "up_proj"))).collect();
    let w2: Vec<_> = (0..EXPERTS).map(|e| of(e, "down_proj")).collect();
    expect(found, &format!("{experts}.w13_packed"), &w13, 8);
    expect(found, &format!("{experts}.w2_packed"), &w2, 8);
}

#[test]
fn every_format_that_the_path_takes() {
    let temp = tempfile::tempdir().unwrap();
    for (format, dynamic) in [
        (Format::CtPack, true),
        (Format::CtPack, false),
        (Format::Mxint4, false),
        (Format::Gptq4, false),
    ] {
        let model = temp.path().join(format!("{format:?}{dynamic}"));
        let weights = write_model(format, &model);
        if dynamic {
            reconfigure(&model, dynamic_int8);
        }
        let out = temp.path().join(format!("{format:?}{dynamic}-out"));
        // Little memory and small files split the work into the smallest parts.
        let settings = Settings { shard_bytes: 200_000, ..kleidi(8) };
        let summary = run_with(&model, &out, &settings, Execution { memory: 200_000, ..EXECUTION });
        let summary = summary.unwrap();
        let sixteen_bit = if dynamic { 0 } else { summary.converted };
        assert_eq!((summary.converted, summary.activations_quantized), (5, sixteen_bit));
        assert!(summary.files > 1 && summary.peak_memory <= 200_000, "{summary:?}");
        check(&read(&out), &weights);
        // Both stacks of a layer are in one file.
        let experts = "model.layers.0.mlp.experts";
        let holders = files(&out).into_iter().filter(|path| {
            let bytes = fs::read(path).unwrap();
            Container::parse(&bytes).is_ok_and(|c| {
                let has = |w: &str| c.get(&format!("{experts}.{w}_packed")).is_some();
                assert_eq!(has("w13"), has("w2"));
                has("w13")
            })
        });
        assert_eq!(holders.count(), 1);
    }
}

/// `desc_act` with an ascending index is not act-order.
#[test]
fn an_order_that_changes_nothing() {
    let temp = tempfile::tempdir().unwrap();
    let (model, out) = (temp.path().join("model"), temp.path().join("out"));
    let weights = write_model(Format::Gptq4, &model);
    reconfigure(&model, |c| c["quantization_config"]["desc_act"] = json!(true));
    run(&model, &out, &kleidi(8)).unwrap();
    check(&read(&out), &weights);
}

#[test]
fn ranks_have_their_parts() {
    let temp = tempfile::tempdir().unwrap();
    let model = temp.path().join("model");
    let weights = write_model(Format::CtPack, &model);
    let experts = "model.layers.0.mlp.experts";
    for rank in 0..2 {
        let ranks = Ranks { size: 2, rank };
        let out = temp.path().join(format!("tp{rank}"));
        run(&model, &out, &Settings { tp: ranks, ..kleidi(4) }).unwrap();
        let found = read(&out);
        let half = rank * INTER / 2..(rank + 1) * INTER / 2;
        let columns = |e: usize, w: &str| {
            let w = &weights[&format!("{experts}.{e}.{w}")];
            Matrix::of_weight(w, 0..HIDDEN, half.clone())
        };
        let w13: Vec<_> =
            (0..EXPERTS).map(|e| columns(e, "gate_proj").beside(columns(e, "up_proj"))).collect();
        let rows = |e: usize| {
            let w = &weights[&format!("{experts}.{e}.down_proj")];
            Matrix::of_weight(w, half.clone(), 0..HIDDEN)
        };
        expect(&found, &format!("{experts}.w13_packed"), &w13, 4);
        expect(&found, &format!("{experts}.w2_packed"), &[rows(0), rows(1), rows(2)], 4);
        assert_eq!(description(&out, experts)["intermediate_size"], INTER / 2);

        let out = temp.path().join(format!("ep{rank}"));
        run(&model, &out, &Settings { ep: ranks, ..kleidi(8) }).unwrap();
        let (ids, map) = match rank {
            0 => (vec![0, 1], json!([0, 1, -1])),
            _ => (vec![2], json!([-1, -1, 0])),
        };
        let down = |e: &usize| Matrix::all(&weights[&format!("{experts}.{e}.down_proj")]);
        let wanted: Vec<_> = ids.iter().map(down).collect();
        expect(&read(&out), &format!("{experts}.w2_packed"), &wanted, 8);
        assert_eq!(description(&out, experts)["expert_map"], map);
        assert_eq!(description(&out, experts)["num_experts"], EXPERTS);
    }
}

/// The reasons for each refused module.
fn refusals(model: &Path, out: &Path) -> Vec<(String, String)> {
    match run(model, out, &kleidi(8)).unwrap_err() {
        ConvertError::Refused { refused, .. } => {
            refused.into_iter().map(|r| (r.module, r.reasons.join("; "))).collect()
        }
        other => panic!("expected Refused, found {other}"),
    }
}

#[test]
fn what_the_path_does_not_take_is_refused_with_the_reason() {
    let temp = tempfile::tempdir().unwrap();
    for (format, part) in [
        (Format::Gptq8Channel, "8 bits"),
        (Format::Fp8Channel, "expected integers of 4 bits"),
        (Format::Nvfp4, "expected integers of 4 bits"),
    ] {
        let (model, out) = (temp.path().join(format!("{format:?}")), temp.path().join("out"));
        write_model(format, &model);
        let refused = refusals(&model, &out);
        assert_eq!(refused.len(), 5, "{format:?}");
        assert!(refused.iter().all(|(_, reason)| reason.contains(part)), "{refused:?}");
        assert!(!out.exists());
    }
    // In a model whose layers cannot be described, only the experts are rejected.
    let model = temp.path().join("model");
    let experts = |change: fn(&mut Value), part: &str| {
        write_model(Format::CtPack, &model);
        reconfigure(&model, change);
        let refused = refusals(&model, &temp.path().join("out"));
        let names: Vec<&str> = refused.iter().map(|(name, _)| name.as_str()).collect();
        let experts = "model.layers.0.mlp.experts";
        assert_eq!(names, [format!("{experts} w13"), format!("{experts} w2")]);
        assert!(refused.iter().all(|(_, reason)| reason.contains(part)), "{refused:?}");
    };
    experts(|c| c["num_experts_per_tok"] = Value::Null, "num_experts_per_tok: found none");
    experts(|c| c["num_experts_per_tok"] = json!(4), "expected at most 3");
    experts(|c| c["num_experts_per_tok"] = json!("2"), "expected 1 or more");
    experts(|c| c["scoring_func"] = json!("sigmoid"), "expected \"softmax\"");
    experts(|c| c["swiglu_limit"] = json!(7.0), "swiglu_limit");
    // Static activations are no scheme of any module.
    write_model(Format::CtPack, &model);
    reconfigure(&model, |c| {
        dynamic_int8(c);
        let group = &mut c["quantization_config"]["config_groups"]["group_0"];
        group["input_activations"]["dynamic"] = json!(false);
        group["input_activations"]["strategy"] = json!("tensor");
    });
    let error = run(&model, &temp.path().join("out"), &kleidi(8)).unwrap_err();
    assert!(matches!(error, ConvertError::Refused { .. }), "{error}");
    assert!(error.to_string().contains("no scheme for `model.layers.0.mlp.experts.0"), "{error}");
    assert!(error.to_string().contains("activations"), "{error}");
}

/// What upstream's settings cannot state is described by the family's rule.
#[test]
fn a_familys_rule_is_in_the_file() {
    let temp = tempfile::tempdir().unwrap();
    let (model, experts) = (temp.path().join("model"), "model.layers.0.mlp.experts");
    let described = |name: &str, change: fn(&mut Value)| {
        write_model(Format::CtPack, &model);
        reconfigure(&model, change);
        let out = temp.path().join(name);
        run(&model, &out, &kleidi(8)).unwrap();
        description(&out, experts)
    };
    let gelu = described("gelu", |c| c["hidden_act"] = json!("gelu"));
    assert_eq!((&gelu["version"], &gelu["routing"]["activation"]), (&json!(2), &json!("gelu")));
    assert_eq!((&gelu["top_k"], &gelu["correction_bias"]), (&Value::Null, &Value::Null));
    // qwen3_moe does not read the key, so older readers still take the file.
    let groups = described("groups", |c| c["n_group"] = json!(8));
    assert_eq!((&groups["version"], &groups["scoring_func"]), (&json!(1), &json!("softmax")));
}

/// A value outside int4 stops the conversion; no file gets its final name.
#[test]
fn bad_codes_leave_no_output() {
    let temp = tempfile::tempdir().unwrap();
    let (model, out) = (temp.path().join("model"), temp.path().join("out"));
    fs::create_dir(&model).unwrap();
    let from = golden("checkpoints").join("ct-int-w4a8-moe");
    fs::copy(from.join("config.json"), model.join("config.json")).unwrap();
    let mut bytes = fs::read(from.join("model.safetensors")).unwrap();
    let name = "model.layers.0.block_sparse_moe.experts.1.w2.weight";
    let at = Container::parse(&bytes).unwrap().get(name).unwrap().file_range().start as usize;
    bytes[at + 130] = 8;
    fs::write(model.join("model.safetensors"), bytes).unwrap();
    let error = run(&model, &out, &kleidi(8)).unwrap_err();
    assert!(matches!(error, ConvertError::Weight { .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains(name) && text.contains("found 8"), "{text}");
    assert!(files(&out).iter().all(|p| p.file_name().unwrap().to_str().unwrap().starts_with('.')));
}

/// Codes of half a byte and their scales, and at most a fiftieth more for sums and biases.
#[test]
fn packed_weights_are_hardly_more_than_codes_and_scales() {
    for (hidden_size, intermediate_size) in [(2048, 768), (4096, 14336), (2880, 2880), (7168, 2048)]
    {
        for group_size in [-1, 32, 64, 128].map(|g| GroupSize::from_config(g).unwrap()) {
            let layer = MoeDescription {
                format: &CPU_INT4,
                hidden_size,
                intermediate_size,
                num_experts: 8,
                expert_map: None,
                group_size,
                nr: 8,
                tables: CpuTables::NONE,
                routing: StoredRouting::Operator(OperatorRouting {
                    top_k: 2,
                    scoring_func: marlinspike::case::ScoringFunc::Softmax,
                    renormalize: true,
                    activation: marlinspike::case::Activation::Silu,
                    router_weight_on_input: false,
                }),
            };
            let Ok(w13) = layer.w13_layout() else {
                // 2880 is not a multiple of 128.
                assert_eq!((hidden_size, group_size), (2880, GroupSize::Of(128)));
                continue;
            };
            let packed = w13.packed_len() + layer.w2_layout().unwrap().packed_len();
            let codes = 3 * hidden_size * intermediate_size / 2;
            let (k13, k2) = (hidden_size, intermediate_size);
            let scales = match group_size {
                GroupSize::Channel => 4 * (2 * intermediate_size + hidden_size),
                GroupSize::Of(g) => 2 * (2 * intermediate_size * k13 / g + hidden_size * k2 / g),
            };
            assert!(packed * 50 <= (codes + scales) * 51, "{hidden_size} {group_size}: {packed}");
        }
    }
}
