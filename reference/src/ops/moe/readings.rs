//! What a case leaves open about its layer: a reading is one choice for all of its stages.
//!
//! | open | readings |
//! | --- | --- |
//! | the layout of `swigluoai`, where `gate_up_layout` is not stated | the operation's default, the other one |
//! | the rounding of router weights on x | to the type of x, or not |

use std::borrow::Cow;

use super::{DEFAULT_LAYOUT, MoeConfig, product, walk};
use crate::Result;
use crate::judge::{Declared, OutputReport};
use crate::moe::activation::Columns;
use crate::moe::layer::bounds::Int8Layer;
use crate::num::dims::GroupSize;
use crate::num::scalar::ScalarType;
use crate::num::tensor::Tensor;
use crate::ops::case::Case;
use crate::ops::layer::halves;
use crate::ops::layer_rules::{Prescale, note_layout, wrong_values};
use crate::ops::routing::stated_or_routed;

/// Judges every stage under each reading until one explains the case; if none does, under the one that
/// leaves the fewest values wrong.
pub(super) fn judge(
    case: &Case<'_>,
    c: &MoeConfig,
    declared: &Declared,
) -> Result<Vec<OutputReport>> {
    let layouts = c.rules.layouts(c.activation, DEFAULT_LAYOUT);
    let mut best: Option<(usize, Vec<OutputReport>)> = None;
    for case in &prescaled(case, c)? {
        let products = product::judge(case, c, declared)?;
        for &layout in &layouts {
            let of_layout = with_layout(c, layout, layouts.len() > 1);
            let mut stages = walk::judge(case, &of_layout, declared)?;
            if layouts.len() > 1 {
                note_layout(&mut stages, layout);
            }
            let mut reports = products.clone();
            reports.extend(stages);
            let wrong = wrong_values(&reports);
            if best.as_ref().is_none_or(|(least, _)| wrong < *least) {
                best = Some((wrong, reports));
            }
            if wrong == 0 {
                return Ok(best.map(|(_, reports)| reports).unwrap_or_default());
            }
        }
    }
    Ok(best.map(|(_, reports)| reports).unwrap_or_default())
}

/// The config with this layout, if it is open.
fn with_layout(c: &MoeConfig, layout: Columns, open: bool) -> MoeConfig {
    let mut c = c.clone();
    if open {
        c.rules.gate_up_layout = Some(layout);
    }
    c
}

/// The case; if router weights multiply x, once for each rounding, with a row of x for each slot.
fn prescaled<'a, 'c>(case: &'a Case<'c>, c: &MoeConfig) -> Result<Vec<Cow<'a, Case<'c>>>> {
    if !c.rules.router_weight_on_x {
        return Ok(vec![Cow::Borrowed(case)]);
    }
    let x = case.input("x")?;
    let bits = halves(x, [c.size_m, c.hidden_size])?;
    let (_, weights) = stated_or_routed(case, &c.router(), c.num_experts)?;
    let mut all = Vec::new();
    for prescale in Prescale::ALL {
        let sizes = [c.top_k, c.hidden_size];
        let rows = prescale.apply(&bits, &weights, sizes, c.quant.dtype);
        let shape = vec![weights.len(), c.hidden_size];
        let mut own = case.clone();
        own.add_input("x", Tensor::from_vec("", x.dtype(), shape, rows)?);
        all.push(Cow::Owned(own));
    }
    Ok(all)
}

impl MoeConfig {
    /// What a kernel for the config's int8 activations may choose; the default for other activations.
    pub(super) fn int8_layers(&self, first: bool) -> Vec<Int8Layer> {
        if self.quant.input_dtype != Some(ScalarType::INT8) {
            return vec![Int8Layer::default()];
        }
        let size_k = if first { self.hidden_size } else { self.intermediate_size };
        let groups = match self.quant.group_size {
            GroupSize::Of(size) => size < size_k,
            GroupSize::Channel => false,
        };
        Int8Layer::all(groups)
    }
}
