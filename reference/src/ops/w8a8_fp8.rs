//! Helpers for products of e4m3fn activations and e4m3fn weights, shared by `scaled_mm` and
//! `fp8_moe`.

use crate::judge::mistake::{Comparison, search};
use crate::judge::product::Mistaken;
use crate::judge::{Declared, Diagnosis, OutputReport, Strength, plain};
use crate::num::dims::{GroupSize, Shape};
use crate::num::scalar::ScalarType;
use crate::num::tensor::Tensor;
use crate::ops::computation::{Computation, Mistake, codes, made};
use crate::ops::schema::{CaseError, Reader};
use crate::ops::tensors::FLAGS;
use crate::products::Convention;
use crate::products::schedule::ScheduleChoice;
use crate::products::schedule::{Chunks, FP8_PROMOTION, Fp8Kernel, Schedule, ScheduleError};
use crate::weight::{Groups, Table, TableData, Weight};
use crate::{Error, Result};

/// The type of both operands.
pub(super) const E4M3_TYPE: ScalarType = ScalarType::FLOAT8_E4M3FN;

/// An e4m3fn matrix `[N, K]` of a file with one f32 scale, or one per output feature.
pub(super) fn fp8_weight(
    tensor: &Tensor<'_>,
    scales: &[f32],
    sizes: [usize; 2],
) -> Result<Weight<'static>> {
    scaled_weight(tensor, E4M3_TYPE, scales, sizes)
}

/// A matrix `[N, K]` of a file, 8-bit codes of type `ty`, with one f32 scale, or one per output feature.
pub(super) fn scaled_weight(
    tensor: &Tensor<'_>,
    ty: ScalarType,
    scales: &[f32],
    [size_n, size_k]: [usize; 2],
) -> Result<Weight<'static>> {
    let bits = scales.iter().map(|s| s.to_bits()).cycle().take(size_n).collect();
    Ok(Weight {
        name: tensor.name().to_owned(),
        ty,
        codes: codes(tensor, 8, Shape::new(size_k, size_n))?,
        scales: Table::new(ScalarType::FLOAT32, 1, size_n, TableData::B32(bits))?,
        zeros: None,
        groups: Groups::Uniform(GroupSize::Channel),
        global_scale: None,
        bias: None,
    })
}

/// The declaration of a W8A8-FP8 product: the convention of upstream's kernels, and the given
/// class.
pub(super) fn declared_as(given: &Declared) -> Declared {
    Declared {
        convention: Some(Convention::W8a8),
        or_exact: given.convention.is_none(),
        power_of_two_scales: false,
        ..given.clone()
    }
}

/// Whether a class is declared; the default class is for 16-bit operands.
pub(super) fn is_declared(given: &Declared) -> bool {
    given.states_class()
}

/// Whether a schedule's chunks of k decide where sums are promoted to f32; sums of groups always are.
fn may_promote(schedule: &Schedule) -> bool {
    schedule.group_sum.is_none() && schedule.unit.find().is_ok_and(|u| u.fraction_bits < 23)
}

/// Removes the promotion of a schedule that has one.
pub(super) fn without_promotion(schedule: &mut Schedule) {
    if may_promote(schedule) && schedule.chunks != Chunks::Whole {
        (schedule.chunks, schedule.leaf_chunks) = (Chunks::Whole, None);
    }
}

/// Promotes the sums of a schedule that has no promotion.
pub(super) fn with_promotion(schedule: &mut Schedule) {
    if may_promote(schedule) && schedule.chunks == Chunks::Whole {
        schedule.chunks = Chunks::Size(FP8_PROMOTION);
    }
}

/// Prefers a mistake that gives every found bit under the declared schedule to a structure, but not
/// to zeros or NaN, which many mistakes give. If the schedule's unit does not divide K, the report
/// stays as it is; any other reason why the schedule cannot be run becomes a note.
pub(super) fn better_diagnosis<C: Computation>(
    report: &mut OutputReport,
    found: &[u32],
    right: &C,
) {
    better_diagnosis_among(report, found, right, |_| true);
}

