//! What each operation of case files reads: config keys, tensors, shapes and types, found by asking
//! the code that reads cases.
//!
//! ```
//! use marlinspike::case::Op;
//! use marlinspike::schema;
//!
//! let linear = schema::describe(Op::Linear)?;
//! let key = linear.keys.iter().find(|key| key.name == "size_k").unwrap();
//! assert!(key.is_required());
//! assert!(linear.to_json()["properties"]["inputs"]["properties"]["qweight"].is_object());
//! # Ok::<(), marlinspike::Error>(())
//! ```
//!
//! [`describe`] reads hundreds of configs around the operation's lattice, notes the keys that are
//! asked for, and fits the shapes that the operation demands by expressions of the keys.
//! [`tensors`] gives the exact shapes and types under one config.

mod agreement;
mod example;
mod glossary;
mod json;
mod page;
mod sample;
mod shape;
mod split;

pub use crate::ops::schema::KeyKind;
pub use page::{page, text};
pub use shape::Extent;
pub use split::When;

use serde_json::{Map, Value};

use crate::Result;
use crate::num::tensor::DType;
use crate::ops::schema::TensorRule;
use crate::ops::{CaseConfig, Op};
use sample::{Absent, Sample};
use split::Facts;

/// What an operation reads.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct OpSchema {
    /// The operation.
    pub op: Op,
    /// What it computes, in one sentence.
    pub about: String,
    /// Config keys, in the order in which they are read.
    pub keys: Vec<KeySchema>,
    /// Inputs, then outputs.
    pub tensors: Vec<TensorSchema>,
    /// A small config.
    pub example: CaseConfig,
}

/// A config key.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct KeySchema {
    /// Dotted path.
    pub name: String,
    /// What it means.
    pub about: &'static str,
    /// What it may hold, by the configs that read it so; none for configs that do not read it.
    pub forms: Vec<(When, KeyForm)>,
    /// What its value must also be, as errors say it.
    pub constraints: Vec<String>,
}

/// What a key may hold under some configs.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct KeyForm {
    /// Type and domain.
    pub kind: KeyKind,
    /// What happens without the key.
    pub absent: Absence,
}

/// What happens without a key.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Absence {
    /// An error.
    Required,
    /// This value is used; null where there is none.
    Value(Value),
    /// The value of another key is used.
    SameAs(String),
    /// Another value is used, which depends on the config.
    Computed,
}

impl KeySchema {
    /// Whether every config needs the key.
    pub fn is_required(&self) -> bool {
        matches!(self.forms.as_slice(),
            [(when, form)] if when.is_always() && form.absent == Absence::Required)
    }

    /// Every name that the key may hold under some config.
    pub fn names(&self) -> Vec<&str> {
        let mut names = Vec::new();
        for (_, form) in &self.forms {
            let KeyKind::Name(more) = &form.kind else { continue };
            names.extend(
                more.iter().map(String::as_str).filter(|n| !names.contains(n)).collect::<Vec<_>>(),
            );
        }
        names
    }
}

/// A tensor of an operation.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct TensorSchema {
    /// `in.<name>` or `out.<name>`.
    pub name: String,
    /// What it holds.
    pub about: &'static str,
    /// Its form, by the configs under which it has that form; configs of none do not know it.
    pub forms: Vec<(When, TensorForm)>,
}

/// A tensor under some configs.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct TensorForm {
    /// Whether a case cannot do without it.
    pub required: bool,
    /// safetensors names of the element types, or the config key that states the type.
    pub dtypes: Vec<String>,
    /// Sizes.
    pub shape: Vec<Extent>,
    /// Whether a single value may replace the whole shape.
    pub or_single: bool,
}

/// The schema of an operation.
///
/// # Errors
/// None for the operations in the table.
pub fn describe(op: Op) -> Result<OpSchema> {
    let samples = sample::around_lattice(op)?;
    let facts = Facts::new(&samples);
    let keys = keys(op, &samples, &facts);
    let tensors = tensor_schemas(&samples, &facts);
    let about = about(op).to_owned();
    Ok(OpSchema { op, about, keys, tensors, example: example::config(op)? })
}

/// Every operation's schema.
///
/// # Errors
/// As [`describe`].
pub fn all() -> Result<Vec<OpSchema>> {
    Op::NAMED.iter().map(|&(_, op)| describe(op)).collect()
}

/// What `op` computes, in one sentence: [`OpSchema::about`].
pub fn about(op: Op) -> &'static str {
    op.entry().about.trim()
}

