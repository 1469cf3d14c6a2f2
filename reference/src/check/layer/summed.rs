//! `y` against its bound from the case's own `down`.

use super::{Best, REMEDY, Rest, Stage, expert, nearer, with_expert};
use crate::Result;
use crate::case::{Case, MoeConfig};
use crate::check::{Diagnosis, OutputReport};
use crate::interval::Bound;
use crate::moe::sum::{bound, sum};
use crate::moe::{Chain, narrow, widen};

const CLASS: &str = "bound: f32 in any order and one rounding; for top_k 2, 3, 4 also the 16-bit \
                     type from the first slot to the last";

pub(in crate::check) fn judge(
    case: &Case<'_>,
    c: &MoeConfig,
    down: &[u16],
    values: &[u16],
) -> Result<OutputReport> {
    let rest: Rest = |stage, wrong, place| stage.pattern_or_place(wrong, place);
    let (report, _) = bounded(case, c, down, values, rest)?;
    Ok(report)
}

/// The verdict, and which values are outside their bounds.
pub(super) fn bounded(
    case: &Case<'_>,
    c: &MoeConfig,
    down: &[u16],
    values: &[u16],
    rest: Rest,
) -> Result<(OutputReport, Vec<usize>)> {
    let (ty, h) = (c.quant.dtype, c.hidden_size);
    let add = |chain| sum(down, ty, c.top_k, h, chain);
    let (expected, chain) = nearer(values, add(Chain::Canonical)?, Some(add(Chain::Upstream)?));
    let (class, shape) = (CLASS.into(), [c.size_m, h]);
    let stage =
        Stage { name: "y", class, remedy: REMEDY, ty, found: values, shape, expected, chain };
    let terms = Terms { down, top_k: c.top_k, size_m: c.size_m, size_n: h, stage: &stage };
    let (mut report, wrong) = stage.judge(|i| terms.bound(i, |j| Some((j, 1.0))));
    if let Some(&first) = wrong.first() {
        report.first_mismatch = Some(stage.mismatch(first, None));
        report.diagnosis = Some(
            diagnose(&terms, case, &wrong)
                .unwrap_or_else(|| rest(&stage, &wrong, &format!("token {}", first / h))),
        );
    }
    Ok((report, wrong))
}

/// The sum's terms.
struct Terms<'c> {
    down: &'c [u16],
    top_k: usize,
    size_m: usize,
    size_n: usize,
    stage: &'c Stage<'c>,
}

impl Terms<'_> {
    /// Term of slot `j` of output `i`.
    fn term(&self, i: usize, j: usize) -> u16 {
        self.down[(i / self.size_n * self.top_k + j) * self.size_n + i % self.size_n]
    }

    fn terms(&self, i: usize) -> impl DoubleEndedIterator<Item = f32> {
        (0..self.top_k).map(move |j| widen(self.stage.ty, self.term(i, j)))
    }

    /// The bound of output `i` when slot j adds the term of slot `change(j).0`, times a factor.
    fn bound(&self, i: usize, change: impl Fn(usize) -> Option<(usize, f64)>) -> Bound {
        let term =
            |(j, factor)| Bound::exactly(f64::from(widen(self.stage.ty, self.term(i, j))) * factor);
        let slots: Vec<Bound> = (0..self.top_k).filter_map(change).map(term).collect();
        bound(&slots, self.stage.ty)
    }

    fn allows(&self, i: usize, bound: &Bound) -> bool {
        bound.allows(self.stage.value(self.stage.found[i]))
    }

    /// Values whose bits are not those of `make`.
    fn others(&self, limit: usize, make: impl Fn(usize) -> u16) -> usize {
        let found = self.stage.found;
        (0..found.len()).filter(|&i| make(i) != found[i]).take(limit + 1).count()
    }
}

fn diagnose(t: &Terms<'_>, case: &Case<'_>, wrong: &[usize]) -> Option<Diagnosis> {
    let mut best = Best::new(wrong.len());
    let ty = t.stage.ty;
    let half = |x: f32| widen(ty, narrow(ty, x));
    let limit = best.limit;
    if t.top_k > 2 {
        let forward = t.others(limit, |i| narrow(ty, t.terms(i).fold(0.0, |a, x| half(a + x))));
        let text =
            "every addition was rounded to the 16-bit type; for this top_k the sum is in f32";
        best.offer("sum-in-activation-type", text, forward);
        let backward =
            t.others(limit, |i| narrow(ty, t.terms(i).rev().fold(0.0, |a, x| half(a + x))));
        let text = "every addition was rounded to the 16-bit type, from the last slot to the first";
        best.offer("sum-in-another-order", text, backward);
    }
    if t.top_k > 1 {
        let factor = 1.0 / t.top_k as f64;
        let mean = (0..t.stage.found.len()).filter(|&i| {
            let exact = t.bound(i, |j| Some((j, 1.0))).exact * factor;
            // A mean has one more rounding than the sum: a value of the type beside the exact one.
            let near = t.stage.steps(t.stage.found[i], narrow(ty, exact as f32)) <= 1.0;
            !near
        });
        let text = "the sum over the slots was divided by top_k";
        best.offer("mean-of-slots", text, mean.take(limit + 1).count());
        let transposed = (0..t.stage.found.len()).filter(|&i| {
            let (token, n) = (i / t.size_n, i % t.size_n);
            let row = |j: usize| (j * t.size_m + token) * t.size_n + n;
            let slots: Vec<Bound> = (0..t.top_k)
                .map(|j| Bound::exactly(f64::from(widen(ty, t.down[row(j)]))))
                .collect();
            !t.allows(i, &bound(&slots, ty))
        });
        let text = "the rows were taken slot by slot; they are stored token by token";
        best.offer("slots-transposed", text, transposed.take(limit + 1).count());
    }
    if best.done() {
        return best.diagnosis;
    }
    // A change of one slot, which may be another one in each token.
    for (id, what, factor) in [
        ("slot-dropped", "is missing", None),
        ("slot-doubled", "was added twice", Some(2.0)),
        ("slot-subtracted", "was subtracted", Some(-1.0)),
    ] {
        let (mut unexplained, mut tokens) = (0, Vec::new());
        for of_token in wrong.chunk_by(|a, b| a / t.size_n == b / t.size_n) {
            let token = of_token[0] / t.size_n;
            let row = token * t.size_n..(token + 1) * t.size_n;
            let outside = |slot: usize| {
                let change = |j| match factor {
                    _ if j != slot => Some((j, 1.0)),
                    None => None,
                    Some(f) => Some((j, f)),
                };
                row.clone().filter(|&i| !t.allows(i, &t.bound(i, change))).count()
            };
            let (count, slot) = (0..t.top_k).map(|j| (outside(j), j)).min()?;
            unexplained += count;
            tokens.push((token, slot));
        }
        let (token, slot) = tokens[0];
        let text = format!(
            "the term of one slot {what} in {} tokens; first in token {token}: slot {slot}{}",
            tokens.len(),
            with_expert(expert(case, token * t.top_k + slot)),
        );
        best.offer(id, &text, unexplained);
    }
    best.diagnosis
}
