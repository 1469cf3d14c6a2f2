//! Expert layers whose experts are spread over ranks, on as many GPUs as there are: the bits of the reference's whole
//! layer for every number of ranks and every placement.

use crate::common;

use crate::common::{Experts, Law, Random, Tokens, some_to_none, weight};
use crate::peers::{gpus, open};
use marlinspike::moe::activation::{Activation, Definition};
use marlinspike::moe::layer::Layer;
use marlinspike::num::dims::GroupSize;
use marlinspike::num::scalar::ScalarType;
use marlinspike::weight::Weight;
use marlinspike_accel::{
    AccelError, Device,
    memory::Buffer,
    operation::{Mutant, Row},
    ops::{MarlinLayer, Rank, Workspace},
    registry,
};

const BF16: ScalarType = ScalarType::BFLOAT16;
const EXPERTS: usize = 16;
const TOP_K: usize = 4;
const HIDDEN: usize = 192;

fn experts(random: &mut Random, dtype: ScalarType) -> Experts {
    let activation = Definition::new(Activation::Silu);
    Experts::new([HIDDEN, 128], activation, dtype, |shape| {
        let mut one = || weight(random, ScalarType::UINT4B8, dtype, shape, GroupSize::Of(64), true);
        (0..EXPERTS).map(|_| one()).collect()
    })
}

/// Neighbours on a rank, and in turns.
fn placements(ranks: usize) -> [Vec<usize>; 2] {
    let each = EXPERTS / ranks;
    [(0..EXPERTS).map(|e| e / each).collect(), (0..EXPERTS).map(|e| e % ranks).collect()]
}

/// Slots whose sum depends on their order: two large ones that cancel, of expert 0, around one of expert 15, which is
/// on another rank by every placement.
fn order_matters(tokens: &mut Tokens) {
    for (slots, weights) in tokens.ids.chunks_mut(TOP_K).zip(tokens.weights.chunks_mut(TOP_K)) {
        slots.copy_from_slice(&[15, 0, 7, 0]);
        weights.copy_from_slice(&[0.75, 1_048_576.0, 0.8, -1_048_576.0]);
    }
}

/// Ranks with their layers and inputs.
struct Spread {
    devices: Vec<Device>,
    layers: Vec<MarlinLayer>,
    inputs: Vec<(Buffer<u16>, Buffer<i32>, Buffer<f32>)>,
    work: Vec<Workspace>,
}

impl Spread {
    fn new(devices: Vec<Device>, all: &Experts, rank_of: &[usize], tokens: &Tokens) -> Self {
        let (mut layers, mut inputs, mut work) = (Vec::new(), Vec::new(), Vec::new());
        for (rank, device) in devices.iter().enumerate() {
            let mut map = vec![-1; EXPERTS];
            let (mut w13, mut w2): (Vec<Weight<'_>>, Vec<Weight<'_>>) = (Vec::new(), Vec::new());
            for (expert, _) in rank_of.iter().enumerate().filter(|(_, of)| **of == rank) {
                map[expert] = w13.len() as i32;
                w13.push(all.w13[expert].clone());
                w2.push(all.w2[expert].clone());
            }
            let own = Layer { w13: &w13, w2: &w2, expert_map: Some(&map), ..all.layer() };
            let layer = MarlinLayer::new(device, &own).unwrap();
            let layer = layer.with_ranks(device, rank, rank_of).unwrap();
            work.push(layer.workspace(device, tokens.ids.len() / TOP_K, TOP_K).unwrap());
            layers.push(layer);
            inputs.push((
                device.upload(&tokens.x).unwrap(),
                device.upload(&tokens.ids).unwrap(),
                device.upload(&tokens.weights).unwrap(),
            ));
        }
        Self { devices, layers, inputs, work }
    }

