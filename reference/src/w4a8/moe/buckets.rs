//! Slots sorted by expert.

use super::super::MAX_ROWS;
use super::super::buffer::{Span, grow};
use super::super::panel::{panel_start, panels};

/// An expert's slots: positions `first` to `first + count` of [`Buckets::slots`].
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Bucket {
    /// The expert's local index.
    pub(super) local: usize,
    /// Its positions.
    pub(super) rows: Span,
    /// Its panels: positions in [`Buckets::panels`].
    pub(super) panels: Span,
}

/// Rows of one panel.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct PanelRows {
    /// Positions in [`Buckets::slots`].
    pub(super) rows: Span,
    /// Index in [`Buckets::all`].
    pub(super) bucket: usize,
}

/// The slots (token, j) of a batch for this rank's experts, sorted by global expert id and then by
/// slot, and divided into panels. The memory grows and is reused.
#[derive(Debug, Clone, Default)]
pub(super) struct Buckets {
    slots: Vec<usize>,
    all: Vec<Bucket>,
    panels: Vec<PanelRows>,
    /// First the slots per expert, then the position of the expert's next slot.
    counts: Vec<usize>,
}

impl Buckets {
    /// Reserves memory for `slots` slots and `experts` experts.
    pub(super) fn reserve(&mut self, slots: usize, experts: usize) {
        grow(&mut self.slots, slots);
        grow(&mut self.counts, experts);
        let most = experts.min(slots);
        self.all.reserve(most.saturating_sub(self.all.len()));
        // Each expert may have one partial panel.
        let panels = most + slots / MAX_ROWS;
        self.panels.reserve(panels.saturating_sub(self.panels.len()));
    }

    /// Sorts slots with these expert ids; `local` returns an expert's local index, if it has one. The
    /// ids have been checked: −1 means no expert, others are below `experts`.
    pub(super) fn fill(
        &mut self,
        topk_ids: &[i32],
        experts: usize,
        local: impl Fn(usize) -> Option<usize>,
    ) {
        self.reserve(topk_ids.len(), experts);
        self.counts[..experts].fill(0);
        for expert in topk_ids.iter().filter_map(|&id| usize::try_from(id).ok()) {
            self.counts[expert] += 1;
        }
        self.all.clear();
        self.panels.clear();
        let mut first = 0;
        for expert in 0..experts {
            let count = std::mem::replace(&mut self.counts[expert], usize::MAX);
            let Some(local) = local(expert).filter(|_| count > 0) else { continue };
            let panels = Span { first: self.panels.len(), count: panels(count) };
            for panel in 0..panels.count {
                let [from, to] = [panel, panel + 1].map(|panel| panel_start(count, panel));
                let rows = Span { first: first + from, count: to - from };
                self.panels.push(PanelRows { rows, bucket: self.all.len() });
            }
            self.all.push(Bucket { local, rows: Span { first, count }, panels });
            self.counts[expert] = first;
            first += count;
        }
        for (slot, &id) in topk_ids.iter().enumerate() {
            let Ok(expert) = usize::try_from(id) else { continue };
            let next = &mut self.counts[expert];
            if *next != usize::MAX {
                self.slots[*next] = slot;
                *next += 1;
            }
        }
    }

    /// Experts with slots, ascending by global id.
    pub(super) fn all(&self) -> &[Bucket] {
        &self.all
    }

    /// Panels, in the order of their rows.
    pub(super) fn panels(&self) -> &[PanelRows] {
        &self.panels
    }

    /// Number of slots of local experts.
    pub(super) fn rows(&self) -> usize {
        self.all.last().map_or(0, |b| b.rows.first + b.rows.count)
    }

    /// Rows of a panel on average, rounded up.
    pub(super) fn rows_per_panel(&self) -> usize {
        self.rows().div_ceil(self.panels.len().max(1)).max(1)
    }

    /// Number of slots over those of the largest expert, rounded up.
    pub(super) fn even(&self) -> usize {
        let most = self.all.iter().map(|b| b.rows.count).max();
        most.map_or(0, |most| self.rows().div_ceil(most))
    }

    /// Whether an expert has more than one panel.
    pub(super) fn reuse(&self) -> bool {
        self.panels.len() > self.all.len()
    }

    /// The slot at a position.
    pub(super) fn slot(&self, position: usize) -> usize {
        self.slots[position]
    }

    /// The first row of panel `i`, or of what follows the last one.
    pub(super) fn panel_start(&self, i: usize) -> usize {
        self.panels.get(i).map_or(self.rows(), |p| p.rows.first)
    }
}
