//! From integer sums of code products to floats.

use super::ops::{Bytes, Floats, Ints, as_floats, eight_bytes, load, sub, word};
use crate::w4a8::Panel;
use crate::w4a8::packed::{CHUNK, PIECE, RhsLayout};

/// Largest group, in k, whose integer sums have the bits of floats: 256 · 16 · 128 · 8 = 2^22.
pub(super) const NARROW: usize = 256;
/// Chunks whose sums of 16·q·w stay within 32 bits: 2^16 k of at most 2^14 each.
pub(super) const SPAN: usize = (1 << 16) / CHUNK;
/// The bits of 1.5·2^19, whose ULP is 2^-4.
const START: i32 = 0x4940_0000;

/// Start of a narrow group's sums.
pub(super) const STARTS: [i32; 4] = [START; 4];
/// The same for pairs of lanes that are added together at the end.
pub(super) const STARTS_OF_PAIRS: [i32; 4] = [START, 0, START, 0];

/// Σqw of a narrow group, from its start plus 16·Σqw and the start. Exact.
#[inline(always)]
pub(super) fn narrow(sums: Ints, starts: Ints) -> Floats {
    sub(as_floats(sums), as_floats(starts))
}

/// The codes that the kernels iterate over. They are raw addresses, because a check per load would
/// cost as much as the products.
#[derive(Clone, Copy)]
pub(super) struct Codes {
    /// Activations, `[chunks][4][rows][8]`.
    pub(super) q: *const u8,
    /// Weights, `[chunks][2][nr][8]`, from some column.
    pub(super) w: *const u8,
    /// Chunks of 32 k in a group.
    pub(super) chunks: usize,
    /// Groups.
    pub(super) groups: usize,
}

impl Codes {
    /// The codes of a panel and a block. Panics if the lengths are not those of the layout.
    #[inline(always)]
    pub(super) fn new(panel: Panel<'_>, layout: RhsLayout, block: &[u8]) -> Self {
        let (groups, group) = (layout.groups(), layout.padded_group());
        assert_eq!(panel.codes().len(), panel.rows() * groups * group, "codes of the panel");
        assert_eq!(block.len(), layout.block_bytes(), "bytes of the block");
        let (q, w) = (panel.codes().as_ptr(), block.as_ptr());
        Self { q, w, chunks: group / CHUNK, groups }
    }

    /// The weights from column `first` of the block on.
    #[inline(always)]
    pub(super) fn at_column(self, first: usize) -> Self {
        Self { w: self.w.wrapping_add(PIECE * first), ..self }
    }
}

/// The last `quads` times four words (of 4 bytes) of a block.
#[inline(always)]
pub(super) fn tail(block: &[u8], quads: usize) -> &[[u8; 16]] {
    let (_, words) = block.as_rchunks();
    &words[words.len() - quads..]
}

/// Pieces `S` and `S` + 2 of rows 2`I` and 2`I` + 1 of a chunk; a missing row is zeros.
///
/// # Safety
/// `q` is a chunk of `M` rows, and 2`I` is below `M`.
#[inline(always)]
pub(super) unsafe fn two_rows<const M: usize, const S: usize, const I: usize>(
    q: *const u8,
) -> [Bytes; 2] {
    // SAFETY: guaranteed by the caller; an unpaired last row is read alone.
    unsafe {
        match 2 * I + 1 < M {
            true => [load!(q, (S * M + 2 * I) * PIECE), load!(q, ((S + 2) * M + 2 * I) * PIECE)],
            false => [
                eight_bytes(word(q.add((S * M + 2 * I) * PIECE))),
                eight_bytes(word(q.add(((S + 2) * M + 2 * I) * PIECE))),
            ],
        }
    }
}
