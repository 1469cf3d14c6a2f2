//! The sum over a token's experts: `down` [M · top_k, H] to `y` [M, H].
//!
//! | chain | operations |
//! | --- | --- |
//! | [`Chain::Canonical`] | f32 from the first slot to the last, one rounding to the 16-bit type |
//! | [`Chain::Upstream`], top_k 2, 3, 4 | from zero on, each addition rounded to the 16-bit type, first slot to last (`moe_sum`) |
//! | [`Chain::Upstream`], other top_k | f32, one rounding (`at::sum`, whose order may differ from this module's) |
//!
//! Both start from +0, so that a sum of negative zeros is +0. A NaN gives NaN, as do infinities of
//! both signs.
//!
//! # A shared expert
//!
//! Its output `[M, H]` is added after the slots: by [`Chain::Canonical`] in f32 before the rounding, by
//! [`Chain::Upstream`] to the rounded sum, with one more rounding (`routed + shared` of two tensors). A bound
//! permits both, and f32 in any order.
//!
//! # Bounds
//!
//! f32 in any order with one rounding at the end, or for top_k 2, 3, 4 upstream's chain. In f32,
//! each addition errs by at most u = 2^-24 of its result; a partial sum is at most A = Σ|x|, so
//! top_k terms err by at most u·((top_k − 2)·A·(1 + top_k·u) + |Σ|). There is no error if every
//! term is a multiple of one power of two g ≥ 2^-126, A ≤ 2^24·g and A is at most the largest f32,
//! because then every partial sum is such a multiple, too; nor is there one for the sum of two numbers
//! of a 16-bit type, once it is rounded to that type (24 ≥ 2·11 + 2 digits). Subnormal results may be
//! flushed to zero, and partial sums above the largest f32 may be infinite.

use ndarray::{Array2, ArrayView3, s};

use super::{Chain, half_type, narrow, widen};
use crate::num::array::{FloatView3, HalfArray2};
use crate::num::interval::{Bound, FLUSH, Interval, U, WIDEN, round_once};
use crate::num::scalar::ScalarType;
use crate::{Error, Result};

/// Whether upstream adds in the 16-bit type.
const fn in_half(top_k: usize) -> bool {
    matches!(top_k, 2..=4)
}

/// The rows of one token.
fn check(len: usize, ty: ScalarType, top_k: usize, size_n: usize) -> Result<usize> {
    half_type(ty)?;
    let rows = top_k.checked_mul(size_n).filter(|&n| n > 0);
    match rows.filter(|&n| len.is_multiple_of(n)) {
        Some(rows) => Ok(rows),
        None => Err(Error::shape("down", &[len], format!("[M, {top_k}, {size_n}]"))),
    }
}

/// `y` `[M, H]` of `down` `[M, top_k, H]`, f16 or bf16.
///
/// # Errors
/// [`Error::Shape`] when a token has no slots or no columns; [`Error::Unsupported`] for f32.
///
/// ```
/// use marlinspike::moe::{Chain, sum::sum};
/// use marlinspike::num::element::f16;
/// use ndarray::array;
///
/// // One token, three slots, two columns.
/// let down = array![[[1.0f32, 2.0], [10.0, 20.0], [100.0, 200.0]]].mapv(f16::from_f32);
/// let y = sum(down.view(), Chain::Canonical)?.into_array::<f16>()?;
/// assert_eq!(y, array![[111.0f32, 222.0]].mapv(f16::from_f32));
/// # Ok::<(), marlinspike::Error>(())
/// ```
pub fn sum<'a>(down: impl Into<FloatView3<'a>>, chain: Chain) -> Result<HalfArray2> {
    let down = down.into();
    let (ty, shape) = (down.scalar_type(), down.shape());
    let (tokens, top_k, size_n) = (shape[0], shape[1], shape[2]);
    let y = sum_bits(&down.bits_of("down", ty)?, ty, top_k, size_n, chain)?;
    HalfArray2::from_bits("y", ty, [tokens, size_n], y)
}

/// [`sum`] of bits of `ty`, row-major.
pub(crate) fn sum_bits(
    down: &[u16],
    ty: ScalarType,
    top_k: usize,
    size_n: usize,
    chain: Chain,
) -> Result<Vec<u16>> {
    sum_bits_with((down, None), ty, top_k, size_n, chain)
}

