//! Invalid floating-point tensors: each gives the error that names it.

use crate::refusals::{NOT_FINITE, T, bytes, dtype, floats, shape, size, value, zeros};
use marlinspike::formats::fp8::{Fp8Scales, Fp8Tensors};
use marlinspike::formats::global_scale::GlobalStorage;
use marlinspike::formats::global_scale::{GlobalScale, Shards};
use marlinspike::formats::mxfp4::Mxfp4Tensors;
use marlinspike::formats::mxfp8::Mxfp8Tensors;
use marlinspike::formats::nvfp4::Nvfp4Tensors;
use marlinspike::num::tensor::DType;

#[test]
fn fp8() {
    let unpack = |weight: &[usize], scale: T, scheme: Fp8Scales| {
        let weight = zeros("weight", DType::F8E4M3, weight);
        Fp8Tensors { weight, weight_scale: scale, bias: None }.unpack("m", &scheme)
    };
    let scale = |dims: &[usize]| floats("scale", dims, vec![1.0; dims.iter().product()]);
    let block = |block_n, block_k| Fp8Scales::Block { block_n, block_k };
    let per_tensor = |widths: &[usize]| Fp8Scales::Tensor { widths: widths.to_vec() };
    assert!(unpack(&[10, 16], scale(&[3, 2]), block(4, 8)).is_ok());
    // Floor division, transposed, too many.
    for dims in [&[2, 2][..], &[2, 3], &[4, 2], &[6], &[3, 2, 1]] {
        shape(unpack(&[10, 16], scale(dims), block(4, 8)), "scale");
    }
    size(unpack(&[10, 16], scale(&[3, 2]), block(4, 12)));
    size(unpack(&[10, 16], scale(&[3, 2]), block(0, 8)));
    size(unpack(&[10, 16], scale(&[3, 2]), block(4, 0)));
    size(unpack(&[10, 18], scale(&[10]), Fp8Scales::Channel));
    shape(unpack(&[10, 16], scale(&[9]), Fp8Scales::Channel), "scale");
    shape(unpack(&[10, 16], scale(&[1]), Fp8Scales::Channel), "scale");
    shape(unpack(&[10, 16], scale(&[2]), per_tensor(&[10])), "scale");
    shape(unpack(&[10, 16], scale(&[3]), per_tensor(&[4, 6])), "scale");
    shape(unpack(&[10, 16], scale(&[0]), per_tensor(&[10])), "scale");
    for widths in [&[][..], &[4, 5], &[4, 7], &[10, 0], &[usize::MAX, 11]] {
        size(unpack(&[10, 16], scale(&[2]), per_tensor(widths)));
    }
    for bad in NOT_FINITE {
        let scales = floats("scale", &[3, 2], vec![1.0, 1.0, 1.0, bad, 1.0, 1.0]);
        value(unpack(&[10, 16], scales, block(4, 8)), "scale", &[1, 1]);
    }
    dtype(unpack(&[10, 16], zeros("scale", DType::I32, &[3, 2]), block(4, 8)), "scale");
    let nan = bytes("scale", DType::F8E8M0, &[1], vec![255]);
    value(unpack(&[10, 16], nan, per_tensor(&[10])), "scale", &[0]);
    for (dims, dt) in [(&[10, 16][..], DType::U8), (&[10, 16], DType::F8E5M2)] {
        let weight = zeros("weight", dt, dims);
        let tensors = Fp8Tensors { weight, weight_scale: scale(&[10]), bias: None };
        dtype(tensors.unpack("m", &Fp8Scales::Channel), "weight");
    }
    // Columns of one block with two scales cannot be packed as one.
    let scales = floats("scale", &[10], (0..10).map(|n| n as f32).collect());
    let w = unpack(&[10, 16], scales, Fp8Scales::Channel).unwrap();
    value(Fp8Tensors::pack(&w, &per_tensor(&[10])), "m.weight_scale", &[0, 1]);
    size(Fp8Tensors::pack(&w, &block(1, 8)));
}

