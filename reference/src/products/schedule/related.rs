//! Variants of a schedule, to find the one that explains an output.

use super::{Chunks, MultiplyAdd, Order, RowScale, Rows, Schedule, Step, StepOp, Sum, WeightForm};
use super::{Cta, FP8_PROMOTION};
use crate::num::scalar::ScalarType;
use crate::weight::Weight;

/// A variant and its difference from the declared schedule.
#[derive(Debug, Clone, PartialEq)]
pub struct Related {
    /// Short name, stable across versions (`schedule-chunk-order`).
    pub id: &'static str,
    /// Description of the difference.
    pub text: String,
    /// The schedule.
    pub schedule: Schedule,
}

const ORDERS: [(Order, &str); 4] = [
    (Order::Ascending, "ascending"),
    (Order::Descending, "descending"),
    (Order::Pairwise, "pairwise"),
    (Order::Halving, "halving"),
];

impl Schedule {
    /// Schedules that differ from this one in one respect, all valid: the order or type of a
    /// reduction, the split of k, the order of k, the weights' rounding, the multiply-add of
    /// groups, the type and order of the epilogue's steps.
    pub fn related(&self, size_k: usize) -> Vec<Related> {
        let mut found = Vec::new();
        let mut add = |id, text: String, change: &dyn Fn(&mut Self)| {
            let mut schedule = self.clone();
            change(&mut schedule);
            let valid = schedule.validate().is_ok() && schedule.chunks.fit(size_k).is_ok();
            if valid && schedule != *self {
                found.push(Related { id, text, schedule });
            }
        };
        let half = self.output_type();
        for (order, name) in ORDERS {
            let text = format!("the chunks' sums were added in the order `{name}`");
            add("schedule-chunk-order", text, &|s| s.chunk_sum.order = order);
            let text = format!("the warps' sums were added in the order `{name}`");
            add("schedule-warp-order", text, &|s| {
                if let Some(stripes) = &mut s.stripes {
                    stripes.sum.order = order;
                }
            });
        }
        add("schedule-leaves", "chunks were added without leaves".to_owned(), &|s| {
            s.leaf_chunks = None;
        });
        let text = "chunks of the canonical schedule's version 1 were added in a chain".to_owned();
        add("schedule-version", text, &|s| {
            // Version 2 alone has leaves.
            if s.leaf_chunks.is_some() {
                s.chunks = Chunks::Size(Self::canonical_chunk(size_k));
                (s.leaf_chunks, s.chunk_sum) = (None, Sum::default());
            }
        });
        if half != ScalarType::FLOAT32 {
            let text = format!("the chunks' sums were added in {half}");
            add("schedule-chunk-type", text, &|s| s.chunk_sum.ty = half);
        }
        add("schedule-chunk-type", "the chunks' sums were added in float32".to_owned(), &|s| {
            s.chunk_sum.ty = ScalarType::FLOAT32;
        });
        // In a unit with few bits, the end of a chunk is a promotion.
        let promotes = |s: &Self| s.unit.find().is_ok_and(|u| u.fraction_bits < 23);
        let text = "sums were not promoted to f32: one chain in the unit over all of k".to_owned();
        add("promotion-missing", text, &|s| {
            if promotes(s) {
                s.chunks = Chunks::Whole;
            }
        });
        let text = format!("sums were promoted to f32 every {FP8_PROMOTION} k");
        add("promotion-added", text, &|s| {
            if promotes(s) {
                s.chunks = Chunks::Size(FP8_PROMOTION);
            }
        });
        add("schedule-split", "k was not split: one chain over all of it".to_owned(), &|s| {
            s.chunks = Chunks::Whole;
        });
        let lengths = std::iter::successors(Some(64usize), |n| n.checked_mul(2));
        for n in lengths.take_while(|&n| n < size_k) {
            add("schedule-split", format!("k was split into chunks of {n}"), &|s| {
                s.chunks = Chunks::Size(n);
            });
        }
        for parts in 2..=8usize {
            let step = self.unit.size_k;
            let n = size_k.div_ceil(parts).next_multiple_of(step);
            add("schedule-split", format!("k was split into chunks of {n}"), &|s| {
                s.chunks = Chunks::Size(n);
            });
        }
        if self.stripes.is_some() {
            add("schedule-warps", "warps did not share the k of a tile".to_owned(), &|s| {
                s.stripes = None;
            });
        }
        add(
            "schedule-rows",
            "k was taken in the order of storage, not by group".to_owned(),
            &|s| {
                s.rows = Rows::Stored;
            },
        );
        add("schedule-rows", "k was sorted by group".to_owned(), &|s| s.rows = Rows::ByGroup);
        add(
            "schedule-weights",
            "the scale was not part of the weight's rounding".to_owned(),
            &|s| {
                if s.weights.form == WeightForm::Rounded {
                    s.weights.form = WeightForm::Exact;
                }
            },
        );
        for (rule, text) in [
            (MultiplyAdd::Fused, "a group's scale was applied in a fused multiply-add"),
            (MultiplyAdd::Separate, "a group's product with its scale was rounded before the sum"),
            (MultiplyAdd::Integer, "the groups' integer sums were scaled and added as integers"),
        ] {
            add("schedule-multiply-add", text.to_owned(), &|s| {
                if let Some(g) = &mut s.group_sum {
                    g.multiply_add = rule;
                }
            });
        }
        for (rule, text) in [
            (RowScale::Product, "a group's sum was multiplied by the product of both scales"),
            (RowScale::First, "a group's sum was multiplied by the row's scale before the block's"),
        ] {
            add("schedule-row-scale", text.to_owned(), &|s| {
                if let Some(row_scale) = s.group_sum.as_mut().and_then(|g| g.row_scale.as_mut()) {
                    *row_scale = rule;
                }
            });
        }
        for every in [32, 64] {
            let text = format!("a group's sum was promoted to f32 every {every} k");
            add("schedule-promotion", text, &|s| {
                if let Some(sum) = &mut s.group_sum
                    && sum.row_scale.is_some()
                {
                    sum.every = Some(every);
                }
            });
        }
        let round = |s: &Self| s.epilogue.iter().position(|s| s.op == StepOp::Round);
        let text = format!("the sum was rounded to {half} before the other steps");
        add("schedule-epilogue-type", text, &|s| {
            if let Some(i) = round(s) {
                let step = s.epilogue.remove(i);
                s.epilogue.insert(0, step);
                s.epilogue.iter_mut().for_each(|s| s.ty = half);
            }
        });
        add("schedule-epilogue-type", "only the result was rounded".to_owned(), &|s| {
            if let Some(i) = round(s) {
                let step = s.epilogue.remove(i);
                s.epilogue.iter_mut().for_each(|s| s.ty = ScalarType::FLOAT32);
                s.epilogue.push(step);
            }
        });
        for (op, name) in [
            (StepOp::Bias, "bias"),
            (StepOp::RouterWeight, "router weight"),
            (StepOp::GlobalScale, "global scale"),
            (StepOp::ChannelScale, "channel scale"),
            (StepOp::ActivationScale, "activations' scale"),
        ] {
            add("schedule-step-missing", format!("the {name} was not applied"), &|s| {
                s.epilogue.retain(|s| s.op != op);
                s.chunk_steps.retain(|s| s.op != op);
                s.warp_steps.retain(|s| s.op != op);
            });
        }
        let text = "channel scale and bias were one multiply-add".to_owned();
        add("schedule-epilogue-fused", text, &|s| {
            let pair = |w: &[Step]| w[0].op == StepOp::ChannelScale && w[1].op == StepOp::Bias;
            if let Some(i) = s.epilogue.windows(2).position(pair) {
                s.epilogue[i].op = StepOp::ChannelScaleBias;
                s.epilogue.remove(i + 1);
            }
        });
        let text = "channel scale and bias were a multiply-add where upstream's kernel has one";
        add("schedule-epilogue-fused", text.to_owned(), &|s| {
            let fused = |s: &&mut Step| s.op == StepOp::ChannelScaleBias;
            if let Some(step) = s.epilogue.iter_mut().find(fused) {
                step.op = StepOp::ChannelScaleBiasMarlin;
            }
        });
        let text = "the product with the channel scale was rounded before the bias".to_owned();
        add("schedule-epilogue-fused", text, &|s| {
            let fused = [StepOp::ChannelScaleBias, StepOp::ChannelScaleBiasMarlin];
            let at = s.epilogue.iter().position(|s| fused.contains(&s.op));
            if let Some(i) = at {
                s.epilogue[i].op = StepOp::ChannelScale;
                s.epilogue.insert(i + 1, Step { op: StepOp::Bias, ..s.epilogue[i] });
            }
        });
        add("schedule-bias-last", "the bias was added after the router weight".to_owned(), &|s| {
            let at = |s: &Self, op| s.epilogue.iter().position(|s| s.op == op);
            if let (Some(bias), Some(weight)) = (at(s, StepOp::Bias), at(s, StepOp::RouterWeight))
                && bias < weight
            {
                s.epilogue[bias..=weight].rotate_left(1);
            }
        });
        found
    }
}

