//! The inner loop of the exact product: sums over blocks of k, and the quantities tracked with
//! them.
//!
//! Plain f64 arithmetic on arrays of [`TILE`] columns, compiled for the machine's vector
//! instructions. The caller chooses ranges in which sums are exact, so every instruction set and
//! every order of addition gives the same bits.

// The compiler vectorizes indexed loops over lanes.
#![allow(clippy::needless_range_loop)]

use super::columns::TILE;
use super::rows::Range;

/// One lane per column.
pub(super) type Lanes = [f64; TILE];

/// Rows multiplied at once.
pub(super) const ROWS: usize = 4;

/// One word per column: a bit for each of 64 numbers.
pub(super) type SignLanes = [u64; TILE];

/// The partial sums that a class of kernels may form: in a contiguous range of periods of `period`
/// blocks of k, one aligned run of `length` blocks in each (a warp's share).
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stripe {
    /// Blocks of k in a period.
    pub period: usize,
    /// Blocks of k in a run; divides the period.
    pub length: usize,
}

/// The prefix sums of one series of blocks: their extremes bound every sum of a range of them.
#[derive(Debug, Clone, Copy)]
struct Series {
    sum: Lanes,
    least: Lanes,
    greatest: Lanes,
}

/// The sums tracked for one row and [`TILE`] columns.
#[derive(Debug, Clone)]
pub(super) struct Track {
    /// The exact sum is `hi + lo`.
    pub(super) hi: Lanes,
    pub(super) lo: Lanes,
    /// Σ |a·w|.
    pub(super) absolute: Lanes,
    series: Vec<Series>,
}

impl Track {
    pub(super) fn new(stripes: &[Stripe]) -> Self {
        let zero = [0.0; TILE];
        let count = stripes.iter().map(|s| s.period / s.length).sum();
        let series = vec![Series { sum: zero, least: zero, greatest: zero }; count];
        Self { hi: zero, lo: zero, absolute: zero, series }
    }

    pub(super) fn clear(&mut self) {
        let zero = [0.0; TILE];
        (self.hi, self.lo, self.absolute) = (zero, zero, zero);
        self.series.fill(Series { sum: zero, least: zero, greatest: zero });
    }

    /// The largest magnitude of a sum over a range of one series.
    pub(super) fn reach(&self, column: usize) -> f64 {
        let span = |s: &Series| s.greatest[column] - s.least[column];
        self.series.iter().map(span).fold(0.0, f64::max)
    }

    /// Adds the sums of another part.
    pub(super) fn merge(&mut self, other: &Self) {
        self.add_exact(&other.hi);
        for j in 0..TILE {
            self.lo[j] += other.lo[j];
        }
    }

    /// Adds the exact sums of a block.
    #[inline(always)]
    fn add_exact(&mut self, v: &Lanes) {
        for j in 0..TILE {
            let (a, b) = (self.hi[j], v[j]);
            let sum = a + b;
            // Knuth's two-sum: the rounding error, exactly.
            let part = sum - a;
            self.lo[j] += (a - (sum - part)) + (b - part);
            self.hi[j] = sum;
        }
    }

    #[inline(always)]
    fn add_walk(&mut self, block: usize, v: &Lanes, stripes: &[Stripe]) {
        let mut first = 0;
        for stripe in stripes {
            let series = &mut self.series[first + block % stripe.period / stripe.length];
            for j in 0..TILE {
                let sum = series.sum[j] + v[j];
                series.sum[j] = sum;
                series.least[j] = if sum < series.least[j] { sum } else { series.least[j] };
                series.greatest[j] =
                    if sum > series.greatest[j] { sum } else { series.greatest[j] };
            }
            first += stripe.period / stripe.length;
        }
    }
}

/// The quantities that a pass computes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pass<'p> {
    /// k per block.
    pub(super) block: usize,
    /// Whether block sums enter the exact sum.
    pub(super) exact: bool,
    /// Whether magnitudes are summed.
    pub(super) absolute: bool,
    /// The partial sums that are tracked.
    pub(super) stripes: &'p [Stripe],
}

