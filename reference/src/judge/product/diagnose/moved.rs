//! Exchanged columns and rows, and rows of another expert, token or slot.

use super::scene::{Routers, Scene, Setup, explains, spread_to};
use super::{Finding, best_of};
use crate::layouts::marlin::ScalePermutation;
use crate::products::Bounded;

/// Largest number of columns or rows that are examined one by one.
const LOOKED_AT: usize = 64;
/// Largest number of wrong rows that are recomputed with other inputs.
const MAX_ROWS: usize = 256;
/// Columns of each row that are compared first.
const COMPUTED: usize = 12;

/// `3 and 9 are swapped`, or the first few pairs of position and content.
fn pairs(moved: &[(usize, usize)]) -> String {
    if let [(a, from_a), (b, from_b)] = *moved
        && (from_a, from_b) == (b, a)
    {
        return format!("{a} and {b} are swapped");
    }
    let shown: Vec<_> =
        moved.iter().take(4).map(|(at, from)| format!("{at} holds {from}")).collect();
    let dots = if moved.len() > 4 { ", ..." } else { "" };
    format!("{}{dots}", shown.join(", "))
}

/// Columns n that hold the values of column n'.
pub(super) fn columns(scene: &Scene<'_>) -> Option<Finding> {
    let size_n = scene.size_n;
    let mut wrong: Vec<usize> =
        scene.bad.iter().flat_map(|b| b.main_cols.iter().copied()).collect();
    wrong.sort_unstable();
    wrong.dedup();
    if wrong.len() < 2 {
        return None;
    }
    let rows: Vec<usize> = scene
        .bad
        .iter()
        .flat_map(|b| scene.stage.parts[b.part].rows.iter().copied())
        .take(4 * LOOKED_AT)
        .collect();
    // Single elements may have another cause.
    let outliers = if rows.len() < 8 { 0 } else { rows.len() / 16 + 1 };
    let holds = |n: usize, from: usize| {
        let other = |row: &&usize| {
            !explains(&scene.bounded[**row * size_n + from], scene.found[**row * size_n + n])
        };
        rows.iter().filter(other).take(outliers + 1).count() <= outliers
    };
    let distance = |n: usize, from: usize| -> f64 {
        let of = |row: &usize| {
            scene.bounded[row * size_n + from].ratio(scene.found[row * size_n + n]).min(1e3)
        };
        rows.iter().map(of).sum()
    };
    // Among columns that hold, the nearest: a wide bound may hold many.
    let nearest = |n: usize, candidates: &mut dyn Iterator<Item = usize>| {
        candidates
            .filter(|&from| from != n && holds(n, from))
            .map(|from| (distance(n, from), from))
            .min_by(|a, b| a.0.total_cmp(&b.0))
            .map(|(_, from)| from)
    };
    // With few rows, a column may match many others by chance; then only wrong columns are
    // candidates, each once.
    let few = rows.len() < 4;
    let mut moved: Vec<(usize, usize)> = Vec::new();
    for n in spread_to(&wrong, LOOKED_AT) {
        let free = |from: &usize| !few || moved.iter().all(|m| m.1 != *from);
        let from = nearest(n, &mut wrong.iter().copied().filter(free))
            .or_else(|| nearest(n, &mut (0..if few { 0 } else { size_n })))?;
        moved.push((n, from));
    }
    let (id, text, map) = name_columns(scene, &moved, wrong.len());
    let all: Vec<(usize, usize)> = match &map {
        // A named order determines the source of every column.
        Some(map) => (0..size_n).map(|n| (n, map(n))).collect(),
        None if wrong.len() <= LOOKED_AT => moved.clone(),
        None => {
            let find = |&n: &usize| Some((n, nearest(n, &mut (0..size_n))?));
            wrong.iter().map(find).collect::<Option<_>>()?
        }
    };
    let bad: Vec<usize> =
        scene.bad.iter().flat_map(|b| scene.stage.parts[b.part].rows.iter().copied()).collect();
    let predicted = bad.iter().flat_map(|row| {
        all.iter().map(move |(n, from)| (row * size_n + n, scene.bounded[row * size_n + from]))
    });
    let cost = if map.is_some() { 4.0 } else { all.len() as f64 * (size_n as f64).log2() };
    let outcome = scene.weigh(predicted, cost)?;
    Some(Finding::of(outcome, id, &text))
}

/// Maps a column to its source in a named order.
type ColumnMap = Box<dyn Fn(usize) -> usize>;

