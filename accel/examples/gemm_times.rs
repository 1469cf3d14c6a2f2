//! How long products with Marlin weights take on this machine's GPU.
//!
//! ```text
//! gemm_times [--sweep] [--type TYPE] [K N [M ...]]
//! ```
//!
//! bf16; int4 codes in groups of 128 (`uint4b8`) or weights of another type; by default the shapes of `docs/cuda.md`. Each figure is the
//! median of 7 replays of a graph that goes through enough copies of the weight that none is in
//! the L2 cache; `limit` is the time to read the weight's bytes at 4.49 TB/s. `--sweep` tries every
//! tiling.

use std::process::ExitCode;

mod common;

use common::{AnyError, activations, types, weight};
use marlinspike::dims::Shape;
use marlinspike::scalar::ScalarType;
use marlinspike_accel::{
    Device,
    ops::gemm::{MarlinWeight, Tiling, marlin_gemm, marlin_gemm_tiled},
};

const SHAPES: [(usize, usize); 4] = [(4096, 4096), (4096, 28672), (14336, 4096), (8192, 57344)];
const ROWS: [usize; 6] = [1, 8, 16, 32, 64, 256];
/// Bytes that all copies of a weight take together: four times an H200's L2 cache.
const BYTES: usize = 240 << 20;

/// Microseconds of one product: the median of 7 replays.
fn time(
    device: &Device,
    weights: &[MarlinWeight],
    size_m: usize,
    tiling: Option<Tiling>,
) -> Result<f32, AnyError> {
    let Shape { size_k, size_n } = weights[0].shape();
    let x = device.upload(&activations(&mut 7, size_m * size_k))?;
    let mut y = device.zeroed(size_m * size_n)?;
    let mut product = |weight: &MarlinWeight| match tiling {
        None => marlin_gemm(device, &x, weight, &mut y),
        Some(tiling) => marlin_gemm_tiled(device, &x, weight, &mut y, tiling),
    };
    // Modules are loaded before anything is recorded.
    product(&weights[0])?;
    let graph = device.record(|| weights.iter().try_for_each(&mut product))?;
    let mut times = Vec::new();
    for round in 0..9 {
        let time = device.microseconds(|| graph.replay())?;
        if round >= 2 {
            times.push(time);
        }
    }
    times.sort_by(f32::total_cmp);
    Ok(times[times.len() / 2] / weights.len() as f32)
}

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
    let mut sweep = false;
    let mut ty = String::from("uint4b8");
    let mut numbers = Vec::new();
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--sweep" => sweep = true,
            "--type" => ty = arguments.next().unwrap_or_default(),
            _ => numbers.push(argument.parse::<usize>()?),
        }
    }
    let shapes = match numbers[..] {
        [] => SHAPES.to_vec(),
        [k, n, ..] => vec![(k, n)],
        _ => {
            eprintln!(
                "usage: gemm_times [--sweep] [--type TYPE] [K N [M ...]]; types: {}",
                types()
            );
            return Ok(ExitCode::from(2));
        }
    };
    let rows = if numbers.len() > 2 { &numbers[2..] } else { &ROWS };
    let device = Device::open()?;
    println!("{}, {} multiprocessors", device.name(), device.multiprocessors());
    for (size_k, size_n) in shapes {
        let shape = Shape::new(size_k, size_n);
        let mut state = 1;
        let one = weight(&mut state, &ty, shape)?;
        let first = MarlinWeight::new(&device, std::slice::from_ref(&one), ScalarType::BFLOAT16)?;
        let limit = first.bytes() as f64 / 4.49e6;
        let copies = BYTES.div_ceil(first.bytes()).max(2);
        let mut weights = vec![first];
        while weights.len() < copies {
            weights.push(weights[0].copy(&device)?);
        }
        for &size_m in rows {
            let usual = time(&device, &weights, size_m, None)?;
            println!("{ty}, {size_k} x {size_n}, M {size_m}: {usual:.2} us, limit {limit:.1}");
            if sweep {
                let mut all: Vec<(f32, Tiling)> = tilings(size_m)
                    .into_iter()
                    .filter_map(|t| Some((time(&device, &weights, size_m, Some(t)).ok()?, t)))
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
