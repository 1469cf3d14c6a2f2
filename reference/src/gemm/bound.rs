//! How far a correct kernel's sum may be from the exact one.
//!
//! A [`Class`] says which operations a kernel uses and in which orders it may use them; from it
//! follows, for each element, a bound on the error of its f32 sum that no kernel of the class can
//! exceed. Nothing in it is chosen by hand.
//!
//! # Derivation
//!
//! Let S be the exact sum, and C a bound on the magnitude of every partial sum (without errors)
//! that the class can form. Every kernel of the class makes `n` additions of the kind below, each
//! with an error of at most δ, so that its sum is within B = n·δ of S (δ is taken apart below).
//!
//! *Partial sums.* In any order, a partial sum is at most the sum of the positive products, or of
//! the negative ones: C = (Σ|a·w| + |S|) / 2. Where a kernel forms only sums over ranges of k, or of
//! a warp's share of each tile of k, a partial sum is the difference of two prefix sums of that
//! series: C is the largest prefix sum minus the least, over all the series that the class
//! allows. For random data that is less by a factor of about √K.
//!
//! With its errors, a computed partial sum is at most Ĉ = C + B; since δ depends on Ĉ, B is taken
//! from errors at a larger reach that it does not exceed itself.
//!
//! *A matrix unit* ([`super::tensor_core`]) with F fraction bits adds t products to an accumulator c.
//! With E the largest exponent among them, each of the t + 1 terms loses less than 2^(E − F), and
//! the truncation of the sum to 24 bits less than 2^(e − 23), e the sum's exponent; where it
//! rounds to nearest, half of that. c and the sum are at most Ĉ, so that
//! E ≤ max(⌊log₂ Ĉ⌋, the largest exponent of a product) and e ≤ ⌊log₂ Ĉ⌋. An instruction may run as
//! several such sums. The exponent of a product is the sum of its factors' exponents; a subnormal
//! factor counts with its type's least exponent.
//!
//! Truncation is toward zero: it takes from positive products and gives to negative ones. So the
//! sum is too low by less than 2^(E − F) for each positive product, and too high by less than that
//! for each negative one, and the bounds below and above S are not the same. Products that are
//! zero lose nothing.
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

use serde::{Deserialize, Serialize};

