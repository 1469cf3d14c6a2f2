//! The operations that a case can hold, one file or folder for each: its config, its tensors, what it
//! computes, how its outputs are judged, its known mistakes, and the cases that are generated for it.
//!
//! [`operations!`](crate::operations) is the table. Case files, `check`, `vectors` and the fuzzing
//! kit iterate over it, so a new operation is one file and one row of the table.

mod align;
pub(crate) mod axes;
mod bounded;
pub(crate) mod case;
mod computation;
pub(crate) mod draw;
mod dyn_quant;
mod dynamic_mxfp4_quant;
mod e2m1;
mod expert_axes;
mod fp4_experts;
mod fp8_blocks;
mod fp8_moe;
mod fp8_requantize;
mod int8_mm;
mod int8_moe;
mod interleaving;
mod keys;
mod layer;
mod layer_readings;
mod layer_rules;
mod linear;
mod load_weights_mxfp4;
mod moe;
mod normalize_fnuz;
mod operation;
mod per_token_group_quant;
mod preprocess;
mod projected;
pub(crate) mod quant;
mod quantized_moe;
mod requant_ue8m0;
pub(crate) mod router;
mod routing;
mod scaled_fp4_mm;
mod scaled_fp4_quant;
mod scaled_int8_quant;
mod scaled_mm;
pub(crate) mod schema;
mod stated_rows;
mod static_fp8_quant;
mod swizzle_blockscale;
mod tensors;
mod trtllm_mxint4;
mod upstream;
mod w8a8_fp8;

/// Case files: the case, the config of each operation, and the types in configs.
pub(crate) mod configs {
    pub use super::align::AlignConfig;
    pub use super::case::Case;
    pub use super::dyn_quant::{DynQuantArithmetic, DynQuantConfig, Packing};
    pub use super::dynamic_mxfp4_quant::DynamicMxfp4QuantConfig;
    pub use super::e2m1::{E2m1LinearConfig, E2m1MoeConfig};
    pub use super::fp4_experts::Fp4ExpertsConfig;
    pub use super::fp8_blocks::{BlockSize, Fp8Operands};
    pub use super::fp8_moe::Fp8LayerConfig;
    pub use super::fp8_requantize::RequantizeConfig;
    pub use super::int8_mm::{Azp, Int8MmConfig};
    pub use super::int8_moe::Int8LayerConfig;
    pub use super::layer_rules::LayerRules;
    pub use super::linear::LinearConfig;
    pub use super::load_weights_mxfp4::LoadWeightsConfig;
    pub use super::moe::MoeConfig;
    pub use super::normalize_fnuz::FnuzConfig;
    pub use super::per_token_group_quant::{GroupQuantConfig, GroupScaleLayout, LeastScale};
    pub use super::preprocess::PreprocessConfig;
    pub use super::quant::{CheckpointFormat, QuantConfig};
    pub use super::quantized_moe::QuantizedLayer;
    pub use super::requant_ue8m0::RequantUe8m0Config;
    pub use super::router::{GroupedTopk, RouterConfig};
    pub use super::routing::TopkOrder;
    pub use super::scaled_fp4_mm::Fp4MmConfig;
    pub use super::scaled_fp4_quant::{Fp4QuantConfig, Reciprocal};
    pub use super::scaled_int8_quant::{DynamicInt8Config, Int8QuantConfig, StaticInt8Config};
    pub use super::scaled_mm::{Fp8MmConfig, W4a8MmConfig};
    pub use super::static_fp8_quant::{StaticFp8Config, StaticFp8Rule};
    pub use super::swizzle_blockscale::SwizzleConfig;
    pub use super::trtllm_mxint4::MxInt4Config;
    pub use super::{CaseConfig, Op};
    pub use crate::layers::{ParallelStyle, TensorParallel};
    pub use crate::products::schedule::ScheduleChoice;
}

use serde_json::{Map, Value};

