//! Borrowed rows of activations and outputs, of either type.

use super::Values;
use crate::num::scalar::{ScalarType, bf16_to_f32};

/// Row-major activations, borrowed.
#[derive(Debug, Clone, Copy)]
pub enum Rows<'a> {
    /// FLOAT32.
    F32(&'a [f32]),
    /// BFLOAT16, as bits.
    Bf16(&'a [u16]),
}

/// Row-major outputs to fill, borrowed.
#[derive(Debug)]
pub enum RowsMut<'a> {
    /// FLOAT32.
    F32(&'a mut [f32]),
    /// BFLOAT16, as bits.
    Bf16(&'a mut [u16]),
}

impl Rows<'_> {
    /// Number of values.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(v) => v.len(),
            Self::Bf16(v) => v.len(),
        }
    }

    /// Whether there are no values.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// FLOAT32 or BFLOAT16.
    pub fn ty(&self) -> ScalarType {
        match self {
            Self::F32(_) => ScalarType::FLOAT32,
            Self::Bf16(_) => ScalarType::BFLOAT16,
        }
    }
}

impl RowsMut<'_> {
    /// The current values.
    pub fn rows(&self) -> Rows<'_> {
        match self {
            Self::F32(v) => Rows::F32(v),
            Self::Bf16(v) => Rows::Bf16(v),
        }
    }

    /// Number of values.
    pub fn len(&self) -> usize {
        self.rows().len()
    }

    /// Whether there are no values.
    pub fn is_empty(&self) -> bool {
        self.rows().is_empty()
    }

    /// FLOAT32 or BFLOAT16.
    pub fn ty(&self) -> ScalarType {
        self.rows().ty()
    }
}

impl Values {
    /// The values, borrowed.
    pub fn rows(&self) -> Rows<'_> {
        match self {
            Self::F32(v) => Rows::F32(v),
            Self::Bf16(v) => Rows::Bf16(v),
        }
    }

    /// The values, for writing.
    pub fn rows_mut(&mut self) -> RowsMut<'_> {
        match self {
            Self::F32(v) => RowsMut::F32(v),
            Self::Bf16(v) => RowsMut::Bf16(v),
        }
    }
}

/// How a float of either type is stored.
pub(super) trait Element: Copy + Default + Send + Sync + 'static {
    /// The value, exactly.
    fn widen(self) -> f32;

    /// To nearest even; a NaN keeps its sign.
    fn narrow(value: f32) -> Self;

    /// The vector of this type.
    fn of<'a>(f32s: &'a mut Vec<f32>, bf16s: &'a mut Vec<u16>) -> &'a mut Vec<Self>;

    /// `value` rounded to this type.
    #[inline(always)]
    fn round(value: f32) -> f32 {
        Self::narrow(value).widen()
    }
}

impl Element for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }

    #[inline(always)]
    fn narrow(value: f32) -> Self {
        value
    }

    fn of<'a>(f32s: &'a mut Vec<f32>, _: &'a mut Vec<u16>) -> &'a mut Vec<Self> {
        f32s
    }
}

/// BFLOAT16.
impl Element for u16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        bf16_to_f32(self)
    }

    /// [`f32_to_bf16_rne`](crate::num::scalar::f32_to_bf16_rne) without branches, so that loops over it
    /// vectorize.
    #[inline(always)]
    fn narrow(value: f32) -> Self {
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        let nan = bits >> 16 & 0x8000 | 0x7fc0;
        (if bits << 1 > 0xff00_0000 { nan } else { rounded }) as u16
    }

    fn of<'a>(_: &'a mut Vec<f32>, bf16s: &'a mut Vec<u16>) -> &'a mut Vec<Self> {
        bf16s
    }
}

#[cfg(test)]
mod tests {
    use super::Element;
    use crate::num::scalar::f32_to_bf16_rne;

    /// Tests every upper half with the lower halves around a tie.
    #[test]
    fn bf16_as_the_reference_rounds_it() {
        for upper in 0..=u16::MAX {
            for lower in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let value = f32::from_bits(u32::from(upper) << 16 | lower);
                assert_eq!(u16::narrow(value), f32_to_bf16_rne(value), "{upper:#x} {lower:#x}");
            }
        }
    }
}