/// Thread blocks of upstream's kernel: k and columns of the tile, warps along k.
const CTAS: [(usize, usize, usize); 4] = [(128, 128, 4), (64, 256, 2), (64, 128, 2), (128, 64, 4)];

/// Rows of x that a block takes at a time.
const ROWS: [Option<usize>; 2] = [Some(64), Some(16)];
/// The most tiles in a run that are tried.
const MAX_RUN: usize = 16;

impl Schedule {
    /// The schedules that upstream's Marlin kernel may have used for a product with `weight`: its
    /// thread blocks, with every number of tiles that a block may get of one column of tiles.
    pub fn upstream(weight: &Weight<'_>, dtype: ScalarType, input: ScalarType) -> Vec<Related> {
        let mut found = Vec::new();
        let shape = weight.shape();
        for (tile_k, tile_n, warps_k) in CTAS {
            if !shape.size_k.is_multiple_of(tile_k) || !shape.size_n.is_multiple_of(tile_n) {
                continue;
            }
            let runs = 1..=(shape.size_k / tile_k).min(MAX_RUN);
            for (run, rows) in runs.flat_map(|run| ROWS.map(|rows| (run, rows))) {
                let cta = Cta { tile_k, tile_n, warps_k, run, rows, whole: 0 };
                let Ok(schedule) = Self::marlin(weight, dtype, input, cta) else { continue };
                let rows = rows.map_or(String::new(), |r| format!(" for {r} rows of x"));
                let text = format!(
                    "upstream's Marlin kernel computed it: tiles of {tile_k} k x {tile_n} \
                     columns{rows}, {warps_k} warps along k, {run} tiles for each block"
                );
                found.push(Related { id: "schedule-upstream", text, schedule });
            }
        }
        found
    }
}
