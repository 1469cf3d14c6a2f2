//! A product of int8 activations, with or without zero points, and an int8 weight.

mod config;

pub use config::{Azp, Int8MmConfig};

use crate::judge::OutputReport;
use crate::judge::compare::{Elements, Rows, elements};
use crate::judge::power::{Accepted, rejects_sample};
use crate::num::scalar::ScalarType;
use crate::num::tensor::Tensor;
use crate::ops::bounded::{self, BoundedProduct, every_bit};
use crate::ops::case::Case;
use crate::ops::computation::{Computation, Expected, Form, Mistake, bitwise, known};
use crate::ops::tensors::half;
use crate::ops::w8a8_fp8::scaled_weight;
use crate::products::{Bounded, Int8Epilogue, Int8Product};
use crate::weight::{Table, TableData, Weight};
use crate::{Error, Result};

/// Number of rows on which a missing half of k is tested.
const SAMPLE_ROWS: usize = 2;

/// An int8 matrix `[N, K]` of a file with one f32 scale, or one per output feature.
pub(super) fn int8_weight(
    tensor: &Tensor<'_>,
    scales: &[f32],
    sizes: [usize; 2],
) -> Result<Weight<'static>> {
    scaled_weight(tensor, ScalarType::INT8, scales, sizes)
}

/// How the zero points enter the sum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Correction {
    /// As the definition says.
    Subtracted,
    Added,
    Missing,
    /// Not multiplied by azp for `token`, multiplied by azp once more for `tensor`.
    OtherFactor,
    /// Subtracted twice.
    Twice,
    /// Saturating where int32 wraps.
    Saturated,
}

/// `cutlass_scaled_mm_azp`.
#[derive(Debug, Clone)]
struct Int8Mm {
    config: Int8MmConfig,
    /// `[M, K]`.
    a: Vec<i8>,
    /// `[M]`.
    a_scales: Vec<f32>,
    weight: Weight<'static>,
    /// `[M]`, empty without zero points.
    azp: Vec<i32>,
    /// `[N]`.
    azp_adj: Vec<i32>,
    epilogue: Int8Epilogue,
    correction: Correction,
    /// Whether sums wrap at 16 bits.
    narrow: bool,
    /// The type whose codes the activations are.
    unsigned: bool,
}

impl Int8Mm {
    fn new(case: &Case<'_>, c: &Int8MmConfig) -> Result<Self> {
        let floats = |name: &str| Ok::<_, Error>(case.input(name)?.elements::<f32>().into_owned());
        let scales = floats("weight_scale")?;
        let mut weight = int8_weight(case.input("weight")?, &scales, [c.size_n, c.size_k])?;
        if c.has_bias {
            weight.bias = Some(Table::from_tensor(case.input("bias")?, c.dtype)?);
        }
        let [mut azp, mut azp_adj] = [Vec::new(), Vec::new()];
        if c.azp.is_some() {
            let zeros = case.input("azp")?.elements::<i32>();
            azp = zeros.iter().copied().cycle().take(c.size_m).collect();
            azp_adj = case.input("azp_adj")?.elements::<i32>().into_owned();
        }
        Ok(Self {
            config: c.clone(),
            a: case.input("a")?.bytes().iter().map(|&b| b as i8).collect(),
            a_scales: floats("a_scales")?.iter().copied().cycle().take(c.size_m).collect(),
            weight,
            azp,
            azp_adj,
            epilogue: c.epilogue.unwrap_or(Int8Epilogue::Cutlass),
            correction: Correction::Subtracted,
            narrow: false,
            unsigned: false,
        })
    }

    fn product(&self) -> Int8Product<'_> {
        let (a, a_scales, weight) = (&self.a[..], &self.a_scales[..], &self.weight);
        let dtype = self.config.dtype;
        Int8Product { a, a_scales, weight, router_weights: None, dtype }
    }

    /// The int32 of every output that is converted to f32.
    fn sums(&self) -> Result<Vec<i32>> {
        let n = self.config.size_n;
        let mut sums = self.product().sums()?;
        if self.unsigned {
            // A code below 0 is read as 256 more.
            let more = |&a: &i8| i8::from(a < 0);
            let a: Vec<i8> = self.a.iter().map(more).collect();
            let extra = Int8Product { a: &a, ..self.product() }.sums()?;
            sums.iter_mut().zip(extra).for_each(|(s, e)| *s = s.wrapping_add(e.wrapping_mul(256)));
        }
        if self.narrow {
            sums.iter_mut().for_each(|s| *s = i32::from(*s as i16));
        }
        if self.azp.is_empty() {
            return Ok(sums);
        }
        let token = self.config.azp == Some(Azp::Token);
        for (i, sum) in sums.iter_mut().enumerate() {
            let (azp, adj) = (self.azp[i / n], self.azp_adj[i % n]);
            let factor = if token { azp } else { 1 };
            *sum = match self.correction {
                Correction::Subtracted => sum.wrapping_sub(factor.wrapping_mul(adj)),
                Correction::Added => sum.wrapping_add(factor.wrapping_mul(adj)),
                Correction::Missing => *sum,
                Correction::OtherFactor => {
                    let factor = if token { 1 } else { azp };
                    sum.wrapping_sub(factor.wrapping_mul(adj))
                }
                Correction::Twice => sum.wrapping_sub(factor.wrapping_mul(adj).wrapping_mul(2)),
                Correction::Saturated => sum.saturating_sub(factor.saturating_mul(adj)),
            };
        }
        Ok(sums)
    }

    fn bits(&self) -> Result<Elements> {
        Ok(self.product().outputs(&self.sums()?, self.epilogue))
    }
}

