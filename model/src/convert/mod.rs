//! `convert`: a Hugging Face checkpoint into the kernel's format, one rank at a time.
//!
//! First a [`plan`], pure data made from headers and config; then the work ([`mod@execute`]): every
//! expert's rows are read from the mapped files, packed and written at their place, so memory is
//! bounded by the jobs in progress and not by the model. One process at a time converts into a folder
//! ([`lock`]). Files have temporary names until they are whole, read back and durable ([`mod@io`]);
//! the [`manifest`] records the SHA-256 of each, is what a rerun verifies ([`folder`]), and comes last.

pub mod budget;
pub mod config;
pub mod error;
pub mod execute;
pub mod folder;
pub mod inputs;
pub mod io;
pub mod job;
pub mod load;
pub mod lock;
pub mod manifest;
pub mod names;
pub mod parallel;
pub mod plan;
pub mod preparation;
pub mod report;
pub mod shard;
pub mod side;
pub mod slice;
pub mod verdict;
pub mod verify;

use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::time::Instant;

use marlinspike::layout::flashinfer::Nvfp4Backend;
use marlinspike::layout::marlin::InputDtype;
use marlinspike::scalar::ScalarType;
use marlinspike::select::Capability;
use serde_json::json;

use crate::error::Explained;
use crate::model::fused::has_experts;
use crate::model::layers::Layers;
use crate::model::{self, Model, ModelFiles};
use crate::output::print;
use crate::style::printable;
use crate::{Outcome, args};
use error::ConvertError;
use execute::Execution;
use folder::{Folder, Kept};
use inputs::Inputs;
use io::{Disk, Storage};
use manifest::Manifest;
use parallel::Ranks;
use plan::{Format, Plan, Settings};
use preparation::PreparationArgs;
use report::{Reporter, size};
use side::{LeftOut, SideFiles};

const DETAILS: &str = "\
Names of the converted tensors (E experts first, where there are experts):
  GPTQ, AWQ            qweight, scales, qzeros, g_idx, g_idx_sort_indices, bias
  compressed-tensors   weight_packed, weight_scale, weight_zero_point, weight_g_idx,
    integers           g_idx_sort_indices, bias
  FP8                  weight, weight_scale (blocks of quant_method fp8: weight_scale_inv), bias
  MXFP8, MXFP4         weight, weight_scale, bias
  NVFP4                weight, weight_scale, weight_global_scale (experts: weight_scale_2), bias
  int8 activations     also input_global_scale
  --to flashinfer      experts' weight_packed or weight, weight_scale, of NVFP4 weight_scale_2 and
                       input_scale
  --to kleidiai        dense rhs_packed; experts w13_packed, w2_packed (bytes; scales, sums and
                       biases inside)
A dense layer has <module>.<name>; experts <...experts>.w13_<name> and w2_<name>, gate before up
(gpt-oss keeps its rows of gate and up alternating, as its activation reads them).

Tensor parallelism, by the module's name:
  N is cut       q_proj k_proj v_proj gate_proj up_proj w1 w3 q_b_proj kv_b_proj fc1 lm_head
  K is cut       o_proj down_proj w2 out_proj fc2
  whole          every other module, and every tensor that is not quantized
A row-parallel rank keeps the whole bias, which only rank 0 may add; with act-order it keeps all
scales. With --ep-size above 1 experts are dealt whole and --tp-size cuts the dense layers alone.

Examples:
  marlinspike convert ./Qwen3-30B-A3B-GPTQ ./out --to marlin
  marlinspike convert model out --to marlin --tp-size 2 --tp-rank 1
  marlinspike convert model out --to marlin --input-dtype int8
  marlinspike convert model out --to kleidiai
  marlinspike convert model out --to flashinfer --nvfp4-backend VLLM_CUTLASS --skip-unsupported

--to kleidiai takes 4-bit weights without zero points and without act-order: compressed-tensors
W4A8 (int-quantized or pack-quantized) and W4A16, and GPTQ. Its files describe their layers in
their metadata, so that `marlinspike run` needs no more than the file.

--to flashinfer takes experts in NVFP4, and compressed-tensors W4A16 in groups of 32 (mxint4); the
rest of a model is copied with --skip-unsupported.

Experts are prepared as upstream prepares them: FP8 with one scale for a tensor is requantized to
the larger of w1's and w3's (--requantize), NVFP4 takes w1's global scale (--w13-scale), and
gpt-oss's sizes are rounded up to multiples of 256 and 128 (--no-padding).

