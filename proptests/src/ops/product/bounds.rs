//! The bounds of a product for kernels that add in an order of their own.

use marlinspike::moe::layer::bounds::with_integer_scales;
use marlinspike::moe::layer::input_global_scale;
use marlinspike::num::scalar::ScalarType;
use marlinspike::products::{Class, Convention, Extras, Judge, Recipe, Rows};
use marlinspike::weight::Weight;
use marlinspike::{Error, Result};

use super::ProductWeight;

/// The matrix of a product.
pub(super) struct Matrix<'m> {
    /// Types.
    pub(super) form: &'m ProductWeight,
    /// Codes, scales and bias.
    pub(super) weight: &'m Weight<'static>,
    /// A permutation that sorts `g_idx`.
    pub(super) order: Option<&'m [u32]>,
}

impl Matrix<'_> {
    /// The elements of `found` that are outside the bounds of the convention that fits best: no kernel that
    /// sums the products of `x` `[M, K]` in any order has computed them.
    pub(super) fn outside(
        &self,
        x: &[u16],
        x_scales: Option<&[f32]>,
        router_weights: Option<&[f32]>,
        found: &[u16],
    ) -> Result<Vec<usize>> {
        let (dtype, input) = (self.form.quant.dtype, self.form.input());
        let factor = match input {
            ScalarType::INT8 => input_global_scale(std::slice::from_ref(self.weight)),
            _ => 1.0,
        };
        let integers = match input {
            ScalarType::INT8 if self.weight.scales.rows() > 1 => {
                with_integer_scales(std::slice::from_ref(self.weight))?.pop()
            }
            _ => None,
        };
        let weight = integers.as_ref().unwrap_or(self.weight);
        let scales: Option<Vec<f32>> =
            x_scales.map(|scales| scales.iter().map(|s| s * factor).collect());
        let extras = Extras { activation_scales: scales.as_deref(), router_weights };
        let rows = Rows::decode(input, self.form.shape.size_k, x.iter().map(|&b| b.into()))?;
        let class = self.class(weight);
        let mut best: Option<Vec<usize>> = None;
        let conventions = Convention::NAMED.iter().filter(|(_, c)| c.dequantizes());
        for &(_, convention) in conventions {
            let recipe = Recipe::new(convention, weight, dtype, extras)?;
            let judge = Judge { weight, order: self.order, recipe: &recipe, class: &class, extras };
            let bounds = judge.bounds(&rows, None)?;
            let each = bounds.iter().zip(found).enumerate();
            let value = |bits: u16| dtype.to_f64(bits.into());
            let outside: Vec<usize> = each
                .filter(|(_, (bound, bits))| bound.ratio(value(**bits)) > 1.0)
                .map(|(at, _)| at)
                .collect();
            if outside.is_empty() {
                return Ok(outside);
            }
            if best.as_ref().is_none_or(|b| outside.len() < b.len()) {
                best = Some(outside);
            }
        }
        best.ok_or_else(|| Error::size("conventions", 0, "at least one"))
    }

    /// Every order of additions of the activations' type.
    fn class(&self, weight: &Weight<'_>) -> Class {
        match self.form.quant.input_dtype {
            Some(ScalarType::INT8) => {
                Class::int8(self.form.shape.size_k, weight.scales.rows().max(1))
            }
            Some(_) => Class::fp8_any_order(),
            None => Class::any_order(),
        }
    }
}
