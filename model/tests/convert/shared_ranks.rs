//! A rank's part of the shared expert through `run`: the outputs of all ranks add up to the layer's.

use std::fs;
use std::path::Path;

use marlinspike::num::dims::Shape;
use marlinspike::num::scalar::{ScalarType, f32_to_bf16_rne};
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike_model::convert::parallel::Ranks;
use marlinspike_model::convert::settings::Settings;
use marlinspike_model::run::options::{Options, Source};
use marlinspike_model::run::output::Run;
use marlinspike_model::run::run as run_layer;
use serde_json::{Value, json};

use crate::blocks::save;
use crate::common::runs::{run as convert, settings};
use crate::common::{Format, Noise};

const HIDDEN: usize = 256;
const INNER: usize = 512;
/// Features of the shared expert, which each of two ranks has half of.
const SHARED: usize = 256;
const EXPERTS: usize = 4;
const TOKENS: usize = 6;
const TOP_K: usize = 2;

fn numbers(name: &str, shape: &[usize]) -> Tensor<'static> {
    let mut noise = Noise::new(name);
    let mut one = || f32_to_bf16_rne((noise.next() & 0xffff) as f32 / 262_144.0 - 0.125);
    let bits: Vec<u16> = (0..shape.iter().product()).map(|_| one()).collect();
    Tensor::from_vec(name, DType::BF16, shape.to_vec(), bits).unwrap()
}

/// Writes a model with one block; `quantized`: its shared expert, too.
fn write(family: &str, format: Format, quantized: bool, dir: &Path) {
    fs::create_dir_all(dir).unwrap();
    let mlp = "model.layers.0.mlp";
    let mut tensors = vec![numbers(&format!("{mlp}.gate.weight"), &[EXPERTS, HIDDEN])];
    let (shared, config): (&str, Value) = match family {
        "qwen2_moe" => {
            let gate = format!("{mlp}.shared_expert_gate.weight");
            tensors.push(numbers(&gate, &[1, HIDDEN]));
            ("shared_expert", json!({"num_experts": EXPERTS, "norm_topk_prob": true}))
        }
        "cohere2_moe" => {
            let average = json!({"num_experts": EXPERTS, "num_shared_experts": 1,
                "expert_selection_fn": "sigmoid", "norm_topk_prob": true,
                "shared_expert_combination_strategy": "average"});
            ("shared_experts", average)
        }
        _ => {
            let norm = "model.layers.0.post_mlp_layernorm.weight";
            tensors.push(numbers(norm, &[HIDDEN]));
            tensors.push(numbers(&format!("{mlp}.gate.e_score_correction_bias"), &[EXPERTS]));
            let keys = json!({"n_routed_experts": EXPERTS, "n_group": 1, "topk_group": 1,
                "norm_topk_prob": true, "routed_scaling_factor": 1.0});
            ("shared_experts", keys)
        }
    };
    let mut add = |module: String, k: usize, n: usize, quantized: bool| match quantized {
        true => tensors.extend(format.tensors(&format.weight(&module, &module, Shape::new(k, n)))),
        false => tensors.push(numbers(&format!("{module}.weight"), &[n, k])),
    };
    let all = (0..EXPERTS).map(|e| (format!("{mlp}.experts.{e}"), INNER, true));
    for (module, inner, quantized) in all.chain([(format!("{mlp}.{shared}"), SHARED, quantized)]) {
        add(format!("{module}.gate_proj"), HIDDEN, inner, quantized);
        add(format!("{module}.up_proj"), HIDDEN, inner, quantized);
        add(format!("{module}.down_proj"), inner, HIDDEN, quantized);
    }
    save(&dir.join("model.safetensors"), &tensors);
    let mut config = config;
    config["model_type"] = json!(family);
    config["hidden_size"] = json!(HIDDEN);
    config["num_experts_per_tok"] = json!(TOP_K);
    config["dtype"] = json!("bfloat16");
    config["quantization_config"] = format.quant_config();
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
}

fn run(dir: &Path) -> Run {
    let mut options = Options::default();
    options.layer = Some("model.layers.0.mlp.experts".to_owned());
    options.check = true;
    options.input = Source::Seeded { seed: 3, tokens: TOKENS, dtype: ScalarType::BFLOAT16 };
    let found = run_layer(dir, &options).unwrap_or_else(|e| panic!("{dir:?}: {e}"));
    assert!(found.is_equal(), "{dir:?}");
    found
}

/// An output in f64; zeros if there is none.
fn values(run: &Run, name: &str) -> Vec<f64> {
    let Some(output) = run.outputs.iter().find(|o| o.name == name) else {
        return vec![0.0; TOKENS * HIDDEN];
    };
    let halves = output.bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]));
    halves.map(|bits| output.ty.to_f64(bits.into())).collect()
}

