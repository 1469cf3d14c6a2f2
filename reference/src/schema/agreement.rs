//! A schema held against what the operation demands under one config.

use super::sample::Sample;
use super::{OpSchema, TensorSchema};
use crate::ops::CaseConfig;
use crate::ops::schema::TensorRule;

impl OpSchema {
    /// Where the schema and the operation's demands under `config` differ, in words; `None` where they agree. A
    /// schema is found from samples of configs, so a test holds it against every config of the lattice.
    ///
    /// `turn` decides how many experts of a MoE layer are local: all of them, 3, 5, or all again.
    pub fn disagreement(&self, config: &CaseConfig, turn: usize) -> Option<String> {
        let Some(sample) = Sample::read(self.op, &config.to_json(), turn) else {
            return Some(format!("{} refuses its own config", self.op));
        };
        let key = self.keys.iter().find_map(|key| {
            let forms: Vec<_> = key.forms.iter().filter(|(when, _)| when.holds(&sample)).collect();
            let stated: Vec<_> = forms.iter().map(|(_, form)| &form.kind).collect();
            let read = sample.keys.iter().find(|(path, _)| *path == key.name);
            let read: Vec<_> = read.iter().map(|(_, kind)| kind).collect();
            (stated != read).then(|| format!("key {}: stated {stated:?}, read {read:?}", key.name))
        });
        let tensor = || {
            self.tensors.iter().find_map(|tensor| {
                let rule = sample.rules.iter().find(|rule| rule.name == tensor.name);
                tensor.disagreement(rule, &sample)
            })
        };
        let missing = || {
            let known = |rule: &&TensorRule| !self.tensors.iter().any(|t| t.name == rule.name);
            Some(format!("tensor {} is not stated", sample.rules.iter().find(known)?.name))
        };
        let found = key.or_else(tensor).or_else(missing)?;
        Some(format!("{}: {found}, under {:?}", self.op, sample.config))
    }
}

impl TensorSchema {
    fn disagreement(&self, rule: Option<&TensorRule>, sample: &Sample) -> Option<String> {
        let forms: Vec<_> = self.forms.iter().filter(|(when, _)| when.holds(sample)).collect();
        let agrees = match (forms.as_slice(), rule) {
            ([(_, form)], Some(rule)) => {
                (form.required, form.or_single) == (rule.required, rule.or_single)
                    && form.dtypes_under(&sample.config) == rule.dtypes
                    && form.shape.len() == rule.shape.len()
                    && form.shape.iter().zip(&rule.shape).all(|(e, &dim)| e.fits(dim, sample))
            }
            ([], None) => true,
            _ => false,
        };
        (!agrees).then(|| format!("tensor {}: stated {forms:?}, demanded {rule:?}", self.name))
    }
}
