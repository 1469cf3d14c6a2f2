//! A matrix product `y[M, N] = x[M, K] · W[K, N]` described completely as data.
//!
//! A [`Schedule`] states the matrix unit, the conversion of weights to its operands, the order of k
//! and of additions of partial sums, and the position of scales, bias, router weight and roundings.
//! Two implementations of one schedule give the same bits, which [`Schedule::execute`] computes.
//!
//! One output `y[m, n]` is computed in these steps:
//!
//! 1. k is used as stored or sorted by group ([`Rows`]), and cut into chunks ([`Chunks`]).
//! 2. A chunk is cut into tiles of k that warps share ([`Stripes`]): each warp sums its part of
//!    every tile, one instruction after the other, from zero.
//! 3. With [`GroupSum`], a warp's sum ends with each group of k, and is multiplied by the group's
//!    scale, and the row's ([`RowScale`]), and added to an f32.
//! 4. [`Schedule::warp_steps`] are applied, the warps' sums are added; [`Schedule::chunk_steps`] are
//!    applied, the chunks' sums are added, first within each leaf ([`Schedule::leaf_chunks`]).
//! 5. [`Schedule::epilogue`] produces the output.
//!
//! f32 additions round to nearest even. Every NaN result is 0x7FFFFFFF (16 bits: 0x7FFF).

mod applied;
mod arrays;
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
mod tree;
mod w8a8;
mod wgmma;

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
pub use tree::{Cut, Part, Split};
pub use w8a8::{FP8_PROMOTION, FP8_UNIT, Fp8BlockKernel, Fp8Kernel};

use crate::num::scalar::ScalarType;

/// The computation of a product. [`Schedule::parse`] reads it from JSON and rejects unknown keys.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Schedule {
    /// The matrix unit: a row of [`UNITS`](super::tensor_core::UNITS).
    pub unit: UnitName,
    /// The operands of the unit for a weight.
    pub weights: Weights,
    /// The order of k.
    #[serde(default)]
    pub rows: Rows,
    /// How k is cut into sums that start from zero.
    #[serde(default)]
    pub chunks: Chunks,
    /// How warps share a chunk; `None`: one warp computes all of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stripes: Option<Stripes>,
    /// Sums per group of k; `None`: sums continue across groups.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group_sum: Option<GroupSum>,
    /// Applied to each warp's sum before the warps are added.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warp_steps: Vec<Step>,
    /// Applied to each chunk's sum before the chunks are added.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub chunk_steps: Vec<Step>,
    /// This many neighbouring chunks form a leaf: their sums are added in ascending order in f32, and
    /// `chunk_sum` adds the leaves. `None`: `chunk_sum` adds the chunks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leaf_chunks: Option<usize>,
    /// How chunks are added, or leaves.
    #[serde(default)]
    pub chunk_sum: Sum,
    /// Applied to the sum of all chunks, in order; the last one's type is the output's.
    pub epilogue: Vec<Step>,
}

/// The operands of the unit for a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Weights {
    /// The value.
    pub form: WeightForm,
    /// The value is multiplied by 2^exponent before it is rounded, and by 2^−exponent the channel
    /// scale (if it is a step), the scales of groups (if their sums are multiplied by them), or else
    /// the global scale: kernels move the bits of a code into a wider float and correct the exponent
    /// bias by a scale.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub exponent: i32,
}

fn is_zero<T: Default + PartialEq>(x: &T) -> bool {
    *x == T::default()
}

/// The value of a weight that enters the unit. It never includes NVFP4's global scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WeightForm {
    /// (q − z) · s, rounded once to the unit's type, as kernels of the Marlin family do.
    Rounded,
    /// (q − z) · s; a weight whose value the unit's type cannot represent is an error.
    Exact,
    /// q − z: the scale is a step, or a group's.
    Unscaled,
}

/// The order of the rows k of the weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rows {
    /// As they are stored.
    #[default]
    Stored,
    /// Sorted by group (act-order): stably, or by a permutation that the caller states.
    ByGroup,
}

