//! Dense products, under every plan.

use super::{BLOCKS, CHANNELS, Case, KINDS, Kind, UNPROMOTED, moderate_weight, schedule, weight};
use crate::common::{self, HALVES, Law, Random};
use crate::fp8_rows::{self, NOT_WRITTEN};
use crate::many_rows::hopper_or_skip;
use marlinspike::num::dims::Shape;
use marlinspike::num::scalar::ScalarType;
use marlinspike::products::schedule::{GroupSum, MultiplyAdd};
use marlinspike::weight::{Table, TableData, Weight};
use marlinspike_accel::{
    AccelError, Device,
    ops::fp8_gemm::{Fp8Plan, Fp8Scales, Fp8Sums, Fp8Weight, RowsFp8, fp8_gemm, fp8_gemm_planned},
    ops::fp8_scale_step,
    registry::mutants,
};

const SOURCE: &str = "fp8_gemm";

#[test]
fn fp8_products_equal_the_reference_under_every_plan() {
    let test = "fp8_products_equal_the_reference_under_every_plan";
    let Some(device) = hopper_or_skip(test) else { return };
    let mut law = Law::new("fp8_gemm");
    let mut random = Random(0xF8F8_0001_89AB_CDEF);
    // N of parts of a tile and of a block; more stages than the ring has; several rounds of tiles.
    let blocks = [(128, 8, 1), (384, 328, 70), (4480, 72, 13), (256, 8456, 200), (1152, 1024, 333)];
    let channels =
        [(32, 8, 1), (416, 328, 70), (4448, 72, 13), (256, 8456, 200), (1056, 1024, 333)];
    for (kind, shapes) in [(CHANNELS, channels), (UNPROMOTED, channels), (BLOCKS, blocks)] {
        for (i, (size_k, size_n, size_m)) in shapes.into_iter().enumerate() {
            let (dtype, shape) = (HALVES[i % 2], Shape::new(size_k, size_n));
            let case = Case::new(&mut random, kind, dtype, shape, size_m, i % 2 == 1);
            let context = format!("{kind:?}, {dtype}, {shape}, M {size_m}");
            law.equal(&context, &case.found(&device, None), &case.wanted);
            for plan in Fp8Plan::all() {
                for tile_n in [plan.tile_n, plan.tile_n - 16, 16, 80] {
                    let is_fixed = plan.rows == 128 && tile_n != plan.tile_n;
                    if tile_n == 0 || tile_n > 16 * plan.warps || is_fixed {
                        continue;
                    }
                    let plan = Fp8Plan { tile_n, ..plan };
                    let found = case.found(&device, Some(plan));
                    law.equal(&format!("{context}, {plan:?}"), &found, &case.wanted);
                }
            }
        }
    }
    law.held();
}

/// The bits of a row do not depend on the rows next to it.
#[test]
fn fp8_rows_have_the_same_bits_for_every_m() {
    let test = "fp8_rows_have_the_same_bits_for_every_m";
    let Some(device) = hopper_or_skip(test) else { return };
    let mut law = Law::new("fp8_gemm, batches");
    let mut random = Random(0xF8F8_0002_89AB_CDEF);
    let shape = Shape::new(1024, 512);
    for kind in KINDS {
        let case = Case::new(&mut random, kind, HALVES[1], shape, 260, true);
        let weight =
            Fp8Weight::new(&device, std::slice::from_ref(&case.weight), HALVES[1]).unwrap();
        let weight = weight.summed(kind.1).unwrap();
        let groups = case.weight.scales.rows();
        for size_m in [1, 7, 8, 9, 16, 17, 40, 64, 65, 129, 260] {
            let codes = device.upload(&case.codes[..size_m * shape.size_k]).unwrap();
            let scales: Vec<f32> = match kind.0 {
                Fp8Scales::Channels => case.scales[..size_m].to_vec(),
                Fp8Scales::Blocks => (0..groups)
                    .flat_map(|g| &case.scales[g * 260..][..fp8_scale_step(size_m)])
                    .copied()
                    .collect(),
            };
            let scales = device.upload(&scales).unwrap();
            let mut y = device.upload(&vec![NOT_WRITTEN; size_m * shape.size_n]).unwrap();
            let x = RowsFp8 { codes: &codes, scales: &scales };
            fp8_gemm(&device, x, &weight, &mut y).unwrap();
            let found = device.download(&y).unwrap();
            law.equal(&format!("{kind:?}, M {size_m}"), &found, &case.wanted[..found.len()]);
        }
    }
    law.held();
}

