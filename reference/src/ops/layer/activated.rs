//! Judges `activated` by its bound, which follows from the case's `gate_up`.

use super::{Best, Locate, REMEDY, Stage, Stages, expert, nearer, with_expert};
use crate::Result;
use crate::judge::{Diagnosis, OutputReport};
use crate::moe::activation::bound::Bounds;
use crate::moe::activation::{Activation, Columns, Definition};
use crate::moe::{Chain, narrow, widen};
use crate::num::interval::{Bound, Interval};
use crate::ops::case::Case;

pub(crate) const CLASS: &str = "bound: f32; expf or __expf, erff and tanhf to 2 ulp, quotients to 2 ulp; \
                     either factor of the product may be rounded first; one rounding at the end";

pub(crate) fn judge(
    case: &Case<'_>,
    c: &Stages,
    gate_up: &[u16],
    values: &[u16],
) -> Result<OutputReport> {
    let locate: Locate = |stage, wrong, place| stage.pattern_or_place(wrong, place);
    let (report, _) = bounded(case, c, gate_up, values, locate)?;
    Ok(report)
}

/// The verdict, and the values that are outside their bounds.
pub(crate) fn bounded(
    case: &Case<'_>,
    c: &Stages,
    gate_up: &[u16],
    values: &[u16],
    locate: Locate,
) -> Result<(OutputReport, Vec<usize>)> {
    let (rows, size_i) = (c.size_m * c.top_k, c.intermediate_size);
    let definition = c.definition;
    let ty = c.dtype;
    let apply = |chain| definition.apply_bits(gate_up, ty, size_i, chain);
    let (expected, chain) = nearer(values, apply(Chain::Canonical)?, apply(Chain::Upstream).ok());
    let stage = Stage {
        name: "activated",
        class: CLASS.into(),
        remedy: REMEDY,
        ty,
        found: values,
        shape: [rows, size_i],
        expected,
        chain,
    };
    let source = Source { gate_up, size_i };
    let mut bounds = Bounds::new(definition, ty)?;
    let (mut report, wrong) = stage.judge(|i| {
        let [gate, up] = source.pair(&definition, i);
        bounds.of_bits(gate, up)
    });
    if let Some(&first) = wrong.first() {
        let row = first / size_i;
        let expert = expert(case, row);
        report.first_mismatch = Some(stage.mismatch(first, expert));
        let known = match stage.plain(&wrong) {
            Some(plain) => Some(plain),
            None => diagnose(&stage, &source, definition, c.activation, &wrong)?,
        };
        report.diagnosis = Some(known.unwrap_or_else(|| {
            let (token, slot) = (row / c.top_k, row % c.top_k);
            locate(&stage, &wrong, &format!("token {token}, slot {slot}{}", with_expert(expert)))
        }));
    }
    Ok((report, wrong))
}

/// The activation's input.
struct Source<'c> {
    gate_up: &'c [u16],
    size_i: usize,
}

impl Source<'_> {
    /// Gate and up of output `i`.
    fn pair(&self, definition: &Definition, i: usize) -> [u16; 2] {
        let width = definition.width_in(self.size_i);
        let row = &self.gate_up[i / self.size_i * width..][..width];
        definition.places(i % self.size_i, self.size_i).map(|at| row[at])
    }
}

fn diagnose(
    stage: &Stage<'_>,
    source: &Source<'_>,
    right: Definition,
    activation: Activation,
    wrong: &[usize],
) -> Result<Option<Diagnosis>> {
    let mut best = Best::new();
    for (id, text, definition) in variants(right, activation) {
        let mut bounds = Bounds::new(definition, stage.ty)?;
        let of = |i| {
            let [gate, up] = source.pair(&definition, i);
            bounds.of_bits(gate, up)
        };
        best.offer(&id, &text, stage.compared(wrong, of));
        if best.done() {
            return Ok(best.diagnosis);
        }
    }
    let ty = stage.ty;
    if right.is_gated() {
        // The result without the product: F · 1.
        let lone = Definition { up_limit: None, up_shift: 0.0, ..right };
        let mut bounds = Bounds::new(lone, ty)?;
        let one = narrow(ty, 1.0);
        let of = |i| bounds.of_bits(source.pair(&right, i)[0], one);
        let text = "the activated gate was not multiplied with up";
        best.offer("up-forgotten", text, stage.compared(wrong, of));
    }
    let linear = |i| {
        let [gate, up] = source.pair(&right, i).map(|bits| f64::from(widen(ty, bits)));
        let exact = if right.is_gated() { gate * up } else { gate };
        match exact.is_nan() {
            true => Bound::NAN,
            false => {
                Bound { interval: Interval::point(exact).rounded(ty), ..Bound::exactly(exact) }
            }
        }
    };
    let text = "the activation function was left out: gate times up";
    best.offer("activation-forgotten", text, stage.compared(wrong, linear));
    Ok(best.diagnosis)
}

/// Known mistakes in the activation.
fn variants(right: Definition, activation: Activation) -> Vec<(String, String, Definition)> {
    let mut all = Vec::new();
    let mut add = |id: &str, text: &str, definition: Definition| {
        all.push((id.to_owned(), text.to_owned(), definition));
    };
    if right.is_gated() {
        let exchanged = Definition { exchanged: true, ..right };
        add("gate-up-swapped", "gate and up are exchanged", exchanged);
        let (id, text, columns) = match right.columns {
            Columns::Interleaved => (
                "columns-halved",
                "gate and up were read from the halves of a row; they are interleaved",
                Columns::Halves,
            ),
            _ => (
                "columns-interleaved",
                "gate and up were read from the even and odd columns; they are halves",
                Columns::Interleaved,
            ),
        };
        add(id, text, Definition { columns, ..right });
        let text = format!("{text}, and exchanged");
        add(&format!("{id}-swapped"), &text, Definition { columns, ..exchanged });
    }
    if right.gate_limit.or(right.value_limit).or(right.up_limit).is_some() {
        let free = Definition { gate_limit: None, value_limit: None, up_limit: None, ..right };
        add("clamp-forgotten", "the limits of gate and up were not applied", free);
        let free = Definition { up_limit: None, ..right };
        add("clamp-of-up-forgotten", "the limits of up were not applied", free);
        let free = Definition { gate_limit: None, value_limit: None, ..right };
        add("clamp-of-gate-forgotten", "the limit of the gate was not applied", free);
    }
    if right.alpha != 1.0 {
        let text = format!("the factor {} in the sigmoid is missing", right.alpha);
        add("alpha-forgotten", &text, Definition { alpha: 1.0, ..right });
    }
    if right.up_shift != 0.0 {
        let text = format!("up was multiplied without {} being added", right.up_shift);
        add("shift-forgotten", &text, Definition { up_shift: 0.0, ..right });
    }
    let others = Activation::NAMED
        .iter()
        .filter(|(_, a)| *a != activation && a.is_gated() == activation.is_gated());
    for (name, other) in others {
        let text = format!("the values are those of `{name}`; the config says `{activation}`");
        let columns = right.columns;
        add(
            &format!("activation-{name}"),
            &text,
            Definition { columns, ..Definition::new(*other) },
        );
    }
    all
}
