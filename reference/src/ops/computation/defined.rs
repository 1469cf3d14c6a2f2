//! Computations of any operation: their outputs, with or without a known mistake, and the comparison with
//! those of a case.

use super::causes;
use super::expected::{Computation, Expected, made};
use crate::Result;
use crate::judge::OutputReport;
use crate::ops::case::Case;

/// A [`Computation`] of any operation.
pub(crate) trait Defined {
    /// Every output, including those that the case lacks.
    ///
    /// # Errors
    /// Returns an error for inputs that the operation refuses.
    fn all_outputs(&self) -> Result<Vec<Expected>>;

    /// The outputs with mistake `id`, if their shapes are right and they differ from the right
    /// outputs.
    ///
    /// # Errors
    /// Returns an error for inputs that the operation refuses.
    fn shown(&self, id: &str) -> Result<Option<Vec<Expected>>>;

    /// Compares every output that the case has.
    ///
    /// # Errors
    /// Returns an error for inputs that the operation refuses.
    fn judge(&self, case: &Case<'_>) -> Result<Vec<OutputReport>>;
}

impl<C: Computation> Defined for C {
    fn all_outputs(&self) -> Result<Vec<Expected>> {
        self.outputs()
    }

    fn shown(&self, id: &str) -> Result<Option<Vec<Expected>>> {
        mistake_shown(self, id)
    }

    fn judge(&self, case: &Case<'_>) -> Result<Vec<OutputReport>> {
        bitwise(case, self)
    }
}

/// Compares every output that the case has.
pub(in crate::ops) fn bitwise<C: Computation>(
    case: &Case<'_>,
    computation: &C,
) -> Result<Vec<OutputReport>> {
    Ok(judge_some(case, computation, computation.outputs()?))
}

/// Compares those outputs of `computation` in `expected` that the case has.
pub(in crate::ops) fn judge_some<C: Computation>(
    case: &Case<'_>,
    computation: &C,
    expected: impl IntoIterator<Item = Expected>,
) -> Vec<OutputReport> {
    let has = |expected: Expected| case.output(&expected.name).map(|found| (expected, found));
    let pairs: Vec<_> = expected.into_iter().filter_map(has).collect();
    let mut candidates = causes::of_outputs(computation, &pairs);
    let judge = |(i, (expected, found)): (usize, (Expected, &_))| {
        expected.judge(found, std::mem::take(&mut candidates[i]))
    };
    let mut reports: Vec<OutputReport> = pairs.into_iter().enumerate().map(judge).collect();
    causes::follow(case, computation, &mut reports);
    reports
}

/// The outputs with mistake `id`, if their shapes are right and they differ from the right outputs.
fn mistake_shown<C: Computation>(right: &C, id: &str) -> Result<Option<Vec<Expected>>> {
    let Some(mistake) = C::mistakes().into_iter().find(|m| m.id == id) else { return Ok(None) };
    let expected = right.outputs()?;
    let shows = |wrong: &Vec<Expected>| {
        let pairs = || wrong.iter().zip(&expected);
        wrong.len() == expected.len()
            && pairs().all(|(w, e)| w.shape == e.shape)
            && pairs().any(|(w, e)| w.elements != e.elements)
    };
    Ok(made(right, &mistake).filter(shows))
}
