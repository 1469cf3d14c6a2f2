//! What two releases of vLLM decide for a layer, compared with upstream's own functions.
//!
//! `scripts/gen/upstream_drift.py` made `data/upstream_drift.json` by running vLLM 0.21.0 and 0.33.0
//! with a platform that is plain data.

use marlinspike::config::{
    ActivationScheme, CompressedTensorsConfig, FloatContainer, Fp8Scheme, GptqMarlinConfig, Module,
    QuantConfig, ScaleStrategy, Scheme,
};
use marlinspike::formats::{mxfp4, mxfp8, nvfp4};
use marlinspike::num::dims::GroupSize;
use marlinspike::select::release::{
    Kernel, Layer, Padding, Question, answer, changes, experts_kernel, experts_padding,
    linear_kernel, linear_padding, padded_intermediate, padded_nk,
};
use marlinspike::select::{Capability, InputType, LinearDesc, MoeDesc, Options, Platform, Release};
use serde_json::{Value, json};

const UPSTREAM: &str = include_str!("../data/upstream_drift.json");

fn upstream() -> Value {
    serde_json::from_str(UPSTREAM).unwrap()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().unwrap()
}

fn number(value: &Value) -> usize {
    value.as_u64().unwrap() as usize
}

fn group(value: &Value) -> GroupSize {
    GroupSize::from_config(value.as_i64().unwrap()).unwrap()
}

fn device(value: &Value) -> Capability {
    let (major, minor) = value.as_str().unwrap().split_once('.').unwrap();
    Capability::cuda(major.parse().unwrap(), minor.parse().unwrap())
}

const MODULE: &str = "model.layers.0.mlp.experts.0.gate_proj";

fn gptq(bits: i64, group_size: i64, desc_act: bool) -> Scheme {
    let config = json!({"quant_method": "gptq", "bits": bits, "group_size": group_size,
        "desc_act": desc_act, "sym": true});
    GptqMarlinConfig::from_value(&config)
        .unwrap()
        .scheme_for(&Module::in_checkpoint(MODULE))
        .unwrap()
}

fn awq(group_size: i64) -> Scheme {
    let config = json!({"quant_method": "awq", "bits": 4, "group_size": group_size,
        "zero_point": true, "version": "gemm"});
    QuantConfig::from_value(&config).unwrap().scheme_for(MODULE).unwrap()
}

fn packed(bits: i64, group_size: i64, symmetric: bool) -> Scheme {
    let config = json!({"quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "input_activations": null,
        "weights": {"num_bits": bits, "type": "int", "symmetric": symmetric,
        "strategy": "group", "group_size": group_size, "dynamic": false}}}});
    // Experts with zero points are not read here, but upstream chooses a kernel for them.
    let name = if symmetric { MODULE } else { "model.layers.0.self_attn.q_proj" };
    let module = Module::in_checkpoint(name);
    CompressedTensorsConfig::from_value(&config).unwrap().scheme_for(&module).unwrap()
}

fn block(format: &'static marlinspike::formats::blocks::BlockFormat, weight_only: bool) -> Scheme {
    Scheme::Block { format, container: FloatContainer::CompressedTensors, weight_only }
}

/// The scheme of a row of the fixture; the second value is whether its method takes CUTLASS kernels.
fn scheme(name: &str, cutlass: bool) -> Option<Scheme> {
    use ActivationScheme as A;
    use ScaleStrategy as S;
    let container = if cutlass { FloatContainer::CompressedTensors } else { FloatContainer::Fp8 };
    let fp8 = |strategy, activations| {
        Some(Scheme::Fp8(Fp8Scheme { container, strategy, activations, scale_inv: false }))
    };
    let blocks = S::Block { block_n: 128, block_k: 128 };
    let (method, keys) = name.split_once(": ").unwrap();
    match (method, keys, cutlass) {
        ("fp8", "block128 x dynamic128", _) => fp8(blocks, A::DynamicToken),
        ("fp8", "tensor x static_tensor", _) => fp8(S::Tensor, A::StaticTensor),
        // Keys that only one of the two containers asks for.
        ("fp8", "channel x dynamic_token", true) => fp8(S::Channel, A::DynamicToken),
        ("fp8", "tensor x dynamic_tensor", false) => fp8(S::Tensor, A::DynamicTensor),
        ("fp8", "tensor x dynamic128", true) => fp8(S::Tensor, A::DynamicTensor),
        ("fp8", _, _) => None,
        ("nvfp4", "nvfp4 x none", _) => Some(block(&nvfp4::FORMAT, true)),
        ("nvfp4", _, _) => Some(block(&nvfp4::FORMAT, false)),
        ("mxfp8", _, _) => Some(block(&mxfp8::FORMAT, true)),
        ("mxfp4", _, _) => Some(block(&mxfp4::FORMAT, true)),
        ("w4a8", _, _) => Some(Scheme::W4A8Fp8 { group_size: GroupSize::Of(128) }),
        (_, "gptq 4", _) => Some(gptq(4, 128, false)),
        (_, "gptq 8", _) => Some(gptq(8, 128, false)),
        (_, "awq 4", _) => Some(awq(128)),
        (_, "ct 4 group 32", _) => Some(packed(4, 32, true)),
        (_, "ct 4 group 128", _) => Some(packed(4, 128, true)),
        (_, "ct 4 zeros", _) => Some(packed(4, 128, false)),
        (_, "ct 8", _) => Some(packed(8, 128, true)),
        other => panic!("{other:?}"),
    }
}

