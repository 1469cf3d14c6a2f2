//! The work that the search for a mistake may take, counted in products, not in time, so that a verdict
//! does not depend on the machine.

use std::cell::Cell;
use std::ops::RangeInclusive;

use super::Carried;
use super::list::Changed;
use crate::moe::layer::{Layer, Routed};

/// The work of a search, in multiples of the judgement's own.
const SHARE: u64 = 2;
/// The work that every search may take, so that small cases are searched to the end.
const LEAST: u64 = 1 << 20;
/// What it costs to read a weight, in products.
const READ: u64 = 4;
/// What the bound on an activation or on an addition costs, in products.
const ELEMENT: u64 = 16;

/// What is left of the work.
pub(super) struct Budget(Cell<u64>);

impl Budget {
    /// For a stage that was judged under `choices` conventions.
    pub(super) fn of(c: &Carried<'_>, right: &Changed<'_>, choices: usize) -> Self {
        let (layer, routed) = right.layer();
        let own = work((&layer, routed), c.start..=c.stage).saturating_mul(choices as u64);
        Self(Cell::new(own.saturating_mul(SHARE).max(LEAST)))
    }

    /// Takes the work of these stages, if it is left.
    pub(super) fn allows(
        &self,
        layer: (&Layer<'_>, Routed<'_>),
        stages: RangeInclusive<usize>,
    ) -> bool {
        let left = self.0.get().checked_sub(work(layer, stages));
        if let Some(left) = left {
            self.0.set(left);
        }
        left.is_some()
    }
}

/// The work of the bounds of some stages.
fn work((layer, routed): (&Layer<'_>, Routed<'_>), stages: RangeInclusive<usize>) -> u64 {
    let mut experts: Vec<i32> = routed.topk_ids.iter().copied().filter(|&id| id >= 0).collect();
    let rows = experts.len() as u64;
    experts.sort_unstable();
    experts.dedup();
    let (hidden, size_i) = (layer.hidden_size() as u64, layer.intermediate_size() as u64);
    let width = layer.activation.width_in(layer.intermediate_size()) as u64;
    let product = |of: u64| (rows + READ * experts.len() as u64).saturating_mul(of);
    let of_stage = |stage| match stage {
        0 => product(hidden * width),
        1 => rows * size_i * ELEMENT,
        2 => product(hidden * size_i),
        _ => rows * hidden * ELEMENT,
    };
    stages.map(of_stage).fold(0, u64::saturating_add)
}
