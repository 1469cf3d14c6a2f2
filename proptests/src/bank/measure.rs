//! How many cases a campaign needs to reject a bug and to name its cause.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::Bug;
use crate::campaign::{Campaign, CampaignError, Failure, Judgement};

/// Cases within which every bug must be rejected, at every seed.
pub const CASES: u64 = 200;
/// Seeds of the table.
pub const SEEDS: u64 = 20;
/// Failing cases within which a known cause must be named.
const FAILING: usize = 40;

/// Diagnoses that describe the output. `check` names them first, since many mistakes lead to them.
const SYMPTOMS: [&str; 6] =
    ["all-zeros", "zeros", "not-finite", "constant", "constant-factor", "columns-moved"];

/// The result of one campaign.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Measured {
    /// Cases up to the first failing one.
    pub cases: Option<u64>,
    /// What failed: an output or a law.
    pub by: String,
    /// The first right cause that was named.
    pub cause: Option<String>,
    /// Cases up to the first failing one with a right cause.
    pub named: Option<u64>,
    /// Causes that were named and are not right; symptoms such as `not-finite` do not count.
    pub misnamed: Vec<String>,
}

/// Runs a campaign until the bug is rejected and, if its cause is known, named.
///
/// # Errors
/// As [`Campaign::judge`].
pub fn measure(bug: &Bug, campaign: &Campaign) -> Result<Measured, CampaignError> {
    let mut kernel = bug.kernel();
    let mut measured =
        Measured { cases: None, by: String::new(), cause: None, named: None, misnamed: Vec::new() };
    let mut failing = 0;
    for index in 0..CASES {
        let trial = campaign.trial(index)?;
        let Judgement::Wrong(failure) = campaign.judge(&mut *kernel, &trial)? else { continue };
        failing += 1;
        if measured.cases.is_none() {
            (measured.cases, measured.by) = (Some(index + 1), what_failed(&failure));
        }
        if let Some(cause) = cause(&failure) {
            if bug.causes.contains(&cause.as_str()) {
                measured.named = Some(index + 1);
                measured.cause.get_or_insert(cause);
            } else if !SYMPTOMS.contains(&cause.as_str()) {
                measured.misnamed.push(cause);
            }
        }
        if measured.named.is_some() || bug.causes.is_empty() || failing == FAILING {
            break;
        }
    }
    Ok(measured)
}

/// The diagnosis' id or the kind of fault.
pub(super) fn cause(failure: &Failure) -> Option<String> {
    match &failure.fault {
        Some(fault) => Some(fault.kind().to_owned()),
        None => failure.cause().map(|diagnosis| diagnosis.id.clone()),
    }
}

/// The law, or the outputs with a wrong value.
pub(super) fn what_failed(failure: &Failure) -> String {
    if let Some(fault) = &failure.fault {
        return match fault.kind() {
            "nondeterminism" => "law: two runs, same bits".to_owned(),
            "batch dependence" => "law: a row alone, same bits".to_owned(),
            other => other.to_owned(),
        };
    }
    let names: Vec<String> = failure.failed().map(|output| format!("`{}`", output.name)).collect();
    format!("verdict on {}", names.join(", "))
}

/// Applies `work` to every item on all cores, in the order of the items.
///
/// # Panics
/// If `work` panics.
pub fn on_all_cores<T: Sync, R: Send>(items: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let (next, done) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..cores.min(items.len()) {
            scope.spawn(|| {
                while let Some((at, item)) = {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    items.get(at).map(|item| (at, item))
                } {
                    let made = work(item);
                    done.lock().unwrap_or_else(|e| e.into_inner()).push((at, made));
                }
            });
        }
    });
    let mut done = done.into_inner().unwrap_or_else(|e| e.into_inner());
    done.sort_by_key(|(at, _)| *at);
    done.into_iter().map(|(_, made)| made).collect()
}
