//! Restoring the output of `prepare` gives the same weight, if the kernel's types can represent it.
use marlinspike::Error;
use marlinspike::layouts::marlin::{
    InputDtype, Options, Prepared, ScalePermutation, Stored, prepare,
};
use marlinspike::num::array::into_vec;
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::ScalarType;
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::vectors::Rng;
use marlinspike::weight::{Codes, Groups, Table, TableData, Weight};

const F16: ScalarType = ScalarType::FLOAT16;
const BF16: ScalarType = ScalarType::BFLOAT16;
const E4M3: ScalarType = ScalarType::FLOAT8_E4M3FN;
const E8M0: ScalarType = ScalarType::FLOAT8_E8M0FNU;
const E2M1: ScalarType = ScalarType::FLOAT4_E2M1F;
const SHAPE: Shape = Shape::new(256, 192);

/// A weight whose scales the kernel represents exactly; `order` is act-order.
fn weight(ty: ScalarType, scale: ScalarType, group: GroupSize, order: bool) -> Weight<'static> {
    let mut rng = Rng::new(17);
    let bits = if ty.size_bits() > 4 { 8 } else { 4 };
    let codes = Codes::from_fn(bits, SHAPE, |_, _| {
        let code = (rng.next_u32() >> 9) as u8 & (0xff >> (8 - bits));
        if ty == E4M3 && code & 0x7f == 0x7f { 0x31 } else { code }
    });
    let groups = group.groups(SHAPE.k()).unwrap();
    let len = groups * SHAPE.size_n;
    // Powers of two with one more bit: near 2^-4 in either 16-bit type.
    let half = if scale == F16 { 0x2c00 } else { 0x3d80 };
    let data = match scale {
        E8M0 => TableData::B8((0..len).map(|_| 118 + (rng.next_u32() >> 29) as u8).collect()),
        E4M3 => TableData::B8((0..len).map(|_| 0x20 + (rng.next_u32() >> 27) as u8).collect()),
        _ => TableData::B16((0..len).map(|_| half + (rng.next_u32() >> 26) as u16).collect()),
    };
    let zeros = (ty == ScalarType::UINT4).then(|| {
        let codes = (0..len).map(|_| (rng.next_u32() >> 28) as u8).collect();
        Table::new(ty, groups, SHAPE.size_n, TableData::B8(codes)).unwrap()
    });
    let bias = (0..SHAPE.size_n).map(|_| half + (rng.next_u32() >> 25) as u16).collect();
    let bias_ty = if scale == F16 { F16 } else { BF16 };
    let mut g_idx: Vec<u32> =
        (0..SHAPE.size_k).map(|k| (k * groups / SHAPE.size_k) as u32).collect();
    for i in (1..g_idx.len()).rev() {
        g_idx.swap(i, rng.next_u32() as usize % (i + 1));
    }
    Weight {
        name: "w".to_owned(),
        ty,
        codes: codes.unwrap(),
        scales: Table::new(scale, groups, SHAPE.size_n, data).unwrap(),
        zeros,
        groups: match order {
            true => Groups::Indexed { g_idx, group_size: group },
            false => Groups::Uniform(group),
        },
        global_scale: (scale == E4M3).then_some(0.0123),
        bias: Some(Table::new(bias_ty, 1, SHAPE.size_n, TableData::B16(bias)).unwrap()),
    }
}

