//! The description of a linear layer.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use super::{LINEAR_TABLES_VERSION, VERSION, described, group_size, read, tables};
use crate::Result;
use crate::container::Container;
use crate::layouts::cpu::CpuTables;
use crate::num::dims::{GroupSize, Shape};
use crate::w4a8::packed::RhsLayout;

/// A file's description of a linear layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinearDescription {
    /// The weight's layout: K × N, groups, columns of a block.
    pub layout: RhsLayout,
    /// The checkpoint's group size; −1: one scale per column.
    pub group_size: GroupSize,
}

/// The keys of a linear layer's description.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct LinearKeys {
    version: u32,
    layer: Cow<'static, str>,
    size_k: usize,
    size_n: usize,
    group_size: i64,
    nr: usize,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    zero_points: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    act_order: Option<bool>,
}

impl LinearDescription {
    /// The description as JSON.
    pub fn to_json(&self) -> serde_json::Value {
        let (shape, tables) = (self.layout.shape(), self.layout.tables());
        let stated = tables != CpuTables::NONE;
        serde_json::json!(LinearKeys {
            version: if stated { LINEAR_TABLES_VERSION } else { VERSION },
            layer: "linear".into(),
            size_k: shape.size_k,
            size_n: shape.size_n,
            group_size: self.group_size.to_config(),
            nr: self.layout.nr(),
            zero_points: stated.then_some(tables.zero_points),
            act_order: stated.then_some(tables.act_order),
        })
    }

    /// The description of `module` in `file`.
    ///
    /// # Errors
    /// [`Error::Missing`](crate::Error::Missing) if there is none; [`Error::Value`](crate::Error::Value) and
    /// [`Error::Size`](crate::Error::Size) naming the key.
    pub fn read(file: &Container<'_>, module: &str) -> Result<Self> {
        let keys: LinearKeys = read(file, module, "linear")?;
        let group_size = group_size(module, keys.group_size)?;
        let shape = Shape::new(keys.size_k, keys.size_n);
        let stated = [keys.zero_points, keys.act_order];
        let tables = tables(module, stated, keys.version, LINEAR_TABLES_VERSION)?;
        let layout = RhsLayout::new(shape, group_size, keys.nr);
        let layout = described(module, layout.and_then(|layout| layout.with_tables(tables)))?;
        Ok(Self { layout, group_size })
    }
}
