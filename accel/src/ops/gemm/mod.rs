//! Products with weights in Marlin's layout, by the reference's canonical schedule: the same bits as
//! [`Schedule::execute`] for every M and every division of the work.
//!
//! Version 1 ([`Schedule::canonical`]) unless the weight is [`MarlinWeight::of_part`] or
//! [`MarlinWeight::by_version_2`]: version 2 ([`Schedule::canonical_v2`]), which no tensor-parallel size
//! changes.
//!
//! [`Schedule::execute`]: marlinspike::products::schedule::Schedule::execute
//! [`Schedule::canonical`]: marlinspike::products::schedule::Schedule::canonical
//! [`Schedule::canonical_v2`]: marlinspike::products::schedule::Schedule::canonical_v2

pub(crate) mod checks;
mod experts;
mod form;
mod from_parts;
pub(crate) mod many;
mod output;
mod plan;
mod tiling;
mod weight;

use std::collections::HashSet;

use marlinspike::moe::activation::{Columns, Definition, Function};
use marlinspike::num::dims::Shape;
use marlinspike::num::scalar::ScalarType;

pub use experts::Routed;
pub(crate) use experts::{Entries, Experts};
pub(crate) use form::Form;
pub use form::{Packed, PackedScales, ScaleBound};
pub use from_parts::PackedParts;
pub use many::marlin_gemm_many_rows;
pub(crate) use output::{Output, PeerSums};
pub use plan::ManyRows;
pub use tiling::Tiling;
use tiling::{Width, cuts};
pub use weight::MarlinWeight;

use crate::{
    device::Device,
    error::AccelError,
    launch::{Activation, Arguments, Cut, Grid, Kernel, Pointer, Routing, arguments},
    memory::Buffer,
    nvrtc::{Arch, Parameter},
    operation::{Law, Mutant, Needs, Row},
    ops::check,
    parameters::Product,
};

/// Upstream: `marlin_gemm`.
pub(crate) static ROW: Row = Row {
    name: "marlin_gemm",
    source: "marlin_gemm",
    needs: Needs { compute_capability: (8, 0) },
    law: Law::EqualBits,
    variants: |arch| variants(arch, &[Product::Dense, Product::DensePart]),
    arguments: GemmArguments::SIZES,
    mutants: &[
        Mutant::new(
            "a column's scale is its neighbour's",
            "scale[2 * j + 1] = twice<1>(scales);",
            "scale[2 * j + 1] = twice<0>(scales);",
        ),
        Mutant::new(
            "a column's scale is its neighbour's, in one step with the codes",
            "fma2(codes, half_of<HIGH>(times), half_of<HIGH>(minus))",
            "fma2(codes, half_of<0>(times), half_of<HIGH>(minus))",
        ),
        Mutant::new(
            "chunks added from the last to the second",
            "sum.x = c < chunks ? __fadd_rn(sum.x, of_chunk[c].x) : sum.x;",
            "sum.x = __fadd_rn(sum.x, of_chunk[CHUNKS - c].x);",
        ),
        Mutant::new(
            "bias of the next column",
            "sum.x = __fadd_rn(sum.x, widen(bias[0]));",
            "sum.x = __fadd_rn(sum.x, widen(bias[1]));",
        ),
        Mutant::new(
            "router weight of the first row for all",
            "const float weight = topk_weights[entry];",
            "const float weight = topk_weights[0];",
        ),
    ],
};

/// Upstream: `moe_wna16_marlin_gemm`.
pub(crate) static MOE: Row = Row {
    name: "moe_wna16_marlin_gemm",
    source: "marlin_gemm",
    needs: Needs { compute_capability: (8, 0) },
    law: Law::EqualBits,
    variants: |arch| {
        let all = [Product::Experts, Product::ExpertsGateUpHalves, Product::ExpertsGateUpPairs];
        variants(arch, if arch.has_clusters() { &all } else { &all[..1] })
    },
    arguments: GemmArguments::SIZES,
    mutants: &[Mutant::new(
        "the groups of the first expert's rows for all",
        "p.g_idx + expert * p.size_k + begin",
        "p.g_idx + 0 * expert + begin",
    )],
};

