//! Typed access to a JSON object; every error names the path of the key.

use serde_json::{Map, Value};

use super::{ConfigError, ConfigResult};

/// A JSON object with the path that leads to it.
#[derive(Debug, Clone)]
pub(super) struct Obj<'a> {
    path: String,
    map: &'a Map<String, Value>,
}

/// Type of a JSON value for messages, with the value itself when it is short.
fn describe(value: &Value) -> String {
    match value {
        Value::Null => "null".to_owned(),
        Value::Bool(b) => format!("boolean {b}"),
        Value::Number(n) => format!("number {n}"),
        Value::String(s) if s.chars().count() <= 60 => format!("string {s:?}"),
        Value::String(s) => format!("a string of {} bytes", s.len()),
        Value::Array(a) => format!("an array of {}", a.len()),
        Value::Object(o) => format!("an object of {} keys", o.len()),
    }
}

fn wrong(key: String, value: &Value, expected: &'static str) -> ConfigError {
    ConfigError::WrongType { key, found: describe(value), expected }
}

impl<'a> Obj<'a> {
    /// The object at `path` (empty for the root).
    pub(super) fn new(path: impl Into<String>, value: &'a Value) -> ConfigResult<Self> {
        let path = path.into();
        match value {
            Value::Object(map) => Ok(Self { path, map }),
            other => {
                let key = if path.is_empty() { "quantization_config".to_owned() } else { path };
                Err(wrong(key, other, "an object"))
            }
        }
    }

    /// Path of `key`.
    pub(super) fn path(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    /// Entries in file order.
    pub(super) fn entries(&self) -> impl Iterator<Item = (&'a str, &'a Value)> + use<'a> {
        self.map.iter().map(|(k, v)| (k.as_str(), v))
    }

    /// The value of `key`; `None` if it is absent or null.
    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    /// The first of `keys` that is present and not null, with its name.
    fn first<'k>(&self, keys: &[&'k str]) -> Option<(&'k str, &'a Value)> {
        keys.iter().find_map(|&k| self.get(k).map(|v| (k, v)))
    }

    fn missing(&self, key: &str) -> ConfigError {
        ConfigError::MissingKey { key: self.path(key) }
    }

    /// A whole number under the first of `keys`.
    pub(super) fn opt_int(&self, keys: &[&str]) -> ConfigResult<Option<i64>> {
        self.first(keys).map(|(k, v)| int(self.path(k), v)).transpose()
    }

    /// [`Self::opt_int`], required under its first name.
    pub(super) fn int(&self, keys: &[&str]) -> ConfigResult<i64> {
        self.opt_int(keys)?.ok_or_else(|| self.missing(keys[0]))
    }

    pub(super) fn opt_bool(&self, key: &str) -> ConfigResult<Option<bool>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Bool(b)) => Ok(Some(*b)),
            Some(other) => Err(wrong(self.path(key), other, "a boolean")),
        }
    }

    pub(super) fn bool(&self, key: &str) -> ConfigResult<bool> {
        self.opt_bool(key)?.ok_or_else(|| self.missing(key))
    }

    pub(super) fn opt_str(&self, key: &str) -> ConfigResult<Option<&'a str>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(s)) => Ok(Some(s)),
            Some(other) => Err(wrong(self.path(key), other, "a string")),
        }
    }

    pub(super) fn str(&self, key: &str) -> ConfigResult<&'a str> {
        self.opt_str(key)?.ok_or_else(|| self.missing(key))
    }

    pub(super) fn opt_obj(&self, key: &str) -> ConfigResult<Option<Obj<'a>>> {
        self.get(key).map(|v| Obj::new(self.path(key), v)).transpose()
    }

    pub(super) fn opt_array(&self, key: &str) -> ConfigResult<Option<&'a [Value]>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Array(a)) => Ok(Some(a)),
            Some(other) => Err(wrong(self.path(key), other, "an array")),
        }
    }

    /// An array of strings; absent and null give an empty list.
    pub(super) fn strings(&self, key: &str) -> ConfigResult<Vec<String>> {
        let items = self.opt_array(key)?.unwrap_or_default();
        items.iter().enumerate().map(|(i, v)| string(self.path(key), i, v)).collect()
    }

    /// Returns [`ConfigError::UnknownKey`] for a key that is not in `known`.
    pub(super) fn only(&self, known: &[&str]) -> ConfigResult<()> {
        match self.map.keys().find(|k| !known.contains(&k.as_str())) {
            None => Ok(()),
            Some(k) => {
                Err(ConfigError::UnknownKey { key: self.path(k), expected: known.join(", ") })
            }
        }
    }

    /// An error about the type of `key`'s value.
    pub(super) fn wrong(&self, key: &str, value: &Value, expected: &'static str) -> ConfigError {
        wrong(self.path(key), value, expected)
    }
}

/// Element `i` of the array at `path`, as a string.
pub(super) fn string(path: String, i: usize, value: &Value) -> ConfigResult<String> {
    match value {
        Value::String(s) => Ok(s.clone()),
        other => Err(wrong(format!("{path}[{i}]"), other, "a string")),
    }
}

/// A whole number in i64's range.
pub(super) fn int(path: String, value: &Value) -> ConfigResult<i64> {
    match value {
        Value::Number(n) => match n.as_i64() {
            Some(i) => Ok(i),
            None if n.is_u64() => Err(ConfigError::bad(path, n, "a whole number below 2^63")),
            None => Err(wrong(path, value, "a whole number")),
        },
        other => Err(wrong(path, other, "a whole number")),
    }
}
