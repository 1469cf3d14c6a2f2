//! Bounds on each stage of a layer for every kernel of a class, from the values or the bounds of
//! the previous stage.

use ndarray::{Array2, ArrayView2, ArrayView3};

use super::carried::{Carried, Carrier, carried};
use super::{Layer, Routed, input_global_scale};
use crate::layouts::marlin::process_int8_scales_with;
use crate::moe::{sum, to_slots};
use crate::num::array::{FloatView2, row_major, rows_of};
use crate::num::interval::{Bound, Interval};
use crate::num::scalar::ScalarType;
use crate::products::{Bounded, Class, Convention, Extras, Judge, Recipe};
use crate::quantize::{ActivationRule, Int8Rule, RowRule};
use crate::weight::{Table, TableData, Weight};
use crate::{Error, Result};

/// The declared arithmetic of the products.
#[derive(Debug, Clone, Copy)]
pub struct Declared<'d> {
    /// Scales, bias, roundings.
    pub convention: Convention,
    /// Accumulation in f32.
    pub class: &'d Class,
    /// How a layer of int8 activations computes.
    pub int8: Int8Layer,
}

/// The choices of a kernel for int8 activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Int8Layer {
    /// How rows become int8.
    pub rule: Int8Rule,
    /// Whether group scales multiply the integer sums of their groups as they are, in f32, and not as
    /// Marlin's integers ([`with_integer_scales`]).
    pub real_scales: bool,
}

impl Int8Layer {
    /// Every choice, for weights with or without several groups.
    pub(crate) fn all(groups: bool) -> Vec<Self> {
        let scales: &[bool] = if groups { &[false, true] } else { &[false] };
        let of = |&real_scales: &bool| {
            [Int8Rule::Quotient, Int8Rule::Product].map(|rule| Self { rule, real_scales })
        };
        scales.iter().flat_map(of).collect()
    }
}

/// The bounds of all stages; [`super::Stages`] has their bits.
#[derive(Debug, Clone)]
pub struct StageBounds {
    /// `[M·top_k, N of w13]`.
    pub gate_up: Array2<Bound>,
    /// `[M·top_k, I]`.
    pub activated: Array2<Bound>,
    /// `[M·top_k, H]`.
    pub down: Array2<Bound>,
    /// `[M, H]`.
    pub y: Array2<Bound>,
}

impl From<Bounded> for Bound {
    fn from(b: Bounded) -> Self {
        if b.exact.is_nan() {
            return Self::NAN;
        }
        if b.lo.is_nan() || b.hi.is_nan() {
            // With an infinite product, the other terms decide between infinity and NaN.
            return Self { exact: b.exact, ..ANYTHING };
        }
        let interval = Interval { lo: b.lo, hi: b.hi };
        Self { exact: b.exact, interval, nan: b.is_unbounded() }
    }
}

