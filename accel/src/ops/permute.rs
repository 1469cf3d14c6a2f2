//! Activations in the order of an act-order weight.

use super::{align::Runs, check};
use crate::{
    device::Device,
    error::AccelError,
    memory::Buffer,
    raw,
    registry::{Law, Needs, Row},
};

/// Upstream: `permute_cols`.
pub(crate) static ROW: Row = Row {
    name: "permute_cols",
    source: "permute_cols",
    needs: Needs { compute_capability: (7, 5) },
    law: Law::EqualBits,
    variants: |_| vec![Vec::new()],
};

/// Upstream: a part of `moe_wna16_marlin_gemm`.
pub(crate) static EXPERTS: Row = Row {
    name: "moe_permute_cols",
    source: "moe_permute_cols",
    needs: Needs { compute_capability: (7, 5) },
    law: Law::EqualBits,
    variants: |_| vec![Vec::new()],
};

/// Arguments that were checked: a launch with them stays inside its buffers.
#[derive(Debug)]
pub(crate) struct Args<'a> {
    pub(crate) x: &'a [u16],
    pub(crate) perm: &'a [u32],
    pub(crate) elements: u64,
    pub(crate) size_k: u32,
}

/// Rows of several experts that were checked, likewise.
#[derive(Debug)]
pub(crate) struct ExpertArgs<'a> {
    pub(crate) x: &'a Buffer<u16>,
    pub(crate) perm: &'a Buffer<u32>,
    pub(crate) topk_ids: &'a Buffer<i32>,
    pub(crate) runs: &'a Runs,
    pub(crate) out: &'a mut Buffer<u16>,
    pub(crate) pairs: u64,
    pub(crate) num_experts: u32,
    pub(crate) size_k: u32,
    pub(crate) top_k: u32,
}

/// Row t of `out` `[entries, size_k]` is row t / `top_k` of `x` with its columns in the order
/// `perm[expert]` of the expert of entry t; of `perm` `[experts, size_k]`, all entries are below
/// `size_k`. Rows without an expert stay as they are.
///
/// # Errors
/// [`AccelError::Argument`] for buffers that do not fit each other or of another device; those of
/// preparing and launching a kernel.
pub(crate) fn permute_on_device(
    device: &Device,
    x: &Buffer<u16>,
    perm: &Buffer<u32>,
    (topk_ids, runs): (&Buffer<i32>, &Runs),
    top_k: usize,
    out: &mut Buffer<u16>,
) -> Result<(), AccelError> {
    let parts = [
        ("x", x.is_on(device)),
        ("perm", perm.is_on(device)),
        ("routing", topk_ids.is_on(device) && runs.is_on(device)),
        ("out", out.is_on(device)),
    ];
    check::on(&EXPERTS, device, &parts)?;
    let entries = topk_ids.len();
    let columns = out.len() / entries.max(1);
    let size_k = check::positive(&EXPERTS, "size_k", columns)?;
    let fits = columns.is_multiple_of(2)
        && out.len() == entries * columns
        && x.len().checked_mul(top_k) == Some(out.len())
        && perm.len() >= runs.experts() * columns;
    if !fits {
        let found = format!("{} of x, {} of perm, {} of out", x.len(), perm.len(), out.len());
        let expected = format!(
            "[{entries} / {top_k}, {columns}], [{}, {columns}], [{entries}, {columns}]",
            runs.experts()
        );
        return Err(AccelError::argument(&EXPERTS, "x", found, expected));
    }
    let function = device.function(&EXPERTS, &[])?;
    let args = ExpertArgs {
        x,
        perm,
        topk_ids,
        runs,
        pairs: check::threads(&EXPERTS, "x", out.len() / 2)?,
        num_experts: check::positive(&EXPERTS, "num_experts", runs.run_of.len())?,
        size_k,
        top_k: check::positive(&EXPERTS, "top_k", top_k)?,
        out,
    };
    raw::layout::permute_experts(device, &function, args)
}

/// Column k of the result is column `perm[k]` of `x` `[rows, size_k]`, 16-bit elements.
///
/// # Errors
/// [`AccelError::Argument`] unless x is whole rows of as many columns as `perm` has entries, all
/// below their number; those of preparing and running a kernel.
pub fn permute_cols(device: &Device, x: &[u16], perm: &[u32]) -> Result<Vec<u16>, AccelError> {
    let size_k = check::positive(&ROW, "perm", perm.len())?;
    check::rows(&ROW, "x", x.len(), perm.len())?;
    if let Some(i) = perm.iter().position(|&k| k >= size_k) {
        let found = format!("{} at [{i}]", perm[i]);
        return Err(AccelError::argument(&ROW, "perm", found, format!("below {size_k}")));
    }
    let elements = check::threads(&ROW, "x", x.len())?;
    let function = device.function(&ROW, &[])?;
    raw::layout::permute_cols(device, &function, &Args { x, perm, elements, size_k })
}
