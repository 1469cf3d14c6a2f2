//! Writing one output file: header first, then every piece at its place, by any thread.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use marlinspike::container::{ContainerWriter, TensorSpec};

use super::error::ConvertError;
use super::plan::{ShardPlan, Source};

/// A file under its temporary name. Clones write to the same file.
#[derive(Debug, Clone)]
pub struct ShardWriter(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    file: File,
    partial: PathBuf,
    path: PathBuf,
    /// Where each item's data begins, in the order of the items.
    offsets: Vec<u64>,
    /// The same, by source.
    places: HashMap<Source, u64>,
    len: u64,
}

/// The header of a shard and where the data of each item begins, from the start of the file.
fn header(plan: &ShardPlan, path: &Path) -> Result<(Vec<u8>, Vec<u64>, u64), ConvertError> {
    let specs: Vec<TensorSpec> = plan.items.iter().map(|i| i.spec.clone()).collect();
    let mut head = Vec::new();
    ContainerWriter::new(&mut head, &specs, &plan.metadata)
        .map_err(|source| ConvertError::Header { path: path.to_owned(), source })?;
    let mut at = head.len() as u64;
    let mut offsets = Vec::with_capacity(specs.len());
    for spec in &specs {
        offsets.push(at);
        // The header writer has refused what overflows.
        at += spec.byte_len().unwrap_or(0);
    }
    Ok((head, offsets, at))
}

/// Bytes that a finished shard has.
///
/// # Errors
/// [`ConvertError::Header`].
pub fn file_len(plan: &ShardPlan) -> Result<u64, ConvertError> {
    header(plan, Path::new(&plan.name)).map(|(_, _, len)| len)
}

impl ShardWriter {
    /// Creates `.<name>.partial` in `dir`, of its final length, with its header.
    ///
    /// # Errors
    /// [`ConvertError::Io`] or [`ConvertError::Header`].
    pub fn create(dir: &Path, plan: &ShardPlan) -> Result<Self, ConvertError> {
        let path = dir.join(&plan.name);
        let partial = dir.join(format!(".{}.partial", plan.name));
        let (head, offsets, len) = header(plan, &path)?;
        // A leftover may be a link to elsewhere: removed, not written through.
        match fs::remove_file(&partial) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                return Err(ConvertError::io(&partial)(e));
            }
            _ => {}
        }
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(&partial)
            .map_err(ConvertError::io(&partial))?;
        file.write_all(&head).map_err(ConvertError::io(&partial))?;
        file.set_len(len).map_err(ConvertError::io(&partial))?;
        let places = plan.items.iter().zip(&offsets);
        let places = places.filter(|(i, _)| i.source != Source::Copy);
        let places = places.map(|(i, &at)| (i.source, at)).collect();
        Ok(Self(Arc::new(Inner { file, partial, path, offsets, places, len })))
    }

    /// Bytes of the file.
    pub fn file_len(&self) -> u64 {
        self.0.len
    }

    /// Writes `bytes` at `offset` of item `item`'s data.
    ///
    /// # Errors
    /// [`ConvertError::Io`].
    pub fn write_item(&self, item: usize, offset: u64, bytes: &[u8]) -> Result<(), ConvertError> {
        self.write_at(self.0.offsets[item] + offset, bytes)
    }

    /// Writes `bytes` at `offset` of a stack's output, which must be in this file.
    ///
    /// # Errors
    /// [`ConvertError::Io`].
    pub fn write(&self, source: Source, offset: u64, bytes: &[u8]) -> Result<(), ConvertError> {
        match self.0.places.get(&source) {
            Some(at) => self.write_at(at + offset, bytes),
            None => {
                let what = format!("{source:?} is not in this file's plan");
                Err(ConvertError::io(&self.0.path)(io::Error::other(what)))
            }
        }
    }

    #[cfg(unix)]
    fn write_at(&self, at: u64, bytes: &[u8]) -> Result<(), ConvertError> {
        use std::os::unix::fs::FileExt as _;
        self.0.file.write_all_at(bytes, at).map_err(ConvertError::io(&self.0.partial))
    }

    #[cfg(not(unix))]
    fn write_at(&self, at: u64, bytes: &[u8]) -> Result<(), ConvertError> {
        use std::io::{Seek as _, SeekFrom};
        use std::sync::Mutex;
        // One file position for all threads.
        static POSITION: Mutex<()> = Mutex::new(());
        let _turn = POSITION.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let mut file = &self.0.file;
        file.seek(SeekFrom::Start(at))
            .and_then(|_| file.write_all(bytes))
            .map_err(ConvertError::io(&self.0.partial))
    }

    /// Makes the file durable and gives it its final name.
    ///
    /// # Errors
    /// [`ConvertError::Io`].
    pub fn finish(&self) -> Result<(), ConvertError> {
        self.0.file.sync_all().map_err(ConvertError::io(&self.0.partial))?;
        fs::rename(&self.0.partial, &self.0.path).map_err(ConvertError::io(&self.0.path))?;
        sync_dir(self.0.path.parent())
    }
}

/// Makes a rename durable, where the system can.
fn sync_dir(dir: Option<&Path>) -> Result<(), ConvertError> {
    #[cfg(unix)]
    if let Some(dir) = dir {
        File::open(dir).and_then(|d| d.sync_all()).map_err(ConvertError::io(dir))?;
    }
    #[cfg(not(unix))]
    let _ = dir;
    Ok(())
}
