//! Small cases of every operation, and the changes that a sweep makes to them.

use std::collections::{BTreeMap, BTreeSet};

use marlinspike::case::{
    Activation, Case, CaseConfig, CheckpointFormat, LayerRules, LinearConfig, MoeConfig, Op,
    ParallelStyle, QuantConfig, ScoringFunc, TensorParallel,
};
use marlinspike::container::{Container, write_container};
use marlinspike::formats::{awq, gptq, nvfp4};
use marlinspike::formats::{mxfp4, mxfp8};
use marlinspike::num::dims::GroupSize;
use marlinspike::num::scalar::ScalarType;
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::vectors::{Generator, Rng, case_of};
use serde_json::{Value, json};

/// A case file taken apart.
#[derive(Clone)]
pub(crate) struct Raw {
    /// For messages.
    pub(crate) label: String,
    metadata: BTreeMap<String, String>,
    pub(crate) tensors: Vec<Tensor<'static>>,
}

impl Raw {
    pub(crate) fn of(label: &str, case: &Case<'_>) -> Self {
        Self::parse(label, &case.to_bytes().unwrap())
    }

    pub(crate) fn parse(label: &str, bytes: &[u8]) -> Self {
        let container = Container::parse(bytes).unwrap();
        let tensors = container.tensors().map(|t| t.unwrap().into_owned()).collect();
        Self { label: label.to_owned(), metadata: container.metadata().clone(), tensors }
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        write_container(&self.tensors, &self.metadata, Vec::new()).unwrap()
    }

    pub(crate) fn config(&self) -> Value {
        serde_json::from_str(&self.metadata["config"]).unwrap()
    }

    pub(crate) fn with_config(&self, config: &Value) -> Self {
        let mut changed = self.clone();
        changed.metadata.insert("config".to_owned(), config.to_string());
        changed
    }

    pub(crate) fn without(&self, names: &[&str]) -> Self {
        let mut changed = self.clone();
        changed.tensors.retain(|t| !names.contains(&t.name()));
        changed
    }

    pub(crate) fn zeroed(&self, name: &str) -> Self {
        let mut changed = self.clone();
        for tensor in changed.tensors.iter_mut().filter(|t| t.name() == name) {
            let bytes = vec![0; tensor.bytes().len()];
            *tensor = Tensor::new(name, tensor.dtype(), tensor.shape().to_vec(), bytes).unwrap();
        }
        changed
    }

    /// With tensor `i` as `dtype` and `shape`, its bytes repeated or cut.
    pub(crate) fn reshaped(&self, i: usize, dtype: DType, shape: Vec<usize>) -> Self {
        let mut changed = self.clone();
        let old = &self.tensors[i];
        let len = shape.iter().product::<usize>() * dtype.bytes();
        let bytes: Vec<u8> = match old.bytes() {
            [] => vec![0; len],
            bytes => bytes.iter().copied().cycle().take(len).collect(),
        };
        changed.tensors[i] = Tensor::new(old.name(), dtype, shape, bytes).unwrap();
        changed
    }
}

fn quant(format: CheckpointFormat, weight: ScalarType, dtype: ScalarType, g: i64) -> QuantConfig {
    QuantConfig {
        checkpoint_format: format,
        weight_type: weight,
        dtype,
        input_dtype: None,
        group_size: GroupSize::from_config(g).unwrap(),
        desc_act: false,
        is_k_full: true,
        has_bias: false,
        tensor_parallel: None,
        convention: None,
    }
}

