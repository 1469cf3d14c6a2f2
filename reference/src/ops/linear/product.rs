//! Verdicts on `y`: bit for bit if the case declares a schedule, otherwise by its bound.

use super::LinearConfig;
use crate::Result;
use crate::judge::compare::elements;
use crate::judge::product::{Hints, Part, Stage, decoded, known};
use crate::judge::scheduled::{self, Product};
use crate::judge::{Declared, OutputReport};
use crate::moe::layer::bounds::with_integer_scales;
use crate::num::dims::Shape;
use crate::num::scalar::ScalarType;
use crate::ops::case::Case;
use crate::ops::quant::source::Source;
use crate::products::Extras;

/// The report on `y` of a `linear` case that declares a schedule.
pub(super) fn by_schedule(
    case: &Case<'_>,
    c: &LinearConfig,
    declared: &Declared,
) -> Result<Option<OutputReport>> {
    let (Some(choice), Some(found)) = (&c.schedule, case.output("y")) else { return Ok(None) };
    let source = Source::new(case, &c.quant, "", Shape::new(c.size_k, c.size_n));
    let weights = source.weights()?;
    let orders = source.orders(&weights)?;
    let scales;
    let (x, activation_scales) = match c.quant.input_dtype {
        None => (elements(case.input("x")?), None),
        Some(_) => {
            scales = case.input("a_scales")?.elements::<f32>().into_owned();
            (elements(case.input("a_q")?), Some(scales.as_slice()))
        }
    };
    let product = Product {
        x: &x,
        input: c.quant.input_dtype.unwrap_or(c.quant.dtype),
        dtype: c.quant.dtype,
        weights: &weights,
        expert_of: None,
        orders: orders.as_deref(),
        activation_scales,
        router_weights: None,
    };
    let bounded = || by_bound(case, c, declared);
    scheduled::judge("y", found, product, choice, bounded).map(Some)
}

/// The report on `y` of a `linear` case by its bound.
pub(super) fn by_bound(
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
    let undeclared = c.schedule.is_none() && !declared.states_class();
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
