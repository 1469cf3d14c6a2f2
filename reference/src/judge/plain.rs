//! Plain descriptions of wrong values: zeros, NaN, infinities, one constant. They are facts, so
//! they precede any search for a known mistake.

use super::Diagnosis;
use super::subject::{Rows, Subject};
use crate::formats::float_type;

/// The ids of this module.
pub(crate) const NAMES: [&str; 5] = ["not-finite", "all-zeros", "zeros", "zero-sign", "constant"];

/// The fewest wrong zeros that were not written.
const FEW: usize = 4;

/// What all wrong floats have in common. `wrong` holds pairs (found, right); `is_zero` states
/// whether the whole output is zero.
pub(crate) fn floats(wrong: &[(f64, f64)], is_zero: bool) -> Option<(&'static str, String)> {
    let &(first, _) = wrong.first()?;
    let count = wrong.len();
    let all = |holds: &dyn Fn(f64, f64) -> bool| wrong.iter().all(|&(f, r)| holds(f, r));
    if all(&|f, _| !f.is_finite()) && wrong.iter().any(|&(f, r)| !(f.is_nan() && r.is_nan())) {
        let nan = wrong.iter().filter(|(f, _)| f.is_nan()).count();
        let text = match (count, nan) {
            (1, 1) => "the wrong element is NaN".to_owned(),
            (1, _) => "the wrong element is infinite".to_owned(),
            (_, 0) => format!("all {count} wrong elements are infinite"),
            _ if nan == count => format!("all {count} wrong elements are NaN"),
            _ => format!(
                "all {count} wrong elements are no numbers ({nan} NaN, {} infinite)",
                count - nan
            ),
        };
        return Some(("not-finite", text));
    }
    if all(&|f, r| f == 0.0 && r == 0.0) {
        return Some(("zero-sign", "the wrong elements are zeros of the other sign".to_owned()));
    }
    // A few zeros may be small numbers that were lost.
    if all(&|f, _| f == 0.0) && (is_zero || count >= FEW) {
        let text = if is_zero {
            "every element of the output is zero".to_owned()
        } else {
            "all wrong elements are zero: not written, or multiplied by zero".to_owned()
        };
        return Some((if is_zero { "all-zeros" } else { "zeros" }, text));
    }
    let distinct = wrong.iter().any(|&(_, r)| r != wrong[0].1);
    if count >= 8 && distinct && all(&|f, _| f == first) {
        return Some(("constant", format!("all {count} wrong elements are {first}")));
    }
    None
}

/// NaN in every wrong row of constant activations and nowhere else: the range of such a row, and
/// therefore its scale, is zero.
pub(crate) fn constant_rows(
    constant: &[bool],
    size_n: usize,
    wrong: &[usize],
    is_nan: impl Fn(usize) -> bool,
) -> Option<Diagnosis> {
    let here = |&i: &usize| constant.get(i / size_n.max(1)) == Some(&true) && is_nan(i);
    if wrong.is_empty() || !wrong.iter().all(here) {
        return None;
    }
    // All columns of each of these rows.
    let rows: std::collections::BTreeSet<usize> = wrong.iter().map(|i| i / size_n).collect();
    let whole = rows.iter().all(|row| (0..size_n).all(|n| is_nan(row * size_n + n)));
    let every = constant.iter().enumerate().all(|(row, c)| !c || rows.contains(&row));
    whole.then(|| {
        let which = if every { "every row" } else { "rows" };
        let text = format!(
            "{which} whose activations are all the same number {} NaN: the range of such a row is \
             zero, and was divided by",
            if every { "is" } else { "are" }
        );
        Diagnosis::explains("constant-row-nan", text)
    })
}

/// The same for stored bits: NaN, zeros, or one constant.
pub(crate) fn bits(subject: &Subject<'_>, found: &[u32], mismatches: usize) -> Option<Diagnosis> {
    let mask = u32::MAX >> (32 - subject.width);
    let value = |(element, bit): (usize, u32)| found[element] >> bit & mask;
    if is_nan_wherever_wrong(subject, found) {
        let everywhere = found.len() > 1 && mismatches == found.len();
        let text = match (mismatches, everywhere) {
            (_, true) => "NaN everywhere".to_owned(),
            (1, _) => "the wrong value is NaN".to_owned(),
            _ => format!("all {mismatches} wrong values are NaN"),
        };
        return Some(Diagnosis::explains("not-finite", text));
    }
    if subject.rows == Rows::List && subject.width > 16 || mismatches < 8 {
        return None;
    }
    let mut values = subject.differences(found).map(value);
    let first = values.next()?;
    values.all(|v| v == first).then(|| match first {
        0 => Diagnosis::explains("zeros", format!("all {mismatches} wrong values are zero")),
        _ => Diagnosis::explains(
            "constant",
            format!("all {mismatches} wrong values are {first:#x}, one value everywhere"),
        ),
    })
}

/// Whether the elements are floats, and all wrong ones NaN where a number belongs.
fn is_nan_wherever_wrong(subject: &Subject<'_>, found: &[u32]) -> bool {
    let Some(ty) = float_type(subject.found.dtype()) else { return false };
    let is_nan = |bits: u32| ty.to_f64(bits).is_nan();
    subject.width == subject.element_bits()
        && subject.differences(found).all(|(i, _)| is_nan(found[i]) && !is_nan(subject.expected[i]))
}
