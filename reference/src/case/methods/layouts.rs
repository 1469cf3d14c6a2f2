//! What kernels of 4-bit experts are given: interleaved block scales, mxint4, NVFP4.

use serde_json::{Value, json};

use super::{
    CaseError, E4M3, F32, I32, Inputs, Method, Reader, Result, TensorRule, U8, input, is, name_of,
    output, refused,
};
use crate::layout::Layout as _;
use crate::layout::flashinfer::{
    BlockScaleLayout, ExpertLayout, Nvfp4Backend, Projection, ScaleTile,
};
use crate::scalar::ScalarType;
use crate::tensor::DType;

const TILES: &[(&str, ScaleTile)] = &[("128x4", ScaleTile::Rows128), ("8x4", ScaleTile::Rows8)];
const SCALES: &[(&str, ScalarType)] = &[
    ("float8_e4m3fn", ScalarType::FLOAT8_E4M3FN),
    ("float8_e8m0fnu", ScalarType::FLOAT8_E8M0FNU),
    ("bfloat16", ScalarType::BFLOAT16),
];

/// Config of `swizzle_blockscale` (FlashInfer: `block_scale_interleave`).
///
/// in: `scale` `[N, G]`, or `[E, N, G]` with `num_experts`. out: `swizzled_scale`, both axes padded with
/// zeros to whole tiles.
#[derive(Debug, Clone, PartialEq)]
pub struct SwizzleConfig {
    /// `scale_type`: float8_e4m3fn, float8_e8m0fnu or bfloat16.
    pub scale_type: ScalarType,
    /// `sf_layout`: `128x4` or `8x4`.
    pub tile: ScaleTile,
    /// Experts of a stack; none for a single matrix.
    pub num_experts: Option<usize>,
    /// Rows: output features, or tokens.
    pub size_n: usize,
    /// Blocks of k.
    pub groups: usize,
}

impl SwizzleConfig {
    /// The layout of one matrix.
    ///
    /// # Errors
    /// As [`BlockScaleLayout::new`].
    pub fn layout(&self) -> Result<BlockScaleLayout> {
        BlockScaleLayout::new(self.groups, self.size_n, self.tile, self.scale_type)
    }

    /// How a file stores the scales.
    pub(crate) fn dtype(&self) -> DType {
        match self.scale_type {
            ScalarType::BFLOAT16 => DType::BF16,
            ScalarType::FLOAT8_E8M0FNU => DType::U8,
            _ => DType::F8E4M3,
        }
    }
}

impl Method for SwizzleConfig {
    fn read(r: &Reader<'_>) -> Result<Self, CaseError> {
        let config = Self {
            scale_type: r.name("scale_type", SCALES)?,
            tile: r.name("sf_layout", TILES)?,
            num_experts: r.optional_size("num_experts")?,
            size_n: r.size("size_n")?,
            groups: r.size("groups")?,
        };
        config.layout().map_err(|e| refused(r, "size_n", config.size_n, &e))?;
        Ok(config)
    }

    fn json(&self) -> Value {
        json!({
            "scale_type": self.scale_type.name(), "sf_layout": name_of(TILES, &self.tile),
            "num_experts": self.num_experts, "size_n": self.size_n, "groups": self.groups,
        })
    }

    fn rules(&self) -> Result<Vec<TensorRule>> {
        let [rows, cols] = self.layout()?.packed_shape();
        let lead = self.num_experts.map(is);
        let shape = |dims: [usize; 2]| lead.into_iter().chain(dims.map(is)).collect::<Vec<_>>();
        let dtypes = match self.dtype() {
            DType::U8 => vec![DType::U8, DType::F8E8M0],
            dtype => vec![dtype],
        };
        Ok(vec![
            input("scale", &dtypes, &shape([self.size_n, self.groups])),
            output("swizzled_scale", &dtypes, &shape([rows, cols])),
        ])
    }
}

/// Config of `prepare_static_weights_for_trtllm_mxint4_moe`.
///
/// in: `gemm1_weights` `[E, 2I, H / 8]` and `gemm2_weights` `[E, H, I / 8]` int32, codes with an offset of 8
/// along K; `gemm1_scales` `[E, 2I, H / 32]` and `gemm2_scales` bfloat16. out: the same names, weights
/// as bytes `[E, K / 256, N, 128]`, scales `[E, N · K / 32]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MxInt4Config {
    /// Experts.
    pub num_experts: usize,
    /// H.
    pub hidden_size: usize,
    /// I.
    pub intermediate_size: usize,
}

impl MxInt4Config {
    /// The layout of one projection.
    ///
    /// # Errors
    /// As [`ExpertLayout::mxint4`].
    pub fn layout(&self, projection: Projection) -> Result<ExpertLayout> {
        ExpertLayout::mxint4(projection, self.hidden_size, self.intermediate_size)
    }

