//! What a case's outputs are computed by: the registry's operations, on a device or by the reference.

use marlinspike::case::QuantConfig;
use marlinspike::formats::integers::IntFormat;
use marlinspike::layouts::marlin::ScalePermutation;
use marlinspike::moe::activation::Definition;
use marlinspike::moe::align::{Absent, Align};
use marlinspike::moe::router::{Router, Routing};
use marlinspike::num::dims::Shape;
use marlinspike::num::scalar::ScalarType;
use marlinspike::weight::Weight;

use crate::{
    device::Device,
    error::AccelError,
    ops::{
        self, MarlinWeight, RepackArgs,
        align::{Blocks, Runs, align_on_device},
        gemm::{Routed, marlin_gemm, moe_marlin_gemm},
    },
};

/// Packed codes of a stack of matrices, and how they are to be laid out.
#[derive(Debug, Clone, Copy)]
pub struct Packed<'a> {
    /// How words hold codes.
    pub format: &'static IntFormat,
    /// Words of all matrices.
    pub qweight: &'a [u32],
    /// For each matrix and row of the result the checkpoint's row; only of words packed along K.
    pub perm: Option<&'a [u32]>,
    /// Number of matrices.
    pub experts: usize,
    /// Shape of each.
    pub shape: Shape,
    /// 4 or 8.
    pub bits: u32,
    /// Whether activations have 8 bits.
    pub is_a_8bit: bool,
}

impl Packed<'_> {
    /// The operator that lays the codes out.
    pub fn operator(&self) -> &'static str {
        match self.format.is_packed_along_n() {
            true => "awq_marlin_repack",
            false => "gptq_marlin_repack",
        }
    }
}

/// A product of rows with experts.
#[derive(Debug, Clone, Copy)]
pub struct Experts<'a> {
    /// This rank's experts.
    pub weights: &'a [Weight<'a>],
    /// Format and types of them.
    pub quant: &'a QuantConfig,
    /// Experts of all ranks.
    pub num_experts: usize,
    /// Global to local expert.
    pub expert_map: Option<&'a [i32]>,
    /// Row t of the result is made of row t / `top_k` of x.
    pub top_k: usize,
    /// The expert of each row of the result.
    pub topk_ids: &'a [i32],
    /// What each row is multiplied by.
    pub topk_weights: Option<&'a [f32]>,
}

