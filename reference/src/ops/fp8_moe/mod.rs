//! A layer of FP8 weights and activations.

mod carried;
mod config;
mod walk;

pub use config::Fp8LayerConfig;

use crate::Result;
use crate::method::{self, Activations, MethodLayer, Quantizer, Scales};
use crate::moe::layer::Routed;
use crate::moe::{Chain, narrow, widen};
use crate::num::array::{FloatView2, rows_of};
use crate::num::tensor::DType;
use crate::ops::case::Case;
use crate::ops::computation::{Computation, Expected, Mistake, known};
use crate::ops::fp8_blocks::{block_weight, move_scales, scale_values};
use crate::ops::layer_rules::Prescale;
use crate::ops::quantized_moe::{
    QUANTIZED, codes, halves, ignore_map, scales_of_first_expert, swap_halves,
};
use crate::ops::w8a8_fp8::{E4M3_TYPE, fp8_weight, with_promotion, without_promotion};
use crate::products::schedule::ScheduleChoice;
use crate::products::schedule::{Fp8BlockKernel, Fp8Kernel, Schedule};
use crate::quantize::per_token_fp8;
use crate::weight::Weight;

/// `fused_experts_fp8_w8a8`.
#[derive(Debug, Clone)]
struct Fp8Moe {
    config: Fp8LayerConfig,
    x: Vec<u16>,
    topk_ids: Vec<i32>,
    topk_weights: Vec<f32>,
    map: Option<Vec<i32>>,
    /// A shared expert's output.
    shared: Option<Vec<u16>>,
    weights: [Vec<Weight<'static>>; 2],
    quantizers: [Quantizer; 2],
    schedules: [Schedule; 2],
    /// Limit of x; `None` by definition.
    limit: Option<f32>,
}

impl Fp8Moe {
    fn new(case: &Case<'_>, c: &Fp8LayerConfig) -> Result<Self> {
        Self::reading(case, c, Prescale::RoundedWeight)
    }

    /// The layer with this rounding of router weights on x, if they multiply x.
    fn reading(case: &Case<'_>, c: &Fp8LayerConfig, prescale: Prescale) -> Result<Self> {
        let floats = |name: &str| Ok::<_, crate::Error>(scale_values(case.input(name)?));
        let stack = |(name, n, k): (&str, usize, usize)| {
            let (weight, scales) =
                (case.input(&format!("{name}_weight"))?, floats(&format!("{name}_weight_scale"))?);
            let per = scales.len() / c.num_local_experts;
            let one = |e| {
                let scales = &scales[e * per..][..per];
                match c.block {
                    Some(block) => block_weight(&weight.index0(e)?, scales, [n, k], block),
                    None => fp8_weight(&weight.index0(e)?, scales, [n, k]),
                }
            };
            (0..c.num_local_experts).map(one).collect::<Result<Vec<_>>>()
        };
        let [w13, w2] = c.matrices();
        let weights = [stack(w13)?, stack(w2)?];
        let quantizer = |scale: &str| {
            Ok::<_, crate::Error>(match c.block {
                Some(block) => {
                    Quantizer::Fp8GroupBy { size: block.k, rule: c.quantizer, ue8m0: c.use_ue8m0 }
                }
                None if c.per_act_token_quant => Quantizer::Fp8Token,
                None => Quantizer::Fp8Tensor(Some(floats(scale)?[0])),
            })
        };
        let quantizers = [quantizer("w13_input_scale")?, quantizer("w2_input_scale")?];
        let schedule = |choice: &Option<ScheduleChoice>, weights: &[Weight<'_>]| match choice {
            Some(choice) => choice.resolve(weights, c.dtype, E4M3_TYPE),
            None if c.block.is_some() => Schedule::w8a8_fp8_blocks(Fp8BlockKernel::Triton, c.dtype),
            None => Schedule::w8a8_fp8(Fp8Kernel::Triton, c.dtype, false),
        };
        let schedules =
            [schedule(&c.schedule_w13, &weights[0])?, schedule(&c.schedule_w2, &weights[1])?];
        let map = case.inputs.get("expert_map").map(|m| m.elements::<i32>().into_owned());
        let (x, topk_weights) = c.layer.weighted_x(case, prescale)?;
        Ok(Self {
            x,
            shared: c.layer.shared(case)?,
            topk_ids: case.input("topk_ids")?.elements::<i32>().into_owned(),
            topk_weights,
            map,
            weights,
            quantizers,
            schedules,
            limit: None,
            config: c.clone(),
        })
    }

