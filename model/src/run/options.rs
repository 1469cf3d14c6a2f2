//! Which layer runs, on what, and how.

use std::num::NonZero;
use std::path::PathBuf;

use marlinspike::case::ActivationRounding;
use marlinspike::formats::blocks::BlockFormat;
use marlinspike::method::Arithmetic;
use marlinspike::num::scalar::ScalarType;
use marlinspike::quantize::Fp8GroupRule;

pub use crate::convert::target::{EXPERT_BACKEND, ExpertBackend};
use crate::load::preparation::Preparation;

/// How activations enter the products of a layer outside the int4 path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Activations {
    /// As the checkpoint says; 16 bits of formats whose files need not say it.
    #[default]
    Checkpoint,
    /// 16 bits, as Marlin's kernels have them.
    SixteenBit,
    /// In this block format, which must be that of the weights.
    Block(&'static BlockFormat),
}

/// What a layer outside the int4 path depends on besides its checkpoint.
#[derive(Debug, Clone, Copy)]
pub struct MethodOptions {
    /// How activations enter.
    pub activations: Activations,
    /// Block formats: whose rule gives the activations' global scales.
    pub backend: ExpertBackend,
    /// FP8 blocks: how the groups of a row of activations are quantized.
    pub group_rule: Fp8GroupRule,
    /// How experts' numbers are prepared.
    pub preparation: Preparation,
}

impl Default for MethodOptions {
    fn default() -> Self {
        Self {
            activations: Activations::Checkpoint,
            backend: ExpertBackend::NAMED[0].1,
            group_rule: Fp8GroupRule::default(),
            preparation: Preparation { padding: false, ..Preparation::UPSTREAM },
        }
    }
}

/// Where activations come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// A safetensors file.
    File(PathBuf),
    /// Numbers evenly spread over -1 to 1.
    Seeded {
        /// Their seed.
        seed: u64,
        /// Rows.
        tokens: usize,
        /// Their type, and so the output's.
        dtype: ScalarType,
    },
}

/// Which layer runs, and how.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Options {
    /// Module to run; absent, the first layer of experts, else the first linear layer.
    pub layer: Option<String>,
    /// A JSON file with the routing of the layer's tokens, instead of its family's.
    pub routing: Option<PathBuf>,
    /// Activations.
    pub input: Source,
    /// The int4 path: how halves are rounded when activations are quantized.
    pub rounding: ActivationRounding,
    /// The int4 path: a kernel by name; absent, the fastest.
    pub kernel: Option<String>,
    /// Worker threads; absent, one for each core.
    pub threads: Option<NonZero<usize>>,
    /// Runs; the shortest time counts.
    pub repeat: NonZero<usize>,
    /// Whether the layer is computed again by its definition, and every bit compared.
    pub check: bool,
    /// How products are added up outside the int4 path; absent, exactly. Given for an int4 layer, it
    /// runs with 16-bit activations instead of on the int4 path.
    pub arithmetic: Option<Arithmetic>,
    /// Layers outside the int4 path.
    pub method: MethodOptions,
}

impl Default for Options {
    /// The first layer on 16 seeded tokens in bf16.
    fn default() -> Self {
        Self {
            layer: None,
            routing: None,
            input: Source::Seeded { seed: 1, tokens: 16, dtype: ScalarType::BFLOAT16 },
            rounding: ActivationRounding::HalfAway,
            kernel: None,
            threads: None,
            repeat: NonZero::<usize>::MIN,
            check: false,
            arithmetic: None,
            method: MethodOptions::default(),
        }
    }
}
