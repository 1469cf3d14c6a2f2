//! A Hugging Face model folder: configs, mapped shards, tensors by name.
//!
//! Only headers and small JSON files are read; tensors are slices of the mapped files.

pub mod bind;
pub mod block;
mod error;
pub mod files;
pub mod fused;
pub mod layers;
mod matrix;
pub mod projections;
mod refused;
pub mod routing;
mod stack;
mod stacking;
mod unread;
pub mod values;

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use marlinspike::bounded_json;
use marlinspike::config::QuantConfig;
use marlinspike::container::{Container, Entry, Header, ShardIndex};
use marlinspike::moe::families::RoutingRule;
use marlinspike::num::tensor::Tensor;
use serde_json::Value;

use crate::map::MappedFile;
pub use error::ModelError;
use files::Stamp;

/// Largest config that is read, in bytes; the largest real ones, which list modules, have less than
/// a million.
pub const CONFIG_LIMIT: u64 = 8 << 20;

/// The most memory that a parsed config may take, in bytes.
pub const CONFIG_MEMORY: usize = 128 << 20;

/// Largest index read, in bytes: real ones have about 100 bytes per tensor.
pub const INDEX_LIMIT: u64 = 64 << 20;

/// Names of separate quantization configs, in the order in which they are tried.
pub const QUANT_FILES: [&str; 3] =
    ["quantize_config.json", "quant_config.json", "hf_quant_config.json"];

/// The shard of an unsharded model.
const SINGLE: &str = "model.safetensors";
/// The index of a sharded model.
pub const INDEX: &str = "model.safetensors.index.json";

/// The files of a model folder, mapped. A [`Model`] borrows them.
#[derive(Debug)]
pub struct ModelFiles {
    dir: PathBuf,
    index: Option<ShardIndex>,
    /// File name and contents, in the order of the names.
    maps: Vec<(String, MappedFile)>,
    /// Routing rule that the user states instead of the family's.
    stated_routing: Option<RoutingRule>,
    /// The stamps of all these files and of the configs, by name, taken before any of them was
    /// read.
    stamps: BTreeMap<String, Stamp>,
}

/// One safetensors file.
#[derive(Debug, Clone)]
pub struct Shard<'f> {
    /// File name.
    pub name: String,
    /// Full path.
    pub path: PathBuf,
    /// The checked header.
    pub header: Header,
    bytes: &'f [u8],
}

impl<'f> Shard<'f> {
    /// All bytes of the file.
    pub fn bytes(&self) -> &'f [u8] {
        self.bytes
    }

    /// The file as a container.
    ///
    /// # Errors
    /// [`ModelError::Format`]; never for a shard that has been opened.
    pub fn container(&self) -> Result<Container<'f>, ModelError> {
        Container::parse(self.bytes)
            .map_err(|e| ModelError::Format { path: self.path.clone(), source: Box::new(e.into()) })
    }
}

/// An opened model folder.
#[derive(Debug, Clone)]
pub struct Model<'f> {
    /// The folder.
    pub dir: PathBuf,
    /// `config.json`.
    pub config: Value,
    /// The quantization config; `None` if there is none.
    pub quant: Option<QuantConfig>,
    /// The shards, in the order of their names.
    pub shards: Vec<Shard<'f>>,
    /// Shards, configs and index by name, each with its stamp from before it was read.
    pub stamps: &'f BTreeMap<String, Stamp>,
    /// Tensor name to shard and entry.
    tensors: BTreeMap<String, (usize, usize)>,
    /// Routing rule that the user states instead of the family's.
    pub stated_routing: Option<&'f RoutingRule>,
}

/// A small text file, at most `limit` bytes.
fn read_json_text(path: &Path, limit: u64) -> Result<String, ModelError> {
    let io = |source| ModelError::Io { path: path.to_owned(), source };
    let (file, Stamp { len: found, .. }) = files::open(path)?;
    if found > limit {
        return Err(ModelError::TooLarge { path: path.to_owned(), found, limit });
    }
    let mut text = String::new();
    file.take(limit).read_to_string(&mut text).map_err(io)?;
    Ok(text)
}

