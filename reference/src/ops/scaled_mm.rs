//! A product of e4m3fn activations and an e4m3fn weight.

use serde_json::{Value, json};

use crate::Result;
use crate::judge::compare::{Rows, elements};
use crate::judge::product::{Hints, Part, Stage, decoded};
use crate::judge::scheduled::{self, Product};
use crate::judge::{Declared, Diagnosis, OutputReport, Verdict, known};
use crate::num::scalar::ScalarType;
use crate::num::tensor::{DType, Tensor};
use crate::ops::case::Case;
use crate::ops::computation::{Computation, Defined, Expected, Form, Mistake, ids, known as list};
use crate::ops::draw::Rng;
use crate::ops::draw::activation_bits;
use crate::ops::draw::{e4m3, small};
use crate::ops::fp8_blocks::{
    BlockSize, SCALES, are_powers, block_schedules, block_weight, check_scales, default_schedule,
    draw_scales, move_scales, scale_values, transposed,
};
use crate::ops::quant::keys::schedule_json;
use crate::ops::schema::{CaseError, Demand, Inputs, Reader, TensorRule, stored};
use crate::ops::tensors::half;
use crate::ops::tensors::{E4M3, F32, FLAGS, HALF, HALF_TYPES, input, is, output, whole};
use crate::ops::w8a8_fp8::{
    E4M3_TYPE, better_diagnosis, declared_as, fp8_weight, is_declared, other_promotion,
    scaled_mm_convention, schedules,
};
use crate::ops::{CaseConfig, Operation};
use crate::products::Extras as BoundExtras;
use crate::products::schedule::ScheduleChoice;
use crate::products::schedule::{Extras, Fp8BlockKernel, Fp8Kernel, GroupSum, Schedule};
use crate::weight::{Table, Weight};

/// Config of `cutlass_scaled_mm`: a product of e4m3fn activations and an e4m3fn weight.
///
/// in: `a` `[M, K]`, `a_scales` `[1]`, or `[M, 1]` for `per_act_token_quant`; `weight` `[N, K]`,
/// `weight_scale` `[1]`, or `[N, 1]` for `per_out_ch_quant`; `bias` `[N]` if `has_bias`. out: `y`
/// `[M, N]`.
///
/// With `weight_block_size` `[n, k]`: `a_scales` `[M, K / k]`, `weight_scale` `[⌈N / n⌉, K / k]`, f32 or
/// UE8M0: the products of DeepGEMM, CUTLASS's blockwise kernels and Triton.
#[derive(Debug, Clone, PartialEq)]
pub struct Fp8MmConfig {
    /// Type of y and of the bias.
    pub dtype: ScalarType,
    /// Rows.
    pub size_m: usize,
    /// Columns.
    pub size_n: usize,
    /// Multiple of 4.
    pub size_k: usize,
    /// Whether each row has its own scale.
    pub per_act_token_quant: bool,
    /// Whether each column has its own scale.
    pub per_out_ch_quant: bool,
    /// Blocks of the weight and groups of the activations that share a scale.
    pub block: Option<BlockSize>,
    /// Whether there is a bias.
    pub has_bias: bool,
    /// Schedule of `y`, if its bits are declared.
    pub schedule: Option<ScheduleChoice>,
}

