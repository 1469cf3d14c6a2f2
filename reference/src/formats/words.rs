//! Converts codes between the packings of files and the hub's words along K.

use std::borrow::Cow;

use ndarray::{Array2, ArrayView2};
use rayon::prelude::*;

use crate::num::dims::Shape;
use crate::num::tensor::{DType, Tensor};
use crate::weight::Codes;
use crate::{Error, Result};

/// Columns that a transposition moves at once: a cache line of the source.
const TILE_COLS: usize = 16;

/// Rows that it moves at once: four cache lines of the destination.
const TILE_ROWS: usize = 64;

/// Transposes `[rows, cols]` words to `[cols, rows]`, on rayon's threads.
pub fn transpose_words(words: ArrayView2<'_, u32>) -> Array2<u32> {
    let (rows, cols) = words.dim();
    let made = match words.to_slice() {
        Some(slice) => transposed(slice, rows, cols),
        None => words.t().iter().copied().collect(),
    };
    Array2::from_shape_vec((cols, rows), made).expect("the same words")
}

/// [`transpose_words`] of row-major words.
///
/// # Panics
/// Panics if `src` does not have `rows · cols` words, which is a programming error.
pub(crate) fn transposed(src: &[u32], rows: usize, cols: usize) -> Vec<u32> {
    assert_eq!(src.len(), rows * cols, "words of a {rows} x {cols} matrix");
    let mut dst = vec![0u32; src.len()];
    if src.is_empty() {
        return dst;
    }
    dst.par_chunks_mut(TILE_COLS * rows).enumerate().for_each(|(block, stripe)| {
        let first = block * TILE_COLS;
        let width = stripe.len() / rows;
        // Row lengths are often multiples of a page, so all lines of a column map to one cache set.
        // A tile therefore goes through a buffer, and both sides are accessed in whole cache lines.
        let mut tile = [[0u32; TILE_ROWS]; TILE_COLS];
        for r0 in (0..rows).step_by(TILE_ROWS) {
            let height = TILE_ROWS.min(rows - r0);
            for r in 0..height {
                let line = &src[(r0 + r) * cols + first..][..width];
                for (column, &word) in tile.iter_mut().zip(line) {
                    column[r] = word;
                }
            }
            for (column, out) in tile.iter().zip(stripe.chunks_exact_mut(rows)) {
                out[r0..r0 + height].copy_from_slice(&column[..height]);
            }
        }
    });
    dst
}

/// Transposes a square of fields: field j of word i becomes field i of word j. `P` words of `P`
/// fields, 8 of 4 bits or 4 of 8.
pub(super) fn transpose_fields<const P: usize>(square: &mut [u32; P]) {
    let bits = 32 / P;
    // Swaps quarters across the diagonal: first halves of the words, then halves of those.
    for (shift, mask) in [(16, 0x0000_ffffu32), (8, 0x00ff_00ff), (4, 0x0f0f_0f0f)] {
        let distance = shift / bits;
        if distance == 0 {
            break;
        }
        for i in (0..P).filter(|i| i & distance == 0) {
            let swap = (square[i] >> shift ^ square[i + distance]) & mask;
            square[i + distance] ^= swap;
            square[i] ^= swap << shift;
        }
    }
}

/// Packs 4-bit codes, one per byte, into words of eight; `codes` must fill whole words.
pub(super) fn pack_nibbles(codes: &[u8]) -> Vec<u32> {
    let (eights, _) = codes.as_chunks::<8>();
    let squeeze = |&bytes: &[u8; 8]| {
        let x = u64::from_le_bytes(bytes);
        let x = (x | x >> 4) & 0x00ff_00ff_00ff_00ff;
        let x = (x | x >> 8) & 0x0000_ffff_0000_ffff;
        (x | x >> 16) as u32
    };
    eights.iter().map(squeeze).collect()
}

/// The words of a packed integer tensor, borrowed where its bytes are aligned.
pub(super) fn int_words(tensor: Tensor<'_>) -> Result<Cow<'_, [u32]>> {
    tensor.expect_dtype(&[DType::I32, DType::U32])?;
    Ok(words(tensor.into_bytes()))
}

/// Bytes, four to a word, the first in the lowest bits.
///
/// Callers have checked that the bytes fill whole words.
pub(super) fn words(bytes: Cow<'_, [u8]>) -> Cow<'_, [u32]> {
    match bytes {
        Cow::Borrowed(b) => match bytemuck::try_cast_slice(b) {
            Ok(words) => Cow::Borrowed(words),
            Err(_) => Cow::Owned(bytemuck::allocation::pod_collect_to_vec(b)),
        },
        Cow::Owned(b) => Cow::Owned(bytemuck::allocation::pod_collect_to_vec(&b)),
    }
}

/// Codes from a column-major file: words `[size_n, size_k / pack]`, packed along K.
pub(super) fn codes_from_columns(bits: u32, shape: Shape, words: &[u32]) -> Result<Codes<'static>> {
    let rows = shape.k().packed(bits)?.0;
    if rows.checked_mul(shape.size_n) != Some(words.len()) {
        return Err(Error::shape("codes", &[words.len()], format!("{} x {rows}", shape.size_n)));
    }
    Codes::from_words(bits, shape, transposed(words, shape.size_n, rows))
}

/// The inverse of [`codes_from_columns`].
pub(super) fn columns_from_codes(codes: &Codes<'_>) -> Vec<u32> {
    let shape = codes.shape();
    transposed(codes.words(), shape.size_k / codes.pack(), shape.size_n)
}

/// The columns of a group of `pack` in the order of their fields: the file's own order.
pub(super) fn plain_order(bits: u32) -> &'static [usize] {
    if bits == 4 { &[0, 1, 2, 3, 4, 5, 6, 7] } else { &[0, 1, 2, 3] }
}

/// Takes codes out of `[rows, ceil(cols / pack)]` words packed along the last axis: field i of a
/// word holds column `order[i]` of its group. Codes past `cols` are padding and skipped.
pub(super) fn unpack_rows(words: &[u32], cols: usize, bits: u32, order: &[usize]) -> Vec<u8> {
    let pack = order.len();
    let per_row = cols.div_ceil(pack);
    if per_row == 0 {
        return Vec::new();
    }
    let mask = 0xff >> (8 - bits);
    let mut out = vec![0u8; words.len() / per_row * cols];
    for (row, line) in out.chunks_exact_mut(cols).zip(words.chunks_exact(per_row)) {
        for (group, &word) in row.chunks_mut(pack).zip(line) {
            for (i, &column) in order.iter().enumerate() {
                if let Some(code) = group.get_mut(column) {
                    *code = (word >> (i as u32 * bits)) as u8 & mask;
                }
            }
        }
    }
    out
}

/// The inverse of [`unpack_rows`]; padding is zero.
pub(super) fn pack_rows(codes: &[u8], cols: usize, bits: u32, order: &[usize]) -> Vec<u32> {
    let pack = order.len();
    let mut out = Vec::with_capacity(codes.len() / pack + 1);
    for row in codes.chunks_exact(cols.max(1)) {
        for group in row.chunks(pack) {
            let field = |i: usize| group.get(order[i]).map_or(0, |&c| u32::from(c));
            out.push((0..pack).fold(0, |word, i| word | field(i) << (i as u32 * bits)));
        }
    }
    out
}

/// `words` as an int32 tensor.
pub(super) fn int_tensor(
    name: String,
    shape: Vec<usize>,
    words: Vec<u32>,
) -> Result<Tensor<'static>> {
    Tensor::from_vec(name, DType::I32, shape, words)
}
