//! Products of e4m3fn activations and 4-bit weights in Marlin's layout on Hopper (`marlin_gemm_a8_wgmma.cu`): the bits of
//! [`Schedule::canonical_wgmma`](marlinspike::products::schedule::Schedule::canonical_wgmma) for every M. Other
//! architectures have [`marlin_gemm_a8`](super::marlin_gemm_a8), whose sums are those of `mma.sync`.

mod experts;
mod layer;
mod plan;

use marlinspike::num::scalar::ScalarType;

pub use experts::moe_w4a8_gemm;
pub use layer::{W4a8Layer, W4a8Workspace};
use plan::RowsOf;
pub use plan::W4a8Plan;

use crate::{
    device::{Device, failed},
    error::AccelError,
    launch::{
        Activation, Arguments, FewEntries, Kernel, Pointer, arguments, tensor_map::TensorMap,
    },
    memory::Buffer,
    nvrtc::Parameter,
    operation::{Law, Mutant, Needs, Row},
    ops::{
        align::RoutedRows,
        fp8_rows,
        gemm::{Form, MarlinWeight, checks},
        gemm_a8::RowsA8,
        layer::blocks::GateUp,
    },
};

/// Upstream: `marlin_gemm` with e4m3 activations, which it does not build for this architecture.
pub(crate) static ROW: Row = Row {
    name: "w4a8_gemm",
    source: plan::SOURCE,
    needs: Needs { compute_capability: (9, 0) },
    law: Law::EqualBits,
    variants: |arch| plan::variants(arch, &[RowsOf::Matrix]),
    arguments: W4a8Arguments::SIZES,
    mutants: &[
        Mutant::new(
            "one chain over several parts",
            "wgmma_fp8<N>(part, a[step], reader.x(slot) + 2 * step, step % PART_STEPS);",
            "wgmma_fp8<N>(part, a[step], reader.x(slot) + 2 * step, 1);",
        ),
        Mutant::new(
            "one chain over all stages, few rows",
            "of.a[step], x + 2 * step, step);",
            "of.a[step], x + 2 * step, 1);",
        ),
        Mutant::new(
            "the scale of the first row of two for both",
            "r == 0 ? x_scales.x : x_scales.y",
            "x_scales.x",
        ),
        Mutant::new(
            "the router weight of the first row of two for both",
            "r == 0 ? weights.x : weights.y",
            "weights.x",
        ),
        Mutant::new(
            "no router weights, many rows",
            "is_weighted ? __fmul_rn(value, row_weight) : value",
            "value",
        ),
        Mutant::new(
            "a row of a tile is not written",
            "i * 2 + warp.lane / 4 < rows)",
            "i * 2 + warp.lane / 4 + 1 < rows)",
        ),
        Mutant::new("one chain over several parts, many rows", "step != first", "1"),
        Mutant::new(
            "a column's scale is its neighbour's, wgmma",
            "promoted(total[at + i], part[i], scale[half])",
            "promoted(total[at + i], part[i], scale[0])",
        ),
        Mutant::new(
            "a column's scale is its neighbour's, shared columns",
            "/ 2 % 2 ? scale.y : scale.x",
            "/ 2 % 2 ? scale.x : scale.x",
        ),
        Mutant::new(
            "a pair's parts in descending order",
            "slots.at(count, in_pair);",
            "slots.at(count, pair * PAIR + 1 < k_stages ? PAIR - 1 - in_pair : in_pair);",
        ),
        Mutant::new(
            "the columns of a pair's first stage for both",
            "PAIR == 2 && in_pair == 1 ? part",
            "PAIR == 2 && in_pair == 2 ? part",
        ),
        Mutant::new(
            "the part times its scale, rounded before the sum, wgmma",
            "__fmaf_rn(part, scale, total)",
            "__fadd_rn(__fmul_rn(part, scale), total)",
        ),
        Mutant::new(
            "the scales of a stage's first group for all, many rows",
            "reader.scales(slot), now % PARTS, warp);",
            "reader.scales(slot), 0, warp);",
        ),
        Mutant::new(
            "the scales of the stage's first group for its last one",
            "load_scales(scale, from + part * (N_TILE * SCALE_SIZE), warp);",
            "load_scales(scale, from, warp);",
        ),
        Mutant::new("the zero points of the first group for all", "fetch(next);", "fetch(0);"),
        Mutant::new(
            "the first rows of x for all pieces",
            "reader.x(slot) + at * (2 * STAGE_K / 16)",
            "reader.x(slot)",
        ),
        Mutant::new(
            "the bias added with a rounding of its own, 4-bit weights",
            "__fmaf_rn(value, x_scale, bias)",
            "__fadd_rn(__fmul_rn(value, x_scale), bias)",
        ),
        Mutant::new(
            "the bias in the order of columns",
            "static_cast<size_t>(tile.expert) * p.size_n + single_position(n);",
            "static_cast<size_t>(tile.expert) * p.size_n + n;",
        ),
        Mutant::new(
            "the first block's weights for all, few entries",
            "begins && block == tile.row / ROWS",
            "begins",
        ),
        Mutant::new("one row of a block, few entries", "min(ROWS, __popc(of_run) - before)", "1u"),
        Mutant::new(
            "the largest number of a row's first part for all, few entries",
            "largest = fmaxf(largest, largest_of_parts[row * parts + i]);",
            "largest = fmaxf(largest, largest_of_parts[row * parts]);",
        ),
        Mutant::new(
            "the first of two activated rows for both",
            "from.rows, first + row, pieces, piece)",
            "from.rows, first + row / 2 * 2, pieces, piece)",
        ),
        Mutant::new(
            "activated rows that are not swizzled",
            "SwizzledRows::at(row, piece % 16 / 2)",
            "SwizzledRows::at(row, piece % 16 / 2 ^ row % 8)",
        ),
        Mutant::new(
            "the first stage's activated rows for all",
            "reader.x(ACTIVATES ? stage : of.slot)",
            "reader.x(ACTIVATES ? 0 : of.slot)",
        ),
    ],
};

