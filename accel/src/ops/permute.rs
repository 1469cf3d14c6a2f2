//! Activations in the order of an act-order weight.

use super::{align::Runs, check};
use crate::{
    device::Device,
    error::AccelError,
    launch::{Arguments, Grid, Kernel, Pointer, arguments},
    memory::Buffer,
    operation::{Law, Mutant, Needs, Row},
};

/// Upstream: `permute_cols`.
pub(crate) static ROW: Row = Row {
    name: "permute_cols",
    source: "permute_cols",
    needs: Needs { compute_capability: (7, 5) },
    law: Law::EqualBits,
    variants: |_| Ok(vec![Vec::new()]),
    arguments: PermuteArguments::SIZES,
    mutants: &[Mutant::new(
        "columns in reverse",
        "at - k + perm[k]",
        "at - k + perm[size_k - 1 - k]",
    )],
};

/// Upstream: a part of `moe_wna16_marlin_gemm`.
pub(crate) static EXPERTS: Row = Row {
    name: "moe_permute_cols",
    source: "moe_permute_cols",
    needs: Needs { compute_capability: (7, 5) },
    law: Law::EqualBits,
    variants: |_| Ok(vec![Vec::new()]),
    arguments: ExpertArguments::SIZES,
    mutants: &[Mutant::new(
        "neighbouring columns exchanged",
        "<< 16 | row[from.x]",
        "<< 16 | row[from.y]",
    )],
};

static KERNEL: Kernel<PermuteArguments> = Kernel::new(&ROW);
static EXPERTS_KERNEL: Kernel<ExpertArguments> = Kernel::new(&EXPERTS);

arguments! {
    /// Arguments of `permute_cols.cu`.
    PermuteArguments {
        x: Pointer,
        perm: Pointer,
        out: Pointer,
        elements: u64,
        size_k: u32,
    }
}

arguments! {
    /// Arguments of `moe_permute_cols.cu`.
    ExpertArguments {
        x: Pointer,
        perm: Pointer,
        topk_ids: Pointer,
        expert_of: Pointer,
        out: Pointer,
        pairs: u64,
        num_experts: u32,
        size_k: u32,
        top_k: u32,
    }
}

/// Row t of `out` `[entries, size_k]` is row t / `top_k` of `x` with its columns in the order
/// `perm[expert]` of the expert of entry t; of `perm` `[experts, size_k]`, all entries are below
/// `size_k`. Rows without an expert keep their contents.
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
    check::same_device(&EXPERTS, device, &parts)?;
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
        return Err(EXPERTS.refuse("x", found, expected));
    }
    let pairs = check::threads(&EXPERTS, "x", out.len() / 2)?;
    // out has `pairs` pairs, a row of size_k (even) for each of the topk_ids; x a row for each top_k of them; perm a row
    // of entries below size_k for each expert that expert_of names, or without it for each of num_experts.
    let arguments = ExpertArguments {
        x: x.into(),
        perm: perm.into(),
        topk_ids: topk_ids.into(),
        expert_of: runs.expert_of.as_ref().into(),
        out: out.into(),
        pairs,
        num_experts: check::positive(&EXPERTS, "num_experts", runs.run_of.len())?,
        size_k,
        top_k: check::positive(&EXPERTS, "top_k", top_k)?,
    };
    EXPERTS_KERNEL.launch(device, &[], Grid::one_thread_each(pairs), arguments)
}

/// Column k of the result is column `perm[k]` of `x` `[rows, size_k]`, 16-bit elements.
///
/// # Errors
/// [`AccelError::Argument`] unless x is whole rows of as many columns as `perm` has entries, all
/// below their number; those of preparing and running a kernel.
pub fn permute_cols(device: &Device, x: &[u16], perm: &[u32]) -> Result<Vec<u16>, AccelError> {
    let size_k = check::positive(&ROW, "perm", perm.len())?;
    if let Some(i) = perm.iter().position(|&k| k >= size_k) {
        let found = format!("{} at [{i}]", perm[i]);
        return Err(ROW.refuse("perm", found, format!("below {size_k}")));
    }
    check::rows(&ROW, "x", x.len(), perm.len())?;
    let mut out = device.zeroed::<u16>(x.len())?;
    permute_columns_on_device(device, &device.upload(x)?, &device.upload(perm)?, &mut out)?;
    device.download(&out)
}

/// [`permute_cols`] from buffer to buffer. `perm` must have entries below its length.
///
/// # Errors
/// [`AccelError::Argument`] for buffers of unequal lengths, of other than whole rows, or of another
/// device; those of preparing and launching a kernel.
pub(crate) fn permute_columns_on_device(
    device: &Device,
    x: &Buffer<u16>,
    perm: &Buffer<u32>,
    out: &mut Buffer<u16>,
) -> Result<(), AccelError> {
    if out.len() != x.len() {
        let expected = format!("{}, as of x", x.len());
        return Err(ROW.refuse("out", format!("{} values", out.len()), expected));
    }
    let on_device = [x.is_on(device), perm.is_on(device), out.is_on(device)];
    let parts = [("x", on_device[0]), ("perm", on_device[1]), ("out", on_device[2])];
    check::same_device(&ROW, device, &parts)?;
    let size_k = check::positive(&ROW, "perm", perm.len())?;
    check::rows(&ROW, "x", x.len(), perm.len())?;
    let elements = check::threads(&ROW, "x", x.len())?;
    // x and out have `elements` elements in rows of size_k; perm has size_k entries below size_k.
    let arguments =
        PermuteArguments { x: x.into(), perm: perm.into(), out: out.into(), elements, size_k };
    KERNEL.launch(device, &[], Grid::one_thread_each(elements), arguments)
}
