//! The definition of an operation: source, required device, law, kernel arguments and mutants.

use marlinspike_kernels::Source;

use crate::{
    error::AccelError,
    nvrtc::{Arch, Parameter},
};

/// The relation of an operation's result to the reference's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Law {
    /// Every bit of every output equals the reference's.
    EqualBits,
}

/// The device that an operation requires.
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
    /// The required device.
    pub needs: Needs,
    /// The relation of the result to the reference's.
    pub law: Law,
    /// The parameters of every module that the operation may use on that architecture;
    /// [`AccelError::Constant`] if a constant of the source cannot be evaluated.
    pub variants: fn(Arch) -> Result<Vec<Vec<Parameter>>, AccelError>,
    /// Bytes of each argument of the source's entry point.
    pub arguments: &'static [usize],
    /// Wrong kernels, each rejected by a law. If operations share a source, the first row lists
    /// them.
    pub mutants: &'static [Mutant],
}

/// A wrong kernel for tests of the laws: one change of a source's text, made before it is compiled.
/// Every index stays inside the buffers, so that a launch is safe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mutant {
    /// What is wrong.
    pub name: &'static str,
    /// The correct text, which occurs once in the source.
    pub from: &'static str,
    /// Its wrong replacement.
    pub to: &'static str,
}

impl Mutant {
    /// A change of `from` to `to`.
    pub const fn new(name: &'static str, from: &'static str, to: &'static str) -> Self {
        Self { name, from, to }
    }

    /// The wrong text of `source`; `None` unless `source` holds the text to change exactly once.
    pub fn text(&self, source: &Source) -> Option<String> {
        let is_once = source.text.matches(self.from).count() == 1;
        is_once.then(|| source.text.replacen(self.from, self.to, 1))
    }
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

    /// [`AccelError::Argument`] of this operation.
    pub(crate) fn refuse(
        &self,
        what: &'static str,
        found: impl std::fmt::Display,
        expected: impl std::fmt::Display,
    ) -> AccelError {
        AccelError::Argument {
            operation: self.name,
            what,
            found: found.to_string(),
            expected: expected.to_string(),
        }
    }
}

/// Every combination of the parameters' values; the last parameter changes fastest.
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
    use super::*;

    #[test]
    fn a_lattice_has_every_combination_once() {
        let all = lattice(&[("A", &[1, 2]), ("B", &[3]), ("C", &[5, 6])]);
        let values: Vec<Vec<u32>> =
            all.iter().map(|parameters| parameters.iter().map(|d| d.1).collect()).collect();
        assert_eq!(values, [[1, 3, 5], [1, 3, 6], [2, 3, 5], [2, 3, 6]]);
    }
}
