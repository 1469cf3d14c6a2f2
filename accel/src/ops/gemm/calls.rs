//! Products on host memory, by the canonical schedule.

use marlinspike::case::QuantConfig;
use marlinspike::moe::align::{Absent, Align};
use marlinspike::moe::to_slots;
use marlinspike::num::array::rows_of;
use marlinspike::products::schedule::{Extras, Schedule, Stack};
use marlinspike::weight::Weight;

use super::{MOE, MarlinWeight, ROW, Routed, marlin_gemm, moe_marlin_gemm};
use crate::{
    call::{Call, low_halves, widened},
    device::Device,
    error::AccelError,
    operation::Row,
    ops::{
        align::{Runs, align_on_device},
        permute::permute_cols,
    },
};

/// x `[M, K]` times a matrix.
#[derive(Debug, Clone, Copy)]
pub struct DenseProduct<'a> {
    /// The matrix.
    pub weight: &'a Weight<'a>,
    /// Its format and types.
    pub quant: &'a QuantConfig,
    /// `[M, K]`.
    pub x: &'a [u16],
}

/// Rows times their experts' matrices.
#[derive(Debug, Clone, Copy)]
pub struct ExpertProduct<'a> {
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
    /// The factor of each row of the result.
    pub topk_weights: Option<&'a [f32]>,
    /// Rows of K.
    pub x: &'a [u16],
}

/// Refuses 8-bit activations.
fn check_16_bit(row: &Row, quant: &QuantConfig) -> Result<(), AccelError> {
    let refuse = |input| Err(row.refuse("input_dtype", input, "16-bit activations"));
    quant.input_dtype.map_or(Ok(()), refuse)
}

impl Call for DenseProduct<'_> {
    type Output = Vec<u16>;

    fn row(&self) -> &'static Row {
        &ROW
    }

    fn validate(&self) -> Result<(), AccelError> {
        check_16_bit(&ROW, self.quant)
    }

    fn on_device(&self, device: &Device) -> Result<Vec<u16>, AccelError> {
        let Self { weight, quant, x } = *self;
        let shape = weight.shape();
        let packed = MarlinWeight::new(device, std::slice::from_ref(weight), quant.dtype)?;
        let gathered = packed.perm(0).map(|perm| permute_cols(device, x, perm)).transpose()?;
        let x = gathered.as_deref().unwrap_or(x);
        let mut y = device.zeroed(x.len() / shape.size_k * shape.size_n)?;
        marlin_gemm(device, &device.upload(x)?, &packed, &mut y)?;
        device.download(&y)
    }

    fn by_reference(&self) -> marlinspike::Result<Vec<u16>> {
        let dtype = self.quant.dtype;
        let schedule = Schedule::canonical(self.weight, dtype, dtype)?;
        let x = widened(self.x);
        let x = rows_of("x", &x, self.weight.shape().size_k)?;
        schedule.execute(x, self.weight, Extras::default()).map(low_halves)
    }
}

impl Call for ExpertProduct<'_> {
    type Output = Vec<u16>;

    fn row(&self) -> &'static Row {
        &MOE
    }

    fn validate(&self) -> Result<(), AccelError> {
        check_16_bit(&MOE, self.quant)
    }

    fn on_device(&self, device: &Device) -> Result<Vec<u16>, AccelError> {
        let weight = MarlinWeight::new(device, self.weights, self.quant.dtype)?;
        if weight.perm(0).is_some() {
            return Err(MOE.refuse("g_idx", "act-order", "experts without act-order"));
        }
        let entries = self.topk_ids.len();
        let tiling = weight.tiling_of_experts(device, entries, self.weights.len(), false)?;
        let (num_experts, expert_map) = (self.num_experts, self.expert_map);
        let (block_size, absent) = (tiling.rows(), Absent::Ignore);
        let runs = Runs::new(device, &Align { block_size, num_experts, expert_map, absent })?;
        let mut blocks = runs.room(device, entries, block_size)?;
        align_on_device(device, &runs, &device.upload(self.topk_ids)?, &mut blocks)?;
        let weights = self.topk_weights.map(|weights| device.upload(weights)).transpose()?;
        let routed = Routed { blocks: &blocks, top_k: self.top_k, topk_weights: weights.as_ref() };
        // Rows without an expert of this rank are not written.
        let mut y = device.zeroed(entries * weight.shape().size_n)?;
        moe_marlin_gemm(device, &device.upload(self.x)?, &weight, &mut y, tiling, routed)?;
        device.download(&y)
    }

    fn by_reference(&self) -> marlinspike::Result<Vec<u16>> {
        let expert_of = |&id: &i32| -> Option<usize> {
            let global = usize::try_from(id).ok().filter(|&id| id < self.num_experts)?;
            match self.expert_map {
                Some(map) => usize::try_from(map[global]).ok(),
                None => Some(global),
            }
        };
        let expert_of: Vec<_> = self.topk_ids.iter().map(expert_of).collect();
        let first = self.weights.first().ok_or_else(|| {
            let (tensor, needed_by) = ("weights".into(), "experts".into());
            marlinspike::Error::Missing { tensor, needed_by }
        })?;
        let x = to_slots(self.x, first.shape().size_k, self.top_k);
        let (weights, expert_of) = (self.weights, &expert_of[..]);
        let stack = Stack { weights, expert_of, orders: None, places: None };
        let extras = Extras { router_weights: self.topk_weights, ..Extras::default() };
        let schedule = Schedule::canonical(first, self.quant.dtype, self.quant.dtype)?;
        let x = widened(&x);
        let x = rows_of("x", &x, first.shape().size_k)?;
        schedule.execute_stack(x, stack, extras).map(low_halves)
    }
}
