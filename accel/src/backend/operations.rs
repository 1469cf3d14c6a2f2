//! Who computes a case's outputs: a device, or the reference.

use crate::{call::Call, device::Device, error::AccelError};

/// Runs operations on host memory.
pub trait Operations {
    /// Runs one.
    ///
    /// # Errors
    /// [`AccelError::Argument`] or [`AccelError::Capability`] where there is no kernel for its arguments; others where
    /// a device fails.
    fn run<C: Call>(&self, call: &C) -> Result<C::Output, AccelError>;
}

impl Operations for Device {
    fn run<C: Call>(&self, call: &C) -> Result<C::Output, AccelError> {
        call.validate()?;
        call.on_device(self)
    }
}

/// The reference in place of a device: what every bit must be.
#[derive(Debug, Clone, Copy)]
pub struct Reference;

impl Operations for Reference {
    fn run<C: Call>(&self, call: &C) -> Result<C::Output, AccelError> {
        call.validate()?;
        let expected = "arguments that the reference takes";
        call.by_reference().map_err(|error| call.row().refuse("reference", error, expected))
    }
}
