//! How the experts of a model are routed, or why that is not known.

use serde_json::{Value, json};

use crate::model::Model;
use crate::model::layers::{Layers, Role};
use crate::model::routing::MoeRouting;

/// The layers that share one answer.
pub(super) struct LayerRouting {
    modules: Vec<String>,
    found: Result<MoeRouting, String>,
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

impl LayerRouting {
    /// One line for people.
    pub(super) fn line(&self) -> String {
        let more = match self.modules.len() {
            1 => String::new(),
            n => format!(" and {} more", n - 1),
        };
        let answer = match &self.found {
            Ok(routing) => {
                let notes = routing.notes.iter().map(|n| format!("; {n}")).collect::<String>();
                format!("{}{notes}", routing.summary())
            }
            Err(reason) => format!("does not run: {reason}"),
        };
        format!("{}{more}: {answer}", self.modules[0])
    }

    /// The rule, or the reason against.
    pub(super) fn as_json(&self) -> Value {
        let (source, rule, notes) = match &self.found {
            Ok(r) => (Some(&r.source), Some(r.rule.to_json()), Some(&r.notes)),
            Err(_) => (None, None, None),
        };
        json!({
            "modules": self.modules,
            "source": source,
            "rule": rule,
            "notes": notes,
            "error": self.found.as_ref().err(),
        })
    }
}
