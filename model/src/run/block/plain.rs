//! Blocks whose experts are not quantized, in every form that checkpoints store them: one by one,
//! fused to three dimensions, transposed, interleaved, rows of one matrix.

use std::time::Instant;

use marlinspike::moe::block::Near;
use marlinspike::moe::families::{self, BlockTensors, ExpertsRule, Path};
use marlinspike::moe::layer::Routed;
use marlinspike::num::scalar::ScalarType;
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::{Error, Result};
use rayon::ThreadPool;

use super::dense::{compensated, round, values};
use super::experts::Experts;
use super::stages::Stages;
use super::tail::{Engine, activations};
use super::tokens::{TokenInputs, TokenNeeds, TokenTable};
use super::{Router, Surrounding};
use crate::model::block::{BlockParts, places};
use crate::model::routing::MoeRouting;
use crate::model::{Model, ModelError};
use crate::run::error::RunError;
use crate::run::input::{Inputs, Numbers, Routing, Sizes};
use crate::run::options::{Options, Source};
use crate::run::output::{LayerKind, Method, Output, Run, Timing};
use crate::run::routing::RoutingReport;

/// A tensor that scales the router's state of the layer before (zaya).
const ROUTER_STATE: &str = "gate.router_states_scale";

/// Activations of 16 or 32 bits.
#[derive(Debug, Clone, PartialEq)]
pub struct Floats {
    /// FLOAT32, FLOAT16 or BFLOAT16.
    pub ty: ScalarType,
    /// The numbers.
    pub values: Vec<f32>,
}

impl Numbers for Floats {
    fn from_f32(values: Vec<f32>, ty: ScalarType) -> Result<Self> {
        let values = values.into_iter().map(|v| round(ty, v.into())).collect();
        Ok(Self { ty, values })
    }

    fn from_tensor(tensor: &Tensor<'_>) -> Result<Self> {
        let ty = match tensor.dtype() {
            DType::F32 => ScalarType::FLOAT32,
            DType::F16 => ScalarType::FLOAT16,
            _ => ScalarType::BFLOAT16,
        };
        Ok(Self { ty, values: values(tensor)? })
    }
}

/// A block in memory.
#[derive(Debug)]
pub(super) struct PlainBlock {
    pub(super) experts: Experts,
    routing: MoeRouting,
    pub(super) surrounding: Surrounding,
    /// Hidden states to the experts' input, and the experts' sum to the part of the output.
    pub(super) stages: [Stages; 2],
    /// The experts of each token id, if they choose the experts.
    table: Option<TokenTable>,
    /// H: features of the hidden states.
    pub(super) hidden: usize,
    /// Outputs of the router for a token, zero experts included.
    scores: usize,
    format: String,
}

/// Ids and weights of each token, as the experts take them.
#[derive(Debug)]
pub(super) struct Routes {
    top_k: usize,
    ids: Vec<i32>,
    weights: Vec<f32>,
    /// Weights `[M, shared experts]`, if the router gives them.
    pub(super) shared: Option<Vec<Near>>,
}

impl PlainBlock {
    fn read(model: &Model<'_>, module: &str) -> Result<Self, RunError> {
        let (prefix, parent) = places(module);
        let name = format!("{prefix}{parent}experts");
        let wrong = |e: Error| RunError::from(ModelError::module(module, e));
        let none = |_: &str| false;
        let Some(mut parts) = BlockParts::read(model, module, &none)? else {
            let reason = "its family is not known, and with it the form of its experts";
            return Err(ModelError::module(module, reason).into());
        };
        let hidden = match &parts.tensors.router_weight {
            Some(t) if router_sees_hidden(parts.rule) => t.dims2().map_err(wrong)?[1],
            _ => hidden_size(model, module)?,
        };
        let stated = families::resolve(&model.config, &name).ok().and_then(|r| r.num_experts);
        let get = |below: &str| model.tensor(&format!("{prefix}{below}")).ok();
        let tensors = BlockTensors::read(&get, hidden, stated, parts.rule).map_err(wrong)?;
        let [count, _, _] = tensors.w2.dims3().map_err(wrong)?;
        let format = format!("{} experts, not quantized", tensors.w13.dtype());
        let group = count / parts.rule.token_groups;
        let routing = MoeRouting::read_whole(model, &name, group, parts.rule.interleaved)?;
        let rule = &routing.rule;
        let scores = group + rule.zero_experts;
        let [activation, _] = activations(&parts, rule).map_err(wrong)?;
        let inner = tensors.w2.shape()[1];
        let stages = |path: Path, before: usize| {
            let at = Path::ALL.iter().position(|p| *p == path).unwrap_or_default();
            Stages::new(&tensors.stages[at], &parts.numbers, hidden, before).map_err(wrong)
        };
        let around = [stages(Path::ExpertInput, hidden)?, stages(Path::RoutedOutput, inner)?];
        let after = stages(Path::ExpertOutput, inner)?;
        parts.tensors.router_weight.clone_from(&tensors.router_weight);
        let on_input = rule.apply_router_weight_on_input;
        let experts = Experts::new(tensors, activation, after, on_input).map_err(wrong)?;
        let load = |name: &str| Err(ModelError::module(name, "not quantized").into());
        let mut surrounding = Surrounding::of(model, module, &parts, rule, [scores, hidden], load)?;
        if rule.shared_experts > 0 && surrounding.router.is_none() {
            let missing = Error::missing("gate.weight", "the weights of the shared experts");
            return Err(wrong(missing));
        }
        if get(&format!("{parent}{ROUTER_STATE}")).is_some() {
            let note =
                "the router's state of the layer before is not an input; it is taken as absent";
            surrounding.notes.push(note.to_owned());
        }
        let table = rule.token_table.as_deref();
        let table = table.map(|table| TokenTable::read(model, &name, table, rule.top_k));
        let table = table.transpose()?;
        Ok(Self { experts, routing, surrounding, stages: around, table, hidden, scores, format })
    }

