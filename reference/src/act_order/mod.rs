//! act-order: rows are quantized in a different order than they are stored.
//!
//! `g_idx[k]` is the scale group of row k. A kernel needs the rows of a group to be adjacent, so
//! the rows are gathered by a permutation that sorts `g_idx`, and the activations are gathered by
//! the same permutation. Upstream sorts with an unstable argsort (vLLM 0.21.0
//! `marlin_sort_g_idx`). Any permutation that sorts is valid; this module returns the stable one.

use std::ops::Range;

use crate::{Error, Result};

/// The order that makes `g_idx` ascending.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sorted {
    /// Row k of the sorted matrix is row `perm[k]` of the checkpoint
    /// (upstream `g_idx_sort_indices`).
    pub perm: Vec<u32>,
    /// `g_idx[perm[k]]`, ascending.
    pub g_idx: Vec<u32>,
}

/// Sorts `g_idx`, ties in ascending row order.
pub fn sort(g_idx: &[u32]) -> Sorted {
    let mut perm: Vec<u32> = (0..g_idx.len() as u32).collect();
    perm.sort_by_key(|&k| g_idx[k as usize]);
    let g_idx = gather(g_idx, &perm);
    Sorted { perm, g_idx }
}

/// `values[perm[i]]` for every i. Panics when an index is out of range.
pub fn gather<T: Copy>(values: &[T], perm: &[u32]) -> Vec<T> {
    perm.iter().map(|&p| values[p as usize]).collect()
}

/// The inverse of a permutation: `inverse[perm[i]] == i`. Fails if `perm` is not a permutation.
pub fn inverse(perm: &[u32]) -> Result<Vec<u32>> {
    expect_permutation(perm, perm.len())?;
    let mut inverse = vec![0; perm.len()];
    for (i, &p) in perm.iter().enumerate() {
        inverse[p as usize] = i as u32;
    }
    Ok(inverse)
}

/// Accepts any permutation of the rows that makes `g_idx` ascending. The error names the first
/// position that does not fit.
pub fn expect_sorting(g_idx: &[u32], perm: &[u32]) -> Result<()> {
    expect_permutation(perm, g_idx.len())?;
    let unsorted = perm.windows(2).position(|w| g_idx[w[0] as usize] > g_idx[w[1] as usize]);
    match unsorted {
        None => Ok(()),
        Some(i) => {
            let (a, b) = (g_idx[perm[i] as usize], g_idx[perm[i + 1] as usize]);
            Err(Error::value(
                "g_idx_sort_indices",
                &[i + 1],
                format!("row {} of group {b} after a row of group {a}", perm[i + 1]),
                "rows in ascending order of their groups",
            ))
        }
    }
}

/// Fails unless `perm` has `rows` entries below `rows`.
pub fn expect_rows(perm: &[u32], rows: usize) -> Result<()> {
    if perm.len() != rows {
        return Err(Error::shape("perm", &[perm.len()], format!("[{rows}]")));
    }
    match perm.iter().position(|&p| p as usize >= rows) {
        None => Ok(()),
        Some(i) => Err(Error::value("perm", &[i], perm[i], format!("a row below {rows}"))),
    }
}

/// Fails unless `perm` is a permutation of `0..rows`.
pub fn expect_permutation(perm: &[u32], rows: usize) -> Result<()> {
    expect_rows(perm, rows)?;
    let mut seen = vec![false; rows];
    match perm.iter().position(|&p| std::mem::replace(&mut seen[p as usize], true)) {
        None => Ok(()),
        Some(i) => {
            Err(Error::value("perm", &[i], format!("row {} again", perm[i]), "each row once"))
        }
    }
}

/// Whether `g_idx` is that of a checkpoint without act-order: row k in group k / group_size.
pub fn is_trivial(g_idx: &[u32], group_size: usize) -> bool {
    group_size > 0 && g_idx.iter().enumerate().all(|(k, &g)| g as usize == k / group_size)
}

