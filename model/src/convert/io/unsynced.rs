//! The machine's file system without durability.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::Path;

use super::{Disk, FileStat, Locked, Storage, StoredFile};

/// The machine's file system, for folders that need not survive a power cut: tests and fuzzers convert
/// thousands of small models, which would mostly wait for the disk.
#[derive(Debug, Clone, Copy, Default)]
pub struct Unsynced;

#[derive(Debug)]
struct UnsyncedFile(Box<dyn StoredFile>);

impl StoredFile for UnsyncedFile {
    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<usize> {
        self.0.write_at(bytes, at)
    }

    fn read_at(&self, buffer: &mut [u8], at: u64) -> io::Result<usize> {
        self.0.read_at(buffer, at)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.0.set_len(len)
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn stat(&self) -> io::Result<FileStat> {
        self.0.stat()
    }
}

impl Storage for Unsynced {
    fn create_dir_all(&self, dir: &Path) -> io::Result<()> {
        fs::create_dir_all(dir)
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn StoredFile>> {
        Ok(Box::new(UnsyncedFile(Disk.create(path)?)))
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn StoredFile>> {
        Ok(Box::new(UnsyncedFile(Disk.open(path)?)))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        Disk.rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        Disk.remove(path)
    }

    fn sync_dir(&self, _: &Path) -> io::Result<()> {
        Ok(())
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<OsString>> {
        Disk.list(dir)
    }

    fn stat(&self, path: &Path) -> io::Result<FileStat> {
        Disk.stat(path)
    }

    fn lock(&self, path: &Path, holder: &[u8]) -> io::Result<Locked> {
        Disk.lock(path, holder)
    }
}
