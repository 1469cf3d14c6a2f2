//! Golden data of marlinspike: case files and small model directories made by
//! upstream programs, listed in a manifest with producer, version and SHA-256.
//!
//! None of it was made by the code that it tests. The producers are vLLM's CUDA
//! operators and pure-PyTorch helpers, torch, FlashInfer, KleidiAI's micro-kernels,
//! the public quantization packages, and plain definitions in numpy. `scripts/gen/`
//! holds the Python scripts.
//!
//! ```no_run
//! let manifest = marlinspike_golden::Manifest::load()?;
//! for path in manifest.case_paths("linear") {
//!     println!("{}", path.display());
//! }
//! # Ok::<(), marlinspike_golden::GoldenError>(())
//! ```

mod error;
mod manifest;
mod root;
mod tier;
mod verify;

pub use error::GoldenError;
pub use manifest::{CaseEntry, CheckpointEntry, FileEntry, Manifest, TableEntry};
pub use root::find_root;
pub use tier::Tier;

/// Environment variable that names the golden folder and overrides the search.
pub const ROOT_VARIABLE: &str = "MARLINSPIKE_GOLDEN";

/// Environment variable that chooses the [`Tier`] of the slow tests.
pub const TIER_VARIABLE: &str = "MARLINSPIKE_TESTS";

/// Environment variable that sets the seed of tests whose seed moves with the day in the nightly
/// [`Tier`].
pub const SEED_VARIABLE: &str = "MARLINSPIKE_TESTS_SEED";
pub use verify::Verification;

/// Result of this crate's fallible functions.
pub type Result<T, E = GoldenError> = std::result::Result<T, E>;

/// Limit on the total size of `data/`: 25 MiB, so that a clone of the repository
/// stays small.
pub const MAX_DATA_BYTES: u64 = 25 * 1024 * 1024;