An interrupted conversion is continued by the same command. Files that an earlier run finished are
hashed and, where they are not right, written again. One process at a time converts into a folder.

marlinspike-manifest.json in OUT_DIR has the SHA-256 of every input and output file;
`marlinspike convert --verify OUT_DIR` compares every byte with it.

Exit codes:
  0  every byte of the output was read back, is durable, and is in the manifest with its SHA-256;
     with --verify: every file has the SHA-256 that the manifest says
  1  --verify: files are damaged, missing or not listed; each is named
  2  bad input or usage, or modules that the format cannot take";

/// The kernel format to convert to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Target {
    /// Marlin's tiles, scales and orders.
    Marlin,
    /// KleidiAI's blocks of int4 columns, for CPUs: activations are quantized to int8 as they come.
    Kleidiai,
    /// FlashInfer's and CUTLASS's forms of 4-bit experts, for Blackwell: NVFP4, and int4 in groups of 32.
    Flashinfer,
}

/// The model's 16-bit type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum DtypeArg {
    /// What config.json says.
    #[default]
    Auto,
    /// IEEE half.
    Float16,
    /// bfloat16.
    Bfloat16,
}

/// Type of the activations inside the product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum InputArg {
    /// The model's own 16-bit type.
    #[default]
    Model,
    /// int8, quantized per token.
    Int8,
    /// e4m3, quantized per token.
    Fp8,
}

/// Convert a checkpoint into kernel format.
#[derive(Debug, Clone, clap::Args)]
#[command(after_long_help = DETAILS)]
pub struct Args {
    /// Folder with config.json and safetensors files.
    #[arg(required_unless_present = "verify")]
    pub model_dir: Option<PathBuf>,
    /// Folder for the converted model; made when it is not there.
    #[arg(required_unless_present = "verify")]
    pub out_dir: Option<PathBuf>,
    /// Kernel format.
    #[arg(long, value_enum, required_unless_present = "verify")]
    pub to: Option<Target>,
    /// Marlin: type of scales and biases.
    #[arg(long, value_enum, default_value_t)]
    pub dtype: DtypeArg,
    /// Marlin: type of the activations inside the product.
    #[arg(long, value_enum, default_value_t)]
    pub input_dtype: InputArg,
    /// How experts' numbers go into the format.
    #[command(flatten)]
    pub preparation: PreparationArgs,
    /// Marlin: keep the sizes of gpt-oss's experts, instead of rounding them up as upstream does.
    #[arg(long)]
    pub no_padding: bool,
    /// kleidiai: routing of the layers' tokens, as JSON, instead of the family's (see `run --help`).
    #[arg(long, value_name = "FILE")]
    pub routing: Option<PathBuf>,
    /// flashinfer: the kernel that NVFP4 is for, by upstream's name.
    #[arg(long, default_value = "FLASHINFER_TRTLLM", value_parser = crate::run::method::backend, value_name = "NAME")]
    pub nvfp4_backend: Nvfp4Backend,
    /// kleidiai: columns of a block, 4 or 8 [default: 8, as PyTorch packs].
    #[arg(long, value_name = "N", value_parser = clap::builder::PossibleValuesParser::new(["4", "8"]))]
    pub nr: Option<String>,
    /// Tensor-parallel ranks.
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = args::ranks)]
    pub tp_size: usize,
    /// This tensor-parallel rank.
    #[arg(long, default_value_t = 0, value_name = "R", value_parser = args::rank)]
    pub tp_rank: usize,
    /// Expert-parallel ranks.
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = args::ranks)]
    pub ep_size: usize,
    /// This expert-parallel rank.
    #[arg(long, default_value_t = 0, value_name = "R", value_parser = args::rank)]
    pub ep_rank: usize,
    /// Worker threads [default: one per core].
    #[arg(long, value_name = "N", value_parser = args::threads)]
    pub threads: Option<NonZero<usize>>,
    /// Most bytes of an output file, in GB; a larger layer has a file for itself.
    #[arg(long, default_value_t = 5.0, value_name = "GB", value_parser = args::shard_gb, allow_negative_numbers = true)]
    pub max_shard_size: f64,
    /// Copy modules that the format cannot take, instead of refusing the model.
    #[arg(long)]
    pub skip_unsupported: bool,
    /// Replace another conversion in OUT_DIR: removes the files that its manifest lists, and no others.
    #[arg(long)]
    pub force: bool,
    /// Convert nothing: hash every file of a converted folder and compare with its manifest.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["model_dir", "out_dir", "to", "force"])]
    pub verify: Option<PathBuf>,
    /// With --verify: hash the inputs in this model folder, too.
    #[arg(long, value_name = "MODEL_DIR", requires = "verify")]
    pub against: Option<PathBuf>,
    /// Print a summary as JSON on standard output, and no progress.
    #[arg(long)]
    pub json: bool,
}

