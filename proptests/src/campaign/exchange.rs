//! The folder through which a campaign and its kernel exchange files.
//!
//! It lies in memory where the system has `/dev/shm`, and is removed with the campaign. A campaign that
//! was killed leaves it behind; the next one removes it, since the lock of its owner is free.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tempfile::TempDir;

use super::{CampaignError, Fault, tree};

/// How the names of the folders begin.
const PREFIX: &str = "marlinspike-fuzz-";
/// The file that the owner of a folder locks.
const OWNER: &str = "owner";
/// A folder without an owner's file is being made, unless it is older than this.
const UNOWNED: Duration = Duration::from_secs(3600);
/// Bytes for a kernel's file of outputs besides its tensors, and for its log.
const SPARE: u64 = 64 << 10;

/// The folders of this process.
static FOLDERS: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// A folder of this process, removed when dropped.
#[derive(Debug)]
pub(super) struct Exchange {
    dir: TempDir,
    /// Its lock ends with this process.
    _owner: File,
}

impl Drop for Exchange {
    fn drop(&mut self) {
        FOLDERS.lock().unwrap_or_else(PoisonError::into_inner).retain(|f| f != self.dir.path());
    }
}

/// Where folders are made.
fn place() -> PathBuf {
    let shared = Path::new("/dev/shm");
    if shared.is_dir() { shared.to_owned() } else { std::env::temp_dir() }
}

impl Exchange {
    /// A new folder. Those of campaigns that were killed are removed.
    ///
    /// # Errors
    /// [`CampaignError::Io`].
    pub(super) fn new() -> Result<Self, CampaignError> {
        remove_leftovers();
        let at = place();
        let io = |path: &Path| {
            let path = path.to_owned();
            move |source| CampaignError::Io { path, source }
        };
        let dir = tempfile::Builder::new().prefix(PREFIX).tempdir_in(&at).map_err(io(&at))?;
        let mut folders = FOLDERS.lock().unwrap_or_else(PoisonError::into_inner);
        folders.push(dir.path().to_owned());
        drop(folders);
        // It is locked before it has the name that others look for.
        let (unlocked, owner) = (dir.path().join("unlocked"), dir.path().join(OWNER));
        let file = File::create(&unlocked).map_err(io(&unlocked))?;
        file.lock().map_err(io(&unlocked))?;
        fs::rename(&unlocked, &owner).map_err(io(&owner))?;
        Ok(Self { dir, _owner: file })
    }

    pub(super) fn path(&self) -> &Path {
        self.dir.path()
    }

    /// A failure of the exchange itself.
    pub(super) fn failed(&self, problem: String) -> Fault {
        Fault::Exchange { folder: self.path().display().to_string(), problem }
    }

    /// The reason why a kernel could not have written `bytes` of outputs, whatever it did.
    pub(super) fn obstacle(&self, bytes: u64) -> Option<Fault> {
        if !self.path().is_dir() {
            return Some(self.failed("the folder was removed during the run".to_owned()));
        }
        let needed = bytes.saturating_add(SPARE);
        let system = rustix::fs::statvfs(self.path()).ok()?;
        let free = system.f_bavail.saturating_mul(system.f_frsize);
        (free < needed).then(|| {
            self.failed(format!("found {free} bytes free, expected {needed} for the outputs"))
        })
    }
}

/// Removes the folders of this process, for one that is about to end.
pub(super) fn remove_own() {
    for folder in FOLDERS.lock().unwrap_or_else(PoisonError::into_inner).iter() {
        remove(folder);
    }
}

fn remove(folder: &Path) {
    // A file that another thread adds meanwhile makes the first attempts fail.
    for _ in 0..10 {
        let _ = fs::remove_dir_all(folder);
        if !folder.exists() {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Ends the kernels and removes the folders of campaigns that were killed.
pub(super) fn remove_leftovers() {
    let own = rustix::process::geteuid().as_raw();
    for entry in fs::read_dir(place()).into_iter().flatten().flatten() {
        let folder = entry.path();
        let Ok(found) = folder.symlink_metadata() else { continue };
        let is_ours = entry.file_name().to_string_lossy().starts_with(PREFIX)
            && found.is_dir()
            && found.uid() == own;
        if !is_ours || FOLDERS.lock().unwrap_or_else(PoisonError::into_inner).contains(&folder) {
            continue;
        }
        let is_left = match File::options().read(true).write(true).open(folder.join(OWNER)) {
            Ok(owner) => owner.try_lock().is_ok(),
            Err(_) => {
                let age = found.modified().ok().and_then(|made| made.elapsed().ok());
                age.is_some_and(|age| age > UNOWNED)
            }
        };
        if is_left {
            tree::end_marked(&folder);
            remove(&folder);
        }
    }
}
