//! The canonical schedule, version 2: one GPU and every tensor-parallel size give the same bits.
//!
//! Version 1 cuts the K that a GPU holds and adds the chunks in a chain, so a rank's part of K changes
//! the order of additions. Version 2 cuts the model's K into P leaves of equal length, P a power of
//! two up to eight, and adds their f32 sums in a balanced tree. A rank of T, which divides P, holds
//! P / T neighbouring leaves: a whole subtree. The upper levels of the tree add the ranks' f32 sums.
//! Scales, bias, router weight and the one rounding follow the last addition.
//!
//! ```
//! use marlinspike::products::schedule::{Schedule, Split};
//!
//! assert_eq!(Schedule::canonical_leaves(14336), 8);
//! assert_eq!(Split::new(14336, 1, 2)?.rows(), 7168..14336);
//! // 1408 = 2 · 704 has two leaves, which four ranks cannot share.
//! assert!(Split::new(1408, 0, 4).is_err());
//! # Ok::<(), marlinspike::Error>(())
//! ```

use std::ops::Range;

use ndarray::{Array2, ArrayView2};

use super::named::{chunk_length, step};
use super::operand::Plan;
use super::steps::Operands;
use super::{Chunks, Extras, Order, Schedule, ScheduleError, Step, StepOp, Sum};
use crate::num::array::row_major;
use crate::num::scalar::ScalarType;
use crate::products::tensor_core::{LANES, Lanes};
use crate::weight::{Groups, Weight};
use crate::{Error, Result};

/// Leaves consist of tiles of this many k.
const LEAF_STEP: usize = 64;
/// k of the shortest leaf, unless there is only one.
const LEAST_LEAF: usize = 128;

const F32: ScalarType = ScalarType::FLOAT32;
/// What ranks need where they cannot share k.
const WHOLE_K: &str = "the whole K on each rank";

/// One tensor-parallel rank's part of the model's K.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Split {
    size_k: usize,
    rank: usize,
    ranks: usize,
}

impl Split {
    /// The part of `rank` among `ranks`, for a layer with `size_k` rows in the whole model.
    ///
    /// # Errors
    /// [`Error::Size`] if `ranks` does not divide [`Schedule::canonical_leaves`], naming the numbers
    /// of ranks that do, and if `rank` is not below `ranks`.
    pub fn new(size_k: usize, rank: usize, ranks: usize) -> Result<Self> {
        let leaves = Schedule::canonical_leaves(size_k);
        if ranks == 0 || !leaves.is_multiple_of(ranks) {
            let fitting: Vec<String> =
                (1..=leaves).filter(|&n| leaves.is_multiple_of(n)).map(|n| n.to_string()).collect();
            let expected = format!("{}: size_k {size_k} has {leaves} leaves", fitting.join(" or "));
            return Err(Error::size("ranks", ranks, expected));
        }
        if rank >= ranks {
            return Err(Error::size("rank", rank, format!("below {ranks} ranks")));
        }
        Ok(Self { size_k, rank, ranks })
    }

    /// All of K.
    pub const fn whole(size_k: usize) -> Self {
        Self { size_k, rank: 0, ranks: 1 }
    }

    /// The rank.
    pub const fn rank(&self) -> usize {
        self.rank
    }

    /// Ranks that share K.
    pub const fn ranks(&self) -> usize {
        self.ranks
    }

    /// The rows of the model's weight that the rank holds.
    pub fn rows(&self) -> Range<usize> {
        let len = self.size_k / self.ranks;
        self.rank * len..(self.rank + 1) * len
    }

    /// The rank's part of the model's `weight`.
    ///
    /// # Errors
    /// [`Error::Shape`] for a weight of another K; [`Error::Unsupported`] for act-order over several
    /// ranks, which sorts k across them; those of [`Weight::slice_rows`].
    pub fn part_of(self, weight: &Weight<'_>) -> Result<Part> {
        let shape = weight.shape();
        if shape.size_k != self.size_k {
            let expected = format!("[{}, {}]", self.size_k, shape.size_n);
            return Err(Error::shape(&weight.name, &[shape.size_k, shape.size_n], expected));
        }
        self.expect_order_of_k(weight)?;
        let slice = weight.slice_rows(self.rows())?;
        Ok(Part { split: self, weight: Weight { bias: weight.bias.clone(), ..slice } })
    }

