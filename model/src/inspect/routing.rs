//! How the experts of a model are routed, or why that is not known.

use crate::model::Model;
use crate::model::layers::{Layers, Role};
use crate::model::routing::MoeRouting;

/// The layers that share one answer.
#[derive(Debug, Clone)]
pub struct LayerRouting {
    /// The layers' modules; at least one.
    pub modules: Vec<String>,
    /// The answer, or why there is none.
    pub found: Result<MoeRouting, String>,
}

/// Asks about every layer of experts.
pub(super) fn of(model: &Model<'_>, layers: &Layers) -> Vec<LayerRouting> {
    let mut all: Vec<LayerRouting> = Vec::new();
    for stack in layers.stacks.iter().filter(|s| s.role == Role::W13) {
        let interleaved = stack.experts[0].iter().any(|matrix| matrix.index.is_some());
        let module = &stack.module;
        let found = MoeRouting::read(model, module, stack.experts.len(), interleaved);
        // Layers differ in their biases, and in the names that errors have.
        let found = found.map_err(|e| match e {
            crate::model::ModelError::Module { reason, .. } => reason,
            other => other.to_string(),
        });
        let same = |a: &MoeRouting, b: &MoeRouting| a.rule == b.rule && a.source == b.source;
        let known = all.iter_mut().find(|k| match (&k.found, &found) {
            (Ok(a), Ok(b)) => same(a, b),
            (Err(a), Err(b)) => a == b,
            _ => false,
        });
        match known {
            Some(known) => known.modules.push(module.clone()),
            None => all.push(LayerRouting { modules: vec![module.clone()], found }),
        }
    }
    all
}
