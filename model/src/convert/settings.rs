//! Options and settings of a conversion.

use std::num::NonZero;
use std::path::PathBuf;

use marlinspike::layouts::marlin::InputDtype;
use marlinspike::num::scalar::ScalarType;
use marlinspike::select::Capability;

use super::error::ConvertError;
pub use super::format::Format;
use super::parallel::Ranks;
use crate::load::preparation::Preparation;
use crate::model::Model;

/// Default memory limit of all jobs in progress, in bytes.
pub const MEMORY: u64 = 1 << 30;

/// Default size limit of an output file, in bytes.
const SHARD_BYTES: u64 = 5_000_000_000;

/// Everything besides the model that decides the output, made by [`Options::settings`].
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// The kernel format.
    pub format: Format,
    /// Marlin: the model's 16-bit type.
    pub dtype: ScalarType,
    /// Marlin: activations inside the product.
    pub input: InputDtype,
    /// Tensor parallelism.
    pub tp: Ranks,
    /// Expert parallelism.
    pub ep: Ranks,
    /// Marlin: the device that the kernel is for.
    pub device: Capability,
    /// Whether to copy modules that the format cannot take.
    pub skip_unsupported: bool,
    /// Whether scales may become 0 in the kernel's type.
    pub allow_underflow: bool,
    /// Size limit of a shard, in bytes; a larger layer gets a shard of its own.
    pub shard_bytes: u64,
    /// How experts are prepared for the format.
    pub preparation: Preparation,
    /// Whether linear layers are merged as upstream's models merge them.
    pub merge_projections: bool,
}

impl Settings {
    /// One rank, upstream's preparation, modules that `format` cannot take copied.
    pub fn new(format: Format) -> Self {
        Self {
            format,
            dtype: ScalarType::BFLOAT16,
            input: InputDtype::Model,
            tp: Ranks::ONE,
            ep: Ranks::ONE,
            device: Capability::cuda(8, 0),
            skip_unsupported: true,
            allow_underflow: false,
            shard_bytes: u64::MAX,
            preparation: Preparation::UPSTREAM,
            merge_projections: false,
        }
    }
}

/// Threads and memory for running a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Execution {
    /// Worker threads.
    pub threads: NonZero<usize>,
    /// Memory limit of all jobs in progress, in bytes. It does not include mapped inputs, the
    /// system's cache and a few bytes for each tensor's name.
    pub memory: u64,
    /// Stop after this run has finished this many files. For tests of resumption.
    pub stop_after: Option<usize>,
}

impl Default for Execution {
    /// One thread for each core, [`MEMORY`].
    fn default() -> Self {
        let threads = NonZero::new(rayon::current_num_threads());
        let threads = threads.unwrap_or(NonZero::<usize>::MIN);
        Self { threads, memory: MEMORY, stop_after: None }
    }
}

/// Options of a conversion.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Options {
    /// The kernel format.
    pub format: Format,
    /// Marlin: type of scales and biases; `None`: the type that `config.json` states.
    pub dtype: Option<ScalarType>,
    /// Marlin: type of the activations inside the product.
    pub input: InputDtype,
    /// Tensor parallelism.
    pub tp: Ranks,
    /// Expert parallelism.
    pub ep: Ranks,
    /// Whether to copy modules that the format cannot take; otherwise they are an error.
    pub skip_unsupported: bool,
    /// Whether scales may become 0 in the kernel's type; otherwise they are an error.
    pub allow_underflow: bool,
    /// Size limit of an output file, in bytes; a larger layer gets a file of its own.
    pub shard_bytes: u64,
    /// How experts are prepared for the format.
    pub preparation: Preparation,
    /// Whether `q_proj`, `k_proj` and `v_proj` become `qkv_proj`, and `gate_proj` and `up_proj` of
    /// linear layers `gate_up_proj`, as upstream's models merge them.
    pub merge_projections: bool,
    /// A JSON file with the routing of the layers' tokens, instead of the family's.
    pub routing: Option<PathBuf>,
    /// Whether to replace another conversion in the output folder.
    pub force: bool,
    /// Threads and memory.
    pub execution: Execution,
}

impl Options {
    /// The whole model into `format`, prepared as upstream does.
    pub fn new(format: Format) -> Self {
        Self {
            format,
            dtype: None,
            input: InputDtype::Model,
            tp: Ranks::ONE,
            ep: Ranks::ONE,
            skip_unsupported: false,
            allow_underflow: false,
            shard_bytes: SHARD_BYTES,
            preparation: Preparation::UPSTREAM,
            merge_projections: false,
            routing: None,
            force: false,
            execution: Execution::default(),
        }
    }

    /// What they mean for `model`.
    ///
    /// # Errors
    /// [`ConvertError::Dtype`], [`ConvertError::Rank`], [`ConvertError::Activations`].
    pub fn settings(&self, model: &Model<'_>) -> Result<Settings, ConvertError> {
        if !self.format.descriptor().model_dtype && self.input != InputDtype::Model {
            return Err(ConvertError::Activations { format: self.format.name() });
        }
        for (name, Ranks { size, rank }) in [("tp_rank", self.tp), ("ep_rank", self.ep)] {
            if rank >= size {
                return Err(ConvertError::Rank { name, rank, size });
            }
        }
        let dtype = match (self.format.descriptor().model_dtype, self.dtype) {
            (true, Some(dtype)) => dtype,
            (true, None) => dtype(model)?,
            // Its scales and biases have types of their own.
            (false, _) => ScalarType::BFLOAT16,
        };
        let device = match self.input {
            InputDtype::Model | InputDtype::Int8 => Capability::cuda(8, 0),
            // FP8 activations exist only for 8.9 and 12.0.
            InputDtype::Fp8 => Capability::cuda(8, 9),
        };
        Ok(Settings {
            format: self.format,
            dtype,
            input: self.input,
            tp: self.tp,
            ep: self.ep,
            device,
            skip_unsupported: self.skip_unsupported,
            allow_underflow: self.allow_underflow,
            shard_bytes: self.shard_bytes,
            preparation: self.preparation,
            merge_projections: self.merge_projections,
        })
    }
}

/// The model's 16-bit type.
fn dtype(model: &Model<'_>) -> Result<ScalarType, ConvertError> {
    let found = model.config_value("dtype").or_else(|| model.config_value("torch_dtype"));
    let name = found.and_then(|v| v.as_str()).unwrap_or("not given in config.json");
    match name.trim_start_matches("torch.") {
        "float16" | "half" => Ok(ScalarType::FLOAT16),
        "bfloat16" => Ok(ScalarType::BFLOAT16),
        other => Err(ConvertError::Dtype { found: other.chars().take(60).collect() }),
    }
}
