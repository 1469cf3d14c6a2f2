//! Operations on host memory, run by a device or by the reference.

use marlinspike::moe::router::Routing;
use marlinspike::ndarray::Array2;

use crate::{device::Device, error::AccelError, operation::Row};

/// An operation with its arguments in host memory.
pub trait Call {
    /// What it returns.
    type Output: Outputs;

    /// The operation's registry row.
    fn row(&self) -> &'static Row;

    /// Returns an error for arguments that neither a device nor the reference takes.
    ///
    /// # Errors
    /// [`AccelError::Argument`]
    fn validate(&self) -> Result<(), AccelError> {
        Ok(())
    }

    /// Runs it on a device.
    ///
    /// # Errors
    /// [`AccelError::Argument`] or [`AccelError::Capability`] where no kernel takes the arguments.
    fn on_device(&self, device: &Device) -> Result<Self::Output, AccelError>;

    /// Runs it by the reference, which defines every bit.
    ///
    /// # Errors
    /// The reference's, for arguments that it refuses.
    fn by_reference(&self) -> marlinspike::Result<Self::Output>;
}

/// What an operation returns.
pub trait Outputs: 'static {
    /// The bits of every element, in order.
    fn bits(&self) -> Vec<u32>;
}

impl Outputs for Vec<u32> {
    fn bits(&self) -> Vec<u32> {
        self.clone()
    }
}

impl Outputs for Vec<u16> {
    fn bits(&self) -> Vec<u32> {
        self.iter().map(|&bits| bits.into()).collect()
    }
}

impl Outputs for Routing {
    fn bits(&self) -> Vec<u32> {
        let ids = self.topk_ids.iter().map(|id| id.cast_unsigned());
        ids.chain(self.topk_weights.iter().map(|weight| weight.to_bits())).collect()
    }
}

/// The low halves of 32-bit values.
pub(crate) fn low_halves(y: Array2<u32>) -> Vec<u16> {
    y.into_iter().map(|bits| bits as u16).collect()
}
