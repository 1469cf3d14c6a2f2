//! Callbacks for the progress of a conversion.

/// Receives the progress of a conversion from worker threads; `()` ignores it.
pub trait Progress: Sync {
    /// The conversion starts; it will write `bytes` bytes of tensors.
    fn begin(&self, bytes: u64) {
        let _ = bytes;
    }
    /// A file is started.
    fn file(&self, name: &str) {
        let _ = name;
    }
    /// `bytes` more are written, or were written by an earlier run.
    fn advance(&self, bytes: u64) {
        let _ = bytes;
    }
    /// Writing has ended, complete or with an error.
    fn finish(&self) {}
}

impl Progress for () {}
