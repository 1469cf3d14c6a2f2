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

use super::activation::Definition;
use super::{Chain, sum, to_slots, widen};
use crate::num::scalar::ScalarType;
use crate::products::schedule::{Extras, Schedule, Stack};
use crate::quantize::{Int8Rule, clear_broken, per_token_fp8, per_token_int8};
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

/// The routing of the tokens, row-major `[M, top_k]`.
#[derive(Debug, Clone, Copy)]
pub struct Routed<'r> {
    /// Experts per token.
    pub top_k: usize,
    /// Global expert ids; −1 is no expert.
    pub topk_ids: &'r [i32],
    /// Router weights.
    pub topk_weights: &'r [f32],
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

/// The stages of a layer, as bits of its `dtype`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stages {
    /// `[M·top_k, N of w13]`.
    pub gate_up: Vec<u16>,
    /// `[M·top_k, I]`.
    pub activated: Vec<u16>,
    /// `[M·top_k, H]`.
    pub down: Vec<u16>,
    /// `[M, H]`.
    pub y: Vec<u16>,
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

    /// Computes the layer of `x` `[M, H]`, bits of `dtype`.
    ///
    /// The results of a row depend only on that row, so they are the same in any batch.
    ///
    /// # Errors
    /// As [`Layer::validate`], [`Layer::local_experts`], [`Schedule::execute_stack`];
    /// [`Error::Shape`] if x and `routed` differ in their rows.
    pub fn forward(&self, x: &[u16], routed: Routed<'_>, how: &Arithmetic) -> Result<Stages> {
        let gate_up = self.gate_up(x, routed, &how.w13)?;
        let activated = self.activate(&gate_up, how.chain)?;
        let down = self.down(&activated, routed, &how.w2)?;
        let y = self.sum(&down, routed.top_k, how.chain)?;
        Ok(Stages { gate_up, activated, down, y })
    }

    /// `gate_up` `[M·top_k, N of w13]` of `x` `[M, H]`.
    ///
    /// # Errors
    /// As [`Layer::forward`].
    pub fn gate_up(&self, x: &[u16], routed: Routed<'_>, schedule: &Schedule) -> Result<Vec<u16>> {
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
    pub fn activate(&self, gate_up: &[u16], chain: Chain) -> Result<Vec<u16>> {
        self.activation.apply(gate_up, self.dtype, self.intermediate_size(), chain)
    }

    /// `down` `[M·top_k, H]` of `activated`.
    ///
    /// # Errors
    /// As [`Layer::forward`]; [`Error::Shape`] if `activated` and `routed` differ in their rows.
    pub fn down(
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

    /// `y` `[M, H]` of `down`.
    ///
    /// # Errors
    /// As [`sum::sum`].
    pub fn sum(&self, down: &[u16], top_k: usize, chain: Chain) -> Result<Vec<u16>> {
        sum::sum(down, self.dtype, top_k, self.hidden_size(), chain)
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
        let bits = schedule.execute_stack(&rows.codes, stack, extras)?;
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

/// Quantizes activations `[rows, cols]`, bits of `dtype`, for a product; scales of int8 activations
/// are multiplied by `factor`, the [`input_global_scale`] of the matrices.
///
/// A quantized row with an infinity or NaN gets the scale NaN, so all of its products are NaN.
///
/// # Errors
/// As the functions of [`crate::quantize`]; [`Error::Unsupported`] for another `input_dtype`.
pub(crate) fn quantize_rows(
    x: &[u16],
    dtype: ScalarType,
    input_dtype: Option<ScalarType>,
    cols: usize,
    factor: f32,
) -> Result<Rows> {
    let Some(input) = input_dtype else {
        return Ok(Rows { codes: x.iter().map(|&b| b.into()).collect(), scales: None });
    };
    let mut values: Vec<f32> = x.iter().map(|&b| widen(dtype, b)).collect();
    let broken = clear_broken(&mut values, cols);
    let scaled = |scales: Vec<f32>, factor: f32| {
        let mut scales: Vec<f32> = scales.into_iter().map(|s| s * factor).collect();
        broken.iter().for_each(|&row| scales[row] = f32::NAN);
        Some(scales)
    };
    match input {
        ScalarType::INT8 => {
            let quantized = per_token_int8(&values, cols, Int8Rule::Quotient)?;
            Ok(Rows {
                codes: quantized.codes.iter().map(|&c| u32::from(c as u8)).collect(),
                scales: scaled(quantized.scales, factor),
            })
        }
        ScalarType::FLOAT8_E4M3FN => {
            let quantized = per_token_fp8(&values, cols, None)?;
            let codes = quantized.codes.iter().map(|&c| c.into()).collect();
            Ok(Rows { codes, scales: scaled(quantized.scales, 1.0) })
        }
        other => Err(Error::unsupported(other, "int8 or float8_e4m3fn activations")),
    }
}

/// The factor of int8 activation scales for integer group scales: the largest scale of all experts
/// over 4096, or 1 if there is one group.
pub fn input_global_scale(weights: &[Weight<'_>]) -> f32 {
    if weights.first().is_none_or(|w| w.scales.rows() <= 1) {
        return 1.0;
    }
    let scales = weights.iter().flat_map(|w| {
        let ty = w.scales.ty();
        w.scales.iter_bits().map(move |b| ty.to_f64(b) as f32)
    });
    (1.0 / 4096.0) * scales.fold(f32::NEG_INFINITY, f32::max)
}

/// Rows that enter a product.
pub(crate) struct Rows {
    /// Codes of the type that enters the unit, zero-extended.
    pub(crate) codes: Vec<u32>,
    /// Scales of the rows of 8-bit activations.
    pub(crate) scales: Option<Vec<f32>>,
}

impl Rows {
    /// Repeats rows of tokens as rows of slots.
    pub(crate) fn to_slots(&self, cols: usize, top_k: usize) -> Self {
        let scales = self.scales.as_ref();
        Self {
            codes: to_slots(&self.codes, cols, top_k),
            scales: scales.map(|s| to_slots(s, 1, top_k)),
        }
    }
}

/// The sum of tensor-parallel ranks' outputs of type `ty`: added in f32 in the order of ranks,
/// rounded once.
///
/// # Errors
/// [`Error::Shape`] if the outputs of ranks differ in length; [`Error::Unsupported`] for types
/// other than FLOAT16 and BFLOAT16.
pub fn sum_of_ranks(ty: ScalarType, ranks: &[&[u16]]) -> Result<Vec<u16>> {
    super::half_type(ty)?;
    let len = ranks.first().map_or(0, |r| r.len());
    if let Some((rank, other)) = ranks.iter().enumerate().find(|(_, r)| r.len() != len) {
        return Err(Error::shape(
            format!("output of rank {rank}"),
            &[other.len()],
            format!("[{len}]"),
        ));
    }
    let sum = |n: usize| ranks.iter().fold(0f32, |sum, rank| sum + widen(ty, rank[n]));
    Ok((0..len).map(|n| super::narrow(ty, sum(n))).collect())
}