/// A product whose bias cancels the outputs of one row.
fn cancelled(kind: Kind, size_m: usize) -> Case {
    let (shape, dtype) = (Shape::new(1280, 512), HALVES[0]);
    let draw =
        |weight| Case::with_weight(&mut Random(0xF8F8_0003_89AB_CDEF), kind, dtype, weight, size_m);
    let weight = moderate_weight(&mut Random(0xF8F8_0004_89AB_CDEF), kind.0, dtype, shape, false);
    draw(fp8_rows::cancelled(weight.clone(), &draw(weight).wanted))
}

/// Needs no GPU: the case tells a fused multiply-add from a product that is rounded before the sum.
#[test]
fn cancelled_fp8_outputs_show_one_rounding() {
    let case = cancelled(BLOCKS, 60);
    let mut schedule = schedule(BLOCKS, HALVES[0]);
    let sum = schedule.group_sum.unwrap();
    schedule.group_sum = Some(GroupSum { multiply_add: MultiplyAdd::Separate, ..sum });
    let differ = case.by(&schedule).iter().zip(&case.wanted).filter(|(a, b)| a != b).count();
    assert!(differ > 20, "{differ}");
}

/// Needs no GPU: promotion changes outputs of the case, an eighth of them.
#[test]
fn cancelled_fp8_outputs_show_promotion() {
    let case = cancelled(UNPROMOTED, 60);
    let promoted = case.by(&schedule(CHANNELS, HALVES[0]));
    let differ = promoted.iter().zip(&case.wanted).filter(|(a, b)| a != b).count();
    assert!(differ > 2000, "{differ} of {}", case.wanted.len());
}

#[test]
fn wrong_fp8_kernels_are_rejected() {
    let Some(device) = hopper_or_skip("wrong_fp8_kernels_are_rejected") else { return };
    // Few rows, and many, of which the first of the last warpgroup's is one of its own.
    let cases: Vec<Case> = KINDS
        .into_iter()
        .flat_map(|kind| [60, 193].map(|size_m| cancelled(kind, size_m)))
        .collect();
    // Tiles of 128 columns, and of 256.
    let plans: Vec<_> = Fp8Plan::all().filter(|plan| plan.rows == 128).map(Some).collect();
    let plans_of = |case: &Case| match case.of_rows.len() / case.weight.scales.rows() {
        193 => plans.clone(),
        _ => vec![None],
    };
    for case in &cases {
        for plan in plans_of(case) {
            assert_eq!(case.found(&device, plan), case.wanted, "{plan:?}");
        }
    }
    let wrong: Vec<_> = mutants().filter(|(row, _)| row.source == SOURCE).collect();
    for (row, mutant) in &wrong {
        let device = Device::open().unwrap().with_mutant(row, mutant).unwrap();
        let passes = |case: &Case| {
            plans_of(case).into_iter().all(|plan| case.found(&device, plan) == case.wanted)
        };
        assert!(!cases.iter().all(passes), "{} passed", mutant.name);
        common::say(&format!("MUTANT {SOURCE}: {} rejected", mutant.name));
    }
    assert!(wrong.len() > 12);
}

