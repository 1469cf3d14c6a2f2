//! AWQ, FP8, ModelOpt and MXFP4 configs, and hostile values in all of them.

use crate::configs::{H100, gptq, parse, scheme, unquantized, wna16};
use marlinspike::config::{
    ActivationScheme, ConfigError, FloatContainer, FusedMapping, Module, ModuleKind, QuantConfig,
    ScaleStrategy, Scheme, ZeroPoints,
};
use marlinspike::formats::{awq, nvfp4};
use marlinspike::formats::{mxfp4, mxfp8};
use marlinspike::num::dims::GroupSize;
use marlinspike::num::scalar::ScalarType;
use marlinspike::select::is_gptq_marlin_compatible;
use proptest::prelude::*;
use serde_json::{Value, json};

#[test]
fn awq() {
    let config = parse(json!({
        "quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": true, "version": "GEMM",
        "modules_to_not_convert": ["visual", "mlp.gate"],
    }))
    .unwrap();
    let w = wna16(&config, "model.layers.0.mlp.experts.0.up_proj");
    assert_eq!(w.checkpoint_format, &awq::FORMAT);
    assert_eq!((w.weight_type, w.zeros), (ScalarType::UINT4, ZeroPoints::Stored));
    assert!(unquantized(&config, "visual.blocks.0.fc1"));
    assert!(unquantized(&config, "model.layers.0.mlp.gate"));
    assert!(unquantized(&config, "model.layers.0.mlp.gate_proj"), "parts of names match");
    assert!(unquantized(&config, "lm_head"));
    // AutoAWQ's own file.
    let file = json!({"zero_point": true, "q_group_size": 64, "w_bit": 4, "version": "GEMM"});
    assert_eq!(wna16(&parse(file).unwrap(), "x").group_size, GroupSize::Of(64));
    let with = |k: &str, v: Value| {
        let mut c =
            json!({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": true});
        c[k] = v;
        parse(c)
    };
    assert!(matches!(with("bits", json!(8)), Err(ConfigError::UnsupportedType { bits: 8, .. })));
    assert!(matches!(with("zero_point", json!(false)), Err(ConfigError::Refused { .. })));
    assert!(matches!(with("version", json!("gemv")), Err(ConfigError::BadValue { .. })));
    assert!(matches!(with("zero_point", json!(null)), Err(ConfigError::MissingKey { .. })));
}

#[test]
fn fp8() {
    let config = parse(json!({
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 64],
        "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.experts.0.gate_proj", "m.gate"],
    }))
    .unwrap();
    let Scheme::Fp8(f) = scheme(&config, "model.layers.1.mlp.up_proj") else { panic!() };
    assert_eq!(f.strategy, ScaleStrategy::Block { block_n: 128, block_k: 64 });
    assert_eq!(f.activations, ActivationScheme::DynamicGroup(64));
    assert!(f.scale_inv);
    for (format, expected) in [
        (json!("ue8m0"), Some(ActivationScheme::DynamicGroupUe8m0(64))),
        (json!("float"), Some(ActivationScheme::DynamicGroup(64))),
        (json!("e4m3"), None),
        (json!(8), None),
    ] {
        let parsed = parse(json!({
            "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 64],
            "scale_fmt": format,
        }));
        match (parsed, expected) {
            (Ok(config), Some(expected)) => {
                let Scheme::Fp8(f) = scheme(&config, "m.up_proj") else { panic!() };
                assert_eq!(f.activations, expected, "{format}");
            }
            (Err(error), None) => assert!(error.to_string().contains("scale_fmt"), "{error}"),
            (parsed, _) => panic!("{format}: {parsed:?}"),
        }
    }
    assert!(unquantized(&config, "m.gate") && !unquantized(&config, "m.gate_proj"));
    // One ignored projection excludes all experts of its layer.
    assert!(unquantized(&config, "model.layers.0.mlp.experts"));
    assert!(unquantized(&config, "model.layers.0.mlp.experts.7.up_proj"));
    assert!(!unquantized(&config, "model.layers.1.mlp.experts.7.up_proj"));

    let fp8 = |extra: Value| {
        let mut c = json!({"quant_method": "fp8", "activation_scheme": "static"});
        for (k, v) in extra.as_object().unwrap() {
            c[k] = v.clone();
        }
        parse(c)
    };
    let Scheme::Fp8(f) = scheme(&fp8(json!({})).unwrap(), "x") else { panic!() };
    assert_eq!(f.activations, ActivationScheme::StaticTensor);
    let block = json!({"weight_block_size": [128, 128]});
    assert!(matches!(fp8(block), Err(ConfigError::Refused { .. })));
    for block in [json!([128]), json!([1, 2, 3]), json!([0, 1]), json!([-1, 1]), json!(128)] {
        let found = fp8(json!({"weight_block_size": block, "activation_scheme": "dynamic"}));
        assert!(matches!(found, Err(ConfigError::BadValue { .. })), "{found:?}");
    }
    let found = fp8(json!({"activation_scheme": "fast"}));
    assert!(matches!(found, Err(ConfigError::BadValue { key, .. }) if key == "activation_scheme"));
}

