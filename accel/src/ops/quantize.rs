//! Activations to 8 bits with one scale per token.

use marlinspike::num::element::E4m3fn;
use marlinspike::num::scalar::ScalarType;
use marlinspike::quantize::{Int8Rule, Quantized};

use super::check;
use crate::{
    device::Device,
    error::AccelError,
    launch::{Arguments, Grid, Kernel, Pointer, arguments},
    memory::Buffer,
    operation::{Law, Mutant, Needs, Row, lattice},
};

/// k that share a scale in [`per_token_group_quant_fp8`].
pub const FP8_GROUP: usize = 128;

/// Values from one group's scales to the next, in the device's memory: the number of rows, rounded up to whole 16-byte
/// pieces.
pub const fn fp8_scale_step(rows: usize) -> usize {
    rows.next_multiple_of(4)
}

/// Upstream: the function `per_token_quant_int8`.
pub(crate) static INT8: Row = Row {
    name: "per_token_quant_int8",
    source: "per_token_quant_int8",
    needs: Needs { compute_capability: (8, 0) },
    law: Law::EqualBits,
    variants: |_| Ok(lattice(&[("IS_BF16", &[0, 1]), ("IS_PRODUCT", &[0, 1])])),
    arguments: Int8Arguments::SIZES,
    mutants: &[Mutant::new(
        "a scale by division",
        "__fmul_rn(max, 1.0f / 127.0f)",
        "__fdiv_rn(max, 127.0f)",
    )],
};

/// Upstream: `dynamic_per_token_scaled_fp8_quant`.
pub(crate) static FP8: Row = Row {
    name: "per_token_quant_fp8",
    source: "per_token_quant_fp8",
    needs: Needs { compute_capability: (8, 0) },
    law: Law::EqualBits,
    variants: |_| Ok(lattice(&[("IS_BF16", &[0, 1])])),
    arguments: Fp8Arguments::SIZES,
    mutants: &[Mutant::new("saturation to NaN", ", 0x7eu);", ", 0x7fu);")],
};

/// Upstream: `per_token_group_fp8_quant`, for groups of 128.
pub(crate) static FP8_GROUPS: Row = Row {
    name: "per_token_group_quant_fp8",
    source: "per_token_group_quant_fp8",
    needs: Needs { compute_capability: (8, 0) },
    law: Law::EqualBits,
    variants: |_| Ok(lattice(&[("IS_BF16", &[0, 1]), ("IS_UE8M0", &[0, 1])])),
    arguments: Fp8GroupArguments::SIZES,
    mutants: &[Mutant::new(
        "a scale by the rounded reciprocal",
        "__fdiv_rn(fmaxf(largest, 1e-10f), 448.0f)",
        "__fmul_rn(fmaxf(largest, 1e-10f), 1.0f / 448.0f)",
    )],
};

static FP8_GROUP_KERNEL: Kernel<Fp8GroupArguments> = Kernel::new(&FP8_GROUPS);

arguments! {
    /// Arguments of `per_token_group_quant_fp8.cu`.
    Fp8GroupArguments {
        x: Pointer,
        codes: Pointer,
        scales: Pointer,
        groups: u32,
        size_k: u32,
        scale_step: u32,
    }
}

static INT8_KERNEL: Kernel<Int8Arguments> = Kernel::new(&INT8);
static FP8_KERNEL: Kernel<Fp8Arguments> = Kernel::new(&FP8);

arguments! {
    /// Arguments of `per_token_quant_int8.cu`.
    Int8Arguments {
        x: Pointer,
        codes: Pointer,
        scales: Pointer,
        size_k: u32,
    }
}

arguments! {
    /// Arguments of `per_token_quant_fp8.cu`.
    Fp8Arguments {
        x: Pointer,
        codes: Pointer,
        scales: Pointer,
        size_k: u32,
        upper: f32,
    }
}

/// Rows and their number of columns, of checked buffers: x and codes have rows of size_k elements, scales one for
/// each.
fn rows_of(
    row: &Row,
    device: &Device,
    x: &Buffer<u16>,
    size_k: usize,
    codes: &Buffer<u8>,
    scales: &Buffer<f32>,
) -> Result<(Grid, u32), AccelError> {
    let parts =
        [("x", x.is_on(device)), ("codes", codes.is_on(device)), ("scales", scales.is_on(device))];
    check::same_device(row, device, &parts)?;
    let rows = check::rows(row, "x", x.len(), size_k)?;
    if (codes.len(), scales.len()) != (x.len(), rows as usize) {
        let found = format!("{} codes, {} scales", codes.len(), scales.len());
        let expected = format!("[{rows}, {size_k}] and [{rows}]");
        return Err(row.refuse("codes", found, expected));
    }
    // A block of whole warps for each row.
    let grid = Grid::new((rows, 1, 1), (256, 1, 1));
    Ok((grid, check::positive(row, "size_k", size_k)?))
}

