//! Rows of quantized activations, interleaved for the kernels.

use super::PANELS;
use crate::w4a8::packed::{CHUNK, PIECE, PackedLhs, QuantizedRows, RhsLayout};

/// Largest number of rows of a panel.
pub const MAX_ROWS: usize = 8;

/// Calls `$function::<M, ...>(...)` with `M` = `$rows`, so that loops over a panel's rows have fixed
/// bounds. With `2..`, no function is compiled for a single row.
macro_rules! for_rows {
    (2.., $rows:expr, $($path:ident)::+ [$($more:literal)?] $arguments:tt) => {
        for_rows!(@ $rows, ($($path)::+), [$($more)?], $arguments, 2 3 4 5 6 7; 8)
    };
    ($rows:expr, $($path:ident)::+ [$($more:literal)?] $arguments:tt) => {
        for_rows!(@ $rows, ($($path)::+), [$($more)?], $arguments, 1 2 3 4 5 6 7; 8)
    };
    (@ $rows:expr, $path:tt, $more:tt, $arguments:tt, $($m:literal)*; $last:literal) => {
        match $rows {
            $($m => for_rows!(% $path, $m, $more, $arguments),)*
            _ => for_rows!(% $path, $last, $more, $arguments),
        }
    };
    (% ($($path:ident)::+), $m:literal, [$($more:literal)?], ($($argument:expr),*)) => {
        $($path)::+::<$m $(, $more)?>($($argument),*)
    };
}
pub(super) use for_rows;

/// Number of panels for `rows` rows: as few as possible.
pub(super) fn panels(rows: usize) -> usize {
    rows.div_ceil(MAX_ROWS)
}

/// The first row of panel `i` of [`panels`], or the number of rows after the last one. Panels have
/// about equal sizes, since kernels are less efficient with few rows. Full panels come first where
/// kernels take two at once.
pub(super) fn panel_start(rows: usize, i: usize) -> usize {
    match panels(rows) {
        panels if PANELS == 1 && panels > 0 => i * rows / panels,
        _ => (i * MAX_ROWS).min(rows),
    }
}

/// Codes of consecutive k of one row, in a cache line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C, align(64))]
pub struct Line(pub [u8; Self::CODES]);

impl Line {
    /// Codes of a line.
    pub const CODES: usize = 64;

    /// Lines of a row of `padded_k` codes: an odd number, so that the rows of a tile are in different
    /// sets of a cache.
    pub const fn per_row(padded_k: usize) -> usize {
        padded_k.div_ceil(Self::CODES) | 1
    }

    /// Stores chunk `chunk` of the row that begins with `lines[0]`.
    #[inline(always)]
    pub(in crate::w4a8) fn put(lines: &mut [Self], chunk: usize, codes: &[u8]) {
        let half = chunk % 2 * CHUNK;
        lines[chunk / 2].0[half..half + CHUNK].copy_from_slice(codes);
    }
}

impl Default for Line {
    fn default() -> Self {
        Self([0; Self::CODES])
    }
}

/// Up to [`MAX_ROWS`] rows, interleaved by pieces of eight codes: KleidiAI's packed activations,
/// with `mr` equal to the number of rows.
#[derive(Debug, Clone, Copy)]
pub struct Panel<'a> {
    codes: &'a [u8],
    negated_zero_points: &'a [i32],
    reciprocals: &'a [f32],
    starts: &'a [i32],
    scales: &'a [f32],
    lines: &'a [Line],
}

impl<'a> Panel<'a> {
    /// A panel with one row per reciprocal.
    ///
    /// `codes` `[Kp / 8][rows][8]` (int8 as bytes); `negated_zero_points` and `reciprocals`
    /// `[rows]`; `starts` `[groups][rows]`, −8·Σq of each group of k that shares a weight scale.
    ///
    /// Panics if there are no rows, more than [`MAX_ROWS`], or lengths that do not agree.
    pub fn new(
        codes: &'a [u8],
        negated_zero_points: &'a [i32],
        reciprocals: &'a [f32],
        starts: &'a [i32],
    ) -> Self {
        let rows = reciprocals.len();
        assert!((1..=MAX_ROWS).contains(&rows), "{rows} rows");
        assert!(negated_zero_points.len() == rows, "a zero point for each row");
        assert!(codes.len().is_multiple_of(rows * PIECE), "whole pieces");
        assert!(starts.len().is_multiple_of(rows), "a start for each group and row");
        Self { codes, negated_zero_points, reciprocals, starts, scales: &[], lines: &[] }
    }

    /// The panel with its codes by rows, too: the same codes, [`Line::per_row`] lines for each row.
    ///
    /// Panics if the number of lines is wrong.
    pub fn with_lines(self, lines: &'a [Line]) -> Self {
        let rows = self.rows();
        let expected = rows * Line::per_row(self.codes.len() / rows);
        assert!(lines.len() == expected, "{} lines, not {expected}", lines.len());
        Self { lines, ..self }
    }

    /// The panel with a scale for each group and row.
    pub(in crate::w4a8) fn with_scales(self, scales: &'a [f32]) -> Self {
        Self { scales, ..self }
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.reciprocals.len()
    }

