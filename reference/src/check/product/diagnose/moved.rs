//! Columns and rows that stand in each other's place, and rows of another expert, token or slot.

use super::Finding;
use super::scene::{Routers, Scene, Setup, explains, spread_to};
use crate::gemm::Bounded;
use crate::layout::marlin::ScalePermutation;

/// Columns or rows that are looked at one by one.
const LOOKED_AT: usize = 64;
/// Wrong rows that are computed in another way, and columns of each.
const COMPUTED: usize = 12;

/// `3 and 9 are swapped`, or the first few pairs of place and what it holds.
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

/// Columns n that hold what belongs to column n'.
pub(super) fn columns(scene: &Scene<'_>) -> Option<Finding> {
    let size_n = scene.size_n;
    let mut wrong: Vec<usize> = scene.bad.iter().flat_map(|b| b.cols.iter().copied()).collect();
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
    let holds = |n: usize, from: usize| {
        rows.iter()
            .all(|row| explains(&scene.bounded[row * size_n + from], scene.found[row * size_n + n]))
    };
    // Few rows let a column pass for many others by chance: then only wrong columns come into
    // question, each once.
    let few = rows.len() < 4;
    let mut moved: Vec<(usize, usize)> = Vec::new();
    for n in spread_to(&wrong, LOOKED_AT) {
        let others = (0..if few { 0 } else { size_n }).filter(|&from| from != n);
        let mut candidates = wrong.iter().copied().filter(|&from| from != n).chain(others);
        let from = candidates.find(|&from| {
            let taken = few && moved.iter().any(|m| m.1 == from);
            !taken && holds(n, from)
        })?;
        moved.push((n, from));
    }
    let half = size_n / 2;
    let is = |map: &dyn Fn(usize) -> usize| moved.iter().all(|&(n, from)| from == map(n));
    let gate_up = scene.stage.name == "gate_up";
    let (id, text) = if gate_up && is(&|n| (n + half) % size_n) {
        ("gate-up-swapped", "the gate and up halves are exchanged".to_owned())
    } else if gate_up && is(&|n| n ^ 1) {
        ("gate-up-swapped", "gate and up, interleaved, are exchanged".to_owned())
    } else if gate_up && is(&|n| n % 2 * half + n / 2) {
        ("gate-up-interleaved", "gate and up are interleaved instead of in halves".to_owned())
    } else if gate_up && is(&|n| n % half * 2 + n / half) {
        ("gate-up-in-halves", "gate and up are in halves instead of interleaved".to_owned())
    } else if let Some(how) = known_order(&moved) {
        ("columns-moved", format!("the columns (n) are in the order of {how}"))
    } else {
        let count = wrong.len();
        let all = if count > 2 { format!(" ({count} in all)") } else { String::new() };
        ("columns-moved", format!("columns (n) are in another order: {}{all}", pairs(&moved)))
    };
    Some(Finding::new(id, text))
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

/// Rows that hold what belongs to another row, or were computed with something that does.
pub(super) fn rows(scene: &Scene<'_>) -> Option<Finding> {
    let wrong: Vec<(usize, usize)> =
        scene.bad.iter().flat_map(|b| b.rows.iter().map(|&row| (b.part, row))).collect();
    let sample = spread_to(&(0..wrong.len()).collect::<Vec<_>>(), COMPUTED);
    let sample: Vec<Row> = sample
        .into_iter()
        .map(|i| {
            let (part, row) = wrong[i];
            let cols: Vec<usize> = (0..scene.size_n).filter(|&n| scene.is_wrong(row, n)).collect();
            let mut cols = spread_to(&cols, COMPUTED);
            cols.extend(spread_to(&(0..scene.size_n).collect::<Vec<_>>(), COMPUTED));
            Row { part, row, cols }
        })
        .collect();
    if sample.is_empty() {
        return None;
    }
    moved_rows(scene, &sample)
        .or_else(|| experts(scene, &sample))
        .or_else(|| tokens(scene, &sample))
        .or_else(|| slots(scene, &sample))
}

/// A wrong row, and some of its columns.
struct Row {
    part: usize,
    row: usize,
    cols: Vec<usize>,
}

impl Row {
    fn holds(&self, scene: &Scene<'_>, setup: &Setup<'_>) -> bool {
        scene
            .bounds(setup, &[self.row], &self.cols, None)
            .is_some_and(|b| self.explained(scene, &b))
    }

    fn explained(&self, scene: &Scene<'_>, bounded: &[Bounded]) -> bool {
        let found = self.cols.iter().map(|n| scene.found[self.row * scene.size_n + n]);
        bounded.iter().zip(found).all(|(b, x)| explains(b, x))
    }
}

fn moved_rows(scene: &Scene<'_>, sample: &[Row]) -> Option<Finding> {
    let size_n = scene.size_n;
    let mut moved = Vec::new();
    for row in sample {
        let from = (0..scene.home.len()).filter(|&from| from != row.row).find(|from| {
            let bounded: Vec<_> =
                row.cols.iter().map(|n| scene.bounded[from * size_n + n]).collect();
            row.explained(scene, &bounded)
        })?;
        moved.push((row.row, from));
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
    Some(Finding::new("rows-moved", text))
}

fn experts(scene: &Scene<'_>, sample: &[Row]) -> Option<Finding> {
    let parts = scene.stage.parts;
    let mut used = Vec::new();
    for row in sample {
        let other = (0..parts.len())
            .filter(|&p| p != row.part)
            .find(|&p| row.holds(scene, &scene.right(p)))?;
        used.push((row, other));
    }
    let named: Vec<String> = used
        .iter()
        .take(3)
        .map(|(row, p)| {
            format!("{} with that of expert {}", scene.row_name(row.row), parts[*p].global)
        })
        .collect();
    let text = format!("rows were multiplied with another expert's matrix: {}", named.join(", "));
    Some(Finding::new("wrong-expert", text))
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
        let fits = |(_, bounded): &(usize, &[Bounded])| row.explained(scene, bounded);
        let (from, _) = sources.into_iter().zip(bounded.chunks(row.cols.len())).find(fits)?;
        used.push((row.row, from));
    }
    let named: Vec<String> = used
        .iter()
        .take(3)
        .map(|&(at, from)| format!("{} with those of {}", scene.row_name(at), name(from)))
        .collect();
    let text = format!("rows were computed with other activations: {}", named.join(", "));
    Some(Finding::new("wrong-token", text))
}

fn slots(scene: &Scene<'_>, sample: &[Row]) -> Option<Finding> {
    let weights = scene.stage.extras.router_weights?;
    let mut used = Vec::new();
    for row in sample {
        let i = row.row * scene.size_n + row.cols[0];
        // Router weights come last: found is in proportion to them.
        let wanted = f64::from(weights[row.row]) * scene.found[i] / scene.bounded[i].exact;
        let near = |w: f32| (f64::from(w) / wanted - 1.0).abs() < 0.02;
        let from = (0..weights.len())
            .filter(|&from| weights[from] != weights[row.row] && near(weights[from]))
            .find(|&from| {
                let mut other = weights.to_vec();
                other[row.row] = weights[from];
                let setup = Setup { routers: Routers::These(other), ..scene.right(row.part) };
                row.holds(scene, &setup)
            })?;
        used.push((row.row, from));
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
    Some(Finding::new("router-weight-of-another-slot", text))
}
