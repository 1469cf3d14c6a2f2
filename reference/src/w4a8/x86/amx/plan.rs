//! What a product is divided into, and the memory of a strip.

use super::super::avx512::NR;
use super::BATCH_ROWS;
use super::unit::{COLUMNS, Operands, ROW_BYTES, ROWS};
use crate::w4a8::packed::CHUNK;
use crate::w4a8::{Line, Run};

/// k decoded at once, if groups are not longer.
pub(super) const STRETCH: usize = 1024;
/// The longest group, for which a stretch is longer; and the stretch with channel scales.
pub(super) const LONGEST_GROUP: usize = 2048;
/// Values of a tile of sums.
pub(super) const TILE: usize = ROWS * COLUMNS;
/// Groups by which products are ahead of the addition of their sums.
pub(super) const LAG: usize = 3;
/// Tiles of rows of a batch.
const TILES: usize = BATCH_ROWS / ROWS;

/// Rows that follow one another in memory.
#[derive(Debug)]
pub(in crate::w4a8) struct Batch {
    /// The address of the first row's lines, which are exposed together with those of all others.
    pub(in crate::w4a8) lines: usize,
    pub(in crate::w4a8) rows: usize,
    /// Codes of a row.
    pub(in crate::w4a8) codes: usize,
    pub(in crate::w4a8) negated_zero_points: [i32; BATCH_ROWS],
    pub(in crate::w4a8) reciprocals: [f32; BATCH_ROWS],
}

/// The division of a batch into tiles of rows.
#[derive(Debug, Clone, Copy)]
pub(in crate::w4a8) struct Rows {
    /// The first row, by its address, and bytes from one row to the next.
    first: *const u8,
    pub(in crate::w4a8) stride: usize,
    /// Rows, tiles of rows, and rows of a tile: the last tile ends with the last row.
    pub(in crate::w4a8) count: usize,
    pub(in crate::w4a8) tiles: usize,
    pub(in crate::w4a8) height: usize,
}

impl Rows {
    /// Of a batch with one row or more.
    pub(in crate::w4a8) fn of(batch: &Batch) -> Self {
        let (count, tiles) = (batch.rows, batch.rows.div_ceil(ROWS));
        Self {
            first: std::ptr::with_exposed_provenance(batch.lines),
            stride: Line::per_row(batch.codes) * size_of::<Line>(),
            count,
            tiles,
            height: count.div_ceil(tiles),
        }
    }

    /// The first row of tile `t`.
    pub(in crate::w4a8) fn row(&self, t: usize) -> usize {
        (t * self.height).min(self.count - self.height)
    }

    /// Its address.
    pub(in crate::w4a8) fn at(&self, t: usize) -> *const u8 {
        self.first.wrapping_add(self.row(t) * self.stride)
    }
}

/// The division of a product's rows and k.
#[derive(Debug, Clone, Copy)]
pub(super) struct Plan {
    pub(super) rows: Rows,
    /// k of a step: of a tile.
    pub(super) step: usize,
    /// k of a group, and groups of a stretch.
    pub(super) group: usize,
    pub(super) groups: usize,
    /// Bytes of a block, and of its group.
    pub(super) block: usize,
    pub(super) group_bytes: usize,
}

impl Plan {
    /// Panics unless every slice has the length of its layout.
    pub(super) fn checked(batch: &Batch, rhs: Run<'_>, y: &[f32], stride: usize) -> Self {
        let (layout, rows) = (rhs.layout, batch.rows);
        let (block, group, groups) = (layout.block_bytes(), layout.padded_group(), layout.groups());
        let group_bytes = layout.group_bytes();
        let channel_wise = layout.is_channel_wise();
        assert!(layout.nr() == NR && (1..=BATCH_ROWS).contains(&rows));
        assert!(batch.codes == groups * group && (!channel_wise || groups == 1));
        assert!(group_bytes == group * NR / 2 + if channel_wise { 0 } else { 2 * NR });
        assert!(block >= groups * group_bytes + if channel_wise { 12 } else { 8 } * NR);
        assert!(channel_wise || group <= LONGEST_GROUP);
        assert!(rhs.bytes.len() == rhs.columns.div_ceil(NR) * block);
        assert!(y.len() >= stride.saturating_mul(rows - 1).saturating_add(rhs.columns));
        Self {
            rows: Rows::of(batch),
            step: if group.is_multiple_of(ROW_BYTES) { ROW_BYTES } else { CHUNK },
            group,
            groups,
            block,
            group_bytes,
        }
    }

    /// Products of `N` tiles from tile `t` on, from k `k` on, of `steps` steps.
    pub(super) fn operands<const N: usize>(
        &self,
        t: usize,
        k: usize,
        weights: *const u8,
        steps: usize,
    ) -> Operands<N> {
        Operands {
            rows: std::array::from_fn(|i| self.rows.at(t + i).wrapping_add(k)),
            stride: self.rows.stride,
            weights,
            tile: [self.rows.height, self.step],
            steps,
        }
    }
}

/// Memory for one strip, aligned as tiles and vectors are.
#[repr(C, align(64))]
pub(super) struct Memory {
    /// `[k / 4][16][4]`.
    pub(super) weights: [u8; LONGEST_GROUP * COLUMNS],
    /// `[group][16]`.
    pub(super) scales: [f32; STRETCH / CHUNK * COLUMNS],
    /// Sums of the latest groups.
    pub(super) ring: [[i32; TILE]; LAG + 1],
    /// Sums of all tiles: f32, or i32 with channel scales.
    pub(super) sums: [[u32; TILE]; TILES],
}
