//! Layers of a converted folder.

use std::collections::BTreeMap;
use std::path;
use std::sync::Arc;

use marlinspike::case::ActivationRounding;
use marlinspike::container::Container;
use marlinspike::moe::block::Block;
use marlinspike::moe::families::{self, Path, SharedRule};
use marlinspike::num::tensor::{DType as Stored, Tensor as StoredTensor};
use marlinspike::w4a8::Linear;
use marlinspike::w4a8::moe::{GatedActivation, Mode, MoeLayer};
use marlinspike::w4a8::stored;
use marlinspike_generate::ops::dense::Dense;
use marlinspike_model::convert::settings::Format;
use marlinspike_model::convert::target::int4;
use marlinspike_model::model::block::{BlockParts, places};
use marlinspike_model::model::routing::shared_experts_left_out;
use marlinspike_model::model::{Model, ModelFiles, values};
use marlinspike_model::run::method::packed::refuse_copied;

use crate::block::MoeBlock;
use crate::error::{Error, Result};
use crate::experts::{Int4Experts, Router};
use crate::linear::{DenseLinear, Int4Linear};
use crate::shared::{Projection, SharedExpert};

/// How activations round, as KleidiAI's current kernels do.
const ROUNDING: ActivationRounding = ActivationRounding::HalfAway;

/// Modules that an error lists.
const LISTED: usize = 6;

/// A folder that `marlinspike convert --to kleidiai` wrote.
///
/// Its files are mapped. Packed weights are not copied: a page is read when a token first needs it, and
/// the system may drop it again. Routers and unquantized shared experts are copied when a block is
/// loaded. The files stay mapped until the process ends, so open a folder once and clone it.
#[derive(Debug, Clone)]
pub struct PackedFolder(Arc<Contents<'static>>);

/// What a mapped folder contains.
#[derive(Debug)]
struct Contents<'f> {
    model: Model<'f>,
    files: Vec<Container<'f>>,
    /// Packed modules, each with the index of its file.
    modules: BTreeMap<String, usize>,
}

impl PackedFolder {
    /// Maps the files, and reads configs and headers.
    ///
    /// # Errors
    /// [`Error::Model`] naming the file; [`Error::NotPacked`] for a checkpoint or a folder of another
    /// format; [`Error::Rank`] for a folder of one of several ranks.
    pub fn open(dir: impl AsRef<path::Path>) -> Result<Self> {
        let files = Box::new(ModelFiles::open(dir.as_ref())?);
        // Only a folder that can be used stays mapped.
        Contents::new(&files)?;
        // A mapping cannot be shared between threads, its bytes can: layers borrow those.
        Contents::new(Box::leak(files)).map(Arc::new).map(Self)
    }

    /// Names of the packed layers, sorted: linear layers and experts.
    pub fn modules(&self) -> impl Iterator<Item = &str> {
        self.0.modules.keys().map(String::as_str)
    }

    /// The linear layer `module` (`model.layers.0.self_attn.q_proj`).
    ///
    /// # Errors
    /// [`Error::NoModule`]; [`Error::Layer`] naming the description's key or the tensor that does not fit.
    pub fn linear(&self, module: &str) -> Result<Int4Linear> {
        let file = self.file(module)?;
        let linear = Linear::load(&self.0.files[file], module, ROUNDING);
        Ok(Int4Linear::new(module, linear.map_err(Error::layer(module))?))
    }

    /// The routed experts `module` (`model.layers.0.mlp.experts`), to be called with router logits.
    ///
    /// # Errors
    /// As [`PackedFolder::linear`].
    pub fn experts(&self, module: &str) -> Result<Int4Experts> {
        let file = self.file(module)?;
        let layer = MoeLayer::load(&self.0.files[file], module, ROUNDING, Mode::Extended);
        Int4Experts::new(module, layer.map_err(Error::layer(module))?)
    }

    /// The block of the experts `module` (`model.layers.0.mlp.experts`): its router, the experts and the
    /// shared expert of the family that `config.json` names.
    ///
    /// # Errors
    /// As [`PackedFolder::linear`], for every part by name; [`Error::Unsupported`] for a block with a
    /// part that is not computed.
    pub fn moe_block(&self, module: &str) -> Result<MoeBlock> {
        let experts = self.experts(module)?;
        let Contents { model, modules, .. } = self.0.as_ref();
        let unsupported = |found: &str| {
            let (module, found) = (module.to_owned(), found.to_owned());
            Error::Unsupported { module, found }
        };
        let parts = BlockParts::read(model, module, &|name| modules.contains_key(name))?;
        let parts = parts.ok_or_else(|| unsupported("a stated routing"))?;
        let (prefix, _) = places(module);
        let ends = |name: &str| {
            let mut names = model.entries().map(|e| e.name());
            names.any(|n| n.starts_with(prefix) && n.ends_with(name))
        };
        if let Some(what) = parts.rule.further_parts(&ends) {
            return Err(unsupported(what));
        }
        if parts.rule.stages.iter().any(|(path, _)| *path == Path::Output) {
            return Err(unsupported("stages after the experts"));
        }
        if parts.router_module.is_some() || parts.gate_module.is_some() {
            return Err(unsupported("a quantized router or gate of the shared expert"));
        }
        if parts.tensors.output_bias.is_some() {
            return Err(unsupported("a bias of the output"));
        }
        let router = router(&parts, module, [experts.num_experts(), experts.hidden_size()])?;
        let hidden = experts.hidden_size();
        let block = MoeBlock::new(router, experts)?;
        match self.shared(&parts, module, hidden)? {
            Some(shared) => {
                let is_averaged = parts.rule.shared == SharedRule::Averaged;
                Ok(block.with_shared_expert(shared)?.with_mean(is_averaged))
            }
            None => match shared_experts_left_out(model, module) {
                Some(_) => Err(unsupported("a shared expert in an unknown form")),
                None => Ok(block),
            },
        }
    }

