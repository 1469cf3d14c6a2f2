//! Which part of the text files the libraries are working on, so that any failure can name its key.
//!
//! A panic can be caught, but a failed allocation, a stack overflow and the end of the CPU time end the
//! process. Each part therefore announces itself before it begins: [`Marks::enter`].

use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use tokenizers::models::TrainerWrapper;
use tokenizers::{
    Decoder, DecoderWrapper, Encoding, Model, ModelWrapper, NormalizedString, Normalizer,
    NormalizerWrapper, PostProcessor, PostProcessorWrapper, PreTokenizedString, PreTokenizer,
    PreTokenizerWrapper, Result, Token,
};

/// Most tokens that a post-processor adds to a prompt. Published ones add a few.
pub(super) const MOST_ADDED: usize = 1024;

/// A part of the text files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Stage {
    /// `tokenizer.json` as a whole.
    Tokenizer,
    AddedTokens,
    Normalizer,
    PreTokenizer,
    Model,
    PostProcessor,
    Decoder,
    Truncation,
    Padding,
    /// The chat template.
    Template,
}

impl Stage {
    const ALL: [Self; 10] = [
        Self::Tokenizer,
        Self::AddedTokens,
        Self::Normalizer,
        Self::PreTokenizer,
        Self::Model,
        Self::PostProcessor,
        Self::Decoder,
        Self::Truncation,
        Self::Padding,
        Self::Template,
    ];

    /// The stage of this number.
    pub(super) fn of_number(number: u8) -> Option<Self> {
        Self::ALL.get(usize::from(number)).copied()
    }

    /// The key of `tokenizer.json` or `tokenizer_config.json`; `None` for a whole file.
    pub(super) fn key(self) -> Option<&'static str> {
        match self {
            Self::Tokenizer => None,
            Self::AddedTokens => Some("added_tokens"),
            Self::Normalizer => Some("normalizer"),
            Self::PreTokenizer => Some("pre_tokenizer"),
            Self::Model => Some("model"),
            Self::PostProcessor => Some("post_processor"),
            Self::Decoder => Some("decoder"),
            Self::Truncation => Some("truncation"),
            Self::Padding => Some("padding"),
            Self::Template => Some("chat_template"),
        }
    }
}

/// The present stage. Cheap to enter again: only a change is reported.
pub(super) struct Marks {
    current: AtomicU8,
    report: Box<dyn Fn(Stage) + Send + Sync>,
}

impl fmt::Debug for Marks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Marks").field(&self.current()).finish()
    }
}

impl Marks {
    /// Marks whose changes are passed to `report`.
    pub(super) fn new(report: impl Fn(Stage) + Send + Sync + 'static) -> Arc<Self> {
        let current = AtomicU8::new(Stage::Tokenizer as u8);
        Arc::new(Self { current, report: Box::new(report) })
    }

    /// States that `stage` begins.
    pub(super) fn enter(&self, stage: Stage) {
        if self.current.swap(stage as u8, Ordering::Relaxed) != stage as u8 {
            (self.report)(stage);
        }
    }

    /// The stage that was entered last.
    pub(super) fn current(&self) -> Stage {
        Stage::of_number(self.current.load(Ordering::Relaxed)).unwrap_or(Stage::Tokenizer)
    }
}

/// A component of a tokenizer that enters its stage whenever it is called.
#[derive(Debug)]
pub(super) struct Marked<T> {
    pub(super) inner: T,
    pub(super) marks: Arc<Marks>,
}

impl Normalizer for Marked<NormalizerWrapper> {
    fn normalize(&self, normalized: &mut NormalizedString) -> Result<()> {
        self.marks.enter(Stage::Normalizer);
        self.inner.normalize(normalized)
    }
}

impl PreTokenizer for Marked<PreTokenizerWrapper> {
    fn pre_tokenize(&self, pretokenized: &mut PreTokenizedString) -> Result<()> {
        self.marks.enter(Stage::PreTokenizer);
        self.inner.pre_tokenize(pretokenized)
    }
}

impl Model for Marked<ModelWrapper> {
    type Trainer = TrainerWrapper;

    fn tokenize(&self, sequence: &str) -> Result<Vec<Token>> {
        self.marks.enter(Stage::Model);
        self.inner.tokenize(sequence)
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    fn get_vocab(&self) -> HashMap<String, u32> {
        self.inner.get_vocab()
    }

    fn get_vocab_size(&self) -> usize {
        self.inner.get_vocab_size()
    }

    fn save(&self, folder: &Path, prefix: Option<&str>) -> Result<Vec<PathBuf>> {
        self.inner.save(folder, prefix)
    }

    fn get_trainer(&self) -> TrainerWrapper {
        self.inner.get_trainer()
    }
}

impl PostProcessor for Marked<PostProcessorWrapper> {
    fn added_tokens(&self, is_pair: bool) -> usize {
        self.marks.enter(Stage::PostProcessor);
        self.inner.added_tokens(is_pair)
    }

    fn process_encodings(
        &self,
        encodings: Vec<Encoding>,
        add_special_tokens: bool,
    ) -> Result<Vec<Encoding>> {
        self.marks.enter(Stage::PostProcessor);
        let tokens = |encodings: &[Encoding]| encodings.iter().map(Encoding::len).sum::<usize>();
        let before = tokens(&encodings);
        let processed = self.inner.process_encodings(encodings, add_special_tokens)?;
        let added = tokens(&processed).saturating_sub(before);
        if added > MOST_ADDED {
            return Err(format!("found {added} added tokens, expected at most {MOST_ADDED}").into());
        }
        Ok(processed)
    }
}

impl Decoder for Marked<DecoderWrapper> {
    fn decode_chain(&self, tokens: Vec<String>) -> Result<Vec<String>> {
        self.marks.enter(Stage::Decoder);
        self.inner.decode_chain(tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_stage_has_its_number() {
        for (i, stage) in Stage::ALL.into_iter().enumerate() {
            assert_eq!((stage as usize, Stage::of_number(i as u8)), (i, Some(stage)));
        }
        assert_eq!(Stage::of_number(Stage::ALL.len() as u8), None);
    }

    #[test]
    fn only_changes_are_reported() {
        let (send, seen) = std::sync::mpsc::channel();
        let marks = Marks::new(move |stage| send.send(stage).unwrap());
        for stage in [Stage::Tokenizer, Stage::Model, Stage::Model, Stage::Decoder, Stage::Model] {
            marks.enter(stage);
        }
        drop(marks);
        assert_eq!(seen.iter().collect::<Vec<_>>(), [Stage::Model, Stage::Decoder, Stage::Model]);
    }
}
