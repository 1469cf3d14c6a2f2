//! Helpers for products of e4m3fn activations and e4m3fn weights, shared by `scaled_mm` and
//! `fp8_moe`.

use crate::Result;
use crate::judge::mistake::{Comparison, search};
use crate::judge::{Declared, OutputReport, plain};
use crate::num::dims::{GroupSize, Shape};
use crate::num::scalar::ScalarType;
use crate::num::tensor::Tensor;
use crate::ops::computation::{Computation, codes, made};
use crate::ops::schema::{CaseError, Reader};
use crate::ops::tensors::FLAGS;
use crate::products::schedule::ScheduleChoice;
use crate::products::schedule::{Chunks, FP8_PROMOTION, Fp8Kernel, Schedule};
use crate::products::{Class, Convention};
use crate::weight::{Groups, Table, TableData, Weight};

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
        class: given.class.clone(),
        power_of_two_scales: false,
    }
}

/// Whether a class is declared; the default class is for 16-bit operands.
pub(super) fn is_declared(given: &Declared) -> bool {
    given.class != Class::any_order()
}

/// Toggles promotion in a schedule; sums of groups are always promoted.
pub(super) fn other_promotion(schedule: &mut Schedule) {
    if schedule.group_sum.is_some() {
        return;
    }
    schedule.chunks = match schedule.chunks {
        Chunks::Whole => Chunks::Size(FP8_PROMOTION),
        _ => Chunks::Whole,
    };
}

/// Prefers a mistake that gives every found bit under the declared schedule to a structure, but not
/// to zeros or NaN, which many mistakes give. The schedule's unit may not divide K: such an output is
/// judged by its bound alone.
pub(super) fn better_diagnosis<C: Computation>(
    report: &mut OutputReport,
    found: &[u32],
    right: &C,
) -> Result<()> {
    if report.diagnosis.as_ref().is_some_and(|d| plain::NAMES.contains(&d.id.as_str())) {
        return Ok(());
    }
    let Ok(outputs) = right.outputs() else { return Ok(()) };
    let expected = outputs.into_iter().find(|o| o.name == report.name);
    let Some(expected) = expected.filter(|e| e.elements.len() == found.len()) else {
        return Ok(());
    };
    let mistakes = C::mistakes();
    let known = search(mistakes.iter(), |mistake| {
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
    Ok(())
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
