//! Version 2 of the canonical schedule on a GPU against the reference's execution of it: whole products, ranks' parts
//! of k, under tilings and plans of many rows.

use crate::common;

use crate::common::{Float, HALVES, Law, Random, float_weight, weight};
use marlinspike::num::array::rows_of;
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::ScalarType;
use marlinspike::products::schedule::{Extras, Schedule, Split};
use marlinspike::weight::Weight;
use marlinspike_accel::{
    AccelError, Device,
    nvrtc::Arch,
    operation::{Mutant, Row},
    ops::gemm::{
        ManyRows, MarlinWeight, Tiling, marlin_gemm, marlin_gemm_many_rows, marlin_gemm_part,
        marlin_gemm_tiled,
    },
    registry,
};

const BF16: ScalarType = ScalarType::BFLOAT16;

/// Leaves of one chunk: 4 (the second K with groups that a leaf cuts), 8; of two: 4; of three and four: 2.
const SIZES_K: [usize; 7] = [512, 768, 1536, 2048, 11008, 1408, 1920];

fn on_device(device: &Device, w: &Weight<'_>, dtype: ScalarType) -> MarlinWeight {
    let weight = MarlinWeight::new(device, std::slice::from_ref(w), dtype).unwrap();
    weight.by_version_2().unwrap()
}

fn execute(schedule: &Schedule, x: &[u16], w: &Weight<'_>) -> Vec<u32> {
    let codes: Vec<u32> = x.iter().map(|&bits| bits.into()).collect();
    let codes = rows_of("x", &codes, w.shape().size_k).unwrap();
    schedule.execute(codes, w, Extras::default()).unwrap().into_iter().collect()
}

fn whole(x: &[u16], w: &Weight<'_>, dtype: ScalarType) -> Vec<u16> {
    let schedule = Schedule::canonical_v2(w, dtype, dtype).unwrap();
    execute(&schedule, x, w).into_iter().map(|bits| bits as u16).collect()
}

/// Weights of several forms.
fn weights(random: &mut Random, dtype: ScalarType, shape: Shape) -> Vec<Weight<'static>> {
    let mut all = Vec::new();
    for (ty, group_size) in [
        (ScalarType::UINT4B8, -1),
        (ScalarType::UINT4B8, 128),
        (ScalarType::UINT4, 64),
        (ScalarType::UINT8B128, 32),
    ] {
        let group_size = GroupSize::from_config(group_size).unwrap();
        all.push(weight(random, ty, dtype, shape, group_size, all.len() % 2 == 0));
    }
    for float in [Float::Fp8(GroupSize::Channel), Float::Mxfp4(128), Float::Nvfp4] {
        if float.takes(dtype) {
            all.push(float_weight(random, float, dtype, shape, true));
        }
    }
    all
}

#[test]
fn products_by_version_2_equal_the_reference() {
    let Some(device) = common::device_or_skip("products_by_version_2_equal_the_reference") else {
        return;
    };
    let mut law = Law::new("marlin_gemm, version 2");
    let mut random = Random(0x5EED_0002_89AB_CDEF);
    for (i, size_k) in SIZES_K.into_iter().enumerate() {
        let (shape, size_m) = (Shape::new(size_k, [128, 320][i % 2]), 70);
        for dtype in HALVES {
            for w in weights(&mut random, dtype, shape) {
                let x = random.halves(dtype, size_m * size_k, 1.0);
                let there = on_device(&device, &w, dtype);
                let wanted = whole(&x, &w, dtype);
                for rows in [1, 13, 29, 70] {
                    let from = device.upload(&x[..rows * size_k]).unwrap();
                    // Not zeros, so that an output that is not written is noticed.
                    let mut y = device.upload(&vec![0xabcd; rows * shape.size_n]).unwrap();
                    marlin_gemm(&device, &from, &there, &mut y).unwrap();
                    let context = format!("{dtype}, {}, {shape}, M {rows}", w.ty);
                    let wanted = &wanted[..rows * shape.size_n];
                    law.equal(&context, &device.download(&y).unwrap(), wanted);
                }
            }
        }
    }
    law.held();
}

