//! Configs around the lattice of an operation, each with the keys that were read and the tensors that
//! it demands.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use crate::Result;
use crate::ops::schema::{CaseError, KeyKind, TensorRule};
use crate::ops::{CaseConfig, Op};

/// Configs of a lattice that are read; a lattice of thousands repeats itself.
const BASES: usize = 240;
/// Those of them whose names and flags are changed too, one at a time.
const CHANGED: usize = 40;

/// One config and what the operation makes of it.
#[derive(Debug, Clone)]
pub(super) struct Sample {
    /// The config as the operation writes it.
    pub(super) config: Map<String, Value>,
    /// Keys that were read.
    pub(super) keys: Vec<(String, KeyKind)>,
    /// What happened without a key, for configs where that was tried.
    pub(super) absent: Vec<(String, Absent)>,
    /// Names, flags and conditions that can decide a form, by name.
    pub(super) facts: Vec<(String, String)>,
    /// Numbers that shapes are made of, by name.
    pub(super) sizes: Vec<(String, u64)>,
    /// Tensors.
    pub(super) rules: Vec<TensorRule>,
}

/// What happened without a key.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Absent {
    Required,
    Value(Value),
}

impl Sample {
    /// Reads a config; `None` where the operation refuses it. `turn` decides how many experts are local.
    pub(super) fn read(op: Op, config: &Map<String, Value>, turn: usize) -> Option<Self> {
        let (read, keys) = CaseConfig::read_noting_keys(op, config).ok()?;
        let config = read.to_json();
        let experts = config.get("num_experts").and_then(Value::as_u64).unwrap_or(0);
        let local = [experts, 3, 5, experts][turn % 4];
        let rules = read.rules(local as usize).ok()?;
        let facts = facts(&config, local);
        let sizes = sizes(&config, local, &read);
        Some(Self { config, keys, absent: Vec::new(), facts, sizes, rules })
    }

    /// The value of a fact.
    pub(super) fn fact(&self, name: &str) -> &str {
        self.facts.iter().find(|(n, _)| n == name).map_or("null", |(_, value)| value)
    }

    /// The value of a size.
    pub(super) fn size(&self, name: &str) -> Option<u64> {
        self.sizes.iter().find(|(n, _)| n == name).map(|&(_, size)| size)
    }
}

/// Names, flags, and what else may decide which tensors there are.
fn facts(config: &Map<String, Value>, local_experts: u64) -> Vec<(String, String)> {
    let mut facts = Vec::new();
    let mut add = |name: &str, value: String| facts.push((name.to_owned(), value));
    for (key, value) in config {
        match value {
            Value::String(text) => add(key, text.clone()),
            Value::Bool(flag) => add(key, flag.to_string()),
            Value::Object(map) => {
                add(key, "an object".to_owned());
                for (inner, value) in map {
                    if let Value::String(text) = value {
                        add(&format!("{key}.{inner}"), text.clone());
                    }
                }
            }
            Value::Array(_) => add(key, "a list".to_owned()),
            _ => {}
        }
    }
    let number = |key: &str| config.get(key).and_then(Value::as_i64);
    if let Some(group_size) = number("group_size") {
        add("group_size", if group_size < 0 { "-1" } else { "1 or more" }.to_owned());
        let flag = |key: &str| config.get(key) == Some(&Value::Bool(true));
        let row = config.get("tensor_parallel").is_some_and(|tp| tp["style"] == "row");
        let order = match (flag("desc_act") && group_size > 0, row || !flag("is_k_full")) {
            (false, _) => "none",
            (true, false) => "whole K",
            (true, true) => "slice of K",
        };
        add("act-order", order.to_owned());
    }
    if let Some(ep_size) = number("ep_size") {
        add("ep_size", if ep_size > 1 { "2 or more" } else { "1" }.to_owned());
    }
    if let Some(all) = number("num_experts") {
        let local = number("num_local_experts").unwrap_or(local_experts as i64);
        add("local experts", if local == all { "all" } else { "some" }.to_owned());
    }
    facts
}

/// Positive integers of the config, and what upstream derives of them.
fn sizes(config: &Map<String, Value>, local: u64, read: &CaseConfig) -> Vec<(String, u64)> {
    let mut sizes: Vec<(String, u64)> = config
        .iter()
        .filter_map(|(key, value)| Some((key.clone(), value.as_u64()?)))
        .filter(|(key, _)| !key.ends_with("_rank") && key != "group_size")
        .collect();
    let size = |key: &str| config.get(key).and_then(Value::as_u64);
    if let Some(list) = config.get("logical_widths").and_then(Value::as_array) {
        sizes.push(("len(logical_widths)".to_owned(), list.len() as u64));
    }
    if let (Some(_), CaseConfig::Moe(_)) = (size("num_experts"), read) {
        sizes.push(("local_experts".to_owned(), local));
    }
    let gated = read.operation().is_gated();
    if let (Some(i), Some(gated)) = (size("intermediate_size"), gated) {
        sizes.push(("w13_size_n".to_owned(), if gated { 2 * i } else { i }));
    }
    sizes
}

