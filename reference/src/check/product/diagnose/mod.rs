//! Why is this product wrong?
//!
//! Suspects are tried one after the other, from the most particular to the most general: each says
//! what the elements would be if one known thing had gone wrong, and the bounds of the declared
//! class decide whether the found elements may be those. A sample of wrong and right elements sorts
//! most of them out. Those that are left are compared with every element of the output; see
//! [`Comparison`](crate::check::mistake::Comparison) for when a suspect is the cause.
//!
//! * [`numbers`]: zeros, infinities, NaN, and a factor common to all elements.
//! * [`suspects`]: the whole matrix, bias, scale or router weight read in another way;
//!   [`order`]: act-order; [`groups`], [`shards`]: group sizes, ranks, gate and up;
//!   [`overflow`]: integer sums.
//! * [`moved`]: columns and rows that stand in each other's place, rows of another expert.
//! * [`residual`]: found minus exact as the contribution of a group or a range of k;
//!   [`weights`]: of one code or scale; [`columns`]: of another column's bias or scales;
//!   [`stale`]: of a tile of k that was read before it was written.

mod columns;
mod groups;
mod hints;
mod moved;
mod numbers;
mod order;
mod overflow;
mod place;
mod residual;
mod scene;
mod shards;
mod stale;
mod suspects;
mod terms;
mod weights;

use crate::check::mistake::{KnownMistake, NEARLY, Outcome};
use crate::check::picture::Cause;
use crate::check::{Diagnosis, Strength};
use crate::gemm::{Bounded, Convention};
pub(in crate::check) use hints::Hints;
pub(super) use scene::Scene;
use scene::Setup;

/// What was found out.
pub(super) struct Finding {
    pub(super) diagnosis: Diagnosis,
    /// The part of the sum that explains it.
    pub(super) cause: Option<Cause>,
}

impl Finding {
    fn new(diagnosis: Diagnosis) -> Self {
        Self { diagnosis, cause: None }
    }

    /// Whether this one is surer than the other, or leaves less.
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

/// One thing that may have gone wrong everywhere: how a part is computed then, none where it makes
/// no difference.
type Suspect<'s> = KnownMistake<'s, usize, Setup<'s>>;

/// Whether a suspect explains every sample of one of the lists.
fn fits<'s>(suspect: &Suspect<'s>, scene: &Scene<'s>, samples: &[Vec<scene::Sample>; 2]) -> bool {
    samples.iter().any(|list| {
        !list.is_empty()
            && list
                .iter()
                .all(|s| (suspect.make)(s.part).is_some_and(|setup| scene.holds(s, &setup, None)))
    })
}

/// A way in which a producer's own kernels deviate from the right product, known and accepted.
pub(super) struct Deviation {
    /// The suspect's id.
    id: &'static str,
    /// What a case's `provenance` begins with.
    pub(super) producer: &'static str,
    /// What the kernel does, and what is wrong with it.
    pub(super) reason: &'static str,
}

/// Every deviation that is accepted. From another producer the same output is a failure.
const DEVIATIONS: &[Deviation] = &[
    Deviation {
        id: order::UPSTREAM_K_SLICE,
        producer: "vllm 0.21.0",
        reason: "its kernel gives rows of an act-ordered slice of K the scale of other rows",
    },
    Deviation {
        id: suspects::UPSTREAM_NVFP4_BIAS,
        producer: "vllm 0.21.0",
        reason: "its kernel multiplies the bias by NVFP4's global scale",
    },
];

/// An output that is right but for a deviation.
pub(super) struct Accepted {
    pub(super) deviation: &'static Deviation,
    pub(super) diagnosis: Diagnosis,
    /// Every element under the deviation.
    pub(super) bounded: Vec<Bounded>,
}

/// The deviation of the case's producer under which every element is in bound.
pub(super) fn accepted(scene: &Scene<'_>) -> Option<Accepted> {
    let suspects = order::suspects(scene).into_iter().chain(suspects::suspects(scene));
    let suspects: Vec<Suspect<'_>> = suspects.collect();
    DEVIATIONS.iter().filter(|d| scene.stage.producer.starts_with(d.producer)).find_map(|d| {
        let suspect = suspects.iter().find(|s| s.id == d.id)?;
        if !fits(suspect, scene, &scene.samples()) {
            return None;
        }
        let mut all = scene.bounded.to_vec();
        let cols: Vec<usize> = (0..scene.size_n).collect();
        for (part, p) in scene.stage.parts.iter().enumerate() {
            let Some(setup) = (suspect.make)(part) else { continue };
            let bounded = scene.bounds(&setup, &p.rows, &cols, None)?;
            for (row, bounded) in p.rows.iter().zip(bounded.chunks_exact(scene.size_n)) {
                all[row * scene.size_n..][..scene.size_n].copy_from_slice(bounded);
            }
        }
        let fits = all.iter().zip(scene.found).all(|(b, &x)| b.ratio(x) <= 1.0);
        let diagnosis = Diagnosis::explains(d.id, suspect.text.clone());
        fits.then_some(Accepted { deviation: d, diagnosis, bounded: all })
    })
}

/// What explains the wrong elements under any known convention: a kernel may follow another one than the
/// report does, and have a bug. Without a cause, where the wrong elements lie.
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
        // The convention that leaves far fewer wrong elements is more likely the kernel's.
        if wrong.len() * 2 < fewest {
            fewest = wrong.len();
            place = place::of(&other).map(|p| format!("{p} (under the convention `{name}`)"));
        }
        if let Some(mut found) = search(&other)
            && best.as_ref().is_none_or(|b| found.says_more(b))
        {
            found.diagnosis.text += &format!(" (of a kernel of the convention `{name}`)");
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

/// The first suspect that explains the wrong elements, else the one that leaves fewest.
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
        // A known mistake that nearly fits says more than a factor without a name.
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

fn whole(scene: &Scene<'_>) -> Option<Finding> {
    let mut suspects = order::suspects(scene);
    suspects.extend(suspects::suspects(scene));
    suspects.extend(groups::suspects(scene));
    suspects.extend(shards::suspects(scene));
    suspects.extend(groups::padded_bytes(scene));
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