impl Layer<'_> {
    /// The bounds of every stage from x `[M, H]`, of `dtype`: each stage's error is carried
    /// into the next.
    ///
    /// # Errors
    /// As [`Layer::forward`].
    pub fn bounds<'x>(
        &self,
        x: impl Into<FloatView2<'x>>,
        routed: Routed<'_>,
        declared: Declared<'_>,
    ) -> Result<StageBounds> {
        self.validate()?;
        let x = self.bits("x", &x.into(), self.hidden_size())?;
        let value = |&bits: &u16| Bound::exactly(self.dtype.to_f64(bits.into()));
        let x: Vec<Bound> = x.iter().map(value).collect();
        let gate_up =
            self.gate_up_bounds(rows_of("x", &x, self.hidden_size())?, routed, declared)?;
        let activated = self.activation.bounds(gate_up.view(), self.dtype)?;
        let down = self.down_bounds(activated.view(), routed, declared)?;
        let y = sum::bounds(of_tokens(down.view(), routed.top_k)?, self.dtype)?;
        Ok(StageBounds { gate_up, activated, down, y })
    }

    /// `gate_up` of x `[M, H]`.
    ///
    /// # Errors
    /// As [`Layer::forward`].
    pub fn gate_up_bounds(
        &self,
        x: ArrayView2<'_, Bound>,
        routed: Routed<'_>,
        declared: Declared<'_>,
    ) -> Result<Array2<Bound>> {
        let rows = to_slots(&row_major(x), x.ncols(), routed.top_k);
        let rows = rows_of("x", &rows, x.ncols())?;
        let router = self.router_weight_on_input.then_some(routed.topk_weights);
        self.product(rows, self.w13, self.orders[0], routed, router, declared)
    }

    /// `down` of `activated` `[M·top_k, I]`.
    ///
    /// # Errors
    /// As [`Layer::forward`].
    pub fn down_bounds(
        &self,
        activated: ArrayView2<'_, Bound>,
        routed: Routed<'_>,
        declared: Declared<'_>,
    ) -> Result<Array2<Bound>> {
        let router = (!self.router_weight_on_input).then_some(routed.topk_weights);
        self.product(activated, self.w2, self.orders[1], routed, router, declared)
    }

    fn product(
        &self,
        x: ArrayView2<'_, Bound>,
        weights: &[Weight<'_>],
        orders: Option<&[Vec<u32>]>,
        routed: Routed<'_>,
        router: Option<&[f32]>,
        declared: Declared<'_>,
    ) -> Result<Array2<Bound>> {
        let experts = self.local_experts(routed)?;
        let shape = weights
            .first()
            .map(Weight::shape)
            .ok_or_else(|| Error::size("experts", 0, "1 or more"))?;
        let (k, n) = (shape.size_k, shape.size_n);
        if x.dim() != (experts.len(), k) {
            let expected = format!("[{}, {k}]", experts.len());
            return Err(Error::shape("activations", x.shape(), expected));
        }
        let x = row_major(x);
        let rule = self.carrier(weights, declared.int8);
        let integers = match self.input_dtype {
            Some(ScalarType::INT8)
                if !declared.int8.real_scales && weights.iter().any(|w| w.scales.rows() > 1) =>
            {
                Some(with_integer_scales(weights)?)
            }
            _ => None,
        };
        let product = ExpertProduct {
            weights: integers.as_deref().unwrap_or(weights),
            orders,
            experts: &experts,
            router,
            dtype: self.dtype,
            convention: declared.convention,
        };
        let inputs = |rows: &[usize]| {
            carried(rows.iter().flat_map(|&r| &x[r * k..][..k]), k, self.dtype, rule)
        };
        let out = product.bounds(inputs, |weight| self.class_of(weight, declared.class))?;
        Ok(Array2::from_shape_vec((experts.len(), n), out).expect("every row's columns"))
    }

    /// How rows enter the products with `weights`.
    fn carrier(&self, weights: &[Weight<'_>], int8: Int8Layer) -> Carrier {
        let rows = |rule, ty, factor| Carrier::Rows {
            rule: RowRule { rule, ty, dtype: self.dtype },
            factor,
        };
        match self.input_dtype {
            None => Carrier::Unquantized,
            Some(ScalarType::INT8) => {
                let rule = match int8.rule {
                    Int8Rule::Quotient => ActivationRule::Quotient,
                    Int8Rule::Product => ActivationRule::Product,
                };
                let factor = if int8.real_scales { 1.0 } else { input_global_scale(weights) };
                rows(rule, ScalarType::INT8, factor)
            }
            Some(ty) => rows(ActivationRule::QuotientExact, ty, 1.0),
        }
    }

    /// The class of one matrix's sums: integer, 8-bit float, or declared.
    fn class_of(&self, weight: &Weight<'_>, declared: &Class) -> Class {
        match (self.input_dtype, weight.scales.rows()) {
            (Some(ScalarType::INT8), groups) => Class::int8(weight.shape().size_k, groups.max(1)),
            (Some(_), _) if *declared == Class::any_order() => Class::fp8_any_order(),
            _ => declared.clone(),
        }
    }
}

/// A product of rows with the matrices of their experts.
pub(crate) struct ExpertProduct<'p> {
    pub(crate) weights: &'p [Weight<'p>],
    /// For each matrix the permutation that sorts its `g_idx`.
    pub(crate) orders: Option<&'p [Vec<u32>]>,
    /// Each row's matrix; rows without one are zero.
    pub(crate) experts: &'p [Option<usize>],
    /// Router weight of each row.
    pub(crate) router: Option<&'p [f32]>,
    pub(crate) dtype: ScalarType,
    pub(crate) convention: Convention,
}

