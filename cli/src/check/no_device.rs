//! Judging a backend's outputs in a build without the `cuda` feature, where no device opens.
//!
//! The types mirror those of [`marlinspike_accel`](https://docs.rs/marlinspike-accel) but have no
//! values, so the rest of `check` is the same in every build.

use std::collections::BTreeMap;
use std::convert::Infallible;

use anyhow::Result;
use marlinspike::case::Case;
use marlinspike::check::{CaseReport, Declared};
use serde_json::Value;

use super::Checked;

pub(super) use crate::backend::Device;

/// An error of a device; the type has no values.
pub(super) type DeviceError = Infallible;

/// The comparisons made per operation; always empty.
pub(super) type Counts = BTreeMap<&'static str, Infallible>;

/// The reason why a case could not be checked.
#[derive(Debug, thiserror::Error)]
pub(super) enum BackendError {
    /// The device failed.
    #[error(transparent)]
    Accel(#[from] DeviceError),
    /// An input of the case is invalid.
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

/// Without a device, no case needs a compiler.
///
/// # Errors
/// Never.
pub(super) fn without_compiler(_: &[Checked]) -> Result<()> {
    Ok(())
}

/// The comparisons made on a device; the type has no values.
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
