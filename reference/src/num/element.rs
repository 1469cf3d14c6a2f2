//! Element types of arrays: `half`'s 16-bit floats, 8- and 4-bit floats, and the machine's numbers.
//!
//! `half`'s types are storage here. Its conversions are not used, because `half` 2.7.1 rounds f64 to
//! f16 twice; [`Float16`] rounds once. The narrower types are transparent wrappers of their bits, whose
//! constructors name the rounding and the overflow policy.
//!
//! ```
//! use marlinspike::num::element::{E4m3fn, Float, Float16, f16};
//!
//! assert_eq!(E4m3fn::from_f32_rne_saturating(1e9).to_f32(), 448.0);
//! assert!(E4m3fn::from_f32_rne_nan(1e9).to_f32().is_nan());
//! // 1 + 2^-11 + 2^-40 lies above the tie between 1 and the next f16.
//! let value = 1.0 + 2f64.powi(-11) + 2f64.powi(-40);
//! assert_eq!(<f16 as Float16>::from_f64_rne(value).to_bits(), 0x3c01);
//! ```

use std::borrow::Cow;
use std::fmt;

use bytemuck::{Pod, Zeroable};
pub use half::{bf16, f16};

use super::scalar::{self, ScalarType};
use crate::dtype::DType;

mod sealed {
    use super::Words;

    /// Implemented by the element types of this module alone.
    pub trait Sealed: Sized {
        /// The vector's words, without a copy.
        fn into_words(values: Vec<Self>) -> Words;
        /// The vector of these words, without a copy; the words again if their width differs.
        fn from_words(words: Words) -> Result<Vec<Self>, Words>;
    }
}
pub(crate) use sealed::Sealed;

/// Owned elements by their width, so that a vector of any element type moves in and out of a tensor
/// without a copy and stays aligned.
#[derive(Debug, Clone)]
pub enum Words {
    /// 1 byte.
    B8(Vec<u8>),
    /// 2 bytes.
    B16(Vec<u16>),
    /// 4 bytes.
    B32(Vec<u32>),
    /// 8 bytes.
    B64(Vec<u64>),
}

impl Words {
    pub(crate) fn bytes(&self) -> &[u8] {
        match self {
            Self::B8(v) => v,
            Self::B16(v) => bytemuck::cast_slice(v),
            Self::B32(v) => bytemuck::cast_slice(v),
            Self::B64(v) => bytemuck::cast_slice(v),
        }
    }

    /// The bytes; copied unless they are stored as bytes.
    pub(crate) fn into_bytes(self) -> Vec<u8> {
        match self {
            Self::B8(v) => v,
            other => other.bytes().to_vec(),
        }
    }
}

/// A type whose values tensors and arrays hold. Every bit pattern is a value.
pub trait Element: Pod + fmt::Debug + Send + Sync + Sealed {
    /// The stored type that is written for arrays of this type.
    const DTYPE: DType;

    /// Stored types that are read as this type. Files keep e8m0, and pairs of e2m1, as `U8` too.
    const READ_AS: &'static [DType] = &[Self::DTYPE];
}

/// A floating-point element type.
pub trait Float: Element {
    /// The number format.
    const TYPE: ScalarType;

    /// The value, exactly.
    fn to_f32(self) -> f32;

    /// The values of a slice; borrowed for f32.
    fn widen(values: &[Self]) -> Cow<'_, [f32]> {
        Cow::Owned(values.iter().map(|v| v.to_f32()).collect())
    }
}

/// [`struct@f16`] or [`bf16`]: the types of activations and outputs.
pub trait Float16: Float {
    /// The value of these bits.
    fn from_bits(bits: u16) -> Self;

    /// The bits.
    fn to_bits(self) -> u16;

    /// `value`, rounded once to nearest even; values too large become infinity.
    fn from_f32_rne(value: f32) -> Self;

    /// `value`, rounded once to nearest even; values too large become infinity.
    fn from_f64_rne(value: f64) -> Self;
}

