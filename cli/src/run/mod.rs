//! `marlinspike run`: runs one layer on given activations.

#[cfg(feature = "cuda")]
mod device;
#[cfg(not(feature = "cuda"))]
#[path = "no_device.rs"]
mod device;
mod method;
mod report;

use std::collections::BTreeMap;
use std::num::NonZero;
use std::path::PathBuf;

use anyhow::Context as _;
use marlinspike::case::ActivationRounding;
use marlinspike::container::write_container;
use marlinspike::formats;
use marlinspike::num::scalar::ScalarType;
use marlinspike_model::convert::error::Refused;
use marlinspike_model::convert::target::int4;
use marlinspike_model::run::device::Device;
use marlinspike_model::run::error::RunError;
use marlinspike_model::run::options::{Options, Source};
use marlinspike_model::run::output::{Output, Run};
use marlinspike_model::run::{left_out, list, run_on};

use crate::backend::{self, Backend};
use crate::error::Explained;
use crate::output::{print, write_whole};
use crate::{Outcome, args, hint, style::printable};
use device::Gpu;
use method::MethodArgs;

const DETAILS: &str = "\
Example: marlinspike run ./packed --tokens 512 --check

MODEL is a folder that `marlinspike convert` wrote, one safetensors file that it wrote for the int4
path, or an original checkpoint. Int4 layers run on the int4 path: a checkpoint's layer is packed
first, a packed layer is mapped and used in place.

FP8 layers and layers of block formats ({blocks}), linear or experts, run by
their quantization method: activations are quantized as the config states, experts are prepared as
upstream prepares them, and --arithmetic determines every bit of the output. --check computes the
output again, one product after the other. A folder converted for Marlin runs with 16-bit
activations; one converted for another GPU kernel runs as its files state. In both cases the weights
are decoded from the packed bytes.

Activations come from --input, a safetensors file (or a case file: names may begin with `in.`):
  x               [M, H] bfloat16; on the int4 path also float32, elsewhere also float16
  router_logits   [M, experts] float32, or
  topk_ids        [M, top_k] int32 and
  topk_weights    [M, top_k] float32
  token_ids       [M] int32 or int64, for layers whose table of token ids chooses the experts
  token_types     [M] int32 or int64, for layers with a group of experts for each type of token
Without --input, --seed gives M rows of numbers spread evenly over -1 to 1, the same on every
machine. router_logits are the logits that experts are selected from, with the router's bias and
soft cap already applied. Without router_logits and topk_ids, the router's weight in the files
computes them from x.

Tokens are routed by the rule of config.json's model_type (docs/src/reference/models.md lists the
families). An unknown model_type is refused; --routing FILE then states the rule as JSON:
  {\"scoring_func\": \"sigmoid\", \"top_k\": 8, \"renormalize\": true, \"routed_scaling_factor\": 2.5,
   \"correction_bias\": \"gate.e_score_correction_bias\"}
y is the block's output, with the shared expert and the block's norm; the output file also has
y_experts, the sum over the routed experts.
On the int4 path y is the sum over the routed experts.

--backend cuda computes the products, the activation and the sum over the experts with this project's
CUDA kernels (feature `cuda`), and --check compares y with the canonical schedule of the reference,
bit for bit. The shared expert is computed by the reference.

Examples:
  marlinspike run ./packed                                first layer of experts, 16 seeded tokens
  marlinspike run ./packed --layer model.layers.3.mlp.experts --tokens 512 --check
  marlinspike run ./packed/model.safetensors --input x.safetensors --output y.safetensors
  marlinspike run ./packed --list                         list the layers
  marlinspike run ./Qwen3-30B-A3B-FP8 --arithmetic wgmma-promoted --check
  marlinspike run ./my-model --routing routing.json --check
  marlinspike run ./Qwen3-30B-A3B-GPTQ-Int4 --backend cuda --check --repeat 10
  marlinspike run ./Mixtral-8x7B --tokens 4 --output y.safetensors --stages

The digest is the SHA-256 of the output's little-endian bytes, row by row. Every kernel gives the
same bits, on every machine.

Exit codes:
  0  the layer ran; with --check, no bit differs
  1  --check found a difference
  2  bad input or usage, or a layer that cannot run";

/// How ties are rounded when activations are quantized.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum RoundingArg {
    /// Away from zero, as in KleidiAI since 1.22.
    #[default]
    HalfAway,
    /// To even, as in KleidiAI before 1.22.
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
    /// The scalar type.
    pub const fn scalar(self) -> ScalarType {
        match self {
            Self::Float32 => ScalarType::FLOAT32,
            Self::Bfloat16 => ScalarType::BFLOAT16,
            Self::Float16 => ScalarType::FLOAT16,
        }
    }
}

