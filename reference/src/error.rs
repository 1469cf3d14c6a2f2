//! What can be wrong with an input, one variant per failure.
//!
//! Every variant names the tensor or key, what was found and what was expected. Modules with
//! failures of their own (cases, containers, layers, schedules) define their errors themselves and
//! convert them to [`Error::Module`], so this file imports none of them.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use crate::dtype::DType;

/// Result of the reference's fallible functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A refused input.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A tensor has another shape than its role demands.
    #[error("tensor `{tensor}`: found shape {found:?}, expected {expected}")]
    Shape {
        /// Tensor name.
        tensor: String,
        /// Shape found.
        found: Vec<usize>,
        /// Shape or rule expected.
        expected: String,
    },
    /// A tensor has another element type than its role demands.
    #[error("tensor `{tensor}`: found dtype {found}, expected {expected}")]
    Dtype {
        /// Tensor name.
        tensor: String,
        /// Element type found.
        found: DType,
        /// Element type or types expected.
        expected: String,
    },
    /// An array whose elements are not next to each other in row-major order, where a copy would be
    /// needed to use it.
    #[error(
        "tensor `{tensor}`: found an array {found:?} with other strides, expected row-major order \
         without gaps; copy it with `as_standard_layout`"
    )]
    NotContiguous {
        /// Tensor name.
        tensor: String,
        /// Shape of the array.
        found: Vec<usize>,
    },
    /// Bytes that begin at an address that their element type cannot be read from in place.
    #[error(
        "tensor `{tensor}`: the data is not aligned to {expected} bytes; copy it with `elements`"
    )]
    Unaligned {
        /// Tensor name.
        tensor: String,
        /// Alignment needed, in bytes.
        expected: usize,
    },
    /// A value inside a tensor is outside its domain (NaN scale, `g_idx` out of range, ...).
    #[error("tensor `{tensor}`{}: found {found}, expected {expected}", at(.index))]
    Value {
        /// Tensor name.
        tensor: String,
        /// Index of the first offending element; empty when the whole tensor is meant.
        index: Vec<usize>,
        /// Value found.
        found: String,
        /// Values expected.
        expected: String,
    },
    /// A tensor that the operation or format needs is absent.
    #[error("tensor `{tensor}` is missing: {needed_by} needs it")]
    Missing {
        /// Tensor name.
        tensor: String,
        /// Who needs it.
        needed_by: String,
    },
    /// A tensor whose name is unknown to the operation or format.
    #[error(
        "tensor `{tensor}` is unknown to {context}{}, expected one of {expected}",
        hint(tensor, expected)
    )]
    Unknown {
        /// Tensor name.
        tensor: String,
        /// Operation or format.
        context: String,
        /// Known names.
        expected: String,
    },
    /// A size (K, N, group size, ranks, ...) that the layout or method cannot take.
    #[error("{what}: found {found}, expected {expected}")]
    Size {
        /// Which size of what.
        what: String,
        /// Value found.
        found: String,
        /// Rule broken.
        expected: String,
    },
    /// A combination that upstream refuses too, or that has no meaning.
    #[error("{what} is not supported: {reason}")]
    Unsupported {
        /// The combination.
        what: String,
        /// Why.
        reason: String,
    },
    /// The program panicked. Other cases are not affected.
    #[error("internal error: {message} at {location}; please report it")]
    Internal {
        /// The panic's message.
        message: String,
        /// Where it was raised: `file:line`.
        location: String,
    },
    /// A failure of one module's own kind: [`Error::downcast_ref`] gives it.
    #[error(transparent)]
    Module(#[from] ModuleError),
}

/// An error that another module of this crate defines: `CaseError`, `ContainerError`,
/// `LayerError`, `ScheduleError`.
///
/// Display, source and equality are those of the error inside.
#[derive(Clone)]
pub struct ModuleError(Arc<dyn Failure>);

/// What [`ModuleError`] needs of the error inside.
trait Failure: std::error::Error + Send + Sync {
    fn as_any(&self) -> &dyn Any;
    fn equals(&self, other: &dyn Any) -> bool;
}

impl<E: std::error::Error + PartialEq + Send + Sync + 'static> Failure for E {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn equals(&self, other: &dyn Any) -> bool {
        other.downcast_ref::<E>().is_some_and(|other| self == other)
    }
}

