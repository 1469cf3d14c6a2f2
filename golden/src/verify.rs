//! Verification: every listed file is unchanged, and no other file exists.

use std::{
    collections::HashSet,
    fmt::Write as _,
    fs,
    io::{self, Read},
    path::{Path, PathBuf},
};

use sha2::{Digest, Sha256};

use crate::{FileEntry, GoldenError, Manifest, Result};

/// Summary of a successful verification.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Verification {
    /// Files read.
    pub files: usize,
    /// Bytes read.
    pub bytes: u64,
}

impl Manifest {
    /// Reads one listed file and compares length and SHA-256.
    ///
    /// # Errors
    /// [`GoldenError::Missing`], [`GoldenError::Length`], [`GoldenError::Hash`],
    /// [`GoldenError::Io`].
    pub fn verify_file(&self, entry: &FileEntry) -> Result<()> {
        let path = self.path(&entry.path);
        let io_error = |source: io::Error| match source.kind() {
            io::ErrorKind::NotFound => GoldenError::Missing { path: path.clone() },
            _ => GoldenError::Io { path: path.clone(), source },
        };
        let mut file = fs::File::open(&path).map_err(io_error)?;
        let found = file.metadata().map_err(io_error)?.len();
        if found != entry.bytes {
            return Err(GoldenError::Length { path, found, expected: entry.bytes });
        }
        let mut hasher = Sha256::new();
        let mut buffer = vec![0; 1 << 16];
        loop {
            let count = file.read(&mut buffer).map_err(io_error)?;
            if count == 0 {
                break;
            }
            hasher.update(&buffer[..count]);
        }
        let found = hexadecimal(&hasher.finalize());
        if found == entry.sha256 {
            Ok(())
        } else {
            Err(GoldenError::Hash { path, found, expected: entry.sha256.clone() })
        }
    }

    /// Reads every listed file, and searches `data/` for files that are not listed.
    ///
    /// # Errors
    /// Those of [`Manifest::verify_file`], and [`GoldenError::Unlisted`].
    pub fn verify(&self) -> Result<Verification> {
        let mut seen = Verification { files: 0, bytes: 0 };
        let mut listed = HashSet::new();
        for entry in self.files() {
            self.verify_file(&entry)?;
            seen.files += 1;
            seen.bytes += entry.bytes;
            listed.insert(self.path(&entry.path));
        }
        let mut present = Vec::new();
        walk(&self.root().join("data"), &mut present)?;
        match present.into_iter().find(|path| !listed.contains(path)) {
            Some(path) => Err(GoldenError::Unlisted { path }),
            None => Ok(seen),
        }
    }
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Appends the files below `folder`, in a stable order.
fn walk(folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    let io_error = |source| GoldenError::Io { path: folder.to_path_buf(), source };
    let mut paths = fs::read_dir(folder)
        .map_err(io_error)?
        .map(|entry| entry.map(|entry| entry.path()))
        .collect::<io::Result<Vec<_>>>()
        .map_err(io_error)?;
    paths.sort();
    for path in paths {
        if path.is_dir() {
            walk(&path, files)?;
        } else {
            files.push(path);
        }
    }
    Ok(())
}
