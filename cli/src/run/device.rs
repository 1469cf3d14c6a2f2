//! `run --backend`: the CUDA kernels behind the library's interface of a device.

use marlinspike::moe::layer::{Layer, Routed};
use marlinspike::num::scalar::ScalarType;
use marlinspike::weight::Weight;
use marlinspike_accel::AccelError;
use marlinspike_accel::ops::{MarlinLayer, MarlinLinear};
use marlinspike_model::run::device::{Computed, Device, DeviceError};

use crate::backend;

/// An opened device.
pub(super) struct Gpu(pub(super) backend::Device);

impl Gpu {
    /// The shortest of `repeat` runs, in seconds. The first one loads the kernels and does not count.
    fn shortest(
        &self,
        repeat: usize,
        mut forward: impl FnMut() -> Result<(), AccelError>,
    ) -> Result<f64, AccelError> {
        forward()?;
        let times = (0..repeat).map(|_| self.0.microseconds(&mut forward));
        let times = times.collect::<Result<Vec<f32>, _>>()?;
        Ok(f64::from(times.into_iter().fold(f32::INFINITY, f32::min)) / 1e6)
    }
}

impl Device for Gpu {
    fn name(&self) -> String {
        format!("the CUDA kernels on {}", self.0.name())
    }

    fn linear(
        &self,
        weight: &Weight<'_>,
        dtype: ScalarType,
        x: &[u16],
        repeat: usize,
    ) -> Result<Computed, DeviceError> {
        let device = &self.0;
        let layer = MarlinLinear::new(device, weight, dtype)?;
        let shape = weight.shape();
        let size_m = x.len() / shape.size_k;
        let mut work = layer.workspace(device, size_m)?;
        let (x, mut y) = (device.upload(x)?, device.zeroed(size_m * shape.size_n)?);
        let seconds = self.shortest(repeat, || layer.forward(device, &x, &mut work, &mut y))?;
        Ok(Computed { y: device.download(&y)?, seconds })
    }

    fn experts(
        &self,
        layer: &Layer<'_>,
        routed: Routed<'_>,
        x: &[u16],
        repeat: usize,
    ) -> Result<Computed, DeviceError> {
        let device = &self.0;
        let on_device = MarlinLayer::new(device, layer)?;
        let tokens = routed.ids().len() / routed.top_k();
        let mut work = on_device.workspace(device, tokens, routed.top_k())?;
        let (ids, weights) = (device.upload(routed.ids())?, device.upload(routed.weights())?);
        let (x, mut y) = (device.upload(x)?, device.zeroed(tokens * layer.hidden_size())?);
        let seconds = self.shortest(repeat, || {
            on_device.forward(device, &x, &ids, &weights, &mut work, &mut y)
        })?;
        Ok(Computed { y: device.download(&y)?, seconds })
    }
}
