//! `convert --to kleidiai` of MXFP4 experts: the bytes equal the documented layout, written by loops of
//! the test from the checkpoint's tensors; the layer runs with every kernel's bits; bad weights are
//! named.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::common::runs::{golden, run, settings};
use crate::common::{EXPERTS, Format, HIDDEN, INTER, files, write_model};
use marlinspike::case::ActivationRounding;
use marlinspike::container::{Container, write_container};
use marlinspike::layouts::CPU_E2M1;
use marlinspike::num::scalar::{ScalarType, bf16_to_f32};
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::w4a8::Values;
use marlinspike::w4a8::experts::kernel_names;
use marlinspike_model::convert::error::ConvertError;
use marlinspike_model::convert::parallel::Ranks;
use marlinspike_model::convert::plan::Settings;
use marlinspike_model::convert::target::int4;
use marlinspike_model::run::error::RunError;
use marlinspike_model::run::input::{Inputs, Routing};
use marlinspike_model::run::layer::{LoadOptions, Opened};
use serde_json::{Value, json};

const GPT_OSS: &str = "model.layers.0.mlp.experts";
/// e2m1 by code.
const E2M1: [f64; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

fn kleidi() -> Settings {
    Settings { format: int4::FORMAT, ..settings() }
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

fn description(dir: &Path, module: &str) -> Value {
    let key = format!("marlinspike.w4a8.{module}");
    let found = files(dir).into_iter().find_map(|path| {
        let bytes = fs::read(&path).ok().filter(|_| path.extension().is_some())?;
        Container::parse(&bytes).ok()?.metadata().get(&key).cloned()
    });
    serde_json::from_str(&found.unwrap()).unwrap()
}

/// An output feature: a code for each k, a scale for each 32.
#[derive(Debug, Clone)]
struct Column {
    codes: Vec<u8>,
    scales: Vec<u8>,
    bias: f32,
}

impl Column {
    /// Row `n` of `[N, K / 2]` codes and `[N, K / 32]` scales.
    fn of(blocks: &[u8], scales: &[u8], n: usize, size_k: usize, bias: f32) -> Self {
        let row = &blocks[n * size_k / 2..][..size_k / 2];
        let codes = row.iter().flat_map(|b| [b & 15, b >> 4]).collect();
        Self { codes, scales: scales[n * size_k / 32..][..size_k / 32].to_vec(), bias }
    }

    fn rows(&self, k: std::ops::Range<usize>) -> Self {
        let scales = self.scales[k.start / 32..k.end / 32].to_vec();
        Self { codes: self.codes[k].to_vec(), scales, bias: self.bias }
    }

    fn value(&self, k: usize) -> f64 {
        E2M1[usize::from(self.codes[k])] * 2f64.powi(i32::from(self.scales[k / 32]) - 127)
    }
}

/// The bytes of the layout: for each block of 16 columns and each group, pieces of four k of each column
/// with k + 16 in the high nibbles, then scales; then biases.
fn packed(columns: &[Column]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for block in columns.chunks(16) {
        for g in 0..block[0].scales.len() {
            for piece in 0..4 {
                for n in 0..16 {
                    for j in 0..4 {
                        let k = 32 * g + 4 * piece + j;
                        let byte = |c: &Column| c.codes[k] | c.codes[k + 16] << 4;
                        bytes.push(block.get(n).map_or(0, byte));
                    }
                }
            }
            bytes.extend((0..16).map(|n| block.get(n).map_or(0, |c| c.scales[g])));
        }
        for n in 0..16 {
            bytes.extend(block.get(n).map_or(0.0, |c| c.bias).to_le_bytes());
        }
    }
    bytes
}

/// Expert `e` of gpt-oss's stack `name`, in the file's order.
fn stored(tensors: &BTreeMap<String, Tensor<'static>>, name: &str, e: usize) -> Vec<Column> {
    let part = |end: &str| &tensors[&format!("{GPT_OSS}.{name}_{end}")];
    let (blocks, scales, bias) = (part("blocks"), part("scales"), part("bias"));
    let [_, size_n, groups, _] = blocks.shape() else { panic!("four dimensions") };
    let (size_n, size_k) = (*size_n, groups * 32);
    let of = |t: &Tensor<'static>, len: usize| t.bytes()[e * len..][..len].to_vec();
    let (blocks, scales) = (of(blocks, size_n * size_k / 2), of(scales, size_n * groups));
    let bias = bias.elements::<u16>()[e * size_n..][..size_n].to_vec();
    let column = |n: usize| Column::of(&blocks, &scales, n, size_k, bf16_to_f32(bias[n]));
    (0..size_n).map(column).collect()
}

fn expect(found: &BTreeMap<String, Tensor<'static>>, name: &str, experts: &[Vec<Column>]) {
    let bytes: Vec<u8> = experts.iter().flat_map(|columns| packed(columns)).collect();
    let tensor = &found[name];
    let shape = [experts.len(), bytes.len() / experts.len()];
    assert_eq!((tensor.dtype(), tensor.shape()), (DType::U8, &shape[..]), "{name}");
    let differs = tensor.bytes().iter().zip(&bytes).position(|(a, b)| a != b);
    assert_eq!(differs, None, "{name}");
}

#[test]
fn a_published_gpt_oss_model() {
    let temp = tempfile::tempdir().unwrap();
    let model = golden("checkpoints").join("gpt-oss-mxfp4");
    let given = read(&model);
    let ranks = |size, rank| Ranks { size, rank };
    let cuts = [((1, 0), (1, 0)), ((2, 0), (1, 0)), ((2, 1), (1, 0)), ((4, 3), (1, 0))];
    for (i, ((tp, r), (ep, q))) in cuts.into_iter().chain([((1, 0), (2, 1))]).enumerate() {
        let out = temp.path().join(format!("out{i}"));
        let settings = Settings { tp: ranks(tp, r), ep: ranks(ep, q), ..kleidi() };
        let summary = run(&model, &out, &settings).unwrap();
        assert_eq!((summary.converted, summary.activations_quantized), (2, 2));
        let found = read(&out);
        let local = if ep == 2 { q..q + 1 } else { 0..2 };
        let inner = 128 / tp * r..128 / tp * (r + 1);
        let w13: Vec<Vec<Column>> = local
            .clone()
            .map(|e| {
                let columns = stored(&given, "gate_up_proj", e);
                let half = |odd| inner.clone().map(move |i| 2 * i + odd);
                half(0).chain(half(1)).map(|n| columns[n].clone()).collect()
            })
            .collect();
        let w2: Vec<Vec<Column>> = local
            .map(|e| {
                let mut columns = stored(&given, "down_proj", e);
                for c in &mut columns {
                    // The ranks' sums are added, so one of them has the bias.
                    let bias = if r == 0 { c.bias } else { 0.0 };
                    *c = Column { bias, ..c.rows(inner.clone()) };
                }
                columns
            })
            .collect();
        expect(&found, &format!("{GPT_OSS}.w13_packed"), &w13);
        expect(&found, &format!("{GPT_OSS}.w2_packed"), &w2);
        let described = description(&out, GPT_OSS);
        let numbers = ["version", "hidden_size", "intermediate_size", "group_size", "nr"];
        let numbers = numbers.map(|key| described[key].as_u64().unwrap());
        assert_eq!(numbers, [3, 128, 128 / tp as u64, 32, 16]);
        assert_eq!(described["weights"], "mxfp4_int8");
        assert_eq!(described["routing"]["activation"], "swigluoai");
        assert_eq!(
            found["model.layers.0.mlp.router.bias"],
            given["model.layers.0.mlp.router.bias"]
        );
    }
    // 128 / 8 is half a group.
    let settings = Settings { tp: ranks(8, 0), ..kleidi() };
    let error = run(&model, &temp.path().join("none"), &settings).unwrap_err().to_string();
    let parts = ["cuts a quantization group", "group_size = 32"];
    assert!(parts.iter().all(|part| error.contains(part)), "{error}");
}

#[test]
fn compressed_tensors_experts() {
    let temp = tempfile::tempdir().unwrap();
    let (model, out) = (temp.path().join("model"), temp.path().join("out"));
    write_model(Format::Mxfp4, &model);
    let error = run(&model, &out, &kleidi()).unwrap_err();
    assert!(matches!(error, ConvertError::Refused { .. }), "{error}");
    let error = error.to_string();
    assert!(error.contains("self_attn.q_proj") && error.contains("expected experts"), "{error}");
    let summary = run(&model, &out, &Settings { skip_unsupported: true, ..kleidi() }).unwrap();
    assert_eq!(summary.converted, 2);
    let (given, found) = (read(&model), read(&out));
    let columns = |e: usize, name: &str, size_k: usize, size_n: usize| -> Vec<Column> {
        let part = |end: &str| given[&format!("{GPT_OSS}.{e}.{name}.{end}")].bytes();
        let (codes, scales) = (part("weight_packed"), part("weight_scale"));
        (0..size_n).map(|n| Column::of(codes, scales, n, size_k, 0.0)).collect()
    };
    let gate_up = |e| {
        let gate = columns(e, "gate_proj", HIDDEN, INTER);
        gate.into_iter().chain(columns(e, "up_proj", HIDDEN, INTER)).collect::<Vec<_>>()
    };
    let w13: Vec<_> = (0..EXPERTS).map(gate_up).collect();
    let w2: Vec<_> = (0..EXPERTS).map(|e| columns(e, "down_proj", INTER, HIDDEN)).collect();
    expect(&found, &format!("{GPT_OSS}.w13_packed"), &w13);
    expect(&found, &format!("{GPT_OSS}.w2_packed"), &w2);
    assert_eq!(description(&out, GPT_OSS)["routing"]["activation"], "silu");
    every_kernel(&out);
}

/// The output of two tokens, of the bits of every kernel and of the definition.
fn every_kernel(folder: &Path) -> (Vec<f32>, Inputs<Values>) {
    let opened = Opened::open(folder, None).unwrap();
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
    let rounding = ActivationRounding::HalfAway;
    let mut last = None;
    for kernel in kernel_names(&CPU_E2M1) {
        let options = LoadOptions { layer: None, rounding, kernel: Some(kernel), pool: &pool };
        let loaded = opened.load(options).unwrap();
        assert_eq!((&*loaded.module, loaded.layer.kernel_name()), (GPT_OSS, kernel));
        assert!(loaded.arithmetic.contains("quantized per group of 32"), "{}", loaded.arithmetic);
        for ty in [ScalarType::BFLOAT16, ScalarType::FLOAT32] {
            let inputs: Inputs<Values> = Inputs::seeded(3, 5, ty, loaded.layer.sizes()).unwrap();
            let mut y = loaded.layer.output(&inputs).unwrap();
            pool.install(|| loaded.layer.runner(&inputs)(&mut y)).unwrap();
            let expected = loaded.layer.definition(&inputs).unwrap();
            assert_eq!(y.bits(), expected.bits(), "{kernel} {ty}");
            last = Some((y.to_f32(), inputs));
        }
    }
    let unknown = LoadOptions { layer: None, rounding, kernel: Some("mmx"), pool: &pool };
    let error = opened.load(unknown).unwrap_err();
    let RunError::Kernel { found, known } = error else { panic!("{error}") };
    assert_eq!((&*found, known), ("mmx", kernel_names(&CPU_E2M1)));
    last.unwrap()
}

/// gpt-oss's experts in float64, with float64 activations.
fn float64(
    given: &BTreeMap<String, Tensor<'static>>,
    x: &[f32],
    weights: &[(usize, f64)],
) -> Vec<f64> {
    let product = |x: &[f64], columns: &[Column]| -> Vec<f64> {
        let one = |c: &Column| {
            x.iter().enumerate().map(|(k, x)| x * c.value(k)).sum::<f64>() + f64::from(c.bias)
        };
        columns.iter().map(one).collect()
    };
    let x: Vec<f64> = x.iter().map(|&x| x.into()).collect();
    let mut y = vec![0.0; x.len()];
    for &(e, weight) in weights {
        let gate_up = product(&x, &stored(given, "gate_up_proj", e));
        let activated: Vec<f64> = gate_up
            .chunks_exact(2)
            .map(|pair| {
                let (g, u) = (pair[0].min(7.0), pair[1].clamp(-7.0, 7.0));
                g / (1.0 + (-1.702 * g).exp()) * (u + 1.0)
            })
            .collect();
        let down = product(&activated, &stored(given, "down_proj", e));
        y.iter_mut().zip(down).for_each(|(y, d)| *y += weight * d);
    }
    y
}

#[test]
fn a_converted_layer_is_close_to_float64() {
    let temp = tempfile::tempdir().unwrap();
    let model = golden("checkpoints").join("gpt-oss-mxfp4");
    let given = read(&model);
    run(&model, temp.path().join("out").as_path(), &kleidi()).unwrap();
    let (y, inputs) = every_kernel(&temp.path().join("out"));
    let Routing::Logits(logits) = &inputs.routing else { panic!("logits") };
    let (mut error, mut size) = (0.0, 0.0);
    for (token, x) in inputs.x.to_f32().chunks_exact(128).enumerate() {
        // One expert for each token, of weight 1.
        let best = usize::from(logits[2 * token + 1] > logits[2 * token]);
        for (found, expected) in y[token * 128..].iter().zip(float64(&given, x, &[(best, 1.0)])) {
            error += (f64::from(*found) - expected).powi(2);
            size += expected * expected;
        }
    }
    // int8 activations in groups of 32 cost about 0.5 % for each product; exchanged gate and up,
    // nibbles or experts more than the output.
    let relative = (error / size).sqrt();
    assert!(relative < 0.02, "{relative}");
}

#[test]
fn bad_weights_are_named() {
    let temp = tempfile::tempdir().unwrap();
    let source = golden("checkpoints").join("gpt-oss-mxfp4");
    let model = temp.path().join("model");
    fs::create_dir_all(&model).unwrap();
    fs::copy(source.join("config.json"), model.join("config.json")).unwrap();
    let name = format!("{GPT_OSS}.down_proj_scales");
    let mut tensors = read(&source);
    let mut scales = tensors[&name].bytes().to_vec();
    scales[128 * 4 + 9] = 0xff;
    let bad = Tensor::new(&name, DType::U8, vec![2, 128, 4], scales).unwrap();
    tensors.insert(name, bad);
    let write = |tensors: &BTreeMap<String, Tensor<'static>>| {
        let all: Vec<_> = tensors.values().cloned().collect();
        let bytes = write_container(&all, &BTreeMap::new(), Vec::new()).unwrap();
        fs::write(model.join("model.safetensors"), bytes).unwrap();
    };
    write(&tensors);
    let out = temp.path().join("out");
    let error = run(&model, &out, &kleidi()).unwrap_err();
    let error = format!("{:#}", anyhow::Error::from(error));
    assert!(error.contains("down_proj") && error.contains("NaN"), "{error}");
    assert!(!out.join("config.json").exists());
    // Another activation than the layer's has no definition here: the routing is stated by a file.
    let config = fs::read_to_string(source.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&config).unwrap();
    config["model_type"] = json!("an_unknown_family");
    fs::write(model.join("config.json"), config.to_string()).unwrap();
    write(&read(&source));
    let error = run(&model, &out, &kleidi()).unwrap_err().to_string();
    assert!(error.contains(GPT_OSS) && error.contains("an_unknown_family"), "{error}");
}
