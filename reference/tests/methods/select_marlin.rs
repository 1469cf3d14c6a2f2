//! Marlin's limits and the MoE selection compared with upstream. The tables of shapes, of the
//! WNA16 oracle and of its keys are results of vLLM 0.21.0's functions; the others follow from its
//! source.

use marlinspike::config::{
    ActivationScheme, FloatContainer, Fp8Scheme, ScaleStrategy, Scheme, Wna16Scheme, ZeroPoints,
};
use marlinspike::formats::{awq, compressed_tensors, gptq, nvfp4};
use marlinspike::formats::{mxfp4, mxfp8};
use marlinspike::num::dims::GroupSize;
use marlinspike::num::scalar::ScalarType;
use marlinspike::select::{
    All2All, Backend, Capability, InputType, LinearDesc, MarlinRefusal, MoeActivation, MoeDesc,
    MoeParallel, Options, Platform, Reason, WeightKey, check_marlin_supported,
    check_marlin_supports_shape, check_moe_marlin_supports_layer, is_supported_config,
    marlin_weight_types, select_linear, select_moe, select_wna16_moe_backend,
};

const A100: Capability = Capability::cuda(8, 0);
const H100: Capability = Capability::cuda(9, 0);
const MI300: Capability = Capability { platform: Platform::Rocm, compute: Some((9, 4)) };

fn wna16(weight_type: ScalarType, group: i64) -> Scheme {
    let symmetric = weight_type.bias() != 0;
    Scheme::Wna16(Wna16Scheme {
        checkpoint_format: if symmetric { &gptq::FORMAT } else { &awq::FORMAT },
        weight_type,
        group_size: GroupSize::from_config(group).unwrap(),
        desc_act: false,
        actorder: None,
        zeros: if symmetric { ZeroPoints::Symmetric } else { ZeroPoints::Stored },
    })
}

#[test]
fn types_by_device_and_zero_points() {
    use ScalarType as T;
    let without = [T::UINT4B8, T::UINT8B128, T::FLOAT8_E4M3FN, T::FLOAT4_E2M1F];
    let cpu = Capability::cpu(Platform::CpuX86);
    let unknown = Capability { platform: Platform::Cuda, compute: None };
    let cases: [(Capability, bool, &[T]); 8] = [
        (Capability::cuda(7, 0), false, &[]),
        (Capability::cuda(7, 5), false, &without),
        (Capability::cuda(7, 5), true, &[T::UINT4]),
        (Capability::cuda(12, 0), false, &without),
        (unknown, false, &[]),
        (MI300, false, &without),
        (cpu, false, &[T::UINT4B8]),
        (cpu, true, &[T::UINT4]),
    ];
    for (device, zeros, expected) in cases {
        assert_eq!(marlin_weight_types(zeros, &device), expected, "{device} {zeros}");
    }
    let check = |ty, group, zeros| {
        check_marlin_supported(ty, GroupSize::from_config(group).unwrap(), zeros, &A100)
    };
    assert_eq!(check(T::UINT4B8, -1, false), Ok(()));
    assert!(matches!(check(T::UINT4, 128, false), Err(MarlinRefusal::WeightType { .. })));
    assert!(matches!(check(T::UINT8, 128, true), Err(MarlinRefusal::WeightType { .. })));
    assert!(matches!(check(T::UINT4B8, 16, false), Err(MarlinRefusal::GroupSize { .. })));
    assert!(matches!(check(T::UINT4B8, 256, false), Err(MarlinRefusal::GroupSize { .. })));
}

#[test]
fn dense_shapes() {
    // (N, K per rank, K, group) and the result of `check_marlin_supports_shape`.
    let cases = [
        ((64, 128, 128, 128), true),
        ((64, 64, 128, 64), false),
        ((96, 128, 128, -1), false),
        ((192, 128, 1024, 128), true),
        ((192, 384, 1024, 128), true),
        ((64, 256, 512, 96), false),
        ((64, 128, 128, 999), true),
        ((64, 128, 4096, 256), false),
        ((64, 896, 7168, 128), true),
        ((11008, 4096, 4096, 128), true),
    ];
    for ((n, k, full, group), expected) in cases {
        let group = GroupSize::from_config(group).unwrap();
        let found = check_marlin_supports_shape(n, k, full, group);
        assert_eq!(found.is_ok(), expected, "{n} {k} {full} {group}: {found:?}");
    }
}

