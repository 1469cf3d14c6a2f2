//! How long products with Marlin weights take on this machine's GPU.
//!
//! ```text
//! gemm_times [--sweep [--many] [--all]] [--tree] [--type TYPE] [--input int8|fp8] [K N [M ...]]
//! ```
//!
//! int4 codes in groups of 128 (`uint4b8`) or weights of another type; bf16, or 8-bit activations; by
//! default the products of `marlinspike bench gpu`. Each figure is the median of 7 replays of a graph that goes
//! through enough copies of the weight that none is in the L2 cache; `limit` is the time to read the
//! weight's bytes at the bandwidth measured first. `--sweep` tries many plans; `--part I COUNT` with it
//! only compiles every COUNT-th of them, from the I-th on, for other processes to find in the cache of
//! modules; `--tree` times version 2 of the canonical schedule next to version 1; `--many` leaves all but the
//! plans of many rows out, and `--all` prints all plans, not the fastest ones. `bench gpu` gives more, without the sweep.

use std::process::ExitCode;

use marlinspike::num::dims::Shape;
use marlinspike::num::scalar::ScalarType;
use marlinspike::products::schedule::Cut;
use marlinspike_accel::{
    AccelError, Device, limits,
    ops::gemm::{ManyRows, Tiling},
    timing::REPLAYS,
    workload::{COLD_BYTES, Dense, ProductPlan, WEIGHT_TYPES, WeightType},
};
use marlinspike_bench::{Workload, workload::GPU_PRODUCTS};

type AnyError = Box<dyn std::error::Error>;

const ROWS: [usize; 9] = [1, 8, 16, 32, 64, 128, 256, 1024, 4096];

fn tilings(size_m: usize, size_k: usize) -> Vec<Tiling> {
    let chunks = Cut::version_1(size_k).chunks() as u32;
    let m_tiles = match size_m {
        0..=8 => vec![1],
        9..=16 => vec![2, 1],
        17..=32 => vec![4, 2],
        _ => vec![8, 4],
    };
    let mut all = Vec::new();
    for m_tiles in m_tiles {
        for (n_tile, columns) in [(64, 64), (64, 32), (128, 64), (128, 32), (256, 64)] {
            for teams in [1, 2, 4, 8] {
                let ranks = chunks.div_ceil(teams).next_power_of_two();
                for stages in [2, 3, 4, 6, 8] {
                    all.push(Tiling { m_tiles, n_tile, columns, teams, ranks, stages });
                }
            }
        }
    }
    all
}

/// Plans to try for `size_m` rows.
fn plans(size_m: usize, size_k: usize, only_many: bool) -> Vec<ProductPlan> {
    let tiled =
        (size_m <= 256 && !only_many).then(|| tilings(size_m, size_k)).into_iter().flatten();
    // Rows that fill the last block by half at least, or one block.
    let fits = |plan: &ManyRows| {
        let rows = plan.rows as usize;
        rows <= size_m.next_multiple_of(16) && 2 * (size_m.next_multiple_of(rows) - size_m) <= rows
    };
    tiled
        .map(ProductPlan::Tiled)
        .chain(ManyRows::all().filter(fits).map(ProductPlan::Many))
        .collect()
}

/// The `shown` fastest plans; those that the device does not take are skipped.
fn sweep(device: &Device, dense: &Dense, size_m: usize, plans: Vec<ProductPlan>, shown: usize) {
    let time = |plan| dense.time(device, size_m, Some(plan), REPLAYS);
    let mut all: Vec<(f32, ProductPlan)> =
        plans.into_iter().filter_map(|plan| Some((time(plan).ok()?.median, plan))).collect();
    all.sort_by(|a, b| a.0.total_cmp(&b.0));
    for (time, plan) in all.iter().take(shown) {
        match plan {
            ProductPlan::Tiled(Tiling { m_tiles, n_tile, columns, teams, ranks, stages }) => {
                println!(
                    "    {time:.2} us: {m_tiles} x 8 rows, {n_tile} columns by {columns}, {teams} teams \
                 in {ranks}, {stages} stages"
                )
            }
            ProductPlan::Many(plan) => println!("    {time:.2} us: many rows, {plan}"),
        }
    }
}

