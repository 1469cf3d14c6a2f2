//! The operations that can be launched: one row each.

use marlinspike_kernels::Source;

use crate::{
    error::AccelError,
    nvrtc::{Arch, Parameter},
    ops,
};

/// What an operation's result must satisfy against the reference.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Law {
    /// Every bit of every output equals the reference's.
    EqualBits,
}

/// What an operation demands of the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Needs {
    /// Least compute capability (major, minor).
    pub compute_capability: (u32, u32),
}

/// One launched operation.
#[derive(Debug, Clone, Copy)]
pub struct Row {
    /// Upstream's operator name, or this project's where upstream has no operator.
    pub name: &'static str,
    /// Name of the source in [`marlinspike_kernels::SOURCES`].
    pub source: &'static str,
    /// Demands on the device.
    pub needs: Needs,
    /// What the result must satisfy.
    pub law: Law,
    /// The macros of every module that the operation may ask for on a device of that architecture.
    pub variants: fn(Arch) -> Vec<Vec<Parameter>>,
}

impl Row {
    /// The source's text.
    ///
    /// # Errors
    /// [`AccelError::Compile`] where no source of that name is embedded.
    pub fn embedded_source(&self, arch: Arch) -> Result<&'static Source, AccelError> {
        marlinspike_kernels::source(self.source).ok_or_else(|| AccelError::Compile {
            source_name: self.source.into(),
            arch: arch.to_string(),
            reason: "no such source is embedded".into(),
            log: String::new(),
        })
    }
}

static ROWS: &[&Row] = &[
    &ops::repack::ROW,
    &ops::awq::ROW,
    &ops::scales::PERMUTE,
    &ops::scales::INT4_FP8,
    &ops::permute::ROW,
    &ops::permute::EXPERTS,
    &ops::quantize::INT8,
    &ops::quantize::FP8,
    &ops::router::ROW,
    &ops::align::ROW,
    &ops::activation::ROW,
    &ops::sum::ROW,
    &ops::gemm::ROW,
    &ops::gemm::MOE,
    &ops::gemm::many::ROW,
    &ops::gemm::many::MOE,
    &ops::gather::ROW,
    &ops::gemm_a8::INT8,
    &ops::gemm_a8::FP8,
];

/// Every operation that can be launched.
pub fn registry() -> &'static [&'static Row] {
    ROWS
}

/// Every combination of the values that macros may have, the last macro changing fastest.
pub(crate) fn lattice(axes: &[(&'static str, &[u32])]) -> Vec<Vec<Parameter>> {
    axes.iter().fold(vec![Vec::new()], |all, &(name, values)| {
        let with = |before: &Vec<Parameter>, value| {
            let mut parameters = before.clone();
            parameters.push((name, value));
            parameters
        };
        all.iter().flat_map(|before| values.iter().map(|&v| with(before, v))).collect()
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn sources_and_rows_cover_each_other() {
        let sources: BTreeSet<_> = marlinspike_kernels::SOURCES.iter().map(|s| s.name).collect();
        let used: BTreeSet<_> = registry().iter().map(|row| row.source).collect();
        assert_eq!(used, sources);
    }

    #[test]
    fn names_are_unique() {
        let names: BTreeSet<_> = registry().iter().map(|row| row.name).collect();
        assert_eq!(names.len(), registry().len());
    }

    #[test]
    fn no_variant_is_listed_twice() {
        for row in registry() {
            let variants = (row.variants)(Arch::of_device((9, 0)));
            let distinct: BTreeSet<_> = variants.iter().collect();
            assert!(!variants.is_empty() && distinct.len() == variants.len(), "{}", row.name);
        }
    }

    #[test]
    fn a_lattice_has_every_combination_once() {
        let all = lattice(&[("A", &[1, 2]), ("B", &[3]), ("C", &[5, 6])]);
        let values: Vec<Vec<u32>> =
            all.iter().map(|parameters| parameters.iter().map(|d| d.1).collect()).collect();
        assert_eq!(values, [[1, 3, 5], [1, 3, 6], [2, 3, 5], [2, 3, 6]]);
    }
}