#[test]
fn microscaled() {
    let mxfp8 = |weight: T, weight_scale: T| {
        Mxfp8Tensors { weight, weight_scale, bias: None }.unpack("m").map(drop)
    };
    let mxfp4 = |weight: T, weight_scale: T| {
        Mxfp4Tensors { weight, weight_scale, bias: None }.unpack("m").map(drop)
    };
    let w8 = |dims: &[usize]| zeros("weight", DType::F8E4M3, dims);
    let w4 = |dims: &[usize]| zeros("weight", DType::U8, dims);
    let scale = |dims: &[usize]| zeros("scale", DType::U8, dims);
    for scales in [scale(&[3, 2]), zeros("scale", DType::F8E8M0, &[3, 2])] {
        assert!(mxfp8(w8(&[3, 64]), scales.clone()).is_ok());
        assert!(mxfp4(w4(&[3, 32]), scales).is_ok());
    }
    let mut nan = vec![0; 6];
    nan[3] = 255;
    let nan = bytes("scale", DType::U8, &[3, 2], nan);
    value(mxfp8(w8(&[3, 64]), nan.clone()), "scale", &[1, 1]);
    value(mxfp4(w4(&[3, 32]), nan), "scale", &[1, 1]);
    shape(mxfp8(w8(&[3, 64]), scale(&[2, 3])), "scale");
    shape(mxfp4(w4(&[3, 32]), scale(&[3, 1])), "scale");
    dtype(mxfp8(w8(&[3, 64]), zeros("scale", DType::F8E4M3, &[3, 2])), "scale");
    dtype(mxfp8(w4(&[3, 64]), scale(&[3, 2])), "weight");
    dtype(mxfp4(zeros("weight", DType::I32, &[3, 8]), scale(&[3, 2])), "weight");
    size(mxfp8(w8(&[3, 48]), scale(&[3, 1])));
    size(mxfp4(w4(&[3, 24]), scale(&[3, 1])));
    shape(mxfp4(w4(&[0, 32]), scale(&[0, 2])), "weight");
    // gpt-oss's form.
    let blocks = |dims: &[usize]| {
        Mxfp4Tensors::from_blocks(zeros("blocks", DType::U8, dims), scale(&[3, 2]), None)
    };
    assert!(blocks(&[3, 2, 16]).unwrap().unpack("m").is_ok());
    shape(blocks(&[3, 2, 8]), "blocks");
    shape(blocks(&[3, 32]), "blocks");
    let odd = Mxfp4Tensors { weight: w4(&[3, 24]), weight_scale: scale(&[3, 1]), bias: None };
    shape(odd.into_blocks(), "weight");
}

#[test]
fn nvfp4() {
    let unpack = |scale: T, global: T, meaning| {
        let weight = zeros("weight", DType::U8, &[3, 16]);
        let scheme = GlobalStorage { global: meaning, shards: Shards::Equal };
        Nvfp4Tensors { weight, weight_scale: scale, weight_global_scale: global, bias: None }
            .unpack("m", scheme)
            .map(drop)
    };
    let scale = |values: Vec<u8>| bytes("scale", DType::F8E4M3, &[3, 2], values);
    let ok = || scale(vec![0x38; 6]);
    let global = |x: f32| floats("global", &[1], vec![x]);
    for meaning in [GlobalScale::Divisor, GlobalScale::Multiplier] {
        assert!(unpack(ok(), global(2.0), meaning).is_ok());
        assert!(unpack(ok(), floats("global", &[], vec![2.0]), meaning).is_ok());
        // Negative zero is zero.
        assert!(unpack(scale(vec![0x80; 6]), global(2.0), meaning).is_ok());
        for bad in [0.0, -0.0, -1.0, f32::NAN, f32::INFINITY] {
            value(unpack(ok(), global(bad), meaning), "global", &[0]);
        }
        // NaN of either sign; the kernel has no sign bit.
        for bad in [0x7f, 0xff, 0x81, 0xb8, 0xfe] {
            let scales = scale(vec![0x38, 0x38, bad, 0x38, 0x38, 0x38]);
            value(unpack(scales, global(2.0), meaning), "scale", &[1, 0]);
        }
        shape(unpack(ok(), floats("global", &[0], vec![]), meaning), "global");
        dtype(unpack(ok(), zeros("global", DType::F16, &[1]), meaning), "global");
        value(unpack(ok(), floats("global", &[2], vec![1.0, 2.0]), meaning), "global", &[1]);
        dtype(unpack(zeros("scale", DType::U8, &[3, 2]), global(1.0), meaning), "scale");
        shape(unpack(zeros("scale", DType::F8E4M3, &[3, 1]), global(1.0), meaning), "scale");
    }
    // A divisor so small that its reciprocal is infinite.
    value(unpack(ok(), global(f32::from_bits(1)), GlobalScale::Divisor), "global", &[0]);
    assert!(unpack(ok(), global(f32::from_bits(1)), GlobalScale::Multiplier).is_ok());
}
