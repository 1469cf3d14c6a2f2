//! A file that has a temporary name until it is complete, checked and durable.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher as _, Hasher as _};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use sha2::{Digest as _, Sha256};

use super::{PlacedSum, Storage, StoredFile, hex, read_chunks, write_all_at};

/// Prefix of temporary names; the process id and a random number follow.
const PREFIX: &str = ".marlinspike-";
/// Suffix of temporary names.
const SUFFIX: &str = ".part";

/// A file that has not been finished. It is removed when dropped.
#[derive(Debug)]
pub struct PartFile<'s> {
    storage: &'s dyn Storage,
    file: Box<dyn StoredFile>,
    part: PathBuf,
    path: PathBuf,
    written: Mutex<PlacedSum>,
    renamed: Mutex<bool>,
}

/// Why a file could not be finished.
#[derive(Debug)]
pub enum FinishError {
    /// The storage failed.
    Io(io::Error),
    /// The file does not hold what was written.
    ReadBack(&'static str),
}

impl From<io::Error> for FinishError {
    fn from(e: io::Error) -> Self {
        Self::Io(e)
    }
}

/// Whether a name is one that [`PartFile`] gives.
pub fn is_part(name: &str) -> bool {
    let inner = name.strip_prefix(PREFIX).and_then(|n| n.strip_suffix(SUFFIX));
    inner.and_then(|n| n.split_once('-')).is_some_and(|(process, random)| {
        let digits = |s: &str, of: fn(&u8) -> bool| !s.is_empty() && s.bytes().all(|b| of(&b));
        digits(process, u8::is_ascii_digit)
            && random.len() == 16
            && digits(random, u8::is_ascii_hexdigit)
    })
}

impl<'s> PartFile<'s> {
    /// Creates a file in `dir` under an unused temporary name. It will become `dir/name`.
    ///
    /// # Errors
    /// The storage's.
    pub fn create(storage: &'s dyn Storage, dir: &Path, name: &str) -> io::Result<Self> {
        const ATTEMPTS: usize = 8;
        let mut last = io::ErrorKind::AlreadyExists.into();
        for _ in 0..ATTEMPTS {
            // Keyed by the system's random numbers.
            let random = RandomState::new().build_hasher().finish();
            let part = dir.join(format!("{PREFIX}{}-{random:016x}{SUFFIX}", std::process::id()));
            match storage.create(&part) {
                Ok(file) => {
                    let path = dir.join(name);
                    let (written, renamed) = Default::default();
                    return Ok(Self { storage, file, part, path, written, renamed });
                }
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => last = e,
                Err(e) => return Err(e),
            }
        }
        Err(last)
    }

    /// The name that the file will have.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Sets the length before the pieces are written.
    ///
    /// # Errors
    /// The storage's.
    pub fn set_len(&self, len: u64) -> io::Result<()> {
        self.file.set_len(len)
    }

    /// Writes a piece at its place. Each byte must be written once.
    ///
    /// # Errors
    /// The storage's.
    pub fn write_at(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
        let sum = PlacedSum::of(at, bytes);
        write_all_at(&*self.file, bytes, at)?;
        *self.written.lock().unwrap_or_else(PoisonError::into_inner) += sum;
        Ok(())
    }

    /// Reads the file back and compares it with what was written, makes it durable, gives it its
    /// name and makes that durable. Returns its length and SHA-256.
    ///
    /// # Errors
    /// [`FinishError`]; the file keeps its temporary name.
    pub fn finish(&self) -> Result<(u64, String), FinishError> {
        let (mut hash, mut sum) = (Sha256::new(), PlacedSum::default());
        let len = read_chunks(&*self.file, u64::MAX, |at, chunk| {
            hash.update(chunk);
            sum += PlacedSum::of(at, chunk);
        })?;
        if sum != *self.written.lock().unwrap_or_else(PoisonError::into_inner) {
            return Err(FinishError::ReadBack(
                "reading it back gives other bytes than were written",
            ));
        }
        self.file.sync()?;
        let (open, named) = (self.file.stat()?, self.storage.stat(&self.part)?);
        if (open.id, open.len) != (named.id, named.len) || open.len != len {
            return Err(FinishError::ReadBack("another file has taken its temporary name"));
        }
        self.storage.rename(&self.part, &self.path)?;
        *self.renamed.lock().unwrap_or_else(PoisonError::into_inner) = true;
        if let Some(dir) = self.path.parent() {
            self.storage.sync_dir(dir)?;
        }
        Ok((len, hex(hash)))
    }
}

impl Drop for PartFile<'_> {
    fn drop(&mut self) {
        if !*self.renamed.get_mut().unwrap_or_else(PoisonError::into_inner) {
            // The next run removes what cannot be removed now.
            let _ = self.storage.remove(&self.part);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_this_pattern_are_parts() {
        assert!(is_part(".marlinspike-4242-0123456789abcdef.part"));
        for other in [
            ".marlinspike-a1b2c3.part",
            ".marlinspike--0123456789abcdef.part",
            ".marlinspike-1-0123456789abcde.part",
            "x.marlinspike-1-0123456789abcdef.part",
            ".marlinspike-progress.json",
            "model.safetensors.part",
        ] {
            assert!(!is_part(other), "{other}");
        }
    }
}
