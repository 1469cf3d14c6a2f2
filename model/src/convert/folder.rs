//! The output folder: its lock, its files, and which of them are intact.
//!
//! A conversion locks the folder, lists it, hashes the inputs, verifies the files of an earlier run
//! and writes the progress file. It writes the shards one by one (see [`super::io`]) and updates
//! the progress file after each, then writes the side files, the index, the config and, last, the
//! manifest. Finally it removes the progress file and the lock file.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use rayon::prelude::*;

use super::error::ConvertError;
use super::inputs::Inputs;
use super::io::{self, PartFile, Storage, is_part};
use super::lock::{FolderLock, LOCK};
use super::manifest::{FileRecord, MANIFEST, Manifest, PROGRESS};

/// A locked output folder.
#[derive(Debug)]
pub struct Folder<'s> {
    storage: &'s dyn Storage,
    dir: PathBuf,
    /// What the conversion has done so far.
    manifest: Manifest,
    /// What the folder's own manifest said before this run.
    found: Option<Manifest>,
    names: Vec<String>,
    // Declared last, so dropped last: everything else is closed before the folder is unlocked.
    _lock: FolderLock<'s>,
}

/// The result of verifying an earlier run's files.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Kept {
    /// Whether every file was finished and is intact, so that nothing is left to do.
    pub complete: bool,
    /// Names of finished files that are missing or were changed.
    pub damaged: Vec<String>,
}

/// Whether loaders would take a file of this name for a part of the model.
pub fn is_model_file(name: &str) -> bool {
    name.ends_with(".safetensors") || name.ends_with(".index.json") || name == "config.json"
}

/// Whether the file exists with the recorded length and hash.
///
/// # Errors
/// The storage's. A file that is missing or not regular is no error.
pub fn is_right(
    storage: &dyn Storage,
    dir: &Path,
    record: &FileRecord,
) -> Result<bool, ConvertError> {
    let path = dir.join(&record.name);
    match storage.stat(&path) {
        Ok(stat) if stat.is_file && stat.len == record.bytes => {}
        Ok(_) => return Ok(false),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(false),
        Err(e) => return Err(ConvertError::io(&path)(e)),
    }
    let (len, sha256) = io::hash_file(storage, &path).map_err(ConvertError::io(&path))?;
    Ok((len, &sha256) == (record.bytes, &record.sha256))
}

impl<'s> Folder<'s> {
    /// Creates and locks the folder, and checks that the conversion `asked` may be written there.
    /// Existing files stay unchanged. With `force`, the folder may hold another conversion.
    ///
    /// # Errors
    /// [`ConvertError::Locked`]; [`ConvertError::Occupied`] naming what is there;
    /// [`ConvertError::Manifest`]; [`ConvertError::Io`].
    pub fn enter(
        storage: &'s dyn Storage,
        dir: &Path,
        model_dir: &Path,
        asked: Manifest,
        inputs: &Inputs,
        force: bool,
    ) -> Result<Self, ConvertError> {
        let occupied = |reason: String| ConvertError::Occupied { dir: dir.to_owned(), reason };
        storage.create_dir_all(dir).map_err(|e| match e.kind() {
            ErrorKind::AlreadyExists | ErrorKind::NotADirectory => {
                occupied(format!("found {}, expected a folder or an unused name", in_the_way(dir)))
            }
            _ => ConvertError::io(dir)(e),
        })?;
        let id = storage.stat(&dir.join(".")).map_err(ConvertError::io(dir))?.id;
        if id.is_some() && id == io::Disk.stat(&model_dir.join(".")).ok().and_then(|s| s.id) {
            return Err(occupied("this is the model's own folder".to_owned()));
        }
        let lock = FolderLock::take(storage, dir)?;
        let names = storage.list(dir).map_err(ConvertError::io(dir))?;
        let names: Vec<_> = names.iter().map(|n| n.to_string_lossy().into_owned()).collect();
        for name in &names {
            let id = storage.stat(&dir.join(name)).ok().and_then(|s| s.id);
            if let Some(input) = id.and_then(|id| inputs.with_id(id)) {
                return Err(occupied(format!(
                    "`{name}` is the model's own `{input}` (the same device and inode)"
                )));
            }
        }
        let found = match Manifest::read(storage, &dir.join(MANIFEST))? {
            Some(found) => Some(found),
            None => Manifest::read(storage, &dir.join(PROGRESS))?,
        };
        let own = |name: &String| found.as_ref().is_some_and(|m| m.planned.contains(name));
        let in_the_way = |name: &&String| is_model_file(name) || asked.planned.contains(name);
        let foreign: Vec<_> =
            names.iter().filter(in_the_way).filter(|n| !own(n)).map(|n| format!("`{n}`")).collect();
        if !foreign.is_empty() {
            let more = foreign.len().saturating_sub(8);
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            let list = foreign[..foreign.len().min(8)].join(", ");
            return Err(occupied(format!(
                "holds files that no manifest of a conversion lists: {list}{more}; expected a folder \
                 without them"
            )));
        }
        if let Some(difference) = found.as_ref().and_then(|m| m.difference(&asked))
            && !force
        {
            return Err(occupied(format!("holds another conversion: {difference}")));
        }
        Ok(Self { storage, dir: dir.to_owned(), manifest: asked, found, names, _lock: lock })
    }

