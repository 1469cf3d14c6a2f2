//! Scores: queries times keys, as rows or in blocks of packed keys.

use crate::ops::vector::Vector;
use crate::ops::{LANES, tree};

/// Keys that are multiplied together, and stored together by [`pack`].
pub const BLOCK: usize = 2 * LANES;

/// The keys of one head, oldest first.
#[derive(Debug, Clone, Copy)]
pub enum Keys<'a> {
    /// `[n, head_dim]`.
    Rows(&'a [f32]),
    /// Blocks as [`pack`] stores them. With them a vector holds the products of sixteen keys, so that
    /// lanes need not be added across a vector.
    Packed {
        /// `[block][head_dim][BLOCK]`.
        blocks: &'a [f32],
        /// Keys of the first block before the first one that counts.
        skipped: usize,
    },
}

/// Up to [`BLOCK`] keys `[n, head_dim]` as `block` `[head_dim][BLOCK]`; what follows them is unspecified.
pub fn pack(keys: &[f32], head_dim: usize, block: &mut [f32]) {
    for (j, key) in keys.chunks_exact(head_dim).enumerate() {
        for (column, &x) in block.chunks_exact_mut(BLOCK).zip(key) {
            column[j] = x;
        }
    }
}

/// Where scores are stored: those of query i and key j at `scores[i * stride + j]`, times `scale`.
pub(super) struct Scores<'a> {
    pub(super) scores: &'a mut [f32],
    pub(super) stride: usize,
    pub(super) scale: f32,
}

impl Scores<'_> {
    /// Of the first Q queries `[Q, dim]` and up to [`BLOCK`] keys. Each is the sum that
    /// [`dot`](crate::ops::dot) defines.
    #[inline(always)]
    pub(super) fn of_rows<const Q: usize>(&mut self, queries: &[f32], keys: &[f32], dim: usize) {
        let whole = dim / LANES * LANES;
        // In one loop with the products, the additions of lanes would make the compiler use vectors of
        // four.
        let mut sums = [[Vector::ZERO; Q]; BLOCK];
        for (key, sums) in keys.chunks_exact(dim).zip(&mut sums) {
            let mut lanes = [Vector::ZERO; Q];
            let mut d = 0;
            while d < whole {
                let key = Vector::load(key, d);
                for i in 0..Q {
                    lanes[i] = lanes[i].add_product(Vector::load(queries, i * dim + d), key);
                }
                d += LANES;
            }
            *sums = lanes;
        }
        for (j, (key, sums)) in keys.chunks_exact(dim).zip(&mut sums).enumerate() {
            for i in 0..Q {
                let lanes = &mut sums[i].0;
                for d in whole..dim {
                    let lane = &mut lanes[d - whole];
                    *lane = queries[i * dim + d].mul_add(key[d], *lane);
                }
                self.scores[i * self.stride + j] = tree(*lanes) * self.scale;
            }
        }
    }

    /// As [`Scores::of_rows`], of a packed block.
    #[inline(always)]
    pub(super) fn of_block<const Q: usize>(&mut self, queries: &[f32], block: &[f32], dim: usize) {
        const HALF: usize = LANES / 2;
        let columns = block.as_chunks::<LANES>().0;
        // Lane l and lane l + 8 of the definition, added: the first level of its tree.
        let mut sums = [[[Vector::ZERO; 2]; Q]; HALF];
        for (lane, sums) in sums.iter_mut().enumerate() {
            let mut lanes = [[[Vector::ZERO; 2]; Q]; 2];
            let mut d = lane;
            while d < dim {
                for half in 0..2 {
                    let d = d + half * HALF;
                    if d >= dim {
                        break;
                    }
                    let keys = [Vector(columns[2 * d]), Vector(columns[2 * d + 1])];
                    for i in 0..Q {
                        let query = Vector([queries[i * dim + d]; LANES]);
                        for v in 0..2 {
                            lanes[half][i][v] = lanes[half][i][v].add_product(query, keys[v]);
                        }
                    }
                }
                d += LANES;
            }
            for i in 0..Q {
                for v in 0..2 {
                    sums[i][v] = lanes[0][i][v].plus(lanes[1][i][v]);
                }
            }
        }
        for i in 0..Q {
            for v in 0..2 {
                let even =
                    sums[0][i][v].plus(sums[4][i][v]).plus(sums[2][i][v].plus(sums[6][i][v]));
                let odd = sums[1][i][v].plus(sums[5][i][v]).plus(sums[3][i][v].plus(sums[7][i][v]));
                let total = even.plus(odd);
                let mut scaled = total;
                for lane in 0..LANES {
                    scaled.0[lane] *= self.scale;
                }
                scaled.store(self.scores, i * self.stride + v * LANES);
            }
        }
    }
}
