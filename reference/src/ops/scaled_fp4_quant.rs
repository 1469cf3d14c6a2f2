//! Quantizes activations to NVFP4. The definition has one result. A kernel with a GPU's approximate
//! reciprocal may give neighbouring codes, which are accepted if one set of reciprocals explains
//! all codes.

use bytemuck::allocation::cast_vec;
use serde_json::{Value, json};

use crate::Result;
use crate::judge::compare::{Elements, Rows};
use crate::judge::{Declared, Diagnosis, OutputReport, Verdict};
use crate::layouts::Layout as _;
use crate::layouts::block_scale::{BlockScaleLayout, ScaleTile};
use crate::moe::widen;
use crate::num::array::rows_of;
use crate::num::scalar::ScalarType;
use crate::num::tensor::{DType, Tensor};
use crate::ops::Operation;
use crate::ops::case::Case;
use crate::ops::computation::{
    Computation, Defined, Expected, Form, Mistake, bitwise, ids, known, passing,
};
use crate::ops::draw::{Rng, activations};
use crate::ops::schema::{CaseError, Inputs, Reader, TensorRule, finite, positive, stored};
use crate::ops::tensors::{
    E4M3, F32, FLAGS, HALF, HALF_TYPES, U8, input, is, name_of, output, refused, whole,
};
use crate::quantize::scaled_fp4;
use crate::weight::{Table, TableData};

/// The reciprocals of a quantizer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reciprocal {
    /// Correctly rounded.
    Exact,
    /// A GPU's `rcp.approx.ftz.f32`.
    Approximate,
}

const RECIPROCALS: &[(&str, Reciprocal)] =
    &[("exact", Reciprocal::Exact), ("approximate", Reciprocal::Approximate)];

/// Config of `scaled_fp4_quant`: activations to NVFP4 under a global scale.
///
/// in: `x` `[M, K]`, `input_global_scale` `[1]` (448 · 6 / largest value, usually). out: `x_fp4`
/// `[M, K / 2]` uint8, `x_scale` `[M, K / 16]` e4m3, or interleaved and padded where
/// `is_sf_swizzled_layout`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fp4QuantConfig {
    /// Type of x.
    pub dtype: ScalarType,
    /// Rows.
    pub size_m: usize,
    /// Columns: a multiple of 16.
    pub size_k: usize,
    /// Whether the scales are interleaved in tiles of 128 x 4.
    pub is_sf_swizzled_layout: bool,
    /// The kernel's reciprocals; `None` accepts either rule, with ties to even.
    pub reciprocal: Option<Reciprocal>,
}

impl Fp4QuantConfig {
    /// The interleaved layout of the scales.
    ///
    /// # Errors
    /// As [`BlockScaleLayout::new`]. Without rows the layout is that of one.
    pub fn layout(&self) -> Result<BlockScaleLayout> {
        let ty = ScalarType::FLOAT8_E4M3FN;
        BlockScaleLayout::new(self.size_k / 16, self.size_m.max(1), ScaleTile::Rows128, ty)
    }
}

