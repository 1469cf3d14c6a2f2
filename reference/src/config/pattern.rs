//! Python regular expressions as model configs use them, read with `fancy-regex`'s parser.
//!
//! The configs were written for Python's `re.match` (vLLM 0.21.0 imports the `regex` module, which
//! agrees with it on this part of the syntax): anchored at the start of the name only, with
//! lookaround and backreferences. Constructs that the two engines spell differently are translated;
//! constructs without an equivalent are an error that names them.
//!
//! Configs are untrusted, so the size of compiled patterns and the steps of matching are counted,
//! for each pattern and for all of a config together ([`PatternBudget`]).

mod budget;
mod class;
mod matcher;
mod program;

use std::fmt;
use std::sync::Arc;

use fancy_regex::Expr;

use super::limits::MAX_PATTERN;
use super::{ConfigError, ConfigResult};
pub use budget::PatternBudget;
use matcher::Matcher;
use program::Program;

/// A compiled Python pattern that remembers the rule it came from.
#[derive(Clone)]
pub struct PyPattern {
    rule: String,
    program: Program,
    budget: Arc<PatternBudget>,
}

impl fmt::Debug for PyPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PyPattern({:?})", self.rule)
    }
}

impl PyPattern {
    /// Compiles `pattern` with a separate budget; error messages quote `rule` (the pattern with its
    /// prefix).
    ///
    /// Fails with [`ConfigError::InvalidPattern`].
    pub fn new(rule: &str, pattern: &str) -> ConfigResult<Self> {
        Self::within(rule, pattern, &PatternBudget::new())
    }

    /// [`Self::new`], as one of the patterns that share `budget`.
    ///
    /// Fails with [`ConfigError::InvalidPattern`], or with [`ConfigError::PatternBudget`] when
    /// the patterns are too large together.
    pub fn within(rule: &str, pattern: &str, budget: &Arc<PatternBudget>) -> ConfigResult<Self> {
        let invalid = |reason: String| ConfigError::InvalidPattern { rule: shown(rule), reason };
        if pattern.len() > MAX_PATTERN {
            return Err(invalid(format!("{} bytes, at most {MAX_PATTERN}", pattern.len())));
        }
        let translated = translate(pattern).map_err(invalid)?;
        let tree = Expr::parse_tree(&translated).map_err(|e| invalid(e.to_string()))?;
        let (program, size) = Program::new(&tree.expr, budget).map_err(invalid)?;
        budget.grow(rule, size)?;
        Ok(Self { rule: rule.to_owned(), program, budget: Arc::clone(budget) })
    }

    /// Whether the pattern matches a prefix of `name`: Python's `re.match(pattern, name)`.
    ///
    /// Fails with [`ConfigError::PatternTooCostly`] after [`MAX_STEPS`](super::MAX_STEPS) steps, and with
    /// [`ConfigError::PatternBudget`] when the budget is spent.
    pub fn matches_start(&self, name: &str) -> ConfigResult<bool> {
        let mut matcher = Matcher::new(&self.program, name);
        let found = matcher.matches_start();
        self.budget.spend(&self.rule, matcher.steps)?;
        found.map_err(|_| ConfigError::PatternTooCostly {
            rule: shown(&self.rule),
            module: shown(name),
        })
    }

    /// The rule as the config writes it.
    pub fn rule(&self) -> &str {
        &self.rule
    }
}

/// The part of a rule or name that an error message quotes.
fn shown(text: &str) -> String {
    text.chars().take(200).collect()
}

/// Rewrites Python's syntax where the Rust engines read it differently.
fn translate(pattern: &str) -> Result<String, String> {
    let chars: Vec<char> = pattern.chars().collect();
    let multiline = has_flag(&chars, 'm');
    let verbose = has_flag(&chars, 'x');
    let mut out = String::with_capacity(pattern.len() + 8);
    let mut i = 0;
    while i < chars.len() {
        match chars[i] {
            '\\' => i = escape(&chars, i, false, verbose, &mut out)?,
            '[' => i = class(&chars, i, &mut out)?,
            // Python's `$` also matches before a final newline.
            '$' if !multiline => {
                out.push_str(r"(?=\n?\z)");
                i += 1;
            }
            '{' => i = brace(&chars, i, &mut out),
            '}' | ']' => {
                out.push('\\');
                out.push(chars[i]);
                i += 1;
            }
            c => {
                out.push(c);
                i += 1;
            }
        }
    }
    Ok(out)
}

/// Whether an inline flag group such as `(?im)` or `(?m:` sets `flag`.
fn has_flag(chars: &[char], flag: char) -> bool {
    chars.windows(2).enumerate().any(|(i, w)| {
        w == ['(', '?']
            && chars[i + 2..]
                .iter()
                .take_while(|c| c.is_ascii_alphabetic())
                .collect::<Vec<_>>()
                .contains(&&flag)
            && chars[i + 2..]
                .iter()
                .find(|c| !c.is_ascii_alphabetic())
                .is_some_and(|c| matches!(c, ')' | ':' | '-'))
    })
}