fn variants(arch: Arch, products: &[Product]) -> Result<Vec<Vec<Parameter>>, AccelError> {
    let (mut all, mut seen) = (Vec::new(), HashSet::new());
    for ty in [ScalarType::FLOAT16, ScalarType::BFLOAT16] {
        for form in Form::all_halves(ty) {
            for size_m in [8, 16, 32, 64, 128] {
                for cut in cuts() {
                    for width in Width::ALL {
                        for &product in products {
                            let paired = product == Product::ExpertsGateUpHalves;
                            let tiling = Tiling::choose(arch, size_m, cut, width, paired, form)?;
                            if seen.insert((ty, form, product, tiling)) {
                                all.push(parameters(ty, form, product, tiling));
                            }
                        }
                    }
                }
            }
        }
    }
    Ok(all)
}

fn parameters(ty: ScalarType, form: Form, product: Product, tiling: Tiling) -> Vec<Parameter> {
    let mut parameters = vec![("IS_BF16", u32::from(ty == ScalarType::BFLOAT16))];
    parameters.extend(form.parameters());
    parameters.push(("PRODUCT", product as u32));
    parameters.extend(tiling.parameters());
    parameters
}

static KERNEL: Kernel<GemmArguments> = Kernel::early(&ROW);
static MOE_KERNEL: Kernel<GemmArguments> = Kernel::early(&MOE);

arguments! {
    /// Arguments of `marlin_gemm.cu`.
    GemmArguments {
        qweight: Pointer,
        scales: Pointer,
        zeros: Pointer,
        g_idx: Pointer,
        bias: Pointer,
        global_scale: Pointer,
        x: Pointer,
        y: Pointer,
        size_m: u32,
        size_n: u32,
        size_k: u32,
        cut: Cut,
        group_size: u32,
        routing: Routing,
        topk_weights: Pointer,
        top_k: u32,
        activation: Activation,
    }
}

/// y `[M, N]` = x `[M, K]` · W, f16 or bf16 bits, row-major, plus the weight's bias.
///
/// A weight with act-order takes x with its columns in the weight's order:
/// [`MarlinWeight::perm`].
///
/// # Errors
/// [`AccelError::Argument`] where x is not whole rows of K, y not as many rows of N, or a buffer of
/// another device; [`AccelError::Capability`], [`AccelError::NvrtcMissing`] and
/// [`AccelError::Compile`] from preparing the kernel; [`AccelError::Driver`] from launching it.
pub fn marlin_gemm(
    device: &Device,
    x: &Buffer<u16>,
    weight: &MarlinWeight,
    y: &mut Buffer<u16>,
) -> Result<(), AccelError> {
    let size_m = x.len() / weight.shape().size_k;
    if let Some(plan) = weight.many_rows(device, size_m)? {
        return marlin_gemm_many_rows(device, x, weight, y, plan);
    }
    let tiling = weight.tiling(device, size_m)?;
    marlin_gemm_tiled(device, x, weight, y, tiling)
}

/// [`marlin_gemm`] with the caller's tiling: the same bits, at another speed.
///
/// # Errors
/// As [`marlin_gemm`]; [`AccelError::Argument`] for a tiling that the device does not take.
pub fn marlin_gemm_tiled(
    device: &Device,
    x: &Buffer<u16>,
    weight: &MarlinWeight,
    y: &mut Buffer<u16>,
    tiling: Tiling,
) -> Result<(), AccelError> {
    launch(device, x, weight, Output::Halves(y), tiling, None)
}