    /// What the routing of `inputs` takes from the tokens.
    fn tokens(
        &self,
        source: &Source,
        inputs: &Inputs<Floats>,
    ) -> std::result::Result<TokenInputs, RunError> {
        let by_logits = matches!(inputs.routing, Routing::Logits(_));
        let needs = TokenNeeds {
            tokens: inputs.x.values.len() / self.hidden,
            table: self.table.as_ref().filter(|_| by_logits),
            groups: self.routing.rule.token_groups,
        };
        let made = TokenInputs::new(source, needs)?;
        let (count, router) = (self.routing.rule.shared_experts, &self.surrounding.router);
        match router.as_ref().filter(|_| count > 0) {
            None => Ok(made),
            Some(router) => {
                let logits = router.shared_logits(&inputs.x.values, inputs.x.ty, count)?;
                Ok(made.with_shared(&logits))
            }
        }
    }

    /// Ids and weights of the inputs, routed from logits if they have those.
    fn routes(&self, x: &Floats, routing: &Routing, tokens: &TokenInputs) -> Result<Routes> {
        let (top_k, mut ids, weights) = self.routed(routing, tokens)?;
        let shared = self.shared_weights(x, routing, (top_k, &ids), tokens)?;
        let group = self.experts.count / self.routing.rule.token_groups;
        for (slot, id) in ids.iter_mut().enumerate() {
            *id += tokens.groups.as_ref().map_or(0, |g| (g[slot / top_k] * group) as i32);
        }
        Ok(Routes { top_k, ids, weights, shared })
    }

    /// Weights of the shared experts for the chosen ids, if the router gives them.
    fn shared_weights(
        &self,
        x: &Floats,
        routing: &Routing,
        (top_k, ids): (usize, &[i32]),
        tokens: &TokenInputs,
    ) -> Result<Option<Vec<Near>>> {
        let rule = &self.routing.rule;
        let Some(router) = self.surrounding.router.as_ref().filter(|_| rule.shared_experts > 0)
        else {
            return Ok(None);
        };
        let logits = match routing {
            Routing::Logits(logits) => logits.clone(),
            Routing::Given { .. } => router.logits(&x.values, x.ty, tokens.groups.as_deref()),
        };
        let rows = logits.chunks_exact(self.scores).zip(ids.chunks_exact(top_k)).enumerate();
        let of = |(t, (row, ids)): (usize, (&[f32], &[i32]))| {
            let ids: Vec<usize> = ids.iter().map(|&id| id as usize).collect();
            let all =
                rule.define_shared_weights(row, &ids, self.routing.tensors(), (tokens.tokens(), t));
            all.into_iter().map(|(exact, error)| Near { exact, error })
        };
        Ok(Some(rows.flat_map(of).collect()))
    }

    fn routed(
        &self,
        routing: &Routing,
        tokens: &TokenInputs,
    ) -> Result<(usize, Vec<i32>, Vec<f32>)> {
        match routing {
            Routing::Given { top_k, ids, weights } => {
                let known = |id: &i32| usize::try_from(*id).is_ok_and(|id| id < self.scores);
                if let Some(i) = ids.iter().position(|id| !known(id)) {
                    let at = [i / top_k, i % top_k];
                    let rule = format!("an expert below {}", self.scores);
                    return Err(Error::value("topk_ids", &at, ids[i], rule));
                }
                Ok((*top_k, ids.clone(), weights.clone()))
            }
            Routing::Logits(logits) => {
                let made = self.routing.route_tokens(logits, self.scores, tokens.tokens())?;
                let made = made.routed()?;
                Ok((made.topk_ids().ncols(), made.ids().to_vec(), made.weights().to_vec()))
            }
        }
    }

