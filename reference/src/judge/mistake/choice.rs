//! What it costs to say which values are wrong, in bits. Values chosen because they are wrong are no
//! evidence, unless a short description gives them: whole lines, ranges, every second line, tiles.

use std::collections::HashSet;

use super::MARGIN;

/// The bits that name the lines `set`, ascending, among `total`.
pub(crate) fn of_lines(set: &[usize], total: usize) -> f64 {
    let count = set.len();
    let (Some(&first), Some(&last)) = (set.first(), set.last()) else { return 0.0 };
    if count >= total {
        return 0.0;
    }
    let all = total as f64;
    let mut least = combinations(total, count);
    let step = if count > 1 { (last - first) / (count - 1) } else { 1 };
    if set.windows(2).all(|pair| pair[1] - pair[0] == step) {
        let range = (all * (all + 1.0) / 2.0).log2();
        least = least.min(range + if step > 1 { all.log2() } else { 0.0 });
    }
    let contains = |line: usize| set.binary_search(&line).is_ok();
    let sizes = || std::iter::successors(Some(2usize), |s| Some(s * 2)).take_while(|&s| s < total);
    for size in sizes().filter(|size| total.is_multiple_of(*size)) {
        // The same lines of each period; whole tiles.
        let which = size.ilog2() as f64;
        if count.is_multiple_of(total / size) {
            let of_each = count / (total / size);
            if set.iter().all(|line| (line % size..total).step_by(size).all(contains)) {
                least = least.min(combinations(size, of_each) + which);
            }
        }
        if count.is_multiple_of(size) {
            let whole = |tile: &[usize]| {
                tile[0].is_multiple_of(size) && tile[size - 1] == tile[0] + size - 1
            };
            if set.chunks(size).all(whole) {
                least = least.min(combinations(total / size, count / size) + which);
            }
        }
    }
    least
}

/// The bits that name the rows and columns of the values `wrong`, indices into rows of `cols`.
pub(crate) fn of_rectangle(wrong: &[usize], [rows, cols]: [usize; 2]) -> f64 {
    let lines = |of: &dyn Fn(usize) -> usize| {
        let mut all: Vec<usize> = wrong.iter().map(|&i| of(i)).collect();
        all.sort_unstable();
        all.dedup();
        all
    };
    let cols_of = cols.max(1);
    of_lines(&lines(&|i| i / cols_of), rows) + of_lines(&lines(&|i| i % cols_of), cols)
}

/// The logarithm of the number of subsets of `count` among `total`.
pub(crate) fn combinations(total: usize, count: usize) -> f64 {
    let count = count.min(total - count.min(total));
    (0..count).map(|i| ((total - i) as f64 / (i + 1) as f64).log2()).sum()
}

/// Whether lines of `length` values that hold the content of others say more than the order costs, for
/// lines of a matrix with the given values.
pub(crate) fn is_specific(
    lines: usize,
    length: usize,
    values: impl IntoIterator<Item = u32>,
) -> bool {
    let kinds = values.into_iter().collect::<HashSet<u32>>().len().max(1) as f64;
    let order: f64 = (2..=lines).map(|n| (n as f64).log2()).sum();
    (lines * length) as f64 * kinds.log2() >= order + MARGIN
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_descriptions_are_cheap() {
        // 2598960 hands of 5 among 52 cards.
        assert!((combinations(52, 5) - 2_598_960f64.log2()).abs() < 1e-9);
        assert_eq!(combinations(8, 0), 0.0);
        let all: Vec<usize> = (0..256).collect();
        assert_eq!(of_lines(&all, 256), 0.0);
        // A range, every second line, a tile's column in each tile.
        assert!(of_lines(&all[64..128], 256) < 16.0);
        let even: Vec<usize> = (0..256).step_by(2).collect();
        assert!(of_lines(&even, 256) < 3.0);
        let of_tiles: Vec<usize> = (0..256).filter(|n| n % 16 == 3 || n % 16 == 9).collect();
        assert!(of_lines(&of_tiles, 256) < 12.0);
        // Arbitrary lines cost more than a bit each.
        let scattered: Vec<usize> = (0..256).filter(|n| n * n % 23 < 7).collect();
        assert!(of_lines(&scattered, 256) > scattered.len() as f64);
        assert_eq!(of_rectangle(&[3, 4, 11, 12], [2, 8]), of_lines(&[3, 4], 8));
    }

    #[test]
    fn orders_of_few_values_say_little() {
        // Lines of one value among two say little about their order.
        assert!(!is_specific(4, 1, [0x7f, 0x81, 0x7f, 0x81, 0x7f]));
        assert!(is_specific(4, 1, 0..200));
    }
}