use super::exact::{Element, Request};
use super::kernel::Stripe;
use super::tensor_core::{Accumulator, Architecture, KSplit, UNITS, Unit};
use crate::scalar::ScalarType;
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
    /// The classes that have names of their own.
    pub fn named() -> Vec<Self> {
        let hopper = UNITS
            .iter()
            .find(|u| u.architecture == Architecture::Hopper && u.inputs.0 == ScalarType::FLOAT16);
        let hopper =
            hopper.map(|unit| Self { name: "hopper-any-order".to_owned(), ..Self::of_unit(unit) });
        let fused =
            Self { name: "fused-f32".to_owned(), adder: Adder::FusedF32, ..Self::any_order() };
        let separate = Self {
            name: "separate-f32".to_owned(),
            adder: Adder::SeparateF32,
            ..Self::any_order()
        };
        [Self::any_order(), Self::marlin_hopper(), fused, separate, Self::fp8_any_order()]
            .into_iter()
            .chain(hopper)
            .collect()
    }

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
        match self.reduction {
            Reduction::F32 { steps } => expect("steps", steps, steps > 0, "1 or more"),
            Reduction::Output { parts } => expect("parts", parts, parts > 0, "1 or more"),
        }
    }

    /// Every kernel that adds up f16 or bf16 products on a matrix unit from Turing on, or with fused
    /// f32 multiply-adds, in any order, with partial sums reduced in f32: F = 24 is the fewest
    /// fraction bits that such a unit is known to keep, and eight products the fewest per sum.
    pub fn any_order() -> Self {
        Self {
            name: "f32-any-order".to_owned(),
            adder: Adder::MatrixUnit { products: 8, fraction_bits: 24, kept_bits: 24 },
            order: Order::Any,
            reduction: Reduction::F32 { steps: 1 },
        }
    }

    /// Every kernel that adds up e4m3 products on a matrix unit from Ada on, in any order, with or
    /// without promotion to f32: Hopper's `wgmma` keeps the fewest fraction bits that are known, 13, and
    /// truncates its result to as many. Three less are counted here, because such a unit aligns a
    /// subnormal e4m3 number, down to 2^-9, as if it were 2^-6. Where sums begin again from zero (a
    /// group that is scaled apart, a promotion), the truncation of an accumulator that is not there is
    /// more than a multiplication or an f32 addition rounds.
    pub fn fp8_any_order() -> Self {
        let adder = Adder::MatrixUnit { products: 16, fraction_bits: 13 - 3, kept_bits: 14 };
        Self { name: "fp8-any-order".to_owned(), adder, ..Self::any_order() }
    }

    /// Every kernel that adds up its products with one matrix unit of the table, in any order, with
    /// partial sums reduced in f32.
    pub fn of_unit(unit: &Unit) -> Self {
        let products = match unit.split {
            KSplit::Whole => unit.size_k,
            KSplit::Blocks(len) => len,
            KSplit::Pairs => unit.size_k / 2,
        };
        // An accumulator that is added last is one more rounded addition per sum, as many as the
        // bound counts for reductions.
        let adder = match unit.accumulator {
            Accumulator::F32 { kept_bits } => {
                let fraction_bits = unit.fraction_bits as u32;
                Adder::MatrixUnit { products, fraction_bits, kept_bits }
            }
            Accumulator::F16 => Adder::MatrixUnit {
                products,
                fraction_bits: unit.fraction_bits as u32,
                kept_bits: 11,
            },
            Accumulator::S32 => Adder::Exact,
        };
        let (order, reduction) = (Order::Any, Reduction::F32 { steps: 1 });
        Self { name: "matrix-unit-any-order".to_owned(), adder, order, reduction }
    }

    /// The Marlin kernels on Hopper: steps of 16 k; each tile of 64 or 128 k is shared by two or four
    /// warps in runs of 32; thread blocks take contiguous ranges of at least two steps for each warp; all partial
    /// sums are added in f32.
    pub fn marlin_hopper() -> Self {
        let stripes = [(4, 2), (8, 2)].map(|(period, length)| Stripe { period, length });
        Self {
            name: "marlin-hopper".to_owned(),
            adder: Adder::MatrixUnit { products: 16, fraction_bits: 25, kept_bits: 24 },
            order: Order::Striped { block: 16, stripes: stripes.to_vec() },
            reduction: Reduction::F32 { steps: 2 },
        }
    }

    /// Integer sums of groups, scaled and added up in f32 in any order: int8 activations.
    pub fn integer_groups(group_size: usize) -> Self {
        Self {
            name: "integer-groups".to_owned(),
            adder: Adder::IntegerGroups { group_size },
            order: Order::Any,
            reduction: Reduction::F32 { steps: 1 },
        }
    }

    /// int8 activations with `groups` group scales over `size_k`: integers per group; with one
    /// group, per part of at least 64 k, since kernels scale the parts of warps and thread blocks
    /// apart and add them in f32.
    pub fn int8(size_k: usize, groups: usize) -> Self {
        Self::integer_groups(if groups > 1 { size_k / groups } else { 64 })
    }

    /// Integer sums: no error at all.
    pub fn exact() -> Self {
        Self {
            name: "exact".to_owned(),
            adder: Adder::Exact,
            order: Order::Any,
            reduction: Reduction::F32 { steps: 1 },
        }
    }

    /// What a product has to track for this class.
    pub fn request<'r>(&self, stripes: &'r mut Vec<Stripe>) -> Request<'r> {
        let absolute = matches!(self.order, Order::Any)
            || matches!(self.adder, Adder::SeparateF32 | Adder::IntegerGroups { .. });
        let block = match &self.order {
            Order::Any => 0,
            Order::Striped { block, stripes: shares } => {
                stripes.push(Stripe { period: 1, length: 1 });
                stripes.extend(shares);
                *block
            }
        };
        let absolute = absolute && self.adder != Adder::Exact;
        let signs = matches!(self.adder, Adder::MatrixUnit { .. });
        Request { block, absolute, stripes, signs, radius: None }
    }

    /// How far the computed f32 sum of one element, `size_k` products long, may be below and above
    /// the exact one.
    pub fn bound(&self, element: &Element<'_>, size_k: usize, inputs: Inputs) -> [f64; 2] {
        let sum = element.value().abs();
        let partial = match self.order {
            Order::Any => (element.absolute + sum) / 2.0,
            Order::Striped { .. } => element.reach,
        };
        // Never below the sum itself, and some room for the f64 that it was computed in.
        let partial = (partial.max(sum) + element.carried) * (1.0 + 1e-12);
        if self.adder == Adder::Exact || partial == 0.0 {
            return [element.carried; 2];
        }
        let errors = |reach| self.errors(reach, element, size_k, inputs);
        let worst = |errors: [f64; 2]| errors[0].max(errors[1]);
        let mut reach = partial;
        let once = worst(errors(partial));
        if once < partial / 4.0 {
            // C + 2·once reaches at most one binade further, where no error is more than twice as
            // large: errors there do not exceed it.
            reach += 2.0 * once;
        } else {
            // Sums as small as their own errors.
            for _ in 0..300 {
                let needed = partial + worst(errors(reach));
                if needed <= reach {
                    break;
                }
                reach = needed.max(2.0 * reach);
            }
        }
        errors(reach).map(|e| e + element.carried)
    }

    /// What the additions lose and gain when partial sums are at most `reach`.
    fn errors(&self, reach: f64, element: &Element<'_>, size_k: usize, inputs: Inputs) -> [f64; 2] {
        if reach >= f64::from(f32::MAX) {
            return [f64::INFINITY; 2];
        }
        // f32's subnormals share one unit.
        let e = exponent(reach).max(-126);
        let nearest = power(e - 24);
        let (additions, each, signs) = match self.adder {
            Adder::MatrixUnit { products, fraction_bits, kept_bits } => {
                let largest = e.max(inputs.largest_exponent(element)).max(-133);
                let unit = power(largest - fraction_bits as i32);
                // The accumulator's truncation, and the sum's.
                let each = unit + power(e + 1 - kept_bits as i32);
                (size_k.div_ceil(products), each, element.signs.map(|count| count as f64 * unit))
            }
            Adder::FusedF32 => (size_k, nearest, [0.0; 2]),
            Adder::SeparateF32 => (size_k, nearest, [0.0; 2]),
            Adder::IntegerGroups { group_size } => {
                (size_k.div_ceil(group_size.max(1)), power(-24) * reach, [0.0; 2])
            }
            Adder::Exact => (0, 0.0, [0.0; 2]),
        };
        let products = match self.adder {
            Adder::SeparateF32 => power(-24) * element.absolute + size_k as f64 * power(-150),
            // A little more for what the first roundings add to the later ones.
            Adder::IntegerGroups { .. } => {
                (3.0 + power(-20)) * power(-24) * element.absolute + size_k as f64 * power(-150)
            }
            _ => 0.0,
        };
        let reductions = match self.reduction {
            Reduction::F32 { steps } => additions.div_ceil(steps.max(1)) as f64 * nearest,
            Reduction::Output { parts } => {
                let (mantissa, least) = match inputs.output {
                    ScalarType::FLOAT16 => (10, -14),
                    _ => (7, -126),
                };
                // Each part is rounded, and each sum of parts.
                2.0 * parts as f64 * power(e.max(least) - mantissa - 1) + additions as f64 * nearest
            }
        };
        signs.map(|lost| lost + additions as f64 * each + products + reductions)
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
}

impl Inputs {
    /// The largest exponent that a product of the element can have in the unit's terms.
    fn largest_exponent(self, element: &Element<'_>) -> i32 {
        let least = |ty| match ty {
            ScalarType::FLOAT16 | ScalarType::FLOAT8_E5M2 => -14,
            ScalarType::FLOAT8_E4M3FN => -6,
            _ => -126,
        };
        let of = |high: i32, ty| (high - 1).max(least(ty));
        of(element.row.high, self.activations) + of(element.column.high, self.weights)
    }
}

/// ⌊log₂ x⌋ of a positive normal number.
fn exponent(x: f64) -> i32 {
    ((x.to_bits() >> 52) as i32 & 0x7ff) - 1023
}

/// 2^e, zero where e is below f64's normal range.
fn power(e: i32) -> f64 {
    if e < -1022 { 0.0 } else { f64::from_bits(((e + 1023) as u64) << 52) }
}
