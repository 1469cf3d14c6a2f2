//! `run`: one layer on given activations.
//!
//! Int4 layers take the int4 path, from a packed file or packed on the spot: [`mod@layer`] finds and
//! loads them. [`mod@method`] runs the others as their checkpoint's method says. [`input`] makes the
//! activations; this file decides, and says what came out.

pub mod input;
pub mod layer;
pub mod method;
pub mod origin;
pub(crate) mod report;
mod routing;

use std::num::NonZero;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::Context as _;
use marlinspike::case::ActivationRounding;
use marlinspike::config::Scheme;
use marlinspike::scalar::ScalarType;
use marlinspike::w4a8::{self, Kernel, Values};
use serde_json::json;

use crate::error::Explained;
use crate::model::Model;
use crate::model::layers::{Layers, Role};
use crate::output::{print, write_whole};
use crate::{Outcome, args, style::printable};
use input::Inputs;
use layer::{Layer, Opened, Options};
use method::{MethodArgs, packed};
use report::{Check, Output, Report};

const DETAILS: &str = "\
MODEL is a folder that `marlinspike convert` has written (of --to kleidiai, one of its safetensors
files too), or an original checkpoint. Int4 layers take the int4 path; a checkpoint's is packed
first, a packed one is mapped and run where it lies.

FP8, MXFP8, MXFP4 and NVFP4 layers of a checkpoint, linear or experts, run as their method says:
activations are quantized as the config has it, experts are prepared as upstream prepares them,
and every bit of the output follows from a stated arithmetic (--arithmetic). --check computes it
again, one product after the other. A folder converted for Marlin runs with 16-bit activations,
one for FlashInfer as its files say: what is computed is what the kernel's bytes stand for.

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
    let rounding = match args.rounding {
        RoundingArg::HalfAway => ActivationRounding::HalfAway,
        RoundingArg::HalfEven => ActivationRounding::HalfEven,
    };
    let threads = args.threads.map_or_else(rayon::current_num_threads, NonZero::get);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build()?;
    let kernel = kernel(args.kernel.as_deref())?;
    let name = kernel.name();
    let opened = Opened::open(&args.model, args.routing.as_deref())?;
    if args.list {
        let names = runnable(&opened)?;
        let lines = names.into_iter().map(|m| format!("{}\n", printable(&m)));
        print(&lines.collect::<String>())?;
        return Ok(Outcome::Pass);
    }
    if let Some(files) = opened.original()? {
        let model = Model::new(files)?;
        if let Some(section) = packed::section(&model) {
            let modules = packed::modules(section);
            let is_moe = |m: &str| packed::is_moe(section, m);
            packed::refuse_copied(section, args.layer.as_deref())?;
            let module = layer::choose(&modules, args.layer.as_deref(), is_moe)?;
            let loaded = pool.install(|| packed::load(&model, section, module))?;
            return method::run(args, &loaded, true, &pool);
        }
        let layers = Layers::group(&model)?;
        refuse_fused(&layers, args.layer.as_deref())?;
        if let Some(module) = method_layer(args, &opened, &layers)? {
            let loaded = method::load(&args.method, &model, &layers, &module, &pool)?;
            return method::run(args, &loaded, false, &pool);
        }
    }
    let options = Options { layer: args.layer.as_deref(), rounding, kernel, pool: &pool };
    let loaded = opened.load(options)?;
    let inputs: Inputs<Values> = match &args.input {
        Some(path) => Inputs::read(path, loaded.layer.sizes())?,
        None => Inputs::seeded(args.seed, args.tokens, args.dtype, loaded.layer.sizes())?,
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
    let size_n = loaded.layer.size_n();
    let y = Output::values(&y, size_n);
    let check = match args.check {
        false => None,
        true => {
            let expected = pool.install(|| loaded.layer.definition(&inputs))?;
            Some(Check::of(&y, &Output::values(&expected, size_n)))
        }
    };
    if let Some(path) = &args.output {
        let bytes = report::container(std::slice::from_ref(&y))?;
        write_whole(path, &bytes).context("the output")?;
    }
    let (sizes, summary) = describe(&loaded.layer);
    let report = Report {
        module: &loaded.module,
        packed: loaded.packed,
        source: if loaded.packed { "" } else { ", packed from the checkpoint" },
        sizes,
        summary,
        y: &y,
        kernel: name,
        threads,
        seconds,
        check,
        checked_by: "the scalar definition",
        notes: &loaded.notes,
        routing: loaded.layer.routing(&inputs, args.check)?,
        partial: loaded.partial.as_ref(),
        arithmetic: loaded.arithmetic.clone(),
    };
    print(&if args.json { report.json() } else { report.text() })?;
    Ok(if report.is_equal() { Outcome::Pass } else { Outcome::Mismatch })
}

