//! The block with its tensors, and its known mistakes.

use ndarray::{Array2, ArrayView2};

use super::floats;
use crate::Result;
use crate::moe::activation::{Activation, Columns, Definition};
use crate::moe::block::{Block, Capped, Mlp, Near, Shared, Stage, Sum, apply_stages};
use crate::moe::layer::Routed;
use crate::num::scalar::ScalarType;
use crate::num::tensor::Tensor;
use crate::ops::schema::Inputs;

/// A block with its tensors and routing, or a known mistake of it.
#[derive(Clone)]
pub(super) struct Layer<'c> {
    pub(super) inputs: &'c Inputs<'c>,
    pub(super) block: Block,
    /// Weights `[M, S]` of the shared experts, if the router gives them.
    pub(super) shared_weights: Vec<Near>,
    pub(super) ty: ScalarType,
    pub(super) x: ArrayView2<'c, f64>,
    pub(super) activation: Capped,
    pub(super) shared_activation: Capped,
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
        let (h, i) = (self.block.experts_hidden_size(), self.block.intermediate_size);
        let width = self.activation.definition.width_in(i);
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
            num_experts: self.block.num_experts,
            ty: self.ty,
        }
    }

    pub(super) fn y_experts(&self) -> Result<Array2<Near>> {
        let routed = Routed::from_rows(self.top_k, self.ids, &self.weights)?;
        let x = self.x.rows().into_iter().flat_map(|row| {
            let row = row.iter().map(|&x| Near::point(x)).collect();
            self.staged(&self.block.expert_input, row)
        });
        let shape = (self.x.nrows(), self.block.experts_hidden_size());
        let x = Array2::from_shape_vec(shape, x.collect()).expect("a row for each token");
        let after = |output| self.staged(&self.block.expert_output, output);
        Ok(self.sum().run(x.view(), routed, |e| self.mlp(e), after))
    }

    fn staged(&self, stages: &[Stage], x: Vec<Near>) -> Vec<Near> {
        let get = |name: &str| self.inputs.get(name).and_then(|t| floats(t).ok());
        apply_stages(stages, x, &get, self.ty)
    }

    /// The shared expert, or those whose weights the router gives.
    fn shared(&self) -> Vec<Shared> {
        let (h, s) = (self.block.hidden_size, self.block.shared_intermediate_size);
        let width = self.shared_activation.definition.width_in(s);
        let one = |j: usize| Shared {
            mlp: Mlp {
                w13: self.matrix("shared_w13", j, width, h),
                w2: self.matrix("shared_w2", j, h, s),
                w13_bias: None,
                w2_bias: None,
            },
            gate: (self.shared_gate && self.inputs.contains_key("shared_gate"))
                .then(|| self.matrix("shared_gate", 0, 1, h)),
        };
        let count = (self.shared_weights.len() / self.x.nrows().max(1)).max(1);
        if s > 0 && self.shared { (0..count).map(one).collect() } else { Vec::new() }
    }

    pub(super) fn y(&self) -> Result<Array2<Near>> {
        let routed = self.y_experts()?;
        let shared = self.shared();
        let bias = self.part("output_bias", 0, self.block.hidden_size).filter(|_| self.output_bias);
        let mut y = Vec::with_capacity(self.x.len());
        for (t, (row, x)) in routed.rows().into_iter().zip(self.x.rows()).enumerate() {
            let x: Vec<f64> = x.to_vec();
            let row = self.staged(&self.block.routed_output, row.to_vec());
            let added = shared.iter().enumerate().map(|(j, s)| {
                let weight = self.shared_weights.get(t * shared.len() + j).copied();
                s.apply(&x, &self.shared_activation, weight, self.ty)
            });
            let added: Vec<Vec<Near>> = added.collect();
            let whole = row.into_iter().enumerate().map(|(h, y)| {
                let mut parts = vec![y];
                parts.extend(added.iter().map(|added| added[h]));
                parts.extend(bias.as_ref().map(|bias| Near::point(bias[h])));
                let y = if parts.len() > 1 { self.sum().total(&parts) } else { y };
                if self.averaged && !added.is_empty() { y.halved() } else { y }
            });
            y.extend(self.staged(&self.block.output, whole.collect()));
        }
        Ok(Array2::from_shape_vec(self.x.dim(), y).expect("a row for each token"))
    }

    /// Known mistakes of the stages around the experts.
    fn stage_mistakes(&self) -> Vec<(&'static str, &'static str, Self)> {
        let mut all = Vec::new();
        let mut add = |id, text, change: &dyn Fn(&mut Self)| {
            let mut changed = self.clone();
            change(&mut changed);
            all.push((id, text, changed));
        };
        let norms = |stages: &[Stage]| stages.iter().any(Stage::is_norm);
        if norms(&self.block.expert_input) {
            let text = "the experts' input was not normalized";
            add("input-norm-left-out", text, &|l| l.block.expert_input.retain(|s| !s.is_norm()));
        }
        if norms(&self.block.expert_output) {
            let text = "the experts' outputs were not normalized";
            add("expert-norm-left-out", text, &|l| l.block.expert_output.retain(|s| !s.is_norm()));
        }
        if norms(&self.block.output) {
            let text = "the output was not normalized";
            add("output-norm-left-out", text, &|l| l.block.output.retain(|s| !s.is_norm()));
        }
        if self.activation.gate.is_some() || self.activation.up.is_some() {
            add("softcap-left-out", "gate and up were not capped", &|l| {
                (l.activation.gate, l.activation.up) = (None, None);
            });
        }
        if !self.shared_weights.is_empty() {
            let text = "the shared experts were added without the router's weights";
            add("shared-weights-left-out", text, &|l| l.shared_weights.fill(Near::point(1.0)));
        }
        all
    }

    /// Known mistakes: an id, what happened, and the layer with it.
    pub(super) fn mistakes(&self) -> Vec<(&'static str, &'static str, Self)> {
        let mut all = self.stage_mistakes();
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
        if self.activation.definition.is_gated() {
            add("gate-up-swapped", "gate and up are exchanged", &|l| {
                let d = &mut l.activation.definition;
                d.exchanged = !d.exchanged;
            });
            let (id, text, columns) = match self.activation.definition.columns {
                Columns::Halves => {
                    let text = "rows of gate and up were read as alternating";
                    ("gate-up-interleaved", text, Columns::Interleaved)
                }
                _ => {
                    let text = "rows of gate and up were read in halves";
                    ("gate-up-in-halves", text, Columns::Halves)
                }
            };
            add(id, text, &|l| l.activation.definition.columns = columns);
            let text = "the router weight multiplies the other side of the experts";
            add("router-weight-on-the-other-side", text, &|l| {
                l.weight_on_input = !l.weight_on_input
            });
        }
        let d = self.activation.definition;
        if d.gate_limit.or(d.value_limit).or(d.up_limit).is_some() {
            add("limit-left-out", "the activation's limits were not applied", &|l| {
                let d = &mut l.activation.definition;
                (d.gate_limit, d.value_limit, d.up_limit) = (None, None, None);
            });
        }
        if d.up_shift != 0.0 {
            add("plain-silu", "plain SiLU was computed instead of the model's activation", &|l| {
                let columns = l.activation.definition.columns;
                let plain = Definition { columns, ..Definition::new(Activation::Silu) };
                l.activation = Capped::none(plain);
            });
        }
        if self.inputs.contains_key("w13_bias") || self.inputs.contains_key("w2_bias") {
            add("bias-missing", "the experts' biases were not added", &|l| l.biases = false);
        }
        if self.block.shared_intermediate_size > 0 {
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
