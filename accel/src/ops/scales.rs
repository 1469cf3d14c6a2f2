//! Scales and int4 codes in the forms that Marlin's kernels take.

use marlinspike::layout::marlin::ScalePermutation;

use super::check;
use crate::{
    device::Device,
    error::AccelError,
    raw,
    registry::{Law, Needs, Row, lattice},
};

/// Upstream: the function `marlin_permute_scales`.
pub(crate) static PERMUTE: Row = Row {
    name: "marlin_permute_scales",
    source: "marlin_permute_scales",
    needs: Needs { compute_capability: (7, 5) },
    law: Law::EqualBits,
    variants: |_| lattice(&[("IS_SINGLE", &[0, 1])]),
};

/// Upstream: `marlin_int4_fp8_preprocess`.
pub(crate) static INT4_FP8: Row = Row {
    name: "marlin_int4_fp8_preprocess",
    source: "marlin_int4_fp8_preprocess",
    needs: Needs { compute_capability: (7, 5) },
    law: Law::EqualBits,
    variants: |_| lattice(&[("HAS_ZERO", &[0, 1])]),
};

/// Arguments of [`marlin_permute_scales`], checked.
#[derive(Debug)]
pub(crate) struct Permute<'a> {
    pub(crate) scales: &'a [u16],
    pub(crate) elements: u64,
}

/// Arguments of [`marlin_int4_fp8_preprocess`], checked.
#[derive(Debug)]
pub(crate) struct Int4Fp8<'a> {
    pub(crate) qweight: &'a [u32],
    pub(crate) qzeros: Option<&'a [u32]>,
    pub(crate) elements: u64,
    pub(crate) words: u32,
    pub(crate) group_rows: u32,
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
        return Err(AccelError::argument(&PERMUTE, "size_n", size_n, "a positive multiple of 64"));
    }
    check::rows(&PERMUTE, "scales", scales.len(), size_n)?;
    let elements = check::threads(&PERMUTE, "scales", scales.len())?;
    let single = u32::from(permutation == ScalePermutation::Single);
    let function = device.function(&PERMUTE, &[("IS_SINGLE", single)])?;
    raw::layout::permute_scales(device, &function, &Permute { scales, elements })
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
        return Err(AccelError::argument(row, "qzeros", format!("{groups} groups"), expected));
    }
    let elements = check::threads(row, "qweight", qweight.len())?;
    let function = device.function(row, &[("HAS_ZERO", u32::from(qzeros.is_some()))])?;
    let args = Int4Fp8 { qweight, qzeros, elements, words: per_row, group_rows: rows / groups };
    raw::layout::int4_fp8(device, &function, &args)
}
