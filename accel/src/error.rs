//! Errors of the CUDA side, one variant per failure.

use marlinspike_kernels::ConstantError;

/// A refused or failed operation of the CUDA side.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AccelError {
    /// The CUDA driver library cannot be loaded.
    #[error("no CUDA device: the driver library {library} cannot be loaded: {reason}")]
    NoDriver {
        /// Name of the library searched for.
        library: String,
        /// The loader's message for the most likely library name.
        reason: String,
    },
    /// The driver library loads, but it offers no usable device.
    #[error("no CUDA device: {reason}")]
    NoDevice {
        /// The driver's message.
        reason: String,
    },
    /// A device ordinal that is too large.
    #[error("CUDA device {ordinal} does not exist: found {count} device(s)")]
    Ordinal {
        /// Ordinal asked for.
        ordinal: usize,
        /// Devices present.
        count: usize,
    },
    /// The installed driver is older than the interface used here.
    #[error("CUDA driver too old: found version {found}, expected at least {expected}")]
    DriverTooOld {
        /// Version found, as 1000 · major + 10 · minor.
        found: i32,
        /// Lowest supported version, in the same form.
        expected: i32,
    },
    /// The run-time compiler cannot be loaded.
    #[error("NVRTC is missing: {library} cannot be loaded: {reason}")]
    NvrtcMissing {
        /// Library searched for: a path or a name.
        library: String,
        /// The loader's message, or the missing symbol.
        reason: String,
    },
    /// NVRTC refused a source.
    #[error("NVRTC cannot compile `{source_name}` for {arch}: {reason}\n{log}")]
    Compile {
        /// Name of the source.
        source_name: String,
        /// Architecture asked for.
        arch: String,
        /// NVRTC's name for the failure.
        reason: String,
        /// The compiler's log.
        log: String,
    },
    /// A constant of a source cannot be evaluated, so a launch cannot be sized.
    #[error(transparent)]
    Constant(#[from] ConstantError),
    /// The device lacks what the operation's registry row demands.
    #[error("`{operation}` needs compute capability {expected}, found {found} ({device})")]
    Capability {
        /// Operation's registry name.
        operation: &'static str,
        /// Device name.
        device: String,
        /// Capability found.
        found: String,
        /// Least capability.
        expected: String,
    },
    /// An argument breaks the operation's rule.
    #[error("`{operation}`: {what}: found {found}, expected {expected}")]
    Argument {
        /// Operation's registry name.
        operation: &'static str,
        /// Which argument or size.
        what: &'static str,
        /// Value found.
        found: String,
        /// Rule broken.
        expected: String,
    },
    /// A call of tensor-parallel ranks failed on the device.
    #[error("rank {rank}: {}", ranks_text(missing, *odd_calls))]
    Ranks {
        /// The rank that waited.
        rank: usize,
        /// Ranks that did not come to a call in time.
        missing: Vec<usize>,
        /// Whether a graph with an odd number of calls was replayed.
        odd_calls: bool,
    },
    /// NCCL cannot be loaded.
    #[error("NCCL is missing: {library} cannot be loaded: {reason}")]
    NcclMissing {
        /// Library searched for: a path or a name.
        library: String,
        /// The loader's message, or the missing symbol.
        reason: String,
    },
    /// A call of NCCL failed, or other ranks did not answer in time.
    #[error("NCCL: {call} failed: {reason}")]
    Nccl {
        /// The call.
        call: &'static str,
        /// NCCL's message.
        reason: String,
    },
    /// A driver call failed.
    #[error("CUDA driver: {call} failed: {reason}")]
    Driver {
        /// The call.
        call: &'static str,
        /// The driver's message.
        reason: String,
    },
}

/// What went wrong in a call of ranks.
fn ranks_text(missing: &[usize], odd_calls: bool) -> String {
    match odd_calls {
        true => "a graph with an odd number of calls was replayed, expected an even number".into(),
        false => format!("found no call of ranks {missing:?} in time, expected one of every rank"),
    }
}

impl AccelError {
    /// Whether the machine has no CUDA device, so that a test may report a skip. A device that
    /// fails is another error.
    pub fn is_no_device(&self) -> bool {
        matches!(self, Self::NoDriver { .. } | Self::NoDevice { .. })
    }
}
