//! A product of e4m3fn activations and an e4m3fn weight.

use super::{Computation, Expected, Form, Mistake, codes, known};
use crate::Result;
use crate::case::{Case, Fp8MmConfig};
use crate::check::compare::{Rows, elements};
use crate::check::known;
use crate::check::mistake::{Comparison, search};
use crate::check::plain;
use crate::check::product::{Hints, Part, Stage, decoded};
use crate::check::scheduled::{self, Product};
use crate::check::{Declared, OutputReport, Verdict};
use crate::dims::{GroupSize, Shape};
use crate::gemm::schedule::{Chunks, Extras, FP8_PROMOTION, Fp8Kernel, Schedule};
use crate::gemm::{Class, Convention, Extras as BoundExtras};
use crate::scalar::ScalarType;
use crate::tensor::{DType, Tensor};
use crate::weight::{Groups, Table, TableData, Weight};

const E4M3: ScalarType = ScalarType::FLOAT8_E4M3FN;

/// An e4m3fn matrix of a file `[N, K]` with one f32 scale, or one for each of its N.
pub(super) fn weight(
    tensor: &Tensor<'_>,
    scales: &[f32],
    [size_n, size_k]: [usize; 2],
) -> Result<Weight<'static>> {
    let bits = scales.iter().map(|s| s.to_bits()).cycle().take(size_n).collect();
    Ok(Weight {
        name: tensor.name().to_owned(),
        ty: E4M3,
        codes: codes(tensor, 8, Shape::new(size_k, size_n))?,
        scales: Table::new(ScalarType::FLOAT32, 1, size_n, TableData::B32(bits))?,
        zeros: None,
        groups: Groups::Uniform(GroupSize::Channel),
        global_scale: None,
        bias: None,
    })
}

/// How a W8A8-FP8 product is declared: the case's convention is upstream's kernels', the class as given.
pub(super) fn declared(given: &Declared) -> Declared {
    Declared {
        convention: Some(Convention::ScaledMm),
        or_exact: given.convention.is_none(),
        class: given.class.clone(),
    }
}

/// Whether a class is declared; the default one is of 16-bit operands.
pub(super) fn is_declared(given: &Declared) -> bool {
    given.class != Class::any_order()
}

/// Promotion added where there is none, or left out.
pub(super) fn other_promotion(schedule: &mut Schedule) {
    schedule.chunks = match schedule.chunks {
        Chunks::Whole => Chunks::Size(FP8_PROMOTION),
        _ => Chunks::Whole,
    };
}

/// `cutlass_scaled_mm`.
#[derive(Debug, Clone)]
pub(super) struct ScaledMm {
    config: Fp8MmConfig,
    /// `[M, K]`.
    a: Vec<u32>,
    /// One for each row.
    a_scales: Vec<f32>,
    weight: Weight<'static>,
    schedule: Schedule,
}

impl ScaledMm {
    pub(super) fn new(case: &Case<'_>, c: &Fp8MmConfig) -> Result<Self> {
        let floats = |name: &str| Ok::<_, crate::Error>(case.input(name)?.elements::<f32>());
        let a_scales = floats("a_scales")?.iter().copied().cycle().take(c.size_m).collect();
        let tensor = case.input("weight")?;
        let mut weight = weight(tensor, &floats("weight_scale")?, [c.size_n, c.size_k])?;
        if c.has_bias {
            weight.bias = Some(Table::from_tensor(case.input("bias")?, c.dtype)?);
        }
        let schedule = match &c.schedule {
            Some(choice) => choice.resolve(std::slice::from_ref(&weight), c.dtype, E4M3)?,
            None => Schedule::w8a8_fp8(Fp8Kernel::Cutlass, c.dtype, false)?,
        };
        let a = elements(case.input("a")?);
        Ok(Self { config: c.clone(), a, a_scales, weight, schedule })
    }

    /// `found` as the product of these inputs by its bound.
    fn bounded(&self, case: &Case<'_>, given: &Declared) -> Result<Option<OutputReport>> {
        let Some(found) = case.output("y") else { return Ok(None) };
        let c = &self.config;
        let rows = (0..c.size_m).collect();
        let parts = [Part { weight: &self.weight, rows, expert: None, global: 0 }];
        let declared = declared(given);
        let stage = Stage {
            name: "y",
            found,
            rows: decoded(case.input("a")?)?,
            radius: None,
            parts: &parts,
            orders: None,
            extras: BoundExtras { activation_scales: Some(&self.a_scales), router_weights: None },
            dtype: c.dtype,
            input_dtype: Some(E4M3),
            declared: &declared,
            top_k: None,
            hints: Hints::default(),
        };
        match self.config.schedule.is_some() || is_declared(given) {
            true => stage.judge().map(Some),
            false => known::judge(stage, &self.product()).map(Some),
        }
    }

