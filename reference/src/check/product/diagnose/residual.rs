//! What is left of a wrong element when the exact one is taken away, as the contribution of a part
//! of the sum: a group or a range of k that was dropped or counted twice, a group with other
//! scales, one wrong weight.
//!
//! Contributions in f64 say which part comes into question; the bounds of the product without it
//! (or with it twice) decide.

use std::borrow::Cow;

use super::Finding;
use super::scene::{Edit, Scene, Setup, spread_to};
use crate::check::picture::Cause;
use crate::gemm::columns::TILE;
use crate::gemm::recipe::Operation;
use crate::gemm::{Columns, Extras, Recipe, Rule, WeightColumns};
use crate::scalar::ScalarType;
use crate::weight::{Codes, Weight};

/// Rows that a column is looked at in.
const ROWS: usize = 24;
/// Columns that a common cause is looked for in.
const COLUMNS: usize = 6;
/// Wrong columns that may each have a cause of their own.
const OWN_CAUSE: usize = 8;
/// k per step of Marlin's kernels.
const STEP: usize = 16;

/// The products of one column, over some rows.
pub(super) struct Terms<'s> {
    pub(super) part: usize,
    pub(super) n: usize,
    pub(super) weight: &'s Weight<'s>,
    /// Wrong rows first.
    pub(super) lines: Vec<Line>,
    /// Group and stored row of each k of the product.
    groups: Vec<usize>,
    stored: Vec<usize>,
}

/// The products of one element, as they enter the output.
pub(super) struct Line {
    wrong: bool,
    /// activation · weight times everything that multiplies the sum, for each k of the product.
    products: Vec<f64>,
    /// The same for a weight whose q − z is one.
    units: Vec<f64>,
    /// found − exact.
    pub(super) residual: f64,
    /// How far `residual` may be from what explains it.
    pub(super) tolerance: f64,
    pub(super) router: f64,
}

impl<'s> Terms<'s> {
    /// Of column `n` of a part; none where parts do not fit each other.
    pub(super) fn new(scene: &Scene<'s>, part: usize, n: usize) -> Option<Self> {
        let stage = scene.stage;
        let p = &stage.parts[part];
        let weight = p.weight;
        let order = scene.orders[part].as_deref();
        let mut rows: Vec<usize> =
            p.rows.iter().copied().filter(|&row| scene.is_wrong(row, n)).collect();
        rows = spread_to(&rows, ROWS / 2);
        let right: Vec<usize> =
            p.rows.iter().copied().filter(|&row| !scene.is_wrong(row, n)).collect();
        rows.extend(spread_to(&right, ROWS - rows.len()));
        let pick = |values: &[f32]| -> Vec<f32> { rows.iter().map(|&r| values[r]).collect() };
        let scales = stage.extras.activation_scales.map(pick);
        let routers = stage.extras.router_weights.map(pick);
        let extras =
            Extras { activation_scales: scales.as_deref(), router_weights: routers.as_deref() };
        let recipe = Recipe::new(stage.declared.convention, weight, stage.dtype, extras).ok()?;
        let columns =
            WeightColumns::new(weight, recipe.rule, order).ok()?.times_power(recipe.power);
        let size_k = weight.shape().size_k;
        let mut tile = vec![[0.0; TILE]; size_k];
        columns.tile(n / TILE * TILE, &mut tile);
        let mut activations = stage.rows.select(&rows)?;
        if let Some(order) = order {
            activations = activations.gather(order).ok()?;
        }
        let stored: Vec<usize> = (0..size_k).map(|k| order.map_or(k, |o| o[k] as usize)).collect();
        let one = weight.scales.rows() == 1;
        let groups: Vec<usize> =
            stored.iter().map(|&k| if one { 0 } else { weight.groups.group_of(k) }).collect();
        // What the product holds in the place of a weight whose q − z is one.
        let offset = f64::from(recipe.power).exp2();
        let unit = |k: usize| match recipe.rule {
            Rule::Unscaled => offset,
            _ => weight.scales.value(groups[k], n) * offset,
        };
        let units: Vec<f64> = (0..size_k).map(unit).collect();
        let line = |(m, &row): (usize, &usize)| {
            let steps = recipe.chain(weight, extras, m, n).steps;
            let multiplies = |o: &Operation| matches!(o, Operation::Multiply(..));
            let factor: f64 = recipe
                .operations
                .iter()
                .zip(&steps)
                .filter(|(o, _)| multiplies(o))
                .map(|(_, s)| s.operand)
                .product();
            let i = row * scene.size_n + n;
            let (b, found) = (&scene.bounded[i], scene.found[i]);
            let roundoff = if stage.dtype == ScalarType::FLOAT16 { 1e-3 } else { 8e-3 };
            let grown = (found.abs() - b.exact.abs()).max(0.0);
            Line {
                wrong: scene.is_wrong(row, n),
                products: activations
                    .row(m)
                    .iter()
                    .zip(&tile)
                    .map(|(x, w)| x * w[n % TILE] * factor)
                    .collect(),
                units: activations.row(m).iter().zip(&units).map(|(x, u)| x * u * factor).collect(),
                residual: found - b.exact,
                tolerance: b.below.max(b.above) + 4.0 * roundoff * grown,
                router: routers.as_ref().map_or(1.0, |w| f64::from(w[m])),
            }
        };
        let lines = rows.iter().enumerate().map(line).collect();
        Some(Self { part, n, weight, lines, groups, stored })
    }