    /// `y_experts` and what follows it, `y` last.
    fn forward(&self, x: &Floats, routes: &Routes) -> Result<Vec<Output>> {
        let output = |name, values: &[f32]| Output::floats(name, x.ty, self.hidden, values);
        let [before, after] = &self.stages;
        let input = before.rows(&x.values, x.ty, compensated);
        let y_experts = self.experts.forward(&input, routes.routed()?, x.ty)?;
        let added = after.rows(&y_experts, x.ty, compensated);
        let weights = routes.shared.as_ref();
        let weights = weights.map(|all| all.iter().map(|w| w.exact as f32).collect::<Vec<_>>());
        let refuse = |p: &marlinspike::method::Product<'_>| {
            Err(Error::unsupported(format!("{} products", p.weights.len()), "not quantized"))
        };
        let engine = Engine { dot: compensated, multiply: &refuse };
        let tail = &self.surrounding.tail;
        let (shared, y) = tail.apply(&x.values, &added, weights.as_deref(), x.ty, engine)?;
        let inner = self.experts.hidden;
        let mut outputs = vec![Output::floats("y_experts", x.ty, inner, &y_experts)];
        outputs.extend(shared.map(|shared| output("shared", &shared)));
        outputs.push(output("y", &y));
        Ok(outputs)
    }
}

impl Routes {
    pub(super) fn routed(&self) -> Result<Routed<'_>> {
        Routed::from_rows(self.top_k, &self.ids, &self.weights)
    }
}

/// Whether the router's weight is stored as `[E, H]`, H the features of the hidden states.
fn router_sees_hidden(rule: ExpertsRule) -> bool {
    let staged = rule.stages.iter().any(|(path, _)| *path == Path::RouterInput);
    rule.token_groups == 1 && !staged
}

/// The number of features of the hidden states.
fn hidden_size(model: &Model<'_>, module: &str) -> Result<usize, ModelError> {
    let found = ["hidden_size", "d_model"].iter().find_map(|key| model.config_value(key)?.as_u64());
    found.and_then(|n| usize::try_from(n).ok()).ok_or_else(|| {
        let reason = "found neither a router's weight nor `hidden_size` in config.json";
        ModelError::module(module, reason)
    })
}

/// Runs the block of the experts `module`.
///
/// # Errors
/// For a block or activations that cannot be used, each by name.
pub(in crate::run) fn run(
    options: &Options,
    model: &Model<'_>,
    module: &str,
    pool: &ThreadPool,
) -> Result<Run, RunError> {
    let block = PlainBlock::read(model, module)?;
    let hidden = block.hidden;
    let router: Option<&Router> = block.surrounding.router.as_ref();
    let sizes =
        Sizes { size_k: hidden, num_experts: Some(block.scores), has_router: router.is_some() };
    let mut inputs: Inputs<Floats> = match &options.input {
        Source::File(path) => Inputs::read(path, sizes)?,
        Source::Seeded { seed, tokens, dtype } => Inputs::seeded(*seed, *tokens, *dtype, sizes)?,
    };
    let ty = inputs.x.ty;
    let tokens = block.tokens(&options.input, &inputs)?;
    let (x, groups, check) = (&inputs.x.values, tokens.groups.as_deref(), options.check);
    let logits = router.map(|r| r.fill(x, ty, groups, &mut inputs.routing, check));
    let logits = logits.transpose()?.flatten();
    let routes = block.routes(&inputs.x, &inputs.routing, &tokens)?;
    let (mut seconds, mut outputs) = (f64::INFINITY, Vec::new());
    for _ in 0..options.repeat.get() {
        let begun = Instant::now();
        outputs = pool.install(|| block.forward(&inputs.x, &routes))?;
        seconds = seconds.min(begun.elapsed().as_secs_f64());
    }
    let check = options.check.then(|| pool.install(|| block.check(&inputs.x, &routes, &outputs)));
    let routing = match &inputs.routing {
        Routing::Given { .. } => None,
        Routing::Logits(logits) => {
            let r = &block.routing;
            let route = || r.route_tokens(logits, block.scores, tokens.tokens());
            let made = options.check.then(route).transpose()?;
            let (given, rule) = ((&logits[..], block.scores), r.rule.clone());
            let own = (r.tensors(), tokens.tokens());
            Some(RoutingReport::new(r.source.clone(), rule, own, given, made)?)
        }
    };
    let arithmetic = "f64 sums, every stage rounded to the type of x";
    let mut notes = block.routing.notes.clone();
    notes.extend(block.surrounding.notes.iter().cloned());
    Ok(Run {
        module: module.to_owned(),
        packed: false,
        kind: LayerKind::Moe {
            num_experts: block.experts.count,
            top_k: routes.top_k,
            hidden_size: hidden,
            intermediate_size: block.experts.inner,
        },
        method: Some(Method {
            format: block.format,
            activations: ty.name().to_owned(),
            arithmetic,
            is_bounded: true,
        }),
        outputs,
        timing: Timing::of_reference(pool, seconds),
        check: check.transpose()?,
        logits,
        routing,
        notes,
        partial: None,
        arithmetic: arithmetic.to_owned(),
    })
}
