//! How long expert layers with Marlin weights take on this machine's GPU.
//!
//! ```text
//! moe_times [--type TYPE] [E TOP_K H I [M ...]]
//! ```
//!
//! bf16, SiLU; int4 codes in groups of 128 (`uint4b8`) or weights of another type; by default the layers
//! of `docs/cuda.md`. A figure is the median of 7 replays of a graph of 16 layers, each with a routing of
//! its own, so that few tokens do not find their experts in the L2 cache. `limit` is the time to read
//! the experts that a routing hits, once each, at the bandwidth measured first. `marlinspike bench gpu`
//! gives more.

use std::process::ExitCode;

use marlinspike_accel::{
    Device, limits,
    timing::REPLAYS,
    workload::{ExpertLayer, Sizes, WEIGHT_TYPES, WeightType},
};

type AnyError = Box<dyn std::error::Error>;

/// Experts, experts per token, hidden size, intermediate size.
const LAYERS: [[usize; 4]; 3] = [[8, 2, 4096, 14336], [128, 8, 2048, 768], [256, 8, 7168, 256]];
const TOKENS: [usize; 5] = [1, 4, 16, 64, 256];

fn main() -> Result<ExitCode, AnyError> {
    let (mut ty, mut numbers) = (Some(WEIGHT_TYPES[0]), Vec::new());
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--type" => ty = arguments.next().and_then(|name| WeightType::named(&name)),
            _ => numbers.push(argument.parse::<usize>()?),
        }
    }
    let layers = match numbers[..] {
        [] => Some(LAYERS.to_vec()),
        [experts, top_k, h, i, ..] => Some(vec![[experts, top_k, h, i]]),
        _ => None,
    };
    let (Some(ty), Some(layers)) = (ty, layers) else {
        let types = WEIGHT_TYPES.map(|ty| ty.name).join(", ");
        eprintln!("usage: moe_times [--type TYPE] [E TOP_K H I [M ...]]; types: {types}");
        return Ok(ExitCode::from(2));
    };
    let tokens = if numbers.len() > 4 { &numbers[4..] } else { &TOKENS };
    let device = Device::open()?;
    let read = limits::measure(&device)?.read;
    let (name, read_tb) = (device.name(), read / 1e12);
    println!("{name}, {} multiprocessors, reads {read_tb:.2} TB/s", device.multiprocessors());
    for [num_experts, top_k, hidden_size, intermediate_size] in layers {
        let sizes = Sizes { num_experts, top_k, hidden_size, intermediate_size };
        let layer = ExpertLayer::new(&device, ty, sizes)?;
        for &size_m in tokens {
            let (times, hit) = layer.time(&device, size_m, REPLAYS)?;
            let limit = hit * layer.bytes_of_expert() as f64 / read * 1e6;
            println!(
                "{}, {num_experts} experts, top {top_k}, H {hidden_size}, I {intermediate_size}, M \
                 {size_m}: {:.1} us, {hit:.1} experts hit, limit {limit:.1}",
                ty.name, times.median
            );
        }
    }
    Ok(ExitCode::SUCCESS)
}