fn quants() -> Vec<QuantConfig> {
    use CheckpointFormat as F;
    use ScalarType as S;
    let rank = Some(TensorParallel { size: 2, rank: 1, style: ParallelStyle::Row });
    let act_order = QuantConfig {
        desc_act: true,
        is_k_full: false,
        tensor_parallel: rank,
        ..quant(F::Int(&gptq::FORMAT), S::UINT4B8, S::FLOAT16, 32)
    };
    let int8 = QuantConfig {
        input_dtype: Some(S::INT8),
        has_bias: true,
        ..quant(F::Int(&awq::FORMAT), S::UINT4, S::FLOAT16, 64)
    };
    let fp8 = QuantConfig {
        input_dtype: Some(S::FLOAT8_E4M3FN),
        ..quant(F::Int(&gptq::FORMAT), S::UINT4B8, S::BFLOAT16, -1)
    };
    vec![
        act_order,
        int8,
        fp8,
        QuantConfig {
            has_bias: true,
            ..quant(F::Block(&nvfp4::FORMAT), S::FLOAT4_E2M1F, S::BFLOAT16, 16)
        },
        quant(F::Int(&gptq::FORMAT), S::UINT8B128, S::BFLOAT16, 64),
        quant(F::Fp8, S::FLOAT8_E4M3FN, S::FLOAT16, -1),
        quant(F::Block(&mxfp8::FORMAT), S::FLOAT8_E4M3FN, S::BFLOAT16, 32),
        quant(F::Block(&mxfp4::FORMAT), S::FLOAT4_E2M1F, S::BFLOAT16, 32),
    ]
}

/// A case of `config`, of one row: the first number that is drawn picks one of seven row counts.
fn smallest(label: &str, config: &CaseConfig) -> Raw {
    let seed = (0..).find(|&seed| Rng::new(seed).below(7) == 0).unwrap();
    let case = case_of(config.clone(), &mut Rng::new(seed)).unwrap();
    let rows = case.inputs["x"].shape()[0];
    assert_eq!(rows, 1, "{label}");
    Raw::of(label, &case)
}

fn linears() -> Vec<Raw> {
    let config = |quant: QuantConfig| LinearConfig {
        quant,
        size_m: 1,
        size_n: 64,
        size_k: 128,
        scale_factor: None,
        schedule: None,
        quantizer: None,
    };
    let raw = |(i, quant)| smallest(&format!("linear {i}"), &CaseConfig::Linear(config(quant)));
    quants().into_iter().enumerate().map(raw).collect()
}

fn layers() -> Vec<Raw> {
    let config = |quant: QuantConfig, ep_size| {
        CaseConfig::Moe(MoeConfig {
            quant,
            size_m: 1,
            num_experts: 2,
            top_k: 2,
            hidden_size: 128,
            intermediate_size: 64,
            activation: Activation::Silu,
            scoring_func: ScoringFunc::Softmax,
            renormalize: true,
            apply_router_weight_on_input: false,
            block_size_m: 8,
            ep_size,
            ep_rank: 0,
            scale_factor_w13: None,
            scale_factor_w2: None,
            schedule_w13: None,
            schedule_w2: None,
            rules: LayerRules::NONE,
        })
    };
    let mut raws = Vec::new();
    for (i, quant) in quants().into_iter().enumerate().take(4) {
        raws.push(smallest(&format!("moe {i}"), &config(quant, 1 + i % 2)));
    }
    // Without a schedule, stages are judged by their bounds.
    let mut unscheduled = raws[0].config();
    unscheduled["schedule_w13"] = Value::Null;
    unscheduled["schedule_w2"] = Value::Null;
    let mut bounded = raws[0].with_config(&unscheduled);
    bounded.label = "moe by bounds".to_owned();
    raws.push(bounded);
    raws
}

