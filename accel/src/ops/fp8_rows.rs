//! What the products of e4m3fn rows on Hopper share, whatever their weight: checks, the grid, and a layer of experts whose
//! rows are quantized as they are gathered.

use std::fmt::Debug;

use marlinspike::moe::activation::Definition;
use marlinspike::moe::layer::Layer;
use marlinspike::num::dims::Shape;
use marlinspike::num::scalar::ScalarType;

use super::align::{PlacedBlocks, RoutedRows, Runs};
use super::check;
use super::gather::{Gathered, RowSource, gather_on_device};
use super::gemm::checks;
use super::layer::blocks::{BlockBuffers, GateUp, LayerInBlocks, Products, RoutedTokens, Which};
use crate::{device::Device, error::AccelError, launch::Grid, memory::Buffer, operation::Row};

/// Sizes of a thread block.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes {
    pub(crate) threads: u32,
    pub(crate) stages: u32,
    /// Thread blocks on a multiprocessor.
    pub(crate) resident: u32,
    pub(crate) shared_bytes: u32,
}

/// Shared memory of one of `resident` thread blocks on a multiprocessor, of the `most` that one alone may have.
pub(crate) fn room_of(most: u32, resident: u32) -> u32 {
    // The device keeps as much of each thread block's.
    const RESERVED_BYTES: u32 = 1024;
    (most + RESERVED_BYTES) / resident - RESERVED_BYTES
}

/// Returns an error if any buffer belongs to another device. `is_here`: whether x and the weight are memory of `device`.
pub(super) fn on_device(
    row: &'static Row,
    device: &Device,
    is_here: [bool; 2],
    y: &Buffer<u16>,
    routed: Option<RoutedRows<'_>>,
) -> Result<(), AccelError> {
    let routed_here = |r: RoutedRows<'_>| {
        r.blocks.is_on(device) && r.row_weights.is_none_or(|weights| weights.is_on(device))
    };
    let parts = [
        ("x", is_here[0]),
        ("weight", is_here[1]),
        ("y", y.is_on(device)),
        ("routing", routed.is_none_or(routed_here)),
    ];
    check::same_device(row, device, &parts)
}

/// Returns an error unless the weight is one matrix.
pub(super) fn one_matrix(row: &Row, experts: usize) -> Result<(), AccelError> {
    match experts {
        1 => Ok(()),
        _ => Err(row.refuse("weight", format!("{experts} matrices"), "one matrix")),
    }
}

