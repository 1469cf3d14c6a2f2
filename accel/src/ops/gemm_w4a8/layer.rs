//! An expert layer of 4-bit weights and e4m3fn activations, whose rows are quantized as they are gathered: one scale
//! for each row.

use marlinspike::moe::activation::Definition;
use marlinspike::moe::layer::Layer;
use marlinspike::num::scalar::ScalarType;

use super::{MOE as ROW, RowsA8, W4a8Plan, moe_w4a8_gemm};
use crate::{
    device::Device,
    error::AccelError,
    memory::Buffer,
    ops::{
        align::{DeviceBlocks, RoutedRows, Runs},
        check,
        gather::{Gathered, RowSource, gather_on_device},
        gemm::MarlinWeight,
        layer::blocks::{BlockBuffers, LayerInBlocks, Products, RoutedTokens, Which},
    },
};

/// One rank's layer in a device's memory. The result has the bits of the reference's
/// [`MethodLayer::forward`](marlinspike::method::MethodLayer::forward) by
/// [`Schedule::canonical_wgmma`](marlinspike::products::schedule::Schedule::canonical_wgmma), for any batch.
#[derive(Debug)]
pub struct W4a8Layer {
    w13: MarlinWeight,
    w2: MarlinWeight,
    runs: Runs,
    activation: Definition,
    dtype: ScalarType,
    router_weight_on_input: bool,
}

/// Buffers between the stages of a layer, for a fixed number of tokens: rows in the order of the blocks.
#[derive(Debug)]
pub struct W4a8Workspace {
    plans: [W4a8Plan; 2],
    rows: [Rows; 2],
    stages: BlockBuffers,
}

/// The rows of a product.
#[derive(Debug)]
struct Rows {
    codes: Buffer<u8>,
    scales: Buffer<f32>,
}

impl Rows {
    fn new(device: &Device, weight: &MarlinWeight, places: usize) -> Result<Self, AccelError> {
        let codes = device.room(places * weight.shape().size_k)?;
        Ok(Self { codes, scales: device.room(places)? })
    }
}

/// A layer's products, with room for their rows.
struct W4a8Products<'a> {
    layer: &'a W4a8Layer,
    plans: [W4a8Plan; 2],
    rows: &'a mut [Rows; 2],
}

impl Products for W4a8Products<'_> {
    fn gather(
        &mut self,
        device: &Device,
        which: Which,
        rows: RowSource<'_>,
        blocks: &DeviceBlocks,
    ) -> Result<(), AccelError> {
        let weight = self.layer.weight(which);
        let (dtype, size_k) = (weight.dtype(), weight.shape().size_k);
        let Rows { codes, scales } = &mut self.rows[which as usize];
        gather_on_device(device, rows, dtype, size_k, blocks, Gathered::Fp8Rows { codes, scales })
    }

    fn multiply(
        &self,
        device: &Device,
        which: Which,
        routed: RoutedRows<'_>,
        y: &mut Buffer<u16>,
    ) -> Result<(), AccelError> {
        let Rows { codes, scales } = &self.rows[which as usize];
        let (weight, plan) = (self.layer.weight(which), self.plans[which as usize]);
        moe_w4a8_gemm(device, RowsA8 { codes, scales }, weight, y, plan, routed)
    }
}

impl W4a8Layer {
    /// Packs a layer's weights and copies them to the device.
    ///
    /// # Errors
    /// [`AccelError::Argument`] for what [`Layer::validate`] or [`MarlinWeight::for_8_bit`] refuses, a layer that states a
    /// type of activations, and act-order; [`AccelError::Driver`].
    pub fn new(device: &Device, layer: &Layer<'_>) -> Result<Self, AccelError> {
        check::layer(&ROW, layer)?;
        if layer.input_dtype.is_some() || layer.orders.iter().any(Option::is_some) {
            return Err(ROW.refuse("layer", "an input_dtype, or act-order", "neither"));
        }
        let input = ScalarType::FLOAT8_E4M3FN;
        let weight = |weights| MarlinWeight::for_8_bit(device, weights, layer.dtype, input);
        Ok(Self {
            w13: weight(layer.w13)?,
            w2: weight(layer.w2)?,
            runs: Runs::of_layer(device, layer)?,
            activation: layer.activation,
            dtype: layer.dtype,
            router_weight_on_input: layer.router_weight_on_input,
        })
    }

    /// Bytes of the codes and scales of one expert.
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
    ) -> Result<W4a8Workspace, AccelError> {
        let entries = check::entries(&ROW, tokens, top_k)?;
        let plans = W4a8Plan::of_experts([&self.w13, &self.w2], entries, device.multiprocessors());
        let blocks = self.runs.room_without_order(device, entries, plans[0].rows as usize)?;
        let places = blocks.places();
        let rows = [Rows::new(device, &self.w13, places)?, Rows::new(device, &self.w2, places)?];
        let columns = [self.w13.shape().size_n, self.w2.shape().size_n];
        let stages = BlockBuffers::new(device, blocks, top_k, columns)?;
        Ok(W4a8Workspace { plans, rows, stages })
    }

    fn weight(&self, which: Which) -> &MarlinWeight {
        match which {
            Which::W13 => &self.w13,
            Which::W2 => &self.w2,
        }
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
        work: &mut W4a8Workspace,
        y: &mut Buffer<u16>,
    ) -> Result<(), AccelError> {
        let W4a8Workspace { plans, rows, stages } = work;
        let layer = LayerInBlocks {
            runs: &self.runs,
            activation: &self.activation,
            dtype: self.dtype,
            router_weight_on_input: self.router_weight_on_input,
            hidden: self.w2.shape().size_n,
        };
        let mut products = W4a8Products { layer: self, plans: *plans, rows };
        let tokens = RoutedTokens { x, topk_ids, topk_weights };
        stages.forward(device, layer, &mut products, tokens, y)
    }
}
