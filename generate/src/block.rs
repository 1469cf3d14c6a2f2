//! A layer's second half: experts, or one dense MLP.

mod stack;
mod stored;

use marlinspike::moe::activation::{Activation, Columns, Definition};
use marlinspike::moe::router::Routing;
use marlinspike::ndarray::{ArrayView2, ArrayViewMut2};
use marlinspike::num::dims::Shape;
use marlinspike::w4a8::LinearWorkspace;
use marlinspike::w4a8::linears::forward_all;
use marlinspike::w4a8::moe::{GatedActivation, Workspace};
use marlinspike_model::model::routing::MoeRouting;
use rayon::prelude::*;

use crate::cache::PackedKeys;
use crate::config::Config;
use crate::error::{GenerateError, Result};
use crate::ops::dense::Dense;
use crate::ops::{add, resize, silu_and_mul};
use crate::weights::{Linear, Weights};

use stack::{ExpertStack, MlpExperts};
use stored::StoredExperts;

/// Matrices of an MLP.
const PROJECTIONS: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

/// Rows that one work item routes.
const ROUTED_ROWS: usize = 16;

/// Buffers of the int4 path, reused by every layer.
#[derive(Debug, Default)]
pub(crate) struct Workspaces {
    pub(crate) linear: LinearWorkspace,
    pub(crate) experts: Workspace,
    pub(crate) attention: AttentionRows,
}

/// Rows of attention. They grow as needed; every step overwrites what it uses.
#[derive(Debug, Default)]
pub(crate) struct AttentionRows {
    pub(crate) q: Vec<f32>,
    pub(crate) k: Vec<f32>,
    pub(crate) v: Vec<f32>,
    pub(crate) attended: Vec<f32>,
    /// For each input.
    pub(crate) packed: Vec<PackedKeys>,
}

impl Linear<'_> {
    /// `out` `[M, N]` of `x` `[M, K]`.
    pub(crate) fn forward(
        &self,
        x: &[f32],
        out: &mut Vec<f32>,
        w: &mut LinearWorkspace,
    ) -> Result<()> {
        let Shape { size_k, size_n } = self.shape();
        resize(out, x.len() / size_k * size_n);
        match self {
            Self::Packed(linear) => {
                let (x, out) = (rows(x, size_k), rows_mut(out, size_n));
                linear.forward(x.into(), w, out.into())?;
            }
            Self::Dense(dense) => dense.forward(x, out),
        }
        Ok(())
    }

    /// [`Linear::forward`] of several matrices with the same `x`, which is quantized once.
    pub(crate) fn forward_all<const N: usize>(
        linears: [&Self; N],
        x: &[f32],
        outs: [&mut Vec<f32>; N],
        w: &mut LinearWorkspace,
    ) -> Result<()> {
        let packed = linears.map(|linear| match linear {
            Self::Packed(linear) => Some(&**linear),
            Self::Dense(_) => None,
        });
        if packed.iter().any(Option::is_none) {
            return linears.iter().zip(outs).try_for_each(|(l, out)| l.forward(x, out, w));
        }
        let mut shapes = linears.iter().map(|linear| linear.shape());
        let outs = outs.map(|out| {
            let shape = shapes.next().expect("a shape for each output");
            resize(out, x.len() / shape.size_k * shape.size_n);
            &mut out[..]
        });
        Ok(forward_all(packed.map(|linear| linear.expect("all are packed")), x, w, outs)?)
    }

    fn shape(&self) -> Shape {
        match self {
            Self::Packed(linear) => linear.shape(),
            Self::Dense(dense) => Shape::new(dense.size_k(), dense.size_n()),
        }
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
        let outs = [&mut gate, &mut up];
        Linear::forward_all([&self.gate, &self.up], x, outs, &mut w.linear)?;
        silu_and_mul(&mut gate, &up);
        self.down.forward(&gate, out, &mut w.linear)
    }
}

