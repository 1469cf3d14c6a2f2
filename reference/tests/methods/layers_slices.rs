//! The ranks' slices of a cut parameter cover the full tensor exactly once; replicated parameters
//! are the whole tensor on every rank.

use std::ops::Range;

use marlinspike::Error;
use marlinspike::config::{
    ActivationScheme, CompressedTensorsConfig, FloatContainer, Fp8Scheme, GptqParams, Module,
    ScaleStrategy,
};
use marlinspike::formats::nvfp4;
use marlinspike::layers::slices::{ExpertMatrix, Slice, expert, linear};
use marlinspike::layers::{
    ActOrderRule, CtWna16Moe, ExpertPlacement, LayerError, LayerParams, LinearShard, MoeShard,
    ParamSpec, Wna16Kernel, ct_block_moe, ct_fp8_moe, ct_wna16_moe, determine_expert_map,
    fp8_linear, gptq_linear, gptq_moe,
};
use marlinspike::num::dims::GroupSize;
use marlinspike::num::scalar::ScalarType;
use marlinspike::num::tensor::DType;
use marlinspike::select::Capability;
use proptest::prelude::*;
use serde_json::json;

fn gptq(bits: u32, group_size: GroupSize, desc_act: bool) -> GptqParams {
    let weight_type = if bits == 4 { ScalarType::UINT4B8 } else { ScalarType::UINT8B128 };
    GptqParams { bits, group_size, desc_act, sym: true, weight_type }
}

/// The number of slices that cover each element of a matrix.
fn coverage(shape: &[usize], parts: &[Vec<Range<usize>>]) -> Vec<u32> {
    let (rows, cols) = (shape[0], shape.get(1).copied().unwrap_or(1));
    let mut count = vec![0; rows * cols];
    for part in parts {
        for r in part[0].clone() {
            for c in part.get(1).cloned().unwrap_or(0..1) {
                count[r * cols + c] += 1;
            }
        }
    }
    count
}

fn extent(ranges: &[Range<usize>]) -> Vec<usize> {
    ranges.iter().map(ExactSizeIterator::len).collect()
}

fn check_sizes(slice: &Slice, spec: &ParamSpec, local: &[usize]) {
    let mut source = extent(&slice.source);
    if slice.transpose {
        source.reverse();
    }
    assert_eq!(source, extent(&slice.dest), "{}", spec.name);
    for (range, &d) in slice.dest.iter().zip(local) {
        assert!(range.end <= d, "{}: {slice:?} in {local:?}", spec.name);
    }
}

/// All ranks' slices of every tensor of a MoE layer, `full_shape` being the file's.
fn check_moe(
    make: impl Fn(&MoeShard) -> LayerParams,
    whole: &MoeShard,
    tp: usize,
    repeated: impl Fn(&ParamSpec) -> bool,
) {
    let mut shard = *whole;
    shard.tp_size = tp;
    shard.intermediate_size_per_partition = whole.intermediate_size_full / tp;
    let (full, local) = (make(whole), make(&shard));
    for (f, l) in full.params.iter().zip(&local.params) {
        assert_eq!(f.name, l.name);
        let matrices: &[ExpertMatrix] = if l.name.starts_with("w2_") {
            &[ExpertMatrix::W2]
        } else {
            &[ExpertMatrix::W1, ExpertMatrix::W3]
        };
        for &matrix in matrices {
            // The file's tensor: one matrix of the layer on a single rank.
            let mut file: Vec<usize> = f.shape[1..].to_vec();
            let is_index = l.name.contains("g_idx") || l.name.contains("weight_shape");
            if matrices.len() == 2 && !is_index {
                let out = if f.is_transposed { file.len() - 1 } else { 0 };
                if !file.is_empty() {
                    file[out] /= 2;
                }
            }
            if f.transpose_on_load && file.len() == 2 {
                file.reverse();
            }
            let mut sources = Vec::new();
            for rank in 0..tp {
                let Some(slice) = expert(l, &shard, matrix, &file, rank).unwrap() else { continue };
                check_sizes(&slice, l, &l.shape[1..]);
                sources.push(slice.source);
            }
            if sources.is_empty() || file.is_empty() {
                continue;
            }
            let times = if repeated(l) { tp as u32 } else { 1 };
            let found = coverage(&file, &sources);
            assert!(found.iter().all(|&c| c == times), "{} {matrix:?} {file:?}", l.name);
        }
    }
}