/// The activations that the layer runs on.
#[derive(Debug, Clone, clap::Args)]
pub struct ActivationArgs {
    /// Safetensors file with the activations.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["tokens", "seed", "dtype"])]
    pub input: Option<PathBuf>,
    /// Rows of seeded activations.
    #[arg(long, value_name = "M", default_value_t = 16, value_parser = args::tokens)]
    pub tokens: usize,
    /// Seed of the activations.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Type of seeded activations and of the output.
    #[arg(long, value_enum, default_value_t)]
    pub dtype: DtypeArg,
}

impl ActivationArgs {
    fn source(&self) -> Source {
        match &self.input {
            Some(path) => Source::File(path.clone()),
            None => {
                let (seed, tokens, dtype) = (self.seed, self.tokens, self.dtype.scalar());
                Source::Seeded { seed, tokens, dtype }
            }
        }
    }
}

/// What the layer runs with, and how often.
#[derive(Debug, Clone, clap::Args)]
pub struct ExecutionArgs {
    /// Run on a device, by the canonical schedule, with 16-bit activations even for int4 layers.
    #[arg(long, value_enum, value_name = "NAME", conflicts_with = "kernel")]
    pub backend: Option<Backend>,
    /// Kernel: scalar, portable, or one for this CPU [default: the fastest].
    #[arg(long, value_name = "NAME")]
    pub kernel: Option<String>,
    /// Worker threads [default: one per core].
    #[arg(long, value_name = "N", value_parser = args::threads)]
    pub threads: Option<NonZero<usize>>,
    /// Number of runs; the shortest time is shown.
    #[arg(long, value_name = "N", default_value = "1", value_parser = args::repeats)]
    pub repeat: NonZero<usize>,
}

/// The long help.
fn details() -> String {
    DETAILS.replace("{blocks}", &formats::titles(|f| matches!(f, formats::Format::Block(_))))
}

