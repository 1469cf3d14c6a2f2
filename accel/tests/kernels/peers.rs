//! Row-parallel products over ranks, spread over the GPUs of this machine: the bits of one device for every number of
//! ranks, in graphs too. `CUDA_VISIBLE_DEVICES=0`: all on one GPU.

use crate::common;

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use cudarc::driver::CudaContext;

use crate::common::{Float, Law, Random, float_weight, weight};
use marlinspike::num::array::rows_of;
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::ScalarType;
use marlinspike::products::schedule::{Extras, Schedule, Split};
use marlinspike::weight::Weight;
use marlinspike_accel::{
    AccelError, Device,
    memory::Buffer,
    operation::{Mutant, Row},
    ops::{MarlinWeight, Rank, gemm::marlin_gemm_part, marlin_gemm},
    registry,
    timing::Graph,
};

const BF16: ScalarType = ScalarType::BFLOAT16;

/// The ranks of a layer, with their weights and inputs.
pub(crate) struct Layer {
    pub(crate) devices: Vec<Device>,
    pub(crate) weights: Vec<MarlinWeight>,
    x: Vec<Buffer<u16>>,
    size_n: usize,
}

impl Layer {
    pub(crate) fn new(devices: Vec<Device>, w: &Weight<'_>, x: &[u16]) -> Self {
        let (size_k, ranks) = (w.shape().size_k, devices.len());
        let (mut weights, mut inputs) = (Vec::new(), Vec::new());
        for (rank, device) in devices.iter().enumerate() {
            let split = Split::new(size_k, rank, ranks).unwrap();
            let own = split.part_of(w).unwrap();
            weights.push(MarlinWeight::of_part(device, &own, BF16).unwrap());
            let rows = x.chunks_exact(size_k);
            let x: Vec<u16> = rows.flat_map(|row| &row[split.rows()]).copied().collect();
            inputs.push(device.upload(&x).unwrap());
        }
        Self { devices, weights, x: inputs, size_n: w.shape().size_n }
    }

    pub(crate) fn x(&self, rank: usize) -> &Buffer<u16> {
        &self.x[rank]
    }

    pub(crate) fn ranks(&self, size_m: usize) -> Vec<Rank> {
        let devices: Vec<&Device> = self.devices.iter().collect();
        Rank::of_process(&devices, size_m * self.size_n).unwrap()
    }

    pub(crate) fn outputs(&self, size_m: usize) -> Vec<Buffer<u16>> {
        let fill = vec![0xabcd; size_m * self.size_n];
        self.devices.iter().map(|device| device.upload(&fill).unwrap()).collect()
    }

    /// One call on every rank.
    pub(crate) fn call(&self, ranks: &mut [Rank], y: &mut [Buffer<u16>]) {
        for (r, rank) in ranks.iter_mut().enumerate() {
            rank.multiply(&self.devices[r], &self.x[r], &self.weights[r]).unwrap();
        }
        for (r, rank) in ranks.iter_mut().enumerate() {
            rank.add(&self.devices[r], &self.weights[r], &mut y[r]).unwrap();
        }
    }

    pub(crate) fn check(&self, ranks: &[Rank]) {
        for (r, rank) in ranks.iter().enumerate() {
            rank.check(&self.devices[r]).unwrap();
        }
    }
}

/// Number of GPUs.
pub(crate) fn gpus() -> usize {
    Device::count().unwrap()
}

/// The devices of that many ranks.
pub(crate) fn open(ranks: usize) -> Vec<Device> {
    // A context that nothing uses is destroyed, and making one takes a quarter of a second.
    static CONTEXTS: OnceLock<Vec<Arc<CudaContext>>> = OnceLock::new();
    CONTEXTS.get_or_init(|| (0..gpus()).map(|gpu| CudaContext::new(gpu).unwrap()).collect());
    (0..ranks).map(|rank| Device::open_ordinal(rank % gpus()).unwrap()).collect()
}

pub(crate) fn whole(x: &[u16], w: &Weight<'_>) -> Vec<u16> {
    let schedule = Schedule::canonical_v2(w, BF16, BF16).unwrap();
    let codes: Vec<u32> = x.iter().map(|&bits| bits.into()).collect();
    let codes = rows_of("x", &codes, w.shape().size_k).unwrap();
    let y = schedule.execute(codes, w, Extras::default()).unwrap();
    y.into_iter().map(|bits| bits as u16).collect()
}

