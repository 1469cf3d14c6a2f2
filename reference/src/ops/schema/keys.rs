//! What an operation's config keys may hold, noted while the keys are read.

use std::cell::RefCell;

/// What a config key may hold.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum KeyKind {
    /// An integer from 1 to 2^31 - 1.
    Size,
    /// A list of sizes, one or more.
    Sizes,
    /// An integer from 0 to 2^31 - 1.
    Index,
    /// An integer.
    Integer,
    /// `true` or `false`.
    Flag,
    /// A finite number.
    Number,
    /// A string.
    Text,
    /// One of these names.
    Name(Vec<String>),
    /// `"canonical"`, `"canonical_v2"`, `"canonical_wgmma"`, or a schedule as an object.
    Schedule,
    /// An object, whose keys have dotted paths.
    Object,
}

impl KeyKind {
    /// The names of a table.
    pub(crate) fn names<T>(table: &[(&str, T)]) -> Self {
        Self::Name(table.iter().map(|(name, _)| (*name).to_owned()).collect())
    }
}

/// The keys that a config's reader asked for, by dotted path.
#[derive(Debug, Default)]
pub(crate) struct KeyLog(RefCell<Vec<(String, KeyKind)>>);

impl KeyLog {
    /// Notes a key; a later note replaces an earlier one.
    pub(crate) fn note(&self, path: String, kind: KeyKind) {
        let mut keys = self.0.borrow_mut();
        match keys.iter_mut().find(|(known, _)| *known == path) {
            Some((_, noted)) => *noted = kind,
            None => keys.push((path, kind)),
        }
    }

    /// The keys in the order in which they were first read.
    pub(crate) fn into_keys(self) -> Vec<(String, KeyKind)> {
        self.0.into_inner()
    }
}