/// [`sum_bits`] of `down`, and the output `[M, H]` of a shared expert.
pub(crate) fn sum_bits_with(
    (down, shared): (&[u16], Option<&[u16]>),
    ty: ScalarType,
    top_k: usize,
    size_n: usize,
    chain: Chain,
) -> Result<Vec<u16>> {
    let rows = check(down.len(), ty, top_k, size_n)?;
    check_shared(shared, down.len() / top_k)?;
    let half = chain == Chain::Upstream && in_half(top_k);
    let mut y = Vec::with_capacity(down.len() / top_k);
    for (m, token) in down.chunks_exact(rows).enumerate() {
        y.extend((0..size_n).map(|n| {
            let slots = (0..top_k).map(|j| widen(ty, token[j * size_n + n]));
            let add = |acc: f32, x: f32| {
                if half { widen(ty, narrow(ty, acc + x)) } else { acc + x }
            };
            let routed = slots.fold(0.0, add);
            match (shared, chain) {
                (None, _) => narrow(ty, routed),
                (Some(all), Chain::Canonical) => {
                    narrow(ty, routed + widen(ty, all[m * size_n + n]))
                }
                (Some(all), Chain::Upstream) => {
                    let routed = widen(ty, narrow(ty, routed));
                    narrow(ty, routed + widen(ty, all[m * size_n + n]))
                }
            }
        }));
    }
    Ok(y)
}

/// Checks that a shared expert has a value for each of `len` outputs.
fn check_shared<T>(shared: Option<&[T]>, len: usize) -> Result<()> {
    match shared {
        Some(all) if all.len() != len => {
            Err(Error::shape("shared_output", &[all.len()], format!("{len} values, as y")))
        }
        _ => Ok(()),
    }
}

/// The largest power of two that `x` is a multiple of; infinite for zero.
fn quantum(x: f64) -> f64 {
    if x == 0.0 || !x.is_finite() {
        return f64::INFINITY;
    }
    // Every number of a 16-bit type is a normal f64.
    let bits = x.to_bits() & ((1 << 52) - 1) | 1 << 52;
    let exponent = (x.to_bits() >> 52 & 0x7ff) as i32 - 1075;
    2f64.powi(exponent + bits.trailing_zeros() as i32)
}

/// The bound of one output whose terms are the `slots` of a token, first to last; the interval of a
/// known term is a point.
///
/// ```
/// use marlinspike::num::interval::Bound;
/// use marlinspike::moe::sum::bound;
/// use marlinspike::num::scalar::ScalarType;
///
/// let y = bound(&[1.0, 2.0, 4.5].map(Bound::exactly), ScalarType::FLOAT16);
/// assert_eq!((y.exact, y.interval.lo, y.interval.hi), (7.5, 7.5, 7.5));
/// ```
pub fn bound(slots: &[Bound], ty: ScalarType) -> Bound {
    let mut out = in_f32(slots, ty);
    if in_half(slots.len()) {
        let (chain, nan) = chain_in_half(slots, ty);
        out.nan |= nan;
        if !chain.is_empty() {
            out.interval = out.interval.hull(chain);
        }
    }
    out
}

/// The bound of one output whose terms are the `slots` of a token and the value of a shared expert: in f32 in any
/// order with one rounding, or added to the rounded sum of the slots.
pub(crate) fn bound_with(slots: &[Bound], shared: Option<Bound>, ty: ScalarType) -> Bound {
    let Some(shared) = shared else { return bound(slots, ty) };
    let mut out = in_f32(&[slots, &[shared]].concat(), ty);
    let (sums, nan) = chain_in_half(&[bound(slots, ty), shared], ty);
    out.nan |= nan;
    out.interval = match (out.interval.is_empty(), sums.is_empty()) {
        (_, true) => out.interval,
        (true, false) => sums,
        (false, false) => out.interval.hull(sums),
    };
    out
}

/// The interval with each addition rounded to `ty`, and whether NaN is possible. The f64 sum of two
/// numbers of a 16-bit type rounds to it as the exact one does (53 ≥ 2·11 + 2 digits).
fn chain_in_half(slots: &[Bound], ty: ScalarType) -> (Interval, bool) {
    let mut acc = Interval::point(0.0);
    let mut nan = false;
    for slot in slots {
        nan |= slot.nan;
        if slot.interval.is_empty() {
            return (Interval::EMPTY, true);
        }
        let (up, down) = (f64::INFINITY, f64::NEG_INFINITY);
        nan |= acc.hi == up && slot.interval.lo == down || acc.lo == down && slot.interval.hi == up;
        let (lo, hi) = (acc.lo + slot.interval.lo, acc.hi + slot.interval.hi);
        // ∞ − ∞ at the lower ends: one of the two is certainly +∞, and where the other one is not −∞ the sum is +∞. At the
        // upper ends likewise.
        acc = match (lo.is_nan(), hi.is_nan()) {
            (true, true) => return (Interval::EMPTY, true),
            (true, false) => Interval::point(up),
            (false, true) => Interval::point(down),
            (false, false) => Interval { lo, hi }.rounded_once(ty),
        };
    }
    (acc, nan)
}

