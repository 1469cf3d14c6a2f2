//! Products with 8-bit activations and 4-bit weights in Marlin's layout for them, by the
//! reference's canonical schedule: the same bits as [`Schedule::execute`] for every M.

use marlinspike::num::scalar::ScalarType;
use marlinspike::products::schedule::{Cut, Schedule};

use marlinspike_kernels::constant;

use super::{
    check,
    gemm::{Form, MarlinWeight, Routed, checks},
};
use crate::{
    device::Device,
    error::AccelError,
    launch::{Arguments, Grid, Kernel, Pointer, arguments},
    memory::Buffer,
    nvrtc::{Arch, Parameter},
    operation::{Law, Mutant, Needs, Row},
    parameters::{Codes, Memo},
};

const SOURCE: &str = "marlin_gemm_a8";

/// Upstream: `marlin_gemm`, `moe_wna16_marlin_gemm` with int8 activations.
pub(crate) static INT8: Row = Row {
    name: "marlin_gemm, int8 activations",
    source: SOURCE,
    needs: Needs { compute_capability: (8, 0) },
    law: Law::EqualBits,
    variants: |arch| variants(arch, ScalarType::INT8),
    arguments: GemmA8Arguments::SIZES,
    mutants: &[
        Mutant::new(
            "the scale of the first row for all",
            "__fmul_rn(p.x_scales[p.x_row(entry)], p.x_factor)",
            "__fmul_rn(p.x_scales[0], p.x_factor)",
        ),
        Mutant::new(
            "a column's scale is its neighbour's, 8-bit activations",
            "scale[2 * j + i / 2], chunk[j][m][i]",
            "scale[2 * j], chunk[j][m][i]",
        ),
        Mutant::new(
            "router weight of the first row for all, 8-bit activations",
            "p.topk_weights[entry]",
            "p.topk_weights[0]",
        ),
        Mutant::new(
            "the scales of the first expert for all, 8-bit activations",
            "scales += expert * groups * size_n * SCALE_SIZE;",
            "scales += 0 * expert;",
        ),
    ],
};

/// Upstream: `marlin_gemm`, `moe_wna16_marlin_gemm` with e4m3 activations.
pub(crate) static FP8: Row = Row {
    name: "marlin_gemm, float8_e4m3fn activations",
    source: SOURCE,
    needs: Needs { compute_capability: (8, 9) },
    law: Law::EqualBits,
    variants: |arch| variants(arch, ScalarType::FLOAT8_E4M3FN),
    arguments: GemmA8Arguments::SIZES,
    mutants: &[Mutant::new(
        "a column's scale without the unit of e4m3 products",
        "IS_FP8 ? scale * PRODUCT_UNIT : scale",
        "scale",
    )],
};

pub(crate) fn row_of(input: ScalarType) -> &'static Row {
    if input == ScalarType::INT8 { &INT8 } else { &FP8 }
}

fn variants(arch: Arch, input: ScalarType) -> Result<Vec<Vec<Parameter>>, AccelError> {
    let mut all = Vec::new();
    for dtype in [ScalarType::FLOAT16, ScalarType::BFLOAT16] {
        let is_taken = |form: &Form| dtype == ScalarType::BFLOAT16 || form.codes != Codes::E2m1;
        for form in Form::all_bytes(input).into_iter().filter(is_taken) {
            for is_moe in [false, true] {
                for size_m in [8, 16, 32, 64] {
                    let tiling = TilingA8::choose(arch, size_m, form, input)?;
                    let parameters = parameters(dtype, input, form, is_moe, tiling);
                    if !all.contains(&parameters) {
                        all.push(parameters);
                    }
                }
            }
        }
    }
    Ok(all)
}

fn parameters(
    dtype: ScalarType,
    input: ScalarType,
    form: Form,
    is_moe: bool,
    tiling: TilingA8,
) -> Vec<Parameter> {
    let [codes, groups, m_tiles, stages] = tiling.parameters(form);
    let is_bf16 = ("IS_BF16", u32::from(dtype == ScalarType::BFLOAT16));
    let is_fp8 = ("IS_FP8", u32::from(input == ScalarType::FLOAT8_E4M3FN));
    vec![is_bf16, is_fp8, codes, groups, ("IS_MOE", is_moe.into()), m_tiles, stages]
}

/// How the work of a product is divided. No bit of a result depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct TilingA8 {
    /// Eights of rows that a thread block computes.
    m_tiles: u32,
    /// Stages of 128 k that a warp keeps in flight, with the one it works on.
    stages: u32,
}

/// Shared memory of a warp.
static WARP_BYTES: Memo<(TilingA8, Form), u32> = Memo::new();