/// A router's case or a list of blocks, with outputs, which generated ones lack.
fn routing() -> Vec<Raw> {
    let mut all = Vec::new();
    for op in [Op::Router, Op::Align] {
        let generator = Generator::new(op, 7).unwrap();
        let cases = (0..30).map(|i| generator.case(i).unwrap());
        let mut cases: Vec<Case<'_>> = cases.collect();
        cases.sort_by_key(|case| case.to_bytes().unwrap().len());
        for mut case in cases.into_iter().take(3) {
            let ints = |len: usize| vec![0u8; 4 * len];
            let list = |len| Tensor::new("", DType::I32, vec![len], ints(len)).unwrap();
            match &case.config {
                CaseConfig::Router(c) => {
                    let shape = vec![case.inputs["router_logits"].shape()[0], c.top_k];
                    let len = shape[0] * shape[1];
                    for (name, dtype) in [
                        ("topk_ids", DType::I32),
                        ("topk_weights", DType::F32),
                        ("token_expert_indices", DType::I32),
                    ] {
                        let tensor = Tensor::new("", dtype, shape.clone(), ints(len)).unwrap();
                        case.add_output(name, tensor);
                    }
                }
                _ => {
                    case.add_output("sorted_token_ids", list(16));
                    case.add_output("expert_ids", list(2));
                    case.add_output("num_tokens_post_padded", list(1));
                }
            }
            all.push(Raw::of(op.name(), &case));
        }
    }
    all
}

/// Cases whose bytes are mostly one product's, and wrong: those that take most memory for their size.
pub(crate) fn large() -> Vec<Raw> {
    let rows = 700;
    let at = |raw: &Raw, name: &str| raw.tensors.iter().position(|t| t.name() == name).unwrap();
    let with_rows = |raw: &Raw, name: &str| {
        let i = at(raw, name);
        let tensor = &raw.tensors[i];
        raw.reshaped(i, tensor.dtype(), vec![rows, tensor.shape()[1]])
    };
    let sized = |raw: &Raw| {
        let mut config = raw.config();
        config["size_m"] = json!(rows);
        raw.with_config(&config)
    };
    let quant = quants().swap_remove(4);
    let config = CaseConfig::Linear(LinearConfig {
        quant: QuantConfig { group_size: GroupSize::Channel, ..quant },
        size_m: 1,
        size_n: 1024,
        size_k: 64,
        scale_factor: None,
        schedule: None,
        quantizer: None,
    });
    let wide = smallest("linear of many columns", &config);
    let wide = ["in.x", "out.y"].iter().fold(sized(&wide), |raw, name| with_rows(&raw, name));
    let mut unscheduled = wide.config();
    unscheduled["schedule"] = Value::Null;
    let by_bounds = wide.with_config(&unscheduled);

    // A sum of many steps, all of it missing: very many ranges of k explain the zeros.
    let CaseConfig::Linear(c) = config.clone() else { unreachable!() };
    let long = CaseConfig::Linear(LinearConfig { size_n: 64, size_k: 1 << 16, ..c });
    let long = smallest("linear of a long sum", &long).zeroed("out.y");
    let mut config = long.config();
    config["schedule"] = Value::Null;
    let long = long.with_config(&config).without(&["out.marlin_qweight"]);

    // `y` alone: all stages before it are recomputed.
    let layer = layers().pop().unwrap();
    let other = |t: &Tensor<'_>| t.name().starts_with("out.") && t.name() != "out.y";
    let others: Vec<_> = layer.tensors.iter().filter(|t| other(t)).map(Tensor::name).collect();
    let layer = sized(&layer.without(&others));
    let names = ["in.x", "in.router_logits", "out.y"];
    let layer = names.iter().fold(layer, |raw, name| with_rows(&raw, name));
    vec![wide, by_bounds, long, layer]
}

/// Small cases of every operation.
pub(crate) fn bases() -> Vec<Raw> {
    let mut all = [linears(), layers(), routing()].concat();
    let own = [Op::Linear, Op::Moe, Op::Router, Op::Align];
    for &(name, op) in Op::NAMED.iter().filter(|(_, op)| !own.contains(op)) {
        let generator = Generator::new(op, 7).unwrap();
        let cases = (0..24).map(|i| generator.case(i).unwrap().to_bytes().unwrap());
        let mut cases: Vec<Vec<u8>> = cases.collect();
        cases.sort_by_key(Vec::len);
        all.extend(cases.iter().take(2).map(|bytes| Raw::parse(name, bytes)));
    }
    all
}