/// The largest error of each value of a run's `y` before its norm: half a unit in the last place for each
/// rounding, of `down` for each expert, their sum, the shared expert, its gate, and the sum of both.
fn roundings(run: &Run) -> Vec<f64> {
    let down = values(run, "down");
    let parts = ["y_experts", "shared", "shared", "y", "y"].map(|name| values(run, name));
    let one = |i: usize| {
        let (t, h) = (i / HIDDEN, i % HIDDEN);
        let slots = (t * TOP_K..(t + 1) * TOP_K).map(|s| down[s * HIDDEN + h].abs()).sum::<f64>();
        (slots + parts.iter().map(|part| part[i].abs()).sum::<f64>()) / 256.0 * 1.02
    };
    (0..TOKENS * HIDDEN).map(one).collect()
}

/// The sum of the ranks' outputs is the whole layer's, before the norm of `axk1`.
fn compare(whole: &Run, ranks: &[Run], name: &str) {
    let expected: Vec<f64> = match name.contains("axk1") {
        true => {
            let (experts, shared) = (values(whole, "y_experts"), values(whole, "shared"));
            experts.iter().zip(&shared).map(|(a, b)| a + b).collect()
        }
        false => values(whole, "y"),
    };
    let found: Vec<_> = ranks.iter().map(|rank| values(rank, "y")).collect();
    let bounds: Vec<_> = ranks.iter().chain([whole]).map(roundings).collect();
    for (i, expected) in expected.iter().enumerate() {
        let sum: f64 = found.iter().map(|y| y[i]).sum();
        let bound: f64 = bounds.iter().map(|bound| bound[i]).sum();
        let error = (sum - expected).abs();
        assert!(error <= bound, "{name} {i}: {error} above {bound}");
    }
}

#[test]
fn parts_of_all_ranks_add_up_to_the_block() {
    let temp = tempfile::tempdir().unwrap();
    let rank = |size, rank| Ranks { size, rank };
    let cases =
        [("qwen2_moe", Format::Gptq4), ("cohere2_moe", Format::Fp8Block), ("axk1", Format::Nvfp4)];
    for (family, format) in cases {
        for quantized in [false, true] {
            let model = temp.path().join(format!("{family}-{quantized}"));
            write(family, format, quantized, &model);
            let folder = |name: &str, tp, ep| {
                let out = model.join(name);
                convert(&model, &out, &Settings { tp, ep, ..settings() })
                    .unwrap_or_else(|e| panic!("{family}: {e}"));
                run(&out)
            };
            let whole = folder("whole", Ranks::ONE, Ranks::ONE);
            assert!(whole.outputs.iter().any(|o| o.name == "shared"), "{family}");
            let none = Ranks::ONE;
            let tp: Vec<Run> =
                (0..2).map(|r| folder(&format!("tp{r}"), rank(2, r), none)).collect();
            // Ranks of both: experts whole on one, the shared expert in halves.
            let both = |r| folder(&format!("both{r}"), rank(2, r), rank(2, r));
            let both: Vec<Run> = (0..2).map(both).collect();
            // Ranks with tokens of their own.
            let ep: Vec<Run> =
                (0..2).map(|r| folder(&format!("ep{r}"), none, rank(2, r))).collect();
            for (runs, how) in [(&tp, "tp"), (&both, "tp and ep"), (&ep, "ep")] {
                let name = format!("{family} {format:?} {quantized} {how}");
                compare(&whole, runs, &name);
                assert!(runs.iter().all(|r| r.partial.is_some()), "{name}");
                let parts: Vec<_> = runs.iter().map(|r| values(r, "shared")).collect();
                let total = values(&whole, "shared");
                // One rank alone is not the shared expert, unless it adds all of it.
                let one = parts[0].iter().zip(&total).all(|(a, b)| a == b);
                assert_eq!(one, how == "ep", "{name}");
                assert_eq!(parts[1].iter().all(|v| *v == 0.0), how == "ep", "{name}");
                let noted = runs[1].notes.iter().any(|n| n.contains("rank 0 adds it"));
                assert_eq!(noted, how == "ep", "{name}");
                let norm = runs[0].notes.iter().any(|n| n.contains("norm follows"));
                assert_eq!(norm, family == "axk1", "{name}: {:?}", runs[0].notes);
            }
        }
    }
}

/// Features that ranks cannot share are refused by name.
#[test]
fn features_that_the_ranks_do_not_divide_are_refused() {
    let temp = tempfile::tempdir().unwrap();
    write("qwen2_moe", Format::CtPack, false, &temp.path().join("model"));
    let out = temp.path().join("out");
    let tp = Ranks { size: 2, rank: 1 };
    convert(&temp.path().join("model"), &out, &Settings { tp, ..settings() }).unwrap();
    let path = out.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["marlinspike"]["tp_size"] = json!(3);
    fs::write(&path, config.to_string()).unwrap();
    let error = run_layer(&out, &Options::default()).unwrap_err().to_string();
    assert!(error.contains("shared expert") && error.contains("256"), "{error}");
}
