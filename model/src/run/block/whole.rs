//! Whole blocks, stage by stage: those whose experts are not quantized, in every form that checkpoints
//! store them (one by one, fused to three dimensions, transposed, interleaved, rows of one matrix), and
//! those of quantized experts with stages around them.

use std::time::Instant;

use marlinspike::method::{Arithmetic, Product};
use marlinspike::moe::families::{self, BlockTensors, ExpertsRule, Path};
use marlinspike::num::scalar::ScalarType;
use marlinspike::num::tensor::Tensor;
use marlinspike::{Error, Result};
use rayon::ThreadPool;

use super::dense::{compensated, exact};
use super::experts::Experts;
use super::quantized::QuantizedExperts;
use super::routes::{Floats, Routes};
use super::stages::Stages;
use super::tail::{Engine, Linear, activations};
use super::tokens::TokenTable;
use super::{Router, Surrounding};
use crate::model::block::{BlockParts, places};
use crate::model::routing::MoeRouting;
use crate::model::{Model, ModelError};
use crate::run::error::RunError;
use crate::run::input::{Inputs, Sizes};
use crate::run::options::{Options, Source};
use crate::run::output::{Check, LayerKind, Method, Output, Run, Timing};

/// A tensor that scales the router's state of the layer before (zaya).
const ROUTER_STATE: &str = "gate.router_states_scale";

/// A block in memory.
#[derive(Debug)]
pub(super) struct WholeBlock {
    pub(super) experts: Experts,
    pub(super) routing: MoeRouting,
    pub(super) surrounding: Surrounding,
    /// Hidden states to the experts' input, and the experts' sum to the part of the output.
    pub(super) stages: [Stages; 2],
    /// The experts of each token id, if they choose the experts.
    pub(super) table: Option<TokenTable>,
    /// H: features of the hidden states.
    pub(super) hidden: usize,
    /// Outputs of the router for a token, zero experts included.
    pub(super) scores: usize,
    format: String,
    notes: Vec<String>,
    packed: bool,
}

/// Where the experts of a block come from.
pub(in crate::run) enum Stored<'s> {
    /// Tensors of 16 or 32 bits.
    Plain,
    /// Quantized matrices.
    Quantized(QuantizedBlock<'s>),
}

/// Quantized experts, and what the block around them needs.
pub(in crate::run) struct QuantizedBlock<'s> {
    pub(in crate::run) experts: QuantizedExperts,
    /// Whether rows of gate and up alternate in w13.
    pub(in crate::run) interleaved: bool,
    /// How the experts are stored.
    pub(in crate::run) format: String,
    /// Notes on their preparation.
    pub(in crate::run) notes: Vec<String>,
    /// Whether the folder was converted for a kernel.
    pub(in crate::run) packed: bool,
    /// Whether a linear layer is quantized.
    pub(in crate::run) quantized: &'s dyn Fn(&str) -> bool,
    /// The quantized linear layer of a name.
    pub(in crate::run) load: LoadLinear<'s>,
}

/// Gives the quantized linear layer of a name.
pub(in crate::run) type LoadLinear<'s> =
    &'s dyn Fn(&str) -> std::result::Result<Box<dyn Linear>, RunError>;

/// The experts of a block, and how they are routed.
struct Made {
    routing: MoeRouting,
    experts: Experts,
    format: String,
    notes: Vec<String>,
    packed: bool,
}

impl Made {
    /// Experts of 16 or 32 bits. The router of `parts` becomes that of all groups of experts.
    fn plain(
        model: &Model<'_>,
        (module, name): (&str, &str),
        parts: &mut BlockParts,
        after: Stages,
        hidden: usize,
    ) -> Result<Self, RunError> {
        let (prefix, _) = places(module);
        let wrong = |e: Error| RunError::from(ModelError::module(module, e));
        let stated = families::resolve(&model.config, name).ok().and_then(|r| r.num_experts);
        let get = |below: &str| model.tensor(&format!("{prefix}{below}")).ok();
        let tensors = BlockTensors::read(&get, hidden, stated, parts.rule).map_err(wrong)?;
        let [count, _, _] = tensors.w2.dims3().map_err(wrong)?;
        let format = format!("{} experts, not quantized", tensors.w13.dtype());
        parts.rule.interleaved = tensors.interleaved;
        parts.tensors.router_weight.clone_from(&tensors.router_weight);
        let group = count / parts.rule.token_groups;
        let routing = MoeRouting::read_whole(model, name, group, tensors.interleaved)?;
        let [activation, _] = activations(parts, &routing.rule).map_err(wrong)?;
        let on_input = routing.rule.apply_router_weight_on_input;
        let experts = Experts::dense(tensors, activation, after, on_input).map_err(wrong)?;
        Ok(Self { routing, experts, format, notes: Vec::new(), packed: false })
    }

