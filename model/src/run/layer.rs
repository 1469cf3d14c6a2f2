//! Finding a layer in a model, and running it.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use marlinspike::case::ActivationRounding;
use marlinspike::container::Container;
use marlinspike::moe::layer::Routed;
use marlinspike::num::array::rows_of;
use marlinspike::w4a8::linears::{self, LinearLayer, LinearOptions};
use marlinspike::w4a8::moe::{ExpertLayer, ExpertOptions, Mode};
use marlinspike::w4a8::stored::{self, Description};
use marlinspike::w4a8::{LinearWorkspace, Values, experts};
use marlinspike::{Error, Result};

use super::error::RunError;
use super::has_method;
use super::input::{Inputs, Routing, Sizes};
use super::kernel::{check_kernel, check_linear};
use super::origin::{self, Partial};
use super::output::LayerKind;
use super::pack::Packer;
use crate::convert::error::Refused;
use crate::convert::plan::ConversionPlan;
use crate::convert::settings::{Format, Settings};
use crate::convert::target::int4;
use crate::map::MappedFile;
use crate::model::layers::Layers;
use crate::model::routing::{MoeRouting, shared_experts_left_out};
use crate::model::{Model, ModelError, ModelFiles};

/// The mapped files of a model.
#[derive(Debug)]
pub enum Opened {
    /// One packed file.
    File(PathBuf, MappedFile),
    /// A folder.
    Folder(Box<ModelFiles>),
}

/// Which layer, and how it runs.
#[derive(Debug)]
pub struct LoadOptions<'o> {
    /// Its module, or the first.
    pub layer: Option<&'o str>,
    /// How activations are rounded.
    pub rounding: ActivationRounding,
    /// A kernel by name, or the fastest.
    pub kernel: Option<&'o str>,
    /// Threads for packing an unpacked layer.
    pub pool: &'o rayon::ThreadPool,
}

/// A layer that can run. Weights are borrowed from a packed file.
#[derive(Debug)]
pub enum Layer<'f> {
    /// Experts.
    Moe(Box<dyn ExpertLayer + 'f>),
    /// One matrix.
    Linear(Box<dyn LinearLayer + 'f>),
}

/// Runs a layer on its inputs, into an output of [`Layer::output`].
pub type Runner<'i> = Box<dyn FnMut(&mut Values) -> Result<()> + 'i>;

/// A loaded layer with its name.
#[derive(Debug)]
pub struct Loaded<'f> {
    /// Its module.
    pub module: String,
    /// Whether the file is packed; otherwise the layer was packed after it was read.
    pub packed: bool,
    /// The layer.
    pub layer: Layer<'f>,
    /// Present where the layer is one rank's part.
    pub partial: Option<Partial>,
    /// How it is computed, and whether its checkpoint's method computes it differently.
    pub arithmetic: String,
    /// Notes on its routing.
    pub notes: Vec<String>,
}

/// The int4 path without ranks, for one layer.
fn settings() -> Settings {
    Settings::new(int4::FORMAT)
}

/// The wanted module, or else the first layer of experts, or else the first.
pub(super) fn choose<'m>(
    modules: &'m [String],
    wanted: Option<&str>,
    is_moe: impl Fn(&str) -> bool,
) -> Result<&'m str, RunError> {
    let found = match wanted {
        Some(name) => modules.iter().find(|m| *m == name),
        None => modules.iter().find(|m| is_moe(m)).or(modules.first()),
    };
    found.map(String::as_str).ok_or_else(|| match wanted {
        Some(name) => RunError::NoSuchLayer { wanted: name.to_owned() },
        None => RunError::NoLayer,
    })
}

impl Opened {
    /// Maps a model.
    ///
    /// # Errors
    /// [`ModelError`] or [`MapError`](crate::map::MapError) with the path.
    pub fn open(path: &Path, routing: Option<&Path>) -> Result<Self, RunError> {
        let opened = match path.is_dir() {
            true => Self::Folder(Box::new(ModelFiles::open(path)?.with_routing(routing)?)),
            false => Self::File(path.to_owned(), MappedFile::open(path)?),
        };
        if routing.is_some() && opened.original()?.is_none() {
            return Err(RunError::PackedRouting);
        }
        Ok(opened)
    }

    /// The `marlinspike` section of the config that belongs to packed files.
    fn section(&self) -> Option<serde_json::Value> {
        match self {
            Self::File(path, _) => origin::config_section(path),
            Self::Folder(files) => Model::new(files).ok()?.config.get("marlinspike").cloned(),
        }
    }