    /// `[Kp / 8][rows][8]`.
    pub fn codes(&self) -> &'a [u8] {
        self.codes
    }

    /// −zero point of each row.
    pub fn negated_zero_points(&self) -> &'a [i32] {
        self.negated_zero_points
    }

    /// 1 / scale of each row.
    pub fn reciprocals(&self) -> &'a [f32] {
        self.reciprocals
    }

    /// `[groups][rows]`, for weights whose activations have a scale for each group: half of it.
    pub fn scales(&self) -> &'a [f32] {
        self.scales
    }

    /// The codes by rows, [`Line::per_row`] lines for each; empty unless the kernel
    /// [reads them](crate::w4a8::Kernel::reads_lines).
    pub fn lines(&self) -> &'a [Line] {
        self.lines
    }

    /// −8·Σq, `[groups][rows]`, modulo 2^32: the start of a group's sums in kernels that add 8 to each
    /// weight; −c·Σq in kernels that add c.
    pub fn starts(&self) -> &'a [i32] {
        self.starts
    }
}

/// The memory of a [`Panel`].
#[derive(Debug, Clone, PartialEq)]
pub struct PanelRows {
    codes: Vec<u8>,
    negated_zero_points: Vec<i32>,
    reciprocals: Vec<f32>,
    starts: Vec<i32>,
    lines: Vec<Line>,
}

impl PanelRows {
    /// Rows `first` to `first + count` of `rows`, for weights of `layout`. Panics if they are out of range.
    pub fn from_rows(rows: &QuantizedRows, first: usize, count: usize, layout: RhsLayout) -> Self {
        let mut codes = vec![0; rows.row(0).len() * count];
        for m in 0..count {
            for (p, piece) in rows.row(first + m).chunks_exact(PIECE).enumerate() {
                let to = &mut codes[(p * count + m) * PIECE..][..PIECE];
                to.iter_mut().zip(piece).for_each(|(to, &q)| *to = q as u8);
            }
        }
        let factors = first..first + count;
        Self {
            starts: starts(&codes, count, layout),
            lines: lines(&codes, count),
            codes,
            negated_zero_points: rows.negated_zero_points[factors.clone()].to_vec(),
            reciprocals: rows.reciprocals[factors].to_vec(),
        }
    }

    /// The first `count` rows of block `block` of packed activations, for weights of `layout`.
    /// Panics if they are out of range.
    pub fn from_block(lhs: &PackedLhs<'_>, block: usize, count: usize, layout: RhsLayout) -> Self {
        let (mr, bytes) = (lhs.layout().mr(), lhs.block(block));
        let (codes, factors) = bytes.split_at(bytes.len() - 8 * mr);
        let word = |i: usize| [0, 1, 2, 3].map(|j| factors[4 * i + j]);
        let pieces = codes.chunks_exact(mr * PIECE);
        let codes: Vec<u8> = pieces.flat_map(|rows| &rows[..count * PIECE]).copied().collect();
        Self {
            starts: starts(&codes, count, layout),
            lines: lines(&codes, count),
            codes,
            negated_zero_points: (0..count).map(|m| i32::from_le_bytes(word(m))).collect(),
            reciprocals: (0..count).map(|m| f32::from_le_bytes(word(mr + m))).collect(),
        }
    }

    /// The panel.
    pub fn panel(&self) -> Panel<'_> {
        Panel::new(&self.codes, &self.negated_zero_points, &self.reciprocals, &self.starts)
            .with_lines(&self.lines)
    }
}

/// The codes of a panel, by rows.
fn lines(codes: &[u8], rows: usize) -> Vec<Line> {
    let per_row = Line::per_row(codes.len() / rows);
    let mut lines = vec![Line::default(); rows * per_row];
    for (p, pieces) in codes.chunks_exact(rows * PIECE).enumerate() {
        for (m, piece) in pieces.chunks_exact(PIECE).enumerate() {
            let line = &mut lines[m * per_row + p * PIECE / Line::CODES];
            line.0[p * PIECE % Line::CODES..][..PIECE].copy_from_slice(piece);
        }
    }
    lines
}

/// −8·Σq, `[groups][rows]`.
fn starts(codes: &[u8], rows: usize, layout: RhsLayout) -> Vec<i32> {
    let groups = codes.chunks_exact(rows * layout.padded_group());
    let starts = groups.flat_map(|group| {
        (0..rows).map(move |m| {
            let pieces = group.chunks_exact(PIECE).skip(m).step_by(rows);
            pieces.flatten().fold(0i32, |sum, &q| sum.wrapping_sub(8 * i32::from(q as i8)))
        })
    });
    starts.collect()
}

#[cfg(test)]
mod tests {
    use super::{MAX_ROWS, PANELS, panel_start, panels};

    #[test]
    fn panels_hold_all_rows() {
        let sizes = |rows| -> Vec<usize> {
            let starts: Vec<_> = (0..=panels(rows)).map(|i| panel_start(rows, i)).collect();
            assert_eq!((starts[0], starts[panels(rows)]), (0, rows));
            starts.windows(2).map(|pair| pair[1] - pair[0]).collect()
        };
        assert!(sizes(0).is_empty());
        assert_eq!(sizes(1), [1]);
        assert_eq!(sizes(16), [8, 8]);
        match PANELS {
            1 => assert_eq!(sizes(33), [6, 7, 6, 7, 7]),
            _ => assert_eq!(sizes(33), [8, 8, 8, 8, 1]),
        }
        for rows in 1..500 {
            assert!(sizes(rows).iter().all(|size| (1..=MAX_ROWS).contains(size)), "{rows}");
        }
    }
}
