//! Router logits of a block.

use ndarray::ArrayView2;

use super::widened;
use crate::moe::block::{AfterLogits, Block, Near, apply_stages, logits};
use crate::moe::families::RoutingRule;
use crate::num::tensor::Tensor;
use crate::ops::schema::Inputs;
use crate::{Error, Result};

/// The numbers of a float tensor.
pub(super) fn floats(tensor: &Tensor<'_>) -> Result<Vec<f64>> {
    Ok(widened(tensor)?.0.into_iter().map(f64::from).collect())
}

/// Logits of the shared experts `[M, shared_experts]`, whose rows of the router's weight are last.
pub(super) fn shared_logits(
    inputs: &Inputs<'_>,
    block: &Block,
    routing: &RoutingRule,
) -> Result<Vec<Near>> {
    let missing = |name: &str| Error::missing(format!("in.{name}"), "logits of shared experts");
    let x = floats(inputs.get("hidden_states").ok_or_else(|| missing("hidden_states"))?)?;
    let weight = inputs.get("router_weight").ok_or_else(|| missing("router_weight"))?;
    let ([rows, width], values) = (weight.dims2()?, floats(weight)?);
    let first = rows.saturating_sub(routing.shared_experts);
    let weight = ArrayView2::from_shape((rows - first, width), &values[first * width..])
        .expect("the rule fixes the shape");
    let all = x.chunks_exact(block.hidden_size).flat_map(|x| {
        let x = router_input(inputs, block, x);
        logits(&x, weight, None, after_logits(block), block.dtype.scalar())
    });
    Ok(all.collect())
}

pub(super) fn after_logits(block: &Block) -> AfterLogits {
    AfterLogits { multiplier: block.logit_multiplier, softcap: block.logit_softcap }
}

/// The router's input of one token.
pub(super) fn router_input(inputs: &Inputs<'_>, block: &Block, x: &[f64]) -> Vec<Near> {
    let get = |name: &str| inputs.get(name).and_then(|t| floats(t).ok());
    let x = x.iter().map(|&x| Near::point(x)).collect();
    apply_stages(&block.router_input, x, &get, block.dtype.scalar())
}
