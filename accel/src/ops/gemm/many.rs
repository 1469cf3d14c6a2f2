//! Products of many rows on Hopper (`marlin_gemm_wgmma.cu`).

use super::{
    MarlinWeight, Output, checks,
    plan::{ManyRows, Waits, parameters, variants},
};
use crate::{
    device::{Device, failed},
    error::AccelError,
    launch::{Arguments, Cut, Grid, Kernel, Pointer, arguments, tensor_map::TensorMap},
    memory::Buffer,
    operation::{Law, Mutant, Needs, Row},
    ops::{
        align::{PlacedBlocks, RoutedRows},
        check,
    },
    parameters::Product,
};

/// Upstream: `marlin_gemm`, for many rows.
pub(crate) static ROW: Row = Row {
    name: "marlin_gemm_many_rows",
    source: "marlin_gemm_wgmma",
    needs: Needs { compute_capability: (9, 0) },
    law: Law::EqualBits,
    variants: |arch| variants(arch, &[Product::Dense, Product::DensePart]),
    arguments: ManyRowsArguments::SIZES,
    mutants: &[
        Mutant::new(
            "bias of the neighbouring eight columns",
            "of[single_position(n0 % 64 + c * 8 + lane / 4)]",
            "of[single_position(n0 % 64 + (c ^ 1) * 8 + lane / 4)]",
        ),
        Mutant::new(
            "router weight of the neighbouring row",
            "__shfl_sync(~0u, row_weights.weight[first / 32], row)",
            "__shfl_sync(~0u, row_weights.weight[first / 32], row ^ 1u)",
        ),
    ],
};

/// Upstream: `moe_wna16_marlin_gemm`, for many rows of each expert.
pub(crate) static MOE: Row = Row {
    name: "moe_wna16_marlin_gemm_many_rows",
    source: "marlin_gemm_wgmma",
    needs: Needs { compute_capability: (9, 0) },
    law: Law::EqualBits,
    variants: |arch| variants(arch, &[Product::Experts]),
    arguments: ManyRowsArguments::SIZES,
    mutants: &[],
};

/// Rows of x that thread blocks work on concurrently, so that these rows and the columns of W that
/// they need stay in the L2 cache.
const RASTER_ROWS: usize = 1024;

static KERNEL: Kernel<ManyRowsArguments> = Kernel::early(&ROW);
static MOE_KERNEL: Kernel<ManyRowsArguments> = Kernel::early(&MOE);

arguments! {
    /// Arguments of `marlin_gemm_wgmma.cu`.
    ManyRowsArguments {
        x_map: TensorMap,
        y_map: TensorMap,
        qweight: Pointer,
        scales: Pointer,
        zeros: Pointer,
        bias: Pointer,
        global_scale: Pointer,
        size_m: u32,
        size_n: u32,
        size_k: u32,
        cut: Cut,
        group_size: u32,
        raster: u32,
        totals: Pointer,
        totals_ready: Pointer,
        expert_ids: Pointer,
        num_tokens_post_padded: Pointer,
        row_weights: Pointer,
        part: Pointer,
    }
}

/// [`marlin_gemm`](super::marlin_gemm) for many rows, divided by the caller's plan: the same bits, at
/// another speed.
///
/// # Errors
/// As [`marlin_gemm`](super::marlin_gemm); [`AccelError::Argument`] for an unknown plan, a
/// device that is not of capability 9.0, and a weight with groups of several sizes.
pub fn marlin_gemm_many_rows(
    device: &Device,
    x: &Buffer<u16>,
    weight: &MarlinWeight,
    y: &mut Buffer<u16>,
    plan: ManyRows,
) -> Result<(), AccelError> {
    dense(device, x, weight, Output::Halves(y), plan)
}

/// [`marlin_gemm_many_rows`] and the sums of a rank's part.
pub(super) fn dense(
    device: &Device,
    x: &Buffer<u16>,
    weight: &MarlinWeight,
    y: Output<'_>,
    plan: ManyRows,
) -> Result<(), AccelError> {
    let parts = [("x", x.is_on(device)), ("weight", weight.is_on(device)), ("y", y.is_on(device))];
    check::same_device(&ROW, device, &parts)?;
    checks::for_16_bit(&ROW, weight)?;
    y.check(&ROW, weight)?;
    let shape = weight.shape();
    let rows_of_x = checks::rows_of_x(&ROW, x, shape.size_k)?;
    let size_m = checks::rows_of_y(&ROW, rows_of_x, 1, y.len(), shape.size_n)?;
    if size_m == 0 {
        return Ok(());
    }
    launch(device, plan, weight, x, y, size_m, None)
}

