//! The exact matrix product: Σ a·w over the stored values without error.
//!
//! Columns are decoded a few at a time to f64, which represents every activation, weight and
//! product exactly. The ranges of the bits of a row and a column determine how many products can be
//! added without rounding: usually the 16 to 32 of a block of k, whose sums are added as an
//! unevaluated pair. A row with a wider range is cut into slices; if even slices do not fit,
//! products are added one by one to a [`Wide`] accumulator. The common case runs at the speed of
//! f64 multiplication.

use rayon::prelude::*;

use super::Wide;
use super::columns::{Columns, TILE};
use super::dispatch;
use super::kernel::{Pass, ROWS, SignLanes, Stripe, Track};
use super::rows::{Range, Rows};
use crate::{Error, Result};

/// The quantities that a product computes besides the sums.
#[derive(Debug, Clone, Copy, Default)]
pub struct Request<'r> {
    /// k per block, the unit of partial sums; 0 means 16.
    pub block: usize,
    /// Whether to compute Σ |a·w|.
    pub absolute: bool,
    /// The partial sums whose reach is computed.
    pub stripes: &'r [Stripe],
    /// Whether to count positive and negative products.
    pub signs: bool,
    /// A radius of uncertainty for each activation, to compute Σ radius·|w|.
    pub radius: Option<&'r Rows>,
}

/// One element of a product.
#[derive(Debug, Clone)]
pub struct Element<'e> {
    /// Row.
    pub m: usize,
    /// Column.
    pub n: usize,
    /// The sum as an unevaluated pair, if a pair can represent it.
    pair: [f64; 2],
    wide: Option<&'e Wide>,
    /// Upper bound of Σ |a·w|; 0 if not requested.
    pub absolute: f64,
    /// Upper bound of the magnitude of every partial sum of the stripes; 0 if not requested.
    pub reach: f64,
    /// Upper bound of Σ radius·|w|.
    pub carried: f64,
    /// Number of positive and of negative products; 0 if not requested.
    pub signs: [usize; 2],
    /// Range of the row's activations.
    pub row: Range,
    /// Range of the column's weights.
    pub column: Range,
    /// The activations of the row, and the tile with the weights of the column.
    values: &'e [f64],
    tile: &'e [[f64; TILE]],
    lane: usize,
}

impl Element<'_> {
    /// The sum.
    pub fn sum(&self) -> Wide {
        if let Some(wide) = self.wide {
            return wide.clone();
        }
        let mut sum = Wide::new();
        sum.add(self.pair[0]);
        sum.add(self.pair[1]);
        sum
    }

    /// The sum as an unevaluated pair, if a pair can represent it.
    pub(super) fn pair(&self) -> Option<[f64; 2]> {
        self.wide.is_none().then_some(self.pair)
    }

    /// The factors of each product: activation and weight, k ascending.
    pub fn products(&self) -> impl Iterator<Item = (f64, f64)> {
        self.values.iter().zip(self.tile).map(|(&a, w)| (a, w[self.lane]))
    }

    /// The sum as f64, to within a unit in the last place.
    pub fn value(&self) -> f64 {
        self.wide.map_or(self.pair[0] + self.pair[1], Wide::to_f64)
    }
}

/// Relative widening of magnitudes summed in f64; covers the errors of 2^20 additions.
const SLACK: f64 = 1.0 + 1.0 / (1u64 << 32) as f64;

/// Computes `rows` · `columns`, calls `each` for every element, and returns the results row by row.
///
/// # Errors
/// Returns an error if the `size_k` differ or the radii do not fit the rows.
pub fn product<R: Send>(
    rows: &Rows,
    columns: &dyn Columns,
    request: Request<'_>,
    each: impl Fn(&Element<'_>) -> R + Sync,
) -> Result<Vec<R>> {
    let (size_k, size_n) = (columns.size_k(), columns.size_n());
    if rows.size_k() != size_k {
        return Err(Error::size("size_k of the activations", rows.size_k(), size_k));
    }
    if let Some(r) = request.radius
        && (r.size_k(), r.rows()) != (size_k, rows.rows())
    {
        let expected = format!("[{}, {size_k}]", rows.rows());
        return Err(Error::shape("radii of the activations", &[r.rows(), r.size_k()], expected));
    }
    let signs: Vec<Signs> = match request.signs {
        true => (0..rows.rows()).map(|m| Signs::new(rows.row(m))).collect(),
        false => Vec::new(),
    };
    let starts: Vec<usize> = (0..size_n).step_by(TILE).collect();
    let tiles: Vec<Vec<R>> = starts
        .par_iter()
        .map_init(
            || Worker::new(size_k, request),
            |worker, &n0| worker.tile(rows, &signs, columns, n0, &each),
        )
        .collect();
    // Reorders results from tile order to row order.
    let mut tiles: Vec<_> = tiles.into_iter().map(Vec::into_iter).collect();
    let mut out = Vec::with_capacity(rows.rows() * size_n);
    for _ in 0..rows.rows() {
        for (tile, n0) in tiles.iter_mut().zip(&starts) {
            out.extend(tile.by_ref().take(TILE.min(size_n - n0)));
        }
    }
    Ok(out)
}

/// A thread's buffers.
struct Worker<'r> {
    request: Request<'r>,
    block: usize,
    tile: Vec<[f64; TILE]>,
    tracks: [Track; ROWS],
    slices: [Vec<f64>; ROWS],
    rest: Vec<f64>,
    wide: Wide,
    /// Signs of the tile's columns.
    signs: Vec<[SignLanes; 2]>,
}

