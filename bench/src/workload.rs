//! Products and layers by name.

use std::fmt;
use std::str::FromStr;

use marlinspike::w4a8::packed::CHUNK;

/// The computation of one call for a number of tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Workload {
    /// A product with one `[K, N]` matrix.
    Dense {
        /// K.
        size_k: usize,
        /// N.
        size_n: usize,
    },
    /// A Mixture-of-Experts layer with gate and up `[H, 2I]`, SiLU, and down `[I, H]`.
    Moe {
        /// Experts.
        num_experts: usize,
        /// Experts per token.
        top_k: usize,
        /// H.
        hidden_size: usize,
        /// I.
        intermediate_size: usize,
    },
}

/// Names of workloads, in the order of the CPU's reports.
pub const NAMED: [(&str, Workload); 5] = [
    ("4096x4096", Workload::dense(4096, 4096)),
    ("4096x14336", Workload::dense(4096, 14336)),
    ("2048x1536", Workload::dense(2048, 1536)),
    ("qwen3-30b-a3b", Workload::layer(QWEN3_30B_A3B)),
    ("mixtral-8x7b", Workload::layer(MIXTRAL_8X7B)),
];

/// Products for GPUs, with Llama-like shapes.
pub const GPU_PRODUCTS: [Workload; 4] = [
    Workload::dense(4096, 4096),
    Workload::dense(4096, 28672),
    Workload::dense(14336, 4096),
    Workload::dense(8192, 57344),
];

/// Layers for GPUs: experts, experts per token, H and I. The last one is DeepSeek-V3 on one of eight
/// tensor-parallel ranks.
pub const GPU_LAYERS: [[usize; 4]; 3] = [MIXTRAL_8X7B, QWEN3_30B_A3B, [256, 8, 7168, 256]];

/// Products of e4m3 operands for GPUs.
pub const FP8_PRODUCTS: [Workload; 2] = [Workload::dense(4096, 28672), Workload::dense(7168, 4096)];

/// Layers of e4m3 operands for GPUs; the last one is a rank of DeepSeek-V3 with 32 of its experts.
pub const FP8_LAYERS: [[usize; 4]; 3] = [QWEN3_30B_A3B, [256, 8, 7168, 256], [32, 8, 7168, 2048]];

const MIXTRAL_8X7B: [usize; 4] = [8, 2, 4096, 14336];
const QWEN3_30B_A3B: [usize; 4] = [128, 8, 2048, 768];

/// The text names no workload.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{found:?} is no workload: expected {expected}")]
pub struct ParseError {
    found: String,
    expected: String,
}

impl FromStr for Workload {
    type Err = ParseError;

    /// A name of [`NAMED`], `KxN`, or `ExTOP_KxHxI`.
    fn from_str(text: &str) -> Result<Self, ParseError> {
        if let Some((_, workload)) = NAMED.iter().find(|(name, _)| *name == text) {
            return Ok(*workload);
        }
        let fail = |expected: String| Err(ParseError { found: text.to_owned(), expected });
        let sizes: Option<Vec<usize>> = text
            .split('x')
            .map(|size| size.parse().ok().filter(|size| (1..=1 << 20).contains(size)))
            .collect();
        let workload = match sizes.as_deref() {
            Some(&[size_k, size_n]) => Self::dense(size_k, size_n),
            Some(&[experts, top_k, hidden, intermediate]) if top_k <= experts => {
                Self::moe(experts, top_k, hidden, intermediate)
            }
            _ => {
                let names = NAMED.map(|(name, _)| name).join(", ");
                return fail(format!(
                    "one of {names}, KxN, or ExTxHxI (experts, experts per token, hidden and \
                     intermediate size), each from 1 to 2^20"
                ));
            }
        };
        // Every format packs whole chunks of k, so nothing is padded and a call reads exactly its
        // weights.
        if workload.sizes().iter().any(|size| !size.is_multiple_of(CHUNK)) {
            return fail(format!("matrix sizes that are multiples of {CHUNK}"));
        }
        Ok(workload)
    }
}

impl fmt::Display for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some((name, _)) = NAMED.iter().find(|(_, workload)| workload == self) {
            return f.write_str(name);
        }
        match *self {
            Self::Dense { size_k, size_n } => write!(f, "{size_k}x{size_n}"),
            Self::Moe { num_experts, top_k, hidden_size, intermediate_size } => {
                write!(f, "{num_experts}x{top_k}x{hidden_size}x{intermediate_size}")
            }
        }
    }
}

impl Workload {
    /// A product.
    pub const fn dense(size_k: usize, size_n: usize) -> Self {
        Self::Dense { size_k, size_n }
    }

    /// A layer.
    pub const fn moe(
        num_experts: usize,
        top_k: usize,
        hidden_size: usize,
        intermediate_size: usize,
    ) -> Self {
        Self::Moe { num_experts, top_k, hidden_size, intermediate_size }
    }

    /// A layer of experts, experts per token, H and I.
    pub const fn layer([experts, top_k, h, i]: [usize; 4]) -> Self {
        Self::moe(experts, top_k, h, i)
    }

    /// K and N, or H and I.
    pub fn sizes(self) -> [usize; 2] {
        match self {
            Self::Dense { size_k, size_n } => [size_k, size_n],
            Self::Moe { hidden_size, intermediate_size, .. } => [hidden_size, intermediate_size],
        }
    }

    /// Number of weights of the workload's matrices.
    pub fn weights(self) -> u64 {
        let [a, b] = self.sizes();
        let matrices = match self {
            Self::Dense { .. } => 1,
            Self::Moe { num_experts, .. } => 3 * num_experts,
        };
        // At most 2^20 each.
        a as u64 * b as u64 * matrices as u64
    }

    /// Multiply-accumulates of a call; a multiplication and its addition are one.
    pub fn macs(self, tokens: usize) -> u64 {
        let [a, b] = self.sizes();
        let matrices = match self {
            Self::Dense { .. } => 1,
            Self::Moe { top_k, .. } => 3 * top_k,
        };
        (a * b * matrices) as u64 * tokens as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_shapes_are_read_and_written() {
        for (name, workload) in NAMED {
            assert_eq!(name.parse(), Ok(workload));
            assert_eq!(workload.to_string(), name);
        }
        for text in ["64x96", "4x2x32x64"] {
            assert_eq!(text.parse::<Workload>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn what_is_no_workload_is_refused_by_name() {
        for text in
            ["", "qwen", "64", "64x0", "64x33", "2x3x32x32", "1x2x3", "-32x32", "64x99999999"]
        {
            let error = text.parse::<Workload>().unwrap_err().to_string();
            assert!(error.starts_with(&format!("{text:?} is no workload: expected ")), "{error}");
        }
    }

    #[test]
    fn multiply_accumulates_of_named_workloads() {
        let macs = |name: &str, tokens| name.parse::<Workload>().unwrap().macs(tokens);
        assert_eq!(macs("4096x4096", 1), 16_777_216);
        assert_eq!(macs("qwen3-30b-a3b", 1), 37_748_736);
        assert_eq!(macs("mixtral-8x7b", 512), 180_388_626_432);
    }
}
