//! Layers that a device computes instead of the reference.

use marlinspike::moe::layer::{Layer, Routed};
use marlinspike::num::scalar::ScalarType;
use marlinspike::weight::Weight;

pub use super::error::DeviceError;

/// A device whose kernels give the bits of the canonical schedule ([`Arithmetic::Canonical`]) for activations of
/// 16 bits.
///
/// [`Arithmetic::Canonical`]: marlinspike::method::Arithmetic::Canonical
pub trait Device: Sync {
    /// The device and its kernels, as the report names them.
    fn name(&self) -> String;

    /// `x` `[M, K]` times `weight`, of type `dtype` (float16 or bfloat16). The product runs `repeat`
    /// times.
    ///
    /// # Errors
    /// What the device refuses, or why it failed.
    fn linear(
        &self,
        weight: &Weight<'_>,
        dtype: ScalarType,
        x: &[u16],
        repeat: usize,
    ) -> Result<Computed, DeviceError>;

    /// The sum over the routed experts of `x` `[M, H]`. The layer runs `repeat` times.
    ///
    /// # Errors
    /// As [`Device::linear`].
    fn experts(
        &self,
        layer: &Layer<'_>,
        routed: Routed<'_>,
        x: &[u16],
        repeat: usize,
    ) -> Result<Computed, DeviceError>;
}

/// What a device computed.
#[derive(Debug, Clone, PartialEq)]
pub struct Computed {
    /// Rows of the output, 16 bits each value.
    pub y: Vec<u16>,
    /// The shortest time of a run, without copies to and from the device.
    pub seconds: f64,
}
