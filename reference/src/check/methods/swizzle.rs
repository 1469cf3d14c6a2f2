//! Block scales interleaved in tiles.

use super::{Computation, Expected, Form, Mistake, known};
use crate::Result;
use crate::case::{Case, SwizzleConfig};
use crate::check::compare::{Elements, Rows};
use crate::layout::Layout as _;
use crate::layout::flashinfer::{BlockScaleLayout, ScaleTile};
use crate::tensor::DType;
use crate::weight::Table;

/// How far scales got on their way into tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Interleaving {
    Once,
    /// Padded, row by row.
    None,
    /// The interleaved matrix interleaved again.
    Twice,
    /// By the inverse permutation.
    Inverse,
}

impl Interleaving {
    /// The elements of one matrix of scales `[groups, N]` under `layout`.
    pub(super) fn pack(self, layout: &BlockScaleLayout, scales: &Table) -> Result<Elements> {
        let [rows, cols] = layout.packed_shape();
        let once: Elements = layout.pack(scales)?.iter_bits().collect();
        let whole = BlockScaleLayout::new(cols, rows, layout.tile(), layout.ty())?;
        let mut out = vec![0; once.len()];
        match self {
            Self::Once => return Ok(once),
            Self::None => {
                let bits = scales.transposed();
                for n in 0..bits.rows() {
                    for g in 0..bits.cols() {
                        out[n * cols + g] = bits.bits(n, g);
                    }
                }
            }
            Self::Twice => {
                for (i, bits) in once.iter().enumerate() {
                    out[whole.offset(i % cols, i / cols).element] = *bits;
                }
            }
            Self::Inverse => {
                let plain = Self::None.pack(layout, scales)?;
                for (i, out) in out.iter_mut().enumerate() {
                    *out = plain[whole.offset(i % cols, i / cols).element];
                }
            }
        }
        Ok(out)
    }
}

/// `swizzle_blockscale`.
#[derive(Debug, Clone)]
pub(super) struct Swizzle {
    config: SwizzleConfig,
    layout: BlockScaleLayout,
    dtype: DType,
    /// `[groups, N]` of each matrix.
    scales: Vec<Table>,
    interleaving: Interleaving,
}

impl Swizzle {
    pub(super) fn new(case: &Case<'_>, c: &SwizzleConfig) -> Result<Self> {
        let tensor = case.input("scale")?;
        let table = Table::from_tensor(tensor, c.scale_type)?;
        let experts = c.num_experts.unwrap_or(1);
        let matrix = |e| Ok(table.slice_rows(e * c.size_n..(e + 1) * c.size_n)?.transposed());
        Ok(Self {
            config: c.clone(),
            layout: c.layout()?,
            dtype: tensor.dtype(),
            scales: (0..experts).map(matrix).collect::<Result<_>>()?,
            interleaving: Interleaving::Once,
        })
    }
}

impl Computation for Swizzle {
    fn outputs(&self) -> Result<Vec<Expected>> {
        let [rows, cols] = self.layout.packed_shape();
        let mut elements = Elements::new();
        for scales in &self.scales {
            elements.extend(self.interleaving.pack(&self.layout, scales)?);
        }
        let shape = self.config.num_experts.into_iter().chain([rows, cols]).collect();
        Ok(vec![Expected {
            name: "swizzled_scale".to_owned(),
            dtype: self.dtype,
            shape,
            elements,
            form: Form {
                layout: Box::new(self.layout.clone()),
                matrix: [cols, rows],
                inside: [self.config.groups, self.config.size_n],
                rows: Rows::Group,
                width: self.config.scale_type.storage_bits(),
                experts: self.scales.len(),
                stacked: self.config.num_experts.is_some(),
            },
        }])
    }

    fn mistakes() -> Vec<Mistake<Self>> {
        known! {
            "scales-not-swizzled", "the scales are padded, and not interleaved in tiles" =>
                |c| c.interleaving = Interleaving::None;
            "scales-swizzled-twice", "the scales were interleaved twice" =>
                |c| c.interleaving = Interleaving::Twice;
            "scales-swizzled-inverse", "the scales were interleaved by the inverse order" =>
                |c| c.interleaving = Interleaving::Inverse;
            "scales-other-tile", "the scales are interleaved in tiles of the other height" => |c| {
                let tile = match c.config.tile {
                    ScaleTile::Rows128 => ScaleTile::Rows8,
                    ScaleTile::Rows8 => ScaleTile::Rows128,
                };
                let (groups, size_n, ty) = (c.config.groups, c.config.size_n, c.layout.ty());
                if let Ok(layout) = BlockScaleLayout::new(groups, size_n, tile, ty) {
                    c.layout = layout;
                }
            };
            "scales-transposed", "the scales were read as `[groups, N]`" => |c| {
                for table in &mut c.scales {
                    let (rows, cols) = (table.rows(), table.cols());
                    let bits = table.transposed();
                    if let Ok(read) = Table::new(bits.ty(), rows, cols, bits.data().clone()) {
                        *table = read;
                    }
                }
            };
        }
    }
}
