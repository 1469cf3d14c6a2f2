//! Packs one projection of a layer's experts for a kernel.

use super::projection::{EPILOGUE_TILE_M, Projection};
use super::{
    BLOCK_K_BYTES, BlockScaleLayout, ExpertBackend, PackedRows, RowOrder, RowStep, ScaleTile,
};
use crate::layouts::Layout;
use crate::num::dims::{GroupSize, Shape};
use crate::num::scalar::ScalarType;
use crate::weight::{Codes, Groups, Table, TableData, Weight};
use crate::{Error, Result};

/// How a kernel stores the weights of one projection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpertLayout {
    ty: ScalarType,
    group_size: usize,
    shape: Shape,
    weights: PackedRows,
    scales: BlockScaleLayout,
    /// Bits in which every byte of the kernel's codes differs from the checkpoint's.
    flipped: u8,
}

/// A step of the preparation that [`ExpertLayout::without`] omits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Forgotten {
    /// The halves of w13 are not exchanged, so the kernel exchanges gate and up.
    SwapHalves,
    /// Rows of gate and up are not interleaved.
    Interleave,
    /// Rows are not shuffled within their blocks of 32.
    Shuffle,
    /// Rows of scales keep the checkpoint's order, rows of weights do not.
    RowsOfScales,
    /// The bytes of each row stay contiguous.
    Blocks,
    /// Codes keep their offset of 8.
    SignBit,
}

/// A stack of experts in a kernel's layout.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackedExperts {
    /// Number of experts.
    pub experts: usize,
    /// Codes: the [`PackedRows`] of one expert after another.
    pub weights: Vec<u8>,
    /// `[experts · padded N, padded groups]`: the [`BlockScaleLayout`] of one expert after another.
    pub scales: Table,
}

/// One expert of a stack.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Expert {
    /// Codes `[K, N]` as in the checkpoint.
    pub codes: Codes<'static>,
    /// Scales `[groups, N]`.
    pub scales: Table,
}

impl ExpertLayout {
    /// int4 weights with a bf16 scale for each 32 k, as FlashInfer's `trtllm_mxint4_block_scale_moe`
    /// reads them: codes as two's complement, `[w3, w1]`, interleaved and shuffled rows, BlockMajorK;
    /// scales interleaved in tiles of 128 x 4.
    ///
    /// Source: vLLM 0.21.0 `prepare_static_weights_for_trtllm_mxint4_moe`. The layer is gated.
    ///
    /// # Errors
    /// [`Error::Size`] unless both sizes are positive multiples of 256: a block of K is 128 bytes.
    pub fn mxint4(
        projection: Projection,
        hidden_size: usize,
        intermediate_size: usize,
    ) -> Result<Self> {
        let unit = 2 * BLOCK_K_BYTES;
        for (what, size) in [("hidden_size", hidden_size), ("intermediate_size", intermediate_size)]
        {
            if size == 0 || !size.is_multiple_of(unit) {
                return Err(Error::size(what, size, format!("a positive multiple of {unit}")));
            }
        }
        let shape = projection.shape(hidden_size, intermediate_size, true)?;
        let shuffle = RowStep::shuffle(EPILOGUE_TILE_M);
        let steps = match projection {
            Projection::W13 => vec![RowStep::SwapHalves, RowStep::Interleave(1), shuffle],
            Projection::W2 => vec![shuffle],
        };
        let (ty, scale) = (ScalarType::UINT4B8, ScalarType::BFLOAT16);
        Self::new(ty, scale, 32, [shape; 2], &steps, Some(BLOCK_K_BYTES))
    }

    /// NVFP4 weights for `backend`; `gated` if w13 is gate and up, otherwise it is only up.
    ///
    /// # Errors
    /// [`Error::Size`] for sizes that the backend does not support: see
    /// [`ExpertBackend::padded_shape`].
    pub fn for_backend(
        backend: ExpertBackend,
        projection: Projection,
        hidden_size: usize,
        intermediate_size: usize,
        gated: bool,
    ) -> Result<Self> {
        let shape = projection.shape(hidden_size, intermediate_size, gated)?;
        let padded = backend.padded_shape(projection, hidden_size, intermediate_size, gated)?;
        let steps = backend.row_steps(projection, gated);
        let (ty, scale) = (ScalarType::FLOAT4_E2M1F, ScalarType::FLOAT8_E4M3FN);
        Self::new(ty, scale, 16, [shape, padded], &steps, None)
    }

