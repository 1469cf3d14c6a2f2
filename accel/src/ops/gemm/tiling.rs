//! How a product is dealt out to thread blocks and warps. No bit of a result depends on it.

use marlinspike::dims::Shape;
use marlinspike::gemm::schedule::Schedule;

use super::ROW;
use crate::{
    device::Device,
    error::AccelError,
    nvrtc::{Arch, Define},
};

/// The macros of `marlin_gemm.cu` that only deal out work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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

/// Entries among which a product with experts finds its blocks itself: `DIRECT_ENTRIES` of
/// `routing.cuh`.
const DIRECT_ENTRIES: usize = 32;

/// How many blocks of 64 columns there are for a device, of all experts together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Width {
    /// Fewer than three for four multiprocessors, or 128 does not divide N.
    Narrow,
    /// Fewer than two for each multiprocessor.
    Middle,
    Wide,
}

impl Width {
    pub(super) const ALL: [Self; 3] = [Self::Narrow, Self::Middle, Self::Wide];

    /// Of `experts` products of `size_n` columns each.
    pub(super) fn new(size_n: usize, experts: usize, multiprocessors: u32) -> Self {
        let blocks = size_n / 64 * experts;
        match 4 * blocks / multiprocessors as usize {
            _ if !size_n.is_multiple_of(128) => Self::Narrow,
            0..=2 => Self::Narrow,
            3..=7 => Self::Middle,
            _ => Self::Wide,
        }
    }
}

/// Value of a macro.
pub(super) fn value(form: &[Define], name: &str) -> u32 {
    form.iter().find(|define| define.0 == name).map_or(0, |define| define.1)
}

/// Bytes of a scale.
pub(super) fn scale_bytes(form: &[Define]) -> u32 {
    if value(form, "SCALE_TYPE") == 0 { 2 } else { 1 }
}

impl Tiling {
    /// What [`marlin_gemm`](super::marlin_gemm) takes for `size_m` rows, a K of so many chunks and a
    /// weight of that form (`BITS`, `HAS_ZERO`, `GROUPS`); `paired`: a thread block takes 64 columns
    /// of gate and 64 of up.
    ///
    /// From 9.0 on, these were the fastest of some 50 each on an H200, or close to it: over K x N of
    /// 4096 x 4096, 14336 x 4096 (narrow), 4096 x 28672, 8192 x 57344 (wide), and over the three
    /// expert layers of `docs/cuda.md`. Narrow products lack warps, so that a warp takes half of 64
    /// columns; wide ones rather lack room for stages.
    pub(super) fn choose(
        arch: Arch,
        size_m: usize,
        chunks: u32,
        width: Width,
        paired: bool,
        form: &[Define],
    ) -> Self {
        use Width::{Middle, Narrow, Wide};
        let of = |[m_tiles, n_tile, columns, teams, stages]: [u32; 5]| {
            let teams = teams.min(chunks);
            let ranks = chunks.div_ceil(teams).next_power_of_two();
            let (n_tile, columns) = if paired { (128, 64) } else { (n_tile, columns) };
            Self { m_tiles, n_tile, columns, teams, ranks, stages }
        };
        let clusters = arch.has_clusters();
        let mut tiling = of(match (clusters, width, size_m) {
            (true, _, 97..) => [8, 64, 32, 8, 2],
            (true, Wide, 0..=8) if paired => [1, 128, 64, 4, 2],
            (true, Wide, 0..=8) => [1, 64, 64, 8, 2],
            (true, Wide, 9..=16) => [2, 128, 64, 8, 2],
            (true, Wide, 17..=32) => [4, 128, 64, 8, 2],
            (true, Wide, _) => [4, 128, 64, 4, 2],
            (true, Middle, 0..=8) if paired => [1, 128, 64, 8, 2],
            (true, Middle, 0..=8) => [1, 128, 32, 4, 4],
            (true, Narrow, 0..=8) if paired => [1, 128, 64, 4, 3],
            (true, Narrow, 0..=8) => [1, 64, 32, 4, 6],
            (true, _, 9..=16) => [2, 64, 32, 4, 4],
            (true, _, 17..=32) => [4, 64, 32, 4, 4],
            (true, _, _) => [4, 64, 32, 8, 4],
            (false, _, 0..=8) => [1, 64, 64, 8, 4],
            (false, _, 9..=16) => [2, 64, 64, 8, 3],
            (false, _, _) => [4, 64, 32, 8, 3],
        });
        while tiling.shared_bytes(form) > arch.shared_memory() {
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
        tiling
    }

    /// Rows that a thread block computes.
    pub fn rows(self) -> usize {
        self.m_tiles as usize * 8
    }

    /// Chunks of the canonical schedule for that K.
    pub(super) fn chunks(size_k: usize) -> u32 {
        size_k.div_ceil(Schedule::canonical_chunk(size_k)) as u32
    }

    /// Threads of a thread block.
    pub(crate) fn threads(self) -> u32 {
        self.teams * (self.n_tile / self.columns) * 32
    }

    /// Whether products with experts in this tiling find the blocks of so many entries themselves.
    pub(crate) fn is_direct(self, entries: usize) -> bool {
        self.m_tiles == 1 && entries <= DIRECT_ENTRIES
    }

    /// The macros.
    pub(super) fn defines(self) -> [Define; 6] {
        [
            ("M_TILES", self.m_tiles),
            ("N_TILE", self.n_tile),
            ("COLUMNS", self.columns),
            ("TEAMS", self.teams),
            ("RANKS", self.ranks),
            ("STAGES", self.stages),
        ]
    }

    /// Fails unless the kernel has this tiling, the device clusters where it needs them, columns of
    /// thread blocks make up N, and teams take all chunks of K.
    pub(super) fn validate(self, device: &Device, shape: Shape) -> Result<(), AccelError> {
        let known = matches!(self.m_tiles, 1 | 2 | 4 | 8)
            && matches!((self.n_tile, self.columns), (64 | 128, 32 | 64) | (256, 64))
            && (1..=8).contains(&self.teams)
            && matches!(self.ranks, 1 | 2 | 4 | 8)
            && self.teams * self.ranks <= 8
            && (2..=16).contains(&self.stages);
        let clusters = self.ranks == 1 || device.compute_capability() >= (9, 0);
        let chunks = Self::chunks(shape.size_k);
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
        Err(AccelError::argument(&ROW, "tiling", format!("{self:?}"), expected))
    }

    /// Shared memory of the stages of all teams: `RING_BYTES` of each in the source.
    fn ring_bytes(self, form: &[Define]) -> u32 {
        let (groups, n) = (value(form, "GROUPS"), self.n_tile);
        let weights = 64 * n * value(form, "BITS") / 8;
        let zeros = value(form, "HAS_ZERO") * groups * n / 2;
        let x = self.m_tiles * 8 * 128;
        let scales = groups * n * scale_bytes(form);
        self.teams * self.stages * (weights + scales + zeros + x)
    }

    /// Dynamic shared memory of a thread block: the stages, or the partial sums in their place.
    pub(super) fn shared_bytes(self, form: &[Define]) -> u32 {
        let sums = self.teams * self.m_tiles * 8 * (self.n_tile + 4) * 4;
        self.ring_bytes(form).max(sums)
    }
}

#[cfg(test)]
mod tests {
    use marlinspike::scalar::ScalarType;