impl Operation for Fp4QuantConfig {
    fn keys() -> &'static [&'static str] {
        &["dtype", "size_m", "size_k", "is_sf_swizzled_layout", "reciprocal"]
    }

    fn read(r: &Reader<'_>) -> Result<Self, CaseError> {
        let config = Self {
            dtype: r.name("dtype", HALF_TYPES)?,
            size_m: r.count("size_m")?,
            size_k: r.size("size_k")?,
            is_sf_swizzled_layout: r.flag("is_sf_swizzled_layout", true)?,
            reciprocal: r.optional_name("reciprocal", RECIPROCALS)?,
        };
        whole(r, "size_k", config.size_k, 16)?;
        config.layout().map_err(|e| refused(r, "size_m", config.size_m, &e))?;
        Ok(config)
    }

    fn json(&self) -> Value {
        let mut v = json!({
            "dtype": self.dtype.name(), "size_m": self.size_m, "size_k": self.size_k,
            "is_sf_swizzled_layout": self.is_sf_swizzled_layout,
        });
        if let Some(rule) = &self.reciprocal {
            v["reciprocal"] = name_of(RECIPROCALS, rule).into();
        }
        v
    }

    fn tensors(&self, _experts: usize) -> Result<Vec<TensorRule>> {
        let (m, k) = (self.size_m, self.size_k);
        let scales = match self.is_sf_swizzled_layout {
            true if m == 0 => [0, self.layout()?.packed_shape()[1]],
            true => self.layout()?.packed_shape(),
            false => [m, k / 16],
        };
        Ok(vec![
            input("x", &[stored(self.dtype)], &[is(m), is(k)]),
            input("input_global_scale", F32, &[is(1)]),
            output("x_fp4", U8, &[is(m), is(k / 2)]),
            output("x_scale", E4M3, &scales.map(is)),
        ])
    }

    fn check_inputs(&self, inputs: &Inputs<'_>) -> Result<()> {
        finite(&inputs["x"])?;
        positive(&inputs["input_global_scale"])
    }

    fn lattice() -> Result<Vec<Self>> {
        let mut all = Vec::new();
        for dtype in HALF {
            for size_m in [1, 3, 127, 128, 129] {
                for size_k in [16, 48, 64, 80] {
                    all.extend(FLAGS.map(|is_sf_swizzled_layout| Fp4QuantConfig {
                        dtype,
                        size_m,
                        size_k,
                        is_sf_swizzled_layout,
                        reciprocal: None,
                    }));
                }
            }
        }
        Ok(all)
    }

    fn computation(&self, case: &Case<'_>) -> Result<Option<Box<dyn Defined>>> {
        Ok(Some(Box::new(Quantization::new(case, self)?)))
    }

    fn mistakes() -> Vec<&'static str> {
        ids::<Quantization>()
    }

    fn draw_inputs(&self, case: &mut Case<'static>, rng: &mut Rng) -> Result<()> {
        let x = activations(rng, self.dtype, self.size_m, self.size_k)?;
        let values = x.elements::<u16>();
        let largest =
            values.iter().map(|&b| crate::moe::widen(self.dtype, b).abs()).fold(0.0, f32::max);
        // Upstream's scale, or one that makes blocks zero or saturate.
        let usual = if largest > 0.0 { 448.0 * 6.0 / largest } else { 1.0 };
        let global = usual * rng.pick(&[1.0, 1.0, 1.0, 64.0, 1.0 / 4096.0]);
        drop(values);
        case.add_input("x", x);
        let global = Tensor::from_vec("", DType::F32, vec![1], vec![global])?;
        case.add_input("input_global_scale", global);
        Ok(())
    }

    fn judge(&self, case: &Case<'_>, _declared: &Declared) -> Result<Vec<OutputReport>> {
        judge(case, &Quantization::new(case, self)?)
    }

    fn fixes_every_bit(&self) -> bool {
        false
    }
}

/// `scaled_fp4_quant`.
#[derive(Debug, Clone)]
struct Quantization {
    config: Fp4QuantConfig,
    x: Vec<f32>,
    global_scale: f32,
    swizzled: bool,
    swap: bool,
}

impl Quantization {
    fn new(case: &Case<'_>, c: &Fp4QuantConfig) -> Result<Self> {
        let x = case.input("x")?.elements::<u16>();
        Ok(Self {
            config: c.clone(),
            x: x.iter().map(|&bits| widen(c.dtype, bits)).collect(),
            global_scale: case.input("input_global_scale")?.elements::<f32>()[0],
            swizzled: c.is_sf_swizzled_layout,
            swap: false,
        })
    }

    /// Packs two codes per byte, even k in the low nibble.
    fn bytes(&self, codes: &[u8]) -> Elements {
        let [low, high] = if self.swap { [1, 0] } else { [0, 1] };
        codes.chunks_exact(2).map(|p| u32::from(p[low] | p[high] << 4)).collect()
    }

