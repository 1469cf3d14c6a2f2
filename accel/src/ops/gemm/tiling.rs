//! How the work of a product is divided among thread blocks and warps. No bit of a result depends on it.

use marlinspike::num::dims::Shape;
use marlinspike::products::schedule::Cut;

use marlinspike_kernels::constant;

use super::{ROW, form::Form};
use crate::{
    device::Device,
    error::AccelError,
    nvrtc::{Arch, Parameter},
    parameters::Memo,
};

/// The source of these parameters.
const SOURCE: &str = "marlin_gemm";

/// The parameters of `marlin_gemm.cu` that only divide the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Tiling {
    /// Eights of rows that a thread block computes: 1, 2, 4 or 8.
    pub m_tiles: u32,
    /// Columns that a thread block computes at once: 64, or 128 or 256 where that divides N.
    pub n_tile: u32,
    /// Columns that a warp computes: 32 or 64.
    pub columns: u32,
    /// Chunks of k that a thread block computes: 1 to 8.
    pub teams: u32,
    /// Thread blocks that share the chunks of k: 1, 2, 4 or 8; more than one form a cluster.
    pub ranks: u32,
    /// Stages of 64 k that each team keeps in flight, with the one it works on: 2 to 16.
    pub stages: u32,
}

/// Sizes of a thread block, as the source states them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    pub(super) threads: u32,
    /// Dynamic shared memory, and more for each row.
    shared_bytes: u32,
    shared_row_bytes: u32,
    /// The largest number of entries whose blocks products with experts find without an alignment kernel.
    direct_entries: u32,
}

static SIZES: Memo<(Tiling, Form), Sizes> = Memo::new();

impl Sizes {
    /// Dynamic shared memory of a thread block of `rows` rows.
    pub(super) fn shared_bytes(self, rows: usize) -> u32 {
        let rows = u32::try_from(rows).unwrap_or(u32::MAX);
        self.shared_bytes.saturating_add(self.shared_row_bytes.saturating_mul(rows))
    }
}

/// Quarters of a block of 64 columns for each multiprocessor, of all experts together;
/// none where 128 does not divide N.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Width(usize);

impl Width {
    /// One of each range that tilings differ by.
    pub(super) const ALL: [Self; 6] =
        [Self(0), Self(3), Self(8), Self(12), Self(20), Self(Self::WIDE)];
    const WIDE: usize = 32;

    /// The width of `experts` products of `size_n` columns each.
    pub(super) fn new(size_n: usize, experts: usize, multiprocessors: u32) -> Self {
        if !size_n.is_multiple_of(128) {
            return Self(0);
        }
        let blocks = size_n / 64 * experts;
        Self((4 * blocks / multiprocessors as usize).min(Self::WIDE))
    }
}

/// One cut for each number of chunks and [`Length`]. Version 2 of the canonical schedule adds those of ranks: up to 4
/// chunks, longer than version 1 has.
pub(super) fn cuts() -> impl Iterator<Item = Cut> {
    let v1 = [256, 512, 768, 1024, 1280, 1536, 1792, 2048, 2304, 2688, 4096, 4480, 8192];
    let of_chunks = |chunks, chunk| Cut { size_k: chunks * chunk, leaf: chunk, chunk };
    let longer = (1..=4).flat_map(move |n| [512, 1024].map(|k| of_chunks(n, k)));
    v1.into_iter().map(Cut::version_1).chain(longer)
}

/// k of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Length {
    /// 256: four stages.
    Short,
    /// 384 or 512.
    Middle,
    Long,
}

impl Length {
    fn new(chunk: usize) -> Self {
        match chunk {
            0..=256 => Self::Short,
            257..=512 => Self::Middle,
            _ => Self::Long,
        }
    }
}

