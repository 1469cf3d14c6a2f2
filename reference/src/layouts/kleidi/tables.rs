//! The tables after a matrix's blocks: zero points, and the order of its rows.

use super::{CHUNK, MatrixBytes, PackedRhs, RhsLayout};
use crate::act_order::sort;
use crate::layouts::cpu::CpuTables;
use crate::num::scalar::{ScalarType, bf16_to_f32};
use crate::weight::{Groups, Weight};
use crate::{Error, Result};

/// The largest group with zero points: a sum of its centred codes has less than 29 bits.
const MAX_GROUP: usize = 1 << 20;

impl RhsLayout {
    /// The layout with tables after its blocks.
    ///
    /// # Errors
    /// [`Error::Size`] for zero points if K is not a multiple of 32 or a group is longer than 2^20, and if the size
    /// overflows.
    pub fn with_tables(self, tables: CpuTables) -> Result<Self> {
        let (shape, rows) = (self.shape(), self.group_rows);
        if tables.zero_points && (!shape.size_k.is_multiple_of(CHUNK) || rows > MAX_GROUP) {
            let expected = format!("K a multiple of {CHUNK}, groups of at most {MAX_GROUP}");
            return Err(Error::size("weight with zero points", shape, expected));
        }
        let layout = Self { tables, ..self };
        let most = 4usize.checked_mul(shape.size_k).filter(|_| u32::try_from(shape.size_k).is_ok());
        let sum = most.and_then(|order| {
            let blocks = layout.blocks_len().checked_add(layout.zero_points_len())?;
            blocks.checked_add(order).filter(|&bytes| isize::try_from(bytes).is_ok())
        });
        match sum {
            Some(_) => Ok(layout),
            None => Err(Error::size("packed weights", shape, "a size that memory can hold")),
        }
    }

    /// The tables.
    pub fn tables(&self) -> CpuTables {
        self.tables
    }

    /// Bytes of the zero points.
    pub fn zero_points_len(&self) -> usize {
        if self.tables.zero_points { self.blocks() * self.groups() * self.nr() } else { 0 }
    }

    /// Bytes of the order of rows.
    pub fn order_len(&self) -> usize {
        if self.tables.act_order { 4 * self.shape().size_k } else { 0 }
    }

    /// The parts of a matrix of [`RhsLayout::packed_len`] bytes. Panics if there are fewer.
    pub fn parts<'b>(&self, bytes: &'b [u8]) -> MatrixBytes<'b> {
        let (blocks, tables) = bytes.split_at(self.blocks_len());
        let (offsets, order) = tables.split_at(self.zero_points_len());
        let (order, _) = order[..self.order_len()].as_chunks();
        MatrixBytes { blocks, offsets: bytemuck::cast_slice(offsets), order }
    }

    pub(super) fn expect_no_tables(&self) -> Result<()> {
        match self.tables {
            CpuTables::NONE => Ok(()),
            tables => Err(Error::unsupported(format!("{tables:?}"), "expected blocks alone")),
        }
    }

    /// Fails unless the order of a matrix names each row once; errors contain `name`.
    pub(super) fn check_order(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let order = self.parts(bytes).order;
        let mut seen = vec![false; order.len()];
        for (k, &row) in order.iter().enumerate() {
            let row = u32::from_le_bytes(row);
            match seen.get_mut(row as usize) {
                Some(seen) if !*seen => *seen = true,
                _ => {
                    let expected = format!("each row below {} once", order.len());
                    return Err(Error::value(
                        format!("{name}: order of rows"),
                        &[k],
                        row,
                        expected,
                    ));
                }
            }
        }
        Ok(())
    }

    /// [`RhsLayout::pack_weight`] for a layout with tables.
    pub(super) fn pack_with_tables(&self, weight: &Weight<'_>) -> Result<PackedRhs<'static>> {
        weight.validate()?;
        let mut plain = weight.clone();
        let order = match (&weight.groups, self.tables.act_order) {
            (Groups::Indexed { g_idx, group_size }, true) => {
                let sorted = sort(g_idx);
                let rows = self.group_rows;
                let wrong = sorted.g_idx.iter().enumerate().find(|&(k, &g)| g as usize != k / rows);
                if let Some((k, &group)) = wrong {
                    let (name, row) = (format!("{}: g_idx", weight.name), sorted.perm[k] as usize);
                    let expected = format!("{rows} rows in each group");
                    return Err(Error::value(name, &[row], group, expected));
                }
                plain.codes = weight.codes.gather_rows(&sorted.perm)?;
                plain.groups = Groups::Uniform(*group_size);
                sorted.perm
            }
            (_, true) => (0..weight.shape().size_k as u32).collect(),
            (_, false) => Vec::new(),
        };
        let mut offsets = Vec::new();
        if self.tables.zero_points {
            let name = &weight.name;
            let Some(zeros) = plain.zeros.take().filter(|_| weight.ty == ScalarType::UINT4) else {
                let what = format!("{name}: codes of type {}", weight.ty);
                return Err(Error::unsupported(what, "expected uint4 with zero points"));
            };
            // The bytes of `uint4b8`: a code less 8, which the offset adds again.
            plain.ty = ScalarType::UINT4B8;
            let size_n = weight.shape().size_n;
            for block in 0..self.blocks() {
                for group in 0..self.groups() {
                    for n in (block * self.nr()..).take(self.nr()) {
                        let n = n.min(size_n - 1);
                        let zero = zeros.bits(group, n);
                        // GPTQ's zero points are one more than the file's codes.
                        let Some(offset) =
                            8i8.checked_sub_unsigned(zero.min(255) as u8).filter(|_| zero <= 16)
                        else {
                            let name = format!("{name}: zero points [group, n]");
                            return Err(Error::value(name, &[group, n], zero, "at most 16"));
                        };
                        offsets.push(offset as u8);
                    }
                }
            }
        }
        let blocks = Self { tables: CpuTables::NONE, ..*self }.pack_blocks(&plain)?;
        let mut bytes = blocks.into_bytes();
        bytes.extend(offsets);
        bytes.extend(order.iter().flat_map(|row| row.to_le_bytes()));
        PackedRhs::new(*self, bytes)
    }
}

impl PackedRhs<'_> {
    /// The weights in f32, `[N][K]`, with zero points and in the checkpoint's order of rows.
    pub fn dequantized(&self) -> Vec<f32> {
        let (layout, parts) = (self.layout, self.parts());
        let (shape, rows) = (layout.shape(), layout.group_rows);
        let mut floats = vec![0.0; shape.len()];
        for (n, column) in floats.chunks_exact_mut(shape.size_k).enumerate() {
            for k in 0..shape.size_k {
                let (slot, group) = (layout.offset(k, n), k / rows);
                // Shifted to the top and back, the nibble's sign bit fills the byte.
                let code = ((parts.blocks[slot.element] >> slot.bit << 4) as i8) >> 4;
                let at = layout.scale_offset(group, n);
                let scale = match layout.is_channel_wise() {
                    // Stored divided by 16.
                    true => f32::from_le_bytes(super::word(parts.blocks, at)) * 16.0,
                    false => {
                        bf16_to_f32(u16::from_le_bytes([parts.blocks[at], parts.blocks[at + 1]]))
                    }
                };
                let (block, inside) = (n / layout.nr(), n % layout.nr());
                let at = (block * layout.groups() + group) * layout.nr() + inside;
                let offset = parts.offsets.get(at).copied().unwrap_or(0);
                column[parts.row(k)] = f32::from(i16::from(code) + i16::from(offset)) * scale;
            }
        }
        floats
    }
}