    /// What each group contributes to an element.
    pub(super) fn by_group(&self, line: &Line) -> Vec<f64> {
        let mut sums = vec![0.0; self.weight.scales.rows()];
        self.groups.iter().zip(&line.products).for_each(|(&g, x)| sums[g] += x);
        sums
    }

    /// The lines that a common cause has to explain: the wrong ones, or all where they are few.
    fn judged(&self) -> impl Iterator<Item = &Line> {
        let wrong = self.lines.iter().filter(|l| l.wrong).count();
        self.lines.iter().filter(move |l| l.wrong || wrong < 2)
    }
}

/// A set of k whose products were left out or counted twice.
struct Part {
    id: &'static str,
    text: String,
    /// Of the k of the product.
    k: Vec<bool>,
    /// What the weights were multiplied by: 0 or 2.
    factor: f64,
}

/// The first part of the sum that explains the wrong elements.
pub(super) fn explain(scene: &Scene<'_>) -> Option<Finding> {
    let mut terms = Vec::new();
    for bad in scene.bad.iter().take(3) {
        let columns = spread_to(&bad.cols, COLUMNS);
        terms.extend(columns.into_iter().filter_map(|n| Terms::new(scene, bad.part, n)));
    }
    let first = terms.first()?;
    let dropped = |k: &[bool], factor: f64| {
        let edit = |at: usize, _: usize, w: f64| if k[at] { w * factor } else { w };
        confirmed(scene, &edit)
    };
    let mut parts = groups(&terms);
    // A range is one of many: two elements may have it by chance.
    if terms.iter().map(|t| t.judged().count()).sum::<usize>() >= 3 {
        parts.extend(ranges(&terms));
        parts.extend(single(&terms));
    }
    for part in parts.into_iter().take(8) {
        let edit: &(dyn Fn(usize, usize, f64) -> f64 + Sync) =
            &|at, _, w| if part.k[at] { w * part.factor } else { w };
        if dropped(&part.k, part.factor) {
            let mut finding = Finding::new(part.id, part.text.clone());
            match scene.unexplained(&|p| Some(scene.right(p)), Some(edit)) {
                Some(left) => finding.diagnosis.unexplained = left,
                None => finding.diagnosis.text += " (seen on a sample)",
            }
            finding.cause = Some(cause(first, |at| part.k[at]));
            return Some(finding);
        }
    }
    other_groups_scales(scene, &terms).or_else(|| one_code(scene)).or_else(|| one_scale(scene))
}

/// The picture of some k of the product.
fn cause(terms: &Terms<'_>, is: impl Fn(usize) -> bool) -> Cause {
    let size_k = terms.stored.len();
    let mut stored = vec![false; size_k];
    terms.stored.iter().enumerate().for_each(|(at, &k)| stored[k] |= is(at));
    let group_size = terms.weight.groups.group_size().rows(terms.weight.shape().k());
    Cause::new(size_k, group_size, |k| stored[k])
}

fn confirmed(scene: &Scene<'_>, edit: Edit<'_>) -> bool {
    let all = |list: &Vec<_>| {
        list.iter().all(|s: &super::scene::Sample| scene.holds(s, &scene.right(s.part), Some(edit)))
    };
    scene.samples().iter().any(all)
}

