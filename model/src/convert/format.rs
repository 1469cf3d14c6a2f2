//! A kernel format as data: its names, its help texts and its option.
//!
//! A format's behavior is its `Target` ([`super::target`]), found by the descriptor's name.

use std::fmt;

/// The description of a kernel format.
#[derive(Debug)]
#[non_exhaustive]
pub struct Descriptor {
    /// The name on the command line and in the converted config.
    pub name: &'static str,
    /// The name in messages.
    pub title: &'static str,
    /// One line of help.
    pub about: fn() -> String,
    /// Heading of its column in tables: what runs a layer in this format.
    pub column: &'static str,
    /// Help: the names of the converted tensors, in lines of at most 100 columns.
    pub tensors: fn() -> String,
    /// Help: which checkpoints it takes, after `--to NAME takes`; empty where the common help covers it.
    pub takes: fn() -> String,
    /// Help: arguments of `convert` before and after `--to NAME` in examples.
    pub examples: &'static [[&'static str; 2]],
    /// Whether scales and biases have the model's 16-bit type and activations may be quantized, as
    /// the options of a conversion say.
    pub model_dtype: bool,
    /// The option that only this format has.
    pub choice: Option<Choice>,
}

impl Descriptor {
    /// Help: the arguments of `convert` in examples.
    pub fn example_lines(&self) -> impl Iterator<Item = String> {
        self.examples.iter().map(|[paths, options]| {
            let line = format!("{paths} --to {} {options}", self.name);
            line.trim_end().to_owned()
        })
    }
}

impl PartialEq for Descriptor {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for Descriptor {}

/// An option of one format: a choice among names.
#[derive(Debug, Clone, Copy)]
pub struct Choice {
    /// The option's name on the command line.
    pub name: &'static str,
    /// One line of help.
    pub about: fn() -> String,
    /// The names to choose from. The first is the default.
    pub values: &'static [&'static str],
}

impl PartialEq for Choice {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for Choice {}

/// The kernel format that a conversion writes, with its option.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Format {
    descriptor: &'static Descriptor,
    chosen: usize,
}

/// The names alone.
impl fmt::Debug for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let chosen = self.descriptor.choice.map(|choice| choice.values[self.chosen]);
        f.debug_tuple("Format").field(&self.name()).field(&chosen).finish()
    }
}

impl Format {
    /// The format with the default of its option.
    pub(crate) const fn new(descriptor: &'static Descriptor) -> Self {
        Self { descriptor, chosen: 0 }
    }

    /// Its description.
    pub const fn descriptor(self) -> &'static Descriptor {
        self.descriptor
    }

    /// The name on the command line and in the converted config.
    pub const fn name(self) -> &'static str {
        self.descriptor.name
    }

    /// The name in messages.
    pub const fn title(self) -> &'static str {
        self.descriptor.title
    }

    /// Index of the chosen name in [`Choice::values`]; 0 of a format without an option.
    pub(crate) const fn chosen(self) -> usize {
        self.chosen
    }

    /// The format with `value` for its option `name`; `None` where it has no such option or value.
    pub fn with(self, name: &str, value: &str) -> Option<Self> {
        let choice = self.descriptor.choice.filter(|choice| choice.name == name)?;
        let chosen = choice.values.iter().position(|v| *v == value)?;
        Some(Self { chosen, ..self })
    }
}
