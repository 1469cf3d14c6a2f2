//! Packed layers in a file are loaded without a copy, run like the columns that they were packed
//! from, and rejected by name if the file's description is wrong.

use std::collections::BTreeMap;

use marlinspike::Error;
use marlinspike::case::{Activation, ActivationRounding, ScoringFunc};
use marlinspike::container::{Container, ContainerError, write_container};
use marlinspike::layouts::CPU_INT4;
use marlinspike::layouts::cpu::CpuTables;
use marlinspike::layouts::kleidi::{Columns, PackedRhs, RhsLayout};
use marlinspike::moe::families::RoutingRule;
use marlinspike::moe::router::Router;
use marlinspike::num::array::rows_of;
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::vectors::Rng;
use marlinspike::w4a8::moe::{Layer, Mode, MoeLayer};
use marlinspike::w4a8::scalar::Scalar;
use marlinspike::w4a8::stored::{
    Description, LinearDescription, MoeDescription, OperatorRouting, StoredRouting, experts, key,
    linear, modules,
};
use marlinspike::w4a8::{self, FamilyRouting, LayerRouter, Linear, LinearWorkspace, Values};
use serde_json::{Value, json};

const ROUNDING: ActivationRounding = ActivationRounding::HalfAway;
const LINEAR: &str = "model.layers.0.self_attn.q_proj";
const EXPERTS: &str = "model.layers.0.mlp.experts";
/// H, I, E.
const SIZES: (usize, usize, usize) = (64, 32, 3);

fn matrix(rng: &mut Rng, shape: Shape) -> PackedRhs<'static> {
    let codes = (0..shape.len()).map(|_| rng.below(16) as i8 - 8).collect();
    let scales = (0..shape.size_n * shape.size_k / 32).map(|_| 0x3c00 + rng.below(99) as u16);
    let layout = RhsLayout::new(shape, GroupSize::Of(32), 8).unwrap();
    let columns = match layout.is_channel_wise() {
        true => {
            let scales: Vec<f32> = scales.map(|s| f32::from_bits(u32::from(s) << 16)).collect();
            Columns::channel_wise(shape, codes, &scales, None)
        }
        false => Columns::group_wise(shape, 32, codes, scales.collect(), None),
    };
    layout.pack(&columns.unwrap()).unwrap()
}

struct Model {
    linear: PackedRhs<'static>,
    w13: Vec<PackedRhs<'static>>,
    w2: Vec<PackedRhs<'static>>,
    tensors: Vec<Tensor<'static>>,
    metadata: BTreeMap<String, String>,
}

/// The keys of the experts' description.
fn moe_json() -> Value {
    json!({"version": 1, "layer": "moe", "hidden_size": SIZES.0, "intermediate_size": SIZES.1,
        "num_experts": SIZES.2, "group_size": 32, "nr": 8, "top_k": 2, "scoring_func": "softmax",
        "renormalize": true, "activation": "silu", "apply_router_weight_on_input": false})
}