/// Upstream: `moe_wna16_marlin_gemm`, likewise.
pub(crate) static MOE: Row = Row {
    name: "moe_w4a8_gemm",
    source: plan::SOURCE,
    needs: Needs { compute_capability: (9, 0) },
    law: Law::EqualBits,
    variants: |arch| plan::variants(arch, &[RowsOf::Experts, RowsOf::GateUp]),
    arguments: W4a8Arguments::SIZES,
    mutants: &[],
};

static KERNEL: Kernel<W4a8Arguments> = Kernel::early(&ROW);
static MOE_KERNEL: Kernel<W4a8Arguments> = Kernel::early(&MOE);

arguments! {
    /// Arguments of `marlin_gemm_a8_wgmma.cu`.
    W4a8Arguments {
        x_map: TensorMap,
        y_map: TensorMap,
        qweight: Pointer,
        scales: Pointer,
        zeros: Pointer,
        bias: Pointer,
        x_scales: Pointer,
        y: Pointer,
        size_m: u32,
        size_n: u32,
        size_k: u32,
        tile_n: u32,
        stages: u32,
        raster: u32,
        expert_ids: Pointer,
        num_tokens_post_padded: Pointer,
        block_rows: Pointer,
        row_weights: Pointer,
        is_early: u32,
        few: FewEntries,
        gate_up: Pointer,
        activation: Activation,
    }
}

/// y `[M, N]` = x `[M, K]` · W, f16 or bf16 bits, row-major, times the scale of each row, plus the weight's bias. W is packed
/// for e4m3fn activations ([`MarlinWeight::for_8_bit`]).
///
/// # Errors
/// [`AccelError::Argument`] for a weight packed for other activations, where x is not whole rows of K with a scale each,
/// y not as many rows of N, or a buffer of another device; [`AccelError::Capability`], [`AccelError::NvrtcMissing`] and
/// [`AccelError::Compile`] from preparing the kernel, which only sm_90a has; [`AccelError::Driver`] from launching it.
pub fn w4a8_gemm(
    device: &Device,
    x: RowsA8<'_>,
    weight: &MarlinWeight,
    y: &mut Buffer<u16>,
) -> Result<(), AccelError> {
    let plan = W4a8Plan::choose(x.scales.len(), weight, device.multiprocessors());
    w4a8_gemm_planned(device, x, weight, y, plan)
}

/// [`w4a8_gemm`], divided by the caller's plan: the same bits, at another speed.
///
/// # Errors
/// As [`w4a8_gemm`]; [`AccelError::Argument`] for a plan that the kernel does not have.
pub fn w4a8_gemm_planned(
    device: &Device,
    x: RowsA8<'_>,
    weight: &MarlinWeight,
    y: &mut Buffer<u16>,
    plan: W4a8Plan,
) -> Result<(), AccelError> {
    let x_rows = RowsOfX::Codes(x);
    on_device(&ROW, device, x_rows, weight, y, None)?;
    fp8_rows::one_matrix(&ROW, weight.experts())?;
    let shape = weight.shape();
    let rows = x.scales.len();
    if Some(x.codes.len()) != rows.checked_mul(shape.size_k) {
        let expected = format!("[{rows}, {}], a row for each scale", shape.size_k);
        return Err(ROW.refuse("x", format!("{} codes", x.codes.len()), expected));
    }
    let size_m = checks::rows_of_y(&ROW, rows, 1, y.len(), shape.size_n)?;
    if size_m == 0 {
        return Ok(());
    }
    launch(device, x_rows, weight, y, plan, size_m, None)
}

