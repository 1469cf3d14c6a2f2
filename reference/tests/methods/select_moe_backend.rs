//! The choice of a MoE kernel compared with upstream's oracles, over a lattice of deployments.
//!
//! `scripts/gen/moe_selection.py` made `data/moe_selection.json` by running the oracles of vLLM
//! 0.21.0 with a platform that is plain data.

use std::collections::HashMap;

use marlinspike::config::{CompressedTensorsConfig, FloatContainer, Fp8Config, Module, Scheme};
use marlinspike::formats::nvfp4;
use marlinspike::formats::{mxfp4, mxfp8};
use marlinspike::select::{
    ActivationKey, All2All, Capability, FlashInferBackend, MoeActivation, MoeDeployment, MoeDesc,
    MoeMethod, MoeParallel, MoeQuestion, OracleError, Platform, Reason, RoutingMethod, Runner,
    WeightKey, select_moe_backend,
};
use serde_json::{Value, json};

const UPSTREAM: &str = include_str!("../data/moe_selection.json");

/// One deployment of the lattice: axis to value.
type Point<'a> = HashMap<&'a str, &'a Value>;

fn text<'a>(point: &Point<'a>, axis: &str) -> &'a str {
    point[axis].as_str().unwrap()
}

fn device(name: &str) -> Capability {
    match name.split_once('.') {
        Some((major, minor)) => Capability::cuda(major.parse().unwrap(), minor.parse().unwrap()),
        None if name == "cpu" => Capability::cpu(Platform::CpuX86),
        None => Capability { platform: Platform::Xpu, compute: None },
    }
}

fn named(name: &str) -> MoeMethod {
    MoeMethod::all().find(|m| m.name() == name).unwrap()
}

fn method(name: &str) -> (MoeMethod, WeightKey, ActivationKey) {
    let (method, scheme) = name.split_once(": ").unwrap();
    let (weights, activations) = scheme.split_once(" x ").unwrap();
    let method = named(method);
    let weights = match weights {
        "block128" => WeightKey::Fp8Block128,
        "other_block" => WeightKey::Fp8OtherBlock,
        "channel" => WeightKey::Fp8Channel,
        "tensor" => WeightKey::Fp8Tensor,
        "nvfp4" => WeightKey::Block(&nvfp4::FORMAT),
        "mxfp8" => WeightKey::Block(&mxfp8::FORMAT),
        "int4" => WeightKey::Int4,
        "int8" => WeightKey::Int8,
        other => panic!("{other}"),
    };
    (method, weights, ActivationKey::from_name(activations).unwrap())
}

fn deployment(point: &Point<'_>) -> MoeDeployment {
    let mut desc = MoeDesc::new(4096, 1024);
    desc.activation = MoeActivation::from_name(text(point, "activation")).unwrap();
    desc.lora = point["lora"] == 1;
    let words: Vec<_> = text(point, "parallel").split(' ').collect();
    let use_ep = words.contains(&"ep2");
    desc.parallel = MoeParallel {
        dp_size: if words.contains(&"dp2") { 2 } else { 1 },
        use_ep,
        all2all: words
            .iter()
            .find_map(|w| All2All::from_name(w))
            .unwrap_or(All2All::AllGatherReduceScatter),
    };
    let mut this = MoeDeployment::new(desc);
    this.ep_size = if use_ep { 2 } else { 1 };
    this.enable_eplb = words.contains(&"eplb");
    this.routing = RoutingMethod::from_name(text(point, "routing")).unwrap();
    this.runner = Runner::from_name(text(point, "runner")).unwrap();
    this.allow_vllm_cutlass = point["allow_vllm_cutlass"] == 1;
    this.packages.has_flashinfer = text(point, "packages").contains("flashinfer");
    this.packages.has_deep_gemm = text(point, "packages").contains("deep_gemm");
    for switch in text(point, "switches").split_whitespace() {
        let (name, value) = switch.split_once('=').unwrap();
        let on = Some(value == "1");
        let switches = &mut this.switches;
        match name {
            "VLLM_USE_FLASHINFER_MOE_FP8" => switches.use_flashinfer_moe_fp8 = on,
            "VLLM_USE_FLASHINFER_MOE_FP4" => switches.use_flashinfer_moe_fp4 = on,
            "VLLM_FLASHINFER_MOE_BACKEND" => {
                switches.flashinfer_moe_backend = FlashInferBackend::from_name(value);
            }
            "VLLM_USE_DEEP_GEMM" => switches.use_deep_gemm = on,
            "VLLM_MOE_USE_DEEP_GEMM" => switches.moe_use_deep_gemm = on,
            "VLLM_TEST_FORCE_FP8_MARLIN" => this.desc.options.force_fp8_marlin = true,
            "VLLM_BATCH_INVARIANT" => this.desc.options.batch_invariant = true,
            other => panic!("{other}"),
        }
    }
    this
}

