//! Routing of one experts layer: the rule of its family or of `--routing`, with the checkpoint
//! tensors that the rule names.

use marlinspike::moe::activation::Definition;
use marlinspike::moe::families::{self, RouterTensors, RoutingRule, Support, Tokens};
use marlinspike::moe::router::Routing;
use marlinspike::ndarray::Array2;
use marlinspike::num::array::rows_of;
use marlinspike::num::tensor::DType;

use super::{Model, ModelError};

/// The help line for a layer with unknown routing.
pub const HELP: &str = "state the rule with --routing FILE (`marlinspike run --help` shows an \
    example)";

/// Last name components of tensors that correct the selection of experts.
const BIASES: &[&str] =
    &["e_score_correction_bias", "expert_bias", "router_bias", "correction_bias"];

/// Routing and activation of an experts layer.
#[derive(Debug, Clone, PartialEq)]
pub struct MoeRouting {
    /// The source of the rule: a `model_type`, or `--routing`.
    pub source: String,
    /// The rule.
    pub rule: RoutingRule,
    /// The activation between the products.
    pub activation: Definition,
    /// Differences to other engines, and parts of the block that are not computed.
    pub notes: Vec<String>,
    correction_bias: Option<Vec<f32>>,
    expert_scale: Option<Vec<f32>>,
}

/// A rule with its source and notes.
struct Found {
    source: String,
    rule: RoutingRule,
    notes: Vec<String>,
}

impl MoeRouting {
    /// The routing of `module`, whose rows of gate and up are `interleaved` in w13 or not.
    ///
    /// # Errors
    /// [`ModelError::Module`] naming the unknown or unsupported family, the invalid key, or the
    /// missing tensor.
    pub fn read(
        model: &Model<'_>,
        module: &str,
        num_experts: usize,
        interleaved: bool,
    ) -> Result<Self, ModelError> {
        let found = find(model, module, num_experts, false)?;
        if let Some(what) = found.rule.token_input() {
            let reason = format!("{what}: only whole blocks of a checkpoint are computed with it");
            return Err(ModelError::module(module, reason));
        }
        if found.rule.zero_experts > 0 {
            let reason = format!(
                "routing of {}: {} zero experts, whose part of the output is not computed",
                found.source, found.rule.zero_experts
            );
            return Err(ModelError::module(module, reason));
        }
        Self::of(model, module, num_experts, interleaved, found)
    }

    /// Like [`Self::read`], for experts of 16 or 32 bits, whose whole block is computed: zero
    /// experts, experts without gate and rules that depend on the tokens too. `num_experts` are those
    /// of one group.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn read_whole(
        model: &Model<'_>,
        module: &str,
        num_experts: usize,
        interleaved: bool,
    ) -> Result<Self, ModelError> {
        let found = find(model, module, num_experts, true)?;
        let scores = num_experts + found.rule.zero_experts;
        Self::of(model, module, scores, interleaved, found)
    }

    /// The groups of experts of `module` that tokens select by their type.
    ///
    /// # Errors
    /// As [`families::resolve`].
    pub fn token_groups(model: &Model<'_>, module: &str) -> Result<usize, ModelError> {
        let rule = rule(model, module)?;
        Ok(rule.map_or(1, |rule| rule.token_groups.max(1)))
    }

    /// The rule with the tensors that it names; `scores` are the router's outputs.
    fn of(
        model: &Model<'_>,
        module: &str,
        scores: usize,
        interleaved: bool,
        found: Found,
    ) -> Result<Self, ModelError> {
        let wrong = |e: marlinspike::Error| ModelError::module(module, e);
        let Found { source, rule, mut notes } = found;
        let entries = [rule.token_groups, scores];
        let correction_bias = floats(model, module, rule.correction_bias.as_deref(), entries)?;
        let expert_scale = match rule.shared_experts {
            0 => floats(model, module, rule.expert_scale.as_deref(), entries)?,
            // One factor for all experts, routed and shared.
            _ => floats(model, module, rule.expert_scale.as_deref(), [1, 1])?,
        };
        let tensors = RouterTensors {
            correction_bias: correction_bias.as_deref(),
            expert_scale: expert_scale.as_deref(),
        };
        let none = Array2::zeros((0, scores));
        rule.validate(none.view(), tensors).map_err(wrong)?;
        if let Some(name) = unread_bias(model, module, &rule) {
            if model.stated_routing.is_none() {
                let reason = format!("routing of {source} has no correction bias, found `{name}`");
                return Err(ModelError::module(module, format!("{reason}; {HELP}")));
            }
            notes.push(format!("the stated routing does not use `{name}`"));
        }
        let activation = rule.activation(interleaved).map_err(wrong)?;
        Ok(Self { source, rule, activation, notes, correction_bias, expert_scale })
    }

    /// The tensors that the rule names.
    pub fn tensors(&self) -> RouterTensors<'_> {
        RouterTensors {
            correction_bias: self.correction_bias.as_deref(),
            expert_scale: self.expert_scale.as_deref(),
        }
    }

    /// Routes every row of `logits` to experts with weights.
    ///
    /// # Errors
    /// As [`RoutingRule::route`].
    pub fn route(&self, logits: &[f32], num_experts: usize) -> marlinspike::Result<Routing> {
        self.route_tokens(logits, num_experts, Tokens::default())
    }

    /// [`Self::route`] of a rule that also depends on the tokens.
    ///
    /// # Errors
    /// As [`RoutingRule::route_tokens`].
    pub fn route_tokens(
        &self,
        logits: &[f32],
        num_experts: usize,
        tokens: Tokens<'_>,
    ) -> marlinspike::Result<Routing> {
        let logits = rows_of("router_logits", logits, num_experts)?;
        self.rule.route_tokens(logits, self.tensors(), tokens)
    }

    /// A short description of the rule.
    pub fn summary(&self) -> String {
        summary(&self.source, &self.rule)
    }
}

