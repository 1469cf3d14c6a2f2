//! The configs from which FP8 layers are generated: axes, what is illegal, and a covering array.

use super::Fp8LayerConfig;
use crate::Result;
use crate::moe::activation::Activation;
use crate::num::scalar::ScalarType;
use crate::ops::axes::{Space, named, shown};
use crate::ops::expert_axes::{EXPERT_RANKS, expert_axes};
use crate::ops::fp8_blocks::{BlockSize, ScaleAxis, block_schedules};
use crate::ops::quantized_moe::QuantizedLayer;
use crate::ops::tensors::{FLAGS, HALF};
use crate::ops::w8a8_fp8::schedules;
use crate::products::schedule::{Fp8Kernel, Schedule, ScheduleChoice};
use crate::quantize::Fp8GroupRule;

/// Combinations of the values of this many axes that the lattice has.
const STRENGTH: usize = 3;

/// Which scales a config has.
const SCALES: [(&str, ScaleAxis); 6] = [
    ("tensor, tensor", (false, false, None)),
    ("token, channel", (true, true, None)),
    ("token, tensor", (true, false, None)),
    ("tensor, channel", (false, true, None)),
    ("blocks 128 x 128", (false, false, Some(BlockSize::DEEPSEEK))),
    ("blocks 32 x 32", (false, false, Some(BlockSize { n: 32, k: 32 }))),
];

/// H and I by the block: one group of k and several, and sizes that fill no instruction.
const fn sizes(block: Option<BlockSize>) -> (usize, usize) {
    match block {
        None => (160, 64),
        Some(BlockSize { k: 128, .. }) => (256, 128),
        Some(_) => (96, 64),
    }
}

/// The schedules that apply router weights, for each dtype.
fn experts_schedules() -> Result<Vec<(String, [ScheduleChoice; 2])>> {
    let [f16, bf16] = HALF;
    let mut all = Vec::new();
    let pairs = |a: Vec<ScheduleChoice>, b: Vec<ScheduleChoice>| a.into_iter().zip(b);
    for pair in pairs(schedules(f16)?, schedules(bf16)?) {
        // CUTLASS's epilogue does not apply router weights.
        let cutlass = Schedule::w8a8_fp8(Fp8Kernel::Cutlass, f16, false)?.epilogue;
        if !matches!(&pair.0, ScheduleChoice::Given(s) if s.epilogue == cutlass) {
            all.push(pair.into());
        }
    }
    for pair in pairs(block_schedules(f16)?, block_schedules(bf16)?).take(2) {
        all.push(pair.into());
    }
    let names = ["canonical", "triton", "triton, promoted", "deepgemm blocks", "triton blocks"];
    Ok(names.map(str::to_owned).into_iter().zip(all).collect())
}

/// The axes of a layer; a case has three tokens.
pub(super) fn space() -> Result<Space<Fp8LayerConfig>> {
    let layer =
        QuantizedLayer::generated(HALF[0], Activation::Silu, EXPERT_RANKS[0].1, 1, [160, 64]);
    let base = Fp8LayerConfig {
        layer,
        per_act_token_quant: false,
        per_out_ch_quant: false,
        block: None,
        quantizer: Fp8GroupRule::default(),
        use_ue8m0: false,
        schedule_w13: None,
        schedule_w2: None,
    };
    let finish = |c: &mut Fp8LayerConfig| {
        (c.layer.hidden_size, c.layer.intermediate_size) = sizes(c.block);
    };
    let set_schedule = |c: &mut Fp8LayerConfig, by_dtype: &[ScheduleChoice; 2]| {
        let schedule = by_dtype[usize::from(c.dtype == ScalarType::BFLOAT16)].clone();
        (c.schedule_w13, c.schedule_w2) = (Some(schedule.clone()), Some(schedule));
    };
    let by_group = |c: &Fp8LayerConfig| match &c.schedule_w13 {
        Some(ScheduleChoice::Given(s)) => s.group_sum.is_some_and(|sum| sum.row_scale.is_some()),
        _ => false,
    };
    let too_long = |c: &Fp8LayerConfig| match (&c.schedule_w13, c.block) {
        (Some(ScheduleChoice::Given(s)), Some(block)) => {
            s.group_sum.and_then(|sum| sum.every).is_some_and(|every| every > block.k)
        }
        _ => false,
    };
    let space = expert_axes(Space::new(base, finish), |c| &mut c.layer)
        .axis("scales", named(&SCALES), |c, &(token, channel, block)| {
            (c.per_act_token_quant, c.per_out_ch_quant, c.block) = (token, channel, block);
        })
        .axis("schedule", experts_schedules()?, set_schedule)
        .axis("quantizer", named(Fp8GroupRule::NAMED), |c, &rule| c.quantizer = rule)
        .axis("use_ue8m0", shown(FLAGS), |c, &flag| c.use_ue8m0 = flag)
        .illegal(
            "a schedule is of blocks where the scales are",
            &["scales", "schedule"],
            move |c| c.block.is_some() != by_group(c),
        )
        .illegal("a sum within a block is no longer than it", &["scales", "schedule"], too_long)
        .illegal("only groups have a rule, and UE8M0 scales", &["scales", "quantizer"], |c| {
            c.block.is_none() && c.quantizer != Fp8GroupRule::default()
        })
        .illegal("only groups have a rule, and UE8M0 scales", &["scales", "use_ue8m0"], |c| {
            c.block.is_none() && c.use_ue8m0
        });
    Ok(space)
}

/// The configs of the covering array.
pub(super) fn configs() -> Result<Vec<Fp8LayerConfig>> {
    Ok(space()?.configs(STRENGTH))
}
