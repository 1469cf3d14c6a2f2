//! GPTQ's and AWQ's packed weights moved to Marlin's weight layout.

mod args;

use marlinspike::formats::integers::IntFormat;
use marlinspike::layouts::marlin::{Activations, WeightLayout};
use marlinspike::num::dims::Shape;

pub use args::{RepackArgs, RepackSizes};

use args::{Checked, refuse};

use super::check;
use crate::{
    call::Call,
    device::Device,
    error::AccelError,
    launch::{Arguments, Grid, Kernel, Pointer, arguments},
    memory::Buffer,
    nvrtc::Parameter,
    operation::{Law, Mutant, Needs, Row, lattice},
};

/// Upstream: `gptq_marlin_repack`, and for a stack of experts `gptq_marlin_moe_repack`.
pub(crate) static ALONG_K: Row = Row {
    name: "gptq_marlin_repack",
    source: "gptq_marlin_repack",
    needs: Needs { compute_capability: (7, 5) },
    law: Law::EqualBits,
    variants: |_| Ok(lattice(&[("BITS", &[4, 8]), ("HAS_PERM", &[0, 1]), ("IS_A_8BIT", &[0, 1])])),
    arguments: RepackArguments::SIZES,
    mutants: &[
        Mutant::new(
            "the tile's two blocks of columns exchanged",
            "block * 8 + lane / 4",
            "(1 - block) * 8 + lane / 4",
        ),
        Mutant::new("act-order: the neighbouring row", "k = rows[k];", "k = rows[k ^ 1u];"),
    ],
};

/// Upstream: `awq_marlin_repack`.
pub(crate) static ALONG_N: Row = Row {
    name: "awq_marlin_repack",
    source: "awq_marlin_repack",
    needs: Needs { compute_capability: (7, 5) },
    law: Law::EqualBits,
    variants: |_| Ok(lattice(&[("BITS", &[4, 8]), ("IS_A_8BIT", &[0, 1])])),
    arguments: AlongNArguments::SIZES,
    mutants: &[Mutant::new(
        "positions of a word not interleaved",
        "c % 2 * (PACK / 2) + c / 2",
        "c",
    )],
};

static ALONG_K_KERNEL: Kernel<RepackArguments> = Kernel::new(&ALONG_K);
static ALONG_N_KERNEL: Kernel<AlongNArguments> = Kernel::new(&ALONG_N);

arguments! {
    /// Arguments of `gptq_marlin_repack.cu`.
    RepackArguments {
        qweight: Pointer,
        perm: Pointer,
        out: Pointer,
        size_k: u32,
        size_n: u32,
    }
}

arguments! {
    /// Arguments of `awq_marlin_repack.cu`.
    AlongNArguments {
        qweight: Pointer,
        out: Pointer,
        size_k: u32,
        size_n: u32,
    }
}

/// Repacks on the device; returns `[experts, size_k / 16, size_n * 16 / pack]`.
///
/// # Errors
/// [`AccelError::Capability`], [`AccelError::NvrtcMissing`] and [`AccelError::Compile`] from
/// preparing the kernel, [`AccelError::Driver`] from running it.
pub fn gptq_marlin_repack(device: &Device, args: &RepackArgs<'_>) -> Result<Vec<u32>, AccelError> {
    let qweight = device.upload(args.qweight)?;
    let perm = args.perm.map(|perm| device.upload(perm)).transpose()?;
    let mut out = device.zeroed::<u32>(args.qweight.len())?;
    let sizes = RepackSizes {
        experts: args.experts as usize,
        shape: Shape::new(args.size_k as usize, args.size_n as usize),
        num_bits: args.num_bits,
        is_a_8bit: args.is_a_8bit,
    };
    gptq_marlin_repack_on_device(device, &qweight, perm.as_ref(), sizes, &mut out)?;
    device.download(&out)
}

/// [`gptq_marlin_repack`] from buffer to buffer. `perm` must have entries below `size_k`.
///
/// # Errors
/// As [`RepackArgs::stack`]; [`AccelError::Argument`] also for buffers of another device; those of preparing and
/// launching the kernel.
pub fn gptq_marlin_repack_on_device(
    device: &Device,
    qweight: &Buffer<u32>,
    perm: Option<&Buffer<u32>>,
    sizes: RepackSizes,
    out: &mut Buffer<u32>,
) -> Result<(), AccelError> {
    let RepackSizes { experts, shape: Shape { size_k, size_n }, num_bits, is_a_8bit } = sizes;
    let perm_on_device = perm.is_none_or(|perm| perm.is_on(device));
    let parts =
        [("qweight", qweight.is_on(device)), ("perm", perm_on_device), ("out", out.is_on(device))];
    check::same_device(&ALONG_K, device, &parts)?;
    let Checked { k, n, words, experts } =
        Checked::new(experts, size_k, size_n, num_bits, is_a_8bit)?;
    let all = experts as usize * words as usize;
    if (qweight.len(), out.len()) != (all, all) {
        let found = format!("{} and {} words", qweight.len(), out.len());
        return Err(refuse("qweight, out", found, format!("{all} words each")));
    }
    if let Some(perm) = perm.filter(|perm| perm.len() != experts as usize * size_k) {
        return Err(refuse("perm", format!("{} entries", perm.len()), experts as usize * size_k));
    }
    let mut grid = Grid::one_thread_each(words.into());
    grid.blocks.1 = experts;
    // For each expert qweight and out have size_k / PACK * size_n words; perm, read only with HAS_PERM, has size_k
    // entries below size_k; sizes are multiples of the tile.
    let arguments = RepackArguments {
        qweight: qweight.into(),
        perm: perm.into(),
        out: out.into(),
        size_k: k,
        size_n: n,
    };
    let parameters: [Parameter; 3] = [
        ("BITS", num_bits),
        ("HAS_PERM", u32::from(perm.is_some())),
        ("IS_A_8BIT", u32::from(is_a_8bit)),
    ];
    ALONG_K_KERNEL.launch(device, &parameters, grid, arguments)
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
    let shape = Shape::new(size_k, size_n);
    let sizes = RepackSizes { experts: 1, shape, num_bits, is_a_8bit };
    let mut out = device.zeroed::<u32>(qweight.len())?;
    awq_marlin_repack_on_device(device, &device.upload(qweight)?, sizes, &mut out)?;
    device.download(&out)
}

