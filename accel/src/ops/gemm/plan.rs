//! How the work of products of many rows is divided, and when that is faster than a
//! [`Tiling`](super::Tiling). No bit of a result depends on it.

use std::sync::LazyLock;

use marlinspike::num::scalar::ScalarType;
use marlinspike::products::schedule::Cut;
use marlinspike_kernels::constant;

use super::form::Form;
use crate::{
    device::Device,
    error::AccelError,
    nvrtc::{Arch, Parameter},
    operation::Row,
    parameters::{Memo, Product},
};

/// The source of these plans.
const SOURCE: &str = "marlin_gemm_wgmma";

/// More stages would not raise the memory throughput.
const MOST_STAGES: u32 = 12;

/// How the work of a product of many rows is divided, as parameters of `marlin_gemm_wgmma.cu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ManyRows {
    /// Warps of a thread block that compute: 8 or 12.
    pub warps: u32,
    /// Columns that a warp computes: 16 or 32.
    pub columns: u32,
    /// Rows that a thread block computes at once: a multiple of 16 up to 192, up to 96 where a warp has 32
    /// columns, up to 48 where twelve warps do.
    pub rows: u32,
}

/// Sizes of a thread block, as the source states them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    /// Columns that it computes.
    pub(super) n_tile: u32,
    pub(super) threads: u32,
    /// As many stages as fit, with experts too.
    stages: u32,
    /// Dynamic shared memory of a dense product, and with experts.
    shared_bytes: [u32; 2],
}

impl Sizes {
    /// Dynamic shared memory.
    pub(super) fn shared_bytes(self, is_moe: bool) -> u32 {
        self.shared_bytes[usize::from(is_moe)]
    }
}

static SIZES: Memo<(ManyRows, Form, Waits), Sizes> = Memo::new();

/// The parameter `WAITS`: whether totals of runs of chunks wait for other runs, which takes shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Waits(bool);

impl Waits {
    pub(super) fn new(cut: Cut) -> Self {
        // Two leaves of one chunk are a run as well.
        Self(cut.chunks() > cut.leaf_chunks().max(2))
    }

    fn parameter(self) -> Parameter {
        ("WAITS", self.0.into())
    }
}

/// A plan that is chosen from, and the constants of the source that its time depends on.
#[derive(Debug, Clone, Copy)]
struct Candidate {
    plan: ManyRows,
    n_tile: usize,
    /// Stages that take as long as handing totals to another thread block.
    split_stages: f64,
}

/// The middles of eight equally likely parts of a normal distribution, in standard deviations.
const EIGHTHS: [f64; 8] = [-1.534, -0.887, -0.489, -0.157, 0.157, 0.489, 0.887, 1.534];

impl std::fmt::Display for ManyRows {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { warps, columns, rows } = self;
        write!(f, "{rows} rows by {warps} warps of {columns} columns")
    }
}

impl ManyRows {
    /// Those that are chosen from.
    const CHOSEN: [Self; 12] = [
        Self { warps: 8, columns: 16, rows: 64 },
        Self { warps: 8, columns: 16, rows: 128 },
        Self { warps: 8, columns: 16, rows: 144 },
        Self { warps: 8, columns: 16, rows: 160 },
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
        arch.has_wgmma()
    }

    /// Whether the kernel takes a weight of that form.
    fn takes(form: Form) -> bool {
        !form.has_g_idx
    }

    /// Sizes of a thread block for a weight of that form.
    ///
    /// # Errors
    /// [`AccelError::Constant`]
    pub(super) fn sizes(self, form: Form, waits: Waits) -> Result<Sizes, AccelError> {
        SIZES.get((self, form, waits), || {
            let shape = [&form.parameters()[..], &self.shape(), &[waits.parameter()]].concat();
            let size = |name, is_moe, stages| {
                let own = [("IS_MOE", is_moe), ("STAGES", stages)];
                constant(SOURCE, name, &[&shape[..], &own].concat())
            };
            let most = Arch::of_device((9, 0)).shared_memory();
            let mut stages = MOST_STAGES;
            while stages > 1 && size("SHARED_BYTES", 1, stages)? > most {
                stages -= 1;
            }
            Ok::<_, AccelError>(Sizes {
                n_tile: size("N_TILE", 1, stages)?,
                threads: size("THREADS", 1, stages)?,
                stages,
                shared_bytes: [size("SHARED_BYTES", 0, stages)?, size("SHARED_BYTES", 1, stages)?],
            })
        })
    }