    /// Refuses act-order over several ranks.
    fn expect_order_of_k(&self, weight: &Weight<'_>) -> Result<()> {
        if self.ranks > 1 && matches!(weight.groups, Groups::Indexed { .. }) {
            let what = format!("{}: act-order over ranks", weight.name);
            return Err(Error::unsupported(what, WHOLE_K));
        }
        Ok(())
    }
}

/// One rank's rows of the model's weight, with the bias on every rank: it is added after the sum of all
/// ranks, where [`Weight::slice_rows`] leaves it to the first rank's own sum.
#[derive(Debug, Clone)]
pub struct Part {
    split: Split,
    weight: Weight<'static>,
}

impl Part {
    /// The part whose rows are `weight`, where only those were loaded: [`Split::part_of`] takes them from the
    /// model's weight. A bias has to be given to every rank.
    ///
    /// # Errors
    /// [`Error::Shape`] for another number of rows than the rank's; [`Error::Unsupported`] for act-order over
    /// several ranks.
    pub fn new(split: Split, weight: Weight<'static>) -> Result<Self> {
        let (shape, rows) = (weight.shape(), split.rows().len());
        if shape.size_k != rows {
            let expected = format!("[{rows}, {}], the rows of {split:?}", shape.size_n);
            return Err(Error::shape(&weight.name, &[shape.size_k, shape.size_n], expected));
        }
        split.expect_order_of_k(&weight)?;
        Ok(Self { split, weight })
    }

    /// Which part of K it is.
    pub const fn split(&self) -> Split {
        self.split
    }

    /// The rows.
    pub const fn weight(&self) -> &Weight<'static> {
        &self.weight
    }
}

/// How a canonical schedule cuts k: into leaves of equal length, and each leaf into chunks of equal
/// length, the last of which ends with the leaf.
///
/// Chunks of a leaf are added in ascending order, and leaves by a balanced tree. Kernels take these
/// numbers as they are.
///
/// ```
/// use marlinspike::products::schedule::{Cut, Split};
///
/// let cut = Cut::version_1(14336);
/// assert_eq!((cut.leaf, cut.chunk, cut.chunks()), (14336, 1792, 8));
/// // Half of 11008 k: two of its four leaves, of two chunks each.
/// let cut = Cut::version_2(Split::new(11008, 1, 2)?);
/// assert_eq!((cut.size_k, cut.leaf, cut.chunk, cut.chunks()), (5504, 2752, 1408, 4));
/// # Ok::<(), marlinspike::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Cut {
    /// k of the product: all leaves.
    pub size_k: usize,
    /// k of a leaf.
    pub leaf: usize,
    /// k of a chunk, at most a leaf's.
    pub chunk: usize,
}

impl Cut {
    /// Version 1: one leaf.
    pub const fn version_1(size_k: usize) -> Self {
        let chunk = Schedule::canonical_chunk(size_k);
        Self { size_k, leaf: size_k, chunk: if chunk < size_k { chunk } else { size_k } }
    }

    /// Version 2, for the rows of k that a rank holds.
    pub const fn version_2(split: Split) -> Self {
        let leaves = Schedule::canonical_leaves(split.size_k);
        let leaf = split.size_k / leaves;
        let most = Schedule::CANONICAL_CHUNKS / leaves;
        let chunk = if most == 1 { leaf } else { chunk_length(leaf, most) };
        let chunk = if chunk < leaf { chunk } else { leaf };
        Self { size_k: split.size_k / split.ranks, leaf, chunk }
    }

    /// Chunks of a leaf.
    pub const fn leaf_chunks(self) -> usize {
        self.leaf.div_ceil(self.chunk)
    }

