//! The whole layer: tokens and their experts in, sums over experts out.
//!
//! | stage | shape | of |
//! | --- | --- | --- |
//! | `gate_up` | `[M·top_k, N of w13]` | x · w13 of the row's expert |
//! | `activated` | `[M·top_k, I]` | the activation |
//! | `down` | `[M·top_k, H]` | `activated` · w2 of the row's expert, times the router weight |
//! | `y` | `[M, H]` | the sum over a token's slots |
//!
//! Row r of the first three is token r / top_k, slot r mod top_k. Rows of experts that are not on
//! this rank are zero. Router weights may multiply `gate_up` instead of `down`.
//!
//! [`Layer::forward`] computes bits under an [`Arithmetic`]; [`bounds`] computes bounds for every
//! kernel of a class.

pub mod bounds;
pub(crate) mod carried;
mod rows;
mod stages;

use std::borrow::Cow;

pub(crate) use self::rows::quantize_rows_by;
pub use self::rows::{Rows, input_global_scale, quantize_rows};
pub use self::stages::{Stages, sum_of_ranks};
use super::activation::Definition;
pub use super::routed::Routed;
use super::{Chain, sum};
use crate::num::array::{FloatView2, HalfArray2};
use crate::num::scalar::ScalarType;
use crate::products::schedule::{Extras, Schedule, Stack};
use crate::weight::Weight;
use crate::{Error, Result};

/// One rank's layer.
#[derive(Debug, Clone, Copy)]
pub struct Layer<'w> {
    /// Gate and up of this rank's experts, `[H, N of w13]` each.
    pub w13: &'w [Weight<'w>],
    /// Down, `[I, H]` each.
    pub w2: &'w [Weight<'w>],
    /// For each expert's w13 and w2 the permutation that sorts its `g_idx`; `None` uses stable
    /// ones.
    pub orders: [Option<&'w [Vec<u32>]>; 2],
    /// Experts of all ranks.
    pub num_experts: usize,
    /// Global to local expert, −1 for experts of other ranks; `None`: all are local.
    pub expert_map: Option<&'w [i32]>,
    /// Activation between the products.
    pub activation: Definition,
    /// Activations and outputs: FLOAT16 or BFLOAT16.
    pub dtype: ScalarType,
    /// 8-bit activations, quantized per row: INT8 or `FLOAT8_E4M3FN`.
    pub input_dtype: Option<ScalarType>,
    /// Whether router weights multiply `gate_up` instead of `down`.
    pub router_weight_on_input: bool,
}

/// The arithmetic of a layer.
#[derive(Debug, Clone, PartialEq)]
pub struct Arithmetic {
    /// Schedule of `gate_up`.
    pub w13: Schedule,
    /// Schedule of `down`.
    pub w2: Schedule,
    /// Chain of the activation and the sum.
    pub chain: Chain,
}