#[test]
fn fp8_arguments_that_do_not_fit_are_refused() {
    let Some(device) = hopper_or_skip("fp8_arguments_that_do_not_fit_are_refused") else { return };
    let mut random = Random(3);
    let dtype = ScalarType::BFLOAT16;
    let mut matrix = |of, k, n| weight(&mut random, of, dtype, Shape::new(k, n), false);
    let (channels, blocks) =
        (matrix(Fp8Scales::Channels, 256, 64), matrix(Fp8Scales::Blocks, 256, 200));
    let refused = |weights: &[Weight<'_>], dtype| match Fp8Weight::new(&device, weights, dtype) {
        Err(AccelError::Argument { what, .. }) => Some(what),
        Ok(_) => None,
        Err(error) => panic!("{error}"),
    };
    assert_eq!(refused(std::slice::from_ref(&channels), dtype), None);
    assert_eq!(refused(std::slice::from_ref(&blocks), dtype), None);
    assert_eq!(refused(&[], dtype), Some("weight"));
    assert_eq!(refused(std::slice::from_ref(&channels), ScalarType::FLOAT32), Some("dtype"));
    assert_eq!(refused(&[channels.clone(), blocks.clone()], dtype), Some("weight"));
    assert_eq!(refused(&[matrix(Fp8Scales::Channels, 272, 64)], dtype), Some("shape"));
    assert_eq!(refused(&[matrix(Fp8Scales::Channels, 256, 60)], dtype), Some("shape"));
    let int8 = Weight { ty: ScalarType::UINT8B128, ..channels.clone() };
    assert_eq!(refused(&[int8], dtype), Some("weight"));
    // A scale that differs within 128 columns.
    let mut torn = blocks.clone();
    let mut bits: Vec<u32> = torn.scales.iter_bits().collect();
    bits[130] = 1.5f32.to_bits();
    torn.scales = Table::new(ScalarType::FLOAT32, 2, 200, TableData::B32(bits)).unwrap();
    assert_eq!(refused(&[torn], dtype), Some("scales"));

    let summed = Fp8Weight::new(&device, std::slice::from_ref(&blocks), dtype).unwrap();
    let error = summed.summed(Fp8Sums::Unpromoted).unwrap_err();
    assert!(matches!(error, AccelError::Argument { what: "sums", .. }), "{error}");

    let good = Fp8Plan { rows: 8, tile_n: 16, warps: 4 };
    let wide = Fp8Plan { rows: 128, tile_n: 256, warps: 8 };
    let complaint = |w: &Weight<'_>, [codes, scales, y]: [usize; 3], plan| {
        let there = Fp8Weight::new(&device, std::slice::from_ref(w), dtype).unwrap();
        let (codes, scales) = (device.zeroed(codes).unwrap(), device.zeroed(scales).unwrap());
        let x = RowsFp8 { codes: &codes, scales: &scales };
        let mut y = device.zeroed(y).unwrap();
        match fp8_gemm_planned(&device, x, &there, &mut y, plan) {
            Err(AccelError::Argument { what, .. }) => Some(what),
            Ok(()) => None,
            Err(error) => panic!("{error}"),
        }
    };
    assert_eq!(complaint(&channels, [512, 2, 128], good), None);
    // One scale of all rows.
    assert_eq!(complaint(&channels, [768, 1, 192], good), None);
    assert_eq!(complaint(&channels, [0, 0, 0], good), None);
    assert_eq!(complaint(&channels, [511, 2, 128], good), Some("x"));
    assert_eq!(complaint(&channels, [768, 2, 192], good), Some("x_scales"));
    assert_eq!(complaint(&channels, [512, 2, 127], good), Some("y"));
    assert_eq!(complaint(&blocks, [512, 8, 400], good), None);
    assert_eq!(complaint(&blocks, [512, 4, 400], good), Some("x_scales"));
    for bad in [
        Fp8Plan { rows: 24, ..good },
        Fp8Plan { tile_n: 24, ..good },
        Fp8Plan { tile_n: 80, ..good },
        Fp8Plan { tile_n: 0, ..good },
        Fp8Plan { tile_n: 112, ..wide },
        Fp8Plan { warps: 4, ..wide },
    ] {
        assert_eq!(complaint(&channels, [512, 2, 128], bad), Some("plan"), "{bad:?}");
    }
}