/// Router and experts of a layer.
#[derive(Debug)]
pub(crate) struct Experts<'f> {
    router: Dense<'f>,
    routing: MoeRouting,
    stack: Box<dyn ExpertStack + 'f>,
    /// The MLP that every token uses.
    shared: Option<Mlp<'f>>,
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
        let (prefix, names) = (format!("model.layers.{i}.mlp"), PROJECTIONS);
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
        let router = router(weights, config, &block)?;
        let num_experts = router.size_n();
        let interleaved = config.architecture.router_bias;
        let routing = MoeRouting::read(weights.model(), &module, num_experts, interleaved)?;
        if let Some(name) = &routing.rule.correction_bias {
            weights.mark(format!("{block}.{name}"));
        }
        let refused =
            |expected: &str| Err(GenerateError::config("model_type", routing.summary(), expected));
        if routing.rule.apply_router_weight_on_input {
            return refused("weights on the output");
        }
        let is_silu = routing.activation == Definition::new(Activation::Silu);
        let stack: Box<dyn ExpertStack + 'f> = if weights.has_blocks(&module) {
            let sizes = (num_experts, hidden, config.intermediate_size);
            Box::new(StoredExperts::load(weights, &module, sizes, routing.activation)?)
        } else if let Some(layer) = weights.experts(&module)? {
            let found = [layer.num_experts(), layer.hidden_size()];
            if found != [num_experts, hidden] {
                let expected = format!("{num_experts} experts of hidden size {hidden}");
                return Err(marlinspike::Error::shape(module, &found, expected).into());
            }
            // Packing made halves of alternating columns.
            let stated = Definition { columns: Columns::Halves, ..routing.activation };
            if GatedActivation::of_family(stated)? != layer.activation() {
                let expected = format!("{:?}, as the packed experts have it", layer.activation());
                return refused(&expected);
            }
            Box::new(layer)
        } else if !is_silu {
            return refused("SiLU, or experts stored in blocks");
        } else {
            Box::new(MlpExperts::load(weights, config, &module, num_experts)?)
        };
        let shared = config.shared_size.map(|width| {
            let (prefix, names) = (format!("{block}.shared_experts"), PROJECTIONS);
            Mlp::load(weights, (&prefix, names), (hidden, width))
        });
        Ok(Self { router, routing, stack, shared: shared.transpose()? })
    }

    fn forward(&self, x: &[f32], out: &mut Vec<f32>, w: &mut Workspaces) -> Result<()> {
        let (hidden, num_experts) = (self.router.size_k(), self.router.size_n());
        let mut logits = vec![0.0; x.len() / hidden * num_experts];
        self.router.forward(x, &mut logits);
        let routing = self.route(&logits)?;
        resize(out, x.len());
        self.stack.forward(x, routing.routed()?, out, w)?;
        if let Some(shared) = &self.shared {
            let mut own = Vec::new();
            shared.forward(x, &mut own, w)?;
            add(out, &own);
        }
        Ok(())
    }

    /// Routes every row, on rayon's current pool. A row's choice depends on its logits alone.
    fn route(&self, logits: &[f32]) -> Result<Routing> {
        let num_experts = self.router.size_n();
        let parts: Vec<_> = logits
            .par_chunks(ROUTED_ROWS * num_experts)
            .map(|rows| self.routing.route(rows, num_experts))
            .collect::<marlinspike::Result<_>>()?;
        let top_k = self.routing.rule.top_k;
        let weights = parts.iter().flat_map(|p| p.topk_weights.iter().copied()).collect();
        let ids = parts.iter().flat_map(|p| p.topk_ids.iter().copied()).collect();
        Ok(Routing::from_rows(top_k, weights, ids)?)
    }
}

/// The router of `block`; the rows of its weight are the experts.
fn router<'f>(weights: &Weights<'_, 'f>, config: &Config, block: &str) -> Result<Dense<'f>> {
    let (model, hidden) = (weights.model(), config.hidden_size);
    let module = format!("{block}.{}", config.architecture.router);
    let name = format!("{module}.weight");
    let num_experts = match model.entry(&name) {
        Some(entry) if entry.shape().len() == 2 => entry.shape()[0],
        Some(entry) => {
            let expected = format!("[experts, {hidden}]");
            return Err(marlinspike::Error::shape(name, entry.shape(), expected).into());
        }
        None => {
            let dir = model.dir.clone();
            return Err(GenerateError::MissingTensor { name, dir });
        }
    };
    let router = weights.dense(&name, num_experts, hidden)?;
    if !config.architecture.router_bias {
        return Ok(router);
    }
    let name = format!("{module}.bias");
    let bias = weights.vector(&name, num_experts)?;
    Ok(router.with_bias(&name, bias)?)
}
