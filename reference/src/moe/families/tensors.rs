//! The tensors of a MoE block by their checkpoint names, in the one form that [`crate::moe::block`]
//! has: stacks `[E, N, K]`, gate before up.
//!
//! Checkpoints hold experts one by one (`experts.3.gate_proj.weight`, `experts.3.w1.weight`), fused
//! to three dimensions (`experts.gate_up_proj`, `input_linear.weight`), transposed (`[E, H, 2I]`) or
//! as rows of one matrix (`experts.mlp.w1`).

use super::key::Key;
use super::stack::Stack;
use super::stage_rules::{self, FoundStage, Path, StageRule};
use crate::num::tensor::Tensor;
use crate::{Error, Result};

/// What a family's block has besides its routing.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertsRule {
    /// Whether gate and up alternate along N of the stored gate_up.
    pub interleaved: bool,
    /// Whether the experts have a gate projection.
    pub gated: bool,
    /// Whether the shared expert's output is multiplied with the sigmoid of a gate.
    pub shared_gate: bool,
    /// The shared expert's activation, where it is not the routed experts'.
    pub shared: SharedRule,
    /// Stages around the router and the experts.
    pub stages: &'static [(Path, &'static [StageRule])],
    /// Keys of the soft caps of gate and up.
    pub softcaps: Option<[Key<f32>; 2]>,
    /// Key of the factor on the logits.
    pub logit_multiplier: Option<Key<f32>>,
    /// Groups of experts with a router each; the experts of a group may have fewer features than
    /// others'.
    pub token_groups: usize,
}

impl ExpertsRule {
    /// Gate and up in halves, one activation for all experts.
    pub(super) const PLAIN: Self = Self {
        interleaved: false,
        gated: true,
        shared_gate: false,
        shared: SharedRule::Same,
        stages: &[],
        softcaps: None,
        logit_multiplier: None,
        token_groups: 1,
    };
}

impl ExpertsRule {
    /// Gate and up in halves, and a shared expert with a gate of its own.
    pub(super) const SHARED_GATE: Self = Self { shared_gate: true, ..Self::PLAIN };

    /// The stages at `path` after `hidden` features; `find` looks up a tensor by its name below the
    /// experts' parent or the layer.
    ///
    /// # Errors
    /// [`Error::Missing`], [`Error::Shape`] and [`Error::Dtype`] naming a tensor.
    pub fn stages_at(
        &self,
        path: Path,
        find: &dyn Fn(&str) -> Option<Tensor<'static>>,
        hidden: usize,
    ) -> Result<Vec<FoundStage>> {
        stage_rules::read(self.stages, path, find, hidden)
    }

    /// The routers of all groups of experts, one below the other, for `hidden` features of the
    /// router's input; `None` where the block has one router. `below` looks up a tensor by its name
    /// below the experts' parent.
    ///
    /// # Errors
    /// [`Error::Missing`] and [`Error::Shape`] naming a tensor.
    pub fn routers_of_groups(
        &self,
        below: &dyn Fn(&str) -> Option<Tensor<'static>>,
        hidden: usize,
    ) -> Result<Option<Tensor<'static>>> {
        (self.token_groups > 1).then(|| of_groups(below, hidden)).transpose()
    }

    /// What the block has before its output, besides a router, experts of `[H]` features and a
    /// shared expert. `has` says whether the layer has a tensor whose name ends so.
    pub fn further_parts(&self, has: &dyn Fn(&str) -> bool) -> Option<&'static str> {
        let is_there = |rule: &StageRule| match rule {
            StageRule::LinearIfPresent(module) => has(&format!("{module}.weight")),
            _ => true,
        };
        let before = self.stages.iter().filter(|(path, _)| *path != Path::Output);
        if before.flat_map(|(_, rules)| *rules).any(is_there) {
            return Some("stages around the experts");
        }
        match self {
            Self { softcaps: Some(_), .. } => Some("soft caps of gate and up"),
            Self { logit_multiplier: Some(_), .. } => Some("a factor on the logits"),
            Self { token_groups: 2.., .. } => Some("groups of experts by the tokens' types"),
            _ => None,
        }
    }
}

/// The shared expert, where it differs from a routed one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum SharedRule {
    /// As the routed experts.
    Same,
    /// Plain SiLU without limits.
    Plain,
    /// `swiglustep` with a limit for each layer in `swiglu_limits_shared`; 0 or null means none.
    Step(Option<f32>),
    /// Averaged with the routed sum, unless `shared_expert_combination_strategy` is `sum`.
    Averaged,
}