/// Whether one slot may be +∞ and another one −∞, whose sum is NaN.
fn opposite_infinities(slots: &[Bound]) -> bool {
    let places = |of: fn(&Bound) -> bool| {
        let mut at = (0..slots.len()).filter(move |&i| of(&slots[i]));
        (at.next(), at.next())
    };
    let up = places(|s| s.interval.hi == f64::INFINITY);
    let down = places(|s| s.interval.lo == f64::NEG_INFINITY);
    match (up, down) {
        // The same slot cannot be both.
        ((Some(a), None), (Some(b), None)) => a != b,
        ((up, _), (down, _)) => up.is_some() && down.is_some(),
    }
}

fn in_f32(slots: &[Bound], ty: ScalarType) -> Bound {
    let nan = slots.iter().any(|s| s.nan) || opposite_infinities(slots);
    let exact: f64 = slots.iter().map(|s| s.exact).sum();
    if slots.iter().any(|s| s.interval.is_empty()) {
        return Bound { exact, interval: Interval::EMPTY, nan: true };
    }
    let (mut lo, mut hi, mut size, mut grid) = (0.0, 0.0, 0.0, f64::INFINITY);
    for i in slots.iter().map(|s| s.interval) {
        (lo, hi) = (lo + i.lo, hi + i.hi);
        size += i.magnitude();
        grid = f64::min(grid, if i.is_point() { quantum(i.lo) } else { 0.0 });
    }
    if lo.is_nan() || hi.is_nan() {
        // Infinities of both signs give NaN if both are certain, otherwise anything.
        let must = lo.is_nan() && hi.is_nan();
        let all = Interval { lo: f64::NEG_INFINITY, hi: f64::INFINITY };
        let interval = if must { Interval::EMPTY } else { all };
        return Bound { exact: if must { f64::NAN } else { exact }, interval, nan: true };
    }
    let exact_terms = grid >= FLUSH && size <= (grid / U).min(f32::MAX.into());
    if exact_terms || slots.len() <= 2 && grid >= FLUSH {
        // One term, or two values of the type.
        let interval = Interval { lo, hi }.rounded_once(ty);
        return Bound { exact, interval, nan };
    }
    let k = slots.len() as f64;
    let flush = if grid < FLUSH { k * FLUSH } else { 0.0 };
    let error = |end: f64, ends: f64| {
        // A rounded sum grows with each term, so terms of unknown size do not move the other end.
        let size = if size.is_finite() { size } else { ends };
        let inner = (k - 2.0).max(0.0) * size * (1.0 + k * U);
        U * (inner + end.abs()) * (1.0 + k * U) + size * WIDEN + flush
    };
    let mut wide = Interval { lo, hi };
    if lo.is_finite() {
        wide.lo -= error(lo, slots.iter().map(|s| s.interval.lo.abs()).sum());
    }
    if hi.is_finite() {
        wide.hi += error(hi, slots.iter().map(|s| s.interval.hi.abs()).sum());
    }
    let mut nan = nan;
    if size * (1.0 + k * U) > f64::from(f32::MAX) && slots.len() > 2 {
        // A partial sum may overflow in some orders.
        let (negative, positive) = slots
            .iter()
            .fold((0.0, 0.0), |(n, p), s| (n + s.interval.lo.min(0.0), p + s.interval.hi.max(0.0)));
        let most = f64::from(f32::MAX) / (1.0 + k * U);
        let (below, above) = (negative < -most, positive > most);
        if below {
            wide.lo = f64::NEG_INFINITY;
        }
        if above {
            wide.hi = f64::INFINITY;
        }
        nan |= below && above;
    }
    let lo = round_once(ty, wide.lo).min(wide.rounded(ty).lo);
    let hi = round_once(ty, wide.hi).max(wide.rounded(ty).hi);
    Bound { exact, interval: Interval { lo, hi }, nan }
}

/// The bounds `[M, H]` of the sum of `down` `[M, top_k, H]`, from the bounds of the previous stage.
///
/// # Errors
/// As [`sum`].
pub fn bounds(down: ArrayView3<'_, Bound>, ty: ScalarType) -> Result<Array2<Bound>> {
    bounds_with(down, None, ty)
}

/// [`bounds`] with the output `[M, H]` of a shared expert, bits of `ty`.
pub(crate) fn bounds_with(
    down: ArrayView3<'_, Bound>,
    shared: Option<&[u16]>,
    ty: ScalarType,
) -> Result<Array2<Bound>> {
    let (tokens, top_k, size_n) = down.dim();
    check(down.len(), ty, top_k, size_n)?;
    check_shared(shared, tokens * size_n)?;
    Ok(Array2::from_shape_fn((tokens, size_n), |(m, n)| {
        let shared = shared.map(|all| value(all[m * size_n + n], ty));
        bound_with(&down.slice(s![m, .., n]).to_vec(), shared, ty)
    }))
}

/// A known value of `ty`.
fn value(bits: u16, ty: ScalarType) -> Bound {
    Bound::exactly(f64::from(widen(ty, bits)))
}
