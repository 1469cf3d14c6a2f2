//! Atomic writing of files, and standard output that tolerates a closed pipe.

mod parts;

use std::env;
use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf, is_separator};

use textwrap::{Options, WordSeparator, WordSplitter};

use crate::style::{escaped, printable};

/// Narrowest and widest text on a terminal; longer lines are hard to read.
const TEXT_COLUMNS: std::ops::RangeInclusive<usize> = 60..=120;

/// Width of text on standard output: the terminal's, or that of `COLUMNS`, clamped to 60 to 120.
/// Without either, lines are not wrapped, so that logs can be searched.
pub fn columns() -> usize {
    let terminal = terminal_size::terminal_size_of(io::stdout()).map(|(w, _)| usize::from(w.0));
    let columns = terminal.or_else(|| env::var("COLUMNS").ok()?.parse().ok());
    columns.map_or(usize::MAX, |n| n.clamp(*TEXT_COLUMNS.start(), *TEXT_COLUMNS.end()))
}

/// Wraps `text` to `width` columns. The first line starts with `first`, the others with `indent`
/// spaces. Words, and therefore paths, are never broken. `text` may be untrusted.
pub(crate) fn hanging(first: &str, text: &str, indent: usize, width: usize) -> Vec<String> {
    let rest = " ".repeat(indent);
    let options = Options::new(width)
        .initial_indent(first)
        .subsequent_indent(&rest)
        .break_words(false)
        .word_separator(WordSeparator::AsciiSpace)
        .word_splitter(WordSplitter::NoHyphenation);
    let text = printable(text);
    textwrap::wrap(&text, options).into_iter().map(|l| l.trim_end().to_owned()).collect()
}

/// A file that could not be written.
#[derive(Debug, thiserror::Error)]
#[error("{}: cannot be written: {source}", path.display())]
pub struct WriteError {
    path: PathBuf,
    source: io::Error,
}

/// The place that an output's path leads to.
enum Target {
    /// A regular file, or none yet: the folder without links, and the name in it.
    File(PathBuf, PathBuf),
    /// A device, a pipe, or a file that a process has open.
    Special(PathBuf),
    /// This process's standard output.
    Stdout,
    /// This process's standard error.
    Stderr,
}

/// Most links from a path to its file.
const LINKS: usize = 40;

impl Target {
    /// Follows the symbolic links of `path`, the last of which may lead to a file that does not exist.
    fn of(path: &Path) -> io::Result<Self> {
        let ends_in_separator =
            path.as_os_str().as_encoded_bytes().last().is_some_and(|&b| is_separator(b.into()));
        if ends_in_separator || path.is_dir() {
            return Err(io::ErrorKind::IsADirectory.into());
        }
        let mut at = path.to_owned();
        for _ in 0..LINKS {
            let folder = match at.parent() {
                Some(folder) if !folder.as_os_str().is_empty() => folder,
                _ => Path::new("."),
            };
            let folder = fs::canonicalize(folder)?;
            let name = at.file_name().ok_or(io::ErrorKind::IsADirectory)?.to_owned();
            at = folder.join(&name);
            if folder.starts_with("/proc") {
                // A link here leads to an open file, which its path may not name: it may be deleted.
                let own = fs::canonicalize("/proc/self/fd").is_ok_and(|own| own == folder);
                return Ok(match name.to_str() {
                    Some("1") if own => Self::Stdout,
                    Some("2") if own => Self::Stderr,
                    _ => Self::Special(at),
                });
            }
            match fs::symlink_metadata(&at) {
                Ok(found) if found.is_symlink() => at = folder.join(fs::read_link(&at)?),
                Ok(found) if !found.is_file() => return Ok(Self::Special(at)),
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                // A misspelt device must not become a file.
                Err(error) if folder == Path::new("/dev") => return Err(error),
                Ok(_) | Err(_) => return Ok(Self::File(folder, at)),
            }
        }
        Err(io::Error::other(format!("found more than {LINKS} symbolic links")))
    }
}