/// What a finished conversion did.
#[derive(Debug, Clone, PartialEq)]
pub struct Summary {
    /// Converted stacks: dense layers, and w13 and w2 of each MoE layer.
    pub converted: usize,
    /// Tensors copied as they were.
    pub copied: usize,
    /// Of the converted stacks, those whose checkpoint keeps activations in 16 bits and which now
    /// quantize them to int8.
    pub activations_quantized: usize,
    /// Modules copied because the format cannot take them.
    pub unsupported: Vec<plan::Refused>,
    /// What preparation changed in the experts' numbers.
    pub notes: Vec<String>,
    /// Output files.
    pub files: usize,
    /// Of these, the ones that an earlier run had finished.
    pub kept: usize,
    /// Bytes of all output tensors.
    pub bytes: u64,
    /// Most memory that jobs took together, in bytes, as it is accounted for.
    pub peak_memory: u64,
    /// Files of an earlier run that were missing or had other bytes than its manifest says.
    pub rewritten: Vec<String>,
    /// The model's other files that were copied.
    pub side_files: Vec<String>,
    /// The model's other files that were not copied, with the reasons.
    pub left_out: Vec<LeftOut>,
    /// Whether an earlier run had finished everything, and every byte was verified now.
    pub already_complete: bool,
}

/// Runs the command.
///
/// # Errors
/// [`ConvertError`], with help.
pub fn run(args: &Args) -> anyhow::Result<Outcome> {
    let begun = Instant::now();
    if let Some(dir) = &args.verify {
        return verify::run(dir, args.against.as_deref(), args.json);
    }
    let (Some(model_dir), Some(out_dir)) = (&args.model_dir, &args.out_dir) else {
        anyhow::bail!("expected MODEL_DIR and OUT_DIR");
    };
    let files = ModelFiles::open(model_dir)?.with_routing(args.routing.as_deref())?;
    let model = Model::new(&files)?;
    let settings = settings(args, &model).map_err(explain)?;
    let threads = args.threads.or(NonZero::new(rayon::current_num_threads()));
    let threads = threads.unwrap_or(NonZero::<usize>::MIN);
    let execution = Execution { threads, memory: execute::MEMORY, stop_after: None };
    let done = convert(&model, out_dir, &settings, execution, args.force, args.json);
    let summary = done.map_err(explain)?;
    let seconds = begun.elapsed().as_secs_f64();
    if args.json {
        let unsupported = |r: &plan::Refused| json!({"module": r.module, "reasons": r.reasons});
        let left_out = |l: &LeftOut| json!({"name": l.name, "reason": l.reason});
        let value = json!({
            "converted": summary.converted,
            "activations_quantized": summary.activations_quantized,
            "copied_tensors": summary.copied,
            "unsupported": summary.unsupported.iter().map(unsupported).collect::<Vec<_>>(),
            "notes": summary.notes,
            "files": summary.files,
            "kept_files": summary.kept,
            "rewritten_files": summary.rewritten,
            "side_files": summary.side_files,
            "left_out": summary.left_out.iter().map(left_out).collect::<Vec<_>>(),
            "bytes": summary.bytes,
            "seconds": seconds,
            "already_complete": summary.already_complete,
        });
        print(&format!("{value}\n"))?;
        return Ok(Outcome::Pass);
    }
    if summary.already_complete {
        print(&format!("{}: already complete, every byte verified\n", out_dir.display()))?;
        return Ok(Outcome::Pass);
    }
    let mut text = format!(
        "converted {} layers to {}, copied {} tensors: {} in {} files, {seconds:.1} s\n",
        summary.converted,
        settings.format.name(),
        summary.copied,
        size(summary.bytes),
        summary.files,
    );
    if summary.kept > 0 {
        text.push_str(&format!("{} files were finished by an earlier run\n", summary.kept));
    }
    for name in &summary.rewritten {
        let line = format!("damaged since it was finished, and written again: {name}");
        text.push_str(&printable(&line));
        text.push('\n');
    }
    for l in &summary.left_out {
        text.push_str(&printable(&format!("not copied: {}: {}", l.name, l.reason)));
        text.push('\n');
    }
    if summary.activations_quantized > 0 {
        text.push_str(&format!(
            "{} of the layers had 16-bit activations (W4A16): they run as W4A8, with activations \
             quantized to int8 per token\n",
            summary.activations_quantized
        ));
    }
    for note in &summary.notes {
        text.push_str(&printable(note));
        text.push('\n');
    }
    for r in &summary.unsupported {
        let line = format!("copied unchanged: {}: {}", r.module, r.reasons.join("; "));
        text.push_str(&printable(&line));
        text.push('\n');
    }
    print(&text)?;
    Ok(Outcome::Pass)
}