/// Whether `of(terms, line)` is what is left of every element.
fn fits<'t, 's: 't>(terms: &'t [Terms<'s>], of: impl Fn(usize, usize, &Line) -> f64) -> bool {
    terms.iter().enumerate().all(|(t, terms)| {
        terms.judged().enumerate().all(|(l, line)| {
            // Twice, since contributions are not rounded as the bound's numbers are.
            (line.residual - of(t, l, line)).abs() <= 2.0 * line.tolerance
        })
    })
}

const WAYS: [(f64, f64); 2] = [(-1.0, 0.0), (1.0, 2.0)];

fn groups(terms: &[Terms<'_>]) -> Vec<Part> {
    let first = &terms[0];
    let count = first.weight.scales.rows();
    if count == 1 {
        return Vec::new();
    }
    let sums: Vec<Vec<Vec<f64>>> =
        terms.iter().map(|t| t.judged().map(|l| t.by_group(l)).collect()).collect();
    let mut parts = Vec::new();
    for g in 0..count {
        for (sign, factor) in WAYS {
            if !fits(terms, |t, l, _| sign * sums[t][l][g]) {
                continue;
            }
            let k = first.groups.iter().map(|&group| group == g).collect();
            parts.push(if factor == 0.0 {
                let text = format!("group {g} of k is missing from the sum");
                Part { id: "group-dropped", text, k, factor }
            } else {
                let text = format!("group {g} of k was added twice");
                Part { id: "group-twice", text, k, factor }
            });
        }
    }
    parts
}

/// Contiguous ranges of [`STEP`]s, shortest first.
fn ranges(terms: &[Terms<'_>]) -> Vec<Part> {
    let size_k = terms[0].stored.len();
    let steps = size_k.div_ceil(STEP);
    let prefix = |line: &Line| {
        let mut sums = vec![0.0];
        let mut sum = 0.0;
        for step in line.products.chunks(STEP) {
            sum += step.iter().sum::<f64>();
            sums.push(sum);
        }
        sums
    };
    let sums: Vec<Vec<Vec<f64>>> = terms.iter().map(|t| t.judged().map(prefix).collect()).collect();
    let mut parts = Vec::new();
    for length in 1..steps {
        for from in 0..=steps - length {
            for (sign, factor) in WAYS {
                let sum = |t: usize, l: usize| sums[t][l][from + length] - sums[t][l][from];
                if !fits(terms, |t, l, _| sign * sum(t, l)) {
                    continue;
                }
                let (a, b) = (from * STEP, ((from + length) * STEP).min(size_k));
                let sorted = if terms[0].stored.iter().enumerate().all(|(i, &k)| i == k) {
                    ""
                } else {
                    " in sorted order"
                };
                let range = format!("k {a} to {}{sorted} ({})", b - 1, kind(a, b, size_k));
                let k = (0..size_k).map(|k| (a..b).contains(&k)).collect();
                parts.push(if factor == 0.0 {
                    let text = format!("{range} is missing from the sum");
                    Part { id: "k-range-dropped", text, k, factor }
                } else {
                    Part {
                        id: "k-range-twice",
                        text: format!("{range} was added twice"),
                        k,
                        factor,
                    }
                });
            }
        }
    }
    parts
}

/// What a range of k is to a kernel.
fn kind(a: usize, b: usize, size_k: usize) -> String {
    if b - a == STEP {
        return format!("k16 tile {}", a / STEP);
    }
    if a.is_multiple_of(64) && b.is_multiple_of(64) && b - a == 64 {
        return format!("k64 tile {}", a / 64);
    }
    match (a, b) {
        (0, _) => "a first chunk of k".to_owned(),
        (_, b) if b == size_k => "a last chunk of k".to_owned(),
        _ => format!("{} k16 tiles", (b - a) / STEP),
    }
}

fn single(terms: &[Terms<'_>]) -> Vec<Part> {
    let size_k = terms[0].stored.len();
    let mut parts = Vec::new();
    for at in 0..size_k {
        for (sign, factor) in WAYS {
            if fits(terms, |_, _, line| sign * line.products[at]) {
                let row = terms[0].stored[at];
                let k = (0..size_k).map(|k| k == at).collect();
                parts.push(if factor == 0.0 {
                    let text = format!("k {row} is missing from the sum");
                    Part { id: "k-dropped", text, k, factor }
                } else {
                    Part { id: "k-twice", text: format!("k {row} was added twice"), k, factor }
                });
            }
        }
    }
    parts
}

/// One group of all wrong columns with the scales of another.
fn other_groups_scales(scene: &Scene<'_>, terms: &[Terms<'_>]) -> Option<Finding> {
    let first = &terms[0];
    let count = first.weight.scales.rows();
    let sums: Vec<Vec<Vec<f64>>> =
        terms.iter().map(|t| t.judged().map(|l| t.by_group(l)).collect()).collect();
    let ratio = |t: &Terms<'_>, g: usize, from: usize| {
        t.weight.scales.value(from, t.n) / t.weight.scales.value(g, t.n)
    };
    for g in 0..count {
        for from in (0..count).filter(|&from| from != g) {
            let of =
                |t: usize, l: usize, _: &Line| sums[t][l][g] * (ratio(&terms[t], g, from) - 1.0);
            if !fits(terms, of) {
                continue;
            }
            let setup = |part: usize| -> Option<Setup<'_>> {
                let mut weight = scene.stage.parts[part].weight.clone();
                let old = weight.scales;
                let (mut i, cols) = (0, old.cols());
                weight.scales = old.map(old.ty(), |bits| {
                    i += 1;
                    if (i - 1) / cols == g { old.bits(from, (i - 1) % cols) } else { bits }
                });
                Some(Setup { weight: Cow::Owned(weight), ..scene.right(part) })
            };
            let whole = |list: &Vec<super::scene::Sample>| {
                list.iter().all(|s| setup(s.part).is_some_and(|x| scene.holds(s, &x, None)))
            };
            if scene.samples().iter().any(whole) {
                let text = format!("group {g} of k was given the scales of group {from}");
                let mut finding = Finding::new("group-scales-of-another-group", text);
                finding.cause = Some(cause(first, |at| first.groups[at] == g));
                return Some(finding);
            }
        }
    }
    None
}

