//! Expert layers.

use std::collections::BTreeSet;

use marlinspike::case::Activation;
use marlinspike::moe::activation::Definition;
use marlinspike::moe::layer::Layer;
use marlinspike::num::dims::Shape;
use marlinspike::num::scalar::ScalarType;
use marlinspike::vectors::Rng;
use marlinspike::weight::Weight;

use super::{WeightType, activations, fp8::fp8_weight};
use crate::{
    device::Device,
    error::AccelError,
    memory::Buffer,
    ops::{
        MarlinLayer,
        fp8_gemm::{Fp8Layer, Fp8Plan, Fp8Scales, Fp8Sums, Fp8Weight},
        gemm::{ManyRows, Tiling},
        gemm_w4a8::{W4a8Layer, W4a8Plan},
    },
    timing::Times,
};

/// Sizes of an expert layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// Experts.
    pub num_experts: usize,
    /// Experts of a token.
    pub top_k: usize,
    /// H.
    pub hidden_size: usize,
    /// I.
    pub intermediate_size: usize,
}

impl Sizes {
    /// K x N of w13 and w2.
    fn shapes(self) -> Result<[Shape; 2], AccelError> {
        let Self { num_experts, top_k, hidden_size: h, intermediate_size: i } = self;
        if top_k == 0 || top_k > num_experts {
            return Err(AccelError::Argument {
                operation: "workload",
                what: "top_k",
                found: top_k.to_string(),
                expected: format!("1 to {num_experts} experts"),
            });
        }
        Ok([Shape::new(h, 2 * i), Shape::new(i, h)])
    }

    /// The layer with these weights.
    fn layer<'a>(self, w13: &'a [Weight<'a>], w2: &'a [Weight<'a>]) -> Layer<'a> {
        Layer {
            w13,
            w2,
            orders: [None, None],
            num_experts: self.num_experts,
            expert_map: None,
            activation: Definition::new(Activation::Silu),
            dtype: ScalarType::BFLOAT16,
            input_dtype: None,
            router_weight_on_input: false,
        }
    }
}

/// How the work of a layer's two products is divided among thread blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerPlans {
    /// For few rows: reading the weights bounds the time.
    Tiled([Tiling; 2]),
    /// For many rows.
    Many([ManyRows; 2]),
    /// For weights and activations of e4m3fn.
    Fp8([Fp8Plan; 2]),
    /// For weights of 4 bits and activations of e4m3fn.
    W4a8([W4a8Plan; 2]),
}

/// A layer with SiLU, each of whose experts has matrices of its own in memory.
#[derive(Debug)]
pub struct ExpertLayer {
    layer: AnyLayer,
    sizes: Sizes,
}

#[derive(Debug)]
enum AnyLayer {
    Marlin(Box<MarlinLayer>),
    /// Activations are e4m3fn.
    W4a8(Box<W4a8Layer>),
    /// Weights and activations are e4m3fn.
    Fp8(Box<Fp8Layer>),
}

/// A layer's call on ids of experts, into y.
type Forward<'a> = Box<dyn FnMut(&Buffer<i32>, &mut Buffer<u16>) -> Result<(), AccelError> + 'a>;

/// Routings of a recording: with few tokens each finds experts that the ones before it did not read.
const ROUTINGS: usize = 16;

impl ExpertLayer {
    /// A layer of random experts for bf16 activations.
    ///
    /// # Errors
    /// As [`Dense::new`](super::Dense::new).
    pub fn new(device: &Device, ty: WeightType, sizes: Sizes) -> Result<Self, AccelError> {
        Self::of_codes(ty, sizes, |layer| {
            MarlinLayer::new(device, layer).map(|layer| AnyLayer::Marlin(Box::new(layer)))
        })
    }

    /// A layer of random experts of 4-bit codes whose activations are quantized to e4m3fn.
    ///
    /// # Errors
    /// As [`ExpertLayer::new`].
    pub fn w4a8(device: &Device, ty: WeightType, sizes: Sizes) -> Result<Self, AccelError> {
        Self::of_codes(ty, sizes, |layer| {
            W4a8Layer::new(device, layer).map(|layer| AnyLayer::W4a8(Box::new(layer)))
        })
    }