/// Row `place_of[t]` of y = the row of x gathered there for entry t · W of the expert that t is
/// routed to, plus bias, times router weight. Rows of padding are undefined afterwards.
///
/// # Errors
/// As [`marlin_gemm_many_rows`]; [`AccelError::Argument`] also for blocks of other sizes than the plan's,
/// and where weights are not one for each place.
pub(crate) fn moe_many_rows(
    device: &Device,
    x: &Buffer<u16>,
    weight: &MarlinWeight,
    y: &mut Buffer<u16>,
    plan: ManyRows,
    routed: RoutedRows<'_>,
) -> Result<(), AccelError> {
    let RoutedRows { blocks, row_weights, .. } = routed;
    let weights_on_device = row_weights.is_none_or(|weights| weights.is_on(device));
    let parts = [
        ("x", x.is_on(device)),
        ("weight", weight.is_on(device)),
        ("y", y.is_on(device)),
        ("routing", blocks.is_on(device) && weights_on_device),
    ];
    check::same_device(&MOE, device, &parts)?;
    checks::for_16_bit(&MOE, weight)?;
    let y = Output::Halves(y);
    y.check(&MOE, weight)?;
    let (shape, entries) = (weight.shape(), blocks.entries());
    let places = blocks.places();
    for (what, len, width) in [("x", x.len(), shape.size_k), ("y", y.len(), shape.size_n)] {
        if len / width < places {
            let found = format!("{len} elements");
            let expected = format!("at least {places} rows of {width}");
            return Err(MOE.refuse(what, found, expected));
        }
    }
    checks::blocks(&MOE, blocks, plan.rows as usize, entries, weight.experts())?;
    checks::router_weights(&MOE, "row_weights", row_weights, places)?;
    if entries == 0 {
        return Ok(());
    }
    launch(device, plan, weight, x, y, entries, Some(routed))
}

/// Launches a checked product of `size_m` rows; with experts, of entries in their blocks.
fn launch(
    device: &Device,
    plan: ManyRows,
    weight: &MarlinWeight,
    x: &Buffer<u16>,
    y: Output<'_>,
    size_m: usize,
    experts: Option<RoutedRows<'_>>,
) -> Result<(), AccelError> {
    let row = if experts.is_some() { &MOE } else { &ROW };
    let (shape, form) = (weight.shape(), weight.form());
    plan.validate(row, device, form)?;
    let waits = Waits::new(weight.cut());
    let sizes = plan.sizes(form, waits)?;
    let blocks = experts.map(|experts| experts.blocks);
    let rows = blocks.map_or(size_m, PlacedBlocks::places);
    let blocks_of_rows = rows.div_ceil(plan.rows as usize);
    let tiles = blocks_of_rows.saturating_mul(shape.size_n.div_ceil(sizes.n_tile as usize));
    // Tiles are counted in 32 bits, raster and all.
    if i32::try_from(tiles).is_err() || i32::try_from(rows).is_err() {
        let found = format!("{rows} rows in {tiles} tiles");
        return Err(row.refuse("rows", found, "fewer than 2^31 of either"));
    }
    let Some(split_totals) = device.split_totals() else {
        return Err(row.refuse("device", format!("{device:?}"), "sm_90a"));
    };
    let is_moe = experts.is_some();
    let product = match is_moe {
        true => Product::Experts,
        false if y.is_part() => Product::DensePart,
        false => Product::Dense,
    };
    let (rows, size_n, size_k) = (rows as u32, shape.size_n as u32, shape.size_k as u32);
    let map = |matrix: &Buffer<u16>, columns| {
        let map = TensorMap::new(device, matrix, rows, columns, plan.rows);
        map.map_err(failed("cuTensorMapEncodeTiled"))
    };
    let [totals, totals_ready] = split_totals.addresses().map(Pointer::new);
    let x_map = map(x, size_k)?;
    // The copy engine does not write sums of parts, whose kernel reads no map of y.
    let (y_map, part) = match y {
        Output::Halves(y) => (map(y, size_n)?, Pointer::NULL),
        Output::Part(_) | Output::Peer(_) => (x_map, y.pointer()),
    };
    // x has `rows` rows of size_k, y as many of size_n; the copy engine reads and writes no others. The weight's buffers
    // are what the reference packs for that shape; K has at most 8 chunks. Blocks are room for this M and
    // block size; x, y and the router weights have a row for each place. The totals have room for TOTALS_PLACES tiles of
    // every thread block, and there are no more thread blocks than multiprocessors.
    let arguments = ManyRowsArguments {
        x_map,
        y_map,
        qweight: (&weight.qweight).into(),
        scales: (&weight.scales).into(),
        zeros: weight.zeros.as_ref().into(),
        bias: weight.bias.as_ref().into(),
        global_scale: weight.global_scale.as_ref().into(),
        // No more than rows; `MarlinWeight` holds both sizes below 2^31.
        size_m: size_m as u32,
        size_n,
        size_k,
        cut: weight.cut().into(),
        group_size: weight.group_k(),
        raster: (RASTER_ROWS / plan.rows as usize) as u32,
        totals,
        totals_ready,
        expert_ids: blocks.map(|blocks| &blocks.expert_ids).into(),
        num_tokens_post_padded: blocks.map(|blocks| &blocks.num_tokens_post_padded).into(),
        row_weights: experts.and_then(|experts| experts.row_weights).into(),
        part,
    };
    let grid = Grid {
        blocks: (device.multiprocessors().min(tiles as u32), 1, 1),
        threads: (sizes.threads, 1, 1),
        shared_bytes: sizes.shared_bytes(is_moe),
    };
    let kernel = if experts.is_some() { &MOE_KERNEL } else { &KERNEL };
    kernel.launch(device, &parameters(weight.dtype(), form, product, plan, waits)?, grid, arguments)
}
