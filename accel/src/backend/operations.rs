//! What a case's outputs are computed by: the registry's operations, on a device or by the reference.

use marlinspike::case::QuantConfig;
use marlinspike::dims::Shape;
use marlinspike::gemm::schedule::{Extras, Schedule, Stack};
use marlinspike::layout::marlin::{
    Activations, ScalePermutation, WeightLayout, int4_to_fp8_asymmetric, int4_to_fp8_symmetric,
};
use marlinspike::moe::activation::Definition;
use marlinspike::moe::align::{Absent, Align};
use marlinspike::moe::router::{Router, Routing};
use marlinspike::moe::{Chain, sum};
use marlinspike::scalar::ScalarType;
use marlinspike::weight::{Codes, Weight};

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
    /// Words of all matrices: packed along K, or along N in AWQ's order.
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
    /// Words packed along K in Marlin's layout.
    fn gptq_repack(&self, packed: Packed<'_>) -> Result<Vec<u32>, AccelError>;
    /// Words packed along N in Marlin's layout, of one matrix.
    fn awq_repack(&self, packed: Packed<'_>) -> Result<Vec<u32>, AccelError>;
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
fn sixteen_bits(operation: &'static str, quant: &QuantConfig) -> Result<(), AccelError> {
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
    fn gptq_repack(&self, p: Packed<'_>) -> Result<Vec<u32>, AccelError> {
        let Shape { size_k, size_n } = p.shape;
        let args =
            RepackArgs::stack(p.qweight, p.perm, p.experts, size_k, size_n, p.bits, p.is_a_8bit)?;
        ops::gptq_marlin_repack(self, &args)
    }

    fn awq_repack(&self, p: Packed<'_>) -> Result<Vec<u32>, AccelError> {
        let Shape { size_k, size_n } = p.shape;
        ops::awq_marlin_repack(self, p.qweight, size_k, size_n, p.bits, p.is_a_8bit)
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
        let tiling = weight.tiling_of_experts(self, e.topk_ids.len(), e.weights.len(), false);
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

/// The reference behind the same operations: what every bit must be.
#[derive(Debug, Clone, Copy)]
pub struct Reference;

/// The reference's error as this crate's.
fn refused(operation: &'static str) -> impl FnOnce(marlinspike::Error) -> AccelError {
    move |error| AccelError::Argument {
        operation,
        what: "reference",
        found: error.to_string(),
        expected: "arguments that the reference takes".into(),
    }
}

/// 16-bit values, zero-extended.
fn codes(x: &[u16]) -> Vec<u32> {
    x.iter().map(|&bits| bits.into()).collect()
}

/// The low halves of 32-bit values.
fn halves(y: Vec<u32>) -> Vec<u16> {
    y.into_iter().map(|bits| bits as u16).collect()
}

impl Packed<'_> {
    fn layout(&self) -> marlinspike::Result<WeightLayout> {
        let act = if self.is_a_8bit { Activations::Bits8 } else { Activations::Bits16 };
        WeightLayout::new(self.shape, self.bits, act)
    }
}

impl Operations for Reference {
    fn gptq_repack(&self, p: Packed<'_>) -> Result<Vec<u32>, AccelError> {
        let packed = || -> marlinspike::Result<Vec<u32>> {
            let (layout, words) = (p.layout()?, p.qweight.len() / p.experts);
            let mut out = Vec::new();
            for (e, words) in p.qweight.chunks_exact(words).enumerate() {
                let perm = p.perm.map(|perm| &perm[e * p.shape.size_k..][..p.shape.size_k]);
                out.extend(layout.pack(&Codes::from_words(p.bits, p.shape, words)?, perm)?);
            }
            Ok(out)
        };
        packed().map_err(refused("gptq_marlin_repack"))
    }

    fn awq_repack(&self, p: Packed<'_>) -> Result<Vec<u32>, AccelError> {
        let order = marlinspike::checkpoint::awq::column_order(p.bits);
        let (pack, mask) = (order.len(), u32::MAX >> (32 - p.bits));
        let packed = || -> marlinspike::Result<Vec<u32>> {
            let codes = Codes::from_fn(p.bits, p.shape, |k, n| {
                let word = p.qweight[k * (p.shape.size_n / pack) + n / pack];
                let field = order.iter().position(|&column| column == n % pack).unwrap_or(0);
                (word >> (field as u32 * p.bits) & mask) as u8
            })?;
            p.layout()?.pack(&codes, None)
        };
        packed().map_err(refused("awq_marlin_repack"))
    }

    fn int4_fp8(
        &self,
        qweight: &[u32],
        qzeros: Option<&[u32]>,
        words: usize,
    ) -> Result<Vec<u32>, AccelError> {
        match qzeros {
            None => Ok(int4_to_fp8_symmetric(qweight)),
            Some(zeros) => int4_to_fp8_asymmetric(qweight, zeros, words)
                .map_err(refused("marlin_int4_fp8_preprocess")),
        }
    }

    fn permute_scales(
        &self,
        scales: &[u16],
        _size_n: usize,
        order: ScalePermutation,
    ) -> Result<Vec<u16>, AccelError> {
        let columns = order.columns();
        let run = columns.len();
        Ok((0..scales.len()).map(|i| scales[i / run * run + columns[i % run]]).collect())
    }

    fn route(
        &self,
        router: &Router<'_>,
        logits: &[f32],
        experts: usize,
    ) -> Result<Routing, AccelError> {
        router.route(logits, experts).map_err(refused("topk_router"))
    }

    fn align(&self, align: &Align<'_>, topk_ids: &[i32]) -> Result<Blocks, AccelError> {
        let aligned = align.run(topk_ids).map_err(refused("moe_align_block_size"))?;
        Ok(Blocks {
            sorted_token_ids: aligned.sorted_token_ids,
            expert_ids: aligned.expert_ids,
            num_tokens_post_padded: aligned.num_tokens_post_padded,
        })
    }

    fn product(
        &self,
        weight: &Weight<'_>,
        quant: &QuantConfig,
        x: &[u16],
    ) -> Result<Vec<u16>, AccelError> {
        sixteen_bits("marlin_gemm", quant)?;
        let schedule = Schedule::canonical(weight, quant.dtype, quant.dtype);
        let y = schedule.and_then(|s| s.execute(&codes(x), weight, Extras::default()));
        y.map(halves).map_err(refused("marlin_gemm"))
    }

    fn expert_product(&self, e: Experts<'_>, x: &[u16]) -> Result<Vec<u16>, AccelError> {
        sixteen_bits("moe_wna16_marlin_gemm", e.quant)?;
        let product = || -> marlinspike::Result<Vec<u32>> {
            let expert_of = |&id: &i32| -> Option<usize> {
                let global = usize::try_from(id).ok().filter(|&id| id < e.num_experts)?;
                match e.expert_map {
                    Some(map) => usize::try_from(map[global]).ok(),
                    None => Some(global),
                }
            };
            let expert_of: Vec<_> = e.topk_ids.iter().map(expert_of).collect();
            let first = e.weights.first().ok_or_else(|| {
                let (tensor, needed_by) = ("weights".into(), "experts".into());
                marlinspike::Error::Missing { tensor, needed_by }
            })?;
            let rows = x.chunks_exact(first.shape().size_k);
            let x: Vec<u16> =
                rows.flat_map(|row| std::iter::repeat_n(row, e.top_k)).flatten().copied().collect();
            let (weights, expert_of) = (e.weights, &expert_of[..]);
            let stack = Stack { weights, expert_of, orders: None, places: None };
            let extras = Extras { router_weights: e.topk_weights, ..Extras::default() };
            let schedule = Schedule::canonical(first, e.quant.dtype, e.quant.dtype)?;
            schedule.execute_stack(&codes(&x), stack, extras)
        };
        product().map(halves).map_err(refused("moe_wna16_marlin_gemm"))
    }

    fn activate(
        &self,
        definition: &Definition,
        gate_up: &[u16],
        dtype: ScalarType,
        size_i: usize,
    ) -> Result<Vec<u16>, AccelError> {
        let applied = definition.apply(gate_up, dtype, size_i, Chain::Canonical);
        applied.map_err(refused("moe_activation"))
    }

    fn sum(
        &self,
        down: &[u16],
        dtype: ScalarType,
        top_k: usize,
        size_n: usize,
    ) -> Result<Vec<u16>, AccelError> {
        sum::sum(down, dtype, top_k, size_n, Chain::Canonical).map_err(refused("moe_sum"))
    }
}
