//! How outputs are judged: comparison bit for bit, products by their bound or their schedule, known
//! mistakes, the power of a comparison, and the reports of all of these. The module does not depend
//! on case files.

pub(crate) mod compare;
pub(crate) mod mistake;
mod numbers;
pub(crate) mod pattern;
pub(crate) mod picture;
pub(crate) mod place;
pub(crate) mod plain;
pub(crate) mod power;
pub(crate) mod product;
pub(crate) mod scheduled;
mod structure;
mod subject;

use serde::Serialize;

pub use compare::Mismatch;
pub use mistake::Strength;
pub use picture::{Cause, ErrorMap, Grid, Picture};
pub use power::{Accepted, Power, Rejects};
pub use product::Declared;

/// The verdict on an output or a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// Checked and right.
    Pass,
    /// Checked and wrong.
    Fail,
    /// Not computed by marlinspike, or compared with a bound that accepts a trivial wrong answer.
    Unchecked,
}

/// The explanation of a mismatch: a known mistake, a rearrangement, or a location.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Diagnosis {
    /// Short name, stable across versions (`scales-other-permutation`).
    pub id: String,
    /// What happened.
    pub text: String,
    /// Number of mismatching values without an explanation; 0 if all are explained.
    pub unexplained: usize,
    /// Its certainty.
    pub strength: Strength,
}

impl Diagnosis {
    /// A cause that predicts every wrong value and keeps every right one right.
    pub fn explains(id: impl Into<String>, text: impl Into<String>) -> Self {
        let (id, text) = (id.into(), text.into());
        Self { id, text, unexplained: 0, strength: Strength::Explains }
    }

    /// A cause that fits but leaves `unexplained` wrong values, or was not verified on all values.
    pub fn consistent(id: impl Into<String>, text: impl Into<String>, unexplained: usize) -> Self {
        let mut text = format!("consistent with: {}", text.into());
        if unexplained > 0 {
            text += &format!("; {unexplained} wrong values are not explained by it");
        }
        Self { id: id.into(), text, unexplained, strength: Strength::Consistent }
    }

    /// The location of the wrong values; none is explained.
    pub fn place(id: impl Into<String>, text: impl Into<String>, mismatches: usize) -> Self {
        let (id, text) = (id.into(), text.into());
        Self { id, text, unexplained: mismatches, strength: Strength::Place }
    }
}

/// The verdict on one output tensor.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct OutputReport {
    /// Bare name (`marlin_qweight`).
    pub name: String,
    /// The verdict.
    pub verdict: Verdict,
    /// Number of matrix values compared (codes of a packed weight, scales, indices); the number of
    /// elements of the tensor if unchecked.
    pub elements: usize,
    /// Share of values with the expected bits, 0 to 1; absent if unchecked.
    pub equal_bits: Option<f64>,
    /// Values that differ.
    pub mismatches: usize,
    /// Largest error in units in the last place, for floating-point results.
    pub max_ulp: Option<f64>,
    /// Largest error over its bound, for floating-point results.
    pub max_error_over_bound: Option<f64>,
    /// The first value that differs, in storage order.
    pub first_mismatch: Option<Mismatch>,
    /// What explains the mismatch.
    pub diagnosis: Option<Diagnosis>,
    /// A remark: the reason for `Unchecked`, or the deviation that was accepted.
    pub note: Option<String>,
    /// The mistakes that the verdict excludes; absent if nothing was compared.
    pub power: Option<Power>,
    /// Every reading that explains a product: the names of conventions, `exact` and
    /// `exact_rounded_weights`; the most specific first.
    pub conventions: Vec<String>,
    /// Number of elements without a bound because partial sums may overflow.
    pub unbounded: usize,
    /// What to declare if the bound is too weak.
    #[serde(skip)]
    pub(crate) remedy: &'static str,
    /// The uniform error that the type's own units hide, which no bound has to exclude.
    #[serde(skip)]
    pub(crate) attainable: f64,
    /// Whether the note says what a reader of a pass has to know: a choice that the case left open.
    #[serde(skip)]
    pub has_choice: bool,
    /// The positions of the mismatches.
    #[serde(skip)]
    pub picture: Option<Picture>,
}

impl OutputReport {
    /// A report on an output that is not checked; `note` is the reason.
    pub fn unchecked(name: &str, elements: usize, note: &str) -> Self {
        Self {
            name: name.to_owned(),
            verdict: Verdict::Unchecked,
            elements,
            equal_bits: None,
            mismatches: 0,
            max_ulp: None,
            max_error_over_bound: None,
            first_mismatch: None,
            diagnosis: None,
            note: Some(note.to_owned()),
            power: None,
            conventions: Vec::new(),
            unbounded: 0,
            remedy: "",
            attainable: 0.0,
            has_choice: false,
            picture: None,
        }
    }

    /// Whether the output was compared, even if the comparison was too weak to pass.
    pub fn is_compared(&self) -> bool {
        self.verdict != Verdict::Unchecked || self.equal_bits.is_some()
    }

    /// Adds a sentence to the note.
    pub(crate) fn add_note(&mut self, more: &str) {
        match self.note.as_mut().filter(|note| !note.is_empty()) {
            Some(note) => *note = format!("{note}; {more}"),
            None => self.note = Some(more.to_owned()),
        }
    }

    /// Sets the power of a comparison with bounds. A pass becomes unchecked if a trivial wrong
    /// answer would also pass or an element has no bound; `remedy` states what to declare.
    pub(crate) fn settle(&mut self, power: Power, remedy: &'static str) {
        if self.unbounded > 0 {
            let count = self.unbounded;
            self.add_note(&format!(
                "{count} elements have no bound, since partial sums may overflow"
            ));
        }
        let gaps = power.gaps();
        if !gaps.is_empty() {
            self.add_note(&format!("the bound would accept {}", gaps.join(", ")));
        }
        let faults = power.not_excluded();
        if !faults.is_empty() {
            self.add_note(&format!("the bound does not exclude {}", faults.join(", ")));
        }
        if self.verdict == Verdict::Pass && (self.unbounded > 0 || !gaps.is_empty()) {
            self.verdict = Verdict::Unchecked;
            self.add_note(remedy);
        }
        self.power = Some(power);
        self.remedy = remedy;
    }

    /// A pass that would leave a uniform error of more than `limit` unnoticed becomes unchecked.
    pub(crate) fn require_power(&mut self, limit: f64) {
        let limit = limit.max(self.attainable);
        let error = self.power.filter(|power| power.is_below(limit));
        let Some(error) = error.and_then(|power| power.uniform_error) else { return };
        if self.verdict != Verdict::Pass {
            return;
        }
        self.verdict = Verdict::Unchecked;
        self.add_note(&format!(
            "the bound would accept a uniform error of {}, and a pass excludes any above {} \
             (--min-power)",
            power::percent(error),
            power::percent(limit)
        ));
        if !self.remedy.is_empty() {
            self.add_note(self.remedy);
        }
    }
}
