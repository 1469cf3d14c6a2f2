//! Tiles of k that were multiplied with the activations of another tile: a pipeline stage that was
//! read before it was written, or after it was overwritten.

use super::scene::{Scene, Setup, spread_to};
use super::terms::Terms;
use super::weigh::Scope;
use super::{Finding, better};

/// Number of columns that are examined.
const COLUMNS: usize = 4;
/// k per pipeline stage of known kernels.
const TILES: [usize; 4] = [128, 64, 32, 16];
/// Largest number of stages by which a pipeline may be off.
const STAGES: usize = 4;

/// Finds a tile of k and the tile whose activations it was multiplied with that explain the wrong
/// elements.
pub(super) fn explain(scene: &Scene<'_>) -> Option<Finding> {
    let mut terms = Vec::new();
    for bad in scene.bad.iter().take(2) {
        let columns = spread_to(&bad.main_cols, COLUMNS);
        terms.extend(columns.into_iter().filter_map(|n| Terms::new(scene, bad.part, n)));
    }
    let first = terms.first()?;
    let size_k = first.stored.len();
    let judged: usize = terms.iter().map(|t| t.judged().count()).sum();
    if judged < 3 || terms.iter().any(|t| t.stored.len() != size_k) {
        return None;
    }
    let mut fitting = Vec::new();
    let mut tried = 0usize;
    for tile in TILES.into_iter().filter(|t| size_k.is_multiple_of(*t) && size_k > *t) {
        for at in 0..size_k / tile {
            for from in at.saturating_sub(STAGES)..(at + STAGES + 1).min(size_k / tile) {
                if from == at {
                    continue;
                }
                tried += 1;
                if fits(&terms, judged, [at * tile, from * tile, tile]) {
                    fitting.push([at * tile, from * tile, tile]);
                }
            }
        }
    }
    let cost = (tried.max(1) as f64).log2();
    let mut best: Option<Finding> = None;
    for [at, from, tile] in fitting.into_iter().take(4) {
        let make = |part: usize| {
            let right = scene.right(part);
            let mut gather: Vec<u32> = match &right.gather {
                Some(gather) => gather.to_vec(),
                None => (0..size_k as u32).collect(),
            };
            gather.copy_within(from..from + tile, at);
            Some(Setup { gather: Some(gather.into()), ..right })
        };
        if let Some(outcome) = scene.weigh_scopes(Scope::of_k(scene), &make, None, cost) {
            let text = format!(
                "k {at} to {} were multiplied with the activations of k {from} to {}: a stage of \
                 the pipeline was read before it was written, as where a barrier is missing",
                at + tile - 1,
                from + tile - 1
            );
            let mut finding = Finding::of(outcome, "stale-k-tile", &text);
            finding.cause = Some(first.cause(|k| (at..at + tile).contains(&k)));
            best = better(best, finding);
        }
    }
    best
}

/// Whether a tile's products with another tile's activations explain the residual of nearly every
/// element.
fn fits(terms: &[Terms<'_>], judged: usize, [at, from, tile]: [usize; 3]) -> bool {
    let mut outliers = judged / 16;
    terms.iter().all(|terms| {
        terms.judged().all(|line| {
            let change: f64 = (0..tile)
                .map(|i| (line.x[from + i] - line.x[at + i]) * terms.weights[at + i])
                .sum();
            let change = change * line.factor;
            let fits = (line.residual - change).abs() <= 2.0 * line.tolerance;
            let outlier = !fits && outliers > 0;
            outliers -= usize::from(outlier);
            fits || outlier
        })
    })
}