/// The sizes that some sample has.
pub(super) fn size_names(samples: &[Sample]) -> Vec<String> {
    let all = samples.iter().flat_map(|s| s.sizes.iter().map(|(name, _)| name));
    let mut names: Vec<String> = Vec::new();
    for name in all {
        if !names.contains(name) {
            names.push(name.clone());
        }
    }
    names
}

/// Samples around the lattice: its configs, with sizes, names and flags changed.
pub(super) fn around_lattice(op: Op) -> Result<Vec<Sample>> {
    let lattice = (op.entry().lattice)()?;
    let step = lattice.len().div_ceil(BASES).max(1);
    let mut samples: Vec<Sample> = Vec::new();
    for (turn, config) in lattice.iter().step_by(step).enumerate() {
        let base = config.to_json();
        let resized = resized(op, &base, turn);
        let Some(mut sample) = Sample::read(op, &resized, turn) else { continue };
        if turn.is_multiple_of((lattice.len() / step / CHANGED).max(1)) {
            sample.absent = without_keys(op, &sample);
            samples.extend(changed(op, &sample, turn));
        }
        samples.push(sample);
    }
    Ok(samples)
}

/// The config with other sizes, as far as the operation takes them: no two sizes of an operation then
/// stay in one ratio.
fn resized(op: Op, config: &Map<String, Value>, turn: usize) -> Map<String, Value> {
    let mut config = config.clone();
    let keys: Vec<String> = config.keys().cloned().collect();
    for (i, key) in keys.iter().enumerate() {
        let Some(size) = config[key].as_u64().filter(|_| key != "group_size") else { continue };
        let (a, b) = ((turn * 7 + i * 3) as u64 % 5, (turn * 5 + i) as u64 % 4);
        for new in [size * (a + 1) + b, size * (a + 1), size + b, size * (b + 2)] {
            let mut other = config.clone();
            other.insert(key.clone(), json!(new));
            if new > 0 && Sample::read(op, &other, turn).is_some() {
                config = other;
                break;
            }
        }
    }
    config
}

/// The sample's config with one name or flag changed, for each that the operation takes.
fn changed(op: Op, sample: &Sample, turn: usize) -> Vec<Sample> {
    let mut found = Vec::new();
    for (path, kind) in &sample.keys {
        let others: Vec<Value> = match kind {
            KeyKind::Name(names) => names.iter().map(|n| json!(n)).chain([Value::Null]).collect(),
            KeyKind::Flag => vec![json!(true), json!(false)],
            KeyKind::Object | KeyKind::Schedule => vec![Value::Null],
            KeyKind::Integer => vec![json!(-1), json!(32)],
            _ => continue,
        };
        for value in others {
            let mut config = sample.config.clone();
            if set(&mut config, path, value) {
                found.extend(Sample::read(op, &config, turn));
            }
        }
    }
    found
}

/// Sets the value at a dotted path; false where an object on the way is absent.
fn set(config: &mut Map<String, Value>, path: &str, value: Value) -> bool {
    match path.split_once('.') {
        None => {
            config.insert(path.to_owned(), value);
            true
        }
        Some((outer, inner)) => match config.get_mut(outer).and_then(Value::as_object_mut) {
            Some(map) => set(map, inner, value),
            None => false,
        },
    }
}

/// What happens without each key.
fn without_keys(op: Op, sample: &Sample) -> Vec<(String, Absent)> {
    let mut found = Vec::new();
    for (path, _) in &sample.keys {
        let mut config = sample.config.clone();
        if !set(&mut config, path, Value::Null) {
            continue;
        }
        match CaseConfig::from_json(op, &config) {
            Ok(read) => {
                let json = Value::Object(read.to_json());
                let value = path.split('.').fold(&json, |at, key| &at[key]);
                found.push((path.clone(), Absent::Value(value.clone())));
            }
            Err(CaseError::MissingConfigKey { key, .. }) if key == *path => {
                found.push((path.clone(), Absent::Required));
            }
            Err(_) => {}
        }
    }
    found
}

/// What errors say that the size at `path` must be, beyond its range.
pub(super) fn constraints(op: Op, samples: &[Sample], path: &str) -> Vec<String> {
    let mut found = BTreeSet::new();
    let tried = samples.iter().filter(|sample| !sample.absent.is_empty());
    for sample in tried {
        let Some(size) = sample.config.get(path).and_then(Value::as_u64) else { continue };
        let mut config = sample.config.clone();
        config.insert(path.to_owned(), json!(size + 1));
        if let Err(CaseError::ConfigValue { key, expected, .. }) = CaseConfig::from_json(op, &config)
            && key == path
            // Sums and limits of this one config say nothing about others.
            && expected.starts_with("a multiple of")
        {
            let of_groups = expected.ends_with("(whole groups)");
            let of_groups =
                of_groups.then(|| "a multiple of `group_size` (whole groups)".to_owned());
            found.insert(of_groups.unwrap_or(expected));
        }
    }
    found.into_iter().collect()
}
