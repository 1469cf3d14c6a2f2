//! How long products with Marlin weights take on this machine's GPU.
//!
//! ```text
//! gemm_times [--sweep] [--type TYPE] [--input int8|fp8] [K N [M ...]]
//! ```
//!
//! int4 codes in groups of 128 (`uint4b8`) or weights of another type; bf16, or 8-bit activations; by
//! default the shapes of `docs/cuda.md`. Each figure is the median of 7 replays of a graph that goes
//! through enough copies of the weight that none is in the L2 cache; `limit` is the time to read the weight's bytes at 4.49 TB/s. `--sweep` tries many
//! tilings; `--part I COUNT` with it only compiles every COUNT-th of them, from the I-th on, for other
//! processes to find in the cache of modules.

use std::process::ExitCode;

mod common;

use common::{AnyError, activations, types, weight};
use marlinspike::dims::Shape;
use marlinspike::gemm::schedule::Schedule;
use marlinspike::scalar::ScalarType;
use marlinspike::weight::Weight;
use marlinspike_accel::{
    AccelError, Buffer, Device,
    ops::gemm::{
        ManyRows, MarlinWeight, Tiling, marlin_gemm, marlin_gemm_many_rows, marlin_gemm_tiled,
    },
    ops::gemm_a8::{MarlinWeightA8, RowsA8, marlin_gemm_a8},
};

const SHAPES: [(usize, usize); 4] = [(4096, 4096), (4096, 28672), (14336, 4096), (8192, 57344)];
const ROWS: [usize; 9] = [1, 8, 16, 32, 64, 128, 256, 1024, 4096];
/// Bytes that all copies of a weight take together: four times an H200's L2 cache.
const BYTES: usize = 240 << 20;

/// A weight for activations of either width.
enum Packed {
    A16(Box<MarlinWeight>),
    A8(Box<MarlinWeightA8>),
}

impl Packed {
    fn new(
        device: &Device,
        weight: &Weight<'_>,
        input: Option<ScalarType>,
    ) -> Result<Self, AccelError> {
        let (weights, dtype) = (std::slice::from_ref(weight), ScalarType::BFLOAT16);
        match input {
            None => {
                MarlinWeight::new(device, weights, dtype).map(|weight| Self::A16(weight.into()))
            }
            Some(input) => MarlinWeightA8::new(device, weights, dtype, input)
                .map(|weight| Self::A8(weight.into())),
        }
    }

    fn copy(&self, device: &Device) -> Result<Self, AccelError> {
        match self {
            Self::A16(weight) => weight.copy(device).map(|weight| Self::A16(weight.into())),
            Self::A8(weight) => weight.copy(device).map(|weight| Self::A8(weight.into())),
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Self::A16(weight) => weight.bytes(),
            Self::A8(weight) => weight.bytes(),
        }
    }

    fn shape(&self) -> Shape {
        match self {
            Self::A16(weight) => weight.shape(),
            Self::A8(weight) => weight.shape(),
        }
    }
}

/// Rows of x in both widths.
struct Activations {
    halves: Buffer<u16>,
    codes: Buffer<u8>,
    scales: Buffer<f32>,
}

/// How a product is dealt out.
#[derive(Clone, Copy)]
enum Plan {
    Tiled(Tiling),
    Many(ManyRows),
}

/// Microseconds of one product: the median of 7 replays.
fn time(
    device: &Device,
    weights: &[Packed],
    size_m: usize,
    plan: Option<Plan>,
) -> Result<f32, AnyError> {
    let Shape { size_k, size_n } = weights[0].shape();
    let halves = activations(&mut 7, size_m * size_k);
    // Small numbers in int8 and in e4m3.
    let codes: Vec<u8> = halves.iter().map(|bits| (bits % 64) as u8).collect();
    let x = Activations {
        halves: device.upload(&halves)?,
        codes: device.upload(&codes)?,
        scales: device.upload(&vec![1.0; size_m])?,
    };
    let mut y = device.zeroed(size_m * size_n)?;
    let mut product = |weight: &Packed| match (weight, plan) {
        (Packed::A16(weight), None) => marlin_gemm(device, &x.halves, weight, &mut y),
        (Packed::A16(weight), Some(Plan::Tiled(tiling))) => {
            marlin_gemm_tiled(device, &x.halves, weight, &mut y, tiling)
        }
        (Packed::A16(weight), Some(Plan::Many(plan))) => {
            marlin_gemm_many_rows(device, &x.halves, weight, &mut y, plan)
        }
        (Packed::A8(weight), _) => {
            marlin_gemm_a8(device, RowsA8 { codes: &x.codes, scales: &x.scales }, weight, &mut y)
        }
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
    let mut ty = String::from("uint4b8");
    let mut input = None;
    let mut part = None;
    let mut numbers = Vec::new();
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--sweep" => sweep = true,
            "--type" => ty = arguments.next().unwrap_or_default(),
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
        [] => SHAPES.to_vec(),
        [k, n, ..] => vec![(k, n)],
        _ => {
            eprintln!(
                "usage: gemm_times [--sweep] [--type TYPE] [--input int8|fp8] [K N [M ...]]; types: {}",
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
        let first = Packed::new(&device, &one, input)?;
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
                    let _ = time(&device, &weights, size_m, Some(Plan::Tiled(tiling)));
                }
                continue;
            }
            let usual = time(&device, &weights, size_m, None)?;
            let of = input.map_or(ty.clone(), |input| format!("{ty}, {input} activations"));
            println!("{of}, {size_k} x {size_n}, M {size_m}: {usual:.2} us, limit {limit:.1}");
            if sweep && input.is_none() && size_m > 32 {
                let narrow = (48..=192).step_by(16).map(|rows| ManyRows { columns: 16, rows });
                let wide = [64, 80, 96].map(|rows| ManyRows { columns: 32, rows });
                for plan in narrow.chain(wide) {
                    // What the device does not take is left out.
                    if let Ok(us) = time(&device, &weights, size_m, Some(Plan::Many(plan))) {
                        let ManyRows { columns, rows } = plan;
                        println!(
                            "    {us:.2} us: many rows, {rows} by {columns} columns of a warp"
                        );
                    }
                }
            }
            if sweep && input.is_none() && size_m <= 256 {
                let mut all: Vec<(f32, Tiling)> = tilings(size_m, chunks)
                    .into_iter()
                    .filter_map(|t| {
                        Some((time(&device, &weights, size_m, Some(Plan::Tiled(t))).ok()?, t))
                    })
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