/// [`awq_marlin_repack`] from buffer to buffer, of one matrix.
///
/// # Errors
/// As [`awq_marlin_repack`]; [`AccelError::Argument`] also for buffers of another device.
pub fn awq_marlin_repack_on_device(
    device: &Device,
    qweight: &Buffer<u32>,
    sizes: RepackSizes,
    out: &mut Buffer<u32>,
) -> Result<(), AccelError> {
    let RepackSizes { experts, shape: Shape { size_k, size_n }, num_bits, is_a_8bit } = sizes;
    let parts = [("qweight", qweight.is_on(device)), ("out", out.is_on(device))];
    check::same_device(&ALONG_N, device, &parts)?;
    if experts != 1 {
        return Err(ALONG_N.refuse("experts", experts, "1"));
    }
    if num_bits != 4 && num_bits != 8 {
        return Err(ALONG_N.refuse("num_bits", num_bits, "4 or 8"));
    }
    let tile_k = if is_a_8bit { 32 } else { 16 };
    let (k, n) = (
        check::positive(&ALONG_N, "size_k", size_k)?,
        check::positive(&ALONG_N, "size_n", size_n)?,
    );
    if k % tile_k != 0 {
        return Err(ALONG_N.refuse("size_k", k, format!("a multiple of {tile_k}")));
    }
    if n % 64 != 0 {
        return Err(ALONG_N.refuse("size_n", n, "a multiple of 64"));
    }
    let words = u64::from(k) * u64::from(n / (32 / num_bits));
    if u32::try_from(words).is_err() {
        let found = format!("{words} packed words");
        return Err(ALONG_N.refuse("size_k, size_n", found, "fewer than 2^32"));
    }
    if (qweight.len() as u64, out.len() as u64) != (words, words) {
        let found = format!("{} words", qweight.len());
        return Err(ALONG_N.refuse("qweight", found, format!("{words} words")));
    }
    let parameters: [Parameter; 2] = [("BITS", num_bits), ("IS_A_8BIT", u32::from(is_a_8bit))];
    // Both have size_k * size_n / PACK words; sizes are multiples of the tile.
    let arguments =
        AlongNArguments { qweight: qweight.into(), out: out.into(), size_k: k, size_n: n };
    ALONG_N_KERNEL.launch(device, &parameters, Grid::one_thread_each(words), arguments)
}

/// Moves a checkpoint's codes to Marlin's layout: [`gptq_marlin_repack`] for words packed along K,
/// [`awq_marlin_repack`] for one matrix of words packed along N.
#[derive(Debug, Clone, Copy)]
pub struct Repack<'a> {
    /// How words hold codes.
    pub format: &'static IntFormat,
    /// Words of all matrices.
    pub qweight: &'a [u32],
    /// `[experts, size_k]`: row k of the result is row `perm[k]` of the checkpoint; only for words packed along K.
    pub perm: Option<&'a [u32]>,
    /// Number of matrices.
    pub experts: usize,
    /// Shape of each.
    pub shape: Shape,
    /// 4 or 8.
    pub bits: u32,
    /// Whether activations have 8 bits.
    pub is_a_8bit: bool,
}

impl Call for Repack<'_> {
    type Output = Vec<u32>;

    fn row(&self) -> &'static Row {
        if self.format.is_packed_along_n() { &ALONG_N } else { &ALONG_K }
    }

    fn on_device(&self, device: &Device) -> Result<Vec<u32>, AccelError> {
        let Self { format, qweight, perm, experts, shape, bits, is_a_8bit } = *self;
        let Shape { size_k, size_n } = shape;
        if format.is_packed_along_n() {
            return awq_marlin_repack(device, qweight, size_k, size_n, bits, is_a_8bit);
        }
        let args = RepackArgs::stack(qweight, perm, experts, size_k, size_n, bits, is_a_8bit)?;
        gptq_marlin_repack(device, &args)
    }

    fn by_reference(&self) -> marlinspike::Result<Vec<u32>> {
        let Self { format, qweight, perm, experts, shape, bits, is_a_8bit } = *self;
        let activations = if is_a_8bit { Activations::Bits8 } else { Activations::Bits16 };
        let layout = WeightLayout::new(shape, bits, activations)?;
        let mut out = Vec::new();
        for (e, words) in qweight.chunks_exact(qweight.len() / experts).enumerate() {
            let perm = perm.map(|perm| &perm[e * shape.size_k..][..shape.size_k]);
            out.extend(layout.pack(&format.codes(bits, shape, words.to_vec())?, perm)?);
        }
        Ok(out)
    }
}