impl Operation for Fp8MmConfig {
    fn keys() -> &'static [&'static str] {
        &[
            "dtype",
            "size_m",
            "size_n",
            "size_k",
            "per_act_token_quant",
            "per_out_ch_quant",
            "weight_block_size",
            "has_bias",
            "schedule",
            "convention",
        ]
    }

    fn read(r: &Reader<'_>) -> Result<Self, CaseError> {
        scaled_mm_convention(r)?;
        let own = ["per_act_token_quant", "per_out_ch_quant"];
        let flags = [r.flag(own[0], false)?, r.flag(own[1], false)?];
        let config = Self {
            dtype: r.name("dtype", HALF_TYPES)?,
            size_m: r.size("size_m")?,
            size_n: r.size("size_n")?,
            size_k: r.size("size_k")?,
            per_act_token_quant: flags[0],
            per_out_ch_quant: flags[1],
            block: BlockSize::read(r, &[(own[0], flags[0]), (own[1], flags[1])])?,
            has_bias: r.flag("has_bias", false)?,
            schedule: r.schedule("schedule")?,
        };
        whole(r, "size_k", config.size_k, 4)?;
        BlockSize::fills(config.block, r, "size_k", config.size_k)?;
        BlockSize::fits(config.block, r, "schedule", config.schedule.as_ref())?;
        Ok(config)
    }

    fn json(&self) -> Value {
        json!({
            "dtype": self.dtype.name(), "size_m": self.size_m, "size_n": self.size_n,
            "size_k": self.size_k, "per_act_token_quant": self.per_act_token_quant,
            "per_out_ch_quant": self.per_out_ch_quant,
            "weight_block_size": BlockSize::json(self.block), "has_bias": self.has_bias,
            "schedule": self.schedule.as_ref().map(schedule_json),
        })
    }

    fn tensors(&self, _experts: usize) -> Result<Vec<TensorRule>> {
        let (m, n, k) = (is(self.size_m), is(self.size_n), is(self.size_k));
        let half = [stored(self.dtype)];
        let types = if self.block.is_some() { SCALES } else { F32 };
        let [of_rows, of_weight] = self.scale_shapes().map(|shape| shape.into_iter().map(is));
        let mut rules = vec![
            input("a", E4M3, &[m, k]),
            input("a_scales", types, &of_rows.collect::<Vec<_>>()),
            input("weight", E4M3, &[n, k]),
            input("weight_scale", types, &of_weight.collect::<Vec<_>>()),
            output("y", &half, &[m, n]),
        ];
        if self.has_bias {
            rules.push(input("bias", &half, &[n]));
        }
        Ok(rules)
    }

    fn check_inputs(&self, inputs: &Inputs<'_>) -> Result<()> {
        check_scales(&inputs["a_scales"])?;
        check_scales(&inputs["weight_scale"])
    }

    /// K of one instruction, of part of a promotion interval, and of several intervals.
    fn lattice() -> Result<Vec<Self>> {
        let mut all = Vec::new();
        for dtype in HALF {
            for schedule in schedules(dtype)?.into_iter().map(Some).chain([None]) {
                for (size_m, size_n, size_k) in [(1, 16, 32), (3, 24, 160), (17, 40, 384)] {
                    for (per_act_token_quant, per_out_ch_quant) in [(false, false), (true, true)] {
                        for has_bias in FLAGS {
                            all.push(Fp8MmConfig {
                                dtype,
                                size_m,
                                size_n,
                                size_k,
                                per_act_token_quant,
                                per_out_ch_quant,
                                block: None,
                                has_bias,
                                schedule: schedule.clone(),
                            });
                        }
                    }
                }
            }
            all.extend(Self::with_blocks(dtype)?);
        }
        Ok(all)
    }

    fn computation(&self, case: &Case<'_>) -> Result<Option<Box<dyn Defined>>> {
        Ok(Some(Box::new(ScaledMm::new(case, self)?)))
    }

    fn mistakes() -> Vec<&'static str> {
        ids::<ScaledMm>()
    }

    fn draw_inputs(&self, case: &mut Case<'static>, rng: &mut Rng) -> Result<()> {
        let (m, n, k) = (self.size_m, self.size_n, self.size_k);
        let [of_rows, of_weight] = self.scale_shapes();
        let draw = if self.block.is_some() { draw_scales } else { small };
        case.add_input("a", e4m3(rng, vec![m, k])?);
        case.add_input("a_scales", draw(rng, of_rows)?);
        case.add_input("weight", e4m3(rng, vec![n, k])?);
        case.add_input("weight_scale", draw(rng, of_weight)?);
        if self.has_bias {
            let bias = (0..n).map(|_| activation_bits(rng, self.dtype)).collect();
            case.add_input("bias", Tensor::from_vec("", half(self.dtype), vec![n], bias)?);
        }
        Ok(())
    }

    fn demands(&self, case: &Case<'_>) -> Result<Vec<Demand>> {
        let product = Demand::product(self.size_m, self.size_n, self.size_k);
        Ok(case.output("y").map(|_| product).into_iter().collect())
    }

    fn judge(&self, case: &Case<'_>, declared: &Declared) -> Result<Vec<OutputReport>> {
        judge(case, &ScaledMm::new(case, self)?, declared)
    }

    fn fixes_every_bit(&self) -> bool {
        self.schedule.is_some()
    }

    fn with_k_cut_otherwise(&self) -> Option<CaseConfig> {
        let schedule = match self.block {
            None => Schedule::w8a8_fp8(Fp8Kernel::Cutlass, self.dtype, true).ok()?,
            // A k-tile of one instruction.
            Some(_) => {
                let blocks = default_schedule(self.dtype).ok()?;
                let group_sum = blocks.group_sum.map(|sum| GroupSum { every: Some(32), ..sum });
                Schedule { group_sum, ..blocks }
            }
        };
        let schedule = Some(ScheduleChoice::Given(Box::new(schedule)));
        Some(Self { schedule, ..self.clone() }.into())
    }

    fn with_one_row(&self) -> Option<(CaseConfig, &'static [&'static str])> {
        let own_scales = self.per_act_token_quant || self.block.is_some();
        let rows: &[&str] = if own_scales { &["a", "a_scales"] } else { &["a"] };
        Some((Self { size_m: 1, ..self.clone() }.into(), rows))
    }
}