macro_rules! elements {
    ($($ty:ty, $dtype:ident, $words:ident $word:ty $(, $also:ident)*;)*) => {$(
        impl Sealed for $ty {
            fn into_words(values: Vec<Self>) -> Words {
                Words::$words(bytemuck::allocation::cast_vec::<$ty, $word>(values))
            }
            fn from_words(words: Words) -> Result<Vec<Self>, Words> {
                match words {
                    Words::$words(v) => Ok(bytemuck::allocation::cast_vec::<$word, $ty>(v)),
                    other => Err(other),
                }
            }
        }

        impl Element for $ty {
            const DTYPE: DType = DType::$dtype;
            const READ_AS: &'static [DType] = &[DType::$dtype $(, DType::$also)*];
        }
    )*};
}

elements! {
    u8, U8, B8 u8;
    i8, I8, B8 u8;
    u16, U16, B16 u16;
    i16, I16, B16 u16;
    u32, U32, B32 u32;
    i32, I32, B32 u32;
    u64, U64, B64 u64;
    i64, I64, B64 u64;
    f32, F32, B32 u32;
    f64, F64, B64 u64;
    f16, F16, B16 u16;
    bf16, BF16, B16 u16;
    E4m3fn, F8E4M3, B8 u8;
    E4m3fnuz, U8, B8 u8, F8E4M3;
    E5m2, F8E5M2, B8 u8;
    E8m0, F8E8M0, B8 u8, U8;
    E2m1, U8, B8 u8;
    E2m1x2, U8, B8 u8;
}

impl Float for f32 {
    const TYPE: ScalarType = ScalarType::FLOAT32;

    fn to_f32(self) -> f32 {
        self
    }

    fn widen(values: &[Self]) -> Cow<'_, [f32]> {
        Cow::Borrowed(values)
    }
}

macro_rules! float16 {
    ($($ty:ident, $scalar:ident, $widen:ident, $from_f32:ident, $from_f64:ident;)*) => {$(
        impl Float for $ty {
            const TYPE: ScalarType = ScalarType::$scalar;

            fn to_f32(self) -> f32 {
                scalar::$widen($ty::to_bits(self))
            }
        }

        impl Float16 for $ty {
            fn from_bits(bits: u16) -> Self {
                $ty::from_bits(bits)
            }

            fn to_bits(self) -> u16 {
                $ty::to_bits(self)
            }

            fn from_f32_rne(value: f32) -> Self {
                $ty::from_bits(scalar::$from_f32(value))
            }

            fn from_f64_rne(value: f64) -> Self {
                $ty::from_bits(scalar::$from_f64(value))
            }
        }
    )*};
}

float16! {
    f16, FLOAT16, f16_to_f32, f32_to_f16_rne, f64_to_f16_rne;
    bf16, BFLOAT16, bf16_to_f32, f32_to_bf16_rne, f64_to_bf16_rne;
}

