//! An operation's computation, the outputs that it expects, and its known mistakes.

use crate::Result;
use crate::judge::compare::{Candidate, Elements, Lines, Plain, Rows, Subject, elements};
use crate::judge::mistake::KnownMistake;
use crate::judge::{Diagnosis, OutputReport, plain};
use crate::layouts::Layout;
use crate::num::tensor::{DType, Tensor};

/// The computation of an operation's outputs from a case's inputs.
pub(in crate::ops) trait Computation: Clone + 'static {
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

/// A mistake maps a computation to the same computation with that mistake.
pub(in crate::ops) type Mistake<C> = KnownMistake<'static, C, C>;

/// A mistake that applies `change` to a computation.
pub(in crate::ops) fn mistake<C: 'static>(
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

pub(in crate::ops) use known;

/// One expected output.
pub(crate) struct Expected {
    /// Bare name.
    pub(in crate::ops) name: String,
    pub(in crate::ops) dtype: DType,
    /// Shape of the tensor.
    pub(in crate::ops) shape: Vec<usize>,
    pub(in crate::ops) elements: Elements,
    pub(in crate::ops) form: Form,
}

/// The arrangement of an output's values.
pub(in crate::ops) struct Form {
    /// Layout of one matrix.
    pub(in crate::ops) layout: Box<dyn Layout>,
    /// `[K or groups, N]` of a matrix with its padding.
    pub(in crate::ops) matrix: [usize; 2],
    /// `[K or groups, N]` without it.
    pub(in crate::ops) inside: [usize; 2],
    pub(in crate::ops) rows: Rows,
    /// Bits per value.
    pub(in crate::ops) width: u32,
    /// Number of matrices.
    pub(in crate::ops) experts: usize,
    /// Whether the tensor has an axis of experts.
    pub(in crate::ops) stacked: bool,
}

impl Form {
    /// `len` values without a structure.
    pub(in crate::ops) fn list(len: usize, width: u32) -> Self {
        let layout = Box::new(Plain { len, width });
        let (matrix, rows) = ([1, len], Rows::List);
        Self { layout, matrix, inside: matrix, rows, width, experts: 1, stacked: false }
    }

    /// Matrices `[N, K]` (or `[N, groups]`) as files store them.
    pub(in crate::ops) fn lines(
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
    pub(in crate::ops) fn floats(name: impl Into<String>, shape: &[usize], values: &[f32]) -> Self {
        Self {
            name: name.into(),
            dtype: DType::F32,
            shape: shape.to_vec(),
            elements: values.iter().map(|v| v.to_bits()).collect(),
            form: Form::list(values.len(), 32),
        }
    }

    /// The output as a tensor.
    pub(super) fn tensor(&self) -> Result<Tensor<'static>> {
        let width = self.dtype.bytes();
        let bytes: Vec<u8> =
            self.elements.iter().flat_map(|e| e.to_le_bytes().into_iter().take(width)).collect();
        Tensor::new(&self.name, self.dtype, self.shape.clone(), bytes)
    }

    /// Compares `found` bit for bit.
    pub(super) fn judge<'c>(
        self,
        found: &'c Tensor<'c>,
        candidates: Vec<Candidate<'c>>,
    ) -> OutputReport {
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

/// The outputs with a mistake; `None` if the mistake does not apply.
pub(in crate::ops) fn made<C: Computation>(
    right: &C,
    mistake: &Mistake<C>,
) -> Option<Vec<Expected>> {
    (mistake.make)(right.clone())?.outputs().ok()
}

pub(in crate::ops) fn ids<C: Computation>() -> Vec<&'static str> {
    C::mistakes().iter().map(|m| m.id).collect()
}
