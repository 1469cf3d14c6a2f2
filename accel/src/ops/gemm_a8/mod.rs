//! Products with 8-bit activations and 4-bit weights in Marlin's layout for them, by the reference's
//! canonical schedule: the same bits as [`Schedule::execute`], whatever M is.

mod weight;

use marlinspike::num::scalar::ScalarType;
use marlinspike::products::schedule::Schedule;

pub use weight::MarlinWeightA8;

use crate::{
    device::Device,
    error::AccelError,
    launch::{Arguments, Grid, Kernel, Pointer, arguments},
    memory::Buffer,
    nvrtc::{Arch, Parameter},
    operation::{Law, Needs, Row},
    ops::{
        check,
        gemm::{Routed, checks},
    },
    parameters::size,
};
use weight::Form;

/// Upstream: `marlin_gemm`, `moe_wna16_marlin_gemm` with int8 activations.
pub(crate) static INT8: Row = Row {
    name: "marlin_gemm, int8 activations",
    source: "marlin_gemm_a8",
    needs: Needs { compute_capability: (8, 0) },
    law: Law::EqualBits,
    variants: |arch| variants(arch, ScalarType::INT8),
    arguments: GemmA8Arguments::SIZES,
};

/// Upstream: `marlin_gemm`, `moe_wna16_marlin_gemm` with e4m3 activations.
pub(crate) static FP8: Row = Row {
    name: "marlin_gemm, float8_e4m3fn activations",
    source: "marlin_gemm_a8",
    needs: Needs { compute_capability: (8, 9) },
    law: Law::EqualBits,
    variants: |arch| variants(arch, ScalarType::FLOAT8_E4M3FN),
    arguments: GemmA8Arguments::SIZES,
};

fn row_of(input: ScalarType) -> &'static Row {
    if input == ScalarType::INT8 { &INT8 } else { &FP8 }
}

fn variants(arch: Arch, input: ScalarType) -> Vec<Vec<Parameter>> {
    let mut all = Vec::new();
    for is_bf16 in [0, 1] {
        for form in Form::all(input).into_iter().filter(|form| is_bf16 == 1 || !form.is_float) {
            for is_moe in [0, 1] {
                for size_m in [8, 16, 32, 64] {
                    let defined =
                        parameters(is_bf16, form, is_moe, Rows::choose(arch, size_m, form));
                    if !all.contains(&defined) {
                        all.push(defined);
                    }
                }
            }
        }
    }
    all
}

fn parameters(is_bf16: u32, form: Form, is_moe: u32, rows: Rows) -> Vec<Parameter> {
    let mut parameters = vec![("IS_BF16", is_bf16)];
    parameters.extend(form.parameters());
    parameters.extend([("IS_MOE", is_moe), ("M_TILES", rows.m_tiles), ("STAGES", rows.stages)]);
    parameters
}

/// How the work of a product is divided. No bit of a result depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Rows {
    /// Eights of rows that a thread block computes.
    m_tiles: u32,
    /// Stages of 128 k that a warp keeps in flight, with the one it works on.
    stages: u32,
}

impl Rows {
    fn choose(arch: Arch, size_m: usize, form: Form) -> Self {
        // Fragments of e4m3 take registers for their two halves: 64 rows do not fit.
        let most = if form.is_fp8 { 4 } else { 8 };
        let m_tiles = (size_m.clamp(1, 64).div_ceil(8).next_power_of_two() as u32).min(most);
        Self::of(arch, m_tiles, form)
    }

    /// For so many eights of rows, or fewer where they do not fit the device's shared memory. On an H200,
    /// over K x N of 4096 x 4096, 14336 x 4096 and 4096 x 28672, these stages were the fastest of 2, 3, 4
    /// and 6 or within a twentieth of it.
    fn of(arch: Arch, m_tiles: u32, form: Form) -> Self {
        let mut rows = Self { m_tiles, stages: if m_tiles <= 2 { 3 } else { 2 } };
        while rows.shared_bytes(form, Schedule::CANONICAL_CHUNKS as u32) > arch.shared_memory() {
            match rows {
                Self { stages: 3.., .. } => rows.stages -= 1,
                Self { m_tiles: 2.., .. } => rows.m_tiles /= 2,
                _ => break,
            }
        }
        rows
    }