    /// Where each chunk begins, ascending.
    pub fn begins(self) -> impl Iterator<Item = usize> {
        let leaves = (0..self.size_k).step_by(self.leaf);
        leaves.flat_map(move |leaf| (leaf..leaf + self.leaf).step_by(self.chunk))
    }

    /// Chunks of the product.
    pub const fn chunks(self) -> usize {
        self.size_k / self.leaf * self.leaf_chunks()
    }
}

impl Schedule {
    /// P, the leaves of version 2 of the canonical schedule: the largest of 8, 4, 2 and 1 whose leaves
    /// are multiples of 64 k and have at least 128.
    pub const fn canonical_leaves(size_k: usize) -> usize {
        let mut leaves = Self::CANONICAL_CHUNKS;
        while leaves > 1
            && (!size_k.is_multiple_of(LEAF_STEP * leaves) || size_k / leaves < LEAST_LEAF)
        {
            leaves /= 2;
        }
        leaves
    }

    /// Version 2 of the canonical schedule; arguments as in [`Schedule::canonical`]. Without leaves to
    /// add ([`Schedule::canonical_leaves`] is 1) it is version 1.
    ///
    /// A leaf is cut into at most 8 / P chunks by the rule of version 1, added in ascending order.
    ///
    /// # Errors
    /// As [`Schedule::canonical`].
    pub fn canonical_v2(weight: &Weight<'_>, dtype: ScalarType, input: ScalarType) -> Result<Self> {
        let v1 = Self::canonical(weight, dtype, input)?;
        Ok(v1.with_leaves(Split::whole(weight.shape().size_k)))
    }

    /// [`Schedule::canonical_v2`] of the model's weight, of which a rank has `part`: for
    /// [`Schedule::add_ranks`].
    ///
    /// # Errors
    /// As [`Schedule::canonical_v2_part`].
    pub fn canonical_v2_of(part: &Part, dtype: ScalarType, input: ScalarType) -> Result<Self> {
        // Its refusals.
        Self::canonical_v2_part(part, dtype, input)?;
        let Part { split, weight } = part;
        let v1 = Self {
            chunks: Chunks::Size(Self::canonical_chunk(split.size_k)),
            ..Self::canonical(weight, dtype, input)?
        };
        Ok(v1.with_leaves(Split::whole(split.size_k)))
    }

    /// The schedule of one rank's sum in version 2, for [`Part::weight`]. The output is the rank's f32
    /// sum, without scale, bias, router weight or rounding, for [`Schedule::add_ranks`], also for a
    /// single rank.
    ///
    /// # Errors
    /// As [`Schedule::canonical`]; with several ranks [`Error::Unsupported`] for int8 activations with
    /// several groups, whose int16 scales depend on the largest scale of all ranks.
    pub fn canonical_v2_part(part: &Part, dtype: ScalarType, input: ScalarType) -> Result<Self> {
        let Part { split, weight } = part;
        if split.ranks > 1 && input == ScalarType::INT8 && weight.scales.rows() > 1 {
            let what = format!("{}: int8 activations with group scales over ranks", weight.name);
            return Err(Error::unsupported(what, WHOLE_K));
        }
        let mut schedule = Self::canonical(weight, dtype, input)?.with_leaves(*split);
        schedule.epilogue = rank_epilogue();
        Ok(schedule)
    }

    /// `self`, canonical, with the leaves of a rank.
    fn with_leaves(mut self, split: Split) -> Self {
        if Self::canonical_leaves(split.size_k) == 1 {
            return self;
        }
        let cut = Cut::version_2(split);
        self.chunks = match cut.leaf.is_multiple_of(cut.chunk) {
            true => Chunks::Size(cut.chunk),
            false => Chunks::Boundaries(cut.begins().skip(1).collect()),
        };
        self.leaf_chunks = (cut.chunk < cut.leaf).then(|| cut.leaf_chunks());
        self.chunk_sum = Sum { order: Order::Pairwise, ty: F32 };
        self
    }

