//! Packs the hub's weight directly. A word holds eight k of a column, which is half a segment, so
//! eight bytes of output follow from two words without extracting codes. The bytes equal those of
//! [`RhsLayout::pack`].

use super::parts::{Parts, Scales};
use super::{CHUNK, NR, PIECE, PackedRhs, RhsLayout};
use crate::layouts::cpu::CpuTables;
use crate::num::dims::GroupSize;
use crate::num::scalar::{ScalarType, bf16_to_f32, f32_to_bf16_rne};
use crate::weight::{Table, Weight};
use crate::{Error, Result};

/// The code of zero in every nibble, used past K.
const ZEROS: u32 = 0x8888_8888;

/// The scales of `weight` in the operator's type: f32 for channel-wise scales, bf16 for groups
/// (rounded to nearest even, as in upstream).
///
/// With `grouped`, the method's scale parameter is bf16, so scales are rounded to bf16 even if one
/// group covers all of K (experts in groups).
///
/// # Errors
/// [`Error::Unsupported`] for scales that are not f16, bf16 or f32; [`Error::Value`] for a scale
/// outside the range of bf16.
pub fn operator_scales(weight: &Weight<'_>, grouped: bool) -> Result<Table> {
    let (scales, from) = (&weight.scales, weight.scales.ty());
    let channel_wise = match weight.groups.group_size() {
        GroupSize::Channel => true,
        GroupSize::Of(g) => g == weight.shape().size_k,
    };
    let to_f32: fn(u32) -> f32 = match from {
        ScalarType::FLOAT32 => f32::from_bits,
        ScalarType::BFLOAT16 => |bits| bf16_to_f32(bits as u16),
        ScalarType::FLOAT16 => |bits| crate::num::scalar::f16_to_f32(bits as u16),
        _ => {
            let what = format!("{}: {from} scales", weight.name);
            return Err(Error::unsupported(what, "the operator takes float scales"));
        }
    };
    let through_bf16 = grouped || !channel_wise;
    let to = if channel_wise { ScalarType::FLOAT32 } else { ScalarType::BFLOAT16 };
    let mut overflow = None;
    let mut at = 0;
    let table = scales.map(to, |bits| {
        let value = to_f32(bits);
        let narrow = f32_to_bf16_rne(value);
        if through_bf16 && !bf16_to_f32(narrow).is_finite() {
            overflow.get_or_insert((at, value));
        }
        at += 1;
        match (channel_wise, through_bf16) {
            (false, _) => narrow.into(),
            (true, true) => bf16_to_f32(narrow).to_bits(),
            (true, false) => value.to_bits(),
        }
    });
    match overflow {
        None => Ok(table),
        Some((at, value)) => {
            let index = [at / scales.cols(), at % scales.cols()];
            let name = format!("{} scales [group, n]", weight.name);
            Err(Error::value(name, &index, value, "a scale that bf16 can hold"))
        }
    }
}