    /// Dynamic shared memory of a thread block, with a warp for each chunk: the source's own.
    fn shared_bytes(self, form: Form, chunks: u32) -> u32 {
        let own = [("M_TILES", self.m_tiles), ("STAGES", self.stages)];
        let parameters = [&form.parameters()[..], &own].concat();
        size("marlin_gemm_a8", "WARP_BYTES", &parameters).saturating_mul(chunks)
    }
}

/// Quantized rows in a device's memory.
#[derive(Debug, Clone, Copy)]
pub struct RowsA8<'a> {
    /// `[rows, K]`: int8 or e4m3fn bits, as the weight was packed for.
    pub codes: &'a Buffer<u8>,
    /// `[rows]`: what a code of each row is multiplied with.
    pub scales: &'a Buffer<f32>,
}

static INT8_KERNEL: Kernel<GemmA8Arguments> = Kernel::new(&INT8);
static FP8_KERNEL: Kernel<GemmA8Arguments> = Kernel::new(&FP8);

arguments! {
    /// Of `marlin_gemm_a8.cu`.
    GemmA8Arguments {
        qweight: Pointer,
        scales: Pointer,
        zeros: Pointer,
        bias: Pointer,
        x: Pointer,
        x_scales: Pointer,
        y: Pointer,
        x_factor: f32,
        size_m: u32,
        size_n: u32,
        size_k: u32,
        chunk_k: u32,
        sorted_token_ids: Pointer,
        expert_ids: Pointer,
        num_tokens_post_padded: Pointer,
        topk_weights: Pointer,
        top_k: u32,
    }
}

/// y `[M, N]` = x `[M, K]` · W, f16 or bf16 bits, row-major, plus the weight's bias.
///
/// # Errors
/// [`AccelError::Argument`] where x is not whole rows of K with a scale each, y not as many rows of N,
/// or a buffer of another device; [`AccelError::Capability`], [`AccelError::NvrtcMissing`] and
/// [`AccelError::Compile`] from preparing the kernel; [`AccelError::Driver`] from launching it.
pub fn marlin_gemm_a8(
    device: &Device,
    x: RowsA8<'_>,
    weight: &MarlinWeightA8,
    y: &mut Buffer<u16>,
) -> Result<(), AccelError> {
    launch(device, x, weight, y, None)
}

/// Row t of y `[M · top_k, N]` = row t / top_k of x `[M, K]` · W of the expert that t is routed to,
/// plus bias, times router weight. Rows without an expert of this rank stay as they are.
///
/// # Errors
/// As [`marlin_gemm_a8`]; [`AccelError::Argument`] also for blocks of other sizes than
/// [`MarlinWeightA8::block_size`] gives for some M, and where router weights are not one for each row
/// of y.
pub fn moe_marlin_gemm_a8(
    device: &Device,
    x: RowsA8<'_>,
    weight: &MarlinWeightA8,
    y: &mut Buffer<u16>,
    routed: Routed<'_>,
) -> Result<(), AccelError> {
    launch(device, x, weight, y, Some(routed))
}

/// Returns an error if any buffer belongs to another device.
fn on_device(
    row: &'static Row,
    device: &Device,
    x: RowsA8<'_>,
    weight: &MarlinWeightA8,
    y: &Buffer<u16>,
    routed: Option<Routed<'_>>,
) -> Result<(), AccelError> {
    let routed_here = |r: Routed<'_>| {
        r.blocks.is_on(device) && r.topk_weights.is_none_or(|weights| weights.is_on(device))
    };
    let parts = [
        ("x", x.codes.is_on(device) && x.scales.is_on(device)),
        ("weight", weight.is_on(device)),
        ("y", y.is_on(device)),
        ("routing", routed.is_none_or(routed_here)),
    ];
    check::same_device(row, device, &parts)
}

