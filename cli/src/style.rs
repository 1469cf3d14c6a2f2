//! Colours where they are wanted, and text from files made safe for a terminal.

use std::borrow::Cow;
use std::env;
use std::io::{self, IsTerminal};

use anstyle::{AnsiColor, Style};

/// When to use colours.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum ColorChoice {
    /// On a terminal that can show them, unless `NO_COLOR` is set.
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

/// Styles text, or leaves it as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Paint {
    /// Whether to style.
    pub on: bool,
}

impl Paint {
    fn with(self, style: Style, text: &str) -> String {
        if self.on { format!("{style}{text}{style:#}") } else { text.to_owned() }
    }

    /// What is as it should be.
    pub fn good(self, text: &str) -> String {
        self.with(AnsiColor::Green.on_default(), text)
    }

    /// What is wrong.
    pub fn bad(self, text: &str) -> String {
        self.with(AnsiColor::Red.on_default().bold(), text)
    }

    /// What deserves a look.
    pub fn odd(self, text: &str) -> String {
        self.with(AnsiColor::Yellow.on_default(), text)
    }

    /// What stands back.
    pub fn dim(self, text: &str) -> String {
        self.with(Style::new().dimmed(), text)
    }

    /// What stands out.
    pub fn strong(self, text: &str) -> String {
        self.with(Style::new().bold(), text)
    }
}

/// `text` with control characters (escape sequences, line ends) and marks that turn the reading
/// direction written out.
pub fn printable(text: &str) -> Cow<'_, str> {
    let harmful = |c: char| {
        c.is_control()
            || matches!(c, '\u{200e}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    if !text.contains(harmful) {
        return Cow::Borrowed(text);
    }
    let escape = |c: char| if harmful(c) { c.escape_unicode().to_string() } else { c.to_string() };
    Cow::Owned(text.chars().map(escape).collect())
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
    fn no_style_where_it_is_off() {
        assert_eq!(Paint { on: false }.bad("x"), "x");
        assert!(Paint { on: true }.bad("x").starts_with('\u{1b}'));
    }
}
