//! The whole MoE block of a `router` case: its tensors, and verdicts on the logits, the routed sum and
//! the block's output.

mod layer;

use ndarray::{Array2, ArrayView2, s};

use layer::Layer;

use super::logits::{after_logits, floats, router_input};
use super::tokens::TokenInputs;
use super::{mismatch, passing, picture, widened};
use crate::judge::mistake::{Comparison, Outcome};
use crate::judge::power::{Accepted, Power};
use crate::judge::{Diagnosis, OutputReport, Verdict};
use crate::moe::block::{Block, Near, logits};
use crate::moe::families::{RouterTensors, RoutingRule};
use crate::num::array::rows_of;
use crate::num::scalar::ScalarType;
use crate::num::tensor::{DType, Tensor};
use crate::ops::case::Case;
use crate::ops::schema::{Demand, Dim, Inputs, TensorRule, finite, rule};
use crate::{Error, Result};

const FLOATS: &[DType] = &[DType::F32, DType::F16, DType::BF16];
/// The block's inputs, all of them floats.
const INPUTS: &[&str] = &[
    "hidden_states",
    "router_weight",
    "router_bias",
    "w13",
    "w13_bias",
    "w2",
    "w2_bias",
    "shared_w13",
    "shared_w2",
    "shared_gate",
    "output_bias",
];
/// The class of computations that the bound allows.
const CLASS: &str = "bound: products and sums in f32 in any order; functions to 24 roundings of f32; \
                     every stage rounded to the block's dtype";

/// The tensors of a block.
pub(in crate::ops) fn tensors(block: &Block, routing: &RoutingRule) -> Result<Vec<TensorRule>> {
    let (h, i, e) = (block.hidden_size, block.intermediate_size, block.num_experts);
    let width = block.activation(routing)?.definition.width_in(i);
    let scores = scores(block, routing);
    let routers = scores * routing.token_groups + routing.shared_experts;
    let inner = block.experts_hidden_size();
    let input = |name: &str, shape: &[usize], required: bool| {
        let shape: Vec<Dim> = shape.iter().map(|&n| Dim::Is(n)).collect();
        rule(format!("in.{name}"), FLOATS, &shape).required(required)
    };
    let mut rules = vec![
        rule("in.hidden_states", FLOATS, &[Dim::Some, Dim::Is(h)]).required(true),
        input("router_weight", &[routers, block.router_hidden_size()], false),
        input("router_bias", &[scores], false),
        input("w13", &[e, width, inner], true),
        input("w13_bias", &[e, width], false),
        input("w2", &[e, inner, i], true),
        input("w2_bias", &[e, inner], false),
        input("output_bias", &[h], false),
    ];
    let s = block.shared_intermediate_size;
    if s > 0 {
        let width = block.shared_activation(routing)?.definition.width_in(s);
        let count = routing.shared_experts.max(1);
        rules.push(input("shared_w13", &[count * width, h], true));
        rules.push(input("shared_w2", &[count * h, s], true));
        rules.push(input("shared_gate", &[1, h], false));
    }
    for (name, shape) in block.stage_tensors() {
        let found = input(name, &shape, true);
        if rules.iter().any(|rule| rule.name == found.name) {
            let key = "block: tensor of a stage";
            return Err(Error::size(key, name, "a name that no other input has"));
        }
        rules.push(found);
    }
    for (name, columns) in [("router_logits", scores), ("y_experts", inner), ("y", h)] {
        rules.push(rule(format!("out.{name}"), FLOATS, &[Dim::Some, Dim::Is(columns)]));
    }
    Ok(rules)
}

/// Checks that the rows agree and the numbers are finite.
pub(in crate::ops) fn check_inputs(inputs: &Inputs<'_>, block: Option<&Block>) -> Result<()> {
    let rows = |name: &str| inputs.get(name).and_then(|t| t.shape().first().copied());
    if let (Some(rows), Some(t)) = (rows("router_logits"), inputs.get("hidden_states"))
        && t.shape().first() != Some(&rows)
    {
        let rule = format!("{rows} rows, as `in.router_logits`");
        return Err(Error::shape("in.hidden_states", t.shape(), rule));
    }
    let stages = block.map(Block::stage_tensors).unwrap_or_default();
    let names = INPUTS.iter().copied().chain(stages.iter().map(|(name, _)| *name));
    names.filter_map(|name| inputs.get(name)).try_for_each(finite)
}

