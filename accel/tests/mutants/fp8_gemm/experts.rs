//! Products of experts, and layers.

use super::{BLOCKS, CHANNELS, KINDS, Kind, UNPROMOTED, moderate_weight, scale, schedule, weight};
use crate::common::{self, Experts, HALVES, Law, Random, Tokens, some_to_none};
use crate::fp8_rows::{NOT_WRITTEN, Rows};
use crate::many_rows::hopper_or_skip;
use marlinspike::case::Activation;
use marlinspike::method::{MethodLayer, Quantizer};
use marlinspike::moe::activation::Definition;
use marlinspike::moe::layer::Routed;
use marlinspike::num::array::FloatView2;
use marlinspike::num::dims::Shape;
use marlinspike::num::scalar::ScalarType;
use marlinspike::products::schedule::{Schedule, Step, StepOp};
use marlinspike::quantize::Fp8GroupRule;
use marlinspike::weight::Weight;
use marlinspike_accel::{
    Device,
    ops::align::RoutedRows,
    ops::fp8_gemm::{Fp8Layer, Fp8Plan, Fp8Scales, Fp8Weight, RowsFp8, moe_fp8_gemm},
    ops::fp8_scale_step,
    registry::{Mutant, mutants},
};

#[test]
fn fp8_products_with_experts_equal_the_reference() {
    let test = "fp8_products_with_experts_equal_the_reference";
    let Some(device) = hopper_or_skip(test) else { return };
    let mut law = Law::new("moe_fp8_gemm");
    let mut random = Random(0xF8F8_0005_89AB_CDEF);
    let (experts, dtype) = (5, HALVES[1]);
    // A tile of one expert ends in the columns of the next.
    let shape = Shape::new(384, 200);
    for kind in KINDS {
        let of = kind.0;
        let weights: Vec<Weight<'static>> =
            (0..experts).map(|_| weight(&mut random, of, dtype, shape, true)).collect();
        let there = Fp8Weight::new(&device, &weights, dtype).unwrap().summed(kind.1).unwrap();
        let groups = weights[0].scales.rows();
        let entries = [1, 9, 30, 70, 100, 200, 300, 333, 500, 450].into_iter().cycle();
        let drawn = Fp8Plan::all().zip(entries.map(Some));
        // Halves of blocks with no row and with one.
        let halves = Fp8Plan::all().filter(|plan| plan.rows == 128).map(|plan| (plan, None));
        for (plan, entries) in drawn.chain(halves) {
            let rows = match entries {
                Some(entries) => {
                    let size = (entries, shape.size_k);
                    Rows::new(&device, &mut random, experts, size, plan.rows)
                }
                None => {
                    let counts = [64, 65, 192, 193, 128].into_iter().enumerate();
                    let ids: Vec<i32> =
                        counts.flat_map(|(e, count)| vec![e as i32; count]).collect();
                    let ids = (ids.as_slice(), experts);
                    Rows::of_ids(&device, &mut random, ids, shape.size_k, plan.rows)
                }
            };
            let entries = rows.entries();
            let of_rows: Vec<f32> = (0..entries * groups).map(|_| scale(&mut random)).collect();
            let router: Vec<f32> = (0..entries).map(|_| random.normal() as f32).collect();
            let schedule = routed_schedule(kind, dtype);
            let wanted = rows.wanted(&schedule, &weights, (&of_rows, &router));

            let places = rows.blocks.places();
            let step = fp8_scale_step(places);
            let per_place = if of == Fp8Scales::Blocks { groups * step } else { places };
            let mut scales = vec![f32::NAN; per_place];
            for (m, place) in rows.placed() {
                for group in 0..groups {
                    scales[group * step + place] = of_rows[m * groups + group];
                }
            }
            let (x, scales) = (rows.x(&device), device.upload(&scales).unwrap());
            let row_weights = device.upload(&rows.by_place(&router, 0.0)).unwrap();
            let mut y = device.upload(&vec![NOT_WRITTEN; places * shape.size_n]).unwrap();
            let x = RowsFp8 { codes: &x, scales: &scales };
            let routed = RoutedRows::new(&rows.blocks, Some(&row_weights));
            moe_fp8_gemm(&device, x, &there, &mut y, plan, routed).unwrap();
            let context = format!("{kind:?}, {entries} entries, {plan:?}");
            rows.compare(&mut law, &context, &device.download(&y).unwrap(), &wanted);
        }
    }
    law.held();
}

