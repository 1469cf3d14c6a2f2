//! Compares the names, shapes and slices of the tensors that this crate reads with those that
//! upstream's layers register and load ([`marlinspike::layers`]).

use marlinspike::config::{
    ActivationScheme, FloatContainer, Fp8Scheme, GptqParams, ScaleStrategy, Scheme, Wna16Scheme,
    ZeroPoints,
};
use marlinspike::formats::integers::IntFormat;
use marlinspike::formats::{BLOCK_FORMATS, compressed_tensors, gptq as gptq_format, nvfp4};
use marlinspike::layers::slices::{self, ExpertMatrix};
use marlinspike::layers::{
    LayerParams, LinearShard, MoeShard, ParamSpec, Role, ScaleKind, ct_block_moe, ct_fp8_moe,
    ct_w4a8_int8_moe, ct_wna16_linear, fp8_linear, gptq_linear, gptq_moe, mx_linear,
};
use marlinspike::num::dims::GroupSize;
use marlinspike::num::scalar::ScalarType;
use marlinspike::num::tensor::DType;
use marlinspike::select::Capability;

use super::ranges;
use crate::model::bind::{Binding, Found, Part, bindings};

const SIZE_K: usize = 512;
const SIZE_N: usize = 768;

fn wna16(format: &'static IntFormat, desc_act: bool, symmetric: bool) -> Wna16Scheme {
    Wna16Scheme {
        checkpoint_format: format,
        weight_type: if symmetric { ScalarType::UINT4B8 } else { ScalarType::UINT4 },
        group_size: GroupSize::Of(64),
        desc_act,
        actorder: None,
        zeros: if symmetric { ZeroPoints::Symmetric } else { ZeroPoints::Stored },
    }
}

fn gptq(desc_act: bool) -> GptqParams {
    let weight_type = ScalarType::UINT4B8;
    GptqParams { bits: 4, group_size: GroupSize::Of(64), desc_act, sym: true, weight_type }
}

fn fp8(strategy: ScaleStrategy, activations: ActivationScheme) -> Fp8Scheme {
    let scale_inv = matches!(strategy, ScaleStrategy::Block { .. });
    let container = FloatContainer::CompressedTensors;
    Fp8Scheme { container, strategy, activations, scale_inv }
}

fn fp8_schemes() -> [Fp8Scheme; 3] {
    [
        fp8(ScaleStrategy::Tensor, ActivationScheme::StaticTensor),
        fp8(ScaleStrategy::Channel, ActivationScheme::DynamicToken),
        fp8(ScaleStrategy::Block { block_n: 128, block_k: 64 }, ActivationScheme::DynamicGroup(64)),
    ]
}

/// The part of a tensor of shape `full` that this crate reads.
fn cut(
    binding: Binding,
    full: &[usize],
    [k, n]: [std::ops::Range<usize>; 2],
) -> Vec<std::ops::Range<usize>> {
    let name = binding.suffixes[0].to_owned();
    let found = Found { binding, name, shape: full.to_vec(), index: None, n_start: 0 };
    ranges(&found, full, &k, &n).unwrap()
}

/// Whether upstream registers a parameter but never reads it; this crate does not read it either.
fn is_unread(scheme: &Scheme, spec: &ParamSpec) -> bool {
    let act_order = crate::model::bind::act_order(scheme);
    match spec.role {
        Role::SortIndices | Role::Placeholder | Role::WeightShape => true,
        Role::GroupIndex => !act_order,
        _ => spec.name.ends_with("qzeros"),
    }
}

/// Compares every binding of a linear layer with its parameter, for each way to shard the layer.
fn linear(scheme: &Scheme, layer: impl Fn(&LinearShard) -> LayerParams) {
    let label = scheme.label();
    let bindings: Vec<_> = bindings(scheme).into_iter().filter(|b| b.part != Part::Bias).collect();
    let whole = layer(&LinearShard::replicated(SIZE_K, SIZE_N));
    let column = LinearShard::column(SIZE_K, &[SIZE_N], 2).unwrap();
    let row = LinearShard::row(SIZE_K, SIZE_N, 2).unwrap();
    for rank in 0..2 {
        let half = |size: usize| rank * size / 2..(rank + 1) * size / 2;
        for (shard, part) in
            [(&column, [0..SIZE_K, half(SIZE_N)]), (&row, [half(SIZE_K), 0..SIZE_N])]
        {
            let params = layer(shard);
            let read = params.params.iter().filter(|p| !is_unread(scheme, p));
            let mut names: Vec<_> = read.clone().map(|p| p.name).collect();
            for binding in &bindings {
                let spec = read.clone().find(|p| binding.suffixes.contains(&p.name));
                let Some(spec) = spec else {
                    assert!(!binding.required, "{label}: {binding:?} is no parameter");
                    continue;
                };
                names.retain(|n| *n != spec.name);
                let full = &whole.get(spec.name).unwrap().shape;
                let expected = slices::linear(spec, shard, 0, full, rank).unwrap().source;
                let found = cut(*binding, full, part.clone());
                assert_eq!(
                    found, expected,
                    "{label} {} rank {rank} {:?}",
                    spec.name, shard.parallel
                );
            }
            assert_eq!(names, [""; 0], "{label}: parameters that are not read");
        }
    }
}

