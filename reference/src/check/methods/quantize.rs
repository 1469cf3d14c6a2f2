//! Activations to NVFP4. The definition has one result; a kernel with a GPU's reciprocal instruction
//! gives neighbours of it, which are accepted where one set of reciprocals explains all codes.

use super::{Computation, Expected, Form, Mistake, known, passing};
use crate::Result;
use crate::case::{Case, Fp4QuantConfig, Reciprocal};
use crate::check::compare::{Elements, Rows};
use crate::check::{Diagnosis, OutputReport, Verdict};
use crate::layout::Layout as _;
use crate::moe::widen;
use crate::quantize::{nvfp4, nvfp4_kernel_difference, nvfp4_ties_away, with_ties_away};
use crate::scalar::ScalarType;
use crate::tensor::DType;
use crate::weight::{Table, TableData};

/// `scaled_fp4_quant`.
#[derive(Debug, Clone)]
pub(super) struct Quantization {
    config: Fp4QuantConfig,
    x: Vec<f32>,
    global_scale: f32,
    swizzled: bool,
    swap: bool,
}

impl Quantization {
    pub(super) fn new(case: &Case<'_>, c: &Fp4QuantConfig) -> Result<Self> {
        let x = case.input("x")?.elements::<u16>();
        Ok(Self {
            config: c.clone(),
            x: x.iter().map(|&bits| widen(c.dtype, bits)).collect(),
            global_scale: case.input("input_global_scale")?.elements::<f32>()[0],
            swizzled: c.is_sf_swizzled_layout,
            swap: false,
        })
    }

    /// Two codes a byte, even k low.
    fn bytes(&self, codes: &[u8]) -> Elements {
        let [low, high] = if self.swap { [1, 0] } else { [0, 1] };
        codes.chunks_exact(2).map(|p| u32::from(p[low] | p[high] << 4)).collect()
    }

    /// The scales `[M, K / 16]` as the case has them.
    fn stored_scales(&self, scales: Vec<u8>) -> Result<Elements> {
        let (m, groups) = (self.config.size_m, self.config.size_k / 16);
        let table = Table::new(ScalarType::FLOAT8_E4M3FN, m, groups, TableData::B8(scales))?;
        let layout = self.config.layout()?;
        Ok(match (self.swizzled, self.config.is_sf_swizzled_layout) {
            (true, _) => layout.pack(&table.transposed())?.iter_bits().collect(),
            (false, false) => table.iter_bits().collect(),
            (false, true) => {
                let [rows, cols] = layout.packed_shape();
                let mut out = vec![0; rows * cols];
                for (i, bits) in table.iter_bits().enumerate() {
                    out[i / groups * cols + i % groups] = bits;
                }
                out
            }
        })
    }

    /// The scales row by row, from the case's.
    ///
    /// # Errors
    /// [`crate::Error::Value`] where padding is not zero.
    fn plain_scales(&self, found: &[u8]) -> Result<Vec<u8>> {
        if !self.config.is_sf_swizzled_layout {
            return Ok(found.to_vec());
        }
        let layout = self.config.layout()?;
        let [rows, cols] = layout.packed_shape();
        let data = TableData::B8(found.to_vec());
        let table = Table::new(ScalarType::FLOAT8_E4M3FN, rows, cols, data)?;
        layout.expect_zero_padding(&table)?;
        Ok(layout.unpack(&table)?.transposed().iter_bits().map(|b| b as u8).collect())
    }
}

impl Computation for Quantization {
    fn outputs(&self) -> Result<Vec<Expected>> {
        let (m, k) = (self.config.size_m, self.config.size_k);
        let (codes, scales) = nvfp4(&self.x, k, self.global_scale)?;
        let swizzled = self.config.is_sf_swizzled_layout;
        let layout = self.config.layout()?;
        let [rows, cols] = layout.packed_shape();
        let form = match swizzled {
            false => Form::lines(Rows::Group, [k / 16, m], 8, None),
            true => Form {
                layout: Box::new(layout),
                matrix: [cols, rows],
                inside: [k / 16, m],
                ..Form::lines(Rows::Group, [cols, rows], 8, None)
            },
        };
        Ok(vec![
            Expected {
                name: "x_fp4".to_owned(),
                dtype: DType::U8,
                shape: vec![m, k / 2],
                elements: self.bytes(&codes),
                form: Form::lines(Rows::K, [k, m], 4, None),
            },
            Expected {
                name: "x_scale".to_owned(),
                dtype: DType::F8E4M3,
                shape: if swizzled { vec![rows, cols] } else { vec![m, k / 16] },
                elements: self.stored_scales(scales)?,
                form,
            },
        ])
    }

