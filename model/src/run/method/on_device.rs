//! A loaded layer on a device.

use marlinspike::method::{Arithmetic, Product, Quantizer};
use marlinspike::moe::layer::Routed;
use rayon::ThreadPool;

use super::load::Loaded;
use super::parts::LayerWeights;
use crate::run::block::dense;
use crate::run::block::tail::Engine;
use crate::run::device::{Computed, Device};
use crate::run::error::{DeviceError, RunError};
use crate::run::input::{Halves, Inputs, Routing};
use crate::run::options::Options;
use crate::run::output::Output;

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
