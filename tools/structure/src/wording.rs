//! Phrases that comments, strings and documents must not use.
//!
//! Only prose counts: comments and string literals of sources, and Markdown outside of fenced code.
//! Code spans (`` `like_this` ``) are one word that matches no phrase.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};

/// A phrase that must not be used.
#[derive(Debug)]
pub struct Phrase {
    /// Its words in lower case.
    pub words: Vec<String>,
    /// What to write instead.
    pub instead: String,
}

/// `words.txt`: banned phrases, and paths that are not checked.
#[derive(Debug, Default)]
pub struct Wording {
    /// Banned phrases.
    pub phrases: Vec<Phrase>,
    /// Files and folders that are not checked, each with its reason.
    pub skipped: Vec<(String, String)>,
}

/// Extensions of checked files.
const EXTENSIONS: [&str; 4] = ["rs", "md", "cu", "cuh"];

/// Reads `words.txt`: lines `ban | phrase | instead` and `skip | path | reason`.
///
/// # Errors
/// When a line has another form.
pub fn wording(text: &str) -> Result<Wording> {
    let mut wording = Wording::default();
    for line in text.lines().map(str::trim).filter(|l| !l.is_empty() && !l.starts_with('#')) {
        let fields: Vec<&str> = line.split('|').map(str::trim).collect();
        match *fields.as_slice() {
            ["ban", phrase, instead] if !phrase.is_empty() && !instead.is_empty() => {
                let words = phrase.split_whitespace().map(str::to_lowercase).collect();
                wording.phrases.push(Phrase { words, instead: instead.to_owned() });
            }
            ["skip", path, reason] if !path.is_empty() && !reason.is_empty() => {
                wording.skipped.push((path.to_owned(), reason.to_owned()));
            }
            _ => bail!("words.txt: found {line:?}, expected `ban | phrase | instead`"),
        }
    }
    Ok(wording)
}

impl Wording {
    /// Every use of a banned phrase below `root`, as `path:line: phrase; write: instead`.
    ///
    /// # Errors
    /// When a folder or file cannot be read.
    pub fn breaches(&self, root: &Path) -> Result<Vec<String>> {
        let mut found = Vec::new();
        self.walk(root, "", &mut found)?;
        Ok(found)
    }

    fn walk(&self, folder: &Path, path: &str, found: &mut Vec<String>) -> Result<()> {
        let listing = fs::read_dir(folder).with_context(|| folder.display().to_string())?;
        let mut entries = listing.collect::<std::io::Result<Vec<_>>>()?;
        entries.sort_by_key(fs::DirEntry::file_name);
        for entry in entries {
            let name = entry.file_name().to_string_lossy().into_owned();
            let below = if path.is_empty() { name.clone() } else { format!("{path}/{name}") };
            let is_skipped = self.skipped.iter().any(|(skipped, _)| *skipped == below);
            if is_skipped || name.starts_with('.') || name == "target" {
                continue;
            }
            let kind = entry.file_type()?;
            if kind.is_dir() {
                self.walk(&entry.path(), &below, found)?;
            } else if kind.is_file() && EXTENSIONS.iter().any(|e| name.ends_with(&format!(".{e}")))
            {
                let text = fs::read_to_string(entry.path()).with_context(|| below.clone())?;
                found.extend(self.uses(&below, &text));
            }
        }
        Ok(())
    }

    /// Every use of a banned phrase in the prose of one file, by line.
    pub fn uses(&self, path: &str, text: &str) -> Vec<String> {
        let runs = if path.ends_with(".md") { document_runs(text) } else { source_runs(text) };
        let mut found = Vec::new();
        for (line, run) in runs {
            let words = words(line, &run);
            for phrase in &self.phrases {
                let uses = words
                    .windows(phrase.words.len())
                    .filter(|window| window.iter().map(|(_, word)| word).eq(phrase.words.iter()));
                found.extend(uses.map(|window| (window[0].0, phrase)));
            }
        }
        found.sort_by_key(|(at, _)| *at);
        let text = |(at, phrase): (usize, &Phrase)| {
            format!("{path}:{at}: {}; write: {}", phrase.words.join(" "), phrase.instead)
        };
        found.into_iter().map(text).collect()
    }
}

