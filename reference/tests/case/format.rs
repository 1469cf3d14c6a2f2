//! Case files: domains of config keys, rules of tensors, significant values.

use marlinspike::Error;
use marlinspike::case::{Case, CaseConfig, CaseError as E, Op};
use marlinspike::container::{Container, ContainerError, write_container};
use marlinspike::num::tensor::{DType, Tensor};
use proptest::prelude::*;
use serde_json::{Value, json};

/// A tensor of zero bytes.
fn zeros(name: &str, dtype: DType, shape: &[usize]) -> Tensor<'static> {
    let len = shape.iter().product::<usize>() * dtype.bytes();
    Tensor::new(name, dtype, shape.to_vec(), vec![0; len]).unwrap()
}

fn ints(name: &str, shape: &[usize], values: Vec<i32>) -> Tensor<'static> {
    Tensor::from_vec(name, DType::I32, shape.to_vec(), values).unwrap()
}

struct File {
    op: &'static str,
    config: Value,
    tensors: Vec<Tensor<'static>>,
}

impl File {
    fn bytes(&self) -> Vec<u8> {
        let metadata = [
            ("format", "marlinspike-case"),
            ("version", "1"),
            ("op", self.op),
            ("name", "tiny"),
            ("provenance", "made by hand"),
            ("config", &self.config.to_string()),
        ];
        let metadata = metadata.map(|(k, v)| (k.to_owned(), v.to_owned())).into();
        write_container(&self.tensors, &metadata, Vec::new()).unwrap()
    }

    fn error(&self) -> Error {
        Case::parse(&self.bytes()).expect_err("the case was accepted")
    }

    #[track_caller]
    fn ok(&self) {
        let bytes = self.bytes();
        let case = Case::parse(&bytes).unwrap_or_else(|e| panic!("{e}"));
        let written = case.to_bytes().unwrap();
        let again = Case::parse(&written).unwrap();
        assert_eq!(again.config, case.config);
        assert_eq!((&again.inputs, &again.outputs), (&case.inputs, &case.outputs));
        assert_eq!((&again.name, &again.provenance), (&case.name, &case.provenance));
        for (key, value) in &case.raw_config {
            assert!(again.raw_config.get(key) == Some(value), "{key}");
        }
    }

    fn with(mut self, key: &str, value: Value) -> Self {
        self.config[key] = value;
        self
    }

    fn without(mut self, key: &str) -> Self {
        self.config.as_object_mut().unwrap().remove(key);
        self
    }

    /// Adds a tensor, or replaces the one of its name.
    fn tensor(mut self, tensor: Tensor<'static>) -> Self {
        self.tensors.retain(|t| t.name() != tensor.name());
        self.tensors.push(tensor);
        self
    }

    fn drop(mut self, name: &str) -> Self {
        self.tensors.retain(|t| t.name() != name);
        self
    }
}

/// K 32, N 8, group 16, act-order.
fn gptq() -> File {
    File {
        op: "linear",
        config: json!({
            "checkpoint_format": "gptq", "weight_type": "uint4b8", "dtype": "float16",
            "input_dtype": null, "group_size": 16, "desc_act": true, "is_k_full": true,
            "has_bias": true, "size_m": 2, "size_n": 8, "size_k": 32, "note": ["kept"],
        }),
        tensors: vec![
            zeros("in.x", DType::F16, &[2, 32]),
            zeros("in.qweight", DType::I32, &[4, 8]),
            zeros("in.scales", DType::F16, &[2, 8]),
            ints("in.g_idx", &[32], (0..32).map(|k| k % 2).collect()),
            zeros("in.bias", DType::F16, &[8]),
            zeros("out.marlin_qweight", DType::I32, &[2, 16]),
            zeros("out.marlin_scales", DType::F16, &[2, 8]),
            zeros("out.marlin_bias", DType::F16, &[8]),
            zeros("out.g_idx_sort_indices", DType::I32, &[32]),
            zeros("out.sorted_g_idx", DType::I32, &[32]),
            zeros("out.y", DType::F16, &[2, 8]),
        ],
    }
}

fn awq() -> File {
    let mut f = gptq().with("checkpoint_format", json!("awq")).with("weight_type", json!("uint4"));
    f = f.with("desc_act", json!(false)).drop("in.g_idx").drop("out.g_idx_sort_indices");
    f.drop("out.sorted_g_idx")
        .tensor(zeros("in.qweight", DType::I32, &[32, 1]))
        .tensor(zeros("in.qzeros", DType::I32, &[2, 1]))
        .tensor(zeros("out.marlin_zeros", DType::I32, &[2, 1]))
}