fn main() -> Result<ExitCode, AnyError> {
    let (mut only_many, mut has_tree, mut shown) = (false, false, 12);
    let (mut is_sweep, mut ty, mut input, mut part) = (false, Some(WEIGHT_TYPES[0]), None, None);
    let mut numbers = Vec::new();
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--sweep" => is_sweep = true,
            "--many" => only_many = true,
            "--all" => shown = usize::MAX,
            "--tree" => has_tree = true,
            "--type" => ty = arguments.next().and_then(|name| WeightType::named(&name)),
            "--input" => {
                input = match arguments.next().as_deref() {
                    Some("int8") => Some(ScalarType::INT8),
                    Some("fp8") => Some(ScalarType::FLOAT8_E4M3FN),
                    other => return Err(format!("--input {other:?}: int8 or fp8").into()),
                }
            }
            "--part" => {
                let mut number = || arguments.next().unwrap_or_default().parse::<usize>();
                part = Some((number()?, number()?));
            }
            _ => numbers.push(argument.parse::<usize>()?),
        }
    }
    let shapes = match numbers[..] {
        [] => Some(GPU_PRODUCTS.map(Workload::sizes).to_vec()),
        [k, n, ..] => Some(vec![[k, n]]),
        _ => None,
    };
    let (Some(ty), Some(shapes)) = (ty, shapes) else {
        let types = WEIGHT_TYPES.map(|ty| ty.name).join(", ");
        eprintln!(
            "usage: gemm_times [--sweep [--many] [--all]] [--tree] [--type TYPE] [--input int8|fp8] [K N [M ...]]; types: {types}"
        );
        return Ok(ExitCode::from(2));
    };
    let rows = if numbers.len() > 2 { &numbers[2..] } else { &ROWS };
    let device = Device::open()?;
    if let Some((first, count)) = part {
        for [size_k, size_n] in shapes {
            let dense = Dense::new(&device, ty, Shape::new(size_k, size_n), input, 0)?;
            for &size_m in rows {
                for plan in plans(size_m, size_k, only_many).into_iter().skip(first).step_by(count)
                {
                    // What the device does not take is left out of the sweep, too.
                    let _ = dense.time(&device, size_m, Some(plan), 1);
                }
            }
        }
        return Ok(ExitCode::SUCCESS);
    }
    let read = limits::measure(&device, limits::Operands::Bf16)?.read;
    let (name, read_tb) = (device.name(), read / 1e12);
    println!("{name}, {} multiprocessors, reads {read_tb:.2} TB/s", device.multiprocessors());
    let of = input.map_or(ty.name.to_owned(), |input| format!("{}, {input} activations", ty.name));
    for [size_k, size_n] in shapes {
        let dense = Dense::new(&device, ty, Shape::new(size_k, size_n), input, COLD_BYTES)?;
        let limit = dense.bytes() as f64 / read * 1e6;
        let again = || Dense::new(&device, ty, Shape::new(size_k, size_n), input, COLD_BYTES);
        let tree = has_tree.then(|| again()?.by_version_2()).transpose()?;
        for &size_m in rows {
            let usual = dense.time(&device, size_m, None, REPLAYS)?.median;
            if let Some(tree) = &tree {
                // In turns, since the device's clocks change.
                let pair = || -> Result<_, AccelError> {
                    let of = |dense: &Dense| dense.time(&device, size_m, None, REPLAYS);
                    Ok((of(&dense)?.median, of(tree)?.median))
                };
                let mut ratios = (0..5).map(|_| pair().map(|(chain, tree)| tree / chain));
                let mut ratios = ratios.by_ref().collect::<Result<Vec<f32>, _>>()?;
                ratios.sort_by(f32::total_cmp);
                println!("  by the tree: {:.3} of the time by the chain", ratios[2]);
            }
            println!("{of}, {size_k} x {size_n}, M {size_m}: {usual:.2} us, limit {limit:.1}");
            if is_sweep && input.is_none() {
                sweep(&device, &dense, size_m, plans(size_m, size_k, only_many), shown);
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}
