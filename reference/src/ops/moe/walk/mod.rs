//! Judges a layer stage by stage, each from the previous stage of the case, or from a recomputed
//! one if the case lacks it.
//!
//! A recomputed stage is either exact, if the case declares its arithmetic, or given by bounds that
//! hold for every kernel; bounds propagate to the next stage.

mod mistakes;
mod products;

use std::borrow::Cow;

use super::source::Source;
use super::{MoeConfig, product};
use crate::Result;
use crate::judge::power::Power;
use crate::judge::product::{DEQUANTIZING, Reading};
use crate::judge::{Declared, Diagnosis, OutputReport, Strength, Verdict, pattern};
use crate::moe::layer::bounds::{self, Int8Layer};
use crate::moe::layer::{Layer, Routed};
use crate::moe::{Chain, sum};
use crate::num::array::{into_vec, rows_of};
use crate::num::interval::Bound;
use crate::ops::case::Case;
use crate::ops::layer::carried::{Values, half_width, rounded};
use crate::ops::layer::{
    Locate, Stage, activated, expert, halves, shared_output, summed, with_expert,
};
use crate::products::schedule::ScheduleChoice;

/// The stages, first to last.
const NAMES: [&str; 4] = ["gate_up", "activated", "down", "y"];

/// The remedy for bounds that were carried over recomputed stages.
const CARRIED_REMEDY: &str =
    "record the stage before it, or declare `schedule_w13` and `schedule_w2` in the case's config";

/// Judges every stage of the case, except the products that `product` judges. Stages whose bounds
/// are carried over recomputed stages are judged under each convention and each way to int8 rows: one
/// choice must explain them all. If none does, the choice that leaves the fewest values wrong is reported.
pub(super) fn judge(
    case: &Case<'_>,
    c: &MoeConfig,
    declared: &Declared,
) -> Result<Vec<OutputReport>> {
    let conventions = match declared.convention {
        Some(convention) => vec![convention],
        None => DEQUANTIZING.to_vec(),
    };
    let int8 = c.int8_layers(true);
    let choices = int8.iter().flat_map(|int8| conventions.iter().map(move |c| (*c, *int8)));
    let mut choices: Vec<_> = choices.collect();
    let mut first: Option<Vec<Judged>> = None;
    let mut best: Option<(usize, Vec<Judged>)> = None;
    let mut chosen = 0;
    for (at, &(convention, int8)) in choices.iter().enumerate() {
        let one = Declared { convention: Some(convention), ..declared.clone() };
        let walk = Walk::new(case, c, &one, int8)?;
        let next = judge_as(&walk, first.is_some())?;
        let of_first = first.get_or_insert_with(Vec::new);
        let mut carried = Vec::new();
        for judged in next {
            let list = if judged.carried { &mut carried } else { &mut *of_first };
            list.push(judged);
        }
        let failed = carried.iter().filter(|j| j.report.verdict == Verdict::Fail);
        let wrong = failed.map(|j| j.report.mismatches.max(1)).sum();
        if best.as_ref().is_none_or(|(least, _)| wrong < *least) {
            (best, chosen) = (Some((wrong, carried)), at);
        }
        if wrong == 0 {
            break;
        }
    }
    let carried = best.into_iter().flat_map(|(_, carried)| carried);
    let mut all: Vec<Judged> = first.into_iter().flatten().chain(carried).collect();
    choices[..=chosen].rotate_right(1);
    for judged in all.iter_mut().filter(|j| j.carried && j.report.verdict == Verdict::Fail) {
        mistakes::explain(case, c, declared, (&choices, &mut judged.report))?;
    }
    Ok(all.into_iter().map(|j| j.report).collect())
}

/// A report, and whether its bounds were carried over recomputed stages.
struct Judged {
    report: OutputReport,
    carried: bool,
}

