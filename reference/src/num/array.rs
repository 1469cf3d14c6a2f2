//! Arrays whose type is known at run time only (a case file's activations, a layer's outputs), and the
//! steps between arrays and row-major vectors. Typed arrays convert to them without a copy, and back.

use std::borrow::Cow;

use ndarray::{Array, ArrayView, ArrayView2, ArrayViewMut2, Dimension, IntoDimension, Ix2, Ix3};

use super::element::{Float, Float16, Words, bf16, f16};
use super::scalar::ScalarType;
use crate::dtype::DType;
use crate::{Error, Result};

/// A borrowed array of a run-time floating-point type.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum FloatView<'a, D: Dimension> {
    /// IEEE half.
    F16(ArrayView<'a, f16, D>),
    /// bfloat16.
    Bf16(ArrayView<'a, bf16, D>),
    /// IEEE single.
    F32(ArrayView<'a, f32, D>),
}

/// An owned array of f16 or bf16, its type known at run time only.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HalfArray<D: Dimension> {
    ty: ScalarType,
    bits: Array<u16, D>,
}

/// [`FloatView`] of a matrix.
pub type FloatView2<'a> = FloatView<'a, Ix2>;
/// [`FloatView`] of a stack of matrices.
pub type FloatView3<'a> = FloatView<'a, Ix3>;
/// [`HalfArray`] of a matrix.
pub type HalfArray2 = HalfArray<Ix2>;

/// The elements in row-major order; copied if the view has other strides.
pub(crate) fn row_major<'a, T: Clone, D: Dimension>(view: ArrayView<'a, T, D>) -> Cow<'a, [T]> {
    match view.to_slice() {
        Some(slice) => Cow::Borrowed(slice),
        None => Cow::Owned(view.iter().cloned().collect()),
    }
}

/// The values as an array that they fill; `ndarray` would ignore values after the last element.
fn filled<'a, T, D: Dimension>(
    name: &str,
    shape: D,
    values: &'a [T],
) -> Result<ArrayView<'a, T, D>> {
    let mismatch = || Error::shape(name, &[values.len()], format!("{:?}", shape.slice()));
    if shape.size_checked() != Some(values.len()) {
        return Err(mismatch());
    }
    ArrayView::from_shape(shape.clone(), values).map_err(|_| mismatch())
}

fn bits<T: Float16, D: Dimension>(view: ArrayView<'_, T, D>) -> Cow<'_, [u16]> {
    match row_major(view) {
        Cow::Borrowed(v) => Cow::Borrowed(bytemuck::cast_slice(v)),
        Cow::Owned(v) => Cow::Owned(bytemuck::allocation::cast_vec(v)),
    }
}

impl<'a, D: Dimension> FloatView<'a, D> {
    /// A view of 16-bit floats of type `ty` by their bits, row-major.
    ///
    /// # Errors
    /// [`Error::Unsupported`] unless `ty` is FLOAT16 or BFLOAT16; [`Error::Shape`] if `bits` do not
    /// fill `shape`.
    pub fn from_bits(
        name: &str,
        ty: ScalarType,
        shape: impl IntoDimension<Dim = D>,
        bits: &'a [u16],
    ) -> Result<Self> {
        let shape = shape.into_dimension();
        match ty {
            ScalarType::FLOAT16 => filled(name, shape, bytemuck::cast_slice(bits)).map(Self::F16),
            ScalarType::BFLOAT16 => filled(name, shape, bytemuck::cast_slice(bits)).map(Self::Bf16),
            other => Err(Error::unsupported(other, "float16 or bfloat16")),
        }
    }

    /// The number format.
    pub fn scalar_type(&self) -> ScalarType {
        match self {
            Self::F16(_) => ScalarType::FLOAT16,
            Self::Bf16(_) => ScalarType::BFLOAT16,
            Self::F32(_) => ScalarType::FLOAT32,
        }
    }

    /// The stored type.
    pub fn dtype(&self) -> DType {
        match self {
            Self::F16(_) => DType::F16,
            Self::Bf16(_) => DType::BF16,
            Self::F32(_) => DType::F32,
        }
    }

    /// The dimensions.
    pub fn shape(&self) -> &[usize] {
        match self {
            Self::F16(a) => a.shape(),
            Self::Bf16(a) => a.shape(),
            Self::F32(a) => a.shape(),
        }
    }

    /// The values as f32, exactly, in row-major order; borrowed from a contiguous f32 view.
    pub fn widened(&self) -> Cow<'a, [f32]> {
        match self {
            Self::F16(a) => Cow::Owned(a.iter().map(|v| Float::to_f32(*v)).collect()),
            Self::Bf16(a) => Cow::Owned(a.iter().map(|v| Float::to_f32(*v)).collect()),
            Self::F32(a) => row_major(a.clone()),
        }
    }

    /// The bits of 16-bit floats in row-major order; borrowed from a contiguous view. `name` is the
    /// tensor's, for errors.
    ///
    /// # Errors
    /// [`Error::Dtype`] unless the elements are of type `ty`; [`Error::Unsupported`] unless that is
    /// FLOAT16 or BFLOAT16.
    pub fn bits_of(&self, name: &str, ty: ScalarType) -> Result<Cow<'a, [u16]>> {
        if ![ScalarType::FLOAT16, ScalarType::BFLOAT16].contains(&ty) {
            return Err(Error::unsupported(ty, "float16 or bfloat16"));
        }
        match self {
            Self::F16(a) if ty == ScalarType::FLOAT16 => Ok(bits(a.clone())),
            Self::Bf16(a) if ty == ScalarType::BFLOAT16 => Ok(bits(a.clone())),
            _ => Err(Error::dtype(name, self.dtype(), ty)),
        }
    }
}

