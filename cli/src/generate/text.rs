//! The prompt's text and the text that is generated.

use std::borrow::Cow;
use std::io::{self, IsTerminal as _, Read as _, Write as _};

use crate::style::is_harmful;

/// Largest prompt that is read from a file or from standard input, in bytes.
const PROMPT_LIMIT: u64 = 64 << 20;

/// The whole of `source`, which may have no end.
pub(super) fn prompt(source: impl io::Read) -> anyhow::Result<String> {
    let mut bytes = Vec::new();
    source.take(PROMPT_LIMIT + 1).read_to_end(&mut bytes)?;
    anyhow::ensure!(
        bytes.len() as u64 <= PROMPT_LIMIT,
        "found more than {PROMPT_LIMIT} bytes, expected a prompt of at most that many"
    );
    String::from_utf8(bytes).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        anyhow::anyhow!("found bytes that are not UTF-8 from byte {at} on, expected text")
    })
}

/// A piece of the text as a terminal may show it: a model's tokens can hold escape sequences. Files and
/// pipes get the text itself. Joiners, which emoji and some scripts need, stay.
fn shown(piece: &str, is_terminal: bool) -> Cow<'_, str> {
    let escapes = |c: char| is_harmful(c) && !matches!(c, '\n' | '\t' | '\u{200c}' | '\u{200d}');
    if !is_terminal || !piece.contains(escapes) {
        return Cow::Borrowed(piece);
    }
    let escape = |c: char| match escapes(c) {
        true => c.escape_unicode().to_string(),
        false => c.to_string(),
    };
    Cow::Owned(piece.chars().map(escape).collect())
}

/// Writes a piece of the text at once.
pub(super) fn show(piece: &str, failed: &mut Option<anyhow::Error>) {
    let mut out = io::stdout().lock();
    let piece = shown(piece, out.is_terminal());
    if let Err(e) = out.write_all(piece.as_bytes()).and_then(|()| out.flush()) {
        *failed = Some(e.into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_gets_no_control_characters_and_a_pipe_gets_the_text() {
        let text = "a\u{1b}[2J\u{202e}b\r\n\tc \u{1f469}\u{200d}\u{1f467}";
        assert_eq!(shown(text, false), text);
        let expected = "a\\u{1b}[2J\\u{202e}b\\u{d}\n\tc \u{1f469}\u{200d}\u{1f467}";
        assert_eq!(shown(text, true), expected);
    }

    #[test]
    fn a_prompt_without_end_or_of_bytes_is_refused() {
        let endless = prompt(io::repeat(b'a')).unwrap_err().to_string();
        assert!(endless.contains("more than 67108864 bytes"), "{endless}");
        let bytes = prompt(&b"abc\xff"[..]).unwrap_err().to_string();
        assert!(bytes.contains("not UTF-8 from byte 3"), "{bytes}");
        assert_eq!(prompt("wäves".as_bytes()).unwrap(), "wäves");
    }
}
