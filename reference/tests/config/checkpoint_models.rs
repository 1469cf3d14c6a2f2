//! Small model folders packed by public packages, compared with the weights that the packages
//! dequantize.

use marlinspike::container::Container;
use marlinspike::formats::awq::AwqTensors;
use marlinspike::formats::compressed_tensors::{ByteTensors, PackedTensors};
use marlinspike::formats::fp8::{Fp8Scales, Fp8Tensors};
use marlinspike::formats::global_scale::GlobalStorage;
use marlinspike::formats::global_scale::{GlobalScale, Shards};
use marlinspike::formats::gptq::{GptqTensors, ZeroPoints};
use marlinspike::formats::integers::IntStorage;
use marlinspike::formats::mxfp4::Mxfp4Tensors;
use marlinspike::formats::mxfp8::Mxfp8Tensors;
use marlinspike::formats::nvfp4::Nvfp4Tensors;
use marlinspike::num::dims::GroupSize::{self, Channel, Of};
use marlinspike::num::tensor::Tensor;
use marlinspike::weight::Weight;
use marlinspike_golden::Manifest;

/// The shard of golden model `name` that holds tensor `needle`, and the expected weights.
fn files(name: &str, needle: &str) -> (Vec<u8>, Vec<u8>) {
    let manifest = Manifest::load().unwrap();
    let entry = manifest.checkpoint(name).unwrap();
    let read = |path: &str| std::fs::read(manifest.path(path)).unwrap();
    let shard = entry
        .files
        .iter()
        .filter(|f| f.path.ends_with(".safetensors"))
        .map(|f| read(&f.path))
        .find(|bytes| Container::parse(bytes).unwrap().get(needle).is_some())
        .unwrap_or_else(|| panic!("{name} has no {needle}"));
    let expected = entry.expected.iter().find(|f| f.path.ends_with(".safetensors")).unwrap();
    (shard, read(&expected.path))
}

/// Unpacks module `module` of a golden model and compares every element. The packages compute in
/// f32; each of several products rounds once.
fn compare(
    model: &str,
    module: &str,
    needle: &str,
    unpack: impl for<'a> Fn(&dyn Fn(&str) -> Tensor<'a>) -> marlinspike::Result<Weight<'a>>,
) {
    let (file, expected) = files(model, needle);
    let (file, expected) = (Container::parse(&file).unwrap(), Container::parse(&expected).unwrap());
    let weight = unpack(&|suffix| file.tensor(&format!("{module}.{suffix}")).unwrap());
    let weight = weight.unwrap_or_else(|e| panic!("{model}: {e}"));
    let expected = expected.tensor(&format!("{module}.weight")).unwrap();
    let [n, k] = expected.dims2().unwrap();
    assert_eq!((weight.shape().size_n, weight.shape().size_k), (n, k), "{model}");
    let values = expected.elements::<f32>();
    for nn in 0..n {
        for kk in 0..k {
            let (found, expected) = (weight.dequantize(kk, nn), f64::from(values[nn * k + kk]));
            let error = (found - expected).abs();
            assert!(
                error <= expected.abs() * 2f64.powi(-22),
                "{model} [{nn}, {kk}]: {found} is not {expected}"
            );
        }
    }
}

const K_PROJ: &str = "model.layers.0.self_attn.k_proj";

fn needle(suffix: &str) -> String {
    format!("{K_PROJ}.{suffix}")
}

fn gptq(model: &str, bits: u32, group: usize, desc_act: bool, zeros: ZeroPoints) {
    let group_size = Of(group);
    let scheme = IntStorage { bits, group_size, symmetric: true, act_order: desc_act };
    compare(model, K_PROJ, &needle("qweight"), |t| {
        GptqTensors {
            qweight: t("qweight"),
            scales: t("scales"),
            qzeros: Some(t("qzeros")),
            g_idx: Some(t("g_idx")),
            bias: None,
        }
        .unpack(model, &scheme, zeros)
    });
}

#[test]
fn gptq_models() {
    gptq("gptq-actorder", 4, 32, true, ZeroPoints::V1);
    gptq("gptq-v2-8bit", 8, 64, false, ZeroPoints::V2);
    gptq("gptq-dynamic", 8, 32, false, ZeroPoints::V1);
}

#[test]
fn awq_model() {
    compare("awq", K_PROJ, &needle("qweight"), |t| {
        let (qweight, scales, qzeros) = (t("qweight"), t("scales"), t("qzeros"));
        AwqTensors { qweight, scales, qzeros, bias: None }.unpack("awq", 4, Of(64))
    });
}

