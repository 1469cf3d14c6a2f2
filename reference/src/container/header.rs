//! A container's header: the range of every tensor, checked for consistency before data is read.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use super::{ContainerError, FileKind, json};
use crate::num::tensor::DType;

/// Largest header that is read, in bytes: the limit of the `safetensors` crate.
pub const HEADER_LIMIT: u64 = 100_000_000;

/// Bytes of the header length at the beginning of a file.
const PREFIX: u64 = 8;

/// One tensor: name, type, shape, range.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    name: String,
    dtype: DType,
    shape: Vec<usize>,
    range: Range<u64>,
}

impl Entry {
    /// Tensor name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Row-major shape.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The tensor's bytes, counted from the start of the file.
    pub fn file_range(&self) -> Range<u64> {
        self.range.clone()
    }

    /// Number of bytes.
    pub fn byte_len(&self) -> u64 {
        self.range.end - self.range.start
    }
}

/// A checked header. The ranges cover the data exactly: no overlap, no gap, nothing past the end.
#[derive(Debug, Clone, PartialEq)]
pub struct Header {
    entries: Vec<Entry>,
    by_name: HashMap<String, usize>,
    metadata: BTreeMap<String, String>,
    data_start: u64,
}

impl Header {
    /// The number of bytes that [`Header::parse`] needs of a file of `file_len` bytes, from its first
    /// bytes (at least 8). Fails if the declared length is impossible.
    pub fn needed(prefix: &[u8], file_len: u64) -> Result<u64, ContainerError> {
        let Some(length) = prefix.first_chunk::<8>() else {
            let found = prefix.len() as u64;
            return Err(ContainerError::Truncated { found, expected: PREFIX });
        };
        let header = u64::from_le_bytes(*length);
        let other = |error| match FileKind::of(prefix) {
            Some(kind) => ContainerError::OtherKind { kind },
            None => error,
        };
        // The limit comes first: a length made of random bytes is nearly always enormous.
        if header > HEADER_LIMIT {
            return Err(other(ContainerError::HeaderTooLarge {
                found: header,
                limit: HEADER_LIMIT,
            }));
        }
        if PREFIX + header > file_len {
            return Err(other(ContainerError::HeaderPastEnd { header, file: file_len }));
        }
        Ok(PREFIX + header)
    }

    /// Reads the header of a file of `file_len` bytes from its first bytes, at least
    /// [`Header::needed`] of them. The data is not needed.
    pub fn parse(prefix: &[u8], file_len: u64) -> Result<Self, ContainerError> {
        let data_start = Self::needed(prefix, file_len)?;
        let Some(text) = usize::try_from(data_start).ok().and_then(|end| prefix.get(8..end)) else {
            let found = prefix.len() as u64;
            return Err(ContainerError::Truncated { found, expected: data_start });
        };
        let text = std::str::from_utf8(text)
            .map_err(|e| ContainerError::NotUtf8 { offset: e.valid_up_to() })?;
        if !text.starts_with('{') {
            let found = text.chars().next().map_or("nothing".to_owned(), |c| format!("{c:?}"));
            return Err(ContainerError::NotAnObject { found });
        }
        let json::RawHeader { entries, mut by_name, metadata } = json::read(text)?;
        let mut entries = entries
            .into_iter()
            .map(|e| check_entry(e, data_start))
            .collect::<Result<Vec<_>, _>>()?;
        // An empty tensor sorts before the one that begins at the same byte.
        entries.sort_by_key(|e| (e.range.start, e.range.end));
        check_cover(&entries, data_start, file_len)?;
        for (i, e) in entries.iter().enumerate() {
            if let Some(place) = by_name.get_mut(&e.name) {
                *place = i;
            }
        }
        Ok(Self { entries, by_name, metadata, data_start })
    }

    /// Every tensor, in file order.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The tensor of this name.
    pub fn get(&self, name: &str) -> Option<&Entry> {
        self.by_name.get(name).map(|&i| &self.entries[i])
    }

    /// `__metadata__`; empty if absent.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// Offset of the data in the file, in bytes.
    pub fn data_start(&self) -> u64 {
        self.data_start
    }
}

/// Checks one entry: offsets in order, and the number of bytes of its shape and type.
fn check_entry(raw: json::RawEntry, data_start: u64) -> Result<Entry, ContainerError> {
    let json::RawEntry { name: tensor, dtype, shape, offsets: [begin, end] } = raw;
    if begin > end {
        return Err(ContainerError::ReversedOffsets { tensor, begin, end });
    }
    let bytes = shape
        .iter()
        .try_fold(dtype.bytes() as u64, |a, &d| a.checked_mul(d))
        .filter(|&b| b < 1 << 63);
    let dims: Option<Vec<usize>> = shape.iter().map(|&d| usize::try_from(d).ok()).collect();
    // The element count must fit too: a zero dimension hides an overflow of the others.
    let elements = shape.iter().filter(|&&d| d != 0).try_fold(1u64, |a, &d| a.checked_mul(d));
    let (Some(expected), Some(dims), Some(_)) = (bytes, dims, elements) else {
        return Err(ContainerError::ShapeOverflow { tensor, shape });
    };
    if end - begin != expected {
        return Err(ContainerError::SizeMismatch { tensor, found: end - begin, expected });
    }
    let file = |offset: u64| offset.checked_add(data_start);
    let (Some(start), Some(stop)) = (file(begin), file(end)) else {
        return Err(ContainerError::OutOfBounds { tensor, end, data_len: u64::MAX - data_start });
    };
    Ok(Entry { name: tensor, dtype, shape: dims, range: start..stop })
}

/// Checks that the entries together cover the data exactly.
fn check_cover(entries: &[Entry], data_start: u64, file_len: u64) -> Result<(), ContainerError> {
    let data_len = file_len - data_start;
    let mut cursor = data_start;
    let mut other = "";
    for e in entries {
        let (tensor, begin) = (e.name.clone(), e.range.start - data_start);
        let expected = cursor - data_start;
        if e.range.end > file_len {
            let end = e.range.end - data_start;
            return Err(ContainerError::OutOfBounds { tensor, end, data_len });
        }
        if e.range.start < cursor {
            let other = other.to_owned();
            return Err(ContainerError::Overlap { tensor, other, begin, expected });
        }
        if e.range.start > cursor {
            return Err(ContainerError::Gap { tensor, begin, expected });
        }
        cursor = e.range.end;
        other = &e.name;
    }
    if cursor != file_len {
        let expected = cursor - data_start;
        return Err(ContainerError::TrailingBytes { found: data_len, expected });
    }
    Ok(())
}
