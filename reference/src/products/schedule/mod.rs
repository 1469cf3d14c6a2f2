//! A matrix product `y[M, N] = x[M, K] · W[K, N]` said completely, as data.
//!
//! A [`Schedule`] names the matrix unit, how weights become its operands, in which order k is
//! gone through and partial sums are added, and where scales, bias, router weight and roundings
//! stand. Two implementations of one schedule give the same bits, and [`Schedule::execute`]
//! computes them.
//!
//! One output `y[m, n]` comes about like this:
//!
//! 1. k is taken as stored, or sorted by group ([`Rows`]), and cut into chunks ([`Chunks`]).
//! 2. A chunk is cut into tiles of k that warps share ([`Stripes`]): each warp adds up its part of
//!    every tile, one instruction after the other, from zero.
//! 3. With [`GroupSum`], a warp's sum ends with each group of k, and is multiplied by the group's
//!    scale and added to an f32.
//! 4. [`Schedule::warp_steps`] are applied, the warps' sums are added; [`Schedule::chunk_steps`] are
//!    applied, the chunks' sums are added.
//! 5. [`Schedule::epilogue`] gives the output.
//!
//! f32 additions round to nearest even. A NaN that any step gives is 0x7FFFFFFF (16 bits: 0x7FFF).

mod choice;
mod chunks;
mod error;
mod execute;
mod known;
mod launch;
mod named;
mod names;
mod operand;
mod parse;
mod reduce;
mod related;
mod sample;
mod steps;
mod w8a8;

use serde::{Deserialize, Serialize};

pub use choice::ScheduleChoice;
pub use error::ScheduleError;
pub use execute::{Extras, Stack};
pub use known::known_schedules;
pub(crate) use known::{MOST_PARTS, PROMOTIONS, SPLIT_TILES};
pub use launch::{Launch, Launches};
pub use named::Cta;
pub use names::{AccumulatorType, UnitName};
pub use related::Related;
pub(crate) use sample::Sample;
pub use w8a8::{FP8_PROMOTION, FP8_UNIT, Fp8Kernel};

use crate::num::scalar::ScalarType;

/// How a product is computed. Read from JSON with [`Schedule::parse`]; unknown keys are refused.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Schedule {
    /// The matrix unit: a row of [`UNITS`](super::tensor_core::UNITS).
    pub unit: UnitName,
    /// What of a weight enters the unit.
    pub weights: Weights,
    /// The order of k.
    #[serde(default)]
    pub rows: Rows,
    /// How k is cut into sums that begin from zero.
    #[serde(default)]
    pub chunks: Chunks,
    /// How warps share a chunk; absent: one warp takes it all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stripes: Option<Stripes>,
    /// Sums per group of k; absent: a sum goes on over groups.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group_sum: Option<GroupSum>,
    /// Applied to each warp's sum before the warps are added.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warp_steps: Vec<Step>,
    /// Applied to each chunk's sum before the chunks are added.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub chunk_steps: Vec<Step>,
    /// How chunks are added.
    #[serde(default)]
    pub chunk_sum: Sum,
    /// Applied to the sum of all chunks, in order; the last one's type is the output's.
    pub epilogue: Vec<Step>,
}

/// What of a weight enters the unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Weights {
    /// Which number.
    pub form: WeightForm,
    /// The number is multiplied by 2^exponent before it is rounded, and the channel scale (where
    /// it is a step; else the global scale) by 2^−exponent: kernels move an 8-bit float's bits
    /// into a wider one's and leave the difference of the biases to a scale.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub exponent: i32,
}

fn is_zero<T: Default + PartialEq>(x: &T) -> bool {
    *x == T::default()
}

/// Which number of a weight enters the unit. NVFP4's global scale is never part of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WeightForm {
    /// (q − z) · s, rounded once to the unit's type, as kernels of the Marlin family do.
    Rounded,
    /// (q − z) · s; a weight for which the unit's type has no such number is an error.
    Exact,
    /// q − z: the scale is a step, or a group's.
    Unscaled,
}

/// The order in which the rows k of the weight are gone through.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rows {
    /// As they are stored.
    #[default]
    Stored,
    /// Sorted by group (act-order): stably, or by a permutation that the caller states.
    ByGroup,
}

