//! Parts of a campaign for several machines.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// One of `of` parts of a campaign. Each case belongs to exactly one part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Shard {
    /// From 1 to `of`.
    number: u64,
    of: u64,
}

impl Shard {
    /// The whole campaign as one part.
    pub const WHOLE: Self = Self { number: 1, of: 1 };

    /// Part `number` of `of`, counted from 1; `None` unless `1 <= number <= of`.
    pub fn new(number: u64, of: u64) -> Option<Self> {
        (1..=of).contains(&number).then_some(Self { number, of })
    }

    /// Number of parts.
    pub fn of(self) -> u64 {
        self.of
    }

    /// Every part of the same division.
    pub fn all(self) -> impl Iterator<Item = Self> {
        (1..=self.of).map(move |number| Self { number, of: self.of })
    }

    /// Whether case `index` belongs to this part.
    pub fn contains(self, index: u64) -> bool {
        index % self.of == self.number - 1
    }
}

impl Default for Shard {
    fn default() -> Self {
        Self::WHOLE
    }
}

impl fmt::Display for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.number, self.of)
    }
}

impl FromStr for Shard {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numbers = text.split_once('/');
        let numbers = numbers.and_then(|(i, n)| Some((i.parse().ok()?, n.parse().ok()?)));
        numbers
            .and_then(|(number, of)| Self::new(number, of))
            .ok_or_else(|| format!("found {text}, expected I/N with I from 1 to N"))
    }
}

impl From<Shard> for String {
    fn from(shard: Shard) -> Self {
        shard.to_string()
    }
}

impl TryFrom<String> for Shard {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}
