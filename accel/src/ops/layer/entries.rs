//! A layer whose experts have few rows each: rows in the order of the entries.

use super::{MarlinLayer, ROW, Stages, Workspace};
use crate::{
    device::Device,
    error::AccelError,
    memory::Buffer,
    ops::{
        activation::activate_on_device,
        align::{DeviceBlocks, Runs, align_on_device},
        gemm::{Entries, Experts, MarlinWeight, Output, Routed, Tiling, launch},
        gemm_a8::{RowsA8, moe_marlin_gemm_a8},
        permute::permute_on_device,
        quantize::quantize_on_device,
    },
};

/// Rows in the order of the entries.
#[derive(Debug)]
pub(super) struct EntryBuffers {
    pub(super) top_k: usize,
    /// Absent where the products find the blocks of so few tokens themselves.
    blocks: Option<DeviceBlocks>,
    w13: Product,
    w2: Product,
    /// Absent where the activation is part of the first product.
    gate_up: Option<Buffer<u16>>,
    activated: Buffer<u16>,
    pub(super) down: Buffer<u16>,
}

/// How one of the two products is computed, with the buffers for its rows.
#[derive(Debug)]
pub(super) enum Product {
    /// With 16-bit activations.
    Bits16 {
        tiling: Tiling,
        /// With act-order: a row for each entry, its columns in the order of its expert's weight.
        in_order: Option<Buffer<u16>>,
    },
    /// With 8-bit activations: codes and scales of the rows.
    Bits8 { codes: Buffer<u8>, scales: Buffer<f32> },
}

impl Product {
    pub(super) fn bits16(
        device: &Device,
        weight: &MarlinWeight,
        tiling: Tiling,
        entries: usize,
    ) -> Result<Self, AccelError> {
        let room = |_| device.room(entries * weight.shape().size_k);
        let in_order = weight.device_perm().map(room).transpose()?;
        Ok(Self::Bits16 { tiling, in_order })
    }

    pub(super) fn bits8(
        device: &Device,
        weight: &MarlinWeight,
        rows: usize,
    ) -> Result<Self, AccelError> {
        let codes = device.room(rows * weight.shape().size_k)?;
        Ok(Self::Bits8 { codes, scales: device.room(rows)? })
    }

    /// `out` = `x` · `weight` of each entry's expert. `routing` names the entries' experts to the permutation of
    /// columns.
    fn run(
        &mut self,
        device: &Device,
        x: &Buffer<u16>,
        weight: &MarlinWeight,
        routing: (&Buffer<i32>, &Runs),
        experts: Experts<'_>,
        out: &mut Buffer<u16>,
    ) -> Result<(), AccelError> {
        match self {
            Self::Bits16 { tiling, in_order } => match (weight.device_perm(), in_order) {
                (Some(perm), Some(ordered)) => {
                    permute_on_device(device, x, perm, routing, experts.top_k, ordered)?;
                    let experts = Experts { top_k: 1, ..experts };
                    launch(device, ordered, weight, Output::Halves(out), *tiling, Some(experts))
                }
                _ => launch(device, x, weight, Output::Halves(out), *tiling, Some(experts)),
            },
            Self::Bits8 { codes, scales } => {
                let Entries::Blocks(blocks) = experts.entries else {
                    let expected = "blocks of 8-bit activations";
                    return Err(ROW.refuse("routing", "no blocks", expected));
                };
                let (dtype, size_k) = (weight.dtype(), weight.shape().size_k);
                let input = weight.input_dtype().unwrap_or(dtype);
                quantize_on_device(device, x, dtype, input, size_k, codes, scales)?;
                let Experts { top_k, topk_weights, .. } = experts;
                let routed = Routed { blocks, top_k, topk_weights };
                moe_marlin_gemm_a8(device, RowsA8 { codes, scales }, weight, out, routed)
            }
        }
    }
}

impl MarlinLayer {
    pub(super) fn entry_buffers(
        &self,
        device: &Device,
        entries: usize,
        top_k: usize,
        blocks: Option<DeviceBlocks>,
        [w13, w2]: [Product; 2],
    ) -> Result<Workspace, AccelError> {
        let (shape13, shape2) = (self.w13.shape(), self.w2.shape());
        let gate_up = || device.room(entries * shape13.size_n);
        Ok(Workspace(Stages::InEntryOrder(EntryBuffers {
            top_k,
            blocks,
            w13,
            w2,
            gate_up: (!self.is_fused).then(gate_up).transpose()?,
            activated: device.room(entries * shape2.size_k)?,
            down: device.room(entries * shape2.size_n)?,
        })))
    }

    pub(super) fn slots_in_entry_order(
        &self,
        device: &Device,
        x: &Buffer<u16>,
        topk_ids: &Buffer<i32>,
        topk_weights: &Buffer<f32>,
        work: &mut EntryBuffers,
    ) -> Result<(), AccelError> {
        let EntryBuffers { top_k, blocks, w13, w2, gate_up, activated, down } = work;
        let size_i = self.w2.shape().size_k;
        let entries = match blocks {
            Some(blocks) => {
                align_on_device(device, &self.runs, topk_ids, blocks)?;
                Entries::Blocks(blocks)
            }
            None => Entries::Direct { topk_ids, runs: &self.runs },
        };
        let on_input = self.router_weight_on_input;
        let routing = (topk_ids, &self.runs);
        let first = Experts {
            entries,
            top_k: *top_k,
            topk_weights: on_input.then_some(topk_weights),
            activation: gate_up.is_none().then_some(&self.activation),
            // The previous kernel is the alignment, or the caller's router.
            is_early: false,
        };
        match gate_up {
            None => w13.run(device, x, &self.w13, routing, first, activated)?,
            Some(gate_up) => {
                w13.run(device, x, &self.w13, routing, first, gate_up)?;
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
        w2.run(device, activated, &self.w2, routing, second, down)
    }
}