#[test]
fn every_number_of_ranks_has_the_bits_of_the_reference() {
    let test = "every_number_of_ranks_has_the_bits_of_the_reference";
    let Some(_gpu) = common::whole_gpu_or_skip(test) else { return };
    let mut law = Law::new("row-parallel product, 1, 2, 4 and 8 ranks");
    let mut random = Random(0x5EED_0007_89AB_CDEF);
    for (size_k, size_m) in [(2048, 67), (1536, 5), (11008, 3)] {
        let shape = Shape::new(size_k, 128);
        let group = GroupSize::Of(64);
        let weights = [
            weight(&mut random, ScalarType::UINT4B8, BF16, shape, group, true),
            weight(&mut random, ScalarType::UINT8B128, BF16, shape, GroupSize::Channel, false),
            float_weight(&mut random, Float::Mxfp4(128), BF16, shape, true),
            float_weight(&mut random, Float::Nvfp4, BF16, shape, true),
        ];
        for w in &weights {
            let x = random.halves(BF16, size_m * size_k, 1.0);
            let wanted = whole(&x, w);
            for count in [1, 2, 4, 8] {
                if Split::new(size_k, 0, count).is_err() {
                    continue;
                }
                let layer = Layer::new(open(count), w, &x);
                for two_shot in [false, true] {
                    let ranks = layer.ranks(size_m).into_iter();
                    let mut ranks: Vec<_> = ranks.map(|r| r.with_two_shot(two_shot)).collect();
                    // Three calls: both turns, and the first again.
                    for call in 0..3 {
                        let mut y = layer.outputs(size_m);
                        layer.call(&mut ranks, &mut y);
                        layer.check(&ranks);
                        for (r, y) in y.iter().enumerate() {
                            let found = layer.devices[r].download(y).unwrap();
                            let context = format!(
                                "{}, {shape}, M {size_m}, rank {r} of {count}, two-shot {two_shot}, call {call}",
                                w.ty
                            );
                            law.equal(&context, &found, &wanted);
                        }
                    }
                }
            }
        }
    }
    law.held_on(gpus());
}

/// Recorded launches of each rank: an even number of calls.
fn record<'a>(
    layer: &'a Layer,
    ranks: &'a mut [Rank],
    y: &'a mut [Buffer<u16>],
    calls: usize,
) -> Vec<Graph<'a>> {
    let parts = ranks.iter_mut().zip(y).enumerate();
    let of_rank = |(r, (rank, y)): (usize, (&'a mut Rank, &'a mut Buffer<u16>))| {
        let device = &layer.devices[r];
        let calls = move || {
            (0..calls).try_for_each(|_| {
                rank.multiply(device, &layer.x[r], &layer.weights[r])?;
                rank.add(device, &layer.weights[r], y)
            })
        };
        device.record(calls).unwrap()
    };
    parts.map(of_rank).collect()
}

#[test]
fn graphs_of_two_calls_replay_a_thousand_times() {
    let test = "graphs_of_two_calls_replay_a_thousand_times";
    let Some(_gpu) = common::whole_gpu_or_skip(test) else { return };
    let mut law = Law::new("row-parallel product, 1000 replays on 2 and 4 ranks");
    let mut random = Random(0x5EED_0008_89AB_CDEF);
    let (shape, size_m) = (Shape::new(2048, 192), 19);
    let w = weight(&mut random, ScalarType::UINT4B8, BF16, shape, GroupSize::Of(128), true);
    let x = random.halves(BF16, size_m * shape.size_k, 1.0);
    let wanted = whole(&x, &w);
    for (count, two_shot) in [(2, false), (2, true), (4, false), (4, true)] {
        // Graphs of four streams are too many to run at once on one GPU.
        if count > 2 && gpus() < count {
            continue;
        }
        let layer = Layer::new(open(count), &w, &x);
        let ranks = layer.ranks(size_m).into_iter();
        let mut ranks: Vec<_> = ranks.map(|r| r.with_two_shot(two_shot)).collect();
        let mut y = layer.outputs(size_m);
        // Modules are loaded before anything is recorded; an even number of calls.
        layer.call(&mut ranks, &mut y);
        layer.call(&mut ranks, &mut y);
        layer.check(&ranks);
        {
            let graphs = record(&layer, &mut ranks, &mut y, 2);
            for _ in 0..1000 {
                graphs.iter().for_each(|graph| graph.replay().unwrap());
            }
        }
        layer.check(&ranks);
        for (r, y) in y.iter().enumerate() {
            let found = layer.devices[r].download(y).unwrap();
            law.equal(&format!("rank {r} of {count}, two-shot {two_shot}"), &found, &wanted);
        }
    }
    law.held_on(gpus());
}

