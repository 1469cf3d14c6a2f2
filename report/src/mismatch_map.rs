//! A grid of mismatch counts as an inline SVG: a path per level of the colour scale, axes, lines,
//! and a ring around the first mismatch. The SVG holds only numbers and fixed words, so nothing
//! needs escaping.

use marlinspike::check::Grid;

use crate::svg::Svg;

/// The colour scale: wrong values as a share of a cell's values. A level includes its lower bound.
pub(crate) const LEVELS: [&str; 5] = ["below 1 %", "1 to 10 %", "10 to 50 %", "over 50 %", "all"];

/// Room for axis labels, in pixels.
const LEFT: usize = 62;
/// Largest plot and largest cell, in pixels.
const MAX_WIDTH: f64 = 448.0;
const MAX_HEIGHT: f64 = 320.0;
const MAX_CELL: f64 = 24.0;
/// Least distance between two lines, in pixels.
const MIN_LINES: usize = 12;

/// What to draw.
pub(crate) struct Drawing<'g> {
    pub(crate) grid: &'g Grid,
    /// Values per unit of the rectangle: 1 in a plane, codes per element in the buffer.
    pub(crate) density: f64,
    /// Labels of the axes.
    pub(crate) rows: &'g str,
    pub(crate) cols: &'g str,
    /// Distance between lines along rows and columns; `None` draws no lines.
    pub(crate) lines: [Option<usize>; 2],
    /// Row and column of the first mismatch.
    pub(crate) mark: Option<(usize, usize)>,
    /// Text for screen readers.
    pub(crate) label: String,
}

/// An axis of the plot.
struct Axis {
    len: usize,
    cells: usize,
    /// Pixels per cell.
    px: f64,
}

impl Axis {
    fn new(len: usize, cells: usize, max: f64) -> Self {
        Self { len: len.max(1), cells, px: (max / cells.max(1) as f64).min(MAX_CELL) }
    }

    /// Length in pixels.
    fn pixels(&self) -> usize {
        (self.cells as f64 * self.px).round() as usize
    }

    /// Pixel of a position between 0 and `len`.
    fn at(&self, position: f64) -> f64 {
        position * self.pixels() as f64 / self.len as f64
    }

    /// Positions between 0 and `len` and indices of the ticks: every index if there are at most ten,
    /// else multiples of a power of two.
    fn ticks(&self) -> Vec<(f64, usize)> {
        if self.len <= 10 {
            return (0..self.len).map(|i| (i as f64 + 0.5, i)).collect();
        }
        let step = self.len.div_ceil(6).next_power_of_two();
        (0..=self.len).step_by(step).map(|i| (i as f64, i)).collect()
    }

    /// The distance between drawn lines: a multiple of `every` that leaves room between them.
    fn lines(&self, every: usize) -> usize {
        let mut step = every.max(1);
        while step < self.len && self.at(step as f64) < MIN_LINES as f64 {
            step *= 2;
        }
        step
    }

    /// Rows or columns that cell `i` covers.
    fn covered(&self, i: usize) -> usize {
        ((i + 1) * self.len).div_ceil(self.cells) - (i * self.len).div_ceil(self.cells)
    }
}

