//! A layer's second half: experts, or one dense MLP.

use marlinspike::moe::activation::{Activation, Definition};
use marlinspike::moe::layer::Routed;
use marlinspike::ndarray::{ArrayView2, ArrayViewMut2};
use marlinspike::num::dims::Shape;
use marlinspike::w4a8::LinearWorkspace;
use marlinspike::w4a8::moe::{MoeLayer, Workspace};
use marlinspike_model::model::routing::MoeRouting;

use crate::config::Config;
use crate::error::{GenerateError, Result};
use crate::ops::dense::Dense;
use crate::ops::{add, silu_and_mul};
use crate::weights::{Linear, Weights};

/// Buffers of the int4 path, reused by every layer.
#[derive(Debug, Default)]
pub(crate) struct Workspaces {
    pub(crate) linear: LinearWorkspace,
    pub(crate) experts: Workspace,
}

impl Linear<'_> {
    /// `out` `[M, N]` of `x` `[M, K]`.
    pub(crate) fn forward(&self, x: &[f32], out: &mut Vec<f32>, w: &mut Workspaces) -> Result<()> {
        let (size_k, size_n) = match self {
            Self::Int4(linear) => {
                let shape = linear.weight().layout().shape();
                (shape.size_k, shape.size_n)
            }
            Self::Dense(dense) => (dense.size_k(), dense.size_n()),
        };
        let size_m = x.len() / size_k;
        out.clear();
        out.resize(size_m * size_n, 0.0);
        match self {
            Self::Int4(linear) => {
                let (x, out) = (rows(x, size_k), rows_mut(out, size_n));
                linear.forward(x, &mut w.linear, out)?;
            }
            Self::Dense(dense) => dense.forward(x, out),
        }
        Ok(())
    }
}

/// Whole rows of `cols` values.
fn rows(values: &[f32], cols: usize) -> ArrayView2<'_, f32> {
    ArrayView2::from_shape((values.len() / cols, cols), values).expect("whole rows")
}

fn rows_mut(values: &mut [f32], cols: usize) -> ArrayViewMut2<'_, f32> {
    ArrayViewMut2::from_shape((values.len() / cols, cols), values).expect("whole rows")
}

/// Gate, up and down of a dense MLP or of one expert.
#[derive(Debug)]
pub(crate) struct Mlp<'f> {
    gate: Linear<'f>,
    up: Linear<'f>,
    down: Linear<'f>,
}

impl<'f> Mlp<'f> {
    /// The matrices `names` of `prefix`, with `width` activated values.
    fn load(
        weights: &Weights<'_, 'f>,
        (prefix, names): (&str, [&str; 3]),
        (hidden, width): (usize, usize),
    ) -> Result<Self> {
        let matrix = |name: &str, size_k, size_n| {
            weights.linear(&format!("{prefix}.{name}"), Shape::new(size_k, size_n), false)
        };
        let [gate, up, down] = names;
        Ok(Self {
            gate: matrix(gate, hidden, width)?,
            up: matrix(up, hidden, width)?,
            down: matrix(down, width, hidden)?,
        })
    }

    /// `out` `[M, H]` of `x` `[M, H]`.
    fn forward(&self, x: &[f32], out: &mut Vec<f32>, w: &mut Workspaces) -> Result<()> {
        let (mut gate, mut up) = (Vec::new(), Vec::new());
        self.gate.forward(x, &mut gate, w)?;
        self.up.forward(x, &mut up, w)?;
        silu_and_mul(&mut gate, &up);
        self.down.forward(&gate, out, w)
    }
}

/// Experts, quantized or not.
#[derive(Debug)]
enum Stack<'f> {
    Int4(Box<MoeLayer<'f>>),
    Dense(Vec<Mlp<'f>>),
}

/// Router and experts of a layer.
#[derive(Debug)]
pub(crate) struct Experts<'f> {
    router: Dense<'f>,
    routing: MoeRouting,
    stack: Stack<'f>,
}