/// A short description of a rule.
pub fn summary(source: &str, rule: &RoutingRule) -> String {
    let mut parts = vec![format!("{} top {}", rule.scoring_func.name(), rule.top_k)];
    if let Some(name) = &rule.correction_bias {
        parts.push(format!("choice with {name}"));
    }
    if let Some(g) = rule.groups {
        parts.push(format!("{} of {} groups", g.topk_group, g.n_group));
    }
    if rule.renormalize != families::Renormalize::Never {
        parts.push("renormalized".to_owned());
    }
    if rule.routed_scaling_factor != 1.0 {
        parts.push(format!("times {}", rule.routed_scaling_factor));
    }
    if rule.apply_router_weight_on_input {
        parts.push("weights on the input".to_owned());
    }
    format!("routing of {source}: {}", parts.join(", "))
}

/// The stated rule, or the family's; `None` for a family that is not known.
fn rule(model: &Model<'_>, module: &str) -> Result<Option<RoutingRule>, ModelError> {
    if let Some(rule) = model.stated_routing {
        return Ok(Some(rule.clone()));
    }
    match families::resolve(&model.config, module) {
        Ok(resolved) => Ok(Some(resolved.rule)),
        Err(marlinspike::Error::Unsupported { .. }) => Ok(None),
        Err(e) => Err(ModelError::module(module, e)),
    }
}

/// Whether the block of the experts `module` has parts besides a router, experts and what follows
/// their sum, and so is computed as a whole.
///
/// # Errors
/// As [`families::resolve`], except of a family that is not known.
pub fn is_whole(model: &Model<'_>, module: &str) -> Result<bool, ModelError> {
    let Some(rule) = rule(model, module)? else { return Ok(false) };
    if rule.token_input().is_some() || rule.zero_experts > 0 {
        return Ok(true);
    }
    let Ok(resolved) = families::resolve(&model.config, module) else { return Ok(false) };
    let ends = |name: &str| layer_tensors(model, module).any(|(_, below)| below.ends_with(name));
    let family = families::family(&resolved.model_type);
    let further = family.is_some_and(|f| f.experts.further_parts(&ends).is_some());
    Ok(further || matches!(resolved.support, Support::RoutingOnly(_)))
}

