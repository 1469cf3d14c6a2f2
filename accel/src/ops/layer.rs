//! A whole expert layer in the device's memory: alignment, `gate_up` with the activation, `down`
//! with router weights, and the sum. With 8-bit activations, the rows of both products are
//! quantized first. The result has the bits of the reference's [`Layer::forward`] by its canonical
//! arithmetic, for any batch.

pub(crate) mod blocks;
mod entries;
mod many;
mod placement;

use marlinspike::moe::activation::{Columns, Definition};
use marlinspike::moe::layer::Layer;
use marlinspike::num::scalar::ScalarType;

use super::{
    align::{PlacedBlocks, Runs},
    check,
    gemm::{MOE as ROW, MarlinWeight, Tiling, is_fusible},
    sum::{Slots, sum_on_device},
};
use crate::{device::Device, error::AccelError, memory::Buffer};
use blocks::RoutedTokens;
use entries::{EntryBuffers, Product};
use many::ManyRowsBuffers;
pub(crate) use placement::ExpertRanks;

/// One rank's layer in Marlin's layout in a device's memory.
#[derive(Debug)]
pub struct MarlinLayer {
    w13: MarlinWeight,
    w2: MarlinWeight,
    runs: Runs,
    activation: Definition,
    dtype: ScalarType,
    input_dtype: Option<ScalarType>,
    router_weight_on_input: bool,
    /// Whether the activation is part of the first product.
    is_fused: bool,
    ranks: Option<ExpertRanks>,
}

/// Buffers between the stages of a layer, for a fixed number of tokens.
#[derive(Debug)]
pub struct Workspace(Stages);

#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "a workspace is made once and stays")]
enum Stages {
    InEntryOrder(EntryBuffers),
    ManyRows(ManyRowsBuffers),
}

impl Workspace {
    /// Whether the products' thread blocks hand totals to each other: see
    /// [`Device::split_with`](crate::Device::split_with).
    pub fn splits(&self) -> bool {
        matches!(self.0, Stages::ManyRows(_))
    }

    pub(crate) fn top_k(&self) -> usize {
        match &self.0 {
            Stages::InEntryOrder(work) => work.top_k,
            Stages::ManyRows(work) => work.top_k(),
        }
    }

    /// The rows of slots, and their blocks if they are not in the slots' order.
    pub(crate) fn slots(&self) -> (&Buffer<u16>, Option<&PlacedBlocks>) {
        match &self.0 {
            Stages::InEntryOrder(work) => (&work.down, None),
            Stages::ManyRows(work) => work.slots(),
        }
    }
}

/// Average number of experts that receive a token, if each token selects `top_k` experts at random.
fn expected_hit(experts: usize, tokens: usize, top_k: usize) -> usize {
    let missed = (1.0 - top_k as f64 / experts as f64).max(0.0);
    let hit = experts as f64 * (1.0 - missed.powf(tokens as f64));
    (hit.round() as usize).max(1)
}

/// What `here` of `all` experts have of a number, at least 1.
fn expected_share(number: usize, here: usize, all: usize) -> usize {
    (number as f64 * here as f64 / all as f64).ceil().max(1.0) as usize
}

impl MarlinLayer {
    /// Packs a layer's weights and copies them to the device.
    ///
    /// # Errors
    /// [`AccelError::Argument`] for what [`Layer::validate`] refuses, and weights that [`MarlinWeight::new`] or, with
    /// 8-bit activations, [`MarlinWeight::for_8_bit`] refuses; [`AccelError::Driver`].
    pub fn new(device: &Device, layer: &Layer<'_>) -> Result<Self, AccelError> {
        check::layer(&ROW, layer)?;
        let (dtype, input_dtype) = (layer.dtype, layer.input_dtype);
        let weight = |weights, order| match input_dtype {
            None => MarlinWeight::sorted(device, weights, dtype, order),
            Some(input) => MarlinWeight::for_8_bit(device, weights, dtype, input),
        };
        Ok(Self {
            w13: weight(layer.w13, layer.orders[0])?,
            w2: weight(layer.w2, layer.orders[1])?,
            runs: Runs::of_layer(device, layer)?,
            activation: layer.activation,
            dtype,
            input_dtype,
            router_weight_on_input: layer.router_weight_on_input,
            is_fused: input_dtype.is_none() && is_fusible(device.arch(), &layer.activation),
            ranks: None,
        })
    }

