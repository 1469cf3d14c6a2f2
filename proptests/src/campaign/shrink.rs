//! Shrinks a failing case: fewer configuration values, smaller sizes, fewer rows, simpler values. A
//! smaller case is kept if the kernel fails on it at the same output and with the same cause, or with
//! the same kind of fault.

use std::time::Instant;

use marlinspike::case::{Case, CaseConfig, Dim};
use marlinspike::check::add_outputs;
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::vectors::case_of;
use serde_json::{Map, Value};

use super::{Campaign, Failure, Judgement, Kernel, Trial};

/// Number of draws per configuration, since a mistake may need certain values.
const DRAWS: u64 = 3;
/// Sizes that are tried, beyond those of the lattice.
const SIZES: [u64; 12] = [1, 2, 3, 4, 8, 16, 32, 48, 64, 96, 128, 256];
/// Configurations of the lattice that are tried, the smallest first.
const LATTICE: usize = 24;
/// The largest number of parts of an input that are made constant one by one.
const PARTS: usize = 64;
/// Inputs that the reference computes from `x`.
const QUANTIZED: [&str; 2] = ["a_q", "a_scales"];
/// Row counts that are tried.
const ROWS: [usize; 5] = [1, 2, 4, 8, 16];

pub(super) struct Shrinker<'c, 'k> {
    campaign: &'c Campaign,
    kernel: &'k mut dyn Kernel,
    /// The failure that smaller cases are compared with.
    like: Failure,
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
        Self { campaign, kernel, like: first, runs: 0, start: Instant::now() }
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
    pub(super) fn minimal(&mut self, trial: Trial, failure: Failure) -> (Trial, Failure) {
        let mut at = Failing { trial, failure };
        self.by_lattice(&mut at);
        self.by_sizes(&mut at);
        self.by_flags(&mut at);
        self.by_sizes(&mut at);
        self.by_rows(&mut at);
        self.by_values(&mut at);
        (at.trial, at.failure)
    }

    /// The trial, if the kernel fails on it in the same way as before.
    fn fails(&mut self, trial: Trial) -> Option<Failing> {
        self.runs += 1;
        match self.campaign.judge(self.kernel, &trial) {
            Ok(Judgement::Wrong(failure)) if failure.is_like(&self.like) => {
                Some(Failing { trial, failure: *failure })
            }
            _ => None,
        }
    }

    /// Draws cases of a configuration until one fails.
    fn redraw(&mut self, config: &CaseConfig) -> Option<Failing> {
        for draw in 0..DRAWS {
            if !self.may_go_on() {
                break;
            }
            let mut rng = self.campaign.generator.rng(draw);
            let case = case_of(config.clone(), &mut rng).ok()?;
            let trial = self.campaign.trial_of(case).ok()?;
            trial.case.validate().ok()?;
            if let Some(failing) = self.fails(trial) {
                return Some(failing);
            }
        }
        None
    }

    /// The smallest configuration of the lattice on which the kernel fails.
    fn by_lattice(&mut self, at: &mut Failing) {
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
            if let Some(failing) = self.redraw(config) {
                *at = failing;
                break;
            }
        }
    }

    /// Makes each integer of the configuration as small as the failure allows.
    fn by_sizes(&mut self, at: &mut Failing) {
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
                    return;
                }
                if let Some(failing) = self.with_key(at, &key, smaller.into()) {
                    *at = failing;
                    break;
                }
            }
        }
    }

    /// Turns each flag off and removes each optional key.
    fn by_flags(&mut self, at: &mut Failing) {
        let map = at.trial.case.config.to_json();
        for (key, value) in map {
            let simpler = match value {
                Value::Bool(true) => Value::Bool(false),
                Value::Object(_) => Value::Null,
                _ => continue,
            };
            if !self.may_go_on() {
                return;
            }
            if let Some(failing) = self.with_key(at, &key, simpler) {
                *at = failing;
            }
        }
    }

    fn with_key(&mut self, at: &Failing, key: &str, value: Value) -> Option<Failing> {
        let mut map = drawn_keys_removed(at.trial.case.config.to_json());
        match value {
            Value::Null => map.remove(key),
            value => map.insert(key.to_owned(), value),
        };
        let config = CaseConfig::from_json(at.trial.case.op, &map).ok()?;
        self.redraw(&config)
    }

    /// Keeps only the first rows, or only the first wrong row.
    fn by_rows(&mut self, at: &mut Failing) {
        let by_row = row_inputs(&at.trial.case).unwrap_or_default();
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
                    return;
                }
                let Some(trial) = with_rows(&at.trial, &by_row, first, kept) else { continue };
                if let Some(failing) = self.fails(trial) {
                    *at = failing;
                    return;
                }
            }
        }
    }

    /// Simpler values: whole inputs constant, then their halves, quarters and so on.
    fn by_values(&mut self, at: &mut Failing) {
        let mut names: Vec<String> = at.trial.case.inputs.keys().cloned().collect();
        // Activations first: a mistake is easiest to read off a row of ones.
        names.sort_by_key(|name| name != "x");
        let most = at.trial.case.inputs.values().map(Tensor::len).max().unwrap_or(0).min(PARTS);
        let mut parts = 1;
        while parts <= most {
            for name in &names {
                for base in bases(&at.trial.case.inputs[name]) {
                    for part in 0..parts {
                        if !self.may_go_on() {
                            return;
                        }
                        let now = &at.trial.case.inputs[name];
                        let Some(simpler) = filled(now, part, parts, &base) else { continue };
                        let Some(trial) = with_input(&at.trial, name, simpler) else { continue };
                        if let Some(failing) = self.fails(trial) {
                            *at = failing;
                        }
                    }
                }
            }
            parts *= 4;
        }
    }
}

