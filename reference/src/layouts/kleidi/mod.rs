//! The byte layout of KleidiAI's `qai8dxp` and `qsi4cxp` / `qsi4c32p` micro-kernels, which PyTorch's
//! `_dyn_quant_pack_4bit_weight` and `_dyn_quant_matmul_4bit` run on an Arm CPU.
//!
//! Both sides are cut into blocks (`mr` rows of activations, `nr` columns of weights), and k runs
//! in pieces of [`PIECE`] values, the operand size of a dot-product instruction. Kp is K rounded up
//! to [`CHUNK`].
//!
//! | block of | holds, in this order |
//! | --- | --- |
//! | activations | int8 codes `[Kp/8][mr][8]`, int32 `[mr]` −zero point, f32 `[mr]` 1 / scale |
//! | weights, channel-wise | codes `[Kp/32][2][nr][8]`, int32 `[nr]` 16·Σw, f32 `[nr]` scale / 16, f32 `[nr]` bias |
//! | weights, group-wise | for each group codes `[g/32][2][nr][8]` and bf16 `[nr]` scales; then f32 `[nr]` Σ scale·Σw, f32 `[nr]` bias |
//!
//! A byte of weight codes (chunk c, segment s, column n, byte j) holds k = 32c + 8s + j in its low
//! nibble and k + 16 in its high one, as two's complement. Codes past K are 0. Columns past N
//! repeat the last one; rows past M are zero bytes (the operator leaves them unwritten).
//!
//! A matrix may have two tables after its blocks, which the operator lacks: int8 `[blocks][groups][nr]`,
//! 8 − zero point, and uint32 `[K]`, the order of its rows. Row k of the blocks is row `order[k]` of the
//! checkpoint (act-order), so activations are gathered by it.
//!
//! A block holds values of several kinds, so positions are [`LhsPlace`] and [`RhsPlace`] instead of
//! [`Place`](super::Place).

mod columns;
mod lhs;
mod parts;
pub(super) mod positions;
mod rhs;
mod stack;
mod tables;
mod weight;

pub(crate) use columns::segment_sums;
pub use columns::{Columns, Factors};
pub use lhs::{LhsLayout, LhsPart, LhsPlace, PackedLhs, QuantizedRows};
pub use parts::MatrixBytes;
pub use rhs::{PackedRhs, RhsLayout, RhsPart, RhsPlace};
pub use stack::PackedStack;
pub use weight::operator_scales;

use super::cpu::{CpuFormat, CpuSizes};
use crate::num::scalar::ScalarType;
use crate::{Error, Result};

/// The descriptor for files, conversion and kernels.
pub(super) const FORMAT: CpuFormat = CpuFormat {
    name: "int4",
    title: "int4",
    element: ScalarType::UINT4B8,
    activations: "quantized per token",
    nr: &[NR[1], NR[0]],
    sizes: |shape, group_size, nr, tables| {
        let layout = RhsLayout::new(shape, group_size, nr)?.with_tables(tables)?;
        Ok(CpuSizes {
            groups: layout.groups(),
            block_bytes: layout.block_bytes(),
            packed_len: layout.packed_len(),
        })
    },
    pack: |weight, nr| {
        let layout = RhsLayout::new(weight.shape(), weight.groups.group_size(), nr)?;
        Ok(layout.pack_weight(weight)?.into_bytes())
    },
};

/// The name of conversions to the layout, on command lines and in configs.
pub const NAME: &str = "kleidiai";
/// What runs the layout, in messages.
pub const TITLE: &str = "the int4 path of KleidiAI";
/// A conversion to blocks of 4-bit columns, in one line.
pub const ABOUT: &str = "blocks of 4-bit columns for CPUs, int4 in KleidiAI's layout; activations \
                         are quantized to int8 at run time";

/// The key of a case that names the micro-kernel.
pub const VARIANT_KEY: &str = "kleidiai_variant";

/// What the keys mean that describe the library in a case.
pub const KEY_MEANINGS: &[(&str, &str)] = &[
    (
        "activation_rounding",
        "how activations are rounded to int8: `half_away` since KleidiAI 1.22, `half_even` before \
         and of bfloat16",
    ),
    (VARIANT_KEY, "the micro-kernel; information only"),
    ("packing", "block sizes of KleidiAI's packed matrices"),
    ("packing.kr", "k per block"),
    ("packing.mr", "rows of x per block"),
    ("packing.nr", "columns of the weight per block"),
    ("packing.sr", "splits of a block's k"),
];

/// Number of consecutive k of one row that are adjacent: kr / sr with kr = 16 and sr = 2.
pub const PIECE: usize = 8;
/// k per chunk of weight codes, to which K is padded.
pub const CHUNK: usize = 32;
/// Rows per block: one for the dot-product kernels, four for the matrix-multiply ones.
pub const MR: [usize; 2] = [1, 4];
/// Columns per block.
pub const NR: [usize; 2] = [4, 8];

/// K rounded up to [`CHUNK`].
pub const fn padded_k(size_k: usize) -> usize {
    size_k.div_ceil(CHUNK) * CHUNK
}

/// The product of sizes that come from a file.
fn product(what: &str, factors: &[usize]) -> Result<usize> {
    factors
        .iter()
        .try_fold(1usize, |a, &b| a.checked_mul(b))
        .filter(|&bytes| isize::try_from(bytes).is_ok())
        .ok_or_else(|| Error::size(what, format!("{factors:?}"), "a product that memory can hold"))
}

/// The four bytes at `at`.
fn word(bytes: &[u8], at: usize) -> [u8; 4] {
    [bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]
}
