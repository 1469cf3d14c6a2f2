//! compressed-tensors configs: arguments, targets, ignore lists, schemes.

use marlinspike::config::{
    ActOrder, ActivationScheme, CompressedTensorsConfig, ConfigError, CtStrategy, FloatContainer,
    Fp8Scheme, FusedMapping, Module, ModuleKind, ScaleStrategy, Scheme, Wna16Scheme, ZeroPoints,
};
use marlinspike::formats::{compressed_tensors, nvfp4};
use marlinspike::formats::{mxfp4, mxfp8};
use marlinspike::num::dims::GroupSize;
use marlinspike::num::scalar::ScalarType;
use serde_json::{Value, json};

const CT: FloatContainer = FloatContainer::CompressedTensors;

fn config(
    format: &str,
    weights: Value,
    inputs: Value,
) -> Result<CompressedTensorsConfig, ConfigError> {
    CompressedTensorsConfig::from_value(&json!({
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": {
            "targets": ["Linear"], "weights": weights, "input_activations": inputs}},
        "ignore": ["lm_head"],
    }))
}

fn scheme(format: &str, weights: Value, inputs: Value) -> Result<Scheme, ConfigError> {
    config(format, weights, inputs)?.scheme_for(&Module::in_checkpoint("model.layers.0.mlp.up"))
}

fn group(extra: Value) -> Value {
    let mut w = json!({"num_bits": 4, "type": "int", "symmetric": true, "strategy": "group",
        "group_size": 128, "dynamic": false, "observer": "minmax", "observer_kwargs": {}});
    for (k, v) in extra.as_object().unwrap() {
        w[k] = v.clone();
    }
    w
}

fn token(ty: &str) -> Value {
    json!({"num_bits": 8, "type": ty, "symmetric": true, "strategy": "token", "dynamic": true})
}

