//! The stages of a block, each value with its error.

use ndarray::{Array2, ArrayView2};

use super::near::{FLUSH, Near, U};
use crate::moe::activation::{Definition, Function};
use crate::moe::layer::Routed;
use crate::num::scalar::ScalarType;

/// Largest error of an activation's function in f32, relative to its result: the exponential and a
/// division, each to a few units in the last place.
const FUNCTION: f64 = 24.0 * U;

/// x · Wᵀ + bias, with products and sums in f32 in any order, rounded to `ty`.
fn product(
    x: &[Near],
    weight: ArrayView2<'_, f64>,
    bias: Option<&[f64]>,
    ty: ScalarType,
) -> Vec<Near> {
    // One rounding for each product and each addition.
    let gamma = (x.len() as f64 + 2.0) * U * (1.0 + 1e-3);
    let row = |(n, row): (usize, ndarray::ArrayView1<'_, f64>)| {
        let (mut exact, mut size, mut error) = (0.0, 0.0, 0.0);
        for (x, w) in x.iter().zip(row) {
            exact += x.exact * w;
            size += (x.magnitude() * w).abs();
            error += x.error * w.abs();
        }
        error += gamma * size + x.len() as f64 * FLUSH;
        let sum = Near { exact, error }.rounded(ty);
        match bias {
            Some(bias) => sum.plus(Near::point(bias[n])).rounded(ty),
            None => sum,
        }
    };
    weight.rows().into_iter().enumerate().map(row).collect()
}

/// Router logits of one token: `weight` is `[E, H]`. The result is rounded to `ty`.
pub fn logits(
    x: &[f64],
    weight: ArrayView2<'_, f64>,
    bias: Option<&[f64]>,
    softcap: Option<f32>,
    ty: ScalarType,
) -> Vec<Near> {
    let x: Vec<Near> = x.iter().map(|&x| Near::point(x)).collect();
    let plain = product(&x, weight, bias, ty);
    let Some(cap) = softcap.map(f64::from) else { return plain };
    let capped = |l: Near| {
        // The slope of tanh is at most 1.
        let exact = cap * (l.exact / cap).tanh();
        Near { exact, error: l.error }.within(16.0 * U).rounded(ty)
    };
    plain.into_iter().map(capped).collect()
}

/// The matrices of one expert.
#[derive(Debug, Clone, PartialEq)]
pub struct Mlp {
    /// Gate and up `[2I, H]`, or gate alone `[I, H]`.
    pub w13: Array2<f64>,
    /// Down `[H, I]`.
    pub w2: Array2<f64>,
    /// Bias of w13's product.
    pub w13_bias: Option<Vec<f64>>,
    /// Bias of w2's product.
    pub w2_bias: Option<Vec<f64>>,
}

impl Mlp {
    /// w2 · activation(w13 · x + b13) + b2.
    pub fn apply(&self, x: &[Near], activation: &Definition, ty: ScalarType) -> Vec<Near> {
        let gate_up = product(x, self.w13.view(), self.w13_bias.as_deref(), ty);
        let size_i = self.w2.ncols();
        let activated: Vec<Near> = (0..size_i)
            .map(|i| {
                let [gate, up] = activation.places(i, size_i);
                activate(activation, gate_up[gate], gate_up[up], ty)
            })
            .collect();
        product(&activated, self.w2.view(), self.w2_bias.as_deref(), ty)
    }
}

/// Largest slope of the gate's function.
fn slope(function: Function, gate: Near) -> f64 {
    match function {
        // Of g·σ(αg), for every α.
        Function::Silu => 1.1,
        Function::Gelu | Function::GeluTanh => 1.13,
        Function::Relu2 => 2.0 * gate.magnitude(),
    }
}

fn activate(d: &Definition, gate: Near, up: Near, ty: ScalarType) -> Near {
    let gate = gate.at_most(d.gate_limit);
    let function = Near {
        exact: d.function.exact(gate.exact, f64::from(d.alpha)),
        error: slope(d.function, gate) * gate.error,
    };
    let value = function.within(FUNCTION).rounded(ty).at_most(d.value_limit);
    if !d.is_gated() {
        return value;
    }
    let up = up.at_most(d.up_limit).at_least_minus(d.up_limit);
    let up = match d.up_shift {
        0.0 => up,
        shift => up.plus(Near::point(f64::from(shift))).rounded(ty),
    };
    value.times(up).within(U).rounded(ty)
}