#[test]
fn modelopt_and_mxfp4() {
    let container = FloatContainer::ModelOpt;
    let config = parse(json!({
        "quant_method": "modelopt", "quant_algo": "nvfp4", "group_size": 16,
        "ignore": ["lm_head", "model.layers.0.*", "*.router"],
    }))
    .unwrap();
    assert_eq!(
        scheme(&config, "a.b"),
        Scheme::Block { format: &nvfp4::FORMAT, container, weight_only: false }
    );
    assert!(unquantized(&config, "model.layers.0.mlp.up_proj"));
    assert!(!unquantized(&config, "model.layers.1.mlp.up_proj"));
    assert!(unquantized(&config, "model.layers.1.router"));
    let legacy = json!({"quantization": {"quant_algo": "MXFP8", "exclude_modules": ["mlp.gate"]}});
    let config = parse(legacy).unwrap();
    assert_eq!(
        scheme(&config, "a"),
        Scheme::Block { format: &mxfp8::FORMAT, container, weight_only: true }
    );
    assert!(unquantized(&config, "model.mlp.gate_proj"), "parts of names match");
    let found = parse(json!({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}));
    assert!(matches!(found, Err(ConfigError::BadValue { key, .. }) if key == "quant_algo"));
    let found = parse(json!({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}));
    assert!(matches!(found, Err(ConfigError::BadValue { key, .. }) if key == "group_size"));

    let config = parse(json!({"quant_method": "mxfp4", "modules_to_not_convert": ["x"]})).unwrap();
    let container = FloatContainer::StackedBlocks;
    assert_eq!(
        scheme(&config, "model.layers.0.mlp.experts"),
        Scheme::Block { format: &mxfp4::FORMAT, container, weight_only: true }
    );
    assert!(unquantized(&config, "model.layers.0.self_attn.q_proj"));
}

#[test]
fn where_configs_live() {
    let q = gptq(json!({}));
    let at = |v: Value| QuantConfig::from_model_config(&v).unwrap().map(|c| c.method());
    assert_eq!(at(json!({"quantization_config": q})), Some("gptq"));
    assert_eq!(
        at(json!({"compression_config": {"config_groups": {}}})),
        Some("compressed-tensors")
    );
    assert_eq!(at(json!({"text_config": {"quantization_config": q}})), Some("gptq"));
    assert_eq!(at(json!({"model_type": "llama"})), None);
    assert_eq!(at(json!({"quantization_config": null})), None);
    let mut file = q.clone();
    file.as_object_mut().unwrap().remove("quant_method");
    assert_eq!(parse(file).unwrap().method(), "gptq");
    assert!(
        matches!(parse(json!({})), Err(ConfigError::MissingKey { key }) if key == "quant_method")
    );
    assert!(matches!(
        parse(json!({"quant_method": "bitsandbytes"})),
        Err(ConfigError::UnknownMethod { method, .. }) if method == "bitsandbytes"
    ));
    let found = QuantConfig::from_model_config(&json!([]));
    assert!(matches!(found, Err(ConfigError::WrongType { .. })));
}

