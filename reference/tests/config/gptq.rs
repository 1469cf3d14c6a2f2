//! GPTQ configs: rules, lists, act-order, compatibility.

use crate::configs::{H100, gptq, parse, unquantized, wna16};
use marlinspike::config::{
    ConfigError, DynamicMatch, FusedMapping, GptqMarlinConfig, Module, ModuleKind, QuantConfig,
    Wna16Scheme, ZeroPoints,
};
use marlinspike::formats::{awq, gptq};
use marlinspike::num::dims::GroupSize;
use marlinspike::num::scalar::ScalarType;
use marlinspike::select::{
    Capability, Platform, UserQuant, is_gptq_marlin_compatible, is_marlin_compatible,
    override_quantization_method,
};
use proptest::prelude::*;
use serde_json::{Value, json};

#[test]
fn gptq_basics() {
    let config = parse(gptq(json!({}))).unwrap();
    assert_eq!(
        wna16(&config, "model.layers.0.mlp.up_proj"),
        Wna16Scheme {
            checkpoint_format: &gptq::FORMAT,
            weight_type: ScalarType::UINT4B8,
            group_size: GroupSize::Of(128),
            desc_act: true,
            actorder: None,
            zeros: ZeroPoints::Symmetric,
        }
    );
    assert!(unquantized(&config, "lm_head"));
    let config = parse(gptq(json!({
        "bits": 8, "group_size": -1, "lm_head": true, "checkpoint_format": "gptq_v2",
        "autoround_version": "0.5",
    })))
    .unwrap();
    let w = wna16(&config, "lm_head");
    assert_eq!(w.checkpoint_format, &gptq::FORMAT_V2);
    assert_eq!(w.weight_type, ScalarType::UINT8B128);
    assert!(!w.desc_act, "one group has no order");
    let QuantConfig::Gptq(c) = &config else { panic!() };
    assert_eq!(c.autoround_version, "0.5");
    assert!(c.declared_desc_act);
}

#[test]
fn first_matching_rule_wins_in_file_order() {
    // The documented example, with rules whose order matters.
    let text = r#"{
        "quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": false, "sym": true,
        "dynamic": {
            "+:.*\\.(?:1[0-5])\\..*": {"bits": 8},
            ".*\\.(?:1[4-9]|20|21)\\..*": {"bits": 8, "group_size": 64},
            "-:.*\\.moe\\..*": {},
            "-:.*(?<!shared)_expert\\.": {},
            "+:.*\\.17\\.": {"bits": 4}
        }
    }"#;
    let config = parse(serde_json::from_str(text).unwrap()).unwrap();
    let get = |layer: usize| {
        let w = wna16(&config, &format!("model.layers.{layer}.mlp.up_proj"));
        (w.bits(), w.group_size.to_config())
    };
    assert_eq!(get(9), (4, 128));
    assert_eq!(get(10), (8, 128));
    assert_eq!(get(14), (8, 128), "the earlier rule");
    assert_eq!(get(17), (8, 64), "the earlier rule");
    assert!(unquantized(&config, "model.layers.3.moe.gate"));
    assert_eq!(wna16(&config, "model.layers.13.moe.gate").bits(), 8, "the earlier rule");
    assert!(unquantized(&config, "model.layers.3.mlp.other_expert.up_proj"));
    assert_eq!(wna16(&config, "model.layers.3.mlp.shared_expert.up_proj").bits(), 4);
    let QuantConfig::Gptq(c) = &config else { panic!() };
    let rules: Vec<_> = c.dynamic.iter().map(|r| r.rule()).collect();
    assert_eq!(rules.len(), 5);
    assert!(rules[2].starts_with("-:") && c.dynamic[2].overrides().is_none());
}

#[test]
fn rules_and_act_order() {
    let config = parse(gptq(json!({
        "group_size": -1,
        "dynamic": {"+:grouped": {"group_size": 64}, "+:off": {"group_size": 64, "desc_act": false},
            "+:bits": {"bits": 8, "sym": true}},
    })))
    .unwrap();
    assert!(!wna16(&config, "plain").desc_act);
    assert!(wna16(&config, "grouped").desc_act, "several groups: the file's order counts again");
    assert!(!wna16(&config, "off").desc_act);
    let config =
        parse(gptq(json!({"dynamic": {"+:a": {"group_size": -1, "desc_act": true}}}))).unwrap();
    assert!(!wna16(&config, "a").desc_act);
    assert!(wna16(&config, "b").desc_act);
}

