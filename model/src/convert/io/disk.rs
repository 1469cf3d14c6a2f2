//! The machine's file system.

use std::ffi::OsString;
use std::fs::{self, File, Metadata, OpenOptions, TryLockError};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};

use super::{FileStat, Locked, Storage, StorageLock, StoredFile};

/// The machine's file system.
#[derive(Debug, Clone, Copy, Default)]
pub struct Disk;

/// The largest number of bytes of a lock file that are read.
const HOLDER_LIMIT: u64 = 1 << 14;

fn file_stat(meta: &Metadata) -> FileStat {
    #[cfg(unix)]
    let id = {
        use std::os::unix::fs::MetadataExt as _;
        Some((meta.dev(), meta.ino()))
    };
    #[cfg(not(unix))]
    let id = None;
    FileStat { is_file: meta.is_file(), len: meta.len(), id }
}

/// Options that neither follow a link nor wait for a FIFO.
fn careful(options: &mut OpenOptions) -> &mut OpenOptions {
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt as _;
        let flags = rustix::fs::OFlags::NONBLOCK | rustix::fs::OFlags::NOFOLLOW;
        options.custom_flags(flags.bits().cast_signed());
    }
    options
}

fn regular(file: &File) -> io::Result<()> {
    match file.metadata()?.is_file() {
        true => Ok(()),
        false => Err(io::Error::other("not a regular file")),
    }
}

#[derive(Debug)]
struct DiskFile(File);

impl StoredFile for DiskFile {
    #[cfg(unix)]
    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<usize> {
        std::os::unix::fs::FileExt::write_at(&self.0, bytes, at)
    }

    #[cfg(unix)]
    fn read_at(&self, buffer: &mut [u8], at: u64) -> io::Result<usize> {
        std::os::unix::fs::FileExt::read_at(&self.0, buffer, at)
    }

    #[cfg(windows)]
    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<usize> {
        std::os::windows::fs::FileExt::seek_write(&self.0, bytes, at)
    }

    #[cfg(windows)]
    fn read_at(&self, buffer: &mut [u8], at: u64) -> io::Result<usize> {
        std::os::windows::fs::FileExt::seek_read(&self.0, buffer, at)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.0.set_len(len)
    }

    fn sync(&self) -> io::Result<()> {
        self.0.sync_all()
    }

    fn stat(&self) -> io::Result<FileStat> {
        self.0.metadata().map(|m| file_stat(&m))
    }
}

/// The open lock file: the lock ends with it.
#[derive(Debug)]
struct DiskLock {
    _file: File,
}

impl StorageLock for DiskLock {}

fn sync_dir(dir: &Path) -> io::Result<()> {
    #[cfg(unix)]
    File::open(dir).and_then(|d| d.sync_all())?;
    #[cfg(not(unix))]
    let _ = dir;
    Ok(())
}

fn parent(dir: &Path) -> PathBuf {
    match dir.parent() {
        Some(p) if !p.as_os_str().is_empty() => p.to_owned(),
        _ => PathBuf::from("."),
    }
}

impl Storage for Disk {
    fn create_dir_all(&self, dir: &Path) -> io::Result<()> {
        if dir.is_dir() {
            return Ok(());
        }
        let missing: Vec<_> =
            dir.ancestors().take_while(|a| !a.as_os_str().is_empty() && !a.exists()).collect();
        fs::create_dir_all(dir)?;
        missing.iter().rev().try_for_each(|made| sync_dir(&parent(made)))
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn StoredFile>> {
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(path)?;
        Ok(Box::new(DiskFile(file)))
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn StoredFile>> {
        let file = careful(OpenOptions::new().read(true)).open(path)?;
        regular(&file)?;
        Ok(Box::new(DiskFile(file)))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        sync_dir(dir)
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<OsString>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(dir)? {
            names.push(entry?.file_name());
        }
        names.sort();
        Ok(names)
    }

    fn stat(&self, path: &Path) -> io::Result<FileStat> {
        fs::symlink_metadata(path).map(|m| file_stat(&m))
    }

    fn lock(&self, path: &Path, holder: &[u8]) -> io::Result<Locked> {
        loop {
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true).truncate(false);
            let mut file = careful(&mut options).open(path)?;
            regular(&file)?;
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    let mut found = Vec::new();
                    (&mut file).take(HOLDER_LIMIT).read_to_end(&mut found)?;
                    return Ok(Locked::Busy(found));
                }
                Err(TryLockError::Error(e)) => return Err(e),
            }
            // Its last holder may have removed the file after it was opened here.
            let named = match fs::symlink_metadata(path) {
                Ok(meta) => file_stat(&meta),
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                Err(e) => return Err(e),
            };
            if named.id == file_stat(&file.metadata()?).id {
                file.set_len(0)?;
                file.write_all(holder)?;
                return Ok(Locked::Held(Box::new(DiskLock { _file: file })));
            }
        }
    }
}
