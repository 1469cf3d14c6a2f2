//! The arguments of `convert`, and their conversion to options of the library.

use std::num::NonZero;
use std::path::PathBuf;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use marlinspike::formats::{self, titles};
use marlinspike::layouts::marlin::InputDtype;
use marlinspike::num::scalar::ScalarType;
use marlinspike_model::convert::parallel::Ranks;
use marlinspike_model::convert::settings::{Format, Options};
use marlinspike_model::model::ModelError;

use super::choices::ChoiceArgs;
use super::preparation::PreparationArgs;
use crate::args;

const LAYERS: &str = "\
Tensors of a dense layer are named <module>.<name>, those of experts <...experts>.w13_<name> and
w2_<name>, gate before up. Gate and up rows that alternate in the checkpoint still alternate,
because the activation reads them in that order.

Tensor parallelism, by the module's name:
  N is cut       q_proj k_proj v_proj gate_proj up_proj w1 w3 q_b_proj kv_b_proj fc1 lm_head
  K is cut       o_proj down_proj w2 out_proj fc2
  not cut        every other module, and every tensor that is not quantized
A row-parallel rank keeps the whole bias, which only rank 0 may add; with act-order it keeps all
scales. With --ep-size above 1 each rank gets whole experts, and --tp-size cuts only dense layers.

With --merge-projections the columns of a rank's q_proj, k_proj and v_proj become one layer, qkv_proj,
and those of gate_proj and up_proj become gate_up_proj, like the parameters of a loaded engine.";

/// How experts are prepared, by the formats that each step concerns.
fn preparation() -> String {
    let (scaled, stacked) =
        (titles(formats::Format::has_global_scale), titles(formats::Format::has_stacks));
    format!(
        "\
Experts are prepared as upstream prepares them. FP8 experts with one scale per tensor are
requantized to the larger scale of w1 and w3 (--requantize). {scaled} experts take the global scale of
w1 (--w13-scale). {stacked} experts get sizes that are multiples of 256 and 128 (--no-padding)."
    )
}

const WORK: &str = "\
The same command continues an interrupted conversion: it hashes the files that are finished and
writes damaged ones again. Only one process at a time may convert into a folder.

marlinspike-manifest.json in OUT_DIR has the SHA-256 of every input and output file;
`marlinspike convert --verify OUT_DIR` checks every file against it.

Exit codes:
  0  every byte of the output was read back, is on stable storage, and is in the manifest with its
     SHA-256; with --verify: every file has the SHA-256 of the manifest
  1  --verify: files are damaged, missing or not in the manifest; each is named
  2  bad input or usage, or modules that the format does not support";

/// The long help: common parts, and what each format says of itself.
fn details() -> String {
    let formats = || Format::ALL.iter().map(|format| format.descriptor());
    let tensors: Vec<_> = formats().map(|d| format!("  {}", (d.tensors)())).collect();
    let examples = formats().flat_map(|d| d.example_lines());
    let examples: Vec<_> = examples.map(|e| format!("marlinspike convert {e}")).collect();
    let takes = formats().map(|d| (d.name, (d.takes)())).filter(|(_, takes)| !takes.is_empty());
    let takes: Vec<_> = takes.map(|(name, takes)| format!("--to {name} takes {takes}")).collect();
    format!(
        "Example: {}\n\n\
         Names of the converted tensors (experts have a leading dimension E):\n{}\n{LAYERS}\n\n\
         Examples:\n  {}\n\n{}\n\n{}\n\n{WORK}",
        examples[0],
        tensors.join("\n"),
        examples.join("\n  "),
        takes.join("\n\n"),
        preparation(),
    )
}

/// The model's 16-bit type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum DtypeArg {
    /// The type that config.json states.
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

/// A parser of format names.
fn formats() -> impl TypedValueParser<Value = Format> {
    let value = |f: &Format| PossibleValue::new(f.name()).help((f.descriptor().about)());
    let found = |name: String| Format::from_name(&name).ok_or("no format has this name");
    PossibleValuesParser::new(Format::ALL.iter().map(value)).try_map(found)
}

