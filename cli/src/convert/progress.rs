//! What has been finished, so that an interrupted conversion continues, and for which input and
//! settings, so that two conversions never mix in one folder.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::error::ConvertError;
use super::plan::Settings;
use crate::model::Model;
use crate::output::write_whole;

/// Finished files of an unfinished conversion.
const MANIFEST: &str = ".marlinspike-progress.json";

/// Names that a conversion writes and that `--force` removes.
fn is_output(name: &str) -> bool {
    let shard = name.starts_with("model") && name.ends_with(".safetensors");
    let partial = name.starts_with(".model") && name.ends_with(".safetensors.partial");
    shard || partial || matches!(name, MANIFEST | "config.json" | crate::model::INDEX)
}

/// One finished file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Finished {
    name: String,
    bytes: u64,
}

/// The manifest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    identity: String,
    finished: Vec<Finished>,
}

/// A hash of everything that decides the output: the program's version, the settings, the
/// model's config, and of each shard its name, length, time of modification and header.
///
/// # Errors
/// [`ConvertError::Io`] for a shard whose time cannot be asked.
pub fn identity(model: &Model<'_>, settings: &Settings) -> Result<String, ConvertError> {
    let mut hash = Sha256::new();
    hash.update(env!("CARGO_PKG_VERSION"));
    hash.update(format!("{settings:?}"));
    hash.update(model.config.to_string());
    hash.update(format!("{:?}", model.quant));
    if let Some(routing) = model.stated_routing {
        hash.update(format!("{routing:?}"));
    }
    for shard in &model.shards {
        let meta = fs::metadata(&shard.path).map_err(ConvertError::io(&shard.path))?;
        let time = meta.modified().ok().and_then(|t| t.duration_since(UNIX_EPOCH).ok());
        hash.update(format!("{:?} {} {time:?}", shard.name, meta.len()));
        for e in shard.header.entries() {
            hash.update(format!(
                "{:?} {} {:?} {:?}",
                e.name(),
                e.dtype(),
                e.shape(),
                e.file_range()
            ));
        }
    }
    Ok(hash.finalize().iter().map(|b| format!("{b:02x}")).collect())
}

/// How the output folder was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// This conversion is complete there.
    Complete,
    /// It can go on, or begin.
    Open(Progress),
}

impl Progress {
    /// Looks at the output folder and makes it ready; `force` clears another conversion.
    ///
    /// # Errors
    /// [`ConvertError::Occupied`] when something else is there, [`ConvertError::Io`].
    pub fn open(
        out: &Path,
        model_dir: &Path,
        identity: String,
        force: bool,
    ) -> Result<State, ConvertError> {
        fs::create_dir_all(out).map_err(ConvertError::io(out))?;
        let (a, b) = (fs::canonicalize(out), fs::canonicalize(model_dir));
        if let (Ok(a), Ok(b)) = (a, b)
            && a == b
        {
            let reason = "this is the model's own folder".to_owned();
            return Err(ConvertError::Occupied { dir: out.to_owned(), reason });
        }
        let occupied = |reason: &str| ConvertError::Occupied {
            dir: out.to_owned(),
            reason: reason.to_owned(),
        };
        let new = Self { identity, finished: Vec::new() };
        let config = out.join("config.json");
        let found = if config.exists() {
            let text = fs::read(&config).map_err(ConvertError::io(&config))?;
            let value: Option<serde_json::Value> = serde_json::from_slice(&text).ok();
            let there = value.as_ref().and_then(|v| v.pointer("/marlinspike/identity"));
            if there.and_then(|v| v.as_str()) == Some(&new.identity) && !force {
                return Ok(State::Complete);
            }
            Some("another model is here; --force replaces it")
        } else if out.join(MANIFEST).exists() {
            let path = out.join(MANIFEST);
            let text = fs::read(&path).map_err(ConvertError::io(&path))?;
            match serde_json::from_slice::<Self>(&text) {
                Ok(p) if p.identity == new.identity && !force => return Ok(State::Open(p)),
                _ => Some(
                    "an unfinished conversion of other input or settings is here; --force replaces it",
                ),
            }
        } else {
            output_files(out)?.first().map(|_| "safetensors files are here; --force replaces them")
        };
        match found {
            Some(reason) if !force => return Err(occupied(reason)),
            _ => {}
        }
        for path in output_files(out)? {
            fs::remove_file(&path).map_err(ConvertError::io(&path))?;
        }
        new.save(out)?;
        Ok(State::Open(new))
    }

    /// Whether the file is finished and still there.
    pub fn has(&self, out: &Path, name: &str, len: u64) -> bool {
        let there = || fs::metadata(out.join(name)).is_ok_and(|m| m.is_file() && m.len() == len);
        self.finished.iter().any(|f| f.name == name && f.bytes == len) && there()
    }

    /// Records a finished file.
    ///
    /// # Errors
    /// [`ConvertError::Io`].
    pub fn finished(&mut self, out: &Path, name: String, bytes: u64) -> Result<(), ConvertError> {
        self.finished.retain(|f| f.name != name);
        self.finished.push(Finished { name, bytes });
        self.save(out)
    }

    /// The identity of input and settings.
    pub fn identity(&self) -> &str {
        &self.identity
    }

    fn save(&self, out: &Path) -> Result<(), ConvertError> {
        let text = serde_json::json!(self).to_string();
        write(&out.join(MANIFEST), text.as_bytes())
    }

    /// Removes the manifest: everything is done.
    ///
    /// # Errors
    /// [`ConvertError::Io`].
    pub fn close(self, out: &Path) -> Result<(), ConvertError> {
        let path = out.join(MANIFEST);
        fs::remove_file(&path).map_err(ConvertError::io(&path))
    }
}

/// Writes a small file as a whole.
///
/// # Errors
/// [`ConvertError::Io`].
pub fn write(path: &Path, bytes: &[u8]) -> Result<(), ConvertError> {
    write_whole(path, bytes).map_err(|e| ConvertError::io(path)(io::Error::other(e.to_string())))
}

fn output_files(out: &Path) -> Result<Vec<PathBuf>, ConvertError> {
    let mut files = Vec::new();
    for entry in fs::read_dir(out).map_err(ConvertError::io(out))? {
        let entry = entry.map_err(ConvertError::io(out))?;
        if is_output(&entry.file_name().to_string_lossy()) {
            files.push(entry.path());
        }
    }
    Ok(files)
}
