//! Batches times runs with AMX tiles.
//!
//! A tile of activations is up to sixteen rows of 64 k, read in place ([`Panel::lines`]); a tile of
//! weights is 1024 bytes of a block as it is stored. Sums of all k stay in tiles, four tiles of rows at
//! a time, because products into one tile wait for each other.

use super::avx512::Tail;
use super::{Avx512Vnni, Int8Run, Kernel};
use crate::layouts::int8::{K_UNIT, NR};
use crate::w4a8::x86::amx::plan::Batch;
use crate::w4a8::x86::amx::unit::{Amx, Operands, ROWS, Unit};
use crate::w4a8::x86::amx::{BATCH_ROWS, Rows};
use crate::w4a8::{MAX_PANELS, Panel};

/// The smallest number of rows that are faster with tiles.
const MIN_ROWS: usize = 16;
/// Sums of a tile.
const TILE: usize = ROWS * NR;

/// AMX tiles of int8, with AVX-512 VNNI for what surrounds them and for few rows.
#[derive(Debug, Clone, Copy)]
pub struct AmxInt8 {
    unit: Amx,
    vectors: Avx512Vnni,
}

impl AmxInt8 {
    /// The kernel, if this process may use tiles.
    pub fn new() -> Option<Self> {
        Some(Self { unit: Amx::new()?, vectors: Avx512Vnni::new()? })
    }
}

impl Kernel for AmxInt8 {
    fn name(&self) -> &'static str {
        "amx-int8"
    }

    fn unsigned(&self) -> bool {
        true
    }

    fn panels(&self) -> usize {
        MAX_PANELS
    }

    fn reads_lines(&self) -> bool {
        true
    }

    fn run(&self, panel: Panel<'_>, rhs: Int8Run<'_>, y: &mut [f32], stride: usize) {
        self.vectors.run(panel, rhs, y, stride);
    }

    fn run_all(&self, panels: &[Panel<'_>], rhs: Int8Run<'_>, y: &mut [f32], stride: usize) {
        let rows: usize = panels.iter().map(Panel::rows).sum();
        if rows >= MIN_ROWS
            && let Some(batch) = Batch::new(panels)
        {
            // SAFETY: the function needs AVX-512 F and FMA; the field `vectors` proves that they were
            // detected.
            return unsafe { run(self.unit, &batch, rhs, y, stride) };
        }
        self.vectors.run_all(panels, rhs, y, stride);
    }
}

/// Memory for the sums of a block.
#[repr(C, align(64))]
struct Sums([i32; BATCH_ROWS / ROWS * TILE]);

/// [`Kernel::run_all`] of the rows of `batch`.
///
/// Panics if a slice is shorter than its layout requires.
#[target_feature(enable = "avx512f,fma")]
fn run(unit: Amx, batch: &Batch, rhs: Int8Run<'_>, y: &mut [f32], stride: usize) {
    use std::arch::x86_64::*;
    let (layout, steps) = (rhs.layout, rhs.layout.padded_k() / K_UNIT);
    assert!(batch.codes == layout.padded_k(), "codes of the panels");
    rhs.check_blocks(y, stride, batch.rows);
    let rows = Rows::of(batch);
    let _tiles = unit.configure(rows.height, K_UNIT);
    let mut sums = Sums([0; BATCH_ROWS / ROWS * TILE]);
    for (b, block) in rhs.bytes.chunks_exact(layout.block_bytes()).enumerate() {
        let mut t = 0;
        while t < rows.tiles {
            let at = sums.0[t * TILE..].as_mut_ptr();
            macro_rules! multiply {
                ($n:literal) => {{
                    let weights = block.as_ptr();
                    let tile = [rows.height, K_UNIT];
                    let (stride, rows) = (rows.stride, std::array::from_fn(|i| rows.at(t + i)));
                    let operands = Operands::<$n> { rows, stride, weights, tile, steps };
                    // SAFETY: the tiles are configured. The batch has the rows, of `padded_k` codes each;
                    // the block has as many k of weights, and `sums` has room for the tiles.
                    unsafe { unit.multiply::<$n, false>(operands, at) };
                    $n
                }};
            }
            t += match rows.tiles - t {
                4.. => multiply!(4),
                2.. => multiply!(2),
                _ => multiply!(1),
            };
        }
        // SAFETY: three vectors follow the codes.
        let tail = unsafe { Tail::new(block[layout.code_bytes()..].as_ptr()) };
        let columns = (rhs.columns - b * NR).min(NR);
        let mask = ((1u32 << columns) - 1) as __mmask16;
        for t in 0..rows.tiles {
            for m in 0..rows.height {
                let row = rows.row(t) + m;
                let sum = &sums.0[t * TILE + m * NR..][..NR];
                let y = &mut y[row * stride + b * NR..][..columns];
                // SAFETY: the slices have a vector, and the columns that the mask selects.
                unsafe {
                    let sum = _mm512_loadu_si512(sum.as_ptr().cast());
                    let found = tail.signed(sum, batch.reciprocals[row]);
                    _mm512_mask_storeu_ps(y.as_mut_ptr(), mask, found);
                }
            }
        }
    }
}