/// A transparent wrapper of a code, with its conversions. Two values are equal when their bits are.
macro_rules! code {
    ($(#[$doc:meta])* $name:ident, $to_f32:path, { $($(#[$from_doc:meta])* $from:ident = $encode:path;)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Default, PartialEq, Eq, Hash, Pod, Zeroable)]
        #[repr(transparent)]
        pub struct $name(u8);

        impl $name {
            /// The value of these bits.
            pub const fn from_bits(bits: u8) -> Self {
                Self(bits)
            }

            /// The bits.
            pub const fn to_bits(self) -> u8 {
                self.0
            }

            /// The value, exactly.
            pub fn to_f32(self) -> f32 {
                $to_f32(self.0)
            }

            $($(#[$from_doc])* pub fn $from(value: f32) -> Self {
                Self($encode(value))
            })*
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{} ({:#04x})", self.to_f32(), self.0)
            }
        }
    };
}

code! {
    /// 8-bit float without infinity; 0x7f and 0xff are NaN; largest 448.
    E4m3fn, scalar::e4m3fn_to_f32, {
        /// To nearest even, limited to ±448, infinities too.
        from_f32_rne_saturating = scalar::f32_to_e4m3fn_rne_saturating;
        /// To nearest even; above 464 NaN.
        from_f32_rne_nan = scalar::f32_to_e4m3fn_rne_nan;
        /// Toward zero, limited to ±448, infinities too.
        from_f32_rtz_saturating = scalar::f32_to_e4m3fn_rtz_saturating;
    }
}

code! {
    /// The FP8 type of MI300: half of e4m3fn's value for the same bits; 0x80 is the only NaN, there is
    /// no negative zero; largest 240. `F8_E4M3` tensors hold it after a conversion for that device.
    E4m3fnuz, scalar::e4m3fnuz_to_f32, {
        /// To nearest even, limited to ±240, infinities too; NaN becomes 0x80.
        from_f32_rne_saturating = scalar::f32_to_e4m3fnuz_rne_saturating_240;
        /// To nearest even, limited to ±224 as upstream limits it, infinities too; NaN becomes 0x80.
        from_f32_rne_saturating_224 = scalar::f32_to_e4m3fnuz_rne_saturating;
    }
}

code! {
    /// 8-bit float with infinity; largest 57344.
    E5m2, scalar::e5m2_to_f32, {
        /// To nearest even, limited to ±57344, infinities too.
        from_f32_rne_saturating = scalar::f32_to_e5m2_rne_saturating;
        /// To nearest even; from 61440 on infinity.
        from_f32_rne_infinity = scalar::f32_to_e5m2_rne_infinity;
        /// Toward zero, limited to ±57344, infinities too.
        from_f32_rtz_saturating = scalar::f32_to_e5m2_rtz_saturating;
    }
}

code! {
    /// Power of two 2^(bits − 127), without sign or zero; 0xff is NaN.
    E8m0, scalar::e8m0_to_f32, {
        /// The nearest power of two, limited to 2^127.
        from_f32_rne_saturating = scalar::f32_to_e8m0_rne_saturating;
        /// The largest power of two that is not larger; infinities become NaN.
        from_f32_floor = scalar::f32_to_e8m0_floor;
        /// The smallest power of two that is not smaller, limited to 2^127.
        from_f32_ceil_saturating = scalar::f32_to_e8m0_ceil_saturating;
    }
}

code! {
    /// 4-bit float in the low half of a byte: 0, ½, 1, 1½, 2, 3, 4, 6 and signs. The high half is
    /// ignored.
    E2m1, scalar::e2m1_to_f32, {
        /// To nearest even, limited to ±6; NaN becomes 6.
        from_f32_rne_saturating = scalar::f32_to_e2m1_rne_saturating;
    }
}

macro_rules! float8 {
    ($($name:ident $scalar:ident,)*) => {$(
        impl Float for $name {
            const TYPE: ScalarType = ScalarType::$scalar;

            fn to_f32(self) -> f32 {
                $name::to_f32(self)
            }
        }
    )*};
}

float8! { E4m3fn FLOAT8_E4M3FN, E5m2 FLOAT8_E5M2, E8m0 FLOAT8_E8M0FNU, E2m1 FLOAT4_E2M1F, }

/// Two e2m1 codes in a byte, the lower index in the low half: how files and kernels keep them.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, Pod, Zeroable)]
#[repr(transparent)]
pub struct E2m1x2(u8);

impl E2m1x2 {
    /// A pair, lower index first.
    pub const fn new(pair: [E2m1; 2]) -> Self {
        Self(pair[0].0 & 0xf | pair[1].0 << 4)
    }

    /// The pair of these bits.
    pub const fn from_bits(bits: u8) -> Self {
        Self(bits)
    }

    /// The bits.
    pub const fn to_bits(self) -> u8 {
        self.0
    }

    /// The two codes, lower index first.
    pub const fn pair(self) -> [E2m1; 2] {
        [E2m1(self.0 & 0xf), E2m1(self.0 >> 4)]
    }
}

impl fmt::Debug for E2m1x2 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [low, high] = self.pair();
        write!(f, "[{}, {}] ({:#04x})", low.to_f32(), high.to_f32(), self.0)
    }
}
