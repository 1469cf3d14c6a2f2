//! Verdicts on matrix products: `y` of a linear case, `gate_up` and `down` of a layer.

mod diagnose;
mod factor;
mod hints;
pub(crate) mod known;
mod members;
mod most_bits;
mod readings;
mod sample;
mod stage;
mod verdict;
mod ways;

use super::compare::elements;
use crate::Result;
use crate::formats::float_type;
use crate::num::scalar::ScalarType;
use crate::num::tensor::{DType, Tensor};
use crate::products::{Class, Convention, Rows};
use crate::weight::Weight;
pub(crate) use hints::{Hints, Mistaken};
pub(crate) use readings::{DEQUANTIZING, Reading};
pub(crate) use stage::{Part, Stage};
pub(crate) use verdict::{REMEDY, measure};

const E4M3: ScalarType = ScalarType::FLOAT8_E4M3FN;

/// The declared arithmetic of a case's products.
#[derive(Debug, Clone)]
pub struct Declared {
    /// Convention for scales, bias and roundings; `None` tries every known convention.
    pub convention: Option<Convention>,
    /// Whether the exact result rounded once also passes if a convention is declared. Without a
    /// declared convention it always passes.
    pub or_exact: bool,
    /// Class of the f32 accumulation. For integer products, the f32 operations follow from the
    /// convention.
    pub class: Class,
    /// Whether `class` is declared even if it is the default one, which products of 8-bit floats
    /// otherwise widen.
    pub class_stated: bool,
    /// The largest uniform error, as a share, that a pass may leave unnoticed; `None`: that of the
    /// case's config, or [`Declared::MIN_POWER`].
    pub min_power: Option<f64>,
    /// Whether the scales of groups, of activations and weights, are powers of two (UE8M0), so that
    /// the unit itself may multiply by them.
    pub power_of_two_scales: bool,
}

impl Default for Declared {
    fn default() -> Self {
        Self {
            convention: None,
            or_exact: false,
            class: Class::any_order(),
            class_stated: false,
            min_power: None,
            power_of_two_scales: false,
        }
    }
}

impl Declared {
    /// What a caller states: the name of a convention, and the name of a class or its JSON.
    ///
    /// # Errors
    /// As [`Convention::from_name`] and [`Class::parse`].
    pub fn stated(convention: Option<&str>, class: Option<&str>) -> Result<Self> {
        let convention = convention.map(Convention::from_name).transpose()?;
        let class_stated = class.is_some();
        let class = class.map_or_else(|| Ok(Class::any_order()), Class::parse)?;
        Ok(Self { convention, class, class_stated, ..Self::default() })
    }

    /// The default of [`Declared::min_power`]: 2 %.
    pub const MIN_POWER: f64 = 0.02;

    /// The largest uniform error that a pass may leave unnoticed.
    pub(crate) fn power_limit(&self) -> f64 {
        self.min_power.unwrap_or(Self::MIN_POWER)
    }

    /// Whether a class is declared, so that no other is tried.
    pub(crate) fn states_class(&self) -> bool {
        self.class_stated || self.class != Class::any_order()
    }

    /// The classes of one matrix's sums, narrowest first. Int8 activations: integers. FP8
    /// activations without a declared class: Hopper's tensor cores in known orders, then tensor
    /// cores in any order that keep the bits of f32, then those that keep fewer. Otherwise the
    /// declared class.
    pub(super) fn classes_for(
        &self,
        weight: &Weight<'_>,
        input_dtype: Option<ScalarType>,
    ) -> Vec<Class> {
        match input_dtype {
            Some(ScalarType::INT8) => {
                vec![Class::int8(weight.shape().size_k, weight.scales.rows())]
            }
            Some(input) if !self.states_class() => {
                let codes = (input, weight.ty) == (E4M3, E4M3);
                let blocks = codes && self.convention.is_some_and(|c| !c.dequantizes());
                let hopper = codes && (blocks || weight.scales.rows() == 1);
                let mut all = vec![Class::any_order(), Class::fp8_any_order()];
                if hopper {
                    all.insert(0, Class::fp8_hopper());
                }
                if blocks && weight.scales.rows() > 1 && self.power_of_two_scales {
                    all.push(Class::fp8_block_scaled());
                }
                all
            }
            _ => vec![self.class.clone()],
        }
    }

    /// The widest of these classes.
    pub(crate) fn class_for(&self, weight: &Weight<'_>, input_dtype: Option<ScalarType>) -> Class {
        let mut classes = self.classes_for(weight, input_dtype);
        classes.pop().unwrap_or_else(|| self.class.clone())
    }
}

/// The values of a floating-point or int8 tensor; its last dimension forms rows.
pub(crate) fn decoded(tensor: &Tensor<'_>) -> Result<Rows> {
    let size_k = tensor.shape().last().copied().unwrap_or(1);
    let ty = match tensor.dtype() {
        DType::I8 => ScalarType::INT8,
        dtype => float_type(dtype).unwrap_or(ScalarType::FLOAT32),
    };
    Rows::decode(ty, size_k, elements(tensor).into_iter())
}
