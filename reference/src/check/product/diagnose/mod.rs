//! Why is this product wrong?
//!
//! Suspects are tried one after the other, from the most particular to the most general: each says
//! what the elements would be if one known thing had gone wrong, and the bounds of the declared
//! class decide whether the found elements may be those. A suspect is named only when every element
//! of a sample falls into its bounds, right ones beside the wrong ones included; then the wrong
//! elements that it leaves unexplained are counted.
//!
//! * [`numbers`]: zeros, infinities, NaN, and a factor common to all elements.
//! * [`suspects`]: the whole matrix, bias, scale or router weight read in another way;
//!   [`order`]: act-order.
//! * [`moved`]: columns and rows that stand in each other's place, rows of another expert.
//! * [`residual`]: found minus exact as the contribution of a group or a range of k;
//!   [`weights`]: of one code or scale; [`columns`]: of another column's bias or scales.

mod columns;
mod moved;
mod numbers;
mod order;
mod place;
mod residual;
mod scene;
mod suspects;
mod terms;
mod weights;

use crate::check::Diagnosis;
use crate::check::picture::Cause;
pub(super) use scene::Scene;
use scene::Setup;

/// What was found out.
pub(super) struct Finding {
    pub(super) diagnosis: Diagnosis,
    /// The part of the sum that explains it.
    pub(super) cause: Option<Cause>,
}

impl Finding {
    fn new(id: &str, text: impl Into<String>) -> Self {
        let diagnosis = Diagnosis { id: id.to_owned(), text: text.into(), unexplained: 0 };
        Self { diagnosis, cause: None }
    }
}

/// One thing that may have gone wrong everywhere.
struct Suspect<'s> {
    id: &'static str,
    /// What happened, in a sentence without its end.
    text: String,
    /// How a part is computed then; none where it makes no difference.
    make: Box<dyn Fn(usize) -> Option<Setup<'s>> + 's>,
}

impl<'s> Suspect<'s> {
    fn new(
        id: &'static str,
        text: impl Into<String>,
        make: impl Fn(usize) -> Option<Setup<'s>> + 's,
    ) -> Self {
        Self { id, text: text.into(), make: Box::new(make) }
    }

    /// Whether it explains every sample of one of the lists.
    fn fits(&self, scene: &Scene<'s>, samples: &[Vec<scene::Sample>; 2]) -> bool {
        samples.iter().any(|list| {
            !list.is_empty()
                && list
                    .iter()
                    .all(|s| (self.make)(s.part).is_some_and(|setup| scene.holds(s, &setup, None)))
        })
    }
}

/// The first suspect that explains the wrong elements, else where they lie.
pub(super) fn explain(scene: &Scene<'_>) -> Option<Finding> {
    let place = place::of(scene);
    let finding = numbers::plain(scene)
        .or_else(|| whole(scene))
        .or_else(|| numbers::special(scene))
        .or_else(|| moved::columns(scene))
        .or_else(|| moved::rows(scene))
        .or_else(|| residual::explain(scene))
        .or_else(|| columns::parameters(scene))
        .or_else(|| numbers::factor(scene));
    match finding {
        Some(mut finding) => {
            if let Some(place) = place {
                finding.diagnosis.text += &format!("; {place}");
            }
            Some(finding)
        }
        None => place.map(|place| {
            let mut finding = Finding::new("confined", place);
            finding.diagnosis.unexplained = scene.wrong.len();
            finding
        }),
    }
}

fn whole(scene: &Scene<'_>) -> Option<Finding> {
    let samples = scene.samples();
    let suspects = order::suspects(scene).into_iter().chain(suspects::suspects(scene));
    for suspect in suspects {
        if !suspect.fits(scene, &samples) {
            continue;
        }
        let mut finding = Finding::new(suspect.id, suspect.text.clone());
        match scene.unexplained(&suspect.make, None) {
            Some(left) => finding.diagnosis.unexplained = left,
            None => finding.diagnosis.text += " (seen on a sample)",
        }
        return Some(finding);
    }
    None
}
