//! What preparation does to a model's experts: sizes rounded up, and what has to be said of scales.

use marlinspike::checkpoint::nvfp4::W13Scale;
use marlinspike::config::{FloatContainer, ScaleStrategy, Scheme};
use marlinspike::dims::Shape;
use marlinspike::prepare::gpt_oss::GptOssShard;
use marlinspike::prepare::pad::Mxfp4Backend;
use marlinspike::select::Platform;

use super::stack::StackInfo;
use super::{Format, Settings, StackPlan};
use crate::convert::parallel::Ranks;
use crate::load;
use crate::model::bind::Part;
use crate::model::layers::{Role, Stack};
use crate::model::{Model, ModelError, values};

/// gpt-oss's experts on this rank, if their sizes are to be rounded up: the rank, and the shape of
/// each expert's matrix in the kernel.
///
/// # Errors
/// The reason against, where a size cannot be cut or rounded.
pub(super) fn padding(
    stack: &Stack,
    info: &StackInfo,
    settings: &Settings,
) -> Result<Option<(GptOssShard, Shape)>, String> {
    let gpt_oss = matches!(stack.scheme, Scheme::Mx { container: FloatContainer::GptOss, .. });
    if !gpt_oss || !settings.preparation.padding || settings.format != Format::Marlin {
        return Ok(None);
    }
    let ranks = if settings.ep.size > 1 { Ranks::ONE } else { settings.tp };
    let size_n = info.sizes_n.iter().sum::<usize>();
    let [hidden_size, intermediate_size] = match stack.role {
        Role::W13 => [info.size_k, size_n / 2],
        _ => [size_n, info.size_k],
    };
    let shard = GptOssShard {
        hidden_size,
        intermediate_size,
        tp_size: ranks.size,
        tp_rank: ranks.rank,
        backend: Mxfp4Backend::Marlin,
        platform: Platform::Cuda,
    };
    let [hidden, inner] = shard.sizes().map_err(|e| e.to_string())?;
    let shape = match stack.role {
        Role::W13 => Shape::new(hidden, 2 * inner),
        _ => Shape::new(inner, hidden),
    };
    Ok(Some((shard, shape)))
}

/// What preparation changes in the numbers of a planned stack, in sentences; or the reason against,
/// where the format cannot hold what was asked for.
///
/// # Errors
/// [`ModelError`] for scales that are missing or no positive finite numbers: the data is bad, which
/// `--skip-unsupported` must not hide.
pub(super) fn notes(
    model: &Model<'_>,
    plan: &StackPlan,
    settings: &Settings,
) -> Result<Result<Vec<String>, String>, ModelError> {
    if plan.role != Role::W13 || matches!(settings.format, Format::Kleidi { .. }) {
        return Ok(Ok(Vec::new()));
    }
    let bad = |e: marlinspike::Error| ModelError::module(&plan.module, e);
    match (&plan.scheme, settings.preparation.requantize) {
        (Scheme::Nvfp4 { container, .. }, _) => {
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
                let scale = load::merged(model, matrices, Part::Scale, &plan.k, &plan.n);
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