#[test]
fn configs_of_parts_are_searched() {
    let q = gptq(json!({}));
    let at = |v: Value| QuantConfig::from_model_config(&v).map(|c| c.map(|c| c.method()));
    let own = json!({"quantization_config": q});
    for part in ["llm_config", "language_config", "thinker_config", "talker_config"] {
        assert_eq!(at(json!({part: own})), Ok(Some("gptq")), "{part}");
        assert_eq!(at(json!({"vision_config": {}, part: {"text_config": own}})), Ok(Some("gptq")));
    }
    // The outer config is the one of the model.
    let fp8 = json!({"quant_method": "fp8", "activation_scheme": "dynamic"});
    let both = json!({"llm_config": own, "quantization_config": fp8});
    assert_eq!(at(both), Ok(Some("fp8")));
    assert_eq!(at(json!({"thinker_config": own, "talker_config": own})), Ok(Some("gptq")));
    let other = json!({"quantization_config": fp8});
    let found = at(json!({"thinker_config": own, "talker_config": other}));
    let Err(ConfigError::Conflict { reason, .. }) = found else { panic!("{found:?}") };
    assert!(reason.contains("thinker_config.quantization_config"), "{reason}");
    assert!(reason.contains("talker_config.quantization_config"), "{reason}");
    // Keys of other names are no parts.
    assert_eq!(at(json!({"llm": own})), Ok(None));
}

#[test]
fn modelopt_groups_without_activations_are_weight_only() {
    let of = |groups: Value| {
        let config = json!({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": [],
            "config_groups": groups});
        let found = scheme(&parse(config).unwrap(), "a.b");
        let Scheme::Block { weight_only, .. } = found else { panic!("{found:?}") };
        weight_only
    };
    let four = json!({"num_bits": 4, "type": "float", "group_size": 16});
    assert!(of(json!({"g": {"weights": four, "input_activations": null}})));
    assert!(!of(json!({"g": {"weights": four, "input_activations": four}})));
    // Without the key nothing is stated.
    assert!(!of(json!({"g": {"weights": four}})));
    assert!(!of(json!({})));
    let both = json!({"g": {"input_activations": null}, "h": {"input_activations": four}});
    assert!(!of(both));
    let null = parse(json!({"quant_method": "modelopt", "quant_algo": null}));
    let Err(ConfigError::WrongType { key, found, .. }) = null else { panic!("{null:?}") };
    assert_eq!((key.as_str(), found.as_str()), ("quant_algo", "null"));
}

#[test]
fn hostile_values_are_named() {
    let wrong = |extra: Value| match parse(gptq(extra)) {
        Err(ConfigError::WrongType { key, .. } | ConfigError::BadValue { key, .. }) => key,
        other => panic!("{other:?}"),
    };
    assert_eq!(wrong(json!({"bits": "4"})), "bits");
    assert_eq!(wrong(json!({"bits": 4.5})), "bits");
    assert_eq!(wrong(json!({"bits": u64::MAX})), "bits");
    assert_eq!(wrong(json!({"bits": 1e300})), "bits");
    assert_eq!(wrong(json!({"group_size": 0})), "group_size");
    assert_eq!(wrong(json!({"group_size": -2})), "group_size");
    assert_eq!(wrong(json!({"group_size": i64::MAX})), "group_size");
    assert_eq!(wrong(json!({"desc_act": 1})), "desc_act");
    assert_eq!(wrong(json!({"sym": "true"})), "sym");
    assert_eq!(wrong(json!({"lm_head": []})), "lm_head");
    assert_eq!(wrong(json!({"dynamic": []})), "dynamic");
    assert_eq!(wrong(json!({"dynamic": {"+:a": 4}})), "dynamic.+:a");
    assert_eq!(wrong(json!({"dynamic": {"a": {"bits": "x"}}})), "dynamic.a.bits");
    assert_eq!(wrong(json!({"dynamic": {"a": {"group_size": -7}}})), "dynamic.a.group_size");
    assert_eq!(wrong(json!({"checkpoint_format": "marlin"})), "checkpoint_format");
    for key in ["bits", "group_size", "desc_act", "sym"] {
        let found = parse(gptq(json!({key: null})));
        assert!(matches!(found, Err(ConfigError::MissingKey { key: k }) if k == key));
    }
    let found = parse(gptq(json!({"dynamic": {"-:(": {}}})));
    assert!(matches!(found, Err(ConfigError::InvalidPattern { rule, .. }) if rule == "-:("));
    let many: serde_json::Map<_, _> = (0..20_000).map(|i| (format!("r{i}"), json!({}))).collect();
    assert_eq!(wrong(json!({"dynamic": many})), "dynamic");
    assert_eq!(parse(gptq(json!({"dynamic": null}))).unwrap().method(), "gptq");
}

