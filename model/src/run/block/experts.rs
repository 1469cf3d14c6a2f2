//! Routed experts that are not quantized: computed stage by stage, and judged by the derived bound.

use marlinspike::moe::block::{Capped, Mlp, Near, Sum};
use marlinspike::moe::families::BlockTensors;
use marlinspike::moe::layer::Routed;
use marlinspike::ndarray::{Array2, ArrayView2};
use marlinspike::num::scalar::ScalarType;
use marlinspike::num::tensor::Tensor;
use marlinspike::{Error, Result};
use rayon::prelude::*;

use super::dense::{Dense, compensated, round, values};
use super::stages::Stages;
use super::tail::activate_row;

/// Stacks of the routed experts.
#[derive(Debug)]
pub(super) struct Experts {
    /// `[E, N of w13, H]` and `[E, H, I]`.
    matrices: [Tensor<'static>; 2],
    biases: [Option<Vec<f32>>; 2],
    pub(super) count: usize,
    pub(super) hidden: usize,
    pub(super) inner: usize,
    pub(super) activation: Capped,
    /// Stages after each expert.
    pub(super) after: Stages,
    weight_on_input: bool,
}

/// One expert's matrices and biases.
struct Expert {
    w13: Dense,
    w2: Dense,
    biases: [Option<Vec<f32>>; 2],
}

impl Experts {
    pub(super) fn new(
        tensors: BlockTensors,
        activation: Capped,
        after: Stages,
        weight_on_input: bool,
    ) -> Result<Self> {
        let [count, hidden, inner] = tensors.w2.dims3()?;
        let width = activation.definition.width_in(inner);
        tensors.w13.expect_shape(&[count, width, hidden])?;
        let bias = |t: Option<Tensor<'_>>, n: usize| -> Result<Option<Vec<f32>>> {
            let Some(t) = t else { return Ok(None) };
            t.expect_shape(&[count, n])?;
            values(&t).map(Some)
        };
        let biases = [bias(tensors.w13_bias, width)?, bias(tensors.w2_bias, hidden)?];
        let matrices = [tensors.w13, tensors.w2];
        Ok(Self { matrices, biases, count, hidden, inner, activation, after, weight_on_input })
    }

    fn expert(&self, e: usize) -> Result<Expert> {
        let [w13, w2] = &self.matrices;
        let bias = |b: &Option<Vec<f32>>| {
            b.as_ref().map(|b| b[e * b.len() / self.count..(e + 1) * b.len() / self.count].to_vec())
        };
        Ok(Expert {
            w13: Dense::new(&w13.index0(e)?, self.hidden)?,
            w2: Dense::new(&w2.index0(e)?, self.inner)?,
            biases: [bias(&self.biases[0]), bias(&self.biases[1])],
        })
    }

    /// The sum over the routed experts, every stage rounded to `ty`. An id from E on is a zero
    /// expert, whose output is its input.
    pub(super) fn forward(
        &self,
        x: &[f32],
        routed: Routed<'_>,
        ty: ScalarType,
    ) -> Result<Vec<f32>> {
        let (ids, weights) = (routed.ids(), routed.weights());
        let top_k = routed.topk_ids().ncols();
        let input = |slot: usize| -> Vec<f32> {
            let x = &x[slot / top_k * self.hidden..][..self.hidden];
            let weight = f64::from(round(ty, weights[slot].into()));
            match self.weight_on_input {
                true => x.iter().map(|&x| round(ty, f64::from(x) * weight)).collect(),
                false => x.to_vec(),
            }
        };
        let one = |e: usize| -> Result<Vec<(usize, Vec<f32>)>> {
            let slots: Vec<usize> =
                (0..ids.len()).filter(|&s| usize::try_from(ids[s]) == Ok(e)).collect();
            if slots.is_empty() {
                return Ok(Vec::new());
            }
            let expert = self.expert(e)?;
            Ok(slots
                .into_iter()
                .map(|s| (s, expert.forward(&input(s), &self.activation, ty)))
                .map(|(s, output)| (s, self.after.row(output, ty, compensated)))
                .collect())
        };
        let made = (0..self.count).into_par_iter().map(one).collect::<Result<Vec<_>>>()?;
        let mut outputs: Vec<Option<Vec<f32>>> = vec![None; ids.len()];
        for (slot, output) in made.into_iter().flatten() {
            outputs[slot] = Some(output);
        }
        let mut y = vec![0.0f64; x.len()];
        for (slot, output) in outputs.into_iter().enumerate() {
            let output = output.unwrap_or_else(|| input(slot));
            let weight = match self.weight_on_input {
                true => 1.0,
                false => f64::from(round(ty, weights[slot].into())),
            };
            for (h, value) in output.into_iter().enumerate() {
                y[slot / top_k * self.hidden + h] +=
                    f64::from(round(ty, f64::from(value) * weight));
            }
        }
        Ok(y.into_iter().map(|y| round(ty, y)).collect())
    }

    /// The exact sum, with the largest error of an implementation whose stages have type `ty`.
    pub(super) fn near(
        &self,
        x: &[Near],
        routed: Routed<'_>,
        ty: ScalarType,
    ) -> Result<Array2<Near>> {
        let x = ArrayView2::from_shape((x.len() / self.hidden, self.hidden), x)
            .map_err(|_| Error::shape("x", &[x.len()], "[M, H]"))?;
        let experts = (0..self.count).map(|e| self.expert(e)).collect::<Result<Vec<_>>>()?;
        let after = |output| self.after.near(output, ty);
        Ok(self.sum(ty).run(x, routed, |e| experts[e].mlp(), after))
    }

    /// The rule of the sum over a token's experts.
    pub(super) fn sum(&self, ty: ScalarType) -> Sum<'_> {
        let activation = &self.activation;
        Sum { activation, weight_on_input: self.weight_on_input, num_experts: self.count, ty }
    }
}

fn widened(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&v| v.into()).collect()
}

/// A matrix in f64.
pub(super) fn matrix(dense: &Dense) -> Array2<f64> {
    Array2::from_shape_fn((dense.size_n(), dense.size_k), |(n, k)| {
        dense.values[n * dense.size_k + k].into()
    })
}

impl Expert {
    fn forward(&self, x: &[f32], activation: &Capped, ty: ScalarType) -> Vec<f32> {
        let add = |mut y: Vec<f32>, bias: &Option<Vec<f32>>| {
            for (y, b) in y.iter_mut().zip(bias.iter().flatten()) {
                *y = round(ty, f64::from(*y) + f64::from(*b));
            }
            y
        };
        let gate_up = add(self.w13.row(x, ty, compensated), &self.biases[0]);
        let activated = activate_row(activation, &gate_up, ty);
        add(self.w2.row(&activated, ty, compensated), &self.biases[1])
    }

    fn mlp(&self) -> Mlp {
        let [w13_bias, w2_bias] = [0, 1].map(|i| self.biases[i].as_deref().map(widened));
        Mlp { w13: matrix(&self.w13), w2: matrix(&self.w2), w13_bias, w2_bias }
    }
}