    /// Prepares the folder once the inputs' hashes are known: removes temporary files of killed
    /// runs, then verifies finished files on the current pool or starts over.
    ///
    /// # Errors
    /// [`ConvertError::Occupied`] when an input has changed since; [`ConvertError::Io`].
    pub fn open(&mut self, inputs: &Inputs, force: bool) -> Result<Kept, ConvertError> {
        self.manifest.set_inputs(inputs.records());
        let changed = self.found.as_ref().and_then(|m| m.changed_input(&self.manifest));
        // Without finished files, outputs of different inputs cannot mix.
        let empty = self.found.as_ref().is_some_and(|m| !m.complete && m.files.is_empty());
        let anew = force || (empty && changed.is_some());
        if let Some(input) = changed
            && !anew
        {
            let reason =
                format!("was converted from another `{input}`: its SHA-256 has changed since then");
            return Err(ConvertError::Occupied { dir: self.dir.clone(), reason });
        }
        self.sweep()?;
        match self.found.take() {
            Some(found) if anew => {
                self.clear(found)?;
                self.save()?;
                Ok(Kept::default())
            }
            Some(found) => self.resume(found),
            None => {
                self.save()?;
                Ok(Kept::default())
            }
        }
    }

    /// Removes the temporary files of killed runs. No other process writes while the lock is held.
    fn sweep(&self) -> Result<(), ConvertError> {
        // The second form is that of version 0.1.0 before it had a lock.
        let old = |n: &str| n.starts_with(".model") && n.ends_with(".safetensors.partial");
        for name in self.names.iter().filter(|n| is_part(n) || old(n)) {
            self.remove(name)?;
        }
        Ok(())
    }

    fn remove(&self, name: &str) -> Result<(), ConvertError> {
        let path = self.dir.join(name);
        match self.storage.remove(&path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(ConvertError::io(&path)(e)),
            _ => Ok(()),
        }
    }

    fn sync(&self) -> Result<(), ConvertError> {
        self.storage.sync_dir(&self.dir).map_err(ConvertError::io(&self.dir))
    }

    /// Verifies the files that an earlier run has finished.
    fn resume(&mut self, found: Manifest) -> Result<Kept, ConvertError> {
        let right: Vec<bool> = found
            .files
            .par_iter()
            .with_max_len(1)
            .map(|f| is_right(self.storage, &self.dir, f))
            .collect::<Result<_, _>>()?;
        let mut kept = Kept::default();
        for (file, right) in found.files.into_iter().zip(right) {
            match right {
                true => self.manifest.files.push(file),
                false => kept.damaged.push(file.name),
            }
        }
        if found.complete && kept.damaged.is_empty() {
            self.remove(PROGRESS)?;
            self.sync()?;
            kept.complete = true;
            return Ok(kept);
        }
        self.save()?;
        if found.complete {
            // Without its manifest, the folder no longer counts as complete.
            self.remove(MANIFEST)?;
            self.sync()?;
        }
        Ok(kept)
    }