impl Tiling {
    /// The tiling of [`marlin_gemm`](super::marlin_gemm) for `size_m` rows, k in those chunks, and a weight of
    /// that form; `paired`: a thread block takes 64 columns of gate and 64 of up.
    ///
    /// From 9.0 on, these were the fastest of some 50 each on an H200, or close to it: over K x N of
    /// 4096 x 4096, 14336 x 4096, 4096 x 28672, 8192 x 57344, and over the three expert layers of
    /// `docs/src/results/h200.md`. Narrow products lack warps, so that a warp takes half of 64 columns. Where there
    /// are hardly more thread blocks than multiprocessors, stages for more than half of the shared memory
    /// keep two from starting on one: a kernel that starts early finds room on few multiprocessors first.
    pub(super) fn choose(
        arch: Arch,
        size_m: usize,
        cut: Cut,
        width: Width,
        paired: bool,
        form: Form,
    ) -> Result<Self, AccelError> {
        use Length::{Long, Short};
        let chunks = cut.chunks() as u32;
        let of = |[m_tiles, n_tile, columns, teams, stages]: [u32; 5]| {
            let teams = teams.min(chunks);
            let ranks = chunks.div_ceil(teams).next_power_of_two();
            let (n_tile, columns) = if paired { (128, 64) } else { (n_tile, columns) };
            Self { m_tiles, n_tile, columns, teams, ranks, stages }
        };
        let (Width(width), length) = (width, Length::new(cut.chunk));
        let mut tiling = of(match (size_m, width, length) {
            _ if !arch.has_clusters() => match size_m {
                0..=8 => [1, 64, 64, 8, 4],
                9..=16 => [2, 64, 64, 8, 3],
                _ => [4, 64, 32, 8, 3],
            },
            (0..=8, 0..=2, _) if paired => [1, 128, 64, 4, 3],
            (0..=8, 3..=7, Long) if paired => [1, 128, 64, 8, 3],
            (0..=8, 3..=7, _) if paired => [1, 128, 64, 8, 2],
            (0..=8, 8..=31, Long) if paired => [1, 128, 64, 8, 2],
            (0..=8, 8..=31, _) if paired => [1, 128, 64, 4, 2],
            (0..=8, _, _) if paired => [1, 128, 64, 8, 2],
            (0..=8, 0..=2, _) => [1, 64, 32, 4, 8],
            (0..=8, 3..=7, Long) => [1, 128, 32, 4, 6],
            (0..=8, 3..=7, Short) => [1, 128, 32, 4, 3],
            (0..=8, 3..=7, _) => [1, 64, 32, 4, 5],
            (0..=8, 8..=11, Long) => [1, 128, 64, 4, 4],
            (0..=8, 20..=31, Long) => [1, 64, 64, 8, 4],
            (0..=8, 8..=31, _) => [1, 128, 64, 8, 2],
            (0..=8, _, _) => [1, 64, 64, 8, 2],
            (9..=16, 8.., Long) if !paired => [2, 128, 64, 4, 3],
            (9..=16, 8.., _) => [2, 128, 64, 8, 2],
            (9..=16, _, _) => [2, 64, 32, 4, 4],
            (17..=32, 8.., _) => [4, 128, 64, 8, 2],
            (17..=32, _, _) => [4, 64, 32, 4, 3],
            (33..=96, 8.., _) => [4, 128, 64, 4, 2],
            (33..=96, _, _) => [4, 64, 32, 8, 4],
            (97.., _, _) => [8, 64, 32, 8, 2],
        });
        let clusters = arch.has_clusters();
        while tiling.sizes(form)?.shared_bytes(tiling.rows()) > arch.shared_memory() {
            match tiling {
                Self { stages: 3.., .. } => tiling.stages -= 1,
                Self { m_tiles: 2.., .. } => tiling.m_tiles /= 2,
                Self { teams: 2.., .. } if clusters => {
                    tiling.teams = tiling.teams.next_power_of_two() / 2;
                    tiling.ranks = chunks.div_ceil(tiling.teams).next_power_of_two();
                }
                _ => break,
            }
        }
        Ok(tiling)
    }

    /// Rows that a thread block computes.
    pub fn rows(self) -> usize {
        self.m_tiles as usize * 8
    }

    /// Sizes of a thread block for a weight of that form.
    ///
    /// # Errors
    /// [`AccelError::Constant`]
    pub(super) fn sizes(self, form: Form) -> Result<Sizes, AccelError> {
        SIZES.get((self, form), || {
            let parameters = [&form.parameters()[..], &self.parameters()].concat();
            let size = |name| constant(SOURCE, name, &parameters);
            Ok::<_, AccelError>(Sizes {
                threads: size("THREADS")?,
                shared_bytes: size("SHARED_BYTES")?,
                shared_row_bytes: size("SHARED_ROW_BYTES")?,
                direct_entries: size("DIRECT_ENTRIES")?,
            })
        })
    }

    /// Whether products with experts in this tiling find the blocks of `entries` entries themselves.
    ///
    /// # Errors
    /// [`AccelError::Constant`]
    pub(crate) fn is_direct(self, form: Form, entries: usize) -> Result<bool, AccelError> {
        Ok(self.m_tiles == 1 && entries <= self.sizes(form)?.direct_entries as usize)
    }

    /// The parameters of the source.
    pub(super) fn parameters(self) -> [Parameter; 6] {
        [
            ("M_TILES", self.m_tiles),
            ("N_TILE", self.n_tile),
            ("COLUMNS", self.columns),
            ("TEAMS", self.teams),
            ("RANKS", self.ranks),
            ("STAGES", self.stages),
        ]
    }