/// Groups of ranks on streams of their own, with memory of their own, that replay graphs at the same time.
#[test]
fn two_groups_of_ranks_at_once_have_the_bits_of_the_reference() {
    let test = "two_groups_of_ranks_at_once_have_the_bits_of_the_reference";
    let Some(_gpu) = common::whole_gpu_or_skip(test) else { return };
    if gpus() < 2 {
        return common::say(&format!(
            "SKIPPED (one GPU, where they can starve each other): {test}"
        ));
    }
    let mut law = Law::new("two groups of 2 ranks at once, 400 calls each");
    let mut random = Random(0x5EED_0014_89AB_CDEF);
    for (shape, size_m) in [(Shape::new(2048, 4096), 16), (Shape::new(2048, 8192), 1024)] {
        let w = weight(&mut random, ScalarType::UINT4B8, BF16, shape, GroupSize::Of(128), true);
        let x = random.halves(BF16, size_m * shape.size_k, 1.0);
        let one = Device::open().unwrap();
        let whole = MarlinWeight::new(&one, std::slice::from_ref(&w), BF16).unwrap();
        let mut wanted = one.zeroed::<u16>(size_m * shape.size_n).unwrap();
        let from = one.upload(&x).unwrap();
        marlin_gemm(&one, &from, &whole.by_version_2().unwrap(), &mut wanted).unwrap();
        let wanted = one.download(&wanted).unwrap();
        let layers = [0, 1].map(|_| Layer::new(open(2), &w, &x));
        let limit = Duration::from_secs(2);
        let mut ranks = layers.each_ref().map(|layer| {
            layer.ranks(size_m).into_iter().map(|rank| rank.with_limit(limit)).collect::<Vec<_>>()
        });
        let mut y = layers.each_ref().map(|layer| layer.outputs(size_m));
        for (g, layer) in layers.iter().enumerate() {
            (0..2).for_each(|_| layer.call(&mut ranks[g], &mut y[g]));
            layer.check(&ranks[g]);
        }
        {
            let groups = layers.iter().zip(&mut ranks).zip(&mut y);
            let graphs: Vec<_> =
                groups.map(|((layer, ranks), y)| record(layer, ranks, y, 4)).collect();
            for _ in 0..100 {
                graphs.iter().flatten().for_each(|graph| graph.replay().unwrap());
            }
        }
        for (g, layer) in layers.iter().enumerate() {
            for (r, rank) in ranks[g].iter().enumerate() {
                if let Err(error) = rank.check(&layer.devices[r]) {
                    common::say(&format!("GROUPS M {size_m}, group {g}, rank {r}: {error}"));
                    continue;
                }
                let found = layer.devices[r].download(&y[g][r]).unwrap();
                law.equal(&format!("M {size_m}, group {g}, rank {r}"), &found, &wanted);
            }
        }
    }
    law.held_on(gpus());
}

