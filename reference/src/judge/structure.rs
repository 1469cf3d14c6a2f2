//! Explanations without a list of mistakes: rearranged values, or a confined region.

use std::collections::{BTreeSet, HashMap};

use super::Diagnosis;
use super::mistake::choice::is_specific;
use super::place::Axis;
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
    let length = expected.first().map_or(0, Vec::len);
    if !is_specific(sources.len(), length, expected.iter().flatten().copied()) {
        return None;
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

/// Describes where the mismatches are: experts, rows, columns, or how many of each.
pub(super) fn confined(subject: &Subject<'_>, found: &[u32]) -> Option<Diagnosis> {
    let places = Places::of(subject, found);
    let parts = places.parts(subject);
    let count = places.count;
    if count == 0 {
        return None;
    }
    let text = match (parts.is_empty(), count) {
        (false, 1) => format!("the only mismatch is in {}", parts.join(", ")),
        (false, _) => format!("all {count} mismatches are in {}", parts.join(", ")),
        (true, _) => {
            let [rows, cols] = places.names;
            let seen = |i: usize| format!("{} of {}", places.wrong[i].len(), places.lens[i]);
            let (r, c) = (seen(0), seen(1));
            format!("all over the output: {count} mismatches in {r} {} and {c} {}", rows.1, cols.1)
        }
    };
    let id = if parts.is_empty() { "everywhere" } else { "confined" };
    Some(Diagnosis::place(id, text, count))
}

/// The positions of mismatches in both directions of a matrix, and in a stack.
struct Places {
    count: usize,
    experts: BTreeSet<usize>,
    wrong: [BTreeSet<usize>; 2],
    lens: [usize; 2],
    /// What one position of a direction is called, and several.
    names: [(&'static str, &'static str); 2],
    /// The only tile of Marlin's layouts, if there is one.
    tile: Option<(usize, usize)>,
}

impl Places {
    fn of(subject: &Subject<'_>, found: &[u32]) -> Self {
        let mut all = Self {
            count: 0,
            experts: BTreeSet::new(),
            wrong: Default::default(),
            lens: subject.shape,
            names: match subject.rows {
                Rows::K => [("k", "k"), ("column n", "columns n")],
                Rows::Group => [("group", "groups"), ("column n", "columns n")],
                Rows::RowK => [("k", "k"), ("row", "rows")],
                Rows::RowGroup => [("group", "groups"), ("row", "rows")],
                Rows::List => [("row", "rows"), ("column", "columns")],
            },
            tile: None,
        };
        if subject.rows == Rows::List {
            // A list has the shape of its tensor; a single column is a list of rows.
            let shape = subject.found.shape();
            let cols = if shape.len() > 1 { shape[shape.len() - 1].max(1) } else { 1 };
            all.lens = [subject.expected.len() / cols, cols];
            for (element, _) in subject.differences(found) {
                all.add(0, element / cols, element % cols);
            }
            return all;
        }
        let mut tiles: BTreeSet<Option<(usize, usize)>> = BTreeSet::new();
        for (expert, place) in subject.places(found) {
            all.add(expert, place.row, place.col);
            // Two distinct tiles are enough to answer.
            if tiles.len() < 2 {
                tiles.insert(place.fragment.map(|f| (f.tile_k, f.tile_n)));
            }
        }
        all.tile = if tiles.len() == 1 { tiles.pop_first().flatten() } else { None };
        all
    }

    fn add(&mut self, expert: usize, row: usize, col: usize) {
        self.count += 1;
        self.experts.insert(expert);
        self.wrong[0].insert(row);
        self.wrong[1].insert(col);
    }

    /// What the mismatches have in common.
    fn parts(&self, subject: &Subject<'_>) -> Vec<String> {
        let axis = |i: usize| {
            let (one, many) = self.names[i];
            Axis { wrong: &self.wrong[i], len: self.lens[i], one, many }
        };
        let one = |set: &BTreeSet<usize>| if set.len() == 1 { set.first().copied() } else { None };
        let mut parts = Vec::new();
        if subject.experts > 1 {
            let (one, many) = ("expert", "experts");
            let experts = Axis { wrong: &self.experts, len: subject.experts, one, many };
            parts.extend(experts.text());
        }
        let of_activations = subject.rows.are_of_activations();
        match (one(&self.wrong[0]), one(&self.wrong[1])) {
            (Some(r), Some(c)) if of_activations => {
                parts.push(format!("the value at row {c}, {} {r}", self.names[0].0));
            }
            (Some(r), Some(c)) if subject.rows != Rows::List => {
                parts.push(format!("the value at {} {r}, n {c}", self.names[0].0));
            }
            (None, None) if subject.rows == Rows::K && self.tile.is_some() => {
                parts.extend(self.tile.map(|(k, n)| format!("tile ({k}, {n})")));
            }
            _ => {
                let columns = axis(1).text();
                let columns = if of_activations {
                    columns.map(|text| format!("{text} of the activations"))
                } else {
                    columns
                };
                parts.extend(axis(0).text().into_iter().chain(columns));
            }
        }
        parts
    }
}
