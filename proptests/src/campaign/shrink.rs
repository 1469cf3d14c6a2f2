//! Shrinks a failing case: fewer configuration values, smaller sizes, fewer rows, simpler values. A
//! smaller case is kept if the kernel fails on it at the same output or with the same kind of
//! fault.

use std::time::Instant;

use marlinspike::case::{Case, CaseConfig, Dim};
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::vectors::{Rng, case_of};
use serde_json::{Map, Value};

use super::{Campaign, CampaignError, Failure, Judgement, Kernel, Trial};

/// Number of draws per configuration, since a mistake may need certain values.
const DRAWS: u64 = 3;
/// Sizes that are tried, beyond those of the lattice.
const SIZES: [u64; 12] = [1, 2, 3, 4, 8, 16, 32, 48, 64, 96, 128, 256];
/// Configurations of the lattice that are tried, the smallest first.
const LATTICE: usize = 24;
/// Row counts that are tried.
const ROWS: [usize; 5] = [1, 2, 4, 8, 16];

pub(super) struct Shrinker<'c, 'k> {
    campaign: &'c Campaign,
    kernel: &'k mut dyn Kernel,
    first: Failure,
    runs: u32,
    start: Instant,
}

/// A failing trial.
struct Failing {
    trial: Trial,
    failure: Failure,
}

impl<'c, 'k> Shrinker<'c, 'k> {
    pub(super) fn new(campaign: &'c Campaign, kernel: &'k mut dyn Kernel, first: Failure) -> Self {
        Self { campaign, kernel, first, runs: 0, start: Instant::now() }
    }

    /// Runs of the kernel so far.
    pub(super) fn runs(&self) -> u32 {
        self.runs
    }

    fn may_go_on(&self) -> bool {
        let (runs, time) = self.campaign.shrink;
        self.runs < runs && self.start.elapsed() < time
    }

    /// The smallest failing case.
    ///
    /// # Errors
    /// Returns an error of the reference for a case that it generated.
    pub(super) fn minimal(
        &mut self,
        trial: Trial,
        failure: Failure,
    ) -> Result<(Trial, Failure), CampaignError> {
        let mut at = Failing { trial, failure };
        self.by_lattice(&mut at)?;
        self.by_sizes(&mut at)?;
        self.by_flags(&mut at)?;
        self.by_sizes(&mut at)?;
        self.by_rows(&mut at)?;
        self.by_values(&mut at)?;
        Ok((at.trial, at.failure))
    }

