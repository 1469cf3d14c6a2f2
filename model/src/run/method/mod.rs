//! Runs layers of a checkpoint by its method: FP8, MXFP8, MXFP4, NVFP4, W8A8-int8, W4A8-FP8, and
//! integers with 16-bit activations.
//!
//! [`load`] reads the layer into the hub, prepared as upstream prepares it; this file runs it.

mod fp8;
mod int8;
pub mod load;
mod matrices;
mod on_device;
mod outputs;
pub mod packed;
pub(super) mod parts;
pub(super) mod whole;

use std::time::Instant;

use marlinspike::method::{Arithmetic, Product};
use rayon::ThreadPool;

use super::block::dense;
use super::block::tail::Engine;
use super::device::Device;
use super::error::RunError;
use super::input::{Halves, Inputs};
use super::options::{Options, Source};
use super::output::{Check, Method, Run, Timing};
use load::Loaded;

/// Runs a loaded layer, on `device` if there is one. `packed`: it was in a kernel's form.
///
/// # Errors
/// For activations that cannot be used, each by name.
pub(super) fn run(
    options: &Options,
    loaded: Loaded,
    packed: bool,
    device: Option<&dyn Device>,
    pool: &ThreadPool,
) -> Result<Run, RunError> {
    let sizes = loaded.sizes();
    let mut inputs: Inputs<Halves> = match &options.input {
        Source::File(path) => Inputs::read(path, sizes)?,
        Source::Seeded { seed, tokens, dtype } => Inputs::seeded(*seed, *tokens, *dtype, sizes)?,
    };
    let loaded = match device {
        Some(_) => loaded.in_dtype(inputs.x.ty)?,
        None => loaded,
    };
    let logits = loaded.logits(&mut inputs, options.check)?;
    let [(_, exact), ..] = Arithmetic::NAMED;
    let arithmetic = options.arithmetic.unwrap_or(exact);
    let compute = |p: &Product<'_>| p.compute(arithmetic);
    let define = |p: &Product<'_>| p.define(arithmetic);
    let computed = Engine { dot: dense::compensated, multiply: &compute };
    let defined = Engine { dot: dense::exact, multiply: &define };
    let (outputs, timing) = match device {
        Some(device) => {
            let (outputs, seconds) = on_device::forward(device, &loaded, &inputs, options, pool)?;
            (outputs, Timing { kernel: device.name(), threads: None, seconds })
        }
        None => {
            let (mut outputs, mut seconds) = (Vec::new(), f64::INFINITY);
            for _ in 0..options.repeat.get() {
                let begun = Instant::now();
                outputs = pool.install(|| loaded.forward(&inputs, computed))?;
                seconds = seconds.min(begun.elapsed().as_secs_f64());
            }
            (outputs, Timing::of_reference(pool, seconds))
        }
    };
    let check = match options.check {
        false => None,
        true => {
            let mut expected = pool.install(|| loaded.forward(&inputs, defined))?;
            // A device does not return the stages before the sum.
            expected.retain(|e| outputs.iter().any(|o| o.name == e.name));
            Some(Check::of_stages(&outputs, &expected))
        }
    };
    let (arithmetic, activations) = (arithmetic.name(), loaded.activations());
    Ok(Run {
        packed,
        kind: loaded.kind(),
        outputs,
        timing,
        check,
        logits,
        routing: loaded.routing(&inputs, options.check)?,
        partial: loaded.partial,
        arithmetic: format!("{arithmetic}, activations {activations}"),
        module: loaded.module,
        notes: loaded.notes,
        method: Some(Method { format: loaded.format, activations, arithmetic, is_bounded: false }),
    })
}
