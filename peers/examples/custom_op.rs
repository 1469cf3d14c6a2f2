//! A small language model on candle whose Mixture-of-Experts layer and output product are this
//! project's operators: `cargo run --release --manifest-path peers/Cargo.toml --example custom_op`.
//!
//! Embedding, norms, residual and router are candle's tensors; `Int4Moe` and `Int4Linear` take
//! them and give such.

use std::sync::Arc;

use candle_core::{CustomOp1, CustomOp2, D, Device, IndexOp as _, Module as _, Result, Tensor};
use candle_nn::{Embedding, Linear as Router, RmsNorm};
use marlinspike::case::{Activation, ActivationRounding, ScoringFunc};
use marlinspike::moe::router;
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::w4a8::Linear;
use marlinspike::w4a8::moe::{Mode, MoeConfig, MoeLayer};
use marlinspike_bench::tile::Tile;
use marlinspike_peers::op::{Int4Linear, Int4Moe};

const VOCABULARY: usize = 256;
const HIDDEN: usize = 128;
const INTERMEDIATE: usize = 256;
const EXPERTS: usize = 8;
const TOP_K: usize = 2;

/// One layer. `apply_op1_arc` and `apply_op2_arc` take shared operators.
struct Model {
    embedding: Embedding,
    norm: RmsNorm,
    router: Router,
    moe: Arc<Box<dyn CustomOp2 + Send + Sync>>,
    last_norm: RmsNorm,
    head: Arc<Box<dyn CustomOp1 + Send + Sync>>,
}

impl Model {
    /// Weights drawn at random; a checkpoint's would come through `marlinspike::layouts::kleidi`.
    fn new(device: &Device) -> Result<Self> {
        let normal =
            |rows: usize, columns: usize| Tensor::randn(0f32, 1.0, (rows, columns), device);
        let packed = |shape, seed| Tile::new(shape, GroupSize::Of(32), seed).map_err(wrap);
        let config = MoeConfig {
            num_experts: EXPERTS,
            expert_map: None,
            router: router::Router::new(ScoringFunc::Softmax, TOP_K, true).into(),
            activation: Activation::Silu,
            rounding: ActivationRounding::HalfAway,
            router_weight_on_input: false,
            mode: Mode::Upstream,
        };
        let w13 = packed(Shape::new(HIDDEN, 2 * INTERMEDIATE), 1)?.stack(EXPERTS);
        let w2 = packed(Shape::new(INTERMEDIATE, HIDDEN), 2)?.stack(EXPERTS);
        let layer = MoeLayer::new(w13.map_err(wrap)?, w2.map_err(wrap)?, config).map_err(wrap)?;
        let head = packed(Shape::new(HIDDEN, VOCABULARY), 3)?.matrix(0).map_err(wrap)?;
        let head = Int4Linear::new(Linear::new(head, ActivationRounding::HalfAway));
        let ones = || Tensor::ones(HIDDEN, candle_core::DType::F32, device);
        Ok(Self {
            embedding: Embedding::new(normal(VOCABULARY, HIDDEN)?, HIDDEN),
            norm: RmsNorm::new(ones()?, 1e-6),
            router: Router::new(normal(EXPERTS, HIDDEN)?, None),
            moe: Arc::new(Box::new(Int4Moe::new(layer))),
            last_norm: RmsNorm::new(ones()?, 1e-6),
            head: Arc::new(Box::new(head)),
        })
    }

    /// Logits `[B, T, VOCABULARY]` of token ids `[B, T]`.
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        let x = self.embedding.forward(ids)?;
        let normed = self.norm.forward(&x)?;
        let router_logits = self.router.forward(&normed)?;
        let x = (x + normed.apply_op2_arc(&router_logits, self.moe.clone())?)?;
        self.last_norm.forward(&x)?.apply_op1_arc(self.head.clone())
    }
}

fn wrap(error: marlinspike::Error) -> candle_core::Error {
    candle_core::Error::wrap(error)
}

fn main() -> Result<()> {
    let device = Device::Cpu;
    let model = Model::new(&device)?;
    let mut ids = vec![1u32, 7, 42];
    for _ in 0..8 {
        let logits = model.forward(&Tensor::new(ids.as_slice(), &device)?.unsqueeze(0)?)?;
        let last = logits.i((0, ids.len() - 1))?;
        ids.push(last.argmax(D::Minus1)?.to_scalar()?);
    }
    println!("tokens {ids:?}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Without attention, the logits of a row depend only on its token, in any batch.
    #[test]
    fn tokens_do_not_depend_on_each_other() {
        let model = Model::new(&Device::Cpu).unwrap();
        let logits = |ids: &[u32]| -> Vec<Vec<f32>> {
            let ids = Tensor::new(ids, &Device::Cpu).unwrap().unsqueeze(0).unwrap();
            model.forward(&ids).unwrap().squeeze(0).unwrap().to_vec2().unwrap()
        };
        let all = logits(&[3, 200, 77]);
        for (&id, row) in [3, 200, 77].iter().zip(&all) {
            let alone = logits(&[id]);
            assert_eq!((alone.len(), row.len()), (1, VOCABULARY));
            // candle's product may add in another order for another number of rows.
            let apart = |(a, b): (&f32, &f32)| (a - b).abs() < 0.05 * (1.0 + b.abs());
            assert!(alone[0].iter().zip(row).all(apart), "token {id}");
        }
        assert_ne!(all[0], all[1]);
    }
}
