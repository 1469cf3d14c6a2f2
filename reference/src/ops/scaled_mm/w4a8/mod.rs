//! A product of e4m3fn activations and an int4 weight in groups, prepared for an e4m3 unit.

mod config;

pub use config::W4a8MmConfig;

use super::{Fp8Mm, report};
use crate::Result;
use crate::judge::compare::{Rows, elements};
use crate::judge::{Declared, OutputReport, Verdict};
use crate::num::dims::{GroupSize, Shape};
use crate::num::scalar::ScalarType;
use crate::num::tensor::DType;
use crate::ops::case::Case;
use crate::ops::computation::{Computation, Expected, Form, Mistake, codes, judge_some, known};
use crate::ops::fp8_blocks::transposed;
use crate::ops::scaled_mm::Fp8MmConfig;
use crate::ops::w8a8_fp8::{E4M3_TYPE, better_diagnosis_among, with_promotion, without_promotion};
use crate::prepare::w4a8_fp8::PreparedScales;
use crate::products::schedule::{Fp8Kernel, Schedule};
use crate::weight::{Codes, Groups, Table, Weight};

/// `cutlass_w4a8_mm` with the preparation of its weight.
#[derive(Debug, Clone)]
struct W4a8Mm {
    config: W4a8MmConfig,
    /// `[M, K]`.
    a: Vec<u32>,
    /// `[M]`.
    a_scales: Vec<f32>,
    /// int4 codes plus 8, with the checkpoint's scales.
    weight: Weight<'static>,
    scales: PreparedScales,
    schedule: Schedule,
}

impl W4a8Mm {
    fn new(case: &Case<'_>, c: &W4a8MmConfig) -> Result<Self> {
        let shape = Shape::new(c.size_k, c.size_n);
        let weight = Weight {
            name: "in.weight_packed".to_owned(),
            ty: ScalarType::UINT4B8,
            codes: codes(case.input("weight_packed")?, 4, shape)?,
            scales: Table::from_tensor(case.input("weight_scale")?, c.dtype)?.transposed(),
            zeros: None,
            groups: Groups::Uniform(GroupSize::Of(c.group_size)),
            global_scale: None,
            bias: None,
        };
        let scales = PreparedScales::of(&weight)?;
        let schedule = match &c.schedule {
            Some(choice) => {
                let made = scales.apply(&weight)?;
                choice.resolve(std::slice::from_ref(&made), c.dtype, E4M3_TYPE)?
            }
            // The kernel multiplies by the token's scale first: CUTLASS's epilogue of the transposed
            // product.
            None => Schedule::w8a8_fp8(Fp8Kernel::Triton, c.dtype, false)?,
        };
        Ok(Self {
            config: c.clone(),
            a: elements(case.input("a")?),
            a_scales: case.input("a_scales")?.elements::<f32>().into_owned(),
            weight,
            scales,
            schedule,
        })
    }

    /// The product of the prepared weight.
    fn product(&self) -> Result<Fp8Mm> {
        let c = &self.config;
        let config = Fp8MmConfig {
            dtype: c.dtype,
            size_m: c.size_m,
            size_n: c.size_n,
            size_k: c.size_k,
            per_act_token_quant: true,
            per_out_ch_quant: true,
            block: None,
            has_bias: false,
            schedule: c.schedule.clone(),
        };
        Ok(Fp8Mm {
            config,
            a: self.a.clone(),
            a_scales: self.a_scales.clone(),
            weight: self.scales.apply(&self.weight)?,
            schedule: self.schedule.clone(),
        })
    }

    /// The scales that the weight is prepared with, in file order.
    fn prepared(&self) -> [Expected; 2] {
        let [size_n, groups] = [self.config.size_n, self.weight.scales.rows()];
        let codes = Expected {
            name: "weight_scale".to_owned(),
            dtype: DType::F8E4M3,
            shape: vec![size_n, groups],
            elements: self.scales.group_codes().into_iter().map(u32::from).collect(),
            form: Form::lines(Rows::Group, [groups, size_n], 8, None),
        };
        [codes, Expected::floats("weight_chan_scale", &[size_n, 1], &self.scales.columns)]
    }

    /// Replaces the code at (k, n) by that of `from`.
    fn recode(&mut self, from: impl Fn(&Codes<'_>, usize, usize) -> u8) {
        let own = &self.weight.codes;
        if let Ok(codes) = Codes::from_fn(4, self.weight.shape(), |k, n| from(own, k, n)) {
            self.weight.codes = codes;
        }
    }
}

impl Computation for W4a8Mm {
    fn outputs(&self) -> Result<Vec<Expected>> {
        let mut all: Vec<Expected> = self.prepared().into();
        all.extend(self.product()?.outputs()?);
        Ok(all)
    }

