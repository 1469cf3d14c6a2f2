//! How long products with Marlin weights take on this machine's GPU.
//!
//! ```text
//! gemm_times [--sweep] [--type TYPE] [K N [M ...]]
//! ```
//!
//! bf16; int4 codes in groups of 128 (`uint4b8`) or weights of another type; by default the shapes of
//! `docs/cuda.md`. Each figure is the median of 7 replays of a graph that goes through enough copies
//! of the weight that none is in the L2 cache; `limit` is the time to read the weight's bytes at the
//! bandwidth measured first. `--sweep` tries every tiling. `marlinspike bench gpu` gives more, without
//! the tilings.

use std::process::ExitCode;

use marlinspike::dims::Shape;
use marlinspike_accel::{
    Device, limits,
    ops::gemm::Tiling,
    timing::REPLAYS,
    workload::{Dense, WEIGHT_TYPES, WeightType},
};

type AnyError = Box<dyn std::error::Error>;

const SHAPES: [(usize, usize); 4] = [(4096, 4096), (4096, 28672), (14336, 4096), (8192, 57344)];
const ROWS: [usize; 6] = [1, 8, 16, 32, 64, 256];

fn tilings(size_m: usize) -> Vec<Tiling> {
    let least = match size_m {
        0..=8 => 1,
        9..=16 => 2,
        17..=32 => 4,
        _ => 8,
    };
    let mut all = Vec::new();
    for m_tiles in if least == 8 { vec![8, 4] } else { vec![least] } {
        for (n_tile, columns) in [(64, 64), (64, 32), (128, 64)] {
            for teams in [4, 8] {
                for stages in [2, 3, 4, 6] {
                    let ranks = 8 / teams;
                    all.push(Tiling { m_tiles, n_tile, columns, teams, ranks, stages });
                }
            }
        }
    }
    all
}

fn main() -> Result<ExitCode, AnyError> {
    let (mut sweep, mut ty) = (false, Some(WEIGHT_TYPES[0]));
    let mut numbers = Vec::new();
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--sweep" => sweep = true,
            "--type" => ty = arguments.next().and_then(|name| WeightType::named(&name)),
            _ => numbers.push(argument.parse::<usize>()?),
        }
    }
    let shapes = match numbers[..] {
        [] => Some(SHAPES.to_vec()),
        [k, n, ..] => Some(vec![(k, n)]),
        _ => None,
    };
    let (Some(ty), Some(shapes)) = (ty, shapes) else {
        let types = WEIGHT_TYPES.map(|ty| ty.name).join(", ");
        eprintln!("usage: gemm_times [--sweep] [--type TYPE] [K N [M ...]]; types: {types}");
        return Ok(ExitCode::from(2));
    };
    let rows = if numbers.len() > 2 { &numbers[2..] } else { &ROWS };
    let device = Device::open()?;
    let read = limits::measure(&device)?.read;
    let (name, read_tb) = (device.name(), read / 1e12);
    println!("{name}, {} multiprocessors, reads {read_tb:.2} TB/s", device.multiprocessors());
    for (size_k, size_n) in shapes {
        let dense = Dense::new(&device, ty, Shape::new(size_k, size_n))?;
        let limit = dense.bytes() as f64 / read * 1e6;
        for &size_m in rows {
            let usual = dense.time(&device, size_m, None, REPLAYS)?.median;
            let ty = ty.name;
            println!("{ty}, {size_k} x {size_n}, M {size_m}: {usual:.2} us, limit {limit:.1}");
            if sweep {
                let time = |tiling| dense.time(&device, size_m, Some(tiling), REPLAYS);
                let mut all: Vec<(f32, Tiling)> = tilings(size_m)
                    .into_iter()
                    .filter_map(|tiling| Some((time(tiling).ok()?.median, tiling)))
                    .collect();
                all.sort_by(|a, b| a.0.total_cmp(&b.0));
                for (time, t) in all.iter().take(8) {
                    let Tiling { m_tiles, n_tile, columns, teams, stages, .. } = t;
                    println!(
                        "    {time:.2} us: {m_tiles} x 8 rows, {n_tile} columns by {columns}, \
                         {teams} teams, {stages} stages"
                    );
                }
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}
