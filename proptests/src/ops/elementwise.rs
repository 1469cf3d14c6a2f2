//! The activation between the two products of an expert, and the sum after them.

use marlinspike::Result;
use marlinspike::case::Activation;
use marlinspike::moe::Chain;
use marlinspike::moe::activation::Definition;
use marlinspike::moe::sum::sum;
use marlinspike::num::scalar::ScalarType;
use proptest::prelude::*;

use super::{any_halves, dtype, fill, finite_halves, one_of};
use crate::Operation;

/// `silu_and_mul` and its like, by the canonical chain: f32, one rounding.
#[derive(Debug)]
pub struct Activate;

/// Arguments of [`Activate`].
#[derive(Debug, Clone)]
pub struct ActivateInput {
    /// `[rows, definition.width_in(size_i)]`, any bits of `dtype`.
    pub gate_up: Vec<u16>,
    /// float16 or bfloat16.
    pub dtype: ScalarType,
    /// Columns of the result.
    pub size_i: usize,
    /// The function.
    pub definition: Definition,
}

const SIZES: &[usize] = &[1, 7, 64, 127, 256, 300];

impl Operation for Activate {
    const NAME: &'static str = "moe_activation";
    type Input = ActivateInput;
    type Element = u16;

    fn inputs() -> BoxedStrategy<ActivateInput> {
        let kinds = (0..Activation::NAMED.len()).prop_map(|i| Activation::NAMED[i].1);
        let changes =
            (any::<bool>(), prop_oneof![3 => Just(None), 1 => (0.5f32..9.0).prop_map(Some)]);
        (1usize..5, one_of(SIZES), dtype(), kinds, changes, fill(), 0u32..3)
            .prop_map(|(rows, size_i, dtype, kind, (exchanged, limit), fill, values)| {
                let mut definition = Definition::new(kind);
                definition.exchanged = exchanged && definition.is_gated();
                if let Some(limit) = limit.filter(|_| definition.is_gated()) {
                    definition = definition.with_limit(limit);
                }
                let len = rows * definition.width_in(size_i);
                let gate_up = match values {
                    0 => any_halves(fill, len),
                    // Magnitudes from 1/16 to 16, where the functions bend.
                    1 => {
                        let (low, step) = if dtype == ScalarType::FLOAT16 {
                            (0x2c00, 0x2000)
                        } else {
                            (0x3d80, 0x400)
                        };
                        let number = |bits: u16| (bits & 0x8000) | (low + bits % step);
                        any_halves(fill, len).into_iter().map(number).collect()
                    }
                    _ => finite_halves(fill, len, dtype),
                };
                ActivateInput { gate_up, dtype, size_i, definition }
            })
            .boxed()
    }

    fn expected(i: &ActivateInput) -> Result<Vec<u16>> {
        i.definition.apply(&i.gate_up, i.dtype, i.size_i, Chain::Canonical)
    }

    fn place(i: &ActivateInput, element: usize, _bit: u32) -> String {
        format!("row {} column {}", element / i.size_i, element % i.size_i)
    }

    fn describe(i: &ActivateInput) -> String {
        let rows = i.gate_up.len() / i.definition.width_in(i.size_i);
        format!("{} [{rows}, {}] {:?}", i.dtype, i.size_i, i.definition)
    }
}

/// `moe_sum` by the canonical chain: f32 in the order of the slots, one rounding.
#[derive(Debug)]
pub struct SumSlots;

/// Arguments of [`SumSlots`].
#[derive(Debug, Clone)]
pub struct SumInput {
    /// `[rows, top_k, size_n]`, any bits of `dtype`.
    pub down: Vec<u16>,
    /// float16 or bfloat16.
    pub dtype: ScalarType,
    /// Slots of a token.
    pub top_k: usize,
    /// Columns.
    pub size_n: usize,
}

impl Operation for SumSlots {
    const NAME: &'static str = "moe_sum";
    type Input = SumInput;
    type Element = u16;

    fn inputs() -> BoxedStrategy<SumInput> {
        (1usize..6, 1usize..11, one_of(SIZES), dtype(), fill(), any::<bool>())
            .prop_map(|(rows, top_k, size_n, dtype, fill, any_bits)| {
                let len = rows * top_k * size_n;
                let down =
                    if any_bits { any_halves(fill, len) } else { finite_halves(fill, len, dtype) };
                SumInput { down, dtype, top_k, size_n }
            })
            .boxed()
    }

    fn expected(i: &SumInput) -> Result<Vec<u16>> {
        sum(&i.down, i.dtype, i.top_k, i.size_n, Chain::Canonical)
    }

    fn place(i: &SumInput, element: usize, _bit: u32) -> String {
        format!("token {} column {}", element / i.size_n, element % i.size_n)
    }

    fn describe(i: &SumInput) -> String {
        let SumInput { down, dtype, top_k, size_n } = i;
        format!("{dtype} [{}, {top_k}, {size_n}]", down.len() / top_k / size_n)
    }
}
