//! Patterns in the wrong values themselves, independent of the computation: values that were moved,
//! not written, or multiplied by a factor.

use std::collections::{BTreeSet, HashMap};

use super::mistake::{MARGIN, choice};
use super::{Diagnosis, OutputReport, Strength, Verdict, numbers, plain};
use crate::moe::narrow;
use crate::num::scalar::ScalarType;

/// Fewest values with the bits of another line, among right numbers, that were moved.
const MOVED: usize = 8;

/// Fewest right numbers that show another order of additions.
const FEW: usize = 8;

/// A matrix of 16-bit floats with its wrong values.
pub(crate) struct Values<'v> {
    pub(crate) ty: ScalarType,
    pub(crate) cols: usize,
    /// Bits, zero-extended.
    pub(crate) found: &'v [u32],
    pub(crate) expected: &'v [u32],
    /// Indices of those that are wrong, ascending.
    pub(crate) wrong: &'v [usize],
}

impl Values<'_> {
    /// Lines of wrong values that hold the bits of others, for values that are right numbers: zeros and
    /// factors are no evidence there, since small numbers may be lost in another order.
    fn explain_bits(&self) -> Option<Diagnosis> {
        let moved = || self.halves().or_else(|| self.moved(true)).or_else(|| self.moved(false));
        let (id, text) = match self.not_numbers() {
            Some(found) => found,
            None => moved().filter(|_| self.wrong.len() >= MOVED)?,
        };
        Some(Diagnosis::explains(id, text))
    }

    /// The pattern that all wrong values follow.
    pub(crate) fn explain(&self) -> Option<Diagnosis> {
        if let Some((id, text)) = self.not_numbers() {
            return Some(Diagnosis::explains(id, text));
        }
        let value = |i: usize| (self.ty.to_f64(self.found[i]), self.ty.to_f64(self.expected[i]));
        let pairs: Vec<(f64, f64)> = self.wrong.iter().map(|&i| value(i)).collect();
        if let Some((id, text)) =
            plain::floats(&pairs, self.found.iter().all(|&b| self.ty.to_f64(b) == 0.0))
        {
            return Some(Diagnosis::explains(id, format!("{text}: {}", self.extent())));
        }
        let (id, text) = self
            .halves()
            .or_else(|| self.moved(true))
            .or_else(|| self.moved(false))
            .or_else(|| self.multiplied())?;
        Some(Diagnosis::explains(id, text))
    }

    /// The rows and columns that all wrong values lie in.
    pub(crate) fn extent(&self) -> String {
        let span = |of: &dyn Fn(usize) -> usize, one: &str| {
            let all: BTreeSet<usize> = self.wrong.iter().map(|&i| of(i)).collect();
            let (lo, hi) = (all.first().copied().unwrap_or(0), all.last().copied().unwrap_or(0));
            let named = || all.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
            match all.len() {
                0 | 1 => format!("{one} {hi}"),
                n if n == hi - lo + 1 => format!("{one}s {lo} to {hi}"),
                n if n <= 4 => format!("{one}s {}", named()),
                n if all.iter().all(|at| at % 2 == lo % 2) => {
                    let parity = if lo % 2 == 0 { "even" } else { "odd" };
                    format!("{n} {parity} {one}s from {lo} to {hi}")
                }
                n => format!("{n} {one}s from {lo} to {hi}"),
            }
        };
        let (rows, cols) = (span(&|i| i / self.cols, "row"), span(&|i| i % self.cols, "column"));
        format!("all in {rows}, {cols}")
    }

    /// The number of wrong values and their location.
    pub(crate) fn place(&self) -> Option<Diagnosis> {
        let &first = self.wrong.first()?;
        let (count, total) = (self.wrong.len(), self.found.len());
        let text = match count {
            1 => {
                let (row, n) = (first / self.cols, first % self.cols);
                format!("the only wrong element is at row {row}, n {n}")
            }
            _ => format!("{count} of {total} elements are wrong: {}", self.extent()),
        };
        Some(Diagnosis::place("confined", text, count))
    }

    fn rows(&self) -> usize {
        self.found.len() / self.cols.max(1)
    }

    fn all(&self, holds: impl Fn(u32, u32) -> bool) -> bool {
        self.wrong.iter().all(|&i| holds(self.found[i], self.expected[i]))
    }

    fn not_numbers(&self) -> Option<(&'static str, String)> {
        let is_nan = |bits| self.ty.to_f64(bits).is_nan();
        let &first = self.wrong.first()?;
        self.all(|found, expected| is_nan(found) && is_nan(expected)).then(|| {
            let (found, expected) = (self.found[first], self.expected[first]);
            let text = format!(
                "NaN as it should be, but of other bits: {found:#06x} where {expected:#06x} is"
            );
            ("nan-bits", text)
        })
    }

    /// The left and right halves of each row are exchanged, as gate and up may be.
    fn halves(&self) -> Option<(&'static str, String)> {
        let half = self.cols / 2;
        let partner = |i: usize| i / self.cols * self.cols + (i % self.cols + half) % self.cols;
        let fits = self.cols.is_multiple_of(2)
            && self.wrong.len() > 2
            && self.wrong.iter().all(|&i| self.found[i] == self.expected[partner(i)])
            && self.wrong.chunk_by(|a, b| a / self.cols == b / self.cols).all(|row| {
                let row = row[0] / self.cols * self.cols;
                (row..row + self.cols).all(|i| self.found[i] == self.expected[partner(i)])
            });
        fits.then(|| ("halves-exchanged", "the halves of each row are exchanged".to_owned()))
    }

    /// Whole columns or rows that hold exactly the values of another wrong one.
    fn moved(&self, columns: bool) -> Option<(&'static str, String)> {
        let rows = self.rows();
        let line = |of: &[u32], at: usize| -> Vec<u32> {
            match columns {
                true => (0..rows).map(|row| of[row * self.cols + at]).collect(),
                false => of[at * self.cols..][..self.cols].to_vec(),
            }
        };
        let mut lines: Vec<usize> = self
            .wrong
            .iter()
            .map(|i| if columns { i % self.cols } else { i / self.cols })
            .collect();
        lines.sort_unstable();
        lines.dedup();
        if lines.len() < 2 {
            return None;
        }
        let mut owners: HashMap<Vec<u32>, usize> =
            lines.iter().map(|&at| (line(self.expected, at), at)).collect();
        // Each wrong line holds the content of one other line, and no two hold the same content.
        let moved: Vec<(usize, usize)> = lines
            .iter()
            .map(|&at| owners.remove(&line(self.found, at)).map(|from| (at, from)))
            .collect::<Option<_>>()?;
        let length = if columns { rows } else { self.cols };
        if !choice::is_specific(moved.len(), length, self.expected.iter().copied()) {
            return None;
        }
        let (id, what) = if columns { ("columns-moved", "column") } else { ("rows-moved", "row") };
        let text = match moved[..] {
            [(a, _), (b, _)] => format!("{what}s {a} and {b} are swapped"),
            _ => {
                let shown: Vec<_> =
                    moved.iter().take(4).map(|(at, from)| format!("{at} holds {from}")).collect();
                let dots = if moved.len() > 4 { ", ..." } else { "" };
                let shown = shown.join(", ");
                format!("{} {what}s are in another order: {shown}{dots}", moved.len())
            }
        };
        Some((id, text))
    }

    /// Whether the wrong values fill the rectangle of their rows and columns, except for zeros.
    fn is_rectangle(&self) -> bool {
        let mut rows: Vec<usize> = self.wrong.iter().map(|i| i / self.cols).collect();
        let mut cols: Vec<usize> = self.wrong.iter().map(|i| i % self.cols).collect();
        for lines in [&mut rows, &mut cols] {
            lines.sort_unstable();
            lines.dedup();
        }
        let mut all = rows.iter().flat_map(|row| cols.iter().map(move |n| row * self.cols + n));
        let changes = |i: usize| self.ty.to_f64(self.expected[i]).abs() > 0.0;
        all.all(|i| self.wrong.binary_search(&i).is_ok() || !changes(i))
    }

    /// A factor common to all wrong values, up to rounding.
    fn multiplied(&self) -> Option<(&'static str, String)> {
        let ratio = |i: usize| self.ty.to_f64(self.found[i]) / self.ty.to_f64(self.expected[i]);
        // The factor of the largest value has the smallest rounding error.
        let size = |i: usize| self.ty.to_f64(self.expected[i]).abs();
        let numbers =
            self.wrong.iter().copied().filter(|&i| ratio(i).is_finite() && ratio(i) != 0.0);
        let factor = ratio(numbers.max_by(|&a, &b| size(a).total_cmp(&size(b)))?);
        // Reject a factor that rounds to 1, which is only rounding, and one that turns values into
        // zeros.
        let unit = if self.ty == ScalarType::FLOAT16 { 2f64.powi(-10) } else { 2f64.powi(-7) };
        if self.wrong.len() < 4
            || !self.is_rectangle()
            || (factor.abs() - 1.0).abs() < 4.0 * unit && factor > 0.0
        {
            return None;
        }
        // A lost sign tells one bit of each value, another factor most of its digits.
        let digits = if self.ty == ScalarType::FLOAT16 { 8.0 } else { 5.0 };
        let each = if (factor.abs() - 1.0).abs() < 4.0 * unit { 1.0 } else { digits };
        let told = each * (self.wrong.len() - 1) as f64;
        if told < choice::of_rectangle(self.wrong, [self.rows(), self.cols]) + MARGIN {
            return None;
        }
        let fits = |i: usize| {
            let wanted = self.ty.to_f64(self.expected[i]) * factor;
            self.ty.steps(self.found[i], narrow(self.ty, wanted as f32).into()) <= 2.0
        };
        self.wrong.iter().all(|&i| fits(i)).then(|| {
            let factor = numbers::number(factor);
            ("multiplied", format!("each is {factor} times what belongs there"))
        })
    }
}

