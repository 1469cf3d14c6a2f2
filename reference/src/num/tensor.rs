//! Named, typed, shaped bytes: the form of data between a container and a format.

use std::borrow::Cow;

use ndarray::{Array, ArrayD, ArrayView, ArrayViewD, Dimension};

pub use super::element::Element;
use super::element::Words;
use super::float_array::contiguous;
pub use crate::dtype::DType;
use crate::{Error, Result};

/// A tensor: name, element type, row-major shape, little-endian bytes (borrowed or owned).
///
/// The constructor checks that the bytes fill the shape exactly.
#[derive(Debug, Clone, PartialEq)]
pub struct Tensor<'a> {
    name: String,
    dtype: DType,
    shape: Vec<usize>,
    data: Data<'a>,
}

/// A tensor's bytes.
#[derive(Debug, Clone)]
enum Data<'a> {
    Borrowed(&'a [u8]),
    Owned(Words),
}

impl Data<'_> {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Borrowed(bytes) => bytes,
            Self::Owned(words) => words.bytes(),
        }
    }
}

impl PartialEq for Data<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.bytes() == other.bytes()
    }
}

impl<'a> Tensor<'a> {
    /// Wraps bytes. Fails when `data` does not fill `shape` exactly.
    pub fn new(
        name: impl Into<String>,
        dtype: DType,
        shape: Vec<usize>,
        data: impl Into<Cow<'a, [u8]>>,
    ) -> Result<Self> {
        let data = match data.into() {
            Cow::Borrowed(bytes) => Data::Borrowed(bytes),
            Cow::Owned(bytes) => Data::Owned(Words::B8(bytes)),
        };
        Self::with_data(name.into(), dtype, shape, data)
    }

    fn with_data(name: String, dtype: DType, shape: Vec<usize>, data: Data<'a>) -> Result<Self> {
        let elements = shape.iter().try_fold(1usize, |a, &d| a.checked_mul(d));
        match elements.and_then(|n| n.checked_mul(dtype.bytes())) {
            Some(bytes) if bytes == data.bytes().len() => Ok(Self { name, dtype, shape, data }),
            _ => Err(Error::shape(
                name,
                &shape,
                format!("{} bytes of {dtype} to fill the shape", data.bytes().len()),
            )),
        }
    }

