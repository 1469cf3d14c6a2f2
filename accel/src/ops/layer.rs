//! A whole expert layer in the device's memory: alignment, `gate_up` with the activation, `down` with
//! router weights, the sum. The bits of the reference's [`Layer::forward`] by its canonical arithmetic,
//! whatever else is in the batch.

mod many;

use marlinspike::moe::activation::{Columns, Definition};
use marlinspike::moe::layer::Layer;
use marlinspike::num::scalar::ScalarType;

use super::{
    activation::activate_on_device,
    align::{DeviceBlocks, Runs, align_on_device},
    check,
    gemm::{Entries, Experts, MOE as ROW, MarlinWeight, Tiling, is_fusible, launch},
    permute::permute_on_device,
    sum::{Slots, sum_on_device},
};
use crate::{device::Device, error::AccelError, memory::Buffer};
use many::ManyRowsBuffers;

/// One rank's layer in Marlin's layout in a device's memory.
#[derive(Debug)]
pub struct MarlinLayer {
    w13: MarlinWeight,
    w2: MarlinWeight,
    runs: Runs,
    activation: Definition,
    dtype: ScalarType,
    router_weight_on_input: bool,
    /// Whether the activation is part of the first product.
    is_fused: bool,
}

/// Buffers between the stages of a layer, for a fixed number of tokens.
#[derive(Debug)]
pub struct Workspace(Stages);

#[derive(Debug)]
enum Stages {
    Tiled(Tiled),
    ManyRows(ManyRowsBuffers),
}

/// For products divided by tilings.
#[derive(Debug)]
struct Tiled {
    top_k: usize,
    /// Absent where the products find the blocks of so few tokens themselves.
    blocks: Option<DeviceBlocks>,
    w13: Tiling,
    w2: Tiling,
    /// Absent where the activation is part of the first product.
    gate_up: Option<Buffer<u16>>,
    activated: Buffer<u16>,
    down: Buffer<u16>,
    /// x and `activated` with their columns in the order of each expert's weight, with act-order.
    in_order: [Option<Buffer<u16>>; 2],
}

/// Experts that some of `tokens` go to, on average, where each goes to `top_k` of them at random.
fn expected_hit(experts: usize, tokens: usize, top_k: usize) -> usize {
    let missed = (1.0 - top_k as f64 / experts as f64).max(0.0);
    let hit = experts as f64 * (1.0 - missed.powf(tokens as f64));
    (hit.round() as usize).max(1)
}

impl MarlinLayer {
    /// Packs a layer's weights and copies them to the device.
    ///
    /// # Errors
    /// [`AccelError::Argument`] for what [`Layer::validate`] refuses, 8-bit activations, and
    /// weights that [`MarlinWeight::new`] refuses; [`AccelError::Driver`].
    pub fn new(device: &Device, layer: &Layer<'_>) -> Result<Self, AccelError> {
        check::layer(&ROW, layer)?;
        if let Some(input) = layer.input_dtype {
            return Err(ROW.refuse("input_dtype", input, "16-bit activations"));
        }
        let w13 = MarlinWeight::sorted(device, layer.w13, layer.dtype, layer.orders[0])?;
        let w2 = MarlinWeight::sorted(device, layer.w2, layer.dtype, layer.orders[1])?;
        let (activation, dtype) = (layer.activation, layer.dtype);
        let router_weight_on_input = layer.router_weight_on_input;
        let runs = Runs::of_layer(device, layer)?;
        let is_fused = is_fusible(device.arch(), &activation);
        Ok(Self { w13, w2, runs, activation, dtype, router_weight_on_input, is_fused })
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
    ) -> Result<Workspace, AccelError> {
        let entries = check::entries(&ROW, tokens, top_k)?;
        // As if tokens were spread evenly.
        let experts = self.w13.experts().min(entries);
        let rows = entries.div_ceil(experts);
        if let Some(plans) = self.many_rows(device, entries, experts) {
            return self.workspace_many_rows(device, tokens, top_k, plans);
        }
        // The second product's K is a multiple of 64, so that halves are whole tiles of columns.
        let paired = self.is_fused && self.activation.columns == Columns::Halves;
        let hit = expected_hit(self.w13.experts(), tokens, top_k);
        let mut w13 = self.w13.tiling_of_experts(device, rows, hit, paired);
        let mut w2 = self.w2.tiling_of_experts(device, rows, hit, false);
        w13.m_tiles = w13.m_tiles.min(w2.m_tiles);
        w2.m_tiles = w13.m_tiles;
        self.workspace_tiled(device, tokens, top_k, [w13, w2])
    }