#[test]
fn deep_nesting_is_an_error() {
    let text =
        format!("{{\"quant_method\":\"gptq\",\"bits\":{}1{}}}", "[".repeat(5000), "]".repeat(5000));
    assert!(serde_json::from_str::<Value>(&text).is_err());
    let text =
        format!("{{\"quant_method\":\"gptq\",\"bits\":{}1{}}}", "[".repeat(90), "]".repeat(90));
    let found = parse(serde_json::from_str(&text).unwrap());
    assert!(matches!(found, Err(ConfigError::WrongType { key, .. }) if key == "bits"));
}

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        (-1i64..9).prop_map(Value::from),
        prop::sample::select(vec![
            "gptq",
            "awq",
            "fp8",
            "compressed-tensors",
            "modelopt",
            "mxfp4",
            "static",
            "group",
            "re:(",
            "+:.*",
            "dynamic",
            "float",
            "int",
            "NVFP4",
            "pack-quantized",
            "Linear",
        ])
        .prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 48, 6, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec(
                (
                    prop::sample::select(vec![
                        "quant_method",
                        "bits",
                        "group_size",
                        "desc_act",
                        "sym",
                        "dynamic",
                        "config_groups",
                        "weights",
                        "targets",
                        "input_activations",
                        "num_bits",
                        "strategy",
                        "type",
                        "actorder",
                        "block_structure",
                        "ignore",
                        "format",
                        "activation_scheme",
                        "weight_block_size",
                        "quant_algo",
                        "zero_point",
                        "quantization_config",
                        "text_config",
                        "+:a",
                        "-:b(",
                    ]),
                    inner
                ),
                0..6
            )
            .prop_map(|entries| {
                Value::Object(entries.into_iter().map(|(k, v)| (k.to_owned(), v)).collect())
            }),
        ]
    })
}

proptest! {
    /// No JSON value makes parsing or a query panic.
    #[test]
    fn no_config_panics(config in any_json(), method in 0usize..6, module in "[a-z.]{0,20}") {
        let mut config = config;
        let methods = ["gptq", "awq", "fp8", "compressed-tensors", "modelopt", "mxfp4"];
        if let Value::Object(o) = &mut config {
            o.insert("quant_method".to_owned(), methods[method].into());
        }
        let _ = QuantConfig::from_model_config(&config);
        let _ = is_gptq_marlin_compatible(&config, &H100);
        if let Ok(parsed) = QuantConfig::from_value(&config) {
            let _ = parsed.scheme_for(&module);
            let fused = FusedMapping::decoder();
            for kind in [ModuleKind::Linear, ModuleKind::FusedMoe, ModuleKind::LmHead] {
                let name = format!("{module}.qkv_proj");
                let _ = parsed.scheme_of(&Module { name: &name, kind, fused: &fused });
            }
        }
    }
}
