//! The products take exactly the weights of the reference's table, which `inspect` reads.

use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::ScalarType;
use marlinspike::select::{CUDA_CAPABILITY, CUDA_WEIGHTS, CudaScales};
use marlinspike::weight::{Codes, Groups, Table, TableData, Weight};

use super::Form;
use crate::ops::gemm::{MOE, ROW};

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

#[test]
fn products_need_the_tables_capability() {
    for row in [&ROW, &MOE] {
        assert_eq!(row.needs.compute_capability, CUDA_CAPABILITY, "{}", row.name);
    }
}