/// Targets, ignore list, module, its kind, whether layers are fused, upstream's answer.
type Case<'a> = (&'a [&'a str], &'a [&'a str], &'a str, ModuleKind, bool, &'a str);

#[test]
fn targets_as_upstream() {
    // (targets, ignore, name, kind, fused, answer): `should_ignore_layer`, then
    // `find_matched_target`, run on the same data. "X" there is a class that no target names.
    use ModuleKind::{Linear, LmHead};
    let x = LmHead;
    #[rustfmt::skip]
    let cases: &[Case<'_>] = &[
        (&["Linear"], &[], "m.q_proj", Linear, false, "Linear"),
        (&["Linear"], &["lm_head"], "lm_head", LmHead, false, "ignored"),
        (&["Linear"], &[], "lm_head", LmHead, false, "None"),
        (&["re:.*head"], &[], "lm_head", LmHead, false, "re:.*head"),
        (&["re:.*q_proj", "Linear"], &[], "m.q_proj", Linear, false, "re:.*q_proj"),
        (&["Linear", "re:.*q_proj"], &[], "m.q_proj", Linear, false, "re:.*q_proj"),
        (&["m.q_proj", "Linear"], &[], "m.q_proj.x", Linear, false, "Linear"),
        (&["lin"], &[], "m.q_proj", Linear, false, "lin"),
        (&["linear"], &[], "m.q", Linear, false, "linear"),
        (&["re:Lin"], &[], "m.q", Linear, false, "re:Lin"),
        (&["re:inear"], &[], "m.q", Linear, false, "None"),
        (&["m.q_proj", "m.k_proj", "m.v_proj"], &[], "m.qkv_proj", x, true, "m.q_proj"),
        (&["m.q_proj", "m.k_proj"], &[], "m.qkv_proj", x, true, "None"),
        (&["re:.*[qkv]_proj"], &[], "m.qkv_proj", x, true, "re:.*[qkv]_proj"),
        (&["re:.*(q|k)_proj", "m.v_proj"], &[], "m.qkv_proj", x, true, "re:.*(q|k)_proj"),
        (&["Linear"], &["m.q_proj", "m.k_proj", "m.v_proj"], "m.qkv_proj", Linear, true, "ignored"),
        (&["Linear"], &["m.q_proj"], "m.qkv_proj", Linear, true, "ERR"),
        (&["Linear"], &["m.qkv_proj"], "m.qkv_proj", Linear, true, "ignored"),
        (&["Linear"], &["re:.*gate$"], "m.gate", Linear, false, "ignored"),
        (&["Linear"], &["re:.*gate$"], "m.gate_proj", Linear, false, "Linear"),
        (&["Linear"], &["re:gate"], "m.gate", Linear, false, "Linear"),
        (&["Linear"], &["gate"], "m.gate", Linear, false, "Linear"),
    ];
    for (targets, ignore, name, kind, fused, answer) in cases {
        // One group per target; the group size identifies the matching group.
        let groups: serde_json::Map<_, _> = targets
            .iter()
            .enumerate()
            .map(|(i, t)| {
                let weights = group(json!({"group_size": 32 + i}));
                (format!("g{i}"), json!({"targets": [t], "weights": weights}))
            })
            .collect();
        let config = CompressedTensorsConfig::from_value(&json!({
            "format": "pack-quantized", "config_groups": groups, "ignore": ignore,
        }))
        .unwrap();
        let mapping = if *fused { FusedMapping::decoder() } else { FusedMapping::none() };
        let module = Module { name, kind: *kind, fused: &mapping };
        let found = match config.group_for(&module) {
            Err(ConfigError::MixedShards { .. }) => "ERR".to_owned(),
            Err(e) => panic!("{e}"),
            Ok(None) if config.is_ignored(&module).unwrap() => "ignored".to_owned(),
            Ok(None) => "None".to_owned(),
            Ok(Some(g)) => targets[g.weights.group_size.unwrap() as usize - 32].to_owned(),
        };
        assert_eq!(found, *answer, "{targets:?} {ignore:?} {name}");
    }
}

#[test]
fn integer_schemes() {
    let wna16 = |format, bits: u32, symmetric: bool, group_size| {
        Scheme::Wna16(Wna16Scheme {
            checkpoint_format: format,
            weight_type: match (bits, symmetric) {
                (4, true) => ScalarType::UINT4B8,
                (4, false) => ScalarType::UINT4,
                (_, true) => ScalarType::UINT8B128,
                (_, false) => ScalarType::UINT8,
            },
            group_size,
            desc_act: false,
            actorder: None,
            zeros: if symmetric { ZeroPoints::Symmetric } else { ZeroPoints::Stored },
        })
    };
    let pack = &compressed_tensors::PACKED;
    let of128 = GroupSize::Of(128);
    assert_eq!(
        scheme("pack-quantized", group(json!({})), json!(null)),
        Ok(wna16(pack, 4, true, of128))
    );
    assert_eq!(
        scheme("pack-quantized", group(json!({"symmetric": false})), json!(null)),
        Ok(wna16(pack, 4, false, of128))
    );
    let channel = json!({"num_bits": 8, "strategy": "channel"});
    assert_eq!(
        scheme("pack-quantized", channel, json!(null)),
        Ok(wna16(pack, 8, true, GroupSize::Channel))
    );
    assert_eq!(
        scheme("int-quantized", group(json!({})), token("int")),
        Ok(Scheme::W4A8Int8 { group_size: of128, checkpoint_format: &compressed_tensors::BYTES })
    );
    assert_eq!(
        scheme("pack-quantized", group(json!({})), token("float")),
        Ok(Scheme::W4A8Fp8 { group_size: of128 })
    );
    assert_eq!(
        scheme("int-quantized", json!({"strategy": "channel"}), token("int")),
        Ok(Scheme::W8A8Int8 {
            strategy: ScaleStrategy::Channel,
            activations: ActivationScheme::DynamicToken,
            input_symmetric: true,
        })
    );
    let three = scheme("pack-quantized", group(json!({"num_bits": 3})), json!(null));
    assert!(matches!(three, Err(ConfigError::UnsupportedType { bits: 3, .. })), "{three:?}");
    let dense = scheme("dense", group(json!({})), json!(null));
    assert!(matches!(dense, Err(ConfigError::NoScheme { .. })), "{dense:?}");
    let silent = scheme("int-quantized", group(json!({})), json!(null));
    assert!(matches!(silent, Err(ConfigError::Refused { .. })), "{silent:?}");
}

#[test]
fn float_schemes() {
    let fp8 = |strategy, activations| {
        Ok(Scheme::Fp8(Fp8Scheme { container: CT, strategy, activations, scale_inv: false }))
    };
    let w = |extra: Value| {
        let mut w = json!({"num_bits": 8, "type": "float"});
        for (k, v) in extra.as_object().unwrap() {
            w[k] = v.clone();
        }
        w
    };
    let f = "float-quantized";
    assert_eq!(
        scheme(f, w(json!({"strategy": "channel"})), token("float")),
        fp8(ScaleStrategy::Channel, ActivationScheme::DynamicToken)
    );
    let fixed = json!({"num_bits": 8, "type": "float", "strategy": "tensor"});
    assert_eq!(
        scheme(f, w(json!({})), fixed),
        fp8(ScaleStrategy::Tensor, ActivationScheme::StaticTensor)
    );
    let block = w(json!({"strategy": "block", "block_structure": [128, 64]}));
    let dynamic = json!({"num_bits": 8, "type": "float", "strategy": "group", "group_size": 64,
        "dynamic": true});
    let strategy = ScaleStrategy::Block { block_n: 128, block_k: 64 };
    assert_eq!(scheme(f, block, dynamic), fp8(strategy, ActivationScheme::DynamicGroup(64)));
    let old = w(json!({"strategy": "block", "block_structure": "128x64"}));
    assert_eq!(scheme(f, old, json!(null)), fp8(strategy, ActivationScheme::None));

    let nv = json!({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16});
    let mut local = nv.clone();
    local["dynamic"] = json!("local");
    let nvf = "nvfp4-pack-quantized";
    assert_eq!(
        scheme(nvf, nv.clone(), json!(null)),
        Ok(Scheme::Block { format: &nvfp4::FORMAT, container: CT, weight_only: true })
    );
    assert_eq!(
        scheme(nvf, nv.clone(), local),
        Ok(Scheme::Block { format: &nvfp4::FORMAT, container: CT, weight_only: false })
    );
    let mixed = scheme(nvf, nv, token("float"));
    assert!(matches!(mixed, Err(ConfigError::Refused { .. })), "{mixed:?}");
    let mx = |bits| {
        json!({"num_bits": bits, "type": "float", "strategy": "group",
        "group_size": 32, "scale_dtype": "torch.uint8"})
    };
    let mxf = "mxfp4-pack-quantized";
    assert_eq!(
        scheme(mxf, mx(4), json!(null)),
        Ok(Scheme::Block { format: &mxfp4::FORMAT, container: CT, weight_only: true })
    );
    assert_eq!(
        scheme("mxfp8-quantized", mx(8), json!(null)),
        Ok(Scheme::Block { format: &mxfp8::FORMAT, container: CT, weight_only: true })
    );
}

#[test]
fn activation_ordering() {
    for (value, expected) in [
        (json!(null), None),
        (json!(false), None),
        (json!(true), Some(ActOrder::Group)),
        (json!("group"), Some(ActOrder::Group)),
        (json!("dynamic"), Some(ActOrder::Group)),
        (json!("weight"), Some(ActOrder::Weight)),
        (json!("static"), Some(ActOrder::Weight)),
        (json!("Static"), Some(ActOrder::Weight)),
    ] {
        let found = scheme("pack-quantized", group(json!({"actorder": value})), json!(null));
        let Ok(Scheme::Wna16(w)) = found else { panic!("{found:?}") };
        assert_eq!(w.actorder, expected);
        assert_eq!(w.desc_act, expected == Some(ActOrder::Group), "static is not act-order");
    }
    for bad in [json!("random"), json!(1), json!([])] {
        let found = scheme("pack-quantized", group(json!({"actorder": bad})), json!(null));
        assert!(
            matches!(&found, Err(ConfigError::BadValue { key, .. } | ConfigError::WrongType { key, .. })
                if key == "config_groups.group_0.weights.actorder"),
            "{found:?}"
        );
    }
}

#[test]
fn arguments_are_checked_as_the_package_checks_them() {
    // `QuantizationArgs.model_validate` raises for each of them.
    let refused = [
        json!({"strategy": "token"}),
        json!({"strategy": "group"}),
        json!({"strategy": "group", "group_size": -1}),
        json!({"strategy": "tensor_group"}),
        json!({"strategy": "channel", "group_size": 128}),
        json!({"strategy": "tensor", "group_size": 128}),
        json!({"strategy": "block"}),
        json!({"strategy": "channel", "block_structure": [1, 1]}),
        json!({"strategy": "channel", "dynamic": true}),
        json!({"strategy": "group", "group_size": 32, "dynamic": "local"}),
    ];
    for weights in refused {
        let found = config("pack-quantized", weights.clone(), json!(null));
        assert!(matches!(found, Err(ConfigError::Refused { .. })), "{weights}: {found:?}");
    }
    let key = |weights: Value| match config("pack-quantized", weights, json!(null)) {
        Err(
            ConfigError::BadValue { key, .. }
            | ConfigError::WrongType { key, .. }
            | ConfigError::UnknownKey { key, .. },
        ) => key.strip_prefix("config_groups.group_0.weights.").unwrap().to_owned(),
        other => panic!("{other:?}"),
    };
    assert_eq!(key(json!({"num_bits": 0})), "num_bits");
    assert_eq!(key(json!({"num_bits": -4})), "num_bits");
    assert_eq!(key(json!({"num_bits": 1e9})), "num_bits");
    assert_eq!(key(json!({"type": "complex"})), "type");
    assert_eq!(key(json!({"strategy": "row"})), "strategy");
    assert_eq!(key(json!({"group_size": -2})), "group_size");
    assert_eq!(key(json!({"group_size": 0})), "group_size");
    assert_eq!(key(json!({"group_size": u64::MAX})), "group_size");
    assert_eq!(key(json!({"strategy": "block", "block_structure": [128]})), "block_structure");
    assert_eq!(key(json!({"strategy": "block", "block_structure": [0, 1]})), "block_structure");
    assert_eq!(key(json!({"strategy": "block", "block_structure": "axb"})), "block_structure");
    assert_eq!(key(json!({"dynamic": "global"})), "dynamic");
    assert_eq!(key(json!({"bits": 4})), "bits");
    // The strategy follows from the group size when the file names none.
    for (size, strategy) in [
        (json!(null), CtStrategy::Tensor),
        (json!(-1), CtStrategy::Channel),
        (json!(64), CtStrategy::Group),
    ] {
        let c = config("pack-quantized", json!({"group_size": size}), json!(null)).unwrap();
        let found = c.group_for(&Module::in_checkpoint("m")).unwrap().unwrap();
        assert_eq!(found.weights.strategy, strategy);
    }
}

#[test]
fn groups_and_conflicts() {
    let two = |a: Value, b: Value| {
        CompressedTensorsConfig::from_value(&json!({
            "format": "pack-quantized",
            "config_groups": {
                "a": {"targets": ["Linear"], "weights": a},
                "b": {"targets": ["re:.*down", "Linear"], "weights": b},
            },
        }))
    };
    assert!(two(group(json!({})), group(json!({}))).is_ok());
    match two(group(json!({})), group(json!({"num_bits": 8}))) {
        Err(ConfigError::Conflict { subject, .. }) => assert_eq!(subject, "Linear"),
        other => panic!("{other:?}"),
    }
    // Attention-only groups are ignored, whatever they contain.
    let config = CompressedTensorsConfig::from_value(&json!({
        "format": "pack-quantized",
        "config_groups": {"kv": {"targets": ["LlamaAttention"]}},
    }))
    .unwrap();
    assert_eq!(config.group_for(&Module::in_checkpoint("m")).unwrap(), None);
    for (groups, missing) in [
        (json!({"a": {"weights": group(json!({}))}}), "config_groups.a.targets"),
        (json!({"a": {"targets": ["Linear"]}}), "config_groups.a.weights"),
    ] {
        let found = CompressedTensorsConfig::from_value(&json!({"config_groups": groups}));
        assert!(matches!(&found, Err(ConfigError::MissingKey { key }) if key == missing));
    }
    let found = CompressedTensorsConfig::from_value(&json!({"format": "zip"}));
    assert!(matches!(&found, Err(ConfigError::BadValue { key, .. }) if key == "format"));
    let found = CompressedTensorsConfig::from_value(&json!({"ignore": ["re:("]}));
    assert!(matches!(&found, Err(ConfigError::InvalidPattern { rule, .. }) if rule == "re:("));
    let sparse = json!({"sparsity_config": {"format": "sparse-24-bitmask"}});
    let found = CompressedTensorsConfig::from_value(&sparse);
    assert!(matches!(found, Err(ConfigError::Refused { .. })));
    let many = vec!["x"; 100_000];
    let found = CompressedTensorsConfig::from_value(&json!({"ignore": many}));
    assert!(matches!(&found, Err(ConfigError::BadValue { key, .. }) if key == "ignore"));
}

/// vLLM reads an absent `config_groups` as no groups, so nothing is quantized: configs that only
/// describe the cache or sparsity are of this kind.
#[test]
fn without_groups_nothing_is_quantized() {
    for config in [
        json!({"quant_method": "compressed-tensors", "format": "pack-quantized"}),
        json!({"format": "float-quantized", "config_groups": {},
            "kv_cache_scheme": {"num_bits": 8, "type": "float"}}),
        json!({"format": "dense", "ignore": ["lm_head"], "sparsity_config": {"format": "dense"}}),
    ] {
        let parsed = CompressedTensorsConfig::from_value(&config).unwrap();
        for name in ["model.layers.0.mlp.down_proj", "model.layers.0.mlp.experts", "lm_head"] {
            let module = Module::in_checkpoint(name);
            assert_eq!(parsed.group_for(&module).unwrap(), None, "{config} {name}");
            assert!(!parsed.scheme_for(&module).unwrap().is_quantized(), "{config} {name}");
        }
    }
}

#[test]
fn own_format_of_a_group() {
    let config = CompressedTensorsConfig::from_value(&json!({
        "format": "mixed-precision",
        "config_groups": {
            "a": {"targets": ["re:.*up"], "format": "pack-quantized", "weights": group(json!({}))},
            "b": {"targets": ["re:.*down"], "format": "float-quantized",
                "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
                "input_activations": token("float")},
        },
    }))
    .unwrap();
    let label = |name| config.scheme_for(&Module::in_checkpoint(name)).unwrap().label();
    assert_eq!(label("m.up"), "compressed-tensors pack-quantized uint4b8");
    assert_eq!(label("m.down"), "fp8 channel");
    assert_eq!(label("m.gate"), "unquantized");
}

#[test]
fn experts_of_a_layer() {
    let base = |targets: Value, ignore: Value| {
        CompressedTensorsConfig::from_value(&json!({
            "format": "pack-quantized",
            "config_groups": {"g": {"targets": targets, "weights": group(json!({}))}},
            "ignore": ignore,
        }))
        .unwrap()
    };
    let moe = Module::in_checkpoint("model.layers.0.mlp.experts");
    assert_eq!(moe.kind, ModuleKind::FusedMoe);
    let linear = base(json!(["Linear"]), json!(["re:.*mlp.gate$"]));
    assert!(linear.scheme_for(&moe).unwrap().is_quantized());
    assert!(base(json!(["re:.*proj"]), json!([])).scheme_for(&moe).unwrap().is_quantized());
    let partly = base(json!(["Linear"]), json!(["model.layers.0.mlp.experts.0.down_proj"]));
    assert!(matches!(partly.scheme_for(&moe), Err(ConfigError::Conflict { .. })));
    let ignored = base(json!(["Linear"]), json!(["re:.*experts"]));
    assert!(!ignored.scheme_for(&moe).unwrap().is_quantized());
    let asymmetric = config("pack-quantized", group(json!({"symmetric": false})), json!(null));
    let found = asymmetric.unwrap().scheme_for(&moe);
    assert!(matches!(found, Err(ConfigError::Refused { .. })), "{found:?}");
}
