//! Invalid integer tensors: each gives the error that names it.

use crate::refusals::{NOT_FINITE, dtype, floats, ints, missing, shape, size, value, zeros};
use marlinspike::Error;
use marlinspike::formats::awq::AwqTensors;
use marlinspike::formats::compressed_tensors::{ByteTensors, PackedTensors};
use marlinspike::formats::gptq::GptqTensors;
use marlinspike::formats::gptq::ZeroPoints::{V1, V2};
use marlinspike::formats::integers::IntStorage;
use marlinspike::num::dims::GroupSize;
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::weight::Groups;

const GPTQ: IntStorage =
    IntStorage { bits: 4, group_size: GroupSize::Of(8), symmetric: false, act_order: true };

/// K 16, N 8, two groups.
fn gptq() -> GptqTensors<'static> {
    GptqTensors {
        qweight: zeros("qweight", DType::I32, &[2, 8]),
        scales: floats("scales", &[2, 8], vec![1.0; 16]),
        qzeros: Some(zeros("qzeros", DType::I32, &[2, 1])),
        g_idx: Some(ints("g_idx", &[16], (0..16).map(|k| k / 8).collect())),
        bias: Some(floats("bias", &[8], vec![0.0; 8])),
    }
}

#[test]
fn gptq_shapes_and_types() {
    assert!(gptq().unpack("m", &GPTQ, V1).is_ok());
    let with = |edit: &dyn Fn(&mut GptqTensors<'static>)| {
        let mut t = gptq();
        edit(&mut t);
        t.unpack("m", &GPTQ, V1)
    };
    for dims in [&[2][..], &[2, 8, 1], &[0, 8], &[2, 0]] {
        shape(with(&|t| t.qweight = zeros("qweight", DType::I32, dims)), "qweight");
    }
    dtype(with(&|t| t.qweight = zeros("qweight", DType::I64, &[2, 8])), "qweight");
    shape(with(&|t| t.scales = zeros("scales", DType::F16, &[2, 7])), "scales");
    shape(with(&|t| t.scales = zeros("scales", DType::F16, &[0, 8])), "scales");
    dtype(with(&|t| t.scales = zeros("scales", DType::I32, &[2, 8])), "scales");
    dtype(with(&|t| t.scales = zeros("scales", DType::F64, &[2, 8])), "scales");
    shape(with(&|t| t.qzeros = Some(zeros("qzeros", DType::I32, &[2, 8]))), "qzeros");
    dtype(with(&|t| t.qzeros = Some(zeros("qzeros", DType::F32, &[2, 1]))), "qzeros");
    shape(with(&|t| t.g_idx = Some(zeros("g_idx", DType::I32, &[15]))), "g_idx");
    dtype(with(&|t| t.g_idx = Some(zeros("g_idx", DType::F32, &[16]))), "g_idx");
    shape(with(&|t| t.bias = Some(zeros("bias", DType::F16, &[8, 1]))), "bias");
    dtype(with(&|t| t.bias = Some(zeros("bias", DType::I32, &[8]))), "bias");
    missing(with(&|t| t.qzeros = None), "m.qzeros");
    missing(with(&|t| t.g_idx = None), "m.g_idx");
    for bits in [0, 2, 3, 5, 16, 32, u32::MAX] {
        size(gptq().unpack("m", &IntStorage { bits, ..GPTQ }, V1));
    }
    let no_order = IntStorage { act_order: false, ..GPTQ };
    size(gptq().unpack("m", &IntStorage { group_size: GroupSize::Of(12), ..no_order }, V1));
    shape(
        gptq().unpack("m", &IntStorage { group_size: GroupSize::Of(4), ..no_order }, V1),
        "scales",
    );
}

#[test]
fn gptq_values() {
    for bad in NOT_FINITE {
        let mut t = gptq();
        let mut scales = vec![1.0; 16];
        scales[13] = bad;
        t.scales = floats("scales", &[2, 8], scales);
        value(t.unpack("m", &GPTQ, V1), "scales", &[1, 5]);
    }
    for bad in [-1, 2, i32::MIN, i32::MAX] {
        let mut t = gptq();
        let mut g_idx = vec![0; 16];
        g_idx[9] = bad;
        t.g_idx = Some(ints("g_idx", &[16], g_idx));
        value(t.clone().unpack("m", &GPTQ, V1), "g_idx", &[9]);
        // It is not read without act-order.
        assert!(t.unpack("m", &IntStorage { act_order: false, ..GPTQ }, V1).is_ok());
    }
}

/// A symmetric matrix must have the middle of the range as zero point everywhere.
#[test]
fn gptq_symmetric_zero_points() {
    let unpack = |stored: [i32; 2], zeros| {
        let t = GptqTensors { qzeros: Some(ints("qzeros", &[2, 1], stored.to_vec())), ..gptq() };
        t.unpack("m", &IntStorage { symmetric: true, ..GPTQ }, zeros)
    };
    let (v1, v2) = (0x77777777, 0x88888888u32 as i32);
    assert!(unpack([v1, v1], V1).unwrap().zeros.is_none());
    assert!(unpack([v2, v2], V2).is_ok());
    let hint = value(unpack([v2, v2], V1), "qzeros", &[0, 0]);
    assert!(hint.contains("stored as v2"), "{hint}");
    let hint = value(unpack([v1, v1], V2), "qzeros", &[0, 0]);
    assert!(hint.contains("stored as v1"), "{hint}");
    value(unpack([v1, 0x77577777], V1), "qzeros", &[1, 5]);
    // Without qzeros the zero points are unknown.
    let t = GptqTensors { qzeros: None, ..gptq() };
    assert!(t.unpack("m", &IntStorage { symmetric: true, ..GPTQ }, V1).is_ok());
}

