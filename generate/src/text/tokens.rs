//! A tokenizer whose components announce themselves.

use std::cell::RefCell;
use std::fmt;
use std::sync::Arc;

use serde::Deserialize;
use serde::de::{Deserializer as _, Error as _, MapAccess, Visitor};
use tokenizers::{
    AddedToken, DecoderWrapper, ModelWrapper, NormalizerWrapper, PaddingParams,
    PostProcessorWrapper, PreTokenizerWrapper, TokenizerBuilder, TokenizerImpl, TruncationParams,
};

use super::growth;
use super::stage::{Marked, Marks, Stage};

type Parts = TokenizerImpl<
    Marked<ModelWrapper>,
    Marked<NormalizerWrapper>,
    Marked<PreTokenizerWrapper>,
    Marked<PostProcessorWrapper>,
    Marked<DecoderWrapper>,
>;

/// The version of `tokenizer.json` that the `tokenizers` crate reads.
const VERSION: &str = "1.0";

/// A tokenizer that neither cuts nor fills up nor varies a prompt.
#[derive(Debug)]
pub(super) struct Tokens {
    parts: Parts,
    marks: Arc<Marks>,
}

impl Tokens {
    /// Reads a `tokenizer.json`.
    ///
    /// # Errors
    /// What was found and what was expected in the part that `marks` names.
    pub(super) fn parse(json: &[u8], marks: &Arc<Marks>) -> Result<Self, String> {
        marks.enter(Stage::Tokenizer);
        let mut json = serde_json::Deserializer::from_slice(json);
        let too_long = RefCell::new(None);
        let reader = Reader { marks, too_long: &too_long };
        let parts = json.deserialize_map(reader).and_then(|parts| json.end().map(|()| parts));
        let parts = parts.map_err(|e| match too_long.take() {
            Some(problem) => problem,
            None => format!("not a tokenizer: {e}"),
        })?;
        Ok(Self { parts, marks: marks.clone() })
    }

    /// The tokens of a text.
    ///
    /// # Errors
    /// As [`Tokens::parse`].
    pub(super) fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, String> {
        // The text is first searched for them.
        self.marks.enter(Stage::AddedTokens);
        let encoded = self.parts.encode_fast(text, special).map_err(|e| e.to_string())?;
        Ok(encoded.get_ids().to_vec())
    }

    /// The text of tokens, without the special ones.
    ///
    /// # Errors
    /// As [`Tokens::parse`].
    pub(super) fn decode(&self, tokens: &[u32]) -> Result<String, String> {
        self.marks.enter(Stage::Decoder);
        self.parts.decode(tokens, true).map_err(|e| e.to_string())
    }
}

/// A token with the id that the file states. The crate numbers added tokens itself.
#[derive(Deserialize)]
struct Added {
    #[serde(rename = "id")]
    _id: u32,
    #[serde(flatten)]
    token: AddedToken,
}

/// Reads the keys as `TokenizerImpl`'s own implementation of `Deserialize` does, and enters the stage of
/// each.
struct Reader<'m> {
    marks: &'m Arc<Marks>,
    /// What is wrong with a component that lengthens texts too much: without the place in the file that
    /// the JSON parser adds to errors.
    too_long: &'m RefCell<Option<String>>,
}

impl Reader<'_> {
    fn marked<T>(&self, inner: T) -> Marked<T> {
        Marked { inner, marks: self.marks.clone() }
    }

    /// Refuses a component that lengthens texts beyond [`growth::LIMIT`].
    fn bounded<T: serde::Serialize, E: serde::de::Error>(&self, part: &Option<T>) -> Result<(), E> {
        let value = serde_json::to_value(part).map_err(E::custom)?;
        let (found, limit) = (growth::factor(&value), growth::LIMIT);
        if found > limit {
            let problem = format!(
                "found components that make a text {found} times as long, expected at most {limit} times"
            );
            *self.too_long.borrow_mut() = Some(problem);
            return Err(E::custom("too long"));
        }
        Ok(())
    }
}

/// The model without dropout, which splits the same text into other tokens each time.
fn without_dropout(mut model: ModelWrapper) -> ModelWrapper {
    if let ModelWrapper::BPE(model) = &mut model {
        model.dropout = None;
    }
    model
}

