//! Products of many rows on a GPU, under every plan, against the reference's execution of the canonical
//! schedule. Only devices of capability 9.0 have the instructions.

use crate::common;
use crate::fp8_gemm::experts::quantizes;

use std::sync::Mutex;

use crate::common::{
    Experts, Float, HALVES, Law, Random, Tokens, compare_layers, float_weight, forward_in, weight,
};
use marlinspike::case::Activation;
use marlinspike::moe::activation::Definition;
use marlinspike::moe::layer::Layer;
use marlinspike::num::array::rows_of;
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::ScalarType;
use marlinspike::products::schedule::{Extras, Schedule};
use marlinspike::weight::{Groups, Weight};
use marlinspike_accel::{
    AccelError, Device,
    ops::MarlinLayer,
    ops::gemm::{ManyRows, MarlinWeight, marlin_gemm_many_rows},
    registry::mutants,
};
use rayon::prelude::*;

/// The device where it has the kernel.
pub(crate) fn hopper_or_skip(test: &str) -> Option<common::SharedGpu> {
    let device = common::device_or_skip(test)?;
    if device.compute_capability() == (9, 0) {
        return Some(device);
    }
    common::skip("no device of capability 9.0", test);
    None
}

fn expected(x: &[u16], weight: &Weight<'_>, dtype: ScalarType) -> Vec<u16> {
    let schedule = Schedule::canonical(weight, dtype, dtype).unwrap();
    let codes: Vec<u32> = x.iter().map(|&bits| bits.into()).collect();
    let codes = rows_of("x", &codes, weight.shape().size_k).unwrap();
    let y = schedule.execute(codes, weight, Extras::default()).unwrap();
    y.into_iter().map(|bits| bits as u16).collect()
}

/// Weights of every form that the kernel takes, with one bias in two.
fn weights(random: &mut Random, dtype: ScalarType, shape: Shape) -> Vec<Weight<'static>> {
    let mut all = Vec::new();
    for ty in [ScalarType::UINT4B8, ScalarType::UINT4, ScalarType::UINT8B128] {
        for group_size in [-1, 32, 64, 128] {
            let group_size = GroupSize::from_config(group_size).unwrap();
            all.push(weight(random, ty, dtype, shape, group_size, all.len() % 2 == 0));
        }
    }
    for group_size in [GroupSize::Channel, GroupSize::Of(64)] {
        all.push(float_weight(random, Float::Fp8(group_size), dtype, shape, true));
    }
    let scales_of_bytes =
        [134, 253].map(Float::Mxfp8).into_iter().chain([128, 253].map(Float::Mxfp4));
    for float in scales_of_bytes.chain([Float::Nvfp4]).filter(|float| float.takes(dtype)) {
        all.push(float_weight(random, float, dtype, shape, true));
    }
    all
}

#[test]
fn products_equal_the_canonical_schedule_under_every_plan() {
    let test = "products_equal_the_canonical_schedule_under_every_plan";
    if hopper_or_skip(test).is_none() {
        return;
    }
    let law = Mutex::new(Law::new("marlin_gemm, many rows"));
    let all = ManyRows::all().collect::<Vec<_>>();
    // One chunk; several, the last one shorter; eight. N of no whole tile. Rows of a part of a tile, of
    // several, and more tiles than multiprocessors take at once.
    let sizes = [(128, 64, 5), (384, 192, 97), (1408, 320, 193), (4352, 576, 70), (256, 8256, 130)];
    let cases: Vec<_> = sizes.iter().flat_map(|&size| HALVES.map(|dtype| (size, dtype))).collect();
    // A device each, so that modules are compiled side by side.
    cases.par_iter().for_each(|&((size_k, size_n, size_m), dtype)| {
        let device = Device::open().unwrap();
        let mut random = Random(0x3A17_0001_89AB_CDEF + size_n as u64);
        let shape = Shape::new(size_k, size_n);
        let mut x = random.halves(dtype, size_m * size_k, 1.0);
        for (m, row) in x.chunks_exact_mut(size_k).enumerate() {
            match m % 19 {
                1 => row.copy_from_slice(&random.any_finite(dtype, size_k)),
                2 => row.fill(0),
                3 => row[size_k / 3] = dtype.encode_rne(f64::INFINITY) as u16,
                4 => row[size_k / 5] = 0x7fff,
                _ => {}
            }
        }
        let from = device.upload(&x).unwrap();
        for (i, w) in weights(&mut random, dtype, shape).iter().enumerate() {
            let there = MarlinWeight::new(&device, std::slice::from_ref(w), dtype).unwrap();
            let wanted = expected(&x, w, dtype);
            // Each weight under two plans; all of them over the shapes.
            for plan in [0, 5].map(|j| all[(i + j + size_n / 64) % all.len()]) {
                // Not zeros, so that an output that is not written is noticed.
                let mut y = device.upload(&vec![0xabcd; wanted.len()]).unwrap();
                marlin_gemm_many_rows(&device, &from, &there, &mut y, plan).unwrap();
                let context = format!("{dtype}, {}, {shape}, M {size_m}, {plan:?}", w.ty);
                let found = device.download(&y).unwrap();
                law.lock().unwrap().equal(&context, &found, &wanted);
            }
        }
    });
    law.into_inner().unwrap().held();
}

