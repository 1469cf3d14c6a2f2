//! What `run` says.

use std::collections::BTreeMap;

use marlinspike::Result;
use marlinspike::container::write_container;
use marlinspike::tensor::{DType, Tensor};
use marlinspike::w4a8::Values;
use serde_json::json;
use sha2::{Digest as _, Sha256};

use super::layer::{Layer, Loaded};
use crate::style::printable;

/// Output and definition, side by side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Check {
    /// Values that differ in a bit.
    pub(super) mismatches: usize,
    /// The first of them: token and column, bits found and expected.
    pub(super) first: Option<([usize; 2], u32, u32)>,
}

impl Check {
    /// Compares rows of `size_n`.
    pub(super) fn of(found: &Values, expected: &Values, size_n: usize) -> Self {
        let (found, expected) = (found.bits(), expected.bits());
        let pairs = found.iter().zip(&expected).enumerate();
        let mut differing = pairs.filter(|(_, (a, b))| a != b).peekable();
        let first = differing.peek().map(|&(i, (&a, &b))| ([i / size_n, i % size_n], a, b));
        let missing = found.len().abs_diff(expected.len());
        Self { mismatches: differing.count() + missing, first }
    }
}

/// A run that is over.
pub(super) struct Report<'r> {
    pub(super) loaded: &'r Loaded<'r>,
    pub(super) y: &'r Values,
    pub(super) kernel: &'static str,
    pub(super) threads: usize,
    pub(super) seconds: f64,
    pub(super) check: Option<Check>,
}

/// The values' bytes, little-endian.
fn bytes(y: &Values) -> Vec<u8> {
    match y {
        Values::F32(v) => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
        Values::Bf16(v) => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
    }
}

/// `y` as a safetensors file.
pub(super) fn container(y: &Values, size_n: usize) -> anyhow::Result<Vec<u8>> {
    let dtype = match y {
        Values::F32(_) => DType::F32,
        Values::Bf16(_) => DType::BF16,
    };
    let tensor: Result<_> = Tensor::new("y", dtype, vec![y.len() / size_n, size_n], bytes(y));
    Ok(write_container(&[tensor?], &BTreeMap::new(), Vec::new())?)
}

impl Report<'_> {
    /// Whether nothing differs.
    pub(super) fn is_equal(&self) -> bool {
        self.check.is_none_or(|c| c.mismatches == 0)
    }

    fn shape(&self) -> [usize; 2] {
        let size_n = self.loaded.layer.size_n();
        [self.y.len() / size_n, size_n]
    }

    fn digest(&self) -> String {
        Sha256::digest(bytes(self.y)).iter().map(|b| format!("{b:02x}")).collect()
    }

    /// The layer's kind and sizes.
    fn sizes(&self) -> serde_json::Value {
        match &self.loaded.layer {
            Layer::Moe(moe) => json!({
                "kind": "moe",
                "num_experts": moe.config().num_experts,
                "top_k": moe.config().router.top_k,
                "hidden_size": moe.hidden_size(),
                "intermediate_size": moe.intermediate_size(),
            }),
            Layer::Linear(linear) => {
                let shape = linear.weight().layout().shape();
                json!({"kind": "linear", "size_k": shape.size_k, "size_n": shape.size_n})
            }
        }
    }

    /// One JSON object on one line.
    pub(super) fn json(&self) -> String {
        let check = self.check.map(|c| {
            let first = c.first.map(|(at, found, expected)| {
                json!({"index": at, "found": format!("{found:#x}"), "expected": format!("{expected:#x}")})
            });
            json!({"mismatches": c.mismatches, "first": first})
        });
        let value = json!({
            "layer": self.loaded.module,
            "source": if self.loaded.packed { "packed" } else { "checkpoint" },
            "sizes": self.sizes(),
            "dtype": self.y.ty().name(),
            "shape": self.shape(),
            "sha256": self.digest(),
            "kernel": self.kernel,
            "threads": self.threads,
            "seconds": self.seconds,
            "check": check,
        });
        format!("{value}\n")
    }

    /// Lines for people.
    pub(super) fn text(&self) -> String {
        let sizes = match &self.loaded.layer {
            Layer::Moe(moe) => format!(
                "{} experts, top {}, H {}, I {}",
                moe.config().num_experts,
                moe.config().router.top_k,
                moe.hidden_size(),
                moe.intermediate_size()
            ),
            Layer::Linear(linear) => format!("linear, {}", linear.weight().layout().shape()),
        };
        let source = if self.loaded.packed { "" } else { ", packed from the checkpoint" };
        let [tokens, size_n] = self.shape();
        let threads = if self.threads == 1 { "thread" } else { "threads" };
        let mut text = format!(
            "{}: {sizes}{source}\ny [{tokens}, {size_n}] {}, sha256 {}\n{:.3} ms with {} on {} {threads}\n",
            printable(&self.loaded.module),
            self.y.ty(),
            self.digest(),
            self.seconds * 1e3,
            self.kernel,
            self.threads,
        );
        match self.check {
            None => {}
            Some(Check { first: Some(([m, n], found, expected)), mismatches }) => {
                text.push_str(&format!(
                    "DIFFERENT: {mismatches} values; first at [{m}, {n}]: found {found:#x}, expected {expected:#x}\n"
                ));
            }
            Some(Check { mismatches: 0, .. }) => {
                text.push_str("equal to the scalar definition, every bit\n");
            }
            Some(Check { mismatches, .. }) => {
                text.push_str(&format!("DIFFERENT: {mismatches} values too many or too few\n"));
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_difference_is_named() {
        let expected = Values::F32(vec![0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
        let equal = Check::of(&expected.clone(), &expected, 3);
        assert_eq!(equal, Check { mismatches: 0, first: None });
        // Zeros of both signs are equal as numbers.
        let found = Values::F32(vec![0.0, 1.0, 2.0, 3.0, -4.0, 5.5]);
        let differs = Check::of(&found, &expected, 3);
        assert_eq!(differs.mismatches, 2);
        assert_eq!(differs.first, Some(([1, 1], 0xc080_0000, 0x4080_0000)));
        let zero = Check::of(&Values::F32(vec![-0.0]), &Values::F32(vec![0.0]), 1);
        assert_eq!(zero.mismatches, 1);
        assert_eq!(Check::of(&Values::Bf16(vec![1]), &Values::Bf16(vec![1, 2]), 1).mismatches, 1);
    }
}