/// A rank's part of [`marlin_gemm`]: the f32 sums `[M, N]` of x `[M, K]` · W, without scale, bias or
/// rounding, where W holds the rank's rows of the model's weight ([`MarlinWeight::of_part`]) and x
/// the same columns. The bits of [`Schedule::canonical_v2_part`]; [`Schedule::add_ranks`] adds them up.
///
/// # Errors
/// As [`marlin_gemm`]; [`AccelError::Argument`] for a weight without a split.
///
/// [`Schedule::canonical_v2_part`]: marlinspike::products::schedule::Schedule::canonical_v2_part
/// [`Schedule::add_ranks`]: marlinspike::products::schedule::Schedule::add_ranks
pub fn marlin_gemm_part(
    device: &Device,
    x: &Buffer<u16>,
    weight: &MarlinWeight,
    y: &mut Buffer<f32>,
) -> Result<(), AccelError> {
    part(device, x, weight, Output::Part(y))
}

/// [`marlin_gemm_part`] to any memory.
pub(crate) fn part(
    device: &Device,
    x: &Buffer<u16>,
    weight: &MarlinWeight,
    y: Output<'_>,
) -> Result<(), AccelError> {
    let size_m = x.len() / weight.shape().size_k;
    match weight.many_rows(device, size_m)? {
        Some(plan) => many::dense(device, x, weight, y, plan),
        None => launch(device, x, weight, y, weight.tiling(device, size_m)?, None),
    }
}

/// Row t of y `[M · top_k, N]` = row t / top_k of x `[M, K]` · W of the expert that t is routed to,
/// plus bias, times router weight. Rows without an expert of this rank keep their contents.
///
/// # Errors
/// As [`marlin_gemm_tiled`]; [`AccelError::Argument`] also for blocks of other sizes than the
/// tiling's, and where router weights are not one for each row of y.
pub fn moe_marlin_gemm(
    device: &Device,
    x: &Buffer<u16>,
    weight: &MarlinWeight,
    y: &mut Buffer<u16>,
    tiling: Tiling,
    routed: Routed<'_>,
) -> Result<(), AccelError> {
    let Routed { blocks, top_k, topk_weights } = routed;
    let entries = Entries::Blocks(blocks);
    let experts = Experts { entries, top_k, topk_weights, activation: None, is_early: false };
    launch(device, x, weight, Output::Halves(y), tiling, Some(experts))
}

/// Whether a product's kernel can apply the activation. It has only the most common one, SiLU of
/// gate times up, since others would make every layer's kernel slow to load. Before 9.0, a thread
/// block has no room for all chunks of gate and up.
pub(crate) fn is_fusible(arch: Arch, activation: &Definition) -> bool {
    let known = activation.function == Function::Silu && activation.columns != Columns::Gate;
    known && arch.has_clusters()
}

/// Returns an error unless the kernel can apply the activation under the tiling.
fn check_activation(
    device: &Device,
    activation: &Definition,
    tiling: Tiling,
    shape: Shape,
) -> Result<(), AccelError> {
    if !is_fusible(device.arch(), activation) {
        let expected = "SiLU of gate and up, from capability 9.0 on";
        return Err(MOE.refuse("activation", format!("{activation:?}"), expected));
    }
    // A thread block takes 64 columns from each half of N: those of gate and those of up.
    let is_paired = activation.columns == Columns::Halves;
    if is_paired && (tiling.n_tile != 128 || !shape.size_n.is_multiple_of(128)) {
        let expected = "128 columns, 64 of each half of N";
        return Err(MOE.refuse("tiling", format!("{tiling:?} for {shape}"), expected));
    }
    Ok(())
}

/// The thread blocks of a product of `size_m` rows in `row_blocks` blocks.
fn grid(
    row: &Row,
    device: &Device,
    weight: &MarlinWeight,
    tiling: Tiling,
    [size_m, row_blocks]: [usize; 2],
) -> Result<Grid, AccelError> {
    let sizes = tiling.sizes(weight.form())?;
    let shared_bytes = sizes.shared_bytes(tiling.rows().min(size_m));
    if shared_bytes > device.shared_memory() {
        let found = format!("{tiling:?}, {shared_bytes} bytes");
        let expected = format!("at most {} bytes of shared memory", device.shared_memory());
        return Err(row.refuse("tiling", found, expected));
    }
    let blocks = (weight.shape().size_n / tiling.n_tile as usize)
        .saturating_mul(row_blocks)
        .saturating_mul(tiling.ranks as usize);
    let Some(blocks) = i32::try_from(blocks).ok().map(i32::unsigned_abs) else {
        return Err(row.refuse("rows", format!("{blocks} thread blocks"), "below 2^31"));
    };
    Ok(Grid { blocks: (blocks, 1, 1), threads: (sizes.threads, 1, 1), shared_bytes })
}

