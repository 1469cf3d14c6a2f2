//! Errors that say what to do about them.

/// An error with a line of help, which the program prints below it.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct Explained {
    message: String,
    help: String,
}

impl Explained {
    /// An error and what to do about it.
    pub fn new(message: impl ToString, help: impl Into<String>) -> Self {
        Self { message: message.to_string(), help: help.into() }
    }

    /// What to do about it.
    pub fn help(&self) -> &str {
        &self.help
    }
}