/// How k is cut. All numbers are k and fill whole instructions.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Chunks {
    /// One chunk.
    #[default]
    Whole,
    /// Chunks of this length, the last one shorter where it must be.
    Size(usize),
    /// A chunk begins at 0 and at each of these, which ascend.
    Boundaries(Vec<usize>),
    /// Marlin's stripes: the tiles of all columns, k ascending inside a column, are dealt to
    /// blocks in runs of equal length, so that a column of tiles is cut wherever a run ends.
    Striped(Striped),
}

/// [`Chunks::Striped`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Striped {
    /// k of a tile.
    pub tile: usize,
    /// Columns of a tile: a multiple of 16.
    pub columns: usize,
    /// Tiles of a run.
    pub run: usize,
    /// Rows of x that share a tile; the columns of the next rows follow. Absent: all rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rows: Option<usize>,
    /// So many columns of tiles, the first ones, are not cut; runs are dealt behind them.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub whole: usize,
}

/// How warps share a chunk: each tile of `tile` k is cut into `warps` equal parts, one for each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stripes {
    /// k of a tile.
    pub tile: usize,
    /// Warps; the instruction's k times this divides the tile.
    pub warps: usize,
    /// How the warps' sums are added.
    pub sum: Sum,
}

/// An f32 sum of groups: `sum = sum + part · scale` at the end of each group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GroupSum {
    /// What a group's sum is multiplied with.
    pub scale: GroupScale,
    /// How it is added.
    pub multiply_add: MultiplyAdd,
}

/// What a group's sum is multiplied with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupScale {
    /// The group's scale.
    Stored,
    /// The scale as Marlin's int8 kernels take it: an int16, `scale · 4096 / max` rounded to
    /// even, with max / 4096 in the activations' scales; the stored scale when there is one group.
    Int16,
    /// Nothing: an integer sum only becomes an f32.
    One,
}

/// Rounding of a multiplication and an addition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MultiplyAdd {
    /// One, of the result.
    Fused,
    /// Two.
    Separate,
    /// None: sum and scales stay integers modulo 2^32, and the sum of all groups becomes an f32 at
    /// the end. For integer units, with scales that are integers.
    Integer,
}

/// How partial sums are added.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sum {
    /// In which order.
    pub order: Order,
    /// float32; or a 16-bit type, as which a running sum is stored before the next f32 addition.
    #[serde(rename = "type", with = "names::scalar", default = "names::float32")]
    pub ty: ScalarType,
}

impl Default for Sum {
    fn default() -> Self {
        Self { order: Order::Ascending, ty: ScalarType::FLOAT32 }
    }
}

/// The order of an addition of p partial sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// ((s0 + s1) + s2) + …
    Ascending,
    /// ((s_last + s_before) + …) + s0.
    Descending,
    /// Neighbours first: (s0 + s1) + (s2 + s3), and so on up; an odd one waits.
    Pairwise,
    /// Marlin's warps: the upper half of p is stored; then, as long as halves are left, each of
    /// the upper half of the rest adds to itself the sum of the two stored ones of its own place,
    /// and is stored; s0 adds the last one. p is a power of two.
    Halving,
}

/// One step of an epilogue: the value and the operand, the latter rounded to `type`, give a
/// result that is rounded once to `type`, to nearest even.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Step {
    /// What happens.
    pub op: StepOp,
    /// float32, float16 or bfloat16; never wider than the step before.
    #[serde(rename = "type", with = "names::scalar")]
    pub ty: ScalarType,
}

/// What a step does. An operand that the product lacks (no bias, no global scale, no router
/// weight) leaves the value as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StepOp {
    /// Only rounds.
    Round,
    /// Times the column's scale; the weight has one group.
    ChannelScale,
    /// Times the column's scale, plus the column's bias, rounded once (a multiply-add). Without a
    /// bias: as [`Self::ChannelScale`].
    ChannelScaleBias,
    /// As upstream's Marlin kernel was compiled: [`Self::ChannelScaleBias`], but product and sum are
    /// rounded apart in the first eight rows of a thread block ([`Striped::rows`]; without it, of
    /// all rows) where the column is one of the first eight of each 64.
    ChannelScaleBiasMarlin,
    /// Times NVFP4's global scale.
    GlobalScale,
    /// Times the scale of the row of x.
    ActivationScale,
    /// Times the scale of the row of x, plus the column's bias, rounded once (a multiply-add). Without
    /// a bias: as [`Self::ActivationScale`].
    ActivationScaleBias,
    /// Plus the column's bias.
    Bias,
    /// Times the row's router weight.
    RouterWeight,
    /// Times router weight · global scale, a product that is rounded to f32 first. Without a
    /// router weight: nothing.
    RouterWeightGlobal,
}