/// Bit masks of the negative and of the nonzero values of a list.
#[derive(Debug, Clone, Default)]
struct Signs {
    words: Vec<[u64; 2]>,
}

impl Signs {
    fn new(values: &[f64]) -> Self {
        let masks = |values: &[f64]| {
            values.iter().enumerate().fold([0; 2], |[negative, some], (k, &x)| {
                [negative | u64::from(x < 0.0) << k, some | u64::from(x != 0.0) << k]
            })
        };
        Self { words: values.chunks(64).map(masks).collect() }
    }

    /// The number of positive and of negative products with column `j` of a tile.
    fn products(&self, tile: &[[SignLanes; 2]], j: usize) -> [usize; 2] {
        let (mut all, mut negative) = (0, 0);
        for (a, [signs, some]) in self.words.iter().zip(tile) {
            let some = a[1] & some[j];
            all += some.count_ones() as usize;
            negative += ((a[0] ^ signs[j]) & some).count_ones() as usize;
        }
        [all - negative, negative]
    }
}

/// The method for the sum of one row over a tile.
#[derive(Clone, Copy, PartialEq)]
enum Plan {
    /// Block sums are exact without slicing.
    Direct,
    /// The row is cut into slices of this many bits.
    Slices(i32),
    /// Products are added one by one.
    Wide,
}

impl<'r> Worker<'r> {
    fn new(size_k: usize, request: Request<'r>) -> Self {
        Self {
            request,
            block: if request.block == 0 { 16 } else { request.block },
            tile: vec![[0.0; TILE]; size_k],
            tracks: std::array::from_fn(|_| Track::new(request.stripes)),
            slices: Default::default(),
            rest: Vec::new(),
            wide: Wide::new(),
            signs: Vec::new(),
        }
    }

