//! From the sum over the routed experts to the block's output: shared experts, their gate or
//! weights, the block's bias, its norm.

use marlinspike::method::Product;
use marlinspike::moe::block::{Block, Capped, Mlp, Shared as SharedNear};
use marlinspike::moe::families::{RoutingRule, SharedRule};
use marlinspike::ndarray::{Array2, Axis, concatenate};
use marlinspike::num::array::HalfArray2;
use marlinspike::num::scalar::ScalarType;
use marlinspike::num::tensor::Tensor;
use marlinspike::{Error, Result};

use super::dense::{Dense, Dot, matrix, round, values};
use super::stages::Stages;
use crate::model::block::BlockParts;

/// The linear layers of a shared expert.
#[derive(Debug)]
pub(crate) enum Linears {
    /// `[2S, H]` and `[H, S]`; several where the router weights each shared expert.
    Dense(Vec<[Dense; 2]>),
    /// Gate, unless the expert has none, and up; down.
    Quantized(Vec<Box<dyn Linear>>, Box<dyn Linear>),
}

/// A quantized linear layer.
pub(crate) trait Linear: std::fmt::Debug + Send + Sync {
    /// The product of rows `x` of type `ty`.
    fn rows(&self, x: &[f32], ty: ScalarType, engine: Engine<'_>) -> Result<Vec<f32>>;

    /// Its matrix `[N, K]` in f64, and its bias; `None` if its activations are quantized.
    fn matrix(&self) -> Option<(Array2<f64>, Option<Vec<f64>>)>;

    /// Its matrix `[N, K]` in f64, and its bias, however its activations are quantized.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a layer of another kind.
    fn dequantized(&self) -> Result<(Array2<f64>, Option<Vec<f64>>)>;
}

/// A shared expert.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) linears: Linears,
    pub(crate) activation: Capped,
    /// Row of the gate: the output is multiplied with σ(gate · x).
    pub(crate) gate: Option<Dense>,
}

/// What follows the sum over the routed experts.
#[derive(Debug, Default)]
pub struct Tail {
    pub(crate) shared: Option<Shared>,
    pub(crate) output_bias: Option<Vec<f32>>,
    /// Whether the output is the mean of the routed sum and the shared expert's output.
    pub(crate) is_averaged: bool,
    /// The last stages of the block.
    pub(crate) stages: Stages,
}

/// How products are computed.
#[derive(Clone, Copy)]
pub(crate) struct Engine<'e> {
    pub(crate) dot: Dot,
    pub(crate) multiply: &'e (dyn Fn(&Product<'_>) -> Result<HalfArray2> + Sync),
}

/// The activations of a block's routed experts and of its shared expert.
///
/// # Errors
/// As [`Block::activation`].
pub(crate) fn activations(parts: &BlockParts, routing: &RoutingRule) -> Result<[Capped; 2]> {
    let mut block = Block::new(1, 1, 1);
    block.interleaved = parts.rule.interleaved;
    block.gate_softcap = parts.numbers.gate_softcap;
    block.up_softcap = parts.numbers.up_softcap;
    match parts.rule.shared {
        SharedRule::Plain => block.shared_is_plain = true,
        SharedRule::Step(limit) => block.shared_swiglustep_limit = limit,
        _ => {}
    }
    Ok([block.activation(routing)?, block.shared_activation(routing)?])
}

/// One column of an activation, every stage rounded to `ty`.
pub(crate) fn activate(capped: &Capped, [gate, up]: [f32; 2], ty: ScalarType) -> f32 {
    let d = &capped.definition;
    let at_most = |x: f32, limit: Option<f32>| limit.map_or(x, |l| x.min(l));
    let cap = |x: f64, c: f32| f64::from(c) * (x / f64::from(c)).tanh();
    let gate = f64::from(at_most(gate, d.gate_limit));
    let value = match capped.gate {
        // The sigmoid sees the gate without its cap.
        Some(c) => cap(gate, c) / (1.0 + (-gate).exp()),
        None => d.function.exact(gate, d.alpha.into()),
    };
    let value = at_most(round(ty, value), d.value_limit);
    if !d.is_gated() {
        return value;
    }
    let up = capped.up.map_or(up, |c| round(ty, cap(up.into(), c)));
    let mut up = d.up_limit.map_or(up, |l| up.clamp(-l, l));
    if d.up_shift != 0.0 {
        up = round(ty, f64::from(up) + f64::from(d.up_shift));
    }
    round(ty, f64::from(value) * f64::from(up))
}

/// A row of `gate_up` to one of `activated`.
pub(crate) fn activate_row(capped: &Capped, gate_up: &[f32], ty: ScalarType) -> Vec<f32> {
    let d = &capped.definition;
    let size_i = gate_up.len() / d.width_in(1);
    let column = |i| activate(capped, d.places(i, size_i).map(|at| gate_up[at]), ty);
    (0..size_i).map(column).collect()
}