impl Layer<'_> {
    /// H: columns of x and of y.
    pub fn hidden_size(&self) -> usize {
        self.w13.first().map_or(0, |w| w.shape().size_k)
    }

    /// I: columns of `activated`.
    pub fn intermediate_size(&self) -> usize {
        self.w2.first().map_or(0, |w| w.shape().size_k)
    }

    /// Checks that the parts are consistent.
    ///
    /// # Errors
    /// Names the inconsistent part: shapes, number of experts, map or types.
    pub fn validate(&self) -> Result<()> {
        super::half_type(self.dtype)?;
        self.activation.validate()?;
        if self.w13.is_empty() || self.w13.len() != self.w2.len() {
            let found = format!("{} of w13, {} of w2", self.w13.len(), self.w2.len());
            return Err(Error::size("experts", found, "as many of each, 1 or more"));
        }
        let (h, i) = (self.hidden_size(), self.intermediate_size());
        for (weights, shape) in [(self.w13, [h, self.activation.width_in(i)]), (self.w2, [i, h])] {
            for w in weights {
                w.validate()?;
                let found = [w.shape().size_k, w.shape().size_n];
                if found != shape {
                    return Err(Error::shape(&w.name, &found, format!("{shape:?}")));
                }
            }
        }
        match self.expert_map {
            None if self.num_experts != self.w13.len() => {
                Err(Error::size("num_experts", self.num_experts, self.w13.len()))
            }
            Some(map) if map.len() != self.num_experts => {
                Err(Error::shape("expert_map", &[map.len()], format!("[{}]", self.num_experts)))
            }
            _ => Ok(()),
        }
    }

    /// This rank's expert of each row.
    ///
    /// # Errors
    /// [`Error::Value`] for an id that is not below `num_experts` or an invalid map entry;
    /// [`Error::Shape`] unless ids and weights are whole rows of `top_k`.
    pub fn local_experts(&self, routed: Routed<'_>) -> Result<Vec<Option<usize>>> {
        let Routed { top_k, topk_ids, topk_weights } = routed;
        if top_k == 0 || !topk_ids.len().is_multiple_of(top_k) {
            return Err(Error::shape("topk_ids", &[topk_ids.len()], format!("[M, {top_k}]")));
        }
        if topk_weights.len() != topk_ids.len() {
            let expected = format!("[{}, {top_k}]", topk_ids.len() / top_k);
            return Err(Error::shape("topk_weights", &[topk_weights.len()], expected));
        }
        let local = |(row, &id): (usize, &i32)| {
            let at = [row / top_k, row % top_k];
            let Ok(global) = usize::try_from(id) else {
                return match id {
                    -1 => Ok(None),
                    _ => Err(Error::value("topk_ids", &at, id, "an expert, or -1")),
                };
            };
            if global >= self.num_experts {
                let expected = format!("an expert below {}", self.num_experts);
                return Err(Error::value("topk_ids", &at, id, expected));
            }
            let Some(map) = self.expert_map else { return Ok(Some(global)) };
            let Some(&place) = map.get(global) else {
                let expected = format!("[{}]", self.num_experts);
                return Err(Error::shape("expert_map", &[map.len()], expected));
            };
            match usize::try_from(place) {
                Err(_) => Ok(None),
                Ok(e) if e < self.w13.len() => Ok(Some(e)),
                Ok(e) => {
                    let expected = format!("a local expert below {}", self.w13.len());
                    Err(Error::value("expert_map", &[global], e, expected))
                }
            }
        };
        topk_ids.iter().enumerate().map(local).collect()
    }

    /// The canonical arithmetic of this layer: a function of its weights' shape and type alone.
    ///
    /// # Errors
    /// As [`Schedule::canonical`]; [`Error::Size`] without experts.
    pub fn canonical(&self) -> Result<Arithmetic> {
        let input = self.input_dtype.unwrap_or(self.dtype);
        let of = |weights: &[Weight<'_>]| match weights.first() {
            Some(w) => Schedule::canonical(w, self.dtype, input),
            None => Err(Error::size("experts", 0, "1 or more")),
        };
        Ok(Arithmetic { w13: of(self.w13)?, w2: of(self.w2)?, chain: Chain::Canonical })
    }

    /// Computes the layer of `x` `[M, H]`, of `dtype`.
    ///
    /// The results of a row depend only on that row, so they are the same in any batch.
    ///
    /// # Errors
    /// As [`Layer::validate`], [`Layer::local_experts`], [`Schedule::execute_stack`];
    /// [`Error::Shape`] if x and `routed` differ in their rows; [`Error::Dtype`] if x is not of
    /// `dtype`.
    pub fn forward<'x>(
        &self,
        x: impl Into<FloatView2<'x>>,
        routed: Routed<'_>,
        how: &Arithmetic,
    ) -> Result<Stages> {
        self.validate()?;
        let x = self.bits("x", &x.into(), self.hidden_size())?;
        let gate_up = self.gate_up_bits(&x, routed, &how.w13)?;
        let activated = self.activate_bits(&gate_up, how.chain)?;
        let down = self.down_bits(&activated, routed, &how.w2)?;
        let y = self.sum_bits(&down, routed.top_k, how.chain)?;
        Stages::from_bits(self, [gate_up, activated, down, y])
    }

    /// The bits of `x`, which must be of this layer's type and have `cols` columns.
    pub(crate) fn bits<'x>(
        &self,
        name: &str,
        x: &FloatView2<'x>,
        cols: usize,
    ) -> Result<Cow<'x, [u16]>> {
        if x.shape()[1] != cols {
            return Err(Error::shape(name, x.shape(), format!("[{}, {cols}]", x.shape()[0])));
        }
        x.bits_of(name, self.dtype)
    }

    /// `gate_up` `[M·top_k, N of w13]` of `x` `[M, H]`.
    ///
    /// # Errors
    /// As [`Layer::forward`].
    pub fn gate_up<'x>(
        &self,
        x: impl Into<FloatView2<'x>>,
        routed: Routed<'_>,
        schedule: &Schedule,
    ) -> Result<HalfArray2> {
        self.validate()?;
        let x = self.bits("x", &x.into(), self.hidden_size())?;
        let bits = self.gate_up_bits(&x, routed, schedule)?;
        let cols = self.activation.width_in(self.intermediate_size());
        HalfArray2::from_rows("gate_up", self.dtype, cols, bits)
    }

    /// [`Layer::gate_up`] of bits of `dtype`, row-major.
    pub(crate) fn gate_up_bits(
        &self,
        x: &[u16],
        routed: Routed<'_>,
        schedule: &Schedule,
    ) -> Result<Vec<u16>> {
        self.validate()?;
        let experts = self.local_experts(routed)?;
        let (h, top_k) = (self.hidden_size(), routed.top_k);
        let tokens = experts.len() / top_k;
        if x.len() != tokens * h {
            return Err(Error::shape("x", &[x.len()], format!("[{tokens}, {h}]")));
        }
        let router = self.router_weight_on_input.then_some(routed.topk_weights);
        let rows = self.quantized(x, h, self.w13)?.to_slots(h, top_k);
        self.multiply(&rows, 0, &experts, router, schedule)
    }

    /// `activated` `[M·top_k, I]` of `gate_up`.
    ///
    /// # Errors
    /// As [`Definition::apply`].
    pub fn activate<'x>(
        &self,
        gate_up: impl Into<FloatView2<'x>>,
        chain: Chain,
    ) -> Result<HalfArray2> {
        let cols = self.activation.width_in(self.intermediate_size());
        let bits = self.activate_bits(&self.bits("gate_up", &gate_up.into(), cols)?, chain)?;
        HalfArray2::from_rows("activated", self.dtype, self.intermediate_size(), bits)
    }

    /// [`Layer::activate`] of bits of `dtype`, row-major.
    pub(crate) fn activate_bits(&self, gate_up: &[u16], chain: Chain) -> Result<Vec<u16>> {
        self.activation.apply_bits(gate_up, self.dtype, self.intermediate_size(), chain)
    }

    /// `down` `[M·top_k, H]` of `activated`.
    ///
    /// # Errors
    /// As [`Layer::forward`]; [`Error::Shape`] if `activated` and `routed` differ in their rows.
    pub fn down<'x>(
        &self,
        activated: impl Into<FloatView2<'x>>,
        routed: Routed<'_>,
        schedule: &Schedule,
    ) -> Result<HalfArray2> {
        self.validate()?;
        let activated = self.bits("activated", &activated.into(), self.intermediate_size())?;
        let bits = self.down_bits(&activated, routed, schedule)?;
        HalfArray2::from_rows("down", self.dtype, self.hidden_size(), bits)
    }

    /// [`Layer::down`] of bits of `dtype`, row-major.
    pub(crate) fn down_bits(
        &self,
        activated: &[u16],
        routed: Routed<'_>,
        schedule: &Schedule,
    ) -> Result<Vec<u16>> {
        self.validate()?;
        let experts = self.local_experts(routed)?;
        let i = self.intermediate_size();
        if activated.len() != experts.len() * i {
            let expected = format!("[{}, {i}]", experts.len());
            return Err(Error::shape("activated", &[activated.len()], expected));
        }
        let router = (!self.router_weight_on_input).then_some(routed.topk_weights);
        let rows = self.quantized(activated, i, self.w2)?;
        self.multiply(&rows, 1, &experts, router, schedule)
    }

    /// `y` `[M, H]` of `down`, which has `top_k` rows for each token.
    ///
    /// # Errors
    /// As [`sum::sum`].
    pub fn sum<'x>(
        &self,
        down: impl Into<FloatView2<'x>>,
        top_k: usize,
        chain: Chain,
    ) -> Result<HalfArray2> {
        let down = self.bits("down", &down.into(), self.hidden_size())?;
        let bits = self.sum_bits(&down, top_k, chain)?;
        HalfArray2::from_rows("y", self.dtype, self.hidden_size(), bits)
    }

    /// [`Layer::sum`] of bits of `dtype`, row-major.
    pub(crate) fn sum_bits(&self, down: &[u16], top_k: usize, chain: Chain) -> Result<Vec<u16>> {
        sum::sum_bits(down, self.dtype, top_k, self.hidden_size(), chain)
    }

    /// Rows times the experts' w13 (`which` 0) or w2 (1).
    fn multiply(
        &self,
        rows: &Rows,
        which: usize,
        experts: &[Option<usize>],
        router_weights: Option<&[f32]>,
        schedule: &Schedule,
    ) -> Result<Vec<u16>> {
        let extras =
            Extras { activation_scales: rows.scales.as_deref(), router_weights, order: None };
        let weights = [self.w13, self.w2][which];
        let orders = self.orders[which];
        let stack = Stack { weights, expert_of: experts, orders, places: None };
        let bits = schedule.execute_stack_rows(&rows.codes, stack, extras)?;
        Ok(bits.into_iter().map(|b| b as u16).collect())
    }

    /// Quantizes activations `[rows, cols]`, bits of `dtype`, for the product with `weights`.
    ///
    /// # Errors
    /// As [`quantize_rows`].
    pub(crate) fn quantized(&self, x: &[u16], cols: usize, weights: &[Weight<'_>]) -> Result<Rows> {
        quantize_rows(x, self.dtype, self.input_dtype, cols, input_global_scale(weights))
    }
}
