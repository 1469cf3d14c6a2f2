//! Errors that say what to do about them.

#[cfg(feature = "cuda")]
use marlinspike_accel::{AccelError, nvrtc::LIBRARY_VARIABLE};

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

/// What the CUDA side lacks or fails at, with what helps.
#[cfg(feature = "cuda")]
pub(crate) fn of_gpu(error: AccelError) -> anyhow::Error {
    let help = match &error {
        AccelError::NvrtcMissing { .. } => format!(
            "install NVIDIA's NVRTC (PyPI: nvidia-cuda-nvrtc-cu12), or name its library in \
             {LIBRARY_VARIABLE}; kernels that `marlinspike warm` has compiled need none"
        ),
        error if error.is_no_device() => "this needs an NVIDIA GPU and its driver".to_owned(),
        AccelError::Argument { .. } => "the kernels take other arguments only".to_owned(),
        _ => "`nvidia-smi` says what state the device is in".to_owned(),
    };
    Explained::new(error, help).into()
}