    /// A layer of packed weights.
    ///
    /// # Errors
    /// [`AccelError::Argument`] for weights and experts that do not fit each other, and for what
    /// [`Definition::validate`] refuses.
    pub fn from_weights(
        device: &Device,
        [w13, w2]: [MarlinWeight; 2],
        runs: Runs,
        activation: Definition,
        router_weight_on_input: bool,
    ) -> Result<Self, AccelError> {
        if let Err(error) = activation.validate() {
            return Err(ROW.refuse("activation", error, "parameters in their range"));
        }
        let (shape13, shape2) = (w13.shape(), w2.shape());
        let width = activation.width_in(shape2.size_k);
        if (shape13.size_k, shape13.size_n) != (shape2.size_n, width) {
            let expected = format!("[{}, {width}], of w2 {shape2}", shape2.size_n);
            return Err(ROW.refuse("w13", shape13, expected));
        }
        let of = |weight: &MarlinWeight| (weight.experts(), weight.dtype(), weight.input_dtype());
        if of(&w13) != of(&w2) || runs.experts() > w13.experts() {
            let found = format!("{:?} and {:?} for {} experts", of(&w13), of(&w2), runs.experts());
            return Err(ROW.refuse("w2", found, "experts and types of w13, and enough of them"));
        }
        let (dtype, input_dtype) = (w13.dtype(), w13.input_dtype());
        let is_fused = input_dtype.is_none() && is_fusible(device.arch(), &activation);
        Ok(Self {
            w13,
            w2,
            runs,
            activation,
            dtype,
            input_dtype,
            router_weight_on_input,
            is_fused,
            ranks: None,
        })
    }

    /// The same layer as that of `rank`, for [`Rank::compute_experts`](super::Rank::compute_experts): expert e
    /// is on rank `rank_of[e]`. Waits for the device.
    ///
    /// # Errors
    /// [`AccelError::Argument`] unless just this layer's experts are on `rank`.
    pub fn with_ranks(
        self,
        device: &Device,
        rank: usize,
        rank_of: &[usize],
    ) -> Result<Self, AccelError> {
        let run_of = device.download(&self.runs.run_of)?;
        // -1: left out.
        let here: Vec<bool> = run_of.iter().map(|&run| run != -1).collect();
        let ranks = Some(ExpertRanks::new(device, &here, rank, rank_of)?);
        Ok(Self { ranks, ..self })
    }

    pub(crate) fn ranks(&self) -> Option<&ExpertRanks> {
        self.ranks.as_ref()
    }

    /// H.
    pub(crate) fn hidden_size(&self) -> usize {
        self.w2.shape().size_n
    }

    /// Bytes of the codes, scales and zero points of one expert.
    pub fn bytes_of_expert(&self) -> usize {
        self.w13.bytes() + self.w2.bytes()
    }

    /// Type of x and y.
    pub fn dtype(&self) -> ScalarType {
        self.dtype
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
        // Assumes that tokens are spread evenly, also over the experts of other ranks.
        let all = self.runs.run_of.len().max(1);
        let here = self.w13.experts().min(all);
        let expected = expected_share(entries, here, all);
        let experts = here.min(expected);
        let rows = expected.div_ceil(experts);
        if self.input_dtype.is_some() {
            let block_size =
                self.w13.block_size(device, rows)?.min(self.w2.block_size(device, rows)?);
            let blocks = Some(self.runs.room(device, entries, block_size)?);
            let w13 = Product::bits8(device, &self.w13, tokens)?;
            let w2 = Product::bits8(device, &self.w2, entries)?;
            return self.entry_buffers(device, entries, top_k, blocks, [w13, w2]);
        }
        if let Some(plans) = self.many_rows(device, expected, experts)? {
            return self.workspace_many_rows(device, tokens, top_k, plans);
        }
        // The second product's K is a multiple of 64, so that halves are whole tiles of columns.
        let paired = self.is_fused && self.activation.columns == Columns::Halves;
        let hit = expected_share(expected_hit(all, tokens, top_k), here, all);
        let mut w13 = self.w13.tiling_of_experts(device, rows, hit, paired)?;
        let mut w2 = self.w2.tiling_of_experts(device, rows, hit, false)?;
        w13.m_tiles = w13.m_tiles.min(w2.m_tiles);
        w2.m_tiles = w13.m_tiles;
        self.workspace_tiled(device, tokens, top_k, [w13, w2])
    }

