//! GPTQ's and AWQ's packed weights moved to Marlin's weight layout.

use marlinspike::formats::integers::IntFormat;
use marlinspike::layouts::marlin::{Activations, WeightLayout};
use marlinspike::num::dims::Shape;

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

/// Checked arguments of [`gptq_marlin_repack`]: holding one proves that a launch with it stays
/// inside its buffers.
#[derive(Debug, Clone, Copy)]
pub struct RepackArgs<'a> {
    qweight: &'a [u32],
    perm: Option<&'a [u32]>,
    size_k: u32,
    size_n: u32,
    num_bits: u32,
    is_a_8bit: bool,
    experts: u32,
}

impl<'a> RepackArgs<'a> {
    /// Arguments of one matrix: [`RepackArgs::stack`] of one expert.
    ///
    /// # Errors
    /// As [`RepackArgs::stack`].
    pub fn new(
        qweight: &'a [u32],
        perm: Option<&'a [u32]>,
        size_k: usize,
        size_n: usize,
        num_bits: u32,
        is_a_8bit: bool,
    ) -> Result<Self, AccelError> {
        Self::stack(qweight, perm, 1, size_k, size_n, num_bits, is_a_8bit)
    }

    /// Checks the arguments of a stack of experts against upstream's rules.
    ///
    /// - `qweight`: `[experts, size_k / pack, size_n]`, pack = 32 / `num_bits` consecutive rows to a
    ///   word
    /// - `perm`: `[experts, size_k]`; row k of the result is row `perm[k]` of the checkpoint
    /// - `experts`: 1 to 65535
    /// - `size_k`: a multiple of 16 (8-bit activations: 32); `size_n`: of 64
    /// - `num_bits`: 4 or 8
    /// - `is_a_8bit`: lay out for 8-bit activations
    ///
    /// # Errors
    /// [`AccelError::Argument`] naming the argument, what was found and what was expected.
    pub fn stack(
        qweight: &'a [u32],
        perm: Option<&'a [u32]>,
        experts: usize,
        size_k: usize,
        size_n: usize,
        num_bits: u32,
        is_a_8bit: bool,
    ) -> Result<Self, AccelError> {
        let Checked { k, n, words, experts } =
            Checked::new(experts, size_k, size_n, num_bits, is_a_8bit)?;
        let all = u64::from(experts) * u64::from(words);
        if u64::try_from(qweight.len()) != Ok(all) {
            let expected = format!("{all} words ([{experts}, {k} / {}, {n}])", 32 / num_bits);
            return Err(refuse("qweight", format!("{} words", qweight.len()), expected));
        }
        if let Some(perm) = perm {
            let entries = experts as usize * size_k;
            if perm.len() != entries {
                return Err(refuse("perm", format!("{} entries", perm.len()), entries));
            }
            if let Some((i, row)) = perm.iter().enumerate().find(|&(_, &row)| row >= k) {
                return Err(refuse("perm", format!("{row} at [{i}]"), format!("below {k}")));
            }
        }
        Ok(Self { qweight, perm, size_k: k, size_n: n, num_bits, is_a_8bit, experts })
    }

    /// The source's parameters for these arguments.
    pub fn parameters(&self) -> [Parameter; 3] {
        [
            ("BITS", self.num_bits),
            ("HAS_PERM", u32::from(self.perm.is_some())),
            ("IS_A_8BIT", u32::from(self.is_a_8bit)),
        ]
    }
}

/// Sizes that the kernel takes.
struct Checked {
    k: u32,
    n: u32,
    words: u32,
    experts: u32,
}

