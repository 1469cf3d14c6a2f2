//! Scales and int4 codes in the forms that Marlin's kernels take.

use marlinspike::layouts::marlin::{
    ScalePermutation, int4_to_fp8_asymmetric, int4_to_fp8_symmetric,
};
use marlinspike::num::array::{into_vec, rows_of};

use super::check;
use crate::{
    call::Call,
    device::Device,
    error::AccelError,
    launch::{Arguments, Grid, Kernel, Pointer, arguments},
    memory::Buffer,
    operation::{Law, Mutant, Needs, Row, lattice},
};

/// Upstream: the function `marlin_permute_scales`.
pub(crate) static PERMUTE: Row = Row {
    name: "marlin_permute_scales",
    source: "marlin_permute_scales",
    needs: Needs { compute_capability: (7, 5) },
    law: Law::EqualBits,
    variants: |_| Ok(lattice(&[("IS_SINGLE", &[0, 1])])),
    arguments: PermuteArguments::SIZES,
    mutants: &[Mutant::new(
        "two columns of a run exchanged",
        "p % 8 * 8 + p / 8",
        "p % 8 * 8 + (p / 8 ^ 1u)",
    )],
};

/// Upstream: `marlin_int4_fp8_preprocess`.
pub(crate) static INT4_FP8: Row = Row {
    name: "marlin_int4_fp8_preprocess",
    source: "marlin_int4_fp8_preprocess",
    needs: Needs { compute_capability: (7, 5) },
    law: Law::EqualBits,
    variants: |_| Ok(lattice(&[("HAS_ZERO", &[0, 1])])),
    arguments: Int4Fp8Arguments::SIZES,
    mutants: &[Mutant::new("a code that equals its zero point", "v >= z ?", "v > z ?")],
};

static PERMUTE_KERNEL: Kernel<PermuteArguments> = Kernel::new(&PERMUTE);
static INT4_FP8_KERNEL: Kernel<Int4Fp8Arguments> = Kernel::new(&INT4_FP8);

arguments! {
    /// Arguments of `marlin_permute_scales.cu`.
    PermuteArguments {
        scales: Pointer,
        out: Pointer,
        elements: u64,
    }
}

arguments! {
    /// Arguments of `marlin_int4_fp8_preprocess.cu`.
    Int4Fp8Arguments {
        qweight: Pointer,
        qzeros: Pointer,
        out: Pointer,
        elements: u64,
        words: u32,
        group_rows: u32,
    }
}

/// The columns of `scales` `[rows, size_n]`, 16-bit elements, in one of Marlin's two orders.
///
/// # Errors
/// [`AccelError::Argument`] unless `size_n` is a multiple of 64 and `scales` whole rows; those of
/// preparing and running a kernel.
pub fn marlin_permute_scales(
    device: &Device,
    scales: &[u16],
    size_n: usize,
    permutation: ScalePermutation,
) -> Result<Vec<u16>, AccelError> {
    let mut out = device.zeroed::<u16>(scales.len())?;
    let scales = device.upload(scales)?;
    marlin_permute_scales_on_device(device, &scales, size_n, permutation, &mut out)?;
    device.download(&out)
}

/// [`marlin_permute_scales`] from buffer to buffer.
///
/// # Errors
/// As [`marlin_permute_scales`]; [`AccelError::Argument`] also for an `out` of another length, and for buffers of
/// another device.
pub fn marlin_permute_scales_on_device(
    device: &Device,
    scales: &Buffer<u16>,
    size_n: usize,
    permutation: ScalePermutation,
    out: &mut Buffer<u16>,
) -> Result<(), AccelError> {
    let parts = [("scales", scales.is_on(device)), ("out", out.is_on(device))];
    check::same_device(&PERMUTE, device, &parts)?;
    if size_n == 0 || !size_n.is_multiple_of(64) {
        return Err(PERMUTE.refuse("size_n", size_n, "a positive multiple of 64"));
    }
    check::rows(&PERMUTE, "scales", scales.len(), size_n)?;
    if out.len() != scales.len() {
        return Err(PERMUTE.refuse("out", out.len(), scales.len()));
    }
    let elements = check::threads(&PERMUTE, "scales", scales.len())?;
    let single = u32::from(permutation == ScalePermutation::Single);
    // Both have `elements` elements, whole runs of 64.
    let arguments = PermuteArguments { scales: scales.into(), out: out.into(), elements };
    let grid = Grid::one_thread_each(elements);
    PERMUTE_KERNEL.launch(device, &[("IS_SINGLE", single)], grid, arguments)
}