    fn mistakes() -> Vec<Mistake<Self>> {
        known! {
            "global-scale-inverted", "x was divided by the global scale where it is multiplied" =>
                |c| c.global_scale = 1.0 / c.global_scale;
            "global-scale-missing", "the global scale was not applied" => |c| c.global_scale = 1.0;
            "scales-not-swizzled", "the scales are not interleaved in tiles of 128 x 4" =>
                |c| c.swizzled = false;
            "nibble-order", "the nibbles of each byte are exchanged: even k in the high nibble" =>
                |c| c.swap = true;
            "rows-of-magnitudes", "the signs were lost" =>
                |c| c.x.iter_mut().for_each(|x| *x = x.abs());
        }
    }
}

/// Both outputs: the definition's bits, or, unless the case declares exact reciprocals, those of a
/// kernel with the reciprocal instruction.
pub(super) fn judge(case: &Case<'_>, q: &Quantization) -> Result<Vec<OutputReport>> {
    let mut reports = super::judge(case, q)?;
    let exact = reports.iter().all(|r| r.verdict == Verdict::Pass);
    if exact || q.config.reciprocal == Some(Reciprocal::Exact) {
        return Ok(reports);
    }
    let (Some(fp4), Some(scale)) = (case.output("x_fp4"), case.output("x_scale")) else {
        return Ok(reports);
    };
    // Kernels differ in codes alone, never in scales or padding.
    let Ok(scales) = q.plain_scales(scale.bytes()) else { return Ok(reports) };
    let codes: Vec<u8> = fp4.bytes().iter().flat_map(|b| [b & 15, b >> 4]).collect();
    let k = q.config.size_k;
    let kernel = nvfp4_kernel_difference(&q.x, k, q.global_scale, &codes, &scales)?;
    let declared = q.config.reciprocal == Some(Reciprocal::Approximate);
    let away = match kernel {
        // All else must be the definition's.
        Some(_) => {
            let (exact, exact_scales) = nvfp4(&q.x, k, q.global_scale)?;
            scales == exact_scales && codes == with_ties_away(&q.x, q.global_scale, &exact, &scales)
        }
        None => !declared && nvfp4_ties_away(&q.x, q.global_scale, &codes, &scales),
    };
    let failed = reports.iter_mut().filter(|r| r.verdict == Verdict::Fail);
    if away {
        failed.for_each(|report| ties_away(report, kernel.is_none()));
        return Ok(reports);
    }
    if let Some(difference) = kernel {
        let note =
            format!("nor does rcp.approx.ftz.f32 for the reciprocals give this: {difference}");
        failed.for_each(|r| r.note = Some(note.clone()));
        return Ok(reports);
    }
    for report in failed {
        let equal = report.equal_bits;
        let note = "not the definition's bits; a kernel whose reciprocal is rcp.approx.ftz.f32 \
                    gives them";
        let made = passing(&report.name, report.elements, Some(note.to_owned()));
        *report = OutputReport { equal_bits: equal, ..made };
    }
    Ok(reports)
}

/// Names the mistake; `chance` says that approximate reciprocals may give the same.
fn ties_away(report: &mut OutputReport, chance: bool) {
    let text = "values between two codes went away from zero, not to the even code";
    report.diagnosis = Some(Diagnosis::explains("ties-away", text));
    if chance {
        let note = "a kernel with approximate reciprocals may give this by chance: declare \
                    `\"reciprocal\": \"approximate\"` if this one has them";
        report.note = Some(note.to_owned());
    }
}
