//! A pattern compiled to instructions for the matcher from `fancy-regex`'s syntax tree.

use std::sync::Arc;

use super::budget::PatternBudget;
use super::class::{Class, ranges};
use crate::config::limits::MAX_PROGRAM;
use fancy_regex::{Assertion, Expr, LookAround};

/// One step of the matcher. Targets are indices of instructions.
#[derive(Debug, Clone, Copy)]
pub(super) enum Inst {
    /// This character.
    Char(char),
    /// A character of this class.
    Class(u32),
    /// Any character.
    Any,
    /// Any character but a line feed.
    AnyButNewline,
    /// A zero-width assertion.
    Assert(Assertion),
    /// Tries the first target, then the second.
    Split(u32, u32),
    Jump(u32),
    /// Remembers the position.
    Save(u32),
    /// Leaves a loop whose body matched nothing since `Save(slot)`.
    LeaveIfEmpty {
        slot: u32,
        exit: u32,
    },
    /// Look-around: matches the following instructions up to `Match`, starting `behind` characters
    /// back, without consuming text.
    Look {
        negative: bool,
        behind: u32,
        end: u32,
    },
    /// Matches the following instructions up to `Match` without backtracking into them.
    Atomic {
        end: u32,
    },
    /// The text of a group; whether in either case.
    Backref {
        group: u32,
        casei: bool,
    },
    /// Jumps unless the group has matched.
    UnlessGroup {
        group: u32,
        target: u32,
    },
    /// The end of the pattern, or of a `Look` or `Atomic`.
    Match,
}

/// A compiled pattern.
#[derive(Debug, Clone)]
pub(super) struct Program {
    pub(super) insts: Vec<Inst>,
    pub(super) classes: Vec<Arc<Class>>,
    /// Two per group and one per loop if groups are referenced; otherwise none.
    pub(super) slots: usize,
    /// Text that every match contains.
    pub(super) required: String,
}

impl Program {
    /// Compiles a tree. Returns the program and its size for the budget.
    pub(super) fn new(tree: &Expr, budget: &PatternBudget) -> Result<(Self, usize), String> {
        let mut compiler = Compiler {
            insts: Vec::new(),
            classes: Vec::new(),
            class_size: 0,
            groups: 0,
            loops: 0,
            loop_base: 2 * (groups(tree) + 1),
            captures: refers_to_groups(tree),
            budget,
        };
        compiler.emit(tree)?;
        compiler.push(Inst::Match)?;
        let slots = if compiler.captures { compiler.loop_base + compiler.loops } else { 0 };
        let size = compiler.insts.len() + compiler.class_size;
        let Compiler { insts, classes, .. } = compiler;
        Ok((Self { insts, classes, slots, required: required(tree) }, size))
    }
}

struct Compiler<'b> {
    insts: Vec<Inst>,
    classes: Vec<Arc<Class>>,
    class_size: usize,
    /// Groups opened so far.
    groups: usize,
    /// Loops that remember a position.
    loops: usize,
    loop_base: usize,
    captures: bool,
    budget: &'b PatternBudget,
}

