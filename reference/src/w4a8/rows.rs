//! Activations and outputs as the engine takes them: row-major slices of either type.

use super::Values;
use crate::num::array::{FloatView2, rows_mut, rows_of};
use crate::num::array_mut::FloatViewMut2;
use crate::num::element::bf16;
use crate::num::scalar::{ScalarType, bf16_to_f32};
use crate::{Error, Result};

/// Row-major activations, borrowed.
#[derive(Debug, Clone, Copy)]
pub(super) enum Rows<'a> {
    /// FLOAT32.
    F32(&'a [f32]),
    /// BFLOAT16, as bits.
    Bf16(&'a [u16]),
}

/// Row-major outputs to fill, borrowed.
#[derive(Debug)]
pub(super) enum RowsMut<'a> {
    /// FLOAT32.
    F32(&'a mut [f32]),
    /// BFLOAT16, as bits.
    Bf16(&'a mut [u16]),
}

/// `x` and `out` as slices.
///
/// # Errors
/// [`Error::Shape`] unless they have the shapes `[M, columns]` of `size_m` and `columns`;
/// [`Error::Unsupported`] if they differ in type or are f16; [`Error::NotContiguous`] for other strides
/// than row-major ones.
pub(super) fn slices<'x, 'o>(
    x: FloatView2<'x>,
    out: FloatViewMut2<'o>,
    size_m: usize,
    columns: [usize; 2],
) -> Result<(Rows<'x>, RowsMut<'o>)> {
    for (name, found, cols) in [("x", x.shape(), columns[0]), ("out", out.shape(), columns[1])] {
        if found != [size_m, cols] {
            return Err(Error::shape(name, found, format!("[{size_m}, {cols}]")));
        }
    }
    if x.scalar_type() != out.scalar_type() {
        let what = format!("{} output of {} activations", out.scalar_type(), x.scalar_type());
        return Err(Error::unsupported(what, "the output has the activations' type"));
    }
    let strided = |name: &str, cols| {
        let (tensor, found) = (name.to_owned(), vec![size_m, cols]);
        Error::NotContiguous { tensor, found }
    };
    let other = || Error::unsupported("float16 activations", "float32 or bfloat16");
    let x = match x {
        FloatView2::F32(x) => x.to_slice().map(Rows::F32),
        FloatView2::Bf16(x) => x.to_slice().map(|x| Rows::Bf16(bytemuck::cast_slice(x))),
        _ => return Err(other()),
    };
    let out = match out {
        FloatViewMut2::F32(out) => out.into_slice().map(RowsMut::F32),
        FloatViewMut2::Bf16(out) => {
            out.into_slice().map(|out| RowsMut::Bf16(bytemuck::cast_slice_mut(out)))
        }
        _ => return Err(other()),
    };
    let x = x.ok_or_else(|| strided("x", columns[0]))?;
    Ok((x, out.ok_or_else(|| strided("out", columns[1]))?))
}

impl Values {
    /// The values as rows of `cols`; not copied.
    ///
    /// # Errors
    /// As [`rows_of`].
    pub fn view(&self, cols: usize) -> Result<FloatView2<'_>> {
        match self {
            Self::F32(v) => rows_of("x", v, cols).map(FloatView2::F32),
            Self::Bf16(v) => FloatView2::from_rows("x", ScalarType::BFLOAT16, cols, v),
        }
    }

    /// The values as rows of `cols`, to fill.
    ///
    /// # Errors
    /// As [`rows_of`].
    pub fn view_mut(&mut self, cols: usize) -> Result<FloatViewMut2<'_>> {
        match self {
            Self::F32(v) => rows_mut("out", v, cols).map(FloatViewMut2::F32),
            Self::Bf16(v) => {
                let values: &mut [bf16] = bytemuck::cast_slice_mut(v);
                rows_mut("out", values, cols).map(FloatViewMut2::Bf16)
            }
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

    /// The values, if this type is f32.
    fn f32s(values: &mut [Self]) -> Option<&mut [f32]>;

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

    fn f32s(values: &mut [Self]) -> Option<&mut [f32]> {
        Some(values)
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

    fn f32s(_: &mut [Self]) -> Option<&mut [f32]> {
        None
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
