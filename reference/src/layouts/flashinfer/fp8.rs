//! FP8 experts with scales of 128 x 128 blocks.

use super::{BLOCK_K_BYTES, PackedRows, Projection, RowOrder, RowStep};
use crate::num::dims::Shape;
use crate::num::scalar::ScalarType;
use crate::weight::{Codes, Table, TableData};
use crate::{Error, Result};

/// Rows and columns of a block.
const BLOCK: usize = 128;
/// Rows of the epilogue's tile of TensorRT-LLM's kernel for FP8 blocks.
const EPILOGUE_TILE_M: usize = 64;
/// The least scale that upstream leaves: CUTLASS's kernel returns NaN for smaller ones on Hopper.
const LEAST_SCALE: f32 = 1e-10;

/// FlashInfer's kernels for experts of FP8 blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fp8BlockBackend {
    /// `trtllm_fp8_block_scale_moe`: rows shuffled for an epilogue tile of 64, k in blocks of 128 bytes.
    TrtLlm,
    /// `cutlass_fused_moe`: row-major.
    Cutlass,
}

/// One matrix of an expert with FP8 blocks, as vLLM prepares it for FlashInfer
/// (`prepare_fp8_moe_layer_for_fi`): the halves of w13 are exchanged, up before gate, in the weight and in
/// its scales; scales stay `[N / 128, K / 128]` f32 and are at least 1e-10.
///
/// Source: vLLM `flashinfer_utils.py` (`swap_w13_to_w31`, `_shuffle_deepseek_fp8_moe_weights`).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Fp8BlockExpert {
    weight: PackedRows,
    blocks: RowOrder,
    groups: usize,
}

impl Fp8BlockExpert {
    /// The layout of a matrix of `shape`; of w13 without a gate, `gated` is false.
    ///
    /// # Errors
    /// [`Error::Size`] for K that is not a multiple of 128, and for N that is not one of 128, or of 256 where
    /// halves are exchanged.
    pub fn new(
        backend: Fp8BlockBackend,
        projection: Projection,
        shape: Shape,
        gated: bool,
    ) -> Result<Self> {
        let Shape { size_k, size_n } = shape;
        let swap = (projection == Projection::W13 && gated).then_some(RowStep::SwapHalves);
        let unit = if swap.is_some() { 2 * BLOCK } else { BLOCK };
        for (what, size, unit) in [("size_k", size_k, BLOCK), ("size_n", size_n, unit)] {
            if size == 0 || !size.is_multiple_of(unit) {
                return Err(Error::size(what, size, format!("a positive multiple of {unit}")));
            }
        }
        let shuffle = RowStep::shuffle(EPILOGUE_TILE_M);
        let (steps, block): (Vec<RowStep>, _) = match backend {
            Fp8BlockBackend::TrtLlm => {
                (swap.into_iter().chain([shuffle]).collect(), Some(BLOCK_K_BYTES))
            }
            Fp8BlockBackend::Cutlass => (swap.into_iter().collect(), None),
        };
        let rows = RowOrder::new(size_n, &steps)?;
        let swaps: Vec<RowStep> = swap.into_iter().collect();
        Ok(Self {
            weight: PackedRows::new(shape, 8, rows, block)?,
            blocks: RowOrder::new(size_n / BLOCK, &swaps)?,
            groups: size_k / BLOCK,
        })
    }

    /// The layout of the codes.
    pub fn weight(&self) -> &PackedRows {
        &self.weight
    }

    /// The bytes of the codes, and the scales `[N / 128, K / 128]`, row-major, from scales
    /// `[groups, blocks of N]`.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Size`] for codes or scales of another shape or width;
    /// [`Error::Unsupported`] for scales of another type than f32.
    pub fn pack(&self, codes: &Codes<'_>, scales: &Table) -> Result<(Vec<u8>, Vec<f32>)> {
        if scales.ty() != ScalarType::FLOAT32 {
            let what = format!("scales of {}", scales.ty());
            return Err(Error::unsupported(what, "float32 is expected"));
        }
        let blocks = self.blocks.size_n();
        if [scales.rows(), scales.cols()] != [self.groups, blocks] {
            let found = [scales.rows(), scales.cols()];
            return Err(Error::shape("scales", &found, format!("[{}, {blocks}]", self.groups)));
        }
        let scale = |i: usize| {
            let (block, group) = (self.blocks.source(i / self.groups), i % self.groups);
            f32::from_bits(scales.bits(group, block)).max(LEAST_SCALE)
        };
        let bytes = self.weight.pack_bytes(codes)?;
        Ok((bytes, (0..blocks * self.groups).map(scale).collect()))
    }

    /// The inverse of [`Self::pack`], except for scales below 1e-10.
    ///
    /// # Errors
    /// [`Error::Shape`] for other lengths.
    pub fn unpack(&self, bytes: &[u8], scales: &[f32]) -> Result<(Codes<'static>, Table)> {
        let blocks = self.blocks.size_n();
        if scales.len() != blocks * self.groups {
            let expected = format!("[{blocks}, {}]", self.groups);
            return Err(Error::shape("packed scales", &[scales.len()], expected));
        }
        let bits = |i: usize| {
            let (group, block) = (i / blocks, i % blocks);
            scales[self.blocks.target(block) * self.groups + group].to_bits()
        };
        let bits = (0..blocks * self.groups).map(bits).collect();
        let table = Table::new(ScalarType::FLOAT32, self.groups, blocks, TableData::B32(bits))?;
        Ok((self.weight.unpack_bytes(bytes)?, table))
    }
}