/// The places of a product's rows. `lengths`: names, elements and elements of a row.
///
/// # Errors
/// [`AccelError::Argument`] unless each has a row for each place and the blocks are of `block_size` rows for these
/// `experts`.
pub(super) fn places(
    row: &Row,
    lengths: &[(&'static str, usize, usize)],
    (block_size, experts): (u32, usize),
    routed: RoutedRows<'_>,
) -> Result<usize, AccelError> {
    let RoutedRows { blocks, row_weights, .. } = routed;
    let places = blocks.places();
    for &(what, len, width) in lengths {
        if Some(len) != places.checked_mul(width) {
            let expected = format!("[{places}, {width}], a row for each place");
            return Err(row.refuse(what, format!("{len} elements"), expected));
        }
    }
    checks::blocks(row, blocks, block_size as usize, blocks.entries(), experts)?;
    checks::router_weights(row, "row_weights", row_weights, places)?;
    Ok(places)
}

/// Returns an error for a plan that the kernel does not have.
pub(super) fn refuse_plan(row: &Row, device: &Device, plan: &impl Debug) -> AccelError {
    let found = format!("{plan:?} on {}", device.arch());
    row.refuse("plan", found, "a plan that the kernel has, sm_90a")
}

/// The rows as a number of 32 bits, and a grid of as many thread blocks as run concurrently.
///
/// # Errors
/// [`AccelError::Argument`] for 2^31 rows or tiles: they are counted in 32 bits, raster and all.
pub(super) fn grid(
    row: &Row,
    device: &Device,
    (rows, tiles): (usize, usize),
    sizes: Sizes,
) -> Result<(u32, Grid), AccelError> {
    if i32::try_from(tiles).is_err() || i32::try_from(rows).is_err() {
        let found = format!("{rows} rows in {tiles} tiles");
        return Err(row.refuse("rows", found, "fewer than 2^31 of either"));
    }
    let grid = Grid {
        blocks: ((device.multiprocessors() * sizes.resident).min(tiles as u32), 1, 1),
        threads: (sizes.threads, 1, 1),
        shared_bytes: sizes.shared_bytes,
    };
    Ok((rows as u32, grid))
}

/// The rows of a product.
#[derive(Debug)]
pub(crate) struct Rows {
    pub(super) codes: Buffer<u8>,
    pub(super) scales: Buffer<f32>,
}

/// The experts of one of a layer's products.
pub(crate) trait ExpertWeight {
    /// How a product is divided.
    type Plan: Debug + Copy;

    /// The operation that multiplies.
    fn row() -> &'static Row;

    /// The plans, of equal rows, for a layer's products of `entries` entries.
    fn plans(weights: [&Self; 2], entries: usize, device: &Device) -> [Self::Plan; 2];

    /// Rows of a plan's blocks.
    fn rows(plan: Self::Plan) -> u32;

    fn shape(&self) -> Shape;

    fn dtype(&self) -> ScalarType;

    /// Scales of `places` rows.
    fn scales(&self, places: usize) -> usize;

    /// Where rows are gathered. `ue8m0`: scales of groups are rounded up to powers of two.
    fn gathered<'r>(&self, rows: &'r mut Rows, ue8m0: bool) -> Gathered<'r>;

    /// y `[places, N]` of the rows.
    fn multiply(
        &self,
        device: &Device,
        rows: &Rows,
        y: &mut Buffer<u16>,
        plan: Self::Plan,
        routed: RoutedRows<'_>,
    ) -> Result<(), AccelError>;

    /// [`Products::multiply_activated`].
    fn multiply_activated(
        &self,
        _device: &Device,
        _gate_up: GateUp<'_>,
        _y: &mut Buffer<u16>,
        _plan: Self::Plan,
        _routed: RoutedRows<'_>,
    ) -> Result<bool, AccelError> {
        Ok(false)
    }
}

/// One rank's layer in a device's memory.
#[derive(Debug)]
pub struct Fp8RowsLayer<W> {
    pub(super) weights: [W; 2],
    runs: Runs,
    activation: Definition,
    dtype: ScalarType,
    router_weight_on_input: bool,
    ue8m0: bool,
}

/// Buffers between the stages of a layer, for a fixed number of tokens: rows in the order of the blocks.
#[derive(Debug)]
pub struct Fp8RowsWorkspace<P> {
    plans: [P; 2],
    rows: [Rows; 2],
    stages: BlockBuffers,
}

/// A layer's products, with room for their rows.
struct RowsOfExperts<'a, W: ExpertWeight> {
    weights: &'a [W; 2],
    plans: [W::Plan; 2],
    rows: &'a mut [Rows; 2],
    ue8m0: bool,
}

impl<W: ExpertWeight> Products for RowsOfExperts<'_, W> {
    fn gather(
        &mut self,
        device: &Device,
        which: Which,
        rows: RowSource<'_>,
        blocks: &PlacedBlocks,
    ) -> Result<(), AccelError> {
        let weight = &self.weights[which as usize];
        let to = weight.gathered(&mut self.rows[which as usize], self.ue8m0);
        gather_on_device(device, rows, weight.dtype(), weight.shape().size_k, blocks, to)
    }

    fn multiply(
        &self,
        device: &Device,
        which: Which,
        routed: RoutedRows<'_>,
        y: &mut Buffer<u16>,
    ) -> Result<(), AccelError> {
        let (rows, plan) = (&self.rows[which as usize], self.plans[which as usize]);
        self.weights[which as usize].multiply(device, rows, y, plan, routed)
    }

    fn multiply_activated(
        &self,
        device: &Device,
        gate_up: GateUp<'_>,
        routed: RoutedRows<'_>,
        y: &mut Buffer<u16>,
    ) -> Result<bool, AccelError> {
        self.weights[1].multiply_activated(device, gate_up, y, self.plans[1], routed)
    }
}