/// Part and column of every wrong column, where they are few and have enough rows.
fn few_columns(scene: &Scene<'_>) -> Option<Vec<(usize, usize)>> {
    let all: Vec<_> = scene.bad.iter().flat_map(|b| b.cols.iter().map(|&n| (b.part, n))).collect();
    let rows = |&(part, _): &(usize, usize)| scene.stage.parts[part].rows.len() >= 2;
    (all.len() <= OWN_CAUSE && all.iter().all(rows)).then_some(all)
}

/// One wrong code in each wrong column.
fn one_code(scene: &Scene<'_>) -> Option<Finding> {
    let mut texts = Vec::new();
    let mut shown = None;
    for (part, n) in few_columns(scene)? {
        let terms = Terms::new(scene, part, n)?;
        let mut fitting = Vec::new();
        for at in 0..terms.stored.len() {
            fitting.extend(codes_at(scene, &terms, at));
        }
        let (k, old, new) = clearest(fitting)?;
        texts.push(format!("k {k}, n {n}: code {new} instead of {old}"));
        shown.get_or_insert(cause(&terms, |at| terms.stored[at] == k));
    }
    let text = format!("one weight of a column is wrong: {}", texts.join("; "));
    let mut finding = Finding::new("wrong-code", text);
    finding.cause = shown;
    Some(finding)
}

/// Of the fits that the bounds allow, the one that leaves least, where it leaves clearly less than
/// any at another place. A fit is its place first, and comes with the sum of squares that it leaves.
fn clearest<T: Copy>(mut fitting: Vec<(usize, T, f64)>) -> Option<T> {
    fitting.sort_by(|a, b| a.2.total_cmp(&b.2));
    let &(place, best, left) = fitting.first()?;
    let second = fitting.iter().find(|f| f.0 != place);
    second.is_none_or(|f| f.2 > 2.0 * left).then_some(best)
}

/// What `of` leaves of a column's residuals, in tolerances, squared.
fn left(terms: &Terms<'_>, of: impl Fn(usize, &Line) -> f64) -> f64 {
    let squared =
        |(i, line): (usize, &Line)| ((line.residual - of(i, line)) / line.tolerance).powi(2);
    terms.lines.iter().enumerate().map(squared).sum()
}

