//! A layer whose experts have many rows each. Tokens are gathered in the order of their blocks, and
//! stay in that order until the sum; both products use [`ManyRows`].

use super::{MarlinLayer, ROW, Stages, Workspace};
use crate::{
    device::Device,
    error::AccelError,
    memory::Buffer,
    ops::{
        align::{DeviceBlocks, align_on_device},
        check,
        gather::{RouterWeights, RowSource, gather_on_device},
        gemm::{
            ManyRows, MarlinWeight,
            many::{Gathered, moe_many_rows},
        },
    },
};

/// Buffers between the stages of such a layer, for a fixed number of tokens: rows in the order of the blocks.
#[derive(Debug)]
pub(super) struct ManyRowsBuffers {
    top_k: usize,
    blocks: DeviceBlocks,
    plans: [ManyRows; 2],
    /// x, then what the activation makes of `gate_up`.
    gathered: Buffer<u16>,
    /// The router weights of the rows.
    row_weights: Buffer<f32>,
    gate_up: Buffer<u16>,
    down: Buffer<u16>,
}

impl ManyRowsBuffers {
    pub(super) fn top_k(&self) -> usize {
        self.top_k
    }

    /// The rows of slots, and their blocks.
    pub(super) fn slots(&self) -> (&Buffer<u16>, Option<&DeviceBlocks>) {
        (&self.down, Some(&self.blocks))
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
        let blocks = self.runs.room(device, entries, rows)?;
        let places = blocks.most_blocks() * rows;
        Ok(Workspace(Stages::ManyRows(ManyRowsBuffers {
            top_k,
            blocks,
            plans,
            gathered: device.room(places * shape13.size_k.max(shape2.size_k))?,
            row_weights: device.room(places)?,
            gate_up: device.room(places * shape13.size_n)?,
            down: device.room(places * shape2.size_n)?,
        })))
    }

    pub(super) fn slots_of_many_rows(
        &self,
        device: &Device,
        x: &Buffer<u16>,
        topk_ids: &Buffer<i32>,
        topk_weights: &Buffer<f32>,
        work: &mut ManyRowsBuffers,
    ) -> Result<(), AccelError> {
        let ManyRowsBuffers { top_k, blocks, plans, gathered, row_weights, gate_up, down } = work;
        let size_i = self.w2.shape().size_k;
        let on_input = self.router_weight_on_input;
        align_on_device(device, &self.runs, topk_ids, blocks)?;
        let (size_h, dtype) = (self.w13.shape().size_k, self.dtype);
        let weights = RouterWeights { of_entries: topk_weights, of_places: row_weights };
        let tokens = RowSource::X { x, top_k: *top_k, weights };
        gather_on_device(device, tokens, dtype, size_h, blocks, gathered)?;
        let weights = on_input.then_some(&*row_weights);
        let rows = Gathered { x: gathered, blocks, row_weights: weights };
        moe_many_rows(device, rows, &self.w13, gate_up, plans[0])?;
        let activated = RowSource::GateUp { gate_up, activation: &self.activation };
        gather_on_device(device, activated, dtype, size_i, blocks, gathered)?;
        let weights = (!on_input).then_some(&*row_weights);
        let rows = Gathered { x: gathered, blocks, row_weights: weights };
        moe_many_rows(device, rows, &self.w2, down, plans[1])
    }
}
