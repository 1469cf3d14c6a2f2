//! How long expert layers with Marlin weights take on this machine's GPU.
//!
//! ```text
//! moe_times [--sweep] [--type TYPE] [E TOP_K H I [M ...]]
//! ```
//!
//! int4 codes in groups of 128 (`uint4b8`) or weights of another type; bf16, SiLU; by default the layers
//! of `docs/cuda.md`. A figure is the median of 7 replays of a graph of 16 layers, each with a routing of its own, so that few tokens
//! do not find their experts in the L2 cache. `limit` is the time to read the experts that a
//! routing hits, once each, at 4.49 TB/s. `--sweep` tries many tilings, of the first product, then of
//! the second; `--part I COUNT` with it only compiles every COUNT-th of them, from the I-th on, for
//! other processes to find in the cache of modules.

mod common;

use std::collections::BTreeSet;

use common::{AnyError, activations, next, types, weight};
use marlinspike::case::Activation;
use marlinspike::dims::Shape;
use marlinspike::gemm::schedule::Schedule;
use marlinspike::moe::activation::Definition;
use marlinspike::moe::layer::Layer;
use marlinspike::scalar::ScalarType;
use marlinspike_accel::{
    AccelError, Buffer, Device,
    ops::{
        MarlinLayer, Workspace,
        gemm::{ManyRows, Tiling},
    },
};

/// Experts, experts per token, hidden size, intermediate size.
const LAYERS: [[usize; 4]; 3] = [[8, 2, 4096, 14336], [128, 8, 2048, 768], [256, 8, 7168, 256]];
const TOKENS: [usize; 7] = [1, 4, 16, 64, 256, 1024, 4096];
const ROUTINGS: usize = 16;

/// `top_k` experts for each token, without repetition.
fn routing(state: &mut u64, tokens: usize, top_k: usize, experts: usize) -> Vec<i32> {
    let mut ids = Vec::new();
    for _ in 0..tokens {
        let mut all: Vec<i32> = (0..experts as i32).collect();
        for j in 0..top_k {
            all.swap(j, j + next(state) as usize % (experts - j));
        }
        ids.extend_from_slice(&all[..top_k]);
    }
    ids
}

/// Tilings of eights of rows for K of so many k; `paired`: of gate and up halves.
fn tilings(m_tiles: u32, size_k: usize, paired: bool) -> Vec<Tiling> {
    let chunks = size_k.div_ceil(Schedule::canonical_chunk(size_k)) as u32;
    let mut all = Vec::new();
    let shapes = [(64, 64), (64, 32), (128, 64), (128, 32), (256, 64)];
    for (n_tile, columns) in shapes.into_iter().filter(|&(n, _)| !paired || n == 128) {
        for teams in [1, 2, 3, 4, 8].into_iter().filter(|&t| t <= chunks) {
            let ranks = chunks.div_ceil(teams).next_power_of_two();
            for stages in [2, 3, 4, 5, 6, 8] {
                all.push(Tiling { m_tiles, n_tile, columns, teams, ranks, stages });
            }
        }
    }
    all
}

/// Inputs of a number of tokens, and a routing for each layer of a graph.
struct Batch {
    x: Buffer<u16>,
    weights: Buffer<f32>,
    ids: Vec<Buffer<i32>>,
    y: Buffer<u16>,
}

impl Batch {
    /// Microseconds of one layer: the median of 7 replays.
    fn time(
        &mut self,
        device: &Device,
        layer: &MarlinLayer,
        mut work: Workspace,
    ) -> Result<f32, AccelError> {
        let Self { x, weights, ids, y } = self;
        // Modules are loaded before anything is recorded.
        layer.forward(device, x, &ids[0], weights, &mut work, y)?;
        let graph = device.record(|| {
            ids.iter().try_for_each(|ids| layer.forward(device, x, ids, weights, &mut work, y))
        })?;
        let mut times = Vec::new();
        for _ in 0..9 {
            times.push(device.microseconds(|| graph.replay())? / ROUTINGS as f32);
        }
        // The first two warm up.
        times.drain(..2);
        times.sort_by(f32::total_cmp);
        Ok(times[times.len() / 2])
    }
}

/// The fastest tilings first; those that the device or the layer does not take are left out.
fn sweep(
    all: Vec<[Tiling; 2]>,
    mut time: impl FnMut([Tiling; 2]) -> Result<f32, AccelError>,
) -> Vec<(f32, [Tiling; 2])> {
    let mut all: Vec<_> =
        all.into_iter().filter_map(|tilings| Some((time(tilings).ok()?, tilings))).collect();
    all.sort_by(|a, b| a.0.total_cmp(&b.0));
    all
}

