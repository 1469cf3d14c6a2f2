//! Text from tokens as they arrive.

use super::{Text, TextError};

/// What an incomplete character decodes to.
const REPLACEMENT: char = '\u{fffd}';

/// Collects tokens until they end at the end of a character.
///
/// The pieces joined are the decoded tokens: a character whose bytes are spread over several tokens is
/// never cut, and the spaces that a tokenizer drops at the start of a text are dropped only there.
#[derive(Debug)]
pub struct TextStream<'t> {
    text: &'t Text,
    /// The tokens of the last piece, whose text is known, and those after them.
    tokens: Vec<u32>,
    /// Tokens of the last piece.
    known: usize,
}

impl<'t> TextStream<'t> {
    pub(super) fn new(text: &'t Text) -> Self {
        Self { text, tokens: Vec::new(), known: 0 }
    }

    /// The text that `token` completes; empty if it ends inside a character.
    ///
    /// # Errors
    /// [`TextError::Tokenizer`].
    pub fn push(&mut self, token: u32) -> Result<String, TextError> {
        self.tokens.push(token);
        let [before, all] = self.decoded()?;
        if all.ends_with(REPLACEMENT) {
            return Ok(String::new());
        }
        let piece = all.get(before.len()..).unwrap_or_default().to_owned();
        if !piece.is_empty() {
            self.tokens.drain(..self.known);
            self.known = self.tokens.len();
        }
        Ok(piece)
    }

    /// The rest of the text, with replacement characters for bytes that are not characters.
    ///
    /// # Errors
    /// [`TextError::Tokenizer`].
    pub fn finish(self) -> Result<String, TextError> {
        let [before, all] = self.decoded()?;
        Ok(all.get(before.len()..).unwrap_or_default().to_owned())
    }

    /// The text of the last piece, and with the tokens after it.
    fn decoded(&self) -> Result<[String; 2], TextError> {
        self.text.decode(&self.tokens, self.known)
    }
}
