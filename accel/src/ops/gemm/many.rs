//! Products of many rows on Hopper (`marlin_gemm_wgmma.cu`): how they are dealt out, and when that is
//! faster than a [`Tiling`](super::Tiling). No bit of a result depends on it.

use marlinspike::gemm::schedule::Schedule;
use marlinspike::scalar::ScalarType;

use super::{
    MarlinWeight,
    kind::Kind,
    rows_of_product,
    tiling::{scale_bytes, value},
};
use crate::{
    device::Device,
    error::AccelError,
    memory::Buffer,
    nvrtc::{Arch, Define},
    ops::{align::DeviceBlocks, check},
    raw,
    registry::{Law, Needs, Row},
};

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

/// Warps of a thread block that compute, at most; four more fill its stages.
const MOST_WARPS: u32 = 12;
/// More stages than these keep no more bytes in flight than the memory needs.
const MOST_STAGES: u32 = 12;
/// Rows of x that thread blocks work on side by side, so that they and the columns of W that go with
/// them stay in the L2 cache.
const RASTER_ROWS: usize = 1024;

/// How a product of many rows is dealt out: the macros of `marlin_gemm_wgmma.cu` that say it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ManyRows {
    /// Warps of a thread block that compute: 8 or 12.
    pub warps: u32,
    /// Columns that a warp computes: 16 or 32.
    pub columns: u32,
    /// Rows that a thread block computes at once: a multiple of 16 from 48 to 192; 64, 80 or 96 where a
    /// warp has 32 columns.
    pub rows: u32,
}

impl std::fmt::Display for ManyRows {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { warps, columns, rows } = self;
        write!(f, "{rows} rows by {warps} warps of {columns} columns")
    }
}

impl ManyRows {
    /// Those that are chosen from.
    const CHOSEN: [Self; 11] = [
        Self { warps: 8, columns: 16, rows: 64 },
        Self { warps: 8, columns: 16, rows: 128 },
        Self { warps: 8, columns: 16, rows: 144 },
        Self { warps: 8, columns: 16, rows: 176 },
        Self { warps: 8, columns: 16, rows: 192 },
        Self { warps: 8, columns: 32, rows: 32 },
        Self { warps: 8, columns: 32, rows: 48 },
        Self { warps: 8, columns: 32, rows: 64 },
        Self { warps: 8, columns: 32, rows: 80 },
        Self { warps: 12, columns: 32, rows: 32 },
        Self { warps: 12, columns: 32, rows: 48 },
    ];

    /// Whether the architecture has the kernel's instructions: sm_90a has, and no other.
    pub(super) fn has(arch: Arch) -> bool {
        arch.compute_capability == (9, 0) && arch.specific
    }

    /// Whether the kernel takes a weight of that form.
    fn takes(form: &[Define]) -> bool {
        value(form, "HAS_G_IDX") == 0
    }

    /// Columns that a thread block computes.
    pub(crate) fn n_tile(self) -> u32 {
        self.warps * self.columns
    }

    /// Threads of a thread block.
    pub(crate) fn threads(self) -> u32 {
        (self.warps + 4) * 32
    }

    /// Shared memory of a stage, and of all that there is once: as in `wgmma_ring.cuh`.
    fn bytes(self, form: &[Define]) -> (u32, u32) {
        let (groups, n) = (value(form, "GROUPS"), self.n_tile());
        let zeros = value(form, "HAS_ZERO") * groups * n / 2;
        let scales = groups * n * scale_bytes(form);
        let stage = self.rows * 128 + 64 * n * value(form, "BITS") / 8 + scales + zeros;
        // Two barriers, a piece and, with experts, the entries of its rows.
        let about = 32 + 4 * self.rows;
        (stage + about, 16 + self.warps * self.turned_rows() * self.columns * 2)
    }

    /// Rows that a warp turns round at once: `TURNED_ROWS`.
    fn turned_rows(self) -> u32 {
        1024 / self.columns
    }

    fn stages(self, form: &[Define]) -> u32 {
        let (stage, once) = self.bytes(form);
        ((Arch::of_device((9, 0)).shared_memory() - once) / stage).min(MOST_STAGES)
    }

    /// Dynamic shared memory of a thread block.
    pub(super) fn shared_bytes(self, form: &[Define]) -> u32 {
        let (stage, once) = self.bytes(form);
        self.stages(form) * stage + once
    }

    fn defines(self, form: &[Define]) -> [Define; 4] {
        [
            ("WARPS", self.warps),
            ("COLUMNS", self.columns),
            ("ROWS", self.rows),
            ("STAGES", self.stages(form)),
        ]
    }

