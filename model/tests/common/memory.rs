//! A file system in memory whose calls can fail and whose power can be cut.
//!
//! Durable are: a file's bytes as of its last sync, a name as of its folder's last sync. Any part
//! of later changes may survive a power cut, in any combination.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use marlinspike_model::convert::io::{FileStat, Locked, Storage, StorageLock, StoredFile};

use super::Noise;

/// A fault at the call of a given number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The process is killed: this call and all later ones have no effect.
    Kill,
    /// This call fails once.
    Error(io::ErrorKind),
    /// From this call on, the disk is full.
    Full,
    /// From this call on, each write writes only a part of its bytes.
    Short,
    /// This call is interrupted by a signal, if it reads or writes.
    Interrupted,
    /// The first sync from this call on fails, and its data is never written.
    FailedSync,
    /// This write succeeds, with one bit flipped.
    Flip,
    /// This write succeeds without writing.
    Lost,
}

/// State of the disk after a power cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Power {
    /// Only durable data.
    Durable,
    /// All names, with each file's durable bytes.
    NamesOnly,
    /// A random part of the data that was not durable, by this seed.
    Some(u32),
}

#[derive(Debug, Clone)]
enum Write {
    Bytes(u64, Vec<u8>),
    Len(u64),
}

#[derive(Debug, Clone, Default)]
struct Inode {
    now: Vec<u8>,
    durable: Vec<u8>,
    pending: Vec<Write>,
}

#[derive(Debug, Clone)]
enum Change {
    Link(PathBuf, usize),
    Unlink(PathBuf),
    Rename(PathBuf, PathBuf, usize),
}

type Hook = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct State {
    inodes: Vec<Inode>,
    names: BTreeMap<PathBuf, usize>,
    durable: BTreeMap<PathBuf, usize>,
    pending: Vec<Change>,
    locked: BTreeSet<usize>,
    calls: u64,
    fault: Option<(u64, Fault)>,
    hook: Option<(u64, Hook)>,
    killed: bool,
    /// Whether the fault has hit a call that it applies to.
    hit: bool,
}

impl Write {
    fn apply(&self, bytes: &mut Vec<u8>) {
        match self {
            Self::Len(len) => bytes.resize(*len as usize, 0),
            Self::Bytes(at, written) => {
                let (at, end) = (*at as usize, *at as usize + written.len());
                if bytes.len() < end {
                    bytes.resize(end, 0);
                }
                bytes[at..end].copy_from_slice(written);
            }
        }
    }
}