#[test]
fn every_division_of_a_product_by_version_2_has_the_same_bits() {
    let test = "every_division_of_a_product_by_version_2_has_the_same_bits";
    let Some(device) = common::device_or_skip(test) else { return };
    let mut law = Law::new("marlin_gemm, version 2, tilings and plans");
    let mut random = Random(0x5EED_0003_89AB_CDEF);
    for size_k in [2048, 1920, 11008] {
        let (shape, size_m) = (Shape::new(size_k, 256), 200);
        let group = GroupSize::Of(128);
        let w = weight(&mut random, ScalarType::UINT4B8, BF16, shape, group, true);
        let x = random.halves(BF16, size_m * size_k, 1.0);
        let there = on_device(&device, &w, BF16);
        let wanted = whole(&x, &w, BF16);
        let from = device.upload(&x).unwrap();
        let tilings = [1, 2, 4, 8].into_iter().flat_map(|m_tiles| {
            [(1, 3), (2, 2), (4, 4), (8, 2)].map(|(teams, stages)| (m_tiles, teams, stages))
        });
        for (m_tiles, teams, stages) in tilings {
            let ranks = 8 / teams;
            let tiling = Tiling { m_tiles, n_tile: 128, columns: 64, teams, ranks, stages };
            let mut y = device.upload(&vec![0xabcd; wanted.len()]).unwrap();
            match marlin_gemm_tiled(&device, &from, &there, &mut y, tiling) {
                Ok(()) => law.equal(&format!("{tiling:?}"), &device.download(&y).unwrap(), &wanted),
                // This device lacks clusters, or enough shared memory.
                Err(AccelError::Argument { what: "tiling", .. }) => {}
                Err(error) => panic!("{tiling:?}: {error}"),
            }
        }
        if device.compute_capability() != (9, 0) {
            continue;
        }
        for plan in ManyRows::all() {
            let mut y = device.upload(&vec![0xabcd; wanted.len()]).unwrap();
            marlin_gemm_many_rows(&device, &from, &there, &mut y, plan).unwrap();
            let context = format!("{shape}, {plan}");
            law.equal(&context, &device.download(&y).unwrap(), &wanted);
        }
    }
    law.held();
}

/// Tiles that two thread blocks share, in runs of two, three and four chunks.
#[test]
fn shared_tiles_of_version_2_have_the_same_bits() {
    let test = "shared_tiles_of_version_2_have_the_same_bits";
    let Some(device) = common::device_or_skip(test) else { return };
    if device.compute_capability() != (9, 0) {
        return common::skip("no device of capability 9.0", test);
    }
    let mut law = Law::new("marlin_gemm, version 2, tiles shared");
    let mut random = Random(0x5EED_0004_89AB_CDEF);
    let multiprocessors = device.multiprocessors() as usize;
    let plans = [(8, 16, 192), (8, 32, 80), (12, 32, 48), (8, 16, 16)];
    let plans = plans.map(|(warps, columns, rows)| ManyRows { warps, columns, rows });
    for (i, size_k) in [4096, 7552, 11008, 4096, 2048, 8064].into_iter().enumerate() {
        let plan = plans[i % plans.len()];
        let (columns, size_m) = ((plan.warps * plan.columns) as usize, plan.rows as usize + 3);
        for more in [1, 5, 17, 40] {
            let size_n = (multiprocessors / 2 + more) * columns - 64;
            let shape = Shape::new(size_k, size_n);
            let dtype = HALVES[i % 2];
            let w =
                weight(&mut random, ScalarType::UINT4B8, dtype, shape, GroupSize::Channel, false);
            let x = random.halves(dtype, size_m * size_k, 1.0);
            let there = on_device(&device, &w, dtype);
            let from = device.upload(&x).unwrap();
            let few = {
                // Rows of eight: by the kernel that shares no tiles, compared with the reference above.
                let mut y = device.upload(&vec![0u16; size_m * size_n]).unwrap();
                let tiling = there.tiling(&device, 64).unwrap();
                marlin_gemm_tiled(&device, &from, &there, &mut y, tiling).unwrap();
                device.download(&y).unwrap()
            };
            // Repeatedly, since each product reuses the memory of the one before.
            for run in 0..4 {
                let mut y = device.upload(&vec![0xabcd; few.len()]).unwrap();
                marlin_gemm_many_rows(&device, &from, &there, &mut y, plan).unwrap();
                let context = format!("{dtype}, {shape}, M {size_m}, {plan}, run {run}");
                law.equal(&context, &device.download(&y).unwrap(), &few);
            }
        }
    }
    law.held();
}