    /// Every plan that the kernel has.
    pub fn all() -> impl Iterator<Item = Self> {
        // More warps have fewer registers each.
        let shapes = [(8, 16, 192), (8, 32, 96), (12, 32, 48)];
        shapes.into_iter().flat_map(|(warps, columns, most_rows)| {
            (16..=most_rows).step_by(16).map(move |rows| Self { warps, columns, rows })
        })
    }

    fn is_known(self) -> bool {
        Self::all().any(|plan| plan == self)
    }

    /// Fails unless the kernel has this, the device the instructions, and the weight a form that the
    /// kernel takes.
    fn validate(self, row: &Row, device: &Device, weight: &MarlinWeight) -> Result<(), AccelError> {
        let arch = Arch::of_device(device.compute_capability());
        if Self::has(arch) && Self::takes(&weight.form()) && self.is_known() {
            return Ok(());
        }
        let found = format!("{self:?} for {:?} on {arch}", weight.form());
        let expected = "a plan that the kernel has, groups in order, sm_90a";
        Err(AccelError::argument(row, "tiling", found, expected))
    }

    /// Microseconds of a stage of 64 k of one tile, with all multiprocessors of an H200 at work.
    fn stage_us(self) -> f64 {
        // Fitted to 4096 x 4096 and 4096 x 28672, M from 16 to 4096.
        let rows = f64::from(self.rows);
        match (self.warps, self.columns) {
            (8, 16) => 0.19 + 0.00185 * rows,
            (8, _) => 0.275 + 0.0037 * rows,
            _ => 0.44 + 0.004 * rows,
        }
    }

    /// Estimated microseconds of `blocks` blocks of rows of one product.
    fn us(self, blocks: f64, [size_k, size_n]: [usize; 2], multiprocessors: u32) -> f64 {
        // A tile's first stage and its writing take as long as so many stages, handing one over as long as
        // so many.
        let (tile, handover) = (5.0, 24.0);
        let stages = size_k as f64 / 64.0;
        let chunk = Schedule::canonical_chunk(size_k) as f64 / 64.0;
        let tiles = blocks * size_n.div_ceil(self.n_tile() as usize) as f64;
        let rounds = tiles / f64::from(multiprocessors);
        let whole = rounds.ceil() * (stages + tile);
        // The last two rounds are shared out by chunks where that is shorter.
        let shared = (rounds * stages / chunk).ceil() * chunk + rounds.ceil() * tile + handover;
        let all = if rounds > 1.0 { whole.min(shared) } else { whole };
        all * self.stage_us()
    }

    /// Estimated microseconds of `marlin_gemm.cu` for so many rows, where there are enough that weights
    /// are not what costs.
    fn us_otherwise(rows: f64, [size_k, size_n]: [usize; 2], multiprocessors: u32) -> f64 {
        rows * size_k as f64 * size_n as f64 * 1e-3 / f64::from(multiprocessors * 1000)
    }

    /// The fastest for one product `[M, K] x [K, N]`, by estimates fitted to an H200; none where a
    /// tiling should be faster.
    pub(super) fn choose(
        arch: Arch,
        size_m: usize,
        shape: [usize; 2],
        form: &[Define],
        multiprocessors: u32,
    ) -> Option<Self> {
        if size_m <= 16 || !Self::has(arch) || !Self::takes(form) {
            return None;
        }
        let us = |plan: &Self| {
            plan.us(size_m.div_ceil(plan.rows as usize) as f64, shape, multiprocessors)
        };
        let best = Self::CHOSEN.into_iter().min_by(|a, b| us(a).total_cmp(&us(b)))?;
        let rows = size_m.next_multiple_of(32) as f64;
        (us(&best) < Self::us_otherwise(rows, shape, multiprocessors)).then_some(best)
    }

    /// The fastest of as many rows each for the two products of a layer whose experts have `rows` rows
    /// on average; none where tilings should be faster.
    pub(super) fn choose_experts(
        arch: Arch,
        rows: f64,
        experts: usize,
        products: [([usize; 2], &[Define]); 2],
        multiprocessors: u32,
    ) -> Option<[Self; 2]> {
        let takes = products.iter().all(|(_, form)| Self::takes(form));
        if rows < 12.0 || !Self::has(arch) || !takes {
            return None;
        }
        let us = |plans: &[Self; 2]| {
            // Rows of an expert are spread about their average like counts.
            let of = |rows: f64| (rows.max(1.0) / f64::from(plans[0].rows)).ceil();
            let spread = rows.sqrt();
            let blocks = 0.25 * of(rows - spread) + 0.5 * of(rows) + 0.25 * of(rows + spread);
            let both = plans.iter().zip(&products);
            both.map(|(plan, (shape, _))| plan.us(blocks * experts as f64, *shape, multiprocessors))
                .sum::<f64>()
        };
        let pairs = Self::CHOSEN.into_iter().flat_map(|a| Self::CHOSEN.map(|b| [a, b]));
        let best =
            pairs.filter(|[a, b]| a.rows == b.rows).min_by(|a, b| us(a).total_cmp(&us(b)))?;
        // Half a block of 32 is padding, and blocks of different experts share no weights.
        let all = 1.5 * (rows + 16.0) * experts as f64;
        let otherwise: f64 = products
            .iter()
            .map(|(shape, _)| Self::us_otherwise(all, *shape, multiprocessors))
            .sum();
        (us(&best) < otherwise).then_some(best)
    }
}

