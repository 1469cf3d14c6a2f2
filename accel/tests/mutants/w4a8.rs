//! Products of e4m3fn activations and 4-bit weights on a GPU against the reference's execution of their schedule on
//! `wgmma`. Only devices of capability 9.0 have the instructions.

use std::thread;

use crate::common::{self, Float, HALVES, Law, Random, float_weight, weight};
use crate::fp8_rows::{self, NOT_WRITTEN, Rows, codes};
use crate::many_rows::hopper_or_skip;
use crate::w4a8_layers::{experts_of_layer, layer_outputs};
use marlinspike::num::array::rows_of;
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::ScalarType;
use marlinspike::products::schedule::{Extras, GroupSum, MultiplyAdd, Schedule};
use marlinspike::weight::Weight;
use marlinspike_accel::{
    AccelError, Device,
    ops::align::RoutedRows,
    ops::gemm::MarlinWeight,
    ops::gemm_a8::RowsA8,
    ops::gemm_w4a8::{W4a8Plan, moe_w4a8_gemm, w4a8_gemm, w4a8_gemm_planned},
    registry::mutants,
};

const SOURCE: &str = "marlin_gemm_a8_wgmma";
const FP8: ScalarType = ScalarType::FLOAT8_E4M3FN;
/// Weights that the kernel takes: two types of integers in four sizes of groups, and MXFP4.
const FORMS: usize = 9;

pub(crate) fn any_weight(
    random: &mut Random,
    form: usize,
    dtype: ScalarType,
    shape: Shape,
    bias: bool,
) -> Weight<'static> {
    if form == 8 {
        return float_weight(random, Float::Mxfp4(128), dtype, shape, bias);
    }
    let ty = [ScalarType::UINT4B8, ScalarType::UINT4][form / 4];
    let groups = [128, 64, 32, -1][form % 4];
    weight(random, ty, dtype, shape, GroupSize::from_config(groups).unwrap(), bias)
}

/// A product, with the reference's outputs.
struct Case {
    weight: Weight<'static>,
    dtype: ScalarType,
    codes: Vec<u8>,
    scales: Vec<f32>,
    wanted: Vec<u16>,
}

impl Case {
    fn new(random: &mut Random, weight: Weight<'static>, dtype: ScalarType, size_m: usize) -> Self {
        let size_k = weight.shape().size_k;
        let codes = (0..size_m).flat_map(|m| codes(random, m, size_k)).collect();
        let scale = |m: usize| match m % 41 {
            40 => f32::NAN,
            _ => (random.normal() * 0.02) as f32,
        };
        let scales = (0..size_m).map(scale).collect();
        let mut case = Self { weight, dtype, codes, scales, wanted: Vec::new() };
        case.wanted = case.by(&Schedule::canonical_wgmma(&case.weight, dtype).unwrap());
        case
    }

    /// The outputs by a schedule.
    fn by(&self, schedule: &Schedule) -> Vec<u16> {
        let wide: Vec<u32> = self.codes.iter().map(|&code| code.into()).collect();
        let extras = Extras { activation_scales: Some(&self.scales), ..Extras::default() };
        let rows = rows_of("x", &wide, self.weight.shape().size_k).unwrap();
        let made = schedule.execute(rows, &self.weight, extras).unwrap();
        made.into_iter().map(|bits| bits as u16).collect()
    }

    fn packed(&self, device: &Device) -> MarlinWeight {
        let weights = std::slice::from_ref(&self.weight);
        MarlinWeight::for_8_bit(device, weights, self.dtype, FP8).unwrap()
    }

    fn plans(&self, device: &Device) -> Vec<W4a8Plan> {
        W4a8Plan::all(&self.packed(device)).collect()
    }

    fn found(&self, device: &Device, plan: Option<W4a8Plan>) -> Vec<u16> {
        let weight = self.packed(device);
        let codes = device.upload(&self.codes).unwrap();
        let scales = device.upload(&self.scales).unwrap();
        let mut y = device.upload(&vec![NOT_WRITTEN; self.wanted.len()]).unwrap();
        let x = RowsA8 { codes: &codes, scales: &scales };
        match plan {
            Some(plan) => w4a8_gemm_planned(device, x, &weight, &mut y, plan),
            None => w4a8_gemm(device, x, &weight, &mut y),
        }
        .unwrap();
        device.download(&y).unwrap()
    }
}

