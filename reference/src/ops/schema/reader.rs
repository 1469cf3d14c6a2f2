//! Reads a config's JSON object key by key, so that every error names its key.

use std::fmt;

use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::{Map, Value};

use super::CaseError;
use super::keys::{KeyKind, KeyLog};
use crate::bounded_json::{BoundedValue, JsonError, Memory};
use crate::products::schedule::{Schedule, ScheduleChoice};

/// Longest `config` of a case, in bytes; real ones have a few hundred.
pub const CONFIG_BYTES: usize = 4 << 20;

/// The most memory that a parsed `config` may take, in bytes.
pub const CONFIG_MEMORY: usize = 64 << 20;

/// Parses a JSON object; a repeated key is an error.
pub(crate) fn object(text: &str) -> Result<Map<String, Value>, CaseError> {
    if text.len() > CONFIG_BYTES {
        let problem = format!("{} bytes, expected at most {CONFIG_BYTES}", text.len());
        return Err(CaseError::ConfigJson { problem });
    }
    let memory = Memory::new(CONFIG_MEMORY);
    let mut visitor = ObjectVisitor { twice: None, memory: &memory };
    let mut de = serde_json::Deserializer::from_str(text);
    let map = de.deserialize_map(&mut visitor).and_then(|m| de.end().map(|()| m));
    match (visitor.twice, map) {
        (Some(key), _) => Err(CaseError::DuplicateConfigKey { key }),
        (None, Ok(map)) => Ok(map),
        (None, Err(e)) => {
            let problem = match memory.explain(&e) {
                JsonError::Memory { .. } => memory.explain(&e).to_string(),
                _ => e.to_string(),
            };
            Err(CaseError::ConfigJson { problem })
        }
    }
}

struct ObjectVisitor<'m> {
    twice: Option<String>,
    memory: &'m Memory,
}

impl<'de> Visitor<'de> for &mut ObjectVisitor<'_> {
    type Value = Map<String, Value>;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }
    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Self::Value, A::Error> {
        let mut map = Map::new();
        while let Some(key) = access.next_key::<String>()? {
            let value = access.next_value_seed(BoundedValue(self.memory))?;
            if map.contains_key(&key) {
                self.twice.get_or_insert(key);
            } else {
                map.insert(key, value);
            }
        }
        Ok(map)
    }
}

/// Typed access to a config's keys.
pub(crate) struct Reader<'m> {
    pub(crate) map: &'m Map<String, Value>,
    pub(crate) op: &'static str,
    /// Dotted prefix of a nested object's keys.
    pub(crate) prefix: &'static str,
    /// Where each key that is read is noted, for the schema of the operation.
    pub(crate) log: Option<&'m KeyLog>,
}

impl<'m> Reader<'m> {
    /// A reader of a config's keys.
    pub(crate) fn new(map: &'m Map<String, Value>, op: &'static str) -> Self {
        Self { map, op, prefix: "", log: None }
    }

    /// Notes what `key` may hold; the last note of a key counts.
    fn note(&self, key: &str, kind: impl FnOnce() -> KeyKind) {
        if let Some(log) = self.log {
            log.note(self.path(key), kind());
        }
    }

    /// Notes that only these names are left of those that `key` was read with.
    pub(crate) fn narrow<T>(&self, key: &str, table: &[(&str, T)]) {
        self.note(key, || KeyKind::names(table));
    }

