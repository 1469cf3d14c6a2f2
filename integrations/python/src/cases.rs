//! Cases: their schema, files, verdicts and the reference's outputs.

use std::collections::BTreeMap;

use marlinspike::case::{Case, CaseConfig, Dim, Limits, Op};
use marlinspike::check::{Declared, add_outputs, check_case_within};
use marlinspike::num::tensor::Tensor;
use marlinspike::vectors::{Generator, Rng, case_of};
use marlinspike::{panics, schema as schemas};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use serde_json::{Map, Value};

use crate::arrays::{Named, Output, output};
use crate::error::{Failed, raised};

pub(crate) fn operation(name: &str) -> PyResult<Op> {
    Op::from_any_name(name).ok_or_else(|| {
        let known: Vec<_> = Op::NAMED.iter().map(|(name, _)| *name).collect();
        raised(format!("op: found {name}, expected one of {}", known.join(", ")))
    })
}

pub(crate) fn object(config: &str) -> PyResult<Map<String, Value>> {
    serde_json::from_str(config).map_err(|e| raised(format!("config: {e}")))
}

/// The case of these tensors, validated.
fn case<'a>(
    op: &str,
    config: &str,
    inputs: &'a [Named<'_>],
    outputs: &'a [Named<'_>],
    text: (&str, &str),
) -> PyResult<Case<'a>> {
    let map = object(config)?;
    let config = CaseConfig::from_json(operation(op)?, &map).failed()?;
    let mut case = Case::new(text.0, config, text.1);
    case.raw_config = map;
    for (name, tensor) in inputs {
        case.add_input(name, tensor.tensor(&format!("in.{name}"))?);
    }
    for (name, tensor) in outputs {
        case.add_output(name, tensor.tensor(&format!("out.{name}"))?);
    }
    case.validate().failed()?;
    Ok(case)
}

/// Names of all operations.
#[pyfunction]
pub(crate) fn operations() -> Vec<&'static str> {
    Op::NAMED.iter().map(|(name, _)| *name).collect()
}

/// JSON Schema of an operation.
#[pyfunction]
pub(crate) fn schema(py: Python<'_>, op: &str) -> PyResult<String> {
    let op = operation(op)?;
    py.detach(|| schemas::describe(op).map(|schema| schema.to_json().to_string())).failed()
}

/// Keys and tensors of an operation as text.
#[pyfunction]
pub(crate) fn schema_text(py: Python<'_>, op: &str) -> PyResult<String> {
    let op = operation(op)?;
    py.detach(|| schemas::describe(op).map(|schema| schemas::text(&schema))).failed()
}

/// A tensor's name, element types, shape (−1: 1 or more, −2: any), and whether it is required.
type Rule = (String, Vec<&'static str>, Vec<i64>, bool);

/// The tensors under one config.
#[pyfunction]
pub(crate) fn tensors(op: &str, config: &str, local_experts: Option<usize>) -> PyResult<Vec<Rule>> {
    let rules = schemas::tensors(operation(op)?, &object(config)?, local_experts).failed()?;
    let size = |dim: &Dim| match dim {
        Dim::Is(size) => *size as i64,
        Dim::Some => -1,
        Dim::Any => -2,
    };
    let rule = |rule: marlinspike::case::TensorRule| {
        let dtypes = rule.dtypes.iter().map(|ty| ty.name()).collect();
        (rule.name, dtypes, rule.shape.iter().map(size).collect(), rule.required)
    };
    Ok(rules.into_iter().map(rule).collect())
}

/// The convention and the class that a kernel's author states, the latter by name or as JSON.
pub(crate) type Stated = (Option<String>, Option<String>);

/// The declared arithmetic.
pub(crate) fn declared((convention, class): &Stated) -> PyResult<Declared> {
    Declared::stated(convention.as_deref(), class.as_deref()).map_err(|e| {
        // `class` is a keyword of Python, so the argument is called `class_`.
        let text = e.to_string();
        raised(text.strip_prefix("class").map_or(text.clone(), |rest| format!("class_{rest}")))
    })
}

/// Refuses names that state no arithmetic.
#[pyfunction]
pub(crate) fn expect_stated(stated: Stated) -> PyResult<()> {
    declared(&stated).map(|_| ())
}

/// The verdict on a case, as JSON.
#[pyfunction]
pub(crate) fn check(
    py: Python<'_>,
    op: &str,
    config: &str,
    inputs: Vec<Named<'_>>,
    outputs: Vec<Named<'_>>,
    text: (String, String),
    stated: Stated,
) -> PyResult<String> {
    let declared = declared(&stated)?;
    let case = case(op, config, &inputs, &outputs, (&text.0, &text.1))?;
    let report =
        py.detach(|| panics::catch(|| check_case_within(&case, &declared, &Limits::default())));
    serde_json::to_string(&report.failed()?).failed()
}

/// A case file's bytes.
#[pyfunction]
pub(crate) fn write_case<'py>(
    py: Python<'py>,
    op: &str,
    config: &str,
    inputs: Vec<Named<'py>>,
    outputs: Vec<Named<'py>>,
    name: &str,
    provenance: &str,
) -> PyResult<Bound<'py, PyBytes>> {
    let case = case(op, config, &inputs, &outputs, (name, provenance))?;
    Ok(PyBytes::new(py, &case.to_bytes().failed()?))
}

