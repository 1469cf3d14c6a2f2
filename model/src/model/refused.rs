//! Modules that are refused, each alone: the others of the model stay usable.

use std::collections::BTreeSet;

use marlinspike::config::Scheme;

use super::matrix::{Role, expert_of};
use super::stack::Layers;
use super::{Model, ModelError};

impl Layers {
    /// The layer that runs if none is named: the first with experts, or the first of all. A refusal
    /// changes nothing, because another layer would run in its place.
    pub fn first(&self) -> Option<&str> {
        let alone = self.refused.keys().map(String::as_str);
        let alone = alone.filter(|module| self.stacks.iter().all(|s| s.module != *module));
        let of_experts = |module: &&str| module.rsplit('.').next() == Some("experts");
        let experts = self.stacks.iter().filter(|s| s.role == Role::W13).map(|s| &*s.module);
        let experts = experts.chain(alone.clone().filter(of_experts)).min();
        let dense = self.stacks.iter().filter(|s| s.role == Role::Dense).map(|s| &*s.module);
        let head = |module: &&str| module.rsplit('.').next() == Some("lm_head");
        let layers = dense.chain(alone.clone().filter(|module| !head(module)));
        experts.or_else(|| layers.min()).or_else(|| alone.min())
    }

    /// Refuses a module; of an expert's projection the whole layer of experts.
    pub(super) fn refuse(&mut self, module: &str, reason: String) {
        let layer = expert_of(module).map_or(module, |(layer, ..)| layer);
        let reasons = self.refused.entry(layer.to_owned()).or_default();
        // The first projection that a rule of the config refuses is enough.
        if reasons.is_empty() {
            let named = layer == module || reason.contains(module);
            let own = if named { reason } else { format!("`{module}`: {reason}") };
            reasons.push(own);
        }
    }

    /// The error for the module `module`, if it is refused.
    ///
    /// # Errors
    /// [`ModelError::Module`] with every reason.
    pub fn expect_taken(&self, module: &str) -> Result<(), ModelError> {
        match self.refused.get(module) {
            None => Ok(()),
            Some(reasons) => Err(ModelError::module(module, reasons.join("; "))),
        }
    }
}

/// The scheme that the config states for a module, or the reason why the module is refused.
pub(super) fn scheme_of(
    model: &Model<'_>,
    module: &str,
    parts: &BTreeSet<&str>,
    quantized: bool,
) -> Result<Result<Scheme, String>, ModelError> {
    let plain = |reason: &str| Ok(Scheme::Unquantized { reason: reason.to_owned() });
    let Some(quant) = &model.quant else {
        return Ok(plain("the model has no quantization config"));
    };
    let weight = model.entry(&format!("{module}.weight"));
    if !quantized && (!parts.contains("weight") || weight.is_none_or(|w| w.shape().len() != 2)) {
        return Ok(plain("not a matrix"));
    }
    let scheme = match quant.scheme_for(module) {
        Ok(scheme) => scheme,
        // A rule of the config that concerns this module alone.
        Err(e) if e.is_of_module() => {
            return Ok(match quantized {
                true => Err(e.to_string()),
                false => plain(&e.to_string()),
            });
        }
        Err(e) => {
            let (path, source) = (model.dir.join("config.json"), Box::new(e.into()));
            return Err(ModelError::Format { path, source });
        }
    };
    Ok(match (quantized, weight) {
        (false, Some(w)) if scheme.is_quantized() => {
            plain(&format!("stored as {}, not quantized", w.dtype()))
        }
        _ => Ok(scheme),
    })
}