#[test]
fn a_rule_without_a_type_is_refused_for_its_modules() {
    let config = parse(gptq(json!({"dynamic": {"+:a": {"bits": 3}, "+:b": {"sym": false}}})));
    let config = config.unwrap();
    for (name, bits, sym) in [("a", 3, true), ("b", 4, false)] {
        match config.scheme_for(name) {
            Err(ConfigError::UnsupportedType { context, bits: b, symmetric, .. }) => {
                assert_eq!((context, b, symmetric), (format!("+:{name}"), bits, sym));
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(config.scheme_for("c").is_ok());
}

#[test]
fn type_map() {
    for (bits, sym, ok) in [
        (4, true, true),
        (8, true, true),
        (4, false, false),
        (8, false, false),
        (2, true, false),
        (3, true, false),
        (0, true, false),
        (-4, true, false),
        (i64::MAX, true, false),
    ] {
        let found = parse(gptq(json!({"bits": bits, "sym": sym})));
        match found {
            Ok(_) => assert!(ok, "{bits} {sym}"),
            Err(ConfigError::UnsupportedType { bits: b, symmetric, .. }) => {
                assert!(!ok);
                assert_eq!((b, symmetric), (bits, sym));
            }
            Err(e) => panic!("{bits} {sym}: {e}"),
        }
    }
}

#[test]
fn listed_modules_nested_or_flat() {
    for list in [
        json!(["self_attn.q_proj", "mlp.down_proj"]),
        json!([["self_attn.q_proj"], ["mlp.down_proj"]]),
        json!([["self_attn.q_proj", "mlp.down_proj"], []]),
    ] {
        let config = parse(gptq(json!({"modules_in_block_to_quantize": list}))).unwrap();
        assert!(!unquantized(&config, "model.layers.0.self_attn.q_proj"));
        assert!(!unquantized(&config, "model.layers.0.mlp.down_proj"));
        assert!(unquantized(&config, "model.layers.0.mlp.up_proj"));
        // The list does not apply to experts.
        assert!(!unquantized(&config, "model.layers.0.mlp.experts.3.up_proj"));
    }
    for list in [json!([["a"], "b"]), json!(["a", ["b"]]), json!([1]), json!([[1]]), json!("a")] {
        let found = parse(gptq(json!({"modules_in_block_to_quantize": list.clone()})));
        assert!(matches!(found, Err(ConfigError::WrongType { .. })), "{list}: {found:?}");
    }
    let QuantConfig::Gptq(c) = parse(gptq(json!({}))).unwrap() else { panic!() };
    let c = c.with_quantized_modules(["a.b".to_owned()]);
    assert!(c.params_for(&Module::in_checkpoint("a.c")).unwrap().is_err());
    assert!(c.params_for(&Module::in_checkpoint("a.b")).unwrap().is_ok());
}

#[test]
fn fused_layers_need_one_mind() {
    let fused = FusedMapping::decoder();
    let module = |name| Module { name, kind: ModuleKind::Linear, fused: &fused };
    let list = json!(["self_attn.q_proj", "self_attn.k_proj"]);
    let config = parse(gptq(json!({"modules_in_block_to_quantize": list}))).unwrap();
    match config.scheme_of(&module("model.layers.0.self_attn.qkv_proj")) {
        Err(ConfigError::MixedShards { module, what: "quantized", shards }) => {
            assert_eq!(module, "model.layers.0.self_attn.qkv_proj");
            assert!(shards.contains("self_attn.v_proj"));
        }
        other => panic!("{other:?}"),
    }
    let fp8 = parse(json!({
        "quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["m.gate_proj"],
    }))
    .unwrap();
    assert!(matches!(
        fp8.scheme_of(&module("m.gate_up_proj")),
        Err(ConfigError::MixedShards { what: "ignored", .. })
    ));
    assert!(unquantized(&fp8, "m.gate_proj") && !unquantized(&fp8, "m.up_proj"));
}

#[test]
fn gptq_compatibility_and_override() {
    let yes = |c: &Value, d: &Capability| is_gptq_marlin_compatible(c, d).compatible;
    let base = gptq(json!({}));
    assert!(yes(&base, &H100) && yes(&base, &Capability::cuda(7, 5)));
    assert!(yes(&gptq(json!({"quant_method": "GPTQ"})), &H100));
    for (change, why) in [
        (json!({"quant_method": "awq"}), "`awq`"),
        (json!({"bits": null}), "`bits`"),
        (json!({"desc_act": null}), "`desc_act`"),
        (json!({"sym": false}), "no weight type"),
        (json!({"bits": 2}), "no weight type"),
        (json!({"group_size": 16}), "group_size 16"),
        (json!({"group_size": 0}), "group_size 0"),
    ] {
        let found = is_gptq_marlin_compatible(&gptq(change), &H100);
        assert!(!found.compatible && found.reason.contains(why), "{found:?}");
    }
    assert!(!yes(&base, &Capability::cuda(7, 0)));
    assert!(!yes(&base, &Capability { platform: Platform::Rocm, compute: Some((9, 4)) }));
    assert!(!yes(&json!("x"), &H100));

    let pick = |user| override_quantization_method(&base, user, &H100).method;
    assert_eq!(pick(UserQuant::Unspecified), Some("gptq_marlin"));
    assert_eq!(pick(UserQuant::Named("marlin")), Some("gptq_marlin"));
    assert_eq!(pick(UserQuant::Named("gptq_marlin")), Some("gptq_marlin"));
    assert_eq!(pick(UserQuant::Named("gptq")), None);
    assert_eq!(pick(UserQuant::Named("awq")), None);
    let odd = gptq(json!({"sym": false}));
    assert_eq!(override_quantization_method(&odd, UserQuant::Unspecified, &H100).method, None);

    let keys = awq::FORMAT.config.unwrap();
    let awq = json!({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": true});
    assert!(is_marlin_compatible(keys, &awq, &H100).compatible);
    let mut flat = awq.clone();
    flat["zero_point"] = json!(false);
    assert!(!is_marlin_compatible(keys, &flat, &H100).compatible);
    let other = is_marlin_compatible(keys, &base, &H100);
    assert_eq!(other.reason, "quant_method is `gptq`, not `awq`");
}

proptest! {
    /// The prefix decides: `+:` and none override, `-:` skips; the first of the file wins.
    #[test]
    fn prefixes_and_order(order in Just(vec![0usize, 1, 2]).prop_shuffle(), hit in 0u8..8) {
        // Rule i matches the name when bit i of `hit` is set.
        let rule = |i: usize| {
            let pattern = format!("{}.*", if hit >> i & 1 == 1 { "model" } else { "other" });
            let prefix = ["-:", "+:", ""][i];
            // Distinct keys, same meaning.
            (format!("{prefix}{pattern}(?#{i})"), json!({"group_size": if i == 1 { 32 } else { 64 }}))
        };
        let dynamic: serde_json::Map<_, _> = order.iter().map(|&i| rule(i)).collect();
        let config = GptqMarlinConfig::from_value(&gptq(json!({"dynamic": dynamic}))).unwrap();
        let first = order.iter().copied().find(|&i| hit >> i & 1 == 1);
        let found = config.dynamic_match("model.x").unwrap();
        let params = config.params_for(&Module::in_checkpoint("model.x")).unwrap();
        match first {
            None => {
                prop_assert!(matches!(found, DynamicMatch::None));
                prop_assert_eq!(params.unwrap().group_size, GroupSize::Of(128));
            }
            Some(0) => {
                prop_assert!(matches!(found, DynamicMatch::Skip(_)));
                prop_assert!(params.is_err());
            }
            Some(i) => {
                prop_assert!(matches!(found, DynamicMatch::Override(..)));
                let expected = if i == 1 { 32 } else { 64 };
                prop_assert_eq!(params.unwrap().group_size, GroupSize::Of(expected));
            }
        }
    }
}
