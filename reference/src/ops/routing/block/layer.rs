//! The block with its tensors, and its known mistakes.

use ndarray::{Array2, ArrayView2};

use super::floats;
use crate::Result;
use crate::moe::activation::{Activation, Columns, Definition};
use crate::moe::block::{Mlp, Near, Shared, Sum};
use crate::moe::layer::Routed;
use crate::num::scalar::ScalarType;
use crate::num::tensor::Tensor;
use crate::ops::schema::Inputs;

/// A block with its tensors and routing, or a known mistake of it.
#[derive(Clone)]
pub(super) struct Layer<'c> {
    pub(super) inputs: &'c Inputs<'c>,
    pub(super) size_e: usize,
    pub(super) size_h: usize,
    pub(super) size_i: usize,
    pub(super) size_s: usize,
    pub(super) ty: ScalarType,
    pub(super) x: ArrayView2<'c, f64>,
    pub(super) activation: Definition,
    pub(super) shared_activation: Definition,
    pub(super) weight_on_input: bool,
    pub(super) ids: &'c [i32],
    pub(super) weights: Vec<f32>,
    pub(super) top_k: usize,
    pub(super) shared: bool,
    pub(super) shared_gate: bool,
    pub(super) averaged: bool,
    pub(super) biases: bool,
    pub(super) output_bias: bool,
}

impl Layer<'_> {
    /// The tensor's numbers from `start` on.
    fn part(&self, name: &str, start: usize, len: usize) -> Option<Vec<f64>> {
        let tensor = self.inputs.get(name)?;
        let bytes = tensor.dtype().bytes();
        let raw = tensor.bytes().get(start * bytes..(start + len) * bytes)?;
        let part = Tensor::new(name, tensor.dtype(), vec![len], raw).ok()?;
        floats(&part).ok()
    }

    fn matrix(&self, name: &str, e: usize, n: usize, k: usize) -> Array2<f64> {
        let values = self.part(name, e * n * k, n * k).unwrap_or_else(|| vec![0.0; n * k]);
        Array2::from_shape_vec((n, k), values).expect("the rule fixes the shape")
    }

    fn mlp(&self, e: usize) -> Mlp {
        let (h, i) = (self.size_h, self.size_i);
        let width = self.activation.width_in(i);
        let bias = |name: &str, n: usize| self.part(name, e * n, n).filter(|_| self.biases);
        Mlp {
            w13: self.matrix("w13", e, width, h),
            w2: self.matrix("w2", e, h, i),
            w13_bias: bias("w13_bias", width),
            w2_bias: bias("w2_bias", h),
        }
    }

    fn sum(&self) -> Sum<'_> {
        Sum {
            activation: &self.activation,
            weight_on_input: self.weight_on_input,
            num_experts: self.size_e,
            ty: self.ty,
        }
    }

    pub(super) fn y_experts(&self) -> Result<Array2<Near>> {
        let routed = Routed::from_rows(self.top_k, self.ids, &self.weights)?;
        Ok(self.sum().run(self.x, routed, |e| self.mlp(e)))
    }

    pub(super) fn y(&self) -> Result<Array2<Near>> {
        let mut y = self.y_experts()?;
        let (h, s) = (self.size_h, self.size_s);
        let shared = (s > 0 && self.shared).then(|| Shared {
            mlp: Mlp {
                w13: self.matrix("shared_w13", 0, self.shared_activation.width_in(s), h),
                w2: self.matrix("shared_w2", 0, h, s),
                w13_bias: None,
                w2_bias: None,
            },
            gate: (self.shared_gate && self.inputs.contains_key("shared_gate"))
                .then(|| self.matrix("shared_gate", 0, 1, h)),
        });
        let bias = self.part("output_bias", 0, h).filter(|_| self.output_bias);
        for (mut row, x) in y.rows_mut().into_iter().zip(self.x.rows()) {
            let x: Vec<f64> = x.to_vec();
            let added = shared.as_ref().map(|s| s.apply(&x, &self.shared_activation, self.ty));
            for (h, y) in row.iter_mut().enumerate() {
                let mut parts = vec![*y];
                parts.extend(added.as_ref().map(|added| added[h]));
                parts.extend(bias.as_ref().map(|bias| Near::point(bias[h])));
                if parts.len() > 1 {
                    *y = self.sum().total(&parts);
                }
                if self.averaged && added.is_some() {
                    *y = y.halved();
                }
            }
        }
        Ok(y)
    }

    /// Known mistakes: an id, what happened, and the layer with it.
    pub(super) fn mistakes(&self) -> Vec<(&'static str, &'static str, Self)> {
        let mut all: Vec<(&'static str, &'static str, Self)> = Vec::new();
        let mut add = |id, text, change: &dyn Fn(&mut Self)| {
            let mut changed = self.clone();
            change(&mut changed);
            all.push((id, text, changed));
        };
        add("router-weight-missing", "the experts' outputs were added without weights", &|l| {
            l.weights.fill(1.0);
        });
        add("slot-dropped", "the last expert of each token is missing from the sum", &|l| {
            for token in l.weights.chunks_exact_mut(l.top_k) {
                token[token.len() - 1] = 0.0;
            }
        });
        if self.activation.is_gated() {
            add("gate-up-swapped", "gate and up are exchanged", &|l| {
                l.activation.exchanged = !l.activation.exchanged;
            });
            let (id, text, columns) = match self.activation.columns {
                Columns::Halves => {
                    let text = "rows of gate and up were read as alternating";
                    ("gate-up-interleaved", text, Columns::Interleaved)
                }
                _ => {
                    let text = "rows of gate and up were read in halves";
                    ("gate-up-in-halves", text, Columns::Halves)
                }
            };
            add(id, text, &|l| l.activation.columns = columns);
            let text = "the router weight multiplies the other side of the experts";
            add("router-weight-on-the-other-side", text, &|l| {
                l.weight_on_input = !l.weight_on_input
            });
        }
        let d = self.activation;
        if d.gate_limit.or(d.value_limit).or(d.up_limit).is_some() {
            add("limit-left-out", "the activation's limits were not applied", &|l| {
                (l.activation.gate_limit, l.activation.value_limit) = (None, None);
                l.activation.up_limit = None;
            });
        }
        if d.up_shift != 0.0 {
            add("plain-silu", "plain SiLU was computed instead of the model's activation", &|l| {
                let columns = l.activation.columns;
                l.activation = Definition { columns, ..Definition::new(Activation::Silu) };
            });
        }
        if self.inputs.contains_key("w13_bias") || self.inputs.contains_key("w2_bias") {
            add("bias-missing", "the experts' biases were not added", &|l| l.biases = false);
        }
        if self.size_s > 0 {
            add("shared-expert-left-out", "the shared expert is missing", &|l| l.shared = false);
            if self.averaged {
                let text = "the routed sum and the shared expert were added, not averaged";
                add("shared-expert-added", text, &|l| l.averaged = false);
            }
            if self.inputs.contains_key("shared_gate") {
                let text = "the shared expert was added without its gate";
                add("shared-gate-left-out", text, &|l| l.shared_gate = false);
            }
        }
        if self.inputs.contains_key("output_bias") {
            add("output-bias-left-out", "the block's bias was not added", &|l| {
                l.output_bias = false;
            });
        }
        all
    }
}