    fn layer(&self) -> MethodLayer<'_> {
        let layer = self.config.of_weights(&self.weights, self.map.as_deref());
        MethodLayer { layer, quantizers: self.quantizers.clone(), w13_multipliers: None }
    }

    /// K of w13 (`which` 0) or w2.
    fn size_k(&self, which: usize) -> usize {
        self.weights[which].first().map_or(1, |w| w.shape().size_k)
    }

    /// Quantizes `rows` for w13 (`which` 0: a row per token) or w2 (1: a row per slot). Rows with an
    /// infinity or NaN are quantized as the operators do.
    fn quantize(&self, which: usize, rows: &[u16]) -> Result<Activations> {
        let (size_k, dtype) = (self.size_k(which), self.config.dtype);
        let experts = vec![None; rows.len() / size_k];
        let values = FloatView2::from_rows("activations", dtype, size_k, rows)?;
        let mut made = self.quantizers[which].quantize(values, &experts)?;
        let floats: Vec<f32> = rows.iter().map(|&bits| widen(dtype, bits)).collect();
        for (row, x) in floats.chunks_exact(size_k).enumerate() {
            if !x.iter().all(|v| v.is_finite()) {
                self.quantize_broken(which, x, row, &mut made)?;
            }
        }
        Ok(made)
    }

    /// Quantizes row `row` of `made`, whose values `x` are not all finite.
    fn quantize_broken(
        &self,
        which: usize,
        x: &[f32],
        row: usize,
        made: &mut Activations,
    ) -> Result<()> {
        let size_k = x.len();
        let (codes, scales) = match &self.quantizers[which] {
            Quantizer::Fp8Token => {
                per_token_fp8(rows_of("activations", x, size_k)?, None)?.into_vecs()
            }
            Quantizer::Fp8GroupBy { size, rule, ue8m0 } => {
                let groups = x.chunks(*size).map(|x| rule.operations().of_group(x, *ue8m0));
                let (scales, codes): (Vec<f32>, Vec<_>) = groups.unzip();
                (codes.concat(), scales)
            }
            // A static scale is given, and the method saturates under it.
            _ => return Ok(()),
        };
        let codes = codes.iter().map(|code| u32::from(code.to_bits()));
        made.codes[row * size_k..][..size_k]
            .iter_mut()
            .zip(codes)
            .for_each(|(to, code)| *to = code);
        if let Scales::Row(all) | Scales::Group { values: all, .. } = &mut made.scales {
            all[row * scales.len()..][..scales.len()].copy_from_slice(&scales);
        }
        Ok(())
    }

    /// Moves the scales of the blocks of every weight ([`move_scales`]).
    fn move_scales(&mut self, from: fn([usize; 2], [usize; 2]) -> [usize; 2]) {
        let block = self.config.block;
        self.weights.iter_mut().flatten().for_each(|w| move_scales(w, block, from));
    }

    fn routed(&self) -> Routed<'_> {
        let (topk_ids, topk_weights) = (&self.topk_ids, &self.topk_weights);
        Routed { top_k: self.config.top_k, topk_ids, topk_weights }
    }

    /// The product of quantized rows, one for each slot, with w13 (`which` 0) or w2.
    fn product<'p>(
        &'p self,
        engine: &'p MethodLayer<'p>,
        (which, rows): (usize, &'p Activations),
        experts: &'p [Option<usize>],
    ) -> method::Product<'p> {
        let product = engine.product(which, rows, experts, self.routed());
        let on_x = self.config.rules.router_weight_on_x;
        method::Product { router_weights: product.router_weights.filter(|_| !on_x), ..product }
    }

    fn quantized(&self, which: usize, rows: &Activations) -> [Expected; 2] {
        let shape = self.config.activation_scales(rows.rows(), rows.size_k);
        // A case has at least one row.
        let scales = &scales(rows)[..shape.iter().product()];
        let codes = codes(which, DType::F8E4M3, rows.size_k, &rows.codes);
        [codes, Expected::floats(QUANTIZED[which][1], &shape, scales)]
    }

    fn half(&self, name: &str, cols: usize, values: &[u16]) -> Expected {
        let elements = values.iter().map(|&b| b.into()).collect();
        halves(name, self.config.dtype, cols, elements)
    }

    /// x after the limit.
    fn limited(&self) -> Vec<u16> {
        let Some(limit) = self.limit else { return self.x.clone() };
        let dtype = self.config.dtype;
        let clamp = |&bits: &u16| {
            let value = widen(dtype, bits).clamp(-limit, limit);
            narrow(dtype, value)
        };
        self.x.iter().map(clamp).collect()
    }
}

