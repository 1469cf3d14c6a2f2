//! The operations that can be launched, one row each.

pub use crate::operation::{Law, Mutant, Needs, Row};
use crate::ops;

static ROWS: &[&Row] = &[
    &ops::repack::ALONG_K,
    &ops::repack::ALONG_N,
    &ops::scales::PERMUTE,
    &ops::scales::INT4_FP8,
    &ops::permute::ROW,
    &ops::permute::EXPERTS,
    &ops::quantize::INT8,
    &ops::quantize::FP8,
    &ops::quantize::FP8_GROUPS,
    &ops::router::ROW,
    &ops::align::ROW,
    &ops::activation::ROW,
    &ops::sum::ROW,
    &ops::gemm::ROW,
    &ops::gemm::MOE,
    &ops::gemm::many::ROW,
    &ops::gemm::many::MOE,
    &ops::gather::ROW,
    &ops::ranks::ROW,
    &ops::ranks::MOE,
    &ops::gemm_a8::INT8,
    &ops::gemm_a8::FP8,
    &ops::gemm_w4a8::ROW,
    &ops::gemm_w4a8::MOE,
    &ops::fp8_gemm::ROW,
    &ops::fp8_gemm::MOE,
];

/// Every operation that can be launched.
pub fn registry() -> &'static [&'static Row] {
    ROWS
}

/// Every wrong kernel, with its operation.
pub fn mutants() -> impl Iterator<Item = (&'static Row, &'static Mutant)> {
    ROWS.iter().flat_map(|&row| row.mutants.iter().map(move |mutant| (row, mutant)))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::nvrtc::Arch;

    #[test]
    fn sources_and_rows_cover_each_other() {
        let sources: BTreeSet<_> = marlinspike_kernels::SOURCES.iter().map(|s| s.name).collect();
        let used: BTreeSet<_> = registry().iter().map(|row| row.source).collect();
        assert_eq!(used, sources);
    }

    #[test]
    fn every_mutant_differs_from_its_source() {
        for (row, mutant) in mutants() {
            let right = marlinspike_kernels::source(row.source).unwrap();
            let wrong = mutant
                .text(right)
                .unwrap_or_else(|| panic!("{}: {:?} does not occur once", row.source, mutant.from));
            assert_ne!(wrong, right.text, "{}", mutant.name);
        }
    }

    #[test]
    fn every_source_has_a_mutant() {
        let mutated: BTreeSet<_> = mutants().map(|(row, _)| row.source).collect();
        let sources: BTreeSet<_> = marlinspike_kernels::SOURCES.iter().map(|s| s.name).collect();
        assert_eq!(mutated, sources);
    }

    #[test]
    fn names_are_unique() {
        let names: BTreeSet<_> = registry().iter().map(|row| row.name).collect();
        assert_eq!(names.len(), registry().len());
    }

    #[test]
    fn no_variant_is_listed_twice() {
        for row in registry() {
            let variants = (row.variants)(Arch::of_device((9, 0))).unwrap();
            let distinct: BTreeSet<_> = variants.iter().collect();
            assert!(!variants.is_empty() && distinct.len() == variants.len(), "{}", row.name);
        }
    }
}
