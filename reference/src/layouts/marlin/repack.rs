//! The packing loops: word arithmetic on a tile at a time, without unpacking codes to bytes.
//!
//! Repacking is a permutation, so memory bandwidth limits it; the compiler vectorizes these loops
//! (see `simd`). `tile` defines the format, and tests compare these loops with it.

use super::tile::{Activations, TileMap};
use crate::weight::Codes;

/// The words `[tile_k / pack, size_n]` of one row of tiles, in the order of `codes`.
pub(super) fn source_rows<'a>(codes: &'a Codes<'_>, map: TileMap, tile_row: usize) -> &'a [u32] {
    let len = map.tile_k() / codes.pack() * codes.shape().size_n;
    &codes.words()[tile_row * len..][..len]
}

/// The words `[perm.len() / pack, width]` whose row k is row `perm[k]` of `source`, words
/// `[K / pack, width]`.
#[inline(always)]
pub(super) fn gather_rows(
    source: &[u32],
    width: usize,
    bits: u32,
    perm: &[u32],
    out: &mut Vec<u32>,
) {
    let pack = 32 / bits as usize;
    let mask = u32::MAX >> (32 - bits);
    out.clear();
    out.resize(perm.len() / pack * width, 0);
    for (rows, out) in perm.chunks_exact(pack).zip(out.chunks_exact_mut(width)) {
        for (slot, &k) in rows.iter().enumerate() {
            let (from, to) = (k % pack as u32 * bits, slot as u32 * bits);
            let source = &source[k as usize / pack * width..][..width];
            for (word, &s) in out.iter_mut().zip(source) {
                *word |= (s >> from & mask) << to;
            }
        }
    }
}

/// Packs (a part of) one row of tiles: `rows` from [`source_rows`] or [`gather_rows`], with
/// `size_n` columns, into the words `out` of the tiles.
#[inline(always)]
pub(super) fn pack_tile_row(map: TileMap, size_n: usize, rows: &[u32], out: &mut [u32]) {
    match (map.activations(), map.bits()) {
        (Activations::Bits16, 4) => tiles::<2, 64, 4>(size_n, rows, out, bits16_4),
        (Activations::Bits16, _) => tiles::<4, 64, 8>(size_n, rows, out, bits16_8),
        (Activations::Bits8, 4) => tiles::<4, 32, 4>(size_n, rows, out, bits8_4),
        (Activations::Bits8, _) => tiles::<8, 32, 8>(size_n, rows, out, bits8_8),
    }
}

/// The words of a tile before they are put in lane order: `[c][m][g]` belongs to lane 4g + c,
/// word m of that lane's run.
type Unordered<const WORDS: usize> = [[[u32; 8]; WORDS]; 4];

/// Walks the tiles of a row. `ROWS` source word rows, tiles of `WIDTH` columns, `WORDS` words
/// per lane.
#[inline(always)]
fn tiles<const ROWS: usize, const WIDTH: usize, const WORDS: usize>(
    size_n: usize,
    rows: &[u32],
    out: &mut [u32],
    fill: impl Fn(&[&[u32; WIDTH]; ROWS], &mut Unordered<WORDS>),
) {
    let mut words = [[[0; 8]; WORDS]; 4];
    for (tile, out) in out.chunks_exact_mut(32 * WORDS).enumerate() {
        let source: [&[u32; WIDTH]; ROWS] = std::array::from_fn(|r| {
            rows[r * size_n + tile * WIDTH..].first_chunk().expect("N is a multiple of the tile")
        });
        fill(&source, &mut words);
        for (g, lanes) in out.chunks_exact_mut(4 * WORDS).enumerate() {
            for (c, lane) in lanes.chunks_exact_mut(WORDS).enumerate() {
                for (m, word) in lane.iter_mut().enumerate() {
                    *word = words[c][m][g];
                }
            }
        }
    }
}

/// Low nibbles of the four bytes.
const LOW: u32 = 0x0f0f_0f0f;

/// 4 bits, 16-bit activations: lane 4g + c takes byte c (two k) of the words of columns
/// 16m + g and 16m + g + 8, low nibbles first.
#[inline(always)]
fn bits16_4(source: &[&[u32; 64]; 2], words: &mut Unordered<4>) {
    let [a, b] = source;
    for m in 0..4 {
        for g in 0..8 {
            let (n0, n1) = (16 * m + g, 16 * m + g + 8);
            let low = [(a[n0] & LOW) | (b[n0] & LOW) << 4, (a[n1] & LOW) | (b[n1] & LOW) << 4];
            let high = [(a[n0] >> 4 & LOW) | (b[n0] & !LOW), (a[n1] >> 4 & LOW) | (b[n1] & !LOW)];
            for (c, words) in words.iter_mut().enumerate() {
                let byte = |x: u32| x >> (8 * c) & 0xff;
                words[m][g] =
                    byte(low[0]) | byte(low[1]) << 8 | byte(high[0]) << 16 | byte(high[1]) << 24;
            }
        }
    }
}