impl ExpertProduct<'_> {
    /// The bounds `[rows, N]`; `inputs` gives the rows of these indices as they enter the product.
    pub(crate) fn bounds(
        &self,
        inputs: impl Fn(&[usize]) -> Result<Carried>,
        class_of: impl Fn(&Weight<'_>) -> Class,
    ) -> Result<Vec<Bound>> {
        let Some(shape) = self.weights.first().map(Weight::shape) else { return Ok(Vec::new()) };
        let n = shape.size_n;
        let mut rows_of = vec![Vec::new(); self.weights.len()];
        for (row, expert) in self.experts.iter().enumerate() {
            if let Some(e) = expert {
                rows_of[*e].push(row);
            }
        }
        let mut out = vec![Bound::exactly(0.0); self.experts.len() * n];
        for (e, rows) in rows_of.iter().enumerate().filter(|(_, rows)| !rows.is_empty()) {
            let weight = &self.weights[e];
            let inputs = inputs(rows)?;
            let picked: Option<Vec<f32>> =
                self.router.map(|w| rows.iter().map(|&r| w[r]).collect());
            let scales = inputs.scales.as_deref();
            let extras = Extras { activation_scales: scales, router_weights: picked.as_deref() };
            let recipe = Recipe::new(self.convention, weight, self.dtype, extras)?;
            let class = class_of(weight);
            let order = self.orders.and_then(|o| o.get(e)).map(Vec::as_slice);
            let judge = Judge { weight, order, recipe: &recipe, class: &class, extras };
            let bounded = judge.bounds(&inputs.values, inputs.radius.as_ref())?;
            for (i, (&row, bounded)) in rows.iter().zip(bounded.chunks_exact(n)).enumerate() {
                let into = &mut out[row * n..][..n];
                if inputs.undefined[i] {
                    // Without a scale the codes of the row are undefined.
                    into.fill(ANYTHING);
                    continue;
                }
                for (o, &b) in into.iter_mut().zip(bounded) {
                    *o = b.into();
                    o.nan |= inputs.nan[i];
                }
            }
        }
        Ok(out)
    }
}

/// Rows of slots `[M·top_k, H]` as `[M, top_k, H]`.
pub(crate) fn of_tokens<'a>(
    rows: ArrayView2<'a, Bound>,
    top_k: usize,
) -> Result<ArrayView3<'a, Bound>> {
    let (slots, cols) = rows.dim();
    let shape = (slots.checked_div(top_k).unwrap_or(0), top_k, cols);
    let found = [slots, cols];
    let expected = format!("rows in multiples of {top_k}");
    rows.into_shape_with_order(shape).map_err(|_| Error::shape("down", &found, expected))
}

/// No bound.
const ANYTHING: Bound = Bound {
    exact: f64::NAN,
    interval: Interval { lo: f64::NEG_INFINITY, hi: f64::INFINITY },
    nan: true,
};

/// The matrices with group scales as the integers of kernels for int8 activations; their divisor,
/// [`input_global_scale`], multiplies the scales of the activations.
///
/// # Errors
/// As [`process_int8_scales_with`].
pub fn with_integer_scales<'w>(weights: &[Weight<'w>]) -> Result<Vec<Weight<'w>>> {
    let max = input_global_scale(weights) * 4096.0;
    let integers = |w: &Weight<'w>| {
        let integers = process_int8_scales_with(&w.scales, max)?.scales;
        let value = |bits: u32| f32::from((bits as u16).cast_signed()).to_bits();
        let data = TableData::B32(integers.iter_bits().map(value).collect());
        let scales = Table::new(ScalarType::FLOAT32, integers.rows(), integers.cols(), data)?;
        Ok(Weight { scales, ..w.clone() })
    };
    weights.iter().map(integers).collect()
}
