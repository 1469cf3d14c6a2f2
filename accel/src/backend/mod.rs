//! Runs cases with the registry's operations and judges the device's outputs like the case's own.
//!
//! An output that a device computes must pass two checks. First, every bit of every operation on
//! the way equals the reference's (the law of its registry row). Second, the output passes the
//! case's judge: bits for layouts and integers, bounds for router weights, activations and sums,
//! and for products both the canonical schedule's bits and the bound of its convention. Outputs
//! that no operation computes are unchecked, with the reason.
//!
//! [`Operations`] computes the cases: a [`Device`](crate::Device), or the [`Reference`], which
//! needs no GPU.

mod compared;
mod fp8_gemm;
mod layer;
mod layouts;
mod operations;

use marlinspike::case::{Case, CaseConfig, Limits, LinearConfig, ScheduleChoice};
use marlinspike::check::{
    CaseReport, Declared, MatrixSource, OutputReport, Verdict, beside_misfits, check_case_as,
    without_misfits,
};
use marlinspike::moe::align::{Absent, Align};
use marlinspike::moe::router::Router;
use marlinspike::num::dims::Shape;
use marlinspike::num::scalar::ScalarType;
use marlinspike::num::tensor::{DType, Element, Tensor};
use marlinspike::products::Convention;

pub use compared::{Count, Counts};
pub use operations::{Operations, Reference};

use crate::error::AccelError;
use crate::ops::{align::AlignTokens, products::DenseProduct, router::Route, scales::Int4Fp8};
use compared::Compared;

/// Why a case could not be checked.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum BackendError {
    /// The device failed, or what it needs is missing.
    #[error(transparent)]
    Accel(#[from] AccelError),
    /// An input of the case cannot be used.
    #[error(transparent)]
    Case(#[from] marlinspike::Error),
}

/// The device's outputs for a case, judged.
#[derive(Debug, Clone)]
pub struct Checked {
    /// The verdict on what it computed; other outputs are unchecked, and their note says why.
    pub report: CaseReport,
    /// Comparisons with the reference, by operation.
    pub counts: Counts,
}

/// Beginning of the note of an output that is not computed.
pub const NOT_ON_DEVICE: &str = "not on cuda: ";

/// Computes what `case` records by `operations`, and judges it.
///
/// # Errors
/// [`BackendError::Accel`] for a device that fails; [`BackendError::Case`] for inputs that cannot
/// be used. An operation that refuses its arguments leaves its output unchecked; this is not an error.
pub fn check<O: Operations>(
    operations: &O,
    case: &Case<'_>,
    declared: &Declared,
) -> Result<Checked, BackendError> {
    Limits::default().check(case)?;
    // Recorded outputs determine the shapes of the computed ones.
    if let Some((fitting, misfits)) = without_misfits(case)? {
        let Checked { report, counts } = check(operations, &fitting, declared)?;
        let outputs = beside_misfits(&fitting, misfits, report.outputs);
        return Ok(Checked { report: CaseReport::new(case, outputs), counts });
    }
    let (compared, reports) = (Compared::new(operations), Vec::new());
    let mut run = CaseRun { case, declared, operations: compared, reports };
    match &case.config {
        CaseConfig::Linear(c) => {
            run.layouts(&c.quant, "", Shape::new(c.size_k, c.size_n))?;
            run.linear(c)?;
        }
        CaseConfig::Moe(c) => {
            run.layouts(&c.quant, "w13_", Shape::new(c.hidden_size, c.w13_size_n()))?;
            run.layouts(&c.quant, "w2_", Shape::new(c.intermediate_size, c.hidden_size))?;
            if case.inputs.contains_key("router_logits") {
                run.route(&c.router())?;
            }
            run.stages(c)?;
        }
        // No operation of the registry computes a family's rule.
        CaseConfig::Router(c) if c.rule.is_some() => {}
        CaseConfig::Router(c) => {
            let bias = case.inputs.get("e_score_correction_bias").map(|b| b.elements::<f32>());
            let ty = float_type(case.input("router_logits")?.dtype());
            run.route(&c.router(ty, bias.as_deref()))?;
        }
        CaseConfig::Align(c) => {
            let ids = case.input("topk_ids")?.elements::<i32>();
            run.align(&ids, c.num_experts, c.block_size)?;
        }
        CaseConfig::Preprocess(c) => {
            let qweight = case.input("qweight")?.elements::<u32>();
            let zeros = case.inputs.get("qzeros").map(|z| z.elements::<u32>());
            let words = zeros.as_ref().map_or(qweight.len(), |_| c.size_n / 8);
            let call = Int4Fp8 { qweight: &qweight, qzeros: zeros.as_deref(), words };
            run.output("qweight", &[], |o| o.run(&call))?;
        }
        other => {
            if let Some(operands) = other.fp8_operands() {
                run.fp8_product(operands)?;
            }
        }
    }
    for (name, tensor) in &case.outputs {
        if !run.reports.iter().any(|report| report.name == *name) {
            let note = format!("{NOT_ON_DEVICE}no operation of the registry computes it");
            run.reports.push(OutputReport::unchecked(name, tensor.len(), &note));
        }
    }
    let report = CaseReport::new(case, run.reports);
    Ok(Checked { report, counts: run.operations.into_counts() })
}

/// The type of a floating-point tensor's elements; float32 of any other.
fn float_type(dtype: DType) -> ScalarType {
    marlinspike::formats::float_type(dtype).unwrap_or(ScalarType::FLOAT32)
}

/// What an operation computed, or why it has no kernel for its arguments.
type Computed<T> = Result<T, String>;

/// A case and its reports so far.
struct CaseRun<'c, O> {
    case: &'c Case<'c>,
    declared: &'c Declared,
    operations: Compared<'c, O>,
    reports: Vec<OutputReport>,
}

