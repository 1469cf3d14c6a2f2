//! `run`: runs one layer on given activations.
//!
//! Int4 layers take the int4 path, from a packed file or packed on the spot: [`mod@layer`] finds
//! and loads them. [`mod@method`] runs the others by their checkpoint's method. [`input`] reads or
//! generates the activations. This file selects the layer.

pub mod block;
mod definition;
pub mod device;
pub mod error;
pub mod input;
mod kernel;
pub mod layer;
pub mod method;
pub mod options;
pub mod origin;
pub mod output;
pub mod pack;
pub mod routing;

use std::collections::BTreeMap;
use std::num::NonZero;
use std::path::Path;
use std::time::Instant;

use marlinspike::config::Scheme;
use marlinspike::method::Arithmetic;
use marlinspike::w4a8::Values;
use rayon::ThreadPool;

use crate::convert::error::Refused;
use crate::model::Model;
use crate::model::layers::{Layers, Role};
use crate::model::routing::is_whole;
use block::whole::{self, Stored};
use device::Device;
use error::RunError;
use input::Inputs;
use layer::{LoadOptions, Opened};
use method::packed;
use options::{Activations, Options, Source};
use output::{Check, Output, Run, Timing};

/// Runs one layer of a model folder or of a packed file.
///
/// # Errors
/// [`RunError`] for a model, a layer or activations that cannot be used, each by name.
pub fn run(model: &Path, options: &Options) -> Result<Run, RunError> {
    run_on(model, options, None)
}

/// [`run`] on a device, by the canonical schedule; int4 layers run with 16-bit activations.
///
/// # Errors
/// As [`run`]; [`RunError::Device`] for a layer that the device does not compute, and
/// [`RunError::Arithmetic`] for options that ask for another schedule.
pub fn run_on(
    model: &Path,
    options: &Options,
    device: Option<&dyn Device>,
) -> Result<Run, RunError> {
    let canonical;
    let options = match (device, options.arithmetic) {
        (None, _) => options,
        (Some(_), None | Some(Arithmetic::Canonical)) => {
            canonical = Options { arithmetic: Some(Arithmetic::Canonical), ..options.clone() };
            &canonical
        }
        (Some(_), Some(other)) => return Err(RunError::Arithmetic { found: other.name() }),
    };
    let threads = options.threads.map_or_else(rayon::current_num_threads, NonZero::get);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
    let pool = pool.map_err(|e| RunError::Threads { reason: e.to_string() })?;
    kernel::check_any(options.kernel.as_deref())?;
    let opened = Opened::open(model, options.routing.as_deref())?;
    let wanted = options.layer.as_deref();
    if let Some(files) = opened.original()? {
        let model = Model::new(files)?;
        if let Some((format, section)) = packed::section(&model) {
            let modules = packed::modules(section);
            let is_moe = |m: &str| packed::is_moe(section, m);
            packed::refuse_copied(section, wanted)?;
            let module = layer::choose(&modules, wanted, is_moe)?;
            if is_moe(module) && is_whole(&model, module)? {
                let source = (format, section);
                refuse_device(device, module)?;
                return method::whole::run_packed(options, &model, source, module, &pool);
            }
            let loaded =
                pool.install(|| packed::load(&model, (format, section), module, options.method))?;
            return method::run(options, loaded, true, device, &pool);
        }
        let layers = Layers::group(&model)?;
        if let Some(module) = layers.plain_block(wanted) {
            if device.is_some() {
                return Err(RunError::no_kernel(module, "experts that are not quantized"));
            }
            return whole::run(options, &model, module, Stored::Plain, &pool);
        }
        refuse_fused(&layers, wanted)?;
        if let Some(module) = wanted.or_else(|| layers.first()) {
            layers.expect_taken(module)?;
        }
        if let Some(module) = method::whole::module(&model, &layers, wanted)? {
            refuse_device(device, &module)?;
            return method::whole::run(options, &model, &layers, &module, &pool);
        }
        if let Some(module) = method_layer(options, &layers) {
            let load = || method::load::Loaded::new(&model, &layers, &module, options.method);
            return method::run(options, pool.install(load)?, false, device, &pool);
        }
    }
    if device.is_some() {
        let module = wanted.unwrap_or("the first layer");
        return Err(RunError::no_kernel(module, "a layer of the int4 path on CPUs"));
    }
    int4(&opened, options, &pool)
}

/// Returns an error for a block with stages around its experts on a device.
fn refuse_device(device: Option<&dyn Device>, module: &str) -> Result<(), RunError> {
    match device {
        None => Ok(()),
        Some(_) => Err(RunError::no_kernel(module, "a block with stages around its experts")),
    }
}

