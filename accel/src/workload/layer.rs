//! Expert layers.

use std::collections::BTreeSet;

use marlinspike::case::Activation;
use marlinspike::moe::activation::Definition;
use marlinspike::moe::layer::Layer;
use marlinspike::num::dims::Shape;
use marlinspike::num::scalar::ScalarType;
use marlinspike::vectors::Rng;

use super::{WeightType, activations};
use crate::{
    device::Device,
    error::AccelError,
    memory::Buffer,
    ops::{
        MarlinLayer,
        gemm::{ManyRows, Tiling},
        gemm_w4a8::W4a8Layer,
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

/// How the work of a layer's two products is divided among thread blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerPlans {
    /// For few rows: reading the weights bounds the time.
    Tiled([Tiling; 2]),
    /// For many rows.
    Many([ManyRows; 2]),
}

/// A layer with SiLU, each of whose experts has matrices of its own in memory.
#[derive(Debug)]
pub struct ExpertLayer {
    layer: Timed,
    sizes: Sizes,
}

#[derive(Debug)]
enum Timed {
    /// 16-bit activations.
    Halves(MarlinLayer),
    /// e4m3fn activations, on Hopper.
    Fp8(W4a8Layer),
}

/// One call of a layer, with these experts of its tokens.
type Forward<'a> = Box<dyn FnMut(&Buffer<i32>) -> Result<(), AccelError> + 'a>;

/// Routings of a recording: with few tokens each finds experts that the ones before it did not read.
const ROUTINGS: usize = 16;

impl ExpertLayer {
    /// A layer of random experts for bf16 activations.
    ///
    /// # Errors
    /// As [`Dense::new`](super::Dense::new).
    pub fn new(device: &Device, ty: WeightType, sizes: Sizes) -> Result<Self, AccelError> {
        Self::made(ty, sizes, |layer| MarlinLayer::new(device, layer).map(Timed::Halves))
    }

    /// A layer of random experts of 4-bit codes whose activations are quantized to e4m3fn.
    ///
    /// # Errors
    /// As [`ExpertLayer::new`].
    pub fn with_fp8_rows(
        device: &Device,
        ty: WeightType,
        sizes: Sizes,
    ) -> Result<Self, AccelError> {
        Self::made(ty, sizes, |layer| W4a8Layer::new(device, layer).map(Timed::Fp8))
    }

    fn made(
        ty: WeightType,
        sizes: Sizes,
        upload: impl FnOnce(&Layer<'_>) -> Result<Timed, AccelError>,
    ) -> Result<Self, AccelError> {
        let Sizes { num_experts, top_k, hidden_size: h, intermediate_size: i } = sizes;
        if top_k == 0 || top_k > num_experts {
            return Err(AccelError::Argument {
                operation: "workload",
                what: "top_k",
                found: top_k.to_string(),
                expected: format!("1 to {num_experts} experts"),
            });
        }
        let mut rng = Rng::new(1);
        // The experts' codes are the same; their memory is not.
        let w13 = vec![ty.weight(&mut rng, Shape::new(h, 2 * i))?; num_experts];
        let w2 = vec![ty.weight(&mut rng, Shape::new(i, h))?; num_experts];
        let layer = Layer {
            w13: &w13,
            w2: &w2,
            orders: [None, None],
            num_experts,
            expert_map: None,
            activation: Definition::new(Activation::Silu),
            dtype: ScalarType::BFLOAT16,
            input_dtype: None,
            router_weight_on_input: false,
        };
        Ok(Self { layer: upload(&layer)?, sizes })
    }

    /// Bytes of codes and scales of one expert.
    pub fn bytes_of_expert(&self) -> usize {
        match &self.layer {
            Timed::Halves(layer) => layer.bytes_of_expert(),
            Timed::Fp8(layer) => layer.bytes_of_expert(),
        }
    }

    /// Time of one layer of `size_m` tokens (alignment, `gate_up`, SiLU, `down`, sum), and how many
    /// experts its routing hits: means over the routings of a recording. By the plans that
    /// the crate takes, or with 16-bit activations others.
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
        let mut y = device.zeroed(size_m * h)?;
        let mut forward: Forward<'_> = match &self.layer {
            Timed::Halves(layer) => {
                let mut work = match plans {
                    None => layer.workspace(device, size_m, top_k)?,
                    Some(LayerPlans::Tiled(tilings)) => {
                        layer.workspace_tiled(device, size_m, top_k, tilings)?
                    }
                    Some(LayerPlans::Many(plans)) => {
                        layer.workspace_many_rows(device, size_m, top_k, plans)?
                    }
                };
                Box::new(move |ids| layer.forward(device, &x, ids, &weights, &mut work, &mut y))
            }
            Timed::Fp8(layer) => {
                let mut work = layer.workspace(device, size_m, top_k)?;
                Box::new(move |ids| layer.forward(device, &x, ids, &weights, &mut work, &mut y))
            }
        };
        // Modules are loaded before anything is recorded.
        forward(&ids[0])?;
        let graph = device.record(|| ids.iter().try_for_each(&mut forward))?;
        let times = device.time(&graph, replays)?.each(ROUTINGS);
        Ok((times, hit as f64 / ROUTINGS as f64))
    }
}

/// `top_k` experts for each token, without repetition.
fn routing(rng: &mut Rng, tokens: usize, top_k: usize, experts: usize) -> Vec<i32> {
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
