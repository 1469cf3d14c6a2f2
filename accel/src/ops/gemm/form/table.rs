//! The products take exactly the weights of the reference's table, which `inspect` reads.

use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::ScalarType;
use marlinspike::select::{CUDA_CAPABILITY, CUDA_WEIGHTS, CudaScales};
use marlinspike::weight::{Codes, Groups, Table, TableData, Weight};

use super::{Form, Packed, PackedScales, ScaleBound};
use crate::ops::gemm::{MOE, ROW};
use crate::parameters::Scales;

/// A multiple of every group size below.
const SHAPE: Shape = Shape { size_k: 384, size_n: 64 };

/// A weight of ones.
fn weight(ty: ScalarType, scales: CudaScales, zeros: bool, group: GroupSize) -> Weight<'static> {
    let groups = match group {
        GroupSize::Channel => 1,
        GroupSize::Of(g) => SHAPE.size_k / g,
    };
    let table = |ty, data| Table::new(ty, groups, SHAPE.size_n, data).unwrap();
    let len = groups * SHAPE.size_n;
    let bits = if ty.size_bits() == 8 { 8 } else { 4 };
    Weight {
        name: "weight".into(),
        ty,
        codes: Codes::from_words(bits, SHAPE, vec![0; SHAPE.len() * bits as usize / 32]).unwrap(),
        scales: match scales {
            CudaScales::SixteenBit => {
                table(ScalarType::BFLOAT16, TableData::B16(vec![0x3f80; len]))
            }
            CudaScales::E8m0 => table(ScalarType::FLOAT8_E8M0FNU, TableData::B8(vec![127; len])),
            CudaScales::E4m3 => table(ScalarType::FLOAT8_E4M3FN, TableData::B8(vec![0x38; len])),
        },
        zeros: zeros.then(|| table(ScalarType::UINT8, TableData::B8(vec![0; len]))),
        groups: Groups::Uniform(group),
        global_scale: None,
        bias: None,
    }
}

#[test]
fn products_take_what_the_table_says() {
    let types = [
        (ScalarType::UINT4, true),
        (ScalarType::UINT4, false),
        (ScalarType::UINT4B8, true),
        (ScalarType::UINT4B8, false),
        (ScalarType::UINT8, true),
        (ScalarType::UINT8B128, false),
        (ScalarType::FLOAT8_E4M3FN, false),
        (ScalarType::FLOAT4_E2M1F, false),
    ];
    let groups = [16, 32, 48, 64, 96, 128, 192].map(GroupSize::Of);
    let mut taken = 0;
    for (ty, zeros) in types {
        for scales in [CudaScales::SixteenBit, CudaScales::E8m0, CudaScales::E4m3] {
            for group in groups.into_iter().chain([GroupSize::Channel]) {
                for uneven in [false, true] {
                    let mut rows = CUDA_WEIGHTS
                        .iter()
                        .filter(|w| (w.ty, w.zeros, w.scales) == (ty, zeros, scales));
                    let expected = rows.any(|w| match uneven {
                        true => w.act_order,
                        false => w.groups.contain(group),
                    });
                    let weights = [weight(ty, scales, zeros, group)];
                    let found = Form::of_halves(&weights, ScalarType::BFLOAT16, uneven);
                    let what = format!("{ty} zeros {zeros} {scales:?} {group} uneven {uneven}");
                    assert_eq!(found.is_ok(), expected, "{what}: {found:?}");
                    taken += usize::from(expected);
                }
            }
        }
    }
    // Three kinds of integers in five group sizes, two of them uneven in all eight; FP8 in four; MX
    // and NVFP4 in one each.
    assert_eq!(taken, 3 * 5 + 2 * 8 + 4 + 3);
}

/// What the owner of the packed weight states of it.
fn packed(weight: &Weight<'_>, dtype: ScalarType, is_narrow: bool, below: ScaleBound) -> Packed {
    let scales = match weight.scales.ty() {
        ScalarType::FLOAT8_E8M0FNU => PackedScales::E8m0 { is_narrow },
        ScalarType::FLOAT8_E4M3FN => PackedScales::E4m3,
        _ => PackedScales::Bits16 { below },
    };
    let (shape, codes, groups) = (weight.shape(), weight.ty, weight.scales.rows());
    Packed { shape, experts: 1, dtype, codes, scales, groups }
}

#[test]
fn packed_weights_have_the_form_of_those_that_are_packed_here() {
    let types = [
        (ScalarType::UINT4, true),
        (ScalarType::UINT4B8, false),
        (ScalarType::UINT8B128, false),
        (ScalarType::FLOAT8_E4M3FN, false),
        (ScalarType::FLOAT4_E2M1F, false),
    ];
    let groups = [16, 32, 48, 64, 96, 128, 192].map(GroupSize::Of);
    let mut taken = 0;
    for dtype in [ScalarType::FLOAT16, ScalarType::BFLOAT16] {
        for (ty, zeros) in types {
            for scales in [CudaScales::SixteenBit, CudaScales::E8m0, CudaScales::E4m3] {
                for group in groups.into_iter().chain([GroupSize::Channel]) {
                    let weight = weight(ty, scales, zeros, group);
                    let stated = packed(&weight, dtype, true, ScaleBound::None);
                    let found = Form::of_packed(&stated).ok();
                    let expected = Form::of_halves(&[weight], dtype, false).ok();
                    assert_eq!(found, expected, "{ty} {scales:?} {group} {dtype}");
                    taken += usize::from(found.is_some());
                }
            }
        }
    }
    // Integers in five group sizes and FP8 in four, NVFP4 in one, for both types; MX for bfloat16.
    assert_eq!(taken, 2 * (3 * 5 + 4 + 1) + 2);
}

#[test]
fn a_bound_of_scales_is_used_where_a_kernel_has_it() {
    let of = |ty, dtype, group, below| {
        let weight = weight(ty, CudaScales::SixteenBit, ty == ScalarType::UINT4, group);
        Form::of_packed(&packed(&weight, dtype, false, below)).unwrap().scales
    };
    use {ScalarType as T, ScaleBound::*};
    let (group, bf16) = (GroupSize::Of(64), T::BFLOAT16);
    assert_eq!(of(T::UINT4B8, bf16, group, None), Scales::Bits16);
    assert_eq!(of(T::UINT4B8, bf16, group, BelowHalf), Scales::Bits16BelowHalf);
    assert_eq!(of(T::UINT4B8, bf16, group, Below32nd), Scales::Bits16Below32nd);
    assert_eq!(of(T::UINT8B128, bf16, group, BelowHalf), Scales::Bits16);
    assert_eq!(of(T::UINT8B128, bf16, group, Below32nd), Scales::Bits16Below32nd);
    assert_eq!(of(T::UINT4B8, bf16, GroupSize::Channel, Below32nd), Scales::Bits16);
    assert_eq!(of(T::UINT4B8, T::FLOAT16, group, Below32nd), Scales::Bits16);
    assert_eq!(of(T::UINT4, bf16, group, Below32nd), Scales::Bits16);
    assert_eq!(of(T::FLOAT8_E4M3FN, bf16, group, Below32nd), Scales::Bits16);
}

#[test]
fn products_need_the_tables_capability() {
    for row in [&ROW, &MOE] {
        assert_eq!(row.needs.compute_capability, CUDA_CAPABILITY, "{}", row.name);
    }
}