#[test]
fn w4a8_products_equal_the_reference_under_every_plan() {
    let test = "w4a8_products_equal_the_reference_under_every_plan";
    if hopper_or_skip(test).is_none() {
        return;
    }
    // Modules of different forms are compiled at the same time.
    thread::scope(|scope| {
        let started: Vec<_> =
            (0..FORMS).map(|form| scope.spawn(move || every_plan(form))).collect();
        started.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

fn every_plan(form: usize) {
    let device = Device::open().unwrap();
    let mut law = Law::new("w4a8_gemm");
    let mut random = Random(0x4A8A_0001_89AB_CDEF + form as u64);
    let dtype = HALVES[(form + 1) % 2];
    // One stage; N of parts of a tile; more stages than the ring has; several rounds of tiles, also of 6 stages, which the
    // four producers cannot share evenly.
    let shapes = [
        (128, 64, 1),
        (384, 320, 70),
        (2432, 64, 13),
        (256, 8512, 200),
        (1152, 1024, 333),
        (768, 8512, 260),
    ];
    for (i, (size_k, size_n, size_m)) in shapes.into_iter().enumerate() {
        let shape = Shape::new(size_k, size_n);
        let weight = any_weight(&mut random, form, dtype, shape, i % 2 == 1);
        let case = Case::new(&mut random, weight, dtype, size_m);
        let context = format!("form {form}, {dtype}, {shape}, M {size_m}");
        law.equal(&context, &case.found(&device, None), &case.wanted);
        for plan in case.plans(&device) {
            for tile_n in [plan.tile_n, plan.tile_n - 32, 32].into_iter().filter(|&n| n > 0) {
                let plan = W4a8Plan { tile_n, ..plan };
                let found = case.found(&device, Some(plan));
                law.equal(&format!("{context}, {plan:?}"), &found, &case.wanted);
            }
        }
    }
    law.held();
}

/// The bits of a row do not depend on the rows next to it.
#[test]
fn w4a8_rows_have_the_same_bits_for_every_m() {
    let test = "w4a8_rows_have_the_same_bits_for_every_m";
    let Some(device) = hopper_or_skip(test) else { return };
    let mut law = Law::new("w4a8_gemm, batches");
    let mut random = Random(0x4A8A_0002_89AB_CDEF);
    let shape = Shape::new(1024, 512);
    for form in [0, 3, 5, 8] {
        let weight = any_weight(&mut random, form, HALVES[1], shape, true);
        let case = Case::new(&mut random, weight, HALVES[1], 400);
        let there = case.packed(&device);
        for size_m in [1, 7, 8, 9, 16, 17, 40, 64, 65, 129, 260, 400] {
            let codes = device.upload(&case.codes[..size_m * shape.size_k]).unwrap();
            let scales = device.upload(&case.scales[..size_m]).unwrap();
            let mut y = device.upload(&vec![NOT_WRITTEN; size_m * shape.size_n]).unwrap();
            let x = RowsA8 { codes: &codes, scales: &scales };
            w4a8_gemm(&device, x, &there, &mut y).unwrap();
            let found = device.download(&y).unwrap();
            law.equal(&format!("form {form}, M {size_m}"), &found, &case.wanted[..found.len()]);
        }
    }
    law.held();
}

/// A product with experts and router weights: its rows, its outputs by the plan, and the reference's.
fn expert_product(
    device: &Device,
    form: usize,
    entries: usize,
    plan: W4a8Plan,
) -> (Rows, Vec<u16>, Vec<u16>) {
    let mut random = Random(0x4A8A_0005_89AB_CDEF + (form * 1000 + entries) as u64);
    let (experts, dtype) = (5, HALVES[1]);
    let shape = Shape::new(384, 192);
    let weights: Vec<Weight<'static>> =
        (0..experts).map(|_| any_weight(&mut random, form, dtype, shape, true)).collect();
    let there = MarlinWeight::for_8_bit(device, &weights, dtype, FP8).unwrap();
    let rows = Rows::new(device, &mut random, experts, (entries, shape.size_k), plan.rows);
    let scales: Vec<f32> = (0..entries).map(|_| (random.normal() * 0.02) as f32).collect();
    let router: Vec<f32> = (0..entries).map(|_| random.normal() as f32).collect();
    let schedule = Schedule::canonical_wgmma(&weights[0], dtype).unwrap();
    let wanted = rows.wanted(&schedule, &weights, (&scales, &router));

    let places = rows.blocks.places();
    let (x, scales) = (rows.x(device), rows.by_place(&scales, f32::NAN));
    let scales = device.upload(&scales).unwrap();
    let row_weights = device.upload(&rows.by_place(&router, 0.0)).unwrap();
    let mut y = device.upload(&vec![NOT_WRITTEN; places * shape.size_n]).unwrap();
    let x = RowsA8 { codes: &x, scales: &scales };
    let routed = RoutedRows::new(&rows.blocks, Some(&row_weights));
    moe_w4a8_gemm(device, x, &there, &mut y, plan, routed).unwrap();
    let found = device.download(&y).unwrap();
    (rows, found, wanted)
}

#[test]
fn w4a8_products_with_experts_equal_the_reference() {
    let test = "w4a8_products_with_experts_equal_the_reference";
    let Some(device) = hopper_or_skip(test) else { return };
    let mut law = Law::new("moe_w4a8_gemm");
    for form in [0, 3, 4, 6, 8] {
        let counts = [1, 9, 20, 30, 50, 70, 100, 130, 200, 300, 333, 500, 600, 800];
        for (plan, entries) in W4a8Plan::all(&packed_alone(&device, form)).zip(counts) {
            let (rows, found, wanted) = expert_product(&device, form, entries, plan);
            let context = format!("form {form}, {entries} entries, {plan:?}");
            rows.compare(&mut law, &context, &found, &wanted);
        }
    }
    law.held();
}

/// A matrix of that form, whose plans are those of experts.
fn packed_alone(device: &Device, form: usize) -> MarlinWeight {
    let weight = any_weight(&mut Random(1), form, HALVES[1], Shape::new(384, 192), true);
    MarlinWeight::for_8_bit(device, std::slice::from_ref(&weight), HALVES[1], FP8).unwrap()
}

/// A product whose bias cancels the outputs of one row.
fn cancelled(form: usize, size_m: usize) -> Case {
    let (shape, dtype) = (Shape::new(1280, 512), HALVES[0]);
    let draw = |weight| Case::new(&mut Random(0x4A8A_0003_89AB_CDEF), weight, dtype, size_m);
    let weight = any_weight(&mut Random(0x4A8A_0004_89AB_CDEF), form, dtype, shape, false);
    draw(fp8_rows::cancelled(weight.clone(), &draw(weight).wanted))
}

/// Needs no GPU: the cases tell the schedule from others near it.
#[test]
fn cancelled_w4a8_outputs_show_the_schedule() {
    let case = cancelled(0, 60);
    let schedule = Schedule::canonical_wgmma(&case.weight, HALVES[0]).unwrap();
    let sum = schedule.group_sum.unwrap();
    let apart = GroupSum { multiply_add: MultiplyAdd::Separate, ..sum };
    let mut by_normals = schedule.clone();
    by_normals.weights.exponent = 0;
    let others = [
        // A part has 14 bits and a scale 11, so few products are rounded.
        (
            "the part rounded before the sum",
            3,
            Schedule { group_sum: Some(apart), ..schedule.clone() },
        ),
        ("codes as normal numbers", 20, by_normals),
        ("mma.sync", 20, Schedule::canonical(&case.weight, HALVES[0], FP8).unwrap()),
    ];
    for (name, least, other) in others {
        let differ = case.by(&other).iter().zip(&case.wanted).filter(|(a, b)| a != b).count();
        assert!(differ > least, "{name}: {differ}");
    }
}

/// Tiles of 128 columns.
pub(crate) fn many_columns(rows: u32) -> W4a8Plan {
    W4a8Plan { rows, tile_n: 128, warps: 8, splits: 1 }
}

#[test]
fn wrong_w4a8_kernels_are_rejected() {
    let Some(device) = hopper_or_skip("wrong_w4a8_kernels_are_rejected") else { return };
    // With groups of 128, of 128 and of 32 with zero points, and of all k; with few rows and many, and shared columns.
    let sizes_m = [(0, 150), (4, 60), (6, 60), (3, 60)];
    let cases: Vec<Case> = sizes_m.map(|(form, size_m)| cancelled(form, size_m)).into();
    let sizes = [(32, 8, 1), (64, 8, 1), (192, 8, 1), (256, 8, 1), (16, 16, 4), (16, 16, 8)];
    let takes = |plan: &W4a8Plan| sizes.contains(&(plan.rows, plan.warps, plan.splits));
    let differs = |device: &Device, case: &Case| {
        let mut plans = case.plans(device).into_iter().filter(takes);
        plans.find(|&plan| case.found(device, Some(plan)) != case.wanted)
    };
    for case in &cases {
        assert_eq!(differs(&device, case), None);
    }
    // With router weights, few rows and many.
    let plans = [(60, many_columns(8)), (300, many_columns(64))];
    let experts_differ = |device: &Device| {
        plans.into_iter().find_map(|(entries, plan)| {
            let (rows, found, wanted) = expert_product(device, 0, entries, plan);
            (!rows.are(&found, &wanted)).then_some(plan)
        })
    };
    assert_eq!(experts_differ(&device), None);
    // Layers whose first product finds its tiles itself, and whose second one makes its rows itself.
    let parts = experts_of_layer(&mut Random(0x4A8A_0007_89AB_CDEF), 0, HALVES[0], false);
    let layer_differs = |device: &Device| {
        let plan = many_columns(8);
        [(4, None), (10, None), (10, Some(plan))].into_iter().find_map(|size| {
            let [found, wanted] = layer_outputs(device, 0x4A8A_0008, parts.layer(), size);
            (found != wanted).then_some(plan)
        })
    };
    assert_eq!(layer_differs(&device), None);
    let wrong: Vec<_> = mutants().filter(|(row, _)| row.source == SOURCE).collect();
    assert!(wrong.len() > 8);
    for (row, mutant) in &wrong {
        let device = Device::open().unwrap().with_mutant(row, mutant).unwrap();
        let rejected = cases.iter().find_map(|case| differs(&device, case));
        let rejected = rejected.or_else(|| experts_differ(&device));
        let rejected = rejected.or_else(|| layer_differs(&device));
        let Some(plan) = rejected else { panic!("{} passed", mutant.name) };
        common::say(&format!("MUTANT {SOURCE}, {}: rejected with {plan:?}", mutant.name));
    }
    common::say(&format!("LAW wrong kernels rejected: {0} of {0}", wrong.len()));
}

#[test]
fn w4a8_arguments_that_do_not_fit_are_refused() {
    let Some(device) = hopper_or_skip("w4a8_arguments_that_do_not_fit_are_refused") else { return };
    let mut random = Random(5);
    let (shape, dtype) = (Shape::new(256, 64), HALVES[1]);
    let w = any_weight(&mut random, 0, dtype, shape, true);
    let packed = |input| MarlinWeight::for_8_bit(&device, std::slice::from_ref(&w), dtype, input);
    let good = W4a8Plan { rows: 8, tile_n: 32, warps: 16, splits: 4 };
    let complaint = |there: &MarlinWeight, [codes, scales, y]: [usize; 3], plan| {
        let (codes, scales) = (device.zeroed(codes).unwrap(), device.zeroed(scales).unwrap());
        let x = RowsA8 { codes: &codes, scales: &scales };
        match w4a8_gemm_planned(&device, x, there, &mut device.zeroed(y).unwrap(), plan) {
            Err(AccelError::Argument { what, .. }) => Some(what),
            Ok(()) => None,
            Err(error) => panic!("{error}"),
        }
    };
    let there = packed(FP8).unwrap();
    assert_eq!(complaint(&there, [512, 2, 128], good), None);
    assert_eq!(complaint(&there, [0, 0, 0], good), None);
    assert_eq!(complaint(&there, [511, 2, 128], good), Some("x"));
    assert_eq!(complaint(&there, [512, 3, 192], good), Some("x"));
    assert_eq!(complaint(&there, [512, 2, 127], good), Some("y"));
    for bad in [
        W4a8Plan { rows: 24, ..good },
        W4a8Plan { tile_n: 16, ..good },
        W4a8Plan { tile_n: 96, ..good },
        W4a8Plan { tile_n: 0, ..good },
        W4a8Plan { splits: 2, ..good },
    ] {
        assert_eq!(complaint(&there, [512, 2, 128], bad), Some("plan"), "{bad:?}");
    }
    let int8 = packed(ScalarType::INT8).unwrap();
    let halves = MarlinWeight::new(&device, std::slice::from_ref(&w), dtype).unwrap();
    for other in [&int8, &halves] {
        assert_eq!(complaint(other, [512, 2, 128], good), Some("weight"));
    }
}