/// Markdown outside of fenced code: runs of lines, each with its first line number.
fn document_runs(text: &str) -> Vec<(usize, String)> {
    let mut runs = vec![(1, String::new())];
    let mut in_code = false;
    for (number, line) in (1..).zip(text.lines()) {
        if line.trim_start().starts_with("```") {
            in_code = !in_code;
            runs.push((number + 1, String::new()));
        } else if let Some((_, run)) = runs.last_mut().filter(|_| !in_code) {
            run.push_str(line);
            run.push('\n');
        }
    }
    runs
}

/// Comments and string literals of a source, each with its first line number. Line comments with
/// nothing but white space between them are one run.
fn source_runs(text: &str) -> Vec<(usize, String)> {
    let mut runs: Vec<(usize, String)> = Vec::new();
    let (mut rest, mut line, mut previous) = (text, 1, ' ');
    let mut in_comment = false;
    while let Some(first) = rest.chars().next() {
        let in_word = previous.is_alphanumeric() || previous == '_';
        let (len, prose) = match first {
            '/' if rest.starts_with("//") => {
                let len = rest.find('\n').unwrap_or(rest.len());
                (len, Some(&rest[2..len]))
            }
            '/' if rest.starts_with("/*") => {
                let len = rest.find("*/").map_or(rest.len(), |end| end + 2);
                (len, Some(&rest[2..len]))
            }
            '"' => literal(rest, 1, "\"", true),
            'r' if !in_word => {
                let hashes = rest[1..].bytes().take_while(|&b| b == b'#').count();
                match rest[1 + hashes..].starts_with('"') {
                    true => literal(rest, 2 + hashes, &format!("\"{}", &rest[1..=hashes]), false),
                    false => (1, None),
                }
            }
            '\'' => (character(rest), None),
            other => (other.len_utf8(), None),
        };
        let is_comment = rest.starts_with("//");
        match (prose, runs.last_mut()) {
            (Some(more), Some((start, run))) if is_comment && in_comment => {
                // Keeps line numbers: one line break for each line since the run's start.
                let missing = line - *start - run.matches('\n').count();
                run.push_str(&"\n".repeat(missing));
                run.push_str(more);
            }
            (Some(more), _) => runs.push((line, more.to_owned())),
            (None, _) => {}
        }
        in_comment = is_comment || (in_comment && first.is_whitespace());
        line += rest[..len].matches('\n').count();
        previous = rest[..len].chars().next_back().unwrap_or(' ');
        rest = &rest[len..];
    }
    runs
}

/// Length and contents of the string literal at the start of `rest`: its contents begin at `start`
/// and end before `end`.
fn literal<'t>(rest: &'t str, start: usize, end: &str, escapes: bool) -> (usize, Option<&'t str>) {
    let mut at = start;
    while at < rest.len() && !rest[at..].starts_with(end) {
        let skipped = if escapes && rest[at..].starts_with('\\') { 2 } else { 1 };
        at += rest[at..].chars().take(skipped).map(char::len_utf8).sum::<usize>();
    }
    let len = (at + end.len()).min(rest.len());
    (len, Some(&rest[start.min(at)..at]))
}

/// Length of the character literal at the start of `rest`, or 1 for a lifetime.
fn character(rest: &str) -> usize {
    let mut chars = rest.char_indices().skip(1);
    match chars.next() {
        Some((_, '\\')) => rest[2..].find('\'').map_or(1, |end| {
            // `'\''`: the first quote is the literal's character.
            if end == 0 { 4.min(rest.len()) } else { end + 3 }
        }),
        Some(_) => match chars.next() {
            Some((at, '\'')) => at + 1,
            _ => 1,
        },
        None => 1,
    }
}

/// The words of a run in lower case, each with its line.
fn words(start: usize, run: &str) -> Vec<(usize, String)> {
    let mut words = Vec::new();
    let (mut rest, mut line) = (run, start);
    while let Some(first) = rest.chars().next() {
        let len = if first == '`' {
            let span = rest[1..].find('`').map_or(1, |end| end + 2);
            words.push((line, "`".to_owned()));
            span
        } else if first == '\\' {
            // An escape such as `\n`; at the end of a line it continues the string.
            rest.chars().take(2).map(char::len_utf8).sum()
        } else if first.is_alphanumeric() {
            let is_part = |c: char| c.is_alphanumeric() || c == '\'' || c == '-' || c == '_';
            let len = rest.find(|c: char| !is_part(c)).unwrap_or(rest.len());
            words.push((line, rest[..len].trim_end_matches(['\'', '-']).to_lowercase()));
            len
        } else {
            first.len_utf8()
        };
        line += rest[..len].matches('\n').count();
        rest = &rest[len..];
    }
    words
}