impl Change {
    fn apply(&self, names: &mut BTreeMap<PathBuf, usize>) {
        match self {
            Self::Link(path, inode) => drop(names.insert(path.clone(), *inode)),
            Self::Unlink(path) => drop(names.remove(path)),
            Self::Rename(from, to, inode) => {
                names.remove(from);
                names.insert(to.clone(), *inode);
            }
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Call {
    Write,
    Make,
    Sync,
    Read,
    Other,
}

impl State {
    /// Counts a call and returns its fault.
    fn call(&mut self, call: Call) -> io::Result<Option<Fault>> {
        let number = self.calls;
        self.calls += 1;
        if self.killed {
            return Err(io::Error::other("killed"));
        }
        let Some((at, fault)) = self.fault else { return Ok(None) };
        let (now, from) = (number == at, number >= at);
        match fault {
            Fault::Kill if now => {
                (self.killed, self.hit) = (true, true);
                Err(io::Error::other("killed"))
            }
            Fault::Error(kind) if now => {
                self.hit = true;
                Err(kind.into())
            }
            Fault::Full if from && matches!(call, Call::Write | Call::Make) => {
                self.hit = true;
                Err(io::ErrorKind::StorageFull.into())
            }
            Fault::Interrupted if now && matches!(call, Call::Write | Call::Read) => {
                self.hit = true;
                Err(io::ErrorKind::Interrupted.into())
            }
            Fault::FailedSync if from && !self.hit && call == Call::Sync => {
                self.hit = true;
                Ok(Some(fault))
            }
            Fault::Flip | Fault::Lost if now && call == Call::Write => {
                self.hit = true;
                Ok(Some(fault))
            }
            Fault::Short if from && call == Call::Write => Ok(Some(fault)),
            _ => Ok(None),
        }
    }

    fn inode(&self, path: &Path) -> io::Result<usize> {
        self.names.get(path).copied().ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn change(&mut self, change: Change) {
        change.apply(&mut self.names);
        self.pending.push(change);
    }
}

#[derive(Clone, Default)]
pub struct MemoryDisk(Arc<Mutex<State>>);

impl fmt::Debug for MemoryDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MemoryDisk")
    }
}

#[derive(Debug)]
struct MemoryFile {
    disk: MemoryDisk,
    inode: usize,
}

#[derive(Debug)]
struct MemoryLock {
    disk: MemoryDisk,
    inode: usize,
}

impl StorageLock for MemoryLock {}

impl Drop for MemoryLock {
    fn drop(&mut self) {
        self.disk.state().locked.remove(&self.inode);
    }
}

impl MemoryDisk {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A separate disk with the same contents, all durable.
    pub fn copy(&self) -> Self {
        let state = self.state();
        let settled =
            |i: &Inode| Inode { now: i.now.clone(), durable: i.now.clone(), pending: Vec::new() };
        let inodes = state.inodes.iter().map(settled).collect();
        let (names, durable) = (state.names.clone(), state.names.clone());
        Self(Arc::new(Mutex::new(State { inodes, names, durable, ..State::default() })))
    }

    /// Makes the call of this number, counted from now, fail.
    pub fn fail(&self, at: u64, fault: Fault) {
        let mut state = self.state();
        (state.calls, state.hit, state.fault) = (0, false, Some((at, fault)));
    }

    /// Runs `hook` before the call of this number, counted from now.
    pub fn hook(&self, at: u64, hook: impl FnOnce() + Send + 'static) {
        let mut state = self.state();
        state.calls = 0;
        state.hook = Some((at, Box::new(hook)));
    }

    /// Whether the hook has not run.
    pub fn hook_waits(&self) -> bool {
        self.state().hook.is_some()
    }

    /// Whether the fault has hit a call.
    pub fn hit(&self) -> bool {
        self.state().hit
    }

    /// Calls since the last fault or hook was set.
    pub fn calls(&self) -> u64 {
        self.state().calls
    }

    /// Continues without faults.
    pub fn revive(&self) {
        let mut state = self.state();
        (state.killed, state.fault, state.hook) = (false, None, None);
    }

    /// Cuts the power and restarts.
    pub fn lose_power(&self, power: Power) {
        self.revive();
        let mut state = self.state();
        let mut noise = Noise::new(&format!("{power:?}"));
        let mut survives = || noise.next().is_multiple_of(2);
        let state = &mut *state;
        if let Power::Some(_) = power {
            for change in state.pending.iter().filter(|_| survives()) {
                change.apply(&mut state.durable);
            }
        }
        if power == Power::NamesOnly {
            state.durable = state.names.clone();
        }
        for inode in &mut state.inodes {
            if let Power::Some(_) = power {
                for write in inode.pending.iter().filter(|_| survives()) {
                    write.apply(&mut inode.durable);
                }
            }
            inode.now = inode.durable.clone();
            inode.pending.clear();
        }
        state.names = state.durable.clone();
        state.pending.clear();
    }

    /// Name and bytes of every file.
    pub fn contents(&self) -> BTreeMap<String, Vec<u8>> {
        let state = self.state();
        let name = |p: &Path| p.file_name().unwrap().to_str().unwrap().to_owned();
        state.names.iter().map(|(p, &i)| (name(p), state.inodes[i].now.clone())).collect()
    }

    /// Changes a file without a call of the program.
    pub fn edit(&self, path: &Path, edit: impl FnOnce(&mut Vec<u8>)) {
        let mut state = self.state();
        let inode = state.inode(path).unwrap();
        let inode = &mut state.inodes[inode];
        edit(&mut inode.now);
        inode.durable = inode.now.clone();
    }

    /// Adds a file without a call of the program.
    pub fn add(&self, path: &Path, bytes: &[u8]) {
        let mut state = self.state();
        let bytes = bytes.to_vec();
        state.inodes.push(Inode { now: bytes.clone(), durable: bytes, pending: Vec::new() });
        let inode = state.inodes.len() - 1;
        state.names.insert(path.to_owned(), inode);
        state.durable.insert(path.to_owned(), inode);
    }

    /// Removes a file without a call of the program.
    pub fn delete(&self, path: &Path) {
        let mut state = self.state();
        state.names.remove(path).unwrap();
        state.durable.remove(path);
    }

    fn begin(&self, call: Call) -> io::Result<(MutexGuard<'_, State>, Option<Fault>)> {
        let mut state = self.state();
        let calls = state.calls;
        if let Some((_, hook)) = state.hook.take_if(|(at, _)| *at == calls) {
            drop(state);
            hook();
            state = self.state();
        }
        let fault = state.call(call)?;
        Ok((state, fault))
    }

    fn write(state: &mut State, inode: usize, write: Write) {
        let inode = &mut state.inodes[inode];
        write.apply(&mut inode.now);
        inode.pending.push(write);
    }
}

impl StoredFile for MemoryFile {
    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<usize> {
        let (mut state, fault) = self.disk.begin(Call::Write)?;
        let mut written = bytes.to_vec();
        match fault {
            Some(Fault::Short) => written.truncate(bytes.len().div_ceil(2)),
            Some(Fault::Flip) => written[bytes.len() / 2] ^= 0x10,
            Some(Fault::Lost) => return Ok(bytes.len()),
            _ => {}
        }
        let taken = written.len();
        MemoryDisk::write(&mut state, self.inode, Write::Bytes(at, written));
        Ok(taken)
    }

    fn read_at(&self, buffer: &mut [u8], at: u64) -> io::Result<usize> {
        let (state, _) = self.disk.begin(Call::Read)?;
        let bytes = &state.inodes[self.inode].now;
        let rest = bytes.get(at as usize..).unwrap_or_default();
        // A short read; the caller must read again.
        let n = rest.len().min(buffer.len()).min(3000);
        buffer[..n].copy_from_slice(&rest[..n]);
        Ok(n)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        let (mut state, _) = self.disk.begin(Call::Make)?;
        MemoryDisk::write(&mut state, self.inode, Write::Len(len));
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        let (mut state, fault) = self.disk.begin(Call::Sync)?;
        let inode = &mut state.inodes[self.inode];
        inode.pending.clear();
        if fault == Some(Fault::FailedSync) {
            // As on Linux: the pages become clean although they were never written.
            return Err(io::Error::other("input/output error"));
        }
        inode.durable = inode.now.clone();
        Ok(())
    }

    fn stat(&self) -> io::Result<FileStat> {
        let (state, _) = self.disk.begin(Call::Other)?;
        let len = state.inodes[self.inode].now.len() as u64;
        Ok(FileStat { is_file: true, len, id: Some((0, self.inode as u64)) })
    }
}

impl Storage for MemoryDisk {
    fn create_dir_all(&self, _: &Path) -> io::Result<()> {
        self.begin(Call::Make).map(drop)
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn StoredFile>> {
        let (mut state, _) = self.begin(Call::Make)?;
        if state.names.contains_key(path) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        state.inodes.push(Inode::default());
        let inode = state.inodes.len() - 1;
        state.change(Change::Link(path.to_owned(), inode));
        Ok(Box::new(MemoryFile { disk: self.clone(), inode }))
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn StoredFile>> {
        let (state, _) = self.begin(Call::Other)?;
        let inode = state.inode(path)?;
        Ok(Box::new(MemoryFile { disk: self.clone(), inode }))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let (mut state, _) = self.begin(Call::Other)?;
        let inode = state.inode(from)?;
        state.change(Change::Rename(from.to_owned(), to.to_owned(), inode));
        Ok(())
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        let (mut state, _) = self.begin(Call::Other)?;
        state.inode(path)?;
        state.change(Change::Unlink(path.to_owned()));
        Ok(())
    }

    fn sync_dir(&self, _: &Path) -> io::Result<()> {
        let (mut state, fault) = self.begin(Call::Sync)?;
        state.pending.clear();
        if fault == Some(Fault::FailedSync) {
            return Err(io::Error::other("input/output error"));
        }
        state.durable = state.names.clone();
        Ok(())
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<OsString>> {
        let (state, _) = self.begin(Call::Other)?;
        let inside = state.names.keys().filter(|p| p.parent() == Some(dir));
        Ok(inside.map(|p| p.file_name().unwrap().to_owned()).collect())
    }

    fn stat(&self, path: &Path) -> io::Result<FileStat> {
        let (state, _) = self.begin(Call::Other)?;
        if path.as_os_str().as_encoded_bytes().ends_with(b"/.") {
            return Ok(FileStat { is_file: false, len: 0, id: None });
        }
        let inode = state.inode(path)?;
        let len = state.inodes[inode].now.len() as u64;
        Ok(FileStat { is_file: true, len, id: Some((0, inode as u64)) })
    }

    fn lock(&self, path: &Path, holder: &[u8]) -> io::Result<Locked> {
        let (mut state, _) = self.begin(Call::Make)?;
        let inode = match state.inode(path) {
            Ok(inode) => inode,
            Err(_) => {
                state.inodes.push(Inode::default());
                let inode = state.inodes.len() - 1;
                state.change(Change::Link(path.to_owned(), inode));
                inode
            }
        };
        if !state.locked.insert(inode) {
            return Ok(Locked::Busy(state.inodes[inode].now.clone()));
        }
        let holder = holder.to_vec();
        MemoryDisk::write(&mut state, inode, Write::Len(0));
        MemoryDisk::write(&mut state, inode, Write::Bytes(0, holder));
        Ok(Locked::Held(Box::new(MemoryLock { disk: self.clone(), inode })))
    }
}
