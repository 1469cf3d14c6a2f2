//! The result of a run.

use marlinspike::moe::families::Differences;
use marlinspike::num::dims::Shape;
use marlinspike::num::scalar::ScalarType;
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::w4a8::Values;
use marlinspike::{Error, Result};
use rayon::ThreadPool;
use sha2::{Digest as _, Sha256};

use super::origin::Partial;
use super::routing::RoutingReport;

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

    /// Values that `ty` represents.
    pub(crate) fn floats(
        name: &'static str,
        ty: ScalarType,
        size_n: usize,
        values: &[f32],
    ) -> Self {
        let width = ty.storage_bits() as usize / 8;
        let bytes = |v: &f32| ty.encode_rne(f64::from(*v)).to_le_bytes().into_iter().take(width);
        Self { name, ty, size_n, bytes: values.iter().flat_map(bytes).collect() }
    }

    /// `y` of the int4 path.
    pub fn values(y: &Values, size_n: usize) -> Self {
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

    /// Rows and columns.
    pub fn shape(&self) -> [usize; 2] {
        [self.bytes.len() / self.width() / self.size_n.max(1), self.size_n]
    }

    /// Each value's bits.
    pub(crate) fn bits(&self) -> impl Iterator<Item = u32> + '_ {
        self.bytes
            .chunks_exact(self.width())
            .map(|b| b.iter().rev().fold(0, |bits, &byte| bits << 8 | u32::from(byte)))
    }

    /// SHA-256 of the bytes, in hexadecimal.
    pub fn digest(&self) -> String {
        Sha256::digest(&self.bytes).iter().map(|b| format!("{b:02x}")).collect()
    }

    /// The output as a tensor.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for numbers of other than 16 or 32 bits.
    pub fn tensor(&self) -> Result<Tensor<'_>> {
        let dtype = match self.ty {
            ScalarType::FLOAT32 => DType::F32,
            ScalarType::FLOAT16 => DType::F16,
            ScalarType::BFLOAT16 => DType::BF16,
            other => return Err(Error::unsupported(other, "an output of 16 or 32 bits")),
        };
        Tensor::new(self.name, dtype, self.shape().to_vec(), self.bytes.as_slice())
    }
}

/// The comparison of an output with the definition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Check {
    /// Values that differ in a bit.
    pub mismatches: usize,
    /// The first of them: token and column, bits found and expected.
    pub first: Option<([usize; 2], u32, u32)>,
    /// If stages were compared: the first that differs, or the last.
    pub stage: Option<&'static str>,
    /// Values without a bound, because their sums may overflow or are not finite. They are not judged.
    pub unbounded: usize,
}

impl Check {
    /// Compares two results of one shape.
    pub fn of(found: &Output, expected: &Output) -> Self {
        let pairs = found.bits().zip(expected.bits()).enumerate();
        let mut differing = pairs.filter(|(_, (a, b))| a != b).peekable();
        let size_n = found.size_n.max(1);
        let first = differing.peek().map(|&(i, (a, b))| ([i / size_n, i % size_n], a, b));
        let missing = found.bits().count().abs_diff(expected.bits().count());
        Self { mismatches: differing.count() + missing, first, stage: None, unbounded: 0 }
    }

    /// Compares stage by stage and stops at the first that differs.
    pub fn of_stages(found: &[Output], expected: &[Output]) -> Self {
        let checks = found.iter().zip(expected).map(|(a, b)| {
            let stage = (found.len() > 1).then_some(a.name);
            Self { stage, ..Self::of(a, b) }
        });
        let mut last = Self { mismatches: 0, first: None, stage: None, unbounded: 0 };
        for check in checks {
            last = check;
            if last.mismatches > 0 {
                break;
            }
        }
        last
    }
}

/// Kind and sizes of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerKind {
    /// Experts.
    Moe {
        /// Experts of all ranks.
        num_experts: usize,
        /// Experts for each token.
        top_k: usize,
        /// K of w13 and N of w2.
        hidden_size: usize,
        /// K of w2.
        intermediate_size: usize,
    },
    /// One matrix.
    Linear(Shape),
}

/// How a layer outside the int4 path is computed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Method {
    /// How its weights are stored.
    pub format: String,
    /// How activations enter the products.
    pub activations: String,
    /// How products are added up.
    pub arithmetic: &'static str,
    /// Whether `--check` compares with the derived bound, and not bit for bit.
    pub is_bounded: bool,
}

/// Logits that the layer's own router computed.
#[derive(Debug, Clone, PartialEq)]
pub struct LogitsReport {
    /// If checked: values outside the derived bound.
    pub outside: Option<Outside>,
}

/// Logits outside the derived bound.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Outside {
    /// Their number.
    pub count: usize,
    /// The first of them.
    pub first: Option<WrongLogit>,
}

/// A logit outside the derived bound.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct WrongLogit {
    /// Token and expert.
    pub at: [usize; 2],
    /// The logit.
    pub found: f32,
    /// Its exact value.
    pub exact: f64,
}

/// How fast a layer ran.
#[derive(Debug, Clone, PartialEq)]
pub struct Timing {
    /// The kernel, or the device.
    pub kernel: String,
    /// Worker threads; absent where a device computed the layer.
    pub threads: Option<usize>,
    /// The shortest time of a run.
    pub seconds: f64,
}

impl Timing {
    /// The reference on the threads of `pool`.
    pub(crate) fn of_reference(pool: &ThreadPool, seconds: f64) -> Self {
        let threads = Some(pool.current_num_threads());
        Self { kernel: "the reference".into(), threads, seconds }
    }
}

/// A layer that ran.
#[derive(Debug)]
#[non_exhaustive]
pub struct Run {
    /// Its module.
    pub module: String,
    /// Whether the layer was packed in its file.
    pub packed: bool,
    /// Kind and sizes.
    pub kind: LayerKind,
    /// Absent on the int4 path.
    pub method: Option<Method>,
    /// `y`, after the stages of experts that do not take the int4 path.
    pub outputs: Vec<Output>,
    /// Kernel, threads and time.
    pub timing: Timing,
    /// The comparison with the definition, if requested.
    pub check: Option<Check>,
    /// Notes on its preparation and routing.
    pub notes: Vec<String>,
    /// Present where the layer's own router computed the logits.
    pub logits: Option<LogitsReport>,
    /// The routing, if the inputs have router logits.
    pub routing: Option<RoutingReport>,
    /// Present where the layer is one rank's part.
    pub partial: Option<Partial>,
    /// How it was computed, and whether the checkpoint's method computes it differently.
    pub arithmetic: String,
}

impl Run {
    /// The layer's output.
    pub fn y(&self) -> &Output {
        &self.outputs[self.outputs.len() - 1]
    }

    /// The sum over the routed experts, where `y` has more.
    pub fn y_experts(&self) -> Option<&Output> {
        self.outputs.iter().find(|o| o.name == "y_experts")
    }

    /// Whether every comparison found equal bits, or values within their bounds, at every value.
    pub fn is_equal(&self) -> bool {
        let routing = self.routing.as_ref().and_then(|r| r.differences.as_ref());
        let logits = self.logits.as_ref().and_then(|l| l.outside);
        self.check.is_none_or(|c| c.mismatches == 0 && c.unbounded == 0)
            && logits.is_none_or(|outside| outside.count == 0)
            && routing.is_none_or(Differences::is_empty)
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
        assert_eq!(equal, Check { mismatches: 0, first: None, stage: None, unbounded: 0 });
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