impl BoundedProduct for Int8Mm {
    const CLASS: &'static str = "int32 sums, f32 scales in any order";

    fn dtype(&self) -> ScalarType {
        self.config.dtype
    }

    fn size_n(&self) -> usize {
        self.config.size_n
    }

    fn bounds(&self) -> Result<Vec<Bounded>> {
        Ok(self.product().bounds(&self.sums()?))
    }

    fn rejects_half_k(&self, accepted: &[Accepted]) -> Result<Option<bool>> {
        let (rows, size_k) = (self.config.size_m.min(SAMPLE_ROWS), self.config.size_k);
        let mut half = self.clone();
        half.config.size_m = rows;
        half.a.truncate(rows * size_k);
        half.a_scales.truncate(rows);
        half.a.chunks_exact_mut(size_k).for_each(|row| row[..size_k / 2].fill(0));
        let made = half.bounds()?;
        let made = made.iter().map(Accepted::from);
        Ok(rejects_sample(self.config.dtype, made.zip(accepted.iter().copied())))
    }
}

impl Computation for Int8Mm {
    fn outputs(&self) -> Result<Vec<Expected>> {
        let c = &self.config;
        Ok(vec![Expected {
            name: "y".to_owned(),
            dtype: half(c.dtype),
            shape: vec![c.size_m, c.size_n],
            elements: self.bits()?,
            form: Form::lines(Rows::List, [c.size_n, c.size_m], 16, None),
        }])
    }

    fn mistakes() -> Vec<Mistake<Self>> {
        known! {
            "azp-added", "the zero points' term was added where it is subtracted" =>
                |c| c.correction = Correction::Added;
            "azp-missing", "the zero points' term was left out" =>
                |c| c.correction = Correction::Missing;
            "azp-factor", "azp_adj was not multiplied by azp, or, already multiplied, once more" =>
                |c| c.correction = Correction::OtherFactor;
            "azp-twice", "the zero points' term was subtracted twice" =>
                |c| c.correction = Correction::Twice;
            "azp-of-next-row", "each row has the zero point of the next one" =>
                |c| if !c.azp.is_empty() {
                    c.azp.rotate_left(1);
                };
            "azp-adj-of-first-column", "the zero points' term is that of the first column" =>
                |c| if let Some(&first) = c.azp_adj.first() {
                    c.azp_adj.fill(first);
                };
            "azp-saturates", "the zero points' term saturates where int32 wraps" =>
                |c| c.correction = Correction::Saturated;
            "azp-of-first-row", "the first row's zero point was taken for all rows" =>
                |c| if let Some(&first) = c.azp.first() {
                    c.azp.fill(first);
                };
            "azp-adj-of-next-column", "the zero points' term is that of the next column" =>
                |c| if !c.azp_adj.is_empty() {
                    c.azp_adj.rotate_left(1);
                };
            "sum-16-bits", "the integer sums wrap at 16 bits" => |c| c.narrow = true;
            "activations-unsigned", "the activations' codes were read as uint8" =>
                |c| c.unsigned = true;
            "scales-exchanged", "the scales of rows and of columns are exchanged" => |c| {
                let of_columns: Vec<f32> =
                    (0..c.config.size_n).map(|n| c.weight.scales.value(0, n) as f32).collect();
                let of_rows = c.a_scales.clone();
                let cycle = |all: &[f32], len: usize| -> Vec<f32> {
                    all.iter().copied().cycle().take(len).collect()
                };
                c.a_scales = cycle(&of_columns, c.config.size_m);
                let bits = cycle(&of_rows, c.config.size_n).iter().map(|s| s.to_bits()).collect();
                let table = TableData::B32(bits);
                if let Ok(scales) = Table::new(ScalarType::FLOAT32, 1, c.config.size_n, table) {
                    c.weight.scales = scales;
                }
            };
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
            "activation-scale-inverted", "the activations' scale divides where it multiplies" =>
                |c| c.a_scales.iter_mut().for_each(|s| *s = 1.0 / *s);
            "weight-scale-inverted", "the weight's scale divides where it multiplies" => |c| {
                let inverse = |bits| (1.0 / f32::from_bits(bits)).to_bits();
                c.weight.scales = c.weight.scales.map(ScalarType::FLOAT32, inverse);
            };
            "bias-missing", "the bias was not added" => |c| c.weight.bias = None;
        }
    }
}

/// Judges `y` bit for bit if an epilogue is declared or a known one gives it, otherwise by its bound.
fn judge(case: &Case<'_>, mm: &Int8Mm) -> Result<Vec<OutputReport>> {
    let Some(found) = case.output("y") else { return Ok(Vec::new()) };
    if mm.config.epilogue.is_some() {
        let mut reports = bitwise(case, mm)?;
        for report in &mut reports {
            report.note = Some("compared for every bit with the declared epilogue".to_owned());
        }
        return Ok(reports);
    }
    let bits = elements(found);
    let sums = mm.sums()?;
    for &(name, epilogue) in Int8Epilogue::NAMED {
        if mm.config.azp.is_some() && epilogue == Int8Epilogue::Triton {
            continue;
        }
        if mm.product().outputs(&sums, epilogue) == bits {
            let how = format!("a known kernel gives it: exact int32 sums, epilogue {name}");
            return Ok(vec![every_bit(bits.len(), &how)]);
        }
    }
    Ok(vec![bounded::judge(mm, found)?])
}
