//! The axes of an operation's configs: each axis with its values, each illegal combination with its
//! reason, and covering arrays over the legal ones.

mod cover;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use crate::ops::CaseConfig;

/// An axis of an operation's configs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Axis {
    /// Name: a config key, or what several keys state together.
    pub name: &'static str,
    /// The values, as tables print them.
    pub values: Vec<String>,
}

/// A combination of values that no config may have.
#[derive(Clone)]
pub struct Rule {
    /// The reason.
    pub why: &'static str,
    /// The axes that decide.
    pub axes: Vec<usize>,
    /// For each combination of their values, the last axis fastest: whether it is illegal.
    illegal: Vec<bool>,
}

impl fmt::Debug for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rule").field("why", &self.why).field("axes", &self.axes).finish()
    }
}

/// Rows in which each axis is changed, to see which requirements it decides.
const SAMPLE: usize = 24;

/// Most combinations that one rule of requirements lists.
const MOST_COMBINATIONS: usize = 1 << 16;

/// A config for each combination of values.
type Build = Arc<dyn Fn(&[usize]) -> CaseConfig + Send + Sync>;

/// The axes of an operation, and what is illegal.
///
/// A row holds the index of a value for each axis.
#[derive(Clone)]
pub struct Axes {
    axes: Vec<Axis>,
    rules: Vec<Rule>,
    /// Sets of axes whose every legal combination a covering array has, whatever its strength.
    together: Vec<Vec<usize>>,
    build: Build,
}

impl fmt::Debug for Axes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Axes").field("axes", &self.axes).field("rules", &self.rules).finish()
    }
}

impl Axes {
    /// The axes.
    pub fn axes(&self) -> &[Axis] {
        &self.axes
    }

    /// The illegal combinations.
    pub fn rules(&self) -> &[Rule] {
        &self.rules
    }

