//! Block scales interleaved in tiles.

use serde_json::{Value, json};

use super::interleaving::Interleaving;
use crate::Result;
use crate::judge::compare::{Elements, Rows};
use crate::layouts::Layout as _;
use crate::layouts::block_scale::{BlockScaleLayout, ScaleTile};
use crate::num::scalar::ScalarType;
use crate::num::tensor::DType;
use crate::ops::Operation;
use crate::ops::case::Case;
use crate::ops::computation::{Computation, Defined, Expected, Form, Mistake, ids, known};
use crate::ops::schema::{CaseError, Reader, TensorRule};
use crate::ops::tensors::{input, is, name_of, output, refused};
use crate::weight::Table;

const TILES: &[(&str, ScaleTile)] = &[("128x4", ScaleTile::Rows128), ("8x4", ScaleTile::Rows8)];

const SCALES: &[(&str, ScalarType)] = &[
    ("float8_e4m3fn", ScalarType::FLOAT8_E4M3FN),
    ("float8_e8m0fnu", ScalarType::FLOAT8_E8M0FNU),
    ("bfloat16", ScalarType::BFLOAT16),
];

/// Config of `swizzle_blockscale` (FlashInfer: `block_scale_interleave`).
///
/// in: `scale` `[N, G]`, or `[E, N, G]` with `num_experts`. out: `swizzled_scale`, both axes padded with
/// zeros to whole tiles.
#[derive(Debug, Clone, PartialEq)]
pub struct SwizzleConfig {
    /// `scale_type`: float8_e4m3fn, float8_e8m0fnu or bfloat16.
    pub scale_type: ScalarType,
    /// `sf_layout`: `128x4` or `8x4`.
    pub tile: ScaleTile,
    /// Number of experts; `None` for a single matrix.
    pub num_experts: Option<usize>,
    /// Rows: output features, or tokens.
    pub size_n: usize,
    /// Blocks of k.
    pub groups: usize,
}

impl SwizzleConfig {
    /// The layout of one matrix.
    ///
    /// # Errors
    /// As [`BlockScaleLayout::new`].
    pub fn layout(&self) -> Result<BlockScaleLayout> {
        BlockScaleLayout::new(self.groups, self.size_n, self.tile, self.scale_type)
    }

    /// How a file stores the scales.
    pub(crate) fn dtype(&self) -> DType {
        match self.scale_type {
            ScalarType::BFLOAT16 => DType::BF16,
            ScalarType::FLOAT8_E8M0FNU => DType::U8,
            _ => DType::F8E4M3,
        }
    }
}

impl Operation for SwizzleConfig {
    fn keys() -> &'static [&'static str] {
        &["scale_type", "sf_layout", "num_experts", "size_n", "groups"]
    }

    fn read(r: &Reader<'_>) -> Result<Self, CaseError> {
        let config = Self {
            scale_type: r.name("scale_type", SCALES)?,
            tile: r.name("sf_layout", TILES)?,
            num_experts: r.optional_size("num_experts")?,
            size_n: r.size("size_n")?,
            groups: r.size("groups")?,
        };
        config.layout().map_err(|e| refused(r, "size_n", config.size_n, &e))?;
        Ok(config)
    }

    fn json(&self) -> Value {
        json!({
            "scale_type": self.scale_type.name(), "sf_layout": name_of(TILES, &self.tile),
            "num_experts": self.num_experts, "size_n": self.size_n, "groups": self.groups,
        })
    }

    fn tensors(&self, _experts: usize) -> Result<Vec<TensorRule>> {
        let [rows, cols] = self.layout()?.packed_shape();
        let lead = self.num_experts.map(is);
        let shape = |dims: [usize; 2]| lead.into_iter().chain(dims.map(is)).collect::<Vec<_>>();
        let dtypes = match self.dtype() {
            DType::U8 => vec![DType::U8, DType::F8E8M0],
            dtype => vec![dtype],
        };
        Ok(vec![
            input("scale", &dtypes, &shape([self.size_n, self.groups])),
            output("swizzled_scale", &dtypes, &shape([rows, cols])),
        ])
    }

    /// Rows and groups around the edges of tiles of 128 x 4 and 8 x 4.
    fn lattice() -> Result<Vec<Self>> {
        let types = [ScalarType::FLOAT8_E4M3FN, ScalarType::FLOAT8_E8M0FNU, ScalarType::BFLOAT16];
        let mut all = Vec::new();
        for size_n in [1, 7, 8, 9, 31, 33, 127, 128, 129, 257] {
            for groups in [1, 3, 4, 5, 8] {
                for scale_type in types {
                    for (tile, num_experts) in [
                        (ScaleTile::Rows128, None),
                        (ScaleTile::Rows8, None),
                        (ScaleTile::Rows128, Some(3)),
                    ] {
                        all.push(SwizzleConfig { scale_type, tile, num_experts, size_n, groups });
                    }
                }
            }
        }
        Ok(all)
    }

    fn computation(&self, case: &Case<'_>) -> Result<Option<Box<dyn Defined>>> {
        Ok(Some(Box::new(Swizzle::new(case, self)?)))
    }

    fn mistakes() -> Vec<&'static str> {
        ids::<Swizzle>()
    }
}

/// `swizzle_blockscale`.
#[derive(Debug, Clone)]
struct Swizzle {
    config: SwizzleConfig,
    layout: BlockScaleLayout,
    dtype: DType,
    /// `[groups, N]` of each matrix.
    scales: Vec<Table>,
    interleaving: Interleaving,
}

impl Swizzle {
    fn new(case: &Case<'_>, c: &SwizzleConfig) -> Result<Self> {
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
