//! Division of columns into work items.

use super::parallel::{Wide, for_parts};
use super::rows::Element;
use super::wide::{Loop, wide};
use crate::w4a8::packed::CHUNK;

/// Smallest number of values per thread in steps that only move or convert them; fewer are not worth
/// waking a thread.
pub(super) const GRAIN: usize = 1 << 15;
/// Rows, or tokens, processed together. A larger batch is split: rows are independent, and this many
/// reuse a weight often enough.
pub(super) const BLOCK: usize = 1024;
/// The widest run.
pub(super) const MAX_WIDTH: usize = 256;
/// Bytes of a run's codes, which stay in a core's L2 cache together with the activations.
const CACHE: usize = 256 << 10;
/// Columns that kernels process at once: whole blocks of every layout.
const STRIP: usize = 32;
/// Items per thread, so that a thread that starts late still finds work.
const ITEMS_PER_THREAD: usize = 4;

/// Columns in runs of `width`; the last run may be narrower.
#[derive(Debug, Clone, Copy)]
pub(super) struct Runs {
    /// Columns.
    pub(super) size: usize,
    /// A multiple of a block's columns, at most [`MAX_WIDTH`].
    pub(super) width: usize,
}

impl Runs {
    /// For matrices of `padded_k` 4-bit codes in each column: `size` columns of gate and as many of up, in each of `times` matrices of equal work.
    /// `reused`: whether more than one panel reads a run.
    pub(super) fn activated(padded_k: usize, size: usize, times: usize, reused: bool) -> Self {
        // These columns are k of w2, whose rows are quantized in chunks.
        Self::new(padded_k, size, times, CHUNK, reused)
    }

    /// `size` columns of one matrix; `reused` as in [`Runs::activated`].
    pub(super) fn plain(padded_k: usize, size: usize, reused: bool) -> Self {
        Self::new(padded_k / 2, size, 1, STRIP, reused)
    }

    /// `bytes` of codes for each column.
    fn new(bytes: usize, size: usize, times: usize, unit: usize, reused: bool) -> Self {
        let fair = size * times / (ITEMS_PER_THREAD * rayon::current_num_threads());
        // Weights that are read once need no cache; long runs are then faster.
        let cached = if reused { CACHE / bytes } else { MAX_WIDTH };
        let width = fair.min(cached).min(MAX_WIDTH) / unit * unit;
        Self { size, width: width.max(unit) }
    }

    /// Number of runs.
    pub(super) fn count(self) -> usize {
        self.size.div_ceil(self.width)
    }

    /// First column and width of run `i`.
    pub(super) fn get(self, i: usize) -> (usize, usize) {
        let from = self.start(i);
        (from, self.width.min(self.size - from))
    }

    /// The first column of run `i`, or the number of columns after the last one.
    pub(super) fn start(self, i: usize) -> usize {
        (i * self.width).min(self.size)
    }

    /// `out` `[rows, size]` of `blocked` `[run][row][column of the run]`.
    pub(super) fn store<T: Element>(self, blocked: &[f32], out: &mut [T]) {
        let (size, rows) = (self.size, out.len() / self.size);
        let parts = Wide { values: out, width: size };
        for_parts(0..rows, parts, GRAIN / size, &|row| row, &|row, out| {
            for run in 0..self.count() {
                let (from, width) = self.get(run);
                let sums = &blocked[from * rows + row * width..][..width];
                let out = &mut out.values[from..from + width];
                wide(Narrow { from: sums, to: out });
            }
        });
    }
}

/// Runs of matrices that multiply the same rows, one matrix after the other.
#[derive(Debug, Clone, Copy)]
pub(super) struct SeveralRuns<const N: usize>([Runs; N]);

impl<const N: usize> SeveralRuns<N> {
    /// For matrices of `sizes` columns; otherwise as [`Runs::plain`].
    pub(super) fn new(padded_k: usize, sizes: [usize; N], reused: bool) -> Self {
        let Runs { width, .. } = Runs::plain(padded_k, sizes.iter().sum(), reused);
        Self(sizes.map(|size| Runs { size, width }))
    }

    /// Number of runs.
    pub(super) fn count(&self) -> usize {
        self.0.iter().map(|runs| runs.count()).sum()
    }

    /// The runs of a matrix.
    pub(super) fn of(&self, matrix: usize) -> Runs {
        self.0[matrix]
    }

    /// Matrix and run of item `item`. What follows the last item is a run of the last matrix.
    pub(super) fn find(&self, item: usize) -> (usize, usize) {
        let (mut matrix, mut run) = (0, item);
        while matrix + 1 < N && run >= self.0[matrix].count() {
            run -= self.0[matrix].count();
            matrix += 1;
        }
        (matrix, run)
    }

    /// Columns of all matrices before item `item`.
    pub(super) fn start(&self, item: usize) -> usize {
        let (matrix, run) = self.find(item);
        let before: usize = self.0[..matrix].iter().map(|runs| runs.size).sum();
        before + self.0[matrix].start(run)
    }
}

/// Rounds f32 to `T`.
struct Narrow<'a, T> {
    from: &'a [f32],
    to: &'a mut [T],
}

impl<T: Element> Loop for Narrow<'_, T> {
    #[inline(always)]
    fn run(self) {
        for (to, &from) in self.to.iter_mut().zip(self.from) {
            *to = T::narrow(from);
        }
    }
}