impl<'a, D: Dimension> From<ArrayView<'a, f16, D>> for FloatView<'a, D> {
    fn from(view: ArrayView<'a, f16, D>) -> Self {
        Self::F16(view)
    }
}

impl<'a, D: Dimension> From<ArrayView<'a, bf16, D>> for FloatView<'a, D> {
    fn from(view: ArrayView<'a, bf16, D>) -> Self {
        Self::Bf16(view)
    }
}

impl<'a, D: Dimension> From<ArrayView<'a, f32, D>> for FloatView<'a, D> {
    fn from(view: ArrayView<'a, f32, D>) -> Self {
        Self::F32(view)
    }
}

impl<'a, D: Dimension> From<&'a HalfArray<D>> for FloatView<'a, D> {
    fn from(array: &'a HalfArray<D>) -> Self {
        array.view()
    }
}

impl<D: Dimension> HalfArray<D> {
    /// An array of 16-bit floats of type `ty` from their bits, row-major; not copied.
    ///
    /// # Errors
    /// As [`FloatView::from_bits`].
    pub fn from_bits(
        name: &str,
        ty: ScalarType,
        shape: impl IntoDimension<Dim = D>,
        bits: Vec<u16>,
    ) -> Result<Self> {
        if ![ScalarType::FLOAT16, ScalarType::BFLOAT16].contains(&ty) {
            return Err(Error::unsupported(ty, "float16 or bfloat16"));
        }
        let (shape, found) = (shape.into_dimension(), [bits.len()]);
        let expected = format!("{:?}", shape.slice());
        let bits =
            Array::from_shape_vec(shape, bits).map_err(|_| Error::shape(name, &found, expected))?;
        Ok(Self { ty, bits })
    }

    /// The number format.
    pub fn scalar_type(&self) -> ScalarType {
        self.ty
    }

    /// The dimensions.
    pub fn shape(&self) -> &[usize] {
        self.bits.shape()
    }

    /// The bits, row-major.
    pub fn bits(&self) -> &[u16] {
        self.bits.as_slice().expect("made from row-major bits")
    }

    /// The bits, row-major; not copied.
    pub fn into_bits(self) -> Vec<u16> {
        self.bits.into_raw_vec_and_offset().0
    }