pub use computation::{add_outputs, mistaken, mistakes};
pub use moe::LayerSource;
pub use quant::MatrixSource;
pub use upstream::UPSTREAM_NAMES;

use crate::Result;
use crate::named::named;
use crate::products::schedule::Schedule;
use configs::*;
use e2m1::{LINEAR as E2M1_LINEAR, MOE as E2M1_MOE};
use operation::Operation;
use schema::{CaseError, KeyKind, KeyLog, Reader, TensorRule};

/// A row of the table: the functions of an operation that need no config.
pub(crate) struct Entry {
    /// The operation.
    pub(crate) op: Op,
    /// What it does, in one sentence.
    pub(crate) about: &'static str,
    /// [`Operation::keys`].
    pub(crate) keys: fn() -> &'static [&'static str],
    /// [`Operation::keys_in`].
    pub(crate) keys_in: fn(&Map<String, Value>) -> Option<&'static [&'static str]>,
    /// [`Operation::key_meanings`].
    pub(crate) key_meanings: fn() -> &'static [(&'static str, &'static str)],
    /// [`Operation::read`].
    pub(crate) read: fn(&Reader<'_>) -> Result<CaseConfig, CaseError>,
    /// [`Operation::lattice`].
    pub(crate) lattice: fn() -> Result<Vec<CaseConfig>>,
    /// [`Operation::axes`].
    pub(crate) axes: fn() -> Result<Option<axes::Axes>>,
    /// [`Operation::mistakes`].
    pub(crate) mistakes: fn() -> Vec<&'static str>,
}

impl Entry {
    const fn new<C: Operation + Into<CaseConfig>>(op: Op, about: &'static str) -> Self {
        Self {
            op,
            about,
            keys: C::keys,
            keys_in: C::keys_in,
            key_meanings: C::key_meanings,
            read: |r| C::read(r).map(C::into),
            lattice: || {
                let all = C::lattice()?.into_iter().filter(|c| is_read_back(c));
                Ok(all.map(C::into).collect())
            },
            axes: C::axes,
            mistakes: C::mistakes,
        }
    }
}

/// Whether the case reader accepts the JSON that a config writes.
fn is_read_back<C: Operation>(config: &C) -> bool {
    let json = config.json();
    json.as_object().is_some_and(|map| C::read(&Reader::new(map, "")).is_ok())
}