#[test]
fn moe_shapes() {
    // (hidden, intermediate, group, router weight on input) and the result of
    // `check_moe_marlin_supports_layer`.
    let cases = [
        ((4096, 14336, 128, false), true),
        ((2048, 768, 128, false), true),
        ((2880, 2880, 32, false), false),
        ((256, 64, -1, false), true),
        ((256, 32, -1, false), false),
        ((256, 64, 32, false), true),
        ((256, 64, 128, false), false),
        ((256, 128, 128, true), false),
        ((256, 128, 16, false), false),
        ((192, 128, 64, false), false),
        ((2048, 704, 64, false), true),
        ((2048, 704, 128, false), false),
    ];
    for ((h, i, group, router), expected) in cases {
        let group = GroupSize::from_config(group).unwrap();
        let found = check_moe_marlin_supports_layer(h, i, group, router, &H100);
        assert_eq!(found.is_empty(), expected, "{h} {i} {group} {router}: {found:?}");
    }
    let rocm = check_moe_marlin_supports_layer(4096, 14336, GroupSize::Of(128), false, &MI300);
    assert_eq!(rocm, [MarlinRefusal::Platform { platform: Platform::Rocm }]);
}

#[test]
fn every_reason_is_listed() {
    let mut desc = LinearDesc::whole(4000, 96);
    desc.options.input_type = InputType::Int8;
    let found = select_linear(&wna16(ScalarType::UINT8B128, 16), &desc, &H100);
    assert_eq!(found.chosen, None);
    let reasons: Vec<_> = found.refusals.iter().map(|r| &r.reason).collect();
    assert!(
        matches!(
            reasons[..],
            [
                Reason::Marlin(MarlinRefusal::GroupSize { .. }),
                Reason::Inputs { inputs: "int8", .. },
                Reason::Marlin(MarlinRefusal::NotMultiple { found: 96, of: 64, .. }),
            ]
        ),
        "{reasons:?}"
    );
}

#[test]
fn linear_layers() {
    let desc = LinearDesc::whole(4096, 11008);
    let chosen = |s: &Scheme, d: &Capability| select_linear(s, &desc, d).chosen;
    let marlin = Some(Backend::MarlinLinear);
    for ty in [ScalarType::UINT4B8, ScalarType::UINT8B128, ScalarType::UINT4] {
        assert_eq!(chosen(&wna16(ty, 128), &A100), marlin);
        assert_eq!(chosen(&wna16(ty, 128), &Capability::cuda(7, 0)), None);
        assert_eq!(chosen(&wna16(ty, 128), &MI300), None);
    }
    assert_eq!(chosen(&wna16(ScalarType::UINT8, 128), &A100), None);
    let fp8 = Scheme::Fp8(Fp8Scheme {
        container: FloatContainer::Fp8,
        strategy: ScaleStrategy::Block { block_n: 128, block_k: 128 },
        activations: ActivationScheme::DynamicGroup(128),
        scale_inv: true,
    });
    assert_eq!(chosen(&fp8, &A100), marlin);
    assert_eq!(chosen(&fp8, &Capability::cuda(8, 6)), marlin);
    let refused = select_linear(&fp8, &desc, &Capability::cuda(8, 9));
    assert_eq!(refused.refusals[0].reason, Reason::NativeFp8 { compute: 89 });
    let options = Options { force_fp8_marlin: true, ..Options::default() };
    let forced = select_linear(&fp8, &LinearDesc { options, ..desc }, &H100);
    assert_eq!(forced.chosen, marlin);
    let nvfp4 = Scheme::Block {
        format: &nvfp4::FORMAT,
        container: FloatContainer::ModelOpt,
        weight_only: true,
    };
    assert_eq!(chosen(&nvfp4, &Capability::cuda(7, 5)), marlin);
    let plain = Scheme::Unquantized { reason: String::new() };
    assert_eq!(select_linear(&plain, &desc, &H100).refusals[0].reason, Reason::Unquantized);
}

