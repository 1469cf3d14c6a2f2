//! The values of each config key that a campaign has tried.

use std::collections::BTreeMap;

use marlinspike::case::CaseConfig;
use serde::{Deserialize, Serialize};

use super::filter::{axes, values_by_axis};

/// Keys with more values than this are sizes; only their number of values is reported.
const LISTED: usize = 16;

/// How often each value of each config key was judged.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Coverage {
    /// Key → value → judged cases; values that occur in no judged case have 0.
    pub axes: BTreeMap<String, BTreeMap<String, u64>>,
}

impl Coverage {
    /// Coverage of the configurations before any case.
    pub(super) fn of(lattice: &[CaseConfig]) -> Self {
        let mut axes = values_by_axis(lattice);
        axes.values_mut().flat_map(BTreeMap::values_mut).for_each(|count| *count = 0);
        Self { axes }
    }

    /// Counts one judged case, with the sizes that were drawn for it.
    pub(super) fn count(&mut self, config: &CaseConfig) {
        let tried = axes(config);
        for (key, values) in &mut self.axes {
            let value = tried.get(key).map_or("null", String::as_str);
            *values.entry(value.to_owned()).or_default() += 1;
        }
    }

    /// Adds another campaign's counts.
    pub fn merge(&mut self, other: &Self) {
        for (key, values) in &other.axes {
            let own = self.axes.entry(key.clone()).or_default();
            for (value, count) in values {
                *own.entry(value.clone()).or_default() += count;
            }
        }
    }

    /// One line for each key with more than one value: how many of its values were tried, and those
    /// that were not.
    pub fn lines(&self) -> Vec<String> {
        let width = self.axes.keys().map(String::len).max().unwrap_or(0);
        let several = self.axes.iter().filter(|(_, values)| values.len() > 1);
        several.map(|(key, values)| line(key, width, values)).collect()
    }
}

fn line(key: &str, width: usize, values: &BTreeMap<String, u64>) -> String {
    let missing: Vec<_> =
        values.iter().filter(|(_, count)| **count == 0).map(|(value, _)| value.as_str()).collect();
    let tried = values.len() - missing.len();
    let mut line = format!("{key:width$}  {tried} of {} values", values.len());
    if !missing.is_empty() && missing.len() <= LISTED {
        line += &format!("; not tried: {}", missing.join(", "));
    }
    line
}
