//! compressed-tensors configs: groups, targets and ignore lists (vLLM 0.21.0
//! `compressed_tensors.py` and `compressed_tensors/utils.py`).

mod args;
mod choose;
mod transform;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use serde_json::Value;

use super::json::Obj;
use super::{
    ConfigError, ConfigResult, Module, ModuleKind, PatternBudget, PyPattern, Scheme, modules,
};
use crate::formats::BLOCK_FORMATS;
use crate::formats::blocks::BlockFormat;

pub use args::{CtArgs, CtDynamic, CtStrategy, CtType};

/// How a group's tensors are compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum CtFormat {
    Dense,
    Sparse24Bitmask,
    SparseBitmask,
    IntQuantized,
    FloatQuantized,
    NaiveQuantized,
    PackQuantized,
    Marlin24,
    MixedPrecision,
    Block(&'static BlockFormat),
}

impl CtFormat {
    const ALL: &'static [(&'static str, Self)] = &[
        ("dense", Self::Dense),
        ("sparse-24-bitmask", Self::Sparse24Bitmask),
        ("sparse-bitmask", Self::SparseBitmask),
        ("int-quantized", Self::IntQuantized),
        ("float-quantized", Self::FloatQuantized),
        ("naive-quantized", Self::NaiveQuantized),
        ("pack-quantized", Self::PackQuantized),
        ("marlin-24", Self::Marlin24),
        ("mixed-precision", Self::MixedPrecision),
    ];

    /// Name as the config writes it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Block(format) => format.compressed_tensors,
            _ => Self::ALL.iter().find(|(_, f)| *f == self).map_or("", |(n, _)| n),
        }
    }

    fn parse(obj: &Obj<'_>) -> ConfigResult<Option<Self>> {
        let Some(name) = obj.opt_str("format")? else { return Ok(None) };
        let blocks = BLOCK_FORMATS.into_iter().map(|f| (f.compressed_tensors, Self::Block(f)));
        let all = || Self::ALL.iter().copied().chain(blocks.clone());
        match all().find(|(n, _)| *n == name) {
            Some((_, f)) => Ok(Some(f)),
            None => {
                let known: Vec<_> = all().map(|(n, _)| n).collect();
                let found: String = name.chars().take(60).collect();
                Err(ConfigError::bad(obj.path("format"), format!("{found:?}"), known.join(", ")))
            }
        }
    }

    /// Whether activations may also be quantized (upstream `is_activation_quantization_format`).
    pub const fn quantizes_activations(self) -> bool {
        match self {
            Self::NaiveQuantized | Self::IntQuantized | Self::FloatQuantized => true,
            Self::Block(format) => format.quantizes_activations(),
            _ => false,
        }
    }
}

/// One target or ignore entry.
#[derive(Debug, Clone)]
enum Target {
    /// A module name or a class name.
    Literal(String),
    /// `re:` and a pattern.
    Pattern(PyPattern),
}

impl Target {
    fn new(text: &str, budget: &Arc<PatternBudget>) -> ConfigResult<Self> {
        match text.strip_prefix("re:") {
            Some(pattern) => Ok(Self::Pattern(PyPattern::within(text, pattern, budget)?)),
            None => Ok(Self::Literal(text.to_owned())),
        }
    }

    fn matches_name(&self, name: &str) -> ConfigResult<bool> {
        match self {
            Self::Literal(t) => Ok(t == name),
            Self::Pattern(p) => p.matches_start(name),
        }
    }

    /// A class name matches if it contains the target, ignoring case.
    fn matches_class(&self, class: &str) -> ConfigResult<bool> {
        match self {
            Self::Literal(t) => Ok(class.to_lowercase().contains(&t.to_lowercase())),
            Self::Pattern(p) => p.matches_start(class),
        }
    }
}

/// What a config group prescribes.
#[derive(Debug, Clone, PartialEq)]
pub struct CtScheme {
    /// Weights.
    pub weights: CtArgs,
    /// Activations, where the group quantizes them.
    pub input_activations: Option<CtArgs>,
    /// The group's own format, else the config's.
    pub format: Option<CtFormat>,
}