/// The fixture's letter of a reason.
fn letter(reason: &Reason) -> char {
    match reason {
        Reason::Device { .. } => 'D',
        Reason::Ungated => 'U',
        Reason::Activation { .. } => 'A',
        Reason::QuantScheme { .. } => 'Q',
        Reason::ParallelConfig { .. } => 'P',
        Reason::Routing { .. } => 'R',
        Reason::ActivationFormat { .. } => 'F',
        Reason::BatchInvariance => 'B',
        Reason::Lora => 'O',
        other => panic!("no kernel gives the reason {other}"),
    }
}

/// The result in the fixture's form; `classes` are the fixture's, in its order.
fn answer(point: &Point<'_>, classes: &Value) -> String {
    let (method, weights, activations) = method(text(point, "method"));
    let device = device(text(point, "device"));
    let found = select_moe_backend(method, weights, activations, &deployment(point), &device);
    let chosen = match &found.chosen {
        Ok(None) => "none".to_owned(),
        Ok(Some(choice)) => format!("{}/{}", choice.backend.name(), choice.experts),
        Err(OracleError::Runner { .. }) => "!runner".to_owned(),
        Err(OracleError::CutlassDisabled) => "!cutlass".to_owned(),
        Err(OracleError::Refused { .. }) => "!refused".to_owned(),
        Err(OracleError::LibraryBackend { .. }) => "!flashinfer_backend".to_owned(),
        Err(OracleError::NoLibraryBackend { .. }) => "!flashinfer".to_owned(),
        Err(OracleError::NoBackend { .. }) => "!none".to_owned(),
        Err(other) => panic!("{other}"),
    };
    let mut letters = String::new();
    for class in classes[method.name()].as_array().unwrap() {
        let (backend, experts) = class.as_str().unwrap().split_once('/').unwrap();
        let refusal = found
            .refusals
            .iter()
            .find(|r| r.class.backend.name() == backend && r.class.experts == experts);
        letters.push(refusal.map_or('.', |r| letter(&r.reasons[0])));
    }
    format!("{chosen} {letters}")
}

#[test]
fn every_deployment_of_the_lattice() {
    let upstream: Value = serde_json::from_str(UPSTREAM).unwrap();
    let base: Point<'_> =
        upstream["base"].as_object().unwrap().iter().map(|(k, v)| (k.as_str(), v)).collect();
    let mut asked = 0;
    for section in upstream["sections"].as_array().unwrap() {
        let axes: Vec<_> = section["axes"].as_object().unwrap().iter().collect();
        // The generator's order of axes; an object's keys come sorted.
        let order = section["order"].as_array().unwrap();
        let axes: Vec<_> = order
            .iter()
            .map(|name| {
                let (_, values) = axes.iter().find(|(axis, _)| *axis == name).unwrap();
                (name.as_str().unwrap(), values.as_array().unwrap())
            })
            .collect();
        for (i, expected) in section["answers"].as_array().unwrap().iter().enumerate() {
            let (mut point, mut rest) = (base.clone(), i);
            for (axis, values) in axes.iter().rev() {
                point.insert(axis, &values[rest % values.len()]);
                rest /= values.len();
            }
            let expected = &upstream["outcomes"][expected.as_u64().unwrap() as usize];
            let found = answer(&point, &upstream["classes"]);
            assert_eq!(found, expected.as_str().unwrap(), "{point:?}");
            asked += 1;
        }
    }
    assert_eq!(asked, 8664);
}

#[test]
fn the_tables_hold_upstreams_classes() {
    let upstream: Value = serde_json::from_str(UPSTREAM).unwrap();
    for method in MoeMethod::all() {
        let mut expected: Vec<_> = upstream["classes"][method.name()].as_array().unwrap().to_vec();
        let mut found: Vec<Value> = Vec::new();
        for row in method.table().rows {
            for experts in row.experts {
                found.push(format!("{}/{}", row.backend.name(), experts.name).into());
            }
        }
        let key = |v: &Value| v.as_str().unwrap().to_owned();
        expected.sort_by_key(key);
        found.sort_by_key(key);
        assert_eq!(found, expected);
    }
}

