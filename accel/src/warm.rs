//! Fills the cache of compiled modules ahead of use; needs NVRTC but no GPU.

use std::collections::HashSet;

use rayon::prelude::*;

use crate::{
    cache::{ModuleCache, Origin},
    error::AccelError,
    nvrtc::{Arch, Nvrtc, Parameter},
    operation::Row,
    parameters::{Codes, Product, Scales},
};

/// One module to compile.
#[derive(Debug, Clone)]
pub struct Job {
    /// The operation that may ask for it.
    pub row: &'static Row,
    /// The architecture it is for.
    pub arch: Arch,
    /// Its parameters.
    pub parameters: Vec<Parameter>,
}

/// Weights whose products packages ship: codes, scales, groups in 64 k.
const COMMON: [(Codes, Scales, u32); 2] =
    [(Codes::Uint4b8, Scales::Bits16, 1), (Codes::E2m1, Scales::E8m0Wide, 2)];

impl Job {
    /// Whether packages ship this module: the steps of a layer of experts in bf16, and its products with integers of 4
    /// bits in groups of 64 and more, or with MXFP4. The others are compiled on first use.
    pub fn is_common(&self) -> bool {
        let value =
            |name| self.parameters.iter().find(|known| known.0 == name).map(|known| known.1);
        let is = |name, expected: &[u32]| value(name).is_none_or(|value| expected.contains(&value));
        let is_known = match self.row.source {
            "marlin_gemm" | "marlin_gemm_wgmma" => COMMON.iter().any(|&(codes, scales, groups)| {
                is("CODES", &[codes as u32])
                    && is("SCALES", &[scales as u32])
                    && is("GROUPS", &[groups])
            }),
            source => source.starts_with("moe_"),
        };
        let whole = [Product::Dense, Product::Experts, Product::ExpertsGateUpHalves];
        is_known
            && is("IS_BF16", &[1])
            && is("HAS_G_IDX", &[0])
            && is("IS_PART", &[0])
            && is("PRODUCT", &whole.map(|product| product as u32))
    }
}

/// Every module that these operations may ask for on these architectures, each once; architectures
/// that lack an operation have none for it.
///
/// # Errors
/// [`AccelError::Constant`]
pub fn jobs(rows: &[&'static Row], archs: &[Arch]) -> Result<Vec<Job>, AccelError> {
    let mut seen = HashSet::new();
    let mut jobs = Vec::new();
    for &arch in archs {
        let has = |row: &&&'static Row| arch.compute_capability >= row.needs.compute_capability;
        for row in rows.iter().filter(has) {
            for parameters in (row.variants)(arch)? {
                if seen.insert((row.source, arch, parameters.clone())) {
                    jobs.push(Job { row, arch, parameters });
                }
            }
        }
    }
    Ok(jobs)
}

/// Compiles modules that the cache lacks, on rayon's threads. Returns the origin of each, in the
/// order of `jobs`.
///
/// # Errors
/// As [`ModuleCache::module`]: the first failure ends the work.
pub fn warm(
    cache: &ModuleCache,
    nvrtc: &Result<Nvrtc, AccelError>,
    jobs: &[Job],
) -> Result<Vec<Origin>, AccelError> {
    jobs.par_iter()
        .map(|Job { row, arch, parameters }| {
            let source = row.embedded_source(*arch)?;
            cache.module(nvrtc, source, *arch, parameters).map(|(_, origin)| origin)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::registry;

    /// Modules of one architecture, and those that are shipped.
    fn counted(capability: (u32, u32)) -> (usize, Vec<Job>) {
        let all = jobs(registry(), &[Arch::of_device(capability)]).unwrap();
        let count = all.len();
        (count, all.into_iter().filter(Job::is_common).collect())
    }

    #[test]
    fn packages_ship_a_small_part_of_the_modules() {
        for capability in [(8, 0), (8, 9), (9, 0)] {
            let (all, common) = counted(capability);
            println!("{capability:?}: {} of {all}", common.len());
            assert!(common.len() >= 10 && common.len() * 10 <= all, "{} of {all}", common.len());
            let sources: HashSet<_> = common.iter().map(|job| job.row.source).collect();
            let needed = ["marlin_gemm", "moe_align_block_size", "moe_activation", "moe_sum"];
            assert!(needed.iter().all(|source| sources.contains(source)), "{sources:?}");
        }
    }
}
