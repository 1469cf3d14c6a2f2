//! Limits and special values of a type.

use super::format::widen_to_f64;
use super::kind::{NanRepr, ScalarType};
use std::fmt;

/// The smallest or largest value of a type: upstream gives `int` for integers, `float` for floats.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Limit {
    /// Limit of an integer type, without its bias.
    Int(i64),
    /// Limit of a floating-point type; always finite.
    Float(f64),
}

impl Limit {
    /// The limit as f64, which holds every limit exactly.
    pub fn as_f64(self) -> f64 {
        match self {
            // At most 32 bits: exact.
            Limit::Int(i) => i as f64,
            Limit::Float(f) => f,
        }
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Limit::Int(i) => i.fmt(f),
            Limit::Float(x) => x.fmt(f),
        }
    }
}

impl ScalarType {
    /// Smallest and largest value of an integer type, without its bias.
    pub(super) fn integer_limits(self) -> (i64, i64) {
        let size = self.size_bits();
        let (min, max) = if self.signed {
            (-(1i64 << (size - 1)), (1i64 << (size - 1)) - 1)
        } else {
            (0, (1i64 << size) - 1)
        };
        (min - i64::from(self.bias), max - i64::from(self.bias))
    }

    /// The largest finite value (upstream's `max()`): 7 for `uint4b8`, 448 for `float8_e4m3fn`.
    ///
    /// 2^127 for `float8_e8m0fnu`, where upstream 0.21.0's computation fails.
    pub fn max(self) -> Limit {
        if self.is_floating_point() {
            Limit::Float(f64::from_bits(widen_to_f64(self.max_finite_code(), self)))
        } else {
            Limit::Int(self.integer_limits().1)
        }
    }

    /// The smallest finite value (upstream's `min()`): −8 for `uint4b8`, −448 for
    /// `float8_e4m3fn`.
    ///
    /// 2^−127 for the unsigned `float8_e8m0fnu`, which upstream refuses.
    pub fn min(self) -> Limit {
        match self.max() {
            Limit::Int(_) => Limit::Int(self.integer_limits().0),
            Limit::Float(max) if self.signed => Limit::Float(-max),
            Limit::Float(_) => Limit::Float(f64::from_bits(widen_to_f64(0, self))),
        }
    }

    /// Whether the type has a sign.
    pub const fn is_signed(self) -> bool {
        self.signed
    }

    /// Whether this is an integer type.
    pub const fn is_integer(self) -> bool {
        !self.is_floating_point()
    }

    /// Whether the type has a bias.
    pub const fn has_bias(self) -> bool {
        self.bias != 0
    }

    /// Whether this is a floating-point type with infinities. (Upstream's `has_infs()` also
    /// returns true for every integer type.)
    pub const fn has_infs(self) -> bool {
        self.is_floating_point() && !self.finite_values_only
    }

    /// Whether this is a floating-point type with NaN. (Upstream's Python `has_nans()` compares
    /// an enumeration with a number and returns true for every type.)
    pub const fn has_nans(self) -> bool {
        self.is_floating_point() && !matches!(self.nan_repr, NanRepr::None)
    }

    /// Whether this is a floating-point type with IEEE 754's infinities and NaN. (Upstream's C++
    /// class agrees; its Python class compares an enumeration with a number and returns false for
    /// every type.)
    pub const fn is_ieee_754(self) -> bool {
        self.has_infs() && matches!(self.nan_repr, NanRepr::Ieee754)
    }

    /// The name in upstream's scheme: `float<bits>_e<exponent>m<mantissa>` with `f` for
    /// finite-only and `n` for a NaN that is not IEEE 754's, `[u]int<bits>` with `b<bias>`.
    /// `bfloat16` is `float16_e8m7` here, `float8_e8m0fnu` is `float8_e8m0fn`.
    pub fn scheme_name(self) -> String {
        let size = self.size_bits();
        if self.is_integer() {
            let sign = if self.signed { "" } else { "u" };
            let bias = if self.has_bias() { format!("b{}", self.bias) } else { String::new() };
            return format!("{sign}int{size}{bias}");
        }
        let finite = if self.finite_values_only { "f" } else { "" };
        let nan = if self.has_nans() && !self.is_ieee_754() { "n" } else { "" };
        format!("float{size}_e{}m{}{finite}{nan}", self.exponent, self.mantissa)
    }
}
