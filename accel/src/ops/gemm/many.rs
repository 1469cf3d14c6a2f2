//! Products of many rows on Hopper (`marlin_gemm_wgmma.cu`).

mod plan;

use marlinspike::gemm::schedule::Schedule;

use super::{MarlinWeight, checks};
use crate::{
    device::Device,
    error::AccelError,
    memory::Buffer,
    ops::{align::DeviceBlocks, check},
    raw,
    registry::{Law, Needs, Row},
};
pub use plan::ManyRows;
use plan::{MOST_WARPS, parameters, variants};

/// Upstream: `marlin_gemm`, for many rows.
pub(crate) static ROW: Row = Row {
    name: "marlin_gemm_many_rows",
    source: "marlin_gemm_wgmma",
    needs: Needs { compute_capability: (9, 0) },
    law: Law::EqualBits,
    variants: |arch| variants(arch, 0),
};

/// Upstream: `moe_wna16_marlin_gemm`, for many rows of each expert.
pub(crate) static MOE: Row = Row {
    name: "moe_wna16_marlin_gemm_many_rows",
    source: "marlin_gemm_wgmma",
    needs: Needs { compute_capability: (9, 0) },
    law: Law::EqualBits,
    variants: |arch| variants(arch, 1),
};

/// Rows of x that thread blocks work on side by side, so that they and the columns of W that go with
/// them stay in the L2 cache.
const RASTER_ROWS: usize = 1024;

/// Where thread blocks that share a tile hand over its totals. Of one device: its products of many rows
/// follow each other.
///
/// Opening the device makes it, 13 MB on an H200, though only products of many rows use it: the first one may
/// come while launches are recorded, when no memory must be allocated.
#[derive(Debug)]
pub(crate) struct Handover {
    /// `[thread blocks, MOST_OUTPUTS]`
    pub(crate) totals: Buffer<f32>,
    /// `[thread blocks, warps]`: 1 while totals wait to be taken, else 0.
    pub(crate) are_there: Buffer<u32>,
}

impl Handover {
    /// Outputs of a tile at most.
    const MOST_OUTPUTS: usize = 192 * 128;

    /// Absent where the architecture has no such kernel.
    ///
    /// # Errors
    /// [`AccelError::Driver`]
    pub(crate) fn new(device: &Device) -> Result<Option<Self>, AccelError> {
        if !ManyRows::has(device.arch()) {
            return Ok(None);
        }
        let blocks = device.multiprocessors() as usize;
        Ok(Some(Self {
            totals: device.zeroed(blocks * Self::MOST_OUTPUTS)?,
            are_there: device.zeroed(blocks * MOST_WARPS as usize)?,
        }))
    }
}

/// A product that was checked: holding one proves that a launch with it stays inside its buffers.
#[derive(Debug)]
pub(crate) struct ManyGemm<'a> {
    /// `[rows, size_k]`; with experts rows in the order of their blocks.
    pub(crate) x: &'a Buffer<u16>,
    pub(crate) weight: &'a MarlinWeight,
    /// `[rows, size_n]`, in the order of x.
    pub(crate) y: &'a mut Buffer<u16>,
    /// Rows of x and y.
    pub(crate) rows: u32,
    /// Rows, without padding: with experts entries.
    pub(crate) size_m: u32,
    pub(crate) size_n: u32,
    pub(crate) size_k: u32,
    /// k of a chunk of the canonical schedule.
    pub(crate) chunk_k: u32,
    pub(crate) plan: ManyRows,
    /// Dynamic shared memory of a thread block.
    pub(crate) shared_bytes: u32,
    /// Thread blocks.
    pub(crate) grid: u32,
    /// Blocks of rows that are computed side by side.
    pub(crate) raster: u32,
    pub(crate) handover: &'a Handover,
    /// Of a product with experts: the blocks, and what multiplies each row of y before it is rounded.
    pub(crate) experts: Option<(&'a DeviceBlocks, Option<&'a Buffer<f32>>)>,
}

/// [`marlin_gemm`](super::marlin_gemm) dealt out for many rows, as the caller says: the same bits, at
/// another speed.
///
/// # Errors
/// As [`marlin_gemm`](super::marlin_gemm); [`AccelError::Argument`] for a plan that the kernel has not, a
/// device that is not of capability 9.0, and a weight with groups of several sizes.
pub fn marlin_gemm_many_rows(
    device: &Device,
    x: &Buffer<u16>,
    weight: &MarlinWeight,
    y: &mut Buffer<u16>,
    plan: ManyRows,
) -> Result<(), AccelError> {
    let parts = [("x", x.is_on(device)), ("weight", weight.is_on(device)), ("y", y.is_on(device))];
    check::on(&ROW, device, &parts)?;
    let shape = weight.shape();
    let rows_of_x = checks::rows_of_x(&ROW, x, shape.size_k)?;
    let size_m = checks::rows_of_y(&ROW, rows_of_x, 1, y, shape.size_n)?;
    if size_m == 0 {
        return Ok(());
    }
    launch(device, plan, weight, x, y, size_m, None)
}

