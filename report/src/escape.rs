//! Untrusted text: characters that control a terminal or hide text, and HTML.

use std::borrow::Cow;

/// Whether a character controls a terminal or hides text: control characters (including C1),
/// direction marks, line separators, zero-width characters, tags.
pub fn is_harmful(c: char) -> bool {
    c.is_control()
        || matches!(
            c,
            '\u{ad}'
                | '\u{34f}'
                | '\u{61c}'
                | '\u{180e}'
                | '\u{200b}'..='\u{200f}'
                | '\u{2028}'..='\u{202e}'
                | '\u{2060}'..='\u{206f}'
                | '\u{feff}'
                | '\u{fff9}'..='\u{fffb}'
                | '\u{e0000}'..='\u{e007f}'
        )
}

/// Longest word and longest text that are shown whole, in bytes.
const WORD: usize = 1024;
const TEXT: usize = 32_768;

/// `text`, in which the middle of an overlong word is left out, and the middle of an overlong text: a file
/// can hold a name of any length, and messages quote names.
pub fn shortened(text: &str) -> Cow<'_, str> {
    if text.len() <= WORD {
        return Cow::Borrowed(text);
    }
    let mut words = String::new();
    for word in text.split_inclusive(char::is_whitespace) {
        words.push_str(&without_middle(word, WORD));
    }
    Cow::Owned(without_middle(&words, TEXT).into_owned())
}

/// `text` without its middle, if it has more than `limit` bytes: a half and an eighth of `limit` stay.
fn without_middle(text: &str, limit: usize) -> Cow<'_, str> {
    if text.len() <= limit {
        return Cow::Borrowed(text);
    }
    let boundary = |at: usize| (0..=at).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
    let (head, tail) = (boundary(limit / 2), boundary(text.len() - limit / 8));
    let (first, last) = (&text[..head], &text[tail..]);
    Cow::Owned(format!("{first}[{} bytes left out]{last}", tail - head))
}

/// `text` with harmful characters ([`is_harmful`]) escaped, and [`shortened`].
pub fn printable(text: &str) -> Cow<'_, str> {
    let text = shortened(text);
    if !text.contains(is_harmful) {
        return text;
    }
    let escape =
        |c: char| if is_harmful(c) { c.escape_unicode().to_string() } else { c.to_string() };
    Cow::Owned(text.chars().map(escape).collect())
}

/// Escapes text for HTML content and quoted attributes; control characters become escape sequences.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in printable(text).chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_from_a_file_is_markup() {
        assert_eq!(
            escape("<script src=\"x\">&'\u{1b}"),
            "&lt;script src=&quot;x&quot;&gt;&amp;&#39;\\u{1b}"
        );
    }

    #[test]
    fn an_overlong_name_is_cut_and_what_follows_it_stays() {
        let name = "é".repeat(10_000_000);
        let text = format!("tensor `{name}`: found 3 values, expected 4");
        let shown = printable(&text);
        assert!(shown.len() < 1024 && shown.starts_with("tensor `éé"), "{}", shown.len());
        assert!(shown.contains(" bytes left out]é"), "{shown}");
        assert!(shown.ends_with("é`: found 3 values, expected 4"), "{shown}");
        // A name of many words.
        let text = format!("tensor `{}`: found 3 values", "a b ".repeat(5_000_000));
        let shown = printable(&text);
        assert!(
            shown.len() < 32_768 && shown.ends_with("a b `: found 3 values"),
            "{}",
            shown.len()
        );
        let path = format!("/{}: no such file", "a".repeat(1000));
        assert_eq!(printable(&path), path);
    }
}
