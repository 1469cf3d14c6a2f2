//! Text to tokens and back: `tokenizer.json`, the chat template, and the tokens that end a text.

mod chat;
mod date;
mod growth;
mod stream;

use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use marlinspike::{bounded_json, panics};
use marlinspike_model::model::{CONFIG_LIMIT, CONFIG_MEMORY, ModelError, files};
use serde_json::Value;
use tokenizers::Tokenizer;
use tokenizers::models::ModelWrapper;

pub use chat::Message;
pub use date::Date;
pub use stream::TextStream;

/// Largest tokenizer read, in bytes; the largest real ones have about 40 MB.
const TOKENIZER_LIMIT: u64 = 256 << 20;

/// A folder's text files that cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// The folder has no tokenizer.
    #[error("{}: found no tokenizer.json", dir.display())]
    NoTokenizer {
        /// The folder.
        dir: PathBuf,
    },
    /// A file that cannot be read.
    #[error(transparent)]
    File(#[from] ModelError),
    /// A tokenizer that cannot be read, or a text that it cannot encode.
    #[error("{}: {reason}", path.display())]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// The folder has no chat template.
    #[error(
        "{}: found no chat template, expected one in chat_template.jinja or tokenizer_config.json",
        dir.display()
    )]
    NoTemplate {
        /// The folder.
        dir: PathBuf,
    },
    /// A chat template that fails.
    #[error("chat template of {}: {reason}", dir.display())]
    Template {
        /// The folder.
        dir: PathBuf,
        /// Why.
        reason: String,
    },
    /// A key with another value.
    #[error("{}: {key}: found {found}, expected {expected}", path.display())]
    Key {
        /// The file.
        path: PathBuf,
        /// The key.
        key: &'static str,
        /// What it holds.
        found: String,
        /// What is read.
        expected: &'static str,
    },
}

/// The text side of a model.
#[derive(Debug)]
pub struct Text {
    dir: PathBuf,
    tokenizer: Tokenizer,
    /// `tokenizer_config.json`, or null.
    config: Value,
    template: Option<String>,
    stop: Vec<u32>,
    date: Option<Date>,
}

/// A text file of at most `limit` bytes; `None` if there is none.
fn read(path: &Path, limit: u64) -> Result<Option<String>, TextError> {
    let io = |source| ModelError::Io { path: path.to_owned(), source };
    // A link to no file is an error, not a missing file.
    match path.symlink_metadata() {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        found => found.map_err(io)?,
    };
    let (file, stamp) = files::open(path)?;
    if stamp.len > limit {
        let (path, found) = (path.to_owned(), stamp.len);
        return Err(ModelError::TooLarge { path, found, limit }.into());
    }
    let mut text = String::new();
    file.take(limit).read_to_string(&mut text).map_err(io)?;
    Ok(Some(text))
}

/// A JSON object; null if there is no file.
fn json(path: &Path) -> Result<Value, TextError> {
    let Some(text) = read(path, CONFIG_LIMIT)? else { return Ok(Value::Null) };
    let wrong = |reason| ModelError::Json { path: path.to_owned(), reason };
    let parsed: Value =
        bounded_json::parse(&text, CONFIG_MEMORY).map_err(|e| wrong(e.to_string()))?;
    if !parsed.is_object() {
        return Err(key_error(path, "the file", &parsed, "an object"));
    }
    Ok(parsed)
}

fn key_error(path: &Path, key: &'static str, found: &Value, expected: &'static str) -> TextError {
    let found = found.to_string().chars().take(60).collect();
    TextError::Key { path: path.to_owned(), key, found, expected }
}

/// Reads a tokenizer. What would make it cut, fill up or vary a prompt is switched off.
fn tokenizer(path: &Path, text: &str) -> Result<Tokenizer, TextError> {
    let wrong = |reason| TextError::Tokenizer { path: path.to_owned(), reason };
    let load = || {
        let mut tokenizer = Tokenizer::from_bytes(text)?;
        tokenizer.with_truncation(None)?.with_padding(None);
        // Dropout splits the same text into other tokens each time.
        if let ModelWrapper::BPE(model) = tokenizer.get_model()
            && model.dropout.is_some()
        {
            let mut model = model.clone();
            model.dropout = None;
            tokenizer.with_model(model);
        }
        let sections = [
            ("normalizer", serde_json::to_value(tokenizer.get_normalizer())?),
            ("pre_tokenizer", serde_json::to_value(tokenizer.get_pre_tokenizer())?),
            ("decoder", serde_json::to_value(tokenizer.get_decoder())?),
        ];
        Ok((tokenizer, sections))
    };
    let (tokenizer, sections) =
        load().map_err(|e: tokenizers::Error| wrong(format!("not a tokenizer: {e}")))?;
    for (name, section) in sections {
        let found = growth::factor(&section);
        if found > growth::LIMIT {
            let limit = growth::LIMIT;
            let reason = format!(
                "{name}: found components that make a text {found} times as long, expected at most {limit} \
                 times"
            );
            return Err(wrong(reason));
        }
    }
    Ok(tokenizer)
}

/// A panic of the tokenizer, or its error.
struct Failed(Result<TextError, marlinspike::Error>);

