//! A small matrix of scalars kept as bits: scales, zero points, biases.

use ndarray::{Array2, ArrayView2};

use crate::num::array::contiguous;
use crate::num::element::{Scalar, Words};
use crate::num::scalar::ScalarType;
use crate::num::tensor::{DType, Tensor};
use crate::{Error, Result};

/// The bits of a [`Table`], by element width.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TableData {
    /// One byte per element (e4m3, e8m0, zero-point codes).
    B8(Vec<u8>),
    /// Two bytes per element (f16, bf16).
    B16(Vec<u16>),
    /// Four bytes per element (f32).
    B32(Vec<u32>),
}

/// `[rows, cols]` scalars of one type, row-major, as bits: layouts move them without rounding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    ty: ScalarType,
    rows: usize,
    cols: usize,
    data: TableData,
}

/// Runs the same expression on whichever vector `$data` holds.
macro_rules! each_width {
    ($data:expr, $v:ident => $body:expr) => {
        match $data {
            TableData::B8($v) => TableData::B8($body),
            TableData::B16($v) => TableData::B16($body),
            TableData::B32($v) => TableData::B32($body),
        }
    };
}

impl Table {
    /// Wraps bits. Fails if they do not fill the shape.
    pub fn new(ty: ScalarType, rows: usize, cols: usize, data: TableData) -> Result<Self> {
        let len = match &data {
            TableData::B8(v) => v.len(),
            TableData::B16(v) => v.len(),
            TableData::B32(v) => v.len(),
        };
        if rows.checked_mul(cols) != Some(len) {
            return Err(Error::shape("table", &[rows, cols], format!("{len} elements")));
        }
        Ok(Self { ty, rows, cols, data })
    }

    /// The table of an array; not copied.
    ///
    /// # Errors
    /// [`Error::NotContiguous`] for other strides than row-major ones.
    ///
    /// ```
    /// use marlinspike::num::element::{bf16, f16};
    /// use marlinspike::weight::Table;
    /// use ndarray::array;
    ///
    /// let scales = Table::from_array(array![[0.5f32, 2.0]].mapv(f16::from_f32))?;
    /// assert_eq!(scales.value(0, 1), 2.0);
    /// assert_eq!(scales.view::<f16>()?[[0, 0]].to_f32(), 0.5);
    /// assert!(scales.view::<bf16>().is_err());
    /// # Ok::<(), marlinspike::Error>(())
    /// ```
    pub fn from_array<T: Scalar>(array: Array2<T>) -> Result<Self> {
        let (rows, cols) = array.dim();
        let data = match T::into_words(contiguous("table", array)?) {
            Words::B8(v) => TableData::B8(v),
            Words::B16(v) => TableData::B16(v),
            Words::B32(v) => TableData::B32(v),
            Words::B64(_) => return Err(Error::unsupported(T::TYPE, "8 to 32 bits")),
        };
        Self::new(T::TYPE, rows, cols, data)
    }

