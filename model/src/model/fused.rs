//! Layers whose experts are stored together in one tensor, in unsupported forms.
//!
//! gpt-oss's `gate_up_proj_blocks` and `_scales` and transformers' FP8 experts are supported. Every other tensor with
//! several experts is recognized by its name and number of dimensions, so that `convert`, `inspect`
//! and `run` can name its module in their error.

use std::collections::{BTreeMap, BTreeSet};

use marlinspike::config::{ActivationScheme, Fp8Scheme, ScaleStrategy, Scheme};
use marlinspike::num::tensor::DType;

use super::matrix::Role;
use super::{Model, ModelError};

/// Tensors of FP8 experts, `[E, N, K]` in e4m3: transformers' `FP8Experts`. Their scales are named
/// `..._scale_inv`.
pub(super) const FP8: [(&str, Role); 2] = [("gate_up_proj", Role::W13), ("down_proj", Role::W2)];

/// Whether `module` holds FP8 experts in three dimensions with scales of their own.
pub(super) fn is_fp8(model: &Model<'_>, module: &str) -> bool {
    FP8.iter().all(|(name, _)| {
        let weight = model.entry(&format!("{module}.{name}"));
        let scale = model.entry(&format!("{module}.{name}_scale_inv"));
        scale.is_some()
            && weight.is_some_and(|w| w.dtype() == DType::F8E4M3 && w.shape().len() == 3)
    })
}

/// The scheme of these experts.
///
/// # Errors
/// [`ModelError::Module`] unless the config says FP8 in blocks with dynamic activations.
pub(super) fn fp8_scheme(model: &Model<'_>, module: &str) -> Result<Scheme, ModelError> {
    let fail = |reason: String| Err(ModelError::module(module, reason));
    let Some(quant) = &model.quant else {
        return fail("found FP8 experts, but the model has no quantization config".to_owned());
    };
    let scheme = quant.scheme_for(&format!("{module}.0.gate_proj"));
    let scheme = scheme.map_err(|e| ModelError::module(module, e))?;
    match &scheme {
        Scheme::Fp8(f)
            if matches!(f.strategy, ScaleStrategy::Block { .. })
                && f.activations != ActivationScheme::StaticTensor =>
        {
            Ok(scheme)
        }
        other => fail(format!(
            "found FP8 experts in three dimensions and {} in the config, expected FP8 with \
             weight_block_size and dynamic activations",
            other.label()
        )),
    }
}

/// The number of experts of the tensor `name`; `count` is that of the tensor before.
///
/// # Errors
/// [`ModelError::Module`] where the numbers differ, or gate and up share a block of rows.
pub(super) fn fp8_experts(
    model: &Model<'_>,
    name: &str,
    (role, scheme): (Role, &Scheme),
    count: Option<usize>,
) -> Result<usize, ModelError> {
    let Scheme::Fp8(Fp8Scheme { strategy: ScaleStrategy::Block { block_n, .. }, .. }) = scheme
    else {
        return Err(ModelError::module(name, format!("found {}", scheme.label())));
    };
    let scale = format!("{name}_scale_inv");
    let found = [name, &scale].map(|name| (name, model.entry(name)));
    let mut experts = count;
    for (name, entry) in found {
        let shape = entry.map_or(&[][..], |e| e.shape());
        let [first, _, _] = *shape else {
            let reason =
                format!("tensor `{name}`: found shape {shape:?}, expected three dimensions");
            return Err(ModelError::module(name, reason));
        };
        if first == 0 || experts.is_some_and(|count| count != first) {
            let expected = experts.map_or("1 or more".to_owned(), |count| count.to_string());
            let reason = format!("tensor `{name}`: found {first} experts, expected {expected}");
            return Err(ModelError::module(name, reason));
        }
        experts = Some(first);
    }
    // A block of rows with one scale may not hold rows of both.
    let rows = model.entry(name).map_or(0, |e| e.shape()[1]);
    if role == Role::W13 && !rows.is_multiple_of(2 * block_n) {
        let found = format!("tensor `{name}`: found {rows} rows of gate and up");
        let reason = format!("{found}, expected a multiple of {}, blocks of each", 2 * block_n);
        return Err(ModelError::module(name, reason));
    }
    Ok(experts.unwrap_or(0))
}

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
             (experts.N.gate_proj, up_proj, down_proj or w1, w3, w2), stacks \
             of blocks and scales, or FP8 gate_up_proj and down_proj [E, N, K] with _scale_inv",
            tensors[..tensors.len().min(4)].join(", "),
        )
    };
    let fused = |(module, tensors): (&str, Vec<String>)| Fused {
        module: module.to_owned(),
        reason: reason(&tensors),
    };
    modules.into_iter().map(fused).collect()
}

/// The modules of experts whose matrices all have 16 or 32 bits, one by one or fused.
pub(super) fn plain(model: &Model<'_>, owned: &BTreeSet<String>) -> Vec<String> {
    if model.config.get("marlinspike").is_some() {
        return Vec::new();
    }
    let mut modules: BTreeMap<&str, bool> = BTreeMap::new();
    for entry in model.entries().filter(|e| !owned.contains(e.name())) {
        let name = entry.name();
        let one = name.find(".experts.").map(|at| (&name[..at + 8], &name[at + 9..]));
        let one = one.filter(|(_, rest)| rest.starts_with(|c: char| c.is_ascii_digit()));
        let module = match one {
            Some((module, _)) if entry.shape().len() == 2 => module,
            Some(_) => continue,
            None => match module_of(name, entry.shape().len()) {
                Some(module) => module,
                None => continue,
            },
        };
        let is_plain = matches!(entry.dtype(), DType::F32 | DType::F16 | DType::BF16);
        *modules.entry(module).or_insert(true) &= is_plain;
    }
    let plain = modules.into_iter().filter(|(_, is_plain)| *is_plain);
    plain.map(|(module, _)| module.to_owned()).collect()
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