/// Adds what to do about it.
fn explain(error: ConvertError) -> anyhow::Error {
    let help = match &error {
        ConvertError::Refused { .. } => {
            "`--skip-unsupported` copies these modules unchanged; `marlinspike inspect` shows all"
        }
        ConvertError::Dtype { .. } => "give `--dtype float16` or `--dtype bfloat16`",
        ConvertError::Occupied { .. } => {
            "name another folder; `--force` starts anew where a conversion is, and removes only the \
             files that its manifest lists"
        }
        ConvertError::Locked { .. } => "wait for it, or stop it: the lock ends with its process",
        ConvertError::InputChanged { .. } => "run again when nothing writes to the model folder",
        ConvertError::ReadBack { .. } => "another program or the disk changed it; run again",
        ConvertError::NoManifest { .. } => "give the output folder of a conversion",
        ConvertError::Io { .. } => "the same command continues; what was finished is kept",
        ConvertError::Manifest { .. } => "name another folder, or empty this one",
        ConvertError::NotQuantized { .. } => {
            "the folder needs a quantization_config in config.json, or a quantize_config.json"
        }
        _ => return error.into(),
    };
    Explained::new(error, help).into()
}

/// The settings that the arguments and the model's config imply.
///
/// # Errors
/// [`ConvertError::Dtype`]; an anyhow error for ranks out of range is given as
/// [`model::ModelError::Module`].
pub fn settings(args: &Args, model: &Model<'_>) -> Result<Settings, ConvertError> {
    let ranks = |what: &str, size: usize, rank: usize| {
        if rank < size {
            return Ok(Ranks { size, rank });
        }
        let reason = format!("rank {rank} of {size}");
        Err(ConvertError::from(model::ModelError::module(what, reason)))
    };
    let Some(to) = args.to else {
        return Err(model::ModelError::module("--to", "expected a kernel format").into());
    };
    let (input, device) = match args.input_dtype {
        InputArg::Model => (InputDtype::Model, Capability::cuda(8, 0)),
        InputArg::Int8 => (InputDtype::Int8, Capability::cuda(8, 0)),
        // FP8 activations exist for 8.9 and 12.0 alone.
        InputArg::Fp8 => (InputDtype::Fp8, Capability::cuda(8, 9)),
    };
    let format = match to {
        Target::Marlin => Format::Marlin,
        Target::Flashinfer => Format::Flashinfer { backend: args.nvfp4_backend },
        Target::Kleidiai => {
            Format::Kleidi { nr: if args.nr.as_deref() == Some("4") { 4 } else { 8 } }
        }
    };
    if to != Target::Kleidiai && args.nr.is_some() {
        return Err(model::ModelError::module("--nr", "only --to kleidiai has blocks").into());
    }
    if format != Format::Marlin && input != InputDtype::Model {
        let reason = "only --to marlin has a choice";
        return Err(model::ModelError::module("--input-dtype", reason).into());
    }
    Ok(Settings {
        format,
        dtype: match format {
            Format::Marlin => dtype(args.dtype, model)?,
            // Its scales and biases have types of their own.
            Format::Kleidi { .. } | Format::Flashinfer { .. } => ScalarType::BFLOAT16,
        },
        input,
        tp: ranks("--tp-rank", args.tp_size, args.tp_rank)?,
        ep: ranks("--ep-rank", args.ep_size, args.ep_rank)?,
        device,
        skip_unsupported: args.skip_unsupported,
        shard_bytes: (args.max_shard_size * 1e9) as u64,
        preparation: args.preparation.preparation(!args.no_padding),
    })
}

fn dtype(arg: DtypeArg, model: &Model<'_>) -> Result<ScalarType, ConvertError> {
    match arg {
        DtypeArg::Float16 => return Ok(ScalarType::FLOAT16),
        DtypeArg::Bfloat16 => return Ok(ScalarType::BFLOAT16),
        DtypeArg::Auto => {}
    }
    let found = model.config_value("dtype").or_else(|| model.config_value("torch_dtype"));
    let name = found.and_then(|v| v.as_str()).unwrap_or("not given in config.json");
    match name.trim_start_matches("torch.") {
        "float16" | "half" => Ok(ScalarType::FLOAT16),
        "bfloat16" => Ok(ScalarType::BFLOAT16),
        other => Err(ConvertError::Dtype { found: other.chars().take(60).collect() }),
    }
}

