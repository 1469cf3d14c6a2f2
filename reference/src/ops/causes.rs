//! Which known mistakes may be the cause of a computed operation's wrong outputs: one that all outputs bear
//! out.

use super::computation::{Computation, Expected, Mistake, made};
use crate::judge::compare::{Candidate, Elements, compared, elements};
use crate::judge::mistake::Comparison;
use crate::num::tensor::Tensor;

/// The mistakes that explain each output. A mistake that changes a right output, or that does not explain
/// another wrong output which it changes, is none; nor is one whose outputs are zeros, which say nothing of
/// their cause. The best mistakes of an output come first.
pub(super) fn of_outputs<'c, C: Computation>(
    computation: &C,
    pairs: &[(Expected, &Tensor<'_>)],
) -> Vec<Vec<Candidate<'c>>> {
    let mut all: Vec<Vec<Candidate<'c>>> = pairs.iter().map(|_| Vec::new()).collect();
    let found: Vec<Elements> = pairs.iter().map(|(_, found)| elements(found)).collect();
    let is_right = |i: usize| pairs[i].0.elements == found[i];
    if (0..pairs.len()).all(is_right) {
        return all;
    }
    let mistakes = C::mistakes();
    let cost = (mistakes.len().max(1) as f64).log2();
    let mut causes: Vec<(usize, Mistake<C>, Vec<Option<Elements>>)> = Vec::new();
    for mistake in mistakes {
        let Some(wrong) = made(computation, &mistake) else { continue };
        if let Some((unexplained, changed)) = predicted(wrong, pairs, &found, cost) {
            causes.push((unexplained, mistake, changed));
        }
    }
    // Stable: of equals, the first in the list.
    causes.sort_by_key(|(unexplained, ..)| *unexplained);
    for (_, mistake, changed) in causes {
        for (i, elements) in changed.into_iter().enumerate() {
            let Some(elements) = elements.filter(|_| !is_right(i)) else { continue };
            let text = mistake.text.clone();
            all[i].push(Candidate::of(mistake.id, text, move || Some(elements.clone())));
        }
    }
    all
}

/// The values that a mistake leaves unexplained, and the outputs that it changes; `None` if an output
/// contradicts it.
fn predicted(
    wrong: Vec<Expected>,
    pairs: &[(Expected, &Tensor<'_>)],
    found: &[Elements],
    cost: f64,
) -> Option<(usize, Vec<Option<Elements>>)> {
    let mut pooled = Comparison::default();
    let mut changed = Vec::with_capacity(pairs.len());
    let mut wrong: Vec<Option<Expected>> = wrong.into_iter().map(Some).collect();
    for ((expected, tensor), found) in pairs.iter().zip(found) {
        let of_output =
            wrong.iter_mut().find(|o| o.as_ref().is_some_and(|o| o.name == expected.name));
        let made = of_output.and_then(Option::take).map(|o| o.elements);
        let made = made.filter(|made| *made != expected.elements);
        let Some(made) = made else {
            changed.push(None);
            continue;
        };
        if made.len() != found.len() || made.len() > 1 && made.iter().all(|&bits| bits == 0) {
            return None;
        }
        let widths = [expected.form.width, tensor.dtype().bits() as u32];
        let one = compared(widths, [&expected.elements, &made, found]);
        if one.broken > 0 || one.unexplained * 10 > one.explained + one.unexplained {
            return None;
        }
        pooled.explained += one.explained;
        pooled.unexplained += one.unexplained;
        pooled.evidence += one.evidence;
        pooled.changed += one.changed;
        pooled.total += one.total;
        changed.push(Some(made));
    }
    let outcome = pooled.outcome(cost)?;
    Some((outcome.unexplained, changed))
}
