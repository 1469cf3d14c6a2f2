//! Memory-mapped files, so that checkpoints and cases are read without a copy.

use std::fs::{self, File};
use std::io;
use std::ops::Deref;
use std::path::{Path, PathBuf};

/// A file that cannot be mapped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MapError {
    /// The file cannot be opened or examined.
    #[error("{}: {source}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// The path is a folder, pipe or device.
    #[error("{}: not a regular file", path.display())]
    NotAFile {
        /// The path.
        path: PathBuf,
    },
    /// The file cannot be mapped.
    #[error("{}: {source}", path.display())]
    Map {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: vmap::Error,
    },
}

/// The bytes of a file, read-only. `None` is an empty file, which cannot be mapped.
#[derive(Debug)]
pub struct MappedFile(Option<vmap::Map>);

impl MappedFile {
    /// Maps a whole file.
    ///
    /// # Errors
    /// [`MapError`] with the path.
    pub fn open(path: &Path) -> Result<Self, MapError> {
        let open_error = |source| MapError::Open { path: path.to_owned(), source };
        // The type is checked before opening, because opening a pipe waits for its writer.
        if !fs::metadata(path).map_err(open_error)?.is_file() {
            return Err(MapError::NotAFile { path: path.to_owned() });
        }
        Self::of(&File::open(path).map_err(open_error)?, path)
    }

    /// Maps a whole open regular file; `path` is used in messages.
    ///
    /// # Errors
    /// [`MapError`] with the path.
    pub fn of(file: &File, path: &Path) -> Result<Self, MapError> {
        let open_error = |source| MapError::Open { path: path.to_owned(), source };
        if file.metadata().map_err(open_error)?.len() == 0 {
            return Ok(Self(None));
        }
        match vmap::Map::with_options().map(file) {
            Ok(map) => Ok(Self(Some(map))),
            Err(source) => Err(MapError::Map { path: path.to_owned(), source }),
        }
    }
}

impl Deref for MappedFile {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.0.as_deref().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_contents_and_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, b"some bytes").unwrap();
        assert_eq!(&*MappedFile::open(&path).unwrap(), b"some bytes");
        fs::write(&path, b"").unwrap();
        assert!(MappedFile::open(&path).unwrap().is_empty());
    }

    #[test]
    fn refuses_folders_and_what_is_not_there() {
        let folder = tempfile::tempdir().unwrap();
        assert!(matches!(MappedFile::open(folder.path()), Err(MapError::NotAFile { .. })));
        let missing = folder.path().join("missing");
        match MappedFile::open(&missing) {
            Err(MapError::Open { path, source }) => {
                assert_eq!((path, source.kind()), (missing, io::ErrorKind::NotFound));
            }
            other => panic!("expected Open, found {other:?}"),
        }
    }
}
