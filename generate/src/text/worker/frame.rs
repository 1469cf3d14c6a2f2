//! Messages over pipes: a byte for the kind, eight for the length, and the payload.

use std::io::{self, Read, Write};

/// What a message says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    /// To the worker: limits of CPU time and memory, each 8 bytes. No answer.
    Limits = 1,
    /// To the worker: the chat template as JSON. No answer.
    Template,
    /// To the worker: `tokenizer.json`.
    Load,
    /// To the worker: a text to encode.
    Encode,
    /// To the worker: a conversation as JSON.
    Chat,
    /// To the worker: a count, and the tokens to decode.
    Decode,
    /// From the worker: its version, once its first limits are set.
    Ready = 0x80,
    /// From the worker: the number of the stage that begins.
    Stage,
    /// From the worker: the answer.
    Done,
    /// From the worker: what was found and what was expected.
    Failed,
}

const KINDS: [Kind; 10] = [
    Kind::Limits,
    Kind::Template,
    Kind::Load,
    Kind::Encode,
    Kind::Chat,
    Kind::Decode,
    Kind::Ready,
    Kind::Stage,
    Kind::Done,
    Kind::Failed,
];

/// A message.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Frame {
    pub(super) kind: Kind,
    pub(super) payload: Vec<u8>,
}

/// Writes one message.
pub(super) fn write(out: &mut impl Write, kind: Kind, payload: &[u8]) -> io::Result<()> {
    let mut head = [kind as u8; 9];
    head[1..].copy_from_slice(&(payload.len() as u64).to_le_bytes());
    out.write_all(&head)?;
    out.write_all(payload)?;
    out.flush()
}

/// Reads one message; `None` at the end. Memory grows with the bytes that arrive, not with the length
/// that the message states.
pub(super) fn read(input: &mut impl Read, limit: u64) -> io::Result<Option<Frame>> {
    let wrong = |problem: String| io::Error::new(io::ErrorKind::InvalidData, problem);
    let mut head = [0; 9];
    if input.read(&mut head[..1])? == 0 {
        return Ok(None);
    }
    input.read_exact(&mut head[1..])?;
    let [kind, length @ ..] = head;
    let kind = KINDS.into_iter().find(|known| *known as u8 == kind);
    let kind = kind.ok_or_else(|| wrong(format!("found a message of kind {}", head[0])))?;
    let length = u64::from_le_bytes(length);
    if length > limit {
        return Err(wrong(format!("found a message of {length} bytes, expected at most {limit}")));
    }
    let mut payload = Vec::new();
    if input.take(length).read_to_end(&mut payload)? as u64 != length {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(Some(Frame { kind, payload }))
}

/// Words as bytes.
pub(super) fn bytes_of(words: impl IntoIterator<Item = u32>) -> Vec<u8> {
    words.into_iter().flat_map(u32::to_le_bytes).collect()
}

/// Bytes as words; a rest of fewer than four bytes is an error.
pub(super) fn words_of(bytes: &[u8]) -> Option<Vec<u32>> {
    let (words, rest) = bytes.as_chunks::<4>();
    rest.is_empty().then(|| words.iter().map(|word| u32::from_le_bytes(*word)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_back_and_torn_or_long_ones_are_errors() {
        let mut bytes = Vec::new();
        for (kind, payload) in KINDS.into_iter().zip([&b"a text"[..], b""].into_iter().cycle()) {
            write(&mut bytes, kind, payload).unwrap();
        }
        let mut input = &bytes[..];
        for kind in KINDS {
            assert_eq!(read(&mut input, 6).unwrap().unwrap().kind, kind);
        }
        assert_eq!(read(&mut input, 6).unwrap(), None);
        let mut torn = Vec::new();
        write(&mut torn, Kind::Load, b"abc").unwrap();
        for end in 1..torn.len() {
            let error = read(&mut &torn[..end], 6).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof, "{end}");
        }
        let long = read(&mut &torn[..], 2).unwrap_err().to_string();
        assert_eq!(long, "found a message of 3 bytes, expected at most 2");
        // A stated length takes no memory.
        let stated = [&[Kind::Load as u8][..], &u64::MAX.to_le_bytes(), b"x"].concat();
        let error = read(&mut &stated[..], u64::MAX).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        assert!(read(&mut &[9; 9][..], 6).is_err());
    }

    #[test]
    fn words_are_whole() {
        assert_eq!(words_of(&bytes_of([7, u32::MAX])), Some(vec![7, u32::MAX]));
        assert_eq!(words_of(&[1, 2, 3]), None);
    }
}