fn floats(format: &str, ty: &str, group: i64, tensors: Vec<Tensor<'static>>) -> File {
    let config = json!({
        "checkpoint_format": format, "weight_type": ty, "dtype": "bfloat16", "group_size": group,
        "size_m": 1, "size_n": 8, "size_k": 32,
    });
    File { op: "linear", config, tensors }
}

fn nvfp4() -> File {
    floats(
        "nvfp4",
        "float4_e2m1f",
        16,
        vec![
            zeros("in.weight", DType::U8, &[8, 16]),
            zeros("in.weight_scale", DType::F8E4M3, &[8, 2]),
            zeros("in.weight_global_scale", DType::F32, &[1]),
            zeros("out.marlin_global_scale", DType::F32, &[1]),
            zeros("out.marlin_scales", DType::F8E4M3, &[2, 8]),
        ],
    )
    .with("scale_factor", json!(2.0))
}

fn mx(format: &str, ty: &str, weight: Tensor<'static>, scale: DType) -> File {
    let tensors = vec![
        weight,
        zeros("in.weight_scale", scale, &[8, 1]),
        zeros("out.marlin_scales", DType::U8, &[1, 8]),
    ];
    floats(format, ty, 32, tensors)
}

fn moe() -> File {
    let t = zeros;
    File {
        op: "moe",
        config: json!({
            "checkpoint_format": "gptq", "weight_type": "uint8b128", "dtype": "bfloat16",
            "input_dtype": null, "group_size": -1, "desc_act": false, "is_k_full": true,
            "has_bias": false, "size_m": 3, "num_experts": 4, "top_k": 2, "hidden_size": 32,
            "intermediate_size": 16, "activation": "silu", "scoring_func": "softmax",
            "renormalize": true, "apply_router_weight_on_input": false, "block_size_m": 8,
            "ep_size": 2, "ep_rank": 1,
        }),
        tensors: vec![
            t("in.x", DType::BF16, &[3, 32]),
            t("in.router_logits", DType::F32, &[3, 4]),
            t("in.w13_qweight", DType::I32, &[2, 8, 32]),
            t("in.w13_scales", DType::BF16, &[2, 1, 32]),
            t("in.w2_qweight", DType::I32, &[2, 4, 32]),
            t("in.w2_scales", DType::BF16, &[2, 1, 32]),
            ints("in.expert_map", &[4], vec![-1, -1, 1, 0]),
            t("out.w13_marlin_qweight", DType::I32, &[2, 2, 128]),
            t("out.w2_marlin_qweight", DType::I32, &[2, 1, 128]),
            t("out.w2_marlin_scales", DType::BF16, &[2, 1, 32]),
            t("out.topk_weights", DType::F32, &[3, 2]),
            t("out.topk_ids", DType::I32, &[3, 2]),
            t("out.sorted_token_ids", DType::I32, &[16]),
            t("out.expert_ids", DType::I32, &[2]),
            t("out.num_tokens_post_padded", DType::I32, &[1]),
            t("out.gate_up", DType::BF16, &[6, 32]),
            t("out.activated", DType::BF16, &[6, 16]),
            t("out.down", DType::BF16, &[6, 32]),
            t("out.y", DType::BF16, &[3, 32]),
        ],
    }
}

fn align() -> File {
    File {
        op: "moe_align_block_size",
        config: json!({"block_size": 8, "num_experts": 4, "top_k": 2, "ep_size": 2, "ep_rank": 0}),
        tensors: vec![
            ints("in.topk_ids", &[3, 2], vec![0, 1, 2, 3, 3, 0]),
            ints("in.expert_map", &[4], vec![0, 1, -1, -1]),
            zeros("out.sorted_token_ids", DType::I32, &[16]),
        ],
    }
}

fn router() -> File {
    File {
        op: "router",
        config: json!({
            "scoring_func": "sigmoid", "top_k": 2, "renormalize": true, "use_grouped_topk": true,
            "num_expert_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
        }),
        tensors: vec![
            zeros("in.router_logits", DType::BF16, &[3, 8]),
            zeros("in.e_score_correction_bias", DType::F32, &[8]),
            zeros("out.topk_ids", DType::I32, &[3, 2]),
        ],
    }
}