#[test]
fn eight_bit_activations() {
    let ada = Capability::cuda(8, 9);
    let desc = |input_type| {
        let options = Options { input_type, ..Options::default() };
        LinearDesc { options, ..LinearDesc::whole(4096, 4096) }
    };
    let container = FloatContainer::CompressedTensors;
    let (mxfp4, nvfp4) = (
        Scheme::Block { format: &mxfp4::FORMAT, container, weight_only: true },
        Scheme::Block { format: &nvfp4::FORMAT, container, weight_only: false },
    );
    let (int4, int8) = (wna16(ScalarType::UINT4B8, 128), wna16(ScalarType::UINT8B128, 128));
    let awq = wna16(ScalarType::UINT4, 128);
    for (scheme, input, device, expected) in [
        (&int4, InputType::Int8, H100, true),
        (&int4, InputType::Fp8, ada, true),
        (&int4, InputType::Fp8, Capability::cuda(12, 0), true),
        (&int4, InputType::Fp8, H100, false),
        (&int8, InputType::Int8, ada, false),
        (&awq, InputType::Int8, ada, false),
        (&mxfp4, InputType::Fp8, ada, true),
        (&mxfp4, InputType::Int8, ada, false),
        (&nvfp4, InputType::Fp8, ada, false),
        (&nvfp4, InputType::Int8, ada, false),
    ] {
        let found = select_linear(scheme, &desc(input), &device);
        assert_eq!(found.chosen.is_some(), expected, "{scheme:?} {input:?} {device}: {found:?}");
    }
}

#[test]
fn wna16_oracle() {
    let base = MoeDesc::new(4096, 14336);
    let batched = MoeParallel { dp_size: 2, use_ep: true, all2all: All2All::DeepEpLowLatency };
    let with = |parallel| MoeDesc { parallel, ..base };
    let all2all = |all2all| with(MoeParallel { all2all, ..batched });
    let (m, b) = (Some(Backend::Marlin), Some(Backend::BatchedMarlin));
    let invariant = Options { batch_invariant: true, ..Options::default() };
    let lora = MoeDesc { lora: true, ..base };
    let relu2 = MoeDesc { activation: MoeActivation::Relu2, ..base };
    let ungated = MoeDesc { activation: MoeActivation::Relu2NoMul, ..base };
    let one_dp = with(MoeParallel { dp_size: 1, ..batched });
    let no_ep = with(MoeParallel { use_ep: false, ..batched });
    let cases = [
        ("plain", base, H100, m),
        ("turing", base, Capability::cuda(7, 5), m),
        ("volta", base, Capability::cuda(7, 0), None),
        ("rocm", base, MI300, None),
        ("low latency", with(batched), H100, b),
        ("nixl", all2all(All2All::NixlEp), H100, b),
        ("high throughput", all2all(All2All::DeepEpHighThroughput), H100, m),
        ("mori", all2all(All2All::Mori), H100, m),
        ("two sided", all2all(All2All::FlashInferNvlinkTwoSided), H100, None),
        ("all2allv", all2all(All2All::FlashInferAll2AllV), H100, None),
        ("one sided", all2all(All2All::FlashInferNvlinkOneSided), H100, None),
        ("one data-parallel rank", one_dp, H100, m),
        ("no expert parallelism", no_ep, H100, m),
        ("batch invariant", MoeDesc { options: invariant, ..base }, H100, None),
        ("lora", lora, H100, m),
        ("lora batched", MoeDesc { lora: true, ..with(batched) }, H100, None),
        ("relu2", relu2, H100, None),
        ("relu2 without gate", ungated, H100, m),
    ];
    for (name, desc, device, expected) in cases {
        let found = select_wna16_moe_backend(WeightKey::Int4, &desc, &device);
        assert_eq!(found.chosen, expected, "{name}: {found:?}");
    }
    // A choice lists every refusal: the other backend's format.
    let found = select_wna16_moe_backend(WeightKey::Int4, &base, &H100);
    assert_eq!(found.refusals.len(), 1);
    assert_eq!(found.refusals[0].backend, Backend::BatchedMarlin);
    assert_eq!(found.refusals[0].reason, Reason::ActivationFormat { format: "standard" });
    let eight = select_wna16_moe_backend(WeightKey::Int8, &base, &H100);
    assert_eq!(eight.chosen, None);
    assert_eq!(eight.refusals.iter().filter(|r| r.reason == Reason::EightBitModular).count(), 2);
}

