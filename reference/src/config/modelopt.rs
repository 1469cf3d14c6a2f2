//! ModelOpt checkpoints (vLLM 0.21.0 `modelopt.py`), both the `config.json` form and the legacy
//! `hf_quant_config.json`.

use serde_json::Value;

use super::json::Obj;
use super::modules::{ListSteps, SkipMatch, is_skipped};
use super::scheme::{ActivationScheme, FloatContainer, Fp8Scheme, ScaleStrategy, Scheme};
use super::{ConfigError, ConfigResult, Module, ModuleKind};
use crate::formats::BLOCK_FORMATS;
use crate::formats::blocks::BlockFormat;

/// ModelOpt's quantization of every module that is not excluded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelOptAlgo {
    /// `FP8`: one scale per tensor, static activations.
    Fp8,
    /// `FP8_PER_CHANNEL_PER_TOKEN`.
    Fp8PerChannelPerToken,
    /// `FP8_PB_WO`: 128 × 128 blocks, 16-bit activations.
    Fp8PerBlock,
    /// A block format.
    Block {
        /// Which.
        format: &'static BlockFormat,
        /// Whether activations stay 16 bits wide.
        weight_only: bool,
    },
}

/// A ModelOpt quantization config.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelOptConfig {
    /// The quantization algorithm.
    pub algo: ModelOptAlgo,
    /// Names, parts of names and wildcards of unquantized modules.
    pub exclude: Vec<String>,
}

impl ModelOptConfig {
    /// Parses either form. Keys: `quant_algo` (any case, required), `group_size`, and
    /// `exclude_modules` (inside `quantization`) or `ignore`.
    ///
    /// # Errors
    /// The named [`ConfigError`]. `MIXED_PRECISION`, which names an algorithm per layer, is
    /// refused, as is a group size other than the format's where it has a global scale.
    pub fn from_value(config: &Value) -> ConfigResult<Self> {
        let root = Obj::new("", config)?;
        let (obj, exclude_key) = match root.opt_obj("quantization")? {
            Some(inner) => (inner, "exclude_modules"),
            None => (root, "ignore"),
        };
        // Checkpoints with a quantized KV cache alone state null.
        if let Some((_, null)) = obj.entries().find(|(key, v)| *key == "quant_algo" && v.is_null())
        {
            return Err(obj.wrong("quant_algo", null, "the algorithm of the weights"));
        }
        let algo = match obj.str("quant_algo")?.to_ascii_uppercase().as_str() {
            "FP8" => ModelOptAlgo::Fp8,
            "FP8_PER_CHANNEL_PER_TOKEN" => ModelOptAlgo::Fp8PerChannelPerToken,
            "FP8_PB_WO" => ModelOptAlgo::Fp8PerBlock,
            other => {
                let of =
                    |f: &'static BlockFormat| f.modelopt.iter().map(move |&(name, w)| (name, f, w));
                let names = || BLOCK_FORMATS.into_iter().flat_map(of);
                let Some((_, format, weight_only)) = names().find(|(name, ..)| *name == other)
                else {
                    let mut known = vec!["FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO"];
                    known.extend(names().map(|(name, ..)| name));
                    let last = known.pop().unwrap_or_default();
                    return Err(ConfigError::bad(
                        obj.path("quant_algo"),
                        format!("{other:?}"),
                        format!("{} or {last}", known.join(", ")),
                    ));
                };
                let weight_only = weight_only || has_no_activations(&obj)?;
                ModelOptAlgo::Block { format, weight_only }
            }
        };
        let group_size = obj.opt_int(&["group_size"])?;
        if let (Some(g), ModelOptAlgo::Block { format, .. }) = (group_size, algo)
            && format.has_global_scale()
            && g != format.block as i64
        {
            let expected = format!("{} for {}", format.block, format.title());
            return Err(ConfigError::bad(obj.path("group_size"), g, expected));
        }
        Ok(Self { algo, exclude: obj.strings(exclude_key)? })
    }