    fn mistakes() -> Vec<Mistake<Self>> {
        known! {
            "codes-not-signed", "the codes, stored plus 8, were read as two's complement" =>
                |c| c.recode(|codes, k, n| codes.get(k, n) ^ 8);
            "nibbles-exchanged", "high and low nibbles are exchanged" =>
                |c| c.recode(|codes, k, n| codes.get(k ^ 1, n));
            "words-reversed", "the eight codes of a word were read from the high end" =>
                |c| c.recode(|codes, k, n| codes.get(k ^ 7, n));
            "group-scale-not-rounded", "the groups' scales were not rounded to e4m3" => |c| {
                for (i, scale) in c.scales.groups.iter_mut().enumerate() {
                    let groups = c.weight.scales.rows();
                    let own = c.weight.scales.value(i % groups, i / groups) as f32;
                    *scale = own / c.scales.columns[i / groups];
                }
            };
            "eighth-missing", "the groups' scales were not divided by 8, so that products with codes \
                saturate, nor the columns' multiplied" => |c| {
                c.scales.groups.iter_mut().for_each(|s| *s *= 8.0);
                c.scales.columns.iter_mut().for_each(|s| *s /= 8.0);
            };
            "column-scale-eighth", "the columns' scales were not multiplied by 8" =>
                |c| c.scales.columns.iter_mut().for_each(|s| *s /= 8.0);
            "column-scale-missing", "the columns' scales were not applied" =>
                |c| c.scales.columns.fill(1.0);
            "column-scale-of-first-column", "the first column's scale was taken for all columns" =>
                |c| {
                    let first = c.scales.columns[0];
                    c.scales.columns.fill(first);
                };
            "group-scale-transposed", "the groups' scales [N, groups] were read as [groups, N]" =>
                |c| c.scales.groups = transposed(&c.scales.groups, c.config.size_n);
            "group-scale-of-first-group", "the scale of the first group was taken for all groups" =>
                |c| {
                    let groups = c.weight.scales.rows();
                    let rows = c.scales.groups.chunks_exact(groups);
                    c.scales.groups = rows.flat_map(|row| vec![row[0]; groups]).collect();
                };
            "group-scale-of-next-group", "each group was multiplied by the next one's scale" => |c| {
                let groups = c.weight.scales.rows();
                c.scales.groups.chunks_exact_mut(groups).for_each(|row| row.rotate_left(1));
            };
            "activation-scale-of-first-row", "the first row's scale was taken for all rows" =>
                |c| {
                    let first = c.a_scales[0];
                    c.a_scales.fill(first);
                };
            "activation-scale-inverted", "the activations' scale divides where it multiplies" =>
                |c| c.a_scales.iter_mut().for_each(|s| *s = 1.0 / *s);
            "promotion-missing", "sums were not promoted to f32, where the schedule does" =>
                |c| without_promotion(&mut c.schedule);
            "promotion-added", "sums were promoted to f32, where the schedule does not" =>
                |c| with_promotion(&mut c.schedule);
        }
    }
}

/// Compares the prepared scales bit for bit; judges `y` by the weight prepared from the case's
/// checkpoint tensors, as `cutlass_scaled_mm`.
fn judge(case: &Case<'_>, mm: &W4a8Mm, given: &Declared) -> Result<Vec<OutputReport>> {
    let mut reports = judge_some(case, mm, mm.prepared());
    if let Some(found) = case.output("y")
        && let Some(mut report) = report(case, &mm.product()?, given)?
    {
        if report.verdict == Verdict::Fail {
            // A mistake in scales that the case has right is no cause.
            let passes =
                |name: &str| reports.iter().any(|r| r.name == name && r.verdict == Verdict::Pass);
            let may_be = |mistake: &Mistake<W4a8Mm>| {
                let Some(wrong) = (mistake.make)(mm.clone()) else { return false };
                let pairs = wrong.prepared().into_iter().zip(mm.prepared());
                pairs.filter(|(o, _)| passes(&o.name)).all(|(w, r)| w.elements == r.elements)
            };
            better_diagnosis_among(&mut report, &elements(found), mm, may_be);
        }
        reports.push(report);
    }
    Ok(reports)
}
