//! The packed weight as a layout object.

use ndarray::{Array2, ArrayView2, ArrayViewMut2};
use rayon::{current_num_threads, prelude::*};

use super::kernel::Kernel;
use super::repack;
use super::tile::{Activations, TILE_LEN, TileMap};
use crate::layouts::{Difference, Layout, Place, Slot, compare};
use crate::num::dims::Shape;
use crate::weight::Codes;
use crate::{Error, Result};

/// Number of columns per step of an act-order gather: a whole number of tiles.
const GATHER_COLUMNS: usize = 128;

/// Number of words that justify another thread, since packing them takes longer than waking it. A
/// smaller matrix is packed on the caller's thread.
const THREAD_WORDS: usize = 1 << 17;

/// Marlin's packed weight: 32-bit words `[K / 16, N · 16 / pack]`.
///
/// Tiles are stored by rows of tiles. With 8-bit activations, a row of 32-k tiles fills two rows of
/// the packed tensor. Source: vLLM 0.21.0 `gptq_marlin_repack`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WeightLayout {
    shape: Shape,
    map: TileMap,
}

/// The packed tensor's name, for errors.
const QWEIGHT: &str = "marlin_qweight";

impl WeightLayout {
    /// The layout of a `shape` matrix of `bits` (4 or 8) codes.
    ///
    /// Fails unless K is a multiple of 16 (32 with 8-bit activations) and N of 64. Upstream's dense
    /// kernel also requires K to be a multiple of [`super::MIN_THREAD_K`]; that depends on its
    /// thread configuration and is checked when a backend is selected.
    pub fn new(shape: Shape, bits: u32, activations: Activations) -> Result<Self> {
        if !matches!(bits, 4 | 8) {
            return Err(Error::size("bits per code", bits, "4 or 8"));
        }
        let map = TileMap::new(activations, bits);
        if shape.is_empty() || !shape.size_k.is_multiple_of(map.tile_k()) {
            return Err(Error::size(
                "size_k",
                shape.size_k,
                format!("a positive multiple of {}", map.tile_k()),
            ));
        }
        if !shape.size_n.is_multiple_of(super::MIN_THREAD_N) {
            return Err(Error::size(
                "size_n",
                shape.size_n,
                format!("a multiple of {}", super::MIN_THREAD_N),
            ));
        }
        Ok(Self { shape, map })
    }

    /// Matrix shape.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// The order inside a tile.
    pub fn tile_map(&self) -> TileMap {
        self.map
    }

    /// Words of one row of tiles.
    fn words_per_tile_row(&self) -> usize {
        self.shape.size_n / self.map.tile_n() * self.map.words()
    }

    /// Packs `codes`; with act-order, row k of the packed matrix is row `perm[k]` of `codes`.
    ///
    /// Runs on rayon's current pool. Fails when `codes` has another shape or width, or `perm`
    /// another length or a row out of range.
    ///
    /// ```
    /// use marlinspike::layouts::{Layout, marlin::{Activations, WeightLayout}};
    /// use marlinspike::num::dims::Shape;
    /// use marlinspike::weight::Codes;
    /// use ndarray::Array2;
    ///
    /// let word = |(k, n)| (k as u32 * 64 + n as u32).wrapping_mul(0x9e37_79b9);
    /// let qweight = Array2::from_shape_fn((128 / 8, 64), word);
    /// let codes = Codes::from_view(4, qweight.view())?;
    /// let layout = WeightLayout::new(Shape::new(128, 64), 4, Activations::Bits16)?;
    /// let packed = layout.pack(&codes, None)?;
    /// assert_eq!(packed.shape(), layout.packed_shape());
    /// assert_eq!(layout.unpack(packed.view(), None)?.into_array(), qweight);
    /// # Ok::<(), marlinspike::Error>(())
    /// ```
    pub fn pack(&self, codes: &Codes<'_>, perm: Option<&[u32]>) -> Result<Array2<u32>> {
        let mut out = Array2::zeros(self.packed_shape());
        self.pack_into(codes, perm, out.view_mut())?;
        Ok(out)
    }

