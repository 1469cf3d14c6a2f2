//! Products of e4m3fn activations and e4m3fn weights on Hopper (`fp8_gemm.cu`): the bits of
//! [`Schedule::w8a8_fp8`](marlinspike::products::schedule::Schedule::w8a8_fp8) with CUTLASS's epilogue, promoted or not, or with scales of
//! blocks those of [`Schedule::w8a8_fp8_blocks`](marlinspike::products::schedule::Schedule::w8a8_fp8_blocks) as DeepGEMM orders them, for every M.

mod call;
mod layer;
mod plan;
mod weight;

use marlinspike::num::scalar::ScalarType;

pub use call::Fp8Product;
pub use layer::{Fp8Layer, Fp8Workspace};
pub use plan::Fp8Plan;
pub use weight::{Fp8Scales, Fp8Sums, Fp8Weight};

use crate::{
    device::{Device, failed},
    error::AccelError,
    launch::{Arguments, Kernel, Pointer, arguments, tensor_map::TensorMap},
    memory::Buffer,
    nvrtc::Parameter,
    operation::{Law, Mutant, Needs, Row},
    ops::{align::RoutedRows, fp8_rows, gemm::checks, quantize::fp8_scale_step},
};

/// Upstream: `cutlass_scaled_mm`, DeepGEMM's `fp8_gemm_nt`.
pub(crate) static ROW: Row = Row {
    name: "fp8_gemm",
    source: plan::SOURCE,
    needs: Needs { compute_capability: (9, 0) },
    law: Law::EqualBits,
    variants: |arch| plan::variants(arch, false),
    arguments: Fp8GemmArguments::SIZES,
    mutants: &[
        Mutant::new(
            "one chain over several stages",
            "slot = multiply(p, memory, warp, true, place, sum);",
            "slot = multiply(p, memory, warp, index < 2, place, sum);",
        ),
        Mutant::new(
            "the scale of the neighbouring row",
            "p.x_scales[m * static_cast<size_t>(p.x_scale_step)]",
            "p.x_scales[(m ^ 1u) % p.size_m * static_cast<size_t>(p.x_scale_step)]",
        ),
        Mutant::new(
            "the part times its scale, rounded before the sum",
            "__fmaf_rn(sum[i + j], scale[j % 2], total[i + j])",
            "__fadd_rn(__fmul_rn(sum[i + j], scale[j % 2]), total[i + j])",
        ),
        Mutant::new(
            "the bias added with a rounding of its own",
            "__fmaf_rn(value, x_scale, bias[half])",
            "__fadd_rn(__fmul_rn(value, x_scale), bias[half])",
        ),
        Mutant::new(
            "one chain over several stages, many rows",
            "multiply<PART_N>(memory, thread, place, 0, true, stage.sum);",
            "multiply<PART_N>(memory, thread, place, 0, index < 2, stage.sum);",
        ),
        Mutant::new(
            "a stage promoted with the next one's scale of W, many rows",
            "stage.w_scale = scales.at(index);",
            "stage.w_scale = scales.at(min(index + 1, scales.count - 1));",
        ),
        Mutant::new(
            "the scale of a thread's first row for both, many rows",
            "reinterpret_cast<const float *>(of_rows)[thread.row + 8]",
            "reinterpret_cast<const float *>(of_rows)[thread.row]",
        ),
        Mutant::new(
            "the part times its scale, rounded before the sum, many rows",
            "__fmaf_rn(sum[i], scale[i / 2 % 2], total[i])",
            "__fadd_rn(__fmul_rn(sum[i], scale[i / 2 % 2]), total[i])",
        ),
        Mutant::new(
            "the chain over all of K cut in the middle",
            "return multiply(p, memory, warp, index == 0, place, total); }",
            "return multiply(p, memory, warp, index % 5 == 0, place, total); }",
        ),
        Mutant::new(
            "the chain over all of K cut in the middle, many rows",
            "multiply<TILE_N>(memory, thread, place, 0, index == 0, sum);",
            "multiply<TILE_N>(memory, thread, place, 0, index % 5 == 0, sum);",
        ),
        Mutant::new(
            "both halves of a wide tile with the scale of the first",
            "const float w_scale = scales.at(index, part);",
            "const float w_scale = scales.at(index, 0);",
        ),
        Mutant::new(
            "both halves of a wide tile from the weights of the first",
            "multiply<PART_N>(memory, thread, place, part * PART_N, true, sum);",
            "multiply<PART_N>(memory, thread, place, 0, true, sum);",
        ),
        Mutant::new(
            "a half of a tile with one row left out, many rows",
            "size_m - row) <= ROWS / 2;",
            "size_m - row) <= ROWS / 2 + 1;",
        ),
        Mutant::new(
            "the bias added with a rounding of its own, many rows",
            "__fmaf_rn(value, x_scale.of[i / 2], added)",
            "__fadd_rn(__fmul_rn(value, x_scale.of[i / 2]), added)",
        ),
    ],
};