/// Codes and scales of `x` `[rows, size_k]` in the device's memory, bits of `dtype`, quantized to `input`:
/// int8 ([`Int8Rule::Quotient`]) or e4m3fn. A row with an infinity or a NaN has the scale NaN, and any
/// codes.
///
/// # Errors
/// [`AccelError::Argument`] for other types, and for buffers that do not fit each other or of another
/// device; those of preparing and launching a kernel.
pub(crate) fn quantize_on_device(
    device: &Device,
    x: &Buffer<u16>,
    dtype: ScalarType,
    input: ScalarType,
    size_k: usize,
    codes: &mut Buffer<u8>,
    scales: &mut Buffer<f32>,
) -> Result<(), AccelError> {
    if input == ScalarType::INT8 {
        return int8_on_device(device, x, dtype, size_k, Int8Rule::Quotient, codes, scales);
    }
    fp8_on_device(device, x, dtype, size_k, f32::INFINITY, codes, scales)
}

/// [`per_token_quant_fp8`] in the device's memory. A row with an infinity or a NaN has the scale NaN, and any codes.
///
/// # Errors
/// [`AccelError::Argument`] for another type, and for buffers that do not fit each other or of another device;
/// those of preparing and launching a kernel.
pub fn fp8_on_device(
    device: &Device,
    x: &Buffer<u16>,
    dtype: ScalarType,
    size_k: usize,
    upper: f32,
    codes: &mut Buffer<u8>,
    scales: &mut Buffer<f32>,
) -> Result<(), AccelError> {
    let is_bf16 = check::is_bf16(&FP8, "dtype", dtype)?;
    let (grid, size_k) = rows_of(&FP8, device, x, size_k, codes, scales)?;
    let (x, codes, scales) = (x.into(), codes.into(), scales.into());
    let arguments = Fp8Arguments { x, codes, scales, size_k, upper };
    FP8_KERNEL.launch(device, &[is_bf16], grid, arguments)
}

/// [`per_token_quant_int8`] in the device's memory, otherwise as [`fp8_on_device`].
///
/// # Errors
/// As [`fp8_on_device`].
pub fn int8_on_device(
    device: &Device,
    x: &Buffer<u16>,
    dtype: ScalarType,
    size_k: usize,
    rule: Int8Rule,
    codes: &mut Buffer<u8>,
    scales: &mut Buffer<f32>,
) -> Result<(), AccelError> {
    let is_bf16 = check::is_bf16(&INT8, "dtype", dtype)?;
    let (grid, size_k) = rows_of(&INT8, device, x, size_k, codes, scales)?;
    let is_product = u32::from(rule == Int8Rule::Product);
    let arguments =
        Int8Arguments { x: x.into(), codes: codes.into(), scales: scales.into(), size_k };
    INT8_KERNEL.launch(device, &[is_bf16, ("IS_PRODUCT", is_product)], grid, arguments)
}

/// Returns an error for a number that is not finite.
fn finite(row: &Row, x: &[u16], dtype: ScalarType, size_k: usize) -> Result<(), AccelError> {
    let exponent = if dtype == ScalarType::FLOAT16 { 0x7c00 } else { 0x7f80 };
    let broken = x.iter().position(|bits| bits & exponent == exponent);
    broken.map_or(Ok(()), |i| {
        let (found, at) = (dtype.to_f64(x[i].into()), [i / size_k, i % size_k]);
        Err(row.refuse("x", format!("{found} at {at:?}"), "finite numbers"))
    })
}

/// int8 codes and scales of `x` `[rows, size_k]`, bits of `dtype`: the bits of
/// [`per_token_int8`](marlinspike::quantize::per_token_int8).
///
/// # Errors
/// [`AccelError::Argument`] for another type, for x that is not whole rows of finite numbers; those
/// of preparing and running a kernel.
pub fn per_token_quant_int8(
    device: &Device,
    x: &[u16],
    dtype: ScalarType,
    size_k: usize,
    rule: Int8Rule,
) -> Result<Quantized<i8>, AccelError> {
    check::is_bf16(&INT8, "dtype", dtype)?;
    let rows = check::rows(&INT8, "x", x.len(), size_k)?;
    finite(&INT8, x, dtype, size_k)?;
    let (mut codes, mut scales) = (device.zeroed(x.len())?, device.zeroed(rows as usize)?);
    let x = device.upload(x)?;
    int8_on_device(device, &x, dtype, size_k, rule, &mut codes, &mut scales)?;
    let codes = device.download(&codes)?.into_iter().map(u8::cast_signed).collect();
    let scales = device.download(&scales)?;
    Quantized::from_rows(rows as usize, codes, scales)
        .map_err(|e| INT8.refuse("x", e, "whole rows"))
}