/// Writes `bytes` to a temporary file in the same folder, then renames it to `path`. An interrupted
/// call leaves the previous file, or none, under that name. If `path` is a symbolic link, its target is
/// written and the link stays. A device, a pipe or an open file, such as `/dev/null` or `/dev/stdout`,
/// is written to and not replaced.
///
/// # Errors
/// [`WriteError`] with the path and the system's reason; nothing is left behind.
pub fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), WriteError> {
    let written = match Target::of(path) {
        Ok(Target::File(folder, file)) => replace(&folder, &file, bytes),
        // What another process wrote to an open file stays.
        Ok(Target::Special(at)) => {
            fs::OpenOptions::new().append(true).open(at).and_then(|mut f| f.write_all(bytes))
        }
        Ok(Target::Stdout) => through(&mut io::stdout().lock(), bytes),
        Ok(Target::Stderr) => through(&mut io::stderr().lock(), bytes),
        Err(error) => Err(error),
    };
    written.map_err(|source| WriteError { path: path.to_owned(), source })
}

fn through(out: &mut impl io::Write, bytes: &[u8]) -> io::Result<()> {
    out.write_all(bytes)?;
    out.flush()
}

/// Writes a temporary file in `folder` and renames it to `path`, which is in the same folder.
fn replace(folder: &Path, path: &Path, bytes: &[u8]) -> io::Result<()> {
    parts::sweep(folder);
    let mut file = parts::create(folder)?;
    file.write_all(bytes)?;
    file.as_file().sync_all()?;
    file.persist(path).map_err(|e| e.error)?;
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
    #[test]
    fn links_stay_and_their_targets_are_written() {
        use std::os::unix::fs::symlink;
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir(at("sub")).unwrap();
        fs::write(at("sub/file"), "old").unwrap();
        symlink("sub/file", at("link")).unwrap();
        symlink("link", at("second")).unwrap();
        symlink(at("sub/new"), at("dangling")).unwrap();
        symlink("sub", at("to_folder")).unwrap();
        for (link, target) in [
            ("link", "sub/file"),
            ("second", "sub/file"),
            ("dangling", "sub/new"),
            ("to_folder/../link", "sub/file"),
            ("to_folder/file", "sub/file"),
        ] {
            write_whole(&at(link), link.as_bytes()).unwrap();
            assert_eq!(fs::read_to_string(at(target)).unwrap(), link);
        }
        for link in ["link", "second", "dangling", "to_folder"] {
            assert!(fs::symlink_metadata(at(link)).unwrap().is_symlink(), "{link}");
        }
        // What cannot be written is left as it is, and no temporary file is left behind.
        symlink("b", at("a")).unwrap();
        symlink("a", at("b")).unwrap();
        symlink("none/file", at("no_folder")).unwrap();
        let before = |name: &str| fs::read_link(at(name)).unwrap();
        let links = ["a", "to_folder", "no_folder"].map(|name| (name, before(name)));
        for (name, target) in links {
            write_whole(&at(name), b"x").unwrap_err();
            assert_eq!(before(name), target);
        }
        write_whole(&at("new/"), b"x").unwrap_err();
        let count = |folder: &Path| fs::read_dir(folder).unwrap().count();
        assert_eq!((count(folder.path()), count(&at("sub"))), (8, 2));
        if Path::new("/dev/null").exists() {
            symlink("/dev/null", at("null")).unwrap();
            write_whole(&at("null"), b"x").unwrap();
            assert!(!fs::metadata("/dev/null").unwrap().is_file());
            let error = write_whole(Path::new("/dev/no-such-device"), b"x").unwrap_err();
            assert_eq!(error.source.kind(), io::ErrorKind::NotFound);
        }
    }

    /// A file that a process has open is appended to through `/proc`, even where its name is gone.
    #[cfg(target_os = "linux")]
    #[test]
    fn open_files_are_written_to() {
        use std::io::{Read as _, Seek as _};
        use std::os::fd::AsRawFd as _;
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"first ").unwrap();
        let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        write_whole(&path, b"second").unwrap();
        file.rewind().unwrap();
        let mut text = String::new();
        file.read_to_string(&mut text).unwrap();
        assert_eq!(text, "first second");
    }
}