/// A compressed-tensors quantization config.
#[derive(Debug, Clone)]
pub struct CompressedTensorsConfig {
    /// Format of groups that name none.
    pub format: Option<CtFormat>,
    targets: Vec<(Target, usize)>,
    schemes: Vec<CtScheme>,
    /// Ignored names.
    ignore: BTreeSet<String>,
    /// Ignored patterns, in file order.
    ignore_patterns: Vec<PyPattern>,
    /// Rotations of activations at run time.
    transforms: Vec<transform::Transform>,
    /// Budget of all patterns.
    budget: Arc<PatternBudget>,
}

/// The largest number of targets and ignore entries accepted.
const MAX_TARGETS: usize = 65_536;

fn bounded(obj: &Obj<'_>, key: &str, count: usize) -> ConfigResult<()> {
    if count <= MAX_TARGETS {
        return Ok(());
    }
    Err(ConfigError::bad(
        obj.path(key),
        format!("{count} entries"),
        format!("at most {MAX_TARGETS}"),
    ))
}

impl CompressedTensorsConfig {
    /// Parses a `quantization_config` (or `compression_config`).
    ///
    /// Groups whose only target ends in `Attention` are left out, as upstream does. Two groups
    /// may name the same target if they prescribe the same.
    ///
    /// # Errors
    /// The named [`ConfigError`]; [`ConfigError::Conflict`] for one target with two
    /// prescriptions (upstream silently takes the last), [`ConfigError::Refused`] for sparse
    /// weights and for an activation format that quantizes integer weights without saying how
    /// activations are quantized.
    pub fn from_value(config: &Value) -> ConfigResult<Self> {
        let obj = Obj::new("", config)?;
        let format = CtFormat::parse(&obj)?;
        if let Some(sparsity) = obj.opt_obj("sparsity_config")?
            && sparsity.entries().next().is_some()
            && !matches!(sparsity.opt_str("format")?, None | Some("dense"))
        {
            return Err(ConfigError::refused("sparsity_config", "sparse weights have no layout"));
        }
        let mut this = Self {
            format,
            targets: Vec::new(),
            schemes: Vec::new(),
            ignore: BTreeSet::new(),
            ignore_patterns: Vec::new(),
            transforms: Vec::new(),
            budget: PatternBudget::new(),
        };
        this.transforms = transform::read(&obj, &this.budget)?;
        let mut seen = HashMap::new();
        if let Some(groups) = obj.opt_obj("config_groups")? {
            for (name, value) in groups.entries() {
                this.add_group(&Obj::new(groups.path(name), value)?, &mut seen)?;
            }
        }
        let ignore = obj.strings("ignore")?;
        bounded(&obj, "ignore", ignore.len())?;
        for text in ignore {
            match Target::new(&text, &this.budget)? {
                Target::Literal(name) => {
                    this.ignore.insert(name);
                }
                Target::Pattern(p) => this.ignore_patterns.push(p),
            }
        }
        Ok(this)
    }

    fn add_group(
        &mut self,
        group: &Obj<'_>,
        seen: &mut HashMap<String, usize>,
    ) -> ConfigResult<()> {
        if group.opt_array("targets")?.is_none() {
            return Err(ConfigError::MissingKey { key: group.path("targets") });
        }
        let targets = group.strings("targets")?;
        bounded(group, "targets", self.targets.len() + targets.len())?;
        if targets.len() == 1 && targets[0].ends_with("Attention") {
            return Ok(());
        }
        let weights = match group.opt_obj("weights")? {
            Some(w) => CtArgs::parse(&w)?,
            None => return Err(ConfigError::MissingKey { key: group.path("weights") }),
        };
        let activations =
            group.opt_obj("input_activations")?.map(|a| CtArgs::parse(&a)).transpose()?;
        let own = CtFormat::parse(group)?;
        let format = own.or(self.format);
        if activations.is_none()
            && format.is_some_and(CtFormat::quantizes_activations)
            && weights.ty != CtType::Float
        {
            return Err(ConfigError::refused(
                group.path("weights"),
                format!(
                    "format {} with integer weights needs input_activations",
                    format.map_or("", CtFormat::name)
                ),
            ));
        }
        let scheme = CtScheme { weights, input_activations: activations, format };
        for text in targets {
            match seen.get(&text) {
                None => {
                    self.targets.push((Target::new(&text, &self.budget)?, self.schemes.len()));
                    seen.insert(text, self.schemes.len());
                }
                Some(&other) if self.schemes.get(other).is_none_or(|s| *s == scheme) => {}
                Some(_) => {
                    return Err(ConfigError::Conflict {
                        subject: text,
                        reason: format!("{} and an earlier group target it", group.path("targets")),
                    });
                }
            }
        }
        self.schemes.push(scheme);
        Ok(())
    }

