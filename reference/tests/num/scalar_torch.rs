//! The functions that promise PyTorch's casts, compared with PyTorch's results on every input.
//!
//! `golden/data/scalar/*_to_*.json` (by `scripts/gen/scalar_torch.py`, torch 2.11.0 on x86-64)
//! list the bit patterns of the source at which the result changes. From 16 bits, all patterns are
//! compared; from f32, both ends of each stretch, some patterns within, and in the ignored test
//! all of them.

use marlinspike::num::scalar::*;

struct Golden {
    /// First pattern and result of each stretch, ascending; the first starts at 0.
    runs: Vec<(u32, u8)>,
    /// The largest pattern.
    last: u32,
}

impl Golden {
    fn read(json: &str, from: &str, to: ScalarType) -> Self {
        let file: serde_json::Value = serde_json::from_str(json).unwrap();
        assert_eq!((&file["from"], &file["to"]), (&from.into(), &to.name().into()));
        let runs: Vec<(u32, u8)> = file["runs"]
            .as_array()
            .unwrap()
            .iter()
            .map(|run| (run[0].as_u64().unwrap() as u32, run[1].as_u64().unwrap() as u8))
            .collect();
        assert!(runs[0].0 == 0 && runs.len() > 80);
        Self { runs, last: if from == "float32" { u32::MAX } else { u16::MAX.into() } }
    }

    /// First pattern, last pattern and result of each stretch.
    fn stretches(&self) -> impl Iterator<Item = (u32, u32, u8)> {
        self.runs.iter().enumerate().map(|(i, &(first, code))| {
            let last = self.runs.get(i + 1).map_or(self.last, |next| next.0 - 1);
            (first, last, code)
        })
    }

    fn check_all(&self, convert: impl Fn(u32) -> u8) {
        for (first, last, code) in self.stretches() {
            for bits in first..=last {
                assert_eq!(convert(bits), code, "{bits:#x}");
            }
        }
    }

    fn check_ends(&self, convert: impl Fn(u32) -> u8) {
        for (first, last, code) in self.stretches() {
            let step = ((last - first) / 64).max(1) as usize;
            for bits in (first..=last).step_by(step).chain([last]) {
                assert_eq!(convert(bits), code, "{bits:#x}");
            }
        }
    }
}

macro_rules! golden {
    ($from:literal, $to:literal, $kind:ident) => {
        Golden::read(
            include_str!(concat!("../../../golden/data/scalar/", $from, "_to_", $to, ".json")),
            $from,
            ScalarType::$kind,
        )
    };
}

#[test]
fn all_f16() {
    golden!("float16", "float8_e4m3fn", FLOAT8_E4M3FN)
        .check_all(|bits| f16_to_e4m3fn_rne_nan(bits as u16));
    golden!("float16", "float8_e5m2", FLOAT8_E5M2)
        .check_all(|bits| f16_to_e5m2_rne_infinity(bits as u16));
    golden!("float16", "float8_e8m0fnu", FLOAT8_E8M0FNU)
        .check_all(|bits| f32_to_e8m0_torch(f16_to_f32(bits as u16)));
}

#[test]
fn all_bf16() {
    golden!("bfloat16", "float8_e4m3fn", FLOAT8_E4M3FN)
        .check_all(|bits| bf16_to_e4m3fn_rne_nan(bits as u16));
    golden!("bfloat16", "float8_e5m2", FLOAT8_E5M2)
        .check_all(|bits| bf16_to_e5m2_rne_infinity(bits as u16));
    golden!("bfloat16", "float8_e8m0fnu", FLOAT8_E8M0FNU)
        .check_all(|bits| f32_to_e8m0_torch(bf16_to_f32(bits as u16)));
}

type Cast = fn(f32) -> u8;

fn f32_tables() -> [(Golden, Cast); 3] {
    [
        (golden!("float32", "float8_e4m3fn", FLOAT8_E4M3FN), f32_to_e4m3fn_rne_nan),
        (golden!("float32", "float8_e5m2", FLOAT8_E5M2), f32_to_e5m2_rne_infinity),
        (golden!("float32", "float8_e8m0fnu", FLOAT8_E8M0FNU), f32_to_e8m0_torch),
    ]
}

#[test]
fn f32_at_every_change() {
    for (golden, convert) in f32_tables() {
        golden.check_ends(|bits| convert(f32::from_bits(bits)));
    }
}

#[test]
#[ignore = "3 × 2^32 conversions: some minutes"]
fn all_f32() {
    for (golden, convert) in f32_tables() {
        golden.check_all(|bits| convert(f32::from_bits(bits)));
    }
}

/// Where PyTorch's e8m0 cast is not to nearest: exactly the subnormals from above 2^−127 up to,
/// not including, the midpoint 1.5·2^−127, of either sign.
#[test]
fn e8m0_torch_and_nearest_differ_only_below_the_first_midpoint() {
    let (golden, _) = &f32_tables()[2];
    let mut differing = Vec::new();
    for (first, last, code) in golden.stretches() {
        for bits in [first, first.midpoint(last), last, 0x5f_ffff, 0x60_0000] {
            if (first..=last).contains(&bits) && f32_to_e8m0_rne(f32::from_bits(bits)) != code {
                differing.push(bits);
            }
        }
    }
    differing.retain(|bits| !(0x40_0001..0x60_0000).contains(&(bits & 0x7fff_ffff)));
    assert_eq!(differing, [0u32; 0]);
    assert_eq!(f32_to_e8m0_rne(f32::from_bits(0x40_0001)), 0);
    assert_eq!(f32_to_e8m0_torch(f32::from_bits(0x40_0001)), 1);
}
