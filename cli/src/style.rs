//! Colours, and escaping of untrusted text for a terminal.

use std::borrow::Cow;
use std::env;
use std::io::{self, IsTerminal};

use anstyle::{AnsiColor, Style};
pub use marlinspike_report::{is_harmful, printable, shortened};

/// When to use colours.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum ColorChoice {
    /// If the output is a terminal that supports them and `NO_COLOR` is not set.
    #[default]
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}

impl ColorChoice {
    fn resolve(self, terminal: bool) -> Paint {
        // no-color.org: present and not empty.
        let unwanted = env::var_os("NO_COLOR").is_some_and(|v| !v.is_empty())
            || env::var_os("TERM").is_some_and(|v| v == "dumb");
        Paint { on: self == Self::Always || (self == Self::Auto && terminal && !unwanted) }
    }

    /// For standard output.
    pub fn for_stdout(self) -> Paint {
        self.resolve(io::stdout().is_terminal())
    }

    /// For standard error.
    pub fn for_stderr(self) -> Paint {
        self.resolve(io::stderr().is_terminal())
    }
}

/// Styles text if colours are enabled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Paint {
    /// Whether colours are enabled.
    pub on: bool,
}

impl Paint {
    fn with(self, style: Style, text: &str) -> String {
        if self.on { format!("{style}{text}{style:#}") } else { text.to_owned() }
    }

    /// A success.
    pub fn good(self, text: &str) -> String {
        self.with(AnsiColor::Green.on_default(), text)
    }

    /// A failure.
    pub fn bad(self, text: &str) -> String {
        self.with(AnsiColor::Red.on_default().bold(), text)
    }

    /// A warning.
    pub fn odd(self, text: &str) -> String {
        self.with(AnsiColor::Yellow.on_default(), text)
    }

    /// Secondary text.
    pub fn dim(self, text: &str) -> String {
        self.with(Style::new().dimmed(), text)
    }

    /// Emphasis.
    pub fn strong(self, text: &str) -> String {
        self.with(Style::new().bold(), text)
    }
}

/// Complete output, JSON or text, with harmful characters as JSON's `\uXXXX`, except line ends,
/// tabs and this program's own colours. In JSON, harmful characters occur only in strings, and
/// escaping does not change their values.
pub fn escaped(text: &str) -> Cow<'_, str> {
    let escape = |c: char| is_harmful(c) && !matches!(c, '\n' | '\t' | '\u{1b}');
    if !text.contains(escape) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 32);
    for c in text.chars() {
        match escape(c) {
            true => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    out.push_str(&format!("\\u{unit:04x}"));
                }
            }
            false => out.push(c),
        }
    }
    Cow::Owned(out)
}

/// `1 module`, `3 modules`: a number with its noun, which takes an `s`.
pub fn counted(n: usize, noun: &str) -> String {
    let plural = if n == 1 { "" } else { "s" };
    format!("{n} {noun}{plural}")
}

/// A number of bytes with a binary unit.
pub fn size(bytes: u64) -> String {
    match bytes {
        0..1024 => format!("{bytes} B"),
        1024..1_048_576 => format!("{:.1} KiB", bytes as f64 / 1024.0),
        1_048_576..1_073_741_824 => format!("{:.1} MiB", bytes as f64 / 1_048_576.0),
        _ => format!("{:.2} GiB", bytes as f64 / 1_073_741_824.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_written_out() {
        assert_eq!(printable("out.y"), "out.y");
        assert_eq!(printable("a\u{1b}[2J\nb"), "a\\u{1b}[2J\\u{a}b");
        assert_eq!(printable("\u{202e}x"), "\\u{202e}x");
    }

    #[test]
    fn escaped_json_keeps_its_value() {
        let hidden = "\u{9b}2J\u{202e}\u{2066}\u{2028}\u{200b}\u{feff}\u{e0041}\u{7f}\u{85}é😀";
        assert_eq!(hidden.chars().filter(|&c| is_harmful(c)).count(), 9);
        let value = serde_json::json!({ hidden: [hidden, "a\nb\u{1b}[31m"] });
        let text = format!("{value}\n");
        let safe = escaped(&text);
        assert!(!safe.trim_end().contains(is_harmful), "{safe}");
        assert!(
            safe.contains("\\u009b2J\\u202e")
                && safe.contains("\\udb40\\udc41")
                && safe.contains("é😀")
        );
        assert_eq!(serde_json::from_str::<serde_json::Value>(&safe).unwrap(), value);
        assert!(matches!(escaped("plain \u{1b}[1mtext\u{1b}[0m\n"), Cow::Borrowed(_)));
    }

    #[test]
    fn nouns_agree_with_their_number() {
        let found = [0, 1, 2].map(|n| counted(n, "file"));
        assert_eq!(found, ["0 files", "1 file", "2 files"]);
    }

    #[test]
    fn no_style_where_it_is_off() {
        assert_eq!(Paint { on: false }.bad("x"), "x");
        assert!(Paint { on: true }.bad("x").starts_with('\u{1b}'));
    }
}
