//! `model.safetensors.index.json`: which shard holds which tensor.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};

use super::{ModelError, read_json_text};

/// Largest index read, in bytes: real ones have about 100 bytes per tensor.
const LIMIT: u64 = 256 << 20;

/// A map whose keys must differ: a repeated key is an error, not the last value.
struct Unique(BTreeMap<String, String>);

impl<'de> Deserialize<'de> for Unique {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Unique;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object from tensor names to file names")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Unique, A::Error> {
                let mut entries = BTreeMap::new();
                while let Some((tensor, file)) = map.next_entry::<String, String>()? {
                    if entries.contains_key(&tensor) {
                        return Err(A::Error::custom(format!("tensor `{tensor}` is listed twice")));
                    }
                    entries.insert(tensor, file);
                }
                Ok(Unique(entries))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

#[derive(Deserialize)]
struct Raw {
    weight_map: Unique,
}

/// A checked index: every file name is a plain name inside the folder.
#[derive(Debug)]
pub(super) struct Index {
    /// Tensor name to file name.
    pub(super) weight_map: BTreeMap<String, String>,
}

impl Index {
    /// Reads and checks the index at `path`.
    pub(super) fn read(path: &Path) -> Result<Self, ModelError> {
        let text = read_json_text(path, LIMIT)?;
        let raw: Raw = serde_json::from_str(&text)
            .map_err(|e| ModelError::Json { path: path.to_owned(), reason: e.to_string() })?;
        let weight_map = raw.weight_map.0;
        for (tensor, file) in &weight_map {
            if !is_plain_name(file) {
                return Err(ModelError::FileName {
                    index: path.to_owned(),
                    tensor: tensor.clone(),
                    file: file.chars().take(200).collect(),
                });
            }
        }
        Ok(Self { weight_map })
    }

    /// The shards, in the order of their names.
    pub(super) fn files(&self) -> BTreeSet<&str> {
        self.weight_map.values().map(String::as_str).collect()
    }
}

/// A name without folders, drive letters or hidden-file tricks.
fn is_plain_name(file: &str) -> bool {
    file.ends_with(".safetensors")
        && !file.starts_with('.')
        && !file.contains(['/', '\\', ':', '\0'])
        && file.len() <= 255
}
