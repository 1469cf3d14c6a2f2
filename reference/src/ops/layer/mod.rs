//! Verdicts on the floating-point stages of a MoE layer. Each stage is judged from the previous
//! stage of the case, or from a recomputed one if the case lacks it.

pub(crate) mod activated;
pub(crate) mod carried;
pub(crate) mod summed;

use std::borrow::Cow;

use crate::Result;
use crate::judge::compare::Mismatch;
use crate::judge::mistake::{Comparison, Outcome};
use crate::judge::pattern::Values;
use crate::judge::picture::Picture;
use crate::judge::power::{Accepted, Power, attainable};
use crate::judge::{Diagnosis, OutputReport, Verdict, plain};
use crate::moe::activation::{Activation, Definition};
use crate::moe::router::Router;
use crate::moe::widen;
use crate::num::interval::Bound;
use crate::num::scalar::ScalarType;
use crate::num::tensor::Tensor;
use crate::ops::case::Case;

/// Parameters that all stages of a layer share.
#[derive(Debug, Clone)]
pub(crate) struct Stages {
    /// Tokens.
    pub(crate) size_m: usize,
    /// Slots of a token.
    pub(crate) top_k: usize,
    /// Columns of `y`.
    pub(crate) hidden_size: usize,
    /// Columns of `activated`.
    pub(crate) intermediate_size: usize,
    /// Activation between the products.
    pub(crate) activation: Activation,
    /// The activation with the parameters of the case.
    pub(crate) definition: Definition,
    /// Type of all stages.
    pub(crate) dtype: ScalarType,
    /// Router of the case's logits, and the number of experts.
    pub(crate) router: Option<(Router<'static>, usize)>,
}

/// The remedy for a bound of an activation or a sum over slots, to which no key of a config belongs.
const REMEDY: &str =
    "check a case with larger values: nothing that can be declared narrows this bound";

/// A 16-bit output and its expected values.
pub(crate) struct Stage<'c> {
    pub(crate) name: &'static str,
    /// Description of the bound in the report.
    pub(crate) class: Cow<'static, str>,
    /// What to declare or record if the bound is too weak.
    pub(crate) remedy: &'static str,
    pub(crate) ty: ScalarType,
    pub(crate) found: &'c [u16],
    /// Rows and columns of the output.
    pub(crate) shape: [usize; 2],
    /// Result for the comparison bit for bit.
    pub(crate) expected: Vec<u16>,
    /// Origin of that result.
    pub(crate) chain: &'static str,
}

