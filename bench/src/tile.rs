//! Weights: the columns of a tile, repeated to fill every matrix.
//!
//! The cost of a product depends on where its weights are in memory, not on their values. A few columns
//! are drawn and packed, then copied as whole blocks to every position of every matrix. Each matrix
//! begins with a different block.

use std::ops::Range;

use marlinspike::Result;
use marlinspike::num::dims::{GroupSize, LogicalK, Shape};
use marlinspike::num::scalar::f32_to_bf16_rne;
use marlinspike::vectors::Rng;
use marlinspike::w4a8::packed::{Columns, NR, PackedRhs, PackedStack, RhsLayout};

/// Columns per block, as in PyTorch.
const BLOCK: usize = NR[1];
/// Largest number of columns of a tile.
const COLUMNS: usize = 256;

/// Drawn columns of a matrix, with one scale per group.
#[derive(Debug, Clone, PartialEq)]
pub struct Tile {
    shape: Shape,
    group: GroupSize,
    columns: usize,
    /// `[columns, K]`, −8 to 7.
    codes: Vec<i8>,
    /// `[columns, groups]`, each of four significant bits: bf16 and f16 both hold it.
    scales: Vec<f32>,
}

impl Tile {
    /// The tile of `[K, N]` matrices. Panics unless N is a multiple of 8.
    ///
    /// # Errors
    /// [`marlinspike::Error::Size`] for groups that do not divide K.
    pub fn new(shape: Shape, group: GroupSize, seed: u64) -> Result<Self> {
        assert!(shape.size_n.is_multiple_of(BLOCK), "N {}", shape.size_n);
        let groups = group.groups(LogicalK(shape.size_k))?;
        let (columns, mut rng) = (shape.size_n.min(COLUMNS), Rng::new(seed));
        let codes = (0..columns * shape.size_k).map(|_| rng.below(16) as i8 - 8).collect();
        let scale = |_| (8 + rng.below(8)) as f32 / 512.0;
        let scales = (0..columns * groups).map(scale).collect();
        Ok(Self { shape, group, columns, codes, scales })
    }

    /// The matrices' shape.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// The column of the tile at column `n` of matrix `matrix`.
    pub fn column(&self, matrix: usize, n: usize) -> usize {
        (n + matrix * BLOCK) % self.columns
    }

    /// Drawn columns.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Codes of a column of the tile, `[K]`. Panics if `column` is out of range.
    pub fn codes(&self, column: usize) -> &[i8] {
        &self.codes[column * self.shape.size_k..][..self.shape.size_k]
    }

    /// Scales of a column of the tile, `[groups]`. Panics if `column` is out of range.
    pub fn scales(&self, column: usize) -> &[f32] {
        let groups = self.scales.len() / self.columns;
        &self.scales[column * groups..][..groups]
    }

    /// A column of the tile as floats, `[K]`.
    pub fn floats(&self, column: usize) -> impl Iterator<Item = f32> {
        let (codes, scales) = (self.codes(column), self.scales(column));
        let rows = self.shape.size_k / scales.len();
        codes.iter().enumerate().map(move |(k, &w)| f32::from(w) * scales[k / rows])
    }

    /// Matrices 0 to `count` in this project's packing.
    ///
    /// # Errors
    /// As [`RhsLayout::new`]'s.
    pub fn stack(&self, count: usize) -> Result<PackedStack<'static>> {
        let (layout, bytes) = self.packed(0..count)?;
        PackedStack::new("weights of a benchmark", layout, bytes)
    }

    /// Matrix `matrix` in this project's packing.
    ///
    /// # Errors
    /// As [`RhsLayout::new`]'s.
    pub fn matrix(&self, matrix: usize) -> Result<PackedRhs<'static>> {
        let (layout, bytes) = self.packed(matrix..matrix + 1)?;
        PackedRhs::new(layout, bytes)
    }

    fn packed(&self, matrices: Range<usize>) -> Result<(RhsLayout, Vec<u8>)> {
        let size_k = self.shape.size_k;
        let narrow = Shape::new(size_k, self.columns);
        let columns = match self.group {
            GroupSize::Of(g) if g != size_k => {
                let scales = self.scales.iter().map(|&s| f32_to_bf16_rne(s)).collect();
                Columns::group_wise(narrow, g, self.codes.clone(), scales, None)
            }
            _ => Columns::channel_wise(narrow, self.codes.clone(), &self.scales, None),
        }?;
        let narrow = RhsLayout::new(narrow, self.group, BLOCK)?;
        let layout = RhsLayout::new(self.shape, self.group, BLOCK)?;
        let packed = narrow.pack(&columns)?;
        let blocks: Vec<_> = packed.bytes().chunks_exact(narrow.block_bytes()).collect();
        let mut bytes = Vec::with_capacity(matrices.len() * layout.packed_len());
        for matrix in matrices {
            let places = (0..layout.blocks()).map(|b| self.column(matrix, b * BLOCK) / BLOCK);
            places.for_each(|block| bytes.extend_from_slice(blocks[block]));
        }
        Ok((layout, bytes))
    }
}

/// Activations from −1 to 1, `len` of them.
pub fn activations(len: usize, seed: u64) -> Vec<f32> {
    let mut rng = Rng::new(seed);
    (0..len).map(|_| (rng.below(4001) as f32 - 2000.0) / 2000.0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Packing block by block equals packing the whole matrix.
    #[test]
    fn stacks_hold_the_columns_they_say() {
        for group in [GroupSize::Of(32), GroupSize::Channel] {
            // More columns than the tile's, and not a multiple of them.
            let shape = Shape::new(64, 328);
            let tile = Tile::new(shape, group, 1).unwrap();
            let stack = tile.stack(3).unwrap();
            for matrix in 0..3 {
                let at = |n: usize| tile.column(matrix, n);
                let columns = 0..shape.size_n;
                let codes = columns.clone().flat_map(|n| tile.codes(at(n))).copied().collect();
                let scales: Vec<f32> = columns.flat_map(|n| tile.scales(at(n))).copied().collect();
                let whole = match group {
                    GroupSize::Of(g) => {
                        let bits = scales.iter().map(|&s| f32_to_bf16_rne(s)).collect();
                        Columns::group_wise(shape, g, codes, bits, None)
                    }
                    GroupSize::Channel => Columns::channel_wise(shape, codes, &scales, None),
                };
                let layout = RhsLayout::new(shape, group, BLOCK).unwrap();
                let packed = layout.pack(&whole.unwrap()).unwrap();
                assert!(stack.matrix(matrix) == packed.bytes(), "{group} matrix {matrix}");
                assert!(tile.matrix(matrix).unwrap() == packed, "{group} matrix {matrix}");
            }
        }
    }

    #[test]
    fn scales_are_exact_in_sixteen_bits() {
        let tile = Tile::new(Shape::new(64, 16), GroupSize::Of(32), 2).unwrap();
        for column in 0..16 {
            for &scale in tile.scales(column) {
                // Four significant bits from 2^-6 on: bf16 has eight, f16 eleven down to 2^-14.
                assert_eq!(scale.to_bits() & 0xfffff, 0);
                assert!((1.0 / 64.0..1.0 / 32.0).contains(&scale));
            }
        }
    }
}
