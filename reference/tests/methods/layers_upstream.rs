//! Parameter lists compared with those that upstream registers. `scripts/gen/layer_facts.py` wrote
//! the fact files by running the `create_weights` methods of vLLM 0.21.0 on meta tensors. A `#`
//! line holds the configuration, each line below it one parameter.

use std::collections::HashMap;

use marlinspike::config::{
    ActOrder, ActivationScheme, CompressedTensorsConfig, CtArgs, FloatContainer, Fp8Scheme,
    GptqParams, Module, ScaleStrategy, Wna16Scheme, ZeroPoints,
};
use marlinspike::formats::mxfp8;
use marlinspike::formats::{compressed_tensors, nvfp4};
use marlinspike::layers::{
    ActOrderRule, CtWna16Moe, ExpertPlacement, LayerError, LayerParams, LinearShard, MoeShard,
    Role, ScaleKind, Wna16Kernel, Wna16Weight, ct_block_moe, ct_fp8_moe, ct_w4a8_int8_moe,
    ct_wna16_linear, ct_wna16_moe, determine_expert_map, fp8_linear, gptq_linear, gptq_moe,
    mx_linear, w4a8_int8_group, wna16_weight_shape,
};
use marlinspike::num::dims::GroupSize;
use marlinspike::num::scalar::ScalarType;
use marlinspike::num::tensor::DType;
use marlinspike::select::{Capability, Platform};
use serde_json::json;

const H100: Capability = Capability::cuda(9, 0);

/// One `#` block: method, settings, parameter lines.
struct Block<'a> {
    method: &'a str,
    settings: HashMap<&'a str, &'a str>,
    refused: bool,
    lines: Vec<&'a str>,
}

fn blocks(text: &str) -> Vec<Block<'_>> {
    let mut blocks: Vec<Block<'_>> = Vec::new();
    for line in text.lines() {
        match line.strip_prefix("# ") {
            Some(head) => {
                let mut words = head.split_whitespace();
                let method = words.next().unwrap();
                let settings = words.filter_map(|w| w.split_once('=')).collect();
                let refused = head.contains("REFUSED");
                blocks.push(Block { method, settings, refused, lines: Vec::new() });
            }
            None => blocks.last_mut().unwrap().lines.push(line),
        }
    }
    blocks
}

impl Block<'_> {
    fn num(&self, key: &str) -> usize {
        self.settings[key].parse().unwrap()
    }

    fn flag(&self, key: &str) -> bool {
        self.settings.get(key) == Some(&"1")
    }

    fn group(&self) -> GroupSize {
        match self.settings["group"] {
            "-1" | "None" => GroupSize::Channel,
            g => GroupSize::Of(g.parse().unwrap()),
        }
    }

    fn gptq(&self) -> GptqParams {
        let (bits, weight_type) = match self.settings["bits"] {
            "4" => (4, ScalarType::UINT4B8),
            _ => (8, ScalarType::UINT8B128),
        };
        let (group_size, desc_act) = (self.group(), self.flag("desc_act"));
        GptqParams { bits, group_size, desc_act, sym: true, weight_type }
    }

    fn moe(&self) -> MoeShard {
        let tp = self.num("full") / self.num("I");
        let mut shard = MoeShard::new(self.num("E"), self.num("H"), self.num("full"), tp).unwrap();
        shard.is_act_and_mul = self.settings.get("gated") != Some(&"0");
        shard.has_bias = self.flag("bias");
        shard
    }
}

