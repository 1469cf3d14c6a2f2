//! Rows of x in the order of a product's blocks.

use super::{align::DeviceBlocks, check};
use crate::{
    device::Device,
    error::AccelError,
    memory::Buffer,
    raw,
    registry::{Law, Needs, Row},
};

/// Part of upstream's `moe_wna16_marlin_gemm`.
pub(crate) static ROW: Row = Row {
    name: "moe_gather",
    source: "moe_gather",
    needs: Needs { compute_capability: (7, 5) },
    law: Law::EqualBits,
    variants: |_| vec![Vec::new()],
};

/// Numbers of a launch, checked against the lengths of its buffers.
#[derive(Debug)]
pub(crate) struct Args {
    /// Pieces of 16 bytes that `gathered` has room for in all blocks.
    pub(crate) pieces: u64,
    pub(crate) size_m: u32,
    pub(crate) size_k: u32,
    pub(crate) top_k: u32,
}

/// Row i of `gathered` = the row of x `[rows, size_k]` that entry `sorted_token_ids[i]` of the blocks is
/// made of, entries being `top_k` for each row. Rows of padding stay as they are.
///
/// # Errors
/// [`AccelError::Argument`] where size_k is not a multiple of 8, x not as many rows as the blocks' entries
/// come from, `gathered` not room for all blocks, or a buffer of another device; those of preparing and
/// launching the kernel.
pub fn gather_on_device(
    device: &Device,
    x: &Buffer<u16>,
    blocks: &DeviceBlocks,
    top_k: usize,
    size_k: usize,
    gathered: &mut Buffer<u16>,
) -> Result<(), AccelError> {
    let here = x.is_on(device) && blocks.is_on(device) && gathered.is_on(device);
    check::on(&ROW, device, here)?;
    let (top_k_32, size_k_32) =
        (check::positive(&ROW, "top_k", top_k)?, check::positive(&ROW, "size_k", size_k)?);
    if !size_k.is_multiple_of(8) {
        return Err(AccelError::argument(&ROW, "size_k", size_k, "a multiple of 8"));
    }
    let entries = blocks.entries();
    if !x.len().is_multiple_of(size_k) || (x.len() / size_k).checked_mul(top_k) != Some(entries) {
        let expected = format!("rows of {size_k}, {top_k} entries each, of {entries}");
        return Err(AccelError::argument(&ROW, "x", format!("{} elements", x.len()), expected));
    }
    let rows = blocks.most_blocks() * blocks.block_size();
    if gathered.len() / size_k < rows {
        let found = format!("{} elements", gathered.len());
        let expected = format!("at least {rows} rows of {size_k}");
        return Err(AccelError::argument(&ROW, "gathered", found, expected));
    }
    if rows == 0 {
        return Ok(());
    }
    let pieces = check::threads(&ROW, "gathered", rows * (size_k / 8))?;
    // Room for entries is below 2^31.
    let args = Args { pieces, size_m: entries as u32, size_k: size_k_32, top_k: top_k_32 };
    let function = device.function(&ROW, &[])?;
    raw::moe::gather(device, &function, &args, x, blocks, gathered)
}