#[test]
fn a_missing_rank_is_an_error_and_no_hang() {
    let Some(_gpu) = common::whole_gpu_or_skip("a_missing_rank_is_an_error_and_no_hang") else {
        return;
    };
    let mut random = Random(0x5EED_0009_89AB_CDEF);
    let shape = Shape::new(1024, 64);
    let w = weight(&mut random, ScalarType::UINT4B8, BF16, shape, GroupSize::Of(128), false);
    let x = random.halves(BF16, shape.size_k, 1.0);
    let layer = Layer::new(open(2), &w, &x);
    let ranks = layer.ranks(1).into_iter();
    let mut ranks: Vec<_> = ranks.map(|rank| rank.with_limit(Duration::from_millis(50))).collect();
    let mut y = layer.outputs(1);
    let mut call = |rank: usize| {
        ranks[rank].multiply(&layer.devices[rank], &layer.x[rank], &layer.weights[rank]).unwrap();
        ranks[rank].add(&layer.devices[rank], &layer.weights[rank], &mut y[rank]).unwrap();
        ranks[rank].check(&layer.devices[rank])
    };
    let error = call(0).unwrap_err();
    let AccelError::Ranks { rank, missing, odd_calls } = &error else { panic!("{error}") };
    assert_eq!((*rank, &missing[..], *odd_calls), (0, &[1][..], false));
    assert!(error.to_string().contains("ranks [1]"), "{error}");
    // It stays an error.
    assert!(call(0).is_err());
}

#[test]
fn an_odd_number_of_recorded_calls_is_an_error() {
    let test = "an_odd_number_of_recorded_calls_is_an_error";
    let Some(_gpu) = common::whole_gpu_or_skip(test) else { return };
    let mut random = Random(0x5EED_000A_89AB_CDEF);
    let shape = Shape::new(1024, 64);
    let w = weight(&mut random, ScalarType::UINT4B8, BF16, shape, GroupSize::Of(128), false);
    let x = random.halves(BF16, shape.size_k, 1.0);
    let layer = Layer::new(open(1), &w, &x);
    let (mut ranks, mut y) = (layer.ranks(1), layer.outputs(1));
    layer.call(&mut ranks, &mut y);
    layer.check(&ranks);
    {
        let (rank, y, device) = (&mut ranks[0], &mut y[0], &layer.devices[0]);
        let graph = device
            .record(|| {
                rank.multiply(device, &layer.x[0], &layer.weights[0])?;
                rank.add(device, &layer.weights[0], y)
            })
            .unwrap();
        (0..2).for_each(|_| graph.replay().unwrap());
    }
    let error = ranks[0].check(&layer.devices[0]).unwrap_err();
    assert!(error.to_string().contains("an odd number of calls"), "{error}");
}

#[test]
fn wrong_reductions_are_noticed() {
    let Some(_gpu) = common::whole_gpu_or_skip("wrong_reductions_are_noticed") else { return };
    let row: &'static Row = registry().iter().find(|row| row.name == "add_ranks").unwrap();
    let mut random = Random(0x5EED_000B_89AB_CDEF);
    let (shape, size_m) = (Shape::new(2048, 4096), 64);
    let w = weight(&mut random, ScalarType::UINT4B8, BF16, shape, GroupSize::Of(128), true);
    let x = random.halves(BF16, size_m * shape.size_k, 1.0);
    let found = |mutant: Option<&Mutant>, two_shot: bool| {
        let devices = open(4).into_iter().map(|device| match mutant {
            Some(mutant) => device.with_mutant(row, mutant).unwrap(),
            None => device,
        });
        let layer = Layer::new(devices.collect(), &w, &x);
        let ranks = layer.ranks(size_m).into_iter();
        let mut ranks: Vec<_> = ranks.map(|rank| rank.with_two_shot(two_shot)).collect();
        let mut y = layer.outputs(size_m);
        layer.call(&mut ranks, &mut y);
        layer.check(&ranks);
        layer.devices[1].download(&y[1]).unwrap()
    };
    let right = found(None, true);
    let one = Device::open().unwrap();
    let weight = MarlinWeight::new(&one, std::slice::from_ref(&w), BF16).unwrap();
    let weight = weight.by_version_2().unwrap();
    let mut y = one.zeroed::<u16>(right.len()).unwrap();
    marlin_gemm(&one, &one.upload(&x).unwrap(), &weight, &mut y).unwrap();
    assert_eq!(one.download(&y).unwrap(), right, "4 ranks and one device");
    // Ranks that take their own K for the model's cut other leaves. No rank takes such a weight.
    let own = Split::new(shape.size_k, 1, 4).unwrap();
    let rows = x.chunks_exact(shape.size_k).flat_map(|row| &row[own.rows()]);
    let x_there = one.upload(&rows.copied().collect::<Vec<u16>>()).unwrap();
    let sums = |weight: &MarlinWeight| {
        let mut sums = one.zeroed::<f32>(right.len()).unwrap();
        marlin_gemm_part(&one, &x_there, weight, &mut sums).unwrap();
        one.download(&sums).unwrap()
    };
    let part = MarlinWeight::of_part(&one, &own.part_of(&w).unwrap(), BF16).unwrap();
    let slice = w.slice_rows(own.rows()).unwrap();
    let slice = MarlinWeight::new(&one, &[slice], BF16).unwrap().by_version_2().unwrap();
    assert_ne!(sums(&slice), sums(&part), "a rank's K for the model's passed");
    let mut alone = Rank::of_process(&[&one], right.len()).unwrap().remove(0);
    alone.multiply(&one, &x_there, &slice).unwrap();
    let mut four = Rank::of_process(&[&one; 4], right.len()).unwrap();
    let error = four[1].multiply(&one, &x_there, &slice).unwrap_err();
    assert!(matches!(error, AccelError::Argument { what: "weight", .. }), "{error}");
    for mutant in row.mutants {
        for two_shot in [false, true] {
            assert_ne!(found(Some(mutant), two_shot), right, "{} passed", mutant.name);
        }
    }
    let count = row.mutants.len() + 1;
    let gpus = gpus();
    common::say(&format!(
        "LAW wrong reductions over ranks rejected, GPUs: {gpus}: {count} of {count}"
    ));
}

