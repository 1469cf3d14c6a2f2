//! Tokenizer and chat template in a process of their own, with limits of the operating system.
//!
//! Rendering a template and running a tokenizer take unbounded memory, time or stack for some files, in
//! single operations of libraries that no counter of steps sees. A process can be held to limits by the
//! system, and its end is an error of the file like any other.

mod frame;
mod limits;
mod serve;

use std::ffi::OsString;
use std::io::{self, Read as _};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread::{self, JoinHandle};

use serde_json::json;

use super::chat::{self, Message};
use super::date::Date;
use super::local::Template;
use super::stage::Stage;
use frame::{Frame, Kind};
use limits::Given;

pub use serve::serve;

/// What parent and worker must agree on.
const PROTOCOL: &str = concat!("marlinspike-generate ", env!("CARGO_PKG_VERSION"));
/// Largest request, in bytes: the largest tokenizer or prompt, with JSON around it.
const REQUEST_LIMIT: u64 = 512 << 20;
/// Largest answer, in bytes: 16 million tokens.
const ANSWER_LIMIT: u64 = 64 << 20;
/// Bytes of a worker's standard error that are read.
const ERRORS_LIMIT: u64 = 64 << 10;

/// The program whose process reads tokenizer and template: one that calls [`serve`] when it is started
/// with these arguments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Helper {
    program: PathBuf,
    arguments: Vec<OsString>,
}

impl Helper {
    /// A program and its arguments.
    pub fn new<A: Into<OsString>>(
        program: impl Into<PathBuf>,
        arguments: impl IntoIterator<Item = A>,
    ) -> Self {
        let arguments = arguments.into_iter().map(Into::into).collect();
        Self { program: program.into(), arguments }
    }
}