/// Diagnoses wrong values that no known mistake explains; the text names the place of the first.
pub(crate) type Locate = fn(&Stage<'_>, &[usize], &str) -> Diagnosis;

/// The result for the comparison bit for bit: that of the reference or of upstream's operator,
/// whichever equals `found` in more values. The verdict follows from the bound.
fn nearer(
    found: &[u16],
    canonical: Vec<u16>,
    upstream: Option<Vec<u16>>,
) -> (Vec<u16>, &'static str) {
    match upstream {
        Some(upstream) if equal(found, &upstream) >= equal(found, &canonical) => {
            (upstream, "the roundings of upstream's operator")
        }
        _ => (canonical, "f32 with one rounding"),
    }
}

fn equal(a: &[u16], b: &[u16]) -> usize {
    a.iter().zip(b).filter(|(a, b)| a == b).count()
}

impl Stage<'_> {
    pub(crate) fn value(&self, bits: u16) -> f32 {
        widen(self.ty, bits)
    }

    /// Number of steps between two values of the type.
    fn steps(&self, a: u16, b: u16) -> f64 {
        self.ty.steps(a.into(), b.into())
    }

    /// The report, and the indices of values outside their bound.
    pub(crate) fn judge(
        &self,
        mut bound: impl FnMut(usize) -> Bound,
    ) -> (OutputReport, Vec<usize>) {
        let mut report = OutputReport::unchecked(self.name, self.found.len(), "");
        let (mut wrong, mut max_ratio, mut max_ulp) = (Vec::new(), 0f64, 0f64);
        let mut accepted = Vec::with_capacity(self.found.len());
        for (i, &bits) in self.found.iter().enumerate() {
            let bound = bound(i);
            accepted.push(Accepted::from(&bound));
            let ratio = bound.ratio(self.value(bits));
            if ratio > 1.0 {
                wrong.push(i);
            }
            max_ratio = max_ratio.max(ratio);
            max_ulp = max_ulp.max(self.steps(bits, self.expected[i]));
        }
        report.verdict = if wrong.is_empty() { Verdict::Pass } else { Verdict::Fail };
        report.equal_bits =
            Some(equal(self.found, &self.expected) as f64 / self.found.len().max(1) as f64);
        report.mismatches = wrong.len();
        report.max_ulp = Some(max_ulp);
        report.max_error_over_bound = Some(max_ratio);
        report.note = Some(format!("{}; bits compared with {}", self.class, self.chain));
        let unbounded = accepted.iter().filter(|a| a.is_unbounded() && !a.exact.is_nan());
        report.unbounded = unbounded.count();
        report.attainable = attainable(self.ty, &accepted);
        report.settle(Power::of(&accepted, self.shape[1], self.ty), self.remedy);
        if !wrong.is_empty() {
            let [rows, cols] = self.shape;
            let mut picture = Picture::new("row", 1, self.shape);
            for &i in &wrong {
                picture.add(0, [rows, cols], i / cols, i % cols, i);
            }
            report.picture = Some(picture);
        }
        (report, wrong)
    }

    /// The mismatch of value `i`, which is outside its bound.
    pub(crate) fn mismatch(&self, i: usize, expert: Option<usize>) -> Mismatch {
        let cols = self.shape[1];
        let (expected, found) = (self.expected[i].into(), self.found[i].into());
        let index = vec![i / cols, i % cols];
        Mismatch::element(index, 16, expert, Some(i % cols), expected, found)
    }

    /// Compares every value with a known mistake whose bounds are `made`.
    pub(crate) fn compared(
        &self,
        wrong: &[usize],
        mut made: impl FnMut(usize) -> Bound,
    ) -> Comparison {
        let mut all = Comparison { total: self.found.len(), ..Comparison::default() };
        let mut left = wrong.iter().copied().peekable();
        for (i, &bits) in self.found.iter().enumerate() {
            let (bound, found) = (made(i), self.value(bits));
            let holds = bound.allows(found);
            all.changed += usize::from(!bound.allows(self.value(self.expected[i])));
            if left.next_if_eq(&i).is_none() {
                all.broken += usize::from(!holds);
            } else if holds {
                let residual = f64::from(found) - f64::from(self.value(self.expected[i]));
                let radius = (bound.interval.hi - bound.interval.lo) / 2.0;
                all.explained_float(residual, if radius > 0.0 { radius } else { 0.0 });
            } else {
                all.unexplained += 1;
            }
        }
        all
    }

    /// Compares every value with a known mistake that gives the bits `made`, to within `steps` of
    /// the type.
    pub(crate) fn compared_bits(
        &self,
        wrong: &[usize],
        steps: f64,
        made: impl Fn(usize) -> u16,
    ) -> Comparison {
        let mut all = Comparison { total: self.found.len(), ..Comparison::default() };
        let mut left = wrong.iter().copied().peekable();
        for (i, &bits) in self.found.iter().enumerate() {
            all.changed += usize::from(self.steps(self.expected[i], made(i)) > steps);
            let holds = self.steps(bits, made(i)) <= steps;
            if left.next_if_eq(&i).is_none() {
                all.broken += usize::from(!holds);
            } else if holds {
                all.explained_float(2.0 * self.steps(bits, self.expected[i]), 1.0 + steps);
            } else {
                all.unexplained += 1;
            }
        }
        all
    }

    /// Plain patterns such as zeros and NaN, before any search for a mistake.
    pub(crate) fn plain(&self, wrong: &[usize]) -> Option<Diagnosis> {
        let value = |bits: u16| f64::from(self.value(bits));
        let of = |&i: &usize| (value(self.found[i]), value(self.expected[i]));
        let pairs: Vec<(f64, f64)> = wrong.iter().map(of).collect();
        // Infinities may have a known cause.
        if pairs.iter().all(|p| p.0.is_infinite()) {
            return None;
        }
        let (id, text) = plain::floats(&pairs, self.found.iter().all(|&b| self.value(b) == 0.0))?;
        let place = self.look(wrong, |values| values.extent());
        Some(Diagnosis::explains(id, format!("{text}: {place}")))
    }

    /// If no mistake explains the wrong values: their pattern, or their number and location; the
    /// first is at `place`.
    pub(crate) fn pattern_or_place(&self, wrong: &[usize], place: &str) -> Diagnosis {
        self.pattern(wrong).unwrap_or_else(|| self.place(wrong, place))
    }

    pub(crate) fn pattern(&self, wrong: &[usize]) -> Option<Diagnosis> {
        self.look(wrong, |values| values.explain())
    }

    /// The number of wrong values and their location; the first is at `place`.
    pub(crate) fn place(&self, wrong: &[usize], place: &str) -> Diagnosis {
        self.look(wrong, |values| {
            let first = wrong[0];
            let [found, expected] = [values.found[first], values.expected[first]];
            let text = format!(
                "{} of {} values; first {place}, column {}: {} where {} belongs; {}",
                wrong.len(),
                values.found.len(),
                first % values.cols,
                self.ty.to_f64(found),
                self.ty.to_f64(expected),
                values.extent(),
            );
            Diagnosis::place("outside-bound", text, wrong.len())
        })
    }

    /// Calls `of` with all values and the wrong ones.
    pub(crate) fn look<T>(&self, wrong: &[usize], of: impl FnOnce(Values<'_>) -> T) -> T {
        let bits = |v: &[u16]| -> Vec<u32> { v.iter().map(|&b| b.into()).collect() };
        let (found, expected) = (bits(self.found), bits(&self.expected));
        of(Values { ty: self.ty, cols: self.shape[1], found: &found, expected: &expected, wrong })
    }
}

/// The known mistake that is the cause, otherwise the one that leaves the fewest values
/// unexplained.
struct Best {
    diagnosis: Option<Diagnosis>,
    found: Option<Outcome>,
}

/// Logarithm of the number of mistakes tried per stage, about thirty.
const COST: f64 = 5.0;

impl Best {
    fn new() -> Self {
        Self { diagnosis: None, found: None }
    }

    fn offer(&mut self, id: &str, text: &str, comparison: Comparison) {
        if let Some(outcome) = comparison.outcome(COST).filter(|o| o.beats(self.found)) {
            self.found = Some(outcome);
            self.diagnosis = Some(outcome.named(id, text));
        }
    }

    /// Whether everything is explained.
    fn done(&self) -> bool {
        self.found.is_some_and(Outcome::is_final)
    }
}

/// Router weights on the product that the config does not name: if the other product passes, which it
/// does with its weights, they are on both.
pub(crate) fn name_both_sides(reports: &mut [OutputReport]) {
    for [name, other] in [["gate_up", "down"], ["down", "gate_up"]] {
        let passes = |r: &OutputReport| r.name == other && r.verdict == Verdict::Pass;
        if !reports.iter().any(passes) {
            continue;
        }
        let of_side = |r: &&mut OutputReport| r.name == name;
        let diagnoses = reports.iter_mut().filter(of_side).filter_map(|r| r.diagnosis.as_mut());
        for diagnosis in diagnoses.filter(|d| d.id == "router-weight-on-the-other-side") {
            diagnosis.id = "router-weight-on-both".to_owned();
            diagnosis.text = format!(
                "router weights multiply this product too, though the config applies them to `{other}`, \
                 which is right: they are applied twice"
            );
        }
    }
}

/// The expert of row `row` of `gate_up`, `activated` and `down`, if the case states it.
pub(crate) fn expert(case: &Case<'_>, row: usize) -> Option<usize> {
    let ids = case.output("topk_ids")?;
    usize::try_from(*ids.elements::<i32>().get(row)?).ok()
}

/// " (expert 3)" or nothing.
pub(crate) fn with_expert(expert: Option<usize>) -> String {
    expert.map_or_else(String::new, |e| format!(" (expert {e})"))
}

/// The optional input with a shared expert's output, which `y` contains.
pub(crate) const SHARED: &str = "shared_output";

/// The output `[M, H]` of a shared expert, if the case has one: the last term of every sum over slots.
pub(crate) fn shared_output<'c>(
    case: &'c Case<'_>,
    shape: [usize; 2],
) -> Result<Option<Cow<'c, [u16]>>> {
    case.inputs.get(SHARED).map(|tensor| halves(tensor, shape)).transpose()
}

/// The values of a 16-bit tensor with the shape that the config requires.
pub(crate) fn halves<'t>(tensor: &'t Tensor<'_>, shape: [usize; 2]) -> Result<Cow<'t, [u16]>> {
    tensor.expect_shape(&shape)?;
    Ok(tensor.elements::<u16>())
}
