//! A whole expert layer with 8-bit activations in the device's memory: alignment, quantized rows,
//! `gate_up`, the activation, quantized again, `down` with router weights, the sum. The bits of the
//! reference's [`Layer::forward`] by its canonical arithmetic, whatever else is in the batch.

use marlinspike::moe::activation::Definition;
use marlinspike::moe::layer::Layer;
use marlinspike::num::scalar::ScalarType;

use super::{
    activation::activate_on_device,
    align::{DeviceBlocks, Runs, align_on_device},
    check,
    gemm::Routed,
    gemm_a8::{INT8 as ROW, MarlinWeightA8, RowsA8, moe_marlin_gemm_a8},
    quantize::quantize_on_device,
    sum::{Slots, sum_on_device},
};
use crate::{device::Device, error::AccelError, memory::Buffer};

/// One rank's layer in Marlin's layout for 8-bit activations in a device's memory.
#[derive(Debug)]
pub struct MarlinLayerA8 {
    w13: MarlinWeightA8,
    w2: MarlinWeightA8,
    runs: Runs,
    activation: Definition,
    router_weight_on_input: bool,
}

/// Quantized rows.
#[derive(Debug)]
struct Quantized {
    codes: Buffer<u8>,
    scales: Buffer<f32>,
}

/// What a layer writes between its stages, for a fixed number of tokens.
#[derive(Debug)]
pub struct WorkspaceA8 {
    top_k: usize,
    blocks: DeviceBlocks,
    x: Quantized,
    gate_up: Buffer<u16>,
    activated: Buffer<u16>,
    activated_a8: Quantized,
    down: Buffer<u16>,
}

impl Quantized {
    fn room(device: &Device, rows: usize, size_k: usize) -> Result<Self, AccelError> {
        Ok(Self { codes: device.zeroed(rows * size_k)?, scales: device.zeroed(rows)? })
    }

    fn fill(
        &mut self,
        device: &Device,
        x: &Buffer<u16>,
        weight: &MarlinWeightA8,
    ) -> Result<RowsA8<'_>, AccelError> {
        let (dtype, input, size_k) = (weight.dtype(), weight.input_dtype(), weight.shape().size_k);
        let Self { codes, scales } = self;
        quantize_on_device(device, x, dtype, input, size_k, codes, scales)?;
        Ok(RowsA8 { codes, scales })
    }
}

impl MarlinLayerA8 {
    /// Packs a layer's weights and copies them to the device.
    ///
    /// # Errors
    /// [`AccelError::Argument`] for what [`Layer::validate`] refuses, 16-bit activations, and weights
    /// that [`MarlinWeightA8::new`] refuses; [`AccelError::Driver`].
    pub fn new(device: &Device, layer: &Layer<'_>) -> Result<Self, AccelError> {
        check::layer(&ROW, layer)?;
        let Some(input) = layer.input_dtype else {
            let expected = "8-bit activations";
            return Err(ROW.refuse("input_dtype", layer.dtype, expected));
        };
        Ok(Self {
            w13: MarlinWeightA8::new(device, layer.w13, layer.dtype, input)?,
            w2: MarlinWeightA8::new(device, layer.w2, layer.dtype, input)?,
            runs: Runs::of_layer(device, layer)?,
            activation: layer.activation,
            router_weight_on_input: layer.router_weight_on_input,
        })
    }

    /// Bytes of the codes, scales and zero points of one expert.
    pub fn bytes_of_expert(&self) -> usize {
        self.w13.bytes() + self.w2.bytes()
    }

    /// Memory for the stages of `tokens` tokens that go to `top_k` experts each.
    ///
    /// # Errors
    /// [`AccelError::Argument`] for sizes of zero or beyond 2^31; [`AccelError::Driver`].
    pub fn workspace(
        &self,
        device: &Device,
        tokens: usize,
        top_k: usize,
    ) -> Result<WorkspaceA8, AccelError> {
        let entries = check::entries(&ROW, tokens, top_k)?;
        // As if tokens were spread evenly.
        let rows = entries.div_ceil(self.w13.experts().min(entries));
        let block_size = self.w13.block_size(device, rows).min(self.w2.block_size(device, rows));
        let (shape13, shape2) = (self.w13.shape(), self.w2.shape());
        Ok(WorkspaceA8 {
            top_k,
            blocks: self.runs.room(device, entries, block_size)?,
            x: Quantized::room(device, tokens, shape13.size_k)?,
            gate_up: device.zeroed(entries * shape13.size_n)?,
            activated: device.zeroed(entries * shape2.size_k)?,
            activated_a8: Quantized::room(device, entries, shape2.size_k)?,
            down: device.zeroed(entries * shape2.size_n)?,
        })
    }

    /// y `[M, H]` of x `[M, H]` and the routing, `[M, top_k]` each, bits of [`Self::dtype`]. Ids that are
    /// no expert's of this rank count for nothing.
    ///
    /// # Errors
    /// [`AccelError::Argument`] for buffers of other lengths than the workspace was made for, or of
    /// another device; those of preparing and launching kernels.
    pub fn forward(
        &self,
        device: &Device,
        x: &Buffer<u16>,
        topk_ids: &Buffer<i32>,
        topk_weights: &Buffer<f32>,
        work: &mut WorkspaceA8,
        y: &mut Buffer<u16>,
    ) -> Result<(), AccelError> {
        let (dtype, shape) = (self.dtype(), self.w2.shape());
        let on_input = self.router_weight_on_input;
        align_on_device(device, &self.runs, topk_ids, &mut work.blocks)?;
        let blocks = &work.blocks;
        let rows = work.x.fill(device, x, &self.w13)?;
        let weights = on_input.then_some(topk_weights);
        let routed = Routed { blocks, top_k: work.top_k, topk_weights: weights };
        moe_marlin_gemm_a8(device, rows, &self.w13, &mut work.gate_up, routed)?;
        let (gate_up, activated) = (&work.gate_up, &mut work.activated);
        activate_on_device(device, &self.activation, gate_up, dtype, shape.size_k, activated)?;
        let rows = work.activated_a8.fill(device, &work.activated, &self.w2)?;
        let weights = (!on_input).then_some(topk_weights);
        let routed = Routed { blocks, top_k: 1, topk_weights: weights };
        moe_marlin_gemm_a8(device, rows, &self.w2, &mut work.down, routed)?;
        let slots = Slots::OfExperts { topk_ids, runs: &self.runs };
        sum_on_device(device, &work.down, dtype, work.top_k, shape.size_n, Some(slots), y)
    }

    /// Type of x and y.
    pub fn dtype(&self) -> ScalarType {
        self.w13.dtype()
    }
}
