//! Errors with a help line.

#[cfg(feature = "cuda")]
use marlinspike_accel::{AccelError, nvrtc::LIBRARY_VARIABLE};

/// An error and a help line, which the program prints below it.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct Explained {
    message: String,
    help: String,
}

impl Explained {
    /// Creates an error with a help line.
    pub fn new(message: impl ToString, help: impl Into<String>) -> Self {
        Self { message: message.to_string(), help: help.into() }
    }

    /// The help line.
    pub fn help(&self) -> &str {
        &self.help
    }
}

/// Adds a help line to an error of the CUDA crate.
#[cfg(feature = "cuda")]
pub(crate) fn of_gpu(error: AccelError) -> anyhow::Error {
    let help = match &error {
        AccelError::NvrtcMissing { .. } => format!(
            "install NVIDIA's NVRTC (PyPI: nvidia-cuda-nvrtc-cu12) or set {LIBRARY_VARIABLE} to \
             its library; kernels that `marlinspike warm` compiled do not need it"
        ),
        error if error.is_no_device() => {
            "use a machine with an NVIDIA GPU and its driver".to_owned()
        }
        AccelError::Argument { .. } => "choose arguments that the kernels support".to_owned(),
        _ => "check the state of the device with `nvidia-smi`".to_owned(),
    };
    Explained::new(error, help).into()
}
