//! Every statement of a case is read or rejected: config keys, tensors, and statements that must
//! agree.

use marlinspike::Error;
use marlinspike::case::{Case, CaseConfig, CaseError, Op};
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::vectors::Generator;
use serde_json::{Map, Value, json};

/// The config of the first case of `op` that `wanted` takes.
fn config(op: Op, wanted: impl Fn(&Map<String, Value>) -> bool) -> Map<String, Value> {
    let generator = Generator::new(op, 3).expect("an operation");
    let mut all = generator.lattice().iter().map(CaseConfig::to_json);
    all.find(|map| wanted(map)).expect("a config")
}

fn refusal(op: Op, map: &Map<String, Value>) -> String {
    CaseConfig::from_json(op, map).expect_err("a refusal").to_string()
}

#[test]
fn a_misspelt_key_names_the_nearest_one() {
    for (op, right, wrong) in [
        (Op::Linear, "group_size", "groupsize"),
        (Op::Linear, "has_bias", "has_bais"),
        (Op::Moe, "scoring_func", "scoring_fn"),
        (Op::Router, "renormalize", "renormalise"),
        (Op::Align, "block_size", "blocksize"),
        (Op::Preprocess, "size_n", "sizeN"),
        (Op::DynQuant, "activation_rounding", "activation_roundings"),
        (Op::ScaledFp4Quant, "is_sf_swizzled_layout", "is_sf_swizzle_layout"),
        (Op::ScaledMm, "per_act_token_quant", "per_act_token_quants"),
        (Op::Fp8Moe, "num_local_experts", "num_local_expert"),
    ] {
        let mut map = config(op, |_| true);
        let value = map.remove(right).unwrap_or_else(|| panic!("{op}: {right}"));
        map.insert(wrong.to_owned(), value);
        let expected = format!("unknown config key `{wrong}`; did you mean `{right}`?");
        assert_eq!(refusal(op, &map), expected);
    }
    // A key that would have declared something vanishes no more, even with the value null.
    let mut map = config(Op::Linear, |_| true);
    map.insert("shedule".to_owned(), Value::Null);
    let expected = "unknown config key `shedule`; did you mean `schedule`?";
    assert_eq!(refusal(Op::Linear, &map), expected);
    map.remove("shedule");
    map.insert("colour".to_owned(), json!("red"));
    let error = refusal(Op::Linear, &map);
    assert!(error.contains("`colour`; expected one of checkpoint_format, "), "{error}");
}

#[test]
fn a_key_of_another_operation_is_named_as_that() {
    let mut moe = config(Op::Moe, |_| true);
    moe.insert("routed_scaling_factor".to_owned(), json!(2.5));
    assert_eq!(
        refusal(Op::Moe, &moe),
        "unknown config key `routed_scaling_factor`; operation `moe` does not read it, `router` does"
    );
    moe.remove("routed_scaling_factor");
    moe.insert("use_grouped_topk".to_owned(), json!(false));
    assert!(refusal(Op::Moe, &moe).contains("`router` does"));
}

#[test]
fn nested_objects_and_meaningless_keys() {
    let mut map = config(Op::Linear, |m| m.contains_key("tensor_parallel"));
    map["tensor_parallel"]["rnk"] = json!(0);
    assert_eq!(
        refusal(Op::Linear, &map),
        "unknown config key `tensor_parallel.rnk`; did you mean `rank`?"
    );
    let mut map = config(Op::DynQuant, |_| true);
    map["packing"]["mr_"] = json!(4);
    assert_eq!(refusal(Op::DynQuant, &map), "unknown config key `packing.mr_`; did you mean `mr`?");
    let mut map = config(Op::ScaledFp4Mm, |_| true);
    map.insert("schedule".to_owned(), json!({"architecture": "blackwell", "arch": 1}));
    assert!(refusal(Op::ScaledFp4Mm, &map).starts_with("unknown config key `schedule.arch`"));
    let mut map = config(Op::Router, |m| m["use_grouped_topk"] == false);
    map.insert("num_expert_group".to_owned(), json!(2));
    let error = refusal(Op::Router, &map);
    assert!(error.contains("`num_expert_group`") && error.contains("use_grouped_topk"), "{error}");
    // Remarks are for people.
    map.remove("num_expert_group");
    for key in ["name", "note", "notes", "comment"] {
        map.insert(key.to_owned(), json!({"any": ["thing"]}));
    }
    CaseConfig::from_json(Op::Router, &map).expect("remarks");
}

#[test]
fn keys_that_contradict() {
    let contradicts = |op, map: &Map<String, Value>, key: &str| {
        let error = CaseConfig::from_json(op, map).expect_err(key);
        assert!(matches!(&error, CaseError::Contradiction { key: k, .. } if k == key), "{error}");
    };
    let row = |m: &Map<String, Value>| {
        m.get("tensor_parallel").is_some_and(|tp| tp["style"] == "row")
            && m["desc_act"] == true
            && m["group_size"] != -1
    };
    let mut map = config(Op::Linear, row);
    map.insert("is_k_full".to_owned(), json!(true));
    contradicts(Op::Linear, &map, "is_k_full");
    let mut map = config(Op::Linear, |m| m["checkpoint_format"] == "gptq");
    map.insert("scale_factor".to_owned(), json!(2.0));
    contradicts(Op::Linear, &map, "scale_factor");
    let nvfp4 = |dtype: &'static str| {
        config(Op::Linear, move |m| m["checkpoint_format"] == "nvfp4" && m["dtype"] == dtype)
    };
    let mut map = nvfp4("float16");
    map.insert("scale_factor".to_owned(), json!(2.0));
    contradicts(Op::Linear, &map, "scale_factor");
    let mut map = nvfp4("bfloat16");
    for (factor, right) in [(2.0, true), (3.0, false), (0.5, false), (-2.0, false)] {
        map.insert("scale_factor".to_owned(), json!(factor));
        assert_eq!(CaseConfig::from_json(Op::Linear, &map).is_ok(), right, "{factor}");
    }
    let mut map = config(Op::Linear, |m| m["input_dtype"].is_null());
    map.insert("quantizer".to_owned(), json!("quotient"));
    contradicts(Op::Linear, &map, "quantizer");
}

