//! Layers whose rows are e4m3fn: of 4-bit weights, and of e4m3fn weights.

use marlinspike::moe::layer::Layer;
use marlinspike_accel::{
    AccelError,
    ops::{fp8_gemm::Fp8Layer, gemm_w4a8::W4a8Layer},
};
use marlinspike_proptests::ops::{self as laws, LayerInput, layer_of_rows, local_of_rows};
use marlinspike_proptests::{Subject, SubjectError};

use super::{Cuda, failed, fill, not_taken};

/// What a law derives from an input.
fn with_layer<T>(
    i: &LayerInput,
    run: impl FnOnce(&Layer<'_>) -> Result<T, AccelError>,
) -> Result<T, AccelError> {
    let local = local_of_rows(i).map_err(|error| AccelError::Argument {
        operation: "moe",
        what: "layer",
        found: error.to_string(),
        expected: "a rank's part".into(),
    })?;
    run(&layer_of_rows(&local, i))
}

macro_rules! subjects {
    ($($law:ident $layer:ident |$device:ident, $of:ident| $new:expr;)+) => { $(
        impl Subject<laws::$law> for Cuda {
            fn takes(&self, i: &LayerInput) -> bool {
                let $device = &self.0;
                // Only these devices have the instructions.
                $device.compute_capability() == (9, 0)
                    && !not_taken(&with_layer(i, |$of| $new))
            }

            fn call(&self, i: &LayerInput, out: &mut [u16]) -> Result<(), SubjectError> {
                let $device = &self.0;
                let made = with_layer(i, |$of| {
                    let layer: $layer = $new?;
                    let mut work = layer.workspace($device, i.size_m(), i.config.top_k)?;
                    // Not zeros, so that an output that is not written is noticed.
                    let mut y = $device.upload(out)?;
                    let (x, ids) = ($device.upload(&i.x)?, $device.upload(&i.topk_ids)?);
                    let weights = $device.upload(&i.topk_weights)?;
                    layer.forward($device, &x, &ids, &weights, &mut work, &mut y)?;
                    $device.download(&y)
                });
                fill(out, &made.map_err(failed)?)
            }
        }
    )+ };
}

subjects! {
    W4a8Experts W4a8Layer |device, layer| W4a8Layer::new(device, layer);
    Fp8Experts Fp8Layer |device, layer| Fp8Layer::new(device, layer, false);
}