    fn shape(self) -> [Parameter; 3] {
        [("WARPS", self.warps), ("COLUMNS", self.columns), ("ROWS", self.rows)]
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

    /// Returns an error unless the kernel has this plan, the device has its instructions, and the kernel takes the
    /// weight's form.
    pub(super) fn validate(self, row: &Row, device: &Device, form: Form) -> Result<(), AccelError> {
        let arch = device.arch();
        if Self::has(arch) && Self::takes(form) && self.is_known() {
            return Ok(());
        }
        let found = format!("{self:?} for {form:?} on {arch}");
        let expected = "a plan that the kernel has, groups in order, sm_90a";
        Err(row.refuse("tiling", found, expected))
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

    /// Estimated microseconds of `marlin_gemm.cu` where the rows, not the weights, bound the time.
    fn tiled_us(rows: f64, (cut, size_n): (Cut, usize), multiprocessors: u32) -> f64 {
        rows * cut.size_k as f64 * size_n as f64 * 1e-3 / f64::from(multiprocessors * 1000)
    }

    /// The fastest plan for one product of `size_m` rows with K in those chunks and N columns, by estimates
    /// fitted to an H200; `None` if a tiling should be faster.
    ///
    /// # Errors
    /// [`AccelError::Constant`]
    pub(super) fn choose(
        arch: Arch,
        size_m: usize,
        shape: (Cut, usize),
        form: Form,
        multiprocessors: u32,
    ) -> Result<Option<Self>, AccelError> {
        if size_m <= 16 || !Self::has(arch) || !Self::takes(form) {
            return Ok(None);
        }
        let us = |candidate: &Candidate| {
            let blocks = size_m.div_ceil(candidate.plan.rows as usize) as f64;
            candidate.us(blocks, shape, multiprocessors)
        };
        let best = Candidate::all()?.iter().min_by(|a, b| us(a).total_cmp(&us(b)));
        let rows = size_m.next_multiple_of(32) as f64;
        let tiled = Self::tiled_us(rows, shape, multiprocessors);
        Ok(best.filter(|best| us(best) < tiled).map(|best| best.plan))
    }

    /// The fastest plans, of equal rows, for the two products of a layer whose experts have `rows`
    /// rows on average; `None` if tilings should be faster.
    ///
    /// # Errors
    /// [`AccelError::Constant`]
    pub(super) fn choose_experts(
        arch: Arch,
        rows: f64,
        experts: usize,
        products: [((Cut, usize), Form); 2],
        multiprocessors: u32,
    ) -> Result<Option<[Self; 2]>, AccelError> {
        let takes = products.iter().all(|&(_, form)| Self::takes(form));
        if rows < 12.0 || !Self::has(arch) || !takes {
            return Ok(None);
        }
        let us = |plans: &[&Candidate; 2]| {
            // The number of rows of an expert varies about its average like a count.
            let of = |rows: f64| (rows.max(1.0) / f64::from(plans[0].plan.rows)).ceil();
            let blocks = EIGHTHS.map(|z| of(rows + z * rows.sqrt())).iter().sum::<f64>() / 8.0;
            let both = plans.iter().zip(&products);
            both.map(|(plan, (shape, _))| plan.us(blocks * experts as f64, *shape, multiprocessors))
                .sum::<f64>()
        };
        let all = Candidate::all()?;
        let pairs = all.iter().flat_map(|a| all.iter().map(move |b| [a, b]));
        let best = pairs
            .filter(|[a, b]| a.plan.rows == b.plan.rows)
            .min_by(|a, b| us(a).total_cmp(&us(b)));
        // Half a block of 32 is padding, and blocks of different experts share no weights.
        let all = 1.5 * (rows + 16.0) * experts as f64;
        let tiled: f64 =
            products.iter().map(|(shape, _)| Self::tiled_us(all, *shape, multiprocessors)).sum();
        Ok(best.filter(|best| us(best) < tiled).map(|best| best.map(|candidate| candidate.plan)))
    }
}

impl Candidate {
    /// Every plan that is chosen from.
    fn all() -> Result<&'static [Self], AccelError> {
        static ALL: LazyLock<Result<Vec<Candidate>, AccelError>> = LazyLock::new(|| {
            let split_stages = f64::from(constant(SOURCE, "SPLIT_STAGES", &[])?);
            let of = |plan: ManyRows| {
                let n_tile = constant(SOURCE, "N_TILE", &plan.shape())? as usize;
                Ok(Candidate { plan, n_tile, split_stages })
            };
            ManyRows::CHOSEN.into_iter().map(of).collect()
        });
        ALL.as_deref().map_err(Clone::clone)
    }

    /// Estimated microseconds of `blocks` blocks of rows of one product.
    fn us(&self, blocks: f64, (cut, size_n): (Cut, usize), multiprocessors: u32) -> f64 {
        // In stages: the time of a tile's first stage and its epilogue.
        let tile = 5.0;
        let stages = cut.size_k as f64 / 64.0;
        let chunk = cut.chunk as f64 / 64.0;
        let tiles = blocks * size_n.div_ceil(self.n_tile) as f64;
        let rounds = tiles / f64::from(multiprocessors);
        let whole = rounds.ceil() * (stages + tile);
        // The last two waves are split along K where that is shorter.
        let split =
            (rounds * stages / chunk).ceil() * chunk + rounds.ceil() * tile + self.split_stages;
        let all = if rounds > 1.0 { whole.min(split) } else { whole };
        all * self.plan.stage_us()
    }
}

pub(super) fn variants(
    arch: Arch,
    products: &[Product],
) -> Result<Vec<Vec<Parameter>>, AccelError> {
    let mut all = Vec::new();
    for ty in [ScalarType::FLOAT16, ScalarType::BFLOAT16] {
        for form in Form::all_halves(ty).into_iter().filter(|&form| ManyRows::takes(form)) {
            for plan in ManyRows::CHOSEN.into_iter().filter(|_| ManyRows::has(arch)) {
                for waits in [Waits(false), Waits(true)] {
                    for &product in products {
                        all.push(parameters(ty, form, product, plan, waits)?);
                    }
                }
            }
        }
    }
    Ok(all)
}

pub(super) fn parameters(
    ty: ScalarType,
    form: Form,
    product: Product,
    plan: ManyRows,
    waits: Waits,
) -> Result<Vec<Parameter>, AccelError> {
    let mut parameters = vec![("IS_BF16", u32::from(ty == ScalarType::BFLOAT16))];
    parameters.extend(form.parameters());
    parameters.push(("IS_MOE", (product == Product::Experts).into()));
    parameters.push(("IS_PART", (product == Product::DensePart).into()));
    parameters.push(waits.parameter());
    parameters.extend(plan.shape());
    parameters.push(("STAGES", plan.sizes(form, waits)?.stages));
    Ok(parameters)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        parameters::{Codes, Scales},
        raw::stream::{MOST_TILE_TOTALS, MOST_TILE_WARPS, TOTALS_PLACES},
    };

