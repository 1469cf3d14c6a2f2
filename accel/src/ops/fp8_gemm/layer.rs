//! An expert layer of e4m3fn weights and activations. The rows of both products are quantized as they are gathered.

use marlinspike::moe::activation::Definition;
use marlinspike::moe::layer::Layer;
use marlinspike::num::scalar::ScalarType;

use super::{Fp8Plan, Fp8Scales, Fp8Sums, Fp8Weight, MOE as ROW, RowsFp8, moe_fp8_gemm};
use crate::{
    device::Device,
    error::AccelError,
    memory::Buffer,
    ops::{
        align::{DeviceBlocks, RoutedRows, Runs},
        check,
        gather::{Gathered, RowSource, gather_on_device},
        layer::blocks::{BlockBuffers, LayerInBlocks, Products, RoutedTokens, Which},
        quantize::fp8_scale_step,
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
    plans: [Fp8Plan; 2],
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
    fn new(device: &Device, weight: &Fp8Weight, places: usize) -> Result<Self, AccelError> {
        let size_k = weight.shape().size_k;
        let scales = match weight.scales_of() {
            Fp8Scales::Channels => places,
            Fp8Scales::Blocks => size_k / Fp8Weight::BLOCK * fp8_scale_step(places),
        };
        Ok(Self { codes: device.room(places * size_k)?, scales: device.room(scales)? })
    }
}

/// A layer's products, with room for their rows.
struct Fp8Products<'a> {
    layer: &'a Fp8Layer,
    plans: [Fp8Plan; 2],
    rows: &'a mut [Rows; 2],
}

impl Products for Fp8Products<'_> {
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
        let to = match weight.scales_of() {
            Fp8Scales::Channels => Gathered::Fp8Rows { codes, scales },
            Fp8Scales::Blocks => Gathered::Fp8Groups { codes, scales, ue8m0: self.layer.ue8m0 },
        };
        gather_on_device(device, rows, dtype, size_k, blocks, to)
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
        moe_fp8_gemm(device, RowsFp8 { codes, scales }, weight, y, plan, routed)
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
        let weights = [weight(layer.w13)?, weight(layer.w2)?];
        Self::with_weights(device, layer, weights, ue8m0)
    }

    /// [`Self::new`] with these weights instead of the layer's.
    pub(crate) fn with_weights(
        device: &Device,
        layer: &Layer<'_>,
        [w13, w2]: [Fp8Weight; 2],
        ue8m0: bool,
    ) -> Result<Self, AccelError> {
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

    /// The layer, whose products are summed otherwise; [`Self::new`] takes [`Fp8Sums::Promoted`].
    ///
    /// # Errors
    /// As [`Fp8Weight::summed`].
    pub fn summed(self, sums: Fp8Sums) -> Result<Self, AccelError> {
        Ok(Self { w13: self.w13.summed(sums)?, w2: self.w2.summed(sums)?, ..self })
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
        let blocks = self.runs.room_without_order(device, entries, rows)?;
        let places = blocks.places();
        let rows = [Rows::new(device, &self.w13, places)?, Rows::new(device, &self.w2, places)?];
        let columns = [self.w13.shape().size_n, self.w2.shape().size_n];
        let stages = BlockBuffers::new(device, blocks, top_k, columns)?;
        Ok(Fp8Workspace { plans, rows, stages })
    }

    fn weight(&self, which: Which) -> &Fp8Weight {
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
        work: &mut Fp8Workspace,
        y: &mut Buffer<u16>,
    ) -> Result<(), AccelError> {
        let Fp8Workspace { plans, rows, stages } = work;
        let layer = LayerInBlocks {
            runs: &self.runs,
            activation: &self.activation,
            dtype: self.dtype,
            router_weight_on_input: self.router_weight_on_input,
            hidden: self.w2.shape().size_n,
        };
        let mut products = Fp8Products { layer: self, plans: *plans, rows };
        let tokens = RoutedTokens { x, topk_ids, topk_weights };
        stages.forward(device, layer, &mut products, tokens, y)
    }
}
