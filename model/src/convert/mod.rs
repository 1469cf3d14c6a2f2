//! `convert`: converts a Hugging Face checkpoint to a kernel's format, one rank at a time.
//!
//! A [`plan`] is made first, from headers and config alone. Workers ([`mod@execute`]) then read
//! each expert's rows from the mapped files, pack them and write them to their place; the jobs in
//! progress bound the memory, whatever the size of the model. Only one process at a time converts
//! into a folder ([`lock`]). A file has a temporary name until it is complete, read back and
//! durable ([`mod@io`]). The [`manifest`] is written last. It records the SHA-256 of each file,
//! which a rerun verifies ([`folder`]).

pub mod budget;
pub mod config;
mod copy;
pub(crate) mod entry;
pub mod error;
pub mod execute;
pub mod folder;
pub mod format;
pub mod inputs;
pub mod io;
pub mod job;
pub mod lock;
pub mod manifest;
pub mod names;
pub mod parallel;
pub mod paths;
pub mod piece;
pub mod plan;
pub mod progress;
pub mod settings;
pub mod shard;
pub mod side;
pub mod stack;
pub mod target;
pub mod verdict;
pub mod verify;

use std::path::Path;

use marlinspike::bounded_json;

use crate::model::fused::has_experts;
use crate::model::layers::Layers;
use crate::model::{self, Model, ModelError, ModelFiles};
use error::ConvertError;
use execute::Work;
use folder::{Folder, Kept};
use inputs::Inputs;
use io::{Disk, Storage};
use manifest::Manifest;
use plan::{ConversionPlan, Refused};
use progress::Progress;
use settings::{Execution, Options, Settings};
use side::SideFiles;
use stack::StackPlan;

/// What a finished conversion did.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Summary {
    /// Converted stacks: dense layers, and w13 and w2 of each MoE layer.
    pub converted: usize,
    /// Tensors copied as they were.
    pub copied: usize,
    /// Converted stacks whose checkpoint keeps activations in 16 bits, and which now quantize them
    /// to int8.
    pub activations_quantized: usize,
    /// Modules copied because the format cannot take them.
    pub unsupported: Vec<Refused>,
    /// What preparation changed in the experts' numbers.
    pub notes: Vec<String>,
    /// Output files.
    pub files: usize,
    /// Output files that an earlier run had finished.
    pub kept: usize,
    /// Bytes of all output tensors.
    pub bytes: u64,
    /// Peak memory of all jobs together, in bytes, as the budget counts it.
    pub peak_memory: u64,
    /// Files of an earlier run that were missing or did not match its manifest.
    pub rewritten: Vec<String>,
    /// The model's other files.
    pub side: SideFiles,
    /// Whether an earlier run had finished everything, and every byte was verified now.
    pub already_complete: bool,
}

impl Summary {
    /// The summary before anything is written.
    fn planned(plan: &ConversionPlan, side: &SideFiles, settings: &Settings) -> Self {
        let target = settings.format.target();
        let quantizes = |s: &&StackPlan| target.quantizes_activations(s);
        let items = plan.shards.iter().flat_map(|s| &s.items);
        Self {
            converted: plan.stacks.len(),
            copied: items.filter(|i| i.source == plan::Source::Copy).count(),
            activations_quantized: plan.stacks.iter().filter(quantizes).count(),
            unsupported: plan.refused.clone(),
            notes: plan.notes.clone(),
            files: plan.shards.len(),
            kept: 0,
            bytes: plan.output_bytes(),
            peak_memory: 0,
            rewritten: Vec::new(),
            side: side.clone(),
            already_complete: false,
        }
    }
}

/// Converts the model in `model_dir` into the folder `out_dir`, which is created if it does not
/// exist.
///
/// # Errors
/// [`ConvertError`]. Finished files are kept, and the same call continues the conversion.
pub fn convert(
    model_dir: &Path,
    out_dir: &Path,
    options: &Options,
    progress: &dyn Progress,
) -> Result<Summary, ConvertError> {
    let files = ModelFiles::open(model_dir)?.with_routing(options.routing.as_deref())?;
    let model = Model::new(&files)?;
    let output = Output { storage: &Disk, dir: out_dir, force: options.force };
    convert_model(&model, output, &options.settings(&model)?, options.execution, progress)
}

