//! The f32 operations of a decoder, each with one order of additions.
//!
//! Every output depends on one row of the input, on weights and, in attention, on the row's own keys
//! and values. No operation adds across rows, and no order depends on the number of rows or threads.
//! The bits are therefore the same for any batch, any cut of a prompt and any number of threads, on
//! every CPU.
//!
//! A sum over k uses [`LANES`] partial sums: element k goes to lane k mod 16 by one fused
//! multiply-add, ascending, and the lanes are added as a tree ([`tree`]).

pub mod attention;
pub mod dense;
mod dot;
pub mod norm;
pub mod rope;
mod vector;

use rayon::prelude::*;

pub use dot::{LANES, dot, sum, tree};

/// Smallest number of values of a work item in steps that only move or convert them; fewer are not worth
/// waking a thread.
const GRAIN: usize = 1 << 14;

/// Rows of `width` values of one work item.
pub(crate) fn item_rows(width: usize) -> usize {
    (GRAIN / width.max(1)).max(1)
}

/// Makes `values` `len` long. The caller overwrites what they hold.
pub(crate) fn resize(values: &mut Vec<f32>, len: usize) {
    if values.capacity() < len {
        // Zeros from the system: the threads that write them first share the work of mapping their pages.
        *values = Vec::new();
        *values = vec![0.0; len];
    }
    values.resize(len, 0.0);
}

/// g / (1 + e^−g) · u, elementwise into `gate`, as the int4 path activates its experts; on rayon's current
/// pool.
pub fn silu_and_mul(gate: &mut [f32], up: &[f32]) {
    let items = gate.par_chunks_mut(GRAIN).zip(up.par_chunks(GRAIN));
    items.for_each(|(gate, up)| marlinspike::w4a8::wide::wide(Silu { gate, up }));
}

struct Silu<'a> {
    gate: &'a mut [f32],
    up: &'a [f32],
}

impl marlinspike::w4a8::wide::Loop for Silu<'_> {
    #[inline(always)]
    fn run(self) {
        for (g, &u) in self.gate.iter_mut().zip(self.up) {
            *g = *g / (1.0 + marlinspike::moe::math::exp(-*g)) * u;
        }
    }
}

/// gpt-oss's activation of rows whose gate and up alternate: with g = min(gate, limit) and
/// u = clamp(up, ±limit), (u + 1) · (g / (1 + e^(−α·g))). `parameters` are α and the limit.
pub fn swiglu_oai(gate_up: &[f32], parameters: [f32; 2], out: &mut [f32]) {
    marlinspike::w4a8::wide::wide(SwigluOai { gate_up, parameters, out });
}

struct SwigluOai<'a> {
    gate_up: &'a [f32],
    parameters: [f32; 2],
    out: &'a mut [f32],
}

impl marlinspike::w4a8::wide::Loop for SwigluOai<'_> {
    #[inline(always)]
    fn run(self) {
        let [alpha, limit] = self.parameters;
        for (pair, y) in self.gate_up.chunks_exact(2).zip(self.out) {
            // These limits keep a NaN.
            let g = if pair[0] > limit { limit } else { pair[0] };
            let u = pair[1].clamp(-limit, limit);
            *y = (u + 1.0) * (g / (1.0 + marlinspike::moe::math::exp(-(alpha * g))));
        }
    }
}

/// `x += y`, elementwise, on rayon's current pool.
pub fn add(x: &mut [f32], y: &[f32]) {
    x.par_chunks_mut(GRAIN).zip(y.par_chunks(GRAIN)).for_each(|(x, y)| add_piece(x, y));
}

/// `x += y`, elementwise, on the caller's thread.
pub(crate) fn add_piece(x: &mut [f32], y: &[f32]) {
    for (x, &y) in x.iter_mut().zip(y) {
        *x += y;
    }
}