/// What a product's rows are made of.
#[derive(Debug, Clone, Copy)]
enum RowsOfX<'a> {
    Codes(RowsA8<'a>),
    GateUp(GateUp<'a>),
}

/// Returns an error if any buffer belongs to another device, or the weight is not packed for e4m3fn activations.
fn on_device(
    row: &'static Row,
    device: &Device,
    x: RowsOfX<'_>,
    weight: &MarlinWeight,
    y: &Buffer<u16>,
    routed: Option<RoutedRows<'_>>,
) -> Result<(), AccelError> {
    if weight.input_dtype() != Some(ScalarType::FLOAT8_E4M3FN) {
        let input = weight.input_dtype().unwrap_or(weight.dtype());
        let found = format!("packed for {input} activations");
        return Err(row.refuse("weight", found, "packed for float8_e4m3fn activations"));
    }
    let x_here = match x {
        RowsOfX::Codes(x) => x.codes.is_on(device) && x.scales.is_on(device),
        RowsOfX::GateUp(gate_up) => gate_up.rows.is_on(device),
    };
    fp8_rows::on_device(row, device, [x_here, weight.is_on(device)], y, routed)
}

/// Launches a checked product of `rows` rows.
fn launch(
    device: &Device,
    x: RowsOfX<'_>,
    weight: &MarlinWeight,
    y: &mut Buffer<u16>,
    plan: W4a8Plan,
    rows: usize,
    routed: Option<RoutedRows<'_>>,
) -> Result<(), AccelError> {
    let (row, kernel) = if routed.is_some() { (&MOE, &MOE_KERNEL) } else { (&ROW, &KERNEL) };
    let rows_of = match x {
        RowsOfX::GateUp(_) => RowsOf::GateUp,
        RowsOfX::Codes(_) if routed.is_some() => RowsOf::Experts,
        RowsOfX::Codes(_) => RowsOf::Matrix,
    };
    let shape = weight.shape();
    let sizes = plan.sizes(row, device, (weight.form(), rows_of))?;
    let tiles = plan.tiles(rows, shape.size_n);
    let (rows, grid) = fp8_rows::grid(row, device, (rows, tiles), sizes)?;
    // `MarlinWeight` holds these below 2^31.
    let (size_n, size_k) = (shape.size_n as u32, shape.size_k as u32);
    let map_failed = || failed("cuTensorMapEncodeTiled");
    let blocks = routed.map(|routed| routed.blocks);
    let y_map = TensorMap::new(device, y, rows, size_n, plan.rows).map_err(map_failed())?;
    let (x_map, x_scales, gate_up, activation) = match x {
        RowsOfX::Codes(RowsA8 { codes, scales }) => {
            let x_map = TensorMap::of_bytes(device, codes, rows, size_k, plan.rows);
            (x_map.map_err(map_failed())?, scales.into(), Pointer::NULL, Activation::default())
        }
        // The kernel does not read the map.
        RowsOfX::GateUp(of) => (y_map, Pointer::NULL, of.rows.into(), of.activation.into()),
    };
    // x has `rows` rows of size_k codes and as many scales, y as many of size_n; the weight's buffers are what the
    // reference packs for its shape; the copy engine reads and writes no others. gate_up has `rows` rows of the width that its
    // activation has for size_k. Blocks are of the plan's rows, one in y for each place, as are the router weights. The ring's
    // stages fit the shared memory of the launch.
    let arguments = W4a8Arguments {
        x_map,
        y_map,
        qweight: (&weight.qweight).into(),
        scales: (&weight.scales).into(),
        zeros: weight.zeros.as_ref().into(),
        bias: weight.bias.as_ref().into(),
        x_scales,
        y: y.into(),
        size_m: rows,
        size_n,
        size_k,
        tile_n: plan.tile_n,
        stages: sizes.stages,
        raster: plan.raster(),
        expert_ids: blocks.map(|blocks| &blocks.expert_ids).into(),
        num_tokens_post_padded: blocks.map(|blocks| &blocks.num_tokens_post_padded).into(),
        block_rows: blocks.map(|blocks| &blocks.block_rows).into(),
        row_weights: routed.and_then(|routed| routed.row_weights).into(),
        is_early: routed.is_some_and(|routed| routed.is_early).into(),
        few: routed.map(|routed| routed.few).unwrap_or_default(),
        gate_up,
        activation,
    };
    let parameters = parameters(weight.dtype(), weight.form(), rows_of, plan);
    kernel.launch(device, &parameters, grid, arguments)
}

fn parameters(dtype: ScalarType, form: Form, rows_of: RowsOf, plan: W4a8Plan) -> Vec<Parameter> {
    let mut parameters = vec![
        ("IS_BF16", u32::from(dtype == ScalarType::BFLOAT16)),
        ("CODES", form.codes as u32),
        ("GROUPS", form.groups),
    ];
    parameters.extend(rows_of.parameters());
    parameters.extend(plan.parameters());
    parameters
}
