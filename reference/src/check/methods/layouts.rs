//! mxint4 experts and NVFP4 experts in a kernel's layout.

use super::swizzle::Interleaving;
use super::{Computation, Expected, Form, Mistake, codes, known};
use crate::Result;
use crate::case::{Case, MxInt4Config, Nvfp4ExpertsConfig};
use crate::check::compare::{Elements, Rows};
use crate::dims::GroupSize;
use crate::layout::Layout;
use crate::layout::flashinfer::{Alphas, BlockScaleLayout, ExpertLayout, Forgotten, Nvfp4Backend};
use crate::scalar::ScalarType;
use crate::tensor::{DType, Tensor};
use crate::weight::{Groups, Table, Weight};

/// One projection of a stack, on its way into a kernel's layout.
#[derive(Debug, Clone)]
struct Projected {
    /// Names of the outputs.
    weights: String,
    scales: String,
    layout: ExpertLayout,
    given: Vec<Weight<'static>>,
    interleaving: Interleaving,
    /// Shapes of the outputs.
    shapes: [Vec<usize>; 2],
}

impl Projected {
    fn outputs(&self) -> Result<[Expected; 2]> {
        let packed = self.layout.pack(&self.given)?;
        let (weights, scales) = (self.layout.weights(), self.layout.scales());
        let inner = self.layout.shape();
        let padded = weights.shape();
        let [scale_rows, scale_cols] = scales.packed_shape();
        let elements = match self.interleaving {
            Interleaving::Once => packed.scales.iter_bits().collect(),
            other => {
                let mut all = Elements::new();
                for e in 0..packed.experts {
                    let rows = e * scale_rows..(e + 1) * scale_rows;
                    let table = scales.unpack(&packed.scales.slice_rows(rows)?)?;
                    // In the kernel's order of rows, as the step before the interleaving has it.
                    let order: Vec<usize> = weights.rows().sources();
                    let [groups, size_n] = scales.shape();
                    let plain = BlockScaleLayout::new(groups, size_n, scales.tile(), scales.ty())?;
                    all.extend(other.pack(&plain, &table.gather_columns(&order)?)?);
                }
                all
            }
        };
        let dtype = if scales.ty() == ScalarType::BFLOAT16 { DType::BF16 } else { DType::F8E4M3 };
        let experts = self.given.len();
        let form = |layout: Box<dyn Layout>, matrix, inside, rows, width| Form {
            layout,
            matrix,
            inside,
            rows,
            width,
            experts,
            stacked: true,
        };
        Ok([
            Expected {
                name: self.weights.clone(),
                dtype: DType::U8,
                shape: self.shapes[0].clone(),
                elements: packed.weights.iter().map(|&b| b.into()).collect(),
                form: form(
                    Box::new(weights.clone()),
                    [padded.size_k, padded.size_n],
                    [inner.size_k, inner.size_n],
                    Rows::K,
                    4,
                ),
            },
            Expected {
                name: self.scales.clone(),
                dtype,
                shape: self.shapes[1].clone(),
                elements,
                form: form(
                    Box::new(scales.clone()),
                    [scale_cols, scale_rows],
                    [inner.size_k / self.layout.group_size(), inner.size_n],
                    Rows::Group,
                    scales.ty().storage_bits(),
                ),
            },
        ])
    }

    fn forget(&mut self, step: Forgotten) {
        if let Ok(layout) = self.layout.without(step) {
            self.layout = layout;
        }
    }

    fn map_codes(&mut self, change: impl Fn(u32) -> u32) {
        for weight in &mut self.given {
            let words: Vec<u32> = weight.codes.words().iter().map(|&w| change(w)).collect();
            let (bits, shape) = (weight.codes.bits(), weight.codes.shape());
            if let Ok(codes) = crate::weight::Codes::from_words(bits, shape, words) {
                weight.codes = codes;
            }
        }
    }
}

/// `prepare_static_weights_for_trtllm_mxint4_moe`.
#[derive(Debug, Clone)]
pub(super) struct Experts {
    projections: Vec<Projected>,
}

/// A stack's matrices: codes of 4 bits `[E, N, K / 2]` bytes or words, scales `[E, N, groups]`.
fn stack(
    weights: &Tensor<'_>,
    scales: &Tensor<'_>,
    layout: &ExpertLayout,
    (ty, scale, group): (ScalarType, ScalarType, usize),
) -> Result<Vec<Weight<'static>>> {
    let experts = weights.shape().first().copied().unwrap_or(0);
    let one = |e: usize| {
        let (codes_of, scales_of) = (weights.index0(e)?, scales.index0(e)?);
        Ok(Weight {
            name: codes_of.name().to_owned(),
            ty,
            codes: codes(&codes_of, 4, layout.shape())?,
            scales: Table::from_tensor(&scales_of, scale)?.transposed(),
            zeros: None,
            groups: Groups::Uniform(GroupSize::Of(group)),
            global_scale: None,
            bias: None,
        })
    };
    (0..experts).map(one).collect()
}

impl Experts {
    pub(super) fn mxint4(case: &Case<'_>, c: &MxInt4Config) -> Result<Self> {
        let one = |(name, projection)| {
            let layout = c.layout(projection)?;
            let (weights, scales) = (format!("{name}_weights"), format!("{name}_scales"));
            let types = (ScalarType::UINT4B8, ScalarType::BFLOAT16, 32);
            let given = stack(case.input(&weights)?, case.input(&scales)?, &layout, types)?;
            let shape = layout.shape();
            let shapes = [
                vec![c.num_experts, shape.size_k / 256, shape.size_n, 128],
                vec![c.num_experts, layout.scales().packed_len()],
            ];
            let interleaving = Interleaving::Once;
            Ok(Projected { weights, scales, layout, given, interleaving, shapes })
        };
        let projections = MxInt4Config::PROJECTIONS.into_iter().map(one);
        Ok(Self { projections: projections.collect::<Result<_>>()? })
    }

