//! Products of e4m3fn activations and weights on a GPU, under every plan, against the reference's execution of
//! CUTLASS's promoted schedule and DeepGEMM's of blocks. Only devices of capability 9.0 have the instructions.

use crate::common;

use crate::common::{Experts, HALVES, Law, Random, Tokens, some_to_none};
use crate::many_rows::hopper_or_skip;
use marlinspike::case::Activation;
use marlinspike::method::{MethodLayer, Quantizer};
use marlinspike::moe::activation::Definition;
use marlinspike::moe::align::{Absent, Align};
use marlinspike::moe::layer::Routed;
use marlinspike::num::array::{FloatView2, rows_of};
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::ScalarType;
use marlinspike::products::schedule::{
    Extras, Fp8BlockKernel, Fp8Kernel, GroupSum, MultiplyAdd, Schedule, Stack, Step, StepOp,
};
use marlinspike::quantize::{Fp8GroupRule, per_group_fp8_with};
use marlinspike::weight::{Codes, Groups, Table, TableData, Weight};
use marlinspike_accel::{
    AccelError, Device,
    ops::align::{RoutedRows, Runs, align_on_device},
    ops::fp8_gemm::{
        Fp8Layer, Fp8Plan, Fp8Scales, Fp8Weight, RowsFp8, fp8_gemm, fp8_gemm_planned, moe_fp8_gemm,
    },
    ops::{fp8_scale_step, per_token_group_quant_fp8},
    registry::mutants,
};

const NOT_WRITTEN: u16 = 0xabcd;
const SOURCE: &str = "fp8_gemm";

/// Codes of a row or column: moderate ones, any without NaN, subnormal ones, zeros, or any.
fn codes(random: &mut Random, line: usize, len: usize) -> Vec<u8> {
    let code = |random: &mut Random| {
        let code = random.next() as u8;
        match line % 7 {
            1 if code & 0x7f == 0x7f => code ^ 1,
            1 => code,
            2 => code & 0x87,
            3 => code & 0x80,
            4 => code,
            _ => code & 0xbf,
        }
    };
    (0..len).map(|_| code(random)).collect()
}

/// Scales of usual size; one in thirty is tiny, huge, infinite, NaN, negative or zero.
fn scale(random: &mut Random) -> f32 {
    let usual = (random.normal().abs() * 0.02 + 1e-3) as f32;
    match random.below(180) {
        0 => f32::from_bits(random.next() % 0x0080_0000),
        1 => usual * 1e36,
        2 => f32::INFINITY,
        3 => f32::NAN,
        4 => -usual,
        5 => 0.0,
        _ => usual,
    }
}

fn weight(
    random: &mut Random,
    of: Fp8Scales,
    dtype: ScalarType,
    shape: Shape,
    with_bias: bool,
) -> Weight<'static> {
    let Shape { size_k, size_n } = shape;
    let columns: Vec<Vec<u8>> = (0..size_n).map(|n| codes(random, n / 2, size_k)).collect();
    let codes = Codes::from_fn(8, shape, |k, n| columns[n][k]).unwrap();
    let (groups, group_size) = match of {
        Fp8Scales::Channels => (1, GroupSize::Channel),
        Fp8Scales::Blocks => (size_k / 128, GroupSize::Of(128)),
    };
    let width = if of == Fp8Scales::Blocks { 128 } else { 1 };
    let mut scales = Vec::new();
    for _ in 0..groups {
        let blocks: Vec<u32> =
            (0..size_n.div_ceil(width)).map(|_| scale(random).to_bits()).collect();
        scales.extend((0..size_n).map(|n| blocks[n / width]));
    }
    let bias = with_bias.then(|| {
        Table::new(dtype, 1, size_n, TableData::B16(random.halves(dtype, size_n, 1.0))).unwrap()
    });
    Weight {
        name: "weight".into(),
        ty: ScalarType::FLOAT8_E4M3FN,
        codes,
        scales: Table::new(ScalarType::FLOAT32, groups, size_n, TableData::B32(scales)).unwrap(),
        zeros: None,
        groups: Groups::Uniform(group_size),
        global_scale: None,
        bias,
    }
}