    /// Whether `module` is excluded: by its exact name (fused layers through their shards), by
    /// an entry that is part of its name, or by a wildcard (`*`, `?`, `[...]`).
    pub fn is_excluded(&self, module: &Module<'_>) -> ConfigResult<bool> {
        if is_skipped(module, &self.exclude, SkipMatch::Exact)? {
            return Ok(true);
        }
        let bare = module.name.strip_prefix("language_model.").unwrap_or(module.name);
        let mut left = ListSteps::new(&self.exclude, module.name)?;
        for e in &self.exclude {
            let part = module.name.contains(e.as_str()) || bare.contains(e.as_str());
            if module.name != e && part {
                return Ok(true);
            }
            if wildcard_within(e, module.name, |steps| left.take(e, steps))? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The scheme of one module's tensors.
    pub fn scheme_for(&self, module: &Module<'_>) -> ConfigResult<Scheme> {
        if module.kind == ModuleKind::LmHead {
            return Ok(Scheme::Unquantized { reason: "lm_head is not quantized".to_owned() });
        }
        if self.is_excluded(module)? {
            return Ok(Scheme::Unquantized { reason: "excluded".to_owned() });
        }
        let container = FloatContainer::ModelOpt;
        let fp8 = |strategy, activations| {
            Scheme::Fp8(Fp8Scheme { container, strategy, activations, scale_inv: false })
        };
        Ok(match self.algo {
            ModelOptAlgo::Fp8 => fp8(ScaleStrategy::Tensor, ActivationScheme::StaticTensor),
            ModelOptAlgo::Fp8PerChannelPerToken => {
                fp8(ScaleStrategy::Channel, ActivationScheme::DynamicToken)
            }
            ModelOptAlgo::Fp8PerBlock => {
                fp8(ScaleStrategy::Block { block_n: 128, block_k: 128 }, ActivationScheme::None)
            }
            ModelOptAlgo::Block { format, weight_only } => {
                Scheme::Block { format, container, weight_only }
            }
        })
    }
}

/// Whether every config group states that activations are not quantized.
fn has_no_activations(obj: &Obj<'_>) -> ConfigResult<bool> {
    let Some(groups) = obj.opt_obj("config_groups")? else { return Ok(false) };
    let states_none = |(name, value): (&str, &Value)| -> ConfigResult<bool> {
        let group = Obj::new(groups.path(name), value)?;
        Ok(group.entries().any(|(key, value)| key == "input_activations" && value.is_null()))
    };
    let states = groups.entries().map(states_none).collect::<ConfigResult<Vec<_>>>()?;
    Ok(!states.is_empty() && states.into_iter().all(|none| none))
}

/// Shell wildcards with the syntax of Python's `fnmatch`, in time proportional to the product of
/// the lengths: `*` any run, `?` one character, `[...]` one of a set (`!` negates, `a-z` ranges).
pub fn wildcard(pattern: &str, name: &str) -> bool {
    wildcard_within(pattern, name, |_| Ok(())).unwrap_or(false)
}

/// [`wildcard`], which calls `take` with its steps and returns its errors.
fn wildcard_within(
    pattern: &str,
    name: &str,
    mut take: impl FnMut(u64) -> ConfigResult<()>,
) -> ConfigResult<bool> {
    take((pattern.len() + name.len()) as u64 / 8)?;
    let pattern: Vec<char> = pattern.chars().collect();
    let name: Vec<char> = name.chars().collect();
    let (mut p, mut n) = (0, 0);
    // Where to resume when the text after the last `*` does not fit.
    let mut star: Option<(usize, usize)> = None;
    loop {
        // Looking for the end of a set may take the rest of the pattern.
        let set_len = if pattern.get(p) == Some(&'[') { pattern.len() - p } else { 0 };
        take(1 + set_len as u64 / 8)?;
        let step = match pattern.get(p) {
            Some('*') => {
                star = Some((p + 1, n));
                p += 1;
                continue;
            }
            None if n == name.len() => return Ok(true),
            None => None,
            Some(_) if n == name.len() => None,
            Some('?') => Some(p + 1),
            Some('[') => set(&pattern, p, name[n]),
            Some(&c) => (c == name[n]).then_some(p + 1),
        };
        match (step, star) {
            (Some(next), _) => {
                p = next;
                n += 1;
            }
            (None, Some((after, at))) if at < name.len() => {
                star = Some((after, at + 1));
                p = after;
                n = at + 1;
            }
            _ => return Ok(false),
        }
    }
}

/// The index after the set at `p` when `c` is in it. A set without its end is a literal `[`.
fn set(pattern: &[char], p: usize, c: char) -> Option<usize> {
    let mut i = p + 1;
    let negated = pattern.get(i) == Some(&'!');
    i += usize::from(negated);
    let first = i;
    let close = (first..pattern.len()).find(|&j| pattern[j] == ']' && j > first);
    let Some(close) = close else { return (c == '[').then_some(p + 1) };
    let mut found = false;
    while i < close {
        if i + 2 < close && pattern[i + 1] == '-' {
            found |= (pattern[i]..=pattern[i + 2]).contains(&c);
            i += 3;
        } else {
            found |= pattern[i] == c;
            i += 1;
        }
    }
    (found != negated).then_some(close + 1)
}