    /// Quantized experts of `inner` features at their inputs. The router of `parts` becomes that of
    /// all groups of experts.
    fn quantized(
        model: &Model<'_>,
        (module, name): (&str, &str),
        parts: &mut BlockParts,
        block: QuantizedBlock<'_>,
        after: Stages,
        [inner, hidden]: [usize; 2],
    ) -> Result<Self, RunError> {
        let (prefix, parent) = places(module);
        let wrong = |e: Error| RunError::from(ModelError::module(module, e));
        let QuantizedBlock { experts, interleaved, format, notes, packed, .. } = block;
        parts.rule.interleaved = interleaved;
        let below = |name: &str| model.tensor(&format!("{prefix}{parent}{name}")).ok();
        let owned = |name: &str| below(name).map(Tensor::into_owned);
        let router = parts.rule.routers_of_groups(&owned, hidden).map_err(wrong)?;
        parts.tensors.router_weight = router.or(parts.tensors.router_weight.take());
        let group = experts.count() / parts.rule.token_groups;
        let routing = MoeRouting::read_whole(model, name, group, interleaved)?;
        let [activation, _] = activations(parts, &routing.rule).map_err(wrong)?;
        let on_input = routing.rule.apply_router_weight_on_input;
        let experts = Experts::quantized(experts, inner, activation, after, on_input);
        Ok(Self { routing, experts: experts.map_err(wrong)?, format, notes, packed })
    }
}

impl WholeBlock {
    pub(super) fn read(
        model: &Model<'_>,
        module: &str,
        stored: Stored<'_>,
    ) -> Result<Self, RunError> {
        let (prefix, parent) = places(module);
        let name = format!("{prefix}{parent}experts");
        let wrong = |e: Error| RunError::from(ModelError::module(module, e));
        let none = |_: &str| false;
        let unquantized = |name: &str| Err(ModelError::module(name, "not quantized").into());
        let (quantized, load): (&dyn Fn(&str) -> bool, LoadLinear<'_>) = match &stored {
            Stored::Plain => (&none, &unquantized),
            Stored::Quantized(block) => (block.quantized, block.load),
        };
        let Some(mut parts) = BlockParts::read(model, module, quantized)? else {
            let reason = "its family is not known, and with it the form of its experts";
            return Err(ModelError::module(module, reason).into());
        };
        super::dequantize(&mut parts, &load)?;
        let hidden = match &parts.tensors.router_weight {
            Some(t) if router_sees_hidden(parts.rule) => t.dims2().map_err(wrong)?[1],
            _ => hidden_size(model, module)?,
        };
        let stages = |parts: &BlockParts, path: Path, before: usize| -> Result<Stages, RunError> {
            let found = parts.stages_at(model, module, path, before)?;
            Stages::new(&found, &parts.numbers, hidden, before).map_err(wrong)
        };
        let input = stages(&parts, Path::ExpertInput, hidden)?;
        let inner = input.width();
        let after = stages(&parts, Path::ExpertOutput, inner)?;
        let around = [input, stages(&parts, Path::RoutedOutput, inner)?];
        let Made { routing, experts, format, mut notes, packed } = match stored {
            Stored::Plain => Made::plain(model, (module, &name), &mut parts, after, hidden)?,
            Stored::Quantized(block) => {
                Made::quantized(model, (module, &name), &mut parts, block, after, [inner, hidden])?
            }
        };
        let [_, output] = &around;
        if output.width() != hidden || experts.after.width() != inner {
            let found = [experts.after.width(), output.width()];
            let rule = format!("[{inner}, {hidden}] after each expert and after their sum");
            return Err(wrong(Error::shape("the stages of the block", &found, rule)));
        }
        let rule = &routing.rule;
        let scores = experts.count / rule.token_groups.max(1) + rule.zero_experts;
        let mut surrounding = Surrounding::of(model, module, &parts, rule, [scores, hidden], load)?;
        if rule.shared_experts > 0 && surrounding.router.is_none() {
            let missing = Error::missing("gate.weight", "the weights of the shared experts");
            return Err(wrong(missing));
        }
        notes.append(&mut surrounding.notes);
        if model.entry(&format!("{prefix}{parent}{ROUTER_STATE}")).is_some() {
            let note =
                "the router's state of the layer before is not an input; it is taken as absent";
            notes.push(note.to_owned());
        }
        let table = rule.token_table.as_deref();
        let table = table.map(|table| TokenTable::read(model, &name, table, rule.top_k));
        let table = table.transpose()?;
        let stages = around;
        Ok(Self {
            experts,
            routing,
            surrounding,
            stages,
            table,
            hidden,
            scores,
            format,
            notes,
            packed,
        })
    }