#[test]
fn calls_that_do_not_fit_are_refused() {
    let Some(device) = common::device_or_skip("calls_that_do_not_fit_are_refused") else { return };
    let mut random = Random(3);
    let shape = Shape::new(1024, 64);
    let w = weight(&mut random, ScalarType::UINT4B8, BF16, shape, GroupSize::Of(128), false);
    let x = device.zeroed::<u16>(2 * shape.size_k).unwrap();
    let new = || MarlinWeight::new(&device, std::slice::from_ref(&w), BF16).unwrap();
    let what = |result: Result<(), AccelError>| match result {
        Err(AccelError::Argument { what, .. }) => Some(what),
        Ok(()) => None,
        Err(error) => panic!("{error}"),
    };
    assert_eq!(what(Rank::of_process(&[&*device; 3], 64).map(|_| ())), Some("devices"));
    let mut rank = Rank::of_process(&[&device], 64).unwrap().remove(0);
    let whole = new().by_version_2().unwrap();
    let half = Split::new(shape.size_k, 0, 2).unwrap().part_of(&w).unwrap();
    let half = MarlinWeight::of_part(&device, &half, BF16).unwrap();
    let mut y = device.zeroed::<u16>(64).unwrap();
    assert_eq!(what(rank.add(&device, &whole, &mut y)), Some("y"));
    assert_eq!(what(rank.multiply(&device, &x, &half)), Some("weight"));
    assert_eq!(what(rank.multiply(&device, &x, &new())), Some("weight"));
    assert_eq!(what(rank.multiply(&device, &x, &whole)), Some("outputs"));
    let x = device.zeroed::<u16>(shape.size_k).unwrap();
    assert_eq!(what(rank.multiply(&device, &x, &whole)), None);
    assert_eq!(what(rank.multiply(&device, &x, &whole)), Some("call"));
    // Of other columns.
    let wide = Shape::new(1024, 128);
    let other = weight(&mut random, ScalarType::UINT4B8, BF16, wide, GroupSize::Of(128), false);
    let other = MarlinWeight::new(&device, &[other], BF16).unwrap();
    let other = other.by_version_2().unwrap();
    assert_eq!(what(rank.add(&device, &other, &mut y)), Some("weight"));
    assert_eq!(what(rank.add(&device, &half, &mut y)), Some("weight"));
    let mut long = device.zeroed::<u16>(128).unwrap();
    assert_eq!(what(rank.add(&device, &whole, &mut long)), Some("y"));
    assert_eq!(what(rank.add(&device, &whole, &mut y)), None);
    let other = Device::open().unwrap();
    assert_eq!(what(rank.check(&other)), Some("rank"));
}