    fn tile<R>(
        &mut self,
        rows: &Rows,
        signs: &[Signs],
        columns: &dyn Columns,
        n0: usize,
        each: &impl Fn(&Element<'_>) -> R,
    ) -> Vec<R> {
        let width = TILE.min(columns.size_n() - n0);
        columns.tile(n0, &mut self.tile);
        let ranges = dispatch::ranges(&self.tile);
        if self.request.signs {
            self.signs.clear();
            dispatch::signs(&self.tile, &mut self.signs);
        }
        let mut out = Vec::with_capacity(rows.rows() * width);
        for first in (0..rows.rows()).step_by(ROWS) {
            self.four_rows(rows, signs, first, &ranges, n0, width, each, &mut out);
        }
        out
    }

    fn four_rows<R>(
        &mut self,
        rows: &Rows,
        signs: &[Signs],
        first: usize,
        ranges: &[Range; TILE],
        n0: usize,
        width: usize,
        each: &impl Fn(&Element<'_>) -> R,
        out: &mut Vec<R>,
    ) {
        let count = ROWS.min(rows.rows() - first);
        // The last group repeats the last row to fill up.
        let at = |r: usize| first + r.min(count - 1);
        let plans: [Plan; ROWS] = std::array::from_fn(|r| self.plan(rows.range(at(r)), ranges));
        let carried = self.carried(rows, at);
        self.tracks.iter_mut().for_each(Track::clear);
        let (block, request) = (self.block, self.request);
        let all = plans.iter().all(|p| *p == Plan::Direct);
        let (absolute, stripes) = (request.absolute, request.stripes);
        let pass = Pass { block, exact: all, absolute, stripes };
        dispatch::run(std::array::from_fn(|r| rows.row(at(r))), &self.tile, pass, &mut self.tracks);
        for r in 0..count {
            let m = first + r;
            if !all {
                self.slices(rows.row(m), rows.range(m), plans[r], r);
            }
            for (j, &column) in ranges.iter().enumerate().take(width) {
                let row = rows.range(m);
                let wide = plans[r] == Plan::Wide;
                if wide {
                    self.one_by_one(rows.row(m), row.special || column.special, j);
                }
                let track = &self.tracks[r];
                // Bound on the rounding errors of the prefix sums.
                let error =
                    row.magnitude() * column.magnitude() * self.tile.len() as f64 * (SLACK - 1.0)
                        / 1024.0;
                out.push(each(&Element {
                    m,
                    n: n0 + j,
                    pair: [track.hi[j], track.lo[j]],
                    wide: wide.then_some(&self.wide),
                    absolute: track.absolute[j] * SLACK,
                    reach: if stripes.is_empty() { 0.0 } else { track.reach(j) + error },
                    carried: carried[r][j],
                    signs: signs.get(m).map_or([0; 2], |s| s.products(&self.signs, j)),
                    row,
                    column,
                    values: rows.row(m),
                    tile: &self.tile,
                    lane: j,
                }));
            }
        }
    }

    /// Σ radius·|w| of four rows.
    fn carried(&mut self, rows: &Rows, at: impl Fn(usize) -> usize) -> [[f64; TILE]; ROWS] {
        let Some(radius) = self.request.radius else { return [[0.0; TILE]; ROWS] };
        debug_assert_eq!(radius.rows(), rows.rows());
        let pass = Pass { block: self.block, exact: false, absolute: true, stripes: &[] };
        let radii = std::array::from_fn(|r| radius.row(at(r)));
        let plain = &mut std::array::from_fn(|_| Track::new(&[]));
        dispatch::run(radii, &self.tile, pass, plain);
        std::array::from_fn(|r| plain[r].absolute.map(|x| x * SLACK))
    }

    /// The cheapest exact method; see the module documentation.
    fn plan(&self, row: Range, columns: &[Range; TILE]) -> Plan {
        let log2 = |n: usize| (n.max(1).next_power_of_two().trailing_zeros()) as i32;
        let size_k = self.tile.len();
        let bits = columns.iter().map(|c| c.bits()).max().unwrap_or(0);
        if row.special || columns.iter().any(|c| c.special) {
            return Plan::Wide;
        }
        // A block's sum has at most 53 bits.
        let room = 53 - log2(self.block) - bits;
        let slices = match room {
            r if r >= row.bits() => 1,
            8.. => row.bits() / room + 1,
            _ => return Plan::Wide,
        };
        // The pair: its low part collects the errors of `blocks` additions.
        let blocks = size_k.div_ceil(self.block) * slices as usize;
        if row.bits() + bits + log2(size_k) + log2(blocks) > 106 {
            return Plan::Wide;
        }
        if slices == 1 { Plan::Direct } else { Plan::Slices(room) }
    }

    /// Adds a row to its track in slices, highest bits first, as many at a time as a pass has rows.
    fn slices(&mut self, row: &[f64], range: Range, plan: Plan, r: usize) {
        let bits = match plan {
            Plan::Slices(bits) => bits,
            Plan::Direct => range.bits(),
            Plan::Wide => return,
        };
        if range.bits() == 0 {
            return;
        }
        let pass = Pass { block: self.block, exact: true, absolute: false, stripes: &[] };
        self.rest.clear();
        self.rest.extend_from_slice(row);
        self.slices.iter_mut().for_each(|slice| slice.resize(row.len(), 0.0));
        let (mut top, mut done) = (range.high, false);
        while !done {
            let mut filled = 0;
            for slice in &mut self.slices {
                if done {
                    slice.fill(0.0);
                    continue;
                }
                // Rounds to multiples of 2^unit: next to 1.5 · 2^(52 + unit), f64 has no lower
                // bits.
                let unit = (top - bits).max(range.low);
                let magic = 1.5 * f64::from(52 + unit).exp2();
                done = unit == range.low;
                for (slice, rest) in slice.iter_mut().zip(&mut self.rest) {
                    *slice = if done { *rest } else { (*rest + magic) - magic };
                    *rest -= *slice;
                }
                // Rounding to nearest leaves at most half a unit.
                top = unit - 1;
                filled += 1;
            }
            let mut tracks: [Track; ROWS] = std::array::from_fn(|_| Track::new(&[]));
            dispatch::run(self.slices.each_ref().map(Vec::as_slice), &self.tile, pass, &mut tracks);
            for track in &tracks[..filled] {
                self.tracks[r].merge(track);
            }
        }
    }

    /// The sum of column `j`, product by product.
    fn one_by_one(&mut self, row: &[f64], special: bool, j: usize) {
        self.wide.clear();
        for (x, w) in row.iter().zip(&self.tile) {
            // Zero times an infinity or NaN is NaN; otherwise zeros contribute nothing.
            if special || (*x != 0.0 && w[j] != 0.0) {
                self.wide.add_product(*x, w[j]);
            }
        }
    }
}