/// A product, with the reference's outputs.
struct Case {
    weight: Weight<'static>,
    dtype: ScalarType,
    codes: Vec<u8>,
    /// As the kernel takes them.
    scales: Vec<f32>,
    /// The same as `[M, groups]`.
    of_rows: Vec<f32>,
    wanted: Vec<u16>,
}

impl Case {
    fn new(
        random: &mut Random,
        of: Fp8Scales,
        dtype: ScalarType,
        shape: Shape,
        size_m: usize,
        with_bias: bool,
    ) -> Self {
        let weight = weight(random, of, dtype, shape, with_bias);
        Self::with_weight(random, of, dtype, weight, size_m)
    }

    fn with_weight(
        random: &mut Random,
        of: Fp8Scales,
        dtype: ScalarType,
        weight: Weight<'static>,
        size_m: usize,
    ) -> Self {
        let shape = weight.shape();
        let x: Vec<u8> = (0..size_m).flat_map(|m| codes(random, m, shape.size_k)).collect();
        let groups = weight.scales.rows();
        // [M, groups], as the reference takes them.
        let of_rows: Vec<f32> = (0..size_m * groups).map(|_| scale(random)).collect();
        let schedule = match of {
            Fp8Scales::Channels => Schedule::w8a8_fp8(Fp8Kernel::Cutlass, dtype, true),
            Fp8Scales::Blocks => Schedule::w8a8_fp8_blocks(Fp8BlockKernel::DeepGemm, dtype),
        };
        let scales = match of {
            Fp8Scales::Channels => of_rows.clone(),
            Fp8Scales::Blocks => {
                let step = fp8_scale_step(size_m);
                let at = |i: usize| (i % step < size_m).then(|| i % step * groups + i / step);
                // What pads the rows of scales must not matter.
                let value = |i: usize| at(i).map_or(f32::NAN, |at| of_rows[at]);
                (0..groups * step).map(value).collect()
            }
        };
        let mut case = Self { weight, dtype, codes: x, scales, of_rows, wanted: Vec::new() };
        case.wanted = case.by(&schedule.unwrap());
        case
    }

    /// The outputs by a schedule.
    fn by(&self, schedule: &Schedule) -> Vec<u16> {
        let wide: Vec<u32> = self.codes.iter().map(|&code| code.into()).collect();
        let extras = Extras { activation_scales: Some(&self.of_rows), ..Extras::default() };
        let rows = rows_of("x", &wide, self.weight.shape().size_k).unwrap();
        let made = schedule.execute(rows, &self.weight, extras).unwrap();
        made.into_iter().map(|bits| bits as u16).collect()
    }