    /// The outputs `[M, N]` of a product from the f32 sums `[M, N]` of its ranks, in order of rank, as
    /// bits of the output's type: the upper levels of the tree, then the epilogue of `self`, the
    /// schedule of the whole product. `own` is any rank's part: its bias and its scales of columns or of
    /// the matrix are every rank's.
    ///
    /// # Errors
    /// [`Error::Size`] for another number of sums than ranks; [`Error::Shape`] for sums and extras of
    /// another shape; [`ScheduleError::Value`] for a schedule other than version 2 of this K, or one
    /// rank's; the errors of [`Schedule::execute`] for the weight.
    pub fn add_ranks(
        &self,
        parts: &[ArrayView2<'_, f32>],
        own: &Part,
        extras: Extras<'_>,
    ) -> Result<Array2<u32>> {
        let Part { split, weight } = own;
        if parts.len() != split.ranks {
            return Err(Error::size("parts", parts.len(), split.ranks));
        }
        self.expect_version_2(split.size_k)?;
        let (size_m, size_n) = (parts[0].nrows(), weight.shape().size_n);
        if let Some(part) = parts.iter().find(|p| p.dim() != (size_m, size_n)) {
            return Err(Error::shape("parts", part.shape(), format!("[{size_m}, {size_n}]")));
        }
        self.expect_extras([size_m, weight.scales.rows()], extras)?;
        let tree = Self { chunks: Chunks::Whole, leaf_chunks: None, ..self.clone() };
        let plan = Plan::new(&tree, weight, None, f32::NEG_INFINITY)?;
        let rows: Vec<Vec<f32>> = parts.iter().map(|p| row_major(*p).into_owned()).collect();
        let mut y = vec![0; size_m * size_n];
        for first in (0..size_n).step_by(LANES) {
            let operands = plan.columns(first)?.operands;
            let width = LANES.min(size_n - first);
            for m in 0..size_m {
                let at = m * size_n + first;
                let lane =
                    |row: &[f32], l: usize| if l < width { row[at + l].to_bits() } else { 0 };
                let mut sums: Vec<Lanes> =
                    rows.iter().map(|row| std::array::from_fn(|l| lane(row, l))).collect();
                let operands = operands.map(|o| Operands {
                    activation_scale: extras.activation_scales.map(|all| all[m]),
                    router_weight: extras.router_weights.map(|all| all[m]),
                    ..o
                });
                let lanes = plan.finish_chunks(&mut sums, m, first, &operands);
                y[at..at + width].copy_from_slice(&lanes[..width]);
            }
        }
        Ok(Array2::from_shape_vec((size_m, size_n), y).expect("every output"))
    }

    /// Refuses schedules other than version 2 of `size_k`, and one rank's.
    fn expect_version_2(&self, size_k: usize) -> Result<()> {
        let v1 = Self {
            chunks: Chunks::Size(Self::canonical_chunk(size_k)),
            leaf_chunks: None,
            chunk_sum: Sum::default(),
            ..self.clone()
        };
        let v2 = v1.with_leaves(Split::whole(size_k));
        let of_rank = self.epilogue == rank_epilogue();
        let keys = [
            ("chunks", format!("{:?}", self.chunks), format!("{:?}", v2.chunks)),
            ("leaf_chunks", format!("{:?}", self.leaf_chunks), format!("{:?}", v2.leaf_chunks)),
            ("chunk_sum", format!("{:?}", self.chunk_sum), format!("{:?}", v2.chunk_sum)),
        ];
        if let Some((key, found, expected)) = keys.into_iter().find(|(_, f, e)| f != e) {
            let expected = format!("{expected}, as canonical_v2 has for {size_k} k");
            return Err(ScheduleError::value(key, found, expected).into());
        }
        if of_rank {
            let found = "a rank's, which rounds to float32 alone";
            return Err(ScheduleError::value("epilogue", found, "the whole product's").into());
        }
        Ok(())
    }
}

/// The last step of a rank's sum.
fn rank_epilogue() -> Vec<Step> {
    vec![step(StepOp::Round, F32)]
}
