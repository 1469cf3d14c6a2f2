//! A linear layer in the device's memory, with the bits of the reference's canonical schedule.

use marlinspike::num::scalar::ScalarType;
use marlinspike::weight::Weight;

use super::gemm::{MarlinWeight, marlin_gemm};
use super::permute::permute_columns_on_device;
use crate::{device::Device, error::AccelError, memory::Buffer};

/// One matrix in Marlin's layout for 16-bit activations.
#[derive(Debug)]
pub struct MarlinLinear {
    weight: MarlinWeight,
}

/// Memory for the rows of [`MarlinLinear::forward`].
#[derive(Debug)]
pub struct LinearWorkspace {
    /// Present with act-order: x with its columns in the order of the weight's rows.
    in_order: Option<Buffer<u16>>,
}

impl MarlinLinear {
    /// Packs `weight` for activations of `dtype` (float16 or bfloat16) and copies it to the device.
    ///
    /// # Errors
    /// As [`MarlinWeight::new`].
    pub fn new(
        device: &Device,
        weight: &Weight<'_>,
        dtype: ScalarType,
    ) -> Result<Self, AccelError> {
        MarlinWeight::new(device, std::slice::from_ref(weight), dtype).map(|weight| Self { weight })
    }

    /// Memory for `size_m` rows.
    ///
    /// # Errors
    /// [`AccelError::Driver`].
    pub fn workspace(&self, device: &Device, size_m: usize) -> Result<LinearWorkspace, AccelError> {
        let room = |_| device.room(size_m * self.weight.shape().size_k);
        Ok(LinearWorkspace { in_order: self.weight.device_perm().map(room).transpose()? })
    }

    /// y `[M, N]` of x `[M, K]`.
    ///
    /// # Errors
    /// As [`marlin_gemm`]; [`AccelError::Argument`] for other rows than the workspace was made for.
    pub fn forward(
        &self,
        device: &Device,
        x: &Buffer<u16>,
        work: &mut LinearWorkspace,
        y: &mut Buffer<u16>,
    ) -> Result<(), AccelError> {
        let x = match (self.weight.device_perm(), &mut work.in_order) {
            (Some(perm), Some(in_order)) => {
                permute_columns_on_device(device, x, perm, in_order)?;
                in_order
            }
            _ => x,
        };
        marlin_gemm(device, x, &self.weight, y)
    }
}