/// Run one layer.
#[derive(Debug, Clone, clap::Args)]
#[command(after_long_help = details())]
pub struct Args {
    /// Folder with a packed or an original checkpoint, or a packed safetensors file.
    pub model: PathBuf,
    /// Module to run [default: the first experts layer, or the first linear layer if there is
    /// none].
    #[arg(long, value_name = "MODULE")]
    pub layer: Option<String>,
    /// Routing rule as JSON, instead of the model family's.
    #[arg(long, value_name = "FILE")]
    pub routing: Option<PathBuf>,
    /// Print the names of the layers and run none.
    #[arg(long)]
    pub list: bool,
    /// The activations.
    #[command(flatten)]
    pub activations: ActivationArgs,
    /// How ties are rounded when activations are quantized.
    #[arg(long, value_enum, default_value_t)]
    pub rounding: RoundingArg,
    /// Write `y` to a safetensors file.
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Kernel, threads and repetitions.
    #[command(flatten)]
    pub execution: ExecutionArgs,
    /// Compute the layer again by its definition and compare bit for bit.
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
/// Names the model, the layer or the activations that cannot be used.
pub fn run(args: &Args) -> anyhow::Result<Outcome> {
    // A packed file is also accepted.
    if !args.model.is_file() {
        hint::expect_model(&args.model)?;
    }
    if args.list {
        let names = list(&args.model, args.routing.as_deref()).map_err(explain)?;
        let mut lines: String = names.into_iter().map(|m| format!("{}\n", printable(&m))).collect();
        for Refused { module, reasons } in
            left_out(&args.model, args.routing.as_deref()).map_err(explain)?
        {
            let line = format!("refused: {module}: {}", reasons.join("; "));
            lines.push_str(&format!("{}\n", printable(&line)));
        }
        print(&lines)?;
        return Ok(Outcome::Pass);
    }
    // A missing device is reported before any file is read.
    let gpu = args.execution.backend.map(backend::open).transpose()?.map(Gpu);
    let device = gpu.as_ref().map(|gpu| gpu as &dyn Device);
    let done = run_layer(args, device)?;
    if args.method.stages && done.method.is_none() {
        let found = "--stages: the int4 path has no stages in 16 bits";
        let help = "--arithmetic exact runs a checkpoint's int4 layers with 16-bit activations";
        return Err(Explained::new(found, help).into());
    }
    if let Some(path) = &args.output {
        let kept = |o: &&Output| args.method.stages || matches!(o.name, "y_experts" | "y");
        let outputs: Vec<&Output> = done.outputs.iter().filter(kept).collect();
        write_whole(path, &container(&outputs)?).context("the output")?;
    }
    print(&if args.json { report::json(&done) } else { report::text(&done) })?;
    Ok(if done.is_equal() { Outcome::Pass } else { Outcome::Mismatch })
}

/// Runs the layer of `--layer`. A name as `inspect` prints it is accepted: with `.w13` or `.w2`, or with `*`
/// for the numbers of equal layers, of which the first runs.
fn run_layer(args: &Args, device: Option<&dyn Device>) -> anyhow::Result<Run> {
    let mut options = options(args);
    let unknown = match run_on(&args.model, &options, device) {
        Err(error @ RunError::NoSuchLayer { .. }) => error,
        done => return done.map_err(explain),
    };
    let wanted = options.layer.clone().unwrap_or_default();
    let names = list(&args.model, args.routing.as_deref()).map_err(explain)?;
    options.layer = inspected(&wanted, &names);
    if options.layer.is_some() {
        return run_on(&args.model, &options, device).map_err(explain);
    }
    let Some(name) = args::nearest(&wanted, names.iter().map(String::as_str)) else {
        return Err(explain(unknown));
    };
    let model = args.model.display();
    let help = format!("did you mean `{name}`? `marlinspike run {model} --list` lists the layers");
    Err(Explained::new(unknown, help).into())
}

/// The layer that `inspect` names so.
fn inspected(wanted: &str, names: &[String]) -> Option<String> {
    let module = wanted.strip_suffix("w13").or(wanted.strip_suffix("w2")).unwrap_or(wanted);
    let pattern = glob::Pattern::new(module.trim_end_matches([' ', '.'])).ok()?;
    names.iter().find(|name| pattern.matches(name)).cloned()
}

/// The library's options for these arguments.
fn options(args: &Args) -> Options {
    let mut options = Options::default();
    options.layer = args.layer.clone();
    options.routing = args.routing.clone();
    options.input = args.activations.source();
    options.rounding = match args.rounding {
        RoundingArg::HalfAway => ActivationRounding::HalfAway,
        RoundingArg::HalfEven => ActivationRounding::HalfEven,
    };
    options.kernel = args.execution.kernel.clone();
    options.threads = args.execution.threads;
    options.repeat = args.execution.repeat;
    options.check = args.check;
    options.arithmetic = args.method.arithmetic();
    options.method = args.method.options();
    options
}

/// Outputs as a safetensors file.
fn container(outputs: &[&Output]) -> anyhow::Result<Vec<u8>> {
    let tensors = outputs.iter().map(|o| o.tensor()).collect::<marlinspike::Result<Vec<_>>>()?;
    Ok(write_container(&tensors, &BTreeMap::new(), Vec::new())?)
}

/// Adds a help line to an error.
fn explain(error: RunError) -> anyhow::Error {
    let help = match &error {
        RunError::NoLayer | RunError::NoSuchLayer { .. } => {
            "`marlinspike run MODEL --list` lists the layers".to_owned()
        }
        RunError::PackedRouting => {
            let to = int4::FORMAT.name();
            format!("convert the model with `marlinspike convert --to {to}`, or run the checkpoint")
        }
        RunError::Refused(_) => {
            "--arithmetic exact runs integers with 16-bit activations instead of on the int4 path"
                .to_owned()
        }
        RunError::Fused { .. } => "select a linear layer of this model with --layer".to_owned(),
        RunError::Kernel { known, .. } => format!("this CPU has {}", known.join(", ")),
        _ => return error.into(),
    };
    Explained::new(error, help).into()
}