#[test]
fn activations_and_keys_as_upstream() {
    for &activation in MoeActivation::ALL {
        let desc = MoeDesc { activation, ..MoeDesc::new(128, 64) };
        let found = is_supported_config(Backend::Marlin, WeightKey::Int4, &desc, &H100);
        assert_eq!(found.is_empty(), activation != MoeActivation::Relu2, "{activation:?}");
        assert_eq!(MoeActivation::from_name(activation.name()), Some(activation));
    }
    assert!(MoeActivation::SwigluOai.is_gated() && !MoeActivation::Relu2NoMul.is_gated());
    use WeightKey::*;
    for (key, reads) in [
        (Int4, true),
        (Int8, true),
        (Fp8Tensor, true),
        (Fp8Channel, true),
        (Fp8Block128, true),
        (Block(&mxfp4::FORMAT), true),
        (Block(&mxfp8::FORMAT), true),
        (Block(&nvfp4::FORMAT), true),
        (Fp8OtherBlock, false),
        (IntZeroPoints, false),
        (W8A8Int8, false),
    ] {
        let found = is_supported_config(Backend::Marlin, key, &MoeDesc::new(128, 64), &H100);
        assert_eq!(found.is_empty(), reads, "{key:?}");
    }
}

#[test]
fn moe_layers() {
    let base = MoeDesc::new(2048, 768);
    let lora = MoeDesc { lora: true, ..base };
    let int4 = wna16(ScalarType::UINT4B8, 128);
    let int8 = wna16(ScalarType::UINT8B128, 128);
    let awq = wna16(ScalarType::UINT4, 128);
    let nvfp4 = Scheme::Block {
        format: &nvfp4::FORMAT,
        container: FloatContainer::CompressedTensors,
        weight_only: true,
    };
    let batched = MoeParallel { dp_size: 2, use_ep: true, all2all: All2All::NixlEp };
    let batched = MoeDesc { parallel: batched, ..base };
    for (name, scheme, desc, expected) in [
        ("int4", &int4, base, Some(Backend::FusedMarlinMoe)),
        ("int8", &int8, base, Some(Backend::FusedMarlinMoe)),
        ("awq", &awq, base, Some(Backend::FusedMarlinMoe)),
        ("nvfp4", &nvfp4, base, Some(Backend::Marlin)),
        ("int4 lora", &int4, lora, Some(Backend::Marlin)),
        ("int8 lora", &int8, lora, None),
        ("awq lora", &awq, lora, None),
        ("int4 batched", &int4, batched, Some(Backend::BatchedMarlin)),
        ("int8 batched", &int8, batched, None),
        ("int4 narrow", &int4, MoeDesc::new(2048, 704), None),
    ] {
        let found = select_moe(scheme, &desc, &H100);
        assert_eq!(found.chosen, expected, "{name}: {found:?}");
    }
    let found = select_moe(&int4, &MoeDesc::new(2048, 704), &H100);
    let narrow =
        MarlinRefusal::NotMultiple { what: "intermediate_size_per_partition", found: 704, of: 128 };
    for backend in [Backend::FusedMarlinMoe, Backend::Marlin, Backend::BatchedMarlin] {
        assert!(
            found
                .refusals
                .iter()
                .any(|r| r.backend == backend && r.reason == Reason::Marlin(narrow.clone())),
            "{backend:?}"
        );
    }
    let w4a8 = Scheme::W4A8Int8 {
        group_size: GroupSize::Of(32),
        checkpoint_format: &compressed_tensors::BYTES,
    };
    assert_eq!(select_moe(&w4a8, &base, &H100).chosen, None);
}
