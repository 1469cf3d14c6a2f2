//! Distributes the outputs over files.

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;

use marlinspike::container::TensorSpec;

use super::{ConversionPlan, Item, Output, Settings, ShardPlan, Source};
use crate::model::{Model, ModelError};

/// Bytes of one piece of a tensor that is copied.
const COPY_BYTES: u64 = 16 << 20;

/// Pieces of a copied tensor of `len` bytes.
pub fn copy_runs(len: u64) -> impl Iterator<Item = Range<u64>> {
    (0..len).step_by(COPY_BYTES as usize).map(move |at| at..(at + COPY_BYTES).min(len))
}

/// Tensors that must be in one file, and their size.
struct Unit {
    name: String,
    items: Vec<Item>,
    bytes: u64,
}

impl Unit {
    fn new(name: String, items: Vec<Item>) -> Result<Self, ModelError> {
        let mut bytes = 0u64;
        for item in &items {
            let overflow = || ModelError::module(&item.spec.name, "the size overflows");
            let len = item.spec.byte_len().ok_or_else(overflow)?;
            bytes = bytes.checked_add(len).ok_or_else(overflow)?;
        }
        Ok(Self { name, items, bytes })
    }
}

/// Stacks and copied tensors in files of at most `settings.shard_bytes` bytes, in the order of
/// their names. A larger unit gets a file of its own.
///
/// # Errors
/// [`ModelError::Module`] where two tensors would have one name or a size overflows.
pub(super) fn shards(
    plan: &ConversionPlan,
    model: &Model<'_>,
    copied: Vec<&str>,
    settings: &Settings,
) -> Result<Vec<ShardPlan>, ModelError> {
    let mut units = Vec::new();
    for name in copied {
        let Some(entry) = model.entry(name) else { continue };
        let spec = TensorSpec {
            name: name.to_owned(),
            dtype: entry.dtype(),
            shape: entry.shape().to_vec(),
        };
        units.push(Unit::new(name.to_owned(), vec![Item { spec, source: Source::Copy }])?);
    }
    let mut described: BTreeMap<&str, Vec<Item>> = BTreeMap::new();
    for (stack, of) in plan.stacks.iter().enumerate() {
        let item = |o: &Output| Item {
            spec: o.spec.clone(),
            source: Source::Stack { stack, kind: o.kind },
        };
        let items = of.outputs.iter().map(item);
        if plan.descriptions.contains_key(&of.module) {
            described.entry(&of.module).or_default().extend(items);
            continue;
        }
        units.push(Unit::new(format!("{}.{}", of.module, of.role.prefix()), items.collect())?);
    }
    // A layer that the file's metadata describes is in one file, so that the file is
    // self-contained.
    for (module, items) in described {
        units.push(Unit::new(format!("{module}."), items)?);
    }
    units.sort_by(|a, b| a.name.cmp(&b.name));
    let mut seen = HashSet::new();
    for item in units.iter().flat_map(|u| &u.items) {
        if !seen.insert(item.spec.name.as_str()) {
            let what = "two tensors would have this name";
            return Err(ModelError::module(&item.spec.name, what));
        }
    }
    let sizes: Vec<u64> = units.iter().map(|u| u.bytes).collect();
    let runs = even_runs(&sizes, settings.shard_bytes);
    let count = runs.len();
    let name = |i: usize| match count {
        1 => "model.safetensors".to_owned(),
        _ => format!("model-{:05}-of-{count:05}.safetensors", i + 1),
    };
    let mut units = units.into_iter();
    let shard = |(i, run): (usize, Range<usize>)| {
        let mut items: Vec<_> = units.by_ref().take(run.len()).flat_map(|u| u.items).collect();
        // Wider types first, so that every tensor is aligned in the mapped file.
        items.sort_by(|a, b| {
            let bits = |x: &Item| std::cmp::Reverse(x.spec.dtype.bits());
            bits(a).cmp(&bits(b)).then_with(|| a.spec.name.cmp(&b.spec.name))
        });
        let metadata = metadata(plan, settings, &items);
        ShardPlan { name: name(i), items, metadata }
    };
    Ok(runs.into_iter().enumerate().map(shard).collect())
}

/// The metadata key that states which rank's part of the described layers a file holds: a JSON
/// object of `tp_size`, `tp_rank`, `ep_size` and `ep_rank`; absent on a single rank.
pub const RANKS_KEY: &str = "marlinspike.ranks";

/// The metadata of a file: `format`, and the descriptions of its layers.
fn metadata(
    plan: &ConversionPlan,
    settings: &Settings,
    items: &[Item],
) -> BTreeMap<String, String> {
    let mut metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    let (tp, ep) = (settings.tp, settings.ep);
    let stated = settings.format.target().states_ranks() && !plan.descriptions.is_empty();
    if stated && (tp.size > 1 || ep.size > 1) {
        let ranks = serde_json::json!({
            "tp_size": tp.size, "tp_rank": tp.rank, "ep_size": ep.size, "ep_rank": ep.rank,
        });
        metadata.insert(RANKS_KEY.to_owned(), ranks.to_string());
    }
    for item in items {
        let Source::Stack { stack, .. } = item.source else { continue };
        let module = &plan.stacks[stack].module;
        if let Some(description) = plan.descriptions.get(module) {
            metadata.insert(description.key.clone(), description.value.to_string());
        }
    }
    metadata
}

/// Runs of consecutive sizes, each of at most `limit` or a single one.
fn runs(sizes: &[u64], limit: u64) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    let mut used = 0u64;
    for (i, &size) in sizes.iter().enumerate() {
        match runs.last_mut() {
            Some(run) if used.checked_add(size).is_some_and(|sum| sum <= limit) => {
                used += size;
                run.end = i + 1;
            }
            _ => {
                used = size;
                runs.push(i..i + 1);
            }
        }
    }
    runs
}

/// As few runs as [`runs`] makes, of about equal size: threads that each fill a file then end at
/// about the same time.
fn even_runs(sizes: &[u64], limit: u64) -> Vec<Range<usize>> {
    let count = runs(sizes, limit).len();
    // The smallest limit with this number of files; a larger limit never gives more.
    let (mut low, mut high) = (0, limit);
    while low < high {
        let middle = low + (high - low) / 2;
        match runs(sizes, middle).len() <= count {
            true => high = middle,
            false => low = middle + 1,
        }
    }
    runs(sizes, high)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_few_whole_and_even() {
        let sums = |sizes: &[u64], limit| {
            let runs = even_runs(sizes, limit);
            assert_eq!(runs.iter().cloned().flatten().collect::<Vec<_>>().len(), sizes.len());
            runs.into_iter().map(|r| sizes[r].iter().sum()).collect::<Vec<u64>>()
        };
        assert_eq!(sums(&[], 10), Vec::<u64>::new());
        assert_eq!(sums(&[2, 1, 2, 1, 2, 1, 2, 1], 10), [6, 6]);
        assert_eq!(sums(&[2, 1, 2, 1, 2, 1, 2, 1], 12), [12]);
        assert_eq!(sums(&[5, 5, 5], 9), [5, 5, 5]);
        // A unit above the limit gets a file of its own.
        assert_eq!(sums(&[1, 30, 1, 1], 10), [1, 30, 2]);
        assert_eq!(sums(&[u64::MAX, u64::MAX], u64::MAX), [u64::MAX, u64::MAX]);
        assert_eq!(sums(&[3, 4], 0), [3, 4]);
    }
}
