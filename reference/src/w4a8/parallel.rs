//! Work on consecutive parts of memory, distributed over rayon's current pool without allocations.

use std::ops::Range;

/// Slices that can be split in two.
pub(super) trait Split: Send + Sized {
    /// The first `at` units, and the rest.
    fn split(self, at: usize) -> (Self, Self);
}

impl<T: Send> Split for &mut [T] {
    fn split(self, at: usize) -> (Self, Self) {
        self.split_at_mut(at)
    }
}

impl<A: Split, B: Split> Split for (A, B) {
    fn split(self, at: usize) -> (Self, Self) {
        let ((a, rest_a), (b, rest_b)) = (self.0.split(at), self.1.split(at));
        ((a, b), (rest_a, rest_b))
    }
}

/// Rows of `width` values each: a unit is a row.
pub(super) struct Wide<'a, T> {
    pub(super) values: &'a mut [T],
    pub(super) width: usize,
}

impl<T: Send> Split for Wide<'_, T> {
    fn split(self, at: usize) -> (Self, Self) {
        let (a, b) = self.values.split_at_mut(at * self.width);
        (Self { values: a, width: self.width }, Self { values: b, width: self.width })
    }
}

/// Calls `work` once for each of `items` with its part of `parts`: part i is units `start(i)` to
/// `start(i + 1)`, and `parts` begins with the first item's.
///
/// Ranges of more than `grain` items are split in halves for other threads. Each thread processes its
/// items in ascending order. Nothing is allocated.
pub(super) fn for_parts<S: Split>(
    items: Range<usize>,
    parts: S,
    grain: usize,
    start: &(impl Fn(usize) -> usize + Sync),
    work: &(impl Fn(usize, S) + Sync),
) {
    if items.len() > grain.max(1) {
        let middle = items.start + items.len() / 2;
        let (left, right) = parts.split(start(middle) - start(items.start));
        rayon::join(
            || for_parts(items.start..middle, left, grain, start, work),
            || for_parts(middle..items.end, right, grain, start, work),
        );
        return;
    }
    let mut rest = parts;
    for item in items {
        let (part, after) = rest.split(start(item + 1) - start(item));
        work(item, part);
        rest = after;
    }
}
