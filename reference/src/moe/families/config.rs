//! Resolves the rule of one layer from a model's `config.json` and the row of its family.

use std::cell::RefCell;
use std::collections::BTreeSet;

use serde_json::Value;

use super::families;
use super::key::Key;
use super::row::{
    ActivationRule, BiasRule, Family, GroupKeys, RenormRule, ScoreRule, Support, activation,
};
use super::rule::{GroupRule, GroupScore, Renormalize, RoutingRule, Score};
use crate::moe::activation::Activation;
use crate::{Error, Result};

/// The routing of a layer, resolved from its config.
#[derive(Debug, Clone, PartialEq)]
pub struct Resolved {
    /// The `model_type` found.
    pub model_type: String,
    /// How far the family is supported.
    pub support: Support,
    /// The key of the experts per token.
    pub top_k_key: &'static str,
    /// Whether the config has that key.
    pub top_k_stated: bool,
    /// Number of experts that the config states, zero experts not included.
    pub num_experts: Option<usize>,
    /// The rule.
    pub rule: RoutingRule,
    /// Notes on differing results of other engines and on ignored keys.
    pub notes: Vec<String>,
}

/// The row of a `model_type`; `_text` after a known one is the same family.
pub fn family(model_type: &str) -> Option<&'static Family> {
    let find = |name: &str| families().find(|f| f.model_types.contains(&name));
    find(model_type).or_else(|| find(model_type.strip_suffix("_text")?))
}

/// The rule of the experts `module`, as `...layers.3.mlp.experts`.
///
/// # Errors
/// [`Error::Unsupported`] for a `model_type` that is absent or unknown, or a family that is
/// refused; [`Error::Size`] naming the key with an invalid value.
pub fn resolve(config: &Value, module: &str) -> Result<Resolved> {
    let keys = Keys::new(config, module);
    let found = keys.objects.iter().find_map(|o| o.get("model_type")).and_then(Value::as_str);
    let Some(model_type) = found else {
        let reason = "config.json has no model_type, so its routing is not known";
        return Err(Error::unsupported("routing of this model", reason));
    };
    // The parts of one model may have several defaults.
    let part = module.split('.').next().unwrap_or_default();
    let Some(family) = family(&format!("{model_type}_{part}")).or_else(|| family(model_type))
    else {
        let shown: String = model_type.chars().take(60).collect();
        let what = format!("model_type `{shown}`: its routing");
        return Err(Error::unsupported(what, "the family is not known"));
    };
    if let Support::Refused(reason) = family.support {
        return Err(Error::unsupported(format!("routing of {model_type}"), reason));
    }
    let rule = rule(&keys, family)?;
    let support = match rule.token_table {
        Some(_) => Support::RoutingOnly("a table of token ids chooses its experts"),
        None => family.support,
    };
    keys.refuse_contradictions(family, &rule)?;
    let num_experts = keys.size(family.num_experts)?.map(|(_, n)| n);
    let notes = keys.notes(family, &rule);
    let top_k = keys.size(family.top_k.keys)?;
    Ok(Resolved {
        model_type: model_type.to_owned(),
        support,
        top_k_key: top_k.map_or(family.top_k.keys[0], |(key, _)| key),
        top_k_stated: top_k.is_some(),
        num_experts,
        rule,
        notes,
    })
}

/// The objects of a config in which the keys of a layer are searched.
pub(super) struct Keys<'c> {
    objects: Vec<&'c Value>,
    layer: Option<usize>,
    pub(super) read: RefCell<BTreeSet<&'static str>>,
}

impl<'c> Keys<'c> {
    /// If the text model's config names its type, only that config is searched, since absent keys
    /// then have its defaults.
    pub(super) fn new(config: &'c Value, module: &str) -> Self {
        let part = ["thinker", "talker"].iter().find(|p| module.starts_with(&format!("{p}.")));
        let inside = match part {
            Some(part) => config.get(format!("{part}_config")).unwrap_or(config),
            None => config.get("thinker_config").unwrap_or(config),
        };
        let names = ["text_config", "language_config", "llm_config"];
        let text = names.iter().find_map(|n| inside.get(n)).filter(|v| v.is_object());
        let objects = match text {
            Some(text) if text.get("model_type").is_some() => vec![text],
            Some(text) => vec![text, inside, config],
            None => vec![inside, config],
        };
        let mut parts = module.split('.').skip_while(|p| !matches!(*p, "layers" | "blocks"));
        let layer = parts.nth(1).and_then(|n| n.parse().ok());
        Self { objects, layer, read: RefCell::new(BTreeSet::new()) }
    }

