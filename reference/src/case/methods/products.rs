//! Quantized activations and their products.

use serde_json::{Value, json};

use super::{
    CaseError, E4M3, F32, HALF_TYPES, Inputs, Method, Reader, Result, TensorRule, U8, input, is,
    name_of, output,
};
use crate::case::config::ScheduleChoice;
use crate::case::parse::schedule_json;
use crate::case::rules::{Dim, stored};
use crate::case::values::{e4m3_scales, finite, positive};
use crate::gemm::tensor_core::{Architecture, BlockScaledUnit, find_block_scaled};
use crate::layout::Layout as _;
use crate::layout::flashinfer::{BlockScaleLayout, ScaleTile};
use crate::scalar::ScalarType;

/// The reciprocals of a quantizer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reciprocal {
    /// Correctly rounded.
    Exact,
    /// A GPU's `rcp.approx.ftz.f32`.
    Approximate,
}

const RECIPROCALS: &[(&str, Reciprocal)] =
    &[("exact", Reciprocal::Exact), ("approximate", Reciprocal::Approximate)];

/// Config of `scaled_fp4_quant`: activations to NVFP4 under a global scale.
///
/// in: `x` `[M, K]`, `input_global_scale` `[1]` (448 · 6 / largest value, usually). out: `x_fp4`
/// `[M, K / 2]` uint8, `x_scale` `[M, K / 16]` e4m3, or interleaved and padded where
/// `is_sf_swizzled_layout`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fp4QuantConfig {
    /// Type of x.
    pub dtype: ScalarType,
    /// Rows.
    pub size_m: usize,
    /// Columns: a multiple of 16.
    pub size_k: usize,
    /// Whether the scales are interleaved in tiles of 128 x 4.
    pub is_sf_swizzled_layout: bool,
    /// How the kernel computes reciprocals; where absent, as either rule explains the outputs, with
    /// ties to even.
    pub reciprocal: Option<Reciprocal>,
}

impl Fp4QuantConfig {
    /// The interleaved layout of the scales.
    ///
    /// # Errors
    /// As [`BlockScaleLayout::new`].
    pub fn layout(&self) -> Result<BlockScaleLayout> {
        let ty = ScalarType::FLOAT8_E4M3FN;
        BlockScaleLayout::new(self.size_k / 16, self.size_m, ScaleTile::Rows128, ty)
    }
}

impl Method for Fp4QuantConfig {
    fn read(r: &Reader<'_>) -> Result<Self, CaseError> {
        let config = Self {
            dtype: r.name("dtype", HALF_TYPES)?,
            size_m: r.size("size_m")?,
            size_k: r.size("size_k")?,
            is_sf_swizzled_layout: r.flag("is_sf_swizzled_layout", true)?,
            reciprocal: r.optional_name("reciprocal", RECIPROCALS)?,
        };
        super::divisible(r, "size_k", config.size_k, 16)?;
        config.layout().map_err(|e| super::refused(r, "size_m", config.size_m, &e))?;
        Ok(config)
    }

    fn json(&self) -> Value {
        let mut v = json!({
            "dtype": self.dtype.name(), "size_m": self.size_m, "size_k": self.size_k,
            "is_sf_swizzled_layout": self.is_sf_swizzled_layout,
        });
        if let Some(rule) = &self.reciprocal {
            v["reciprocal"] = name_of(RECIPROCALS, rule).into();
        }
        v
    }

    fn rules(&self) -> Result<Vec<TensorRule>> {
        let (m, k) = (self.size_m, self.size_k);
        let scales =
            if self.is_sf_swizzled_layout { self.layout()?.packed_shape() } else { [m, k / 16] };
        Ok(vec![
            input("x", &[stored(self.dtype)], &[is(m), is(k)]),
            input("input_global_scale", F32, &[is(1)]),
            output("x_fp4", U8, &[is(m), is(k / 2)]),
            output("x_scale", E4M3, &scales.map(is)),
        ])
    }

