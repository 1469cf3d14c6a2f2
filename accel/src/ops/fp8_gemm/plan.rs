//! How the work of a product of e4m3fn operands is divided. No bit of a result depends on it.

use marlinspike::num::scalar::ScalarType;
use marlinspike_kernels::constant;

use super::{Fp8Scales, Fp8Sums, Fp8Weight, parameters};
use crate::{
    device::Device,
    error::AccelError,
    nvrtc::{Arch, Parameter},
    operation::Row,
    ops::fp8_rows::{self, Sizes},
    parameters::Memo,
};

pub(super) const SOURCE: &str = "fp8_gemm";

/// More stages would not raise the memory throughput, and would delay the first one.
const MOST_STAGES: u32 = 12;
/// Stages where as many, [`MOST_STAGES`] less a third at least, leave room for a thread block of the next kernel, which then
/// starts before this one's is over.
const MOST_STAGES_OF_TWO: u32 = 20;
/// Rows of x, for each column of a tile, that thread blocks work on concurrently, so that these rows and the columns of W
/// that they need stay in the L2 cache.
const RASTER_ROWS: u32 = 8;

/// Rows of a tile whose rows are the 64-row side of the products.
const MANY_ROWS: u32 = 128;
/// Columns of such a tile, of which a wide one has twice as many.
const MANY_COLUMNS: u32 = 128;

/// How the work of a product is divided, as parameters of `fp8_gemm.cu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fp8Plan {
    /// Rows that a thread block computes at once.
    pub rows: u32,
    /// Columns that it computes at once: a multiple of 16, at most 16 for each warp; 128 or 256 with 128 rows.
    pub tile_n: u32,
    /// Warps that compute.
    pub warps: u32,
}

static SIZES: Memo<(Fp8Plan, Fp8Scales, bool), Sizes> = Memo::new();

/// Rows and warps of few rows that the kernel is compiled with.
const FEW: [[u32; 2]; 12] = [
    [8, 4],
    [8, 8],
    [8, 16],
    [16, 4],
    [16, 8],
    [16, 16],
    [32, 4],
    [32, 8],
    [32, 16],
    [48, 16],
    [64, 4],
    [64, 8],
];

impl Fp8Plan {
    /// Plans with the widest tiles, one for each set of parameters that the kernel is compiled with.
    pub fn all() -> impl Iterator<Item = Self> {
        let few = FEW.into_iter().map(|[rows, warps]| {
            let tile_n = (warps * 16).min(224);
            Self { rows, tile_n, warps }
        });
        few.chain([Self::MANY, Self::WIDE])
    }

    pub(super) fn parameters(self) -> [Parameter; 3] {
        let is_wide = self.rows == MANY_ROWS && self.tile_n != MANY_COLUMNS;
        [("WARPS", self.warps), ("ROWS", self.rows), ("IS_WIDE", is_wide.into())]
    }

    /// Rows of a tile that a warpgroup computes.
    pub(super) fn group_rows(self) -> u32 {
        if self.rows == MANY_ROWS { MANY_ROWS / 2 } else { self.rows }
    }

    /// Blocks of rows whose tiles are computed concurrently.
    pub(super) fn raster(self) -> u32 {
        match self.rows {
            MANY_ROWS => RASTER_ROWS * self.tile_n / MANY_ROWS,
            rows => RASTER_ROWS * MANY_COLUMNS / rows,
        }
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
        (scales, is_moe): (Fp8Scales, bool),
    ) -> Result<Sizes, AccelError> {
        let Self { rows, tile_n, warps } = self;
        let fits = match rows {
            MANY_ROWS => Self::all().any(|plan| plan == self),
            _ => tile_n > 0 && tile_n.is_multiple_of(16) && tile_n <= 16 * warps,
        };
        let is_compiled = rows == MANY_ROWS || FEW.contains(&[rows, warps]);
        if !fits || !is_compiled || !device.arch().has_wgmma() {
            return Err(fp8_rows::refuse_plan(row, device, &self));
        }
        self.sizes_within((scales, is_moe), device.arch().shared_memory())
    }

    fn sizes_within(
        self,
        (scales, is_moe): (Fp8Scales, bool),
        most: u32,
    ) -> Result<Sizes, AccelError> {
        SIZES.get((self, scales, is_moe), || {
            let all = parameters(ScalarType::BFLOAT16, (scales, Fp8Sums::Promoted), is_moe, self);
            let size = |name| constant(SOURCE, name, &all);
            let stage = size("STAGE_BYTES")? + self.tile_n * size("STAGE_K")?;
            let end = size("END_BYTES")?;
            let resident = size("RESIDENT")?;
            // Stages of one of `count` thread blocks on a multiprocessor.
            let stages_of = |count| fp8_rows::room_of(most, count).saturating_sub(end) / stage;
            let two = stages_of(2 * resident);
            let stages = match two * 3 >= MOST_STAGES * 2 {
                true => two.min(MOST_STAGES_OF_TWO),
                false => stages_of(resident).min(MOST_STAGES),
            };
            Ok::<_, AccelError>(Sizes {
                threads: size("THREADS")?,
                stages,
                resident,
                shared_bytes: stages * stage + end,
            })
        })
    }

