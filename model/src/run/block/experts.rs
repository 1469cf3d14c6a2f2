//! Routed experts of a whole block: computed stage by stage, each stage judged by the derived bound.

use marlinspike::moe::block::{Capped, Mlp, Near, Sum};
use marlinspike::moe::families::BlockTensors;
use marlinspike::moe::layer::Routed;
use marlinspike::num::scalar::ScalarType;
use marlinspike::num::tensor::Tensor;
use marlinspike::{Error, Result};
use rayon::prelude::*;

use super::dense::{Dense, matrix, round, values};
use super::quantized::QuantizedExperts;
use super::rows::{ExpertRows, points};
use super::stages::Stages;
use super::tail::{Engine, activate_row};

/// The matrices of the routed experts.
#[derive(Debug)]
enum Store {
    /// `[E, N of w13, H]` and `[E, H, I]`, with biases.
    Dense { matrices: [Tensor<'static>; 2], biases: [Option<Vec<f32>>; 2] },
    /// Codes and scales.
    Quantized(QuantizedExperts),
}

/// The routed experts.
#[derive(Debug)]
pub(super) struct Experts {
    store: Store,
    pub(super) count: usize,
    pub(super) hidden: usize,
    /// I, the largest one of all experts.
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
    pub(super) fn dense(
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
        let store = Store::Dense { matrices: [tensors.w13, tensors.w2], biases };
        Ok(Self { store, count, hidden, inner, activation, after, weight_on_input })
    }

    /// Quantized experts of `hidden` features.
    ///
    /// # Errors
    /// As [`QuantizedExperts::validate`].
    pub(super) fn quantized(
        experts: QuantizedExperts,
        hidden: usize,
        activation: Capped,
        after: Stages,
        weight_on_input: bool,
    ) -> Result<Self> {
        experts.validate(hidden, &activation)?;
        let (count, inner) = (experts.count(), experts.inner());
        let store = Store::Quantized(experts);
        Ok(Self { store, count, hidden, inner, activation, after, weight_on_input })
    }

    /// Whether activations enter every product in 16 or 32 bits.
    pub(super) fn is_weight_only(&self) -> bool {
        match &self.store {
            Store::Dense { .. } => true,
            Store::Quantized(experts) => experts.is_weight_only(),
        }
    }

    /// How activations enter the products, if they are quantized experts'.
    pub(super) fn activations(&self) -> Option<String> {
        match &self.store {
            Store::Dense { .. } => None,
            Store::Quantized(experts) => Some(experts.activations()),
        }
    }

    /// Columns of `gate_up`.
    pub(super) fn width(&self) -> usize {
        self.activation.definition.width_in(self.inner)
    }

    fn expert(&self, e: usize) -> Result<Expert> {
        let Store::Dense { matrices: [w13, w2], biases } = &self.store else {
            return Err(Error::missing(format!("expert {e}"), "a matrix that is not quantized"));
        };
        let bias = |b: &Option<Vec<f32>>| {
            b.as_ref().map(|b| b[e * b.len() / self.count..(e + 1) * b.len() / self.count].to_vec())
        };
        Ok(Expert {
            w13: Dense::new(&w13.index0(e)?, self.hidden)?,
            w2: Dense::new(&w2.index0(e)?, self.inner)?,
            biases: [bias(&biases[0]), bias(&biases[1])],
        })
    }

    fn mlp(&self, e: usize) -> Result<Mlp> {
        match &self.store {
            Store::Dense { .. } => Ok(self.expert(e)?.mlp()),
            Store::Quantized(experts) => Ok(experts.mlp(e)),
        }
    }

    /// The slots of an expert.
    fn slots(routed: Routed<'_>, e: usize) -> Vec<usize> {
        let ids = routed.ids();
        (0..ids.len()).filter(|&s| usize::try_from(ids[s]) == Ok(e)).collect()
    }

    /// Rows of zeros for `slots` slots.
    fn rows_of<T: Clone>(&self, slots: usize, zero: T) -> ExpertRows<T> {
        ExpertRows {
            gate_up: vec![zero.clone(); slots * self.width()],
            activated: vec![zero.clone(); slots * self.inner],
            down: vec![zero.clone(); slots * self.hidden],
            output: vec![zero; slots * self.hidden],
        }
    }

    /// Every stage, rounded to `ty`. An id from E on is a zero expert, whose output is its input.
    pub(super) fn forward(
        &self,
        x: &[f32],
        routed: Routed<'_>,
        ty: ScalarType,
        engine: Engine<'_>,
    ) -> Result<ExpertRows<f32>> {
        let (weights, top_k) = (routed.weights(), routed.topk_ids().ncols());
        let input = |slot: usize| -> Vec<f32> {
            let x = &x[slot / top_k * self.hidden..][..self.hidden];
            let weight = f64::from(round(ty, weights[slot].into()));
            match self.weight_on_input {
                true => x.iter().map(|&x| round(ty, f64::from(x) * weight)).collect(),
                false => x.to_vec(),
            }
        };
        let mut all = self.rows_of(weights.len(), 0.0f32);
        match &self.store {
            Store::Dense { .. } => {
                let one = |e: usize| -> Result<Vec<(usize, ExpertRows<f32>)>> {
                    let slots = Self::slots(routed, e);
                    if slots.is_empty() {
                        return Ok(Vec::new());
                    }
                    let expert = self.expert(e)?;
                    let row = |s| (s, expert.forward(&input(s), &self.activation, ty, engine));
                    Ok(slots.into_iter().map(row).collect())
                };
                let made = (0..self.count).into_par_iter().map(one).collect::<Result<Vec<_>>>()?;
                for (slot, row) in made.into_iter().flatten() {
                    self.put(&mut all, slot, row);
                }
            }
            Store::Quantized(experts) => {
                let inputs: Vec<f32> = (0..weights.len()).flat_map(input).collect();
                let found = experts.forward(&inputs, routed.ids(), &self.activation, ty, engine)?;
                for (slot, row) in found {
                    self.put(&mut all, slot, row);
                }
            }
        }
        for (slot, &id) in routed.ids().iter().enumerate() {
            let at = slot * self.hidden..(slot + 1) * self.hidden;
            let output = match usize::try_from(id).is_ok_and(|id| id < self.count) {
                true => self.after.row(all.down[at.clone()].to_vec(), ty, engine.dot),
                false => input(slot),
            };
            all.output[at].copy_from_slice(&output);
        }
        Ok(all)
    }

    /// Writes an expert's rows of one slot; `output` follows later.
    fn put<T: Copy>(&self, all: &mut ExpertRows<T>, slot: usize, row: ExpertRows<T>) {
        let parts = [
            (&mut all.gate_up, row.gate_up, self.width()),
            (&mut all.activated, row.activated, self.inner),
            (&mut all.down, row.down, self.hidden),
        ];
        for (to, from, width) in parts {
            to[slot * width..][..from.len()].copy_from_slice(&from);
        }
    }

    /// `y_experts` of the experts' outputs, every part and the sum rounded to `ty`.
    pub(super) fn sum_rows(&self, outputs: &[f32], routed: Routed<'_>, ty: ScalarType) -> Vec<f32> {
        let (weights, top_k) = (routed.weights(), routed.topk_ids().ncols());
        let mut y = vec![0.0f64; weights.len() / top_k * self.hidden];
        for (slot, output) in outputs.chunks_exact(self.hidden).enumerate() {
            let weight = match self.weight_on_input {
                true => 1.0,
                false => f64::from(round(ty, weights[slot].into())),
            };
            for (h, value) in output.iter().enumerate() {
                y[slot / top_k * self.hidden + h] +=
                    f64::from(round(ty, f64::from(*value) * weight));
            }
        }
        y.into_iter().map(|y| round(ty, y)).collect()
    }

    /// Every stage with the largest error of an implementation whose stages have type `ty`, each
    /// computed from what `found` has before it; `x` are the experts' inputs.
    pub(super) fn near(
        &self,
        x: &[f32],
        found: &ExpertRows<f32>,
        routed: Routed<'_>,
        ty: ScalarType,
    ) -> Result<ExpertRows<Near>> {
        let (sum, top_k) = (self.sum(ty), routed.topk_ids().ncols());
        let input = |slot: usize| {
            let x = points(&x[slot / top_k * self.hidden..][..self.hidden]);
            sum.input(x.iter(), routed.weights()[slot])
        };
        let one = |e: usize| -> Result<Vec<(usize, ExpertRows<Near>)>> {
            let slots = Self::slots(routed, e);
            if slots.is_empty() {
                return Ok(Vec::new());
            }
            let mlp = self.mlp(e)?;
            let row = |slot: usize| {
                let part =
                    |all: &[f32], width: usize, own: usize| points(&all[slot * width..][..own]);
                let gate_up = part(&found.gate_up, self.width(), mlp.w13.nrows());
                let activated = part(&found.activated, self.inner, mlp.w2.ncols());
                let rows = ExpertRows {
                    gate_up: mlp.gate_up(&input(slot), ty),
                    activated: mlp.activated(&gate_up, &self.activation, None, ty),
                    down: mlp.down(&activated, ty),
                    output: Vec::new(),
                };
                (slot, rows)
            };
            Ok(slots.into_iter().map(row).collect())
        };
        let made = (0..self.count).into_par_iter().map(one).collect::<Result<Vec<_>>>()?;
        let mut all = self.rows_of(routed.ids().len(), Near::point(0.0));
        for (slot, row) in made.into_iter().flatten() {
            self.put(&mut all, slot, row);
        }
        for (slot, &id) in routed.ids().iter().enumerate() {
            let at = slot * self.hidden..(slot + 1) * self.hidden;
            let output = match usize::try_from(id).is_ok_and(|id| id < self.count) {
                true => self.after.near(points(&found.down[at.clone()]), ty),
                false => input(slot),
            };
            all.output[at].copy_from_slice(&output);
        }
        Ok(all)
    }

    /// The exact sum of the experts' outputs, with the largest error of an implementation.
    pub(super) fn near_sum(
        &self,
        outputs: &[f32],
        routed: Routed<'_>,
        ty: ScalarType,
    ) -> Vec<Near> {
        let (sum, top_k) = (self.sum(ty), routed.topk_ids().ncols());
        let value = |(t, h): (usize, usize)| {
            let slots = t * top_k..(t + 1) * top_k;
            let term = |s: usize| {
                let output = Near::point(outputs[s * self.hidden + h].into());
                sum.weighted(output, routed.weights()[s])
            };
            sum.total(&slots.map(term).collect::<Vec<_>>())
        };
        let tokens = routed.ids().len() / top_k;
        (0..tokens).flat_map(|t| (0..self.hidden).map(move |h| (t, h))).map(value).collect()
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

impl Expert {
    /// The stages of one row but `output`.
    fn forward(
        &self,
        x: &[f32],
        activation: &Capped,
        ty: ScalarType,
        engine: Engine<'_>,
    ) -> ExpertRows<f32> {
        let add = |mut y: Vec<f32>, bias: &Option<Vec<f32>>| {
            for (y, b) in y.iter_mut().zip(bias.iter().flatten()) {
                *y = round(ty, f64::from(*y) + f64::from(*b));
            }
            y
        };
        let gate_up = add(self.w13.row(x, ty, engine.dot), &self.biases[0]);
        let activated = activate_row(activation, &gate_up, ty);
        let down = add(self.w2.row(&activated, ty, engine.dot), &self.biases[1]);
        ExpertRows { gate_up, activated, down, output: Vec::new() }
    }

    fn mlp(&self) -> Mlp {
        let [w13_bias, w2_bias] = [0, 1].map(|i| self.biases[i].as_deref().map(widened));
        Mlp { w13: matrix(&self.w13), w2: matrix(&self.w2), w13_bias, w2_bias }
    }
}
