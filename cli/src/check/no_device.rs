//! The backends of a build without the `cuda` feature: named on the command line, and refused.
//!
//! The types have the names of [`marlinspike_accel`](https://docs.rs/marlinspike-accel)'s and no
//! values, so that the rest of `check` is the same in every build.

use std::collections::BTreeMap;
use std::convert::Infallible;

use anyhow::Result;
use marlinspike::case::Case;
use marlinspike::check::{CaseReport, Declared};
use serde_json::Value;

use super::Checked;
use crate::absent;

/// What can be checked in place of the recorded outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Backend {
    /// This project's CUDA kernels, on the first device (needs the `cuda` feature)
    Cuda,
}

/// A device; there is none.
pub(super) enum Device {}

/// An error of a device; there is none.
pub(super) type DeviceError = Infallible;

/// The comparisons made per operation; there are none.
pub(super) type Counts = BTreeMap<&'static str, Infallible>;

/// Why a case could not be checked.
#[derive(Debug, thiserror::Error)]
pub(super) enum BackendError {
    /// The device failed.
    #[error(transparent)]
    Accel(#[from] DeviceError),
    /// An input of the case cannot be used.
    #[error(transparent)]
    Case(#[from] marlinspike::Error),
}

/// A verdict on a device's outputs.
pub(super) struct OnDevice {
    pub(super) report: CaseReport,
    pub(super) counts: Counts,
}

pub(super) fn check(device: &Device, _: &Case<'_>, _: &Declared) -> Result<OnDevice, BackendError> {
    match *device {}
}

/// The backend's device.
///
/// # Errors
/// Always: this build has no backend.
pub(super) fn open(backend: Backend) -> Result<Device> {
    match backend {
        Backend::Cuda => Err(absent::feature("`--backend cuda`", "cuda")),
    }
}

/// No case asks for a compiler here.
///
/// # Errors
/// Never.
pub(super) fn without_compiler(_: &[Checked]) -> Result<()> {
    Ok(())
}

/// The comparisons made on a device; there are none.
pub(super) enum Tally {}

impl Tally {
    pub(super) fn new(device: &Device, _: Vec<Counts>, _: &[Checked]) -> Self {
        match *device {}
    }

    pub(super) fn lines(&self) -> Vec<(&'static str, String)> {
        match *self {}
    }

    pub(super) fn json(&self) -> Value {
        match *self {}
    }
}
