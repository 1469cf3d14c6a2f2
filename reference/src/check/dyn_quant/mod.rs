//! The Arm int4 path: packed activations, packed weights and the product, every bit.
//!
//! The product is judged from the case's own packed buffers where it has them, so that an error
//! shows where it arises.

mod bytes;
mod variants;

use super::compare::{Mismatch, elements};
use super::{Diagnosis, OutputReport, Verdict};
use crate::case::{Case, DynQuantConfig, Packing};
use crate::dims::{GroupSize, Shape};
use crate::layout::kleidi::{Columns, LhsLayout, PackedLhs, PackedRhs, QuantizedRows, RhsLayout};
use crate::tensor::Tensor;
use crate::w4a8::{Values, quantize, scalar};
use crate::{Error, Result};

/// What a case's inputs give, and what its packed outputs say.
struct Sources<'c> {
    config: &'c DynQuantConfig,
    x: Option<Values>,
    lhs_layout: LhsLayout,
    rhs_layout: RhsLayout,
    /// The weights as the inputs have them.
    columns: Columns,
}

/// A wrong way to make an output that is known to happen.
struct Candidate<'c, T> {
    id: &'static str,
    text: &'static str,
    make: Box<dyn Fn() -> Option<T> + 'c>,
}

impl<'c, T> Candidate<'c, T> {
    fn new(id: &'static str, text: &'static str, make: impl Fn() -> Option<T> + 'c) -> Self {
        Self { id, text, make: Box::new(make) }
    }
}

/// The reports on every output of a `dyn_quant_linear` case.
///
/// # Errors
/// For packings that no known kernel has, and inputs that do not fit each other.
pub(super) fn linear(case: &Case<'_>, c: &DynQuantConfig) -> Result<Vec<OutputReport>> {
    let Packing { mr, nr, kr, sr } = c.packing;
    if (kr, sr) != (16, 2) {
        let what = format!("packing with kr {kr}, sr {sr}");
        return Err(Error::unsupported(what, "every known kernel has kr 16, sr 2"));
    }
    let shape = Shape::new(c.size_k, c.size_n);
    let x = match case.inputs.get("x") {
        Some(x) => Some(Values::from_tensor(x)?),
        None => None,
    };
    let sources = Sources {
        config: c,
        x,
        lhs_layout: LhsLayout::new(c.size_m, c.size_k, mr)?,
        rhs_layout: RhsLayout::new(shape, c.group_size, nr)?,
        columns: columns(case, c, shape)?,
    };
    let mut reports = Vec::new();
    if let Some(found) = case.output("lhs_packed") {
        reports.push(sources.judge_lhs(found)?);
    }
    if let Some(found) = case.output("rhs_packed") {
        reports.push(sources.judge_rhs(found)?);
    }
    if let Some(found) = case.output("y") {
        reports.push(sources.judge_y(case, found)?);
    }
    Ok(reports)
}

/// The weights of the case's inputs.
fn columns(case: &Case<'_>, c: &DynQuantConfig, shape: Shape) -> Result<Columns> {
    let packed = case.input("weight_u4")?.elements::<u8>();
    let codes = packed.iter().flat_map(|&b| [(b & 15) as i8 - 8, (b >> 4) as i8 - 8]).collect();
    let bias = match c.has_bias {
        true => Some(case.input("bias")?.elements::<f32>()),
        false => None,
    };
    let scales = case.input("weight_scale")?;
    match c.group_size {
        GroupSize::Channel => {
            Columns::channel_wise(shape, codes, &scales.elements::<f32>(), bias.as_deref())
        }
        GroupSize::Of(g) => {
            let scales = scales.elements::<u16>().into_owned();
            Columns::group_wise(shape, g, codes, scales, bias.as_deref())
        }
    }
}

