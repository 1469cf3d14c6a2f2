//! Judges stage by stage, each from the previous stage of the case. A stage that the case lacks is
//! recomputed if its arithmetic is declared, and otherwise carried as bounds.

use super::stage::Stage;
use super::{Int8Moe, activations, narrow_bits, scales, stated};
use crate::Result;
use crate::judge::compare::elements;
use crate::judge::{OutputReport, Verdict};
use crate::method::Activations;
use crate::moe::layer::bounds::ExpertProduct;
use crate::moe::layer::carried::{Carried, Carrier, CodeRanges};
use crate::num::interval::Bound;
use crate::num::scalar::ScalarType;
use crate::num::tensor::Tensor;
use crate::ops::bounded::{self, every_bit};
use crate::ops::case::Case;
use crate::ops::computation::bitwise;
use crate::ops::layer::carried::{self, Origin, REMEDY, Values, activated_bounds};
use crate::ops::layer::{activated, name_both_sides, summed};
use crate::ops::quantized_moe::{QUANTIZED, report_unjudged};
use crate::ops::stated_rows::StatedRows;
use crate::ops::w8a8_fp8::better_diagnosis;
use crate::products::{Class, Convention, Rows};
use crate::quantize::RowRule;

/// The class of carried products.
const CLASS: &str = "integers, sums in f32 in any order, f32 scales in any order";

/// The sizes of int32 sums that are tried where none is declared.
const BLOCKS: [usize; 4] = [32, 64, 128, 256];

/// What codes and scales are judged with.
const BEFORE: [(&str, &str); 4] = [
    ("a1q", "`a1q` and `a1q_scale` together"),
    ("a1q_scale", "`a1q` and `a1q_scale` together"),
    ("a2q", "`a2q` and `a2q_scale` together"),
    ("a2q_scale", "`a2q` and `a2q_scale` together"),
];

/// Codes and scales of the case; `None` unless it has both.
fn given<'c>(case: &'c Case<'_>, which: usize) -> Option<[&'c Tensor<'c>; 2]> {
    let [codes, scales] = QUANTIZED[which].map(|name| case.output(name));
    Some([codes?, scales?])
}

/// The rows of the case, or those of `source` under the layer's rule; the reports on the case's.
fn rows(
    case: &Case<'_>,
    layer: &Int8Moe,
    which: usize,
    source: &[u16],
) -> Result<(Activations, Vec<OutputReport>)> {
    let c = &layer.config;
    let cols = [c.hidden_size, c.intermediate_size][which];
    let Some([codes, scales]) = given(case, which) else {
        return Ok((layer.quantize(source, cols)?, Vec::new()));
    };
    let own = scales.elements::<f32>();
    let made = activations(cols, codes.bytes(), own.to_vec());
    let x = layer.widened(source);
    let reports = StatedRows {
        names: QUANTIZED[which],
        source: ["in.x", "out.activated"][which],
        role: "",
        declared: c.quantizer,
        found: stated(c, &x, cols, (codes.bytes(), &own)),
    }
    .judge()?;
    Ok((made, reports))
}

/// The report on one product; empty if the case does not have its output.
fn product(case: &Case<'_>, layer: &Int8Moe, stage: &Stage) -> Result<Vec<OutputReport>> {
    let name = ["gate_up", "down"][stage.which];
    let Some(found) = case.output(name) else { return Ok(Vec::new()) };
    let of_rows = scales(&stage.rows);
    if let Some(i) = of_rows.iter().position(|s| !(s.is_finite() && *s > 0.0)) {
        let from = QUANTIZED[stage.which][1];
        let note = format!("`{name}` is judged with `{from}`: a scale of {} at {i}", of_rows[i]);
        return Ok(vec![OutputReport::unchecked(name, found.len(), &note)]);
    }
    let mut reports = match layer.config.block_size_k {
        Some(size) => {
            let mut reports = bitwise(case, stage)?;
            for report in &mut reports {
                let note = format!("compared for every bit with int32 sums of {size} k");
                report.note = Some(note);
            }
            reports
        }
        None => vec![by_known_blocks(stage, found)?],
    };
    for report in reports.iter_mut().filter(|r| r.verdict == Verdict::Fail) {
        if report.diagnosis.as_ref().is_none_or(|d| d.unexplained > 0) {
            better_diagnosis(report, &elements(found), layer);
        }
    }
    Ok(reports)
}

/// A pass if int32 sums of a known size give every bit, otherwise the verdict of the bound.
fn by_known_blocks(stage: &Stage, found: &Tensor<'_>) -> Result<OutputReport> {
    let bits = elements(found);
    for size in BLOCKS {
        if stage.bits_in_blocks(size)? == bits {
            let how = format!("a known kernel gives it: int32 sums of {size} k, epilogue triton");
            let name = ["gate_up", "down"][stage.which].to_owned();
            return Ok(OutputReport { name, ..every_bit(bits.len(), &how) });
        }
        if stage.rows.size_k <= 1024 {
            // Every size gives these bits.
            break;
        }
    }
    bounded::judge(stage, found)
}

/// What the rows that enter the product with w2 are.
enum Quantized {
    Known(Activations),
    /// Bounds on `activated`.
    Bounds(Vec<Bound>),
}

