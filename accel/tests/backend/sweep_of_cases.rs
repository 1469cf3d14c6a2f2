//! Wrong shapes and config values through `check --backend`, with the reference behind its
//! operations: verdicts and errors, and never a panic.

use std::collections::BTreeSet;

use crate::sweep::{self, Raw};
use marlinspike::case::Case;
use marlinspike::check::{Declared, Verdict};
use marlinspike::panics;
use marlinspike_accel::backend::{BackendError, Checked, Reference, check};
use marlinspike_golden::Tier;
use rayon::prelude::*;

/// Checks `raw` by the reference's operations; a panic is wrong.
fn checked(raw: &Raw, what: &str, wrong: &mut Vec<String>) -> Option<Checked> {
    let bytes = raw.bytes();
    let result = panics::catch(|| -> Result<_, BackendError> {
        check(&Reference, &Case::parse(&bytes)?, &Declared::default())
    });
    match result {
        Err(BackendError::Case(error @ marlinspike::Error::Internal { .. })) => {
            wrong.push(format!("{}: {what}: {error}", raw.label));
            None
        }
        other => other.ok(),
    }
}

#[test]
fn no_shape_or_config_value_takes_the_backend_down() {
    // One change in this number.
    let step = Tier::current().pick(12, 2, 1);
    let bases = sweep::bases();
    let mut names = BTreeSet::new();
    bases.iter().for_each(|raw| sweep::names(&raw.config(), &mut names));
    // Layers take most of the time; two of the five go every way.
    let chosen: Vec<_> =
        bases.iter().filter(|raw| !["moe 1", "moe 2", "moe 3"].contains(&&*raw.label)).collect();
    let results = chosen.into_par_iter().map(|raw| swept(raw, &names, step));
    let (verdicts, wrong): (Vec<usize>, Vec<Vec<String>>) = results.unzip();
    let (verdicts, wrong) = (verdicts.into_iter().sum::<usize>(), wrong.concat());
    let shown = wrong.iter().take(40).cloned().collect::<Vec<_>>().join("\n");
    assert!(wrong.is_empty(), "{} wrong:\n{shown}", wrong.len());
    assert!(verdicts > 500 / step, "{verdicts} verdicts");
}

/// Checks one change in `step` of a case: the number of verdicts, and what is wrong.
fn swept(raw: &Raw, names: &BTreeSet<String>, step: usize) -> (usize, Vec<String>) {
    let (mut verdicts, mut wrong) = (0, Vec::new());
    let mut changes = Vec::new();
    for (i, tensor) in raw.tensors.iter().enumerate() {
        let shapes = sweep::shapes(tensor.shape()).into_iter().map(|s| (tensor.dtype(), s));
        let dtypes = sweep::dtypes(tensor.dtype()).map(|d| (d, tensor.shape().to_vec()));
        for (dtype, shape) in shapes.chain(dtypes) {
            let what = format!("{} as {dtype} {shape:?}", tensor.name());
            let output = tensor.name().strip_prefix("out.").map(str::to_owned);
            // One value may represent a stack of experts; lists are as long as values make them.
            let single = shape.is_empty() && tensor.name().ends_with("input_global_scale");
            let list = shape.len() == 1 && dtype == tensor.dtype();
            changes.push((raw.reshaped(i, dtype, shape), what, output, single || list));
        }
        let name = tensor.name();
        changes.push((raw.without(&[name]), format!("without {name}"), None, true));
    }
    for (what, config) in sweep::configs(&raw.config(), names) {
        changes.push((raw.with_config(&config), what, None, true));
    }
    // Lists of values have equal lengths: `i / 5` brings each value's turn at some key.
    let turn = |i: usize| (i + i / 5).is_multiple_of(step);
    let chosen = changes.into_iter().enumerate().filter(|(i, _)| turn(*i));
    for (_, (changed, what, output, may_fit)) in chosen {
        let Some(checked) = checked(&changed, &what, &mut wrong) else { continue };
        verdicts += 1;
        let report = checked.report.outputs.iter().find(|o| Some(&o.name) == output.as_ref());
        if report.is_some_and(|o| o.verdict != Verdict::Fail) && !may_fit {
            wrong.push(format!("{}: {what}: does not fail", changed.label));
        }
    }
    (verdicts, wrong)
}
