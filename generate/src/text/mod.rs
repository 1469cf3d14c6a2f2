//! Text to tokens and back: `tokenizer.json`, the chat template, and the tokens that end a text.
//!
//! Both files can make the libraries that read them use any amount of memory, time and stack.
//! [`Text::open_with`] therefore leaves them to a process with limits of the operating system, a
//! [`Helper`]; [`Text::open`] reads them in this process, for folders that are trusted.

mod chat;
mod date;
mod growth;
mod library;
mod local;
mod stage;
mod stream;
mod tokens;
mod worker;

use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use marlinspike::bounded_json;
use marlinspike_model::model::{CONFIG_LIMIT, CONFIG_MEMORY, ModelError, files};
use serde_json::Value;

use chat::Specials;
use local::{Local, Template};
use stage::{Marks, Stage};
use worker::{Failure, Worker};

pub use chat::Message;
pub use date::Date;
pub use stream::TextStream;
pub use worker::{Helper, serve};

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
    #[error("{}: {key}: {reason}", path.display())]
    Template {
        /// The file.
        path: PathBuf,
        /// The key, or `the file`.
        key: &'static str,
        /// Why.
        reason: String,
    },
    /// A limit of the process that reads tokenizer and template.
    #[error("{}: {key}: {limit}: found {found}, expected {expected}", path.display())]
    Limit {
        /// The file.
        path: PathBuf,
        /// The key, or `the file`.
        key: &'static str,
        /// Memory, CPU time or stack.
        limit: &'static str,
        /// What was needed.
        found: String,
        /// The limit.
        expected: String,
    },
    /// A program that cannot read tokenizers and templates for this one.
    #[error("{}: {problem}", program.display())]
    Helper {
        /// The program.
        program: PathBuf,
        /// What is wrong with it.
        problem: String,
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
    files: Files,
    engine: Mutex<Engine>,
    date: Option<Date>,
}

/// Where tokenizer and template are read.
#[derive(Debug)]
enum Engine {
    Local(Box<Local>),
    Worker(Box<Worker>),
}

/// The files of a folder, without the tokenizer.
#[derive(Debug)]
struct Files {
    dir: PathBuf,
    /// The file with the template, if there is one.
    template: Option<&'static str>,
    stop: Vec<u32>,
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

impl Files {
    /// The files of a folder, the bytes of its tokenizer and its template.
    fn read(dir: &Path) -> Result<(Self, String, Option<Template>), TextError> {
        let path = dir.join("tokenizer.json");
        let Some(tokenizer) = read(&path, TOKENIZER_LIMIT)? else {
            return Err(TextError::NoTokenizer { dir: dir.to_owned() });
        };
        let path = dir.join("tokenizer_config.json");
        let config = json(&path)?;
        const OWN: &str = "chat_template.jinja";
        let (template, text) = match read(&dir.join(OWN), chat::TEMPLATE_LIMIT as u64)? {
            Some(own) => (OWN, Some(own)),
            None => {
                let found = chat::of_config(&config).map_err(|found| {
                    let expected = "a text, or a list with a template named default";
                    key_error(&path, "chat_template", found, expected)
                })?;
                ("tokenizer_config.json", found)
            }
        };
        let specials = Specials::of_config(&config);
        let mut stop = None;
        for name in ["generation_config.json", "config.json"] {
            let path = dir.join(name);
            if stop.is_none() {
                stop = stop_tokens(&path, &json(&path)?)?;
            }
        }
        let (dir, stop) = (dir.to_owned(), stop.unwrap_or_default());
        let template = text.is_some().then_some(template);
        let text = text.map(|text| Template { text, specials });
        Ok((Self { dir, template, stop }, tokenizer, text))
    }

    /// The file and the key of a stage.
    fn place(&self, stage: Stage) -> (PathBuf, &'static str) {
        let own_file = self.template == Some("chat_template.jinja");
        match stage {
            Stage::Template if own_file => (self.dir.join("chat_template.jinja"), "the file"),
            Stage::Template => (self.dir.join("tokenizer_config.json"), "chat_template"),
            stage => (self.dir.join("tokenizer.json"), stage.key().unwrap_or("the file")),
        }
    }

    /// The error of a stage.
    fn wrong(&self, stage: Stage, reason: String) -> TextError {
        match (stage, stage.key()) {
            (Stage::Template, _) => {
                let (path, key) = self.place(stage);
                TextError::Template { path, key, reason }
            }
            (_, key) => {
                let (path, _) = self.place(stage);
                let key = key.map(|key| format!("{key}: ")).unwrap_or_default();
                TextError::Tokenizer { path, reason: format!("{key}{reason}") }
            }
        }
    }

