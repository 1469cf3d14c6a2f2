//! Atomic writing of files, and standard output that tolerates a closed pipe.

use std::env;
use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use crate::style::escaped;

/// Narrowest and widest text on a terminal; longer lines are hard to read.
const TEXT_COLUMNS: std::ops::RangeInclusive<usize> = 60..=120;

/// Width of text on standard output: the terminal's, or that of `COLUMNS`, clamped to 60 to 120.
/// Without either, lines are not wrapped, so that logs can be searched.
pub fn columns() -> usize {
    let terminal = terminal_size::terminal_size_of(io::stdout()).map(|(w, _)| usize::from(w.0));
    let columns = terminal.or_else(|| env::var("COLUMNS").ok()?.parse().ok());
    columns.map_or(usize::MAX, |n| n.clamp(*TEXT_COLUMNS.start(), *TEXT_COLUMNS.end()))
}

/// A file that could not be written.
#[derive(Debug, thiserror::Error)]
#[error("{}: cannot be written: {source}", path.display())]
pub struct WriteError {
    path: PathBuf,
    source: io::Error,
}

/// Writes `bytes` to a temporary file in the same folder, then renames it to `path`. An interrupted
/// call leaves the previous file, or none, under that name. A device or a pipe, such as `/dev/null`, is
/// written to and not replaced.
///
/// # Errors
/// [`WriteError`] with the path and the system's reason; nothing is left behind.
pub fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), WriteError> {
    let error = |source| WriteError { path: path.to_owned(), source };
    if path.is_dir() {
        return Err(error(io::ErrorKind::IsADirectory.into()));
    }
    if fs::metadata(path).is_ok_and(|found| !found.is_file()) {
        let mut special = fs::OpenOptions::new().write(true).open(path).map_err(error)?;
        return special.write_all(bytes).map_err(error);
    }
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let mut builder = tempfile::Builder::new();
    builder.prefix(".marlinspike-").suffix(".part");
    // Temporary files are private; a report gets the permissions of an ordinary file.
    #[cfg(unix)]
    let mode = <fs::Permissions as std::os::unix::fs::PermissionsExt>::from_mode(0o666);
    #[cfg(unix)]
    builder.permissions(mode);
    let mut file = builder.tempfile_in(folder).map_err(error)?;
    file.write_all(bytes).map_err(error)?;
    file.as_file().sync_all().map_err(error)?;
    file.persist(path).map_err(|e| error(e.error))?;
    Ok(())
}

/// Writes to standard output and escapes harmful characters ([`escaped`]). A closed pipe (`| head`)
/// is no error.
///
/// # Errors
/// Any other error of the system, such as a full disk.
pub fn print(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(escaped(text).as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        done => done,
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn a_special_file_is_written_to_and_not_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let fifo = folder.path().join("fifo");
        let made = std::process::Command::new("mkfifo").arg(&fifo).status().unwrap();
        assert!(made.success());
        let reader = std::thread::spawn({
            let fifo = fifo.clone();
            move || fs::read(fifo).unwrap()
        });
        write_whole(&fifo, b"text").unwrap();
        assert_eq!(reader.join().unwrap(), b"text");
        assert!(!fs::metadata(&fifo).unwrap().is_file());
        let file = folder.path().join("file");
        for bytes in [&b"first"[..], b"second"] {
            write_whole(&file, bytes).unwrap();
            assert_eq!(fs::read(&file).unwrap(), bytes);
        }
    }
}
