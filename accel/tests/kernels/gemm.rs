//! Products on a GPU against the reference's execution of the canonical schedule.

use crate::common;

use crate::common::{HALVES, Law, Random, weight};
use marlinspike::num::array::rows_of;
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::ScalarType;
use marlinspike::products::schedule::{Extras, Schedule};
use marlinspike::weight::{Groups, Weight};
use marlinspike_accel::{
    AccelError, Device,
    ops::gemm::{MarlinWeight, Tiling, marlin_gemm, marlin_gemm_tiled},
    ops::permute_cols,
};

/// Rows of moderate values, among them one of any finite numbers, one of zeros, one with an
/// infinity and one with a NaN.
fn activations(random: &mut Random, dtype: ScalarType, size_m: usize, size_k: usize) -> Vec<u16> {
    let mut x = random.halves(dtype, size_m * size_k, 1.0);
    for (m, row) in x.chunks_exact_mut(size_k).enumerate() {
        match m % 19 {
            3 => row.copy_from_slice(&random.any_finite(dtype, size_k)),
            5 => row.fill(0),
            7 => row[random.below(size_k)] = dtype.encode_rne(f64::INFINITY) as u16,
            11 => row[random.below(size_k)] = 0x7fff,
            _ => {}
        }
    }
    x
}

fn expected(x: &[u16], weight: &Weight<'_>, dtype: ScalarType) -> Vec<u16> {
    let schedule = Schedule::canonical(weight, dtype, dtype).unwrap();
    let codes: Vec<u32> = x.iter().map(|&bits| bits.into()).collect();
    let codes = rows_of("x", &codes, weight.shape().size_k).unwrap();
    let y = schedule.execute(codes, weight, Extras::default()).unwrap();
    y.into_iter().map(|bits| bits as u16).collect()
}

fn product(device: &Device, x: &[u16], weight: &MarlinWeight, tiling: Option<Tiling>) -> Vec<u16> {
    let Shape { size_k, size_n } = weight.shape();
    let from = device.upload(x).unwrap();
    // Not zeros, so that an output that is not written is noticed.
    let mut y = device.upload(&vec![0xabcd; x.len() / size_k * size_n]).unwrap();
    match tiling {
        None => marlin_gemm(device, &from, weight, &mut y).unwrap(),
        Some(tiling) => marlin_gemm_tiled(device, &from, weight, &mut y, tiling).unwrap(),
    }
    device.download(&y).unwrap()
}

const TYPES: [ScalarType; 3] = [ScalarType::UINT4B8, ScalarType::UINT4, ScalarType::UINT8B128];

#[test]
fn products_equal_the_canonical_schedule() {
    let Some(device) = common::device_or_skip("products_equal_the_canonical_schedule") else {
        return;
    };
    let mut law = Law::new("marlin_gemm");
    let mut random = Random(0x0123_4567_89AB_CDEF);
    // One chunk, then two; a last chunk that is shorter; eight chunks; N beyond one thread block.
    // N beyond what fills a GPU of up to 160 multiprocessors comes last, with fewer variants.
    let shapes = [
        (128, 64, 8),
        (384, 192, 17),
        (1408, 128, 64),
        (2048, 320, 33),
        (4352, 64, 70),
        (256, 20480, 5),
        (256, 20480, 13),
        (256, 20480, 24),
        (256, 20480, 40),
    ];
    for (i, (size_k, size_n, size_m)) in shapes.into_iter().enumerate() {
        let shape = Shape::new(size_k, size_n);
        for dtype in HALVES {
            for ty in TYPES {
                for group_size in if size_n < 1024 { &[-1, 32, 64, 128][..] } else { &[32, 128] } {
                    let group_size = GroupSize::from_config(*group_size).unwrap();
                    let bias = (i + usize::from(ty == TYPES[1])) % 2 == 0;
                    let w = weight(&mut random, ty, dtype, shape, group_size, bias);
                    let x = activations(&mut random, dtype, size_m, size_k);
                    let on_device =
                        MarlinWeight::new(&device, std::slice::from_ref(&w), dtype).unwrap();
                    let found = product(&device, &x, &on_device, None);
                    let context = format!("{dtype}, {ty}, {shape}, groups of {group_size}");
                    law.equal(&context, &found, &expected(&x, &w, dtype));
                }
            }
        }
    }
    law.held();
}