/// Whether right values are where another order of additions would have changed some as well: all
/// different values are in a few columns, or in a few rows.
fn is_confined(values: &Values<'_>) -> bool {
    let count = values.wrong.len() as f64;
    let lines = |of: &dyn Fn(usize) -> usize, total: usize| {
        let wrong = values.wrong.iter().map(|&i| of(i)).collect::<BTreeSet<_>>().len();
        let chance = count * (total as f64 / wrong.max(1) as f64).log2();
        chance >= choice::combinations(total, wrong) + MARGIN
    };
    lines(&|i| i % values.cols, values.cols) || lines(&|i| i / values.cols, values.rows())
}

/// Explains a report on differing bits without a diagnosis: by the bounds of the same output, by a
/// pattern of the values, or by their location. Takes over the errors that the bounds give.
pub(crate) fn explain(
    report: &mut OutputReport,
    values: &Values<'_>,
    bounded: Option<OutputReport>,
) {
    let mut place = None;
    // Bitwise right values may lie outside the bounds if the bounds are those of another
    // computation than the declared one.
    if let Some(bounded) = bounded.filter(|b| b.mismatches <= report.mismatches) {
        report.max_error_over_bound = bounded.max_error_over_bound;
        report.picture = report.picture.take().or(bounded.picture);
        let inside = report.mismatches - bounded.mismatches;
        match (bounded.verdict, bounded.diagnosis) {
            (Verdict::Pass, None) => {
                let most = bounded.max_error_over_bound.unwrap_or(0.0);
                let within = format!("every value is within its bound ({most:.3} of it at most)");
                // Another order changes values everywhere; a few tell nothing about their cause.
                place = Some(if values.wrong.len() < FEW || is_confined(values) {
                    let (count, total) = (values.wrong.len(), values.found.len());
                    let text = format!(
                        "{within}, but {count} of {total} differ from the declared order, {}; all \
                         others have every bit",
                        values.extent()
                    );
                    Diagnosis::place("within-bound", text, count)
                } else {
                    let text = "right numbers, added or rounded in another order than declared";
                    Diagnosis::explains("within-bound", format!("{within}: {text}"))
                });
            }
            (Verdict::Pass, Some(known)) => report.diagnosis = Some(known),
            (_, Some(known)) if known.unexplained < bounded.mismatches => {
                let unexplained = known.unexplained + inside;
                let strength = if inside > 0 { Strength::Consistent } else { known.strength };
                report.diagnosis = Some(Diagnosis { unexplained, strength, ..known });
            }
            (_, known) => {
                place = known.map(|d| Diagnosis { unexplained: report.mismatches, ..d });
            }
        }
    }
    if report.diagnosis.as_ref().is_none_or(|known| known.unexplained > 0) {
        let known = report.diagnosis.take();
        let within = place.as_ref().is_some_and(|d| d.id == "within-bound");
        let pattern = if within { values.explain_bits() } else { values.explain() };
        report.diagnosis = pattern.or(known).or(place).or_else(|| values.place());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROWS: usize = 3;
    const COLS: usize = 8;

    /// Distinct bf16 values from 1 on.
    fn expected() -> Vec<u32> {
        (0..ROWS * COLS).map(|i| 0x3f80 + i as u32).collect()
    }

    /// The name and text of the pattern that `make` produces from the right values.
    fn explained(make: impl FnOnce(&mut [u32])) -> Option<(String, String)> {
        let (expected, mut found) = (expected(), expected());
        make(&mut found);
        let wrong: Vec<usize> = (0..found.len()).filter(|&i| found[i] != expected[i]).collect();
        let ty = ScalarType::BFLOAT16;
        let values = Values { ty, cols: COLS, found: &found, expected: &expected, wrong: &wrong };
        values.explain().map(|d| {
            assert_eq!(d.unexplained, 0);
            (d.id, d.text)
        })
    }

    fn id(make: impl FnOnce(&mut [u32])) -> Option<String> {
        explained(make).map(|(id, _)| id)
    }

    #[test]
    fn places_that_changed() {
        let swap_columns =
            |v: &mut [u32]| (0..ROWS).for_each(|r| v.swap(r * COLS + 2, r * COLS + 5));
        let (id_of, text) = explained(swap_columns).expect("a pattern");
        assert_eq!((&*id_of, &*text), ("columns-moved", "columns 2 and 5 are swapped"));
        let rotate =
            |v: &mut [u32]| v.chunks_exact_mut(COLS).for_each(|row| row[1..4].rotate_left(1));
        let (id_of, text) = explained(rotate).expect("a pattern");
        let wanted = "3 columns are in another order: 1 holds 2, 2 holds 3, 3 holds 1";
        assert_eq!((&*id_of, &*text), ("columns-moved", wanted));
        let halves = |v: &mut [u32]| v.chunks_exact_mut(COLS).for_each(|row| row.rotate_left(4));
        assert_eq!(id(halves).as_deref(), Some("halves-exchanged"));
        // Also in a single row, and next to equal values.
        assert_eq!(id(|v| v[COLS..2 * COLS].rotate_left(4)).as_deref(), Some("halves-exchanged"));
        let (id_of, text) = explained(|v| v.rotate_left(COLS)).expect("a pattern");
        let wanted = "3 rows are in another order: 0 holds 1, 1 holds 2, 2 holds 0";
        assert_eq!((&*id_of, &*text), ("rows-moved", wanted));
    }

    #[test]
    fn values_that_changed() {
        let (id_of, text) = explained(|v| v[10..14].fill(0)).expect("a pattern");
        let wanted = "all wrong elements are zero: not written, or multiplied by zero: all in row 1, \
                      columns 2 to 5";
        assert_eq!((&*id_of, &*text), ("zeros", wanted));
        // A power of two, exactly; and 1.5 times, rounded.
        let twice = |v: &mut [u32]| v[..6].iter_mut().for_each(|b| *b += 0x80);
        assert_eq!(explained(twice).expect("a pattern").1, "each is 2 times what belongs there");
        let half_more = |v: &mut [u32]| {
            for b in v {
                let x = f32::from_bits(*b << 16) * 1.5;
                *b = (x.to_bits() + 0x7fff + (x.to_bits() >> 16 & 1)) >> 16;
            }
        };
        assert_eq!(id(half_more).as_deref(), Some("multiplied"));
    }

    #[test]
    fn no_pattern() {
        // One value alone, unrelated values, a column that holds another's without an exchange.
        assert_eq!(id(|v| v[3] = 0x4000), None);
        assert_eq!(id(|v| v.iter_mut().enumerate().for_each(|(i, b)| *b ^= (i * i) as u32)), None);
        assert_eq!(id(|v| (0..ROWS).for_each(|r| v[r * COLS] = v[r * COLS + 7])), None);
    }

    /// Which values are wrong must be said as well: a run of columns, not any of them.
    #[test]
    fn chosen_values() {
        let row: Vec<u32> = (0..64).map(|i| 0x3f80 + i).collect();
        let explained = |is_wrong: &dyn Fn(usize) -> bool, flip: u32| {
            let change = |(i, &b): (usize, &u32)| if is_wrong(i) { b ^ flip } else { b };
            let found: Vec<u32> = row.iter().enumerate().map(change).collect();
            let wrong: Vec<usize> = (0..64).filter(|&i| is_wrong(i)).collect();
            let ty = ScalarType::BFLOAT16;
            let values = Values { ty, cols: 64, found: &found, expected: &row, wrong: &wrong };
            values.explain().map(|d| d.id)
        };
        let any = |i: usize| i * i % 23 < 5;
        let run = |i: usize| (16..48).contains(&i);
        assert_eq!(explained(&any, 0x8000), None);
        assert_eq!(explained(&run, 0x8000).as_deref(), Some("multiplied"));
    }

    /// Another order of additions changes values of every column.
    #[test]
    fn other_orders_are_everywhere() {
        let right = vec![0x3f80u32; 48];
        let confined = |wrong: &[usize]| {
            let ty = ScalarType::BFLOAT16;
            is_confined(&Values { ty, cols: 16, found: &right, expected: &right, wrong })
        };
        assert!(confined(&[5, 21, 37]));
        assert!(!confined(&[0, 13, 22, 27, 35, 46]));
    }

    #[test]
    fn other_nan() {
        let (found, expected) = ([0xffff, 0x3f80], [0x7fff, 0x3f80]);
        let ty = ScalarType::BFLOAT16;
        let values = Values { ty, cols: 2, found: &found, expected: &expected, wrong: &[0] };
        let text = values.explain().expect("a pattern").text;
        assert_eq!(text, "NaN as it should be, but of other bits: 0xffff where 0x7fff is");
    }
}
