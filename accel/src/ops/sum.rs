//! The sum over a token's experts.

use marlinspike::scalar::ScalarType;

use super::check;
use crate::{
    device::Device,
    error::AccelError,
    raw,
    registry::{Law, Needs, Row, lattice},
};

/// Upstream: `moe_sum`.
pub(crate) static ROW: Row = Row {
    name: "moe_sum",
    source: "moe_sum",
    needs: Needs { compute_capability: (8, 0) },
    law: Law::EqualBits,
    variants: |_| lattice(&[("IS_BF16", &[0, 1])]),
};

/// Arguments that were checked: a launch with them stays inside its buffers.
#[derive(Debug)]
pub(crate) struct Args<'a> {
    pub(crate) down: &'a [u16],
    /// Of the result.
    pub(crate) elements: u64,
    pub(crate) top_k: u32,
    pub(crate) size_n: u32,
}

/// `y` `[rows, size_n]` of `down` `[rows, top_k, size_n]`, bits of `dtype`: the bits of
/// [`sum`](marlinspike::moe::sum::sum) by the canonical chain.
///
/// # Errors
/// [`AccelError::Argument`] for another type and a `down` that is not whole tokens; those of
/// preparing and running a kernel.
pub fn moe_sum(
    device: &Device,
    down: &[u16],
    dtype: ScalarType,
    top_k: usize,
    size_n: usize,
) -> Result<Vec<u16>, AccelError> {
    let is_bf16 = check::is_bf16(&ROW, "dtype", dtype)?;
    let (k, n) = (check::positive(&ROW, "top_k", top_k)?, check::positive(&ROW, "size_n", size_n)?);
    let token = top_k.checked_mul(size_n).unwrap_or(0);
    check::rows(&ROW, "down", down.len(), token)?;
    let elements = check::threads(&ROW, "y", down.len() / top_k)?;
    let function = device.function(&ROW, &[is_bf16])?;
    raw::moe::sum(device, &function, &Args { down, elements, top_k: k, size_n: n })
}