#[test]
fn a_row_has_the_same_bits_alone_in_any_batch_and_under_any_tiling() {
    let test = "a_row_has_the_same_bits_alone_in_any_batch_and_under_any_tiling";
    let Some(device) = common::device_or_skip(test) else { return };
    let mut law = Law::new("marlin_gemm, batch invariance");
    let mut random = Random(0xFEDC_BA98_7654_3210);
    let (shape, dtype, most) = (Shape::new(4096, 256), ScalarType::BFLOAT16, 200);
    let w = weight(&mut random, TYPES[0], dtype, shape, GroupSize::Of(128), true);
    let on_device = MarlinWeight::new(&device, std::slice::from_ref(&w), dtype).unwrap();
    let x = activations(&mut random, dtype, most, shape.size_k);
    let wanted = expected(&x, &w, dtype);
    for size_m in (1..=66).chain([96, 127, 128, 129, 200]) {
        let first = random.below(most - size_m + 1);
        let rows = &x[first * shape.size_k..][..size_m * shape.size_k];
        let found = product(&device, rows, &on_device, None);
        let of = &wanted[first * shape.size_n..][..size_m * shape.size_n];
        law.equal(&format!("rows {first}..{}", first + size_m), &found, of);
    }
    for m_tiles in [1, 2, 4, 8] {
        for (n_tile, columns) in [(64, 64), (64, 32), (128, 64), (128, 32), (256, 64)] {
            for (teams, stages) in [(1, 3), (2, 2), (2, 8), (4, 2), (4, 3), (4, 5), (8, 2), (8, 4)]
            {
                let tiling = Tiling { m_tiles, n_tile, columns, teams, ranks: 8 / teams, stages };
                let from = device.upload(&x).unwrap();
                let mut y = device.zeroed(wanted.len()).unwrap();
                match marlin_gemm_tiled(&device, &from, &on_device, &mut y, tiling) {
                    Ok(()) => {
                        let found = device.download(&y).unwrap();
                        law.equal(&format!("{tiling:?}"), &found, &wanted);
                    }
                    // This device lacks clusters, or enough shared memory.
                    Err(AccelError::Argument { what: "tiling", .. }) => {}
                    Err(error) => panic!("{tiling:?}: {error}"),
                }
            }
        }
    }
    law.held();
}

#[test]
fn act_order_is_a_gather_of_columns() {
    let Some(device) = common::device_or_skip("act_order_is_a_gather_of_columns") else { return };
    let mut law = Law::new("permute_cols, marlin_gemm with act-order");
    let mut random = Random(0x0F0F_1234_5678_9ABC);
    let (shape, size_m) = (Shape::new(512, 128), 9);
    for dtype in HALVES {
        for group_size in [32, 128] {
            let group = GroupSize::Of(group_size);
            let mut w = weight(&mut random, TYPES[0], dtype, shape, group, false);
            let order = random.permutation(shape.size_k);
            let g_idx = order.iter().map(|&k| k / group_size as u32).collect();
            w.groups = Groups::Indexed { g_idx, group_size: group };
            let x = activations(&mut random, dtype, size_m, shape.size_k);
            let on_device = MarlinWeight::new(&device, std::slice::from_ref(&w), dtype).unwrap();
            let perm = on_device.perm(0).unwrap();
            let gathered = permute_cols(&device, &x, perm).unwrap();
            let columns: Vec<u16> = x
                .chunks_exact(shape.size_k)
                .flat_map(|row| perm.iter().map(|&k| row[k as usize]))
                .collect();
            law.equal("permute_cols", &gathered, &columns);
            let found = product(&device, &gathered, &on_device, None);
            law.equal(&format!("{dtype}, {group}"), &found, &expected(&x, &w, dtype));
        }
    }
    law.held();
}

#[test]
fn arguments_that_do_not_fit_are_refused() {
    let Some(device) = common::device_or_skip("arguments_that_do_not_fit_are_refused") else {
        return;
    };
    let mut random = Random(1);
    let (shape, dtype) = (Shape::new(128, 64), ScalarType::FLOAT16);
    let w = weight(&mut random, TYPES[0], dtype, shape, GroupSize::Of(64), false);
    let on_device = MarlinWeight::new(&device, std::slice::from_ref(&w), dtype).unwrap();
    let complaint = |x: usize, y: usize| {
        let (x, mut y) = (device.zeroed(x).unwrap(), device.zeroed(y).unwrap());
        match marlin_gemm(&device, &x, &on_device, &mut y) {
            Err(AccelError::Argument { what, .. }) => Some(what),
            Ok(()) => None,
            Err(error) => panic!("{error}"),
        }
    };
    assert_eq!(complaint(2 * 128, 2 * 64), None);
    assert_eq!(complaint(0, 0), None);
    assert_eq!(complaint(2 * 128 + 1, 2 * 64), Some("x"));
    assert_eq!(complaint(2 * 128, 3 * 64), Some("y"));
    assert_eq!(complaint(2 * 128, 2 * 64 + 1), Some("y"));
    let second = Device::open().unwrap();
    let (x, mut y) = (second.zeroed(128).unwrap(), device.zeroed(64).unwrap());
    let error = marlin_gemm(&device, &x, &on_device, &mut y).unwrap_err();
    assert!(matches!(error, AccelError::Argument { what: "x", .. }), "{error:?}");
    let channel = GroupSize::Channel;
    let short = weight(&mut random, TYPES[0], dtype, Shape::new(80, 64), channel, false);
    let error = MarlinWeight::new(&device, &[short], dtype).unwrap_err();
    assert!(matches!(error, AccelError::Argument { .. }), "{error:?}");
    let fp8 = Weight { ty: ScalarType::FLOAT8_E4M3FN, ..w.clone() };
    for bad in [fp8, Weight { ty: ScalarType::UINT4, ..w }] {
        let error = MarlinWeight::new(&device, &[bad], dtype).unwrap_err();
        assert!(matches!(error, AccelError::Argument { .. }), "{error:?}");
    }
}