    use super::super::kind::Kind;
    use super::*;

    #[test]
    fn every_architecture_gets_a_tiling_that_fits_its_shared_memory() {
        for capability in [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)] {
            let arch = Arch::of_device(capability);
            for form in Kind::forms(ScalarType::BFLOAT16) {
                for size_m in [1, 8, 9, 16, 17, 32, 33, 64, 4096] {
                    for chunks in 1..=8 {
                        let all = Width::ALL.into_iter().flat_map(|w| [(w, false), (w, true)]);
                        // Without clusters products have no activation.
                        let clusters = arch.has_clusters();
                        for (width, paired) in all.filter(|&(_, paired)| clusters || !paired) {
                            let tiling = Tiling::choose(arch, size_m, chunks, width, paired, &form);
                            let context = format!("{arch} {form:?} {size_m} {chunks}: {tiling:?}");
                            assert!(
                                tiling.shared_bytes(&form) <= arch.shared_memory(),
                                "{context}"
                            );
                            assert!(tiling.stages >= 2 && tiling.threads() <= 1024, "{context}");
                            let all = tiling.ranks * tiling.teams;
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
        let form = [("BITS", 4), ("HAS_ZERO", 0), ("GROUPS", 1)];
        let hopper = Arch::of_device((9, 0));
        let tiles = [1, 8, 9, 17, 64, 128]
            .map(|size_m| Tiling::choose(hopper, size_m, 8, Width::Narrow, false, &form).m_tiles);
        assert_eq!(tiles, [1, 1, 2, 4, 4, 8]);
        let widths = [6272, 6400, 16768, 16896, 28736].map(|n| Width::new(n, 1, 132));
        use Width::{Middle, Narrow, Wide};
        assert_eq!(widths, [Narrow, Middle, Middle, Wide, Narrow]);
        assert_eq!(Width::new(4096, 5, 132), Wide);
    }
}
