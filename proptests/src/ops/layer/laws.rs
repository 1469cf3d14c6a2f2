//! Properties of every Mixture-of-Experts layer, independent of its format.
//!
//! Each property takes the implementation as a closure, so it can be tested on any kernel:
//!
//! ```
//! use marlinspike_proptests::SubjectError;
//! use marlinspike_proptests::ops::layer::laws;
//! use marlinspike_proptests::ops::{LayerInput, moe_lattice};
//!
//! let config = &moe_lattice()?[0];
//! let input = LayerInput::draw(config, 7, 3)?;
//! // Your kernel here; this is the reference.
//! let forward = |i: &LayerInput| {
//!     let stages = i.local().and_then(|local| local.stages(i));
//!     stages.map(|s| s.y.into_bits()).map_err(|e| SubjectError(e.to_string()))
//! };
//! for law in laws::LAWS {
//!     (law.check)(&forward, &input).map_err(|f| format!("{}: {}", law.name, f.what))?;
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Properties that compare bits hold for batch-invariant kernels, properties that compare bounds
//! for every kernel. A property that does not apply to an input (a rank would cut a group, there is
//! no act-order) passes; one that moves experts, rows or columns between ranks tests the whole layer
//! of a rank's input.

use std::cell::Cell;

use marlinspike::moe::batched;
use marlinspike::moe::layer::sum_of_ranks;
use marlinspike::moe::sum;
use marlinspike::num::array::FloatView2;
use marlinspike::num::interval::Bound;
use marlinspike::num::scalar::ScalarType;
use marlinspike::products::Convention;
use marlinspike::products::schedule::ScheduleError;
use marlinspike::vectors::Rng;
use marlinspike::weight::{Groups, Weight};
use marlinspike::{Error, act_order};

use super::{LayerInput, MoeLayer, failure, stable};
use crate::{Failure, Law, Operation, Subject, SubjectError};

/// An implementation: `y` `[M, H]` of an input.
pub type Forward<'f> = dyn Fn(&LayerInput) -> Result<Vec<u16>, SubjectError> + 'f;