    fn new(
        ty: ScalarType,
        scale: ScalarType,
        group_size: usize,
        [shape, padded]: [Shape; 2],
        steps: &[RowStep],
        block: Option<usize>,
    ) -> Result<Self> {
        let rows = RowOrder::new(padded.size_n, steps)?;
        let groups = GroupSize::Of(group_size).groups(padded.k())?;
        let scales = BlockScaleLayout::new(groups, padded.size_n, ScaleTile::Rows128, scale)?;
        Ok(Self {
            ty,
            group_size,
            shape,
            scales: scales.with_rows(rows.clone())?,
            weights: PackedRows::new(padded, 4, rows, block)?,
            // A code with an offset of 8 is the two's complement one with its sign bit flipped.
            flipped: if ty == ScalarType::UINT4B8 { 0x88 } else { 0 },
        })
    }

    /// The layout of a preparation without `step`, to recognize its output.
    ///
    /// # Errors
    /// Currently none.
    pub fn without(&self, step: Forgotten) -> Result<Self> {
        let is_step: fn(&RowStep) -> bool = match step {
            Forgotten::SwapHalves => |s| *s == RowStep::SwapHalves,
            Forgotten::Interleave => |s| matches!(s, RowStep::Interleave(_)),
            Forgotten::Shuffle => |s| matches!(s, RowStep::Shuffle(_)),
            Forgotten::RowsOfScales => {
                let rows = self.weights.rows().without(|_| true);
                return Ok(Self { scales: self.scales.clone().with_rows(rows)?, ..self.clone() });
            }
            Forgotten::Blocks => {
                let rows = self.weights.rows().clone();
                let weights = PackedRows::new(self.weights.shape(), 4, rows, None)?;
                return Ok(Self { weights, ..self.clone() });
            }
            Forgotten::SignBit => return Ok(Self { flipped: 0, ..self.clone() }),
        };
        let rows = self.weights.rows().without(is_step);
        let weights = PackedRows::new(self.weights.shape(), 4, rows.clone(), self.weights.block())?;
        Ok(Self { weights, scales: self.scales.clone().with_rows(rows)?, ..self.clone() })
    }

    /// Shape of the unpacked weights.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// k per scale.
    pub fn group_size(&self) -> usize {
        self.group_size
    }

    /// Layout of one expert's codes, of the padded shape.
    pub fn weights(&self) -> &PackedRows {
        &self.weights
    }

    /// Layout of one expert's scales, of the padded shape.
    pub fn scales(&self) -> &BlockScaleLayout {
        &self.scales
    }

