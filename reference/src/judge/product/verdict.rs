//! The verdict on one product of a case.

use super::Declared;
use super::diagnose::{self, Scene};
use super::factor;
use super::known::Known;
use super::members::{self, Members};
use super::readings::{self, Chosen, DEQUANTIZING};
use super::stage::{Part, Stage};
use crate::Result;
use crate::judge::compare::{Mismatch, elements};
use crate::judge::picture::{Cause, ErrorMap, Picture};
use crate::judge::power::Power;
use crate::judge::{OutputReport, Verdict, numbers};
use crate::num::scalar::ScalarType;
use crate::products::{Bounded, Class, Convention};

/// The remedy if a class cannot distinguish a right product from a wrong one.
pub(crate) const REMEDY: &str =
    "declare the kernel's order: `schedule` in the case's config, or --class";

impl Stage<'_> {
    /// The conventions to try: the declared one, otherwise all that apply.
    ///
    /// Of a weight with e4m3's NaN codes only `marlin` is tried, which reads them as ±480: a NaN in
    /// the output is no evidence for another convention and passes only if one is declared.
    pub(super) fn conventions(&self) -> Vec<Convention> {
        if let Some(declared) = self.declared.convention {
            return vec![declared];
        }
        if self.parts.iter().any(|p| p.weight.has_nan_codes()) {
            return vec![Convention::Marlin];
        }
        let mut all = DEQUANTIZING.to_vec();
        let e4m3 = ScalarType::FLOAT8_E4M3FN;
        let codes = |p: &Part<'_>| p.weight.ty == e4m3 && p.weight.scales.rows() == 1;
        if self.input_dtype == Some(e4m3) && self.parts.iter().all(codes) {
            all.push(Convention::W8a8);
        }
        all
    }

    /// The classes to try, narrowest first. A class with members is replaced by the members that
    /// match a sample or, if it is the last class, by the nearest member.
    fn classes(&self, conventions: &[Convention]) -> Result<Vec<Class>> {
        let Some(part) = self.parts.first() else { return Ok(vec![self.declared.class.clone()]) };
        let given = self.declared.classes_for(part.weight, self.input_dtype);
        let count = given.len();
        let mut all = Vec::new();
        for (i, class) in given.into_iter().enumerate() {
            match members::members(self, &class, conventions)? {
                None => all.push(class),
                Some(Members { holding, nearest }) if holding.is_empty() && i + 1 == count => {
                    all.push(nearest);
                }
                Some(members) => all.extend(members.holding),
            }
        }
        Ok(all)
    }

    /// The verdict, and its explanation if it is not a pass.
    ///
    /// Without a declared convention, all that apply are tried, and the exact result rounded once
    /// also passes.
    pub(crate) fn judge(self) -> Result<OutputReport> {
        self.judge_beside(None)
    }

    /// As [`Self::judge`], for an output that the `known` schedules do not give bit for bit.
    pub(in crate::judge) fn judge_beside(self, known: Option<&Known<'_>>) -> Result<OutputReport> {
        let bits = elements(self.found);
        let found: Vec<f64> = bits.iter().map(|&b| self.dtype.to_f64(b)).collect();
        let or_exact = self.declared.convention.is_none() || self.declared.or_exact;
        let conventions = self.conventions();
        let classes = self.classes(&conventions)?;
        let chosen = readings::choose(&self, &conventions, &classes, &found, or_exact)?;
        // The rest concerns one reading.
        let declared = Declared {
            convention: Some(chosen.convention),
            class: chosen.class.clone(),
            or_exact: false,
            ..self.declared.clone()
        };
        let power = self.power(&chosen, &conventions, known)?;
        let is_too_weak = power.is_below(declared.power_limit());
        if let Some(most) = self.most_bits(known, &chosen, &found, &bits).filter(|_| is_too_weak) {
            return Ok(self.judge_by_most_bits(&most, &found, &bits));
        }
        let how = (conventions.len() > 1, power);
        Stage { declared: &declared, ..self }.judge_as(&chosen, how, &found, &bits)
    }

    /// The power of the verdict: of the chosen reading, and of every other way to a pass.
    fn power(
        &self,
        chosen: &Chosen,
        conventions: &[Convention],
        known: Option<&Known<'_>>,
    ) -> Result<Power> {
        let accepted = readings::accepted(&chosen.bounded);
        let mut power = Power::of(&accepted, self.size_n(), self.dtype);
        self.sample_power(chosen, conventions, &mut power)?;
        if chosen.fits.is_empty() || power.is_below(self.declared.power_limit()) {
            return Ok(power);
        }
        let power = power.or_scaled(known.and_then(|known| known.scaled));
        self.with_other_classes(power, conventions, Some(chosen))
    }

    /// The verdict under the chosen reading.
    fn judge_as(
        &self,
        chosen: &Chosen,
        (several, power): (bool, Power),
        found: &[f64],
        bits: &[u32],
    ) -> Result<OutputReport> {
        let bounded = &chosen.bounded;
        let class = &chosen.class.name;
        let measure =
            |bounded: &[Bounded]| measure((self.name, self.dtype), class, bounded, found, bits);
        let (mut report, wrong) = measure(bounded);
        report.conventions = chosen.ids();
        let is_way = power.is_enough() && !power.is_below(self.declared.power_limit());
        let (id, text) = (chosen.reading.id(), chosen.reading.text(self.dtype));
        report.add_note(&match (wrong.is_empty(), several) {
            (true, _) if is_way && report.unbounded == 0 => {
                format!("passes as `{id}`: {text}")
            }
            (true, _) => format!("within the bounds of `{id}`: {text}"),
            (false, true) => {
                format!("fits no known convention; compared with `{id}`, the nearest: {text}")
            }
            (false, false) => format!("compared with `{id}`, as declared: {text}"),
        });
        report.settle(power, REMEDY);
        let limit = self.declared.power_limit();
        if report.verdict == Verdict::Pass
            && report.equal_bits.is_some_and(|share| share < 0.5)
            && let Some(factor) = factor::common(bounded, found, limit)
        {
            report.verdict = Verdict::Unchecked;
            report.add_note(&format!(
                "all values are {} times the results, which the bound allows, and which only \
                 truncated sums explain; {REMEDY}",
                numbers::number(factor)
            ));
        }
        let Some(&first) = wrong.first() else { return Ok(report) };
        let scene = Scene::new(self, bounded, found, &wrong);
        let finding = diagnose::explain(&scene);
        report.first_mismatch = Some(self.mismatch(first, bounded, bits));
        report.picture = Some(self.picture(&scene, finding.as_ref().and_then(|f| f.cause.clone())));
        report.diagnosis = finding.map(|f| f.diagnosis);
        Ok(report)
    }

    pub(super) fn mismatch(&self, i: usize, bounded: &[Bounded], bits: &[u32]) -> Mismatch {
        let size_n = self.found.shape().last().copied().unwrap_or(1).max(1);
        let (row, n) = (i / size_n, i % size_n);
        let part = self.parts.iter().find(|p| p.rows.contains(&row));
        let expert = part.and_then(|p| p.expert.map(|_| p.global));
        let width = self.found.dtype().bits() as u32;
        Mismatch::element(vec![row, n], width, expert, Some(n), bounded[i].rounded, bits[i])
    }

    fn picture(&self, scene: &Scene<'_>, cause: Option<Cause>) -> Picture {
        let shape = [self.found.len() / scene.size_n, scene.size_n];
        let mut picture = Picture::new("row", 1, shape);
        for &i in scene.wrong {
            picture.add(0, shape, i / scene.size_n, i % scene.size_n, i);
        }
        let mut errors = ErrorMap::new(shape, |row| scene.row_name(row));
        for (i, (b, &x)) in scene.bounded.iter().zip(scene.found).enumerate() {
            errors.add(i / scene.size_n, i % scene.size_n, b.ratio(x));
        }
        errors.cause = cause;
        picture.errors = Some(errors);
        picture
    }
}