    fn found(&self, device: &Device, plan: Option<Fp8Plan>) -> Vec<u16> {
        let weight =
            Fp8Weight::new(device, std::slice::from_ref(&self.weight), self.dtype).unwrap();
        let codes = device.upload(&self.codes).unwrap();
        let scales = device.upload(&self.scales).unwrap();
        let mut y = device.upload(&vec![NOT_WRITTEN; self.wanted.len()]).unwrap();
        let x = RowsFp8 { codes: &codes, scales: &scales };
        match plan {
            Some(plan) => fp8_gemm_planned(device, x, &weight, &mut y, plan),
            None => fp8_gemm(device, x, &weight, &mut y),
        }
        .unwrap();
        device.download(&y).unwrap()
    }
}

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
    for (of, shapes) in [(Fp8Scales::Channels, channels), (Fp8Scales::Blocks, blocks)] {
        for (i, (size_k, size_n, size_m)) in shapes.into_iter().enumerate() {
            let (dtype, shape) = (HALVES[i % 2], Shape::new(size_k, size_n));
            let case = Case::new(&mut random, of, dtype, shape, size_m, i % 2 == 1);
            let context = format!("{of:?}, {dtype}, {shape}, M {size_m}");
            law.equal(&context, &case.found(&device, None), &case.wanted);
            for plan in Fp8Plan::all() {
                for tile_n in [plan.tile_n, plan.tile_n - 16, 16, 80] {
                    if tile_n == 0 || tile_n > 16 * plan.warps {
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
    for of in [Fp8Scales::Channels, Fp8Scales::Blocks] {
        let case = Case::new(&mut random, of, HALVES[1], shape, 260, true);
        let weight =
            Fp8Weight::new(&device, std::slice::from_ref(&case.weight), HALVES[1]).unwrap();
        let groups = case.weight.scales.rows();
        for size_m in [1, 7, 8, 9, 16, 17, 40, 64, 65, 129, 260] {
            let codes = device.upload(&case.codes[..size_m * shape.size_k]).unwrap();
            let scales: Vec<f32> = match of {
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
            law.equal(&format!("{of:?}, M {size_m}"), &found, &case.wanted[..found.len()]);
        }
    }
    law.held();
}

/// A product whose bias cancels the f16 outputs of one row: what is left shows the f32 total's last bits, which 16 bits
/// of a larger number hide.
fn cancelled(of: Fp8Scales) -> Case {
    let (shape, dtype, size_m) = (Shape::new(1280, 512), HALVES[0], 60);
    let draw =
        |weight| Case::with_weight(&mut Random(0xF8F8_0003_89AB_CDEF), of, dtype, weight, size_m);
    let weight = moderate_weight(&mut Random(0xF8F8_0004_89AB_CDEF), of, dtype, shape, false);
    let plain = draw(weight.clone());
    let is_normal = |bits: &u16| (0x0400..0x7c00).contains(&(bits & 0x7fff));
    let mut rows = plain.wanted.chunks_exact(shape.size_n);
    let row = rows.find(|row| row.iter().filter(|bits| is_normal(bits)).count() > 400);
    let bias = row.expect("a row of normal numbers").iter().map(|bits| bits ^ 0x8000).collect();
    let bias = Table::new(dtype, 1, shape.size_n, TableData::B16(bias)).unwrap();
    draw(Weight { bias: Some(bias), ..weight })
}

/// Needs no GPU: the case tells a fused multiply-add from a product that is rounded before the sum.
#[test]
fn cancelled_fp8_outputs_show_one_rounding() {
    let case = cancelled(Fp8Scales::Blocks);
    let mut schedule = Schedule::w8a8_fp8_blocks(Fp8BlockKernel::DeepGemm, HALVES[0]).unwrap();
    let sum = schedule.group_sum.unwrap();
    schedule.group_sum = Some(GroupSum { multiply_add: MultiplyAdd::Separate, ..sum });
    let differ = case.by(&schedule).iter().zip(&case.wanted).filter(|(a, b)| a != b).count();
    assert!(differ > 20, "{differ}");
}

#[test]
fn wrong_fp8_kernels_are_rejected() {
    let Some(device) = hopper_or_skip("wrong_fp8_kernels_are_rejected") else { return };
    let cases = [Fp8Scales::Channels, Fp8Scales::Blocks].map(cancelled);
    for case in &cases {
        assert_eq!(case.found(&device, None), case.wanted);
    }
    let wrong: Vec<_> = mutants().filter(|(row, _)| row.source == SOURCE).collect();
    for (row, mutant) in &wrong {
        let device = Device::open().unwrap().with_mutant(row, mutant).unwrap();
        let passes = |case: &Case| case.found(&device, None) == case.wanted;
        assert!(!cases.iter().all(passes), "{} passed", mutant.name);
        common::say(&format!("MUTANT {SOURCE}: {} rejected", mutant.name));
    }
    assert!(wrong.len() > 3);
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

    let good = Fp8Plan { rows: 8, tile_n: 16, warps: 4, batch: 4, ranks: 1 };
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
        Fp8Plan { ranks: 2, ..good },
    ] {
        assert_eq!(complaint(&channels, [512, 2, 128], bad), Some("plan"), "{bad:?}");
    }
}

/// Rows of several magnitudes, one of zeros, one of any finite numbers, one of subnormals.
fn rows(random: &mut Random, dtype: ScalarType, count: usize, size_k: usize) -> Vec<u16> {
    (0..count)
        .flat_map(|row| match row % 5 {
            0 => vec![0; size_k],
            1 => random.any_finite(dtype, size_k),
            2 => (0..size_k).map(|_| (random.next() & 0x807f) as u16).collect(),
            3 => random.halves(dtype, size_k, 1.0),
            _ => random.halves(dtype, size_k, 1e-3),
        })
        .collect()
}

/// Codes, and bits of scales, of the groups of rows: the device's and the reference's.
fn quantized(
    device: &Device,
    x: &[u16],
    dtype: ScalarType,
    size_k: usize,
    ue8m0: bool,
) -> [(Vec<u8>, Vec<u32>); 2] {
    let widened: Vec<f32> = x.iter().map(|&bits| dtype.to_f64(bits.into()) as f32).collect();
    let wide = rows_of("x", &widened, size_k).unwrap();
    let wanted = per_group_fp8_with(wide, 128, Fp8GroupRule::Quotient, ue8m0).unwrap();
    let found = per_token_group_quant_fp8(device, x, dtype, size_k, ue8m0).unwrap();
    [found, wanted].map(|q| {
        let (codes, scales) = q.into_vecs();
        (
            codes.into_iter().map(|code| code.to_bits()).collect(),
            scales.into_iter().map(f32::to_bits).collect(),
        )
    })
}

#[test]
fn fp8_groups_are_quantized_as_the_reference_does() {
    let test = "fp8_groups_are_quantized_as_the_reference_does";
    let Some(device) = common::device_or_skip(test) else { return };
    let mut law = Law::new("per_token_group_quant_fp8");
    let mut random = Random(0xF8F8_0004_89AB_CDEF);
    for dtype in HALVES {
        for (count, size_k) in [(5, 128), (10, 384), (41, 1024), (5, 7168)] {
            for ue8m0 in [false, true] {
                let x = rows(&mut random, dtype, count, size_k);
                let [found, wanted] = quantized(&device, &x, dtype, size_k, ue8m0);
                let context = format!("{dtype}, [{count}, {size_k}], UE8M0 {ue8m0}");
                law.equal(&context, &found.0, &wanted.0);
                law.equal(&context, &found.1, &wanted.1);
            }
        }
    }
    law.held();
    let error = per_token_group_quant_fp8(&device, &[0; 64], HALVES[1], 64, false).unwrap_err();
    assert!(matches!(error, AccelError::Argument { what: "size_k", .. }), "{error:?}");
    let error = per_token_group_quant_fp8(&device, &[0x7f80; 128], HALVES[1], 128, false);
    assert!(matches!(error, Err(AccelError::Argument { what: "x", .. })), "{error:?}");
    let x = rows(&mut random, HALVES[1], 40, 1024);
    for (row, mutant) in mutants().filter(|(row, _)| row.source == "per_token_group_quant_fp8") {
        let device = Device::open().unwrap().with_mutant(row, mutant).unwrap();
        let [found, wanted] = quantized(&device, &x, HALVES[1], 1024, false);
        assert_ne!(found, wanted, "{} passed", mutant.name);
        common::say(&format!("MUTANT {}: {} rejected", row.source, mutant.name));
    }
}

#[test]
fn fp8_products_with_experts_equal_the_reference() {
    let test = "fp8_products_with_experts_equal_the_reference";
    let Some(device) = hopper_or_skip(test) else { return };
    let mut law = Law::new("moe_fp8_gemm");
    let mut random = Random(0xF8F8_0005_89AB_CDEF);
    let (experts, dtype) = (5, HALVES[1]);
    // A tile of one expert ends in the columns of the next.
    let shape = Shape::new(384, 200);
    let align =
        Align { block_size: 1, num_experts: experts, expert_map: None, absent: Absent::Ignore };
    let runs = Runs::new(&device, &align).unwrap();
    for of in [Fp8Scales::Channels, Fp8Scales::Blocks] {
        let weights: Vec<Weight<'static>> =
            (0..experts).map(|_| weight(&mut random, of, dtype, shape, true)).collect();
        let there = Fp8Weight::new(&device, &weights, dtype).unwrap();
        let groups = weights[0].scales.rows();
        for (plan, entries) in Fp8Plan::all().zip([1, 9, 30, 70, 100, 200, 300, 333, 500, 260]) {
            let ids: Vec<i32> =
                (0..entries).map(|_| random.below(experts + 1) as i32 - 1).collect();
            let mut blocks = runs.room(&device, entries, plan.rows as usize).unwrap();
            align_on_device(&device, &runs, &device.upload(&ids).unwrap(), &mut blocks).unwrap();
            let place_of = device.download(blocks.place_of()).unwrap();
            let codes_of: Vec<u8> =
                (0..entries).flat_map(|m| codes(&mut random, m, shape.size_k)).collect();
            let of_rows: Vec<f32> = (0..entries * groups).map(|_| scale(&mut random)).collect();
            let router: Vec<f32> = (0..entries).map(|_| random.normal() as f32).collect();

            let schedule = routed_schedule(of, dtype);
            let wide: Vec<u32> = codes_of.iter().map(|&code| code.into()).collect();
            let expert_of: Vec<Option<usize>> =
                ids.iter().map(|&id| usize::try_from(id).ok()).collect();
            let stack =
                Stack { weights: &weights, expert_of: &expert_of, orders: None, places: None };
            let extras = Extras {
                activation_scales: Some(&of_rows),
                router_weights: Some(&router),
                order: None,
            };
            let wide = rows_of("x", &wide, shape.size_k).unwrap();
            let wanted = schedule.execute_stack(wide, stack, extras).unwrap();

            let places = blocks.places();
            let step = fp8_scale_step(places);
            let mut x = vec![0x7f; places * shape.size_k];
            let per_place = if of == Fp8Scales::Blocks { groups * step } else { places };
            let (mut scales, mut weights_there) = (vec![f32::NAN; per_place], vec![0.0; places]);
            for (m, &place) in place_of.iter().enumerate() {
                let Ok(place) = usize::try_from(place) else { continue };
                x[place * shape.size_k..][..shape.size_k]
                    .copy_from_slice(&codes_of[m * shape.size_k..][..shape.size_k]);
                weights_there[place] = router[m];
                for group in 0..groups {
                    scales[group * step + place] = of_rows[m * groups + group];
                }
            }
            let (x, scales) = (device.upload(&x).unwrap(), device.upload(&scales).unwrap());
            let row_weights = device.upload(&weights_there).unwrap();
            let mut y = device.upload(&vec![NOT_WRITTEN; places * shape.size_n]).unwrap();
            let rows = RowsFp8 { codes: &x, scales: &scales };
            let routed = RoutedRows { blocks: &blocks, row_weights: Some(&row_weights) };
            moe_fp8_gemm(&device, rows, &there, &mut y, plan, routed).unwrap();
            let y = device.download(&y).unwrap();
            let wanted: Vec<u16> = wanted.into_iter().map(|bits| bits as u16).collect();
            let (mut found, mut expected) = (Vec::new(), Vec::new());
            for (m, &place) in place_of.iter().enumerate() {
                if let Ok(place) = usize::try_from(place) {
                    found.extend_from_slice(&y[place * shape.size_n..][..shape.size_n]);
                    expected.extend_from_slice(&wanted[m * shape.size_n..][..shape.size_n]);
                }
            }
            law.equal(&format!("{of:?}, {entries} entries, {plan:?}"), &found, &expected);
        }
    }
    law.held();
}

#[test]
fn fp8_layers_equal_the_reference() {
    let test = "fp8_layers_equal_the_reference";
    let Some(device) = hopper_or_skip(test) else { return };
    let mut law = Law::new("expert layer, e4m3fn weights and activations");
    let mut random = Random(0xF8F8_0006_89AB_CDEF);
    let (experts, top_k, h, size_i) = (6, 3, 512, 384);
    for (i, (of, ue8m0)) in
        [(Fp8Scales::Channels, false), (Fp8Scales::Blocks, false), (Fp8Scales::Blocks, true)]
            .into_iter()
            .enumerate()
    {
        let (dtype, activation) = (HALVES[(i + 1) % 2], Definition::new(Activation::Silu));
        let parts = Experts::new([h, size_i], activation, dtype, |shape| {
            (0..experts).map(|_| moderate_weight(&mut random, of, dtype, shape, false)).collect()
        });
        let layer = parts.layer();
        let there = Fp8Layer::new(&device, &layer, ue8m0).unwrap();
        let quantizer = match of {
            Fp8Scales::Channels => Quantizer::Fp8Token,
            Fp8Scales::Blocks => {
                Quantizer::Fp8GroupBy { size: 128, rule: Fp8GroupRule::Quotient, ue8m0 }
            }
        };
        let schedule = routed_schedule(of, dtype);
        for tokens in [1, 20, 150] {
            let inputs = Tokens::new(&mut random, &layer, (tokens, top_k), some_to_none);
            let Tokens { x, ids, weights, .. } = &inputs;
            let method = MethodLayer {
                layer,
                quantizers: [quantizer.clone(), quantizer.clone()],
                w13_multipliers: None,
            };
            let rows = FloatView2::from_rows("x", dtype, h, x).unwrap();
            let routed = Routed::from_rows(top_k, ids, weights).unwrap();
            let stages = method.forward(rows, routed, |_, product| product.execute(&schedule));
            let wanted = stages.unwrap().y.into_bits();

            let mut work = there.workspace(&device, tokens, top_k).unwrap();
            let mut y = device.upload(&vec![NOT_WRITTEN; x.len()]).unwrap();
            let (x, ids) = (device.upload(x).unwrap(), device.upload(ids).unwrap());
            let weights = device.upload(weights).unwrap();
            there.forward(&device, &x, &ids, &weights, &mut work, &mut y).unwrap();
            let found = device.download(&y).unwrap();
            law.equal(&format!("{of:?}, UE8M0 {ue8m0}, {tokens} tokens"), &found, &wanted);
        }
    }
    law.held();
}

/// A weight whose products are finite.
fn moderate_weight(
    random: &mut Random,
    of: Fp8Scales,
    dtype: ScalarType,
    shape: Shape,
    with_bias: bool,
) -> Weight<'static> {
    let mut weight = weight(random, of, dtype, shape, with_bias);
    let ty = ScalarType::FLOAT32;
    weight.scales = weight.scales.map(ty, |bits| match f32::from_bits(bits) {
        scale if scale.abs() < 0.2 => bits,
        _ => 0.01f32.to_bits(),
    });
    let words = weight.codes.words().iter().map(|word| word & 0xbfbf_bfbf).collect::<Vec<_>>();
    weight.codes = Codes::from_words(8, shape, words).unwrap();
    weight
}

/// The kernel's schedule, with router weights.
fn routed_schedule(of: Fp8Scales, dtype: ScalarType) -> Schedule {
    let schedule = match of {
        Fp8Scales::Channels => Schedule::w8a8_fp8(Fp8Kernel::Cutlass, dtype, true),
        Fp8Scales::Blocks => Schedule::w8a8_fp8_blocks(Fp8BlockKernel::DeepGemm, dtype),
    };
    let mut schedule = schedule.unwrap();
    let router_step = Step { op: StepOp::RouterWeight, ty: ScalarType::FLOAT32 };
    if !schedule.epilogue.contains(&router_step) {
        schedule.epilogue.insert(schedule.epilogue.len() - 1, router_step);
    }
    schedule
}
