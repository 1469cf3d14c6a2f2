//! Forms of scales and codes outside the lattice of `checkpoint_roundtrip`.

use marlinspike::formats::fp8::{Fp8Scales, Fp8Tensors};
use marlinspike::formats::global_scale::GlobalStorage;
use marlinspike::formats::global_scale::{GlobalScale, Shards};
use marlinspike::formats::gptq::{GptqTensors, ZeroPoints};
use marlinspike::formats::integers::IntStorage;
use marlinspike::formats::nvfp4::Nvfp4Tensors;
use marlinspike::formats::transpose_words;
use marlinspike::num::dims::GroupSize;
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::weight::Groups;
use ndarray::Array2;

#[test]
fn transposing_nothing() {
    assert_eq!(transpose_words(Array2::zeros((0, 5)).view()).dim(), (5, 0));
    assert_eq!(transpose_words(Array2::zeros((5, 0)).view()).dim(), (0, 5));
}

/// One scale for the matrix, one for each shard: every form that files use.
#[test]
fn fp8_tensor_and_shard_scales() {
    let (n, k) = (5, 4);
    let scale = |shape: &[usize], values: &[f32]| {
        Tensor::from_vec("weight_scale", DType::F32, shape.to_vec(), values.to_vec()).unwrap()
    };
    let unpack = |weight_scale, widths: &[usize]| {
        // 1.0 everywhere.
        let weight = Tensor::new("weight", DType::F8E4M3, vec![n, k], vec![0x38u8; n * k]).unwrap();
        let scheme = Fp8Scales::Tensor { widths: widths.to_vec() };
        let w = Fp8Tensors { weight, weight_scale, bias: None }.unpack("w", &scheme).unwrap();
        assert_eq!(w.groups, Groups::Uniform(GroupSize::Channel));
        (0..n).map(|c| w.dequantize(3, c)).collect::<Vec<_>>()
    };
    for shape in [&[][..], &[1], &[1, 1]] {
        assert_eq!(unpack(scale(shape, &[0.5]), &[n]), [0.5; 5]);
    }
    for shape in [&[2][..], &[2, 1], &[1, 2]] {
        assert_eq!(unpack(scale(shape, &[0.5, 2.0]), &[2, 3]), [0.5, 0.5, 2.0, 2.0, 2.0]);
    }
}

/// The global scale if the shards differ, for both conventions.
#[test]
fn nvfp4_global_scales_of_shards() {
    let unpack = |values: &[f32], global, shards| {
        let scheme = GlobalStorage { global, shards };
        let shape = vec![values.len()];
        Nvfp4Tensors {
            weight: Tensor::new("weight", DType::U8, vec![2, 8], vec![0x22u8; 16]).unwrap(),
            weight_scale: Tensor::new("weight_scale", DType::F8E4M3, vec![2, 1], vec![0x38u8; 2])
                .unwrap(),
            weight_global_scale: Tensor::from_vec("global", DType::F32, shape, values.to_vec())
                .unwrap(),
            bias: None,
        }
        .unpack("w", scheme)
        .map(|w| (w.global_scale.unwrap(), w.dequantize(1, 1)))
    };
    use GlobalScale::{Divisor, Multiplier};
    assert_eq!(unpack(&[4.0], Divisor, Shards::Equal).unwrap(), (0.25, 0.25));
    assert_eq!(unpack(&[4.0], Multiplier, Shards::Equal).unwrap(), (4.0, 4.0));
    assert_eq!(unpack(&[2.0, 4.0], Divisor, Shards::Largest).unwrap().0, 0.25);
    assert_eq!(unpack(&[2.0, 4.0], Multiplier, Shards::Largest).unwrap().0, 4.0);
    assert_eq!(unpack(&[2.0, 4.0], Divisor, Shards::First).unwrap().0, 0.5);
    assert_eq!(unpack(&[4.0, 4.0], Divisor, Shards::Equal).unwrap().0, 0.25);
    assert!(unpack(&[2.0, 4.0], Divisor, Shards::Equal).is_err());
}

/// A `Weight` has GPTQ's words: aligned bytes are borrowed, not copied.
#[test]
fn gptq_codes_are_borrowed() {
    let words: Vec<u32> = (0..64).collect();
    let bytes: &[u8] = bytemuck::cast_slice(&words);
    let qweight = Tensor::new("qweight", DType::I32, vec![8, 8], bytes).unwrap();
    let scales = Tensor::from_vec("scales", DType::F32, vec![1, 8], vec![1f32; 8]).unwrap();
    let tensors = GptqTensors { qweight, scales, qzeros: None, g_idx: None, bias: None };
    let scheme =
        IntStorage { bits: 4, group_size: GroupSize::Channel, symmetric: true, act_order: false };
    let weight = tensors.unpack("w", &scheme, ZeroPoints::V1).unwrap();
    assert_eq!(weight.codes.words().as_ptr(), words.as_ptr());
}