/// The name of an order of columns.
fn name_columns(
    scene: &Scene<'_>,
    moved: &[(usize, usize)],
    count: usize,
) -> (&'static str, String, Option<ColumnMap>) {
    let half = scene.size_n / 2;
    if scene.stage.name == "gate_up" && scene.size_n.is_multiple_of(2) {
        let named: [(&str, &str, ColumnMap); 4] = [
            (
                "gate-up-swapped",
                "the gate and up halves are exchanged",
                Box::new(move |n| (n + half) % (2 * half)),
            ),
            ("gate-up-swapped", "gate and up, interleaved, are exchanged", Box::new(|n| n ^ 1)),
            (
                "gate-up-interleaved",
                "gate and up are interleaved instead of in halves",
                Box::new(move |n| n % 2 * half + n / 2),
            ),
            (
                "gate-up-in-halves",
                "gate and up are in halves instead of interleaved",
                Box::new(move |n| n % half * 2 + n / half),
            ),
        ];
        for (id, text, map) in named {
            if moved.iter().all(|&(n, from)| from == map(n)) {
                return (id, text.to_owned(), Some(map));
            }
        }
    }
    if let Some(how) = known_order(moved).filter(|_| !scene.stage.hints.is_unpermuted) {
        return ("columns-moved", format!("the columns (n) are in the order of {how}"), None);
    }
    let all = if count > 2 { format!(" ({count} in all)") } else { String::new() };
    let text = format!("columns (n) are in another order: {}{all}", pairs(moved));
    ("columns-moved", text, None)
}

/// Whether the columns were moved by one of Marlin's permutations.
fn known_order(moved: &[(usize, usize)]) -> Option<&'static str> {
    let named = [
        (ScalePermutation::Grouped, "Marlin's grouped scales"),
        (ScalePermutation::Single, "Marlin's single scales"),
    ];
    named.into_iter().find_map(|(order, name)| {
        let columns = order.columns();
        let run = columns.len();
        let forth = moved.iter().all(|&(n, from)| from == n / run * run + columns[n % run]);
        let back = moved.iter().all(|&(n, from)| n == from / run * run + columns[from % run]);
        (forth || back).then_some(name)
    })
}

/// Rows that hold the values of another row, or were computed with its inputs.
pub(super) fn rows(scene: &Scene<'_>) -> Option<Finding> {
    let wrong: Vec<(usize, usize)> =
        scene.bad.iter().flat_map(|b| b.main_rows.iter().map(|&row| (b.part, row))).collect();
    if wrong.is_empty() || wrong.len() > MAX_ROWS {
        return None;
    }
    let rows: Vec<Row> = wrong
        .into_iter()
        .map(|(part, row)| {
            let cols: Vec<usize> = (0..scene.size_n).filter(|&n| scene.is_wrong(row, n)).collect();
            let mut cols = spread_to(&cols, COMPUTED);
            cols.extend(spread_to(&(0..scene.size_n).collect::<Vec<_>>(), COMPUTED));
            Row { part, row, cols }
        })
        .collect();
    best_of([
        &|| moved_rows(scene, &rows),
        &|| experts(scene, &rows),
        &|| tokens(scene, &rows),
        &|| slots(scene, &rows),
    ])
}

/// The finding that rows were computed by these setups, if all of their elements agree.
fn confirmed<'s>(
    scene: &Scene<'s>,
    id: &str,
    text: &str,
    choices: usize,
    rows: impl Iterator<Item = (usize, Setup<'s>)>,
) -> Option<Finding> {
    let cols: Vec<usize> = (0..scene.size_n).collect();
    let (mut predicted, mut cost) = (Vec::new(), 2.0);
    for (row, setup) in rows {
        let bounded = scene.bounds(&setup, &[row], &cols, None)?;
        predicted.extend(cols.iter().map(|n| row * scene.size_n + n).zip(bounded));
        cost += (choices.max(1) as f64).log2();
    }
    let outcome = scene.weigh(predicted, cost)?;
    Some(Finding::of(outcome, id, text))
}

/// A wrong row, and some of its columns.
struct Row {
    part: usize,
    row: usize,
    cols: Vec<usize>,
}

impl Row {
    /// The sum of the columns' errors over their bounds under a setup that explains them.
    fn held(&self, scene: &Scene<'_>, setup: &Setup<'_>) -> Option<f64> {
        let bounded = scene.bounds(setup, &[self.row], &self.cols, None)?;
        self.explained(scene, &bounded).then(|| self.distance(scene, &bounded))
    }

    fn distance(&self, scene: &Scene<'_>, bounded: &[Bounded]) -> f64 {
        let found = self.cols.iter().map(|n| scene.found[self.row * scene.size_n + n]);
        bounded.iter().zip(found).map(|(b, x)| b.ratio(x).min(1e3)).sum()
    }

    /// Whether all columns except at most two, which may have another cause, are explained.
    fn explained(&self, scene: &Scene<'_>, bounded: &[Bounded]) -> bool {
        let found = self.cols.iter().map(|n| scene.found[self.row * scene.size_n + n]);
        let outliers = if self.cols.len() < COMPUTED { 0 } else { 2 };
        bounded.iter().zip(found).filter(|(b, x)| !explains(b, *x)).count() <= outliers
    }
}

/// The candidate with the least distance; the first of equal ones.
fn least(held: impl Iterator<Item = (f64, usize)>) -> Option<usize> {
    held.min_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, at)| at)
}

