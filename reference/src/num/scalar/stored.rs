//! Floating-point types as tensors store them.

use super::ScalarType;
use crate::dtype::DType;

/// The number format of a stored floating-point type; `None` for integers and f64.
pub fn float_type(dtype: DType) -> Option<ScalarType> {
    Some(match dtype {
        DType::F16 => ScalarType::FLOAT16,
        DType::BF16 => ScalarType::BFLOAT16,
        DType::F32 => ScalarType::FLOAT32,
        DType::F8E4M3 => ScalarType::FLOAT8_E4M3FN,
        DType::F8E5M2 => ScalarType::FLOAT8_E5M2,
        DType::F8E8M0 => ScalarType::FLOAT8_E8M0FNU,
        _ => return None,
    })
}

/// The stored type of a floating-point scalar type of whole bytes; `None` for integers.
pub(crate) fn stored_type(ty: ScalarType) -> Option<DType> {
    const TYPES: [DType; 6] =
        [DType::F16, DType::BF16, DType::F32, DType::F8E4M3, DType::F8E5M2, DType::F8E8M0];
    TYPES.into_iter().find(|&d| float_type(d) == Some(ty))
}
