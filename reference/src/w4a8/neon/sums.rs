//! From integer sums of code products to floats.

use super::ops::{Floats, Ints, as_floats, float_bytes, sub};
use crate::layout::kleidi::{CHUNK, PIECE};
use crate::w4a8::Blocks;

/// The most k of a group whose sums are floats by their bits: 256 · 16 · 128 · 8 = 2^22.
pub(super) const NARROW: usize = 256;
/// Chunks whose sums of 16·q·w stay within 32 bits: 2^16 k of at most 2^14 each.
pub(super) const SPAN: usize = (1 << 16) / CHUNK;
/// The bits of 1.5·2^19, whose last place is 2^-4.
const START: i32 = 0x4940_0000;

/// Where a narrow group's sums begin.
pub(super) const STARTS: [i32; 4] = [START; 4];
/// The same for pairs of lanes that are added to each other in the end.
pub(super) const STARTS_OF_PAIRS: [i32; 4] = [START, 0, START, 0];

/// Σqw of a narrow group, from its start plus 16·Σqw and the start. Exact.
#[inline(always)]
pub(super) fn narrow(sums: Ints, starts: Ints) -> Floats {
    sub(as_floats(sums), as_floats(starts))
}

/// Four words of a block, of 4 bytes each, from word `at` behind its groups.
#[inline(always)]
pub(super) fn tail(blocks: Blocks<'_>, at: usize) -> Floats {
    let tail = blocks.rhs_layout.groups() * blocks.rhs_layout.group_bytes();
    let mut words = [0; 16];
    words.copy_from_slice(&blocks.rhs[tail + 4 * at..][..16]);
    float_bytes(words)
}

/// Codes to be multiplied, as the kernels step through them. Plain addresses: a check for each
/// load would cost as much as the products.
#[derive(Clone, Copy)]
pub(super) struct Codes {
    /// Activations, `[chunks][4][rows][8]`.
    pub(super) q: *const u8,
    /// Weights, `[chunks][2][nr][8]`, from some column.
    pub(super) w: *const u8,
    /// Chunks of 32 k in a group.
    pub(super) chunks: usize,
}

impl Codes {
    /// Those of the first group, the weights from column `first`. Panics when the lengths are not
    /// those of the layout.
    #[inline(always)]
    pub(super) fn first_group(blocks: Blocks<'_>, first: usize) -> Self {
        let (layout, rows) = (blocks.rhs_layout, blocks.panel.rows());
        let padded_k = layout.groups() * layout.padded_group();
        assert_eq!(blocks.panel.codes().len(), rows * padded_k, "codes of the panel");
        assert_eq!(blocks.rhs.len(), layout.block_bytes(), "bytes of the block");
        Self {
            q: blocks.panel.codes().as_ptr(),
            w: blocks.rhs[PIECE * first..].as_ptr(),
            chunks: layout.padded_group() / CHUNK,
        }
    }
}