/// The names of all keys and tensors, each with its meaning.
pub fn meanings() -> impl Iterator<Item = (&'static str, &'static str)> {
    glossary::all()
}

/// The tensors that `op` knows under one config. `local_experts` is the leading axis of a MoE case's
/// weights; where absent, `num_experts`.
///
/// # Errors
/// A config that the operation refuses.
pub fn tensors(
    op: Op,
    config: &Map<String, Value>,
    local_experts: Option<usize>,
) -> Result<Vec<TensorRule>> {
    let config = CaseConfig::from_json(op, config)?;
    let all = config.to_json().get("num_experts").and_then(Value::as_u64).unwrap_or(0) as usize;
    config.rules(local_experts.unwrap_or(all))
}

fn keys(op: Op, samples: &[Sample], facts: &Facts<'_>) -> Vec<KeySchema> {
    let read = samples.iter().flat_map(|sample| sample.keys.iter().map(|(path, _)| path.as_str()));
    // A key without an effect on what is computed is known, and not read.
    let all = read.chain((op.entry().keys)().iter().copied());
    let mut paths: Vec<&str> = Vec::new();
    for path in all {
        if !paths.contains(&path) {
            paths.push(path);
        }
    }
    let schema = |path: &str| {
        let forms = split::forms(facts, |group| key_form(samples, group, path));
        let forms = forms.into_iter().filter_map(|(when, form)| Some((when, form?))).collect();
        let constraints = sample::constraints(op, samples, path);
        KeySchema { name: path.to_owned(), about: glossary::key(path), forms, constraints }
    };
    paths.into_iter().map(schema).collect()
}

/// What a key may hold in every sample of a group: `None` where they differ, `Some(None)` where none
/// reads it.
fn key_form(samples: &[Sample], group: &[usize], path: &str) -> Option<Option<KeyForm>> {
    let of = |i: &usize| samples[*i].keys.iter().find(|(p, _)| p == path).map(|(_, kind)| kind);
    let kind = of(&group[0]);
    if group.iter().any(|i| of(i) != kind) {
        return None;
    }
    let Some(kind) = kind else { return Some(None) };
    let absents: Vec<(&Sample, &Absent)> = group
        .iter()
        .filter_map(|i| Some((&samples[*i], samples[*i].absent.iter().find(|(p, _)| p == path)?)))
        .map(|(sample, (_, absent))| (sample, absent))
        .collect();
    let required = absents.iter().filter(|(_, absent)| **absent == Absent::Required).count();
    let absent = match (required, absents.first()) {
        (0, Some((_, Absent::Value(value)))) => {
            let same = |(_, absent): &(&Sample, &Absent)| **absent == Absent::Value(value.clone());
            let as_key = |key: &&String| {
                absents.iter().all(|(sample, absent)| match absent {
                    Absent::Value(value) => sample.config.get(*key) == Some(value),
                    Absent::Required => false,
                })
            };
            match absents.iter().all(same) {
                true => Absence::Value(value.clone()),
                false => match absents[0].0.config.keys().find(as_key) {
                    Some(key) => Absence::SameAs(key.clone()),
                    None => Absence::Computed,
                },
            }
        }
        (0, _) => Absence::Value(Value::Null),
        (n, _) if n == absents.len() => Absence::Required,
        _ => return None,
    };
    Some(Some(KeyForm { kind: kind.clone(), absent }))
}

fn tensor_schemas(samples: &[Sample], facts: &Facts<'_>) -> Vec<TensorSchema> {
    let mut names: Vec<&str> = Vec::new();
    for rule in samples.iter().flat_map(|sample| &sample.rules) {
        if !names.contains(&rule.name.as_str()) {
            names.push(&rule.name);
        }
    }
    // Inputs first, each in the order of the rules.
    names.sort_by_key(|name| name.starts_with("out."));
    let candidates = shape::Candidates::new(samples);
    let schema = |name: &str| {
        let fitted = shape::Fitted::new(samples, &candidates, name);
        let mut forms = split::forms(facts, |group| fitted.form(group, false));
        if forms.is_empty() {
            forms = split::forms(facts, |group| fitted.form(group, true));
        }
        let forms = forms.into_iter().filter_map(|(when, form)| Some((when, form?))).collect();
        TensorSchema { name: name.to_owned(), about: glossary::tensor(name), forms }
    };
    names.into_iter().map(schema).collect()
}

impl TensorForm {
    /// The element types under a config.
    pub fn dtypes_under(&self, config: &Map<String, Value>) -> Vec<DType> {
        self.dtypes.iter().flat_map(|name| shape::dtypes_of(name, config)).collect()
    }
}
