//! Routing and alignment, by upstream's functions.

use marlinspike::moe::ScoringFunc;
use marlinspike::moe::align::{Absent, Align};
use marlinspike::moe::router::{Groups, Router};
use marlinspike::num::array::rows_of;
use marlinspike::num::scalar::float_type;
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::{Error, Result};
use pyo3::prelude::*;

use crate::arrays::{Input, Output, output};
use crate::error::{Failed, raised};

fn ints(values: Vec<i32>) -> Result<Tensor<'static>> {
    Tensor::from_vec("", DType::I32, vec![values.len()], values)
}

/// Tokens sorted by expert and padded to blocks: `sorted_token_ids`, `expert_ids`,
/// `num_tokens_post_padded`.
#[pyfunction]
pub(crate) fn moe_align_block_size<'py>(
    py: Python<'py>,
    topk_ids: Input<'py>,
    block_size: usize,
    num_experts: usize,
    expert_map: Option<Input<'py>>,
    ignore_invalid_experts: bool,
) -> PyResult<[Output<'py>; 3]> {
    let ids = topk_ids.tensor("topk_ids")?;
    let map = expert_map.as_ref().map(|map| map.tensor("expert_map")).transpose()?;
    let made = py.detach(|| -> Result<_> {
        ids.expect_dtype(&[DType::I32])?;
        let map = match &map {
            None => None,
            Some(map) => Some(map.expect_dtype(&[DType::I32])?.elements::<i32>()),
        };
        let absent = if ignore_invalid_experts { Absent::Ignore } else { Absent::Mark };
        let expert_map = map.as_deref();
        let aligned =
            Align { block_size, num_experts, expert_map, absent }.run(&ids.elements::<i32>())?;
        let length = vec![aligned.num_tokens_post_padded];
        Ok([ints(aligned.sorted_token_ids)?, ints(aligned.expert_ids)?, ints(length)?])
    });
    Ok(made.failed()?.map(|tensor| output(py, tensor)))
}

/// Experts of each token: weights, ids, `token_expert_indices`.
#[pyfunction]
pub(crate) fn topk<'py>(
    py: Python<'py>,
    gating_output: Input<'py>,
    topk: usize,
    renormalize: bool,
    scoring_func: &str,
    groups: Option<(usize, usize)>,
    routed_scaling_factor: f32,
    e_score_correction_bias: Option<Input<'py>>,
) -> PyResult<[Output<'py>; 3]> {
    let logits = gating_output.tensor("gating_output")?;
    let bias = e_score_correction_bias.as_ref().map(|b| b.tensor("e_score_correction_bias"));
    let bias = bias.transpose()?;
    let names: Vec<_> = ScoringFunc::NAMED.iter().map(|(name, _)| *name).collect();
    let scoring = ScoringFunc::NAMED.iter().find(|(name, _)| *name == scoring_func);
    let &(_, scoring) = scoring.ok_or_else(|| {
        raised(format!("scoring_func: found {scoring_func}, expected one of {}", names.join(", ")))
    })?;
    let made = py.detach(|| -> Result<_> {
        let [_, experts] = logits.dims2()?;
        let logits_type = float_type(logits.dtype()).filter(|_| logits.dtype().bytes() > 1);
        let Some(logits_type) = logits_type else {
            return Err(Error::dtype(logits.name(), logits.dtype(), "F32, F16 or BF16"));
        };
        let values: Vec<f32> = match logits.dtype().bytes() {
            2 => logits
                .elements::<u16>()
                .iter()
                .map(|&b| logits_type.to_f64(b.into()) as f32)
                .collect(),
            _ => logits.elements::<f32>().into_owned(),
        };
        let bias = match &bias {
            None => None,
            Some(bias) => Some(bias.expect_dtype(&[DType::F32])?.elements::<f32>()),
        };
        let groups =
            groups.map(|(num_expert_group, topk_group)| Groups { num_expert_group, topk_group });
        let plain = Router::new(scoring, topk, renormalize);
        let router =
            Router { groups, routed_scaling_factor, bias: bias.as_deref(), logits_type, ..plain };
        let routing = router.route(rows_of("gating_output", &values, experts)?)?;
        Ok([
            Tensor::from_array("topk_weights", routing.topk_weights)?,
            Tensor::from_array("topk_ids", routing.topk_ids)?,
            Tensor::from_array("indices", routing.token_expert_indices)?,
        ])
    });
    Ok(made.failed()?.map(|tensor| output(py, tensor)))
}