    /// Returns an error unless the kernel has this tiling, the device has clusters where it needs them, columns of
    /// thread blocks make up N, and teams take all chunks of K.
    pub(super) fn validate(
        self,
        device: &Device,
        shape: Shape,
        cut: Cut,
    ) -> Result<(), AccelError> {
        let known = matches!(self.m_tiles, 1 | 2 | 4 | 8)
            && matches!((self.n_tile, self.columns), (64 | 128, 32 | 64) | (256, 64))
            && (1..=8).contains(&self.teams)
            && matches!(self.ranks, 1 | 2 | 4 | 8)
            && self.teams * self.ranks <= 8
            && (2..=16).contains(&self.stages);
        let clusters = self.ranks == 1 || device.arch().has_clusters();
        let chunks = cut.chunks() as u32;
        let whole = shape.size_n.is_multiple_of(self.n_tile as usize);
        if known && clusters && whole && self.teams * self.ranks >= chunks {
            return Ok(());
        }
        let expected = format!(
            "1, 2, 4 or 8 eights of rows; 64 or 128 columns by 32 or 64, or 256 by 64, dividing {}; 1 to \
             8 teams and, from capability 9.0 on, 1, 2, 4 or 8 ranks, for {chunks} chunks and at most 8; \
             2 to 16 stages",
            shape.size_n
        );
        Err(ROW.refuse("tiling", format!("{self:?}"), expected))
    }
}

#[cfg(test)]
mod tests {
    use marlinspike::num::scalar::ScalarType;
    use marlinspike::products::schedule::Split;

    use super::*;
    use crate::parameters::{Codes, Scales};

    #[test]
    fn every_architecture_gets_a_tiling_that_fits_its_shared_memory() {
        for capability in [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)] {
            let arch = Arch::of_device(capability);
            for form in Form::all_halves(ScalarType::BFLOAT16) {
                for size_m in [1, 8, 9, 16, 17, 32, 33, 64, 4096] {
                    for cut in cuts() {
                        let all = Width::ALL.into_iter().flat_map(|w| [(w, false), (w, true)]);
                        // Without clusters products have no activation.
                        let clusters = arch.has_clusters();
                        for (width, paired) in all.filter(|&(_, paired)| clusters || !paired) {
                            let tiling =
                                Tiling::choose(arch, size_m, cut, width, paired, form).unwrap();
                            let sizes = tiling.sizes(form).unwrap();
                            let context = format!("{arch} {form:?} {size_m} {cut:?}: {tiling:?}");
                            assert!(
                                sizes.shared_bytes(tiling.rows()) <= arch.shared_memory(),
                                "{context}"
                            );
                            assert!(tiling.stages >= 2 && sizes.threads <= 1024, "{context}");
                            let (all, chunks) = (tiling.ranks * tiling.teams, cut.chunks() as u32);
                            assert!((chunks..=8).contains(&all), "{context}");
                            assert!(clusters || tiling.ranks == 1, "{context}");
                            assert!(!paired || tiling.n_tile == 128, "{context}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn few_rows_get_small_tiles() {
        let (codes, scales) = (Codes::Uint4b8, Scales::Bits16);
        let form = Form { codes, scales, groups: 1, has_g_idx: false };
        let hopper = Arch::of_device((9, 0));
        let narrow = Width::new(4096, 1, 132);
        let tiles = [1, 8, 9, 17, 64, 128].map(|size_m| {
            let cut = Cut::version_1(4096);
            Tiling::choose(hopper, size_m, cut, narrow, false, form).unwrap().m_tiles
        });
        assert_eq!(tiles, [1, 1, 2, 4, 4, 8]);
    }

    #[test]
    fn widths_count_blocks_of_columns_for_each_multiprocessor() {
        // 64 columns for each of 132 multiprocessors are 8448.
        let widths = [6272, 8448, 8576, 16896, 28672, 28736].map(|n| Width::new(n, 1, 132).0);
        assert_eq!(widths, [2, 4, 4, 8, 13, 0]);
        assert_eq!(Width::new(4096, 5, 132), Width(9));
        assert_eq!(Width::new(4096, 128, 132), Width(32));
    }

    #[test]
    fn every_k_has_chunks_and_length_of_one_of_few() {
        let of = |cut: Cut| (cut.chunks(), Length::new(cut.chunk));
        let few: Vec<_> = cuts().map(of).collect();
        for size_k in (64..30_000).step_by(64) {
            let ranks = [1, 2, 4, 8].into_iter().filter_map(|n| Split::new(size_k, 0, n).ok());
            let mut all = ranks.map(Cut::version_2).chain([Cut::version_1(size_k)]);
            assert!(all.all(|cut| few.contains(&of(cut))), "{size_k}");
        }
        // Without duplicates.
        assert!((1..few.len()).all(|i| !few[..i].contains(&few[i])));
    }
}