    /// Removes the files of another conversion: those that its manifest lists.
    fn clear(&self, found: Manifest) -> Result<(), ConvertError> {
        // During the removal, the progress file lists the files and no manifest calls them
        // complete.
        let unfinished = found.unfinished();
        self.put(PROGRESS, &unfinished.to_bytes())?;
        self.remove(MANIFEST)?;
        self.sync()?;
        for name in unfinished.planned.iter().filter(|n| self.names.contains(n)) {
            if ![LOCK, MANIFEST, PROGRESS].contains(&name.as_str()) {
                self.remove(name)?;
            }
        }
        self.sync()
    }

    fn save(&self) -> Result<(), ConvertError> {
        self.put(PROGRESS, &self.manifest.to_bytes()).map(drop)
    }

    fn put(&self, name: &str, bytes: &[u8]) -> Result<(u64, String), ConvertError> {
        let part = self.create(name)?;
        part.write_at(0, bytes).map_err(ConvertError::io(part.path()))?;
        part.finish().map_err(ConvertError::finish(part.path()))
    }

    /// Creates a file that becomes `name`, under a temporary name.
    ///
    /// # Errors
    /// [`ConvertError::Io`].
    pub fn create(&self, name: &str) -> Result<PartFile<'s>, ConvertError> {
        PartFile::create(self.storage, &self.dir, name)
            .map_err(ConvertError::io(&self.dir.join(name)))
    }

    /// The storage and the folder's path, for threads that do not hold the folder.
    pub fn place(&self) -> Place<'s> {
        Place { storage: self.storage, dir: self.dir.clone() }
    }

    /// Whether a file is finished: verified or written by this run.
    pub fn has(&self, name: &str) -> bool {
        self.manifest.file(name).is_some()
    }

    /// Records a finished file.
    ///
    /// # Errors
    /// [`ConvertError::Io`].
    pub fn record(&mut self, name: &str, bytes: u64, sha256: String) -> Result<(), ConvertError> {
        self.manifest.files.retain(|f| f.name != name);
        self.manifest.files.push(FileRecord { name: name.to_owned(), bytes, sha256 });
        self.save()
    }

    /// Writes a small file as a whole and records it.
    ///
    /// # Errors
    /// [`ConvertError::Io`], [`ConvertError::ReadBack`].
    pub fn write(&mut self, name: &str, bytes: &[u8]) -> Result<(), ConvertError> {
        let (len, sha256) = self.put(name, bytes)?;
        self.record(name, len, sha256)
    }

    /// Removes all finished files from the record, since an input has changed.
    ///
    /// # Errors
    /// [`ConvertError::Io`].
    pub fn distrust(&mut self) -> Result<(), ConvertError> {
        self.manifest.files.clear();
        self.save()
    }

    /// A hash of the program's version, the options and the inputs.
    pub fn identity(&self) -> String {
        self.manifest.identity()
    }

    /// Writes the manifest, once every file is verified and durable.
    ///
    /// # Errors
    /// [`ConvertError::Io`], [`ConvertError::ReadBack`].
    pub fn complete(mut self) -> Result<(), ConvertError> {
        self.manifest.complete = true;
        self.manifest.files.sort_by(|a, b| a.name.cmp(&b.name));
        self.put(MANIFEST, &self.manifest.to_bytes())?;
        self.remove(PROGRESS)?;
        self.sync()
    }
}

/// Where files are created.
#[derive(Debug, Clone)]
pub struct Place<'s> {
    /// The file system.
    pub storage: &'s dyn Storage,
    /// The output folder.
    pub dir: PathBuf,
}

/// Describes what has the name of the folder `dir`, or of a folder that leads to it, and is not a folder.
fn in_the_way(dir: &Path) -> String {
    let ancestors: Vec<_> = dir.ancestors().filter(|a| !a.as_os_str().is_empty()).collect();
    let is_in_the_way = |path: &&&Path| path.symlink_metadata().is_ok() && !path.is_dir();
    let Some(path) = ancestors.iter().rev().find(is_in_the_way) else {
        return "no folder".to_owned();
    };
    let what = match (path.read_link(), path.metadata()) {
        (Ok(target), Err(_)) => format!("a link to `{}`, which does not exist", target.display()),
        (Ok(target), Ok(_)) => format!("a link to the file `{}`", target.display()),
        (Err(_), Ok(found)) if found.is_file() => "a file".to_owned(),
        (Err(_), _) => "a FIFO, socket or device".to_owned(),
    };
    match *path == dir {
        true => what,
        false => format!("{what} at `{}`", path.display()),
    }
}