/// A property of layers.
#[derive(Debug, Clone, Copy)]
pub struct LayerLaw {
    /// Name, as reports print it.
    pub name: &'static str,
    /// Tests it on one input; `Err` describes the violation.
    pub check: fn(&Forward<'_>, &LayerInput) -> Result<(), Failure>,
}

macro_rules! laws {
    ($($check:ident $name:literal),+ $(,)?) => {
        /// All properties.
        pub const LAWS: &[LayerLaw] = &[$(LayerLaw { name: $name, check: $check }),+];

        /// The same as properties of the operation.
        pub(crate) fn own() -> Vec<Law<MoeLayer>> {
            vec![$(Law { name: $name, check: |s, i| on(s, i, $check) }),+]
        }
    };
}

/// The properties that compare bits of whole outputs, for an operation with other arithmetic than
/// Marlin's.
pub(crate) fn of_bits<O: Operation<Input = LayerInput, Element = u16>>() -> Vec<Law<O>> {
    macro_rules! of_bits {
        ($($check:ident $name:literal,)+) => {
            vec![$(Law {
                name: $name,
                check: |s, i| on(s, i, $check),
            }),+]
        };
    }
    of_bits! {
        tokens_permute "tokens in another order give the rows in that order",
        batch_splits "a batch in two parts gives the same bits",
        row_alone "a token alone gives the bits that it has in the batch",
        padding_tokens "tokens without experts are zero and change nothing",
        padding_experts "experts without tokens change nothing",
        experts_permute "experts in another order, ids with them, change nothing",
        power_of_two "router weights times two give y times two",
        batched_form "the batched form gives the bits of the flat one",
    }
}

laws! {
    repeatable "the same input gives the same bits again",
    within_bounds "every value within the bound of a known convention",
    tokens_permute "tokens in another order give the rows in that order",
    batch_splits "a batch in two parts gives the same bits",
    row_alone "a token alone gives the bits that it has in the batch",
    padding_tokens "tokens without experts are zero and change nothing",
    padding_experts "experts without tokens change nothing",
    experts_permute "experts in another order, ids with them, change nothing",
    tensor_parallel "the sum of tensor-parallel ranks is within the bound of the whole",
    expert_parallel "the sum of expert-parallel ranks is the whole",
    sorted_act_order "a sorted g_idx is no act-order",
    permuted_act_order "permuted rows with their g_idx and columns of x change nothing",
    power_of_two "router weights times two give y times two",
    batched_form "the batched form gives the bits of the flat one",
}

/// A property of a subject. It does not apply if it derives an input that the subject does not take: a rank's
/// sizes, another order of rows, larger scales.
fn on<O>(
    subject: &dyn Subject<O>,
    input: &LayerInput,
    check: fn(&Forward<'_>, &LayerInput) -> Result<(), Failure>,
) -> Result<(), Failure>
where
    O: Operation<Input = LayerInput, Element = u16>,
{
    let left_out = Cell::new(false);
    let forward = |derived: &LayerInput| {
        if !subject.takes(derived) {
            left_out.set(true);
            return Err(SubjectError("it does not take this input".to_owned()));
        }
        of(subject, derived)
    };
    let outcome = check(&forward, input);
    if left_out.get() { Ok(()) } else { outcome }
}

fn of<O>(subject: &dyn Subject<O>, input: &LayerInput) -> Result<Vec<u16>, SubjectError>
where
    O: Operation<Input = LayerInput, Element = u16>,
{
    let mut y = vec![0; input.x.len()];
    subject.call(input, &mut y)?;
    Ok(y)
}

fn refused(input: &LayerInput) -> impl Fn(Error) -> Failure {
    move |e| failure(input, format!("the reference refused: {e}"), None)
}

fn run(forward: &Forward<'_>, input: &LayerInput) -> Result<Vec<u16>, Failure> {
    let y = forward(input)
        .map_err(|e| failure(input, format!("the implementation failed: {e}"), None))?;
    match y.len() == input.x.len() {
        true => Ok(y),
        false => Err(failure(input, format!("{} values in y", y.len()), None)),
    }
}

/// The random generator of a property, derived from the input's seed.
fn rng(input: &LayerInput, law: u64) -> Rng {
    Rng::for_case(input.seed, !law)
}

fn equal(input: &LayerInput, what: &str, expected: &[u16], found: &[u16]) -> Result<(), Failure> {
    let differ = |&i: &usize| expected[i] != found[i];
    let mut wrong = (0..expected.len().min(found.len())).filter(differ);
    match wrong.next() {
        None if expected.len() == found.len() => Ok(()),
        None => Err(failure(input, format!("{what}: lengths differ"), None)),
        Some(i) => {
            let at = (1 + wrong.count(), i, expected[i], found[i]);
            Err(failure(input, what.to_owned(), Some(at)))
        }
    }
}

/// Rows `tokens` of `y`.
fn rows(input: &LayerInput, y: &[u16], tokens: impl IntoIterator<Item = usize>) -> Vec<u16> {
    let h = input.config.hidden_size;
    tokens.into_iter().flat_map(|t| y[t * h..(t + 1) * h].iter().copied()).collect()
}

fn allowed(input: &LayerInput, what: &str, bounds: &[Bound], found: &[u16]) -> Result<(), Failure> {
    let ty = input.config.quant.dtype;
    let ratio = |i: usize| bounds[i].ratio(ty.to_f64(found[i].into()) as f32);
    let mut wrong = (0..found.len()).filter(|&i| ratio(i) > 1.0);
    let Some(i) = wrong.next() else { return Ok(()) };
    let exact = marlinspike::num::scalar::f64_to_f16_rne(bounds[i].exact);
    let bf16 = marlinspike::num::scalar::f64_to_bf16_rne(bounds[i].exact);
    let expected = if ty == ScalarType::FLOAT16 { exact } else { bf16 };
    let what = format!("{what}: {} times the bound", ratio(i));
    Err(failure(input, what, Some((1 + wrong.count(), i, expected, found[i]))))
}

/// The conventions of dequantizing kernels.
fn conventions() -> impl Iterator<Item = &'static (&'static str, Convention)> {
    Convention::NAMED.iter().rev().filter(|(_, convention)| convention.dequantizes())
}

/// Checks that a kernel of a known convention may compute `y`.
pub(crate) fn in_bounds(input: &LayerInput, y: &[u16]) -> Result<(), Failure> {
    let mut first = None;
    for (name, convention) in conventions() {
        let bounds = input.bounds(*convention).map_err(refused(input))?;
        match allowed(input, &format!("outside the bound of `{name}`"), &bounds, y) {
            Ok(()) => return Ok(()),
            Err(failure) => first = Some(failure),
        }
    }
    first.map_or(Ok(()), Err)
}

/// Three calls give the same bits.
pub fn repeatable(forward: &Forward<'_>, input: &LayerInput) -> Result<(), Failure> {
    let first = run(forward, input)?;
    (0..2).try_for_each(|_| equal(input, "another call", &first, &run(forward, input)?))
}

/// `y` is within the bound of one convention, in any order of additions.
pub fn within_bounds(forward: &Forward<'_>, input: &LayerInput) -> Result<(), Failure> {
    in_bounds(input, &run(forward, input)?)
}

/// y(P·x) = P·y(x) bit for bit.
pub fn tokens_permute(forward: &Forward<'_>, input: &LayerInput) -> Result<(), Failure> {
    let mut order: Vec<usize> = (0..input.size_m()).collect();
    rng(input, 1).shuffle(&mut order);
    let permuted = input.with_tokens(&order);
    let expected = rows(input, &run(forward, input)?, order);
    equal(&permuted, "permuted tokens", &expected, &run(forward, &permuted)?)
}

/// Two parts of a batch give the rows of the batch bit for bit.
pub fn batch_splits(forward: &Forward<'_>, input: &LayerInput) -> Result<(), Failure> {
    let at = rng(input, 2).below(input.size_m() + 1);
    let mut parts = Vec::new();
    for part in [0..at, at..input.size_m()].into_iter().filter(|p| !p.is_empty()) {
        parts.extend(run(forward, &input.with_tokens(&part.collect::<Vec<_>>()))?);
    }
    equal(input, "a batch in two parts", &parts, &run(forward, input)?)
}

/// A row alone equals its row in the batch bit for bit.
pub fn row_alone(forward: &Forward<'_>, input: &LayerInput) -> Result<(), Failure> {
    let token = rng(input, 3).below(input.size_m());
    let alone = input.with_tokens(&[token]);
    let expected = rows(input, &run(forward, input)?, [token]);
    equal(&alone, "a token alone", &expected, &run(forward, &alone)?)
}

/// A token without an expert gives zeros and does not change the others.
pub fn padding_tokens(forward: &Forward<'_>, input: &LayerInput) -> Result<(), Failure> {
    let tokens: Vec<usize> = (0..input.size_m()).flat_map(|t| [t, t]).collect();
    let mut padded = input.with_tokens(&tokens);
    let top_k = input.config.top_k;
    for ids in padded.topk_ids.chunks_mut(2 * top_k) {
        ids[top_k..].fill(-1);
    }
    let y = run(forward, input)?;
    let mut expected = rows(input, &y, tokens);
    let h = input.config.hidden_size;
    expected.chunks_mut(2 * h).for_each(|pair| pair[h..].fill(0));
    equal(&padded, "tokens without experts in between", &expected, &run(forward, &padded)?)
}

/// Experts without tokens change nothing.
pub fn padding_experts(forward: &Forward<'_>, input: &LayerInput) -> Result<(), Failure> {
    let input = &input.whole();
    let mut more = input.clone();
    more.config.num_experts += 2;
    let twice = |all: &mut Vec<Weight<'static>>| {
        let copies: Vec<_> = (0..2).map(|e| all[e % all.len()].clone()).collect();
        all.extend(copies);
    };
    twice(&mut more.w13);
    twice(&mut more.w2);
    for orders in more.orders.iter_mut().flatten() {
        let copies: Vec<_> = (0..2).map(|e| orders[e % orders.len()].clone()).collect();
        orders.extend(copies);
    }
    equal(&more, "experts without tokens", &run(forward, input)?, &run(forward, &more)?)
}