/// [`better_diagnosis`] among the mistakes that `may_be` the cause, as far as other outputs say.
pub(super) fn better_diagnosis_among<C: Computation>(
    report: &mut OutputReport,
    found: &[u32],
    right: &C,
    may_be: impl Fn(&Mistake<C>) -> bool,
) {
    // A related schedule that gives every bit says more than a mistake that gives them too.
    let is_known = |d: &Diagnosis| {
        let of_schedule = d.id.starts_with("schedule-") || d.id.starts_with("promotion-");
        // A step that is missing is an operand that was not applied, which has a name.
        let of_schedule = of_schedule && d.id != "schedule-step-missing";
        plain::NAMES.contains(&d.id.as_str()) || of_schedule && d.strength == Strength::Explains
    };
    if report.diagnosis.as_ref().is_some_and(is_known) {
        return;
    }
    let outputs = match right.outputs() {
        Ok(outputs) => outputs,
        Err(error) if is_unit_k(&error) => return,
        Err(error) => return report.add_note(&format!("known mistakes were not tried: {error}")),
    };
    let expected = outputs.into_iter().find(|o| o.name == report.name);
    let Some(expected) = expected.filter(|e| e.elements.len() == found.len()) else { return };
    let mistakes = C::mistakes();
    let known = search(mistakes.iter(), |mistake| {
        if !may_be(mistake) {
            return None;
        }
        let made = made(right, mistake)?.into_iter().find(|o| o.name == report.name)?;
        if made.elements.len() != found.len() || made.elements == expected.elements {
            return None;
        }
        let mut all = Comparison { total: found.len(), ..Comparison::default() };
        for ((&e, &m), &f) in expected.elements.iter().zip(&made.elements).zip(found) {
            // The kernel may not follow the declared schedule, so every bit must match.
            match m == f {
                true if e == f => {}
                true => all.exact(e, m, f, 16),
                false => all.broken += 1,
            }
        }
        Some(all)
    });
    if known.is_some() {
        report.diagnosis = known;
    }
}

/// The known mistakes of an operation that change the `weights` of a product.
pub(super) fn mistaken_weights<C: Computation>(
    right: &C,
    weights: impl for<'c> Fn(&'c C) -> &'c [Weight<'static>],
) -> Vec<Mistaken> {
    let own = |mistake: Mistake<C>| {
        let changed = (mistake.make)(right.clone())?;
        let weights = (weights(&changed) != weights(right)).then(|| weights(&changed).to_vec())?;
        Some(Mistaken { id: mistake.id, text: mistake.text, weights })
    };
    C::mistakes().into_iter().filter_map(own).collect()
}

/// Whether the error is that the schedule's unit does not divide K.
fn is_unit_k(error: &Error) -> bool {
    matches!(error, Error::Module(inner) if matches!(inner.downcast_ref(), Some(ScheduleError::UnitK { .. })))
}

/// Checks the optional key `convention`: products of 8-bit codes have only one.
pub(super) fn read_convention(r: &Reader<'_>) -> Result<(), CaseError> {
    r.optional_name("convention", &[(Convention::W8a8.name(), ())]).map(|_| ())
}

/// A schedule of each kernel, with and without promotion.
pub(super) fn schedules(dtype: ScalarType) -> Result<Vec<ScheduleChoice>> {
    let mut all = vec![ScheduleChoice::Canonical];
    for kernel in [Fp8Kernel::Cutlass, Fp8Kernel::Triton] {
        for promoted in FLAGS {
            let schedule = Schedule::w8a8_fp8(kernel, dtype, promoted)?;
            all.push(ScheduleChoice::Given(Box::new(schedule)));
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::num::tensor::DType;
    use crate::ops::computation::{Expected, Form, mistake};

    /// An output that is one value, or an error.
    #[derive(Clone)]
    struct Fixed(Result<u32>);

    impl Computation for Fixed {
        fn outputs(&self) -> Result<Vec<Expected>> {
            let elements = vec![self.0.clone()?; 4];
            let form = Form::list(4, 16);
            let (name, dtype) = ("y".to_owned(), DType::F16);
            Ok(vec![Expected { name, dtype, shape: vec![4], elements, form }])
        }

        fn mistakes() -> Vec<Mistake<Self>> {
            vec![mistake("other", "the value is another one", |fixed: &mut Self| fixed.0 = Ok(2))]
        }
    }

    #[test]
    fn only_a_k_that_the_unit_does_not_divide_ends_the_search_quietly() {
        let failed = || OutputReport { note: None, ..OutputReport::unchecked("y", 4, "") };
        let searched = |right: Result<u32>| {
            let mut report = failed();
            better_diagnosis(&mut report, &[2; 4], &Fixed(right));
            report
        };
        let named = searched(Ok(1));
        assert_eq!(named.diagnosis.map(|d| d.id), Some("other".to_owned()));
        assert_eq!(named.note, None);
        let unit = ScheduleError::UnitK { found: 32, size_k: 100 };
        let quiet = searched(Err(unit.into()));
        assert_eq!((quiet.note, quiet.diagnosis.is_none()), (None, true));
        let value = ScheduleError::Value {
            key: "epilogue".to_owned(),
            found: "a".to_owned(),
            expected: "b".to_owned(),
        };
        for error in [value.into(), Error::size("experts", 0, "1 or more")] {
            let noted = searched(Err(error.clone()));
            let note = noted.note.unwrap();
            assert!(note.contains(&error.to_string()), "{note}");
            assert!(noted.diagnosis.is_none());
        }
    }
}