/// Operation, config as JSON, inputs, outputs, name, provenance.
type Parts<'py> =
    (&'static str, String, Vec<(String, Output<'py>)>, Vec<(String, Output<'py>)>, String, String);

fn parts<'py>(py: Python<'py>, case: Case<'_>) -> Parts<'py> {
    let mut config = case.raw_config;
    config.extend(case.config.to_json());
    let all = |tensors: BTreeMap<String, Tensor<'_>>| {
        tensors.into_iter().map(|(name, tensor)| (name, output(py, tensor))).collect()
    };
    let (op, config) = (case.op.name(), Value::Object(config).to_string());
    (op, config, all(case.inputs), all(case.outputs), case.name, case.provenance)
}

/// A case file's parts.
#[pyfunction]
pub(crate) fn read_case<'py>(py: Python<'py>, bytes: &[u8]) -> PyResult<Parts<'py>> {
    let case = panics::catch(|| Case::parse(bytes)).failed()?;
    Ok(parts(py, case))
}

/// Case `index` of an operation's generator. Its config declares the schedule of its outputs if
/// `schedule`; a schedule that `config` states is kept.
#[pyfunction]
pub(crate) fn draw<'py>(
    py: Python<'py>,
    op: &str,
    seed: u64,
    index: u64,
    config: Option<&str>,
    schedule: bool,
) -> PyResult<Parts<'py>> {
    let op = operation(op)?;
    let config = config.map(object).transpose()?;
    let drawn = py.detach(|| -> marlinspike::Result<Case<'static>> {
        let (mut case, stated) = match config {
            None => (Generator::new(op, seed)?.case(index)?, Map::new()),
            Some(map) => {
                let config = CaseConfig::from_json(op, &map)?;
                (panics::catch(|| case_of(config, &mut Rng::for_case(seed, index)))?, map)
            }
        };
        if !schedule {
            let mut map = case.config.without_schedules()?.to_json();
            map.extend(stated.into_iter().filter(|(key, _)| key.starts_with("schedule")));
            case.config = CaseConfig::from_json(op, &map)?;
        }
        Ok(case)
    });
    Ok(parts(py, drawn.failed()?))
}

/// The version of the package.
#[pyfunction]
pub(crate) fn version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}

/// The configs that generated cases go through, as JSON.
#[pyfunction]
pub(crate) fn lattice(py: Python<'_>, op: &str) -> PyResult<Vec<String>> {
    let op = operation(op)?;
    let configs = py.detach(|| marlinspike::vectors::lattice(op)).failed()?;
    Ok(configs.iter().map(|c| Value::Object(c.to_json()).to_string()).collect())
}

/// The outputs that the reference computes.
#[pyfunction]
pub(crate) fn reference<'py>(
    py: Python<'py>,
    op: &str,
    config: &str,
    inputs: Vec<Named<'py>>,
) -> PyResult<Vec<(String, Output<'py>)>> {
    let mut case = case(op, config, &inputs, &[], ("", ""))?;
    let computed = py.detach(|| panics::catch(|| add_outputs(&mut case).map(|()| case.outputs)));
    let outputs = computed.failed()?;
    Ok(outputs.into_iter().map(|(name, tensor)| (name, output(py, tensor))).collect())
}