impl Shared {
    /// The experts as the bound takes them; `None` if their activations are quantized.
    pub(crate) fn nears(&self) -> Option<Vec<SharedNear>> {
        let gate = || self.gate.as_ref().map(matrix);
        let near = |mlp: Mlp| SharedNear { mlp, gate: gate() };
        match &self.linears {
            Linears::Dense(experts) => {
                let one = |[w13, w2]: &[Dense; 2]| {
                    let (w13, w2) = (matrix(w13), matrix(w2));
                    near(Mlp { w13, w2, w13_bias: None, w2_bias: None })
                };
                Some(experts.iter().map(one).collect())
            }
            Linears::Quantized(first, down) => {
                let parts = first.iter().map(|l| l.matrix()).collect::<Option<Vec<_>>>()?;
                let (w2, w2_bias) = down.matrix()?;
                let views: Vec<_> = parts.iter().map(|(w, _)| w.view()).collect();
                let w13 = concatenate(Axis(0), &views).ok()?;
                let biases = parts.iter().flat_map(|(w, b)| match b {
                    Some(b) => b.clone(),
                    None => vec![0.0; w.nrows()],
                });
                let biases: Vec<f64> = biases.collect();
                let w13_bias = parts.iter().any(|(_, b)| b.is_some()).then_some(biases);
                Some(vec![near(Mlp { w13, w2, w13_bias, w2_bias })])
            }
        }
    }
}

/// Shared experts with weights of the router, or 1.
fn weighted(routing: &RoutingRule) -> usize {
    routing.shared_experts.max(1)
}

/// A rank's part of what follows the sum over the routed experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RankPart {
    /// The rank and the ranks that cut the shared expert's inner features.
    pub(crate) tp: [usize; 2],
    /// Whether this rank adds its part of the shared expert: with ranks that have tokens of their own,
    /// one of them does.
    pub(crate) adds_shared: bool,
    /// Whether this rank adds the block's bias.
    pub(crate) adds_bias: bool,
}

impl Tail {
    /// A rank's part: its features of a shared expert whose matrices are whole (quantized ones are
    /// cut in the files), so that the outputs of all ranks add up to what precedes the block's norm.
    ///
    /// # Errors
    /// [`Error::Size`] if the ranks do not divide the shared expert's features.
    pub(crate) fn of_rank(self, part: RankPart) -> Result<Self> {
        let cut = |mut shared: Shared| -> Result<Shared> {
            if let Linears::Dense(experts) = &mut shared.linears {
                let halves = shared.activation.definition.width_in(1);
                for [w13, w2] in experts {
                    *w13 = w13.rows_of_rank(halves, part.tp)?;
                    *w2 = w2.columns_of_rank(part.tp)?;
                }
            }
            Ok(shared)
        };
        let shared = self.shared.filter(|_| part.adds_shared).map(cut).transpose()?;
        let output_bias = self.output_bias.filter(|_| part.adds_bias);
        Ok(Self { shared, output_bias, is_averaged: self.is_averaged, stages: Stages::default() })
    }

    /// The tail of a block with `hidden` features; `stages` are its last ones. `load` gives a quantized linear layer.
    ///
    /// # Errors
    /// For tensors that do not fit, by name, and as `load`.
    pub(crate) fn new<E: From<Error>>(
        parts: &BlockParts,
        stages: Stages,
        routing: &RoutingRule,
        hidden: usize,
        load: impl Fn(&str) -> std::result::Result<Box<dyn Linear>, E>,
    ) -> std::result::Result<Self, E> {
        let tensors = &parts.tensors;
        let [_, activation] = activations(parts, routing)?;
        let linears = match (&parts.shared_modules, &tensors.shared) {
            (Some([gate, up, down]), _) => {
                if weighted(routing) > 1 {
                    let what = format!("{up}: {} shared experts", weighted(routing));
                    let reason = "one quantized module cannot have a weight for each of them";
                    return Err(Error::unsupported(what, reason).into());
                }
                let first: &[&String] = if parts.rule.gated { &[gate, up] } else { &[up] };
                let first =
                    first.iter().map(|name| load(name)).collect::<std::result::Result<_, E>>()?;
                Some(Linears::Quantized(first, load(down)?))
            }
            (None, Some([w13, w2])) => {
                let (size_s, count) = (*w2.shape().last().unwrap_or(&0), weighted(routing));
                let width = activation.definition.width_in(size_s);
                w13.expect_shape(&[count * width, hidden])?;
                w2.expect_shape(&[count * hidden, size_s])?;
                let w13 = Dense::new(w13, hidden)?.parts(count);
                let w2 = Dense::new(w2, size_s)?.parts(count);
                Some(Linears::Dense(w13.into_iter().zip(w2).map(|(a, b)| [a, b]).collect()))
            }
            (None, None) => None,
        };
        let gate = |t: &Tensor<'_>| -> Result<Dense> {
            t.expect_shape(&[1, hidden])?;
            Dense::new(t, hidden)
        };
        let gate = tensors.shared_gate.as_ref().map(gate).transpose()?;
        let bias = |t: &Tensor<'_>| -> Result<Vec<f32>> {
            t.expect_shape(&[hidden])?;
            values(t)
        };
        let output_bias = tensors.output_bias.as_ref().map(bias).transpose()?;
        let is_averaged = parts.rule.shared == SharedRule::Averaged && linears.is_some();
        let shared = linears.map(|linears| Shared { linears, activation, gate });
        Ok(Self { shared, output_bias, is_averaged, stages })
    }

    /// Whether the output is the sum over the routed experts.
    pub(crate) fn is_empty(&self) -> bool {
        self.shared.is_none()
            && self.output_bias.is_none()
            && !self.is_averaged
            && self.stages.is_empty()
    }

    /// The output of the shared experts, if there are any, and the block's. `weights` are the
    /// router's weights `[M, shared experts]`, if it gives them.
    pub(crate) fn apply(
        &self,
        x: &[f32],
        y_experts: &[f32],
        weights: Option<&[f32]>,
        ty: ScalarType,
        engine: Engine<'_>,
    ) -> Result<(Option<Vec<f32>>, Vec<f32>)> {
        let shared = self.shared.as_ref().map(|s| s.forward(x, weights, ty, engine)).transpose()?;
        let columns = self.output_bias.as_ref().map_or(1, Vec::len);
        let value = |(i, y): (usize, &f32)| {
            let mut sum = f64::from(*y);
            if let Some(shared) = &shared {
                sum = round(ty, sum + f64::from(shared[i])).into();
            }
            if let Some(bias) = &self.output_bias {
                sum = round(ty, sum + f64::from(bias[i % columns])).into();
            }
            if self.is_averaged { round(ty, sum / 2.0) } else { sum as f32 }
        };
        let y: Vec<f32> = y_experts.iter().enumerate().map(value).collect();
        let y = if self.stages.is_empty() { y } else { self.stages.rows(&y, ty, engine.dot) };
        Ok((shared, y))
    }
}

