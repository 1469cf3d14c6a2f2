//! How long expert layers with Marlin weights take on this machine's GPU.
//!
//! ```text
//! moe_times [--type TYPE] [E TOP_K H I [M ...]]
//! ```
//!
//! bf16, SiLU; int4 codes in groups of 128 (`uint4b8`) or weights of another type; by default the layers of `docs/cuda.md`. A figure is the
//! median of 7 replays of a graph of 16 layers, each with a routing of its own, so that few tokens
//! do not find their experts in the L2 cache. `limit` is the time to read the experts that a
//! routing hits, once each, at 4.49 TB/s.

mod common;

use std::collections::BTreeSet;

use common::{AnyError, activations, next, types, weight};
use marlinspike::case::Activation;
use marlinspike::dims::Shape;
use marlinspike::moe::activation::Definition;
use marlinspike::moe::layer::Layer;
use marlinspike::scalar::ScalarType;
use marlinspike_accel::{Buffer, Device, ops::MarlinLayer};

/// Experts, experts per token, hidden size, intermediate size.
const LAYERS: [[usize; 4]; 3] = [[8, 2, 4096, 14336], [128, 8, 2048, 768], [256, 8, 7168, 256]];
const TOKENS: [usize; 5] = [1, 4, 16, 64, 256];
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

fn main() -> Result<(), AnyError> {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let mut ty = String::from("uint4b8");
    if arguments.first().is_some_and(|first| first == "--type") && arguments.len() > 1 {
        ty = arguments.remove(1);
        arguments.remove(0);
    }
    let numbers: Vec<usize> =
        arguments.iter().map(|argument| argument.parse()).collect::<Result<_, _>>()?;
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
            let mut work = layer.workspace(&device, size_m, top_k)?;
            let mut y = device.zeroed(size_m * h)?;
            // Modules are loaded before anything is recorded.
            layer.forward(&device, &x, &ids[0], &weights, &mut work, &mut y)?;
            let graph = device.record(|| {
                ids.iter().try_for_each(|ids| {
                    layer.forward(&device, &x, ids, &weights, &mut work, &mut y)
                })
            })?;
            let mut times = Vec::new();
            for _ in 0..9 {
                times.push(device.microseconds(|| graph.replay())? / ROUTINGS as f32);
            }
            // The first two warm up.
            times.drain(..2);
            times.sort_by(f32::total_cmp);
            let hit = hit as f64 / ROUTINGS as f64;
            let limit = hit * layer.bytes_of_expert() as f64 / 4.49e6;
            println!(
                "{ty}, {experts} experts, top {top_k}, H {h}, I {size_i}, M {size_m}: {:.1} us, {hit:.1} \
                 experts hit, limit {limit:.1}",
                times[times.len() / 2]
            );
        }
    }
    Ok(())
}
