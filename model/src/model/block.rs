//! The parts of an experts layer's block around its routed experts: router, shared expert, output
//! bias.

use marlinspike::moe::families::{self, BlockNumbers, ExpertsRule, FoundStage, Path, Surroundings};
use marlinspike::num::tensor::{DType, Tensor};

use super::routing::layer_prefix;
use super::{Model, ModelError};

/// The block around the experts of one layer.
#[derive(Debug, Clone)]
pub struct BlockParts {
    /// The family's rule of the block.
    pub rule: ExpertsRule,
    /// Numbers of the block that its config states.
    pub numbers: BlockNumbers,
    /// Whether the router multiplies in f32, whatever the type of the hidden states.
    pub logits_are_f32: bool,
    /// Tensors that are not quantized.
    pub tensors: Surroundings,
    /// Quantized linear layers of the shared expert: gate, up, down.
    pub shared_modules: Option<[String; 3]>,
    /// The quantized linear layer that is the router.
    pub router_module: Option<String>,
    /// The quantized linear layer that is the shared expert's gate.
    pub gate_module: Option<String>,
}

/// The places of an experts layer's names: the prefix of its layer (`model.layers.1.`) and the
/// parent of the experts below it (`mlp.`).
pub fn places(module: &str) -> (&str, String) {
    let prefix = layer_prefix(module).unwrap_or("");
    let below = &module[prefix.len()..];
    let parent = match below.strip_suffix("experts") {
        Some(parent) => parent.to_owned(),
        None => format!("{below}."),
    };
    (prefix, parent)
}

/// The first of `modules` that is a quantized linear layer; `None` if the files have none of them.
///
/// # Errors
/// [`ModelError::Module`] for a weight that is neither of 16 or 32 bits nor of a quantized layer.
fn stored_module(
    model: &Model<'_>,
    layer: &str,
    modules: impl Iterator<Item = String>,
    quantized: &dyn Fn(&str) -> bool,
) -> Result<Option<String>, ModelError> {
    for module in modules {
        if quantized(&module) {
            return Ok(Some(module));
        }
        let weights = ["weight", "qweight", "weight_packed"].map(|w| format!("{module}.{w}"));
        if let Some(entry) = weights.iter().find_map(|name| model.entry(name)) {
            let found = format!("tensor `{}`: found {}", entry.name(), entry.dtype());
            let reason = format!("{found}, expected a quantized layer, F32, F16 or BF16");
            return Err(ModelError::module(layer, reason));
        }
    }
    Ok(None)
}

impl BlockParts {
    /// The block around the experts `module`; `None` for a family that is not known. `quantized`
    /// says whether a linear layer is quantized.
    ///
    /// # Errors
    /// [`ModelError::Module`] for a tensor or key that does not fit, by name.
    pub fn read(
        model: &Model<'_>,
        module: &str,
        quantized: &dyn Fn(&str) -> bool,
    ) -> Result<Option<Self>, ModelError> {
        let (prefix, parent) = places(module);
        let wrong = |e: marlinspike::Error| ModelError::module(module, e);
        let name = format!("{prefix}{parent}experts");
        let resolved = match families::resolve(&model.config, &name) {
            Ok(resolved) => resolved,
            // A stated routing replaces the family.
            Err(_) if model.stated_routing.is_some() => return Ok(None),
            Err(e) => return Err(wrong(e)),
        };
        let (rule, numbers) = families::block_rule(&model.config, &name).map_err(wrong)?;
        let get = |below: &str| -> Option<Tensor<'_>> {
            let full = format!("{prefix}{below}");
            let module = full.rsplit_once('.').map_or("", |(module, _)| module);
            let tensor = (!quantized(module)).then(|| model.tensor(&full).ok()).flatten()?;
            // Codes of a layer that no target took, without their scheme.
            matches!(tensor.dtype(), DType::F32 | DType::F16 | DType::BF16).then_some(tensor)
        };
        let tensors = Surroundings::read(&get, &parent, rule).map_err(wrong)?;
        let full = |names: [String; 3]| names.map(|n| format!("{prefix}{n}"));
        let shared_modules = Surroundings::shared_modules(&parent)
            .map(full)
            .find(|[_, up, down]| quantized(up) && quantized(down));
        let router_module = match &tensors.router_weight {
            Some(_) => None,
            None => {
                let all = Surroundings::router_modules(&parent).map(|m| format!("{prefix}{m}"));
                stored_module(model, module, all, quantized)?
            }
        };
        let gate = format!("{prefix}{}", Surroundings::gate_module(&parent));
        let gate_module = match &tensors.shared_gate {
            Some(_) => None,
            None => stored_module(model, module, std::iter::once(gate.clone()), quantized)?,
        };
        let has_shared = tensors.shared.is_some() || shared_modules.is_some();
        let has_gate = tensors.shared_gate.is_some() || gate_module.is_some();
        if rule.shared_gate && has_shared && !has_gate {
            let missing = format!("tensor `{gate}.weight` is missing");
            let reason =
                format!("{missing}: the shared expert of {} needs it", resolved.model_type);
            return Err(ModelError::module(module, reason));
        }
        let logits_are_f32 = families::logits_are_f32(&resolved.model_type);
        Ok(Some(Self {
            rule,
            numbers,
            logits_are_f32,
            tensors,
            shared_modules,
            router_module,
            gate_module,
        }))
    }

    /// The stages of the block `module` at `path`, after `hidden` features.
    ///
    /// # Errors
    /// [`ModelError::Module`] for a tensor that is missing or does not fit, by name.
    pub fn stages_at(
        &self,
        model: &Model<'_>,
        module: &str,
        path: Path,
        hidden: usize,
    ) -> Result<Vec<FoundStage>, ModelError> {
        let (prefix, parent) = places(module);
        let find = |name: &str| {
            let names = [format!("{prefix}{parent}{name}"), format!("{prefix}{name}")];
            let found = names.iter().find_map(|full| model.tensor(full).ok());
            found.map(Tensor::into_owned)
        };
        let found = self.rule.stages_at(path, &find, hidden);
        found.map_err(|e| ModelError::module(module, e))
    }
}