fn moved_rows(scene: &Scene<'_>, sample: &[Row]) -> Option<Finding> {
    let size_n = scene.size_n;
    let mut moved = Vec::new();
    for row in sample {
        let held = |from: usize| {
            let bounded: Vec<_> =
                row.cols.iter().map(|n| scene.bounded[from * size_n + n]).collect();
            row.explained(scene, &bounded).then(|| (row.distance(scene, &bounded), from))
        };
        let others = (0..scene.home.len()).filter(|&from| from != row.row);
        moved.push((row.row, least(others.filter_map(held))?));
    }
    let text = match moved[..] {
        [(a, from_a), (b, from_b)] if (from_a, from_b) == (b, a) => {
            format!("{} and {} are swapped", scene.row_name(a), scene.row_name(b))
        }
        _ => {
            let named: Vec<_> = moved
                .iter()
                .take(3)
                .map(|&(at, from)| format!("{} holds {}", scene.row_name(at), scene.row_name(from)))
                .collect();
            format!("rows are in another order: {}", named.join(", "))
        }
    };
    let predicted = moved.iter().flat_map(|&(at, from)| {
        (0..size_n).map(move |n| (at * size_n + n, scene.bounded[from * size_n + n]))
    });
    let cost = 2.0 + moved.len() as f64 * (scene.home.len() as f64).log2();
    let outcome = scene.weigh(predicted, cost)?;
    Some(Finding::of(outcome, "rows-moved", &text))
}

fn experts(scene: &Scene<'_>, sample: &[Row]) -> Option<Finding> {
    let parts = scene.stage.parts;
    let mut used = Vec::new();
    for row in sample {
        let held = |p: usize| Some((row.held(scene, &scene.right(p))?, p));
        let others = (0..parts.len()).filter(|&p| p != row.part);
        used.push((row, least(others.filter_map(held))?));
    }
    let named: Vec<String> = used
        .iter()
        .take(3)
        .map(|(row, p)| {
            format!("{} with that of expert {}", scene.row_name(row.row), parts[*p].global)
        })
        .collect();
    let text = format!("rows were multiplied with another expert's matrix: {}", named.join(", "));
    let setups = used.iter().map(|&(row, p)| (row.row, scene.right(p)));
    confirmed(scene, "wrong-expert", &text, parts.len(), setups)
}

fn tokens(scene: &Scene<'_>, sample: &[Row]) -> Option<Finding> {
    let top_k = scene.stage.top_k.unwrap_or(1);
    let name = |row: usize| match scene.stage.top_k {
        Some(_) if scene.stage.name == "gate_up" => format!("token {}", row / top_k),
        _ => scene.row_name(row),
    };
    let mut used = Vec::new();
    for row in sample {
        let sources: Vec<usize> = (0..scene.home.len()).filter(|&from| from != row.row).collect();
        let rows = vec![row.row; sources.len()];
        let setup = Setup { sources: Some(sources.clone()), ..scene.right(row.part) };
        let bounded = scene.bounds(&setup, &rows, &row.cols, None)?;
        let held = |(from, bounded): (usize, &[Bounded])| {
            row.explained(scene, bounded).then(|| (row.distance(scene, bounded), from))
        };
        let all = sources.into_iter().zip(bounded.chunks(row.cols.len()));
        used.push((row.row, least(all.filter_map(held))?));
    }
    let named: Vec<String> = used
        .iter()
        .take(3)
        .map(|&(at, from)| format!("{} with those of {}", scene.row_name(at), name(from)))
        .collect();
    let text = format!("rows were computed with other activations: {}", named.join(", "));
    let setups = used.iter().map(|&(row, from)| {
        let part = scene.home[row].unwrap_or(0);
        (row, Setup { sources: Some(vec![from]), ..scene.right(part) })
    });
    confirmed(scene, "wrong-token", &text, scene.home.len(), setups)
}

fn slots(scene: &Scene<'_>, sample: &[Row]) -> Option<Finding> {
    let weights = scene.stage.extras.router_weights?;
    let mut used = Vec::new();
    for row in sample {
        let i = row.row * scene.size_n + row.cols[0];
        // Router weights are applied last, so found values are proportional to them.
        let wanted = f64::from(weights[row.row]) * scene.found[i] / scene.bounded[i].exact;
        let near = |w: f32| (f64::from(w) / wanted - 1.0).abs() < 0.02;
        let held = |from: usize| {
            let mut other = weights.to_vec();
            other[row.row] = weights[from];
            let setup = Setup { routers: Routers::These(other), ..scene.right(row.part) };
            Some((row.held(scene, &setup)?, from))
        };
        let others = (0..weights.len())
            .filter(|&from| weights[from] != weights[row.row] && near(weights[from]));
        used.push((row.row, least(others.filter_map(held))?));
    }
    let top_k = scene.stage.top_k.unwrap_or(1);
    let named: Vec<String> = used
        .iter()
        .take(3)
        .map(|&(at, from)| {
            format!(
                "{} has that of token {}, slot {}",
                scene.row_name(at),
                from / top_k,
                from % top_k
            )
        })
        .collect();
    let text = format!("the router weight is another slot's: {}", named.join(", "));
    let setups = used.iter().map(|&(row, from)| {
        let mut other = weights.to_vec();
        other[row] = weights[from];
        let part = scene.home[row].unwrap_or(0);
        (row, Setup { routers: Routers::These(other), ..scene.right(part) })
    });
    confirmed(scene, "router-weight-of-another-slot", &text, scene.home.len(), setups)
}
