//! Sorting by `g_idx`, and sharding of scales.

use marlinspike::act_order;
use marlinspike::num::dims::{GroupSize, LogicalK};
use marlinspike::num::scalar::ScalarType;
use marlinspike::vectors::Rng;
use marlinspike::{Error, Result};
use proptest::prelude::*;

use super::{fill, one_of};
use crate::Operation;
use crate::mutant::{Mutant, common, mutant, with};

/// `marlin_sort_g_idx`: the output is the permutation and then the sorted groups. Any permutation
/// that sorts is accepted.
#[derive(Debug)]
pub struct Sort;

/// Arguments of [`Sort`].
#[derive(Debug, Clone)]
pub struct SortInput {
    /// Group of each row.
    pub g_idx: Vec<u32>,
}

impl Operation for Sort {
    const NAME: &'static str = "marlin_sort_g_idx";
    type Input = SortInput;
    type Element = u32;

    fn inputs() -> BoxedStrategy<SortInput> {
        (one_of(&[32usize, 128, 256]), 1usize..9, any::<u64>(), any::<bool>())
            .prop_map(|(size_k, groups, seed, full)| {
                let mut rng = Rng::new(seed);
                let mut g_idx: Vec<u32> =
                    (0..size_k).map(|k| (k * groups / size_k) as u32).collect();
                if full {
                    rng.shuffle(&mut g_idx);
                } else {
                    g_idx.iter_mut().for_each(|g| *g = rng.below(groups) as u32);
                }
                SortInput { g_idx }
            })
            .boxed()
    }

    fn expected(input: &SortInput) -> Result<Vec<u32>> {
        let sorted = act_order::sort(&input.g_idx);
        Ok([sorted.perm, sorted.g_idx].concat())
    }

    fn place(input: &SortInput, element: usize, _bit: u32) -> String {
        match element.checked_sub(input.g_idx.len()) {
            None => format!("sorted row {element} (g_idx_sort_indices)"),
            Some(k) => format!("sorted row {k} (sorted_g_idx)"),
        }
    }

    fn describe(input: &SortInput) -> String {
        format!("size_k {}", input.g_idx.len())
    }

    fn accepts(input: &SortInput, found: &[u32]) -> bool {
        let (perm, sorted) = found.split_at(input.g_idx.len());
        act_order::expect_sorting(&input.g_idx, perm).is_ok()
            && act_order::gather(&input.g_idx, perm) == sorted
    }
}

/// The scale rows of a row-parallel rank: all of them with act-order or channel-wise scales,
/// otherwise those of its slice of K.
#[derive(Debug)]
pub struct ShardScales;

/// Arguments of [`ShardScales`].
#[derive(Debug, Clone)]
pub struct ShardInput {
    /// `[groups, size_n]` of the whole matrix.
    pub scales: Vec<u16>,
    /// Rows of the whole matrix.
    pub size_k: usize,
    /// Columns.
    pub size_n: usize,
    /// −1 or the group.
    pub group_size: i64,
    /// Whether rows belong to groups by a `g_idx` (compressed-tensors: `actorder` `group`).
    pub desc_act: bool,
    /// compressed-tensors' `actorder` `static` (`weight`): groups are uniform nevertheless.
    pub static_order: bool,
    /// Ranks.
    pub tp_size: usize,
    /// This one.
    pub tp_rank: usize,
}

impl Operation for ShardScales {
    const NAME: &'static str = "row_parallel_scales";
    type Input = ShardInput;
    type Element = u16;

    fn inputs() -> BoxedStrategy<ShardInput> {
        let sizes = (one_of(&[256usize, 512]), one_of(&[64usize, 192]), one_of(&[-1i64, 32, 64]));
        (sizes, 0u32..3, one_of(&[2usize, 4]), any::<prop::sample::Index>(), fill())
            .prop_map(|((size_k, size_n, group_size), order, tp_size, rank, fill)| {
                let groups = if group_size < 0 { 1 } else { size_k / group_size as usize };
                ShardInput {
                    scales: fill.scales(groups * size_n, ScalarType::FLOAT16, 0),
                    size_k,
                    size_n,
                    group_size,
                    desc_act: order == 1,
                    static_order: order == 2,
                    tp_size,
                    tp_rank: rank.index(tp_size),
                }
            })
            .boxed()
    }

    fn expected(i: &ShardInput) -> Result<Vec<u16>> {
        let group = GroupSize::from_config(i.group_size)?;
        let rows = act_order::k_slice(i.size_k, i.tp_size, i.tp_rank)?;
        let groups = match group {
            GroupSize::Of(g) if !i.desc_act => {
                if !rows.start.is_multiple_of(g) {
                    return Err(Error::size("rows of a rank", rows.len(), "whole groups"));
                }
                rows.start / g..rows.end / g
            }
            _ => 0..group.groups(LogicalK(i.size_k))?,
        };
        Ok(i.scales[groups.start * i.size_n..groups.end * i.size_n].to_vec())
    }

    fn place(i: &ShardInput, element: usize, _bit: u32) -> String {
        format!("(group {} of the rank, n {})", element / i.size_n, element % i.size_n)
    }

    fn describe(i: &ShardInput) -> String {
        let ShardInput { size_k, size_n, group_size, desc_act, static_order, .. } = i;
        format!(
            "size_k {size_k} size_n {size_n} group_size {group_size} desc_act {desc_act} static \
             {static_order} rank {} of {}",
            i.tp_rank, i.tp_size
        )
    }
}

/// Wrong variants of the operations.
pub(crate) fn mutants() -> Vec<Mutant> {
    let mut all = vec![
        with::<ShardScales>("act-order: scales cut along K all the same", |i| i.desc_act = false),
        with::<ShardScales>("grouped scales not cut along K", |i| i.desc_act = true),
        with::<ShardScales>("actorder static taken for group", |i| i.desc_act |= i.static_order),
        mutant::<ShardScales>("group_size -1 used as a stride", |i| {
            let out = ShardScales::expected(i)?;
            if i.group_size != -1 {
                return Ok(out);
            }
            let start = i.tp_rank * (i.size_k / i.tp_size) / i.group_size.unsigned_abs() as usize;
            Ok((0..out.len()).map(|n| i.scales[(start + 32 + n) % i.scales.len()]).collect())
        }),
        mutant::<Sort>("sorted in descending order", |i| {
            let out = Sort::expected(i)?;
            let (perm, g_idx) = out.split_at(i.g_idx.len());
            Ok(perm.iter().rev().chain(g_idx.iter().rev()).copied().collect())
        }),
        mutant::<Sort>("the inverse permutation", |i| {
            let sorted = act_order::sort(&i.g_idx);
            Ok([act_order::inverse(&sorted.perm)?, sorted.g_idx].concat())
        }),
        mutant::<Sort>("sorted g_idx, identity permutation", |i| {
            let identity = (0..i.g_idx.len() as u32).collect();
            Ok([identity, act_order::sort(&i.g_idx).g_idx].concat())
        }),
    ];
    all.extend(common::<ShardScales>());
    all.extend(common::<Sort>());
    all
}
