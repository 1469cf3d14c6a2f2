//! The sum over a token's experts.

use marlinspike::scalar::ScalarType;

use super::{align::Runs, check};
use crate::{
    device::Device,
    error::AccelError,
    memory::Buffer,
    raw,
    registry::{Law, Needs, Row, lattice},
};

/// Upstream: `moe_sum`.
pub(crate) static ROW: Row = Row {
    name: "moe_sum",
    source: "moe_sum",
    needs: Needs { compute_capability: (8, 0) },
    law: Law::EqualBits,
    variants: |_| lattice(&[("IS_BF16", &[0, 1]), ("HAS_IDS", &[0, 1]), ("WIDTH", &[1, 8])]),
};

/// Numbers of a launch, checked against the lengths of its buffers.
#[derive(Debug)]
pub(crate) struct Args {
    /// Of the result.
    pub(crate) rows: u32,
    pub(crate) top_k: u32,
    pub(crate) size_n: u32,
    /// Columns that a thread adds: the macro WIDTH.
    pub(crate) width: u32,
}

/// `y` `[rows, size_n]` of `down` `[rows, top_k, size_n]`, bits of `dtype`: the bits of
/// [`sum`](marlinspike::moe::sum::sum) by the canonical chain.
///
/// # Errors
/// As [`sum_on_device`].
pub fn moe_sum(
    device: &Device,
    down: &[u16],
    dtype: ScalarType,
    top_k: usize,
    size_n: usize,
) -> Result<Vec<u16>, AccelError> {
    check::positive(&ROW, "top_k", top_k)?;
    let mut y = device.zeroed(down.len() / top_k)?;
    sum_on_device(device, &device.upload(down)?, dtype, top_k, size_n, None, &mut y)?;
    device.download(&y)
}

/// Which slots of a token count.
#[derive(Debug, Clone, Copy)]
pub struct Slots<'a> {
    /// `[rows, top_k]`.
    pub topk_ids: &'a Buffer<i32>,
    /// The experts that are here.
    pub runs: &'a Runs,
}

/// [`moe_sum`] in the device's memory; with `slots`, of those alone whose expert is here, as if the
/// others were zero.
///
/// # Errors
/// [`AccelError::Argument`] for another type, a `down` that is not whole tokens, a `y` that has not
/// as many rows, and ids that are not one for each slot; those of preparing and running a kernel.
pub fn sum_on_device(
    device: &Device,
    down: &Buffer<u16>,
    dtype: ScalarType,
    top_k: usize,
    size_n: usize,
    slots: Option<Slots<'_>>,
    y: &mut Buffer<u16>,
) -> Result<(), AccelError> {
    let slots_here = |s: Slots<'_>| s.topk_ids.is_on(device) && s.runs.is_on(device);
    let parts = [
        ("down", down.is_on(device)),
        ("slots", slots.is_none_or(slots_here)),
        ("y", y.is_on(device)),
    ];
    check::on(&ROW, device, &parts)?;
    let is_bf16 = check::is_bf16(&ROW, "dtype", dtype)?;
    let (k, n) = (check::positive(&ROW, "top_k", top_k)?, check::positive(&ROW, "size_n", size_n)?);
    let token = top_k.checked_mul(size_n).unwrap_or(0);
    let rows = check::rows(&ROW, "down", down.len(), token)?;
    if y.len() != rows as usize * size_n {
        let found = format!("{} elements", y.len());
        return Err(AccelError::argument(&ROW, "y", found, format!("[{rows}, {size_n}]")));
    }
    let width = if size_n.is_multiple_of(8) { 8 } else { 1 };
    // The second dimension of a grid, of blocks of 256 threads.
    if size_n / width > 65535 * 256 {
        return Err(AccelError::argument(&ROW, "size_n", size_n, "fewer columns"));
    }
    if let Some(slots) = slots.filter(|slots| slots.topk_ids.len() != rows as usize * top_k) {
        let found = format!("{} entries", slots.topk_ids.len());
        return Err(AccelError::argument(&ROW, "topk_ids", found, format!("[{rows}, {top_k}]")));
    }
    let width = width as u32;
    let has_ids = ("HAS_IDS", u32::from(slots.is_some()));
    let function = device.function(&ROW, &[is_bf16, has_ids, ("WIDTH", width)])?;
    raw::moe::sum(device, &function, &Args { rows, top_k: k, size_n: n, width }, down, slots, y)
}
