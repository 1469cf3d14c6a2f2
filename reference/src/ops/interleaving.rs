//! Known mistakes in the interleaving of block scales, shared by every operation that interleaves
//! them.

use crate::Result;
use crate::judge::compare::Elements;
use crate::layouts::Layout as _;
use crate::layouts::block_scale::{BlockScaleLayout, ScaleTile};
use crate::weight::{Table, TableData};

/// How scales were interleaved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Interleaving {
    Once,
    /// Padded but not interleaved.
    None,
    /// Interleaved twice.
    Twice,
    /// Interleaved by the inverse permutation.
    Inverse,
}

impl Interleaving {
    /// The elements of one matrix of scales `[groups, N]` under `layout`.
    pub(super) fn pack(self, layout: &BlockScaleLayout, scales: &Table) -> Result<Elements> {
        let [rows, cols] = layout.packed_shape();
        let once: Elements = layout.pack(scales)?.iter_bits().collect();
        let whole = BlockScaleLayout::new(cols, rows, layout.tile(), layout.ty())?;
        let mut out = vec![0; once.len()];
        match self {
            Self::Once => return Ok(once),
            Self::None => {
                let bits = scales.transposed();
                for n in 0..bits.rows() {
                    for g in 0..bits.cols() {
                        out[n * cols + g] = bits.bits(n, g);
                    }
                }
            }
            Self::Twice => {
                for (i, bits) in once.iter().enumerate() {
                    out[whole.offset(i % cols, i / cols).element] = *bits;
                }
            }
            Self::Inverse => {
                let plain = Self::None.pack(layout, scales)?;
                for (i, out) in out.iter_mut().enumerate() {
                    *out = plain[whole.offset(i % cols, i / cols).element];
                }
            }
        }
        Ok(out)
    }
}

/// Scales `[groups, N]` that were stored row by row but are read as interleaved.
pub(super) fn misread(scales: &Table) -> Option<Table> {
    let layout =
        BlockScaleLayout::new(scales.rows(), scales.cols(), ScaleTile::Rows128, scales.ty());
    let layout = layout.ok()?;
    let [rows, cols] = layout.packed_shape();
    let mut plain = vec![0; rows * cols];
    for n in 0..scales.cols() {
        for g in 0..scales.rows() {
            plain[n * cols + g] = scales.bits(g, n) as u8;
        }
    }
    layout.unpack(&Table::new(scales.ty(), rows, cols, TableData::B8(plain)).ok()?).ok()
}

/// Scales `[groups, N]` each of whose groups has the next one's, the last one the first's.
pub(super) fn of_next_row(scales: &Table) -> Table {
    let (rows, cols) = (scales.rows(), scales.cols());
    let bits = (0..rows).flat_map(|g| (0..cols).map(move |n| scales.bits((g + 1) % rows, n) as u8));
    let data = TableData::B8(bits.collect());
    Table::new(scales.ty(), rows, cols, data).unwrap_or_else(|_| scales.clone())
}
