//! Layers whose experts are stored together in one tensor, in unsupported forms.
//!
//! Only gpt-oss's `gate_up_proj_blocks` and `_scales` are supported. Every other tensor with
//! several experts is recognized by its name and number of dimensions, so that `convert`, `inspect`
//! and `run` can name its module in their error.

use std::collections::{BTreeMap, BTreeSet};

use super::Model;

/// A module whose experts are stored in an unsupported form.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fused {
    /// The module.
    pub module: String,
    /// The tensors found, and the supported forms.
    pub reason: String,
}

/// The module of a tensor with several experts, from its name.
fn module_of(name: &str, dimensions: usize) -> Option<&str> {
    if dimensions < 2 {
        return None;
    }
    let parts: Vec<&str> = name.split('.').collect();
    // `experts.gate_up_proj`, `experts.fc1.weight`, `ffn.experts.mlp.w1`; not `experts.7.w1.weight`.
    let at = parts.iter().position(|p| *p == "experts");
    if let Some(at) = at {
        let next = parts.get(at + 1)?;
        let is_one = next.bytes().all(|b| b.is_ascii_digit());
        let end = parts[..=at].join(".").len();
        return (!is_one).then(|| &name[..end]);
    }
    // `block_sparse_moe.input_linear.weight`, `moe.gate_proj.weight`.
    const PARENTS: &[&str] = &["mlp", "moe", "block_sparse_moe", "feed_forward", "ffn", "mixer"];
    const MATRICES: &[&str] =
        &["input_linear", "output_linear", "gate_proj", "up_proj", "down_proj", "gate_up_proj"];
    let parent = parts.iter().rposition(|p| PARENTS.contains(p))?;
    let matrix = parts.get(parent + 1).is_some_and(|p| MATRICES.contains(p));
    (matrix && dimensions > 2).then(|| &name[..parts[..=parent].join(".").len()])
}

/// Every such module of `model`; `owned` are the tensors of stacks.
pub(super) fn find(model: &Model<'_>, owned: &BTreeSet<String>) -> Vec<Fused> {
    if model.config.get("marlinspike").is_some() {
        // Converted experts are also stacked; the `marlinspike` section describes them.
        return Vec::new();
    }
    let mut modules: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for entry in model.entries().filter(|e| !owned.contains(e.name())) {
        let Some(module) = module_of(entry.name(), entry.shape().len()) else { continue };
        let tensor = &entry.name()[module.len() + 1..];
        let shown = format!("`{tensor}` {} {:?}", entry.dtype(), entry.shape());
        modules.entry(module).or_default().push(shown);
    }
    let reason = |tensors: &[String]| {
        let more = tensors.len().saturating_sub(4);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        format!(
            "found fused experts {}{more}, expected one matrix for each expert and projection \
             (experts.N.gate_proj, up_proj, down_proj or w1, w3, w2) or gpt-oss's blocks and scales",
            tensors[..tensors.len().min(4)].join(", "),
        )
    };
    let fused = |(module, tensors): (&str, Vec<String>)| Fused {
        module: module.to_owned(),
        reason: reason(&tensors),
    };
    modules.into_iter().map(fused).collect()
}

/// Whether the model has experts in any form.
pub fn has_experts(model: &Model<'_>) -> bool {
    let mut entries = model.entries();
    entries.any(|e| {
        e.name().split('.').any(|p| p == "experts")
            || module_of(e.name(), e.shape().len()).is_some()
    })
}

#[cfg(test)]
mod tests {
    use super::module_of;

    #[test]
    fn names_of_fused_experts() {
        let layer = "model.layers.0";
        for (name, dimensions, module) in [
            ("mlp.experts.gate_up_proj", 3, Some("mlp.experts")),
            ("mlp.experts.gate_up_proj_bias", 2, Some("mlp.experts")),
            ("mlp.experts.fc1.weight", 3, Some("mlp.experts")),
            ("ffn.experts.mlp.w1", 2, Some("ffn.experts")),
            ("block_sparse_moe.input_linear.weight", 3, Some("block_sparse_moe")),
            ("moe.gate_proj.weight", 3, Some("moe")),
            ("moe.gate_proj.weight", 2, None),
            ("mlp.experts.7.gate_proj.weight", 2, None),
            ("mlp.experts.e_score_correction_bias", 1, None),
            ("mlp.shared_experts.gate_proj.weight", 2, None),
            ("mlp.gate_proj.weight", 2, None),
            ("mamba.conv1d.weight", 3, None),
        ] {
            let (full, expected) =
                (format!("{layer}.{name}"), module.map(|m| format!("{layer}.{m}")));
            assert_eq!(module_of(&full, dimensions), expected.as_deref(), "{name}");
        }
    }
}