#[test]
fn tiles_that_thread_blocks_share_have_the_same_bits() {
    let test = "tiles_that_thread_blocks_share_have_the_same_bits";
    let Some(device) = hopper_or_skip(test) else { return };
    let mut law = Law::new("marlin_gemm, many rows, tiles shared");
    let mut random = Random(0x3A17_0003_89AB_CDEF);
    let multiprocessors = device.multiprocessors() as usize;
    let shapes = ManyRows::all().filter(|plan| plan.rows == 16);
    let tall = [(8, 16, 192), (8, 32, 80), (12, 32, 48)];
    let tall = tall.map(|(warps, columns, rows)| ManyRows { warps, columns, rows });
    for (i, plan) in shapes.chain(tall).enumerate() {
        // Two blocks of rows; a few more tiles than multiprocessors; chunks of 256 k.
        let size_m = plan.rows as usize + 3;
        let size_k = if plan.rows == 16 { 2048 } else { 1024 };
        let columns = (plan.warps * plan.columns) as usize;
        let size_n = (multiprocessors / 2 + [3, 8, 1][i % 3]) * columns - 64;
        let dtype = HALVES[i % 2];
        let group = GroupSize::Of([128, 512, 32][i % 3]);
        let shape = Shape::new(size_k, size_n);
        let w = weight(&mut random, ScalarType::UINT4B8, dtype, shape, group, i % 2 == 0);
        let x = random.halves(dtype, size_m * size_k, 1.0);
        let wanted = expected(&x, &w, dtype);
        let x = device.upload(&x).unwrap();
        let there = MarlinWeight::new(&device, std::slice::from_ref(&w), dtype).unwrap();
        // Repeatedly, since each product reuses the memory of the one before.
        for run in 0..4 {
            let mut y = device.upload(&vec![0xabcd; wanted.len()]).unwrap();
            marlin_gemm_many_rows(&device, &x, &there, &mut y, plan).unwrap();
            let context = format!("{dtype}, {shape}, M {size_m}, {plan}, run {run}");
            law.equal(&context, &device.download(&y).unwrap(), &wanted);
        }
    }
    law.held();
}

#[test]
fn layers_equal_the_canonical_arithmetic_under_every_plan() {
    let test = "layers_equal_the_canonical_arithmetic_under_every_plan";
    let Some(device) = hopper_or_skip(test) else { return };
    let mut law = Law::new("expert layer, many rows");
    let mut random = Random(0x3A17_0002_89AB_CDEF);
    let (h, size_i, experts, top_k) = (512, 384, 5, 2);
    let all = ManyRows::all().collect::<Vec<_>>();
    let types = [ScalarType::UINT4B8, ScalarType::UINT4, ScalarType::UINT8B128];
    for (i, plan) in all.iter().enumerate() {
        let (dtype, ty) = (HALVES[i % 2], types[i % 3]);
        let activation = Definition::new([Activation::Silu, Activation::SwigluOai][i % 2]);
        let group = GroupSize::Of([32, 64, 128][i / 2 % 3]);
        let parts = Experts::new([h, size_i], activation, dtype, |shape| {
            (0..experts).map(|_| weight(&mut random, ty, dtype, shape, group, i % 4 < 2)).collect()
        });
        let map = parts.every_other();
        let expert_map = (i % 3 == 1).then_some(map.as_slice());
        let layer = Layer {
            num_experts: expert_map.map_or(experts, <[i32]>::len),
            expert_map,
            router_weight_on_input: i % 5 == 2,
            ..parts.layer()
        };
        let there = MarlinLayer::new(&device, &layer).unwrap();
        // The other plan of the same rows, if it exists, for the second product.
        let same_rows = |other: &&ManyRows| other.rows == plan.rows && *other != plan;
        let second = all.iter().find(same_rows).unwrap_or(plan);
        for tokens in [3, 300] {
            let context = format!("{dtype}, {ty}, {plan:?} and {second:?}");
            compare_layers(
                &mut law,
                &context,
                &mut random,
                &layer,
                (tokens, top_k),
                |x, ids, w| {
                    let plans = [*plan, *second];
                    let mut work =
                        there.workspace_many_rows(&device, tokens, top_k, plans).unwrap();
                    forward_in(&device, &there, &mut work, x, ids, w)
                },
            );
        }
    }
    law.held();
}