#[test]
fn parts_of_k_equal_the_reference() {
    let Some(device) = common::device_or_skip("parts_of_k_equal_the_reference") else { return };
    let mut law = Law::new("marlin_gemm_part");
    let mut random = Random(0x5EED_0005_89AB_CDEF);
    for size_k in SIZES_K {
        let (shape, size_m) = (Shape::new(size_k, 128), 70);
        for ranks in [1, 2, 4, 8] {
            let Ok(split) = Split::new(size_k, 0, ranks) else { continue };
            for w in weights(&mut random, BF16, shape) {
                // Groups that ranks cut are no weights of a rank.
                if !split.rows().len().is_multiple_of(size_k / w.scales.rows())
                    && w.scales.rows() > 1
                {
                    continue;
                }
                let x = random.halves(BF16, size_m * size_k, 1.0);
                for rank in [0, ranks - 1] {
                    let split = Split::new(size_k, rank, ranks).unwrap();
                    let own = split.part_of(&w).unwrap();
                    let x: Vec<u16> = x
                        .chunks_exact(size_k)
                        .flat_map(|row| &row[split.rows()])
                        .copied()
                        .collect();
                    let schedule = Schedule::canonical_v2_part(&own, BF16, BF16).unwrap();
                    let wanted = execute(&schedule, &x, own.weight());
                    let there = MarlinWeight::of_part(&device, &own, BF16).unwrap();
                    for rows in [1, 24, 70] {
                        let from = device.upload(&x[..rows * split.rows().len()]).unwrap();
                        let mut y = device.upload(&vec![f32::NAN; rows * shape.size_n]).unwrap();
                        marlin_gemm_part(&device, &from, &there, &mut y).unwrap();
                        let found: Vec<u32> =
                            device.download(&y).unwrap().iter().map(|sum| sum.to_bits()).collect();
                        let context =
                            format!("{}, {shape}, rank {rank} of {ranks}, M {rows}", w.ty);
                        law.equal(&context, &found, &wanted[..rows * shape.size_n]);
                    }
                }
            }
        }
    }
    law.held();
}

/// Wrong orders of addition: the kernel, the change, the rows of x for which it runs.
const WRONG: [(&str, usize, Mutant); 3] = [
    ("marlin_gemm", 5, Mutant::new("a chain for the tree", "if (run == 2) {", "if (run == 0) {")),
    (
        "marlin_gemm_many_rows",
        256,
        Mutant::new("a chain for the tree", "ones & 1; ones >>= 1", "ones; ones &= ones - 1"),
    ),
    (
        "marlin_gemm_many_rows",
        256,
        Mutant::new(
            "a run of four",
            "const unsigned run = p.cut.run, index",
            "const unsigned run = 4, index",
        ),
    ),
];

fn row(name: &str) -> &'static Row {
    registry().iter().find(|row| row.name == name).unwrap()
}

