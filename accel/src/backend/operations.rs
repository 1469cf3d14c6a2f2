//! The operations that compute a case's outputs: a device's, or the reference's.

use crate::{call::Call, device::Device, error::AccelError};

/// Runs operations on host memory.
pub trait Operations {
    /// Runs one operation.
    ///
    /// # Errors
    /// [`AccelError::Argument`] or [`AccelError::Capability`] if no kernel takes its arguments;
    /// other errors if a device fails.
    fn run<C: Call>(&self, call: &C) -> Result<C::Output, AccelError>;
}

impl Operations for Device {
    fn run<C: Call>(&self, call: &C) -> Result<C::Output, AccelError> {
        call.validate()?;
        call.on_device(self)
    }
}

/// The reference instead of a device. It defines every bit.
#[derive(Debug, Clone, Copy)]
pub struct Reference;

impl Operations for Reference {
    fn run<C: Call>(&self, call: &C) -> Result<C::Output, AccelError> {
        call.validate()?;
        let expected = "arguments that the reference takes";
        call.by_reference().map_err(|error| call.row().refuse("reference", error, expected))
    }
}
