//! The operations of the kit, with their arguments.

mod align;
mod awq;
mod cases;
mod distribution;
mod dyn_quant;
mod elementwise;
mod global_scale;
pub mod layer;
mod product;
mod quantize;
mod repack;
mod router;
mod routing;
mod scales;
mod zeros;

pub use align::{AlignBlocks, AlignInput};
pub use awq::{AwqInput, AwqRepack, AwqZeroPoints, AwqZerosInput};
pub use cases::*;
pub use distribution::Distribution;
pub use dyn_quant::{
    DynQuantActivationsInput, DynQuantPackActivations, DynQuantPackWeight, DynQuantWeightInput,
};
pub use elementwise::{Activate, ActivateInput, SumInput, SumSlots};
pub use global_scale::{E4m3Input, E4m3Scales, GlobalInput, GlobalScale};
pub use layer::{
    Fp8Experts, LayerInput, Local, MoeLayer, W4a8Experts, layer_of_rows, local_of_rows, moe_lattice,
};
pub use product::{DenseInput, DenseProduct, ExpertInput, ExpertProduct, ProductWeight};
pub use quantize::{PerTokenFp8, PerTokenInput, PerTokenInt8, QuantizeRule};
pub use repack::{Fp4Input, Fp4Repack, MergeInput, MergeW13, Repack, RepackInput};
pub use router::{RouterInput, TopkRouter};
pub use routing::{ShardInput, ShardScales, Sort, SortInput};
pub use scales::{
    BiasInput, Int8Input, Int8Scales, MxInput, MxScales, PermuteBias, PermuteScales, ScalesInput,
};
pub use zeros::{GptqZeroPoints, GptqZerosInput, Preprocess, PreprocessInput};

use marlinspike::num::scalar::ScalarType;
use marlinspike::vectors::Rng;
use proptest::prelude::*;

use crate::bug::Bug;
use crate::mutant::Mutant;

/// Wrong variants of layout operations.
pub(crate) fn mutants() -> Vec<Mutant> {
    let of = [
        repack::mutants,
        scales::mutants,
        global_scale::mutants,
        routing::mutants,
        zeros::mutants,
        awq::mutants,
    ];
    of.into_iter().flat_map(|mutants| mutants()).collect()
}

/// Bugs of the bank that concern one format.
pub(crate) fn bugs() -> Vec<Bug> {
    [awq::bugs(), global_scale::bugs()].concat()
}

/// Contents of a tensor: shrinks from noise to a ramp in which neighbours differ.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Fill {
    /// Element i is i.
    Ramp,
    /// All elements have these bits.
    Same(u32),
    /// Random bits.
    Noise(u64),
}

pub(crate) fn fill() -> impl Strategy<Value = Fill> {
    prop_oneof![
        1 => Just(Fill::Ramp),
        1 => any::<u32>().prop_map(Fill::Same),
        6 => any::<u64>().prop_map(Fill::Noise),
    ]
}

impl Fill {
    /// `len` elements of 32 bits.
    pub(crate) fn words(self, len: usize) -> Vec<u32> {
        let mut rng = Rng::new(match self {
            Self::Noise(seed) => seed,
            _ => 0,
        });
        (0..len)
            .map(|i| match self {
                // Nibble j of word i is i + j: neighbours differ along both axes.
                Self::Ramp => (i as u32).wrapping_mul(0x1111_1111).wrapping_add(0x7654_3210),
                Self::Same(bits) => bits,
                Self::Noise(_) => rng.next_u32(),
            })
            .collect()
    }

    /// `len` finite, not negative 16-bit floats, the first one positive. `spare` exponents at the
    /// top stay unused.
    pub(crate) fn scales(self, len: usize, dtype: ScalarType, spare: u32) -> Vec<u16> {
        let (mantissa, top) = match dtype {
            ScalarType::FLOAT16 => (10, 30 - spare),
            _ => (7, 254 - spare),
        };
        let limit = (top + 1) << mantissa;
        let start = (top.min(if mantissa == 10 { 15 } else { 127 }) - 6) << mantissa;
        let mut bits: Vec<u16> = match self {
            Self::Ramp => (0..len).map(|i| (start + i as u32 % (4 << mantissa)) as u16).collect(),
            _ => self.words(len).iter().map(|w| (w % limit) as u16).collect(),
        };
        if let Some(first) = bits.first_mut() {
            *first = (*first).max(1);
        }
        bits
    }

    /// `len` bytes up to `max`, the first one positive.
    pub(crate) fn bytes(self, len: usize, max: u8) -> Vec<u8> {
        let range = u32::from(max) + 1;
        let mut bytes: Vec<u8> = match self {
            Self::Ramp => (0..len).map(|i| (i % range as usize) as u8).collect(),
            _ => self.words(len).iter().map(|w| (w % range) as u8).collect(),
        };
        if let Some(first) = bytes.first_mut() {
            *first = (*first).max(1);
        }
        bytes
    }
}

/// Any bits of 16-bit floats, including NaN and infinities.
pub(crate) fn any_halves(fill: Fill, len: usize) -> Vec<u16> {
    fill.words(len).iter().map(|&word| word as u16).collect()
}

/// Finite bits of 16-bit floats, of any magnitude.
pub(crate) fn finite_halves(fill: Fill, len: usize, dtype: ScalarType) -> Vec<u16> {
    let top = if dtype == ScalarType::FLOAT16 { 0x0400 } else { 0x0080 };
    let exponent = if dtype == ScalarType::FLOAT16 { 0x7c00 } else { 0x7f80 };
    let finite = |bits: u16| if bits & exponent == exponent { bits & !top } else { bits };
    any_halves(fill, len).into_iter().map(finite).collect()
}

/// f16, then bf16.
pub(crate) fn dtype() -> impl Strategy<Value = ScalarType> {
    prop_oneof![Just(ScalarType::FLOAT16), Just(ScalarType::BFLOAT16)]
}

/// One of `items`, shrinking to the first.
pub(crate) fn one_of<T: Clone + std::fmt::Debug + 'static>(
    items: &'static [T],
) -> impl Strategy<Value = T> {
    (0..items.len()).prop_map(|i| items[i].clone())
}