/// The tensors of a file.
fn stored(w: &Weight<'_>, dtype: ScalarType, prepared: Prepared) -> Stored<'static> {
    let words = |name: &str, words: Vec<u32>, shape: Vec<usize>| {
        let words: Vec<i32> = words.into_iter().map(|w| w as i32).collect();
        Tensor::from_vec(name, DType::I32, shape, words).unwrap()
    };
    let half = if dtype == F16 { DType::F16 } else { DType::BF16 };
    let scales = match prepared.scales.ty() {
        E8M0 => DType::F8E8M0,
        E4M3 => DType::F8E4M3,
        _ => half,
    };
    let pack = 32 / w.codes.bits() as usize;
    let groups = prepared.groups();
    let order = prepared.sorted.as_deref().map(|sorted| {
        let tensor = |name: &str, v: &Vec<u32>| words(name, v.clone(), vec![SHAPE.size_k]);
        [tensor("g_idx", &sorted[0].g_idx), tensor("perm", &sorted[0].perm)]
    });
    Stored {
        name: "w".to_owned(),
        ty: w.ty,
        dtype,
        input_dtype: InputDtype::Model,
        shape: SHAPE,
        group_size: w.groups.group_size(),
        permutation: prepared.scale_layout.permutation(),
        weight: words(
            "weight",
            into_vec(prepared.qweight),
            vec![SHAPE.size_k / 16, SHAPE.size_n * 16 / pack],
        ),
        scales: prepared.scales.to_tensor("scales", scales).unwrap(),
        zeros: prepared
            .zeros
            .map(|(_, z)| words("zeros", into_vec(z), vec![groups, SHAPE.size_n / pack])),
        order,
        bias: prepared.bias.map(|b| {
            let TableData::B16(bits) = b.data() else { panic!("{:?}", b.ty()) };
            Tensor::from_vec("bias", half, vec![SHAPE.size_n], bits.clone()).unwrap()
        }),
        global: prepared.global_scale.map(|g| [g[0], prepared.scale_factor]),
    }
}

#[test]
fn every_type_comes_back() {
    let of = GroupSize::Of;
    for dtype in [F16, BF16] {
        for (ty, scale, group, order) in [
            (ScalarType::UINT4B8, dtype, of(32), false),
            (ScalarType::UINT4B8, dtype, of(64), true),
            (ScalarType::UINT4B8, dtype, GroupSize::Channel, false),
            (ScalarType::UINT4, dtype, of(128), false),
            (ScalarType::UINT8B128, dtype, of(64), false),
            (E4M3, dtype, GroupSize::Channel, false),
            (E4M3, dtype, of(128), false),
            (E4M3, E8M0, of(32), false),
            (E2M1, E8M0, of(32), false),
            (E2M1, E4M3, of(16), false),
        ] {
            let mut w = weight(ty, scale, group, order);
            if w.bias.as_ref().is_some_and(|b| b.ty() != dtype) {
                // The bias follows the model's type.
                w.bias = weight(ty, dtype, group, order).bias;
            }
            let prepared = prepare(std::slice::from_ref(&w), Options::new(dtype)).unwrap();
            let found = stored(&w, dtype, prepared).restore().unwrap();
            let context = format!("{dtype} {ty} {scale} {group}");
            assert_eq!(found.codes, w.codes, "{context}");
            assert_eq!((&found.zeros, &found.bias), (&w.zeros, &w.bias), "{context}");
            assert_eq!(found.groups, w.groups, "{context}");
            assert_eq!(found.global_scale, w.global_scale, "{context}");
            for g in 0..w.scales.rows() {
                for n in 0..SHAPE.size_n {
                    let values = [&found, &w].map(|w| w.scales.value(g, n));
                    assert_eq!(values[0], values[1], "{context} scale ({g}, {n})");
                }
            }
        }
    }
}

#[test]
fn weights_for_fp8_activations_come_back() {
    for (ty, scale, group) in [
        (ScalarType::UINT4B8, BF16, GroupSize::Of(32)),
        (ScalarType::UINT4B8, BF16, GroupSize::Channel),
        (E2M1, E8M0, GroupSize::Of(32)),
    ] {
        let w = Weight { bias: None, ..weight(ty, scale, group, false) };
        let options = Options { input_dtype: InputDtype::Fp8, ..Options::new(BF16) };
        let prepared = prepare(std::slice::from_ref(&w), options).unwrap();
        let stored = stored(&w, BF16, prepared);
        let found = Stored { input_dtype: InputDtype::Fp8, ..stored.clone() }.restore().unwrap();
        assert_eq!(found.codes, w.codes, "{ty} {group}");
        for g in 0..w.scales.rows() {
            for n in 0..SHAPE.size_n {
                let values = [&found, &w].map(|w| w.scales.value(g, n));
                assert_eq!(values[0], values[1], "{ty} {group} scale ({g}, {n})");
            }
        }
        // The same bytes mean another matrix to the kernel for 16-bit activations.
        let other = stored.clone().restore();
        assert!(other.is_err() || other.unwrap().codes != w.codes, "{ty} {group}");
        let int8 = Stored { input_dtype: InputDtype::Int8, ..stored }.restore();
        assert_eq!(int8.is_err(), ty == E2M1, "{ty} {group}");
    }
}

#[test]
fn weights_for_int8_activations_have_the_kernels_integers() {
    for (ty, group) in [
        (ScalarType::UINT4B8, GroupSize::Of(32)),
        (ScalarType::UINT4B8, GroupSize::Channel),
        (ScalarType::UINT4, GroupSize::Of(32)),
    ] {
        let w = Weight { bias: None, ..weight(ty, BF16, group, false) };
        let options = Options { input_dtype: InputDtype::Int8, ..Options::new(BF16) };
        let prepared = prepare(std::slice::from_ref(&w), options).unwrap();
        let factor = prepared.input_global_scale;
        let stored = stored(&w, BF16, prepared);
        let found = Stored { input_dtype: InputDtype::Int8, ..stored }.restore().unwrap();
        assert_eq!(found.codes, w.codes, "{ty} {group}");
        assert_eq!(found.zeros, w.zeros, "{ty} {group}");
        assert_eq!(factor.is_some(), group != GroupSize::Channel, "{ty} {group}");
        for g in 0..w.scales.rows() {
            for n in 0..SHAPE.size_n {
                let [found, own] = [&found, &w].map(|w| w.scales.value(g, n));
                match factor {
                    None => assert_eq!(found, own, "{ty} {group} ({g}, {n})"),
                    // Two roundings to bf16 and one to an integer.
                    Some(factor) => {
                        assert!(found.fract() == 0.0 && (0.0..=4096.0).contains(&found));
                        let error = (found * f64::from(factor) - own).abs();
                        let bound = own / 127.0 + f64::from(factor);
                        assert!(error <= bound, "{ty} {group} ({g}, {n}): {found} {own}");
                    }
                }
            }
        }
    }
}

#[test]
fn what_no_kernel_reads_is_refused_by_name() {
    let w = weight(ScalarType::UINT4B8, BF16, GroupSize::Of(64), true);
    let prepared = prepare(std::slice::from_ref(&w), Options::new(BF16)).unwrap();
    let good = stored(&w, BF16, prepared);
    assert!(good.clone().restore().is_ok());
    let words = |name: &str, len: usize| {
        Tensor::from_vec(name, DType::I32, vec![len], vec![3i32; len]).unwrap()
    };
    let [g_idx, _] = good.order.clone().unwrap();
    let order = Some([g_idx.clone(), words("perm", SHAPE.size_k)]);
    let error = Stored { order, ..good.clone() }.restore().unwrap_err();
    assert!(matches!(error, Error::Value { .. }) && error.to_string().contains("perm"), "{error}");
    let order = Some([g_idx, words("perm", 9)]);
    let error = Stored { order, ..good.clone() }.restore().unwrap_err();
    assert!(matches!(error, Error::Shape { .. }), "{error}");
    let wide = Tensor::from_vec("weight", DType::F32, vec![4], vec![0f32; 4]).unwrap();
    let error = Stored { weight: wide, ..good.clone() }.restore().unwrap_err();
    assert!(matches!(error, Error::Dtype { .. }), "{error}");
    let error = Stored { weight: words("weight", 8), ..good.clone() }.restore().unwrap_err();
    assert!(matches!(error, Error::Shape { .. }), "{error}");
    let scales = Tensor::from_vec("scales", DType::BF16, vec![4, 7], vec![0u16; 28]).unwrap();
    let error = Stored { scales, ..good.clone() }.restore().unwrap_err();
    assert!(
        matches!(error, Error::Shape { .. }) && error.to_string().contains("scales"),
        "{error}"
    );
    let scales = Tensor::from_vec("scales", DType::F8E4M3, vec![4, 192], vec![0u8; 768]).unwrap();
    let error = Stored { scales, ..good.clone() }.restore().unwrap_err();
    assert!(matches!(error, Error::Missing { .. }), "{error}");
    // Scales in another column order are another weight.
    let other = good.permutation.other();
    let found = Stored { permutation: other, ..good.clone() }.restore().unwrap();
    assert_ne!(found.scales, w.scales);
    assert_ne!(good.permutation, other);
    assert!(matches!(good.permutation, ScalePermutation::Grouped));
}
