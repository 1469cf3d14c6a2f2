//! Known mistakes with groups of k and with shards: the scales of another rank or group size, or a
//! group size of -1 used as a number.

use std::borrow::Cow;

use super::Suspect;
use super::scene::{Scene, Setup};
use crate::num::dims::GroupSize;
use crate::num::scalar::ScalarType;
use crate::weight::Groups;

/// Every mistake that is possible for the product.
pub(super) fn suspects<'s>(scene: &'s Scene<'s>) -> Vec<Suspect<'s>> {
    let mut all = sharded(scene);
    all.extend(neighbours(scene));
    all.extend(other_size(scene));
    all.extend(stride(scene));
    all.extend(static_order(scene));
    all
}

/// The stored row of each k of a part's product.
fn stored<'s>(scene: &'s Scene<'s>, part: usize) -> impl Iterator<Item = usize> + 's {
    let order = scene.orders[part].as_deref();
    let size_k = scene.stage.parts[part].weight.shape().size_k;
    (0..size_k).map(move |k| order.map_or(k, |o| o[k] as usize))
}

/// An act-order rank that holds only its own share of the scales: rows of other groups get one of
/// them.
fn sharded<'s>(scene: &'s Scene<'s>) -> Vec<Suspect<'s>> {
    let Some(first) = scene.stage.parts.first() else { return Vec::new() };
    let Groups::Indexed { group_size: GroupSize::Of(size), .. } = first.weight.groups else {
        return Vec::new();
    };
    let (rows, size_k) = (first.weight.scales.rows(), first.weight.shape().size_k);
    let own = size_k.div_ceil(size.max(1)).max(1);
    let ranks = match scene.stage.hints.tensor_parallel {
        Some(tp) => tp.rank..tp.rank + 1,
        None => 0..rows / own,
    };
    if own >= rows {
        return Vec::new();
    }
    let mut all = Vec::new();
    for rank in ranks {
        let start = (rank * own).min(rows - own);
        // The index that a kernel reads for a group outside the rank's.
        let reads: [fn(usize, usize, usize) -> usize; 5] = [
            |g, own, start| start + g % own,
            |g, own, start| start + g.min(own - 1),
            |g, own, start| start + g.saturating_sub(start).min(own - 1),
            // Groups counted from the rank's first group in a table of all groups.
            |g, _, start| g.saturating_sub(start),
            |g, own, start| g.saturating_sub(start).min(own - 1),
        ];
        for read in reads {
            let text = format!(
                "group scales were cut along K to this rank's {own} of {rows} groups, though g_idx \
                 names groups of the whole matrix: act-order needs all of them on every rank"
            );
            all.push(Suspect::new("scales-sharded", text, move |part| {
                let Groups::Indexed { g_idx, .. } = &scene.stage.parts[part].weight.groups else {
                    return None;
                };
                let group = |k: usize| read(g_idx[k] as usize, own, start) as u32;
                let groups = stored(scene, part).map(group).collect();
                Some(Setup { groups: Some(groups), ..scene.right(part) })
            }));
        }
    }
    all
}

