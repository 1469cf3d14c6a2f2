//! The command line of `bench`.

use clap::Subcommand;
use marlinspike::num::dims::GroupSize;
use marlinspike_bench::Workload;

use super::gpu;

const ABOUT: &str = "\
Times the int4 path (weights of 4 bits, activations quantized to 8 bits as they come) on this CPU.

First what the machine can do at most: bytes read from memory per second, and multiply-accumulates \
per second of the instruction that the kernel uses. Then dense products and Mixture-of-Experts \
layers, f32 in and out, each on packed weights that have left the caches: calls take turns over \
more than 160 MB of them (and more than twice the last-level cache), and with one token a layer \
takes other experts each time. `of limit` is the time in which the weights could be read, or the \
multiply-accumulates issued, whichever is longer, over the time it took.

Threads are pinned to the logical CPUs that the process may use, in ascending order: choose others \
with `taskset -c`. Measure on an idle machine; best and median say how idle it was.";

const EXAMPLES: &str = "\
Examples:
  marlinspike bench cpu                        everything, some minutes
  marlinspike bench cpu --quick                a look, some seconds
  marlinspike bench cpu --shape qwen3-30b-a3b --tokens 1,64 --group 32
  marlinspike bench cpu --shape 8192x1024 --shape 64x6x2048x1408 --json
      a product [K, N] and a layer of 64 experts, 6 per token, H 2048, I 1408";

/// Arguments of `bench`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    pub(super) target: Target,
}

/// What to measure.
#[derive(Debug, Subcommand)]
pub(super) enum Target {
    /// Time the int4 path on this CPU.
    #[command(long_about = ABOUT, after_long_help = EXAMPLES)]
    Cpu(Cpu),
    /// Time products and expert layers on this machine's GPU.
    #[command(long_about = gpu::ABOUT, after_long_help = gpu::EXAMPLES)]
    Gpu(gpu::Args),
}

/// Arguments of `bench cpu`.
#[derive(Debug, clap::Args)]
pub(super) struct Cpu {
    /// What to compute: 4096x4096, 4096x14336, 2048x1536, qwen3-30b-a3b, mixtral-8x7b, any other
    /// KxN, or experts x experts per token x H x I; may be repeated; all named ones when left out
    #[arg(long = "shape", value_name = "SHAPE", value_delimiter = ',')]
    pub(super) shapes: Vec<Workload>,

    /// Tokens per call [default: 1,8,64,512]
    #[arg(long, value_name = "T", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=1 << 16))]
    pub(super) tokens: Vec<u32>,

    /// Threads [default: 1 and as many as can run at once]
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(super) threads: Vec<u32>,

    /// Group sizes, `channel` for one scale per column [default: 32,128,channel]
    #[arg(long = "group", value_name = "G", value_delimiter = ',', value_parser = group)]
    pub(super) groups: Vec<GroupSize>,

    /// Calls of each case that are enough [default: 50]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(super) calls: Option<u32>,

    /// Seconds after which a case ends with fewer calls (three at least) [default: 2]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub(super) seconds: Option<f64>,

    /// One dense product and one layer, 1 and 64 tokens, groups of 32, a few calls each; options
    /// that are given still count
    #[arg(long)]
    pub(super) quick: bool,

    /// Leave a product's weights in the caches: one matrix for all calls
    #[arg(long)]
    pub(super) warm: bool,

    /// The kernel to use [default: the quickest one that this CPU supports]
    #[arg(long, value_name = "NAME")]
    pub(super) kernel: Option<String>,

    /// Leave it to the system where threads run
    #[arg(long)]
    pub(super) no_pin: bool,

    /// Print one JSON object
    #[arg(long)]
    pub(super) json: bool,
}

/// Largest K of a workload.
const GROUP_LIMIT: usize = 1 << 20;

fn group(text: &str) -> Result<GroupSize, String> {
    match text {
        "channel" => Ok(GroupSize::Channel),
        _ => match text.parse() {
            Ok(rows @ 1usize..=GROUP_LIMIT) if rows.is_multiple_of(32) => Ok(GroupSize::Of(rows)),
            _ => Err(format!("expected a multiple of 32, or `channel`; at most {GROUP_LIMIT}")),
        },
    }
}

fn seconds(text: &str) -> Result<f64, String> {
    let parsed = text.parse().ok().filter(|s| (0.0..=86400.0).contains(s));
    parsed.ok_or_else(|| "expected a number of seconds from 0 to 86400".to_owned())
}
