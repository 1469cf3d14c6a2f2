//! Times of expert layers whose experts are spread over ranks, each on a GPU of its own.
//!
//! ```text
//! rank_layers [T ...]
//! ```
//!
//! T: numbers of ranks, by default 1, 2 and 4 as far as there are GPUs; the speed-up is over the first. int4 codes in groups
//! of 128, bf16, SiLU: Qwen3-30B-A3B and Mixtral-8x7B. Every rank has all tokens and some of the experts, and all ranks
//! get y, with the bits of one GPU. A figure is the median of 7 replays of a recorded graph of 16 layers, each with a
//! routing of its own, on the rank that starts last.

use std::process::ExitCode;

use marlinspike::moe::activation::{Activation, Definition};
use marlinspike::moe::layer::Layer;
use marlinspike::num::dims::Shape;
use marlinspike::num::scalar::ScalarType;
use marlinspike::vectors::Rng;
use marlinspike::weight::Weight;
use marlinspike_accel::{
    AccelError, Device,
    memory::Buffer,
    ops::{MarlinLayer, Rank, Workspace},
    timing::{Graph, REPLAYS, time_together},
    workload::{WeightType, routing},
};

type AnyError = Box<dyn std::error::Error>;

/// Name, experts, top k, H, I.
const LAYERS: [(&str, [usize; 4]); 2] =
    [("Qwen3-30B-A3B", [128, 8, 2048, 768]), ("Mixtral-8x7B", [8, 2, 4096, 14336])];
const TOKENS: [usize; 5] = [1, 16, 64, 1024, 4096];
const ROUTINGS: usize = 16;

/// What a rank has.
struct Own {
    device: Device,
    layer: MarlinLayer,
}

/// A rank's buffers of a call.
struct Call {
    x: Buffer<u16>,
    ids: Vec<Buffer<i32>>,
    weights: Buffer<f32>,
    work: Workspace,
    y: Buffer<u16>,
}

/// Expert layers of the ranks: neighbouring experts are on one.
fn layers(sizes: [usize; 4], ranks: usize) -> Result<Vec<Own>, AnyError> {
    let [experts, _, h, i] = sizes;
    let ty = WeightType::named("uint4b8").ok_or("no uint4b8")?;
    let (each, rng) = (experts / ranks, &mut Rng::new(1));
    // The experts' codes are the same; their memory is not.
    let w13: Vec<Weight<'_>> = vec![ty.weight(rng, Shape::new(h, 2 * i))?; each];
    let w2: Vec<Weight<'_>> = vec![ty.weight(rng, Shape::new(i, h))?; each];
    let rank_of: Vec<usize> = (0..experts).map(|expert| expert / each).collect();
    let own = |rank: usize| -> Result<Own, AnyError> {
        let device = Device::open_ordinal(rank)?;
        let place = |expert: usize| if expert / each == rank { (expert % each) as i32 } else { -1 };
        let map: Vec<i32> = (0..experts).map(place).collect();
        let layer = Layer {
            w13: &w13,
            w2: &w2,
            orders: [None, None],
            num_experts: experts,
            expert_map: (ranks > 1).then_some(&map),
            activation: Definition::new(Activation::Silu),
            dtype: ScalarType::BFLOAT16,
            input_dtype: None,
            router_weight_on_input: false,
        };
        let layer = MarlinLayer::new(&device, &layer)?;
        let layer = if ranks > 1 { layer.with_ranks(&device, rank, &rank_of)? } else { layer };
        Ok(Own { device, layer })
    };
    (0..ranks).map(own).collect()
}

