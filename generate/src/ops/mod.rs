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

pub use dot::{LANES, dot, sum, tree};

/// g / (1 + e^−g) · u, elementwise into `gate`, as the int4 path activates its experts.
pub fn silu_and_mul(gate: &mut [f32], up: &[f32]) {
    marlinspike::w4a8::wide::wide(Silu { gate, up });
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

/// `x += y`, elementwise.
pub fn add(x: &mut [f32], y: &[f32]) {
    for (x, &y) in x.iter_mut().zip(y) {
        *x += y;
    }
}
