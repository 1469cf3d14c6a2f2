//! Compiled modules on disk, addressed by what they were compiled from.
//!
//! An entry's name is the SHA-256 of the source's text, its options and the architecture, followed
//! by the compiler's version. So no entry is ever stale, and any number of processes may share a
//! folder: each writes an entry to a temporary file and renames it, and a second process replaces
//! it with the same bytes. An entry holds its own digest; a damaged one is compiled again. When the
//! entries exceed a size, the least recently used are removed.
//!
//! A machine without NVRTC takes the entry of the newest compiler that has one.
//!
//! A package may ship a second folder of entries. It is read before anything is compiled, whichever
//! compiler made them, and never written.

use std::{
    fs, io,
    io::Write,
    path::{Path, PathBuf},
    time::SystemTime,
};

use marlinspike_kernels::Source;
use sha2::{Digest, Sha256};

use crate::{
    error::AccelError,
    nvrtc::{Arch, Nvrtc, Parameter, options, text},
};

/// Environment variable with the folder of the cache; `off` or empty: no cache.
pub const FOLDER_VARIABLE: &str = "MARLINSPIKE_CACHE";

/// Environment variable with a folder of shipped entries.
pub const SHIPPED_VARIABLE: &str = "MARLINSPIKE_MODULES";

/// Size limit of all entries in bytes: some thousand modules.
pub const DEFAULT_LIMIT: u64 = 256 << 20;

const EXTENSION: &str = "cubin";
/// Head of an entry: format and version, then the SHA-256 of the machine code behind it.
const MAGIC: &[u8; 16] = b"marlinspike 0001";
const HEAD: usize = MAGIC.len() + 32;

/// A folder of compiled modules.
#[derive(Debug, Clone)]
pub struct ModuleCache {
    folder: Option<PathBuf>,
    limit: u64,
    shipped: Option<PathBuf>,
}

/// Where a module came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// It was in the cache.
    Cached,
    /// It was compiled and written to the cache.
    Compiled,
    /// It was compiled, and could not be written to the cache.
    NotKept,
}

impl ModuleCache {
    /// The cache that [`FOLDER_VARIABLE`] names; else `marlinspike` in the user's cache folder
    /// (`XDG_CACHE_HOME`, or `.cache` in `HOME`); else none. With the entries that
    /// [`SHIPPED_VARIABLE`] names.
    pub fn from_environment() -> Self {
        let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
        let folder = match std::env::var_os(FOLDER_VARIABLE) {
            Some(value) if value.is_empty() || value == "off" => None,
            Some(value) => Some(value.into()),
            None => variable("XDG_CACHE_HOME")
                .map(PathBuf::from)
                .or_else(|| variable("HOME").map(|home| Path::new(&home).join(".cache")))
                .map(|folder| folder.join("marlinspike")),
        };
        Self {
            folder,
            limit: DEFAULT_LIMIT,
            shipped: variable(SHIPPED_VARIABLE).map(PathBuf::from),
        }
    }

    /// A cache in `folder`, whose entries take at most `limit` bytes together. The first entry
    /// creates the folder.
    pub fn at(folder: impl Into<PathBuf>, limit: u64) -> Self {
        Self { folder: Some(folder.into()), limit, shipped: None }
    }

    /// No cache: every module is compiled.
    pub fn none() -> Self {
        Self { folder: None, limit: 0, shipped: None }
    }

    /// The same cache with a folder of shipped entries.
    pub fn with_shipped(self, folder: impl Into<PathBuf>) -> Self {
        Self { shipped: Some(folder.into()), ..self }
    }

