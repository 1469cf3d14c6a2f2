//! Tokenizer and chat template in this process.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::chat::{self, Message, Specials};
use super::date::Date;
use super::library::library;
use super::stage::{Marks, Stage};
use super::tokens::Tokens;

/// The chat template and what it may print.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Template {
    /// Its text.
    pub(super) text: String,
    /// Special tokens of `tokenizer_config.json`.
    pub(super) specials: Specials,
}

/// A tokenizer and a template. Errors are what was found and what was expected; the key is that of the
/// stage which was entered last.
#[derive(Debug)]
pub(super) struct Local {
    tokens: Tokens,
    template: Option<Template>,
    pub(super) marks: Arc<Marks>,
}

impl Local {
    /// Reads a `tokenizer.json`.
    pub(super) fn new(
        tokenizer: &[u8],
        template: Option<Template>,
        marks: Arc<Marks>,
    ) -> Result<Self, String> {
        let tokens = library("tokenizers", || Tokens::parse(tokenizer, &marks))?;
        Ok(Self { tokens, template, marks })
    }

    /// The tokens of a text; `special`: with those that the tokenizer adds to every text.
    pub(super) fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, String> {
        library("tokenizers", || self.tokens.encode(text, special))
    }

    /// The tokens of a conversation.
    pub(super) fn encode_chat(
        &self,
        messages: &[Message<'_>],
        date: Option<Date>,
    ) -> Result<Vec<u32>, String> {
        self.marks.enter(Stage::Template);
        let template = self.template.as_ref().ok_or("found no chat template")?;
        let date = move || date.unwrap_or_else(Date::today);
        let text = chat::render(&template.text, &template.specials, messages, date)?;
        self.encode(&text, false)
    }

    /// The text of the first `known` tokens, and of all.
    pub(super) fn decode(&self, tokens: &[u32], known: usize) -> Result<[String; 2], String> {
        library("tokenizers", || {
            let before = self.tokens.decode(&tokens[..known.min(tokens.len())])?;
            Ok([before, self.tokens.decode(tokens)?])
        })
    }
}