/// Packed int4 codes `[rows, words]` rewritten for fp8 activations; `qzeros` `[groups, words]` in
/// the same order, or none for `uint4b8`.
///
/// # Errors
/// [`AccelError::Argument`] unless the codes are whole rows and the groups divide them; those of
/// preparing and running a kernel.
pub fn marlin_int4_fp8_preprocess(
    device: &Device,
    qweight: &[u32],
    qzeros: Option<&[u32]>,
    words: usize,
) -> Result<Vec<u32>, AccelError> {
    let row = &INT4_FP8;
    let per_row = check::positive(row, "words per row", words)?;
    let rows = check::rows(row, "qweight", qweight.len(), words)?;
    let groups = match qzeros {
        Some(zeros) => check::rows(row, "qzeros", zeros.len(), words)?,
        None => 1,
    };
    if rows % groups != 0 {
        let expected = format!("a number of groups that divides {rows} rows");
        return Err(row.refuse("qzeros", format!("{groups} groups"), expected));
    }
    let elements = check::threads(row, "qweight", qweight.len())?;
    let has_zero = u32::from(qzeros.is_some());
    let qweight = device.upload(qweight)?;
    let qzeros = qzeros.map(|zeros| device.upload(zeros)).transpose()?;
    let mut out = device.zeroed::<u32>(qweight.len())?;
    // qweight and out have `elements` words in rows of `words`; qzeros, read only with HAS_ZERO, has a row for each
    // group_rows of them.
    let arguments = Int4Fp8Arguments {
        qweight: (&qweight).into(),
        qzeros: qzeros.as_ref().into(),
        out: (&mut out).into(),
        elements,
        words: per_row,
        group_rows: rows / groups,
    };
    let grid = Grid::one_thread_each(elements);
    INT4_FP8_KERNEL.launch(device, &[("HAS_ZERO", has_zero)], grid, arguments)?;
    device.download(&out)
}

/// [`marlin_permute_scales`].
#[derive(Debug, Clone, Copy)]
pub struct PermuteScales<'a> {
    /// `[rows, size_n]`, 16-bit elements.
    pub scales: &'a [u16],
    /// Columns.
    pub size_n: usize,
    /// Their order in the result.
    pub permutation: ScalePermutation,
}

impl Call for PermuteScales<'_> {
    type Output = Vec<u16>;

    fn row(&self) -> &'static Row {
        &PERMUTE
    }

    fn on_device(&self, device: &Device) -> Result<Vec<u16>, AccelError> {
        marlin_permute_scales(device, self.scales, self.size_n, self.permutation)
    }

    fn by_reference(&self) -> marlinspike::Result<Vec<u16>> {
        let (scales, columns) = (self.scales, self.permutation.columns());
        let run = columns.len();
        Ok((0..scales.len()).map(|i| scales[i / run * run + columns[i % run]]).collect())
    }
}

/// [`marlin_int4_fp8_preprocess`].
#[derive(Debug, Clone, Copy)]
pub struct Int4Fp8<'a> {
    /// Packed int4 codes `[rows, words]`.
    pub qweight: &'a [u32],
    /// `[groups, words]` in the same order, or none for `uint4b8`.
    pub qzeros: Option<&'a [u32]>,
    /// Words of a row.
    pub words: usize,
}

impl Call for Int4Fp8<'_> {
    type Output = Vec<u32>;

    fn row(&self) -> &'static Row {
        &INT4_FP8
    }

    fn on_device(&self, device: &Device) -> Result<Vec<u32>, AccelError> {
        marlin_int4_fp8_preprocess(device, self.qweight, self.qzeros, self.words)
    }

    fn by_reference(&self) -> marlinspike::Result<Vec<u32>> {
        match self.qzeros {
            None => Ok(int4_to_fp8_symmetric(self.qweight)),
            Some(zeros) => {
                let zeros = rows_of("qzeros", zeros, self.words)?;
                let qweight = rows_of("qweight", self.qweight, self.words)?;
                int4_to_fp8_asymmetric(qweight, zeros).map(into_vec)
            }
        }
    }
}
