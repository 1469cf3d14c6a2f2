//! Activations to 8 bits, one scale per token.

use std::marker::PhantomData;

use marlinspike::Result;
use marlinspike::num::scalar::ScalarType;
use marlinspike::quantize::{Int8Rule, per_token_fp8, per_token_int8};
use proptest::prelude::*;

use super::{Fill, dtype, fill, finite_halves, one_of};
use crate::Operation;

/// The rule of a quantizer: how a row becomes codes and a scale.
pub trait QuantizeRule: std::fmt::Debug + 'static {
    /// Upstream's name.
    const NAME: &'static str;
    /// Parameter of the rule.
    type Choice: Copy + std::fmt::Debug + 'static;
    /// All values of the parameter.
    const CHOICES: &'static [Self::Choice];
    /// Codes, zero-extended, of rows of `size_k`, and the rows' scales.
    ///
    /// # Errors
    /// Returns an error for incomplete rows and values that are not finite.
    fn apply(x: &[f32], size_k: usize, choice: Self::Choice) -> Result<(Vec<u32>, Vec<f32>)>;
}

/// The rule of [`PerTokenInt8`].
#[derive(Debug)]
pub struct Int8;

/// The rule of [`PerTokenFp8`].
#[derive(Debug)]
pub struct Fp8;

impl QuantizeRule for Int8 {
    const NAME: &'static str = "per_token_quant_int8";
    type Choice = Int8Rule;
    const CHOICES: &'static [Int8Rule] = &[Int8Rule::Quotient, Int8Rule::Product];

    fn apply(x: &[f32], size_k: usize, rule: Int8Rule) -> Result<(Vec<u32>, Vec<f32>)> {
        let q = per_token_int8(x, size_k, rule)?;
        Ok((q.codes.iter().map(|&c| u32::from(c.cast_unsigned())).collect(), q.scales))
    }
}

impl QuantizeRule for Fp8 {
    const NAME: &'static str = "per_token_quant_fp8";
    /// Upper bound of the magnitude used for a scale.
    type Choice = Option<f32>;
    const CHOICES: &'static [Option<f32>] = &[None, Some(0.5), Some(1e-4)];

    fn apply(x: &[f32], size_k: usize, upper: Option<f32>) -> Result<(Vec<u32>, Vec<f32>)> {
        let q = per_token_fp8(x, size_k, upper)?;
        Ok((q.codes.iter().map(|&c| c.into()).collect(), q.scales))
    }
}

/// Activations to 8 bits; the output is each row's codes, zero-extended, and then all scales' bits.
#[derive(Debug)]
pub struct PerToken<R>(PhantomData<R>);

/// `per_token_quant_int8`.
pub type PerTokenInt8 = PerToken<Int8>;
/// `per_token_quant_fp8` (upstream's operator: `dynamic_per_token_scaled_fp8_quant`).
pub type PerTokenFp8 = PerToken<Fp8>;

/// Arguments of [`PerTokenInt8`] and [`PerTokenFp8`].
#[derive(Debug, Clone)]
pub struct PerTokenInput<C> {
    /// `[M, size_k]`, finite bits of `dtype`.
    pub x: Vec<u16>,
    /// float16 or bfloat16.
    pub dtype: ScalarType,
    /// Columns.
    pub size_k: usize,
    /// The rule's parameter.
    pub choice: C,
}

impl<R: QuantizeRule> Operation for PerToken<R> {
    const NAME: &'static str = R::NAME;
    type Input = PerTokenInput<R::Choice>;
    type Element = u32;

    fn inputs() -> BoxedStrategy<Self::Input> {
        // Sizes around a warp and a thread block, and one more or less.
        let columns = one_of(&[1usize, 31, 32, 33, 127, 128, 129, 257, 512, 1000]);
        let choices = (0..R::CHOICES.len()).prop_map(|i| R::CHOICES[i]);
        (1usize..6, columns, dtype(), choices, fill(), 0u32..4)
            .prop_map(|(rows, size_k, dtype, choice, fill, kind)| {
                let mut x = finite_halves(fill, rows * size_k, dtype);
                match kind {
                    // Only subnormals, and a row of zeros.
                    0 => x.iter_mut().for_each(|bits| *bits &= 0x807f),
                    1 => x[..size_k].fill(0),
                    // About equal magnitudes.
                    2 => {
                        let noise = Fill::Noise(x[0].into()).words(x.len());
                        for (bits, word) in x.iter_mut().zip(noise) {
                            *bits = 0x3c00 | (word & 0x80ff) as u16;
                        }
                    }
                    _ => {}
                }
                PerTokenInput { x, dtype, size_k, choice }
            })
            .boxed()
    }

    fn expected(i: &Self::Input) -> Result<Vec<u32>> {
        let x: Vec<f32> = i.x.iter().map(|&bits| i.dtype.to_f64(bits.into()) as f32).collect();
        let (mut out, scales) = R::apply(&x, i.size_k, i.choice)?;
        out.extend(scales.iter().map(|s| s.to_bits()));
        Ok(out)
    }

    fn len(i: &Self::Input) -> Result<usize> {
        Ok(i.x.len() + i.x.len() / i.size_k)
    }

    fn place(i: &Self::Input, element: usize, _bit: u32) -> String {
        match element.checked_sub(i.x.len()) {
            None => format!("code of row {} column {}", element / i.size_k, element % i.size_k),
            Some(row) => format!("scale of row {row}"),
        }
    }

    fn describe(i: &Self::Input) -> String {
        let PerTokenInput { x, dtype, size_k, choice } = i;
        format!("{dtype} [{}, {size_k}] {choice:?}", x.len() / size_k)
    }
}
