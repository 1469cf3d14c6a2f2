//! The bit-exact definition of an operation's outputs, and known mistakes as modifications of it.
//!
//! A mistake is the diagnosis if its outputs equal the found ones. [`mistaken`] provides these
//! outputs to tests and to the fuzzing kit.

use crate::Result;
use crate::formats::transposed;
use crate::judge::compare::{Candidate, Elements, Lines, Plain, Rows, Subject, elements};
use crate::judge::mistake::KnownMistake;
use crate::judge::{Diagnosis, OutputReport, Verdict, plain};
use crate::layouts::Layout;
use crate::num::dims::Shape;
use crate::num::tensor::{DType, Tensor};
use crate::ops::Op;
use crate::ops::case::Case;
use crate::ops::causes;
use crate::weight::{Codes, Table};

/// The computation of an operation's outputs from a case's inputs.
pub(super) trait Computation: Clone + 'static {
    /// Every output, including those that the case lacks.
    ///
    /// # Errors
    /// Returns an error for inputs that the operation refuses.
    fn outputs(&self) -> Result<Vec<Expected>>;

    /// The known mistakes that this operation can have.
    fn mistakes() -> Vec<Mistake<Self>>;

    /// The computation in which other outputs follow from the `found` elements of output `name`; `None` if
    /// none follows from it.
    fn following(&self, _name: &str, _found: &[u32]) -> Option<Self> {
        None
    }
}

/// A [`Computation`] of any operation.
pub(crate) trait Defined {
    /// Every output, including those that the case lacks.
    ///
    /// # Errors
    /// Returns an error for inputs that the operation refuses.
    fn all_outputs(&self) -> Result<Vec<Expected>>;

    /// The outputs with mistake `id`, if their shapes are right and they differ from the right
    /// outputs.
    ///
    /// # Errors
    /// Returns an error for inputs that the operation refuses.
    fn shown(&self, id: &str) -> Result<Option<Vec<Expected>>>;

    /// Compares every output that the case has.
    ///
    /// # Errors
    /// Returns an error for inputs that the operation refuses.
    fn judge(&self, case: &Case<'_>) -> Result<Vec<OutputReport>>;
}

impl<C: Computation> Defined for C {
    fn all_outputs(&self) -> Result<Vec<Expected>> {
        self.outputs()
    }

    fn shown(&self, id: &str) -> Result<Option<Vec<Expected>>> {
        mistake_shown(self, id)
    }

    fn judge(&self, case: &Case<'_>) -> Result<Vec<OutputReport>> {
        bitwise(case, self)
    }
}

/// A mistake maps a computation to the same computation with that mistake.
pub(super) type Mistake<C> = KnownMistake<'static, C, C>;

/// A mistake that applies `change` to a computation.
pub(super) fn mistake<C: 'static>(
    id: &'static str,
    text: &'static str,
    change: fn(&mut C),
) -> Mistake<C> {
    KnownMistake::new(id, text, move |mut computation: C| {
        change(&mut computation);
        Some(computation)
    })
}

/// Lists [`Mistake`]s.
macro_rules! known {
    ($($id:literal, $text:literal => $change:expr;)+) => {
        vec![$(crate::ops::computation::mistake($id, $text, $change)),+]
    };
}

pub(super) use known;

/// One expected output.
pub(crate) struct Expected {
    /// Bare name.
    pub(super) name: String,
    pub(super) dtype: DType,
    /// Shape of the tensor.
    pub(super) shape: Vec<usize>,
    pub(super) elements: Elements,
    pub(super) form: Form,
}

/// The arrangement of an output's values.
pub(super) struct Form {
    /// Layout of one matrix.
    pub(super) layout: Box<dyn Layout>,
    /// `[K or groups, N]` of a matrix with its padding.
    pub(super) matrix: [usize; 2],
    /// `[K or groups, N]` without it.
    pub(super) inside: [usize; 2],
    pub(super) rows: Rows,
    /// Bits per value.
    pub(super) width: u32,
    /// Number of matrices.
    pub(super) experts: usize,
    /// Whether the tensor has an axis of experts.
    pub(super) stacked: bool,
}

impl Form {
    /// `len` values without a structure.
    pub(super) fn list(len: usize, width: u32) -> Self {
        let layout = Box::new(Plain { len, width });
        let (matrix, rows) = ([1, len], Rows::List);
        Self { layout, matrix, inside: matrix, rows, width, experts: 1, stacked: false }
    }