impl TilingA8 {
    fn choose(
        arch: Arch,
        size_m: usize,
        form: Form,
        input: ScalarType,
    ) -> Result<Self, AccelError> {
        // Fragments of e4m3 take registers for their two halves: 64 rows do not fit.
        let most = if input == ScalarType::FLOAT8_E4M3FN { 4 } else { 8 };
        let m_tiles = (size_m.clamp(1, 64).div_ceil(8).next_power_of_two() as u32).min(most);
        Self::with_rows(arch, m_tiles, form)
    }

    /// `m_tiles` eights of rows, or fewer where they do not fit the device's shared memory. On an H200,
    /// over K x N of 4096 x 4096, 14336 x 4096 and 4096 x 28672, these stages were the fastest of 2, 3, 4
    /// and 6 or within a twentieth of it.
    fn with_rows(arch: Arch, m_tiles: u32, form: Form) -> Result<Self, AccelError> {
        let mut tiling = Self { m_tiles, stages: if m_tiles <= 2 { 3 } else { 2 } };
        let most_chunks = Schedule::CANONICAL_CHUNKS as u32;
        while tiling.shared_bytes(form, most_chunks)? > arch.shared_memory() {
            match tiling {
                Self { stages: 3.., .. } => tiling.stages -= 1,
                Self { m_tiles: 2.., .. } => tiling.m_tiles /= 2,
                _ => break,
            }
        }
        Ok(tiling)
    }

    /// Rows that a thread block computes.
    fn rows(self) -> usize {
        self.m_tiles as usize * 8
    }

    /// Dynamic shared memory of a thread block, with a warp for each chunk.
    fn shared_bytes(self, form: Form, chunks: u32) -> Result<u32, AccelError> {
        let evaluate = || constant(SOURCE, "WARP_BYTES", &self.parameters(form));
        Ok(WARP_BYTES.get((self, form), evaluate)?.saturating_mul(chunks))
    }

    fn parameters(self, form: Form) -> [Parameter; 4] {
        [
            ("CODES", form.codes as u32),
            ("GROUPS", form.groups),
            ("M_TILES", self.m_tiles),
            ("STAGES", self.stages),
        ]
    }
}

impl MarlinWeight {
    /// Rows of a block of one expert for `size_m` rows of each, with 8-bit activations.
    ///
    /// # Errors
    /// [`AccelError::Argument`] for a weight packed for 16-bit activations; [`AccelError::Constant`].
    pub fn block_size(&self, device: &Device, size_m: usize) -> Result<usize, AccelError> {
        let tiling = TilingA8::choose(device.arch(), size_m, self.form(), input_of(self)?)?;
        Ok(tiling.rows())
    }
}

/// Type of the activations that the weight is packed for.
fn input_of(weight: &MarlinWeight) -> Result<ScalarType, AccelError> {
    weight.input_dtype().ok_or_else(|| {
        let found = "packed for 16-bit activations";
        INT8.refuse("weight", found, "packed for int8 or float8_e4m3fn activations")
    })
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
    /// Arguments of `marlin_gemm_a8.cu`.
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
    weight: &MarlinWeight,
    y: &mut Buffer<u16>,
) -> Result<(), AccelError> {
    launch(device, x, weight, y, None)
}