proptest! {
    #[test]
    fn gptq_experts_add_up(
        tp in prop::sample::select(vec![1usize, 2, 4]), bits in prop::sample::select(vec![4u32, 8]),
        group in prop::sample::select(vec![-1i64, 32, 64]), desc_act: bool,
        h in 1usize..3, i in 1usize..3,
    ) {
        let group = GroupSize::from_config(group).unwrap();
        let desc_act = desc_act && group != GroupSize::Channel;
        let params = gptq(bits, group, desc_act);
        let whole = MoeShard::new(2, 128 * h, 256 * i, 1).unwrap();
        check_moe(|s| gptq_moe(&params, s, false).unwrap(), &whole, tp, |p| {
            let w2_scale = p.name == "w2_scales" || p.name == "w2_qzeros";
            p.name == "w13_g_idx" || w2_scale && (desc_act || group == GroupSize::Channel)
        });
    }

    #[test]
    fn compressed_tensors_experts_add_up(
        tp in prop::sample::select(vec![1usize, 2, 4]), flashinfer: bool, act_order: bool,
        h in 1usize..3, i in 1usize..3,
    ) {
        let act_order = act_order && !flashinfer;
        let config = json!({"format": "pack-quantized", "config_groups": {"g": {
            "targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group",
            "group_size": 32, "actorder": act_order.then_some("group")}}}});
        let config = CompressedTensorsConfig::from_value(&config).unwrap();
        let group = config.group_for(&Module::in_checkpoint("m")).unwrap().unwrap();
        let kernel = if flashinfer { Wna16Kernel::TRTLLM_MXINT4 } else { Wna16Kernel::MARLIN };
        let settings = CtWna16Moe {
            weights: &group.weights, kernel, act_order_rule: ActOrderRule::GroupOnly,
        };
        let whole = MoeShard::new(2, 128 * h, 256 * i, 1).unwrap();
        check_moe(|s| ct_wna16_moe(&settings, s).unwrap(), &whole, tp, |p| {
            p.name.ends_with("weight_shape") || p.name == "w13_weight_g_idx"
                || p.name == "w2_weight_scale" && act_order
        });
    }

    #[test]
    fn float_experts_add_up(tp in prop::sample::select(vec![1usize, 2]), h in 1usize..4) {
        let whole = MoeShard::new(2, 64 * h, 512, 1).unwrap();
        check_moe(|s| ct_block_moe(&nvfp4::FORMAT, s).unwrap(), &whole, tp, |p| p.name.contains("global"));
        for strategy in [
            ScaleStrategy::Channel, ScaleStrategy::Block { block_n: 64, block_k: 128 },
        ] {
            let container = FloatContainer::CompressedTensors;
            let activations = ActivationScheme::DynamicToken;
            let scheme = Fp8Scheme { container, strategy, activations, scale_inv: false };
            check_moe(|s| ct_fp8_moe(&scheme, s).unwrap(), &whole, tp, |p| {
                p.name == "w2_weight_scale" && strategy == ScaleStrategy::Channel
            });
        }
    }

    /// Merged columns: parts lie one after the other, ranks cut each part evenly; with fewer
    /// key heads than ranks, consecutive ranks share a slice.
    #[test]
    fn linear_columns_add_up(
        tp in prop::sample::select(vec![1usize, 2, 4]), desc_act: bool,
        group in prop::sample::select(vec![-1i64, 32, 128]),
    ) {
        let shard = LinearShard::qkv(256, 64, 8, 2, tp).unwrap();
        let params = gptq(4, GroupSize::from_config(group).unwrap(), desc_act && group != -1);
        let device = Capability::cuda(8, 0);
        let list = gptq_linear(&params, &shard, DType::F16, false, &device).unwrap();
        for spec in &list.params {
            for (part, p) in shard.parts.iter().enumerate() {
                let mut file = spec.shape.clone();
                if let Some(d) = spec.output_dim {
                    file[d] = if spec.packed.is_some_and(|p| p.dim == d) { p.full / 8 } else { p.full };
                }
                let slices: Vec<_> =
                    (0..tp).map(|r| linear(spec, &shard, part, &file, r).unwrap()).collect();
                for s in &slices {
                    check_sizes(s, spec, &spec.shape);
                }
                let times = if spec.output_dim.is_some() { p.replicas } else { tp } as u32;
                let sources: Vec<_> = slices.iter().map(|s| s.source.clone()).collect();
                prop_assert!(coverage(&file, &sources).iter().all(|&c| c == times), "{}", spec.name);
            }
            // On one rank, the parts fill the parameter without overlap.
            if spec.output_dim.is_some() {
                let dests: Vec<_> = shard.parts.iter().enumerate().map(|(part, p)| {
                    let mut file = spec.shape.clone();
                    let d = spec.output_dim.unwrap();
                    file[d] = if spec.packed.is_some_and(|p| p.dim == d) { p.full / 8 } else { p.full };
                    linear(spec, &shard, part, &file, 0).unwrap().dest
                }).collect();
                prop_assert!(coverage(&spec.shape, &dests).iter().all(|&c| c == 1), "{}", spec.name);
            }
        }
    }

    #[test]
    fn experts_have_one_home(n in 0usize..200, ep in 1usize..20, robin: bool) {
        let placement = if robin { ExpertPlacement::RoundRobin } else { ExpertPlacement::Linear };
        let mut homes = vec![0; n];
        let mut sizes = Vec::new();
        for rank in 0..ep {
            let map = determine_expert_map(ep, rank, n, placement).unwrap();
            sizes.push(map.local_num_experts);
            prop_assert_eq!(map.global_ids.len(), map.local_num_experts);
            for (local, &global) in map.global_ids.iter().enumerate() {
                homes[global] += 1;
                if let Some(m) = &map.map {
                    prop_assert_eq!(m[global], local as i32);
                }
            }
        }
        prop_assert!(homes.iter().all(|&h| h == 1));
        prop_assert!(sizes.iter().max().unwrap() - sizes.iter().min().unwrap() <= 1);
    }
}