    fn each(&mut self, change: impl Fn(&mut Projected)) {
        self.projections.iter_mut().for_each(change);
    }
}

impl Computation for Experts {
    fn outputs(&self) -> Result<Vec<Expected>> {
        let both: Vec<_> =
            self.projections.iter().map(Projected::outputs).collect::<Result<_>>()?;
        Ok(both.into_iter().flatten().collect())
    }

    fn mistakes() -> Vec<Mistake<Self>> {
        known! {
            "rows-not-shuffled", "the rows were not shuffled in blocks of 32" =>
                |c| c.each(|p| p.forget(Forgotten::Shuffle));
            "gate-up-swapped", "gate and up are exchanged: the halves of w13 kept their places" =>
                |c| c.each(|p| p.forget(Forgotten::SwapHalves));
            "rows-not-interleaved", "gate and up stand in halves, not in turn" =>
                |c| c.each(|p| p.forget(Forgotten::Interleave));
            "scales-not-shuffled", "the scales are in the checkpoint's order of rows" =>
                |c| c.each(|p| p.forget(Forgotten::RowsOfScales));
            "scales-not-swizzled", "the scales are not interleaved in tiles of 128 x 4" =>
                |c| c.each(|p| p.interleaving = Interleaving::None);
            "scales-swizzled-twice", "the scales were interleaved twice" =>
                |c| c.each(|p| p.interleaving = Interleaving::Twice);
            "not-block-major", "each row's bytes stand together, not in blocks of 128 bytes of k" =>
                |c| c.each(|p| p.forget(Forgotten::Blocks));
            "sign-bit", "the codes kept their offset of 8" =>
                |c| c.each(|p| p.forget(Forgotten::SignBit));
            "nibble-order", "the nibbles of each byte are exchanged: even k in the high nibble" =>
                |c| c.each(|p| p.map_codes(swap_nibbles));
        }
    }
}

fn swap_nibbles(word: u32) -> u32 {
    (word & 0x0f0f_0f0f) << 4 | word >> 4 & 0x0f0f_0f0f
}

/// `convert_to_nvfp4_moe_kernel_format`, and the factors of the sums.
#[derive(Debug, Clone)]
pub(super) struct Nvfp4 {
    backend: Nvfp4Backend,
    gated: bool,
    experts: Experts,
    /// `[expert][shard]` multipliers of w13 and w2.
    scale_2: [Vec<Vec<f32>>; 2],
    /// `[expert][shard]` multipliers of the activations that enter w13 and w2.
    input_scale: [Vec<Vec<f32>>; 2],
    /// What becomes of two shards' multipliers: upstream takes the first.
    merged: fn(&[f32]) -> f32,
    alpha: fn(Alphas) -> Alphas,
}

impl Nvfp4 {
    pub(super) fn new(case: &Case<'_>, c: &Nvfp4ExpertsConfig) -> Result<Self> {
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
            backend: c.backend,
            gated: c.is_act_and_mul,
            experts: Experts { projections },
            scale_2,
            input_scale,
            merged: |shards| shards[0],
            alpha: |a| a,
        })
    }
}

impl Computation for Nvfp4 {
    fn outputs(&self) -> Result<Vec<Expected>> {
        let mut all = self.experts.outputs()?;
        let experts = [self.scale_2[0].len()];
        let merged = |table: &[Vec<f32>]| table.iter().map(|s| (self.merged)(s)).collect();
        let scale_2: [Vec<f32>; 2] = [merged(&self.scale_2[0]), merged(&self.scale_2[1])];
        let inputs = [
            self.backend.activation_scales(&self.input_scale[0])?,
            self.backend.activation_scales(&self.input_scale[1])?,
        ];
        for (i, name) in ["w13", "w2"].into_iter().enumerate() {
            all.push(Expected::floats(format!("{name}_weight_scale_2"), &experts, &scale_2[i]));
            all.push(Expected::floats(format!("{name}_input_scale"), &experts, &inputs[i]));
        }
        let alphas = Alphas::new([&scale_2[0], &inputs[0], &scale_2[1], &inputs[1]], self.gated)?;
        let Alphas { g1_alphas, g2_alphas, g1_scale_c } = (self.alpha)(alphas);
        let values = [g1_alphas, g2_alphas, g1_scale_c];
        let named = Nvfp4ExpertsConfig::ALPHAS.into_iter().zip(&values);
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
                |c| c.backend = match c.backend.shares_activation_scale() {
                    true => Nvfp4Backend::VllmCutlass,
                    false => Nvfp4Backend::FlashInferCutlass,
                };
            "input-scale-first", "w1's activation scale was taken, not the largest" =>
                |c| c.input_scale[0].iter_mut().for_each(|shards| shards.truncate(1));
            "alphas-without-input-scale", "the factors lack the activations' global scale" =>
                |c| c.input_scale.iter_mut().flatten().flatten().for_each(|s| *s = 1.0);
            "g1-scale-c-not-divided", "g1_scale_c lacks the reciprocal of w2's activation scale" =>
                |c| c.alpha = |a| Alphas { g1_scale_c: a.g1_alphas.clone(), ..a };
        }
    }
}
