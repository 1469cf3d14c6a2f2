//! Errors, one variant per failure.

use std::path::PathBuf;

use candle_core::{DType, DeviceLocation};
use marlinspike_model::model::ModelError;

/// A layer that cannot be loaded, or a tensor that it does not take.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A tensor of another shape.
    #[error("{module}: {tensor}: found shape {found:?}, expected {expected}")]
    Shape {
        /// The layer.
        module: String,
        /// The tensor.
        tensor: &'static str,
        /// Its dimensions.
        found: Vec<usize>,
        /// The dimensions that the layer takes.
        expected: String,
    },
    /// A tensor of another type.
    #[error("{module}: {tensor}: found {found:?}, expected F32, BF16 or F16")]
    Dtype {
        /// The layer.
        module: String,
        /// The tensor.
        tensor: &'static str,
        /// Its type.
        found: DType,
    },
    /// A tensor on another device.
    #[error("{module}: {tensor}: found a tensor on {found:?}, expected one on the CPU")]
    Device {
        /// The layer.
        module: String,
        /// The tensor.
        tensor: &'static str,
        /// Its device.
        found: DeviceLocation,
    },
    /// A tensor of packed weights, or one that they do not multiply.
    #[error("{module}: {tensor}: found {found}, expected {expected}")]
    Packed {
        /// The layer.
        module: String,
        /// The tensor.
        tensor: String,
        /// What it is.
        found: String,
        /// What the layer takes.
        expected: String,
    },
    /// A backward pass.
    #[error(
        "{module}: found a backward pass, expected inference only; `detach` the layer's input to \
         leave the layer out of the gradient"
    )]
    Gradient {
        /// The layer.
        module: String,
    },
    /// Values or sizes that the layer does not take.
    #[error("{module}: {source}")]
    Layer {
        /// The layer.
        module: String,
        /// The reason, with the tensor's name.
        source: marlinspike::Error,
    },
    /// A part of a block that is not computed.
    #[error("{module}: found {found}, expected a block without: it is not computed")]
    Unsupported {
        /// The experts of the block.
        module: String,
        /// The part.
        found: String,
    },
    /// A folder that cannot be read.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A folder without packed layers.
    #[error("{}: found {found}, expected a folder of `marlinspike convert --to kleidiai`", dir.display())]
    NotPacked {
        /// The folder.
        dir: PathBuf,
        /// What it is.
        found: String,
    },
    /// A part of a layer, for one of several ranks.
    #[error("{place}: found one rank's part, expected a model converted without ranks")]
    Rank {
        /// The folder or the layer.
        place: String,
    },
    /// A module that the folder does not have.
    #[error("{}: found no packed layer `{module}`, expected one of {known}", dir.display())]
    NoModule {
        /// The folder.
        dir: PathBuf,
        /// The module.
        module: String,
        /// Some of the modules that it has.
        known: String,
    },
}

impl Error {
    /// Adds a layer's name to a reason.
    pub(crate) fn layer(module: &str) -> impl Fn(marlinspike::Error) -> Self {
        let module = module.to_owned();
        move |source| Self::Layer { module: module.clone(), source }
    }
}

impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        Self::wrap(error)
    }
}

/// Result of loading a layer.
pub type Result<T, E = Error> = std::result::Result<T, E>;
