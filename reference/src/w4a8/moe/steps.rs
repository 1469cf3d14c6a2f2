//! The steps of a forward; see [`engine`](super::engine).

use std::marker::PhantomData;

use super::activation::Activate;
use super::buckets::{Bucket, Buckets, PanelRows};
use super::parts::Parts;
use crate::moe::layer::Routed;
use crate::w4a8::buffer::{PanelBuffer, Quantize, RowShape, Span};
use crate::w4a8::gather::{Gathered, gather};
use crate::w4a8::parallel::{Wide, for_parts};
use crate::w4a8::rows::Element;
use crate::w4a8::runs::{GRAIN, MAX_WIDTH, Runs};
use crate::w4a8::wide::{Loop, wide};
use crate::w4a8::{MAX_PANELS, MAX_ROWS, PANELS, Panel};

/// Step 1: the panels of w13's input, `input`.
pub(super) fn quantize_input<X: Element>(
    layer: &Parts<'_>,
    x: &[X],
    routed: Routed<'_>,
    buckets: &Buckets,
    (tokens, gathered): (&mut PanelBuffer, &mut Gathered),
    input: &mut PanelBuffer,
) {
    let (h, shape, panels) = (layer.hidden_size(), layer.w13.rows(), buckets.panels());
    let start = |panel| buckets.panel_start(panel);
    let grain = GRAIN / (buckets.rows_per_panel() * h);
    let ordered = layer.w13.order(0).is_some();
    if ordered || layer.router_weight_on_input {
        let values = if ordered { buckets.rows() * h } else { 0 };
        let rows =
            Wide { values: gathered.values::<X>(values), width: if ordered { h } else { 0 } };
        let parts = (input.rows_mut(buckets.rows(), shape), rows);
        for_parts(0..panels.len(), parts, grain, &start, &|i, (mut panel, gathered)| {
            let order = layer.w13.order(buckets.all()[panels[i].bucket].local);
            for m in 0..panels[i].rows.count {
                let slot = buckets.slot(panels[i].rows.first + m);
                let mut row = &x[slot / routed.top_k * h..][..h];
                if let Some(order) = order {
                    gather(order, row, &mut gathered.values[m * h..][..h]);
                    row = &gathered.values[m * h..][..h];
                }
                let weight = routed.topk_weights[slot];
                let (panel, segments) = (&mut panel, std::iter::once(row));
                match layer.router_weight_on_input {
                    true => {
                        let value = |x: X| x.widen() * weight;
                        wide(Quantize { panel, m, segments, value });
                    }
                    false => wide(Quantize { panel, m, segments, value: X::widen }),
                }
            }
        });
        return;
    }
    let count = x.len() / h;
    let parts = tokens.rows_mut(count, shape);
    for_parts(0..count, parts, GRAIN / h, &|token| token, &|token, mut panel| {
        let (panel, segments) = (&mut panel, std::iter::once(&x[token * h..][..h]));
        wide(Quantize { panel, m: 0, segments, value: X::widen });
    });
    let tokens: &PanelBuffer = tokens;
    let parts = input.rows_mut(buckets.rows(), shape);
    for_parts(0..panels.len(), parts, grain, &start, &|i, mut panel| {
        for m in 0..panels[i].rows.count {
            let token = buckets.slot(panels[i].rows.first + m) / routed.top_k;
            panel.copy(m, tokens.panel(Span { first: token, count: 1 }, shape));
        }
    });
}

/// Step 2: `activated` `[expert][run][row][column of the run]` of `input`.
pub(super) fn gate_up<A: Element>(
    layer: &Parts<'_>,
    input: &PanelBuffer,
    buckets: &Buckets,
    runs: Runs,
    activated: &mut [A],
) {
    let (w13, all, i) = (layer.w13, buckets.all(), runs.size);
    let (shape, kind) = (w13.rows(), layer.kind);
    let start = |item: usize| match all.get(item / runs.count()) {
        Some(b) => b.rows.first * i + b.rows.count * runs.start(item % runs.count()),
        None => buckets.rows() * i,
    };
    for_parts(0..all.len() * runs.count(), activated, 1, &start, &|item, part| {
        let bucket = all[item / runs.count()];
        let (from, width) = runs.get(item % runs.count());
        let panels = &buckets.panels()[bucket.panels.first..][..bucket.panels.count];
        let mut rows = part.chunks_exact_mut(width);
        with_memory(w13.panels().min(panels.len()), |gate, up| {
            for panels in panels.chunks(w13.panels()) {
                let codes = codes(input, panels, shape);
                let (codes, local) = (&codes[..panels.len()], bucket.local);
                w13.multiply(local, from..from + width, codes, gate, MAX_WIDTH);
                // Up need not begin at a block boundary.
                let columns = i + from..i + from + width;
                let before = w13.multiply(local, columns, codes, up, UP_WIDTH);
                for (m, row) in rows.by_ref().take(positions(panels).count).enumerate() {
                    let gate = &gate[m * MAX_WIDTH..][..width];
                    let up = &up[m * UP_WIDTH + before..][..width];
                    wide(Activate { kind, gate, up, out: row });
                }
            }
        });
    });
}

/// Calls `work` with memory for `panels` panels: `MAX_WIDTH` and `UP_WIDTH` values for each row. It is
/// on the stack, and zeroed, so it is not much larger than necessary.
fn with_memory(panels: usize, work: impl FnOnce(&mut [f32], &mut [f32])) {
    if panels <= PANELS {
        with_fewest(work);
    } else if panels <= FEW {
        with_few(work);
    } else {
        with_most(work);
    }
}

const FEW: usize = 4;