/// The time and memory of the block's products.
pub(in crate::ops) fn demands(block: &Block, rows: usize, top_k: usize) -> Vec<Demand> {
    let (h, i) = (block.hidden_size, block.intermediate_size);
    let slots = rows.saturating_mul(top_k);
    let stages = block.stage_tensors();
    let mut all = Demand::layer(slots, h, i.saturating_mul(2), i);
    let s = block.shared_intermediate_size;
    if s > 0 {
        all.extend(Demand::layer(rows, h, s.saturating_mul(2), s));
    }
    all.push(Demand::product(rows, block.num_experts, h));
    for (_, shape) in stages.iter().filter(|(_, shape)| shape.len() == 2) {
        all.push(Demand::product(slots, shape[0], shape[1]));
    }
    // One expert at a time in f64.
    all.push(Demand::product(3 * block.num_experts, h, i));
    all
}

/// Judges `router_logits`, `y_experts` and `y`, as far as the case has them. Ids and weights are the
/// case's own, otherwise routed from its logits.
pub(in crate::ops) fn judge(
    case: &Case<'_>,
    block: &Block,
    routing: &RoutingRule,
) -> Result<Vec<OutputReport>> {
    let mut reports = Vec::new();
    let ty = block.dtype.scalar();
    let x = floats(case.input("hidden_states")?)?;
    let h = block.hidden_size;
    let x = ArrayView2::from_shape((x.len() / h, h), &x).expect("the rule fixes the shape");
    if let Some(found) = case.output("router_logits") {
        reports.push(judge_logits(case, block, routing, found, x)?);
    }
    let (sum, whole) = (case.output("y_experts"), case.output("y"));
    if sum.is_none() && whole.is_none() {
        return Ok(reports);
    }
    let own = TokenInputs::read(&case.inputs, routing, Some(block))?;
    let (mut ids, weights) = routed(case, block, routing, &own)?;
    let shared_weights = shared_weights(case, block, routing, &own, &ids)?;
    let per_group = block.num_experts / routing.token_groups;
    for (s, id) in ids.iter_mut().enumerate() {
        *id += (own.group(s / routing.top_k) * per_group) as i32;
    }
    let layer = Layer {
        inputs: &case.inputs,
        block: block.clone(),
        shared_weights,
        ty,
        x,
        activation: block.activation(routing)?,
        shared_activation: block.shared_activation(routing)?,
        weight_on_input: routing.apply_router_weight_on_input,
        ids: &ids,
        weights,
        top_k: routing.top_k,
        shared: true,
        shared_gate: true,
        averaged: block.shared_is_averaged,
        biases: true,
        output_bias: true,
    };
    for (name, found) in [("y_experts", sum), ("y", whole)] {
        let Some(found) = found else { continue };
        let part = |l: &Layer<'_>| if name == "y" { l.y() } else { l.y_experts() };
        let near = part(&layer)?;
        let mut report = compare(name, found, &near)?;
        if report.verdict == Verdict::Fail && report.mismatches > 1 {
            let made = layer.mistakes().into_iter();
            let made = made.filter_map(|(id, text, l)| Some((id, text, part(&l).ok()?)));
            diagnose(&mut report, found, &near, made)?;
        }
        reports.push(report);
    }
    Ok(reports)
}