/// Checks a product, then launches it.
fn launch(
    device: &Device,
    x: RowsA8<'_>,
    weight: &MarlinWeightA8,
    y: &mut Buffer<u16>,
    routed: Option<Routed<'_>>,
) -> Result<(), AccelError> {
    let row = row_of(weight.input_dtype());
    let refuse = |what, found: String, expected: String| Err(row.refuse(what, found, expected));
    let shape = weight.shape();
    on_device(row, device, x, weight, y, routed)?;
    let rows_of_x = x.scales.len();
    if Some(x.codes.len()) != rows_of_x.checked_mul(shape.size_k) {
        let expected = format!("[{rows_of_x}, {}], a row for each scale", shape.size_k);
        return refuse("x", format!("{} codes", x.codes.len()), expected);
    }
    let top_k = routed.map_or(1, |r| r.top_k);
    let size_m = checks::rows_of_y(row, rows_of_x, top_k, y, shape.size_n)?;
    if size_m == 0 {
        return Ok(());
    }
    let arch = device.arch();
    let form = weight.form();
    let mut rows = Rows::choose(arch, size_m, form);
    let mut blocks = size_m.div_ceil(rows.m_tiles as usize * 8);
    if let Some(Routed { blocks: of, topk_weights, .. }) = routed {
        let block_size = of.block_size();
        rows = Rows::of(arch, (block_size / 8) as u32, form);
        if ![8, 16, 32, 64].contains(&block_size) || rows.m_tiles as usize * 8 != block_size {
            let expected = "blocks of `block_size` of some M";
            return refuse("blocks", format!("{of:?}"), expected.into());
        }
        checks::blocks(row, of, block_size, size_m, weight.experts())?;
        checks::router_weights(row, "topk_weights", topk_weights, size_m)?;
        blocks = of.most_blocks();
    }
    // The second dimension of a grid.
    if blocks > 65535 {
        return refuse("rows", format!("{blocks} blocks of them"), "at most 65535".into());
    }
    let chunk_k = Schedule::canonical_chunk(shape.size_k);
    // At most 8.
    let chunks = shape.size_k.div_ceil(chunk_k) as u32;
    let is_bf16 = u32::from(weight.dtype() == ScalarType::BFLOAT16);
    let is_moe = u32::from(routed.is_some());
    let routed_blocks = routed.map(|routed| routed.blocks);
    // x has rows of size_k codes and as many scales, y size_m rows of size_n; the weight's buffers are what the reference
    // packs for that shape; there are `chunks` chunks of chunk_k, at most 8. Blocks are room for this M and block size.
    let arguments = GemmA8Arguments {
        qweight: (&weight.qweight).into(),
        scales: (&weight.scales).into(),
        zeros: weight.zeros.as_ref().into(),
        bias: weight.bias.as_ref().into(),
        x: x.codes.into(),
        x_scales: x.scales.into(),
        y: y.into(),
        x_factor: weight.input_global_scale(),
        // `MarlinWeightA8` holds both sizes below 2^31, and M was checked above, with it top_k.
        size_m: size_m as u32,
        size_n: shape.size_n as u32,
        size_k: shape.size_k as u32,
        chunk_k: chunk_k as u32,
        sorted_token_ids: routed_blocks.map(|blocks| &blocks.sorted_token_ids).into(),
        expert_ids: routed_blocks.map(|blocks| &blocks.expert_ids).into(),
        num_tokens_post_padded: routed_blocks.map(|blocks| &blocks.num_tokens_post_padded).into(),
        topk_weights: routed.and_then(|routed| routed.topk_weights).into(),
        top_k: top_k as u32,
    };
    let grid = Grid {
        blocks: (shape.size_n as u32 / 32, blocks as u32, 1),
        threads: (chunks * 32, 1, 1),
        shared_bytes: rows.shared_bytes(form, chunks),
    };
    let kernel = if form.is_fp8 { &FP8_KERNEL } else { &INT8_KERNEL };
    kernel.launch(device, &parameters(is_bf16, form, is_moe, rows), grid, arguments)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_architecture_has_room_for_every_product() {
        for capability in [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)] {
            let arch = Arch::of_device(capability);
            for input in [ScalarType::INT8, ScalarType::FLOAT8_E4M3FN] {
                for form in Form::all(input) {
                    for size_m in [1, 8, 9, 17, 33, 64, 4096] {
                        let rows = Rows::choose(arch, size_m, form);
                        let context = format!("{arch} {form:?} {size_m}: {rows:?}");
                        assert!(rows.shared_bytes(form, 8) <= arch.shared_memory(), "{context}");
                        assert!(rows.stages >= 2 && rows.m_tiles.is_power_of_two(), "{context}");
                        // Blocks that alignment made for it are taken.
                        assert_eq!(Rows::of(arch, rows.m_tiles, form), rows, "{context}");
                    }
                }
            }
        }
    }
}
