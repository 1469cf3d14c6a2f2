//! Keys, tensors and generated cases of `cutlass_scaled_mm`.

mod lattice;

use serde_json::{Value, json};

use super::{Fp8Mm, judge};
use crate::Result;
use crate::judge::{Declared, OutputReport};
use crate::num::scalar::ScalarType;
use crate::num::tensor::Tensor;
use crate::ops::axes::Axes;
use crate::ops::case::Case;
use crate::ops::computation::{Defined, ids};
use crate::ops::draw::Rng;
use crate::ops::draw::activation_bits;
use crate::ops::draw::{e4m3, small};
use crate::ops::fp8_blocks::{
    BlockSize, Fp8Operands, SCALES, check_scales, default_schedule, draw_scales,
};
use crate::ops::quant::keys::schedule_json;
use crate::ops::schema::{CaseError, Demand, Inputs, Reader, TensorRule, finite, stored};
use crate::ops::tensors::half;
use crate::ops::tensors::{E4M3, F32, HALF_TYPES, input, is, output, whole};
use crate::ops::w8a8_fp8::read_convention;
use crate::ops::{CaseConfig, Operation};
use crate::products::schedule::ScheduleChoice;
use crate::products::schedule::{Fp8Kernel, GroupSum, Schedule};

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
        read_convention(r)?;
        let own = ["per_act_token_quant", "per_out_ch_quant"];
        let flags = [r.flag(own[0], false)?, r.flag(own[1], false)?];
        let config = Self {
            dtype: r.name("dtype", HALF_TYPES)?,
            size_m: r.count("size_m")?,
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

    fn fp8_operands(&self) -> Option<Fp8Operands> {
        let Self { dtype, size_m, size_n, size_k, block, has_bias, .. } = *self;
        let schedule = self.schedule.clone();
        Some(Fp8Operands { dtype, size_m, size_n, size_k, block, has_bias, schedule })
    }

    fn with_schedule(&self, schedule: Schedule) -> Option<CaseConfig> {
        let schedule = Some(ScheduleChoice::Given(Box::new(schedule)));
        Some(Self { schedule, ..self.clone() }.into())
    }

    fn check_inputs(&self, inputs: &Inputs<'_>) -> Result<()> {
        check_scales(&inputs["a_scales"])?;
        finite(&inputs["weight_scale"])
    }

    /// A covering array of strength 3 over [`Operation::axes`].
    fn lattice() -> Result<Vec<Self>> {
        lattice::configs()
    }

    fn axes() -> Result<Option<Axes>> {
        Ok(Some(lattice::space()?.axes()))
    }

    fn computation(&self, case: &Case<'_>) -> Result<Option<Box<dyn Defined>>> {
        Ok(Some(Box::new(Fp8Mm::new(case, self)?)))
    }

    fn mistakes() -> Vec<&'static str> {
        ids::<Fp8Mm>()
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
        judge(case, &Fp8Mm::new(case, self)?, declared)
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
        self.with_schedule(schedule)
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
}
