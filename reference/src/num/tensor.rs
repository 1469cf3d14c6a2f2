//! Named, typed, shaped bytes: what stands between a container and a format.

use std::borrow::Cow;

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
    data: Cow<'a, [u8]>,
}

/// Plain old data that a tensor's bytes can be read as.
pub trait Element: bytemuck::Pod {}
impl Element for u8 {}
impl Element for i8 {}
impl Element for u16 {}
impl Element for i16 {}
impl Element for u32 {}
impl Element for i32 {}
impl Element for f32 {}
impl Element for u64 {}
impl Element for i64 {}
impl Element for f64 {}

impl<'a> Tensor<'a> {
    /// Wraps bytes. Fails when `data` does not fill `shape` exactly.
    pub fn new(
        name: impl Into<String>,
        dtype: DType,
        shape: Vec<usize>,
        data: impl Into<Cow<'a, [u8]>>,
    ) -> Result<Self> {
        let (name, data) = (name.into(), data.into());
        let elements = shape.iter().try_fold(1usize, |a, &d| a.checked_mul(d));
        match elements.and_then(|n| n.checked_mul(dtype.bytes())) {
            Some(bytes) if bytes == data.len() => Ok(Self { name, dtype, shape, data }),
            _ => Err(Error::shape(
                name,
                &shape,
                format!("{} bytes of {dtype} to fill the shape", data.len()),
            )),
        }
    }

    /// Wraps the elements of a vector.
    pub fn from_vec<T: Element>(
        name: impl Into<String>,
        dtype: DType,
        shape: Vec<usize>,
        values: Vec<T>,
    ) -> Result<Tensor<'static>> {
        Tensor::new(name, dtype, shape, bytemuck::cast_slice(&values).to_vec())
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
        self.data.len() / self.dtype.bytes()
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.data.is_empty()
    }

    /// Little-endian bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.data
    }

    /// The bytes, borrowed where the tensor borrowed them.
    pub fn into_bytes(self) -> Cow<'a, [u8]> {
        self.data
    }

    /// The tensor, owning its bytes.
    pub fn into_owned(self) -> Tensor<'static> {
        Tensor {
            name: self.name,
            dtype: self.dtype,
            shape: self.shape,
            data: Cow::Owned(self.data.into_owned()),
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
        match bytemuck::try_cast_slice(&self.data) {
            Ok(slice) => Cow::Borrowed(slice),
            Err(_) => Cow::Owned(bytemuck::allocation::pod_collect_to_vec(&self.data)),
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
        let stride = self.data.len() / n;
        Tensor::new(
            format!("{}[{i}]", self.name),
            self.dtype,
            rest.to_vec(),
            &self.data[i * stride..(i + 1) * stride],
        )
    }
}
