//! Temporary files, which get their names when they are whole.
//!
//! A killed process leaves its temporary file behind. The file is locked while its process lives, so the
//! next process that writes into the folder can tell and remove it.

use std::collections::BTreeSet;
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use tempfile::NamedTempFile;

/// Names begin and end like this. `convert` has parts of its own in its folder, with digits after the
/// first dash.
const PREFIX: &str = ".marlinspike-out-";
const SUFFIX: &str = ".part";
/// How often a name is tried again that another process removes as a leftover before it is locked.
const ATTEMPTS: usize = 8;

/// Creates a temporary file.
///
/// # Errors
/// The system's.
pub(super) fn create(folder: &Path) -> io::Result<NamedTempFile> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(PREFIX).suffix(SUFFIX);
    // Temporary files are private; a report gets the permissions of an ordinary file.
    #[cfg(unix)]
    let mode = <fs::Permissions as std::os::unix::fs::PermissionsExt>::from_mode(0o666);
    #[cfg(unix)]
    builder.permissions(mode);
    for _ in 0..ATTEMPTS {
        let part = builder.tempfile_in(folder)?;
        match part.as_file().try_lock() {
            Ok(()) if !part.path().exists() => {}
            Err(TryLockError::WouldBlock) => {}
            // A file system without locks has no process that removes leftovers.
            Ok(()) | Err(TryLockError::Error(_)) => return Ok(part),
        }
    }
    Err(io::Error::other(format!("{ATTEMPTS} temporary files were removed by another process")))
}

/// Removes the temporary files that killed processes left in `folder`: once for each folder.
pub(super) fn sweep(folder: &Path) {
    static SWEPT: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());
    let is_new = SWEPT.lock().unwrap_or_else(PoisonError::into_inner).insert(folder.to_owned());
    if !is_new {
        return;
    }
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let (name, path) = (entry.file_name(), entry.path());
        let name = name.to_string_lossy();
        let is_part = name.starts_with(PREFIX) && name.ends_with(SUFFIX);
        if is_part && entry.file_type().is_ok_and(|t| t.is_file()) && is_left(&path) {
            // Another process may have removed it first.
            let _ = fs::remove_file(&path);
        }
    }
}

/// Whether no process holds the lock of a temporary file.
fn is_left(path: &Path) -> bool {
    let file = File::options().read(true).write(true).open(path);
    file.is_ok_and(|file| file.try_lock().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leftovers_are_removed_and_files_in_use_stay() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let used = create(folder.path()).unwrap();
        // A part of `convert`, another program's file, and a folder.
        let others = [".marlinspike-17-0123456789abcdef.part", ".marlinspike-out-x", "x.part"];
        others.iter().for_each(|name| fs::write(at(name), "").unwrap());
        fs::create_dir(at(".marlinspike-out-folder.part")).unwrap();
        fs::write(at(".marlinspike-out-left.part"), "half").unwrap();
        sweep(folder.path());
        assert!(!at(".marlinspike-out-left.part").exists());
        assert!(others.iter().all(|name| at(name).exists()) && used.path().exists());
        assert!(at(".marlinspike-out-folder.part").exists());
        used.persist(at("whole")).unwrap();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 5);
    }
}