fn read_json(path: &Path) -> Result<Value, ModelError> {
    bounded_json::parse_python(&read_json_text(path, CONFIG_LIMIT)?, CONFIG_MEMORY)
        .map_err(|e| ModelError::Json { path: path.to_owned(), reason: e.to_string() })
}

fn read_index(path: &Path) -> Result<ShardIndex, ModelError> {
    ShardIndex::parse(read_json_text(path, INDEX_LIMIT)?.as_bytes())
        .map_err(|source| ModelError::Index { path: path.to_owned(), source })
}

impl ModelFiles {
    /// Maps the shards of a folder. An index is read and checked against the folder.
    ///
    /// # Errors
    /// [`ModelError`] naming the file that is missing, outside the folder or unreadable.
    pub fn open(dir: &Path) -> Result<Self, ModelError> {
        if !dir.is_dir() {
            let source = fs::read_dir(dir).err().unwrap_or_else(|| {
                std::io::Error::new(std::io::ErrorKind::NotADirectory, "not a folder")
            });
            return Err(ModelError::Io { path: dir.to_owned(), source });
        }
        let mut stamps = BTreeMap::new();
        for name in ["config.json", INDEX].into_iter().chain(QUANT_FILES) {
            let path = dir.join(name);
            if path.exists() {
                stamps.insert(name.to_owned(), files::stamp(&path)?);
            }
        }
        let index_path = dir.join(INDEX);
        let index = index_path.exists().then(|| read_index(&index_path)).transpose()?;
        let names: Vec<String> = match &index {
            Some(index) => {
                check_files(dir, &index_path, index)?;
                index.files().into_iter().map(str::to_owned).collect()
            }
            None if dir.join(SINGLE).exists() => vec![SINGLE.to_owned()],
            None => {
                let what = "model.safetensors or model.safetensors.index.json";
                return Err(ModelError::NoFile { dir: dir.to_owned(), what });
            }
        };
        let mut maps = Vec::with_capacity(names.len());
        for name in names {
            let path = dir.join(&name);
            let (file, stamp) = files::open(&path)?;
            stamps.insert(name.clone(), stamp);
            maps.push((name, MappedFile::of(&file, &path)?));
        }
        Ok(Self { dir: dir.to_owned(), index, maps, stamps, stated_routing: None })
    }

    /// Sets the routing rule from a file of `--routing`, if one is given.
    ///
    /// # Errors
    /// [`ModelError`] for an unreadable file or keys that are not a routing rule.
    pub fn with_routing(self, path: Option<&Path>) -> Result<Self, ModelError> {
        let stated_routing = path.map(read_routing).transpose()?;
        Ok(Self { stated_routing, ..self })
    }
}

/// Reads a routing file.
fn read_routing(path: &Path) -> Result<RoutingRule, ModelError> {
    RoutingRule::from_json(&read_json(path)?)
        .map_err(|e| ModelError::Format { path: path.to_owned(), source: Box::new(e) })
}

impl<'f> Model<'f> {
    /// Reads and checks configs and headers.
    ///
    /// # Errors
    /// [`ModelError`].
    pub fn new(files: &'f ModelFiles) -> Result<Self, ModelError> {
        let ModelFiles { dir, index, maps, stamps, stated_routing } = files;
        let index_path = dir.join(INDEX);
        let config_path = dir.join("config.json");
        if !config_path.exists() {
            return Err(ModelError::NoFile { dir: dir.clone(), what: "config.json" });
        }
        let config = read_json(&config_path)?;
        let quant = read_quant(dir, &config_path, &config)?;
        let shards = maps
            .iter()
            .map(|(name, map)| open_shard(dir, name, map))
            .collect::<Result<Vec<_>, _>>()?;
        let mut tensors = BTreeMap::new();
        for (s, shard) in shards.iter().enumerate() {
            for (e, entry) in shard.header.entries().iter().enumerate() {
                // The index says which shard holds a tensor. Shards may also hold older ones, which
                // nothing reads.
                let named =
                    |index: &ShardIndex| index.file_of(entry.name()) == Some(shard.name.as_str());
                if !index.as_ref().is_none_or(named) {
                    continue;
                }
                if let Some((first, _)) = tensors.insert(entry.name().to_owned(), (s, e)) {
                    return Err(ModelError::InTwoShards {
                        tensor: entry.name().to_owned(),
                        first: shards[first].name.clone(),
                        second: shard.name.clone(),
                    });
                }
            }
        }
        if let Some(index) = index {
            for (tensor, file) in index.tensors() {
                if tensors.get(tensor).is_none_or(|&(s, _)| shards[s].name != file) {
                    return Err(ModelError::NotInShard {
                        index: index_path,
                        tensor: tensor.to_owned(),
                        file: file.to_owned(),
                    });
                }
            }
        }
        let stated_routing = stated_routing.as_ref();
        Ok(Self { dir: dir.clone(), config, quant, shards, stamps, tensors, stated_routing })
    }

