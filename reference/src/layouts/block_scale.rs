//! Block scales interleaved in tiles for the block-scaled instructions of tensor cores.

use super::positions::{Named, Part, Positions, Request, values};
use super::rows::RowOrder;
use super::{Layout, Place, Slot};
use crate::num::scalar::ScalarType;
use crate::weight::{Table, TableData};
use crate::{Error, Result};

/// Number of rows of scales in a tile, which is always four groups wide.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ScaleTile {
    /// 128 rows: `[N / 128, G / 4]` tiles of `[32, 4, 4]`, where row r of a tile is at (r mod 32, r
    /// / 32). vLLM `swizzle_blockscale`, FlashInfer `block_scale_interleave`
    /// (`SfLayout.layout_128x4`), the layout of CUTLASS's block-scaled products.
    Rows128,
    /// 8 rows: `[N / 8, G / 4]` tiles of `[8, 4]` (`SfLayout.layout_8x4`), for activations of few
    /// tokens.
    Rows8,
}

/// Groups of a tile.
const TILE_GROUPS: usize = 4;

impl ScaleTile {
    /// Rows of a tile.
    pub const fn rows(self) -> usize {
        match self {
            Self::Rows128 => 128,
            Self::Rows8 => 8,
        }
    }

    /// Position of (row, group) in a tile.
    const fn position(self, row: usize, group: usize) -> usize {
        match self {
            Self::Rows128 => row % 32 * 16 + row / 32 * 4 + group,
            Self::Rows8 => row * 4 + group,
        }
    }

    /// The (row, group) at a position of a tile.
    const fn value_at(self, position: usize) -> (usize, usize) {
        let (group, rest) = (position % 4, position / 4);
        match self {
            Self::Rows128 => (rest % 4 * 32 + rest / 4, group),
            Self::Rows8 => (rest, group),
        }
    }
}

/// Scales of `size_n` rows (of a weight, or tokens) and `groups` blocks of k, interleaved and padded
/// with zeros to whole tiles.
///
/// A matrix of scales is `[groups, N]` in this library and `[N, groups]` upstream. The packed
/// tensor `[padded N, padded groups]` has upstream's shape, although its rows are no longer rows.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct BlockScaleLayout {
    groups: usize,
    size_n: usize,
    tile: ScaleTile,
    ty: ScalarType,
    rows: Option<RowOrder>,
}

impl BlockScaleLayout {
    /// The layout of scales `[groups, size_n]` of type `ty`, with rows n in their original order.
    ///
    /// # Errors
    /// [`Error::Size`] without rows or groups, or if the size overflows.
    pub fn new(groups: usize, size_n: usize, tile: ScaleTile, ty: ScalarType) -> Result<Self> {
        let padded = |size: usize, unit: usize| size.checked_next_multiple_of(unit);
        let fits = padded(size_n, tile.rows())
            .zip(padded(groups, TILE_GROUPS))
            .and_then(|(n, g)| n.checked_mul(g))
            .is_some_and(|len| isize::try_from(len).is_ok());
        if groups == 0 || size_n == 0 || !fits {
            let found = format!("[{groups}, {size_n}]");
            return Err(Error::size("scales", found, "1 or more of each, within memory"));
        }
        Ok(Self { groups, size_n, tile, ty, rows: None })
    }

    /// The same layout with rows n reordered by `rows` before they are interleaved.
    ///
    /// # Errors
    /// [`Error::Size`] if the order has another number of rows.
    pub fn with_rows(self, rows: RowOrder) -> Result<Self> {
        if rows.size_n() != self.size_n {
            return Err(Error::size("rows of the order", rows.size_n(), self.size_n));
        }
        Ok(Self { rows: Some(rows), ..self })
    }

    /// The tile of the interleaving.
    pub fn tile(&self) -> ScaleTile {
        self.tile
    }

    /// `[groups, N]`.
    pub fn shape(&self) -> [usize; 2] {
        [self.groups, self.size_n]
    }

    /// Type of the scales.
    pub fn ty(&self) -> ScalarType {
        self.ty
    }

    /// Whether a packed element belongs to no scale.
    pub fn is_padding(&self, element: usize) -> bool {
        let (row, group) = self.unfold(element);
        row >= self.size_n || group >= self.groups
    }

    /// Position of n and group of a packed element, including padding.
    fn unfold(&self, element: usize) -> (usize, usize) {
        let [_, padded_groups] = self.packed_shape();
        let tile_len = self.tile.rows() * TILE_GROUPS;
        let (tile, position) = (element / tile_len, element % tile_len);
        let across = padded_groups / TILE_GROUPS;
        let (row, group) = self.tile.value_at(position);
        (tile / across * self.tile.rows() + row, tile % across * TILE_GROUPS + group)
    }

