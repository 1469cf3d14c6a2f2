//! Helpers for configs and tensors of operations.

use crate::num::scalar::ScalarType;
use crate::num::tensor::DType;
use crate::ops::schema::{CaseError, Dim, Reader, TensorRule, rule};

/// e4m3 bits of either FP8 type; safetensors only has a name for e4m3fn.
pub(in crate::ops) const E4M3: &[DType] = &[DType::F8E4M3];

pub(in crate::ops) const U8: &[DType] = &[DType::U8];

pub(in crate::ops) const F32: &[DType] = &[DType::F32];

pub(in crate::ops) const I8: &[DType] = &[DType::I8];

pub(in crate::ops) const I32: &[DType] = &[DType::I32];

/// Exactly this size.
pub(in crate::ops) const fn is(size: usize) -> Dim {
    Dim::Is(size)
}

/// A required input.
pub(in crate::ops) fn input(name: &str, dtypes: &[DType], shape: &[Dim]) -> TensorRule {
    rule(format!("in.{name}"), dtypes, shape).required(true)
}

/// An optional input.
pub(in crate::ops) fn optional(name: &str, dtypes: &[DType], shape: &[Dim]) -> TensorRule {
    rule(format!("in.{name}"), dtypes, shape)
}

/// An output.
pub(in crate::ops) fn output(name: &str, dtypes: &[DType], shape: &[Dim]) -> TensorRule {
    rule(format!("out.{name}"), dtypes, shape)
}

/// float16 and bfloat16.
pub(in crate::ops) const HALF_TYPES: &[(&str, ScalarType)] =
    &[("float16", ScalarType::FLOAT16), ("bfloat16", ScalarType::BFLOAT16)];

/// Their types.
pub(in crate::ops) const HALF: [ScalarType; 2] = [ScalarType::FLOAT16, ScalarType::BFLOAT16];

/// Both values of a flag.
pub(in crate::ops) const FLAGS: [bool; 2] = [false, true];

/// The name of `value` in `table`.
pub(in crate::ops) fn name_of<T: PartialEq>(
    table: &[(&'static str, T)],
    value: &T,
) -> &'static str {
    table.iter().find(|(_, v)| v == value).map_or("", |(name, _)| name)
}

/// N of w13: gate and up, or up alone.
pub(in crate::ops) const fn w13_size_n(intermediate_size: usize, gated: bool) -> usize {
    if gated { intermediate_size.saturating_mul(2) } else { intermediate_size }
}

/// Reports a library error about sizes as an error of a config key.
pub(in crate::ops) fn refused(
    r: &Reader<'_>,
    key: &str,
    found: usize,
    error: &crate::Error,
) -> CaseError {
    r.refuse(key, found, format!("sizes that the layout takes: {error}"))
}

/// Checks that a size is a multiple of a unit.
pub(in crate::ops) fn whole(
    r: &Reader<'_>,
    key: &str,
    size: usize,
    by: usize,
) -> Result<(), CaseError> {
    if size.is_multiple_of(by) {
        return Ok(());
    }
    Err(r.refuse(key, size, format!("a multiple of {by}")))
}

/// The stored type of f16 and bf16.
pub(in crate::ops) fn half(dtype: ScalarType) -> DType {
    if dtype == ScalarType::FLOAT16 { DType::F16 } else { DType::BF16 }
}

/// Little-endian bytes of words.
pub(in crate::ops) fn bytes_of(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_le_bytes()).collect()
}