/// Checks a product, then launches it.
pub(crate) fn launch(
    device: &Device,
    x: &Buffer<u16>,
    weight: &MarlinWeight,
    y: Output<'_>,
    tiling: Tiling,
    experts: Option<Experts<'_>>,
) -> Result<(), AccelError> {
    let (row, kernel) = if experts.is_some() { (&MOE, &MOE_KERNEL) } else { (&ROW, &KERNEL) };
    let parts = [
        ("x", x.is_on(device)),
        ("weight", weight.is_on(device)),
        ("y", y.is_on(device)),
        ("routing", experts.is_none_or(|experts| experts.is_on(device))),
    ];
    check::same_device(row, device, &parts)?;
    checks::for_16_bit(row, weight)?;
    y.check(row, weight)?;
    let shape = weight.shape();
    let top_k = experts.map_or(1, |experts| experts.top_k);
    let activation = experts.and_then(|experts| experts.activation);
    let width = shape.size_n / activation.map_or(1, |activation| activation.width_in(1));
    let rows_of_x = checks::rows_of_x(row, x, shape.size_k)?;
    let size_m = checks::rows_of_y(row, rows_of_x, top_k, y.len(), width)?;
    if size_m == 0 {
        return Ok(());
    }
    tiling.validate(device, shape, weight.cut())?;
    if let Some(activation) = activation {
        check_activation(device, activation, tiling, shape)?;
    }
    let row_blocks = match experts {
        Some(experts) => experts.row_blocks(weight, tiling, size_m)?,
        None => size_m.div_ceil(tiling.rows()),
    };
    let grid = grid(row, device, weight, tiling, [size_m, row_blocks])?;
    let product = match (experts, activation.map(|activation| activation.columns)) {
        (None, _) if y.is_part() => Product::DensePart,
        (None, _) => Product::Dense,
        (_, None) => Product::Experts,
        (_, Some(Columns::Halves)) => Product::ExpertsGateUpHalves,
        (_, Some(_)) => Product::ExpertsGateUpPairs,
    };
    // x has size_m / top_k rows of size_k, y size_m rows of size_n, or of what the activation makes of that; the weight's
    // buffers are what the reference packs for that shape; K has at most 8 chunks. Blocks are room for this M
    // and block size, or there is an id for each row; ids beyond the experts are not looked up.
    let arguments = GemmArguments {
        qweight: (&weight.qweight).into(),
        scales: (&weight.scales).into(),
        zeros: weight.zeros.as_ref().into(),
        g_idx: weight.g_idx.as_ref().into(),
        bias: weight.bias.as_ref().into(),
        global_scale: weight.global_scale.as_ref().into(),
        x: x.into(),
        y: y.pointer(),
        // `MarlinWeight` holds both sizes below 2^31, and M was checked above, with it top_k.
        size_m: size_m as u32,
        size_n: shape.size_n as u32,
        size_k: shape.size_k as u32,
        cut: weight.cut().into(),
        group_size: weight.group_k(),
        routing: experts.as_ref().map_or_else(Routing::default, Experts::routing),
        topk_weights: experts.and_then(|experts| experts.topk_weights).into(),
        top_k: top_k as u32,
        activation: activation.map_or_else(Activation::default, Into::into),
    };
    kernel.launch(
        device,
        &parameters(weight.dtype(), weight.form(), product, tiling),
        grid,
        arguments,
    )
}
