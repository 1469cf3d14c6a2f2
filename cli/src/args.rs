//! Parsers of arguments: operations by name, numbers with their range.

use std::fmt::Display;
use std::num::NonZero;
use std::ops::RangeInclusive;
use std::str::FromStr;

use marlinspike::case::{Op, UPSTREAM_NAMES};

/// An operation of cases, by its name or upstream's.
///
/// # Errors
/// The name that was probably meant, or all of them.
pub fn operation(text: &str) -> Result<Op, String> {
    if let Some(op) = Op::from_any_name(text) {
        return Ok(op);
    }
    let own = Op::NAMED.iter().map(|&(name, _)| name);
    let all = own.clone().chain(UPSTREAM_NAMES.iter().map(|(name, _)| *name));
    Err(match nearest(text, all) {
        Some(name) => {
            format!("did you mean `{name}`? `marlinspike schema` lists the operations")
        }
        None => format!("expected one of {}", own.collect::<Vec<_>>().join(", ")),
    })
}

/// The known name that differs from `text` in the fewest letters, at most a third of them.
pub(crate) fn nearest<'n>(text: &str, known: impl Iterator<Item = &'n str>) -> Option<&'n str> {
    let lower = text.to_lowercase();
    let distance = |name: &&str| strsim::damerau_levenshtein(&lower, &name.to_lowercase());
    let name = known.min_by_key(distance)?;
    (3 * distance(&name) <= text.chars().count()).then_some(name)
}

/// Worker threads.
pub const THREADS: RangeInclusive<usize> = 1..=1024;
/// Tensor-parallel or expert-parallel ranks.
pub const RANKS: RangeInclusive<usize> = 1..=4096;
/// Size of an output file, in GB.
pub const SHARD_GB: RangeInclusive<f64> = 1e-6..=1e6;
/// Rows of seeded activations.
pub const TOKENS: RangeInclusive<usize> = 1..=1 << 20;
/// Runs of a layer.
pub const REPEATS: RangeInclusive<usize> = 1..=1_000_000;
/// Case files that one command writes.
pub const CASES: RangeInclusive<u64> = 1..=1_000_000_000;

/// A whole number in `range`.
fn whole<T>(text: &str, range: RangeInclusive<T>) -> Result<T, String>
where
    T: FromStr + PartialOrd + Display,
{
    let parsed = text.parse().ok().filter(|n| range.contains(n));
    parsed.ok_or_else(|| {
        let (least, most) = (range.start(), range.end());
        format!("found {text}, expected a whole number from {least} to {most}")
    })
}

fn nonzero(text: &str, range: RangeInclusive<usize>) -> Result<NonZero<usize>, String> {
    let least = *range.start();
    whole(text, range).map(|n| NonZero::new(n.max(least)).unwrap_or(NonZero::<usize>::MIN))
}

/// A number of threads in [`THREADS`].
///
/// # Errors
/// What was found and the range.
pub fn threads(text: &str) -> Result<NonZero<usize>, String> {
    nonzero(text, THREADS)
}

/// A number of ranks in [`RANKS`].
///
/// # Errors
/// What was found and the range.
pub fn ranks(text: &str) -> Result<usize, String> {
    whole(text, RANKS)
}

/// The index of a rank, from 0.
///
/// # Errors
/// What was found and the range.
pub fn rank(text: &str) -> Result<usize, String> {
    whole(text, 0..=RANKS.end() - 1)
}

/// A size in [`SHARD_GB`].
///
/// # Errors
/// What was found and the range.
pub fn shard_gb(text: &str) -> Result<f64, String> {
    let parsed = text.parse().ok().filter(|gb| SHARD_GB.contains(gb));
    let (least, most) = (SHARD_GB.start(), SHARD_GB.end());
    parsed.ok_or_else(|| format!("found {text}, expected a number from {least} to {most}"))
}

/// A number of tokens in [`TOKENS`].
///
/// # Errors
/// What was found and the range.
pub fn tokens(text: &str) -> Result<usize, String> {
    whole(text, TOKENS)
}

/// A number of runs in [`REPEATS`].
///
/// # Errors
/// What was found and the range.
pub fn repeats(text: &str) -> Result<NonZero<usize>, String> {
    nonzero(text, REPEATS)
}

/// A number of cases in [`CASES`].
///
/// # Errors
/// What was found and the range.
pub fn cases(text: &str) -> Result<u64, String> {
    whole(text, CASES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_have_upstreams_names_and_the_nearest() {
        assert_eq!(operation("marlin_gemm"), operation("linear"));
        for (found, meant) in
            [("linaer", "linear"), ("Moe", "moe"), ("fused_marlin_mo", "fused_marlin_moe")]
        {
            let error = operation(found).unwrap_err();
            assert!(error.starts_with(&format!("did you mean `{meant}`?")), "{error}");
        }
        let error = operation("attention").unwrap_err();
        assert!(error.starts_with("expected one of linear, moe, "), "{error}");
    }

    #[test]
    fn ranges_hold_at_both_ends() {
        assert_eq!(threads("1024").map(NonZero::get), Ok(1024));
        let message = "found 100000, expected a whole number from 1 to 1024";
        assert_eq!(threads("100000"), Err(message.to_owned()));
        for text in ["0", "-1", "", "1.5", "1e3", "99999999999999999999999"] {
            assert!(threads(text).is_err() && ranks(text).is_err() && repeats(text).is_err());
            assert!(tokens(text).is_err() && cases(text).is_err(), "{text}");
        }
        assert_eq!((rank("0"), rank("4095")), (Ok(0), Ok(4095)));
        assert!(rank("4096").is_err() && rank("-1").is_err());
        assert_eq!(shard_gb("0.5"), Ok(0.5));
        for text in ["-1", "0", "nan", "inf", "-inf", "1e7", "five"] {
            let message = shard_gb(text).unwrap_err();
            assert!(message.ends_with("expected a number from 0.000001 to 1000000"), "{message}");
        }
    }
}
