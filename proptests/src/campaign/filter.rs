//! Selects the configurations that a campaign draws from.

use std::collections::BTreeMap;

use marlinspike::case::{CaseConfig, Op};
use marlinspike::vectors::Generator;
use serde_json::{Map, Value};

use super::CampaignError;

/// Requirements on config keys: `weight_type=uint4b8|uint8b128,desc_act=true`.
///
/// A configuration passes if every named key has one of the values given for it. Keys of nested
/// objects are joined with a dot: `tensor_parallel.style=row`. `null` names an absent key.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Filter(Vec<(String, Vec<String>)>);

impl Filter {
    /// Reads `key=value|value,key=value`.
    ///
    /// # Errors
    /// [`CampaignError::Filter`] for a part without `=`.
    pub fn parse(text: &str) -> Result<Self, CampaignError> {
        let mut demands = Vec::new();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let Some((key, values)) = part.split_once('=') else {
                return Err(CampaignError::Filter {
                    problem: format!("found `{part}`, expected key=value or key=value|value"),
                });
            };
            let values = values.split('|').map(|value| value.trim().to_owned()).collect();
            demands.push((key.trim().to_owned(), values));
        }
        Ok(Self(demands))
    }

    /// Whether the configuration passes.
    pub fn takes(&self, config: &CaseConfig) -> bool {
        self.meets(config).into_iter().all(|met| met)
    }

    /// For each key of the filter, whether the configuration has one of its values.
    pub fn meets(&self, config: &CaseConfig) -> Vec<bool> {
        let axes = axes(config);
        let value = |key: &String| axes.get(key).map_or("null", String::as_str);
        self.0.iter().map(|(key, values)| values.iter().any(|v| v == value(key))).collect()
    }

    /// Whether a kept case may belong to a campaign with this filter. Shrinking changes sizes and flags
    /// and drops objects, so only keys with names as values are compared.
    pub(super) fn may_have_shrunk_to(&self, config: &CaseConfig) -> bool {
        let axes = axes(config);
        let changes = |text: &str| text.parse::<f64>().is_ok() || text.parse::<bool>().is_ok();
        self.0.iter().all(|(key, values)| match axes.get(key).map(String::as_str) {
            Some(value) => changes(value) || values.iter().any(|v| v == value),
            None => key.contains('.') || values.iter().any(|v| v == "null" || changes(v)),
        })
    }

    /// The cases of `generator` whose configurations pass.
    ///
    /// # Errors
    /// [`CampaignError::Filter`] for an unknown key, for a value that no configuration has, where the
    /// message lists those that exist, and for values that no configuration has together.
    pub fn restrict(&self, generator: Generator) -> Result<Generator, CampaignError> {
        self.check(generator.op(), generator.lattice())?;
        let problem = "no configuration meets all requirements".to_owned();
        generator.only(|config| self.meets(config)).map_err(|_| CampaignError::Filter { problem })
    }

    /// Checks that every key and value occurs in `lattice`.
    ///
    /// # Errors
    /// As [`Filter::restrict`].
    fn check(&self, op: Op, lattice: &[CaseConfig]) -> Result<(), CampaignError> {
        let known = values_by_axis(lattice);
        for (key, values) in &self.0 {
            let Some(existing) = known.get(key) else {
                let keys: Vec<_> = known.keys().map(String::as_str).collect();
                return Err(CampaignError::Filter {
                    problem: format!(
                        "found key `{key}`, expected one of `{op}`: {}",
                        keys.join(", ")
                    ),
                });
            };
            if let Some(value) = values.iter().find(|value| !existing.contains_key(*value)) {
                let existing: Vec<_> = existing.keys().map(String::as_str).collect();
                return Err(CampaignError::Filter {
                    problem: format!(
                        "found {key}={value}, expected one of {}",
                        existing.join(", ")
                    ),
                });
            }
        }
        Ok(())
    }
}

impl std::fmt::Display for Filter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let demands = self.0.iter().map(|(key, values)| format!("{key}={}", values.join("|")));
        f.write_str(&demands.collect::<Vec<_>>().join(","))
    }
}

/// The config's keys and values as text, nested ones joined with dots. Strings have no quotes.
pub fn axes(config: &CaseConfig) -> BTreeMap<String, String> {
    let mut axes = BTreeMap::new();
    flatten("", &config.to_json(), &mut axes);
    axes
}

fn flatten(prefix: &str, map: &Map<String, Value>, axes: &mut BTreeMap<String, String>) {
    for (key, value) in map {
        let key = format!("{prefix}{key}");
        match value {
            Value::Object(inner) => flatten(&format!("{key}."), inner, axes),
            Value::String(text) => {
                axes.insert(key, text.clone());
            }
            other => {
                axes.insert(key, other.to_string());
            }
        }
    }
}

/// For every key, the values that occur among `configs`, and how often.
pub(super) fn values_by_axis(configs: &[CaseConfig]) -> BTreeMap<String, BTreeMap<String, u64>> {
    let mut all: BTreeMap<String, BTreeMap<String, u64>> = BTreeMap::new();
    let each: Vec<_> = configs.iter().map(axes).collect();
    for axes in &each {
        for key in axes.keys() {
            all.entry(key.clone()).or_default();
        }
    }
    for axes in &each {
        for (key, values) in &mut all {
            let value = axes.get(key).map_or("null", String::as_str);
            *values.entry(value.to_owned()).or_default() += 1;
        }
    }
    all
}