/// Where a conversion writes.
#[derive(Debug, Clone, Copy)]
pub struct Output<'o> {
    /// The file system.
    pub storage: &'o dyn Storage,
    /// The folder.
    pub dir: &'o Path,
    /// Whether to replace another conversion in the folder.
    pub force: bool,
}

/// Like [`convert`], for an opened model and any [`Storage`].
///
/// # Errors
/// As [`convert`].
pub fn convert_model(
    model: &Model<'_>,
    output: Output<'_>,
    settings: &Settings,
    execution: Execution,
    progress: &dyn Progress,
) -> Result<Summary, ConvertError> {
    let plan = checked_plan(model, settings)?;
    let side = SideFiles::list(model, &plan)?;
    let mut inputs = Inputs::list(model, &side.copied)?;
    let mut summary = Summary::planned(&plan, &side, settings);
    let asked = Manifest::new(settings, inputs.records(), planned(&plan, &side))
        .with_routing(model.stated_routing);
    let Output { storage, dir, force } = output;
    let mut folder = Folder::enter(storage, dir, &model.dir, asked, &inputs, force)?;
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(execution.threads.get())
        .build()
        .map_err(|e| ConvertError::io(dir)(std::io::Error::other(e.to_string())))?;
    let Kept { complete, damaged } = pool.install(|| {
        inputs.hash(model)?;
        folder.open(&inputs, force)
    })?;
    summary.rewritten = damaged;
    if complete {
        inputs.look_again(true)?;
        return Ok(Summary { already_complete: true, ..summary });
    }
    let constants = execute::constants(model, &plan, settings, &pool)?;
    let (plan, inputs) = (&plan, &inputs);
    let work = Work { model, plan, settings, constants: &constants, pool: &pool, inputs, progress };
    progress.begin(plan.output_bytes());
    let written = execute::write_shards(work, &mut folder, execution);
    progress.finish();
    let written = written?;
    (summary.kept, summary.peak_memory) = (written.kept, written.peak_memory);
    folder.copy(&side, model, inputs)?;
    if plan.shards.len() > 1 {
        folder.write(model::INDEX, format!("{:#}\n", config::index(plan)).as_bytes())?;
    }
    let config = config::config(model, plan, settings, &constants, &folder.identity());
    folder.write("config.json", format!("{}\n", bounded_json::python_text(&config)).as_bytes())?;
    if let Err(changed) = inputs.look_again(true) {
        folder.distrust()?;
        return Err(changed);
    }
    folder.complete()?;
    Ok(summary)
}

/// The plan; an error if there is nothing to convert.
fn checked_plan(model: &Model<'_>, settings: &Settings) -> Result<ConversionPlan, ConvertError> {
    if model.quant.is_none() {
        return Err(ConvertError::NotQuantized { dir: model.dir.clone() });
    }
    let mut layers = Layers::group(model)?;
    if settings.merge_projections {
        layers.merge_projections()?;
    }
    if model.entries().next().is_none() {
        return Err(ModelError::NoFile { dir: model.dir.clone(), what: "tensor" }.into());
    }
    let plan = ConversionPlan::new(model, &layers, settings)?;
    let target = settings.format.title();
    if !plan.refused.is_empty() && !settings.skip_unsupported {
        return Err(ConvertError::Refused { target, refused: plan.refused });
    }
    // Experts that no rule refuses by name would otherwise be skipped silently.
    let unseen = !layers.fused.is_empty() || plan.refused.is_empty() && has_experts(model);
    if plan.stacks.is_empty() && unseen {
        return Err(ConvertError::NothingConverted { target, refused: plan.refused });
    }
    Ok(plan)
}

/// The names of the files that a conversion writes.
fn planned(plan: &ConversionPlan, side: &SideFiles) -> Vec<String> {
    let mut names: Vec<_> = plan.shards.iter().map(|s| s.name.clone()).collect();
    names.extend((plan.shards.len() > 1).then(|| model::INDEX.to_owned()));
    names.push("config.json".to_owned());
    names.extend(side.copied.iter().cloned());
    names
}