/// v1 stores zero − 1 in four bits: a zero point of 0 is stored as 15.
#[test]
fn gptq_zero_points_wrap() {
    let t = GptqTensors { qzeros: Some(ints("qzeros", &[2, 1], vec![-1, 0])), ..gptq() };
    let w = t.clone().unpack("m", &GPTQ, V1).unwrap();
    let z = w.zeros.unwrap();
    assert_eq!((z.bits(0, 0), z.bits(1, 0)), (0, 1));
    let w = t.unpack("m", &GPTQ, V2).unwrap();
    let z = w.zeros.unwrap();
    assert_eq!((z.bits(0, 0), z.bits(1, 0)), (15, 0));
}

#[test]
fn gptq_trivial_order_is_no_order() {
    let w = gptq().unpack("m", &GPTQ, V1).unwrap();
    assert_eq!(w.groups, Groups::Uniform(GroupSize::Of(8)));
    let mut t = gptq();
    t.g_idx = Some(ints("g_idx", &[16], (0..16).map(|k| 1 - k / 8).collect()));
    assert!(matches!(t.unpack("m", &GPTQ, V1).unwrap().groups, Groups::Indexed { .. }));
    // A rank's first slice counts from 0, but the scales say that there is more.
    let mut t = gptq();
    t.scales = floats("scales", &[4, 8], vec![1.0; 32]);
    t.qzeros = Some(zeros("qzeros", DType::I32, &[4, 1]));
    assert!(matches!(t.unpack("m", &GPTQ, V1).unwrap().groups, Groups::Indexed { .. }));
}

#[test]
fn awq() {
    let tensors = || AwqTensors {
        qweight: zeros("qweight", DType::I32, &[16, 1]),
        scales: floats("scales", &[2, 8], vec![1.0; 16]),
        qzeros: zeros("qzeros", DType::I32, &[2, 1]),
        bias: None,
    };
    let groups = GroupSize::Of(8);
    assert!(tensors().unpack("m", 4, groups).is_ok());
    let qweight = |dims: &[usize]| zeros("qweight", DType::I32, dims);
    shape(AwqTensors { qweight: qweight(&[0, 1]), ..tensors() }.unpack("m", 4, groups), "qweight");
    shape(AwqTensors { qweight: qweight(&[16, 2]), ..tensors() }.unpack("m", 4, groups), "scales");
    // K is not a multiple of the codes per word.
    let odd = AwqTensors {
        qweight: qweight(&[12, 1]),
        scales: floats("scales", &[1, 8], vec![1.0; 8]),
        qzeros: zeros("qzeros", DType::I32, &[1, 1]),
        bias: None,
    };
    size(odd.unpack("m", 4, GroupSize::Channel));
    let qzeros = zeros("qzeros", DType::I32, &[1, 1]);
    shape(AwqTensors { qzeros, ..tensors() }.unpack("m", 4, groups), "qzeros");
    let qzeros = zeros("qzeros", DType::I64, &[2, 1]);
    dtype(AwqTensors { qzeros, ..tensors() }.unpack("m", 4, groups), "qzeros");
    let scales = floats("scales", &[2, 8], vec![f32::NAN; 16]);
    value(AwqTensors { scales, ..tensors() }.unpack("m", 4, groups), "scales", &[0, 0]);
    size(tensors().unpack("m", 3, groups));
    size(tensors().unpack("m", 4, GroupSize::Of(3)));
    // Weights that AWQ cannot represent.
    let symmetric = GptqTensors { qzeros: None, ..gptq() };
    let symmetric = symmetric.unpack("m", &IntStorage { symmetric: true, ..GPTQ }, V1).unwrap();
    assert!(matches!(AwqTensors::pack(&symmetric), Err(Error::Unsupported { .. })));
    let mut ordered = gptq();
    ordered.g_idx = Some(zeros("g_idx", DType::I32, &[16]));
    let ordered = ordered.unpack("m", &GPTQ, V1).unwrap();
    assert!(matches!(AwqTensors::pack(&ordered), Err(Error::Unsupported { .. })));
}

const CT: IntStorage =
    IntStorage { bits: 4, group_size: GroupSize::Of(8), symmetric: false, act_order: true };

/// K 16, N 10, two groups.
fn packed() -> PackedTensors<'static> {
    PackedTensors {
        weight_packed: zeros("weight_packed", DType::I32, &[10, 2]),
        weight_scale: floats("weight_scale", &[10, 2], vec![1.0; 20]),
        weight_zero_point: Some(zeros("weight_zero_point", DType::I32, &[2, 2])),
        weight_shape: Some(
            Tensor::from_vec("weight_shape", DType::I64, vec![2], vec![10i64, 16]).unwrap(),
        ),
        weight_g_idx: Some(ints("weight_g_idx", &[16], vec![1; 16])),
        bias: None,
    }
}

