//! A product of e4m3fn activations and an e4m3fn weight.

mod config;
mod w4a8;

pub use config::Fp8MmConfig;
pub use w4a8::W4a8MmConfig;

use crate::Result;
use crate::judge::compare::{Rows, elements};
use crate::judge::product::{Hints, Part, Stage, decoded, known};
use crate::judge::scheduled::{self, Product};
use crate::judge::{Declared, Diagnosis, OutputReport, Verdict};
use crate::num::scalar::ScalarType;
use crate::num::tensor::DType;
use crate::ops::case::Case;
use crate::ops::computation::{Computation, Expected, Form, Mistake, ids, known as list};
use crate::ops::fp8_blocks::{
    BlockSize, are_powers, block_weight, default_schedule, move_scales, scale_values, transposed,
};
use crate::ops::w8a8_fp8::{
    E4M3_TYPE, better_diagnosis, declared_as, fp8_weight, is_declared, mistaken_weights,
    with_promotion, without_promotion,
};
use crate::products::Extras as BoundExtras;
use crate::products::schedule::{Extras, Fp8BlockKernel, Fp8Kernel, Schedule};
use crate::weight::{Table, Weight};

/// `cutlass_scaled_mm`.
#[derive(Debug, Clone)]
struct Fp8Mm {
    config: Fp8MmConfig,
    /// `[M, K]`.
    a: Vec<u32>,
    /// One for each row, or `[M, groups]`.
    a_scales: Vec<f32>,
    weight: Weight<'static>,
    schedule: Schedule,
}

impl Fp8Mm {
    fn new(case: &Case<'_>, c: &Fp8MmConfig) -> Result<Self> {
        let floats = |name: &str| Ok::<_, crate::Error>(scale_values(case.input(name)?));
        let (a_scales, scales) = (floats("a_scales")?, floats("weight_scale")?);
        let (tensor, shape) = (case.input("weight")?, [c.size_n, c.size_k]);
        let (a_scales, mut weight) = match c.block {
            Some(block) => (a_scales, block_weight(tensor, &scales, shape, block)?),
            None => {
                let of_rows = a_scales.iter().copied().cycle().take(c.size_m).collect();
                (of_rows, fp8_weight(tensor, &scales, shape)?)
            }
        };
        if c.has_bias {
            weight.bias = Some(Table::from_tensor(case.input("bias")?, c.dtype)?);
        }
        let schedule = match &c.schedule {
            Some(choice) => choice.resolve(std::slice::from_ref(&weight), c.dtype, E4M3_TYPE)?,
            None if c.block.is_some() => default_schedule(c.dtype)?,
            None => Schedule::w8a8_fp8(Fp8Kernel::Cutlass, c.dtype, false)?,
        };
        let a = elements(case.input("a")?);
        Ok(Self { config: c.clone(), a, a_scales, weight, schedule })
    }

    /// Judges `y` by its bound.
    fn bounded(&self, case: &Case<'_>, given: &Declared) -> Result<Option<OutputReport>> {
        let Some(found) = case.output("y") else { return Ok(None) };
        let c = &self.config;
        let rows = (0..c.size_m).collect();
        let parts = [Part { weight: &self.weight, rows, expert: None, global: 0 }];
        let declared = Declared {
            power_of_two_scales: are_powers(&self.a_scales)
                && are_powers(&floats_of(&self.weight.scales)),
            ..declared_as(given)
        };
        let mut rows = decoded(case.input("a")?)?;
        let mut activation_scales = Some(self.a_scales.as_slice());
        if let Some(block) = c.block.filter(|_| self.weight.scales.rows() > 1) {
            rows = rows.scaled(block.k, &self.a_scales)?;
            activation_scales = None;
        }
        // Scales of rows and columns are also those of products that prepare their weight.
        let mistaken = || match c.block {
            Some(_) => mistaken_weights(self, |mm| std::slice::from_ref(&mm.weight)),
            None => Vec::new(),
        };
        let stage = Stage {
            name: "y",
            found,
            rows,
            radius: None,
            parts: &parts,
            orders: None,
            extras: BoundExtras { activation_scales, router_weights: None },
            dtype: c.dtype,
            input_dtype: Some(E4M3_TYPE),
            declared: &declared,
            top_k: None,
            hints: Hints { mistaken: Some(&mistaken), is_unpermuted: true, ..Hints::default() },
        };
        match self.config.schedule.is_some() || is_declared(given) {
            true => stage.judge().map(Some),
            false => known::judge(stage, &self.product()).map(Some),
        }
    }

    fn product(&self) -> Product<'_> {
        Product {
            x: &self.a,
            input: E4M3_TYPE,
            dtype: self.config.dtype,
            weights: std::slice::from_ref(&self.weight),
            expert_of: None,
            orders: None,
            activation_scales: Some(&self.a_scales),
            router_weights: None,
        }
    }
}

