//! `run --backend` in a build without the `cuda` feature, where no device opens.

use marlinspike::moe::layer::{Layer, Routed};
use marlinspike::num::scalar::ScalarType;
use marlinspike::weight::Weight;
use marlinspike_model::run::device::{Computed, Device, DeviceError};

use crate::backend;

/// A device; the type has no values.
pub(super) struct Gpu(pub(super) backend::Device);

impl Device for Gpu {
    fn name(&self) -> String {
        match self.0 {}
    }

    fn linear(
        &self,
        _: &Weight<'_>,
        _: ScalarType,
        _: &[u16],
        _: usize,
    ) -> Result<Computed, DeviceError> {
        match self.0 {}
    }

    fn experts(
        &self,
        _: &Layer<'_>,
        _: Routed<'_>,
        _: &[u16],
        _: usize,
    ) -> Result<Computed, DeviceError> {
        match self.0 {}
    }
}
