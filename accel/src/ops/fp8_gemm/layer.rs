//! An expert layer of e4m3fn weights and activations. Tokens are gathered in the order of their experts' blocks, and stay
//! in that order until the sum; the rows of both products are quantized first.

use marlinspike::moe::activation::Definition;
use marlinspike::moe::layer::Layer;
use marlinspike::num::scalar::ScalarType;

use super::{Fp8Plan, Fp8Scales, Fp8Weight, MOE as ROW, RoutedRows, RowsFp8, moe_fp8_gemm};
use crate::{
    device::Device,
    error::AccelError,
    memory::Buffer,
    ops::{
        align::{DeviceBlocks, Runs, align_on_device},
        check,
        gather::{RouterWeights, RowSource, gather_on_device},
        quantize::{fp8_scale_step, per_token_group_quant_fp8_on_device, quantize_on_device},
        sum::{Slots, sum_on_device},
    },
};

/// One rank's layer in a device's memory. With scales of channels, activations have one scale for each row; with those of
/// blocks, one for each 128 k of a row. The result has the bits of the reference's
/// [`MethodLayer::forward`](marlinspike::method::MethodLayer::forward) by the schedules of [`moe_fp8_gemm`], for any
/// batch.
#[derive(Debug)]
pub struct Fp8Layer {
    w13: Fp8Weight,
    w2: Fp8Weight,
    runs: Runs,
    activation: Definition,
    dtype: ScalarType,
    router_weight_on_input: bool,
    ue8m0: bool,
}

/// Buffers between the stages of a layer, for a fixed number of tokens: rows in the order of the blocks.
#[derive(Debug)]
pub struct Fp8Workspace {
    top_k: usize,
    blocks: DeviceBlocks,
    plans: [Fp8Plan; 2],
    row_weights: Buffer<f32>,
    w13: Rows,
    gate_up: Buffer<u16>,
    w2: Rows,
    down: Buffer<u16>,
}

/// The rows of a product, and what they are quantized to.
#[derive(Debug)]
struct Rows {
    x: Buffer<u16>,
    codes: Buffer<u8>,
    scales: Buffer<f32>,
}

impl Rows {
    fn new(device: &Device, weight: &Fp8Weight, places: usize) -> Result<Self, AccelError> {
        let size_k = weight.shape().size_k;
        let scales = match weight.scales_of() {
            Fp8Scales::Channels => places,
            Fp8Scales::Blocks => size_k / Fp8Weight::BLOCK * fp8_scale_step(places),
        };
        Ok(Self {
            x: device.zeroed(places * size_k)?,
            codes: device.zeroed(places * size_k)?,
            scales: device.zeroed(scales)?,
        })
    }

    fn quantize(
        &mut self,
        device: &Device,
        weight: &Fp8Weight,
        ue8m0: bool,
    ) -> Result<RowsFp8<'_>, AccelError> {
        let Self { x, codes, scales } = self;
        let (dtype, size_k) = (weight.dtype(), weight.shape().size_k);
        match weight.scales_of() {
            Fp8Scales::Channels => {
                let input = ScalarType::FLOAT8_E4M3FN;
                quantize_on_device(device, x, dtype, input, size_k, codes, scales)?;
            }
            Fp8Scales::Blocks => {
                per_token_group_quant_fp8_on_device(device, x, dtype, size_k, ue8m0, codes, scales)?
            }
        }
        Ok(RowsFp8 { codes, scales })
    }
}

impl Fp8Layer {
    /// Copies a layer's weights to the device. `ue8m0`: the scales of blocks of activations are rounded up to powers of
    /// two.
    ///
    /// # Errors
    /// [`AccelError::Argument`] for what [`Layer::validate`] refuses, weights that [`Fp8Weight::new`] refuses or whose
    /// scales are of different kinds, and a layer with another type of activations or act-order; [`AccelError::Driver`].
    pub fn new(device: &Device, layer: &Layer<'_>, ue8m0: bool) -> Result<Self, AccelError> {
        check::layer(&ROW, layer)?;
        if layer.input_dtype.is_some() || layer.orders.iter().any(Option::is_some) {
            let found = "8-bit activations of Marlin's layout, or act-order";
            return Err(ROW.refuse("layer", found, "neither"));
        }
        let weight = |weights| Fp8Weight::new(device, weights, layer.dtype);
        let (w13, w2) = (weight(layer.w13)?, weight(layer.w2)?);
        if w13.scales_of() != w2.scales_of() {
            let found = format!("{:?} and {:?}", w13.scales_of(), w2.scales_of());
            return Err(ROW.refuse("scales", found, "the same for w13 and w2"));
        }
        Ok(Self {
            w13,
            w2,
            runs: Runs::of_layer(device, layer)?,
            activation: layer.activation,
            dtype: layer.dtype,
            router_weight_on_input: layer.router_weight_on_input,
            ue8m0,
        })
    }