/// The sum over a token's experts.
#[derive(Debug, Clone, Copy)]
pub struct Sum<'a> {
    /// The activation of the experts.
    pub activation: &'a Definition,
    /// Whether a weight multiplies the expert's input instead of its output.
    pub weight_on_input: bool,
    /// E: an id from E on is a zero expert, whose output is its input.
    pub num_experts: usize,
    /// The type of the stages.
    pub ty: ScalarType,
}

impl Sum<'_> {
    /// `y_experts` `[M, H]` of `x` `[M, H]`. `expert` gives the matrices of an id below E; it is
    /// called once for each expert that a token chose.
    pub fn run(
        &self,
        x: ArrayView2<'_, f64>,
        routed: Routed<'_>,
        expert: impl Fn(usize) -> Mlp,
    ) -> Array2<Near> {
        let top_k = routed.topk_ids().ncols();
        let mut outputs: Vec<Vec<Near>> = vec![Vec::new(); routed.ids().len()];
        for e in 0..self.num_experts {
            let slots = (0..outputs.len()).filter(|&s| routed.ids()[s] == e as i32);
            let mut slots = slots.peekable();
            if slots.peek().is_none() {
                continue;
            }
            let mlp = expert(e);
            for s in slots {
                let input = self.input(x, s / top_k, routed.weights()[s]);
                outputs[s] = mlp.apply(&input, self.activation, self.ty);
            }
        }
        for (s, output) in outputs.iter_mut().enumerate().filter(|(_, o)| o.is_empty()) {
            *output = self.input(x, s / top_k, routed.weights()[s]);
        }
        Array2::from_shape_fn(x.dim(), |(t, h)| {
            let slots = t * top_k..(t + 1) * top_k;
            let terms = slots.map(|s| self.weighted(outputs[s][h], routed.weights()[s]));
            self.total(&terms.collect::<Vec<_>>())
        })
    }

    fn input(&self, x: ArrayView2<'_, f64>, token: usize, weight: f32) -> Vec<Near> {
        let weight = Near::point(f64::from(weight)).rounded(self.ty);
        let of = |&x: &f64| match self.weight_on_input {
            true => Near::point(x).times(weight).within(U).rounded(self.ty),
            false => Near::point(x),
        };
        x.row(token).iter().map(of).collect()
    }

    fn weighted(&self, output: Near, weight: f32) -> Near {
        if self.weight_on_input {
            return output;
        }
        let weight = Near::point(f64::from(weight)).rounded(self.ty);
        output.times(weight).within(U).rounded(self.ty)
    }

    /// The sum of terms, each partial sum rounded to the type of the stages, in any order.
    pub fn total(&self, terms: &[Near]) -> Near {
        let size: f64 = terms.iter().map(|t| t.magnitude()).sum();
        let whole = terms.iter().fold(Near::point(0.0), |sum, term| sum.plus(*term));
        // Each rounding is at most that of the sum of the magnitudes.
        let one = Near { exact: size, error: 0.0 }.rounded(self.ty).error;
        Near { exact: whole.exact, error: whole.error + terms.len() as f64 * one * 1.001 }
    }
}

/// The shared expert, whose output is added to the routed sum.
#[derive(Debug, Clone, PartialEq)]
pub struct Shared {
    /// Its matrices.
    pub mlp: Mlp,
    /// Row of the gate `[H]`: the output is multiplied with σ(gate · x).
    pub gate: Option<Array2<f64>>,
}

impl Shared {
    /// The shared expert's part of `y` for one token.
    pub fn apply(&self, x: &[f64], activation: &Definition, ty: ScalarType) -> Vec<Near> {
        let x: Vec<Near> = x.iter().map(|&x| Near::point(x)).collect();
        let out = self.mlp.apply(&x, activation, ty);
        let Some(gate) = &self.gate else { return out };
        let logit = product(&x, gate.view(), None, ty)[0];
        // The slope of σ is at most 1/4.
        let exact = 1.0 / (1.0 + (-logit.exact).exp());
        let factor = Near { exact, error: 0.25 * logit.error }.within(16.0 * U).rounded(ty);
        out.into_iter().map(|o| o.times(factor).within(U).rounded(ty)).collect()
    }
}
