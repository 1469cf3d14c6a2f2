//! Products with weights in Marlin's layout, by the reference's canonical schedule
//! ([`Schedule::canonical`]): the same bits as [`Schedule::execute`], whatever M is and however the
//! work is dealt out.

mod tiling;
mod weight;

use marlinspike::gemm::schedule::Schedule;
use marlinspike::scalar::ScalarType;

pub use tiling::Tiling;
pub use weight::MarlinWeight;

use crate::{
    device::Device,
    error::AccelError,
    memory::Buffer,
    nvrtc::{Arch, Define},
    raw,
    registry::{Law, Needs, Row, lattice},
};

/// Upstream: `marlin_gemm`.
pub(crate) static ROW: Row = Row {
    name: "marlin_gemm",
    source: "marlin_gemm",
    needs: Needs { compute_capability: (8, 0) },
    law: Law::EqualBits,
    variants,
};

/// Bits, zero points and groups in 64 k of every weight.
fn forms() -> Vec<Vec<Define>> {
    let mut forms = lattice(&[("BITS", &[4]), ("HAS_ZERO", &[0, 1]), ("GROUPS", &[0, 1, 2])]);
    forms.extend(lattice(&[("BITS", &[8]), ("HAS_ZERO", &[0]), ("GROUPS", &[0, 1, 2])]));
    forms
}

fn variants(arch: Arch) -> Vec<Vec<Define>> {
    let mut all = Vec::new();
    for ty in [ScalarType::FLOAT16, ScalarType::BFLOAT16] {
        for form in forms() {
            for (size_m, wide) in [8, 16, 32, 64].into_iter().flat_map(|m| [(m, false), (m, true)])
            {
                let defines = defines(ty, &form, Tiling::choose(arch, size_m, wide, &form));
                if !all.contains(&defines) {
                    all.push(defines);
                }
            }
        }
    }
    all
}

fn defines(ty: ScalarType, form: &[Define], tiling: Tiling) -> Vec<Define> {
    let mut defines = vec![("IS_BF16", u32::from(ty == ScalarType::BFLOAT16))];
    defines.extend_from_slice(form);
    defines.push(("IS_MOE", 0));
    defines.extend(tiling.defines());
    defines
}

/// A product that was checked: holding one proves that a launch with it stays inside its buffers.
#[derive(Debug)]
pub(crate) struct Gemm<'a> {
    pub(crate) x: &'a Buffer<u16>,
    pub(crate) weight: &'a MarlinWeight,
    pub(crate) y: &'a mut Buffer<u16>,
    pub(crate) size_m: u32,
    pub(crate) size_n: u32,
    pub(crate) size_k: u32,
    /// k of a chunk of the canonical schedule.
    pub(crate) chunk_k: u32,
    pub(crate) tiling: Tiling,
    /// Dynamic shared memory of a thread block.
    pub(crate) shared_bytes: u32,
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
    let arch = Arch::of_device(device.compute_capability());
    let wide = Tiling::is_wide(weight.shape().size_n, device.multiprocessors());
    marlin_gemm_tiled(device, x, weight, y, Tiling::choose(arch, size_m, wide, &weight.form()))
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
    let refuse = |what, found: String, expected: String| {
        Err(AccelError::argument(&ROW, what, found, expected))
    };
    let shape = weight.shape();
    for (what, ours) in
        [("x", x.is_on(device)), ("weight", weight.is_on(device)), ("y", y.is_on(device))]
    {
        if !ours {
            return refuse(what, "memory of another device".into(), format!("{device:?}"));
        }
    }
    if !x.len().is_multiple_of(shape.size_k) {
        return refuse("x", format!("{} elements", x.len()), format!("rows of {}", shape.size_k));
    }
    let size_m = x.len() / shape.size_k;
    if y.len() / shape.size_n != size_m || !y.len().is_multiple_of(shape.size_n) {
        let expected = format!("[{size_m}, {}]", shape.size_n);
        return refuse("y", format!("{} elements", y.len()), expected);
    }
    if size_m == 0 {
        return Ok(());
    }
    let rows = tiling.rows() as usize;
    // The third dimension of a grid.
    if size_m.div_ceil(rows) > 65535 {
        return refuse("rows of x", size_m.to_string(), format!("at most {}", 65535 * rows));
    }
    tiling.validate(device, shape.size_n)?;
    let form = weight.form();
    let shared_bytes = tiling.shared_bytes(&form);
    if shared_bytes > device.shared_memory() {
        let expected = format!("at most {} bytes of shared memory", device.shared_memory());
        return refuse("tiling", format!("{tiling:?}, {shared_bytes} bytes"), expected);
    }
    let function = device.function(&ROW, &defines(weight.dtype(), &form, tiling))?;
    let gemm = Gemm {
        x,
        weight,
        y,
        // `MarlinWeight` holds both below 2^31, and M is below 2^16 · 64.
        size_m: size_m as u32,
        size_n: shape.size_n as u32,
        size_k: shape.size_k as u32,
        chunk_k: Schedule::canonical_chunk(shape.size_k) as u32,
        tiling,
        shared_bytes,
    };
    raw::gemm::launch(device.stream(), &function, gemm)
        .map_err(|error| AccelError::Driver { call: ROW.name, reason: error.to_string() })
}