    /// [`Self::pack`] into an array of [`Layout::packed_shape`].
    ///
    /// # Errors
    /// As [`Self::pack`]; [`Error::Shape`] for another shape, [`Error::NotContiguous`] for other strides
    /// than row-major ones.
    pub fn pack_into(
        &self,
        codes: &Codes<'_>,
        perm: Option<&[u32]>,
        out: ArrayViewMut2<'_, u32>,
    ) -> Result<()> {
        let found = out.shape().to_vec();
        self.expect_shape(&found)?;
        match out.into_slice() {
            Some(out) => self.pack_words(codes, perm, out),
            None => Err(Error::NotContiguous { tensor: QWEIGHT.to_owned(), found }),
        }
    }

    /// [`Self::pack_into`] row-major words.
    pub(crate) fn pack_words(
        &self,
        codes: &Codes<'_>,
        perm: Option<&[u32]>,
        out: &mut [u32],
    ) -> Result<()> {
        self.expect_codes(codes)?;
        self.expect_len(out.len())?;
        let kernel = Kernel::detect();
        let Some(perm) = perm else {
            let rows_per_thread = THREAD_WORDS.div_ceil(self.words_per_tile_row());
            let rows = out.par_chunks_mut(self.words_per_tile_row()).enumerate();
            rows.with_min_len(rows_per_thread).for_each(|(row, out)| {
                let source = repack::source_rows(codes, self.map, row);
                kernel.pack_tile_row(self.map, self.shape.size_n, source, out);
            });
            return Ok(());
        };
        crate::act_order::expect_rows(perm, self.shape.size_k)?;
        // A source word holds rows of up to eight tiles. A copy of a few columns fits the L2 cache
        // regardless of the stride of its rows.
        let per_thread = (self.shape.size_k / self.map.tile_k()).div_ceil(current_num_threads());
        let band = self.words_per_tile_row() * per_thread;
        out.par_chunks_mut(band).enumerate().for_each(|(thread, band)| {
            let (mut block, mut source) = (Vec::new(), Vec::new());
            for n0 in (0..self.shape.size_n).step_by(GATHER_COLUMNS) {
                let columns = n0..self.shape.size_n.min(n0 + GATHER_COLUMNS);
                let width = columns.len();
                block.clear();
                for row in codes.words().chunks_exact(self.shape.size_n) {
                    block.extend_from_slice(&row[columns.clone()]);
                }
                let words = self.map.words() * width / self.map.tile_n();
                let first = self.map.words() * n0 / self.map.tile_n();
                let rows = band.chunks_exact_mut(self.words_per_tile_row()).enumerate();
                for (row, out) in rows {
                    let perm = &perm[(thread * per_thread + row) * self.map.tile_k()..];
                    let perm = &perm[..self.map.tile_k()];
                    kernel.gather_rows(&block, width, codes.bits(), perm, &mut source);
                    kernel.pack_tile_row(self.map, width, &source, &mut out[first..][..words]);
                }
            }
        });
        Ok(())
    }

