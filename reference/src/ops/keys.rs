//! Compares the keys of a config with those that its operation reads. An unread key is an error, so
//! a misspelt `schedule` is never ignored.

use serde_json::{Map, Value};

use super::schema::{CaseError, hint};
use super::{ALL, Op};

/// Keys for remarks, which every operation allows and none reads.
const REMARKS: &[&str] = &["name", "note", "notes", "comment"];

/// Returns [`CaseError::UnknownConfigKey`] for a key of `map` that `op` does not read.
pub(crate) fn check(op: Op, map: &Map<String, Value>) -> Result<(), CaseError> {
    let Some(known) = (op.entry().keys_in)(map) else { return Ok(()) };
    let unknown =
        |key: &&String| !known.contains(&key.as_str()) && !REMARKS.contains(&key.as_str());
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
