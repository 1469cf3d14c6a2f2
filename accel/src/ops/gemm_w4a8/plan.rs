//! How the work of a product is divided. No bit of a result depends on it.

use marlinspike::num::scalar::ScalarType;
use marlinspike_kernels::constant;

use super::{MOE, parameters};
use crate::{
    device::Device,
    error::AccelError,
    nvrtc::{Arch, Parameter},
    operation::Row,
    ops::fp8_rows::{self, Sizes},
    ops::gemm::{Form, MarlinWeight},
    parameters::{Codes, Memo},
};

pub(super) const SOURCE: &str = "marlin_gemm_a8_wgmma";
/// More stages would not raise the memory throughput.
const MOST_STAGES: u32 = 16;
/// Rows of x that thread blocks work on concurrently, so that these rows and the columns of W that they need stay in
/// the L2 cache.
const RASTER_ROWS: u32 = 1024;

/// How the work of a product is divided, as parameters of `marlin_gemm_a8_wgmma.cu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct W4a8Plan {
    /// Rows that a thread block computes at once.
    pub rows: u32,
    /// Columns that it computes at once: a multiple of 32, at most 16 for each warp over `splits`.
    pub tile_n: u32,
    /// Warps that compute.
    pub warps: u32,
    /// Divides the columns of `warps`: with 4 or 8, four warpgroups share 64 or 32 columns and compute different stages of k,
    /// which needs groups of 128 k or one group.
    pub splits: u32,
}

static SIZES: Memo<(W4a8Plan, Form, RowsOf), Sizes> = Memo::new();

/// The rows of a product: parameters IS_MOE and ACTIVATES of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum RowsOf {
    Matrix,
    Experts,
    /// Of experts, made of the rows of the first product.
    GateUp,
}

impl RowsOf {
    pub(super) fn parameters(self) -> [Parameter; 2] {
        [("IS_MOE", (self != Self::Matrix).into()), ("ACTIVATES", (self == Self::GateUp).into())]
    }
}

/// Rows, warps and splits that the kernel is compiled with.
const COMPILED: [[u32; 3]; 17] = [
    [8, 8, 1],
    [16, 8, 1],
    [32, 8, 1],
    [8, 16, 8],
    [8, 16, 4],
    [8, 16, 1],
    [16, 16, 8],
    [16, 16, 4],
    [16, 16, 1],
    [32, 16, 8],
    [32, 16, 4],
    [32, 16, 1],
    [64, 8, 1],
    [64, 16, 1],
    [128, 8, 1],
    [192, 8, 1],
    [256, 8, 1],
];

impl W4a8Plan {
    /// Plans with the widest tiles, one for each set of parameters that the kernel is compiled with for that weight.
    pub fn all(weight: &MarlinWeight) -> impl Iterator<Item = Self> {
        Self::of_form(weight.form())
    }

    fn of_form(form: Form) -> impl Iterator<Item = Self> {
        let plan = |[rows, warps, splits]: [u32; 3]| Self {
            rows,
            tile_n: warps * 16 / splits,
            warps,
            splits,
        };
        COMPILED.into_iter().map(plan).filter(move |plan| plan.serves(form))
    }

    /// Whether the kernel has the plan for such weights: shared columns need one part in a stage, and 256 rows leave too
    /// little room for the scales of four groups in a stage.
    fn serves(self, form: Form) -> bool {
        let has_wide_scales = form.groups == 4 && form.codes != Codes::E2m1;
        (self.splits == 1 || splits_stages(form)) && (self.rows < 256 || !has_wide_scales)
    }

    /// Whether the kernel makes rows of `size_k` of the first product's rows itself.
    pub(super) fn activates(self, form: Form, size_k: usize) -> Result<bool, AccelError> {
        if [self.rows, self.warps, self.splits] != [8, 8, 1] || !splits_stages(form) {
            return Ok(false);
        }
        let all = parameters(ScalarType::BFLOAT16, form, RowsOf::GateUp, self);
        Ok(size_k <= constant(SOURCE, "MOST_K", &all)? as usize)
    }

    /// Thread blocks that run concurrently, of a plan that [`activates`](Self::activates).
    pub(super) fn concurrent(self, form: Form, device: &Device) -> Result<usize, AccelError> {
        let sizes = self.sizes(&MOE, device, (form, RowsOf::GateUp))?;
        Ok((device.multiprocessors() * sizes.resident) as usize)
    }

    pub(super) fn parameters(self) -> [Parameter; 3] {
        [("WARPS", self.warps), ("ROWS", self.rows), ("SPLITS", self.splits)]
    }

    /// Blocks of rows whose tiles are computed concurrently.
    pub(super) fn raster(self) -> u32 {
        // With few rows, concurrent thread blocks read neighbouring columns of one expert.
        if self.rows <= 32 { 1 } else { RASTER_ROWS / self.rows }
    }

    /// Tiles of `rows` x `size_n` outputs.
    pub(super) fn tiles(self, rows: usize, size_n: usize) -> usize {
        rows.div_ceil(self.rows as usize).saturating_mul(size_n.div_ceil(self.tile_n as usize))
    }