#[test]
fn linear_layers_are_cut_as_upstream_cuts_them() {
    let device = Capability::cuda(9, 0);
    for desc_act in [false, true] {
        let scheme = Scheme::Wna16(wna16(&gptq_format::FORMAT, desc_act, true));
        linear(&scheme, |shard| {
            gptq_linear(&gptq(desc_act), shard, DType::BF16, false, &device).unwrap()
        });
        for symmetric in [true, false] {
            let w = wna16(&compressed_tensors::PACKED, desc_act, symmetric);
            linear(&Scheme::Wna16(w.clone()), |shard| {
                ct_wna16_linear(&w, shard, DType::BF16, &device).unwrap()
            });
        }
    }
    for f in fp8_schemes() {
        linear(&Scheme::Fp8(f.clone()), |shard| fp8_linear(&f, shard).unwrap());
    }
    let container = FloatContainer::CompressedTensors;
    for format in BLOCK_FORMATS.into_iter().filter(|f| !f.has_global_scale()) {
        let scheme = Scheme::Block { format, container, weight_only: true };
        linear(&scheme, |shard| mx_linear(format, shard).unwrap());
    }
}

/// Shape of one expert's tensor in the file; for w13, that of gate or up.
fn file_shape(spec: &ParamSpec, w13: bool) -> Vec<usize> {
    let mut shape = spec.shape[1..].to_vec();
    match spec.role {
        Role::Scale(ScaleKind::Tensor) | Role::InputScale => return Vec::new(),
        Role::GroupIndex => {}
        _ if w13 => shape[usize::from(spec.is_transposed)] /= 2,
        _ => {}
    }
    shape
}

/// Compares every binding of experts with its parameter, for each matrix and rank.
fn experts(scheme: &Scheme, layer: impl Fn(&MoeShard) -> LayerParams) {
    let (hidden, inner) = (SIZE_K, SIZE_N);
    let whole = layer(&MoeShard::new(1, hidden, inner, 1).unwrap());
    let shard = MoeShard::new(1, hidden, inner, 2).unwrap();
    let params = layer(&shard);
    for rank in 0..2 {
        let half = rank * inner / 2..(rank + 1) * inner / 2;
        for (matrix, prefix, part) in [
            (ExpertMatrix::W1, "w13_", [0..hidden, half.clone()]),
            (ExpertMatrix::W3, "w13_", [0..hidden, half.clone()]),
            (ExpertMatrix::W2, "w2_", [half.clone(), 0..hidden]),
        ] {
            let of_matrix = params.params.iter().filter(|p| p.name.starts_with(prefix));
            let mut names: Vec<_> =
                of_matrix.clone().filter(|p| !is_unread(scheme, p)).map(|p| p.name).collect();
            for binding in bindings(scheme) {
                let is_its = |p: &&ParamSpec| binding.suffixes.contains(&&p.name[prefix.len()..]);
                let Some(spec) = of_matrix.clone().find(is_its) else {
                    assert!(!binding.required, "{}: {binding:?} is no parameter", scheme.label());
                    continue;
                };
                names.retain(|n| *n != spec.name);
                let full = file_shape(whole.get(spec.name).unwrap(), prefix == "w13_");
                let slice = slices::expert(spec, &shard, matrix, &full, rank).unwrap().unwrap();
                let found = cut(binding, &full, part.clone());
                assert!(!slice.transpose);
                assert_eq!(found, slice.source, "{} {} {rank}", scheme.label(), spec.name);
            }
            assert_eq!(names, [""; 0], "{}: parameters that are not read", scheme.label());
        }
    }
}

#[test]
fn experts_are_cut_as_upstream_cuts_them() {
    for desc_act in [false, true] {
        let scheme = Scheme::Wna16(wna16(&gptq_format::FORMAT, desc_act, true));
        experts(&scheme, |shard| gptq_moe(&gptq(desc_act), shard, false).unwrap());
    }
    for f in fp8_schemes() {
        // The method of these experts uses one name for block scales.
        let f = Fp8Scheme { scale_inv: false, ..f };
        experts(&Scheme::Fp8(f.clone()), |shard| ct_fp8_moe(&f, shard).unwrap());
    }
    let container = FloatContainer::CompressedTensors;
    let scheme = Scheme::Block { format: &nvfp4::FORMAT, container, weight_only: false };
    experts(&scheme, |s| ct_block_moe(&nvfp4::FORMAT, s).unwrap());
    let group_size = GroupSize::Of(64);
    let checkpoint_format = &compressed_tensors::BYTES;
    experts(&Scheme::W4A8Int8 { group_size, checkpoint_format }, |shard| {
        ct_w4a8_int8_moe(group_size, shard).unwrap()
    });
}
