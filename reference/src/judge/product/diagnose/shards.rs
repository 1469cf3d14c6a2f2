//! Known mistakes with the halves of w13: gate and up exchanged, or two shards in a layer that has
//! one.

use std::borrow::Cow;

use super::Suspect;
use super::scene::{Scene, Setup};
use crate::weight::{Table, Weight};

/// The tensors of the matrix whose columns are mapped.
#[derive(Clone, Copy)]
struct Which {
    codes: bool,
    scales: bool,
    bias: bool,
}

/// Maps a column to its source.
type ColumnMap = Box<dyn Fn(usize) -> usize>;
/// Maps a column and half of N to the source column.
type HalfMap = fn(usize, usize) -> usize;

/// Every suspect that makes sense for the product.
pub(super) fn suspects<'s>(scene: &'s Scene<'s>) -> Vec<Suspect<'s>> {
    if scene.stage.name != "gate_up" || !scene.size_n.is_multiple_of(2) {
        return Vec::new();
    }
    if scene.stage.hints.is_gated { exchanged(scene) } else { two_shards(scene) }
}

fn exchanged<'s>(scene: &'s Scene<'s>) -> Vec<Suspect<'s>> {
    let half = scene.size_n / 2;
    let biased = scene.stage.parts.iter().any(|p| p.weight.bias.is_some());
    let all = [
        (
            biased,
            "gate and up of w13's weights and scales are exchanged, the bias is not",
            Which { codes: true, scales: true, bias: false },
        ),
        (
            true,
            "gate and up of w13's weights are exchanged, the scales are not",
            Which { codes: true, scales: false, bias: false },
        ),
        (
            true,
            "gate and up of w13's weights and bias are exchanged, the scales are not",
            Which { codes: true, scales: false, bias: true },
        ),
        (
            true,
            "gate and up of w13's scales are exchanged, the weights are not",
            Which { codes: false, scales: true, bias: false },
        ),
        (
            biased,
            "gate and up of w13's bias are exchanged, the weights are not",
            Which { codes: false, scales: false, bias: true },
        ),
    ];
    let mut suspects = Vec::new();
    for (_, text, which) in all.into_iter().filter(|a| a.0) {
        let maps: [(&str, ColumnMap); 2] = [
            ("", Box::new(move |n| (n + half) % (2 * half))),
            (" (interleaved columns)", Box::new(|n| n ^ 1)),
        ];
        for (how, map) in maps {
            suspects.push(Suspect::new("gate-up-swapped", format!("{text}{how}"), move |part| {
                let weight = mapped(scene.stage.parts[part].weight, which, &map)?;
                Some(Setup { weight: Cow::Owned(weight), ..scene.right(part) })
            }));
        }
    }
    suspects
}

/// A layer without an up projection whose w13 was loaded as two shards.
fn two_shards<'s>(scene: &'s Scene<'s>) -> Vec<Suspect<'s>> {
    let half = scene.size_n / 2;
    let all = Which { codes: true, scales: true, bias: true };
    let maps: [(&str, HalfMap); 3] = [
        ("the first half stands in both", |n, half| n % half),
        ("the second half stands in both", |n, half| half + n % half),
        ("each half holds every second column", |n, half| n % half * 2 + n / half),
    ];
    maps.into_iter()
        .map(|(how, map)| {
            let text = format!(
                "w13 was loaded as two shards (gate and up), though the activation has no gate: {how}"
            );
            Suspect::new("two-shards-not-gated", text, move |part| {
                let map = move |n| map(n, half);
                let weight = mapped(scene.stage.parts[part].weight, all, &map)?;
                Some(Setup { weight: Cow::Owned(weight), ..scene.right(part) })
            })
        })
        .collect()
}

/// The matrix with column n of the chosen tensors taken from column `map(n)`; `None` if that
/// changes nothing.
fn mapped<'w>(
    weight: &Weight<'w>,
    which: Which,
    map: &dyn Fn(usize) -> usize,
) -> Option<Weight<'w>> {
    let mut weight = weight.clone();
    let shape = weight.shape();
    let order: Vec<usize> = (0..shape.size_n).map(map).collect();
    let columns = |table: &Table| gather(table, &order);
    if which.codes {
        weight.codes = weight.codes.gather_columns(&order);
    }
    if which.scales {
        weight.scales = columns(&weight.scales);
        weight.zeros = weight.zeros.as_ref().map(columns);
    }
    if which.bias {
        weight.bias = weight.bias.as_ref().map(columns);
    }
    Some(weight)
}

/// Column n of the table taken from column `order[n]`.
fn gather(table: &Table, order: &[usize]) -> Table {
    let mut i = 0;
    table.map(table.ty(), |_| {
        let (row, col) = (i / table.cols(), i % table.cols());
        i += 1;
        table.bits(row, order[col])
    })
}
