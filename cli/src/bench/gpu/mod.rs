//! `marlinspike bench gpu`: products and expert layers on a GPU, compared with its limits and with
//! other kernels.

mod measure;
mod peers;
mod plot;
mod report;

use std::path::PathBuf;

use anyhow::Result;
use marlinspike::num::scalar::ScalarType;
use marlinspike_accel::workload::{WEIGHT_TYPES, WeightType};
use marlinspike_bench::Workload;

use crate::error::Explained;
use crate::style::ColorChoice;
use crate::{Outcome, output};

pub(super) const ABOUT: &str = "\
Times products and Mixture-of-Experts layers with quantized weights on this machine's GPU.

Example: marlinspike bench gpu --shape 4096x28672 --tokens 1,64,4096 --type fp8

The limits of the device are measured first: bytes read from memory per second, and operations per \
second of its tensor cores (wgmma on Hopper, with e4m3 operands if weights and activations are e4m3; \
mma.sync elsewhere; no library is used). Dense products and whole layers (alignment, gate_up, SiLU, \
down, sum) follow, with bf16 activations and outputs. Each is a CUDA graph that is replayed over so \
much different data (weights or routings) that the caches hold none of it. `of limit` is the shortest \
time that the limits allow (reading and writing weights and \
activations once, or the operations, whichever takes longer) over the median replay.

--peers compares with other kernels on the same machine. scripts/gpu_peers writes the file: it times \
PyTorch's products and, if their libraries are installed, vLLM's operators. The ratio is their time \
over ours.";

pub(super) const EXAMPLES: &str = "\
Examples:
  marlinspike bench gpu                              four products, three layers
  marlinspike bench gpu --shape 4096x28672 --tokens 1,64,4096 --type fp8
  marlinspike bench gpu --shape 128x8x2048x768 --plot roofline.svg
      a layer of 128 experts, 8 per token, H 2048, I 768
  scripts/gpu_peers --out peers.json && marlinspike bench gpu --peers peers.json --json ours.json
      both sides on one machine, one after the other";

/// Arguments of `bench gpu`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// What to compute: KxN, experts x experts per token x H x I, or a name that `bench cpu`
    /// accepts; may be repeated [default: four products, three layers]
    #[arg(long = "shape", value_name = "SHAPE", value_delimiter = ',')]
    pub(super) shapes: Vec<Workload>,

    /// Tokens per call [default: 1,16,64,256,1024,4096]
    #[arg(long, value_name = "M", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=1 << 16))]
    pub(super) tokens: Vec<u32>,

    /// Type of the weights. A bf16 scale covers 128 k of uint4b8 and uint8b128, 32 k of
    /// uint4b8-g32, and a column of fp8; mxfp8, mxfp4 and nvfp4 have the scales of their formats
    #[arg(long = "type", value_name = "TYPE", default_value = "uint4b8", value_parser = weight_type)]
    pub(super) ty: WeightType,

    /// 8-bit activations, on Hopper for layers, which take fp8 with 4-bit weights; with weights of type
    /// fp8, both operands are e4m3fn, on Hopper [default: bf16]
    #[arg(long, value_enum, value_name = "TYPE")]
    pub(super) input: Option<Input>,

    /// Replays of each graph; the median and the fastest are reported
    #[arg(long, value_name = "COUNT", default_value_t = marlinspike_accel::timing::REPLAYS as u32, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(super) replays: u32,

    /// Times of other kernels on this machine, in a file that scripts/gpu_peers wrote
    #[arg(long, value_name = "FILE.json")]
    pub(super) peers: Option<PathBuf>,

    /// Also write everything as JSON
    #[arg(long, value_name = "FILE.json")]
    pub(super) json: Option<PathBuf>,

    /// Also draw the roofline: operations per second against operations per byte
    #[arg(long, value_name = "FILE.svg")]
    pub(super) plot: Option<PathBuf>,
}

impl Args {
    /// Whether weights and activations are e4m3fn.
    fn is_w8a8(&self) -> bool {
        let is_fp8 = |input: Input| input.ty() == ScalarType::FLOAT8_E4M3FN;
        self.ty.name == "fp8" && self.input.is_some_and(is_fp8)
    }
}

/// Types of 8-bit activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Input {
    /// int8.
    Int8,
    /// e4m3fn, a scale for each row.
    Fp8,
    /// e4m3fn, a scale for each row, sums without promotion; with weights of type fp8.
    Fp8Fast,
    /// e4m3fn, a scale for each 128 k of a row, and for 128 x 128 weights of type fp8.
    Fp8Block,
}

impl Input {
    fn ty(self) -> ScalarType {
        match self {
            Self::Int8 => ScalarType::INT8,
            Self::Fp8 | Self::Fp8Fast | Self::Fp8Block => ScalarType::FLOAT8_E4M3FN,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Int8 => "int8",
            Self::Fp8 => "e4m3fn",
            Self::Fp8Fast => "e4m3fn, unpromoted",
            Self::Fp8Block => "e4m3fn, blocks",
        }
    }
}

fn weight_type(name: &str) -> Result<WeightType, String> {
    let names = || WEIGHT_TYPES.map(|ty| ty.name).join(", ");
    WeightType::named(name).ok_or_else(|| format!("expected one of {}", names()))
}

/// Measures, prints a table, and writes the requested files.
///
/// # Errors
/// Returns an error without a GPU, for an unreadable file of peers, and for shapes that the kernels
/// do not accept.
pub(super) fn run(args: &Args, color: ColorChoice) -> Result<Outcome> {
    let peers = match &args.peers {
        Some(path) => peers::read(path)?,
        None => Vec::new(),
    };
    let report = measure::measure(args, &peers)?;
    output::print(&report.text(color.for_stdout()))?;
    let mut files: Vec<(&PathBuf, String)> = Vec::new();
    if let Some(path) = &args.json {
        files.push((
            path,
            crate::style::escaped(&format!("{}\n", serde_json::to_string_pretty(&report)?))
                .into_owned(),
        ));
    }
    if let Some(path) = &args.plot {
        files.push((path, plot::roofline(&report)));
    }
    for (path, text) in files {
        output::write_whole(path, text.as_bytes()).map_err(|e| {
            Explained::new(e, "name a file in a folder that exists and can be written to")
        })?;
    }
    Ok(Outcome::Pass)
}
