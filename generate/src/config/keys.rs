//! Keys of a `config.json`, by type.

use std::collections::BTreeSet;

use serde_json::Value;

use super::DenseLayers;
use crate::error::{GenerateError, Result};

/// Reads keys; null counts as absent.
pub(super) struct Keys<'c>(pub(super) &'c Value);

impl<'c> Keys<'c> {
    pub(super) fn get(&self, key: &str) -> Option<&'c Value> {
        self.0.get(key).filter(|v| !v.is_null())
    }

    pub(super) fn size(&self, key: &'static str, limit: usize) -> Result<Option<usize>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let size = value.as_u64().and_then(|n| usize::try_from(n).ok());
        let size = size.filter(|n| (1..=limit).contains(n));
        size.map(Some)
            .ok_or_else(|| GenerateError::config(key, value, format!("a number from 1 to {limit}")))
    }

    /// As [`Keys::size`], also zero.
    pub(super) fn count(&self, key: &'static str, limit: usize) -> Result<Option<usize>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let count = value.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| *n <= limit);
        let expected = || GenerateError::config(key, value, format!("a number from 0 to {limit}"));
        count.map(Some).ok_or_else(expected)
    }

    pub(super) fn need(&self, key: &'static str, limit: usize) -> Result<usize> {
        let expected = || GenerateError::config(key, "none", format!("a number from 1 to {limit}"));
        self.size(key, limit)?.ok_or_else(expected)
    }

    pub(super) fn flag(&self, key: &'static str, default: bool) -> Result<bool> {
        match self.get(key) {
            None => Ok(default),
            Some(Value::Bool(b)) => Ok(*b),
            Some(other) => Err(GenerateError::config(key, other, "true or false")),
        }
    }

    /// A finite number.
    pub(super) fn number(&self, key: &'static str) -> Result<Option<f64>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let number = value.as_f64().filter(|x| x.is_finite());
        number.map(Some).ok_or_else(|| GenerateError::config(key, value, "a number"))
    }

    pub(super) fn positive(&self, key: &'static str) -> Result<Option<f64>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let number = value.as_f64().filter(|x| x.is_finite() && *x > 0.0);
        number.map(Some).ok_or_else(|| GenerateError::config(key, value, "a positive number"))
    }

    /// Which layers have experts.
    pub(super) fn sparse(&self, rule: DenseLayers, num_layers: usize) -> Result<Vec<bool>> {
        match rule {
            DenseLayers::None => Ok(vec![true; num_layers]),
            DenseLayers::Listed => self.unlisted(num_layers),
            DenseLayers::First { default } => {
                let first = self.count("first_k_dense_replace", num_layers)?.unwrap_or(default);
                let step = self.size("moe_layer_freq", 1 << 20)?.unwrap_or(1);
                let is_sparse = |i: usize| i >= first && i.is_multiple_of(step);
                Ok((0..num_layers).map(is_sparse).collect())
            }
        }
    }

    /// Which layers have a sliding window, by `layer_types`.
    pub(super) fn windowed(&self, num_layers: usize) -> Result<Vec<bool>> {
        let Some(found) = self.get("layer_types") else {
            return Ok((0..num_layers).map(|i| i.is_multiple_of(2)).collect());
        };
        let kind = |v: &Value| match v.as_str() {
            Some("sliding_attention") => Some(true),
            Some("full_attention") => Some(false),
            _ => None,
        };
        let list: Option<Vec<bool>> = found.as_array().and_then(|l| l.iter().map(kind).collect());
        list.filter(|list| list.len() == num_layers).ok_or_else(|| {
            let expected = format!("sliding_attention or full_attention for {num_layers} layers");
            GenerateError::config("layer_types", found, expected)
        })
    }

    /// Layers with experts by `mlp_only_layers` and `decoder_sparse_step`.
    fn unlisted(&self, num_layers: usize) -> Result<Vec<bool>> {
        let step = self.size("decoder_sparse_step", 1 << 20)?.unwrap_or(1);
        let dense: BTreeSet<u64> = match self.get("mlp_only_layers") {
            None => BTreeSet::new(),
            Some(list) => {
                let numbers = list.as_array().map(|l| l.iter().map(Value::as_u64).collect());
                let expected =
                    || GenerateError::config("mlp_only_layers", list, "a list of layers");
                numbers.flatten().ok_or_else(expected)?
            }
        };
        let is_sparse = |i: usize| !dense.contains(&(i as u64)) && (i + 1).is_multiple_of(step);
        Ok((0..num_layers).map(is_sparse).collect())
    }
}