impl Fp8MmConfig {
    /// Shapes of the scales of the activations and of the weight.
    fn scale_shapes(&self) -> [Vec<usize>; 2] {
        let own = |own: bool, size| if own { vec![size, 1] } else { vec![1] };
        match self.block {
            None => [
                own(self.per_act_token_quant, self.size_m),
                own(self.per_out_ch_quant, self.size_n),
            ],
            Some(block) => {
                let [blocks, groups] = block.scales([self.size_n, self.size_k]);
                [vec![self.size_m, groups], vec![blocks, groups]]
            }
        }
    }

    /// Configs with blocks: one group, a narrow last block of N, and several of both.
    fn with_blocks(dtype: ScalarType) -> Result<Vec<Self>> {
        let mut all = Vec::new();
        let small = BlockSize { n: 16, k: 32 };
        for schedule in block_schedules(dtype)?.into_iter().map(Some).chain([None]) {
            for (size_m, size_n, size_k, block) in [
                (1, 16, 128, BlockSize::DEEPSEEK),
                (3, 136, 256, BlockSize::DEEPSEEK),
                (17, 40, 96, small),
            ] {
                let fits = |s: &ScheduleChoice| {
                    matches!(s, ScheduleChoice::Given(s)
                    if s.group_sum.and_then(|g| g.every).is_none_or(|every| every <= block.k))
                };
                if schedule.as_ref().is_some_and(|s| !fits(s)) {
                    continue;
                }
                for has_bias in FLAGS {
                    all.push(Self {
                        dtype,
                        size_m,
                        size_n,
                        size_k,
                        per_act_token_quant: false,
                        per_out_ch_quant: false,
                        block: Some(block),
                        has_bias,
                        schedule: schedule.clone(),
                    });
                }
            }
        }
        Ok(all)
    }
}

/// `cutlass_scaled_mm`.
#[derive(Debug, Clone)]
struct ScaledMm {
    config: Fp8MmConfig,
    /// `[M, K]`.
    a: Vec<u32>,
    /// One for each row, or `[M, groups]`.
    a_scales: Vec<f32>,
    weight: Weight<'static>,
    schedule: Schedule,
}

impl ScaledMm {
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

impl Computation for ScaledMm {
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
            "promotion-missing", "sums were not promoted to f32, or where the schedule does not" =>
                |c| other_promotion(&mut c.schedule);
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

/// Judges `y` bit for bit if a schedule is declared or a known one gives it, otherwise by its
/// bound.
fn judge(case: &Case<'_>, mm: &ScaledMm, given: &Declared) -> Result<Vec<OutputReport>> {
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
        let bits = elements(found);
        better_diagnosis(report, &bits, mm)?;
        let known = |d: &Diagnosis| ids::<ScaledMm>().contains(&d.id.as_str());
        if mm.config.block.is_some()
            && mm.config.schedule.is_none()
            && !report.diagnosis.as_ref().is_some_and(known)
        {
            let schedule = Schedule::w8a8_fp8_blocks(Fp8BlockKernel::Triton, mm.config.dtype)?;
            better_diagnosis(report, &bits, &ScaledMm { schedule, ..mm.clone() })?;
        }
    }
    Ok(reports)
}
