//! Cases by index, the ids of their cards, and badges.

use marlinspike::check::Verdict;

use crate::Entry;

/// A case with its index in the page.
#[derive(Clone, Copy)]
pub(crate) struct Numbered<'r> {
    pub(crate) index: usize,
    pub(crate) entry: &'r Entry<'r>,
}

pub(crate) fn numbered<'r>(entries: &'r [Entry<'r>]) -> Vec<Numbered<'r>> {
    entries.iter().enumerate().map(|(index, entry)| Numbered { index, entry }).collect()
}

/// The id of an output's card.
pub(crate) fn output_id(case: usize, output: usize) -> String {
    format!("c{case}o{output}")
}

/// The class and the word of a verdict's badge.
pub(crate) fn badge(verdict: Verdict) -> (&'static str, &'static str) {
    match verdict {
        Verdict::Pass => ("pass", "pass"),
        Verdict::Fail => ("fail", "fail"),
        Verdict::Unchecked => ("unchecked", "not checked"),
    }
}