impl RhsLayout {
    /// Packs `weight`: f32 scales channel-wise and bf16 scales group-wise (see [`operator_scales`]), a
    /// bias of any float type. Without tables, codes are `uint4b8` in uniform groups, and the bytes are
    /// those of [`RhsLayout::pack`] of [`Columns::from_weight`](super::Columns::from_weight). A table of
    /// zero points takes `uint4` codes with zero points; an order of rows takes a `g_idx`, whose groups
    /// must have as many rows each.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for another type of codes or scales, a global scale, and act-order or
    /// zero points without their table; [`Error::Value`] for a `g_idx` with groups of different sizes;
    /// [`Error::Shape`] and [`Error::Size`] if the weight has another shape or group size than the
    /// layout; the errors of [`Weight::validate`].
    pub fn pack_weight(&self, weight: &Weight<'_>) -> Result<PackedRhs<'static>> {
        match self.tables {
            CpuTables::NONE => self.pack_blocks(weight),
            _ => self.pack_with_tables(weight),
        }
    }

    /// [`RhsLayout::pack_weight`] without tables.
    pub(super) fn pack_blocks(&self, weight: &Weight<'_>) -> Result<PackedRhs<'static>> {
        let parts = Parts::of(weight)?;
        let shape = weight.shape();
        if shape != self.shape() {
            let found = [shape.size_k, shape.size_n];
            return Err(Error::shape(&weight.name, &found, self.shape()));
        }
        let rows = shape.size_k / self.groups();
        if parts.group_size != rows {
            let what = format!("{}: group_size", weight.name);
            return Err(Error::size(what, parts.group_size, rows));
        }
        let mut bytes = vec![0u8; self.packed_len()];
        for (b, block) in bytes.chunks_exact_mut(self.block_bytes()).enumerate() {
            if self.nr() == NR[0] {
                self.fill::<{ NR[0] }>(weight, &parts, b, block);
            } else {
                self.fill::<{ NR[1] }>(weight, &parts, b, block);
            }
        }
        PackedRhs::new(*self, bytes)
    }

    /// Writes block `b`, of `N` columns.
    fn fill<const N: usize>(
        &self,
        weight: &Weight<'_>,
        parts: &Parts<'_>,
        b: usize,
        block: &mut [u8],
    ) {
        let size_n = self.shape().size_n;
        // Columns past the last one repeat it.
        let columns: [usize; N] = std::array::from_fn(|i| (b * N + i).min(size_n - 1));
        let whole = columns[0] + N <= size_n;
        let words = weight.codes.words();
        let rows = words.len() / size_n;
        // Eight k of each column.
        let row = |i: usize| -> [u32; N] {
            if i >= rows {
                return [ZEROS; N];
            }
            let row = &words[i * size_n..][..size_n];
            match row.get(columns[0]..).and_then(|r| r.first_chunk::<N>()) {
                Some(run) if whole => *run,
                _ => columns.map(|n| row[n]),
            }
        };
        let (mut integer_sums, mut float_sums) = ([0i32; N], [0.0f32; N]);
        let segments = self.padded_group() / CHUNK * 2;
        let (blocks, tail) = block.split_at_mut(self.groups() * self.group_bytes());
        for (g, group) in blocks.chunks_exact_mut(self.group_bytes()).enumerate() {
            let (codes, scale_bytes) = group.split_at_mut(segments * N * PIECE);
            let scales: [u16; N] = match parts.scales {
                Scales::Group(bits) => columns.map(|n| bits[g * size_n + n]),
                Scales::Channel(_) => [0; N],
            };
            let widened = scales.map(bf16_to_f32);
            for (s, out) in codes.chunks_exact_mut(N * PIECE).enumerate() {
                let first = (g * segments + s) / 2 * (CHUNK / PIECE) + s % 2;
                let sums = segment(row(first), row(first + 2), out);
                for i in 0..N {
                    integer_sums[i] = integer_sums[i].wrapping_add(16 * sums[i]);
                    float_sums[i] += sums[i] as f32 * widened[i];
                }
            }
            for (out, scale) in scale_bytes.chunks_exact_mut(2).zip(scales) {
                out.copy_from_slice(&scale.to_le_bytes());
            }
        }
        let bias = columns.map(|n| parts.bias[n].to_bits());
        let words: &[[u32; N]] = match parts.scales {
            Scales::Channel(bits) => &[
                integer_sums.map(|s| s as u32),
                columns.map(|n| (f32::from_bits(bits[n]) * 0.0625).to_bits()),
                bias,
            ],
            Scales::Group(_) => &[float_sums.map(f32::to_bits), bias],
        };
        for (out, word) in tail.chunks_exact_mut(4).zip(words.as_flattened()) {
            out.copy_from_slice(&word.to_le_bytes());
        }
    }
}

/// One segment of a block: k 0 to 7 of each column in `low`, the k sixteen further in `high`.
/// Returns Σw of each column.
fn segment<const N: usize>(low: [u32; N], high: [u32; N], out: &mut [u8]) -> [i32; N] {
    let mut sums = [0; N];
    for (i, piece) in out.chunks_exact_mut(PIECE).enumerate() {
        let (low, high) = (spread(low[i]), spread(high[i]));
        // Code − 8 in two's complement is the code with its highest bit flipped.
        let bytes = (low | high << 4) ^ 0x8888_8888_8888_8888;
        piece.copy_from_slice(&bytes.to_le_bytes());
        // Eight sums of two codes are at most 240: the multiplication adds them in the top byte.
        let sum = (low + high).wrapping_mul(0x0101_0101_0101_0101) >> 56;
        sums[i] = sum as i32 - 2 * 8 * PIECE as i32;
    }
    sums
}

/// Spreads the nibbles of `word` to bytes.
fn spread(word: u32) -> u64 {
    let x = u64::from(word);
    let x = (x | x << 16) & 0x0000_ffff_0000_ffff;
    let x = (x | x << 8) & 0x00ff_00ff_00ff_00ff;
    (x | x << 4) & 0x0f0f_0f0f_0f0f_0f0f
}
