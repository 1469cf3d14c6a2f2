//! Why a layer does not run.

use marlinspike::Error;

use crate::convert::error::ConvertError;
use crate::map::MapError;
use crate::model::ModelError;

/// Why a device did not compute a layer.
pub type DeviceError = Box<dyn std::error::Error + Send + Sync>;

/// A layer that did not run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// The model folder is malformed.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A file cannot be mapped.
    #[error(transparent)]
    Map(#[from] MapError),
    /// The int4 path cannot take the layer.
    #[error(transparent)]
    Refused(ConvertError),
    /// Activations, or the layer as it runs.
    #[error(transparent)]
    Layer(#[from] Error),
    /// A tensor of a module is refused by its format or method.
    #[error("{module}: {source}")]
    Weight {
        /// The module.
        module: String,
        /// Why.
        source: Box<Error>,
    },
    /// No layer has the wanted name.
    #[error("--layer: found no layer `{wanted}` that runs")]
    NoSuchLayer {
        /// The name.
        wanted: String,
    },
    /// A model without layers that run.
    #[error("the model has no layer that runs")]
    NoLayer,
    /// Routing was given for files that already state it.
    #[error("--routing: found packed int4 layers, whose files state their routing")]
    PackedRouting,
    /// The layer's experts are in a form that is not read.
    #[error("module `{module}`: {reason}")]
    Fused {
        /// The module.
        module: String,
        /// The tensors found, and what is read instead.
        reason: String,
    },
    /// The CPU or the format of the weights lacks the kernel.
    #[error("--kernel: found {found:?}, which this CPU lacks for these weights")]
    Kernel {
        /// The wanted name.
        found: String,
        /// The names of this CPU's kernels for them.
        known: Vec<&'static str>,
    },
    /// A device did not compute the layer.
    #[error("{module}: {source}")]
    Device {
        /// The module.
        module: String,
        /// What the device refuses, or why it failed.
        source: DeviceError,
    },
    /// A device runs the canonical schedule alone.
    #[error(
        "--arithmetic: found {found}, expected canonical, the schedule of the device's kernels"
    )]
    Arithmetic {
        /// The wanted arithmetic.
        found: &'static str,
    },
    /// Threads cannot be started.
    #[error("worker threads: {reason}")]
    Threads {
        /// The system's reason.
        reason: String,
    },
}

impl RunError {
    /// A layer in a form that no device computes.
    pub(super) fn no_kernel(module: &str, found: &str) -> Self {
        let source = format!(
            "found {found}, expected quantized weights of a checkpoint or of a folder converted for GPUs"
        );
        Self::Device { module: module.to_owned(), source: source.into() }
    }

    pub(super) fn weight(module: &str) -> impl FnOnce(Error) -> Self + '_ {
        |source| Self::Weight { module: module.to_owned(), source: Box::new(source) }
    }
}
