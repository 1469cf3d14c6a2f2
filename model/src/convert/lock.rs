//! The lock of an output folder: only one process at a time writes there.
//!
//! The lock is the operating system's, on an open file (`flock`), so it ends with its process even
//! if that is killed. The file's contents only name the holder, which removes the file when it is
//! done.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use super::error::ConvertError;
use super::io::{Locked, Storage, StorageLock};
pub use super::paths::LOCK;

/// The lock on a folder, held by this process.
#[derive(Debug)]
pub struct FolderLock<'s> {
    storage: &'s dyn Storage,
    path: PathBuf,
    // Dropped after the file's name is removed.
    _lock: Box<dyn StorageLock>,
}

impl<'s> FolderLock<'s> {
    /// Locks `dir` without waiting; the error names the process that holds the lock.
    ///
    /// # Errors
    /// [`ConvertError::Locked`], [`ConvertError::Io`].
    pub fn take(storage: &'s dyn Storage, dir: &Path) -> Result<Self, ConvertError> {
        let path = dir.join(LOCK);
        let holder = holder().to_string();
        match storage.lock(&path, holder.as_bytes()).map_err(ConvertError::io(&path))? {
            Locked::Held(lock) => Ok(Self { storage, path, _lock: lock }),
            Locked::Busy(found) => {
                Err(ConvertError::Locked { dir: dir.to_owned(), holder: describe(&found) })
            }
        }
    }
}

impl Drop for FolderLock<'_> {
    fn drop(&mut self) {
        // A file that remains is not locked, so the next run can use it.
        let _ = self.storage.remove(&self.path);
    }
}

/// What this process writes into the lock file.
fn holder() -> Value {
    let command: Vec<_> = std::env::args_os().map(|a| a.to_string_lossy().into_owned()).collect();
    json!({
        "pid": std::process::id(),
        "host": host(),
        "started": timestamp(SystemTime::now()),
        "command": command.join(" "),
    })
}

fn host() -> String {
    #[cfg(unix)]
    return rustix::system::uname().nodename().to_string_lossy().into_owned();
    #[cfg(not(unix))]
    std::env::var("COMPUTERNAME").unwrap_or_default()
}

/// A description of the holder, from the contents of a lock file.
fn describe(found: &[u8]) -> String {
    let Ok(value) = serde_json::from_slice::<Value>(found) else {
        return "another process".to_owned();
    };
    let text = |key: &str| match &value[key] {
        Value::String(s) => s.chars().take(400).collect(),
        Value::Null => "unknown".to_owned(),
        other => other.to_string(),
    };
    format!(
        "process {} on {}, started {}: {}",
        text("pid"),
        text("host"),
        text("started"),
        text("command")
    )
}

/// A time in UTC, to the second, as RFC 3339 writes it.
fn timestamp(time: SystemTime) -> String {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs();
    let (days, rest) = (since / 86_400, since % 86_400);
    // Years begin in March here, so that a leap day is the last of its year.
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = era * 400 + year + u64::from(month <= 2);
    let (hour, minute, second) = (rest / 3_600, rest / 60 % 60, rest % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timestamps() {
        // From `date -u -d @SECONDS +%FT%TZ`.
        for (seconds, expected) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (951_868_799, "2000-02-29T23:59:59Z"),
            (1_709_164_800, "2024-02-29T00:00:00Z"),
            (1_735_689_599, "2024-12-31T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(timestamp(UNIX_EPOCH + Duration::from_secs(seconds)), expected);
        }
    }

    #[test]
    fn a_holder_is_named_even_by_a_torn_file() {
        let found = describe(holder().to_string().as_bytes());
        assert!(found.contains(&format!("process {} on ", std::process::id())), "{found}");
        assert_eq!(describe(b"{\"pid\":"), "another process");
    }
}