    /// The folder, where there is one.
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// Machine code of `source` under these parameters for `arch`, from the cache or from `nvrtc`.
    ///
    /// `nvrtc` is the compiler, or the reason why it is missing.
    ///
    /// # Errors
    /// [`AccelError::Compile`]; the error in `nvrtc` if the compiler is needed. A cache that cannot
    /// be read or written is no error: see [`Origin::NotKept`].
    pub fn module(
        &self,
        nvrtc: &Result<Nvrtc, AccelError>,
        source: &Source,
        arch: Arch,
        parameters: &[Parameter],
    ) -> Result<(Vec<u8>, Origin), AccelError> {
        let digest = digest(source, arch, parameters);
        if let Some(code) = self.shipped.as_deref().and_then(|folder| newest(folder, &digest)) {
            return Ok((code, Origin::Cached));
        }
        let compiler = match nvrtc {
            Ok(compiler) => compiler,
            Err(missing) => {
                let found = self.folder.as_deref().and_then(|folder| newest(folder, &digest));
                return Ok((found.ok_or_else(|| missing.clone())?, Origin::Cached));
            }
        };
        let (major, minor) = compiler.version()?;
        let entry = self
            .folder
            .as_ref()
            .map(|folder| folder.join(format!("{digest}-{major}.{minor}.{EXTENSION}")));
        if let Some(code) = entry.as_deref().and_then(read) {
            return Ok((code, Origin::Cached));
        }
        let code = compiler.compile(source, arch, parameters)?;
        let kept = entry.is_some_and(|entry| write(&entry, &code).is_ok());
        if kept {
            self.evict();
        }
        Ok((code, if kept { Origin::Compiled } else { Origin::NotKept }))
    }

    /// Removes the least recently used entries until the rest fit.
    fn evict(&self) {
        let Some(folder) = &self.folder else { return };
        let mut entries = entries(folder);
        let mut total: u64 = entries.iter().map(|entry| entry.1).sum();
        entries.sort_by_key(|entry| entry.0);
        // The newest stays, however large: it is in use.
        for (_, size, path) in entries.iter().take(entries.len().saturating_sub(1)) {
            if total <= self.limit {
                break;
            }
            // Another process may have removed it already.
            let _ = fs::remove_file(path);
            total -= size;
        }
    }
}

/// The entry of the newest compiler that has one.
fn newest(folder: &Path, digest: &str) -> Option<Vec<u8>> {
    let version = |path: &Path| {
        let name = path.file_name()?.to_str()?.strip_suffix(".cubin")?;
        let (major, minor) = name.strip_prefix(digest)?.strip_prefix('-')?.split_once('.')?;
        Some((major.parse::<u32>().ok()?, minor.parse::<u32>().ok()?))
    };
    let mut found: Vec<_> = fs::read_dir(folder)
        .ok()?
        .flatten()
        .filter_map(|entry| Some((version(&entry.path())?, entry.path())))
        .collect();
    found.sort();
    found.iter().rev().find_map(|(_, path)| read(path))
}

/// Last use, size and path of every entry.
fn entries(folder: &Path) -> Vec<(SystemTime, u64, PathBuf)> {
    let Ok(all) = fs::read_dir(folder) else { return Vec::new() };
    all.flatten()
        .filter(|entry| entry.path().extension().is_some_and(|e| e == EXTENSION))
        .filter_map(|entry| {
            let about = entry.metadata().ok()?;
            Some((about.modified().ok()?, about.len(), entry.path()))
        })
        .collect()
}

/// The name of an entry without the compiler's version, in hexadecimal digits.
fn digest(source: &Source, arch: Arch, parameters: &[Parameter]) -> String {
    let mut hash = Sha256::new();
    let mut part = |bytes: &[u8]| {
        hash.update((bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    };
    part(source.name.as_bytes());
    part(text(source, parameters).as_bytes());
    for option in options(arch) {
        part(option.as_bytes());
    }
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The machine code of an intact entry; reading it counts as a use.
fn read(path: &Path) -> Option<Vec<u8>> {
    let mut bytes = fs::read(path).ok()?;
    let whole = bytes.len() > HEAD
        && bytes.starts_with(MAGIC)
        && Sha256::digest(&bytes[HEAD..]).as_slice() == &bytes[MAGIC.len()..HEAD];
    if !whole {
        return None;
    }
    bytes.drain(..HEAD);
    if let Ok(file) = fs::File::options().append(true).open(path) {
        // Only the order of eviction depends on it.
        let _ = file.set_modified(SystemTime::now());
    }
    Some(bytes)
}

/// Writes an entry to a temporary file, then renames it, so that no reader sees half of it.
fn write(path: &Path, code: &[u8]) -> io::Result<()> {
    let folder = path.parent().ok_or(io::ErrorKind::InvalidInput)?;
    fs::create_dir_all(folder)?;
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    file.write_all(MAGIC)?;
    file.write_all(&Sha256::digest(code))?;
    file.write_all(code)?;
    file.persist(path).map_err(|error| error.error)?;
    Ok(())
}
