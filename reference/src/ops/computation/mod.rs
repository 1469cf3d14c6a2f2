//! The bit-exact definition of an operation's outputs, and known mistakes as modifications of it.
//!
//! A mistake is the diagnosis if its outputs equal the found ones. [`mistaken`] provides these
//! outputs to tests and to the fuzzing kit.

mod causes;
mod defined;
mod expected;

pub(crate) use defined::Defined;
pub(super) use defined::{bitwise, judge_some};
pub(crate) use expected::Expected;
pub(super) use expected::{Computation, Form, Mistake, ids, known, made, mistake};

use crate::Result;
use crate::formats::transposed;
use crate::judge::compare::Elements;
use crate::judge::{OutputReport, Verdict};
use crate::num::dims::Shape;
use crate::num::tensor::Tensor;
use crate::ops::Op;
use crate::ops::case::Case;
use crate::weight::{Codes, Table};

/// The ids of an operation's known mistakes, in the order in which they are tried; empty for an
/// operation without such a list.
pub fn mistakes(op: Op) -> Vec<&'static str> {
    (op.entry().mistakes)()
}

/// Adds every output that the reference computes for the inputs of a case: of products, activations
/// and sums the bits of the config's schedule, else of the canonical arithmetic.
///
/// # Errors
/// Returns an error for inputs that the operation refuses;
/// [`Error::Unsupported`](crate::Error::Unsupported) for a router with a stated `routing`.
pub fn add_outputs(case: &mut Case<'_>) -> Result<()> {
    let Some(computation) = case.config.operation().computation(case)? else {
        let config = case.config.clone();
        return config.operation().add_staged_outputs(case);
    };
    for output in computation.all_outputs()? {
        case.add_output(&output.name, output.tensor()?);
    }
    Ok(())
}

/// The case with the outputs of one of its operation's [`mistakes`]; `None` if the mistake does not
/// change this case's outputs.
///
/// # Errors
/// Returns an error for inputs that the operation refuses.
pub fn mistaken<'a>(case: &Case<'a>, id: &str) -> Result<Option<Case<'a>>> {
    let Some(computation) = case.config.operation().computation(case)? else { return Ok(None) };
    let Some(outputs) = computation.shown(id)? else { return Ok(None) };
    let mut wrong = case.clone();
    for output in outputs {
        wrong.add_output(&output.name, output.tensor()?);
    }
    Ok(Some(wrong))
}

/// Codes of one matrix `[N, K]` of a file, `bits` each.
pub(super) fn codes(tensor: &Tensor<'_>, bits: u32, shape: Shape) -> Result<Codes<'static>> {
    let words: Vec<u32> = bytemuck::allocation::pod_collect_to_vec(tensor.bytes());
    let per_row = shape.size_k * bits as usize / 32;
    Codes::from_words(bits, shape, transposed(&words, shape.size_n, per_row))
}

/// The bytes of a table in file order, `[N, groups]`.
pub(super) fn in_lines(table: &Table) -> Elements {
    table.transposed().iter_bits().collect()
}

/// A passing report on `elements` values.
pub(super) fn passing(name: &str, elements: usize, note: Option<String>) -> OutputReport {
    let mut report = OutputReport::unchecked(name, elements, "");
    (report.note, report.verdict, report.equal_bits) = (note, Verdict::Pass, Some(1.0));
    report
}
