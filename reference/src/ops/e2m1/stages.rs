//! The stages of a layer, and known mistakes as modifications of them.

use super::config::E2m1MoeConfig;
use super::one_nan;
use crate::Result;
use crate::judge::compare::Rows;
use crate::layouts::e2m1::{E2m1Rows, GROUP};
use crate::moe::activation::bound::Bounds;
use crate::moe::activation::{Columns, Definition};
use crate::num::interval::Bound;
use crate::num::scalar::ScalarType;
use crate::ops::case::Case;
use crate::ops::computation::{Computation, Expected, Form, Mistake, known};
use crate::ops::layer_rules::Prescale;
use crate::ops::schema::stored;
use crate::w4a8::Values;
use crate::w4a8::e2m1::{quantize_groups, scalar};

/// The matrices of all experts.
#[derive(Debug, Clone)]
struct Matrices {
    blocks: Vec<u8>,
    scales: Vec<u8>,
    bias: Option<Vec<f32>>,
    size_n: usize,
    size_k: usize,
}

impl Matrices {
    fn new(
        case: &Case<'_>,
        which: &str,
        [size_n, size_k]: [usize; 2],
        biased: bool,
    ) -> Result<Self> {
        let part = |end: &str| case.input(&format!("{which}_{end}"));
        let bias = match biased {
            true => Some(part("bias")?.elements::<f32>().into_owned()),
            false => None,
        };
        let (blocks, scales) = (part("weight")?.bytes(), part("weight_scale")?.bytes());
        Ok(Self { blocks: blocks.to_vec(), scales: scales.to_vec(), bias, size_n, size_k })
    }

    /// The product of rows with expert `e`, of type `ty`.
    fn product(&self, e: usize, x: &Values, ty: ScalarType) -> Result<Values> {
        let (n, k) = (self.size_n, self.size_k);
        let bias = self.bias.as_ref().map(|bias| &bias[e * n..][..n]);
        let weight = E2m1Rows {
            blocks: &self.blocks[e * n * k / 2..][..n * k / 2],
            scales: &self.scales[e * n * k / GROUP..][..n * k / GROUP],
            bias,
        };
        scalar::product(&quantize_groups(x, k)?, weight, ty)
    }
}

/// `mxfp4_int8_moe`.
#[derive(Debug, Clone)]
pub(super) struct Layer {
    config: E2m1MoeConfig,
    x: Values,
    topk_ids: Vec<i32>,
    topk_weights: Vec<f32>,
    w13: Matrices,
    w2: Matrices,
    activation: Definition,
    /// How router weights multiply x, if they do.
    prescale: Prescale,
    /// The stages from which later ones are computed; if absent, those of the definition.
    pub(super) gate_up: Option<Values>,
    pub(super) activated: Option<Values>,
    /// Type of the activations inside the layer.
    inner: ScalarType,
    /// Whether rows are added in the order of the choices, not of the experts.
    by_choice: bool,
}

impl Layer {
    pub(super) fn new(case: &Case<'_>, c: &E2m1MoeConfig) -> Result<Self> {
        let matrices =
            |(which, n, k): (&str, usize, usize)| Matrices::new(case, which, [n, k], c.has_bias);
        let [w13, w2] = c.shapes();
        Ok(Self {
            config: c.clone(),
            x: Values::from_tensor(case.input("x")?)?,
            topk_ids: case.input("topk_ids")?.elements::<i32>().into_owned(),
            topk_weights: case.input("topk_weights")?.elements::<f32>().into_owned(),
            w13: matrices(w13)?,
            w2: matrices(w2)?,
            activation: c.definition(),
            prescale: Prescale::RoundedWeight,
            gate_up: None,
            activated: None,
            inner: c.dtype,
            by_choice: false,
        })
    }

    /// The layer with gate and up in these columns, and this rounding of router weights on x.
    pub(super) fn read_as(mut self, columns: Columns, prescale: Prescale) -> Self {
        self.activation.columns = columns;
        self.prescale = prescale;
        self
    }

    /// A row for each slot by `row`, which has `width` values; zeros for slots without an expert.
    fn by_slot(
        &self,
        width: usize,
        row: impl Fn(usize, usize) -> Result<Vec<f32>>,
    ) -> Result<Vec<f32>> {
        let mut all = Vec::with_capacity(self.config.slots() * width);
        for (slot, &id) in self.topk_ids.iter().enumerate() {
            match usize::try_from(id) {
                Ok(expert) => all.extend(row(slot, expert)?),
                Err(_) => all.extend(std::iter::repeat_n(0.0, width)),
            }
        }
        Ok(all)
    }

    /// The type of x and of every output.
    pub(super) fn dtype(&self) -> ScalarType {
        self.config.dtype
    }

    /// Columns of `activated`.
    pub(super) fn cols(&self) -> usize {
        self.config.intermediate_size
    }

    fn gate_up(&self) -> Result<Vec<f32>> {
        let c = &self.config;
        let (h, i) = (c.hidden_size, c.intermediate_size);
        let x = self.x.to_f32();
        self.by_slot(2 * i, |slot, e| {
            let (row, weight) = (&x[slot / c.top_k * h..][..h], self.topk_weights[slot]);
            let row = match c.rules.router_weight_on_x {
                true => {
                    let weight = self.prescale.weight(weight, c.dtype);
                    row.iter().map(|x| x * weight).collect()
                }
                false => row.to_vec(),
            };
            let row = Values::from_f32(row, c.dtype)?;
            if !c.apply_router_weight_on_input {
                return Ok(self.w13.product(e, &row, self.inner)?.to_f32());
            }
            let product = self.w13.product(e, &row, ScalarType::FLOAT32)?.to_f32();
            let weighted = product.iter().map(|y| y * weight).collect();
            Ok(Values::from_f32(weighted, self.inner)?.to_f32())
        })
    }

