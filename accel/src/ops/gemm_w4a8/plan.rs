//! How the work of a product is divided. No bit of a result depends on it.

use marlinspike::num::scalar::ScalarType;
use marlinspike_kernels::constant;

use super::parameters;
use crate::{
    device::Device,
    error::AccelError,
    nvrtc::{Arch, Parameter},
    operation::Row,
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
    /// Columns that it computes at once: a multiple of 32, at most 16 for each warp.
    pub tile_n: u32,
    /// Warps that compute.
    pub warps: u32,
}

/// Sizes of a thread block.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    pub(super) threads: u32,
    pub(super) stages: u32,
    pub(super) shared_bytes: u32,
}

static SIZES: Memo<(W4a8Plan, Form), Sizes> = Memo::new();

/// Rows and warps that the kernel is compiled with.
const COMPILED: [[u32; 2]; 9] =
    [[8, 4], [8, 16], [16, 4], [16, 16], [32, 4], [64, 4], [64, 8], [128, 8], [192, 8]];

impl W4a8Plan {
    /// Plans with the widest tiles, one for each set of parameters that the kernel is compiled with.
    pub fn all() -> impl Iterator<Item = Self> {
        COMPILED.into_iter().map(|[rows, warps]| Self { rows, tile_n: warps * 16, warps })
    }

    pub(super) fn parameters(self) -> [Parameter; 2] {
        [("WARPS", self.warps), ("ROWS", self.rows)]
    }

    /// Blocks of rows whose tiles are computed concurrently.
    pub(super) fn raster(self) -> u32 {
        RASTER_ROWS / self.rows
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
        form: Form,
    ) -> Result<Sizes, AccelError> {
        let Self { rows, tile_n, warps } = self;
        let fits = tile_n > 0 && tile_n.is_multiple_of(32) && tile_n <= 16 * warps;
        let is_compiled = COMPILED.contains(&[rows, warps]);
        if !fits || !is_compiled || !device.arch().has_wgmma() {
            let found = format!("{self:?} on {}", device.arch());
            return Err(row.refuse("plan", found, "a plan that the kernel has, sm_90a"));
        }
        self.sizes_within(form, device.arch().shared_memory())
    }

    fn sizes_within(self, form: Form, most: u32) -> Result<Sizes, AccelError> {
        SIZES.get((self, form), || {
            let all = parameters(ScalarType::BFLOAT16, form, false, self);
            let size = |name| constant(SOURCE, name, &all);
            let (stage, end) = (size("STAGE_BYTES")?, size("Y_BYTES")?);
            let stages = ((most - end) / stage).min(MOST_STAGES);
            Ok::<_, AccelError>(Sizes {
                threads: size("THREADS")?,
                stages,
                shared_bytes: stages * stage + end,
            })
        })
    }

    /// The plan for one product of `size_m` rows.
    pub(super) fn choose(size_m: usize, size_n: usize, multiprocessors: u32) -> Self {
        // Each multiprocessor streams an equal part of the columns once.
        let even = size_n.div_ceil(multiprocessors as usize * 32).min(8) as u32 * 32;
        let few = |rows| Self { rows, tile_n: even, warps: if even <= 64 { 4 } else { 16 } };
        match size_m {
            0..=8 => few(8),
            9..=16 => few(16),
            17..=64 if even <= 64 => Self { rows: 64, tile_n: even, warps: 4 },
            17..=64 => Self { rows: 64, tile_n: even.min(128), warps: 8 },
            _ => Self::many(size_m, size_n, multiprocessors),
        }
    }

    /// The plan of many rows whose last wave of tiles wastes least.
    fn many(size_m: usize, size_n: usize, multiprocessors: u32) -> Self {
        let plans = [192, 128].map(|rows| Self { rows, tile_n: 128, warps: 8 });
        let time = |plan: &Self| {
            let waves = plan.tiles(size_m, size_n).div_ceil(multiprocessors as usize);
            waves * (plan.rows as usize + FIXED_ROWS)
        };
        plans.into_iter().min_by_key(time).unwrap_or(plans[0])
    }

    /// The plans, of equal rows, for the two products of a layer with `entries` entries, spread evenly over its experts.
    pub fn of_experts(weights: [&MarlinWeight; 2], entries: usize) -> [Self; 2] {
        let rows = entries.div_ceil(weights[0].experts().min(entries).max(1));
        weights.map(|_| match rows {
            0..=8 => Self { rows: 8, tile_n: 64, warps: 4 },
            9..=16 => Self { rows: 16, tile_n: 64, warps: 4 },
            17..=96 => Self { rows: 64, tile_n: 64, warps: 4 },
            97..=160 => Self { rows: 128, tile_n: 128, warps: 8 },
            _ => Self { rows: 192, tile_n: 128, warps: 8 },
        })
    }
}

/// A tile takes as long as this many rows more than it has.
const FIXED_ROWS: usize = 16;

pub(super) fn variants(arch: Arch, is_moe: bool) -> Result<Vec<Vec<Parameter>>, AccelError> {
    let mut all = Vec::new();
    if !arch.has_wgmma() {
        return Ok(all);
    }
    for dtype in [ScalarType::FLOAT16, ScalarType::BFLOAT16] {
        let is_taken = |form: &Form| dtype == ScalarType::BFLOAT16 || form.codes != Codes::E2m1;
        for form in Form::all_bytes(ScalarType::FLOAT8_E4M3FN).into_iter().filter(is_taken) {
            all.extend(W4a8Plan::all().map(|plan| parameters(dtype, form, is_moe, plan)));
        }
    }
    Ok(all)
}