/// Renumbered experts change nothing.
pub fn experts_permute(forward: &Forward<'_>, input: &LayerInput) -> Result<(), Failure> {
    let input = &input.whole();
    // Position e of the new order holds expert `order[e]`.
    let mut order: Vec<u32> = (0..input.config.num_experts as u32).collect();
    rng(input, 4).shuffle(&mut order);
    let place = act_order::inverse(&order).map_err(refused(input))?;
    let mut other = input.clone();
    let take = |all: &[Weight<'static>]| order.iter().map(|&e| all[e as usize].clone()).collect();
    (other.w13, other.w2) = (take(&input.w13), take(&input.w2));
    for orders in other.orders.iter_mut().flatten() {
        *orders = order.iter().map(|&e| orders[e as usize].clone()).collect();
    }
    for id in other.topk_ids.iter_mut().filter(|id| **id >= 0) {
        *id = place[*id as usize] as i32;
    }
    equal(&other, "renumbered experts", &run(forward, input)?, &run(forward, &other)?)
}

/// Each rank gives its share; their sum is within the sum of the ranks' bounds, whose exact results
/// add up to the whole layer's.
fn shares_add_up(
    forward: &Forward<'_>,
    input: &LayerInput,
    ranks: &[LayerInput],
    what: &str,
) -> Result<(), Failure> {
    let outputs = ranks.iter().map(|r| run(forward, r)).collect::<Result<Vec<_>, _>>()?;
    let (ty, sixteen_bits) = (input.config.quant.dtype, input.config.quant.input_dtype.is_none());
    let h = input.config.hidden_size;
    let views = outputs.iter().map(|y| FloatView2::from_rows("y", ty, h, y));
    let found = views
        .collect::<marlinspike::Result<Vec<_>>>()
        .and_then(|views| sum_of_ranks(&views))
        .map_err(refused(input))?
        .into_bits();
    let mut first = None;
    for (_, convention) in conventions() {
        let of = |r: &LayerInput| r.bounds(*convention).map_err(refused(input));
        let each = ranks.iter().map(of).collect::<Result<Vec<_>, _>>()?;
        let sum = |i: usize| sum::bound(&each.iter().map(|b| b[i]).collect::<Vec<_>>(), ty);
        let bounds: Vec<Bound> = (0..input.x.len()).map(sum).collect();
        let whole = input.bounds(*convention).map_err(refused(input))?;
        // The exact results in f64; the quantized activations of a rank differ.
        let apart = |&i: &usize| {
            let (sum, whole) = (bounds[i].exact, whole[i].exact);
            let size: f64 = each.iter().map(|b| b[i].exact.abs()).sum();
            // f64 rounds terms that may be far larger than a share, which the bounds grow with.
            let width: f64 = each.iter().map(|b| b[i].interval.hi - b[i].interval.lo).sum();
            let rounding = 1e-9 * size + 1e-3 * width;
            size.is_finite() && whole.is_finite() && (sum - whole).abs() > rounding
        };
        if let Some(i) = (0..bounds.len()).find(apart).filter(|_| sixteen_bits) {
            let what = format!("{what}: the ranks' matrices are not parts of the whole");
            return Err(failure(input, what, Some((1, i, 0, found[i]))));
        }
        match allowed(input, what, &bounds, &found) {
            Ok(()) => return Ok(()),
            Err(failure) => first = Some(failure),
        }
    }
    first.map_or(Ok(()), Err)
}

/// w13 cut along N in each half, w2 along K.
pub fn tensor_parallel(forward: &Forward<'_>, input: &LayerInput) -> Result<(), Failure> {
    let input = &input.whole();
    let ranks: Vec<LayerInput> = (0..2).map(|rank| input.on_rank(2, rank)).collect();
    let cuts_a_group = ranks.iter().any(|r| {
        let stages = r.local().and_then(|l| l.stages(r));
        stages.is_err_and(|e| {
            matches!(e, Error::Size { .. }) || e.downcast_ref::<ScheduleError>().is_some()
        })
    });
    if cuts_a_group || input.shares_a_scale() {
        return Ok(());
    }
    shares_add_up(forward, input, &ranks, "the sum of two tensor-parallel ranks")
}

/// Each rank has some of the experts. A token whose experts are all on one rank has the bits of the
/// whole layer there and zeros elsewhere; the shares of other tokens add up within the bound.
pub fn expert_parallel(forward: &Forward<'_>, input: &LayerInput) -> Result<(), Failure> {
    let input = &input.whole();
    let experts = input.config.num_experts;
    if experts < 2 || input.shares_a_scale() {
        return Ok(());
    }
    let ranks: Vec<LayerInput> = (0..2).map(|rank| input.on_expert_rank(2, rank)).collect();
    let y = run(forward, input)?;
    // The first rank has the larger half.
    let on_first = |id: i32| (id as usize) < experts.div_ceil(2);
    let top_k = input.config.top_k;
    for (r, rank) in ranks.iter().enumerate() {
        let found = run(forward, rank)?;
        for (token, ids) in input.topk_ids.chunks_exact(top_k).enumerate() {
            let here = ids.iter().filter(|&&id| id >= 0 && on_first(id) == (r == 0)).count();
            let there = ids.iter().filter(|&&id| id >= 0).count() - here;
            let whole = rows(input, &y, [token]);
            let found = rows(input, &found, [token]);
            let alone = rank.with_tokens(&[token]);
            match (here, there) {
                (0, _) => {
                    let zeros = vec![0; whole.len()];
                    equal(&alone, "a token without experts on this rank", &zeros, &found)?;
                }
                (_, 0) => {
                    equal(&alone, "a token with all its experts on this rank", &whole, &found)?;
                }
                _ => {}
            }
        }
    }
    shares_add_up(forward, input, &ranks, "the sum of two expert-parallel ranks")
}

/// Whether a matrix has groups of k that `desc_act` can reorder.
fn has_groups(input: &LayerInput) -> bool {
    let q = &input.config.quant;
    q.checkpoint_format.has_act_order()
        && q.group_size != marlinspike::num::dims::GroupSize::Channel
}

/// A `g_idx` in ascending order is equivalent to none.
pub fn sorted_act_order(forward: &Forward<'_>, input: &LayerInput) -> Result<(), Failure> {
    if !has_groups(input) || input.config.quant.desc_act {
        return Ok(());
    }
    let mut sorted = input.clone();
    sorted.config.quant.desc_act = true;
    for w in sorted.w13.iter_mut().chain(&mut sorted.w2) {
        let g_idx = (0..w.shape().size_k).map(|k| w.groups.group_of(k) as u32).collect();
        w.groups = Groups::Indexed { g_idx, group_size: w.groups.group_size() };
    }
    sorted.orders = [stable(&sorted.w13), stable(&sorted.w2)];
    equal(&sorted, "a sorted g_idx", &run(forward, input)?, &run(forward, &sorted)?)
}

/// Rows of w13 permuted with its `g_idx` and the columns of x, rows of w2 with its `g_idx` and the
/// columns of w13: the same sums in the same order, since the sorting permutations change
/// accordingly.
pub fn permuted_act_order(forward: &Forward<'_>, input: &LayerInput) -> Result<(), Failure> {
    let input = &input.whole();
    if !has_groups(input) {
        return Ok(());
    }
    let mut rng = rng(input, 5);
    let (h, i) = (input.config.hidden_size, input.config.intermediate_size);
    let mut shuffled = |len: usize| {
        let mut order: Vec<u32> = (0..len as u32).collect();
        rng.shuffle(&mut order);
        order
    };
    let (by_h, by_i) = (shuffled(h), shuffled(i));
    let make = || -> marlinspike::Result<LayerInput> {
        let mut other = input.clone();
        other.config.quant.desc_act = true;
        let columns = input.w13_columns(by_i.iter().map(|&i| i as usize));
        let gather = |w: &Weight<'static>, perm: &[u32], columns: Option<&[usize]>| {
            let w = w.gather_rows(perm)?;
            columns.map_or_else(|| Ok(w.clone()), |c| w.gather_columns(c))
        };
        let all = |weights: &[Weight<'static>], perm: &[u32], columns: Option<&[usize]>| {
            weights
                .iter()
                .map(|w| gather(w, perm, columns))
                .collect::<marlinspike::Result<Vec<_>>>()
        };
        other.w13 = all(&input.w13, &by_h, Some(&columns))?;
        other.w2 = all(&input.w2, &by_i, None)?;
        for (which, perm) in [(0, &by_h), (1, &by_i)] {
            // Row j holds the former row perm[j], so the sorted order maps to the new positions.
            let place = act_order::inverse(perm)?;
            let len = place.len() as u32;
            let old = input.orders[which].clone();
            let old = old.unwrap_or_else(|| vec![(0..len).collect(); input.config.num_experts]);
            let follow = |o: &Vec<u32>| o.iter().map(|&k| place[k as usize]).collect();
            other.orders[which] = Some(old.iter().map(follow).collect());
        }
        let row = |row: &[u16]| by_h.iter().map(|&k| row[k as usize]).collect::<Vec<_>>();
        other.x = input.x.chunks_exact(h).flat_map(row).collect();
        Ok(other)
    };
    let other = make().map_err(refused(input))?;
    equal(&other, "permuted rows and g_idx", &run(forward, input)?, &run(forward, &other)?)
}