#[test]
fn compressed_tensors_models() {
    let scheme = |group_size: GroupSize, act_order| IntStorage {
        bits: 4,
        group_size,
        symmetric: true,
        act_order,
    };
    let packed = |model: &str, module: &str, act_order: bool| {
        compare(model, module, &format!("{module}.weight_packed"), |t| {
            PackedTensors {
                weight_packed: t("weight_packed"),
                weight_scale: t("weight_scale"),
                weight_zero_point: None,
                weight_shape: Some(t("weight_shape")),
                weight_g_idx: act_order.then(|| t("weight_g_idx")),
                bias: None,
            }
            .unpack(model, &scheme(Of(32), act_order))
        });
    };
    packed("ct-pack-actorder", K_PROJ, true);
    packed("ct-pack-moe", "model.layers.0.mlp.experts.1.down_proj", false);
    for (module, group) in
        [(K_PROJ, Channel), ("model.layers.0.block_sparse_moe.experts.0.w2", Of(32))]
    {
        compare("ct-int-w4a8-moe", module, &format!("{module}.weight"), |t| {
            ByteTensors {
                weight: t("weight"),
                weight_scale: t("weight_scale"),
                weight_zero_point: None,
                weight_g_idx: None,
                bias: None,
            }
            .unpack(module, &scheme(group, false))
        });
    }
}

#[test]
fn fp8_models() {
    compare("ct-fp8-channel", K_PROJ, &needle("weight"), |t| {
        Fp8Tensors { weight: t("weight"), weight_scale: t("weight_scale"), bias: None }
            .unpack("fp8", &Fp8Scales::Channel)
    });
    compare("fp8-block", K_PROJ, &needle("weight"), |t| {
        let scheme = Fp8Scales::Block { block_n: 128, block_k: 128 };
        Fp8Tensors { weight: t("weight"), weight_scale: t("weight_scale_inv"), bias: None }
            .unpack("fp8", &scheme)
    });
    // Experts.
    let w2 = "model.layers.0.block_sparse_moe.experts.1.w2";
    compare("ct-fp8-moe", w2, &format!("{w2}.weight"), |t| {
        let widths = vec![128];
        Fp8Tensors { weight: t("weight"), weight_scale: t("weight_scale"), bias: None }
            .unpack("fp8", &Fp8Scales::Tensor { widths })
    });
    let down = "model.layers.0.mlp.experts.1.down_proj";
    compare("fp8-block-moe", down, &format!("{down}.weight"), |t| {
        let scheme = Fp8Scales::Block { block_n: 128, block_k: 128 };
        Fp8Tensors { weight: t("weight"), weight_scale: t("weight_scale_inv"), bias: None }
            .unpack("fp8", &scheme)
    });
}

#[test]
fn microscaled_models() {
    compare("ct-mxfp8", K_PROJ, &needle("weight"), |t| {
        Mxfp8Tensors { weight: t("weight"), weight_scale: t("weight_scale"), bias: None }
            .unpack("mxfp8")
    });
    compare("ct-mxfp4", K_PROJ, &needle("weight_packed"), |t| {
        Mxfp4Tensors { weight: t("weight_packed"), weight_scale: t("weight_scale"), bias: None }
            .unpack("mxfp4")
    });
    let w2 = "model.layers.0.block_sparse_moe.experts.1.w2";
    for (model, module) in [("ct-nvfp4", K_PROJ), ("ct-nvfp4-moe", w2)] {
        compare(model, module, &format!("{module}.weight_packed"), |t| {
            Nvfp4Tensors {
                weight: t("weight_packed"),
                weight_scale: t("weight_scale"),
                weight_global_scale: t("weight_global_scale"),
                bias: None,
            }
            .unpack("nvfp4", GlobalStorage { global: GlobalScale::Divisor, shards: Shards::Equal })
        });
    }
}

/// gpt-oss stacks its experts; the expected file has the first.
#[test]
fn gpt_oss_model() {
    let stack = "model.layers.0.mlp.experts.down_proj";
    let (file, expected) = files("gpt-oss-mxfp4", &format!("{stack}_blocks"));
    let (file, expected) = (Container::parse(&file).unwrap(), Container::parse(&expected).unwrap());
    let first = |suffix: &str| {
        let all = file.tensor(&format!("{stack}_{suffix}")).unwrap();
        all.index0(0).unwrap().into_owned()
    };
    let tensors = Mxfp4Tensors::from_blocks(first("blocks"), first("scales"), None).unwrap();
    let weight = tensors.unpack("expert 0").unwrap();
    let expected = expected.tensor(&format!("{stack}.0.weight")).unwrap();
    let [n, k] = expected.dims2().unwrap();
    assert_eq!((weight.shape().size_n, weight.shape().size_k), (n, k));
    let values = expected.elements::<f32>();
    for nn in 0..n {
        for kk in 0..k {
            assert_eq!(weight.dequantize(kk, nn), f64::from(values[nn * k + kk]), "[{nn}, {kk}]");
        }
    }
}