    /// The value of a key, including null; a dot enters an object.
    pub(super) fn raw(&self, key: &'static str) -> Option<&'c Value> {
        self.read.borrow_mut().insert(key);
        self.peek(key)
    }

    pub(super) fn peek(&self, key: &str) -> Option<&'c Value> {
        let inside = |object: &&'c Value| key.split('.').try_fold(*object, |v, k| v.get(k));
        self.objects.iter().find_map(inside)
    }

    /// The first of `keys` that is present and not null.
    fn any(&self, keys: &'static [&'static str]) -> Option<(&'static str, &'c Value)> {
        let found = keys.iter().map(|key| (*key, self.raw(key)));
        let mut found = found.filter_map(|(k, v)| v.filter(|v| !v.is_null()).map(|v| (k, v)));
        found.next()
    }

    /// This layer's entry of a list, or the value itself.
    pub(super) fn of_layer(&self, value: &'c Value) -> Option<&'c Value> {
        match value.as_array() {
            Some(list) => list.get(self.layer?),
            None => Some(value),
        }
    }

    fn size(&self, keys: &'static [&'static str]) -> Result<Option<(&'static str, usize)>> {
        let Some((key, value)) = self.any(keys) else { return Ok(None) };
        let size = self.of_layer(value).and_then(Value::as_u64);
        let size = size.and_then(|n| usize::try_from(n).ok()).filter(|&n| n > 0);
        size.map(|n| Some((key, n))).ok_or_else(|| bad(key, value, "1 or more"))
    }

    fn need_size(&self, key: &Key<usize>) -> Result<usize> {
        match (self.size(key.keys)?, key.default) {
            (Some((_, n)), _) | (None, Some(n)) => Ok(n),
            (None, None) => Err(absent(key.keys[0], "1 or more")),
        }
    }

    pub(super) fn number(&self, key: &Key<f32>) -> Result<f32> {
        let Some((name, value)) = self.any(key.keys) else {
            return key.default.ok_or_else(|| absent(key.keys[0], "a number"));
        };
        let number = value.as_f64().map(|x| x as f32).filter(|x| x.is_finite() && *x > 0.0);
        number.ok_or_else(|| bad(name, value, "a positive number"))
    }

    fn flag(&self, key: &Key<bool>) -> Result<bool> {
        match (self.any(key.keys), key.default) {
            (Some((_, Value::Bool(b))), _) => Ok(*b),
            (Some((name, value)), _) => Err(bad(name, value, "true or false")),
            (None, Some(b)) => Ok(b),
            (None, None) => Err(absent(key.keys[0], "true or false")),
        }
    }

    pub(super) fn text(&self, key: &'static str) -> Result<Option<&'c str>> {
        match self.raw(key).filter(|v| !v.is_null()) {
            None => Ok(None),
            Some(value) => value.as_str().map(Some).ok_or_else(|| bad(key, value, "a name")),
        }
    }

    fn score(&self, rule: &ScoreRule) -> Result<Score> {
        let key = match rule {
            ScoreRule::Fixed(score) => return Ok(*score),
            ScoreRule::Key(key) => key,
        };
        let Some((name, value)) = self.any(key.keys) else {
            return key.default.ok_or_else(|| absent(key.keys[0], "a scoring function"));
        };
        let known = [Score::Softmax, Score::Sigmoid, Score::SqrtSoftplus];
        let found = known.into_iter().find(|s| value.as_str() == Some(s.name()));
        found.ok_or_else(|| bad(name, value, "softmax, sigmoid or sqrtsoftplus"))
    }

    fn groups(&self, family: &Family, has_bias: bool) -> Result<Option<GroupRule>> {
        let Some(GroupKeys { n_group, topk_group, mut score, masked }) = family.groups else {
            return Ok(None);
        };
        if let Some((key, [with, without])) = family.group_method {
            match self.text(key)? {
                Some(found) if found == with => {}
                None => return Ok(None),
                Some(found) if found == without => return Ok(None),
                Some(found) => {
                    let expected = format!("{with} or {without}");
                    return Err(bad(key, &Value::from(found), &expected));
                }
            }
        }
        const N: &[&str] = &["n_group", "num_expert_group"];
        let null = |k: &&&str| self.peek(k).is_some_and(Value::is_null);
        let default = match N.iter().find(null) {
            Some(key) if n_group.is_none_or(|n| n > 1) => {
                return Err(bad(key, &Value::Null, "1 or more"));
            }
            Some(_) => Some(1),
            None => n_group,
        };
        let n_group = match (self.size(N)?, default) {
            (Some((_, n)), _) | (None, Some(n)) => n,
            (None, None) => return Err(absent(N[0], "1 or more")),
        };
        let kept = self.size(&["topk_group"])?.map(|(_, n)| n);
        if n_group == 1 {
            return Ok(None);
        }
        let Some(topk_group) = kept.or(topk_group) else {
            let expected = format!("it with n_group {n_group}");
            return Err(absent("topk_group", &expected));
        };
        if family.by_vllm && !has_bias {
            score = GroupScore::Max;
        }
        Ok(Some(GroupRule { n_group, topk_group, group_score: score, masked }))
    }

    fn renormalize(&self, family: &Family, score: Score) -> Result<Renormalize> {
        Ok(match &family.renormalize {
            RenormRule::Never => Renormalize::Never,
            RenormRule::Always(epsilon) => Renormalize::SumPlus(*epsilon),
            RenormRule::Key(key, epsilon) => {
                let chosen = family.softmax_of_chosen && score == Score::Softmax;
                match self.flag(key)? || chosen {
                    true => Renormalize::SumPlus(*epsilon),
                    false => Renormalize::Never,
                }
            }
            RenormRule::Floor(key) => Renormalize::SumAtLeast(self.number(key)?),
            RenormRule::Norm(key) => match self.raw(key.keys[0]) {
                Some(Value::Null) => Renormalize::Never,
                _ => match self.number(key)? {
                    1.0 => Renormalize::SUM,
                    p => Renormalize::Norm(p),
                },
            },
        })
    }

    /// Name, limit and α of the activation.
    fn activation(&self, rule: &ActivationRule) -> Result<(Activation, Option<f32>, Option<f32>)> {
        let not_null = |key: &'static str| match self.raw(key) {
            Some(Value::Null) => Err(bad(key, &Value::Null, "a positive number")),
            _ => Ok(()),
        };
        let named = |keys: &'static [&'static str]| match self.any(keys) {
            None => Ok(Activation::Silu),
            Some((key, value)) => value
                .as_str()
                .and_then(activation)
                .ok_or_else(|| bad(key, value, "silu, gelu or gelu_pytorch_tanh")),
        };
        const ACT: &[&str] = &["hidden_act", "hidden_activation"];
        match rule {
            ActivationRule::Named(keys) => Ok((named(keys)?, None, None)),
            ActivationRule::Clamped(key) => {
                not_null(key.keys[0])?;
                match named(ACT)? {
                    Activation::Silu => Ok((Activation::Silu, Some(self.number(key)?), None)),
                    other => Err(bad("hidden_act", &Value::from(other.name()), "silu")),
                }
            }
            ActivationRule::Oai => {
                not_null("swiglu_limit")?;
                if let Some((key, beta)) = self.any(&["swiglu_beta"])
                    && beta.as_f64() != Some(1.0)
                {
                    return Err(bad(key, beta, "1"));
                }
                let limit = self.number(&Key::new(&["swiglu_limit"], 7.0))?;
                let alpha = self.number(&Key::new(&["swiglu_alpha"], 1.702))?;
                Ok((Activation::SwigluOai, Some(limit), Some(alpha)))
            }
            ActivationRule::Step => {
                let plain = named(ACT)?;
                let Some((key, list)) = self.any(&["swiglu_limits"]) else {
                    return Ok((plain, None, None));
                };
                match self.of_layer(list) {
                    Some(Value::Null) => Ok((plain, None, None)),
                    Some(v) if v.as_f64() == Some(0.0) => Ok((plain, None, None)),
                    Some(v) => match v.as_f64().filter(|x| *x > 0.0) {
                        Some(x) => Ok((Activation::SwigluStep, Some(x as f32), None)),
                        None => Err(bad(key, v, "limits that are not negative")),
                    },
                    None => Err(bad(key, list, "a limit for each layer")),
                }
            }
        }
    }
}

