//! How long expert layers with Marlin weights take on this machine's GPU.
//!
//! ```text
//! moe_times [--sweep [--many] | --fp8 [--sweep | --plan ...]] [--type TYPE] [E TOP_K H I [M ...]]
//! moe_times --w8a8 channels|promoted|blocks [--sweep | --plan ROWS,TILE_N,WARPS,TILE_N,WARPS] [E TOP_K H I [M ...]]
//! ```
//!
//! int4 codes in groups of 128 (`uint4b8`) or weights of another type; bf16, SiLU; by default the layers
//! of `marlinspike bench gpu`. A figure is the median of 7 replays of a graph of 16 layers, each with a routing of
//! its own, so that few tokens do not find their experts in the L2 cache. `limit` is the time to read
//! the experts that a routing hits, once each, at the bandwidth measured first. `--sweep` tries many
//! tilings, of the first product, then of the second, and plans of many rows; `--part I COUNT` with it only compiles every
//! COUNT-th of them, from the I-th on, for other processes to find in the cache of modules.
//! `--fp8`: activations quantized to e4m3fn, on Hopper. `--w8a8`: weights and activations of e4m3fn. `bench gpu` gives
//! more, without the tilings.

use std::process::ExitCode;

use marlinspike::products::schedule::Cut;
use marlinspike_accel::{
    AccelError, Device, limits,
    ops::fp8_gemm::{Fp8Plan, Fp8Scales, Fp8Sums},
    ops::gemm::{ManyRows, Tiling},
    ops::gemm_w4a8::W4a8Plan,
    timing::REPLAYS,
    workload::{ExpertLayer, LayerPlans, Sizes, WEIGHT_TYPES, WeightType},
};
use marlinspike_bench::workload::GPU_LAYERS;

type AnyError = Box<dyn std::error::Error>;

const TOKENS: [usize; 7] = [1, 4, 16, 64, 256, 1024, 4096];