/// Why a worker gave no answer.
#[derive(Debug)]
pub(super) enum Failure {
    /// What was found and what was expected.
    Reason(Stage, String),
    /// A limit of the system, as (limit, found, expected).
    Limit(Stage, &'static str, String, String),
    /// The helper is not one.
    Helper(PathBuf, String),
}

/// A running worker.
#[derive(Debug)]
pub(super) struct Worker {
    program: PathBuf,
    child: Child,
    input: ChildStdin,
    answers: Receiver<io::Result<Frame>>,
    errors: Option<JoinHandle<Vec<u8>>>,
    stage: Stage,
    given: Given,
    /// Bytes of the template.
    template: usize,
}

impl Drop for Worker {
    fn drop(&mut self) {
        // It may be gone already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Worker {
    /// Starts a worker and gives it the tokenizer and the template.
    pub(super) fn start(
        helper: &Helper,
        tokenizer: &[u8],
        template: Option<&Template>,
    ) -> Result<Self, Failure> {
        let Helper { program, arguments } = helper;
        let refused = |problem: String| Failure::Helper(program.clone(), problem);
        let mut command = Command::new(program);
        command.args(arguments).env_remove("RUST_BACKTRACE");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let started = command.spawn();
        let mut child = started.map_err(|e| refused(format!("cannot be started: {e}")))?;
        let pipes = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let (Some(input), Some(mut output), Some(errors)) = pipes else {
            return Err(refused("has no pipes".to_owned()));
        };
        let (send, answers) = mpsc::channel();
        thread::spawn(move || {
            loop {
                let frame = match frame::read(&mut output, ANSWER_LIMIT) {
                    Ok(Some(frame)) => Ok(frame),
                    Ok(None) => return,
                    Err(error) => Err(error),
                };
                let is_last = frame.is_err();
                if send.send(frame).is_err() || is_last {
                    return;
                }
            }
        });
        let errors = thread::spawn(move || {
            let mut text = Vec::new();
            // What it printed before an error counts as well.
            let _ = errors.take(ERRORS_LIMIT).read_to_end(&mut text);
            text
        });
        let given = Given { tokenizer: tokenizer.len() as u64, ..Given::default() };
        let (stage, errors) = (Stage::Tokenizer, Some(errors));
        let bytes = template.map_or(0, |template| template.text.len());
        let program = program.clone();
        let mut worker =
            Self { program, child, input, answers, errors, stage, given, template: bytes };
        match worker.next() {
            Ok(Frame { kind: Kind::Ready, payload }) if payload == PROTOCOL.as_bytes() => {}
            _ => {
                let problem = format!("found a program that is no helper of {PROTOCOL}");
                return Err(Failure::Helper(worker.program.clone(), problem));
            }
        }
        let template = template.map(|template| json!(template).to_string().into_bytes());
        let template = template.as_ref().map(|json| (Kind::Template, &json[..]));
        let load = (Kind::Load, tokenizer);
        worker.request(&template.into_iter().chain([load]).collect::<Vec<_>>())?;
        Ok(worker)
    }

    /// The tokens of a prompt.
    pub(super) fn encode(&mut self, prompt: &str) -> Result<Vec<u32>, Failure> {
        self.given.prompt += prompt.len() as u64;
        let answer = self.request(&[(Kind::Encode, prompt.as_bytes())])?;
        self.words(&answer)
    }

    /// The tokens of a conversation.
    pub(super) fn encode_chat(
        &mut self,
        messages: &[Message<'_>],
        date: Option<Date>,
    ) -> Result<Vec<u32>, Failure> {
        self.given.prompt += messages.iter().map(|m| m.content.len() as u64).sum::<u64>();
        let date = date.map(|date| date.to_string());
        let chat = json!({ "messages": messages, "date": date }).to_string();
        let answer = self.request(&[(Kind::Chat, chat.as_bytes())])?;
        self.words(&answer)
    }

    /// The text of the first `known` tokens, and of all.
    pub(super) fn decode(&mut self, tokens: &[u32], known: usize) -> Result<[String; 2], Failure> {
        self.given.tokens += 1;
        let words = frame::bytes_of([known as u32].into_iter().chain(tokens.iter().copied()));
        let answer = self.request(&[(Kind::Decode, &words)])?;
        serde_json::from_slice(&answer).map_err(|e| self.no_answer(&e))
    }

    fn words(&self, answer: &[u8]) -> Result<Vec<u32>, Failure> {
        frame::words_of(answer).ok_or_else(|| self.no_answer(&"a torn word"))
    }

    fn no_answer(&self, problem: &dyn std::fmt::Display) -> Failure {
        Failure::Helper(self.program.clone(), format!("its answer: {problem}"))
    }

    /// The answer to the last of several messages.
    fn request(&mut self, messages: &[(Kind, &[u8])]) -> Result<Vec<u8>, Failure> {
        let (cpu, memory) = (self.given.cpu(), self.given.memory());
        let limits = [cpu.to_le_bytes(), memory.to_le_bytes()].concat();
        for (kind, payload) in [(Kind::Limits, &limits[..])].iter().chain(messages) {
            if frame::write(&mut self.input, *kind, payload).is_err() {
                // Its end says why it no longer reads.
                break;
            }
        }
        loop {
            let Frame { kind, payload } = self.next()?;
            match kind {
                Kind::Stage => {
                    let stage = payload.first().and_then(|number| Stage::of_number(*number));
                    self.stage = stage.unwrap_or(self.stage);
                }
                Kind::Done => return Ok(payload),
                Kind::Failed => {
                    let reason = String::from_utf8_lossy(&payload).into_owned();
                    return Err(Failure::Reason(self.stage, reason));
                }
                other => return Err(self.no_answer(&format!("{other:?}"))),
            }
        }
    }

    fn next(&mut self) -> Result<Frame, Failure> {
        let patience = self.given.patience();
        match self.answers.recv_timeout(patience) {
            Ok(Ok(frame)) => Ok(frame),
            Ok(Err(error)) if error.kind() == io::ErrorKind::UnexpectedEof => Err(self.ended()),
            Ok(Err(error)) => {
                let _ = self.child.kill();
                Err(Failure::Reason(self.stage, error.to_string()))
            }
            Err(RecvTimeoutError::Disconnected) => Err(self.ended()),
            Err(RecvTimeoutError::Timeout) => {
                let _ = self.child.kill();
                let (found, expected) =
                    (format!("more than {patience:?}"), format!("at most {patience:?}"));
                Err(Failure::Limit(self.stage, "time", found, expected))
            }
        }
    }

    /// Why the worker has ended.
    fn ended(&mut self) -> Failure {
        let status = self.child.wait();
        let errors = self.errors.take().and_then(|reader| reader.join().ok()).unwrap_or_default();
        let errors = String::from_utf8_lossy(&errors).trim().to_owned();
        match status {
            Ok(status) => self.ending(status, &errors),
            Err(error) => Failure::Helper(self.program.clone(), error.to_string()),
        }
    }

    fn ending(&self, status: ExitStatus, errors: &str) -> Failure {
        let limit = |name, found, expected| Failure::Limit(self.stage, name, found, expected);
        let memory = self.given.memory();
        // Rust's runtime prints both before it aborts.
        if let Some((_, after)) = errors.split_once("memory allocation of ") {
            let bytes = after.split(' ').next().unwrap_or_default();
            let found = format!("one more allocation of {bytes} bytes");
            return limit("memory", found, format!("at most {memory} bytes in all"));
        }
        if errors.contains("has overflowed its stack") {
            let stack = match self.stage {
                Stage::Template => chat::stack(self.template),
                _ => serve::STACK,
            };
            let found = format!("nesting that needs more than {stack} bytes");
            return limit("stack", found, format!("at most {stack} bytes"));
        }
        if is_end_of_time(status) {
            let cpu = self.given.cpu();
            return limit("CPU time", format!("more than {cpu} s"), format!("at most {cpu} s"));
        }
        let said = errors.lines().next_back().unwrap_or("it printed nothing");
        let reason = format!("the process that reads it ended with {status}: {said}");
        Failure::Reason(self.stage, reason)
    }
}

/// Whether the system ended a process since its CPU time was used up.
fn is_end_of_time(status: ExitStatus) -> bool {
    #[cfg(unix)]
    {
        use std::os::unix::process::ExitStatusExt as _;
        status.signal() == Some(rustix::process::Signal::XCPU.as_raw())
    }
    #[cfg(not(unix))]
    {
        let _ = status;
        false
    }
}
