//! Explanations without a list of mistakes: rearranged values, or a confined region.

use std::collections::{BTreeSet, HashMap};

use super::Diagnosis;
use super::subject::{Rows, Subject};

/// Recognizes exchanged experts, columns or rows.
pub(super) fn diagnose(
    subject: &Subject<'_>,
    found: &[u32],
    mismatches: usize,
) -> Option<Diagnosis> {
    if subject.rows == Rows::List {
        return None;
    }
    let explained = |id: &str, text: String| Some(Diagnosis::explains(id, text));
    let per = subject.layout.packed_len();
    if subject.experts > 1 {
        let slices = |t: &[u32]| t.chunks(per).map(<[u32]>::to_vec).collect::<Vec<_>>();
        if let Some(moved) = moved(&slices(&subject.expected), &slices(found)) {
            return explained("experts-moved", format!("experts are in another order: {moved}"));
        }
    }
    let bad: BTreeSet<usize> = subject.places(found).map(|(e, _)| e).collect();
    let (mut texts, mut id) = (Vec::new(), None);
    for &expert in &bad {
        let expected = subject.matrix(&subject.expected, expert);
        let found = subject.matrix(found, expert);
        let cols = subject.shape[1];
        let columns = |m: &[u32]| {
            (0..cols).map(|c| m.iter().skip(c).step_by(cols).copied().collect()).collect()
        };
        let rows = |m: &[u32]| m.chunks(cols).map(<[u32]>::to_vec).collect::<Vec<Vec<u32>>>();
        let columns: (Vec<Vec<u32>>, Vec<Vec<u32>>) = (columns(&expected), columns(&found));
        let label = subject.rows.label();
        let [(column_id, column_name), (row_id, row_name)] = match subject.rows.are_of_activations()
        {
            true => [
                ("rows-moved", "rows of the activations".to_owned()),
                ("columns-moved", format!("columns ({label}) of the activations")),
            ],
            false => [
                ("columns-moved", "columns (n)".to_owned()),
                ("rows-moved", format!("rows ({label})")),
            ],
        };
        let (of, text) = if let Some(moved) = moved(&columns.0, &columns.1) {
            (column_id, format!("{column_name} are in another order: {moved}"))
        } else if let Some(moved) = moved(&rows(&expected), &rows(&found)) {
            (row_id, format!("{row_name} are in another order: {moved}"))
        } else {
            return None;
        };
        id.get_or_insert(of);
        texts.push(if subject.stacked { format!("expert {expert}: {text}") } else { text });
    }
    let first = texts.first()?.clone();
    let more = texts.len() - 1;
    let text = if more == 0 { first } else { format!("{first}, and {more} more experts") };
    debug_assert!(mismatches > 0);
    explained(id?, text)
}

/// Describes `found` as a rearrangement of `expected`; `None` if it is not one, or is equal.
fn moved(expected: &[Vec<u32>], found: &[Vec<u32>]) -> Option<String> {
    let differs: Vec<usize> = (0..expected.len()).filter(|&i| expected[i] != found[i]).collect();
    if differs.is_empty() {
        return None;
    }
    // Equal lines are interchangeable, so each content has a list of unused positions.
    let mut places: HashMap<&[u32], Vec<usize>> = HashMap::new();
    for &i in differs.iter().rev() {
        places.entry(&expected[i]).or_default().push(i);
    }
    let mut sources = Vec::with_capacity(differs.len());
    for &i in &differs {
        sources.push((i, places.get_mut(found[i].as_slice())?.pop()?));
    }
    if let [(a, from_a), (b, from_b)] = sources[..]
        && from_a == b
        && from_b == a
    {
        return Some(format!("{a} and {b} are swapped"));
    }
    let shown: Vec<_> = sources.iter().take(4).map(|(i, s)| format!("{i} holds {s}")).collect();
    let dots = if sources.len() > 4 { ", ..." } else { "" };
    Some(format!("{}{dots} ({} in all)", shown.join(", "), sources.len()))
}

/// Describes the region of the mismatches if it is a small part of the matrix.
pub(super) fn confined(subject: &Subject<'_>, found: &[u32]) -> Option<Diagnosis> {
    if subject.rows == Rows::List {
        return None;
    }
    let mut sets: [BTreeSet<usize>; 3] = Default::default();
    // Only Marlin's layouts have tiles.
    let mut tiles: BTreeSet<Option<(usize, usize)>> = BTreeSet::new();
    let mut count = 0;
    for (expert, place) in subject.places(found) {
        count += 1;
        // Two distinct values are enough to answer.
        for (set, value) in sets.iter_mut().zip([expert, place.row, place.col]) {
            if set.len() < 2 {
                set.insert(value);
            }
        }
        if tiles.len() < 2 {
            tiles.insert(place.fragment.map(|f| (f.tile_k, f.tile_n)));
        }
    }
    let [experts, rows, cols] = &sets;
    let one = |set: &BTreeSet<usize>| if set.len() == 1 { set.first().copied() } else { None };
    let (label, of_activations) = (subject.rows.label(), subject.rows.are_of_activations());
    let mut parts = Vec::new();
    if subject.experts > 1 {
        parts.extend(one(experts).map(|e| format!("expert {e}")));
    }
    match (one(rows), one(cols)) {
        (Some(r), Some(c)) if of_activations => {
            parts.push(format!("the value at row {c}, {label} {r}"));
        }
        (Some(r), Some(c)) => parts.push(format!("the value at {label} {r}, n {c}")),
        (Some(r), None) => parts.push(format!("{label} {r}")),
        (None, Some(c)) if of_activations => parts.push(format!("row {c} of the activations")),
        (None, Some(c)) => parts.push(format!("column n {c}")),
        (None, None) if subject.rows == Rows::K => {
            if let (1, Some(Some((k, n)))) = (tiles.len(), tiles.first()) {
                parts.push(format!("tile ({k}, {n})"));
            }
        }
        _ => {}
    }
    (!parts.is_empty()).then(|| {
        let text = match count {
            1 => format!("the only mismatch is in {}", parts.join(", ")),
            _ => format!("all {count} mismatches are in {}", parts.join(", ")),
        };
        Diagnosis::place("confined", text, count)
    })
}
