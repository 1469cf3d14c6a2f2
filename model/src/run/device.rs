//! Layers that a device computes instead of the reference.

use marlinspike::method::{Arithmetic, Product, Quantizer};
use marlinspike::moe::layer::{Layer, Routed};
use marlinspike::num::scalar::ScalarType;
use marlinspike::weight::Weight;
use rayon::ThreadPool;

use super::block::dense;
use super::block::tail::Engine;
use super::error::RunError;
use super::input::{Halves, Inputs, Routing};
use super::method::load::Loaded;
use super::method::parts::LayerWeights;
use super::options::Options;
use super::output::Output;

/// A device whose kernels give the bits of the canonical schedule ([`Arithmetic::Canonical`]) for
/// activations of 16 bits.
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

/// Why a device did not compute a layer.
pub type DeviceError = Box<dyn std::error::Error + Send + Sync>;

/// What a device computed.
#[derive(Debug, Clone, PartialEq)]
pub struct Computed {
    /// Rows of the output, 16 bits each value.
    pub y: Vec<u16>,
    /// The shortest time of a run, without copies to and from the device.
    pub seconds: f64,
}

/// `y` of `loaded` on `device`, and `y_experts` where they differ, with the time. What follows the sum
/// over the experts is computed here, by the canonical schedule.
///
/// # Errors
/// [`RunError::Device`] for a layer that the device does not take.
pub(super) fn forward(
    device: &dyn Device,
    loaded: &Loaded,
    inputs: &Inputs<Halves>,
    options: &Options,
    pool: &ThreadPool,
) -> Result<(Vec<Output>, f64), RunError> {
    let refuse = |source| RunError::Device { module: loaded.module.clone(), source };
    let repeat = options.repeat.get();
    let Halves { ty: dtype, bits: x } = &inputs.x;
    match &loaded.weights {
        LayerWeights::Linear { weight, quantizer } => {
            expect_16_bits(quantizer).map_err(refuse)?;
            let Computed { y, seconds } =
                device.linear(weight, *dtype, x, repeat).map_err(refuse)?;
            let size_n = weight.shape().size_n;
            Ok((vec![Output::halves("y", *dtype, size_n, &y)], seconds))
        }
        LayerWeights::Moe(moe) => {
            moe.quantizers.iter().try_for_each(expect_16_bits).map_err(refuse)?;
            if moe.multipliers.is_some() {
                return Err(refuse(
                    "w13: gate and up have global scales of their own: expected one for both \
                     (--w13-scale first)"
                        .into(),
                ));
            }
            let routing;
            let routed = match &inputs.routing {
                Routing::Given { top_k, ids, weights } => Routed::from_rows(*top_k, ids, weights)?,
                Routing::Logits(logits) => {
                    routing = moe.routing.route(logits, moe.num_experts())?;
                    routing.routed()?
                }
            };
            let Computed { y, seconds } =
                device.experts(&moe.layer(*dtype), routed, x, repeat).map_err(refuse)?;
            let multiply = |p: &Product<'_>| p.compute(Arithmetic::Canonical);
            let engine = Engine { dot: dense::compensated, multiply: &multiply };
            let outputs = pool.install(|| loaded.finish(inputs, y, engine))?;
            Ok((outputs, seconds))
        }
    }
}

/// Returns an error for activations that are quantized.
fn expect_16_bits(quantizer: &Quantizer) -> Result<(), DeviceError> {
    match quantizer {
        Quantizer::None => Ok(()),
        other => Err(format!(
            "activations: found {other}, expected 16 bits, for which the device has kernels \
             (--activations none)"
        )
        .into()),
    }
}
