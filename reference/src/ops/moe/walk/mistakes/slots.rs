//! One slot of each wrong token by another expert, or missing.

use super::{Search, bounded};
use crate::judge::Diagnosis;
use crate::moe::layer::Routed;
use crate::moe::layer::bounds::of_tokens;
use crate::moe::sum;
use crate::num::array::{into_vec, rows_of};
use crate::num::interval::Bound;
use crate::ops::layer::carried::Values;
use crate::products::Bounded;

/// Most wrong tokens of which each slot is tried with another expert.
const TOKENS: usize = 8;

/// What fits the values of a token best.
struct Best {
    distance: f64,
    slot: usize,
    /// -1 is none.
    expert: i32,
    made: Vec<Bounded>,
}

impl Search<'_, '_> {
    /// One slot of each wrong token with another expert, or without one. The worst token is tried
    /// first, the others only if its wrong values are explained.
    pub(super) fn one_slot(&self) -> Option<Diagnosis> {
        let (right, per) = (self.right, self.per());
        let (top_k, experts) = (right.top_k.max(1), right.layer.num_experts);
        // A few wrong values of a token may have another cause.
        let counts = &self.judged.counts;
        let most = counts.iter().copied().max().unwrap_or(0);
        let bad: Vec<usize> =
            (0..counts.len()).filter(|&t| counts[t] > 0 && counts[t] * 4 >= most).collect();
        if self.c.stage < 3 || bad.len() > TOKENS {
            return None;
        }
        let worst = self.worst()?;
        let first = self.best_of(worst)?;
        if self.left(&first.made, &[worst]).1 * 8 > counts[worst] {
            return None;
        }
        let (mut texts, mut made, mut dropped) = (Vec::new(), Vec::new(), 0);
        let mut first = Some(first);
        for &t in &bad {
            let best = match first.take_if(|_| t == worst) {
                Some(first) => first,
                None => self.best_of(t)?,
            };
            let (slot, expert) = (best.slot, best.expert);
            let own = right.ids[t * top_k + slot];
            dropped += usize::from(expert < 0);
            texts.push(match expert {
                -1 => format!("token {t}, slot {slot} (expert {own}) is missing"),
                _ => format!("token {t}, slot {slot} by expert {expert} instead of {own}"),
            });
            made.extend(best.made.into_iter().enumerate().map(|(n, b)| (t * per + n, b)));
        }
        let choices = ((top_k * (experts + 1)) as f64).log2();
        let ty = self.walk.config.quant.dtype;
        let outcome = self.judged.compared(made, ty).outcome(choices * bad.len() as f64)?;
        let all_dropped = dropped == texts.len();
        texts.truncate(3);
        let texts = texts.join(", ");
        let (id, text) = match all_dropped {
            true => ("slot-dropped", format!("terms of the sum are missing: {texts}")),
            false => ("wrong-expert", format!("slots were computed by another expert: {texts}")),
        };
        Some(outcome.named(id, &text))
    }

    /// The slot and expert that fit the values of a token best.
    fn best_of(&self, token: usize) -> Option<Best> {
        let (right, per) = (self.right, self.per());
        let top_k = right.top_k.max(1);
        let ty = self.walk.config.quant.dtype;
        let experts = -1..right.layer.num_experts as i32;
        let choices: Vec<(usize, i32)> =
            (0..top_k).flat_map(|slot| experts.clone().map(move |e| (slot, e))).collect();
        let down = self.down_of(token, &choices)?;
        let own = &self.stages.get(2 - self.c.start)?[token * top_k * per..][..top_k * per];
        let shared = self.walk.shared.as_deref().map(|all| &all[token * per..][..per]);
        let mut best: Option<Best> = None;
        for (&(slot, expert), row) in choices.iter().zip(down.chunks_exact(per)) {
            if right.ids[token * top_k + slot] == expert {
                continue;
            }
            let mut rows = own.to_vec();
            rows[slot * per..][..per].copy_from_slice(row);
            let rows = of_tokens(rows_of("down", &rows, per).ok()?, top_k)
                .and_then(|rows| sum::bounds_with(rows, shared, ty).map(into_vec))
                .ok()?;
            let made: Vec<Bounded> = rows.iter().map(|bound| bounded(ty, bound)).collect();
            let found = &self.judged.found[token * per..];
            let distance = made.iter().zip(found).map(|(bound, &x)| bound.ratio(x).min(1e3)).sum();
            if best.as_ref().is_none_or(|b| distance < b.distance) {
                best = Some(Best { distance, slot, expert, made });
            }
        }
        best
    }

    /// The rows of `down` of a token's slots by these experts.
    fn down_of(&self, token: usize, choices: &[(usize, i32)]) -> Option<Vec<Bound>> {
        let (c, right, top_k) = (&self.c, self.right, self.right.top_k.max(1));
        // A token's slots share its row of x, unless router weights multiply it.
        let shared = c.start == 0 && self.walk.slots_of_x(top_k) == top_k;
        let per = c.before.len() / self.walk.config.size_m.max(1) / if shared { 1 } else { top_k };
        let row_of = |slot: usize| if shared { token } else { token * top_k + slot };
        let before = choices.iter().flat_map(|&(slot, _)| &c.before[row_of(slot) * per..][..per]);
        let ids: Vec<i32> = choices.iter().map(|choice| choice.1).collect();
        let weights: Vec<f32> =
            choices.iter().map(|&(slot, _)| right.weights[token * top_k + slot]).collect();
        let routed = Routed { top_k: 1, topk_ids: &ids, topk_weights: &weights };
        let layer = right.layer().0;
        if !self.budget.allows((&layer, routed), c.start..=c.stage) {
            return None;
        }
        let mut known = Values::Bits(before.copied().collect::<Vec<u16>>().into());
        for stage in c.start..=2 {
            known = Values::Bounds(self.walk.bounds_of(stage, &known, (layer, routed), None).ok()?);
        }
        match known {
            Values::Bounds(down) => Some(down),
            Values::Bits(_) => None,
        }
    }
}
