//! Scales and int4 codes in the forms that Marlin's kernels take.

use marlinspike::layouts::marlin::ScalePermutation;

use super::check;
use crate::{
    device::Device,
    error::AccelError,
    launch::{Arguments, Grid, Kernel, Pointer, arguments},
    operation::{Law, Needs, Row, lattice},
};

/// Upstream: the function `marlin_permute_scales`.
pub(crate) static PERMUTE: Row = Row {
    name: "marlin_permute_scales",
    source: "marlin_permute_scales",
    needs: Needs { compute_capability: (7, 5) },
    law: Law::EqualBits,
    variants: |_| Ok(lattice(&[("IS_SINGLE", &[0, 1])])),
    arguments: PermuteArguments::SIZES,
};

/// Upstream: `marlin_int4_fp8_preprocess`.
pub(crate) static INT4_FP8: Row = Row {
    name: "marlin_int4_fp8_preprocess",
    source: "marlin_int4_fp8_preprocess",
    needs: Needs { compute_capability: (7, 5) },
    law: Law::EqualBits,
    variants: |_| Ok(lattice(&[("HAS_ZERO", &[0, 1])])),
    arguments: Int4Fp8Arguments::SIZES,
};

static PERMUTE_KERNEL: Kernel<PermuteArguments> = Kernel::new(&PERMUTE);
static INT4_FP8_KERNEL: Kernel<Int4Fp8Arguments> = Kernel::new(&INT4_FP8);

arguments! {
    /// Of `marlin_permute_scales.cu`.
    PermuteArguments {
        scales: Pointer,
        out: Pointer,
        elements: u64,
    }
}

arguments! {
    /// Of `marlin_int4_fp8_preprocess.cu`.
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
    if size_n == 0 || !size_n.is_multiple_of(64) {
        return Err(PERMUTE.refuse("size_n", size_n, "a positive multiple of 64"));
    }
    check::rows(&PERMUTE, "scales", scales.len(), size_n)?;
    let elements = check::threads(&PERMUTE, "scales", scales.len())?;
    let single = u32::from(permutation == ScalePermutation::Single);
    let scales = device.upload(scales)?;
    let mut out = device.zeroed::<u16>(scales.len())?;
    // Both have `elements` elements, whole runs of 64.
    let arguments = PermuteArguments { scales: (&scales).into(), out: (&mut out).into(), elements };
    let grid = Grid::one_thread_each(elements);
    PERMUTE_KERNEL.launch(device, &[("IS_SINGLE", single)], grid, arguments)?;
    device.download(&out)
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