/// Rows of x in the order of blocks, of which each expert's product makes rows of y.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Gathered<'a> {
    /// Made by [`gather_on_device`](crate::ops::gather::gather_on_device) for `blocks`.
    pub(crate) x: &'a Buffer<u16>,
    /// Of [`ManyRows::rows`] entries.
    pub(crate) blocks: &'a DeviceBlocks,
    /// One for each row of y, which it multiplies before that is rounded.
    pub(crate) row_weights: Option<&'a Buffer<f32>>,
}

/// Row `place_of[t]` of y = the row of x gathered there for entry t · W of the expert that t is routed to,
/// plus bias, times router weight. Rows of padding hold anything then.
///
/// # Errors
/// As [`marlin_gemm_many_rows`]; [`AccelError::Argument`] also for blocks of other sizes than the plan's,
/// and where weights are not one for each place.
pub(crate) fn moe_many_rows(
    device: &Device,
    gathered: Gathered<'_>,
    weight: &MarlinWeight,
    y: &mut Buffer<u16>,
    plan: ManyRows,
) -> Result<(), AccelError> {
    let Gathered { x, blocks, row_weights } = gathered;
    let weights_ours = row_weights.is_none_or(|weights| weights.is_on(device));
    let parts = [
        ("x", x.is_on(device)),
        ("weight", weight.is_on(device)),
        ("y", y.is_on(device)),
        ("routing", blocks.is_on(device) && weights_ours),
    ];
    check::on(&MOE, device, &parts)?;
    let (shape, entries) = (weight.shape(), blocks.entries());
    let places = blocks.places();
    for (what, buffer, width) in [("x", x, shape.size_k), ("y", &*y, shape.size_n)] {
        if buffer.len() / width < places {
            let found = format!("{} elements", buffer.len());
            let expected = format!("at least {places} rows of {width}");
            return Err(AccelError::argument(&MOE, what, found, expected));
        }
    }
    checks::blocks(&MOE, blocks, plan.rows as usize, entries, weight.experts())?;
    checks::router_weights(&MOE, row_weights, places)?;
    if entries == 0 {
        return Ok(());
    }
    launch(device, plan, weight, x, y, entries, Some((blocks, row_weights)))
}

/// Launches a checked product of `size_m` rows, with experts entries, which stand in their blocks.
fn launch(
    device: &Device,
    plan: ManyRows,
    weight: &MarlinWeight,
    x: &Buffer<u16>,
    y: &mut Buffer<u16>,
    size_m: usize,
    experts: Option<(&DeviceBlocks, Option<&Buffer<f32>>)>,
) -> Result<(), AccelError> {
    let row = if experts.is_some() { &MOE } else { &ROW };
    plan.validate(row, device, weight)?;
    let (shape, form) = (weight.shape(), weight.form());
    let rows = experts.map_or(size_m, |(blocks, _)| blocks.places());
    let blocks_of_rows = rows.div_ceil(plan.rows as usize);
    let tiles = blocks_of_rows.saturating_mul(shape.size_n.div_ceil(plan.n_tile() as usize));
    // Tiles are counted in 32 bits, raster and all.
    if i32::try_from(tiles).is_err() || i32::try_from(rows).is_err() {
        let found = format!("{rows} rows in {tiles} tiles");
        return Err(AccelError::argument(row, "rows", found, "fewer than 2^31 of either"));
    }
    let Some(handover) = device.handover() else {
        return Err(AccelError::argument(row, "device", format!("{device:?}"), "sm_90a"));
    };
    let is_moe = u32::from(experts.is_some());
    let function = device.function(row, &parameters(weight.dtype(), &form, is_moe, plan))?;
    let gemm = ManyGemm {
        x,
        weight,
        y,
        rows: rows as u32,
        // No more than rows; `MarlinWeight` holds both sizes below 2^31.
        size_m: size_m as u32,
        size_n: shape.size_n as u32,
        size_k: shape.size_k as u32,
        chunk_k: Schedule::canonical_chunk(shape.size_k) as u32,
        plan,
        shared_bytes: plan.shared_bytes(&form, is_moe),
        grid: device.multiprocessors().min(tiles as u32),
        raster: (RASTER_ROWS / plan.rows as usize) as u32,
        handover,
        experts,
    };
    raw::gemm_many::launch(device, &function, gemm)
        .map_err(|error| AccelError::Driver { call: row.name, reason: error.to_string() })
}
