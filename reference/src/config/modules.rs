//! Names and kinds of modules, and skip lists that name modules literally.

use super::limits::MAX_LIST_STEPS;
use super::{ConfigError, ConfigResult};

/// The kind of layer of a module; configs match layer classes as well as names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ModuleKind {
    /// A linear layer.
    Linear,
    /// One projection of one expert, under its own name in the checkpoint.
    Expert,
    /// The output embedding.
    LmHead,
    /// All experts of a layer at once (`model.layers.0.mlp.experts`).
    FusedMoe,
}

impl ModuleKind {
    /// Class name that compressed-tensors targets are compared with.
    pub const fn class_name(self) -> &'static str {
        match self {
            Self::Linear | Self::Expert => "Linear",
            Self::LmHead => "ParallelLMHead",
            Self::FusedMoe => "FusedMoE",
        }
    }

    /// The kind that a checkpoint's module name suggests.
    pub fn of_name(name: &str) -> Self {
        let mut parts = name.split('.').rev();
        match parts.next() {
            Some("lm_head") => Self::LmHead,
            Some("experts") => Self::FusedMoe,
            _ if parts.any(|p| p == "experts") => Self::Expert,
            _ => Self::Linear,
        }
    }
}

/// Fused layers and the shards that a checkpoint stores for them, in order
/// (upstream's `packed_modules_mapping`).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FusedMapping(Vec<(String, Vec<String>)>);

impl FusedMapping {
    /// No fused layers: names are the checkpoint's own.
    pub const fn none() -> Self {
        Self(Vec::new())
    }

    /// `qkv_proj` and `gate_up_proj`, as most decoder models fuse them.
    pub fn decoder() -> Self {
        Self::new([
            ("qkv_proj", vec!["q_proj", "k_proj", "v_proj"]),
            ("gate_up_proj", vec!["gate_proj", "up_proj"]),
        ])
    }

    /// A mapping from its rows.
    pub fn new<'a>(rows: impl IntoIterator<Item = (&'a str, Vec<&'a str>)>) -> Self {
        let own =
            |(k, v): (&str, Vec<&str>)| (k.to_owned(), v.into_iter().map(str::to_owned).collect());
        Self(rows.into_iter().map(own).collect())
    }

    /// Names of the shards of `module` when its last component is a fused layer.
    pub fn shards(&self, module: &str) -> Option<Vec<String>> {
        let last = module.rsplit('.').next().unwrap_or(module);
        let (fused, shards) = self.0.iter().find(|(k, _)| k == last)?;
        Some(replace_all(module, fused, shards))
    }

    /// Like [`Self::shards`], for the first row that `module` ends with (which is how targets,
    /// unlike ignore lists, are expanded upstream).
    pub fn shards_by_suffix(&self, module: &str) -> Option<Vec<String>> {
        let (fused, shards) = self.0.iter().find(|(k, _)| module.ends_with(k.as_str()))?;
        Some(replace_all(module, fused, shards))
    }
}

fn replace_all(module: &str, fused: &str, shards: &[String]) -> Vec<String> {
    shards.iter().map(|s| module.replace(fused, s)).collect()
}

/// A module, as described to a config.
#[derive(Debug, Clone, Copy)]
pub struct Module<'a> {
    /// Full name, for example `model.layers.0.self_attn.q_proj`.
    pub name: &'a str,
    /// Kind of layer.
    pub kind: ModuleKind,
    /// Names of fused layers.
    pub fused: &'a FusedMapping,
}

impl<'a> Module<'a> {
    /// A module under its checkpoint name, nothing fused; the kind follows from the name.
    pub fn in_checkpoint(name: &'a str) -> Self {
        static NONE: FusedMapping = FusedMapping::none();
        Self { name, kind: ModuleKind::of_name(name), fused: &NONE }
    }
}

/// Applies `is` to every shard of a fused layer, or to the module itself. All shards must agree.
///
/// Fails with [`ConfigError::MixedShards`] (upstream: `ValueError`).
pub(super) fn unanimous(
    module: &Module<'_>,
    what: &'static str,
    mut is: impl FnMut(&str) -> ConfigResult<bool>,
) -> ConfigResult<bool> {
    let Some(shards) = module.fused.shards(module.name).filter(|s| !s.is_empty()) else {
        return is(module.name);
    };
    let first = is(&shards[0])?;
    for shard in &shards[1..] {
        if is(shard)? != first {
            return Err(ConfigError::MixedShards {
                module: module.name.to_owned(),
                shards: shards.join(", "),
                what,
            });
        }
    }
    Ok(first)
}

/// Remaining steps for comparing one name with a list.
pub(super) struct ListSteps(u64);

impl ListSteps {
    /// Takes the steps of comparing `name` literally with every entry in advance.
    ///
    /// Fails with [`ConfigError::PatternBudget`].
    pub(super) fn new(list: &[String], name: &str) -> ConfigResult<Self> {
        let mut left = Self(MAX_LIST_STEPS);
        for entry in list {
            left.take(entry, 1 + (entry.len() + name.len()) as u64 / 8)?;
        }
        Ok(left)
    }

    /// Takes `steps` for `entry`.
    pub(super) fn take(&mut self, entry: &str, steps: u64) -> ConfigResult<()> {
        match self.0.checked_sub(steps) {
            Some(left) => {
                self.0 = left;
                Ok(())
            }
            None => Err(ConfigError::PatternBudget {
                rule: entry.chars().take(200).collect(),
                what: "steps of comparing a name with a list",
                limit: MAX_LIST_STEPS,
            }),
        }
    }
}

/// How a literal list of names is compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SkipMatch {
    /// The whole name.
    Exact,
    /// Any part of the name.
    Substring,
}

/// Whether a literal list names `module` (upstream `is_layer_skipped`).
///
/// With [`SkipMatch::Exact`], a name with `experts` in it is skipped when it is part of some entry
/// with `experts` in it, since entries may name single projections of a fused layer. Experts of a
/// layer are skipped together, so the name of one projection is replaced by that of its layer.
pub(super) fn is_skipped(
    module: &Module<'_>,
    list: &[String],
    how: SkipMatch,
) -> ConfigResult<bool> {
    ListSteps::new(list, module.name)?;
    let fused = module.fused.shards(module.name).is_some();
    if !fused && how == SkipMatch::Exact && module.name.contains("experts") {
        let layer = match module.name.find(".experts.") {
            Some(at) => &module.name[..at + ".experts".len()],
            None => module.name,
        };
        return Ok(list.iter().any(|l| l.contains("experts") && l.contains(layer)));
    }
    unanimous(module, "ignored", |name| {
        Ok(match how {
            SkipMatch::Exact => list.iter().any(|l| l == name),
            SkipMatch::Substring => list.iter().any(|l| name.contains(l.as_str())),
        })
    })
}
