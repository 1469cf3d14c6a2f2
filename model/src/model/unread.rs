//! Tensors below a quantized matrix that its scheme does not read.
//!
//! The names come from the files, not from a list: everything below the matrix's prefix that
//! [`bindings`] does not name is either redundant, which its values show, or a reason to refuse the
//! layer. A checkpoint with such a tensor means another matrix than the config describes.

use marlinspike::config::Scheme;
use marlinspike::formats::compressed_tensors;
use marlinspike::formats::integers::IntFormat;
use marlinspike::num::dims::GroupSize;
use marlinspike::num::tensor::{DType, Tensor};

use super::bind::{act_order, bindings, packs_words};
use super::matrix::Matrix;
use super::stack::Stack;
use super::{Model, ModelError};

/// The number of tensors of one layer that a message names.
const SHOWN: usize = 3;

/// Scales of the attention's KV cache, which exporters store below its projections. No product of
/// the projection has them.
const CACHE: &[&str] = &["k_scale", "v_scale", "q_scale", "kv_scale", "prob_output_scale"];
/// The projections whose outputs the KV cache holds.
const CACHED: &[&str] = &["k_proj", "v_proj", "kv_proj", "qkv_proj"];

/// The reasons to refuse `stack` for tensors that nothing reads; empty if every tensor is read or
/// redundant.
///
/// # Errors
/// As [`Model::tensor`].
pub(super) fn reasons(model: &Model<'_>, stack: &Stack) -> Result<Vec<String>, ModelError> {
    let mut found = Vec::new();
    let mut last = None;
    for matrix in stack.experts.iter().flatten() {
        // The experts of a stored stack share their tensors.
        if last.replace(&matrix.prefix) != Some(&matrix.prefix) {
            of_matrix(model, &stack.scheme, matrix, &mut found)?;
        }
    }
    let more = found.len().saturating_sub(SHOWN);
    found.truncate(SHOWN);
    if more > 0 {
        found.push(format!("and {more} more tensors that nothing reads"));
    }
    Ok(found)
}

/// Adds the reasons of one matrix to `found`.
fn of_matrix(
    model: &Model<'_>,
    scheme: &Scheme,
    matrix: &Matrix,
    found: &mut Vec<String>,
) -> Result<(), ModelError> {
    let prefix = &matrix.prefix;
    let full = |suffix: &&str| format!("{prefix}{suffix}");
    let first = |suffixes: &'static [&'static str]| {
        suffixes.iter().map(full).find(|name| model.entry(name).is_some())
    };
    let read: Vec<String> =
        bindings(scheme).into_iter().filter_map(|b| first(b.suffixes)).collect();
    // The weight is first. Words of another width are another format.
    let weight = read.first().and_then(|name| model.entry(name));
    let is_word = |dtype| matches!(dtype, DType::I32 | DType::U32);
    if let Some(entry) = weight.filter(|e| packs_words(scheme) && !is_word(e.dtype())) {
        let (name, dtype) = (entry.name(), entry.dtype());
        found.push(format!("tensor `{name}`: found codes packed in {dtype}, expected I32"));
        return Ok(());
    }
    if let Some(entry) =
        weight.filter(|e| matches!(scheme, Scheme::Fp8(_)) && e.dtype() != DType::F8E4M3)
    {
        let (name, dtype) = (entry.name(), entry.dtype());
        found.push(format!("tensor `{name}`: found {dtype}, expected F8_E4M3: {}", scheme.label()));
        return Ok(());
    }
    for name in model.names_below(prefix).filter(|name| !read.iter().any(|r| r == name)) {
        let what = &name[prefix.len()..];
        if let Some(reason) = contradiction(model, scheme, matrix, (name, what))? {
            found.push(format!("tensor `{name}`: {reason}"));
        }
    }
    Ok(())
}

/// Why the tensor `name`, `what` below its matrix, changes the matrix or its activations; `None` if
/// it is redundant.
fn contradiction(
    model: &Model<'_>,
    scheme: &Scheme,
    matrix: &Matrix,
    (name, what): (&str, &str),
) -> Result<Option<String>, ModelError> {
    let module = matrix.prefix.trim_end_matches('.');
    let projection = module.rsplit('.').next().unwrap_or(module);
    let packed = format!("{}weight_packed", matrix.prefix);
    // The loader compares the declared shape with the codes.
    let declared = what == "weight_shape" && model.entry(&packed).is_some();
    let of_cache = CACHE.contains(&what) || what == "output_scale" && CACHED.contains(&projection);
    // Static scales of the activations of FP8 experts in three dimensions.
    let activations = matrix.index.is_some() && what == "_activation_scale";
    if declared || of_cache || activations {
        return Ok(None);
    }
    if let Some((format, bits)) = integers(scheme) {
        let tensor = || model.tensor(name);
        if what == format.names.zeros {
            return Ok(zeros(&tensor()?, bits, (format.symmetric_zero)(bits)));
        }
        if what == format.names.g_idx && !act_order(scheme) {
            return groups(&tensor()?, scheme.group_size());
        }
    }
    Ok(Some(format!("{} does not read it", scheme.label())))
}

/// The format of symmetric integers, and their bits.
fn integers(scheme: &Scheme) -> Option<(&'static IntFormat, u32)> {
    let format = match scheme {
        Scheme::Wna16(w) if w.symmetric() => w.checkpoint_format,
        Scheme::W4A8Int8 { checkpoint_format, .. } => checkpoint_format,
        Scheme::W4A8Fp8 { .. } => &compressed_tensors::PACKED,
        _ => return None,
    };
    Some((format, scheme.bits()?))
}

/// Compares stored zero points with the only one of a symmetric scheme, `middle` as a field.
fn zeros(tensor: &Tensor<'_>, bits: u32, middle: u8) -> Option<String> {
    let wide = middle | middle.checked_shl(bits).unwrap_or(0);
    // Bytes of their own hold signed zero points around 0.
    let expected = if matches!(tensor.dtype(), DType::I8 | DType::U8) { 0 } else { wide };
    let at = tensor.bytes().iter().position(|&byte| byte != expected)?;
    let shift = if tensor.bytes()[at] & 0xf == expected & 0xf { 8 - bits } else { 0 };
    let field = |byte: u8| u32::from(byte) >> shift & ((1u32 << bits) - 1);
    Some(format!(
        "found the stored zero point {}, but the config says symmetric, which is {} everywhere",
        field(tensor.bytes()[at]),
        field(expected),
    ))
}

/// Compares stored groups with those of a scheme without act-order.
fn groups(tensor: &Tensor<'_>, group_size: GroupSize) -> Result<Option<String>, ModelError> {
    let found: Vec<i64> = match tensor.dtype() {
        DType::I32 => tensor.elements::<i32>().iter().map(|&g| g.into()).collect(),
        DType::I64 => tensor.elements::<i64>().to_vec(),
        other => return Ok(Some(format!("found type {other}, expected I32"))),
    };
    // compressed-tensors fills the groups of a matrix without an order with -1.
    if found.iter().all(|&group| group == -1) {
        return Ok(None);
    }
    let expected = |k: usize| match group_size {
        GroupSize::Of(size) => (k / size) as i64,
        GroupSize::Channel => 0,
    };
    let wrong = found.iter().enumerate().find(|&(k, &group)| group != expected(k));
    Ok(wrong.map(|(k, group)| {
        format!(
            "found group {group} for row {k}, but the config says no act-order, with group {} \
             there",
            expected(k)
        )
    }))
}