    /// Bytes of the codes and scales of one expert.
    pub fn bytes_of_expert(&self) -> usize {
        (self.w13.bytes() + self.w2.bytes()) / self.w13.experts()
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
    ) -> Result<Fp8Workspace, AccelError> {
        let entries = check::entries(&ROW, tokens, top_k)?;
        let plans = Fp8Plan::of_experts([&self.w13, &self.w2], entries);
        self.workspace_planned(device, tokens, top_k, plans)
    }

    /// [`Self::workspace`] by the caller's plans: the same bits, at another speed.
    ///
    /// # Errors
    /// As [`Self::workspace`]; [`AccelError::Argument`] for plans of different rows.
    pub fn workspace_planned(
        &self,
        device: &Device,
        tokens: usize,
        top_k: usize,
        plans: [Fp8Plan; 2],
    ) -> Result<Fp8Workspace, AccelError> {
        let entries = check::entries(&ROW, tokens, top_k)?;
        let [rows, rows_of_w2] = plans.map(|plan| plan.rows as usize);
        if rows != rows_of_w2 {
            let found = format!("{rows} and {rows_of_w2}");
            return Err(ROW.refuse("plan", found, "blocks of equal size"));
        }
        let blocks = self.runs.room(device, entries, rows)?;
        let places = blocks.places();
        Ok(Fp8Workspace {
            top_k,
            plans,
            row_weights: device.zeroed(places)?,
            w13: Rows::new(device, &self.w13, places)?,
            gate_up: device.zeroed(places * self.w13.shape().size_n)?,
            w2: Rows::new(device, &self.w2, places)?,
            down: device.zeroed(places * self.w2.shape().size_n)?,
            blocks,
        })
    }

    /// y `[M, H]` of x `[M, H]` and the routing, `[M, top_k]` each. Ids of experts that are not on this rank do not
    /// count.
    ///
    /// # Errors
    /// [`AccelError::Argument`] for buffers of other lengths than the workspace was made for, or of another device;
    /// those of preparing and launching kernels.
    pub fn forward(
        &self,
        device: &Device,
        x: &Buffer<u16>,
        topk_ids: &Buffer<i32>,
        topk_weights: &Buffer<f32>,
        work: &mut Fp8Workspace,
        y: &mut Buffer<u16>,
    ) -> Result<(), AccelError> {
        let Fp8Workspace { top_k, blocks, plans, row_weights, w13, gate_up, w2, down } = work;
        let (shape13, shape2) = (self.w13.shape(), self.w2.shape());
        align_on_device(device, &self.runs, topk_ids, blocks)?;
        let weights = RouterWeights { of_entries: topk_weights, of_places: row_weights };
        let tokens = RowSource::X { x, top_k: *top_k, weights };
        gather_on_device(device, tokens, self.dtype, shape13.size_k, blocks, &mut w13.x)?;
        let routed = |on_input: bool| {
            let row_weights = (self.router_weight_on_input == on_input).then_some(&*row_weights);
            RoutedRows { blocks, row_weights }
        };
        let rows = w13.quantize(device, &self.w13, self.ue8m0)?;
        moe_fp8_gemm(device, rows, &self.w13, gate_up, plans[0], routed(true))?;
        let activated = RowSource::GateUp { gate_up, activation: &self.activation };
        gather_on_device(device, activated, self.dtype, shape2.size_k, blocks, &mut w2.x)?;
        let rows = w2.quantize(device, &self.w2, self.ue8m0)?;
        moe_fp8_gemm(device, rows, &self.w2, down, plans[1], routed(false))?;
        let slots = Slots::InBlocks(blocks);
        sum_on_device(device, down, self.dtype, *top_k, shape2.size_n, Some(slots), y)
    }
}