impl Drawing<'_> {
    fn axes(&self) -> [Axis; 2] {
        let g = self.grid;
        let y = Axis::new(g.rows, g.cell_rows, MAX_HEIGHT);
        [y, Axis::new(g.cols, g.cell_cols, MAX_WIDTH)]
    }

    /// Distance between drawn lines along each axis; `None` without lines.
    pub(crate) fn line_steps(&self) -> [Option<usize>; 2] {
        let axes = self.axes();
        [0, 1].map(|d| {
            let step = axes[d].lines(self.lines[d]?);
            (step < axes[d].len).then_some(step)
        })
    }

    /// Rows and columns of the rectangle that a cell covers, rounded up.
    pub(crate) fn cell(&self) -> [usize; 2] {
        let g = self.grid;
        [g.rows.div_ceil(g.cell_rows.max(1)), g.cols.div_ceil(g.cell_cols.max(1))]
    }

    /// The `<svg>` element.
    pub(crate) fn render(&self) -> String {
        let [y, x] = &self.axes();
        let mut out = Svg::new(LEFT, (x.pixels() as f64).max(64.0), y.pixels() as f64, &self.label);
        out.rect("plot");
        let cells = self.grid.counts.chunks(self.grid.cell_cols.max(1));
        let levels = cells.enumerate().map(|(r, row)| {
            let values = |c| (y.covered(r) * x.covered(c)) as f64 * self.density;
            row.iter().enumerate().map(|(c, &count)| level(count, values(c))).collect()
        });
        out.cells("l", [y.cells, x.cells], levels);
        let steps = self.line_steps();
        for p in steps[0].iter().flat_map(|&s| (s..y.len).step_by(s)) {
            out.line_y(y.at(p as f64));
        }
        for p in steps[1].iter().flat_map(|&s| (s..x.len).step_by(s)) {
            out.line_x(p as f64 / x.len as f64);
        }
        out.rect("frame");
        out.ticks_x(x.ticks().into_iter().map(|(at, name)| (at / x.len as f64, name)));
        for (at, name) in y.ticks() {
            out.tick_y(y.at(at), name);
        }
        out.name_x(self.cols);
        out.push(format_args!(
            "<text transform=\"translate(-48 {}) rotate(-90)\" class=\"x axis\">{}</text>",
            y.pixels() / 2,
            self.rows
        ));
        if let Some((row, col)) = self.mark.filter(|&(r, c)| r < y.len && c < x.len) {
            // The ring surrounds the cell that counts the mismatch.
            let centre = |a: &Axis, p: usize| (p * a.cells / a.len) as f64 + 0.5;
            out.ring(centre(x, col) / x.cells as f64, centre(y, row) * y.px, [x.px, y.px]);
        }
        out.finish()
    }
}

/// The colour level of `count` mismatches among `values`; `None` without a mismatch.
fn level(count: u32, values: f64) -> Option<usize> {
    let share = f64::from(count) / values.max(1.0);
    match share {
        _ if count == 0 => None,
        s if s >= 1.0 => Some(4),
        s if s > 0.5 => Some(3),
        s if s > 0.1 => Some(2),
        s if s >= 0.01 => Some(1),
        _ => Some(0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_at_their_bounds() {
        let levels = [0, 1, 9, 10, 100, 101, 500, 501, 999, 1000].map(|n| level(n, 1000.0));
        let expected = [None, Some(0), Some(0), Some(1), Some(1), Some(2), Some(2), Some(3)];
        assert_eq!(levels[..8], expected);
        assert_eq!(levels[8..], [Some(3), Some(4)]);
    }

    #[test]
    fn cells_cover_every_row_once() {
        for len in [1, 5, 128, 129, 200, 1000] {
            let axis = Axis::new(len, len.min(128), MAX_WIDTH);
            let covered: Vec<_> = (0..axis.cells).map(|i| axis.covered(i)).collect();
            assert_eq!(covered.iter().sum::<usize>(), len);
            // Assigns rows to cells as the plot does.
            let mut counted = vec![0; axis.cells];
            (0..len).for_each(|row| counted[row * axis.cells / len] += 1);
            assert_eq!(covered, counted);
        }
    }

    #[test]
    fn draws_runs_and_marks_the_first() {
        let mut counts = vec![0; 12];
        counts[5..8].fill(1);
        let grid = Grid { rows: 3, cols: 4, cell_rows: 3, cell_cols: 4, counts };
        let drawing = Drawing {
            grid: &grid,
            density: 1.0,
            rows: "k",
            cols: "n",
            lines: [Some(1), Some(2)],
            mark: Some((1, 1)),
            label: "test".to_owned(),
        };
        let svg = drawing.render();
        // One run of three cells, in row 1 from column 1 on; every value wrong.
        assert!(svg.contains("viewBox=\"0 0 4 3\"") && svg.contains("max-width:176px"));
        assert!(svg.contains("<path class=\"l4\" d=\"M1 1h3v1h-3z\"/>"));
        assert!(svg.contains("class=\"mark\" cx=\"37.500%\" cy=\"36.0\""));
        assert_eq!(drawing.line_steps(), [Some(1), Some(2)]);
    }
}