/// Which neighbour, and its number from the group's and the number of groups.
type Neighbour = (&'static str, fn(usize, usize) -> usize);

/// The scales of the group before or after, of three or more; at the ends those of the end or of the other
/// end. Of two groups, each of these is also another mistake.
fn neighbours<'s>(scene: &'s Scene<'s>) -> Vec<Suspect<'s>> {
    let rows = scene.stage.parts.first().map_or(0, |part| part.weight.scales.rows());
    if rows < 3 {
        return Vec::new();
    }
    let reads: [Neighbour; 4] = [
        ("before", |g, _| g.saturating_sub(1)),
        ("before", |g, rows| (g + rows - 1) % rows),
        ("after", |g, rows| (g + 1).min(rows - 1)),
        ("after", |g, rows| (g + 1) % rows),
    ];
    let suspect = |(which, read): Neighbour| {
        let text = format!(
            "every row got the scales of the group {which} its own: the index of the group is off by one"
        );
        Suspect::new("group-off-by-one", text, move |part| {
            let groups = &scene.stage.parts[part].weight.groups;
            let group = |k: usize| read(groups.group_of(k), rows) as u32;
            let groups = stored(scene, part).map(group).collect();
            Some(Setup { groups: Some(groups), ..scene.right(part) })
        })
    };
    reads.into_iter().map(suspect).collect()
}

/// Groups of another size: half, double, or any group size that kernels support.
fn other_size<'s>(scene: &'s Scene<'s>) -> Vec<Suspect<'s>> {
    let Some(first) = scene.stage.parts.first() else { return Vec::new() };
    let (rows, size_k) = (first.weight.scales.rows(), first.weight.shape().size_k);
    let GroupSize::Of(size) = first.weight.groups.group_size() else { return Vec::new() };
    if rows < 2 || size == 0 {
        return Vec::new();
    }
    let mut sizes = vec![size / 2, size * 2, 16, 32, 64, 128, size_k];
    sizes.sort_unstable();
    sizes.dedup();
    sizes.retain(|&s| s > 0 && s != size);
    let mut all = Vec::new();
    for other in sizes {
        // Past the last group, a kernel reads the last one or wraps around.
        let reads: [fn(usize, usize) -> usize; 2] = [|g, rows| g.min(rows - 1), |g, rows| g % rows];
        for read in reads.into_iter().take(if other < size { 2 } else { 1 }) {
            let (id, text) = if other == size_k {
                (
                    "group-size-as-stride",
                    "every row got the scales of group 0, as where a group size of -1 is taken as a \
                     number or for another, or where the index of one of two groups is off by one"
                        .to_owned(),
                )
            } else {
                let text =
                    format!("groups of {other} k were taken, the matrix has groups of {size}");
                ("wrong-group-size", text)
            };
            all.push(Suspect::new(id, text, move |part| {
                let groups = match &scene.stage.parts[part].weight.groups {
                    Groups::Uniform(_) => {
                        stored(scene, part).map(|k| read(k / other, rows) as u32).collect()
                    }
                    // g_idx in groups of the other size.
                    Groups::Indexed { g_idx, .. } => stored(scene, part)
                        .map(|k| read(g_idx[k] as usize * size / other, rows) as u32)
                        .collect(),
                };
                Some(Setup { groups: Some(groups), ..scene.right(part) })
            }));
        }
    }
    all
}

/// Scales of whole columns, read at an offset: a group size of -1 as a number. Checkpoints of 8-bit
/// products have no such number: there only the neighbouring column is tried.
fn stride<'s>(scene: &'s Scene<'s>) -> Vec<Suspect<'s>> {
    let Some(first) = scene.stage.parts.first() else { return Vec::new() };
    let shape = first.weight.shape();
    if first.weight.scales.rows() != 1 || shape.size_n < 2 {
        return Vec::new();
    }
    let (size_k, size_n) = (shape.size_k, shape.size_n);
    let has_group_size = scene.convention.dequantizes();
    // One element back, one row of scales per k, or the share of a rank.
    let mut offsets = vec![size_n - 1, 1];
    if has_group_size {
        offsets.push(size_k % size_n);
    }
    if let Some(tp) = scene.stage.hints.tensor_parallel.filter(|_| has_group_size) {
        offsets.push(tp.rank * size_k % size_n);
        offsets.push((size_n - tp.rank * size_k % size_n) % size_n);
    }
    offsets.sort_unstable();
    offsets.dedup();
    offsets.retain(|&o| o != 0);
    let suspect = |offset: usize| {
        let (id, why) = match has_group_size {
            true => (
                "group-size-as-stride",
                ", as where a group size of -1 is used as a stride or divisor",
            ),
            false => ("scale-of-another-column", ""),
        };
        let text = format!("column n got the scale of column (n + {offset}) mod {size_n}{why}");
        Suspect::new(id, text, move |part| {
            let mut weight = scene.stage.parts[part].weight.clone();
            let order: Vec<usize> = (0..size_n).map(|n| (n + offset) % size_n).collect();
            weight.scales = weight.scales.permute_columns(&order).ok()?;
            Some(Setup { weight: Cow::Owned(weight), ..scene.right(part) })
        })
    };
    offsets.into_iter().map(suspect).collect()
}

/// Scales by a g_idx that the config does not announce: rows in the order of their groups
/// (`static`) treated as rows in any order (`group`).
fn static_order<'s>(scene: &'s Scene<'s>) -> Vec<Suspect<'s>> {
    let Some(g_idx) = scene.stage.hints.unused_g_idx else { return Vec::new() };
    let text = "g_idx was followed, though the config has no act-order: rows of a matrix with static \
                groups were taken for rows in any order";
    vec![Suspect::new("act-order-static-as-group", text, move |part| {
        let groups: Vec<u32> =
            stored(scene, part).map(|k| g_idx.get(k).copied()).collect::<Option<_>>()?;
        Some(Setup { groups: Some(groups), ..scene.right(part) })
    })]
}

/// e8m0 scales whose bytes of the last groups are padding: 0 (2^-127) or 127 (2^0).
pub(super) fn padded_bytes<'s>(scene: &'s Scene<'s>) -> Vec<Suspect<'s>> {
    let e8m0 = |w: &crate::weight::Weight<'_>| w.scales.ty() == ScalarType::FLOAT8_E8M0FNU;
    let Some(first) = scene.stage.parts.first().filter(|p| e8m0(p.weight)) else {
        return Vec::new();
    };
    let rows = first.weight.scales.rows();
    let mut all = Vec::new();
    // Padding is less than half of k.
    for count in 1..rows.div_ceil(2).min(5) {
        for (byte, value) in [(0u32, "2^-127"), (0x7f, "1")] {
            // A product of 2^-127 is as good as none.
            let or = if byte == 0 { ", or these groups are missing from the sum" } else { "" };
            let text = format!(
                "the scales of the last {count} groups of k are the e8m0 byte {byte:#04x} ({value}), \
                 as in padding: padded bytes reach the product{or}"
            );
            all.push(Suspect::new("padded-scale-bytes", text, move |part| {
                let mut weight = scene.stage.parts[part].weight.clone();
                let (mut i, cols) = (0, weight.scales.cols());
                weight.scales = weight.scales.map(weight.scales.ty(), |bits| {
                    i += 1;
                    if (i - 1) / cols >= rows - count { byte } else { bits }
                });
                Some(Setup { weight: Cow::Owned(weight), ..scene.right(part) })
            }));
        }
    }
    all
}