fn judge_logits(
    case: &Case<'_>,
    block: &Block,
    routing: &RoutingRule,
    found: &Tensor<'_>,
    x: ArrayView2<'_, f64>,
) -> Result<OutputReport> {
    let Some(weight) = case.inputs.get("router_weight") else {
        let reason = "the case has no `in.router_weight`";
        return Ok(OutputReport::unchecked("router_logits", found.len(), reason));
    };
    let ([rows, width], values) = (weight.dims2()?, floats(weight)?);
    let weight = ArrayView2::from_shape((rows, width), &values).expect("the rule fixes the shape");
    let bias = case.inputs.get("router_bias").map(floats).transpose()?;
    let own = TokenInputs::read(&case.inputs, routing, Some(block))?;
    let experts = scores(block, routing);
    let made = |block: &Block, bias: Option<&[f64]>| {
        let rows = x.rows().into_iter().enumerate().flat_map(|(t, row)| {
            let input = router_input(&case.inputs, block, &row.to_vec());
            let first = own.group(t) * experts;
            let weight = weight.slice(s![first..first + experts, ..]);
            logits(&input, weight, bias, after_logits(block), block.dtype.scalar())
        });
        Array2::from_shape_vec((x.nrows(), experts), rows.collect()).expect("a row for each token")
    };
    let near = made(block, bias.as_deref());
    let mut report = compare("router_logits", found, &near)?;
    if report.verdict == Verdict::Fail {
        let mut variants = Vec::new();
        if bias.is_some() {
            let left_out = made(block, None);
            variants.push(("router-bias-left-out", "the router's bias was not added", left_out));
        }
        let mut vary = |id, text, change: &dyn Fn(&mut Block)| {
            let mut changed = block.clone();
            change(&mut changed);
            if changed != *block {
                variants.push((id, text, made(&changed, bias.as_deref())));
            }
        };
        let text = "the logits were not capped";
        vary("softcap-left-out", text, &|b| b.logit_softcap = None);
        let text = "the logits were not multiplied";
        vary("logit-multiplier-left-out", text, &|b| b.logit_multiplier = None);
        let text = "the router's input was not normalized";
        vary("router-norm-left-out", text, &|b| b.router_input.retain(|s| !s.is_norm()));
        diagnose(&mut report, found, &near, variants)?;
    }
    Ok(report)
}

/// Logits of a token: the experts of its group, and zero experts.
fn scores(block: &Block, routing: &RoutingRule) -> usize {
    block.num_experts / routing.token_groups.max(1) + routing.zero_experts
}

/// Weights of the shared experts of each token, if the router gives them.
fn shared_weights(
    case: &Case<'_>,
    block: &Block,
    routing: &RoutingRule,
    own: &TokenInputs,
    ids: &[i32],
) -> Result<Vec<Near>> {
    if routing.shared_experts == 0 {
        return Ok(Vec::new());
    }
    let (values, _) = widened(case.input("router_logits")?)?;
    let given = Given::read(case);
    let logits = values.chunks_exact(scores(block, routing));
    let all =
        logits.zip(ids.chunks_exact(routing.top_k)).enumerate().flat_map(|(t, (row, ids))| {
            let ids: Vec<usize> = ids.iter().map(|&id| id as usize).collect();
            let all = routing.define_shared_weights(row, &ids, given.tensors(), (own.tokens(), t));
            all.into_iter().map(|(exact, error)| Near { exact, error })
        });
    Ok(all.collect())
}

/// The router's tensors of a case.
struct Given<'c> {
    bias: Option<std::borrow::Cow<'c, [f32]>>,
    scale: Option<std::borrow::Cow<'c, [f32]>>,
}

impl<'c> Given<'c> {
    fn read(case: &'c Case<'_>) -> Self {
        let floats = |name: &str| case.inputs.get(name).map(|t| t.elements::<f32>());
        Self { bias: floats("e_score_correction_bias"), scale: floats("expert_scale") }
    }

    fn tensors(&self) -> RouterTensors<'_> {
        RouterTensors { correction_bias: self.bias.as_deref(), expert_scale: self.scale.as_deref() }
    }
}

/// Ids and weights of the case, if its ids are experts; otherwise routed from the logits.
fn routed(
    case: &Case<'_>,
    block: &Block,
    routing: &RoutingRule,
    own: &TokenInputs,
) -> Result<(Vec<i32>, Vec<f32>)> {
    let experts = scores(block, routing);
    let found = |name: &str| case.output(name).filter(|t| t.shape().get(1) == Some(&routing.top_k));
    let ids = found("topk_ids").map(|t| t.elements::<i32>().into_owned());
    let valid = |id: &i32| usize::try_from(*id).is_ok_and(|id| id < experts);
    let ids = ids.filter(|ids| ids.iter().all(valid));
    let weights = found("topk_weights").map(|t| t.elements::<f32>().into_owned());
    let weights = weights.filter(|w| w.iter().all(|w| w.is_finite()));
    if let (Some(ids), Some(weights)) = (&ids, &weights) {
        return Ok((ids.clone(), weights.clone()));
    }
    let (values, _) = widened(case.input("router_logits")?)?;
    let given = Given::read(case);
    let rows = rows_of("router_logits", &values, experts)?;
    let made = routing.route_tokens(rows, given.tensors(), own.tokens())?;
    let made = made.routed()?;
    Ok((made.ids().to_vec(), made.weights().to_vec()))
}

