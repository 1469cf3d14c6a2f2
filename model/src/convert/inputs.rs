//! The input files: hashed before the conversion, and checked for changes before a result counts.
//!
//! A file counts as changed if its size, modification time or inode differs. If only its change
//! time (`ctime`, which no program can set) differs, its SHA-256 decides. A file that was written
//! less than two seconds before the run began is hashed again at the end, since a second write may
//! have left the same times.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::UNIX_EPOCH;

use rayon::prelude::*;
use sha2::{Digest as _, Sha256};

use super::error::ConvertError;
use super::io;
use super::manifest::InputRecord;
use crate::model::Model;
use crate::model::files::{self, Stamp};

/// An input file.
#[derive(Debug)]
struct Input {
    path: PathBuf,
    stamp: Mutex<Stamp>,
    record: InputRecord,
}

/// The input files, by name.
#[derive(Debug)]
pub struct Inputs(Vec<Input>);

fn modified(stamp: &Stamp) -> Option<u64> {
    let since = stamp.modified?.duration_since(UNIX_EPOCH).ok()?;
    u64::try_from(since.as_nanos()).ok()
}

/// SHA-256 of a file of the model folder.
fn hash(path: &std::path::Path) -> Result<String, ConvertError> {
    let (file, _) = files::open(path)?;
    let (_, hash) = io::hash_of(file).map_err(ConvertError::io(path))?;
    Ok(hash)
}

impl Inputs {
    /// The configs and shards of `model` and the side files of these names, not yet hashed.
    ///
    /// # Errors
    /// [`ConvertError::Model`] for a side file whose metadata cannot be read.
    pub fn list(model: &Model<'_>, side: &[String]) -> Result<Self, ConvertError> {
        let mut stamps = model.stamps.clone();
        for name in side {
            stamps.insert(name.clone(), files::stamp(&model.dir.join(name))?);
        }
        let input = |(name, stamp): (String, Stamp)| Input {
            path: model.dir.join(&name),
            record: InputRecord {
                bytes: stamp.len,
                modified: modified(&stamp),
                sha256: String::new(),
                name,
            },
            stamp: Mutex::new(stamp),
        };
        Ok(Self(stamps.into_iter().map(input).collect()))
    }

    /// Hashes every input on the current pool, shards through their mapping.
    ///
    /// # Errors
    /// [`ConvertError::InputChanged`] for a file that was changed after it was opened;
    /// [`ConvertError::Model`], [`ConvertError::Io`].
    pub fn hash(&mut self, model: &Model<'_>) -> Result<(), ConvertError> {
        self.0.par_iter_mut().with_max_len(1).try_for_each(|input| {
            let shard = model.shards.iter().find(|s| s.name == input.record.name);
            input.record.sha256 = match shard {
                Some(shard) => io::hex(Sha256::new_with_prefix(shard.bytes())),
                None => hash(&input.path)?,
            };
            // Headers and configs were read earlier: the file must not have changed since.
            input.unchanged()
        })
    }

    /// The inputs' records for the manifest.
    pub fn records(&self) -> Vec<InputRecord> {
        self.0.iter().map(|i| i.record.clone()).collect()
    }

    /// SHA-256 of the input of this name.
    pub fn sha256(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|i| i.record.name == name).map(|i| i.record.sha256.as_str())
    }

    /// Name of the input with this device and inode.
    pub fn with_id(&self, id: (u64, u64)) -> Option<&str> {
        let same =
            |i: &&Input| i.stamp.lock().unwrap_or_else(PoisonError::into_inner).id == Some(id);
        self.0.iter().find(same).map(|i| i.record.name.as_str())
    }

    /// Checks that the inputs are the files that were hashed. `finally` also hashes those again that
    /// were written just before the run.
    ///
    /// # Errors
    /// [`ConvertError::InputChanged`] naming the file; [`ConvertError::Model`] for one that is gone.
    pub fn look_again(&self, finally: bool) -> Result<(), ConvertError> {
        self.0.iter().try_for_each(|input| input.look_again(finally))
    }
}

impl Input {
    fn changed(&self, what: &'static str) -> ConvertError {
        ConvertError::InputChanged { path: self.path.clone(), what }
    }

    /// The current stamp; an error if more than the change time differs.
    fn look(&self, stamp: &Stamp) -> Result<Stamp, ConvertError> {
        let found = files::stamp(&self.path)?;
        match () {
            () if found.len != stamp.len => Err(self.changed("its size")),
            () if found.id != stamp.id => Err(self.changed("the file under its name")),
            () if found.modified != stamp.modified => Err(self.changed("its modification time")),
            () => Ok(found),
        }
    }

    fn unchanged(&mut self) -> Result<(), ConvertError> {
        let stamp = self.stamp.get_mut().unwrap_or_else(PoisonError::into_inner).clone();
        match self.look(&stamp)?.changed == stamp.changed {
            true => Ok(()),
            false => Err(self.changed("its change time")),
        }
    }

    fn look_again(&self, finally: bool) -> Result<(), ConvertError> {
        let mut stamp = self.stamp.lock().unwrap_or_else(PoisonError::into_inner);
        let found = self.look(&stamp)?;
        if found.changed != stamp.changed || (finally && stamp.recent) {
            if hash(&self.path)? != self.record.sha256 {
                return Err(self.changed("its contents"));
            }
            // Only the mode or the number of links changed: the next check need not hash again.
            stamp.changed = found.changed;
        }
        Ok(())
    }
}
