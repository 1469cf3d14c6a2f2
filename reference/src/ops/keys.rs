//! Compares the keys of a config with those that its operation reads. An unread key is an error, so
//! a misspelt `schedule` is never ignored.

use serde_json::{Map, Value};

use super::case::Case;
use super::schema::{CaseError, Reader, hint};
use super::{ALL, Op};

/// Keys for remarks, which every operation allows and none reads.
const REMARKS: &[&str] = &["name", "note", "notes", "comment"];

/// Keys of the check itself, which every operation allows.
const COMMON: &[&str] = &[MIN_POWER];

/// The least power of a pass, in percent.
const MIN_POWER: &str = "min_power";

/// The largest uniform error that a pass may leave unnoticed, as a share, if the config states it.
///
/// # Errors
/// [`CaseError::ConfigValue`] for anything but a number of percent, 0 or more.
pub(crate) fn min_power(op: Op, map: &Map<String, Value>) -> Result<Option<f64>, CaseError> {
    let reader = Reader::new(map, op.name());
    let Some(percent) = reader.number(MIN_POWER)? else { return Ok(None) };
    match percent >= 0.0 {
        true => Ok(Some(percent / 100.0)),
        false => Err(reader.refuse(MIN_POWER, percent, "a number of percent, 0 or more")),
    }
}

impl Case<'_> {
    /// The largest uniform error that a pass may leave unnoticed, as a share, if the file's config
    /// states it (`min_power`, in percent).
    ///
    /// # Errors
    /// [`CaseError::ConfigValue`] for anything but a number, 0 or more.
    pub fn min_power(&self) -> crate::Result<Option<f64>> {
        Ok(min_power(self.op, &self.raw_config)?)
    }
}

/// Returns [`CaseError::UnknownConfigKey`] for a key of `map` that `op` does not read.
pub(crate) fn check(op: Op, map: &Map<String, Value>) -> Result<(), CaseError> {
    min_power(op, map)?;
    let Some(known) = (op.entry().keys_in)(map) else { return Ok(()) };
    let unknown =
        |key: &&String| ![known, COMMON, REMARKS].iter().any(|all| all.contains(&key.as_str()));
    let Some(key) = map.keys().find(unknown) else { return Ok(()) };
    let others: Vec<_> = ALL
        .iter()
        .filter(|entry| (entry.keys)().contains(&key.as_str()))
        .map(|entry| format!("`{}`", entry.op))
        .collect();
    let hint = match others.as_slice() {
        [] => hint(key, known),
        others => format!("operation `{op}` does not read it, {} does", others.join(", ")),
    };
    Err(CaseError::UnknownConfigKey { key: key.clone(), hint })
}
