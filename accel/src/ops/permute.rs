//! Activations in the order of an act-order weight.

use super::check;
use crate::{
    device::Device,
    error::AccelError,
    raw,
    registry::{Law, Needs, Row},
};

/// Upstream: `permute_cols`.
pub(crate) static ROW: Row = Row {
    name: "permute_cols",
    source: "permute_cols",
    needs: Needs { compute_capability: (7, 5) },
    law: Law::EqualBits,
    variants: |_| vec![Vec::new()],
};

/// Arguments that were checked: a launch with them stays inside its buffers.
#[derive(Debug)]
pub(crate) struct Args<'a> {
    pub(crate) x: &'a [u16],
    pub(crate) perm: &'a [u32],
    pub(crate) elements: u64,
    pub(crate) size_k: u32,
}

/// Column k of the result is column `perm[k]` of `x` `[rows, size_k]`, 16-bit elements.
///
/// # Errors
/// [`AccelError::Argument`] unless x is whole rows of as many columns as `perm` has entries, all
/// below their number; those of preparing and running a kernel.
pub fn permute_cols(device: &Device, x: &[u16], perm: &[u32]) -> Result<Vec<u16>, AccelError> {
    let size_k = check::positive(&ROW, "perm", perm.len())?;
    check::rows(&ROW, "x", x.len(), perm.len())?;
    if let Some(i) = perm.iter().position(|&k| k >= size_k) {
        let found = format!("{} at [{i}]", perm[i]);
        return Err(AccelError::argument(&ROW, "perm", found, format!("below {size_k}")));
    }
    let elements = check::threads(&ROW, "x", x.len())?;
    let function = device.function(&ROW, &[])?;
    raw::layout::permute_cols(device, &function, &Args { x, perm, elements, size_k })
}
