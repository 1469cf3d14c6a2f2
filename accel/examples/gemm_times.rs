//! How long products with Marlin weights take on this machine's GPU.
//!
//! ```text
//! gemm_times [--sweep] [K N [M ...]]
//! ```
//!
//! int4 codes in groups of 128, bf16; by default the shapes of `docs/cuda.md`. Each figure is the
//! median of 7 replays of a graph that goes through enough copies of the weight that none is in
//! the L2 cache; `limit` is the time to read the weight's bytes at 4.49 TB/s. `--sweep` tries many
//! tilings; `--part I COUNT` with it only compiles every COUNT-th of them, from the I-th on, for other
//! processes to find in the cache of modules.

use std::process::ExitCode;

use marlinspike::dims::{GroupSize, Shape};
use marlinspike::gemm::schedule::Schedule;
use marlinspike::scalar::ScalarType;
use marlinspike::weight::{Codes, Groups, Table, TableData, Weight};
use marlinspike_accel::{
    Device,
    ops::gemm::{MarlinWeight, Tiling, marlin_gemm, marlin_gemm_tiled},
};

type AnyError = Box<dyn std::error::Error>;

const SHAPES: [(usize, usize); 4] = [(4096, 4096), (4096, 28672), (14336, 4096), (8192, 57344)];
const ROWS: [usize; 6] = [1, 8, 16, 32, 64, 256];
/// Bytes that all copies of a weight take together: four times an H200's L2 cache.
const BYTES: usize = 240 << 20;

/// xorshift64*.
fn next(state: &mut u64) -> u32 {
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    (state.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 32) as u32
}

fn weight(state: &mut u64, shape: Shape) -> Result<Weight<'static>, AnyError> {
    let dtype = ScalarType::BFLOAT16;
    let words: Vec<u32> = (0..shape.len() / 8).map(|_| next(state)).collect();
    let groups = shape.size_k / 128;
    // From 2^-7 to 2^-6.
    let scales = (0..groups * shape.size_n).map(|_| 0x3c00 | (next(state) % 128) as u16).collect();
    Ok(Weight {
        name: "weight".into(),
        ty: ScalarType::UINT4B8,
        codes: Codes::from_words(4, shape, words)?,
        scales: Table::new(dtype, groups, shape.size_n, TableData::B16(scales))?,
        zeros: None,
        groups: Groups::Uniform(GroupSize::Of(128)),
        global_scale: None,
        bias: None,
    })
}

/// Microseconds of one product: the median of 7 replays.
fn time(
    device: &Device,
    weights: &[MarlinWeight],
    size_m: usize,
    tiling: Option<Tiling>,
) -> Result<f32, AnyError> {
    let Shape { size_k, size_n } = weights[0].shape();
    let mut state = 7;
    // Normal bf16 numbers of magnitude 1/4 to 4, both signs.
    let bits = |state: &mut u64| {
        let r = next(state);
        ((0x3e80 + r % 0x200) | (r >> 16 & 0x8000)) as u16
    };
    let x: Vec<u16> = (0..size_m * size_k).map(|_| bits(&mut state)).collect();
    let x = device.upload(&x)?;
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

fn tilings(size_m: usize, chunks: u32) -> Vec<Tiling> {
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

fn main() -> Result<ExitCode, AnyError> {
    let mut sweep = false;
    let mut part = None;
    let mut numbers = Vec::new();
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--sweep" => sweep = true,
            "--part" => {
                let mut number = || arguments.next().unwrap_or_default().parse::<usize>();
                part = Some((number()?, number()?));
            }
            _ => numbers.push(argument.parse::<usize>()?),
        }
    }
    let shapes = match numbers[..] {
        [] => SHAPES.to_vec(),
        [k, n, ..] => vec![(k, n)],
        _ => {
            eprintln!("usage: gemm_times [--sweep] [K N [M ...]]");
            return Ok(ExitCode::from(2));
        }
    };
    let rows = if numbers.len() > 2 { &numbers[2..] } else { &ROWS };
    let device = Device::open()?;
    println!("{}, {} multiprocessors", device.name(), device.multiprocessors());
    for (size_k, size_n) in shapes {
        let shape = Shape::new(size_k, size_n);
        let mut state = 1;
        let one = weight(&mut state, shape)?;
        let first = MarlinWeight::new(&device, std::slice::from_ref(&one), ScalarType::BFLOAT16)?;
        let limit = first.bytes() as f64 / 4.49e6;
        let chunks = size_k.div_ceil(Schedule::canonical_chunk(size_k)) as u32;
        let copies = if part.is_some() { 1 } else { BYTES.div_ceil(first.bytes()).max(2) };
        let mut weights = vec![first];
        while weights.len() < copies {
            weights.push(weights[0].copy(&device)?);
        }
        for &size_m in rows {
            if let Some((first, count)) = part {
                for tiling in tilings(size_m, chunks).into_iter().skip(first).step_by(count) {
                    // What the device does not take is left out of the sweep, too.
                    let _ = time(&device, &weights, size_m, Some(tiling));
                }
                continue;
            }
            let usual = time(&device, &weights, size_m, None)?;
            println!("{size_k} x {size_n}, M {size_m}: {usual:.2} us, limit {limit:.1}");
            if sweep {
                let mut all: Vec<(f32, Tiling)> = tilings(size_m, chunks)
                    .into_iter()
                    .filter_map(|t| Some((time(&device, &weights, size_m, Some(t)).ok()?, t)))
                    .collect();
                all.sort_by(|a, b| a.0.total_cmp(&b.0));
                for (time, t) in all.iter().take(8) {
                    let Tiling { m_tiles, n_tile, columns, teams, ranks, stages } = t;
                    println!(
                        "    {time:.2} us: {m_tiles} x 8 rows, {n_tile} columns by {columns}, \
                         {teams} teams in {ranks}, {stages} stages"
                    );
                }
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}