/// Row t of y `[M · top_k, N]` = row t / top_k of x `[M, K]` · W of the expert that t is routed to,
/// plus bias, times router weight. Rows without an expert of this rank keep their contents.
///
/// # Errors
/// As [`marlin_gemm_a8`]; [`AccelError::Argument`] also for blocks of other sizes than
/// [`MarlinWeight::block_size`] gives for some M, and where router weights are not one for each row
/// of y.
pub fn moe_marlin_gemm_a8(
    device: &Device,
    x: RowsA8<'_>,
    weight: &MarlinWeight,
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
    weight: &MarlinWeight,
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

/// The tiling of blocks made for a product, and how many there may be.
fn routed_tiling(
    row: &Row,
    device: &Device,
    weight: &MarlinWeight,
    size_m: usize,
    routed: Routed<'_>,
) -> Result<(TilingA8, usize), AccelError> {
    let Routed { blocks, topk_weights, .. } = routed;
    let block_size = blocks.block_size();
    let tiling = TilingA8::with_rows(device.arch(), (block_size / 8) as u32, weight.form())?;
    if ![8, 16, 32, 64].contains(&block_size) || tiling.rows() != block_size {
        let expected = "blocks of `block_size` of some M";
        return Err(row.refuse("blocks", format!("{blocks:?}"), expected));
    }
    checks::blocks(row, blocks, block_size, size_m, weight.experts())?;
    checks::router_weights(row, "topk_weights", topk_weights, size_m)?;
    Ok((tiling, blocks.most_blocks()))
}

/// Checks a product, then launches it.
fn launch(
    device: &Device,
    x: RowsA8<'_>,
    weight: &MarlinWeight,
    y: &mut Buffer<u16>,
    routed: Option<Routed<'_>>,
) -> Result<(), AccelError> {
    let input = input_of(weight)?;
    let row = row_of(input);
    let refuse = |what, found: String, expected: String| Err(row.refuse(what, found, expected));
    let shape = weight.shape();
    on_device(row, device, x, weight, y, routed)?;
    let rows_of_x = x.scales.len();
    if Some(x.codes.len()) != rows_of_x.checked_mul(shape.size_k) {
        let expected = format!("[{rows_of_x}, {}], a row for each scale", shape.size_k);
        return refuse("x", format!("{} codes", x.codes.len()), expected);
    }
    let top_k = routed.map_or(1, |r| r.top_k);
    let size_m = checks::rows_of_y(row, rows_of_x, top_k, y.len(), shape.size_n)?;
    if size_m == 0 {
        return Ok(());
    }
    let (tiling, blocks) = match routed {
        Some(routed) => routed_tiling(row, device, weight, size_m, routed)?,
        None => {
            let tiling = TilingA8::choose(device.arch(), size_m, weight.form(), input)?;
            (tiling, size_m.div_ceil(tiling.rows()))
        }
    };
    // The second dimension of a grid.
    if blocks > 65535 {
        return refuse("rows", format!("{blocks} blocks of them"), "at most 65535".into());
    }
    let cut = Cut::version_1(shape.size_k);
    // At most 8.
    let chunks = cut.chunks() as u32;
    let routed_blocks = routed.map(|routed| routed.blocks);
    // x has rows of size_k codes and as many scales, y size_m rows of size_n; the weight's buffers are what the reference
    // packs for that shape; there are `chunks` chunks of the cut's length, at most 8. Blocks are room for this M and block size.
    let arguments = GemmA8Arguments {
        qweight: (&weight.qweight).into(),
        scales: (&weight.scales).into(),
        zeros: weight.zeros.as_ref().into(),
        bias: weight.bias.as_ref().into(),
        x: x.codes.into(),
        x_scales: x.scales.into(),
        y: y.into(),
        x_factor: weight.input_global_scale(),
        // `MarlinWeight` holds both sizes below 2^31, and M was checked above, with it top_k.
        size_m: size_m as u32,
        size_n: shape.size_n as u32,
        size_k: shape.size_k as u32,
        chunk_k: cut.chunk as u32,
        sorted_token_ids: routed_blocks.map(|blocks| &blocks.sorted_token_ids).into(),
        expert_ids: routed_blocks.map(|blocks| &blocks.expert_ids).into(),
        num_tokens_post_padded: routed_blocks.map(|blocks| &blocks.num_tokens_post_padded).into(),
        topk_weights: routed.and_then(|routed| routed.topk_weights).into(),
        top_k: top_k as u32,
    };
    let grid = Grid {
        blocks: (shape.size_n as u32 / 32, blocks as u32, 1),
        threads: (chunks * 32, 1, 1),
        shared_bytes: tiling.shared_bytes(weight.form(), chunks)?,
    };
    let kernel = if input == ScalarType::INT8 { &INT8_KERNEL } else { &FP8_KERNEL };
    let (dtype, is_moe) = (weight.dtype(), routed.is_some());
    kernel.launch(device, &parameters(dtype, input, weight.form(), is_moe, tiling), grid, arguments)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_architecture_has_room_for_every_product() {
        for capability in [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)] {
            let arch = Arch::of_device(capability);
            for input in [ScalarType::INT8, ScalarType::FLOAT8_E4M3FN] {
                for form in Form::all_bytes(input) {
                    for size_m in [1, 8, 9, 17, 33, 64, 4096] {
                        let tiling = TilingA8::choose(arch, size_m, form, input).unwrap();
                        let context = format!("{arch} {form:?} {size_m}: {tiling:?}");
                        let shared_bytes = tiling.shared_bytes(form, 8).unwrap();
                        assert!(shared_bytes <= arch.shared_memory(), "{context}");
                        let TilingA8 { m_tiles, stages } = tiling;
                        assert!(stages >= 2 && m_tiles.is_power_of_two(), "{context}");
                        // Blocks that alignment made for it are taken.
                        let of_blocks = TilingA8::with_rows(arch, m_tiles, form);
                        assert_eq!(of_blocks, Ok(tiling), "{context}");
                    }
                }
            }
        }
    }
}