    /// [`workspace`](Self::workspace) with the division of work of both products: the same bits, at
    /// another speed.
    ///
    /// # Errors
    /// As [`workspace`](Self::workspace); [`AccelError::Argument`] for tilings of different rows.
    /// Others that the device or the layer does not take are refused by [`forward`](Self::forward).
    pub fn workspace_tiled(
        &self,
        device: &Device,
        tokens: usize,
        top_k: usize,
        [w13, w2]: [Tiling; 2],
    ) -> Result<Workspace, AccelError> {
        let entries = check::entries(&ROW, tokens, top_k)?;
        if w13.m_tiles != w2.m_tiles {
            let found = format!("{} and {}", w13.rows(), w2.rows());
            return Err(ROW.refuse("tiling", found, "blocks of as many rows"));
        }
        let (shape13, shape2) = (self.w13.shape(), self.w2.shape());
        let room = || self.runs.room(device, entries, w13.rows());
        // Every entry has its own thread blocks then; those of an entry that begins no block do nothing. Of no more
        // entries than experts there is room for as many blocks with alignment, too.
        let is_direct = w13.is_direct(entries) && entries <= self.w13.experts();
        let blocks = (!is_direct).then(room).transpose()?;
        let gate_up = || device.zeroed(entries * shape13.size_n);
        let in_order = |weight: &MarlinWeight| {
            let room = |_| device.zeroed(entries * weight.shape().size_k);
            weight.device_perm.as_ref().map(room).transpose()
        };
        Ok(Workspace(Stages::Tiled(Tiled {
            top_k,
            blocks,
            w13,
            w2,
            gate_up: (!self.is_fused).then(gate_up).transpose()?,
            activated: device.zeroed(entries * shape2.size_k)?,
            down: device.zeroed(entries * shape2.size_n)?,
            in_order: [in_order(&self.w13)?, in_order(&self.w2)?],
        })))
    }

    /// y `[M, H]` of x `[M, H]` and the routing, `[M, top_k]` each. Ids that are no expert's of this
    /// rank count for nothing.
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
        work: &mut Workspace,
        y: &mut Buffer<u16>,
    ) -> Result<(), AccelError> {
        match &mut work.0 {
            Stages::Tiled(work) => self.forward_tiled(device, x, topk_ids, topk_weights, work, y),
            Stages::ManyRows(work) => {
                self.forward_many_rows(device, x, topk_ids, topk_weights, work, y)
            }
        }
    }

    fn forward_tiled(
        &self,
        device: &Device,
        x: &Buffer<u16>,
        topk_ids: &Buffer<i32>,
        topk_weights: &Buffer<f32>,
        work: &mut Tiled,
        y: &mut Buffer<u16>,
    ) -> Result<(), AccelError> {
        let Tiled { top_k, blocks, w13, w2, gate_up, activated, down, in_order } = work;
        let (top_k, hidden, size_i) = (*top_k, self.w2.shape().size_n, self.w2.shape().size_k);
        let entries = match blocks {
            Some(blocks) => {
                align_on_device(device, &self.runs, topk_ids, blocks)?;
                Entries::Blocks(blocks)
            }
            None => Entries::Direct { topk_ids, runs: &self.runs },
        };
        let on_input = self.router_weight_on_input;
        let routing = (topk_ids, &self.runs);
        let [in_order13, in_order2] = in_order;
        // With act-order x has a row for each entry.
        let (x, of_x) = match (&self.w13.device_perm, in_order13) {
            (Some(perm), Some(ordered)) => {
                permute_on_device(device, x, perm, routing, top_k, ordered)?;
                (&*ordered, 1)
            }
            _ => (x, top_k),
        };
        let first = Experts {
            entries,
            top_k: of_x,
            topk_weights: on_input.then_some(topk_weights),
            activation: None,
            // Alignment, or the caller's router, comes just before.
            is_early: false,
        };
        match gate_up {
            None => {
                let first = Experts { activation: Some(&self.activation), ..first };
                launch(device, x, &self.w13, activated, *w13, Some(first))?;
            }
            Some(gate_up) => {
                launch(device, x, &self.w13, gate_up, *w13, Some(first))?;
                let definition = &self.activation;
                activate_on_device(device, definition, gate_up, self.dtype, size_i, activated)?;
            }
        }
        let second = Experts {
            entries,
            top_k: 1,
            topk_weights: (!on_input).then_some(topk_weights),
            activation: None,
            is_early: true,
        };
        let activated = match (&self.w2.device_perm, in_order2) {
            (Some(perm), Some(ordered)) => {
                permute_on_device(device, activated, perm, routing, 1, ordered)?;
                &*ordered
            }
            _ => &*activated,
        };
        launch(device, activated, &self.w2, down, *w2, Some(second))?;
        let slots = Slots::OfExperts { topk_ids, runs: &self.runs };
        sum_on_device(device, down, self.dtype, top_k, hidden, Some(slots), y)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_share_experts_the_more_they_are() {
        // 8 (1 - (3/4)^4) = 5.47; 128 (1 - (15/16)^16) = 82.4.
        assert_eq!(expected_hit(8, 1, 2), 2);
        assert_eq!(expected_hit(8, 4, 2), 5);
        assert_eq!(expected_hit(128, 16, 8), 82);
        assert_eq!(expected_hit(8, 1000, 2), 8);
        // More slots than experts, of which a rank may have one.
        assert_eq!(expected_hit(1, 3, 2), 1);
    }
}
