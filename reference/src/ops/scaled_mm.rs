//! A product of e4m3fn activations and an e4m3fn weight.

use serde_json::{Value, json};

use crate::Result;
use crate::judge::compare::{Rows, elements};
use crate::judge::product::{Hints, Part, Stage, decoded};
use crate::judge::scheduled::{self, Product};
use crate::judge::{Declared, OutputReport, Verdict, known};
use crate::num::scalar::ScalarType;
use crate::num::tensor::{DType, Tensor};
use crate::ops::case::Case;
use crate::ops::computation::{Computation, Defined, Expected, Form, Mistake, ids, known as list};
use crate::ops::draw::Rng;
use crate::ops::draw::activation_bits;
use crate::ops::draw::{e4m3, small};
use crate::ops::quant::keys::schedule_json;
use crate::ops::schema::{CaseError, Demand, Dim, Inputs, Reader, TensorRule, positive, stored};
use crate::ops::tensors::half;
use crate::ops::tensors::{E4M3, F32, FLAGS, HALF, HALF_TYPES, input, is, output, whole};
use crate::ops::w8a8_fp8::{
    E4M3_TYPE, better_diagnosis, declared_as, fp8_weight, is_declared, other_promotion,
    scaled_mm_convention, schedules,
};
use crate::ops::{CaseConfig, Operation};
use crate::products::Extras as BoundExtras;
use crate::products::schedule::ScheduleChoice;
use crate::products::schedule::{Extras, Fp8Kernel, Schedule};
use crate::weight::{Table, Weight};

/// Config of `cutlass_scaled_mm`: a product of e4m3fn activations and an e4m3fn weight.
///
/// in: `a` `[M, K]`, `a_scales` `[1]`, or `[M, 1]` for `per_act_token_quant`; `weight` `[N, K]`,
/// `weight_scale` `[1]`, or `[N, 1]` for `per_out_ch_quant`; `bias` `[N]` if `has_bias`. out: `y`
/// `[M, N]`.
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
            "has_bias",
            "schedule",
            "convention",
        ]
    }

    fn read(r: &Reader<'_>) -> Result<Self, CaseError> {
        scaled_mm_convention(r)?;
        let config = Self {
            dtype: r.name("dtype", HALF_TYPES)?,
            size_m: r.size("size_m")?,
            size_n: r.size("size_n")?,
            size_k: r.size("size_k")?,
            per_act_token_quant: r.flag("per_act_token_quant", false)?,
            per_out_ch_quant: r.flag("per_out_ch_quant", false)?,
            has_bias: r.flag("has_bias", false)?,
            schedule: r.schedule("schedule")?,
        };
        whole(r, "size_k", config.size_k, 4)?;
        Ok(config)
    }

    fn json(&self) -> Value {
        json!({
            "dtype": self.dtype.name(), "size_m": self.size_m, "size_n": self.size_n,
            "size_k": self.size_k, "per_act_token_quant": self.per_act_token_quant,
            "per_out_ch_quant": self.per_out_ch_quant, "has_bias": self.has_bias,
            "schedule": self.schedule.as_ref().map(schedule_json),
        })
    }

    fn tensors(&self, _experts: usize) -> Result<Vec<TensorRule>> {
        let (m, n, k) = (is(self.size_m), is(self.size_n), is(self.size_k));
        let scales = |own: bool, size: Dim| if own { vec![size, is(1)] } else { vec![is(1)] };
        let half = [stored(self.dtype)];
        let mut rules = vec![
            input("a", E4M3, &[m, k]),
            input("a_scales", F32, &scales(self.per_act_token_quant, m)),
            input("weight", E4M3, &[n, k]),
            input("weight_scale", F32, &scales(self.per_out_ch_quant, n)),
            output("y", &half, &[m, n]),
        ];
        if self.has_bias {
            rules.push(input("bias", &half, &[n]));
        }
        Ok(rules)
    }

    fn check_inputs(&self, inputs: &Inputs<'_>) -> Result<()> {
        positive(&inputs["a_scales"])?;
        positive(&inputs["weight_scale"])
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
                                has_bias,
                                schedule: schedule.clone(),
                            });
                        }
                    }
                }
            }
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
        let scales = |own: bool, size| if own { vec![size, 1] } else { vec![1] };
        let (m, n, k) = (self.size_m, self.size_n, self.size_k);
        case.add_input("a", e4m3(rng, vec![m, k])?);
        case.add_input("a_scales", small(rng, scales(self.per_act_token_quant, m))?);
        case.add_input("weight", e4m3(rng, vec![n, k])?);
        case.add_input("weight_scale", small(rng, scales(self.per_out_ch_quant, n))?);
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
        let schedule = Schedule::w8a8_fp8(Fp8Kernel::Cutlass, self.dtype, true).ok()?;
        let schedule = Some(ScheduleChoice::Given(Box::new(schedule)));
        Some(Self { schedule, ..self.clone() }.into())
    }

    fn with_one_row(&self) -> Option<(CaseConfig, &'static [&'static str])> {
        let rows: &[&str] = if self.per_act_token_quant { &["a", "a_scales"] } else { &["a"] };
        Some((Self { size_m: 1, ..self.clone() }.into(), rows))
    }
}

/// `cutlass_scaled_mm`.
#[derive(Debug, Clone)]
struct ScaledMm {
    config: Fp8MmConfig,
    /// `[M, K]`.
    a: Vec<u32>,
    /// One for each row.
    a_scales: Vec<f32>,
    weight: Weight<'static>,
    schedule: Schedule,
}

impl ScaledMm {
    fn new(case: &Case<'_>, c: &Fp8MmConfig) -> Result<Self> {
        let floats = |name: &str| Ok::<_, crate::Error>(case.input(name)?.elements::<f32>());
        let a_scales = floats("a_scales")?.iter().copied().cycle().take(c.size_m).collect();
        let tensor = case.input("weight")?;
        let mut weight = fp8_weight(tensor, &floats("weight_scale")?, [c.size_n, c.size_k])?;
        if c.has_bias {
            weight.bias = Some(Table::from_tensor(case.input("bias")?, c.dtype)?);
        }
        let schedule = match &c.schedule {
            Some(choice) => choice.resolve(std::slice::from_ref(&weight), c.dtype, E4M3_TYPE)?,
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
        let declared = declared_as(given);
        let stage = Stage {
            name: "y",
            found,
            rows: decoded(case.input("a")?)?,
            radius: None,
            parts: &parts,
            orders: None,
            extras: BoundExtras { activation_scales: Some(&self.a_scales), router_weights: None },
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
        better_diagnosis(report, &elements(found), mm)?;
    }
    Ok(reports)
}