/// The second half of a layer.
#[derive(Debug)]
pub(crate) enum Block<'f> {
    Experts(Box<Experts<'f>>),
    Dense(Box<Mlp<'f>>),
}

impl<'f> Block<'f> {
    /// The block of layer `i`.
    pub(crate) fn load(weights: &Weights<'_, 'f>, config: &Config, i: usize) -> Result<Self> {
        if config.sparse[i] {
            return Experts::load(weights, config, i).map(Box::new).map(Self::Experts);
        }
        let (prefix, names) =
            (format!("model.layers.{i}.mlp"), ["gate_proj", "up_proj", "down_proj"]);
        let sizes = (config.hidden_size, config.intermediate_size);
        Mlp::load(weights, (&prefix, names), sizes).map(Box::new).map(Self::Dense)
    }

    /// `out` `[M, H]` of the normalized rows `x` `[M, H]`.
    pub(crate) fn forward(&self, x: &[f32], out: &mut Vec<f32>, w: &mut Workspaces) -> Result<()> {
        match self {
            Self::Experts(experts) => experts.forward(x, out, w),
            Self::Dense(mlp) => mlp.forward(x, out, w),
        }
    }
}

impl<'f> Experts<'f> {
    fn load(weights: &Weights<'_, 'f>, config: &Config, i: usize) -> Result<Self> {
        let block = format!("model.layers.{i}.{}", config.architecture.block);
        let (module, hidden) = (format!("{block}.experts"), config.hidden_size);
        let model = weights.model();
        let router = format!("{block}.gate.weight");
        let num_experts = match model.entry(&router) {
            Some(entry) if entry.shape().len() == 2 => entry.shape()[0],
            Some(entry) => {
                let expected = format!("[experts, {hidden}]");
                return Err(marlinspike::Error::shape(router, entry.shape(), expected).into());
            }
            None => {
                let dir = model.dir.clone();
                return Err(GenerateError::MissingTensor { name: router, dir });
            }
        };
        let router = weights.dense(&router, num_experts, hidden)?;
        let routing = MoeRouting::read(model, &module, num_experts, false)?;
        let stack = match weights.experts(&module)? {
            Some(layer) => {
                let found = [layer.config().num_experts, layer.hidden_size()];
                if found != [num_experts, hidden] {
                    let expected = format!("{num_experts} experts of hidden size {hidden}");
                    return Err(marlinspike::Error::shape(module, &found, expected).into());
                }
                Stack::Int4(Box::new(layer))
            }
            None => Self::dense(weights, config, &module, num_experts).map(Stack::Dense)?,
        };
        if routing.activation != Definition::new(Activation::Silu)
            || routing.rule.apply_router_weight_on_input
        {
            let found = routing.summary();
            return Err(GenerateError::config("model_type", found, "SiLU, weights on the output"));
        }
        Ok(Self { router, routing, stack })
    }

    /// Experts that are not quantized, each with three matrices.
    fn dense(
        weights: &Weights<'_, 'f>,
        config: &Config,
        module: &str,
        num_experts: usize,
    ) -> Result<Vec<Mlp<'f>>> {
        let names = match weights.has(&format!("{module}.0.w1.weight")) {
            true => ["w1", "w3", "w2"],
            false => ["gate_proj", "up_proj", "down_proj"],
        };
        let first = weights.model().entry(&format!("{module}.0.{}.weight", names[0]));
        let width = first.and_then(|entry| entry.shape().first().copied()).filter(|&n| n > 0);
        let width = width.unwrap_or(config.intermediate_size);
        let expert = |e| {
            let prefix = format!("{module}.{e}");
            Mlp::load(weights, (&prefix, names), (config.hidden_size, width))
        };
        (0..num_experts).map(expert).collect()
    }

    fn forward(&self, x: &[f32], out: &mut Vec<f32>, w: &mut Workspaces) -> Result<()> {
        let (hidden, num_experts) = (self.router.size_k(), self.router.size_n());
        let mut logits = vec![0.0; x.len() / hidden * num_experts];
        self.router.forward(x, &mut logits);
        let routing = self.routing.route(&logits, num_experts)?;
        out.clear();
        out.resize(x.len(), 0.0);
        match &self.stack {
            Stack::Int4(layer) => {
                let routed = routing.routed()?;
                let (x, out) = (rows(x, hidden), rows_mut(out, hidden));
                layer.forward_routed(x, routed, &mut w.experts, out)?;
            }
            Stack::Dense(experts) => each_expert(experts, x, routing.routed()?, out, w)?,
        }
        Ok(())
    }
}

/// Adds each token's weighted rows in the order of the experts, from zero.
fn each_expert(
    experts: &[Mlp<'_>],
    x: &[f32],
    routed: Routed<'_>,
    out: &mut [f32],
    w: &mut Workspaces,
) -> Result<()> {
    let (ids, weights) = (routed.topk_ids(), routed.topk_weights());
    let hidden = x.len() / ids.nrows();
    let (mut input, mut down) = (Vec::new(), Vec::new());
    for (e, expert) in experts.iter().enumerate() {
        let slots: Vec<(usize, f32)> = ids
            .indexed_iter()
            .filter(|&(_, &id)| id as usize == e)
            .map(|(at, _)| (at.0, weights[at]))
            .collect();
        if slots.is_empty() {
            continue;
        }
        input.clear();
        slots.iter().for_each(|(token, _)| input.extend_from_slice(&x[token * hidden..][..hidden]));
        expert.forward(&input, &mut down, w)?;
        for (&(token, weight), row) in slots.iter().zip(down.chunks_exact_mut(hidden)) {
            row.iter_mut().for_each(|y| *y *= weight);
            add(&mut out[token * hidden..][..hidden], row);
        }
    }
    Ok(())
}
