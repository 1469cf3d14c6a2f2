//! Verdicts on matrix products: `y` of a linear case, `gate_up` and `down` of a layer.

mod diagnose;
mod layer;
mod stage;

use super::compare::elements;
use super::scheduled::Product;
use super::weights::Source;
use super::{OutputReport, known};
use crate::Result;
use crate::case::{Case, LinearConfig};
use crate::checkpoint::float_type;
use crate::dims::Shape;
use crate::gemm::{Class, Convention, Extras, Rows};
use crate::moe::layer::bounds::with_integer_scales;
use crate::scalar::ScalarType;
use crate::tensor::{DType, Tensor};
use crate::weight::Weight;
pub(super) use layer::{expert_product, moe};
pub(super) use stage::{Part, Stage, measure};

/// How the products of a case are declared to be computed.
#[derive(Debug, Clone)]
pub struct Declared {
    /// Scales, bias, roundings.
    pub convention: Convention,
    /// Accumulation in f32; of integer products, what is left to f32 follows from the convention.
    pub class: Class,
}

impl Default for Declared {
    fn default() -> Self {
        Self { convention: Convention::Marlin, class: Class::any_order() }
    }
}

impl Declared {
    /// The class of one matrix's sums: of int8 activations integers, of FP8 ones, where nothing
    /// narrower is declared, what units for them may do; else as declared.
    fn class_for(&self, weight: &Weight<'_>, input_dtype: Option<ScalarType>) -> Class {
        match input_dtype {
            Some(ScalarType::INT8) => Class::int8(weight.shape().size_k, weight.scales.rows()),
            Some(_) if self.class == Class::any_order() => Class::fp8_any_order(),
            _ => self.class.clone(),
        }
    }
}

/// `y` of a linear case.
pub(super) fn linear(
    case: &Case<'_>,
    c: &LinearConfig,
    declared: &Declared,
) -> Result<Option<OutputReport>> {
    let Some(found) = case.output("y") else { return Ok(None) };
    let quant = &c.quant;
    let source = Source::new(case, quant, "", Shape::new(c.size_k, c.size_n));
    let mut weights = source.weights()?;
    if quant.input_dtype == Some(ScalarType::INT8) && weights[0].scales.rows() > 1 {
        weights = with_integer_scales(&weights)?;
    }
    let (input, scales) = match quant.input_dtype {
        Some(_) => (case.input("a_q")?, Some(case.input("a_scales")?.elements::<f32>())),
        None => (case.input("x")?, None),
    };
    let extras = Extras { activation_scales: scales.as_deref(), router_weights: None };
    let parts =
        [Part { weight: &weights[0], rows: (0..c.size_m).collect(), expert: None, global: 0 }];
    let order = source.orders(&weights)?;
    let stage = Stage {
        name: "y",
        found,
        rows: decoded(input)?,
        radius: None,
        parts: &parts,
        orders: order.as_deref(),
        extras,
        dtype: quant.dtype,
        input_dtype: quant.input_dtype,
        declared,
        producer: &case.provenance,
        top_k: None,
    };
    let undeclared = c.schedule.is_none() && declared.class == Class::any_order();
    if quant.input_dtype == Some(ScalarType::FLOAT8_E4M3FN) && undeclared {
        let product = Product {
            x: &elements(input),
            input: ScalarType::FLOAT8_E4M3FN,
            dtype: quant.dtype,
            weights: &weights,
            expert_of: None,
            orders: order.as_deref(),
            activation_scales: scales.as_deref(),
            router_weights: None,
        };
        return known::judge(&stage, &product).map(Some);
    }
    stage.judge().map(Some)
}

/// The numbers of a floating-point or int8 tensor, its last dimension as rows.
pub(super) fn decoded(tensor: &Tensor<'_>) -> Result<Rows> {
    let size_k = tensor.shape().last().copied().unwrap_or(1);
    let ty = match tensor.dtype() {
        DType::I8 => ScalarType::INT8,
        dtype => float_type(dtype).unwrap_or(ScalarType::FLOAT32),
    };
    Rows::decode(ty, size_k, elements(tensor).into_iter())
}
