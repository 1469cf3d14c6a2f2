//! Many outputs at once: one row of `a` against [`LANES`] columns of `b`.
//!
//! The bits are those of [`Unit::accumulate`], which is the definition. Only the order in which the
//! processor computes independent outputs differs.

use super::operand::Operand;
use super::simd;
use super::terms::{Factor, LANES, Lanes, Sums, Terms};
use super::units::{Accumulator, KSplit, Unit};
use super::{add_f16, add_f32};
use crate::num::scalar::{ScalarType, bf16_to_f32, f16_to_f32};
use crate::{Error, Result};

/// Codes of one type as factors.
enum Decoder {
    F16,
    Bf16,
    Tf32,
    /// 8 bits: a factor for each code.
    Table(Vec<Factor>),
    Other(ScalarType),
}

impl Decoder {
    fn new(unit: &Unit, ty: ScalarType) -> Self {
        let one = |code| Factor::new(Operand::decode(ty, code, unit.through_f16));
        match ty {
            ScalarType::FLOAT16 => Self::F16,
            ScalarType::BFLOAT16 => Self::Bf16,
            ScalarType::FLOAT32 => Self::Tf32,
            _ if ty.size_bits() == 8 => Self::Table((0..256).map(one).collect()),
            _ => Self::Other(ty),
        }
    }

    /// The factor that [`Operand::decode`] defines.
    #[inline]
    fn factor(&self, code: u32) -> Factor {
        match self {
            Self::F16 => Factor::widened(f16_to_f32(code as u16), -14),
            Self::Bf16 => Factor::widened(bf16_to_f32(code as u16), -126),
            // The low 13 bits are not read.
            Self::Tf32 => Factor::widened(f32::from_bits(code & !0x1fff), -126),
            Self::Table(factors) => factors[code as u8 as usize],
            Self::Other(ty) => Factor::new(Operand::decode(*ty, code, false)),
        }
    }
}

/// The factors of a row or of a panel, `[size_k]` items of one or [`LANES`] numbers.
#[derive(Debug, Clone)]
enum Factors<F, I> {
    /// Values and exponents; `finite` if none is infinite or NaN.
    Float {
        values: Vec<F>,
        exponents: Vec<I>,
        finite: bool,
    },
    Integer(Vec<I>),
}

/// Position of an instruction's k in a row or panel, where the terms of a sum are adjacent.
fn place(split: KSplit, size_k: usize, k: usize) -> usize {
    match split {
        KSplit::Whole | KSplit::Blocks(_) => k,
        KSplit::Pairs => {
            let (block, k) = (k - k % size_k, k % size_k);
            block + k % 4 / 2 * (size_k / 2) + k / 4 * 2 + k % 2
        }
    }
}

/// One row of `a`, decoded for a unit.
#[derive(Debug, Clone)]
pub struct Row {
    factors: Factors<f32, i32>,
}

impl Row {
    /// Decodes `[size_k]` codes of the unit's first input type.
    ///
    /// # Errors
    /// [`Error::Size`] unless they fill whole instructions.
    pub fn new(unit: &Unit, codes: &[u32]) -> Result<Self> {
        let size_k = whole_instructions(unit, codes.len())?;
        let ty = unit.inputs.0;
        if unit.accumulator == Accumulator::S32 {
            let integers = codes.iter().map(|&c| Operand::decode(ty, c, false).significand);
            return Ok(Self { factors: Factors::Integer(integers.collect()) });
        }
        let decoded = Decoder::new(unit, ty);
        let (mut values, mut exponents) = (vec![0.0; size_k], vec![0; size_k]);
        for (k, &code) in codes.iter().enumerate() {
            let factor = decoded.factor(code);
            let at = place(unit.split, unit.size_k, k);
            (values[at], exponents[at]) = (factor.value, factor.exponent);
        }
        let finite = values.iter().all(|v| v.is_finite());
        Ok(Self { factors: Factors::Float { values, exponents, finite } })
    }
}

/// [`LANES`] columns of `b`, decoded for a unit.
#[derive(Debug, Clone)]
pub struct Panel {
    factors: Factors<[f32; LANES], [i32; LANES]>,
    size_k: usize,
}

impl Panel {
    /// Decodes `size_k` rows of codes of the unit's second input type; `code(k, lane)` gives each.
    ///
    /// # Errors
    /// [`Error::Size`] unless K fills whole instructions.
    pub fn new(
        unit: &Unit,
        size_k: usize,
        mut code: impl FnMut(usize, usize) -> u32,
    ) -> Result<Self> {
        whole_instructions(unit, size_k)?;
        let ty = unit.inputs.1;
        if unit.accumulator == Accumulator::S32 {
            let integers = (0..size_k).map(|k| {
                std::array::from_fn(|l| Operand::decode(ty, code(k, l), false).significand)
            });
            return Ok(Self { factors: Factors::Integer(integers.collect()), size_k });
        }
        let decoded = Decoder::new(unit, ty);
        let mut values = vec![[0.0; LANES]; size_k];
        let mut exponents = vec![[0; LANES]; size_k];
        for k in 0..size_k {
            let at = place(unit.split, unit.size_k, k);
            for l in 0..LANES {
                let factor = decoded.factor(code(k, l));
                (values[at][l], exponents[at][l]) = (factor.value, factor.exponent);
            }
        }
        let finite = values.iter().flatten().all(|v| v.is_finite());
        Ok(Self { factors: Factors::Float { values, exponents, finite }, size_k })
    }