fn dyn_quant() -> File {
    File {
        op: "dyn_quant_linear",
        config: json!({
            "weight_type": "int4", "dtype": "float32", "group_size": 32, "has_bias": true,
            "size_m": 2, "size_n": 5, "size_k": 64, "activation_rounding": "half_even",
            "packing": {"mr": 4, "nr": 4, "kr": 16, "sr": 2}, "adversarial_rows": ["ties"],
        }),
        tensors: vec![
            zeros("in.x", DType::F32, &[2, 64]),
            zeros("in.weight_u4", DType::U8, &[5, 32]),
            zeros("in.weight_scale", DType::BF16, &[5, 2]),
            zeros("in.bias", DType::F32, &[5]),
            zeros("out.lhs_packed", DType::U8, &[7]),
            zeros("out.y", DType::F32, &[2, 5]),
        ],
    }
}

fn preprocess() -> File {
    File {
        op: "int4_fp8_preprocess",
        config: json!({"checkpoint_format": "awq", "size_k": 8, "size_n": 16}),
        tensors: vec![
            zeros("in.qweight", DType::I32, &[8, 2]),
            zeros("in.qzeros", DType::I32, &[2, 2]),
            zeros("out.qweight", DType::I32, &[8, 2]),
        ],
    }
}

#[test]
fn every_operation_reads_and_writes() {
    for file in [gptq(), awq(), nvfp4(), moe(), align(), router(), dyn_quant(), preprocess()] {
        file.ok();
    }
    for scale in [DType::U8, DType::F8E8M0] {
        mx("mxfp4", "float4_e2m1f", zeros("in.weight", DType::U8, &[8, 16]), scale).ok();
        mx("mxfp8", "float8_e4m3fn", zeros("in.weight", DType::F8E4M3, &[8, 32]), scale).ok();
    }
    // Eight-bit codes, 8-bit activations, channel-wise scales.
    gptq()
        .with("weight_type", json!("uint8b128"))
        .with("desc_act", json!(false))
        .tensor(ints("in.g_idx", &[32], (0..32).map(|k| k / 16).collect()))
        .tensor(zeros("in.qweight", DType::I32, &[8, 8]))
        .tensor(zeros("out.marlin_qweight", DType::I32, &[2, 32]))
        .ok();
    awq()
        .with("input_dtype", json!("int8"))
        .tensor(zeros("in.a_q", DType::I8, &[2, 32]))
        .tensor(zeros("in.a_scales", DType::F32, &[2, 1]))
        .tensor(zeros("out.input_global_scale", DType::F32, &[1]))
        .ok();
    let case_bytes = moe().bytes();
    let case = Case::parse(&case_bytes).unwrap();
    assert_eq!(case.op, Op::Moe);
    assert!(matches!(&case.config, CaseConfig::Moe(c) if c.ep_rank == 1 && c.top_k == 2));
}

/// A row-parallel rank holds the scales of groups that its slice of K does not have.
#[test]
fn a_row_parallel_rank_may_have_any_number_of_groups() {
    let rank = || {
        gptq().tensor(zeros("in.scales", DType::F16, &[5, 8])).tensor(zeros(
            "out.marlin_scales",
            DType::F16,
            &[5, 8],
        ))
    };
    rank()
        .with("is_k_full", json!(false))
        .with("tensor_parallel", json!({"size": 2, "rank": 1, "style": "row"}))
        .ok();
    assert!(matches!(rank().error(), Error::Shape { tensor, .. } if tensor == "in.scales"));
    let column = json!({"size": 2, "rank": 1, "style": "column"});
    assert!(matches!(rank().with("tensor_parallel", column).error(), Error::Shape { .. }));
}