impl Computation for Fp8Mm {
    fn outputs(&self) -> Result<Vec<Expected>> {
        let c = &self.config;
        let extras = Extras { activation_scales: Some(&self.a_scales), ..Extras::default() };
        Ok(vec![Expected {
            name: "y".to_owned(),
            dtype: if c.dtype == ScalarType::FLOAT16 { DType::F16 } else { DType::BF16 },
            shape: vec![c.size_m, c.size_n],
            elements: self.schedule.execute_rows(&self.a, &self.weight, extras)?,
            form: Form::lines(Rows::List, [c.size_n, c.size_m], 16, None),
        }])
    }

    fn mistakes() -> Vec<Mistake<Self>> {
        list! {
            "promotion-missing", "sums were not promoted to f32, where the schedule does" =>
                |c| without_promotion(&mut c.schedule);
            "promotion-added", "sums were promoted to f32, where the schedule does not" =>
                |c| with_promotion(&mut c.schedule);
            "activation-scale-inverted", "the activations' scale divides where it multiplies" =>
                |c| c.a_scales.iter_mut().for_each(|s| *s = 1.0 / *s);
            "activation-scale-of-first-row", "the first row's scale was taken for all rows" =>
                |c| {
                    let first = c.a_scales[..c.a_scales.len() / c.config.size_m].to_vec();
                    c.a_scales = first.repeat(c.config.size_m);
                };
            "weight-scale-of-first-column", "the first column's scale was taken for all columns" =>
                |c| {
                    let all = BlockSize { n: 1, k: 1 };
                    move_scales(&mut c.weight, Some(all), |[_, g], _| [0, g]);
                };
            "activation-scales-transposed",
            "the activations' scales [M, groups] were read column by column, or the reverse" =>
                |c| if c.config.block.is_some() {
                    c.a_scales = transposed(&c.a_scales, c.config.size_m);
                };
            "activation-scale-of-first-group",
            "the scales of the first group of k were taken for all groups of the activations" =>
                |c| {
                    let per = c.a_scales.len() / c.config.size_m;
                    let rows = c.a_scales.chunks_exact(per);
                    c.a_scales = rows.flat_map(|row| vec![row[0]; per]).collect();
                };
            "weight-scale-transposed", "the weight's scales [blocks of N, blocks of K] were read as \
                [blocks of K, blocks of N]" =>
                |c| move_scales(&mut c.weight, c.config.block, |[b, g], [blocks, groups]| {
                    let at = g * blocks + b;
                    [at / groups, at % groups]
                });
            "weight-scale-of-first-group",
            "the scales of the first block of k were taken for all blocks of the weight" =>
                |c| move_scales(&mut c.weight, c.config.block, |[b, _], _| [b, 0]);
            "weight-scale-of-next-block", "each block of N was multiplied by the next one's scales" =>
                |c| move_scales(&mut c.weight, c.config.block, |[b, g], [blocks, _]| {
                    [(b + 1) % blocks, g]
                });
            "weight-scale-of-previous-block",
            "the last, narrower block of N was multiplied by the scales of the one before" =>
                |c| {
                    let narrow = |b: &BlockSize| !c.config.size_n.is_multiple_of(b.n);
                    let block = c.config.block.filter(narrow);
                    move_scales(&mut c.weight, block, |[b, g], [blocks, _]| {
                        [if b + 1 == blocks { b.saturating_sub(1) } else { b }, g]
                    });
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

/// The f32 values of a table.
fn floats_of(table: &Table) -> Vec<f32> {
    table.iter_bits().map(f32::from_bits).collect()
}

/// The report on `y`: bit for bit if a schedule is declared or a known one gives it, otherwise by its
/// bound.
fn report(case: &Case<'_>, mm: &Fp8Mm, given: &Declared) -> Result<Option<OutputReport>> {
    let Some(found) = case.output("y") else { return Ok(None) };
    match &mm.config.schedule {
        None => mm.bounded(case, given),
        Some(choice) => {
            let bounded = || mm.bounded(case, given);
            scheduled::judge("y", found, mm.product(), choice, bounded).map(Some)
        }
    }
}

/// Judges `y`, and names the mistake of one that fails.
fn judge(case: &Case<'_>, mm: &Fp8Mm, given: &Declared) -> Result<Vec<OutputReport>> {
    let Some(found) = case.output("y") else { return Ok(Vec::new()) };
    let report = report(case, mm, given)?;
    let mut reports: Vec<OutputReport> = report.into_iter().collect();
    for report in reports.iter_mut().filter(|r| r.verdict == Verdict::Fail) {
        let bits = elements(found);
        better_diagnosis(report, &bits, mm);
        let known = |d: &Diagnosis| ids::<Fp8Mm>().contains(&d.id.as_str());
        if mm.config.block.is_some()
            && mm.config.schedule.is_none()
            && !report.diagnosis.as_ref().is_some_and(known)
        {
            let schedule = Schedule::w8a8_fp8_blocks(Fp8BlockKernel::Triton, mm.config.dtype)?;
            better_diagnosis(report, &bits, &Fp8Mm { schedule, ..mm.clone() });
        }
    }
    Ok(reports)
}
