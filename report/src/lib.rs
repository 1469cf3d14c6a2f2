//! Verdicts as HTML: a card for each output that does not pass, with its cause, its first wrong value
//! and plots of where the wrong values are.
//!
//! [`page`] makes a whole page; [`cards`] makes the part about one case, to insert into an existing
//! page. All text from files is escaped; nothing is loaded from elsewhere.
//!
//! ```
//! use marlinspike_report::{Entry, Head, page};
//! # use marlinspike::case::{AlignConfig, Case, CaseConfig};
//! # let config = AlignConfig { block_size: 2, num_experts: 2, top_k: 1, ep_size: 1, ep_rank: 0 };
//! # let case = Case::new("mine", CaseConfig::Align(config), "");
//! # let report = marlinspike::check::CaseReport::new(&case, Vec::new());
//! let entry = Entry::new("mine", "mine.safetensors", Ok(&report));
//! let html = page(&Head::new("1 case"), &[entry]);
//! assert!(html.contains("mine.safetensors"));
//! ```

mod card;
mod error_map;
mod escape;
mod explorer;
mod figures;
pub mod flow;
mod mismatch_map;
mod numbered;
mod outputs;
mod page;
mod svg;
pub mod text;

use marlinspike::check::{CaseReport, OutputReport, Verdict};

pub use escape::{escape, is_harmful, printable, shortened};
pub use page::{CSS, Head, cards, page};

/// A case of a report, or a file that could not be read as one.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Entry<'r> {
    /// Short name.
    pub label: &'r str,
    /// Where the case is from: a path.
    pub source: String,
    /// The verdict, or the error that the file gave.
    pub result: Result<&'r CaseReport, String>,
    /// The known fault that explains every failed output, where a manifest records one.
    pub recorded: Option<&'r str>,
    /// The address of the page that explores layouts, to which wrong values link; empty in that page
    /// itself.
    pub explorer: Option<&'r str>,
}

impl<'r> Entry<'r> {
    /// An entry without a recorded fault.
    pub fn new(
        label: &'r str,
        source: impl Into<String>,
        result: Result<&'r CaseReport, String>,
    ) -> Self {
        Self { label, source: source.into(), result, recorded: None, explorer: None }
    }

    /// The same entry, which fails with the `recorded` fault.
    pub fn with_recorded(self, recorded: Option<&'r str>) -> Self {
        Self { recorded, ..self }
    }

    /// The same entry, shown in the page that explores layouts.
    pub fn in_explorer(self) -> Self {
        self.with_explorer(Some(""))
    }

    /// The same entry with links to the page that explores layouts, at an address.
    pub fn with_explorer(self, explorer: Option<&'r str>) -> Self {
        Self { explorer, ..self }
    }

    /// How good the result is.
    pub fn severity(&self) -> Severity {
        let Ok(report) = self.result else { return Severity::Error };
        match report.verdict {
            Verdict::Pass if report.outputs.iter().any(passes_with_remark) => Severity::Remark,
            Verdict::Pass => Severity::Pass,
            Verdict::Unchecked => Severity::Unchecked,
            Verdict::Fail if self.recorded.is_some() => Severity::Recorded,
            Verdict::Fail => Severity::Fail,
        }
    }
}

/// The result of a case, from best to worst.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// Every output passes.
    Pass,
    /// An output passes with a remark.
    Remark,
    /// The case fails as its manifest records.
    Recorded,
    /// An output is not checked.
    Unchecked,
    /// An output fails.
    Fail,
    /// The file could not be read as a case.
    Error,
}

/// Whether an output passes although it differs from the reference, although a uniform error of
/// more than 1 % would pass as well, or by a choice that the case leaves open.
pub fn passes_with_remark(output: &OutputReport) -> bool {
    let is_weak = output.power.is_some_and(|power| power.remark().is_some());
    output.verdict == Verdict::Pass && (output.diagnosis.is_some() || output.has_choice || is_weak)
}