    /// The trial, if the kernel fails on it in the same way as before.
    fn fails(&mut self, trial: Trial) -> Result<Option<Failing>, CampaignError> {
        self.runs += 1;
        match self.campaign.judge(self.kernel, &trial) {
            Ok(Judgement::Wrong(failure)) if failure.is_like(&self.first) => {
                Ok(Some(Failing { trial, failure: *failure }))
            }
            // A shrunk case that the reference refuses is invalid and is dropped.
            Ok(_) | Err(CampaignError::Reference(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Draws cases of a configuration until one fails.
    fn redraw(&mut self, config: &CaseConfig) -> Result<Option<Failing>, CampaignError> {
        for draw in 0..DRAWS {
            if !self.may_go_on() {
                break;
            }
            let mut rng = Rng::for_case(self.campaign.generator.seed(), draw);
            let Ok(case) = case_of(config.clone(), &mut rng) else { return Ok(None) };
            let Ok(trial) = self.campaign.trial_of(case) else { return Ok(None) };
            if trial.case.validate().is_err() {
                return Ok(None);
            }
            if let Some(failing) = self.fails(trial)? {
                return Ok(Some(failing));
            }
        }
        Ok(None)
    }

    /// The smallest configuration of the lattice on which the kernel fails.
    fn by_lattice(&mut self, at: &mut Failing) -> Result<(), CampaignError> {
        let size = volume(&at.trial.case.config.to_json());
        let campaign = self.campaign;
        let mut smaller: Vec<(f64, &CaseConfig)> = campaign
            .lattice()
            .iter()
            .map(|config| (volume(&config.to_json()), config))
            .filter(|(volume, _)| *volume < size)
            .collect();
        smaller.sort_by(|a, b| a.0.total_cmp(&b.0));
        // Selects configurations evenly over the sizes, so that one family of small ones does not
        // use all tries.
        let step = smaller.len().div_ceil(LATTICE).max(1);
        for (_, config) in smaller.into_iter().step_by(step) {
            if let Some(failing) = self.redraw(config)? {
                *at = failing;
                break;
            }
        }
        Ok(())
    }

    /// Makes each integer of the configuration as small as the failure allows.
    fn by_sizes(&mut self, at: &mut Failing) -> Result<(), CampaignError> {
        let map = at.trial.case.config.to_json();
        let mut keys: Vec<(String, u64)> = map
            .iter()
            .filter_map(|(key, value)| Some((key.clone(), value.as_u64()?)))
            .filter(|(key, value)| *value > 1 && key != "size_m")
            .collect();
        keys.sort_by_key(|(_, value)| std::cmp::Reverse(*value));
        for (key, now) in keys {
            for smaller in SIZES.into_iter().filter(|size| *size < now) {
                if !self.may_go_on() {
                    return Ok(());
                }
                if let Some(failing) = self.with_key(at, &key, smaller.into())? {
                    *at = failing;
                    break;
                }
            }
        }
        Ok(())
    }

    /// Turns each flag off and removes each optional key.
    fn by_flags(&mut self, at: &mut Failing) -> Result<(), CampaignError> {
        let map = at.trial.case.config.to_json();
        for (key, value) in map {
            let simpler = match value {
                Value::Bool(true) => Value::Bool(false),
                Value::Object(_) => Value::Null,
                _ => continue,
            };
            if !self.may_go_on() {
                return Ok(());
            }
            if let Some(failing) = self.with_key(at, &key, simpler)? {
                *at = failing;
            }
        }
        Ok(())
    }

    fn with_key(
        &mut self,
        at: &Failing,
        key: &str,
        value: Value,
    ) -> Result<Option<Failing>, CampaignError> {
        let mut map: Map<String, Value> = at.trial.case.config.to_json();
        // Keys that belong to the drawn values, not to the configuration.
        map.remove("scale_factor");
        match value {
            Value::Null => map.remove(key),
            value => map.insert(key.to_owned(), value),
        };
        match CaseConfig::from_json(at.trial.case.op, &map) {
            Ok(config) => self.redraw(&config),
            Err(_) => Ok(None),
        }
    }

    /// Keeps only the first rows, or only the first wrong row.
    fn by_rows(&mut self, at: &mut Failing) -> Result<(), CampaignError> {
        let by_row = row_inputs(&at.trial.case)?;
        let tensors = by_row.iter().filter_map(|name| at.trial.case.inputs.get(name));
        let rows = tensors.filter_map(|t| t.shape().first().copied()).max().unwrap_or(1);
        let wrong = at.failure.failed().find_map(|output| {
            output.first_mismatch.as_ref().and_then(|m| m.index.first().copied())
        });
        for kept in ROWS.into_iter().filter(|kept| *kept < rows) {
            let mut firsts = vec![0];
            firsts.extend(wrong.filter(|row| kept == 1 && *row > 0 && *row < rows));
            for first in firsts {
                if !self.may_go_on() {
                    return Ok(());
                }
                let Some(trial) = rows_of(&at.trial, &by_row, first, kept)? else { continue };
                if let Some(failing) = self.fails(trial)? {
                    *at = failing;
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// Simpler values: whole inputs constant, then halves, quarters and so on.
    fn by_values(&mut self, at: &mut Failing) -> Result<(), CampaignError> {
        // Packed reference outputs belong to the drawn weights.
        let editable: Vec<String> = at
            .trial
            .case
            .inputs
            .keys()
            .filter(|name| at.trial.reference.is_empty() || name.as_str() == "x")
            .cloned()
            .collect();
        for name in editable {
            let tensor = at.trial.case.inputs[&name].clone();
            for base in bases(&tensor) {
                let mut parts = 1;
                while parts <= tensor.len().min(64) && self.may_go_on() {
                    for part in 0..parts {
                        if !self.may_go_on() {
                            break;
                        }
                        let now = &at.trial.case.inputs[&name];
                        let Some(simpler) = filled(now, part, parts, &base) else { continue };
                        let mut case = at.trial.case.clone();
                        case.add_input(&name, simpler);
                        let Some(trial) = rebuilt(case, &at.trial)? else { continue };
                        if let Some(failing) = self.fails(trial)? {
                            *at = failing;
                        }
                    }
                    parts *= 4;
                }
            }
        }
        Ok(())
    }
}

/// The trial of rows `first..first + kept`.
pub(super) fn rows_of(
    trial: &Trial,
    by_row: &[String],
    first: usize,
    kept: usize,
) -> Result<Option<Trial>, CampaignError> {
    let mut case = trial.case.clone();
    let mut map = case.config.to_json();
    if map.contains_key("size_m") {
        map.insert("size_m".to_owned(), kept.into());
    }
    let Ok(config) = CaseConfig::from_json(case.op, &map) else { return Ok(None) };
    case.config = config;
    for name in by_row {
        if let Some(tensor) = case.inputs.get(name) {
            let Some(part) = leading(tensor, first, kept) else { return Ok(None) };
            case.add_input(name, part);
        }
    }
    rebuilt(case, trial)
}

/// The trial of a case whose rows or values were edited, with the reference outputs that still
/// apply.
fn rebuilt(mut case: Case<'static>, of: &Trial) -> Result<Option<Trial>, CampaignError> {
    if case.validate().is_err() {
        return Ok(None);
    }
    let mut wanted = of.wanted.clone();
    let rules = case.rules()?;
    for output in &mut wanted {
        let rule = rules.iter().find(|r| r.name.strip_prefix("out.") == Some(&output.name));
        let shape = rule.and_then(|r| r.shape.iter().map(super::kernel::size).collect());
        output.shape = shape.or(output.shape.take());
    }
    // Packed weights do not depend on edited rows or values; other reference outputs are
    // dropped.
    let mut reference = of.reference.clone();
    reference.retain(|name, _| name.contains("marlin_") || name.ends_with("rhs_packed"));
    case.outputs.clear();
    Ok(Some(Trial { case, reference, wanted }))
}

/// The inputs whose leading axis is the rows: those whose shape follows `size_m`, otherwise those
/// whose leading axis the config does not fix.
pub(super) fn row_inputs(case: &Case<'_>) -> Result<Vec<String>, CampaignError> {
    let shapes = |rows: Option<usize>| -> Result<Vec<(String, Option<Dim>)>, CampaignError> {
        let mut map = case.config.to_json();
        if let Some(rows) = rows {
            map.insert("size_m".to_owned(), rows.into());
        }
        let config = CaseConfig::from_json(case.op, &map).map_err(marlinspike::Error::from)?;
        let probe = Case { config, ..case.clone() };
        Ok(probe.rules()?.into_iter().map(|r| (r.name, r.shape.first().copied())).collect())
    };
    let bare = |name: &str| name.strip_prefix("in.").map(str::to_owned);
    if case.config.to_json().contains_key("size_m") {
        let (one, two) = (shapes(Some(1))?, shapes(Some(2))?);
        let follows = one.into_iter().zip(two).filter(|((_, a), (_, b))| a != b);
        return Ok(follows.filter_map(|((name, _), _)| bare(&name)).collect());
    }
    let open =
        shapes(None)?.into_iter().filter(|(_, dim)| matches!(dim, Some(Dim::Some | Dim::Any)));
    Ok(open.filter_map(|(name, _)| bare(&name)).collect())
}

/// The product of the whole numbers of a configuration.
fn volume(map: &Map<String, Value>) -> f64 {
    map.values().filter_map(Value::as_f64).filter(|n| *n > 1.0).product()
}

/// Rows `first..first + kept` of a tensor's leading axis.
fn leading(tensor: &Tensor<'static>, first: usize, kept: usize) -> Option<Tensor<'static>> {
    let mut shape = tensor.shape().to_vec();
    let rows = *shape.first()?;
    let row = tensor.bytes().len() / rows.max(1);
    let data = tensor.bytes().get(first * row..(first + kept) * row)?.to_vec();
    shape[0] = kept;
    Tensor::new(tensor.name(), tensor.dtype(), shape, data).ok()
}

/// Bytes of the simplest elements: one for floats, zero for others, and also the middle code for
/// 32-bit words of packed codes.
fn bases(tensor: &Tensor<'_>) -> Vec<Vec<u8>> {
    match tensor.dtype() {
        DType::F32 => vec![1f32.to_le_bytes().to_vec()],
        DType::F16 => vec![0x3c00u16.to_le_bytes().to_vec()],
        DType::BF16 => vec![0x3f80u16.to_le_bytes().to_vec()],
        DType::I32 => vec![0u32.to_le_bytes().to_vec(), 0x8888_8888u32.to_le_bytes().to_vec()],
        dtype => vec![vec![0; dtype.bytes()]],
    }
}

/// The tensor with part `part` of `parts` filled with `base`; `None` if nothing changes.
fn filled(
    tensor: &Tensor<'static>,
    part: usize,
    parts: usize,
    base: &[u8],
) -> Option<Tensor<'static>> {
    let bytes = tensor.dtype().bytes();
    let (from, to) = (tensor.len() * part / parts, tensor.len() * (part + 1) / parts);
    let mut data = tensor.bytes().to_vec();
    data[from * bytes..to * bytes].chunks_exact_mut(bytes).for_each(|e| e.copy_from_slice(base));
    if data == tensor.bytes() {
        return None;
    }
    Tensor::new(tensor.name(), tensor.dtype(), tensor.shape().to_vec(), data).ok()
}
