//! What the timing examples share: generated weights of every type that products take.

use marlinspike::dims::{GroupSize, Shape};
use marlinspike::scalar::ScalarType;
use marlinspike::weight::{Codes, Groups, Table, TableData, Weight};

pub(crate) type AnyError = Box<dyn std::error::Error>;

/// xorshift64*.
pub(crate) fn next(state: &mut u64) -> u32 {
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    (state.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 32) as u32
}

/// Normal bf16 numbers of magnitude 1/4 to 4, both signs.
pub(crate) fn activations(state: &mut u64, len: usize) -> Vec<u16> {
    let bits = |r: u32| ((0x3e80 + r % 0x200) | (r >> 16 & 0x8000)) as u16;
    (0..len).map(|_| bits(next(state))).collect()
}

/// Name, type of codes, type of scales, k per group (0: all).
const TYPES: [(&str, ScalarType, ScalarType, usize); 7] = [
    ("uint4b8", ScalarType::UINT4B8, ScalarType::BFLOAT16, 128),
    ("uint4b8-g32", ScalarType::UINT4B8, ScalarType::BFLOAT16, 32),
    ("uint8b128", ScalarType::UINT8B128, ScalarType::BFLOAT16, 128),
    ("fp8", ScalarType::FLOAT8_E4M3FN, ScalarType::BFLOAT16, 0),
    ("mxfp8", ScalarType::FLOAT8_E4M3FN, ScalarType::FLOAT8_E8M0FNU, 32),
    ("mxfp4", ScalarType::FLOAT4_E2M1F, ScalarType::FLOAT8_E8M0FNU, 32),
    ("nvfp4", ScalarType::FLOAT4_E2M1F, ScalarType::FLOAT8_E4M3FN, 16),
];

/// The names that [`weight`] takes.
pub(crate) fn types() -> String {
    TYPES.map(|of| of.0).join(", ")
}

/// A weight of random finite codes; scales between 2^-7 and 2^-6, or such a power of two.
pub(crate) fn weight(
    state: &mut u64,
    name: &str,
    shape: Shape,
) -> Result<Weight<'static>, AnyError> {
    let found = TYPES.into_iter().find(|of| of.0 == name);
    let Some((_, ty, scale, group_k)) = found else {
        return Err(format!("type {name}; there are {}", types()).into());
    };
    let bits = if ty.size_bits() == 8 { 8 } else { 4 };
    // No e4m3 code is a NaN where bit 0 is never set.
    let kept = if ty == ScalarType::FLOAT8_E4M3FN { 0xfefe_fefe } else { u32::MAX };
    let words: Vec<u32> = (0..shape.len() * bits / 32).map(|_| next(state) & kept).collect();
    let group_size = if group_k == 0 { GroupSize::Channel } else { GroupSize::Of(group_k) };
    let groups = group_size.groups(shape.k())?;
    let len = groups * shape.size_n;
    let data = match scale {
        ScalarType::FLOAT8_E8M0FNU => {
            TableData::B8((0..len).map(|_| 120 + (next(state) % 2) as u8).collect())
        }
        ScalarType::FLOAT8_E4M3FN => {
            TableData::B8((0..len).map(|_| 0x08 + (next(state) % 8) as u8).collect())
        }
        _ => TableData::B16((0..len).map(|_| 0x3c00 | (next(state) % 128) as u16).collect()),
    };
    Ok(Weight {
        name: "weight".into(),
        ty,
        codes: Codes::from_words(bits as u32, shape, words)?,
        scales: Table::new(scale, groups, shape.size_n, data)?,
        zeros: None,
        groups: Groups::Uniform(group_size),
        global_scale: (name == "nvfp4").then_some(1.0),
        bias: None,
    })
}
