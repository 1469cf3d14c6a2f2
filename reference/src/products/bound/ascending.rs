//! Sets of known orders: contiguous ranges of k, each summed in ascending order.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};

use super::{Class, Order};
use crate::products::schedule::UnitName;
use crate::products::tensor_core::{Accumulator, Instruction};
use crate::{Error, Result};

/// [`Order::Ascending`]: each combination of a unit, a promotion and a split is a member.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ascending {
    /// Matrix units with sums in f32.
    pub units: Vec<UnitName>,
    /// k after which the unit's sum is promoted (added to an f32 sum and restarted from zero); 0:
    /// never.
    pub promotions: Vec<usize>,
    /// How k is divided among thread blocks.
    pub splits: Vec<Split>,
}

/// How k is divided among thread blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Split {
    /// Not divided.
    Whole,
    /// In parts of this many k; the last part may be shorter.
    Length(usize),
    /// In this many parts with the same number of tiles of `tile` k, rounded up.
    Parts {
        /// Parts.
        parts: usize,
        /// k of a tile.
        tile: usize,
    },
}

impl Split {
    /// k of a part.
    fn length(self, size_k: usize) -> usize {
        match self {
            Self::Whole => size_k,
            Self::Length(length) => length,
            Self::Parts { parts, tile } => size_k.div_ceil(tile).div_ceil(parts) * tile,
        }
    }
}

/// Largest number of members of a class, since all are tried.
const MOST_MEMBERS: usize = 4096;

impl Ascending {
    pub(super) fn validate(&self, class: &str) -> Result<()> {
        let refuse = |what: &str, found: &dyn std::fmt::Display, expected: String| {
            Err(Error::size(format!("class `{class}`: {what}"), found, expected))
        };
        let members = self.units.len() * self.promotions.len() * self.splits.len();
        if !(1..=MOST_MEMBERS).contains(&members) {
            return refuse("members", &members, format!("1 to {MOST_MEMBERS}"));
        }
        for name in &self.units {
            let unit = name.find()?;
            let Accumulator::F32 { .. } = unit.accumulator else {
                return refuse("units", &unit.inputs.0, "a unit with sums in float32".to_owned());
            };
            let k = unit.size_k;
            let fits = |length: usize| length.is_multiple_of(k);
            if let Some(promotion) = self.promotions.iter().find(|p| !fits(**p)) {
                let expected = format!("0, or a multiple of {k}, the unit's k");
                return refuse("promotions", promotion, expected);
            }
            for split in &self.splits {
                let (length, count) = match *split {
                    Split::Whole => continue,
                    Split::Length(length) => (length, 1),
                    Split::Parts { parts, tile } => (tile, parts),
                };
                if length == 0 || count == 0 || !fits(length) {
                    let expected = format!("parts of a positive multiple of {k}, the unit's k");
                    return refuse("splits", &format!("{split:?}"), expected);
                }
            }
        }
        Ok(())
    }

    /// The unit of the only member, and the k at which its sums over `size_k` start from zero,
    /// ascending; `None` for a set of several members.
    pub(in crate::products) fn single(&self, size_k: usize) -> Option<(UnitName, Vec<usize>)> {
        match (&self.units[..], &self.promotions[..], &self.splits[..]) {
            (&[unit], &[promotion], &[split]) => Some((unit, starts(promotion, split, size_k))),
            _ => None,
        }
    }
}

/// The k at which sums start from zero.
fn starts(promotion: usize, split: Split, size_k: usize) -> Vec<usize> {
    let length = split.length(size_k).max(1);
    let step = if promotion == 0 { length } else { promotion };
    let part = |start: usize| (start..(start + length).min(size_k)).step_by(step);
    (0..size_k).step_by(length).flat_map(part).collect()
}

impl Class {
    /// The members of the class that do not divide k among thread blocks.
    #[must_use]
    pub(crate) fn unsplit(&self) -> Self {
        let order = match &self.order {
            Order::Ascending(set) => {
                Order::Ascending(Ascending { splits: vec![Split::Whole], ..set.clone() })
            }
            other => other.clone(),
        };
        Self { order, ..self.clone() }
    }

    /// The members of the class for products of `size_k`, each with a descriptive name. Members
    /// that differ only in the order of f32 additions are merged. A class without members returns
    /// itself.
    pub fn members(&self, size_k: usize) -> Vec<Self> {
        let Order::Ascending(set) = &self.order else { return vec![self.clone()] };
        let mut seen = HashSet::new();
        let mut members = Vec::new();
        for (u, unit) in set.units.iter().enumerate() {
            for &split in &set.splits {
                for &promotion in &set.promotions {
                    if !seen.insert((u, starts(promotion, split, size_k))) {
                        continue;
                    }
                    let name = member_name(&self.name, unit, promotion, split, size_k);
                    let (units, promotions, splits) = (vec![*unit], vec![promotion], vec![split]);
                    let order = Order::Ascending(Ascending { units, promotions, splits });
                    members.push(Self { name, order, ..self.clone() });
                }
            }
        }
        members
    }
}

fn member_name(
    class: &str,
    unit: &UnitName,
    promotion: usize,
    split: Split,
    size_k: usize,
) -> String {
    let instruction = match unit.instruction {
        Instruction::Mma => "mma.sync",
        Instruction::Wgmma => "wgmma",
        Instruction::Tcgen05 => "tcgen05",
    };
    let architecture = format!("{:?}", unit.architecture);
    let mut name = format!("{class}: {instruction} of {architecture}, k ascending");
    let length = split.length(size_k);
    if length < size_k {
        name += &format!(", parts of {length} k");
    }
    if promotion != 0 && promotion < length {
        name += &format!(", promoted to f32 every {promotion} k");
    }
    name
}