/// Twice the router weights, twice the output: every step after them is linear. Tested with
/// bfloat16, which has the range of f32, away from its limits.
pub fn power_of_two(forward: &Forward<'_>, input: &LayerInput) -> Result<(), Failure> {
    let ty = input.config.quant.dtype;
    if ty != ScalarType::BFLOAT16 || input.config.apply_router_weight_on_input {
        return Ok(());
    }
    let mut twice = input.clone();
    twice.topk_weights.iter_mut().for_each(|w| *w *= 2.0);
    let (once, found) = (run(forward, input)?, run(forward, &twice)?);
    let exponent = |bits: u16| bits >> 7 & 0xff;
    let expected: Vec<u16> = once
        .iter()
        .zip(&found)
        .map(|(&bits, &found)| match exponent(bits) {
            32..=220 => bits + (1 << 7),
            // Values near underflow and overflow are skipped.
            _ => found,
        })
        .collect();
    equal(&twice, "router weights times two", &expected, &found)
}

/// Tokens sorted by expert into batches with unused slots, as after an all-to-all.
pub fn batched_form(forward: &Forward<'_>, input: &LayerInput) -> Result<(), Failure> {
    // One expert per row: every (token, slot) becomes a token.
    let tokens: Vec<usize> =
        (0..input.topk_ids.len()).map(|row| row / input.config.top_k).collect();
    let mut flat = input.clone();
    flat.config.top_k = 1;
    flat.config.size_m = tokens.len();
    let h = input.config.hidden_size;
    flat.x = tokens.iter().flat_map(|&t| input.x[t * h..(t + 1) * h].iter().copied()).collect();
    let experts = input.config.num_experts;
    let mut counts = vec![0i32; experts];
    for &id in &flat.topk_ids {
        counts[id as usize] += 1;
    }
    let max_tokens = counts.iter().max().map_or(1, |&m| m as usize + 1);
    let places = batched::experts_of_rows(max_tokens, &counts).map_err(refused(input))?;
    // The row at each position; an unused position holds the values of another row.
    let mut waiting: Vec<Vec<usize>> = vec![Vec::new(); experts];
    for (row, &id) in flat.topk_ids.iter().enumerate().rev() {
        waiting[id as usize].push(row);
    }
    let at: Vec<usize> =
        places.iter().map(|e| e.and_then(|e| waiting[e].pop()).unwrap_or(0)).collect();
    let mut batch = flat.with_tokens(&at);
    for (id, place) in batch.topk_ids.iter_mut().zip(&places) {
        *id = place.map_or(-1, |e| e as i32);
    }
    let y = run(forward, &flat)?;
    let mut expected = rows(&flat, &y, at.iter().copied());
    for (row, place) in expected.chunks_mut(h).zip(&places) {
        if place.is_none() {
            row.fill(0);
        }
    }
    equal(&batch, "the batched form", &expected, &run(forward, &batch)?)
}
