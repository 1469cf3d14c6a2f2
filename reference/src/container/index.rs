//! The index of a model in several files, `model.safetensors.index.json`: the file of each tensor.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};

use super::MAX_TENSORS;

/// Longest file name that is shown in an error, in characters.
const SHOWN: usize = 200;

/// Longest file name in bytes, as in common file systems.
const NAME_LIMIT: usize = 255;

/// The index is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IndexError {
    /// Not JSON, or nested too deeply.
    #[error("not JSON: {reason}")]
    Json {
        /// The parser's message.
        reason: String,
    },
    /// JSON of another form than `{"weight_map": {tensor name: file name}}`.
    #[error("{reason}; expected `weight_map`, an object from tensor names to file names")]
    Form {
        /// The parser's message.
        reason: String,
    },
    /// Too many tensors.
    #[error("more than {limit} tensors")]
    TooMany {
        /// Largest number that is read.
        limit: usize,
    },
    /// A tensor is listed twice.
    #[error("tensor `{tensor}` is listed twice")]
    DuplicateTensor {
        /// The tensor.
        tensor: String,
    },
    /// The file is not a plain name inside the folder.
    #[error(
        "tensor `{tensor}` is in {file:?}, expected the name of a safetensors file in the same folder"
    )]
    FileName {
        /// The tensor.
        tensor: String,
        /// The name found.
        file: String,
    },
}

/// A checked index: no tensor is listed twice, and every file is a plain name, without folders,
/// drive letters or a leading dot, so that nothing outside the model's folder is opened.
///
/// Other keys (`metadata`) are ignored. Source: the index that `transformers` writes for sharded
/// checkpoints.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardIndex {
    files: BTreeMap<String, Arc<str>>,
}

impl ShardIndex {
    /// Parses the text of an index.
    ///
    /// # Errors
    /// [`IndexError`].
    pub fn parse(text: &[u8]) -> Result<Self, IndexError> {
        let raw: Raw = serde_json::from_slice(text).map_err(|e| {
            let reason = e.to_string();
            match e.is_data() {
                true => IndexError::Form { reason },
                false => IndexError::Json { reason },
            }
        })?;
        let Entries { files, twice, too_many } = raw.weight_map;
        if too_many {
            return Err(IndexError::TooMany { limit: MAX_TENSORS });
        }
        if let Some(tensor) = twice {
            return Err(IndexError::DuplicateTensor { tensor });
        }
        if let Some((tensor, file)) = files.iter().find(|(_, file)| !is_plain_name(file)) {
            let (tensor, file) = (tensor.clone(), file.chars().take(SHOWN).collect());
            return Err(IndexError::FileName { tensor, file });
        }
        Ok(Self { files })
    }

    /// Each tensor's name and file, sorted by tensor name.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = (&str, &str)> {
        self.files.iter().map(|(tensor, file)| (tensor.as_str(), &**file))
    }

    /// The file that holds a tensor.
    pub fn file_of(&self, tensor: &str) -> Option<&str> {
        self.files.get(tensor).map(|file| &**file)
    }

    /// The files, each once, sorted by name.
    pub fn files(&self) -> BTreeSet<&str> {
        self.files.values().map(|file| &**file).collect()
    }
}

#[derive(Deserialize)]
struct Raw {
    weight_map: Entries,
}

/// The map, and the first duplicate key. Duplicates are refused because parsers differ in which value
/// they keep, and would read different models.
#[derive(Default)]
struct Entries {
    files: BTreeMap<String, Arc<str>>,
    twice: Option<String>,
    too_many: bool,
}

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Pairs;
        impl<'de> Visitor<'de> for Pairs {
            type Value = Entries;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object from tensor names to file names")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
                let mut entries = Entries::default();
                // A file holds many tensors, so its name is shared.
                let mut names: BTreeSet<Arc<str>> = BTreeSet::new();
                while let Some((tensor, file)) = map.next_entry::<String, Cow<'_, str>>()? {
                    if entries.files.len() == MAX_TENSORS {
                        entries.too_many = true;
                    }
                    if entries.too_many {
                        continue;
                    }
                    let file = match names.get(&*file) {
                        Some(known) => Arc::clone(known),
                        None => {
                            let new = Arc::from(&*file);
                            names.insert(Arc::clone(&new));
                            new
                        }
                    };
                    if entries.twice.is_none() && entries.files.contains_key(&tensor) {
                        entries.twice = Some(tensor.clone());
                    }
                    entries.files.insert(tensor, file);
                }
                Ok(entries)
            }
        }
        deserializer.deserialize_map(Pairs)
    }
}

fn is_plain_name(file: &str) -> bool {
    file.ends_with(".safetensors")
        && !file.starts_with('.')
        && !file.contains(['/', '\\', ':'])
        && !file.contains(char::is_control)
        && file.len() <= NAME_LIMIT
}