    /// What the config prescribes for `module`; `None` when it is ignored or no target matches.
    ///
    /// Targets are tried in file order by name, then by class, then by the shards of a fused
    /// layer (all must match; the first shard's target counts).
    ///
    /// # Errors
    /// [`ConfigError::MixedShards`] when some shards of a fused layer are ignored,
    /// [`ConfigError::Conflict`] when the projections of a [`ModuleKind::FusedMoe`] layer get
    /// different prescriptions.
    pub fn group_for(&self, module: &Module<'_>) -> ConfigResult<Option<&CtScheme>> {
        if module.kind != ModuleKind::FusedMoe {
            return self.group_for_name(module);
        }
        // As in upstream, the names of expert 0 represent all experts.
        let names = ["gate_proj", "up_proj", "down_proj"].map(|p| format!("{}.0.{p}", module.name));
        let mut found = None;
        for (i, name) in names.iter().enumerate() {
            let one = self.group_for_name(&Module { name, ..*module })?;
            match found {
                Some(first) if first != one => {
                    return Err(ConfigError::Conflict {
                        subject: module.name.to_owned(),
                        reason: format!("{} and {} differ", names[0], names[i]),
                    });
                }
                _ => found = Some(one),
            }
        }
        Ok(found.flatten())
    }

    fn group_for_name(&self, module: &Module<'_>) -> ConfigResult<Option<&CtScheme>> {
        if self.is_ignored(module)? {
            return Ok(None);
        }
        Ok(self.target_for(module)?.map(|i| &self.schemes[i]))
    }

    /// Whether the ignore list names `module`; of a fused layer all shards must agree.
    pub fn is_ignored(&self, module: &Module<'_>) -> ConfigResult<bool> {
        self.budget.ask(module.name);
        let any = |name: &str| -> ConfigResult<bool> {
            if self.ignore.contains(name) {
                return Ok(true);
            }
            for pattern in &self.ignore_patterns {
                if pattern.matches_start(name)? {
                    return Ok(true);
                }
            }
            Ok(false)
        };
        // A fused layer that is ignored under its own name is ignored regardless of its shards.
        if self.ignore.contains(module.name) {
            return Ok(true);
        }
        modules::unanimous(module, "ignored", any)
    }

    fn target_for(&self, module: &Module<'_>) -> ConfigResult<Option<usize>> {
        for (target, scheme) in &self.targets {
            if target.matches_name(module.name)? {
                return Ok(Some(*scheme));
            }
        }
        for (target, scheme) in &self.targets {
            if target.matches_class(module.kind.class_name())? {
                return Ok(Some(*scheme));
            }
        }
        // Experts were linear layers when the config was written, so `Linear` includes them.
        if module.kind == ModuleKind::FusedMoe
            && let Some((_, scheme)) =
                self.targets.iter().find(|(t, _)| matches!(t, Target::Literal(l) if l == "Linear"))
        {
            return Ok(Some(*scheme));
        }
        let Some(shards) = module.fused.shards_by_suffix(module.name) else { return Ok(None) };
        let mut first = None;
        for shard in &shards {
            let mut hit = None;
            for (target, scheme) in &self.targets {
                if target.matches_name(shard)? {
                    hit = Some(*scheme);
                    break;
                }
            }
            match hit {
                None => return Ok(None),
                Some(scheme) => {
                    first.get_or_insert(scheme);
                }
            }
        }
        Ok(first)
    }

    /// The scheme of one module's tensors.
    ///
    /// # Errors
    /// The errors of [`Self::group_for`]; [`ConfigError::NoScheme`] if no known scheme matches,
    /// [`ConfigError::Refused`] if upstream refuses it.
    pub fn scheme_for(&self, module: &Module<'_>) -> ConfigResult<Scheme> {
        match self.group_for(module)? {
            Some(group) => {
                transform::expect_none(&self.transforms, module)?;
                choose::scheme(module, group)
            }
            None => Ok(Scheme::Unquantized {
                reason: if self.is_ignored(module)? {
                    "in the ignore list".to_owned()
                } else {
                    "no target matches".to_owned()
                },
            }),
        }
    }
}
