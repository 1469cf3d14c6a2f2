//! The configs from which FP8 products are generated: axes, what is illegal, and a covering array.

use super::Fp8MmConfig;
use crate::Result;
use crate::num::scalar::ScalarType;
use crate::ops::axes::{Space, named, shown};
use crate::ops::fp8_blocks::{BlockSize, ScaleAxis, block_schedules};
use crate::ops::tensors::{FLAGS, HALF};
use crate::ops::w8a8_fp8::schedules;
use crate::products::schedule::ScheduleChoice;

/// Combinations of the values of this many axes that the lattice has.
const STRENGTH: usize = 3;

/// Which scales a config has.
const SCALES: [(&str, ScaleAxis); 6] = [
    ("tensor, tensor", (false, false, None)),
    ("token, channel", (true, true, None)),
    ("token, tensor", (true, false, None)),
    ("tensor, channel", (false, true, None)),
    ("blocks 128 x 128", (false, false, Some(BlockSize::DEEPSEEK))),
    ("blocks 16 x 32", (false, false, Some(BlockSize { n: 16, k: 32 }))),
];

/// N and K for each number of rows: K of one instruction or block, of part of a promotion interval,
/// and of several intervals; with blocks also a narrow last block of N.
const fn sizes(size_m: usize, block: Option<BlockSize>) -> (usize, usize) {
    match (size_m, block) {
        (1, Some(block)) => (16, block.k),
        (1, None) => (16, 32),
        (3, Some(BlockSize { k: 128, .. })) => (136, 256),
        (3, _) => (24, 160),
        (_, Some(BlockSize { k: 32, .. })) => (40, 96),
        _ => (40, 384),
    }
}

/// Every schedule by dtype; `None` declares none.
fn all_schedules() -> Result<Vec<(String, [Option<ScheduleChoice>; 2])>> {
    let of = |dtype| Ok::<_, crate::Error>([schedules(dtype)?, block_schedules(dtype)?].concat());
    let [f16, bf16] = [of(HALF[0])?, of(HALF[1])?];
    let names = [
        "canonical",
        "cutlass",
        "cutlass, promoted",
        "triton",
        "triton, promoted",
        "deepgemm blocks",
        "triton blocks",
        "triton blocks, sums of 64",
    ];
    let pairs = f16.into_iter().zip(bf16).map(|(a, b)| [Some(a), Some(b)]);
    let none = ("none".to_owned(), [None, None]);
    Ok(names.map(str::to_owned).into_iter().zip(pairs).chain([none]).collect())
}

/// The axes of a product.
pub(super) fn space() -> Result<Space<Fp8MmConfig>> {
    let base = Fp8MmConfig {
        dtype: HALF[0],
        size_m: 1,
        size_n: 16,
        size_k: 32,
        per_act_token_quant: false,
        per_out_ch_quant: false,
        block: None,
        has_bias: false,
        schedule: None,
    };
    let finish = |c: &mut Fp8MmConfig| (c.size_n, c.size_k) = sizes(c.size_m, c.block);
    let group_sum = |c: &Fp8MmConfig| match &c.schedule {
        Some(ScheduleChoice::Given(schedule)) => schedule.group_sum,
        _ => None,
    };
    let lengths = [("one instruction", 1), ("part of an interval", 3), ("several intervals", 17)];
    let space = Space::new(base, finish)
        .axis("dtype", shown(HALF), |c, &ty| c.dtype = ty)
        .axis("scales", named(&SCALES), |c, &(token, channel, block)| {
            (c.per_act_token_quant, c.per_out_ch_quant, c.block) = (token, channel, block);
        })
        .axis("size_k", named(&lengths), |c, &size_m| c.size_m = size_m)
        .axis("has_bias", shown(FLAGS), |c, &flag| c.has_bias = flag)
        .axis("schedule", all_schedules()?, |c: &mut Fp8MmConfig, by_dtype| {
            c.schedule = by_dtype[usize::from(c.dtype == ScalarType::BFLOAT16)].clone();
        })
        .illegal(
            "a schedule is of blocks where the scales are",
            &["scales", "schedule"],
            move |c| {
                let by_group = group_sum(c).is_some_and(|sum| sum.row_scale.is_some());
                c.schedule.is_some() && c.block.is_some() != by_group
            },
        )
        .illegal("a sum within a block is no longer than it", &["scales", "schedule"], move |c| {
            let every = group_sum(c).and_then(|sum| sum.every);
            c.block.zip(every).is_some_and(|(block, every)| every > block.k)
        });
    Ok(space)
}

/// The configs of the covering array.
pub(super) fn configs() -> Result<Vec<Fp8MmConfig>> {
    Ok(space()?.configs(STRENGTH))
}
