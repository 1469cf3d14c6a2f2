//! Errors of quantization configs, one variant per failure.

use super::limits::MAX_STEPS;

/// A malformed or refused configuration.
///
/// Keys are paths inside the config: `config_groups.group_0.weights.num_bits`.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A key is absent.
    #[error("config key `{key}` is missing")]
    MissingKey {
        /// The key.
        key: String,
    },
    /// A value has the wrong JSON type.
    #[error("config key `{key}`: found {found}, expected {expected}")]
    WrongType {
        /// The key.
        key: String,
        /// JSON type found, with the value when it is short.
        found: String,
        /// JSON type expected.
        expected: &'static str,
    },
    /// A value of the right type outside its domain.
    #[error("config key `{key}`: found {found}, expected {expected}")]
    BadValue {
        /// The key.
        key: String,
        /// Value found.
        found: String,
        /// Values expected.
        expected: String,
    },
    /// A key that upstream's strict models refuse.
    #[error("config key `{key}` is unknown, expected one of {expected}")]
    UnknownKey {
        /// The key.
        key: String,
        /// Known keys.
        expected: String,
    },
    /// A `quant_method` that is none of the known families.
    #[error("quant_method `{method}` is unknown, expected one of {expected}")]
    UnknownMethod {
        /// The method found.
        method: String,
        /// Known methods.
        expected: String,
    },
    /// A (bits, sym) pair without a weight type (upstream's `TYPE_MAP` has no such row).
    #[error("{context}: no weight type for bits={bits}, sym={symmetric}; expected {expected}")]
    UnsupportedType {
        /// Which config or rule asks for it.
        context: String,
        /// Bits per weight.
        bits: i64,
        /// Whether the weights are symmetric.
        symmetric: bool,
        /// Pairs that exist.
        expected: &'static str,
    },
    /// A regular expression that Python would refuse, or that needs a feature outside the
    /// supported part of its syntax.
    #[error("rule `{rule}` is not a valid regular expression: {reason}")]
    InvalidPattern {
        /// The rule as written in the config.
        rule: String,
        /// What is wrong with it.
        reason: String,
    },
    /// Matching a rule against one name takes more steps than are allowed.
    #[error("rule `{rule}` needs more than {MAX_STEPS} steps to match `{module}`")]
    PatternTooCostly {
        /// The rule as written in the config.
        rule: String,
        /// Module name it was matched against.
        module: String,
    },
    /// The rules of a config together exceed a limit.
    #[error("at rule `{rule}` the rules need more than {limit} {what} together")]
    PatternBudget {
        /// The rule that passes the limit.
        rule: String,
        /// What is counted.
        what: &'static str,
        /// The limit.
        limit: u64,
    },
    /// The shards of a fused layer would be treated differently.
    #[error("fused layer `{module}`: some but not all of its shards ({shards}) are {what}")]
    MixedShards {
        /// Name of the fused layer.
        module: String,
        /// Names of its shards.
        shards: String,
        /// What only some of them are (`ignored`, `quantized`, ...).
        what: &'static str,
    },
    /// The projections of one MoE layer, or two groups with the same target, disagree.
    #[error("conflicting schemes for `{subject}`: {reason}")]
    Conflict {
        /// Module or target.
        subject: String,
        /// The contradicting parts.
        reason: String,
    },
    /// Quantization arguments that match no scheme.
    #[error("no scheme for `{module}`: {reason}")]
    NoScheme {
        /// Module asked about.
        module: String,
        /// The arguments.
        reason: String,
    },
    /// A combination of well-formed values that upstream's constructors refuse.
    #[error("{what} is refused: {reason}")]
    Refused {
        /// The combination.
        what: String,
        /// Why.
        reason: String,
    },
}

impl ConfigError {
    /// [`Self::BadValue`] with its parts rendered.
    pub(crate) fn bad(
        key: impl Into<String>,
        found: impl std::fmt::Display,
        expected: impl Into<String>,
    ) -> Self {
        Self::BadValue { key: key.into(), found: found.to_string(), expected: expected.into() }
    }

    /// Whether the error concerns the module that was asked about and no other.
    pub const fn is_of_module(&self) -> bool {
        matches!(
            self,
            Self::UnsupportedType { .. }
                | Self::MixedShards { .. }
                | Self::NoScheme { .. }
                | Self::Refused { .. }
        )
    }

    /// [`Self::Refused`].
    pub(crate) fn refused(what: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Refused { what: what.into(), reason: reason.into() }
    }
}

/// Result of parsing and asking a config.
pub type ConfigResult<T> = std::result::Result<T, ConfigError>;

impl From<ConfigError> for crate::Error {
    fn from(error: ConfigError) -> Self {
        Self::module(error)
    }
}
