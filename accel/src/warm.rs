//! Fills the cache of compiled modules ahead of use; needs NVRTC but no GPU.

use std::collections::HashSet;

use rayon::prelude::*;

use crate::{
    cache::{ModuleCache, Origin},
    error::AccelError,
    nvrtc::{Arch, Nvrtc, Parameter},
    operation::Row,
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
