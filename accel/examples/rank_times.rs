//! Times of the reduction over tensor-parallel ranks, each on a GPU of its own, next to NCCL's.
//!
//! ```text
//! rank_times [--peers FILE.json] [T ...]
//! ```
//!
//! T: numbers of ranks, by default 2 and 4 as far as there are GPUs. `add_ranks` adds the ranks' f32 sums `[M, N]`, which
//! are in shared memory, to bf16 on every rank, in one shot and in two. FILE has NCCL's all-reduce of bf16 `[M, N]` on
//! the same machine: `scripts/gpu_peers --out FILE.json --ranks 2,4`.
//!
//! A figure is the median of 7 replays of a recorded graph of many calls, on the rank that starts last.

use std::{collections::BTreeMap, process::ExitCode};

use marlinspike::num::dims::Shape;
use marlinspike::num::scalar::ScalarType;
use marlinspike::products::schedule::Split;
use marlinspike::vectors::Rng;
use marlinspike_accel::{
    AccelError, Device,
    memory::Buffer,
    ops::{MarlinWeight, Rank},
    timing::{Graph, REPLAYS, time_together},
    workload::WeightType,
};

type AnyError = Box<dyn std::error::Error>;

const COLUMNS: [usize; 2] = [4096, 7168];
const ROWS: [usize; 6] = [1, 16, 64, 256, 1024, 4096];

/// Microseconds of NCCL by ranks, N and M.
type Peers = BTreeMap<[usize; 3], f64>;

fn read_peers(path: &str) -> Result<Peers, AnyError> {
    let file: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(path)?)?;
    let results = file["results"].as_array().ok_or("no results")?;
    let mut peers = Peers::new();
    for result in results.iter().filter(|result| result["peer"] == "nccl-all-reduce-bf16") {
        let shape = result["shape"].as_str().ok_or("a result without a shape")?;
        let (ranks, size_n) = shape.split_once('x').ok_or("a shape that is not TxN")?;
        let size_m = result["tokens"].as_u64().ok_or("a result without tokens")? as usize;
        let us = result["us"].as_f64().ok_or("a result without a time")?;
        peers.insert([ranks.parse()?, size_n.parse()?, size_m], us);
    }
    Ok(peers)
}

/// The ranks and what they need for products of N columns.
struct Group {
    devices: Vec<Device>,
    parts: Vec<MarlinWeight>,
    ranks: Vec<Rank>,
    y: Vec<Buffer<u16>>,
}

impl Group {
    fn new(count: usize, size_n: usize) -> Result<Self, AnyError> {
        let devices = (0..count).map(Device::open_ordinal).collect::<Result<Vec<_>, _>>()?;
        // The addition takes only the columns of a weight, its global scale and its bias: none here.
        let ty = WeightType::named("uint4b8").ok_or("no uint4b8")?;
        let weight = ty.weight(&mut Rng::new(3), Shape::new(2048, size_n))?;
        let part = |(rank, device): (usize, &Device)| -> Result<MarlinWeight, AnyError> {
            let part = Split::new(2048, rank, count)?.part_of(&weight)?;
            Ok(MarlinWeight::of_part(device, &part, ScalarType::BFLOAT16)?)
        };
        let parts = devices.iter().enumerate().map(part).collect::<Result<_, _>>()?;
        let all: Vec<&Device> = devices.iter().collect();
        let ranks = Rank::of_process(&all, ROWS[ROWS.len() - 1] * size_n)?;
        Ok(Self { devices, parts, ranks, y: Vec::new() })
    }

    /// Microseconds of a call, by the number of shots that the crate takes or by another.
    fn time(&mut self, size: [usize; 2], two_shot: Option<bool>) -> Result<f64, AnyError> {
        let elements = size[0] * size[1];
        // An even number, and at least a millisecond of them.
        let calls = if elements > 2_000_000 { 20 } else { 100 };
        let zeroed = |device: &Device| device.zeroed(elements);
        self.y = self.devices.iter().map(zeroed).collect::<Result<_, AccelError>>()?;
        if let Some(two_shot) = two_shot {
            let ranks = std::mem::take(&mut self.ranks).into_iter();
            self.ranks = ranks.map(|rank| rank.with_two_shot(two_shot)).collect();
        }
        let mut graphs: Vec<Graph<'_>> = Vec::new();
        let parts = self.ranks.iter_mut().zip(&self.devices).zip(&self.parts).zip(&mut self.y);
        for (((rank, device), part), y) in parts {
            graphs.push(device.record(move || {
                (0..calls).try_for_each(|_| {
                    rank.start_sums(device, size)?;
                    rank.add(device, part, y)
                })
            })?);
        }
        let devices: Vec<&Device> = self.devices.iter().collect();
        let times = time_together(&devices, &graphs, REPLAYS)?.each(calls);
        drop(graphs);
        for (rank, device) in self.ranks.iter().zip(&self.devices) {
            rank.check(device)?;
        }
        Ok(times.median.into())
    }
}

fn run() -> Result<(), AnyError> {
    let (mut peers, mut counts) = (Peers::new(), Vec::new());
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--peers" => peers = read_peers(&arguments.next().ok_or("--peers takes a file")?)?,
            number => counts.push(number.parse::<usize>()?),
        }
    }
    let gpus = Device::count()?;
    if counts.is_empty() {
        counts.extend([2, 4].into_iter().filter(|&count| count <= gpus));
    }
    if counts.is_empty() || counts.iter().any(|&count| count > gpus) {
        return Err(format!(
            "{gpus} GPUs: each rank needs one of its own, and there are at least 2"
        )
        .into());
    }
    println!("{gpus} GPUs: {}; microseconds of a call", Device::open()?.name());
    println!("ranks    N     M     taken one shot  two shots     NCCL  ratio");
    for count in counts {
        for size_n in COLUMNS {
            let mut group = Group::new(count, size_n)?;
            let taken = ROWS.map(|size_m| group.time([size_m, size_n], None));
            for (size_m, taken) in ROWS.into_iter().zip(taken) {
                let taken = taken?;
                let one = group.time([size_m, size_n], Some(false))?;
                let two = group.time([size_m, size_n], Some(true))?;
                let nccl = peers.get(&[count, size_n, size_m]);
                let text = nccl.map(|nccl| format!("{nccl:8.2}  {:5.2}", taken / nccl));
                let text = text.unwrap_or_default();
                println!(
                    "{count:5} {size_n:4} {size_m:5}  {taken:8.2} {one:8.2}  {two:9.2} {text}"
                );
            }
        }
    }
    Ok(())
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("rank_times: {error}");
            ExitCode::from(2)
        }
    }
}
