//! Checks of arguments that several operations share.

use marlinspike::moe::layer::Layer;
use marlinspike::num::scalar::ScalarType;

use crate::{device::Device, error::AccelError, nvrtc::Parameter, operation::Row};

/// IS_BF16 for float16 or bfloat16.
pub(crate) fn is_bf16(
    row: &Row,
    what: &'static str,
    ty: ScalarType,
) -> Result<Parameter, AccelError> {
    match ty {
        ScalarType::FLOAT16 => Ok(("IS_BF16", 0)),
        ScalarType::BFLOAT16 => Ok(("IS_BF16", 1)),
        _ => Err(row.refuse(what, ty, "float16 or bfloat16")),
    }
}

/// Returns an error if any present buffer belongs to another device. `parts`: names, and whether each is memory of
/// `device`.
pub(crate) fn same_device(
    row: &Row,
    device: &Device,
    parts: &[(&'static str, bool)],
) -> Result<(), AccelError> {
    match parts.iter().find(|(_, is_on_device)| !is_on_device) {
        None => Ok(()),
        Some((what, _)) => {
            let (found, expected) = ("memory of another device", format!("{device:?}"));
            Err(row.refuse(what, found, expected))
        }
    }
}

/// A number that a kernel takes as 32 bits and that must not be zero.
pub(crate) fn positive(row: &Row, what: &'static str, found: usize) -> Result<u32, AccelError> {
    let refuse = || row.refuse(what, found, "from 1 to 2^31 - 1");
    i32::try_from(found).ok().filter(|&n| n > 0).map(i32::unsigned_abs).ok_or_else(refuse)
}

/// The number of entries: `top_k` for each token.
pub(crate) fn entries(row: &Row, tokens: usize, top_k: usize) -> Result<usize, AccelError> {
    let entries = tokens.saturating_mul(top_k);
    positive(row, "tokens times top_k", entries).map(|_| entries)
}

/// Returns an error for what [`Layer::validate`] refuses.
pub(crate) fn layer(row: &Row, layer: &Layer<'_>) -> Result<(), AccelError> {
    let refuse = |error| row.refuse("layer", error, "consistent parts");
    layer.validate().map_err(refuse)
}

/// The number of rows of `columns` elements in `len` elements: at least one, fewer than 2^31.
pub(crate) fn rows(
    row: &Row,
    what: &'static str,
    len: usize,
    columns: usize,
) -> Result<u32, AccelError> {
    let whole = columns > 0 && len > 0 && len.is_multiple_of(columns);
    let rows = whole.then(|| len / columns).and_then(|rows| i32::try_from(rows).ok());
    rows.map(i32::unsigned_abs).ok_or_else(|| {
        let expected = format!("1 to 2^31 - 1 rows of {columns}");
        row.refuse(what, format!("{len} elements"), expected)
    })
}

/// Returns an error unless a grid with a thread for each of `len` elements can be launched.
pub(crate) fn threads(row: &Row, what: &'static str, len: usize) -> Result<u64, AccelError> {
    // Far fewer than 2^31 - 1 blocks of 256 threads.
    let most = 1usize << 38;
    match u64::try_from(len) {
        Ok(elements) if len > 0 && len <= most => Ok(elements),
        _ => Err(row.refuse(what, format!("{len} elements"), "1 to 2^38")),
    }
}

/// Returns an error unless the second dimension of a grid of blocks of 256 threads covers `size` columns, `width` for each
/// thread.
pub(crate) fn columns(
    row: &Row,
    what: &'static str,
    size: usize,
    width: usize,
) -> Result<(), AccelError> {
    let most = 65535 * 256;
    if size / width > most {
        return Err(row.refuse(what, size, format!("at most {}", most * width)));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::sum::ROW;

    #[test]
    fn sizes_that_a_kernel_cannot_take_are_refused() {
        assert_eq!(positive(&ROW, "top_k", 7), Ok(7));
        assert!(positive(&ROW, "top_k", 0).is_err());
        assert!(positive(&ROW, "top_k", 1 << 31).is_err());
        assert_eq!(entries(&ROW, 3, 8), Ok(24));
        for (tokens, top_k) in [(0, 8), (3, 0), (1 << 30, 2), (usize::MAX, 2)] {
            assert!(entries(&ROW, tokens, top_k).is_err(), "{tokens} tokens to {top_k} experts");
        }
        assert_eq!(rows(&ROW, "x", 12, 4), Ok(3));
        for (len, columns) in [(0, 4), (12, 0), (13, 4), (1 << 32, 2)] {
            let error = rows(&ROW, "x", len, columns).unwrap_err();
            assert!(matches!(error, AccelError::Argument { what: "x", .. }), "{error:?}");
        }
        assert!(threads(&ROW, "x", 0).is_err() && threads(&ROW, "x", (1 << 38) + 1).is_err());
        assert!(is_bf16(&ROW, "dtype", ScalarType::INT8).is_err());
    }
}