    /// The projections with the prefix of their tensors.
    pub(crate) const PROJECTIONS: [(&'static str, Projection); 2] =
        [("gemm1", Projection::W13), ("gemm2", Projection::W2)];
}

impl Method for MxInt4Config {
    fn read(r: &Reader<'_>) -> Result<Self, CaseError> {
        let config = Self {
            num_experts: r.size("num_experts")?,
            hidden_size: r.size("hidden_size")?,
            intermediate_size: r.size("intermediate_size")?,
        };
        config
            .layout(Projection::W13)
            .map_err(|e| refused(r, "hidden_size", config.hidden_size, &e))?;
        Ok(config)
    }

    fn json(&self) -> Value {
        json!({
            "num_experts": self.num_experts, "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
        })
    }

    fn rules(&self) -> Result<Vec<TensorRule>> {
        let e = is(self.num_experts);
        let mut rules = Vec::new();
        for (name, projection) in Self::PROJECTIONS {
            let layout = self.layout(projection)?;
            let (n, k) = (layout.shape().size_n, layout.shape().size_k);
            let (weights, scales) = (format!("{name}_weights"), format!("{name}_scales"));
            let bf16 = [DType::BF16];
            rules.extend([
                input(&weights, I32, &[e, is(n), is(k / 8)]),
                input(&scales, &bf16, &[e, is(n), is(k / 32)]),
                output(&weights, U8, &[e, is(k / 256), is(n), is(128)]),
                output(&scales, &bf16, &[e, is(layout.scales().packed_len())]),
            ]);
        }
        Ok(rules)
    }
}

/// Config of `convert_to_nvfp4_moe_kernel_format`, with what the kernels' class makes of the global
/// scales after it.
///
/// in: `w13_weight` `[E, N, H / 2]` uint8, `w13_weight_scale` `[E, N, H / 16]` e4m3, and as multipliers
/// `w13_weight_scale_2` and `w13_input_scale` `[E, 2]` (one column without a gate); `w2_weight`,
/// `w2_weight_scale`, `w2_weight_scale_2` and `w2_input_scale` `[E, 1]`. out: weights and scales in the
/// kernel's layout, one `_weight_scale_2` and one `_input_scale` for each expert, `g1_alphas`,
/// `g2_alphas`, `g1_scale_c` `[E]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Nvfp4ExpertsConfig {
    /// Kernel, by upstream's name.
    pub backend: Nvfp4Backend,
    /// Experts.
    pub num_experts: usize,
    /// H.
    pub hidden_size: usize,
    /// I.
    pub intermediate_size: usize,
    /// Whether w13 is gate and up.
    pub is_act_and_mul: bool,
}

impl Nvfp4ExpertsConfig {
    /// The layout of one projection.
    ///
    /// # Errors
    /// As [`ExpertLayout::nvfp4`].
    pub fn layout(&self, projection: Projection) -> Result<ExpertLayout> {
        let (h, i) = (self.hidden_size, self.intermediate_size);
        ExpertLayout::nvfp4(self.backend, projection, h, i, self.is_act_and_mul)
    }

    /// Gate and up, or up alone: columns of w13's global scales.
    pub const fn shards(&self) -> usize {
        if self.is_act_and_mul { 2 } else { 1 }
    }

    /// The projections with their prefix and number of shards.
    pub(crate) const fn projections(&self) -> [(&'static str, Projection, usize); 2] {
        [("w13", Projection::W13, self.shards()), ("w2", Projection::W2, 1)]
    }

    /// The factors of the sums.
    pub(crate) const ALPHAS: [&'static str; 3] = ["g1_alphas", "g2_alphas", "g1_scale_c"];
}

impl Method for Nvfp4ExpertsConfig {
    fn read(r: &Reader<'_>) -> Result<Self, CaseError> {
        let config = Self {
            backend: r.name("backend", &Nvfp4Backend::NAMED)?,
            num_experts: r.size("num_experts")?,
            hidden_size: r.size("hidden_size")?,
            intermediate_size: r.size("intermediate_size")?,
            is_act_and_mul: r.flag("is_act_and_mul", true)?,
        };
        for (_, projection, _) in config.projections() {
            let refuse = |e| refused(r, "intermediate_size", config.intermediate_size, &e);
            config.layout(projection).map_err(refuse)?;
        }
        Ok(config)
    }

    fn json(&self) -> Value {
        json!({
            "backend": name_of(&Nvfp4Backend::NAMED, &self.backend),
            "num_experts": self.num_experts, "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size, "is_act_and_mul": self.is_act_and_mul,
        })
    }

    fn rules(&self) -> Result<Vec<TensorRule>> {
        let e = is(self.num_experts);
        let mut rules = Vec::new();
        for (name, projection, shards) in self.projections() {
            let layout = self.layout(projection)?;
            let (n, k) = (layout.shape().size_n, layout.shape().size_k);
            let [rows, bytes] = layout.weights().packed_shape();
            let [scale_rows, scale_cols] = layout.scales().packed_shape();
            let part = |part: &str| format!("{name}_{part}");
            let scales = [DType::F8E4M3];
            rules.extend([
                input(&part("weight"), U8, &[e, is(n), is(k / 2)]),
                input(&part("weight_scale"), &scales, &[e, is(n), is(k / 16)]),
                input(&part("weight_scale_2"), F32, &[e, is(shards)]),
                input(&part("input_scale"), F32, &[e, is(shards)]),
                output(&part("weight"), U8, &[e, is(rows), is(bytes)]),
                output(&part("weight_scale"), E4M3, &[e, is(scale_rows), is(scale_cols)]),
                output(&part("weight_scale_2"), F32, &[e]),
                output(&part("input_scale"), F32, &[e]),
            ]);
        }
        rules.extend(Self::ALPHAS.map(|name| output(name, F32, &[e])));
        Ok(rules)
    }

    fn check(&self, inputs: &Inputs<'_>) -> Result<()> {
        for (name, ..) in self.projections() {
            for part in ["weight_scale_2", "input_scale"] {
                super::super::values::positive(&inputs[&format!("{name}_{part}")])?;
            }
        }
        Ok(())
    }
}
