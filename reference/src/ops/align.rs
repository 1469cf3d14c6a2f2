//! Expert ids to padded blocks of tokens.

use serde_json::{Value, json};

use crate::Result;
use crate::judge::{Declared, OutputReport};
use crate::layers::{ExpertPlacement, determine_expert_map};
use crate::moe::align::{Absent, Align};
use crate::num::tensor::{DType, Tensor};
use crate::ops::Operation;
use crate::ops::axes::{Axes, Space, shown};
use crate::ops::case::Case;
use crate::ops::draw::Rng;
use crate::ops::quant::keys::{at_most, rank};
use crate::ops::quant::ranks;
use crate::ops::quant::tensors::blocks;
use crate::ops::routing::align;
use crate::ops::schema::{CaseError, Demand, Dim, Inputs, Reader, TensorRule, expert_map, rule};
use crate::ops::tensors::{I32, bytes_of};

/// Config of `moe_align_block_size`.
#[derive(Debug, Clone, PartialEq)]
pub struct AlignConfig {
    /// Tokens per block.
    pub block_size: usize,
    /// Experts of all ranks.
    pub num_experts: usize,
    /// Experts per token.
    pub top_k: usize,
    /// Expert-parallel ranks.
    pub ep_size: usize,
    /// This rank.
    pub ep_rank: usize,
}

impl Operation for AlignConfig {
    fn keys() -> &'static [&'static str] {
        &["block_size", "num_experts", "top_k", "ep_size", "ep_rank"]
    }

    fn read(r: &Reader<'_>) -> Result<Self, CaseError> {
        let (ep_size, ep_rank) = rank(r, "ep_size", "ep_rank")?;
        let (num_experts, top_k) = (r.size("num_experts")?, r.size("top_k")?);
        at_most("ep_size", ep_size, "num_experts", num_experts)?;
        Ok(AlignConfig { block_size: r.size("block_size")?, num_experts, top_k, ep_size, ep_rank })
    }

    /// Every legal combination of [`Operation::axes`].
    fn lattice() -> Result<Vec<Self>> {
        let space = space();
        let all = space.len();
        Ok(space.configs(all))
    }

    fn axes() -> Result<Option<Axes>> {
        Ok(Some(space().axes()))
    }

    fn json(&self) -> Value {
        json!({
            "block_size": self.block_size, "num_experts": self.num_experts, "top_k": self.top_k,
            "ep_size": self.ep_size, "ep_rank": self.ep_rank,
        })
    }

    fn describe(&self) -> String {
        format!("block {} e{} top{}", self.block_size, self.num_experts, self.top_k)
    }

    fn tensors(&self, _experts: usize) -> Result<Vec<TensorRule>> {
        let mut rules = vec![
            rule("in.topk_ids", I32, &[Dim::Any, Dim::Is(self.top_k)]).required(true),
            rule("in.expert_map", I32, &[Dim::Is(self.num_experts)]).required(self.ep_size > 1),
        ];
        rules.extend(blocks());
        Ok(rules)
    }

    fn check_inputs(&self, inputs: &Inputs<'_>) -> Result<()> {
        if let Some(map) = inputs.get("expert_map") {
            expert_map(map, None)?;
        }
        ranks(self.num_experts, self.ep_size, self.ep_rank, inputs)
    }

    fn demands(&self, case: &Case<'_>) -> Result<Vec<Demand>> {
        let entries = case.inputs.get("topk_ids").map_or(0, |t| t.len());
        Ok(Demand::align(case, entries, self.num_experts, self.block_size))
    }

    fn judge(&self, case: &Case<'_>, _declared: &Declared) -> Result<Vec<OutputReport>> {
        let ids = case.input("topk_ids")?.elements::<i32>();
        let map = case.inputs.get("expert_map");
        align::judge(case, &ids, self.num_experts, self.block_size, map)
    }

    fn add_staged_outputs(&self, case: &mut Case<'_>) -> Result<()> {
        let ids = align::skipped(&case.input("topk_ids")?.elements::<i32>());
        let map = case.inputs.get("expert_map").map(|m| m.elements::<i32>().into_owned());
        let align = Align {
            block_size: self.block_size,
            num_experts: self.num_experts,
            expert_map: map.as_deref(),
            absent: Absent::Ignore,
        };
        let aligned = align.run(&ids)?;
        for (name, values) in [
            ("sorted_token_ids", aligned.sorted_token_ids),
            ("expert_ids", aligned.expert_ids),
            ("num_tokens_post_padded", vec![aligned.num_tokens_post_padded]),
        ] {
            let tensor = Tensor::from_vec(name, DType::I32, vec![values.len()], values)?;
            case.add_output(name, tensor);
        }
        Ok(())
    }

    fn draw(&self, case: &mut Case<'static>, rng: &mut Rng) -> Result<()> {
        let rows = rng.pick(&[1, 2, 7, 16, 33, 128]);
        let mut ids = Vec::with_capacity(rows * self.top_k);
        let mut experts: Vec<u32> = (0..self.num_experts as u32).collect();
        // Either all tokens go to the same experts, so that most experts have none, or each token
        // has its own.
        let crowded = rng.chance(1, 4);
        rng.shuffle(&mut experts);
        for _ in 0..rows {
            if !crowded {
                rng.shuffle(&mut experts);
            }
            ids.extend(&experts[..self.top_k]);
        }
        let shape = vec![rows, self.top_k];
        let map = determine_expert_map(
            self.ep_size,
            self.ep_rank,
            self.num_experts,
            ExpertPlacement::Linear,
        )?;
        case.add_input("topk_ids", Tensor::new("", DType::I32, shape, bytes_of(&ids))?);
        if let Some(map) = map.map {
            case.add_input("expert_map", Tensor::from_vec("", DType::I32, vec![map.len()], map)?);
        }
        Ok(())
    }
}

/// The axes. Tokens are drawn with each case.
fn space() -> Space<AlignConfig> {
    let base = AlignConfig { block_size: 8, num_experts: 128, top_k: 1, ep_size: 1, ep_rank: 0 };
    let ranks =
        [(1, 0), (2, 1), (4, 0)].map(|(size, rank)| (format!("{rank}/{size}"), (size, rank)));
    Space::new(base, |_| {})
        .axis("block_size", shown([8, 16, 32, 48, 64]), |c: &mut AlignConfig, &size| {
            c.block_size = size;
        })
        .axis("num_experts", shown([1, 4, 8, 60, 128]), |c, &count| c.num_experts = count)
        .axis("top_k", shown([1, 2, 4, 8]), |c, &count| c.top_k = count)
        .axis("expert_parallel", ranks, |c, &(size, rank)| (c.ep_size, c.ep_rank) = (size, rank))
        .illegal("a token has at most every expert", &["num_experts", "top_k"], |c| {
            c.top_k > c.num_experts
        })
        .illegal("every rank has an expert", &["num_experts", "expert_parallel"], |c| {
            c.ep_size > c.num_experts
        })
}