#[test]
fn bfloat16_rows_of_the_arm_path_are_rounded_to_even() {
    let is_bf16 = |map: &Map<String, Value>| map["dtype"] == json!("bfloat16");
    let mut map = config(Op::DynQuant, is_bf16);
    assert_eq!(map["activation_rounding"], json!("half_even"));
    map.insert("activation_rounding".to_owned(), json!("half_away"));
    let text = refusal(Op::DynQuant, &map);
    assert!(text.contains("activation_rounding") && text.contains("half_even"), "{text}");
    assert!(text.contains("half_away"), "{text}");
    // float32 rows have either.
    map.insert("dtype".to_owned(), json!("float32"));
    CaseConfig::from_json(Op::DynQuant, &map).expect("a config");
}

fn i32s(name: &str, shape: &[usize], values: Vec<i32>) -> Tensor<'static> {
    Tensor::from_vec(name, DType::I32, shape.to_vec(), values).expect("a tensor")
}

fn generated(op: Op, wanted: impl Fn(&Case<'_>) -> bool) -> Case<'static> {
    let generator = Generator::new(op, 5).expect("an operation");
    (0..).map(|i| generator.case(i).expect("a case")).find(wanted).expect("one")
}

#[test]
fn an_unknown_tensor_names_the_nearest_one() {
    let mut case = generated(Op::Linear, |c| c.inputs.contains_key("qweight"));
    let qweight = case.inputs["qweight"].clone();
    case.add_input("q_weight", qweight);
    let error = case.validate().expect_err("an unknown tensor").to_string();
    assert!(error.contains("`in.q_weight`"), "{error}");
    assert!(error.contains("(did you mean `in.qweight`?)"), "{error}");
}

#[test]
fn g_idx_without_act_order_is_the_rows_group() {
    let plain = |c: &Case<'_>| {
        let map = c.config.to_json();
        map["checkpoint_format"] == "gptq"
            && map["desc_act"] == false
            && map["group_size"] == 64
            && !map.contains_key("tensor_parallel")
    };
    let mut case = generated(Op::Linear, plain);
    let size_k = case.config.to_json()["size_k"].as_u64().expect("a size") as usize;
    let mut groups: Vec<i32> = (0..size_k as i32).map(|k| k / 64).collect();
    case.add_input("g_idx", i32s("g_idx", &[size_k], groups.clone()));
    case.validate().expect("the trivial g_idx");
    groups.swap(3, 70);
    case.add_input("g_idx", i32s("g_idx", &[size_k], groups));
    let error = case.validate().expect_err("an order");
    assert!(matches!(&error, Error::Value { index, .. } if index[..] == [3]), "{error}");
}

#[test]
fn the_map_of_experts_is_the_ranks() {
    let rank = |c: &Case<'_>| {
        let map = c.config.to_json();
        map["ep_size"] == 2 && map["ep_rank"] == 1
    };
    let mut case = generated(Op::Align, rank);
    case.outputs.clear();
    let experts = case.inputs["expert_map"].len();
    let half = experts / 2;
    let put = |case: &mut Case<'static>, here: &dyn Fn(usize) -> Option<usize>| {
        let values = (0..experts).map(|e| here(e).map_or(-1, |local| local as i32));
        let tensor = i32s("expert_map", &[experts], values.collect());
        case.add_input("expert_map", tensor);
        case.validate()
    };
    put(&mut case, &|e| (e >= half).then(|| e - half)).expect("linear placement");
    put(&mut case, &|e| (e % 2 == 1).then_some(e / 2)).expect("round-robin placement");
    let error = put(&mut case, &|e| (e + 1 < half).then_some(e)).expect_err("too few");
    let text = error.to_string();
    assert!(text.contains("`ep_size`") && text.contains("`in.expert_map`"), "{text}");
    put(&mut case, &|e| (e <= half).then_some(e)).expect_err("too many");
}

#[test]
fn half_of_the_quantized_activations() {
    for absent in ["a_q", "a_scales"] {
        let mut case = generated(Op::Linear, |c| c.inputs.contains_key("a_q"));
        case.outputs.clear();
        case.inputs.remove(absent);
        let error = case.validate().expect_err(absent);
        let name = format!("in.{absent}");
        assert!(matches!(&error, Error::Missing { tensor, .. } if *tensor == name), "{error}");
    }
    // Scales whose source is absent must be usable by themselves.
    let mut case = generated(Op::Linear, |c| c.inputs.contains_key("a_q"));
    case.inputs.remove("x");
    case.validate().expect("codes and scales alone");
    let rows = case.inputs["a_scales"].shape().to_vec();
    for wrong in [f32::NAN, f32::INFINITY, -1.0] {
        let scales = vec![wrong; rows[0]];
        let scales = Tensor::from_vec("a_scales", DType::F32, rows.clone(), scales);
        case.add_input("a_scales", scales.expect("a tensor"));
        let error = case.validate().expect_err("a scale");
        assert!(matches!(&error, Error::Value { tensor, .. } if tensor == "in.a_scales"));
    }
}