/// The values that an implementation with an output of `ty` may have.
fn accepted(near: &Near, ty: ScalarType) -> Accepted {
    if !near.error.is_finite() || !near.exact.is_finite() {
        let (lo, hi) = (f64::NEG_INFINITY, f64::INFINITY);
        return Accepted { exact: near.exact, lo, hi, nan: true };
    }
    let interval = near.interval().rounded(ty);
    Accepted { exact: near.exact, lo: interval.lo, hi: interval.hi, nan: false }
}

/// Indices of the values of `found` that no implementation has.
fn outside(found: &[f32], near: &Array2<Near>, ty: ScalarType) -> Vec<usize> {
    let near = near.iter().enumerate();
    near.filter(|(i, n)| !accepted(n, ty).accepts(f64::from(found[*i]))).map(|(i, _)| i).collect()
}

fn compare(name: &str, found: &Tensor<'_>, near: &Array2<Near>) -> Result<OutputReport> {
    found.expect_shape(&[near.nrows(), near.ncols()])?;
    let (values, ty) = widened(found)?;
    let mut report = passing(name, values.len());
    let wrong = outside(&values, near, ty);
    let all: Vec<Accepted> = near.iter().map(|n| accepted(n, ty)).collect();
    let right = |i: usize| crate::num::interval::round_once(ty, all[i].exact);
    let same = (0..values.len()).filter(|&i| right(i) == f64::from(values[i])).count();
    report.equal_bits = Some(same as f64 / values.len().max(1) as f64);
    let ratios = near.iter().zip(&values).filter(|(n, _)| n.error.is_finite());
    let ratios = ratios.map(|(n, &v)| n.interval().rounded(ty).ratio(n.exact, v));
    report.max_error_over_bound = Some(ratios.fold(0.0, f64::max));
    report.unbounded = all.iter().filter(|a| a.is_unbounded()).count();
    report.note = Some(CLASS.to_owned());
    report.settle(Power::of(&all, near.ncols(), ty), "its values are too small to tell");
    let Some(&first) = wrong.first() else { return Ok(report) };
    report.verdict = Verdict::Fail;
    report.mismatches = wrong.len();
    let at = vec![first / near.ncols(), first % near.ncols()];
    let exact = right(first) as f32;
    report.first_mismatch =
        Some(mismatch(at.clone(), None, exact.to_bits(), values[first].to_bits()));
    let text = format!(
        "{} of {} values; first {at:?}: {} where {exact} belongs",
        wrong.len(),
        values.len(),
        values[first]
    );
    report.diagnosis = Some(Diagnosis::place("outside-bound", text, wrong.len()));
    report.picture = Some(picture("token", near.nrows(), near.ncols(), &wrong));
    Ok(report)
}

/// Replaces the place by the known mistake that predicts every value.
fn diagnose(
    report: &mut OutputReport,
    found: &Tensor<'_>,
    right: &Array2<Near>,
    mistakes: impl IntoIterator<Item = (&'static str, &'static str, Array2<Near>)>,
) -> Result<()> {
    let (values, ty) = widened(found)?;
    let wrong = outside(&values, right, ty);
    let mut best: Option<(Outcome, Diagnosis)> = None;
    for (id, text, made) in mistakes {
        let left = outside(&values, &made, ty);
        let mut all = Comparison::default();
        all.broken = left.iter().filter(|i| wrong.binary_search(i).is_err()).count();
        all.unexplained = left.len() - all.broken;
        all.explained = wrong.len() - all.unexplained;
        all.evidence = 8.0 * all.explained as f64;
        if let Some(outcome) = all.outcome(4.0)
            && outcome.beats(best.as_ref().map(|b| b.0))
        {
            best = Some((outcome, outcome.named(id, text)));
        }
    }
    if let Some((_, diagnosis)) = best {
        report.diagnosis = Some(diagnosis);
    }
    Ok(())
}