/// Every stage that the case has; rows that it lacks are quantized by the layer's rule.
pub(super) fn judge(case: &Case<'_>, layer: &Int8Moe) -> Result<Vec<OutputReport>> {
    let (c, shared) = (&layer.config, layer.config.stages());
    layer.layer().validate()?;
    let own = |name: &str| case.output(name).map(|t| t.elements::<u16>().into_owned());
    let (a1q, mut reports) = rows(case, layer, 0, &layer.x)?;
    let mut from = if given(case, 0).is_some() { "a1q" } else { "x" };
    let a1q = a1q.to_slots(c.slots_of_x());
    let stage = layer.stage(0, a1q.clone());
    reports.extend(product(case, layer, &stage)?);
    let gate_up = match own("gate_up") {
        Some(own) => {
            from = "gate_up";
            Values::Bits(own.into())
        }
        None if c.block_size_k.is_some() => Values::Bits(narrow_bits(&stage.bits()?).into()),
        None => Values::Bounds(bounds(layer, 0, &Quantized::Known(a1q))?),
    };
    let (a2q, of_rows) = activated_rows(case, layer, &gate_up, &mut from)?;
    reports.extend(of_rows);
    let (down, y) = (own("down"), own("y"));
    let is_known = matches!(a2q, Quantized::Known(_));
    if let Quantized::Known(rows) = &a2q {
        reports.extend(product(case, layer, &layer.stage(1, rows.clone()))?);
    }
    let carried = match (&down, &y) {
        (Some(_), _) if is_known => None,
        (None, None) => None,
        _ => Some(bounds(layer, 1, &a2q)?),
    };
    if let (Some(found), Some(bounds)) = (&down, &carried) {
        let origin = Origin { class: CLASS, from, remedy: REMEDY };
        let stage = ("down", c.hidden_size);
        reports.push(carried::judge(case, &shared, stage, found, (bounds, origin)));
    }
    match (down, y) {
        (Some(down), Some(found)) => reports.push(summed::judge(case, &shared, &down, &found)?),
        (None, Some(found)) => {
            let down = carried.unwrap_or_default();
            let origin = Origin { class: CLASS, from, remedy: REMEDY };
            reports.push(summed::carried(case, &shared, &down, &found, origin)?);
        }
        _ => {}
    }
    report_unjudged(case, &mut reports, &BEFORE);
    name_both_sides(&mut reports);
    Ok(reports)
}

/// The rows that enter the product with w2, and the reports on `activated` and on them.
fn activated_rows(
    case: &Case<'_>,
    layer: &Int8Moe,
    gate_up: &Values<'_>,
    from: &mut &'static str,
) -> Result<(Quantized, Vec<OutputReport>)> {
    let (c, shared) = (&layer.config, layer.config.stages());
    let size_i = c.intermediate_size;
    let mut reports = Vec::new();
    if let Some(found) = case.output("activated") {
        let found = found.elements::<u16>().into_owned();
        reports.push(match gate_up {
            Values::Bits(gate_up) => activated::judge(case, &shared, gate_up, &found)?,
            Values::Bounds(_) => {
                let bounds = activated_bounds(&shared, gate_up, false)?;
                let origin = Origin { class: CLASS, from, remedy: REMEDY };
                let stage = ("activated", size_i);
                let report = carried::judge(case, &shared, stage, &found, (&bounds, origin));
                carried::as_stated(case, report, (&found, &bounds, size_i), c.dtype)
            }
        });
        *from = "activated";
        let (a2q, of_rows) = rows(case, layer, 1, &found)?;
        reports.extend(of_rows);
        return Ok((Quantized::Known(a2q), reports));
    }
    let bounds = activated_bounds(&shared, gate_up, true)?;
    let Some([codes, scales]) = given(case, 1) else {
        return Ok((Quantized::Bounds(bounds), reports));
    };
    let ranges = CodeRanges::new(&bounds, size_i, c.dtype, carrier(layer));
    let (found, ty) = ([Some(codes), Some(scales)], ScalarType::INT8);
    reports.extend(carried::quantized(found, QUANTIZED[1], ty, &ranges, REMEDY));
    *from = "a2q";
    let scales = scales.elements::<f32>().to_vec();
    Ok((Quantized::Known(activations(size_i, codes.bytes(), scales)), reports))
}

/// How rows of `activated` become int8.
fn carrier(layer: &Int8Moe) -> Carrier {
    let (rule, dtype) = (layer.rule, layer.config.dtype);
    Carrier::Rows { rule: RowRule { rule, ty: ScalarType::INT8, dtype }, factor: 1.0 }
}

/// The bounds of the product with w13 (`which` 0) or w2.
fn bounds(layer: &Int8Moe, which: usize, rows: &Quantized) -> Result<Vec<Bound>> {
    let c = &layer.config;
    let experts = layer.local_experts()?;
    let product = ExpertProduct {
        weights: &layer.weights[which],
        orders: None,
        experts: &experts,
        router: layer.weights_product(which).then_some(&layer.topk_weights[..]),
        dtype: c.dtype,
        convention: Convention::W8a8,
    };
    let inputs = |of: &[usize]| match rows {
        Quantized::Known(rows) => {
            let codes = of.iter().flat_map(|&row| rows.row(row)).copied();
            let values = Rows::decode(ScalarType::INT8, rows.size_k, codes)?;
            let scales = of.iter().map(|&row| rows.scale(row, 0)).collect();
            Ok(Carried::known(values, Some(scales)))
        }
        Quantized::Bounds(bounds) => {
            let k = c.intermediate_size;
            let bounds = of.iter().flat_map(|&row| &bounds[row * k..][..k]);
            crate::moe::layer::carried::carried(bounds, k, c.dtype, carrier(layer))
        }
    };
    product.bounds(inputs, |_| Class::any_order())
}