#[test]
fn refusals_say_what_would_do() {
    let deployment = MoeDeployment::new(MoeDesc::new(4096, 1024));
    let ask = |method, weights, activations, deployment: &MoeDeployment, device: Capability| {
        select_moe_backend(method, weights, activations, deployment, &device)
    };
    let block = (WeightKey::Fp8Block128, ActivationKey::Fp8Dynamic128);
    let found = ask(MoeMethod::Fp8, block.0, block.1, &deployment, Capability::cuda(7, 0));
    assert_eq!(found.chosen, Err(OracleError::NoBackend { method: "fp8" }));
    let marlin = found.refusals.iter().find(|r| r.class.experts == "MarlinExperts").unwrap();
    assert_eq!(
        marlin.reasons[0].to_string(),
        "kernel does not support current device CUDA 7.0, expected CUDA 7.5 or newer"
    );
    let deep = found.refusals.iter().find(|r| r.class.experts.contains("DeepGemm")).unwrap();
    assert_eq!(
        deep.reasons[0].to_string(),
        "kernel does not support current device CUDA 7.0, \
         expected CUDA 9.0 or CUDA 10.x with DeepGEMM, not switched off"
    );
    // A backend that was requested by name is not replaced.
    let wish = MoeDeployment { runner: Runner::Marlin, ..deployment };
    let found = ask(
        named("mxfp8"),
        WeightKey::Block(&mxfp8::FORMAT),
        ActivationKey::Block(&mxfp8::FORMAT),
        &wish,
        device("7.0"),
    );
    assert!(matches!(found.chosen, Err(OracleError::Refused { .. })), "{found:?}");
    let wish = MoeDeployment { runner: Runner::Triton, ..deployment };
    let found = ask(
        named("mxfp8"),
        WeightKey::Block(&mxfp8::FORMAT),
        ActivationKey::Block(&mxfp8::FORMAT),
        &wish,
        device("9.0"),
    );
    assert_eq!(
        found.chosen.unwrap_err().to_string(),
        "moe_backend \"triton\" is not supported for mxfp8 MoE, expected flashinfer_trtllm, marlin"
    );
    // ROCm is not in the table: an error, not a guess.
    let mi300 = Capability { platform: Platform::Rocm, compute: Some((9, 4)) };
    let found = ask(MoeMethod::Fp8, block.0, block.1, &deployment, mi300);
    assert_eq!(found.chosen, Err(OracleError::Platform { platform: Platform::Rocm }));
}

/// The backend that runs experts of `scheme`, with the query of their method.
fn backend(scheme: &Scheme, device: Capability) -> &'static str {
    let question = MoeQuestion::of(scheme).unwrap();
    let deployment = MoeDeployment {
        allow_vllm_cutlass: question.allow_vllm_cutlass,
        ..MoeDeployment::new(MoeDesc::new(7168, 2048))
    };
    let MoeQuestion { method, weights, activations, .. } = question;
    let found = select_moe_backend(method, weights, activations, &deployment, &device);
    found.chosen.unwrap().unwrap().backend.name()
}

#[test]
fn from_a_models_config_to_its_kernel() {
    let [turing, ampere, ada, hopper, blackwell] =
        [(7, 5), (8, 0), (8, 9), (9, 0), (10, 0)].map(|(a, b)| Capability::cuda(a, b));
    let module = Module::in_checkpoint("model.layers.0.mlp.experts.0.gate_proj");
    let fp8 = |config: Value| Fp8Config::from_value(&config).unwrap().scheme_for(&module).unwrap();
    let block = fp8(json!({
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    }));
    assert_eq!(backend(&block, turing), "MARLIN");
    assert_eq!(backend(&block, ampere), "MARLIN");
    assert_eq!(backend(&block, ada), "TRITON");
    assert_eq!(backend(&block, hopper), "TRITON");
    assert_eq!(backend(&block, blackwell), "FLASHINFER_TRTLLM");
    let tensor = fp8(json!({"quant_method": "fp8", "activation_scheme": "dynamic"}));
    assert_eq!(backend(&tensor, hopper), "TRITON");

    let compressed = |weights: &str, inputs: &str| {
        let args = |strategy: &str, dynamic: bool| {
            json!({"num_bits": 8, "type": "float", "symmetric": true, "strategy": strategy,
                   "dynamic": dynamic})
        };
        let config = json!({
            "quant_method": "compressed-tensors", "format": "float-quantized",
            "config_groups": {"group_0": {
                "targets": ["Linear"], "weights": args(weights, false),
                "input_activations": args(inputs, true),
            }},
        });
        CompressedTensorsConfig::from_value(&config).unwrap().scheme_for(&module).unwrap()
    };
    let channel = compressed("channel", "token");
    assert_eq!(backend(&channel, ada), "TRITON");
    assert_eq!(backend(&channel, hopper), "VLLM_CUTLASS");
    // Upstream's key for dynamic tensor-wise activations is that of groups of 128.
    let dynamic_tensor = compressed("tensor", "tensor");
    assert_eq!(backend(&dynamic_tensor, hopper), "MARLIN");
    assert_eq!(backend(&dynamic_tensor, blackwell), "MARLIN");
    // Per-token activations go with channels, not with one scale for a tensor.
    assert_eq!(MoeQuestion::of(&compressed("tensor", "token")), None);

    let container = FloatContainer::CompressedTensors;
    let nvfp4 = |weight_only| Scheme::Block { format: &nvfp4::FORMAT, container, weight_only };
    assert_eq!(backend(&nvfp4(false), hopper), "MARLIN");
    assert_eq!(backend(&nvfp4(false), blackwell), "FLASHINFER_TRTLLM");
    assert_eq!(backend(&nvfp4(true), blackwell), "MARLIN");
    assert_eq!(
        backend(&Scheme::Block { format: &mxfp8::FORMAT, container, weight_only: true }, hopper),
        "MARLIN"
    );
    assert_eq!(
        MoeQuestion::of(&Scheme::Block { format: &mxfp4::FORMAT, container, weight_only: true }),
        None
    );
}
