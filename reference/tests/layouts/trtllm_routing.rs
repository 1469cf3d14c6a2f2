//! The router that a layer requests of FlashInfer's kernels, compared with vLLM 0.21.0 and
//! FlashInfer 0.6.8.post1 (`data/flashinfer_facts.json`).

use crate::blackwell::facts;
use marlinspike::Error;
use marlinspike::layouts::flashinfer::{MoeKernel, RoutingMethod, RoutingSizes, Scoring};

#[test]
fn routing_methods_are_upstreams() {
    let facts = facts();
    for row in facts["rows"].as_array().expect("rows") {
        let scoring = Scoring::from_name(row[0].as_str().expect("a name")).unwrap();
        let method = RoutingMethod::of(
            scoring,
            row[1].as_u64().expect("top_k") as usize,
            row[2].as_bool().expect("renormalize"),
            row[3].as_u64().map(|g| g as usize),
            row[4].as_bool().expect("bias"),
        );
        assert_eq!(method.name(), row[5].as_str().expect("a name"), "{row}");
        assert_eq!(Some(method.value()), row[6].as_i64(), "{row}");
    }
    let all = facts["vllm"].as_object().expect("methods");
    assert_eq!(all.len(), RoutingMethod::NAMED.len());
    for (name, method) in RoutingMethod::NAMED {
        assert_eq!(all[name].as_i64(), Some(method.value()), "{name}");
        // FlashInfer has the same numbers; vLLM defines some more.
        let kernels = facts["flashinfer"].get(name).and_then(serde_json::Value::as_i64);
        assert_eq!(kernels, Some(method.value()).filter(|&v| v < 100), "{name}");
    }
    assert!(matches!(Scoring::from_name("relu"), Err(Error::Unsupported { .. })));
}

#[test]
fn kernels_take_the_methods_that_upstream_lists() {
    let facts = facts();
    let listed = [
        ("Nvfp4", MoeKernel::Fp4Block16),
        ("Fp8Block", MoeKernel::Fp8Block),
        ("Fp8Tensor", MoeKernel::Fp8Tensor),
        ("Bf16", MoeKernel::Bf16),
        ("Mxfp4", MoeKernel::Fp4Block32),
    ];
    for (name, kernel) in listed {
        let taken: Vec<&str> = facts["kernels"][name]
            .as_array()
            .expect("a list")
            .iter()
            .map(|m| m.as_str().expect("a name"))
            .collect();
        for (method_name, method) in RoutingMethod::NAMED {
            let found = method.expect_in(kernel);
            assert_eq!(found.is_ok(), taken.contains(&method_name), "{name} {method_name}");
            if let Err(error) = found {
                assert!(matches!(error, Error::Unsupported { .. }));
                assert!(error.to_string().contains(method_name), "{error}");
            }
        }
    }
    // mxint4 receives the layer's method unchanged: all numbers that the runner supports.
    for (name, method) in RoutingMethod::NAMED {
        assert_eq!(method.expect_in(MoeKernel::MxInt4).is_ok(), method.value() < 8, "{name}");
    }
}

/// The sizes of the models that the kernels were written for, and one beyond each limit.
#[test]
fn routers_have_limits() {
    use RoutingMethod::{DeepSeekV3, Llama4, MiniMax2, Renormalize, Unspecified};
    let fits = |method: RoutingMethod, [num_experts, top_k, n_group, topk_group]: [usize; 4]| {
        method.expect_sizes(RoutingSizes { num_experts, top_k, n_group, topk_group })
    };
    for (method, sizes) in [
        (DeepSeekV3, [256, 8, 8, 4]),
        (DeepSeekV3, [384, 8, 1, 1]),
        (DeepSeekV3, [512, 22, 0, 0]),
        (Renormalize, [128, 8, 0, 0]),
        (Renormalize, [4, 4, 0, 0]),
        (Renormalize, [2048, 32, 0, 0]),
        (MiniMax2, [256, 8, 0, 0]),
        (Llama4, [128, 1, 0, 0]),
    ] {
        fits(method, sizes).unwrap_or_else(|e| panic!("{method:?} {sizes:?}: {e}"));
    }
    for (method, sizes, what) in [
        (DeepSeekV3, [256, 23, 8, 4], "top_k"),
        (DeepSeekV3, [256, 8, 8, 5], "topk_group"),
        (DeepSeekV3, [256, 8, 8, 0], "topk_group"),
        (DeepSeekV3, [128, 8, 2, 3], "experts per group"),
        (DeepSeekV3, [64, 8, 2, 3], "topk_group"),
        (DeepSeekV3, [256, 8, 16, 4], "n_group"),
        (DeepSeekV3, [260, 8, 8, 4], "n_group"),
        (DeepSeekV3, [516, 8, 4, 4], "num_experts"),
        (Llama4, [128, 2, 0, 0], "top_k"),
        (Llama4, [132, 1, 0, 0], "num_experts"),
        (Renormalize, [130, 8, 0, 0], "num_experts"),
        (Renormalize, [2052, 8, 0, 0], "num_experts"),
        (Renormalize, [64, 33, 0, 0], "top_k"),
        (Renormalize, [8, 9, 0, 0], "top_k"),
        (Renormalize, [8, 0, 0, 0], "top_k"),
        (Renormalize, [0, 1, 0, 0], "top_k"),
    ] {
        let Err(Error::Size { what: found, .. }) = fits(method, sizes) else {
            panic!("{method:?} takes {sizes:?}");
        };
        assert_eq!(found, format!("{what} of {}", method.name()), "{sizes:?}");
    }
    let none = fits(Unspecified, [128, 8, 0, 0]);
    assert!(matches!(none, Err(Error::Unsupported { .. })));
}