/// The operations, on the host's memory. Each fails with [`AccelError::Argument`] or
/// [`AccelError::Capability`] where it has no kernel for its arguments.
#[allow(clippy::missing_errors_doc, reason = "said of all of them above")]
pub trait Operations {
    /// Codes in Marlin's layout; of words packed along N, those of one matrix.
    fn repack(&self, packed: Packed<'_>) -> Result<Vec<u32>, AccelError>;
    /// int4 codes rewritten for fp8 activations; `words` to a row.
    fn int4_fp8(
        &self,
        qweight: &[u32],
        qzeros: Option<&[u32]>,
        words: usize,
    ) -> Result<Vec<u32>, AccelError>;
    /// Columns of 16-bit scales in the kernel's order.
    fn permute_scales(
        &self,
        scales: &[u16],
        size_n: usize,
        order: ScalePermutation,
    ) -> Result<Vec<u16>, AccelError>;
    /// Experts and weights of every row of logits.
    fn route(
        &self,
        router: &Router<'_>,
        logits: &[f32],
        experts: usize,
    ) -> Result<Routing, AccelError>;
    /// Entries in blocks of one expert.
    fn align(&self, align: &Align<'_>, topk_ids: &[i32]) -> Result<Blocks, AccelError>;
    /// x `[M, K]` times a matrix, by the canonical schedule.
    fn product(
        &self,
        weight: &Weight<'_>,
        quant: &QuantConfig,
        x: &[u16],
    ) -> Result<Vec<u16>, AccelError>;
    /// Rows times their experts' matrices, by the canonical schedule.
    fn expert_product(&self, experts: Experts<'_>, x: &[u16]) -> Result<Vec<u16>, AccelError>;
    /// The activation of `gate_up`.
    fn activate(
        &self,
        definition: &Definition,
        gate_up: &[u16],
        dtype: ScalarType,
        size_i: usize,
    ) -> Result<Vec<u16>, AccelError>;
    /// The sum over each token's slots.
    fn sum(
        &self,
        down: &[u16],
        dtype: ScalarType,
        top_k: usize,
        size_n: usize,
    ) -> Result<Vec<u16>, AccelError>;
}

/// Refuses what products on the device do not take.
pub(super) fn sixteen_bits(operation: &'static str, quant: &QuantConfig) -> Result<(), AccelError> {
    match quant.input_dtype {
        None => Ok(()),
        Some(found) => Err(AccelError::Argument {
            operation,
            what: "input_dtype",
            found: found.to_string(),
            expected: "16-bit activations".into(),
        }),
    }
}

impl Operations for Device {
    fn repack(&self, p: Packed<'_>) -> Result<Vec<u32>, AccelError> {
        let Shape { size_k, size_n } = p.shape;
        if p.format.is_packed_along_n() {
            return ops::awq_marlin_repack(self, p.qweight, size_k, size_n, p.bits, p.is_a_8bit);
        }
        let args =
            RepackArgs::stack(p.qweight, p.perm, p.experts, size_k, size_n, p.bits, p.is_a_8bit)?;
        ops::gptq_marlin_repack(self, &args)
    }

    fn int4_fp8(
        &self,
        qweight: &[u32],
        qzeros: Option<&[u32]>,
        words: usize,
    ) -> Result<Vec<u32>, AccelError> {
        ops::marlin_int4_fp8_preprocess(self, qweight, qzeros, words)
    }

    fn permute_scales(
        &self,
        scales: &[u16],
        size_n: usize,
        order: ScalePermutation,
    ) -> Result<Vec<u16>, AccelError> {
        ops::marlin_permute_scales(self, scales, size_n, order)
    }

    fn route(
        &self,
        router: &Router<'_>,
        logits: &[f32],
        experts: usize,
    ) -> Result<Routing, AccelError> {
        ops::topk_router(self, router, logits, experts)
    }

    fn align(&self, align: &Align<'_>, topk_ids: &[i32]) -> Result<Blocks, AccelError> {
        ops::moe_align_block_size(self, align, topk_ids)
    }

    fn product(
        &self,
        weight: &Weight<'_>,
        quant: &QuantConfig,
        x: &[u16],
    ) -> Result<Vec<u16>, AccelError> {
        sixteen_bits("marlin_gemm", quant)?;
        let shape = weight.shape();
        let packed = MarlinWeight::new(self, std::slice::from_ref(weight), quant.dtype)?;
        let gathered = match packed.perm(0) {
            Some(perm) => Some(ops::permute_cols(self, x, perm)?),
            None => None,
        };
        let x = gathered.as_deref().unwrap_or(x);
        let mut y = self.zeroed(x.len() / shape.size_k * shape.size_n)?;
        marlin_gemm(self, &self.upload(x)?, &packed, &mut y)?;
        self.download(&y)
    }

    fn expert_product(&self, e: Experts<'_>, x: &[u16]) -> Result<Vec<u16>, AccelError> {
        sixteen_bits("moe_wna16_marlin_gemm", e.quant)?;
        let weight = MarlinWeight::new(self, e.weights, e.quant.dtype)?;
        if weight.perm(0).is_some() {
            return Err(AccelError::Argument {
                operation: "moe_wna16_marlin_gemm",
                what: "g_idx",
                found: "act-order".into(),
                expected: "experts without act-order".into(),
            });
        }
        let tiling = weight.tiling_of_experts(self, e.topk_ids.len(), e.weights.len(), false)?;
        let runs = Runs::new(self, &alignment(&e, tiling.rows()))?;
        let mut blocks = runs.room(self, e.topk_ids.len(), tiling.rows())?;
        align_on_device(self, &runs, &self.upload(e.topk_ids)?, &mut blocks)?;
        let weights = e.topk_weights.map(|weights| self.upload(weights)).transpose()?;
        let routed = Routed { blocks: &blocks, top_k: e.top_k, topk_weights: weights.as_ref() };
        // Rows without an expert of this rank are not written.
        let mut y = self.zeroed(e.topk_ids.len() * weight.shape().size_n)?;
        moe_marlin_gemm(self, &self.upload(x)?, &weight, &mut y, tiling, routed)?;
        self.download(&y)
    }

    fn activate(
        &self,
        definition: &Definition,
        gate_up: &[u16],
        dtype: ScalarType,
        size_i: usize,
    ) -> Result<Vec<u16>, AccelError> {
        ops::moe_activation(self, definition, gate_up, dtype, size_i)
    }

    fn sum(
        &self,
        down: &[u16],
        dtype: ScalarType,
        top_k: usize,
        size_n: usize,
    ) -> Result<Vec<u16>, AccelError> {
        ops::moe_sum(self, down, dtype, top_k, size_n)
    }
}

fn alignment<'a>(e: &Experts<'a>, block_size: usize) -> Align<'a> {
    let (num_experts, expert_map) = (e.num_experts, e.expert_map);
    Align { block_size, num_experts, expert_map, absent: Absent::Ignore }
}