    /// Takes the elements of a vector, without a copy.
    pub fn from_vec<T: Element>(
        name: impl Into<String>,
        dtype: DType,
        shape: Vec<usize>,
        values: Vec<T>,
    ) -> Result<Tensor<'static>> {
        Tensor::with_data(name.into(), dtype, shape, Data::Owned(T::into_words(values)))
    }

    /// Takes an array, without a copy.
    ///
    /// # Errors
    /// [`Error::NotContiguous`] unless the array is row-major without gaps.
    pub fn from_array<T: Element, D: Dimension>(
        name: impl Into<String>,
        array: Array<T, D>,
    ) -> Result<Tensor<'static>> {
        let (name, shape) = (name.into(), array.shape().to_vec());
        let values = contiguous(&name, array)?;
        Tensor::from_vec(name, T::DTYPE, shape, values)
    }

    /// Borrows an array's elements.
    ///
    /// # Errors
    /// As [`Tensor::from_array`].
    pub fn from_view<T: Element, D: Dimension>(
        name: impl Into<String>,
        view: ArrayView<'a, T, D>,
    ) -> Result<Self> {
        let (name, shape) = (name.into(), view.shape().to_vec());
        match view.to_slice() {
            Some(values) => Self::new(name, T::DTYPE, shape, bytemuck::cast_slice::<T, u8>(values)),
            None => Err(Error::NotContiguous { tensor: name, found: shape }),
        }
    }

    /// The tensor as an array of its own type, without a copy.
    ///
    /// # Errors
    /// [`Error::Dtype`] if `T` is not read from this element type; [`Error::Unaligned`] for borrowed
    /// bytes at an address that `T` cannot be read from.
    ///
    /// ```
    /// use marlinspike::num::element::f16;
    /// use marlinspike::num::tensor::Tensor;
    /// use ndarray::{Array2, Ix2, array};
    ///
    /// let scales: Array2<f16> = array![[1.0, 0.5], [2.0, 0.25]].mapv(f16::from_f32);
    /// let tensor = Tensor::from_array("scales", scales)?;
    /// let view = tensor.view::<f16>()?.into_dimensionality::<Ix2>().unwrap();
    /// assert_eq!(view[[1, 0]].to_f32(), 2.0);
    /// assert!(tensor.view::<u16>().is_err());
    /// # Ok::<(), marlinspike::Error>(())
    /// ```
    pub fn view<T: Element>(&self) -> Result<ArrayViewD<'_, T>> {
        self.expect_dtype(T::READ_AS)?;
        let Ok(values) = bytemuck::try_cast_slice(self.bytes()) else {
            let (tensor, expected) = (self.name.clone(), align_of::<T>());
            return Err(Error::Unaligned { tensor, expected });
        };
        ArrayView::from_shape(self.shape.as_slice(), values)
            .map_err(|_| Error::shape(&self.name, &self.shape, "a shape below 2^63 elements"))
    }

    /// The tensor as an owned array of its own type. Elements that the tensor owns as such are not
    /// copied.
    ///
    /// # Errors
    /// [`Error::Dtype`] if `T` is not read from this element type.
    pub fn into_array<T: Element>(self) -> Result<ArrayD<T>> {
        self.expect_dtype(T::READ_AS)?;
        let values = match self.data {
            Data::Borrowed(bytes) => bytemuck::allocation::pod_collect_to_vec(bytes),
            Data::Owned(words) => T::from_words(words)
                .unwrap_or_else(|w| bytemuck::allocation::pod_collect_to_vec(w.bytes())),
        };
        Array::from_shape_vec(self.shape.as_slice(), values)
            .map_err(|_| Error::shape(&self.name, &self.shape, "a shape below 2^63 elements"))
    }

    /// Tensor name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The same tensor under another name.
    pub fn renamed(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Row-major shape.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.bytes().len() / self.dtype.bytes()
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.bytes().is_empty()
    }

    /// Little-endian bytes.
    pub fn bytes(&self) -> &[u8] {
        self.data.bytes()
    }

    /// The bytes, borrowed where the tensor borrowed them; copied where it owns wider elements.
    pub fn into_bytes(self) -> Cow<'a, [u8]> {
        match self.data {
            Data::Borrowed(bytes) => Cow::Borrowed(bytes),
            Data::Owned(words) => Cow::Owned(words.into_bytes()),
        }
    }

    /// The tensor, owning its bytes.
    pub fn into_owned(self) -> Tensor<'static> {
        Tensor {
            name: self.name,
            dtype: self.dtype,
            shape: self.shape,
            data: Data::Owned(match self.data {
                Data::Borrowed(bytes) => Words::B8(bytes.to_vec()),
                Data::Owned(words) => words,
            }),
        }
    }

    /// Fails with [`Error::Dtype`] unless the element type is one of `allowed`.
    pub fn expect_dtype(&self, allowed: &[DType]) -> Result<&Self> {
        if allowed.contains(&self.dtype) {
            return Ok(self);
        }
        let names: Vec<_> = allowed.iter().map(|d| d.name()).collect();
        Err(Error::dtype(&self.name, self.dtype, names.join(" or ")))
    }

    /// Fails with [`Error::Shape`] unless the shape is exactly `shape`.
    pub fn expect_shape(&self, shape: &[usize]) -> Result<&Self> {
        if self.shape == shape {
            return Ok(self);
        }
        Err(Error::shape(&self.name, &self.shape, format!("{shape:?}")))
    }

    /// The two dimensions of a matrix.
    pub fn dims2(&self) -> Result<[usize; 2]> {
        <[usize; 2]>::try_from(self.shape.as_slice())
            .map_err(|_| Error::shape(&self.name, &self.shape, "two dimensions"))
    }

    /// The three dimensions of a stack of matrices.
    pub fn dims3(&self) -> Result<[usize; 3]> {
        <[usize; 3]>::try_from(self.shape.as_slice())
            .map_err(|_| Error::shape(&self.name, &self.shape, "three dimensions"))
    }

    /// The elements as `T`, borrowed where the bytes are aligned for it, else copied.
    ///
    /// `T` must have the element type's size; the numbers' meaning is the caller's business
    /// (16-bit floats are read as their `u16` bits).
    ///
    /// # Panics
    /// When `T` has another size than the element type: a programming error.
    pub fn elements<T: Element>(&self) -> Cow<'_, [T]> {
        assert_eq!(size_of::<T>(), self.dtype.bytes(), "element size of `{}`", self.name);
        match bytemuck::try_cast_slice(self.bytes()) {
            Ok(slice) => Cow::Borrowed(slice),
            Err(_) => Cow::Owned(bytemuck::allocation::pod_collect_to_vec(self.bytes())),
        }
    }

    /// Part `i` of a tensor cut along its first dimension (one expert of a stack).
    pub fn index0(&self, i: usize) -> Result<Tensor<'_>> {
        let Some((&n, rest)) = self.shape.split_first() else {
            return Err(Error::shape(&self.name, &self.shape, "at least one dimension"));
        };
        if i >= n {
            return Err(Error::shape(&self.name, &self.shape, format!("first dimension > {i}")));
        }
        let stride = self.bytes().len() / n;
        Tensor::new(
            format!("{}[{i}]", self.name),
            self.dtype,
            rest.to_vec(),
            &self.bytes()[i * stride..(i + 1) * stride],
        )
    }
}

impl<'a, T: Element> TryFrom<&'a Tensor<'_>> for ArrayViewD<'a, T> {
    type Error = Error;

    fn try_from(tensor: &'a Tensor<'_>) -> Result<Self> {
        tensor.view()
    }
}

impl<T: Element> TryFrom<Tensor<'_>> for ArrayD<T> {
    type Error = Error;

    fn try_from(tensor: Tensor<'_>) -> Result<Self> {
        tensor.into_array()
    }
}