    /// A view of the array.
    pub fn view(&self) -> FloatView<'_, D> {
        FloatView::from_bits("array", self.ty, self.bits.raw_dim(), self.bits())
            .expect("checked when it was made")
    }

    /// The array of f16 or bf16; not copied.
    ///
    /// # Errors
    /// [`Error::Dtype`] if the elements are of the other type.
    ///
    /// ```
    /// use marlinspike::num::element::{bf16, f16};
    /// use marlinspike::num::array::HalfArray2;
    /// use marlinspike::num::scalar::ScalarType;
    ///
    /// let y = HalfArray2::from_bits("y", ScalarType::BFLOAT16, [1, 2], vec![0x3f80, 0x4000])?;
    /// assert!(y.clone().into_array::<f16>().is_err());
    /// let y = y.into_array::<bf16>()?;
    /// assert_eq!(y[[0, 1]], bf16::from_f32(2.0));
    /// # Ok::<(), marlinspike::Error>(())
    /// ```
    pub fn into_array<T: Float16>(self) -> Result<Array<T, D>> {
        let found = self.view().dtype();
        if T::TYPE != self.ty {
            return Err(Error::dtype("array", found, T::DTYPE));
        }
        let shape = self.bits.raw_dim();
        match T::from_words(Words::B16(self.into_bits())) {
            Ok(values) => Ok(Array::from_shape_vec(shape, values).expect("the same elements")),
            Err(_) => Err(Error::dtype("array", found, T::DTYPE)),
        }
    }
}

impl<'a> FloatView2<'a> {
    /// [`FloatView::from_bits`] of rows of `cols` elements.
    ///
    /// # Errors
    /// As [`FloatView::from_bits`] and [`rows_of`].
    pub fn from_rows(name: &str, ty: ScalarType, cols: usize, bits: &'a [u16]) -> Result<Self> {
        let (rows, cols) = rows_of(name, bits, cols)?.dim();
        Self::from_bits(name, ty, [rows, cols], bits)
    }
}

impl HalfArray2 {
    /// [`HalfArray::from_bits`] of rows of `cols` elements.
    ///
    /// # Errors
    /// As [`HalfArray::from_bits`] and [`rows_of`].
    pub fn from_rows(name: &str, ty: ScalarType, cols: usize, bits: Vec<u16>) -> Result<Self> {
        let (rows, cols) = rows_of(name, &bits, cols)?.dim();
        Self::from_bits(name, ty, [rows, cols], bits)
    }
}

/// The elements of a row-major array, without a copy.
///
/// # Errors
/// [`Error::NotContiguous`] for other strides.
pub(crate) fn contiguous<T, D: Dimension>(name: &str, a: Array<T, D>) -> Result<Vec<T>> {
    let (len, standard, shape) = (a.len(), a.is_standard_layout(), a.shape().to_vec());
    match a.into_raw_vec_and_offset() {
        (values, None | Some(0)) if standard && values.len() == len => Ok(values),
        _ => Err(Error::NotContiguous { tensor: name.to_owned(), found: shape }),
    }
}

/// The elements in row-major order; not copied from a row-major array.
pub fn into_vec<T: Clone, D: Dimension>(array: Array<T, D>) -> Vec<T> {
    if !array.is_standard_layout() {
        return array.iter().cloned().collect();
    }
    let len = array.len();
    let (mut values, offset) = array.into_raw_vec_and_offset();
    values.drain(..offset.unwrap_or(0));
    values.truncate(len);
    values
}

/// [`rows_of`] of elements that are written.
///
/// # Errors
/// As [`rows_of`].
pub fn rows_mut<'a, T>(
    name: &str,
    values: &'a mut [T],
    cols: usize,
) -> Result<ArrayViewMut2<'a, T>> {
    let shape = rows_of(name, values, cols)?.dim();
    Ok(ArrayViewMut2::from_shape(shape, values).expect("whole rows"))
}

/// Row-major rows of `cols` elements as a matrix. `name` is the tensor's, for errors.
///
/// # Errors
/// [`Error::Size`] for no columns; [`Error::Shape`] where the elements are not whole rows.
pub fn rows_of<'a, T>(name: &str, values: &'a [T], cols: usize) -> Result<ArrayView2<'a, T>> {
    if cols == 0 {
        return Err(Error::size(format!("columns of `{name}`"), cols, "1 or more"));
    }
    ArrayView2::from_shape((values.len() / cols, cols), values)
        .ok()
        .filter(|_| values.len().is_multiple_of(cols))
        .ok_or_else(|| Error::shape(name, &[values.len()], format!("rows of {cols}")))
}
