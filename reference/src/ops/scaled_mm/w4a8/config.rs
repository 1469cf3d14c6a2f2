//! Keys, tensors and generated cases of `cutlass_w4a8_mm`.

use serde_json::{Value, json};

use super::{W4a8Mm, judge};
use crate::Result;
use crate::judge::{Declared, OutputReport};
use crate::num::scalar::ScalarType;
use crate::num::tensor::{DType, Tensor};
use crate::ops::case::Case;
use crate::ops::computation::{Defined, ids};
use crate::ops::draw::{Rng, activation_bits, any_bits, e4m3, fields, small};
use crate::ops::quant::keys::schedule_json;
use crate::ops::schema::{CaseError, Demand, Inputs, Reader, TensorRule, finite, positive, stored};
use crate::ops::tensors::{E4M3, F32, HALF, HALF_TYPES, I32, half, input, is, output, whole};
use crate::ops::w8a8_fp8::{read_convention, schedules};
use crate::ops::{CaseConfig, Operation};
use crate::products::schedule::{Fp8Kernel, Schedule, ScheduleChoice};

/// The group size of upstream's kernel.
const GROUP: usize = 128;

/// Config of `cutlass_w4a8_mm`: e4m3fn activations and an int4 weight in groups, as vLLM 0.21.0's
/// `CutlassW4A8LinearKernel` prepares it.
///
/// in: `a` `[M, K]` e4m3fn, `a_scales` `[M, 1]`; `weight_packed` `[N, K / 8]` int32 and `weight_scale`
/// `[N, K / group_size]`, both as in the checkpoint. out: `weight_scale` `[N, K / group_size]` e4m3fn and
/// `weight_chan_scale` `[N, 1]`, the scales that the weight is prepared with; `y` `[M, N]`.
///
/// y = a_scales · weight_chan_scale · Σ a · e4m3(q · weight_scale).
#[derive(Debug, Clone, PartialEq)]
pub struct W4a8MmConfig {
    /// Type of the checkpoint's scales and of y; upstream's kernel has bf16 alone.
    pub dtype: ScalarType,
    /// Rows.
    pub size_m: usize,
    /// Columns.
    pub size_n: usize,
    /// Multiple of 8 and of the group size.
    pub size_k: usize,
    /// k of a group; upstream's kernel has 128 alone.
    pub group_size: usize,
    /// Schedule of `y`, if its bits are declared.
    pub schedule: Option<ScheduleChoice>,
}

impl Operation for W4a8MmConfig {
    fn keys() -> &'static [&'static str] {
        &["dtype", "size_m", "size_n", "size_k", "group_size", "schedule", "convention"]
    }

    fn read(r: &Reader<'_>) -> Result<Self, CaseError> {
        read_convention(r)?;
        let config = Self {
            dtype: r.name("dtype", HALF_TYPES)?,
            size_m: r.count("size_m")?,
            size_n: r.size("size_n")?,
            size_k: r.size("size_k")?,
            group_size: r.optional_size("group_size")?.unwrap_or(GROUP),
            schedule: r.schedule("schedule")?,
        };
        whole(r, "size_k", config.size_k, 8)?;
        whole(r, "size_k", config.size_k, config.group_size)?;
        Ok(config)
    }

    fn json(&self) -> Value {
        json!({
            "dtype": self.dtype.name(), "size_m": self.size_m, "size_n": self.size_n,
            "size_k": self.size_k, "group_size": self.group_size,
            "schedule": self.schedule.as_ref().map(schedule_json),
        })
    }

    fn tensors(&self, _experts: usize) -> Result<Vec<TensorRule>> {
        let (m, n, k) = (is(self.size_m), is(self.size_n), is(self.size_k));
        let half = [stored(self.dtype)];
        let groups = is(self.groups());
        Ok(vec![
            input("a", E4M3, &[m, k]),
            input("a_scales", F32, &[m, is(1)]),
            input("weight_packed", I32, &[n, is(self.size_k / 8)]),
            input("weight_scale", &half, &[n, groups]),
            output("weight_scale", E4M3, &[n, groups]),
            output("weight_chan_scale", F32, &[n, is(1)]),
            output("y", &half, &[m, n]),
        ])
    }

    fn check_inputs(&self, inputs: &Inputs<'_>) -> Result<()> {
        positive(&inputs["a_scales"])?;
        finite(&inputs["weight_scale"])
    }

    fn lattice() -> Result<Vec<Self>> {
        let mut all = Vec::new();
        for dtype in HALF {
            for schedule in schedules(dtype)?.into_iter().map(Some).chain([None]) {
                for (size_m, size_n, size_k, group_size) in
                    [(1, 16, 128, 128), (3, 24, 256, 128), (2, 8, 96, 32), (17, 40, 384, 128)]
                {
                    let schedule = schedule.clone();
                    all.push(Self { dtype, size_m, size_n, size_k, group_size, schedule });
                }
            }
        }
        Ok(all)
    }

    fn computation(&self, case: &Case<'_>) -> Result<Option<Box<dyn Defined>>> {
        Ok(Some(Box::new(W4a8Mm::new(case, self)?)))
    }

    fn mistakes() -> Vec<&'static str> {
        ids::<W4a8Mm>()
    }

    fn draw_inputs(&self, case: &mut Case<'static>, rng: &mut Rng) -> Result<()> {
        let (m, n, k) = (self.size_m, self.size_n, self.size_k);
        case.add_input("a", e4m3(rng, vec![m, k])?);
        case.add_input("a_scales", small(rng, vec![m, 1])?);
        case.add_input("weight_packed", any_bits(rng, DType::I32, vec![n, k / 8])?);
        let (_, mantissa) = fields(self.dtype);
        // A group far below its column's largest has a scale below e4m3's normal numbers.
        let scale = |rng: &mut Rng| match (activation_bits(rng, self.dtype), rng.below(12)) {
            (_, 0) => 0,
            (bits, 1 | 2) => bits - (6 << mantissa),
            (bits, _) => bits,
        };
        let scales = (0..n * self.groups()).map(|_| scale(rng)).collect();
        let scales = Tensor::from_vec("", half(self.dtype), vec![n, self.groups()], scales)?;
        case.add_input("weight_scale", scales);
        Ok(())
    }

    fn demands(&self, case: &Case<'_>) -> Result<Vec<Demand>> {
        let product = Demand::product(self.size_m, self.size_n, self.size_k);
        Ok(case.output("y").map(|_| product).into_iter().collect())
    }

    fn judge(&self, case: &Case<'_>, declared: &Declared) -> Result<Vec<OutputReport>> {
        judge(case, &W4a8Mm::new(case, self)?, declared)
    }

    fn fixes_every_bit(&self) -> bool {
        self.schedule.is_some()
    }

    fn with_k_cut_otherwise(&self) -> Option<CaseConfig> {
        let schedule = Schedule::w8a8_fp8(Fp8Kernel::Triton, self.dtype, true).ok()?;
        let schedule = Some(ScheduleChoice::Given(Box::new(schedule)));
        Some(Self { schedule, ..self.clone() }.into())
    }

    fn with_one_row(&self) -> Option<(CaseConfig, &'static [&'static str])> {
        Some((Self { size_m: 1, ..self.clone() }.into(), &["a", "a_scales"]))
    }
}

impl W4a8MmConfig {
    /// Scales of a column.
    fn groups(&self) -> usize {
        self.size_k / self.group_size
    }
}
