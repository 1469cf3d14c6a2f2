//! Bounds on the error of a correct kernel's sum.
//!
//! A [`Class`] states the operations of a kernel and their possible orders. From it follows, for
//! each element, a bound on the error of the f32 sum that no kernel of the class can exceed. The
//! bound contains no chosen tolerance.
//!
//! # Derivation
//!
//! Let S be the exact sum, P the sum of its positive products and N that of the negative ones'
//! magnitudes, and Ĉ a bound on the magnitude of every partial sum that a kernel of the class can
//! compute. Every kernel of the class makes `n` additions of the kind below.
//!
//! *Partial sums in any order.* A matrix unit truncates toward zero: a truncated term keeps its
//! sign and does not grow, so a computed partial sum stays between −N and P. Only roundings to
//! nearest can enlarge it, each by 2^-24 of itself: Ĉ = max(P, N)·(1 + 2^-24)^m for m of them. The
//! computed sum also lies in that interval, so no bound exceeds it.
//!
//! *Partial sums of ranges.* If a kernel forms only sums over ranges of k, or over a warp's share
//! of each tile of k, a partial sum is the difference of two prefix sums of that series. C is the
//! largest prefix sum minus the least, over all series that the class allows; for random data it is
//! smaller by a factor of about √K. With its errors, a computed partial sum is at most Ĉ = C + B.
//! Since B depends on Ĉ, B is computed at a larger reach that includes it, but never larger than
//! that of any order.
//!
//! *A matrix unit* ([`super::tensor_core`]) with F fraction bits adds t products to an accumulator c.
//! With E the largest exponent among them, each of the t + 1 terms loses less than u = 2^(E − F), and
//! the truncation of the sum to p bits less than 2^(e + 1 − p), e the sum's exponent. c and the sum
//! are at most Ĉ, so that E ≤ max(⌊log₂ Ĉ⌋, the largest exponent of a product) and e ≤ ⌊log₂ Ĉ⌋. An
//! instruction may run as several such sums. The exponent of a product is the sum of its factors'
//! exponents; a subnormal factor counts with its type's least exponent, every other with its own.
//!
//! Truncation lowers positive products and raises negative ones: the sum is too low by less than Σ
//! min(p, u) over the positive products p, and too high by less than the same sum over the negative
//! ones. The bounds below and above S therefore differ.
//!
//! *Contiguous runs of k* ([`Order::Contiguous`]), cut anywhere: before block j an accumulator is
//! the difference of the prefix sum there and an earlier one, so each block has its own reach and
//! its own u.
//!
//! *Group scales that multiply sums* (8-bit activations): the unit's sums end with each group, so
//! each group has its own Ĉ. The unit aligns codes without the scale s: in terms of the scaled sum,
//! 2^⌊log₂ c⌋·s is at most Ĉ itself, so ⌊log₂⌋ is not applied to sums or weights. The rounding of a
//! group's multiply-add is smaller than the accumulator truncation that its first sum lacks.
//!
//! Where activations have a scale r for each group, too ([`Rows::scaled`](super::Rows::scaled)), s is
//! s·r, and a group rounds twice more: the product of the scales and that with the sum, or a product
//! with each. A product of scales below the least normal f32 loses up to 2^-150, which is counted
//! for every pair of codes.
//!
//! *Fused multiply-add*: each rounds once, by at most 2^(⌊log₂ Ĉ⌋ − 24). With a separate product,
//! 2^-24·Σ|a·w| is added for the roundings of the products.
//!
//! *Integer groups*: the sum of a group, or of several with integer scales, is an exact integer.
//! Its conversion to f32 and the multiplications by the scales of its group or column and of its
//! row of activations round at most three times, each by at most 2^-24 of it: together
//! 3·2^-24·Σ|a·w|. The scaled parts are then added, each addition rounding by at most 2^-24·Ĉ.
//! Kernels whose integers wrap at 2^31 do not belong to the class.
//!
//! *Reductions* of partial sums in f32 round by at most 2^(⌊log₂ Ĉ⌋ − 24) each, and there is at most
//! one per partial sum; reductions through a 16-bit type of p mantissa bits by
//! 2^(⌊log₂ Ĉ⌋ − p − 1), or half its smallest subnormal.
//!
//! *Uncertain activations* with radius r (an earlier stage had to be recomputed) move S and every
//! partial sum by at most Σ r·|w|.
//!
//! *Overflow.* If Ĉ reaches the largest f32, the bound is infinite and NaN is admitted. The same
//! holds if an activation is infinite and other terms may overflow.
//!
//! # Known orders
//!
//! [`Order::Ascending`] is a set of members, each with a fixed order of k. Then the loss of every
//! fused sum is known, and only the order of the f32 additions of parts is open. A kernel uses one
//! member for all elements of an output. [`Class::members`] lists them; [`Judge`](super::Judge)
//! computes the interval of a single member.

mod ascending;
mod error;
mod named;

pub use ascending::{Ascending, Split};
pub(in crate::products) use error::Growth;
use serde::{Deserialize, Serialize};

use super::exact::Request;
use super::kernel::Stripe;
use crate::num::scalar::ScalarType;
use crate::{Error, Result};

/// The arithmetic that sums products.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Adder {
    /// A matrix unit that accumulates in f32 and truncates.
    MatrixUnit {
        /// Products per fused sum.
        products: usize,
        /// F: fraction bits kept below the largest exponent.
        fraction_bits: u32,
        /// Significant bits of the result: at most 24.
        kept_bits: u32,
    },
    /// f32, a fused multiply-add for each product.
    FusedF32,
    /// f32, a rounded product and a rounded addition.
    SeparateF32,
    /// Integer sums within a group or part of k; converted to f32, multiplied by up to two scales,
    /// and added, with a rounding after each step.
    IntegerGroups {
        /// k per group.
        group_size: usize,
    },
    /// Integers.
    Exact,
}

