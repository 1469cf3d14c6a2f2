//! `--backend`: the devices that compute instead of the reference.

use anyhow::Result;

#[cfg(feature = "cuda")]
pub(crate) use marlinspike_accel::Device;

/// Names of `--backend`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Backend {
    /// This project's CUDA kernels, on the first device (needs the cargo feature `cuda`).
    Cuda,
}

/// A device; the type has no values in a build without the feature `cuda`.
#[cfg(not(feature = "cuda"))]
pub(crate) enum Device {}

/// Opens the backend's device.
///
/// # Errors
/// Names the missing device, driver or library, or the feature that this build lacks.
pub(crate) fn open(backend: Backend) -> Result<Device> {
    match backend {
        #[cfg(feature = "cuda")]
        Backend::Cuda => Device::open().map_err(crate::error::of_gpu),
        #[cfg(not(feature = "cuda"))]
        Backend::Cuda => Err(crate::absent::feature("`--backend cuda`", "cuda")),
    }
}