impl Computation for Fp8Moe {
    fn outputs(&self) -> Result<Vec<Expected>> {
        let c = &self.config;
        let x = self.limited();
        let engine = self.layer();
        engine.layer.validate()?;
        let experts = engine.layer.local_experts(self.routed())?;
        let execute = |which: usize, rows: &Activations| {
            self.product(&engine, (which, rows), &experts).execute_bits(&self.schedules[which])
        };
        let a1q = self.quantize(0, &x)?;
        let gate_up = execute(0, &a1q.to_slots(c.slots_of_x()))?;
        let activated = engine.layer.activate_bits(&gate_up, Chain::Canonical)?;
        let a2q = self.quantize(1, &activated)?;
        let down = execute(1, &a2q)?;
        let y = c.layer.sum(&down, self.shared.as_deref())?;
        let mut all: Vec<Expected> = self.quantized(0, &a1q).into();
        all.push(self.half("gate_up", c.w13_size_n(), &gate_up));
        all.push(self.half("activated", c.intermediate_size, &activated));
        all.extend(self.quantized(1, &a2q));
        all.push(self.half("down", c.hidden_size, &down));
        all.push(self.half("y", c.hidden_size, &y));
        Ok(all)
    }

    fn mistakes() -> Vec<Mistake<Self>> {
        known! {
            "promotion-missing", "sums were not promoted to f32, where the schedule does" =>
                |c| c.schedules.iter_mut().for_each(without_promotion);
            "promotion-added", "sums were promoted to f32, where the schedule does not" =>
                |c| c.schedules.iter_mut().for_each(with_promotion);
            "activation-scales-exchanged", "the static scales of both products are exchanged" =>
                |c| c.quantizers.reverse();
            "activation-scale-inverted", "x was multiplied by the static scale and not divided" =>
                |c| for quantizer in &mut c.quantizers {
                    if let Quantizer::Fp8Tensor(Some(scale)) = quantizer {
                        *scale = 1.0 / *scale;
                    }
                };
            "weight-scale-of-first-expert", "the first expert's scales were taken for all" => |c| scales_of_first_expert(&mut c.weights);
            "weight-scale-transposed", "the weights' scales [blocks of N, blocks of K] were read as \
                [blocks of K, blocks of N]" =>
                |c| c.move_scales(|[b, g], [blocks, groups]| {
                    let at = g * blocks + b;
                    [at / groups, at % groups]
                });
            "weight-scale-of-first-group",
            "the scales of the first block of k were taken for all blocks of the weights" =>
                |c| c.move_scales(|[b, _], _| [b, 0]);
            "weight-scale-of-next-block", "each block of N was multiplied by the next one's scales" =>
                |c| c.move_scales(|[b, g], [blocks, _]| [(b + 1) % blocks, g]);
            "scales-of-gate-up-swapped", "gate was multiplied by the scales of up, and up by gate's" =>
                |c| for weight in &mut c.weights[0] {
                    move_scales(weight, c.config.block, |[b, g], [blocks, _]| {
                        [(b + blocks / 2) % blocks, g]
                    });
                };
            "ue8m0-rounding-other", "the activations' scales were rounded up to powers of two where \
                they should not, or the reverse" =>
                |c| for quantizer in &mut c.quantizers {
                    if let Quantizer::Fp8GroupBy { ue8m0, .. } = quantizer {
                        *ue8m0 ^= true;
                    }
                };
            "gate-up-swapped", "gate and up halves of w13 are exchanged" => |c| swap_halves(&mut c.weights[0]);
            "router-weight-missing", "router weights were not applied" =>
                |c| c.topk_weights.fill(1.0);
            "router-weight-on-the-other-side",
            "router weights multiply the other product than the config says" =>
                |c| c.config.layer.apply_router_weight_on_input ^= true;
            "expert-map-ignored", "global expert ids were used as this rank's" => |c| {
                let local = c.config.num_local_experts;
                if ignore_map(&mut c.map, &mut c.topk_ids, local) {
                    c.config.layer.num_experts = local;
                }
            };
            "e4m3-saturates-early", "activations were limited to 240 scales, not to 448" =>
                |c| if let Quantizer::Fp8Tensor(Some(scale)) = c.quantizers[0] {
                    c.limit = Some(240.0 * scale);
                };
        }
    }
}

/// The scales of each row.
fn scales(rows: &Activations) -> &[f32] {
    match &rows.scales {
        Scales::Row(values) | Scales::Group { values, .. } => values,
        Scales::None => &[],
    }
}