/// Whether the ranks of a layer see all rows of each group they hold scales for
/// (upstream `marlin_is_k_full`).
pub fn is_k_full(desc_act: bool, is_row_parallel: bool) -> bool {
    !desc_act || !is_row_parallel
}

/// Rows of `rank` out of `ranks` when K is split (row-parallel layers).
///
/// Fails unless the ranks divide K. With act-order, a rank keeps its slice of `g_idx`, whose values
/// remain groups of the whole matrix, and all scales, since its rows may belong to any group.
pub fn k_slice(size_k: usize, ranks: usize, rank: usize) -> Result<Range<usize>> {
    if ranks == 0 || !size_k.is_multiple_of(ranks) {
        return Err(Error::size("size_k", size_k, format!("a multiple of {ranks} ranks")));
    }
    if rank >= ranks {
        return Err(Error::size("rank", rank, format!("below {ranks}")));
    }
    let rows = size_k / ranks;
    Ok(rank * rows..(rank + 1) * rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sort_is_stable_and_valid() {
        let sorted = sort(&[2, 0, 1, 0, 2, 1]);
        assert_eq!(sorted.perm, [1, 3, 2, 5, 0, 4]);
        assert_eq!(sorted.g_idx, [0, 0, 1, 1, 2, 2]);
        assert_eq!(inverse(&sorted.perm).unwrap(), [4, 0, 2, 1, 5, 3]);
    }

    #[test]
    fn any_sorting_permutation_is_accepted_and_nothing_else() {
        let g_idx = [1, 0, 1, 0];
        for perm in [[1, 3, 0, 2], [3, 1, 0, 2], [1, 3, 2, 0], [3, 1, 2, 0]] {
            expect_sorting(&g_idx, &perm).unwrap();
        }
        let unsorted = expect_sorting(&g_idx, &[0, 1, 2, 3]).unwrap_err();
        assert!(matches!(unsorted, Error::Value { ref index, .. } if index == &[1]), "{unsorted}");
        let later = expect_sorting(&[2, 0, 1, 0], &[1, 3, 0, 2]).unwrap_err().to_string();
        assert!(later.contains("row 2 of group 1 after a row of group 2"), "{later}");
        let repeated = expect_sorting(&g_idx, &[1, 1, 0, 2]).unwrap_err();
        assert!(matches!(repeated, Error::Value { ref index, .. } if index == &[1]), "{repeated}");
        let outside = expect_sorting(&g_idx, &[1, 3, 0, 4]).unwrap_err();
        assert!(matches!(outside, Error::Value { ref index, .. } if index == &[3]), "{outside}");
        let short = expect_sorting(&g_idx, &[1, 3, 0]).unwrap_err();
        assert!(matches!(short, Error::Shape { .. }), "{short}");
    }

    #[test]
    fn trivial_groups_are_consecutive() {
        assert!(is_trivial(&[0, 0, 1, 1, 2], 2));
        assert!(is_trivial(&[0, 1, 2], 1));
        assert!(!is_trivial(&[0, 0, 1, 0], 2));
        assert!(!is_trivial(&[0, 0], 0));
    }

    /// Upstream: `not act_order or (act_order and not is_row_parallel)`.
    #[test]
    fn only_row_parallel_act_order_sees_a_part_of_k() {
        assert!(is_k_full(false, false) && is_k_full(false, true) && is_k_full(true, false));
        assert!(!is_k_full(true, true));
    }

    #[test]
    fn slices_cover_k() {
        assert_eq!(k_slice(256, 2, 1).unwrap(), 128..256);
        assert!(matches!(k_slice(256, 3, 0), Err(Error::Size { .. })));
        assert!(matches!(k_slice(256, 2, 2), Err(Error::Size { .. })));
        assert!(matches!(k_slice(256, 0, 0), Err(Error::Size { .. })));
    }
}