/// Upstream: `cutlass_moe_mm`, DeepGEMM's `m_grouped_fp8_gemm_nt_contiguous`.
pub(crate) static MOE: Row = Row {
    name: "moe_fp8_gemm",
    source: plan::SOURCE,
    needs: Needs { compute_capability: (9, 0) },
    law: Law::EqualBits,
    variants: |arch| plan::variants(arch, true),
    arguments: Fp8GemmArguments::SIZES,
    mutants: &[],
};

static KERNEL: Kernel<Fp8GemmArguments> = Kernel::early(&ROW);
static MOE_KERNEL: Kernel<Fp8GemmArguments> = Kernel::early(&MOE);

arguments! {
    /// Arguments of `fp8_gemm.cu`.
    Fp8GemmArguments {
        w_map: TensorMap,
        x_map: TensorMap,
        half_map: TensorMap,
        y_map: TensorMap,
        w_scales: Pointer,
        x_scales: Pointer,
        bias: Pointer,
        y: Pointer,
        size_m: u32,
        size_n: u32,
        size_k: u32,
        x_scale_step: u32,
        tile_n: u32,
        stages: u32,
        raster: u32,
        expert_ids: Pointer,
        num_tokens_post_padded: Pointer,
        block_rows: Pointer,
        row_weights: Pointer,
    }
}

/// e4m3fn rows in a device's memory.
#[derive(Debug, Clone, Copy)]
pub struct RowsFp8<'a> {
    /// `[M, K]`: any bits, NaN included.
    pub codes: &'a Buffer<u8>,
    /// For a weight with [`Fp8Scales::Channels`]: `[M]`, or one scale of the whole tensor. With
    /// [`Fp8Scales::Blocks`]: `[K / 128, M]`, each row padded to [`fp8_scale_step`] values.
    pub scales: &'a Buffer<f32>,
}

/// y `[M, N]` = x `[M, K]` · W, f16 or bf16 bits, row-major, with the scales of both and the weight's bias.
///
/// # Errors
/// [`AccelError::Argument`] where x is not whole rows of K with their scales, y not as many rows of N, or a buffer
/// is another device's; [`AccelError::Capability`], [`AccelError::NvrtcMissing`] and [`AccelError::Compile`] from
/// preparing the kernel, which only sm_90a has; [`AccelError::Driver`] from launching it.
pub fn fp8_gemm(
    device: &Device,
    x: RowsFp8<'_>,
    weight: &Fp8Weight,
    y: &mut Buffer<u16>,
) -> Result<(), AccelError> {
    let size_m = x.codes.len() / weight.shape().size_k;
    let plan = Fp8Plan::choose(size_m, weight, device.multiprocessors());
    fp8_gemm_planned(device, x, weight, y, plan)
}

/// [`fp8_gemm`], divided by the caller's plan: the same bits, at another speed.
///
/// # Errors
/// As [`fp8_gemm`]; [`AccelError::Argument`] for a plan that the kernel does not have.
pub fn fp8_gemm_planned(
    device: &Device,
    x: RowsFp8<'_>,
    weight: &Fp8Weight,
    y: &mut Buffer<u16>,
    plan: Fp8Plan,
) -> Result<(), AccelError> {
    on_device(&ROW, device, x, weight, y, None)?;
    fp8_rows::one_matrix(&ROW, weight.experts())?;
    let shape = weight.shape();
    if !x.codes.len().is_multiple_of(shape.size_k) {
        let found = format!("{} codes", x.codes.len());
        return Err(ROW.refuse("x", found, format!("rows of {}", shape.size_k)));
    }
    let rows = x.codes.len() / shape.size_k;
    let size_m = checks::rows_of_y(&ROW, rows, 1, y.len(), shape.size_n)?;
    if size_m == 0 {
        return Ok(());
    }
    launch(device, x, weight, y, plan, size_m, None)
}

/// Each row of y `[places, N]` = the row of x `[places, K]` · W of the expert of its block, with the scales of both, plus
/// bias, times router weight. Rows of padding are undefined afterwards, and those of x are not used.
///
/// # Errors
/// As [`fp8_gemm_planned`]; [`AccelError::Argument`] also for blocks of other sizes than the plan's or for other
/// experts, and where x, y or weights do not have a row for each place.
pub fn moe_fp8_gemm(
    device: &Device,
    x: RowsFp8<'_>,
    weight: &Fp8Weight,
    y: &mut Buffer<u16>,
    plan: Fp8Plan,
    routed: RoutedRows<'_>,
) -> Result<(), AccelError> {
    on_device(&MOE, device, x, weight, y, Some(routed))?;
    let shape = weight.shape();
    let lengths = [("x", x.codes.len(), shape.size_k), ("y", y.len(), shape.size_n)];
    let places = fp8_rows::places(&MOE, &lengths, (plan.rows, weight.experts()), routed)?;
    if places == 0 {
        return Ok(());
    }
    launch(device, x, weight, y, plan, places, Some(routed))
}

