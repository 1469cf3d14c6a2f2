//! A backtracking matcher that counts its steps.
//!
//! Without references to groups, whether the rest of a pattern matches depends only on instruction
//! and position. A state that has failed is then never tried again, so steps grow with pattern
//! times name.

use fancy_regex::Assertion;

use super::program::{Inst, Program};
use crate::config::limits::MAX_STEPS;

/// More than [`MAX_STEPS`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TooCostly;

/// A slot without a position.
const UNSET: u32 = u32::MAX;

/// Where to continue after a failed attempt.
enum Retry {
    At { pc: u32, pos: u32 },
    Slot { slot: u32, value: u32 },
}

/// One match in progress.
pub(super) struct Matcher<'p> {
    program: &'p Program,
    text: &'p str,
    retries: Vec<Retry>,
    /// Bits of the states that were tried, one region for each active run.
    tried: Vec<u64>,
    slots: Vec<u32>,
    /// Steps taken.
    pub(super) steps: u64,
}

impl<'p> Matcher<'p> {
    pub(super) fn new(program: &'p Program, text: &'p str) -> Self {
        let slots = vec![UNSET; program.slots];
        Self { program, text, retries: Vec::new(), tried: Vec::new(), slots, steps: 0 }
    }

    /// Whether the pattern matches a prefix of the text.
    pub(super) fn matches_start(&mut self) -> Result<bool, TooCostly> {
        self.step(1 + self.text.len() as u64 / 8)?;
        if self.text.len() >= UNSET as usize {
            return Err(TooCostly);
        }
        if !self.text.contains(&self.program.required) {
            return Ok(false);
        }
        Ok(self.run(0, self.program.insts.len() as u32, 0)?.is_some())
    }

    fn step(&mut self, count: u64) -> Result<(), TooCostly> {
        self.steps += count;
        if self.steps > MAX_STEPS { Err(TooCostly) } else { Ok(()) }
    }

    /// Runs the instructions from `start`, which end before `end`, from `pos` to the first match.
    /// Returns where it ends.
    fn run(&mut self, start: u32, end: u32, pos: u32) -> Result<Option<u32>, TooCostly> {
        let (retries, tried) = (self.retries.len(), self.tried.len());
        if self.slots.is_empty() {
            let words = (u64::from(end - start) * (self.text.len() as u64 + 1)).div_ceil(64);
            self.step(words / 8)?;
            self.tried.resize(tried + words as usize, 0);
        }
        let mut state = Some((start, pos));
        let found = loop {
            let Some((pc, pos)) = state.or_else(|| self.retry(retries)) else { break None };
            self.step(1)?;
            if matches!(self.program.insts[pc as usize], Inst::Match) {
                break Some(pos);
            }
            state = self.advance(pc, pos, start, tried)?;
        };
        if found.is_some() && !self.slots.is_empty() {
            // The caller may still fail and needs the previous slots.
            let mut kept = retries;
            for i in retries..self.retries.len() {
                if matches!(self.retries[i], Retry::Slot { .. }) {
                    self.retries.swap(kept, i);
                    kept += 1;
                }
            }
            self.retries.truncate(kept);
        } else {
            self.retries.truncate(retries);
        }
        self.tried.truncate(tried);
        Ok(found)
    }

    /// The latest untried alternative, with its slots restored.
    fn retry(&mut self, bottom: usize) -> Option<(u32, u32)> {
        while self.retries.len() > bottom {
            match self.retries.pop()? {
                Retry::At { pc, pos } => return Some((pc, pos)),
                Retry::Slot { slot, value } => self.slots[slot as usize] = value,
            }
        }
        None
    }

    /// Marks a state; false if it was marked before and groups are irrelevant.
    fn is_new(&mut self, pc: u32, pos: u32, start: u32, tried: usize) -> bool {
        if !self.slots.is_empty() {
            return true;
        }
        let bit = u64::from(pc - start) * (self.text.len() as u64 + 1) + u64::from(pos);
        let (word, bit) = (&mut self.tried[tried + (bit / 64) as usize], 1u64 << (bit % 64));
        let new = *word & bit == 0;
        *word |= bit;
        new
    }