/// Converts an opened model.
///
/// # Errors
/// [`ConvertError`]. Finished files stay for the next run.
pub fn convert(
    model: &Model<'_>,
    out: &Path,
    settings: &Settings,
    execution: Execution,
    force: bool,
    quiet: bool,
) -> Result<Summary, ConvertError> {
    convert_to(&Disk, model, out, settings, execution, force, quiet)
}

/// As [`convert`], into a folder of `storage`.
///
/// # Errors
/// As [`convert`].
pub fn convert_to(
    storage: &dyn Storage,
    model: &Model<'_>,
    out: &Path,
    settings: &Settings,
    execution: Execution,
    force: bool,
    quiet: bool,
) -> Result<Summary, ConvertError> {
    if model.quant.is_none() {
        return Err(ConvertError::NotQuantized { dir: model.dir.clone() });
    }
    let layers = Layers::group(model)?;
    let plan = Plan::new(model, &layers, settings)?;
    if !plan.refused.is_empty() && !settings.skip_unsupported {
        let target = settings.format.title();
        return Err(ConvertError::Refused { target, refused: plan.refused });
    }
    // Experts that no rule refused by name would be left out without a word.
    let unseen = !layers.fused.is_empty() || plan.refused.is_empty() && has_experts(model);
    if plan.stacks.is_empty() && unseen {
        return Err(ConvertError::NothingConverted {
            target: settings.format.title(),
            refused: plan.refused,
        });
    }
    let items = || plan.shards.iter().flat_map(|s| &s.items);
    let mut summary = Summary {
        converted: plan.stacks.len(),
        copied: items().filter(|i| i.source == plan::Source::Copy).count(),
        activations_quantized: plan.stacks.iter().filter(|s| s.quantizes_activations()).count(),
        unsupported: plan.refused.clone(),
        notes: plan.notes.clone(),
        files: plan.shards.len(),
        kept: 0,
        bytes: plan.output_bytes(),
        peak_memory: 0,
        rewritten: Vec::new(),
        side_files: Vec::new(),
        left_out: Vec::new(),
        already_complete: false,
    };
    let side = SideFiles::list(model, &plan)?;
    let mut inputs = Inputs::list(model, &side)?;
    summary.side_files = side.copied.clone();
    summary.left_out = side.left_out.clone();
    let asked = Manifest::new(settings, inputs.records(), planned(&plan, &side))
        .with_routing(model.stated_routing);
    let mut folder = Folder::enter(storage, out, &model.dir, asked, &inputs, force)?;
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(execution.threads.get())
        .build()
        .map_err(|e| ConvertError::io(out)(std::io::Error::other(e.to_string())))?;
    let Kept { complete, damaged } = pool.install(|| {
        inputs.hash(model)?;
        folder.open(&inputs, force)
    })?;
    summary.rewritten = damaged;
    if complete {
        inputs.look_again(true)?;
        return Ok(Summary { already_complete: true, ..summary });
    }
    let constants = execute::constants(model, &plan, settings, &pool)?;
    let reporter = Reporter::new(plan.output_bytes(), quiet);
    let written = execute::write_shards(
        model,
        &plan,
        settings,
        &constants,
        &pool,
        &inputs,
        &mut folder,
        execution,
        &reporter,
    );
    reporter.finish();
    let written = written?;
    (summary.kept, summary.peak_memory) = (written.kept, written.peak_memory);
    side.copy(model, &inputs, &mut folder)?;
    if plan.shards.len() > 1 {
        folder.write(model::INDEX, format!("{:#}\n", config::index(&plan)).as_bytes())?;
    }
    let config = config::config(model, &plan, settings, &constants, &folder.identity());
    folder.write("config.json", format!("{config:#}\n").as_bytes())?;
    if let Err(changed) = inputs.look_again(true) {
        folder.distrust()?;
        return Err(changed);
    }
    folder.complete()?;
    Ok(summary)
}

/// The names that a conversion writes.
fn planned(plan: &Plan, side: &SideFiles) -> Vec<String> {
    let mut names: Vec<_> = plan.shards.iter().map(|s| s.name.clone()).collect();
    names.extend((plan.shards.len() > 1).then(|| model::INDEX.to_owned()));
    names.push("config.json".to_owned());
    names.extend(side.copied.iter().cloned());
    names
}
