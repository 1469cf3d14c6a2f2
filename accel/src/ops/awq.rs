//! AWQ weights to Marlin's weight layout.

use super::check;
use crate::{
    device::Device,
    error::AccelError,
    launch::{Arguments, Grid, Kernel, Pointer, arguments},
    nvrtc::Parameter,
    operation::{Law, Needs, Row, lattice},
};

/// Upstream: `awq_marlin_repack`.
pub(crate) static ROW: Row = Row {
    name: "awq_marlin_repack",
    source: "awq_marlin_repack",
    needs: Needs { compute_capability: (7, 5) },
    law: Law::EqualBits,
    variants: |_| Ok(lattice(&[("BITS", &[4, 8]), ("IS_A_8BIT", &[0, 1])])),
    arguments: AwqArguments::SIZES,
};

static KERNEL: Kernel<AwqArguments> = Kernel::new(&ROW);

arguments! {
    /// Of `awq_marlin_repack.cu`.
    AwqArguments {
        qweight: Pointer,
        out: Pointer,
        size_k: u32,
        size_n: u32,
    }
}

/// Repacks `qweight` `[size_k, size_n / pack]` (AWQ's order inside a word) on the device; returns
/// `[size_k / 16, size_n · 16 / pack]`.
///
/// `size_k` is a multiple of 16 (8-bit activations: 32), `size_n` of 64; `num_bits` is 4 or 8.
///
/// # Errors
/// [`AccelError::Argument`]; those of preparing and running a kernel.
pub fn awq_marlin_repack(
    device: &Device,
    qweight: &[u32],
    size_k: usize,
    size_n: usize,
    num_bits: u32,
    is_a_8bit: bool,
) -> Result<Vec<u32>, AccelError> {
    if num_bits != 4 && num_bits != 8 {
        return Err(ROW.refuse("num_bits", num_bits, "4 or 8"));
    }
    let tile_k = if is_a_8bit { 32 } else { 16 };
    let (k, n) =
        (check::positive(&ROW, "size_k", size_k)?, check::positive(&ROW, "size_n", size_n)?);
    if k % tile_k != 0 {
        return Err(ROW.refuse("size_k", k, format!("a multiple of {tile_k}")));
    }
    if n % 64 != 0 {
        return Err(ROW.refuse("size_n", n, "a multiple of 64"));
    }
    let words = u64::from(k) * u64::from(n / (32 / num_bits));
    if u32::try_from(words).is_err() {
        let found = format!("{words} packed words");
        return Err(ROW.refuse("size_k, size_n", found, "fewer than 2^32"));
    }
    if qweight.len() as u64 != words {
        let found = format!("{} words", qweight.len());
        return Err(ROW.refuse("qweight", found, format!("{words} words")));
    }
    let parameters: [Parameter; 2] = [("BITS", num_bits), ("IS_A_8BIT", u32::from(is_a_8bit))];
    let qweight = device.upload(qweight)?;
    let mut out = device.zeroed::<u32>(qweight.len())?;
    // Both have size_k * size_n / PACK words; sizes are multiples of the tile.
    let arguments =
        AwqArguments { qweight: (&qweight).into(), out: (&mut out).into(), size_k: k, size_n: n };
    KERNEL.launch(device, &parameters, Grid::one_thread_each(words), arguments)?;
    device.download(&out)
}
