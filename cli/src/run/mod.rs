//! `run`: one layer on given activations.

mod method;
mod report;

use std::collections::BTreeMap;
use std::num::NonZero;
use std::path::PathBuf;

use anyhow::Context as _;
use marlinspike::case::ActivationRounding;
use marlinspike::container::write_container;
use marlinspike::num::scalar::ScalarType;
use marlinspike_model::convert::target::int4;
use marlinspike_model::run::error::RunError;
use marlinspike_model::run::options::{Options, Source};
use marlinspike_model::run::output::Output;
use marlinspike_model::run::{list, run as run_layer};

use crate::error::Explained;
use crate::output::{print, write_whole};
use crate::{Outcome, args, style::printable};
use method::MethodArgs;

const DETAILS: &str = "\
MODEL is a folder that `marlinspike convert` has written, one safetensors file of such a folder for
the int4 path, or an original checkpoint. Int4 layers take the int4 path; a checkpoint's is packed
first, a packed one is mapped and run where it lies.

FP8, MXFP8, MXFP4 and NVFP4 layers of a checkpoint, linear or experts, run as their method says:
activations are quantized as the config has it, experts are prepared as upstream prepares them,
and every bit of the output follows from a stated arithmetic (--arithmetic). --check computes it
again, one product after the other. A folder converted for Marlin runs with 16-bit activations,
one for another GPU kernel as its files say: what is computed is what the kernel's bytes stand for.

Activations come from --input, a safetensors file (case files too: names may begin with `in.`):
  x               [M, H] bfloat16; on the int4 path also float32, elsewhere also float16
  router_logits   [M, experts] float32, or
  topk_ids        [M, top_k] int32 and
  topk_weights    [M, top_k] float32
or else from --seed: M rows of numbers evenly spread over -1 to 1, the same on every machine.
router_logits are what the router gives to the choice of experts: with a router's own bias, and
after a soft cap.

Tokens are routed as the model_type of config.json says (docs/src/reference/models.md lists the
families). A model_type that is not known is refused; --routing FILE states the routing instead, as
JSON:
  {\"scoring_func\": \"sigmoid\", \"top_k\": 8, \"renormalize\": true, \"routed_scaling_factor\": 2.5,
   \"correction_bias\": \"gate.e_score_correction_bias\"}
y is the sum over the routed experts: shared experts are no part of it.

Examples:
  marlinspike run ./packed                                first layer of experts, 16 seeded tokens
  marlinspike run ./packed --layer model.layers.3.mlp.experts --tokens 512 --check
  marlinspike run ./packed/model.safetensors --input x.safetensors --output y.safetensors
  marlinspike run ./packed --list                         the layers there are
  marlinspike run ./Qwen3-30B-A3B-FP8 --arithmetic wgmma-promoted --check
  marlinspike run ./my-model --routing routing.json --check
  marlinspike run ./gpt-oss-20b --tokens 4 --output y.safetensors --stages

The digest is the SHA-256 of the output's little-endian bytes, row by row. Every kernel gives the
same bits, on every machine.

Exit codes:
  0  the layer ran (and is equal, with --check)
  1  --check found a difference
  2  bad input or usage, or a layer that cannot run";

/// How halves are rounded when activations are quantized.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum RoundingArg {
    /// Away from zero, as KleidiAI from 1.22 on.
    #[default]
    HalfAway,
    /// To even, as KleidiAI before.
    HalfEven,
}

/// Type of seeded activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum DtypeArg {
    /// f32.
    Float32,
    /// bf16.
    #[default]
    Bfloat16,
    /// f16; not on the int4 path.
    Float16,
}

impl DtypeArg {
    /// The type.
    pub const fn scalar(self) -> ScalarType {
        match self {
            Self::Float32 => ScalarType::FLOAT32,
            Self::Bfloat16 => ScalarType::BFLOAT16,
            Self::Float16 => ScalarType::FLOAT16,
        }
    }
}