#[test]
fn experts_get_upstreams_kernels() {
    let facts = upstream();
    let mut asked = 0;
    for &release in Release::ALL {
        let of = &facts["releases"][release.name()];
        let mut answers = list(&of["moe"]["answers"]).iter();
        for method in list(&of["moe"]["methods"]) {
            for on in list(&facts["devices"]) {
                for parallel in list(&facts["parallel"]) {
                    for cutlass in [false, true] {
                        let index = number(answers.next().unwrap());
                        let expected = of["kernels"][index].as_str().unwrap();
                        let name = method.as_str().unwrap();
                        let Some(scheme) = scheme(name, cutlass) else { continue };
                        let ep_size = if parallel == "ep2" { 2 } else { 1 };
                        let desc = MoeDesc::new(4096, 1024);
                        let found =
                            experts_kernel(release, &scheme, &desc, ep_size, &device(on)).unwrap();
                        // In 0.21.0 these methods select nothing: one kernel, or none.
                        let single = ["fused_marlin_moe", "cutlass_w4a8_moe"];
                        let found = match found {
                            Some(found) if !single.contains(&found.class) => {
                                format!("{}/{}", found.backend, found.class)
                            }
                            _ => "no oracle".to_owned(),
                        };
                        assert_eq!(found, expected, "{release} {name} {on} {parallel} {cutlass}");
                        asked += 1;
                    }
                }
            }
        }
        assert!(answers.next().is_none());
    }
    assert_eq!(asked, 2 * 10 * 3 * (7 + 2 * 12));
}

#[test]
fn linear_layers_get_upstreams_kernels() {
    let facts = upstream();
    let mut asked = 0;
    for &release in Release::ALL {
        let of = &facts["releases"][release.name()];
        let mut answers = list(&of["linear"]["answers"]).iter();
        for ty in list(&facts["types"]) {
            for size in list(&facts["groups"]) {
                for on in list(&facts["devices"]) {
                    for shapes in list(&facts["layers"]) {
                        for act_order in [false, true] {
                            let index = number(answers.next().unwrap());
                            let expected = of["kernels"][index].as_str().unwrap();
                            let g = size.as_i64().unwrap();
                            let scheme = match ty.as_str().unwrap() {
                                "uint4" if act_order => continue,
                                "uint4" => awq(g),
                                "uint4b8" => gptq(4, g, act_order),
                                _ => gptq(8, g, act_order),
                            };
                            let desc = LinearDesc {
                                input_size: number(&shapes[0][0]),
                                input_size_per_partition: number(&shapes[1][0]),
                                output_size_per_partition: number(&shapes[1][1]),
                                options: Options::default(),
                            };
                            // One group is no order.
                            if act_order && g == -1 {
                                continue;
                            }
                            let layer = Layer::Linear(desc);
                            let on = device(on);
                            let found = answer(release, Question::Kernel, &scheme, &layer, &on);
                            let expected = (expected != "no act-order").then_some(expected);
                            assert_eq!(
                                found.as_deref(),
                                expected,
                                "{release} {ty} {g} {desc:?} {on}"
                            );
                            asked += 1;
                        }
                    }
                }
            }
        }
        assert!(answers.next().is_none());
    }
    assert_eq!(asked, 2 * 10 * 6 * (3 * 4 + 2 * 3));
}