    fn product(&self) -> Product<'_> {
        Product {
            x: &self.a,
            input: E4M3,
            dtype: self.config.dtype,
            weights: std::slice::from_ref(&self.weight),
            expert_of: None,
            orders: None,
            activation_scales: Some(&self.a_scales),
            router_weights: None,
        }
    }
}

impl Computation for ScaledMm {
    fn outputs(&self) -> Result<Vec<Expected>> {
        let c = &self.config;
        let extras = Extras { activation_scales: Some(&self.a_scales), ..Extras::default() };
        Ok(vec![Expected {
            name: "y".to_owned(),
            dtype: if c.dtype == ScalarType::FLOAT16 { DType::F16 } else { DType::BF16 },
            shape: vec![c.size_m, c.size_n],
            elements: self.schedule.execute(&self.a, &self.weight, extras)?,
            form: Form::lines(Rows::List, [c.size_n, c.size_m], 16, None),
        }])
    }

    fn mistakes() -> Vec<Mistake<Self>> {
        known! {
            "promotion-missing", "sums were not promoted to f32, or where the schedule does not" =>
                |c| other_promotion(&mut c.schedule);
            "activation-scale-inverted", "the activations' scale divides where it multiplies" =>
                |c| c.a_scales.iter_mut().for_each(|s| *s = 1.0 / *s);
            "activation-scale-of-first-row", "the first row's scale was taken for all rows" =>
                |c| {
                    let first = c.a_scales[0];
                    c.a_scales.fill(first);
                };
            "weight-scale-of-first-column", "the first column's scale was taken for all columns" =>
                |c| {
                    let first = c.weight.scales.bits(0, 0);
                    c.weight.scales = c.weight.scales.map(ScalarType::FLOAT32, |_| first);
                };
            "weight-scale-inverted", "the weight's scale divides where it multiplies" => |c| {
                let inverse = |bits| (1.0 / f32::from_bits(bits)).to_bits();
                c.weight.scales = c.weight.scales.map(ScalarType::FLOAT32, inverse);
            };
            "scale-not-doubled", "the weight's scale is that of e4m3fn under e4m3fnuz's codes: half" =>
                |c| {
                    let half = |bits| (0.5 * f32::from_bits(bits)).to_bits();
                    c.weight.scales = c.weight.scales.map(ScalarType::FLOAT32, half);
                };
            "bias-missing", "the bias was not added" => |c| c.weight.bias = None;
        }
    }
}

/// `y`: every bit where a schedule is declared or a known one gives it, else by its bound.
pub(super) fn judge(case: &Case<'_>, mm: &ScaledMm, given: &Declared) -> Result<Vec<OutputReport>> {
    let Some(found) = case.output("y") else { return Ok(Vec::new()) };
    let report = match &mm.config.schedule {
        None => mm.bounded(case, given)?,
        Some(choice) => {
            let bounded = || mm.bounded(case, given);
            Some(scheduled::judge("y", found, mm.product(), choice, bounded)?)
        }
    };
    let mut reports: Vec<OutputReport> = report.into_iter().collect();
    for report in reports.iter_mut().filter(|r| r.verdict == Verdict::Fail) {
        better_diagnosis(report, &elements(found), mm)?;
    }
    Ok(reports)
}

/// The mistake whose bits under the declared schedule are all those found says more than a structure,
/// but not more than zeros or NaN, which many mistakes give.
pub(super) fn better_diagnosis<C: Computation>(
    report: &mut OutputReport,
    found: &[u32],
    right: &C,
) -> Result<()> {
    if report.diagnosis.as_ref().is_some_and(|d| plain::NAMES.contains(&d.id.as_str())) {
        return Ok(());
    }
    let expected = right.outputs()?.into_iter().find(|o| o.name == report.name);
    let Some(expected) = expected.filter(|e| e.elements.len() == found.len()) else {
        return Ok(());
    };
    let mistakes = C::mistakes();
    let known = search(mistakes.iter(), |mistake| {
        let made = super::made(right, mistake)?.into_iter().find(|o| o.name == report.name)?;
        if made.elements.len() != found.len() || made.elements == expected.elements {
            return None;
        }
        let mut all = Comparison { total: found.len(), ..Comparison::default() };
        for ((&e, &m), &f) in expected.elements.iter().zip(&made.elements).zip(found) {
            // The declared schedule need not be the kernel's: only all bits will do.
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