/// Run one layer on the CPU.
#[derive(Debug, Clone, clap::Args)]
#[command(after_long_help = DETAILS)]
pub struct Args {
    /// Folder with a packed or an original checkpoint, or a packed safetensors file.
    pub model: PathBuf,
    /// Module to run [default: the first layer of experts, else the first linear layer].
    #[arg(long, value_name = "MODULE")]
    pub layer: Option<String>,
    /// Routing of the layer's tokens, as JSON, instead of its family's.
    #[arg(long, value_name = "FILE")]
    pub routing: Option<PathBuf>,
    /// Print the names of the layers, and run none.
    #[arg(long)]
    pub list: bool,
    /// Activations.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["tokens", "seed", "dtype"])]
    pub input: Option<PathBuf>,
    /// Rows of seeded activations.
    #[arg(long, value_name = "M", default_value_t = 16, value_parser = args::tokens)]
    pub tokens: usize,
    /// Seed of the activations.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Type of seeded activations, and so of the output.
    #[arg(long, value_enum, default_value_t)]
    pub dtype: DtypeArg,
    /// How halves are rounded when activations are quantized.
    #[arg(long, value_enum, default_value_t)]
    pub rounding: RoundingArg,
    /// Write `y` to a safetensors file.
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Kernel by name: scalar, portable, or one of this CPU's [default: the quickest].
    #[arg(long, value_name = "NAME")]
    pub kernel: Option<String>,
    /// Worker threads [default: one per core].
    #[arg(long, value_name = "N", value_parser = args::threads)]
    pub threads: Option<NonZero<usize>>,
    /// Runs; the shortest time is shown.
    #[arg(long, value_name = "N", default_value = "1", value_parser = args::repeats)]
    pub repeat: NonZero<usize>,
    /// Compute the layer again by its definition and compare every bit.
    #[arg(long)]
    pub check: bool,
    /// Options of FP8, MXFP8, MXFP4 and NVFP4 layers.
    #[command(flatten)]
    pub method: MethodArgs,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
///
/// # Errors
/// For a model, a layer or activations that cannot be used, each by name.
pub fn run(args: &Args) -> anyhow::Result<Outcome> {
    if args.list {
        let names = list(&args.model, args.routing.as_deref()).map_err(explain)?;
        let lines = names.into_iter().map(|m| format!("{}\n", printable(&m)));
        print(&lines.collect::<String>())?;
        return Ok(Outcome::Pass);
    }
    let done = run_layer(&args.model, &options(args)).map_err(explain)?;
    if let Some(path) = &args.output {
        let from = if args.method.stages { 0 } else { done.outputs.len() - 1 };
        write_whole(path, &container(&done.outputs[from..])?).context("the output")?;
    }
    print(&if args.json { report::json(&done) } else { report::text(&done) })?;
    Ok(if done.is_equal() { Outcome::Pass } else { Outcome::Mismatch })
}

/// The options that the arguments say.
fn options(args: &Args) -> Options {
    let mut options = Options::default();
    options.layer = args.layer.clone();
    options.routing = args.routing.clone();
    options.input = match &args.input {
        Some(path) => Source::File(path.clone()),
        None => {
            let (seed, tokens, dtype) = (args.seed, args.tokens, args.dtype.scalar());
            Source::Seeded { seed, tokens, dtype }
        }
    };
    options.rounding = match args.rounding {
        RoundingArg::HalfAway => ActivationRounding::HalfAway,
        RoundingArg::HalfEven => ActivationRounding::HalfEven,
    };
    options.kernel = args.kernel.clone();
    options.threads = args.threads;
    options.repeat = args.repeat;
    options.check = args.check;
    options.arithmetic = args.method.arithmetic();
    options.method = args.method.options();
    options
}

/// Outputs as a safetensors file.
fn container(outputs: &[Output]) -> anyhow::Result<Vec<u8>> {
    let tensors = outputs.iter().map(Output::tensor).collect::<marlinspike::Result<Vec<_>>>()?;
    Ok(write_container(&tensors, &BTreeMap::new(), Vec::new())?)
}

/// Adds what to do about it.
fn explain(error: RunError) -> anyhow::Error {
    let help = match &error {
        RunError::NoLayer | RunError::NoSuchLayer { .. } => {
            "`marlinspike run MODEL --list` names the layers there are".to_owned()
        }
        RunError::PackedRouting => {
            let to = int4::FORMAT.name();
            format!("give it to `marlinspike convert --to {to}`, or run the checkpoint")
        }
        RunError::Fused { .. } => "--layer runs a linear layer of this model".to_owned(),
        RunError::Kernel { known, .. } => format!("this CPU has {}", known.join(", ")),
        _ => return error.into(),
    };
    Explained::new(error, help).into()
}