    /// Why a row is illegal: the reason of the first rule that forbids it.
    pub fn objection(&self, row: &[usize]) -> Option<&'static str> {
        let row: Vec<Option<usize>> = row.iter().copied().map(Some).collect();
        self.forbidding(&row).map(|rule| rule.why)
    }

    /// The config of a row.
    pub fn config(&self, row: &[usize]) -> CaseConfig {
        (self.build)(row)
    }

    /// The rows of a covering array: every legal combination of the values of `strength` axes is in
    /// one of them, and no row is illegal. The same rows in every version with the same axes.
    pub fn cover(&self, strength: usize) -> Vec<Vec<usize>> {
        cover::rows(self, strength)
    }

    /// The configs of [`Axes::cover`].
    pub fn configs(&self, strength: usize) -> Vec<CaseConfig> {
        self.cover(strength).iter().map(|row| self.config(row)).collect()
    }

    /// The same axes without the combinations that every covering array has whatever its strength: the
    /// smaller arrays of a strength alone.
    #[must_use]
    pub fn apart(mut self) -> Self {
        self.together.clear();
        self
    }

    /// The same axes and one more, which the configs do not state, such as the laws of a test.
    #[must_use]
    pub fn and(mut self, name: &'static str, values: Vec<String>) -> Self {
        self.axes.push(Axis { name, values });
        self
    }

    /// The same axes with one more rule: `is_illegal` of the config with a combination of the values of
    /// `names`, the other axes at their first value, which must not matter. A subject without a kernel for
    /// some configs restricts the axes so.
    ///
    /// # Panics
    /// For a name that is no axis.
    #[must_use]
    pub fn and_illegal(
        mut self,
        why: &'static str,
        names: &[&str],
        is_illegal: impl Fn(&CaseConfig) -> bool,
    ) -> Self {
        let axes = indices(&self.axes, names);
        let mut row = vec![0; self.axes.len()];
        let mut illegal = Vec::new();
        for combination in combinations(&self.axes, &axes) {
            axes.iter().zip(combination).for_each(|(&axis, value)| row[axis] = value);
            illegal.push(is_illegal(&self.config(&row)));
        }
        self.rules.push(Rule { why, axes, illegal });
        self
    }

    /// The same axes without the combinations that fail a requirement: `meets` returns one flag for each
    /// requirement on a config. Which axes decide about it is found by changing each axis in some rows; a
    /// requirement that more axes decide than a rule can list does not restrict them.
    #[must_use]
    pub(crate) fn meeting(self, meets: &impl Fn(&CaseConfig) -> Vec<bool>) -> Self {
        let mut restricted = self.clone();
        for (nth, deciding) in self.deciding(meets).into_iter().enumerate() {
            let count = deciding.iter().map(|&axis| self.axes[axis].values.len());
            if count.fold(1, usize::saturating_mul) <= MOST_COMBINATIONS {
                let names: Vec<&str> = deciding.iter().map(|&axis| self.axes[axis].name).collect();
                restricted = restricted.and_illegal("not asked for", &names, |c| !meets(c)[nth]);
            }
        }
        restricted
    }

    /// For each flag of `meets` the axes that change it.
    fn deciding(&self, meets: &impl Fn(&CaseConfig) -> Vec<bool>) -> Vec<BTreeSet<usize>> {
        let rows = self.clone().apart().cover(2);
        let mut deciding: Vec<BTreeSet<usize>> = Vec::new();
        for row in rows.iter().step_by(rows.len().div_ceil(SAMPLE).max(1)) {
            let flags = meets(&self.config(row));
            deciding.resize(flags.len(), BTreeSet::new());
            for (axis, size) in self.sizes().into_iter().enumerate() {
                for value in (0..size).filter(|&value| value != row[axis]) {
                    let mut other = row.clone();
                    other[axis] = value;
                    let changed = meets(&self.config(&other)).into_iter().zip(&flags);
                    changed.zip(&mut deciding).filter(|((a, b), _)| a != *b).for_each(
                        |(_, all)| {
                            all.insert(axis);
                        },
                    );
                }
            }
        }
        deciding
    }

    /// A legal row with these values, if there is one: whether the combination is legal.
    pub fn complete(&self, partial: &[Option<usize>]) -> Option<Vec<usize>> {
        cover::complete(self, partial)
    }

    /// The values of a row by the names of their axes.
    pub fn labels(&self, row: &[usize]) -> BTreeMap<&'static str, &str> {
        self.axes.iter().zip(row).map(|(axis, &at)| (axis.name, axis.values[at].as_str())).collect()
    }

    /// Values of each axis.
    fn sizes(&self) -> Vec<usize> {
        self.axes.iter().map(|axis| axis.values.len()).collect()
    }

    /// The first rule all of whose axes have a value and that forbids the combination.
    fn forbidding(&self, row: &[Option<usize>]) -> Option<&Rule> {
        self.rules.iter().find(|rule| self.forbids(rule, row))
    }

    fn forbids(&self, rule: &Rule, row: &[Option<usize>]) -> bool {
        let mut at = 0;
        for &axis in &rule.axes {
            let Some(value) = row[axis] else { return false };
            at = at * self.axes[axis].values.len() + value;
        }
        rule.illegal[at]
    }
}

type Set<C> = Box<dyn Fn(&mut C, usize) + Send + Sync>;

/// Declares the [`Axes`] of one type of config: a base config, and what each value changes in it.
pub(crate) struct Space<C> {
    base: C,
    axes: Vec<Axis>,
    set: Vec<Set<C>>,
    rules: Vec<Rule>,
    together: Vec<Vec<usize>>,
    finish: fn(&mut C),
}