/// How k is cut. All values are in k and fill whole instructions.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Chunks {
    /// One chunk.
    #[default]
    Whole,
    /// Chunks of this length; the last one may be shorter.
    Size(usize),
    /// Chunks start at 0 and at each of these ascending values.
    Boundaries(Vec<usize>),
    /// Marlin's stripes: the tiles of all columns, with k ascending within a column, are dealt to
    /// thread blocks in runs of equal length. A column of tiles is cut wherever a run ends.
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
    /// Rows of x that share a tile; the columns of the next rows follow. `None`: all rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rows: Option<usize>,
    /// Number of leading columns of tiles that are not cut; runs are dealt after them.
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
    /// The factor of a group's sum.
    pub scale: GroupScale,
    /// How it is added.
    pub multiply_add: MultiplyAdd,
    /// How the row's scale of the group enters, of activations that have a scale for each group;
    /// `None`: they have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub row_scale: Option<RowScale>,
    /// k after which a part ends inside a group, too: the k-tile of a kernel that is smaller than the
    /// group. `None`: only at the end of the group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub every: Option<usize>,
}

impl GroupSum {
    /// Groups whose rows have no scales, each one part.
    pub const fn of(scale: GroupScale, multiply_add: MultiplyAdd) -> Self {
        Self { scale, multiply_add, row_scale: None, every: None }
    }
}

/// How the scale of a row's group multiplies the group's part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RowScale {
    /// part · (row scale · group scale), the product of the scales rounded to f32: DeepGEMM, CUTLASS.
    Product,
    /// (part · row scale) · group scale, the first product rounded to f32: Triton.
    First,
}

/// The factor of a group's sum.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupScale {
    /// The group's scale.
    Stored,
    /// The scale of Marlin's int8 kernels: an int16, `scale · 4096 / max` rounded to even, with max
    /// / 4096 in the activations' scales; the stored scale if there is one group.
    Int16,
    /// No scale: an integer sum is only converted to f32.
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
    /// No rounding: sum and scales are integers modulo 2^32, and the sum of all groups is converted
    /// to f32 at the end. For integer units with integer scales.
    Integer,
}

/// How partial sums are added.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sum {
    /// The order.
    pub order: Order,
    /// float32, or a 16-bit type to which a running sum is rounded before the next f32 addition.
    #[serde(rename = "type", with = "names::scalar", default = "names::float32")]
    pub ty: ScalarType,
}

impl Default for Sum {
    fn default() -> Self {
        Self { order: Order::Ascending, ty: ScalarType::FLOAT32 }
    }
}

/// The order in which p partial sums are added.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// ((s0 + s1) + s2) + …
    Ascending,
    /// ((s_last + s_before) + …) + s0.
    Descending,
    /// Neighbours first: (s0 + s1) + (s2 + s3), and so on; an odd one is added at the next level.
    Pairwise,
    /// Marlin's warps, for p a power of two: the upper half stores its sums. Then, while more than
    /// one warp remains, each warp of the upper half of the rest adds the sum of the two stored
    /// values of its position to its own and stores the result. s0 adds the last one.
    Halving,
}

/// One step of an epilogue: the value and the operand, the latter rounded to `type`, give a
/// result that is rounded once to `type`, to nearest even.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Step {
    /// What happens.
    pub op: StepOp,
    /// float32, float16 or bfloat16; never wider than the previous step's type.
    #[serde(rename = "type", with = "names::scalar")]
    pub ty: ScalarType,
}

/// The operation of a step. A missing operand (no bias, no global scale, no router weight) leaves
/// the value unchanged.
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
    /// As compiled in upstream's Marlin kernel: [`Self::ChannelScaleBias`], but product and sum are
    /// rounded separately in the first eight rows of a thread block ([`Striped::rows`]; without it,
    /// of all rows) for the first eight of each 64 columns.
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
    /// Times router weight · global scale, whose product is rounded to f32 first. Without a router
    /// weight, no operation.
    RouterWeightGlobal,
}