#[allow(private_bounds, reason = "the weights are this crate's")]
impl<W: ExpertWeight<Plan = P>, P: Debug + Copy> Fp8RowsLayer<W> {
    /// A layer of these weights, `[w13, w2]`.
    pub(super) fn of(
        device: &Device,
        layer: &Layer<'_>,
        weights: [W; 2],
        ue8m0: bool,
    ) -> Result<Self, AccelError> {
        Ok(Self {
            weights,
            runs: Runs::of_layer(device, layer)?,
            activation: layer.activation,
            dtype: layer.dtype,
            router_weight_on_input: layer.router_weight_on_input,
            ue8m0,
        })
    }

    /// The layer with other weights.
    pub(super) fn with(
        self,
        change: impl Fn(W) -> Result<W, AccelError>,
    ) -> Result<Self, AccelError> {
        let [w13, w2] = self.weights;
        Ok(Self { weights: [change(w13)?, change(w2)?], ..self })
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
    ) -> Result<Fp8RowsWorkspace<P>, AccelError> {
        let entries = check::entries(W::row(), tokens, top_k)?;
        let plans = W::plans(self.weights.each_ref(), entries, device);
        self.room(device, (entries, top_k), plans)
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
        plans: [P; 2],
    ) -> Result<Fp8RowsWorkspace<P>, AccelError> {
        let entries = check::entries(W::row(), tokens, top_k)?;
        let [rows, rows_of_w2] = plans.map(W::rows);
        if rows != rows_of_w2 {
            let found = format!("{rows} and {rows_of_w2} rows");
            return Err(W::row().refuse("plan", found, "blocks of equal size"));
        }
        self.room(device, (entries, top_k), plans)
    }

    /// Room for the stages of `entries` entries.
    fn room(
        &self,
        device: &Device,
        (entries, top_k): (usize, usize),
        plans: [P; 2],
    ) -> Result<Fp8RowsWorkspace<P>, AccelError> {
        let blocks = self.runs.room_for_places(device, entries, W::rows(plans[0]) as usize)?;
        let places = blocks.places();
        let rows = |weight: &W| -> Result<Rows, AccelError> {
            let codes = device.room(places * weight.shape().size_k)?;
            Ok(Rows { codes, scales: device.room(weight.scales(places))? })
        };
        let [w13, w2] = &self.weights;
        let rows = [rows(w13)?, rows(w2)?];
        let columns = [w13.shape().size_n, w2.shape().size_n];
        let stages = BlockBuffers::new(device, blocks, top_k, columns)?;
        Ok(Fp8RowsWorkspace { plans, rows, stages })
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
        work: &mut Fp8RowsWorkspace<P>,
        y: &mut Buffer<u16>,
    ) -> Result<(), AccelError> {
        let Fp8RowsWorkspace { plans, rows, stages } = work;
        let layer = LayerInBlocks {
            runs: &self.runs,
            activation: &self.activation,
            dtype: self.dtype,
            router_weight_on_input: self.router_weight_on_input,
            hidden: self.weights[1].shape().size_n,
        };
        let (weights, ue8m0) = (&self.weights, self.ue8m0);
        let mut products = RowsOfExperts { weights, plans: *plans, rows, ue8m0 };
        let tokens = RoutedTokens { x, topk_ids, topk_weights };
        stages.forward(device, layer, &mut products, tokens, y)
    }
}
