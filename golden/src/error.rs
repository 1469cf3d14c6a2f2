//! What can be wrong with the golden data, one variant per failure.

use std::{io, path::PathBuf};

/// Golden data that cannot be found, read or trusted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GoldenError {
    /// No folder with a `manifest.json` at any of the places searched.
    #[error("no golden data: found no manifest.json in {}; set {} to the folder that holds it",
        searched.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(", "),
        crate::ROOT_VARIABLE)]
    RootNotFound {
        /// Folders searched, in order.
        searched: Vec<PathBuf>,
    },
    /// The operating system refused to read a file or folder.
    #[error("{}: {source}", path.display())]
    Io {
        /// File or folder.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// The manifest is not the JSON that is expected of it.
    #[error("{}: not a manifest: {source}", path.display())]
    ManifestSyntax {
        /// The manifest.
        path: PathBuf,
        /// Where and why.
        source: serde_json::Error,
    },
    /// The manifest has a version that this crate does not know.
    #[error("{}: found manifest version {found}, expected {expected}", path.display())]
    ManifestVersion {
        /// The manifest.
        path: PathBuf,
        /// Version found.
        found: u64,
        /// Version expected.
        expected: u64,
    },
    /// A manifest path that is absolute or leaves the golden folder.
    #[error("manifest entry `{path}`: expected a relative path below data/ without `.` or `..`")]
    UnsafePath {
        /// The path as written.
        path: String,
    },
    /// A path that two manifest entries name.
    #[error("manifest entry `{path}`: listed twice")]
    DuplicatePath {
        /// The path as written.
        path: String,
    },
    /// A listed file does not exist.
    #[error("{}: listed in the manifest, but missing", path.display())]
    Missing {
        /// The file.
        path: PathBuf,
    },
    /// A file of `data/` that the manifest does not list.
    #[error("{}: not listed in the manifest", path.display())]
    Unlisted {
        /// The file.
        path: PathBuf,
    },
    /// A file has another length than the manifest says.
    #[error("{}: found {found} bytes, expected {expected}", path.display())]
    Length {
        /// The file.
        path: PathBuf,
        /// Bytes found.
        found: u64,
        /// Bytes listed.
        expected: u64,
    },
    /// A file has other contents than the manifest says.
    #[error("{}: found SHA-256 {found}, expected {expected}", path.display())]
    Hash {
        /// The file.
        path: PathBuf,
        /// Hash found, lower-case hexadecimal.
        found: String,
        /// Hash listed.
        expected: String,
    },
    /// No checkpoint of this name.
    #[error("no golden checkpoint `{name}`, expected one of {}", known.join(", "))]
    UnknownCheckpoint {
        /// Name asked for.
        name: String,
        /// Names listed.
        known: Vec<String>,
    },
}
