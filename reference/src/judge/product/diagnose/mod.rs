//! Diagnosis of a wrong product.
//!
//! Suspects are tried from the most specific to the most general. A suspect is a known mistake: it
//! predicts the elements, and the bounds of the declared class decide whether the found elements
//! match. A sample of wrong and right elements rules out most suspects; the others are compared
//! with every element of the output. [`Comparison`](crate::judge::mistake::Comparison) decides
//! whether a suspect is the cause.
//!
//! * [`numbers`]: zeros, infinities, NaN, and a factor common to all elements.
//! * [`mistaken`]: the operation's own mistakes with its weights.
//! * [`suspects`], [`codes`]: the whole matrix, bias, scales or router weights misread; [`order`]: act-order;
//!   [`groups`], [`shards`]: group sizes, ranks, gate and up; [`lost_scales`]: block scales read as
//!   zero; [`overflow`]: integer sums.
//! * [`moved`]: exchanged columns and rows, rows of another expert.
//! * [`residual`]: found minus exact as the contribution of a group or a range of k;
//!   [`weights`]: of one code or scale; [`columns`]: of another column's bias or scales;
//!   [`stale`]: of a tile of k that was read before it was written.

mod codes;
mod columns;
mod groups;
mod lost_scales;
mod moved;
mod numbers;
mod order;
mod overflow;
mod place;
mod residual;
mod scene;
mod setup;
mod shards;
mod stale;
mod suspects;
mod terms;
mod weigh;
mod weights;

use std::borrow::Cow;

use super::Mistaken;
use crate::judge::mistake::{KnownMistake, NEARLY, Outcome};
use crate::judge::picture::Cause;
use crate::judge::{Diagnosis, Strength};
use crate::products::Convention;
pub(super) use scene::Scene;
use scene::Setup;

/// The result of a diagnosis.
pub(super) struct Finding {
    pub(super) diagnosis: Diagnosis,
    /// The part of the sum that explains it.
    pub(super) cause: Option<Cause>,
    /// Evidence less the cost of its description, in bits; infinite for a fact about all wrong
    /// elements.
    score: f64,
}

/// A finding with as many bits of evidence ends the search.
const DECISIVE: f64 = 64.0;

impl Finding {
    fn new(diagnosis: Diagnosis) -> Self {
        Self { diagnosis, cause: None, score: f64::NEG_INFINITY }
    }

    /// The finding that a known mistake is the cause.
    fn of(outcome: Outcome, id: &str, text: &str) -> Self {
        Self { diagnosis: outcome.named(id, text), cause: None, score: outcome.score }
    }

    fn is_near(&self) -> bool {
        self.diagnosis.text.contains(NEARLY)
    }

    /// Whether no other suspect is likely to be better.
    fn is_decisive(&self) -> bool {
        self.diagnosis.strength == Strength::Explains && self.score >= DECISIVE
    }

    /// Whether this finding ranks above the other under the same convention: a cause above a place,
    /// an exact prediction above one to within some units, and then the score.
    fn beats(&self, other: Option<&Self>) -> bool {
        let rank = |f: &Self| (f.diagnosis.strength == Strength::Place, f.is_near());
        other.is_none_or(|other| match rank(self).cmp(&rank(other)) {
            std::cmp::Ordering::Equal => self.score > other.score,
            order => order.is_lt(),
        })
    }

    /// Whether this finding is more certain than the other, or leaves fewer values unexplained.
    fn says_more(&self, other: &Self) -> bool {
        let rank = |f: &Self| (f.diagnosis.strength as u8, f.is_near(), f.diagnosis.unexplained);
        rank(self) < rank(other)
    }

    /// A fact about all wrong elements.
    fn plain(id: &str, text: impl Into<String>) -> Self {
        Self::fact(Diagnosis::explains(id, text))
    }

    fn fact(diagnosis: Diagnosis) -> Self {
        Self { score: f64::INFINITY, ..Self::new(diagnosis) }
    }
}

/// The higher ranking of two findings; the first of equal ones.
fn better(best: Option<Finding>, other: Finding) -> Option<Finding> {
    if other.beats(best.as_ref()) { Some(other) } else { best }
}

/// The best of several searches; a decisive finding ends them.
fn best_of<const N: usize>(finders: [&dyn Fn() -> Option<Finding>; N]) -> Option<Finding> {
    let mut best: Option<Finding> = None;
    for find in finders {
        if let Some(finding) = find() {
            best = better(best, finding);
        }
        if best.as_ref().is_some_and(Finding::is_decisive) {
            break;
        }
    }
    best
}

/// A mistake that may affect the whole product: how a part is then computed, or `None` if it makes
/// no difference.
type Suspect<'s> = KnownMistake<'s, usize, Setup<'s>>;