/// The config without the keys that follow from drawn values.
fn drawn_keys_removed(mut map: Map<String, Value>) -> Map<String, Value> {
    map.retain(|key, _| !key.starts_with("scale_factor"));
    map
}

/// The trial of rows `first..first + kept`.
pub(super) fn with_rows(
    trial: &Trial,
    by_row: &[String],
    first: usize,
    kept: usize,
) -> Option<Trial> {
    let mut case = trial.case.clone();
    let mut map = case.config.to_json();
    if map.contains_key("size_m") {
        map.insert("size_m".to_owned(), kept.into());
    }
    case.config = CaseConfig::from_json(case.op, &map).ok()?;
    for name in by_row {
        if let Some(tensor) = case.inputs.get(name) {
            let part = leading(tensor, first, kept)?;
            case.add_input(name, part);
        }
    }
    recomputed(case, trial)
}

/// The trial with one input replaced.
fn with_input(trial: &Trial, name: &str, value: Tensor<'static>) -> Option<Trial> {
    let mut case = trial.case.clone();
    let map = drawn_keys_removed(case.config.to_json());
    case.config = CaseConfig::from_json(case.op, &map).ok()?;
    case.add_input(name, value);
    // The reference adds the codes and scales of activations again.
    if !QUANTIZED.contains(&name) {
        case.inputs.retain(|input, _| !QUANTIZED.contains(&input.as_str()));
    }
    recomputed(case, trial)
}

/// The trial of an edited case, with the reference outputs that `of` has; `None` for inputs that the
/// reference refuses.
fn recomputed(mut case: Case<'static>, of: &Trial) -> Option<Trial> {
    case.outputs.clear();
    case.validate().ok()?;
    if add_outputs(&mut case).is_err() {
        // Some routings have no reference outputs; their kernels need none.
        if !of.reference.is_empty() {
            return None;
        }
        case.outputs.clear();
    }
    let asked = |name: &String| of.wanted.iter().any(|wanted| wanted.name == *name);
    case.outputs.retain(|name, _| asked(name) || of.reference.contains_key(name));
    let names: Vec<String> = of.wanted.iter().map(|wanted| wanted.name.clone()).collect();
    let mut trial = Trial::new(case, &names).ok()?;
    for (wanted, before) in trial.wanted.iter_mut().zip(&of.wanted) {
        wanted.dtype.clone_from(&before.dtype);
    }
    Some(trial)
}

/// The inputs whose leading axis is the rows: those whose shape follows `size_m`, otherwise those
/// whose leading axis the config does not fix.
pub(super) fn row_inputs(case: &Case<'_>) -> marlinspike::Result<Vec<String>> {
    let shapes = |rows: Option<usize>| -> marlinspike::Result<Vec<(String, Option<Dim>)>> {
        let mut map = case.config.to_json();
        if let Some(rows) = rows {
            map.insert("size_m".to_owned(), rows.into());
        }
        let config = CaseConfig::from_json(case.op, &map)?;
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

/// Bytes of the simplest elements, the simplest first: one for floats, zero for others; for 32-bit words
/// of packed codes also the middle code, whose weights are zero.
fn bases(tensor: &Tensor<'_>) -> Vec<Vec<u8>> {
    match tensor.dtype() {
        DType::F32 => vec![1f32.to_le_bytes().to_vec()],
        DType::F16 => vec![0x3c00u16.to_le_bytes().to_vec()],
        DType::BF16 => vec![0x3f80u16.to_le_bytes().to_vec()],
        DType::I32 => vec![0x8888_8888u32.to_le_bytes().to_vec(), 0u32.to_le_bytes().to_vec()],
        dtype => vec![vec![0; dtype.bytes()]],
    }
}

/// The tensor with part `part` of `parts` filled with `base`; `None` if the part is simple already.
fn filled(
    tensor: &Tensor<'static>,
    part: usize,
    parts: usize,
    base: &[u8],
) -> Option<Tensor<'static>> {
    let bytes = tensor.dtype().bytes();
    let (from, to) = (tensor.len() * part / parts, tensor.len() * (part + 1) / parts);
    let mut data = tensor.bytes().to_vec();
    let filled = &mut data[from * bytes..to * bytes];
    let bases = bases(tensor);
    if filled.chunks_exact(bytes).all(|e| bases.iter().any(|base| base == e)) {
        return None;
    }
    filled.chunks_exact_mut(bytes).for_each(|e| e.copy_from_slice(base));
    Tensor::new(tensor.name(), tensor.dtype(), tensor.shape().to_vec(), data).ok()
}