impl From<marlinspike::Error> for Failed {
    fn from(error: marlinspike::Error) -> Self {
        Self(Err(error))
    }
}

/// Runs `call`. The tokenizers crate panics for some files that it has read; such a panic is an error
/// that names the file.
fn guarded<T>(path: &Path, call: impl FnOnce() -> Result<T, TextError>) -> Result<T, TextError> {
    panics::catch(|| call().map_err(|e| Failed(Ok(e)))).map_err(|Failed(failed)| {
        failed.unwrap_or_else(|panic| {
            let reason = format!("the tokenizer failed: {panic}");
            TextError::Tokenizer { path: path.to_owned(), reason }
        })
    })
}

/// `eos_token_id` of a config: one id or a list.
fn stop_tokens(path: &Path, config: &Value) -> Result<Option<Vec<u32>>, TextError> {
    let found = config.get("eos_token_id").filter(|v| !v.is_null());
    let Some(found) = found else { return Ok(None) };
    let id = |v: &Value| v.as_u64().and_then(|id| u32::try_from(id).ok());
    let ids = match found.as_array() {
        Some(list) => list.iter().map(id).collect(),
        None => id(found).map(|id| vec![id]),
    };
    let expected = "a token id or a list of them";
    ids.map(Some).ok_or_else(|| key_error(path, "eos_token_id", found, expected))
}

impl Text {
    /// Reads the text files of a model folder.
    ///
    /// # Errors
    /// [`TextError`] naming the file that is missing or cannot be read.
    pub fn open(dir: &Path) -> Result<Self, TextError> {
        let path = dir.join("tokenizer.json");
        let Some(text) = read(&path, TOKENIZER_LIMIT)? else {
            return Err(TextError::NoTokenizer { dir: dir.to_owned() });
        };
        let tokenizer = guarded(&path, || tokenizer(&path, &text))?;
        let path = dir.join("tokenizer_config.json");
        let config = json(&path)?;
        let template = match read(&dir.join("chat_template.jinja"), chat::TEMPLATE_LIMIT as u64)? {
            Some(own) => Some(own),
            None => chat::of_config(&config).map_err(|found| {
                let expected = "a text, or a list with a template named default";
                key_error(&path, "chat_template", found, expected)
            })?,
        };
        let mut stop = None;
        for name in ["generation_config.json", "config.json"] {
            let path = dir.join(name);
            if stop.is_none() {
                stop = stop_tokens(&path, &json(&path)?)?;
            }
        }
        let stop = stop.unwrap_or_default();
        Ok(Self { dir: dir.to_owned(), tokenizer, config, template, stop, date: None })
    }

    /// The date that chat templates print, instead of the current one of UTC.
    #[must_use]
    pub fn with_date(self, date: Date) -> Self {
        Self { date: Some(date), ..self }
    }

    /// The tokens that end a text: `eos_token_id` of `generation_config.json`, or else of
    /// `config.json`.
    pub fn stop(&self) -> &[u32] {
        &self.stop
    }

    /// The tokens of a plain prompt, with those that the tokenizer adds to every text.
    ///
    /// # Errors
    /// [`TextError::Tokenizer`].
    pub fn encode(&self, prompt: &str) -> Result<Vec<u32>, TextError> {
        self.tokens(prompt, true)
    }

    /// The tokens of a conversation by the model's chat template, up to where the assistant answers.
    ///
    /// # Errors
    /// [`TextError::NoTemplate`], [`TextError::Template`], [`TextError::Tokenizer`].
    pub fn encode_chat(&self, messages: &[Message<'_>]) -> Result<Vec<u32>, TextError> {
        let Some(template) = &self.template else {
            return Err(TextError::NoTemplate { dir: self.dir.clone() });
        };
        let own = self.date;
        let date = move || own.unwrap_or_else(Date::today);
        let text = chat::render(template, &self.config, messages, date)
            .map_err(|reason| TextError::Template { dir: self.dir.clone(), reason })?;
        self.tokens(&text, false)
    }

    fn tokens(&self, text: &str, special: bool) -> Result<Vec<u32>, TextError> {
        self.guarded(|tokenizer| {
            let encoded = tokenizer.encode_fast(text, special)?;
            Ok(encoded.get_ids().to_vec())
        })
    }

    /// Turns new tokens into text, piece by piece.
    pub fn stream(&self) -> TextStream<'_> {
        TextStream::new(self)
    }

    fn decode(&self, tokens: &[u32]) -> Result<String, TextError> {
        self.guarded(|tokenizer| tokenizer.decode(tokens, true))
    }

    /// Calls the tokenizer; its errors and panics name the file.
    fn guarded<T>(
        &self,
        call: impl FnOnce(&Tokenizer) -> tokenizers::Result<T>,
    ) -> Result<T, TextError> {
        let path = self.dir.join("tokenizer.json");
        guarded(&path, || {
            let wrong = |e: tokenizers::Error| {
                let (path, reason) = (path.clone(), e.to_string());
                TextError::Tokenizer { path, reason }
            };
            call(&self.tokenizer).map_err(wrong)
        })
    }
}