    /// The interleaved scales with zeros in the padding; bits are unchanged.
    ///
    /// # Errors
    /// [`Error::Shape`] for scales of another shape, [`Error::Unsupported`] of another type.
    pub fn pack(&self, scales: &Table) -> Result<Table> {
        let shape = [self.groups, self.size_n];
        self.expect("scales", scales, shape)?;
        let [rows, cols] = self.packed_shape();
        let source = |element| {
            let (place, group) = self.unfold(element);
            let inside = place < self.size_n && group < self.groups;
            inside.then(|| group * self.size_n + self.source(place))
        };
        rearranged(scales, rows, cols, source)
    }

    /// The inverse of [`Self::pack`]; the padding is ignored (see [`Self::expect_zero_padding`]).
    ///
    /// # Errors
    /// As [`Self::pack`].
    pub fn unpack(&self, packed: &Table) -> Result<Table> {
        self.expect("packed scales", packed, self.packed_shape())?;
        rearranged(packed, self.groups, self.size_n, |i| {
            Some(self.offset(i / self.size_n, i % self.size_n).element)
        })
    }

    /// Checks that the padding is zero, as upstream writes it.
    ///
    /// # Errors
    /// [`Error::Value`] with the first element that is not; as [`Self::pack`] otherwise.
    pub fn expect_zero_padding(&self, packed: &Table) -> Result<()> {
        self.expect("packed scales", packed, self.packed_shape())?;
        let [_, cols] = self.packed_shape();
        match packed.iter_bits().enumerate().find(|&(i, bits)| bits != 0 && self.is_padding(i)) {
            None => Ok(()),
            Some((i, bits)) => {
                let found = format!("bits {bits:#x}");
                Err(Error::value("packed scales", &[i / cols, i % cols], found, "0 in the padding"))
            }
        }
    }

    fn source(&self, place: usize) -> usize {
        self.rows.as_ref().map_or(place, |rows| rows.source(place))
    }

    fn expect(&self, what: &str, table: &Table, shape: [usize; 2]) -> Result<()> {
        if table.ty() != self.ty {
            let expected = format!("{} is expected", self.ty);
            return Err(Error::unsupported(format!("{what} of {}", table.ty()), expected));
        }
        if [table.rows(), table.cols()] == shape {
            return Ok(());
        }
        Err(Error::shape(what, &[table.rows(), table.cols()], format!("{shape:?}")))
    }
}

/// A table whose element i is `table`'s element `source(i)`, or zero.
fn rearranged(
    table: &Table,
    rows: usize,
    cols: usize,
    source: impl Fn(usize) -> Option<usize>,
) -> Result<Table> {
    fn gather<T: Copy + Default>(
        values: &[T],
        len: usize,
        source: impl Fn(usize) -> Option<usize>,
    ) -> Vec<T> {
        (0..len).map(|i| source(i).map_or(T::default(), |at| values[at])).collect()
    }
    let len = rows * cols;
    let data = match table.data() {
        TableData::B8(v) => TableData::B8(gather(v, len, source)),
        TableData::B16(v) => TableData::B16(gather(v, len, source)),
        TableData::B32(v) => TableData::B32(gather(v, len, source)),
    };
    Table::new(table.ty(), rows, cols, data)
}

impl Layout for BlockScaleLayout {
    /// `[padded N, padded groups]`.
    fn packed_shape(&self) -> [usize; 2] {
        let rows = self.size_n.next_multiple_of(self.tile.rows());
        [rows, self.groups.next_multiple_of(TILE_GROUPS)]
    }

    fn offset(&self, group: usize, n: usize) -> Slot {
        assert!(group < self.groups && n < self.size_n);
        let place = self.rows.as_ref().map_or(n, |rows| rows.target(n));
        let tile_rows = self.tile.rows();
        let across = self.groups.div_ceil(TILE_GROUPS);
        let tile = place / tile_rows * across + group / TILE_GROUPS;
        let position = self.tile.position(place % tile_rows, group % TILE_GROUPS);
        let element = tile * tile_rows * TILE_GROUPS + position;
        Slot { element, bit: 0, width: self.ty.storage_bits() }
    }

    /// For an element of padding ([`BlockScaleLayout::is_padding`]), its position outside the
    /// matrix.
    fn locate(&self, element: usize, bit: u32) -> Place {
        assert!(element < self.packed_len() && bit < self.ty.storage_bits());
        let (place, group) = self.unfold(element);
        let col = if place < self.size_n { self.source(place) } else { place };
        Place { row: group, col, fragment: None }
    }
}

/// The rows of block scales in the list of layouts.
pub(super) const ALL: &[Named] = &[
    Named {
        name: "block_scales_128x4",
        title: "Block scales in tiles of 128 rows (CUTLASS)",
        options: &[],
        one: |r| block_scales(r, ScaleTile::Rows128),
    },
    Named {
        name: "block_scales_8x4",
        title: "Block scales in tiles of 8 rows",
        options: &[],
        one: |r| block_scales(r, ScaleTile::Rows8),
    },
];

fn block_scales(r: &Request, tile: ScaleTile) -> Result<Positions> {
    let groups = r.groups()?;
    let layout = BlockScaleLayout::new(groups, r.size_n, tile, ScalarType::FLOAT8_E4M3FN)?;
    values(&layout, 8, [groups, r.size_n], Part::Scale)
}
