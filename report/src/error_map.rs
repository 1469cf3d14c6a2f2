//! The errors of a product as an inline SVG: a heat map whose cells show error over bound on a
//! logarithmic scale, with rows named by token and expert, and a strip of k that marks the part of
//! the sum that explains the errors.
//!
//! The SVG holds only numbers, fixed words and row names from the library, so nothing needs
//! escaping.

use marlinspike::check::{Cause, ErrorMap};

use crate::svg::Svg;

/// The colour scale: error over bound. A level includes its upper bound.
pub(crate) const LEVELS: [&str; 7] =
    ["to 0.01", "to 0.1", "to 1: right", "to 10: wrong", "to 100", "to 10⁴", "more, or no number"];

/// Left margin in pixels, without row names.
const LEFT: usize = 40;
/// Upper bound on the width of a character in pixels.
const CHARACTER: usize = 6;
const MAX_WIDTH: f64 = 512.0;
const MAX_HEIGHT: f64 = 384.0;
const MAX_CELL: f64 = 24.0;
/// Least distance between two names or lines, in pixels.
const MIN_NAMES: f64 = 13.0;

/// The level of an error over its bound.
fn level(ratio: f64) -> usize {
    let tops = [0.01, 0.1, 1.0, 10.0, 100.0, 1e4];
    // NaN gets the highest level.
    tops.iter().position(|&top| ratio <= top).unwrap_or(tops.len())
}

/// Named positions along an axis of `len`, a power of two apart.
fn ticks(len: usize) -> impl Iterator<Item = usize> {
    let step = if len <= 8 { 1 } else { len.div_ceil(8).next_power_of_two() };
    (0..len).step_by(step)
}

/// The plane of errors; `mark` is the first wrong element.
pub(crate) fn map(map: &ErrorMap, mark: Option<(usize, usize)>) -> String {
    let (rows, cols) = (map.cell_rows.max(1), map.cell_cols.max(1));
    let px = (MAX_WIDTH / cols as f64).min(MAX_CELL);
    let py = (MAX_HEIGHT / rows as f64).min(MAX_CELL);
    let (w, h) = ((px * cols as f64).round(), (py * rows as f64).round());
    let longest = map.names.iter().map(|name| name.chars().count()).max().unwrap_or(0);
    let label = "error over bound of each element of the product";
    let mut out = Svg::new(LEFT + CHARACTER * longest, w, h, label);
    let levels = map.largest.chunks(cols).map(|row| row.iter().map(|&x| Some(level(x))).collect());
    out.cells("e", [rows, cols], levels);
    out.rect("frame");
    let every = (MIN_NAMES / py).ceil().max(1.0) as usize;
    for (cell, name) in map.names.iter().enumerate().step_by(every) {
        out.tick_y((cell as f64 + 0.5) * py, name);
    }
    axis(&mut out, map.cols, "n");
    if let Some((row, n)) = mark.filter(|&(r, n)| r < map.rows && n < map.cols) {
        let x = ((n * cols / map.cols) as f64 + 0.5) / cols as f64;
        let y = ((row * rows / map.rows) as f64 + 0.5) * py;
        out.ring(x, y, [px, py]);
    }
    out.finish()
}

/// The strip of k; the ranges that explain the errors are filled.
pub(crate) fn strip(cause: &Cause) -> String {
    let mut out = Svg::new(LEFT, MAX_WIDTH, 22.0, "the part of k that explains the errors");
    out.rect("plot");
    let at = |k: usize| k as f64 / cause.size_k.max(1) as f64;
    for range in &cause.ranges {
        // A single k stays visible.
        out.band("e5", [at(range.start), at(range.end)], 2.0);
    }
    let group = cause.group_size.max(1);
    let pixels = at(group) * MAX_WIDTH;
    let step = group * ((MIN_NAMES / pixels.max(1e-9)).ceil().max(1.0) as usize);
    for k in (step..cause.size_k).step_by(step) {
        out.line_x(at(k));
    }
    out.rect("frame");
    axis(&mut out, cause.size_k, "k");
    out.finish()
}

fn axis(out: &mut Svg, len: usize, name: &str) {
    out.ticks_x(ticks(len).map(|i| (i as f64 / len.max(1) as f64, i)));
    out.name_x(name);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_at_their_bounds() {
        let ratios = [0.0, 0.01, 0.02, 1.0, 1.0f64.next_up(), 10.0, 99.0, 1e4, 1e9, f64::INFINITY];
        assert_eq!(ratios.map(level), [0, 0, 1, 2, 3, 3, 4, 5, 6, 6]);
        assert_eq!(level(f64::NAN), 6);
    }

    #[test]
    fn a_wrong_cell_and_its_cause_are_drawn() {
        let mut largest = vec![0.5; 8];
        largest[6] = 30.0;
        let names = ["row 0 (token 0, slot 0, expert 2)", "row 1 (token 0, slot 1, expert 0)"];
        let plane = ErrorMap {
            rows: 2,
            cols: 4,
            cell_rows: 2,
            cell_cols: 4,
            largest,
            names: names.map(str::to_owned).to_vec(),
            cause: None,
        };
        let svg = map(&plane, Some((1, 2)));
        assert!(svg.contains("<path class=\"e4\" d=\"M2 1h1v1h-1z\"/>"), "{svg}");
        assert!(svg.contains(names[1]) && svg.contains("cx=\"62.500%\" cy=\"36.0\""), "{svg}");
        let ranges = vec![64..128, 200..201];
        let svg = strip(&Cause { size_k: 256, group_size: 64, ranges });
        assert!(svg.contains("x=\"25.000%\" style=\"width:max(25.000%,2px)\""), "{svg}");
        assert!(svg.contains("x=\"78.125%\" style=\"width:max(0.391%,2px)\""), "{svg}");
        // Every group except the first starts with a line.
        assert_eq!(svg.matches("class=\"lines\"").count(), 3);
    }
}