impl Sources<'_> {
    fn rows(&self) -> Result<Option<QuantizedRows>> {
        let quantized = |x| quantize(x, self.config.size_k, self.config.activation_rounding);
        self.x.as_ref().map(quantized).transpose()
    }

    fn judge_lhs(&self, found: &Tensor<'_>) -> Result<OutputReport> {
        let Some(rows) = self.rows()? else {
            let note = "`in.x` is absent: there is nothing to quantize";
            return Ok(OutputReport::unchecked("lhs_packed", found.len(), note));
        };
        let expected = self.lhs_layout.pack(&rows)?;
        let candidates = self.lhs_candidates(&rows);
        Ok(bytes::judge("lhs_packed", &self.lhs_layout, expected.bytes(), found, &candidates))
    }

    fn judge_rhs(&self, found: &Tensor<'_>) -> Result<OutputReport> {
        let expected = self.rhs_layout.pack(&self.columns)?;
        let candidates = self.rhs_candidates();
        Ok(bytes::judge("rhs_packed", &self.rhs_layout, expected.bytes(), found, &candidates))
    }

    fn judge_y(&self, case: &Case<'_>, found: &Tensor<'_>) -> Result<OutputReport> {
        // Buffers of a wrong size have their own report.
        let lhs = case
            .output("lhs_packed")
            .and_then(|t| PackedLhs::new(self.lhs_layout, t.bytes()).ok())
            .map(|packed| packed.unpack());
        let rhs = case
            .output("rhs_packed")
            .and_then(|t| PackedRhs::new(self.rhs_layout, t.bytes()).ok())
            .map(|packed| packed.unpack());
        let own = [lhs.is_some(), rhs.is_some()];
        let rows = match lhs {
            Some(rows) => rows,
            None => match self.rows()? {
                Some(rows) => rows,
                None => {
                    let note = "both `in.x` and `out.lhs_packed` are absent";
                    return Ok(OutputReport::unchecked("y", found.len(), note));
                }
            },
        };
        let columns = rhs.unwrap_or_else(|| self.columns.clone());
        let ty = self.config.dtype;
        let expected = scalar::product(&rows, &columns, ty)?.bits();
        let bits = elements(found);
        // A NaN's sign and payload are the processor's business.
        let differs = |a: u32, b: u32| a != b && !(is_nan(ty, a) && is_nan(ty, b));
        let count = |made: &[u32], found: &[u32]| {
            made.iter().zip(found).filter(|&(&a, &b)| differs(a, b)).count()
        };
        let mut report = OutputReport::unchecked("y", bits.len(), "");
        report.note = None;
        report.verdict = Verdict::Pass;
        report.equal_bits = Some(1.0);
        let Some(first) = (0..bits.len()).find(|&i| differs(expected[i], bits[i])) else {
            return Ok(report);
        };
        let mismatches = count(&expected, &bits);
        let (m, n) = (first / self.config.size_n, first % self.config.size_n);
        report.verdict = Verdict::Fail;
        report.mismatches = mismatches;
        report.equal_bits = Some((bits.len() - mismatches) as f64 / bits.len() as f64);
        report.note = Some(format!(
            "first mismatch: row {m}, n {n}, block {:?}",
            [m / self.config.packing.mr, n / self.config.packing.nr,]
        ));
        report.first_mismatch = Some(Mismatch::element(
            vec![m, n],
            ty.size_bits(),
            None,
            Some(n),
            expected[first],
            bits[first],
        ));
        let candidates = self.y_candidates(&rows, &columns, own);
        report.diagnosis = best(&candidates, mismatches, |made: &Vec<u32>| {
            (count(made, &expected) > 0 && made.len() == bits.len()).then(|| count(made, &bits))
        });
        Ok(report)
    }
}

fn is_nan(ty: crate::scalar::ScalarType, bits: u32) -> bool {
    ty.to_f64(bits).is_nan()
}

/// The candidate that leaves fewest of `mismatches` unexplained, when that is at most a tenth.
/// `unexplained` is `None` for one that changes nothing.
fn best<T>(
    candidates: &[Candidate<'_, T>],
    mismatches: usize,
    unexplained: impl Fn(&T) -> Option<usize>,
) -> Option<Diagnosis> {
    let mut best: Option<Diagnosis> = None;
    for candidate in candidates {
        let Some(left) = (candidate.make)().and_then(|made| unexplained(&made)) else { continue };
        if best.as_ref().is_none_or(|b| left < b.unexplained) {
            let (id, text) = (candidate.id.to_owned(), candidate.text.to_owned());
            best = Some(Diagnosis { id, text, unexplained: left });
        }
        if left == 0 {
            break;
        }
    }
    best.filter(|b| b.unexplained * 10 <= mismatches)
}
