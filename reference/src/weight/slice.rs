//! Parts of a matrix: a tensor-parallel rank's slice, and the matrix in another order.

use std::ops::Range;

use super::{Codes, Groups, Table, Weight};
use crate::num::dims::{GroupSize, Shape};
use crate::{Error, Result};

impl Weight<'_> {
    /// The columns `columns`, in that order. A column may occur several times.
    ///
    /// # Errors
    /// [`Error::Value`] naming the first column that does not exist.
    pub fn gather_columns(&self, columns: &[usize]) -> Result<Weight<'static>> {
        let size_n = self.shape().size_n;
        if let Some(at) = columns.iter().position(|&n| n >= size_n) {
            let expected = format!("a column below {size_n}");
            return Err(Error::value(
                format!("{}: columns", self.name),
                &[at],
                columns[at],
                expected,
            ));
        }
        let table = |t: &Table| t.gather_columns(columns);
        Ok(Weight {
            name: self.name.clone(),
            ty: self.ty,
            codes: self.codes.gather_columns(columns),
            scales: table(&self.scales)?,
            zeros: self.zeros.as_ref().map(table).transpose()?,
            groups: self.groups.clone(),
            global_scale: self.global_scale,
            bias: self.bias.as_ref().map(table).transpose()?,
        })
    }

    /// The columns of a range: a column-parallel rank's part. Scales, zero points and bias are sliced
    /// too; the groups stay whole.
    ///
    /// # Errors
    /// As [`Weight::gather_columns`].
    pub fn slice_columns(&self, columns: Range<usize>) -> Result<Weight<'static>> {
        self.gather_columns(&columns.collect::<Vec<_>>())
    }

    /// The rows of a range: a row-parallel rank's part.
    ///
    /// With uniform groups, the rank holds the scales and zero points of its groups; every rank holds a
    /// scale per column. With act-order, it holds its slice of `g_idx`, whose values remain groups of
    /// the whole matrix, and the whole tables. The slice that begins at row 0 has the bias, so that
    /// the sum over the ranks adds it once.
    ///
    /// # Errors
    /// [`Error::Size`] for a range outside the matrix, or one that cuts a group or a packed word.
    pub fn slice_rows(&self, rows: Range<usize>) -> Result<Weight<'static>> {
        let Shape { size_k, size_n } = self.shape();
        if rows.start > rows.end || rows.end > size_k {
            let expected = format!("within {size_k}");
            return Err(Error::size(format!("{}: rows", self.name), format!("{rows:?}"), expected));
        }
        let whole = |t: &Table| t.slice_rows(0..t.rows());
        let (groups, cut) = match &self.groups {
            Groups::Uniform(GroupSize::Channel) => (self.groups.clone(), None),
            Groups::Uniform(GroupSize::Of(g)) => {
                if !rows.start.is_multiple_of(*g) || !rows.end.is_multiple_of(*g) {
                    let found = format!("{rows:?}");
                    return Err(Error::size(
                        format!("{}: rows", self.name),
                        found,
                        format!("whole groups of {g}"),
                    ));
                }
                (self.groups.clone(), Some(rows.start / g..rows.end / g))
            }
            Groups::Indexed { g_idx, group_size } => {
                let g_idx = g_idx[rows.clone()].to_vec();
                (Groups::Indexed { g_idx, group_size: *group_size }, None)
            }
        };
        let table = |t: &Table| match &cut {
            Some(groups) => t.slice_rows(groups.clone()),
            None => whole(t),
        };
        let shape = Shape::new(rows.len(), size_n);
        let code = |k, n| self.codes.get(rows.start + k, n);
        Ok(Weight {
            name: self.name.clone(),
            ty: self.ty,
            codes: Codes::from_fn(self.codes.bits(), shape, code)?,
            scales: table(&self.scales)?,
            zeros: self.zeros.as_ref().map(table).transpose()?,
            groups,
            global_scale: self.global_scale,
            bias: self.bias.as_ref().filter(|_| rows.start == 0).cloned(),
        })
    }

    /// The same matrix with row k taken from row `perm[k]`, as act-order: a `g_idx` keeps each row's
    /// group.
    ///
    /// # Errors
    /// [`Error::Shape`] and [`Error::Value`] when `perm` is not a permutation of the rows.
    pub fn gather_rows(&self, perm: &[u32]) -> Result<Weight<'static>> {
        let codes = self.codes.gather_rows(perm)?;
        crate::act_order::inverse(perm)?;
        let g_idx = perm.iter().map(|&k| self.groups.group_of(k as usize) as u32).collect();
        let group_size = self.groups.group_size();
        Ok(Weight {
            codes,
            groups: Groups::Indexed { g_idx, group_size },
            ..self.clone().into_owned()
        })
    }

    /// The same matrix, owning its codes.
    pub fn into_owned(self) -> Weight<'static> {
        Weight {
            name: self.name,
            ty: self.ty,
            codes: self.codes.into_owned(),
            scales: self.scales,
            zeros: self.zeros,
            groups: self.groups,
            global_scale: self.global_scale,
            bias: self.bias,
        }
    }
}