fn variants(arch: Arch, is_moe: u32) -> Vec<Vec<Define>> {
    if !ManyRows::has(arch) {
        return Vec::new();
    }
    let mut all = Vec::new();
    for ty in [ScalarType::FLOAT16, ScalarType::BFLOAT16] {
        for form in Kind::forms(ty) {
            if ManyRows::takes(&form) {
                all.extend(ManyRows::CHOSEN.map(|plan| defines(ty, &form, is_moe, plan)));
            }
        }
    }
    all
}

fn defines(ty: ScalarType, form: &[Define], is_moe: u32, plan: ManyRows) -> Vec<Define> {
    let mut defines = vec![("IS_BF16", u32::from(ty == ScalarType::BFLOAT16))];
    defines.extend_from_slice(form);
    defines.push(("IS_MOE", is_moe));
    defines.extend(plan.defines(form));
    defines
}

/// Where thread blocks that share a tile hand over its totals. Of one device: its products of many rows
/// follow each other.
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
        if !ManyRows::has(Arch::of_device(device.compute_capability())) {
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
    /// Without experts `[size_m, size_k]`; with them rows in the order of their blocks.
    pub(crate) x: &'a Buffer<u16>,
    /// Rows of x.
    pub(crate) rows: u32,
    pub(crate) weight: &'a MarlinWeight,
    pub(crate) y: &'a mut Buffer<u16>,
    /// Rows of y.
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
    /// Of a product with experts: the blocks, and what multiplies a row of y before it is rounded.
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
    let size_m = rows_of_product(&ROW, device, x, weight, y, 1, weight.shape().size_n)?;
    if size_m == 0 {
        return Ok(());
    }
    launch(device, plan, weight, (x, size_m), (y, size_m), None)
}

/// Rows of x in the order of blocks, of which each expert's product makes rows of y.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Gathered<'a> {
    /// Made by [`gather_on_device`](crate::ops::gather::gather_on_device) for `blocks`.
    pub(crate) x: &'a Buffer<u16>,
    /// Of [`ManyRows::rows`] entries.
    pub(crate) blocks: &'a DeviceBlocks,
    /// Multiplies row t of y before it is rounded.
    pub(crate) topk_weights: Option<&'a Buffer<f32>>,
}

/// Row t of y = the row of x gathered for entry t · W of the expert that t is routed to, plus bias,
/// times router weight. Rows without an expert of this rank stay as they are.
///
/// # Errors
/// As [`marlin_gemm_many_rows`]; [`AccelError::Argument`] also for blocks of other sizes than the plan's,
/// and where router weights are not one for each row of y.
pub(crate) fn moe_many_rows(
    device: &Device,
    gathered: Gathered<'_>,
    weight: &MarlinWeight,
    y: &mut Buffer<u16>,
    plan: ManyRows,
) -> Result<(), AccelError> {
    let Gathered { x, blocks, topk_weights } = gathered;
    let refuse = |what, found: String, expected: String| {
        Err(AccelError::argument(&MOE, what, found, expected))
    };
    let ours = [x.is_on(device), weight.is_on(device), y.is_on(device), blocks.is_on(device)];
    let weights_ours = topk_weights.is_none_or(|weights| weights.is_on(device));
    check::on(&MOE, device, ours.into_iter().all(|ours| ours) && weights_ours)?;
    let (shape, size_m) = (weight.shape(), blocks.entries());
    if blocks.block_size() != plan.rows as usize || blocks.experts() > weight.experts() {
        let expected = format!("blocks of {} for {} experts", plan.rows, weight.experts());
        return refuse("blocks", format!("{blocks:?}"), expected);
    }
    if x.len() < blocks.most_blocks() * blocks.block_size() * shape.size_k {
        let expected = format!("{} blocks of rows of {}", blocks.most_blocks(), shape.size_k);
        return refuse("x", format!("{} elements", x.len()), expected);
    }
    if y.len() != size_m * shape.size_n {
        let expected = format!("[{size_m}, {}]", shape.size_n);
        return refuse("y", format!("{} elements", y.len()), expected);
    }
    if let Some(weights) = topk_weights.filter(|weights| weights.len() != size_m) {
        return refuse("topk_weights", weights.len().to_string(), size_m.to_string());
    }
    if size_m == 0 {
        return Ok(());
    }
    let rows = blocks.most_blocks() * blocks.block_size();
    launch(device, plan, weight, (x, rows), (y, size_m), Some((blocks, topk_weights)))
}

