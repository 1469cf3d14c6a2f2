//! Ids, names, limits and properties of the scalar types, compared with upstream.

use marlinspike::num::scalar::{Limit, Overflow, Rounding, ScalarType};

/// From vLLM 0.21.0's `scalar_type.py`, imported as it is: for every attribute of `scalar_types`
/// its `id`, `size_bits`, `min()`, `max()` and `has_infs()`. (`float16` and `bfloat16` are also
/// named `float16_e5m10` and `float16_e8m7` there.) e8m0's limits are not upstream's: `min()`
/// and `max()` raise there.
const UPSTREAM: &[(&str, i64, u32, Limit, Limit, bool)] = {
    use Limit::{Float as F, Int as I};
    &[
        ("int4", 1125899906908928, 4, I(-8), I(7), true),
        ("uint4", 1125899906843648, 4, I(0), I(15), true),
        ("int8", 1125899906909952, 8, I(-128), I(127), true),
        ("uint8", 1125899906844672, 8, I(0), I(255), true),
        ("float8_e4m3fn", 2814749767172868, 8, F(-448.0), F(448.0), false),
        ("float8_e5m2", 1125899906908677, 8, F(-57344.0), F(57344.0), true),
        (
            "float8_e8m0fnu",
            2814749767106568,
            8,
            F(5.877471754111438e-39),
            F(1.7014118346046923e38),
            false,
        ),
        ("float6_e3m2f", 562949953487363, 6, F(-28.0), F(28.0), false),
        ("float6_e2m3f", 562949953487618, 6, F(-7.5), F(7.5), false),
        ("float4_e2m1f", 562949953487106, 4, F(-6.0), F(6.0), false),
        ("uint2b2", 1125899907105280, 2, I(-2), I(1), true),
        ("uint3b4", 1125899907367680, 3, I(-4), I(3), true),
        ("uint4b8", 1125899907892224, 4, I(-8), I(7), true),
        ("uint8b128", 1125899923621888, 8, I(-128), I(127), true),
        (
            "bfloat16",
            1125899906909960,
            16,
            F(-3.3895313892515355e+38),
            F(3.3895313892515355e+38),
            true,
        ),
        ("float16", 1125899906910725, 16, F(-65504.0), F(65504.0), true),
    ]
};

#[test]
fn ids_sizes_and_limits_are_upstreams() {
    for &(name, id, size_bits, min, max, has_infs) in UPSTREAM {
        let kind = ScalarType::from_name(name).unwrap_or_else(|| panic!("no type {name}"));
        assert_eq!(kind.id(), id, "{name}");
        assert_eq!(ScalarType::from_id(id), Some(kind), "{name}");
        assert_eq!(kind.size_bits(), size_bits, "{name}");
        assert_eq!(kind.min(), min, "{name}");
        assert_eq!(kind.max(), max, "{name}");
        assert_eq!(kind.to_string(), name);
        // Upstream documents its result for floating-point types only.
        assert_eq!(kind.has_infs(), has_infs && kind.is_floating_point(), "{name}");
    }
    let others: Vec<_> = ScalarType::NAMED
        .iter()
        .filter(|(name, _)| UPSTREAM.iter().all(|row| row.0 != *name))
        .map(|(name, _)| *name)
        .collect();
    assert_eq!(others, ["float32"], "a named type without upstream's values");
}

#[test]
fn unknown_ids_and_names_are_none() {
    assert_eq!(ScalarType::from_name("float8"), None);
    assert_eq!(ScalarType::from_id(0), None);
    assert_eq!(ScalarType::from_id(-1), None);
}

/// The names that upstream's C++ class prints; the Python class adds an `n` to IEEE types, since
/// its `is_ieee_754()` compares an enumeration with a number.
#[test]
fn scheme_names() {
    for (name, scheme) in [
        ("int4", "int4"),
        ("uint8", "uint8"),
        ("uint2b2", "uint2b2"),
        ("uint4b8", "uint4b8"),
        ("uint8b128", "uint8b128"),
        ("float8_e4m3fn", "float8_e4m3fn"),
        ("float8_e5m2", "float8_e5m2"),
        ("float8_e8m0fnu", "float8_e8m0fn"),
        ("float6_e3m2f", "float6_e3m2f"),
        ("float4_e2m1f", "float4_e2m1f"),
        ("float16", "float16_e5m10"),
        ("bfloat16", "float16_e8m7"),
        ("float32", "float32_e8m23"),
    ] {
        assert_eq!(ScalarType::from_name(name).unwrap().scheme_name(), scheme);
    }
}

#[test]
fn special_values() {
    use ScalarType as T;
    // (type, infinities, NaN, IEEE 754)
    for (kind, infs, nans, ieee) in [
        (T::UINT4B8, false, false, false),
        (T::FLOAT16, true, true, true),
        (T::BFLOAT16, true, true, true),
        (T::FLOAT8_E5M2, true, true, true),
        (T::FLOAT8_E4M3FN, false, true, false),
        (T::FLOAT8_E8M0FNU, false, true, false),
        (T::FLOAT4_E2M1F, false, false, false),
    ] {
        assert_eq!((kind.has_infs(), kind.has_nans(), kind.is_ieee_754()), (infs, nans, ieee));
    }
    assert!(!T::FLOAT8_E8M0FNU.is_signed() && !T::UINT4.is_signed() && T::INT4.is_signed());
    assert!(T::UINT4B8.has_bias() && !T::UINT4.has_bias());
    assert!(T::UINT4.is_integer() && !T::FLOAT16.is_integer());
}

/// Decoding subtracts the bias, encoding adds it; codes are two's complement.
#[test]
fn integers_encode_and_decode() {
    for &(name, kind) in ScalarType::NAMED.iter().filter(|(_, t)| t.is_integer()) {
        let size = kind.size_bits();
        let (Limit::Int(min), Limit::Int(max)) = (kind.min(), kind.max()) else {
            panic!("{name}: an integer type with float limits");
        };
        assert_eq!(max - min, (1 << size) - 1, "{name}");
        for value in min..=max {
            let code = ((value + i64::from(kind.bias())) as u32) & ((1 << size) - 1);
            assert_eq!(kind.to_f64(code), value as f64, "{name} {code}");
            assert_eq!(kind.encode_rne(value as f64), code, "{name} {value}");
        }
        for overflow in [Overflow::Infinity, Overflow::Nan, Overflow::Saturate] {
            let encode = |value| kind.encode(value, Rounding::NearestEven, overflow);
            let (low, high) = (encode(min as f64), encode(max as f64));
            for huge in [1e9, 1e300, f64::INFINITY] {
                assert_eq!((encode(-huge), encode(huge)), (low, high), "{name} {huge}");
            }
            assert_eq!(encode(f64::NAN), encode(0.0), "{name}");
        }
    }
}

#[test]
fn integers_round() {
    use Rounding::{AwayFromZero, NearestAway, NearestEven, TowardZero};
    for (value, even, away, zero, up) in [
        (2.5, 2, 3, 2, 3),
        (-2.5, -2, -3, -2, -3),
        (3.5, 4, 4, 3, 4),
        (-0.5, 0, -1, 0, -1),
        (2.25, 2, 2, 2, 3),
        (-2.75, -3, -3, -2, -3),
    ] {
        for (rounding, expected) in
            [(NearestEven, even), (NearestAway, away), (TowardZero, zero), (AwayFromZero, up)]
        {
            let code = ScalarType::UINT4B8.encode(value, rounding, Overflow::Saturate);
            assert_eq!(code as i32 - 8, expected, "{value} {rounding:?}");
        }
    }
}