    /// `activated` of the rows of `gate_up`.
    fn activate(&self, gate_up: &[f32]) -> Result<Vec<f32>> {
        let i = self.config.intermediate_size;
        self.by_slot(i, |slot, _| {
            let row = &gate_up[slot * 2 * i..][..2 * i];
            let one = |j: usize| {
                let [gate, up] = self.activation.places(j, i);
                self.activation.canonical(row[gate], row[up])
            };
            Ok(Values::from_f32((0..i).map(one).collect(), self.inner)?.to_f32())
        })
    }

    /// The bound of each value of `activated`, and the layer's own values.
    pub(super) fn activated_bounds(&self) -> Result<(Vec<Bound>, Values)> {
        let i = self.config.intermediate_size;
        let gate_up = match &self.gate_up {
            Some(given) => given.to_f32(),
            None => self.gate_up()?,
        };
        let bounds = Bounds::of_type(self.activation, self.config.dtype)?;
        let mut all = Vec::with_capacity(self.config.slots() * i);
        for (slot, &id) in self.topk_ids.iter().enumerate() {
            let row = &gate_up[slot * 2 * i..][..2 * i];
            let of = |j: usize| {
                let pair = self.activation.places(j, i);
                let [gate, up] = pair.map(|at| Bound::exactly(f64::from(row[at])));
                bounds.of_bounds(&gate, &up)
            };
            // A slot without an expert has a row of zeros.
            all.extend((0..i).map(|j| if id < 0 { Bound::exactly(0.0) } else { of(j) }));
        }
        Ok((all, Values::from_f32(self.activate(&gate_up)?, self.config.dtype)?))
    }

    fn stages(&self) -> Result<[Values; 3]> {
        let c = &self.config;
        let (h, i, ty) = (c.hidden_size, c.intermediate_size, self.inner);
        let gate_up = self.gate_up()?;
        let activated = self.activate(&given(&self.gate_up, gate_up.clone()))?;
        let from = given(&self.activated, activated.clone());
        let down = self.by_slot(h, |slot, e| {
            let row = Values::from_f32(from[slot * i..][..i].to_vec(), ty)?;
            Ok(self.w2.product(e, &row, ty)?.to_f32())
        })?;
        let on_input = c.apply_router_weight_on_input || c.rules.router_weight_on_x;
        let mut y = vec![0f32; c.size_m * h];
        for (token, sums) in y.chunks_exact_mut(h).enumerate() {
            let mut slots: Vec<usize> = (token * c.top_k..(token + 1) * c.top_k).collect();
            if !self.by_choice {
                slots.sort_by_key(|&slot| self.topk_ids[slot]);
            }
            for slot in slots.into_iter().filter(|&slot| self.topk_ids[slot] >= 0) {
                let row = &down[slot * h..][..h];
                let weight = if on_input { 1.0 } else { self.topk_weights[slot] };
                sums.iter_mut().zip(row).for_each(|(s, y)| *s += y * weight);
            }
        }
        let of = |values| Values::from_f32(values, c.dtype);
        Ok([of(gate_up)?, of(activated)?, of(y)?])
    }
}

/// The stage of the case, or the layer's own.
fn given(given: &Option<Values>, own: Vec<f32>) -> Vec<f32> {
    given.as_ref().map_or(own, Values::to_f32)
}

impl Computation for Layer {
    fn outputs(&self) -> Result<Vec<Expected>> {
        let c = &self.config;
        let (h, i) = (c.hidden_size, c.intermediate_size);
        let names =
            [("gate_up", c.slots(), 2 * i), ("activated", c.slots(), i), ("y", c.size_m, h)];
        let stages = names.into_iter().zip(self.stages()?);
        let expected = stages.map(|((name, rows, cols), values)| Expected {
            name: name.to_owned(),
            dtype: stored(c.dtype),
            shape: vec![rows, cols],
            elements: one_nan(values.bits(), c.dtype),
            form: Form::lines(Rows::List, [cols, rows], c.dtype.size_bits(), None),
        });
        Ok(expected.collect())
    }

    fn mistakes() -> Vec<Mistake<Self>> {
        known! {
            "gate-up-interleaved", "gate and up were read from alternating columns" =>
                |c| c.activation.columns = Columns::Interleaved;
            "gate-up-exchanged", "gate and up are exchanged" => |c| c.activation.exchanged = true;
            "limit-missing", "gate and up are not limited" => |c| {
                (c.activation.gate_limit, c.activation.up_limit) = (None, None);
            };
            "up-shift-missing", "1 is not added to up" => |c| c.activation.up_shift = 0.0;
            "alpha-missing", "the sigmoid's argument is not multiplied by 1.702" =>
                |c| c.activation.alpha = 1.0;
            "bias-missing", "the biases are left out" =>
                |c| (c.w13.bias, c.w2.bias) = (None, None);
            "nibbles-exchanged", "high and low nibbles are exchanged" => |c| {
                for weight in [&mut c.w13, &mut c.w2] {
                    weight.blocks.iter_mut().for_each(|b| *b = b.rotate_left(4));
                }
            };
            "router-weight-missing", "rows are added without router weights" =>
                |c| c.topk_weights.fill(1.0);
            "inner-not-rounded", "activations inside the layer are not rounded to the type of x" =>
                |c| c.inner = ScalarType::FLOAT32;
            "order-of-choices", "rows are added in the order of the choices, not of the experts" =>
                |c| c.by_choice = true;
        }
    }
}