/// Tilings of `m_tiles` eights of rows for K = `size_k`; `paired`: of gate and up halves.
fn tilings(m_tiles: u32, size_k: usize, paired: bool) -> Vec<Tiling> {
    let chunks = Cut::version_1(size_k).chunks() as u32;
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

/// Tilings to try of both products of a layer.
fn of_layer(sizes: Sizes, size_m: usize) -> [Vec<Tiling>; 2] {
    let entries = size_m * sizes.top_k;
    let m_tiles = match entries.div_ceil(sizes.num_experts.min(entries)) {
        0..=8 => 1,
        9..=16 => 2,
        _ => 4,
    };
    [tilings(m_tiles, sizes.hidden_size, true), tilings(m_tiles, sizes.intermediate_size, false)]
}

/// The fastest tilings first; those that the device or the layer does not take are left out.
fn sorted(
    all: Vec<[Tiling; 2]>,
    time: impl Fn([Tiling; 2]) -> Result<f32, AccelError>,
) -> Vec<(f32, [Tiling; 2])> {
    let mut all: Vec<_> =
        all.into_iter().filter_map(|tilings| Some((time(tilings).ok()?, tilings))).collect();
    all.sort_by(|a, b| a.0.total_cmp(&b.0));
    all
}

/// The fastest tilings of the first product, then of the second with the best of the first.
fn sweep(
    [firsts, seconds]: &[Vec<Tiling>; 2],
    time: impl Fn([Tiling; 2]) -> Result<f32, AccelError>,
) -> Result<(), AnyError> {
    let some = seconds[0];
    let by_first = sorted(firsts.iter().map(|&t| [t, some]).collect(), &time);
    let best = by_first.first().ok_or("no tiling")?.1[0];
    let by_second = sorted(seconds.iter().map(|&t| [best, t]).collect(), &time);
    for (which, all) in [by_first, by_second].iter().enumerate() {
        for (time, tilings) in all.iter().take(6) {
            let Tiling { n_tile, columns, teams, ranks, stages, .. } = tilings[which];
            println!(
                "    {time:.1} us: product {which}, {n_tile} columns by {columns}, {teams} teams in \
                 {ranks}, {stages} stages"
            );
        }
    }
    Ok(())
}

/// Plans of many rows, by the average rows of an expert; both products have blocks of equal size.
fn many(rows: usize) -> Vec<[ManyRows; 2]> {
    let near =
        |plan: &ManyRows| (rows.min(192) / 2..=2 * rows + 16).contains(&(plan.rows as usize));
    let pairs = ManyRows::all()
        .filter(near)
        .flat_map(|first| ManyRows::all().map(move |second| [first, second]));
    pairs.filter(|[first, second]| first.rows == second.rows).collect()
}

/// The fastest plans of many rows.
fn sweep_many(rows: usize, time: impl Fn(LayerPlans) -> Result<f32, AccelError>) {
    // What the device does not take is left out.
    let timed = many(rows)
        .into_iter()
        .filter_map(|plans| Some((time(LayerPlans::Many(plans)).ok()?, plans)));
    let mut all: Vec<_> = timed.collect();
    all.sort_by(|a, b| a.0.total_cmp(&b.0));
    for (us, [first, second]) in all.iter().take(12) {
        println!("    {us:.1} us: {first}; then {second}");
    }
}

/// Plans of one product of e4m3fn weights and activations, from the narrowest tiles on.
fn fp8_plans() -> impl Iterator<Item = Fp8Plan> {
    Fp8Plan::all().flat_map(|plan| {
        let widths = match (plan.rows, plan.warps) {
            (128, _) => vec![plan.tile_n],
            (_, 4) => vec![64],
            (_, 8) => vec![96, 128],
            _ => vec![192, 256],
        };
        widths.into_iter().map(move |tile_n| Fp8Plan { tile_n, ..plan })
    })
}

/// Plans of one product of 4-bit weights and e4m3fn activations in blocks of that size; the kernel does not have all of them
/// for every type.
fn w4a8_plans(rows: u32) -> Vec<W4a8Plan> {
    const SHAPES: [(u32, u32, u32); 9] = [
        (32, 16, 8),
        (32, 16, 4),
        (64, 16, 4),
        (64, 8, 1),
        (96, 8, 1),
        (96, 16, 1),
        (128, 8, 1),
        (192, 16, 1),
        (256, 16, 1),
    ];
    SHAPES.map(|(tile_n, warps, splits)| W4a8Plan { rows, tile_n, warps, splits }).into()
}

/// Rows of blocks to try.
const BLOCKS: [u32; 7] = [8, 16, 32, 48, 64, 128, 256];

/// The fastest plans of the first product, then of the second with the best of the first, for each number of rows of a
/// block near the average of an expert. What the kernel does not have is left out.
fn sweep_blocks<P: Copy>(
    rows: usize,
    plans: impl Fn(u32) -> Vec<P>,
    time: impl Fn([P; 2]) -> Result<f32, AccelError>,
    shape: impl Fn(P) -> String,
) {
    for block in BLOCKS {
        let all = plans(block);
        if all.is_empty() || !(rows / 2..=(4 * rows).max(16)).contains(&(block as usize)) {
            continue;
        }
        let fastest = |pairs: &mut dyn Iterator<Item = [P; 2]>| {
            let timed = pairs.filter_map(|plans| Some((time(plans).ok()?, plans)));
            let mut timed: Vec<_> = timed.collect();
            timed.sort_by(|a, b| a.0.total_cmp(&b.0));
            for (us, plans) in timed.iter().take(4) {
                let [first, second] = plans.map(&shape);
                println!("    {us:.1} us: blocks of {block}, {first}; {second}");
            }
            timed.first().map(|(_, plans)| *plans)
        };
        let some = all[all.len() / 2];
        if let Some([first, _]) = fastest(&mut all.iter().map(|&plan| [plan, some])) {
            fastest(&mut all.iter().map(|&plan| [first, plan]));
        }
    }
}

fn sweep_fp8(rows: usize, time: impl Fn([Fp8Plan; 2]) -> Result<f32, AccelError>) {
    let shape = |plan: Fp8Plan| format!("{} columns by {} warps", plan.tile_n, plan.warps);
    sweep_blocks(rows, |block| fp8_plans().filter(|p| p.rows == block).collect(), time, shape);
}

fn sweep_w4a8(rows: usize, time: impl Fn([W4a8Plan; 2]) -> Result<f32, AccelError>) {
    let shape = |W4a8Plan { tile_n, warps, splits, .. }: W4a8Plan| {
        format!("{tile_n} columns by {warps} warps, shared by {splits}")
    };
    sweep_blocks(rows, w4a8_plans, time, shape);
}

fn main() -> Result<ExitCode, AnyError> {
    let (mut only_many, mut is_fp8) = (false, false);
    let (mut w8a8, mut shapes) = (None, None);
    let (mut is_sweep, mut part, mut ty) = (false, None, Some(WEIGHT_TYPES[0]));
    let mut numbers = Vec::new();
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--sweep" => is_sweep = true,
            "--many" => only_many = true,
            "--fp8" => is_fp8 = true,
            "--w8a8" => {
                w8a8 = Some(match arguments.next().as_deref() {
                    Some("channels") => (Fp8Scales::Channels, Fp8Sums::Unpromoted),
                    Some("promoted") => (Fp8Scales::Channels, Fp8Sums::Promoted),
                    Some("blocks") => (Fp8Scales::Blocks, Fp8Sums::Promoted),
                    found => Err(format!(
                        "--w8a8: found {found:?}, expected channels, promoted or blocks"
                    ))?,
                });
            }
            "--plan" => {
                let numbers = arguments.next().unwrap_or_default();
                let numbers: Vec<u32> =
                    numbers.split(',').map(str::parse).collect::<Result<_, _>>()?;
                let [rows, n_1, warps_1, n_2, warps_2] = numbers[..] else {
                    return Err("--plan: expected ROWS,TILE_N,WARPS,TILE_N,WARPS".into());
                };
                let shape = |tile_n, warps| Fp8Plan { rows, tile_n, warps };
                shapes = Some([shape(n_1, warps_1), shape(n_2, warps_2)]);
            }
            "--type" => ty = arguments.next().and_then(|name| WeightType::named(&name)),
            "--part" => {
                let mut number = || arguments.next().unwrap_or_default().parse::<usize>();
                part = Some((number()?, number()?));
            }
            _ => numbers.push(argument.parse::<usize>()?),
        }
    }
    let plan = shapes.map(|shapes: [Fp8Plan; 2]| match is_fp8 {
        true => LayerPlans::W4a8(shapes.map(|Fp8Plan { rows, tile_n, warps }| W4a8Plan {
            rows,
            tile_n,
            warps,
            splits: 1,
        })),
        false => LayerPlans::Fp8(shapes),
    });
    let layers = match numbers[..] {
        [] => Some(GPU_LAYERS.to_vec()),
        [experts, top_k, h, i, ..] => Some(vec![[experts, top_k, h, i]]),
        _ => None,
    };
    let (Some(ty), Some(layers)) = (ty, layers) else {
        let types = WEIGHT_TYPES.map(|ty| ty.name).join(", ");
        eprintln!(
            "usage: moe_times [--sweep [--many] | --fp8 [--sweep] | --w8a8 channels|promoted|blocks [--sweep]] [--plan ...] \
             [--type TYPE] [E TOP_K H I [M ...]]; types: {types}"
        );
        return Ok(ExitCode::from(2));
    };
    let tokens = if numbers.len() > 4 { &numbers[4..] } else { &TOKENS };
    let device = Device::open()?;
    let read =
        if part.is_some() { 1.0 } else { limits::measure(&device, limits::Operands::Bf16)?.read };
    let (name, read_tb) = (device.name(), read / 1e12);
    println!("{name}, {} multiprocessors, reads {read_tb:.2} TB/s", device.multiprocessors());
    for [num_experts, top_k, hidden_size, intermediate_size] in layers {
        let sizes = Sizes { num_experts, top_k, hidden_size, intermediate_size };
        let layer = match (w8a8, is_fp8) {
            (Some(kind), _) => ExpertLayer::fp8(&device, kind, sizes)?,
            (None, true) => ExpertLayer::w4a8(&device, ty, sizes)?,
            (None, false) => ExpertLayer::new(&device, ty, sizes)?,
        };
        for &size_m in tokens {
            let planned = |plans| Ok(layer.time(&device, size_m, Some(plans), REPLAYS)?.0.median);
            let time = |tilings| planned(LayerPlans::Tiled(tilings));
            if let (Some(_), Some((first, count))) = (w8a8, part) {
                for plan in fp8_plans().skip(first).step_by(count) {
                    let _: Result<f32, AccelError> = planned(LayerPlans::Fp8([plan; 2]));
                }
                continue;
            }
            let rows = size_m * top_k / num_experts.min(size_m * top_k);
            if w8a8.is_some() && is_sweep {
                sweep_fp8(rows, |plans| planned(LayerPlans::Fp8(plans)));
            }
            if is_fp8 && is_sweep {
                sweep_w4a8(rows, |plans| planned(LayerPlans::W4a8(plans)));
            }
            let both = of_layer(sizes, size_m);
            if let (Some((first, count)), true) = (part, only_many) {
                for plan in ManyRows::all().skip(first).step_by(count) {
                    let _: Result<f32, AccelError> = planned(LayerPlans::Many([plan; 2]));
                }
                continue;
            }
            if let Some((first, count)) = part {
                let [firsts, seconds] = &both;
                let firsts_alone = firsts.iter().map(|&t| [t, seconds[0]]);
                let all: Vec<_> =
                    firsts_alone.chain(seconds.iter().map(|&t| [firsts[0], t])).collect();
                for &tilings in all.iter().skip(first).step_by(count) {
                    // What the device or the layer does not take is left out of the sweep, too.
                    let _: Result<f32, AccelError> = time(tilings);
                }
                continue;
            }
            if is_sweep && w8a8.is_none() && !is_fp8 {
                if !only_many {
                    sweep(&both, time)?;
                }
                // With fewer rows of an expert they are slower.
                if only_many || size_m * top_k / num_experts >= 16 {
                    sweep_many(rows, planned);
                }
            }
            let (times, hit) = layer.time(&device, size_m, plan, REPLAYS)?;
            let limit = hit * layer.bytes_of_expert() as f64 / read * 1e6;
            println!(
                "{}{num_experts} experts, top {top_k}, H {hidden_size}, I {intermediate_size}, M \
                 {size_m}: {:.1} us, {hit:.1} experts hit, limit {limit:.1}",
                w8a8.map_or(format!("{}, ", ty.name), |kind| format!("{kind:?}, ")),
                times.median
            );
        }
    }
    Ok(ExitCode::SUCCESS)
}