    fn check(&self, inputs: &Inputs<'_>) -> Result<()> {
        finite(&inputs["x"])?;
        positive(&inputs["input_global_scale"])
    }
}

/// Generations whose block-scaled instructions a schedule may name.
const UNITS: &[(&str, Architecture)] =
    &[("blackwell", Architecture::Blackwell), ("rtx_blackwell", Architecture::RtxBlackwell)];

/// Config of `cutlass_scaled_fp4_mm`: a product of NVFP4 activations and an NVFP4 weight.
///
/// in: `a` `[M, K / 2]` uint8, `a_scale` `[M, K / 16]` e4m3, `a_global_scale` `[1]` (a multiplier);
/// `weight` `[N, K / 2]`, `weight_scale` `[N, K / 16]`, `weight_global_scale` `[shards]`, multipliers, one
/// for each of `logical_widths`. out: `y` `[M, N]`, where each shard's sums are multiplied by its own
/// global scale.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fp4MmConfig {
    /// Type of y.
    pub dtype: ScalarType,
    /// Rows.
    pub size_m: usize,
    /// Columns.
    pub size_n: usize,
    /// Multiple of 16.
    pub size_k: usize,
    /// `logical_widths`: columns of each fused shard; all of N where absent.
    pub widths: Vec<usize>,
    /// `schedule` `{"architecture": …}`: one instruction after the other in ascending k, compared for
    /// every bit.
    pub schedule: Option<Architecture>,
}

impl Fp4MmConfig {
    /// The unit of the declared schedule.
    pub fn unit(&self) -> Option<&'static BlockScaledUnit> {
        find_block_scaled(self.schedule?, ScalarType::FLOAT8_E4M3FN, 16)
    }

    /// The unit whose class bounds a product without a schedule: the generations compute alike.
    pub(crate) fn any_unit(&self) -> Option<&'static BlockScaledUnit> {
        find_block_scaled(Architecture::Blackwell, ScalarType::FLOAT8_E4M3FN, 16)
    }
}

impl Method for Fp4MmConfig {
    fn read(r: &Reader<'_>) -> Result<Self, CaseError> {
        let schedule = match r.object("schedule", "schedule.", &["architecture"])? {
            Some(schedule) => Some(schedule.name("architecture", UNITS)?),
            None => None,
        };
        let size_n = r.size("size_n")?;
        let config = Self {
            dtype: r.name("dtype", HALF_TYPES)?,
            size_m: r.size("size_m")?,
            size_n,
            size_k: r.size("size_k")?,
            widths: r.sizes("logical_widths")?.unwrap_or_else(|| vec![size_n]),
            schedule,
        };
        super::divisible(r, "size_k", config.size_k, 16)?;
        let sum = config.widths.iter().try_fold(0usize, |sum, &w| sum.checked_add(w));
        if sum != Some(size_n) {
            let expected = format!("widths that add up to size_n {size_n}");
            return Err(r.refuse("logical_widths", format!("{:?}", config.widths), expected));
        }
        Ok(config)
    }

    fn json(&self) -> Value {
        let architecture = |a: Architecture| json!({"architecture": name_of(UNITS, &a)});
        json!({
            "dtype": self.dtype.name(), "size_m": self.size_m, "size_n": self.size_n,
            "size_k": self.size_k, "logical_widths": self.widths,
            "schedule": self.schedule.map(architecture),
        })
    }

    fn rules(&self) -> Result<Vec<TensorRule>> {
        let (m, n, k) = (is(self.size_m), is(self.size_n), self.size_k);
        Ok(vec![
            input("a", U8, &[m, is(k / 2)]),
            input("a_scale", E4M3, &[m, is(k / 16)]),
            input("a_global_scale", F32, &[is(1)]),
            input("weight", U8, &[n, is(k / 2)]),
            input("weight_scale", E4M3, &[n, is(k / 16)]),
            input("weight_global_scale", F32, &[is(self.widths.len())]),
            output("y", &[stored(self.dtype)], &[m, n]),
        ])
    }