macro_rules! memory {
    ($name:ident, $panels:expr) => {
        /// Not inlined: callers are recursive, and their frames must stay small.
        #[inline(never)]
        fn $name(work: impl FnOnce(&mut [f32], &mut [f32])) {
            const ROWS: usize = $panels * MAX_ROWS;
            work(&mut [0.0; ROWS * MAX_WIDTH], &mut [0.0; ROWS * UP_WIDTH]);
        }
    };
}

memory!(with_fewest, PANELS);
memory!(with_few, FEW);
memory!(with_most, MAX_PANELS);

/// Positions in [`Buckets::slot`] of consecutive panels.
fn positions(panels: &[PanelRows]) -> Span {
    Span { first: panels[0].rows.first, count: panels.iter().map(|p| p.rows.count).sum() }
}

/// The panels of up to [`MAX_PANELS`] entries; the last one fills the array.
fn codes<'b>(
    buffer: &'b PanelBuffer,
    panels: &[PanelRows],
    shape: RowShape,
) -> [Panel<'b>; MAX_PANELS] {
    std::array::from_fn(|i| buffer.panel(panels[i.min(panels.len() - 1)].rows, shape))
}

/// Columns of a run that begins within a block of any layout.
const UP_WIDTH: usize = MAX_WIDTH + 16;

/// Step 3: the panels of w2's input, `inner`, of what [`gate_up`] stored.
pub(super) fn quantize_inner<A: Element>(
    layer: &Parts<'_>,
    activated: &[A],
    (buckets, runs): (&Buckets, Runs),
    gathered: &mut Gathered,
    inner: &mut PanelBuffer,
) {
    let (i, shape, panels) = (runs.size, layer.w2.rows(), buckets.panels());
    let ordered = layer.w2.order(0).is_some();
    let values = if ordered { buckets.rows() * i } else { 0 };
    let rows = Wide { values: gathered.values::<A>(values), width: if ordered { i } else { 0 } };
    let parts = (inner.rows_mut(buckets.rows(), shape), rows);
    let start = |panel| buckets.panel_start(panel);
    let grain = GRAIN / (buckets.rows_per_panel() * i);
    for_parts(0..panels.len(), parts, grain, &start, &|item, (mut panel, gathered)| {
        let rows = panels[item].rows;
        let Bucket { local, rows: bucket, .. } = buckets.all()[panels[item].bucket];
        let expert = &activated[bucket.first * i..][..bucket.count * i];
        let order = layer.w2.order(local);
        for m in 0..rows.count {
            let row = rows.first + m - bucket.first;
            let segments = (0..runs.count()).map(|run| {
                let (from, width) = runs.get(run);
                &expert[from * bucket.count + row * width..][..width]
            });
            let panel = &mut panel;
            let Some(order) = order else {
                wide(Quantize { panel, m, segments, value: A::widen });
                continue;
            };
            let to = &mut gathered.values[m * i..][..i];
            for (to, &at) in to.iter_mut().zip(order) {
                let at = u32::from_le_bytes(at) as usize;
                let (from, width) = runs.get(at / runs.width);
                *to = expert[from * bucket.count + row * width + at - from];
            }
            let segments = std::iter::once(&*to);
            wide(Quantize { panel, m, segments, value: A::widen });
        }
    });
}

/// Step 4: `sums` `[run][token][column of the run]` of `inner`. `X` is the type of the output, `A` that
/// of w2's rows.
pub(super) fn down<X: Element, A: Element>(
    layer: &Parts<'_>,
    inner: &PanelBuffer,
    routed: Routed<'_>,
    buckets: &Buckets,
    runs: Runs,
    sums: &mut [f32],
) {
    let (w2, tokens) = (layer.w2, routed.topk_ids.len() / routed.top_k);
    let shape = w2.rows();
    let (all, on_input) = (buckets.all(), layer.router_weight_on_input);
    for_parts(0..runs.count(), sums, 1, &|run| runs.start(run) * tokens, &|run, sums| {
        let (from, width) = runs.get(run);
        sums.fill(0.0);
        let most = all.iter().map(|bucket| bucket.panels.count).max().unwrap_or(0);
        with_memory(w2.panels().min(most), |tile, _| {
            for bucket in all {
                let panels = &buckets.panels()[bucket.panels.first..][..bucket.panels.count];
                for panels in panels.chunks(w2.panels()) {
                    let codes = &codes(inner, panels, shape)[..panels.len()];
                    w2.multiply(bucket.local, from..from + width, codes, tile, MAX_WIDTH);
                    let Span { first, count } = positions(panels);
                    for m in 0..count {
                        let slot = buckets.slot(first + m);
                        let sums = &mut sums[slot / routed.top_k * width..][..width];
                        let row = &tile[m * MAX_WIDTH..][..width];
                        let weight = (!on_input).then(|| routed.topk_weights[slot]);
                        wide(Add::<X, A> { sums, row, weight, types: PhantomData });
                    }
                }
            }
        });
    });
}

/// Adds one expert's row to a token's sums. Rows with a weight on the output are f32, and are added in
/// f32 for every output type.
struct Add<'a, X, A> {
    sums: &'a mut [f32],
    row: &'a [f32],
    weight: Option<f32>,
    types: PhantomData<(X, A)>,
}

impl<X: Element, A: Element> Loop for Add<'_, X, A> {
    #[inline(always)]
    fn run(self) {
        let pairs = self.sums.iter_mut().zip(self.row);
        match self.weight {
            Some(weight) => {
                for (sum, &value) in pairs {
                    *sum += A::round(value) * weight;
                }
            }
            None => {
                for (sum, &value) in pairs {
                    *sum = X::round(*sum + X::round(value));
                }
            }
        }
    }
}
