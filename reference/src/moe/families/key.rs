//! Values of a config.

/// A value of the config: the keys in the order in which they are tried (a dot enters an object),
/// and the default. Without a default an absent key is an error.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Key<T: 'static> {
    /// Names.
    pub keys: &'static [&'static str],
    /// Value if all keys are absent.
    pub default: Option<T>,
}

impl<T> Key<T> {
    pub(super) const fn new(keys: &'static [&'static str], default: T) -> Self {
        Self { keys, default: Some(default) }
    }

    pub(super) const fn required(keys: &'static [&'static str]) -> Self {
        Self { keys, default: None }
    }
}