impl<'de> Visitor<'de> for Reader<'_> {
    type Value = Parts;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with the keys of a tokenizer.json")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Parts, A::Error> {
        let mut builder = TokenizerBuilder::new();
        let mut added: Vec<Added> = Vec::new();
        while let Some(key) = map.next_key::<String>()? {
            match key.as_str() {
                "version" => {
                    let found: String = map.next_value()?;
                    if found != VERSION {
                        let problem = format!("version: found {found:?}, expected {VERSION:?}");
                        return Err(A::Error::custom(problem));
                    }
                }
                "truncation" => {
                    self.marks.enter(Stage::Truncation);
                    map.next_value::<Option<TruncationParams>>()?;
                }
                "padding" => {
                    self.marks.enter(Stage::Padding);
                    map.next_value::<Option<PaddingParams>>()?;
                }
                "added_tokens" => {
                    self.marks.enter(Stage::AddedTokens);
                    added = map.next_value()?;
                }
                "normalizer" => {
                    self.marks.enter(Stage::Normalizer);
                    let part: Option<NormalizerWrapper> = map.next_value()?;
                    self.bounded(&part)?;
                    builder = builder.with_normalizer(part.map(|part| self.marked(part)));
                }
                "pre_tokenizer" => {
                    self.marks.enter(Stage::PreTokenizer);
                    let part: Option<PreTokenizerWrapper> = map.next_value()?;
                    self.bounded(&part)?;
                    builder = builder.with_pre_tokenizer(part.map(|part| self.marked(part)));
                }
                "post_processor" => {
                    self.marks.enter(Stage::PostProcessor);
                    let part: Option<PostProcessorWrapper> = map.next_value()?;
                    builder = builder.with_post_processor(part.map(|part| self.marked(part)));
                }
                "decoder" => {
                    self.marks.enter(Stage::Decoder);
                    let part: Option<DecoderWrapper> = map.next_value()?;
                    self.bounded(&part)?;
                    builder = builder.with_decoder(part.map(|part| self.marked(part)));
                }
                "model" => {
                    self.marks.enter(Stage::Model);
                    let part = without_dropout(map.next_value()?);
                    builder = builder.with_model(self.marked(part));
                }
                _ => {
                    self.marks.enter(Stage::Tokenizer);
                    map.next_value::<serde::de::IgnoredAny>()?;
                }
            }
        }
        self.marks.enter(Stage::Tokenizer);
        let mut parts = builder.build().map_err(A::Error::custom)?;
        self.marks.enter(Stage::AddedTokens);
        parts.add_tokens(added.into_iter().map(|a| a.token)).map_err(A::Error::custom)?;
        Ok(parts)
    }
}

#[cfg(test)]
mod tests {
    use tokenizers::Tokenizer;

    use super::*;

    /// The crate's own reader is the other route.
    #[test]
    fn a_file_is_read_as_the_crate_reads_it() {
        let manifest = marlinspike_golden::Manifest::load().unwrap();
        let texts = [
            "The lighthouse keeper counts the waves: one, two, three",
            "<|im_start|>user\nÜber  🌊🌊\r\n\t0123456789<|im_end|>",
            "",
        ];
        assert!(manifest.models().len() >= 5);
        for model in manifest.models() {
            let json = std::fs::read(manifest.path(&model.dir).join("tokenizer.json")).unwrap();
            let own = Tokens::parse(&json, &Marks::new(|_| ())).unwrap();
            let theirs = Tokenizer::from_bytes(&json).unwrap();
            for text in texts {
                for special in [false, true] {
                    let expected = theirs.encode_fast(text, special).unwrap();
                    assert_eq!(own.encode(text, special).unwrap(), expected.get_ids(), "{text}");
                }
            }
            let all: Vec<u32> = (0..theirs.get_vocab_size(true) as u32 + 3).collect();
            for part in all.chunks(7) {
                assert_eq!(own.decode(part).unwrap(), theirs.decode(part, true).unwrap());
            }
        }
    }

    #[test]
    fn an_error_is_one_of_its_key() {
        let manifest = marlinspike_golden::Manifest::load().unwrap();
        let model = &manifest.models()[0];
        let json = std::fs::read(manifest.path(&model.dir).join("tokenizer.json")).unwrap();
        let json: serde_json::Value = serde_json::from_slice(&json).unwrap();
        for (key, stage) in [
            ("added_tokens", Stage::AddedTokens),
            ("normalizer", Stage::Normalizer),
            ("pre_tokenizer", Stage::PreTokenizer),
            ("model", Stage::Model),
            ("post_processor", Stage::PostProcessor),
            ("decoder", Stage::Decoder),
            ("truncation", Stage::Truncation),
            ("padding", Stage::Padding),
        ] {
            let mut wrong = json.clone();
            wrong[key] = serde_json::json!({"type": "no such component"});
            let marks = Marks::new(|_| ());
            let error = Tokens::parse(wrong.to_string().as_bytes(), &marks).unwrap_err();
            assert!(error.starts_with("not a tokenizer: "), "{key}: {error}");
            assert_eq!((marks.current(), marks.current().key()), (stage, Some(key)));
        }
    }
}
