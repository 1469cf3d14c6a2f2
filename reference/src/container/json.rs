//! The JSON of a header, read in one pass: duplicate keys are detected, nesting is limited to that of
//! the format, and the first wrong value is named.
//!
//! serde's errors are strings, so each visitor stores the named error in [`FirstError`] and returns a
//! placeholder. The caller returns the named error, unless the text is not JSON.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};

use super::ContainerError;
use crate::num::tensor::DType;

/// One tensor's entry as written, not yet checked for consistency.
pub(super) struct RawEntry {
    pub(super) name: String,
    pub(super) dtype: DType,
    pub(super) shape: Vec<u64>,
    pub(super) offsets: [u64; 2],
}

/// A header as written.
#[derive(Default)]
pub(super) struct RawHeader {
    pub(super) entries: Vec<RawEntry>,
    /// Name to index in `entries`.
    pub(super) by_name: HashMap<String, usize>,
    pub(super) metadata: BTreeMap<String, String>,
}

/// Types of the format that are smaller than a byte.
const SUB_BYTE: &[&str] =
    &["F4", "F6_E2M3", "F6_E3M2", "I4", "U4", "I2", "U2", "I1", "U1", "F4_E2M1"];

/// Largest number of tensors in a file. Models of a trillion parameters have about 200,000 in all
/// their files.
pub const MAX_TENSORS: usize = 1 << 20;

/// Largest number of keys in `__metadata__`.
pub const MAX_METADATA: usize = 1 << 16;

/// Largest number of dimensions, as in NumPy.
pub const MAX_RANK: usize = 64;

/// Reads a header's JSON.
pub(super) fn read(text: &str) -> Result<RawHeader, ContainerError> {
    let found = FirstError(RefCell::new(None));
    let mut de = serde_json::Deserializer::from_str(text);
    let header = HeaderSeed(&found).deserialize(&mut de).and_then(|h| de.end().map(|()| h));
    header.map_err(|e| match found.0.into_inner() {
        Some(named) if e.is_data() => named,
        _ => ContainerError::Json { problem: e.to_string() },
    })
}

/// The first error that a visitor stored: serde keeps only its text.
struct FirstError(RefCell<Option<ContainerError>>);

impl FirstError {
    /// Stores `error` unless one is stored already, and returns serde's placeholder.
    fn fail<E: serde::de::Error>(&self, error: ContainerError) -> E {
        let text = error.to_string();
        self.0.borrow_mut().get_or_insert(error);
        E::custom(text)
    }

    /// Stores the error that `named` makes of serde's message (a wrong JSON type).
    fn adopt<E: serde::de::Error>(&self, e: E, named: impl FnOnce(String) -> ContainerError) -> E {
        self.0.borrow_mut().get_or_insert_with(|| named(e.to_string()));
        e
    }
}

struct HeaderSeed<'f>(&'f FirstError);

impl<'de> DeserializeSeed<'de> for HeaderSeed<'_> {
    type Value = RawHeader;
    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<RawHeader, D::Error> {
        d.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for HeaderSeed<'_> {
    type Value = RawHeader;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
        let found = self.0;
        let mut header = RawHeader::default();
        let mut has_metadata = false;
        while let Some(name) = map.next_key::<String>()? {
            if name == "__metadata__" {
                if std::mem::replace(&mut has_metadata, true) {
                    return Err(found.fail(ContainerError::DuplicateMetadata { key: name }));
                }
                header.metadata = map.next_value_seed(MetadataSeed(found)).map_err(|e| {
                    found.adopt(e, |problem| ContainerError::Metadata { key: name, problem })
                })?;
            } else {
                if header.entries.len() == MAX_TENSORS {
                    let (what, limit) = ("tensors", MAX_TENSORS);
                    return Err(found.fail(ContainerError::TooMany { what, limit }));
                }
                if header.by_name.insert(name.clone(), header.entries.len()).is_some() {
                    return Err(found.fail(ContainerError::DuplicateTensor { tensor: name }));
                }
                let entry = map.next_value_seed(EntrySeed(found, &name)).map_err(|e| {
                    let tensor = name.clone();
                    found.adopt(e, |problem| ContainerError::BadEntry { tensor, key: "", problem })
                })?;
                header.entries.push(entry);
            }
        }
        Ok(header)
    }
}

struct MetadataSeed<'f>(&'f FirstError);

impl<'de> DeserializeSeed<'de> for MetadataSeed<'_> {
    type Value = BTreeMap<String, String>;
    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Self::Value, D::Error> {
        d.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for MetadataSeed<'_> {
    type Value = BTreeMap<String, String>;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of strings")
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut metadata = BTreeMap::new();
        while let Some(key) = map.next_key::<String>()? {
            if metadata.contains_key(&key) {
                return Err(self.0.fail(ContainerError::DuplicateMetadata { key }));
            }
            if metadata.len() == MAX_METADATA {
                let (what, limit) = ("keys of metadata", MAX_METADATA);
                return Err(self.0.fail(ContainerError::TooMany { what, limit }));
            }
            let value = map.next_value::<String>().map_err(|e| {
                let key = key.clone();
                self.0.adopt(e, |problem| ContainerError::Metadata { key, problem })
            })?;
            metadata.insert(key, value);
        }
        Ok(metadata)
    }
}

