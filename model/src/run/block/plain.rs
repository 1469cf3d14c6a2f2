//! Blocks whose experts are not quantized, in every form that checkpoints store them: one by one,
//! fused to three dimensions, transposed, interleaved, rows of one matrix.

use std::time::Instant;

use marlinspike::moe::block::{Capped, Mlp, Near, Shared as SharedNear};
use marlinspike::moe::families::{self, BlockTensors};
use marlinspike::moe::layer::Routed;
use marlinspike::ndarray::Array2;
use marlinspike::num::scalar::ScalarType;
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::{Error, Result};
use rayon::ThreadPool;

use super::dense::{compensated, round, values};
use super::experts::{Experts, matrix};
use super::tail::{Engine, Linears};
use super::{Router, Surrounding};
use crate::model::block::{BlockParts, places};
use crate::model::routing::MoeRouting;
use crate::model::{Model, ModelError};
use crate::run::error::RunError;
use crate::run::input::{Inputs, Numbers, Routing, Sizes};
use crate::run::options::{Options, Source};
use crate::run::output::{Check, LayerKind, Method, Output, Run, Timing};
use crate::run::routing::RoutingReport;

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
struct PlainBlock {
    experts: Experts,
    routing: MoeRouting,
    surrounding: Surrounding,
    /// Outputs of the router, zero experts included.
    scores: usize,
    format: String,
}

impl PlainBlock {
    fn read(model: &Model<'_>, module: &str) -> Result<Self, RunError> {
        let (prefix, parent) = places(module);
        let name = format!("{prefix}{parent}experts");
        let wrong = |e: Error| RunError::from(ModelError::module(module, e));
        let none = |_: &str| false;
        let Some(parts) = BlockParts::read(model, module, &none)? else {
            let reason = "its family is not known, and with it the form of its experts";
            return Err(ModelError::module(module, reason).into());
        };
        let hidden = match &parts.tensors.router_weight {
            Some(t) => t.dims2().map_err(wrong)?[1],
            None => hidden_size(model, module)?,
        };
        let stated = families::resolve(&model.config, &name).ok().and_then(|r| r.num_experts);
        let get = |below: &str| model.tensor(&format!("{prefix}{below}")).ok();
        let tensors = BlockTensors::read(&get, hidden, stated, parts.rule).map_err(wrong)?;
        let [count, _, _] = tensors.w2.dims3().map_err(wrong)?;
        let format = format!("{} experts, not quantized", tensors.w13.dtype());
        let routing = MoeRouting::read_whole(model, &name, count, parts.rule.interleaved)?;
        let scores = count + routing.rule.zero_experts;
        let on_input = routing.rule.apply_router_weight_on_input;
        let experts = Experts::new(tensors, routing.activation, on_input).map_err(wrong)?;
        let load = |name: &str| Err(ModelError::module(name, "not quantized").into());
        let sizes = [scores, hidden];
        let surrounding = Surrounding::read(model, module, &routing.rule, sizes, &none, load)?;
        Ok(Self { experts, routing, surrounding, scores, format })
    }

