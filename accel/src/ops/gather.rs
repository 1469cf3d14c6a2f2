//! Rows in the order of a product's blocks.

use marlinspike::moe::activation::Definition;
use marlinspike::scalar::ScalarType;

use super::{align::DeviceBlocks, check, gemm::checks};
use crate::{
    device::Device,
    error::AccelError,
    memory::Buffer,
    raw::{self, launch::Activation},
    registry::{Law, Needs, Row, lattice},
};

/// Part of upstream's `moe_wna16_marlin_gemm`, and of its activations.
pub(crate) static ROW: Row = Row {
    name: "moe_gather",
    source: "moe_gather",
    needs: Needs { compute_capability: (8, 0) },
    law: Law::EqualBits,
    variants: |_| lattice(&[("IS_BF16", &[0, 1]), ("ACTIVATES", &[0, 1])]),
};

/// What a row is made of.
#[derive(Debug)]
pub(crate) enum Made<'a> {
    /// Row entry / `top_k` of x, beside it the entry's router weight.
    Copied { top_k: u32, weights: RouterWeights<'a> },
    /// The row of `gate_up` in the same place.
    Activated(Activation),
}

/// Numbers of a launch, checked against the lengths of its buffers.
#[derive(Debug)]
pub(crate) struct Args<'a> {
    /// Tokens times experts per token.
    pub(crate) entries: u32,
    pub(crate) size_k: u32,
    pub(crate) made: Made<'a>,
}

/// What rows are gathered from.
#[derive(Debug)]
pub(crate) enum From<'a> {
    /// x `[entries / top_k, size_k]`: a row for each `top_k` entries, and each entry's router weight for the
    /// row's place.
    X { x: &'a Buffer<u16>, top_k: usize, weights: RouterWeights<'a> },
    /// The activation of `gate_up` `[places, width]`, whose rows stand in the same order.
    GateUp { gate_up: &'a Buffer<u16>, activation: &'a Definition },
}

/// The router weights of entries, and room for those of places.
#[derive(Debug)]
pub(crate) struct RouterWeights<'a> {
    /// `[entries]`.
    pub(crate) of_entries: &'a Buffer<f32>,
    /// `[places]`; of padding they stay as they are.
    pub(crate) of_places: &'a mut Buffer<f32>,
}

impl RouterWeights<'_> {
    fn check(&self, device: &Device, blocks: &DeviceBlocks) -> Result<(), AccelError> {
        let Self { of_entries, of_places } = self;
        let ours = of_entries.is_on(device) && of_places.is_on(device);
        check::on(&ROW, device, &[("router weights", ours)])?;
        checks::router_weights(&ROW, Some(of_entries), blocks.entries())?;
        checks::router_weights(&ROW, Some(of_places), blocks.places())
    }
}

/// Row `place_of[t]` of `gathered`, `size_k` numbers of `dtype`, is made for entry t of the blocks: copied, or by
/// the bits of [`Definition::apply`]. Rows of padding stay as they are.
///
/// Rows of x are read while the last kernel on the stream may still run: it must not write them, as
/// [`align_on_device`](super::align::align_on_device) does not.
///
/// # Errors
/// [`AccelError::Argument`] where size_k is not a multiple of 8, there are other rows than the blocks'
/// entries are made of, `gathered` is not room for all blocks, or a buffer is of another device; those of
/// preparing and launching the kernel.
pub(crate) fn gather_on_device(
    device: &Device,
    from: From<'_>,
    dtype: ScalarType,
    size_k: usize,
    blocks: &DeviceBlocks,
    gathered: &mut Buffer<u16>,
) -> Result<(), AccelError> {
    let (entries, places) = (blocks.entries(), blocks.places());
    // Each row is one for so many of the rows that there must be.
    let (buffer, width, top_k, rows, made) = match from {
        From::X { x, top_k, weights } => {
            let top_k_32 = check::positive(&ROW, "top_k", top_k)?;
            weights.check(device, blocks)?;
            (x, size_k, top_k, entries, Made::Copied { top_k: top_k_32, weights })
        }
        From::GateUp { gate_up, activation } => {
            let width = activation.width_in(size_k);
            (gate_up, width, 1, places, Made::Activated(activation.into()))
        }
    };
    let parts = [
        ("rows", buffer.is_on(device)),
        ("blocks", blocks.is_on(device)),
        ("gathered", gathered.is_on(device)),
    ];
    check::on(&ROW, device, &parts)?;
    let is_bf16 = check::is_bf16(&ROW, "dtype", dtype)?;
    let size_k_32 = check::positive(&ROW, "size_k", size_k)?;
    if !size_k.is_multiple_of(8) {
        return Err(AccelError::argument(&ROW, "size_k", size_k, "a multiple of 8"));
    }
    if !buffer.len().is_multiple_of(width)
        || (buffer.len() / width).checked_mul(top_k) != Some(rows)
    {
        let found = format!("{} elements", buffer.len());
        let expected = format!("rows of {width}, each for {top_k} of {rows}");
        return Err(AccelError::argument(&ROW, "rows", found, expected));
    }
    let pieces = size_k / 8;
    // The second dimension of a grid, of blocks of 256 threads.
    if pieces > 65535 * 256 {
        return Err(AccelError::argument(&ROW, "size_k", size_k, "fewer columns"));
    }
    if gathered.len() / size_k < places {
        let found = format!("{} elements", gathered.len());
        let expected = format!("at least {places} rows of {size_k}");
        return Err(AccelError::argument(&ROW, "gathered", found, expected));
    }
    if entries == 0 || blocks.experts() == 0 {
        return Ok(());
    }
    // Room for entries, their padding included, is below 2^31.
    let activates = ("ACTIVATES", u32::from(matches!(made, Made::Activated(_))));
    let args = Args { entries: entries as u32, size_k: size_k_32, made };
    let function = device.function(&ROW, &[is_bf16, activates])?;
    raw::moe::gather(device, &function, args, buffer, blocks, gathered)
}