    /// Rows.
    pub fn size_k(&self) -> usize {
        self.size_k
    }
}

fn whole_instructions(unit: &Unit, size_k: usize) -> Result<usize> {
    if size_k > 0 && size_k.is_multiple_of(unit.size_k) {
        return Ok(size_k);
    }
    let expected = format!("a positive multiple of {}, the unit's k", unit.size_k);
    Err(Error::size("size_k", size_k, expected))
}

impl Unit {
    /// `c[l] + Σ row[k]·panel[k][l]` over k in `range`, one instruction after the other: the bits
    /// of [`Unit::dot`] for each column.
    ///
    /// # Panics
    /// If row and panel were decoded for different kinds of unit, or `range` does not hold whole
    /// instructions: a programming error.
    pub fn accumulate_panel(
        &self,
        row: &Row,
        panel: &Panel,
        range: std::ops::Range<usize>,
        c: &mut Lanes,
    ) {
        let aligned = |k: usize| k.is_multiple_of(self.size_k);
        assert!(aligned(range.start) && aligned(range.end), "whole instructions of {self:?}");
        let (start, len) = (range.start, range.len());
        match (&row.factors, &panel.factors) {
            (Factors::Integer(a), Factors::Integer(b)) => {
                simd::integer(&a[range.clone()], &b[range], c);
            }
            (
                Factors::Float { values: a, exponents: a_exponents, finite: a_finite },
                Factors::Float { values: b, exponents: b_exponents, finite: b_finite },
            ) => {
                let terms = Terms { a, a_exponents, b, b_exponents }.part(start, len);
                let sums = match self.split {
                    KSplit::Whole => self.size_k,
                    KSplit::Blocks(len) => len,
                    KSplit::Pairs => self.size_k / 2,
                };
                let fits = *a_finite && *b_finite && self.fraction_bits <= simd::MAX_FRACTION_BITS;
                match self.accumulator {
                    Accumulator::F32 { kept_bits } if fits => {
                        let fraction_bits = self.fraction_bits;
                        let sums = Sums { terms: sums, fraction_bits, kept_bits };
                        let per = self.adds_accumulator_last.then_some(self.size_k);
                        simd::float(sums, per, terms, c);
                    }
                    _ => self.defined_panel(sums, terms, c),
                }
            }
            _ => panic!("row and panel of two kinds of unit"),
        }
    }

    /// [`Unit::accumulate_panel`] without vector loops.
    fn defined_panel(&self, sum_k: usize, terms: Terms<'_>, c: &mut Lanes) {
        for start in (0..terms.a.len()).step_by(self.size_k) {
            let before = *c;
            if self.adds_accumulator_last {
                *c = [0; LANES];
            }
            for at in (start..start + self.size_k).step_by(sum_k) {
                terms.part(at, sum_k).defined(self.accumulator, self.fraction_bits, c);
            }
            if self.adds_accumulator_last {
                for (c, before) in c.iter_mut().zip(before) {
                    *c = match self.accumulator {
                        Accumulator::F16 => add_f16(before as u16, *c as u16).into(),
                        _ => add_f32(before, *c),
                    };
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::products::tensor_core::UNITS;

    /// Every code of 16 bits, and codes of tf32 with each sign, exponent and mantissa bit.
    #[test]
    fn codes_are_decoded_as_defined() {
        let bits = |code: u32| code << 16 | (code & 7) << 13 | 0x1abc;
        for ty in [ScalarType::FLOAT16, ScalarType::BFLOAT16, ScalarType::FLOAT32] {
            let unit = UNITS.iter().find(|u| u.inputs.1 == ty).expect("a unit");
            let decoder = Decoder::new(unit, ty);
            for code in 0..=0xffff {
                let code = if ty == ScalarType::FLOAT32 { bits(code) } else { code };
                let (found, defined) =
                    (decoder.factor(code), Factor::new(Operand::decode(ty, code, false)));
                let what = format!("{ty} {code:#x}: {found:?}, {defined:?}");
                if defined.value.is_nan() {
                    assert!(found.value.is_nan(), "{what}");
                } else {
                    assert_eq!(found.value, defined.value, "{what}");
                }
                if defined.value.is_finite() {
                    assert_eq!(found.exponent, defined.exponent, "{what}");
                }
            }
        }
    }
}
