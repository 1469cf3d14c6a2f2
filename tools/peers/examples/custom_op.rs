//! A small language model on candle whose Mixture-of-Experts block and output product are
//! marlinspike's layers: `cargo run --release --manifest-path tools/peers/Cargo.toml --example custom_op`.
//!
//! Embedding, norms and residual are candle's.

use candle_core::{D, DType, Device, IndexOp as _, Module as _, Result, Tensor};
use candle_nn::{Embedding, RmsNorm};
use marlinspike::case::{Activation, ActivationRounding, ScoringFunc};
use marlinspike::moe::router;
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::w4a8::Linear;
use marlinspike::w4a8::moe::{Mode, MoeConfig, MoeLayer};
use marlinspike_bench::tile::Tile;
use marlinspike_candle::{DenseLinear, Int4Experts, Int4Linear, MoeBlock, Router};

const VOCABULARY: usize = 256;
const HIDDEN: usize = 128;
const INTERMEDIATE: usize = 256;
const EXPERTS: usize = 8;
const TOP_K: usize = 2;

/// One layer without attention.
struct Model {
    embedding: Embedding,
    norm: RmsNorm,
    mlp: MoeBlock,
    last_norm: RmsNorm,
    lm_head: Int4Linear,
}

impl Model {
    /// Weights drawn at random; those of a converted folder come from
    /// `marlinspike_candle::PackedFolder`.
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
        let experts = Int4Experts::new("mlp.experts", layer)?;
        let gate = DenseLinear::new("mlp.gate", &normal(EXPERTS, HIDDEN)?, None)?;
        let head = packed(Shape::new(HIDDEN, VOCABULARY), 3)?.matrix(0).map_err(wrap)?;
        let ones = || Tensor::ones(HIDDEN, DType::F32, device);
        Ok(Self {
            embedding: Embedding::new(normal(VOCABULARY, HIDDEN)?, HIDDEN),
            norm: RmsNorm::new(ones()?, 1e-6),
            mlp: MoeBlock::new(Router::new(gate), experts)?,
            last_norm: RmsNorm::new(ones()?, 1e-6),
            lm_head: Int4Linear::new("lm_head", Linear::new(head, ActivationRounding::HalfAway)),
        })
    }

    /// Logits `[B, T, VOCABULARY]` of token ids `[B, T]`.
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        let x = self.embedding.forward(ids)?;
        let x = (&x + self.mlp.forward(&self.norm.forward(&x)?)?)?;
        self.lm_head.forward(&self.last_norm.forward(&x)?)
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

    /// Without attention, the logits of a row depend only on its token: the same bits in any batch.
    #[test]
    fn tokens_do_not_depend_on_each_other() {
        let model = Model::new(&Device::Cpu).unwrap();
        let logits = |ids: &[u32]| -> Vec<Vec<f32>> {
            let ids = Tensor::new(ids, &Device::Cpu).unwrap().unsqueeze(0).unwrap();
            model.forward(&ids).unwrap().squeeze(0).unwrap().to_vec2().unwrap()
        };
        let bits = |row: &[f32]| -> Vec<u32> { row.iter().map(|v| v.to_bits()).collect() };
        let all = logits(&[3, 200, 77]);
        for (&id, row) in [3, 200, 77].iter().zip(&all) {
            let alone = logits(&[id]);
            assert_eq!((alone.len(), row.len()), (1, VOCABULARY));
            assert_eq!(bits(&alone[0]), bits(row), "token {id}");
        }
        assert_ne!(bits(&all[0]), bits(&all[1]));
    }
}
