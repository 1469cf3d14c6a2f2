//! Limits that the operating system holds the worker to.
//!
//! On Linux and macOS: CPU time, files, file sizes, core dumps. Address space on Linux only: macOS takes
//! the limit and does not hold a process to it. Elsewhere none; there the parent ends a worker that does
//! not answer.

use std::time::Duration;

/// Seconds of CPU time of a worker: a constant, and more with the sizes of what it is given.
const CPU_BASE: u64 = 2;
const TOKENIZER_BYTES_PER_SECOND: u64 = 2 << 20;
const PROMPT_BYTES_PER_SECOND: u64 = 256 << 10;
const TOKENS_PER_SECOND: u64 = 128;

/// Bytes of address space: a constant, and more for each byte of `tokenizer.json` and of the prompt.
const MEMORY_BASE: u64 = 2 << 30;
const MEMORY_PER_TOKENIZER_BYTE: u64 = 32;
const MEMORY_PER_PROMPT_BYTE: u64 = 256;

/// Files that a worker may have open: its pipes, and those that the system's libraries open.
#[cfg(unix)]
const FILES: u64 = 32;

/// What a worker has been given, from which its limits follow.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Given {
    /// Bytes of `tokenizer.json`.
    pub(super) tokenizer: u64,
    /// Bytes of prompts.
    pub(super) prompt: u64,
    /// Tokens to decode.
    pub(super) tokens: u64,
}

impl Given {
    /// Seconds of CPU time, from the worker's start on.
    pub(super) fn cpu(&self) -> u64 {
        CPU_BASE
            + self.tokenizer / TOKENIZER_BYTES_PER_SECOND
            + self.prompt / PROMPT_BYTES_PER_SECOND
            + self.tokens / TOKENS_PER_SECOND
    }

    /// Bytes of address space.
    pub(super) fn memory(&self) -> u64 {
        let of = u64::saturating_mul;
        MEMORY_BASE
            .saturating_add(of(MEMORY_PER_TOKENIZER_BYTE, self.tokenizer))
            .saturating_add(of(MEMORY_PER_PROMPT_BYTE, self.prompt))
    }

    /// How long the parent waits for an answer. A worker that the system limits needs longer only if it
    /// does not get the CPU.
    pub(super) fn patience(&self) -> Duration {
        let factor = if cfg!(unix) { 600 } else { 1 };
        Duration::from_secs(self.cpu().saturating_mul(factor))
    }
}

/// Sets the limits that hold from the start on: no core dump, no file written, few files open.
///
/// # Errors
/// The system's.
pub(super) fn begin() -> std::io::Result<()> {
    #[cfg(unix)]
    {
        use rustix::process::Resource;
        set(Resource::Core, 0)?;
        set(Resource::Fsize, 0)?;
        set(Resource::Nofile, FILES)?;
        let first = Given::default();
        apply(first.cpu(), first.memory())?;
    }
    Ok(())
}

/// Limits seconds of CPU time and bytes of address space.
///
/// # Errors
/// The system's.
pub(super) fn apply(cpu: u64, memory: u64) -> std::io::Result<()> {
    #[cfg(unix)]
    {
        use rustix::process::Resource;
        set(Resource::Cpu, cpu)?;
        let done = set(Resource::As, memory);
        if cfg!(target_os = "linux") {
            done?;
        }
    }
    #[cfg(not(unix))]
    let _ = (cpu, memory);
    Ok(())
}

/// Sets a limit, or the smaller one that this process may not exceed. It can be raised again.
#[cfg(unix)]
fn set(resource: rustix::process::Resource, limit: u64) -> std::io::Result<()> {
    let mut found = rustix::process::getrlimit(resource);
    found.current = Some(found.maximum.map_or(limit, |maximum| maximum.min(limit)));
    Ok(rustix::process::setrlimit(resource, found)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_files_get_less_than_ten_seconds_and_four_gibibytes() {
        let given = Given { tokenizer: 1 << 20, prompt: 1 << 10, tokens: 256 };
        assert!(given.cpu() < 10 && given.memory() < 4 << 30);
        let large = Given { tokenizer: 32 << 20, ..given };
        assert!(large.cpu() >= 16 && large.memory() >= 3 << 30);
        assert_eq!(Given { prompt: u64::MAX, ..given }.memory(), u64::MAX);
    }
}