    /// The entry of every tensor, sorted by name.
    pub fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.tensors.values().map(|&(s, e)| &self.shards[s].header.entries()[e])
    }

    /// The names of the tensors that begin with `prefix`, sorted.
    pub fn names_below<'m>(&'m self, prefix: &'m str) -> impl Iterator<Item = &'m str> {
        let from = self.tensors.range(prefix.to_owned()..).map(|(name, _)| name.as_str());
        from.take_while(move |name| name.starts_with(prefix))
    }

    /// The entry of a tensor.
    pub fn entry(&self, name: &str) -> Option<&Entry> {
        self.tensors.get(name).map(|&(s, e)| &self.shards[s].header.entries()[e])
    }

    /// A tensor, borrowing the mapped file.
    pub fn tensor(&self, name: &str) -> Result<Tensor<'f>, ModelError> {
        let Some(&(s, e)) = self.tensors.get(name) else {
            return Err(ModelError::module(name, "no such tensor"));
        };
        let shard = &self.shards[s];
        let entry = &shard.header.entries()[e];
        let range = entry.file_range();
        // Parsing the header verified that the range lies in the file.
        let data = &shard.bytes[range.start as usize..range.end as usize];
        Tensor::new(name, entry.dtype(), entry.shape().to_vec(), data)
            .map_err(|e| ModelError::Format { path: shard.path.clone(), source: Box::new(e) })
    }

    /// The value of `key` in the config, or in its `text_config`.
    pub fn config_value(&self, key: &str) -> Option<&Value> {
        let text = self.config.get("text_config");
        self.config.get(key).or_else(|| text.and_then(|t| t.get(key))).filter(|v| !v.is_null())
    }
}

fn check_files(dir: &Path, index_path: &Path, index: &ShardIndex) -> Result<(), ModelError> {
    for (tensor, file) in index.tensors() {
        if !dir.join(file).is_file() {
            return Err(ModelError::NoShard {
                index: index_path.to_owned(),
                tensor: tensor.to_owned(),
                file: file.to_owned(),
            });
        }
    }
    Ok(())
}

fn open_shard<'f>(dir: &Path, name: &str, bytes: &'f [u8]) -> Result<Shard<'f>, ModelError> {
    let path = dir.join(name);
    let header = Header::parse(bytes, bytes.len() as u64)
        .map_err(|e| ModelError::Format { path: path.clone(), source: Box::new(e.into()) })?;
    Ok(Shard { name: name.to_owned(), path, header, bytes })
}

fn read_quant(
    dir: &Path,
    config_path: &Path,
    config: &Value,
) -> Result<Option<QuantConfig>, ModelError> {
    let wrong = |path: &Path, e: marlinspike::config::ConfigError| ModelError::Format {
        path: path.to_owned(),
        source: Box::new(e.into()),
    };
    if let Some(found) =
        QuantConfig::from_model_config(config).map_err(|e| wrong(config_path, e))?
    {
        return Ok(Some(found));
    }
    for name in QUANT_FILES {
        let path = dir.join(name);
        if path.exists() {
            let value = read_json(&path)?;
            return QuantConfig::from_value(&value).map(Some).map_err(|e| wrong(&path, e));
        }
    }
    Ok(None)
}
