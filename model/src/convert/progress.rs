//! Progress of a conversion, as a caller may show it.

/// Receives how far a conversion is. Worker threads call it; `()` ignores everything.
pub trait Progress: Sync {
    /// The conversion starts; it will write `bytes` bytes of tensors.
    fn begin(&self, bytes: u64) {
        let _ = bytes;
    }
    /// A file is started.
    fn file(&self, name: &str) {
        let _ = name;
    }
    /// `bytes` more are written, or found written by an earlier run.
    fn advance(&self, bytes: u64) {
        let _ = bytes;
    }
    /// No more is written, because everything is or because of an error.
    fn finish(&self) {}
}

impl Progress for () {}