    fn ranks(&self, tokens: usize, two_shot: bool) -> Vec<Rank> {
        let devices: Vec<&Device> = self.devices.iter().collect();
        // Slots of all tokens, as one shot needs it.
        let ranks = Rank::of_process(&devices, tokens * TOP_K * HIDDEN).unwrap();
        ranks.into_iter().map(|rank| rank.with_two_shot(two_shot)).collect()
    }

    /// y of every rank, after one call.
    fn call(&mut self, ranks: &mut [Rank], len: usize) -> Vec<Vec<u16>> {
        for (r, rank) in ranks.iter_mut().enumerate() {
            let (x, ids, weights) = &self.inputs[r];
            let (device, layer) = (&self.devices[r], &self.layers[r]);
            rank.compute_experts(device, layer, x, (ids, weights), &mut self.work[r]).unwrap();
        }
        let mut all = Vec::new();
        for (r, rank) in ranks.iter_mut().enumerate() {
            let device = &self.devices[r];
            let mut y = device.upload(&vec![0xabcd; len]).unwrap();
            let (layer, ids) = (&self.layers[r], &self.inputs[r].1);
            rank.add_experts(device, layer, ids, &self.work[r], &mut y).unwrap();
            all.push(y);
        }
        let found = |(r, y): (usize, &Buffer<u16>)| {
            ranks[r].check(&self.devices[r]).unwrap();
            self.devices[r].download(y).unwrap()
        };
        all.iter().enumerate().map(found).collect()
    }
}

#[test]
fn experts_on_any_number_of_ranks_have_the_bits_of_the_reference() {
    let test = "experts_on_any_number_of_ranks_have_the_bits_of_the_reference";
    let Some(_gpu) = common::whole_gpu_or_skip(test) else { return };
    let mut law = Law::new("expert layer over 1, 2, 4 and 8 ranks");
    let mut random = Random(0x5EED_000E_89AB_CDEF);
    for (dtype, counts) in [(BF16, &[1usize, 13, 600][..]), (ScalarType::FLOAT16, &[5])] {
        let all = experts(&mut random, dtype);
        for &count in counts {
            let layer = all.layer();
            let mut tokens = Tokens::new(&mut random, &layer, (count, TOP_K), some_to_none);
            for kind in ["any slots", "slots whose order matters"] {
                if kind != "any slots" {
                    if dtype != BF16 {
                        continue;
                    }
                    order_matters(&mut tokens);
                }
                let wanted = tokens.canonical(&layer);
                for ranks in [1, 2, 4, 8] {
                    let placements = placements(ranks);
                    for rank_of in &placements[..ranks.min(2)] {
                        let mut spread = Spread::new(open(ranks), &all, rank_of, &tokens);
                        for two_shot in [false, true] {
                            let mut own = spread.ranks(count, two_shot);
                            for call in 0..3 {
                                let all = spread.call(&mut own, wanted.len());
                                for (r, found) in all.iter().enumerate() {
                                    let context = format!(
                                        "{dtype}, {count} tokens, {kind}, {rank_of:?}, rank {r}, two-shot {two_shot}, call {call}"
                                    );
                                    law.equal(&context, found, &wanted);
                                }
                            }
                        }
                    }
                }
            }
        }
    }
    law.held_on(gpus());
}

#[test]
fn wrong_sums_over_ranks_are_noticed() {
    let Some(_gpu) = common::whole_gpu_or_skip("wrong_sums_over_ranks_are_noticed") else { return };
    let row: &'static Row = registry().iter().find(|row| row.name == "moe_sum_ranks").unwrap();
    let mut random = Random(0x5EED_000F_89AB_CDEF);
    let all = experts(&mut random, BF16);
    let mut tokens = Tokens::new(&mut random, &all.layer(), (9, TOP_K), |_, expert| expert);
    order_matters(&mut tokens);
    let wanted = tokens.canonical(&all.layer());
    let found = |mutant: Option<&Mutant>, two_shot: bool| {
        let devices = open(2).into_iter().map(|device| match mutant {
            Some(mutant) => device.with_mutant(row, mutant).unwrap(),
            None => device,
        });
        let rank_of = &placements(2)[0];
        let mut spread = Spread::new(devices.collect(), &all, rank_of, &tokens);
        let mut ranks = spread.ranks(9, two_shot);
        spread.call(&mut ranks, wanted.len()).swap_remove(1)
    };
    for two_shot in [false, true] {
        assert_eq!(found(None, two_shot), wanted);
        for mutant in row.mutants {
            assert_ne!(found(Some(mutant), two_shot), wanted, "{} passed", mutant.name);
        }
    }
    let count = row.mutants.len();
    common::say(&format!(
        "LAW wrong sums over ranks rejected, GPUs: {}: {count} of {count}",
        gpus()
    ));
}