/// Options of the formats.
#[derive(Debug, Clone, clap::Args)]
pub struct FormatArgs {
    /// Marlin: type of scales and biases.
    #[arg(long, value_enum, default_value_t)]
    pub dtype: DtypeArg,
    /// Marlin: type of the activations inside the product.
    #[arg(long, value_enum, default_value_t)]
    pub input_dtype: InputArg,
    /// How experts are prepared.
    #[command(flatten)]
    pub preparation: PreparationArgs,
    /// Marlin: keep the sizes of gpt-oss experts instead of rounding them up as upstream does.
    #[arg(long)]
    pub no_padding: bool,
    /// Write q_proj, k_proj and v_proj as qkv_proj, and gate_proj and up_proj of linear layers as
    /// gate_up_proj, as upstream's models merge them.
    #[arg(long)]
    pub merge_projections: bool,
    /// kleidiai: routing rule as JSON, instead of the model family's (see `run --help`).
    #[arg(long, value_name = "FILE")]
    pub routing: Option<PathBuf>,
    /// The options of single formats.
    #[command(flatten)]
    pub choices: ChoiceArgs,
}

/// The rank whose part of the model is converted.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct RankArgs {
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
}

/// Convert a checkpoint into a kernel's format.
#[derive(Debug, Clone, clap::Args)]
#[command(after_long_help = details())]
pub struct Args {
    /// Folder with config.json and safetensors files.
    #[arg(required_unless_present = "verify")]
    pub model_dir: Option<PathBuf>,
    /// Folder for the converted model; created if it does not exist.
    #[arg(required_unless_present = "verify")]
    pub out_dir: Option<PathBuf>,
    /// Kernel format.
    #[arg(long, value_parser = formats(), required_unless_present = "verify")]
    pub to: Option<Format>,
    /// Options of the formats.
    #[command(flatten)]
    pub format: FormatArgs,
    /// The rank whose part is converted.
    #[command(flatten)]
    pub ranks: RankArgs,
    /// Worker threads [default: one per core].
    #[arg(long, value_name = "N", value_parser = args::threads)]
    pub threads: Option<NonZero<usize>>,
    /// Largest output file, in GB; a larger layer gets its own file.
    #[arg(long, default_value_t = 5.0, value_name = "GB", value_parser = args::shard_gb, allow_negative_numbers = true)]
    pub max_shard_size: f64,
    /// Copy modules that the format does not support instead of refusing the model.
    #[arg(long)]
    pub skip_unsupported: bool,
    /// Marlin: write scales that become 0 in the kernel's type instead of refusing their layer. The
    /// manifest states it.
    #[arg(long)]
    pub allow_underflow: bool,
    /// Replace another conversion in OUT_DIR; removes only the files that its manifest lists.
    #[arg(long)]
    pub force: bool,
    /// Convert nothing; hash every file of a converted folder and compare it with its manifest.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["model_dir", "out_dir", "to", "force"])]
    pub verify: Option<PathBuf>,
    /// With --verify: also hash the inputs in this model folder.
    #[arg(long, value_name = "MODEL_DIR", requires = "verify")]
    pub against: Option<PathBuf>,
    /// Print a JSON summary on standard output and no progress.
    #[arg(long)]
    pub json: bool,
}

impl Args {
    /// The options of a conversion to `to`.
    ///
    /// # Errors
    /// Returns an error for an option that the format does not have.
    pub(super) fn options(&self, to: Format) -> Result<Options, ModelError> {
        let mut options = Options::new(self.format.choices.apply(to)?);
        options.dtype = match self.format.dtype {
            DtypeArg::Auto => None,
            DtypeArg::Float16 => Some(ScalarType::FLOAT16),
            DtypeArg::Bfloat16 => Some(ScalarType::BFLOAT16),
        };
        options.input = match self.format.input_dtype {
            InputArg::Model => InputDtype::Model,
            InputArg::Int8 => InputDtype::Int8,
            InputArg::Fp8 => InputDtype::Fp8,
        };
        let RankArgs { tp_size, tp_rank, ep_size, ep_rank } = self.ranks;
        options.tp = Ranks { size: tp_size, rank: tp_rank };
        options.ep = Ranks { size: ep_size, rank: ep_rank };
        options.skip_unsupported = self.skip_unsupported;
        options.allow_underflow = self.allow_underflow;
        options.shard_bytes = (self.max_shard_size * 1e9) as u64;
        options.preparation = self.format.preparation.preparation(!self.format.no_padding);
        options.merge_projections = self.format.merge_projections;
        options.routing = self.format.routing.clone();
        options.force = self.force;
        if let Some(threads) = self.threads {
            options.execution.threads = threads;
        }
        Ok(options)
    }
}