/// Microseconds of a layer, and of the first rank's experts alone with the sum over their slots.
fn time(all: &[Own], sizes: [usize; 4], tokens: usize) -> Result<[f64; 2], AnyError> {
    let [experts, top_k, h, _] = sizes;
    let rng = &mut Rng::new(tokens as u64);
    let x: Vec<u16> = (0..tokens * h).map(|_| 0x3e80 + (rng.next_u32() % 0x200) as u16).collect();
    let ids: Vec<Vec<i32>> = (0..ROUTINGS).map(|_| routing(rng, tokens, top_k, experts)).collect();
    let call = |Own { device, layer }: &Own| -> Result<Call, AccelError> {
        Ok(Call {
            x: device.upload(&x)?,
            ids: ids.iter().map(|ids| device.upload(ids)).collect::<Result<_, _>>()?,
            weights: device.upload(&vec![1.0 / top_k as f32; tokens * top_k])?,
            work: layer.workspace(device, tokens, top_k)?,
            y: device.zeroed(tokens * h)?,
        })
    };
    let mut calls = all.iter().map(call).collect::<Result<Vec<_>, _>>()?;
    let devices: Vec<&Device> = all.iter().map(|own| &own.device).collect();
    // Room for the slots of all tokens.
    let mut ranks = match all.len() {
        1 => Vec::new(),
        _ => Rank::of_process(&devices, (tokens * top_k * h).div_ceil(2).max(tokens * h))?,
    };
    // Twice: modules are loaded before anything is recorded, and the number of calls stays even.
    for _ in 0..2 {
        for (rank, (own, call)) in ranks.iter_mut().zip(all.iter().zip(&mut calls)) {
            let routing = (&call.ids[0], &call.weights);
            rank.compute_experts(&own.device, &own.layer, &call.x, routing, &mut call.work)?;
        }
        for (rank, (own, call)) in ranks.iter_mut().zip(all.iter().zip(&mut calls)) {
            rank.add_experts(&own.device, &own.layer, &call.ids[0], &call.work, &mut call.y)?;
        }
    }
    let own = {
        let graph = alone(&all[0], &mut calls[0])?;
        devices[0].time(&graph, REPLAYS)?.each(ROUTINGS).median.into()
    };
    let graphs: Vec<Graph<'_>> = match &mut ranks[..] {
        [] => vec![alone(&all[0], &mut calls[0])?],
        ranks => {
            let parts = ranks.iter_mut().zip(all.iter().zip(&mut calls));
            parts.map(|(rank, (own, call))| record(rank, own, call)).collect::<Result<_, _>>()?
        }
    };
    let times = time_together(&devices, &graphs, REPLAYS)?.each(ROUTINGS);
    drop(graphs);
    ranks.iter().zip(&devices).try_for_each(|(rank, device)| rank.check(device))?;
    Ok([times.median.into(), own])
}

/// The layers of one GPU, or of one rank's experts.
fn alone<'a>(own: &'a Own, call: &'a mut Call) -> Result<Graph<'a>, AccelError> {
    let Own { device, layer } = own;
    let Call { x, ids, weights, work, y } = call;
    layer.forward(device, x, &ids[0], weights, work, y)?;
    device.record(move || {
        ids.iter().try_for_each(|ids| layer.forward(device, x, ids, weights, work, y))
    })
}

/// The layers of a rank.
fn record<'a>(
    rank: &'a mut Rank,
    own: &'a Own,
    call: &'a mut Call,
) -> Result<Graph<'a>, AccelError> {
    let Own { device, layer } = own;
    let Call { x, ids, weights, work, y } = call;
    device.record(move || {
        ids.iter().try_for_each(|ids| {
            rank.compute_experts(device, layer, x, (ids, weights), work)?;
            rank.add_experts(device, layer, ids, work, y)
        })
    })
}

fn run() -> Result<(), AnyError> {
    let arguments = std::env::args().skip(1).map(|number| number.parse::<usize>());
    let mut counts = arguments.collect::<Result<Vec<_>, _>>()?;
    let gpus = Device::count()?;
    if counts.is_empty() {
        counts.extend([1, 2, 4].into_iter().filter(|&count| count <= gpus));
    }
    if let Some(wrong) =
        counts.iter().find(|&&count| count > gpus || !matches!(count, 1 | 2 | 4 | 8))
    {
        return Err(format!(
            "{wrong} ranks: expected 1, 2, 4 or 8, and a GPU for each of them; there are {gpus}"
        )
        .into());
    }
    println!(
        "{gpus} GPUs: {}; microseconds of a layer, of a rank's experts alone, and the speed-up",
        Device::open()?.name()
    );
    for (name, sizes) in LAYERS {
        let mut first = [f64::NAN; TOKENS.len()];
        for (c, &count) in counts.iter().enumerate() {
            let all = layers(sizes, count)?;
            for (t, &tokens) in TOKENS.iter().enumerate() {
                let [us, own] = time(&all, sizes, tokens)?;
                if c == 0 {
                    first[t] = us;
                }
                let times = first[t] / us;
                println!("{name}, ranks {count}, M {tokens:4}: {us:8.1} {own:8.1}  {times:5.2}");
            }
        }
    }
    Ok(())
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("rank_layers: {error}");
            ExitCode::from(2)
        }
    }
}
