//! Verdicts on matrix products: `y` of a linear case, `gate_up` and `down` of a layer.

mod diagnose;
mod layer;
mod readings;
mod sample;
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
pub(crate) use diagnose::Hints;
pub(crate) use layer::{expert_product, moe};
pub(super) use readings::{DEQUANTIZING, Reading};
pub(crate) use stage::{Part, REMEDY, Stage, measure};

const E4M3: ScalarType = ScalarType::FLOAT8_E4M3FN;

/// How the products of a case are declared to be computed.
#[derive(Debug, Clone)]
pub struct Declared {
    /// Scales, bias, roundings; where absent, every known convention is tried.
    pub convention: Option<Convention>,
    /// Whether the exact result, rounded once, passes as well where a convention is declared. It
    /// does where none is.
    pub or_exact: bool,
    /// Accumulation in f32; of integer products, what is left to f32 follows from the convention.
    pub class: Class,
}

impl Default for Declared {
    fn default() -> Self {
        Self { convention: None, or_exact: false, class: Class::any_order() }
    }
}

impl Declared {
    /// As declared; where no convention is, the one that the case's config states.
    pub(super) fn or_stated(&self, case: &Case<'_>) -> Self {
        let stated = case.config.quant().and_then(|quant| quant.convention);
        Self { convention: self.convention.or(stated), ..self.clone() }
    }

    /// The classes of one matrix's sums, the narrowest first. Of int8 activations integers; of FP8
    /// ones, where no class is declared, Hopper's unit in known orders, then in any order units that
    /// keep f32's bits, then those that keep fewer; else the declared one.
    fn classes_for(&self, weight: &Weight<'_>, input_dtype: Option<ScalarType>) -> Vec<Class> {
        match input_dtype {
            Some(ScalarType::INT8) => {
                vec![Class::int8(weight.shape().size_k, weight.scales.rows())]
            }
            Some(input) if self.class == Class::any_order() => {
                let codes = (input, weight.ty) == (E4M3, E4M3) && weight.scales.rows() == 1;
                let hopper = codes.then(Class::fp8_hopper);
                hopper.into_iter().chain([Class::any_order(), Class::fp8_any_order()]).collect()
            }
            _ => vec![self.class.clone()],
        }
    }

    /// The widest of these classes.
    fn class_for(&self, weight: &Weight<'_>, input_dtype: Option<ScalarType>) -> Class {
        let mut classes = self.classes_for(weight, input_dtype);
        classes.pop().unwrap_or_else(|| self.class.clone())
    }
}

/// `y` of a linear case.
pub(crate) fn linear(
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
    let unused = case.inputs.get("g_idx").filter(|_| !quant.has_act_order());
    let unused = unused.map(|g| g.elements::<u32>());
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
        top_k: None,
        hints: Hints {
            tensor_parallel: quant.tensor_parallel,
            unused_g_idx: unused.as_deref(),
            ..Hints::default()
        },
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
        return known::judge(stage, &product).map(Some);
    }
    stage.judge().map(Some)
}

/// The numbers of a floating-point or int8 tensor, its last dimension as rows.
pub(crate) fn decoded(tensor: &Tensor<'_>) -> Result<Rows> {
    let size_k = tensor.shape().last().copied().unwrap_or(1);
    let ty = match tensor.dtype() {
        DType::I8 => ScalarType::INT8,
        dtype => float_type(dtype).unwrap_or(ScalarType::FLOAT32),
    };
    Rows::decode(ty, size_k, elements(tensor).into_iter())
}
