//! Wraps text with a hanging indent, and prints repeated texts only once.

use std::collections::HashMap;

pub(super) use crate::output::hanging;
use crate::style::Paint;

/// Columns before a detail's label, and width of the label.
const INDENT: usize = 4;
const LABEL: usize = 13;

/// Settings of the printed report.
#[derive(Debug, Clone, Copy)]
pub(super) struct View {
    pub(super) paint: Paint,
    /// Largest width of a line.
    pub(super) width: usize,
    /// Whether outputs that pass are also printed.
    pub(super) verbose: bool,
    /// Whether `--report` writes a page.
    pub(super) has_report: bool,
}

/// A label and a text about an output. The text may be untrusted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Detail {
    pub(super) label: &'static str,
    pub(super) text: String,
    /// Whether other outputs may have the same text, which is then printed only once.
    pub(super) shared: bool,
}

impl Detail {
    /// A text about this output only.
    pub(super) fn own(label: &'static str, text: impl Into<String>) -> Self {
        Self { label, text: text.into(), shared: false }
    }

    /// A text that other outputs may share.
    pub(super) fn shared(label: &'static str, text: impl Into<String>) -> Self {
        Self { label, text: text.into(), shared: true }
    }
}

/// Prints details. A shared text that occurs more than once gets a number when it is first printed;
/// later occurrences print only the number.
#[derive(Debug, Default)]
pub(super) struct Details {
    uses: HashMap<String, usize>,
    numbers: HashMap<String, usize>,
}

impl Details {
    /// Counts the shared texts among all details that will be printed.
    pub(super) fn new<'d>(details: impl IntoIterator<Item = &'d Detail>) -> Self {
        let mut uses = HashMap::new();
        for detail in details.into_iter().filter(|d| d.shared) {
            *uses.entry(detail.text.clone()).or_default() += 1;
        }
        Self { uses, numbers: HashMap::new() }
    }

    /// The lines of an output's details; references to texts printed before come last.
    pub(super) fn lines(&mut self, details: &[Detail], paint: Paint, width: usize) -> Vec<String> {
        let (mut lines, mut before) = (Vec::new(), Vec::new());
        for Detail { label, text, shared } in details {
            let repeated = *shared && self.uses.get(text).is_some_and(|&n| n > 1);
            match self.numbers.get(text) {
                Some(number) if repeated => before.push(format!("[{number}]")),
                None if repeated => {
                    let number = self.numbers.len() + 1;
                    self.numbers.insert(text.clone(), number);
                    lines.extend(labelled(&format!("{label} [{number}]"), text, paint, width));
                }
                _ => lines.extend(labelled(label, text, paint, width)),
            }
        }
        if !before.is_empty() {
            lines.extend(labelled("see", &before.join(", "), paint, width));
        }
        lines
    }
}

/// `text` after a label, in its own column.
pub(super) fn labelled(label: &str, text: &str, paint: Paint, width: usize) -> Vec<String> {
    let label = paint.dim(&format!("{label:<LABEL$}"));
    let first = format!("{}{label} ", " ".repeat(INDENT));
    hanging(&first, text, INDENT + LABEL + 1, width)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Paint = Paint { on: false };

    #[test]
    fn lines_hang_and_keep_words_whole() {
        let text = "one two three /a/path/that-is-long/than-the-line.safetensors four";
        let lines = hanging("  ab ", text, 5, 20);
        let path = "     /a/path/that-is-long/than-the-line.safetensors";
        assert_eq!(lines, ["  ab one two three", path, "     four"]);
        assert_eq!(hanging("", "a\u{1b}[2Jb", 0, 80), ["a\\u{1b}[2Jb"]);
        // Colours take no columns.
        let label = Paint { on: true }.bad("error");
        assert_eq!(hanging(&format!("{label} "), "one two", 6, 13).len(), 1);
    }

    #[test]
    fn what_is_shared_is_said_once() {
        let note = |text: &str| Detail::shared("note", text);
        let outputs =
            [vec![note("a"), note("b")], vec![note("c"), note("a"), Detail::own("cause", "a")]];
        let outputs = [&outputs[..], &[vec![note("a"), note("c")]]].concat();
        let mut details = Details::new(outputs.iter().flatten());
        let lines = outputs.iter().flat_map(|output| details.lines(output, PLAIN, 80));
        let words = |line: String| line.split_whitespace().collect::<Vec<_>>().join(" ");
        let lines: Vec<String> = lines.map(words).collect();
        let expected = ["note [1] a", "note b", "note [2] c", "cause a", "see [1]", "see [1], [2]"];
        assert_eq!(lines, expected);
    }
}