fn rule(keys: &Keys<'_>, family: &Family) -> Result<RoutingRule> {
    let scoring_func = keys.score(&family.score)?;
    let token_table = family.token_table.filter(|_| keys.layer_kind().contains("hash"));
    let correction_bias = match family.bias {
        _ if token_table.is_some() => None,
        BiasRule::None => None,
        BiasRule::Required(name) => Some(name.to_owned()),
        BiasRule::IfKey(key, default, name) => {
            let flag = match keys.raw(key).filter(|v| !v.is_null()) {
                None => default,
                Some(Value::Bool(b)) => *b,
                Some(value) => return Err(bad(key, value, "true or false")),
            };
            flag.then(|| name.to_owned())
        }
    };
    let has_bias = correction_bias.is_some();
    if family.by_vllm && has_bias != (scoring_func == Score::Sigmoid) {
        let what = format!("{} with a correction bias: {has_bias}", scoring_func.name());
        return Err(Error::unsupported(what, "a sigmoid has one, a softmax has none"));
    }
    let (activation, swiglu_limit, swiglu_alpha) = match family.experts.gated {
        true => keys.activation(&family.activation)?,
        false => (keys.gateless()?, None, None),
    };
    Ok(RoutingRule {
        scoring_func,
        top_k: keys.need_size(&family.top_k)?,
        choose_by: family.choose_by,
        groups: keys.groups(family, has_bias)?,
        renormalize: keys.renormalize(family, scoring_func)?,
        routed_scaling_factor: family.scale.as_ref().map_or(Ok(1.0), |key| keys.number(key))?,
        jitter: match scoring_func {
            Score::SparseMixer => keys.number(&Key::new(&["router_jitter_noise"], 0.01))?,
            _ => 0.01,
        },
        correction_bias,
        expert_scale: family.expert_scale.map(str::to_owned),
        zero_experts: match &family.zero_experts {
            Some(key) => keys.zero_experts(key)?,
            None => 0,
        },
        zero_expert_type: family.zero_expert_type,
        shared_experts: family.shared_experts.as_ref().map_or(Ok(0), |key| keys.need_size(key))?,
        token_table: token_table.map(str::to_owned),
        token_groups: family.experts.token_groups,
        apply_router_weight_on_input: family.weight_on_input,
        activation,
        swiglu_limit,
        swiglu_alpha,
    })
}

