//! A layer whose experts have many rows each: both products use [`ManyRows`].

use super::{
    MarlinLayer, ROW, Stages, Workspace,
    blocks::{BlockBuffers, LayerInBlocks, Products, RoutedTokens, Which},
};
use crate::{
    device::Device,
    error::AccelError,
    memory::Buffer,
    ops::{
        align::{PlacedBlocks, RoutedRows},
        check,
        gather::{Gathered, RowSource, gather_on_device},
        gemm::{ManyRows, MarlinWeight, many::moe_many_rows},
    },
};

/// Buffers of such a layer, for a fixed number of tokens.
#[derive(Debug)]
pub(super) struct ManyRowsBuffers {
    plans: [ManyRows; 2],
    /// x, then what the activation makes of `gate_up`.
    gathered: Buffer<u16>,
    stages: BlockBuffers,
}

impl ManyRowsBuffers {
    pub(super) fn top_k(&self) -> usize {
        self.stages.top_k()
    }

    /// The rows of slots, and their blocks.
    pub(super) fn slots(&self) -> (&Buffer<u16>, Option<&PlacedBlocks>) {
        let (down, blocks) = self.stages.slots();
        (down, Some(blocks))
    }
}

impl MarlinLayer {
    /// Plans for both products where `entries` entries, spread evenly over `experts` experts, are many rows for each.
    pub(super) fn many_rows(
        &self,
        device: &Device,
        entries: usize,
        experts: usize,
    ) -> Result<Option<[ManyRows; 2]>, AccelError> {
        if self.has_act_order() {
            return Ok(None);
        }
        let rows = entries as f64 / experts as f64;
        MarlinWeight::many_rows_of_experts([&self.w13, &self.w2], device, rows, experts)
    }

    fn has_act_order(&self) -> bool {
        self.w13.device_perm().is_some() || self.w2.device_perm().is_some()
    }

    /// [`workspace`](Self::workspace) for products of many rows by the caller's plans: the same
    /// bits, at another speed.
    ///
    /// # Errors
    /// As [`workspace`](Self::workspace); [`AccelError::Argument`] for plans of different rows, 8-bit activations and
    /// weights with act-order. Plans that the device or the weights do not take are refused by
    /// [`forward`](Self::forward).
    pub fn workspace_many_rows(
        &self,
        device: &Device,
        tokens: usize,
        top_k: usize,
        plans: [ManyRows; 2],
    ) -> Result<Workspace, AccelError> {
        let entries = check::entries(&ROW, tokens, top_k)?;
        self.check_16_bit()?;
        let [rows, rows_of_w2] = plans.map(|plan| plan.rows as usize);
        if rows != rows_of_w2 {
            let found = format!("{rows} and {rows_of_w2}");
            return Err(ROW.refuse("tiling", found, "blocks of equal size"));
        }
        if self.has_act_order() {
            let expected = "experts without act-order";
            return Err(ROW.refuse("g_idx", "act-order", expected));
        }
        let (shape13, shape2) = (self.w13.shape(), self.w2.shape());
        let blocks = self.runs.room_for_places(device, entries, rows)?;
        let gathered = device.room(blocks.places() * shape13.size_k.max(shape2.size_k))?;
        let stages = BlockBuffers::new(device, blocks, top_k, [shape13.size_n, shape2.size_n])?;
        Ok(Workspace(Stages::ManyRows(ManyRowsBuffers { plans, gathered, stages })))
    }

    pub(super) fn slots_of_many_rows(
        &self,
        device: &Device,
        tokens: RoutedTokens<'_>,
        work: &mut ManyRowsBuffers,
    ) -> Result<(), AccelError> {
        let ManyRowsBuffers { plans, gathered, stages } = work;
        let layer = LayerInBlocks {
            runs: &self.runs,
            activation: &self.activation,
            dtype: self.dtype,
            router_weight_on_input: self.router_weight_on_input,
            hidden: self.w2.shape().size_n,
        };
        let weights = [&self.w13, &self.w2];
        stages.compute_slots(
            device,
            layer,
            &mut Bits16 { weights, plans: *plans, gathered },
            tokens,
        )
    }
}

/// Products of 16-bit rows.
struct Bits16<'a> {
    weights: [&'a MarlinWeight; 2],
    plans: [ManyRows; 2],
    gathered: &'a mut Buffer<u16>,
}

impl Products for Bits16<'_> {
    fn gather(
        &mut self,
        device: &Device,
        which: Which,
        rows: RowSource<'_>,
        blocks: &PlacedBlocks,
    ) -> Result<(), AccelError> {
        let weight = self.weights[which as usize];
        let (dtype, size_k) = (weight.dtype(), weight.shape().size_k);
        gather_on_device(device, rows, dtype, size_k, blocks, Gathered::Halves(self.gathered))
    }

    fn multiply(
        &self,
        device: &Device,
        which: Which,
        routed: RoutedRows<'_>,
        y: &mut Buffer<u16>,
    ) -> Result<(), AccelError> {
        let (weight, plan) = (self.weights[which as usize], self.plans[which as usize]);
        moe_many_rows(device, self.gathered, weight, y, plan, routed)
    }
}