/// Needs NVRTC but no GPU.
#[test]
fn wrong_orders_compile() {
    let Some(nvrtc) = common::nvrtc_or_skip("wrong_orders_compile") else { return };
    let arch = Arch { compute_capability: (9, 0), specific: true };
    for (name, _, mutant) in &WRONG {
        let row = row(name);
        let text = mutant.text(marlinspike_kernels::source(row.source).unwrap()).unwrap();
        let wrong = marlinspike_kernels::Source { name: row.source, text: text.leak() };
        let parameters = (row.variants)(arch).unwrap().swap_remove(0);
        nvrtc.compile(&wrong, arch, &parameters).unwrap_or_else(|e| panic!("{}: {e}", mutant.name));
    }
}

#[test]
fn wrong_orders_are_noticed() {
    let Some(right) = common::device_or_skip("wrong_orders_are_noticed") else { return };
    let mut random = Random(0x5EED_0006_89AB_CDEF);
    // Wide enough for the kernel of many rows to be the quicker one.
    let shape = Shape::new(4096, 8192);
    let w = weight(&mut random, ScalarType::UINT4B8, BF16, shape, GroupSize::Of(128), false);
    let x = random.halves(BF16, 256 * shape.size_k, 1.0);
    let found = |device: &Device, size_m: usize| {
        let there = on_device(device, &w, BF16);
        let from = device.upload(&x[..size_m * shape.size_k]).unwrap();
        // f32 sums: rounding to 16 bits would hide most differences.
        let mut y = device.zeroed::<f32>(size_m * shape.size_n).unwrap();
        marlin_gemm_part(device, &from, &there, &mut y).unwrap();
        device.download(&y).unwrap()
    };
    let mut rejected = 0;
    for (name, size_m, mutant) in &WRONG {
        if *name == "marlin_gemm_many_rows" && right.compute_capability() != (9, 0) {
            continue;
        }
        let wrong = Device::open().unwrap().with_mutant(row(name), mutant).unwrap();
        assert_ne!(found(&wrong, *size_m), found(&right, *size_m), "{name}: {}", mutant.name);
        rejected += 1;
    }
    common::say(&format!("LAW wrong orders of version 2 rejected: {rejected} of {rejected}"));
}

#[test]
fn parts_that_do_not_fit_are_refused() {
    let Some(device) = common::device_or_skip("parts_that_do_not_fit_are_refused") else { return };
    let mut random = Random(7);
    let shape = Shape::new(2048, 64);
    let w = weight(&mut random, ScalarType::UINT4B8, BF16, shape, GroupSize::Of(128), false);
    let new = || MarlinWeight::new(&device, std::slice::from_ref(&w), BF16).unwrap();
    let what = |result: Result<(), AccelError>| match result {
        Err(AccelError::Argument { what, .. }) => Some(what),
        Ok(()) => None,
        Err(error) => panic!("{error}"),
    };
    let wide = weight(
        &mut random,
        ScalarType::UINT4B8,
        BF16,
        Shape::new(4096, 64),
        GroupSize::Of(128),
        false,
    );
    let half = Split::new(4096, 1, 2).unwrap().part_of(&wide).unwrap();
    let half = MarlinWeight::of_part(&device, &half, BF16).unwrap();
    let bytes = MarlinWeight::for_8_bit(&device, std::slice::from_ref(&w), BF16, ScalarType::INT8);
    assert_eq!(what(bytes.unwrap().by_version_2().map(|_| ())), Some("weight"));
    let x = device.zeroed(shape.size_k).unwrap();
    let mut y = device.zeroed::<u16>(64).unwrap();
    let mut sums = device.zeroed::<f32>(64).unwrap();
    assert_eq!(what(marlin_gemm(&device, &x, &half, &mut y)), Some("weight"));
    assert_eq!(what(marlin_gemm_part(&device, &x, &new(), &mut sums)), Some("weight"));
    assert_eq!(what(marlin_gemm_part(&device, &x, &half, &mut sums)), None);
    let mut short = device.zeroed::<f32>(63).unwrap();
    assert_eq!(what(marlin_gemm_part(&device, &x, &half, &mut short)), Some("y"));
}
