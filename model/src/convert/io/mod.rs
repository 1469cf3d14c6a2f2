//! The file-system operations that a conversion's output folder needs.
//!
//! Every write of `convert` goes through [`Storage`], so that a test can make any call fail, stop
//! after any call, or lose what was not yet durable. [`Disk`] is the real one.
//!
//! [`PartFile::finish`] makes a file durable in this order: write under a temporary name, read back
//! and compare, sync the file, rename, sync the folder.

mod disk;
mod part;
mod sum;
mod unsynced;

use std::ffi::OsString;
use std::fmt::Debug;
use std::io;
use std::path::Path;

use sha2::{Digest as _, Sha256};

pub use disk::Disk;
pub use part::{FinishError, PartFile, is_part};
pub use sum::PlacedSum;
pub use unsynced::Unsynced;

/// Bytes that are read at once to be hashed.
const CHUNK: usize = 1 << 20;

/// The file or other object of a name in a folder. Links are not followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileStat {
    /// Whether it is a regular file.
    pub is_file: bool,
    /// Bytes of a regular file.
    pub len: u64,
    /// Device and inode, where the storage has them.
    pub id: Option<(u64, u64)>,
}

/// An open file. All methods may be called by several threads at once.
pub trait StoredFile: Send + Sync + Debug {
    /// Writes some of `bytes` at `at`, and returns how many.
    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<usize>;
    /// Reads at most `buffer.len()` bytes at `at`; 0 at the end.
    fn read_at(&self, buffer: &mut [u8], at: u64) -> io::Result<usize>;
    /// Sets the length.
    fn set_len(&self, len: u64) -> io::Result<()>;
    /// Makes the file's data durable.
    fn sync(&self) -> io::Result<()>;
    /// Length and identity.
    fn stat(&self) -> io::Result<FileStat>;
}

/// A lock that is held until it is dropped, or its process ends.
pub trait StorageLock: Send + Sync + Debug {}

/// The result of an attempt to lock.
#[derive(Debug)]
pub enum Locked {
    /// The lock is held.
    Held(Box<dyn StorageLock>),
    /// Another process holds the lock; the contents of the lock file.
    Busy(Vec<u8>),
}

/// A file system.
pub trait Storage: Sync + Debug {
    /// Makes a folder and its parents, durably; no error if it exists.
    fn create_dir_all(&self, dir: &Path) -> io::Result<()>;
    /// Makes a file that must not exist, and opens it for reading and writing.
    fn create(&self, path: &Path) -> io::Result<Box<dyn StoredFile>>;
    /// Opens a regular file for reading. A link or a special file is an error.
    fn open(&self, path: &Path) -> io::Result<Box<dyn StoredFile>>;
    /// Renames a file and replaces any file of the new name.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Removes a name that is not a folder's.
    fn remove(&self, path: &Path) -> io::Result<()>;
    /// Makes a folder's names durable.
    fn sync_dir(&self, dir: &Path) -> io::Result<()>;
    /// The names in a folder, sorted.
    fn list(&self, dir: &Path) -> io::Result<Vec<OsString>>;
    /// The file or other object of a name.
    fn stat(&self, path: &Path) -> io::Result<FileStat>;
    /// Locks by the file `path`, whose contents become `holder`, without waiting.
    fn lock(&self, path: &Path, holder: &[u8]) -> io::Result<Locked>;
}

/// Writes all of `bytes` at `at`.
///
/// # Errors
/// The storage's; [`io::ErrorKind::WriteZero`] when it takes no more bytes.
pub fn write_all_at(file: &dyn StoredFile, mut bytes: &[u8], mut at: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        match file.write_at(bytes, at) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(n) => {
                bytes = bytes.get(n..).ok_or(io::ErrorKind::InvalidData)?;
                at += n as u64;
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Calls `each` with the chunks of a file of at most `limit` bytes, from its start to its end.
///
/// # Errors
/// The storage's; [`io::ErrorKind::FileTooLarge`] for a file of more than `limit` bytes.
pub fn read_chunks(
    file: &dyn StoredFile,
    limit: u64,
    mut each: impl FnMut(u64, &[u8]),
) -> io::Result<u64> {
    let len = file.stat()?.len.min(CHUNK as u64).max(1);
    let mut buffer = vec![0; len as usize];
    let mut at = 0;
    loop {
        // A chunk is filled, so that chunks begin at multiples of their size.
        let mut filled = 0;
        while filled < buffer.len() {
            match file.read_at(&mut buffer[filled..], at + filled as u64) {
                Ok(0) => break,
                Ok(n) => filled += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        if filled == 0 {
            return Ok(at);
        }
        each(at, &buffer[..filled]);
        at += filled as u64;
        if at > limit {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
    }
}

/// Reads a whole small file.
///
/// # Errors
/// As [`read_chunks`].
pub fn read_small(storage: &dyn Storage, path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let file = storage.open(path)?;
    read_chunks(&*file, limit, |_, chunk| bytes.extend_from_slice(chunk))?;
    Ok(bytes)
}

/// Length and SHA-256 of a file.
///
/// # Errors
/// The storage's.
pub fn hash_file(storage: &dyn Storage, path: &Path) -> io::Result<(u64, String)> {
    let file = storage.open(path)?;
    let mut hash = Sha256::new();
    let len = read_chunks(&*file, u64::MAX, |_, chunk| hash.update(chunk))?;
    Ok((len, hex(hash)))
}

/// Length and SHA-256 of all that `reader` gives.
///
/// # Errors
/// The reader's.
pub fn hash_of(mut reader: impl io::Read) -> io::Result<(u64, String)> {
    let (mut hash, mut length) = (Sha256::new(), 0);
    let mut chunk = vec![0; 1 << 16];
    loop {
        match reader.read(&mut chunk) {
            Ok(0) => return Ok((length, hex(hash))),
            Ok(read) => {
                hash.update(&chunk[..read]);
                length += read as u64;
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}

/// A finished hash as 64 hexadecimal digits.
pub fn hex(hash: Sha256) -> String {
    hash.finalize().iter().map(|b| format!("{b:02x}")).collect()
}
