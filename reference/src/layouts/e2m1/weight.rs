//! Packing from the hub's weight.

use super::{CODE_BYTES, E2m1Layout, GROUP, GROUP_BYTES, NR, PIECE, PackedE2m1};
use crate::num::dims::GroupSize;
use crate::num::scalar::ScalarType;
use crate::weight::{Groups, Weight};
use crate::{Error, Result};

/// Words of eight k in a group.
const WORDS: usize = GROUP / 8;

impl E2m1Layout {
    /// Packs `weight`: e2m1 codes, e8m0 scales for each 32 k, a bias of any float type. The same bytes
    /// as [`E2m1Layout::pack`] of the checkpoint's rows.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for another type of codes or scales, act-order, zero points and a global
    /// scale; [`Error::Size`] for other groups; [`Error::Shape`] for another shape; [`Error::Value`] for
    /// a NaN scale (0xff); the errors of [`Weight::validate`].
    pub fn pack_weight(&self, weight: &Weight<'_>) -> Result<PackedE2m1<'static>> {
        check(weight)?;
        let shape = weight.shape();
        if shape != self.shape() {
            let found = [shape.size_k, shape.size_n];
            return Err(Error::shape(&weight.name, &found, self.shape()));
        }
        let words = weight.codes.words();
        let mut bytes = vec![0u8; self.packed_len()];
        for (b, block) in bytes.chunks_exact_mut(self.block_bytes()).enumerate() {
            let columns = b * NR..shape.size_n.min((b + 1) * NR);
            for (g, group) in block.chunks_exact_mut(GROUP_BYTES).take(self.groups()).enumerate() {
                for (i, n) in columns.clone().enumerate() {
                    let k: [u32; WORDS] =
                        std::array::from_fn(|w| words[(g * WORDS + w) * shape.size_n + n]);
                    interleave(k, &mut group[i * PIECE..CODE_BYTES]);
                    group[CODE_BYTES + i] = weight.scales.bits(g, n) as u8;
                }
            }
            let Some(bias) = &weight.bias else { continue };
            let start = self.groups() * GROUP_BYTES;
            for (i, n) in columns.enumerate() {
                // Floats of 16 and 32 bits are exact in f32.
                let value = bias.value(0, n) as f32;
                block[start + 4 * i..][..4].copy_from_slice(&value.to_le_bytes());
            }
        }
        PackedE2m1::new(*self, bytes)
    }
}

/// Stores 32 codes of one column; `out` begins with the column's first byte.
fn interleave(words: [u32; WORDS], out: &mut [u8]) {
    for (half, pair) in [[words[0], words[2]], [words[1], words[3]]].into_iter().enumerate() {
        for i in 0..8 {
            let [low, high] = pair.map(|word| (word >> (4 * i) & 15) as u8);
            let k = half * 8 + i;
            out[k / PIECE * PIECE * NR + k % PIECE] = low | high << 4;
        }
    }
}

/// Checks that the layout can hold `weight`.
fn check(weight: &Weight<'_>) -> Result<()> {
    weight.validate()?;
    let refuse = |found: String| {
        let reason = "expected float4_e2m1f codes with float8_e8m0fnu scales for each 32 k";
        Err(Error::unsupported(format!("{}: {found}", weight.name), reason))
    };
    if weight.ty != ScalarType::FLOAT4_E2M1F {
        return refuse(format!("{} codes", weight.ty));
    }
    if weight.scales.ty() != ScalarType::FLOAT8_E8M0FNU {
        return refuse(format!("{} scales", weight.scales.ty()));
    }
    if weight.zeros.is_some() || weight.global_scale.is_some() {
        return refuse("zero points or a global scale".to_owned());
    }
    match &weight.groups {
        Groups::Uniform(GroupSize::Of(GROUP)) => {}
        Groups::Uniform(other) => {
            return Err(Error::size(format!("{}: group_size", weight.name), other, GROUP));
        }
        Groups::Indexed { .. } => return refuse("act-order".to_owned()),
    }
    let (rows, cols) = (weight.scales.rows(), weight.scales.cols());
    match weight.scales.iter_bits().position(|bits| bits == 0xff) {
        Some(i) if rows > 0 => {
            let name = format!("{} scales [group, n]", weight.name);
            Err(Error::value(name, &[i / cols, i % cols], "NaN (0xff)", "a power of two"))
        }
        _ => Ok(()),
    }
}