#[test]
fn metadata() {
    let parse = |edit: &dyn Fn(&mut std::collections::BTreeMap<String, String>)| {
        let bytes = gptq().bytes();
        let container = Container::parse(&bytes).unwrap();
        let mut metadata = container.metadata().clone();
        edit(&mut metadata);
        let tensors: Vec<_> = container.tensors().map(|t| t.unwrap()).collect();
        let bytes = write_container(&tensors, &metadata, Vec::new()).unwrap();
        Case::parse(&bytes).map(|c| c.name)
    };
    for key in ["format", "version", "op", "config"] {
        let expected = E::MissingMetadata { key: key.into() };
        assert_eq!(parse(&|m| drop(m.remove(key))).unwrap_err(), Error::from(expected), "{key}");
    }
    // A name is free text.
    assert_eq!(parse(&|m| drop(m.remove("name"))).unwrap(), "");
    let set =
        |key: &str, value: &str| parse(&|m| drop(m.insert(key.into(), value.into()))).unwrap_err();
    assert_eq!(set("format", "pt"), Error::from(E::Format { found: "pt".into() }));
    assert_eq!(set("version", "2"), Error::from(E::Version { found: "2".into() }));
    assert!(
        matches!(set("op", "gemm").downcast_ref(), Some(E::UnknownOp { found, .. }) if found == "gemm")
    );
    for text in ["", "[]", "3", "{", "{} {}", "{\"a\":nan}"] {
        assert!(matches!(set("config", text).downcast_ref(), Some(E::ConfigJson { .. })), "{text}");
    }
    assert_eq!(
        set("config", r#"{"size_k": 32, "size_k": 64}"#),
        Error::from(E::DuplicateConfigKey { key: "size_k".into() })
    );
    assert!(Case::parse(b"nothing").unwrap_err().downcast_ref::<ContainerError>().is_some());
}

#[test]
fn config_values_out_of_their_domain() {
    let bad = |file: File, key: &str| match file.error().downcast_ref() {
        Some(E::ConfigValue { key: found, .. }) => assert_eq!(found, key),
        other => panic!("{key}: {other:?}"),
    };
    for size in [json!(0), json!(-1), json!(1.5), json!("32"), json!(1u64 << 31), json!(u64::MAX)] {
        for key in ["size_m", "size_n", "size_k"] {
            // A product of no rows is empty, and no mistake.
            if (key, &size) == ("size_m", &json!(0)) {
                continue;
            }
            bad(gptq().with(key, size.clone()), key);
        }
    }
    for group in [json!(0), json!(-2), json!("128"), json!(1.0), json!(u64::MAX), json!(i64::MAX)] {
        bad(gptq().with("group_size", group), "group_size");
    }
    bad(gptq().with("size_k", json!(48)).with("group_size", json!(32)), "size_k");
    bad(gptq().with("size_k", json!(24)), "size_k");
    bad(gptq().with("size_n", json!(12)), "size_n");
    bad(gptq().with("checkpoint_format", json!("gguf")), "checkpoint_format");
    bad(gptq().with("weight_type", json!("uint5")), "weight_type");
    bad(gptq().with("dtype", json!("float32")), "dtype");
    bad(gptq().with("input_dtype", json!("int4")), "input_dtype");
    bad(gptq().with("desc_act", json!(1)), "desc_act");
    bad(gptq().with("tensor_parallel", json!(2)), "tensor_parallel");
    let rank = json!({"size": 2, "rank": 2, "style": "row"});
    bad(gptq().with("tensor_parallel", rank), "tensor_parallel.rank");
    let style = json!({"size": 2, "rank": 0, "style": "diagonal"});
    bad(gptq().with("tensor_parallel", style), "tensor_parallel.style");
    bad(moe().with("activation", json!("tanh")), "activation");
    bad(moe().with("ep_rank", json!(2)), "ep_rank");
    bad(dyn_quant().with("packing", json!({"mr": 0})), "packing.mr");
    bad(dyn_quant().with("group_size", json!(48)), "size_k");
    bad(dyn_quant().with("weight_type", json!("uint4")), "weight_type");
    bad(dyn_quant().with("activation_rounding", json!("up")), "activation_rounding");
    bad(preprocess().with("checkpoint_format", json!("fp8")), "checkpoint_format");
    bad(router().with("routed_scaling_factor", json!("2")), "routed_scaling_factor");
    for key in ["weight_type", "dtype", "group_size", "size_m", "size_n", "size_k"] {
        let expected = E::MissingConfigKey { key: key.into(), op: "linear" };
        assert_eq!(gptq().without(key).error(), Error::from(expected));
    }
}

#[test]
fn config_values_that_contradict() {
    let bad = |file: File, key: &str| match file.error().downcast_ref() {
        Some(E::Contradiction { key: found, .. }) => assert_eq!(found, key),
        other => panic!("{key}: {other:?}"),
    };
    bad(gptq().with("weight_type", json!("uint4")), "weight_type");
    bad(nvfp4().with("group_size", json!(32)), "group_size");
    bad(awq().with("desc_act", json!(true)), "desc_act");
    bad(moe().with("top_k", json!(5)), "top_k");
    bad(align().with("ep_size", json!(5)), "ep_size");
    bad(router().with("topk_group", json!(5)), "topk_group");
    bad(router().with("num_expert_group", json!(3)), "num_expert_group");
    bad(router().drop("out.topk_ids").with("top_k", json!(9)), "top_k");
    // Two groups of two experts hold four.
    bad(router().drop("out.topk_ids").with("top_k", json!(5)), "top_k");
}

#[test]
fn tensors_unknown_absent_or_of_another_kind() {
    for name in ["in.qzeros", "out.marlin_zeros", "qweight", "in.", "OUT.y", "in.w13_qweight"] {
        assert!(matches!(
            gptq().tensor(zeros(name, DType::I32, &[1])).error(),
            Error::Unknown { tensor, .. } if tensor == name
        ));
    }
    // Without `has_bias` there is no bias to check.
    assert!(matches!(
        gptq().with("has_bias", json!(false)).error(),
        Error::Unknown { tensor, .. } if tensor == "in.bias"
    ));
    for (file, name) in [
        (gptq(), "in.qweight"),
        (gptq(), "in.scales"),
        (gptq(), "in.g_idx"),
        (gptq(), "in.bias"),
        (awq(), "in.qzeros"),
        (nvfp4(), "in.weight_global_scale"),
        (moe(), "in.w2_qweight"),
        (moe(), "in.expert_map"),
        (align(), "in.topk_ids"),
        (align(), "in.expert_map"),
        (router(), "in.router_logits"),
        (dyn_quant(), "in.weight_scale"),
        (preprocess(), "in.qzeros"),
    ] {
        match file.drop(name).error() {
            Error::Missing { tensor, .. } => assert_eq!(tensor, name),
            other => panic!("{name}: {other:?}"),
        }
    }
    for (file, name, dtype) in [
        (gptq(), "in.qweight", DType::U32),
        (gptq(), "in.scales", DType::BF16),
        (gptq(), "in.g_idx", DType::I64),
        (nvfp4(), "in.weight_scale", DType::U8),
        (dyn_quant(), "in.weight_scale", DType::F32),
    ] {
        let shape: Vec<_> = file.tensors.iter().find(|t| t.name() == name).unwrap().shape().into();
        match file.tensor(zeros(name, dtype, &shape)).error() {
            Error::Dtype { tensor, found, .. } => {
                assert_eq!((tensor.as_str(), found), (name, dtype));
            }
            other => panic!("{name}: {other:?}"),
        }
    }
}

/// Every tensor of every operation, one element longer along each axis in turn. Exceptions are
/// listed: tensors whose length depends on values, and axes that define other tensors' sizes.
#[test]
fn every_axis_is_checked() {
    let free = |name: &str| {
        ["out.sorted_token_ids", "out.expert_ids", "out.lhs_packed", "in.router_logits"]
            .contains(&name)
    };
    let files = [gptq, awq, nvfp4, moe, align, router, dyn_quant, preprocess];
    for make in files {
        for tensor in make().tensors {
            for axis in 0..tensor.shape().len() {
                let (name, mut shape) = (tensor.name(), tensor.shape().to_vec());
                if free(name) || (name, axis) == ("in.topk_ids", 0) {
                    continue;
                }
                shape[axis] += 1;
                if let Some(bare) = name.strip_prefix("out.") {
                    // A wrong output is the checker's verdict.
                    let bytes = make().tensor(zeros(name, tensor.dtype(), &shape)).bytes();
                    let case = Case::parse(&bytes).unwrap();
                    let misfits = case.misfits().unwrap();
                    assert!(misfits.iter().any(|m| m.name == bare), "{name} axis {axis}");
                    continue;
                }
                // Another expert of w13 makes the other tensors wrong; three groups do not divide
                // K.
                let e = make().tensor(zeros(name, tensor.dtype(), &shape)).error();
                assert!(matches!(e, Error::Shape { .. }), "{name} axis {axis}: {e:?}");
            }
        }
    }
}

#[test]
fn values_of_inputs() {
    let bad = |file: File, name: &str, index: &[usize]| match file.error() {
        Error::Value { tensor, index: at, .. } => {
            assert_eq!((tensor.as_str(), at.as_slice()), (name, index));
        }
        other => panic!("{name}: {other:?}"),
    };
    for bits in [0x7e00u16, 0x7c00, 0xfc00] {
        let mut scales = vec![0x3c00; 16];
        scales[11] = bits;
        let t = Tensor::from_vec("in.scales", DType::F16, vec![2, 8], scales).unwrap();
        bad(gptq().tensor(t), "in.scales", &[1, 3]);
    }
    for g in [-1, 2, i32::MIN, i32::MAX] {
        let mut g_idx = vec![0; 32];
        g_idx[7] = g;
        bad(gptq().tensor(ints("in.g_idx", &[32], g_idx.clone())), "in.g_idx", &[7]);
        // Without act-order it must agree with the config.
        let unordered = |g_idx| {
            let file = gptq().tensor(ints("in.g_idx", &[32], g_idx));
            file.with("desc_act", json!(false))
        };
        bad(unordered(g_idx), "in.g_idx", &[7]);
        unordered((0..32).map(|k| k / 16).collect()).ok();
    }
    let mut nan = vec![0u8; 16];
    nan[5] = 0xff;
    let t = Tensor::from_vec("in.weight_scale", DType::F8E4M3, vec![8, 2], nan).unwrap();
    bad(nvfp4().tensor(t), "in.weight_scale", &[2, 1]);
    let e8m0 = Tensor::from_vec("in.weight_scale", DType::U8, vec![8, 1], vec![255u8; 8]).unwrap();
    let weight = zeros("in.weight", DType::U8, &[8, 16]);
    bad(mx("mxfp4", "float4_e2m1f", weight, DType::U8).tensor(e8m0), "in.weight_scale", &[0, 0]);
    let global = vec![f32::INFINITY];
    let t = Tensor::from_vec("in.weight_global_scale", DType::F32, vec![1], global).unwrap();
    bad(nvfp4().tensor(t), "in.weight_global_scale", &[0]);
    for (map, index) in [
        (vec![0, 1, 2, -1], vec![2]),
        (vec![0, 0, -1, -1], vec![1]),
        (vec![-2, 0, 1, -1], vec![0]),
        (vec![0, -1, -1, -1], vec![]),
    ] {
        bad(moe().tensor(ints("in.expert_map", &[4], map)), "in.expert_map", &index);
    }
    // Entries without an expert are skipped.
    for id in [-1, 4] {
        let t = ints("in.topk_ids", &[3, 2], vec![0, 1, 2, id, 3, 0]);
        align().tensor(t).ok();
    }
    bad(align().tensor(ints("in.expert_map", &[4], vec![1, 2, -1, -1])), "in.expert_map", &[1]);
    // Outputs may be arbitrarily wrong.
    let y = Tensor::from_vec("out.y", DType::F16, vec![2, 8], vec![0x7e00u16; 16]).unwrap();
    gptq().tensor(y).ok();
}

#[test]
fn a_stack_of_no_experts() {
    let mut file = moe().tensor(ints("in.expert_map", &[4], vec![-1; 4]));
    for name in ["in.w13_qweight", "in.w13_scales", "in.w2_qweight", "in.w2_scales"] {
        let old = file.tensors.iter().find(|t| t.name() == name).unwrap();
        let mut shape = old.shape().to_vec();
        shape[0] = 0;
        let none = zeros(name, old.dtype(), &shape);
        file = file.tensor(none);
    }
    assert!(matches!(file.error(), Error::Shape { .. }));
}

proptest! {
    /// Reading a damaged file gives a case or an error, and every case that was read can be
    /// written.
    #[test]
    fn damaged_files(
        which in 0usize..8,
        edits in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in proptest::option::of(any::<prop::sample::Index>()),
    ) {
        let make = [gptq, awq, nvfp4, moe, align, router, dyn_quant, preprocess][which];
        let mut bytes = make().bytes();
        // Most mutations change the header.
        let header = bytes.len().min(3000);
        for (at, byte) in edits {
            bytes[at.index(header)] = byte;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        if let Ok(case) = Case::parse(&bytes) {
            prop_assert!(case.to_bytes().is_ok());
        }
    }

    /// Configurations with arbitrary numbers.
    #[test]
    fn damaged_configs(which in 0usize..8, key in any::<prop::sample::Index>(), value in prop_oneof![
        any::<i64>().prop_map(Value::from),
        (-2i64..70).prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        any::<bool>().prop_map(Value::from),
        "[a-z0-9]{0,6}".prop_map(Value::from),
        Just(Value::Null),
    ]) {
        let make = [gptq, awq, nvfp4, moe, align, router, dyn_quant, preprocess][which];
        let file = make();
        let keys: Vec<String> = file.config.as_object().unwrap().keys().cloned().collect();
        let bytes = file.with(&keys[key.index(keys.len())], value).bytes();
        if let Ok(case) = Case::parse(&bytes) {
            prop_assert!(case.to_bytes().is_ok());
        }
    }
}