impl Compiler<'_> {
    fn pc(&self) -> u32 {
        // At most MAX_PROGRAM.
        self.insts.len() as u32
    }

    fn push(&mut self, inst: Inst) -> Result<usize, String> {
        if self.insts.len() >= MAX_PROGRAM {
            return Err(format!("more than {MAX_PROGRAM} instructions when compiled"));
        }
        self.insts.push(inst);
        Ok(self.insts.len() - 1)
    }

    fn emit(&mut self, expr: &Expr) -> Result<(), String> {
        match expr {
            Expr::Empty => {}
            Expr::Any { newline: true } => drop(self.push(Inst::Any)?),
            Expr::Any { newline: false } => drop(self.push(Inst::AnyButNewline)?),
            Expr::Assertion(
                Assertion::LeftWordBoundary
                | Assertion::LeftWordHalfBoundary
                | Assertion::RightWordBoundary
                | Assertion::RightWordHalfBoundary,
            ) => {
                return Err("a one-sided word boundary is not Python's".to_owned());
            }
            Expr::Assertion(a) => drop(self.push(Inst::Assert(*a))?),
            Expr::Literal { val, casei: false } => {
                for c in val.chars() {
                    self.push(Inst::Char(c))?;
                }
            }
            Expr::Literal { val, casei: true } => {
                for c in val.chars() {
                    self.class(&regex_syntax::escape(c.encode_utf8(&mut [0; 4])), true)?;
                }
            }
            Expr::Delegate { inner, casei, .. } => self.class(inner, *casei)?,
            Expr::Concat(parts) => {
                for part in parts {
                    self.emit(part)?;
                }
            }
            Expr::Alt(parts) => self.alternatives(parts, Self::emit)?,
            Expr::Group(child) => {
                self.groups += 1;
                let slot = 2 * self.groups as u32;
                self.save(slot)?;
                self.emit(child)?;
                self.save(slot + 1)?;
            }
            Expr::LookAround(child, kind) => self.look(child, *kind)?,
            Expr::Repeat { child, lo, hi, greedy } => self.repeat(child, *lo, *hi, *greedy)?,
            Expr::Backref { group, casei } => {
                let group = self.known_group(*group)?;
                self.push(Inst::Backref { group, casei: *casei })?;
            }
            Expr::AtomicGroup(child) => {
                let at = self.push(Inst::Atomic { end: 0 })?;
                self.emit(child)?;
                self.push(Inst::Match)?;
                self.insts[at] = Inst::Atomic { end: self.pc() };
            }
            // Without both branches there is no condition.
            Expr::BackrefExistsCondition(group) => drop(self.known_group(*group)?),
            Expr::Conditional { condition, true_branch, false_branch } => {
                let Expr::BackrefExistsCondition(group) = **condition else {
                    return Err("a condition must be the number of a group".to_owned());
                };
                let group = self.known_group(group)?;
                let branch = self.push(Inst::UnlessGroup { group, target: 0 })?;
                self.emit(true_branch)?;
                let jump = self.push(Inst::Jump(0))?;
                self.insts[branch] = Inst::UnlessGroup { group, target: self.pc() };
                self.emit(false_branch)?;
                self.insts[jump] = Inst::Jump(self.pc());
            }
            Expr::KeepOut | Expr::ContinueFromPreviousMatchEnd => {
                return Err("\\K and \\G are not Python's".to_owned());
            }
            Expr::BackrefWithRelativeRecursionLevel { .. }
            | Expr::SubroutineCall(_)
            | Expr::UnresolvedNamedSubroutineCall { .. } => {
                return Err("\\g is not Python's".to_owned());
            }
        }
        Ok(())
    }

    fn save(&mut self, slot: u32) -> Result<(), String> {
        if self.captures {
            self.push(Inst::Save(slot))?;
        }
        Ok(())
    }

    fn known_group(&self, group: usize) -> Result<u32, String> {
        if (1..=self.groups).contains(&group) {
            return Ok(group as u32);
        }
        Err(format!("group {group} is referred to, but there are {} before it", self.groups))
    }

    fn class(&mut self, text: &str, casei: bool) -> Result<(), String> {
        let (class, size) = self.budget.class(text, casei, || ranges(text, casei))?;
        self.class_size += size;
        let known = self.classes.iter().position(|c| Arc::ptr_eq(c, &class));
        let index = known.unwrap_or(self.classes.len());
        if known.is_none() {
            self.classes.push(class);
        }
        self.push(Inst::Class(index as u32))?;
        Ok(())
    }

    fn alternatives(
        &mut self,
        parts: &[Expr],
        mut emit: impl FnMut(&mut Self, &Expr) -> Result<(), String>,
    ) -> Result<(), String> {
        let mut jumps = Vec::new();
        for (i, part) in parts.iter().enumerate() {
            if i + 1 == parts.len() {
                emit(self, part)?;
                break;
            }
            let split = self.push(Inst::Split(0, 0))?;
            emit(self, part)?;
            jumps.push(self.push(Inst::Jump(0))?);
            self.insts[split] = Inst::Split(split as u32 + 1, self.pc());
        }
        for jump in jumps {
            self.insts[jump] = Inst::Jump(self.pc());
        }
        Ok(())
    }

    fn look(&mut self, child: &Expr, kind: LookAround) -> Result<(), String> {
        let ahead = matches!(kind, LookAround::LookAhead | LookAround::LookAheadNeg);
        let negative = matches!(kind, LookAround::LookAheadNeg | LookAround::LookBehindNeg);
        match (child, ahead || width(child).is_some()) {
            (_, true) => self.look_at(child, negative, ahead),
            // `(?<=a|bb)` is `(?<=a)|(?<=bb)`, and `(?<!a|bb)` is `(?<!a)(?<!bb)`.
            (Expr::Alt(parts), false) if negative => {
                parts.iter().try_for_each(|part| self.look_at(part, true, false))
            }
            (Expr::Alt(parts), false) => {
                self.alternatives(parts, |this, part| this.look_at(part, false, false))
            }
            _ => self.look_at(child, negative, false),
        }
    }

    fn look_at(&mut self, child: &Expr, negative: bool, ahead: bool) -> Result<(), String> {
        let behind = match ahead {
            true => 0,
            false => width(child).ok_or("a look-behind needs a fixed width")?,
        };
        let at = self.push(Inst::Look { negative, behind, end: 0 })?;
        self.emit(child)?;
        self.push(Inst::Match)?;
        self.insts[at] = Inst::Look { negative, behind, end: self.pc() };
        Ok(())
    }

    fn repeat(&mut self, child: &Expr, lo: usize, hi: usize, greedy: bool) -> Result<(), String> {
        if lo > hi {
            return Err(format!("{lo} repetitions at least, {hi} at most"));
        }
        let first_group = self.groups;
        let split = |body: u32, exit: u32| match greedy {
            true => Inst::Split(body, exit),
            false => Inst::Split(exit, body),
        };
        for _ in 0..lo {
            let before = self.insts.len();
            self.groups = first_group;
            self.emit(child)?;
            if self.insts.len() == before {
                return Ok(());
            }
        }
        self.groups = first_group;
        if hi == usize::MAX {
            let head = self.push(Inst::Split(0, 0))?;
            let slot = (self.loop_base + self.loops) as u32;
            if self.captures {
                self.loops += 1;
                self.push(Inst::Save(slot))?;
            }
            let body = self.insts.len();
            self.emit(child)?;
            if self.insts.len() == body {
                self.insts.truncate(head);
                return Ok(());
            }
            let check = match self.captures {
                true => Some(self.push(Inst::LeaveIfEmpty { slot, exit: 0 })?),
                false => None,
            };
            self.push(Inst::Jump(head as u32))?;
            let exit = self.pc();
            if let Some(check) = check {
                self.insts[check] = Inst::LeaveIfEmpty { slot, exit };
            }
            self.insts[head] = split(head as u32 + 1, exit);
            return Ok(());
        }
        let mut heads = Vec::new();
        for _ in lo..hi {
            let head = self.push(Inst::Split(0, 0))?;
            self.groups = first_group;
            self.emit(child)?;
            if self.insts.len() == head + 1 {
                self.insts.truncate(head);
                break;
            }
            heads.push(head);
        }
        for head in heads {
            self.insts[head] = split(head as u32 + 1, self.pc());
        }
        self.groups = first_group + groups(child);
        Ok(())
    }
}