/// The matrices of a block.
#[derive(Debug, Clone, PartialEq)]
pub struct BlockTensors {
    /// Router `[E, H]`, zero experts included.
    pub router_weight: Option<Tensor<'static>>,
    /// Bias of the logits `[E]`.
    pub router_bias: Option<Tensor<'static>>,
    /// `[E, 2I, H]`, or `[E, I, H]` without a gate.
    pub w13: Tensor<'static>,
    /// Whether rows of gate and up alternate in w13, as the family's fused tensors may have them.
    pub interleaved: bool,
    /// `[E, 2I]`.
    pub w13_bias: Option<Tensor<'static>>,
    /// `[E, H, I]`.
    pub w2: Tensor<'static>,
    /// `[E, H]`.
    pub w2_bias: Option<Tensor<'static>>,
    /// `[2S, H]` and `[H, S]` of the shared expert; those of several with weights of their own, one
    /// below the other.
    pub shared: Option<[Tensor<'static>; 2]>,
    /// `[1, H]`.
    pub shared_gate: Option<Tensor<'static>>,
    /// `[H]`, added to the output.
    pub output_bias: Option<Tensor<'static>>,
    /// Stages by [`Path::ALL`].
    pub stages: [Vec<FoundStage>; 5],
}

/// Modules of a layer that may hold its experts.
const PARENTS: &[&str] =
    &["mlp.", "block_sparse_moe.", "feed_forward.", "ffn.", "moe.", "mixer.", ""];
pub(super) const ROUTERS: &[&str] = &[
    "gate.weight",
    "router.weight",
    "router.layer.weight",
    "router.gate.weight",
    "router.classifier.weight",
    "gate.wg.weight",
    "router.proj.weight",
    "gate.router_mlp.out_proj.weight",
];
/// Routers of two groups of experts, which may be stored as `[H, E]`.
const ROUTERS_OF_GROUPS: [&str; 2] = ["gate.weight", "gate.weight_1"];
/// Gate, up and down of one expert.
pub(super) const EACH: &[[&str; 3]] = &[["gate_proj", "up_proj", "down_proj"], ["w1", "w3", "w2"]];
/// gate_up and down of all experts.
const FUSED: &[[&str; 2]] = &[
    ["experts.gate_up_proj", "experts.down_proj"],
    ["input_linear.weight", "output_linear.weight"],
    ["experts.fc1.weight", "experts.fc2.weight"],
    ["experts.w13_weight", "experts.w2_weight"],
];
/// Gate, up and down of all experts, with three dimensions.
const SEPARATE: &[[&str; 3]] = &[["gate_proj.weight", "up_proj.weight", "down_proj.weight"]];
/// Gate, up and down of all experts as rows of matrices `[E · I, H]`, down transposed.
const ROWS: [&str; 3] = ["experts.mlp.w1", "experts.mlp.v1", "experts.mlp.w2"];
pub(super) const SHARED: &[&str] =
    &["shared_experts.", "shared_expert.", "shared_mlp.", "share_expert."];
/// gate_up and down of a shared expert, or of all of them.
const FUSED_SHARED: [[&str; 2]; 2] =
    [["input_linear.weight", "output_linear.weight"], ["shared_w13_weight", "shared_w2_weight"]];
/// transformers 5.23.0 saves hy_v4's dense gates under this name.
pub(super) const MISNAMED: [&str; 3] = ["linear_gate", "up_proj", "down_proj"];
/// The largest number of experts that are read one by one.
const MOST: usize = 1 << 16;

/// Gate over up, and down, of all experts.
struct Experts {
    gate_up: Stack,
    down: Stack,
    biases: [Option<Tensor<'static>>; 2],
    /// Whether the files hold gate and up in one tensor.
    fused: bool,
}

/// A lookup of a layer's tensors by their names below the layer.
pub(super) type Get<'g, 't> = &'g dyn Fn(&str) -> Option<Tensor<'t>>;

impl BlockTensors {
    /// Reads a block whose hidden states have `hidden` features. `get` finds a tensor by its name
    /// below the layer, as `mlp.gate.weight`; `experts` is the number of experts in the config.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a form of experts that is not known, or for a block with further
    /// stages; [`Error::Shape`] and [`Error::Dtype`] naming a tensor.
    pub fn read(
        get: Get<'_, '_>,
        hidden: usize,
        experts: Option<usize>,
        rule: ExpertsRule,
    ) -> Result<Self> {
        let experts = experts.map(|n| n.saturating_mul(rule.token_groups));
        for parent in PARENTS {
            let below = |name: &str| get(&format!("{parent}{name}"));
            let Some(found) = all(&below, experts, rule)? else { continue };
            return found.block(get, &below, hidden, rule);
        }
        Err(Error::unsupported("the experts of this block", "no known tensor names were found"))
    }
}

/// The experts below one module; `None` if it has none.
fn all(get: Get<'_, '_>, experts: Option<usize>, rule: ExpertsRule) -> Result<Option<Experts>> {
    let none = || [None, None];
    for names in EACH {
        if let Some((gate_up, down)) = one_by_one(get, names, experts, rule)? {
            return Ok(Some(Experts { gate_up, down, biases: none(), fused: false }));
        }
    }
    for [gate_up, down] in FUSED {
        let (Some(first), Some(second)) = (get(gate_up), get(down)) else { continue };
        let bias = |name: &str| get(&format!("{name}_bias")).map(Tensor::into_owned);
        let biases = [bias(gate_up), bias(down)];
        let (gate_up, down) = (Stack::of(&first)?, Stack::of(&second)?);
        return Ok(Some(Experts { gate_up, down, biases, fused: true }));
    }
    for [gate, up, down] in SEPARATE {
        let (Some(g), Some(u), Some(d)) = (get(gate), get(up), get(down)) else { continue };
        let gate_up = Stack::of(&g)?.above(up, &Stack::of(&u)?)?;
        let down = Stack::of(&d)?;
        return Ok(Some(Experts { gate_up, down, biases: none(), fused: false }));
    }
    let [gate, up, down] = ROWS.map(get);
    let (Some(gate), Some(up), Some(down)) = (gate, up, down) else { return Ok(None) };
    let Some(experts) = experts else {
        return Err(Error::unsupported(ROWS[0], "the config does not state the number of experts"));
    };
    let of = |t: &Tensor<'_>, name: &str| Stack::of(t)?.split(name, experts);
    let gate_up = of(&gate, ROWS[0])?.above(ROWS[1], &of(&up, ROWS[1])?)?;
    let down = of(&down, ROWS[2])?.transposed();
    Ok(Some(Experts { gate_up, down, biases: none(), fused: false }))
}

/// Experts with a tensor each. Ids that have no down projection are zero experts.
fn one_by_one(
    get: Get<'_, '_>,
    [gate, up, down]: &[&str; 3],
    experts: Option<usize>,
    rule: ExpertsRule,
) -> Result<Option<(Stack, Stack)>> {
    let mut whole: Option<(Stack, Stack)> = None;
    for e in 0..experts.unwrap_or(MOST).min(MOST) {
        let name = |part: &str| format!("experts.{e}.{part}.weight");
        let needed = |part: &str| -> Result<Stack> {
            let tensor = get(&name(part)).ok_or_else(|| Error::missing(name(part), "an expert"))?;
            Stack::of(&tensor)
        };
        if get(&name(down)).is_none() {
            break;
        }
        let up_rows = needed(up)?;
        let gate_up = if rule.gated { needed(gate)?.above(&name(up), &up_rows)? } else { up_rows };
        let own = (gate_up, needed(down)?);
        whole = Some(match whole {
            None => own,
            Some((mut g, mut d)) => {
                let (mut more, mut more_down) = own;
                if rule.token_groups > 1 {
                    let parts = if rule.gated { 2 } else { 1 };
                    let rows = g.shape[1].max(more.shape[1]);
                    (g, more) = (g.rows_to(parts, rows), more.rows_to(parts, rows));
                    let columns = d.shape[2].max(more_down.shape[2]);
                    (d, more_down) = (d.columns_to(columns), more_down.columns_to(columns));
                }
                (g.then(&name(gate), more)?, d.then(&name(down), more_down)?)
            }
        });
    }
    Ok(whole)
}

impl Experts {
    /// Turns matrices that are stored as `[E, K, N]`, and reads the rest of the block.
    fn block<'t>(
        self,
        get: Get<'_, 't>,
        below: Get<'_, 't>,
        hidden: usize,
        rule: ExpertsRule,
    ) -> Result<BlockTensors> {
        let Self { mut gate_up, mut down, biases: [w13_bias, w2_bias], fused } = self;
        let find = |name: &str| below(name).or_else(|| get(name)).map(Tensor::into_owned);
        let read = |path| rule.stages_at(path, &find, hidden);
        let width = |stages: &[FoundStage]| stages.last().map_or(hidden, |s| s.width);
        let (router_input, expert_input) = (read(Path::RouterInput)?, read(Path::ExpertInput)?);
        let experts_hidden = width(&expert_input);
        let inner = |path| rule.stages_at(path, &find, experts_hidden);
        let (expert_output, routed_output) =
            (inner(Path::ExpertOutput)?, inner(Path::RoutedOutput)?);
        let owned = |name: &str| below(name).map(Tensor::into_owned);
        let router = rule.routers_of_groups(&owned, width(&router_input))?;
        let stages =
            [router_input, expert_input, expert_output, routed_output, read(Path::Output)?];
        let halves = if rule.gated { 2 } else { 1 };
        let fits = |g: [usize; 3], d: [usize; 3]| {
            g[2] == experts_hidden
                && d[1] == experts_hidden
                && g[1] == halves * d[2]
                && g[0] == d[0]
        };
        let turned = |[e, n, k]: [usize; 3]| [e, k, n];
        if !fits(gate_up.shape, down.shape) {
            if !fits(turned(gate_up.shape), turned(down.shape)) {
                let rule = format!("gate_up and down of hidden_size {experts_hidden}");
                return Err(Error::shape("experts", &gate_up.shape, rule));
            }
            (gate_up, down) = (gate_up.transposed(), down.transposed());
        }
        let first = |names: &[&str]| names.iter().find_map(|n| below(n)).map(Tensor::into_owned);
        Ok(BlockTensors {
            router_weight: router.or_else(|| first(ROUTERS)),
            router_bias: first(&["router.bias"]),
            w13: gate_up.tensor("w13")?,
            interleaved: fused && rule.interleaved,
            w13_bias,
            w2: down.tensor("w2")?,
            w2_bias,
            shared: shared(get, below, rule)?,
            shared_gate: first(&["shared_expert_gate.weight"]),
            output_bias: first(&["bias"]),
            stages,
        })
    }
}

/// The shared expert, inside the block or (step3) next to it.
pub(super) fn shared<'t>(
    get: Get<'_, 't>,
    below: Get<'_, 't>,
    rule: ExpertsRule,
) -> Result<Option<[Tensor<'static>; 2]>> {
    let gated = rule.gated;
    let flat = |stack: Stack, name: &str| stack.flat(name);
    for module in SHARED {
        for names in FUSED_SHARED {
            let [fused, down] = names.map(|name| format!("{module}{name}"));
            let found = |name: &str| get(name).or_else(|| below(name));
            let (Some(fused), Some(down)) = (found(&fused), found(&down)) else { continue };
            let (mut fused, down) = (Stack::of(&fused)?, Stack::of(&down)?);
            if rule.interleaved {
                fused = fused.in_halves();
            }
            return Ok(Some([flat(fused, "shared_w13")?, flat(down, "shared_w2")?]));
        }
        for names in EACH.iter().chain([&MISNAMED]) {
            let [gate, up, down] = names.map(|n| format!("{module}{n}.weight"));
            let places: [Get<'_, 't>; 2] = [below, get];
            for place in places {
                let (Some(u), Some(d)) = (place(&up), place(&down)) else { continue };
                let w13 = match (gated, place(&gate)) {
                    (true, Some(g)) => Stack::of(&g)?.above(&up, &Stack::of(&u)?)?,
                    (true, None) => continue,
                    (false, _) => Stack::of(&u)?,
                };
                return Ok(Some([flat(w13, "shared_w13")?, flat(Stack::of(&d)?, "shared_w2")?]));
            }
        }
    }
    Ok(None)
}

/// The routers of two groups of experts, one below the other.
fn of_groups(below: Get<'_, '_>, hidden: usize) -> Result<Tensor<'static>> {
    let each = ROUTERS_OF_GROUPS.map(|name| -> Result<Stack> {
        let tensor = below(name).ok_or_else(|| Error::missing(name, "a group's router"))?;
        let stack = Stack::of(&tensor)?;
        Ok(if stack.shape[2] == hidden { stack } else { stack.transposed() })
    });
    let [first, second] = each;
    first?.then(ROUTERS_OF_GROUPS[1], second?)?.flat("router_weight")
}

/// The tensor of a name relative to the experts' parent, of a file whose names begin at the layer.
pub fn tensor_below<'t>(get: Get<'_, 't>, name: &str) -> Option<Tensor<'t>> {
    PARENTS.iter().find_map(|parent| get(&format!("{parent}{name}")))
}
