//! e4m3 scales and codes by their bits.

use marlinspike::layouts::marlin::e4m3_scale_factor;
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::ScalarType;
use marlinspike::weight::{Codes, Groups, Table, TableData, Weight};

/// NVFP4's factor: 448 · 2^7 over the largest scale's 2^7, rounded down to a power of two, at least 1.
#[test]
fn the_factor_brings_the_largest_scale_below_448() {
    let factor = |scales: &[u8]| e4m3_scale_factor(scales.iter().copied(), ScalarType::BFLOAT16);
    // 448, 256, 224, 1, 1.125, 2^-9, by their bits.
    let cases =
        [(0x7e, 1.0), (0x78, 1.0), (0x76, 2.0), (0x38, 256.0), (0x39, 256.0), (0x01, 131072.0)];
    for (bits, expected) in cases {
        assert_eq!(factor(&[bits]), expected, "{bits:#x}");
        // Smaller scales, zeros, negative ones and NaN do not count.
        assert_eq!(factor(&[0x00, 0x01, bits, 0xfe, 0x7f]), expected, "{bits:#x}");
    }
    assert_eq!(factor(&[]), 1.0);
    assert_eq!(factor(&[0x00, 0xb8]), 1.0);
    assert_eq!(e4m3_scale_factor([0x38], ScalarType::FLOAT16), 1.0);
}

/// Both signs of NaN, and its neighbours, in every byte of a word.
#[test]
fn nan_codes_are_found() {
    let shape = Shape::new(16, 2);
    let with = |ty: ScalarType, at: usize, byte: u8| {
        let codes = Codes::from_fn(8, shape, |k, n| if (k, n) == (at, 1) { byte } else { 0x38 });
        let scales = Table::new(ScalarType::BFLOAT16, 1, 2, TableData::B16(vec![0x3f80; 2]));
        let weight = Weight {
            name: "w".to_owned(),
            ty,
            codes: codes.unwrap(),
            scales: scales.unwrap(),
            zeros: None,
            groups: Groups::Uniform(GroupSize::Channel),
            global_scale: None,
            bias: None,
        };
        weight.has_nan_codes()
    };
    for at in [0, 5, 10, 15] {
        for (byte, expected) in
            [(0x7f, true), (0xff, true), (0x7e, false), (0xfe, false), (0x80, false)]
        {
            assert_eq!(with(ScalarType::FLOAT8_E4M3FN, at, byte), expected, "{byte:#x}");
            assert!(!with(ScalarType::UINT8B128, at, byte));
        }
    }
}