impl ModuleError {
    /// The error inside, if it is an `E`.
    pub fn downcast_ref<E: std::error::Error + 'static>(&self) -> Option<&E> {
        self.0.as_any().downcast_ref()
    }
}

impl PartialEq for ModuleError {
    fn eq(&self, other: &Self) -> bool {
        self.0.equals(other.0.as_any())
    }
}

impl fmt::Debug for ModuleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl fmt::Display for ModuleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl std::error::Error for ModuleError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source()
    }
}

/// The nearest of the comma-separated `known` names, as a question.
fn hint(found: &str, known: &str) -> String {
    nearest(found, known.split(", "))
        .map_or_else(String::new, |near| format!(" (did you mean `{near}`?)"))
}

/// The longest name that is looked at for a misspelling.
const MAX_MISSPELT: usize = 64;

/// The known name that `found` is most likely a misspelling of.
pub(crate) fn nearest<'k>(found: &str, known: impl Iterator<Item = &'k str>) -> Option<&'k str> {
    // The distance takes time and memory with the product of both lengths.
    if found.len() > MAX_MISSPELT {
        return None;
    }
    let plain = |name: &str| name.replace(['_', '-'], "").to_lowercase();
    let found = plain(found);
    known
        .map(|name| (strsim::damerau_levenshtein(&found, &plain(name)), name))
        .filter(|(distance, name)| distance * 3 <= name.len().max(found.len()))
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, name)| name)
}

fn at(index: &[usize]) -> String {
    if index.is_empty() { String::new() } else { format!(" at {index:?}") }
}

impl Error {
    /// [`Error::Module`] of a module's own error.
    pub(crate) fn module<E>(error: E) -> Self
    where
        E: std::error::Error + PartialEq + Send + Sync + 'static,
    {
        Self::Module(ModuleError(Arc::new(error)))
    }

    /// The module's own error inside [`Error::Module`], if it is an `E`.
    ///
    /// ```
    /// use marlinspike::case::{Case, CaseError};
    /// use marlinspike::container::ContainerError;
    ///
    /// let error = Case::parse(b"nothing").unwrap_err();
    /// assert!(matches!(error.downcast_ref(), Some(ContainerError::Truncated { found: 7, .. })));
    /// assert!(error.downcast_ref::<CaseError>().is_none());
    /// ```
    pub fn downcast_ref<E: std::error::Error + 'static>(&self) -> Option<&E> {
        match self {
            Self::Module(error) => error.downcast_ref(),
            _ => None,
        }
    }

    /// [`Error::Shape`] with the expectation rendered from `expected`.
    pub fn shape(
        tensor: impl Into<String>,
        found: &[usize],
        expected: impl std::fmt::Display,
    ) -> Self {
        Self::Shape { tensor: tensor.into(), found: found.to_vec(), expected: expected.to_string() }
    }

    /// [`Error::Dtype`] with the expectation rendered from `expected`.
    pub fn dtype(
        tensor: impl Into<String>,
        found: DType,
        expected: impl std::fmt::Display,
    ) -> Self {
        Self::Dtype { tensor: tensor.into(), found, expected: expected.to_string() }
    }

    /// [`Error::Value`] at `index`.
    pub fn value(
        tensor: impl Into<String>,
        index: &[usize],
        found: impl std::fmt::Display,
        expected: impl std::fmt::Display,
    ) -> Self {
        Self::Value {
            tensor: tensor.into(),
            index: index.to_vec(),
            found: found.to_string(),
            expected: expected.to_string(),
        }
    }

    /// [`Error::Size`].
    pub fn size(
        what: impl Into<String>,
        found: impl std::fmt::Display,
        expected: impl std::fmt::Display,
    ) -> Self {
        Self::Size { what: what.into(), found: found.to_string(), expected: expected.to_string() }
    }

    /// [`Error::Missing`].
    pub fn missing(tensor: impl Into<String>, needed_by: impl std::fmt::Display) -> Self {
        Self::Missing { tensor: tensor.into(), needed_by: needed_by.to_string() }
    }

    /// [`Error::Unsupported`].
    pub fn unsupported(what: impl std::fmt::Display, reason: impl std::fmt::Display) -> Self {
        Self::Unsupported { what: what.to_string(), reason: reason.to_string() }
    }
}