    fn check(&self, inputs: &Inputs<'_>) -> Result<()> {
        for name in ["a_scale", "weight_scale"] {
            e4m3_scales(&inputs[name])?;
        }
        positive(&inputs["a_global_scale"])?;
        positive(&inputs["weight_global_scale"])
    }
}

/// Config of `cutlass_scaled_mm`: a product of e4m3fn activations and an e4m3fn weight.
///
/// in: `a` `[M, K]`, `a_scales` `[1]`, or `[M, 1]` for `per_act_token_quant`; `weight` `[N, K]`,
/// `weight_scale` `[1]`, or `[N, 1]` for `per_out_ch_quant`; `bias` `[N]` where `has_bias`. out: `y`
/// `[M, N]`.
#[derive(Debug, Clone, PartialEq)]
pub struct Fp8MmConfig {
    /// Type of y and of the bias.
    pub dtype: ScalarType,
    /// Rows.
    pub size_m: usize,
    /// Columns.
    pub size_n: usize,
    /// Multiple of 4.
    pub size_k: usize,
    /// Whether each row has its own scale.
    pub per_act_token_quant: bool,
    /// Whether each column has its own scale.
    pub per_out_ch_quant: bool,
    /// Whether there is a bias.
    pub has_bias: bool,
    /// How `y` was computed, where it is to be equal for every bit.
    pub schedule: Option<ScheduleChoice>,
}

/// The only convention of products of 8-bit codes; a config may name it.
pub(super) fn scaled_mm_convention(r: &Reader<'_>) -> Result<(), CaseError> {
    r.optional_name("convention", &[("scaled_mm", ())]).map(|_| ())
}

impl Method for Fp8MmConfig {
    fn read(r: &Reader<'_>) -> Result<Self, CaseError> {
        scaled_mm_convention(r)?;
        let config = Self {
            dtype: r.name("dtype", HALF_TYPES)?,
            size_m: r.size("size_m")?,
            size_n: r.size("size_n")?,
            size_k: r.size("size_k")?,
            per_act_token_quant: r.flag("per_act_token_quant", false)?,
            per_out_ch_quant: r.flag("per_out_ch_quant", false)?,
            has_bias: r.flag("has_bias", false)?,
            schedule: r.schedule("schedule")?,
        };
        super::divisible(r, "size_k", config.size_k, 4)?;
        Ok(config)
    }

    fn json(&self) -> Value {
        json!({
            "dtype": self.dtype.name(), "size_m": self.size_m, "size_n": self.size_n,
            "size_k": self.size_k, "per_act_token_quant": self.per_act_token_quant,
            "per_out_ch_quant": self.per_out_ch_quant, "has_bias": self.has_bias,
            "schedule": self.schedule.as_ref().map(schedule_json),
        })
    }

    fn rules(&self) -> Result<Vec<TensorRule>> {
        let (m, n, k) = (is(self.size_m), is(self.size_n), is(self.size_k));
        let scales = |own: bool, size: Dim| if own { vec![size, is(1)] } else { vec![is(1)] };
        let half = [stored(self.dtype)];
        let mut rules = vec![
            input("a", E4M3, &[m, k]),
            input("a_scales", F32, &scales(self.per_act_token_quant, m)),
            input("weight", E4M3, &[n, k]),
            input("weight_scale", F32, &scales(self.per_out_ch_quant, n)),
            output("y", &half, &[m, n]),
        ];
        if self.has_bias {
            rules.push(input("bias", &half, &[n]));
        }
        Ok(rules)
    }

    fn check(&self, inputs: &Inputs<'_>) -> Result<()> {
        positive(&inputs["a_scales"])?;
        positive(&inputs["weight_scale"])
    }
}
