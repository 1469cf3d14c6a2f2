//! NVFP4 experts in a kernel's layout, and the factors of their sums.

use serde_json::{Value, json};

use super::interleaving::Interleaving;
use super::projected::{
    Alphas, ExpertBackend, ExpertLayout, Experts, Forgotten, Projected, Projection,
    activation_scales, stack, swap_nibbles,
};
use crate::Result;
use crate::layouts::Layout as _;
use crate::num::scalar::ScalarType;
use crate::num::tensor::{DType, Tensor};
use crate::ops::Operation;
use crate::ops::case::Case;
use crate::ops::computation::{Computation, Defined, Expected, Mistake, ids, known};
use crate::ops::draw::Rng;
use crate::ops::draw::{any_bits, block_scales, positive_values, sizes};
use crate::ops::schema::{CaseError, Inputs, Reader, TensorRule, positive};
use crate::ops::tensors::{E4M3, F32, FLAGS, U8, input, is, name_of, output, refused};

/// Config of `convert_to_nvfp4_moe_kernel_format`, including the factors that the kernels' class
/// then derives from the global scales.
///
/// in: `w13_weight` `[E, N, H / 2]` uint8, `w13_weight_scale` `[E, N, H / 16]` e4m3, and as multipliers
/// `w13_weight_scale_2` and `w13_input_scale` `[E, 2]` (one column without a gate); `w2_weight`,
/// `w2_weight_scale`, `w2_weight_scale_2` and `w2_input_scale` `[E, 1]`. out: weights and scales in the
/// kernel's layout, one `_weight_scale_2` and one `_input_scale` for each expert, `g1_alphas`,
/// `g2_alphas`, `g1_scale_c` `[E]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fp4ExpertsConfig {
    /// Kernel, by upstream's name.
    pub backend: ExpertBackend,
    /// Experts.
    pub num_experts: usize,
    /// H.
    pub hidden_size: usize,
    /// I.
    pub intermediate_size: usize,
    /// Whether w13 holds gate and up.
    pub is_act_and_mul: bool,
}

impl Fp4ExpertsConfig {
    /// The layout of one projection.
    ///
    /// # Errors
    /// As [`ExpertLayout::for_backend`].
    pub fn layout(&self, projection: Projection) -> Result<ExpertLayout> {
        let (h, i) = (self.hidden_size, self.intermediate_size);
        ExpertLayout::for_backend(self.backend, projection, h, i, self.is_act_and_mul)
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

impl Operation for Fp4ExpertsConfig {
    fn keys() -> &'static [&'static str] {
        &["num_experts", "hidden_size", "intermediate_size", "backend", "is_act_and_mul"]
    }

    fn read(r: &Reader<'_>) -> Result<Self, CaseError> {
        let config = Self {
            backend: r.name("backend", &ExpertBackend::NAMED)?,
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
            "backend": name_of(&ExpertBackend::NAMED, &self.backend),
            "num_experts": self.num_experts, "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size, "is_act_and_mul": self.is_act_and_mul,
        })
    }

    fn is_gated(&self) -> Option<bool> {
        Some(self.is_act_and_mul)
    }

    fn tensors(&self, _experts: usize) -> Result<Vec<TensorRule>> {
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

    fn check_inputs(&self, inputs: &Inputs<'_>) -> Result<()> {
        for (name, ..) in self.projections() {
            for part in ["weight_scale_2", "input_scale"] {
                positive(&inputs[&format!("{name}_{part}")])?;
            }
        }
        Ok(())
    }

    /// Every backend, with and without a gate, at sizes with and without padding.
    fn lattice() -> Result<Vec<Self>> {
        let mut all = Vec::new();
        for (_, backend) in ExpertBackend::NAMED {
            for (hidden_size, intermediate_size) in
                [(48, 64), (128, 128), (192, 64), (256, 192), (272, 48)]
            {
                for is_act_and_mul in FLAGS {
                    for num_experts in [1, 3] {
                        let c = Fp4ExpertsConfig {
                            backend,
                            num_experts,
                            hidden_size,
                            intermediate_size,
                            is_act_and_mul,
                        };
                        // Skip sizes that the backend refuses.
                        if c.projections().iter().all(|p| c.layout(p.1).is_ok()) {
                            all.push(c);
                        }
                    }
                }
            }
        }
        Ok(all)
    }

    fn computation(&self, case: &Case<'_>) -> Result<Option<Box<dyn Defined>>> {
        Ok(Some(Box::new(Converted::new(case, self)?)))
    }

    fn mistakes() -> Vec<&'static str> {
        ids::<Converted>()
    }

    fn draw_inputs(&self, case: &mut Case<'static>, rng: &mut Rng) -> Result<()> {
        for rule in case.config.rules(0)? {
            let Some(name) = rule.name.strip_prefix("in.") else { continue };
            let shape = sizes(&rule.shape);
            let tensor = match rule.dtypes[0] {
                DType::F32 => {
                    // Half of the cases give both shards the same global scale.
                    let mut values =
                        positive_values(rng, shape.clone())?.elements::<f32>().into_owned();
                    if rng.chance(1, 2) {
                        values.chunks_mut(self.shards()).for_each(|pair| pair.fill(pair[0]));
                    }
                    Tensor::from_vec("", DType::F32, shape, values)?
                }
                DType::F8E4M3 => block_scales(rng, shape)?,
                dtype => any_bits(rng, dtype, shape)?,
            };
            case.add_input(name, tensor);
        }
        Ok(())
    }
}

