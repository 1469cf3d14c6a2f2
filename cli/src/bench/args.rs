//! The command line of `bench`.

use clap::Subcommand;
use marlinspike::num::dims::GroupSize;
use marlinspike_bench::Workload;

use super::gpu;

const ABOUT: &str = "\
Times the int4 path on this CPU: 4-bit weights, activations quantized to 8 bits at run time.

Example: marlinspike bench cpu --quick

The limits of the machine are measured first: bytes read from memory per second, and \
multiply-accumulates per second of the kernel's instruction. Dense products and Mixture-of-Experts \
layers follow, with f32 activations and outputs. Their packed weights are cold: calls cycle through \
more than 160 MB of weights, and more than twice the last-level cache. With one token, each call of a \
layer hits different experts. `of limit` is the shortest time that the limits allow (reading the weights \
or issuing the multiply-accumulates, whichever takes longer) over the measured time.

Threads are pinned, in ascending order, to the logical CPUs that the process may use; `taskset -c` \
selects others. Measure on an idle machine: the difference between best and median shows the noise.";

const EXAMPLES: &str = "\
Examples:
  marlinspike bench cpu                        everything, takes minutes
  marlinspike bench cpu --quick                an overview, takes seconds
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
    /// KxN, or experts x experts per token x H x I; may be repeated [default: all of the names]
    #[arg(long = "shape", value_name = "SHAPE", value_delimiter = ',')]
    pub(super) shapes: Vec<Workload>,

    /// Tokens per call [default: 1,8,64,512]
    #[arg(long, value_name = "T", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=1 << 16))]
    pub(super) tokens: Vec<u32>,

    /// Threads [default: 1 and the number of CPUs that the process may use]
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(super) threads: Vec<u32>,

    /// Group sizes; `channel` is one scale per column [default: 32,128,channel]
    #[arg(long = "group", value_name = "G", value_delimiter = ',', value_parser = group)]
    pub(super) groups: Vec<GroupSize>,

    /// Calls of each case [default: 50]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(super) calls: Option<u32>,

    /// Seconds after which a case ends with fewer calls, but at least three [default: 2]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub(super) seconds: Option<f64>,

    /// Time one dense product and one layer with 1 and 64 tokens and groups of 32, a few calls
    /// each; other options override these
    #[arg(long)]
    pub(super) quick: bool,

    /// Keep a product's weights in the caches: every call uses the same matrix
    #[arg(long)]
    pub(super) warm: bool,

    /// The kernel to use [default: the fastest that this CPU supports]
    #[arg(long, value_name = "NAME")]
    pub(super) kernel: Option<String>,

    /// Do not pin threads to CPUs
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
            _ => Err(format!("expected a multiple of 32 up to {GROUP_LIMIT}, or `channel`")),
        },
    }
}

fn seconds(text: &str) -> Result<f64, String> {
    let parsed = text.parse().ok().filter(|s| (0.0..=86400.0).contains(s));
    parsed.ok_or_else(|| "expected a number of seconds from 0 to 86400".to_owned())
}
