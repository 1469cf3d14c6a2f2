//! `--only`: which outputs are judged, and what to do if no name matches.

use std::collections::BTreeSet;

use glob::Pattern;
use marlinspike::check::{CaseReport, Verdict};

use super::Checked;
use crate::error::Explained;
use crate::style::printable;

/// Names that an error lists.
const LISTED: usize = 6;

/// Keeps the outputs that match, judges the case by them, and returns the names of the others.
pub(super) fn select(report: &mut CaseReport, only: &[Pattern]) -> Vec<String> {
    let (kept, others): (Vec<_>, Vec<_>) = std::mem::take(&mut report.outputs)
        .into_iter()
        .partition(|o| only.iter().any(|p| p.matches(&o.name)));
    report.outputs = kept;
    let any = |v| report.outputs.iter().any(|o| o.verdict == v);
    report.verdict = if any(Verdict::Fail) {
        Verdict::Fail
    } else if report.outputs.is_empty() || any(Verdict::Unchecked) {
        Verdict::Unchecked
    } else {
        Verdict::Pass
    };
    others.into_iter().map(|o| o.name).collect()
}

/// The error that no output of any case matches. Its help names the outputs nearest to the patterns.
pub(super) fn no_match(only: &[Pattern], checked: &[Checked]) -> Explained {
    let names: BTreeSet<&str> =
        checked.iter().flat_map(|c| &c.left_out).map(String::as_str).collect();
    let patterns: Vec<_> = only.iter().map(|p| format!("`{p}`")).collect();
    let cases = if checked.len() == 1 { "case" } else { "cases" };
    let message = format!("no output of {} {cases} matches {}", checked.len(), patterns.join(", "));
    Explained::new(message, help(only, &names))
}

fn help(only: &[Pattern], names: &BTreeSet<&str>) -> String {
    let near: Vec<&str> = names
        .iter()
        .copied()
        .filter(|name| only.iter().any(|p| is_near(p.as_str(), name)))
        .collect();
    let (which, names) = if near.is_empty() {
        ("the outputs are", names.iter().copied().collect())
    } else {
        ("similar names", near)
    };
    let listed: Vec<_> = names.iter().take(LISTED).map(|n| format!("`{}`", printable(n))).collect();
    let more = match names.len().saturating_sub(LISTED) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!("{which}: {}{more}; a pattern matches a whole name without `out.`", listed.join(", "))
}

/// Whether someone who typed this pattern may have meant the name: it contains the pattern's text, or
/// at most one letter in three of it, or of its end after a `_`, differs.
fn is_near(pattern: &str, name: &str) -> bool {
    // The distance takes time with the product of both lengths.
    const LONGEST: usize = 64;
    let text: String = pattern.trim_start_matches("out.").replace(['*', '?', '[', ']'], "");
    let (text, name) = (text.to_lowercase(), name.to_lowercase());
    if text.is_empty() || text.len().max(name.len()) > LONGEST {
        return false;
    }
    let ends = name.match_indices('_').map(|(at, _)| &name[at + 1..]);
    let misspelt = |end: &str| {
        let letters = text.chars().count().max(end.chars().count());
        3 * strsim::damerau_levenshtein(&text, end) <= letters
    };
    name.contains(&text) || ends.chain([&*name]).any(misspelt)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn help_for(pattern: &str, names: &[&str]) -> String {
        help(&[Pattern::new(pattern).unwrap()], &names.iter().copied().collect())
    }

    #[test]
    fn similar_names_come_first_and_the_rest_is_counted() {
        let names = ["marlin_qweight", "marlin_scales", "qweight", "y"];
        let text = help_for("qweigth", &names);
        assert!(text.starts_with("similar names: `marlin_qweight`, `qweight`; "), "{text}");
        // A part of a name, the prefix of the file, and capitals.
        for pattern in ["scales", "out.marlin_scales", "MARLIN_SCALES"] {
            let text = help_for(pattern, &names);
            assert!(text.starts_with("similar names: `marlin_scales`; "), "{pattern}: {text}");
        }
        let text = help_for("logits", &names);
        let all = "the outputs are: `marlin_qweight`, `marlin_scales`, `qweight`, `y`; ";
        assert!(text.starts_with(all), "{text}");
        let many: Vec<String> = (0..9).map(|i| format!("output_{i}")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        let text = help_for("logits", &many);
        assert!(text.contains("`output_5` and 3 more; ") && !text.contains("output_6"), "{text}");
    }

    #[test]
    fn names_from_files_are_printable() {
        let text = help_for("y", &["\u{1b}[31my"]);
        assert!(!text.contains('\u{1b}'), "{text:?}");
    }
}
