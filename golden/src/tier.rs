//! How much the slow tests of the workspace try.

use crate::{GoldenError, Result, TIER_VARIABLE};

/// How many seeds, mutations, faults and configurations a slow test tries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Tier {
    /// Without the variable: a plain `cargo test`.
    Plain,
    /// `full`, which `scripts/test` sets.
    Full,
    /// `nightly`: every one.
    Nightly,
}

impl Tier {
    /// The tier that a value of the variable names; without a value, [`Tier::Plain`].
    ///
    /// # Errors
    /// [`GoldenError::Tier`] for any other text.
    pub fn parse(value: &str) -> Result<Self> {
        match value {
            "" => Ok(Self::Plain),
            "full" => Ok(Self::Full),
            "nightly" => Ok(Self::Nightly),
            other => Err(GoldenError::Tier(other.to_owned())),
        }
    }

    /// The tier of this process.
    ///
    /// # Panics
    /// If the variable names none: a test must not try less than it was asked to.
    pub fn current() -> Self {
        let value = std::env::var_os(TIER_VARIABLE).unwrap_or_default();
        Self::parse(&value.to_string_lossy()).unwrap_or_else(|error| panic!("{error}"))
    }

    /// One of three values.
    pub fn pick<T>(self, plain: T, full: T, nightly: T) -> T {
        match self {
            Self::Plain => plain,
            Self::Full => full,
            Self::Nightly => nightly,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_names_a_tier_or_is_refused() {
        let tiers = ["", "full", "nightly"].map(|value| Tier::parse(value).unwrap());
        assert_eq!(tiers, [Tier::Plain, Tier::Full, Tier::Nightly]);
        assert_eq!(tiers.map(|tier| tier.pick(1, 2, 3)), [1, 2, 3]);
        for wrong in ["ful", "Full", "full ", "1"] {
            let error = Tier::parse(wrong).unwrap_err();
            assert!(matches!(&error, GoldenError::Tier(found) if found == wrong), "{error:?}");
            let message = format!(
                "MARLINSPIKE_TESTS: found `{wrong}`, expected `full`, `nightly` or nothing"
            );
            assert_eq!(error.to_string(), message);
        }
    }
}