/// Fails where the wanted layer's experts, or without a wanted layer any experts alone, are in a form
/// that is not read: another layer would run in their place.
fn refuse_fused(layers: &Layers, wanted: Option<&str>) -> anyhow::Result<()> {
    let found = match wanted {
        Some(name) => layers.fused.iter().find(|f| f.module == name),
        None if layers.stacks.iter().any(|s| s.role == Role::W13) => None,
        None => layers.fused.first(),
    };
    match found {
        None => Ok(()),
        Some(f) => {
            let message = format!("module `{}`: {}", f.module, f.reason);
            Err(Explained::new(message, "--layer runs a linear layer of this model").into())
        }
    }
}

/// The names of the layers that run without further options.
fn runnable(opened: &Opened) -> anyhow::Result<Vec<String>> {
    let Some(files) = opened.original()? else { return opened.modules() };
    let model = Model::new(files)?;
    if let Some(section) = packed::section(&model) {
        return Ok(packed::modules(section));
    }
    let mut names = opened.modules()?;
    let layers = Layers::group(&model)?;
    let others = layers.stacks.iter().filter(|s| has_method(&s.scheme));
    names.extend(others.map(|s| s.module.clone()));
    names.sort();
    names.dedup();
    Ok(names)
}

/// Whether layers of this scheme run as a method says, and not on the int4 path.
fn has_method(scheme: &Scheme) -> bool {
    matches!(
        scheme,
        Scheme::Fp8(_) | Scheme::Mxfp8 { .. } | Scheme::Mxfp4 { .. } | Scheme::Nvfp4 { .. }
    )
}

/// The layer to run as its method says; none where the int4 path is to take it, or to refuse it.
fn method_layer(args: &Args, opened: &Opened, layers: &Layers) -> anyhow::Result<Option<String>> {
    let takes = |scheme: &Scheme| args.method.arithmetic.is_some() || has_method(scheme);
    let mut known = layers.stacks.iter().filter(|s| takes(&s.scheme));
    let found = match &args.layer {
        Some(name) => known.find(|s| s.module == *name),
        // An int4 layer comes first where nothing else was asked for.
        None if args.method.arithmetic.is_none() && !opened.modules()?.is_empty() => None,
        None => known.clone().find(|s| s.role == Role::W13).or_else(|| known.next()),
    };
    Ok(found.map(|s| s.module.clone()))
}

/// Kind and sizes of an int4 layer, for machines and for people.
fn describe(layer: &Layer<'_>) -> (serde_json::Value, String) {
    match layer {
        Layer::Moe(moe) => {
            let (experts, top_k) = (moe.config().num_experts, moe.config().router.top_k);
            let (hidden, inner) = (moe.hidden_size(), moe.intermediate_size());
            let sizes = json!({
                "kind": "moe",
                "num_experts": experts,
                "top_k": top_k,
                "hidden_size": hidden,
                "intermediate_size": inner,
            });
            (sizes, format!("{experts} experts, top {top_k}, H {hidden}, I {inner}"))
        }
        Layer::Linear(linear) => {
            let shape = linear.weight().layout().shape();
            let sizes = json!({"kind": "linear", "size_k": shape.size_k, "size_n": shape.size_n});
            (sizes, format!("linear, {shape}"))
        }
    }
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