    /// The scales `[M, K / 16]` in the layout of the case.
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

    /// The scales row by row, from the layout of the case.
    ///
    /// # Errors
    /// [`crate::Error::Value`] if padding is not zero.
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

impl Quantization {
    /// The bits of the definition's codes, one to a byte, and of its scales.
    fn quantized(&self) -> Result<(Vec<u8>, Vec<u8>)> {
        let x = rows_of("x", &self.x, self.config.size_k)?;
        let (codes, scales) = scaled_fp4::quantize(x, self.global_scale)?.into_vecs();
        Ok((cast_vec(codes), cast_vec(scales)))
    }
}

impl Computation for Quantization {
    fn outputs(&self) -> Result<Vec<Expected>> {
        let (m, k) = (self.config.size_m, self.config.size_k);
        let (codes, scales) = self.quantized()?;
        let swizzled = self.config.is_sf_swizzled_layout;
        let layout = self.config.layout()?;
        let [rows, cols] = layout.packed_shape();
        let form = match swizzled {
            false => Form::lines(Rows::RowGroup, [k / 16, m], 8, None),
            true => Form {
                layout: Box::new(layout),
                matrix: [cols, rows],
                inside: [k / 16, m],
                ..Form::lines(Rows::RowGroup, [cols, rows], 8, None)
            },
        };
        Ok(vec![
            Expected {
                name: "x_fp4".to_owned(),
                dtype: DType::U8,
                shape: vec![m, k / 2],
                elements: self.bytes(&codes),
                form: Form::lines(Rows::RowK, [k, m], 4, None),
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

/// Judges both outputs: they must equal the definition or, unless the case declares exact
/// reciprocals, the result of approximate reciprocals.
fn judge(case: &Case<'_>, q: &Quantization) -> Result<Vec<OutputReport>> {
    let mut reports = bitwise(case, q)?;
    let exact = reports.iter().all(|r| r.verdict == Verdict::Pass);
    if exact || q.config.reciprocal == Some(Reciprocal::Exact) {
        return Ok(reports);
    }
    let (Some(fp4), Some(scale)) = (case.output("x_fp4"), case.output("x_scale")) else {
        return Ok(reports);
    };
    // Kernels differ only in codes, never in scales or padding.
    let Ok(scales) = q.plain_scales(scale.bytes()) else { return Ok(reports) };
    let codes: Vec<u8> = fp4.bytes().iter().flat_map(|b| [b & 15, b >> 4]).collect();
    let k = q.config.size_k;
    let x = rows_of("x", &q.x, k)?;
    let found_codes = rows_of("x_fp4", bytemuck::cast_slice(&codes), k)?;
    let found_scales = rows_of("x_scale", bytemuck::cast_slice(&scales), k / 16)?;
    let kernel = scaled_fp4::kernel_difference(x, q.global_scale, found_codes, found_scales)?;
    let declared = q.config.reciprocal == Some(Reciprocal::Approximate);
    let away = match kernel {
        // Everything else must equal the definition.
        Some(_) => {
            let (exact, exact_scales) = q.quantized()?;
            scales == exact_scales
                && codes == scaled_fp4::with_ties_away(&q.x, q.global_scale, &exact, &scales)
        }
        None => !declared && scaled_fp4::ties_away(&q.x, q.global_scale, &codes, &scales),
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

/// Names the mistake; `chance` states whether approximate reciprocals may give the same result.
fn ties_away(report: &mut OutputReport, chance: bool) {
    let text = "values between two codes went away from zero, not to the even code";
    report.diagnosis = Some(Diagnosis::explains("ties-away", text));
    if chance {
        let note = "a kernel with approximate reciprocals may give this by chance: declare \
                    `\"reciprocal\": \"approximate\"` if this one has them";
        report.note = Some(note.to_owned());
    }
}