    /// The codes of packed words; with act-order, `perm` as it was given to [`Self::pack`]
    /// (a permutation) puts the rows back to checkpoint order.
    ///
    /// # Errors
    /// [`Error::Shape`] for another shape than [`Layout::packed_shape`]; [`Error::NotContiguous`] for
    /// other strides than row-major ones; what [`crate::act_order::expect_permutation`] refuses.
    pub fn unpack(
        &self,
        packed: ArrayView2<'_, u32>,
        perm: Option<&[u32]>,
    ) -> Result<Codes<'static>> {
        self.unpack_words(self.words_of(packed)?, perm)
    }

    /// [`Self::unpack`] of row-major words.
    pub(crate) fn unpack_words(
        &self,
        packed: &[u32],
        perm: Option<&[u32]>,
    ) -> Result<Codes<'static>> {
        self.expect_len(packed.len())?;
        let mut row_of: Vec<usize> = (0..self.shape.size_k).collect();
        if let Some(perm) = perm {
            crate::act_order::expect_permutation(perm, self.shape.size_k)?;
            for (k, &p) in perm.iter().enumerate() {
                row_of[k] = p as usize;
            }
        }
        let (bits, n_len) = (self.map.bits(), self.shape.size_n);
        let pack = 32 / bits as usize;
        let mask = u32::MAX >> (32 - bits);
        let order: Vec<_> = (0..TILE_LEN).map(|p| self.map.value_at(p)).collect();
        let mut words = vec![0u32; self.shape.size_k / pack * n_len];
        for (tile, tile_words) in packed.chunks_exact(self.map.words()).enumerate() {
            let tiles_n = n_len / self.map.tile_n();
            let (k0, n0) = (tile / tiles_n * self.map.tile_k(), tile % tiles_n * self.map.tile_n());
            for (position, at) in order.iter().enumerate() {
                let word = tile_words[position / pack];
                let code = word >> (position % pack * bits as usize) & mask;
                let k = row_of[k0 + at.k];
                words[k / pack * n_len + n0 + at.n] |= code << (k % pack * bits as usize);
            }
        }
        Codes::from_words(bits, self.shape, words)
    }

    /// Compares packed words.
    ///
    /// # Errors
    /// As [`Self::unpack`].
    pub fn compare(
        &self,
        expected: ArrayView2<'_, u32>,
        found: ArrayView2<'_, u32>,
    ) -> Result<Difference> {
        let (expected, found) = (self.words_of(expected)?, self.words_of(found)?);
        Ok(compare(self, self.map.bits(), 32 / self.map.bits(), expected, found))
    }

    fn expect_codes(&self, codes: &Codes<'_>) -> Result<()> {
        if codes.bits() != self.map.bits() {
            return Err(Error::size("bits per code", codes.bits(), self.map.bits()));
        }
        if codes.shape() != self.shape {
            return Err(Error::size("codes", codes.shape(), self.shape));
        }
        Ok(())
    }

    /// The words of a packed array.
    fn words_of<'p>(&self, packed: ArrayView2<'p, u32>) -> Result<&'p [u32]> {
        let found = packed.shape().to_vec();
        self.expect_shape(&found)?;
        let strided = || Error::NotContiguous { tensor: QWEIGHT.to_owned(), found: found.clone() };
        packed.to_slice().ok_or_else(strided)
    }

    fn expect_shape(&self, found: &[usize]) -> Result<()> {
        match found == self.packed_shape() {
            true => Ok(()),
            false => Err(Error::shape(QWEIGHT, found, format!("{:?}", self.packed_shape()))),
        }
    }

    fn expect_len(&self, len: usize) -> Result<()> {
        if len == self.packed_len() {
            return Ok(());
        }
        Err(Error::shape(QWEIGHT, &[len], format!("{:?} words", self.packed_shape())))
    }
}

impl Layout for WeightLayout {
    fn packed_shape(&self) -> [usize; 2] {
        let pack = 32 / self.map.bits() as usize;
        [self.shape.size_k / 16, self.shape.size_n * 16 / pack]
    }

    fn offset(&self, k: usize, n: usize) -> Slot {
        let Shape { size_k, size_n } = self.shape;
        assert!(k < size_k && n < size_n, "({k}, {n}) outside {}", self.shape);
        let (tk, tn) = (self.map.tile_k(), self.map.tile_n());
        let tile = k / tk * (size_n / tn) + n / tn;
        let bits = self.map.bits();
        let position = self.map.position_of(k % tk, n % tn);
        let pack = 32 / bits as usize;
        Slot {
            element: tile * self.map.words() + position / pack,
            bit: (position % pack) as u32 * bits,
            width: bits,
        }
    }

    fn locate(&self, element: usize, bit: u32) -> Place {
        assert!(element < self.packed_len() && bit < 32, "word {element} bit {bit}");
        let tiles_n = self.shape.size_n / self.map.tile_n();
        let (tile, word) = (element / self.map.words(), element % self.map.words());
        let (tile_k, tile_n) = (tile / tiles_n, tile % tiles_n);
        let bits = self.map.bits();
        let at = self.map.value_at(word * (32 / bits as usize) + (bit / bits) as usize);
        Place {
            row: tile_k * self.map.tile_k() + at.k,
            col: tile_n * self.map.tile_n() + at.n,
            fragment: Some(self.map.fragment(tile_k, tile_n, at)),
        }
    }
}