/// The figures of a comparison, and the elements out of bound.
pub(crate) fn measure(
    (name, dtype): (&str, ScalarType),
    class: &str,
    bounded: &[Bounded],
    found: &[f64],
    bits: &[u32],
) -> (OutputReport, Vec<usize>) {
    let mut report = OutputReport::unchecked(name, found.len(), "");
    let (mut equal, mut unbounded, mut max_ratio, mut max_ulp) = (0, 0, 0f64, 0f64);
    let mut wrong = Vec::new();
    for (i, (b, (&x, &bits))) in bounded.iter().zip(found.iter().zip(bits)).enumerate() {
        let ratio = b.ratio(x);
        if ratio > 1.0 {
            wrong.push(i);
        }
        max_ratio = max_ratio.max(ratio);
        max_ulp = max_ulp.max(b.ulps(dtype, x));
        equal += usize::from(bits == b.rounded);
        // An infinity that the exact result equals or rounds to counts as compared.
        let compared = x.is_infinite() && x == dtype.to_f64(b.rounded);
        unbounded += usize::from(b.is_unbounded() && !compared);
    }
    report.equal_bits = Some(equal as f64 / found.len().max(1) as f64);
    report.max_ulp = Some(max_ulp);
    report.max_error_over_bound = Some(max_ratio);
    report.mismatches = wrong.len();
    report.note = Some(format!("bound: {class}"));
    report.unbounded = unbounded;
    report.verdict = if wrong.is_empty() { Verdict::Pass } else { Verdict::Fail };
    (report, wrong)
}
