//! Unpacks Marlin's bytes to the hub.

use marlinspike::layouts::marlin::{InputDtype, ScalePermutation, Stored};
use marlinspike::num::dims::Shape;
use marlinspike::num::scalar::ScalarType;
use marlinspike::prepare::gate_up::GateUp;
use marlinspike::prepare::pad::{PaddedKernel, unpad, unpad_w13};
use marlinspike::prepare::padded_shard::PaddedShard;
use marlinspike::select::Platform;
use marlinspike::weight::Weight;
use marlinspike::{Error, Result};
use rayon::prelude::*;

use crate::convert::entry::Entry;
use crate::model::layers::Role;

/// Every expert's weight.
///
/// # Errors
/// Naming the key or tensor that does not fit; [`Error::Unsupported`] for unknown activations.
pub(super) fn stack(entry: &Entry<'_>) -> Result<Vec<Weight<'static>>> {
    let input_dtype = match entry.section["input_dtype"].as_str() {
        Some("model") => InputDtype::Model,
        Some("fp8") => InputDtype::Fp8,
        Some("int8") => InputDtype::Int8,
        _ => {
            let what = format!("input_dtype {}", entry.section["input_dtype"]);
            return Err(Error::unsupported(what, "expected model, fp8 or int8"));
        }
    };
    let dtype = entry.section["dtype"].as_str().and_then(ScalarType::from_name);
    let dtype = dtype.ok_or_else(|| Error::missing("dtype", "config.json: marlinspike"))?;
    let permutation = match entry.text("scale_permutation") {
        Some("grouped") => ScalePermutation::Grouped,
        Some("single") => ScalePermutation::Single,
        _ => return Err(entry.bad("scale_permutation", "grouped or single")),
    };
    let (experts, shape) = (entry.experts()?, entry.shape()?);
    let (ty, group_size) = (entry.ty()?, entry.group_size()?);
    let globals = entry.floats("global_scale", experts)?;
    let factor = entry.layer["scale_factor"].as_f64().unwrap_or(1.0) as f32;
    let one = |e: usize| -> Result<Weight<'static>> {
        let missing = |role| entry.bad("tensors", role);
        let order = match (entry.part("g_idx", e)?, entry.part("g_idx_sort_indices", e)?) {
            (Some(g_idx), Some(perm)) => Some([g_idx, perm]),
            _ => None,
        };
        let stored = Stored {
            name: format!("{}{}[{e}]", entry.module, entry.role.prefix()),
            ty,
            dtype,
            input_dtype,
            shape,
            group_size,
            permutation,
            weight: entry.part("weight", e)?.ok_or_else(|| missing("weight"))?,
            scales: entry.part("scales", e)?.ok_or_else(|| missing("scales"))?,
            zeros: entry.part("zeros", e)?,
            order,
            bias: entry.part("bias", e)?,
            global: globals.as_ref().map(|g| [g[e], factor]),
        };
        unpadded(entry, stored.restore()?)
    };
    (0..experts).into_par_iter().map(one).collect()
}

/// Removes the padding of gpt-oss's sizes.
fn unpadded(entry: &Entry<'_>, weight: Weight<'static>) -> Result<Weight<'static>> {
    let from = &entry.layer["padded_from"];
    if from.is_null() {
        return Ok(weight);
    }
    let size = |key: &str| from[key].as_u64().and_then(|n| usize::try_from(n).ok());
    let sizes = size("hidden_size").zip(size("intermediate_size"));
    let (hidden, whole) = sizes.ok_or_else(|| entry.bad("padded_from", "two sizes"))?;
    let number = |key: &str| entry.section[key].as_u64().and_then(|n| usize::try_from(n).ok());
    let number = |key: &str| number(key).ok_or_else(|| Error::missing(key, "config.json"));
    // With expert parallelism each rank holds whole experts.
    let [tp_size, tp_rank] = match number("ep_size")? {
        1 => [number("tp_size")?, number("tp_rank")?],
        _ => [1, 0],
    };
    let shard = PaddedShard {
        hidden_size: hidden,
        intermediate_size: whole,
        tp_size,
        tp_rank,
        backend: PaddedKernel::Marlin,
        platform: Platform::Cuda,
    };
    let inner = shard.features()?.len();
    if inner == 0 {
        let what = format!("{}: features of rank {tp_rank} of {tp_size}", entry.module);
        return Err(Error::size(what, 0, "1 or more"));
    }
    match entry.role {
        Role::W13 => unpad_w13(&weight, GateUp::Interleaved, [hidden, inner]),
        _ => unpad(&weight, Shape::new(inner, hidden)),
    }
}
