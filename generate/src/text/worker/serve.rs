//! The worker's side.

use std::io::{self, Write as _};
use std::sync::Arc;
use std::thread;

use serde::Deserialize;

use super::super::chat::Message;
use super::super::local::{Local, Template};
use super::super::stage::Marks;
use super::frame::{self, Frame, Kind};
use super::limits;
use super::{PROTOCOL, REQUEST_LIMIT};

/// Stack of the thread that reads tokenizers and encodes. Templates have threads of their own.
pub(super) const STACK: usize = 64 << 20;

/// A conversation, as the parent sends it.
#[derive(Deserialize)]
struct Chat {
    messages: Vec<OwnMessage>,
    date: Option<String>,
}

#[derive(Deserialize)]
struct OwnMessage {
    role: String,
    content: String,
}

impl OwnMessage {
    fn borrowed(&self) -> Message<'_> {
        Message { role: &self.role, content: &self.content }
    }
}

/// Answers the requests on standard input until it ends, under limits of the operating system on CPU
/// time, address space, open files and written files. A hidden command of a program calls this; see
/// [`Helper`](super::Helper).
///
/// # Errors
/// The system's, and [`io::ErrorKind::InvalidData`] for what is no request.
pub fn serve() -> io::Result<()> {
    limits::begin()?;
    let thread = thread::Builder::new().name("tokenizer".to_owned()).stack_size(STACK);
    let ended = thread.spawn(answer_all)?.join();
    ended.unwrap_or_else(|_| Err(io::Error::other("the worker panicked")))
}

fn answer(kind: Kind, payload: &[u8]) -> io::Result<()> {
    frame::write(&mut io::stdout().lock(), kind, payload)
}

fn invalid(problem: impl ToString) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, problem.to_string())
}

fn answer_all() -> io::Result<()> {
    answer(Kind::Ready, PROTOCOL.as_bytes())?;
    let marks = Marks::new(|stage| {
        // Without a reader, the end of standard input follows.
        let _ = answer(Kind::Stage, &[stage as u8]);
    });
    let (mut template, mut local) = (None, None);
    let mut input = io::stdin().lock();
    while let Some(Frame { kind, payload }) = frame::read(&mut input, REQUEST_LIMIT)? {
        let done = match (kind, &local) {
            (Kind::Limits, _) => {
                let (words, _) = payload.as_chunks::<8>();
                let &[cpu, memory] = words else { return Err(invalid("limits")) };
                limits::apply(u64::from_le_bytes(cpu), u64::from_le_bytes(memory))?;
                continue;
            }
            (Kind::Template, _) => {
                template = Some(serde_json::from_slice::<Template>(&payload).map_err(invalid)?);
                continue;
            }
            (Kind::Load, None) => {
                Local::new(&payload, template.take(), Arc::clone(&marks)).map(|loaded| {
                    local = Some(loaded);
                    Vec::new()
                })
            }
            (_, Some(local)) => request(local, kind, &payload)?,
            (_, None) => return Err(invalid("a request before the tokenizer")),
        };
        match done {
            Ok(bytes) => answer(Kind::Done, &bytes)?,
            Err(reason) => answer(Kind::Failed, reason.as_bytes())?,
        }
        io::stdout().flush()?;
    }
    Ok(())
}

/// The answer of the loaded tokenizer.
fn request(local: &Local, kind: Kind, payload: &[u8]) -> io::Result<Result<Vec<u8>, String>> {
    Ok(match kind {
        Kind::Encode => {
            let text = std::str::from_utf8(payload).map_err(invalid)?;
            local.encode(text, true).map(frame::bytes_of)
        }
        Kind::Chat => {
            let chat: Chat = serde_json::from_slice(payload).map_err(invalid)?;
            let date = chat.date.map(|date| date.parse()).transpose().map_err(invalid)?;
            let messages: Vec<_> = chat.messages.iter().map(OwnMessage::borrowed).collect();
            local.encode_chat(&messages, date).map(frame::bytes_of)
        }
        Kind::Decode => {
            let words = frame::words_of(payload).ok_or_else(|| invalid("tokens"))?;
            let (known, tokens) = words.split_first().ok_or_else(|| invalid("tokens"))?;
            local
                .decode(tokens, *known as usize)
                .and_then(|texts| serde_json::to_vec(&texts).map_err(|e| e.to_string()))
        }
        _ => return Err(invalid("an unknown request")),
    })
}