fn int8() -> ByteTensors<'static> {
    ByteTensors {
        weight: zeros("weight", DType::I8, &[10, 16]),
        weight_scale: floats("weight_scale", &[10, 2], vec![1.0; 20]),
        weight_zero_point: Some(zeros("weight_zero_point", DType::I8, &[10, 2])),
        weight_g_idx: Some(ints("weight_g_idx", &[16], vec![1; 16])),
        bias: None,
    }
}

#[test]
fn compressed_tensors_packed() {
    assert!(packed().unpack("m", &CT).is_ok());
    let with = |edit: &dyn Fn(&mut PackedTensors<'static>)| {
        let mut t = packed();
        edit(&mut t);
        t.unpack("m", &CT)
    };
    shape(with(&|t| t.weight_packed = zeros("weight_packed", DType::I32, &[10])), "weight_packed");
    dtype(
        with(&|t| t.weight_packed = zeros("weight_packed", DType::I8, &[10, 2])),
        "weight_packed",
    );
    let shapes = |v: [i64; 2]| Tensor::from_vec("weight_shape", DType::I64, vec![2], v.to_vec());
    // The declared shape is another one, or the transposed one.
    for declared in [[10, 15], [16, 10], [-10, 16]] {
        value(with(&|t| t.weight_shape = Some(shapes(declared).unwrap())), "weight_shape", &[]);
    }
    shape(
        with(&|t| t.weight_shape = Some(zeros("weight_shape", DType::I64, &[3]))),
        "weight_shape",
    );
    dtype(
        with(&|t| t.weight_shape = Some(zeros("weight_shape", DType::F32, &[2]))),
        "weight_shape",
    );
    shape(
        with(&|t| t.weight_scale = floats("weight_scale", &[2, 10], vec![1.0; 20])),
        "weight_scale",
    );
    shape(
        with(&|t| t.weight_zero_point = Some(zeros("weight_zero_point", DType::I32, &[1, 2]))),
        "weight_zero_point",
    );
    missing(with(&|t| t.weight_zero_point = None), "m.weight_zero_point");
    missing(with(&|t| t.weight_g_idx = None), "m.weight_g_idx");
    // −1: not ordered.
    missing(
        with(&|t| t.weight_g_idx = Some(ints("weight_g_idx", &[16], vec![-1; 16]))),
        "m.weight_g_idx",
    );
    value(
        with(&|t| t.weight_g_idx = Some(ints("weight_g_idx", &[16], vec![2; 16]))),
        "weight_g_idx",
        &[0],
    );
    for bad in NOT_FINITE {
        let scales = floats("weight_scale", &[10, 2], [vec![1.0; 19], vec![bad]].concat());
        value(with(&|t| t.weight_scale = scales.clone()), "weight_scale", &[9, 1]);
    }
    size(packed().unpack("m", &IntStorage { bits: 6, ..CT }));
    let group_size = GroupSize::Of(5);
    size(packed().unpack("m", &IntStorage { group_size, act_order: false, ..CT }));
}

#[test]
fn compressed_tensors_int8() {
    assert!(int8().unpack("m", &CT).is_ok());
    let with = |edit: &dyn Fn(&mut ByteTensors<'static>), scheme: &IntStorage| {
        let mut t = int8();
        edit(&mut t);
        t.unpack("m", scheme)
    };
    for bad in [-9i8, 8, 127, -128] {
        let mut values = vec![-8i8; 160];
        values[35] = bad;
        let weight = Tensor::from_vec("weight", DType::I8, vec![10, 16], values).unwrap();
        let edit = |t: &mut ByteTensors<'static>| t.weight = weight.clone();
        value(with(&edit, &CT), "weight", &[2, 3]);
        // Eight bits represent all of them.
        assert!(with(&edit, &IntStorage { bits: 8, ..CT }).is_ok());
        let zero = Tensor::from_vec("weight_zero_point", DType::I8, vec![10, 2], vec![bad; 20]);
        let zero = zero.unwrap();
        value(
            with(&|t| t.weight_zero_point = Some(zero.clone()), &CT),
            "weight_zero_point",
            &[0, 0],
        );
    }
    dtype(with(&|t| t.weight = zeros("weight", DType::U8, &[10, 16]), &CT), "weight");
    size(with(&|t| t.weight = zeros("weight", DType::I8, &[10, 17]), &CT));
    missing(with(&|t| t.weight_zero_point = None, &CT), "m.weight_zero_point");
    shape(
        with(&|t| t.weight_zero_point = Some(zeros("weight_zero_point", DType::I8, &[2, 10])), &CT),
        "weight_zero_point",
    );
    dtype(
        with(
            &|t| t.weight_zero_point = Some(zeros("weight_zero_point", DType::I32, &[10, 2])),
            &CT,
        ),
        "weight_zero_point",
    );
}
