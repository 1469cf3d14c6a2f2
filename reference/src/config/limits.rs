//! Limits on the patterns of an untrusted config.

/// Longest pattern accepted, in bytes.
pub const MAX_PATTERN: usize = 64 * 1024;

/// Largest compiled pattern, in instructions. Counted repetitions are written out.
pub const MAX_PROGRAM: usize = 1 << 15;

/// Limit on the instructions of all patterns of a config together; two ranges of a character class count
/// as one. About 16 MiB.
pub const MAX_PROGRAMS: u64 = 1 << 20;

/// The largest number of steps of matching one pattern against one name.
pub const MAX_STEPS: u64 = 1 << 20;

/// Matching steps of all patterns of a config together, before any lookup.
pub const BASE_STEPS: u64 = 1 << 28;

/// Additional steps for each byte of the names that are looked up.
pub const STEPS_PER_BYTE: u64 = 2048;

/// The largest number of steps of comparing one name with a list of names and wildcards.
pub const MAX_LIST_STEPS: u64 = 1 << 22;
