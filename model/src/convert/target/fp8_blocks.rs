//! What the formats of FP8 blocks share: which stacks they take, and their scales by block.

use marlinspike::config::{ActivationScheme, ScaleStrategy, Scheme};
use marlinspike::layouts::deepgemm::repeat_blocks;
use marlinspike::num::scalar::ScalarType;
use marlinspike::weight::{Codes, Groups, Table, Weight};
use marlinspike::{Error, Result};
use serde_json::{Value, json};

use crate::convert::entry::Entry;

/// Rows and columns of a block.
pub(crate) const BLOCK: usize = 128;

/// Whether the scales of the activations of `scheme` are powers of two.
///
/// # Errors
/// The reason why no product of FP8 blocks takes it.
pub(crate) fn accept(scheme: &Scheme) -> Result<bool, String> {
    let Scheme::Fp8(fp8) = scheme else {
        return Err(format!("found {}, expected fp8 block {BLOCK}x{BLOCK}", scheme.label()));
    };
    if fp8.strategy != (ScaleStrategy::Block { block_n: BLOCK, block_k: BLOCK }) {
        return Err(format!("found {}, expected fp8 block {BLOCK}x{BLOCK}", scheme.label()));
    }
    match fp8.activations {
        ActivationScheme::DynamicGroup(BLOCK) => Ok(false),
        ActivationScheme::DynamicGroupUe8m0(BLOCK) => Ok(true),
        other => {
            Err(format!("activations: found {other:?}, expected dynamic groups of {BLOCK} values"))
        }
    }
}

/// A layer's key for its activations, and how they are quantized.
pub(crate) fn activations(ue8m0: bool) -> (&'static str, Value) {
    ("activations", json!({"type": "float8_e4m3fn", "group_size": BLOCK, "ue8m0": ue8m0}))
}

/// How the activations of a converted stack are quantized; `None` if the entry does not say it.
pub(crate) fn stored_activations(entry: &Entry<'_>) -> Result<Option<ActivationScheme>> {
    let stored = &entry.layer["activations"];
    if stored.is_null() {
        return Ok(None);
    }
    [false, true]
        .into_iter()
        .find(|&ue8m0| *stored == activations(ue8m0).1)
        .map(|ue8m0| match ue8m0 {
            false => Some(ActivationScheme::DynamicGroup(BLOCK)),
            true => Some(ActivationScheme::DynamicGroupUe8m0(BLOCK)),
        })
        .ok_or_else(|| entry.bad("activations", "e4m3fn in groups of 128"))
}

/// The f32 scales `[groups, ⌈N / 128⌉]` of the blocks of `weight`.
///
/// # Errors
/// [`Error::Value`] if the columns of a block have different scales.
pub(crate) fn block_scales(weight: &Weight<'_>) -> Result<Table> {
    let size_n = weight.shape().size_n;
    let first: Vec<usize> = (0..size_n).step_by(BLOCK).collect();
    let blocks = weight.scales.gather_columns(&first)?;
    if repeat_blocks(&blocks, size_n, BLOCK)? != weight.scales {
        let expected = format!("one scale for each {BLOCK} columns");
        return Err(Error::value(&weight.name, &[], "columns with other scales", expected));
    }
    let ty = blocks.ty();
    Ok(match ty {
        ScalarType::FLOAT32 => blocks,
        _ => blocks.map(ScalarType::FLOAT32, |bits| (ty.to_f64(bits) as f32).to_bits()),
    })
}

/// Expert or matrix `e` of `entry`, from its codes and the scales of its columns.
pub(crate) fn weight(
    entry: &Entry<'_>,
    e: usize,
    codes: Codes<'static>,
    scales: Table,
) -> Result<Weight<'static>> {
    let stack = entry.role.prefix().trim_end_matches('_');
    Ok(Weight {
        name: format!("{}.{stack}[{e}]", entry.module),
        ty: entry.ty()?,
        codes,
        scales,
        zeros: None,
        groups: Groups::Uniform(entry.group_size()?),
        global_scale: None,
        bias: None,
    })
}
