//! Opening files of a model folder: regular files only, and no symbolic link that leaves it.
//!
//! A model folder is untrusted: a link `tokenizer.txt -> /etc/shadow` would be copied with its
//! contents, and opening a FIFO would wait for its writer. Links that leave the folder are accepted
//! only in the layout of the Hugging Face cache:
//! `snapshots/<revision>/<file> -> ../../blobs/<hash>`.

use std::fs::{self, File, Metadata, OpenOptions};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::ModelError;
use crate::map::MapError;

/// Two changes closer together than this may have the same timestamp, since file systems count in
/// ticks.
const CLOCK_TICK: Duration = Duration::from_secs(2);

/// Metadata of a file, kept to detect later changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stamp {
    /// Bytes.
    pub len: u64,
    /// Time of the last write, which programs may set at will.
    pub modified: Option<SystemTime>,
    /// Device and inode, if the system has them.
    pub id: Option<(u64, u64)>,
    /// Seconds and nanoseconds of the last change of data or metadata, which programs cannot set.
    pub changed: Option<(i64, i64)>,
    /// Whether a change just after this stamp could have the same times.
    pub recent: bool,
}

impl Stamp {
    /// The stamp of an opened or named file.
    pub fn of(meta: &Metadata) -> Self {
        #[cfg(unix)]
        let (id, changed) = {
            use std::os::unix::fs::MetadataExt as _;
            (Some((meta.dev(), meta.ino())), Some((meta.ctime(), meta.ctime_nsec())))
        };
        #[cfg(not(unix))]
        let (id, changed) = (None, None);
        let modified = meta.modified().ok();
        let last = match changed {
            Some((seconds, _)) => {
                let since = Duration::from_secs(u64::try_from(seconds).unwrap_or(0));
                Some(SystemTime::UNIX_EPOCH + since)
            }
            None => modified,
        };
        // A time in the future has no age; such a file also counts as recent.
        let age = last.and_then(|t| SystemTime::now().duration_since(t).ok());
        let recent = age.is_none_or(|age| age < CLOCK_TICK);
        Self { len: meta.len(), modified, id, changed, recent }
    }
}

/// The path to read a file of a model folder from: its own, or the target of an allowed link.
///
/// # Errors
/// [`ModelError::Link`] for a link that leaves the folder, [`ModelError::Io`].
pub fn resolve(path: &Path) -> Result<PathBuf, ModelError> {
    let io = |source| ModelError::Io { path: path.to_owned(), source };
    if !fs::symlink_metadata(path).map_err(io)?.is_symlink() {
        return Ok(path.to_owned());
    }
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let target = fs::canonicalize(path).map_err(io)?;
    let folder = fs::canonicalize(folder).map_err(io)?;
    let snapshots = folder.parent().filter(|p| p.ends_with("snapshots"));
    let blobs = snapshots.and_then(Path::parent).map(|cache| cache.join("blobs"));
    if target.starts_with(&folder) || (blobs.is_some() && target.parent() == blobs.as_deref()) {
        return Ok(target);
    }
    Err(ModelError::Link { path: path.to_owned(), target })
}

/// Opens a regular file of a model folder for reading.
///
/// # Errors
/// As [`resolve`]; [`MapError::NotAFile`] for a folder, FIFO, socket or device.
pub fn open(path: &Path) -> Result<(File, Stamp), ModelError> {
    let io = |source| ModelError::Io { path: path.to_owned(), source };
    let not_a_file = || ModelError::from(MapError::NotAFile { path: path.to_owned() });
    let found = resolve(path)?;
    // The type is checked before opening, because opening a device may have side effects.
    if !fs::metadata(&found).map_err(io)?.is_file() {
        return Err(not_a_file());
    }
    let mut options = OpenOptions::new();
    options.read(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt as _;
        // The flags neither wait for nor follow a file that was swapped in after the check.
        let flags = rustix::fs::OFlags::NONBLOCK | rustix::fs::OFlags::NOFOLLOW;
        options.custom_flags(flags.bits().cast_signed());
    }
    let file = options.open(&found).map_err(io)?;
    let meta = file.metadata().map_err(io)?;
    if !meta.is_file() {
        return Err(not_a_file());
    }
    Ok((file, Stamp::of(&meta)))
}

/// The stamp of a file of a model folder, by its path.
///
/// # Errors
/// As [`resolve`].
pub fn stamp(path: &Path) -> Result<Stamp, ModelError> {
    let meta = fs::metadata(resolve(path)?);
    meta.map(|m| Stamp::of(&m)).map_err(|source| ModelError::Io { path: path.to_owned(), source })
}