    /// Executes one instruction: the next state, or `None` on failure.
    fn advance(
        &mut self,
        pc: u32,
        pos: u32,
        start: u32,
        tried: usize,
    ) -> Result<Option<(u32, u32)>, TooCostly> {
        let rest = &self.text[pos as usize..];
        let taken = |ok: bool, c: char| ok.then_some((pc + 1, pos + c.len_utf8() as u32));
        Ok(match self.program.insts[pc as usize] {
            Inst::Char(c) => taken(rest.starts_with(c), c),
            Inst::Any => rest.chars().next().and_then(|c| taken(true, c)),
            Inst::AnyButNewline => rest.chars().next().and_then(|c| taken(c != '\n', c)),
            Inst::Class(class) => {
                let class = &self.program.classes[class as usize];
                rest.chars().next().and_then(|c| {
                    let at = class.partition_point(|&(_, last)| last < c);
                    taken(class.get(at).is_some_and(|&(first, _)| first <= c), c)
                })
            }
            Inst::Assert(assertion) => self.holds(assertion, pos).then_some((pc + 1, pos)),
            Inst::Split(first, second) => self.is_new(pc, pos, start, tried).then(|| {
                self.retries.push(Retry::At { pc: second, pos });
                (first, pos)
            }),
            Inst::Jump(target) => self.is_new(pc, pos, start, tried).then_some((target, pos)),
            Inst::Save(slot) => {
                let value = std::mem::replace(&mut self.slots[slot as usize], pos);
                self.retries.push(Retry::Slot { slot, value });
                Some((pc + 1, pos))
            }
            Inst::LeaveIfEmpty { slot, exit } => match self.slots[slot as usize] == pos {
                true => Some((exit, pos)),
                false => Some((pc + 1, pos)),
            },
            Inst::Look { negative, behind, end } => match self.back(pos, behind) {
                None => negative.then_some((end, pos)),
                Some(from) => {
                    let bottom = self.retries.len();
                    let found = self.run(pc + 1, end, from)?.is_some();
                    if found && negative {
                        // Groups inside a negative look-around are unchanged.
                        self.retry(bottom);
                    }
                    (found != negative).then_some((end, pos))
                }
            },
            Inst::Atomic { end } => self.run(pc + 1, end, pos)?.map(|pos| (end, pos)),
            Inst::Backref { group, casei } => {
                let slot = 2 * group as usize;
                let (from, to) = (self.slots[slot], self.slots[slot + 1]);
                if from == UNSET || to == UNSET || from > to {
                    return Ok(None);
                }
                self.step(u64::from(to - from) / 8)?;
                let rest = &self.text[pos as usize..];
                let length = repeated(rest, &self.text[from as usize..to as usize], casei);
                length.map(|length| (pc + 1, pos + length))
            }
            Inst::UnlessGroup { group, target } => {
                let set = self.slots[2 * group as usize + 1] != UNSET;
                Some((if set { pc + 1 } else { target }, pos))
            }
            Inst::Match => None,
        })
    }

    /// The position `count` characters before `pos`.
    fn back(&self, pos: u32, count: u32) -> Option<u32> {
        let Some(last) = (count as usize).checked_sub(1) else { return Some(pos) };
        self.text[..pos as usize].char_indices().nth_back(last).map(|(at, _)| at as u32)
    }

    fn holds(&self, assertion: Assertion, pos: u32) -> bool {
        let (before, after) = self.text.split_at(pos as usize);
        let (before, after) = (before.chars().next_back(), after.chars().next());
        let word = |c: Option<char>| c.is_some_and(regex_syntax::is_word_character);
        match assertion {
            Assertion::StartText => before.is_none(),
            Assertion::EndText => after.is_none(),
            Assertion::StartLine { .. } => before.is_none_or(|c| c == '\n'),
            Assertion::EndLine { .. } => after.is_none_or(|c| c == '\n'),
            Assertion::LeftWordBoundary => !word(before) && word(after),
            Assertion::RightWordBoundary => word(before) && !word(after),
            Assertion::LeftWordHalfBoundary => !word(before),
            Assertion::RightWordHalfBoundary => !word(after),
            Assertion::WordBoundary => word(before) != word(after),
            Assertion::NotWordBoundary => word(before) == word(after),
        }
    }
}

/// Bytes of `text` that repeat `group` from its begin on; `None` if it begins otherwise.
fn repeated(text: &str, group: &str, casei: bool) -> Option<u32> {
    if !casei {
        return text.starts_with(group).then_some(group.len() as u32);
    }
    let mut rest = text.chars();
    let is_repeated = group
        .chars()
        .all(|of_group| rest.next().is_some_and(|c| c.to_lowercase().eq(of_group.to_lowercase())));
    // At most as long as the text, which has a limit.
    is_repeated.then(|| (text.len() - rest.as_str().len()) as u32)
}