/// Launches a checked product of `rows` rows of x, of which `size_m` rows of y are made.
fn launch(
    device: &Device,
    plan: ManyRows,
    weight: &MarlinWeight,
    (x, rows): (&Buffer<u16>, usize),
    (y, size_m): (&mut Buffer<u16>, usize),
    experts: Option<(&DeviceBlocks, Option<&Buffer<f32>>)>,
) -> Result<(), AccelError> {
    let row = if experts.is_some() { &MOE } else { &ROW };
    plan.validate(row, device, weight)?;
    let (shape, form) = (weight.shape(), weight.form());
    let blocks = rows.div_ceil(plan.rows as usize);
    let tiles = blocks.saturating_mul(shape.size_n.div_ceil(plan.n_tile() as usize));
    // Tiles are counted in 32 bits, raster and all.
    if i32::try_from(tiles).is_err() || i32::try_from(rows).is_err() {
        let found = format!("{rows} rows in {tiles} tiles");
        return Err(AccelError::argument(row, "rows", found, "fewer than 2^31 of either"));
    }
    let Some(handover) = device.handover() else {
        return Err(AccelError::argument(row, "device", format!("{device:?}"), "sm_90a"));
    };
    let is_moe = u32::from(experts.is_some());
    let function = device.function(row, &defines(weight.dtype(), &form, is_moe, plan))?;
    let gemm = ManyGemm {
        x,
        rows: rows as u32,
        weight,
        y,
        // No more than rows; `MarlinWeight` holds both sizes below 2^31.
        size_m: size_m as u32,
        size_n: shape.size_n as u32,
        size_k: shape.size_k as u32,
        chunk_k: Schedule::canonical_chunk(shape.size_k) as u32,
        plan,
        shared_bytes: plan.shared_bytes(&form),
        grid: device.multiprocessors().min(tiles as u32),
        raster: (RASTER_ROWS / plan.rows as usize) as u32,
        handover,
        experts,
    };
    raw::gemm_many::launch(device, &function, gemm)
        .map_err(|error| AccelError::Driver { call: row.name, reason: error.to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;

    const INT4: [Define; 3] = [("BITS", 4), ("HAS_ZERO", 0), ("GROUPS", 1)];
    const HOPPER: Arch = Arch { compute_capability: (9, 0), specific: true };

    #[test]
    fn every_plan_is_known_and_fits_the_shared_memory() {
        for form in Kind::forms(ScalarType::BFLOAT16).into_iter().filter(|f| ManyRows::takes(f)) {
            for plan in ManyRows::CHOSEN {
                let context = format!("{form:?} {plan:?}");
                assert!(plan.is_known() && plan.stages(&form) >= 4, "{context}");
                assert!(plan.shared_bytes(&form) <= HOPPER.shared_memory(), "{context}");
            }
        }
    }

    #[test]
    fn many_rows_are_for_hopper_and_for_many_rows() {
        let choose = |arch, size_m| ManyRows::choose(arch, size_m, [4096, 28672], &INT4, 132);
        assert_eq!(choose(HOPPER, 16), None);
        assert_eq!(choose(HOPPER, 64), Some(ManyRows { warps: 8, columns: 32, rows: 64 }));
        assert!(choose(HOPPER, 4096).is_some_and(|plan| plan.rows >= 160));
        for capability in [(8, 0), (8, 9), (10, 0)] {
            assert_eq!(choose(Arch::of_device(capability), 4096), None);
            assert!(variants(Arch::of_device(capability), 0).is_empty());
        }
        // Few columns for so few rows leave most multiprocessors without work.
        assert_eq!(ManyRows::choose(HOPPER, 64, [4096, 4096], &INT4, 132), None);
        let uneven = [("BITS", 4), ("HAS_G_IDX", 1)];
        let choice = ManyRows::choose(HOPPER, 4096, [4096, 4096], &uneven, 132);
        assert_eq!(choice, None);
    }

    #[test]
    fn experts_get_one_size_of_blocks_for_both_products() {
        let products = [([4096, 28672], &INT4[..]), ([14336, 4096], &INT4[..])];
        let choose = |rows| ManyRows::choose_experts(HOPPER, rows, 8, products, 132);
        assert_eq!(choose(4.0), None);
        let [w13, w2] = choose(64.0).unwrap();
        // One block holds most experts' rows.
        assert!(w13.rows == w2.rows && (80..=128).contains(&w13.rows), "{w13:?} {w2:?}");
        let [w13, w2] = choose(1024.0).unwrap();
        assert!(w13.rows == w2.rows && w13.rows >= 128, "{w13:?} {w2:?}");
    }
}
