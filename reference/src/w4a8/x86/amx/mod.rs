//! Batches times runs with AMX tiles, blocks of eight columns.
//!
//! A tile of activations is up to sixteen rows of 32 or 64 k, read in place ([`Panel::lines`]). A tile of
//! weights is sixteen columns, two blocks: their nibbles, moved to the upper half of a byte, are 16 times
//! the weights. They are decoded a stretch of k at a time, once for all rows, into memory that stays in
//! the L1 cache.
//!
//! Products of a group are summed exactly in a tile of 32-bit integers, which is stored. Conversion, scale
//! (divided by 16, which is exact) and float sums, in registers, are AVX-512 instructions that overlap
//! with the products of the next group. A group of 32 fills only half of a tile: the next group needs
//! other sums.

pub(in crate::w4a8) mod plan;
mod strip;
#[cfg(test)]
mod tests;
pub(in crate::w4a8) mod unit;

use super::Avx512Vnni;
use crate::w4a8::packed::CHUNK;
use crate::w4a8::{Blocks, Kernel, MAX_PANELS, MAX_ROWS, Panel, Run, Tile};
pub(in crate::w4a8) use plan::Rows;
use plan::{Batch, LONGEST_GROUP};
use unit::Unit;
pub(in crate::w4a8) use unit::chains;

/// AMX tiles of int8, with AVX-512 VNNI for what surrounds them and for few rows.
#[derive(Debug, Clone, Copy)]
pub struct AmxInt8(Tiled<unit::Amx>);

impl Kernel for AmxInt8 {
    fn new() -> Option<Self> {
        Tiled::new().map(Self)
    }

    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn tile(&self, blocks: Blocks<'_>, tile: &mut Tile) {
        self.0.tile(blocks, tile);
    }

    fn run(&self, panel: Panel<'_>, rhs: Run<'_>, y: &mut [f32], stride: usize) {
        self.0.run(panel, rhs, y, stride);
    }

    fn panels(&self) -> usize {
        self.0.panels()
    }

    fn reads_lines(&self) -> bool {
        self.0.reads_lines()
    }

    fn run_all(&self, panels: &[Panel<'_>], rhs: Run<'_>, y: &mut [f32], stride: usize) {
        self.0.run_all(panels, rhs, y, stride);
    }
}

/// The smallest number of rows that are faster with tiles: with groups of 32, which fill half of a tile,
/// and with others.
const MIN_ROWS: [usize; 2] = [32, 16];

/// The kernel on any unit.
#[derive(Debug, Clone, Copy)]
struct Tiled<U> {
    unit: U,
    vectors: Avx512Vnni,
    min_rows: [usize; 2],
}

impl<U: Unit> Kernel for Tiled<U> {
    fn new() -> Option<Self> {
        let (unit, vectors) = (U::new()?, Avx512Vnni::new()?);
        Some(Self { unit, vectors, min_rows: MIN_ROWS })
    }

    fn name(&self) -> &'static str {
        "amx-int8"
    }

    fn tile(&self, blocks: Blocks<'_>, tile: &mut Tile) {
        self.vectors.tile(blocks, tile);
    }

    fn run(&self, panel: Panel<'_>, rhs: Run<'_>, y: &mut [f32], stride: usize) {
        self.run_all(&[panel], rhs, y, stride);
    }

    fn panels(&self) -> usize {
        MAX_PANELS
    }

    fn reads_lines(&self) -> bool {
        true
    }

    fn run_all(&self, panels: &[Panel<'_>], rhs: Run<'_>, y: &mut [f32], stride: usize) {
        let rows: usize = panels.iter().map(Panel::rows).sum();
        let channel_wise = rhs.layout.is_channel_wise();
        let fits = rhs.layout.nr() == super::avx512::NR
            && (channel_wise || rhs.layout.padded_group() <= LONGEST_GROUP);
        if fits
            && rows >= self.min_rows[usize::from(rhs.layout.padded_group() > CHUNK)]
            && let Some(batch) = Batch::new(panels)
        {
            // SAFETY: the function needs AVX-512 F, VL and VNNI, AVX2 and FMA; the field `vectors`
            // proves that they were detected.
            return unsafe { strip::run(self.unit, &batch, rhs, y, stride) };
        }
        self.vectors.run_all(panels, rhs, y, stride);
    }
}

/// Rows of a batch at most.
pub(in crate::w4a8) const BATCH_ROWS: usize = MAX_PANELS * MAX_ROWS;

impl Batch {
    /// The rows of all panels, if their lines follow one another in memory.
    pub(in crate::w4a8) fn new(panels: &[Panel<'_>]) -> Option<Self> {
        let lines = panels.first()?.lines().as_ptr();
        let mut batch = Self {
            lines: lines.expose_provenance(),
            rows: 0,
            codes: 0,
            negated_zero_points: [0; BATCH_ROWS],
            reciprocals: [0.0; BATCH_ROWS],
        };
        let mut end = lines;
        for panel in panels {
            let (lines, rows) = (panel.lines().as_ptr_range(), panel.rows());
            if lines.is_empty() || lines.start != end || batch.rows + rows > BATCH_ROWS {
                return None;
            }
            lines.start.expose_provenance();
            end = lines.end;
            batch.codes = panel.codes().len() / rows;
            let at = batch.rows..batch.rows + rows;
            batch.negated_zero_points[at.clone()].copy_from_slice(panel.negated_zero_points());
            batch.reciprocals[at].copy_from_slice(panel.reciprocals());
            batch.rows += rows;
        }
        Some(batch)
    }
}