    /// Ids and weights of the inputs, routed from logits if they have those.
    fn routed(&self, routing: &Routing) -> Result<(usize, Vec<i32>, Vec<f32>)> {
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
                let made = self.routing.route(logits, self.scores)?;
                let made = made.routed()?;
                Ok((made.topk_ids().ncols(), made.ids().to_vec(), made.weights().to_vec()))
            }
        }
    }

    /// `y_experts` and what follows it, `y` last.
    fn forward(&self, x: &Floats, routed: Routed<'_>) -> Result<Vec<Output>> {
        let hidden = self.experts.hidden;
        let output = |name, values: &[f32]| Output::floats(name, x.ty, hidden, values);
        let y_experts = self.experts.forward(&x.values, routed, x.ty)?;
        let refuse = |p: &marlinspike::method::Product<'_>| {
            Err(Error::unsupported(format!("{} products", p.weights.len()), "not quantized"))
        };
        let engine = Engine { dot: compensated, multiply: &refuse };
        let (shared, y) = self.surrounding.tail.apply(&x.values, &y_experts, x.ty, engine)?;
        let mut outputs = vec![output("y_experts", &y_experts)];
        outputs.extend(shared.map(|shared| output("shared", &shared)));
        outputs.push(output("y", &y));
        Ok(outputs)
    }

    /// Compares `y_experts` and `y` with the derived bound of both.
    fn check(&self, x: &Floats, routed: Routed<'_>, outputs: &[Output]) -> Result<Check> {
        let near = self.experts.near(&x.values, routed, x.ty)?;
        let last = outputs.len() - 1;
        let sum = outside(&outputs[0], &near);
        if sum.mismatches > 0 {
            return Ok(sum);
        }
        Ok(outside(&outputs[last], &self.y_near(x, near)))
    }

    fn y_near(&self, x: &Floats, mut y: Array2<Near>) -> Array2<Near> {
        let activation = Capped::none(self.experts.activation);
        let (tail, sum) = (&self.surrounding.tail, self.experts.sum(&activation, x.ty));
        let mlp = tail.shared.as_ref().and_then(|s| match &s.linears {
            Linears::Dense(w13, w2) => Some((s, w13, w2)),
            Linears::Quantized(..) => None,
        });
        let shared = mlp.map(|(s, w13, w2)| {
            let mlp = Mlp { w13: matrix(w13), w2: matrix(w2), w13_bias: None, w2_bias: None };
            let gate = s.gate.as_ref().map(matrix);
            (SharedNear { mlp, gate }, Capped::none(s.activation))
        });
        for (mut row, x_row) in
            y.rows_mut().into_iter().zip(x.values.chunks_exact(self.experts.hidden))
        {
            let x_row: Vec<f64> = x_row.iter().map(|&x| x.into()).collect();
            let of = |(s, d): &(SharedNear, Capped)| s.apply(&x_row, d, None, x.ty);
            let added = shared.as_ref().map(of);
            for (h, y) in row.iter_mut().enumerate() {
                let mut terms = vec![*y];
                terms.extend(added.as_ref().map(|added| added[h]));
                terms.extend(tail.output_bias.as_ref().map(|b| Near::point(b[h].into())));
                if terms.len() > 1 {
                    *y = sum.total(&terms);
                }
                if tail.is_averaged {
                    *y = y.halved();
                }
            }
        }
        y
    }
}

/// Values of an output outside the bound.
fn outside(found: &Output, near: &Array2<Near>) -> Check {
    let accepts = |bits: u32, near: &Near| {
        !near.error.is_finite() || near.interval().rounded(found.ty).contains(found.ty.to_f64(bits))
    };
    let pairs = found.bits().zip(near.iter()).enumerate();
    let mut wrong = pairs.filter(|(_, (bits, near))| !accepts(*bits, near)).peekable();
    let first = wrong.peek().map(|(i, (bits, near))| {
        let at = [i / found.size_n, i % found.size_n];
        (at, *bits, found.ty.encode_rne(near.exact))
    });
    let missing = found.bits().count().abs_diff(near.len());
    Check { mismatches: wrong.count() + missing, first, stage: Some(found.name) }
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
    let hidden = block.experts.hidden;
    let router: Option<&Router> = block.surrounding.router.as_ref();
    let sizes =
        Sizes { size_k: hidden, num_experts: Some(block.scores), has_router: router.is_some() };
    let mut inputs: Inputs<Floats> = match &options.input {
        Source::File(path) => Inputs::read(path, sizes)?,
        Source::Seeded { seed, tokens, dtype } => Inputs::seeded(*seed, *tokens, *dtype, sizes)?,
    };
    let ty = inputs.x.ty;
    let logits = router.map(|r| r.fill(&inputs.x.values, ty, &mut inputs.routing, options.check));
    let logits = logits.transpose()?.flatten();
    let (top_k, ids, weights) = block.routed(&inputs.routing)?;
    let routed = Routed::from_rows(top_k, &ids, &weights)?;
    let (mut seconds, mut outputs) = (f64::INFINITY, Vec::new());
    for _ in 0..options.repeat.get() {
        let begun = Instant::now();
        outputs = pool.install(|| block.forward(&inputs.x, routed))?;
        seconds = seconds.min(begun.elapsed().as_secs_f64());
    }
    let check = options.check.then(|| pool.install(|| block.check(&inputs.x, routed, &outputs)));
    let routing = match &inputs.routing {
        Routing::Given { .. } => None,
        Routing::Logits(logits) => {
            let r = &block.routing;
            let made = options.check.then(|| r.route(logits, block.scores)).transpose()?;
            let (given, rule) = ((&logits[..], block.scores), r.rule.clone());
            Some(RoutingReport::new(r.source.clone(), rule, r.tensors(), given, made)?)
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
            top_k,
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