#[test]
fn wrong_kernels_are_noticed() {
    if hopper_or_skip("wrong_kernels_are_noticed").is_none() {
        return;
    }
    let mut random = Random(0x3A17_0003_89AB_CDEF);
    let (dtype, activation) = (ScalarType::BFLOAT16, Definition::new(Activation::Silu));
    // Three chunks of w13's k.
    let (h, size_i, experts, top_k, tokens) = (768, 256, 3, 2, 150);
    let parts = Experts::new([h, size_i], activation, dtype, |shape| {
        let (ty, group) = (ScalarType::UINT4B8, GroupSize::Of(64));
        (0..experts).map(|_| weight(&mut random, ty, dtype, shape, group, true)).collect()
    });
    let layer = parts.layer();
    let inputs = Tokens::new(&mut random, &layer, (tokens, top_k), |_, expert| expert);
    let wanted = inputs.canonical(&layer);
    let found = |device: Device| {
        let there = MarlinLayer::new(&device, &layer).unwrap();
        let plan = ManyRows { warps: 8, columns: 16, rows: 64 };
        let mut work = there.workspace_many_rows(&device, tokens, top_k, [plan; 2]).unwrap();
        let mut y = device.upload(&vec![0xabcd; wanted.len()]).unwrap();
        let x = device.upload(&inputs.x).unwrap();
        let ids = device.upload(&inputs.ids).unwrap();
        let weights = device.upload(&inputs.weights).unwrap();
        there.forward(&device, &x, &ids, &weights, &mut work, &mut y).unwrap();
        device.download(&y).unwrap()
    };
    assert_eq!(found(Device::open().unwrap()), wanted);
    let wrong: Vec<_> = mutants()
        .filter(|(row, mutant)| {
            let is_here = ["marlin_gemm_wgmma", "moe_gather"].contains(&row.source);
            is_here && quantizes(mutant).is_none()
        })
        .collect();
    for (row, mutant) in &wrong {
        let device = Device::open().unwrap().with_mutant(row, mutant).unwrap();
        assert_ne!(found(device), wanted, "{}: {} passed", row.source, mutant.name);
    }
    common::say(&format!("LAW wrong kernels of many rows rejected: {0} of {0}", wrong.len()));
}

#[test]
fn what_the_kernel_has_not_is_refused() {
    let Some(device) = common::device_or_skip("what_the_kernel_has_not_is_refused") else {
        return;
    };
    let mut random = Random(1);
    let (shape, dtype) = (Shape::new(128, 64), ScalarType::BFLOAT16);
    let complaint = |weight: &Weight<'_>, plan: ManyRows, rows: usize| {
        let there = MarlinWeight::new(&device, std::slice::from_ref(weight), dtype).unwrap();
        let (x, mut y) = (device.zeroed(2 * 128).unwrap(), device.zeroed(rows * 64).unwrap());
        match marlin_gemm_many_rows(&device, &x, &there, &mut y, plan) {
            Err(AccelError::Argument { what, .. }) => Some(what),
            Err(AccelError::Capability { .. }) => Some("tiling"),
            Ok(()) => None,
            Err(error) => panic!("{error}"),
        }
    };
    let good = ManyRows { warps: 8, columns: 16, rows: 64 };
    let int4 = weight(&mut random, ScalarType::UINT4B8, dtype, shape, GroupSize::Of(64), false);
    let on_hopper = device.compute_capability() == (9, 0);
    assert_eq!(complaint(&int4, good, 2), if on_hopper { None } else { Some("tiling") });
    assert_eq!(complaint(&int4, good, 3), Some("y"));
    let bad = [
        (8, 16, 0),
        (8, 16, 72),
        (8, 16, 208),
        (8, 32, 112),
        (8, 64, 64),
        (4, 16, 64),
        (16, 16, 80),
    ];
    for bad in bad {
        let plan = ManyRows { warps: bad.0, columns: bad.1, rows: bad.2 };
        assert_eq!(complaint(&int4, plan, 2), Some("tiling"), "{plan:?}");
    }
    let g_idx = (0..128).map(|k| u32::from(k % 3 == 0)).collect();
    let groups = Groups::Indexed { g_idx, group_size: GroupSize::Of(64) };
    assert_eq!(complaint(&Weight { groups, ..int4 }, good, 2), Some("tiling"));
}
