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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::CaseConfig;
    use crate::vectors::Generator;

    /// Every key that a config writes is known. Every known key is read: a value of a type that no
    /// key has is refused by the key's name.
    #[test]
    fn the_table_is_what_the_operations_read() {
        for &(name, op) in Op::NAMED {
            let generator = Generator::new(op, 1).expect(name);
            for config in generator.lattice() {
                check(op, &config.to_json()).unwrap_or_else(|e| panic!("{name}: {e}"));
            }
            let whole = generator.lattice().iter().map(CaseConfig::to_json);
            let whole = whole.max_by_key(Map::len).expect(name);
            let unread = ["convention", "adversarial_rows"];
            for &key in (op.entry().keys)().iter().filter(|k| !unread.contains(k)) {
                let mut map = whole.clone();
                map.insert(key.to_owned(), serde_json::json!([{"no": "such"}]));
                let error = CaseConfig::from_json(op, &map);
                let error = error.expect_err(&format!("{name}: `{key}` is not read")).to_string();
                assert!(error.contains(&format!("`{key}`")), "{name}: {key}: {error}");
            }
        }
    }
}