    /// The packed files; empty for an original checkpoint.
    fn containers(&self) -> Result<Vec<Container<'_>>, ModelError> {
        match self {
            Self::File(path, map) => {
                let parsed = Container::parse(map).map_err(|e| ModelError::Format {
                    path: path.clone(),
                    source: Box::new(e.into()),
                })?;
                Ok(vec![parsed])
            }
            Self::Folder(files) => {
                let model = Model::new(files)?;
                let format = model.config.get("marlinspike").and_then(Format::of_section);
                match format.is_some_and(|format| format.target().runs_packed()) {
                    true => model.shards.iter().map(|s| s.container()).collect(),
                    false => Ok(Vec::new()),
                }
            }
        }
    }

    /// The files of an original checkpoint; `None` for packed files.
    ///
    /// # Errors
    /// As [`Opened::modules`].
    pub fn original(&self) -> Result<Option<&ModelFiles>, RunError> {
        Ok(match self {
            Self::Folder(files) if self.containers()?.is_empty() => Some(files),
            _ => None,
        })
    }

    /// Modules of the int4 path that can run, by name; of an original checkpoint those that the path takes.
    ///
    /// # Errors
    /// [`ModelError`] for files that cannot be read.
    pub fn modules(&self) -> Result<Vec<String>, RunError> {
        let containers = self.containers()?;
        let mut names: Vec<String> = match (self, containers.is_empty()) {
            (Self::Folder(files), true) => {
                let model = Model::new(files)?;
                let plan = ConversionPlan::new(&model, &Layers::group(&model)?, &settings())?;
                // Those run by their checkpoint's method.
                let others = plan.stacks.iter().filter(|s| has_method(&s.scheme));
                let others: BTreeSet<&str> = others.map(|s| s.module.as_str()).collect();
                let names = plan.descriptions.into_keys();
                names.filter(|name| !others.contains(name.as_str())).collect()
            }
            _ => containers.iter().flat_map(stored::modules).map(str::to_owned).collect(),
        };
        names.sort();
        Ok(names)
    }

    /// Loads the layer that `options` names.
    ///
    /// # Errors
    /// What the model, its description or its weights are refused for.
    pub fn load(&self, options: LoadOptions<'_>) -> Result<Loaded<'_>, RunError> {
        let containers = self.containers()?;
        match (self, containers.is_empty()) {
            (Self::Folder(files), true) => checkpoint(files, options),
            _ => packed(&containers, self.section().as_ref(), options),
        }
    }
}

/// A layer of packed files.
fn packed<'f>(
    files: &[Container<'f>],
    section: Option<&serde_json::Value>,
    options: LoadOptions<'_>,
) -> Result<Loaded<'f>, RunError> {
    let modules: Vec<String> = files.iter().flat_map(stored::modules).map(str::to_owned).collect();
    let holder = |module: &str| {
        let key = stored::key(module);
        files.iter().find(|f| f.metadata().contains_key(&key))
    };
    let is_moe = |module: &str| {
        let described = holder(module).map(|file| Description::read(file, module));
        matches!(described, Some(Ok(Description::Moe(_))))
    };
    let module = choose(&modules, options.layer, is_moe)?.to_owned();
    let Some(file) = holder(&module) else {
        return Err(Error::missing(stored::key(&module), "a packed layer").into());
    };
    let LoadOptions { rounding, kernel, .. } = options;
    let described = Description::read(file, &module)?;
    let moe = match &described {
        Description::Moe(moe) => Some(moe),
        Description::Linear(_) => None,
    };
    let partial = origin::partial(file, section, &module, moe);
    let arithmetic = origin::arithmetic(&described, origin::quantizes(section, &module));
    let layer = match &described {
        Description::Moe(moe) => {
            check_kernel(moe.format, kernel)?;
            let options = ExpertOptions { rounding, mode: Mode::Extended, kernel };
            Layer::Moe(experts::load(file, &module, options)?)
        }
        Description::Linear(linear) => {
            check_linear(linear.format, kernel)?;
            Layer::Linear(linears::load(file, &module, LinearOptions { rounding, kernel })?)
        }
    };
    Ok(Loaded { module, packed: true, layer, partial, arithmetic, notes: Vec::new() })
}