/// Explains the wrong elements under any known convention, since a kernel with a bug may follow
/// another convention than the report assumes. Without a cause, states their location.
pub(super) fn explain(scene: &Scene<'_>) -> Option<Finding> {
    let mut place = place::of(scene);
    let (mut fewest, mut right_rows) = (scene.wrong.len(), scene.right_rows());
    let mut best = search(scene);
    let is_final = |best: &Option<Finding>| {
        best.as_ref().is_some_and(|f| f.diagnosis.strength == Strength::Explains)
    };
    for &(name, convention) in Convention::NAMED {
        if is_final(&best) {
            break;
        }
        let same = convention == scene.convention
            || convention.dequantizes() != scene.convention.dequantizes();
        if same {
            continue;
        }
        let Some(bounded) = scene.bounded_as(convention) else { continue };
        let wrong: Vec<usize> =
            (0..bounded.len()).filter(|&i| bounded[i].ratio(scene.found[i]) > 1.0).collect();
        if wrong.is_empty() {
            let text = format!("every element is right under the convention `{name}`");
            best = Some(Finding::plain("other-convention", text));
            break;
        }
        let other = scene.under(convention, &bounded, &wrong);
        // A convention with far fewer wrong elements, or with more rows that are right, is more likely
        // that of the kernel.
        if wrong.len() * 2 < fewest || other.right_rows() > right_rows {
            (fewest, right_rows) = (wrong.len(), other.right_rows());
            place = place::of(&other).map(|p| format!("under the convention `{name}`, {p}"));
        }
        // What leaves more elements unexplained than are wrong under the declared convention explains nothing.
        if let Some(mut found) = search(&other)
            && found.diagnosis.unexplained < scene.wrong.len()
            && best.as_ref().is_none_or(|b| found.says_more(b))
        {
            found.diagnosis.text += &format!("; the kernel's convention is `{name}`");
            best = Some(found);
        }
    }
    match best {
        Some(mut finding) => {
            if let Some(place) = place {
                finding.diagnosis.text += &format!("; {place}");
            }
            Some(finding)
        }
        None => {
            let text = place.unwrap_or_else(|| {
                let (wrong, all) = (scene.wrong.len(), scene.found.len());
                format!("{wrong} of {all} elements are wrong, all over the output")
            });
            Some(Finding::new(Diagnosis::place("confined", text, scene.wrong.len())))
        }
    }
}

/// The suspect with the highest score.
fn search(scene: &Scene<'_>) -> Option<Finding> {
    let finders: [fn(&Scene<'_>) -> Option<Finding>; 10] = [
        numbers::plain,
        overflow::explain,
        whole,
        numbers::special,
        moved::columns,
        moved::rows,
        residual::explain,
        columns::parameters,
        stale::explain,
        numbers::factor,
    ];
    let mut best: Option<Finding> = None;
    for (i, find) in finders.into_iter().enumerate() {
        // A known mistake that nearly fits is more informative than an unnamed factor.
        let named = best.as_ref().is_some_and(|b| b.diagnosis.strength == Strength::Consistent);
        if named && i + 1 == finders.len() {
            break;
        }
        if let Some(finding) = find(scene) {
            best = better(best, finding);
        }
        if best.as_ref().is_some_and(Finding::is_decisive) {
            break;
        }
    }
    best
}

/// The operation's own mistakes.
fn mistaken<'s>(scene: &'s Scene<'s>) -> Vec<Suspect<'s>> {
    let all = scene.stage.hints.mistaken.map(|list| list()).unwrap_or_default();
    let suspect = |Mistaken { id, text, weights }: Mistaken| {
        Suspect::new(id, text, move |part| {
            let weight = Cow::Owned(weights.get(part)?.clone());
            Some(Setup { weight, ..scene.right(part) })
        })
    };
    all.into_iter().map(suspect).collect()
}

fn whole(scene: &Scene<'_>) -> Option<Finding> {
    let mut suspects = mistaken(scene);
    suspects.extend(order::suspects(scene));
    suspects.extend(suspects::suspects(scene));
    suspects.extend(groups::suspects(scene));
    suspects.extend(shards::suspects(scene));
    suspects.extend(groups::padded_bytes(scene));
    suspects.extend(lost_scales::suspects(scene));
    let cost = (suspects.len().max(1) as f64).log2();
    let mut best: Option<(Outcome, &Suspect<'_>)> = None;
    for suspect in &suspects {
        if let Some(outcome) = scene.weigh_setups(&suspect.make, cost)
            && outcome.beats(best.map(|b| b.0))
        {
            best = Some((outcome, suspect));
        }
    }
    best.map(|(outcome, suspect)| Finding::of(outcome, suspect.id, &suspect.text))
}