impl<O: Operations> CaseRun<'_, O> {
    /// Reports an output as unchecked, with the reason.
    fn absent(&mut self, name: &str, reason: &str) {
        if let Some(recorded) = self.case.output(name) {
            let note = format!("{NOT_ON_DEVICE}{reason}");
            self.reports.push(OutputReport::unchecked(name, recorded.len(), &note));
        }
    }

    /// An operation's result, and how many of its elements differ from the reference's. A failure of the device is an
    /// error; a refusal of the arguments is not.
    fn attempt<T>(
        &self,
        make: impl FnOnce(&Compared<'_, O>) -> Result<T, AccelError>,
    ) -> Result<(Computed<T>, usize), BackendError> {
        let before = self.operations.differing();
        let made = match make(&self.operations) {
            Ok(made) => Ok(made),
            Err(refusal @ (AccelError::Argument { .. } | AccelError::Capability { .. })) => {
                Err(refusal.to_string())
            }
            Err(error) => return Err(error.into()),
        };
        Ok((made, self.operations.differing() - before))
    }

    /// Computes an output that the case records, of the recorded type and shape, and judges it together
    /// with the outputs of `context`.
    fn output<T: Element>(
        &mut self,
        name: &str,
        context: &[Tensor<'_>],
        make: impl FnOnce(&Compared<'_, O>) -> Result<Vec<T>, AccelError>,
    ) -> Result<(), BackendError> {
        let Some(recorded) = self.case.output(name) else { return Ok(()) };
        let (made, wrong) = self.attempt(make)?;
        let made = match made {
            Ok(made) => made,
            Err(reason) => {
                self.absent(name, &reason);
                return Ok(());
            }
        };
        // The length of a list depends on its values.
        let shape = match recorded.shape() {
            [_] => vec![made.len()],
            shape => shape.to_vec(),
        };
        let made = Tensor::from_vec(name, recorded.dtype(), shape, made)?;
        self.judge(made, context, wrong)
    }

    /// Judges an output by the case's judge. `wrong` elements on the way to it differ from the
    /// reference's.
    fn judge(
        &mut self,
        made: Tensor<'static>,
        context: &[Tensor<'_>],
        wrong: usize,
    ) -> Result<(), BackendError> {
        let report = self.judged(&made, context, &self.case.config, self.declared)?;
        self.push(report, &made, wrong);
        Ok(())
    }

    /// Judges a product: the canonical schedule's bits, and the bound of its convention. `choose`
    /// sets the schedule in a configuration.
    fn judge_product(
        &mut self,
        made: Tensor<'static>,
        context: &[Tensor<'_>],
        wrong: usize,
        choose: impl Fn(&mut CaseConfig, Option<ScheduleChoice>),
    ) -> Result<(), BackendError> {
        let mut config = self.case.config.clone();
        choose(&mut config, Some(ScheduleChoice::Canonical));
        let mut report = self.judged(&made, context, &config, self.declared)?;
        choose(&mut config, None);
        let declared =
            Declared { convention: Some(Convention::Canonical), ..self.declared.clone() };
        let bound = self.judged(&made, context, &config, &declared)?;
        report.max_error_over_bound = bound.max_error_over_bound;
        if bound.verdict == Verdict::Fail && report.verdict == Verdict::Pass {
            report = bound;
        }
        self.push(report, &made, wrong);
        Ok(())
    }

    /// The judge's report on `made` in a case of these outputs alone.
    fn judged(
        &self,
        made: &Tensor<'static>,
        context: &[Tensor<'_>],
        config: &CaseConfig,
        declared: &Declared,
    ) -> Result<OutputReport, BackendError> {
        let mut case = self.case.clone();
        case.config = config.clone();
        case.outputs.clear();
        for tensor in context {
            case.add_output(bare(tensor), tensor.clone().into_owned());
        }
        case.add_output(bare(made), made.clone());
        let reports = check_case_as(&case, declared)?.outputs;
        let found = reports.into_iter().find(|report| report.name == bare(made));
        Ok(found.unwrap_or_else(|| OutputReport::unchecked(bare(made), made.len(), "not judged")))
    }

    /// Adds the report on `made`, with notes.
    fn push(&mut self, mut report: OutputReport, made: &Tensor<'static>, wrong: usize) {
        let mut notes: Vec<String> = report.note.take().into_iter().collect();
        if wrong > 0 {
            report.verdict = Verdict::Fail;
            notes.push(format!("{wrong} elements are not the reference's bits"));
        }
        if let Some(recorded) = self.case.output(&report.name) {
            let size = recorded.dtype().bytes();
            let pairs = recorded.bytes().chunks_exact(size).zip(made.bytes().chunks_exact(size));
            let same = pairs.filter(|(a, b)| a == b).count();
            let all = recorded.len().max(made.len());
            if same < all {
                notes.push(format!("{same} of {all} elements have the recorded output's bits"));
            }
        }
        report.note = (!notes.is_empty()).then(|| notes.join("; "));
        self.reports.push(report);
    }

    /// `y` of a linear case.
    fn linear(&mut self, c: &LinearConfig) -> Result<(), BackendError> {
        let Some(recorded) = self.case.output("y") else { return Ok(()) };
        let source = MatrixSource::new(self.case, &c.quant, "", Shape::new(c.size_k, c.size_n));
        let weights = source.weights()?;
        let Some(x) = self.case.inputs.get("x") else {
            self.absent("y", "the case has no x");
            return Ok(());
        };
        let x = x.elements::<u16>();
        let (made, wrong) =
            self.attempt(|o| o.run(&DenseProduct { weight: &weights[0], quant: &c.quant, x: &x }))?;
        let y = match made {
            Ok(y) => Tensor::from_vec("y", recorded.dtype(), recorded.shape().to_vec(), y)?,
            Err(reason) => {
                self.absent("y", &reason);
                return Ok(());
            }
        };
        self.judge_product(y, &[], wrong, |config, choice| {
            if let CaseConfig::Linear(c) = config {
                c.schedule = choice;
            }
        })
    }

    /// `topk_ids` and `topk_weights`.
    fn route(&mut self, router: &Router<'_>) -> Result<(), BackendError> {
        let (ids, weights) = (self.case.output("topk_ids"), self.case.output("topk_weights"));
        if ids.is_none() && weights.is_none() {
            return Ok(());
        }
        let logits = self.case.input("router_logits")?;
        let [_, experts] = logits.dims2()?;
        let ty = float_type(logits.dtype());
        let values: Vec<f32> = match logits.dtype().bytes() {
            2 => logits.elements::<u16>().iter().map(|&b| ty.to_f64(b.into()) as f32).collect(),
            _ => logits.elements::<f32>().into_owned(),
        };
        let (made, wrong) = self.attempt(|o| o.run(&Route { router, logits: &values, experts }))?;
        let routing = match made {
            Ok(routing) => routing,
            Err(reason) => {
                self.absent("topk_ids", &reason);
                self.absent("topk_weights", &reason);
                return Ok(());
            }
        };
        let ids = Tensor::from_array("topk_ids", routing.topk_ids)?;
        let weights = Tensor::from_array("topk_weights", routing.topk_weights)?;
        for (made, other) in [(&ids, &weights), (&weights, &ids)] {
            if self.case.output(bare(made)).is_some() {
                self.judge(made.clone(), std::slice::from_ref(other), wrong)?;
            }
        }
        Ok(())
    }

    /// The three outputs of aligned tokens.
    fn align(
        &mut self,
        ids: &[i32],
        num_experts: usize,
        block_size: usize,
    ) -> Result<(), BackendError> {
        const NAMES: [&str; 3] = ["num_tokens_post_padded", "expert_ids", "sorted_token_ids"];
        if NAMES.iter().all(|name| self.case.output(name).is_none()) {
            return Ok(());
        }
        let map = self.case.inputs.get("expert_map").map(|m| m.elements::<i32>().into_owned());
        // Only the recorded labels say how other ranks' experts are treated.
        let labels = self.case.output("expert_ids");
        let marked = labels.is_some_and(|l| l.elements::<i32>().contains(&-1));
        let absent = if marked { Absent::Mark } else { Absent::Ignore };
        let align = Align { block_size, num_experts, expert_map: map.as_deref(), absent };
        let (made, wrong) =
            self.attempt(|o| o.run(&AlignTokens { align: &align, topk_ids: ids }))?;
        let blocks = match made {
            Ok(blocks) => blocks,
            Err(reason) => {
                NAMES.iter().for_each(|name| self.absent(name, &reason));
                return Ok(());
            }
        };
        let list = |name: &str, values: Vec<i32>| {
            Tensor::from_vec(name, DType::I32, vec![values.len()], values)
        };
        let made = [
            list(NAMES[0], vec![blocks.num_tokens_post_padded])?,
            list(NAMES[1], blocks.expert_ids)?,
            list(NAMES[2], blocks.sorted_token_ids)?,
        ];
        for tensor in &made {
            if self.case.output(bare(tensor)).is_some() {
                let mut context: Vec<_> =
                    made.iter().filter(|t| bare(t) != bare(tensor)).cloned().collect();
                // A layer's judge reads the tokens' experts from the case.
                context.extend(self.case.output("topk_ids").cloned().map(Tensor::into_owned));
                self.judge(tensor.clone(), &context, wrong)?;
            }
        }
        Ok(())
    }
}

/// An output's name without `out.`.
fn bare<'t>(tensor: &'t Tensor<'_>) -> &'t str {
    tensor.name().trim_start_matches("out.")
}
