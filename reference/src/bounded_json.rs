//! JSON values of untrusted files, parsed within a stated amount of memory.
//!
//! Two bytes of text (`0,`) become a value of 72 bytes, and `{"":0},` a table of several hundred:
//! a limit on the length of a text alone does not bound what it takes.

use std::cell::Cell;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

/// Bytes that a list's element takes, its list half empty.
const ELEMENT: usize = 2 * size_of::<Value>();
/// Bytes that an object's entry takes without its key, likewise.
const ENTRY: usize = 2 * (size_of::<Value>() + 40);
/// Bytes that an object takes once it has an entry.
const OBJECT: usize = 512;

/// Why a text was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum JsonError {
    /// Not JSON, or nested deeper than 127.
    #[error("not JSON: {problem}")]
    Syntax {
        /// The parser's words, with line and column.
        problem: String,
    },
    /// More values than fit the memory.
    #[error("takes more than {limit} bytes of memory when parsed")]
    Memory {
        /// The largest number of bytes.
        limit: usize,
    },
}

/// Memory that a text may take.
#[derive(Debug)]
pub struct Memory {
    left: Cell<Option<usize>>,
    limit: usize,
}

impl Memory {
    /// `limit` bytes, none of them taken.
    pub fn new(limit: usize) -> Self {
        Self { left: Cell::new(Some(limit)), limit }
    }

    /// Takes `bytes`; fails once all are taken, and from then on.
    fn take<E: serde::de::Error>(&self, bytes: usize) -> Result<(), E> {
        self.left.set(self.left.get().and_then(|left| left.checked_sub(bytes)));
        match self.left.get() {
            Some(_) => Ok(()),
            None => Err(E::custom("too many values")),
        }
    }

    /// `error`, or the limit where that is why parsing stopped.
    pub fn explain(&self, error: &serde_json::Error) -> JsonError {
        match self.left.get() {
            Some(_) => JsonError::Syntax { problem: error.to_string() },
            None => JsonError::Memory { limit: self.limit },
        }
    }
}

/// Parses `text` into at most about `memory` bytes.
///
/// # Errors
/// [`JsonError`].
pub fn parse(text: &str, memory: usize) -> Result<Value, JsonError> {
    let memory = Memory::new(memory);
    let mut de = serde_json::Deserializer::from_str(text);
    let value = BoundedValue(&memory).deserialize(&mut de).and_then(|v| de.end().map(|()| v));
    value.map_err(|e| memory.explain(&e))
}

/// Before the name of a number that Python's `json` writes bare: a character of no text.
const BARE: char = '\u{fdd0}';
/// The numbers that Python's `json` writes and JSON does not have.
const NAMES: [&str; 3] = ["-Infinity", "Infinity", "NaN"];

/// [`parse`] of a text that Python's `json` wrote: bare `NaN`, `Infinity` and `-Infinity` are read as
/// strings that [`python_text`] writes as they were.
///
/// # Errors
/// [`JsonError`].
pub fn parse_python(text: &str, memory: usize) -> Result<Value, JsonError> {
    let strict = parse(text, memory);
    if !matches!(strict, Err(JsonError::Syntax { .. })) || text.contains(BARE) {
        return strict;
    }
    let mut out = String::with_capacity(text.len());
    let (mut rest, mut quoted, mut found) = (text, false, false);
    while let Some(c) = rest.chars().next() {
        let name = NAMES.into_iter().find(|name| !quoted && rest.starts_with(name));
        if let Some(name) = name {
            out.extend(['"', BARE]);
            out.push_str(name);
            out.push('"');
            (rest, found) = (&rest[name.len()..], true);
            continue;
        }
        let escaped = quoted && c == '\\';
        quoted ^= c == '"';
        // The character after a backslash does not end a string.
        let len = c.len_utf8();
        let next = if escaped { rest[len..].chars().next().map_or(0, char::len_utf8) } else { 0 };
        out.push_str(&rest[..len + next]);
        rest = &rest[len + next..];
    }
    if found { parse(&out, memory) } else { strict }
}

