//! How long expert layers with e4m3fn weights and activations take on this machine's GPU.
//!
//! ```text
//! fp8_times [--kind channels|promoted|blocks] [--sweep] [E TOP_K H I [M ...]]
//! ```
//!
//! A figure is the median of 7 replays of a graph of 16 layers, as for `moe_times`. `--sweep` tries plans of the first
//! product, then of the second with the fastest of the first.

use marlinspike_accel::{
    AccelError, Device,
    cache::ModuleCache,
    limits,
    nvrtc::{Arch, Nvrtc},
    ops::fp8_gemm::{Fp8Plan, Fp8Scales, Fp8Sums},
    registry,
    timing::REPLAYS,
    warm::{jobs, warm},
    workload::{ExpertLayer, LayerPlans, Sizes},
};

type AnyError = Box<dyn std::error::Error>;

/// Qwen3-30B-A3B, a tensor-parallel rank of 8 of DeepSeek-V3, and 32 of its experts.
const LAYERS: [[usize; 4]; 3] = [[128, 8, 2048, 768], [256, 8, 7168, 256], [32, 8, 7168, 2048]];
const TOKENS: [usize; 6] = [1, 16, 64, 256, 1024, 4096];

/// Compiles what a sweep uses, in parallel.
fn compile((scales, sums): (Fp8Scales, Fp8Sums)) -> Result<(), AccelError> {
    let all = jobs(registry(), &[Arch { compute_capability: (9, 0), specific: true }])?;
    let wanted = [
        ("IS_BF16", 1),
        ("IS_MOE", 1),
        ("HAS_BLOCKS", scales as u32),
        ("IS_PROMOTED", (sums == Fp8Sums::Promoted).into()),
    ];
    let is_used =
        |name: &str, value| wanted.iter().all(|&(known, of)| known != name || of == value);
    let used: Vec<_> = all
        .into_iter()
        .filter(|job| ["fp8_gemm", "moe_gather"].contains(&job.row.source))
        .filter(|job| job.parameters.iter().all(|&(name, value)| is_used(name, value)))
        .collect();
    warm(&ModuleCache::from_environment(), &Nvrtc::open(), &used).map(drop)
}

/// Plans to try for experts with that many rows on average.
fn plans(rows: usize) -> Vec<Fp8Plan> {
    let near = |plan: &Fp8Plan| {
        let of_plan = plan.rows as usize;
        (rows / 2..=(2 * rows).max(8).next_power_of_two()).contains(&of_plan)
            || (of_plan == 128 && rows > 32)
    };
    Fp8Plan::all()
        .filter(near)
        .flat_map(|plan| {
            let most = plan.warps * 16;
            let narrower = [16, 32, 48, 64, 96, 128, 192, 256]
                .into_iter()
                .filter(move |&n| n <= most && n > most / 4);
            let all: Vec<_> = match plan.rows {
                128 => vec![plan],
                _ => {
                    let residents = if plan.warps == 4 { 1..=3 } else { 1..=1 };
                    narrower
                        .flat_map(|tile_n| {
                            residents.clone().map(move |residents| Fp8Plan {
                                tile_n,
                                residents,
                                ..plan
                            })
                        })
                        .collect()
                }
            };
            all
        })
        .collect()
}

/// The fastest plans of the first product with each number of rows, then of the second.
fn sweep(
    rows: usize,
    time: impl Fn(&[LayerPlans]) -> Result<Vec<Result<f32, AccelError>>, AccelError>,
) -> Result<(), AnyError> {
    let all = plans(rows);
    let mut sizes: Vec<_> = all.iter().map(|plan| plan.rows).collect();
    sizes.dedup();
    sizes.sort_unstable();
    sizes.dedup();
    for size in sizes {
        let own: Vec<_> = all.iter().copied().filter(|plan| plan.rows == size).collect();
        let mut best = own[0];
        for which in 0..2 {
            let pairs: Vec<_> = own
                .iter()
                .map(|&plan| LayerPlans::Fp8(if which == 0 { [plan, best] } else { [best, plan] }))
                .collect();
            let times = time(&pairs)?;
            let mut timed: Vec<_> = own
                .iter()
                .zip(times)
                .filter_map(|(&plan, time)| Some((time.ok()?, plan)))
                .collect();
            timed.sort_by(|a, b| a.0.total_cmp(&b.0));
            let name = |&(us, Fp8Plan { tile_n, warps, residents, .. }): &(f32, _)| {
                format!("{tile_n}/{warps}w{residents} {us:.1}")
            };
            let line: Vec<_> = timed.iter().map(name).collect();
            println!("    {size} rows, product {which}: {}", line.join(", "));
            if let (0, Some(first)) = (which, timed.first()) {
                best = first.1;
            }
        }
    }
    Ok(())
}

fn main() -> Result<(), AnyError> {
    let (mut kind, mut is_sweep) = ((Fp8Scales::Channels, Fp8Sums::Unpromoted), false);
    let mut numbers = Vec::new();
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--sweep" => is_sweep = true,
            "--kind" => {
                kind = match arguments.next().as_deref() {
                    Some("channels") => (Fp8Scales::Channels, Fp8Sums::Unpromoted),
                    Some("promoted") => (Fp8Scales::Channels, Fp8Sums::Promoted),
                    Some("blocks") => (Fp8Scales::Blocks, Fp8Sums::Promoted),
                    other => {
                        return Err(
                            format!("--kind {other:?}: channels, promoted or blocks").into()
                        );
                    }
                };
            }
            _ => numbers.push(argument.parse::<usize>()?),
        }
    }
    let (layers, tokens) = match numbers[..] {
        [] => (LAYERS.to_vec(), TOKENS.to_vec()),
        [experts, top_k, h, i] => (vec![[experts, top_k, h, i]], TOKENS.to_vec()),
        [experts, top_k, h, i, ref tokens @ ..] => (vec![[experts, top_k, h, i]], tokens.to_vec()),
        _ => return Err("E TOP_K H I [M ...]".into()),
    };
    if is_sweep {
        compile(kind)?;
    }
    let device = Device::open()?;
    let read = limits::measure(&device, limits::Operands::Bf16)?.read;
    println!("{}, reads {:.2} TB/s, {kind:?}", device.name(), read / 1e12);
    for [num_experts, top_k, hidden_size, intermediate_size] in layers {
        let sizes = Sizes { num_experts, top_k, hidden_size, intermediate_size };
        let layer = ExpertLayer::fp8(&device, kind, sizes)?;
        for &size_m in &tokens {
            let (times, hit) = layer.time(&device, size_m, None, REPLAYS)?;
            let limit = hit * layer.bytes_of_expert() as f64 / read * 1e6;
            println!("{sizes:?}, M {size_m}: {:.1} us, limit {limit:.1}", times.median);
            if is_sweep {
                let rows = (size_m * top_k).div_ceil(num_experts.min(size_m * top_k));
                sweep(rows, |plans| {
                    let times = layer.time_plans(&device, size_m, plans, 3)?;
                    Ok(times.into_iter().map(|time| time.map(|time| time.median)).collect())
                })?;
            }
        }
    }
    Ok(())
}