    /// Every stage of the experts and what follows them, `y` last.
    pub(super) fn forward(
        &self,
        x: &Floats,
        routes: &Routes,
        engine: Engine<'_>,
    ) -> Result<Vec<Output>> {
        let ty = x.ty;
        let output = |name, width, values: &[f32]| Output::floats(name, ty, width, values);
        let [before, after] = &self.stages;
        let (hidden, inner) = (self.hidden, self.experts.hidden);
        let mut outputs = Vec::new();
        let input = before.rows(&x.values, ty, engine.dot);
        if !before.is_empty() {
            outputs.push(output("expert_input", inner, &input));
        }
        let rows = self.experts.forward(&input, routes.routed()?, ty, engine)?;
        outputs.push(output("gate_up", self.experts.width(), &rows.gate_up));
        outputs.push(output("activated", self.experts.inner, &rows.activated));
        outputs.push(output("down", inner, &rows.down));
        if !self.experts.after.is_empty() || rows.output != rows.down {
            outputs.push(output("expert_output", inner, &rows.output));
        }
        let y_experts = self.experts.sum_rows(&rows.output, routes.routed()?, ty);
        outputs.push(output("y_experts", inner, &y_experts));
        let added = after.rows(&y_experts, ty, engine.dot);
        if !after.is_empty() {
            outputs.push(output("routed_output", hidden, &added));
        }
        let weights = routes.shared.as_ref();
        let weights = weights.map(|all| all.iter().map(|w| w.exact as f32).collect::<Vec<_>>());
        let tail = &self.surrounding.tail;
        let (shared, y) = tail.apply(&x.values, &added, weights.as_deref(), ty, engine)?;
        outputs.extend(shared.map(|shared| output("shared", hidden, &shared)));
        outputs.push(output("y", hidden, &y));
        Ok(outputs)
    }

    /// Compares the stages with their bounds, or else bit for bit with their definition.
    fn judged(
        &self,
        x: &Floats,
        routes: &Routes,
        outputs: &[Output],
        arithmetic: Arithmetic,
    ) -> Result<Check> {
        if self.is_bounded(arithmetic) {
            return self.check(x, routes, outputs);
        }
        let define = |p: &Product<'_>| p.define(arithmetic);
        let engine = Engine { dot: exact, multiply: &define };
        Ok(Check::of_stages(outputs, &self.forward(x, routes, engine)?))
    }

    /// Whether every stage has a derived bound: activations that are not quantized.
    fn is_bounded(&self, arithmetic: Arithmetic) -> bool {
        let shared = self.surrounding.tail.shared.as_ref();
        arithmetic == Arithmetic::Exact
            && self.experts.is_weight_only()
            && shared.is_none_or(|s| s.nears().is_some())
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
    stored: Stored<'_>,
    pool: &ThreadPool,
) -> Result<Run, RunError> {
    let block = WholeBlock::read(model, module, stored)?;
    let hidden = block.hidden;
    let router: Option<&Router> = block.surrounding.router.as_ref();
    let sizes =
        Sizes { size_k: hidden, num_experts: Some(block.scores), has_router: router.is_some() };
    let mut inputs: Inputs<Floats> = match &options.input {
        Source::File(path) => Inputs::read(path, sizes)?,
        Source::Seeded { seed, tokens, dtype } => Inputs::seeded(*seed, *tokens, *dtype, sizes)?,
    };
    let ty = inputs.x.ty;
    let activations = block.experts.activations();
    if activations.is_some() && ty == ScalarType::FLOAT32 {
        let what = "float32 activations of quantized experts";
        return Err(Error::unsupported(what, "these take float16 or bfloat16").into());
    }
    let tokens = block.tokens(&options.input, &inputs)?;
    let (x, groups, check) = (&inputs.x.values, tokens.groups.as_deref(), options.check);
    let logits = router.map(|r| r.fill(x, ty, groups, &mut inputs.routing, check));
    let logits = logits.transpose()?.flatten();
    let routes = block.routes(&inputs.x, &inputs.routing, &tokens)?;
    let arithmetic = options.arithmetic.unwrap_or(Arithmetic::Exact);
    let compute = |p: &Product<'_>| p.compute(arithmetic);
    let engine = Engine { dot: compensated, multiply: &compute };
    let (mut seconds, mut outputs) = (f64::INFINITY, Vec::new());
    for _ in 0..options.repeat.get() {
        let begun = Instant::now();
        outputs = pool.install(|| block.forward(&inputs.x, &routes, engine))?;
        seconds = seconds.min(begun.elapsed().as_secs_f64());
    }
    let is_bounded = block.is_bounded(arithmetic);
    let judge = || block.judged(&inputs.x, &routes, &outputs, arithmetic);
    let check = options.check.then(|| pool.install(judge)).transpose()?;
    let routing = block.report(&inputs.routing, &tokens, options.check)?;
    let (how, name) = match &activations {
        None => {
            let how = "f64 sums, every stage rounded to the type of x";
            (how.to_owned(), how)
        }
        Some(activations) => {
            let name = arithmetic.name();
            (format!("{name}, activations {activations}, every stage rounded"), name)
        }
    };
    let mut notes = block.routing.notes.clone();
    notes.extend(block.notes);
    Ok(Run {
        module: module.to_owned(),
        packed: block.packed,
        kind: LayerKind::Moe {
            num_experts: block.experts.count,
            top_k: routes.top_k,
            hidden_size: hidden,
            intermediate_size: block.experts.inner,
        },
        method: Some(Method {
            format: block.format,
            activations: activations.unwrap_or_else(|| ty.name().to_owned()),
            arithmetic: name,
            is_bounded,
        }),
        outputs,
        timing: Timing::of_reference(pool, seconds),
        check,
        logits,
        routing,
        notes,
        partial: None,
        arithmetic: how,
    })
}