/// Runs a layer on the int4 path.
fn int4(opened: &Opened, options: &Options, pool: &ThreadPool) -> Result<Run, RunError> {
    let (layer, rounding) = (options.layer.as_deref(), options.rounding);
    let kernel = options.kernel.as_deref();
    let loaded = opened.load(LoadOptions { layer, rounding, kernel, pool })?;
    let sizes = loaded.layer.sizes();
    let inputs: Inputs<Values> = match &options.input {
        Source::File(path) => Inputs::read(path, sizes)?,
        Source::Seeded { seed, tokens, dtype } => Inputs::seeded(*seed, *tokens, *dtype, sizes)?,
    };
    let mut y = loaded.layer.output(&inputs)?;
    let mut seconds = f64::INFINITY;
    pool.install(|| -> marlinspike::Result<()> {
        let mut run = loaded.layer.runner(&inputs);
        for _ in 0..options.repeat.get() {
            let begun = Instant::now();
            run(&mut y)?;
            seconds = seconds.min(begun.elapsed().as_secs_f64());
        }
        Ok(())
    })?;
    let size_n = loaded.layer.size_n();
    let y = Output::values(&y, size_n);
    let check = match options.check {
        false => None,
        true => {
            let expected = pool.install(|| loaded.layer.definition(&inputs))?;
            Some(Check::of(&y, &Output::values(&expected, size_n)))
        }
    };
    Ok(Run {
        packed: loaded.packed,
        kind: loaded.layer.kind(),
        method: None,
        outputs: vec![y],
        timing: Timing {
            kernel: loaded.layer.kernel_name().to_owned(),
            threads: Some(pool.current_num_threads()),
            seconds,
        },
        check,
        logits: None,
        routing: loaded.layer.routing(&inputs, options.check)?,
        module: loaded.module,
        notes: loaded.notes,
        partial: loaded.partial,
        arithmetic: loaded.arithmetic,
    })
}

/// Returns an error if the wanted layer's experts are in a form that is not read, or, without a
/// wanted layer, if all experts are: another layer would run instead.
fn refuse_fused(layers: &Layers, wanted: Option<&str>) -> Result<(), RunError> {
    let found = match wanted {
        Some(name) => layers.fused.iter().find(|f| f.module == name),
        None if layers.stacks.iter().any(|s| s.role == Role::W13) => None,
        None => layers.fused.first(),
    };
    match found.cloned() {
        None => Ok(()),
        Some(f) => Err(RunError::Fused { module: f.module, reason: f.reason }),
    }
}

/// The names of the layers that run without further options.
///
/// # Errors
/// As [`run`], of the model.
pub fn list(model: &Path, routing: Option<&Path>) -> Result<Vec<String>, RunError> {
    let opened = Opened::open(model, routing)?;
    let Some(files) = opened.original()? else { return opened.modules() };
    let model = Model::new(files)?;
    if let Some((_, section)) = packed::section(&model) {
        return Ok(packed::modules(section));
    }
    let mut names = opened.modules()?;
    let layers = Layers::group(&model)?;
    let others = layers.stacks.iter().filter(|s| has_method(&s.scheme));
    names.extend(others.map(|s| s.module.clone()));
    names.retain(|name| !layers.refused.contains_key(name));
    names.extend(layers.plain.iter().cloned());
    for stack in layers.stacks.iter().filter(|s| s.role == Role::W13) {
        let whole = !layers.refused.contains_key(&stack.module) && is_whole(&model, &stack.module)?;
        names.extend(whole.then(|| stack.module.clone()));
    }
    names.sort();
    names.dedup();
    Ok(names)
}

/// The layers that [`list`] leaves out, with the reasons.
///
/// # Errors
/// As [`list`].
pub fn left_out(model: &Path, routing: Option<&Path>) -> Result<Vec<Refused>, RunError> {
    let opened = Opened::open(model, routing)?;
    let Some(files) = opened.original()? else { return Ok(Vec::new()) };
    let model = Model::new(files)?;
    if packed::section(&model).is_some() {
        return Ok(Vec::new());
    }
    let runs = list(&model.dir, routing)?;
    let packer = pack::Packer::new(&model)?;
    let mut all: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for refused in packer.refused() {
        // The stacks of experts have one name.
        let module = refused.module.split(' ').next().unwrap_or(&refused.module);
        if !runs.iter().any(|name| name == module) {
            let reasons = all.entry(module.to_owned()).or_default();
            let new =
                refused.reasons.iter().filter(|r| !r.ends_with("of the same layer is refused"));
            for reason in new {
                if !reasons.contains(reason) {
                    reasons.push(reason.clone());
                }
            }
        }
    }
    Ok(all.into_iter().map(|(module, reasons)| Refused { module, reasons }).collect())
}

/// Whether layers of this scheme run by a method, and not on the int4 path.
fn has_method(scheme: &Scheme) -> bool {
    use Scheme::{Block, Fp8, W4A8Fp8, W8A8Int8};
    matches!(scheme, Fp8(_) | Block { .. } | W8A8Int8 { .. } | W4A8Fp8 { .. })
}

/// The layer to run by its method; `None` if the int4 path takes or refuses it.
fn method_layer(options: &Options, layers: &Layers) -> Option<String> {
    // Options of the products in 16 bits also take int4 layers off their path.
    let sixteen_bits =
        options.arithmetic.is_some() || options.method.activations != Activations::Checkpoint;
    let takes = |scheme: &Scheme| sixteen_bits || has_method(scheme);
    let mut known = layers.stacks.iter().filter(|s| takes(&s.scheme));
    let found = match &options.layer {
        Some(name) => known.find(|s| s.module == *name),
        // By default, an int4 layer comes first, also one that its path refuses.
        None if layers.stacks.iter().any(|s| !takes(&s.scheme)) => None,
        None => known.clone().find(|s| s.role == Role::W13).or_else(|| known.next()),
    };
    found.map(|s| s.module.clone())
}