/// A stored k, the right code and the found one.
type Code = (usize, u8, u8);

/// The other codes at a place that explain a column.
fn codes_at(scene: &Scene<'_>, terms: &Terms<'_>, at: usize) -> Vec<(usize, Code, f64)> {
    let (k, n, weight) = (terms.stored[at], terms.n, terms.weight);
    let group = terms.groups[at];
    let old = weight.codes.get(k, n);
    let zero = weight.zeros.as_ref().map_or(0.0, |z| f64::from(z.bits(group, n)));
    let value = |code: u8| weight.ty.to_f64(u32::from(code)) - zero;
    let own = value(old);
    (0..=u8::MAX >> (8 - weight.codes.bits()))
        .filter(|&code| code != old && value(code).is_finite())
        .filter(|&code| {
            let step = value(code) - own;
            terms.lines.iter().all(|l| (l.residual - l.units[at] * step).abs() <= 2.0 * l.tolerance)
        })
        .filter(|&code| column_holds(scene, terms, k, code))
        .map(|code| (at, (k, old, code), left(terms, |_, l| l.units[at] * (value(code) - own))))
        .collect()
}

/// Whether the column of a matrix with another code in it explains all its elements.
fn column_holds(scene: &Scene<'_>, terms: &Terms<'_>, k: usize, code: u8) -> bool {
    let part = &scene.stage.parts[terms.part];
    let codes = &part.weight.codes;
    let (bits, pack) = (codes.bits(), codes.pack());
    let mut words = codes.words().to_vec();
    let word = &mut words[k / pack * scene.size_n + terms.n];
    let shift = (k % pack) as u32 * bits;
    *word = *word & !((u32::MAX >> (32 - bits)) << shift) | u32::from(code) << shift;
    let Ok(codes) = Codes::from_words(bits, codes.shape(), words) else { return false };
    let weight = Weight { codes, ..part.weight.clone() };
    let setup = Setup { weight: Cow::Owned(weight), ..scene.right(terms.part) };
    let sample = super::scene::Sample {
        part: terms.part,
        rows: spread_to(&part.rows, 2 * ROWS),
        cols: vec![terms.n],
    };
    scene.holds(&sample, &setup, None)
}

/// One group's scale off by a factor, in each wrong column.
fn one_scale(scene: &Scene<'_>) -> Option<Finding> {
    let half = scene.stage.dtype == ScalarType::FLOAT16;
    let roundoff = if half { 2f64.powi(-11) } else { 2f64.powi(-8) };
    let mut texts = Vec::new();
    let mut shown = None;
    for (part, n) in few_columns(scene)? {
        let terms = Terms::new(scene, part, n)?;
        let sums: Vec<_> = terms.lines.iter().map(|l| terms.by_group(l)).collect();
        let mut fitting = Vec::new();
        for g in 0..terms.weight.scales.rows() {
            let (mut lo, mut hi) = (f64::NEG_INFINITY, f64::INFINITY);
            for (line, sums) in terms.lines.iter().zip(&sums) {
                let own = terms.groups.iter().zip(&line.products);
                let absolute: f64 =
                    own.filter(|(group, _)| **group == g).map(|(_, x)| x.abs()).sum();
                // Weights with another scale are rounded in another way.
                let slack = line.tolerance + 2.0 * roundoff * absolute;
                let (a, b) = ((line.residual - slack) / sums[g], (line.residual + slack) / sums[g]);
                (lo, hi) = (lo.max(a.min(b)), hi.min(a.max(b)));
            }
            if lo <= hi && !(lo..=hi).contains(&0.0) && lo.is_finite() && hi.is_finite() {
                let change = (lo + hi) / 2.0;
                fitting.push((g, (g, change), left(&terms, |i, _| sums[i][g] * change)));
            }
        }
        let (g, change) = clearest(fitting)?;
        let percent = change * 100.0;
        texts.push(format!("the scale of group {g}, n {n} is off by {percent:+.2} %"));
        shown.get_or_insert(cause(&terms, |at| terms.groups[at] == g));
    }
    let mut finding = Finding::new("group-scale-off", texts.join("; "));
    finding.cause = shown;
    Some(finding)
}