/// Returns an error if any buffer belongs to another device.
fn on_device(
    row: &'static Row,
    device: &Device,
    x: RowsFp8<'_>,
    weight: &Fp8Weight,
    y: &Buffer<u16>,
    routed: Option<RoutedRows<'_>>,
) -> Result<(), AccelError> {
    let x_here = x.codes.is_on(device) && x.scales.is_on(device);
    fp8_rows::on_device(row, device, [x_here, weight.is_on(device)], y, routed)
}

/// Launches a checked product of `rows` rows.
fn launch(
    device: &Device,
    x: RowsFp8<'_>,
    weight: &Fp8Weight,
    y: &mut Buffer<u16>,
    plan: Fp8Plan,
    rows: usize,
    routed: Option<RoutedRows<'_>>,
) -> Result<(), AccelError> {
    let is_moe = routed.is_some();
    let (row, kernel) = if is_moe { (&MOE, &MOE_KERNEL) } else { (&ROW, &KERNEL) };
    let shape = weight.shape();
    let x_scale_step = scale_step(row, x, weight, rows)?;
    let sizes = plan.sizes(row, device, (weight.scales_of(), is_moe))?;
    let tiles = plan.tiles(rows, shape.size_n);
    let (rows, grid) = fp8_rows::grid(row, device, (rows, tiles), sizes)?;
    // `Fp8Weight` holds these below 2^31, and all experts' columns too.
    let (size_n, size_k) = (shape.size_n as u32, shape.size_k as u32);
    let all_columns = size_n * weight.experts() as u32;
    let map = |matrix, rows, box_rows| {
        TensorMap::of_bytes(device, matrix, rows, size_k, box_rows)
            .map_err(failed("cuTensorMapEncodeTiled"))
    };
    let blocks = routed.map(|routed| routed.blocks);
    // x has `rows` rows of size_k codes with their scales, y as many of size_n; the weight's buffers fit its shape; the
    // copy engine reads and writes no others. Blocks are of the plan's rows, one in y for each place, as are the router weights.
    // The ring's stages fit the shared memory of the launch.
    let arguments = Fp8GemmArguments {
        w_map: map(&weight.codes, all_columns, plan.tile_n)?,
        x_map: map(x.codes, rows, plan.rows)?,
        half_map: map(x.codes, rows, plan.group_rows())?,
        y_map: TensorMap::new(device, y, rows, size_n, plan.group_rows())
            .map_err(failed("cuTensorMapEncodeTiled"))?,
        w_scales: (&weight.scales).into(),
        x_scales: x.scales.into(),
        bias: weight.bias.as_ref().into(),
        y: y.into(),
        size_m: rows,
        size_n,
        size_k,
        x_scale_step,
        tile_n: plan.tile_n,
        stages: sizes.stages,
        raster: plan.raster(),
        expert_ids: blocks.map(|blocks| &blocks.expert_ids).into(),
        num_tokens_post_padded: blocks.map(|blocks| &blocks.num_tokens_post_padded).into(),
        block_rows: blocks.map(|blocks| &blocks.block_rows).into(),
        row_weights: routed.and_then(|routed| routed.row_weights).into(),
    };
    let kind = (weight.scales_of(), weight.sums());
    let parameters = parameters(weight.dtype(), kind, is_moe, plan);
    kernel.launch(device, &parameters, grid, arguments)
}

/// The kernel's `x_scale_step` for `size_m` rows with these scales.
fn scale_step(
    row: &Row,
    x: RowsFp8<'_>,
    weight: &Fp8Weight,
    size_m: usize,
) -> Result<u32, AccelError> {
    let (found, step) = (x.scales.len(), fp8_scale_step(size_m));
    let expected = match weight.scales_of() {
        Fp8Scales::Channels if found == 1 => return Ok(0),
        Fp8Scales::Channels if found == size_m => return Ok(1),
        Fp8Scales::Channels => format!("{size_m}, or 1"),
        Fp8Scales::Blocks => {
            let groups = weight.shape().size_k / Fp8Weight::BLOCK;
            if found == groups * step {
                // At most 2^31 with the rows of y.
                return Ok(step as u32);
            }
            format!("[{groups}, {step}]")
        }
    };
    Err(row.refuse("x_scales", format!("{found} values"), expected))
}

fn parameters(
    dtype: ScalarType,
    (scales, sums): (Fp8Scales, Fp8Sums),
    is_moe: bool,
    plan: Fp8Plan,
) -> Vec<Parameter> {
    let mut parameters = vec![
        ("IS_BF16", u32::from(dtype == ScalarType::BFLOAT16)),
        ("HAS_BLOCKS", scales as u32),
        ("IS_PROMOTED", (sums == Fp8Sums::Promoted).into()),
        ("IS_MOE", is_moe.into()),
    ];
    parameters.extend(plan.parameters());
    parameters
}