    /// Sizes of a thread block of this plan.
    ///
    /// # Errors
    /// [`AccelError::Argument`] for a plan that the kernel does not have, or another architecture than sm_90a;
    /// [`AccelError::Constant`].
    pub(super) fn sizes(
        self,
        row: &Row,
        device: &Device,
        (form, rows_of): (Form, RowsOf),
    ) -> Result<Sizes, AccelError> {
        let Self { rows, tile_n, warps, splits } = self;
        let is_compiled = COMPILED.contains(&[rows, warps, splits]);
        let fits = tile_n > 0
            && tile_n.is_multiple_of(32)
            && tile_n.checked_mul(splits) <= Some(16 * warps);
        let fits = fits && self.serves(form);
        if !fits || !is_compiled || !device.arch().has_wgmma() {
            return Err(fp8_rows::refuse_plan(row, device, &self));
        }
        self.sizes_within((form, rows_of), device.arch().shared_memory())
    }

    fn sizes_within(self, (form, rows_of): (Form, RowsOf), most: u32) -> Result<Sizes, AccelError> {
        SIZES.get((self, form, rows_of), || {
            let all = parameters(ScalarType::BFLOAT16, form, rows_of, self);
            let size = |name| constant(SOURCE, name, &all);
            let (stage, end) = (size("STAGE_BYTES")?, size("END_BYTES")?);
            let resident = size("RESIDENT")?;
            let room = fp8_rows::room_of(most, resident);
            let fitting = ((room - end) / stage).min(MOST_STAGES);
            let stages = fitting - fitting % size("STAGE_MULTIPLE")?;
            Ok::<_, AccelError>(Sizes {
                resident,
                threads: size("THREADS")?,
                stages,
                shared_bytes: stages * stage + end,
            })
        })
    }

    /// The plan for one product of `size_m` rows.
    pub(super) fn choose(size_m: usize, weight: &MarlinWeight, multiprocessors: u32) -> Self {
        let (size_n, form) = (weight.shape().size_n, weight.form());
        match size_m {
            0..=64 => Self::few(size_m, size_n, form, multiprocessors),
            _ => Self::many(size_m, size_n, form, multiprocessors),
        }
    }

    /// The plan for up to 64 rows of products that have `columns` columns together: each multiprocessor streams an equal
    /// part of them once.
    fn few(rows: usize, columns: usize, form: Form, multiprocessors: u32) -> Self {
        let even = columns.div_ceil(multiprocessors as usize * 32).clamp(1, 7) as u32 * 32;
        let splits = match even {
            32 if splits_stages(form) => 8,
            64 if splits_stages(form) => 4,
            _ => 1,
        };
        let plan = |rows| Self { rows, tile_n: even, warps: 16, splits };
        match rows {
            0..=8 => plan(8),
            9..=16 => plan(16),
            17..=32 => plan(32),
            _ if splits > 1 => Self { tile_n: 64, splits: 4, ..plan(32) },
            _ => plan(64),
        }
    }

    /// The plan of many rows whose last wave of tiles wastes least.
    fn many(size_m: usize, size_n: usize, form: Form, multiprocessors: u32) -> Self {
        let plans = [256, 192, 128].map(many);
        let time = |plan: &Self| {
            let waves = plan.tiles(size_m, size_n).div_ceil(multiprocessors as usize);
            waves * (plan.rows as usize + FIXED_ROWS)
        };
        let served = plans.into_iter().filter(|plan| plan.serves(form));
        served.min_by_key(time).unwrap_or(plans[1])
    }

    /// The plans, of equal rows, for the two products of a layer with `entries` entries, spread evenly over its experts.
    pub fn of_experts(
        weights: [&MarlinWeight; 2],
        entries: usize,
        multiprocessors: u32,
    ) -> [Self; 2] {
        let active = weights[0].experts().min(entries).max(1);
        let rows = entries.div_ceil(active);
        let most = if weights.iter().all(|w| many(256).serves(w.form())) { 256 } else { 192 };
        // Blocks that take all rows of nearly every expert: a second block would read its weights again.
        weights.map(|weight| {
            let columns = weight.shape().size_n.saturating_mul(active);
            match rows {
                0..=4 if columns < multiprocessors as usize * 64 => {
                    Self::few(8, columns, weight.form(), multiprocessors)
                }
                0..=4 => many(8),
                5..=10 => many(16),
                11..=40 => many(32),
                41..=80 => many(64),
                81..=320 => many(128),
                _ => many(most),
            }
        })
    }
}

/// Tiles of 128 columns.
fn many(rows: u32) -> W4a8Plan {
    W4a8Plan { rows, tile_n: 128, warps: 8, splits: 1 }
}

/// Whether a stage is one part, so that warpgroups can take turns by stages.
fn splits_stages(form: Form) -> bool {
    form.groups <= 1
}

/// A tile takes as long as this many rows more than it has.
const FIXED_ROWS: usize = 72;

pub(super) fn variants(arch: Arch, rows_of: &[RowsOf]) -> Result<Vec<Vec<Parameter>>, AccelError> {
    let mut all = Vec::new();
    if !arch.has_wgmma() {
        return Ok(all);
    }
    for dtype in [ScalarType::FLOAT16, ScalarType::BFLOAT16] {
        let is_taken = |form: &Form| dtype == ScalarType::BFLOAT16 || form.codes != Codes::E2m1;
        for form in Form::all_bytes(ScalarType::FLOAT8_E4M3FN).into_iter().filter(is_taken) {
            for &rows_of in rows_of {
                let serves = |plan: &W4a8Plan| match rows_of {
                    RowsOf::GateUp => plan.activates(form, 0),
                    _ => Ok(true),
                };
                for plan in W4a8Plan::of_form(form) {
                    if serves(&plan)? {
                        all.push(parameters(dtype, form, rows_of, plan));
                    }
                }
            }
        }
    }
    Ok(all)
}