fn main() -> Result<(), AnyError> {
    let (mut is_sweep, mut part, mut numbers) = (false, None, Vec::new());
    let mut ty = String::from("uint4b8");
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--sweep" => is_sweep = true,
            "--type" => ty = arguments.next().unwrap_or_default(),
            "--part" => {
                let mut number = || arguments.next().unwrap_or_default().parse::<usize>();
                part = Some((number()?, number()?));
            }
            _ => numbers.push(argument.parse::<usize>()?),
        }
    }
    let (layers, tokens) = match numbers[..] {
        [] => (LAYERS.to_vec(), TOKENS.to_vec()),
        [experts, top_k, h, i] => (vec![[experts, top_k, h, i]], TOKENS.to_vec()),
        [experts, top_k, h, i, ..] => (vec![[experts, top_k, h, i]], numbers[4..].to_vec()),
        _ => {
            let usage = "usage: moe_times [--type TYPE] [E TOP_K H I [M ...]]; types:";
            return Err(format!("{usage} {}", types()).into());
        }
    };
    let device = Device::open()?;
    println!("{}, {} multiprocessors", device.name(), device.multiprocessors());
    for [experts, top_k, h, size_i] in layers {
        let mut state = 1;
        // The experts' codes are the same; their memory is not.
        let (w13, w2) = (
            weight(&mut state, &ty, Shape::new(h, 2 * size_i))?,
            weight(&mut state, &ty, Shape::new(size_i, h))?,
        );
        let (w13, w2) = (vec![w13; experts], vec![w2; experts]);
        let layer = MarlinLayer::new(
            &device,
            &Layer {
                w13: &w13,
                w2: &w2,
                orders: [None, None],
                num_experts: experts,
                expert_map: None,
                activation: Definition::new(Activation::Silu),
                dtype: ScalarType::BFLOAT16,
                input_dtype: None,
                router_weight_on_input: false,
            },
        )?;
        for &size_m in &tokens {
            let x = device.upload(&activations(&mut state, size_m * h))?;
            let weights = device.upload(&vec![1.0 / top_k as f32; size_m * top_k])?;
            let mut hit = 0;
            let ids = (0..ROUTINGS)
                .map(|_| {
                    let ids = routing(&mut state, size_m, top_k, experts);
                    hit += ids.iter().collect::<BTreeSet<_>>().len();
                    Ok(device.upload(&ids)?)
                })
                .collect::<Result<Vec<Buffer<i32>>, AnyError>>()?;
            let y = device.zeroed(size_m * h)?;
            let mut batch = Batch { x, weights, ids, y };
            let mut tiled = |tilings| {
                let work = layer.workspace_tiled(&device, size_m, top_k, tilings)?;
                batch.time(&device, &layer, work)
            };
            let entries = size_m * top_k;
            let m_tiles = match entries.div_ceil(experts.min(entries)) {
                0..=8 => 1,
                9..=16 => 2,
                _ => 4,
            };
            let firsts = tilings(m_tiles, h, true);
            let seconds = tilings(m_tiles, size_i, false);
            if let Some((first, count)) = part {
                for pair in [(&firsts, &seconds), (&seconds, &firsts)] {
                    for &tiling in pair.0.iter().skip(first).step_by(count) {
                        let other = pair.1[0];
                        let both =
                            if pair.0 == &firsts { [tiling, other] } else { [other, tiling] };
                        let _ = tiled(both);
                    }
                }
                continue;
            }
            if is_sweep && entries / experts >= 16 {
                for rows in (48..=192).step_by(16) {
                    for columns in [16, 32] {
                        let plan = ManyRows { columns, rows };
                        // What the device does not take is left out.
                        let work = layer.workspace_many_rows(&device, size_m, top_k, [plan; 2])?;
                        if let Ok(us) = batch.time(&device, &layer, work) {
                            println!("    {us:.1} us: {rows} rows by {columns} columns of a warp");
                        }
                    }
                }
            } else if is_sweep {
                // A first product that leaves the rest to the other one.
                let some = seconds[0];
                let by_first = sweep(firsts.iter().map(|&t| [t, some]).collect(), &mut tiled);
                let best = by_first.first().ok_or("no tiling")?.1[0];
                let by_second = sweep(seconds.iter().map(|&t| [best, t]).collect(), &mut tiled);
                for (which, all) in [by_first, by_second].iter().enumerate() {
                    for (time, tilings) in all.iter().take(6) {
                        let Tiling { n_tile, columns, teams, ranks, stages, .. } = tilings[which];
                        println!(
                            "    {time:.1} us: product {which}, {n_tile} columns by {columns}, \
                             {teams} teams in {ranks}, {stages} stages"
                        );
                    }
                }
            }
            let usual = layer.workspace(&device, size_m, top_k)?;
            let time = batch.time(&device, &layer, usual)?;
            let hit = hit as f64 / ROUTINGS as f64;
            let limit = hit * layer.bytes_of_expert() as f64 / 4.49e6;
            println!(
                "{ty}, {experts} experts, top {top_k}, H {h}, I {size_i}, M {size_m}: {time:.1} us, \
                 {hit:.1} experts hit, limit {limit:.1}"
            );
        }
    }
    Ok(())
}