/// The orders in which partial sums may be formed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Order {
    /// Any.
    Any,
    /// Sums over contiguous ranges of k in blocks, or over stripes of such ranges. The contiguous
    /// range itself is always included.
    Striped {
        /// k per block: the k-step of the unit.
        block: usize,
        /// The stripes.
        stripes: Vec<Stripe>,
    },
    /// Ascending sums over contiguous ranges of k, each starting from zero and cut at multiples of
    /// `block`. The sums of the ranges are added in f32 in any order.
    Contiguous {
        /// k per block: that of the instruction.
        block: usize,
    },
    /// As [`Self::Contiguous`], with one of a set of known cuts.
    Ascending(Ascending),
}

/// The arithmetic that adds partial sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Reduction {
    /// In f32, in parts of at least this many of the adder's steps.
    F32 {
        /// Steps per part.
        steps: usize,
    },
    /// Through the output's 16-bit type, in at most this many parts.
    Output {
        /// Parts.
        parts: usize,
    },
}

/// A class of kernels.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Class {
    /// Short name, for reports.
    pub name: String,
    /// Additions.
    pub adder: Adder,
    /// Orders.
    pub order: Order,
    /// Reductions.
    pub reduction: Reduction,
    /// Whether the unit itself may multiply by the scales of groups, so that its sums go on from one
    /// group to the next.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub scales_in_unit: bool,
}

impl Class {
    /// Checks a class from an untrusted source.
    ///
    /// # Errors
    /// [`Error::Size`] naming the number that is out of range.
    pub fn validate(&self) -> Result<()> {
        let expect = |what: &str, found: usize, fine: bool, expected: &str| match fine {
            true => Ok(()),
            false => Err(Error::size(format!("class `{}`: {what}", self.name), found, expected)),
        };
        match self.adder {
            Adder::MatrixUnit { products, fraction_bits, kept_bits } => {
                expect("products", products, (1..=4096).contains(&products), "1 to 4096")?;
                let fine = (2..=60).contains(&fraction_bits);
                expect("fraction_bits", fraction_bits as usize, fine, "2 to 60")?;
                let fine = (2..=24).contains(&kept_bits);
                expect("kept_bits", kept_bits as usize, fine, "2 to 24")?;
            }
            Adder::IntegerGroups { group_size } => {
                expect("group_size", group_size, group_size > 0, "1 or more")?;
            }
            Adder::FusedF32 | Adder::SeparateF32 | Adder::Exact => {}
        }
        if let Order::Striped { block, stripes } = &self.order {
            expect("block", *block, (1..=4096).contains(block), "1 to 4096")?;
            expect("stripes", stripes.len(), stripes.len() <= 16, "at most 16")?;
            for stripe in stripes {
                let Stripe { period, length } = *stripe;
                expect("period", period, (1..=256).contains(&period), "1 to 256")?;
                let fine = length > 0 && period.is_multiple_of(length);
                expect("length", length, fine, "a divisor of the period")?;
            }
        }
        match &self.order {
            Order::Contiguous { block } => {
                expect("block", *block, (1..=4096).contains(block), "1 to 4096")?;
            }
            Order::Ascending(runs) => {
                let unit = matches!(self.adder, Adder::MatrixUnit { .. });
                expect("members with another adder", runs.units.len(), unit, "a matrix unit")?;
                runs.validate(&self.name)?;
            }
            Order::Any | Order::Striped { .. } => {}
        }
        match self.reduction {
            Reduction::F32 { steps } => expect("steps", steps, steps > 0, "1 or more"),
            Reduction::Output { parts } => expect("parts", parts, parts > 0, "1 or more"),
        }
    }

    /// Whether the bound needs Σ|a·w|: for sums in any order, for roundings proportional to
    /// products, and for units so coarse that they lose whole products.
    fn tracks_absolute(&self) -> bool {
        let striped = matches!(self.order, Order::Striped { .. });
        match self.adder {
            Adder::Exact => false,
            Adder::SeparateF32 | Adder::IntegerGroups { .. } => true,
            Adder::MatrixUnit { fraction_bits, .. } => !striped || fraction_bits < 20,
            Adder::FusedF32 => !striped,
        }
    }

    /// The quantities that a product must track for this class.
    pub fn request<'r>(&self, stripes: &'r mut Vec<Stripe>) -> Request<'r> {
        let block = match &self.order {
            Order::Any | Order::Contiguous { .. } | Order::Ascending(_) => 0,
            Order::Striped { block, stripes: shares } => {
                stripes.push(Stripe { period: 1, length: 1 });
                stripes.extend(shares);
                *block
            }
        };
        let absolute = self.tracks_absolute();
        let signs = matches!(self.adder, Adder::MatrixUnit { .. });
        Request { block, absolute, stripes, signs, radius: None }
    }
}

/// The types of a product in the matrix unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Inputs {
    /// Activations; float32 with `group_scales`: codes times scales ([`Rows::scaled`](super::Rows::scaled)).
    pub activations: ScalarType,
    /// Weights after dequantization.
    pub weights: ScalarType,
    /// Output.
    pub output: ScalarType,
    /// k per group if the unit sums codes and the group scale multiplies the sum: then the unit
    /// aligns products without their scale, and its sums end with each group.
    pub group_scales: Option<usize>,
}
