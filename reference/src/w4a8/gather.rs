//! Rows whose columns are in the order of a weight's rows.

use super::buffer::grow;
use super::parallel::{Wide, for_parts};
use super::rows::Element;
use super::runs::GRAIN;

/// Memory for gathered rows of either type. It grows and is reused.
#[derive(Debug, Clone, Default)]
pub(super) struct Gathered {
    f32s: Vec<f32>,
    bf16s: Vec<u16>,
}

impl Gathered {
    /// Makes room for rows of `values` values together, of either type.
    pub(super) fn reserve(&mut self, values: usize) {
        grow(&mut self.f32s, values);
        grow(&mut self.bf16s, values);
    }

    /// The memory, for `values` values.
    pub(super) fn values<T: Element>(&mut self, values: usize) -> &mut [T] {
        let memory = T::of(&mut self.f32s, &mut self.bf16s);
        grow(memory, values);
        &mut memory[..values]
    }

    /// `rows` rows, each gathered by the same `order`.
    pub(super) fn rows<'s, 'x, T: Element>(
        &'s mut self,
        order: &[[u8; 4]],
        rows: usize,
        row: impl Fn(usize) -> &'x [T] + Sync,
    ) -> &'s [T] {
        let values = self.values(rows * order.len());
        let parts = Wide { values, width: order.len() };
        for_parts(0..rows, parts, GRAIN / order.len(), &|row| row, &|m, out| {
            gather(order, row(m), out.values);
        });
        self.values(rows * order.len())
    }
}

/// `out[k] = row[order[k]]`.
pub(super) fn gather<T: Copy>(order: &[[u8; 4]], row: &[T], out: &mut [T]) {
    for (out, &at) in out.iter_mut().zip(order) {
        *out = row[u32::from_le_bytes(at) as usize];
    }
}
