//! The operations that can be launched: one row each.

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
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    /// Upstream's operator name.
    pub name: &'static str,
    /// Name of the source in [`marlinspike_kernels::SOURCES`].
    pub source: &'static str,
    /// Demands on the device.
    pub needs: Needs,
    /// What the result must satisfy.
    pub law: Law,
}

/// Row of [`crate::ops::repack`].
pub(crate) static GPTQ_MARLIN_REPACK: Row = Row {
    name: "gptq_marlin_repack",
    source: "gptq_marlin_repack",
    needs: Needs { compute_capability: (7, 5) },
    law: Law::EqualBits,
};

static ROWS: &[&Row] = &[&GPTQ_MARLIN_REPACK];

/// Every operation that can be launched.
pub fn registry() -> &'static [&'static Row] {
    ROWS
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
}
