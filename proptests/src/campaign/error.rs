//! Errors of campaigns.

use std::path::PathBuf;

/// An error of a campaign.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CampaignError {
    /// The filter names unknown keys or values.
    #[error("filter: {problem}")]
    Filter {
        /// What was found and what was expected.
        problem: String,
    },
    /// An output that the operation does not have.
    #[error("output `{found}` is unknown, expected one of {expected}")]
    Output {
        /// The name.
        found: String,
        /// The operation's outputs.
        expected: String,
    },
    /// A kernel that cannot be started.
    #[error("{kernel}: {problem}")]
    Kernel {
        /// The command or the library.
        kernel: String,
        /// Description of the violation.
        problem: String,
    },
    /// A folder through which no files can be exchanged with the kernel.
    #[error("{folder}: {problem}")]
    Exchange {
        /// The folder.
        folder: String,
        /// What was found and what was expected.
        problem: String,
    },
    /// A file or a pipe.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A case that cannot be written.
    #[error("a case cannot be written: {problem}")]
    Write {
        /// The writer's reason.
        problem: String,
    },
    /// A kept file that is not a case.
    #[error("{}: {source}", path.display())]
    Case {
        /// The file.
        path: PathBuf,
        /// The reader's reason.
        source: marlinspike::Error,
    },
    /// A summary file that cannot be merged.
    #[error("{}: {problem}", path.display())]
    Summary {
        /// The file.
        path: PathBuf,
        /// What was found and what was expected.
        problem: String,
    },
    /// The reference's error.
    #[error(transparent)]
    Reference(#[from] marlinspike::Error),
}