/// Shapes that are not `shape`.
pub(crate) fn shapes(shape: &[usize]) -> Vec<Vec<usize>> {
    let mut all = vec![
        shape.iter().rev().copied().collect(),
        vec![shape.iter().product()],
        Vec::new(),
        [&[1], shape].concat(),
        [shape, &[1]].concat(),
    ];
    for axis in 0..shape.len() {
        let of = |size: usize| {
            let mut changed = shape.to_vec();
            changed[axis] = size;
            changed
        };
        let size = shape[axis];
        all.extend([of(size + 1), of(size.saturating_sub(1)), of(0), of(2 * size), of(size / 2)]);
    }
    let set: BTreeSet<Vec<usize>> = all.into_iter().filter(|s| s != shape).collect();
    set.into_iter().collect()
}

/// Element types that are not `dtype`: of its width and of others.
pub(crate) fn dtypes(dtype: DType) -> impl Iterator<Item = DType> {
    [DType::U8, DType::BF16, DType::I32, DType::F32, DType::I64]
        .into_iter()
        .filter(move |&other| other != dtype)
}

/// Every string that stands as a value in `config`.
pub(crate) fn names(config: &Value, into: &mut BTreeSet<String>) {
    match config {
        Value::String(name) => {
            into.insert(name.clone());
        }
        Value::Array(list) => list.iter().for_each(|v| names(v, into)),
        Value::Object(map) => map.values().for_each(|v| names(v, into)),
        _ => {}
    }
}

/// Values for a key that holds `old`.
fn values(old: &Value, names: &BTreeSet<String>) -> Vec<Value> {
    let deep = (0..200).fold(json!([]), |inner, _| json!([inner]));
    let mut all = vec![
        json!(0),
        json!(-1),
        json!(1),
        json!(2),
        json!(7),
        json!((1u64 << 31) - 1),
        json!(1u64 << 31),
        json!(1u64 << 63),
        json!(u64::MAX),
        json!(i64::MIN),
        json!(1.5),
        json!(1e308),
        json!(-1e-320),
        Value::Null,
        json!("NaN"),
        json!(""),
        json!(true),
        json!(false),
        json!([]),
        json!({}),
        deep,
    ];
    if old.is_string() {
        all.extend(names.iter().map(|name| json!(name)));
    }
    if let Some(size) = old.as_u64() {
        all.extend([size + 1, size.saturating_sub(1), 2 * size, size / 2].map(|v| json!(v)));
    }
    all.retain(|value| value != old);
    all
}

/// `config` with one value changed or left out, at any depth, and what was changed.
pub(crate) fn configs(config: &Value, names: &BTreeSet<String>) -> Vec<(String, Value)> {
    let mut all = Vec::new();
    let keys: Vec<Value> = match config {
        Value::Object(map) => map.keys().map(|key| json!(key)).collect(),
        Value::Array(list) => (0..list.len()).map(|i| json!(i)).collect(),
        _ => return all,
    };
    let at = |changed: &mut Value, key: &Value, value: Value| match key {
        Value::String(key) => changed[key.as_str()] = value,
        key => changed[key.as_u64().unwrap() as usize] = value,
    };
    for key in keys {
        let old = match &key {
            Value::String(key) => &config[key.as_str()],
            key => &config[key.as_u64().unwrap() as usize],
        };
        let inner = configs(old, names).into_iter();
        let plain = values(old, names).into_iter().map(|value| (String::new(), value));
        for (path, value) in plain.chain(inner) {
            let mut changed = config.clone();
            let text = match path.as_str() {
                "" => format!("{key} = {value:.60}"),
                path => format!("{key}.{path}"),
            };
            at(&mut changed, &key, value);
            all.push((text, changed));
        }
        if let Value::String(key) = &key {
            let mut changed = config.clone();
            changed.as_object_mut().unwrap().shift_remove(key);
            all.push((format!("without {key}"), changed));
        }
    }
    all
}
