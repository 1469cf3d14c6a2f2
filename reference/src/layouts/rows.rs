//! Permutations of a weight's N rows.

use crate::{Error, Result};

/// One step of a permutation of N rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RowStep {
    /// The two halves exchanged: `[w1, w3]` to `[w3, w1]`. vLLM `reorder_w1w3_to_w3w1`.
    SwapHalves,
    /// Runs of this many rows, alternating between the first and the second half. A run of 1 is
    /// FlashInfer's `reorder_rows_for_gated_act_gemm`, of 64 vLLM's `interleave_linear_and_gate`.
    Interleave(usize),
    /// Within each block of this many rows (16 or 32), row r moves to position (r mod b/8) · 8 + ⌊r
    /// / (b/8)⌋: FlashInfer's `shuffle_matrix_a` with an epilogue tile of 64 (blocks of 16) or 128
    /// (blocks of 32).
    Shuffle(usize),
}

impl std::fmt::Display for RowStep {
    /// `swap_halves`, `interleave 1`, `shuffle 32`, as in converted files.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::SwapHalves => f.write_str("swap_halves"),
            Self::Interleave(run) => write!(f, "interleave {run}"),
            Self::Shuffle(block) => write!(f, "shuffle {block}"),
        }
    }
}

impl RowStep {
    /// The shuffle for an epilogue tile of `epilogue_tile_m` rows.
    pub fn shuffle(epilogue_tile_m: usize) -> Self {
        Self::Shuffle(if epilogue_tile_m.is_multiple_of(128) { 32 } else { 16 })
    }

    /// N must be a positive multiple of this.
    const fn unit(self) -> usize {
        match self {
            Self::SwapHalves => 2,
            Self::Interleave(run) => run.saturating_mul(2),
            Self::Shuffle(block) => block,
        }
    }

    /// The new position of row `old` of `size_n`.
    fn target(self, size_n: usize, old: usize) -> usize {
        let half = size_n / 2;
        match self {
            Self::SwapHalves => (old + half) % size_n,
            Self::Interleave(run) => {
                let (side, row) = (old / half, old % half);
                (row / run * 2 + side) * run + row % run
            }
            Self::Shuffle(block) => {
                let (lanes, row) = (block / 8, old % block);
                old - row + row % lanes * 8 + row / lanes
            }
        }
    }

    /// The row at position `new`: the inverse of [`Self::target`], derived independently.
    fn source(self, size_n: usize, new: usize) -> usize {
        let half = size_n / 2;
        match self {
            Self::SwapHalves if new < half => half + new,
            Self::SwapHalves => new - half,
            Self::Interleave(run) => {
                let (pair, in_pair) = (new / (2 * run), new % (2 * run));
                pair * run + in_pair % run + if in_pair < run { 0 } else { half }
            }
            Self::Shuffle(block) => {
                let place = new % block;
                new - place + place % 8 * (block / 8) + place / 8
            }
        }
    }
}

/// A permutation of N rows, composed of steps.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RowOrder {
    size_n: usize,
    steps: Vec<RowStep>,
}

impl RowOrder {
    /// Composes `steps` on `size_n` rows, first step first; no step is the identity.
    ///
    /// # Errors
    /// [`Error::Size`] if N is not a positive multiple of a step's unit, or a step is invalid.
    pub fn new(size_n: usize, steps: &[RowStep]) -> Result<Self> {
        for &step in steps {
            if matches!(step, RowStep::Interleave(0))
                || matches!(step, RowStep::Shuffle(block) if !matches!(block, 16 | 32))
            {
                let expected = "runs of at least 1, blocks of 16 or 32";
                return Err(Error::size("row step", format!("{step:?}"), expected));
            }
        }
        let bad = steps.iter().find(|s| size_n == 0 || !size_n.is_multiple_of(s.unit()));
        match bad {
            None => Ok(Self { size_n, steps: steps.to_vec() }),
            Some(step) => {
                let expected = format!("a positive multiple of {} for {step:?}", step.unit());
                Err(Error::size("size_n", size_n, expected))
            }
        }
    }

    /// The steps, the first one first.
    pub fn steps(&self) -> &[RowStep] {
        &self.steps
    }

    /// The same order without the steps that `drop` selects.
    pub(super) fn without(&self, drop: fn(&RowStep) -> bool) -> Self {
        let steps = self.steps.iter().copied().filter(|step| !drop(step)).collect();
        Self { size_n: self.size_n, steps }
    }

    /// Number of rows.
    pub fn size_n(&self) -> usize {
        self.size_n
    }

    /// The position of the weight's row `row`. Panics if there is no such row.
    pub fn target(&self, row: usize) -> usize {
        assert!(row < self.size_n, "row {row} of {}", self.size_n);
        self.steps.iter().fold(row, |row, step| step.target(self.size_n, row))
    }

    /// The weight's row at position `place`. Panics if there is no such position.
    pub fn source(&self, place: usize) -> usize {
        assert!(place < self.size_n, "place {place} of {}", self.size_n);
        self.steps.iter().rev().fold(place, |place, step| step.source(self.size_n, place))
    }

    /// The weight's row at each position.
    pub fn sources(&self) -> Vec<usize> {
        (0..self.size_n).map(|place| self.source(place)).collect()
    }
}