/// The stated rule, or the family's; `whole`: also of a family whose quantized experts do not run.
fn find(
    model: &Model<'_>,
    module: &str,
    num_experts: usize,
    whole: bool,
) -> Result<Found, ModelError> {
    let at_most = |key: &str, found: String| {
        let reason = format!("{key}: found {found}, expected at most {num_experts} experts");
        Err(ModelError::module(module, reason))
    };
    if let Some(rule) = model.stated_routing {
        if rule.top_k > num_experts {
            return at_most("--routing: top_k", rule.top_k.to_string());
        }
        let (source, rule) = ("--routing".to_owned(), rule.clone());
        return Ok(Found { source, rule, notes: Vec::new() });
    }
    let resolved = families::resolve(&model.config, module).map_err(|e| match e {
        e @ marlinspike::Error::Unsupported { .. } => {
            ModelError::module(module, format!("{e}; {HELP}"))
        }
        other => ModelError::module(module, other),
    })?;
    let source = resolved.model_type;
    if let (Support::RoutingOnly(reason), false) = (resolved.support, whole) {
        let reason =
            format!("experts of {source} run as whole blocks of a checkpoint alone: {reason}");
        return Err(ModelError::module(module, reason));
    }
    let experts = families::family(&source).map(|family| family.experts);
    let ends = |name: &str| layer_tensors(model, module).any(|(_, below)| below.ends_with(name));
    let further = experts.filter(|_| !whole).and_then(|rule| rule.further_parts(&ends));
    if let Some(what) = further {
        let reason =
            format!("a block of {source} has {what}: only whole blocks of a checkpoint have them");
        return Err(ModelError::module(module, reason));
    }
    if let Some(stated) = resolved.num_experts.filter(|&n| n != num_experts) {
        let reason = format!("config.json: found {stated} experts, the files have {num_experts}");
        return Err(ModelError::module(module, reason));
    }
    if resolved.rule.top_k > num_experts {
        let (key, top_k) = (resolved.top_k_key, resolved.rule.top_k);
        let found = match resolved.top_k_stated {
            true => top_k.to_string(),
            false => format!("none, {top_k} by default"),
        };
        return at_most(&format!("config.json: {key}"), found);
    }
    Ok(Found { source, rule: resolved.rule, notes: resolved.notes })
}

/// The full name of a tensor that a rule names relative to the parent of `experts`.
pub(crate) fn full_name(module: &str, name: &str) -> Option<String> {
    let (mut parent, mut name) = (module.strip_suffix(".experts")?, name);
    while let Some(rest) = name.strip_prefix("../") {
        (parent, name) = (parent.rsplit_once('.')?.0, rest);
    }
    Some(format!("{parent}.{name}"))
}

/// The named tensor as f32, `[groups, len]`, or `[len]` for one group.
fn floats(
    model: &Model<'_>,
    module: &str,
    name: Option<&str>,
    [groups, len]: [usize; 2],
) -> Result<Option<Vec<f32>>, ModelError> {
    let Some(name) = name else { return Ok(None) };
    let wrong = |e: marlinspike::Error| ModelError::module(module, e);
    let full = full_name(module, name).filter(|full| model.entry(full).is_some());
    let Some(full) = full else {
        let missing = full_name(module, name).unwrap_or_else(|| name.to_owned());
        return Err(wrong(marlinspike::Error::missing(missing, "the layer's routing")));
    };
    let tensor = model.tensor(&full)?;
    tensor.expect_dtype(&[DType::F32, DType::BF16, DType::F16]).map_err(wrong)?;
    if tensor.shape() != [groups, len] {
        tensor.expect_shape(&[groups * len]).map_err(wrong)?;
    }
    super::values::floats(&tensor).map(Some).map_err(wrong)
}

/// The name prefix of a layer's tensors, up to and including the layer's number.
pub(super) fn layer_prefix(module: &str) -> Option<&str> {
    let mut end = 0;
    let mut after_layers = false;
    for part in module.split('.') {
        end += part.len() + 1;
        if after_layers && part.bytes().all(|b| b.is_ascii_digit()) {
            return module.get(..end);
        }
        after_layers = matches!(part, "layers" | "blocks" | "h");
    }
    None
}

/// Names and parts below the layer of every tensor of the layer.
fn layer_tensors<'m>(
    model: &'m Model<'_>,
    module: &str,
) -> impl Iterator<Item = (&'m str, &'m str)> {
    let prefix = layer_prefix(module).unwrap_or(module).to_owned();
    let names = model.entries().map(|e| e.name());
    names.filter_map(move |name| Some((name, name.strip_prefix(&prefix)?)))
}

/// A tensor of the layer that corrects the selection of experts but that the rule does not name.
fn unread_bias<'m>(model: &'m Model<'_>, module: &str, rule: &RoutingRule) -> Option<&'m str> {
    let used = rule.correction_bias.as_deref().and_then(|name| full_name(module, name));
    let is_bias = |name: &str| BIASES.contains(&name.rsplit('.').next().unwrap_or(name));
    layer_tensors(model, module)
        .find(|(name, _)| is_bias(name) && used.as_deref() != Some(*name))
        .map(|(name, _)| name)
}

/// A note that the output does not include shared experts.
pub fn shared_experts_left_out(model: &Model<'_>, module: &str) -> Option<String> {
    let shared = |part: &&str| part.starts_with("shared_") || part.starts_with("share_expert");
    let found = layer_tensors(model, module).find_map(|(_, below)| {
        let part = below.split('.').find(shared)?;
        (part != "shared_expert_gate").then_some(part)
    })?;
    Some(format!("y is the sum over the routed experts; it does not include `{found}`"))
}