#[test]
fn expert_calls_that_do_not_fit_are_refused() {
    let Some(device) = common::device_or_skip("expert_calls_that_do_not_fit_are_refused") else {
        return;
    };
    let mut random = Random(0x5EED_0010_89AB_CDEF);
    let all = experts(&mut random, BF16);
    let new = || MarlinLayer::new(&device, &all.layer()).unwrap();
    let what = |result: Result<(), AccelError>| match result {
        Err(AccelError::Argument { what, .. }) => Some(what),
        Ok(()) => None,
        Err(error) => panic!("{error}"),
    };
    // All experts are here: none is on another rank.
    let spread =
        |rank, rank_of: &[usize]| what(new().with_ranks(&device, rank, rank_of).map(|_| ()));
    assert_eq!(spread(0, &placements(2)[0]), Some("rank_of"));
    assert_eq!(spread(1, &[0; EXPERTS]), Some("rank_of"));
    assert_eq!(spread(0, &[0; EXPERTS - 1]), Some("rank_of"));
    let layer = new().with_ranks(&device, 0, &[0; EXPERTS]).unwrap();
    let mut rank = Rank::of_process(&[&device], 2 * TOP_K * HIDDEN / 2).unwrap().remove(0);
    let inputs = |count: usize| {
        let x = device.zeroed::<u16>(count * HIDDEN).unwrap();
        let ids = device.zeroed::<i32>(count * TOP_K).unwrap();
        (x, ids, device.zeroed::<f32>(count * TOP_K).unwrap())
    };
    let (x, ids, weights) = inputs(2);
    let mut work = layer.workspace(&device, 2, TOP_K).unwrap();
    let mut y = device.zeroed::<u16>(2 * HIDDEN).unwrap();
    assert_eq!(what(rank.add_experts(&device, &layer, &ids, &work, &mut y)), Some("y"));
    let routing = (&ids, &weights);
    let found = rank.compute_experts(&device, &new(), &x, routing, &mut work);
    assert_eq!(what(found), Some("layer"));
    let many = inputs(3);
    let mut room = layer.workspace(&device, 3, TOP_K).unwrap();
    let found = rank.compute_experts(&device, &layer, &many.0, (&many.1, &many.2), &mut room);
    assert_eq!(what(found), Some("tokens"));
    assert_eq!(what(rank.compute_experts(&device, &layer, &x, routing, &mut work)), None);
    let found = rank.compute_experts(&device, &layer, &x, routing, &mut work);
    assert_eq!(what(found), Some("call"));
    // Of more tokens, and of more slots for each.
    assert_eq!(what(rank.add_experts(&device, &layer, &ids, &room, &mut y)), Some("work"));
    let other = layer.workspace(&device, 1, 2 * TOP_K).unwrap();
    assert_eq!(what(rank.add_experts(&device, &layer, &ids, &other, &mut y)), Some("work"));
    let mut long = device.zeroed::<u16>(3 * HIDDEN).unwrap();
    assert_eq!(what(rank.add_experts(&device, &layer, &ids, &work, &mut long)), Some("y"));
    assert_eq!(what(rank.add_experts(&device, &layer, &many.1, &work, &mut y)), Some("y"));
    assert_eq!(what(rank.add_experts(&device, &layer, &ids, &work, &mut y)), None);
    rank.check(&device).unwrap();
}
