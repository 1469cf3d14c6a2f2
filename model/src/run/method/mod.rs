//! Layers of a checkpoint as its method runs them: FP8, MXFP8, MXFP4 and NVFP4, and integers with
//! 16-bit activations.
//!
//! [`load`] brings the layer into the hub, prepared as upstream prepares it; this file runs it.

mod fp8;
pub mod load;
mod matrices;
pub mod packed;

use std::time::Instant;

use anyhow::Context as _;
use marlinspike::layout::flashinfer::Nvfp4Backend;
use marlinspike::method::Arithmetic;
use serde_json::json;

use super::input::{Halves, Inputs};
use super::report::{Check, Output, Report};
use crate::Outcome;
use crate::convert::preparation::PreparationArgs;
use crate::model::Model;
use crate::model::layers::Layers;
use crate::output::{print, write_whole};
use load::{Loaded, Options};

/// How products are added up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum ArithmeticArg {
    /// The exact sum of products of the quantized numbers, rounded once.
    Exact,
    /// The canonical schedule, whose bits the CUDA kernels give.
    Canonical,
    /// Hopper's wgmma with e4m3 (F = 13), one chain over all of k.
    Wgmma,
    /// The same, moved to f32 every 128 k.
    WgmmaPromoted,
}

impl ArithmeticArg {
    fn arithmetic(self) -> Arithmetic {
        let [exact, canonical, wgmma, promoted] = Arithmetic::NAMED.map(|(_, a)| a);
        match self {
            Self::Exact => exact,
            Self::Canonical => canonical,
            Self::Wgmma => wgmma,
            Self::WgmmaPromoted => promoted,
        }
    }
}

/// How activations enter the products.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum ActivationsArg {
    /// As the checkpoint says; of MXFP8, whose files need not say it, 16 bits.
    #[default]
    Auto,
    /// 16 bits, as Marlin's kernels have them.
    None,
    /// MXFP8: e4m3 with a power of two for each 32 k.
    Mxfp8,
}

/// Options of these layers.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct MethodArgs {
    /// How products are added up [default: exact]. Given for an int4 layer, it runs with 16-bit
    /// activations instead of on the int4 path.
    #[arg(long, value_enum, value_name = "NAME")]
    pub arithmetic: Option<ArithmeticArg>,
    /// How activations enter the products.
    #[arg(long, value_enum, default_value_t, value_name = "HOW")]
    pub activations: ActivationsArg,
    /// NVFP4: the kernel, by upstream's name, whose rule gives the activations' global scales.
    #[arg(long, default_value = "FLASHINFER_TRTLLM", value_parser = backend, value_name = "NAME")]
    pub nvfp4_backend: Nvfp4Backend,
    /// How experts' numbers are prepared.
    #[command(flatten)]
    pub preparation: PreparationArgs,
    /// Write the stages (gate_up, activated, down) to the output file too.
    #[arg(long, requires = "output")]
    pub stages: bool,
}

/// A backend by upstream's name.
pub(crate) fn backend(name: &str) -> Result<Nvfp4Backend, String> {
    let found = Nvfp4Backend::NAMED.iter().find(|(n, _)| *n == name);
    found.map(|(_, backend)| *backend).ok_or_else(|| {
        let names: Vec<_> = Nvfp4Backend::NAMED.iter().map(|(n, _)| *n).collect();
        format!("found {name:?}, expected one of {}", names.join(", "))
    })
}

/// One layer of an original checkpoint.
///
/// # Errors
/// As [`Loaded::new`].
pub(super) fn load(
    method: &MethodArgs,
    model: &Model<'_>,
    layers: &Layers,
    module: &str,
    pool: &rayon::ThreadPool,
) -> anyhow::Result<Loaded> {
    let options = Options {
        activations: method.activations,
        backend: method.nvfp4_backend,
        preparation: method.preparation.preparation(false),
    };
    pool.install(|| Loaded::new(model, layers, module, options))
}

/// Runs a loaded layer; `is_packed` says that it was in a kernel's form.
///
/// # Errors
/// For activations that cannot be used, each by name.
pub(super) fn run(
    args: &super::Args,
    loaded: &Loaded,
    is_packed: bool,
    pool: &rayon::ThreadPool,
) -> anyhow::Result<Outcome> {
    let method = &args.method;
    let sizes = loaded.sizes();
    let inputs: Inputs<Halves> = match &args.input {
        Some(path) => Inputs::read(path, sizes)?,
        None => Inputs::seeded(args.seed, args.tokens, args.dtype, sizes)?,
    };
    let arithmetic = method.arithmetic.unwrap_or(ArithmeticArg::Exact).arithmetic();
    let mut seconds = f64::INFINITY;
    let mut stages = Vec::new();
    for _ in 0..args.repeat.get() {
        let begun = Instant::now();
        stages = pool.install(|| loaded.forward(&inputs, |p| p.compute(arithmetic)))?;
        seconds = seconds.min(begun.elapsed().as_secs_f64());
    }
    let check = match args.check {
        false => None,
        true => {
            let expected = pool.install(|| loaded.forward(&inputs, |p| p.define(arithmetic)))?;
            Some(Check::of_stages(&stages, &expected))
        }
    };
    if let Some(path) = &args.output {
        let from = if method.stages { 0 } else { stages.len() - 1 };
        write_whole(path, &super::report::container(&stages[from..])?).context("the output")?;
    }
    let y: &Output = &stages[stages.len() - 1];
    let mut sizes = loaded.describe();
    sizes["arithmetic"] = json!(arithmetic.name());
    let report = Report {
        module: &loaded.module,
        packed: is_packed,
        source: "",
        sizes,
        summary: format!("{}, {}", loaded.summary(), arithmetic.name()),
        y,
        kernel: "the reference",
        threads: pool.current_num_threads(),
        seconds,
        check,
        checked_by: "the definition, product by product",
        notes: &loaded.notes,
        routing: loaded.routing(&inputs, args.check)?,
        partial: None,
        arithmetic: format!("{}, activations {}", arithmetic.name(), loaded.activations()),
    };
    print(&if args.json { report.json() } else { report.text() })?;
    Ok(if report.is_equal() { Outcome::Pass } else { Outcome::Mismatch })
}