    const INT4: Form =
        Form { codes: Codes::Uint4b8, scales: Scales::Bits16, groups: 1, has_g_idx: false };
    fn v1(size_k: usize) -> Cut {
        Cut::version_1(size_k)
    }

    const HOPPER: Arch = Arch { compute_capability: (9, 0), specific: true };

    #[test]
    fn every_plan_is_known_and_fits_the_shared_memory() {
        let forms = Form::all_halves(ScalarType::BFLOAT16);
        for form in forms.into_iter().filter(|&form| ManyRows::takes(form)) {
            for plan in ManyRows::CHOSEN {
                let context = format!("{form:?} {plan:?}");
                for (waits, stages) in [(Waits(false), 4), (Waits(true), 3)] {
                    let sizes = plan.sizes(form, waits).unwrap();
                    assert!(plan.is_known() && sizes.stages >= stages, "{context} {sizes:?}");
                    assert!(sizes.shared_bytes(true) <= HOPPER.shared_memory(), "{context}");
                    assert!(sizes.shared_bytes(false) <= sizes.shared_bytes(true), "{context}");
                }
            }
        }
    }

    #[test]
    fn many_rows_are_for_hopper_and_for_many_rows() {
        let choose =
            |arch, size_m| ManyRows::choose(arch, size_m, (v1(4096), 28672), INT4, 132).unwrap();
        assert_eq!(choose(HOPPER, 16), None);
        assert_eq!(choose(HOPPER, 64), Some(ManyRows { warps: 8, columns: 32, rows: 64 }));
        assert!(choose(HOPPER, 4096).is_some_and(|plan| plan.rows >= 160));
        for capability in [(8, 0), (8, 9), (10, 0)] {
            assert_eq!(choose(Arch::of_device(capability), 4096), None);
            assert_eq!(variants(Arch::of_device(capability), &[Product::Dense]), Ok(Vec::new()));
        }
        // Few columns for so few rows leave most multiprocessors without work.
        assert_eq!(ManyRows::choose(HOPPER, 64, (v1(4096), 4096), INT4, 132), Ok(None));
        let uneven = Form { groups: 0, has_g_idx: true, ..INT4 };
        let choice = ManyRows::choose(HOPPER, 4096, (v1(4096), 4096), uneven, 132);
        assert_eq!(choice, Ok(None));
    }

    #[test]
    fn every_plans_totals_fit_the_streams_memory() {
        for plan in ManyRows::all() {
            let totals = constant(SOURCE, "TILE_TOTALS", &plan.shape()).unwrap();
            assert!(totals as usize <= MOST_TILE_TOTALS, "{plan}");
            let places = constant(SOURCE, "TOTALS_PLACES", &plan.shape()).unwrap();
            assert_eq!(places as usize, TOTALS_PLACES, "{plan}");
            assert!(plan.warps as usize <= MOST_TILE_WARPS, "{plan}");
        }
    }

    #[test]
    fn experts_get_one_size_of_blocks_for_both_products() {
        let products = [((v1(4096), 28672), INT4), ((v1(14336), 4096), INT4)];
        let choose = |rows| ManyRows::choose_experts(HOPPER, rows, 8, products, 132).unwrap();
        assert_eq!(choose(4.0), None);
        let [w13, w2] = choose(64.0).unwrap();
        // One block holds most experts' rows.
        assert!(w13.rows == w2.rows && (80..=128).contains(&w13.rows), "{w13:?} {w2:?}");
        let [w13, w2] = choose(1024.0).unwrap();
        assert!(w13.rows == w2.rows && w13.rows >= 128, "{w13:?} {w2:?}");
    }
}