struct EntrySeed<'f>(&'f FirstError, &'f str);

impl<'de> DeserializeSeed<'de> for EntrySeed<'_> {
    type Value = RawEntry;
    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<RawEntry, D::Error> {
        d.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for EntrySeed<'_> {
    type Value = RawEntry;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with dtype, shape and data_offsets")
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawEntry, A::Error> {
        let Self(found, name) = self;
        let tensor = || name.to_owned();
        let (mut dtype, mut shape, mut offsets) = (None, None, None);
        let bad = |e: A::Error, key| {
            found.adopt(e, |problem| ContainerError::BadEntry { tensor: tensor(), key, problem })
        };
        while let Some(key) = map.next_key::<String>()? {
            let twice = match key.as_str() {
                "dtype" => {
                    let text = map.next_value::<String>().map_err(|e| bad(e, "dtype"))?;
                    let parsed = parse_dtype(name, text).map_err(|e| found.fail(e))?;
                    dtype.replace(parsed).is_some()
                }
                "shape" => {
                    let seed = IntegersSeed {
                        found,
                        tensor: name,
                        key: "shape",
                        at_most: (MAX_RANK, "at most 64 dimensions"),
                    };
                    let dims = map.next_value_seed(seed).map_err(|e| bad(e, "shape"))?;
                    shape.replace(dims).is_some()
                }
                "data_offsets" => {
                    let key = "data_offsets";
                    let at_most = (2, "two integers");
                    let seed = IntegersSeed { found, tensor: name, key, at_most };
                    let pair = map.next_value_seed(seed).map_err(|e| bad(e, key))?;
                    let pair = <[u64; 2]>::try_from(pair).map_err(|v| {
                        bad(A::Error::invalid_length(v.len(), &"two integers"), key)
                    })?;
                    offsets.replace(pair).is_some()
                }
                _ => return Err(found.fail(ContainerError::UnknownKey { tensor: tensor(), key })),
            };
            if twice {
                return Err(found.fail(ContainerError::DuplicateKey { tensor: tensor(), key }));
            }
        }
        let missing = |key| found.fail(ContainerError::MissingKey { tensor: tensor(), key });
        Ok(RawEntry {
            name: tensor(),
            dtype: dtype.ok_or_else(|| missing("dtype"))?,
            shape: shape.ok_or_else(|| missing("shape"))?,
            offsets: offsets.ok_or_else(|| missing("data_offsets"))?,
        })
    }
}

fn parse_dtype(tensor: &str, found: String) -> Result<DType, ContainerError> {
    let tensor = tensor.to_owned();
    match DType::from_name(&found) {
        Some(dtype) => Ok(dtype),
        None if SUB_BYTE.contains(&found.as_str()) => {
            Err(ContainerError::SubByteDtype { tensor, found })
        }
        None => Err(ContainerError::UnknownDtype { tensor, found }),
    }
}

/// A list of non-negative integers.
struct IntegersSeed<'f> {
    found: &'f FirstError,
    tensor: &'f str,
    key: &'static str,
    /// Largest number of integers, and the expectation for errors.
    at_most: (usize, &'static str),
}

impl<'de> DeserializeSeed<'de> for IntegersSeed<'_> {
    type Value = Vec<u64>;
    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Vec<u64>, D::Error> {
        d.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for IntegersSeed<'_> {
    type Value = Vec<u64>;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of integers")
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<u64>, A::Error> {
        let mut out = Vec::new();
        while let Some(v) = seq.next_element_seed(IntegerSeed(self.found, self.tensor, self.key))? {
            out.push(v);
            if out.len() > self.at_most.0 {
                return Err(A::Error::invalid_length(out.len(), &self.at_most.1));
            }
        }
        Ok(out)
    }
}

struct IntegerSeed<'f>(&'f FirstError, &'f str, &'static str);

impl IntegerSeed<'_> {
    fn refuse<E: serde::de::Error>(self, found: impl fmt::Display) -> E {
        let Self(slot, tensor, key) = self;
        let found = found.to_string();
        slot.fail(ContainerError::BadInteger { tensor: tensor.to_owned(), key, found })
    }
}

impl<'de> DeserializeSeed<'de> for IntegerSeed<'_> {
    type Value = u64;
    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<u64, D::Error> {
        d.deserialize_any(self)
    }
}

impl Visitor<'_> for IntegerSeed<'_> {
    type Value = u64;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an integer from 0 below 2^64")
    }
    fn visit_u64<E: serde::de::Error>(self, v: u64) -> Result<u64, E> {
        Ok(v)
    }
    fn visit_i64<E: serde::de::Error>(self, v: i64) -> Result<u64, E> {
        Err(self.refuse(v))
    }
    // Integers beyond 64 bits arrive here too.
    fn visit_f64<E: serde::de::Error>(self, v: f64) -> Result<u64, E> {
        Err(self.refuse(format!("{v:?}")))
    }
}