    /// The table as an array of its own type.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the elements are not of type `T`.
    pub fn view<T: Scalar>(&self) -> Result<ArrayView2<'_, T>> {
        if self.ty != T::TYPE {
            let found = format!("a table of {} as {}", self.ty, T::TYPE);
            return Err(Error::unsupported(found, "the table's own type"));
        }
        let values = match &self.data {
            TableData::B8(v) => bytemuck::try_cast_slice(v),
            TableData::B16(v) => bytemuck::try_cast_slice(v),
            TableData::B32(v) => bytemuck::try_cast_slice(v),
        };
        let shape = (self.rows, self.cols);
        let view = values.ok().and_then(|v| ArrayView2::from_shape(shape, v).ok());
        view.ok_or_else(|| Error::shape("table", &[self.rows, self.cols], T::TYPE))
    }

    /// Reads a tensor of any number of dimensions as `[product of the others, last]`.
    ///
    /// `ty` is the type of the bits (a `U8` tensor may hold e8m0 scales).
    pub fn from_tensor(tensor: &Tensor<'_>, ty: ScalarType) -> Result<Self> {
        let cols = tensor.shape().last().copied().unwrap_or(1);
        let rows = tensor.len().checked_div(cols).unwrap_or(0);
        let data = match tensor.dtype().bytes() {
            1 => TableData::B8(tensor.elements::<u8>().into_owned()),
            2 => TableData::B16(tensor.elements::<u16>().into_owned()),
            4 => TableData::B32(tensor.elements::<u32>().into_owned()),
            _ => return Err(Error::dtype(tensor.name(), tensor.dtype(), "an 8 to 32-bit type")),
        };
        Self::new(ty, rows, cols, data)
    }

    /// The table as a tensor `[rows, cols]` of element type `dtype`.
    pub fn to_tensor(&self, name: impl Into<String>, dtype: DType) -> Result<Tensor<'static>> {
        let shape = vec![self.rows, self.cols];
        match &self.data {
            TableData::B8(v) => Tensor::from_vec(name, dtype, shape, v.clone()),
            TableData::B16(v) => Tensor::from_vec(name, dtype, shape, v.clone()),
            TableData::B32(v) => Tensor::from_vec(name, dtype, shape, v.clone()),
        }
    }

    /// The type of the bits.
    pub fn ty(&self) -> ScalarType {
        self.ty
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The bits.
    pub fn data(&self) -> &TableData {
        &self.data
    }

    /// The bits of one element, zero-extended.
    pub fn bits(&self, row: usize, col: usize) -> u32 {
        assert!(col < self.cols, "column {col} of {}", self.cols);
        let i = row * self.cols + col;
        match &self.data {
            TableData::B8(v) => v[i].into(),
            TableData::B16(v) => v[i].into(),
            TableData::B32(v) => v[i],
        }
    }

    /// All elements as bits, zero-extended, row-major.
    pub fn iter_bits(&self) -> impl Iterator<Item = u32> + '_ {
        (0..self.rows * self.cols).map(|i| match &self.data {
            TableData::B8(v) => v[i].into(),
            TableData::B16(v) => v[i].into(),
            TableData::B32(v) => v[i],
        })
    }

    /// The exact value of one element.
    pub fn value(&self, row: usize, col: usize) -> f64 {
        self.ty.to_f64(self.bits(row, col))
    }

    /// The table with every run of `perm.len()` columns reordered: position p of a run takes
    /// the run's column `perm[p]`. Fails unless whole runs fill the columns.
    pub fn permute_columns(&self, perm: &[usize]) -> Result<Self> {
        if !self.cols.is_multiple_of(perm.len()) {
            return Err(Error::size("columns", self.cols, format!("a multiple of {}", perm.len())));
        }
        let data = each_width!(&self.data, v => {
            let mut out = Vec::with_capacity(v.len());
            for run in v.chunks_exact(perm.len()) {
                out.extend(perm.iter().map(|&p| run[p]));
            }
            out
        });
        Ok(Self { ty: self.ty, rows: self.rows, cols: self.cols, data })
    }

    /// The transposed table.
    pub fn transposed(&self) -> Self {
        let data = each_width!(&self.data, v => {
            (0..self.cols).flat_map(|c| (0..self.rows).map(move |r| v[r * self.cols + c])).collect()
        });
        Self { ty: self.ty, rows: self.cols, cols: self.rows, data }
    }

    /// A table of type `ty` from a function of each element's bits.
    ///
    /// The output width is `ty`'s storage width.
    pub fn map(&self, ty: ScalarType, f: impl FnMut(u32) -> u32) -> Self {
        let bits = self.iter_bits().map(f);
        let data = match ty.storage_bits() {
            8 => TableData::B8(bits.map(|b| b as u8).collect()),
            16 => TableData::B16(bits.map(|b| b as u16).collect()),
            _ => TableData::B32(bits.collect()),
        };
        Self { ty, rows: self.rows, cols: self.cols, data }
    }

    /// The values in another type, each rounded once to the nearest, ties to even.
    ///
    /// Kernels state the type of their scales: Arm's int4 kernels take float32 for columns and bfloat16 for
    /// groups.
    ///
    /// ```
    /// use marlinspike::num::scalar::ScalarType;
    /// use marlinspike::weight::Table;
    /// use ndarray::array;
    ///
    /// let scales = Table::from_array(array![[1.0f32, 1.003]])?.rounded(ScalarType::BFLOAT16);
    /// assert_eq!((scales.ty(), scales.value(0, 1)), (ScalarType::BFLOAT16, 1.0));
    /// # Ok::<(), marlinspike::Error>(())
    /// ```
    pub fn rounded(&self, ty: ScalarType) -> Self {
        match self.ty == ty {
            true => self.clone(),
            false => self.map(ty, |bits| ty.encode_rne(self.ty.to_f64(bits))),
        }
    }

    /// Rows `range` of the table.
    pub fn slice_rows(&self, range: std::ops::Range<usize>) -> Result<Self> {
        if range.start > range.end || range.end > self.rows {
            return Err(Error::size("rows", format!("{range:?}"), format!("within {}", self.rows)));
        }
        let cols = self.cols;
        let (a, b) = (range.start * cols, range.end * cols);
        let data = each_width!(&self.data, v => v[a..b].to_vec());
        Ok(Self { ty: self.ty, rows: range.len(), cols, data })
    }

    /// Columns `range` of the table.
    pub fn slice_columns(&self, range: std::ops::Range<usize>) -> Result<Self> {
        if range.start > range.end || range.end > self.cols {
            return Err(Error::size("columns", format!("{range:?}"), format!("in {}", self.cols)));
        }
        let cols = self.cols;
        let data = each_width!(&self.data, v => {
            (0..self.rows).flat_map(|r| v[r * cols..][range.clone()].iter().copied()).collect()
        });
        Ok(Self { ty: self.ty, rows: self.rows, cols: range.len(), data })
    }

    /// The columns `columns`, in that order.
    ///
    /// # Errors
    /// [`Error::Size`] naming the first column that does not exist.
    pub fn gather_columns(&self, columns: &[usize]) -> Result<Self> {
        if let Some(&n) = columns.iter().find(|&&n| n >= self.cols) {
            return Err(Error::size("column", n, format!("below {}", self.cols)));
        }
        let cols = self.cols;
        let data = each_width!(&self.data, v => {
            (0..self.rows).flat_map(|r| columns.iter().map(move |&n| v[r * cols + n])).collect()
        });
        Ok(Self { ty: self.ty, rows: self.rows, cols: columns.len(), data })
    }
}