    /// [`workspace`](Self::workspace) with the division of work of both products: the same bits, at
    /// another speed.
    ///
    /// # Errors
    /// As [`workspace`](Self::workspace); [`AccelError::Argument`] for tilings of different rows, and with 8-bit
    /// activations. Others that the device or the layer does not take are refused by [`forward`](Self::forward).
    pub fn workspace_tiled(
        &self,
        device: &Device,
        tokens: usize,
        top_k: usize,
        [w13, w2]: [Tiling; 2],
    ) -> Result<Workspace, AccelError> {
        let entries = check::entries(&ROW, tokens, top_k)?;
        self.check_16_bit()?;
        if w13.m_tiles != w2.m_tiles {
            let found = format!("{} and {}", w13.rows(), w2.rows());
            return Err(ROW.refuse("tiling", found, "blocks of equal size"));
        }
        let room = || self.runs.room(device, entries, w13.rows());
        // Every entry has its own thread blocks then; those of an entry that begins no block do nothing. Of no more
        // entries than experts there is room for as many blocks with alignment, too.
        let is_direct = w13.is_direct(self.w13.form(), entries)? && entries <= self.w13.experts();
        let blocks = (!is_direct).then(room).transpose()?;
        let w13 = Product::bits16(device, &self.w13, w13, entries)?;
        let w2 = Product::bits16(device, &self.w2, w2, entries)?;
        self.entry_buffers(device, entries, top_k, blocks, [w13, w2])
    }
    /// Returns an error for a division of work that only products of 16-bit activations have.
    fn check_16_bit(&self) -> Result<(), AccelError> {
        self.input_dtype.map_or(Ok(()), |input| {
            let found = format!("{input} activations");
            Err(ROW.refuse("tiling", found, "16-bit activations"))
        })
    }

    /// y `[M, H]` of x `[M, H]` and the routing, `[M, top_k]` each. Ids of experts that are not on
    /// this rank do not count.
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
        self.compute_slots(device, x, topk_ids, topk_weights, work)?;
        let (top_k, hidden) = (work.top_k(), self.hidden_size());
        let (down, blocks) = work.slots();
        let slots = match blocks {
            None => Slots::OfExperts { topk_ids, runs: &self.runs },
            Some(blocks) => Slots::InBlocks(blocks),
        };
        sum_on_device(device, down, self.dtype, top_k, hidden, Some(slots), y)
    }

    /// The stages up to the rows of slots, in `work`.
    pub(crate) fn compute_slots(
        &self,
        device: &Device,
        x: &Buffer<u16>,
        topk_ids: &Buffer<i32>,
        topk_weights: &Buffer<f32>,
        work: &mut Workspace,
    ) -> Result<(), AccelError> {
        match &mut work.0 {
            Stages::InEntryOrder(work) => {
                self.slots_in_entry_order(device, x, topk_ids, topk_weights, work)
            }
            Stages::ManyRows(work) => {
                let tokens = RoutedTokens { x, topk_ids, topk_weights };
                self.slots_of_many_rows(device, tokens, work)
            }
        }
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
        // More slots than experts: a rank may have a single one.
        assert_eq!(expected_hit(1, 3, 2), 1);
        // Half of the experts take half of the entries.
        assert_eq!(expected_share(8192, 64, 128), 4096);
        assert_eq!(expected_share(1, 4, 8), 1);
        assert_eq!(expected_share(7, 128, 128), 7);
    }
}