/// The JSON of a value of [`parse_python`], indented, with its bare numbers.
pub fn python_text(value: &Value) -> String {
    let text = format!("{value:#}");
    NAMES.iter().fold(text, |text, name| text.replace(&format!("\"{BARE}{name}\""), name))
}

/// A value that takes its memory from a budget; fails when it is spent.
#[derive(Debug, Clone, Copy)]
pub struct BoundedValue<'m>(pub &'m Memory);

impl<'de> DeserializeSeed<'de> for BoundedValue<'_> {
    type Value = Value;
    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Value, D::Error> {
        d.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for BoundedValue<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, v: bool) -> Result<Value, E> {
        Ok(Value::Bool(v))
    }

    fn visit_u64<E>(self, v: u64) -> Result<Value, E> {
        Ok(Value::Number(v.into()))
    }

    fn visit_i64<E>(self, v: i64) -> Result<Value, E> {
        Ok(Value::Number(v.into()))
    }

    fn visit_f64<E: serde::de::Error>(self, v: f64) -> Result<Value, E> {
        Number::from_f64(v).map(Value::Number).ok_or_else(|| E::custom("a number out of range"))
    }

    fn visit_str<E: serde::de::Error>(self, v: &str) -> Result<Value, E> {
        self.0.take(v.len())?;
        Ok(Value::String(v.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(value) = seq.next_element_seed(self)? {
            self.0.take(ELEMENT)?;
            list.push(value);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(key) = access.next_key::<String>()? {
            let object = if map.is_empty() { OBJECT } else { 0 };
            self.0.take::<A::Error>(object + ENTRY + key.len())?;
            let value = access.next_value_seed(self)?;
            map.insert(key, value);
        }
        Ok(Value::Object(map))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_value_as_serde_json() {
        let text = r#" {"a": [1, -2, 2.5, 1e300, true, null, "x\u00e9\n"], "b": {"c": {}, "d": []},
            "a": 18446744073709551615, "e": -0.0, "f": 9007199254740993} "#;
        let expected: Value = serde_json::from_str(text).unwrap();
        assert_eq!(parse(text, 1 << 20), Ok(expected));
    }

    #[test]
    fn bare_numbers_of_python_are_kept() {
        let text = r#"{"a": [0.0, Infinity], "b": -Infinity, "c": NaN, "d": "NaN \" Infinity \\"}"#;
        assert!(parse(text, 1 << 20).is_err());
        let value = parse_python(text, 1 << 20).unwrap();
        assert_eq!(value["d"], "NaN \" Infinity \\");
        assert!(value["a"][1].as_f64().is_none() && !value["c"].is_null());
        let again = python_text(&value);
        assert_eq!(parse_python(&again, 1 << 20), Ok(value));
        let words = |text: &str| text.split_whitespace().collect::<String>();
        assert_eq!(words(&again), words(text));
        for text in ["[Infinit]", "[NaN", "{NaN: 1}x", "[+Infinity]"] {
            assert!(matches!(parse_python(text, 1 << 20), Err(JsonError::Syntax { .. })), "{text}");
        }
    }

    #[test]
    fn memory_depth_and_syntax_are_told_apart() {
        let list = format!("[{}0]", "0,".repeat(10_000));
        assert_eq!(parse(&list, 100_000), Err(JsonError::Memory { limit: 100_000 }));
        assert!(parse(&list, 10_000_000).is_ok());
        let objects = format!("[{}0]", "{\"\":0},".repeat(1_000));
        assert_eq!(parse(&objects, 500_000), Err(JsonError::Memory { limit: 500_000 }));
        for text in ["", "[1", "{\"a\"}", "1 2", "1e999", &"[".repeat(200_000)] {
            assert!(matches!(parse(text, 1 << 30), Err(JsonError::Syntax { .. })), "{text:.20}");
        }
    }
}
