//! Errors of schedules.

/// A schedule that cannot be read, or does not fit its product.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ScheduleError {
    /// The JSON is malformed, has a key or name that is unknown, or lacks a key.
    #[error("schedule key `{key}`: {problem}")]
    Json {
        /// The key, with dots; `.` for the whole.
        key: String,
        /// The parser's message.
        problem: String,
    },
    /// A value outside its domain.
    #[error("schedule key `{key}`: found {found}, expected {expected}")]
    Value {
        /// The key, with dots.
        key: String,
        /// Value found.
        found: String,
        /// Values expected.
        expected: String,
    },
    /// A unit that does not divide the product's K.
    #[error(
        "schedule key `unit.size_k`: found {found}, expected a divisor of the weight's size_k {size_k}"
    )]
    UnitK {
        /// `size_k` of the unit.
        found: usize,
        /// K of the weight.
        size_k: usize,
    },
}

impl ScheduleError {
    pub(super) fn value(
        key: impl Into<String>,
        found: impl ToString,
        expected: impl ToString,
    ) -> Self {
        Self::Value { key: key.into(), found: found.to_string(), expected: expected.to_string() }
    }
}

impl From<ScheduleError> for crate::Error {
    fn from(error: ScheduleError) -> Self {
        Self::module(error)
    }
}
