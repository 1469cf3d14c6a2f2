//! Where wrong values are, in words: rows, columns, and repeated parts of them.

use std::collections::BTreeSet;

use super::Diagnosis;

/// One direction of a matrix.
pub(crate) struct Axis<'a> {
    /// The wrong positions.
    pub(crate) wrong: &'a BTreeSet<usize>,
    /// The number of positions.
    pub(crate) len: usize,
    /// What one position is called: `row`.
    pub(crate) one: &'a str,
    /// What several are called: `rows`.
    pub(crate) many: &'a str,
}

/// Most ranges that are listed.
const RANGES: usize = 3;

impl Axis<'_> {
    /// The wrong positions, where they are fewer than all: `rows 1 to 4`, `k 3 of every 16`.
    pub(crate) fn text(&self) -> Option<String> {
        let (wrong, one, many) = (self.wrong, self.one, self.many);
        if wrong.is_empty() || wrong.len() >= self.len {
            return None;
        }
        if let (1, Some(only)) = (wrong.len(), wrong.first()) {
            return Some(format!("{one} {only}"));
        }
        let ranges = ranges(wrong);
        if ranges.len() <= RANGES {
            return Some(format!("{many} {}", listed(&ranges)));
        }
        if let Some((part, period)) = self.period() {
            return Some(format!("{many} {part} of every {period}"));
        }
        (wrong.len() * 2 <= self.len).then(|| {
            let first = listed(&ranges[..RANGES]);
            format!("{} of {} {many} ({first}, ...)", wrong.len(), self.len)
        })
    }

    /// The part of each period that is wrong, where wrong positions repeat.
    fn period(&self) -> Option<(String, usize)> {
        let periods = (1..10).map(|shift| 1usize << shift).filter(|&p| 2 * p <= self.len);
        for period in periods {
            let part: BTreeSet<usize> = self.wrong.iter().map(|v| v % period).collect();
            if 2 * part.len() > period {
                continue;
            }
            let whole = (0..self.len).filter(|v| part.contains(&(v % period))).count();
            let ranges = ranges(&part);
            // A few positions may be right by chance.
            if self.wrong.len() * 8 >= whole * 7 && ranges.len() <= RANGES {
                return Some((listed(&ranges), period));
            }
        }
        None
    }
}

/// Where the `wrong` values of a matrix `[rows, cols]` are: `rows 1 to 4, column 7`, or in how many rows and
/// columns.
pub(crate) fn of_matrix(wrong: &[usize], [rows, cols]: [usize; 2]) -> String {
    let cols = cols.max(1);
    let row_set: BTreeSet<usize> = wrong.iter().map(|i| i / cols).collect();
    let col_set: BTreeSet<usize> = wrong.iter().map(|i| i % cols).collect();
    let parts = [
        Axis { wrong: &row_set, len: rows, one: "row", many: "rows" }.text(),
        Axis { wrong: &col_set, len: cols, one: "column", many: "columns" }.text(),
    ];
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    match parts.is_empty() {
        true => format!("{} of {rows} rows and {} of {cols} columns", row_set.len(), col_set.len()),
        false => parts.join(", "),
    }
}

/// The diagnosis of `wrong` values of a matrix `[rows, cols]` without a known cause.
pub(crate) fn diagnosis(wrong: &[usize], shape: [usize; 2]) -> Diagnosis {
    let at = of_matrix(wrong, shape);
    let text = match wrong.len() {
        1 => format!("the only wrong element is in {at}"),
        count => format!("all {count} wrong elements are in {at}"),
    };
    Diagnosis::place("place", text, wrong.len())
}

/// Runs of neighbours, ascending.
fn ranges(values: &BTreeSet<usize>) -> Vec<(usize, usize)> {
    let mut ranges: Vec<(usize, usize)> = Vec::new();
    for &value in values {
        match ranges.last_mut() {
            Some((_, end)) if *end + 1 == value => *end = value,
            _ => ranges.push((value, value)),
        }
    }
    ranges
}

fn listed(ranges: &[(usize, usize)]) -> String {
    let one = |&(a, b): &(usize, usize)| match b - a {
        0 => a.to_string(),
        1 => format!("{a}, {b}"),
        _ => format!("{a} to {b}"),
    };
    ranges.iter().map(one).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(wrong: impl IntoIterator<Item = usize>, len: usize) -> Option<String> {
        let wrong: BTreeSet<usize> = wrong.into_iter().collect();
        Axis { wrong: &wrong, len, one: "row", many: "rows" }.text()
    }

    #[test]
    fn positions_in_words() {
        let said = |wrong: Vec<usize>, len| text(wrong, len).expect("a text");
        assert_eq!(said(vec![5], 9), "row 5");
        assert_eq!(said(vec![1, 2, 3, 4], 9), "rows 1 to 4");
        assert_eq!(said(vec![0, 1, 4, 6, 7, 8], 64), "rows 0, 1, 4, 6 to 8");
        assert_eq!(said((0..64).filter(|v| v % 16 == 3).collect(), 64), "rows 3 of every 16");
        assert_eq!(said((0..64).filter(|v| v % 8 >= 6).collect(), 64), "rows 6, 7 of every 8");
        assert_eq!(said(vec![0, 7, 20, 31, 50], 99), "5 of 99 rows (0, 7, 20, ...)");
        // All of them, or most of them in no order.
        assert_eq!(text(0..9, 9), None);
        assert_eq!(text((0..64).filter(|v| v % 7 != 3), 64), None);
    }
}
