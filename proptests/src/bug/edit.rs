//! Edits of a case's tensors and config.

use marlinspike::case::{Case, CaseConfig, LinearConfig, MoeConfig};
use marlinspike::num::scalar::{ScalarType, f64_to_bf16_rne, f64_to_f16_rne};
use marlinspike::num::tensor::{Element, Tensor};
use marlinspike::{Error, Result};
use serde_json::Value;

/// Column at position p of a permuted row: scales of groups.
pub(crate) fn grouped(p: usize) -> usize {
    p / 64 * 64 + p % 8 * 8 + p % 64 / 8
}

/// Column at position p of a permuted row: scales of columns, biases.
pub(crate) fn single(p: usize) -> usize {
    p / 32 * 32 + 2 * (p % 32 / 8) + [0, 1, 8, 9, 16, 17, 24, 25][p % 8]
}

/// Changes the elements of an input; an absent one stays absent.
pub(crate) fn input<T: Element>(
    case: &mut Case<'static>,
    name: &str,
    change: impl FnOnce(&mut Vec<T>, &[usize]),
) -> Result<()> {
    if let Some(tensor) = case.inputs.get(name) {
        let tensor = edited(tensor, change)?;
        case.add_input(name, tensor);
    }
    Ok(())
}

/// Changes the elements of an output that the reference computed.
pub(crate) fn output<T: Element>(
    case: &mut Case<'static>,
    name: &str,
    change: impl FnOnce(&mut Vec<T>, &[usize]),
) -> Result<()> {
    let tensor = edited(found(case, name)?, change)?;
    case.add_output(name, tensor);
    Ok(())
}

/// An output that the reference computed.
pub(crate) fn found<'c>(case: &'c Case<'static>, name: &str) -> Result<&'c Tensor<'static>> {
    let absent = || Error::missing(format!("out.{name}"), "this configuration of the bug bank");
    case.output(name).ok_or_else(absent)
}

fn edited<T: Element>(
    tensor: &Tensor<'_>,
    change: impl FnOnce(&mut Vec<T>, &[usize]),
) -> Result<Tensor<'static>> {
    let mut values = tensor.elements::<T>().into_owned();
    change(&mut values, tensor.shape());
    Tensor::from_vec(tensor.name(), tensor.dtype(), tensor.shape().to_vec(), values)
}

/// Sets config keys, which must keep the config valid.
pub(crate) fn keys(case: &mut Case<'static>, changes: &[(&str, Value)]) -> Result<()> {
    let mut map = case.config.to_json();
    map.extend(changes.iter().map(|(key, value)| ((*key).to_owned(), value.clone())));
    case.config = CaseConfig::from_json(case.op, &map)?;
    Ok(())
}

/// Each row of columns, permuted: position n takes column `from`(n).
pub(crate) fn columns<T: Copy>(values: &mut [T], size_n: usize, from: impl Fn(usize) -> usize) {
    for row in values.chunks_exact_mut(size_n) {
        let old = row.to_vec();
        row.iter_mut().enumerate().for_each(|(n, value)| *value = old[from(n)]);
    }
}

/// Each row of columns, packed in one order and read in another.
pub(crate) fn misread<T: Copy>(
    values: &mut [T],
    size_n: usize,
    packed: fn(usize) -> usize,
    read: fn(usize) -> usize,
) {
    for row in values.chunks_exact_mut(size_n) {
        let old = row.to_vec();
        (0..size_n).for_each(|p| row[read(p)] = old[packed(p)]);
    }
}

/// The nibbles of a word, reordered: nibble i takes nibble `from`(i).
pub(crate) fn nibbles(word: u32, from: impl Fn(usize) -> usize) -> u32 {
    (0..8).fold(0, |out, i| out | (word >> (4 * from(i)) & 15) << (4 * i))
}

/// A value of a 16-bit type.
pub(crate) fn value(dtype: ScalarType, bits: u16) -> f64 {
    dtype.to_f64(bits.into())
}

/// The nearest value of a 16-bit type.
pub(crate) fn rounded(dtype: ScalarType, x: f64) -> u16 {
    if dtype == ScalarType::FLOAT16 { f64_to_f16_rne(x) } else { f64_to_bf16_rne(x) }
}

/// The config of a `linear` case.
pub(crate) fn linear(case: &Case<'_>) -> Result<LinearConfig> {
    match &case.config {
        CaseConfig::Linear(config) => Ok(config.clone()),
        other => Err(Error::unsupported(other.op(), "this bug is one of `linear`")),
    }
}

/// The config of a `moe` case.
pub(crate) fn moe(case: &Case<'_>) -> Result<MoeConfig> {
    match &case.config {
        CaseConfig::Moe(config) => Ok(config.clone()),
        other => Err(Error::unsupported(other.op(), "this bug is one of `moe`")),
    }
}
