//! The members of a class of kernels: a sample of the output rules out most of them.

use super::stage::Stage;
use crate::Result;
use crate::judge::compare::elements;
use crate::judge::power::{Accepted, reach};
use crate::products::{Class, Convention};

/// Rows of each part of the sample that members are tried on.
const SAMPLE_ROWS: usize = 2;

/// The members of a class, compared with a sample of an output.
pub(super) struct Members {
    /// Members whose intervals contain the sample under one of the conventions, in the order of the
    /// class.
    pub(super) holding: Vec<Class>,
    /// The member that comes nearest to the sample.
    pub(super) nearest: Class,
}

/// Compares the members of `class` with a sample of the stage's output; `None` if the class has no
/// members or the stage has no rows.
pub(super) fn members(
    stage: &Stage<'_>,
    class: &Class,
    conventions: &[Convention],
) -> Result<Option<Members>> {
    let Some(part) = stage.parts.iter().find(|p| !p.rows.is_empty()) else { return Ok(None) };
    let members = class.members(part.weight.shape().size_k);
    if members.len() < 2 {
        return Ok(None);
    }
    let bits = elements(stage.found);
    let found: Vec<f64> = bits.iter().map(|&b| stage.dtype.to_f64(b)).collect();
    // For each member and convention: the number of elements outside their bounds, and the largest
    // error over bound.
    let mut distances = vec![vec![(0, 0f64); conventions.len()]; members.len()];
    for sample in stage.spread_samples(SAMPLE_ROWS)? {
        let bounds = sample.member_bounds(stage, (conventions, class), &members)?;
        for (distance, bounded) in distances.iter_mut().flatten().zip(bounds.iter().flatten()) {
            for (bound, &i) in bounded.iter().zip(&sample.places) {
                let ratio = bound.ratio(found[i]);
                distance.0 += usize::from(ratio > 1.0);
                distance.1 = distance.1.max(ratio);
            }
        }
    }
    let nearer = |a: (usize, f64), b: (usize, f64)| if b < a { b } else { a };
    let mut holding = Vec::new();
    let mut nearest: Option<((usize, f64), Class)> = None;
    for (member, all) in members.into_iter().zip(distances) {
        let distance = all.into_iter().fold((usize::MAX, f64::INFINITY), nearer);
        if nearest.as_ref().is_none_or(|n| distance < n.0) {
            nearest = Some((distance, member.clone()));
        }
        if distance.0 == 0 {
            holding.push(member);
        }
    }
    Ok(nearest.map(|(_, nearest)| Members { holding, nearest }))
}

/// The largest uniform error that turns a sample of the stage's output into one that a member of
/// `class` accepts under one of the conventions. Members that split k among blocks lie between those
/// that do not and promote or do not promote, since truncation grows with the length of a chain.
pub(super) fn scaled(
    stage: &Stage<'_>,
    class: &Class,
    conventions: &[Convention],
) -> Result<Option<f64>> {
    let Some(part) = stage.parts.iter().find(|p| !p.rows.is_empty()) else { return Ok(None) };
    let members = class.unsplit().members(part.weight.shape().size_k);
    let bits = elements(stage.found);
    let mut pairs = vec![vec![Vec::new(); conventions.len()]; members.len()];
    for sample in stage.spread_samples(1)? {
        let bounds = sample.member_bounds(stage, (conventions, class), &members)?;
        for (pairs, bounded) in pairs.iter_mut().flatten().zip(bounds.iter().flatten()) {
            let found = sample.places.iter().map(|&i| stage.dtype.to_f64(bits[i]));
            pairs.extend(found.zip(bounded.iter().map(Accepted::from)));
        }
    }
    let each = pairs.into_iter().flatten().filter_map(|pairs| reach(stage.dtype, pairs));
    Ok(each.reduce(f64::max))
}