#[test]
fn sizes_are_taken_refused_and_padded_as_upstream_does() {
    let facts = upstream();
    let [groups, all_n, all_k] = ["groups", "sizes_n", "sizes_k"].map(|key| list(&facts[key]));
    for &release in Release::ALL {
        let of = &facts["releases"][release.name()];
        let mut shapes = list(&of["shapes"]).iter();
        let padded = of["padded"].as_array();
        let mut padded = padded.map(|all| all.iter());
        for n in all_n {
            for k in all_k {
                for g in groups {
                    let (n, k, g) = (number(n), number(k), group(g));
                    if let Some(padded) = &mut padded {
                        assert_eq!(
                            json!(padded_nk(n, k, g)),
                            *padded.next().unwrap(),
                            "{n} {k} {g}"
                        );
                    }
                    for whole in [k, 2 * k] {
                        let desc = LinearDesc {
                            input_size: whole,
                            input_size_per_partition: k,
                            output_size_per_partition: n,
                            options: Options::default(),
                        };
                        let found = linear_padding(release, &desc, g);
                        let expected = number(shapes.next().unwrap()) == 1;
                        assert_eq!(found.is_ok(), expected, "{release} {desc:?} {g} {found:?}");
                    }
                }
            }
        }
        let mut experts = list(&of["experts_shape"]).iter();
        for hidden in [2048, 2880] {
            for k in all_k {
                for g in groups {
                    let found =
                        experts_padding(release, &MoeDesc::new(hidden, number(k)), group(g));
                    let expected = number(experts.next().unwrap()) == 1;
                    assert_eq!(found.is_ok(), expected, "{release} {hidden} {k} {g} {found:?}");
                }
            }
        }
        if let Some(inner) = of["experts_padded"].as_array() {
            let sizes = all_k.iter().flat_map(|k| groups.iter().map(move |g| (k, g)));
            for ((k, g), expected) in sizes.zip(inner) {
                assert_eq!(padded_intermediate(number(k), group(g)), number(expected), "{k} {g}");
            }
        }
    }
}

#[test]
fn operators_and_inputs_are_those_of_the_release() {
    let facts = upstream();
    for &release in Release::ALL {
        let of = &facts["releases"][release.name()];
        assert_eq!(of["dynamic_4bit_int_moe"], json!([release.int4_moe_arguments()]));
        for (on, expected) in list(&facts["devices"]).iter().zip(list(&of["fp8_inputs"])) {
            assert_eq!(
                release.takes_fp8_inputs(&device(on)),
                number(expected) == 1,
                "{release} {on}"
            );
        }
        let layer = Layer::Linear(LinearDesc::whole(4096, 4096));
        for (g, expected) in list(&facts["groups"]).iter().zip(list(&of["desc_act"])) {
            let scheme = gptq(4, g.as_i64().unwrap(), true);
            let found =
                answer(release, Question::ActOrder, &scheme, &layer, &device(&json!("9.0")));
            let found = match found.as_deref() {
                None => "off",
                Some("rows are sorted by group") => "kept",
                Some("refused: the checkpoint does not load") => "refused",
                Some(other) => panic!("{other}"),
            };
            assert_eq!(json!(found), *expected, "{release} {g}");
        }
    }
}

