//! The stages of a block, each value with its error.

use ndarray::{Array2, ArrayView2};

use super::near::{Near, U};
use super::values::{FUNCTION, function, product, softcap};
use crate::moe::activation::Definition;
use crate::moe::layer::Routed;
use crate::num::scalar::ScalarType;

/// What follows the product of the router's weight.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct AfterLogits {
    /// A factor.
    pub multiplier: Option<f32>,
    /// c of c · tanh(l / c).
    pub softcap: Option<f32>,
}

/// Router logits of one token: `weight` is `[E, H]`. The result is rounded to `ty`.
pub fn logits(
    x: &[Near],
    weight: ArrayView2<'_, f64>,
    bias: Option<&[f64]>,
    after: AfterLogits,
    ty: ScalarType,
) -> Vec<Near> {
    let mut all = product(x, weight, bias, ty);
    if let Some(factor) = after.multiplier.map(f64::from) {
        let one = |l: &mut Near| *l = l.times(Near::point(factor)).within(3.0 * U).rounded(ty);
        all.iter_mut().for_each(one);
    }
    if let Some(cap) = after.softcap.map(f64::from) {
        all.iter_mut().for_each(|l| *l = softcap(*l, cap).rounded(ty));
    }
    all
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
    pub fn apply(&self, x: &[Near], activation: &Capped, ty: ScalarType) -> Vec<Near> {
        self.apply_weighted(x, activation, None, ty)
    }

    /// [`Mlp::apply`] with a weight on the activated features.
    pub fn apply_weighted(
        &self,
        x: &[Near],
        activation: &Capped,
        weight: Option<Near>,
        ty: ScalarType,
    ) -> Vec<Near> {
        let gate_up = self.gate_up(x, ty);
        self.down(&self.activated(&gate_up, activation, weight, ty), ty)
    }

    /// w13 · x + b13.
    pub fn gate_up(&self, x: &[Near], ty: ScalarType) -> Vec<Near> {
        product(x, self.w13.view(), self.w13_bias.as_deref(), ty)
    }

    /// The activation of `gate_up`, times `weight` if there is one.
    pub fn activated(
        &self,
        gate_up: &[Near],
        activation: &Capped,
        weight: Option<Near>,
        ty: ScalarType,
    ) -> Vec<Near> {
        let size_i = self.w2.ncols();
        let one = |i| {
            let [gate, up] = activation.definition.places(i, size_i);
            let value = activate(activation, gate_up[gate], gate_up[up], ty);
            weight.map_or(value, |w| value.times(w).within(U).rounded(ty))
        };
        (0..size_i).map(one).collect()
    }

    /// w2 · `activated` + b2.
    pub fn down(&self, activated: &[Near], ty: ScalarType) -> Vec<Near> {
        product(activated, self.w2.view(), self.w2_bias.as_deref(), ty)
    }
}

/// An activation, and soft caps c · tanh(x / c) on the gate as a factor and on up. The sigmoid sees
/// the gate without its cap.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Capped {
    /// The activation; SiLU with a cap on the gate.
    pub definition: Definition,
    /// c of the gate.
    pub gate: Option<f32>,
    /// c of up.
    pub up: Option<f32>,
}

impl Capped {
    /// An activation without soft caps.
    pub const fn none(definition: Definition) -> Self {
        Self { definition, gate: None, up: None }
    }
}

/// cap(g) · σ(g). Its slope is at most that of cap times σ, 1, and that of σ times abs(g), 0.224.
fn capped_silu(gate: Near, cap: f64) -> Near {
    let sigmoid = 1.0 / (1.0 + (-gate.exact).exp());
    let exact = cap * (gate.exact / cap).tanh() * sigmoid;
    Near { exact, error: 1.23 * gate.error }.within(FUNCTION + 18.0 * U)
}

fn activate(capped: &Capped, gate: Near, up: Near, ty: ScalarType) -> Near {
    let d = &capped.definition;
    let gate = gate.at_most(d.gate_limit);
    let value = match capped.gate {
        Some(cap) => capped_silu(gate, f64::from(cap)),
        None => function(d.function, gate, f64::from(d.alpha)),
    };
    let value = value.rounded(ty).at_most(d.value_limit);
    if !d.is_gated() {
        return value;
    }
    let up = capped.up.map_or(up, |cap| softcap(up, f64::from(cap)).rounded(ty));
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
    pub activation: &'a Capped,
    /// Whether a weight multiplies the expert's input instead of its output.
    pub weight_on_input: bool,
    /// E: an id from E on is a zero expert, whose output is its input.
    pub num_experts: usize,
    /// The type of the stages.
    pub ty: ScalarType,
}

impl Sum<'_> {
    /// `y_experts` `[M, H]` of `x` `[M, H]`. `expert` gives the matrices of an id below E; it is
    /// called once for each expert that a token chose. `after` changes an expert's output before
    /// its weight.
    pub fn run(
        &self,
        x: ArrayView2<'_, Near>,
        routed: Routed<'_>,
        expert: impl Fn(usize) -> Mlp,
        after: impl Fn(Vec<Near>) -> Vec<Near>,
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
                let input = self.input(x.row(s / top_k).iter(), routed.weights()[s]);
                outputs[s] = after(mlp.apply(&input, self.activation, self.ty));
            }
        }
        for (s, output) in outputs.iter_mut().enumerate().filter(|(_, o)| o.is_empty()) {
            *output = self.input(x.row(s / top_k).iter(), routed.weights()[s]);
        }
        Array2::from_shape_fn(x.dim(), |(t, h)| {
            let slots = t * top_k..(t + 1) * top_k;
            let terms = slots.map(|s| self.weighted(outputs[s][h], routed.weights()[s]));
            self.total(&terms.collect::<Vec<_>>())
        })
    }

    /// The input of an expert for a token's row `x`.
    pub fn input<'x>(&self, x: impl Iterator<Item = &'x Near>, weight: f32) -> Vec<Near> {
        let weight = Near::point(f64::from(weight)).rounded(self.ty);
        let of = |&x: &Near| match self.weight_on_input {
            true => x.times(weight).within(U).rounded(self.ty),
            false => x,
        };
        x.map(of).collect()
    }

    /// An expert's part of the sum.
    pub fn weighted(&self, output: Near, weight: f32) -> Near {
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
    /// A `weight` multiplies the activated features.
    pub fn apply(
        &self,
        x: &[f64],
        activation: &Capped,
        weight: Option<Near>,
        ty: ScalarType,
    ) -> Vec<Near> {
        let x: Vec<Near> = x.iter().map(|&x| Near::point(x)).collect();
        let out = self.mlp.apply_weighted(&x, activation, weight.map(|w| w.rounded(ty)), ty);
        let Some(gate) = &self.gate else { return out };
        let logit = product(&x, gate.view(), None, ty)[0];
        // The slope of σ is at most 1/4.
        let exact = 1.0 / (1.0 + (-logit.exact).exp());
        let factor = Near { exact, error: 0.25 * logit.error }.within(16.0 * U).rounded(ty);
        out.into_iter().map(|o| o.times(factor).within(U).rounded(ty)).collect()
    }
}