/// `convert_to_nvfp4_moe_kernel_format`, and the factors of the sums.
#[derive(Debug, Clone)]
struct Converted {
    /// Whether all experts share the scale of the activations.
    shared: bool,
    gated: bool,
    experts: Experts,
    /// `[expert][shard]` multipliers of w13 and w2.
    scale_2: [Vec<Vec<f32>>; 2],
    /// `[expert][shard]` multipliers of the activations that enter w13 and w2.
    input_scale: [Vec<Vec<f32>>; 2],
    /// Merges the multipliers of two shards; upstream takes the first.
    merged: fn(&[f32]) -> f32,
    alpha: fn(Alphas) -> Alphas,
}

impl Converted {
    fn new(case: &Case<'_>, c: &Fp4ExpertsConfig) -> Result<Self> {
        let mut projections = Vec::new();
        let mut tables: [[Vec<Vec<f32>>; 2]; 2] = Default::default();
        for (i, (name, projection, shards)) in c.projections().into_iter().enumerate() {
            let layout = c.layout(projection)?;
            let (weights, scales) = (format!("{name}_weight"), format!("{name}_weight_scale"));
            let types = (ScalarType::FLOAT4_E2M1F, ScalarType::FLOAT8_E4M3FN, 16);
            let given = stack(case.input(&weights)?, case.input(&scales)?, &layout, types)?;
            let of = |shape: [usize; 2]| vec![c.num_experts, shape[0], shape[1]];
            let shapes = [of(layout.weights().packed_shape()), of(layout.scales().packed_shape())];
            let interleaving = Interleaving::Once;
            projections.push(Projected { weights, scales, layout, given, interleaving, shapes });
            for (part, table) in ["weight_scale_2", "input_scale"].into_iter().zip(&mut tables) {
                let values = case.input(&format!("{name}_{part}"))?.elements::<f32>();
                table[i] = values.chunks(shards).map(<[f32]>::to_vec).collect();
            }
        }
        let [scale_2, input_scale] = tables;
        Ok(Self {
            shared: c.backend.shares_activation_scale(),
            gated: c.is_act_and_mul,
            experts: Experts { projections },
            scale_2,
            input_scale,
            merged: |shards| shards[0],
            alpha: |a| a,
        })
    }
}

impl Computation for Converted {
    fn outputs(&self) -> Result<Vec<Expected>> {
        let mut all = self.experts.outputs()?;
        let experts = [self.scale_2[0].len()];
        let merged = |table: &[Vec<f32>]| table.iter().map(|s| (self.merged)(s)).collect();
        let scale_2: [Vec<f32>; 2] = [merged(&self.scale_2[0]), merged(&self.scale_2[1])];
        let inputs = [
            activation_scales(&self.input_scale[0], self.shared)?,
            activation_scales(&self.input_scale[1], self.shared)?,
        ];
        for (i, name) in ["w13", "w2"].into_iter().enumerate() {
            all.push(Expected::floats(format!("{name}_weight_scale_2"), &experts, &scale_2[i]));
            all.push(Expected::floats(format!("{name}_input_scale"), &experts, &inputs[i]));
        }
        let alphas = Alphas::new([&scale_2[0], &inputs[0], &scale_2[1], &inputs[1]], self.gated)?;
        let Alphas { g1_alphas, g2_alphas, g1_scale_c } = (self.alpha)(alphas);
        let values = [g1_alphas, g2_alphas, g1_scale_c];
        let named = Fp4ExpertsConfig::ALPHAS.into_iter().zip(&values);
        all.extend(named.map(|(name, values)| Expected::floats(name, &experts, values)));
        Ok(all)
    }

    fn mistakes() -> Vec<Mistake<Self>> {
        known! {
            "rows-not-shuffled", "the rows were not shuffled in blocks of 32" =>
                |c| c.experts.each(|p| p.forget(Forgotten::Shuffle));
            "gate-up-swapped", "gate and up are exchanged: the halves of w13 kept their places" =>
                |c| c.experts.each(|p| p.forget(Forgotten::SwapHalves));
            "rows-not-interleaved", "gate and up stand in halves, not in turn" =>
                |c| c.experts.each(|p| p.forget(Forgotten::Interleave));
            "scales-not-shuffled", "the scales are in the checkpoint's order of rows" =>
                |c| c.experts.each(|p| p.forget(Forgotten::RowsOfScales));
            "scales-not-swizzled", "the scales are not interleaved in tiles of 128 x 4" =>
                |c| c.experts.each(|p| p.interleaving = Interleaving::None);
            "scales-swizzled-twice", "the scales were interleaved twice" =>
                |c| c.experts.each(|p| p.interleaving = Interleaving::Twice);
            "nibble-order", "the nibbles of each byte are exchanged: even k in the high nibble" =>
                |c| c.experts.each(|p| p.map_codes(swap_nibbles));
            "global-scale-of-up", "w3's global scale was taken; the kernel is given w1's" =>
                |c| c.merged = |shards| shards[shards.len() - 1];
            "global-scale-largest", "the larger of two global scales was taken, not the first" =>
                |c| c.merged = |shards| shards.iter().copied().fold(0.0, f32::max);
            "global-scale-inverted", "the global scales are divisors where multipliers belong" =>
                |c| c.merged = |shards| 1.0 / shards[0];
            "input-scale-not-shared",
            "the activations' scale is each expert's own; the backend's is shared, or the reverse" =>
                |c| c.shared = !c.shared;
            "input-scale-first", "w1's activation scale was taken, not the largest" =>
                |c| c.input_scale[0].iter_mut().for_each(|shards| shards.truncate(1));
            "alphas-without-input-scale", "the factors lack the activations' global scale" =>
                |c| c.input_scale.iter_mut().flatten().flatten().for_each(|s| *s = 1.0);
            "g1-scale-c-not-divided", "g1_scale_c lacks the reciprocal of w2's activation scale" =>
                |c| c.alpha = |a| Alphas { g1_scale_c: a.g1_alphas.clone(), ..a };
        }
    }
}