/// Calls a macro with a row for each operation: its documentation, its variant of [`Op`] and
/// [`CaseConfig`], its name in files, and its config. Rows of `computed` have a computation that
/// defines every bit.
#[doc(hidden)]
#[macro_export]
macro_rules! operations {
    ($with:ident) => {
        $with! {
            staged {
                /// One quantized matrix product.
                Linear "linear" linear::LinearConfig,
                /// A Mixture-of-Experts layer.
                Moe "moe" moe::MoeConfig,
                /// Scores to expert ids and weights.
                Router "router" router::RouterConfig,
                /// Expert ids to padded blocks of tokens.
                Align "moe_align_block_size" align::AlignConfig,
                /// int4 codes for fp8 activations.
                Preprocess "int4_fp8_preprocess" preprocess::PreprocessConfig,
                /// The Arm int4 path with dynamically quantized activations.
                DynQuant "dyn_quant_linear" dyn_quant::DynQuantConfig,
            }
            computed {
                /// Block scales interleaved in tiles.
                SwizzleBlockscale "swizzle_blockscale" swizzle_blockscale::SwizzleConfig,
                /// Experts of int4 with bf16 scales, for TensorRT-LLM's kernels.
                TrtllmMxInt4 "prepare_static_weights_for_trtllm_mxint4_moe"
                    trtllm_mxint4::MxInt4Config,
                /// NVFP4 experts in a kernel's layout.
                Fp4Experts "convert_to_nvfp4_moe_kernel_format"
                    fp4_experts::Fp4ExpertsConfig,
                /// One scale for w1 and w3 of FP8 experts.
                Fp8Requantize "process_fp8_weight_tensor_strategy_moe"
                    fp8_requantize::RequantizeConfig,
                /// e4m3fn to e4m3fnuz.
                NormalizeFnuz "normalize_e4m3fn_to_e4m3fnuz" normalize_fnuz::FnuzConfig,
                /// The part of gpt-oss's MXFP4 experts that a rank loads.
                LoadWeightsMxfp4 "load_weights_mxfp4" load_weights_mxfp4::LoadWeightsConfig,
                /// Activations to NVFP4.
                ScaledFp4Quant "scaled_fp4_quant" scaled_fp4_quant::Fp4QuantConfig,
                /// Activations to FP8, with a scale for each group of k.
                PerTokenGroupQuant "per_token_group_fp8_quant"
                    per_token_group_quant::GroupQuantConfig,
                /// A product of NVFP4 activations and weights.
                ScaledFp4Mm "cutlass_scaled_fp4_mm" scaled_fp4_mm::Fp4MmConfig,
                /// A product of FP8 activations and weights.
                ScaledMm "cutlass_scaled_mm" scaled_mm::Fp8MmConfig,
                /// A product of FP8 activations and int4 weights in groups.
                W4a8Mm "cutlass_w4a8_mm" scaled_mm::W4a8MmConfig,
                /// A product of int8 activations and weights.
                Int8Mm "cutlass_scaled_mm_azp" int8_mm::Int8MmConfig,
                /// Activations to int8 under a given scale.
                StaticInt8Quant "static_scaled_int8_quant" scaled_int8_quant::StaticInt8Config,
                /// Activations to int8, with a scale for each row.
                DynamicInt8Quant "dynamic_scaled_int8_quant" scaled_int8_quant::DynamicInt8Config,
                /// A layer of FP8 activations and weights.
                Fp8Moe "fused_experts_fp8_w8a8" fp8_moe::Fp8LayerConfig,
                /// A layer of int8 activations and weights.
                Int8Moe "fused_experts_int8_w8a8" int8_moe::Int8LayerConfig,
                /// A product of MXFP4 weights and activations quantized to int8 in groups of 32.
                E2m1Int8Linear E2M1_LINEAR e2m1::E2m1LinearConfig,
                /// A layer of MXFP4 weights and activations quantized to int8 in groups of 32.
                E2m1Int8Moe E2M1_MOE e2m1::E2m1MoeConfig,
                /// Activations to FP8 under given scales.
                StaticFp8Quant "static_scaled_fp8_quant" static_fp8_quant::StaticFp8Config,
                /// Activations to MXFP4.
                DynamicMxfp4Quant "dynamic_mxfp4_quant" dynamic_mxfp4_quant::DynamicMxfp4QuantConfig,
                /// FP8 blocks whose scales become powers of two.
                RequantUe8m0 "requant_weight_ue8m0_inplace" requant_ue8m0::RequantUe8m0Config,
            }
        }
    };
}