impl<C: Clone + Into<CaseConfig> + Send + Sync + 'static> Space<C> {
    /// Without axes, only `base`. `finish` sets what follows from the values.
    pub(crate) fn new(base: C, finish: fn(&mut C)) -> Self {
        let (axes, set) = (Vec::new(), Vec::new());
        Self { base, axes, set, rules: Vec::new(), together: Vec::new(), finish }
    }

    /// Adds an axis: its values with their labels, and what a value sets.
    pub(crate) fn axis<V: Send + Sync + 'static>(
        mut self,
        name: &'static str,
        values: impl IntoIterator<Item = (String, V)>,
        set: impl Fn(&mut C, &V) + Send + Sync + 'static,
    ) -> Self {
        let (labels, values): (Vec<String>, Vec<V>) = values.into_iter().unzip();
        self.axes.push(Axis { name, values: labels });
        self.set.push(Box::new(move |config, at| set(config, &values[at])));
        self
    }

    /// Forbids the combinations of `axes` for which `is_illegal` of a config with these values.
    /// Axes that are declared later than the rule, or not named, have the base's values.
    ///
    /// # Panics
    /// For a name that is no axis.
    pub(crate) fn illegal(
        mut self,
        why: &'static str,
        axes: &[&str],
        is_illegal: impl Fn(&C) -> bool,
    ) -> Self {
        let axes = indices(&self.axes, axes);
        let mut illegal = Vec::new();
        for combination in combinations(&self.axes, &axes) {
            let mut config = self.base.clone();
            // In the order of their declaration: a setter may read what an earlier one set.
            axes.iter()
                .zip(combination)
                .for_each(|(&axis, value)| self.set[axis](&mut config, value));
            (self.finish)(&mut config);
            illegal.push(is_illegal(&config));
        }
        self.rules.push(Rule { why, axes, illegal });
        self
    }

    /// Every legal combination of these axes is in each covering array.
    pub(crate) fn together(mut self, axes: &[&str]) -> Self {
        self.together.push(indices(&self.axes, axes));
        self
    }

    /// The configs of a covering array of the axes ([`Axes::cover`]).
    pub(crate) fn configs(self, strength: usize) -> Vec<C> {
        let Self { base, axes, set, rules, together, finish } = self;
        let first = base.clone();
        let build: Build = Arc::new(move |_: &[usize]| first.clone().into());
        let rows = Axes { axes, rules, together, build }.cover(strength);
        let config = |row: Vec<usize>| {
            let mut config = base.clone();
            set.iter().zip(row).for_each(|(set, value)| set(&mut config, value));
            finish(&mut config);
            config
        };
        rows.into_iter().map(config).collect()
    }

    /// Number of axes.
    pub(crate) fn len(&self) -> usize {
        self.axes.len()
    }

    /// The axes.
    pub(crate) fn axes(self) -> Axes {
        let Self { base, axes, set, rules, together, finish } = self;
        let build = move |row: &[usize]| {
            let mut config = base.clone();
            // A row may have more axes than the config.
            set.iter().zip(row).for_each(|(set, &value)| set(&mut config, value));
            finish(&mut config);
            config.into()
        };
        Axes { axes, rules, together, build: Arc::new(build) }
    }
}

/// The places of axes by name, ascending.
///
/// # Panics
/// For a name that is no axis.
fn indices(axes: &[Axis], names: &[&str]) -> Vec<usize> {
    let at = |name: &&str| axes.iter().position(|axis| axis.name == *name);
    let mut all: Vec<usize> =
        names.iter().map(|name| at(name).unwrap_or_else(|| panic!("no axis {name}"))).collect();
    all.sort_unstable();
    all
}

/// Every combination of the values of some axes, the last axis fastest.
fn combinations(axes: &[Axis], of: &[usize]) -> impl Iterator<Item = Vec<usize>> {
    let sizes: Vec<usize> = of.iter().map(|&axis| axes[axis].values.len()).collect();
    (0..sizes.iter().product()).map(move |mut at: usize| {
        let mut values = vec![0; sizes.len()];
        for (value, size) in values.iter_mut().zip(&sizes).rev() {
            (*value, at) = (at % size, at / size);
        }
        values
    })
}

/// Values that print themselves.
pub(crate) fn shown<V: fmt::Display>(values: impl IntoIterator<Item = V>) -> Vec<(String, V)> {
    values.into_iter().map(|value| (value.to_string(), value)).collect()
}

/// Values by the names of a table.
pub(crate) fn named<V: Clone>(table: &[(&str, V)]) -> Vec<(String, V)> {
    table.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect()
}