    fn failed(&self, failure: Failure) -> TextError {
        match failure {
            Failure::Reason(stage, reason) => self.wrong(stage, reason),
            Failure::Limit(stage, limit, found, expected) => {
                let (path, key) = self.place(stage);
                TextError::Limit { path, key, limit, found, expected }
            }
            Failure::Helper(program, problem) => TextError::Helper { program, problem },
        }
    }
}

impl Text {
    /// Reads the text files of a trusted model folder in this process. A hostile tokenizer or template
    /// can use up its memory and stack, which ends it; [`Text::open_with`] does not trust the folder.
    ///
    /// # Errors
    /// [`TextError`] naming the file that is missing or cannot be read.
    pub fn open(dir: &Path) -> Result<Self, TextError> {
        let (files, tokenizer, template) = Files::read(dir)?;
        let marks = Marks::new(|_| ());
        let local = Local::new(tokenizer.as_bytes(), template, marks.clone());
        let local = local.map_err(|reason| files.wrong(marks.current(), reason))?;
        Ok(Self { files, engine: Mutex::new(Engine::Local(Box::new(local))), date: None })
    }

    /// Reads the text files of a model folder: tokenizer and template in a process of `helper`, which
    /// the operating system limits.
    ///
    /// # Errors
    /// As [`Text::open`]; [`TextError::Limit`]; [`TextError::Helper`] for a program that is no helper.
    pub fn open_with(dir: &Path, helper: &Helper) -> Result<Self, TextError> {
        let (files, tokenizer, template) = Files::read(dir)?;
        let worker = Worker::start(helper, tokenizer.as_bytes(), template.as_ref());
        let worker = worker.map_err(|failure| files.failed(failure))?;
        Ok(Self { files, engine: Mutex::new(Engine::Worker(Box::new(worker))), date: None })
    }

    /// The date that chat templates print, instead of the current one of UTC.
    #[must_use]
    pub fn with_date(self, date: Date) -> Self {
        Self { date: Some(date), ..self }
    }

    /// The tokens that end a text: `eos_token_id` of `generation_config.json`, or else of
    /// `config.json`.
    pub fn stop(&self) -> &[u32] {
        &self.files.stop
    }

    /// The tokens of a plain prompt, with those that the tokenizer adds to every text.
    ///
    /// # Errors
    /// [`TextError::Tokenizer`], [`TextError::Limit`].
    pub fn encode(&self, prompt: &str) -> Result<Vec<u32>, TextError> {
        self.call(|local| local.encode(prompt, true), |worker| worker.encode(prompt))
    }

    /// The tokens of a conversation by the model's chat template, up to where the assistant answers.
    ///
    /// # Errors
    /// [`TextError::NoTemplate`], [`TextError::Template`], [`TextError::Tokenizer`],
    /// [`TextError::Limit`].
    pub fn encode_chat(&self, messages: &[Message<'_>]) -> Result<Vec<u32>, TextError> {
        if self.files.template.is_none() {
            return Err(TextError::NoTemplate { dir: self.files.dir.clone() });
        }
        self.call(
            |local| local.encode_chat(messages, self.date),
            |worker| worker.encode_chat(messages, self.date),
        )
    }

    /// Turns new tokens into text, piece by piece.
    pub fn stream(&self) -> TextStream<'_> {
        TextStream::new(self)
    }

    /// The text of the first `known` tokens, and of all.
    fn decode(&self, tokens: &[u32], known: usize) -> Result<[String; 2], TextError> {
        self.call(|local| local.decode(tokens, known), |worker| worker.decode(tokens, known))
    }

    /// Asks the engine; an error names file and key.
    fn call<T>(
        &self,
        local: impl FnOnce(&Local) -> Result<T, String>,
        worker: impl FnOnce(&mut Worker) -> Result<T, Failure>,
    ) -> Result<T, TextError> {
        match &mut *self.engine.lock().unwrap_or_else(PoisonError::into_inner) {
            Engine::Local(engine) => {
                local(engine).map_err(|reason| self.files.wrong(engine.marks.current(), reason))
            }
            Engine::Worker(engine) => worker(engine).map_err(|failure| self.files.failed(failure)),
        }
    }
}
