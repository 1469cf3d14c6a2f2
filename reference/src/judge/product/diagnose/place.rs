//! Describes the location of a product's wrong elements.

use std::collections::BTreeSet;

use super::scene::Scene;

/// Columns of a tile of Marlin's layout.
const TILE_N: usize = 64;

/// What the positions of the wrong elements have in common; `None` if they lie everywhere.
pub(super) fn of(scene: &Scene<'_>) -> Option<String> {
    let size_n = scene.size_n;
    let rows: BTreeSet<usize> = scene.wrong.iter().map(|i| i / size_n).collect();
    let cols: BTreeSet<usize> = scene.wrong.iter().map(|i| i % size_n).collect();
    let all = scene.wrong.len();
    let (first, last) = (*rows.first()?, *rows.last()?);
    if all == 1 {
        let (row, n) = (scene.row_name(first), cols.first()?);
        return Some(format!("the only wrong element is at {row}, n {n}"));
    }
    let mut parts = Vec::new();
    let total = scene.home.len();
    let token = scene.stage.top_k.filter(|&k| k > 1);
    if rows.len() == 1 && total > 1 {
        parts.push(scene.row_name(first));
    } else if let Some(top_k) = token
        && first / top_k == last / top_k
    {
        parts.push(format!("token {}", first / top_k));
    } else if rows.len() < total {
        let expert =
            scene.home[first].filter(|_| rows.iter().all(|&r| scene.home[r] == scene.home[first]));
        let several = scene.stage.parts.len() > 1;
        if let (Some(part), true) = (expert, several) {
            let part = &scene.stage.parts[part];
            let some = if rows.len() < part.rows.len() {
                format!(" ({} of its {} rows)", rows.len(), part.rows.len())
            } else {
                String::new()
            };
            parts.push(format!("expert {}{some}", part.global));
        } else if rows.iter().all(|&r| scene.home[r].is_none()) {
            parts.push("rows of experts that are not on this rank".to_owned());
        } else if let Some(which) = experts(scene, &rows) {
            parts.push(which);
        } else if last - first + 1 == rows.len() {
            parts.push(format!("rows {first} to {last}"));
        } else if rows.len() <= 4 {
            let names: Vec<String> = rows.iter().map(usize::to_string).collect();
            parts.push(format!("rows {}", names.join(", ")));
        }
    }
    parts.extend(columns(scene, &cols));
    if parts.is_empty() {
        return None;
    }
    let number = if all == 2 { "both".to_owned() } else { format!("all {all}") };
    Some(format!("{number} wrong elements are in {}", parts.join(", ")))
}

/// The experts that have wrong rows, if others have right ones only.
fn experts(scene: &Scene<'_>, rows: &BTreeSet<usize>) -> Option<String> {
    let (mut wrong, mut right) = (Vec::new(), Vec::new());
    for part in scene.stage.parts.iter().filter(|p| !p.rows.is_empty()) {
        let is_wrong = part.rows.iter().any(|row| rows.contains(row));
        if is_wrong { &mut wrong } else { &mut right }.push(part.global.to_string());
    }
    let absent = rows.iter().any(|&row| scene.home[row].is_none());
    if right.is_empty() || absent || wrong.len() < 2 {
        return None;
    }
    let named = |mut of: Vec<String>| {
        let more = if of.len() > 8 { ", ..." } else { "" };
        of.truncate(8);
        format!("{}{more}", of.join(", "))
    };
    let right_ones = if right.len() == 1 { "expert" } else { "experts" };
    let (wrong, right) = (named(wrong), named(right));
    Some(format!("the rows of experts {wrong} (those of {right_ones} {right} are right)"))
}

fn columns(scene: &Scene<'_>, cols: &BTreeSet<usize>) -> Option<String> {
    let (first, last) = (*cols.first()?, *cols.last()?);
    let (size_n, count) = (scene.size_n, cols.len());
    if count == size_n {
        return None;
    }
    if count == 1 {
        return Some(format!("column n {first}"));
    }
    if scene.stage.name == "gate_up" {
        // Halves; formats that interleave gate and up are recognized by parity.
        let half = size_n / 2;
        if count == half {
            let halves =
                [("gate (columns below", last < half), ("up (columns from", first >= half)];
            if let Some((name, _)) = halves.iter().find(|h| h.1) {
                return Some(format!("{name} {half})"));
            }
        }
    }
    if last - first + 1 == count {
        return Some(format!("columns n {first} to {last}"));
    }
    if first / TILE_N == last / TILE_N && size_n > TILE_N {
        let tile = first / TILE_N;
        let (from, to) = (tile * TILE_N, (tile + 1) * TILE_N - 1);
        return Some(format!("{count} columns of n {from} to {to} (column tile {tile})"));
    }
    if cols.iter().all(|n| n % 2 == first % 2) && count > 4 {
        let parity = if first % 2 == 0 { "even" } else { "odd" };
        return Some(format!("{count} {parity} columns"));
    }
    if count <= 4 {
        let names: Vec<String> = cols.iter().map(usize::to_string).collect();
        return Some(format!("columns n {}", names.join(", ")));
    }
    (count < size_n / 2).then(|| format!("{count} columns between n {first} and {last}"))
}