impl Keys<'_> {
    /// The activation of experts without a gate.
    fn gateless(&self) -> Result<Activation> {
        match self.any(&["mlp_hidden_act"]) {
            None => Ok(Activation::Relu2NoMul),
            Some((_, value)) if value.as_str() == Some("relu2") => Ok(Activation::Relu2NoMul),
            Some((key, value)) => Err(bad(key, value, "relu2")),
        }
    }

    /// The kind of this layer in `mlp_layer_types`.
    pub(super) fn layer_kind(&self) -> &str {
        let kind = self.peek("mlp_layer_types").and_then(|v| self.of_layer(v)?.as_str());
        kind.unwrap_or_default()
    }

    fn zero_experts(&self, key: &Key<usize>) -> Result<usize> {
        let Some((name, value)) = self.any(key.keys) else {
            return Ok(key.default.unwrap_or(0));
        };
        let count = value.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|&n| n < 1 << 20);
        count.ok_or_else(|| bad(name, value, "a number of experts"))
    }
}

pub(super) fn bad(key: &str, found: &Value, expected: &str) -> Error {
    let shown: String = found.to_string().chars().take(60).collect();
    Error::size(format!("config.json: {key}"), shown, expected)
}

fn absent(key: &str, expected: &str) -> Error {
    Error::size(format!("config.json: {key}"), "none", expected)
}
