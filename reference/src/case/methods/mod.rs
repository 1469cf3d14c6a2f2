//! The operations of the methods beside Marlin: what FlashInfer and CUTLASS are given of 4-bit experts,
//! FP8 and MXFP4 experts between file and kernel, and the products of quantized activations.
//!
//! Each has a config of its own, which says its keys ([`Method::read`], [`Method::json`]) and its
//! tensors ([`Method::rules`]). Names are upstream's functions and operators (vLLM 0.21.0).

mod fp8;
mod layouts;
mod mxfp4;
mod products;

use serde_json::Value;

pub use fp8::{FnuzConfig, Fp8LayerConfig, RequantizeConfig};
pub use layouts::{MxInt4Config, Nvfp4ExpertsConfig, SwizzleConfig};
pub use mxfp4::GptOssConfig;
pub(crate) use mxfp4::GptOssMatrix;
pub use products::{Fp4MmConfig, Fp4QuantConfig, Fp8MmConfig, Reciprocal};

use super::json::Reader;
use super::op::Op;
use super::rules::{Dim, TensorRule, rule};
use super::values::Inputs;
use super::{CaseConfig, CaseError};
use crate::Result;
use crate::scalar::ScalarType;
use crate::tensor::DType;

/// One operation's config.
trait Method: Sized {
    /// Reads and checks the keys.
    fn read(r: &Reader<'_>) -> Result<Self, CaseError>;

    /// The keys, as [`Method::read`] takes them.
    fn json(&self) -> Value;

    /// Every tensor that the operation knows.
    ///
    /// # Errors
    /// For sizes that the operation cannot have.
    fn rules(&self) -> Result<Vec<TensorRule>>;

    /// Values of inputs that nothing could be computed from.
    ///
    /// # Errors
    /// [`crate::Error::Value`] naming the input.
    fn check(&self, _inputs: &Inputs<'_>) -> Result<()> {
        Ok(())
    }
}

macro_rules! methods {
    ($($(#[$doc:meta])* $variant:ident($config:ident)),+ $(,)?) => {
        /// The config of a method's operation.
        #[derive(Debug, Clone, PartialEq)]
        #[non_exhaustive]
        pub enum MethodConfig { $($(#[$doc])* $variant($config)),+ }

        impl MethodConfig {
            /// Reads the config of `op`; `None` for an operation that is none of these.
            pub(super) fn read(op: Op, r: &Reader<'_>) -> Result<Option<Self>, CaseError> {
                Ok(match op {
                    $(Op::$variant => Some(Self::$variant($config::read(r)?)),)+
                    _ => None,
                })
            }

            /// The operation that this configures.
            pub const fn op(&self) -> Op {
                match self { $(Self::$variant(_) => Op::$variant),+ }
            }

            pub(super) fn json(&self) -> Value {
                match self { $(Self::$variant(c) => c.json()),+ }
            }

            pub(super) fn rules(&self) -> Result<Vec<TensorRule>> {
                match self { $(Self::$variant(c) => c.rules()),+ }
            }

            pub(super) fn check(&self, inputs: &Inputs<'_>) -> Result<()> {
                match self { $(Self::$variant(c) => c.check(inputs)),+ }
            }
        }

        $(impl From<$config> for CaseConfig {
            fn from(config: $config) -> Self {
                Self::Method(MethodConfig::$variant(config))
            }
        })+
    };
}

methods! {
    /// `swizzle_blockscale`.
    SwizzleBlockscale(SwizzleConfig),
    /// `prepare_static_weights_for_trtllm_mxint4_moe`.
    TrtllmMxInt4(MxInt4Config),
    /// `convert_to_nvfp4_moe_kernel_format`.
    Nvfp4Experts(Nvfp4ExpertsConfig),
    /// `process_fp8_weight_tensor_strategy_moe`.
    Fp8Requantize(RequantizeConfig),
    /// `normalize_e4m3fn_to_e4m3fnuz`.
    NormalizeFnuz(FnuzConfig),
    /// `load_weights_mxfp4`.
    GptOssMxfp4(GptOssConfig),
    /// `scaled_fp4_quant`.
    ScaledFp4Quant(Fp4QuantConfig),
    /// `cutlass_scaled_fp4_mm`.
    ScaledFp4Mm(Fp4MmConfig),
    /// `cutlass_scaled_mm`.
    ScaledMm(Fp8MmConfig),
    /// `fused_experts_fp8_w8a8`.
    Fp8Moe(Fp8LayerConfig),
}

/// e4m3 bits, of either FP8 type: safetensors has a name for e4m3fn alone.
const E4M3: &[DType] = &[DType::F8E4M3];
const U8: &[DType] = &[DType::U8];
const F32: &[DType] = &[DType::F32];
const I32: &[DType] = &[DType::I32];

/// Exactly this size.
const fn is(size: usize) -> Dim {
    Dim::Is(size)
}

/// A needed input.
fn input(name: &str, dtypes: &[DType], shape: &[Dim]) -> TensorRule {
    rule(format!("in.{name}"), dtypes, shape).required(true)
}

/// An input that may be absent.
fn optional(name: &str, dtypes: &[DType], shape: &[Dim]) -> TensorRule {
    rule(format!("in.{name}"), dtypes, shape)
}

/// An output.
fn output(name: &str, dtypes: &[DType], shape: &[Dim]) -> TensorRule {
    rule(format!("out.{name}"), dtypes, shape)
}

/// float16 and bfloat16.
const HALF_TYPES: &[(&str, ScalarType)] =
    &[("float16", ScalarType::FLOAT16), ("bfloat16", ScalarType::BFLOAT16)];

/// The name of `value` in `table`.
fn name_of<T: PartialEq>(table: &[(&'static str, T)], value: &T) -> &'static str {
    table.iter().find(|(_, v)| v == value).map_or("", |(name, _)| name)
}

/// N of w13: gate and up, or up alone.
const fn w13_size_n(intermediate_size: usize, gated: bool) -> usize {
    if gated { intermediate_size.saturating_mul(2) } else { intermediate_size }
}

/// A refusal of a library type's sizes as one of the config's keys.
fn refused(r: &Reader<'_>, key: &str, found: usize, error: &crate::Error) -> CaseError {
    r.refuse(key, found, format!("sizes that the layout takes: {error}"))
}

/// A size that must be whole units.
fn divisible(r: &Reader<'_>, key: &str, size: usize, by: usize) -> Result<(), CaseError> {
    if size.is_multiple_of(by) {
        return Ok(());
    }
    Err(r.refuse(key, size, format!("a multiple of {by}")))
}
