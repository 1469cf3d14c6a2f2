//! The Arm int4 path: packed activations, packed weights and the product, compared bit for bit.
//!
//! The product is judged from the packed buffers of the case, if present, so that an error is
//! reported only where it occurs.

use super::any_order::Wrong;
use super::bytes::Sources;
use super::{DynQuantArithmetic, DynQuantConfig, Packing, bound, bytes};
use crate::judge::compare::{Mismatch, elements};
use crate::judge::mistake::{Comparison, search};
use crate::judge::power::{Accepted, Power};
use crate::judge::product::measure;
use crate::judge::{Diagnosis, OutputReport, Verdict, place, plain};
use crate::num::dims::{GroupSize, Shape};
use crate::num::tensor::Tensor;
use crate::ops::case::Case;
use crate::w4a8::packed::{Columns, LhsLayout, PackedLhs, PackedRhs, QuantizedRows, RhsLayout};
use crate::w4a8::{Values, quantize, scalar};
use crate::{Error, Result};

/// The reports on every output of a `dyn_quant_linear` case.
///
/// # Errors
/// Returns an error for packings of no known kernel and for inconsistent inputs.
pub(crate) fn linear(case: &Case<'_>, c: &DynQuantConfig) -> Result<Vec<OutputReport>> {
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
        reports.push(match c.arithmetic {
            DynQuantArithmetic::Operator => sources.judge_y(case, found)?,
            DynQuantArithmetic::AnyOrder => sources.judge_bounded_y(found)?,
        });
    }
    Ok(reports)
}

/// The weights of the case's inputs.
pub(super) fn columns(case: &Case<'_>, c: &DynQuantConfig, shape: Shape) -> Result<Columns> {
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
        // Buffers of a wrong size have a separate report.
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
        // The sign and payload of a NaN depend on the processor.
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
        report.diagnosis = self.diagnose_y(&rows, &columns, own, &expected, &bits);
        Ok(report)
    }

    /// `y` of a kernel with the operator's quantization, in any order.
    fn judge_bounded_y(&self, found: &Tensor<'_>) -> Result<OutputReport> {
        let (Some(x), Some(rows)) = (&self.x, self.rows()?) else {
            return Ok(OutputReport::unchecked("y", found.len(), "`in.x` is absent"));
        };
        let (ty, size_n) = (self.config.dtype, self.config.size_n);
        let expected = scalar::product(&rows, &self.columns, ty)?.bits();
        let bounded = bound::bounds(&x.to_f32(), &rows, &self.columns, &expected, ty);
        let bits = elements(found);
        let values: Vec<f64> = bits.iter().map(|&b| ty.to_f64(b)).collect();
        let (mut report, wrong) = measure(("y", ty), bound::CLASS, &bounded, &values, &bits);
        let accepted: Vec<Accepted> = bounded.iter().map(Accepted::from).collect();
        let remedy = "compare a case with larger activations, or the operator's bits";
        report.settle(Power::of(&accepted, size_n, ty), remedy);
        let Some(&first) = wrong.first() else { return Ok(report) };
        report.first_mismatch = Some(Mismatch::element(
            vec![first / size_n, first % size_n],
            ty.size_bits(),
            None,
            Some(first % size_n),
            expected[first],
            bits[first],
        ));
        let output = Wrong { bounded: &bounded, found: &values, bits: &bits, wrong: &wrong };
        report.diagnosis = self.diagnose_any_order(&rows, &output);
        Ok(report)
    }

    /// Plain patterns such as zeros and NaN; otherwise the known mistake that gives the found bits.
    fn diagnose_y(
        &self,
        rows: &QuantizedRows,
        columns: &Columns,
        own: [bool; 2],
        expected: &[u32],
        found: &[u32],
    ) -> Option<Diagnosis> {
        let ty = self.config.dtype;
        // The sign and payload of a NaN depend on the processor.
        let same = |a: u32, b: u32| if is_nan(ty, a) && is_nan(ty, b) { a } else { b };
        let found: Vec<u32> = expected.iter().zip(found).map(|(&e, &f)| same(e, f)).collect();
        let wrong: Vec<usize> = (0..found.len()).filter(|&i| found[i] != expected[i]).collect();
        if let Some(finding) = self.constant_rows(&found, &wrong) {
            return Some(finding);
        }
        let pair = |&i: &usize| (ty.to_f64(found[i]), ty.to_f64(expected[i]));
        let pairs: Vec<(f64, f64)> = wrong.iter().map(pair).collect();
        let plain = plain::floats(&pairs, found.iter().all(|&b| ty.to_f64(b) == 0.0))
            .map(|(id, t)| Diagnosis::explains(id, t));
        // Infinities may have a known cause.
        if plain.is_some() && !pairs.iter().all(|p| p.0.is_infinite()) {
            return plain;
        }
        let candidates = self.y_candidates(rows, columns, own);
        search(candidates.iter(), |candidate| {
            let made = (candidate.make)(()).filter(|m| m.len() == found.len())?;
            let mut all = Comparison { total: found.len(), ..Comparison::default() };
            for ((&e, &f), &m) in expected.iter().zip(&found).zip(&made) {
                let m = same(e, m);
                all.exact(e, if is_nan(ty, m) { same(f, m) } else { m }, f, ty.size_bits());
            }
            (all.explained + all.broken > 0).then_some(all)
        })
        .or(plain)
        .or_else(|| {
            let shape = [found.len() / self.config.size_n, self.config.size_n];
            Some(place::diagnosis(&wrong, shape))
        })
    }

    /// NaN in exactly the rows whose activations are all equal.
    pub(super) fn constant_rows(&self, found: &[u32], wrong: &[usize]) -> Option<Diagnosis> {
        let (ty, size_n, size_k) = (self.config.dtype, self.config.size_n, self.config.size_k);
        let numbers = self.x.as_ref()?.to_f32();
        let constant: Vec<bool> =
            numbers.chunks(size_k.max(1)).map(|row| row.iter().all(|x| *x == row[0])).collect();
        plain::constant_rows(&constant, size_n, wrong, |i| ty.to_f64(found[i]).is_nan())
    }
}

fn is_nan(ty: crate::num::scalar::ScalarType, bits: u32) -> bool {
    ty.to_f64(bits).is_nan()
}
