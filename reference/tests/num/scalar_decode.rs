//! Every code of every type decodes to its value, by three independent derivations.

use super::scalar_oracle::Grid;
use marlinspike::num::scalar::*;

fn same(a: f64, b: f64) -> bool {
    a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
}

#[test]
fn f16_and_bf16_as_the_half_crate_decodes_them() {
    for code in 0..=u16::MAX {
        let f16 = half::f16::from_bits(code).to_f32();
        let bf16 = half::bf16::from_bits(code).to_f32();
        for (kind, to_f32, to_f64, expected) in [
            (ScalarType::FLOAT16, f16_to_f32(code), f16_to_f64(code), f16),
            (ScalarType::BFLOAT16, bf16_to_f32(code), bf16_to_f64(code), bf16),
        ] {
            assert!(same(to_f32.into(), expected.into()), "{kind} {code:#06x}: {to_f32:e}");
            assert!(same(to_f64, expected.into()), "{kind} {code:#06x}: {to_f64:e}");
            assert!(same(kind.to_f64(code.into()), expected.into()), "{kind} {code:#06x}");
            assert_eq!(to_f32.is_sign_negative(), code >> 15 == 1, "{kind} {code:#06x}");
        }
    }
}

#[test]
fn finite_codes_as_the_specifications_define_them() {
    for grid in Grid::all() {
        for (code, &value) in grid.values.iter().enumerate() {
            let code = code as u32;
            assert!(same(grid.kind.to_f64(code), value), "{} {code:#x}", grid.kind);
            if grid.sign != 0 {
                assert!(
                    same(grid.kind.to_f64(code | grid.sign), -value),
                    "{} {code:#x}",
                    grid.kind
                );
            }
        }
        if let Some(infinity) = grid.infinity {
            assert_eq!(grid.kind.to_f64(infinity), f64::INFINITY);
            assert_eq!(grid.kind.to_f64(infinity | grid.sign), f64::NEG_INFINITY);
        }
        if let Some(nan) = grid.nan {
            assert!(grid.kind.to_f64(nan).is_nan() && grid.kind.to_f64(nan | grid.sign).is_nan());
        }
    }
}

#[test]
fn eight_bit_codes_as_pytorch_decodes_them() {
    let golden: serde_json::Value =
        serde_json::from_str(include_str!("../../../golden/data/scalar/decode.json")).unwrap();
    type Decoders = (fn(u8) -> f32, fn(u8) -> f64);
    let types: [(ScalarType, Decoders); 3] = [
        (ScalarType::FLOAT8_E4M3FN, (e4m3fn_to_f32, e4m3fn_to_f64)),
        (ScalarType::FLOAT8_E5M2, (e5m2_to_f32, e5m2_to_f64)),
        (ScalarType::FLOAT8_E8M0FNU, (e8m0_to_f32, e8m0_to_f64)),
    ];
    for (kind, (to_f32, to_f64)) in types {
        let table = golden["f32_bits"][kind.name()].as_array().unwrap();
        assert_eq!(table.len(), 256);
        for (code, bits) in (0..=u8::MAX).zip(table) {
            let expected = f32::from_bits(bits.as_u64().unwrap() as u32);
            assert!(same(to_f32(code).into(), expected.into()), "{kind} {code:#04x}");
            assert!(same(to_f64(code), expected.into()), "{kind} {code:#04x}");
            assert!(same(kind.to_f64(code.into()), expected.into()), "{kind} {code:#04x}");
        }
    }
}

#[test]
fn e2m1_reads_the_low_four_bits() {
    let grid = Grid::e2m1();
    for code in 0..=u8::MAX {
        let value = grid.values[usize::from(code & 7)];
        let value = if code & 8 == 0 { value } else { -value };
        assert!(same(e2m1_to_f32(code).into(), value) && same(e2m1_to_f64(code), value), "{code}");
    }
}

/// IEEE 754 §6.2: widening keeps a NaN's payload and makes it quiet.
#[test]
fn nan_payloads() {
    assert_eq!(f16_to_f32(0x7e01).to_bits(), 0x7fc0_2000);
    assert_eq!(f16_to_f32(0xfc01).to_bits(), 0xffc0_2000);
    assert_eq!(f16_to_f64(0xfe00).to_bits(), 0xfff8_0000_0000_0000);
    assert_eq!(bf16_to_f32(0xffc1).to_bits(), 0xffc1_0000);
    assert_eq!(bf16_to_f64(0x7fc1).to_bits(), 0x7ff8_2000_0000_0000);
}
