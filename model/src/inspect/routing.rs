//! The routing rules of a model's experts layers, or the reasons why they are unknown.

use crate::model::Model;
use crate::model::layers::{Layers, Role};
use crate::model::routing::{MoeRouting, is_whole};

/// Layers that share a routing rule or a reason.
#[derive(Debug, Clone)]
pub struct LayerRouting {
    /// The layers' modules; at least one.
    pub modules: Vec<String>,
    /// The routing rule, or the reason why there is none.
    pub found: Result<MoeRouting, String>,
}

/// Determines the routing of every experts layer.
pub(super) fn of(model: &Model<'_>, layers: &Layers) -> Vec<LayerRouting> {
    let mut all: Vec<LayerRouting> = Vec::new();
    for stack in layers.stacks.iter().filter(|s| s.role == Role::W13) {
        let interleaved = stack.is_interleaved();
        let module = &stack.module;
        let experts = stack.experts.len();
        let found = match is_whole(model, module) {
            Ok(true) => MoeRouting::token_groups(model, module).and_then(|groups| {
                MoeRouting::read_whole(model, module, experts / groups, interleaved)
            }),
            Ok(false) => MoeRouting::read(model, module, experts, interleaved),
            Err(e) => Err(e),
        };
        // Only the names of biases and of modules differ between layers.
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
