//! How a product is dealt out to thread blocks and warps. No bit of a result depends on it.

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
    /// Chunks of k, and so warps, of a thread block: 8; or 4, and two thread blocks form a cluster.
    pub warps: u32,
    /// Stages of 64 k that each warp keeps in flight, with the one it works on: 2 to 16.
    pub stages: u32,
}

/// Stages beyond which more of them did not help.
const MOST_STAGES: u32 = 8;

/// Value of a macro.
fn value(form: &[Define], name: &str) -> u32 {
    form.iter().find(|define| define.0 == name).map_or(0, |define| define.1)
}

impl Tiling {
    /// What [`marlin_gemm`](super::marlin_gemm) takes on a device of that architecture for `size_m`
    /// rows and a weight of that form (`BITS`, `HAS_ZERO`, `GROUPS`).
    pub(super) fn choose(arch: Arch, size_m: usize, form: &[Define]) -> Self {
        let shared = arch.shared_memory();
        // Clusters came with 9.0.
        let warps = if arch.compute_capability >= (9, 0) { 4 } else { 8 };
        let mut m_tiles = match size_m {
            0..=8 => 1,
            9..=16 => 2,
            17..=32 => 4,
            _ => 8,
        };
        loop {
            let tiling = |stages| Self { m_tiles, warps, stages };
            let stage = tiling(1).ring_bytes(form);
            // Two thread blocks on a multiprocessor where they fit; each takes 1 KiB by itself.
            let stages = [shared / 2 - 1024, shared].map(|bytes| (bytes / stage).min(MOST_STAGES));
            match stages {
                [two, _] if two >= 3 => return tiling(two),
                [_, one] if one >= 2 || m_tiles == 1 => return tiling(one.max(2)),
                _ => m_tiles /= 2,
            }
        }
    }

    /// Rows that a thread block computes.
    pub(super) fn rows(self) -> u32 {
        self.m_tiles * 8
    }

    /// Thread blocks that share the chunks of k.
    pub(crate) fn ranks(self) -> u32 {
        Schedule::CANONICAL_CHUNKS as u32 / self.warps
    }

    /// The macros.
    pub(super) fn defines(self) -> [Define; 3] {
        [("M_TILES", self.m_tiles), ("WARPS", self.warps), ("STAGES", self.stages)]
    }

    /// Fails unless the kernel has this tiling, and the device clusters where it needs them.
    pub(super) fn validate(self, device: &Device) -> Result<(), AccelError> {
        let known = matches!(self.m_tiles, 1 | 2 | 4 | 8)
            && matches!(self.warps, 4 | 8)
            && (2..=16).contains(&self.stages);
        let clusters = self.warps == 8 || device.compute_capability() >= (9, 0);
        if known && clusters {
            return Ok(());
        }
        let expected = "1, 2, 4 or 8 eights of rows; 8 warps, from capability 9.0 on also 4; 2 to 16 \
                        stages";
        Err(AccelError::argument(&ROW, "tiling", format!("{self:?}"), expected))
    }

    /// Shared memory of the stages of all warps: `RING_BYTES` of each in the source.
    fn ring_bytes(self, form: &[Define]) -> u32 {
        let groups = value(form, "GROUPS");
        let weights = 64 * 64 * value(form, "BITS") / 8;
        let scales = groups * 128;
        let zeros = value(form, "HAS_ZERO") * groups * 32;
        let x = self.rows() * 128;
        self.warps * self.stages * (weights + scales + zeros + x)
    }

    /// Dynamic shared memory of a thread block: the stages, or the partial sums in their place.
    pub(super) fn shared_bytes(self, form: &[Define]) -> u32 {
        let sums = self.warps * self.rows() * 68 * 4;
        self.ring_bytes(form).max(sums)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_architecture_gets_a_tiling_that_fits_its_shared_memory() {
        for capability in [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)] {
            let arch = Arch::of_device(capability);
            for form in super::super::forms() {
                for size_m in [1, 8, 9, 16, 17, 32, 33, 64, 4096] {
                    let tiling = Tiling::choose(arch, size_m, &form);
                    let context = format!("{arch} {form:?} {size_m}: {tiling:?}");
                    assert!(tiling.shared_bytes(&form) <= arch.shared_memory(), "{context}");
                    assert!((2..=8).contains(&tiling.stages), "{context}");
                    assert_eq!(tiling.ranks() * tiling.warps, 8, "{context}");
                }
            }
        }
    }

    #[test]
    fn few_rows_get_small_tiles() {
        let form = [("BITS", 4), ("HAS_ZERO", 0), ("GROUPS", 1)];
        let hopper = Arch::of_device((9, 0));
        let tiles = [1, 8, 9, 17, 64].map(|m| Tiling::choose(hopper, m, &form).m_tiles);
        assert_eq!(tiles, [1, 1, 2, 4, 8]);
    }
}