impl Shared {
    /// The sum of the shared experts of one token. A weight multiplies the activated features.
    fn row(
        &self,
        experts: &[[Dense; 2]],
        x: &[f32],
        weights: Option<&[f32]>,
        ty: ScalarType,
        dot: Dot,
    ) -> Vec<f32> {
        let one = |(j, [w13, w2]): (usize, &[Dense; 2])| {
            let mut activated = activate_row(&self.activation, &w13.row(x, ty, dot), ty);
            if let Some(weight) = weights.map(|w| f64::from(round(ty, w[j].into()))) {
                activated.iter_mut().for_each(|a| *a = round(ty, f64::from(*a) * weight));
            }
            w2.row(&activated, ty, dot)
        };
        let add = |sum: Vec<f32>, other: Vec<f32>| -> Vec<f32> {
            let pairs = sum.into_iter().zip(other);
            pairs.map(|(a, b)| round(ty, f64::from(a) + f64::from(b))).collect()
        };
        experts.iter().enumerate().map(one).reduce(add).unwrap_or_default()
    }

    /// The shared experts' part of the output.
    fn forward(
        &self,
        x: &[f32],
        weights: Option<&[f32]>,
        ty: ScalarType,
        engine: Engine<'_>,
    ) -> Result<Vec<f32>> {
        let mut out = match &self.linears {
            Linears::Dense(experts) => {
                let (count, hidden) = (experts.len(), experts[0][0].size_k);
                let row = |(t, x): (usize, &[f32])| {
                    let weights = weights.map(|w| &w[t * count..(t + 1) * count]);
                    self.row(experts, x, weights, ty, engine.dot)
                };
                x.chunks_exact(hidden).enumerate().flat_map(row).collect()
            }
            Linears::Quantized(first, down) => {
                let gate_up = first.iter().map(|l| l.rows(x, ty, engine));
                let gate_up = gate_up.collect::<Result<Vec<Vec<f32>>>>()?;
                let columns = |i: usize| [gate_up[0][i], gate_up[gate_up.len() - 1][i]];
                let all = 0..gate_up[0].len();
                let activated = all.map(|i| activate(&self.activation, columns(i), ty));
                let mut activated: Vec<f32> = activated.collect();
                if let Some(weights) = weights {
                    // Several shared experts in one module are refused: a weight for each row.
                    let columns = activated.len() / weights.len().max(1);
                    for (row, weight) in activated.chunks_exact_mut(columns.max(1)).zip(weights) {
                        let weight = f64::from(round(ty, (*weight).into()));
                        row.iter_mut().for_each(|a| *a = round(ty, f64::from(*a) * weight));
                    }
                }
                down.rows(&activated, ty, engine)?
            }
        };
        let Some(gate) = &self.gate else { return Ok(out) };
        let tokens = x.len() / gate.size_k;
        let columns = out.len() / tokens.max(1);
        for (x, out) in x.chunks_exact(gate.size_k).zip(out.chunks_exact_mut(columns.max(1))) {
            let logit = f64::from(gate.row(x, ty, engine.dot)[0]);
            let factor = round(ty, 1.0 / (1.0 + (-logit).exp()));
            for out in out {
                *out = round(ty, f64::from(*out) * f64::from(factor));
            }
        }
        Ok(out)
    }
}
