//! Statements of a case that must agree with each other though no output depends on all of them.

use super::CaseError;
use super::config::{CaseConfig, ParallelStyle, QuantConfig};
use super::values::Inputs;
use crate::dims::GroupSize;
use crate::tensor::Tensor;
use crate::{Error, Result};

/// Checks `inputs`, whose shapes, types and values are right by themselves.
pub(super) fn check(config: &CaseConfig, inputs: &Inputs<'_>) -> Result<()> {
    if let Some(quant) = config.quant().filter(|q| !q.has_act_order()) {
        for name in ["g_idx", "w13_g_idx", "w2_g_idx"] {
            inputs.get(name).map_or(Ok(()), |g_idx| unordered(quant, g_idx))?;
        }
    }
    match config {
        CaseConfig::Linear(_) => {
            let both = ["a_q", "a_scales"];
            if let [Some(_), None] | [None, Some(_)] = both.map(|name| inputs.get(name)) {
                let absent = both.iter().find(|name| !inputs.contains_key(**name));
                let name = format!("in.{}", absent.unwrap_or(&both[0]));
                return Err(Error::missing(name, "the other half of the quantized activations"));
            }
            Ok(())
        }
        CaseConfig::Moe(c) => ranks(c.num_experts, c.ep_size, c.ep_rank, inputs),
        CaseConfig::Align(c) => ranks(c.num_experts, c.ep_size, c.ep_rank, inputs),
        _ => Ok(()),
    }
}

/// Without act-order, row k is of group k / group_size. A slice of K may begin anywhere.
fn unordered(quant: &QuantConfig, g_idx: &Tensor<'_>) -> Result<()> {
    if quant.tensor_parallel.is_some_and(|tp| tp.style == ParallelStyle::Row) {
        return Ok(());
    }
    let size_k = g_idx.shape().last().copied().unwrap_or(1).max(1);
    let group = |i: usize| match quant.group_size {
        GroupSize::Channel => 0,
        GroupSize::Of(size) => i % size_k / size,
    };
    let values = g_idx.elements::<i32>();
    match (0..values.len()).find(|&i| usize::try_from(values[i]) != Ok(group(i))) {
        None => Ok(()),
        Some(i) => {
            let at = crate::checkpoint::unflatten(g_idx.shape(), i);
            let expected = format!("{}, the row's group without act-order (desc_act)", group(i));
            Err(Error::value(g_idx.name(), &at, values[i], expected))
        }
    }
}

/// The map of an expert-parallel rank holds as many experts as upstream gives that rank.
fn ranks(num_experts: usize, ep_size: usize, ep_rank: usize, inputs: &Inputs<'_>) -> Result<()> {
    if ep_size <= 1 {
        return Ok(());
    }
    let contradiction = |with: &str| {
        let (key, found, with) = ("ep_size".to_owned(), ep_size.to_string(), with.to_owned());
        Err(CaseError::Contradiction { key, found, with }.into())
    };
    let Some(map) = inputs.get("expert_map") else {
        return contradiction("the absence of `in.expert_map`, which every rank has");
    };
    // Which experts is a matter of placement, and of load balancing; how many is not.
    let found = map.elements::<i32>().iter().filter(|&&local| local >= 0).count();
    let expected = num_experts / ep_size + usize::from(ep_rank < num_experts % ep_size);
    if found == expected {
        return Ok(());
    }
    contradiction(&format!(
        "`in.expert_map`, which has {found} experts where rank {ep_rank} has {expected} of \
         {num_experts}"
    ))
}
