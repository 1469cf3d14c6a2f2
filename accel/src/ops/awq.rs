//! AWQ weights to Marlin's weight layout.

use marlinspike::formats::awq::column_order;
use marlinspike::num::dims::Shape;
use marlinspike::weight::Codes;

use super::{check, repack::Packed};
use crate::{
    call::Call,
    device::Device,
    error::AccelError,
    launch::{Arguments, Grid, Kernel, Pointer, arguments},
    nvrtc::Parameter,
    operation::{Law, Mutant, Needs, Row, lattice},
};

/// Upstream: `awq_marlin_repack`.
pub(crate) static ROW: Row = Row {
    name: "awq_marlin_repack",
    source: "awq_marlin_repack",
    needs: Needs { compute_capability: (7, 5) },
    law: Law::EqualBits,
    variants: |_| Ok(lattice(&[("BITS", &[4, 8]), ("IS_A_8BIT", &[0, 1])])),
    arguments: AwqArguments::SIZES,
    mutants: &[Mutant::new(
        "positions of a word not interleaved",
        "c % 2 * (PACK / 2) + c / 2",
        "c",
    )],
};

static KERNEL: Kernel<AwqArguments> = Kernel::new(&ROW);

arguments! {
    /// Arguments of `awq_marlin_repack.cu`.
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

/// [`awq_marlin_repack`] of one matrix's words, packed along N.
#[derive(Debug, Clone, Copy)]
pub struct AwqRepack<'a>(pub Packed<'a>);

impl Call for AwqRepack<'_> {
    type Output = Vec<u32>;

    fn row(&self) -> &'static Row {
        &ROW
    }

    fn on_device(&self, device: &Device) -> Result<Vec<u32>, AccelError> {
        let Packed { qweight, shape: Shape { size_k, size_n }, bits, is_a_8bit, .. } = self.0;
        awq_marlin_repack(device, qweight, size_k, size_n, bits, is_a_8bit)
    }

    fn by_reference(&self) -> marlinspike::Result<Vec<u32>> {
        let Packed { qweight, shape, bits, .. } = self.0;
        let order = column_order(bits);
        let (pack, mask) = (order.len(), u32::MAX >> (32 - bits));
        let codes = Codes::from_fn(bits, shape, |k, n| {
            let word = qweight[k * (shape.size_n / pack) + n / pack];
            let field = order.iter().position(|&column| column == n % pack).unwrap_or(0);
            (word >> (field as u32 * bits) & mask) as u8
        })?;
        self.0.layout()?.pack(&codes, None)
    }
}