    const MANY: Self = Self { rows: MANY_ROWS, tile_n: MANY_COLUMNS, warps: 8 };
    const WIDE: Self = Self { tile_n: 2 * MANY_COLUMNS, ..Self::MANY };

    /// The plan for one product of `size_m` rows.
    pub(crate) fn choose(size_m: usize, weight: &Fp8Weight, multiprocessors: u32) -> Self {
        let size_n = weight.shape().size_n;
        let rounds = |plan: Self| plan.tiles(size_m, size_n).div_ceil(multiprocessors as usize);
        let many = match (weight.sums(), weight.scales_of()) {
            (Fp8Sums::Promoted, Fp8Scales::Channels) => Self::MANY,
            // A wide tile takes nearly as long as two.
            _ if rounds(Self::WIDE) * 19 < rounds(Self::MANY) * 10 => Self::WIDE,
            _ => Self::MANY,
        };
        Self::of_shape(size_m, size_n, multiprocessors, many)
    }

    /// The plan for both products of a layer with `entries` entries, spread evenly over its experts.
    pub(super) fn of_experts(experts: usize, entries: usize) -> Self {
        let rows = entries.div_ceil(experts.min(entries).max(1));
        let few = |rows, warps| Self { rows, tile_n: 16 * warps, warps };
        // Blocks that take all rows of nearly every expert: a second block would read its weights again.
        match rows {
            0..=4 => few(8, 8),
            5..=10 => few(16, 8),
            11..=20 => few(32, 8),
            21..=38 => few(48, 16),
            39..=96 => Self::MANY,
            _ => Self::WIDE,
        }
    }

    fn of_shape(size_m: usize, size_n: usize, multiprocessors: u32, many: Self) -> Self {
        // Each multiprocessor streams an equal part of the columns once.
        let even = size_n.div_ceil(multiprocessors as usize * 16).min(14) as u32 * 16;
        let few = |rows| {
            let warps = if even <= 64 { 4 } else { 16 };
            Self { rows, tile_n: even, warps }
        };
        match size_m {
            0..=8 => few(8),
            9..=16 => few(16),
            17..=32 => few(32),
            // As many tiles, of half the rows: each reads fewer rows of x.
            33..=64 if even <= 32 => Self { tile_n: 2 * even, ..few(32) },
            33..=64 if even <= 64 => few(64),
            // Two tiles take turns where one is too wide for the registers of 64 rows.
            33..=64 => {
                let tile_n = if even <= 128 { even } else { (even / 2).next_multiple_of(16) };
                Self { rows: 64, tile_n, warps: 8 }
            }
            _ => many,
        }
    }
}

pub(super) fn variants(arch: Arch, is_moe: bool) -> Result<Vec<Vec<Parameter>>, AccelError> {
    let mut all = Vec::new();
    if arch.has_wgmma() {
        for dtype in [ScalarType::FLOAT16, ScalarType::BFLOAT16] {
            for kind in Fp8Sums::KINDS {
                all.extend(Fp8Plan::all().map(|plan| parameters(dtype, kind, is_moe, plan)));
            }
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With rows drawn independently, an expert has more than the mean and 1.6 standard deviations in one of 18 cases.
    #[test]
    fn a_block_takes_nearly_all_rows_of_an_expert() {
        for mean in 1..=96usize {
            let plan = Fp8Plan::of_experts(64, 64 * mean);
            let most = mean as f64 + 1.6 * (mean as f64).sqrt();
            assert!(f64::from(plan.rows) >= most.min(128.0).floor(), "{mean} rows: {plan:?}");
        }
    }

    #[test]
    fn thread_blocks_that_share_a_multiprocessor_fit_into_its_memory() {
        // Of an H200's multiprocessor, and what one thread block may have.
        let (all, most) = (228 * 1024, 227 * 1024);
        for plan in Fp8Plan::all() {
            for kind in [Fp8Scales::Channels, Fp8Scales::Blocks] {
                let sizes = plan.sizes_within((kind, true), most).unwrap();
                assert!(sizes.resident * (sizes.shared_bytes + 1024) <= all, "{plan:?}: {sizes:?}");
                assert!(sizes.stages >= 4, "{plan:?}: {sizes:?}");
                assert_eq!(sizes.resident == 2, plan.warps == 8 && plan.rows <= 32, "{plan:?}");
            }
        }
    }
}
