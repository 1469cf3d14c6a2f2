//! Notes on values that preparation changes in experts.

use marlinspike::config::{ScaleStrategy, Scheme};
use marlinspike::formats::global_scale::W13Scale;

use super::Context;
use crate::convert::stack::StackPlan;
use crate::load;
use crate::model::bind::Part;
use crate::model::layers::Role;
use crate::model::{ModelError, values};

/// Notes on values that preparation changes in a planned stack; or the reason why the format cannot
/// hold the result.
///
/// # Errors
/// [`ModelError`] for scales that are missing or not positive finite numbers: `--skip-unsupported`
/// must not hide bad data.
pub(super) fn notes(
    plan: &StackPlan,
    context: Context<'_>,
) -> Result<Result<Vec<String>, String>, ModelError> {
    let Context { model, settings, .. } = context;
    if plan.role != Role::W13 {
        return Ok(Ok(Vec::new()));
    }
    let bad = |e: marlinspike::Error| ModelError::module(&plan.module, e);
    match (&plan.scheme, settings.preparation.requantize) {
        (Scheme::Block { format, container, .. }, _) if format.has_global_scale() => {
            let policy = settings.preparation.w13_scale;
            let scales = load::w13_scales(model, &plan.module, &plan.experts, *container, policy);
            let mismatches = scales.map_err(bad)?.mismatches;
            Ok(match (policy, mismatches.first()) {
                (W13Scale::Own, Some(first)) => Err(format!(
                    "{first}: found global scales of their own in {} experts, expected one for an \
                     expert, as the format has it (--w13-scale first)",
                    mismatches.len()
                )),
                _ => Ok(mismatches
                    .iter()
                    .map(|m| format!("warning: {m}: w1's is used for both, as upstream does"))
                    .collect()),
            })
        }
        (Scheme::Fp8(f), Some(rule)) if f.strategy == ScaleStrategy::Tensor => {
            let mut changed = 0;
            for matrices in &plan.experts {
                let scale =
                    load::merged(model, matrices, Part::Scale, &plan.slice.k, &plan.slice.n);
                let scale = scale.map_err(bad)?;
                let scales = scale.map_or(Ok(Vec::new()), |s| values::floats(&s));
                let scales = scales.map_err(bad)?;
                if let Some(bad) = scales.iter().find(|s| !s.is_finite() || **s <= 0.0) {
                    let reason = format!(
                        "scale of w1 or w3: found {bad}, expected a positive finite number"
                    );
                    return Err(ModelError::module(&plan.module, reason));
                }
                changed += usize::from(scales.windows(2).any(|w| w[0] != w[1]));
            }
            let line = load::requantized(&plan.module, changed, plan.experts.len(), rule);
            Ok(Ok(line.into_iter().collect()))
        }
        _ => Ok(Ok(Vec::new())),
    }
}