#[test]
fn changes_name_what_differs_and_nothing_else() {
    let both = [Release::V0_21, Release::V0_33];
    let found = |scheme: &Scheme, layer: Layer, on: Capability| {
        let changes = changes(both, scheme, &layer, &on);
        let text = |c: &marlinspike::select::Change| {
            format!("{}: {} -> {}", c.question.name(), c.before, c.after)
        };
        changes.iter().map(text).collect::<Vec<_>>()
    };
    let [ampere, ada, hopper] = [(8, 0), (8, 9), (9, 0)].map(|(a, b)| Capability::cuda(a, b));
    let experts = Layer::Experts(MoeDesc::new(4096, 1024), 1);
    let linear = Layer::Linear(LinearDesc::whole(4096, 4096));
    assert_eq!(
        found(&gptq(4, 128, false), experts, hopper),
        ["kernel: MARLIN (MarlinExperts) -> HUMMING (HummingIndexedExperts)"]
    );
    // The same kernel called in another way is no change.
    assert_eq!(found(&gptq(4, 128, false), experts, ampere), [""; 0]);
    assert_eq!(found(&packed(4, 128, true), experts, ada), [""; 0]);
    assert_eq!(found(&gptq(4, 128, false), linear, hopper), [""; 0]);
    // Act-order: refused as a whole, so no kernel is named.
    assert_eq!(
        found(&gptq(4, 128, true), linear, ada),
        ["act-order: rows are sorted by group -> refused: the checkpoint does not load"]
    );
    assert_eq!(found(&gptq(4, -1, true), linear, ada), [""; 0]);
    // Tiles.
    let odd = Layer::Linear(LinearDesc::whole(4096, 96));
    assert_eq!(
        found(&gptq(4, 128, false), odd, ada),
        [
            "kernel: none -> MarlinLinearKernel",
            "sizes for Marlin: refused: output_size_per_partition = 96 is not a multiple of 64 -> \
             padded with zeros to K x N = 4096 x 128",
        ]
    );
    let narrow = Layer::Experts(MoeDesc::new(4096, 96), 1);
    let changed = found(&packed(4, 32, true), narrow, ada);
    assert!(changed.iter().any(|c| c.ends_with("padded with zeros to 128")), "{changed:?}");
    // FP8 activations on 12.1, and the CPU operator.
    let options = Options { input_type: InputType::Fp8, ..Options::default() };
    let quantized = Layer::Linear(LinearDesc { options, ..LinearDesc::whole(4096, 4096) });
    let changed = found(&gptq(4, 128, false), quantized, Capability::cuda(12, 1));
    assert_eq!(changed, ["FP8 activations in Marlin: no -> yes"]);
    assert_eq!(found(&gptq(4, 128, false), quantized, Capability::cuda(12, 0)), [""; 0]);
    let format = &marlinspike::formats::compressed_tensors::BYTES;
    let w4a8 = Scheme::W4A8Int8 { group_size: GroupSize::Of(32), checkpoint_format: format };
    let operator = "CPU operator: dynamic_4bit_int_moe with 11 arguments -> \
                    dynamic_4bit_int_moe with 10 arguments";
    let arm = Capability::cpu(Platform::CpuArm);
    assert_eq!(found(&w4a8, experts, arm), [operator]);
    let x86 = found(&w4a8, experts, Capability::cpu(Platform::CpuX86));
    assert_eq!(x86[0], "kernel: CPU_INT4 (dynamic_4bit_int_moe) -> none");
    // A release does not differ from itself, and unknown devices have no answer.
    let same = changes([Release::V0_33; 2], &gptq(4, 128, true), &experts, &hopper);
    assert!(same.is_empty(), "{same:?}");
    let desc = MoeDesc::new(4096, 1024);
    for on in [Capability::cuda(7, 0), Capability { platform: Platform::Rocm, compute: None }] {
        assert_eq!(experts_kernel(Release::V0_33, &awq(128), &desc, 1, &on), None);
        let whole = LinearDesc::whole(4096, 4096);
        assert_eq!(linear_kernel(Release::V0_33, &awq(128), &whole, &on), None);
    }
}

#[test]
fn a_rank_that_cuts_a_group_is_refused_in_both_releases() {
    let desc = |part: usize| LinearDesc {
        input_size: 1408,
        input_size_per_partition: part,
        output_size_per_partition: 4096,
        options: Options::default(),
    };
    let expected = "a rank's part of K = 704, of 1408 in all, cuts a quantization group: expected a \
                    multiple of group_size = 128";
    for &release in Release::ALL {
        let found = linear_padding(release, &desc(704), GroupSize::Of(128));
        assert_eq!(found.unwrap_err().to_string(), expected, "{release}");
        assert_eq!(linear_padding(release, &desc(1408), GroupSize::Of(128)), Ok(Padding::None));
    }
    // 704 is a multiple of 64, and 4096 of 128: a tile of 0.33.0.
    let fits = linear_padding(Release::V0_33, &desc(704), GroupSize::Of(64));
    assert_eq!(fits, Ok(Padding::None));
    assert_eq!(Release::from_name("0.33"), Some(Release::V0_33));
    assert_eq!(Release::from_name("0.21.0"), Some(Release::V0_21));
    assert_eq!(Release::from_name("0.3"), None);
    let kernel = Kernel { backend: "MarlinLinearKernel", class: "" };
    assert_eq!(kernel.to_string(), "MarlinLinearKernel");
}
