//! How far a correct kernel's sum may be from the exact one.
//!
//! A [`Class`] says which operations a kernel uses and in which orders it may use them; from it
//! follows, for each element, a bound on the error of its f32 sum that no kernel of the class can
//! exceed. Nothing in it is chosen by hand.
//!
//! # Derivation
//!
//! Let S be the exact sum, P the sum of its positive products and N that of the negative ones'
//! magnitudes, and Ĉ a bound on the magnitude of every partial sum that a kernel of the class can
//! compute. Every kernel of the class makes `n` additions of the kind below.
//!
//! *Partial sums in any order.* A matrix unit truncates toward zero: a truncated term keeps its sign
//! and does not grow, so that a computed partial sum stays between −N and P. Only roundings to
//! nearest can enlarge it, each by 2^-24 of itself: Ĉ = max(P, N)·(1 + 2^-24)^m for m of them.
//! The computed sum is in that interval, too, so that no bound reaches past it.
//!
//! *Partial sums of ranges.* Where a kernel forms only sums over ranges of k, or of a warp's share of
//! each tile of k, a partial sum is the difference of two prefix sums of that series: C is the
//! largest prefix sum minus the least, over all the series that the class allows. For random data
//! that is less by a factor of about √K. With its errors, a computed partial sum is at most
//! Ĉ = C + B; since B depends on Ĉ, B is taken from errors at a larger reach that it does not
//! exceed itself, never larger than that of any order.
//!
//! *A matrix unit* ([`super::tensor_core`]) with F fraction bits adds t products to an accumulator c.
//! With E the largest exponent among them, each of the t + 1 terms loses less than u = 2^(E − F), and
//! the truncation of the sum to p bits less than 2^(e + 1 − p), e the sum's exponent. c and the sum
//! are at most Ĉ, so that E ≤ max(⌊log₂ Ĉ⌋, the largest exponent of a product) and e ≤ ⌊log₂ Ĉ⌋. An
//! instruction may run as several such sums. The exponent of a product is the sum of its factors'
//! exponents; a subnormal factor counts with its type's least exponent, every other with its own.
//!
//! Truncation takes from positive products and gives to negative ones: the sum is too low by less
//! than Σ min(p, u) over the positive products p, and too high by less than the same sum over the
//! negative ones, so that the bounds below and above S differ.
//!
//! *Contiguous runs of k* ([`Order::Contiguous`]), cut anywhere: before block j an accumulator is
//! the difference of the prefix sum there and an earlier one, which gives each block a reach, and a
//! u, of its own.
//!
//! *Group scales that multiply sums* (8-bit activations): the unit's sums end with each group, so
//! that each group has a Ĉ of its own. The unit sees codes, and aligns them without the scale s: in terms of the scaled sum, 2^⌊log₂ c⌋·s is at most Ĉ itself; ⌊log₂⌋ is not
//! taken, neither of sums nor of weights. A group's multiply-add rounds by less than the truncation
//! of the accumulator that its first sum does not have.
//!
//! *Fused multiply-add*: each rounds once, by at most 2^(⌊log₂ Ĉ⌋ − 24). With a separate product,
//! 2^-24·Σ|a·w| is added for the roundings of the products.
//!
//! *Integer groups*: the sum of a group, or of several with integer scales, is an integer, and exact.
//! Made an f32, and multiplied by the scales of its group or column and of its row of
//! activations, it is rounded at most three times, each by at most 2^-24 of it: together
//! 3·2^-24·Σ|a·w|. The parts may be added after that, scaled, so that an addition rounds by at most
//! 2^-24·Ĉ, whatever the scale. Kernels whose integers wrap at 2^31 are not of the class there.
//!
//! *Reductions* of partial sums in f32 round by at most 2^(⌊log₂ Ĉ⌋ − 24) each, and there is at most
//! one per partial sum; reductions through a 16-bit type of p mantissa bits by
//! 2^(⌊log₂ Ĉ⌋ − p − 1), or half its smallest subnormal.
//!
//! *Activations that are uncertain themselves* by a radius r (a stage before this one had to be
//! recomputed) move S by at most Σ r·|w|, and every partial sum with it.
//!
//! *Overflow.* Where Ĉ reaches the largest f32, nothing is promised: the bound is infinite, and NaN is
//! admitted. So it is where an activation is infinite and numbers beside it may overflow.
//!
//! # Orders that are known
//!
//! [`Order::Ascending`] is a set of members, each of which fixes the order of k: then every loss of
//! every fused sum is known, and what is left is the order in which f32 parts are added. A kernel
//! uses one member for all elements of an output. [`Class::members`] lists them;
//! [`Judge`](super::Judge) computes the interval of a single one.

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

/// How products are added up.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Adder {
    /// A matrix unit that accumulates in f32 and truncates.
    MatrixUnit {
        /// Products per fused sum.
        products: usize,
        /// F: fraction bits kept below the largest exponent.
        fraction_bits: u32,
        /// Significant bits of the result: 24, or fewer where the unit keeps fewer.
        kept_bits: u32,
    },
    /// f32, a fused multiply-add for each product.
    FusedF32,
    /// f32, a rounded product and a rounded addition.
    SeparateF32,
    /// Integers within a group or part of k; their sums as f32, times up to two scales, each
    /// rounded, and added up, rounded.
    IntegerGroups {
        /// k per group.
        group_size: usize,
    },
    /// Integers.
    Exact,
}

/// In which orders partial sums may be formed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Order {
    /// Any.
    Any,
    /// Sums over contiguous ranges of k in blocks, or of such shares of them. The contiguous range
    /// itself is always among them.
    Striped {
        /// k per block: the k-step of the unit.
        block: usize,
        /// The shares.
        stripes: Vec<Stripe>,
    },
    /// Ascending sums over contiguous ranges of k, from zero each, cut at any multiples of `block`.
    /// The ranges' sums are added in f32 in any order.
    Contiguous {
        /// k per block: that of the instruction.
        block: usize,
    },
    /// As [`Self::Contiguous`], cut in one of a set of known ways.
    Ascending(Ascending),
}

/// Where partial sums are added up.
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
}

impl Class {
    /// Checks a class that was read from somewhere.
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

    /// Whether Σ|a·w| has to be known: for sums in any order, for what is rounded in proportion to
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

    /// What a product has to track for this class.
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

/// The types of a product, as the matrix unit sees them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Inputs {
    /// Activations.
    pub activations: ScalarType,
    /// Weights after dequantization.
    pub weights: ScalarType,
    /// Output.
    pub output: ScalarType,
    /// k per group where the unit sums codes whose group scale multiplies the sum: a product's scale
    /// is no part of what the unit aligns, and no sum of the unit goes on over groups.
    pub group_scales: Option<usize>,
}
