//! Products with weights in Marlin's layout, by the reference's canonical schedule
//! ([`Schedule::canonical`]): the same bits as [`Schedule::execute`], whatever M is and however the
//! work is dealt out.

mod kind;
mod tiling;
mod weight;

use marlinspike::gemm::schedule::Schedule;
use marlinspike::scalar::ScalarType;

use kind::Kind;
pub use tiling::Tiling;
pub use weight::MarlinWeight;

use crate::{
    device::Device,
    error::AccelError,
    memory::Buffer,
    nvrtc::{Arch, Define},
    ops::align::DeviceBlocks,
    raw,
    registry::{Law, Needs, Row},
};

/// Upstream: `marlin_gemm`.
pub(crate) static ROW: Row = Row {
    name: "marlin_gemm",
    source: "marlin_gemm",
    needs: Needs { compute_capability: (8, 0) },
    law: Law::EqualBits,
    variants: |arch| variants(arch, 0),
};

/// Upstream: `moe_wna16_marlin_gemm`.
pub(crate) static MOE: Row = Row {
    name: "moe_wna16_marlin_gemm",
    source: "marlin_gemm",
    needs: Needs { compute_capability: (8, 0) },
    law: Law::EqualBits,
    variants: |arch| variants(arch, 1),
};

fn variants(arch: Arch, is_moe: u32) -> Vec<Vec<Define>> {
    let mut all = Vec::new();
    for ty in [ScalarType::FLOAT16, ScalarType::BFLOAT16] {
        for form in Kind::forms(ty) {
            for size_m in [8, 16, 32, 64, 128] {
                for chunks in 1..=Schedule::CANONICAL_CHUNKS as u32 {
                    for wide in [false, true] {
                        let tiling = Tiling::choose(arch, size_m, chunks, wide, &form);
                        let defines = defines(ty, &form, is_moe, tiling);
                        if !all.contains(&defines) {
                            all.push(defines);
                        }
                    }
                }
            }
        }
    }
    all
}

fn defines(ty: ScalarType, form: &[Define], is_moe: u32, tiling: Tiling) -> Vec<Define> {
    let mut defines = vec![("IS_BF16", u32::from(ty == ScalarType::BFLOAT16))];
    defines.extend_from_slice(form);
    defines.push(("IS_MOE", is_moe));
    defines.extend(tiling.defines());
    defines
}

/// A product that was checked: holding one proves that a launch with it stays inside its buffers.
#[derive(Debug)]
pub(crate) struct Gemm<'a> {
    pub(crate) x: &'a Buffer<u16>,
    pub(crate) weight: &'a MarlinWeight,
    pub(crate) y: &'a mut Buffer<u16>,
    /// Rows of y.
    pub(crate) size_m: u32,
    pub(crate) size_n: u32,
    pub(crate) size_k: u32,
    /// k of a chunk of the canonical schedule.
    pub(crate) chunk_k: u32,
    pub(crate) tiling: Tiling,
    /// Dynamic shared memory of a thread block.
    pub(crate) shared_bytes: u32,
    /// Of a product with experts.
    pub(crate) routed: Option<Routed<'a>>,
}

/// Which rows go to which expert.
#[derive(Debug, Clone, Copy)]
pub struct Routed<'a> {
    /// Tokens in blocks of one expert, made for [`Tiling::rows`] of the product's tiling.
    pub blocks: &'a DeviceBlocks,
    /// Row t of y is made of row t / `top_k` of x.
    pub top_k: usize,
    /// Multiplies row t of y before it is rounded.
    pub topk_weights: Option<&'a Buffer<f32>>,
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
    let tiling = weight.tiling(device, x.len() / weight.shape().size_k);
    marlin_gemm_tiled(device, x, weight, y, tiling)
}

/// [`marlin_gemm`] with a division of work that the caller names: the same bits, at another speed.
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
    launch(device, x, weight, y, tiling, None)
}

