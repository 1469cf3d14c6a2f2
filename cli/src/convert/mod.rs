//! `convert`: a checkpoint into a kernel's format, and `convert --verify`.

pub mod preparation;
mod progress;
mod verify;

use std::num::NonZero;
use std::path::PathBuf;
use std::time::Instant;

use marlinspike::layout::flashinfer::Nvfp4Backend;
use marlinspike::layout::marlin::InputDtype;
use marlinspike::scalar::ScalarType;
use marlinspike_model::convert::error::{ConvertError, Refused};
use marlinspike_model::convert::parallel::Ranks;
use marlinspike_model::convert::settings::{Format, Options};
use marlinspike_model::convert::side::LeftOut;
use marlinspike_model::convert::{self, Summary};
use marlinspike_model::model::ModelError;
use serde_json::json;

use crate::error::Explained;
use crate::output::print;
use crate::style::{printable, size};
use crate::{Outcome, args};
use preparation::PreparationArgs;
use progress::Reporter;

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
    #[arg(long, default_value = "FLASHINFER_TRTLLM", value_parser = preparation::backend, value_name = "NAME")]
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

/// Runs the command.
///
/// # Errors
/// What the conversion is refused for, with help.
pub fn run(args: &Args) -> anyhow::Result<Outcome> {
    let begun = Instant::now();
    if let Some(dir) = &args.verify {
        return verify::run(dir, args.against.as_deref(), args.json);
    }
    let (Some(model_dir), Some(out_dir)) = (&args.model_dir, &args.out_dir) else {
        anyhow::bail!("expected MODEL_DIR and OUT_DIR");
    };
    let options = options(args)?;
    let done = match args.json {
        true => convert::convert(model_dir, out_dir, &options, &()),
        false => convert::convert(model_dir, out_dir, &options, &Reporter::new()),
    };
    let summary = done.map_err(explain)?;
    let seconds = begun.elapsed().as_secs_f64();
    print(&match args.json {
        true => as_json(&summary, seconds),
        false if summary.already_complete => {
            format!("{}: already complete, every byte verified\n", out_dir.display())
        }
        false => as_text(&summary, options.format, seconds),
    })?;
    Ok(Outcome::Pass)
}

/// The summary as one JSON object on one line.
fn as_json(summary: &Summary, seconds: f64) -> String {
    let unsupported = |r: &Refused| json!({"module": r.module, "reasons": r.reasons});
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
    format!("{value}\n")
}

/// The summary for people.
fn as_text(summary: &Summary, format: Format, seconds: f64) -> String {
    let mut text = format!(
        "converted {} layers to {}, copied {} tensors: {} in {} files, {seconds:.1} s\n",
        summary.converted,
        format.name(),
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
    text
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

/// The options that the arguments say.
///
/// # Errors
/// For an option that the format does not have.
fn options(args: &Args) -> Result<Options, ModelError> {
    let Some(to) = args.to else {
        return Err(ModelError::module("--to", "expected a kernel format"));
    };
    if to != Target::Kleidiai && args.nr.is_some() {
        return Err(ModelError::module("--nr", "only --to kleidiai has blocks"));
    }
    let mut options = Options::new(match to {
        Target::Marlin => Format::Marlin,
        Target::Flashinfer => Format::Flashinfer { backend: args.nvfp4_backend },
        Target::Kleidiai => {
            Format::Kleidi { nr: if args.nr.as_deref() == Some("4") { 4 } else { 8 } }
        }
    });
    options.dtype = match args.dtype {
        DtypeArg::Auto => None,
        DtypeArg::Float16 => Some(ScalarType::FLOAT16),
        DtypeArg::Bfloat16 => Some(ScalarType::BFLOAT16),
    };
    options.input = match args.input_dtype {
        InputArg::Model => InputDtype::Model,
        InputArg::Int8 => InputDtype::Int8,
        InputArg::Fp8 => InputDtype::Fp8,
    };
    if to != Target::Marlin && options.input != InputDtype::Model {
        return Err(ModelError::module("--input-dtype", "only --to marlin has a choice"));
    }
    options.tp = Ranks { size: args.tp_size, rank: args.tp_rank };
    options.ep = Ranks { size: args.ep_size, rank: args.ep_rank };
    options.skip_unsupported = args.skip_unsupported;
    options.shard_bytes = (args.max_shard_size * 1e9) as u64;
    options.preparation = args.preparation.preparation(!args.no_padding);
    options.routing = args.routing.clone();
    options.force = args.force;
    if let Some(threads) = args.threads {
        options.execution.threads = threads;
    }
    Ok(options)
}