fn ct_args(v: serde_json::Value) -> CtArgs {
    let config = json!({
        "format": "pack-quantized",
        "config_groups": {"g": {"targets": ["Linear"], "weights": v, "input_activations":
            {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": true}}},
    });
    let config = CompressedTensorsConfig::from_value(&config).unwrap();
    config.group_for(&Module::in_checkpoint("m")).unwrap().unwrap().weights.clone()
}

fn moe_line(p: &marlinspike::layers::ParamSpec) -> String {
    let shape: Vec<_> = p.shape.iter().map(|d| d.to_string()).collect();
    let kind = match p.role {
        Role::Scale(ScaleKind::Tensor) => "tensor",
        Role::Scale(ScaleKind::Channel) => "channel",
        Role::Scale(ScaleKind::Group) => "group",
        Role::Scale(ScaleKind::Block) => "block",
        _ => "-",
    };
    let (t, full) = (u8::from(p.is_transposed), u8::from(p.load_full_w2));
    format!("{} {} {} {t} {kind} {full}", p.name, shape.join("x"), p.dtype)
}

/// Upstream sets `quant_method` on every parameter of some layers; loaders read it on scales.
fn expected_moe_line(line: &str) -> String {
    let w: Vec<_> = line.split(' ').collect();
    let scale = w[0].contains("scale") && !w[0].ends_with("input_scale") || w[0].contains("zeros");
    format!("{} {} {} {} {} {}", w[0], w[1], w[2], w[3], if scale { w[4] } else { "-" }, w[5])
}

fn build_moe(b: &Block<'_>) -> Result<LayerParams, LayerError> {
    let shard = b.moe();
    match b.method {
        "gptq" => gptq_moe(&b.gptq(), &shard, false),
        "wna16" => {
            let group = match b.settings["group"] {
                "None" => json!(null),
                g => json!(g.parse::<i64>().unwrap()),
            };
            let actorder = Some(b.settings["actorder"]).filter(|a| *a != "None");
            let weights = ct_args(json!({
                "num_bits": b.num("bits"), "strategy": b.settings["strategy"],
                "group_size": group, "actorder": actorder,
            }));
            let kernel = match b.settings["kernel"] {
                "Marlin" => Wna16Kernel::MARLIN,
                _ => Wna16Kernel::TRTLLM_MXINT4,
            };
            let act_order_rule = ActOrderRule::Upstream;
            ct_wna16_moe(&CtWna16Moe { weights: &weights, kernel, act_order_rule }, &shard)
        }
        "nvfp4" => ct_block_moe(&nvfp4::FORMAT, &shard),
        "w4a8" => ct_w4a8_int8_moe(b.group(), &shard),
        "fp8" => {
            let activations = match (b.settings["strategy"], b.flag("static")) {
                ("tensor", true) => ActivationScheme::StaticTensor,
                ("tensor", false) => ActivationScheme::DynamicTensor,
                ("channel", _) => ActivationScheme::DynamicToken,
                _ => ActivationScheme::DynamicGroup(128),
            };
            let strategy = match (b.settings["strategy"], b.settings["block"].split_once('x')) {
                ("tensor", _) => ScaleStrategy::Tensor,
                ("channel", _) => ScaleStrategy::Channel,
                (_, block) => {
                    let (n, k) = block.unwrap();
                    ScaleStrategy::Block {
                        block_n: n.parse().unwrap(),
                        block_k: k.parse().unwrap(),
                    }
                }
            };
            let container = FloatContainer::CompressedTensors;
            ct_fp8_moe(&Fp8Scheme { container, strategy, activations, scale_inv: false }, &shard)
        }
        other => panic!("{other}"),
    }
}

#[test]
fn moe_parameters_as_upstream() {
    let all = blocks(include_str!("../data/layers_moe_facts.txt"));
    assert_eq!(all.len(), 24);
    for b in all {
        let name = format!("{} {:?}", b.method, b.settings);
        let built = build_moe(&b);
        if b.refused {
            assert!(matches!(built, Err(LayerError::NotDivisible { .. })), "{name}: {built:?}");
            continue;
        }
        let built = built.unwrap_or_else(|e| panic!("{name}: {e}"));
        let found: Vec<_> = built.params.iter().map(moe_line).collect();
        let expected: Vec<_> = b.lines.iter().map(|l| expected_moe_line(l)).collect();
        assert_eq!(found, expected, "{name}");
        if b.settings.contains_key("k_full") {
            assert_eq!(built.is_k_full, b.flag("k_full"), "{name}");
            assert_eq!(built.num_groups_w13, Some(b.num("g13")), "{name}");
            assert_eq!(built.num_groups_w2, Some(b.num("g2")), "{name}");
        }
    }
}

#[test]
fn linear_parameters_as_upstream() {
    let all = blocks(include_str!("../data/layers_linear_facts.txt"));
    assert_eq!(all.len(), 22);
    for b in all {
        let name = format!("{} {:?}", b.method, b.settings);
        let tp = b.num("tp");
        let shard = match b.settings["par"] {
            "col" => LinearShard::column(1024, &[512, 256], tp),
            _ => LinearShard::row(1024, 512, tp),
        }
        .unwrap();
        let p = b.gptq();
        let built = match b.method {
            "gptq" => gptq_linear(&p, &shard, DType::F16, false, &H100),
            _ => {
                let sym = b.flag("sym");
                let scheme = Wna16Scheme {
                    checkpoint_format: &compressed_tensors::PACKED,
                    weight_type: if sym { p.weight_type } else { ScalarType::UINT4 },
                    group_size: p.group_size,
                    desc_act: p.desc_act,
                    actorder: p.desc_act.then_some(ActOrder::Group),
                    zeros: if sym { ZeroPoints::Symmetric } else { ZeroPoints::Stored },
                };
                ct_wna16_linear(&scheme, &shard, DType::F16, &H100)
            }
        }
        .unwrap_or_else(|e| panic!("{name}: {e}"));
        let dim = |d: Option<usize>| d.map_or("-".to_owned(), |d| d.to_string());
        let found: Vec<_> = built
            .params
            .iter()
            .map(|p| {
                let shape: Vec<_> = p.shape.iter().map(|d| d.to_string()).collect();
                format!(
                    "{} {} {} {} {} {} {}",
                    p.name,
                    shape.join("x"),
                    p.dtype,
                    dim(p.input_dim),
                    dim(p.output_dim),
                    dim(p.packed.map(|p| p.dim)),
                    dim(p.packed.map(|p| p.factor)),
                )
            })
            .collect();
        assert_eq!(found, b.lines, "{name}");
        assert_eq!(built.is_k_full, b.flag("k_full"), "{name}");
    }
}

#[test]
fn calibration_order_is_not_act_order() {
    let shard = MoeShard::new(4, 256, 512, 2).unwrap();
    let make = |actorder: &str, rule| {
        let weights = ct_args(json!({
            "num_bits": 4, "strategy": "group", "group_size": 128, "actorder": actorder,
        }));
        let kernel = Wna16Kernel::MARLIN;
        ct_wna16_moe(&CtWna16Moe { weights: &weights, kernel, act_order_rule: rule }, &shard)
            .unwrap()
    };
    for name in ["static", "weight"] {
        let right = make(name, ActOrderRule::GroupOnly);
        assert!(right.is_k_full);
        assert_eq!(right.get("w2_weight_scale").unwrap().shape, [4, 2, 256]);
        let upstream = make(name, ActOrderRule::Upstream);
        assert!(!upstream.is_k_full);
        assert_eq!(upstream.get("w2_weight_scale").unwrap().shape, [4, 4, 256]);
    }
    assert!(!make("group", ActOrderRule::GroupOnly).is_k_full);
}

#[test]
fn refusals_are_named() {
    let shard = MoeShard::new(2, 256, 128, 1).unwrap();
    let p = |bits, weight_type| GptqParams {
        bits,
        group_size: GroupSize::Of(128),
        desc_act: false,
        sym: true,
        weight_type,
    };
    let (b4, b8) = (ScalarType::UINT4B8, ScalarType::UINT8B128);
    assert!(matches!(gptq_moe(&p(3, b4), &shard, false), Err(LayerError::Bits { bits: 3, .. })));
    assert!(matches!(
        gptq_moe(&p(8, b8), &shard, true),
        Err(LayerError::EightBitActivations { weight_type }) if weight_type == b8
    ));
    assert!(gptq_moe(&p(4, b4), &shard, true).is_ok());
    assert!(matches!(
        MoeShard::new(2, 256, 129, 2),
        Err(LayerError::NotDivisible { found: 129, of: 2, .. })
    ));
    assert!(matches!(MoeShard::new(2, 256, 128, 0), Err(LayerError::Zero { .. })));

    let linear = LinearShard::replicated(256, 128);
    let old = Capability::cuda(7, 0);
    for (result, what) in [
        (gptq_linear(&p(4, b4), &linear, DType::F16, false, &old), "device"),
        (
            gptq_linear(
                &GptqParams { group_size: GroupSize::Of(16), ..p(4, b4) },
                &linear,
                DType::F16,
                false,
                &H100,
            ),
            "group",
        ),
        (
            gptq_linear(&p(4, b4), &LinearShard::replicated(256, 96), DType::F16, false, &H100),
            "shape",
        ),
    ] {
        assert!(matches!(result, Err(LayerError::Marlin(_))), "{what}: {result:?}");
    }
    assert!(matches!(
        gptq_linear(&p(8, b8), &linear, DType::F16, true, &H100),
        Err(LayerError::EightBitActivations { .. })
    ));
    assert!(matches!(
        mx_linear(&mxfp8::FORMAT, &LinearShard::replicated(48, 64)),
        Err(LayerError::NotDivisible { found: 48, of: 32, .. })
    ));
    assert_eq!(
        wna16_weight_shape(Wna16Kernel::MARLIN, Wna16Weight::W2Scale, &shard, 8, None),
        Err(LayerError::GroupsMissing { weight: "w2_scale" })
    );
    let asymmetric = ct_args(json!({
        "num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": false,
    }));
    let settings = CtWna16Moe {
        weights: &asymmetric,
        kernel: Wna16Kernel::MARLIN,
        act_order_rule: ActOrderRule::GroupOnly,
    };
    assert!(matches!(ct_wna16_moe(&settings, &shard), Err(LayerError::Asymmetric { .. })));
    let eight = ct_args(json!({"num_bits": 8, "strategy": "group", "group_size": 32}));
    let settings = CtWna16Moe { weights: &eight, kernel: Wna16Kernel::TRTLLM_MXINT4, ..settings };
    assert!(matches!(ct_wna16_moe(&settings, &shard), Err(LayerError::Bits { bits: 8, .. })));
    let wide = ct_args(json!({"num_bits": 4, "strategy": "group", "group_size": 128}));
    let settings = CtWna16Moe { weights: &wide, ..settings };
    assert!(matches!(ct_wna16_moe(&settings, &shard), Err(LayerError::StrategyPair { .. })));
}

#[test]
fn w4a8_constructor() {
    let w = ct_args(json!({"num_bits": 4, "strategy": "group", "group_size": 32}));
    let channel = ct_args(json!({"num_bits": 4, "strategy": "channel"}));
    let eight = ct_args(json!({"num_bits": 8, "strategy": "channel"}));
    let token = ct_args(json!({"num_bits": 8, "strategy": "token", "dynamic": true}));
    let tensor = ct_args(json!({"num_bits": 8, "strategy": "tensor", "dynamic": true}));
    let arm = Capability::cpu(Platform::CpuArm);
    assert_eq!(w4a8_int8_group(&w, &token, &arm), Ok(GroupSize::Of(32)));
    assert_eq!(w4a8_int8_group(&channel, &token, &arm), Ok(GroupSize::Channel));
    assert!(matches!(
        w4a8_int8_group(&w, &tensor, &arm),
        Err(LayerError::NotDynamicPerToken { .. })
    ));
    assert!(matches!(w4a8_int8_group(&eight, &token, &arm), Err(LayerError::Bits { bits: 8, .. })));
    assert_eq!(
        w4a8_int8_group(&w, &token, &H100),
        Err(LayerError::CpuOnly { method: "W4A8-int8 MoE", platform: Platform::Cuda })
    );
    let shard = MoeShard::new(2, 48, 32, 1).unwrap();
    assert!(matches!(
        ct_w4a8_int8_moe(GroupSize::Of(32), &shard),
        Err(LayerError::NotDivisible { found: 48, of: 32, .. })
    ));
}

#[test]
fn fp8_scales_and_blocks() {
    let scheme = |strategy, activations| Fp8Scheme {
        container: FloatContainer::Fp8,
        strategy,
        activations,
        scale_inv: true,
    };
    let block = ScaleStrategy::Block { block_n: 128, block_k: 128 };
    let dynamic = ActivationScheme::DynamicGroup(128);
    let blocks = scheme(block, dynamic);
    // The last merged matrix may end inside a block when N is not cut.
    let merged = LinearShard::column(300, &[256, 64], 1).unwrap();
    let built = fp8_linear(&blocks, &merged).unwrap();
    assert_eq!(built.get("weight_scale_inv").unwrap().shape, [3, 3]);
    assert_eq!(built.get("weight").unwrap().shape, [320, 300]);
    let merged = LinearShard::column(256, &[64, 256], 1).unwrap();
    let refused = fp8_linear(&blocks, &merged);
    assert!(matches!(refused, Err(LayerError::NotDivisible { found: 64, of: 128, .. })));
    let cut = LinearShard::column(256, &[384], 2).unwrap();
    assert!(matches!(fp8_linear(&blocks, &cut), Err(LayerError::NotDivisible { found: 192, .. })));
    let row = LinearShard::row(384, 256, 2).unwrap();
    assert!(matches!(fp8_linear(&blocks, &row), Err(LayerError::NotDivisible { found: 192, .. })));
    let bad = scheme(block, ActivationScheme::StaticTensor);
    assert!(matches!(fp8_linear(&bad, &row), Err(LayerError::StrategyPair { .. })));
    let tensor = scheme(ScaleStrategy::Tensor, ActivationScheme::StaticTensor);
    let qkv = LinearShard::qkv(256, 64, 8, 2, 4).unwrap();
    let built = fp8_linear(&tensor, &qkv).unwrap();
    assert_eq!(built.get("weight").unwrap().shape, [256, 256]);
    assert_eq!(built.get("weight_scale").unwrap().shape, [3]);
    assert_eq!(built.get("input_scale").unwrap().shape, [3]);

    let shard = MoeShard::new(2, 256, 128, 1).unwrap();
    let channel = scheme(ScaleStrategy::Channel, ActivationScheme::StaticTensor);
    assert!(matches!(ct_fp8_moe(&channel, &shard), Err(LayerError::StrategyPair { .. })));
}

#[test]
fn expert_maps() {
    use ExpertPlacement::{Linear, RoundRobin};
    // Computed with `determine_expert_map` of vLLM 0.21.0.
    let cases: [(usize, usize, usize, ExpertPlacement, &[i32]); 9] = [
        (8, 2, 1, Linear, &[-1, -1, -1, -1, 0, 1, 2, 3]),
        (8, 2, 1, RoundRobin, &[-1, 0, -1, 1, -1, 2, -1, 3]),
        (10, 4, 0, Linear, &[0, 1, 2, -1, -1, -1, -1, -1, -1, -1]),
        (10, 4, 1, Linear, &[-1, -1, -1, 0, 1, 2, -1, -1, -1, -1]),
        (10, 4, 2, Linear, &[-1, -1, -1, -1, -1, -1, 0, 1, -1, -1]),
        (10, 4, 3, RoundRobin, &[-1, -1, -1, 0, -1, -1, -1, 1, -1, -1]),
        (3, 4, 3, Linear, &[-1, -1, -1]),
        (7, 3, 0, RoundRobin, &[0, -1, -1, 1, -1, -1, 2]),
        (7, 3, 2, Linear, &[-1, -1, -1, -1, -1, 0, 1]),
    ];
    for (experts, ep, rank, placement, expected) in cases {
        let map = determine_expert_map(ep, rank, experts, placement).unwrap();
        assert_eq!(map.map.as_deref(), Some(expected), "{experts} {ep} {rank} {placement:?}");
        assert_eq!(map.local_num_experts, expected.iter().filter(|&&l| l >= 0).count());
    }
    let one = determine_expert_map(1, 0, 8, Linear).unwrap();
    assert_eq!((one.local_num_experts, one.map), (8, None));
    assert_eq!(
        determine_expert_map(4, 4, 8, Linear),
        Err(LayerError::Rank { what: "ep_rank", rank: 4, size: 4 })
    );
    assert_eq!(determine_expert_map(0, 0, 8, Linear), Err(LayerError::Zero { what: "ep_size" }));
    let many = determine_expert_map(2, 0, usize::MAX, Linear);
    assert_eq!(many, Err(LayerError::Overflow { what: "global_num_experts" }));
}

#[test]
fn huge_sizes_do_not_overflow() {
    let shard = MoeShard::new(usize::MAX, usize::MAX & !127, usize::MAX & !127, 1).unwrap();
    assert!(matches!(ct_block_moe(&nvfp4::FORMAT, &shard), Err(LayerError::Overflow { .. })));
    let shard = MoeShard::new(usize::MAX, 1 << 40, 1 << 40, 1).unwrap();
    let built = ct_block_moe(&nvfp4::FORMAT, &shard).unwrap();
    assert_eq!(built.get("w13_weight_packed").unwrap().bytes(), None);
}
