//! A layer whose rows are gathered in the order of their experts' blocks, and stay in that order until the sum.

use marlinspike::moe::activation::Definition;
use marlinspike::num::scalar::ScalarType;

use crate::{
    device::Device,
    error::AccelError,
    launch::FewEntries,
    memory::Buffer,
    ops::{
        align::{PlacedBlocks, RoutedRows, Runs, place_on_device},
        gather::{RouterWeights, RowSource, places},
        sum::{Slots, sum_on_device},
    },
};

/// One of a layer's products.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Which {
    W13,
    W2,
}

/// Rows `[places, width]` of the first product, and their activation.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GateUp<'a> {
    pub(crate) rows: &'a Buffer<u16>,
    pub(crate) activation: &'a Definition,
}

/// The products of a layer, and room for their rows.
pub(crate) trait Products {
    /// Makes the rows of that product from `rows`, in the order of the blocks.
    ///
    /// # Errors
    /// Those of the operations behind it.
    fn gather(
        &mut self,
        device: &Device,
        which: Which,
        rows: RowSource<'_>,
        blocks: &PlacedBlocks,
    ) -> Result<(), AccelError>;

    /// y `[places, N]` = the activation of `gate_up` · the weight of the second product, likewise, if the product makes its
    /// rows of so few entries itself; otherwise does nothing and returns false. The last kernel on the stream wrote neither
    /// the blocks nor their router weights.
    ///
    /// # Errors
    /// Those of the product.
    fn multiply_activated(
        &self,
        _device: &Device,
        _gate_up: GateUp<'_>,
        _routed: RoutedRows<'_>,
        _y: &mut Buffer<u16>,
    ) -> Result<bool, AccelError> {
        Ok(false)
    }

    /// y `[places, N]` = the rows gathered last · the weight of the expert of each row's block.
    ///
    /// # Errors
    /// Those of the product.
    fn multiply(
        &self,
        device: &Device,
        which: Which,
        routed: RoutedRows<'_>,
        y: &mut Buffer<u16>,
    ) -> Result<(), AccelError>;
}

/// What is the same for all products.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LayerInBlocks<'a> {
    pub(crate) runs: &'a Runs,
    pub(crate) activation: &'a Definition,
    pub(crate) dtype: ScalarType,
    pub(crate) router_weight_on_input: bool,
    /// Columns of y.
    pub(crate) hidden: usize,
}

/// The rows of a call, and where they go.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RoutedTokens<'a> {
    /// `[M, H]`.
    pub(crate) x: &'a Buffer<u16>,
    /// `[M, top_k]`.
    pub(crate) topk_ids: &'a Buffer<i32>,
    /// `[M, top_k]`.
    pub(crate) topk_weights: &'a Buffer<f32>,
}

/// Buffers between the stages, for a fixed number of tokens.
#[derive(Debug)]
pub(crate) struct BlockBuffers {
    top_k: usize,
    blocks: PlacedBlocks,
    /// The router weights of the rows.
    row_weights: Buffer<f32>,
    gate_up: Buffer<u16>,
    down: Buffer<u16>,
}

impl BlockBuffers {
    /// For products of `columns` columns.
    ///
    /// # Errors
    /// [`AccelError::Driver`].
    pub(crate) fn new(
        device: &Device,
        blocks: PlacedBlocks,
        top_k: usize,
        columns: [usize; 2],
    ) -> Result<Self, AccelError> {
        let places = blocks.places();
        Ok(Self {
            top_k,
            row_weights: device.room(places)?,
            gate_up: device.room(places * columns[0])?,
            down: device.room(places * columns[1])?,
            blocks,
        })
    }

    pub(crate) fn top_k(&self) -> usize {
        self.top_k
    }

    /// The rows of slots, and their blocks.
    pub(crate) fn slots(&self) -> (&Buffer<u16>, &PlacedBlocks) {
        (&self.down, &self.blocks)
    }

    /// y `[M, H]` of the tokens.
    ///
    /// # Errors
    /// As [`compute_slots`](Self::compute_slots); [`AccelError::Argument`] for a y of another length.
    pub(crate) fn forward(
        &mut self,
        device: &Device,
        layer: LayerInBlocks<'_>,
        products: &mut impl Products,
        tokens: RoutedTokens<'_>,
        y: &mut Buffer<u16>,
    ) -> Result<(), AccelError> {
        self.compute_slots(device, layer, products, tokens)?;
        let slots = Slots::InBlocks(&self.blocks);
        sum_on_device(device, &self.down, layer.dtype, self.top_k, layer.hidden, Some(slots), y)
    }

    /// The stages up to the rows of slots.
    ///
    /// # Errors
    /// [`AccelError::Argument`] for buffers of other lengths than these were made for, or of another device; those of
    /// preparing and launching kernels.
    pub(crate) fn compute_slots(
        &mut self,
        device: &Device,
        layer: LayerInBlocks<'_>,
        products: &mut impl Products,
        tokens: RoutedTokens<'_>,
    ) -> Result<(), AccelError> {
        let Self { top_k, blocks, row_weights, gate_up, down } = self;
        let LayerInBlocks { runs, activation, router_weight_on_input, .. } = layer;
        let placing = if places(tokens.topk_ids.len(), *top_k, runs) && runs.experts() > 0 {
            Some(blocks.placing(device, runs, tokens.topk_ids)?)
        } else {
            place_on_device(device, runs, tokens.topk_ids, blocks)?;
            None
        };
        let weights = RouterWeights { of_entries: tokens.topk_weights, of_places: row_weights };
        let rows = RowSource::X { x: tokens.x, top_k: *top_k, weights, placing };
        products.gather(device, Which::W13, rows, blocks)?;
        let entries = tokens.topk_ids.len();
        let few = placing.map(|placing| FewEntries::of(&placing, entries)).unwrap_or_default();
        let routed = |on_input: bool, is_early: bool| {
            let row_weights = (router_weight_on_input == on_input).then_some(&*row_weights);
            // The first product follows the kernel that places and gathers, the second one the activation.
            let few = if is_early { FewEntries::default() } else { few };
            RoutedRows { blocks, row_weights, is_early, few }
        };
        products.multiply(device, Which::W13, routed(true, false), gate_up)?;
        let routed = routed(false, true);
        let of_gate_up = GateUp { rows: gate_up, activation };
        if few.is_few() && products.multiply_activated(device, of_gate_up, routed, down)? {
            return Ok(());
        }
        let rows = RowSource::GateUp { gate_up, activation };
        products.gather(device, Which::W2, rows, blocks)?;
        products.multiply(device, Which::W2, routed, down)
    }
}
