//! [`ScalarType`]: a number format by its exponent, mantissa, sign, bias and NaN encoding.

use std::fmt;

/// How a floating-point type encodes NaN.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum NanRepr {
    /// There is no NaN.
    None = 0,
    /// Exponent all ones, mantissa not zero.
    Ieee754 = 1,
    /// Exponent and mantissa all ones.
    ExtdRangeMaxMin = 2,
}

/// A number format of at most 32 bits. Integers have no exponent bits. A bias is added to a value
/// before it is stored (`uint4b8` stores −8..=7 as 0..=15).
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct ScalarType {
    pub(super) exponent: u8,
    pub(super) mantissa: u8,
    pub(super) signed: bool,
    pub(super) bias: i32,
    pub(super) finite_values_only: bool,
    pub(super) nan_repr: NanRepr,
}

const fn int(size_bits: u8) -> ScalarType {
    ScalarType {
        exponent: 0,
        mantissa: size_bits - 1,
        signed: true,
        bias: 0,
        finite_values_only: false,
        nan_repr: NanRepr::Ieee754,
    }
}

const fn uint(size_bits: u8, bias: i32) -> ScalarType {
    ScalarType { mantissa: size_bits, signed: false, bias, ..int(size_bits) }
}

const fn ieee(exponent: u8, mantissa: u8) -> ScalarType {
    ScalarType { exponent, mantissa, ..int(1) }
}

const fn finite(exponent: u8, mantissa: u8, nan_repr: NanRepr) -> ScalarType {
    ScalarType { finite_values_only: true, nan_repr, ..ieee(exponent, mantissa) }
}

impl ScalarType {
    /// Signed 4-bit integer, two's complement.
    pub const INT4: Self = int(4);
    /// Unsigned 4-bit integer with run-time zero points (AWQ).
    pub const UINT4: Self = uint(4, 0);
    /// Signed byte.
    pub const INT8: Self = int(8);
    /// Unsigned byte.
    pub const UINT8: Self = uint(8, 0);
    /// Symmetric 2-bit: stored = value + 2.
    pub const UINT2B2: Self = uint(2, 2);
    /// Symmetric 3-bit: stored = value + 4.
    pub const UINT3B4: Self = uint(3, 4);
    /// GPTQ symmetric 4-bit: stored = value + 8.
    pub const UINT4B8: Self = uint(4, 8);
    /// GPTQ symmetric 8-bit: stored = value + 128.
    pub const UINT8B128: Self = uint(8, 128);
    /// 8-bit float without infinity; 0x7F and 0xFF are NaN; largest 448.
    pub const FLOAT8_E4M3FN: Self = finite(4, 3, NanRepr::ExtdRangeMaxMin);
    /// 8-bit float with infinity; largest 57344.
    pub const FLOAT8_E5M2: Self = ieee(5, 2);
    /// Power of two 2^(b − 127) without sign or zero; 0xFF is NaN.
    pub const FLOAT8_E8M0FNU: Self =
        ScalarType { signed: false, ..finite(8, 0, NanRepr::ExtdRangeMaxMin) };
    /// 6-bit float, no infinity, no NaN.
    pub const FLOAT6_E3M2F: Self = finite(3, 2, NanRepr::None);
    /// 6-bit float, no infinity, no NaN.
    pub const FLOAT6_E2M3F: Self = finite(2, 3, NanRepr::None);
    /// 4-bit float: 0, ½, 1, 1½, 2, 3, 4, 6 and signs.
    pub const FLOAT4_E2M1F: Self = finite(2, 1, NanRepr::None);
    /// IEEE half.
    pub const FLOAT16: Self = ieee(5, 10);
    /// bfloat16.
    pub const BFLOAT16: Self = ieee(8, 7);
    /// IEEE single. Not among upstream's named types; its id follows the same rule.
    pub const FLOAT32: Self = ieee(8, 23);