/// Whether only rows that are quantized as they are gathered show the mutant: by groups, or as a whole.
pub(crate) fn quantizes(mutant: &Mutant) -> Option<Fp8Scales> {
    let is_of = |what| mutant.name.ends_with(what);
    let whole = is_of("of a gathered row").then_some(Fp8Scales::Channels);
    whole.or_else(|| is_of("of a gathered group").then_some(Fp8Scales::Blocks))
}

#[test]
fn fp8_layers_equal_the_reference() {
    let test = "fp8_layers_equal_the_reference";
    let Some(device) = hopper_or_skip(test) else { return };
    let mut law = Law::new("expert layer, e4m3fn weights and activations");
    let mut random = Random(0xF8F8_0006_89AB_CDEF);
    let (experts, top_k, h, size_i) = (6, 3, 512, 384);
    for (i, (kind, ue8m0)) in
        [(CHANNELS, false), (UNPROMOTED, false), (BLOCKS, false), (BLOCKS, true)]
            .into_iter()
            .enumerate()
    {
        let of = kind.0;
        let (dtype, activation) = (HALVES[(i + 1) % 2], Definition::new(Activation::Silu));
        let parts = Experts::new([h, size_i], activation, dtype, |shape| {
            (0..experts).map(|_| moderate_weight(&mut random, of, dtype, shape, false)).collect()
        });
        let layer = parts.layer();
        let quantizer = match of {
            Fp8Scales::Channels => Quantizer::Fp8Token,
            Fp8Scales::Blocks => {
                Quantizer::Fp8GroupBy { size: 128, rule: Fp8GroupRule::Quotient, ue8m0 }
            }
        };
        let schedule = routed_schedule(kind, dtype);
        for tokens in [1, 20, 150, 300] {
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

            let found = |device: &Device| {
                let there = Fp8Layer::new(device, &layer, ue8m0).unwrap().summed(kind.1).unwrap();
                let mut work = there.workspace(device, tokens, top_k).unwrap();
                let mut y = device.upload(&vec![NOT_WRITTEN; x.len()]).unwrap();
                let (x, ids) = (device.upload(x).unwrap(), device.upload(ids).unwrap());
                let weights = device.upload(weights).unwrap();
                there.forward(device, &x, &ids, &weights, &mut work, &mut y).unwrap();
                device.download(&y).unwrap()
            };
            law.equal(
                &format!("{kind:?}, UE8M0 {ue8m0}, {tokens} tokens"),
                &found(&device),
                &wanted,
            );
            if tokens == 20 {
                let is_shown = |mutant| quantizes(mutant) == Some(of);
                let wrong: Vec<_> = mutants().filter(|(_, mutant)| is_shown(mutant)).collect();
                assert_eq!(wrong.len(), 1);
                for (row, mutant) in wrong {
                    let device = Device::open().unwrap().with_mutant(row, mutant).unwrap();
                    assert_ne!(found(&device), wanted, "{} passed", mutant.name);
                    common::say(&format!("MUTANT {}: {} rejected", row.source, mutant.name));
                }
            }
        }
    }
    law.held();
}

/// The kernel's schedule, with router weights.
fn routed_schedule(kind: Kind, dtype: ScalarType) -> Schedule {
    let mut schedule = schedule(kind, dtype);
    let router_step = Step { op: StepOp::RouterWeight, ty: ScalarType::FLOAT32 };
    if !schedule.epilogue.contains(&router_step) {
        schedule.epilogue.insert(schedule.epilogue.len() - 1, router_step);
    }
    schedule
}
