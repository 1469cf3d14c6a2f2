//! This program as a helper of itself, and the files that arguments name.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

/// The path to start this program with.
///
/// # Errors
/// The system's.
pub(crate) fn own() -> io::Result<PathBuf> {
    let path = std::env::current_exe()?;
    // A program that was replaced or removed while it runs has no path of its own.
    match cfg!(target_os = "linux") && !path.exists() {
        true => Ok(PathBuf::from("/proc/self/exe")),
        false => Ok(path),
    }
}

/// Opens a regular file. A FIFO would wait for its writer, and a device may have no end.
///
/// # Errors
/// The system's; [`io::ErrorKind::InvalidInput`] for anything else.
#[cfg(feature = "generate")]
pub(crate) fn open_regular(path: &Path) -> io::Result<File> {
    let expect = |is_file: bool| match is_file {
        true => Ok(()),
        false => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "found a folder, FIFO, socket or device, expected a regular file",
        )),
    };
    expect(fs::metadata(path)?.is_file())?;
    let mut options = File::options();
    options.read(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt as _;
        // It may have been exchanged since the check.
        options.custom_flags(rustix::fs::OFlags::NONBLOCK.bits().cast_signed());
    }
    let file = options.open(path)?;
    expect(file.metadata()?.is_file())?;
    Ok(file)
}
