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
}

impl Finding {
    fn new(diagnosis: Diagnosis) -> Self {
        Self { diagnosis, cause: None }
    }

    /// Whether this finding is more certain than the other, or leaves fewer values unexplained.
    fn says_more(&self, other: &Self) -> bool {
        let rank = |f: &Self| {
            let near = f.diagnosis.text.contains(NEARLY);
            (f.diagnosis.strength as u8, near, f.diagnosis.unexplained)
        };
        rank(self) < rank(other)
    }

    /// A fact about all wrong elements.
    fn plain(id: &str, text: impl Into<String>) -> Self {
        Self::new(Diagnosis::explains(id, text))
    }
}

/// A mistake that may affect the whole product: how a part is then computed, or `None` if it makes
/// no difference.
type Suspect<'s> = KnownMistake<'s, usize, Setup<'s>>;

/// Explains the wrong elements under any known convention, since a kernel with a bug may follow
/// another convention than the report assumes. Without a cause, states their location.
pub(super) fn explain(scene: &Scene<'_>) -> Option<Finding> {
    let mut place = place::of(scene);
    let mut fewest = scene.wrong.len();
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
        // A convention with far fewer wrong elements is more likely that of the kernel.
        if wrong.len() * 2 < fewest {
            fewest = wrong.len();
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

/// The first suspect that explains the wrong elements, otherwise the one that leaves the fewest
/// unexplained.
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
        let Some(finding) = find(scene) else { continue };
        let explains = finding.diagnosis.strength == Strength::Explains;
        if best.as_ref().is_none_or(|b| finding.says_more(b)) {
            best = Some(finding);
        }
        if explains {
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
        let Some(outcome) = scene.weigh_setups(&suspect.make, None, cost) else { continue };
        if outcome.beats(best.map(|b| b.0)) {
            best = Some((outcome, suspect));
        }
        if outcome.is_final() {
            break;
        }
    }
    best.map(|(outcome, suspect)| Finding::new(outcome.named(suspect.id, &suspect.text)))
}
