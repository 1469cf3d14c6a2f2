//! The model's other files: tokenizer, generation config and the like are copied, whatever their size;
//! each file that is not copied is named with the reason.

use std::collections::HashSet;
use std::fs;

use super::error::ConvertError;
use super::paths::MANIFEST;
use super::plan::ConversionPlan;
use crate::map::MapError;
use crate::model::{Model, ModelError, files};

/// Extensions of files that hold weights.
const WEIGHTS: [&str; 9] =
    ["safetensors", "bin", "pt", "pth", "gguf", "onnx", "h5", "msgpack", "ckpt"];

/// A file of the model folder that is not copied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeftOut {
    /// Its name.
    pub name: String,
    /// Why.
    pub reason: &'static str,
}

/// What the model folder holds besides configs and shards.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SideFiles {
    /// Names of the files to copy, sorted.
    pub copied: Vec<String>,
    /// The other names, sorted.
    pub left_out: Vec<LeftOut>,
}

impl SideFiles {
    /// Lists the model folder.
    ///
    /// # Errors
    /// [`ConvertError::Model`] for a link that leaves the folder, a FIFO, socket or device.
    pub fn list(model: &Model<'_>, plan: &ConversionPlan) -> Result<Self, ConvertError> {
        let outputs: HashSet<&str> = plan.shards.iter().map(|s| s.name.as_str()).collect();
        let mut side = Self::default();
        for entry in fs::read_dir(&model.dir).map_err(ConvertError::io(&model.dir))? {
            let entry = entry.map_err(ConvertError::io(&model.dir))?;
            let Ok(name) = entry.file_name().into_string() else {
                let name = entry.file_name().to_string_lossy().into_owned();
                side.left_out.push(LeftOut { name, reason: "its name is not UTF-8" });
                continue;
            };
            // Configs, index and shards: the output has its own.
            if model.stamps.contains_key(&name) {
                continue;
            }
            let path = model.dir.join(&name);
            let extension = path.extension().and_then(|e| e.to_str()).unwrap_or_default();
            let extension = extension.to_ascii_lowercase();
            let reason = match extension.as_str() {
                _ if name.starts_with('.') => Some("a hidden file"),
                _ if name == MANIFEST || outputs.contains(name.as_str()) => {
                    Some("the output has a file of this name")
                }
                "safetensors" => Some("weights that the model's index does not name"),
                e if WEIGHTS.contains(&e) => Some("weights in another format"),
                _ if name.ends_with(".index.json") => Some("the index of other weights"),
                _ => {
                    let found = files::resolve(&path)?;
                    let meta = fs::metadata(&found).map_err(ConvertError::io(&path))?;
                    match () {
                        () if meta.is_dir() => Some("a folder"),
                        () if meta.is_file() => None,
                        () => return Err(ModelError::from(MapError::NotAFile { path }).into()),
                    }
                }
            };
            match reason {
                Some(reason) => side.left_out.push(LeftOut { name, reason }),
                None => side.copied.push(name),
            }
        }
        side.copied.sort();
        side.left_out.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(side)
    }
}