/// One escape at `i`; returns the index after it.
fn escape(
    chars: &[char],
    i: usize,
    in_class: bool,
    verbose: bool,
    out: &mut String,
) -> Result<usize, String> {
    let Some(&c) = chars.get(i + 1) else {
        return Err("a backslash ends the pattern".to_owned());
    };
    match c {
        'Z' if !in_class => out.push_str(r"\z"),
        'A' | 'B' if !in_class => out.extend(['\\', c]),
        // Inside a class, Python's `\b` is a backspace.
        'b' if in_class => out.push_str(r"\x08"),
        'b' | 'd' | 'D' | 's' | 'S' | 'w' | 'W' | 'n' | 'r' | 't' | 'f' | 'v' | 'a' => {
            out.extend(['\\', c]);
        }
        'x' | 'u' | 'U' => {
            let len = match c {
                'x' => 2,
                'u' => 4,
                _ => 8,
            };
            let digits: String = chars[i + 2..].iter().take(len).collect();
            let code = u32::from_str_radix(&digits, 16).ok().filter(|_| digits.len() == len);
            let Some(value) = code.and_then(char::from_u32) else {
                return Err(format!("\\{c}{digits} is not a character"));
            };
            push_literal(value, out);
            return Ok(i + 2 + len);
        }
        '0' => {
            let digits: String =
                chars[i + 1..].iter().take(3).take_while(|c| ('0'..='7').contains(*c)).collect();
            let code = u32::from_str_radix(&digits, 8).unwrap_or(0);
            push_literal(char::from_u32(code & 0xff).unwrap_or('\0'), out);
            return Ok(i + 1 + digits.len());
        }
        // Three octal digits are a character, in Python as in C.
        '1'..='3' if octal(chars, i + 1) => {
            let digits: String = chars[i + 1..i + 4].iter().collect();
            let code = u32::from_str_radix(&digits, 8).unwrap_or(0);
            push_literal(char::from_u32(code).unwrap_or('\0'), out);
            return Ok(i + 4);
        }
        '1'..='9' if in_class => return Err(format!("the escape \\{c} inside a set")),
        '1'..='9' => {
            // Two digits name one group; delimit it so that a following digit stays a literal.
            let digits: String =
                chars[i + 1..].iter().take(2).take_while(|c| c.is_ascii_digit()).collect();
            out.push_str(&format!("(?:\\{digits})"));
            return Ok(i + 1 + digits.len());
        }
        c if c.is_ascii_alphabetic() => {
            return Err(format!("the escape \\{c} is not one of Python's"));
        }
        c if verbose && (c.is_whitespace() || c == '#') => out.extend(['\\', c]),
        // Escaped punctuation is a literal in Python; `\<` means something else here.
        c => push_literal(c, out),
    }
    Ok(i + 2)
}

/// Whether three octal digits begin at `i`.
fn octal(chars: &[char], i: usize) -> bool {
    chars.get(i..i + 3).is_some_and(|d| d.iter().all(|c| ('0'..='7').contains(c)))
}

/// Appends `c` as a literal.
fn push_literal(c: char, out: &mut String) {
    if c.is_ascii_alphanumeric() || c == '_' || !c.is_ascii() {
        out.push(c);
    } else {
        out.push_str(&format!("\\x{:02X}", c as u32));
    }
}

/// A bracketed set at `i`; returns the index after it. Python has no nested sets and no set
/// operators: `[`, `&&`, `--` and `~~` inside are literals.
fn class(chars: &[char], mut i: usize, out: &mut String) -> Result<usize, String> {
    out.push('[');
    i += 1;
    if chars.get(i) == Some(&'^') {
        out.push('^');
        i += 1;
    }
    let first = i;
    loop {
        match chars.get(i) {
            None => return Err("a set is not closed".to_owned()),
            Some(']') if i > first => {
                out.push(']');
                return Ok(i + 1);
            }
            Some('\\') => i = escape(chars, i, true, false, out)?,
            Some(&c @ ('[' | ']' | '&' | '~' | '^')) => {
                push_literal(c, out);
                i += 1;
            }
            Some('-') => {
                let edge = i == first
                    || matches!(chars.get(i + 1), Some(']' | '-'))
                    || chars[i - 1] == '-';
                out.push_str(if edge { r"\-" } else { "-" });
                i += 1;
            }
            Some(&c) => {
                out.push(c);
                i += 1;
            }
        }
    }
}

/// A `{` at `i`: a repetition when Python reads one, else a literal brace.
fn brace(chars: &[char], i: usize, out: &mut String) -> usize {
    let close = chars[i..].iter().position(|&c| c == '}').map(|p| i + p);
    if let Some(close) = close {
        let body: String = chars[i + 1..close].iter().collect();
        let (lo, hi) = match body.split_once(',') {
            Some((lo, hi)) => (lo, Some(hi)),
            None => (body.as_str(), None),
        };
        let digits = |s: &str| s.bytes().all(|b| b.is_ascii_digit());
        let repetition = digits(lo) && hi.is_none_or(digits) && (hi.is_some() || !lo.is_empty());
        if repetition {
            let lo = if lo.is_empty() { "0" } else { lo };
            match hi {
                None => out.push_str(&format!("{{{lo}}}")),
                Some(hi) => out.push_str(&format!("{{{lo},{hi}}}")),
            }
            return close + 1;
        }
    }
    out.push_str(r"\{");
    i + 1
}
