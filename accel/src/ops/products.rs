//! Products on host memory, by the canonical schedule.

use marlinspike::case::QuantConfig;
use marlinspike::moe::align::{Absent, Align};
use marlinspike::moe::layer::{Rows, input_global_scale, quantize_rows};
use marlinspike::moe::to_slots;
use marlinspike::num::array::rows_of;
use marlinspike::num::scalar::ScalarType;
use marlinspike::products::schedule::{Extras, Schedule, Stack};
use marlinspike::weight::Weight;

use crate::{
    call::{Call, low_halves},
    device::Device,
    error::AccelError,
    memory::Buffer,
    operation::Row,
    ops::{
        align::{DeviceBlocks, Runs, align_on_device},
        gemm::{MOE, MarlinWeight, ROW, Routed, marlin_gemm, moe_marlin_gemm},
        gemm_a8::{RowsA8, marlin_gemm_a8, moe_marlin_gemm_a8, row_of},
        permute::permute_cols,
        quantize::quantize_on_device,
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

/// The operation of a product with activations of that type.
fn row_for(quant: &QuantConfig, row: &'static Row) -> &'static Row {
    quant.input_dtype.map_or(row, row_of)
}

/// Refuses activations of other types than the kernels'.
fn check_input(row: &Row, quant: &QuantConfig) -> Result<(), AccelError> {
    match quant.input_dtype {
        None | Some(ScalarType::INT8 | ScalarType::FLOAT8_E4M3FN) => Ok(()),
        Some(input) => Err(row.refuse("input_dtype", input, "16 bits, int8 or float8_e4m3fn")),
    }
}

/// Rows of x in a device's memory, quantized.
struct Quantized {
    codes: Buffer<u8>,
    scales: Buffer<f32>,
}

impl Quantized {
    fn new(
        device: &Device,
        x: &[u16],
        size_k: usize,
        (dtype, input): (ScalarType, ScalarType),
    ) -> Result<Self, AccelError> {
        let mut codes = device.room(x.len())?;
        let mut scales = device.room(x.len() / size_k)?;
        let x = device.upload(x)?;
        quantize_on_device(device, &x, dtype, input, size_k, &mut codes, &mut scales)?;
        Ok(Self { codes, scales })
    }

    fn rows(&self) -> RowsA8<'_> {
        RowsA8 { codes: &self.codes, scales: &self.scales }
    }
}

/// Rows of x as the reference's product takes them.
fn rows_in(
    x: &[u16],
    size_k: usize,
    quant: &QuantConfig,
    weights: &[Weight<'_>],
) -> marlinspike::Result<Rows> {
    quantize_rows(x, quant.dtype, quant.input_dtype, size_k, input_global_scale(weights))
}

impl Call for DenseProduct<'_> {
    type Output = Vec<u16>;

    fn row(&self) -> &'static Row {
        row_for(self.quant, &ROW)
    }

    fn validate(&self) -> Result<(), AccelError> {
        check_input(&ROW, self.quant)
    }

    fn on_device(&self, device: &Device) -> Result<Vec<u16>, AccelError> {
        let Self { weight, quant, x } = *self;
        let (shape, dtype) = (weight.shape(), quant.dtype);
        let mut y = device.zeroed(x.len() / shape.size_k * shape.size_n)?;
        if let Some(input) = quant.input_dtype {
            let weights = std::slice::from_ref(weight);
            let packed = MarlinWeight::for_8_bit(device, weights, dtype, input)?;
            let x = Quantized::new(device, x, shape.size_k, (dtype, input))?;
            marlin_gemm_a8(device, x.rows(), &packed, &mut y)?;
            return device.download(&y);
        }
        let packed = MarlinWeight::new(device, std::slice::from_ref(weight), dtype)?;
        let gathered = packed.perm(0).map(|perm| permute_cols(device, x, perm)).transpose()?;
        let x = gathered.as_deref().unwrap_or(x);
        marlin_gemm(device, &device.upload(x)?, &packed, &mut y)?;
        device.download(&y)
    }

    fn by_reference(&self) -> marlinspike::Result<Vec<u16>> {
        let Self { weight, quant, x } = *self;
        let size_k = weight.shape().size_k;
        let input = quant.input_dtype.unwrap_or(quant.dtype);
        let schedule = Schedule::canonical(weight, quant.dtype, input)?;
        let rows = rows_in(x, size_k, quant, std::slice::from_ref(weight))?;
        let extras = Extras { activation_scales: rows.scales.as_deref(), ..Extras::default() };
        schedule.execute(rows_of("x", &rows.codes, size_k)?, weight, extras).map(low_halves)
    }
}

impl ExpertProduct<'_> {
    /// This rank's expert of each row of the result.
    fn experts(&self) -> Vec<Option<usize>> {
        let expert_of = |&id: &i32| -> Option<usize> {
            let global = usize::try_from(id).ok().filter(|&id| id < self.num_experts)?;
            match self.expert_map {
                Some(map) => usize::try_from(map[global]).ok(),
                None => Some(global),
            }
        };
        self.topk_ids.iter().map(expert_of).collect()
    }

    /// The rows of the result, in blocks of one expert.
    fn blocks(&self, device: &Device, block_size: usize) -> Result<DeviceBlocks, AccelError> {
        let (num_experts, expert_map) = (self.num_experts, self.expert_map);
        let align = Align { block_size, num_experts, expert_map, absent: Absent::Ignore };
        let runs = Runs::new(device, &align)?;
        let mut blocks = runs.room(device, self.topk_ids.len(), block_size)?;
        align_on_device(device, &runs, &device.upload(self.topk_ids)?, &mut blocks)?;
        Ok(blocks)
    }

    /// With act-order: a row of x for each row of the result, its columns in the order of its expert's weight.
    fn in_order(&self, weight: &MarlinWeight) -> Option<Vec<u16>> {
        weight.perm(0)?;
        let size_k = weight.shape().size_k;
        let mut rows = to_slots(self.x, size_k, self.top_k);
        for (row, expert) in rows.chunks_exact_mut(size_k).zip(self.experts()) {
            if let Some(perm) = expert.and_then(|expert| weight.perm(expert)) {
                let from = row.to_vec();
                row.iter_mut().zip(perm).for_each(|(to, &k)| *to = from[k as usize]);
            }
        }
        Some(rows)
    }
}

