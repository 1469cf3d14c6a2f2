"""Numbers to codes and back, against fractions and sorted tables made here."""

from fractions import Fraction

import numpy as np
import pytest

import marlinspike

# Exponent bits, mantissa bits, largest finite code.
FORMATS = {
    "float16": (5, 10, 0x7BFF),
    "bfloat16": (8, 7, 0x7F7F),
    "float8_e4m3fn": (4, 3, 0x7E),
    "float8_e5m2": (5, 2, 0x7B),
    "float6_e3m2f": (3, 2, 0x1F),
    "float6_e2m3f": (2, 3, 0x1F),
    "float4_e2m1f": (2, 1, 0x7),
}


def value(name, code):
    """A finite code's value without sign."""
    exponent_bits, mantissa_bits, _ = FORMATS[name]
    field, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    significand = mantissa + (1 << mantissa_bits if field else 0)
    power = (field or 1) - ((1 << (exponent_bits - 1)) - 1) - mantissa_bits
    return Fraction(significand) * Fraction(2) ** power


def codes_of(array):
    return np.asarray(array).view(f"uint{8 * np.asarray(array).dtype.itemsize}").astype(int)


@pytest.mark.parametrize("name", FORMATS)
def test_encode_and_decode(rng, name):
    exponent_bits, mantissa_bits, largest = FORMATS[name]
    step = max(1, largest // 200)
    sign = 1 << (exponent_bits + mantissa_bits)
    for code in range(0, largest, step):
        low, high = value(name, code), value(name, code + 1)
        tie = float((low + high) / 2)
        even = code if code % 2 == 0 else code + 1
        inputs = [float(low), np.nextafter(tie, 0), tie, np.nextafter(tie, np.inf), float(high)]
        rounded = {
            "nearest_even": [code, code, even, code + 1, code + 1],
            "nearest_away": [code, code, code + 1, code + 1, code + 1],
            "toward_zero": [code, code, code, code, code + 1],
            "away_from_zero": [code, code + 1, code + 1, code + 1, code + 1],
        }
        for rounding, expected in rounded.items():
            made = codes_of(marlinspike.encode(np.array(inputs), name, rounding))
            assert made.tolist() == expected, (code, rounding)
            made = codes_of(marlinspike.encode(-np.array(inputs), name, rounding))
            assert made.tolist() == [c | sign for c in expected], (code, rounding)
    all_codes = np.arange(largest + 1).astype(np.uint16 if largest > 255 else np.uint8)
    exact = [float(value(name, int(code))) for code in all_codes]
    assert np.array_equal(marlinspike.decode(all_codes, name), exact)
    top = np.array([exact[-1] * 2, np.inf])
    assert codes_of(marlinspike.encode(top, name, overflow="saturate")).tolist() == [largest] * 2


def test_special_numbers():
    huge = np.array([1e9, -np.inf, np.nan])
    assert codes_of(marlinspike.encode(huge, "float8_e5m2")).tolist() == [0x7C, 0xFC, 0x7F]
    assert codes_of(marlinspike.encode(huge, "float8_e4m3fn")).tolist() == [0x7F, 0xFF, 0x7F]
    assert codes_of(marlinspike.encode(huge, "float8_e4m3fn", overflow="nan")).tolist() == [0x7F, 0xFF, 0x7F]
    assert np.isnan(marlinspike.decode(np.array([0x7F, 0xFF], np.uint8), "float8_e4m3fn")).all()
    powers = np.array([2.0**-127, 1.49 * 2.0**-127, 1.5 * 2.0**-127, 3.0, 2.9])
    assert codes_of(marlinspike.encode(powers, "float8_e8m0fnu")).tolist() == [0, 0, 1, 129, 128]
    assert marlinspike.decode(np.array([0, 127], np.uint8), "float8_e8m0fnu").tolist() == [2.0**-127, 1]


def test_integers_shapes_and_types():
    numbers = np.array([[-9.0, -1.5], [2.5, 99.0]])
    assert (marlinspike.encode(numbers, "int4") & 15).tolist() == [[8, 14], [2, 7]]
    assert marlinspike.encode(numbers, "uint4b8").tolist() == [[0, 6], [10, 15]]
    assert marlinspike.decode(np.array([0, 15], np.uint8), "uint4b8").tolist() == [-8, 7]
    half = marlinspike.encode(np.array([1.0], np.float32), np.float16)
    assert half.dtype == np.float16 and half[0] == 1
    # f64 is rounded once: through f32 this would be a tie, and 1.
    assert marlinspike.encode(np.array([1 + 2.0**-11 + 2.0**-40]), "float16")[0] > 1
    # One type's codes are numbers of another.
    assert codes_of(marlinspike.encode(half, "float8_e4m3fn")).tolist() == [0x38]
    assert marlinspike.decode(half, "float16").tolist() == [1.0]


def test_types_of_other_packages():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    made = marlinspike.encode(np.array([0.75, 5.0]), ml_dtypes.float4_e2m1fn)
    assert made.tolist() == [2, 6]
    assert marlinspike.encode(np.array([3.0]), ml_dtypes.bfloat16).dtype == ml_dtypes.bfloat16
    assert marlinspike.decode(np.array([3], ml_dtypes.float8_e5m2), ml_dtypes.float8_e5m2).tolist() == [3]


def test_torch():
    torch = pytest.importorskip("torch")
    made = marlinspike.encode(torch.tensor([1.0, 448.0]), torch.float8_e4m3fn)
    assert made.dtype == torch.float8_e4m3fn and made.float().tolist() == [1, 448]
    assert marlinspike.decode(made, torch.float8_e4m3fn).tolist() == [1, 448]


def test_what_is_refused():
    one = np.array([1.0])
    with pytest.raises(marlinspike.Error, match="dtype: found float9"):
        marlinspike.encode(one, "float9")
    with pytest.raises(marlinspike.Error, match="rounding: found up"):
        marlinspike.encode(one, "float16", "up")
    with pytest.raises(marlinspike.Error, match="overflow: found wrap"):
        marlinspike.encode(one, "float16", overflow="wrap")
    with pytest.raises(marlinspike.Error, match="`values`: found elements of I32"):
        marlinspike.encode(np.array([1], np.int32), "float16")
    with pytest.raises(marlinspike.Error, match="`codes`: found elements of U16, expected 8 bits"):
        marlinspike.decode(np.array([1], np.uint16), "float8_e4m3fn")