    /// The value of `key`; null counts as absent.
    fn get(&self, key: &str) -> Option<&'m Value> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    fn path(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    fn missing(&self, key: &str) -> CaseError {
        CaseError::MissingConfigKey { key: self.path(key), op: self.op }
    }

    pub(crate) fn refuse(
        &self,
        key: &str,
        found: impl fmt::Display,
        expected: impl fmt::Display,
    ) -> CaseError {
        let (found, expected) = (found.to_string(), expected.to_string());
        CaseError::ConfigValue { key: self.path(key), found, expected }
    }

    /// An optional value, parsed by `read`, which returns `None` unless the value is as `expected`.
    fn optional<T>(
        &self,
        key: &str,
        expected: impl fmt::Display,
        read: impl FnOnce(&'m Value) -> Option<T>,
    ) -> Result<Option<T>, CaseError> {
        match self.get(key) {
            None => Ok(None),
            Some(v) => read(v).map(Some).ok_or_else(|| self.refuse(key, v, expected)),
        }
    }

    /// A size: 1 to 2^31 − 1, the range that kernels index with.
    pub(crate) fn size(&self, key: &str) -> Result<usize, CaseError> {
        self.optional_size(key)?.ok_or_else(|| self.missing(key))
    }

    pub(crate) fn optional_size(&self, key: &str) -> Result<Option<usize>, CaseError> {
        self.note(key, || KeyKind::Size);
        self.optional(key, "an integer from 1 to 2^31 - 1", |v| {
            v.as_u64().filter(|&v| v > 0 && v < 1 << 31).map(|v| v as usize)
        })
    }

    /// A list of sizes, one or more.
    pub(crate) fn sizes(&self, key: &str) -> Result<Option<Vec<usize>>, CaseError> {
        self.note(key, || KeyKind::Sizes);
        let size = |v: &Value| v.as_u64().filter(|&v| v > 0 && v < 1 << 31).map(|v| v as usize);
        self.optional(key, "a list of integers from 1 to 2^31 - 1", |v| {
            let list = v.as_array().filter(|list| !list.is_empty())?;
            list.iter().map(size).collect()
        })
    }

    /// An index: 0 to 2^31 − 1, 0 when absent.
    pub(crate) fn index(&self, key: &str) -> Result<usize, CaseError> {
        self.note(key, || KeyKind::Index);
        let read = |v: &Value| v.as_u64().filter(|&v| v < 1 << 31).map(|v| v as usize);
        Ok(self.optional(key, "an integer from 0 to 2^31 - 1", read)?.unwrap_or(0))
    }

    /// A number of rows: 0 to 2^31 − 1.
    pub(crate) fn count(&self, key: &str) -> Result<usize, CaseError> {
        match self.get(key) {
            Some(_) => self.index(key),
            None => {
                self.note(key, || KeyKind::Index);
                Err(self.missing(key))
            }
        }
    }

    pub(crate) fn integer(&self, key: &str) -> Result<i64, CaseError> {
        self.note(key, || KeyKind::Integer);
        self.optional(key, "an integer", Value::as_i64)?.ok_or_else(|| self.missing(key))
    }

    pub(crate) fn flag(&self, key: &str, default: bool) -> Result<bool, CaseError> {
        self.note(key, || KeyKind::Flag);
        Ok(self.optional(key, "true or false", Value::as_bool)?.unwrap_or(default))
    }

    /// A finite number.
    pub(crate) fn number(&self, key: &str) -> Result<Option<f64>, CaseError> {
        self.note(key, || KeyKind::Number);
        self.optional(key, "a finite number", |v| v.as_f64().filter(|v| v.is_finite()))
    }

    /// A string.
    pub(crate) fn text(&self, key: &str) -> Result<Option<String>, CaseError> {
        self.note(key, || KeyKind::Text);
        self.optional(key, "a string", |v| v.as_str().map(str::to_owned))
    }

    /// One of the named values of `table`.
    pub(crate) fn name<T: Copy>(&self, key: &str, table: &[(&str, T)]) -> Result<T, CaseError> {
        self.optional_name(key, table)?.ok_or_else(|| self.missing(key))
    }

    pub(crate) fn optional_name<T: Copy>(
        &self,
        key: &str,
        table: &[(&str, T)],
    ) -> Result<Option<T>, CaseError> {
        self.note(key, || KeyKind::names(table));
        let names: Vec<_> = table.iter().map(|(n, _)| *n).collect();
        self.optional(key, format!("one of {}", names.join(", ")), |v| {
            let v = v.as_str()?;
            table.iter().find(|(n, _)| *n == v).map(|&(_, t)| t)
        })
    }

    /// A schedule of a product: a name, or an object.
    pub(crate) fn schedule(&self, key: &str) -> Result<Option<ScheduleChoice>, CaseError> {
        self.note(key, || KeyKind::Schedule);
        match self.get(key) {
            None => Ok(None),
            Some(value @ Value::Object(_)) => Schedule::from_json(value)
                .map(|s| Some(ScheduleChoice::Given(Box::new(s))))
                .map_err(|error| CaseError::Schedule {
                    key: self.path(key),
                    error: Box::new(error),
                }),
            Some(other) => {
                let named = ScheduleChoice::NAMED.into_iter().find(|(name, _)| other == name);
                let expected = "\"canonical\", \"canonical_v2\", \"canonical_wgmma\" or an object";
                let refused = || self.refuse(key, other, expected);
                named.map(|(_, choice)| Some(choice)).ok_or_else(refused)
            }
        }
    }

    /// A nested object with no keys but the `known` ones.
    pub(crate) fn object(
        &self,
        key: &str,
        prefix: &'static str,
        known: &[&str],
    ) -> Result<Option<Reader<'m>>, CaseError> {
        self.note(key, || KeyKind::Object);
        let Some(map) = self.optional(key, "an object", Value::as_object)? else { return Ok(None) };
        check_nested(prefix, map, known)?;
        Ok(Some(Reader { map, op: self.op, prefix, log: self.log }))
    }

    pub(crate) fn needed_object(
        &self,
        key: &str,
        prefix: &'static str,
        known: &[&str],
    ) -> Result<Reader<'m>, CaseError> {
        self.object(key, prefix, known)?.ok_or_else(|| self.missing(key))
    }
}

/// Returns an error for a key that the nested object at `prefix` (with its dot) does not know.
fn check_nested(prefix: &str, map: &Map<String, Value>, known: &[&str]) -> Result<(), CaseError> {
    match map.keys().find(|key| !known.contains(&key.as_str())) {
        None => Ok(()),
        Some(key) => Err(CaseError::UnknownConfigKey {
            key: format!("{prefix}{key}"),
            hint: hint(key, known),
        }),
    }
}

/// A hint: the nearest of `known`, or all of them if none is near.
pub(crate) fn hint(found: &str, known: &[&str]) -> String {
    match crate::error::nearest(found, known.iter().copied()) {
        Some(near) => format!("did you mean `{near}`?"),
        None => format!("expected one of {}", known.join(", ")),
    }
}