/// Row t of y `[M · top_k, N]` = row t / top_k of x `[M, K]` · W of the expert that t is routed to,
/// plus bias, times router weight. Rows without an expert of this rank stay as they are.
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
    launch(device, x, weight, y, tiling, Some(routed))
}

/// Checks a product, then launches it.
fn launch(
    device: &Device,
    x: &Buffer<u16>,
    weight: &MarlinWeight,
    y: &mut Buffer<u16>,
    tiling: Tiling,
    routed: Option<Routed<'_>>,
) -> Result<(), AccelError> {
    let row = if routed.is_some() { &MOE } else { &ROW };
    let refuse = |what, found: String, expected: String| {
        Err(AccelError::argument(row, what, found, expected))
    };
    let shape = weight.shape();
    let routed_here = |r: Routed<'_>| {
        r.blocks.is_on(device) && r.topk_weights.is_none_or(|weights| weights.is_on(device))
    };
    for (what, ours) in [
        ("x", x.is_on(device)),
        ("weight", weight.is_on(device)),
        ("y", y.is_on(device)),
        ("routing", routed.is_none_or(routed_here)),
    ] {
        if !ours {
            return refuse(what, "memory of another device".into(), format!("{device:?}"));
        }
    }
    if !x.len().is_multiple_of(shape.size_k) {
        return refuse("x", format!("{} elements", x.len()), format!("rows of {}", shape.size_k));
    }
    let top_k = routed.map_or(1, |r| r.top_k);
    let rows_of_x = x.len() / shape.size_k;
    let size_m = rows_of_x.checked_mul(top_k).filter(|&m| i32::try_from(m).is_ok());
    let Some(size_m) = size_m.filter(|_| top_k > 0) else {
        return refuse("top_k", top_k.to_string(), format!("1 or more for {rows_of_x} rows"));
    };
    if y.len() / shape.size_n != size_m || !y.len().is_multiple_of(shape.size_n) {
        let expected = format!("[{size_m}, {}]", shape.size_n);
        return refuse("y", format!("{} elements", y.len()), expected);
    }
    if size_m == 0 {
        return Ok(());
    }
    tiling.validate(device, shape)?;
    let mut blocks = size_m.div_ceil(tiling.rows());
    if let Some(Routed { blocks: of, topk_weights, .. }) = routed {
        let fits = (of.block_size(), of.entries()) == (tiling.rows(), size_m)
            && of.experts() <= weight.experts();
        if !fits {
            let experts = weight.experts();
            let expected =
                format!("{size_m} entries in blocks of {} for {experts} experts", tiling.rows());
            return refuse("blocks", format!("{of:?}"), expected);
        }
        if let Some(weights) = topk_weights.filter(|weights| weights.len() != size_m) {
            return refuse("topk_weights", weights.len().to_string(), size_m.to_string());
        }
        blocks = of.most_blocks();
    }
    // The third dimension of a grid.
    if blocks > 65535 {
        return refuse("rows", format!("{blocks} blocks of them"), "at most 65535".into());
    }
    let form = weight.form();
    let shared_bytes = tiling.shared_bytes(&form);
    if shared_bytes > device.shared_memory() {
        let expected = format!("at most {} bytes of shared memory", device.shared_memory());
        return refuse("tiling", format!("{tiling:?}, {shared_bytes} bytes"), expected);
    }
    let is_moe = u32::from(routed.is_some());
    let function = device.function(row, &defines(weight.dtype(), &form, is_moe, tiling))?;
    let gemm = Gemm {
        x,
        weight,
        y,
        // `MarlinWeight` holds both sizes below 2^31, and M was checked above.
        size_m: size_m as u32,
        size_n: shape.size_n as u32,
        size_k: shape.size_k as u32,
        chunk_k: Schedule::canonical_chunk(shape.size_k) as u32,
        tiling,
        shared_bytes,
        routed,
    };
    raw::gemm::launch(device.stream(), &function, blocks as u32, gemm)
        .map_err(|error| AccelError::Driver { call: row.name, reason: error.to_string() })
}