#[test]
fn row_parallel_act_order_keeps_all_scales() {
    let shard = LinearShard::row(512, 128, 2).unwrap();
    let device = Capability::cuda(8, 0);
    let params = gptq(4, GroupSize::Of(128), true);
    let list = gptq_linear(&params, &shard, DType::F16, false, &device).unwrap();
    let get = |name: &str, file: &[usize], rank| {
        linear(list.get(name).unwrap(), &shard, 0, file, rank).unwrap().source
    };
    assert_eq!(get("qweight", &[64, 128], 1), [32..64, 0..128]);
    assert_eq!(get("g_idx", &[512], 1), vec![256..512]);
    assert_eq!(get("scales", &[4, 128], 1), [0..4, 0..128]);
    let plain = gptq(4, GroupSize::Of(128), false);
    let list = gptq_linear(&plain, &shard, DType::F16, false, &device).unwrap();
    let scales = linear(list.get("scales").unwrap(), &shard, 0, &[4, 128], 1).unwrap();
    assert_eq!(scales.source, [2..4, 0..128]);
}

#[test]
fn block_scales_of_merged_columns() {
    let scheme = Fp8Scheme {
        container: FloatContainer::Fp8,
        strategy: ScaleStrategy::Block { block_n: 128, block_k: 128 },
        activations: ActivationScheme::DynamicGroup(128),
        scale_inv: true,
    };
    let shard = LinearShard::column(256, &[512, 256], 2).unwrap();
    let list = fp8_linear(&scheme, &shard).unwrap();
    let spec = list.get("weight_scale_inv").unwrap();
    let slice = linear(spec, &shard, 1, &[2, 2], 1).unwrap();
    assert_eq!(slice.source, [1..2, 0..2]);
    assert_eq!(slice.dest, [2..3, 0..2]);
}

#[test]
fn wrong_files_are_refused() {
    let shard = LinearShard::column(256, &[128], 2).unwrap();
    let params = gptq(4, GroupSize::Of(128), false);
    let list = gptq_linear(&params, &shard, DType::F16, false, &Capability::cuda(8, 0)).unwrap();
    let qweight = list.get("qweight").unwrap();
    // Larger than the layer: upstream would take a part of it.
    for file in [&[32, 256][..], &[32, 64], &[33, 128], &[32], &[32, 128, 1], &[]] {
        match linear(qweight, &shard, 0, file, 1) {
            Err(Error::Shape { tensor, found, expected }) => {
                assert_eq!((tensor.as_str(), found.as_slice()), ("qweight", file));
                assert_eq!(expected, "[32, 128]");
            }
            other => panic!("{file:?}: {other:?}"),
        }
    }
    assert!(matches!(
        linear(qweight, &shard, 0, &[32, 128], 2).unwrap_err().downcast_ref(),
        Some(LayerError::Rank { rank: 2, size: 2, .. })
    ));
    assert!(matches!(linear(qweight, &shard, 1, &[32, 128], 0), Err(Error::Size { .. })));

    let moe = MoeShard::new(2, 128, 128, 2).unwrap();
    let list = gptq_moe(&params, &MoeShard { tp_size: 1, ..moe }, false);
    assert!(list.is_err(), "64 rows are not whole groups of 128");
    let params = gptq(4, GroupSize::Of(32), false);
    let list = gptq_moe(&params, &moe, false).unwrap();
    let w2 = list.get("w2_qweight").unwrap();
    let slice = expert(w2, &moe, ExpertMatrix::W2, &[16, 128], 1).unwrap().unwrap();
    assert_eq!(slice.source, [8..16, 0..128]);
    assert!(matches!(expert(w2, &moe, ExpertMatrix::W2, &[16, 129], 1), Err(Error::Shape { .. })));
    assert!(matches!(
        expert(w2, &moe, ExpertMatrix::W1, &[16, 128], 1),
        Err(Error::Unsupported { .. })
    ));
}
