//! The arguments of `convert`, and the options that they mean.

use std::num::NonZero;
use std::path::PathBuf;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use marlinspike::layouts::marlin::InputDtype;
use marlinspike::num::scalar::ScalarType;
use marlinspike_model::convert::parallel::Ranks;
use marlinspike_model::convert::settings::{Format, Options};
use marlinspike_model::model::ModelError;

use super::choices::ChoiceArgs;
use super::preparation::PreparationArgs;
use crate::args;

const LAYERS: &str = "\
A dense layer has <module>.<name>; experts <...experts>.w13_<name> and w2_<name>, gate before up
(gpt-oss keeps its rows of gate and up alternating, as its activation reads them).

Tensor parallelism, by the module's name:
  N is cut       q_proj k_proj v_proj gate_proj up_proj w1 w3 q_b_proj kv_b_proj fc1 lm_head
  K is cut       o_proj down_proj w2 out_proj fc2
  whole          every other module, and every tensor that is not quantized
A row-parallel rank keeps the whole bias, which only rank 0 may add; with act-order it keeps all
scales. With --ep-size above 1 experts are dealt whole and --tp-size cuts the dense layers alone.";

const WORK: &str = "\
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

/// The long help: common parts, and what each format says of itself.
fn details() -> String {
    let formats = || Format::ALL.iter().map(|format| format.descriptor());
    let tensors: Vec<_> = formats().map(|d| d.tensors).collect();
    let examples = formats().flat_map(|d| d.examples);
    let examples: Vec<_> = examples.map(|e| format!("  marlinspike convert {e}")).collect();
    let takes: Vec<_> = formats().map(|d| d.takes).filter(|takes| !takes.is_empty()).collect();
    format!(
        "Names of the converted tensors (E experts first, where there are experts):\n{}\n{LAYERS}\n\n\
         Examples:\n{}\n\n{}\n\n{WORK}",
        tensors.join("\n"),
        examples.join("\n"),
        takes.join("\n\n"),
    )
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

/// The formats by name.
fn formats() -> impl TypedValueParser<Value = Format> {
    let value = |f: &Format| PossibleValue::new(f.name()).help(f.descriptor().about);
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
    /// How experts' numbers go into the format.
    #[command(flatten)]
    pub preparation: PreparationArgs,
    /// Marlin: keep the sizes of gpt-oss's experts, instead of rounding them up as upstream does.
    #[arg(long)]
    pub no_padding: bool,
    /// kleidiai: routing of the layers' tokens, as JSON, instead of the family's (see `run --help`).
    #[arg(long, value_name = "FILE")]
    pub routing: Option<PathBuf>,
    /// The options that one format alone has.
    #[command(flatten)]
    pub choices: ChoiceArgs,
}

/// Which rank's part of the model.
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

/// Convert a checkpoint into kernel format.
#[derive(Debug, Clone, clap::Args)]
#[command(after_long_help = details())]
pub struct Args {
    /// Folder with config.json and safetensors files.
    #[arg(required_unless_present = "verify")]
    pub model_dir: Option<PathBuf>,
    /// Folder for the converted model; made when it is not there.
    #[arg(required_unless_present = "verify")]
    pub out_dir: Option<PathBuf>,
    /// Kernel format.
    #[arg(long, value_parser = formats(), required_unless_present = "verify")]
    pub to: Option<Format>,
    /// Options of the formats.
    #[command(flatten)]
    pub format: FormatArgs,
    /// Which rank's part.
    #[command(flatten)]
    pub ranks: RankArgs,
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

impl Args {
    /// The options of a conversion to `to`.
    ///
    /// # Errors
    /// For an option that the format does not have.
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
        options.shard_bytes = (self.max_shard_size * 1e9) as u64;
        options.preparation = self.format.preparation.preparation(!self.format.no_padding);
        options.routing = self.format.routing.clone();
        options.force = self.force;
        if let Some(threads) = self.threads {
            options.execution.threads = threads;
        }
        Ok(options)
    }
}
