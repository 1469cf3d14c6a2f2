//! Maps parts of a checkpoint's tensor to parts of a rank's parameter.
//!
//! Upstream's loaders slice a tensor of any size. Here the tensor must have exactly the size that
//! the layer implies, so a wrong file is an error.

use std::ops::Range;

use super::{LayerError, LinearShard, MoeShard, Parallel, ParamSpec, Role, ScaleKind};
use crate::{Error, Result};

/// A copy from a full tensor into a parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slice {
    /// Part of the tensor as the file stores it, one range per dimension.
    pub source: Vec<Range<usize>>,
    /// Part of the parameter (of MoE layers: of one expert's parameter), one range per dimension.
    /// Empty for a scalar.
    pub dest: Vec<Range<usize>>,
    /// Whether the copy transposes the part.
    pub transpose: bool,
}

/// One of an expert's matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ExpertMatrix {
    /// Gate: the first half of w13.
    W1,
    /// Down.
    W2,
    /// Up: the second half of w13 (all of it without a gate).
    W3,
}

fn check_rank(rank: usize, size: usize) -> Result<(), LayerError> {
    if rank < size { Ok(()) } else { Err(LayerError::Rank { what: "tp_rank", rank, size }) }
}

fn whole(shape: &[usize]) -> Vec<Range<usize>> {
    shape.iter().map(|&d| 0..d).collect()
}

fn wrong(spec: &ParamSpec, found: &[usize], expected: &[usize]) -> Error {
    Error::shape(spec.name, found, format!("{expected:?}"))
}

/// The slice of a linear layer's tensor for one rank. `part` is the merged matrix that the
/// tensor belongs to (0 when nothing is merged); `full` the tensor's shape in the file.
///
/// # Errors
/// [`LayerError::Rank`]; [`Error::Shape`] with the expected shape if `full` is not what the layer
/// implies; [`Error::Size`] if `part` does not exist.
pub fn linear(
    spec: &ParamSpec,
    shard: &LinearShard,
    part: usize,
    full: &[usize],
    tp_rank: usize,
) -> Result<Slice> {
    check_rank(tp_rank, shard.tp_size)?;
    let Some(&this) = shard.parts.get(part) else {
        return Err(Error::size("part", part, format!("below {}", shard.parts.len())));
    };
    let per_part =
        matches!(spec.role, Role::InputScale) || spec.role == Role::Scale(ScaleKind::Tensor);
    if per_part {
        // A scale per merged matrix: a scalar, or a tensor of one element.
        if full.iter().any(|&d| d != 1) || full.len() > 1 {
            return Err(wrong(spec, full, &[1]));
        }
        let dest = std::iter::once(part..part + 1).collect();
        return Ok(Slice { source: whole(full), dest, transpose: false });
    }
    let mut slice = Slice { source: whole(full), dest: whole(&spec.shape), transpose: false };
    let mut expected = spec.shape.clone();
    if let Some(d) = spec.output_dim {
        let unit = |size: usize| match (spec.packed, spec.block) {
            (Some(p), _) if p.dim == d => size / p.factor,
            (_, Some([block_n, _])) => size.div_ceil(block_n),
            _ => size,
        };
        let before = shard.parts[..part].iter().fold(0usize, |a, p| a.saturating_add(p.per_rank));
        let (start, len) = (unit(before), unit(this.per_rank));
        slice.dest[d] = start..start.saturating_add(len);
        expected[d] = unit(this.full);
        let at = match shard.parallel {
            Parallel::Column => (tp_rank / this.replicas.max(1)).saturating_mul(len),
            Parallel::Replicated | Parallel::Row => 0,
        };
        if let Some(source) = slice.source.get_mut(d) {
            *source = at..at.saturating_add(len);
        }
    }
    if let (Some(d), Parallel::Row) = (spec.input_dim, shard.parallel) {
        let len = spec.shape[d];
        expected[d] = match (spec.packed, spec.block) {
            (Some(p), _) if p.dim == d => shard.input_size / p.factor,
            (_, Some([_, block_k])) => shard.input_size.div_ceil(block_k),
            _ => len * shard.tp_size,
        };
        if let Some(source) = slice.source.get_mut(d) {
            *source = len.saturating_mul(tp_rank)..len.saturating_mul(tp_rank + 1);
        }
    }
    let inside = slice.source.iter().zip(full).all(|(r, &d)| r.end <= d);
    if expected != full || !inside {
        return Err(wrong(spec, full, &expected));
    }
    Ok(slice)
}

/// The slice of one expert's tensor for one rank, into that expert's part of the parameter.
/// `full` is the tensor's shape in the file. `None` for parameters that are not loaded.
///
/// # Errors
/// [`LayerError::Rank`]; [`Error::Shape`] when `full` is not what the layer implies;
/// [`Error::Unsupported`] when the matrix does not belong to the parameter.
pub fn expert(
    spec: &ParamSpec,
    shard: &MoeShard,
    matrix: ExpertMatrix,
    full: &[usize],
    tp_rank: usize,
) -> Result<Option<Slice>> {
    check_rank(tp_rank, shard.tp_size)?;
    let w2 = matrix == ExpertMatrix::W2;
    if spec.name.starts_with("w2_") != w2 || (matrix == ExpertMatrix::W1 && !shard.is_act_and_mul) {
        return Err(Error::unsupported(
            format!("{matrix:?} into {}", spec.name),
            "the parameter holds another matrix",
        ));
    }
    // Position inside w13: gate, then up.
    let half = usize::from(matrix == ExpertMatrix::W3 && shard.is_act_and_mul);
    let local = &spec.shape[1.min(spec.shape.len())..];
    match spec.role {
        Role::SortIndices | Role::Placeholder => return Ok(None),
        Role::Scale(ScaleKind::Tensor) | Role::InputScale => {
            if full.iter().any(|&d| d != 1) || full.len() > 1 {
                return Err(wrong(spec, full, &[1]));
            }
            let dest = local.iter().map(|_| half..half + 1).collect();
            return Ok(Some(Slice { source: whole(full), dest, transpose: false }));
        }
        _ => {}
    }
    // Dimension of the intermediate size in one expert's parameter, if it is cut at all.
    let cut = match (spec.role, w2) {
        (Role::WeightShape, _) | (Role::GroupIndex, false) | (Role::Bias, true) => None,
        (Role::GroupIndex, true) | (Role::Bias, false) => Some(0),
        // Channel-wise scales of w2 are one per hidden feature: every rank has them all.
        (Role::Scale(ScaleKind::Channel), true) => None,
        (_, true) if spec.load_full_w2 => None,
        (_, w2) => Some(usize::from(w2 != spec.is_transposed)),
    };
    let mut dest = whole(local);
    let mut source = whole(local);
    let mut expected = local.to_vec();
    if let Some(d) = cut {
        let halves = if w2 || spec.role == Role::GroupIndex { 1 } else { shard.w13_num_shards() };
        let len = local[d] / halves;
        // Checked once: every product below is at most this one.
        expected[d] = len
            .checked_mul(shard.tp_size)
            .ok_or(LayerError::Overflow { what: "intermediate_size" })?;
        dest[d] = half * len..(half + 1) * len;
        source[d] = tp_rank * len..(tp_rank + 1) * len;
    }
    let transpose = spec.transpose_on_load && local.len() == 2;
    if transpose {
        source.reverse();
        expected.reverse();
    }
    if full != expected {
        return Err(wrong(spec, full, &expected));
    }
    Ok(Some(Slice { source, dest, transpose }))
}
