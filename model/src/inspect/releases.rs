//! What a newer release of vLLM decides differently for the layers of a model.

use std::ops::Range;

use marlinspike::select::release::{Layer, Question, changes};
use marlinspike::select::{LinearDesc, MoeDesc, Options, Release};

use crate::convert::settings::Settings;
use crate::convert::stack::info::{StackInfo, cut, kv_heads};
use crate::model::layers::{Role, Stack};
use crate::model::{Model, ModelError};

/// One answer that differs between vLLM 0.21.0, which `inspect` follows, and a newer release.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UpstreamChange {
    /// The newer release.
    pub release: Release,
    /// The question.
    pub question: Question,
    /// The answer of vLLM 0.21.0.
    pub before: String,
    /// The newer release's answer.
    pub after: String,
    /// The layers; for experts the module of all of them.
    pub modules: Vec<String>,
}

/// The changes of `release` for `stacks` on one rank, layers with the same change together.
///
/// # Errors
/// [`ModelError`] for tensors that do not fit together.
pub(super) fn of(
    model: &Model<'_>,
    stacks: &[Stack],
    settings: &Settings,
    release: Release,
) -> Result<Vec<UpstreamChange>, ModelError> {
    let mut all: Vec<UpstreamChange> = Vec::new();
    for stack in stacks.iter().filter(|s| s.role != Role::W2) {
        let Some(layer) = layer(model, stack, settings)? else { continue };
        let releases = [Release::V0_21, release];
        for change in changes(releases, &stack.scheme, &layer, &settings.device) {
            let same = |c: &&mut UpstreamChange| {
                (c.question, &c.before, &c.after)
                    == (change.question, &change.before, &change.after)
            };
            match all.iter_mut().find(same) {
                Some(known) => known.modules.push(stack.module.clone()),
                None => all.push(UpstreamChange {
                    release,
                    question: change.question,
                    before: change.before,
                    after: change.after,
                    modules: vec![stack.module.clone()],
                }),
            }
        }
    }
    Ok(all)
}

/// This rank's part of the layer; `None` if it cannot be cut, which the verdicts state.
fn layer(
    model: &Model<'_>,
    stack: &Stack,
    settings: &Settings,
) -> Result<Option<Layer>, ModelError> {
    let first: &[usize] = if stack.experts.is_empty() { &[] } else { &[0] };
    let info = StackInfo::bind(model, stack, first)?;
    let Ok((k, n)) = cut(stack, &info, kv_heads(model), settings) else { return Ok(None) };
    let size_n = n.iter().map(Range::len).sum::<usize>();
    Ok(Some(match stack.role {
        Role::Dense => Layer::Linear(LinearDesc {
            input_size: info.size_k,
            input_size_per_partition: k.len(),
            output_size_per_partition: size_n,
            options: Options::default(),
        }),
        _ => {
            let halves = if stack.has_gate() { 2 } else { 1 };
            Layer::Experts(MoeDesc::new(info.size_k, size_n / halves), settings.ep.size)
        }
    }))
}