    /// Every named type with its name.
    pub const NAMED: &'static [(&'static str, Self)] = &[
        ("int4", Self::INT4),
        ("uint4", Self::UINT4),
        ("int8", Self::INT8),
        ("uint8", Self::UINT8),
        ("uint2b2", Self::UINT2B2),
        ("uint3b4", Self::UINT3B4),
        ("uint4b8", Self::UINT4B8),
        ("uint8b128", Self::UINT8B128),
        ("float8_e4m3fn", Self::FLOAT8_E4M3FN),
        ("float8_e5m2", Self::FLOAT8_E5M2),
        ("float8_e8m0fnu", Self::FLOAT8_E8M0FNU),
        ("float6_e3m2f", Self::FLOAT6_E3M2F),
        ("float6_e2m3f", Self::FLOAT6_E2M3F),
        ("float4_e2m1f", Self::FLOAT4_E2M1F),
        ("float16", Self::FLOAT16),
        ("bfloat16", Self::BFLOAT16),
        ("float32", Self::FLOAT32),
    ];

    /// The type of this name (`uint4b8`, `bfloat16`, ...).
    pub fn from_name(name: &str) -> Option<Self> {
        Self::NAMED.iter().find(|(n, _)| *n == name).map(|&(_, t)| t)
    }

    /// The name, as configurations and case files write it.
    pub fn name(self) -> &'static str {
        Self::NAMED.iter().find(|&&(_, t)| t == self).map_or("unnamed", |&(n, _)| n)
    }

    /// Bits of one value, the sign included.
    pub const fn size_bits(self) -> u32 {
        self.exponent as u32 + self.mantissa as u32 + self.signed as u32
    }

    /// Bits of one stored value: 8, 16 or 32.
    pub const fn storage_bits(self) -> u32 {
        match self.size_bits() {
            0..=8 => 8,
            9..=16 => 16,
            _ => 32,
        }
    }

    /// Upstream's id: the fields, from bit 0: exponent (8 bits), mantissa (8), signed (1),
    /// bias (32), finite-values-only (1), NaN encoding (8).
    pub const fn id(self) -> i64 {
        self.exponent as i64
            | (self.mantissa as i64) << 8
            | (self.signed as i64) << 16
            | (self.bias as u32 as i64) << 17
            | (self.finite_values_only as i64) << 49
            | (self.nan_repr as i64) << 50
    }

    /// The named type with this id.
    pub fn from_id(id: i64) -> Option<Self> {
        Self::NAMED.iter().find(|(_, t)| t.id() == id).map(|&(_, t)| t)
    }

    /// Whether this is a floating-point type.
    pub const fn is_floating_point(self) -> bool {
        self.exponent != 0
    }

    /// The number that is added to a value before it is stored.
    pub const fn bias(self) -> i32 {
        self.bias
    }
}

impl fmt::Display for ScalarType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Debug for ScalarType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl ScalarType {
    /// Distance between two values of a signed type, in steps of its bit patterns. Both zeros are one
    /// value. A number and a NaN are infinitely far apart; two NaN have distance 0.
    pub fn steps(self, a: u32, b: u32) -> f64 {
        let ordinal = |bits: u32| {
            let sign = 1u32 << (self.size_bits() - 1);
            let magnitude = i64::from(bits & (sign - 1));
            if bits & sign != 0 { -magnitude } else { magnitude }
        };
        match (self.to_f64(a).is_nan(), self.to_f64(b).is_nan()) {
            (true, true) => 0.0,
            (false, false) => (ordinal(a) - ordinal(b)).abs() as f64,
            _ => f64::INFINITY,
        }
    }

    /// The exact value of the low [`Self::size_bits`] bits of `bits`; NaN and infinities are f64's.
    pub fn to_f64(self, bits: u32) -> f64 {
        let size = self.size_bits();
        let bits = if size == 32 { bits } else { bits & ((1 << size) - 1) };
        if !self.is_floating_point() {
            let raw = if self.signed {
                ((bits << (32 - size)) as i32) >> (32 - size)
            } else {
                bits as i32
            };
            return f64::from(raw - self.bias);
        }
        let (e_bits, m_bits) = (u32::from(self.exponent), u32::from(self.mantissa));
        let negative = self.signed && bits >> (e_bits + m_bits) != 0;
        let field = bits >> m_bits & ((1 << e_bits) - 1);
        let mantissa = bits & ((1 << m_bits) - 1);
        let top = field == (1 << e_bits) - 1;
        let nan = match self.nan_repr {
            NanRepr::None => false,
            NanRepr::Ieee754 => top && mantissa != 0,
            NanRepr::ExtdRangeMaxMin => top && mantissa == (1 << m_bits) - 1,
        };
        let e_bias = (1i32 << (e_bits - 1)) - 1;
        let magnitude = if nan {
            f64::NAN
        } else if top && !self.finite_values_only {
            f64::INFINITY
        } else if m_bits == 0 {
            // e8m0: every code is a power of two; it has neither zero nor subnormals.
            exp2(field as i32 - e_bias)
        } else if field == 0 {
            f64::from(mantissa) * exp2(1 - e_bias - m_bits as i32)
        } else {
            f64::from(mantissa | 1 << m_bits) * exp2(field as i32 - e_bias - m_bits as i32)
        };
        if negative { -magnitude } else { magnitude }
    }
}

/// 2^e for exponents in f64's normal range, exactly.
const fn exp2(e: i32) -> f64 {
    assert!(e >= -1022 && e <= 1023);
    f64::from_bits(((e + 1023) as u64) << 52)
}