/// 8 bits, 16-bit activations: lane 4g + c takes two bytes each of word rows c/2 and 2 + c/2,
/// columns 8m + g, even k first.
#[inline(always)]
fn bits16_8(source: &[&[u32; 64]; 4], words: &mut Unordered<8>) {
    for (c, words) in words.iter_mut().enumerate() {
        let (a, b, shift) = (source[c / 2], source[2 + c / 2], c % 2 * 16);
        for m in 0..8 {
            for g in 0..8 {
                let (a, b) = (a[8 * m + g] >> shift, b[8 * m + g] >> shift);
                words[m][g] =
                    (a & 0xff) | (b & 0xff) << 8 | (a >> 8 & 0xff) << 16 | (b >> 8 & 0xff) << 24;
            }
        }
    }
}

/// 4 bits, 8-bit activations: lane 4g + c takes half a word each of word rows c/2 and 2 + c/2,
/// columns 8m + g, nibble by nibble.
#[inline(always)]
fn bits8_4(source: &[&[u32; 32]; 4], words: &mut Unordered<4>) {
    let spread = |x: u32| {
        let x = (x | x << 8) & 0x00ff_00ff;
        (x | x << 4) & LOW
    };
    for (c, words) in words.iter_mut().enumerate() {
        let (a, b, shift) = (source[c / 2], source[2 + c / 2], c % 2 * 16);
        for m in 0..4 {
            for g in 0..8 {
                let half = |row: &[u32; 32]| row[8 * m + g] >> shift & 0xffff;
                words[m][g] = spread(half(a)) | spread(half(b)) << 4;
            }
        }
    }
}

/// 8 bits, 8-bit activations: whole words move.
#[inline(always)]
fn bits8_8(source: &[&[u32; 32]; 8], words: &mut Unordered<8>) {
    for (c, words) in words.iter_mut().enumerate() {
        for m in 0..4 {
            for g in 0..8 {
                words[2 * m][g] = source[c][8 * m + g];
                words[2 * m + 1][g] = source[4 + c][8 * m + g];
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::kernel::Kernel;
    use super::*;
    use crate::layouts::{Layout, marlin::WeightLayout};
    use crate::num::array::into_vec;
    use crate::num::dims::Shape;

    fn noise(len: usize, seed: u64) -> Vec<u32> {
        let mut x = seed;
        (0..len)
            .map(|_| {
                x = x
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                (x >> 32) as u32
            })
            .collect()
    }

    /// Compares every loop on every kernel of this machine, word for word, with the layout's
    /// definition of the position of (k, n), with and without a gather.
    #[test]
    fn loops_equal_the_definition() {
        for (bits, activations) in [
            (4, Activations::Bits16),
            (8, Activations::Bits16),
            (4, Activations::Bits8),
            (8, Activations::Bits8),
        ] {
            for (size_k, size_n) in [(32, 64), (128, 192), (64, 320)] {
                let shape = Shape::new(size_k, size_n);
                let words = noise(shape.len() * bits as usize / 32, size_n as u64);
                let codes = Codes::from_words(bits, shape, words).unwrap();
                let layout = WeightLayout::new(shape, bits, activations).unwrap();
                let keys = noise(size_k, 7);
                let mut perm: Vec<u32> = (0..size_k as u32).collect();
                perm.sort_by_key(|&k| keys[k as usize]);
                for perm in [None, Some(&perm[..])] {
                    let mut expected = vec![0u32; layout.packed_len()];
                    for k in 0..size_k {
                        for n in 0..size_n {
                            let slot = layout.offset(k, n);
                            let row = perm.map_or(k, |p| p[k] as usize);
                            expected[slot.element] |= u32::from(codes.get(row, n)) << slot.bit;
                        }
                    }
                    let tile_row = size_n / layout.tile_map().tile_n() * layout.tile_map().words();
                    for kernel in [Kernel::Portable, Kernel::detect()] {
                        let mut found = vec![0u32; layout.packed_len()];
                        for (t, out) in found.chunks_exact_mut(tile_row).enumerate() {
                            let mut scratch = Vec::new();
                            let rows = match perm {
                                None => source_rows(&codes, layout.tile_map(), t),
                                Some(perm) => {
                                    let tile_k = layout.tile_map().tile_k();
                                    let perm = &perm[t * tile_k..][..tile_k];
                                    kernel.gather_rows(
                                        codes.words(),
                                        size_n,
                                        bits,
                                        perm,
                                        &mut scratch,
                                    );
                                    assert_eq!(scratch.len(), tile_k * bits as usize / 32 * size_n);
                                    &scratch
                                }
                            };
                            kernel.pack_tile_row(layout.tile_map(), size_n, rows, out);
                        }
                        assert_eq!(
                            found, expected,
                            "{bits} bits {activations:?} {shape} {kernel:?}"
                        );
                    }
                    assert_eq!(into_vec(layout.pack(&codes, perm).unwrap()), expected);
                    assert_eq!(layout.unpack_words(&expected, perm).unwrap(), codes);
                }
            }
        }
    }
}