impl Checked {
    fn new(
        experts: usize,
        size_k: usize,
        size_n: usize,
        num_bits: u32,
        is_a_8bit: bool,
    ) -> Result<Self, AccelError> {
        if num_bits != 4 && num_bits != 8 {
            return Err(refuse("num_bits", num_bits, "4 or 8"));
        }
        let tile_k = if is_a_8bit { 32 } else { 16 };
        let (Ok(k), Ok(n)) = (u32::try_from(size_k), u32::try_from(size_n)) else {
            return Err(refuse("size_k, size_n", format!("{size_k}, {size_n}"), "below 2^32"));
        };
        if k == 0 || k % tile_k != 0 {
            return Err(refuse("size_k", k, format!("a positive multiple of {tile_k}")));
        }
        if n == 0 || n % 64 != 0 {
            return Err(refuse("size_n", n, "a positive multiple of 64"));
        }
        // A grid has fewer than 2^31 blocks of 256 threads; the word count is held to 2^32, as
        // upstream's 32-bit sizes are.
        let words = (k / (32 / num_bits)).checked_mul(n).ok_or_else(|| {
            refuse("size_k, size_n", format!("{k}, {n}"), "fewer than 2^32 packed words")
        })?;
        let Some(experts) = u32::try_from(experts).ok().filter(|e| (1..=65535).contains(e)) else {
            return Err(refuse("experts", experts, "1 to 65535"));
        };
        Ok(Self { k, n, words, experts })
    }
}

fn refuse(
    what: &'static str,
    found: impl std::fmt::Display,
    expected: impl std::fmt::Display,
) -> AccelError {
    ALONG_K.refuse(what, found, expected)
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

/// Sizes of a stack of packed matrices.
#[derive(Debug, Clone, Copy)]
pub struct RepackSizes {
    /// Number of matrices, 1 to 65535.
    pub experts: usize,
    /// Shape of each.
    pub shape: Shape,
    /// 4 or 8.
    pub num_bits: u32,
    /// Lay out for 8-bit activations.
    pub is_a_8bit: bool,
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

#[cfg(test)]
mod tests {
    use super::*;

    /// The argument that `new` complains about.
    fn complaint(
        words: usize,
        perm: Option<&[u32]>,
        size_k: usize,
        size_n: usize,
        num_bits: u32,
        is_a_8bit: bool,
    ) -> &'static str {
        match RepackArgs::new(&vec![0; words], perm, size_k, size_n, num_bits, is_a_8bit) {
            Err(AccelError::Argument { what, .. }) => what,
            other => panic!("expected Argument, found {other:?}"),
        }
    }

    #[test]
    fn each_rule_is_checked() {
        let identity: Vec<u32> = (0..32).collect();
        assert!(RepackArgs::new(&[0; 4 * 64], Some(&identity), 32, 64, 4, true).is_ok());
        assert_eq!(complaint(4 * 64, None, 32, 64, 5, false), "num_bits");
        assert_eq!(complaint(5 * 64, None, 40, 64, 4, false), "size_k");
        assert_eq!(complaint(2 * 64, None, 16, 64, 4, true), "size_k");
        assert_eq!(complaint(0, None, 0, 64, 4, false), "size_k");
        assert_eq!(complaint(4 * 32, None, 32, 32, 4, false), "size_n");
        assert_eq!(complaint(0, None, 32, 0, 4, false), "size_n");
        assert_eq!(complaint(4 * 64 - 1, None, 32, 64, 4, false), "qweight");
        assert_eq!(complaint(4 * 64, None, 32, 64, 8, false), "qweight");
        assert_eq!(complaint(4 * 64, Some(&identity[1..]), 32, 64, 4, false), "perm");
        let beyond: Vec<u32> = (1..33).collect();
        assert_eq!(complaint(4 * 64, Some(&beyond), 32, 64, 4, false), "perm");
        let stack = |experts| RepackArgs::stack(&[0; 8 * 64], None, experts, 32, 64, 4, false);
        assert!(stack(2).is_ok());
        for experts in [0, 1, 3, 65536] {
            assert!(matches!(stack(experts), Err(AccelError::Argument { .. })), "{experts}");
        }
        assert_eq!(complaint(0, None, 1 << 20, 1 << 20, 8, false), "size_k, size_n");
    }

    #[test]
    fn parameters_follow_the_arguments() {
        let args = RepackArgs::new(&[0; 8 * 64], None, 32, 64, 8, true).unwrap();
        assert_eq!(args.parameters(), [("BITS", 8), ("HAS_PERM", 0), ("IS_A_8BIT", 1)]);
    }
}
