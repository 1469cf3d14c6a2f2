//! Fuzzing of a Python callable: the campaign draws cases, judges, shrinks and keeps what fails.

use std::path::PathBuf;
use std::time::Duration;

use marlinspike::num::tensor::Tensor;
use marlinspike_proptests::campaign::{
    Campaign, CampaignError, Fault, Filter, Laws, Limit, Outputs, Shard, Trial, merge as merged,
};
use pyo3::prelude::*;
use serde_json::Value;

use crate::arrays::{Named, output};
use crate::cases::{Stated, declared, object, operation};
use crate::error::{Failed, raised};

/// A callable of inputs, reference outputs, config and wanted outputs. It returns outputs, or the kind
/// and text of a fault; exceptions that end the run are raised.
struct Callable<'k> {
    kernel: &'k Py<PyAny>,
    /// The exception that ends the run.
    raised: Option<PyErr>,
}

/// What the callable returns.
#[derive(FromPyObject)]
enum Answer<'py> {
    Fault(String, String),
    Outputs(Vec<Named<'py>>),
}

impl Callable<'_> {
    fn call(&mut self, trial: &Trial) -> Result<Outputs, Fault> {
        if self.raised.is_some() {
            return Err(Fault::Unsupported { reason: "the run was ended".to_owned() });
        }
        Python::attach(|py| {
            let all = |tensors: &Outputs| -> Vec<_> {
                tensors.iter().map(|(name, t)| (name.clone(), output(py, t.clone()))).collect()
            };
            let config = Value::Object(trial.case.config.to_json()).to_string();
            let wanted: Vec<&str> = trial.wanted.iter().map(|w| w.name.as_str()).collect();
            let arguments = (all(&trial.case.inputs), all(&trial.reference), config, wanted);
            let returned = self.kernel.bind(py).call1(arguments);
            let answer = match returned.and_then(|value| value.extract::<Answer<'_>>()) {
                Ok(answer) => answer,
                Err(error) => {
                    self.raised = Some(error);
                    return Err(Fault::Unsupported { reason: "the run was ended".to_owned() });
                }
            };
            match answer {
                Answer::Fault(kind, text) if kind == "unsupported" => {
                    Err(Fault::Unsupported { reason: text })
                }
                Answer::Fault(kind, text) if kind == "unreadable" => {
                    Err(Fault::Unreadable { detail: text })
                }
                Answer::Fault(_, text) => Err(Fault::Crashed { detail: text }),
                Answer::Outputs(named) => named
                    .iter()
                    .map(|(name, tensor)| {
                        let made = tensor.tensor(name).map(Tensor::into_owned);
                        made.map(|tensor| (name.clone(), tensor))
                            .map_err(|e| Fault::Unreadable { detail: e.to_string() })
                    })
                    .collect(),
            }
        })
    }
}

/// Runs the cases kept in `folder`, then a campaign; returns the run as JSON.
#[pyfunction]
pub(crate) fn fuzz(
    py: Python<'_>,
    kernel: Py<PyAny>,
    op: &str,
    filter: &str,
    seed: u64,
    cases: u64,
    seconds: Option<f64>,
    outputs: Vec<String>,
    set: &str,
    folder: Option<PathBuf>,
    shard: &str,
    deterministic: bool,
    batch_invariant: bool,
    findings: usize,
    stated: Stated,
) -> PyResult<String> {
    let op = operation(op)?;
    let set = object(set)?;
    let declared = declared(&stated)?;
    let shard: Shard = shard.parse().map_err(|problem| raised(format!("shard: {problem}")))?;
    let time = seconds.map(|seconds| {
        let problem = format!("seconds: found {seconds}, expected a number from 0 on");
        Duration::try_from_secs_f64(seconds).map_err(|_| raised(problem))
    });
    let limit = Limit { time: time.transpose()?, findings, ..Limit::cases(cases) };
    let mut callable = Callable { kernel: &kernel, raised: None };
    let run = py.detach(|| -> Result<Value, CampaignError> {
        let mut campaign = Campaign::new(op, seed, Filter::parse(filter)?)?.with_set(set)?;
        campaign.outputs = outputs;
        campaign.shard = shard;
        campaign.declared = declared;
        campaign.laws = Laws { deterministic, batch_invariant };
        let mut call = |trial: &Trial| callable.call(trial);
        campaign.run_with_kept(folder.as_deref(), &mut call, &limit, &mut |_| ())?.to_json()
    });
    if let Some(error) = callable.raised {
        return Err(error);
    }
    Ok(run.failed()?.to_string())
}

/// Merges summary files, and copies the failing cases that they name into `regressions`; returns JSON.
#[pyfunction]
pub(crate) fn merge(
    py: Python<'_>,
    summaries: Vec<PathBuf>,
    regressions: Option<PathBuf>,
) -> PyResult<String> {
    let merged = py.detach(|| merged(&summaries, regressions.as_deref())).failed()?;
    serde_json::to_string(&merged).failed()
}
