//! `run`: one layer of the int4 path, from a packed file or packed on the spot, on given activations.
//!
//! [`mod@layer`] finds and loads the layer, [`input`] makes the activations, this file runs the one
//! on the other and says what came out.

pub mod input;
pub mod layer;
mod report;

use std::num::NonZero;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::Context as _;
use marlinspike::case::ActivationRounding;
use marlinspike::w4a8::{self, Kernel};

use crate::error::Explained;
use crate::output::{print, write_whole};
use crate::{Outcome, style::printable};
use input::Inputs;
use layer::{Layer, Opened, Options};
use report::{Check, Report};

const DETAILS: &str = "\
MODEL is a folder that `marlinspike convert --to kleidiai` has written, one of its safetensors files,
or an original checkpoint of int4 weights, whose layer is packed first. Packed layers are mapped and
run where they lie.

Activations come from --input, a safetensors file (case files too: names may begin with `in.`):
  x               [M, H] float32 or bfloat16
  router_logits   [M, experts] float32, or
  topk_ids        [M, top_k] int32 and
  topk_weights    [M, top_k] float32
or else from --seed: M rows of numbers evenly spread over -1 to 1, the same on every machine.

Examples:
  marlinspike run ./packed                                first layer of experts, 16 seeded tokens
  marlinspike run ./packed --layer model.layers.3.mlp.experts --tokens 512 --check
  marlinspike run ./packed/model.safetensors --input x.safetensors --output y.safetensors
  marlinspike run ./packed --list                         the layers there are

The digest is the SHA-256 of the output's little-endian bytes, row by row. Every kernel gives the
same bits, on every machine.

Exit codes:
  0  the layer ran (and is equal, with --check)
  1  --check found a difference
  2  bad input or usage, or a layer that the int4 path cannot run";

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
}

/// Run one int4 layer on the CPU.
#[derive(Debug, Clone, clap::Args)]
#[command(after_long_help = DETAILS)]
pub struct Args {
    /// Folder with a packed or an original checkpoint, or a packed safetensors file.
    pub model: PathBuf,
    /// Module to run [default: the first layer of experts, else the first linear layer].
    #[arg(long, value_name = "MODULE")]
    pub layer: Option<String>,
    /// Print the names of the layers, and run none.
    #[arg(long)]
    pub list: bool,
    /// Activations.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["tokens", "seed", "dtype"])]
    pub input: Option<PathBuf>,
    /// Rows of seeded activations.
    #[arg(long, value_name = "M", default_value_t = 16)]
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
    #[arg(long, value_name = "N")]
    pub threads: Option<NonZero<usize>>,
    /// Runs; the shortest time is shown.
    #[arg(long, value_name = "N", default_value = "1")]
    pub repeat: NonZero<usize>,
    /// Compute the layer again by the scalar definition and compare every bit.
    #[arg(long)]
    pub check: bool,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
///
/// # Errors
/// For a model, a layer or activations that cannot be used, each by name.
pub fn run(args: &Args) -> anyhow::Result<Outcome> {
    let rounding = match args.rounding {
        RoundingArg::HalfAway => ActivationRounding::HalfAway,
        RoundingArg::HalfEven => ActivationRounding::HalfEven,
    };
    let threads = args.threads.map_or_else(rayon::current_num_threads, NonZero::get);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build()?;
    let kernel = kernel(args.kernel.as_deref())?;
    let name = kernel.name();
    let opened = Opened::open(&args.model)?;
    if args.list {
        let lines = opened.modules()?.into_iter().map(|m| format!("{}\n", printable(&m)));
        print(&lines.collect::<String>())?;
        return Ok(Outcome::Pass);
    }
    let options = Options { layer: args.layer.as_deref(), rounding, kernel, pool: &pool };
    let loaded = opened.load(options)?;
    let inputs = match &args.input {
        Some(path) => Inputs::read(path, &loaded.layer)?,
        None => Inputs::seeded(args.seed, args.tokens, args.dtype, &loaded.layer)?,
    };
    let mut y = loaded.layer.output(&inputs)?;
    let mut seconds = f64::INFINITY;
    pool.install(|| -> marlinspike::Result<()> {
        let mut run = loaded.layer.runner(&inputs);
        for _ in 0..args.repeat.get() {
            let begun = Instant::now();
            run(&mut y)?;
            seconds = seconds.min(begun.elapsed().as_secs_f64());
        }
        Ok(())
    })?;
    let check = match args.check {
        false => None,
        true => {
            let expected = pool.install(|| loaded.layer.definition(&inputs))?;
            Some(Check::of(&y, &expected, loaded.layer.size_n()))
        }
    };
    if let Some(path) = &args.output {
        let bytes = report::container(&y, loaded.layer.size_n())?;
        write_whole(path, &bytes).context("the output")?;
    }
    let report = Report { loaded: &loaded, y: &y, kernel: name, threads, seconds, check };
    print(&if args.json { report.json() } else { report.text() })?;
    Ok(if report.is_equal() { Outcome::Pass } else { Outcome::Mismatch })
}

/// The kernel of this name, or the quickest.
fn kernel(name: Option<&str>) -> anyhow::Result<Box<dyn Kernel>> {
    let Some(name) = name else { return Ok(w4a8::fastest()) };
    let mut all = w4a8::kernels();
    match all.iter().position(|k| k.name() == name) {
        Some(i) => Ok(all.swap_remove(i)),
        None => {
            let names: Vec<_> = all.iter().map(|k| k.name()).collect();
            let help = format!("this CPU has {}", names.join(", "));
            Err(Explained::new(format!("--kernel: found {name:?}, which this CPU lacks"), help)
                .into())
        }
    }
}

impl Layer<'_> {
    /// N of the output: H of experts.
    pub fn size_n(&self) -> usize {
        match self {
            Self::Moe(moe) => moe.hidden_size(),
            Self::Linear(linear) => linear.weight().layout().shape().size_n,
        }
    }
}