/// The pass, compiled for each instruction set.
#[inline(always)]
pub(super) fn body(
    rows: [&[f64]; ROWS],
    tile: &[Lanes],
    pass: Pass<'_>,
    tracks: &mut [Track; ROWS],
) {
    if pass.absolute {
        blocks::<true>(rows, tile, pass, tracks);
    } else {
        blocks::<false>(rows, tile, pass, tracks);
    }
}

#[inline(always)]
fn blocks<const ABSOLUTE: bool>(
    rows: [&[f64]; ROWS],
    tile: &[Lanes],
    pass: Pass<'_>,
    tracks: &mut [Track; ROWS],
) {
    let size_k = tile.len();
    for (block, start) in (0..size_k).step_by(pass.block).enumerate() {
        let end = size_k.min(start + pass.block);
        let w = &tile[start..end];
        let a = rows.map(|row| &row[start..end]);
        let mut sums = [[0.0; TILE]; ROWS];
        let mut magnitudes = [[0.0; TILE]; ROWS];
        for k in 0..w.len() {
            for r in 0..ROWS {
                let x = a[r][k];
                for j in 0..TILE {
                    let product = x * w[k][j];
                    sums[r][j] += product;
                    if ABSOLUTE {
                        magnitudes[r][j] += product.abs();
                    }
                }
            }
        }
        for r in 0..ROWS {
            if pass.exact {
                tracks[r].add_exact(&sums[r]);
            }
            if ABSOLUTE {
                for j in 0..TILE {
                    tracks[r].absolute[j] += magnitudes[r][j];
                }
            }
            tracks[r].add_walk(block, &sums[r], pass.stripes);
        }
    }
}

/// For each column: the smallest lowest set bit, the largest magnitude, and whether it has
/// infinities or NaN.
pub(super) struct Ends {
    least: Lanes,
    greatest: Lanes,
    special: Lanes,
}

impl Ends {
    /// The ranges of the columns.
    pub(super) fn ranges(&self) -> [Range; TILE] {
        let exponent = |x: f64| (x.to_bits() >> 52) as i32 - 1023;
        std::array::from_fn(|j| {
            let special = self.special[j] != 0.0;
            match self.greatest[j] {
                0.0 => Range { special, ..Range::EMPTY },
                greatest => {
                    Range { low: exponent(self.least[j]), high: exponent(greatest) + 1, special }
                }
            }
        })
    }
}

/// The [`Ends`] of a tile, compiled for each instruction set.
#[inline(always)]
pub(super) fn ends(tile: &[Lanes]) -> Ends {
    const MANTISSA: u64 = (1 << 52) - 1;
    let (mut least, mut greatest) = ([f64::INFINITY; TILE], [0.0; TILE]);
    let mut special = [0.0; TILE];
    for w in tile {
        for j in 0..TILE {
            let x = w[j].abs();
            // Clears the lowest set mantissa bit; a power of two has none.
            let bits = x.to_bits();
            let rest = f64::from_bits(bits & bits.wrapping_sub(1));
            let lowest = if bits & MANTISSA == 0 { x } else { x - rest };
            let finite = x < f64::INFINITY;
            special[j] = if finite { special[j] } else { 1.0 };
            let counts = finite & (x > 0.0);
            least[j] = if counts & (lowest < least[j]) { lowest } else { least[j] };
            greatest[j] = if counts & (x > greatest[j]) { x } else { greatest[j] };
        }
    }
    Ends { least, greatest, special }
}

/// Appends to `out`, for each 64 rows of a tile, the masks of negative and of nonzero values; compiled
/// for each instruction set.
#[inline(always)]
pub(super) fn sign_words(tile: &[Lanes], out: &mut Vec<[SignLanes; 2]>) {
    for rows in tile.chunks(64) {
        let (mut negative, mut some) = ([0; TILE], [0; TILE]);
        for (k, w) in rows.iter().enumerate() {
            for j in 0..TILE {
                negative[j] |= u64::from(w[j] < 0.0) << k;
                some[j] |= u64::from(w[j] != 0.0) << k;
            }
        }
        out.push([negative, some]);
    }
}