/// Number of groups in `expr`.
fn groups(expr: &Expr) -> usize {
    usize::from(matches!(expr, Expr::Group(_))) + children(expr).map(groups).sum::<usize>()
}

fn refers_to_groups(expr: &Expr) -> bool {
    matches!(expr, Expr::Backref { .. } | Expr::BackrefExistsCondition(_))
        || children(expr).any(refers_to_groups)
}

fn children(expr: &Expr) -> Box<dyn Iterator<Item = &Expr> + '_> {
    match expr {
        Expr::Concat(parts) | Expr::Alt(parts) => Box::new(parts.iter()),
        Expr::Group(child) | Expr::LookAround(child, _) | Expr::AtomicGroup(child) => {
            Box::new(std::iter::once(&**child))
        }
        Expr::Repeat { child, .. } => Box::new(std::iter::once(&**child)),
        Expr::Conditional { condition, true_branch, false_branch } => {
            Box::new([condition, true_branch, false_branch].into_iter().map(|e| &**e))
        }
        _ => Box::new(std::iter::empty()),
    }
}

/// Number of characters that `expr` matches, if it is constant.
fn width(expr: &Expr) -> Option<u32> {
    match expr {
        Expr::Empty | Expr::Assertion(_) | Expr::LookAround(..) => Some(0),
        Expr::Any { .. } | Expr::Delegate { .. } => Some(1),
        Expr::Literal { val, .. } => u32::try_from(val.chars().count()).ok(),
        Expr::Concat(parts) => {
            parts.iter().try_fold(0u32, |sum, part| sum.checked_add(width(part)?))
        }
        Expr::Alt(parts) => {
            let first = width(parts.first()?)?;
            parts.iter().all(|part| width(part) == Some(first)).then_some(first)
        }
        Expr::Group(child) | Expr::AtomicGroup(child) => width(child),
        Expr::Repeat { child, lo, hi, .. } if lo == hi => {
            width(child)?.checked_mul(u32::try_from(*lo).ok()?)
        }
        _ => None,
    }
}

/// The longest run of literals outside of repetitions and alternatives.
fn required(expr: &Expr) -> String {
    fn walk(expr: &Expr, run: &mut String, best: &mut String) {
        match expr {
            Expr::Literal { val, casei: false } => run.push_str(val),
            Expr::Concat(parts) => parts.iter().for_each(|part| walk(part, run, best)),
            Expr::Group(child) => walk(child, run, best),
            _ => run.clear(),
        }
        if run.len() > best.len() {
            best.clone_from(run);
        }
    }
    let (mut run, mut best) = (String::new(), String::new());
    walk(expr, &mut run, &mut best);
    best
}
