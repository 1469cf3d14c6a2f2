//! Destinations of results.

use std::marker::PhantomData;

use super::ops::{Floats, add, clamp, lanes};
use crate::w4a8::Tile;

/// Receives results from registers, four columns of a row at a time.
pub(super) trait Results {
    /// The sums of row `m`, columns `n` to `n + 4` of a run, and these columns' biases.
    ///
    /// # Safety
    /// Row `m` exists.
    unsafe fn put(&mut self, m: usize, n: usize, sums: Floats, biases: Floats);
}

/// The results of one block, before bias and clamp.
impl Results for &mut Tile {
    #[inline(always)]
    unsafe fn put(&mut self, m: usize, n: usize, sums: Floats, _: Floats) {
        self[m][n..][..4].copy_from_slice(&lanes(sums));
    }
}

/// Rows of finished results.
pub(super) struct Rows<'a> {
    /// Column 0 of row 0.
    y: *mut f32,
    /// Distance between rows.
    stride: usize,
    /// Number of columns to write.
    columns: usize,
    memory: PhantomData<&'a mut [f32]>,
}

impl<'a> Rows<'a> {
    /// `rows` rows in `y`, row `m` from `m * stride` on. Panics if they do not fit.
    pub(super) fn new(y: &'a mut [f32], rows: usize, stride: usize, columns: usize) -> Self {
        let end = (rows - 1).checked_mul(stride).and_then(|last| last.checked_add(columns));
        assert!(columns <= stride || rows == 1, "{columns} columns, {stride} from row to row");
        assert!(end.is_some_and(|end| end <= y.len()), "{} results for {rows} rows", y.len());
        Self { y: y.as_mut_ptr(), stride, columns, memory: PhantomData }
    }
}

impl Results for Rows<'_> {
    #[inline(always)]
    unsafe fn put(&mut self, m: usize, n: usize, sums: Floats, biases: Floats) {
        let done = lanes(clamp(add(sums, biases)));
        let wanted = self.columns.saturating_sub(n);
        // SAFETY: `new` has checked that each row has `columns` values; the caller guarantees row
        // `m`; at most `wanted` values are written from column `n` on.
        unsafe {
            let y = self.y.add(m * self.stride);
            if wanted >= 4 {
                // One store; a variable length would be a call.
                y.add(n).cast::<[f32; 4]>().write(done);
            } else {
                for (i, &done) in done.iter().enumerate().take(wanted) {
                    y.add(n + i).write(done);
                }
            }
        }
    }
}