impl Model {
    fn new() -> Self {
        let mut rng = Rng::new(11);
        let (h, i, e) = SIZES;
        let linear = matrix(&mut rng, Shape::new(96, 20));
        let w13: Vec<_> = (0..e).map(|_| matrix(&mut rng, Shape::new(h, 2 * i))).collect();
        let w2: Vec<_> = (0..e).map(|_| matrix(&mut rng, Shape::new(i, h))).collect();
        let joined =
            |list: &[PackedRhs<'_>]| list.iter().flat_map(|w| w.bytes()).copied().collect();
        let tensor = |name: String, shape: Vec<usize>, bytes: Vec<u8>| {
            Tensor::new(name, DType::U8, shape, bytes).unwrap()
        };
        let stack = |name: &str, list: &[PackedRhs<'_>]| {
            let shape = vec![e, list[0].bytes().len()];
            tensor(format!("{EXPERTS}.{name}"), shape, joined(list))
        };
        let tensors = vec![
            // Seven bytes first: nothing after them is aligned.
            tensor("odd".to_owned(), vec![7], vec![1; 7]),
            tensor(
                format!("{LINEAR}.rhs_packed"),
                vec![linear.bytes().len()],
                linear.bytes().to_vec(),
            ),
            stack("w13_packed", &w13),
            stack("w2_packed", &w2),
        ];
        let described = json!({"version": 1, "layer": "linear", "size_k": 96, "size_n": 20,
            "group_size": 32, "nr": 8});
        let metadata = BTreeMap::from([
            (key(LINEAR), described.to_string()),
            (key(EXPERTS), moe_json().to_string()),
        ]);
        Self { linear, w13, w2, tensors, metadata }
    }

    fn bytes(&self) -> Vec<u8> {
        write_container(&self.tensors, &self.metadata, Vec::new()).unwrap()
    }
}

/// Whether `part` lies within `whole`.
fn lies_in(part: &[u8], whole: &[u8]) -> bool {
    whole.as_ptr_range().start <= part.as_ptr()
        && part.as_ptr_range().end <= whole.as_ptr_range().end
}

fn activations(rng: &mut Rng, len: usize) -> Vec<f32> {
    (0..len).map(|_| rng.below(2001) as f32 / 1000.0 - 1.0).collect()
}

#[test]
fn a_linear_layer_is_the_files_bytes_and_runs() {
    let model = Model::new();
    let bytes = model.bytes();
    let file = Container::parse(&bytes).unwrap();
    let layer = Linear::load(&file, LINEAR, ROUNDING).unwrap();
    assert!(lies_in(layer.weight().bytes(), &bytes));
    assert_eq!(layer.weight(), &model.linear);
    let x = Values::F32(activations(&mut Rng::new(1), 5 * 96));
    let expected = w4a8::linear(&Scalar, &x, &model.linear, ROUNDING).unwrap();
    let mut y = Values::F32(vec![0.0; 5 * 20]);
    let (x, out) = (x.view(96).unwrap(), y.view_mut(20).unwrap());
    layer.forward(x, &mut LinearWorkspace::default(), out).unwrap();
    assert_eq!(y.bits(), expected.bits());
}

#[test]
fn experts_are_the_files_bytes_and_run() {
    let model = Model::new();
    let bytes = model.bytes();
    let file = Container::parse(&bytes).unwrap();
    assert_eq!(modules(&file).collect::<Vec<_>>(), [EXPERTS, LINEAR]);
    let layer = MoeLayer::load(&file, EXPERTS, ROUNDING, Mode::Extended).unwrap();
    assert!(lies_in(layer.w13().bytes(), &bytes) && lies_in(layer.w2().bytes(), &bytes));
    let mut rng = Rng::new(2);
    let (tokens, (h, _, e)) = (6, SIZES);
    let (x, logits) = (activations(&mut rng, tokens * h), activations(&mut rng, tokens * e));
    let mut y = Values::F32(vec![0.0; tokens * h]);
    let mut workspace = layer.workspace(tokens);
    let [rows, of_experts] = [("x", &x, h), ("logits", &logits, e)]
        .map(|(name, v, cols)| rows_of(name, v, cols).unwrap());
    layer.forward(rows, of_experts, &mut workspace, y.view_mut(h).unwrap()).unwrap();
    let routing = Router::new(ScoringFunc::Softmax, 2, true)
        .route(rows_of("x", &logits, e).unwrap())
        .unwrap();
    let definition = Layer {
        w13: &model.w13,
        w2: &model.w2,
        num_experts: e,
        expert_map: None,
        activation: Activation::Silu,
        rounding: ROUNDING,
        router_weight_on_input: false,
        mode: Mode::Extended,
    };
    let routed = routing.routed().unwrap();
    let expected = definition.forward(&Scalar, &Values::F32(x), routed).unwrap();
    assert_eq!(y.bits(), expected.bits());
}

#[test]
fn a_description_comes_back() {
    let mut model = Model::new();
    for map in [None, Some(vec![0, -1, 2, 1])] {
        let moe = MoeDescription {
            format: &CPU_INT4,
            hidden_size: 64,
            intermediate_size: 96,
            num_experts: 4,
            expert_map: map,
            group_size: GroupSize::Of(32),
            nr: 4,
            tables: CpuTables::NONE,
            routing: StoredRouting::Operator(OperatorRouting {
                top_k: 3,
                scoring_func: ScoringFunc::Sigmoid,
                renormalize: false,
                activation: Activation::SwigluOai,
                router_weight_on_input: true,
            }),
        };
        model.metadata.insert(key(EXPERTS), moe.to_json().to_string());
        let bytes = model.bytes();
        let file = Container::parse(&bytes).unwrap();
        assert_eq!(Description::read(&file, EXPERTS).unwrap(), Description::Moe(moe));
    }
    let layout = RhsLayout::new(Shape::new(40, 3), GroupSize::Channel, 4).unwrap();
    let linear = LinearDescription::int4(layout, GroupSize::Channel);
    model.metadata.insert(key(LINEAR), linear.to_json().to_string());
    let bytes = model.bytes();
    let file = Container::parse(&bytes).unwrap();
    assert_eq!(Description::read(&file, LINEAR).unwrap(), Description::Linear(linear));
}

/// The error of loading the experts when their description is `text`.
fn refused(text: &str) -> Error {
    let mut model = Model::new();
    model.metadata.insert(key(EXPERTS), text.to_owned());
    let bytes = model.bytes();
    experts(&Container::parse(&bytes).unwrap(), EXPERTS).unwrap_err()
}

/// The experts' description with one key changed.
fn with(name: &str, value: Value) -> Error {
    let mut described = moe_json();
    described[name] = value;
    refused(&described.to_string())
}

#[test]
fn values_out_of_range_are_refused_by_key() {
    for (name, value) in [
        ("version", json!(5)),
        ("version", json!(0)),
        ("layer", json!("linear")),
        ("layer", json!("conv")),
        ("num_experts", json!(0)),
        ("num_experts", json!(1u64 << 40)),
        ("top_k", json!(0)),
        ("top_k", json!(4)),
        ("scoring_func", json!("tanh")),
        ("activation", json!("selu")),
        ("group_size", json!(0)),
        ("group_size", json!(-2)),
        ("expert_map", json!([0, 0, -1])),
        ("expert_map", json!([0, 5, -1])),
        ("expert_map", json!([0, -7, 1])),
        // Of another JSON type.
        ("top_k", json!("2")),
        ("renormalize", json!(1)),
        ("hidden_size", json!(-64)),
        ("nr", json!(8.5)),
    ] {
        match with(name, value.clone()) {
            Error::Value { tensor, .. } => {
                let key = format!("{}.{name}", key(EXPERTS));
                assert!(tensor.ends_with(&key), "{name} {value}: {tensor}");
            }
            other => panic!("{name} {value}: {other}"),
        }
    }
    assert!(matches!(with("expert_map", json!([0, 1])), Error::Shape { .. }));
    for (name, value) in [
        ("nr", json!(6)),
        ("group_size", json!(48)),
        ("hidden_size", json!(0)),
        ("hidden_size", json!(u64::MAX)),
        ("intermediate_size", json!(u64::MAX)),
        ("intermediate_size", json!(1u64 << 62)),
    ] {
        assert!(matches!(with(name, value.clone()), Error::Size { .. }), "{name} {value}");
    }
}

#[test]
fn texts_that_are_no_description_are_refused() {
    let good = moe_json().to_string();
    let deep = "[".repeat(100_000);
    let twice = good.replacen('{', "{\"top_k\":1,", 1);
    let unknown = good.replacen('{', "{\"bits\":4,", 1);
    let missing = good.replacen("\"renormalize\":true,", "", 1);
    assert!(missing.len() < good.len());
    let trailing = format!("{good}x");
    for text in ["", "{}", "[]", "null", "7", &deep, &twice, &unknown, &missing, &trailing] {
        let error = refused(text);
        assert!(matches!(error, Error::Value { .. }), "{error}");
        assert!(error.to_string().contains(EXPERTS), "{error}");
    }
    assert!(refused(&unknown).to_string().contains("bits"));
    assert!(refused(&missing).to_string().contains("renormalize"));
}

#[test]
fn tensors_that_are_not_as_described_are_refused() {
    // Valid sizes that differ from the tensors'. (Another `nr` or group may have the same length,
    // which the bytes do not show.)
    for (name, value) in [
        ("hidden_size", json!(32)),
        ("intermediate_size", json!(64)),
        ("num_experts", json!(4)),
        ("expert_map", json!([0, -1, 1])),
    ] {
        let error = with(name, value);
        assert!(matches!(error, Error::Shape { .. }), "{name}: {error}");
    }
    let load = |model: &Model| {
        let bytes = model.bytes();
        let file = Container::parse(&bytes).unwrap();
        (experts(&file, EXPERTS).map(|_| ()), linear(&file, LINEAR).map(|_| ()))
    };
    let mut model = Model::new();
    let w2 = model.tensors.pop().unwrap();
    assert!(matches!(
        load(&model).0.unwrap_err().downcast_ref(),
        Some(ContainerError::NoSuchTensor { tensor }) if tensor == w2.name()
    ));
    let shape = w2.shape().to_vec();
    let signed = Tensor::new(w2.name(), DType::I8, shape, w2.bytes().to_vec()).unwrap();
    model.tensors.push(signed);
    assert!(matches!(load(&model).0, Err(Error::Dtype { .. })));
    let flat = vec![w2.len()];
    model.tensors[3] = Tensor::new(w2.name(), DType::U8, flat, w2.bytes().to_vec()).unwrap();
    assert!(matches!(load(&model).0, Err(Error::Shape { .. })));
    let q = model.tensors[1].clone();
    let short = q.bytes()[1..].to_vec();
    model.tensors[1] = Tensor::new(q.name(), DType::U8, vec![short.len()], short).unwrap();
    assert!(matches!(load(&model).1, Err(Error::Shape { .. })));
    model.metadata.clear();
    assert!(matches!(load(&model), (Err(Error::Missing { .. }), Err(Error::Missing { .. }))));
}

/// The keys of a description with a family's rule.
fn family_json() -> Value {
    json!({"version": 2, "layer": "moe", "hidden_size": SIZES.0, "intermediate_size": SIZES.1,
        "num_experts": SIZES.2, "group_size": 32, "nr": 8, "correction_bias": [0.5, -0.25, 0.0],
        "routing": {"scoring_func": "sigmoid", "top_k": 2, "renormalize": true,
            "renormalize_epsilon": 1e-20, "routed_scaling_factor": 2.5, "swiglu_limit": 7.0,
            "correction_bias": "gate.e_score_correction_bias"}})
}

#[test]
fn a_familys_rule_comes_back_with_every_bit_of_its_tensors() {
    let mut model = Model::new();
    let rule = RoutingRule::from_json(&family_json()["routing"]).unwrap();
    let rule = RoutingRule { expert_scale: Some("gate.per_expert_scale".to_owned()), ..rule };
    let mut rng = Rng::new(3);
    for round in 0..200 {
        let mut any = || loop {
            let x = f32::from_bits(rng.next_u64() as u32);
            if x.is_finite() {
                break x;
            }
        };
        let bias: Vec<f32> = match round {
            0 => vec![-0.0, f32::MIN_POSITIVE / 2.0, f32::MAX, f32::from_bits(1)],
            _ => (0..4).map(|_| any()).collect(),
        };
        let scale: Vec<f32> = (0..4).map(|_| any()).collect();
        let routing = FamilyRouting::new(rule.clone(), 4, Some(bias.clone()), Some(scale.clone()));
        let moe = MoeDescription {
            format: &CPU_INT4,
            hidden_size: 64,
            intermediate_size: 96,
            num_experts: 4,
            expert_map: Some(vec![0, -1, 2, 1]),
            group_size: GroupSize::Of(32),
            nr: 4,
            tables: CpuTables::NONE,
            routing: StoredRouting::Family(Box::new(routing.unwrap())),
        };
        model.metadata.insert(key(EXPERTS), moe.to_json().to_string());
        let bytes = model.bytes();
        let file = Container::parse(&bytes).unwrap();
        let Description::Moe(found) = Description::read(&file, EXPERTS).unwrap() else {
            panic!("a linear layer")
        };
        assert_eq!(found, moe);
        let StoredRouting::Family(found) = &found.routing else { panic!("no family") };
        let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        let tensors = found.tensors();
        assert_eq!(bits(tensors.correction_bias.unwrap()), bits(&bias));
        assert_eq!(bits(tensors.expert_scale.unwrap()), bits(&scale));
    }
}

#[test]
fn a_familys_description_loads_and_wrong_ones_are_refused() {
    let load = |described: &Value| {
        let mut model = Model::new();
        model.metadata.insert(key(EXPERTS), described.to_string());
        let bytes = model.bytes();
        let file = Container::parse(&bytes).unwrap();
        MoeLayer::load(&file, EXPERTS, ROUNDING, Mode::Extended).map(|layer| {
            assert!(matches!(layer.config().router, LayerRouter::Family(_)));
        })
    };
    load(&family_json()).unwrap();
    let changed = |change: fn(&mut Value)| {
        let mut described = family_json();
        change(&mut described);
        let error = load(&described).unwrap_err().to_string();
        assert!(error.len() < 1000, "{error}");
        error
    };
    type Change = fn(&mut Value);
    let refusals: [(Change, &str); 14] = [
        (|d| d["correction_bias"] = json!([0.5, 1.0]), "correction_bias"),
        (|d| d["correction_bias"] = json!([0.5, 1e300, 0.0]), "correction_bias"),
        (|d| d["correction_bias"] = json!([0.5, null, 0.0]), "correction_bias"),
        (|d| d["correction_bias"] = Value::Null, "correction_bias"),
        (|d| d["expert_scale"] = json!([1.0, 1.0, 1.0]), "expert_scale"),
        (|d| d["routing"] = json!([]), "routing"),
        (|d| d["routing"]["top_k"] = json!(4), "top_k"),
        (|d| d["routing"]["topk"] = json!(1), "did you mean `top_k`"),
        (|d| d["routing"]["zero_experts"] = json!(1), "zero experts"),
        (|d| d["routing"]["n_group"] = json!(2), "n_group"),
        (|d| d["routing"]["activation"] = json!("relu2_no_mul"), "relu2_no_mul"),
        (|d| d["routing"]["swiglu_limit"] = json!(-1.0), "limit"),
        (|d| d["top_k"] = json!(2), "top_k"),
        (|d| d["version"] = json!(1), "correction_bias"),
    ];
    for (change, part) in refusals {
        let error = changed(change);
        assert!(error.contains(part), "{part}: {error}");
    }
    // Version 1 has its own keys.
    let error = with("version", json!(2)).to_string();
    assert!(error.contains("top_k"), "{error}");
}
