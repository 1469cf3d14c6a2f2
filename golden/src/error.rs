//! Errors of the golden data, one variant per failure.

use std::{io, path::PathBuf};

/// The golden data cannot be found, cannot be read, or does not match its manifest.
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
        /// The system's error.
        source: io::Error,
    },
    /// The manifest is not valid JSON, or lacks a field.
    #[error("{}: not a manifest: {source}", path.display())]
    ManifestSyntax {
        /// The manifest.
        path: PathBuf,
        /// Where and why.
        source: serde_json::Error,
    },
    /// The manifest has an unknown version.
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
    /// Two manifest entries name the same path.
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
    /// A file in `data/` is not in the manifest.
    #[error("{}: not listed in the manifest", path.display())]
    Unlisted {
        /// The file.
        path: PathBuf,
    },
    /// The length of a file differs from the manifest's.
    #[error("{}: found {found} bytes, expected {expected}", path.display())]
    Length {
        /// The file.
        path: PathBuf,
        /// Bytes found.
        found: u64,
        /// Bytes listed.
        expected: u64,
    },
    /// The contents of a file differ from the manifest's hash.
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
        /// The requested name.
        name: String,
        /// Names listed.
        known: Vec<String>,
    },
    /// The variable that says how much slow tests try holds another text.
    #[error("{}: found `{_0}`, expected `full`, `nightly` or nothing", crate::TIER_VARIABLE)]
    Tier(String),
    /// The variable that sets the seed of tests holds another text.
    #[error(
        "{}: found `{_0}`, expected a number below 2^64, decimal or 0x...",
        crate::SEED_VARIABLE
    )]
    Seed(String),
}