    /// The shared expert of `parts`.
    fn shared(
        &self,
        parts: &BlockParts,
        module: &str,
        hidden: usize,
    ) -> Result<Option<SharedExpert>> {
        let layer = Error::layer(module);
        let activation = || -> marlinspike::Result<GatedActivation> {
            let mut block = Block::new(1, 1, 1);
            match parts.rule.shared {
                SharedRule::Plain => block.shared_is_plain = true,
                SharedRule::Step(limit) => block.shared_swiglustep_limit = limit,
                SharedRule::Same | SharedRule::Averaged => {}
            }
            let rule = families::resolve(&self.0.model.config, module)?.rule;
            GatedActivation::of_family(block.shared_activation(&rule)?.definition)
        };
        let shared = match (&parts.shared_modules, &parts.tensors.shared) {
            (None, None) => return Ok(None),
            _ if !parts.rule.gated => {
                let found = "a shared expert without gate projection".to_owned();
                return Err(Error::Unsupported { module: module.to_owned(), found });
            }
            (Some(names), _) => {
                let [gate, up, down] = names.each_ref().map(|name| self.linear(name));
                let [gate, up, down] = [gate?, up?, down?].map(Projection::Int4);
                SharedExpert::new(gate, up, down, activation().map_err(&layer)?)?
            }
            (None, Some([w13, w2])) => {
                let size_s = w2.shape().last().copied().unwrap_or(0);
                let gate_up = projection(w13, [2 * size_s, hidden]).map_err(&layer)?;
                let down = projection(w2, [hidden, size_s]).map_err(&layer)?;
                SharedExpert::fused(gate_up, down, activation().map_err(&layer)?)?
            }
        };
        match &parts.tensors.shared_gate {
            None => Ok(Some(shared)),
            Some(gate) => {
                let dense = Dense::new(gate.clone(), 1, hidden).map_err(&layer)?;
                shared.with_gate(DenseLinear::of(gate.name().to_owned(), dense)).map(Some)
            }
        }
    }

    /// The index of the file of a packed layer.
    fn file(&self, module: &str) -> Result<usize> {
        let Contents { model, modules, .. } = self.0.as_ref();
        if let Some(&file) = modules.get(module) {
            return Ok(file);
        }
        refuse_copied(&model.config["marlinspike"], Some(module))?;
        let mut known: Vec<&str> = modules.keys().take(LISTED).map(String::as_str).collect();
        if modules.len() > LISTED {
            known.push("…");
        }
        let (module, known) = (module.to_owned(), known.join(", "));
        Err(Error::NoModule { dir: model.dir.clone(), module, known })
    }
}

impl<'f> Contents<'f> {
    /// Checks that the files are a packed folder, and finds its layers.
    fn new(files: &'f ModelFiles) -> Result<Self> {
        let model = Model::new(files)?;
        let not_packed =
            |found: &str| Error::NotPacked { dir: model.dir.clone(), found: found.to_owned() };
        let section = model.config.get("marlinspike");
        let section =
            section.ok_or_else(|| not_packed("no section `marlinspike` in config.json"))?;
        match Format::of_section(section) {
            Some(format) if format == int4::FORMAT => {}
            Some(format) => {
                return Err(not_packed(&format!("a folder of format {}", format.name())));
            }
            None => return Err(not_packed("a folder of an unknown format")),
        }
        if ["tp_size", "ep_size"].iter().any(|key| section[key].as_u64() != Some(1)) {
            return Err(Error::Rank { place: model.dir.display().to_string() });
        }
        let containers = model.shards.iter().map(|shard| shard.container());
        let files = containers.collect::<Result<Vec<_>, _>>()?;
        let modules = |(i, file)| stored::modules(file).map(move |module| (module.to_owned(), i));
        let modules = files.iter().enumerate().flat_map(modules).collect();
        Ok(Self { model, files, modules })
    }
}

/// The router of a block.
fn router(parts: &BlockParts, module: &str, [experts, hidden]: [usize; 2]) -> Result<Router> {
    let layer = Error::layer(module);
    let weight = parts
        .tensors
        .router_weight
        .as_ref()
        .ok_or_else(|| layer(marlinspike::Error::missing("the router's weight", "a block")))?;
    let name = weight.name().to_owned();
    let mut dense = Dense::new(weight.clone(), experts, hidden).map_err(&layer)?;
    if let Some(bias) = &parts.tensors.router_bias {
        bias.expect_dtype(&[Stored::F32, Stored::BF16, Stored::F16]).map_err(&layer)?;
        bias.expect_shape(&[experts]).map_err(&layer)?;
        let floats = values::floats(bias).map_err(&layer)?;
        dense = dense.with_bias(bias.name(), floats).map_err(&layer)?;
    }
    let router = Router::new(DenseLinear::of(name, dense));
    Ok(router.with_f32_logits(parts.logits_are_f32).with_softcap(parts.numbers.logit_softcap))
}

/// A matrix that is not quantized.
fn projection(
    tensor: &StoredTensor<'static>,
    [size_n, size_k]: [usize; 2],
) -> marlinspike::Result<Projection> {
    let dense = Dense::new(tensor.clone(), size_n, size_k)?;
    Ok(Projection::Dense(DenseLinear::of(tensor.name().to_owned(), dense)))
}
