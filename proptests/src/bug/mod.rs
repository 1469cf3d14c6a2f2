//! A bug: a wrong kernel, the configurations that it concerns, and the causes that `check` may name.
//!
//! The bank lists them. A bug of one format is in the file of that format's operations.

pub(crate) mod edit;

use std::cell::Cell;

use marlinspike::Result;
use marlinspike::case::{Case, Op};
use marlinspike::check::{add_outputs, mistaken, mistakes};
use serde_json::Value;

use crate::campaign::{Campaign, CampaignError, Fault, Filter, Kernel, Laws, Outputs, Trial};

/// A bug of the bank.
#[derive(Debug, Clone, Copy)]
pub struct Bug {
    /// Number in the bank.
    pub number: u32,
    /// What is wrong.
    pub name: &'static str,
    /// Where it was seen.
    pub seen: &'static str,
    /// The operation.
    pub op: Op,
    /// The configurations that it concerns, as a [`Filter`].
    pub filter: &'static str,
    /// Config keys that the lattice has no such value for, as `key=value`; values are JSON.
    pub keys: &'static [(&'static str, &'static str)],
    /// The outputs that the kernel computes; if empty, the campaign's default.
    pub outputs: &'static [&'static str],
    /// The properties that the kernel promises.
    pub laws: Laws,
    /// Right causes, by diagnosis or by kind of fault; empty if `check` rejects the outputs without
    /// a cause.
    pub causes: &'static [&'static str],
    /// The wrong computation.
    pub wrong: Wrong,
}

/// A wrong computation.
#[derive(Debug, Clone, Copy)]
pub enum Wrong {
    /// Computes the outputs of a case without any.
    Case(fn(&mut Case<'static>) -> Result<()>),
    /// As [`Wrong::Case`], with the number of earlier calls.
    Calls(fn(u32, &mut Case<'static>) -> Result<()>),
    /// A known mistake of the operation, by its id.
    Mistake(&'static str),
}

/// A JSON value, or the text itself.
fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|_| text.into())
}

/// No promise beyond right values.
pub(crate) const VALUES: Laws = Laws { deterministic: false, batch_invariant: false };

impl Bug {
    /// A bug of `linear` that shows in `y`.
    pub(crate) const fn of_linear(
        number: u32,
        name: &'static str,
        seen: &'static str,
        filter: &'static str,
        causes: &'static [&'static str],
        wrong: fn(&mut Case<'static>) -> Result<()>,
    ) -> Self {
        let (op, outputs, laws, wrong) = (Op::Linear, &[] as &[_], VALUES, Wrong::Case(wrong));
        Self { number, name, seen, op, filter, keys: &[], outputs, laws, causes, wrong }
    }

    /// A bug of `moe` that shows in `outputs`.
    pub(crate) const fn of_moe(
        number: u32,
        name: &'static str,
        seen: &'static str,
        (filter, outputs): (&'static str, &'static [&'static str]),
        causes: &'static [&'static str],
        wrong: fn(&mut Case<'static>) -> Result<()>,
    ) -> Self {
        let (op, laws, wrong) = (Op::Moe, VALUES, Wrong::Case(wrong));
        Self { number, name, seen, op, filter, keys: &[], outputs, laws, causes, wrong }
    }

    /// A known mistake, of the first operation that lists it; `None` if no operation does.
    pub(crate) fn known(
        number: u32,
        name: &'static str,
        seen: &'static str,
        causes: &'static [&'static str; 1],
    ) -> Option<Self> {
        let [id] = *causes;
        let mut ops = Op::NAMED.iter().map(|(_, op)| *op);
        let op = ops.find(|op| mistakes(*op).contains(&id))?;
        let (filter, outputs, laws, wrong) = ("", &[] as &[_], VALUES, Wrong::Mistake(id));
        Some(Self { number, name, seen, op, filter, keys: &[], outputs, laws, causes, wrong })
    }

    /// The campaign that must reject the bug.
    ///
    /// # Errors
    /// None, which a test verifies.
    pub fn campaign(&self, seed: u64) -> std::result::Result<Campaign, CampaignError> {
        let keys = self.keys.iter().map(|(key, value)| ((*key).to_owned(), json(value)));
        let campaign = Campaign::new(self.op, seed, Filter::parse(self.filter)?)?;
        let mut campaign = campaign.with_keys(&keys.collect())?;
        campaign.outputs = self.outputs.iter().map(|name| (*name).to_owned()).collect();
        campaign.laws = self.laws;
        Ok(campaign)
    }

    /// The wrong kernel.
    pub fn kernel(&self) -> Box<dyn Kernel> {
        match self.wrong {
            Wrong::Case(wrong) => Box::new(move |trial: &Trial| answer(trial, wrong)),
            Wrong::Calls(wrong) => {
                let calls = Cell::new(0);
                Box::new(move |trial: &Trial| {
                    let call = calls.replace(calls.get() + 1);
                    answer(trial, |case| wrong(call, case))
                })
            }
            Wrong::Mistake(id) => Box::new(move |trial: &Trial| {
                answer(trial, |case| {
                    add_outputs(case)?;
                    if let Some(wrong) = mistaken(case, id)? {
                        *case = wrong;
                    }
                    Ok(())
                })
            }),
        }
    }
}

/// The reference as a kernel, which every campaign must accept.
pub fn right() -> Box<dyn Kernel> {
    Box::new(|trial: &Trial| answer(trial, |case| add_outputs(case)))
}

/// The wanted outputs among those that `compute` adds to the case.
fn answer(
    trial: &Trial,
    compute: impl Fn(&mut Case<'static>) -> Result<()>,
) -> std::result::Result<Outputs, Fault> {
    let mut case = trial.case.clone();
    compute(&mut case).map_err(|error| Fault::Crashed { detail: error.to_string() })?;
    let mut outputs = Outputs::new();
    for wanted in &trial.wanted {
        if let Some(tensor) = case.outputs.remove(&wanted.name) {
            outputs.insert(wanted.name.clone(), tensor);
        }
    }
    Ok(outputs)
}