    /// The kernel's tensors of a stack of experts. Codes and scales of padding are zero. Global
    /// scales are separate arguments of kernels and not included.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Unsupported`] naming the first weight that is not of this layout's
    /// shape, type, scale type or group size, or has zero points or a bias, which these kernels lack.
    pub fn pack(&self, experts: &[Weight<'_>]) -> Result<PackedExperts> {
        let (mut weights, mut bits) = (Vec::new(), Vec::new());
        for expert in experts {
            self.check(expert)?;
            let codes = expert.codes.resized(self.weights.shape())?;
            let bytes = self.weights.pack_bytes(&codes)?;
            weights.extend(bytes.into_iter().map(|byte| byte ^ self.flipped));
            bits.extend(self.scales.pack(&self.padded_scales(&expert.scales)?)?.iter_bits());
        }
        let [rows, cols] = self.scales.packed_shape();
        let scales = table(self.scales.ty(), experts.len() * rows, cols, bits.into_iter())?;
        Ok(PackedExperts { experts: experts.len(), weights, scales })
    }

    /// The inverse of [`Self::pack`].
    ///
    /// # Errors
    /// [`Error::Shape`] if the parts do not hold that many experts; [`Error::Value`] for padding
    /// that is not zero.
    pub fn unpack(&self, packed: &PackedExperts) -> Result<Vec<Expert>> {
        let (len, [rows, cols]) = (self.weights.packed_len(), self.scales.packed_shape());
        if packed.experts.checked_mul(len) != Some(packed.weights.len()) {
            let expected = format!("{} x {len} bytes", packed.experts);
            return Err(Error::shape("packed weights", &[packed.weights.len()], expected));
        }
        let found = [packed.scales.rows(), packed.scales.cols()];
        if packed.experts.checked_mul(rows) != Some(found[0]) || found[1] != cols {
            let expected = format!("[{} x {rows}, {cols}]", packed.experts);
            return Err(Error::shape("packed scales", &found, expected));
        }
        let expert = |e: usize| {
            let bytes: Vec<u8> =
                packed.weights[e * len..][..len].iter().map(|b| b ^ self.flipped).collect();
            let scales = packed.scales.slice_rows(e * rows..(e + 1) * rows)?;
            self.scales.expect_zero_padding(&scales)?;
            self.inside(e, &self.weights.unpack_bytes(&bytes)?, &self.scales.unpack(&scales)?)
        };
        (0..packed.experts).map(expert).collect()
    }

    fn check(&self, weight: &Weight<'_>) -> Result<()> {
        weight.validate()?;
        let name = &weight.name;
        let Shape { size_k, size_n } = weight.shape();
        if weight.shape() != self.shape {
            return Err(Error::shape(name, &[size_k, size_n], self.shape));
        }
        let refuse = |what: String, expected: String| Err(Error::unsupported(what, expected));
        if weight.ty != self.ty {
            return refuse(format!("{name}: codes of {}", weight.ty), format!("{}", self.ty));
        }
        if weight.scales.ty() != self.scales.ty() {
            let what = format!("{name}: scales of {}", weight.scales.ty());
            return refuse(what, format!("{}", self.scales.ty()));
        }
        if weight.groups != Groups::Uniform(GroupSize::Of(self.group_size)) {
            let what = format!("{name}: groups {:?}", weight.groups.group_size());
            return refuse(what, format!("uniform groups of {} k", self.group_size));
        }
        if weight.zeros.is_some() || weight.bias.is_some() {
            return refuse(
                format!("{name}: zero points or a bias"),
                "the kernel's weights have neither".to_owned(),
            );
        }
        Ok(())
    }

    fn padded_scales(&self, scales: &Table) -> Result<Table> {
        let Shape { size_k, size_n } = self.weights.shape();
        let groups = size_k / self.group_size;
        let bits = (0..groups * size_n).map(|i| {
            let (g, n) = (i / size_n, i % size_n);
            if g < scales.rows() && n < scales.cols() { scales.bits(g, n) } else { 0 }
        });
        table(scales.ty(), groups, size_n, bits)
    }

    /// The part of expert `e` that is not padding.
    fn inside(&self, e: usize, codes: &Codes<'_>, scales: &Table) -> Result<Expert> {
        let Shape { size_k, size_n } = self.shape;
        let padded = self.weights.shape();
        for n in 0..padded.size_n {
            let from = if n < size_n { size_k } else { 0 };
            if let Some(k) = (from..padded.size_k).find(|&k| codes.get(k, n) != 0) {
                let found = codes.get(k, n);
                return Err(Error::value("packed weights", &[e, n, k], found, "0 in the padding"));
            }
        }
        let groups = size_k / self.group_size;
        let bits = (0..groups * size_n).map(|i| scales.bits(i / size_n, i % size_n));
        Ok(Expert {
            codes: codes.resized(self.shape)?,
            scales: table(scales.ty(), groups, size_n, bits)?,
        })
    }
}

impl Projection {
    /// The matrix's shape.
    ///
    /// # Errors
    /// [`Error::Size`] for an empty matrix, or if the size overflows.
    pub(super) fn shape(self, hidden: usize, intermediate: usize, gated: bool) -> Result<Shape> {
        let (size_k, size_n) = match self {
            Self::W13 if gated => (hidden, intermediate.saturating_mul(2)),
            Self::W13 => (hidden, intermediate),
            Self::W2 => (intermediate, hidden),
        };
        // Room for the padding of either side.
        let fits = size_k.checked_add(256).zip(size_n.checked_add(256));
        let fits = fits.and_then(|(k, n)| k.checked_mul(n));
        if size_k == 0 || size_n == 0 || fits.is_none_or(|len| isize::try_from(len).is_err()) {
            let found = format!("hidden {hidden}, intermediate {intermediate}");
            return Err(Error::size("sizes of the layer", found, "1 or more, within memory"));
        }
        Ok(Shape::new(size_k, size_n))
    }
}

fn table(
    ty: ScalarType,
    rows: usize,
    cols: usize,
    bits: impl Iterator<Item = u32>,
) -> Result<Table> {
    let data = match ty.storage_bits() {
        8 => TableData::B8(bits.map(|b| b as u8).collect()),
        16 => TableData::B16(bits.map(|b| b as u16).collect()),
        _ => TableData::B32(bits.collect()),
    };
    Table::new(ty, rows, cols, data)
}