/// A layer of an original checkpoint, packed now.
fn checkpoint<'f>(files: &ModelFiles, options: LoadOptions<'_>) -> Result<Loaded<'f>, RunError> {
    let LoadOptions { layer: wanted, rounding, kernel, pool } = options;
    let model = Model::new(files)?;
    let packer = Packer::new(&model)?;
    let modules: Vec<String> = packer.modules().map(str::to_owned).collect();
    let first = packer.first().map(str::to_owned);
    // The layer that runs by default is the same whether it is refused or not.
    let layer = wanted.or(first.as_deref());
    let concerns = |r: &&Refused| r.module.split(' ').next() == layer;
    let refused: Vec<_> = packer.refused().iter().filter(concerns).cloned().collect();
    if !refused.is_empty() {
        return Err(packer.refusal(refused));
    }
    let is_moe = |m: &str| matches!(packer.description(m), Ok(Description::Moe(_)));
    let module = choose(&modules, layer, is_moe)?.to_owned();
    let layer = match packer.description(&module)? {
        Description::Moe(moe) => {
            check_kernel(moe.format, kernel)?;
            let options = ExpertOptions { rounding, mode: Mode::Extended, kernel };
            Layer::Moe(pool.install(|| packer.experts(&module, options))?)
        }
        Description::Linear(linear) => {
            check_linear(linear.format, kernel)?;
            let options = LinearOptions { rounding, kernel };
            Layer::Linear(pool.install(|| packer.linear(&module, options))?)
        }
    };
    let notes = match &layer {
        Layer::Moe(moe) => {
            let experts = moe.num_experts();
            let mut notes = MoeRouting::read(&model, &module, experts, false)?.notes;
            notes.extend(shared_experts_left_out(&model, &module));
            notes
        }
        Layer::Linear(_) => Vec::new(),
    };
    let target = packer.settings().format.target();
    let quantizes = packer.stacks(&module).any(|s| target.quantizes_activations(s));
    let arithmetic = origin::arithmetic(packer.description(&module)?, Some(quantizes));
    Ok(Loaded { module, packed: false, layer, partial: None, arithmetic, notes })
}

impl Layer<'_> {
    /// The kernel's name.
    pub fn kernel_name(&self) -> &'static str {
        match self {
            Self::Moe(moe) => moe.kernel_name(),
            Self::Linear(linear) => linear.kernel_name(),
        }
    }

    /// Kind and sizes.
    pub fn kind(&self) -> LayerKind {
        match self {
            Self::Moe(moe) => LayerKind::Moe {
                num_experts: moe.num_experts(),
                top_k: moe.router().top_k(),
                hidden_size: moe.hidden_size(),
                intermediate_size: moe.intermediate_size(),
            },
            Self::Linear(linear) => LayerKind::Linear(linear.shape()),
        }
    }

    /// N of the output: H of experts.
    pub fn size_n(&self) -> usize {
        match self {
            Self::Moe(moe) => moe.hidden_size(),
            Self::Linear(linear) => linear.shape().size_n,
        }
    }

    /// K of the activations.
    pub fn size_k(&self) -> usize {
        match self {
            Self::Moe(moe) => moe.hidden_size(),
            Self::Linear(linear) => linear.shape().size_k,
        }
    }

    /// The sizes that its activations must match.
    pub fn sizes(&self) -> Sizes {
        let num_experts = match self {
            Self::Moe(moe) => Some(moe.num_experts()),
            Self::Linear(_) => None,
        };
        Sizes { size_k: self.size_k(), num_experts, has_router: false }
    }

    /// A zeroed output for `inputs`, in their type.
    ///
    /// # Errors
    /// [`Error::Size`] if the output is too large.
    pub fn output(&self, inputs: &Inputs<Values>) -> Result<Values> {
        let tokens = inputs.x.len() / self.size_k();
        let len = tokens.checked_mul(self.size_n()).filter(|&n| n < 1 << 40);
        let len = len.ok_or_else(|| Error::size("tokens", tokens, "an output of fewer values"))?;
        Ok(match inputs.x {
            Values::F32(_) => Values::F32(vec![0.0; len]),
            Values::Bf16(_) => Values::Bf16(vec![0; len]),
        })
    }

    /// A function that runs the layer on `inputs`, with its own memory.
    pub fn runner<'i>(&'i self, inputs: &'i Inputs<Values>) -> Runner<'i> {
        let (k, n) = (self.size_k(), self.size_n());
        match self {
            Self::Linear(linear) => {
                let mut workspace = LinearWorkspace::default();
                Box::new(move |y| linear.forward(inputs.x.view(k)?, &mut workspace, y.view_mut(n)?))
            }
            Self::Moe(moe) => {
                let mut workspace = moe.workspace(inputs.x.len() / self.size_k());
                Box::new(move |y| {
                    let (x, y) = (inputs.x.view(k)?, y.view_mut(n)?);
                    match &inputs.routing {
                        Routing::Logits(logits) => {
                            let experts = moe.num_experts();
                            let logits = rows_of("router_logits", logits, experts)?;
                            moe.forward(x, logits, &mut workspace, y)
                        }
                        Routing::Given { top_k, ids, weights } => {
                            let routed = Routed::from_rows(*top_k, ids, weights)?;
                            moe.forward_routed(x, routed, &mut workspace, y)
                        }
                    }
                })
            }
        }
    }
}