impl Call for ExpertProduct<'_> {
    type Output = Vec<u16>;

    fn row(&self) -> &'static Row {
        row_for(self.quant, &MOE)
    }

    fn validate(&self) -> Result<(), AccelError> {
        check_input(&MOE, self.quant)
    }

    fn on_device(&self, device: &Device) -> Result<Vec<u16>, AccelError> {
        let Self { weights, quant, x, top_k, .. } = *self;
        let entries = self.topk_ids.len();
        let router = self.topk_weights.map(|weights| device.upload(weights)).transpose()?;
        let topk_weights = router.as_ref();
        if let Some(input) = quant.input_dtype {
            let weight = MarlinWeight::for_8_bit(device, weights, quant.dtype, input)?;
            let blocks = self.blocks(device, weight.block_size(device, entries)?)?;
            let routed = Routed { blocks: &blocks, top_k, topk_weights };
            let x = Quantized::new(device, x, weight.shape().size_k, (quant.dtype, input))?;
            let mut y = device.zeroed(entries * weight.shape().size_n)?;
            moe_marlin_gemm_a8(device, x.rows(), &weight, &mut y, routed)?;
            return device.download(&y);
        }
        let weight = MarlinWeight::new(device, weights, quant.dtype)?;
        let tiling = weight.tiling_of_experts(device, entries, weights.len(), false)?;
        let blocks = self.blocks(device, tiling.rows())?;
        let in_order = self.in_order(&weight);
        let top_k = if in_order.is_some() { 1 } else { top_k };
        let routed = Routed { blocks: &blocks, top_k, topk_weights };
        // Rows without an expert of this rank are not written.
        let mut y = device.zeroed(entries * weight.shape().size_n)?;
        let x = device.upload(in_order.as_deref().unwrap_or(x))?;
        moe_marlin_gemm(device, &x, &weight, &mut y, tiling, routed)?;
        device.download(&y)
    }

    fn by_reference(&self) -> marlinspike::Result<Vec<u16>> {
        let first = self.weights.first().ok_or_else(|| {
            let (tensor, needed_by) = ("weights".into(), "experts".into());
            marlinspike::Error::Missing { tensor, needed_by }
        })?;
        let size_k = first.shape().size_k;
        let rows = rows_in(self.x, size_k, self.quant, self.weights)?;
        let codes = to_slots(&rows.codes, size_k, self.top_k);
        let scales = rows.scales.map(|scales| to_slots(&scales, 1, self.top_k));
        let stack =
            Stack { weights: self.weights, expert_of: &self.experts(), orders: None, places: None };
        let extras = Extras {
            activation_scales: scales.as_deref(),
            router_weights: self.topk_weights,
            order: None,
        };
        let input = self.quant.input_dtype.unwrap_or(self.quant.dtype);
        let schedule = Schedule::canonical(first, self.quant.dtype, input)?;
        schedule.execute_stack(rows_of("x", &codes, size_k)?, stack, extras).map(low_halves)
    }
}