macro_rules! table {
    ($($group:ident {
        $($(#[doc = $doc:literal])* $variant:ident $name:tt $module:ident::$config:ident,)+
    })+) => {
        named! {
            /// The operation of a case.
            Op { $($($(#[doc = $doc])* $variant $name),+),+ }
        }

        /// A case's config, by operation.
        #[derive(Debug, Clone, PartialEq)]
        #[non_exhaustive]
        pub enum CaseConfig { $($($(#[doc = $doc])* $variant($config)),+),+ }

        /// Every operation.
        pub(crate) const ALL: &[Entry] = &[
            $($(Entry::new::<$config>(Op::$variant, concat!($($doc),*))),+),+
        ];

        impl CaseConfig {
            /// The operation that this configures.
            pub const fn op(&self) -> Op {
                match self { $($(Self::$variant(_) => Op::$variant),+),+ }
            }

            /// The operation as a trait object.
            pub(crate) fn operation(&self) -> &dyn Operation {
                match self { $($(Self::$variant(c) => c),+),+ }
            }
        }

        $($(impl From<$config> for CaseConfig {
            fn from(config: $config) -> Self {
                Self::$variant(config)
            }
        })+)+
    };
}
operations!(table);

/// [`Op::entry`] relies on it: the enum, the table and the names have the same order and length.
const _: () = {
    let mut i = 0;
    while i < ALL.len() {
        assert!(ALL[i].op as usize == i && Op::NAMED[i].1 as usize == i);
        i += 1;
    }
    assert!(ALL.len() == Op::NAMED.len());
};

impl Op {
    /// The operation's row of the table.
    pub(crate) fn entry(self) -> &'static Entry {
        &ALL[self as usize]
    }
}

impl CaseConfig {
    /// Reads the config of `op`.
    ///
    /// # Errors
    /// Returns an error for an unknown or missing key, a value of another type or outside its
    /// domain, or contradicting values.
    pub fn from_json(op: Op, map: &Map<String, Value>) -> Result<Self, CaseError> {
        keys::check(op, map)?;
        (op.entry().read)(&Reader::new(map, op.name()))
    }

    /// As [`CaseConfig::from_json`], with every key that was read and what it may hold.
    pub(crate) fn read_noting_keys(
        op: Op,
        map: &Map<String, Value>,
    ) -> Result<(Self, Vec<(String, KeyKind)>), CaseError> {
        keys::check(op, map)?;
        let log = KeyLog::default();
        let config = (op.entry().read)(&Reader { log: Some(&log), ..Reader::new(map, op.name()) })?;
        Ok((config, log.into_keys()))
    }

    /// The config as JSON, as in case files.
    pub fn to_json(&self) -> Map<String, Value> {
        match self.operation().json() {
            Value::Object(map) => map,
            _ => Map::new(),
        }
    }

    /// The config without the schedules that it declares: another kernel's outputs are then judged by
    /// their class, and not by every bit.
    ///
    /// # Errors
    /// None for a config that was read.
    pub fn without_schedules(&self) -> Result<Self, CaseError> {
        let mut map = self.to_json();
        map.retain(|key, _| !key.starts_with("schedule"));
        Self::from_json(self.op(), &map)
    }

    /// Every tensor that the operation has under this config.
    ///
    /// `experts` is the leading axis of a MoE case's weights: the experts of this rank.
    ///
    /// # Errors
    /// Returns an error for sizes that the operation does not support.
    pub fn rules(&self, experts: usize) -> Result<Vec<TensorRule>> {
        self.operation().tensors(experts)
    }

    /// The format of the quantized matrices of `linear` and `moe`.
    pub fn quant(&self) -> Option<&QuantConfig> {
        self.operation().quant()
    }

    /// The operands of a product of e4m3fn rows and weights; `None` for another operation.
    pub fn fp8_operands(&self) -> Option<Fp8Operands> {
        self.operation().fp8_operands()
    }

    /// The config whose `y` has the bits of `schedule`; `None` if the operation states no schedule of one
    /// product.
    pub fn with_schedule(&self, schedule: Schedule) -> Option<Self> {
        self.operation().with_schedule(schedule)
    }

    /// Whether every output of a case has exactly one right value.
    pub fn fixes_every_bit(&self) -> bool {
        self.operation().fixes_every_bit()
    }

    /// The config for only the first row of activations, and the inputs that have an axis of rows;
    /// `None` if an output depends on all rows.
    pub fn with_one_row(&self) -> Option<(Self, &'static [&'static str])> {
        self.operation().with_one_row()
    }

    /// The config of a kernel that cuts K differently; `None` if there is none.
    pub fn with_k_cut_otherwise(&self) -> Option<Self> {
        self.operation().with_k_cut_otherwise()
    }
}