/// Judges every stage of the case under one convention, except the products that [`super::product`]
/// judges by their bound from the previous stage of the case; only carried bounds if `carried_only`.
fn judge_as(walk: &Walk<'_>, carried_only: bool) -> Result<Vec<Judged>> {
    let (case, c) = (walk.case, walk.config);
    let Some(last) = NAMES.iter().rposition(|name| case.output(name).is_some()) else {
        return Ok(Vec::new());
    };
    let mut reports = Vec::new();
    // The previous stage, and the last stage that the case has.
    let mut before = match case.inputs.get("x") {
        Some(x) => Some(Values::Bits(halves(x, walk.shape_of_x())?)),
        None => None,
    };
    let mut from = "x";
    let mut source = None;
    for (stage, name) in NAMES.into_iter().enumerate().take(last + 1) {
        let found = case.output(name);
        if let (Some(found), Some(known)) = (found, &before) {
            let found = halves(found, walk.shape(stage))?;
            let own = stage == 0 || from == NAMES[stage - 1];
            let is_product = stage.is_multiple_of(2);
            let mut carried = false;
            let report = match known {
                Values::Bits(bits) if walk.is_exact(stage) => match carried_only {
                    true => None,
                    false => Some(walk.exact(stage, bits, &found, walk.source(&mut source)?)?),
                },
                Values::Bits(bits) if own && !is_product => match (carried_only, stage) {
                    (true, _) => None,
                    (_, 1) => Some(activated::judge(case, &c.stages(), bits, &found)?),
                    _ => Some(summed::judge(case, &c.stages(), bits, &found)?),
                },
                _ if own && product::is_judged(case, c, name) => None,
                _ => {
                    carried = true;
                    let bounds = walk.bounds(stage, known, walk.source(&mut source)?)?;
                    Some(walk.carried(stage, from, &found, &bounds))
                }
            };
            reports.extend(report.map(|report| Judged { report, carried }));
        }
        before = match (found, before) {
            (Some(found), _) => {
                from = name;
                Some(Values::Bits(halves(found, walk.shape(stage))?))
            }
            (None, Some(known)) if stage < last => {
                let source = walk.source(&mut source)?;
                Some(match &known {
                    Values::Bits(bits) if walk.is_exact(stage) => {
                        Values::Bits(Cow::Owned(walk.recompute(stage, bits, source)?))
                    }
                    _ => Values::Bounds(walk.bounds(stage, &known, source)?),
                })
            }
            _ => None,
        };
    }
    Ok(reports)
}

struct Walk<'c> {
    case: &'c Case<'c>,
    config: &'c MoeConfig,
    declared: &'c Declared,
    /// The choices of a kernel for int8 rows.
    int8: Int8Layer,
    /// A shared expert's output, which `y` contains.
    shared: Option<Cow<'c, [u16]>>,
    /// Both products are canonical; then the activation and the sum are also canonical.
    canonical: bool,
}

impl<'c> Walk<'c> {
    fn new(
        case: &'c Case<'c>,
        config: &'c MoeConfig,
        declared: &'c Declared,
        int8: Int8Layer,
    ) -> Result<Self> {
        let shared = shared_output(case, [config.size_m, config.hidden_size])?;
        let canonical = |s: &Option<ScheduleChoice>| s.as_ref().is_some_and(|s| s.name().is_some());
        let canonical = canonical(&config.schedule_w13) && canonical(&config.schedule_w2);
        Ok(Self { case, config, declared, int8, shared, canonical })
    }

