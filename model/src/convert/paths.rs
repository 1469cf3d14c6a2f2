//! Names of the files that a conversion keeps for itself in the output folder.

/// The manifest of a finished conversion.
pub const MANIFEST: &str = "marlinspike-manifest.json";
/// The manifest of an unfinished conversion.
pub const PROGRESS: &str = ".marlinspike-progress.json";
/// The lock file.
pub const LOCK: &str = ".marlinspike-convert.lock";
