//! Scales that the kernel's type cannot hold.
//!
//! A scale is rounded to the 16-bit type of the model, moved by the exponent bias of the codes, or cut
//! to 8 bits. Where it becomes 0 or infinite on the way, its group or column is lost.

use marlinspike::layouts::marlin::{InputDtype, Prepared};
use marlinspike::num::scalar::ScalarType;
use marlinspike::weight::Weight;
use marlinspike::{Error, Result};

use crate::convert::settings::Settings;

/// Compares the numbers of zero and infinite scales before and after packing. A permutation of columns
/// changes neither.
///
/// # Errors
/// [`Error::Value`] with the number of scales that became infinite, or 0 unless the settings allow it.
pub(super) fn expect_kept(
    weight: &Weight<'_>,
    prepared: &Prepared,
    settings: &Settings,
) -> Result<()> {
    let dtype = settings.dtype;
    let is_real = weight.scales.ty() != ScalarType::FLOAT8_E8M0FNU;
    if !is_real {
        return Ok(());
    }
    let (ty, all) = (weight.scales.ty(), weight.scales.rows() * weight.scales.cols());
    let sizes = || weight.scales.iter_bits().map(|bits| ty.to_f64(bits).abs());
    let lost = |is: fn(u32, u32) -> bool, before: usize| {
        let exponent = if dtype == ScalarType::FLOAT16 { 0x7c00 } else { 0x7f80 };
        let after = prepared.scales.iter_bits().filter(|&bits| is(bits, exponent)).count();
        after.saturating_sub(before)
    };
    let wide = prepared.scales.ty().storage_bits() == 16;
    let refuse = |count: usize, what: &str, extreme: f64, expected: &str| {
        let found = format!(
            "{count} of {all} that become {what} in the kernel's {dtype}, such as {extreme:e}"
        );
        Err(Error::value(format!("{}: scales", weight.name), &[], found, expected))
    };
    // Processed for int8 activations, the scales are whole numbers.
    if wide && settings.input != InputDtype::Int8 {
        let count = lost(|bits, exponent| bits & exponent == exponent, 0);
        if count > 0 {
            let largest = sizes().fold(0.0, f64::max);
            return refuse(count, "infinite", largest, "scales in its range");
        }
    }
    let sign = if wide { |bits, _| bits & 0x7fff == 0 } else { |bits, _| bits & 0xff == 0 };
    let zero = lost(sign, sizes().filter(|&s| s == 0.0).count());
    if zero > 0 && !settings.allow_underflow {
        let least = sizes().filter(|&s| s > 0.0).fold(f64::INFINITY, f64::min);
        return refuse(zero, "0", least, "scales in its range, or --allow-underflow");
    }
    Ok(())
}