    fn of_codes(
        ty: WeightType,
        sizes: Sizes,
        upload: impl FnOnce(&Layer<'_>) -> Result<AnyLayer, AccelError>,
    ) -> Result<Self, AccelError> {
        let [of_w13, of_w2] = sizes.shapes()?;
        let mut rng = Rng::new(1);
        // The experts' codes are the same; their memory is not.
        let w13 = vec![ty.weight(&mut rng, of_w13)?; sizes.num_experts];
        let w2 = vec![ty.weight(&mut rng, of_w2)?; sizes.num_experts];
        Ok(Self { layer: upload(&sizes.layer(&w13, &w2))?, sizes })
    }

    /// A layer of random experts whose weights and activations are e4m3fn, with such scales and sums.
    ///
    /// # Errors
    /// As [`Fp8Dense::new`](super::Fp8Dense::new).
    pub fn fp8(
        device: &Device,
        (scales, sums): (Fp8Scales, Fp8Sums),
        sizes: Sizes,
    ) -> Result<Self, AccelError> {
        let [w13, w2] = sizes.shapes()?.map(|shape| {
            let expert = [fp8_weight(shape, scales)?];
            Fp8Weight::repeated(device, &expert, sizes.num_experts, ScalarType::BFLOAT16)
        });
        let layer = Fp8Layer::with_weights(device, &sizes.layer(&[], &[]), [w13?, w2?], false)?;
        Ok(Self { layer: AnyLayer::Fp8(Box::new(layer.summed(sums)?)), sizes })
    }

    /// Bytes of codes and scales of one expert.
    pub fn bytes_of_expert(&self) -> usize {
        match &self.layer {
            AnyLayer::Marlin(layer) => layer.bytes_of_expert(),
            AnyLayer::W4a8(layer) => layer.bytes_of_expert(),
            AnyLayer::Fp8(layer) => layer.bytes_of_expert(),
        }
    }

    /// The call on `size_m` tokens.
    fn forward<'a>(
        &'a self,
        device: &'a Device,
        (x, weights): (&'a Buffer<u16>, &'a Buffer<f32>),
        size_m: usize,
        plans: Option<LayerPlans>,
    ) -> Result<Forward<'a>, AccelError> {
        let top_k = self.sizes.top_k;
        // With the workspace that it names, which is of another type for each kind of layer.
        macro_rules! forward {
            ($layer:expr, $work:expr) => {{
                let mut work = $work?;
                Ok(Box::new(move |ids, y| $layer.forward(device, x, ids, weights, &mut work, y)))
            }};
        }
        match (&self.layer, plans) {
            (AnyLayer::Marlin(layer), None) => {
                forward!(layer, layer.workspace(device, size_m, top_k))
            }
            (AnyLayer::Marlin(layer), Some(LayerPlans::Tiled(tilings))) => {
                forward!(layer, layer.workspace_tiled(device, size_m, top_k, tilings))
            }
            (AnyLayer::Marlin(layer), Some(LayerPlans::Many(plans))) => {
                forward!(layer, layer.workspace_many_rows(device, size_m, top_k, plans))
            }
            (AnyLayer::Fp8(layer), None) => {
                forward!(layer, layer.workspace(device, size_m, top_k))
            }
            (AnyLayer::Fp8(layer), Some(LayerPlans::Fp8(plans))) => {
                forward!(layer, layer.workspace_planned(device, size_m, top_k, plans))
            }
            (AnyLayer::W4a8(layer), None) => {
                forward!(layer, layer.workspace(device, size_m, top_k))
            }
            (AnyLayer::W4a8(layer), Some(LayerPlans::W4a8(plans))) => {
                forward!(layer, layer.workspace_planned(device, size_m, top_k, plans))
            }
            (_, Some(plans)) => Err(AccelError::Argument {
                operation: "workload",
                what: "plans",
                found: format!("{plans:?}"),
                expected: "plans of this kind of layer".into(),
            }),
        }
    }

    /// Time of one layer of `size_m` tokens (alignment, `gate_up`, SiLU, `down`, sum), and how many
    /// experts its routing hits: means over the routings of a recording. By the plans that
    /// the crate takes, or others.
    ///
    /// # Errors
    /// Those of the layer; [`AccelError::Driver`].
    pub fn time(
        &self,
        device: &Device,
        size_m: usize,
        plans: Option<LayerPlans>,
        replays: usize,
    ) -> Result<(Times, f64), AccelError> {
        let Sizes { num_experts, top_k, hidden_size: h, .. } = self.sizes;
        let mut rng = Rng::new(size_m as u64);
        let x = device.upload(&activations(&mut rng, size_m * h))?;
        let weights = device.upload(&vec![1.0 / top_k as f32; size_m * top_k])?;
        let mut hit = 0;
        let ids = (0..ROUTINGS)
            .map(|_| {
                let ids = routing(&mut rng, size_m, top_k, num_experts);
                hit += ids.iter().collect::<BTreeSet<_>>().len();
                device.upload(&ids)
            })
            .collect::<Result<Vec<Buffer<i32>>, AccelError>>()?;
        let mut forward = self.forward(device, (&x, &weights), size_m, plans)?;
        let mut y = device.zeroed(size_m * h)?;
        // Modules are loaded before anything is recorded.
        forward(&ids[0], &mut y)?;
        let graph = device.record(|| ids.iter().try_for_each(|ids| forward(ids, &mut y)))?;
        let times = device.time(&graph, replays)?.each(ROUTINGS);
        Ok((times, hit as f64 / ROUTINGS as f64))
    }
}

/// `top_k` experts for each token, without repetition: int32 `[tokens, top_k]`.
pub fn routing(rng: &mut Rng, tokens: usize, top_k: usize, experts: usize) -> Vec<i32> {
    let mut all: Vec<i32> = (0..experts as i32).collect();
    let mut ids = Vec::with_capacity(tokens * top_k);
    for _ in 0..tokens {
        for j in 0..top_k {
            let other = j + rng.below(experts - j);
            all.swap(j, other);
        }
        ids.extend_from_slice(&all[..top_k]);
    }
    ids
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_goes_to_different_experts() {
        let ids = routing(&mut Rng::new(3), 200, 8, 16);
        for token in ids.chunks_exact(8) {
            assert_eq!(token.iter().collect::<BTreeSet<_>>().len(), 8);
            assert!(token.iter().all(|id| (0..16).contains(id)));
        }
        assert_eq!(ids.iter().collect::<BTreeSet<_>>().len(), 16);
    }
}
