//! `marlinspike inspect`: describes a model folder as a table or as JSON.

mod details;
mod json;
mod text;

use std::path::PathBuf;

use marlinspike::select::{Capability, Release};
use marlinspike_model::inspect::{self, Options};

use crate::output::print;
use crate::style::ColorChoice;
use crate::{Outcome, args, hint};

const DETAILS: &str = "\
Example: marlinspike inspect ./Qwen3-30B-A3B-GPTQ

Prints one line for equal layers: `*` is each of the layers' numbers, and `run --layer` takes the
name with it. The experts of a MoE layer have one line for w13 (gate and up) and one for w2, as K x N x
experts. Shapes are those of the whole layer; with --tp-size the verdicts are for one rank's part. -v
prints every layer.

Below the layers there is a verdict for each kernel format that `convert` writes and for this project's
CUDA kernels, for a GPU of --capability; no GPU of this machine is looked at. Then follows the MoE kernel
that vLLM 0.21.0 selects for experts, on one rank with every package installed: the name of its backend
and its Python class. Lines that begin with \"in vLLM\" state what the release of --vllm decides
differently: act-order, the kernel, and sizes that Marlin pads. --json prints all refusals.

Examples:
  marlinspike inspect ./Qwen3-30B-A3B-GPTQ
  marlinspike inspect model --capability 8.0 --tp-size 2
  marlinspike inspect model --json
  marlinspike inspect model --vllm 0.21

Exit codes:
  0  the model was read, even if no kernel takes its layers
  2  bad input or usage";

/// Show a checkpoint's quantized layers.
#[derive(Debug, Clone, clap::Args)]
#[command(after_long_help = DETAILS)]
pub struct Args {
    /// Folder with config.json and safetensors files.
    pub model_dir: PathBuf,
    /// Compute capability of the GPU to select kernels for.
    #[arg(long, default_value = "9.0", value_parser = capability, value_name = "MAJOR.MINOR")]
    pub capability: Capability,
    /// Tensor-parallel ranks.
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = args::ranks)]
    pub tp_size: usize,
    /// Release of vLLM to compare with 0.21.0.
    #[arg(long, default_value = Release::NEWEST.name(), value_parser = release, value_name = "VERSION")]
    pub vllm: Release,
    /// Routing rule as JSON, instead of the model family's (see `run --help`).
    #[arg(long, value_name = "FILE")]
    pub routing: Option<PathBuf>,
    /// Print JSON instead of a table.
    #[arg(long)]
    pub json: bool,
    /// Print a line for each layer, and which layers each reason is for.
    #[arg(short, long)]
    pub verbose: bool,
}

/// Parses `major.minor`.
fn capability(text: &str) -> Result<Capability, String> {
    let parse = || {
        let (major, minor) = text.split_once('.')?;
        Some((major.parse::<u32>().ok()?, minor.parse::<u32>().ok()?))
    };
    match parse() {
        Some((major, minor)) if (1..1000).contains(&major) && minor < 10 => {
            Ok(Capability::cuda(major, minor))
        }
        _ => Err(format!("found {text:?}, expected a compute capability such as 8.0 or 9.0")),
    }
}

/// Parses the number of a known release.
fn release(text: &str) -> Result<Release, String> {
    Release::from_name(text).ok_or_else(|| {
        let known: Vec<_> = Release::ALL.iter().map(|r| r.name()).collect();
        format!("found {text:?}, expected one of {}", known.join(", "))
    })
}

/// Runs the command.
///
/// # Errors
/// Returns an error for a folder that cannot be read.
pub fn run(args: &Args, color: ColorChoice) -> anyhow::Result<Outcome> {
    hint::expect_model(&args.model_dir)?;
    let mut options = Options::default();
    options.device = args.capability;
    options.tp_size = args.tp_size;
    options.routing = args.routing.clone();
    options.release = args.vllm;
    let found = inspect::inspect(&args.model_dir, &options)?;
    print(&match args.json {
        true => json::json(&found, args),
        false => text::text(&found, &args.capability, args.verbose, color.for_stdout()),
    })?;
    Ok(Outcome::Pass)
}
