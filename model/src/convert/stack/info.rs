//! A stack whose tensors have been located, and a rank's part of it.

use std::ops::Range;

use marlinspike::config::Scheme;
use marlinspike::select::check_rank_groups;

use crate::convert::parallel::{self, Ranks, Style};
use crate::convert::settings::Settings;
use crate::model::bind::{self, Axis, Bound, Part};
use crate::model::layers::{Matrix, Role, Stack};
use crate::model::routing::MoeRouting;
use crate::model::{Model, ModelError};

/// A stack whose tensors have been located, before it is cut to a rank.
pub(crate) struct StackInfo {
    pub(crate) experts: Vec<Vec<Bound>>,
    /// K of the whole layer, and N of each matrix.
    pub(crate) size_k: usize,
    pub(crate) sizes_n: Vec<usize>,
    pub(crate) has_bias: bool,
    /// Rows of the scale table in the file, under act-order.
    pub(crate) file_groups: usize,
}

impl StackInfo {
    pub(crate) fn bind(
        model: &Model<'_>,
        stack: &Stack,
        ids: &[usize],
    ) -> Result<Self, ModelError> {
        let fail = |reason: String| Err(ModelError::module(&stack.module, reason));
        let mut experts = Vec::with_capacity(ids.len());
        for &e in ids {
            let row = stack.experts[e].iter().map(|m| Bound::find(model, &stack.scheme, m));
            experts.push(row.collect::<Result<Vec<_>, _>>()?);
        }
        let Some(first) = experts.first() else {
            return fail("no expert on this rank".to_owned());
        };
        bind::expect_alike(&experts, Bound::difference)
            .map_err(|reason| ModelError::module(&stack.module, reason))?;
        for row in &experts {
            if let Some(other) = row.iter().find(|b| b.shape.size_k != row[0].shape.size_k) {
                let (a, b) = (&row[0], other);
                let found = format!("`{}` is {}, `{}` {}", a.name, a.shape, b.name, b.shape);
                return fail(format!("{found}: both need the same K"));
            }
        }
        let dim = match &stack.scheme {
            Scheme::Wna16(w) if w.checkpoint_format.columns_first => 1,
            _ => 0,
        };
        let scale = first[0].get(Part::Scale);
        Ok(Self {
            size_k: first[0].shape.size_k,
            sizes_n: first.iter().map(|b| b.shape.size_n).collect(),
            has_bias: first[0].get(Part::Bias).is_some(),
            file_groups: scale.and_then(|f| f.shape.get(dim).copied()).unwrap_or(1),
            experts,
        })
    }
}

/// The reason why a stack of several groups of experts, which tokens select by their type, is no stack:
/// the groups' experts have different sizes.
///
/// # Errors
/// As [`Bound::find`].
pub(crate) fn several_sizes(
    model: &Model<'_>,
    stack: &Stack,
) -> Result<Option<String>, ModelError> {
    let groups = match stack.role {
        Role::Dense => 1,
        // Of a config that cannot be read, the routing is the error.
        _ => MoeRouting::token_groups(model, &stack.module).unwrap_or(1),
    };
    if groups < 2 {
        return Ok(None);
    }
    let first = stack.experts.iter().step_by((stack.experts.len() / groups).max(1));
    let shape = |row: &Vec<Matrix>| Bound::find(model, &stack.scheme, &row[0]).map(|b| b.shape);
    let shapes = first.map(shape).collect::<Result<Vec<_>, _>>()?;
    let other = shapes.iter().find(|shape| **shape != shapes[0]);
    Ok(other.map(|other| {
        format!("experts of {} and of {other} for different types of tokens", shapes[0])
    }))
}

/// The rank's part of a layer's matrices: rows, and columns of each matrix.
pub(crate) type Cut = (Range<usize>, Vec<Range<usize>>);

pub(crate) fn cut(
    stack: &Stack,
    info: &StackInfo,
    kv_heads: Option<usize>,
    settings: &Settings,
) -> Result<Cut, String> {
    let whole_n = || info.sizes_n.iter().map(|&n| 0..n).collect::<Vec<_>>();
    let columns = |ranks: Ranks| {
        info.sizes_n.iter().map(|&n| parallel::cut("size_n", n, ranks)).collect::<Result<_, _>>()
    };
    let tp = settings.tp;
    if tp.size == 1 || (stack.role != Role::Dense && settings.ep.size > 1) {
        return Ok((0..info.size_k, whole_n()));
    }
    if stack.role == Role::Dense && info.sizes_n.len() > 1 {
        // Every part of a merged layer is cut on its own.
        let part = |(matrix, &n): (&Matrix, &usize)| match Style::of(&matrix.name()) {
            Style::KeyValue => parallel::cut_heads(n, kv_heads, tp),
            _ => parallel::cut("size_n", n, tp),
        };
        let n = stack.experts[0].iter().zip(&info.sizes_n).map(part);
        return Ok((0..info.size_k, n.collect::<Result<_, _>>()?));
    }
    let style = match stack.role {
        Role::W13 => Style::Column,
        Role::W2 => Style::Row,
        Role::Dense => Style::of(&stack.module),
    };
    match style {
        Style::Replicated => Ok((0..info.size_k, whole_n())),
        Style::Column => Ok((0..info.size_k, columns(tp)?)),
        Style::KeyValue => {
            let n = parallel::cut_heads(info.sizes_n[0], kv_heads, tp)?;
            Ok((0..info.size_k, vec![n]))
        }
        Style::Row => {
            let k = parallel::cut("size_k", info.size_k, tp)?;
            // Under act-order every rank has all scales.
            if !bind::act_order(&stack.scheme) {
                let group_size = bind::group_size(&stack.scheme, info.size_k);
                let found = check_rank_groups(info.size_k, k.len(), group_size);
                found.map_err(|e| format!("tp_size = {}: {e}", tp.size))?;
            }
            Ok((k, whole_n()))
        }
        Style::Merged => {
            Err("several matrices in one tensor: how to cut them for tp_size > 1 is unknown".into())
        }
    }
}

/// The reasons why columns of FP8 blocks cannot be cut: each block of several columns must be on
/// one rank and in one matrix.
pub(crate) fn cut_blocks(info: &StackInfo, n: &[Range<usize>], tp_size: usize) -> Vec<String> {
    let scale = info.experts[0][0].get(Part::Scale).and_then(|f| f.binding.n);
    let Some(Axis { unit, .. }) = scale.filter(|axis| axis.unit > 1) else { return Vec::new() };
    if n.len() == 1 && tp_size == 1 {
        return Vec::new();
    }
    let ends = |at: usize| at.is_multiple_of(unit);
    // Only the last block of a whole matrix may be smaller.
    let last = |r: &Range<usize>| n.len() == 1 && info.sizes_n.first() == Some(&r.end);
    let cut = n.iter().filter(|r| !ends(r.start) || !(ends(r.end) || last(r)));
    let word = |r: &Range<usize>| if ends(r.start) { "end" } else { "begin" };
    cut.map(|r| format!("columns {r:?} do not {} with a block of {unit}", word(r))).collect()
}

/// `num_key_value_heads` of the config.
pub(crate) fn kv_heads(model: &Model<'_>) -> Option<usize> {
    let heads = model.config_value("num_key_value_heads")?.as_u64()?;
    usize::try_from(heads).ok()
}
