//! The chunks of k of one output.

use std::ops::Range;

use super::parse::MAX_CHUNKS;
use super::{Chunks, ScheduleError, Striped};

impl Striped {
    /// The column of tiles, counted over all rows, of the output (m, n).
    fn column(&self, m: usize, n: usize, size_n: usize) -> usize {
        let per = size_n.div_ceil(self.columns);
        self.rows.map_or(0, |rows| m / rows * per) + n / self.columns
    }
}

impl Chunks {
    /// The row within its thread block of the row at `place`.
    pub(super) fn row_of_block(&self, place: usize) -> usize {
        match self {
            Self::Striped(Striped { rows: Some(rows), .. }) => place % rows,
            _ => place,
        }
    }

    /// Returns an error for a product with `size_k` whose chunks are invalid or too many.
    pub(super) fn fit(&self, size_k: usize) -> Result<(), ScheduleError> {
        let (key, step) = match self {
            Self::Whole => return Ok(()),
            Self::Boundaries(all) => {
                return match all.iter().position(|&k| k >= size_k) {
                    None => Ok(()),
                    Some(i) => {
                        let key = format!("chunks.boundaries[{i}]");
                        Err(ScheduleError::value(key, all[i], format!("below size_k {size_k}")))
                    }
                };
            }
            Self::Size(n) => ("chunks.size", *n),
            Self::Striped(s) if !size_k.is_multiple_of(s.tile) => {
                let expected = format!("a divisor of size_k {size_k}");
                return Err(ScheduleError::value("chunks.striped.tile", s.tile, expected));
            }
            Self::Striped(s) => ("chunks.striped.run", s.tile.saturating_mul(s.run)),
        };
        if size_k.div_ceil(step) < MAX_CHUNKS {
            return Ok(());
        }
        let expected = format!("fewer than {MAX_CHUNKS} chunks of size_k {size_k}");
        Err(ScheduleError::value(key, step, expected))
    }

    /// The chunks of output (m, n), ascending.
    pub(super) fn of(&self, m: usize, n: usize, size_n: usize, size_k: usize) -> Vec<Range<usize>> {
        let starts: Vec<usize> = match self {
            Self::Whole => vec![0],
            Self::Size(n) => (0..size_k).step_by(*n).collect(),
            Self::Boundaries(all) => std::iter::once(0).chain(all.iter().copied()).collect(),
            Self::Striped(s) => {
                let tiles = size_k / s.tile;
                let Some(column) = s.column(m, n, size_n).checked_sub(s.whole) else {
                    return std::iter::once(0..size_k).collect();
                };
                let offset = column * tiles;
                let first = s.run - offset % s.run;
                let cuts = (first..tiles).step_by(s.run).map(|t| t * s.tile);
                std::iter::once(0).chain(cuts).collect()
            }
        };
        let ends = starts.iter().skip(1).copied().chain([size_k]);
        starts.iter().zip(ends).map(|(&start, end)| start..end).collect()
    }
}