    /// Matrices `[N, K]` (or `[N, groups]`) as files store them.
    pub(super) fn lines(
        rows: Rows,
        matrix: [usize; 2],
        width: u32,
        experts: Option<usize>,
    ) -> Self {
        let layout = Lines { rows: matrix[0], cols: matrix[1], width };
        let (layout, stacked) = (Box::new(layout), experts.is_some());
        let experts = experts.unwrap_or(1);
        Self { layout, matrix, inside: matrix, rows, width, experts, stacked }
    }
}

impl Expected {
    /// f32 values without a structure.
    pub(super) fn floats(name: impl Into<String>, shape: &[usize], values: &[f32]) -> Self {
        Self {
            name: name.into(),
            dtype: DType::F32,
            shape: shape.to_vec(),
            elements: values.iter().map(|v| v.to_bits()).collect(),
            form: Form::list(values.len(), 32),
        }
    }

    /// The output as a tensor.
    fn tensor(&self) -> Result<Tensor<'static>> {
        let width = self.dtype.bytes();
        let bytes: Vec<u8> =
            self.elements.iter().flat_map(|e| e.to_le_bytes().into_iter().take(width)).collect();
        Tensor::new(&self.name, self.dtype, self.shape.clone(), bytes)
    }

    /// Compares `found` bit for bit.
    fn judge<'c>(self, found: &'c Tensor<'c>, candidates: Vec<Candidate<'c>>) -> OutputReport {
        let Form { layout, matrix, inside, rows, width, experts, stacked } = self.form;
        let (name, expected) = (self.name, self.elements);
        let subject = Subject {
            name,
            found,
            expected,
            layout,
            shape: matrix,
            rows,
            width,
            experts,
            stacked,
            candidates,
        };
        let bits = elements(found);
        let mut in_padding = 0;
        let padded = inside != matrix;
        for (_, place) in subject.places(&bits).filter(|_| padded) {
            if place.row < inside[0] && place.col < inside[1] {
                in_padding = 0;
                break;
            }
            in_padding += 1;
        }
        let mut report = subject.judge();
        let is_fact = |d: &Diagnosis| plain::NAMES.contains(&d.id.as_str());
        let known = report.diagnosis.as_ref().is_some_and(|d| d.unexplained == 0 && !is_fact(d));
        if in_padding > 0 && !known {
            let text = format!("{in_padding} values of the padding are not zero");
            report.diagnosis = Some(Diagnosis::explains("padding-not-zero", text));
        }
        report
    }
}

/// Compares every output that the case has.
pub(super) fn bitwise<C: Computation>(
    case: &Case<'_>,
    computation: &C,
) -> Result<Vec<OutputReport>> {
    Ok(judge_some(case, computation, computation.outputs()?))
}

/// Compares those outputs of `computation` in `expected` that the case has.
pub(super) fn judge_some<C: Computation>(
    case: &Case<'_>,
    computation: &C,
    expected: impl IntoIterator<Item = Expected>,
) -> Vec<OutputReport> {
    let has = |expected: Expected| case.output(&expected.name).map(|found| (expected, found));
    let pairs: Vec<_> = expected.into_iter().filter_map(has).collect();
    let mut candidates = causes::of_outputs(computation, &pairs);
    let judge = |(i, (expected, found)): (usize, (Expected, &_))| {
        expected.judge(found, std::mem::take(&mut candidates[i]))
    };
    let mut reports: Vec<OutputReport> = pairs.into_iter().enumerate().map(judge).collect();
    causes::follow(case, computation, &mut reports);
    reports
}

/// The outputs with a mistake; `None` if the mistake does not apply.
pub(super) fn made<C: Computation>(right: &C, mistake: &Mistake<C>) -> Option<Vec<Expected>> {
    (mistake.make)(right.clone())?.outputs().ok()
}

/// The outputs with mistake `id`, if their shapes are right and they differ from the right outputs.
fn mistake_shown<C: Computation>(right: &C, id: &str) -> Result<Option<Vec<Expected>>> {
    let Some(mistake) = C::mistakes().into_iter().find(|m| m.id == id) else { return Ok(None) };
    let expected = right.outputs()?;
    let shows = |wrong: &Vec<Expected>| {
        let pairs = || wrong.iter().zip(&expected);
        wrong.len() == expected.len()
            && pairs().all(|(w, e)| w.shape == e.shape)
            && pairs().any(|(w, e)| w.elements != e.elements)
    };
    Ok(made(right, &mistake).filter(shows))
}

pub(super) fn ids<C: Computation>() -> Vec<&'static str> {
    C::mistakes().iter().map(|m| m.id).collect()
}

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
