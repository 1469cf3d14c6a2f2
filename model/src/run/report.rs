//! What `run` says.

use std::collections::BTreeMap;

use marlinspike::container::write_container;
use marlinspike::moe::families::Differences;
use marlinspike::scalar::ScalarType;
use marlinspike::tensor::{DType, Tensor};
use marlinspike::w4a8::Values;
use marlinspike::{Error, Result};
use serde_json::json;
use sha2::{Digest as _, Sha256};

use super::origin::Partial;
use super::routing::RoutingReport;
use crate::model::routing::summary;
use crate::style::printable;

/// Rows of a result, as bits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    /// `y`, or the stage of a layer.
    pub name: &'static str,
    /// FLOAT32, FLOAT16 or BFLOAT16.
    pub ty: ScalarType,
    /// Columns.
    pub size_n: usize,
    /// Little-endian, row by row.
    pub bytes: Vec<u8>,
}

impl Output {
    /// 16-bit floats.
    pub fn halves(name: &'static str, ty: ScalarType, size_n: usize, bits: &[u16]) -> Self {
        Self { name, ty, size_n, bytes: bits.iter().flat_map(|b| b.to_le_bytes()).collect() }
    }

    /// `y` of the int4 path.
    pub(super) fn values(y: &Values, size_n: usize) -> Self {
        match y {
            Values::Bf16(v) => Self::halves("y", y.ty(), size_n, v),
            Values::F32(v) => {
                let bytes = v.iter().flat_map(|x| x.to_le_bytes()).collect();
                Self { name: "y", ty: y.ty(), size_n, bytes }
            }
        }
    }

    /// Bytes of a value.
    fn width(&self) -> usize {
        self.ty.storage_bits() as usize / 8
    }

    fn shape(&self) -> [usize; 2] {
        [self.bytes.len() / self.width() / self.size_n.max(1), self.size_n]
    }

    /// Each value's bits.
    fn bits(&self) -> impl Iterator<Item = u32> + '_ {
        self.bytes
            .chunks_exact(self.width())
            .map(|b| b.iter().rev().fold(0, |bits, &byte| bits << 8 | u32::from(byte)))
    }

    fn digest(&self) -> String {
        Sha256::digest(&self.bytes).iter().map(|b| format!("{b:02x}")).collect()
    }

    fn tensor(&self) -> Result<Tensor<'_>> {
        let dtype = match self.ty {
            ScalarType::FLOAT32 => DType::F32,
            ScalarType::FLOAT16 => DType::F16,
            ScalarType::BFLOAT16 => DType::BF16,
            other => return Err(Error::unsupported(other, "an output of 16 or 32 bits")),
        };
        Tensor::new(self.name, dtype, self.shape().to_vec(), self.bytes.as_slice())
    }
}

/// Output and definition, side by side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Check {
    /// Values that differ in a bit.
    pub(super) mismatches: usize,
    /// The first of them: token and column, bits found and expected.
    pub(super) first: Option<([usize; 2], u32, u32)>,
    /// Of a layer whose stages were compared: the first that differs, or the last.
    pub(super) stage: Option<&'static str>,
}

impl Check {
    /// Compares two results of one shape.
    pub(super) fn of(found: &Output, expected: &Output) -> Self {
        let pairs = found.bits().zip(expected.bits()).enumerate();
        let mut differing = pairs.filter(|(_, (a, b))| a != b).peekable();
        let size_n = found.size_n.max(1);
        let first = differing.peek().map(|&(i, (a, b))| ([i / size_n, i % size_n], a, b));
        let missing = found.bits().count().abs_diff(expected.bits().count());
        Self { mismatches: differing.count() + missing, first, stage: None }
    }

    /// Compares stage by stage and stops at the first that differs.
    pub(super) fn of_stages(found: &[Output], expected: &[Output]) -> Self {
        let checks = found.iter().zip(expected).map(|(a, b)| {
            let stage = (found.len() > 1).then_some(a.name);
            Self { stage, ..Self::of(a, b) }
        });
        let mut last = Self { mismatches: 0, first: None, stage: None };
        for check in checks {
            last = check;
            if last.mismatches > 0 {
                break;
            }
        }
        last
    }
}

/// A run that is over.
pub(super) struct Report<'r> {
    pub(super) module: &'r str,
    /// Whether the layer was packed in its file.
    pub(super) packed: bool,
    /// What is to be said of where it came from.
    pub(super) source: &'static str,
    /// Kind and sizes, for machines.
    pub(super) sizes: serde_json::Value,
    /// The same for people.
    pub(super) summary: String,
    pub(super) y: &'r Output,
    pub(super) kernel: &'static str,
    pub(super) threads: usize,
    pub(super) seconds: f64,
    pub(super) check: Option<Check>,
    /// What the check compared with.
    pub(super) checked_by: &'static str,
    pub(super) notes: &'r [String],
    /// Of experts whose inputs are router logits.
    pub(super) routing: Option<RoutingReport>,
    /// Present where the layer is one rank's part.
    pub(super) partial: Option<&'r Partial>,
    /// How it was computed, and whether the checkpoint's method does otherwise.
    pub(super) arithmetic: String,
}