    /// The layer, read on first use.
    fn source<'s>(&self, source: &'s mut Option<Source<'c>>) -> Result<&'s Source<'c>> {
        Ok(match source {
            Some(source) => source,
            None => source.insert(Source::new(self.case, self.config)?),
        })
    }

    /// Rows and columns of a stage.
    fn shape(&self, stage: usize) -> [usize; 2] {
        let c = self.config;
        let rows = c.size_m * c.top_k;
        match stage {
            0 => [rows, c.w13_size_n()],
            1 => [rows, c.intermediate_size],
            2 => [rows, c.hidden_size],
            _ => [c.size_m, c.hidden_size],
        }
    }

    /// Rows of `gate_up` for each row of x: x has a row for each slot if router weights multiply it.
    fn slots_of_x(&self, top_k: usize) -> usize {
        if self.config.rules.router_weight_on_x { 1 } else { top_k }
    }

    fn shape_of_x(&self) -> [usize; 2] {
        let c = self.config;
        [c.size_m * c.top_k / self.slots_of_x(c.top_k), c.hidden_size]
    }

    fn schedule(&self, stage: usize) -> Option<&ScheduleChoice> {
        match stage {
            0 => self.config.schedule_w13.as_ref(),
            2 => self.config.schedule_w2.as_ref(),
            _ => None,
        }
    }

    /// Whether the case declares every bit of a stage, given the one before.
    fn is_exact(&self, stage: usize) -> bool {
        self.canonical || self.schedule(stage).is_some()
    }

    /// The bits of a stage whose arithmetic is declared.
    fn recompute(&self, stage: usize, before: &[u16], source: &Source<'_>) -> Result<Vec<u16>> {
        let (layer, routed) = (source.layer(), source.routed());
        let of_x = Routed { top_k: self.slots_of_x(routed.top_k), ..routed };
        match (stage, self.schedule(stage)) {
            (0, Some(choice)) => layer.gate_up_bits(before, of_x, &source.schedule(choice, 0)?),
            (2, Some(choice)) => layer.down_bits(before, routed, &source.schedule(choice, 1)?),
            (1, _) => layer.activate_bits(before, Chain::Canonical),
            _ => {
                let terms = (before, self.shared.as_deref());
                let (top_k, cols) = (routed.top_k, layer.hidden_size());
                sum::sum_bits_with(terms, layer.dtype, top_k, cols, Chain::Canonical)
            }
        }
    }

    /// Bounds on a stage that hold for every kernel.
    fn bounds(&self, stage: usize, before: &Values<'_>, source: &Source<'_>) -> Result<Vec<Bound>> {
        let shared = self.shared.as_deref();
        self.bounds_of(stage, before, (source.layer(), source.routed()), shared)
    }

    fn bounds_of(
        &self,
        stage: usize,
        before: &Values<'_>,
        (layer, routed): (Layer<'_>, Routed<'_>),
        shared: Option<&[u16]>,
    ) -> Result<Vec<Bound>> {
        layer.validate()?;
        let before = before.bounds(layer.dtype);
        let convention = self.declared.convention.unwrap_or_default();
        let declared =
            bounds::Declared { convention, class: &self.declared.class, int8: self.int8 };
        let of_x = Routed { top_k: self.slots_of_x(routed.top_k), ..routed };
        let (hidden, size_i) = (layer.hidden_size(), layer.intermediate_size());
        let cols = [hidden, layer.activation.width_in(size_i), size_i, hidden][stage];
        let before = rows_of("the previous stage", &before, cols)?;
        let made = match stage {
            0 => layer.gate_up_bounds(before, of_x, declared),
            1 => layer.activation.bounds(before, layer.dtype),
            2 => layer.down_bounds(before, routed, declared),
            _ => sum::bounds_with(bounds::of_tokens(before, routed.top_k)?, shared, layer.dtype),
        };
        made.map(into_vec)
    }

    /// Compares a declared stage bit for bit.
    fn exact(
        &self,
        stage: usize,
        before: &[u16],
        found: &[u16],
        source: &Source<'_>,
    ) -> Result<OutputReport> {
        if let Some(choice) = self.schedule(stage) {
            let mut report = self.scheduled(stage, choice, before, source)?;
            if let Some(place) = &mut report.first_mismatch {
                place.expert = expert(self.case, place.index[0]);
            }
            return Ok(report);
        }
        let expected = self.recompute(stage, before, source)?;
        let shape = self.shape(stage);
        let ty = self.config.quant.dtype;
        let chain = "the canonical f32 chain";
        let (name, class) = (NAMES[stage], "".into());
        let stage_of = Stage { name, class, remedy: "", ty, found, shape, expected, chain };
        let exactly = |bits: u16| Bound::exactly(ty.to_f64(bits.into()));
        let (mut report, _) = stage_of.judge(|i| exactly(stage_of.expected[i]));
        // This includes the sign of a zero and the bits of a NaN.
        let wrong: Vec<usize> =
            (0..found.len()).filter(|&i| found[i] != stage_of.expected[i]).collect();
        report.note = Some("compared for every bit with the canonical arithmetic".to_owned());
        report.power = Some(Power::every_bit());
        report.mismatches = wrong.len();
        report.verdict = if wrong.is_empty() { Verdict::Pass } else { Verdict::Fail };
        let Some(place) = self.place(&mut report, &stage_of, stage, &wrong) else {
            return Ok(report);
        };
        // Known mistakes are searched for by the bounds.
        let locate: Locate = |stage, wrong, place| stage.place(wrong, place);
        let bounded = match stage {
            1 => activated::bounded,
            _ => summed::bounded,
        };
        let (bounded, outside) = bounded(self.case, &self.config.stages(), before, found, locate)?;
        stage_of.look(&wrong, |values| pattern::explain(&mut report, &values, Some(bounded)));
        let unexplained = report.diagnosis.as_ref().map_or(wrong.len(), |d| d.unexplained);
        // Values outside the bounds may follow a pattern that differences inside the bounds hide.
        if unexplained == wrong.len() && outside.len() < wrong.len() {
            let inside = wrong.len() - outside.len();
            let pattern = stage_of.pattern(&outside).map(|d| Diagnosis {
                unexplained: inside,
                strength: Strength::Consistent,
                ..d
            });
            report.diagnosis = pattern.or(report.diagnosis);
        }
        report.diagnosis = report.diagnosis.or_else(|| Some(stage_of.place(&wrong, &place)));
        Ok(report)
    }

    /// Judges a stage by bounds that earlier, recomputed stages were carried into.
    fn carried(&self, stage: usize, from: &str, found: &[u16], bounds: &[Bound]) -> OutputReport {
        let ty = self.config.quant.dtype;
        let expected = bounds.iter().map(|b| rounded(ty, b.exact)).collect();
        let (shape, chain) = (self.shape(stage), "the exact result");
        let class = self.carried_class(from, bounds).into();
        let (name, remedy) = (NAMES[stage], CARRIED_REMEDY);
        let stage_of = Stage { name, class, remedy, ty, found, shape, expected, chain };
        let (mut report, wrong) = stage_of.judge(|i| bounds[i]);
        if wrong.is_empty() {
            let reading = Reading::Within(self.declared.convention.unwrap_or_default());
            report.conventions = vec![reading.id().to_owned()];
        }
        if let Some(place) = self.place(&mut report, &stage_of, stage, &wrong) {
            report.diagnosis = Some(stage_of.pattern_or_place(&wrong, &place));
        }
        report
    }

    /// Describes the bounds carried from stage `from`.
    fn carried_class(&self, from: &str, bounds: &[Bound]) -> String {
        let ty = self.config.quant.dtype;
        let median = half_width(bounds, ty);
        let reading = Reading::Within(self.declared.convention.unwrap_or_default());
        format!(
            "bound: {}, convention `{}`, carried from `{from}`; median half-width {median} steps \
             of {ty}",
            self.declared.class.name,
            reading.id(),
        )
    }

    /// Reports the first wrong value and its place.
    fn place(
        &self,
        report: &mut OutputReport,
        stage_of: &Stage<'_>,
        stage: usize,
        wrong: &[usize],
    ) -> Option<String> {
        let &first = wrong.first()?;
        let row = first / self.shape(stage)[1].max(1);
        let top_k = self.config.top_k.max(1);
        let (expert, place) = if stage == 3 {
            (None, format!("token {row}"))
        } else {
            let expert = expert(self.case, row);
            let (token, slot) = (row / top_k, row % top_k);
            (expert, format!("token {token}, slot {slot}{}", with_expert(expert)))
        };
        report.first_mismatch = Some(stage_of.mismatch(first, expert));
        Some(place)
    }
}