/// e4m3fn codes and scales of `x` `[rows, size_k]`, bits of `dtype`: the bits of
/// [`per_token_fp8`](marlinspike::quantize::per_token_fp8). `upper` bounds the magnitude that a
/// scale counts.
///
/// # Errors
/// As [`per_token_quant_int8`]; [`AccelError::Argument`] for a bound that is not positive.
pub fn per_token_quant_fp8(
    device: &Device,
    x: &[u16],
    dtype: ScalarType,
    size_k: usize,
    upper: Option<f32>,
) -> Result<Quantized<E4m3fn>, AccelError> {
    check::is_bf16(&FP8, "dtype", dtype)?;
    let rows = check::rows(&FP8, "x", x.len(), size_k)?;
    finite(&FP8, x, dtype, size_k)?;
    let upper = upper.unwrap_or(f32::INFINITY);
    if upper.is_nan() || upper <= 0.0 {
        return Err(FP8.refuse("upper", upper, "a positive number"));
    }
    let (mut codes, mut scales) = (device.zeroed(x.len())?, device.zeroed(rows as usize)?);
    let x = device.upload(x)?;
    fp8_on_device(device, &x, dtype, size_k, upper, &mut codes, &mut scales)?;
    let codes = device.download(&codes)?.into_iter().map(E4m3fn::from_bits).collect();
    let scales = device.download(&scales)?;
    Quantized::from_rows(rows as usize, codes, scales).map_err(|e| FP8.refuse("x", e, "whole rows"))
}

/// e4m3fn codes and scales of 1 x 128 values of `x` `[rows, size_k]` in the device's memory, bits of `dtype`, by
/// [`Fp8GroupRule::Quotient`](marlinspike::quantize::Fp8GroupRule::Quotient); with `ue8m0` scales are powers of two.
/// `scales` are `[size_k / 128, fp8_scale_step(rows)]`, as `fp8_gemm` takes
/// them. A group with an infinity or a NaN has the scale NaN, and any codes.
///
/// # Errors
/// [`AccelError::Argument`] for other types, for `size_k` that is not a multiple of 128, and for buffers that do not fit
/// each other or of another device; those of preparing and launching a kernel.
pub fn per_token_group_quant_fp8_on_device(
    device: &Device,
    x: &Buffer<u16>,
    dtype: ScalarType,
    size_k: usize,
    ue8m0: bool,
    codes: &mut Buffer<u8>,
    scales: &mut Buffer<f32>,
) -> Result<(), AccelError> {
    let row = &FP8_GROUPS;
    let is_bf16 = check::is_bf16(row, "dtype", dtype)?;
    let parts =
        [("x", x.is_on(device)), ("codes", codes.is_on(device)), ("scales", scales.is_on(device))];
    check::same_device(row, device, &parts)?;
    if !size_k.is_multiple_of(FP8_GROUP) {
        return Err(row.refuse("size_k", size_k, "a multiple of 128"));
    }
    let rows = check::rows(row, "x", x.len(), size_k)? as usize;
    let (groups, step) = (size_k / FP8_GROUP, fp8_scale_step(rows));
    if (codes.len(), scales.len()) != (x.len(), groups * step) {
        let found = format!("{} codes, {} scales", codes.len(), scales.len());
        let expected = format!("[{rows}, {size_k}] and [{groups}, {step}]");
        return Err(row.refuse("codes", found, expected));
    }
    let all = check::positive(row, "groups of x", rows * groups)?;
    let arguments = Fp8GroupArguments {
        x: x.into(),
        codes: codes.into(),
        scales: scales.into(),
        groups: all,
        size_k: check::positive(row, "size_k", size_k)?,
        scale_step: step as u32,
    };
    let grid = Grid::one_thread_each(u64::from(all) * 32);
    FP8_GROUP_KERNEL.launch(device, &[is_bf16, ("IS_UE8M0", ue8m0.into())], grid, arguments)
}

/// e4m3fn codes, and scales of 1 x 128 values, of `x` `[rows, size_k]`, bits of `dtype`: the bits of
/// [`per_group_fp8_with`](marlinspike::quantize::per_group_fp8_with) by its rule `Quotient`.
///
/// # Errors
/// As [`per_token_group_quant_fp8_on_device`]; [`AccelError::Argument`] also for x that is not finite.
pub fn per_token_group_quant_fp8(
    device: &Device,
    x: &[u16],
    dtype: ScalarType,
    size_k: usize,
    ue8m0: bool,
) -> Result<Quantized<E4m3fn>, AccelError> {
    let row = &FP8_GROUPS;
    check::is_bf16(row, "dtype", dtype)?;
    let rows = check::rows(row, "x", x.len(), size_k)? as usize;
    finite(row, x, dtype, size_k)?;
    let (groups, step) = (size_k / FP8_GROUP, fp8_scale_step(rows));
    let (mut codes, mut scales) = (device.zeroed(x.len())?, device.zeroed(groups * step)?);
    let x = device.upload(x)?;
    per_token_group_quant_fp8_on_device(device, &x, dtype, size_k, ue8m0, &mut codes, &mut scales)?;
    let codes = device.download(&codes)?.into_iter().map(E4m3fn::from_bits).collect();
    let by_groups = device.download(&scales)?;
    let of_row = |i: usize| by_groups[i % groups * step + i / groups];
    Quantized::from_rows(rows, codes, (0..rows * groups).map(of_row).collect())
        .map_err(|e| row.refuse("x", e, "whole rows"))
}