/// Outputs as a safetensors file.
pub(super) fn container(outputs: &[Output]) -> anyhow::Result<Vec<u8>> {
    let tensors = outputs.iter().map(Output::tensor).collect::<Result<Vec<_>>>()?;
    Ok(write_container(&tensors, &BTreeMap::new(), Vec::new())?)
}

impl Report<'_> {
    /// Whether nothing differs.
    pub(super) fn is_equal(&self) -> bool {
        let routing = self.routing.as_ref().and_then(|r| r.differences.as_ref());
        self.check.is_none_or(|c| c.mismatches == 0) && routing.is_none_or(Differences::is_empty)
    }

    /// One JSON object on one line.
    pub(super) fn json(&self) -> String {
        let check = self.check.map(|c| {
            let first = c.first.map(|(at, found, expected)| {
                json!({"index": at, "found": format!("{found:#x}"), "expected": format!("{expected:#x}")})
            });
            let mut check = json!({"mismatches": c.mismatches, "first": first});
            if let Some(stage) = c.stage {
                check["stage"] = json!(stage);
            }
            check
        });
        let mut value = json!({
            "layer": self.module,
            "source": if self.packed { "packed" } else { "checkpoint" },
            "sizes": self.sizes,
            "dtype": self.y.ty.name(),
            "shape": self.y.shape(),
            "sha256": self.y.digest(),
            "kernel": self.kernel,
            "threads": self.threads,
            "seconds": self.seconds,
            "check": check,
            "arithmetic": self.arithmetic,
            "routing": self.routing.as_ref().map(RoutingReport::json),
            "partial": self.partial.map(Partial::as_json),
        });
        if !self.notes.is_empty() {
            value["notes"] = json!(self.notes);
        }
        format!("{value}\n")
    }

    /// Lines for people.
    pub(super) fn text(&self) -> String {
        let [tokens, size_n] = self.y.shape();
        let threads = if self.threads == 1 { "thread" } else { "threads" };
        let mut text =
            format!("{}: {}{}\n", printable(self.module), printable(&self.summary), self.source,);
        if let Some(partial) = self.partial {
            text.push_str(&format!("{}\n", partial.line()));
        }
        if let Some(routing) = &self.routing {
            text.push_str(&format!("{}\n", printable(&summary(&routing.source, &routing.rule))));
        }
        text.push_str(&format!("arithmetic: {}\n", printable(&self.arithmetic)));
        for note in self.notes {
            text.push_str(&format!("{}\n", printable(note)));
        }
        text.push_str(&format!(
            "y [{tokens}, {size_n}] {}, sha256 {}\n{:.3} ms with {} on {} {threads}\n",
            self.y.ty,
            self.y.digest(),
            self.seconds * 1e3,
            self.kernel,
            self.threads,
        ));
        if let Some(line) = self.routing.as_ref().and_then(RoutingReport::line) {
            text.push_str(&format!("{}\n", printable(&line)));
        }
        match self.check {
            None => {}
            Some(Check { first: Some(([m, n], found, expected)), mismatches, stage }) => {
                let of = stage.map_or(String::new(), |s| format!(" of {s}"));
                text.push_str(&format!(
                    "DIFFERENT: {mismatches} values{of}; first at [{m}, {n}]: found {found:#x}, expected {expected:#x}\n"
                ));
            }
            Some(Check { mismatches: 0, .. }) => {
                text.push_str(&format!("equal to {}, every bit\n", self.checked_by));
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
        let of = |values: &[f32], size_n| Output::values(&Values::F32(values.to_vec()), size_n);
        let expected = of(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0], 3);
        let equal = Check::of(&expected, &expected);
        assert_eq!(equal, Check { mismatches: 0, first: None, stage: None });
        // Zeros of both signs are equal as numbers.
        let found = of(&[0.0, 1.0, 2.0, 3.0, -4.0, 5.5], 3);
        let differs = Check::of(&found, &expected);
        assert_eq!(differs.mismatches, 2);
        assert_eq!(differs.first, Some(([1, 1], 0xc080_0000, 0x4080_0000)));
        assert_eq!(Check::of(&of(&[-0.0], 1), &of(&[0.0], 1)).mismatches, 1);
        let halves = |bits: &[u16]| Output::halves("y", ScalarType::BFLOAT16, 1, bits);
        assert_eq!(Check::of(&halves(&[1]), &halves(&[1, 2])).mismatches, 1);
    }

    #[test]
    fn the_first_stage_that_differs_is_named() {
        let stage = |name, bits: [u16; 2]| Output::halves(name, ScalarType::FLOAT16, 2, &bits);
        let expected = [stage("gate_up", [1, 2]), stage("down", [3, 4]), stage("y", [5, 6])];
        assert_eq!(Check::of_stages(&expected, &expected).stage, Some("y"));
        let found = [stage("gate_up", [1, 2]), stage("down", [3, 9]), stage("y", [0, 0])];
        let check = Check::of_stages(&found, &expected);
        assert_eq!((check.stage, check.mismatches), (Some("down"), 1));
        assert_eq!(check.first, Some(([0, 1], 9, 4)));
    }
}
