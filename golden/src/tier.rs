//! How much the slow tests of the workspace try.

use std::time::{SystemTime, UNIX_EPOCH};

use crate::{GoldenError, Result, SEED_VARIABLE, TIER_VARIABLE};

const SECONDS_OF_A_DAY: u64 = 24 * 60 * 60;

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

    /// The seed of a test: `usual`, or in the nightly tier another one each day. [`SEED_VARIABLE`]
    /// replays a seed that a test has printed.
    ///
    /// # Panics
    /// If the variable is not a number.
    pub fn seed(self, usual: u64) -> u64 {
        let given = std::env::var_os(SEED_VARIABLE).map(|text| text.to_string_lossy().into_owned());
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let seed = self
            .seed_on(usual, now.as_secs() / SECONDS_OF_A_DAY, given.as_deref())
            .unwrap_or_else(|error| panic!("{error}"));
        if seed != usual {
            println!("SEED {seed:#018x}: {SEED_VARIABLE}={seed:#x} repeats it");
        }
        seed
    }

    /// [`Tier::seed`] on a day since 1970, with the variable's text.
    ///
    /// # Errors
    /// [`GoldenError::Seed`] for a text that is not a number.
    pub fn seed_on(self, usual: u64, day: u64, given: Option<&str>) -> Result<u64> {
        if let Some(text) = given {
            let parsed = match text.strip_prefix("0x") {
                Some(hex) => u64::from_str_radix(hex, 16),
                None => text.parse(),
            };
            return parsed.map_err(|_| GoldenError::Seed(text.to_owned()));
        }
        // An odd factor: different days have different seeds.
        Ok(self.pick(usual, usual, usual.wrapping_add(day.wrapping_mul(0x9e37_79b9_7f4a_7c15))))
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
    #[test]
    fn only_nightly_seeds_move_with_the_day() {
        let of = |tier: Tier, day| tier.seed_on(7, day, None).unwrap();
        assert_eq!([of(Tier::Plain, 1), of(Tier::Full, 2)], [7, 7]);
        let nightly: Vec<u64> = (20_000..21_000).map(|day| of(Tier::Nightly, day)).collect();
        let distinct: std::collections::BTreeSet<u64> = nightly.iter().copied().collect();
        assert_eq!(distinct.len(), nightly.len());
        assert_eq!(of(Tier::Nightly, 20_500), nightly[500]);
        for tier in [Tier::Plain, Tier::Nightly] {
            assert_eq!(tier.seed_on(7, 20_000, Some("0xff")).unwrap(), 255);
            assert_eq!(tier.seed_on(7, 20_000, Some("12")).unwrap(), 12);
        }
        let error = Tier::Plain.seed_on(7, 0, Some("0xg")).unwrap_err();
        assert!(matches!(&error, GoldenError::Seed(found) if found == "0xg"), "{error:?}");
    }
}
