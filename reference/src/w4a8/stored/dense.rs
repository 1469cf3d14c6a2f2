//! The description of a linear layer.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use super::routing::format;
use super::{FORMAT_VERSION, LINEAR_TABLES_VERSION, VERSION, described, group_size, read, tables};
use crate::container::Container;
use crate::layouts::CPU_INT4;
use crate::layouts::cpu::{CpuFormat, CpuSizes, CpuTables};
use crate::num::dims::{GroupSize, Shape};
use crate::w4a8::packed::RhsLayout;
use crate::{Error, Result};

/// A file's description of a linear layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinearDescription {
    /// The format of the matrix.
    pub format: &'static CpuFormat,
    /// `[K, N]`.
    pub shape: Shape,
    /// The checkpoint's group size; −1: one scale per column.
    pub group_size: GroupSize,
    /// Columns of a block.
    pub nr: usize,
    /// Tables after the blocks.
    pub tables: CpuTables,
}

/// The keys of a linear layer's description.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct LinearKeys {
    version: u32,
    layer: Cow<'static, str>,
    size_k: usize,
    size_n: usize,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    weights: Option<String>,
    group_size: i64,
    nr: usize,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    zero_points: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    act_order: Option<bool>,
}

impl LinearDescription {
    /// Of an int4 matrix.
    pub fn int4(layout: RhsLayout, group_size: GroupSize) -> Self {
        let (shape, nr, tables) = (layout.shape(), layout.nr(), layout.tables());
        Self { format: &CPU_INT4, shape, group_size, nr, tables }
    }

    /// Int4: the matrix's layout.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for another format; as [`RhsLayout::new`].
    pub fn int4_layout(&self) -> Result<RhsLayout> {
        if *self.format != CPU_INT4 {
            return Err(Error::unsupported(self.format.name, "expected int4"));
        }
        RhsLayout::new(self.shape, self.group_size, self.nr)?.with_tables(self.tables)
    }

    /// Sizes of the packed matrix.
    ///
    /// # Errors
    /// [`Error::Size`] for sizes that the format does not have.
    pub fn sizes(&self) -> Result<CpuSizes> {
        (self.format.sizes)(self.shape, self.group_size, self.nr, self.tables)
    }

    /// The description as JSON.
    pub fn to_json(&self) -> serde_json::Value {
        let other = *self.format != CPU_INT4;
        let stated = self.tables != CpuTables::NONE;
        serde_json::json!(LinearKeys {
            version: match (other, stated) {
                (true, _) => FORMAT_VERSION,
                (false, true) => LINEAR_TABLES_VERSION,
                (false, false) => VERSION,
            },
            layer: "linear".into(),
            size_k: self.shape.size_k,
            size_n: self.shape.size_n,
            weights: other.then(|| self.format.name.to_owned()),
            group_size: self.group_size.to_config(),
            nr: self.nr,
            zero_points: (other || stated).then_some(self.tables.zero_points),
            act_order: (other || stated).then_some(self.tables.act_order),
        })
    }

    /// The description of `module` in `file`.
    ///
    /// # Errors
    /// [`Error::Missing`] if there is none; [`Error::Value`] and [`Error::Size`] naming the key.
    pub fn read(file: &Container<'_>, module: &str) -> Result<Self> {
        let keys: LinearKeys = read(file, module, "linear")?;
        let stated = [keys.zero_points, keys.act_order];
        let found = Self {
            format: format(module, keys.version, keys.weights.as_deref())?,
            shape: Shape::new(keys.size_k, keys.size_n),
            group_size: group_size(module, keys.group_size)?,
            nr: keys.nr,
            tables: tables(module, stated, keys.version, LINEAR_TABLES_VERSION)?,
        };
        described(module, found.sizes())?;
        Ok(found)
    }
}
